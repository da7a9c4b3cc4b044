//! Invariants of the copies of Tenants that the hub places on members, and of what home shows of its members.

use std::collections::BTreeMap;

use krypton_reconciler::plan::PREVIOUS_UID_ANNOTATION;
use krypton_types::names::{
    ADOPT_ANNOTATION, GROUP, HOME_UID_ANNOTATION, PAUSED_ANNOTATION, PLACED_ON_ANNOTATION,
};
use serde_json::{Value, json};

use super::releases::{started, tenant_of};
use super::view::{
    annotation, condition, condition_text, is_copy, is_deleted, is_krypton, krypton_key, member_of,
    replaced, text,
};
use super::{Check, Oracle, View, ensure, stateless};
use crate::conductor::Millis;
use crate::observe::{Event, Observation};
use crate::plan::{HOME, Settings, TENANTS};

/// Time in which an order arrives, if no fault delays it.
const LAG: Millis = 30_000;

pub(super) fn all() -> Vec<Box<dyn Oracle>> {
    vec![
        Box::new(CopiesMatch),
        Box::new(HeldCopiesStay::default()),
        Box::new(CopiesAreBound),
        Box::new(CopiesKeepOwner),
        Box::new(OthersRest),
        Box::new(HomeShowsMembers),
        Box::new(CountsAreTrue),
    ]
}

impl View {
    /// Whether the member allows Tenants of home's namespace.
    pub(super) fn allows(&self, member: &str) -> bool {
        let object = self.edge_cluster(member);
        let allowed = object.and_then(|object| object.pointer("/spec/allowedNamespaces"));
        let allowed = allowed.and_then(Value::as_array);
        allowed.is_none_or(|all| all.contains(&json!(TENANTS)))
    }

    /// The copy that the hub has placed for this Tenant of home.
    fn copy_of(&self, tenant: &Value, cluster: &str) -> Option<&Value> {
        let copy = self.tenant(cluster, text(tenant, "/metadata/name"))?;
        let uid = annotation(copy, HOME_UID_ANNOTATION);
        let is = is_copy(copy) && uid == Some(text(tenant, "/metadata/uid"));
        is.then_some(copy.as_ref())
    }
}

stateless! {
    /// The copy of a placed Tenant has the values and the pause of home, and is only on its member.
    CopiesMatch, "placed-copies-match",
    fn quiet(&mut self, view: &View) -> Check {
        if view.ever_restored() {
            return Ok(());
        }
        for (key, tenant) in view.all(HOME, GROUP, "tenants") {
            let on = annotation(tenant, PLACED_ON_ANNOTATION).unwrap_or_default();
            let placed = condition(tenant, "Placed").is_some_and(|(status, _)| status == "True");
            for cluster in view.settings.edges.iter().map(|edge| edge.name.as_str()) {
                let copy = view.copy_of(tenant, cluster);
                ensure(cluster == on || copy.is_none(), || {
                    format!("{cluster} has {}, which is placed on {on:?}", key.name)
                })?;
                if cluster == on && placed && view.must_converge(on) && !is_deleted(tenant) {
                    ensure(copy.is_some_and(|copy| follows(copy, tenant)), || {
                        format!("{} on {on} differs from home", key.name)
                    })?;
                }
            }
        }
        Ok(())
    }
}

fn follows(copy: &Value, tenant: &Value) -> bool {
    let paused = |object: &Value| annotation(object, PAUSED_ANNOTATION) == Some("true");
    copy.pointer("/spec/values") == tenant.pointer("/spec/values")
        && copy.pointer("/spec/clusterRef").is_none()
        && !is_deleted(copy)
        && paused(copy) == paused(tenant)
}

/// Krypton neither creates nor deletes the copy of a Tenant that is paused at home. It neither creates nor changes the
/// copy on a member that does not allow home's namespace.
#[derive(Debug, Default)]
struct HeldCopiesStay {
    /// Since when each member does not allow the namespace.
    closed: BTreeMap<String, Millis>,
}

