//! Creates, updates and deletes the objects of a manifest.

use std::collections::BTreeSet;

use krypton_helm::releases::ObjectId;
use serde_json::{Map, Value, json};

use crate::api::{Api, Object};
use crate::fault::HelmError;
use crate::patch::three_way;

const MANAGED_BY: (&str, &str) = ("app.kubernetes.io/managed-by", "Helm");
const RELEASE_NAME: &str = "meta.helm.sh/release-name";
const RELEASE_NAMESPACE: &str = "meta.helm.sh/release-namespace";
const RESOURCE_POLICY: &str = "helm.sh/resource-policy";

/// The method by which Helm writes objects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WriteMethod {
    ServerSide { force: bool },
    ClientSide,
}

impl WriteMethod {
    /// Returns the value of the release's field `apply_method`.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::ServerSide { .. } => "ssa",
            Self::ClientSide => "csa",
        }
    }

    pub(crate) fn from_name(name: &str) -> Self {
        match name {
            "ssa" => Self::ServerSide { force: false },
            _ => Self::ClientSide,
        }
    }

    /// Returns the method to create hooks and new objects, which never forces.
    pub(crate) fn without_force(self) -> Self {
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
            let labels = object_fields(&mut metadata["labels"]);
            labels.insert(MANAGED_BY.0.to_owned(), json!(MANAGED_BY.1));
            let annotations = object_fields(&mut metadata["annotations"]);
            annotations.insert(RELEASE_NAME.to_owned(), json!(self.release));
            annotations.insert(RELEASE_NAMESPACE.to_owned(), json!(self.namespace));
        }
    }

    /// Checks that an existing object belongs to the release.
    fn check(self, object: &Value) -> Result<(), HelmError> {
        let label = check_metadata_entry(object, "labels", MANAGED_BY.0, MANAGED_BY.1);
        let name = check_metadata_entry(object, "annotations", RELEASE_NAME, self.release);
        let namespace =
            check_metadata_entry(object, "annotations", RELEASE_NAMESPACE, self.namespace);
        let problems = [
            ("label", label),
            ("annotation", name),
            ("annotation", namespace),
        ];
        let problems: Vec<HelmError> = problems
            .into_iter()
            .filter_map(|(field_kind, result)| {
                let error = result.err()?;
                Some(error.context(format_args!("{field_kind} validation error")))
            })
            .collect();
        match HelmError::join(&problems, "; ") {
            Some(error) => Err(HelmError::new(format!(
                "invalid ownership metadata; {error}"
            ))),
            None => Ok(()),
        }
    }
}

fn object_fields(value: &mut Value) -> &mut Map<String, Value> {
    if !value.is_object() {
        *value = json!({});
    }
    match value {
        Value::Object(fields) => fields,
        _ => unreachable!("the value is an object"),
    }
}

fn check_metadata_entry(
    object: &Value,
    map: &str,
    key: &str,
    value: &str,
) -> Result<(), HelmError> {
    match object["metadata"][map].get(key).and_then(Value::as_str) {
        None => Err(HelmError::new(format!(
            "missing key \"{key}\": must be set to \"{value}\""
        ))),
        Some(actual) if actual != value => Err(HelmError::new(format!(
            "key \"{key}\" must equal \"{value}\": current value is \"{actual}\""
        ))),
        Some(_) => Ok(()),
    }
}

fn describe_located(object: &Object) -> String {
    format!(
        "{} \"{}\" in namespace \"{}\"",
        object.kind, object.name, object.namespace
    )
}

/// Returns the objects that exist and belong to the release.
pub(crate) async fn find_owned(
    api: &Api,
    objects: &[Object],
    owner: Owner<'_>,
) -> Result<Vec<Object>, HelmError> {
    let mut owned = Vec::new();
    for object in objects {
        let existing = match api.get(object).await {
            Err(error) if error.is_not_found() => continue,
            existing => existing.map_err(|error| {
                let object = describe_located(object);
                error.context(format_args!(
                    "could not get information about the resource {object}"
                ))
            })?,
        };
        owner.check(&existing).map_err(|error| {
            let object = describe_located(object);
            error.context(format_args!(
                "{object} exists and cannot be imported into the current release"
            ))
        })?;
        owned.push(object.clone());
    }
    Ok(owned)
}

