//! Invariants of members, placed Tenants and KryptonDeployments.

use krypton_sim_apiserver::server::Key;
use krypton_types::conditions::reason;
use krypton_types::names::{
    GROUP, HOME_UID_ANNOTATION, ORPHAN_ANNOTATION, PLACED_FINALIZER, PLACED_ON_ANNOTATION,
};
use serde_json::Value;

use super::view::{
    RECOVERY, ReleaseOwner, finalizer_removal, is_placed_copy, is_product, krypton_key,
    starts_deletion,
};
use super::{Change, CheckResult, Oracle, Run, Update, View, ensure, invariant};
use crate::faults::RESTORE_WRITER;
use crate::object::{annotation, condition, text};
use crate::observe::Observation;
use crate::plan::{Action, FOREVER, HOME, Settings, TENANT_NAMESPACE, TWIN_SUFFIX};
use crate::time::Millis;

/// The reasons with which the status shows that a member has departed, or does not count.
const DEPARTURES: [&str; 3] = [
    reason::MEMBER_LEFT,
    reason::TENANT_GONE,
    reason::NAMESPACE_NOT_ALLOWED,
];

fn non_empty_text(object: &Value, pointer: &str) -> Option<String> {
    let text = text(object, pointer);
    (!text.is_empty()).then(|| text.to_owned())
}

invariant! {
    /// At most one member acts on one cluster.
    OneMemberPerCluster, "one-member-per-cluster",
    fn check_converged(&mut self, view: &View) -> CheckResult {
        let mut acting_clusters: Vec<String> = Vec::new();
        for (key, member) in view.objects(HOME, GROUP, "edgeclusters") {
            let is_acting = matches!(text(member, "/status/mode"), "agent" | "proxy");
            let Some(uid) = non_empty_text(member, "/status/clusterUID").filter(|_| is_acting) else {
                continue;
            };
            if acting_clusters.contains(&uid) {
                return Err(format!("{} acts on cluster {uid}, too", key.name));
            }
            acting_clusters.push(uid);
        }
        Ok(())
    }
}

invariant! {
    /// A second member of a cluster neither acts nor runs Helm.
    TwinRests, "twin-rests",
    fn check_change(&mut self, _: &View, _: &str, change: &Change) -> CheckResult {
        let (key, after) = (&change.key, change.after.as_deref());
        let is_twin = key.resource == "edgeclusters" && key.name.ends_with(TWIN_SUFFIX);
        let is_acting = after.is_some_and(|after| matches!(text(after, "/status/mode"), "agent" | "proxy"));
        ensure(!is_twin || !is_acting, || format!("{} acts", key.name))
    }

    fn check_helm_start(&mut self, _: &View, run: &Run) -> CheckResult {
        ensure(!run.release.ends_with(TWIN_SUFFIX), || format!("{} acts", run.release))
    }
}

invariant! {
    /// The hub never changes the cluster UID of an EdgeCluster.
    ClusterUidStays, "cluster-uid-stays",
    fn check_update(&mut self, _: &View, update: Update<'_>) -> CheckResult {
        ensure_not_replaced(update, "edgeclusters", "/status/clusterUID")
    }
}

invariant! {
    /// The hub never changes the cluster on which it has placed a Tenant.
    PlacementStays, "placement-stays",
    fn check_update(&mut self, view: &View, update: Update<'_>) -> CheckResult {
        match view.recently_restored(HOME) {
            true => Ok(()),
            false => ensure_not_replaced(update, "tenants", "/status/placement/clusterUid"),
        }
    }
}

/// Fails if a change replaces the text at the pointer.
fn ensure_not_replaced(
    (_, change, before, after): Update<'_>,
    resource: &str,
    pointer: &str,
) -> CheckResult {
    if change.key.resource != resource || change.by == RESTORE_WRITER {
        return Ok(());
    }
    let (before, after) = (
        non_empty_text(before, pointer),
        non_empty_text(after, pointer),
    );
    let is_replaced = before.is_some() && after.is_some() && before != after;
    ensure(!is_replaced, || {
        format!(
            "{pointer} of {} goes from {before:?} to {after:?}",
            change.key.name
        )
    })
}

invariant! {
    /// Krypton deletes a placed Tenant only if people have deleted the Tenant on the home cluster or its member.
    PlacedTenantGoesByOrder, "placed-tenant-goes-by-order",
    fn check_product_change(&mut self, view: &View, cluster: &str, change: &Change) -> CheckResult {
        let Some(before) = change.before.as_deref().filter(|_| starts_deletion(change)) else {
            return Ok(());
        };
        if change.key.resource != "tenants" || !is_placed_copy(before) || view.is_decommissioning(cluster) {
            return Ok(());
        }
        // The order can concern a previous Tenant of this name.
        let uid = annotation(before, HOME_UID_ANNOTATION);
        let is_current = view
            .tenant(HOME, &change.key.name)
            .is_some_and(|tenant| Some(text(tenant, "/metadata/uid")) == uid);
        ensure(!is_current || !view.wants_tenant(HOME, &change.key.name), || {
            format!("{} deletes the placed {} on {cluster}", change.by, change.key.name)
        })
    }
}