impl Oracle for HeldCopiesStay {
    fn name(&self) -> &'static str {
        "held-copies-stay"
    }

    fn see(&mut self, view: &View, seen: &Observation) -> Check {
        let Event::Change { cluster, change } = &seen.event else {
            return Ok(());
        };
        let key = &change.key;
        if cluster == HOME && key.resource == "edgeclusters" {
            match view.allows(&key.name) {
                true => drop(self.closed.remove(&key.name)),
                false => drop(self.closed.entry(key.name.clone()).or_insert(seen.at)),
            }
        }
        let (before, after) = (change.before.as_deref(), change.after.as_deref());
        let copy = before.or(after).is_some_and(is_copy);
        if key.resource != "tenants" || !copy || !is_krypton(&change.by) || view.calm() <= LAG {
            return Ok(());
        }
        let created = before.is_none();
        let edited = before
            .zip(after)
            .is_some_and(|(before, after)| before.get("spec") != after.get("spec"));
        let begins =
            before.is_some_and(|before| !is_deleted(before)) && after.is_none_or(is_deleted);
        let long = |time: Option<Millis>| time.is_some_and(|time| time > LAG);
        let paused = long(view.paused_for(HOME, &key.name)) && (created || begins);
        let closed = self.closed.get(cluster).map(|since| seen.at - since);
        let closed = long(closed) && (created || edited);
        ensure(!paused && !closed, || {
            format!("{} writes the copy of {} on {cluster}", change.by, key.name)
        })
    }
}

stateless! {
    /// Krypton creates a copy only on the cluster that home has recorded.
    CopiesAreBound, "copies-are-on-recorded-cluster",
    fn see(&mut self, view: &View, seen: &Observation) -> Check {
        let Event::Change { cluster, change } = &seen.event else {
            return Ok(());
        };
        let created = change.after.as_deref().filter(|_| change.before.is_none());
        let Some(copy) = created.filter(|after| is_copy(after) && is_krypton(&change.by)) else {
            return Ok(());
        };
        let home = view.tenant(HOME, &change.key.name);
        let home = home.filter(|home| annotation(copy, HOME_UID_ANNOTATION) == Some(text(home, "/metadata/uid")));
        let recorded = home.map_or("", |home| text(home, "/status/placement/clusterUid"));
        let member = view.edge_cluster(cluster);
        let found = member.map_or("", |member| text(member, "/status/clusterUID"));
        ensure(recorded.is_empty() || found.is_empty() || recorded == found, || {
            format!("{} is placed on {found} instead of {recorded}", change.key.name)
        })
    }
}

stateless! {
    /// The copy of one Tenant of home becomes that of another only if people ask for it.
    CopiesKeepOwner, "copy-keeps-its-owner",
    fn see(&mut self, view: &View, seen: &Observation) -> Check {
        let Some((_, change, before, after)) = replaced(seen) else {
            return Ok(());
        };
        let owner = |object| annotation(object, HOME_UID_ANNOTATION);
        let changes = is_copy(before) && owner(before) != owner(after) && is_krypton(&change.by);
        let Some(home) = view.tenant(HOME, &change.key.name).filter(|_| changes) else {
            return Ok(());
        };
        let asked = annotation(home, ADOPT_ANNOTATION) == Some("true");
        // Krypton has restored the Tenant with its CRD.
        let restored = annotation(home, PREVIOUS_UID_ANNOTATION).is_some();
        ensure(asked || restored, || format!("{} adopts the copy of {}", change.by, change.key.name))
    }
}

stateless! {
    /// Helm installs no Tenant that names another member, nor one that names its member from a namespace that this
    /// member does not allow.
    OthersRest, "tenant-runs-on-its-member",
    fn see(&mut self, view: &View, seen: &Observation) -> Check {
        let run = started(view, seen).filter(|run| run.verb != "uninstall");
        let Some((run, cluster, tenant)) = run.and_then(|run| tenant_of(view, run)) else {
            return Ok(());
        };
        let member = Settings::member(cluster);
        let named = !text(tenant, "/spec/clusterRef/secretName").is_empty();
        let old = view.age(cluster, &krypton_key("tenants", TENANTS, text(tenant, "/metadata/name"))) > LAG
            && view.calm() > LAG;
        let others = member_of(tenant, cluster) != member && old;
        let closed = view.age(HOME, &krypton_key("edgeclusters", "", member)) > LAG && view.calm() > LAG;
        let refused = cluster == HOME && named && !view.allows(member) && closed;
        ensure(!refused && !others, || format!("{} installs {} on {member}", run.host, run.release))
    }
}

