//! The state of a namespace, without all that differs between two runs.

use http::Method;
use kube::Client;
use serde_json::{Map, Value, json};

use super::{Outcome, request, text};
use crate::release::Release;
use crate::run::Exit;

const RESOURCES: [&str; 6] = [
    "api/v1|configmaps",
    "api/v1|secrets",
    "api/v1|serviceaccounts",
    "api/v1|services",
    "apis/apps/v1|deployments",
    "apis/batch/v1|jobs",
];
/// Fields that the API server or a controller sets.
const SERVED: [&str; 6] = [
    "/metadata/uid",
    "/metadata/resourceVersion",
    "/metadata/creationTimestamp",
    "/metadata/generation",
    "/metadata/managedFields",
    "/status",
];

/// Returns the exit code and the last error.
pub(super) fn exit(exit: &Exit) -> Value {
    let stderr = String::from_utf8_lossy(&exit.stderr);
    let error = match stderr.rfind("\nError: ") {
        Some(at) => stderr.get(at + 1..).unwrap_or_default(),
        None if stderr.starts_with("Error: ") => &stderr,
        None => "",
    };
    json!({ "code": exit.code, "error": without_position(error) })
}

/// Removes the line and column of a failed template.
fn without_position(error: &str) -> String {
    let Some((before, after)) = error.split_once("objects.yaml:") else {
        return error.to_owned();
    };
    let after = after.trim_start_matches(|c: char| c.is_ascii_digit() || c == ':');
    format!("{before}objects.yaml{after}")
}

/// Returns all objects of a namespace, with decoded releases.
pub(super) async fn state(client: &Client, namespace: &str) -> Outcome<Value> {
    let mut state = Map::new();
    for resource in RESOURCES {
        let (root, plural) = resource.split_once('|').unwrap_or_default();
        let path = format!("/{root}/namespaces/{namespace}/{plural}");
        let list = request(client, &Method::GET, &path, &Value::Null).await?;
        for object in list["items"].as_array().into_iter().flatten() {
            let name = object["metadata"]["name"].as_str().unwrap_or_default();
            if !["kube-root-ca.crt", "default"].contains(&name) {
                state.insert(format!("{plural}:{name}"), shape(object));
            }
        }
    }
    Ok(state.into())
}

fn shape(object: &Value) -> Value {
    let mut shaped = object.clone();
    shaped["managers"] = managers(object);
    if object["type"] == krypton_helm::releases::SECRET_TYPE {
        shaped["data"] = match Release::decode(object) {
            Ok(release) => decoded(&release),
            Err(_) => json!("undecodable"),
        };
    }
    for label in ["createdAt", "modifiedAt"] {
        if let Some(value) = shaped.pointer_mut(&format!("/metadata/labels/{label}")) {
            *value = json!("a time");
        }
    }
    if let Some(annotations) = shaped["metadata"]["annotations"].as_object_mut() {
        annotations.remove("deployment.kubernetes.io/revision");
    }
    if shaped["metadata"]["annotations"] == json!({}) || shaped["metadata"]["annotations"].is_null()
    {
        remove(&mut shaped, "/metadata/annotations");
    }
    if shaped
        .pointer("/spec/selector/matchLabels/batch.kubernetes.io~1controller-uid")
        .is_some()
    {
        remove(&mut shaped, "/spec/selector");
        remove(&mut shaped, "/spec/template/metadata/labels");
    }
    for field in SERVED
        .into_iter()
        .chain(["/spec/clusterIP", "/spec/clusterIPs"])
    {
        remove(&mut shaped, field);
    }
    shaped
}

/// Returns who manages which fields. Controllers may have been slower.
fn managers(object: &Value) -> Value {
    let entries = object["metadata"]["managedFields"].as_array();
    let entries = entries.into_iter().flatten().filter_map(|entry| {
        let manager = entry["manager"].as_str()?;
        let controller = manager.starts_with("kube-controller");
        (!controller).then(|| {
            let release = object["type"] == krypton_helm::releases::SECRET_TYPE;
            let fields = if release {
                &Value::Null
            } else {
                &entry["fieldsV1"]
            };
            let name = if release { "helm" } else { manager };
            json!([name, entry["operation"], fields])
        })
    });
    let mut entries: Vec<Value> = entries.collect();
    entries.sort_by_key(Value::to_string);
    entries.into()
}

/// Replaces times by their presence, and templates by their names.
fn decoded(release: &Release) -> Value {
    let mut release = release.clone();
    let info = &mut release.info;
    let times = [
        &mut info.first_deployed,
        &mut info.last_deployed,
        &mut info.deleted,
    ];
    let hooks = release.hooks.iter_mut();
    let hooks = hooks.flat_map(|hook| {
        let run = &mut hook.last_run;
        [&mut run.started_at, &mut run.completed_at]
    });
    for time in times.into_iter().chain(hooks) {
        if !time.is_empty() {
            "a time".clone_into(time);
        }
    }
    let chart = &mut release.chart;
    for list in ["templates", "files"] {
        let items = chart[list].as_array();
        let names = items.into_iter().flatten().map(|file| file["name"].clone());
        chart[list] = names.collect();
    }
    for time in ["/modtime", "/schemamodtime"] {
        remove(chart, time);
    }
    serde_json::to_value(&release).unwrap_or_default()
}

fn remove(value: &mut Value, pointer: &str) {
    if let Some((parent, field)) = pointer.rsplit_once('/')
        && let Some(Value::Object(parent)) = value.pointer_mut(parent)
    {
        parent.remove(field);
    }
}

/// Replaces the namespace in all texts.
pub(super) fn without_namespace(value: &Value, namespace: &str) -> Outcome<Value> {
    let plain = value.to_string().replace(namespace, "$NS");
    serde_json::from_str(&plain).map_err(text)
}

/// Returns a line for each difference.
pub(super) fn differences(real: &Value, model: &Value) -> Vec<String> {
    let mut found = Vec::new();
    collect("", real, model, &mut found);
    found
}

fn collect(at: &str, real: &Value, model: &Value, found: &mut Vec<String>) {
    match (real, model) {
        (Value::Object(one), Value::Object(other)) => {
            let keys: std::collections::BTreeSet<&String> =
                one.keys().chain(other.keys()).collect();
            for key in keys {
                let (one, other) = (one.get(key), other.get(key));
                let absent = &Value::Null;
                let at = format!("{at}/{key}");
                collect(&at, one.unwrap_or(absent), other.unwrap_or(absent), found);
            }
        }
        (Value::Array(one), Value::Array(other)) if one.len() == other.len() => {
            for (index, (one, other)) in one.iter().zip(other).enumerate() {
                collect(&format!("{at}/{index}"), one, other, found);
            }
        }
        _ if real == model => {}
        (Value::String(one), Value::String(other)) => {
            let same = one.chars().zip(other.chars()).take_while(|(a, b)| a == b);
            let skip = same.count().saturating_sub(40);
            let part = |text: &str| -> String { text.chars().skip(skip).take(400).collect() };
            found.push(format!("{at}: {:?} ≠ {:?}", part(one), part(other)));
        }
        _ => found.push(format!("{at}: {real} ≠ {model}")),
    }
}
