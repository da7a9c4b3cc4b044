//! Phases of a CA rotation, as stored in its Secret. Pure. Each phase change is one write.
//!
//! In each phase, `ca.crt` and `ca.key` suffice for a hub without support for rotations. They hold all
//! trusted roots, the signing root first, and its key. The table lists the other keys.
//!
//! | phase | keys | meaning |
//! | --- | --- | --- |
//! | Steady | none | |
//! | Announced | `next.crt`, `next.key` | trusted next root, not signing yet |
//! | Switched | `former.crt` | old roots, trusted until all agents renewed |

use jiff::Timestamp;
use k8s_openapi::ByteString;
use krypton_runtime::access::pem;
use krypton_types::ca_rotation::{RotationPhase, RotationStage};
use krypton_types::root_digest::RootDigest;
use rcgen::{KeyPair, PublicKeyData as _};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject as _;
use x509_parser::prelude::{FromDer as _, X509Certificate};

use super::{
    AuthorityError, CERTIFICATE_KEY, PRIVATE_KEY_KEY, SecretData, TRUST_DOMAIN_KEY, generate_data,
    text,
};

const NEXT_CERTIFICATE_KEY: &str = "next.crt";
const NEXT_PRIVATE_KEY_KEY: &str = "next.key";
const FORMER_CERTIFICATES_KEY: &str = "former.crt";

type Root = CertificateDer<'static>;

/// Returns the stage of a rotation. The error completes a sentence about the Secret.
pub fn stage(data: &SecretData) -> Result<RotationStage, &'static str> {
    let (phase, root) = if [NEXT_CERTIFICATE_KEY, NEXT_PRIVATE_KEY_KEY]
        .iter()
        .any(|key| data.contains_key(*key))
    {
        (RotationPhase::Announced, next_root(data)?.0)
    } else {
        let phase = match data.contains_key(FORMER_CERTIFICATES_KEY) {
            true => RotationPhase::Switched,
            false => RotationPhase::Steady,
        };
        (phase, signing_root(data)?)
    };
    let root = RootDigest::from_der(&root);
    Ok(RotationStage { phase, root })
}

/// Moves from Steady to Announced: adds the next root.
pub fn announce(data: &SecretData, now: Timestamp) -> Result<SecretData, AuthorityError> {
    let trust_domain = text(data, TRUST_DOMAIN_KEY).unwrap_or_default().trim();
    let new = generate_data(trust_domain, now)?;
    let new_text = |key| text(&new, key).map(str::to_owned);
    let roots = [data, &new].map(|data| certificates(data, CERTIFICATE_KEY).unwrap_or_default());
    Ok(with_changes(
        data,
        [
            (CERTIFICATE_KEY, Some(pem(&roots.concat()))),
            (NEXT_CERTIFICATE_KEY, new_text(CERTIFICATE_KEY)),
            (NEXT_PRIVATE_KEY_KEY, new_text(PRIVATE_KEY_KEY)),
        ],
    ))
}

/// Moves from Announced to Switched: the next root signs from now on.
pub fn switch(data: &SecretData) -> Result<SecretData, &'static str> {
    let (next, key) = next_root(data)?;
    let mut former = vec![signing_root(data)?];
    former.extend(certificates(data, FORMER_CERTIFICATES_KEY).unwrap_or_default());
    former.dedup();
    let mut roots = vec![next];
    for root in certificates(data, CERTIFICATE_KEY)? {
        if !roots.contains(&root) {
            roots.push(root);
        }
    }
    Ok(with_changes(
        data,
        [
            (CERTIFICATE_KEY, Some(pem(&roots))),
            (PRIVATE_KEY_KEY, Some(key)),
            (FORMER_CERTIFICATES_KEY, Some(pem(&former))),
            (NEXT_CERTIFICATE_KEY, None),
            (NEXT_PRIVATE_KEY_KEY, None),
        ],
    ))
}

/// Moves from Switched to Steady: removes the trust in roots that no longer sign.
pub fn finish(data: &SecretData) -> Result<SecretData, &'static str> {
    let signing = signing_root(data)?;
    // An unreadable root was never trusted.
    let former = certificates(data, FORMER_CERTIFICATES_KEY).unwrap_or_default();
    let mut roots = certificates(data, CERTIFICATE_KEY)?;
    roots.retain(|root| *root == signing || !former.contains(root));
    Ok(with_changes(
        data,
        [
            (CERTIFICATE_KEY, Some(pem(&roots))),
            (FORMER_CERTIFICATES_KEY, None),
        ],
    ))
}

fn signing_root(data: &SecretData) -> Result<Root, &'static str> {
    let mut roots = certificates(data, CERTIFICATE_KEY)?;
    match roots.is_empty() {
        true => Err("its ca.crt is not a certificate in PEM"),
        false => Ok(roots.remove(0)),
    }
}

