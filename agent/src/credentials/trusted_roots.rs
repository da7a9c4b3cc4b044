//! Tracks the root certificates of the hub's CA that this agent trusts.
//!
//! The hub announces its roots (`Roots`) only over a session, in which its certificate chains to a trusted root. The
//! agent stores them in the identity's Secret, uses them for the next connections, and confirms them to the hub
//! (`TrustedRoots`). The current stream stays open. The agent rejects a set that contains none of the roots it trusts now.
//!
//! The rule has these effects and limits:
//!
//! - A man in the middle has no certificate of a trusted root, so it gets no session and can announce nothing.
//! - A reinstalled hub or a truncated set does not lock the agent out. The agent keeps its roots until a user lets it
//!   join again.
//! - An attacker with the hub's key can add a root and later remove the others, and impersonate the hub beyond the
//!   certificate's expiry. The rule does not prevent this: such a hub could already install any chart on the member.
//!   The CA key is in the same process, so a CA signature under each new root would prove little more. Recover with a
//!   new CA, and let the agents join again.
//! - A hub restored from a backup older than a rotation does not know the new root. Agents that trust the old root
//!   still follow it back. Agents with a certificate of the new root, or without the old root, must join again. A
//!   backup from any time after the announcement of the new root contains its key, and the rotation continues.

use std::time::Duration;

use krypton_proto::v1;
use krypton_types::root_digest::{ROOTS_MAX, RootDigest};
use rustls::pki_types::CertificateDer;
use thiserror::Error;
use tokio::sync::watch;
use x509_parser::prelude::{FromDer as _, X509Certificate};

/// Upper limit for the delay of a renewal that the hub requests.
const RENEWAL_DELAY_MAX: Duration = Duration::from_secs(60 * 60);

/// Reason for rejecting roots. Completes a sentence that names the hub.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum TrustError {
    #[error("{0} roots instead of 1 to {ROOTS_MAX}")]
    Count(usize),
    #[error("one root is not an X.509 CA certificate")]
    NotACa,
    #[error(
        "no root is trusted yet; if you recreated the hub's CA, run 'kubectl krypton join' again"
    )]
    NoOverlap,
}

/// Announcement of the hub about its roots.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RootsAnnouncement {
    pub roots: Vec<CertificateDer<'static>>,
    /// If set, the agent must renew its certificate within this time.
    pub renew_within: Option<Duration>,
}

impl From<v1::Roots> for RootsAnnouncement {
    fn from(message: v1::Roots) -> Self {
        let roots = message.certificates.iter();
        let renew_within = message.renew_within_millis;
        Self {
            roots: roots.map(|der| der.to_vec().into()).collect(),
            renew_within: renew_within
                .map(|millis| Duration::from_millis(millis.into()).min(RENEWAL_DELAY_MAX)),
        }
    }
}

/// Verifies that the roots `announced` may replace the `trusted` roots.
pub fn check(
    trusted: &[CertificateDer<'_>],
    announced: &[CertificateDer<'_>],
) -> Result<(), TrustError> {
    if announced.is_empty() || announced.len() > ROOTS_MAX {
        return Err(TrustError::Count(announced.len()));
    }
    let is_ca = |der: &CertificateDer<'_>| matches!(X509Certificate::from_der(der), Ok((rest, read)) if rest.is_empty() && read.is_ca());
    if !announced.iter().all(is_ca) {
        return Err(TrustError::NotACa);
    }
    if !announced.iter().any(|root| trusted.contains(root)) {
        return Err(TrustError::NoOverlap);
    }
    Ok(())
}

/// Two `watch` channels: the hub's latest announcement, and the digests of the stored roots.
#[derive(Debug, Default)]
pub struct RootUpdates {
    announcement: watch::Sender<Option<RootsAnnouncement>>,
    stored: watch::Sender<Option<Vec<RootDigest>>>,
}

impl RootUpdates {
    /// Publishes an announcement of the hub.
    pub fn announce(&self, announcement: RootsAnnouncement) {
        self.announcement.send_replace(Some(announcement));
    }

    pub fn announcements(&self) -> watch::Receiver<Option<RootsAnnouncement>> {
        self.announcement.subscribe()
    }

    /// Publishes the digests of the stored roots. The session sends them to the hub, even if they are unchanged.
    pub fn publish_stored(&self, roots: &[CertificateDer<'_>]) {
        self.stored.send_replace(Some(RootDigest::from_ders(roots)));
    }

    pub fn stored_digests(&self) -> watch::Receiver<Option<Vec<RootDigest>>> {
        self.stored.subscribe()
    }
}

#[cfg(test)]
mod tests {
    use krypton_proto::Bytes;

    use super::*;
    use crate::fake_hub::{FakeAuthority, Validity};

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
            (&both[..1], &both[1..], Err(TrustError::NoOverlap)),
            (
                &both,
                std::slice::from_ref(&other),
                Err(TrustError::NoOverlap),
            ),
            (&both, &[], Err(TrustError::Count(0))),
            (&both, &vec![old.clone(); 9], Err(TrustError::Count(9))),
        ];
        for (trusted, announced, expected) in cases {
            assert_eq!(check(trusted, announced), expected);
        }
    }

    #[test]
    fn non_ca_certificate_is_rejected_as_root() {
        let authority = FakeAuthority::new();
        let trusted = authority.roots();
        let leaf = authority.agent(Validity::Now).certificates.remove(0);
        let mut trailing_byte = root().to_vec();
        trailing_byte.push(0);
        for invalid in [leaf, trailing_byte.into(), b"x".to_vec().into()] {
            let announced = [trusted[0].clone(), invalid];
            assert_eq!(check(&trusted, &announced), Err(TrustError::NotACa));
        }
    }

    #[test]
    fn renewal_delay_from_hub_is_capped() {
        let announcement = |renew_within_millis| {
            RootsAnnouncement::from(v1::Roots {
                certificates: vec![Bytes::from_static(b"x")],
                renew_within_millis,
            })
        };
        assert_eq!(announcement(None).renew_within, None);
        assert_eq!(
            announcement(Some(7)).renew_within,
            Some(Duration::from_millis(7))
        );
        assert_eq!(
            announcement(Some(u32::MAX)).renew_within,
            Some(RENEWAL_DELAY_MAX)
        );
        assert_eq!(
            announcement(None).roots,
            [CertificateDer::from(b"x".to_vec())]
        );
    }
}
