//! Notifications: the leader posts a CloudEvent to a webhook when a state changes.
//!
//! Callers record the present state of each subject and never wait. One task sends the differences, one after another.
//! Nothing is stored: the first state of a subject in a leader term is the baseline, and is not sent.

mod changes;
mod webhook;

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use krypton_crds::krypton_deployment::{DeploymentPhase, KryptonDeploymentStatus};
use krypton_runtime::clock::{self, BootTime};
use krypton_runtime::periodic::{NextRun, Periodic, Schedule};
use krypton_runtime::sync::Mutex;
use krypton_types::ca_rotation::RotationPhase;
use krypton_types::conditions::{self, READY, Truth};
use krypton_types::deployment::DeploymentKey;
use krypton_types::error_chain::chain;
use krypton_types::tenant::{TenantKey, TenantReport};
use krypton_types::validity::{CredentialState, Validity};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use tokio_util::sync::CancellationToken;

use crate::args::Settings;
use crate::leader::Leader;

use changes::{Change, Changes, Kind, StateName, Status, Subject};
pub(crate) use webhook::{Webhook, WebhookError};

/// At most five posts a second. A failed one is retried with back-off.
const PACE: Schedule = Schedule {
    every: Duration::from_millis(200),
    jitter: 0.0,
    retry_max: Duration::from_secs(5 * 60),
};
/// Pause while no change is due.
const IDLE: Duration = Duration::from_secs(1);

/// The conditions of an EdgeCluster whose changes are sent.
const MEMBER_CONDITIONS: [(Kind, &str); 3] = [
    (Kind::EdgeCluster, READY),
    (Kind::Credential, "CertificateCurrent"),
    (Kind::Credential, "AccessCurrent"),
];
/// The fleet's chart.
const CHART: Subject<'static> = Subject::new(Kind::Chart, "", "", "");
/// Name of the credential that is the hub's CA.
const CA_CREDENTIAL: &str = "CertificateAuthority";

const SENT: &str = "sent";
const FAILED: &str = "failed";
const DROPPED: &str = "dropped";

/// Counts notifications by outcome.
#[derive(Clone, Debug)]
pub(crate) struct NotificationCounts(pub(crate) Family<[(&'static str, &'static str); 1], Counter>);

impl Default for NotificationCounts {
    fn default() -> Self {
        let counts = Family::default();
        for outcome in [SENT, FAILED, DROPPED] {
            drop(counts.get_or_create(&[("outcome", outcome)]));
        }
        Self(counts)
    }
}

impl NotificationCounts {
    fn count(&self, outcome: &'static str) {
        self.0.get_or_create(&[("outcome", outcome)]).inc();
    }
}

/// Prepares the webhook of `--notify-url`.
///
/// # Errors
/// Returns an error if the key cannot be read.
pub(crate) async fn open(settings: &Settings) -> Result<Option<Webhook>, WebhookError> {
    let notify = &settings.notify;
    let (Some(url), Some(key)) = (notify.url.clone(), notify.key_file.clone()) else {
        return Ok(None);
    };
    Webhook::open(url, key, &settings.namespace).await.map(Some)
}

/// Records the states of subjects. Without a webhook, it does nothing. Clones share it.
#[derive(Clone, Default)]
pub(crate) struct Notifier(Option<Arc<State>>);

impl fmt::Debug for Notifier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Notifier").finish_non_exhaustive()
    }
}

/// Shared by the recorders and the sender.
struct State {
    /// Locked after all other locks.
    changes: Mutex<Changes>,
    leader: Leader,
    counts: NotificationCounts,
    allow_chart_skip: bool,
}

impl Notifier {
    /// Returns a notifier, and the task that posts its changes to `webhook` until `stop`.
    pub(crate) fn start(
        webhook: Webhook,
        leader: Leader,
        counts: NotificationCounts,
        allow_chart_skip: bool,
        stop: CancellationToken,
    ) -> (Self, impl Future<Output = ()> + Send + 'static) {
        let state = Arc::new(State {
            changes: Mutex::default(),
            leader,
            counts,
            allow_chart_skip,
        });
        let sender = Arc::clone(&state);
        let sending = async move { sender.send(&webhook, &stop).await };
        (Self(Some(state)), sending)
    }

