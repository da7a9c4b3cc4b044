//! Invariants of Leases, epochs and the recorded desired state.

use std::collections::{BTreeMap, BTreeSet};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use krypton_types::names::{EPOCH_CONFIG_MAP, GROUP, HUB_LEASE};
use serde_json::Value;

use super::releases::started;
use super::view::{holder, is_krypton, number, replaced, text};
use super::{Check, Oracle, View, Writer, ensure, stateless};
use crate::conductor::Millis;
use crate::faults::RESTORE;
use crate::observe::{Event, Observation};
use crate::plan::{HOME, SYSTEM};

/// Lease of a member.
pub(super) const MEMBER_LEASE: &str = "krypton-agent";
/// Clocks differ by up to 1 %, and a renewal takes some milliseconds.
const TAKEOVER: Millis = 59_000;
const HUB_TAKEOVER: Millis = 4_900;
const MAY_START: Millis = 31_000;
const MUST_DIE: Millis = 46_500;
/// A leader writes for 3.5 s after its last renewal, and a call takes up to a few seconds.
const MAY_WRITE: Millis = 10_000;
/// An API server carries out its waiting requests this soon after it has stopped hanging.
const LATE: Millis = 2_000;
/// Time in which all processes notice a restored store.
const RECOVERY: Millis = 120_000;

pub(super) fn all() -> Vec<Box<dyn Oracle>> {
    vec![
        Box::new(Takeover::default()),
        Box::new(HelmUnderLease),
        Box::new(HelmDies),
        Box::new(EpochsRise),
        Box::new(EpochTaken),
        Box::new(FreshLeader::default()),
        Box::new(RecordRises),
        Box::new(LeadersRunHelm::default()),
    ]
}

/// A process takes a Lease over only after its duration without a renewal, or after the holder released it.
#[derive(Debug, Default)]
struct Takeover {
    /// Holder and time of the last write, by cluster and Lease.
    last: BTreeMap<(String, String), (String, Millis)>,
}

impl Oracle for Takeover {
    fn name(&self) -> &'static str {
        "lease-takeover-waits"
    }

    fn see(&mut self, view: &View, seen: &Observation) -> Check {
        let Event::Change { cluster, change } = &seen.event else {
            return Ok(());
        };
        let name = change.key.name.as_str();
        let limit = match name {
            MEMBER_LEASE => TAKEOVER,
            HUB_LEASE => HUB_TAKEOVER,
            _ => return Ok(()),
        };
        if change.key.resource != "leases" {
            return Ok(());
        }
        let key = (cluster.clone(), name.to_owned());
        let Some(after) = change.after.as_deref() else {
            self.last.remove(&key);
            return Ok(());
        };
        let now = (holder(after).to_owned(), seen.at);
        let Some((before, at)) = self.last.insert(key, now) else {
            return Ok(());
        };
        let after = holder(after);
        let legal = before == after
            || before.is_empty()
            || after.is_empty()
            || change.by == RESTORE
            || view.restored_within(cluster, RECOVERY)
            || same_pod(&before, after)
            || seen.at - at >= limit;
        ensure(legal, || {
            let age = seen.at - at;
            format!("{after} takes {name} on {cluster} from {before} after {age} ms")
        })
    }
}

/// Both are containers of one pod, so the first is dead.
fn same_pod(one: &str, other: &str) -> bool {
    let pod = |name: &str| name.rsplit_once('@').map(|(_, pod)| pod.to_owned());
    pod(one).is_some() && pod(one) == pod(other)
}

stateless! {
    /// A process starts Helm on a member only within 30 s after it has renewed the member's Lease.
    HelmUnderLease, "helm-starts-under-lease",
    fn see(&mut self, view: &View, seen: &Observation) -> Check {
        let Some(run) = started(view, seen) else {
            return Ok(());
        };
        let Some(cluster) = run.cluster.as_deref() else {
            return Ok(());
        };
        if view.restored_within(cluster, RECOVERY) {
            return Ok(());
        }
        let Some(renewal) = view.renewal(cluster, MEMBER_LEASE) else {
            return Err(format!("{} starts Helm on {cluster} without a Lease", run.host));
        };
        let own = renewal.host.as_deref() == Some(&run.host) && !renewal.holder.is_empty();
        ensure(own && seen.at - renewal.at <= MAY_START, || {
            let (holder, age) = (&renewal.holder, seen.at - renewal.at);
            format!("{} starts Helm on {cluster}; {holder} renewed {age} ms ago", run.host)
        })
    }
}

