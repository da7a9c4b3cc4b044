//! Invariants of objects and fields that belong to people.

use std::collections::BTreeMap;

use krypton_sim_apiserver::server::Key;
use krypton_types::names::{CA_SECRET, GROUP, MANAGED_BY_HUB, MANAGED_BY_LABEL};
use serde_json::{Value, json};

use super::view::{WATCH_LAG, starts_deletion};
use super::{AttributedWrite, Change, CheckResult, Oracle, View, ensure, invariant};
use crate::chart::PLANTED_SECRET;
use crate::faults::FOREIGN_PREFIX;
use crate::object::label;
use crate::observe::{Event, HelmEnd, Observation};
use crate::plan::{Action, HOME, SYSTEM_NAMESPACE};
use crate::time::Millis;

/// Label on namespaces that Krypton has created.
const CREATOR_LABEL: &str = "mesh.openkcm.io/created-for";
/// Time after a fault in which responses to earlier requests may still arrive.
const LIST_CALM: Millis = 1_000;

invariant! {
    /// Krypton keeps labels, annotations and finalizers that people have added to its objects.
    ForeignFieldsStay, "foreign-fields-stay",
    fn check_product_change(&mut self, _: &View, _: &str, change: &Change) -> CheckResult {
        let (Some(before), Some(after)) = (&change.before, &change.after) else {
            return Ok(());
        };
        if change.key.group != GROUP {
            return Ok(());
        }
        let after = foreign_keys(after);
        let lost = foreign_keys(before).into_iter().find(|each| !after.contains(each));
        match lost {
            Some(lost) => Err(format!("{} removes {lost} of {}", change.by, change.key.name)),
            None => Ok(()),
        }
    }
}

/// The keys of people in an object's metadata.
fn foreign_keys(object: &Value) -> Vec<&str> {
    let map = |field: &str| object.pointer(field).and_then(Value::as_object);
    let labels = map("/metadata/labels").into_iter().flatten();
    let annotations = map("/metadata/annotations").into_iter().flatten();
    let keys = labels.chain(annotations).map(|(key, _)| key.as_str());
    let finalizers = object
        .pointer("/metadata/finalizers")
        .and_then(Value::as_array);
    let finalizers = finalizers.into_iter().flatten().filter_map(Value::as_str);
    let all = keys.chain(finalizers);
    all.filter(|key| key.starts_with(FOREIGN_PREFIX)).collect()
}

invariant! {
    /// Krypton never changes the spec of an existing object of people.
    SpecsBelongToPeople, "specs-belong-to-people",
    fn check_product_change(&mut self, _: &View, _: &str, change: &Change) -> CheckResult {
        let (Some(before), Some(after)) = (&change.before, &change.after) else {
            return Ok(());
        };
        let is_placed = label(before, MANAGED_BY_LABEL) == Some(MANAGED_BY_HUB);
        // The API server adds the default, an empty spec.
        let default = json!({});
        let [old, new] = [before, after].map(|object| object.get("spec").unwrap_or(&default));
        ensure(change.key.group != GROUP || is_placed || old == new, || {
            let key = &change.key;
            format!("{} changes the spec of {} {}", change.by, key.resource, key.name)
        })
    }
}

invariant! {
    /// Krypton deletes no Tenant or KryptonDeployment that people want.
    ObjectsOfPeopleStay, "objects-of-people-stay",
    fn check_product_change(&mut self, view: &View, cluster: &str, change: &Change) -> CheckResult {
        let key = &change.key;
        // A Tenant that people have deleted is deleted again after Krypton has restored it with its CRD.
        let is_wanted = match (key.group.as_str(), key.resource.as_str()) {
            (GROUP, "tenants") => view.wants_tenant(cluster, &key.name),
            (GROUP, "kryptondeployments") => true,
            _ => false,
        };
        let before = change.before.as_deref();
        let managed_by = before.and_then(|before| label(before, MANAGED_BY_LABEL));
        let is_allowed = !is_wanted || !starts_deletion(change) || managed_by == Some(MANAGED_BY_HUB);
        ensure(is_allowed, || format!("{} deletes {} {}", change.by, key.resource, key.name))
    }
}

invariant! {
    /// Krypton neither changes nor deletes a namespace that it did not create.
    UnmarkedNamespacesStay, "unmarked-namespaces-stay",
    fn check_product_change(&mut self, _: &View, _: &str, change: &Change) -> CheckResult {
        let key = &change.key;
        let Some(before) = change.before.as_deref() else {
            return Ok(());
        };
        let is_marked = label(before, CREATOR_LABEL).is_some() || label(before, MANAGED_BY_LABEL).is_some();
        let is_namespace = key.group.is_empty() && key.resource == "namespaces";
        let is_namespace_of_people = is_namespace && key.name != SYSTEM_NAMESPACE;
        ensure(!is_namespace_of_people || is_marked, || {
            format!("{} writes the unmarked namespace {}", change.by, key.name)
        })
    }
}

