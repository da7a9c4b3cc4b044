//! Invariants of the copies of Tenants that the hub places on members, and of the state of members that home shows.

use std::collections::{BTreeMap, BTreeSet};

use krypton_reconciler::plan::PREVIOUS_UID_ANNOTATION;
use krypton_types::names::{ADOPT_ANNOTATION, GROUP, HOME_UID_ANNOTATION, PLACED_ON_ANNOTATION};
use serde_json::{Value, json};

use super::releases::tenant_of_run;
use super::view::{
    WATCH_LAG, is_krypton, is_paused, is_placed_copy, krypton_key, reconciling_member,
    starts_deletion,
};
use super::{Change, CheckResult, Oracle, Run, View, ensure, invariant};
use crate::object::{
    annotation, condition, condition_text, has_true_condition, is_terminating, text,
};
use crate::plan::{HOME, Settings, TENANT_NAMESPACE};
use crate::time::Millis;

impl View {
    /// Whether the member allows Tenants of home's namespace.
    pub(super) fn allows_tenants(&self, member: &str) -> bool {
        let object = self.edge_cluster(member);
        let allowed = object.and_then(|object| object.pointer("/spec/allowedNamespaces"));
        let allowed = allowed.and_then(Value::as_array);
        allowed.is_none_or(|all| all.contains(&json!(TENANT_NAMESPACE)))
    }

    /// The copy that the hub has placed for this Tenant of home.
    pub(super) fn placed_copy(&self, tenant: &Value, cluster: &str) -> Option<&Value> {
        let copy = self.tenant(cluster, text(tenant, "/metadata/name"))?;
        let uid = annotation(copy, HOME_UID_ANNOTATION);
        let is_its_copy = is_placed_copy(copy) && uid == Some(text(tenant, "/metadata/uid"));
        is_its_copy.then_some(copy.as_ref())
    }
}

invariant! {
    /// The copy of a placed Tenant has the values and the pause of home, and is only on its member.
    PlacedCopiesMatch, "placed-copies-match",
    fn check_converged(&mut self, view: &View) -> CheckResult {
        if view.ever_restored() {
            return Ok(());
        }
        for (key, tenant) in view.objects(HOME, GROUP, "tenants") {
            let member = annotation(tenant, PLACED_ON_ANNOTATION).unwrap_or_default();
            let is_placed = has_true_condition(tenant, "Placed");
            for cluster in view.settings.edges.iter().map(|edge| edge.name.as_str()) {
                let copy = view.placed_copy(tenant, cluster);
                ensure(cluster == member || copy.is_none(), || {
                    format!("{cluster} has {}, which is placed on {member:?}", key.name)
                })?;
                if cluster == member && is_placed && view.must_converge(member) && !is_terminating(tenant) {
                    ensure(copy.is_some_and(|copy| matches_home(copy, tenant)), || {
                        format!("{} on {member} differs from home", key.name)
                    })?;
                }
            }
        }
        Ok(())
    }
}

fn matches_home(copy: &Value, tenant: &Value) -> bool {
    copy.pointer("/spec/values") == tenant.pointer("/spec/values")
        && copy.pointer("/spec/clusterRef").is_none()
        && !is_terminating(copy)
        && is_paused(copy) == is_paused(tenant)
}

