//! Invariants of Leases, epochs and the recorded desired state.

use std::collections::{BTreeMap, BTreeSet};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use krypton_types::names::{EPOCH_CONFIG_MAP, GROUP, HUB_LEASE};
use serde_json::Value;

use super::view::{holder, is_krypton};
use super::{AttributedWrite, Change, CheckResult, Oracle, Run, Update, View, ensure, invariant};
use crate::faults::RESTORE_WRITER;
use crate::object::{number, text};
use crate::observe::Observation;
use crate::plan::{HOME, SYSTEM_NAMESPACE};
use crate::time::Millis;

/// Lease of a member.
pub(super) const MEMBER_LEASE: &str = "krypton-agent";
/// Clocks differ by up to 1 %, and a renewal takes some milliseconds.
const MEMBER_TAKEOVER: Millis = 59_000;
const MAX_START_AGE: Millis = 31_000;
const MAX_HELM_AGE: Millis = 46_500;
/// A request can take a few seconds.
const MAX_REQUEST_TIME: Millis = 6_500;
/// An API server carries out its waiting requests this soon after it has stopped hanging.
const LATE_REQUESTS: Millis = 2_000;

invariant! {
    /// A process takes a Lease over only after its duration without a renewal, or after the holder released it.
    LeaseTakeoverWaits {
        /// Holder and time of the last write, by cluster and Lease.
        last_writes: BTreeMap<(String, String), (String, Millis)>,
    },
    "lease-takeover-waits",
    fn check_change(&mut self, view: &View, cluster: &str, change: &Change) -> CheckResult {
        let name = change.key.name.as_str();
        let limit = match name {
            MEMBER_LEASE => MEMBER_TAKEOVER,
            HUB_LEASE => view.settings.leader_lease() / 100 * 98,
            _ => return Ok(()),
        };
        if change.key.resource != "leases" {
            return Ok(());
        }
        let key = (cluster.to_owned(), name.to_owned());
        let Some(after) = change.after.as_deref() else {
            self.last_writes.remove(&key);
            return Ok(());
        };
        let current = (holder(after).to_owned(), view.now);
        let Some((before, at)) = self.last_writes.insert(key, current) else {
            return Ok(());
        };
        let after = holder(after);
        let is_allowed = before == after
            || before.is_empty()
            || after.is_empty()
            || change.by == RESTORE_WRITER
            || view.recently_restored(cluster)
            || is_same_pod(&before, after)
            || view.now - at >= limit;
        ensure(is_allowed, || {
            let age = view.now - at;
            format!("{after} takes {name} on {cluster} from {before} after {age} ms")
        })
    }
}

/// Both are containers of one pod, so the first is dead.
fn is_same_pod(one: &str, other: &str) -> bool {
    let pod = |name: &str| name.rsplit_once('@').map(|(_, pod)| pod.to_owned());
    pod(one).is_some() && pod(one) == pod(other)
}

invariant! {
    /// A process starts Helm on a member only within 30 s after it has renewed the member's Lease.
    HelmStartsUnderLease, "helm-starts-under-lease",
    fn check_helm_start(&mut self, view: &View, run: &Run) -> CheckResult {
        let Some(cluster) = run.cluster.as_deref() else {
            return Ok(());
        };
        if view.recently_restored(cluster) {
            return Ok(());
        }
        let Some(renewal) = view.renewal(cluster, MEMBER_LEASE) else {
            return Err(format!("{} starts Helm on {cluster} without a Lease", run.host));
        };
        let is_holder = renewal.host.as_deref() == Some(&run.host) && !renewal.holder.is_empty();
        ensure(is_holder && view.now - renewal.at <= MAX_START_AGE, || {
            let (holder, age) = (&renewal.holder, view.now - renewal.at);
            format!("{} starts Helm on {cluster}; {holder} renewed {age} ms ago", run.host)
        })
    }
}

