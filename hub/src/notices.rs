//! Records Kubernetes events on EdgeClusters and other objects of the home cluster. A full queue drops the
//! newest event, and callers never wait.

use std::time::Duration;

use k8s_openapi::api::core::v1::ObjectReference;
use krypton_crds::edge_cluster::EdgeCluster;
use krypton_runtime::clock::BootTime;
use krypton_runtime::effect;
use krypton_runtime::watchdog::Watchdog;
use krypton_types::error_chain::chain;
use kube::runtime::events::{Event, EventType, Recorder, Reporter};
use kube::{Client, Resource};
use tokio::sync::mpsc;
use tokio::sync::mpsc::error::TrySendError;

use crate::leader::Leader;

/// Interval at which an unconfirmed leader checks whether it may write again.
const IN_DOUBT: Duration = Duration::from_millis(500);
const DEADLINE: Duration = Duration::from_secs(10);
/// Events in flight. If an event is dropped, the log still contains it.
const QUEUE: usize = 64;

/// An event on a member's EdgeCluster.
#[derive(Clone, Debug)]
pub struct MemberEvent {
    pub member: String,
    /// UID of its EdgeCluster; empty if unknown.
    pub uid: String,
    pub reason: &'static str,
    pub message: String,
}

/// Sender of the event queue.
#[derive(Clone, Debug)]
pub struct EventRecorder {
    queue: mpsc::Sender<QueuedEvent>,
    /// Leadership of this hub: only a leader offers events. `None` in tests, which offer all.
    lead: Option<Leader>,
}

/// An event. The recorder counts events of one object with equal fields as one.
#[derive(Clone, Debug)]
struct QueuedEvent {
    kind: EventType,
    action: &'static str,
    about: ObjectReference,
    reason: &'static str,
    message: String,
}

impl QueuedEvent {
    fn of_member(kind: EventType, action: &'static str, notice: MemberEvent) -> Self {
        let about = ObjectReference {
            api_version: Some(EdgeCluster::api_version(&()).into_owned()),
            kind: Some(EdgeCluster::kind(&()).into_owned()),
            name: Some(notice.member),
            uid: Some(notice.uid).filter(|uid| !uid.is_empty()),
            ..ObjectReference::default()
        };
        Self {
            kind,
            action,
            about,
            reason: notice.reason,
            message: notice.message,
        }
    }
}

impl EventRecorder {
    /// Starts the task that writes events while this hub leads.
    pub fn start(client: Client, instance: String, lead: Leader, watchdog: &Watchdog) -> Self {
        let (queue, mut notices) = mpsc::channel::<QueuedEvent>(QUEUE);
        let reporter = Reporter {
            controller: "mesh.openkcm.io/krypton-hub".to_owned(),
            instance: Some(instance),
        };
        // The recorder aggregates repeated events into one with a count.
        let recorder = Recorder::new(client, reporter);
        let leads = lead.clone();
        let writing = async move {
            while let Some(told) = notices.recv().await {
                // While the leader is unconfirmed, keep the event: its sender does not send it again.
                while leads.serves() && !leads.writes(BootTime::now()) {
                    tokio::time::sleep(IN_DOUBT).await;
                }
                if !leads.writes(BootTime::now()) {
                    continue;
                }
                let event = Event {
                    type_: told.kind,
                    reason: told.reason.to_owned(),
                    note: Some(told.message),
                    action: told.action.to_owned(),
                    secondary: None,
                };
                let written = effect!("notice.write", recorder.publish(&event, &told.about));
                match tokio::time::timeout(DEADLINE, written).await {
                    Ok(Ok(())) => {}
                    Ok(Err(error)) => tracing::debug!(error = %chain(&error), "event lost"),
                    Err(_) => tracing::debug!("event lost: no answer in time"),
                }
            }
        };
        tokio::spawn(watchdog.watch("writing events", writing));
        Self {
            queue,
            lead: Some(lead),
        }
    }