invariant! {
    /// Krypton neither creates nor deletes the copy of a Tenant that is paused at home. It neither creates nor changes the
    /// copy on a member that does not allow home's namespace. It restores an existing copy with its CRD.
    HeldCopiesStay {
        /// Since when each member does not allow the namespace.
        disallowed_since: BTreeMap<String, Millis>,
    },
    "held-copies-stay",
    fn check_change(&mut self, view: &View, cluster: &str, change: &Change) -> CheckResult {
        let key = &change.key;
        if cluster == HOME && key.resource == "edgeclusters" {
            match view.allows_tenants(&key.name) {
                true => drop(self.disallowed_since.remove(&key.name)),
                false => drop(
                    self.disallowed_since
                        .entry(key.name.clone())
                        .or_insert(view.now),
                ),
            }
        }
        let (before, after) = (change.before.as_deref(), change.after.as_deref());
        let is_copy = before.or(after).is_some_and(is_placed_copy);
        if key.resource != "tenants"
            || !is_copy
            || !is_krypton(&change.by)
            || view.calm_time() <= WATCH_LAG
        {
            return Ok(());
        }
        let is_restored =
            after.is_some_and(|after| annotation(after, PREVIOUS_UID_ANNOTATION).is_some());
        let is_created = before.is_none() && !is_restored;
        let is_edited = before
            .zip(after)
            .is_some_and(|(before, after)| before.get("spec") != after.get("spec"));
        let is_long = |time: Option<Millis>| time.is_some_and(|time| time > WATCH_LAG);
        let writes_paused = is_long(view.tenant_paused_for(HOME, &key.name))
            && (is_created || starts_deletion(change));
        let disallowed_for = self
            .disallowed_since
            .get(cluster)
            .map(|since| view.now - since);
        let writes_disallowed = is_long(disallowed_for) && (is_created || is_edited);
        ensure(!writes_paused && !writes_disallowed, || {
            format!("{} writes the copy of {} on {cluster}", change.by, key.name)
        })
    }
}

invariant! {
    /// Krypton creates a copy only on the cluster that home has recorded.
    CopiesAreOnRecordedCluster, "copies-are-on-recorded-cluster",
    fn check_change(&mut self, view: &View, cluster: &str, change: &Change) -> CheckResult {
        let created = change.after.as_deref().filter(|_| change.before.is_none());
        let Some(copy) = created.filter(|after| is_placed_copy(after) && is_krypton(&change.by)) else {
            return Ok(());
        };
        let home_tenant = view.tenant(HOME, &change.key.name);
        let home_tenant = home_tenant.filter(|home_tenant| {
            annotation(copy, HOME_UID_ANNOTATION) == Some(text(home_tenant, "/metadata/uid"))
        });
        let recorded = home_tenant.map_or("", |home_tenant| text(home_tenant, "/status/placement/clusterUid"));
        let member = view.edge_cluster(cluster);
        let actual = member.map_or("", |member| text(member, "/status/clusterUID"));
        ensure(recorded.is_empty() || actual.is_empty() || recorded == actual, || {
            format!("{} is placed on {actual} instead of {recorded}", change.key.name)
        })
    }
}

invariant! {
    /// A copy changes to a different Tenant of home only if people request it.
    CopyKeepsItsOwner {
        /// UIDs of Tenants of home that may take over a copy. They stay after a restore of home, because the member may
        /// still have the earlier order.
        may_adopt: BTreeSet<String>,
    },
    "copy-keeps-its-owner",
    fn check_change(&mut self, _: &View, cluster: &str, change: &Change) -> CheckResult {
        let Some(after) = change.after.as_deref().filter(|_| change.key.resource == "tenants") else {
            return Ok(());
        };
        let is_requested = annotation(after, ADOPT_ANNOTATION) == Some("true");
        // Krypton has restored the Tenant with its CRD.
        let is_restored = annotation(after, PREVIOUS_UID_ANNOTATION).is_some();
        if cluster == HOME && (is_requested || is_restored) {
            self.may_adopt.insert(text(after, "/metadata/uid").to_owned());
        }
        let Some(before) = change.before.as_deref().filter(|before| is_placed_copy(before)) else {
            return Ok(());
        };
        let owner = |object| annotation(object, HOME_UID_ANNOTATION);
        let owner_changes = owner(before) != owner(after) && is_krypton(&change.by);
        let may_adopt = owner(after).is_some_and(|uid| self.may_adopt.contains(uid));
        ensure(!owner_changes || may_adopt, || format!("{} adopts the copy of {}", change.by, change.key.name))
    }
}

