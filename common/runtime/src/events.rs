//! Records Kubernetes events without blocking: one task writes a bounded queue. If the queue is full, the newest event
//! is dropped.

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Event, EventSource, ObjectReference};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta, Time};
use krypton_types::error_chain::chain;
use kube::Client;
use kube::api::{Api, PostParams};
use kube::runtime::events::{Event as CountedEvent, EventType, Recorder, Reporter};
use prometheus_client::metrics::counter::Counter;
use tokio::sync::mpsc;
use tokio::sync::mpsc::error::TrySendError;
use tracing::Instrument as _;

use crate::call::call;
use crate::clock;
use crate::watchdog::Watchdog;

/// Source of the events that are not counted, as in krypton-operator.
const COMPONENT: &str = "multicluster-tenants";
/// Enough for a burst of 250 Tenants with four events each. More events are dropped with a log line.
const QUEUE_SIZE: usize = 1024;

/// An event to record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObjectEvent {
    pub warning: bool,
    pub reason: &'static str,
    pub message: String,
}

impl ObjectEvent {
    pub fn normal(reason: &'static str, message: impl Into<String>) -> Self {
        Self {
            warning: false,
            reason,
            message: message.into(),
        }
    }

    pub fn warning(reason: &'static str, message: impl Into<String>) -> Self {
        Self {
            warning: true,
            ..Self::normal(reason, message)
        }
    }
}

/// Sender of the event queue.
#[derive(Clone, Debug)]
pub struct EventRecorder {
    queue: mpsc::Sender<QueuedEvent>,
    dropped: Counter,
}

/// An event in the queue.
#[derive(Debug)]
pub struct QueuedEvent {
    pub object: ObjectReference,
    pub action: &'static str,
    pub event: ObjectEvent,
    at: Timestamp,
}

impl EventRecorder {
    /// Starts the task that writes each event to the cluster of `client` as a separate object.
    pub fn start(client: Client, instance: String, watchdog: &Watchdog) -> Self {
        let may_write = || std::future::ready(true);
        Self::start_writer(
            EventWriter::Separate { client, instance },
            QUEUE_SIZE,
            may_write,
            watchdog,
        )
    }

    /// Starts the task that writes equal events of one object as one with a count. Two events are equal if only their
    /// messages differ. Messages are limited to 1 kB. The queue holds `size` events. The task awaits `may_write` before
    /// each event, and drops the event on false.
    pub fn start_counting<F: Future<Output = bool> + Send>(
        client: Client,
        reporter: Reporter,
        size: usize,
        may_write: impl Fn() -> F + Send + 'static,
        watchdog: &Watchdog,
    ) -> Self {
        let recorder = Recorder::new(client, reporter);
        Self::start_writer(EventWriter::Counting(recorder), size, may_write, watchdog)
    }

    fn start_writer<F: Future<Output = bool> + Send>(
        writer: EventWriter,
        size: usize,
        may_write: impl Fn() -> F + Send + 'static,
        watchdog: &Watchdog,
    ) -> Self {
        let (recorder, mut queue) = Self::queue(size);
        let write_events = async move {
            while let Some(queued) = queue.recv().await {
                if !may_write().await {
                    continue;
                }
                let write = writer.write(queued);
                if let Err(error) = call("writing an event", write).await {
                    tracing::debug!(error = %chain(&error), "event lost");
                }
            }
        };
        tokio::spawn(watchdog.watch("writing events", write_events.in_current_span()));
        recorder
    }

    /// Creates a recorder, and the receiver of its events.
    pub fn queue(size: usize) -> (Self, mpsc::Receiver<QueuedEvent>) {
        let (queue, receiver) = mpsc::channel(size);
        let dropped = Counter::default();
        (Self { queue, dropped }, receiver)
    }

    /// Counts dropped events in `dropped`.
    #[must_use]
    pub fn with_counter(self, dropped: Counter) -> Self {
        Self { dropped, ..self }
    }

    /// Queues an event on this object, whose action is its reason.
    pub fn record_event(&self, object: ObjectReference, event: ObjectEvent) {
        self.record(object, event.reason, event);
    }

    /// Queues an event, or drops it with a log line if the queue is full.
    pub fn record(&self, object: ObjectReference, action: &'static str, event: ObjectEvent) {
        let (name, reason) = (object.name.clone(), event.reason);
        if !self.try_record(object, action, event) {
            self.dropped.inc();
            tracing::warn!(object = name, reason, "event dropped: queue full");
        }
    }

    /// Queues an event if there is room. Otherwise returns false.
    #[must_use]
    pub fn try_record(
        &self,
        object: ObjectReference,
        action: &'static str,
        event: ObjectEvent,
    ) -> bool {
        let queued = QueuedEvent {
            object,
            action,
            event,
            at: clock::wall(),
        };
        // Without a receiver, a retry cannot succeed either.
        !matches!(self.queue.try_send(queued), Err(TrySendError::Full(_)))
    }
}

/// How events are written.
enum EventWriter {
    /// In the API `v1`, which has no limit for messages.
    Separate { client: Client, instance: String },
    /// In the API `events.k8s.io/v1`.
    Counting(Recorder),
}

impl EventWriter {
    async fn write(&self, queued: QueuedEvent) -> kube::Result<()> {
        match self {
            Self::Separate { client, instance } => {
                let event = queued.into_object(instance.clone());
                let namespace = event.metadata.namespace.as_deref().unwrap_or_default();
                let api: Api<Event> = Api::namespaced(client.clone(), namespace);
                api.create(&PostParams::default(), &event).await.map(drop)
            }
            Self::Counting(recorder) => {
                let event = CountedEvent {
                    type_: match queued.event.warning {
                        true => EventType::Warning,
                        false => EventType::Normal,
                    },
                    reason: queued.event.reason.to_owned(),
                    note: Some(queued.event.message),
                    action: queued.action.to_owned(),
                    secondary: None,
                };
                recorder.publish(&event, &queued.object).await
            }
        }
    }
}

impl QueuedEvent {
    fn into_object(self, instance: String) -> Event {
        let Self {
            object, event, at, ..
        } = self;
        let name = object.name.as_deref().unwrap_or_default();
        Event {
            metadata: ObjectMeta {
                name: Some(format!("{name}.{:x}", at.as_nanosecond())),
                namespace: object.namespace.clone(),
                ..ObjectMeta::default()
            },
            involved_object: object,
            action: Some(self.action.to_owned()),
            reason: Some(event.reason.to_owned()),
            message: Some(event.message),
            type_: Some(if event.warning { "Warning" } else { "Normal" }.to_owned()),
            count: Some(1),
            event_time: Some(MicroTime(at)),
            first_timestamp: Some(Time(at)),
            last_timestamp: Some(Time(at)),
            reporting_component: Some(format!("mesh.openkcm.io/{COMPONENT}")),
            reporting_instance: Some(instance),
            source: Some(EventSource {
                component: Some(COMPONENT.to_owned()),
                host: None,
            }),
            ..Event::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn full_queue_rejects_event_until_space_is_free() {
        let (events, mut receiver) = EventRecorder::queue(2);
        let record = || {
            let event = ObjectEvent::warning("Reason", "");
            events.try_record(ObjectReference::default(), "Action", event)
        };
        assert!(record() && record());
        assert!(!record());
        assert!(receiver.try_recv().is_ok());
        assert!(record());
        assert_eq!(receiver.len(), 2);
        // A recorder without a receiver accepts events, which prevents useless retries.
        drop(receiver);
        assert!(record());
    }
}
