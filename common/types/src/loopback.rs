//! Recognizes hosts that name this machine.

use std::net::IpAddr;

/// Returns whether a host is `localhost` or a loopback address. An IPv6 address may have brackets.
pub fn is_loopback(host: &str) -> bool {
    let address: Result<IpAddr, _> = host.trim_matches(['[', ']']).parse();
    host.eq_ignore_ascii_case("localhost") || address.is_ok_and(|address| address.is_loopback())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_this_machine_is_loopback() {
        for host in ["localhost", "LocalHost", "127.1.2.3", "::1", "[::1]"] {
            assert!(is_loopback(host), "{host}");
        }
        for host in ["", "localhost.example.org", "0.0.0.0", "192.0.2.1", "::"] {
            assert!(!is_loopback(host), "{host}");
        }
    }
}
