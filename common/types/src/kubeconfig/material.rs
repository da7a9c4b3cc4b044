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
use crate::kubeconfig::credential_dates::Validity;

const PEM_LINE: usize = 64;
const CA: &str = "certificate-authority-data";
const CERTIFICATE: &str = "client-certificate-data";
const KEY: &str = "client-key-data";
const DAMAGED: &str = "holds a PEM certificate that is damaged";
const NO_CA: &str = "holds no CA certificate: give that of the authority which has signed the server's \
    certificate (the server's own only where it has signed itself)";
const OTHER_KEY: &str = "is not the key of client-certificate-data; provide a matching pair";
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
    let Some(certificates) = certificates(fields, CA)? else {
        return Ok(None);
    };
    let mut roots = RootCertStore::empty();
    let mut vouching = false;
    for der in &certificates.chain {
        let parsed = parsed(der).ok_or_else(|| fields.invalid(CA, DAMAGED))?;
        vouching |= parsed.is_ca() || parsed.subject() == parsed.issuer();
        let usable = roots.add(der.clone());
        usable.map_err(|_| fields.invalid(CA, DAMAGED))?;
    }
    if !vouching {
        return Err(fields.invalid(CA, NO_CA));
    }
    Ok(Some(certificates.data))
}

/// Returns the client certificate with its issuers. `None` if the field is not set.
pub(super) fn client_certificate(fields: &Fields<'_>) -> Result<Option<Certificates>, FieldError> {
    certificates(fields, CERTIFICATE)
}

/// Returns the client key. `None` if the field is not set.
pub(super) fn client_key(fields: &Fields<'_>) -> Result<Option<PrivateKey>, FieldError> {
    let Some(pem) = decoded(fields, KEY)? else {
        return Ok(None);
    };
    match PrivateKeyDer::from_pem_slice(&pem) {
        Ok(key) => {
            let label = match &key {
                PrivateKeyDer::Pkcs1(_) => "RSA PRIVATE KEY",
                PrivateKeyDer::Sec1(_) => "EC PRIVATE KEY",
                _ => "PRIVATE KEY",
            };
            let data = STANDARD.encode(pem_of(label, key.secret_der()));
            Ok(Some(PrivateKey { data, key }))
        }
        Err(_) => Err(fields.invalid(KEY, "holds no PEM private key, or one that is encrypted")),
    }
}

/// Checks that key and certificate belong together.
pub(super) fn paired(
    fields: &Fields<'_>,
    certificates: &Certificates,
    key: &PrivateKey,
) -> Result<(), FieldError> {
    let chain = certificates.chain.clone();
    let provider = aws_lc_rs::default_provider();
    match CertifiedKey::from_der(chain, key.key.clone_key(), &provider) {
        Ok(_) => Ok(()),
        Err(rustls::Error::InconsistentKeys(_)) => Err(fields.invalid(KEY, OTHER_KEY)),
        Err(rustls::Error::InvalidCertificate(_)) => {
            Err(fields.invalid(CERTIFICATE, UNUSABLE_CERTIFICATE))
        }
        Err(_) => Err(fields.invalid(KEY, UNUSABLE_KEY)),
    }
}

/// Returns the validity of the client certificate, which is the first certificate in its field.
pub(super) fn validity(fields: &Fields<'_>, certificates: &Certificates) -> Validity {
    let path = fields.path_to(CERTIFICATE);
    let own = certificates.chain.first().and_then(|der| parsed(der));
    match own {
        Some(own) => Validity::of_certificate(path, own.validity()),
        None => Validity::unlimited(path),
    }
}

fn parsed<'a>(der: &'a CertificateDer<'_>) -> Option<X509Certificate<'a>> {
    match X509Certificate::from_der(der) {
        Ok(([], certificate)) => Some(certificate),
        _ => None,
    }
}

fn certificates(fields: &Fields<'_>, key: &str) -> Result<Option<Certificates>, FieldError> {
    let Some(pem) = decoded(fields, key)? else {
        return Ok(None);
    };
    let mut chain = Vec::new();
    for certificate in CertificateDer::pem_slice_iter(&pem) {
        match certificate {
            Ok(der) if parsed(&der).is_some() => chain.push(der),
            _ => return Err(fields.invalid(key, DAMAGED)),
        }
    }
    if chain.is_empty() {
        return Err(fields.invalid(key, "holds no PEM certificate"));
    }
    let written: String = chain.iter().map(|der| pem_of("CERTIFICATE", der)).collect();
    Ok(Some(Certificates {
        data: STANDARD.encode(written),
        chain,
    }))
}

fn pem_of(label: &str, der: &[u8]) -> String {
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

fn decoded(fields: &Fields<'_>, key: &str) -> Result<Option<Vec<u8>>, FieldError> {
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
