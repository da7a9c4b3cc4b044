//! Invariants of members, placed Tenants and KryptonDeployments.

use krypton_types::names::{
    GROUP, HOME_UID_ANNOTATION, MANAGED_BY_HUB, MANAGED_BY_LABEL, ORPHAN_ANNOTATION,
    PLACED_FINALIZER, PLACED_ON_ANNOTATION,
};
use serde_json::Value;

use super::releases::started;
use super::view::{
    Owner, annotation, condition, is_deleted, is_product, krypton_key, label, let_go, replaced,
    text,
};
use super::{Check, Oracle, View, ensure, stateless};
use crate::conductor::Millis;
use crate::faults::RESTORE;
use crate::observe::{Event, Observation};
use crate::plan::{HOME, Settings, TENANTS, TWIN};

const RECOVERY: Millis = 120_000;
/// A member that has existed this long has reported its Tenants.
const KNOWN: Millis = 120_000;

pub(super) fn all() -> Vec<Box<dyn Oracle>> {
    vec![
        Box::new(OneMember),
        Box::new(TwinRests),
        Box::new(ClusterStays),
        Box::new(SourceStays),
        Box::new(PlacementStays),
        Box::new(PlacedByOrder),
        Box::new(HomeWaits),
        Box::new(MemberStaysInStatus),
        Box::new(MoveInstallsFirst),
    ]
}

fn spot(object: &Value, pointer: &str) -> Option<String> {
    let text = text(object, pointer);
    (!text.is_empty()).then(|| text.to_owned())
}

stateless! {
    /// At most one member acts on one cluster.
    OneMember, "one-member-per-cluster",
    fn quiet(&mut self, view: &View) -> Check {
        let mut seen: Vec<String> = Vec::new();
        for (key, member) in view.all(HOME, GROUP, "edgeclusters") {
            let acts = matches!(text(member, "/status/mode"), "agent" | "proxy");
            let Some(uid) = spot(member, "/status/clusterUID").filter(|_| acts) else {
                continue;
            };
            if seen.contains(&uid) {
                return Err(format!("{} acts on cluster {uid}, too", key.name));
            }
            seen.push(uid);
        }
        Ok(())
    }
}

stateless! {
    /// A second member of a cluster neither acts nor runs Helm.
    TwinRests, "twin-rests",
    fn see(&mut self, view: &View, seen: &Observation) -> Check {
        let twin = match &seen.event {
            Event::Change { change, .. } => {
                let after = change.after.as_deref();
                let mode = after.map(|after| text(after, "/status/mode"));
                let acts = matches!(mode, Some("agent" | "proxy"));
                let twin = change.key.resource == "edgeclusters" && change.key.name.ends_with(TWIN);
                (twin && acts).then(|| change.key.name.clone())
            }
            _ => started(view, seen).map(|run| run.release.clone()).filter(|name| name.ends_with(TWIN)),
        };
        ensure(twin.is_none(), || format!("{} acts", twin.unwrap_or_default()))
    }
}

stateless! {
    /// The hub never changes the cluster UID of an EdgeCluster.
    ClusterStays, "cluster-uid-stays",
    fn see(&mut self, _: &View, seen: &Observation) -> Check {
        kept(seen, "edgeclusters", "/status/clusterUID")
    }
}

stateless! {
    /// The hub never changes the cluster on which it has placed a Tenant.
    PlacementStays, "placement-stays",
    fn see(&mut self, view: &View, seen: &Observation) -> Check {
        match view.restored_within(HOME, RECOVERY) {
            true => Ok(()),
            false => kept(seen, "tenants", "/status/placement/clusterUid"),
        }
    }
}

/// Fails if a product process replaces the text at the pointer.
fn kept(seen: &Observation, resource: &str, pointer: &str) -> Check {
    let Some((_, change, before, after)) = replaced(seen) else {
        return Ok(());
    };
    if change.key.resource != resource || change.by == RESTORE {
        return Ok(());
    }
    let (before, after) = (spot(before, pointer), spot(after, pointer));
    let replaced = before.is_some() && after.is_some() && before != after;
    ensure(!replaced, || {
        format!(
            "{pointer} of {} goes from {before:?} to {after:?}",
            change.key.name
        )
    })
}

