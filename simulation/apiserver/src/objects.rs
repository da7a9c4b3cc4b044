//! Creates, updates and deletes objects.

use std::sync::Arc;

use jiff::Timestamp;
use serde_json::{Value, json};

use crate::builtin;
use crate::decoder;
use crate::managed;
use crate::meta;
use crate::names;
use crate::resources::{Generation, Kind};
use crate::server::{ApiServer, Key};
use crate::status::{Cause, Failure, Outcome};
use crate::validate;

/// A write of one object.
#[derive(Clone, Debug)]
pub(crate) struct Write {
    pub(crate) kind: Arc<Kind>,
    pub(crate) namespace: String,
    /// Empty for a POST.
    pub(crate) name: String,
    pub(crate) subresource: String,
    pub(crate) manager: String,
    /// Whether server-side apply has set the managed fields.
    pub(crate) applied: bool,
    /// The parameter `fieldValidation`.
    pub(crate) validation: String,
    pub(crate) dry_run: bool,
    pub(crate) now: Timestamp,
    /// User agent or name of the controller.
    pub(crate) by: String,
}

impl Write {
    pub(crate) fn key(&self) -> Key {
        self.kind.key(&self.namespace, &self.name)
    }

    fn invalid(&self, causes: &[Cause]) -> Box<Failure> {
        Failure::invalid(&self.kind, &self.name, causes)
    }
}

/// Metadata that only the server sets.
const SYSTEM: [&str; 6] = [
    "creationTimestamp",
    "deletionTimestamp",
    "deletionGracePeriodSeconds",
    "generation",
    "name",
    "namespace",
];

const PROTECTED: [&str; 3] = ["default", "kube-system", "kube-public"];

