//! Restricts the addresses that a kubeconfig may lead to. Excluded are the hub's own machine, metadata services, and
//! addresses that every machine of a network answers.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::Policy;

const LOOPBACK: &str = "it points to the hub's own machine; use an address that is the same \
    everywhere, or start the hub with --insecure-kubeconfig-loopback";
const LINK_LOCAL: &str = "it points to a link-local, metadata, multicast or broadcast address; use \
    the cluster's own address, or start the hub with --insecure-kubeconfig-link-local";

/// Addresses of metadata services outside of the link-local ranges: AWS, GCP, Alibaba, Oracle, Azure.
const METADATA: [IpAddr; 5] = [
    IpAddr::V6(Ipv6Addr::new(0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x254)),
    IpAddr::V6(Ipv6Addr::new(0xfd20, 0xce, 0, 0, 0, 0, 0, 0x254)),
    IpAddr::V4(Ipv4Addr::new(100, 100, 100, 200)),
    IpAddr::V4(Ipv4Addr::new(192, 0, 0, 192)),
    IpAddr::V4(Ipv4Addr::new(168, 63, 129, 16)),
];
const METADATA_NAMES: [&str; 4] = [
    "metadata.google.internal",
    "metadata.goog",
    "instance-data.ec2.internal",
    "metadata.azure.internal",
];
/// Names of 127.0.0.1 and ::1 in the hosts file of most systems.
const LOOPBACK_NAMES: [&str; 6] = [
    "localhost",
    "localhost.localdomain",
    "localhost6",
    "localhost6.localdomain6",
    "ip6-localhost",
    "ip6-loopback",
];

#[derive(Clone, Copy, PartialEq, Eq)]
enum AddressZone {
    Loopback,
    LinkLocal,
    Other,
}

/// Returns why the policy rejects this address, with the remedy, or `None` if it allows the address.
///
/// [`super::parse`] checks only the text of a host name. A caller that resolves the name must check each address with
/// this function.
pub fn refused_address(ip: IpAddr, policy: &Policy) -> Option<&'static str> {
    zone_refusal(address_zone(ip), policy)
}

/// Like [`refused_address`], for a host as in a URL, without brackets.
pub(super) fn refused_host(host: &str, policy: &Policy) -> Option<&'static str> {
    let zone = match host.parse() {
        Ok(ip) => address_zone(ip),
        Err(_) => name_zone(host),
    };
    zone_refusal(zone, policy)
}

fn zone_refusal(zone: AddressZone, policy: &Policy) -> Option<&'static str> {
    match zone {
        AddressZone::Loopback if !policy.allow_loopback => Some(LOOPBACK),
        AddressZone::LinkLocal if !policy.allow_link_local => Some(LINK_LOCAL),
        _ => None,
    }
}

/// Returns whether some programs read the host as an IPv4 address in a notation other than `10.0.0.1`. Examples are a
/// single number, hexadecimal or octal parts, omitted parts, and a trailing dot.
pub(super) fn is_ambiguous_number(host: &str) -> bool {
    // The URL standard's test: only the last label matters.
    let last_label = host
        .strip_suffix('.')
        .unwrap_or(host)
        .rsplit('.')
        .next()
        .unwrap_or_default();
    let is_decimal = last_label.bytes().all(|byte| byte.is_ascii_digit());
    let is_hexadecimal = last_label
        .strip_prefix("0x")
        .or_else(|| last_label.strip_prefix("0X"))
        .is_some_and(|digits| digits.bytes().all(|byte| byte.is_ascii_hexdigit()));
    (is_decimal || is_hexadecimal) && host.parse::<Ipv4Addr>().is_err()
}

fn name_zone(host: &str) -> AddressZone {
    let name = host.strip_suffix('.').unwrap_or(host).to_ascii_lowercase();
    if LOOPBACK_NAMES.contains(&name.as_str()) || name.ends_with(".localhost") {
        AddressZone::Loopback
    } else if METADATA_NAMES.contains(&name.as_str()) {
        AddressZone::LinkLocal
    } else {
        AddressZone::Other
    }
}

fn address_zone(ip: IpAddr) -> AddressZone {
    if METADATA.contains(&ip) {
        return AddressZone::LinkLocal;
    }
    match ip {
        IpAddr::V4(ip) => match ip.octets() {
            // All of 0/8 means "this host".
            [127 | 0, ..] => AddressZone::Loopback,
            // 224 to 239 are multicast. 240 to 255 are reserved, including broadcast.
            [169, 254, ..] | [224..=255, ..] => AddressZone::LinkLocal,
            _ => AddressZone::Other,
        },
        IpAddr::V6(ip) if ip.is_loopback() || ip.is_unspecified() => AddressZone::Loopback,
        IpAddr::V6(ip) if ip.is_unicast_link_local() || ip.is_multicast() => AddressZone::LinkLocal,
        IpAddr::V6(ip) => worst_zone(embedded_ipv4(ip)),
    }
}