/// Returns the objects of an uninstallation that exist and belong to the release. Helm skips the others, and
/// objects that it cannot read.
pub(crate) async fn retain_owned(api: &Api, objects: Vec<Object>, owner: Owner<'_>) -> Vec<Object> {
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

async fn apply(api: &Api, object: &Object, force: bool) -> Result<(), HelmError> {
    api.apply(object, force).await.map(drop).map_err(|error| {
        let description = object.description();
        if error.is_conflict() {
            error.context(format_args!(
                "conflict occurred while applying object {description}"
            ))
        } else {
            error.context(format_args!(
                "server-side apply failed for object {description}"
            ))
        }
    })
}

async fn create_one(api: &Api, object: &Object, method: WriteMethod) -> Result<(), HelmError> {
    match method {
        WriteMethod::ServerSide { force } => apply(api, object, force).await,
        WriteMethod::ClientSide => api.create(object).await.map(drop),
    }
}

/// Creates objects. An error doesn't prevent the others.
pub(crate) async fn create(
    api: &Api,
    objects: &[Object],
    method: WriteMethod,
) -> Result<(), HelmError> {
    let mut errors = Vec::new();
    for object in objects {
        errors.extend(create_one(api, object, method).await.err());
    }
    match HelmError::join(&errors, "\n") {
        Some(error) => Err(error),
        None if objects.is_empty() => Err(HelmError::new("no objects visited")),
        None => Ok(()),
    }
}

/// Deletes objects, and ignores missing ones.
pub(crate) async fn delete(api: &Api, objects: &[Object]) -> Vec<HelmError> {
    let mut errors = Vec::new();
    for object in objects {
        match api.delete(object).await {
            Err(error) if !error.is_not_found() => errors.push(error),
            _ => {}
        }
    }
    errors
}

/// An update from one manifest to another.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Update<'a> {
    pub(crate) originals: &'a [Object],
    pub(crate) targets: &'a [Object],
    pub(crate) method: WriteMethod,
    /// Whether to turn the fields of client-side writes into applied fields.
    pub(crate) adopts_fields: bool,
}

impl Update<'_> {
    /// Creates and updates the targets, then deletes the originals that are not targets.
    pub(crate) async fn run(self, api: &Api) -> Result<(), HelmError> {
        let mut errors = Vec::new();
        for target in self.targets {
            match api.get(target).await {
                Ok(_) => errors.extend(self.update(api, target).await.err()),
                Err(error) if error.is_not_found() => create_one(api, target, self.method)
                    .await
                    .map_err(|error| error.context("failed to create resource"))?,
                Err(error) => {
                    return Err(error.context("could not get information about the resource"));
                }
            }
        }
        if errors.is_empty() {
            errors = self.delete_dropped(api).await;
        }
        HelmError::join(&errors, " && ").map_or(Ok(()), Err)
    }

    async fn update(&self, api: &Api, target: &Object) -> Result<(), HelmError> {
        let original = self
            .originals
            .iter()
            .find(|original| original.matches(target));
        let original = match original {
            Some(original) => original.value.clone(),
            // Helm compares with the state of the cluster.
            None => api.get(target).await.map_err(|_| {
                let (kind, name) = (&target.kind, &target.name);
                HelmError::new(format!(
                    "original object {kind} with the name \"{name}\" not found"
                ))
            })?,
        };
        match self.method {
            WriteMethod::ServerSide { force } => {
                if self.adopts_fields {
                    adopt_fields(api, target).await?;
                }
                apply(api, target, force).await
            }
            WriteMethod::ClientSide => patch(api, &original, target).await,
        }
    }

    async fn delete_dropped(&self, api: &Api) -> Vec<HelmError> {
        let mut errors = Vec::new();
        let mut seen = BTreeSet::new();
        let is_target =
            |original: &&Object| self.targets.iter().any(|target| target.matches(original));
        for original in self
            .originals
            .iter()
            .filter(|original| !is_target(original))
        {
            if !seen.insert(ObjectId::from_object(&original.value)) {
                continue;
            }
            let Ok(existing) = api.get(original).await else {
                continue;
            };
            if existing["metadata"]["annotations"][RESOURCE_POLICY] == "keep" {
                continue;
            }
            match api.delete(original).await {
                Err(error) if !error.is_not_found() => errors.push(error.context(format_args!(
                    "failed to delete resource namespace={}, name={}, kind={}",
                    original.namespace, original.name, original.kind
                ))),
                _ => {}
            }
        }
        errors
    }
}