stateless! {
    /// No Helm process lives 45 s after the last renewal of its member's Lease.
    HelmDies, "helm-dies-with-lease",
    fn see(&mut self, view: &View, seen: &Observation) -> Check {
        // A suspended machine runs nothing, but its processes exist.
        if view.may_be_suspended() {
            return Ok(());
        }
        for run in view.runs.values() {
            let Some(cluster) = run.cluster.as_deref() else {
                continue;
            };
            if view.restored_within(cluster, RECOVERY) {
                continue;
            }
            let renewed = view
                .renewal(cluster, MEMBER_LEASE)
                .filter(|renewal| renewal.host.as_deref().is_none_or(|host| host == run.host))
                .map_or(run.started, |renewal| renewal.at.max(run.started));
            let age = seen.at.saturating_sub(renewed);
            if age > MUST_DIE {
                let (release, host) = (&run.release, &run.host);
                return Err(format!("Helm of {host} for {release} lives {age} ms after the renewal"));
            }
        }
        Ok(())
    }
}

stateless! {
    /// `status.hubEpoch` of an object never decreases.
    EpochsRise, "hub-epoch-never-decreases",
    fn see(&mut self, _: &View, seen: &Observation) -> Check {
        let Some((_, change, before, after)) = replaced(seen) else {
            return Ok(());
        };
        if change.by == RESTORE || change.key.group != GROUP || !same_uid(before, after) {
            return Ok(());
        }
        let epoch = |object: &Value| number(object, "/status/hubEpoch");
        let (before, after) = (epoch(before), epoch(after));
        ensure(after >= before, || {
            format!("hubEpoch of {} goes from {before:?} to {after:?}", change.key.name)
        })
    }
}

fn same_uid(one: &Value, other: &Value) -> bool {
    text(one, "/metadata/uid") == text(other, "/metadata/uid")
}

stateless! {
    /// Each hub takes a new epoch: the recorded one rises with each write.
    EpochTaken, "epoch-is-taken-once",
    fn see(&mut self, _: &View, seen: &Observation) -> Check {
        let Some((cluster, change, before, after)) = replaced(seen) else {
            return Ok(());
        };
        let key = &change.key;
        if cluster != HOME
            || key.resource != "configmaps"
            || key.name != EPOCH_CONFIG_MAP
            || !is_krypton(&change.by)
        {
            return Ok(());
        }
        let epoch = |object: &Value| text(object, "/data/epoch").parse::<u64>().unwrap_or_default();
        let (before, after) = (epoch(before), epoch(after));
        ensure(after > before, || format!("epoch {after} follows {before}"))
    }
}

/// Only a hub that has renewed the leader's Lease shortly before writes a status on the home cluster.
#[derive(Debug, Default)]
struct FreshLeader {
    /// Time of the last renewal of each host.
    renewed: BTreeMap<String, Millis>,
}

impl Oracle for FreshLeader {
    fn name(&self) -> &'static str {
        "leader-writes-while-fresh"
    }

    fn wrote(&mut self, view: &View, by: &Writer<'_>) -> Check {
        let key = &by.change.key;
        if by.cluster != HOME {
            return Ok(());
        }
        if key.resource == "leases" && key.name == HUB_LEASE {
            self.renewed.insert(by.host.to_owned(), view.now);
        }
        let late = view.hung_within(HOME, LATE);
        if !changes_status(by) || late || view.restored_within(HOME, RECOVERY) {
            return Ok(());
        }
        let Some(renewed) = self.renewed.get(by.host) else {
            return Err(format!("{} writes {} and never led", by.host, key.name));
        };
        let age = view.now - renewed;
        // A request of the previous leader can still be on its way.
        ensure(age <= MAY_WRITE + view.delays(), || {
            format!(
                "{} writes {} on home {age} ms after its renewal",
                by.host, key.name
            )
        })
    }
}

