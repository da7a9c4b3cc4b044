//! The URL of an apiserver. Narrower than a URL may be, so that no two clients can read two hosts
//! out of one text.

use std::net::Ipv6Addr;

const SCHEME: &str = "https://";
const LENGTH_MAX: usize = 2048;

/// The URL with its scheme in lower case, or what is wrong with it.
pub(super) fn checked(url: &str) -> Result<String, &'static str> {
    let rest = url
        .split_at_checked(SCHEME.len())
        .filter(|(scheme, _)| scheme.eq_ignore_ascii_case(SCHEME))
        .map(|(_, rest)| rest)
        .ok_or("must start with https://: credentials never travel in clear")?;
    if url.len() > LENGTH_MAX {
        return Err("is too long for a URL");
    }
    let authority = rest.split(['/', '?', '#', '\\']).next().unwrap_or_default();
    if authority.contains('@') {
        return Err("has a user name or password: put credentials under users");
    }
    let legal = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~%:/[]".contains(&byte);
    if !rest.bytes().all(legal) {
        return Err("has a character that a server URL cannot have (query and fragment included)");
    }

    let (host, port) = match authority.strip_prefix('[') {
        Some(bracketed) => {
            let (address, port) = bracketed
                .split_once(']')
                .ok_or("has an IPv6 address without its ]")?;
            address
                .parse::<Ipv6Addr>()
                .map_err(|_| "has no valid IPv6 address in its brackets")?;
            let port = match port.strip_prefix(':') {
                None if port.is_empty() => None,
                None => return Err("has something other than a port after its ]"),
                port => port,
            };
            (address, port)
        }
        None => match authority.split_once(':') {
            Some((host, port)) => (host, Some(port)),
            None => (authority, None),
        },
    };
    if host.is_empty() {
        return Err("has no host");
    }
    if !authority.starts_with('[') && !is_host(host) {
        return Err("has no valid host name");
    }
    if port.is_some_and(|port| !is_port(port)) {
        return Err("has no valid port: 1 to 65535");
    }
    Ok(format!("{SCHEME}{rest}"))
}

fn is_host(host: &str) -> bool {
    host.len() <= 253
        && host
            .strip_suffix('.')
            .unwrap_or(host)
            .split('.')
            .all(|label| {
                !label.is_empty()
                    && label.len() <= 63
                    && !label.starts_with('-')
                    && !label.ends_with('-')
                    && label
                        .bytes()
                        .all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_'))
            })
}

fn is_port(port: &str) -> bool {
    // `parse` alone would take a plus sign.
    port.bytes().all(|byte| byte.is_ascii_digit()) && port.parse::<u16>().is_ok_and(|port| port > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_of_apiservers_are_taken_as_they_are() {
        for url in [
            "https://10.0.0.1:6443",
            "https://edge-1.example.org",
            "https://edge-1.example.org./",
            "https://kamaji-tcp.tenants.svc:6443",
            "https://[fd00::1]:6443",
            "https://[::1]",
            "https://rancher.example.org/k8s/clusters/c-m-abc123",
            "https://host_a:1/%20~",
        ] {
            assert_eq!(checked(url).as_deref(), Ok(url));
        }
        assert_eq!(checked("HTTPS://A:1").as_deref(), Ok("https://A:1"));
    }

    #[test]
    fn everything_else_is_refused_with_its_reason() {
        for (url, problem) in [
            ("http://10.0.0.1:8080", "https://"),
            ("10.0.0.1:6443", "https://"),
            ("unix:///var/run/x.sock", "https://"),
            ("https:/x", "https://"),
            ("ht€€€€€", "https://"),
            ("https://user:pw@host", "user name"),
            ("https://user@host:6443/path", "user name"),
            ("https://good\\@evil", "character"),
            ("https://good/@evil", "character"),
            ("https://host/?a=b", "character"),
            ("https://host#f", "character"),
            ("https://ho st", "character"),
            ("https://hö.st", "character"),
            ("https://host\r\nX-Y:z", "character"),
            ("https://", "no host"),
            ("https:///path", "no host"),
            ("https://:6443", "no host"),
            ("https://-a", "host name"),
            ("https://a..b", "host name"),
            ("https://a%2eb", "host name"),
            ("https://a]b", "host name"),
            ("https://host:0", "port"),
            ("https://host:", "port"),
            ("https://host:65536", "port"),
            ("https://host:1:2", "port"),
            ("https://[::1", "]"),
            ("https://[::1]x", "]"),
            ("https://[nonsense]:1", "IPv6"),
            ("https://[fe80::1%25eth0]", "IPv6"),
            ("https://[::1]:0", "port"),
        ] {
            let found = checked(url).unwrap_err();
            assert!(found.contains(problem), "{url}: {found}");
        }
        assert!(checked(&format!("https://h/{}", "a".repeat(3000))).is_err());
    }
}
