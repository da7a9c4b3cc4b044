//! Decides whether the hub admits an agent: checks its certificate, key and cluster against what the hub has
//! recorded of the member.

use std::sync::Arc;

use jiff::{SignedDuration, Timestamp};
use krypton_runtime::clock;
use krypton_runtime::newest::Newest as _;
use krypton_types::conditions::{State, Truth, reason};
use tonic::Status;

use super::Sessions;
use crate::ca::{AgentCertificate, Authority};
use crate::members::agent_keys::{self, KeyStatus};
use crate::members::member::{Admission, Member};
use crate::members::{MemberRegistry, NotFound};

/// The EdgeCluster of a certificate up to this age may be unknown to this hub, because its watch lags or
/// restarts.
const NEW_CERTIFICATE_AGE: SignedDuration = SignedDuration::from_secs(60);
/// Difference of clocks, in seconds, above which the hub reports it.
const MAX_CLOCK_DIFFERENCE: u64 = 60;

/// Returns the member of a certificate if the hub admits it now. The connection may be older than the current
/// admission.
pub fn admit(
    members: &MemberRegistry,
    certificate: &AgentCertificate,
    authority: &Authority,
) -> Result<Arc<Member>, Status> {
    let name = &certificate.cluster;
    let refusal = |reason: &str| {
        let message =
            format!("{reason}; run 'kubectl krypton join {name}' and enroll the agent again");
        match is_new(certificate, clock::wall()) {
            true => Status::unavailable(format!(
                "the certificate is new, and this hub may not have listed its EdgeCluster yet. If this persists: {message}"
            )),
            false => Status::permission_denied(message),
        }
    };
    let member = members.get(name).map_err(|problem| match problem {
        NotFound::NotYet => {
            Status::unavailable("the hub has just started and does not know its members yet")
        }
        NotFound::Gone => refusal(&format!("EdgeCluster {name} does not exist")),
    })?;
    if member.uid != certificate.uid {
        let reason = format!("this certificate belongs to a deleted EdgeCluster {name}");
        return Err(refusal(&reason));
    }
    check_admission(&member, certificate, authority)?;
    Ok(member)
}

/// Returns whether the certificate is so new that this hub may not have seen its EdgeCluster yet. The clock of
/// the issuing hub may be ahead by less than `NEW_CERTIFICATE_AGE`.
fn is_new(certificate: &AgentCertificate, now: Timestamp) -> bool {
    now.duration_since(certificate.issued()).abs() < NEW_CERTIFICATE_AGE
}

/// Checks what may have changed since the admission.
pub(super) fn check_admission(
    member: &Member,
    certificate: &AgentCertificate,
    authority: &Authority,
) -> Result<(), Status> {
    if let Some(reason) = &member.admission.get().refused {
        return Err(Status::permission_denied(reason.clone()));
    }
    if certificate.not_after <= clock::wall() {
        return Err(expired());
    }
    if authority.issuer_of(&certificate.der).is_none() {
        return Err(untrusted_root(&certificate.cluster));
    }
    Ok(())
}

pub(super) fn untrusted_root(name: &str) -> Status {
    Status::unauthenticated(format!(
        "the agent's certificate is from a root that the hub no longer trusts, because its CA was rotated; run 'kubectl krypton join {name}' and enroll it again"
    ))
}

pub(super) fn expired() -> Status {
    Status::unauthenticated(
        "the agent's certificate has expired; run 'kubectl krypton join' and enroll it again",
    )
}

impl Sessions {
    /// Accepts a recorded key of the member. Rejects any other key with an event.
    pub(crate) fn check_key(
        &self,
        member: &Member,
        certificate: &AgentCertificate,
    ) -> Result<(), Status> {
        let now = clock::wall();
        let keys = member.admission.get().keys;
        let name = &certificate.cluster;
        match agent_keys::key_status(keys.as_ref(), &certificate.recorded_key(), now) {
            KeyStatus::Valid => Ok(()),
            KeyStatus::Replaced => Err(Status::unavailable(
                "a newer key has replaced that of this agent's certificate",
            )),
            // This hub may not have seen the recorded key yet.
            KeyStatus::Newer | KeyStatus::Unknown if is_new(certificate, now) => {
                Err(Status::unavailable(
                    "the certificate is new, and this hub may not have listed its EdgeCluster yet",
                ))
            }
            KeyStatus::Newer => Ok(()),
            KeyStatus::Unknown => {
                let message = agent_keys::refusal(name);
                self.members.agent_key_refused(name, now);
                self.warn(name, member, agent_keys::reason::TWO, &message);
                Err(Status::permission_denied(message))
            }
        }
    }
}

