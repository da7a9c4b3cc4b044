//! Invariants of the status that Krypton writes.

use std::collections::{BTreeMap, BTreeSet};

use krypton_types::names::{GROUP, tenant_release};
use serde_json::Value;

use super::view::{is_krypton, workspace};
use super::{CheckResult, Oracle, View, ensure, invariant};
use crate::faults::RESTORE_WRITER;
use crate::object::{has_true_condition, number, text};
use crate::observe::{Event, Observation};
use crate::plan::{HOME, Settings};
use crate::time::Millis;
use krypton_sim_apiserver::server::Change;

/// A process acts on a state that is at most this old.
const MAX_STATE_AGE: Millis = 120_000;
/// Largest status in bytes.
const MAX_STATUS_SIZE: usize = 64 * 1024;

/// A change of one of Krypton's objects by Krypton.
fn krypton_change(observation: &Observation) -> Option<(&str, &Change, &Value)> {
    match &observation.event {
        Event::Change { cluster, change }
            if change.key.group == GROUP && is_krypton(&change.by) =>
        {
            Some((cluster, change, change.after.as_deref()?))
        }
        _ => None,
    }
}

invariant! {
    /// `observedGeneration` never exceeds the generation and never decreases.
    ObservedGenerationIsTrue, "observed-generation-is-true",
    fn check_observation(&mut self, view: &View, observation: &Observation) -> CheckResult {
        let Some((cluster, change, after)) = krypton_change(observation) else {
            return Ok(());
        };
        if change.by == RESTORE_WRITER || view.recently_restored(cluster) {
            return Ok(());
        }
        let observed = |object: &Value| number(object, "/status/observedGeneration");
        let Some(current) = observed(after) else {
            return Ok(());
        };
        let generation = number(after, "/metadata/generation").unwrap_or_default();
        ensure(current <= generation, || {
            format!("{} at generation {generation} observes {current}", change.key.name)
        })?;
        let previous = change.before.as_deref().and_then(observed);
        ensure(previous.is_none_or(|previous| previous <= current), || {
            format!("{} observes {current} after {previous:?}", change.key.name)
        })
    }
}

invariant! {
    /// A Tenant becomes ready only after its release was deployed.
    ReadyFollowsDeployment {
        /// When each release was last known as deployed, by cluster and name.
        deployed: BTreeMap<(String, String), Millis>,
    },
    "ready-follows-deployment",
    fn check_observation(&mut self, view: &View, observation: &Observation) -> CheckResult {
        if let Event::Change { cluster, change } = &observation.event {
            for secret in [&change.before, &change.after].into_iter().flatten() {
                if text(secret, "/metadata/labels/status") == "deployed" {
                    let release = text(secret, "/metadata/labels/name").to_owned();
                    self.deployed
                        .insert((cluster.clone(), release), observation.at);
                }
            }
        }
        let Some((cluster, change, after)) = krypton_change(observation) else {
            return Ok(());
        };
        let is_ready = |object: &Value| has_true_condition(object, "Ready");
        let becomes_ready = is_ready(after) && !change.before.as_deref().is_some_and(is_ready);
        let is_current =
            number(after, "/status/observedGeneration") == number(after, "/metadata/generation");
        if cluster == HOME || change.key.resource != "tenants" || !becomes_ready || !is_current {
            return Ok(());
        }
        let name = &change.key.name;
        let release = tenant_release(name, Settings::member_for(cluster));
        let revisions = view.revisions(cluster, workspace(after), &release);
        let is_deployed = revisions
            .iter()
            .any(|(_, secret)| text(secret, "/metadata/labels/status") == "deployed");
        let was_deployed_recently = self
            .deployed
            .get(&(cluster.to_owned(), release))
            .is_some_and(|at| observation.at - at <= MAX_STATE_AGE);
        ensure(is_deployed || was_deployed_recently, || {
            format!("{name} on {cluster} is ready without a release")
        })
    }
}

