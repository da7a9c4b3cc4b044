//! Reports the expiry of credentials: the conditions of EdgeClusters, and the schedule of warning events.
//! Pure.

use std::collections::BTreeMap;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use krypton_types::conditions::{self, State, Truth};
use x509_parser::prelude::{FromDer as _, X509Certificate};

use crate::ca::{AGENT_CERTIFICATE_LIFE, BACK_DATED};

/// Reasons of the conditions and of their events.
pub mod reason {
    pub const CURRENT: &str = "Current";
    pub const SOON: &str = "CertificateExpiresSoon";
    pub const EXPIRED: &str = "CertificateExpired";
}

/// Remaining share of a certificate's lifetime at which the hub warns. Renewal starts at 30 %, so it is
/// overdue by then.
const LEFT_PERCENT: i128 = 20;
/// Interval between repeated warnings.
const AGAIN: SignedDuration = SignedDuration::from_hours(24);

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

    /// Returns the expiry state at `now`.
    pub fn at(self, now: Timestamp) -> CredentialState {
        let life = self.not_after.duration_since(self.not_before);
        let left = self.not_after.duration_since(now);
        if !left.is_positive() {
            CredentialState::Expired
        } else if left.as_nanos() * 100 <= life.as_nanos() * LEFT_PERCENT {
            CredentialState::Soon
        } else {
            CredentialState::Current
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CredentialState {
    Current,
    Soon,
    Expired,
}

/// A credential that a member depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Credential {
    /// The agent's certificate.
    Agent,
    /// The client certificate or token of the kubeconfig that the hub has for the member.
    Access,
}

impl Credential {
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
        match (self, validity.at(now)) {
            (_, CredentialState::Current) => State::new(Truth::True, reason::CURRENT, ""),
            (Self::Agent, CredentialState::Soon) => State::new(
                Truth::False,
                reason::SOON,
                format!(
                    "the agent's certificate expires at {end} and should have been renewed by now; see the agent's log. After it has expired, run 'kubectl krypton join {member}'"
                ),
            ),
            (Self::Agent, CredentialState::Expired) => State::new(
                Truth::False,
                reason::EXPIRED,
                format!(
                    "the agent's certificate expired at {end}; run 'kubectl krypton join {member}' and enroll the agent again. Until then it keeps its last desired state"
                ),
            ),
            (Self::Access, CredentialState::Soon) => State::new(
                Truth::False,
                reason::SOON,
                format!(
                    "the credential of the member's kubeconfig expires at {end}; put a newer kubeconfig into its source"
                ),
            ),
            (Self::Access, CredentialState::Expired) => State::new(
                Truth::False,
                reason::EXPIRED,
                format!(
                    "the credential of the member's kubeconfig expired at {end}; put a newer kubeconfig into its source"
                ),
            ),
        }
    }
}

/// Sets the condition of each existing credential, and removes the others.
pub fn put(
    record: &mut Vec<Condition>,
    member: &str,
    credentials: [(Credential, Option<Validity>); 2],
    generation: i64,
    now: Timestamp,
) {
    for (credential, validity) in credentials {
        let type_ = credential.condition();
        match validity {
            Some(validity) => {
                let state = credential.state(member, validity, now);
                conditions::set(record, type_, &state, generation, now);
            }
            None => record.retain(|condition| condition.type_ != type_),
        }
    }
}

