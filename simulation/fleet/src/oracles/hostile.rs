//! Invariants of a fleet with a hostile agent: its lies concern its own member only.

use std::collections::BTreeMap;

use krypton_types::names::{EPOCH_CONFIG_MAP, GROUP, PLACED_ON_ANNOTATION};
use serde_json::Value;

use super::handover::{UnexpectedAction, changes_content};
use super::view::{RECOVERY, WATCH_LAG, is_disconnected, is_krypton, object_update, state_version};
use super::{CheckResult, Oracle, Phase, Update, View, ensure, invariant};
use crate::object::{annotation, condition, text};
use crate::observe::Observation;
use crate::plan::{Action, HOME};
use crate::time::Millis;

/// Time in which a member applies a new desired state.
const APPLY_TIME: Millis = 60_000;
/// The hub follows no second claim of a member within this time. Each later pause is twice as long.
const CLAIM_BACKOFF: Millis = 20_000;

invariant! {
    /// A Tenant of home that is on one member does not get the state of a different member.
    NamedMemberCountsAlone, "named-member-counts-alone",
    fn check_update(&mut self, view: &View, (cluster, change, before, after): Update<'_>) -> CheckResult {
        let named = named_member(after);
        if cluster != HOME
            || change.key.group != GROUP
            || change.key.resource != "tenants"
            || !is_krypton(&change.by)
            || named.is_empty()
            || view.recently_restored(HOME)
            || view.hung_within(HOME, RECOVERY)
            || view.time_since_change(HOME, &change.key) <= WATCH_LAG
        {
            return Ok(());
        }
        let others = view.settings.edges.iter().filter(|edge| edge.name != named);
        for other in others {
            let kind = format!("ClusterReady/{}", other.name);
            let is_new = condition(before, &kind).is_none() && condition(after, &kind).is_some();
            ensure(!is_new, || {
                format!("{} is on {named}, and gets the state of {}", change.key.name, other.name)
            })?;
        }
        Ok(())
    }
}

/// The member of a Tenant of home, if it has only one.
fn named_member(tenant: &Value) -> &str {
    let placed_on = annotation(tenant, PLACED_ON_ANNOTATION).unwrap_or_default();
    let names = [
        text(tenant, "/status/placement/cluster"),
        placed_on,
        text(tenant, "/spec/clusterRef/secretName"),
    ];
    names
        .into_iter()
        .find(|name| !name.is_empty())
        .unwrap_or_default()
}

invariant! {
    /// While agents lie and nothing else disturbs the fleet, the other members stay connected and get each desired state.
    /// The epoch rises only with the claims that the hub may follow.
    HostileAgentHarmsNoOther {
        unexpected: UnexpectedAction,
        /// Members whose agent lies, with the time of its start.
        hostile: BTreeMap<String, Millis>,
        /// Number of new epochs since then.
        epochs: u32,
        /// Since when each other member has not applied its desired state.
        behind: BTreeMap<String, Millis>,
    },
    "hostile-agent-harms-no-other",
    fn check_observation(&mut self, view: &View, observation: &Observation) -> CheckResult {
        self.unexpected.observe(observation, |action| {
            changes_content(action) || matches!(action, Action::HostileAgent { .. })
        });
        self.record_fault(observation);
        let is_calm = self.unexpected.is_over(observation.at)
            && view.phase >= Phase::Chaos
            && view.separated_member.is_none();
        if self.hostile.is_empty() || !is_calm {
            self.behind.clear();
            return Ok(());
        }
        let late = self
            .behind
            .iter()
            .find(|(_, since)| observation.at - **since > APPLY_TIME);
        ensure(late.is_none(), || {
            format!("a desired state does not reach {late:?}")
        })?;
        let Some((HOME, change, before, after)) = object_update(observation) else {
            return Ok(());
        };
        let key = &change.key;
        if key.name == EPOCH_CONFIG_MAP && is_krypton(&change.by) {
            self.epochs += 1;
            let allowed = self.allowed_epochs(view, observation.at);
            ensure(self.epochs <= allowed, || {
                format!("{} new epochs for lies instead of {allowed}", self.epochs)
            })?;
        }
        if key.resource != "edgeclusters" || self.hostile.contains_key(&key.name) {
            return Ok(());
        }
        self.record_progress(view, &key.name, after, observation.at);
        ensure(!is_disconnected(before, after), || {
            format!("{} is no longer connected", key.name)
        })
    }
}

