//! The API calls of the hub and the agent. The table must contain a request for each of them.
//!
//! A call is `VERB KIND [metadata] [PARAMETER ...]`. The kind is the plural of a built-in kind, `custom` for all custom
//! objects, or the path of a raw request. With `metadata`, the client requests only metadata. Parameters are query
//! parameters, and fields of delete options. Every watch also has [`WATCH`].

use std::collections::BTreeSet;

use serde_json::Value;

use super::recorded;

/// Query parameters of every watch of kube.
const WATCH: [&str; 4] = [
    "allowWatchBookmarks",
    "resourceVersion",
    "timeoutSeconds",
    "watch",
];

/// Source files with their calls.
const CALLS: &str = "
agent/src/credentials/join.rs
  get secrets
agent/src/credentials/store.rs
  create namespaces
  create secrets
  get secrets
  replace secrets
common/reconciler/src/actions/cert_manager.rs
  delete customresourcedefinitions preconditions
  get customresourcedefinitions
  list custom metadata limit
  list secrets metadata fieldSelector labelSelector limit
common/reconciler/src/actions/chart_crds.rs
  apply customresourcedefinitions fieldManager force
  get customresourcedefinitions
common/reconciler/src/actions/deletion_check.rs
  get custom metadata
  get customresourcedefinitions metadata
common/reconciler/src/actions/finalizer.rs
  merge custom
common/reconciler/src/actions/leftovers.rs
  delete configmaps preconditions propagationPolicy
  get configmaps metadata
  merge secrets metadata
common/reconciler/src/actions/objects.rs
  raw /apis/*/*
common/reconciler/src/actions/occupants.rs
  raw /api
  raw /apis
  list configmaps metadata limit
  list secrets metadata continue limit
common/reconciler/src/actions/read_release.rs
  list secrets metadata fieldSelector labelSelector
  get secrets
common/reconciler/src/actions/rollback.rs
  merge secrets metadata
common/reconciler/src/actions/status.rs
  merge custom/status
common/reconciler/src/actions/stored_revisions.rs
  list secrets labelSelector limit
  list secrets continue labelSelector limit
  list secrets metadata labelSelector limit
common/reconciler/src/actions/trust.rs
  get configmaps metadata
common/reconciler/src/actions/unlock.rs
  replace secrets
common/reconciler/src/actions/unreadable_revision.rs
  create secrets
  delete secrets preconditions
common/reconciler/src/actions/workspace.rs
  create namespaces
  delete namespaces preconditions
  get namespaces
  get namespaces metadata
common/reconciler/src/backup.rs
  create custom
  create secrets
  delete custom preconditions
  delete secrets preconditions
  get custom
  get secrets
  get namespaces metadata
  list custom continue limit
  list secrets labelSelector limit
  merge custom metadata
  replace secrets
common/reconciler/src/backup/restoring.rs
  get customresourcedefinitions metadata
common/reconciler/src/cluster_version.rs
  raw /version
common/reconciler/src/drift/check.rs
  apply configmaps dryRun fieldManager
  apply configmaps dryRun fieldManager force
  apply configmaps fieldManager force
  apply custom fieldManager
  get configmaps
  raw /api/v1
  raw /apis/*/*
common/reconciler/src/drift/schedule.rs
  get secrets
common/reconciler/src/placed_tenants.rs
  create custom
  create namespaces
  delete custom preconditions
  get custom
  replace custom
common/reconciler/src/record.rs
  create secrets
  get secrets
  replace secrets
common/reconciler/src/record/anchor.rs
  create configmaps
  get configmaps
  replace configmaps
common/reconciler/src/release_record.rs
  create secrets
  delete secrets preconditions
  get secrets
  replace secrets
common/reconciler/src/watches.rs
  list customresourcedefinitions metadata fieldSelector limit
  list namespaces metadata limit
  list secrets metadata fieldSelector labelSelector limit
  list custom continue limit
  list deployments labelSelector limit
  list statefulsets labelSelector limit
  list daemonsets labelSelector limit
  watch customresourcedefinitions metadata fieldSelector
  watch namespaces metadata
  watch secrets metadata fieldSelector labelSelector
  watch custom
  watch deployments labelSelector
  watch statefulsets labelSelector
  watch daemonsets labelSelector