impl ApiServer {
    pub(crate) fn create(&mut self, mut write: Write, mut next: Value) -> Outcome<Arc<Value>> {
        let kind = write.kind.clone();
        check_type(&kind, &next)?;
        if !meta::text(&next, "resourceVersion").is_empty() && !write.applied {
            let message = "resourceVersion should not be set on objects to be created";
            return Err(Failure::new(500, "", message.to_owned(), Value::Null));
        }
        let given = meta::text(&next, "namespace");
        if kind.namespaced && !given.is_empty() && given != write.namespace {
            let message = "the namespace of the provided object does not match the namespace sent on the request";
            return Err(Failure::bad_request(message));
        }
        let given = meta::name(&next).to_owned();
        if !write.name.is_empty() && !given.is_empty() && given != write.name {
            return Err(name_mismatch(&given, &write.name));
        }
        let unknown = decode(&kind, &mut next)?;
        self.report_unknown(&write, unknown)?;
        if write.name.is_empty() {
            write.name = given;
        }
        self.admit_namespace(&write)?;
        self.name(&mut write, &mut next)?;
        if !write.applied {
            managed::track(&kind, None, &mut next, &write)?;
        }
        store_form(&kind, &mut next);
        if kind.status && !write.applied_status() {
            meta::copy_top(&Value::Null, &mut next, "status");
        }
        if kind.is("", "namespaces") {
            next["spec"]["finalizers"] = json!(["kubernetes"]);
            next["status"] = json!({"phase": "Active"});
        }
        builtin::set_initial_status(&kind, &mut next);
        self.validate(&write, &next, None)?;
        let key = write.key();
        if self.store.get(&key).is_some() {
            let is_terminating = self
                .store
                .get(&key)
                .is_some_and(|found| meta::is_terminating(found));
            return Err(Failure::already_exists(&kind, &write.name, is_terminating));
        }
        if write.dry_run {
            let uid = self.dry_uid();
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
        match write.validation.as_str() {
            _ if unknown.is_empty() || write.applied => Ok(()),
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
    fn admit_namespace(&self, write: &Write) -> Outcome<()> {
        if !write.kind.namespaced {
            return Ok(());
        }
        let namespaces = self.kinds.get("", "v1", "namespaces");
        let Some(namespaces) = namespaces else {
            return Ok(());
        };
        let Some(found) = self.store.get(&namespaces.key("", &write.namespace)) else {
            return Err(Failure::not_found(namespaces, &write.namespace));
        };
        match meta::is_terminating(found) {
            true => Err(Failure::namespace_terminating(
                &write.kind,
                &write.name,
                &write.namespace,
            )),
            false => Ok(()),
        }
    }

    /// Sets the name and the system's metadata of a new object.
    fn name(&mut self, write: &mut Write, next: &mut Value) -> Outcome<()> {
        let prefix = meta::text(next, "generateName").to_owned();
        if write.name.is_empty() && !prefix.is_empty() {
            write.name = prefix + &self.suffix();
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
        for field in ["resourceVersion", "selfLink"].into_iter().chain(SYSTEM) {
            meta::remove(next, field);
        }
        meta::set(next, "name", write.name.as_str());
        if write.kind.namespaced {
            meta::set(next, "namespace", write.namespace.as_str());
        }
        if write.kind.generation != Generation::None {
            meta::set(next, "generation", 1);
        }
        meta::set(next, "creationTimestamp", meta::seconds(write.now));
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
        let before = self.store.get(&write.key()).cloned();
        let found = before
            .as_ref()
            .map_or("", |before| meta::text(before, "uid"));
        if !uid.is_empty() && uid != found {
            return Err(wrong_uid(&write, uid, found));
        }
        let Some(before) = before else {
            return match write.kind.create_on_update && write.subresource.is_empty() {
                true => Ok((self.create(write, next)?, 201)),
                false => Err(Failure::not_found(&write.kind, &write.name)),
            };
        };
        let version = meta::text(&next, "resourceVersion");
        if matches!(version, "" | "0") && !write.kind.unconditional {
            let cause = Cause {
                reason: "FieldValueInvalid",
                message: "Invalid value: 0: must be specified for an update".to_owned(),
                field: "metadata.resourceVersion".to_owned(),
            };
            return Err(Failure::invalid_resource(
                &write.kind,
                &write.name,
                &[cause],
            ));
        }
        Ok((self.update(&write, &before, next)?, 200))
    }

    /// Writes the new state of an existing object. An empty `resourceVersion` is no precondition.
    pub(crate) fn update(
        &mut self,
        write: &Write,
        before: &Arc<Value>,
        mut next: Value,
    ) -> Outcome<Arc<Value>> {
        let kind = &write.kind;
        let version = meta::text(&next, "resourceVersion");
        if !version.is_empty() && version.parse::<u64>().is_err() {
            let message = format!("strconv.ParseUint: parsing {version:?}: invalid syntax");
            return Err(Failure::new(500, "", message, Value::Null));
        }
        if !matches!(version, "" | "0") && version != meta::text(before, "resourceVersion") {
            return Err(Failure::modified(kind, &write.name));
        }
        let unknown = decode(kind, &mut next)?;
        self.report_unknown(write, unknown)?;
        builtin::set_defaults(kind, &mut next);
        if !write.applied {
            managed::track(kind, Some(before), &mut next, write)?;
        }
        store_form(kind, &mut next);
        reset(write, before, &mut next);
        self.validate(write, &next, Some(before))?;
        if write.subresource.is_empty() && has_changed(kind, before, &next) {
            let generation = before["metadata"]["generation"].as_u64().unwrap_or(0);
            meta::set(&mut next, "generation", generation + 1);
        }
        meta::copy(before, &mut next, "resourceVersion");
        if is_same(before, &next) {
            return Ok(before.clone());
        }
        if write.dry_run {
            return Ok(Arc::new(next));
        }
        if is_released(&next) {
            self.commit(write, None);
            return Ok(Arc::new(next));
        }
        Ok(self.commit(write, Some(next)))
    }

    fn validate(&self, write: &Write, next: &Value, before: Option<&Value>) -> Outcome<()> {
        let mut causes = Vec::new();
        if let Some(before) = before {
            // The server runs these checks twice and lists their causes twice.
            validate::check_metadata(before, next, &mut causes);
            validate::check_metadata(before, next, &mut causes);
            validate::check_immutable(&write.kind, before, next, &mut causes);
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
    pub(crate) fn delete(&mut self, write: &Write, options: &Value) -> Outcome<Deleted> {
        let kind = &write.kind;
        let Some(before) = self.store.get(&write.key()).cloned() else {
            return Err(Failure::not_found(kind, &write.name));
        };
        check_preconditions(write, &before, &options["preconditions"])?;
        if kind.is("", "namespaces") && PROTECTED.contains(&&*write.name) {
            let cause = "this namespace may not be deleted";
            return Err(Failure::forbidden(kind, &write.name, cause));
        }
        let mut next = (*before).clone();
        add_policy(options, &mut next);
        if !meta::is_terminating(&before) && is_crd(kind) {
            crate::crd::mark_deleted(&mut next, write.now);
        }
        let waits = meta::finalizers(&next).next().is_some() || kind.is("", "namespaces");
        if !waits {
            if !write.dry_run {
                self.commit(write, None);
            }
            return Ok(Deleted::Gone(before));
        }
        if meta::is_terminating(&before) && next == *before {
            return Ok(Deleted::Remains(before));
        }
        if !meta::is_terminating(&before) {
            meta::set(&mut next, "deletionTimestamp", meta::seconds(write.now));
            match kind.is("", "namespaces") {
                true => next["status"]["phase"] = "Terminating".into(),
                false => meta::set(&mut next, "deletionGracePeriodSeconds", 0),
            }
            if let Some(generation) = before["metadata"]["generation"].as_u64() {
                meta::set(&mut next, "generation", generation + 1);
            }
        }
        Ok(Deleted::Remains(match write.dry_run {
            true => Arc::new(next),
            false => self.commit(write, Some(next)),
        }))
    }
}

/// Result of a DELETE.
#[derive(Debug)]
pub(crate) enum Deleted {
    Gone(Arc<Value>),
    Remains(Arc<Value>),
}

impl Write {
    fn applied_status(&self) -> bool {
        self.subresource == "status"
    }
}

pub(crate) fn is_crd(kind: &Kind) -> bool {
    kind.is("apiextensions.k8s.io", "customresourcedefinitions")
}

pub(crate) fn name_mismatch(found: &str, expected: &str) -> Box<Failure> {
    Failure::bad_request(format!(
        "the name of the object ({found}) does not match the name on the URL ({expected})"
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

/// Rejects an object of another kind or version.
fn check_type(kind: &Kind, next: &Value) -> Outcome<()> {
    let text = |field: &str| next[field].as_str().unwrap_or_default();
    let (version, name) = (text("apiVersion"), text("kind"));
    let expected = kind.api_version();
    let undecodable = |problem: String| {
        let found = version.rsplit('/').next().unwrap_or_default();
        Err(Failure::bad_request(format!(
            "{name} in version {found:?} cannot be handled as a {}: {problem}",
            kind.kind
        )))
    };
    if kind.is_custom() {
        return match name {
            "" => Err(Failure::bad_request(format!(
                "the object provided is unrecognized (must be of type {}): Object 'Kind' is missing in '{next}' \
                 ({next})",
                kind.kind
            ))),
            _ if version != expected => Err(Failure::bad_request(format!(
                "the API version in the data ({version}) does not match the expected API version ({expected})"
            ))),
            name if name != kind.kind => Err(Failure::changed_kind(kind, name, meta::name(next))),
            _ => Ok(()),
        };
    }
    if !version.is_empty() && version != expected {
        return undecodable(format!(
            "no kind {name:?} is registered for version {version:?} in scheme \"pkg/runtime/scheme.go:111\""
        ));
    }
    if !name.is_empty() && name != kind.kind {
        let group = match kind.group.split('.').next() {
            None | Some("") => "core",
            Some(group) => group,
        };
        return undecodable(format!(
            "converting (v1.{name}) to ({group}.{}): unknown conversion",
            kind.kind
        ));
    }
    Ok(())
}

/// Converts a client's object to the stored form: known fields only, with defaults of custom resources.
pub(crate) fn decode(kind: &Kind, next: &mut Value) -> Outcome<Vec<String>> {
    let undecodable = |error: String| {
        Failure::bad_request(format!(
            "{} in version {:?} cannot be handled as a {}: {error}",
            kind.kind, kind.version, kind.kind
        ))
    };
    next["apiVersion"] = kind.api_version().into();
    next["kind"] = kind.kind.as_str().into();
    let mut unknown = Vec::new();
    let given = next["metadata"].clone();
    builtin::normalize_metadata(next).map_err(undecodable)?;
    unknown_fields(&given, &next["metadata"], "metadata", &mut unknown);
    if let Some(problem) = decoder::problem(kind, next) {
        return Err(undecodable(problem));
    }
    if let Some(normalize) = kind.normalize {
        let metadata = next["metadata"].take();
        let typed = normalize(next).map_err(undecodable)?;
        unknown_fields(next, &typed, "", &mut unknown);
        *next = typed;
        next["metadata"] = metadata;
    }
    if let Some(schema) = &kind.schema {
        unknown.extend(schema.complete(next));
    }
    if let Some(fields) = &kind.fields {
        fields.complete(next);
    }
    Ok(unknown)
}

/// Returns the problem with unknown fields in a strict request.
pub(crate) fn strict_problem(unknown: &[String]) -> String {
    let fields = unknown
        .iter()
        .map(|field| format!("unknown field {field:?}"));
    let fields: Vec<String> = fields.collect();
    format!("strict decoding error: {}", fields.join(", "))
}

/// Collects the paths of the fields that the decoder has dropped.
fn unknown_fields(given: &Value, decoded: &Value, path: &str, unknown: &mut Vec<String>) {
    let join = |name: &str| match path {
        "" => name.to_owned(),
        path => format!("{path}.{name}"),
    };
    match (given, decoded) {
        (Value::Object(given), Value::Object(decoded)) => {
            for (name, value) in given {
                let is_empty = match value {
                    Value::Null => true,
                    Value::Array(list) => list.is_empty(),
                    Value::Object(map) => map.is_empty(),
                    Value::String(text) => text.is_empty(),
                    _ => false,
                };
                match decoded.get(name) {
                    Some(decoded) => unknown_fields(value, decoded, &join(name), unknown),
                    None if is_empty || matches!(&**name, "metadata" | "selfLink") => {}
                    None => unknown.push(join(name)),
                }
            }
        }
        (Value::Array(given), Value::Array(decoded)) => {
            for (index, (given, decoded)) in given.iter().zip(decoded).enumerate() {
                unknown_fields(given, decoded, &format!("{path}[{index}]"), unknown);
            }
        }
        _ => {}
    }
}

/// Converts a decoded object to its stored form.
fn store_form(kind: &Kind, next: &mut Value) {
    if kind.group == "events.k8s.io" {
        crate::render::stored_event(next);
    }
    builtin::set_nulls(kind, next);
    next["apiVersion"] = kind.stored_as.as_str().into();
}

/// Restores the fields that the endpoint does not write.
fn reset(write: &Write, before: &Value, next: &mut Value) {
    let managed = next["metadata"]["managedFields"].take();
    match write.subresource.as_str() {
        "" => {
            for field in SYSTEM {
                meta::copy(before, next, field);
            }
            meta::remove(next, "selfLink");
            if meta::text(next, "uid").is_empty() {
                meta::copy(before, next, "uid");
            }
            if write.kind.status {
                meta::copy_top(before, next, "status");
            }
            if write.kind.is("", "namespaces") {
                next["spec"] = before["spec"].clone();
            }
        }
        "finalize" => {
            let finalizers = next["spec"]["finalizers"].take();
            *next = before.clone();
            next["spec"]["finalizers"] = finalizers;
        }
        part => {
            let written = next.get(part).cloned();
            let annotations = next["metadata"]["annotations"].take();
            *next = before.clone();
            // The controller records the revision of a Deployment together with its status.
            if write.kind.is("apps", "deployments") && !annotations.is_null() {
                meta::set(next, "annotations", annotations);
            }
            if let Some(map) = next.as_object_mut() {
                match written {
                    Some(written) => map.insert(part.to_owned(), written),
                    None => map.remove(part),
                };
            }
        }
    }
    match managed {
        Value::Null => meta::remove(next, "managedFields"),
        managed => meta::set(next, "managedFields", managed),
    }
}

fn wrong_uid(write: &Write, asked: &str, found: &str) -> Box<Failure> {
    let path = write.kind.etcd_path(&write.namespace, &write.name);
    let cause = format!(
        "StorageError: invalid object, Code: 4, Key: {path}, ResourceVersion: 0, AdditionalErrorMsg: \
         Precondition failed: UID in precondition: {asked}, UID in object meta: {found}"
    );
    Failure::conflict(&write.kind, &write.name, &cause)
}

fn check_preconditions(write: &Write, before: &Value, asked: &Value) -> Outcome<()> {
    let (uid, version) = (
        meta::text(before, "uid"),
        meta::text(before, "resourceVersion"),
    );
    let by_storage = write.kind.is("", "namespaces") || is_crd(&write.kind);
    let storage = |what: &str, asked: &str, found: &str| {
        let cause = format!(
            "Precondition failed: {what} in precondition: {asked}, {what} in object meta: {found}"
        );
        Err(Failure::conflict(&write.kind, &write.name, &cause))
    };
    if let Some(asked) = asked["uid"].as_str().filter(|asked| *asked != uid) {
        if by_storage {
            return storage("UID", asked, uid);
        }
        let cause = format!(
            "the UID in the precondition ({asked}) does not match the UID in record ({uid}). The object might have \
             been deleted and then recreated"
        );
        return Err(Failure::precondition(&write.kind, &write.name, &cause));
    }
    let differs = |asked: &&str| *asked != version;
    if let Some(asked) = asked["resourceVersion"].as_str().filter(differs) {
        if by_storage {
            return storage("ResourceVersion", asked, version);
        }
        let cause = format!(
            "the ResourceVersion in the precondition ({asked}) does not match the ResourceVersion in record \
             ({version}). The object might have been modified"
        );
        return Err(Failure::precondition(&write.kind, &write.name, &cause));
    }
    Ok(())
}

/// Adds the finalizer of the propagation policy.
fn add_policy(options: &Value, next: &mut Value) {
    let finalizer = match options["propagationPolicy"].as_str() {
        Some("Foreground") => "foregroundDeletion",
        Some("Orphan") => "orphan",
        _ => return,
    };
    if meta::finalizers(next).any(|found| found == finalizer) {
        return;
    }
    let mut finalizers: Vec<Value> = meta::finalizers(next).map(Value::from).collect();
    finalizers.push(finalizer.into());
    meta::set(next, "finalizers", finalizers);
}

/// Whether the change increments the generation.
fn has_changed(kind: &Kind, before: &Value, next: &Value) -> bool {
    let differs = |ignored: &[&str]| {
        let names = |object: &Value| -> Vec<(String, Value)> {
            let map = object.as_object().into_iter().flatten();
            let map = map.filter(|(name, _)| !ignored.contains(&name.as_str()));
            map.map(|(name, value)| (name.clone(), value.clone()))
                .collect()
        };
        names(before) != names(next)
    };
    match kind.generation {
        Generation::None => false,
        Generation::Spec => differs(&["metadata", "status", "apiVersion", "kind"]),
        Generation::Content => differs(&["metadata", "apiVersion", "kind"]),
        Generation::SpecAndAnnotations => {
            before["spec"] != next["spec"]
                || before["metadata"]["annotations"] != next["metadata"]["annotations"]
        }
    }
}

/// Whether nothing changed, except times of managed fields.
fn is_same(before: &Value, next: &Value) -> bool {
    if before == next {
        return true;
    }
    let timeless = |object: &Value| {
        let mut object = object.clone();
        if let Some(managed) = object["metadata"]["managedFields"].as_array_mut() {
            for entry in managed.iter_mut().filter_map(Value::as_object_mut) {
                entry.remove("time");
            }
        }
        object
    };
    let content = |object: &Value| object.as_object().map(serde_json::Map::len);
    content(before) == content(next) && timeless(before) == timeless(next)
}

/// Whether a terminating object has lost its last finalizer.
fn is_released(object: &Value) -> bool {
    let holds = meta::finalizers(object).next().is_some();
    let is_namespace = object["kind"] == "Namespace" && object["apiVersion"] == "v1";
    let content = is_namespace
        && meta::strings(&object["spec"]["finalizers"])
            .next()
            .is_some();
    meta::is_terminating(object) && !holds && !content
}