/// Whether the status of one of Krypton's objects was changed.
fn changes_status(by: &Writer<'_>) -> bool {
    let (Some(before), Some(after)) = (&by.change.before, &by.change.after) else {
        return false;
    };
    by.change.key.group == GROUP
        && is_krypton(&by.change.by)
        && before.get("status") != after.get("status")
}

stateless! {
    /// The recorded desired state of a member never goes back.
    RecordRises, "recorded-state-never-goes-back",
    fn see(&mut self, _: &View, seen: &Observation) -> Check {
        let Some((cluster, change, before, after)) = replaced(seen) else {
            return Ok(());
        };
        let key = &change.key;
        if key.name != "krypton-desired-state" || key.namespace != SYSTEM || change.by == RESTORE {
            return Ok(());
        }
        let (before, after) = (recorded(before), recorded(after));
        ensure(after >= before, || {
            format!("the record on {cluster} goes from {before:?} to {after:?}")
        })
    }
}

/// A hub that has never led starts no Helm.
#[derive(Debug, Default)]
struct LeadersRunHelm {
    /// Hubs that have renewed the leader's Lease.
    led: BTreeSet<String>,
}

impl Oracle for LeadersRunHelm {
    fn name(&self) -> &'static str {
        "only-leaders-run-helm"
    }

    fn see(&mut self, view: &View, seen: &Observation) -> Check {
        let run = started(view, seen).filter(|run| run.host.starts_with("hub-"));
        ensure(run.is_none_or(|run| self.led.contains(&run.host)), || {
            format!("Helm runs on a standby: {run:?}")
        })
    }

    fn wrote(&mut self, _: &View, by: &Writer<'_>) -> Check {
        let key = &by.change.key;
        if by.cluster == HOME && key.resource == "leases" && key.name == HUB_LEASE {
            self.led.insert(by.host.to_owned());
        }
        Ok(())
    }
}