invariant! {
    /// Helm installs no Tenant that names another member, nor one that names its member from a namespace that this
    /// member does not allow.
    TenantRunsOnItsMember, "tenant-runs-on-its-member",
    fn check_helm_start(&mut self, view: &View, run: &Run) -> CheckResult {
        let tenant = tenant_of_run(view, run).filter(|_| run.verb != "uninstall");
        let Some((cluster, tenant)) = tenant else {
            return Ok(());
        };
        let member = Settings::member_for(cluster);
        let names_member = !text(tenant, "/spec/clusterRef/secretName").is_empty();
        let tenant_key = krypton_key("tenants", TENANT_NAMESPACE, text(tenant, "/metadata/name"));
        let is_calm = view.calm_time() > WATCH_LAG;
        let tenant_is_settled = is_calm && view.time_since_change(cluster, &tenant_key) > WATCH_LAG;
        let belongs_elsewhere = reconciling_member(tenant, cluster) != member && tenant_is_settled;
        let member_key = krypton_key("edgeclusters", "", member);
        let member_is_settled = is_calm && view.time_since_change(HOME, &member_key) > WATCH_LAG;
        let is_disallowed = cluster == HOME && names_member && !view.allows_tenants(member) && member_is_settled;
        ensure(!is_disallowed && !belongs_elsewhere, || {
            format!("{} installs {} on {member}", run.host, run.release)
        })
    }
}

invariant! {
    /// A Tenant of home shows the state of each member that has a Tenant of its name, and of no other. After a restore
    /// or while its deletion waits, only the latter.
    HomeShowsMembers, "home-shows-members",
    fn check_converged(&mut self, view: &View) -> CheckResult {
        if view.upgrades_fail() {
            return Ok(());
        }
        for (key, tenant) in view.objects(HOME, GROUP, "tenants") {
            let only_member = match annotation(tenant, PLACED_ON_ANNOTATION) {
                Some(member) => member,
                None => text(tenant, "/spec/clusterRef/secretName"),
            };
            for edge in &view.settings.edges {
                let member = edge.name.as_str();
                let is_expected = only_member.is_empty() || only_member == member;
                let member_tenant = view.tenant(member, &key.name);
                let member_tenant = member_tenant.filter(|member_tenant| {
                    is_expected && reconciling_member(member_tenant, member) == member
                });
                let has_joined = view.edge_cluster(member).is_some();
                if has_joined && !view.must_converge(member)
                    || member_tenant.is_some_and(|tenant| is_terminating(tenant))
                {
                    continue;
                }
                let kind = format!("ClusterReady/{member}");
                let home_condition = condition(tenant, &kind);
                let member_condition = member_tenant
                    .filter(|_| has_joined)
                    .and_then(|member_tenant| condition(member_tenant, &kind));
                let is_kept = only_member == member && member_condition.is_none();
                let may_differ = is_terminating(tenant) || view.ever_restored() && has_joined;
                let may_differ = may_differ && member_tenant.is_some();
                ensure(home_condition == member_condition || is_kept || may_differ, || {
                    let text = condition_text(tenant, &kind);
                    format!("home shows {text} for {} on {member} instead of {member_condition:?}", key.name)
                })?;
            }
        }
        Ok(())
    }
}