common/reconciler/src/workspaces.rs
  merge namespaces metadata
common/runtime/src/cluster.rs
  get namespaces metadata
  raw /version
common/runtime/src/crd.rs
  apply customresourcedefinitions fieldManager force
  get customresourcedefinitions
  list custom metadata limit
  raw /openapi/v3/apis/*/*
  replace customresourcedefinitions
common/runtime/src/events.rs
  create events
  merge events
common/runtime/src/lease.rs
  create leases
  create namespaces
  get leases
  replace leases
hub/src/agent_server/enrollment_service.rs
  create custom
  get custom
  merge custom/status
hub/src/agent_server/join_info.rs
  create configmaps
  get configmaps
  replace configmaps
hub/src/agent_server/join_token.rs
  delete secrets preconditions
  get secrets
  list secrets labelSelector limit
  replace secrets
hub/src/ca.rs
  create secrets
  get secrets
hub/src/ca/rotation_controller.rs
  get secrets
  list custom limit
  replace secrets
hub/src/chart/credentials.rs
  get secrets
hub/src/chart/values_reader.rs
  create secrets
  get configmaps
  get secrets
  replace secrets
  watch configmaps fieldSelector
  watch secrets fieldSelector
hub/src/chart/version_pin.rs
  create configmaps
  get configmaps
  replace configmaps
hub/src/deployments/api.rs
  merge custom
  merge custom/status
hub/src/deployments/controller.rs
  watch custom
hub/src/discovery/named_secrets.rs
  watch secrets fieldSelector
hub/src/discovery/provider.rs
  raw /apis/*/*
  watch custom
  watch secrets fieldSelector labelSelector
  watch secrets labelSelector
hub/src/discovery/register.rs
  create configmaps
  get configmaps
  get customresourcedefinitions metadata
  replace configmaps
hub/src/edgecluster.rs
  watch custom
hub/src/edgecluster/api.rs
  create custom dryRun
  merge custom
  merge custom/status
hub/src/home.rs
  get secrets
hub/src/leader/home_writer.rs
  get custom metadata
  get customresourcedefinitions metadata
hub/src/leader/epoch.rs
  create configmaps
  get configmaps
  replace configmaps
hub/src/leader/pod_label.rs
  merge pods metadata
hub/src/tenants/controller.rs
  watch custom
hub/src/tenants/controller/requests.rs
  get customresourcedefinitions metadata
  merge custom
  merge custom/status
";

/// Returns each call with its source file.
fn calls() -> Vec<(&'static str, &'static str)> {
    let mut source = "";
    let mut calls = Vec::new();
    for line in CALLS.lines().filter(|line| !line.is_empty()) {
        match line.strip_prefix("  ") {
            Some(call) => calls.push((source, call)),
            None => source = line,
        }
    }
    calls
}

/// The parts of a recorded request that a call names.
#[derive(Debug, PartialEq)]
struct RequestShape {
    verb: String,
    kind: String,
    subresource: String,
    is_metadata: bool,
    parameters: BTreeSet<String>,
}