impl HostileAgentHarmsNoOther {
    fn record_fault(&mut self, observation: &Observation) {
        let Some((Action::HostileAgent { edge, .. }, has_ended)) = observation.event.action()
        else {
            return;
        };
        if has_ended {
            self.hostile.remove(&edge);
        } else {
            self.hostile.insert(edge, observation.at);
        }
        if self.hostile.is_empty() {
            self.epochs = 0;
        }
    }

    /// Records whether a member has applied its desired state.
    fn record_progress(&mut self, view: &View, name: &str, member: &Value, at: Millis) {
        let has_applied = state_version(member, "desired") == state_version(member, "applied");
        if view.must_converge(name) && !has_applied {
            self.behind.entry(name.to_owned()).or_insert(at);
        } else {
            self.behind.remove(name);
        }
    }

    /// Number of new epochs for the claims of the hostile members. If only one of several members makes a claim, the
    /// hub does not follow it for hours.
    fn allowed_epochs(&self, view: &View, at: Millis) -> u32 {
        let mut edges = view.settings.edges.iter();
        let is_contradicted = edges
            .any(|edge| !self.hostile.contains_key(&edge.name) && view.must_converge(&edge.name));
        if self.hostile.len() == 1 && is_contradicted {
            return 0;
        }
        let pauses = |since: &Millis| (at - since) / CLAIM_BACKOFF + 1;
        // The hub may have followed one more claim before it takes the epoch for the last one.
        let claims = self.hostile.values().map(|since| 2 + pauses(since).ilog2());
        claims.sum()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::story::{History, condition_patch, edge_cluster, epoch, tenant};
    use super::*;

    const HARMS_NO_OTHER: &str = "hostile-agent-harms-no-other";

    /// A fleet in which the agent of `edge-1` lies, and nothing else has happened for some time.
    fn lying(members: &[&str]) -> History {
        let mut history = History::new();
        history
            .wait(RECOVERY + 1)
            .enter_phase(Phase::Chaos)
            .renew_leases();
        for member in members {
            history.put("hub-0", "home", edge_cluster(member));
        }
        history
            .put("hub-0", "home", epoch(1))
            .fault("hostile-agent edge-1 for 90.000");
        history
    }

    #[test]
    fn state_of_unnamed_member_is_found() {
        for (member, oracle) in [
            ("edge-1", None),
            ("edge-2", Some("named-member-counts-alone")),
        ] {
            let mut named = tenant();
            named["spec"] = json!({"clusterRef": {"secretName": "edge-1"}});
            let kind = format!("ClusterReady/{member}");
            History::new()
                .put("people", "home", named.clone())
                .wait(WATCH_LAG + 1)
                .renew_leases()
                .patch("hub-0", "home", named, &condition_patch(&kind, "False"))
                .assert_outcome(oracle);
        }
    }

    #[test]
    fn epochs_for_lies_are_found() {
        let members: [&[&str]; 2] = [&["edge-1", "edge-2"], &["edge-1"]];
        for (members, allowed) in members.into_iter().zip([0, 2]) {
            let mut history = lying(members);
            for number in 2..allowed + 2 {
                history.put("hub-0", "home", epoch(number));
            }
            history.assert_no_violation();
            history.put("hub-0", "home", epoch(allowed + 2));
            history.assert_violated(HARMS_NO_OTHER);
        }
    }

    #[test]
    fn lost_connection_of_other_member_is_found() {
        for (member, oracle) in [("edge-1", None), ("edge-2", Some(HARMS_NO_OTHER))] {
            let lost = condition_patch("Connected", "False");
            lying(&["edge-1", "edge-2"])
                .patch("hub-0", "home", edge_cluster(member), &lost)
                .assert_outcome(oracle);
        }
    }

    #[test]
    fn late_desired_state_of_other_member_is_found() {
        for (member, pause, oracle) in [
            ("edge-1", APPLY_TIME + 1, None),
            ("edge-2", APPLY_TIME, None),
            ("edge-2", APPLY_TIME + 1, Some(HARMS_NO_OTHER)),
        ] {
            let newer = json!({"status": {"desired": {"epoch": 1, "generation": 5}}});
            let mut history = lying(&["edge-1", "edge-2"]);
            history
                .patch("hub-0", "home", edge_cluster(member), &newer)
                .wait(pause)
                .renew_leases();
            assert_eq!(history.violated_oracle(), oracle, "{member} {pause}");
        }
    }
}
