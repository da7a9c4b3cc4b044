//! CustomResourceDefinitions: conditions, serving and deletion.

use std::sync::Arc;

use jiff::Timestamp;
use serde_json::{Value, json};

use crate::meta;
use crate::resources::{Generation, Kind};
use crate::schema::Schema;
use crate::server::{ApiServer, Key};
use crate::store::{self, Record};

const CLEANUP: &str = "customresourcecleanup.apiextensions.k8s.io";

fn key(name: &str) -> Key {
    Key {
        group: "apiextensions.k8s.io".to_owned(),
        resource: "customresourcedefinitions".to_owned(),
        namespace: String::new(),
        name: name.to_owned(),
    }
}

/// Whether the CRD is new, changed, being deleted or gone.
pub(crate) fn needs_work(record: &Record) -> bool {
    let generation = |object: &Arc<Value>| object["metadata"]["generation"].clone();
    record.before.as_ref().map(generation) != record.after.as_ref().map(generation)
}

/// Completes a new or changed CRD.
pub(crate) fn set_defaults(object: &mut Value) {
    let spec = &mut object["spec"];
    if spec["conversion"].is_null() {
        spec["conversion"] = json!({"strategy": "None"});
    }
    let kind = spec["names"]["kind"]
        .as_str()
        .unwrap_or_default()
        .to_owned();
    if spec["names"]["singular"].is_null() {
        spec["names"]["singular"] = kind.to_lowercase().into();
    }
    if spec["names"]["listKind"].is_null() {
        spec["names"]["listKind"] = format!("{kind}List").into();
    }
}

/// Returns the status of a new CRD.
pub(crate) fn initial_status(object: &Value) -> Value {
    let versions = object["spec"]["versions"].as_array();
    let versions = versions.into_iter().flatten();
    let stored: Vec<Value> = versions
        .filter(|version| version["storage"] == true)
        .map(|version| version["name"].clone())
        .collect();
    json!({
        "acceptedNames": {"kind": "", "plural": ""},
        "conditions": null,
        "storedVersions": stored,
    })
}

fn set_condition(object: &mut Value, condition: [&str; 4], now: Timestamp) {
    let [kind, status, reason, message] = condition;
    let entry = json!({
        "type": kind,
        "status": status,
        "reason": reason,
        "message": message,
        "lastTransitionTime": meta::seconds(now),
    });
    let conditions = &mut object["status"]["conditions"];
    if !conditions.is_array() {
        *conditions = json!([]);
    }
    let Some(conditions) = conditions.as_array_mut() else {
        return;
    };
    match conditions.iter_mut().find(|known| known["type"] == kind) {
        Some(known) if known["status"] == status => {
            let since = known["lastTransitionTime"].clone();
            *known = entry;
            known["lastTransitionTime"] = since;
        }
        Some(known) => *known = entry,
        None => conditions.push(entry),
    }
}

/// Adds the finalizer and the condition of a deletion.
pub(crate) fn mark_deleted(object: &mut Value, now: Timestamp) {
    let mut finalizers: Vec<Value> = meta::finalizers(object).map(Value::from).collect();
    if !finalizers.iter().any(|finalizer| finalizer == CLEANUP) {
        finalizers.push(CLEANUP.into());
    }
    meta::set(object, "finalizers", finalizers);
    let condition = [
        "Terminating",
        "True",
        "InstanceDeletionPending",
        "CustomResourceDefinition marked for deletion; CustomResource deletion will begin soon",
    ];
    set_condition(object, condition, now);
}

/// Returns the kind of each served version.
fn kinds(crd: &Value) -> Vec<Kind> {
    let spec = &crd["spec"];
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let list = |value: &Value| meta::strings(value).map(str::to_owned).collect();
    let (group, names) = (text(&spec["group"]), &spec["names"]);
    let versions = spec["versions"].as_array().into_iter().flatten();
    let stored = versions.clone().find(|version| version["storage"] == true);
    let stored = stored.map_or_else(String::new, |version| text(&version["name"]));
    let served = versions.filter(|version| version["served"] == true);
    let kind = |version: &Value| {
        let status = !version["subresources"]["status"].is_null();
        Kind {
            group: group.clone(),
            version: text(&version["name"]),
            resource: text(&names["plural"]),
            singular: text(&names["singular"]),
            kind: text(&names["kind"]),
            list: text(&names["listKind"]),
            namespaced: spec["scope"] == "Namespaced",
            status,
            generation: match status {
                true => Generation::Spec,
                false => Generation::Content,
            },
            unconditional: false,
            create_on_update: false,
            folder: format!("{group}/{}", text(&names["plural"])),
            short: list(&names["shortNames"]),
            categories: list(&names["categories"]),
            normalize: None,
            fields: None,
            schema: Some(Arc::new(Schema::new(
                version["schema"]["openAPIV3Schema"].clone(),
            ))),
            stored_as: format!("{group}/{stored}"),
        }
    };
    served.map(kind).collect()
}

impl ApiServer {
    pub(crate) fn crd(&self, name: &str) -> Option<Arc<Value>> {
        self.get(&key(name))
    }

