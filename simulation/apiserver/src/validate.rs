//! Validation of objects, except of custom resources by their schema.

use serde_json::Value;

use crate::cause::Cause;
use crate::kind::Kind;
use crate::meta;

/// Checks a new or changed object of a built-in kind.
pub(crate) fn check(kind: &Kind, next: &Value, causes: &mut Vec<Cause>) {
    check_labels(next, causes);
    check_finalizers(next, causes);
    if kind.is_custom() {
        return;
    }
    match kind.resource.as_str() {
        "configmaps" => check_config_map(next, causes),
        "secrets" => check_secret(next, causes),
        "leases" => check_lease(next, causes),
        "events" if kind.group == "events.k8s.io" => check_event(next, causes),
        "customresourcedefinitions" => check_crd(next, causes),
        _ => {}
    }
}

const NAME_PROBLEM: &str = "name part must consist of alphanumeric characters, '-', '_' or '.', and must start and end \
    with an alphanumeric character (e.g. 'MyName',  or 'my.name',  or '123-abc', regex used for validation is \
    '([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]')";
const VALUE_PROBLEM: &str = "a valid label must be an empty string or consist of alphanumeric characters, '-', '_' or \
    '.', and must start and end with an alphanumeric character (e.g. 'MyValue',  or 'my_value',  or '12345', regex \
    used for validation is '(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?')";

/// Whether a text is the name part of a qualified name, or a label's value.
fn is_name(text: &str) -> bool {
    let is_allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    let is_end = |c: Option<char>| c.is_some_and(|c| c.is_ascii_alphanumeric());
    text.chars().all(is_allowed) && is_end(text.chars().next()) && is_end(text.chars().next_back())
}

fn check_labels(next: &Value, causes: &mut Vec<Cause>) {
    let labels = next["metadata"]["labels"].as_object();
    for (key, value) in labels.into_iter().flatten() {
        let name = key.rsplit('/').next().unwrap_or_default();
        if !is_name(name) {
            let key = key.as_str().into();
            causes.push(Cause::invalid("metadata.labels", &key, NAME_PROBLEM));
        }
        let text = value.as_str().unwrap_or_default();
        if text.len() > 63 {
            let problem = "must be no more than 63 bytes";
            causes.push(Cause::invalid("metadata.labels", value, problem));
        } else if !text.is_empty() && !is_name(text) {
            causes.push(Cause::invalid("metadata.labels", value, VALUE_PROBLEM));
        }
    }
}

fn check_finalizers(next: &Value, causes: &mut Vec<Cause>) {
    for finalizer in meta::finalizers(next) {
        let name = finalizer.rsplit('/').next().unwrap_or_default();
        if !is_name(name) {
            let value = finalizer.into();
            causes.push(Cause::invalid("metadata.finalizers", &value, NAME_PROBLEM));
        }
    }
}

fn keys<'a>(object: &'a Value, field: &str) -> impl Iterator<Item = &'a String> {
    let map = object[field].as_object();
    map.into_iter().flat_map(serde_json::Map::keys)
}

fn check_keys(object: &Value, field: &str, causes: &mut Vec<Cause>) {
    const PROBLEM: &str = "a valid config key must consist of alphanumeric characters, '-', '_' or '.' (e.g. \
        'key.name',  or 'KEY_NAME',  or 'key-name', regex used for validation is '[-._a-zA-Z0-9]+')";
    let is_allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    for key in keys(object, field) {
        if key.is_empty() || !key.chars().all(is_allowed) {
            let path = format!("{field}[{key}]");
            causes.push(Cause::invalid(path, &key.as_str().into(), PROBLEM));
        }
    }
}

fn check_config_map(next: &Value, causes: &mut Vec<Cause>) {
    check_keys(next, "data", causes);
    for key in keys(next, "data") {
        if next["binaryData"].get(key).is_some() {
            let path = format!("data[{key}]");
            let problem = "duplicate of key present in binaryData";
            causes.push(Cause::invalid(path, &key.as_str().into(), problem));
        }
    }
    check_keys(next, "binaryData", causes);
}

fn check_secret(next: &Value, causes: &mut Vec<Cause>) {
    check_keys(next, "data", causes);
    let required: &[&str] = match next["type"].as_str().unwrap_or_default() {
        "kubernetes.io/tls" => &["tls.crt", "tls.key"],
        "kubernetes.io/dockerconfigjson" => &[".dockerconfigjson"],
        _ => &[],
    };
    for key in required {
        if next["data"].get(key).is_none() {
            causes.push(Cause::required(format!("data[{key}]"), ""));
        }
    }
}

fn check_lease(next: &Value, causes: &mut Vec<Cause>) {
    let duration = &next["spec"]["leaseDurationSeconds"];
    if duration.as_i64().is_some_and(|seconds| seconds <= 0) {
        let field = "spec.leaseDurationSeconds";
        causes.push(Cause::invalid(field, duration, "must be greater than 0"));
    }
    let transitions = &next["spec"]["leaseTransitions"];
    if transitions.as_i64().is_some_and(|count| count < 0) {
        let problem = "must be greater than or equal to 0";
        causes.push(Cause::invalid(
            "spec.leaseTransitions",
            transitions,
            problem,
        ));
    }
}

fn check_event(next: &Value, causes: &mut Vec<Cause>) {
    let text = |field: &str| next[field].as_str().unwrap_or_default();
    if text("action").is_empty() {
        causes.push(Cause::required("action", ""));
    }
    if text("message").len() > 1024 {
        let problem = "can have at most 1024 characters";
        causes.push(Cause::invalid("message", &"".into(), problem));
    }
}

