//! Invariants of objects and fields that belong to people.

use krypton_types::names::{CA_SECRET, GROUP, MANAGED_BY_HUB, MANAGED_BY_LABEL};
use serde_json::{Value, json};

use super::view::{is_deleted, is_product, label};
use super::{Check, Oracle, View, ensure, stateless};
use crate::conductor::Millis;
use crate::faults::FOREIGN;
use crate::observe::{Event, HelmEnd, Observation};
use crate::plan::{Action, HOME, SYSTEM};
use krypton_sim_apiserver::server::Change;

/// Start of all secret texts of the stage: in kubeconfigs, join tokens and chart values. It appears in Secrets only.
pub const PLANTED: &str = "planted-secret";
/// Label on namespaces that Krypton has created.
const CREATOR: &str = "mesh.openkcm.io/created-for";
const LAG: Millis = 30_000;
const RECOVERY: Millis = 120_000;

pub(super) fn all() -> Vec<Box<dyn Oracle>> {
    vec![
        Box::new(ForeignStays),
        Box::new(SpecsStay),
        Box::new(TenantsStay),
        Box::new(NamespacesStay),
        Box::new(OccupiedStays),
        Box::new(CrdsStay),
        Box::new(CaStays::default()),
        Box::new(SecretsStaySecret),
    ]
}

/// A change that Krypton or its Helm has made.
fn change_of_product(seen: &Observation) -> Option<(&str, &Change)> {
    match &seen.event {
        Event::Change { cluster, change } if is_product(&change.by) => Some((cluster, change)),
        _ => None,
    }
}

/// Whether the change deletes the object, or marks it as being deleted.
fn begins_deletion(change: &Change) -> bool {
    let before = change.before.as_deref();
    before.is_some_and(|before| !is_deleted(before))
        && change.after.as_deref().is_none_or(is_deleted)
}

stateless! {
    /// Krypton keeps labels, annotations and finalizers that people have added to its objects.
    ForeignStays, "foreign-fields-stay",
    fn see(&mut self, _: &View, seen: &Observation) -> Check {
        let Some((_, change)) = change_of_product(seen) else {
            return Ok(());
        };
        let (Some(before), Some(after)) = (&change.before, &change.after) else {
            return Ok(());
        };
        if change.key.group != GROUP {
            return Ok(());
        }
        let after = foreign(after);
        let lost = foreign(before).into_iter().find(|each| !after.contains(each));
        match lost {
            Some(lost) => Err(format!("{} removes {lost} of {}", change.by, change.key.name)),
            None => Ok(()),
        }
    }
}

/// The keys of people in an object's metadata.
fn foreign(object: &Value) -> Vec<&str> {
    let map = |field: &str| object.pointer(field).and_then(Value::as_object);
    let labels = map("/metadata/labels").into_iter().flatten();
    let annotations = map("/metadata/annotations").into_iter().flatten();
    let keys = labels.chain(annotations).map(|(key, _)| key.as_str());
    let finalizers = object
        .pointer("/metadata/finalizers")
        .and_then(Value::as_array);
    let finalizers = finalizers.into_iter().flatten().filter_map(Value::as_str);
    let all = keys.chain(finalizers);
    all.filter(|key| key.starts_with(FOREIGN)).collect()
}

stateless! {
    /// Krypton never changes the spec of an existing object of people.
    SpecsStay, "specs-belong-to-people",
    fn see(&mut self, _: &View, seen: &Observation) -> Check {
        let Some((_, change)) = change_of_product(seen) else {
            return Ok(());
        };
        let (Some(before), Some(after)) = (&change.before, &change.after) else {
            return Ok(());
        };
        let placed = label(before, MANAGED_BY_LABEL) == Some(MANAGED_BY_HUB);
        // The API server adds the default, an empty spec.
        let spec = |object: &Value| object.get("spec").cloned().unwrap_or_else(|| json!({}));
        let same = spec(before) == spec(after);
        ensure(same || change.key.group != GROUP || placed, || {
            let key = &change.key;
            format!("{} changes the spec of {} {}", change.by, key.resource, key.name)
        })
    }
}

stateless! {
    /// Krypton deletes no Tenant or KryptonDeployment that people want.
    TenantsStay, "objects-of-people-stay",
    fn see(&mut self, view: &View, seen: &Observation) -> Check {
        let Some((cluster, change)) = change_of_product(seen) else {
            return Ok(());
        };
        let key = &change.key;
        // A Tenant that people have deleted is deleted again after Krypton has restored it with its CRD.
        let theirs = match (key.group.as_str(), key.resource.as_str()) {
            (GROUP, "tenants") => view.wants_tenant(cluster, &key.name),
            (GROUP, "kryptondeployments") => true,
            _ => false,
        };
        let before = change.before.as_deref();
        let placed = before.and_then(|before| label(before, MANAGED_BY_LABEL));
        let legal = !theirs || !begins_deletion(change) || placed == Some(MANAGED_BY_HUB);
        ensure(legal, || format!("{} deletes {} {}", change.by, key.resource, key.name))
    }
}

