//! The state that the fleet must reach after all faults have ended, and then keep.
//!
//! A member that a permanent fault separates is excused. So are paused objects, members whose EdgeCluster people have
//! deleted, and charts whose upgrade fails.

use std::collections::BTreeSet;

use krypton_crds::tenant::Tenant;
use krypton_helm::releases::labels::OWNER_UID_LABEL;
use krypton_sim_apiserver::server::Change;
use krypton_types::ca_rotation::{REQUEST_ANNOTATION, ROTATION_STATE_ANNOTATION};
use krypton_types::names::{
    CA_SECRET, GROUP, HUB_LEASE, PAUSED_ANNOTATION, SELF_CLUSTER, tenant_release,
};
use kube::CustomResourceExt as _;
use serde_json::Value;

use super::leases::MEMBER_LEASE;
use super::releases::started;
use super::view::{
    annotation, condition, condition_text, is_deleted, is_krypton, is_product, is_ready, label,
    member_of, number, text, workspace,
};
use super::{Check, Oracle, Phase, View, ensure, stateless};
use crate::conductor::Millis;
use crate::observe::{Event, Observation};
use crate::plan::{Chart, HOME, Settings};

/// A leader renews its Lease every second.
const LEADER_RENEWS: Millis = 5_000;
/// The holder of a member's Lease renews it every 15 s, and retries.
const MEMBER_RENEWS: Millis = 25_000;
/// The hub may write the status of an EdgeCluster this long after the change.
const SETTLES: Millis = 5_000;

pub(super) fn all() -> Vec<Box<dyn Oracle>> {
    vec![
        Box::new(OneLeader),
        Box::new(MembersConnect),
        Box::new(CrdsExist),
        Box::new(CaRotationEnds),
        Box::new(LeasesAreHeld),
        Box::new(DesiredIsApplied),
        Box::new(WantedExist),
        Box::new(UnwantedGo),
        Box::new(TenantsGetReady),
        Box::new(ReadyHaveRelease),
        Box::new(NoLock),
        Box::new(IdleWritesNothing),
        Box::new(IdleRunsNoHelm),
    ]
}

impl View {
    /// Whether a member must converge: it is part of the fleet, and neither paused, banned nor separated. Without a hub,
    /// only agents work.
    pub(super) fn must_converge(&self, member: &str) -> bool {
        let Some(object) = self.edge_cluster(member) else {
            return false;
        };
        let set = |pointer: &str| object.pointer(pointer) == Some(&Value::Bool(true));
        let mut edges = self.settings.edges.iter();
        let agent = edges.any(|edge| edge.name == member && edge.agent().is_some());
        self.excused.as_deref() != Some(member)
            && (agent || !self.without_hub)
            && !is_deleted(object)
            && !set("/spec/paused")
            && !set("/spec/banned")
    }

    /// The members that must converge.
    pub(super) fn converging(&self) -> impl Iterator<Item = (&str, &Value)> {
        let all = self.all(HOME, GROUP, "edgeclusters");
        all.map(|(key, object)| (key.name.as_str(), object.as_ref()))
            .filter(|(name, _)| self.must_converge(name))
    }

    /// The Tenants that must become ready, with their cluster and the member that runs the release.
    pub(super) fn ready_tenants(&self) -> Vec<(String, String, &Value)> {
        let mut found = Vec::new();
        let clusters = self.settings.clusters().into_iter();
        for cluster in clusters.filter(|cluster| cluster != HOME || !self.without_hub) {
            let tenants: Vec<_> = self.all(&cluster, GROUP, "tenants").collect();
            for (_, tenant) in tenants {
                let member = member_of(tenant, &cluster);
                let paused = annotation(tenant, PAUSED_ANNOTATION) == Some("true");
                // A member leaves a Tenant alone that names another one.
                let held = match cluster == HOME {
                    true => !self.allows(member),
                    false => Settings::cluster(member) != cluster,
                };
                if self.must_converge(member) && !is_deleted(tenant) && !paused && !held {
                    found.push((cluster.clone(), member.to_owned(), tenant.as_ref()));
                }
            }
        }
        found
    }