/// Rejects a credential on another cluster than the recorded one: it was copied, or the cluster was rebuilt.
pub(super) fn check_cluster(
    name: &str,
    admission: &Admission,
    cluster_uid: &str,
) -> Result<(), Status> {
    match &admission.cluster_uid {
        Some(recorded) if recorded != cluster_uid => Err(Status::failed_precondition(format!(
            "member {name} is recorded as another cluster: its credential is used on a second one. \
             If the cluster was rebuilt, run 'kubectl krypton join {name} --replace'"
        ))),
        _ => Ok(()),
    }
}

/// Returns the state of the condition for an agent whose clock is ahead of the hub's by this many seconds. The message
/// has no number: the events of later sessions are counted as one, and a small change of the clock writes no status.
pub(super) fn clock_state(seconds_ahead: i64) -> State {
    if seconds_ahead.unsigned_abs() <= MAX_CLOCK_DIFFERENCE {
        return State::new(Truth::True, reason::CLOCKS_AGREE, "");
    }
    let direction = match seconds_ahead {
        ..0 => "behind",
        _ => "ahead of",
    };
    let message = format!(
        "when it connected, the agent's clock was more than {MAX_CLOCK_DIFFERENCE} s {direction} the hub's; \
         synchronize both, as the validity of certificates depends on them"
    );
    State::new(Truth::False, reason::CLOCK_DIFFERS, message)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU64;

    use krypton_crds::edge_cluster::{AgentKeys, TenantCounts};
    use krypton_runtime::watchdog::Watchdog;
    use krypton_types::conditions;
    use tokio_util::sync::CancellationToken;

    use super::*;
    use crate::edgecluster::status::status;
    use crate::home_events::HomeEvents;
    use crate::leader::Leader;

    const MEMBER: &str = "edge-1";

    fn certificate(key: &str) -> AgentCertificate {
        let not_before = clock::wall() - SignedDuration::from_hours(48);
        AgentCertificate {
            cluster: MEMBER.to_owned(),
            uid: "u".to_owned(),
            not_before,
            not_after: not_before + SignedDuration::from_hours(96),
            serial: "01".to_owned(),
            key: key.to_owned(),
            der: Arc::default(),
        }
    }

    #[test]
    fn only_large_difference_of_clocks_is_reported() {
        for (seconds_ahead, truth, expected) in [
            (0, Truth::True, ""),
            (60, Truth::True, ""),
            (-60, Truth::True, ""),
            (61, Truth::False, "s ahead of the hub's"),
            (-61, Truth::False, "s behind the hub's"),
            (i64::MIN, Truth::False, "s behind the hub's"),
        ] {
            let state = clock_state(seconds_ahead);
            assert_eq!(state.truth, truth, "{seconds_ahead}");
            assert!(state.message.contains(expected), "{state:?}");
        }
        assert_eq!(clock_state(61), clock_state(3600));
    }

    #[test]
    fn second_key_in_use_reaches_status_and_event() {
        let (events, mut next_event) = HomeEvents::recording();
        let sessions = Sessions {
            members: Arc::default(),
            metrics: Arc::default(),
            events,
            hub_version: String::new(),
            last_number: AtomicU64::new(0),
            leader: Leader::always_leading(),
            stop: CancellationToken::new(),
            watchdog: Watchdog::default(),
        };
        let keys = AgentKeys {
            current: certificate("a").recorded_key(),
            next: None,
        };
        let member = sessions.members.get_or_create(MEMBER, "u");
        member.admission.send_replace(Admission {
            keys: Some(keys),
            ..Admission::default()
        });
        let status = || {
            let facts = sessions.members.observation(MEMBER).unwrap_or_default();
            let (counts, now) = (TenantCounts::default(), clock::wall());
            let status = status(MEMBER, None, &facts, counts, None, 1, now);
            conditions::find(&status.conditions, agent_keys::ONE_KEY)
        };

        sessions.check_key(&member, &certificate("a")).unwrap();
        assert_eq!((status(), next_event()), (None, None));
        let refused = sessions.check_key(&member, &certificate("b")).unwrap_err();
        assert_eq!(refused.code(), tonic::Code::PermissionDenied, "{refused:?}");
        let one_key = status().unwrap();
        assert_eq!(one_key.truth, Truth::False);
        assert_eq!(one_key.reason, "TwoKeysInUse");
        let (reason, message) = next_event().unwrap();
        assert_eq!(reason, "TwoKeysInUse");
        assert!(message.contains("voids all older keys"), "{message}");
    }
}