invariant! {
    /// Krypton deletes no namespace that contains an object of people, if it must have seen the object.
    OccupiedNamespacesStay {
        /// When each host has last listed the ConfigMaps of a namespace, by host, cluster and namespace.
        lists: BTreeMap<(String, String, String), Millis>,
    },
    "occupied-namespaces-stay",
    fn check_observation(&mut self, view: &View, observation: &Observation) -> CheckResult {
        if let Event::Responded { host, cluster, method, path, code: 200, .. } = &observation.event
            && method == "GET"
            && let Some(namespace) = namespace_of_list(path)
        {
            let key = (host.clone(), cluster.clone(), namespace.to_owned());
            // During a fault, the list may be incomplete, or a response to a request that the host has given up.
            match view.calm_time() > LIST_CALM {
                true => drop(self.lists.insert(key, observation.at)),
                false => drop(self.lists.remove(&key)),
            }
        }
        Ok(())
    }

    fn check_write(&mut self, view: &View, write: &AttributedWrite<'_>) -> CheckResult {
        let AttributedWrite { host, cluster, change } = *write;
        let key = &change.key;
        if key.resource != "namespaces" || !starts_deletion(change) || view.recently_restored(cluster) {
            return Ok(());
        }
        let list = (host.to_owned(), cluster.to_owned(), key.name.clone());
        let time_since_list = self.lists.get(&list).map(|at| view.now - at);
        let is_seen = |key: &Key| {
            let age = view.time_since_change(cluster, key);
            let is_listed = time_since_list.is_some_and(|time| age > time);
            is_listed || age > WATCH_LAG && view.calm_time() > WATCH_LAG
        };
        let occupant = format!("{FOREIGN_PREFIX}occupant");
        let mut objects = view.objects_in(cluster, &key.name);
        match objects.find(|(key, object)| label(object, &occupant).is_some() && is_seen(key)) {
            Some((occupant, _)) => Err(format!(
                "{host} deletes the namespace {} with {}",
                key.name, occupant.name
            )),
            None => Ok(()),
        }
    }
}

/// The namespace whose ConfigMaps a request of this path lists.
fn namespace_of_list(path: &str) -> Option<&str> {
    let (path, _) = path.split_once('?').unwrap_or((path, ""));
    let namespace = path.strip_suffix("/configmaps")?;
    let (_, namespace) = namespace.rsplit_once("/api/v1/namespaces/")?;
    Some(namespace)
}

invariant! {
    /// Krypton deletes none of its CRDs.
    CrdsStay, "crds-stay",
    fn check_product_change(&mut self, _: &View, _: &str, change: &Change) -> CheckResult {
        let key = &change.key;
        let is_krypton_crd = key.resource == "customresourcedefinitions" && key.name.ends_with(GROUP);
        ensure(!is_krypton_crd || !starts_deletion(change), || {
            format!("{} deletes the CRD {}", change.by, key.name)
        })
    }
}