stateless! {
    /// Krypton deletes a placed Tenant only if people have deleted the Tenant on the home cluster or its member.
    PlacedByOrder, "placed-tenant-goes-by-order",
    fn see(&mut self, view: &View, seen: &Observation) -> Check {
        let Event::Change { cluster, change } = &seen.event else {
            return Ok(());
        };
        let Some(before) = change.before.as_deref() else {
            return Ok(());
        };
        let begins = !is_deleted(before) && change.after.as_deref().is_none_or(is_deleted);
        let placed = change.key.resource == "tenants"
            && label(before, MANAGED_BY_LABEL) == Some(MANAGED_BY_HUB)
            && annotation(before, HOME_UID_ANNOTATION).is_some();
        if !placed || !begins || !is_product(&change.by) || view.is_retiring(cluster) {
            return Ok(());
        }
        // The order can concern a previous Tenant of this name.
        let uid = annotation(before, HOME_UID_ANNOTATION);
        let current = view
            .tenant(HOME, &change.key.name)
            .is_some_and(|tenant| Some(text(tenant, "/metadata/uid")) == uid);
        ensure(!current || !view.wants_tenant(HOME, &change.key.name), || {
            format!("{} deletes the placed {} on {cluster}", change.by, change.key.name)
        })
    }
}

stateless! {
    /// The hub releases a deleted Tenant on the home cluster only after its copy on the member is gone.
    HomeWaits, "home-waits-for-placed-tenant",
    fn see(&mut self, view: &View, seen: &Observation) -> Check {
        let Some((cluster, change, before)) = let_go(seen, PLACED_FINALIZER) else {
            return Ok(());
        };
        if cluster != HOME
            || change.key.resource != "tenants"
            || annotation(before, ORPHAN_ANNOTATION) == Some("true")
            || !view.has_tenant_crd(HOME)
            || view.ever_restored()
        {
            return Ok(());
        }
        let Some(member) = annotation(before, PLACED_ON_ANNOTATION) else {
            return Ok(());
        };
        let recorded = text(before, "/status/placement/clusterUid");
        let found = view.edge_cluster(member).map_or("", |member| text(member, "/status/clusterUID"));
        ensure(recorded.is_empty() || found.is_empty() || recorded == found, || {
            format!("home releases {} without the cluster {recorded}", change.key.name)
        })?;
        let uid = text(before, "/metadata/uid");
        let target = Settings::cluster(member);
        let copy = view.tenant(target, &change.key.name).filter(|copy| {
            annotation(copy, HOME_UID_ANNOTATION) == Some(uid)
        });
        // Krypton keeps the Tenants of a member that left, or whose CRD is gone.
        let stays = view.edge_cluster(member).is_none() || !view.has_tenant_crd(target);
        ensure(copy.is_none() || stays, || {
            format!("home releases {} while {member} has it", change.key.name)
        })
    }
}

stateless! {
    /// The status of a Tenant on the home cluster keeps each member that has a Tenant of this name.
    MemberStaysInStatus, "member-stays-in-status",
    fn see(&mut self, view: &View, seen: &Observation) -> Check {
        let Some((cluster, change, before, after)) = replaced(seen) else {
            return Ok(());
        };
        if cluster != HOME
            || change.key.resource != "tenants"
            || !is_product(&change.by)
            || view.restored_within(HOME, RECOVERY)
            || after.pointer("/status/summary").is_some()
        {
            return Ok(());
        }
        for edge in &view.settings.edges {
            let kind = format!("ClusterReady/{}", edge.name);
            let gone = condition(before, &kind).is_some() && condition(after, &kind).is_none();
            let name = &change.key.name;
            let tenant = krypton_key("tenants", TENANTS, name);
            let member = krypton_key("edgeclusters", "", &edge.name);
            let known = view.tenant(&edge.name, name).is_some_and(|tenant| !is_deleted(tenant))
                && view.edge_cluster(&edge.name).is_some_and(|member| !is_deleted(member))
                && view.age(&edge.name, &tenant) > KNOWN
                && view.age(HOME, &member) > KNOWN
                && view.calm() > KNOWN;
            if gone && known {
                return Err(format!("{} leaves the status of {name}", edge.name));
            }
        }
        Ok(())
    }
}

