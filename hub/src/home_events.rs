//! Records Kubernetes events on EdgeClusters and other objects of the home cluster while this hub leads. Callers never
//! wait.

use std::time::Duration;

use k8s_openapi::api::core::v1::ObjectReference;
use krypton_crds::edge_cluster::EdgeCluster;
use krypton_runtime::clock::BootTime;
use krypton_runtime::events::{EventRecorder, ObjectEvent};
use krypton_runtime::watchdog::Watchdog;
use kube::runtime::events::Reporter;
use kube::{Client, Resource, ResourceExt as _};

use crate::leader::Leader;
use crate::notify::Notifier;

/// Interval at which an unconfirmed leader checks whether it may write again.
const UNCONFIRMED_INTERVAL: Duration = Duration::from_millis(500);
/// Events in flight. If an event is dropped, the log still contains it.
const QUEUE_SIZE: usize = 64;

/// An event on a member's EdgeCluster.
#[derive(Clone, Debug)]
pub struct MemberEvent {
    pub member: String,
    /// UID of its EdgeCluster; empty if unknown.
    pub uid: String,
    pub reason: &'static str,
    pub message: String,
}

impl MemberEvent {
    /// Creates an event on this EdgeCluster.
    pub(crate) fn new(object: &EdgeCluster, reason: &'static str, message: String) -> Self {
        Self {
            member: object.name_any(),
            uid: object.uid().unwrap_or_default(),
            reason,
            message,
        }
    }

    fn object(&self) -> ObjectReference {
        ObjectReference {
            api_version: Some(EdgeCluster::api_version(&()).into_owned()),
            kind: Some(EdgeCluster::kind(&()).into_owned()),
            name: Some(self.member.clone()),
            uid: Some(self.uid.clone()).filter(|uid| !uid.is_empty()),
            ..ObjectReference::default()
        }
    }

    fn event(self, warning: bool) -> ObjectEvent {
        ObjectEvent {
            warning,
            reason: self.reason,
            message: self.message,
        }
    }

    fn log(&self) {
        let Self { member, reason, .. } = self;
        tracing::warn!(%member, reason, problem = %self.message, "recorded warning event");
    }
}

/// Events of the leading hub on objects of the home cluster.
#[derive(Clone, Debug)]
pub struct HomeEvents {
    recorder: EventRecorder,
    /// Leadership of this hub: only a leader offers events. `None` in tests, which offer all.
    leader: Option<Leader>,
    notifier: Notifier,
}

impl HomeEvents {
    /// Starts the task that writes events while this hub leads.
    pub fn start(client: Client, instance: String, leader: Leader, watchdog: &Watchdog) -> Self {
        let reporter = Reporter {
            controller: "mesh.openkcm.io/krypton-hub".to_owned(),
            instance: Some(instance),
        };
        let writer = leader.clone();
        let may_write = move || {
            let writer = writer.clone();
            async move {
                // While the leader is unconfirmed, keep the event: its sender does not send it again.
                while writer.serves_agents() && !writer.may_write(BootTime::now()) {
                    tokio::time::sleep(UNCONFIRMED_INTERVAL).await;
                }
                writer.may_write(BootTime::now())
            }
        };
        Self {
            recorder: EventRecorder::start_counting(
                client, reporter, QUEUE_SIZE, may_write, watchdog,
            ),
            leader: Some(leader),
            notifier: Notifier::default(),
        }
    }

    /// Adds the recorder of states for notifications.
    #[must_use]
    pub(crate) fn with_notifier(self, notifier: Notifier) -> Self {
        Self { notifier, ..self }
    }

    /// The recorder of states for notifications.
    pub(crate) fn notifier(&self) -> &Notifier {
        &self.notifier
    }

    /// Creates a recorder that drops all events, for use without a home cluster.
    pub fn discarding() -> Self {
        Self {
            recorder: EventRecorder::queue(1).0,
            leader: None,
            notifier: Notifier::default(),
        }
    }

    /// Returns a recorder, and a function that yields the reasons and messages of its events.
    #[cfg(test)]
    pub(crate) fn recording() -> (Self, impl FnMut() -> Option<(&'static str, String)>) {
        let (recorder, mut queue) = EventRecorder::queue(QUEUE_SIZE);
        let next_event = move || {
            let event = queue.try_recv().ok()?.event;
            Some((event.reason, event.message))
        };
        let events = Self {
            recorder,
            ..Self::discarding()
        };
        (events, next_event)
    }

    /// Logs a warning and records it as an event.
    pub fn warn(&self, event: MemberEvent) {
        event.log();
        self.record_for_member(true, event.reason, event);
    }

    /// Records a warning if the queue has room. Otherwise returns false, and the caller retries later.
    #[must_use]
    pub fn try_warn(&self, event: MemberEvent) -> bool {
        self.try_record(true, event, MemberEvent::log)
    }

    /// Like [`Self::try_warn`], but with type `Normal`.
    #[must_use]
    pub fn try_record_normal(&self, event: MemberEvent) -> bool {
        self.try_record(false, event, |event| {
            tracing::info!(member = %event.member, reason = event.reason, note = %event.message, "recorded event");
        })
    }

    fn try_record(&self, warning: bool, event: MemberEvent, log: fn(&MemberEvent)) -> bool {
        let leader = self.leader.as_ref();
        let may_write = leader.is_none_or(|leader| leader.may_write(BootTime::now()));
        let object_event = event.clone().event(warning);
        let recorded = may_write
            && self
                .recorder
                .try_record(event.object(), event.reason, object_event);
        if recorded {
            log(&event);
        }
        recorded
    }

    /// Records an event that the caller has already logged.
    pub fn record_for_member(&self, warning: bool, action: &'static str, event: MemberEvent) {
        self.record(event.object(), action, event.event(warning));
    }

    /// Logs and records an event on another object of the home cluster.
    pub fn log_and_record(&self, object: ObjectReference, event: ObjectEvent) {
        tracing::info!(
            namespace = object.namespace,
            name = object.name,
            reason = event.reason,
            note = %event.message,
            "recorded event"
        );
        self.recorder.record_event(object, event);
    }

    /// Records an event on another object that the caller has already logged.
    pub fn record(&self, object: ObjectReference, action: &'static str, event: ObjectEvent) {
        self.recorder.record(object, action, event);
    }
}
