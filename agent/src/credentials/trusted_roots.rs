//! Which roots of the hub's CA this agent trusts, and what the hub says of them.
//!
//! The hub names the roots that are to be trusted (`Roots`), over the session and nothing else: there it
//! has shown a certificate of a root that was trusted until then. They are kept in the identity's Secret,
//! used from the next connection on, and the hub is told that they are (`Trusts`); the stream stays. A set
//! that holds none of those trusted now is refused.
//!
//! What that rule is good for, and what not:
//!
//! - Who is in between has no certificate of a trusted root, gets no session, and names nothing.
//! - A hub that was set up anew, or a set that was cut off, does not shut the agent out: what it knows
//!   stays until a person lets it join again.
//! - Who has stolen the hub's key can add a root and in a second step take the others away, and so stay
//!   the hub beyond the certificate's end. The rule does not prevent it: such a hub could have told the
//!   agent to install anything. The key of the CA is in the same process, so a signature by it under each
//!   new root would prove little more. The way out is a new CA, and joining again.
//! - A hub restored from a backup of before a rotation does not know the new root. Agents that trust the
//!   old one still follow it back; those that have a certificate of the new root, or trust it alone, are
//!   out until they join again. A backup of any moment since the new root was announced holds its key,
//!   and the rotation goes on from there.

use std::time::Duration;

use krypton_proto::v1;
use krypton_types::root_digest::{ROOTS_MAX, RootDigest};
use rustls::pki_types::CertificateDer;
use thiserror::Error;
use tokio::sync::watch;
use x509_parser::prelude::{FromDer as _, X509Certificate};

/// The longest that a renewal which the hub asks for is put off.
const PUT_OFF_MAX: Duration = Duration::from_secs(60 * 60);

/// Why roots are not taken. Completes a sentence that names the hub.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum TrustError {
    #[error("there are {0} of them instead of 1 to {ROOTS_MAX}")]
    Count(usize),
    #[error("one of them is no X.509 certificate of a CA")]
    NotAnAuthority,
    #[error(
        "none of them is trusted until now; if the hub's CA was made anew on purpose, run 'kubectl krypton join' again"
    )]
    Strangers,
}

/// What the hub has said of its roots.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Told {
    pub roots: Vec<CertificateDer<'static>>,
    /// Present when the certificate is to be renewed, within this time.
    pub renew_within: Option<Duration>,
}

impl From<v1::Roots> for Told {
    fn from(said: v1::Roots) -> Self {
        let roots = said.certificates.iter();
        let renew_within = said.renew_within_millis;
        Self {
            roots: roots.map(|der| der.to_vec().into()).collect(),
            renew_within: renew_within
                .map(|millis| Duration::from_millis(millis.into()).min(PUT_OFF_MAX)),
        }
    }
}

/// Whether `told` may take the place of what is trusted.
pub fn check(
    trusted: &[CertificateDer<'_>],
    told: &[CertificateDer<'_>],
) -> Result<(), TrustError> {
    if told.is_empty() || told.len() > ROOTS_MAX {
        return Err(TrustError::Count(told.len()));
    }
    let is_authority = |der: &CertificateDer<'_>| matches!(X509Certificate::from_der(der), Ok((rest, read)) if rest.is_empty() && read.is_ca());
    if !told.iter().all(is_authority) {
        return Err(TrustError::NotAnAuthority);
    }
    if !told.iter().any(|root| trusted.contains(root)) {
        return Err(TrustError::Strangers);
    }
    Ok(())
}

/// Two slots: what the hub has said last, and what is kept.
#[derive(Debug)]
pub struct Trust {
    told: watch::Sender<Option<Told>>,
    kept: watch::Sender<Option<Vec<RootDigest>>>,
}

impl Default for Trust {
    /// Of who says nothing of its roots.
    fn default() -> Self {
        Self {
            told: watch::Sender::new(None),
            kept: watch::Sender::new(None),
        }
    }
}

impl Trust {
    /// The hub says so.
    pub fn tell(&self, told: Told) {
        self.told.send_replace(Some(told));
    }

    pub fn told(&self) -> watch::Receiver<Option<Told>> {
        self.told.subscribe()
    }

    /// These are kept; the hub is told, again if it knew.
    pub fn keep(&self, roots: &[CertificateDer<'_>]) {
        self.kept.send_replace(Some(RootDigest::of_all(roots)));
    }

    pub fn kept(&self) -> watch::Receiver<Option<Vec<RootDigest>>> {
        self.kept.subscribe()
    }
}

#[cfg(test)]
mod tests {
    use krypton_proto::Bytes;

    use super::*;
    use crate::fake_hub::{FakeAuthority, Valid};

    fn root() -> CertificateDer<'static> {
        FakeAuthority::new().roots().remove(0)
    }

    #[test]
    fn root_update_must_overlap_trusted_roots() {
        let (old, new, other) = (root(), root(), root());
        let both = [old.clone(), new.clone()];
        let cases = [
            (&both[..1], &both[..], Ok(())),
            (&both, &both[1..], Ok(())),
            (&both, &both, Ok(())),
            (&both[..1], &both[1..], Err(TrustError::Strangers)),
            (
                &both,
                std::slice::from_ref(&other),
                Err(TrustError::Strangers),
            ),
            (&both, &[], Err(TrustError::Count(0))),
            (&both, &vec![old.clone(); 9], Err(TrustError::Count(9))),
        ];
        for (trusted, told, expected) in cases {
            assert_eq!(check(trusted, told), expected);
        }
    }

    #[test]
    fn non_ca_certificate_is_rejected_as_root() {
        let authority = FakeAuthority::new();
        let trusted = authority.roots();
        let leaf = authority.agent(Valid::Now).certificates.remove(0);
        let mut longer = root().to_vec();
        longer.push(0);
        for wrong in [leaf, longer.into(), b"x".to_vec().into()] {
            let told = [trusted[0].clone(), wrong];
            assert_eq!(check(&trusted, &told), Err(TrustError::NotAnAuthority));
        }
    }

    #[test]
    fn renewal_delay_from_hub_is_capped() {
        let told = |renew_within_millis| {
            Told::from(v1::Roots {
                certificates: vec![Bytes::from_static(b"x")],
                renew_within_millis,
            })
        };
        assert_eq!(told(None).renew_within, None);
        assert_eq!(told(Some(7)).renew_within, Some(Duration::from_millis(7)));
        assert_eq!(told(Some(u32::MAX)).renew_within, Some(PUT_OFF_MAX));
        assert_eq!(told(None).roots, [CertificateDer::from(b"x".to_vec())]);
    }
}
