//! Checks certificates and keys in `*-data` fields, which are base64 of PEM. Unusable material is rejected here, with
//! its field, instead of later with an opaque connection failure. The TLS library itself performs the checks, so it
//! accepts the material later too. The result is re-encoded, so the hub and Helm read the same content from it.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use rustls::RootCertStore;
use rustls::crypto::aws_lc_rs;
use rustls::sign::CertifiedKey;
use rustls_pki_types::pem::PemObject as _;
use rustls_pki_types::{CertificateDer, PrivateKeyDer};
use x509_parser::certificate::X509Certificate;
use x509_parser::prelude::FromDer as _;

use crate::document::{FieldError, Fields};
use crate::kubeconfig::credential_dates::CredentialValidity;

const PEM_LINE: usize = 64;
const CA_FIELD: &str = "certificate-authority-data";
const CERTIFICATE_FIELD: &str = "client-certificate-data";
const KEY_FIELD: &str = "client-key-data";
const DAMAGED: &str = "holds a PEM certificate that is damaged";
const NO_CA_CERTIFICATE: &str = "holds no CA certificate: give that of the authority which has signed the server's \
    certificate (the server's own only where it has signed itself)";
const KEY_MISMATCH: &str = "is not the key of client-certificate-data; provide a matching pair";
const UNUSABLE_KEY: &str = "holds a private key that cannot be used: make an ECDSA key (P-256, P-384, \
    P-521), an Ed25519 one or an RSA one of 2048 to 8192 bits";
const UNUSABLE_CERTIFICATE: &str =
    "holds a client certificate that cannot be used: it must be an X.509 certificate of version 3";

/// A field as clean base64, and its content.
pub(super) struct Certificates {
    pub(super) data: String,
    chain: Vec<CertificateDer<'static>>,
}

pub(super) struct PrivateKey {
    pub(super) data: String,
    key: PrivateKeyDer<'static>,
}

/// Returns the authorities that may verify the server. `None` if the field is not set.
///
/// At least one certificate must belong to a CA or be self-signed. Small distributions use a self-signed server
/// certificate, and the TLS libraries of Krypton and Helm accept a server that presents it. A certificate that is
/// neither can verify no server, not even its own.
pub(super) fn authorities(fields: &Fields<'_>) -> Result<Option<String>, FieldError> {
    let Some(certificates) = certificates(fields, CA_FIELD)? else {
        return Ok(None);
    };
    let mut roots = RootCertStore::empty();
    let mut may_verify = false;
    for der in &certificates.chain {
        let certificate =
            parse_certificate(der).ok_or_else(|| fields.invalid(CA_FIELD, DAMAGED))?;
        may_verify |= certificate.is_ca() || certificate.subject() == certificate.issuer();
        let added = roots.add(der.clone());
        added.map_err(|_| fields.invalid(CA_FIELD, DAMAGED))?;
    }
    if !may_verify {
        return Err(fields.invalid(CA_FIELD, NO_CA_CERTIFICATE));
    }
    Ok(Some(certificates.data))
}

/// Returns the client certificate with its issuers. `None` if the field is not set.
pub(super) fn client_certificate(fields: &Fields<'_>) -> Result<Option<Certificates>, FieldError> {
    certificates(fields, CERTIFICATE_FIELD)
}

/// Returns the client key. `None` if the field is not set.
pub(super) fn client_key(fields: &Fields<'_>) -> Result<Option<PrivateKey>, FieldError> {
    let Some(pem) = decode_base64(fields, KEY_FIELD)? else {
        return Ok(None);
    };
    match PrivateKeyDer::from_pem_slice(&pem) {
        Ok(key) => {
            let label = match &key {
                PrivateKeyDer::Pkcs1(_) => "RSA PRIVATE KEY",
                PrivateKeyDer::Sec1(_) => "EC PRIVATE KEY",
                _ => "PRIVATE KEY",
            };
            let data = STANDARD.encode(to_pem(label, key.secret_der()));
            Ok(Some(PrivateKey { data, key }))
        }
        Err(_) => Err(fields.invalid(
            KEY_FIELD,
            "holds no PEM private key, or one that is encrypted",
        )),
    }
}

/// Checks that key and certificate belong together.
pub(super) fn check_pair(
    fields: &Fields<'_>,
    certificates: &Certificates,
    key: &PrivateKey,
) -> Result<(), FieldError> {
    let chain = certificates.chain.clone();
    let provider = aws_lc_rs::default_provider();
    match CertifiedKey::from_der(chain, key.key.clone_key(), &provider) {
        Ok(_) => Ok(()),
        Err(rustls::Error::InconsistentKeys(_)) => Err(fields.invalid(KEY_FIELD, KEY_MISMATCH)),
        Err(rustls::Error::InvalidCertificate(_)) => {
            Err(fields.invalid(CERTIFICATE_FIELD, UNUSABLE_CERTIFICATE))
        }
        Err(_) => Err(fields.invalid(KEY_FIELD, UNUSABLE_KEY)),
    }
}

/// Returns the validity of the client certificate, which is the first certificate in its field.
pub(super) fn validity(fields: &Fields<'_>, certificates: &Certificates) -> CredentialValidity {
    let path = fields.path_to(CERTIFICATE_FIELD);
    let client = certificates.chain.first();
    match client.and_then(|der| parse_certificate(der)) {
        Some(client) => CredentialValidity::from_certificate(path, client.validity()),
        None => CredentialValidity::unlimited(path),
    }
}

fn parse_certificate<'a>(der: &'a CertificateDer<'_>) -> Option<X509Certificate<'a>> {
    match X509Certificate::from_der(der) {
        Ok(([], certificate)) => Some(certificate),
        _ => None,
    }
}

fn certificates(fields: &Fields<'_>, key: &str) -> Result<Option<Certificates>, FieldError> {
    let Some(pem) = decode_base64(fields, key)? else {
        return Ok(None);
    };
    let mut chain = Vec::new();
    for certificate in CertificateDer::pem_slice_iter(&pem) {
        match certificate {
            Ok(der) if parse_certificate(&der).is_some() => chain.push(der),
            _ => return Err(fields.invalid(key, DAMAGED)),
        }
    }
    if chain.is_empty() {
        return Err(fields.invalid(key, "holds no PEM certificate"));
    }
    let pem: String = chain.iter().map(|der| to_pem("CERTIFICATE", der)).collect();
    Ok(Some(Certificates {
        data: STANDARD.encode(pem),
        chain,
    }))
}

fn to_pem(label: &str, der: &[u8]) -> String {
    let mut text = format!("-----BEGIN {label}-----\n");
    for (index, letter) in STANDARD.encode(der).chars().enumerate() {
        if index > 0 && index % PEM_LINE == 0 {
            text.push('\n');
        }
        text.push(letter);
    }
    text.push_str(&format!("\n-----END {label}-----\n"));
    text
}

fn decode_base64(fields: &Fields<'_>, key: &str) -> Result<Option<Vec<u8>>, FieldError> {
    let Some(text) = fields.text(key)? else {
        return Ok(None);
    };
    // kubectl accepts line breaks, and they are common in a file pasted as a YAML block.
    let text: String = text.chars().filter(|c| !matches!(c, '\r' | '\n')).collect();
    match STANDARD.decode(text) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(_) => Err(fields.invalid(key, "is not base64")),
    }
}
