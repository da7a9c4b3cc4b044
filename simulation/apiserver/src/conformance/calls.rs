//! The API calls of the hub and the agent. The table must contain a request for each of them.

/// One call in the source of the product.
#[derive(Clone, Copy, Debug)]
pub struct ApiCall {
    /// Source file with the call.
    pub source: &'static str,
    /// `get`, `list`, `watch`, `create`, `replace`, `merge`, `apply`, `delete` or `raw`.
    pub verb: &'static str,
    /// Plural of a built-in kind, `custom` for all custom objects, or the path of a raw request.
    pub kind: &'static str,
    /// Empty for the object.
    pub subresource: &'static str,
    /// Whether the client requests only metadata.
    pub is_metadata: bool,
    /// Query parameters and fields of delete options, separated by spaces.
    pub parameters: &'static str,
}

/// Query parameters of a watch of kube.
const WATCH: &str = "allowWatchBookmarks resourceVersion timeoutSeconds watch";
const WATCH_LABELS: &str = "allowWatchBookmarks labelSelector resourceVersion timeoutSeconds watch";
const WATCH_FIELDS: &str = "allowWatchBookmarks fieldSelector resourceVersion timeoutSeconds watch";
const WATCH_BOTH: &str =
    "allowWatchBookmarks fieldSelector labelSelector resourceVersion timeoutSeconds watch";

const fn whole(
    source: &'static str,
    verb: &'static str,
    kind: &'static str,
    parameters: &'static str,
) -> ApiCall {
    ApiCall {
        source,
        verb,
        kind,
        subresource: "",
        is_metadata: false,
        parameters,
    }
}

const fn metadata(
    source: &'static str,
    verb: &'static str,
    kind: &'static str,
    parameters: &'static str,
) -> ApiCall {
    ApiCall {
        source,
        verb,
        kind,
        subresource: "",
        is_metadata: true,
        parameters,
    }
}

/// A merge patch of the status.
const fn status(source: &'static str) -> ApiCall {
    ApiCall {
        source,
        verb: "merge",
        kind: "custom",
        subresource: "status",
        is_metadata: false,
        parameters: "",
    }
}

