//! The state of a namespace, without all that differs between two runs.

use http::Method;
use kube::Client;
use serde_json::{Map, Value, json};

use super::{Outcome, error_text, request};
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
const SERVER_FIELDS: [&str; 6] = [
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
                state.insert(format!("{plural}:{name}"), normalize(object));
            }
        }
    }
    Ok(state.into())
}

fn normalize(object: &Value) -> Value {
    let mut normalized = object.clone();
    normalized["managers"] = managers(object);
    if object["type"] == krypton_helm::releases::SECRET_TYPE {
        normalized["data"] = match Release::decode(object) {
            Ok(release) => normalize_release(&release),
            Err(_) => json!("undecodable"),
        };
    }
    for label in ["createdAt", "modifiedAt"] {
        if let Some(value) = normalized.pointer_mut(&format!("/metadata/labels/{label}")) {
            *value = json!("a time");
        }
    }
    if let Some(annotations) = normalized["metadata"]["annotations"].as_object_mut() {
        annotations.remove("deployment.kubernetes.io/revision");
    }
    if normalized["metadata"]["annotations"] == json!({})
        || normalized["metadata"]["annotations"].is_null()
    {
        remove(&mut normalized, "/metadata/annotations");
    }
    if normalized
        .pointer("/spec/selector/matchLabels/batch.kubernetes.io~1controller-uid")
        .is_some()
    {
        remove(&mut normalized, "/spec/selector");
        remove(&mut normalized, "/spec/template/metadata/labels");
    }
    for field in SERVER_FIELDS
        .into_iter()
        .chain(["/spec/clusterIP", "/spec/clusterIPs"])
    {
        remove(&mut normalized, field);
    }
    normalized
}

/// Returns who manages which fields. Controllers may have been slower.
fn managers(object: &Value) -> Value {
    let entries = object["metadata"]["managedFields"].as_array();
    let entries = entries.into_iter().flatten().filter_map(|entry| {
        let manager = entry["manager"].as_str()?;
        let is_controller = manager.starts_with("kube-controller");
        (!is_controller).then(|| {
            let is_release = object["type"] == krypton_helm::releases::SECRET_TYPE;
            let fields = if is_release {
                &Value::Null
            } else {
                &entry["fieldsV1"]
            };
            let name = if is_release { "helm" } else { manager };
            json!([name, entry["operation"], fields])
        })
    });
    let mut entries: Vec<Value> = entries.collect();
    entries.sort_by_key(Value::to_string);
    entries.into()
}

/// Replaces times by their presence, and templates by their names.
fn normalize_release(release: &Release) -> Value {
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
    let text = value.to_string().replace(namespace, "$NS");
    serde_json::from_str(&text).map_err(error_text)
}

/// Returns a line for each difference.
pub(super) fn differences(real: &Value, model: &Value) -> Vec<String> {
    let mut differences = Vec::new();
    collect_differences("", real, model, &mut differences);
    differences
}

fn collect_differences(path: &str, real: &Value, model: &Value, differences: &mut Vec<String>) {
    match (real, model) {
        (Value::Object(real), Value::Object(model)) => {
            let keys: std::collections::BTreeSet<&String> =
                real.keys().chain(model.keys()).collect();
            for key in keys {
                let (real, model) = (real.get(key), model.get(key));
                let absent = &Value::Null;
                let path = format!("{path}/{key}");
                collect_differences(
                    &path,
                    real.unwrap_or(absent),
                    model.unwrap_or(absent),
                    differences,
                );
            }
        }
        (Value::Array(real), Value::Array(model)) if real.len() == model.len() => {
            for (index, (real, model)) in real.iter().zip(model).enumerate() {
                collect_differences(&format!("{path}/{index}"), real, model, differences);
            }
        }
        _ if real == model => {}
        (Value::String(real), Value::String(model)) => {
            let common = real.chars().zip(model.chars()).take_while(|(a, b)| a == b);
            let skip = common.count().saturating_sub(40);
            let excerpt = |text: &str| -> String { text.chars().skip(skip).take(400).collect() };
            differences.push(format!(
                "{path}: {:?} ≠ {:?}",
                excerpt(real),
                excerpt(model)
            ));
        }
        _ => differences.push(format!("{path}: {real} ≠ {model}")),
    }
}
