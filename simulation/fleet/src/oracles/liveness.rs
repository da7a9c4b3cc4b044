//! The state that the fleet must reach after all faults have ended, and then keep.
//!
//! Excused are members that a permanent fault separates, paused objects, members whose EdgeCluster was deleted, and
//! charts whose upgrade fails.

use std::collections::BTreeSet;
use std::sync::Arc;

use krypton_crds::edge_cluster::EdgeCluster;
use krypton_crds::krypton_deployment::KryptonDeployment;
use krypton_crds::tenant::Tenant;
use krypton_helm::releases::labels::OWNER_UID_LABEL;
use krypton_reconciler::backup::{RECORD_LABEL, record_name};
use krypton_sim_apiserver::server::Key;
use krypton_types::ca_rotation::{REQUEST_ANNOTATION, ROTATION_STATE_ANNOTATION};
use krypton_types::conditions::{TARGET_RESOLVED, reason};
use krypton_types::names::{
    CA_SECRET, GROUP, HUB_LEASE, PLACED_FINALIZER, SELF_CLUSTER, deployment_release, tenant_release,
};
use kube::CustomResourceExt as _;
use serde_json::Value;

use super::content;
use super::leases::MEMBER_LEASE;
use super::view::{
    ReleaseOwner, is_krypton, is_paused, is_placed_copy, is_product, is_ready, krypton_key,
    reconciling_member, state_version, workspace,
};
use super::{Change, CheckResult, Oracle, Phase, Run, View, ensure, invariant};
use crate::object::{
    annotation, condition, condition_text, has_finalizer, has_true_condition, is_terminating,
    is_true, label, text,
};
use crate::plan::{Chart, HOME, Settings, TENANT_NAMESPACE};
use crate::time::Millis;

/// The holder of a member's Lease renews it every 15 s, and retries.
const MEMBER_RENEWAL: Millis = 25_000;
/// The hub may write the status of an EdgeCluster this long after the change.
const SETTLE_TIME: Millis = 5_000;

impl View {
    /// Whether a member must converge: a process acts on it, and it is not paused.
    pub(super) fn must_converge(&self, member: &str) -> bool {
        let object = self.edge_cluster(member);
        let is_paused = object.is_some_and(|object| is_true(object, "/spec/paused"));
        self.must_be_held(member) && !is_paused
    }

    /// Whether a process must hold the member's Lease: the member is part of the fleet, and neither banned nor
    /// separated. Without a hub, only agents work.
    fn must_be_held(&self, member: &str) -> bool {
        let Some(object) = self.edge_cluster(member) else {
            return false;
        };
        let mut edges = self.settings.edges.iter();
        let has_agent = edges.any(|edge| edge.name == member && edge.agent_host().is_some());
        self.separated_member.as_deref() != Some(member)
            && (has_agent || !self.all_hubs_lost)
            && !is_terminating(object)
            && !is_true(object, "/spec/banned")
            && !self.makes_lone_claim(object)
    }

    /// Whether a restore of home has undone a desired state that only this member still has. The hub believes this after
    /// 6 hours. Until then, the member ignores the hub. While the fleet converges, another member may still confirm it.
    fn makes_lone_claim(&self, object: &Value) -> bool {
        let claims = |member: &Value| {
            condition_text(member, "Healthy").contains("no other member confirms it")
        };
        let is_lone = || {
            let members = self.objects(HOME, GROUP, "edgeclusters");
            members.filter(|(_, member)| claims(member)).count() == 1
        };
        self.phase == Phase::Quiet && self.was_restored(HOME) && claims(object) && is_lone()
    }

    /// The members that must converge.
    pub(super) fn converging_members(&self) -> impl Iterator<Item = (&str, &Value)> {
        let members = self.objects(HOME, GROUP, "edgeclusters");
        members
            .map(|(key, object)| (key.name.as_str(), object.as_ref()))
            .filter(|(name, _)| self.must_converge(name))
    }

    /// The Tenants that must become ready, with their cluster and the member that runs the release.
    pub(super) fn ready_tenants(&self) -> Vec<(String, String, &Value)> {
        let mut ready_tenants = Vec::new();
        let clusters = self.settings.clusters().into_iter();
        for cluster in clusters.filter(|cluster| cluster != HOME || !self.all_hubs_lost) {
            let tenants: Vec<_> = self.objects(&cluster, GROUP, "tenants").collect();
            for (_, tenant) in tenants {
                let member = reconciling_member(tenant, &cluster);
                // A member leaves a Tenant alone that names another one.
                let is_held_back = match cluster == HOME {
                    true => {
                        !self.allows_tenants(member) || self.has_paused_namesake(member, tenant)
                    }
                    false => Settings::cluster_for(member) != cluster,
                };
                if self.must_converge(member)
                    && !is_terminating(tenant)
                    && !is_paused(tenant)
                    && !is_held_back
                    && !self.awaits_uninstallation(member, tenant)
                {
                    ready_tenants.push((cluster.clone(), member.to_owned(), tenant.as_ref()));
                }
            }
        }
        ready_tenants
    }