stateless! {
    /// A Tenant of home shows the state of each member that has a Tenant of its name, and of no other.
    HomeShowsMembers, "home-shows-members",
    fn quiet(&mut self, view: &View) -> Check {
        if view.ever_restored() || view.upgrades_fail() {
            return Ok(());
        }
        let tenants = view.all(HOME, GROUP, "tenants");
        for (key, tenant) in tenants.filter(|(_, tenant)| !is_deleted(tenant)) {
            let sole = match annotation(tenant, PLACED_ON_ANNOTATION) {
                Some(on) => on,
                None => text(tenant, "/spec/clusterRef/secretName"),
            };
            for edge in &view.settings.edges {
                let member = edge.name.as_str();
                let counts = sole.is_empty() || sole == member;
                let there = view.tenant(member, &key.name);
                let there = there.filter(|there| counts && member_of(there, member) == member);
                let joined = view.edge_cluster(member).is_some();
                if joined && !view.must_converge(member) || there.is_some_and(|tenant| is_deleted(tenant)) {
                    continue;
                }
                let kind = format!("ClusterReady/{member}");
                let shown = condition(tenant, &kind);
                let own = there.filter(|_| joined).and_then(|there| condition(there, &kind));
                let stays = sole == member && own.is_none();
                ensure(shown == own || stays, || {
                    let text = condition_text(tenant, &kind);
                    format!("home shows {text} for {} on {member} instead of {own:?}", key.name)
                })?;
            }
        }
        Ok(())
    }
}

