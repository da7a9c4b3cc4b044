//! CustomResourceDefinitions: conditions, serving and deletion.

pub(crate) mod defaults;

use std::sync::Arc;

use jiff::Timestamp;
use serde_json::{Value, json};

use self::defaults::initial_status;
use crate::key::Key;
use crate::kind::{Generation, Kind};
use crate::meta;
use crate::schema::StructuralSchema;
use crate::server::ApiServer;
use crate::store::{self, WriteRecord};

const CLEANUP_FINALIZER: &str = "customresourcecleanup.apiextensions.k8s.io";

/// The CRDs of a server, and the kinds that they define.
#[derive(Clone, Debug, Default)]
pub struct Crds {
    objects: Vec<Arc<Value>>,
    kinds: Vec<Arc<Kind>>,
}

/// Whether the CRD is new, changed, being deleted or gone.
pub(crate) fn needs_sync(record: &WriteRecord) -> bool {
    let generation = |object: &Arc<Value>| object["metadata"]["generation"].clone();
    record.before.as_ref().map(generation) != record.after.as_ref().map(generation)
}

fn set_condition(object: &mut Value, condition: [&str; 4], now: Timestamp) {
    let [kind, status, reason, message] = condition;
    let entry = json!({
        "type": kind,
        "status": status,
        "reason": reason,
        "message": message,
        "lastTransitionTime": meta::transition_time(object, kind, status, now),
    });
    let conditions = &mut object["status"]["conditions"];
    if !conditions.is_array() {
        *conditions = json!([]);
    }
    let Some(conditions) = conditions.as_array_mut() else {
        return;
    };
    match conditions
        .iter_mut()
        .find(|existing| existing["type"] == kind)
    {
        Some(existing) => *existing = entry,
        None => conditions.push(entry),
    }
}

/// Adds the finalizer and the condition of a deletion.
pub(crate) fn mark_deleted(object: &mut Value, now: Timestamp) {
    meta::add_finalizer(object, CLEANUP_FINALIZER);
    let condition = [
        "Terminating",
        "True",
        "InstanceDeletionPending",
        "CustomResourceDefinition marked for deletion; CustomResource deletion will begin soon",
    ];
    set_condition(object, condition, now);
}

/// Returns the kind of each served version.
fn served_kinds(crd: &Value) -> Vec<Kind> {
    let spec = &crd["spec"];
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let list = |value: &Value| meta::strings(value).map(str::to_owned).collect();
    let (group, names) = (text(&spec["group"]), &spec["names"]);
    let versions = spec["versions"].as_array().into_iter().flatten();
    let stored = versions.clone().find(|version| version["storage"] == true);
    let stored = stored.map_or_else(String::new, |version| text(&version["name"]));
    let served = versions.filter(|version| version["served"] == true);
    let kind = |version: &Value| {
        let has_status = !version["subresources"]["status"].is_null();
        Kind {
            group: group.clone(),
            version: text(&version["name"]),
            resource: text(&names["plural"]),
            singular: text(&names["singular"]),
            kind: text(&names["kind"]),
            list_kind: text(&names["listKind"]),
            namespaced: spec["scope"] == "Namespaced",
            has_status,
            generation: match has_status {
                true => Generation::Spec,
                false => Generation::Content,
            },
            allows_unconditional_update: false,
            create_on_update: false,
            etcd_folder: format!("{group}/{}", text(&names["plural"])),
            short_names: list(&names["shortNames"]),
            categories: list(&names["categories"]),
            normalize: None,
            fields: None,
            schema: Some(Arc::new(StructuralSchema::new(
                version["schema"]["openAPIV3Schema"].clone(),
            ))),
            stored_api_version: format!("{group}/{stored}"),
        }
    };
    served.map(kind).collect()
}

impl ApiServer {
    pub(crate) fn crd(&self, name: &str) -> Option<Arc<Value>> {
        self.get(&Key::of_crd(name))
    }