    /// Whether the member has a paused Tenant of this name that was not placed for this Tenant of home, such as the copy
    /// of an orphaned one. Nobody but people resumes it.
    fn has_paused_namesake(&self, member: &str, tenant: &Value) -> bool {
        let cluster = Settings::cluster_for(member);
        let namesake = self.tenant(cluster, text(tenant, "/metadata/name"));
        cluster != HOME
            && self.placed_copy(tenant, cluster).is_none()
            && namesake.is_some_and(|it| is_paused(it))
    }

    /// Whether Krypton died while it uninstalled the release of an earlier Tenant of this name, or a restore undid the
    /// rest. People then orphaned that Tenant and created it again, or Krypton restored it with its CRD, because the
    /// order of both deletions was unknown. Such a lock bears no mark of Krypton, so it lasts for 10 minutes.
    fn awaits_uninstallation(&self, member: &str, tenant: &Value) -> bool {
        newest_revision(self, member, tenant).is_some_and(|newest| {
            let owner = label(newest, OWNER_UID_LABEL);
            let is_of_earlier_tenant = owner.is_some_and(|uid| self.owner(uid).is_none());
            is_of_earlier_tenant && text(newest, "/metadata/labels/status") == "uninstalling"
        })
    }

    /// Whether Krypton died while it uninstalled the release of the KryptonDeployment in its region, and a restore then
    /// undid the deletion. Such a lock lasts for 10 minutes, too.
    pub(super) fn awaits_undone_uninstallation(&self, member: &str, deployment: &Value) -> bool {
        let name = text(deployment, "/metadata/name");
        let cluster = Settings::cluster_for(member);
        let revisions = self.revisions(cluster, name, &deployment_release(name));
        let newest = revisions.last();
        let is_uninstalling = newest
            .is_some_and(|(_, newest)| text(newest, "/metadata/labels/status") == "uninstalling");
        self.ever_restored()
            && !is_terminating(deployment)
            && text(deployment, "/spec/region/name") == member
            && is_uninstalling
    }

    /// Whether a deletion needs a decision of people, because a wrong clock dated it before the CRD.
    fn awaits_decision(&self, member: &str, tenant: &Value) -> bool {
        self.had_wrong_clock(Settings::cluster_for(member))
            && is_terminating(tenant)
            && condition_text(tenant, "Ready").contains("together with an earlier CRD")
    }

    /// Whether the deletion of a Tenant may wait: for its member, for the end of a pause, or for a decision of people.
    fn deletion_may_wait(&self, cluster: &str, tenant: &Value) -> bool {
        let member = reconciling_member(tenant, cluster);
        // A restore may have undone that people have resumed it. A copy follows the pause at home.
        let is_held_up = match is_placed_copy(tenant) {
            true => {
                let home_tenant = self.tenant(HOME, text(tenant, "/metadata/name"));
                home_tenant.is_some_and(|it| is_paused(it))
            }
            false => is_paused(tenant),
        };
        !self.must_converge(member)
            || self.awaits_decision(member, tenant)
            || self.all_hubs_lost && cluster == HOME
            || is_held_up
    }

    /// Whether a deleted CRD of home waits for an object that people had deleted before, which in turn may wait. If home
    /// is a member, its reconciler saves and releases such Tenants.
    fn crd_may_wait(&self, cluster: &str, crd: &str) -> bool {
        let waits = |(key, object): (&Key, &Arc<Value>)| {
            let name = key.name.as_str();
            is_terminating(object)
                && match key.resource.as_str() {
                    "tenants" => {
                        !self.settings.self_cluster
                            && !self.wants_tenant(HOME, name)
                            && has_finalizer(object, PLACED_FINALIZER)
                            && self.deletion_may_wait(HOME, object)
                    }
                    "kryptondeployments" => {
                        !self.wants_deployment(name) && content::deletion_may_wait(self, object)
                    }
                    _ => false,
                }
        };
        let exists = self.get(cluster, &Key::of_crd(crd)).is_some();
        let resource = crd.split('.').next().unwrap_or_default();
        cluster == HOME && exists && self.objects(HOME, GROUP, resource).any(waits)
    }

    /// Whether the Tenant or KryptonDeployment is paused, or the Tenant of home that a copy was placed for. Only people
    /// resume the copy of an orphaned one.
    fn is_held(&self, owner: &Value) -> bool {
        let home_tenant = self.tenant(HOME, text(owner, "/metadata/name"));
        let home_tenant = home_tenant.filter(|_| is_placed_copy(owner));
        is_paused(owner) || home_tenant.is_some_and(|it| is_paused(it))
    }

    /// The member whose release Helm changes. A hub's run for a KryptonDeployment does not name it.
    fn member_of_run<'a>(&'a self, run: &'a Run) -> Option<&'a str> {
        if let Some(cluster) = &run.cluster {
            return Some(Settings::member_for(cluster));
        }
        let ReleaseOwner::Deployment(name) = &run.owner else {
            return None;
        };
        let key = krypton_key("kryptondeployments", TENANT_NAMESPACE, name);
        Some(text(self.get(HOME, &key)?, "/spec/region/name"))
    }