/// Writes an object as Helm 3 did.
async fn patch(api: &Api, original: &Value, target: &Object) -> Result<(), HelmError> {
    let current = api.get(target).await.map_err(|error| {
        let (namespace, name) = (&target.namespace, &target.name);
        error
            .context(format_args!(
                "unable to get data for current object {namespace}/{name}"
            ))
            .context("failed to create patch")
    })?;
    let patch = three_way(original, &target.value, &current);
    if patch.as_object().is_none_or(Map::is_empty) {
        let refreshed = api.get(target).await.map(drop);
        return refreshed.map_err(|error| error.context("failed to refresh resource information"));
    }
    api.merge(target, &patch).await.map(drop).map_err(|error| {
        let (name, kind) = (&target.name, &target.kind);
        error.context(format_args!("cannot patch \"{name}\" with kind {kind}"))
    })
}

/// Turns the fields that Helm wrote client-side into applied fields.
async fn adopt_fields(api: &Api, target: &Object) -> Result<(), HelmError> {
    let description = target.description();
    let current = api
        .get(target)
        .await
        .map_err(|error| error.context(format_args!("failed to get object {description}")))?;
    let managers = current["metadata"]["managedFields"].as_array();
    let Some(managers) = managers.and_then(|managers| adopted_entries(managers)) else {
        return Ok(());
    };
    // Helm sends a JSON patch with the same effect.
    let version = &current["metadata"]["resourceVersion"];
    let patch = json!({ "metadata": { "managedFields": managers, "resourceVersion": version } });
    api.merge(target, &patch).await.map(drop).map_err(|error| {
        error.context(format_args!(
            "failed to patch object to upgrade CSA field manager {description}"
        ))
    })
}

/// Merges Helm's entries. `None` if Helm has written no field client-side.
fn adopted_entries(managers: &[Value]) -> Option<Vec<Value>> {
    let is_helm_entry = |entry: &Value, operation: &str| {
        let is_main_resource = entry["subresource"].as_str().is_none_or(str::is_empty);
        entry["manager"] == "helm" && entry["operation"] == operation && is_main_resource
    };
    let (helm_entries, mut others): (Vec<Value>, Vec<Value>) = managers
        .iter()
        .cloned()
        .partition(|entry| is_helm_entry(entry, "Update"));
    let mut merged = helm_entries.first()?.clone();
    let applied_entry = others
        .iter()
        .position(|entry| is_helm_entry(entry, "Apply"));
    let applied_entry = applied_entry.map(|index| others.remove(index));
    for entry in helm_entries.iter().chain(&applied_entry) {
        merge_field_sets(&mut merged["fieldsV1"], &entry["fieldsV1"]);
    }
    merged["operation"] = json!("Apply");
    others.push(merged);
    Some(others)
}

fn merge_field_sets(into: &mut Value, from: &Value) {
    if let (Value::Object(into), Value::Object(from)) = (into, from) {
        for (key, value) in from {
            merge_field_sets(into.entry(key.clone()).or_insert_with(|| json!({})), value);
        }
    }
}

/// Returns whether the manifest asks Helm to keep an object.
pub(crate) fn is_kept(object: &Object) -> bool {
    let policy = object.annotation(RESOURCE_POLICY).unwrap_or_default();
    policy.trim().eq_ignore_ascii_case("keep")
}