    /// Returns all CRDs.
    pub fn crds(&self) -> Crds {
        let kinds = self.kinds.all().filter(|kind| kind.is_custom());
        Crds {
            objects: self.all("apiextensions.k8s.io", "customresourcedefinitions"),
            kinds: kinds.cloned().collect(),
        }
    }

    /// Adds established CRDs of another server. To create them would take a large part of a run.
    pub fn add_crds(&mut self, crds: &Crds, now: Timestamp) {
        for object in &crds.objects {
            let key = Key::of_crd(meta::name(object));
            let Some(kind) = self.kinds.for_key(&key).cloned() else {
                continue;
            };
            let write = self.controller_write(&kind, &key, "", now);
            let mut object = (**object).clone();
            meta::set(&mut object, "uid", self.next_uid());
            self.store(&write, Some(object));
        }
        for kind in &crds.kinds {
            self.kinds.add(kind.clone());
        }
    }

    pub(crate) fn is_crd_terminating(&self, kind: &Kind) -> bool {
        let crd = self.crd(&kind.group_resource());
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
        if let Some((reason, message, accepted)) = self.name_conflict(name, group, names) {
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
            self.controller_update(&Key::of_crd(name), "status", now, next);
            return;
        }
        for kind in served_kinds(crd) {
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
                && !stored.iter().any(|name| name == version)
            {
                stored.push(version.into());
            }
        }
        self.controller_update(&Key::of_crd(name), "status", now, next);
    }

    /// Returns the last name that another CRD of the group uses, and the accepted names.
    fn name_conflict(
        &self,
        name: &str,
        group: &str,
        names: &Value,
    ) -> Option<(&'static str, String, Value)> {
        let others = self.all("apiextensions.k8s.io", "customresourcedefinitions");
        let others = others.iter().filter(|other| {
            meta::name(other) != name && other["spec"]["group"].as_str() == Some(group)
        });
        let used_names: Vec<&Value> = others
            .map(|other| &other["status"]["acceptedNames"])
            .collect();
        let resource_fields = ["plural", "singular"];
        let kind_fields = ["kind", "listKind"];
        let mut accepted = json!({"kind": "", "plural": ""});
        let mut conflict = None;
        let fields = [
            ("plural", &resource_fields, "PluralConflict"),
            ("singular", &resource_fields, "SingularConflict"),
            ("kind", &kind_fields, "KindConflict"),
            ("listKind", &kind_fields, "ListKindConflict"),
        ];
        for (field, other_fields, reason) in fields {
            let Some(requested) = names[field]
                .as_str()
                .filter(|requested| !requested.is_empty())
            else {
                continue;
            };
            let uses_name =
                |other: &&Value| other_fields.iter().any(|field| other[*field] == requested);
            match used_names.iter().any(uses_name) {
                true => conflict = Some((reason, format!("{requested:?} is already in use"))),
                false => accepted[field] = requested.into(),
            }
        }
        conflict.map(|(reason, message)| (reason, message, accepted))
    }

    /// Deletes the custom resources, and then the CRD.
    fn delete_instances(&mut self, name: &str, crd: &Arc<Value>, now: Timestamp) {
        if !meta::finalizers(crd).any(|finalizer| finalizer == CLEANUP_FINALIZER) {
            return;
        }
        let (resource, group) = name.split_once('.').unwrap_or_default();
        let prefix = store::prefix(group, resource, "");
        let objects = self.store.scan(&prefix, "");
        let instances: Vec<(Key, bool)> = objects
            .map(|(_, entry)| ((*entry.key).clone(), meta::is_terminating(&entry.value)))
            .collect();
        for (instance, is_terminating) in instances {
            if !is_terminating {
                self.controller_delete(&instance, &json!({}), now);
            }
        }
        let has_instances = self.store.scan(&prefix, "").next().is_some();
        let condition = match has_instances {
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
        self.controller_update(&Key::of_crd(name), "status", now, next);
        if !has_instances && let Some(crd) = self.crd(name) {
            let mut next = (*crd).clone();
            meta::remove_finalizer(&mut next, CLEANUP_FINALIZER);
            self.controller_update(&Key::of_crd(name), "", now, next);
        }
    }
}