invariant! {
    /// The conditions of an object have different types, and each has a reason.
    ConditionsAreUnique, "conditions-are-unique",
    fn check_observation(&mut self, _: &View, observation: &Observation) -> CheckResult {
        let Some((_, change, after)) = krypton_change(observation) else {
            return Ok(());
        };
        let conditions = after.pointer("/status/conditions").and_then(Value::as_array);
        let mut kinds = BTreeSet::new();
        for condition in conditions.into_iter().flatten() {
            let kind = text(condition, "/type");
            let is_valid = kinds.insert(kind) && !text(condition, "/reason").is_empty();
            ensure(is_valid, || format!("condition {kind} of {} is wrong", change.key.name))?;
        }
        Ok(())
    }
}

invariant! {
    /// The status of an object is bounded.
    StatusIsBounded, "status-is-bounded",
    fn check_observation(&mut self, _: &View, observation: &Observation) -> CheckResult {
        let Some((_, change, after)) = krypton_change(observation) else {
            return Ok(());
        };
        let json = after.get("status").and_then(|status| serde_json::to_vec(status).ok());
        let size = json.unwrap_or_default().len();
        ensure(size <= MAX_STATUS_SIZE, || format!("the status of {} has {size} bytes", change.key.name))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::story::{AGENT, History, RELEASE, revision, tenant};
    use super::*;

    fn ready() -> Value {
        json!({"status": {
            "observedGeneration": 1,
            "conditions": [{"type": "Ready", "status": "True", "reason": "Ready"}],
        }})
    }

    #[test]
    fn impossible_observed_generation_is_found() {
        let observing = |generation| json!({"status": {"observedGeneration": generation}});
        for (generation, oracle) in [
            (3, None),
            (4, Some("observed-generation-is-true")),
            (1, Some("observed-generation-is-true")),
        ] {
            let mut history = History::with_tenant();
            let newer = json!({"metadata": {"generation": 3}});
            history
                .patch("people", "edge-1", tenant(), &newer)
                .patch(AGENT, "edge-1", tenant(), &observing(2))
                .patch(AGENT, "edge-1", tenant(), &observing(generation));
            assert_eq!(history.violated_oracle(), oracle, "{generation}");
        }
    }

    #[test]
    fn ready_without_a_release_is_found() {
        for (status, oracle) in [
            ("deployed", None),
            ("pending-install", Some("ready-follows-deployment")),
        ] {
            History::with_tenant()
                .put_revision(RELEASE, 1, status)
                .patch(AGENT, "edge-1", tenant(), &ready())
                .assert_outcome(oracle);
        }
    }

    #[test]
    fn release_that_was_just_deleted_excuses_ready() {
        for (pause, oracle) in [(10_000, None), (130_000, Some("ready-follows-deployment"))] {
            let secret = revision(RELEASE, 1, "deployed");
            History::with_tenant()
                .put("helm:agent-edge-1", "edge-1", secret.clone())
                .delete("people", "edge-1", &secret)
                .wait(pause)
                .patch(AGENT, "edge-1", tenant(), &ready())
                .assert_outcome(oracle);
        }
    }

    #[test]
    fn duplicate_condition_is_found() {
        let one = json!({"type": "Ready", "status": "False", "reason": "Pending"});
        let unexplained = json!({"type": "Ready", "status": "False", "reason": ""});
        for (conditions, oracle) in [
            (json!([one]), None),
            (json!([one, one]), Some("conditions-are-unique")),
            (json!([unexplained]), Some("conditions-are-unique")),
        ] {
            let mut history = History::with_tenant();
            let status = json!({"status": {"conditions": conditions}});
            history.patch(AGENT, "edge-1", tenant(), &status);
            assert_eq!(history.violated_oracle(), oracle);
        }
    }

    #[test]
    fn huge_status_is_found() {
        for (length, oracle) in [(1_000, None), (70_000, Some("status-is-bounded"))] {
            let mut history = History::with_tenant();
            let status = json!({"status": {"lastMessage": "x".repeat(length)}});
            history.patch(AGENT, "edge-1", tenant(), &status);
            assert_eq!(history.violated_oracle(), oracle);
        }
    }
}
