//! Reports the expiry of credentials: the conditions of EdgeClusters, and the schedule of warning events.
//! Pure.

use std::collections::BTreeMap;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use krypton_types::conditions::{self, State, Truth};
use krypton_types::validity::{CredentialState, Validity};

/// Reasons of the conditions and of their events.
pub mod reason {
    pub const CURRENT: &str = "Current";
    pub const SOON: &str = "CertificateExpiresSoon";
    pub const EXPIRED: &str = "CertificateExpired";
}

/// Interval between repeated warnings.
const REPEAT_EVERY: SignedDuration = SignedDuration::from_hours(24);

/// A credential that a member depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum MemberCredential {
    /// The agent's certificate.
    Agent,
    /// The client certificate or token of the kubeconfig that the hub has for the member.
    Access,
}

impl MemberCredential {
    const ALL: [Self; 2] = [Self::Agent, Self::Access];

    /// Returns the type of its condition.
    pub fn condition(self) -> &'static str {
        match self {
            Self::Agent => "CertificateCurrent",
            Self::Access => "AccessCurrent",
        }
    }

    /// Returns the state of its condition, with the remedy in the message.
    pub fn state(self, member: &str, validity: Validity, now: Timestamp) -> State {
        let end = Timestamp::from_second(validity.not_after.as_second());
        let end = end.unwrap_or(validity.not_after);
        let state = validity.state_at(now);
        let message = match (self, state) {
            (_, CredentialState::Current) => {
                return State::new(Truth::True, reason::CURRENT, "");
            }
            (Self::Agent, CredentialState::Soon) => format!(
                "the agent's certificate expires at {end} and should have been renewed by now; see the agent's log. After it has expired, run 'kubectl krypton join {member}'"
            ),
            (Self::Agent, CredentialState::Expired) => format!(
                "the agent's certificate expired at {end}; run 'kubectl krypton join {member}' and enroll the agent again. Until then it keeps its last desired state"
            ),
            (Self::Access, CredentialState::Soon) => format!(
                "the credential of the member's kubeconfig expires at {end}; put a newer kubeconfig into its source"
            ),
            (Self::Access, CredentialState::Expired) => format!(
                "the credential of the member's kubeconfig expired at {end}; put a newer kubeconfig into its source"
            ),
        };
        let reason = match state {
            CredentialState::Expired => reason::EXPIRED,
            _ => reason::SOON,
        };
        State::new(Truth::False, reason, message)
    }
}

/// Sets the condition of each existing credential, and removes the others.
pub fn set_conditions(
    conditions: &mut Vec<Condition>,
    member: &str,
    credentials: [(MemberCredential, Option<Validity>); 2],
    generation: i64,
    now: Timestamp,
) {
    for (credential, validity) in credentials {
        let type_ = credential.condition();
        match validity {
            Some(validity) => {
                let state = credential.state(member, validity, now);
                conditions::set(conditions, type_, &state, generation, now);
            }
            None => conditions.retain(|condition| condition.type_ != type_),
        }
    }
}

/// The warnings already recorded: one shortly before expiry, one at expiry, and a repetition each day. A
/// hub that starts assumes that its predecessor recorded the current condition's warning. It therefore
/// warns again no earlier than the next day.
#[derive(Debug, Default)]
pub struct ExpiryReminders {
    recorded: BTreeMap<(String, MemberCredential), ReminderStage>,
}

