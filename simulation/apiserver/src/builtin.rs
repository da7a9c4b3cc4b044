//! The built-in kinds, their types and their defaults.

use k8s_openapi::api::{apps, batch, coordination, core, events, networking, policy, rbac};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use crate::crd::defaults as crd;
use crate::kind::{Generation, Kind, Normalize};

/// Group, resource, kind and singular name, short names, scope, whether there is a status, generation, type.
type KindRow = (
    &'static str,
    &'static str,
    &'static str,
    &'static str,
    bool,
    bool,
    Generation,
    Normalize,
);

/// Converts an object to its type and back, which drops unknown fields.
fn typed<T: Serialize + DeserializeOwned>(object: &Value) -> Result<Value, String> {
    let typed = T::deserialize(object).map_err(|error| error.to_string())?;
    serde_json::to_value(typed).map_err(|error| error.to_string())
}

const NAMESPACED: bool = true;
const CLUSTER: bool = false;
const STATUS: bool = true;
const NO_STATUS: bool = false;

#[rustfmt::skip]
fn rows() -> Vec<KindRow> {
    use Generation::{None, Spec, SpecAndAnnotations};
    vec![
        ("", "namespaces", "Namespace", "ns", CLUSTER, STATUS, None, typed::<core::v1::Namespace>),
        ("", "nodes", "Node", "no", CLUSTER, STATUS, None, typed::<core::v1::Node>),
        ("", "secrets", "Secret", "", NAMESPACED, NO_STATUS, None, typed::<core::v1::Secret>),
        ("", "configmaps", "ConfigMap", "cm", NAMESPACED, NO_STATUS, None, typed::<core::v1::ConfigMap>),
        ("", "pods", "Pod", "po", NAMESPACED, STATUS, None, typed::<core::v1::Pod>),
        ("", "events", "Event", "ev", NAMESPACED, NO_STATUS, None, typed::<core::v1::Event>),
        ("", "services", "Service", "svc", NAMESPACED, STATUS, None, typed::<core::v1::Service>),
        ("", "serviceaccounts", "ServiceAccount", "sa", NAMESPACED, NO_STATUS, None, typed::<core::v1::ServiceAccount>),
        ("", "persistentvolumeclaims", "PersistentVolumeClaim", "pvc", NAMESPACED, STATUS, None, typed::<core::v1::PersistentVolumeClaim>),
        ("", "resourcequotas", "ResourceQuota", "quota", NAMESPACED, STATUS, None, typed::<core::v1::ResourceQuota>),
        ("", "limitranges", "LimitRange", "limits", NAMESPACED, NO_STATUS, None, typed::<core::v1::LimitRange>),
        ("events.k8s.io", "events", "Event", "ev", NAMESPACED, NO_STATUS, None, typed::<events::v1::Event>),
        ("apps", "deployments", "Deployment", "deploy", NAMESPACED, STATUS, SpecAndAnnotations, typed::<apps::v1::Deployment>),
        ("apps", "statefulsets", "StatefulSet", "sts", NAMESPACED, STATUS, Spec, typed::<apps::v1::StatefulSet>),
        ("apps", "daemonsets", "DaemonSet", "ds", NAMESPACED, STATUS, Spec, typed::<apps::v1::DaemonSet>),
        ("apps", "replicasets", "ReplicaSet", "rs", NAMESPACED, STATUS, Spec, typed::<apps::v1::ReplicaSet>),
        ("batch", "jobs", "Job", "", NAMESPACED, STATUS, Spec, typed::<batch::v1::Job>),
        ("batch", "cronjobs", "CronJob", "cj", NAMESPACED, STATUS, Spec, typed::<batch::v1::CronJob>),
        ("coordination.k8s.io", "leases", "Lease", "", NAMESPACED, NO_STATUS, None, typed::<coordination::v1::Lease>),
        ("networking.k8s.io", "networkpolicies", "NetworkPolicy", "netpol", NAMESPACED, NO_STATUS, Spec, typed::<networking::v1::NetworkPolicy>),
        ("networking.k8s.io", "ingresses", "Ingress", "ing", NAMESPACED, STATUS, Spec, typed::<networking::v1::Ingress>),
        ("policy", "poddisruptionbudgets", "PodDisruptionBudget", "pdb", NAMESPACED, STATUS, Spec, typed::<policy::v1::PodDisruptionBudget>),
        ("rbac.authorization.k8s.io", "roles", "Role", "", NAMESPACED, NO_STATUS, None, typed::<rbac::v1::Role>),
        ("rbac.authorization.k8s.io", "rolebindings", "RoleBinding", "", NAMESPACED, NO_STATUS, None, typed::<rbac::v1::RoleBinding>),
        ("rbac.authorization.k8s.io", "clusterroles", "ClusterRole", "", CLUSTER, NO_STATUS, None, typed::<rbac::v1::ClusterRole>),
        ("rbac.authorization.k8s.io", "clusterrolebindings", "ClusterRoleBinding", "", CLUSTER, NO_STATUS, None, typed::<rbac::v1::ClusterRoleBinding>),
        ("apiextensions.k8s.io", "customresourcedefinitions", "CustomResourceDefinition", "crd crds", CLUSTER, STATUS, Spec, typed_crd),
    ]
}

