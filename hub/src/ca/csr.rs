//! Parses certificate requests of agents. The input is untrusted: the CA uses only the public key.

use krypton_types::fingerprint::sha256_hex;
use rcgen::{PublicKeyData as _, SubjectPublicKeyInfo};
use thiserror::Error;
use x509_parser::{
    asn1_rs::{self, Any, DerParser, Sequence, SequenceIterator},
    prelude::{FromDer as _, X509CertificationRequest},
};

/// Ten times the size of a request with a P-384 key and a few names.
pub const REQUEST_MAX_BYTES: usize = 8 * 1024;

/// Why a request is rejected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum RequestError {
    #[error("the certificate request is larger than {} KiB", REQUEST_MAX_BYTES / 1024)]
    TooLarge,
    #[error("the certificate request is not PKCS#10 in DER")]
    NotARequest,
    #[error("the key of the certificate request is not ECDSA P-256, ECDSA P-384 or Ed25519")]
    Key,
    #[error("the certificate request is not signed by its own key")]
    Signature,
}

/// Returns the public key of a request, after verifying that the sender has the private key.
pub(crate) fn public_key(der: &[u8]) -> Result<SubjectPublicKeyInfo, RequestError> {
    if der.len() > REQUEST_MAX_BYTES {
        return Err(RequestError::TooLarge);
    }
    let (rest, request) =
        X509CertificationRequest::from_der(der).map_err(|_| RequestError::NotARequest)?;
    if !rest.is_empty() || !has_three_elements(der) {
        return Err(RequestError::NotARequest);
    }
    // Read the algorithm from the key: the sender controls the one in the signature.
    let key = SubjectPublicKeyInfo::from_der(request.certification_request_info.subject_pki.raw)
        .map_err(|_| RequestError::Key)?;
    let accepted = [
        &rcgen::PKCS_ECDSA_P256_SHA256,
        &rcgen::PKCS_ECDSA_P384_SHA384,
        &rcgen::PKCS_ED25519,
    ];
    if !accepted.contains(&key.algorithm()) {
        return Err(RequestError::Key);
    }
    request
        .verify_signature()
        .map_err(|_| RequestError::Signature)?;
    Ok(key)
}

/// The parser ignores data after info, algorithm and signature in the sequence, and the signature doesn't
/// cover that data.
fn has_three_elements(der: &[u8]) -> bool {
    let Ok((_, sequence)) = Sequence::from_der(der) else {
        return false;
    };
    SequenceIterator::<Any, DerParser>::new(&sequence.content)
        .collect::<Result<Vec<_>, asn1_rs::Error>>()
        .is_ok_and(|elements| elements.len() == 3)
}

/// Returns the key that consumes a join token: the SHA-256 of the request's SubjectPublicKeyInfo in hex.
pub fn public_key_digest(request: &[u8]) -> Result<String, RequestError> {
    Ok(sha256_hex(&public_key(request)?.subject_public_key_info()))
}

#[cfg(test)]
pub(crate) mod tests {
    use proptest::prelude::*;
    use rcgen::{CertificateParams, KeyPair};

    use super::*;

    /// Returns the request of an agent with this key.
    pub(crate) fn request(key: &KeyPair) -> Vec<u8> {
        let request = CertificateParams::default().serialize_request(key).unwrap();
        request.der().to_vec()
    }

    #[test]
    fn supported_key_types_are_accepted_with_distinct_digests() {
        let mut digests = Vec::new();
        for kind in [
            &rcgen::PKCS_ECDSA_P256_SHA256,
            &rcgen::PKCS_ECDSA_P384_SHA384,
            &rcgen::PKCS_ED25519,
        ] {
            let key = KeyPair::generate_for(kind).unwrap();
            let digest = public_key_digest(&request(&key)).unwrap();
            assert_eq!(digest, sha256_hex(&key.subject_public_key_info()));
            assert_eq!(digest, public_key_digest(&request(&key)).unwrap());
            digests.push(digest);
        }
        digests.dedup();
        assert_eq!(digests.len(), 3);
    }

    #[test]
    fn other_keys_are_refused() {
        for kind in [&rcgen::PKCS_RSA_SHA256, &rcgen::PKCS_ECDSA_P521_SHA512] {
            let key = KeyPair::generate_for(kind).unwrap();
            assert_eq!(
                public_key_digest(&request(&key)),
                Err(RequestError::Key),
                "{kind:?}"
            );
        }
    }

    #[test]
    fn forged_request_for_foreign_key_is_rejected() {
        let (own, other) = (KeyPair::generate().unwrap(), KeyPair::generate().unwrap());
        let (own_key, other_key) = (own.public_key_raw(), other.public_key_raw());
        let mut forged = request(&own);
        let at = forged
            .windows(own_key.len())
            .position(|window| window == own_key)
            .unwrap();
        forged[at..at + other_key.len()].copy_from_slice(other_key);
        assert_eq!(public_key_digest(&forged), Err(RequestError::Signature));
    }

    #[test]
    fn size_and_shape_are_checked_first() {
        let valid = request(&KeyPair::generate().unwrap());
        let mut longer = valid.clone();
        longer.push(0);
        let fourth_element = include_bytes!("../../../fuzz/corpus/csr/refused-fourth-part");
        let cases: [(&[u8], RequestError); 6] = [
            (fourth_element, RequestError::NotARequest),
            (&[], RequestError::NotARequest),
            (
                b"-----BEGIN CERTIFICATE REQUEST-----",
                RequestError::NotARequest,
            ),
            (&valid[..valid.len() - 1], RequestError::NotARequest),
            (&longer, RequestError::NotARequest),
            (&[0x30; REQUEST_MAX_BYTES + 1], RequestError::TooLarge),
        ];
        for (der, expected) in cases {
            assert_eq!(public_key_digest(der), Err(expected), "{der:?}");
        }
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic(bytes in proptest::collection::vec(any::<u8>(), 0..600)) {
            prop_assert!(public_key_digest(&bytes).is_err());
        }

        /// A modified request is rejected or has the same key.
        #[test]
        fn a_changed_request_names_no_other_key(at in 0_usize..200, change in 1_u8..) {
            let key = KeyPair::generate().unwrap();
            let mut request = request(&key);
            let at = at % request.len();
            request[at] ^= change;
            if let Ok(digest) = public_key_digest(&request) {
                prop_assert_eq!(digest, sha256_hex(&key.subject_public_key_info()));
            }
        }
    }
}