    pub(super) fn upgrades_fail(&self) -> bool {
        self.settings.chart == Chart::FailingUpgrade
    }
}

invariant! {
    /// One hub leads and renews its Lease.
    OneHubLeads, "one-hub-leads",
    fn check_converged(&mut self, view: &View) -> CheckResult {
        let is_led = view.renewal(HOME, HUB_LEASE).is_some_and(|renewal| {
            !renewal.holder.is_empty() && view.now - renewal.at <= view.settings.leader_lease()
        });
        ensure(is_led || view.all_hubs_lost, || format!("no hub leads: {:?}", view.renewal(HOME, HUB_LEASE)))
    }
}

invariant! {
    /// Each member is connected.
    MembersConnect, "members-connect",
    fn check_converged(&mut self, view: &View) -> CheckResult {
        for edge in &view.settings.edges {
            let must_join = edge.agent_host().is_some() && view.separated_member.as_ref() != Some(&edge.name);
            let has_joined = view.edge_cluster(&edge.name).is_some() || view.ever_restored();
            ensure(!must_join || has_joined, || format!("{} has no EdgeCluster", edge.name))?;
        }
        for (name, member) in view.converging_members().filter(|(name, _)| *name != SELF_CLUSTER) {
            let is_connected = has_true_condition(member, "Connected");
            ensure(is_connected || view.all_hubs_lost, || {
                format!("{name} is not connected: {}", condition_text(member, "Connected"))
            })?;
        }
        Ok(())
    }
}

invariant! {
    /// The hub can read the sources of the members. It repeats a list only a minute after its response was lost.
    SourcesAreRead, "sources-are-read",
    fn check_converged(&mut self, view: &View) -> CheckResult {
        for (key, member) in view.objects(HOME, GROUP, "edgeclusters") {
            let resolved = condition(member, TARGET_RESOLVED);
            let is_unread = resolved.is_some_and(|(_, reason)| reason == reason::SOURCE_UNAVAILABLE);
            ensure(!is_unread || view.all_hubs_lost, || {
                format!("the source of {} is not read: {}", key.name, condition_text(member, TARGET_RESOLVED))
            })?;
        }
        Ok(())
    }
}

invariant! {
    /// The home cluster and each member have the CRD of Tenants, and home all others too. The deletion of one at home waits
    /// for objects that people had deleted before.
    CrdsExist, "crds-exist",
    fn check_converged(&mut self, view: &View) -> CheckResult {
        let members = view.converging_members().map(|(name, _)| Settings::cluster_for(name));
        let wanted = members.map(|cluster| (cluster, Tenant::crd_name()));
        let at_home = [Tenant::crd_name(), EdgeCluster::crd_name(), KryptonDeployment::crd_name()];
        for (cluster, crd) in wanted.chain(at_home.map(|crd| (HOME, crd))) {
            let has_crd = view.has_crd(cluster, crd) || view.crd_may_wait(cluster, crd);
            ensure(has_crd, || format!("{cluster} has no CRD {crd}"))?;
        }
        Ok(())
    }
}

invariant! {
    /// A rotation of the CA ends once all agents follow it. It waits for certificates that were never used.
    CaRotationEnds, "ca-rotation-ends",
    fn check_converged(&mut self, view: &View) -> CheckResult {
        let mut members = view.objects(HOME, GROUP, "edgeclusters");
        // Such a certificate may still be used while the fleet converges.
        let is_last_check = view.phase == Phase::Quiet;
        let has_unused_certificate = |member: &Value| member.pointer("/status/pendingCertificateExpiry").is_some();
        if is_last_check && members.any(|(_, member)| has_unused_certificate(member)) {
            return Ok(());
        }
        for (key, secret) in view.objects(HOME, "", "secrets") {
            let is_requested = annotation(secret, REQUEST_ANNOTATION).is_some();
            let state = annotation(secret, ROTATION_STATE_ANNOTATION);
            let has_ended = !is_requested && state.is_none_or(|state| state.contains("Steady"));
            let is_stuck = key.name == CA_SECRET && !has_ended && view.separated_member.is_none();
            ensure(!is_stuck, || format!("the CA is still {}", state.unwrap_or("requested")))?;
        }
        Ok(())
    }
}

invariant! {
    /// A process holds and renews the Lease of each member. On a paused one, it still records the desired state.
    MemberLeasesAreHeld, "member-leases-are-held",
    fn check_converged(&mut self, view: &View) -> CheckResult {
        let members = view.objects(HOME, GROUP, "edgeclusters");
        let names = members.map(|(key, _)| key.name.as_str());
        for name in names.filter(|name| view.must_be_held(name)) {
            let renewal = view.renewal(Settings::cluster_for(name), MEMBER_LEASE);
            let is_held = renewal.is_some_and(|renewal| {
                !renewal.holder.is_empty() && view.now - renewal.at <= MEMBER_RENEWAL
            });
            ensure(is_held, || format!("no process acts on {name}: {renewal:?}"))?;
        }
        Ok(())
    }
}