    pub(super) fn upgrades_fail(&self) -> bool {
        self.settings.chart == Chart::FailingUpgrade
    }
}

stateless! {
    /// One hub leads and renews its Lease.
    OneLeader, "one-hub-leads",
    fn quiet(&mut self, view: &View) -> Check {
        let leads = view.renewal(HOME, HUB_LEASE).is_some_and(|renewal| {
            !renewal.holder.is_empty() && view.now - renewal.at <= LEADER_RENEWS
        });
        ensure(leads || view.without_hub, || format!("no hub leads: {:?}", view.renewal(HOME, HUB_LEASE)))
    }
}

stateless! {
    /// Each member is connected.
    MembersConnect, "members-connect",
    fn quiet(&mut self, view: &View) -> Check {
        for edge in &view.settings.edges {
            let agent = edge.agent().is_some() && view.excused.as_ref() != Some(&edge.name);
            let joined = view.edge_cluster(&edge.name).is_some() || view.ever_restored();
            ensure(!agent || joined, || format!("{} has no EdgeCluster", edge.name))?;
        }
        for (name, member) in view.converging().filter(|(name, _)| *name != SELF_CLUSTER) {
            let connected = condition(member, "Connected");
            let connected = connected.is_some_and(|(status, _)| status == "True");
            ensure(connected || view.without_hub, || {
                format!("{name} is not connected: {}", condition_text(member, "Connected"))
            })?;
        }
        Ok(())
    }
}

stateless! {
    /// The home cluster and each member have the CRD of Tenants.
    CrdsExist, "crds-exist",
    fn quiet(&mut self, view: &View) -> Check {
        let members = view.converging().map(|(name, _)| Settings::cluster(name));
        for cluster in members.chain([HOME]) {
            let mut crds = view.all(cluster, "apiextensions.k8s.io", "customresourcedefinitions");
            let exists = crds.any(|(key, _)| key.name == Tenant::crd_name());
            ensure(exists, || format!("{cluster} has no CRD of Tenants"))?;
        }
        Ok(())
    }
}

stateless! {
    /// A rotation of the CA ends once all agents follow it. It waits for certificates that were never used.
    CaRotationEnds, "ca-rotation-ends",
    fn quiet(&mut self, view: &View) -> Check {
        let mut members = view.all(HOME, GROUP, "edgeclusters");
        // Such a certificate may still be used while the fleet converges.
        let last = view.phase == Phase::Quiet;
        if last && members.any(|(_, member)| member.pointer("/status/pendingCertificateExpiry").is_some()) {
            return Ok(());
        }
        for (key, secret) in view.all(HOME, "", "secrets") {
            let asked = annotation(secret, REQUEST_ANNOTATION).is_some();
            let state = annotation(secret, ROTATION_STATE_ANNOTATION);
            let ended = !asked && state.is_none_or(|state| state.contains("Steady"));
            let waits = key.name == CA_SECRET && !ended && view.excused.is_none();
            ensure(!waits, || format!("the CA is still {}", state.unwrap_or("requested")))?;
        }
        Ok(())
    }
}

stateless! {
    /// A process holds and renews the Lease of each member.
    LeasesAreHeld, "member-leases-are-held",
    fn quiet(&mut self, view: &View) -> Check {
        for (name, _) in view.converging() {
            let renewal = view.renewal(Settings::cluster(name), MEMBER_LEASE);
            let held = renewal.is_some_and(|renewal| {
                !renewal.holder.is_empty() && view.now - renewal.at <= MEMBER_RENEWS
            });
            ensure(held, || format!("no process acts on {name}: {renewal:?}"))?;
        }
        Ok(())
    }
}

stateless! {
    /// Each member has applied the desired state that the hub sends.
    DesiredIsApplied, "desired-state-is-applied",
    fn quiet(&mut self, view: &View) -> Check {
        for (name, member) in view.converging() {
            let version = |field: &str| {
                let number = |part: &str| number(member, &format!("/status/{field}/{part}"));
                (number("epoch"), number("generation"))
            };
            let (desired, applied) = (version("desired"), version("applied"));
            ensure(desired == applied || view.without_hub, || {
                format!("{name} has applied {applied:?} of {desired:?}")
            })?;
        }
        Ok(())
    }
}