/// A warning event for a member: its reason and message.
pub type Warning = (&'static str, String);

/// The warnings already recorded: one shortly before expiry, one at expiry, and a repetition each day. A
/// hub that starts assumes that its predecessor recorded the current condition's warning. It therefore
/// warns again no earlier than the next day.
#[derive(Debug, Default)]
pub struct Reminders {
    told: BTreeMap<(String, Credential), Stage>,
}

/// The reason, and how many days it has lasted. `None` if the credential is current.
type Stage = Option<(&'static str, i64)>;

impl Reminders {
    /// Passes due warnings for a member to `tell`. `record` holds the recorded conditions, and `next` the
    /// ones about to be written. If `tell` returns false, the warning remains due.
    pub fn look(
        &mut self,
        member: &str,
        record: &[Condition],
        next: &[Condition],
        now: Timestamp,
        mut tell: impl FnMut(Warning) -> bool,
    ) {
        for credential in Credential::ALL {
            let (is, message) = stage(next, credential, now).unzip();
            let key = (member.to_owned(), credential);
            let before = self.told.remove(&key);
            // `next` will be recorded before the following call, so compare with it then.
            let before = before.unwrap_or_else(|| stage(record, credential, now).unzip().0);
            let told = match (is, message) {
                (Some((why, _)), Some(message)) if before != is => tell((why, message.to_owned())),
                _ => true,
            };
            self.told.insert(key, if told { is } else { before });
        }
    }

    /// Forgets members that left the fleet.
    pub fn keep(&mut self, is_member: impl Fn(&str) -> bool) {
        self.told.retain(|(member, _), _| is_member(member));
    }
}

/// Returns the stage and the message of a credential that is not current.
fn stage(
    conditions: &[Condition],
    credential: Credential,
    now: Timestamp,
) -> Option<((&'static str, i64), &str)> {
    let condition = conditions
        .iter()
        .find(|condition| condition.type_ == credential.condition())
        .filter(|condition| condition.status != Truth::True.as_str())?;
    let why = match &*condition.reason {
        reason::EXPIRED => reason::EXPIRED,
        _ => reason::SOON,
    };
    let since = now.duration_since(condition.last_transition_time.0);
    Some(((why, since.as_secs() / AGAIN.as_secs()), &condition.message))
}

/// Returns the expiry of a DER certificate.
pub fn end_of(der: &[u8]) -> Option<Timestamp> {
    let (_, certificate) = X509Certificate::from_der(der).ok()?;
    Timestamp::from_second(certificate.validity().not_after.timestamp()).ok()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const DAY: i64 = 24 * 3600;

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

    fn life(from: i64, to: i64) -> Validity {
        Validity {
            not_before: at(from),
            not_after: at(to),
        }
    }

    #[test]
    fn certificate_expires_soon_in_last_fifth_of_life() {
        let validity = life(1000, 2000);
        for (now, expected) in [
            (0, CredentialState::Current),
            (1799, CredentialState::Current),
            (1800, CredentialState::Soon),
            (1999, CredentialState::Soon),
            (2000, CredentialState::Expired),
            (9999, CredentialState::Expired),
        ] {
            assert_eq!(validity.at(at(now)), expected, "{now}");
        }
        assert_eq!(life(1000, 1000).at(at(999)), CredentialState::Current);
        // If only the expiry is recorded, the usual lifetime applies.
        let known = Validity::until(at(100 * DAY));
        assert_eq!(known.at(at(98 * DAY)), CredentialState::Current);
        assert_eq!(known.at(at(99 * DAY)), CredentialState::Soon);
    }

    proptest! {
        #[test]
        fn credential_state_never_improves_alone(from in 0_i64..1000, length in 0_i64..1000, now in 0_i64..3000, later in 0_i64..1000) {
            let rank = |now| match life(from, from + length).at(at(now)) {
                CredentialState::Current => 0,
                CredentialState::Soon => 1,
                CredentialState::Expired => 2,
            };
            prop_assert!(rank(now) <= rank(now + later));
        }
    }

    /// A member's conditions and reminders, maintained as the hub does.
    struct Record {
        conditions: Vec<Condition>,
        reminders: Reminders,
        /// Whether the event recorder has room.
        listens: bool,
    }

    impl Record {
        fn new() -> Self {
            Self {
                conditions: Vec::new(),
                reminders: Reminders::default(),
                listens: true,
            }
        }

        fn at(&mut self, validity: Option<Validity>, now: i64) -> Vec<&'static str> {
            let credentials = [(Credential::Agent, validity), (Credential::Access, None)];
            let mut next = self.conditions.clone();
            put(&mut next, "edge-1", credentials, 1, at(now));
            let mut told = Vec::new();
            let (reminders, record) = (&mut self.reminders, &self.conditions);
            reminders.look("edge-1", record, &next, at(now), |(why, _)| {
                if self.listens {
                    told.push(why);
                }
                self.listens
            });
            self.conditions = next;
            told
        }
    }

    #[test]
    fn expiry_event_repeats_daily_per_certificate() {
        let (first, second) = (life(0, 100 * DAY), life(90 * DAY, 190 * DAY));
        let mut record = Record::new();
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
            assert_eq!(record.at(validity, now), expected, "{now}");
        }
        assert_eq!(record.conditions, []);
    }

    #[test]
    fn deferred_expiry_event_is_emitted_once() {
        let certificate = Some(life(0, 100 * DAY));
        let mut record = Record::new();
        assert_eq!(record.at(certificate, 79 * DAY), [""; 0]);
        record.listens = false;
        for look in 0..3 {
            assert_eq!(record.at(certificate, 80 * DAY + look * 20), [""; 0]);
        }
        record.listens = true;
        assert_eq!(record.at(certificate, 80 * DAY + 60), [reason::SOON]);
        assert_eq!(record.at(certificate, 80 * DAY + 80), [""; 0]);
        // A credential renewed before its warning was recorded needs none.
        record.listens = false;
        assert_eq!(record.at(certificate, 100 * DAY), [""; 0]);
        record.listens = true;
        assert_eq!(
            record.at(Some(life(90 * DAY, 190 * DAY)), 100 * DAY + 20),
            [""; 0]
        );
    }

    #[test]
    fn expiry_reminder_is_daily_at_most_despite_restarts() {
        let validity = Some(life(0, 100 * DAY));
        let mut record = Record::new();
        let mut told = record.at(validity, 79 * DAY).len();
        for hour in 0..24 * 10 {
            // A new hub each hour, with three checks.
            record.reminders = Reminders::default();
            for look in 0..3 {
                told += record
                    .at(validity, 80 * DAY + hour * 3600 + look * 1200)
                    .len();
            }
        }
        assert!(told <= 10, "{told}");
    }

    #[test]
    fn expiry_message_names_member_time_and_remedy() {
        let soon = Credential::Agent.state("edge-1", life(0, 1000), at(900));
        let expired = Credential::Agent.state("edge-1", life(0, 1000), at(1000));
        for state in [soon, expired] {
            assert_eq!(state.truth, Truth::False);
            for word in ["1970-01-01T00:16:40Z", "kubectl krypton join edge-1"] {
                assert!(state.message.contains(word), "{}", state.message);
            }
        }
        let access = Credential::Access.state("edge-1", life(0, 1000), at(1000));
        assert!(access.message.contains("kubeconfig"), "{}", access.message);
    }
}