    /// Returns a notifier, and a function that yields its changes. They need not be due.
    #[cfg(test)]
    pub(crate) fn recording(leader: Leader) -> (Self, impl Fn() -> Option<String>) {
        let state = Arc::new(State {
            changes: Mutex::default(),
            leader,
            counts: NotificationCounts::default(),
            allow_chart_skip: false,
        });
        let notifier = Self(Some(Arc::clone(&state)));
        let next_change = move || {
            let Change { kind, from, to, .. } = state.take_any()?;
            Some(format!("{kind:?}: {from} -> {to}"))
        };
        (notifier, next_change)
    }

    /// Records a member's report on a Tenant. An unknown state is not a change: the member is about to report.
    pub(crate) fn tenant(&self, member: &str, key: &TenantKey, report: &TenantReport) {
        let Some(state) = &self.0 else { return };
        let reported = &report.state;
        let phase = conditions::phase(reported, state.allow_chart_skip);
        let shown = match (&reported.error, phase) {
            (Some(error), conditions::Phase::Error) => error,
            _ => &reported.ready,
        };
        if shown.truth == Truth::Unknown {
            return;
        }
        let status = Status {
            state: Cow::Borrowed(phase.as_str()),
            reason: &shown.reason,
            message: &shown.message,
        };
        state.observe(tenant_subject(member, key), status);
    }

    pub(crate) fn forget_tenant(&self, member: &str, key: &TenantKey) {
        self.forget(tenant_subject(member, key));
    }

    /// Records the conditions of a member's EdgeCluster.
    pub(crate) fn member(&self, member: &str, conditions: &[Condition]) {
        let Some(state) = &self.0 else { return };
        for (kind, type_) in MEMBER_CONDITIONS {
            let subject = member_subject(kind, type_, member);
            match conditions::find(conditions, type_) {
                Some(condition) => {
                    let name = match condition.truth {
                        Truth::True => StateName::Borrowed(type_),
                        _ => StateName::Owned(condition.reason.clone()),
                    };
                    let status = Status {
                        state: name,
                        reason: &condition.reason,
                        message: &condition.message,
                    };
                    state.observe(subject, status);
                }
                None => self.forget(subject),
            }
        }
    }

    pub(crate) fn forget_member(&self, member: &str) {
        for (kind, type_) in MEMBER_CONDITIONS {
            self.forget(member_subject(kind, type_, member));
        }
    }

    /// Records the decided status of a KryptonDeployment.
    pub(crate) fn deployment(&self, key: &DeploymentKey, status: &KryptonDeploymentStatus) {
        let Some(state) = &self.0 else { return };
        // After a failover, the hub waits for the report.
        let Some(phase @ (DeploymentPhase::Ready | DeploymentPhase::Error)) = status.phase else {
            return;
        };
        let ready = conditions::find(&status.conditions, READY);
        let status = Status {
            state: Cow::Borrowed(phase.as_str()),
            reason: ready.as_ref().map_or("", |ready| ready.reason.as_str()),
            message: status.last_message.as_deref().unwrap_or_default(),
        };
        state.observe(deployment_subject(key), status);
    }

    pub(crate) fn forget_deployment(&self, key: &DeploymentKey) {
        self.forget(deployment_subject(key));
    }

    /// Records the chart version that the last leader recorded on home. It is the baseline.
    pub(crate) fn recorded_chart(&self, version: &str) {
        let Some(state) = &self.0 else { return };
        if let Some(term) = state.leader.term_since() {
            let version = version.to_owned().into();
            state.changes.lock().set_baseline(term, CHART, version);
        }
    }

    /// Records the version of the fleet's chart.
    pub(crate) fn chart(&self, version: &str) {
        let Some(state) = &self.0 else { return };
        state.observe(CHART, Status::named(version.to_owned()));
    }