/// Whether home's clock went back, and the Tenant was deleted before its CRD was created. A Tenant of an earlier CRD
/// has such times, too, and people did not delete it. Krypton keeps the copy.
fn is_deleted_before_crd(view: &View, tenant: &Value) -> bool {
    let crd = view.get(HOME, &Key::of_crd(&format!("tenants.{GROUP}")));
    let created = crd.map_or("", |crd| text(crd, "/metadata/creationTimestamp"));
    let deleted = text(tenant, "/metadata/deletionTimestamp");
    view.had_wrong_clock(HOME) && !deleted.is_empty() && deleted <= created
}

invariant! {
    /// The hub releases a deleted Tenant on the home cluster only after its copy on the member is gone.
    HomeWaitsForPlacedTenant, "home-waits-for-placed-tenant",
    fn check_observation(&mut self, view: &View, observation: &Observation) -> CheckResult {
        let Some((cluster, change, before)) = finalizer_removal(observation, PLACED_FINALIZER) else {
            return Ok(());
        };
        if cluster != HOME
            || change.key.resource != "tenants"
            || annotation(before, ORPHAN_ANNOTATION) == Some("true")
            || !view.has_tenant_crd(HOME)
            || view.ever_restored()
            || is_deleted_before_crd(view, before)
        {
            return Ok(());
        }
        let Some(member) = annotation(before, PLACED_ON_ANNOTATION) else {
            return Ok(());
        };
        let recorded = text(before, "/status/placement/clusterUid");
        let actual = view.edge_cluster(member).map_or("", |member| text(member, "/status/clusterUID"));
        ensure(recorded.is_empty() || actual.is_empty() || recorded == actual, || {
            format!("home releases {} without the cluster {recorded}", change.key.name)
        })?;
        let uid = text(before, "/metadata/uid");
        let target = Settings::cluster_for(member);
        let copy = view.tenant(target, &change.key.name).filter(|copy| {
            annotation(copy, HOME_UID_ANNOTATION) == Some(uid)
        });
        // Krypton keeps the Tenants of a member that left, or whose CRD is gone.
        let may_stay = view.edge_cluster(member).is_none() || !view.has_tenant_crd(target);
        ensure(copy.is_none() || may_stay, || {
            format!("home releases {} while {member} has it", change.key.name)
        })
    }
}

invariant! {
    /// A member leaves the status of a Tenant on the home cluster only after the status has shown its departure.
    MemberStaysInStatus {
        /// End of the last fault of the home cluster or a hub.
        home_disturbed_until: Option<Millis>,
    },
    "member-stays-in-status",
    fn check_observation(&mut self, _: &View, observation: &Observation) -> CheckResult {
        if let Some((action, has_ended)) = observation.event.action()
            && disturbs_home(&action)
        {
            let length = action.length().filter(|length| *length != FOREVER && !has_ended);
            let until = observation.at + length.unwrap_or_default();
            self.home_disturbed_until = self.home_disturbed_until.max(Some(until));
        }
        Ok(())
    }

    fn check_update(&mut self, view: &View, (cluster, change, before, after): Update<'_>) -> CheckResult {
        if cluster != HOME
            || change.key.resource != "tenants"
            || !is_product(&change.by)
            || view.recently_restored(HOME)
            || after.pointer("/status/summary").is_some()
            // The hub may not have been able to write the departure.
            || self.home_disturbed_until.is_some_and(|until| view.now <= until + RECOVERY)
        {
            return Ok(());
        }
        for edge in &view.settings.edges {
            // If the Tenant names a member, no other one counts.
            let may_count = |tenant: &Value| match text(tenant, "/spec/clusterRef/secretName") {
                "" => true,
                named => named == edge.name,
            };
            if !may_count(after) {
                continue;
            }
            let kind = format!("ClusterReady/{}", edge.name);
            let shown = condition(before, &kind).filter(|_| condition(after, &kind).is_none());
            let has_left = shown.is_none_or(|(_, reason)| DEPARTURES.contains(&reason));
            ensure(has_left, || {
                format!("{} leaves the status of {} after {shown:?}", edge.name, change.key.name)
            })?;
        }
        Ok(())
    }
}

