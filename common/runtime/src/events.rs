//! Records Kubernetes events without blocking: if the queue is full, the newest event is dropped.

use std::time::Duration;

use k8s_openapi::api::core::v1::{Event, EventSource, ObjectReference};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta, Time};
use kube::Client;
use kube::api::{Api, PostParams};
use prometheus_client::metrics::counter::Counter;
use tokio::sync::mpsc;
use tracing::Instrument as _;

use crate::{clock, effect};

/// Reporting component of all events.
const COMPONENT: &str = "multicluster-tenants";
/// Enough for a burst of 250 Tenants with four events each. More events are dropped with a log line.
const QUEUE: usize = 1024;
const DEADLINE: Duration = Duration::from_secs(10);

/// An event to record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObjectEvent {
    pub warning: bool,
    pub reason: &'static str,
    pub message: String,
}

/// Sender of the event queue.
#[derive(Clone, Debug)]
pub struct Events {
    queue: mpsc::Sender<Event>,
    instance: String,
    dropped: Counter,
}

impl Events {
    /// Starts the task that writes events to the cluster of `client`.
    pub fn start(client: Client, instance: String) -> Self {
        let (queue, mut told) = mpsc::channel::<Event>(QUEUE);
        let writing = async move {
            while let Some(event) = told.recv().await {
                let namespace = event.metadata.namespace.clone().unwrap_or_default();
                let api: Api<Event> = Api::namespaced(client.clone(), &namespace);
                let params = PostParams::default();
                let call = effect!("event.write", api.create(&params, &event));
                let written = tokio::time::timeout(DEADLINE, call).await;
                match written {
                    Ok(Ok(_)) => {}
                    Ok(Err(error)) => tracing::debug!(%error, "event lost"),
                    Err(_) => tracing::debug!("event lost: no answer in time"),
                }
            }
        };
        tokio::spawn(writing.in_current_span());
        Self {
            queue,
            instance,
            dropped: Counter::default(),
        }
    }

    /// Counts dropped events in `dropped`.
    #[must_use]
    pub fn counting(self, dropped: Counter) -> Self {
        Self { dropped, ..self }
    }

    /// Queues an event on this object.
    pub fn tell(&self, object: ObjectReference, told: ObjectEvent) {
        let now = clock::wall();
        let name = object.name.clone().unwrap_or_default();
        let event = Event {
            metadata: ObjectMeta {
                name: Some(format!("{name}.{:x}", now.as_nanosecond())),
                namespace: object.namespace.clone(),
                ..ObjectMeta::default()
            },
            involved_object: object,
            action: Some(told.reason.to_owned()),
            reason: Some(told.reason.to_owned()),
            message: Some(told.message),
            type_: Some(if told.warning { "Warning" } else { "Normal" }.to_owned()),
            count: Some(1),
            event_time: Some(MicroTime(now)),
            first_timestamp: Some(Time(now)),
            last_timestamp: Some(Time(now)),
            reporting_component: Some(format!("mesh.openkcm.io/{COMPONENT}")),
            reporting_instance: Some(self.instance.clone()),
            source: Some(EventSource {
                component: Some(COMPONENT.to_owned()),
                host: None,
            }),
            ..Event::default()
        };
        if self.queue.try_send(event).is_err() {
            self.dropped.inc();
            tracing::warn!(object = %name, reason = told.reason, "event dropped: queue full");
        }
    }
}
