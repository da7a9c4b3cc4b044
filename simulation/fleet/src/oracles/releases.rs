//! Invariants of Helm runs and of the releases that they change.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use krypton_helm::releases::labels::OWNER_UID_LABEL;
use krypton_types::names::{
    ADOPT_ANNOTATION, DEPLOYMENT_FINALIZER, GROUP, HOME_UID_ANNOTATION, MANAGED_BY_HUB,
    MANAGED_BY_LABEL, ORPHAN_ANNOTATION, TENANT_FINALIZER,
};
use serde_json::Value;

use super::view::{
    Owner, Run, annotation, has_finalizer, is_copy, is_deleted, is_product, krypton_key, label,
    let_go, text,
};
use super::{Check, Oracle, View, ensure, stateless};
use crate::conductor::Millis;
use crate::faults::PEOPLE;
use crate::observe::{Event, Observation};
use crate::plan::{HOME, Settings, TENANTS};

/// Time in which a watch brings a change to a process, if no fault delays it.
const LAG: Millis = 30_000;
/// Krypton forgets the effects of a fault in this time.
const RECOVERY: Millis = 120_000;
/// More runs of one release in a minute mean that the back-off fails.
const RUNS_A_MINUTE: usize = 30;
/// Two revisions, 16 failed installations and 16 failed upgrades, and the running attempt.
const HISTORY: usize = 36;

pub(super) fn all() -> Vec<Box<dyn Oracle>> {
    vec![
        Box::new(LiveReleases),
        Box::new(OneHelm::default()),
        Box::new(FinalizerFirst),
        Box::new(ReleaseGoesFirst),
        Box::new(HomeWaitsForRelease),
        Box::new(OneOwner),
        Box::new(OrphansStay::default()),
        Box::new(PausedTenants),
        Box::new(PausedMembers),
        Box::new(RunsBackOff::default()),
        Box::new(HistoryIsBounded),
    ]
}

/// The run that an observation starts.
pub(super) fn started<'a>(view: &'a View, seen: &Observation) -> Option<&'a Run> {
    match &seen.event {
        Event::HelmStarted { run, .. } => view.runs.get(run),
        _ => None,
    }
}

/// A Helm run with its cluster and its Tenant there.
pub(super) fn tenant_of<'a>(view: &'a View, run: &'a Run) -> Option<(&'a Run, &'a str, &'a Value)> {
    let (cluster, Owner::Tenant(name)) = (run.cluster.as_deref()?, &run.owner) else {
        return None;
    };
    Some((run, cluster, view.tenant(cluster, name)?))
}

stateless! {
    /// Helm uninstalls a release only if people have deleted its owner, moved its KryptonDeployment, or retired its
    /// member.
    LiveReleases, "live-release-stays",
    fn see(&mut self, view: &View, seen: &Observation) -> Check {
        let Some(run) = started(view, seen).filter(|run| run.verb == "uninstall") else {
            return Ok(());
        };
        let member = run.cluster.as_deref().map(Settings::member);
        if member.is_some_and(|member| view.is_retiring(member)) {
            return Ok(());
        }
        let wanted = match &run.owner {
            Owner::Tenant(name) => {
                let cluster = run.cluster.as_deref().unwrap_or(HOME);
                view.wants_tenant(cluster, name) && !is_deleted_copy(view, run, name)
            }
            Owner::Deployment(name) => member.is_some_and(|member| stays_in(view, name, member)),
            Owner::Unknown => false,
        };
        ensure(!wanted, || format!("{} uninstalls {}, which people want", run.host, run.release))
    }
}

/// Whether the hub has placed the Tenant and now deletes it. Another invariant checks the order.
fn is_deleted_copy(view: &View, run: &Run, name: &str) -> bool {
    let cluster = run.cluster.as_deref();
    let tenant = cluster.and_then(|cluster| view.tenant(cluster, name));
    tenant.is_some_and(|tenant| {
        is_deleted(tenant) && label(tenant, MANAGED_BY_LABEL) == Some(MANAGED_BY_HUB)
    })
}