    pub(crate) fn is_crd_terminating(&self, kind: &Kind) -> bool {
        let crd = self.crd(&kind.qualified());
        crd.is_some_and(|crd| meta::is_terminating(&crd))
    }

    pub(crate) fn sync_crd(&mut self, name: &str, now: Timestamp) {
        match self.crd(name) {
            None => {
                let (resource, group) = name.split_once('.').unwrap_or_default();
                self.kinds.withdraw(group, resource);
                self.watches.end_resource(group, resource);
            }
            Some(crd) if meta::is_terminating(&crd) => self.delete_instances(name, &crd, now),
            Some(crd) => self.establish(name, &crd, now),
        }
    }

    fn establish(&mut self, name: &str, crd: &Arc<Value>, now: Timestamp) {
        let (resource, group) = name.split_once('.').unwrap_or_default();
        self.kinds.withdraw(group, resource);
        self.watches.end_resource(group, resource);
        let mut next = (**crd).clone();
        let names = &crd["spec"]["names"];
        if let Some((reason, message, accepted)) = self.conflict(name, group, names) {
            let condition = ["NamesAccepted", "False", reason, &message];
            set_condition(&mut next, condition, now);
            let condition = [
                "Established",
                "False",
                "NotAccepted",
                "not all names are accepted",
            ];
            set_condition(&mut next, condition, now);
            next["status"]["acceptedNames"] = accepted;
            self.controller_update(&key(name), "status", now, next);
            return;
        }
        for kind in kinds(crd) {
            self.kinds.serve(kind);
        }
        let accepted = ["NamesAccepted", "True", "NoConflicts", "no conflicts found"];
        set_condition(&mut next, accepted, now);
        let established = [
            "Established",
            "True",
            "InitialNamesAccepted",
            "the initial names have been accepted",
        ];
        set_condition(&mut next, established, now);
        next["status"]["acceptedNames"] = crd["spec"]["names"].clone();
        for version in meta::strings(&initial_status(crd)["storedVersions"]) {
            if let Some(stored) = next["status"]["storedVersions"].as_array_mut()
                && !stored.iter().any(|known| known == version)
            {
                stored.push(version.into());
            }
        }
        self.controller_update(&key(name), "status", now, next);
    }

    /// Returns the last name that another CRD of the group uses, and the accepted names.
    fn conflict(
        &self,
        name: &str,
        group: &str,
        names: &Value,
    ) -> Option<(&'static str, String, Value)> {
        let others = self.all("apiextensions.k8s.io", "customresourcedefinitions");
        let others = others.iter().filter(|other| {
            meta::name(other) != name && other["spec"]["group"].as_str() == Some(group)
        });
        let accepted: Vec<&Value> = others
            .map(|other| &other["status"]["acceptedNames"])
            .collect();
        let resources = ["plural", "singular"];
        let kinds = ["kind", "listKind"];
        let mut result = json!({"kind": "", "plural": ""});
        let mut conflict = None;
        let fields = [
            ("plural", &resources, "PluralConflict"),
            ("singular", &resources, "SingularConflict"),
            ("kind", &kinds, "KindConflict"),
            ("listKind", &kinds, "ListKindConflict"),
        ];
        for (field, peers, reason) in fields {
            let Some(wanted) = names[field].as_str().filter(|wanted| !wanted.is_empty()) else {
                continue;
            };
            let uses = |other: &&Value| peers.iter().any(|peer| other[*peer] == wanted);
            match accepted.iter().any(uses) {
                true => conflict = Some((reason, format!("{wanted:?} is already in use"))),
                false => result[field] = wanted.into(),
            }
        }
        conflict.map(|(reason, message)| (reason, message, result))
    }

    /// Deletes the custom resources, and then the CRD.
    fn delete_instances(&mut self, name: &str, crd: &Arc<Value>, now: Timestamp) {
        if !meta::finalizers(crd).any(|finalizer| finalizer == CLEANUP) {
            return;
        }
        let (resource, group) = name.split_once('.').unwrap_or_default();
        let prefix = store::prefix(group, resource, "");
        let rows = self.store.scan(&prefix, "");
        let instances: Vec<(Key, bool)> = rows
            .map(|(_, entry)| ((*entry.key).clone(), meta::is_terminating(&entry.value)))
            .collect();
        for (instance, is_terminating) in instances {
            if !is_terminating {
                self.controller_delete(&instance, &json!({}), now);
            }
        }
        let remains = self.store.scan(&prefix, "").next().is_some();
        let condition = match remains {
            true => [
                "Terminating",
                "True",
                "InstanceDeletionInProgress",
                "CustomResource deletion is in progress",
            ],
            false => [
                "Terminating",
                "False",
                "InstanceDeletionCompleted",
                "removed all instances",
            ],
        };
        let mut next = (**crd).clone();
        set_condition(&mut next, condition, now);
        self.controller_update(&key(name), "status", now, next);
        if !remains && let Some(crd) = self.crd(name) {
            let mut next = (*crd).clone();
            meta::remove_finalizer(&mut next, CLEANUP);
            self.controller_update(&key(name), "", now, next);
        }
    }
}