invariant! {
    /// Each member has applied the desired state that the hub sends.
    DesiredStateIsApplied, "desired-state-is-applied",
    fn check_converged(&mut self, view: &View) -> CheckResult {
        for (name, member) in view.converging_members() {
            let [desired, applied] = ["desired", "applied"].map(|field| state_version(member, field));
            ensure(desired == applied || view.all_hubs_lost, || {
                format!("{name} has applied {applied:?} of {desired:?}")
            })?;
        }
        Ok(())
    }
}

invariant! {
    /// No Tenant is lost, and none waits to be restored after a deletion of its CRD.
    WantedTenantsExist, "wanted-tenants-exist",
    fn check_converged(&mut self, view: &View) -> CheckResult {
        for (member, _) in view.converging_members() {
            for (key, secret) in view.objects(Settings::cluster_for(member), "", "secrets") {
                let is_record = label(secret, RECORD_LABEL).is_some();
                ensure(!is_record, || format!("the Tenant in {} on {member} is not restored", key.name))?;
            }
        }
        if view.ever_restored() {
            return Ok(());
        }
        let clusters = view.settings.clusters();
        for name in view.wanted_tenants() {
            let exists = clusters.iter().any(|cluster| view.tenant(cluster, name).is_some());
            let is_exempt = view.separated_member.is_some();
            // No process restores the Tenants of a deleted CRD once people have deleted the member, too.
            let is_saved = || {
                let is_left = |cluster: &&String| view.edge_cluster(Settings::member_for(cluster)).is_none();
                let mut left = clusters.iter().filter(is_left);
                let backup = record_name(TENANT_NAMESPACE, name);
                left.any(|cluster| view.objects(cluster, "", "secrets").any(|(key, _)| key.name == backup))
            };
            ensure(exists || is_exempt || is_saved(), || format!("Tenant {name} is lost"))?;
        }
        Ok(())
    }
}

invariant! {
    /// A Tenant that people have deleted disappears. While it is paused, its deletion waits.
    DeletedTenantsGo, "deleted-tenants-go",
    fn check_converged(&mut self, view: &View) -> CheckResult {
        for cluster in view.settings.clusters() {
            for (key, tenant) in view.objects(&cluster, GROUP, "tenants") {
                let is_stuck = is_terminating(tenant) && !view.deletion_may_wait(&cluster, tenant);
                ensure(!is_stuck, || {
                    let ready = condition_text(tenant, "Ready");
                    format!("Tenant {} stays on {cluster}: {ready}", key.name)
                })?;
            }
        }
        Ok(())
    }
}

invariant! {
    /// Each Tenant is ready at its generation.
    TenantsGetReady, "tenants-get-ready",
    fn check_converged(&mut self, view: &View) -> CheckResult {
        if view.upgrades_fail() {
            return Ok(());
        }
        for (cluster, member, tenant) in view.ready_tenants() {
            let is_lost = view.separated_member.as_deref().is_some_and(|member| {
                condition(tenant, &format!("ClusterReady/{member}")).is_some()
            });
            if is_lost || view.lacks_workload(Settings::cluster_for(&member), workspace(tenant)) {
                continue;
            }
            ensure(is_ready(tenant), || {
                let name = text(tenant, "/metadata/name");
                let ready = condition_text(tenant, "Ready");
                format!("Tenant {name} on {cluster} is not ready: {ready}")
            })?;
        }
        Ok(())
    }
}

invariant! {
    /// The newest revision of each Tenant's release is deployed.
    ReleasesAreDeployed, "releases-are-deployed",
    fn check_converged(&mut self, view: &View) -> CheckResult {
        if view.upgrades_fail() {
            return Ok(());
        }
        for (_, member, tenant) in view.ready_tenants() {
            let newest = newest_revision(view, &member, tenant);
            let status = newest.map(|newest| text(newest, "/metadata/labels/status"));
            ensure(status == Some("deployed"), || {
                let name = text(tenant, "/metadata/name");
                format!("the release of {name} on {member} is {status:?}")
            })?;
        }
        Ok(())
    }
}

/// Newest revision of a Tenant's release.
fn newest_revision<'v>(view: &'v View, member: &str, tenant: &Value) -> Option<&'v Value> {
    let release = tenant_release(text(tenant, "/metadata/name"), member);
    let mut revisions = view.revisions(Settings::cluster_for(member), workspace(tenant), &release);
    let (_, newest) = revisions.pop()?;
    Some(newest.as_ref())
}

