//! Certificates and keys for tests, as base64 of PEM: a cluster's CA and a client certificate from it.

use std::sync::LazyLock;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair, date_time_ymd};

/// Credentials that a cluster issues.
pub(crate) struct ClusterCredentials {
    pub(crate) ca: String,
    /// Valid from 2026-01-01 until 2027-01-01.
    pub(crate) certificate: String,
    pub(crate) key: String,
    /// A self-signed certificate with the CA's name that is not a CA certificate.
    pub(crate) self_signed: String,
}

pub(crate) static ISSUED: LazyLock<ClusterCredentials> = LazyLock::new(issue);
/// Credentials of a second cluster.
pub(crate) static OTHER: LazyLock<ClusterCredentials> = LazyLock::new(issue);

pub(crate) fn encoded(text: &str) -> String {
    STANDARD.encode(text)
}

pub(crate) fn decoded(data: &str) -> String {
    String::from_utf8(STANDARD.decode(data).unwrap()).unwrap()
}

fn issue() -> ClusterCredentials {
    let mut authority = CertificateParams::default();
    let self_signed_key = KeyPair::generate().unwrap();
    let self_signed = authority.self_signed(&self_signed_key).unwrap();
    authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let authority_key = KeyPair::generate().unwrap();
    let ca = authority.self_signed(&authority_key).unwrap();
    let issuer = Issuer::new(authority, authority_key);
    let mut client = CertificateParams::new(vec!["client".to_owned()]).unwrap();
    client
        .distinguished_name
        .push(rcgen::DnType::CommonName, "a client");
    client.not_before = date_time_ymd(2026, 1, 1);
    client.not_after = date_time_ymd(2027, 1, 1);
    let key = KeyPair::generate().unwrap();
    ClusterCredentials {
        ca: encoded(&ca.pem()),
        certificate: encoded(&client.signed_by(&key, &issuer).unwrap().pem()),
        key: encoded(&key.serialize_pem()),
        self_signed: encoded(&self_signed.pem()),
    }
}
