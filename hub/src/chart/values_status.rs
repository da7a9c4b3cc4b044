//! Reports unavailable fleet values: in the log, in an event on the object, and as a note of the readiness
//! probe. The hub stays ready, because agents could not connect to it otherwise.

use std::time::Duration;

use k8s_openapi::api::core::v1::ObjectReference;
use krypton_runtime::admin::Readiness;
use krypton_runtime::clock::BootTime;
use krypton_types::error_chain::chain;
use kube::Client;
use kube::runtime::events::{Event, EventType, Recorder, Reporter};

use crate::chart::values::{Place, Problem, word};
use crate::leader::Leader;

const DEADLINE: Duration = Duration::from_secs(10);
const ABOUT: &str = "values of the chart";

/// Reports each change once.
pub struct Teller {
    recorder: Recorder,
    /// Namespace of the hub on the home cluster.
    namespace: String,
    readiness: Readiness,
    told: Option<Problem>,
    /// Only the leader writes events.
    lead: Leader,
}

impl std::fmt::Debug for Teller {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Teller").finish_non_exhaustive()
    }
}

/// Describes the effect on members while the fleet's values are unavailable.
pub fn meanwhile(has_good: bool) -> &'static str {
    if has_good {
        "the last good values stay in use"
    } else {
        "members stay as they are until then"
    }
}

impl Teller {
    pub fn new(
        client: Client,
        namespace: String,
        instance: String,
        readiness: Readiness,
        lead: Leader,
    ) -> Self {
        let reporter = Reporter {
            controller: "mesh.openkcm.io/krypton-hub".to_owned(),
            instance: Some(instance),
        };
        Self {
            recorder: Recorder::new(client, reporter),
            namespace,
            readiness,
            told: None,
            lead,
        }
    }

    /// Reports the state of the values. `has_good` tells whether good values are in use.
    pub fn tell(&mut self, problem: Option<&Problem>, has_good: bool) {
        if self.told.as_ref() == problem {
            return;
        }
        let before = std::mem::replace(&mut self.told, problem.cloned());
        let Some(problem) = problem else {
            self.readiness.note(ABOUT, None);
            tracing::info!("the fleet's values are read");
            if let Some(place) = before.as_ref().and_then(Problem::place) {
                let message = "values of the chart are read from here".to_owned();
                self.publish(place, EventType::Normal, "ValuesResolved", message);
            }
            return;
        };
        let message = format!("the fleet's values: {problem} ({})", meanwhile(has_good));
        self.readiness.note(ABOUT, Some(message.clone()));
        if matches!(problem, Problem::NotYet(_)) {
            return;
        }
        tracing::error!(reason = problem.reason(), "{message}");
        if let Some(place) = problem.place() {
            self.publish(place, EventType::Warning, problem.reason(), message);
        }
    }

    /// Reports an existing problem again when this hub becomes leader.
    pub fn reset(&mut self, has_good: bool) {
        if let Some(problem) = self.told.take() {
            self.tell(Some(&problem), has_good);
        }
    }

    fn publish(&self, place: &Place, type_: EventType, reason: &'static str, message: String) {
        let about = ObjectReference {
            api_version: Some("v1".to_owned()),
            kind: Some(word(place.kind).to_owned()),
            namespace: Some(self.namespace.clone()),
            name: Some(place.name.clone()),
            ..ObjectReference::default()
        };
        let event = Event {
            type_,
            reason: reason.to_owned(),
            note: Some(message),
            action: "ReadValues".to_owned(),
            secondary: None,
        };
        if !self.lead.writes(BootTime::now()) {
            return;
        }
        let recorder = self.recorder.clone();
        tokio::spawn(async move {
            match tokio::time::timeout(DEADLINE, recorder.publish(&event, &about)).await {
                Ok(Ok(())) => {}
                Ok(Err(error)) => tracing::debug!(error = %chain(&error), "event lost"),
                Err(_) => tracing::debug!("event lost: no answer in time"),
            }
        });
    }
}
