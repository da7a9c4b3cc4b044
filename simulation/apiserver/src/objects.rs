//! Creates, updates and deletes objects.

mod conversion;

use std::sync::Arc;

use serde_json::{Map, Value, json};

use self::conversion::{check_type, decode, to_stored_form};
use crate::builtin;
use crate::cause::Cause;
use crate::kind::{Generation, Kind};
use crate::managed;
use crate::meta;
use crate::names;
use crate::server::ApiServer;
use crate::status::{Failure, Outcome};
use crate::validate;
use crate::write::{DeletionResult, Write};

pub(crate) use conversion::strict_problem;

/// Metadata that only the server sets.
const SYSTEM_METADATA: [&str; 6] = [
    "creationTimestamp",
    "deletionTimestamp",
    "deletionGracePeriodSeconds",
    "generation",
    "name",
    "namespace",
];

const PROTECTED_NAMESPACES: [&str; 3] = ["default", "kube-system", "kube-public"];

impl ApiServer {
    pub(crate) fn create(&mut self, mut write: Write, mut next: Value) -> Outcome<Arc<Value>> {
        let kind = write.kind.clone();
        check_type(&kind, &next)?;
        if !meta::text(&next, "resourceVersion").is_empty() && !write.is_apply {
            let message = "resourceVersion should not be set on objects to be created";
            return Err(Failure::new(500, "", message.to_owned(), Value::Null));
        }
        let namespace = meta::text(&next, "namespace");
        if kind.namespaced && !namespace.is_empty() && namespace != write.namespace {
            let message = "the namespace of the provided object does not match the namespace sent on the request";
            return Err(Failure::bad_request(message));
        }
        let name = meta::name(&next).to_owned();
        if !write.name.is_empty() && !name.is_empty() && name != write.name {
            return Err(name_mismatch(&name, &write.name));
        }
        let unknown = decode(&kind, None, &mut next)?;
        self.report_unknown(&write, unknown)?;
        if write.name.is_empty() {
            write.name = name;
        }
        self.check_namespace(&write)?;
        self.set_system_metadata(&mut write, &mut next)?;
        if !write.is_apply {
            managed::track_update(&kind, None, &mut next, Map::new(), &write)?;
        }
        to_stored_form(&kind, &mut next);
        if kind.has_status && !write.writes_status() {
            meta::copy_top_level(&Value::Null, &mut next, "status");
        }
        if kind.is("", "namespaces") {
            next["spec"]["finalizers"] = json!(["kubernetes"]);
            next["status"] = json!({"phase": "Active"});
        }
        builtin::set_initial_status(&kind, &mut next);
        self.validate(&write, &next, None)?;
        let key = write.key();
        if let Some(existing) = self.store.get(&key) {
            let is_terminating = meta::is_terminating(existing);
            return Err(Failure::already_exists(&kind, &write.name, is_terminating));
        }
        if write.dry_run {
            let uid = self.dry_run_uid();
            meta::set(&mut next, "uid", uid);
            meta::remove(&mut next, "resourceVersion");
            return Ok(Arc::new(next));
        }
        // The server sets defaults again when it reads an object from etcd.
        if let Some(schema) = &kind.schema {
            schema.complete(&mut next);
        }
        Ok(self.commit(&write, Some(next)))
    }

    /// Rejects unknown fields, or reports them in headers, as the parameter `fieldValidation` requests.
    fn report_unknown(&mut self, write: &Write, unknown: Vec<String>) -> Outcome<()> {
        let kind = &write.kind;
        match write.field_validation.as_str() {
            _ if unknown.is_empty() || write.is_apply => Ok(()),
            "Ignore" => Ok(()),
            "Strict" => Err(Failure::bad_request(format!(
                "{} in version {:?} cannot be handled as a {}: {}",
                kind.kind,
                kind.version,
                kind.kind,
                strict_problem(&unknown)
            ))),
            _ => {
                self.warnings = unknown;
                Ok(())
            }
        }
    }

