//! Reports unavailable fleet values: in the log, in an event on the object, and as a note of the readiness
//! probe. The hub stays ready, because agents could not connect to it otherwise.

use k8s_openapi::api::core::v1::ObjectReference;
use krypton_runtime::admin::Readiness;
use krypton_runtime::events::ObjectEvent;

use crate::chart::values::{ValuesLocation, ValuesProblem, kind_name};
use crate::home_events::HomeEvents;

const READINESS_NOTE: &str = "values of the chart";

/// Reports each change once.
#[derive(Debug)]
pub struct ValuesStatus {
    events: HomeEvents,
    /// Namespace of the hub on the home cluster.
    namespace: String,
    readiness: Readiness,
    reported: Option<ValuesProblem>,
}

/// Describes the effect on members while the fleet's values are unavailable.
pub fn effect_on_members(has_good_values: bool) -> &'static str {
    if has_good_values {
        "members keep the last good values"
    } else {
        "members keep their current state until then"
    }
}

impl ValuesStatus {
    pub fn new(events: HomeEvents, namespace: String, readiness: Readiness) -> Self {
        Self {
            events,
            namespace,
            readiness,
            reported: None,
        }
    }

    /// Reports the state of the values. `has_good_values` tells whether good values are in use.
    pub fn report(&mut self, problem: Option<&ValuesProblem>, has_good_values: bool) {
        if self.reported.as_ref() == problem {
            return;
        }
        let previous = std::mem::replace(&mut self.reported, problem.cloned());
        let Some(problem) = problem else {
            self.readiness.note(READINESS_NOTE, None);
            tracing::info!("read the fleet's values");
            if let Some(location) = previous.as_ref().and_then(ValuesProblem::location) {
                let message = "the hub reads chart values from this object".to_owned();
                self.publish(location, false, "ValuesResolved", message);
            }
            return;
        };
        let message = format!(
            "the fleet's values: {problem} ({})",
            effect_on_members(has_good_values)
        );
        self.readiness.note(READINESS_NOTE, Some(message.clone()));
        if matches!(problem, ValuesProblem::NotYet(_)) {
            return;
        }
        tracing::error!(reason = problem.reason(), problem = %message, "failed to read the fleet's values");
        if let Some(location) = problem.location() {
            self.publish(location, true, problem.reason(), message);
        }
    }

    /// Reports an existing problem again when this hub becomes leader.
    pub fn report_again(&mut self, has_good_values: bool) {
        if let Some(problem) = self.reported.take() {
            self.report(Some(&problem), has_good_values);
        }
    }

    fn publish(
        &self,
        location: &ValuesLocation,
        warning: bool,
        reason: &'static str,
        message: String,
    ) {
        let object = ObjectReference {
            api_version: Some("v1".to_owned()),
            kind: Some(kind_name(location.kind).to_owned()),
            namespace: Some(self.namespace.clone()),
            name: Some(location.name.clone()),
            ..ObjectReference::default()
        };
        let event = ObjectEvent {
            warning,
            reason,
            message,
        };
        self.events.record(object, "ReadValues", event);
    }
}