fn worst_zone(embedded: [Option<Ipv4Addr>; 4]) -> AddressZone {
    let zones = embedded
        .into_iter()
        .flatten()
        .map(|ip| address_zone(ip.into()));
    zones.fold(AddressZone::Other, |worst, zone| match (worst, zone) {
        (AddressZone::Loopback, _) | (_, AddressZone::Other) => worst,
        (_, zone) => zone,
    })
}

/// Returns the IPv4 addresses that an IPv6 address can stand for, for each transition mechanism.
fn embedded_ipv4(ip: Ipv6Addr) -> [Option<Ipv4Addr>; 4] {
    let ipv4 =
        |high: u16, low: u16| Some(Ipv4Addr::from_bits(u32::from(high) << 16 | u32::from(low)));
    let only = |high: u16, low: u16| [ipv4(high, low), None, None, None];
    match ip.segments() {
        // Compatible and mapped (RFC 4291), translated (RFC 2765).
        [0, 0, 0, 0, 0, 0 | 0xffff, high, low] | [0, 0, 0, 0, 0xffff, 0, high, low] => {
            only(high, low)
        }
        // NAT64 (RFC 6052), with the well-known prefix.
        [0x64, 0xff9b, 0, 0, 0, 0, high, low] => only(high, low),
        [0x64, 0xff9b, 1, ..] => nat64_candidates(ip),
        // 6to4 (RFC 3056).
        [0x2002, high, low, ..] => only(high, low),
        // Teredo (RFC 4380): the server's address, and the client's address with inverted bits.
        [0x2001, 0, high, low, _, _, client_high, client_low] => {
            [ipv4(high, low), ipv4(!client_high, !client_low), None, None]
        }
        // ISATAP (RFC 5214).
        [_, _, _, _, 0 | 0x200, 0x5efe, high, low] => only(high, low),
        _ => [None; 4],
    }
}

