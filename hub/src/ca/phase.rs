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
use krypton_types::ca_rotation::{Phase, Stage};
use krypton_types::root_digest::RootDigest;
use rcgen::{KeyPair, PublicKeyData as _};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject as _;
use x509_parser::prelude::{FromDer as _, X509Certificate};

use super::{AuthorityError, CERTIFICATE_KEY, Data, KEY_KEY, New, TRUST_DOMAIN_KEY, pem, text};

const NEXT_CERTIFICATE_KEY: &str = "next.crt";
const NEXT_KEY_KEY: &str = "next.key";
const FORMER_KEY: &str = "former.crt";

type Root = CertificateDer<'static>;

/// Returns the stage of a rotation. The error completes a sentence about the Secret.
pub fn stage(data: &Data) -> Result<Stage, &'static str> {
    let (phase, root) = if [NEXT_CERTIFICATE_KEY, NEXT_KEY_KEY]
        .iter()
        .any(|key| data.contains_key(*key))
    {
        (Phase::Announced, next(data)?.0)
    } else {
        let phase = match data.contains_key(FORMER_KEY) {
            true => Phase::Switched,
            false => Phase::Steady,
        };
        (phase, signing(data)?)
    };
    let root = RootDigest::of(&root);
    Ok(Stage { phase, root })
}

/// Moves from Steady to Announced: adds the next root.
pub fn announced(data: &Data, now: Timestamp) -> Result<Data, AuthorityError> {
    let trust_domain = text(data, TRUST_DOMAIN_KEY).unwrap_or_default().trim();
    let made = New::generate(trust_domain, now)?;
    let mut roots = certificates(data, CERTIFICATE_KEY).unwrap_or_default();
    roots.extend(CertificateDer::pem_slice_iter(made.pem.as_bytes()).flatten());
    Ok(with(
        data,
        [
            (CERTIFICATE_KEY, Some(as_pem(&roots))),
            (NEXT_CERTIFICATE_KEY, Some(made.pem)),
            (NEXT_KEY_KEY, Some(made.key_pem)),
        ],
    ))
}

/// Moves from Announced to Switched: the next root signs from now on.
pub fn switched(data: &Data) -> Result<Data, &'static str> {
    let (next, key) = next(data)?;
    let mut former = vec![signing(data)?];
    former.extend(certificates(data, FORMER_KEY).unwrap_or_default());
    former.dedup();
    let mut roots = vec![next];
    for root in certificates(data, CERTIFICATE_KEY)? {
        if !roots.contains(&root) {
            roots.push(root);
        }
    }
    Ok(with(
        data,
        [
            (CERTIFICATE_KEY, Some(as_pem(&roots))),
            (KEY_KEY, Some(key)),
            (FORMER_KEY, Some(as_pem(&former))),
            (NEXT_CERTIFICATE_KEY, None),
            (NEXT_KEY_KEY, None),
        ],
    ))
}

/// Moves from Switched to Steady: removes the trust in roots that no longer sign.
pub fn finished(data: &Data) -> Result<Data, &'static str> {
    let signing = signing(data)?;
    // An unreadable root was never trusted.
    let former = certificates(data, FORMER_KEY).unwrap_or_default();
    let mut roots = certificates(data, CERTIFICATE_KEY)?;
    roots.retain(|root| *root == signing || !former.contains(root));
    Ok(with(
        data,
        [(CERTIFICATE_KEY, Some(as_pem(&roots))), (FORMER_KEY, None)],
    ))
}

fn signing(data: &Data) -> Result<Root, &'static str> {
    let mut roots = certificates(data, CERTIFICATE_KEY)?;
    match roots.is_empty() {
        true => Err("its ca.crt is not a certificate in PEM"),
        false => Ok(roots.remove(0)),
    }
}

/// The next root, and its key in PEM.
fn next(data: &Data) -> Result<(Root, String), &'static str> {
    let problem = "its next.crt and next.key are not a CA certificate and its key";
    let root = certificates(data, NEXT_CERTIFICATE_KEY).map_err(|_| problem)?;
    let root = root.into_iter().next().ok_or(problem)?;
    let pem = text(data, NEXT_KEY_KEY).ok_or(problem)?;
    let key = KeyPair::from_pem(pem).map_err(|_| problem)?;
    let (_, read) = X509Certificate::from_der(&root).map_err(|_| problem)?;
    if !read.is_ca() || read.public_key().raw != key.subject_public_key_info() {
        return Err(problem);
    }
    let pem = pem.to_owned();
    Ok((root, pem))
}