invariant! {
    /// An EdgeCluster counts the Tenants that its member reconciles.
    MembersCountTenants, "members-count-tenants",
    fn check_converged(&mut self, view: &View) -> CheckResult {
        for (member, object) in view.converging_members().filter(|_| !view.all_hubs_lost) {
            let cluster = Settings::cluster_for(member);
            let tenants: Vec<&Value> = view
                .objects(cluster, GROUP, "tenants")
                .map(|(_, tenant)| tenant.as_ref())
                .filter(|tenant| {
                    let names_member = !text(tenant, "/spec/clusterRef/secretName").is_empty();
                    cluster != HOME || !names_member || view.allows_tenants(member)
                })
                .filter(|tenant| reconciling_member(tenant, cluster) == member)
                .collect();
            let counted = object.pointer("/status/tenants/total").and_then(Value::as_u64);
            let actual = tenants.len() as u64;
            ensure(counted.unwrap_or_default() == actual, || {
                format!("{member} counts {counted:?} Tenants instead of {actual}")
            })?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use krypton_types::names::PAUSED_ANNOTATION;
    use serde_json::json;

    use super::super::story::{
        AGENT, History, condition_patch, copy, deletion_patch, edge_cluster, tenant,
    };
    use super::*;
    use crate::faults::RESTORE_WRITER;

    /// The Tenant `t0` of home, which is placed on edge-1.
    fn on_home(spec: Value) -> Value {
        let mut tenant = tenant();
        tenant["metadata"]["annotations"] = json!({PLACED_ON_ANNOTATION: "edge-1"});
        tenant["spec"] = spec;
        tenant["status"] = json!({
            "placement": {"cluster": "edge-1", "clusterUid": "cluster-edge-1"},
            "conditions": [{"type": "Placed", "status": "True", "reason": "Placed"}],
        });
        tenant
    }

    /// A fleet with a member that allows only this namespace, and a Tenant of home.
    fn history(namespace: &str, home: Value) -> History {
        let mut member = edge_cluster("edge-1");
        member["spec"] = json!({"allowedNamespaces": [namespace]});
        let mut history = History::new();
        history
            .renew_leases()
            .put("hub-0", "home", member)
            .put("people", "home", home);
        history
    }

    #[test]
    fn copy_that_differs_from_home_is_found() {
        for (number, broken) in [(1, false), (2, true)] {
            let mut same = copy("uid-t0");
            same["spec"] = json!({"values": {"a": 1}});
            let home = on_home(json!({"values": {"a": number}}));
            let mut history = history(TENANT_NAMESPACE, home);
            history.put(AGENT, "edge-1", same);
            assert_eq!(history.breaks(PlacedCopiesMatch::default()), broken);
        }
        let mut history = history(TENANT_NAMESPACE, on_home(json!({})));
        history.put("hub-0", "edge-2", copy("uid-t0"));
        assert!(history.breaks(PlacedCopiesMatch::default()));
    }

    #[test]
    fn write_of_a_held_copy_is_found() {
        let violated = "held-copies-stay";
        for (namespace, oracle) in [(TENANT_NAMESPACE, None), ("others", Some(violated))] {
            history(namespace, on_home(json!({})))
                .wait(31_000)
                .renew_leases()
                .put(AGENT, "edge-1", copy("uid-t0"))
                .assert_outcome(oracle);
        }
        for (paused, oracle) in [("false", None), ("true", Some(violated))] {
            let mut home = on_home(json!({}));
            home["metadata"]["annotations"][PAUSED_ANNOTATION] = json!(paused);
            history(TENANT_NAMESPACE, home)
                .put(AGENT, "edge-1", copy("uid-t0"))
                .wait(31_000)
                .renew_leases()
                .patch("people", "home", on_home(json!({})), &deletion_patch())
                .patch(AGENT, "edge-1", copy("uid-t0"), &deletion_patch())
                .assert_outcome(oracle);
        }
        for (mark, oracle) in [(PREVIOUS_UID_ANNOTATION, None), ("other", Some(violated))] {
            let mut home = on_home(json!({}));
            home["metadata"]["annotations"][PAUSED_ANNOTATION] = json!("true");
            let mut created = copy("uid-t0");
            created["metadata"]["annotations"][mark] = json!("uid-old");
            history(TENANT_NAMESPACE, home)
                .wait(31_000)
                .renew_leases()
                .put(AGENT, "edge-1", created)
                .assert_outcome(oracle);
        }
    }

    #[test]
    fn copy_on_another_cluster_is_found() {
        let violated = "copies-are-on-recorded-cluster";
        for (uid, oracle) in [("cluster-edge-1", None), ("other", Some(violated))] {
            let mut home = on_home(json!({}));
            home["status"]["placement"]["clusterUid"] = json!(uid);
            history(TENANT_NAMESPACE, home)
                .put(AGENT, "edge-1", copy("uid-t0"))
                .assert_outcome(oracle);
        }
    }

    #[test]
    fn adoption_without_request_is_found() {
        for (adopt, oracle) in [("true", None), ("false", Some("copy-keeps-its-owner"))] {
            let mut home = on_home(json!({}));
            home["metadata"]["annotations"][ADOPT_ANNOTATION] = json!(adopt);
            history(TENANT_NAMESPACE, home)
                .put(AGENT, "edge-1", copy("uid-old"))
                .put(AGENT, "edge-1", copy("uid-t0"))
                .assert_outcome(oracle);
        }
        let mut adopting = on_home(json!({}));
        adopting["metadata"]["annotations"][ADOPT_ANNOTATION] = json!("true");
        history(TENANT_NAMESPACE, adopting)
            .put(AGENT, "edge-1", copy("uid-old"))
            .put(RESTORE_WRITER, "home", on_home(json!({})))
            .put(AGENT, "edge-1", copy("uid-t0"))
            .assert_outcome(None);
    }

    #[test]
    fn tenant_for_another_member_is_found() {
        let violated = "tenant-runs-on-its-member";
        for (member, oracle) in [("edge-1", None), ("edge-2", Some(violated))] {
            let mut named = tenant();
            named["spec"] = json!({"clusterRef": {"secretName": member}});
            History::new()
                .put("people", "edge-1", named)
                .wait(31_000)
                .renew_leases()
                .start_helm(1, AGENT, "upgrade", "tenant-t0-edge-1")
                .assert_outcome(oracle);
        }
    }

    #[test]
    fn wrong_state_at_home_is_found() {
        let state = |status: &str| {
            let mut tenant = tenant();
            tenant["status"] = condition_patch("ClusterReady/edge-1", status)["status"].take();
            tenant
        };
        for (shown, broken) in [("True", false), ("False", true)] {
            let mut history = History::new();
            history
                .renew_leases()
                .put("hub-0", "home", edge_cluster("edge-1"))
                .put("people", "edge-1", state("True"))
                .put("people", "home", state(shown));
            assert_eq!(history.breaks(HomeShowsMembers::default()), broken);
        }
        let mut history = History::new();
        history.put("people", "home", state("True"));
        assert!(history.breaks(HomeShowsMembers::default()));
        // After a restore, the state may differ, but a departed member must go.
        let mut history = History::new();
        history
            .renew_leases()
            .put("hub-0", "home", edge_cluster("edge-1"))
            .put(RESTORE_WRITER, "edge-1", state("True"))
            .put("people", "home", state("False"));
        assert!(!history.breaks(HomeShowsMembers::default()));
        history.delete("people", "edge-1", &tenant());
        assert!(history.breaks(HomeShowsMembers::default()));
        // So may it while a deletion waits.
        let mut history = History::new();
        history
            .renew_leases()
            .put("hub-0", "home", edge_cluster("edge-1"))
            .put("people", "edge-1", state("True"))
            .put("people", "home", state("False"))
            .patch("people", "home", tenant(), &deletion_patch());
        assert!(!history.breaks(HomeShowsMembers::default()));
        history.delete("people", "edge-1", &tenant());
        assert!(history.breaks(HomeShowsMembers::default()));
    }

    #[test]
    fn wrong_count_of_tenants_is_found() {
        for (total, broken) in [(1, false), (2, true)] {
            let mut member = edge_cluster("edge-1");
            member["status"]["tenants"] = json!({"total": total});
            let mut history = History::new();
            history
                .renew_leases()
                .put("people", "edge-1", tenant())
                .put("hub-0", "home", member);
            assert_eq!(history.breaks(MembersCountTenants::default()), broken);
        }
    }
}