stateless! {
    /// Krypton neither changes nor deletes a namespace that it did not create.
    NamespacesStay, "unmarked-namespaces-stay",
    fn see(&mut self, _: &View, seen: &Observation) -> Check {
        let Some((_, change)) = change_of_product(seen) else {
            return Ok(());
        };
        let key = &change.key;
        let Some(before) = change.before.as_deref() else {
            return Ok(());
        };
        let marked = label(before, CREATOR).is_some() || label(before, MANAGED_BY_LABEL).is_some();
        let theirs = key.group.is_empty() && key.resource == "namespaces" && key.name != SYSTEM;
        ensure(!theirs || marked, || {
            format!("{} writes the unmarked namespace {}", change.by, key.name)
        })
    }
}

stateless! {
    /// Krypton deletes no namespace that contains an object of people.
    OccupiedStays, "occupied-namespaces-stay",
    fn see(&mut self, view: &View, seen: &Observation) -> Check {
        let Some((cluster, change)) = change_of_product(seen) else {
            return Ok(());
        };
        let key = &change.key;
        if key.resource != "namespaces" || !begins_deletion(change) {
            return Ok(());
        }
        let occupant = format!("{FOREIGN}occupant");
        let mut within = view.within(cluster, &key.name);
        let found = within.find(|(key, object)| {
            label(object, &occupant).is_some() && view.age(cluster, key) > LAG
        });
        let restored = view.restored_within(cluster, RECOVERY);
        match found.filter(|_| view.calm() > LAG && !restored) {
            Some((occupant, _)) => Err(format!(
                "{} deletes the namespace {} with {}",
                change.by, key.name, occupant.name
            )),
            None => Ok(()),
        }
    }
}

stateless! {
    /// Krypton deletes none of its CRDs.
    CrdsStay, "crds-stay",
    fn see(&mut self, _: &View, seen: &Observation) -> Check {
        let Some((_, change)) = change_of_product(seen) else {
            return Ok(());
        };
        let key = &change.key;
        let ours = key.resource == "customresourcedefinitions" && key.name.ends_with(GROUP);
        ensure(!ours || !begins_deletion(change), || {
            format!("{} deletes the CRD {}", change.by, key.name)
        })
    }
}

/// The hubs share one CA. None replaces or deletes it unless people have requested a rotation.
#[derive(Debug, Default)]
struct CaStays {
    rotates: bool,
}

impl Oracle for CaStays {
    fn name(&self) -> &'static str {
        "ca-stays"
    }

    fn see(&mut self, view: &View, seen: &Observation) -> Check {
        if let Event::Fault { text } = &seen.event {
            self.rotates |= text.parse() == Ok(Action::RotateCa);
        }
        let Some((HOME, change)) = change_of_product(seen) else {
            return Ok(());
        };
        let key = &change.key;
        let may_change = self.rotates || view.restored_within(HOME, RECOVERY);
        if key.resource != "secrets" || key.name != CA_SECRET || may_change {
            return Ok(());
        }
        let Some(before) = change.before.as_deref() else {
            return Ok(());
        };
        let data = change.after.as_deref().and_then(|after| after.get("data"));
        ensure(data == before.get("data"), || {
            format!("{} replaces the CA", change.by)
        })
    }
}

stateless! {
    /// Planted secrets appear only in Secrets.
    SecretsStaySecret, "secrets-stay-secret",
    fn see(&mut self, _: &View, seen: &Observation) -> Check {
        let place = match &seen.event {
            Event::Change { change, .. } => {
                let object = change.after.as_deref().filter(|_| change.key.resource != "secrets");
                // Managed fields contain only names of fields.
                let found = object.is_some_and(contains);
                found.then(|| format!("{} {}", change.key.resource, change.key.name))
            }
            Event::Log { host, line } => {
                line.contains(PLANTED).then(|| format!("the log of {host}"))
            }
            Event::HelmStarted { host, arguments, .. } => arguments
                .iter()
                .any(|argument| argument.contains(PLANTED))
                .then(|| format!("a command line of {host}")),
            Event::HelmEnded { host, how: HelmEnd::Exited { stderr, .. }, .. } => {
                stderr.contains(PLANTED).then(|| format!("an error of Helm on {host}"))
            }
            Event::Answered { host, path, .. } => {
                path.contains(PLANTED).then(|| format!("a path of {host}"))
            }
            _ => None,
        };
        match place {
            Some(place) => Err(format!("a secret is in {place}")),
            None => Ok(()),
        }
    }
}