invariant! {
    /// No release stays locked, and no Helm process runs.
    NoReleaseStaysLocked, "no-release-stays-locked",
    fn check_converged(&mut self, view: &View) -> CheckResult {
        if view.upgrades_fail() {
            return Ok(());
        }
        for (member, _) in view.converging_members() {
            // A restore can remove the Secret of a running Helm.
            let mut runs = view.helm_runs.values();
            if let Some(run) = runs.find(|run| view.member_of_run(run) == Some(member)) {
                return Err(format!("{} runs helm {} for {}", run.host, run.verb, run.release));
            }
            for (key, secret) in view.objects(Settings::cluster_for(member), "", "secrets") {
                let status = text(secret, "/metadata/labels/status");
                let is_locked = text(secret, "/type") == "helm.sh/release.v1"
                    && (status.starts_with("pending-") || status == "uninstalling");
                // A release that people have orphaned, or whose owner a restore has removed, stays as it is. So does
                // one whose uninstallation needs a decision of people or was undone. The same holds for a paused owner,
                // and on a member that the owner has left.
                let owner = label(secret, OWNER_UID_LABEL).and_then(|uid| view.owner(uid));
                let may_act = |owner| {
                    !view.is_held(owner)
                        && !view.awaits_decision(member, owner)
                        && !view.awaits_undone_uninstallation(member, owner)
                        && !content::has_left(view, owner, member)
                };
                let is_locked = is_locked && owner.is_some_and(may_act);
                ensure(!is_locked, || format!("{} on {member} is {status}", key.name))?;
            }
        }
        Ok(())
    }
}

invariant! {
    /// An idle fleet writes nothing except renewals of Leases and the time at which a member was last seen.
    IdleFleetWritesNothing, "idle-fleet-writes-nothing",
    fn check_change(&mut self, view: &View, cluster: &str, change: &Change) -> CheckResult {
        let is_exempt = view.separated_member.is_some() || view.upgrades_fail();
        let is_idle = view.phase == Phase::Quiet && view.now - view.phase_start > SETTLE_TIME;
        if !is_idle || is_exempt || !is_product(&change.by) {
            return Ok(());
        }
        let resource = change.key.resource.as_str();
        let changed = changed_fields(change);
        // A Tenant without its Deployment fails only after some time, and the hub's objects follow.
        let follows_missing_workload = change.key.group == GROUP && view.any_workload_missing();
        let is_allowed = follows_missing_workload
            || ["leases", "events"].contains(&resource)
            || is_krypton(&change.by) && changed == ["/status/lastSeen"];
        ensure(is_allowed, || {
            let (name, fields) = (&change.key.name, changed.join(", "));
            format!("{} writes {fields} of {resource} {name} on {cluster}", change.by)
        })
    }
}

/// The changed fields, except fields that each write changes.
fn changed_fields(change: &Change) -> Vec<String> {
    let fields = |object: Option<&Value>, parent: &str| {
        let fields = object.and_then(|object| object.pointer(parent)?.as_object().cloned());
        fields.unwrap_or_default()
    };
    let (before, after) = (change.before.as_deref(), change.after.as_deref());
    let mut changed = Vec::new();
    for parent in ["/metadata", "/data", "/spec", "/status"] {
        let (old, new) = (fields(before, parent), fields(after, parent));
        let keys: BTreeSet<_> = old.keys().chain(new.keys()).collect();
        let different_keys = keys
            .into_iter()
            .filter(|key| old.get(*key) != new.get(*key));
        let bookkeeping = ["resourceVersion", "managedFields"];
        let different_keys = different_keys.filter(|key| !bookkeeping.contains(&key.as_str()));
        changed.extend(different_keys.map(|key| format!("{parent}/{key}")));
    }
    changed
}

invariant! {
    /// Helm does not run in an idle fleet.
    IdleFleetRunsNoHelm, "idle-fleet-runs-no-helm",
    fn check_helm_start(&mut self, view: &View, run: &Run) -> CheckResult {
        let is_separated = view.separated_member.is_some() && run.cluster == view.separated_member;
        let is_exempt = view.upgrades_fail() || is_separated;
        ensure(view.phase != Phase::Quiet || is_exempt, || {
            format!("{} runs helm {} for {}", run.host, run.verb, run.release)
        })
    }
}

#[cfg(test)]
mod tests {
    use krypton_types::names::PAUSED_ANNOTATION;
    use serde_json::json;

    use super::super::story::{
        AGENT, History, RELEASE, condition_patch, crd, deletion_patch, deployment, edge_cluster,
        revision, tenant, tenant_crd, workload,
    };
    use super::*;
    use crate::faults::RESTORE_WRITER;

    #[test]
    fn converged_fleet_keeps_all_rules() {
        assert_eq!(History::violated_after(|_| ()), None);
        let idle = History::violated_after(|history| {
            history
                .enter_phase(Phase::Quiet)
                .wait(100_000)
                .renew_leases();
        });
        assert_eq!(idle, None);
    }

    #[test]
    fn fleet_without_a_leader_is_found() {
        let violated = History::violated_after(|history| {
            history.wait(6_000);
        });
        assert_eq!(violated.as_deref(), Some("one-hub-leads"));
    }