    /// Rejects new objects in missing and terminating namespaces.
    fn check_namespace(&self, write: &Write) -> Outcome<()> {
        if !write.kind.namespaced {
            return Ok(());
        }
        let namespaces = self.kinds.get("", "v1", "namespaces");
        let Some(namespaces) = namespaces else {
            return Ok(());
        };
        let Some(namespace) = self.store.get(&namespaces.key("", &write.namespace)) else {
            return Err(Failure::not_found(namespaces, &write.namespace));
        };
        match meta::is_terminating(namespace) {
            true => Err(Failure::namespace_terminating(
                &write.kind,
                &write.name,
                &write.namespace,
            )),
            false => Ok(()),
        }
    }

    /// Sets the name and the system's metadata of a new object.
    fn set_system_metadata(&mut self, write: &mut Write, next: &mut Value) -> Outcome<()> {
        let prefix = meta::text(next, "generateName").to_owned();
        if write.name.is_empty() && !prefix.is_empty() {
            write.name = prefix + &self.next_name_suffix();
        }
        if write.name.is_empty() {
            let problem = "name or generateName is required";
            return Err(write.invalid(&[Cause::required("metadata.name", problem)]));
        }
        if let Some(problem) = names::problem(&write.kind, &write.name) {
            let name: Value = write.name.as_str().into();
            let mut causes = vec![Cause::invalid("metadata.name", &name, problem)];
            if write.kind.is("", "namespaces") && write.name.len() > 63 {
                let problem = "must be no more than 63 bytes";
                causes.push(Cause::invalid("metadata.labels", &name, problem));
            }
            return Err(write.invalid(&causes));
        }
        for field in ["resourceVersion", "selfLink"]
            .into_iter()
            .chain(SYSTEM_METADATA)
        {
            meta::remove(next, field);
        }
        meta::set(next, "name", write.name.as_str());
        if write.kind.namespaced {
            meta::set(next, "namespace", write.namespace.as_str());
        }
        if write.kind.generation != Generation::None {
            meta::set(next, "generation", 1);
        }
        meta::set(next, "creationTimestamp", meta::format_time(write.now));
        if !write.dry_run {
            let uid = self.next_uid();
            meta::set(next, "uid", uid);
        }
        builtin::set_defaults(&write.kind, next);
        Ok(())
    }

    /// Handles a PUT.
    pub(crate) fn replace(&mut self, write: Write, next: Value) -> Outcome<(Arc<Value>, u16)> {
        check_type(&write.kind, &next)?;
        check_identity(&write, &next)?;
        let uid = meta::text(&next, "uid");
        let previous = self.store.get(&write.key()).cloned();
        let current_uid = previous
            .as_ref()
            .map_or("", |previous| meta::text(previous, "uid"));
        if !uid.is_empty() && uid != current_uid {
            return Err(uid_conflict(&write, uid, current_uid));
        }
        let Some(previous) = previous else {
            return match write.kind.create_on_update && write.subresource.is_empty() {
                true => Ok((self.create(write, next)?, 201)),
                false => Err(Failure::not_found(&write.kind, &write.name)),
            };
        };
        let version = meta::text(&next, "resourceVersion");
        if matches!(version, "" | "0") && !write.kind.allows_unconditional_update {
            let problem = "must be specified for an update";
            let causes = [Cause::invalid(
                "metadata.resourceVersion",
                &0.into(),
                problem,
            )];
            return Err(Failure::invalid_resource(&write.kind, &write.name, &causes));
        }
        Ok((self.update(&write, &previous, next)?, 200))
    }

    /// Writes the new state of an existing object. Without a `resourceVersion`, the write has no precondition.
    pub(crate) fn update(
        &mut self,
        write: &Write,
        previous: &Arc<Value>,
        next: Value,
    ) -> Outcome<Arc<Value>> {
        check_version(write, previous, &next)?;
        let update = DecodedUpdate::decode(write, previous, next)?;
        self.write_update(write, previous, update)
    }