/// Epoch and generation of a record.
fn recorded(secret: &Value) -> Option<(u64, u64)> {
    let content = secret.pointer("/data")?.get("desired.json")?.as_str()?;
    let content: Value = serde_json::from_slice(&STANDARD.decode(content).ok()?).ok()?;
    Some((
        number(&content, "/version/epoch")?,
        number(&content, "/version/generation")?,
    ))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::story::{Story, config_map, edge_cluster, lease, tenant};
    use super::*;

    const RELEASE: &str = "tenant-t0-edge-1";
    const AGENT: &str = "agent-edge-1";

    #[test]
    fn early_takeover_is_found() {
        for (name, cluster, pause, oracle) in [
            (MEMBER_LEASE, "edge-2", 60_000, None),
            (MEMBER_LEASE, "edge-2", 50_000, Some("lease-takeover-waits")),
            (HUB_LEASE, "home", 5_000, None),
            (HUB_LEASE, "home", 4_000, Some("lease-takeover-waits")),
        ] {
            let mut story = Story::new();
            story
                .put("hub-0", cluster, lease(name, "hub/hub-0/1"))
                .wait(pause)
                .put("hub-1", cluster, lease(name, "hub/hub-1/1"));
            assert_eq!(story.violated(), oracle, "{name} {pause}");
        }
    }

    #[test]
    fn released_lease_is_taken_immediately() {
        let mut story = Story::new();
        story
            .put("hub-0", "home", lease(HUB_LEASE, "hub/hub-0/1"))
            .put("hub-0", "home", lease(HUB_LEASE, ""))
            .put("hub-1", "home", lease(HUB_LEASE, "hub/hub-1/1"));
        story.assert_kept();
    }

    #[test]
    fn restarted_container_takes_its_lease() {
        let mut story = Story::new();
        story
            .put(AGENT, "edge-1", lease(MEMBER_LEASE, "agent/a/1@pod"))
            .put(AGENT, "edge-1", lease(MEMBER_LEASE, "agent/a/2@pod"));
        story.assert_kept();
    }

    #[test]
    fn late_start_of_helm_is_found() {
        for (pause, oracle) in [(29_000, None), (32_000, Some("helm-starts-under-lease"))] {
            let mut story = Story::new();
            story
                .put("people", "edge-1", tenant())
                .renew()
                .wait(pause)
                .helm(1, AGENT, "upgrade", RELEASE);
            assert_eq!(story.violated(), oracle, "{pause}");
        }
    }

    #[test]
    fn helm_under_another_lease_is_found() {
        let mut story = Story::new();
        story
            .put("people", "edge-1", tenant())
            .renew()
            .helm(1, "hub-0", "upgrade", RELEASE);
        story.assert_broken("helm-starts-under-lease");
    }

    #[test]
    fn helm_of_a_standby_is_found() {
        let mut story = Story::new();
        story
            .renew()
            .helm(1, "hub-0", "upgrade", "tenant-t0-edge-2")
            .ends(1, "hub-0", 0);
        story.assert_kept();
        story
            .put("hub-1", "edge-2", lease(MEMBER_LEASE, ""))
            .put("hub-1", "edge-2", lease(MEMBER_LEASE, "hub/hub-1/1/edge-2"))
            .helm(2, "hub-1", "upgrade", "tenant-t0-edge-2");
        story.assert_broken("only-leaders-run-helm");
    }

    #[test]
    fn helm_that_outlives_its_lease_is_found() {
        let run = |pause, ends| {
            let mut story = Story::new();
            story
                .put("people", "edge-1", tenant())
                .renew()
                .helm(1, AGENT, "upgrade", RELEASE)
                .wait(44_000);
            if ends {
                story.ends(1, AGENT, 1);
            }
            story
                .wait(pause)
                .answered("hub-0", "home", "GET", "/version", 200);
            story.violated().map(str::to_owned)
        };
        assert_eq!(run(500, false), None);
        assert_eq!(run(5_000, true), None);
        assert_eq!(run(5_000, false).as_deref(), Some("helm-dies-with-lease"));
    }

    #[test]
    fn decreasing_epoch_is_found() {
        for (epoch, oracle) in [(4, None), (3, None), (2, Some("hub-epoch-never-decreases"))] {
            let mut story = Story::new();
            let with = |epoch| json!({"status": {"hubEpoch": epoch}});
            story
                .renew()
                .put("hub-0", "home", edge_cluster("edge-1"))
                .patch("hub-0", "home", edge_cluster("edge-1"), &with(3))
                .patch("hub-0", "home", edge_cluster("edge-1"), &with(epoch));
            assert_eq!(story.violated(), oracle, "{epoch}");
        }
    }

    #[test]
    fn epoch_that_two_hubs_take_is_found() {
        for (epoch, oracle) in [("2", None), ("1", Some("epoch-is-taken-once"))] {
            let mut story = Story::new();
            let with = |epoch: &str| {
                let mut map = config_map(SYSTEM, EPOCH_CONFIG_MAP);
                map["data"] = json!({"epoch": epoch});
                map
            };
            story
                .put("hub-0", "home", with("1"))
                .put("hub-1", "home", with(epoch));
            assert_eq!(story.violated(), oracle, "{epoch}");
        }
    }

    #[test]
    fn write_of_a_stale_leader_is_found() {
        for (pause, oracle) in [(3_000, None), (15_000, Some("leader-writes-while-fresh"))] {
            let mut story = Story::new();
            let status = json!({"status": {"mode": "none"}});
            story
                .put("hub-0", "home", edge_cluster("edge-1"))
                .renew()
                .wait(pause)
                .patch("hub-0", "home", edge_cluster("edge-1"), &status);
            assert_eq!(story.violated(), oracle, "{pause}");
        }
    }

    #[test]
    fn older_recorded_state_is_found() {
        let record = |epoch: u64, generation: u64| {
            let content = json!({"version": {"epoch": epoch, "generation": generation}});
            json!({
                "apiVersion": "v1",
                "kind": "Secret",
                "metadata": {"name": "krypton-desired-state", "namespace": SYSTEM},
                "data": {"desired.json": STANDARD.encode(content.to_string())},
            })
        };
        for (next, oracle) in [
            ((3, 1), None),
            ((2, 6), None),
            ((2, 4), Some("recorded-state-never-goes-back")),
            ((1, 9), Some("recorded-state-never-goes-back")),
        ] {
            let mut story = Story::new();
            story
                .put(AGENT, "edge-1", record(2, 5))
                .put(AGENT, "edge-1", record(next.0, next.1));
            assert_eq!(story.violated(), oracle, "{next:?}");
        }
    }
}