fn request_shape(step: &Value) -> Option<RequestShape> {
    let (method, uri) = step.get("request")?.as_str()?.split_once(' ')?;
    let (path, query) = uri.split_once('?').unwrap_or((uri, ""));
    let mut parameters: BTreeSet<String> = query
        .split('&')
        .filter_map(|pair| pair.split('=').next())
        .filter(|name| !name.is_empty())
        .map(str::to_owned)
        .collect();
    let mut segments: Vec<&str> = path.split('/').skip(1).collect();
    let group = match segments.first().copied() {
        Some("api") if segments.len() > 2 => segments.drain(..2).next_back()?,
        Some("apis") if segments.len() > 3 => segments.drain(..3).nth(1)?,
        _ => return Some(raw_shape(path, method)),
    };
    if segments.len() > 2 && segments.first() == Some(&"namespaces") {
        segments.drain(..2);
    }
    let kind = if group.ends_with(".example.com") {
        "custom"
    } else {
        segments.first()?
    };
    let content_type = step
        .get("sends")
        .and_then(Value::as_str)
        .unwrap_or_default();
    let verb = match (method, segments.len()) {
        ("GET", _) if parameters.contains("watch") => "watch",
        ("GET", 1) => "list",
        ("GET", _) => "get",
        ("POST", _) => "create",
        ("PUT", _) => "replace",
        ("DELETE", _) => "delete",
        _ if content_type.contains("apply-patch") => "apply",
        _ => "merge",
    };
    let preconditions = ["uid", "resourceVersion"];
    let has_precondition = |name: &&str| {
        step.pointer(&format!("/body/preconditions/{name}"))
            .is_some()
    };
    if preconditions.iter().all(has_precondition) {
        parameters.insert("preconditions".to_owned());
    }
    if step.pointer("/body/propagationPolicy").is_some() {
        parameters.insert("propagationPolicy".to_owned());
    }
    let accept = step
        .get("accept")
        .and_then(Value::as_str)
        .unwrap_or_default();
    Some(RequestShape {
        verb: verb.to_owned(),
        kind: kind.to_owned(),
        subresource: segments.get(2).map(ToString::to_string).unwrap_or_default(),
        is_metadata: accept.contains("as=PartialObjectMetadata"),
        parameters,
    })
}

fn raw_shape(path: &str, method: &str) -> RequestShape {
    let segments: Vec<&str> = path.split('/').collect();
    let kind = match segments.as_slice() {
        ["", "apis", _, _] => "/apis/*/*".to_owned(),
        ["", "openapi", "v3", "apis", _, _] => "/openapi/v3/apis/*/*".to_owned(),
        _ => path.to_owned(),
    };
    RequestShape {
        verb: if method == "GET" {
            "raw".to_owned()
        } else {
            method.to_owned()
        },
        kind,
        subresource: String::new(),
        is_metadata: false,
        parameters: BTreeSet::new(),
    }
}

fn is_covered(call: &str, shapes: &[RequestShape]) -> bool {
    let mut words = call.split(' ');
    let (verb, kind) = (words.next().unwrap(), words.next().unwrap());
    let path = if verb == "raw" {
        kind
    } else {
        kind.split('/').next().unwrap()
    };
    let subresource = kind.strip_prefix(path).unwrap().trim_start_matches('/');
    let (flags, mut parameters): (Vec<&str>, Vec<&str>) =
        words.partition(|word| *word == "metadata");
    if verb == "watch" {
        parameters.extend(WATCH);
    }
    shapes.iter().any(|shape| {
        shape.verb == verb
            && shape.kind == path
            && shape.subresource == subresource
            && shape.is_metadata != flags.is_empty()
            && parameters
                .iter()
                .all(|name| shape.parameters.contains(*name))
    })
}

#[test]
fn table_covers_all_calls_of_product() {
    let recorded = recorded::read().unwrap();
    let transcripts = recorded.values().flat_map(|topic| topic.values());
    let steps = transcripts.filter_map(Value::as_array).flatten();
    // A rejected request doesn't show how the server performs the call.
    let succeeded = steps.filter(|step| {
        let status = step.get("status").and_then(Value::as_u64);
        status.is_some_and(|status| status < 300)
    });
    let shapes: Vec<RequestShape> = succeeded.filter_map(request_shape).collect();
    let missing: Vec<_> = calls()
        .into_iter()
        .filter(|(_, call)| !is_covered(call, &shapes))
        .collect();
    assert!(missing.is_empty(), "{missing:#?}");
}

#[test]
fn sources_of_calls_exist() {
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");
    for (source, _) in calls() {
        let path = std::path::Path::new(root).join(source);
        assert!(path.exists(), "{}", path.display());
    }
}