/// Returns the candidates for a network-specific NAT64 prefix (RFC 8215) of 96, 64, 56 or 48 bits, as the length is
/// unknown. With the shorter prefixes, the address contains an octet of zeros, and zeros follow it (RFC 6052). A
/// candidate that starts with a zero is the padding of a different prefix length.
fn nat64_candidates(ip: Ipv6Addr) -> [Option<Ipv4Addr>; 4] {
    let [.., o6, o7, _, o9, o10, o11, o12, o13, o14, o15] = ip.octets();
    let candidate = |octets: [u8; 4], after: &[u8]| {
        let is_candidate = octets[0] != 0 && after.iter().all(|octet| *octet == 0);
        is_candidate.then(|| Ipv4Addr::from(octets))
    };
    [
        candidate([o12, o13, o14, o15], &[]),
        candidate([o9, o10, o11, o12], &[o13, o14, o15]),
        candidate([o7, o9, o10, o11], &[o12, o13, o14, o15]),
        candidate([o6, o7, o9, o10], &[o11, o12, o13, o14, o15]),
    ]
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn loopback_allowed() -> Policy {
        Policy {
            allow_loopback: true,
            ..Policy::default()
        }
    }

    fn link_local_allowed() -> Policy {
        Policy {
            allow_link_local: true,
            ..Policy::default()
        }
    }

    fn split_words<'a>(lines: &'a [&str]) -> impl Iterator<Item = &'a str> {
        lines.iter().flat_map(|line| line.split(' '))
    }

    /// Checks that only the policy `allowed` lets these hosts through.
    fn check_switch(hosts: &[&str], allowed: &Policy, other: &Policy, switch: &str) {
        for host in split_words(hosts) {
            for policy in [&Policy::default(), other] {
                let remedy = refused_host(host, policy).unwrap_or_default();
                assert!(remedy.contains(switch), "{host}");
            }
            assert_eq!(refused_host(host, allowed), None, "{host}");
        }
    }

    #[test]
    fn loopback_is_rejected_in_every_notation() {
        let hosts = [
            "127.0.0.1 127.255.3.4 0.0.0.0 0.1.2.3 ::1 :: ::ffff:127.0.0.1 ::ffff:7f00:1",
            "::127.0.0.1 ::ffff:0:0 64:ff9b::7f00:1 2002:7f00:1::",
            // Network-specific NAT64, with prefixes of 96, 64, 56 and 48 bits.
            "64:ff9b:1::7f00:1 64:ff9b:1:fffe:7f:0:100:: 64:ff9b:1:ff7f:0:1::",
            "64:ff9b:1:7f00:0:100::",
            // Translated (RFC 2765).
            "::ffff:0:7f00:1",
            // Teredo: the server, and the client.
            "2001:0:7f00:1:: 2001:0:102:304:0:0:80ff:fffe",
            // ISATAP.
            "2001:db8::5efe:7f00:1 2001:db8::200:5efe:7f00:1",
            "localhost LocalHost localhost. a.b.localhost x.LOCALHOST. localhost.localdomain",
            "ip6-localhost",
        ];
        let (allowed, other) = (loopback_allowed(), link_local_allowed());
        check_switch(&hosts, &allowed, &other, "--insecure-kubeconfig-loopback");
    }

    #[test]
    fn link_local_metadata_and_multicast_addresses_are_rejected() {
        let hosts = [
            "169.254.169.254 169.254.0.1 fe80::1 febf:ffff::1 fd00:ec2::254 fd20:ce::254",
            "100.100.100.200 192.0.0.192 168.63.129.16 224.0.0.1 239.255.255.255 240.0.0.1",
            "255.255.255.255 ff02::1 ::ffff:169.254.169.254 ::ffff:100.100.100.200",
            "64:ff9b::a9fe:a9fe 2002:a9fe:a9fe::1 64:ff9b:1::a9fe:a9fe 64:ff9b:1:0:a9:fea9:fe00:0",
            "64:ff9b:1:a9fe:a9:fe00:: 2001:0:a9fe:a9fe:: 2001:0:102:304:0:0:5601:5601",
            "fec0::1:0:5efe:a9fe:a9fe ::ffff:0:a9fe:a9fe metadata.google.internal",
            "Metadata.Google.Internal. metadata.goog",
        ];
        let (allowed, other) = (link_local_allowed(), loopback_allowed());
        check_switch(&hosts, &allowed, &other, "--insecure-kubeconfig-link-local");
    }

    #[test]
    fn addresses_of_clusters_are_let_through() {
        for host in split_words(&[
            "10.0.0.1 172.16.0.1 192.168.1.1 100.64.0.1 100.100.100.201 1.1.1.1 223.255.255.255",
            "128.0.0.1 fd00::1 fec0::1 2001:db8::1 ::ffff:10.0.0.1 64:ff9b::a00:1",
            "64:ff9b:1::a00:1 64:ff9b:1:0:a:0:100:: 64:ff9b:1:a:0:1:: 64:ff9b:1:a00:0:100::",
            "2001:0:102:304:0:0:f5ff:fffe edge-1.example.org localhost.example.org notlocalhost",
            "my-localhost kubernetes.default.svc metadata.example.org",
        ]) {
            assert_eq!(refused_host(host, &Policy::default()), None, "{host}");
        }
    }

    #[test]
    fn ambiguous_numeric_hosts_are_odd() {
        for host in split_words(&[
            "2130706433 0 127.1 127.0.1 0x7f.1 0x7f000001 0X7F.0.0.1 0177.0.0.1 017700000001",
            "127.0.0.1. 10.0.0.1. 10.0.0.01 10.0.0.0x1 10.0.0.256 1.2.3.4.5 a.1 0x",
        ]) {
            assert!(is_ambiguous_number(host), "{host}");
        }
        for host in split_words(&[
            "10.0.0.1 127.0.0.1 1.2.3.4.example.org 10-0-0-1.example.org 0x7f.example 0xg 1a a1",
            "edge.1a",
        ]) {
            assert!(!is_ambiguous_number(host), "{host}");
        }
    }

    proptest! {
        #[test]
        fn embedded_ipv4_is_judged_like_plain_address(bits: u32) {
            let ipv4 = Ipv4Addr::from_bits(bits);
            let [high, low] = [(bits >> 16) as u16, bits as u16];
            for ipv6 in [
                ipv4.to_ipv6_mapped(),
                Ipv6Addr::new(0x64, 0xff9b, 0, 0, 0, 0, high, low),
                Ipv6Addr::new(0x2002, high, low, 0, 0, 0, 0, 1),
                Ipv6Addr::new(0, 0, 0, 0, 0xffff, 0, high, low),
                Ipv6Addr::new(0x2001, 0, 0x102, 0x304, 0, 0, !high, !low),
                Ipv6Addr::new(0xfd00, 0, 0, 1, 0, 0x5efe, high, low),
            ] {
                prop_assert_eq!(
                    refused_address(ipv4.into(), &Policy::default()),
                    refused_address(ipv6.into(), &Policy::default())
                );
            }
        }

        #[test]
        fn dotted_number_is_either_ipv4_or_odd(
            parts in proptest::collection::vec("(0x[0-9a-fA-F]{0,8}|0?[0-9]{1,10})", 1..5),
        ) {
            let host = parts.join(".");
            prop_assert!(host.parse::<Ipv4Addr>().is_ok() != is_ambiguous_number(&host));
        }
    }
}