/// Whether a KryptonDeployment has named this region for some time. After a move and back, an earlier order can still
/// be on its way.
fn stays_in(view: &View, name: &str, region: &str) -> bool {
    let key = krypton_key("kryptondeployments", TENANTS, name);
    let object = view.get(HOME, &key);
    // The deletion of the CRD deletes what people want.
    let deleted = object.is_some_and(|object| is_deleted(object));
    let old = view.age(HOME, &key) > LAG && view.calm() > LAG;
    object.is_some_and(|object| text(object, "/spec/region/name") == region)
        && view.wants_deployment(name)
        && (old || deleted)
}

/// A release on a cluster has at most one running Helm process that writes.
#[derive(Debug, Default)]
struct OneHelm {
    running: BTreeMap<u64, (String, String, Option<String>)>,
}

impl Oracle for OneHelm {
    fn name(&self) -> &'static str {
        "one-helm-per-release"
    }

    fn see(&mut self, view: &View, seen: &Observation) -> Check {
        match &seen.event {
            Event::HelmStarted { run: number, .. } => {
                let Some(run) = view.runs.get(number) else {
                    return Ok(());
                };
                let key = (
                    run.release.clone(),
                    run.namespace.clone(),
                    run.cluster.clone(),
                );
                // Without a cluster, two runs may be on two clusters.
                let other = self
                    .running
                    .iter()
                    .find(|(_, other)| **other == key && key.2.is_some());
                let other = other.map(|(other, _)| *other);
                self.running.insert(*number, key);
                match other {
                    Some(other) => Err(format!(
                        "Helm {number} of {} starts while Helm {other} runs",
                        run.release
                    )),
                    None => Ok(()),
                }
            }
            Event::HelmEnded { run, .. } => {
                self.running.remove(run);
                Ok(())
            }
            _ => Ok(()),
        }
    }
}

stateless! {
    /// A Tenant has Krypton's finalizer before Helm installs its release.
    FinalizerFirst, "finalizer-precedes-helm",
    fn see(&mut self, view: &View, seen: &Observation) -> Check {
        let run = started(view, seen).filter(|run| run.verb == "upgrade" || run.verb == "install");
        let Some((run, cluster, tenant)) = run.and_then(|run| tenant_of(view, run)) else {
            return Ok(());
        };
        let held = has_finalizer(tenant, TENANT_FINALIZER)
            || is_deleted(tenant)
            // The finalizer of a Tenant that returned from a snapshot, or that was recreated, follows.
            || view.restored_within(cluster, RECOVERY)
            || view.age(cluster, &krypton_key("tenants", TENANTS, text(tenant, "/metadata/name"))) < LAG && view.calm() < LAG;
        ensure(held, || format!("{} installs {} without a finalizer", run.host, run.release))
    }
}

stateless! {
    /// Krypton removes its finalizer from a deleted Tenant only after the release is gone.
    ReleaseGoesFirst, "finalizer-outlives-release",
    fn see(&mut self, view: &View, seen: &Observation) -> Check {
        let Some((cluster, change, before)) = let_go(seen, TENANT_FINALIZER) else {
            return Ok(());
        };
        if change.key.resource != "tenants"
            || !is_deleted(before)
            || annotation(before, ORPHAN_ANNOTATION) == Some("true")
            // Krypton keeps the releases of a CRD that is being deleted.
            || !view.has_tenant_crd(cluster)
            || view.restored_within(cluster, RECOVERY)
        {
            return Ok(());
        }
        let uid = text(before, "/metadata/uid");
        let mut secrets = view.all(cluster, "", "secrets");
        let left = secrets.find(|(_, secret)| {
            text(secret, "/type") == "helm.sh/release.v1" && label(secret, OWNER_UID_LABEL) == Some(uid)
        });
        match left {
            Some((key, _)) => Err(format!("{} goes before {}", change.key.name, key.name)),
            None => Ok(()),
        }
    }
}

