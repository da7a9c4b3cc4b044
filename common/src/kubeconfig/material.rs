//! Certificates and keys in `*-data` fields: base64 of PEM. What cannot work is refused here, with
//! its field, instead of later as an opaque failure to connect.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use rustls_pki_types::pem::PemObject as _;
use rustls_pki_types::{CertificateDer, PrivateKeyDer};

use super::KubeconfigError;
use super::fields::Fields;

const DER_SEQUENCE: u8 = 0x30;

/// The field as clean base64, when it is set. It must hold a certificate.
pub(super) fn certificates(
    fields: &Fields<'_>,
    key: &str,
) -> Result<Option<String>, KubeconfigError> {
    let Some(pem) = decoded(fields, key)? else {
        return Ok(None);
    };
    let mut count = 0;
    for certificate in CertificateDer::pem_slice_iter(&pem) {
        match certificate {
            Ok(der) if der.first() == Some(&DER_SEQUENCE) => count += 1,
            _ => return Err(fields.invalid(key, "holds a PEM certificate that is damaged")),
        }
    }
    if count == 0 {
        return Err(fields.invalid(key, "holds no PEM certificate"));
    }
    Ok(Some(STANDARD.encode(pem)))
}

/// The field as clean base64, when it is set. It must hold a private key.
pub(super) fn private_key(
    fields: &Fields<'_>,
    key: &str,
) -> Result<Option<String>, KubeconfigError> {
    let Some(pem) = decoded(fields, key)? else {
        return Ok(None);
    };
    match PrivateKeyDer::from_pem_slice(&pem) {
        Ok(der) if der.secret_der().first() == Some(&DER_SEQUENCE) => {
            Ok(Some(STANDARD.encode(pem)))
        }
        _ => Err(fields.invalid(key, "holds no PEM private key, or one that is encrypted")),
    }
}

fn decoded(fields: &Fields<'_>, key: &str) -> Result<Option<Vec<u8>>, KubeconfigError> {
    let Some(text) = fields.text(key)? else {
        return Ok(None);
    };
    // Line breaks are legal for kubectl, and usual where a file was pasted as a YAML block.
    let text: String = text.chars().filter(|c| !matches!(c, '\r' | '\n')).collect();
    match STANDARD.decode(text) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(_) => Err(fields.invalid(key, "is not base64")),
    }
}
