//! Invariants of Helm runs and of the releases that they change.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use krypton_helm::releases::labels::OWNER_UID_LABEL;
use krypton_types::names::{
    ADOPT_ANNOTATION, DEPLOYMENT_FINALIZER, GROUP, HOME_UID_ANNOTATION, MANAGED_BY_HUB,
    MANAGED_BY_LABEL, ORPHAN_ANNOTATION, TENANT_FINALIZER,
};
use serde_json::Value;

use super::view::{
    ReleaseOwner, Run, WATCH_LAG, finalizer_removal, is_placed_copy, is_product, krypton_key,
    restored_live,
};
use super::{Change, CheckResult, Oracle, View, ensure, invariant};
use crate::object::{annotation, has_finalizer, is_terminating, is_true, label, text};
use crate::observe::{Event, Observation};
use crate::plan::{HOME, Settings, TENANT_NAMESPACE};
use crate::time::Millis;
use crate::user_client::PEOPLE;

/// More runs of one release in a minute mean that the back-off fails.
const MAX_RUNS_PER_MINUTE: usize = 30;
/// Two revisions, 16 failed installations and 16 failed upgrades, and the running attempt.
const MAX_REVISIONS: usize = 36;

/// The run that an observation starts.
pub(super) fn started_run<'a>(view: &'a View, observation: &Observation) -> Option<&'a Run> {
    match &observation.event {
        Event::HelmStarted { run, .. } => view.helm_runs.get(run),
        _ => None,
    }
}

/// The cluster of a Helm run, and its Tenant there.
pub(super) fn tenant_of_run<'a>(view: &'a View, run: &'a Run) -> Option<(&'a str, &'a Value)> {
    let (cluster, ReleaseOwner::Tenant(name)) = (run.cluster.as_deref()?, &run.owner) else {
        return None;
    };
    Some((cluster, view.tenant(cluster, name)?))
}

invariant! {
    /// Helm uninstalls a release only if people have deleted its owner, moved its KryptonDeployment, or retired its
    /// member.
    LiveReleaseStays, "live-release-stays",
    fn check_helm_start(&mut self, view: &View, run: &Run) -> CheckResult {
        if run.verb != "uninstall" {
            return Ok(());
        }
        let member = run.cluster.as_deref().map(Settings::member_for);
        if member.is_some_and(|member| view.is_decommissioning(member)) {
            return Ok(());
        }
        let is_wanted = match &run.owner {
            ReleaseOwner::Tenant(name) => {
                let cluster = run.cluster.as_deref().unwrap_or(HOME);
                view.wants_tenant(cluster, name) && !is_terminating_copy(view, run, name)
            }
            ReleaseOwner::Deployment(name) => {
                member.is_some_and(|member| has_stayed_in_region(view, name, member))
            }
            ReleaseOwner::Unknown => false,
        };
        ensure(!is_wanted, || format!("{} uninstalls {}, which people want", run.host, run.release))
    }
}

/// Whether the hub has placed the Tenant and now deletes it. Another invariant checks the order.
fn is_terminating_copy(view: &View, run: &Run, name: &str) -> bool {
    let cluster = run.cluster.as_deref();
    let tenant = cluster.and_then(|cluster| view.tenant(cluster, name));
    tenant.is_some_and(|tenant| {
        is_terminating(tenant) && label(tenant, MANAGED_BY_LABEL) == Some(MANAGED_BY_HUB)
    })
}

/// Whether a KryptonDeployment has named this region for some time. After a move and back, an earlier order can still
/// be on its way.
fn has_stayed_in_region(view: &View, name: &str, region: &str) -> bool {
    let key = krypton_key("kryptondeployments", TENANT_NAMESPACE, name);
    let deployment = view.get(HOME, &key);
    // The deletion of the CRD deletes also wanted KryptonDeployments.
    let deleted = deployment.is_some_and(|deployment| is_terminating(deployment));
    let is_settled = view.time_since_change(HOME, &key) > WATCH_LAG && view.calm_time() > WATCH_LAG;
    deployment.is_some_and(|deployment| text(deployment, "/spec/region/name") == region)
        && view.wants_deployment(name)
        && (is_settled || deleted)
}