invariant! {
    /// No Helm process lives 45 s after the last renewal of its member's Lease.
    HelmDiesWithLease, "helm-dies-with-lease",
    fn check_observation(&mut self, view: &View, observation: &Observation) -> CheckResult {
        // A suspended machine runs nothing, but its processes exist.
        if view.may_be_suspended() {
            return Ok(());
        }
        for run in view.helm_runs.values() {
            let Some(cluster) = run.cluster.as_deref() else {
                continue;
            };
            if view.recently_restored(cluster) {
                continue;
            }
            let renewed_at = view
                .renewal(cluster, MEMBER_LEASE)
                .filter(|renewal| renewal.host.as_deref().is_none_or(|host| host == run.host))
                .map_or(run.started, |renewal| renewal.at.max(run.started));
            let age = observation.at.saturating_sub(renewed_at);
            if age > MAX_HELM_AGE {
                let (release, host) = (&run.release, &run.host);
                return Err(format!("Helm of {host} for {release} lives {age} ms after the renewal"));
            }
        }
        Ok(())
    }
}

invariant! {
    /// `status.hubEpoch` of an object never decreases.
    HubEpochNeverDecreases, "hub-epoch-never-decreases",
    fn check_update(&mut self, _: &View, (_, change, before, after): Update<'_>) -> CheckResult {
        if change.by == RESTORE_WRITER || change.key.group != GROUP || !have_same_uid(before, after) {
            return Ok(());
        }
        let epoch = |object: &Value| number(object, "/status/hubEpoch");
        let (before, after) = (epoch(before), epoch(after));
        ensure(after >= before, || {
            format!("hubEpoch of {} goes from {before:?} to {after:?}", change.key.name)
        })
    }
}

fn have_same_uid(one: &Value, other: &Value) -> bool {
    text(one, "/metadata/uid") == text(other, "/metadata/uid")
}