/// Whether a fault can delay writes of hubs on the home cluster.
fn disturbs_home(action: &Action) -> bool {
    let is_home = |name: &&str| *name == HOME || name.starts_with("hub-");
    let names = action.required_names();
    let is_disturbed = match action {
        Action::Link { .. } | Action::HalfOpen { .. } => names.iter().all(is_home),
        _ => names.iter().any(is_home),
    };
    is_disturbed && !action.is_user_action()
}

invariant! {
    /// A member keeps its source. Only people bind it to another one.
    SourceStays, "source-stays",
    fn check_update(&mut self, _: &View, (_, change, before, after): Update<'_>) -> CheckResult {
        let source = |object: &Value| object.pointer("/spec/sourceRef").cloned();
        let is_member = change.key.resource == "edgeclusters" && is_product(&change.by);
        ensure(!is_member || source(before) == source(after), || {
            format!("{} gives {} another source", change.by, change.key.name)
        })
    }
}

invariant! {
    /// A KryptonDeployment that moves is deployed on the new member before the old one uninstalls it.
    MovedDeploymentInstallsFirst, "moved-deployment-installs-first",
    fn check_helm_start(&mut self, view: &View, run: &Run) -> CheckResult {
        if run.verb != "uninstall" {
            return Ok(());
        }
        let (ReleaseOwner::Deployment(name), Some(cluster)) = (&run.owner, run.cluster.as_deref()) else {
            return Ok(());
        };
        let member = Settings::member_for(cluster);
        if !view.wants_deployment(name) || view.is_decommissioning(member) || view.ever_restored() {
            return Ok(());
        }
        let key = krypton_key("kryptondeployments", TENANT_NAMESPACE, name);
        let Some(deployment) = view.get(HOME, &key) else {
            return Ok(());
        };
        let region = text(deployment, "/spec/region/name");
        if region == member {
            return Ok(());
        }
        // After two moves, the release can still be on its way to the last region.
        let clusters = view.settings.clusters();
        let is_deployed_elsewhere = clusters.iter().filter(|other| *other != cluster).any(|other| {
            let revisions = view.revisions(other, &run.namespace, &run.release);
            revisions.iter().any(|(_, secret)| text(secret, "/metadata/labels/status") == "deployed")
        });
        ensure(is_deployed_elsewhere, || format!("{member} uninstalls {name} before {region} has it"))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::story::{
        AGENT, History, condition_patch, copy, deletion_patch, deployment, edge_cluster, revision,
        tenant, tenant_crd,
    };
    use super::*;

    fn on_home() -> Value {
        let mut tenant = tenant();
        tenant["metadata"]["finalizers"] = json!([PLACED_FINALIZER]);
        tenant["metadata"]["annotations"] = json!({PLACED_ON_ANNOTATION: "edge-1"});
        tenant["spec"] = json!({"clusterRef": {"secretName": "edge-1"}});
        tenant
    }

    #[test]
    fn two_acting_members_of_one_cluster_are_found() {
        for (mode, broken) in [("none", false), ("proxy", true)] {
            let mut twin = edge_cluster("edge-2");
            twin["status"]["clusterUID"] = json!("cluster-edge-1");
            twin["status"]["mode"] = json!(mode);
            let mut history = History::new();
            history
                .put("hub-0", "home", edge_cluster("edge-1"))
                .put("hub-0", "home", twin);
            assert_eq!(
                history.breaks(OneMemberPerCluster::default()),
                broken,
                "{mode}"
            );
        }
    }

    #[test]
    fn second_member_that_acts_is_found() {
        for (mode, oracle) in [("none", None), ("proxy", Some("twin-rests"))] {
            let mut twin = edge_cluster("edge-2-twin");
            twin["status"]["mode"] = json!(mode);
            History::new()
                .renew_leases()
                .put("hub-0", "home", twin)
                .assert_outcome(oracle);
        }
    }

    #[test]
    fn changed_cluster_uid_is_found() {
        let mut history = History::new();
        let other = json!({"status": {"clusterUID": "other"}});
        history
            .renew_leases()
            .put("hub-0", "home", edge_cluster("edge-1"))
            .patch(
                "hub-0",
                "home",
                edge_cluster("edge-1"),
                &json!({"status": {"mode": "proxy"}}),
            );
        history.assert_no_violation();
        history.patch("hub-0", "home", edge_cluster("edge-1"), &other);
        history.assert_violated("cluster-uid-stays");
    }

    #[test]
    fn new_source_of_a_member_is_found() {
        let source = |name: &str| json!({"spec": {"sourceRef": {"kind": "Secret", "name": name}}});
        for (by, oracle) in [("people", None), ("hub-0", Some("source-stays"))] {
            History::new()
                .renew_leases()
                .put("hub-0", "home", edge_cluster("edge-1"))
                .patch(by, "home", edge_cluster("edge-1"), &source("other"))
                .assert_outcome(oracle);
        }
    }

    #[test]
    fn changed_placement_is_found() {
        let with =
            |uid: &str| json!({"status": {"placement": {"cluster": "e", "clusterUid": uid}}});
        let mut history = History::new();
        history
            .renew_leases()
            .put("people", "home", on_home())
            .patch("hub-0", "home", on_home(), &with("one"));
        history.assert_no_violation();
        history.patch("hub-0", "home", on_home(), &with("two"));
        history.assert_violated("placement-stays");
    }

    #[test]
    fn deletion_of_a_placed_tenant_needs_an_order() {
        History::new()
            .put("people", "home", on_home())
            .put(AGENT, "edge-1", copy("uid-t0"))
            .patch("people", "home", on_home(), &deletion_patch())
            .patch(AGENT, "edge-1", copy("uid-t0"), &deletion_patch())
            .assert_no_violation();
        History::new()
            .put("people", "home", on_home())
            .put(AGENT, "edge-1", copy("uid-t0"))
            .patch(AGENT, "edge-1", copy("uid-t0"), &deletion_patch())
            .assert_violated("placed-tenant-goes-by-order");
    }

    #[test]
    fn home_that_does_not_wait_is_found() {
        for (gone, oracle) in [(true, None), (false, Some("home-waits-for-placed-tenant"))] {
            let mut history = History::new();
            history
                .put("hub-0", "home", edge_cluster("edge-1"))
                .put("people", "home", on_home())
                .put(AGENT, "edge-1", copy("uid-t0"))
                .patch("people", "home", on_home(), &deletion_patch())
                .patch(AGENT, "edge-1", copy("uid-t0"), &deletion_patch());
            if gone {
                history.delete(AGENT, "edge-1", &copy("uid-t0"));
            }
            let released = json!({"metadata": {"finalizers": []}});
            history.patch("hub-0", "home", on_home(), &released);
            assert_eq!(history.violated_oracle(), oracle);
        }
    }

    #[test]
    fn copy_may_stay_after_deletion_before_crd() {
        let violated = Some("home-waits-for-placed-tenant");
        for (jumps, created, oracle) in [
            (true, "2026-01-01T00:00:01Z", None),
            (true, "2025-12-31T23:59:59Z", violated),
            (false, "2026-01-01T00:00:01Z", violated),
        ] {
            let mut history = History::new();
            let created = json!({"metadata": {"creationTimestamp": created}});
            history
                .patch("people", "home", tenant_crd(), &created)
                .put("hub-0", "home", edge_cluster("edge-1"))
                .put("people", "home", on_home())
                .put(AGENT, "edge-1", copy("uid-t0"));
            if jumps {
                history.fault("server-clock home by -60.000 for 9.000");
            }
            let released = json!({"metadata": {"finalizers": []}});
            history
                .patch("people", "home", on_home(), &deletion_patch())
                .patch("hub-0", "home", on_home(), &released)
                .assert_outcome(oracle);
        }
    }

    #[test]
    fn member_leaves_the_status_after_its_departure() {
        const VIOLATED: Option<&str> = Some("member-stays-in-status");
        let without = json!({"status": {"conditions": []}});
        for (reason, fault, oracle) in [
            ("Unreachable", "crash agent-edge-1 restart 9.000", VIOLATED),
            (
                "Unreachable",
                "link agent-edge-1 <-> hub-0 cut for 9.000",
                VIOLATED,
            ),
            ("Unreachable", "server home 503 for 9.000", None),
            ("Unreachable", "link hub-0 -> home cut for 9.000", None),
            ("MemberLeft", "", None),
            ("TenantGone", "", None),
        ] {
            let mut shown = condition_patch("ClusterReady/edge-1", "Unknown");
            shown["status"]["conditions"][0]["reason"] = json!(reason);
            History::new()
                .put("people", "home", tenant())
                .renew_leases()
                .patch("hub-0", "home", tenant(), &shown)
                .wait(RECOVERY + 1)
                .fault(fault)
                .renew_leases()
                .patch("hub-0", "home", tenant(), &without)
                .assert_outcome(oracle);
        }
    }

    #[test]
    fn move_that_removes_first_is_found() {
        for (installed, oracle) in [
            (true, None),
            (false, Some("moved-deployment-installs-first")),
        ] {
            let mut history = History::new();
            history.put("people", "home", deployment("edge-2"));
            if installed {
                let secret = revision("ced-d0", 1, "deployed");
                history.put("helm:hub-0", "edge-2", secret);
            }
            history
                .renew_leases()
                .start_helm(1, AGENT, "uninstall", "ced-d0");
            assert_eq!(history.violated_oracle(), oracle);
        }
    }
}