stateless! {
    /// A release does not change its owner while the owner exists, unless the new owner has the annotation `adopt`.
    OneOwner, "release-keeps-its-owner",
    fn see(&mut self, view: &View, seen: &Observation) -> Check {
        let Event::Change { cluster, change } = &seen.event else {
            return Ok(());
        };
        let (None, Some(new)) = (&change.before, &change.after) else {
            return Ok(());
        };
        let Some(owner) = label(new, OWNER_UID_LABEL).filter(|_| is_product(&change.by)) else {
            return Ok(());
        };
        let release = text(new, "/metadata/labels/name");
        let revisions = view.revisions(cluster, &change.key.namespace, release);
        let mut earlier = revisions.iter().rev().map(|(_, secret)| secret.as_ref());
        let previous = earlier.find_map(|secret| {
            label(secret, OWNER_UID_LABEL).filter(|_| text(secret, "/metadata/name") != change.key.name)
        });
        let Some(previous) = previous.filter(|previous| *previous != owner) else {
            return Ok(());
        };
        let find = |uid: &str| -> Option<Value> {
            let mut tenants = view.all(cluster, krypton_types::names::GROUP, "tenants");
            let found = tenants.find(|(_, tenant)| text(tenant, "/metadata/uid") == uid);
            found.map(|(_, tenant)| tenant.as_ref().clone())
        };
        let lives = find(previous).is_some_and(|previous| !is_deleted(&previous));
        let adopts = find(owner)
            .is_some_and(|owner| annotation(&owner, ADOPT_ANNOTATION) == Some("true"));
        ensure(!lives || adopts, || format!("{release} goes from {previous} to {owner}"))
    }
}

stateless! {
    /// The hub releases a deleted KryptonDeployment only after its release is gone from all members.
    HomeWaitsForRelease, "deleted-deployment-waits",
    fn see(&mut self, view: &View, seen: &Observation) -> Check {
        let Some((cluster, change, before)) = let_go(seen, DEPLOYMENT_FINALIZER) else {
            return Ok(());
        };
        let crd = format!("kryptondeployments.{GROUP}");
        if !is_deleted(before)
            || annotation(before, ORPHAN_ANNOTATION) == Some("true")
            || !view.has_crd(cluster, &crd)
            || view.ever_restored()
        {
            return Ok(());
        }
        let uid = text(before, "/metadata/uid");
        for cluster in view.settings.clusters() {
            let mut secrets = view.all(&cluster, "", "secrets");
            let left = secrets.find(|(_, secret)| label(secret, OWNER_UID_LABEL) == Some(uid));
            let member = view.edge_cluster(Settings::member(&cluster));
            // The releases of a member that left stay.
            ensure(left.is_none() || member.is_none(), || {
                format!("{} goes before its release on {cluster}", change.key.name)
            })?;
        }
        Ok(())
    }
}

/// Helm does not uninstall the release of a Tenant or KryptonDeployment that had the annotation `orphan` when it was
/// deleted. The deletion shows the annotation too, so no delay excuses it.
#[derive(Debug, Default)]
struct OrphansStay {
    /// UIDs of these Tenants, those of the home cluster included.
    orphans: BTreeSet<String>,
}

impl OrphansStay {
    fn is_orphan(&self, view: &View, cluster: &str, name: &str) -> bool {
        view.tenant(cluster, name).is_some_and(|tenant| {
            let own = self.orphans.contains(text(tenant, "/metadata/uid"))
                && annotation(tenant, ORPHAN_ANNOTATION) == Some("true");
            let home = annotation(tenant, HOME_UID_ANNOTATION);
            own || home.is_some_and(|uid| self.orphans.contains(uid))
        })
    }
}

impl Oracle for OrphansStay {
    fn name(&self) -> &'static str {
        "orphaned-release-stays"
    }

    fn see(&mut self, view: &View, seen: &Observation) -> Check {
        if let Event::Change { change, .. } = &seen.event
            && let (Some(before), Some(after)) = (&change.before, &change.after)
            && change.key.resource == "tenants"
            && !is_deleted(before)
            && is_deleted(after)
            && annotation(before, ORPHAN_ANNOTATION) == Some("true")
        {
            let uid = text(after, "/metadata/uid").to_owned();
            self.orphans.insert(uid);
        }
        // People can delete what home has left on a member.
        if let Event::Change { change, .. } = &seen.event
            && change.by == PEOPLE
            && let Some(after) = change.after.as_deref().filter(|after| is_deleted(after))
            && let Some(uid) = annotation(after, HOME_UID_ANNOTATION)
        {
            self.orphans.remove(uid);
        }
        let Some(run) = started(view, seen).filter(|run| run.verb == "uninstall") else {
            return Ok(());
        };
        let Some(cluster) = run.cluster.as_deref() else {
            return Ok(());
        };
        let orphaned = match &run.owner {
            Owner::Tenant(name) => self.is_orphan(view, cluster, name),
            Owner::Deployment(name) => view.orphaned_for(name).is_some_and(|time| time > LAG),
            Owner::Unknown => false,
        };
        ensure(!orphaned || view.restored_within(cluster, RECOVERY), || {
            format!("{} uninstalls the orphan {}", run.host, run.release)
        })
    }
}