fn certificates(data: &Data, key: &str) -> Result<Vec<Root>, &'static str> {
    let pem = text(data, key).unwrap_or_default();
    CertificateDer::pem_slice_iter(pem.as_bytes())
        .collect::<Result<_, _>>()
        .map_err(|_| "its certificates are not in PEM")
}

fn as_pem(roots: &[Root]) -> String {
    roots.iter().map(|root| pem(root)).collect()
}

fn with<const N: usize>(data: &Data, changes: [(&str, Option<String>); N]) -> Data {
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

    fn phase(data: &Data) -> Phase {
        stage(data).unwrap().phase
    }

    fn read(data: &Data) -> Authority {
        Authority::from_data(data, now()).unwrap()
    }

    #[test]
    fn rotation_data_is_usable_ca_in_every_phase() {
        let steady = New::generate("a.krypton", now()).unwrap().data();
        let before = read(&steady);
        assert_eq!(phase(&steady), Phase::Steady);
        assert_eq!(Some(stage(&steady).unwrap().root), before.signing());

        let announced = announced(&steady, now()).unwrap();
        assert_eq!(phase(&announced), Phase::Announced);
        let told = read(&announced);
        assert_eq!(told.signing(), before.signing());
        assert_eq!(told.roots().len(), 2);
        let new = stage(&announced).unwrap().root;
        assert_eq!(new, RootDigest::of(&told.roots()[1]));

        let switched = switched(&announced).unwrap();
        let stood = stage(&switched).unwrap();
        assert_eq!((stood.phase, stood.root), (Phase::Switched, new));
        let turned = read(&switched);
        assert_eq!(turned.signing(), Some(new));
        assert_eq!(turned.roots().len(), 2);

        let finished = finished(&switched).unwrap();
        let stood = stage(&finished).unwrap();
        assert_eq!((stood.phase, stood.root), (Phase::Steady, new));
        let after = read(&finished);
        assert_eq!(after.roots(), told.roots()[1..]);
        // No key of the rotation is left.
        assert_eq!(
            finished.keys().collect::<Vec<_>>(),
            steady.keys().collect::<Vec<_>>()
        );
        assert_eq!(after.trust_domain(), before.trust_domain());
    }

    #[test]
    fn manually_added_root_survives_rotation() {
        let extra = New::generate("a.krypton", now()).unwrap();
        let mut data = New::generate("a.krypton", now()).unwrap().data();
        let mine = data.get_mut(CERTIFICATE_KEY).unwrap();
        mine.0.extend(extra.pem.as_bytes());
        data.insert("notes".to_owned(), ByteString(b"kept".to_vec()));
        let announced = announced(&data, now()).unwrap();
        assert_eq!(read(&announced).roots().len(), 3);
        let finished = finished(&switched(&announced).unwrap()).unwrap();
        let left = read(&finished).roots();
        assert_eq!(left.len(), 2);
        assert_eq!(pem(&left[1]), extra.pem);
        assert_eq!(finished["notes"].0, b"kept");
    }

    #[test]
    fn invalid_next_root_blocks_switch_but_ca_loads() {
        let steady = New::generate("a.krypton", now()).unwrap().data();
        let good = announced(&steady, now()).unwrap();
        let other = New::generate("a.krypton", now()).unwrap();
        let cases = [
            (NEXT_KEY_KEY, None),
            (NEXT_CERTIFICATE_KEY, None),
            (NEXT_KEY_KEY, Some(other.key_pem)),
            (NEXT_CERTIFICATE_KEY, Some("x".to_owned())),
        ];
        for (key, value) in cases {
            let broken = with(&good, [(key, value)]);
            assert!(stage(&broken).unwrap_err().contains("next.crt"));
            assert!(switched(&broken).is_err());
            read(&broken);
        }
    }
}