    /// Creates a recorder that drops all events, for use without a home cluster.
    pub fn nowhere() -> Self {
        Self {
            queue: mpsc::channel(1).0,
            lead: None,
        }
    }

    /// Returns a recorder, and a function that yields the reasons and messages of its events.
    #[cfg(test)]
    pub(crate) fn heard() -> (Self, impl FnMut() -> Option<(&'static str, String)>) {
        let (queue, mut far_end) = mpsc::channel::<QueuedEvent>(QUEUE);
        let heard = move || {
            let told = far_end.try_recv().ok()?;
            Some((told.reason, told.message))
        };
        (Self { queue, lead: None }, heard)
    }

    /// Logs a warning and records it as an event.
    pub fn tell(&self, notice: MemberEvent) {
        log(&notice);
        self.tell_of(EventType::Warning, notice.reason, notice);
    }

    /// Records a warning if the queue has room. Otherwise returns false, and the caller retries later.
    #[must_use]
    pub fn offer(&self, notice: MemberEvent) -> bool {
        self.offer_of(EventType::Warning, notice, log)
    }

    /// Like [`Self::offer`], but with type `Normal`.
    #[must_use]
    pub fn offer_news(&self, notice: MemberEvent) -> bool {
        self.offer_of(EventType::Normal, notice, |notice| {
            tracing::info!(member = %notice.member, reason = notice.reason, "{}", notice.message);
        })
    }

    fn offer_of(&self, kind: EventType, notice: MemberEvent, log: fn(&MemberEvent)) -> bool {
        let leads = self.lead.as_ref();
        if leads.is_some_and(|lead| !lead.writes(BootTime::now())) {
            return false;
        }
        let place = match self.queue.try_reserve() {
            Ok(place) => Some(place),
            Err(TrySendError::Full(())) => return false,
            // The receiver is gone, so a retry cannot succeed either.
            Err(TrySendError::Closed(())) => None,
        };
        log(&notice);
        if let Some(place) = place {
            place.send(QueuedEvent::of_member(kind, notice.reason, notice));
        }
        true
    }

    /// Records an event that the caller has already logged.
    pub fn tell_of(&self, kind: EventType, action: &'static str, notice: MemberEvent) {
        self.send(QueuedEvent::of_member(kind, action, notice));
    }

    /// Logs and records an event on another object of the home cluster.
    pub fn tell_about(
        &self,
        about: ObjectReference,
        warning: bool,
        reason: &'static str,
        message: String,
    ) {
        let kind = if warning {
            EventType::Warning
        } else {
            EventType::Normal
        };
        tracing::info!(
            namespace = about.namespace,
            name = about.name,
            reason,
            "{message}"
        );
        self.send(QueuedEvent {
            kind,
            action: reason,
            about,
            reason,
            message,
        });
    }

    fn send(&self, told: QueuedEvent) {
        if self.queue.try_send(told).is_err() {
            tracing::debug!("event dropped: queue full or closed");
        }
    }
}

fn log(notice: &MemberEvent) {
    tracing::warn!(member = %notice.member, reason = notice.reason, problem = %notice.message, "told");
}

#[cfg(test)]
mod tests {
    use super::*;

    fn notice(number: usize) -> MemberEvent {
        MemberEvent {
            member: format!("edge-{number}"),
            uid: String::new(),
            reason: "Reason",
            message: String::new(),
        }
    }

    #[test]
    fn full_queue_rejects_event_until_space_is_free() {
        let (queue, mut far_end) = mpsc::channel(QUEUE);
        let notices = EventRecorder { queue, lead: None };
        assert!((0..QUEUE).all(|number| notices.offer(notice(number))));
        assert!(!notices.offer(notice(QUEUE)));
        assert!(far_end.try_recv().is_ok());
        assert!(notices.offer(notice(QUEUE)));
        assert_eq!(far_end.len(), QUEUE);
        // A recorder without a receiver accepts events, which prevents useless retries.
        assert!(EventRecorder::nowhere().offer(notice(0)));
    }
}
