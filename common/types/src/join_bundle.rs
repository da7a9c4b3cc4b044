//! The join bundle: the data with which an agent finds the hub, verifies it and enrolls once. `kubectl krypton join`
//! prints it as YAML.

use jiff::Timestamp;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use serde::{Deserialize, Serialize};
use thiserror::Error;
use zeroize::Zeroize;

use crate::fingerprint::is_hex;
use crate::spiffe::is_member_name;

/// Size limit. A real bundle has a few kilobytes.
pub const BUNDLE_MAX_BYTES: usize = 64 * 1024;

/// Content of the YAML document.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct JoinBundle {
    /// Name of the member in the fleet.
    pub cluster: String,
    /// `host:port` of the hub. The agent tries the addresses in turn.
    pub addresses: Vec<String>,
    /// PEM of the hub's roots.
    pub certificate_authority: String,
    pub token: String,
    /// Expiry of the token, for users. The hub has its own record.
    pub expires: Timestamp,
}

impl Drop for JoinBundle {
    fn drop(&mut self) {
        self.token.zeroize();
    }
}

impl std::fmt::Debug for JoinBundle {
    /// Omits the token.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("JoinBundle")
            .field("cluster", &self.cluster)
            .field("addresses", &self.addresses)
            .field("expires", &self.expires)
            .finish_non_exhaustive()
    }
}

#[derive(Debug, Error)]
pub enum BundleError {
    #[error(
        "it is larger than {} KiB, so it is not a join bundle; pass the output of 'kubectl krypton join NAME'",
        BUNDLE_MAX_BYTES / 1024
    )]
    TooLarge,
    #[error(
        "it is not a join bundle, or it was cut off (line {line}); write the output of 'kubectl krypton join NAME' to it again"
    )]
    Yaml { line: u64 },
    #[error("its cluster {0:?} is not a cluster name")]
    Cluster(String),
    #[error(
        "it names no address of the hub; start the hub with --advertise=HOST:PORT and join again"
    )]
    NoAddress,
    #[error("its address {0:?} is not HOST:PORT")]
    Address(String),
    #[error(
        "its certificateAuthority holds no PEM certificate; write the output of 'kubectl krypton join NAME' to it again"
    )]
    Authority,
    #[error(
        "its token is empty or cut off; write the output of 'kubectl krypton join NAME' to it again"
    )]
    Token,
}

impl JoinBundle {
    /// Reads and checks a bundle. The error messages continue a sentence that names the file.
    pub fn parse(text: &str) -> Result<Self, BundleError> {
        if text.len() > BUNDLE_MAX_BYTES {
            return Err(BundleError::TooLarge);
        }
        // The parser's message quotes the surrounding lines, one of which is the token.
        let bundle: Self = serde_saphyr::from_str(text).map_err(|error| BundleError::Yaml {
            line: error.location().map_or(0, |location| location.line()),
        })?;
        if !is_member_name(&bundle.cluster) {
            let shown = bundle.cluster.chars().take(80).collect();
            return Err(BundleError::Cluster(shown));
        }
        if bundle.addresses.is_empty() {
            return Err(BundleError::NoAddress);
        }
        for address in &bundle.addresses {
            if split_address(address).is_none() {
                return Err(BundleError::Address(address.chars().take(80).collect()));
            }
        }
        bundle.roots()?;
        if !is_token(&bundle.token) {
            return Err(BundleError::Token);
        }
        Ok(bundle)
    }

    /// Decodes the hub's roots.
    pub fn roots(&self) -> Result<Vec<CertificateDer<'static>>, BundleError> {
        roots_in(&self.certificate_authority)
    }

    /// Serializes the bundle.
    ///
    /// # Errors
    /// Never fails for a bundle that Krypton created.
    pub fn to_yaml(&self) -> Result<String, serde_saphyr::ser::Error> {
        serde_saphyr::to_string(self)
    }
}

/// Decodes the hub's roots in a PEM.
pub fn roots_in(pem: &str) -> Result<Vec<CertificateDer<'static>>, BundleError> {
    let roots: Vec<_> = CertificateDer::pem_slice_iter(pem.as_bytes())
        .collect::<Result<_, _>>()
        .map_err(|_| BundleError::Authority)?;
    if roots.is_empty() {
        return Err(BundleError::Authority);
    }
    Ok(roots)
}