/// The reason, and how many days it has lasted. `None` if the credential is current.
type ReminderStage = Option<(&'static str, i64)>;

impl ExpiryReminders {
    /// Passes the reason and message of each due warning for a member to `emit`. `recorded_conditions` are the written
    /// ones, and `next` the ones about to be written. If `emit` returns false, the warning remains due.
    pub fn check(
        &mut self,
        member: &str,
        recorded_conditions: &[Condition],
        next: &[Condition],
        now: Timestamp,
        mut emit: impl FnMut(&'static str, String) -> bool,
    ) {
        for credential in MemberCredential::ALL {
            let (current, message) = reminder_stage(next, credential, now).unzip();
            let key = (member.to_owned(), credential);
            let previous = self.recorded.remove(&key);
            // `next` will be recorded before the following call, so compare with it then.
            let previous = previous.unwrap_or_else(|| {
                reminder_stage(recorded_conditions, credential, now)
                    .unzip()
                    .0
            });
            let is_recorded = match (current, message) {
                (Some((reason, _)), Some(message)) if previous != current => {
                    emit(reason, message.to_owned())
                }
                _ => true,
            };
            self.recorded
                .insert(key, if is_recorded { current } else { previous });
        }
    }

    /// Forgets members that left the fleet.
    pub fn retain(&mut self, is_member: impl Fn(&str) -> bool) {
        self.recorded.retain(|(member, _), _| is_member(member));
    }
}

/// Returns the stage and the message of a credential that is not current.
fn reminder_stage(
    conditions: &[Condition],
    credential: MemberCredential,
    now: Timestamp,
) -> Option<((&'static str, i64), &str)> {
    let condition = conditions
        .iter()
        .find(|condition| condition.type_ == credential.condition())
        .filter(|condition| condition.status != Truth::True.as_str())?;
    let reason = match &*condition.reason {
        reason::EXPIRED => reason::EXPIRED,
        _ => reason::SOON,
    };
    let since = now.duration_since(condition.last_transition_time.0);
    Some((
        (reason, since.as_secs() / REPEAT_EVERY.as_secs()),
        &condition.message,
    ))
}

#[cfg(test)]
mod tests {
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

    /// A member's conditions and reminders, maintained as the hub does.
    struct ReminderFixture {
        conditions: Vec<Condition>,
        reminders: ExpiryReminders,
        /// Whether the event recorder has room.
        accepts_events: bool,
    }

    impl ReminderFixture {
        fn new() -> Self {
            Self {
                conditions: Vec::new(),
                reminders: ExpiryReminders::default(),
                accepts_events: true,
            }
        }

        fn reasons_at(&mut self, validity: Option<Validity>, now: i64) -> Vec<&'static str> {
            let credentials = [
                (MemberCredential::Agent, validity),
                (MemberCredential::Access, None),
            ];
            let mut next = self.conditions.clone();
            set_conditions(&mut next, "edge-1", credentials, 1, at(now));
            let mut reasons = Vec::new();
            let (reminders, conditions) = (&mut self.reminders, &self.conditions);
            reminders.check("edge-1", conditions, &next, at(now), |reason, _| {
                if self.accepts_events {
                    reasons.push(reason);
                }
                self.accepts_events
            });
            self.conditions = next;
            reasons
        }
    }

    #[test]
    fn expiry_event_repeats_daily_per_certificate() {
        let (first, second) = (
            validity_between(0, 100 * DAY),
            validity_between(90 * DAY, 190 * DAY),
        );
        let mut fixture = ReminderFixture::new();
        for (validity, now, expected) in [
            (Some(first), 79 * DAY, vec![]),
            (Some(first), 80 * DAY, vec![reason::SOON]),
            (Some(first), 80 * DAY + 20, vec![]),
            (Some(first), 81 * DAY, vec![reason::SOON]),
            (Some(first), 81 * DAY + 20, vec![]),
            (Some(second), 91 * DAY, vec![]),
            (Some(second), 170 * DAY, vec![reason::SOON]),
            (Some(second), 190 * DAY, vec![reason::EXPIRED]),
            (Some(second), 190 * DAY + 20, vec![]),
            (None, 191 * DAY, vec![]),
        ] {
            assert_eq!(fixture.reasons_at(validity, now), expected, "{now}");
        }
        assert_eq!(fixture.conditions, []);
    }

    #[test]
    fn deferred_expiry_event_is_emitted_once() {
        let certificate = Some(validity_between(0, 100 * DAY));
        let mut fixture = ReminderFixture::new();
        assert_eq!(fixture.reasons_at(certificate, 79 * DAY), [""; 0]);
        fixture.accepts_events = false;
        for check in 0..3 {
            assert_eq!(
                fixture.reasons_at(certificate, 80 * DAY + check * 20),
                [""; 0]
            );
        }
        fixture.accepts_events = true;
        assert_eq!(
            fixture.reasons_at(certificate, 80 * DAY + 60),
            [reason::SOON]
        );
        assert_eq!(fixture.reasons_at(certificate, 80 * DAY + 80), [""; 0]);
        // A credential renewed before its warning was recorded needs none.
        fixture.accepts_events = false;
        assert_eq!(fixture.reasons_at(certificate, 100 * DAY), [""; 0]);
        fixture.accepts_events = true;
        assert_eq!(
            fixture.reasons_at(Some(validity_between(90 * DAY, 190 * DAY)), 100 * DAY + 20),
            [""; 0]
        );
    }

    #[test]
    fn expiry_reminder_is_daily_at_most_despite_restarts() {
        let validity = Some(validity_between(0, 100 * DAY));
        let mut fixture = ReminderFixture::new();
        let mut count = fixture.reasons_at(validity, 79 * DAY).len();
        for hour in 0..24 * 10 {
            // A new hub each hour, with three checks.
            fixture.reminders = ExpiryReminders::default();
            for check in 0..3 {
                count += fixture
                    .reasons_at(validity, 80 * DAY + hour * 3600 + check * 1200)
                    .len();
            }
        }
        assert!(count <= 10, "{count}");
    }

    #[test]
    fn expiry_message_names_member_time_and_remedy() {
        let soon = MemberCredential::Agent.state("edge-1", validity_between(0, 1000), at(900));
        let expired = MemberCredential::Agent.state("edge-1", validity_between(0, 1000), at(1000));
        for state in [soon, expired] {
            assert_eq!(state.truth, Truth::False);
            for word in ["1970-01-01T00:16:40Z", "kubectl krypton join edge-1"] {
                assert!(state.message.contains(word), "{}", state.message);
            }
        }
        let access = MemberCredential::Access.state("edge-1", validity_between(0, 1000), at(1000));
        assert!(access.message.contains("kubeconfig"), "{}", access.message);
    }
}
