//! Converts the identity to and from the content of a Secret. Performs no I/O.

use std::collections::BTreeMap;
use std::sync::Arc;

use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use krypton_runtime::access::pem;
use krypton_types::join_bundle::split_address;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use thiserror::Error;

use zeroize::Zeroizing;

use crate::credentials::identity::{CertificateError, Enrolled, Identity, Membership};
use crate::credentials::key::AgentKey;

const KEY: &str = "tls.key";
const CERTIFICATE: &str = "tls.crt";
const ROOTS: &str = "ca.crt";
const CLUSTER: &str = "cluster";
/// One address per line.
const ADDRESSES: &str = "addresses";
const TOKEN_NAME: &str = "token-name";

/// Reason why the Secret contains no usable identity.
#[derive(Debug, Error)]
pub enum IdentityParseError {
    #[error("it has no {0}")]
    Missing(&'static str),
    #[error("its {0} is not text")]
    Text(&'static str),
    #[error("its {KEY} is not a private key in PEM")]
    Key(#[source] rcgen::Error),
    #[error("its {0} contains no certificates in PEM")]
    Pem(&'static str),
    #[error("its {ADDRESSES} must contain one HOST:PORT per line")]
    Addresses,
    #[error("its {CERTIFICATE} is not valid")]
    Certificate(#[source] CertificateError),
}

pub(super) fn parse(secret: &Secret) -> Result<Identity, IdentityParseError> {
    let no_data = BTreeMap::new();
    let data = secret.data.as_ref().unwrap_or(&no_data);
    let text = |name| text(data, name);
    let key = text(KEY)?.ok_or(IdentityParseError::Missing(KEY))?;
    let key = AgentKey::from_pem(&Zeroizing::new(key)).map_err(IdentityParseError::Key)?;
    let Some(certificates) = text(CERTIFICATE)? else {
        return Ok(Identity {
            key: Arc::new(key),
            enrolled: None,
        });
    };
    let required = |name| text(name)?.ok_or(IdentityParseError::Missing(name));
    let addresses: Vec<String> = required(ADDRESSES)?.lines().map(str::to_owned).collect();
    if addresses.is_empty() || !addresses.iter().all(|text| split_address(text).is_some()) {
        return Err(IdentityParseError::Addresses);
    }
    let membership = Membership {
        cluster: required(CLUSTER)?,
        addresses,
        token_name: text(TOKEN_NAME)?.unwrap_or_default(),
    };
    let roots = certificates_from_pem(ROOTS, &required(ROOTS)?)?;
    let certificates = certificates_from_pem(CERTIFICATE, &certificates)?;
    let enrolled = Enrolled::check(&key, membership, certificates, roots)
        .map_err(IdentityParseError::Certificate)?;
    Ok(Identity {
        key: Arc::new(key),
        enrolled: Some(enrolled),
    })
}

/// Writes the identity into `secret` and keeps its other keys.
pub(super) fn with_identity(mut secret: Secret, identity: &Identity) -> Secret {
    let data = secret.data.get_or_insert_default();
    let mut insert = |name: &str, text: String| {
        data.insert(name.to_owned(), ByteString(text.into_bytes()));
    };
    insert(KEY, std::mem::take(&mut *identity.key.to_pem()));
    if let Some(enrolled) = &identity.enrolled {
        insert(CERTIFICATE, pem(&enrolled.certificates));
        insert(ROOTS, pem(&enrolled.roots));
        insert(CLUSTER, enrolled.membership.cluster.clone());
        insert(ADDRESSES, enrolled.membership.addresses.join("\n"));
        insert(TOKEN_NAME, enrolled.membership.token_name.clone());
    }
    secret
}

fn text(
    data: &BTreeMap<String, ByteString>,
    name: &'static str,
) -> Result<Option<String>, IdentityParseError> {
    match data.get(name).filter(|bytes| !bytes.0.is_empty()) {
        None => Ok(None),
        Some(bytes) => String::from_utf8(bytes.0.clone())
            .map(Some)
            .map_err(|_| IdentityParseError::Text(name)),
    }
}

fn certificates_from_pem(
    name: &'static str,
    text: &str,
) -> Result<Vec<CertificateDer<'static>>, IdentityParseError> {
    CertificateDer::pem_slice_iter(text.as_bytes())
        .collect::<Result<_, _>>()
        .map_err(|_| IdentityParseError::Pem(name))
}