/// Splits `host:port`. Removes the brackets around an IPv6 address.
pub fn split_address(address: &str) -> Option<(&str, u16)> {
    let (host, port) = address.rsplit_once(':')?;
    let port = port.parse().ok().filter(|port| *port != 0)?;
    let host = match host.strip_prefix('[') {
        Some(rest) => rest.strip_suffix(']').filter(|host| host.contains(':'))?,
        None if host.contains(':') => return None,
        None => host,
    };
    let is_valid = !host.is_empty()
        && host
            .chars()
            .all(|c| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | ':' | '_' | '%'));
    is_valid.then_some((host, port))
}

/// Returns whether the text has the form `<16 hex of its name>.<64 hex of its secret>`.
pub fn is_token(token: &str) -> bool {
    token
        .split_once('.')
        .is_some_and(|(name, secret)| is_hex(name, 16) && is_hex(secret, 64))
}

#[cfg(test)]
mod tests {
    use super::*;

    const PEM: &str = "-----BEGIN CERTIFICATE-----\nMAA=\n-----END CERTIFICATE-----\n";

    fn bundle() -> JoinBundle {
        JoinBundle {
            cluster: "edge-1".to_owned(),
            addresses: vec![
                "hub.example.org:7443".to_owned(),
                "[fd00::1]:7443".to_owned(),
            ],
            certificate_authority: PEM.to_owned(),
            token: format!("{}.{}", "a".repeat(16), "0".repeat(64)),
            expires: Timestamp::from_second(1_800_000_000).unwrap(),
        }
    }

    #[test]
    fn join_bundle_round_trips_through_yaml() {
        let yaml = bundle().to_yaml().unwrap();
        assert_eq!(JoinBundle::parse(&yaml).unwrap(), bundle());
    }

    #[test]
    fn truncated_bundle_is_rejected_or_keeps_credentials() {
        let yaml = bundle().to_yaml().unwrap();
        for end in 0..yaml.trim_end().len() {
            let Some(cut) = yaml.get(..end) else { continue };
            // Only a timestamp without its last digits can still be valid.
            if let Ok(bundle_read) = JoinBundle::parse(cut) {
                assert_eq!(bundle_read.token, bundle().token, "cut at {end}");
                assert_eq!(bundle_read.certificate_authority.trim_end(), PEM.trim_end());
            }
        }
    }

    #[test]
    fn each_wrong_part_is_named() {
        let error_after = |change: &dyn Fn(&mut JoinBundle)| {
            let mut wrong = bundle();
            change(&mut wrong);
            JoinBundle::parse(&wrong.to_yaml().unwrap())
                .unwrap_err()
                .to_string()
        };
        let assert_error = |word: &str, change: &dyn Fn(&mut JoinBundle)| {
            let error = error_after(change);
            assert!(error.contains(word), "{word}: {error}");
        };
        assert_error("cluster", &|b| b.cluster = "Edge 1".to_owned());
        assert_error("no address", &|b| b.addresses.clear());
        assert_error("hub:x", &|b| b.addresses = vec!["hub:x".to_owned()]);
        assert_error("https://", &|b| {
            b.addresses = vec!["https://h:1".to_owned()];
        });
        assert_error("certificateAuthority", &|b| {
            b.certificate_authority = "x".to_owned();
        });
        assert_error("token", &|b| b.token.truncate(40));
        assert!(JoinBundle::parse("not: [a bundle").is_err());
        assert!(JoinBundle::parse("").is_err());
        assert!(JoinBundle::parse(&"x".repeat(BUNDLE_MAX_BYTES + 1)).is_err());
    }

    #[test]
    fn a_token_is_not_shown() {
        let broken = format!("{}unknown: x\n", bundle().to_yaml().unwrap());
        let error = JoinBundle::parse(&broken).unwrap_err();
        assert!(matches!(error, BundleError::Yaml { .. }));
        let message = format!("{error:?} {}", crate::error_chain::chain(&error));
        assert!(!message.contains(&"0".repeat(64)), "{message}");
        assert!(!format!("{:?}", bundle()).contains(&"0".repeat(64)));
    }
}