    pub(crate) fn write_update(
        &mut self,
        write: &Write,
        previous: &Arc<Value>,
        update: DecodedUpdate,
    ) -> Outcome<Arc<Value>> {
        let kind = &write.kind;
        let DecodedUpdate {
            mut next,
            unchanged,
            unknown,
        } = update;
        self.report_unknown(write, unknown)?;
        builtin::set_defaults(kind, &mut next);
        // Defaults have taken the place of the unchanged fields.
        if let Some(next) = next.as_object_mut() {
            next.retain(|name, _| !unchanged.contains_key(name));
        }
        match write.is_apply {
            true => meta::put_top_level(unchanged, &mut next),
            false => managed::track_update(kind, Some(previous), &mut next, unchanged, write)?,
        }
        to_stored_form(kind, &mut next);
        restore_read_only_fields(write, previous, &mut next);
        self.validate(write, &next, Some(previous))?;
        if write.subresource.is_empty() && increments_generation(kind, previous, &next) {
            let generation = previous["metadata"]["generation"].as_u64().unwrap_or(0);
            meta::set(&mut next, "generation", generation + 1);
        }
        meta::copy(previous, &mut next, "resourceVersion");
        if is_unchanged(previous, &next) {
            return Ok(previous.clone());
        }
        if write.dry_run {
            return Ok(Arc::new(next));
        }
        if is_ready_for_removal(&next) {
            self.commit(write, None);
            return Ok(Arc::new(next));
        }
        Ok(self.commit(write, Some(next)))
    }

    fn validate(&self, write: &Write, next: &Value, previous: Option<&Value>) -> Outcome<()> {
        let mut causes = Vec::new();
        if let Some(previous) = previous {
            validate::check_metadata(previous, next, &mut causes);
            if write.kind.is_custom() {
                // The server runs these checks twice and lists their causes twice.
                validate::check_metadata(previous, next, &mut causes);
            }
            validate::check_immutable(&write.kind, previous, next, &mut causes);
        }
        validate::check(&write.kind, next, &mut causes);
        if let Some(schema) = &write.kind.schema {
            causes.extend(schema.violations(next, &write.subresource));
        }
        match causes.is_empty() {
            true => Ok(()),
            false => Err(write.invalid(&causes)),
        }
    }

    /// Handles a DELETE. Returns the object if it remains, or a status.
    pub(crate) fn delete(&mut self, write: &Write, options: &Value) -> Outcome<DeletionResult> {
        let kind = &write.kind;
        let Some(previous) = self.store.get(&write.key()).cloned() else {
            return Err(Failure::not_found(kind, &write.name));
        };
        check_preconditions(write, &previous, &options["preconditions"])?;
        if kind.is("", "namespaces") && PROTECTED_NAMESPACES.contains(&&*write.name) {
            let cause = "this namespace may not be deleted";
            return Err(Failure::forbidden(kind, &write.name, cause));
        }
        let mut next = (*previous).clone();
        add_policy_finalizer(options, &mut next);
        if !meta::is_terminating(&previous) && is_crd(kind) {
            crate::crd::mark_deleted(&mut next, write.now);
        }
        let is_delayed = meta::finalizers(&next).next().is_some() || kind.is("", "namespaces");
        if !is_delayed {
            if !write.dry_run {
                self.commit(write, None);
            }
            return Ok(DeletionResult::Gone(previous));
        }
        if meta::is_terminating(&previous) && next == *previous {
            return Ok(DeletionResult::Remains(previous));
        }
        if !meta::is_terminating(&previous) {
            meta::set(&mut next, "deletionTimestamp", meta::format_time(write.now));
            match kind.is("", "namespaces") {
                true => next["status"]["phase"] = "Terminating".into(),
                false => meta::set(&mut next, "deletionGracePeriodSeconds", 0),
            }
            if let Some(generation) = previous["metadata"]["generation"].as_u64() {
                meta::set(&mut next, "generation", generation + 1);
            }
        }
        Ok(DeletionResult::Remains(match write.dry_run {
            true => Arc::new(next),
            false => self.commit(write, Some(next)),
        }))
    }
}

pub(crate) fn is_crd(kind: &Kind) -> bool {
    kind.is("apiextensions.k8s.io", "customresourcedefinitions")
}

pub(crate) fn name_mismatch(name: &str, expected: &str) -> Box<Failure> {
    Failure::bad_request(format!(
        "the name of the object ({name}) does not match the name on the URL ({expected})"
    ))
}

