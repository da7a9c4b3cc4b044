//! Identity in a certificate: its single URI SAN. Other fields have no effect.

use std::fmt;

use thiserror::Error;
use x509_parser::extensions::GeneralName;
use x509_parser::prelude::{FromDer, X509Certificate};

use crate::names::{LABEL_MAX, is_dns_subdomain};

/// Identity that a certificate names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpiffeId {
    pub trust_domain: String,
    pub role: Role,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Role {
    Hub,
    /// The agents of the member with this name.
    Cluster(String),
}

#[derive(Debug, Error)]
pub enum SpiffeError {
    #[error("it is not an X.509 certificate")]
    NotACertificate,
    #[error("it has {0} URI names instead of one")]
    Count(usize),
    #[error("its URI name {0:?} is not one of a hub")]
    Uri(String),
}

impl SpiffeId {
    pub fn hub(trust_domain: &str) -> Self {
        let trust_domain = trust_domain.to_owned();
        Self {
            trust_domain,
            role: Role::Hub,
        }
    }

    pub fn cluster(trust_domain: &str, name: &str) -> Self {
        let trust_domain = trust_domain.to_owned();
        Self {
            trust_domain,
            role: Role::Cluster(name.to_owned()),
        }
    }

    /// Parses exactly `spiffe://<trust domain>/hub` and `spiffe://<trust domain>/cluster/<name>`.
    pub fn parse(uri: &str) -> Option<Self> {
        let (trust_domain, path) = uri.strip_prefix("spiffe://")?.split_once('/')?;
        if !is_trust_domain(trust_domain) {
            return None;
        }
        let role = match path.split_once('/') {
            None if path == "hub" => Role::Hub,
            Some(("cluster", name)) if is_member_name(name) => Role::Cluster(name.to_owned()),
            _ => return None,
        };
        let trust_domain = trust_domain.to_owned();
        Some(Self { trust_domain, role })
    }

    /// Returns the identity in a certificate.
    pub fn from_certificate(der: &[u8]) -> Result<Self, SpiffeError> {
        let (_, certificate) =
            X509Certificate::from_der(der).map_err(|_| SpiffeError::NotACertificate)?;
        let names = certificate
            .subject_alternative_name()
            .map_err(|_| SpiffeError::NotACertificate)?;
        let uris: Vec<&str> = names
            .iter()
            .flat_map(|extension| &extension.value.general_names)
            .filter_map(|name| match name {
                GeneralName::URI(uri) => Some(*uri),
                _ => None,
            })
            .collect();
        let [uri] = uris.as_slice() else {
            return Err(SpiffeError::Count(uris.len()));
        };
        Self::parse(uri).ok_or_else(|| SpiffeError::Uri(uri.chars().take(200).collect()))
    }
}

impl fmt::Display for SpiffeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.role {
            Role::Hub => write!(f, "spiffe://{}/hub", self.trust_domain),
            Role::Cluster(name) => write!(f, "spiffe://{}/cluster/{name}", self.trust_domain),
        }
    }
}

/// Returns whether a member may have this name. The name must be a DNS subdomain of at most 63 characters, as labels
/// and release names contain it.
pub fn is_member_name(name: &str) -> bool {
    name.len() <= LABEL_MAX && is_dns_subdomain(name)
}

fn is_trust_domain(name: &str) -> bool {
    !name.is_empty()
        && name.len() <= 255
        && name
            .chars()
            .all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || matches!(c, '.' | '-' | '_'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spiffe_id_round_trips_through_text() {
        for id in [
            SpiffeId::hub("a.krypton"),
            SpiffeId::cluster("a.krypton", "edge-1"),
        ] {
            assert_eq!(SpiffeId::parse(&id.to_string()), Some(id));
        }
    }

    #[test]
    fn nothing_that_only_resembles_an_identity_is_one() {
        for uri in [
            "",
            "spiffe://",
            "spiffe:///cluster/a",
            "spiffe://td",
            "spiffe://td/",
            "spiffe://td/hub/",
            "spiffe://td/hub/x",
            "spiffe://td/cluster",
            "spiffe://td/cluster/",
            "spiffe://td/cluster/a/",
            "spiffe://td/cluster/a/b",
            "spiffe://td/cluster/A",
            "spiffe://td/cluster/a:x",
            "spiffe://td/cluster/a b",
            "spiffe://td/cluster/a?x",
            "spiffe://td/cluster/..",
            "spiffe://td/cluster//a",
            "SPIFFE://td/cluster/a",
            "spiffe://TD/cluster/a",
            "spiffe://td:1/cluster/a",
            "spiffe://u@td/cluster/a",
            "https://td/cluster/a",
        ] {
            assert_eq!(SpiffeId::parse(uri), None, "{uri}");
        }
        let long = format!("spiffe://td/cluster/{}", "a".repeat(64));
        assert_eq!(SpiffeId::parse(&long), None);
    }
}