/// Kinds whose updates must contain a `resourceVersion`.
const CONDITIONAL_UPDATES: [&str; 3] = [
    "leases",
    "customresourcedefinitions",
    "poddisruptionbudgets",
];

pub(crate) fn kinds() -> impl Iterator<Item = Kind> {
    rows().into_iter().map(|row| {
        let (group, resource, kind, short_names, namespaced, has_status, generation, normalize) =
            row;
        let etcd_folder = match resource {
            "services" => "services/specs",
            "nodes" => "minions",
            "ingresses" => "ingress",
            "customresourcedefinitions" => "apiextensions.k8s.io/customresourcedefinitions",
            other => other,
        };
        let api_version = match group {
            "" | "events.k8s.io" => "v1".to_owned(),
            group => format!("{group}/v1"),
        };
        Kind {
            group: group.to_owned(),
            version: "v1".to_owned(),
            resource: resource.to_owned(),
            singular: kind.to_lowercase(),
            kind: kind.to_owned(),
            list_kind: format!("{kind}List"),
            namespaced,
            has_status,
            generation,
            allows_unconditional_update: !CONDITIONAL_UPDATES.contains(&resource),
            create_on_update: resource == "leases",
            etcd_folder: etcd_folder.to_owned(),
            short_names: short_names
                .split(' ')
                .filter(|name| !name.is_empty())
                .map(str::to_owned)
                .collect(),
            categories: categories(resource),
            normalize: Some(normalize),
            fields: None,
            schema: None,
            stored_api_version: api_version,
        }
    })
}

fn categories(resource: &str) -> Vec<String> {
    let in_all = [
        "pods",
        "services",
        "deployments",
        "statefulsets",
        "daemonsets",
        "replicasets",
        "jobs",
        "cronjobs",
    ];
    match resource {
        "customresourcedefinitions" => vec!["api-extensions".to_owned()],
        resource if in_all.contains(&resource) => vec!["all".to_owned()],
        _ => Vec::new(),
    }
}

/// Converts metadata to the type `ObjectMeta` and drops empty fields.
pub(crate) fn normalize_metadata(metadata: &Value) -> Result<Value, String> {
    if metadata.is_null() {
        return Ok(Value::Object(Map::new()));
    }
    let mut normalized = typed::<ObjectMeta>(metadata)?;
    if let Some(fields) = normalized.as_object_mut() {
        fields.retain(|_, value| !is_empty(value));
    }
    Ok(normalized)
}

pub(crate) fn is_empty(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Object(map) => map.is_empty(),
        Value::Array(list) => list.is_empty(),
        Value::String(text) => text.is_empty(),
        _ => false,
    }
}