invariant! {
    /// Each hub takes a new epoch: the recorded one rises with each write.
    EpochIsTakenOnce, "epoch-is-taken-once",
    fn check_update(&mut self, _: &View, (cluster, change, before, after): Update<'_>) -> CheckResult {
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

invariant! {
    /// Only a hub that has renewed the leader's Lease shortly before writes a status on the home cluster.
    LeaderWritesWhileFresh {
        /// Time of the last renewal of each host.
        renewals: BTreeMap<String, Millis>,
    },
    "leader-writes-while-fresh",
    fn check_write(&mut self, view: &View, write: &AttributedWrite<'_>) -> CheckResult {
        let key = &write.change.key;
        if write.cluster != HOME {
            return Ok(());
        }
        if key.resource == "leases" && key.name == HUB_LEASE {
            self.renewals.insert(write.host.to_owned(), view.now);
        }
        let may_be_late = view.hung_within(HOME, LATE_REQUESTS);
        if !changes_status(write) || may_be_late || view.recently_restored(HOME) {
            return Ok(());
        }
        let Some(renewed_at) = self.renewals.get(write.host) else {
            return Err(format!("{} writes {} and never led", write.host, key.name));
        };
        let age = view.now - renewed_at;
        // A leader writes for 70 % of its Lease's duration. A request of the previous one can still be on its way.
        let max_age = view.settings.leader_lease() / 10 * 7 + MAX_REQUEST_TIME;
        ensure(age <= max_age + view.total_link_delay(), || {
            format!(
                "{} writes {} on home {age} ms after its renewal",
                write.host, key.name
            )
        })
    }
}

/// Whether the status of one of Krypton's objects was changed.
fn changes_status(write: &AttributedWrite<'_>) -> bool {
    let (Some(before), Some(after)) = (&write.change.before, &write.change.after) else {
        return false;
    };
    write.change.key.group == GROUP
        && is_krypton(&write.change.by)
        && before.get("status") != after.get("status")
}

invariant! {
    /// The recorded desired state of a member never goes back.
    RecordedStateNeverGoesBack, "recorded-state-never-goes-back",
    fn check_update(&mut self, _: &View, (cluster, change, before, after): Update<'_>) -> CheckResult {
        let key = &change.key;
        let is_record = key.name == "krypton-desired-state" && key.namespace == SYSTEM_NAMESPACE;
        if !is_record || change.by == RESTORE_WRITER {
            return Ok(());
        }
        let (before, after) = (recorded_version(before), recorded_version(after));
        ensure(after >= before, || {
            format!("the record on {cluster} goes from {before:?} to {after:?}")
        })
    }
}

invariant! {
    /// A hub that has never led starts no Helm, and takes no Lease of a member.
    OnlyLeadersAct {
        /// Hubs that have renewed the leader's Lease.
        past_leaders: BTreeSet<String>,
    },
    "only-leaders-act",
    fn check_helm_start(&mut self, _: &View, run: &Run) -> CheckResult {
        let is_standby = run.host.starts_with("hub-") && !self.past_leaders.contains(&run.host);
        ensure(!is_standby, || format!("Helm runs on a standby: {run:?}"))
    }

    fn check_write(&mut self, _: &View, write: &AttributedWrite<'_>) -> CheckResult {
        let (host, key) = (write.host, &write.change.key);
        let Some(lease) = write.change.after.as_deref() else {
            return Ok(());
        };
        if key.resource != "leases" {
            return Ok(());
        }
        if write.cluster == HOME && key.name == HUB_LEASE {
            self.past_leaders.insert(host.to_owned());
        }
        let takes_member = key.name == MEMBER_LEASE && !holder(lease).is_empty();
        let is_standby = host.starts_with("hub-") && !self.past_leaders.contains(host);
        ensure(!takes_member || !is_standby, || {
            format!("the standby {host} takes the Lease of {}", write.cluster)
        })
    }
}

/// Epoch and generation of a record.
fn recorded_version(secret: &Value) -> Option<(u64, u64)> {
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

    use super::super::story::{AGENT, History, RELEASE, edge_cluster, epoch, lease, tenant};
    use super::*;

    #[test]
    fn early_takeover_is_found() {
        for (name, cluster, host, pause, oracle) in [
            (MEMBER_LEASE, "edge-1", AGENT, 60_000, None),
            (
                MEMBER_LEASE,
                "edge-1",
                AGENT,
                50_000,
                Some("lease-takeover-waits"),
            ),
            (HUB_LEASE, "home", "hub-0", 5_000, None),
            (
                HUB_LEASE,
                "home",
                "hub-0",
                4_000,
                Some("lease-takeover-waits"),
            ),
        ] {
            let mut history = History::new();
            history
                .put(host, cluster, lease(name, "one/1"))
                .wait(pause)
                .put(host, cluster, lease(name, "other/1"));
            assert_eq!(history.violated_oracle(), oracle, "{name} {pause}");
        }
    }

    #[test]
    fn released_lease_is_taken_immediately() {
        History::new()
            .put("hub-0", "home", lease(HUB_LEASE, "hub/hub-0/1"))
            .put("hub-0", "home", lease(HUB_LEASE, ""))
            .put("hub-1", "home", lease(HUB_LEASE, "hub/hub-1/1"))
            .assert_no_violation();
    }

    #[test]
    fn restarted_container_takes_its_lease() {
        History::new()
            .put(AGENT, "edge-1", lease(MEMBER_LEASE, "agent/a/1@pod"))
            .put(AGENT, "edge-1", lease(MEMBER_LEASE, "agent/a/2@pod"))
            .assert_no_violation();
    }

    #[test]
    fn late_start_of_helm_is_found() {
        for (pause, oracle) in [(29_000, None), (32_000, Some("helm-starts-under-lease"))] {
            History::new()
                .put("people", "edge-1", tenant())
                .renew_leases()
                .wait(pause)
                .start_helm(1, AGENT, "upgrade", RELEASE)
                .assert_outcome(oracle);
        }
    }

    #[test]
    fn helm_under_another_lease_is_found() {
        History::new()
            .put("people", "edge-1", tenant())
            .renew_leases()
            .start_helm(1, "hub-0", "upgrade", RELEASE)
            .assert_violated("helm-starts-under-lease");
    }

    #[test]
    fn helm_of_a_standby_is_found() {
        for (host, oracle) in [("hub-0", None), ("hub-1", Some("only-leaders-act"))] {
            History::new()
                .renew_leases()
                .start_helm(1, host, "upgrade", "ced-d0")
                .assert_outcome(oracle);
        }
    }

    #[test]
    fn member_lease_of_a_standby_is_found() {
        for (host, oracle) in [("hub-0", None), ("hub-1", Some("only-leaders-act"))] {
            History::new()
                .renew_leases()
                .put("hub-0", "edge-2", lease(MEMBER_LEASE, ""))
                .put(host, "edge-2", lease(MEMBER_LEASE, "hub/one/1/edge-2"))
                .assert_outcome(oracle);
        }
    }

    #[test]
    fn helm_that_outlives_its_lease_is_found() {
        let run = |pause, ends| {
            let mut history = History::new();
            history
                .put("people", "edge-1", tenant())
                .renew_leases()
                .start_helm(1, AGENT, "upgrade", RELEASE)
                .wait(44_000);
            if ends {
                history.end_helm(1, AGENT, 1);
            }
            history
                .wait(pause)
                .respond("hub-0", "home", "GET", "/version", 200);
            history.violated_oracle().map(str::to_owned)
        };
        assert_eq!(run(500, false), None);
        assert_eq!(run(5_000, true), None);
        assert_eq!(run(5_000, false).as_deref(), Some("helm-dies-with-lease"));
    }

    #[test]
    fn decreasing_epoch_is_found() {
        for (epoch, oracle) in [(4, None), (3, None), (2, Some("hub-epoch-never-decreases"))] {
            let mut history = History::new();
            let with = |epoch| json!({"status": {"hubEpoch": epoch}});
            history
                .renew_leases()
                .put("hub-0", "home", edge_cluster("edge-1"))
                .patch("hub-0", "home", edge_cluster("edge-1"), &with(3))
                .patch("hub-0", "home", edge_cluster("edge-1"), &with(epoch));
            assert_eq!(history.violated_oracle(), oracle, "{epoch}");
        }
    }

    #[test]
    fn epoch_that_two_hubs_take_is_found() {
        for (number, oracle) in [(2, None), (1, Some("epoch-is-taken-once"))] {
            History::new()
                .put("hub-0", "home", epoch(1))
                .put("hub-1", "home", epoch(number))
                .assert_outcome(oracle);
        }
    }

    #[test]
    fn write_of_a_stale_leader_is_found() {
        for (pause, oracle) in [(3_000, None), (15_000, Some("leader-writes-while-fresh"))] {
            let mut history = History::new();
            let status = json!({"status": {"mode": "none"}});
            history
                .put("hub-0", "home", edge_cluster("edge-1"))
                .renew_leases()
                .wait(pause)
                .patch("hub-0", "home", edge_cluster("edge-1"), &status);
            assert_eq!(history.violated_oracle(), oracle, "{pause}");
        }
    }

    #[test]
    fn older_recorded_state_is_found() {
        let record = |epoch: u64, generation: u64| {
            let content = json!({"version": {"epoch": epoch, "generation": generation}});
            json!({
                "apiVersion": "v1",
                "kind": "Secret",
                "metadata": {"name": "krypton-desired-state", "namespace": SYSTEM_NAMESPACE},
                "data": {"desired.json": STANDARD.encode(content.to_string())},
            })
        };
        for (next, oracle) in [
            ((3, 1), None),
            ((2, 6), None),
            ((2, 4), Some("recorded-state-never-goes-back")),
            ((1, 9), Some("recorded-state-never-goes-back")),
        ] {
            let mut history = History::new();
            history
                .put(AGENT, "edge-1", record(2, 5))
                .put(AGENT, "edge-1", record(next.0, next.1));
            assert_eq!(history.violated_oracle(), oracle, "{next:?}");
        }
    }
}