stateless! {
    /// Helm does not run for a Tenant that has been paused for some time.
    PausedTenants, "paused-tenant-stays",
    fn see(&mut self, view: &View, seen: &Observation) -> Check {
        let (Some(run), true) = (started(view, seen), view.calm() > LAG) else {
            return Ok(());
        };
        let (Owner::Tenant(name), Some(cluster)) = (&run.owner, run.cluster.as_deref()) else {
            return Ok(());
        };
        // The hub passes the pause of home on to the copy.
        let copy = view.tenant(cluster, name).is_some_and(|tenant| is_copy(tenant));
        let home = view.paused_for(HOME, name).filter(|_| copy);
        let long = view.paused_for(cluster, name).or(home).is_some_and(|time| time > LAG);
        ensure(!long, || {
            format!("{} runs Helm for the paused {}", run.host, run.release)
        })
    }
}

stateless! {
    /// Helm does not run on a member that has been paused or banned for some time.
    PausedMembers, "paused-member-stays",
    fn see(&mut self, view: &View, seen: &Observation) -> Check {
        let (Some(run), true) = (started(view, seen), view.calm() > LAG) else {
            return Ok(());
        };
        let Some(member) = run.cluster.as_deref().map(Settings::member) else {
            return Ok(());
        };
        // A banned agent continues with its last desired state, so only the pause counts.
        let long = view.idle_for(member).is_some_and(|time| time > LAG);
        ensure(!long, || format!("{} runs Helm on the paused {member}", run.host))
    }
}

/// Krypton retries a failing run with a growing pause.
#[derive(Debug, Default)]
struct RunsBackOff {
    starts: BTreeMap<(String, Option<String>), VecDeque<Millis>>,
}

impl Oracle for RunsBackOff {
    fn name(&self) -> &'static str {
        "helm-runs-back-off"
    }

    fn see(&mut self, view: &View, seen: &Observation) -> Check {
        let Some(run) = started(view, seen) else {
            return Ok(());
        };
        let key = (run.release.clone(), run.cluster.clone());
        let starts = self.starts.entry(key).or_default();
        starts.push_back(view.now);
        while starts
            .front()
            .is_some_and(|start| view.now - start > 60_000)
        {
            starts.pop_front();
        }
        ensure(starts.len() <= RUNS_A_MINUTE, || {
            format!(
                "Helm ran {} times for {} in a minute",
                starts.len(),
                run.release
            )
        })
    }
}

