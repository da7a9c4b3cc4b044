//! Parses the URL of an API server or a proxy. Accepts less than the URL standard: all clients must read the same
//! host from one text.

use std::net::Ipv6Addr;

use super::address;

const URL_MAX_LENGTH: usize = 2048;

/// Host and port of a URL.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Authority {
    /// In lower case. An IPv6 address has no brackets.
    pub host: String,
    pub port: u16,
}

/// A checked URL.
pub(super) struct CheckedUrl {
    /// The URL with its scheme in lower case.
    pub(super) text: String,
    pub(super) authority: Authority,
    pub(super) has_port: bool,
    pub(super) has_path: bool,
}

/// Checks the URL of an API server. The error is the problem.
pub(super) fn parse_server(url: &str) -> Result<CheckedUrl, &'static str> {
    parse_with_scheme("https", 443, url).unwrap_or(Err(
        "must start with https://: credentials never travel in clear",
    ))
}

/// Checks the URL of a proxy. The error is the problem.
pub(super) fn parse_proxy(url: &str) -> Result<CheckedUrl, &'static str> {
    // The hub could not verify an HTTPS proxy: its client has one CA for both, which is the cluster's CA. The
    // tunneled traffic is encrypted anyway.
    let schemes = [("http", 80), ("socks5", 1080)];
    let proxy = schemes
        .into_iter()
        .find_map(|(scheme, port)| parse_with_scheme(scheme, port, url))
        .unwrap_or(Err("must start with http:// or socks5://"))?;
    if !proxy.has_port {
        return Err("must contain a port: hub and Helm have different defaults");
    }
    if proxy.has_path {
        return Err("must end after its port");
    }
    Ok(proxy)
}

/// Returns `None` if the URL has another scheme.
fn parse_with_scheme(
    scheme: &str,
    default_port: u16,
    url: &str,
) -> Option<Result<CheckedUrl, &'static str>> {
    let (actual, rest) = url.split_once("://")?;
    actual
        .eq_ignore_ascii_case(scheme)
        .then(|| parse_after_scheme(scheme, default_port, rest))
}

fn parse_after_scheme(
    scheme: &str,
    default_port: u16,
    rest: &str,
) -> Result<CheckedUrl, &'static str> {
    if rest.len() > URL_MAX_LENGTH {
        return Err("is too long for a URL");
    }
    let authority = rest.split(['/', '?', '#', '\\']).next().unwrap_or_default();
    if authority.contains('@') {
        return Err("has a user name or password: put credentials under users");
    }
    let is_legal = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~%:/[]".contains(&byte);
    if !rest.bytes().all(is_legal) {
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
    if !authority.starts_with('[') {
        if !is_host(host) {
            return Err("has no valid host name");
        }
        if address::is_ambiguous_number(host) {
            return Err("has a number for a host: write the address plainly, as in 10.0.0.1");
        }
    }
    let explicit_port = match port {
        None => None,
        Some(port) => Some(parse_port(port).ok_or("has no valid port: 1 to 65535")?),
    };
    Ok(CheckedUrl {
        text: format!("{scheme}://{rest}"),
        authority: Authority {
            host: host.to_ascii_lowercase(),
            port: explicit_port.unwrap_or(default_port),
        },
        has_port: explicit_port.is_some(),
        has_path: authority.len() < rest.len(),
    })
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

fn parse_port(port: &str) -> Option<u16> {
    // `parse` alone would accept a plus sign.
    let is_numeric = port.bytes().all(|byte| byte.is_ascii_digit());
    port.parse().ok().filter(|port| is_numeric && *port > 0)
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
            assert_eq!(parse_server(url).unwrap().text, url);
        }
        assert_eq!(parse_server("HTTPS://A:1").unwrap().text, "https://A:1");
    }

    #[test]
    fn parsed_host_and_port_match_connection_target() {
        for (url, host, port) in [
            ("https://10.0.0.1", "10.0.0.1", 443),
            (
                "https://Edge-1.example.org.:6443/path:1",
                "edge-1.example.org.",
                6443,
            ),
            ("https://[FD00::1]:1/", "fd00::1", 1),
        ] {
            let authority = Authority {
                host: host.to_owned(),
                port,
            };
            assert_eq!(parse_server(url).unwrap().authority, authority);
        }
    }

    #[test]
    fn proxy_url_allows_only_scheme_host_and_port() {
        for url in [
            "http://proxy.example.org:3128",
            "http://10.0.0.1:80",
            "socks5://[fd00::1]:1080",
        ] {
            assert_eq!(parse_proxy(url).unwrap().text, url);
        }
        for (url, problem) in [
            ("socks5h://proxy:1080", "must start with"),
            ("https://proxy:443", "must start with"),
            ("socks4://proxy:1080", "must start with"),
            ("proxy:3128", "must start with"),
            ("file:///etc/passwd", "must start with"),
            ("http://user:pw@proxy:3128", "user name"),
            ("http://proxy", "must contain a port"),
            ("http://proxy:0", "port"),
            ("http://proxy:3128/", "must end after its port"),
            ("http://0x7f.1:3128", "plainly"),
        ] {
            let error = parse_proxy(url).err().unwrap();
            assert!(error.contains(problem), "{url}: {error}");
        }
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
            ("https://2130706433", "plainly"),
            ("https://0x7f.1:6443", "plainly"),
            ("https://127.1", "plainly"),
            ("https://0177.0.0.1/", "plainly"),
            ("https://10.0.0.1.:6443", "plainly"),
        ] {
            let error = parse_server(url).err().unwrap();
            assert!(error.contains(problem), "{url}: {error}");
        }
        assert!(parse_server(&format!("https://h/{}", "a".repeat(3000))).is_err());
    }
}