    /// Records the phase of the rotation of the hub's CA.
    pub(crate) fn ca_rotation(&self, phase: RotationPhase) {
        let Some(state) = &self.0 else { return };
        let subject = Subject::new(Kind::CertificateAuthority, "", "", "");
        state.observe(subject, Status::named(phase.to_string()));
    }

    /// Records the validity of the hub's CA.
    pub(crate) fn ca_expiry(&self, validity: Validity) {
        let Some(state) = &self.0 else { return };
        let name = match validity.state_at(clock::wall()) {
            CredentialState::Current => "Current",
            CredentialState::Soon => "CertificateExpiresSoon",
            CredentialState::Expired => "CertificateExpired",
        };
        let end = validity.not_after;
        let status = Status {
            state: Cow::Borrowed(name),
            reason: name,
            message: &format!("the hub's CA is valid until {end}"),
        };
        state.observe(member_subject(Kind::Credential, CA_CREDENTIAL, ""), status);
    }

    fn forget(&self, subject: Subject<'_>) {
        if let Some(state) = &self.0 {
            state.changes.lock().forget(subject);
        }
    }
}

fn tenant_subject<'a>(member: &'a str, key: &'a TenantKey) -> Subject<'a> {
    Subject::new(Kind::Tenant, &key.namespace, &key.name, member)
}

fn deployment_subject(key: &DeploymentKey) -> Subject<'_> {
    Subject::new(Kind::KryptonDeployment, &key.namespace, &key.name, "")
}

/// An EdgeCluster has the name of its member. A credential has the type of its condition as its name.
fn member_subject<'a>(kind: Kind, type_: &'a str, member: &'a str) -> Subject<'a> {
    match kind {
        Kind::EdgeCluster => Subject::new(kind, "", member, ""),
        _ => Subject::new(kind, "", type_, member),
    }
}

impl State {
    /// Records a state while this hub leads.
    fn observe(&self, subject: Subject<'_>, status: Status<'_>) {
        let Some(term) = self.leader.term_since() else {
            return;
        };
        let times = (BootTime::now(), clock::wall());
        let has_room = self.changes.lock().observe(term, subject, status, times);
        if !has_room {
            self.counts.count(DROPPED);
        }
    }

    async fn send(&self, webhook: &Webhook, stop: &CancellationToken) {
        let mut pace = Periodic::new("sending notifications", PACE);
        loop {
            let Some(change) = self.next_change() else {
                let pause = tokio::time::sleep(IDLE);
                match stop.run_until_cancelled(pause).await {
                    Some(()) => continue,
                    None => return,
                }
            };
            let mut result = webhook.post(&change).await;
            match &result {
                Ok(()) => self.counts.count(SENT),
                // Only this change is wrong. Others must not wait for it.
                Err(error) if error.is_permanent() => {
                    self.counts.count(FAILED);
                    tracing::warn!(error = %chain(error), subject = %change.name, "the receiver does not accept a notification");
                    result = Ok(());
                }
                Err(_) => {
                    self.counts.count(FAILED);
                    self.changes.lock().put_back(change, BootTime::now());
                }
            }
            let pause = pace.pause_after(result.map(|()| NextRun::AsScheduled));
            if stop.run_until_cancelled(pause).await.is_none() {
                return;
            }
        }
    }

    /// Takes the next change that is due, if this hub leads.
    fn next_change(&self) -> Option<Change> {
        let now = BootTime::now();
        let term = self.leader.term_since()?;
        if !self.leader.may_write(now) {
            return None;
        }
        self.changes.lock().take(term, now)
    }

    /// Takes a change, even one that is not due.
    #[cfg(test)]
    fn take_any(&self) -> Option<Change> {
        let later = BootTime::now() + 2 * changes::SETTLE;
        let term = self.leader.term_since()?;
        self.changes.lock().take(term, later)
    }
}

#[cfg(test)]
mod tests {
    use krypton_types::conditions::State as ConditionState;