stateless! {
    /// The number of revisions of a release is bounded.
    HistoryIsBounded, "history-is-bounded",
    fn see(&mut self, view: &View, seen: &Observation) -> Check {
        let Event::Change { cluster, change } = &seen.event else {
            return Ok(());
        };
        let new = change.after.as_deref().filter(|_| change.before.is_none());
        let Some(new) = new.filter(|new| text(new, "/type") == "helm.sh/release.v1") else {
            return Ok(());
        };
        let release = text(new, "/metadata/labels/name");
        let count = view.revisions(cluster, &change.key.namespace, release).len();
        ensure(count <= HISTORY, || format!("{release} has {count} revisions"))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::story::{Story, deletion, deployment, edge_cluster, revision, tenant};

    const RELEASE: &str = "tenant-t0-edge-1";
    const AGENT: &str = "agent-edge-1";

    /// A story with a live Tenant and a fresh Lease.
    fn story() -> Story {
        let mut story = Story::new();
        story.put("people", "edge-1", tenant()).renew();
        story
    }

    #[test]
    fn deleted_tenant_loses_its_release() {
        let mut story = story();
        story
            .patch("people", "edge-1", tenant(), &deletion())
            .helm(1, AGENT, "uninstall", RELEASE);
        story.assert_kept();
    }

    #[test]
    fn uninstalling_a_live_release_is_found() {
        let mut story = story();
        story.helm(1, AGENT, "uninstall", RELEASE);
        story.assert_broken("live-release-stays");
    }

    #[test]
    fn deletion_by_the_crd_controller_uninstalls_nothing() {
        let mut story = story();
        story
            .patch("crd-controller", "edge-1", tenant(), &deletion())
            .helm(1, AGENT, "uninstall", RELEASE);
        story.assert_broken("live-release-stays");
    }

    #[test]
    fn retired_member_loses_its_releases() {
        let mut story = story();
        let mut member = edge_cluster("edge-1");
        member["spec"] = json!({"deletionPolicy": "Uninstall"});
        story
            .put("hub-0", "home", member.clone())
            .patch("people", "home", member, &deletion())
            .helm(1, AGENT, "uninstall", RELEASE);
        story.assert_kept();
    }

    #[test]
    fn deployment_in_place_keeps_its_release() {
        let mut story = story();
        story
            .put("people", "home", deployment("edge-1"))
            .wait(31_000)
            .renew()
            .helm(1, AGENT, "uninstall", "ced-d0");
        story.assert_broken("live-release-stays");
    }

    #[test]
    fn second_helm_of_a_release_is_found() {
        let mut good = story();
        good.helm(1, AGENT, "upgrade", RELEASE)
            .ends(1, AGENT, 0)
            .helm(2, AGENT, "upgrade", RELEASE)
            .helm(3, "hub-0", "upgrade", "tenant-t0-edge-2");
        good.assert_kept();
        let mut bad = story();
        bad.helm(1, AGENT, "upgrade", RELEASE)
            .helm(2, AGENT, "upgrade", RELEASE);
        bad.assert_broken("one-helm-per-release");
    }

    #[test]
    fn installation_without_finalizer_is_found() {
        let mut story = story();
        let bare = json!({"metadata": {"finalizers": null}});
        story
            .patch("people", "edge-1", tenant(), &bare)
            .wait(31_000)
            .renew()
            .helm(1, AGENT, "upgrade", RELEASE);
        story.assert_broken("finalizer-precedes-helm");
    }

    #[test]
    fn finalizer_before_the_release_is_found() {
        let bare = json!({"metadata": {"finalizers": null}});
        let mut good = story();
        good.put(
            "helm:agent-edge-1",
            "edge-1",
            revision(RELEASE, 1, "deployed"),
        )
        .patch("people", "edge-1", tenant(), &deletion())
        .delete(
            "helm:agent-edge-1",
            "edge-1",
            &revision(RELEASE, 1, "deployed"),
        )
        .patch(AGENT, "edge-1", tenant(), &bare);
        good.assert_kept();
        let mut bad = story();
        bad.put(
            "helm:agent-edge-1",
            "edge-1",
            revision(RELEASE, 1, "deployed"),
        )
        .patch("people", "edge-1", tenant(), &deletion())
        .patch(AGENT, "edge-1", tenant(), &bare);
        bad.assert_broken("finalizer-outlives-release");
    }

    #[test]
    fn orphan_may_leave_its_release() {
        let orphan = json!({"metadata": {"annotations": {"mesh.openkcm.io/orphan": "true"}}});
        let bare = json!({"metadata": {"finalizers": null}});
        let mut good = story();
        good.put(
            "helm:agent-edge-1",
            "edge-1",
            revision(RELEASE, 1, "deployed"),
        )
        .patch("people", "edge-1", tenant(), &orphan)
        .patch("people", "edge-1", tenant(), &deletion())
        .patch(AGENT, "edge-1", tenant(), &bare);
        good.assert_kept();
        let mut bad = story();
        bad.patch("people", "edge-1", tenant(), &orphan)
            .patch("people", "edge-1", tenant(), &deletion())
            .helm(1, AGENT, "uninstall", RELEASE);
        bad.assert_broken("orphaned-release-stays");
    }

    #[test]
    fn release_of_a_live_owner_is_not_taken() {
        let other = |adopt: bool| {
            let mut other = tenant();
            other["metadata"]["name"] = json!("t1");
            other["metadata"]["uid"] = json!("uid-t1");
            if adopt {
                other["metadata"]["annotations"] = json!({"mesh.openkcm.io/adopt": "true"});
            }
            other
        };
        let mut taken = revision(RELEASE, 2, "pending-upgrade");
        taken["metadata"]["labels"]["mesh.openkcm.io/tenant-uid"] = json!("uid-t1");
        for (adopt, oracle) in [(true, None), (false, Some("release-keeps-its-owner"))] {
            let mut story = story();
            story
                .put("people", "edge-1", other(adopt))
                .put(
                    "helm:agent-edge-1",
                    "edge-1",
                    revision(RELEASE, 1, "deployed"),
                )
                .put("helm:agent-edge-1", "edge-1", taken.clone());
            assert_eq!(story.violated(), oracle);
        }
    }

    #[test]
    fn helm_for_a_paused_tenant_is_found() {
        let paused = json!({"metadata": {"annotations": {"mesh.openkcm.io/paused": "true"}}});
        for (pause, oracle) in [(5_000, None), (31_000, Some("paused-tenant-stays"))] {
            let mut story = story();
            story
                .patch("people", "edge-1", tenant(), &paused)
                .wait(pause)
                .renew()
                .helm(1, AGENT, "upgrade", RELEASE);
            assert_eq!(story.violated(), oracle);
        }
    }

    #[test]
    fn helm_on_a_paused_member_is_found() {
        for (paused, oracle) in [(false, None), (true, Some("paused-member-stays"))] {
            let mut story = story();
            let mut member = edge_cluster("edge-1");
            member["spec"] = json!({"paused": paused});
            story
                .put("people", "home", member)
                .wait(31_000)
                .renew()
                .helm(1, AGENT, "upgrade", RELEASE);
            assert_eq!(story.violated(), oracle);
        }
    }

    #[test]
    fn endless_retries_are_found() {
        let run = |pause| {
            let mut story = story();
            for run in 0..40 {
                story
                    .wait(pause)
                    .renew()
                    .helm(run, AGENT, "upgrade", RELEASE)
                    .ends(run, AGENT, 1);
            }
            story.violated().map(str::to_owned)
        };
        assert_eq!(run(3_000), None);
        assert_eq!(run(500).as_deref(), Some("helm-runs-back-off"));
    }

    #[test]
    fn endless_history_is_found() {
        let mut story = story();
        for version in 1..=36 {
            story.put(
                "helm:agent-edge-1",
                "edge-1",
                revision(RELEASE, version, "failed"),
            );
        }
        story.assert_kept();
        story.put(
            "helm:agent-edge-1",
            "edge-1",
            revision(RELEASE, 37, "failed"),
        );
        story.assert_broken("history-is-bounded");
    }

    #[test]
    fn deployment_that_goes_before_its_release_is_found() {
        let mut crd = super::super::story::crd();
        crd["metadata"]["name"] = json!("kryptondeployments.mesh.openkcm.io");
        let mut held = deployment("edge-1");
        held["metadata"]["finalizers"] = json!(["mesh.openkcm.io/kryptondeployment-finalizer"]);
        let mut release = revision("ced-d0", 1, "deployed");
        release["metadata"]["labels"]["mesh.openkcm.io/tenant-uid"] = json!("uid-d0");
        for (gone, oracle) in [(true, None), (false, Some("deleted-deployment-waits"))] {
            let mut story = story();
            story
                .put("people", "home", crd.clone())
                .put("hub-0", "home", edge_cluster("edge-1"))
                .put("people", "home", held.clone())
                .put("helm:agent-edge-1", "edge-1", release.clone())
                .patch("people", "home", held.clone(), &deletion());
            if gone {
                story.delete("helm:agent-edge-1", "edge-1", &release);
            }
            let released = json!({"metadata": {"finalizers": []}});
            story.patch("hub-0", "home", held.clone(), &released);
            assert_eq!(story.violated(), oracle);
        }
    }

    #[test]
    fn uninstall_of_an_orphaned_deployment_is_found() {
        let orphan = json!({"metadata": {"annotations": {"mesh.openkcm.io/orphan": "true"}}});
        for (orphaned, oracle) in [(false, None), (true, Some("orphaned-release-stays"))] {
            let mut story = story();
            story.put("people", "home", deployment("edge-1"));
            if orphaned {
                story.patch("people", "home", deployment("edge-1"), &orphan);
            }
            story
                .delete("people", "home", &deployment("edge-1"))
                .wait(31_000)
                .renew()
                .helm(1, AGENT, "uninstall", "ced-d0");
            assert_eq!(story.violated(), oracle);
        }
    }
}