/// Sets the defaults of a built-in kind. Completes only the fields that the model and its clients use.
pub(crate) fn set_defaults(kind: &Kind, object: &mut Value) {
    match kind.resource.as_str() {
        "secrets" => set_default(object, "/type", "Opaque".into()),
        "namespaces" => {
            if object["spec"].is_null() {
                object["spec"] = Value::Object(Map::new());
            }
            let name = object["metadata"]["name"].clone();
            if !name.is_null() {
                object["metadata"]["labels"]["kubernetes.io/metadata.name"] = name;
            }
        }
        "deployments" | "statefulsets" | "replicasets" if kind.group == "apps" => {
            set_default(object, "/spec/replicas", 1.into());
        }
        "customresourcedefinitions" => crd::set_defaults(object),
        "jobs" => {
            set_default(object, "/spec/completions", 1.into());
            set_default(object, "/spec/parallelism", 1.into());
            set_default(object, "/spec/backoffLimit", 6.into());
            set_default(object, "/spec/completionMode", "NonIndexed".into());
            set_default(object, "/spec/suspend", false.into());
        }
        "services" => {
            set_default(object, "/spec/type", "ClusterIP".into());
            set_default(object, "/spec/sessionAffinity", "None".into());
        }
        _ => {}
    }
}

/// Sets a field of `spec` or of the top level if it is missing.
fn set_default(object: &mut Value, pointer: &str, value: Value) {
    let (parent, field) = pointer.rsplit_once('/').unwrap_or_default();
    if let Some(Value::Object(parent)) = object.pointer_mut(parent)
        && parent.get(field).is_none_or(Value::is_null)
    {
        parent.insert(field.to_owned(), value);
    }
}

/// Sets the status that a kind has from its creation.
pub(crate) fn set_initial_status(kind: &Kind, object: &mut Value) {
    let status = match kind.resource.as_str() {
        "customresourcedefinitions" => crd::initial_status(object),
        "persistentvolumeclaims" | "pods" => serde_json::json!({"phase": "Pending"}),
        "services" => serde_json::json!({"loadBalancer": {}}),
        "deployments" | "jobs" | "cronjobs" | "resourcequotas" => Value::Object(Map::new()),
        "statefulsets" => serde_json::json!({"replicas": 0, "availableReplicas": 0}),
        "replicasets" => serde_json::json!({"replicas": 0}),
        "daemonsets" => serde_json::json!({
            "currentNumberScheduled": 0, "numberMisscheduled": 0,
            "desiredNumberScheduled": 0, "numberReady": 0,
        }),
        "ingresses" => serde_json::json!({"loadBalancer": {}}),
        "poddisruptionbudgets" => serde_json::json!({
            "currentHealthy": 0, "desiredHealthy": 0, "disruptionsAllowed": 0, "expectedPods": 0,
        }),
        _ => return,
    };
    if !kind.is_custom() {
        object["status"] = status;
    }
}

/// Adds the fields that a kind has even if they are empty.
pub(crate) fn add_empty_fields(kind: &Kind, object: &mut Value) {
    let fields: &[&str] = match kind.resource.as_str() {
        _ if kind.is_custom() => &[],
        "events" => &["firstTimestamp", "lastTimestamp", "eventTime", "source"],
        "roles" | "clusterroles" => &["rules"],
        _ => &[],
    };
    let Some(map) = object.as_object_mut() else {
        return;
    };
    for field in fields {
        if map.get(*field).is_none_or(is_empty) {
            let empty = match *field {
                "source" => Value::Object(Map::new()),
                _ => Value::Null,
            };
            map.insert((*field).to_owned(), empty);
        }
    }
}

/// Converts a CRD to its type and back. The type has floating-point limits.
fn typed_crd(object: &Value) -> Result<Value, String> {
    let mut crd = typed::<apiextensions::v1::CustomResourceDefinition>(object)?;
    make_integers(&mut crd);
    Ok(crd)
}

fn make_integers(value: &mut Value) {
    match value {
        Value::Number(number) => {
            let float = number.as_f64().filter(|_| number.is_f64());
            if let Some(float) = float.filter(|float| float.fract() == 0.0 && float.abs() < 1e15) {
                *value = (float as i64).into();
            }
        }
        Value::Array(list) => list.iter_mut().for_each(make_integers),
        Value::Object(map) => map.values_mut().for_each(make_integers),
        _ => {}
    }
}