    use super::webhook::tests::answering;
    use super::*;
    use crate::edgecluster::credential_expiry::MemberCredential;
    use crate::leader::LeaderState;

    /// The state of a leader with a due change of two members each.
    fn state_with_changes() -> Arc<State> {
        let state = Notifier::recording(Leader::always_leading()).0.0.unwrap();
        let term = state.leader.term_since().unwrap();
        let times = (BootTime::default(), clock::wall());
        for member in ["edge-1", "edge-2"] {
            let subject = member_subject(Kind::EdgeCluster, READY, member);
            for name in ["Ready", "Unreachable"] {
                let status = Status::named(name);
                assert!(state.changes.lock().observe(term, subject, status, times));
            }
        }
        state
    }

    fn count(state: &State, outcome: &'static str) -> u64 {
        let counts = &state.counts.0;
        counts.get_or_create(&[("outcome", outcome)]).get()
    }

    /// Sends changes until a second after the first failure. Returns the changes that wait then.
    async fn send_past_failure(state: &State, status: u16) -> Vec<Change> {
        let (webhook, _requests) = answering(status).await;
        let stop = CancellationToken::new();
        let mut sending = Box::pin(state.send(&webhook, &stop));
        let failed = async {
            while count(state, FAILED) == 0 {
                tokio::task::yield_now().await;
            }
        };
        tokio::select! {
            () = &mut sending => {}
            () = failed => {}
        }
        // The shortest back-off takes longer, and the pause between two changes less.
        tokio::time::pause();
        let second = tokio::time::timeout(Duration::from_secs(1), sending).await;
        assert!(second.is_err());
        tokio::time::resume();
        std::iter::from_fn(|| state.take_any()).collect()
    }

    #[tokio::test]
    async fn failed_change_is_sent_again_after_backoff() {
        let state = state_with_changes();
        let waiting = send_past_failure(&state, 500).await;
        assert_eq!((waiting.len(), count(&state, FAILED)), (2, 1));
        for change in waiting {
            state.changes.lock().put_back(change, BootTime::default());
        }
        let (webhook, mut requests) = answering(200).await;
        let stop = CancellationToken::new();
        let received = async {
            for _ in 0..2 {
                requests.recv().await.unwrap();
            }
            stop.cancel();
        };
        tokio::join!(Box::pin(state.send(&webhook, &stop)), received);
        assert_eq!(count(&state, SENT), 2);
        assert!(state.take_any().is_none());
    }

    #[tokio::test]
    async fn rejected_change_is_dropped_without_backoff() {
        for status in [400, 413, 422] {
            let state = state_with_changes();
            let waiting = send_past_failure(&state, status).await;
            assert_eq!(waiting.len(), 0, "{status}");
        }
    }

    #[test]
    fn member_conditions_include_all_credentials() {
        let credentials = [MemberCredential::Agent, MemberCredential::Access];
        for type_ in credentials.map(MemberCredential::condition) {
            assert!(MEMBER_CONDITIONS.contains(&(Kind::Credential, type_)));
        }
    }

    #[test]
    fn only_leader_records_known_phases() {
        let (leader_state, leader) = Leader::with_state(LeaderState::Standby { leader: None });
        let (notifier, next_change) = Notifier::recording(leader);
        let key = TenantKey::new("default", "acme");
        let report = |truth| TenantReport::new(1, ConditionState::new(truth, "Reason", ""));
        notifier.tenant("edge-1", &key, &report(Truth::False));
        leader_state.send_replace(Leader::always_leading().state());
        for truth in [Truth::Unknown, Truth::True, Truth::Unknown] {
            notifier.tenant("edge-1", &key, &report(truth));
            assert_eq!(next_change(), None);
        }
        notifier.tenant("edge-1", &key, &report(Truth::False));
        let expected = "Tenant: Ready -> Pending";
        assert_eq!(next_change().as_deref(), Some(expected));
        // Without a webhook, nothing happens.
        Notifier::default().tenant("edge-1", &key, &report(Truth::True));
    }
}
