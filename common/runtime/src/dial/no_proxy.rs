//! Reads NO_PROXY by the rules of Go's programs, such as kubectl and Helm.

use std::net::IpAddr;

use http::Uri;

/// Hosts that are reached without a proxy.
#[derive(Debug)]
pub(super) struct ExemptHosts(Vec<ExemptHost>);

/// One entry of NO_PROXY. An empty port stands for all ports.
#[derive(Debug)]
enum ExemptHost {
    All,
    Network {
        address: IpAddr,
        prefix_bits: u32,
    },
    Address {
        address: IpAddr,
        port: String,
    },
    Domain {
        /// In lower case.
        name: String,
        /// Whether the name itself is exempt, and not only its subdomains.
        with_itself: bool,
        port: String,
    },
}

impl ExemptHosts {
    /// Reads a list that is separated by commas. Ignores invalid entries.
    pub(super) fn parse(list: &str) -> Self {
        let entries = list.to_lowercase();
        let entries = entries.split(',').map(str::trim);
        Self(entries.filter_map(ExemptHost::parse).collect())
    }

    /// Returns whether the host of this URL with `https://` is exempt.
    pub(super) fn contains(&self, server: &Uri) -> bool {
        let host = server.host().unwrap_or_default().to_lowercase();
        let host = host.trim_matches(['[', ']']);
        let port = server.port_u16().unwrap_or(443).to_string();
        self.0.iter().any(|entry| entry.matches(host, &port))
    }
}

impl ExemptHost {
    fn parse(entry: &str) -> Option<Self> {
        if entry == "*" {
            return Some(Self::All);
        }
        if let Some((address, prefix_bits)) = parse_network(entry) {
            return Some(Self::Network {
                address,
                prefix_bits,
            });
        }
        let (host, port) = split_port(entry);
        let port = port.to_owned();
        if let Ok(address) = host.parse::<IpAddr>() {
            let address = address.to_canonical();
            return Some(Self::Address { address, port });
        }
        let subdomains_of = host.strip_prefix("*.").or(host.strip_prefix('.'));
        (!host.is_empty()).then(|| Self::Domain {
            name: subdomains_of.unwrap_or(host).to_owned(),
            with_itself: subdomains_of.is_none(),
            port,
        })
    }

    fn matches(&self, host: &str, port: &str) -> bool {
        let is_port = |entry_port: &str| entry_port.is_empty() || entry_port == port;
        let ip = host.parse::<IpAddr>().ok().map(|ip| ip.to_canonical());
        match (self, ip) {
            (Self::All, _) => true,
            (
                Self::Network {
                    address,
                    prefix_bits,
                },
                Some(ip),
            ) => is_in_network(ip, *address, *prefix_bits),
            (Self::Address { address, port }, Some(ip)) => *address == ip && is_port(port),
            (
                Self::Domain {
                    name,
                    with_itself,
                    port,
                },
                None,
            ) => {
                let is_name = match host.strip_suffix(name.as_str()) {
                    Some("") => *with_itself,
                    Some(rest) => rest.ends_with('.'),
                    None => false,
                };
                is_name && is_port(port)
            }
            (Self::Network { .. } | Self::Address { .. }, None)
            | (Self::Domain { .. }, Some(_)) => false,
        }
    }
}

/// Reads `ADDRESS/BITS`.
fn parse_network(entry: &str) -> Option<(IpAddr, u32)> {
    let (address, bits) = entry.split_once('/')?;
    let (address, bits): (IpAddr, u32) = (address.parse().ok()?, bits.parse().ok()?);
    let max = if address.is_ipv4() { 32 } else { 128 };
    (bits <= max).then_some((address, bits))
}

/// Splits `HOST:PORT`. An IPv6 address with a port is in brackets. The port is empty if the entry has none.
fn split_port(entry: &str) -> (&str, &str) {
    let parts = match entry.strip_prefix('[') {
        Some(rest) => rest.split_once("]:"),
        None => entry.split_once(':'),
    };
    parts
        .filter(|(_, port)| !port.contains(':'))
        .unwrap_or((entry, ""))
}

fn is_in_network(ip: IpAddr, network: IpAddr, prefix_bits: u32) -> bool {
    match (ip, network) {
        (IpAddr::V4(ip), IpAddr::V4(network)) => {
            let difference = u32::from(ip) ^ u32::from(network);
            difference.leading_zeros() >= prefix_bits
        }
        (IpAddr::V6(ip), IpAddr::V6(network)) => {
            let difference = u128::from(ip) ^ u128::from(network);
            difference.leading_zeros() >= prefix_bits
        }
        (IpAddr::V4(_), IpAddr::V6(_)) | (IpAddr::V6(_), IpAddr::V4(_)) => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_exempt_the_same_hosts_as_in_go() {
        for (list, exempt, others) in [
            (
                "example.org",
                vec!["example.org", "EXAMPLE.org:8443", "a.b.example.org"],
                vec!["notexample.org", "example.org.net", "org"],
            ),
            (
                ".Example.org",
                vec!["a.example.org", "a.b.example.org:8443"],
                vec!["example.org", "aexample.org"],
            ),
            ("*.example.org", vec!["a.example.org"], vec!["example.org"]),
            (
                "example.org:8443, .example.net:443",
                vec!["example.org:8443", "a.example.org:8443", "a.example.net"],
                vec!["example.org", "example.org:18443", "a.example.net:8443"],
            ),
            (
                "10.1.2.3,10.1.2.4:8443,[fd00::1]:8443,fd00::2",
                vec![
                    "10.1.2.3:6443",
                    "10.1.2.4:8443",
                    "[fd00::1]:8443",
                    "[fd00::2]",
                    "[::ffff:10.1.2.3]",
                ],
                vec!["10.1.2.4", "[fd00::1]", "10.1.2.30", "a.10.1.2.3.org"],
            ),
            (
                "10.0.0.0/8,192.168.4.0/22,fd00::/8",
                vec!["10.255.0.1", "192.168.7.1:6443", "[fdff::1]"],
                vec!["11.0.0.1", "192.168.8.1", "[fe80::1]", "10.org"],
            ),
            ("0.0.0.0/0", vec!["8.8.8.8"], vec!["[fd00::1]", "a.org"]),
            ("a, *", vec!["b.org:8443", "10.1.2.3", "[fd00::1]"], vec![]),
            (
                "10.0.0.0/33,, :8443,*example.org,.",
                vec![],
                vec!["10.0.0.0", "example.org:8443", "a.org"],
            ),
        ] {
            let hosts = ExemptHosts::parse(list);
            let is_exempt = |server: &&str| {
                let url = format!("https://{server}/");
                hosts.contains(&url.parse().unwrap())
            };
            assert!(exempt.iter().all(is_exempt), "{list}");
            assert!(!others.iter().any(is_exempt), "{list}");
        }
    }
}