/// Whether a restore may have undone the Lease of the other run's host. That host notices it, and kills its run, only
/// when it renews the Lease.
fn may_have_lost_lease(view: &View, run: &Run, other: u64) -> bool {
    let cluster = run.cluster.as_deref();
    let is_restored = cluster.is_some_and(|cluster| view.recently_restored(cluster));
    let other = view.helm_runs.get(&other);
    is_restored && other.is_some_and(|other| other.host != run.host)
}

invariant! {
    /// A release on a cluster has at most one running Helm process that writes.
    OneHelmPerRelease {
        running: BTreeMap<u64, (String, String, Option<String>)>,
    },
    "one-helm-per-release",
    fn check_observation(&mut self, view: &View, observation: &Observation) -> CheckResult {
        match &observation.event {
            Event::HelmStarted { run: number, .. } => {
                let Some(run) = view.helm_runs.get(number) else {
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
                    .find(|(other, other_key)| {
                        **other_key == key
                            && key.2.is_some()
                            && !may_have_lost_lease(view, run, **other)
                    });
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

invariant! {
    /// A Tenant has Krypton's finalizer before Helm installs its release.
    FinalizerPrecedesHelm, "finalizer-precedes-helm",
    fn check_helm_start(&mut self, view: &View, run: &Run) -> CheckResult {
        let tenant = tenant_of_run(view, run).filter(|_| run.verb == "upgrade" || run.verb == "install");
        let Some((cluster, tenant)) = tenant else {
            return Ok(());
        };
        let key = krypton_key("tenants", TENANT_NAMESPACE, text(tenant, "/metadata/name"));
        let is_protected = has_finalizer(tenant, TENANT_FINALIZER)
            || is_terminating(tenant)
            // The finalizer of a Tenant that returned from a snapshot, or that was recreated, follows.
            || view.recently_restored(cluster)
            || view.time_since_change(cluster, &key) < WATCH_LAG && view.calm_time() < WATCH_LAG;
        ensure(is_protected, || format!("{} installs {} without a finalizer", run.host, run.release))
    }
}

invariant! {
    /// Krypton removes its finalizer from a deleted Tenant only after the release is gone.
    FinalizerOutlivesRelease, "finalizer-outlives-release",
    fn check_observation(&mut self, view: &View, observation: &Observation) -> CheckResult {
        let Some((cluster, change, before)) = finalizer_removal(observation, TENANT_FINALIZER) else {
            return Ok(());
        };
        if change.key.resource != "tenants"
            || !is_terminating(before)
            || annotation(before, ORPHAN_ANNOTATION) == Some("true")
            // Krypton keeps the releases of a CRD that is being deleted.
            || !view.has_tenant_crd(cluster)
            || view.recently_restored(cluster)
        {
            return Ok(());
        }
        let uid = text(before, "/metadata/uid");
        let mut secrets = view.objects(cluster, "", "secrets");
        let remaining = secrets.find(|(_, secret)| {
            text(secret, "/type") == "helm.sh/release.v1" && label(secret, OWNER_UID_LABEL) == Some(uid)
        });
        match remaining {
            Some((key, _)) => Err(format!("{} goes before {}", change.key.name, key.name)),
            None => Ok(()),
        }
    }
}

invariant! {
    /// A release does not change its owner while the owner exists, unless the new owner has the annotation `adopt`.
    ReleaseKeepsItsOwner, "release-keeps-its-owner",
    fn check_change(&mut self, view: &View, cluster: &str, change: &Change) -> CheckResult {
        let (None, Some(new_revision)) = (&change.before, &change.after) else {
            return Ok(());
        };
        let Some(owner) = label(new_revision, OWNER_UID_LABEL).filter(|_| is_product(&change.by)) else {
            return Ok(());
        };
        let release = text(new_revision, "/metadata/labels/name");
        let revisions = view.revisions(cluster, &change.key.namespace, release);
        let mut earlier_secrets = revisions.iter().rev().map(|(_, secret)| secret.as_ref());
        let previous = earlier_secrets.find_map(|secret| {
            label(secret, OWNER_UID_LABEL).filter(|_| text(secret, "/metadata/name") != change.key.name)
        });
        let Some(previous) = previous.filter(|previous| *previous != owner) else {
            return Ok(());
        };
        let find_tenant = |uid: &str| -> Option<Value> {
            let mut tenants = view.objects(cluster, krypton_types::names::GROUP, "tenants");
            let entry = tenants.find(|(_, tenant)| text(tenant, "/metadata/uid") == uid);
            entry.map(|(_, tenant)| tenant.as_ref().clone())
        };
        let previous_exists = find_tenant(previous).is_some_and(|previous| !is_terminating(&previous));
        let may_adopt = find_tenant(owner)
            .is_some_and(|owner| annotation(&owner, ADOPT_ANNOTATION) == Some("true"));
        ensure(!previous_exists || may_adopt, || format!("{release} goes from {previous} to {owner}"))
    }
}

invariant! {
    /// The hub releases a deleted KryptonDeployment only after its release is gone from all members.
    DeletedDeploymentWaits, "deleted-deployment-waits",
    fn check_observation(&mut self, view: &View, observation: &Observation) -> CheckResult {
        let Some((cluster, change, before)) = finalizer_removal(observation, DEPLOYMENT_FINALIZER) else {
            return Ok(());
        };
        let crd = format!("kryptondeployments.{GROUP}");
        if !is_terminating(before)
            || annotation(before, ORPHAN_ANNOTATION) == Some("true")
            || !view.has_crd(cluster, &crd)
            || view.ever_restored()
        {
            return Ok(());
        }
        let uid = text(before, "/metadata/uid");
        for cluster in view.settings.clusters() {
            let mut secrets = view.objects(&cluster, "", "secrets");
            let remaining = secrets.find(|(_, secret)| label(secret, OWNER_UID_LABEL) == Some(uid));
            let member = view.edge_cluster(Settings::member_for(&cluster));
            // The releases of a member that left stay.
            ensure(remaining.is_none() || member.is_none(), || {
                format!("{} goes before its release on {cluster}", change.key.name)
            })?;
        }
        Ok(())
    }
}

invariant! {
    /// Helm does not uninstall the release of a Tenant or KryptonDeployment that had the annotation `orphan` when it was
    /// deleted. The deletion shows the annotation too, so no delay excuses it.
    OrphanedReleaseStays {
        /// UIDs of these Tenants, including the Tenants of the home cluster.
        orphan_uids: BTreeSet<String>,
    },
    "orphaned-release-stays",
    fn check_change(&mut self, _: &View, _: &str, change: &Change) -> CheckResult {
        if let (Some(before), Some(after)) = (&change.before, &change.after)
            && change.key.resource == "tenants"
            && !is_terminating(before)
            && is_terminating(after)
            && annotation(before, ORPHAN_ANNOTATION) == Some("true")
        {
            let uid = text(after, "/metadata/uid").to_owned();
            self.orphan_uids.insert(uid);
        }
        // A restore can undo the deletion. People may then delete the Tenant without the annotation.
        if change.key.resource == "tenants" && let Some(after) = restored_live(change) {
            self.orphan_uids.remove(text(after, "/metadata/uid"));
        }
        // People can delete the orphan of home on a member.
        if change.by == PEOPLE
            && let Some(after) = change
                .after
                .as_deref()
                .filter(|after| is_terminating(after))
            && let Some(uid) = annotation(after, HOME_UID_ANNOTATION)
        {
            self.orphan_uids.remove(uid);
        }
        Ok(())
    }

    fn check_helm_start(&mut self, view: &View, run: &Run) -> CheckResult {
        if run.verb != "uninstall" {
            return Ok(());
        }
        // A hub's run for a KryptonDeployment names no cluster.
        let cluster = run.cluster.as_deref().unwrap_or(HOME);
        let is_orphaned = match &run.owner {
            ReleaseOwner::Tenant(name) => self.is_orphan(view, cluster, name),
            ReleaseOwner::Deployment(name) => view
                .deployment_orphaned_for(name)
                .is_some_and(|time| time > WATCH_LAG),
            ReleaseOwner::Unknown => false,
        };
        ensure(
            !is_orphaned || view.recently_restored(cluster),
            || format!("{} uninstalls the orphan {}", run.host, run.release),
        )
    }
}

impl OrphanedReleaseStays {
    fn is_orphan(&self, view: &View, cluster: &str, name: &str) -> bool {
        view.tenant(cluster, name).is_some_and(|tenant| {
            let is_own_orphan = self.orphan_uids.contains(text(tenant, "/metadata/uid"))
                && annotation(tenant, ORPHAN_ANNOTATION) == Some("true");
            let home_uid = annotation(tenant, HOME_UID_ANNOTATION);
            is_own_orphan || home_uid.is_some_and(|uid| self.orphan_uids.contains(uid))
        })
    }
}

invariant! {
    /// Helm does not run for a Tenant that has been paused for some time.
    PausedTenantStays, "paused-tenant-stays",
    fn check_helm_start(&mut self, view: &View, run: &Run) -> CheckResult {
        let (ReleaseOwner::Tenant(name), Some(cluster)) = (&run.owner, run.cluster.as_deref()) else {
            return Ok(());
        };
        // The hub passes the pause of home on to the copy.
        let has_copy = view.tenant(cluster, name).is_some_and(|tenant| is_placed_copy(tenant));
        let home_pause = view.tenant_paused_for(HOME, name).filter(|_| has_copy);
        let pause = view.tenant_paused_for(cluster, name).or(home_pause);
        let is_paused_long = pause.is_some_and(|time| time > WATCH_LAG) && view.calm_time() > WATCH_LAG;
        ensure(!is_paused_long, || {
            format!("{} runs Helm for the paused {}", run.host, run.release)
        })
    }
}

invariant! {
    /// Helm does not run on a member that has been paused for some time. Krypton neither writes a namespace there nor
    /// adds its finalizer to a Tenant.
    PausedMemberStays, "paused-member-stays",
    fn check_helm_start(&mut self, view: &View, run: &Run) -> CheckResult {
        let Some(cluster) = run.cluster.as_deref() else {
            return Ok(());
        };
        ensure(!is_long_paused(view, cluster), || format!("{} runs Helm on the paused {cluster}", run.host))
    }

    fn check_product_change(&mut self, view: &View, cluster: &str, change: &Change) -> CheckResult {
        let key = &change.key;
        let adds_finalizer = || {
            let (Some(before), Some(after)) = (&change.before, &change.after) else {
                return false;
            };
            !has_finalizer(before, TENANT_FINALIZER) && has_finalizer(after, TENANT_FINALIZER)
        };
        let is_act = key.resource == "namespaces" || key.resource == "tenants" && adds_finalizer();
        ensure(!is_act || !is_long_paused(view, cluster), || {
            format!("{} writes {} {} on the paused {cluster}", change.by, key.resource, key.name)
        })
    }
}

/// Whether the member of the cluster has been paused for some time.
fn is_long_paused(view: &View, cluster: &str) -> bool {
    let member = Settings::member_for(cluster);
    let pause = view.member_paused_for(member);
    // A banned agent continues with its last desired state, which may precede the pause.
    let is_banned = view
        .edge_cluster(member)
        .is_some_and(|member| is_true(member, "/spec/banned"));
    let key = krypton_key("edgeclusters", "", member);
    pause.is_some_and(|time| time > WATCH_LAG)
        && !is_banned
        && view.time_since_change(HOME, &key) > WATCH_LAG
        && view.calm_time() > WATCH_LAG
}

invariant! {
    /// Krypton retries a failing run with a growing pause.
    HelmRunsBackOff {
        starts: BTreeMap<(String, Option<String>), VecDeque<Millis>>,
    },
    "helm-runs-back-off",
    fn check_helm_start(&mut self, view: &View, run: &Run) -> CheckResult {
        let key = (run.release.clone(), run.cluster.clone());
        let starts = self.starts.entry(key).or_default();
        starts.push_back(view.now);
        while starts
            .front()
            .is_some_and(|start| view.now - start > 60_000)
        {
            starts.pop_front();
        }
        ensure(starts.len() <= MAX_RUNS_PER_MINUTE, || {
            format!(
                "Helm ran {} times for {} in a minute",
                starts.len(),
                run.release
            )
        })
    }
}

invariant! {
    /// The number of revisions of a release is bounded.
    HistoryIsBounded, "history-is-bounded",
    fn check_change(&mut self, view: &View, cluster: &str, change: &Change) -> CheckResult {
        let secret = change.after.as_deref().filter(|_| change.before.is_none());
        let Some(secret) = secret.filter(|secret| text(secret, "/type") == "helm.sh/release.v1") else {
            return Ok(());
        };
        let release = text(secret, "/metadata/labels/name");
        let count = view.revisions(cluster, &change.key.namespace, release).len();
        ensure(count <= MAX_REVISIONS, || format!("{release} has {count} revisions"))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::leases::MEMBER_LEASE;
    use super::super::story::{
        AGENT, History, RELEASE, copy, crd, deletion_patch, deployment, edge_cluster, lease,
        namespace, revision, tenant,
    };
    use super::TENANT_FINALIZER;
    use crate::faults::RESTORE_WRITER;

    #[test]
    fn deleted_tenant_loses_its_release() {
        History::with_tenant()
            .patch("people", "edge-1", tenant(), &deletion_patch())
            .start_helm(1, AGENT, "uninstall", RELEASE)
            .assert_no_violation();
    }

    #[test]
    fn uninstalling_a_live_release_is_found() {
        History::with_tenant()
            .start_helm(1, AGENT, "uninstall", RELEASE)
            .assert_violated("live-release-stays");
    }

    #[test]
    fn deletion_by_the_crd_controller_uninstalls_nothing() {
        History::with_tenant()
            .patch("crd-controller", "edge-1", tenant(), &deletion_patch())
            .start_helm(1, AGENT, "uninstall", RELEASE)
            .assert_violated("live-release-stays");
    }

    #[test]
    fn retired_member_loses_its_releases() {
        let mut history = History::with_tenant();
        let mut member = edge_cluster("edge-1");
        member["spec"] = json!({"deletionPolicy": "Uninstall"});
        history
            .put("hub-0", "home", member.clone())
            .patch("people", "home", member, &deletion_patch())
            .start_helm(1, AGENT, "uninstall", RELEASE);
        history.assert_no_violation();
    }

    #[test]
    fn deployment_in_place_keeps_its_release() {
        let mut history = History::with_tenant();
        history
            .put("people", "home", deployment("edge-1"))
            .wait(31_000)
            .renew_leases()
            .start_helm(1, AGENT, "uninstall", "ced-d0");
        history.assert_violated("live-release-stays");
    }

    #[test]
    fn second_helm_of_a_release_is_found() {
        History::with_tenant()
            .start_helm(1, AGENT, "upgrade", RELEASE)
            .end_helm(1, AGENT, 0)
            .start_helm(2, AGENT, "upgrade", RELEASE)
            .start_helm(3, "hub-0", "upgrade", "tenant-t0-edge-2")
            .assert_no_violation();
        History::with_tenant()
            .start_helm(1, AGENT, "upgrade", RELEASE)
            .start_helm(2, AGENT, "upgrade", RELEASE)
            .assert_violated("one-helm-per-release");
        for (host, oracle) in [("copy-edge-1", None), (AGENT, Some("one-helm-per-release"))] {
            History::with_tenant()
                .start_helm(1, AGENT, "upgrade", RELEASE)
                .put(RESTORE_WRITER, "edge-1", lease(MEMBER_LEASE, ""))
                .start_helm(2, host, "upgrade", RELEASE)
                .assert_outcome(oracle);
        }
    }

    #[test]
    fn installation_without_finalizer_is_found() {
        let mut history = History::with_tenant();
        let bare = json!({"metadata": {"finalizers": null}});
        history
            .patch("people", "edge-1", tenant(), &bare)
            .wait(31_000)
            .renew_leases()
            .start_helm(1, AGENT, "upgrade", RELEASE);
        history.assert_violated("finalizer-precedes-helm");
    }

    #[test]
    fn finalizer_before_the_release_is_found() {
        let bare = json!({"metadata": {"finalizers": null}});
        History::with_tenant()
            .put_revision(RELEASE, 1, "deployed")
            .patch("people", "edge-1", tenant(), &deletion_patch())
            .delete(
                "helm:agent-edge-1",
                "edge-1",
                &revision(RELEASE, 1, "deployed"),
            )
            .patch(AGENT, "edge-1", tenant(), &bare)
            .assert_no_violation();
        History::with_tenant()
            .put_revision(RELEASE, 1, "deployed")
            .patch("people", "edge-1", tenant(), &deletion_patch())
            .patch(AGENT, "edge-1", tenant(), &bare)
            .assert_violated("finalizer-outlives-release");
    }

    #[test]
    fn orphan_may_leave_its_release() {
        let orphan = json!({"metadata": {"annotations": {"mesh.openkcm.io/orphan": "true"}}});
        let bare = json!({"metadata": {"finalizers": null}});
        History::with_tenant()
            .put_revision(RELEASE, 1, "deployed")
            .patch("people", "edge-1", tenant(), &orphan)
            .patch("people", "edge-1", tenant(), &deletion_patch())
            .patch(AGENT, "edge-1", tenant(), &bare)
            .assert_no_violation();
        History::with_tenant()
            .patch("people", "edge-1", tenant(), &orphan)
            .patch("people", "edge-1", tenant(), &deletion_patch())
            .start_helm(1, AGENT, "uninstall", RELEASE)
            .assert_violated("orphaned-release-stays");
    }

    #[test]
    fn restore_undoes_an_orphan() {
        let orphan = json!({"metadata": {"annotations": {"mesh.openkcm.io/orphan": "true"}}});
        for (restored, oracle) in [(true, None), (false, Some("orphaned-release-stays"))] {
            let mut history = History::new();
            let copy = copy("uid-t0");
            history
                .put("people", "home", tenant())
                .put(AGENT, "edge-1", copy.clone())
                .renew_leases()
                .patch("people", "home", tenant(), &orphan)
                .patch("people", "home", tenant(), &deletion_patch());
            if restored {
                history.put(RESTORE_WRITER, "home", tenant()).patch(
                    "people",
                    "home",
                    tenant(),
                    &deletion_patch(),
                );
            }
            history
                .patch(AGENT, "edge-1", copy, &deletion_patch())
                .start_helm(1, AGENT, "uninstall", RELEASE)
                .assert_outcome(oracle);
        }
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
            History::with_tenant()
                .put("people", "edge-1", other(adopt))
                .put_revision(RELEASE, 1, "deployed")
                .put("helm:agent-edge-1", "edge-1", taken.clone())
                .assert_outcome(oracle);
        }
    }

    #[test]
    fn helm_for_a_paused_tenant_is_found() {
        let paused = json!({"metadata": {"annotations": {"mesh.openkcm.io/paused": "true"}}});
        for (pause, oracle) in [(5_000, None), (31_000, Some("paused-tenant-stays"))] {
            History::with_tenant()
                .patch("people", "edge-1", tenant(), &paused)
                .wait(pause)
                .renew_leases()
                .start_helm(1, AGENT, "upgrade", RELEASE)
                .assert_outcome(oracle);
        }
    }

    #[test]
    fn acts_on_a_paused_member_are_found() {
        const VIOLATED: Option<&str> = Some("paused-member-stays");
        let finalizers = json!({"metadata": {"finalizers": [TENANT_FINALIZER]}});
        for (spec, oracle) in [
            (json!({"paused": false}), None),
            (json!({"paused": true, "banned": true}), None),
            (json!({"paused": true}), VIOLATED),
        ] {
            let paused = || {
                let mut history = History::with_tenant();
                let mut member = edge_cluster("edge-1");
                member["spec"] = spec.clone();
                history.put("people", "home", member).wait(31_000);
                history.renew_leases();
                history
            };
            paused()
                .start_helm(1, AGENT, "upgrade", RELEASE)
                .assert_outcome(oracle);
            paused()
                .put(AGENT, "edge-1", namespace("t1", true))
                .assert_outcome(oracle);
            let mut unprotected = paused();
            let without = json!({"metadata": {"finalizers": []}});
            unprotected
                .patch("people", "edge-1", tenant(), &without)
                .patch(AGENT, "edge-1", tenant(), &finalizers)
                .assert_outcome(oracle);
        }
    }

    #[test]
    fn endless_retries_are_found() {
        let run = |pause| {
            let mut history = History::with_tenant();
            for run in 0..40 {
                history
                    .wait(pause)
                    .renew_leases()
                    .start_helm(run, AGENT, "upgrade", RELEASE)
                    .end_helm(run, AGENT, 1);
            }
            history.violated_oracle().map(str::to_owned)
        };
        assert_eq!(run(3_000), None);
        assert_eq!(run(500).as_deref(), Some("helm-runs-back-off"));
    }

    #[test]
    fn endless_history_is_found() {
        let mut history = History::with_tenant();
        for version in 1..=36 {
            history.put_revision(RELEASE, version, "failed");
        }
        history.assert_no_violation();
        history.put_revision(RELEASE, 37, "failed");
        history.assert_violated("history-is-bounded");
    }

    #[test]
    fn deployment_that_goes_before_its_release_is_found() {
        let mut crd = super::super::story::tenant_crd();
        crd["metadata"]["name"] = json!("kryptondeployments.mesh.openkcm.io");
        let mut guarded = deployment("edge-1");
        guarded["metadata"]["finalizers"] = json!(["mesh.openkcm.io/kryptondeployment-finalizer"]);
        let mut release = revision("ced-d0", 1, "deployed");
        release["metadata"]["labels"]["mesh.openkcm.io/tenant-uid"] = json!("uid-d0");
        for (gone, oracle) in [(true, None), (false, Some("deleted-deployment-waits"))] {
            let mut history = History::with_tenant();
            history
                .put("people", "home", crd.clone())
                .put("hub-0", "home", edge_cluster("edge-1"))
                .put("people", "home", guarded.clone())
                .put("helm:agent-edge-1", "edge-1", release.clone())
                .patch("people", "home", guarded.clone(), &deletion_patch());
            if gone {
                history.delete("helm:agent-edge-1", "edge-1", &release);
            }
            let released = json!({"metadata": {"finalizers": []}});
            history.patch("hub-0", "home", guarded.clone(), &released);
            assert_eq!(history.violated_oracle(), oracle);
        }
    }

    #[test]
    fn uninstall_of_an_orphaned_deployment_is_found() {
        let orphan = json!({"metadata": {"annotations": {"mesh.openkcm.io/orphan": "true"}}});
        for (orphaned, oracle) in [(false, None), (true, Some("orphaned-release-stays"))] {
            let mut history = History::with_tenant();
            history
                .put("people", "home", crd("kryptondeployments"))
                .put("people", "home", deployment("edge-1"));
            if orphaned {
                history.patch("people", "home", deployment("edge-1"), &orphan);
            }
            history
                .delete("people", "home", &deployment("edge-1"))
                .wait(31_000)
                .renew_leases()
                .start_helm(1, AGENT, "uninstall", "ced-d0");
            assert_eq!(history.violated_oracle(), oracle);
        }
    }
}