    #[test]
    fn disconnected_or_missing_member_is_found() {
        let silent = condition_patch("Connected", "Unknown");
        let violated = History::violated_after(|history| {
            history.patch("hub-0", "home", edge_cluster("edge-1"), &silent);
        });
        assert_eq!(violated.as_deref(), Some("members-connect"));
        let violated = History::violated_after(|history| {
            history.delete("people", "home", &edge_cluster("edge-1"));
        });
        assert_eq!(violated.as_deref(), Some("members-connect"));
        // People may delete a member with a kubeconfig.
        let violated = History::violated_after(|history| {
            history.delete("people", "home", &edge_cluster("edge-2"));
        });
        assert_eq!(violated, None);
    }

    #[test]
    fn unread_source_is_found() {
        for (reason, oracle) in [
            ("Reason", None),
            (reason::SOURCE_UNAVAILABLE, Some("sources-are-read")),
        ] {
            let violated = History::violated_after(|history| {
                let conditions = json!([
                    {"type": "Connected", "status": "True", "reason": "Connected"},
                    {"type": TARGET_RESOLVED, "status": "Unknown", "reason": reason},
                ]);
                let patch = json!({"status": {"conditions": conditions}});
                history.patch("hub-0", "home", edge_cluster("edge-1"), &patch);
            });
            assert_eq!(violated.as_deref(), oracle);
        }
    }

    #[test]
    fn member_without_a_holder_is_found() {
        for is_paused in [false, true] {
            let violated = History::violated_after(|history| {
                let paused = json!({"spec": {"paused": is_paused}});
                let released = super::super::story::lease(MEMBER_LEASE, "");
                history
                    .patch("people", "home", edge_cluster("edge-1"), &paused)
                    .put(AGENT, "edge-1", released);
            });
            assert_eq!(violated.as_deref(), Some("member-leases-are-held"));
        }
    }

    #[test]
    fn member_that_is_behind_is_found() {
        let newer = json!({"status": {"desired": {"generation": 5}}});
        let violated = History::violated_after(|history| {
            history.patch("hub-0", "home", edge_cluster("edge-1"), &newer);
        });
        assert_eq!(violated.as_deref(), Some("desired-state-is-applied"));
        let paused = json!({"spec": {"paused": true}});
        let violated = History::violated_after(|history| {
            history
                .patch("people", "home", edge_cluster("edge-1"), &paused)
                .patch("hub-0", "home", edge_cluster("edge-1"), &newer);
        });
        assert_eq!(violated, None);
    }

    #[test]
    fn hub_need_not_believe_lone_claim_after_restore() {
        let missed = Some("desired-state-is-applied");
        for (writer, claimants, phase, expected) in [
            (RESTORE_WRITER, 1, Phase::Quiet, None),
            (RESTORE_WRITER, 1, Phase::Converge, missed),
            (RESTORE_WRITER, 2, Phase::Quiet, missed),
            ("people", 1, Phase::Quiet, missed),
        ] {
            let violated = History::violated_after(|history| {
                history.put(writer, "home", crd("tenants"));
                for name in ["edge-1", "edge-2"].into_iter().take(claimants) {
                    let message = "no other member confirms it";
                    let conditions = json!([
                        {"type": "Connected", "status": "True", "reason": "Connected"},
                        {"type": "Healthy", "status": "False", "reason": "Reason", "message": message},
                    ]);
                    let status = json!({"desired": {"generation": 5}, "conditions": conditions});
                    let patch = json!({"status": status});
                    history.patch("hub-0", "home", edge_cluster(name), &patch);
                }
                history.enter_phase(phase);
            });
            assert_eq!(violated.as_deref(), expected, "{writer} {claimants}");
        }
    }

    #[test]
    fn lost_tenant_is_found() {
        let violated = History::violated_after(|history| {
            history.delete("crd-controller", "edge-1", &tenant());
        });
        assert_eq!(violated.as_deref(), Some("wanted-tenants-exist"));
        // Its backup waits on the cluster of a member that people have deleted.
        let backup = json!({
            "kind": "Secret",
            "apiVersion": "v1",
            "metadata": {"name": record_name("tenants", "t0"), "namespace": "krypton-system"},
        });
        for is_deleted in [false, true] {
            let violated = History::violated_after(|history| {
                history.put("hub-0", "edge-2", backup.clone());
                history.delete("kube-controller-manager", "edge-1", &tenant());
                if is_deleted {
                    history.delete("people", "home", &edge_cluster("edge-2"));
                }
            });
            // Without the Tenant, edge-1's own status is wrong.
            let expected = match is_deleted {
                true => "members-count-tenants",
                false => "wanted-tenants-exist",
            };
            assert_eq!(violated.as_deref(), Some(expected));
        }
        // Its backup waits although its member works.
        let mut record = backup;
        record["metadata"]["labels"] = json!({RECORD_LABEL: "true"});
        let violated = History::violated_after(|history| {
            history.put("hub-0", "edge-2", record);
        });
        assert_eq!(violated.as_deref(), Some("wanted-tenants-exist"));
        // Nothing had reached it.
        let violated = History::violated_after(|history| {
            let mut new = tenant();
            new["metadata"] = json!({"name": "t1", "namespace": "tenants", "uid": "uid-new"});
            history
                .fault("tenant edge-1/t1 create")
                .put("people", "edge-1", new.clone())
                .delete("kube-controller-manager", "edge-1", &new);
        });
        assert_eq!(violated, None);
    }