stateless! {
    /// A member keeps its source. Only people bind it to another one.
    SourceStays, "source-stays",
    fn see(&mut self, _: &View, seen: &Observation) -> Check {
        let Some((_, change, before, after)) = replaced(seen) else {
            return Ok(());
        };
        let source = |object: &Value| object.pointer("/spec/sourceRef").cloned();
        let is_member = change.key.resource == "edgeclusters" && is_product(&change.by);
        ensure(!is_member || source(before) == source(after), || {
            format!("{} gives {} another source", change.by, change.key.name)
        })
    }
}

stateless! {
    /// A KryptonDeployment that moves is deployed on the new member before the old one uninstalls it.
    MoveInstallsFirst, "moved-deployment-installs-first",
    fn see(&mut self, view: &View, seen: &Observation) -> Check {
        let Some(run) = started(view, seen).filter(|run| run.verb == "uninstall") else {
            return Ok(());
        };
        let (Owner::Deployment(name), Some(cluster)) = (&run.owner, run.cluster.as_deref()) else {
            return Ok(());
        };
        let member = Settings::member(cluster);
        if !view.wants_deployment(name) || view.is_retiring(member) || view.ever_restored() {
            return Ok(());
        }
        let key = krypton_key("kryptondeployments", TENANTS, name);
        let Some(object) = view.get(HOME, &key) else {
            return Ok(());
        };
        let region = text(object, "/spec/region/name");
        if region == member {
            return Ok(());
        }
        // After two moves, the release can still be on its way to the last region.
        let clusters = view.settings.clusters();
        let elsewhere = clusters.iter().filter(|other| *other != cluster).any(|other| {
            let revisions = view.revisions(other, &run.namespace, &run.release);
            revisions.iter().any(|(_, secret)| text(secret, "/metadata/labels/status") == "deployed")
        });
        ensure(elsewhere, || format!("{member} uninstalls {name} before {region} has it"))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::story::{Story, deletion, deployment, edge_cluster, tenant};
    use super::*;

    fn placed() -> Value {
        let mut tenant = tenant();
        tenant["metadata"]["uid"] = json!("uid-copy");
        tenant["metadata"]["labels"] = json!({MANAGED_BY_LABEL: MANAGED_BY_HUB});
        tenant["metadata"]["annotations"] = json!({HOME_UID_ANNOTATION: "uid-t0"});
        tenant
    }

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
            let mut story = Story::new();
            story
                .put("hub-0", "home", edge_cluster("edge-1"))
                .put("hub-0", "home", twin);
            let check = OneMember.quiet(story.view());
            assert_eq!(check.is_err(), broken, "{mode}");
        }
    }

    #[test]
    fn second_member_that_acts_is_found() {
        for (mode, oracle) in [("none", None), ("proxy", Some("twin-rests"))] {
            let mut twin = edge_cluster("edge-2-twin");
            twin["status"]["mode"] = json!(mode);
            let mut story = Story::new();
            story.renew().put("hub-0", "home", twin);
            assert_eq!(story.violated(), oracle);
        }
    }

    #[test]
    fn changed_cluster_uid_is_found() {
        let mut story = Story::new();
        let other = json!({"status": {"clusterUID": "other"}});
        story
            .renew()
            .put("hub-0", "home", edge_cluster("edge-1"))
            .patch(
                "hub-0",
                "home",
                edge_cluster("edge-1"),
                &json!({"status": {"mode": "proxy"}}),
            );
        story.assert_kept();
        story.patch("hub-0", "home", edge_cluster("edge-1"), &other);
        story.assert_broken("cluster-uid-stays");
    }

    #[test]
    fn new_source_of_a_member_is_found() {
        let source = |name: &str| json!({"spec": {"sourceRef": {"kind": "Secret", "name": name}}});
        for (by, oracle) in [("people", None), ("hub-0", Some("source-stays"))] {
            let mut story = Story::new();
            story
                .renew()
                .put("hub-0", "home", edge_cluster("edge-1"))
                .patch(by, "home", edge_cluster("edge-1"), &source("other"));
            assert_eq!(story.violated(), oracle);
        }
    }

    #[test]
    fn changed_placement_is_found() {
        let with =
            |uid: &str| json!({"status": {"placement": {"cluster": "e", "clusterUid": uid}}});
        let mut story = Story::new();
        story.renew().put("people", "home", on_home()).patch(
            "hub-0",
            "home",
            on_home(),
            &with("one"),
        );
        story.assert_kept();
        story.patch("hub-0", "home", on_home(), &with("two"));
        story.assert_broken("placement-stays");
    }

    #[test]
    fn deletion_of_a_placed_tenant_needs_an_order() {
        let mut good = Story::new();
        good.put("people", "home", on_home())
            .put("agent-edge-1", "edge-1", placed())
            .patch("people", "home", on_home(), &deletion())
            .patch("agent-edge-1", "edge-1", placed(), &deletion());
        good.assert_kept();
        let mut bad = Story::new();
        bad.put("people", "home", on_home())
            .put("agent-edge-1", "edge-1", placed())
            .patch("agent-edge-1", "edge-1", placed(), &deletion());
        bad.assert_broken("placed-tenant-goes-by-order");
    }

    #[test]
    fn home_that_does_not_wait_is_found() {
        for (gone, oracle) in [(true, None), (false, Some("home-waits-for-placed-tenant"))] {
            let mut story = Story::new();
            story
                .put("hub-0", "home", edge_cluster("edge-1"))
                .put("people", "home", on_home())
                .put("agent-edge-1", "edge-1", placed())
                .patch("people", "home", on_home(), &deletion())
                .patch("agent-edge-1", "edge-1", placed(), &deletion());
            if gone {
                story.delete("agent-edge-1", "edge-1", &placed());
            }
            let released = json!({"metadata": {"finalizers": []}});
            story.patch("hub-0", "home", on_home(), &released);
            assert_eq!(story.violated(), oracle);
        }
    }

    #[test]
    fn member_that_leaves_the_status_is_found() {
        let ready = json!({"status": {"conditions": [
            {"type": "ClusterReady/edge-1", "status": "True", "reason": "Ready"},
        ]}});
        let without = json!({"status": {"conditions": []}});
        for (pause, oracle) in [(10_000, None), (130_000, Some("member-stays-in-status"))] {
            let mut story = Story::new();
            story
                .put("hub-0", "home", edge_cluster("edge-1"))
                .put("people", "edge-1", tenant())
                .put("people", "home", tenant())
                .renew()
                .patch("hub-0", "home", tenant(), &ready)
                .wait(pause)
                .renew()
                .patch("hub-0", "home", tenant(), &without);
            assert_eq!(story.violated(), oracle);
        }
    }

    #[test]
    fn move_that_removes_first_is_found() {
        for (installed, oracle) in [
            (true, None),
            (false, Some("moved-deployment-installs-first")),
        ] {
            let mut story = Story::new();
            story.put("people", "home", deployment("edge-2"));
            if installed {
                let secret = super::super::story::revision("ced-d0", 1, "deployed");
                story.put("helm:hub-0", "edge-2", secret);
            }
            story.renew().helm(1, "agent-edge-1", "uninstall", "ced-d0");
            assert_eq!(story.violated(), oracle);
        }
    }
}
