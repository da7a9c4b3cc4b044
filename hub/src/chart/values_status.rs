//! Reports unavailable fleet values: in the log, in an event on the object, and as a note of the readiness
//! probe. The hub stays ready, because agents could not connect to it otherwise.

use k8s_openapi::api::core::v1::ObjectReference;
use krypton_runtime::admin::Readiness;
use krypton_runtime::events::ObjectEvent;

use crate::chart::values::{Place, Problem, word};
use crate::notices::HomeEvents;

const ABOUT: &str = "values of the chart";

/// Reports each change once.
#[derive(Debug)]
pub struct Teller {
    events: HomeEvents,
    /// Namespace of the hub on the home cluster.
    namespace: String,
    readiness: Readiness,
    told: Option<Problem>,
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
    pub fn new(events: HomeEvents, namespace: String, readiness: Readiness) -> Self {
        Self {
            events,
            namespace,
            readiness,
            told: None,
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
                self.publish(place, false, "ValuesResolved", message);
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
            self.publish(place, true, problem.reason(), message);
        }
    }

    /// Reports an existing problem again when this hub becomes leader.
    pub fn reset(&mut self, has_good: bool) {
        if let Some(problem) = self.told.take() {
            self.tell(Some(&problem), has_good);
        }
    }

    fn publish(&self, place: &Place, warning: bool, reason: &'static str, message: String) {
        let about = ObjectReference {
            api_version: Some("v1".to_owned()),
            kind: Some(word(place.kind).to_owned()),
            namespace: Some(self.namespace.clone()),
            name: Some(place.name.clone()),
            ..ObjectReference::default()
        };
        let event = ObjectEvent {
            warning,
            reason,
            message,
        };
        self.events.record(about, "ReadValues", event);
    }
}
