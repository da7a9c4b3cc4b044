//! Validity period of a certificate or a token, and when to warn of its end.

use std::time::Duration;

use jiff::Timestamp;
use x509_parser::prelude::{FromDer as _, X509Certificate};

/// Lifetime of an agent's certificate. Agents renew it well before it expires.
pub const AGENT_CERTIFICATE_LIFE: Duration = Duration::from_secs(7 * 24 * 60 * 60);
/// Time before its issue from which a certificate is valid. Tolerates clock skew between edge clusters and the hub.
pub const BACK_DATED: Duration = Duration::from_secs(24 * 60 * 60);
/// Remaining share of a certificate's lifetime at which a warning is due. Renewal starts at 30 %, so it is
/// overdue by then.
const WARNING_PERCENT: i128 = 20;

/// The validity period of a credential.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Validity {
    pub not_before: Timestamp,
    pub not_after: Timestamp,
}

impl Validity {
    /// Returns the validity of an agent's certificate, if only its expiry is recorded.
    pub fn until(not_after: Timestamp) -> Self {
        let not_before = not_after.saturating_sub(AGENT_CERTIFICATE_LIFE + BACK_DATED);
        Self {
            not_before: not_before.unwrap_or(Timestamp::MIN),
            not_after,
        }
    }

    /// Returns the validity of a DER certificate. `None` if it is not a certificate, or never expires.
    pub fn of_certificate(der: &[u8]) -> Option<Self> {
        let (_, certificate) = X509Certificate::from_der(der).ok()?;
        let validity = certificate.validity();
        Some(Self {
            not_before: Timestamp::from_second(validity.not_before.timestamp()).ok()?,
            not_after: Timestamp::from_second(validity.not_after.timestamp()).ok()?,
        })
    }

    /// Returns the expiry state at `now`.
    pub fn state_at(self, now: Timestamp) -> CredentialState {
        let life = self.not_after.duration_since(self.not_before);
        let left = self.not_after.duration_since(now);
        if !left.is_positive() {
            CredentialState::Expired
        } else if left.as_nanos() * 100 <= life.as_nanos() * WARNING_PERCENT {
            CredentialState::Soon
        } else {
            CredentialState::Current
        }
    }
}

/// Whether a credential is valid, and for long enough.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CredentialState {
    Current,
    Soon,
    Expired,
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const DAY: i64 = 24 * 3600;

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

    fn validity_between(from: i64, to: i64) -> Validity {
        Validity {
            not_before: at(from),
            not_after: at(to),
        }
    }

    #[test]
    fn certificate_expires_soon_in_last_fifth_of_life() {
        let validity = validity_between(1000, 2000);
        for (now, expected) in [
            (0, CredentialState::Current),
            (1799, CredentialState::Current),
            (1800, CredentialState::Soon),
            (1999, CredentialState::Soon),
            (2000, CredentialState::Expired),
            (9999, CredentialState::Expired),
        ] {
            assert_eq!(validity.state_at(at(now)), expected, "{now}");
        }
        assert_eq!(
            validity_between(1000, 1000).state_at(at(999)),
            CredentialState::Current
        );
        // If only the expiry is recorded, the usual lifetime applies.
        let known = Validity::until(at(100 * DAY));
        assert_eq!(known.state_at(at(98 * DAY)), CredentialState::Current);
        assert_eq!(known.state_at(at(99 * DAY)), CredentialState::Soon);
    }

    #[test]
    fn validity_of_certificate_is_read() {
        let mut params = rcgen::CertificateParams::default();
        params.not_before = rcgen::date_time_ymd(2026, 1, 1);
        params.not_after = rcgen::date_time_ymd(2026, 1, 11);
        let key = rcgen::KeyPair::generate().unwrap();
        let certificate = params.self_signed(&key).unwrap();
        let validity = Validity::of_certificate(certificate.der()).unwrap();
        assert_eq!(validity.not_before.to_string(), "2026-01-01T00:00:00Z");
        assert_eq!(validity.not_after.to_string(), "2026-01-11T00:00:00Z");
        assert_eq!(Validity::of_certificate(b"no certificate"), None);
    }

    proptest! {
        #[test]
        fn credential_state_never_improves_alone(from in 0_i64..1000, length in 0_i64..1000, now in 0_i64..3000, later in 0_i64..1000) {
            let severity = |now| match validity_between(from, from + length).state_at(at(now)) {
                CredentialState::Current => 0,
                CredentialState::Soon => 1,
                CredentialState::Expired => 2,
            };
            prop_assert!(severity(now) <= severity(now + later));
        }
    }
}