/// All calls, by source file.
pub const CALLS: &[ApiCall] = &[
    whole("agent/src/credentials/join.rs", "get", "secrets", ""),
    whole("agent/src/credentials/store.rs", "create", "namespaces", ""),
    whole("agent/src/credentials/store.rs", "create", "secrets", ""),
    whole("agent/src/credentials/store.rs", "get", "secrets", ""),
    whole("agent/src/credentials/store.rs", "replace", "secrets", ""),
    whole(
        "common/reconciler/src/actions/cert_manager.rs",
        "delete",
        "customresourcedefinitions",
        "preconditions.resourceVersion preconditions.uid",
    ),
    whole(
        "common/reconciler/src/actions/cert_manager.rs",
        "get",
        "customresourcedefinitions",
        "",
    ),
    metadata(
        "common/reconciler/src/actions/cert_manager.rs",
        "list",
        "custom",
        "limit",
    ),
    metadata(
        "common/reconciler/src/actions/cert_manager.rs",
        "list",
        "secrets",
        "fieldSelector labelSelector limit",
    ),
    whole(
        "common/reconciler/src/actions/chart_crds.rs",
        "apply",
        "customresourcedefinitions",
        "fieldManager force",
    ),
    whole(
        "common/reconciler/src/actions/chart_crds.rs",
        "get",
        "customresourcedefinitions",
        "",
    ),
    metadata(
        "common/reconciler/src/actions/deletion_check.rs",
        "get",
        "custom",
        "",
    ),
    metadata(
        "common/reconciler/src/actions/deletion_check.rs",
        "get",
        "customresourcedefinitions",
        "",
    ),
    whole(
        "common/reconciler/src/actions/finalizer.rs",
        "merge",
        "custom",
        "",
    ),
    whole(
        "common/reconciler/src/actions/leftovers.rs",
        "delete",
        "configmaps",
        "preconditions.resourceVersion preconditions.uid propagationPolicy",
    ),
    metadata(
        "common/reconciler/src/actions/leftovers.rs",
        "get",
        "configmaps",
        "",
    ),
    metadata(
        "common/reconciler/src/actions/leftovers.rs",
        "merge",
        "secrets",
        "",
    ),
    whole(
        "common/reconciler/src/actions/occupants.rs",
        "raw",
        "/api",
        "",
    ),
    whole(
        "common/reconciler/src/actions/occupants.rs",
        "raw",
        "/apis",
        "",
    ),
    metadata(
        "common/reconciler/src/actions/occupants.rs",
        "list",
        "configmaps",
        "limit",
    ),
    metadata(
        "common/reconciler/src/actions/occupants.rs",
        "list",
        "secrets",
        "continue limit",
    ),
    metadata(
        "common/reconciler/src/actions/read_release.rs",
        "list",
        "secrets",
        "fieldSelector labelSelector",
    ),
    whole(
        "common/reconciler/src/actions/read_release.rs",
        "get",
        "secrets",
        "",
    ),
    metadata(
        "common/reconciler/src/actions/rollback.rs",
        "merge",
        "secrets",
        "",
    ),
    status("common/reconciler/src/actions/status.rs"),
    whole(
        "common/reconciler/src/actions/stored.rs",
        "list",
        "secrets",
        "labelSelector limit",
    ),
    whole(
        "common/reconciler/src/actions/stored.rs",
        "list",
        "secrets",
        "continue labelSelector limit",
    ),
    metadata(
        "common/reconciler/src/actions/stored.rs",
        "list",
        "secrets",
        "labelSelector limit",
    ),
    metadata(
        "common/reconciler/src/actions/trust.rs",
        "get",
        "configmaps",
        "",
    ),
    whole(
        "common/reconciler/src/actions/trust.rs",
        "raw",
        "/apis/*/*",
        "",
    ),
    whole(
        "common/reconciler/src/actions/unlock.rs",
        "replace",
        "secrets",
        "",
    ),
    whole(
        "common/reconciler/src/actions/unreadable_revision.rs",
        "create",
        "secrets",
        "",
    ),
    whole(
        "common/reconciler/src/actions/unreadable_revision.rs",
        "delete",
        "secrets",
        "preconditions.resourceVersion preconditions.uid",
    ),
    whole(
        "common/reconciler/src/actions/workspace.rs",
        "create",
        "namespaces",
        "",
    ),
    whole(
        "common/reconciler/src/actions/workspace.rs",
        "delete",
        "namespaces",
        "preconditions.resourceVersion preconditions.uid",
    ),
    whole(
        "common/reconciler/src/actions/workspace.rs",
        "get",
        "namespaces",
        "",
    ),
    metadata(
        "common/reconciler/src/actions/workspace.rs",
        "get",
        "namespaces",
        "",
    ),
    whole("common/reconciler/src/backup.rs", "create", "custom", ""),
    whole("common/reconciler/src/backup.rs", "create", "secrets", ""),
    whole(
        "common/reconciler/src/backup.rs",
        "delete",
        "custom",
        "preconditions.resourceVersion preconditions.uid",
    ),
    whole(
        "common/reconciler/src/backup.rs",
        "delete",
        "secrets",
        "preconditions.resourceVersion preconditions.uid",
    ),
    whole("common/reconciler/src/backup.rs", "get", "custom", ""),
    whole("common/reconciler/src/backup.rs", "get", "secrets", ""),
    metadata("common/reconciler/src/backup.rs", "get", "namespaces", ""),
    whole(
        "common/reconciler/src/backup.rs",
        "list",
        "custom",
        "continue limit",
    ),
    whole(
        "common/reconciler/src/backup.rs",
        "list",
        "secrets",
        "labelSelector limit",
    ),
    metadata("common/reconciler/src/backup.rs", "merge", "custom", ""),
    whole("common/reconciler/src/backup.rs", "replace", "secrets", ""),
    metadata(
        "common/reconciler/src/backup/restoring.rs",
        "get",
        "customresourcedefinitions",
        "",
    ),
    whole(
        "common/reconciler/src/cluster_version.rs",
        "raw",
        "/version",
        "",
    ),
    whole(
        "common/reconciler/src/drift/look.rs",
        "apply",
        "configmaps",
        "dryRun fieldManager",
    ),
    whole(
        "common/reconciler/src/drift/look.rs",
        "apply",
        "configmaps",
        "dryRun fieldManager force",
    ),
    whole(
        "common/reconciler/src/drift/look.rs",
        "apply",
        "configmaps",
        "fieldManager force",
    ),
    whole(
        "common/reconciler/src/drift/look.rs",
        "apply",
        "custom",
        "fieldManager",
    ),
    whole(
        "common/reconciler/src/drift/look.rs",
        "get",
        "configmaps",
        "",
    ),
    whole("common/reconciler/src/drift/look.rs", "raw", "/api/v1", ""),
    whole(
        "common/reconciler/src/drift/look.rs",
        "raw",
        "/apis/*/*",
        "",
    ),
    whole(
        "common/reconciler/src/drift/schedule.rs",
        "get",
        "secrets",
        "",
    ),
    whole(
        "common/reconciler/src/placed_tenants.rs",
        "create",
        "custom",
        "",
    ),
    whole(
        "common/reconciler/src/placed_tenants.rs",
        "create",
        "namespaces",
        "",
    ),
    whole(
        "common/reconciler/src/placed_tenants.rs",
        "delete",
        "custom",
        "preconditions.resourceVersion preconditions.uid",
    ),
    whole(
        "common/reconciler/src/placed_tenants.rs",
        "get",
        "custom",
        "",
    ),
    whole(
        "common/reconciler/src/placed_tenants.rs",
        "replace",
        "custom",
        "",
    ),
    whole("common/reconciler/src/record.rs", "create", "secrets", ""),
    whole("common/reconciler/src/record.rs", "get", "secrets", ""),
    whole("common/reconciler/src/record.rs", "replace", "secrets", ""),
    whole(
        "common/reconciler/src/record/anchor.rs",
        "create",
        "configmaps",
        "",
    ),
    whole(
        "common/reconciler/src/record/anchor.rs",
        "get",
        "configmaps",
        "",
    ),
    whole(
        "common/reconciler/src/record/anchor.rs",
        "replace",
        "configmaps",
        "",
    ),
    whole(
        "common/reconciler/src/release_record.rs",
        "create",
        "secrets",
        "",
    ),
    whole(
        "common/reconciler/src/release_record.rs",
        "delete",
        "secrets",
        "preconditions.resourceVersion preconditions.uid",
    ),
    whole(
        "common/reconciler/src/release_record.rs",
        "get",
        "secrets",
        "",
    ),
    whole(
        "common/reconciler/src/release_record.rs",
        "replace",
        "secrets",
        "",
    ),
    metadata(
        "common/reconciler/src/watches.rs",
        "list",
        "customresourcedefinitions",
        "fieldSelector limit",
    ),
    metadata(
        "common/reconciler/src/watches.rs",
        "list",
        "namespaces",
        "limit",
    ),
    metadata(
        "common/reconciler/src/watches.rs",
        "list",
        "secrets",
        "fieldSelector labelSelector limit",
    ),
    whole(
        "common/reconciler/src/watches.rs",
        "list",
        "custom",
        "continue limit",
    ),
    whole(
        "common/reconciler/src/watches.rs",
        "list",
        "deployments",
        "labelSelector limit",
    ),
    whole(
        "common/reconciler/src/watches.rs",
        "list",
        "statefulsets",
        "labelSelector limit",
    ),
    whole(
        "common/reconciler/src/watches.rs",
        "list",
        "daemonsets",
        "labelSelector limit",
    ),
    metadata(
        "common/reconciler/src/watches.rs",
        "watch",
        "customresourcedefinitions",
        WATCH_FIELDS,
    ),
    metadata(
        "common/reconciler/src/watches.rs",
        "watch",
        "namespaces",
        WATCH,
    ),
    metadata(
        "common/reconciler/src/watches.rs",
        "watch",
        "secrets",
        WATCH_BOTH,
    ),
    whole("common/reconciler/src/watches.rs", "watch", "custom", WATCH),
    whole(
        "common/reconciler/src/watches.rs",
        "watch",
        "deployments",
        WATCH_LABELS,
    ),
    whole(
        "common/reconciler/src/watches.rs",
        "watch",
        "statefulsets",
        WATCH_LABELS,
    ),
    whole(
        "common/reconciler/src/watches.rs",
        "watch",
        "daemonsets",
        WATCH_LABELS,
    ),
    metadata(
        "common/reconciler/src/workspaces.rs",
        "merge",
        "namespaces",
        "",
    ),
    metadata("common/runtime/src/cluster.rs", "get", "namespaces", ""),
    whole("common/runtime/src/cluster.rs", "raw", "/version", ""),
    whole(
        "common/runtime/src/crd.rs",
        "apply",
        "customresourcedefinitions",
        "fieldManager force",
    ),
    whole(
        "common/runtime/src/crd.rs",
        "get",
        "customresourcedefinitions",
        "",
    ),
    metadata("common/runtime/src/crd.rs", "list", "custom", "limit"),
    whole(
        "common/runtime/src/crd.rs",
        "raw",
        "/openapi/v3/apis/*/*",
        "",
    ),
    whole(
        "common/runtime/src/crd.rs",
        "replace",
        "customresourcedefinitions",
        "",
    ),
    whole("common/runtime/src/events.rs", "create", "events", ""),
    whole("common/runtime/src/events.rs", "merge", "events", ""),
    whole("common/runtime/src/lease.rs", "create", "leases", ""),
    whole("common/runtime/src/lease.rs", "create", "namespaces", ""),
    whole("common/runtime/src/lease.rs", "get", "leases", ""),
    whole("common/runtime/src/lease.rs", "replace", "leases", ""),
    whole(
        "hub/src/agent_server/enrollment_service.rs",
        "create",
        "custom",
        "",
    ),
    whole(
        "hub/src/agent_server/enrollment_service.rs",
        "get",
        "custom",
        "",
    ),
    status("hub/src/agent_server/enrollment_service.rs"),
    whole(
        "hub/src/agent_server/join_info.rs",
        "create",
        "configmaps",
        "",
    ),
    whole("hub/src/agent_server/join_info.rs", "get", "configmaps", ""),
    whole(
        "hub/src/agent_server/join_info.rs",
        "replace",
        "configmaps",
        "",
    ),
    whole(
        "hub/src/agent_server/join_token.rs",
        "delete",
        "secrets",
        "preconditions.resourceVersion preconditions.uid",
    ),
    whole("hub/src/agent_server/join_token.rs", "get", "secrets", ""),
    whole(
        "hub/src/agent_server/join_token.rs",
        "list",
        "secrets",
        "labelSelector limit",
    ),
    whole(
        "hub/src/agent_server/join_token.rs",
        "replace",
        "secrets",
        "",
    ),
    whole("hub/src/ca.rs", "create", "secrets", ""),
    whole("hub/src/ca.rs", "get", "secrets", ""),
    whole("hub/src/ca/rotation_controller.rs", "get", "secrets", ""),
    whole(
        "hub/src/ca/rotation_controller.rs",
        "list",
        "custom",
        "limit",
    ),
    whole(
        "hub/src/ca/rotation_controller.rs",
        "replace",
        "secrets",
        "",
    ),
    whole("hub/src/chart/credentials.rs", "get", "secrets", ""),
    whole("hub/src/chart/values_reader.rs", "create", "secrets", ""),
    whole("hub/src/chart/values_reader.rs", "get", "configmaps", ""),
    whole("hub/src/chart/values_reader.rs", "get", "secrets", ""),
    whole("hub/src/chart/values_reader.rs", "replace", "secrets", ""),
    whole(
        "hub/src/chart/values_reader.rs",
        "watch",
        "configmaps",
        WATCH_FIELDS,
    ),
    whole(
        "hub/src/chart/values_reader.rs",
        "watch",
        "secrets",
        WATCH_FIELDS,
    ),
    whole("hub/src/chart/version_pin.rs", "create", "configmaps", ""),
    whole("hub/src/chart/version_pin.rs", "get", "configmaps", ""),
    whole("hub/src/chart/version_pin.rs", "replace", "configmaps", ""),
    whole("hub/src/deployments/api.rs", "merge", "custom", ""),
    status("hub/src/deployments/api.rs"),
    whole(
        "hub/src/deployments/controller.rs",
        "watch",
        "custom",
        WATCH,
    ),
    whole(
        "hub/src/discovery/named_secrets.rs",
        "watch",
        "secrets",
        WATCH_FIELDS,
    ),
    whole("hub/src/discovery/provider.rs", "raw", "/apis/*/*", ""),
    whole("hub/src/discovery/provider.rs", "watch", "custom", WATCH),
    whole(
        "hub/src/discovery/provider.rs",
        "watch",
        "secrets",
        WATCH_BOTH,
    ),
    whole(
        "hub/src/discovery/provider.rs",
        "watch",
        "secrets",
        WATCH_LABELS,
    ),
    whole("hub/src/discovery/register.rs", "create", "configmaps", ""),
    whole("hub/src/discovery/register.rs", "get", "configmaps", ""),
    metadata(
        "hub/src/discovery/register.rs",
        "get",
        "customresourcedefinitions",
        "",
    ),
    whole("hub/src/discovery/register.rs", "replace", "configmaps", ""),
    whole("hub/src/edgecluster.rs", "watch", "custom", WATCH),
    whole("hub/src/edgecluster/api.rs", "create", "custom", "dryRun"),
    whole("hub/src/edgecluster/api.rs", "merge", "custom", ""),
    status("hub/src/edgecluster/api.rs"),
    whole("hub/src/home.rs", "get", "secrets", ""),
    metadata("hub/src/leader/home_writer.rs", "get", "custom", ""),
    metadata(
        "hub/src/leader/home_writer.rs",
        "get",
        "customresourcedefinitions",
        "",
    ),
    whole("hub/src/leader/epoch.rs", "create", "configmaps", ""),
    whole("hub/src/leader/epoch.rs", "get", "configmaps", ""),
    whole("hub/src/leader/epoch.rs", "replace", "configmaps", ""),
    metadata("hub/src/leader/pod_label.rs", "merge", "pods", ""),
    metadata(
        "hub/src/tenants/controller.rs",
        "get",
        "customresourcedefinitions",
        "",
    ),
    whole("hub/src/tenants/controller.rs", "merge", "custom", ""),
    whole("hub/src/tenants/controller.rs", "watch", "custom", WATCH),
    status("hub/src/tenants/controller.rs"),
];

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use serde_json::Value;

    use super::super::recorded;
    use super::{ApiCall, CALLS};

    /// The parts of a recorded request that a call names.
    #[derive(Debug, PartialEq)]
    struct Shape {
        verb: String,
        kind: String,
        subresource: String,
        is_metadata: bool,
        parameters: BTreeSet<String>,
    }

    fn shape(step: &Value) -> Option<Shape> {
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
            _ => return Some(raw(path, method)),
        };
        if segments.len() > 2 && segments.first() == Some(&"namespaces") {
            segments.drain(..2);
        }
        let kind = if group.ends_with(".example.com") {
            "custom"
        } else {
            segments.first()?
        };
        let sends = step
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
            _ if sends.contains("apply-patch") => "apply",
            _ => "merge",
        };
        for (pointer, name) in [
            ("/body/preconditions/uid", "preconditions.uid"),
            (
                "/body/preconditions/resourceVersion",
                "preconditions.resourceVersion",
            ),
            ("/body/propagationPolicy", "propagationPolicy"),
        ] {
            if step.pointer(pointer).is_some() {
                parameters.insert(name.to_owned());
            }
        }
        let accept = step
            .get("accept")
            .and_then(Value::as_str)
            .unwrap_or_default();
        Some(Shape {
            verb: verb.to_owned(),
            kind: kind.to_owned(),
            subresource: segments.get(2).map(ToString::to_string).unwrap_or_default(),
            is_metadata: accept.contains("as=PartialObjectMetadata"),
            parameters,
        })
    }

    fn raw(path: &str, method: &str) -> Shape {
        let segments: Vec<&str> = path.split('/').collect();
        let kind = match segments.as_slice() {
            ["", "apis", _, _] => "/apis/*/*".to_owned(),
            ["", "openapi", "v3", "apis", _, _] => "/openapi/v3/apis/*/*".to_owned(),
            _ => path.to_owned(),
        };
        Shape {
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

    fn is_covered(call: &ApiCall, shapes: &[Shape]) -> bool {
        shapes.iter().any(|shape| {
            shape.verb == call.verb
                && shape.kind == call.kind
                && shape.subresource == call.subresource
                && shape.is_metadata == call.is_metadata
                && call
                    .parameters
                    .split_whitespace()
                    .all(|name| shape.parameters.contains(name))
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
        let shapes: Vec<Shape> = succeeded.filter_map(shape).collect();
        let missing: Vec<_> = CALLS
            .iter()
            .filter(|call| !is_covered(call, &shapes))
            .collect();
        assert!(missing.is_empty(), "{missing:#?}");
    }

    #[test]
    fn sources_of_calls_exist() {
        let root = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");
        for call in CALLS {
            let path = std::path::Path::new(root).join(call.source);
            assert!(path.exists(), "{}", path.display());
        }
    }
}