stateless! {
    /// No Tenant is lost.
    WantedExist, "wanted-tenants-exist",
    fn quiet(&mut self, view: &View) -> Check {
        if view.ever_restored() {
            return Ok(());
        }
        let clusters = view.settings.clusters();
        for name in view.wanted_tenants() {
            let exists = clusters.iter().any(|cluster| view.tenant(cluster, name).is_some());
            let excused = view.excused.is_some();
            ensure(exists || excused, || format!("Tenant {name} is lost"))?;
        }
        Ok(())
    }
}

stateless! {
    /// A Tenant that people have deleted goes.
    UnwantedGo, "deleted-tenants-go",
    fn quiet(&mut self, view: &View) -> Check {
        for cluster in view.settings.clusters() {
            for (key, tenant) in view.all(&cluster, GROUP, "tenants") {
                let member = member_of(tenant, &cluster);
                // Without its member, a deletion waits. With a deletion time before the creation of the CRD, it
                // needs a decision of people.
                let doubtful = view.was_set_back(&cluster)
                    && condition_text(tenant, "Ready").contains("together with an earlier CRD");
                let doubtful = doubtful || view.without_hub && cluster == HOME;
                let stays = is_deleted(tenant) && view.must_converge(member) && !doubtful;
                ensure(!stays, || {
                    let ready = condition_text(tenant, "Ready");
                    format!("Tenant {} stays on {cluster}: {ready}", key.name)
                })?;
            }
        }
        Ok(())
    }
}