    #[test]
    fn tenant_that_does_not_go_is_found() {
        let mut paused_deletion = deletion_patch();
        paused_deletion["metadata"]["annotations"] = json!({PAUSED_ANNOTATION: "true"});
        let cases = [
            (deletion_patch(), Some("deleted-tenants-go")),
            (paused_deletion, None),
        ];
        for (patch, oracle) in cases {
            let violated = History::violated_after(|history| {
                history.patch("people", "edge-1", tenant(), &patch);
            });
            assert_eq!(violated.as_deref(), oracle);
        }
    }

    #[test]
    fn tenant_that_is_not_ready_is_found() {
        let newer = json!({"metadata": {"generation": 2}});
        let violated = History::violated_after(|history| {
            history.patch("people", "edge-1", tenant(), &newer);
        });
        assert_eq!(violated.as_deref(), Some("tenants-get-ready"));
        let paused = json!({"metadata": {
            "generation": 2,
            "annotations": {"mesh.openkcm.io/paused": "true"},
        }});
        let violated = History::violated_after(|history| {
            history.patch("people", "edge-1", tenant(), &paused);
        });
        assert_eq!(violated, None);
    }

    #[test]
    fn restore_returns_to_missing_deployment() {
        let deployment = workload();
        let newer = json!({"metadata": {"generation": 2}});
        for (was_deleted, oracle) in [(true, None), (false, Some("tenants-get-ready"))] {
            let violated = History::violated_after(|history| {
                history.put("controller", "edge-1", deployment.clone());
                if was_deleted {
                    history.delete("people", "edge-1", &deployment);
                }
                history
                    .fault("restore edge-1 after 5.000")
                    .put("controller", "edge-1", deployment.clone())
                    .delete(RESTORE_WRITER, "edge-1", &deployment)
                    .fault("end of restore edge-1 after 5.000")
                    .patch("people", "edge-1", tenant(), &newer);
            });
            assert_eq!(violated.as_deref(), oracle, "{was_deleted}");
        }
    }

    #[test]
    fn release_that_is_not_deployed_is_found() {
        let violated = History::violated_after(|history| {
            history.put_revision(RELEASE, 2, "failed");
        });
        assert_eq!(violated.as_deref(), Some("releases-are-deployed"));
    }

    #[test]
    fn recreated_tenant_may_await_dead_uninstallation() {
        let missed = Some("releases-are-deployed");
        for (owner, status, expected) in [
            ("uid-old", "uninstalling", None),
            ("uid-t0", "uninstalling", missed),
            ("uid-old", "pending-upgrade", missed),
        ] {
            let violated = History::violated_after(|history| {
                let mut locked = revision(RELEASE, 2, status);
                locked["metadata"]["labels"][OWNER_UID_LABEL] = json!(owner);
                history.put("people", "edge-1", locked);
            });
            assert_eq!(violated.as_deref(), expected, "{owner} {status}");
        }
    }

    #[test]
    fn restored_deployment_may_await_dead_uninstallation() {
        let missed = Some("deployments-get-ready");
        for (writer, status, expected) in [
            (RESTORE_WRITER, "uninstalling", None),
            ("people", "uninstalling", missed),
            (RESTORE_WRITER, "pending-upgrade", missed),
        ] {
            let violated = History::violated_after(|history| {
                let mut locked = revision("ced-d0", 1, status);
                locked["metadata"]["namespace"] = json!("d0");
                locked["metadata"]["labels"][OWNER_UID_LABEL] = json!("uid-d0");
                history
                    .put(writer, "home", deployment("edge-1"))
                    .put("people", "edge-1", locked);
            });
            assert_eq!(violated.as_deref(), expected, "{writer} {status}");
        }
    }

    #[test]
    fn restored_release_of_moved_deployment_may_stay_locked() {
        let missed = Some("no-release-stays-locked");
        for (writer, placements, expected) in [
            (RESTORE_WRITER, json!([]), None),
            (RESTORE_WRITER, json!([{"cluster": "edge-1"}]), missed),
            ("people", json!([{"cluster": "edge-1"}]), missed),
        ] {
            let violated = History::violated_after(|history| {
                let status = json!({"status": {"placements": placements}});
                history
                    .put("people", "home", deployment("edge-2"))
                    .patch("hub-0", "home", deployment("edge-2"), &status)
                    .put(writer, "edge-1", revision("ced-d0", 1, "pending-install"));
            });
            assert_eq!(violated.as_deref(), expected, "{writer} {placements}");
        }
        // A restore excuses no Tenant.
        let violated = History::violated_after(|history| {
            let other = revision("other", 1, "pending-install");
            history.put(RESTORE_WRITER, "edge-1", other);
        });
        assert_eq!(violated.as_deref(), missed);
    }

