//! The state that the fleet must reach after all faults have ended, and then keep.
//!
//! A member that a permanent fault separates is excused. So are paused objects, members whose EdgeCluster people have
//! deleted, and charts whose upgrade fails.

use std::collections::BTreeMap;

use krypton_types::names::{GROUP, HUB_LEASE, PAUSED_ANNOTATION, SELF_CLUSTER, tenant_release};
use serde_json::Value;

use super::leases::MEMBER_LEASE;
use super::releases::started;
use super::view::{annotation, condition, is_deleted, is_krypton, is_product, number, text};
use super::{Check, Oracle, Phase, View, ensure, stateless};
use crate::conductor::Millis;
use crate::observe::{Event, Observation};
use crate::plan::{Access, Chart, HOME, Settings};

/// A leader renews its Lease every second.
const LEADER_RENEWS: Millis = 5_000;
/// The holder of a member's Lease renews it every 15 s, and retries.
const MEMBER_RENEWS: Millis = 25_000;

pub(super) fn all() -> Vec<Box<dyn Oracle>> {
    vec![
        Box::new(OneLeader),
        Box::new(MembersConnect),
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
    /// Whether a member must converge: it is part of the fleet, and neither paused, banned nor separated.
    fn must_converge(&self, member: &str) -> bool {
        let Some(object) = self.edge_cluster(member) else {
            return false;
        };
        let set = |pointer: &str| object.pointer(pointer) == Some(&Value::Bool(true));
        self.excused.as_deref() != Some(member)
            && !is_deleted(object)
            && !set("/spec/paused")
            && !set("/spec/banned")
    }

    /// The members that must converge.
    fn converging(&self) -> impl Iterator<Item = (&str, &Value)> {
        let all = self.all(HOME, GROUP, "edgeclusters");
        all.map(|(key, object)| (key.name.as_str(), object.as_ref()))
            .filter(|(name, _)| self.must_converge(name))
    }

    /// The Tenants that must become ready, with their cluster and the member that runs the release.
    fn ready_tenants(&self) -> Vec<(String, String, &Value)> {
        let mut found = Vec::new();
        for cluster in self.settings.clusters() {
            let tenants: Vec<_> = self.all(&cluster, GROUP, "tenants").collect();
            for (_, tenant) in tenants {
                let member = match text(tenant, "/spec/clusterRef/secretName") {
                    "" => Settings::member(&cluster),
                    member => member,
                };
                let paused = annotation(tenant, PAUSED_ANNOTATION) == Some("true");
                if self.must_converge(member) && !is_deleted(tenant) && !paused {
                    found.push((cluster.clone(), member.to_owned(), tenant.as_ref()));
                }
            }
        }
        found
    }

    fn upgrades_fail(&self) -> bool {
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
        ensure(leads, || format!("no hub leads: {:?}", view.renewal(HOME, HUB_LEASE)))
    }
}

stateless! {
    /// Each member is connected.
    MembersConnect, "members-connect",
    fn quiet(&mut self, view: &View) -> Check {
        for edge in &view.settings.edges {
            let agent = edge.access == Access::Agent && view.excused.as_ref() != Some(&edge.name);
            let joined = view.edge_cluster(&edge.name).is_some() || view.ever_restored();
            ensure(!agent || joined, || format!("{} has no EdgeCluster", edge.name))?;
        }
        for (name, member) in view.converging().filter(|(name, _)| *name != SELF_CLUSTER) {
            let connected = condition(member, "Connected");
            ensure(connected.is_some_and(|(status, _)| status == "True"), || {
                format!("{name} is not connected: {connected:?}")
            })?;
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
            ensure(desired == applied, || {
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
                let member = match text(tenant, "/spec/clusterRef/secretName") {
                    "" => Settings::member(&cluster),
                    member => member,
                };
                // Without its member, a deletion waits.
                let stays = is_deleted(tenant) && view.must_converge(member);
                ensure(!stays, || format!("Tenant {} stays on {cluster}", key.name))?;
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
        for (cluster, _, tenant) in view.ready_tenants() {
            let ready = condition(tenant, "Ready");
            let current = number(tenant, "/status/observedGeneration")
                == number(tenant, "/metadata/generation");
            ensure(current && ready.is_some_and(|(status, _)| status == "True"), || {
                let name = text(tenant, "/metadata/name");
                format!("Tenant {name} on {cluster} is not ready: {ready:?}")
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
    let name = text(tenant, "/metadata/name");
    let workspace = match text(tenant, "/spec/workspace") {
        "" => name,
        workspace => workspace,
    };
    let release = tenant_release(name, member);
    let revisions = view.revisions(Settings::cluster(member), workspace, &release);
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
        if view.phase != Phase::Quiet || excused || !is_product(&change.by) {
            return Ok(());
        }
        let resource = change.key.resource.as_str();
        let legal = ["leases", "events"].contains(&resource)
            || is_krypton(&change.by) && only_last_seen(change.before.as_deref(), change.after.as_deref());
        ensure(legal, || format!("{} writes {resource} {} on {cluster}", change.by, change.key.name))
    }
}

/// Whether the versions differ only in `status.lastSeen` and in metadata that each write changes.
fn only_last_seen(before: Option<&Value>, after: Option<&Value>) -> bool {
    let bare = |object: Option<&Value>| {
        let mut object = object?.clone();
        for (parent, field) in [
            ("/status", "lastSeen"),
            ("/metadata", "resourceVersion"),
            ("/metadata", "managedFields"),
        ] {
            let parent = object.pointer_mut(parent).and_then(Value::as_object_mut);
            if let Some(parent) = parent {
                parent.remove(field);
            }
        }
        Some(object)
    };
    let seen = |object: Option<&Value>| object?.pointer("/status/lastSeen").cloned();
    seen(before) != seen(after) && bare(before) == bare(after) && before.is_some()
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

/// The state that people see: specs and readiness of Tenants, and the newest status of releases. A run with faults
/// and one without must end in the same state.
pub fn end_state(view: &View) -> BTreeMap<String, String> {
    let mut state = BTreeMap::new();
    for cluster in view.settings.clusters() {
        for (key, tenant) in view.all(&cluster, GROUP, "tenants") {
            let spec = tenant.get("spec").map(Value::to_string).unwrap_or_default();
            let ready = condition(tenant, "Ready").map_or("", |(status, _)| status);
            let name = format!("{cluster} tenant {}/{}", key.namespace, key.name);
            state.insert(name, format!("{spec} ready={ready}"));
        }
        let mut newest: BTreeMap<String, (u32, String)> = BTreeMap::new();
        for (key, secret) in view.all(&cluster, "", "secrets") {
            let Some(version) = super::view::version(secret) else {
                continue;
            };
            let release = text(secret, "/metadata/labels/name");
            let name = format!("{cluster} release {}/{release}", key.namespace);
            let fingerprint = super::view::label(secret, "mesh.openkcm.io/fingerprint");
            let status = text(secret, "/metadata/labels/status");
            let shown = format!("{status} {}", fingerprint.unwrap_or_default());
            let entry = newest.entry(name).or_default();
            if version >= entry.0 {
                *entry = (version, shown);
            }
        }
        state.extend(newest.into_iter().map(|(name, (_, shown))| (name, shown)));
    }
    state
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::story::{Story, deletion, edge_cluster, revision, tenant};
    use super::*;

    const AGENT: &str = "agent-edge-1";
    const RELEASE: &str = "tenant-t0-edge-1";

    /// A fleet that has converged, before its idle time.
    fn converged() -> Story {
        let mut story = Story::new();
        let version = json!({"status": {
            "desired": {"epoch": 1, "generation": 4},
            "applied": {"epoch": 1, "generation": 4},
        }});
        let ready = json!({"status": {
            "observedGeneration": 1,
            "conditions": [{"type": "Ready", "status": "True", "reason": "Ready"}],
        }});
        story
            .put("people", "edge-1", tenant())
            .renew()
            .put("hub-0", "home", edge_cluster("edge-1"))
            .put("hub-0", "home", edge_cluster("edge-2"))
            .patch("hub-0", "home", edge_cluster("edge-1"), &version)
            .put(
                "helm:agent-edge-1",
                "edge-1",
                revision(RELEASE, 1, "deployed"),
            )
            .patch(AGENT, "edge-1", tenant(), &ready);
        story
    }

    /// Checks a change of the converged fleet at the end of the idle time.
    fn after(change: impl FnOnce(&mut Story)) -> Option<String> {
        let mut story = converged();
        change(&mut story);
        story.quiet();
        story.violated().map(str::to_owned)
    }

    #[test]
    fn converged_fleet_keeps_all_rules() {
        assert_eq!(after(|_| ()), None);
        let idle = after(|story| {
            story.enter(Phase::Quiet).wait(100_000).renew();
        });
        assert_eq!(idle, None);
    }

    #[test]
    fn fleet_without_a_leader_is_found() {
        let found = after(|story| {
            story.wait(6_000);
        });
        assert_eq!(found.as_deref(), Some("one-hub-leads"));
    }

    #[test]
    fn disconnected_or_missing_member_is_found() {
        let conditions = json!({"status": {"conditions": [
            {"type": "Connected", "status": "Unknown", "reason": "Silent"},
        ]}});
        let found = after(|story| {
            story.patch("hub-0", "home", edge_cluster("edge-1"), &conditions);
        });
        assert_eq!(found.as_deref(), Some("members-connect"));
        let found = after(|story| {
            story.delete("people", "home", &edge_cluster("edge-1"));
        });
        assert_eq!(found.as_deref(), Some("members-connect"));
        // People may delete a member with a kubeconfig.
        let found = after(|story| {
            story.delete("people", "home", &edge_cluster("edge-2"));
        });
        assert_eq!(found, None);
    }

    #[test]
    fn member_without_a_holder_is_found() {
        let found = after(|story| {
            let released = super::super::story::lease(MEMBER_LEASE, "");
            story.put(AGENT, "edge-1", released);
        });
        assert_eq!(found.as_deref(), Some("member-leases-are-held"));
    }

    #[test]
    fn member_that_is_behind_is_found() {
        let newer = json!({"status": {"desired": {"generation": 5}}});
        let found = after(|story| {
            story.patch("hub-0", "home", edge_cluster("edge-1"), &newer);
        });
        assert_eq!(found.as_deref(), Some("desired-state-is-applied"));
        let paused = json!({"spec": {"paused": true}});
        let found = after(|story| {
            story
                .patch("people", "home", edge_cluster("edge-1"), &paused)
                .patch("hub-0", "home", edge_cluster("edge-1"), &newer);
        });
        assert_eq!(found, None);
    }

    #[test]
    fn lost_tenant_is_found() {
        let found = after(|story| {
            story.delete("crd-controller", "edge-1", &tenant());
        });
        assert_eq!(found.as_deref(), Some("wanted-tenants-exist"));
    }

    #[test]
    fn tenant_that_does_not_go_is_found() {
        let found = after(|story| {
            story.patch("people", "edge-1", tenant(), &deletion());
        });
        assert_eq!(found.as_deref(), Some("deleted-tenants-go"));
    }

    #[test]
    fn tenant_that_is_not_ready_is_found() {
        let newer = json!({"metadata": {"generation": 2}});
        let found = after(|story| {
            story.patch("people", "edge-1", tenant(), &newer);
        });
        assert_eq!(found.as_deref(), Some("tenants-get-ready"));
        let paused = json!({"metadata": {
            "generation": 2,
            "annotations": {"mesh.openkcm.io/paused": "true"},
        }});
        let found = after(|story| {
            story.patch("people", "edge-1", tenant(), &paused);
        });
        assert_eq!(found, None);
    }

    #[test]
    fn release_that_is_not_deployed_is_found() {
        let found = after(|story| {
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
        let found = after(|story| {
            let other = revision("other", 1, "pending-install");
            story.put("people", "edge-1", other);
        });
        assert_eq!(found.as_deref(), Some("no-release-stays-locked"));
    }

    #[test]
    fn write_of_an_idle_fleet_is_found() {
        let seen = json!({"status": {"lastSeen": "2026-01-01T00:01:00Z"}});
        let other = json!({"status": {"lastSeen": "2026-01-01T00:02:00Z", "mode": "none"}});
        for (patch, oracle) in [(seen, None), (other, Some("idle-fleet-writes-nothing"))] {
            let mut story = converged();
            story
                .enter(Phase::Quiet)
                .patch("hub-0", "home", edge_cluster("edge-1"), &patch);
            assert_eq!(story.violated(), oracle);
        }
    }

    #[test]
    fn helm_run_of_an_idle_fleet_is_found() {
        for (phase, oracle) in [
            (Phase::Converge, None),
            (Phase::Quiet, Some("idle-fleet-runs-no-helm")),
        ] {
            let mut story = converged();
            story.enter(phase).helm(1, AGENT, "upgrade", RELEASE);
            assert_eq!(story.violated(), oracle);
        }
    }

    #[test]
    fn end_state_ignores_numbers_of_revisions() {
        let (one, mut two) = (converged(), converged());
        two.put(
            "helm:agent-edge-1",
            "edge-1",
            revision(RELEASE, 1, "superseded"),
        )
        .put(
            "helm:agent-edge-1",
            "edge-1",
            revision(RELEASE, 2, "deployed"),
        );
        assert_eq!(end_state(one.view()), end_state(two.view()));
        two.put(
            "helm:agent-edge-1",
            "edge-1",
            revision(RELEASE, 2, "failed"),
        );
        assert_ne!(end_state(one.view()), end_state(two.view()));
    }
}