/// The next root, and its key in PEM.
fn next_root(data: &SecretData) -> Result<(Root, String), &'static str> {
    let problem = "its next.crt and next.key are not a CA certificate and its key";
    let root = certificates(data, NEXT_CERTIFICATE_KEY).map_err(|_| problem)?;
    let root = root.into_iter().next().ok_or(problem)?;
    let pem = text(data, NEXT_PRIVATE_KEY_KEY).ok_or(problem)?;
    let key = KeyPair::from_pem(pem).map_err(|_| problem)?;
    let (_, certificate) = X509Certificate::from_der(&root).map_err(|_| problem)?;
    if !certificate.is_ca() || certificate.public_key().raw != key.subject_public_key_info() {
        return Err(problem);
    }
    let pem = pem.to_owned();
    Ok((root, pem))
}

fn certificates(data: &SecretData, key: &str) -> Result<Vec<Root>, &'static str> {
    let pem = text(data, key).unwrap_or_default();
    CertificateDer::pem_slice_iter(pem.as_bytes())
        .collect::<Result<_, _>>()
        .map_err(|_| "its certificates are not in PEM")
}

pub(super) fn with_changes<const N: usize>(
    data: &SecretData,
    changes: [(&str, Option<String>); N],
) -> SecretData {
    let mut data = data.clone();
    for (key, value) in changes {
        match value {
            Some(value) => data.insert(key.to_owned(), ByteString(value.into_bytes())),
            None => data.remove(key),
        };
    }
    data
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ca::Authority;

    fn now() -> Timestamp {
        Timestamp::from_second(1_800_000_000).unwrap()
    }

    fn new_data() -> SecretData {
        generate_data("a.krypton", now()).unwrap()
    }

    fn phase(data: &SecretData) -> RotationPhase {
        stage(data).unwrap().phase
    }

    fn authority(data: &SecretData) -> Authority {
        Authority::from_data(data, now()).unwrap()
    }

    #[test]
    fn rotation_data_is_usable_ca_in_every_phase() {
        let steady = new_data();
        let before = authority(&steady);
        assert_eq!(phase(&steady), RotationPhase::Steady);
        assert_eq!(Some(stage(&steady).unwrap().root), before.signing_root());

        let announced = announce(&steady, now()).unwrap();
        assert_eq!(phase(&announced), RotationPhase::Announced);
        let during = authority(&announced);
        assert_eq!(during.signing_root(), before.signing_root());
        assert_eq!(during.roots().len(), 2);
        let root = stage(&announced).unwrap().root;
        assert_eq!(root, RootDigest::from_der(&during.roots()[1]));

        let switched = switch(&announced).unwrap();
        let next = |phase| Ok(RotationStage { phase, root });
        assert_eq!(stage(&switched), next(RotationPhase::Switched));
        let signed_by_next = authority(&switched);
        assert_eq!(signed_by_next.signing_root(), Some(root));
        assert_eq!(signed_by_next.roots().len(), 2);

        let finished = finish(&switched).unwrap();
        assert_eq!(stage(&finished), next(RotationPhase::Steady));
        let after = authority(&finished);
        assert_eq!(after.roots(), during.roots()[1..]);
        // No key of the rotation is left.
        assert_eq!(
            finished.keys().collect::<Vec<_>>(),
            steady.keys().collect::<Vec<_>>()
        );
        assert_eq!(after.trust_domain(), before.trust_domain());
    }

    #[test]
    fn manually_added_root_survives_rotation() {
        let (mut data, extra) = (new_data(), new_data());
        let extra = text(&extra, CERTIFICATE_KEY).unwrap();
        let bundle = data.get_mut(CERTIFICATE_KEY).unwrap();
        bundle.0.extend(extra.as_bytes());
        data.insert("notes".to_owned(), ByteString(b"kept".to_vec()));
        let announced = announce(&data, now()).unwrap();
        assert_eq!(authority(&announced).roots().len(), 3);
        let finished = finish(&switch(&announced).unwrap()).unwrap();
        let remaining = authority(&finished).roots();
        assert_eq!(remaining.len(), 2);
        assert_eq!(pem(&remaining[1..]), extra);
        assert_eq!(finished["notes"].0, b"kept");
    }

    #[test]
    fn invalid_next_root_blocks_switch_but_ca_loads() {
        let valid = announce(&new_data(), now()).unwrap();
        let other = text(&new_data(), PRIVATE_KEY_KEY).map(str::to_owned);
        let cases = [
            (NEXT_PRIVATE_KEY_KEY, None),
            (NEXT_CERTIFICATE_KEY, None),
            (NEXT_PRIVATE_KEY_KEY, other),
            (NEXT_CERTIFICATE_KEY, Some("x".to_owned())),
        ];
        for (key, value) in cases {
            let invalid = with_changes(&valid, [(key, value)]);
            assert!(stage(&invalid).unwrap_err().contains("next.crt"));
            assert!(switch(&invalid).is_err());
            authority(&invalid);
        }
    }
}
