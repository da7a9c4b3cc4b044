//! Creates, updates and deletes the objects of a manifest.

use std::collections::BTreeSet;

use krypton_helm::releases::ObjectId;
use serde_json::{Map, Value, json};

use crate::api::{Api, Object};
use crate::fault::Fault;
use crate::patch::three_way;

const MANAGED_BY: (&str, &str) = ("app.kubernetes.io/managed-by", "Helm");
const RELEASE_NAME: &str = "meta.helm.sh/release-name";
const RELEASE_NAMESPACE: &str = "meta.helm.sh/release-namespace";
const RESOURCE_POLICY: &str = "helm.sh/resource-policy";

/// How Helm writes objects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    ServerSide { force: bool },
    ClientSide,
}

impl Way {
    /// Returns the value of the release's field `apply_method`.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::ServerSide { .. } => "ssa",
            Self::ClientSide => "csa",
        }
    }

    pub(crate) fn of_name(name: &str) -> Self {
        match name {
            "ssa" => Self::ServerSide { force: false },
            _ => Self::ClientSide,
        }
    }

    /// Returns the way to create hooks and new objects, which never forces.
    pub(crate) fn gently(self) -> Self {
        match self {
            Self::ServerSide { .. } => Self::ServerSide { force: false },
            Self::ClientSide => Self::ClientSide,
        }
    }
}

/// Name and namespace of a release, which mark its objects.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Owner<'a> {
    pub(crate) release: &'a str,
    pub(crate) namespace: &'a str,
}

impl Owner<'_> {
    /// Adds the owner's label and annotations to objects.
    pub(crate) fn mark(self, objects: &mut [Object]) {
        for object in objects {
            let metadata = &mut object.value["metadata"];
            let labels = fields(&mut metadata["labels"]);
            labels.insert(MANAGED_BY.0.to_owned(), json!(MANAGED_BY.1));
            let annotations = fields(&mut metadata["annotations"]);
            annotations.insert(RELEASE_NAME.to_owned(), json!(self.release));
            annotations.insert(RELEASE_NAMESPACE.to_owned(), json!(self.namespace));
        }
    }

    /// Checks that an existing object belongs to the release.
    fn check(self, object: &Value) -> Result<(), Fault> {
        let label = required(object, "labels", MANAGED_BY.0, MANAGED_BY.1);
        let name = required(object, "annotations", RELEASE_NAME, self.release);
        let namespace = required(object, "annotations", RELEASE_NAMESPACE, self.namespace);
        let wrong = [
            ("label", label),
            ("annotation", name),
            ("annotation", namespace),
        ];
        let wrong: Vec<Fault> = wrong
            .into_iter()
            .filter_map(|(what, result)| {
                let fault = result.err()?;
                Some(fault.within(format_args!("{what} validation error")))
            })
            .collect();
        match Fault::joined(&wrong, "; ") {
            Some(fault) => Err(Fault::new(format!("invalid ownership metadata; {fault}"))),
            None => Ok(()),
        }
    }
}

fn fields(value: &mut Value) -> &mut Map<String, Value> {
    if !value.is_object() {
        *value = json!({});
    }
    match value {
        Value::Object(fields) => fields,
        _ => unreachable!("the value is an object"),
    }
}

fn required(object: &Value, map: &str, key: &str, value: &str) -> Result<(), Fault> {
    match object["metadata"][map].get(key).and_then(Value::as_str) {
        None => Err(Fault::new(format!(
            "missing key \"{key}\": must be set to \"{value}\""
        ))),
        Some(actual) if actual != value => Err(Fault::new(format!(
            "key \"{key}\" must equal \"{value}\": current value is \"{actual}\""
        ))),
        Some(_) => Ok(()),
    }
}

fn located(object: &Object) -> String {
    format!(
        "{} \"{}\" in namespace \"{}\"",
        object.kind, object.name, object.namespace
    )
}

