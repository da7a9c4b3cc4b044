//! Invariants of the status that Krypton writes.

use std::collections::{BTreeMap, BTreeSet};

use krypton_types::names::{GROUP, tenant_release};
use serde_json::Value;

use super::view::{condition, is_krypton, number, text, workspace};
use super::{Check, Oracle, View, ensure, stateless};
use crate::conductor::Millis;
use crate::faults::RESTORE;
use crate::observe::{Event, Observation};
use crate::plan::{HOME, Settings};
use krypton_sim_apiserver::server::Change;

const RECOVERY: Millis = 120_000;
/// A process acts on a state that is at most this old.
const STALE: Millis = 120_000;
/// Largest status in bytes.
const LARGEST: usize = 64 * 1024;

pub(super) fn all() -> Vec<Box<dyn Oracle>> {
    vec![
        Box::new(Generation),
        Box::new(ReadyFollows::default()),
        Box::new(UniqueConditions),
        Box::new(StatusIsBounded),
    ]
}

/// A change of one of Krypton's objects by Krypton.
fn status_change(seen: &Observation) -> Option<(&str, &Change, &Value)> {
    match &seen.event {
        Event::Change { cluster, change }
            if change.key.group == GROUP && is_krypton(&change.by) =>
        {
            Some((cluster, change, change.after.as_deref()?))
        }
        _ => None,
    }
}

stateless! {
    /// `observedGeneration` never exceeds the generation and never decreases.
    Generation, "observed-generation-is-true",
    fn see(&mut self, view: &View, seen: &Observation) -> Check {
        let Some((cluster, change, after)) = status_change(seen) else {
            return Ok(());
        };
        if change.by == RESTORE || view.restored_within(cluster, RECOVERY) {
            return Ok(());
        }
        let observed = |object: &Value| number(object, "/status/observedGeneration");
        let Some(now) = observed(after) else {
            return Ok(());
        };
        let generation = number(after, "/metadata/generation").unwrap_or_default();
        ensure(now <= generation, || {
            format!("{} at generation {generation} observes {now}", change.key.name)
        })?;
        let before = change.before.as_deref().and_then(observed);
        ensure(before.is_none_or(|before| before <= now), || {
            format!("{} observes {now} after {before:?}", change.key.name)
        })
    }
}

/// A Tenant becomes ready only after its release was deployed.
#[derive(Debug, Default)]
struct ReadyFollows {
    /// When each release was last known as deployed, by cluster and name.
    deployed: BTreeMap<(String, String), Millis>,
}

impl Oracle for ReadyFollows {
    fn name(&self) -> &'static str {
        "ready-follows-deployment"
    }

    fn see(&mut self, view: &View, seen: &Observation) -> Check {
        if let Event::Change { cluster, change } = &seen.event {
            for secret in [&change.before, &change.after].into_iter().flatten() {
                if text(secret, "/metadata/labels/status") == "deployed" {
                    let release = text(secret, "/metadata/labels/name").to_owned();
                    self.deployed.insert((cluster.clone(), release), seen.at);
                }
            }
        }
        let Some((cluster, change, after)) = status_change(seen) else {
            return Ok(());
        };
        let ready =
            |object: &Value| condition(object, "Ready").is_some_and(|(status, _)| status == "True");
        let becomes = ready(after) && !change.before.as_deref().is_some_and(ready);
        let current =
            number(after, "/status/observedGeneration") == number(after, "/metadata/generation");
        if cluster == HOME || change.key.resource != "tenants" || !becomes || !current {
            return Ok(());
        }
        let name = &change.key.name;
        let release = tenant_release(name, Settings::member(cluster));
        let revisions = view.revisions(cluster, workspace(after), &release);
        let now = revisions
            .iter()
            .any(|(_, secret)| text(secret, "/metadata/labels/status") == "deployed");
        let recent = self
            .deployed
            .get(&(cluster.to_owned(), release))
            .is_some_and(|at| seen.at - at <= STALE);
        ensure(now || recent, || {
            format!("{name} on {cluster} is ready without a release")
        })
    }
}

stateless! {
    /// The conditions of an object have different types, and each has a reason.
    UniqueConditions, "conditions-are-unique",
    fn see(&mut self, _: &View, seen: &Observation) -> Check {
        let Some((_, change, after)) = status_change(seen) else {
            return Ok(());
        };
        let all = after.pointer("/status/conditions").and_then(Value::as_array);
        let mut kinds = BTreeSet::new();
        for each in all.into_iter().flatten() {
            let kind = text(each, "/type");
            let legal = kinds.insert(kind) && !text(each, "/reason").is_empty();
            ensure(legal, || format!("condition {kind} of {} is wrong", change.key.name))?;
        }
        Ok(())
    }
}

stateless! {
    /// The status of an object is bounded.
    StatusIsBounded, "status-is-bounded",
    fn see(&mut self, _: &View, seen: &Observation) -> Check {
        let Some((_, change, after)) = status_change(seen) else {
            return Ok(());
        };
        let size = after.get("status").map(Value::to_string).unwrap_or_default().len();
        ensure(size <= LARGEST, || format!("the status of {} has {size} bytes", change.key.name))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::story::{Story, revision, tenant};
    use super::*;

    const AGENT: &str = "agent-edge-1";

    fn story() -> Story {
        let mut story = Story::new();
        story.put("people", "edge-1", tenant()).renew();
        story
    }

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
            let mut story = story();
            let newer = json!({"metadata": {"generation": 3}});
            story
                .patch("people", "edge-1", tenant(), &newer)
                .patch(AGENT, "edge-1", tenant(), &observing(2))
                .patch(AGENT, "edge-1", tenant(), &observing(generation));
            assert_eq!(story.violated(), oracle, "{generation}");
        }
    }

    #[test]
    fn ready_without_a_release_is_found() {
        for (status, oracle) in [
            ("deployed", None),
            ("pending-install", Some("ready-follows-deployment")),
        ] {
            let mut story = story();
            story
                .put(
                    "helm:agent-edge-1",
                    "edge-1",
                    revision("tenant-t0-edge-1", 1, status),
                )
                .patch(AGENT, "edge-1", tenant(), &ready());
            assert_eq!(story.violated(), oracle, "{status}");
        }
    }

    #[test]
    fn release_that_was_just_deleted_excuses_ready() {
        for (pause, oracle) in [(10_000, None), (130_000, Some("ready-follows-deployment"))] {
            let secret = revision("tenant-t0-edge-1", 1, "deployed");
            let mut story = story();
            story
                .put("helm:agent-edge-1", "edge-1", secret.clone())
                .delete("people", "edge-1", &secret)
                .wait(pause)
                .patch(AGENT, "edge-1", tenant(), &ready());
            assert_eq!(story.violated(), oracle);
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
            let mut story = story();
            let status = json!({"status": {"conditions": conditions}});
            story.patch(AGENT, "edge-1", tenant(), &status);
            assert_eq!(story.violated(), oracle);
        }
    }

    #[test]
    fn huge_status_is_found() {
        for (length, oracle) in [(1_000, None), (70_000, Some("status-is-bounded"))] {
            let mut story = story();
            let status = json!({"status": {"lastMessage": "x".repeat(length)}});
            story.patch(AGENT, "edge-1", tenant(), &status);
            assert_eq!(story.violated(), oracle);
        }
    }
}