pub(crate) fn check_identity(write: &Write, next: &Value) -> Outcome<()> {
    let name = meta::name(next);
    if name.is_empty() {
        return Err(Failure::bad_request(format!(
            "the name of the object ({} based on URL) was undeterminable: name must be provided",
            write.name
        )));
    }
    if name != write.name {
        return Err(name_mismatch(name, &write.name));
    }
    let namespace = meta::text(next, "namespace");
    if !namespace.is_empty() && namespace != write.namespace {
        return Err(Failure::bad_request(format!(
            "the namespace of the object ({namespace}) does not match the namespace on the request ({})",
            write.namespace
        )));
    }
    Ok(())
}

/// The new state of an existing object in the form of the store.
#[derive(Debug)]
pub(crate) struct DecodedUpdate {
    pub(crate) next: Value,
    /// The fields at the top level that equal the stored ones. Decoding and defaults have left their mark on them
    /// before, and would take most of the time of a write.
    unchanged: Map<String, Value>,
    /// Paths of the fields that the server does not know.
    pub(crate) unknown: Vec<String>,
}

impl DecodedUpdate {
    pub(crate) fn decode(write: &Write, previous: &Value, mut next: Value) -> Outcome<Self> {
        if !write.is_apply {
            drop_unchanged_managers(previous, &mut next);
        }
        let unchanged = take_unchanged_fields(&write.kind, previous, &mut next);
        let unknown = decode(&write.kind, Some(previous), &mut next)?;
        Ok(Self {
            next,
            unchanged,
            unknown,
        })
    }
}

/// Fails if the update requires another version of the object.
pub(crate) fn check_version(write: &Write, previous: &Value, next: &Value) -> Outcome<()> {
    let version = meta::text(next, "resourceVersion");
    if !version.is_empty() && version.parse::<u64>().is_err() {
        let message = format!("strconv.ParseUint: parsing {version:?}: invalid syntax");
        return Err(Failure::new(500, "", message, Value::Null));
    }
    if !matches!(version, "" | "0") && version != meta::text(previous, "resourceVersion") {
        return Err(Failure::modified(&write.kind, &write.name));
    }
    Ok(())
}

/// Removes managed fields that equal the stored ones. Without them, an update keeps those too.
fn drop_unchanged_managers(previous: &Value, next: &mut Value) {
    let stored = &previous["metadata"]["managedFields"];
    if stored == &next["metadata"]["managedFields"] {
        meta::remove(next, "managedFields");
    }
}

fn take_unchanged_fields(kind: &Kind, previous: &Value, next: &mut Value) -> Map<String, Value> {
    let (Some(previous), Some(next)) = (previous.as_object(), next.as_object_mut()) else {
        return Map::new();
    };
    // Events have other fields in the store. The decoder moves `stringData` into `data`.
    if kind.group == "events.k8s.io" || next.contains_key("stringData") {
        return Map::new();
    }
    let unchanged = previous.iter().filter(|(name, value)| {
        !matches!(name.as_str(), "apiVersion" | "kind" | "metadata")
            && next.get(*name) == Some(value)
    });
    let names: Vec<&String> = unchanged.map(|(name, _)| name).collect();
    let taken = names.into_iter().filter_map(|name| next.remove_entry(name));
    taken.collect()
}

/// Restores the fields that the endpoint does not write.
fn restore_read_only_fields(write: &Write, previous: &Value, next: &mut Value) {
    let managed = next["metadata"]["managedFields"].take();
    match write.subresource.as_str() {
        "" => {
            for field in SYSTEM_METADATA {
                meta::copy(previous, next, field);
            }
            meta::remove(next, "selfLink");
            if meta::text(next, "uid").is_empty() {
                meta::copy(previous, next, "uid");
            }
            if write.kind.has_status {
                meta::copy_top_level(previous, next, "status");
            }
            if write.kind.is("", "namespaces") {
                next["spec"] = previous["spec"].clone();
            }
        }
        "finalize" => {
            let finalizers = next["spec"]["finalizers"].take();
            *next = previous.clone();
            next["spec"]["finalizers"] = finalizers;
        }
        subresource => {
            // The controller records the revision of a Deployment together with its status.
            let has_annotations = !next["metadata"]["annotations"].is_null();
            let kept: &[&str] = match write.kind.is("apps", "deployments") && has_annotations {
                true => &["managedFields", "annotations"],
                false => &["managedFields"],
            };
            meta::copy_except(kept, &previous["metadata"], &mut next["metadata"]);
            meta::copy_except(&["metadata", subresource], previous, next);
        }
    }
    match managed {
        Value::Null => meta::remove(next, "managedFields"),
        managed => meta::set(next, "managedFields", managed),
    }
}