stateless! {
    /// Each Tenant is ready at its generation.
    TenantsGetReady, "tenants-get-ready",
    fn quiet(&mut self, view: &View) -> Check {
        if view.upgrades_fail() {
            return Ok(());
        }
        for (cluster, member, tenant) in view.ready_tenants() {
            let lost = view.excused.as_deref().is_some_and(|lost| {
                condition(tenant, &format!("ClusterReady/{lost}")).is_some()
            });
            if lost || view.is_damaged(Settings::cluster(&member), workspace(tenant)) {
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

stateless! {
    /// The newest revision of each Tenant's release is deployed.
    ReadyHaveRelease, "releases-are-deployed",
    fn quiet(&mut self, view: &View) -> Check {
        if view.upgrades_fail() {
            return Ok(());
        }
        for (_, member, tenant) in view.ready_tenants() {
            let status = newest_status(view, &member, tenant);
            ensure(status.as_deref() == Some("deployed"), || {
                let name = text(tenant, "/metadata/name");
                format!("the release of {name} on {member} is {status:?}")
            })?;
        }
        Ok(())
    }
}

/// Status of the newest revision of a Tenant's release.
fn newest_status(view: &View, member: &str, tenant: &Value) -> Option<String> {
    let release = tenant_release(text(tenant, "/metadata/name"), member);
    let revisions = view.revisions(Settings::cluster(member), workspace(tenant), &release);
    let (_, newest) = revisions.last()?;
    Some(text(newest, "/metadata/labels/status").to_owned())
}

stateless! {
    /// No release stays locked, and no Helm process runs.
    NoLock, "no-release-stays-locked",
    fn quiet(&mut self, view: &View) -> Check {
        if view.upgrades_fail() {
            return Ok(());
        }
        for (member, _) in view.converging() {
            for (key, secret) in view.all(Settings::cluster(member), "", "secrets") {
                let status = text(secret, "/metadata/labels/status");
                let locked = text(secret, "/type") == "helm.sh/release.v1"
                    && (status.starts_with("pending-") || status == "uninstalling");
                // A release that people have orphaned, or whose owner a restore has removed, stays as it is.
                let owned = label(secret, OWNER_UID_LABEL).is_some_and(|uid| view.has_owner(uid));
                let locked = locked && owned;
                ensure(!locked, || format!("{} on {member} is {status}", key.name))?;
            }
        }
        Ok(())
    }
}

stateless! {
    /// An idle fleet writes nothing except renewals of Leases and the time at which a member was last seen.
    IdleWritesNothing, "idle-fleet-writes-nothing",
    fn see(&mut self, view: &View, seen: &Observation) -> Check {
        let Event::Change { cluster, change } = &seen.event else {
            return Ok(());
        };
        let excused = view.excused.is_some() || view.upgrades_fail();
        let idle = view.phase == Phase::Quiet && view.now - view.since > SETTLES;
        if !idle || excused || !is_product(&change.by) {
            return Ok(());
        }
        let resource = change.key.resource.as_str();
        let changed = changed_fields(change);
        // A Tenant without its Deployment fails only after some time, and the hub's objects follow.
        let follows = change.key.group == GROUP && view.any_damaged();
        let legal = follows
            || ["leases", "events"].contains(&resource)
            || is_krypton(&change.by) && changed == ["/status/lastSeen"];
        ensure(legal, || {
            let (name, fields) = (&change.key.name, changed.join(", "));
            format!("{} writes {fields} of {resource} {name} on {cluster}", change.by)
        })
    }
}

/// The changed fields, without those that each write changes.
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
        let differs = keys
            .into_iter()
            .filter(|key| old.get(*key) != new.get(*key));
        let bookkeeping = ["resourceVersion", "managedFields"];
        let differs = differs.filter(|key| !bookkeeping.contains(&key.as_str()));
        changed.extend(differs.map(|key| format!("{parent}/{key}")));
    }
    changed
}

stateless! {
    /// Helm does not run in an idle fleet.
    IdleRunsNoHelm, "idle-fleet-runs-no-helm",
    fn see(&mut self, view: &View, seen: &Observation) -> Check {
        let Some(run) = started(view, seen) else {
            return Ok(());
        };
        let separated = view.excused.is_some() && run.cluster == view.excused;
        let excused = view.upgrades_fail() || separated;
        ensure(view.phase != Phase::Quiet || excused, || {
            format!("{} runs helm {} for {}", run.host, run.verb, run.release)
        })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::story::{Story, crd, deletion, edge_cluster, revision, tenant};
    use super::*;

    const AGENT: &str = "agent-edge-1";
    const RELEASE: &str = "tenant-t0-edge-1";

    #[test]
    fn converged_fleet_keeps_all_rules() {
        assert_eq!(Story::after(|_| ()), None);
        let idle = Story::after(|story| {
            story.enter(Phase::Quiet).wait(100_000).renew();
        });
        assert_eq!(idle, None);
    }

    #[test]
    fn fleet_without_a_leader_is_found() {
        let found = Story::after(|story| {
            story.wait(6_000);
        });
        assert_eq!(found.as_deref(), Some("one-hub-leads"));
    }

    #[test]
    fn disconnected_or_missing_member_is_found() {
        let conditions = json!({"status": {"conditions": [
            {"type": "Connected", "status": "Unknown", "reason": "Silent"},
        ]}});
        let found = Story::after(|story| {
            story.patch("hub-0", "home", edge_cluster("edge-1"), &conditions);
        });
        assert_eq!(found.as_deref(), Some("members-connect"));
        let found = Story::after(|story| {
            story.delete("people", "home", &edge_cluster("edge-1"));
        });
        assert_eq!(found.as_deref(), Some("members-connect"));
        // People may delete a member with a kubeconfig.
        let found = Story::after(|story| {
            story.delete("people", "home", &edge_cluster("edge-2"));
        });
        assert_eq!(found, None);
    }

    #[test]
    fn member_without_a_holder_is_found() {
        let found = Story::after(|story| {
            let released = super::super::story::lease(MEMBER_LEASE, "");
            story.put(AGENT, "edge-1", released);
        });
        assert_eq!(found.as_deref(), Some("member-leases-are-held"));
    }

    #[test]
    fn member_that_is_behind_is_found() {
        let newer = json!({"status": {"desired": {"generation": 5}}});
        let found = Story::after(|story| {
            story.patch("hub-0", "home", edge_cluster("edge-1"), &newer);
        });
        assert_eq!(found.as_deref(), Some("desired-state-is-applied"));
        let paused = json!({"spec": {"paused": true}});
        let found = Story::after(|story| {
            story
                .patch("people", "home", edge_cluster("edge-1"), &paused)
                .patch("hub-0", "home", edge_cluster("edge-1"), &newer);
        });
        assert_eq!(found, None);
    }

    #[test]
    fn lost_tenant_is_found() {
        let found = Story::after(|story| {
            story.delete("crd-controller", "edge-1", &tenant());
        });
        assert_eq!(found.as_deref(), Some("wanted-tenants-exist"));
        // Nothing had reached it.
        let found = Story::after(|story| {
            let mut new = tenant();
            new["metadata"] = json!({"name": "t1", "namespace": "tenants", "uid": "uid-new"});
            story
                .fault("tenant edge-1/t1 create")
                .put("people", "edge-1", new.clone())
                .delete("kube-controller-manager", "edge-1", &new);
        });
        assert_eq!(found, None);
    }

    #[test]
    fn tenant_that_does_not_go_is_found() {
        let found = Story::after(|story| {
            story.patch("people", "edge-1", tenant(), &deletion());
        });
        assert_eq!(found.as_deref(), Some("deleted-tenants-go"));
    }

    #[test]
    fn tenant_that_is_not_ready_is_found() {
        let newer = json!({"metadata": {"generation": 2}});
        let found = Story::after(|story| {
            story.patch("people", "edge-1", tenant(), &newer);
        });
        assert_eq!(found.as_deref(), Some("tenants-get-ready"));
        let paused = json!({"metadata": {
            "generation": 2,
            "annotations": {"mesh.openkcm.io/paused": "true"},
        }});
        let found = Story::after(|story| {
            story.patch("people", "edge-1", tenant(), &paused);
        });
        assert_eq!(found, None);
    }

    #[test]
    fn release_that_is_not_deployed_is_found() {
        let found = Story::after(|story| {
            story.put(
                "helm:agent-edge-1",
                "edge-1",
                revision(RELEASE, 2, "failed"),
            );
        });
        assert_eq!(found.as_deref(), Some("releases-are-deployed"));
    }

    #[test]
    fn locked_release_is_found() {
        let found = Story::after(|story| {
            let other = revision("other", 1, "pending-install");
            story.put("people", "edge-1", other);
        });
        assert_eq!(found.as_deref(), Some("no-release-stays-locked"));
    }

    #[test]
    fn rotation_that_does_not_end_is_found() {
        for (phase, oracle) in [("Steady", None), ("Switched", Some("ca-rotation-ends"))] {
            let found = Story::after(|story| {
                let state =
                    json!({ROTATION_STATE_ANNOTATION: format!("{{\"phase\":\"{phase}\"}}")});
                let metadata = json!({"name": CA_SECRET, "namespace": "s", "annotations": state});
                let secret = json!({"apiVersion": "v1", "kind": "Secret", "metadata": metadata});
                story.put("hub-0", "home", secret);
            });
            assert_eq!(found.as_deref(), oracle);
        }
    }

    #[test]
    fn missing_crd_is_found() {
        let found = Story::after(|story| {
            story.delete("people", "home", &crd());
        });
        assert_eq!(found.as_deref(), Some("crds-exist"));
    }

    #[test]
    fn write_of_an_idle_fleet_is_found() {
        let seen = json!({"status": {"lastSeen": "2026-01-01T00:01:00Z"}});
        let other = json!({"status": {"lastSeen": "2026-01-01T00:02:00Z", "mode": "none"}});
        for (patch, oracle) in [(seen, None), (other, Some("idle-fleet-writes-nothing"))] {
            let mut story = Story::converged();
            story.enter(Phase::Quiet).wait(SETTLES + 1).patch(
                "hub-0",
                "home",
                edge_cluster("edge-1"),
                &patch,
            );
            assert_eq!(story.violated(), oracle);
        }
    }

    #[test]
    fn helm_run_of_an_idle_fleet_is_found() {
        for (phase, oracle) in [
            (Phase::Converge, None),
            (Phase::Quiet, Some("idle-fleet-runs-no-helm")),
        ] {
            let mut story = Story::converged();
            story.enter(phase).helm(1, AGENT, "upgrade", RELEASE);
            assert_eq!(story.violated(), oracle);
        }
    }
}