/// Returns the objects that exist and belong to the release.
pub(crate) async fn existing(
    api: &Api,
    objects: &[Object],
    owner: Owner<'_>,
) -> Result<Vec<Object>, Fault> {
    let mut found = Vec::new();
    for object in objects {
        let existing = match api.get(object).await {
            Err(fault) if fault.is_not_found() => continue,
            existing => existing.map_err(|fault| {
                let object = located(object);
                fault.within(format_args!(
                    "could not get information about the resource {object}"
                ))
            })?,
        };
        owner.check(&existing).map_err(|fault| {
            let object = located(object);
            fault.within(format_args!(
                "{object} exists and cannot be imported into the current release"
            ))
        })?;
        found.push(object.clone());
    }
    Ok(found)
}

/// Returns the objects of an uninstallation that exist and belong to the release. Helm skips the others, and
/// those that it cannot read.
pub(crate) async fn owned(api: &Api, objects: Vec<Object>, owner: Owner<'_>) -> Vec<Object> {
    let mut owned = Vec::new();
    for object in objects {
        if let Ok(existing) = api.get(&object).await
            && owner.check(&existing).is_ok()
        {
            owned.push(object);
        }
    }
    owned
}

async fn apply(api: &Api, object: &Object, force: bool) -> Result<(), Fault> {
    api.apply(object, force).await.map(drop).map_err(|fault| {
        let what = object.described();
        if fault.is_conflict() {
            fault.within(format_args!(
                "conflict occurred while applying object {what}"
            ))
        } else {
            fault.within(format_args!("server-side apply failed for object {what}"))
        }
    })
}

async fn create_one(api: &Api, object: &Object, way: Way) -> Result<(), Fault> {
    match way {
        Way::ServerSide { force } => apply(api, object, force).await,
        Way::ClientSide => api.create(object).await.map(drop),
    }
}

/// Creates objects. An error doesn't prevent the others.
pub(crate) async fn create(api: &Api, objects: &[Object], way: Way) -> Result<(), Fault> {
    let mut faults = Vec::new();
    for object in objects {
        faults.extend(create_one(api, object, way).await.err());
    }
    match Fault::joined(&faults, "\n") {
        Some(fault) => Err(fault),
        None if objects.is_empty() => Err(Fault::new("no objects visited")),
        None => Ok(()),
    }
}

/// Deletes objects, and ignores those that don't exist.
pub(crate) async fn delete(api: &Api, objects: &[Object]) -> Vec<Fault> {
    let mut faults = Vec::new();
    for object in objects {
        match api.delete(object).await {
            Err(fault) if !fault.is_not_found() => faults.push(fault),
            _ => {}
        }
    }
    faults
}

/// An update from one manifest to another.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Update<'a> {
    pub(crate) originals: &'a [Object],
    pub(crate) targets: &'a [Object],
    pub(crate) way: Way,
    /// Whether to turn the fields of client-side writes into applied fields.
    pub(crate) adopts_fields: bool,
}

impl Update<'_> {
    /// Creates and updates the targets, then deletes the originals that are no targets.
    pub(crate) async fn run(self, api: &Api) -> Result<(), Fault> {
        let mut faults = Vec::new();
        for target in self.targets {
            match api.get(target).await {
                Ok(_) => faults.extend(self.update(api, target).await.err()),
                Err(fault) if fault.is_not_found() => create_one(api, target, self.way)
                    .await
                    .map_err(|fault| fault.within("failed to create resource"))?,
                Err(fault) => {
                    return Err(fault.within("could not get information about the resource"));
                }
            }
        }
        if faults.is_empty() {
            faults = self.delete_dropped(api).await;
        }
        Fault::joined(&faults, " && ").map_or(Ok(()), Err)
    }

    async fn update(&self, api: &Api, target: &Object) -> Result<(), Fault> {
        let original = self
            .originals
            .iter()
            .find(|original| original.matches(target));
        let original = match original {
            Some(original) => original.value.clone(),
            // Helm compares with the state of the cluster.
            None => api.get(target).await.map_err(|_| {
                let (kind, name) = (&target.kind, &target.name);
                Fault::new(format!(
                    "original object {kind} with the name \"{name}\" not found"
                ))
            })?,
        };
        match self.way {
            Way::ServerSide { force } => {
                if self.adopts_fields {
                    adopt_fields(api, target).await?;
                }
                apply(api, target, force).await
            }
            Way::ClientSide => patch(api, &original, target).await,
        }
    }

    async fn delete_dropped(&self, api: &Api) -> Vec<Fault> {
        let mut faults = Vec::new();
        let mut seen = BTreeSet::new();
        let kept = |original: &&Object| self.targets.iter().any(|target| target.matches(original));
        for original in self.originals.iter().filter(|original| !kept(original)) {
            if !seen.insert(ObjectId::of(&original.value)) {
                continue;
            }
            let Ok(existing) = api.get(original).await else {
                continue;
            };
            if existing["metadata"]["annotations"][RESOURCE_POLICY] == "keep" {
                continue;
            }
            match api.delete(original).await {
                Err(fault) if !fault.is_not_found() => faults.push(fault.within(format_args!(
                    "failed to delete resource namespace={}, name={}, kind={}",
                    original.namespace, original.name, original.kind
                ))),
                _ => {}
            }
        }
        faults
    }
}