stateless! {
    /// An EdgeCluster counts the Tenants that its member reconciles.
    CountsAreTrue, "members-count-tenants",
    fn quiet(&mut self, view: &View) -> Check {
        for (member, object) in view.converging().filter(|_| !view.without_hub) {
            let cluster = Settings::cluster(member);
            let tenants: Vec<&Value> = view
                .all(cluster, GROUP, "tenants")
                .map(|(_, tenant)| tenant.as_ref())
                .filter(|tenant| {
                    let named = !text(tenant, "/spec/clusterRef/secretName").is_empty();
                    cluster != HOME || !named || view.allows(member)
                })
                .filter(|tenant| member_of(tenant, cluster) == member)
                .collect();
            let total = object.pointer("/status/tenants/total").and_then(Value::as_u64);
            let is = tenants.len() as u64;
            ensure(total.unwrap_or_default() == is, || {
                format!("{member} counts {total:?} Tenants instead of {is}")
            })?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use krypton_types::names::{MANAGED_BY_HUB, MANAGED_BY_LABEL};
    use serde_json::json;

    use super::super::story::{Story, deletion, edge_cluster, tenant};
    use super::*;

    const AGENT: &str = "agent-edge-1";

    fn copy(uid: &str) -> Value {
        let mut tenant = tenant();
        tenant["metadata"]["uid"] = json!("uid-copy");
        tenant["metadata"]["labels"] = json!({MANAGED_BY_LABEL: MANAGED_BY_HUB});
        tenant["metadata"]["annotations"] = json!({HOME_UID_ANNOTATION: uid});
        tenant
    }

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
    fn story(namespace: &str, home: Value) -> Story {
        let mut member = edge_cluster("edge-1");
        member["spec"] = json!({"allowedNamespaces": [namespace]});
        let mut story = Story::new();
        story
            .renew()
            .put("hub-0", "home", member)
            .put("people", "home", home);
        story
    }

    #[test]
    fn copy_that_differs_from_home_is_found() {
        for (number, broken) in [(1, false), (2, true)] {
            let mut same = copy("uid-t0");
            same["spec"] = json!({"values": {"a": 1}});
            let home = on_home(json!({"values": {"a": number}}));
            let mut story = story(TENANTS, home);
            story.put(AGENT, "edge-1", same);
            assert_eq!(CopiesMatch.quiet(story.view()).is_err(), broken);
        }
        let mut story = story(TENANTS, on_home(json!({})));
        story.put("hub-0", "edge-2", copy("uid-t0"));
        assert!(CopiesMatch.quiet(story.view()).is_err());
    }

    #[test]
    fn write_of_a_held_copy_is_found() {
        let found = "held-copies-stay";
        for (namespace, oracle) in [(TENANTS, None), ("others", Some(found))] {
            let mut story = story(namespace, on_home(json!({})));
            story
                .wait(31_000)
                .renew()
                .put(AGENT, "edge-1", copy("uid-t0"));
            assert_eq!(story.violated(), oracle);
        }
        for (paused, oracle) in [("false", None), ("true", Some(found))] {
            let mut home = on_home(json!({}));
            home["metadata"]["annotations"][PAUSED_ANNOTATION] = json!(paused);
            let mut story = story(TENANTS, home);
            story
                .put(AGENT, "edge-1", copy("uid-t0"))
                .wait(31_000)
                .renew()
                .patch("people", "home", on_home(json!({})), &deletion())
                .patch(AGENT, "edge-1", copy("uid-t0"), &deletion());
            assert_eq!(story.violated(), oracle, "{paused}");
        }
    }

    #[test]
    fn copy_on_another_cluster_is_found() {
        let found = "copies-are-on-recorded-cluster";
        for (uid, oracle) in [("cluster-edge-1", None), ("other", Some(found))] {
            let mut home = on_home(json!({}));
            home["status"]["placement"]["clusterUid"] = json!(uid);
            let mut story = story(TENANTS, home);
            story.put(AGENT, "edge-1", copy("uid-t0"));
            assert_eq!(story.violated(), oracle);
        }
    }

    #[test]
    fn adoption_without_request_is_found() {
        for (adopt, oracle) in [("true", None), ("false", Some("copy-keeps-its-owner"))] {
            let mut home = on_home(json!({}));
            home["metadata"]["annotations"][ADOPT_ANNOTATION] = json!(adopt);
            let mut story = story(TENANTS, home);
            story
                .put(AGENT, "edge-1", copy("uid-old"))
                .put(AGENT, "edge-1", copy("uid-t0"));
            assert_eq!(story.violated(), oracle, "{adopt}");
        }
    }

    #[test]
    fn tenant_for_another_member_is_found() {
        let found = "tenant-runs-on-its-member";
        for (member, oracle) in [("edge-1", None), ("edge-2", Some(found))] {
            let mut named = tenant();
            named["spec"] = json!({"clusterRef": {"secretName": member}});
            let mut story = Story::new();
            story
                .put("people", "edge-1", named)
                .wait(31_000)
                .renew()
                .helm(1, AGENT, "upgrade", "tenant-t0-edge-1");
            assert_eq!(story.violated(), oracle);
        }
    }

    #[test]
    fn wrong_state_at_home_is_found() {
        let state = |status: &str| {
            let mut tenant = tenant();
            tenant["status"] = json!({"conditions": [
                {"type": "ClusterReady/edge-1", "status": status, "reason": "Installed"},
            ]});
            tenant
        };
        for (shown, broken) in [("True", false), ("False", true)] {
            let mut story = Story::new();
            story
                .renew()
                .put("hub-0", "home", edge_cluster("edge-1"))
                .put("people", "edge-1", state("True"))
                .put("people", "home", state(shown));
            assert_eq!(HomeShowsMembers.quiet(story.view()).is_err(), broken);
        }
        let mut story = Story::new();
        story.put("people", "home", state("True"));
        assert!(HomeShowsMembers.quiet(story.view()).is_err());
    }

    #[test]
    fn wrong_count_of_tenants_is_found() {
        for (total, broken) in [(1, false), (2, true)] {
            let mut member = edge_cluster("edge-1");
            member["status"]["tenants"] = json!({"total": total});
            let mut story = Story::new();
            story
                .renew()
                .put("people", "edge-1", tenant())
                .put("hub-0", "home", member);
            assert_eq!(CountsAreTrue.quiet(story.view()).is_err(), broken);
        }
    }
}