    #[test]
    fn locked_release_is_found() {
        let violated = History::violated_after(|history| {
            let other = revision("other", 1, "pending-install");
            history.put("people", "edge-1", other);
        });
        assert_eq!(violated.as_deref(), Some("no-release-stays-locked"));
    }

    #[test]
    fn release_of_a_paused_tenant_may_stay_locked() {
        for (paused, oracle) in [("true", None), ("false", Some("no-release-stays-locked"))] {
            let violated = History::violated_after(|history| {
                let pause = json!({"metadata": {"annotations": {PAUSED_ANNOTATION: paused}}});
                let other = revision("other", 1, "pending-install");
                history
                    .patch("people", "edge-1", tenant(), &pause)
                    .put("people", "edge-1", other);
            });
            assert_eq!(violated.as_deref(), oracle, "{paused}");
        }
    }

    #[test]
    fn running_helm_is_found() {
        for (ends, oracle) in [(true, None), (false, Some("no-release-stays-locked"))] {
            let violated = History::violated_after(|history| {
                history.start_helm(1, AGENT, "upgrade", RELEASE);
                if ends {
                    history.end_helm(1, AGENT, 0);
                }
            });
            assert_eq!(violated.as_deref(), oracle);
        }
    }

    #[test]
    fn locked_release_may_await_decision_on_its_deletion() {
        let waiting = json!({"status": {"conditions": [{
            "type": "Ready",
            "status": "False",
            "reason": "UninstallFailed",
            "message": "this Tenant was deleted together with an earlier CRD",
        }]}});
        for (jumps, expected) in [(true, None), (false, Some("deleted-tenants-go"))] {
            let violated = History::violated_after(|history| {
                if jumps {
                    history.fault("server-clock edge-1 by -60.000 for 9.000");
                }
                history
                    .put("people", "edge-1", revision(RELEASE, 2, "pending-upgrade"))
                    .patch("people", "edge-1", tenant(), &deletion_patch())
                    .patch(AGENT, "edge-1", tenant(), &waiting);
            });
            assert_eq!(violated.as_deref(), expected);
        }
    }

    #[test]
    fn rotation_that_does_not_end_is_found() {
        for (phase, oracle) in [("Steady", None), ("Switched", Some("ca-rotation-ends"))] {
            let violated = History::violated_after(|history| {
                let state =
                    json!({ROTATION_STATE_ANNOTATION: format!("{{\"phase\":\"{phase}\"}}")});
                let metadata = json!({"name": CA_SECRET, "namespace": "s", "annotations": state});
                let secret = json!({"apiVersion": "v1", "kind": "Secret", "metadata": metadata});
                history.put("hub-0", "home", secret);
            });
            assert_eq!(violated.as_deref(), oracle);
        }
    }

    #[test]
    fn missing_crd_is_found() {
        let violated = History::violated_after(|history| {
            history.delete("people", "home", &tenant_crd());
        });
        assert_eq!(violated.as_deref(), Some("crds-exist"));
    }

    #[test]
    fn deleted_crd_may_wait_for_deletions_by_people() {
        let cases = [
            ("people", None),
            ("kube-controller-manager", Some("crds-exist")),
        ];
        for (actor, oracle) in cases {
            let violated = History::violated_after(|history| {
                let pause = json!({"spec": {"paused": true}});
                history
                    .patch("people", "home", edge_cluster("edge-1"), &pause)
                    .put("people", "home", deployment("edge-1"))
                    .patch(actor, "home", deployment("edge-1"), &deletion_patch())
                    .patch(
                        "people",
                        "home",
                        crd("kryptondeployments"),
                        &deletion_patch(),
                    );
            });
            assert_eq!(violated.as_deref(), oracle, "{actor}");
        }
    }

    #[test]
    fn write_of_an_idle_fleet_is_found() {
        let last_seen = json!({"status": {"lastSeen": "2026-01-01T00:01:00Z"}});
        let other = json!({"status": {"lastSeen": "2026-01-01T00:02:00Z", "mode": "none"}});
        for (patch, oracle) in [
            (last_seen, None),
            (other, Some("idle-fleet-writes-nothing")),
        ] {
            History::converged()
                .enter_phase(Phase::Quiet)
                .wait(SETTLE_TIME + 1)
                .patch("hub-0", "home", edge_cluster("edge-1"), &patch)
                .assert_outcome(oracle);
        }
    }

    #[test]
    fn helm_run_of_an_idle_fleet_is_found() {
        for (phase, oracle) in [
            (Phase::Converge, None),
            (Phase::Quiet, Some("idle-fleet-runs-no-helm")),
        ] {
            History::converged()
                .enter_phase(phase)
                .start_helm(1, AGENT, "upgrade", RELEASE)
                .assert_outcome(oracle);
        }
    }
}