fn contains(value: &Value) -> bool {
    match value {
        Value::String(text) => text.contains(PLANTED),
        Value::Array(all) => all.iter().any(contains),
        Value::Object(fields) => fields.values().any(contains),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::super::story::{Story, config_map, deletion, edge_cluster, namespace, tenant};
    use super::*;
    use crate::plan::TENANTS;

    const AGENT: &str = "agent-edge-1";

    #[test]
    fn removed_foreign_field_is_found() {
        let foreign = json!({"metadata": {
            "labels": {"people.example/mark": "kept", "other": "x"},
            "finalizers": ["people.example/hold"],
        }});
        for (actor, patch, oracle) in [
            (
                AGENT,
                json!({"metadata": {"labels": {"other": null}}}),
                None,
            ),
            ("people", json!({"metadata": {"labels": null}}), None),
            (
                AGENT,
                json!({"metadata": {"labels": {"people.example/mark": null}}}),
                Some("foreign-fields-stay"),
            ),
            (
                AGENT,
                json!({"metadata": {"finalizers": []}}),
                Some("foreign-fields-stay"),
            ),
        ] {
            let mut story = Story::new();
            story
                .put("people", "edge-1", tenant())
                .patch("people", "edge-1", tenant(), &foreign)
                .patch(actor, "edge-1", tenant(), &patch);
            assert_eq!(story.violated(), oracle, "{patch}");
        }
    }

    #[test]
    fn changed_spec_is_found() {
        let spec = json!({"spec": {"workspace": "other"}});
        for (actor, oracle) in [("people", None), (AGENT, Some("specs-belong-to-people"))] {
            let mut story = Story::new();
            story
                .put("people", "edge-1", tenant())
                .patch(actor, "edge-1", tenant(), &spec);
            assert_eq!(story.violated(), oracle);
        }
    }

    #[test]
    fn deletion_of_a_tenant_by_krypton_is_found() {
        let mut story = Story::new();
        story
            .put("people", "edge-1", tenant())
            .patch("people", "edge-1", tenant(), &deletion())
            .delete(AGENT, "edge-1", &tenant());
        story.assert_kept();
        let mut story = Story::new();
        story
            .put("people", "edge-1", tenant())
            .delete(AGENT, "edge-1", &tenant());
        assert!(story.violated().is_some());
        let check = TenantsStay.name();
        let mut story = Story::new();
        story
            .put("people", "edge-1", tenant())
            .patch(AGENT, "edge-1", tenant(), &deletion());
        story.assert_broken(check);
    }

    #[test]
    fn write_to_an_unmarked_namespace_is_found() {
        for (marked, oracle) in [(true, None), (false, Some("unmarked-namespaces-stay"))] {
            let mut story = Story::new();
            story
                .put("people", "edge-1", namespace("t0", marked))
                .patch(AGENT, "edge-1", namespace("t0", marked), &deletion());
            assert_eq!(story.violated(), oracle);
        }
    }

    #[test]
    fn deletion_of_an_occupied_namespace_is_found() {
        for (pause, oracle) in [(1_000, None), (31_000, Some("occupied-namespaces-stay"))] {
            let mut occupant = config_map("t0", "occupant");
            occupant["metadata"]["labels"] = json!({"people.example/occupant": "true"});
            let mut story = Story::new();
            story
                .put(AGENT, "edge-1", namespace("t0", true))
                .put("people", "edge-1", occupant)
                .wait(pause)
                .patch(AGENT, "edge-1", namespace("t0", true), &deletion());
            assert_eq!(story.violated(), oracle);
        }
    }

    #[test]
    fn deletion_of_a_crd_is_found() {
        let crd = json!({
            "apiVersion": "apiextensions.k8s.io/v1",
            "kind": "CustomResourceDefinition",
            "metadata": {"name": "tenants.mesh.openkcm.io"},
        });
        for (actor, oracle) in [("people", None), ("hub-0", Some("crds-stay"))] {
            let mut story = Story::new();
            story.patch(actor, "home", crd.clone(), &deletion());
            assert_eq!(story.violated(), oracle);
        }
    }

    #[test]
    fn replaced_ca_is_found() {
        let ca = |key: &str| {
            json!({
                "apiVersion": "v1",
                "kind": "Secret",
                "metadata": {"name": CA_SECRET, "namespace": SYSTEM},
                "data": {"tls.key": key},
            })
        };
        for (key, oracle) in [("one", None), ("two", Some("ca-stays"))] {
            let mut story = Story::new();
            story
                .put("hub-0", "home", ca("one"))
                .put("hub-1", "home", ca(key));
            assert_eq!(story.violated(), oracle);
        }
    }

    #[test]
    fn planted_secret_outside_secrets_is_found() {
        let mut member = edge_cluster("edge-1");
        member["status"]["message"] = json!(format!("token {PLANTED}-7 is invalid"));
        let mut story = Story::new();
        story.put("people", "home", member);
        story.assert_broken("secrets-stay-secret");
        let line = format!("using {PLANTED}-7");
        let host = AGENT.to_owned();
        let mut story = Story::new();
        story.see(Event::Log { host, line });
        story.assert_broken("secrets-stay-secret");
        let mut story = Story::new();
        let mut secret = config_map(TENANTS, "s");
        secret["kind"] = json!("Secret");
        secret["data"] = json!({"token": PLANTED});
        story.put("people", "home", secret);
        story.assert_kept();
    }
}