invariant! {
    /// The hubs share one CA. None replaces or deletes it unless people have requested a rotation.
    CaStays {
        is_rotation_requested: bool,
    },
    "ca-stays",
    fn check_observation(&mut self, _: &View, observation: &Observation) -> CheckResult {
        let action = observation.event.action();
        self.is_rotation_requested |= matches!(action, Some((Action::RotateCa, _)));
        Ok(())
    }

    fn check_product_change(&mut self, view: &View, cluster: &str, change: &Change) -> CheckResult {
        let key = &change.key;
        let may_change = self.is_rotation_requested || view.recently_restored(HOME);
        let is_ca = cluster == HOME && key.resource == "secrets" && key.name == CA_SECRET;
        if !is_ca || may_change {
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

invariant! {
    /// Planted secrets appear only in Secrets.
    SecretsStaySecret, "secrets-stay-secret",
    fn check_observation(&mut self, _: &View, observation: &Observation) -> CheckResult {
        let location = match &observation.event {
            Event::Change { change, .. } => {
                let object = change.after.as_deref().filter(|_| change.key.resource != "secrets");
                let is_leaked = object.is_some_and(contains_planted_secret);
                is_leaked.then(|| format!("{} {}", change.key.resource, change.key.name))
            }
            Event::Log { host, line } => {
                line.contains(PLANTED_SECRET).then(|| format!("the log of {host}"))
            }
            Event::HelmStarted { host, arguments, .. } => arguments
                .iter()
                .any(|argument| argument.contains(PLANTED_SECRET))
                .then(|| format!("a command line of {host}")),
            Event::HelmEnded { host, end: HelmEnd::Exited { stderr, .. }, .. } => {
                stderr.contains(PLANTED_SECRET).then(|| format!("an error of Helm on {host}"))
            }
            Event::Responded { host, path, .. } => {
                path.contains(PLANTED_SECRET).then(|| format!("a path of {host}"))
            }
            _ => None,
        };
        match location {
            Some(location) => Err(format!("a secret is in {location}")),
            None => Ok(()),
        }
    }
}

fn contains_planted_secret(value: &Value) -> bool {
    match value {
        Value::String(text) => text.contains(PLANTED_SECRET),
        Value::Array(values) => values.iter().any(contains_planted_secret),
        // Managed fields contain only names of fields.
        Value::Object(fields) => fields
            .iter()
            .any(|(name, value)| name != "managedFields" && contains_planted_secret(value)),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::super::story::{
        AGENT, History, config_map, deletion_patch, edge_cluster, namespace, tenant, tenant_crd,
    };
    use super::*;
    use crate::plan::TENANT_NAMESPACE;

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
            let mut history = History::new();
            history
                .put("people", "edge-1", tenant())
                .patch("people", "edge-1", tenant(), &foreign)
                .patch(actor, "edge-1", tenant(), &patch);
            assert_eq!(history.violated_oracle(), oracle, "{patch}");
        }
    }

    #[test]
    fn changed_spec_is_found() {
        let spec = json!({"spec": {"workspace": "other"}});
        for (actor, oracle) in [("people", None), (AGENT, Some("specs-belong-to-people"))] {
            History::new()
                .put("people", "edge-1", tenant())
                .patch(actor, "edge-1", tenant(), &spec)
                .assert_outcome(oracle);
        }
    }

    #[test]
    fn deletion_of_a_tenant_by_krypton_is_found() {
        History::new()
            .put("people", "edge-1", tenant())
            .patch("people", "edge-1", tenant(), &deletion_patch())
            .delete(AGENT, "edge-1", &tenant())
            .assert_no_violation();
        let mut history = History::new();
        history
            .put("people", "edge-1", tenant())
            .delete(AGENT, "edge-1", &tenant());
        assert!(history.violated_oracle().is_some());
        let check = ObjectsOfPeopleStay::default().name();
        History::new()
            .put("people", "edge-1", tenant())
            .patch(AGENT, "edge-1", tenant(), &deletion_patch())
            .assert_violated(check);
    }

    #[test]
    fn write_to_an_unmarked_namespace_is_found() {
        for (marked, oracle) in [(true, None), (false, Some("unmarked-namespaces-stay"))] {
            History::new()
                .put("people", "edge-1", namespace("t0", marked))
                .patch(AGENT, "edge-1", namespace("t0", marked), &deletion_patch())
                .assert_outcome(oracle);
        }
    }

    #[test]
    fn deletion_of_an_occupied_namespace_is_found() {
        const VIOLATED: Option<&str> = Some("occupied-namespaces-stay");
        let list = "/api/v1/namespaces/t0/configmaps?&limit=50";
        let other = "/api/v1/namespaces/t1/configmaps?&limit=50";
        let object = "/api/v1/namespaces/t0/configmaps/a";
        for (fault, before, path, after, oracle) in [
            ("", 1_000, other, 1_000, None),
            ("", 1_000, object, 1_000, None),
            ("", 0, list, 1_000, None),
            ("", 1_000, list, 1_000, VIOLATED),
            ("", 30_000, other, 1_000, VIOLATED),
            ("server edge-1 empty for 9.000", 1_000, list, 1_000, None),
        ] {
            let mut occupant = config_map("t0", "occupant");
            occupant["metadata"]["labels"] = json!({"people.example/occupant": "true"});
            History::new()
                .wait(5_000)
                .put(AGENT, "edge-1", namespace("t0", true))
                .put("people", "edge-1", occupant)
                .fault(fault)
                .wait(before)
                .respond(AGENT, "edge-1", "GET", path, 200)
                .wait(after)
                .patch(AGENT, "edge-1", namespace("t0", true), &deletion_patch())
                .assert_outcome(oracle);
        }
    }

    #[test]
    fn deletion_of_a_crd_is_found() {
        for (actor, oracle) in [("people", None), ("hub-0", Some("crds-stay"))] {
            History::new()
                .patch(actor, "home", tenant_crd(), &deletion_patch())
                .assert_outcome(oracle);
        }
    }

    #[test]
    fn replaced_ca_is_found() {
        let ca = |key: &str| {
            json!({
                "apiVersion": "v1",
                "kind": "Secret",
                "metadata": {"name": CA_SECRET, "namespace": SYSTEM_NAMESPACE},
                "data": {"tls.key": key},
            })
        };
        for (key, oracle) in [("one", None), ("two", Some("ca-stays"))] {
            History::new()
                .put("hub-0", "home", ca("one"))
                .put("hub-1", "home", ca(key))
                .assert_outcome(oracle);
        }
    }

    #[test]
    fn planted_secret_outside_secrets_is_found() {
        let mut member = edge_cluster("edge-1");
        member["status"]["message"] = json!(format!("token {PLANTED_SECRET}-7 is invalid"));
        History::new()
            .put("people", "home", member)
            .assert_violated("secrets-stay-secret");
        let line = format!("using {PLANTED_SECRET}-7");
        let host = AGENT.to_owned();
        History::new()
            .observe(Event::Log { host, line })
            .assert_violated("secrets-stay-secret");
        let mut history = History::new();
        let mut secret = config_map(TENANT_NAMESPACE, "s");
        secret["kind"] = json!("Secret");
        secret["data"] = json!({"token": PLANTED_SECRET});
        history.put("people", "home", secret);
        history.assert_no_violation();
    }
}