/// Writes an object as Helm 3 did.
async fn patch(api: &Api, original: &Value, target: &Object) -> Result<(), Fault> {
    let current = api.get(target).await.map_err(|fault| {
        let (namespace, name) = (&target.namespace, &target.name);
        fault
            .within(format_args!(
                "unable to get data for current object {namespace}/{name}"
            ))
            .within("failed to create patch")
    })?;
    let patch = three_way(original, &target.value, &current);
    if patch.as_object().is_none_or(Map::is_empty) {
        let refreshed = api.get(target).await.map(drop);
        return refreshed.map_err(|fault| fault.within("failed to refresh resource information"));
    }
    api.merge(target, &patch).await.map(drop).map_err(|fault| {
        let (name, kind) = (&target.name, &target.kind);
        fault.within(format_args!("cannot patch \"{name}\" with kind {kind}"))
    })
}

/// Turns the fields that Helm wrote client-side into applied fields.
async fn adopt_fields(api: &Api, target: &Object) -> Result<(), Fault> {
    let described = target.described();
    let current = api
        .get(target)
        .await
        .map_err(|fault| fault.within(format_args!("failed to get object {described}")))?;
    let managers = current["metadata"]["managedFields"].as_array();
    let Some(managers) = managers.and_then(|managers| adopted(managers)) else {
        return Ok(());
    };
    // Helm sends a JSON patch with the same effect.
    let version = &current["metadata"]["resourceVersion"];
    let patch = json!({ "metadata": { "managedFields": managers, "resourceVersion": version } });
    api.merge(target, &patch).await.map(drop).map_err(|fault| {
        fault.within(format_args!(
            "failed to patch object to upgrade CSA field manager {described}"
        ))
    })
}

/// Merges Helm's entries. `None` if Helm has written no field client-side.
fn adopted(managers: &[Value]) -> Option<Vec<Value>> {
    let written = |entry: &Value, operation: &str| {
        let whole = entry["subresource"].as_str().is_none_or(str::is_empty);
        entry["manager"] == "helm" && entry["operation"] == operation && whole
    };
    let (ours, mut others): (Vec<Value>, Vec<Value>) = managers
        .iter()
        .cloned()
        .partition(|entry| written(entry, "Update"));
    let mut merged = ours.first()?.clone();
    let applied = others.iter().position(|entry| written(entry, "Apply"));
    let applied = applied.map(|at| others.remove(at));
    for entry in ours.iter().chain(&applied) {
        unite(&mut merged["fieldsV1"], &entry["fieldsV1"]);
    }
    merged["operation"] = json!("Apply");
    others.push(merged);
    Some(others)
}

fn unite(into: &mut Value, from: &Value) {
    if let (Value::Object(into), Value::Object(from)) = (into, from) {
        for (key, value) in from {
            unite(into.entry(key.clone()).or_insert_with(|| json!({})), value);
        }
    }
}

/// Returns whether the manifest asks Helm to keep an object.
pub(crate) fn is_kept(object: &Object) -> bool {
    let policy = object.annotation(RESOURCE_POLICY).unwrap_or_default();
    policy.trim().eq_ignore_ascii_case("keep")
}