fn uid_conflict(write: &Write, requested: &str, current: &str) -> Box<Failure> {
    let path = write.kind.etcd_path(&write.namespace, &write.name);
    let cause = format!(
        "StorageError: invalid object, Code: 4, Key: {path}, ResourceVersion: 0, AdditionalErrorMsg: \
         Precondition failed: UID in precondition: {requested}, UID in object meta: {current}"
    );
    Failure::conflict(&write.kind, &write.name, &cause)
}

fn check_preconditions(write: &Write, previous: &Value, preconditions: &Value) -> Outcome<()> {
    let kind = &write.kind;
    for (field, label, change) in [
        ("uid", "UID", "deleted and then recreated"),
        ("resourceVersion", "ResourceVersion", "modified"),
    ] {
        let current = meta::text(previous, field);
        let requested = match preconditions[field].as_str() {
            Some(requested) if requested != current => requested,
            _ => continue,
        };
        // The storage checks some kinds, with another message.
        if kind.is("", "namespaces") || is_crd(kind) {
            let failed = match is_crd(kind) {
                true => "precondition failed",
                false => "Precondition failed",
            };
            let cause = format!(
                "{failed}: {label} in precondition: {requested}, {label} in object meta: {current}"
            );
            return Err(Failure::conflict(kind, &write.name, &cause));
        }
        let cause = format!(
            "the {label} in the precondition ({requested}) does not match the {label} in record ({current}). \
             The object might have been {change}"
        );
        return Err(Failure::precondition(kind, &write.name, &cause));
    }
    Ok(())
}

/// Adds the finalizer of the propagation policy.
fn add_policy_finalizer(options: &Value, next: &mut Value) {
    let finalizer = match options["propagationPolicy"].as_str() {
        Some("Foreground") => "foregroundDeletion",
        Some("Orphan") => "orphan",
        _ => return,
    };
    meta::add_finalizer(next, finalizer);
}

/// Whether the change increments `metadata.generation`.
fn increments_generation(kind: &Kind, previous: &Value, next: &Value) -> bool {
    let has_changed_outside = |ignored: &[&str]| {
        let is_relevant = |(name, _): &(&String, &Value)| !ignored.contains(&name.as_str());
        let [previous, next] = [previous, next].map(|object| {
            let fields = object.as_object().into_iter().flatten();
            fields.filter(is_relevant)
        });
        !previous.eq(next)
    };
    match kind.generation {
        Generation::None => false,
        Generation::Spec => has_changed_outside(&["metadata", "status", "apiVersion", "kind"]),
        Generation::Content => has_changed_outside(&["metadata", "apiVersion", "kind"]),
        Generation::SpecAndAnnotations => {
            previous["spec"] != next["spec"]
                || previous["metadata"]["annotations"] != next["metadata"]["annotations"]
        }
    }
}

/// Whether nothing changed, except times of managed fields.
fn is_unchanged(previous: &Value, next: &Value) -> bool {
    let without_times = |managed: &Value| {
        let mut managed = managed.clone();
        let entries = managed.as_array_mut().into_iter().flatten();
        for entry in entries.filter_map(Value::as_object_mut) {
            entry.remove("time");
        }
        managed
    };
    meta::have_equal_fields(previous, next, |name, previous, next| {
        name == "metadata" || previous == next
    }) && meta::have_equal_fields(
        &previous["metadata"],
        &next["metadata"],
        |name, previous, next| {
            previous == next
                || name == "managedFields" && without_times(previous) == without_times(next)
        },
    )
}

/// Whether a terminating object has lost its last finalizer.
fn is_ready_for_removal(object: &Value) -> bool {
    let has_finalizers = meta::finalizers(object).next().is_some();
    let is_namespace = object["kind"] == "Namespace" && object["apiVersion"] == "v1";
    let has_content_finalizer = is_namespace
        && meta::strings(&object["spec"]["finalizers"])
            .next()
            .is_some();
    meta::is_terminating(object) && !has_finalizers && !has_content_finalizer
}
