//! Kubernetes events on EdgeClusters and other objects of home, told in passing: a full queue drops the newest, nothing waits.

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

/// How often it is looked whether home answers again.
const IN_DOUBT: Duration = Duration::from_millis(500);
const DEADLINE: Duration = Duration::from_secs(10);
/// Members that something is told of at the same moment; of what is told once, the log has the rest.
const QUEUE: usize = 64;

/// Something that a person should know of a member.
#[derive(Clone, Debug)]
pub struct MemberEvent {
    pub member: String,
    /// Of its EdgeCluster; empty when that is not known.
    pub uid: String,
    pub reason: &'static str,
    pub message: String,
}

/// The near end of the queue.
#[derive(Clone, Debug)]
pub struct EventRecorder {
    queue: mpsc::Sender<QueuedEvent>,
    /// Only a hub that leads tells anything; `None`: any.
    lead: Option<Leader>,
}

/// An event: those of one object that have all of this in common are counted as one.
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
    /// Starts the one task that writes them, while this hub leads.
    pub fn start(client: Client, instance: String, lead: Leader, watchdog: &Watchdog) -> Self {
        let (queue, mut notices) = mpsc::channel::<QueuedEvent>(QUEUE);
        let reporter = Reporter {
            controller: "mesh.openkcm.io/krypton-hub".to_owned(),
            instance: Some(instance),
        };
        // It joins repeated events into one with a count.
        let recorder = Recorder::new(client, reporter);
        let leads = lead.clone();
        let writing = async move {
            while let Some(told) = notices.recv().await {
                // In doubt it waits: whoever has told of it tells it once.
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

    /// A far end that drops what it is told, where there is no home.
    pub fn nowhere() -> Self {
        Self {
            queue: mpsc::channel(1).0,
            lead: None,
        }
    }

    /// With the reasons and messages that it was told.
    #[cfg(test)]
    pub(crate) fn heard() -> (Self, impl FnMut() -> Option<(&'static str, String)>) {
        let (queue, mut far_end) = mpsc::channel::<QueuedEvent>(QUEUE);
        let heard = move || {
            let told = far_end.try_recv().ok()?;
            Some((told.reason, told.message))
        };
        (Self { queue, lead: None }, heard)
    }

    /// A warning.
    pub fn tell(&self, notice: MemberEvent) {
        log(&notice);
        self.tell_of(EventType::Warning, notice.reason, notice);
    }

    /// A warning that is told if there is room for it now; else nothing has happened, and whoever has it
    /// comes again.
    #[must_use]
    pub fn offer(&self, notice: MemberEvent) -> bool {
        self.offer_of(EventType::Warning, notice, log)
    }

    /// The same for what is no warning.
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
            // Nobody takes it later either.
            Err(TrySendError::Closed(())) => None,
        };
        log(&notice);
        if let Some(place) = place {
            place.send(QueuedEvent::of_member(kind, notice.reason, notice));
        }
        true
    }

    /// Something that is in the log already.
    pub fn tell_of(&self, kind: EventType, action: &'static str, notice: MemberEvent) {
        self.send(QueuedEvent::of_member(kind, action, notice));
    }

    /// Something of another object of home.
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
        // Nobody is asked again for what nobody will ever read.
        assert!(EventRecorder::nowhere().offer(notice(0)));
    }
}