/// Returns a version as the server's messages show it.
fn version_text(version: &Value) -> String {
    format!(
        "{{\"Name\":{},\"Served\":{},\"Storage\":{},\"Deprecated\":false,\"DeprecationWarning\":null,\
         \"Schema\":null,\"Subresources\":null,\"AdditionalPrinterColumns\":null,\"SelectableFields\":null}}",
        version["name"], version["served"], version["storage"]
    )
}

fn check_crd(next: &Value, causes: &mut Vec<Cause>) {
    let (spec, name) = (&next["spec"], meta::name(next));
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let expected = format!(
        "{}.{}",
        text(&spec["names"]["plural"]),
        text(&spec["group"])
    );
    if name != expected {
        let problem = "must be spec.names.plural+\".\"+spec.group";
        causes.push(Cause::invalid("metadata.name", &name.into(), problem));
    }
    let scope = text(&spec["scope"]);
    if !matches!(&*scope, "Cluster" | "Namespaced") {
        let supported = r#""Cluster", "Namespaced""#;
        let scope = format!("{scope:?}");
        causes.push(Cause::unsupported("spec.scope", scope, supported));
    }
    let versions = spec["versions"].as_array();
    let versions = versions.map(Vec::as_slice).unwrap_or_default();
    let stored = versions.iter().filter(|version| version["storage"] == true);
    if stored.count() != 1 {
        let problem = "must have exactly one version marked as storage version";
        let texts: Vec<String> = versions.iter().map(version_text).collect();
        causes.push(Cause {
            reason: "FieldValueInvalid",
            message: format!("Invalid value: [{}]: {problem}", texts.join(",")),
            field: "spec.versions".to_owned(),
        });
    }
    if !versions.iter().any(|version| version["storage"] == true) {
        let problem = "must have at least one stored version";
        causes.push(Cause::invalid(
            "status.storedVersions",
            &Value::Null,
            problem,
        ));
    }
    for (index, version) in versions.iter().enumerate() {
        if version["schema"]["openAPIV3Schema"].is_null() {
            let field = format!("spec.versions[{index}].schema.openAPIV3Schema");
            causes.push(Cause::required(field, ""));
        }
    }
}

pub(crate) fn check_metadata(previous: &Value, next: &Value, causes: &mut Vec<Cause>) {
    let uid = &next["metadata"]["uid"];
    if *uid != previous["metadata"]["uid"] {
        causes.push(Cause::immutable("metadata.uid", uid));
    }
    if meta::is_terminating(previous) {
        let previous_finalizers: Vec<&str> = meta::finalizers(previous).collect();
        let added: Vec<String> = meta::finalizers(next)
            .filter(|finalizer| !previous_finalizers.contains(finalizer))
            .map(|finalizer| format!("{finalizer:?}"))
            .collect();
        if !added.is_empty() {
            let problem = format!(
                "no new finalizers can be added if the object is being deleted, found new finalizers []string{{{}}}",
                added.join(", ")
            );
            causes.push(Cause::forbidden("metadata.finalizers", &problem));
        }
    }
}

pub(crate) fn check_immutable(
    kind: &Kind,
    previous: &Value,
    next: &Value,
    causes: &mut Vec<Cause>,
) {
    let immutable: &[(&str, &str)] = match kind.resource.as_str() {
        "secrets" if kind.group.is_empty() => &[("/type", "type")],
        "deployments" | "daemonsets" | "replicasets" => &[("/spec/selector", "spec.selector")],
        "jobs" => &[
            ("/spec/selector", "spec.selector"),
            ("/spec/template", "spec.template"),
        ],
        "rolebindings" | "clusterrolebindings" => &[("/roleRef", "roleRef")],
        "customresourcedefinitions" => &[
            ("/spec/group", "spec.group"),
            ("/spec/scope", "spec.scope"),
            ("/spec/names/kind", "spec.names.kind"),
            ("/spec/names/plural", "spec.names.plural"),
        ],
        _ => &[],
    };
    for (pointer, field) in immutable {
        let (old, new) = (previous.pointer(pointer), next.pointer(pointer));
        if old != new {
            let new = new.unwrap_or(&Value::Null);
            causes.push(match kind.resource.as_str() {
                "rolebindings" | "clusterrolebindings" => {
                    Cause::invalid(*field, new, "cannot change roleRef")
                }
                _ => Cause::immutable(*field, new),
            });
        }
    }
    let holds_data = kind.is("", "secrets") || kind.is("", "configmaps");
    if holds_data && previous["immutable"] == true {
        let problem = "field is immutable when `immutable` is set";
        if next["immutable"] != true {
            causes.push(Cause::forbidden("immutable", problem));
        }
        for field in ["data", "binaryData"] {
            if previous.get(field) != next.get(field) {
                causes.push(Cause::forbidden(field, problem));
            }
        }
    }
    if kind.is("apps", "statefulsets") {
        check_stateful_set(previous, next, causes);
    }
}

fn check_stateful_set(previous: &Value, next: &Value, causes: &mut Vec<Cause>) {
    const MUTABLE: [&str; 7] = [
        "replicas",
        "ordinals",
        "template",
        "updateStrategy",
        "revisionHistoryLimit",
        "persistentVolumeClaimRetentionPolicy",
        "minReadySeconds",
    ];
    let immutable_fields = |object: &Value| {
        let mut spec = object["spec"].as_object().cloned().unwrap_or_default();
        spec.retain(|name, _| !MUTABLE.contains(&&**name));
        spec
    };
    if immutable_fields(previous) != immutable_fields(next) {
        let problem = "updates to statefulset spec for fields other than 'replicas', 'ordinals', 'template', \
                       'updateStrategy', 'revisionHistoryLimit', 'persistentVolumeClaimRetentionPolicy' and \
                       'minReadySeconds' are forbidden";
        causes.push(Cause::forbidden("spec", problem));
    }
}
