//! `EdgeCluster`: one member of the fleet, as home sees it.

#![expect(
    clippy::duplicated_attributes,
    reason = "every printcolumn has a type_ of its own"
)]
#![expect(
    unreachable_pub,
    reason = "KubeSchema copies a struct into a function, `pub` and all"
)]

use std::collections::BTreeMap;

use k8s_openapi::{
    apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition,
    apimachinery::pkg::apis::meta::v1::{Condition, Time},
};
use kube::{CustomResource, CustomResourceExt, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::{condition_list, free_form, published::published};

/// What is wanted of a member. What is as by default is not written, so that who applies this owns
/// only what it has set.
#[derive(
    CustomResource, JsonSchema, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize,
)]
#[kube(
    group = "mesh.openkcm.io",
    version = "v1alpha1",
    kind = "EdgeCluster",
    plural = "edgeclusters",
    singular = "edgecluster",
    shortname = "ec",
    status = "EdgeClusterStatus",
    derive = "PartialEq",
    doc = "A cluster of the fleet.",
    printcolumn(name = "Mode", type_ = "string", json_path = ".status.mode"),
    printcolumn(
        name = "Connected",
        type_ = "string",
        json_path = ".status.conditions[?(@.type==\"Connected\")].status"
    ),
    printcolumn(
        name = "Ready",
        type_ = "integer",
        json_path = ".status.tenants.ready",
        description = "Tenants that are ready."
    ),
    printcolumn(
        name = "Tenants",
        type_ = "integer",
        json_path = ".status.tenants.total",
        description = "Tenants in all."
    ),
    printcolumn(
        name = "Version",
        type_ = "string",
        json_path = ".status.kubernetesVersion"
    ),
    printcolumn(
        name = "Applied",
        type_ = "integer",
        json_path = ".status.applied.generation",
        description = "Generation of the desired state that the member acts on."
    ),
    printcolumn(
        name = "Age",
        type_ = "date",
        json_path = ".metadata.creationTimestamp"
    ),
    printcolumn(
        name = "LastSeen",
        type_ = "date",
        json_path = ".status.lastSeen",
        priority = 1
    )
)]
#[schemars(extend("default" = {}))]
#[serde(rename_all = "camelCase")]
pub struct EdgeClusterSpec {
    /// Nothing is written on the member but status.
    #[serde(default, skip_serializing_if = "is_default")]
    pub paused: bool,
    /// The member's agent is refused, and the hub does not go there either.
    #[serde(default, skip_serializing_if = "is_default")]
    pub banned: bool,
    /// Whether the hub may connect by `sourceRef`; it may when this is not set. The hub creates an
    /// EdgeCluster with `false` when the source is in another namespace than its own. An agent needs no
    /// acceptance.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub accepted: Option<bool>,
    /// What the member was found by. A member that joined by its agent alone has none. The hub never
    /// sets this on an existing EdgeCluster.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source_ref: Option<SourceRef>,
    /// What becomes of the member's releases when this object is deleted; by default `Retain`. With
    /// `Uninstall` it stays until the member has uninstalled them. Without effect on `self-cluster`.
    #[serde(default, skip_serializing_if = "is_default")]
    pub deletion_policy: DeletionPolicy,
    /// The namespaces on home whose objects may be aimed at this member, by naming it. All when not
    /// set, none when empty.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-kubernetes-list-type" = "set"))]
    pub allowed_namespaces: Option<Vec<String>>,
    /// Values of the chart for this member, over the fleet's: ConfigMaps and Secrets in the hub's
    /// namespace, each over the one before.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16))]
    pub values_from: Vec<ValuesReference>,
    /// Values of the chart for this member, over those of `valuesFrom`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "free_form::schema")]
    pub values: Option<Map<String, Value>>,
    /// Labels and annotations of the namespaces that are made for workspaces on this member, over the
    /// fleet's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub namespace_configuration: Option<NamespaceConfiguration>,
}

/// Labels and annotations of the namespaces that Krypton makes for workspaces. Its own and those of
/// Kubernetes are refused.
#[derive(JsonSchema, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NamespaceConfiguration {
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(extend(
        "maxProperties" = 64,
        "additionalProperties" = {
            "type": "string",
            "maxLength": 63,
            "pattern": "^(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?$"
        }
    ))]
    pub labels: BTreeMap<String, String>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(extend("maxProperties" = 64))]
    pub annotations: BTreeMap<String, String>,
}

/// An object in the hub's namespace that holds values of the chart.
#[derive(JsonSchema, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ValuesReference {
    pub kind: ValuesKind,
    #[schemars(
        length(min = 1, max = 253),
        regex(pattern = r"^[a-z0-9]([-.a-z0-9]*[a-z0-9])?$")
    )]
    pub name: String,
    /// The key in its data; by default `values.yaml`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 253))]
    pub values_key: Option<String>,
    /// Whether it may be missing, object or key.
    #[serde(default, skip_serializing_if = "is_default")]
    pub optional: bool,
}

/// What holds values.
#[derive(
    JsonSchema, Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize,
)]
pub enum ValuesKind {
    ConfigMap,
    Secret,
}

/// The object on home that a member was found by.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[x_kube(
    validation = Rule::new("self.kind == 'SelfCluster' || (has(self.name) && (self.kind == 'File' || has(self.namespace)))")
        .message("sourceRef needs namespace and name, unless its kind is SelfCluster, or File, which has a name only")
)]
#[serde(rename_all = "camelCase")]
pub struct SourceRef {
    /// `Secret`, `ClusterProfile`, `Cluster` (Cluster API), `TenantControlPlane` (Kamaji), `File`, or
    /// `SelfCluster` for home itself.
    #[schemars(length(min = 1, max = 63))]
    pub kind: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 63))]
    pub namespace: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 253))]
    pub name: Option<String>,
}

/// What becomes of a member's releases when its EdgeCluster is deleted.
#[derive(JsonSchema, Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum DeletionPolicy {
    #[default]
    Retain,
    Uninstall,
}

/// What is known of a member.
#[derive(JsonSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct EdgeClusterStatus {
    /// Who reconciles the member.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mode: Option<Mode>,
    /// `Connected`, `TargetClusterResolved` and `Healthy`; `ValuesResolved` where the member has values of
    /// its own.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "condition_list::schema")]
    pub conditions: Vec<Condition>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kubernetes_version: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub agent_version: Option<String>,
    /// UID of the member's namespace `kube-system`.
    #[serde(
        default,
        rename = "clusterUID",
        skip_serializing_if = "Option::is_none"
    )]
    pub cluster_uid: Option<String>,
    /// The holder of the member's Lease.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lease_holder: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tenants: Option<TenantCounts>,
    /// The member's state of each Tenant that runs on so many members that its own status cannot list them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tenant_summaries: Option<TenantSummaries>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub applied: Option<Applied>,
    /// The desired state that the member is given: it is behind while `applied` is another.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub desired: Option<Desired>,
    /// When the agent's certificate expires.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub certificate_expiry: Option<Time>,
    /// When the certificate of the latest enrollment expires. While `certificateExpiry` is earlier, the
    /// enrolled agent has not connected yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pending_certificate_expiry: Option<Time>,
    /// The keys that the member's agent may use.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub agent_keys: Option<AgentKeys>,
    /// The roots of the hub's CA that the agent trusts, and the issuer of its certificate.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trusted_roots: Option<AgentRoots>,
    /// When the member was last heard of; written at most once a minute.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_seen: Option<Time>,
    /// The epoch of the hub that has written this last, as far as it has changed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hub_epoch: Option<u64>,
}

/// Who reconciles a member.
#[derive(JsonSchema, Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Mode {
    /// The agent on the member.
    Agent,
    /// The hub, with the member's kubeconfig.
    Proxy,
    /// Nobody.
    None,
}

/// A member's Tenants by phase.
#[derive(JsonSchema, Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TenantCounts {
    pub total: u32,
    pub ready: u32,
    pub pending: u32,
    pub error: u32,
}

/// Tenants of a member whose status on home is a summary.
#[derive(JsonSchema, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TenantSummaries {
    // Both are always written, so that a merge patch clears the previous content.
    #[serde(default)]
    #[schemars(extend("x-kubernetes-list-type" = "atomic"))]
    pub tenants: Vec<TenantSummary>,
    /// Number of Tenants left out for lack of space. Ready Tenants are left out first.
    #[serde(default)]
    pub omitted: u32,
}

/// The state of one Tenant on the member.
#[derive(JsonSchema, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TenantSummary {
    pub namespace: String,
    pub name: String,
    /// `Error`, `NotReady`, `Unknown` or `Ready`.
    pub state: String,
    /// Reason of the most important condition.
    pub reason: String,
}

/// The desired state that a member acts on.
#[derive(JsonSchema, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Applied {
    pub epoch: u64,
    pub generation: u64,
    pub digest: String,
}

/// The desired state that is wanted of a member.
#[derive(JsonSchema, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Desired {
    pub epoch: u64,
    pub generation: u64,
    /// `<repo>/<chart>:<version>`.
    pub chart: String,
    /// Since when a hub has given it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub since: Option<Time>,
}

/// The keys of a member's agent. Only these are let in.
#[derive(JsonSchema, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct AgentKeys {
    pub current: AgentKey,
    /// The one that the agent has asked for last. Some minutes after its first use it is the only one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next: Option<AgentKey>,
}

/// A key of an agent, and its certificate.
#[derive(JsonSchema, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct AgentKey {
    /// SHA-256 of the public key (SubjectPublicKeyInfo) in hex.
    #[serde(rename = "keySHA256")]
    pub key_sha256: String,
    /// Serial number of the certificate in hex.
    pub serial: String,
    /// When the certificate was issued.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub since: Option<Time>,
    /// When a session first started with the next key.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub used: Option<Time>,
}

/// Roots of the hub's CA, each by the SHA-256 of its certificate.
#[derive(JsonSchema, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct AgentRoots {
    /// Those that the agent has said it trusts; none of an agent that does not say.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub trusted: Vec<String>,
    /// The one that the agent's certificate is of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub issuer: Option<String>,
}

impl EdgeClusterStatus {
    /// Whether the member acts on an earlier desired state than is wanted of it; `None` where that is not known. A later
    /// one was given by a hub that does not tell what it gives.
    pub fn is_behind(&self) -> Option<bool> {
        let (applied, desired) = (self.applied.as_ref()?, self.desired.as_ref()?);
        let applied = (applied.epoch, applied.generation);
        let desired = (desired.epoch, desired.generation);
        (applied <= desired).then_some(applied < desired)
    }

    /// When the certificate of an agent expires that has enrolled but not connected since. `None` if there is no
    /// such agent.
    pub fn expiry_before_connection(&self) -> Option<&Time> {
        let seen = self.certificate_expiry.as_ref();
        let pending = self.pending_certificate_expiry.as_ref()?;
        seen.is_none_or(|seen| seen.0 < pending.0)
            .then_some(pending)
    }
}

impl EdgeCluster {
    /// The CRD as it is applied. Shadows the derive's own, which lacks our schema version.
    pub fn crd() -> CustomResourceDefinition {
        published(<Self as CustomResourceExt>::crd())
    }
}

fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn default_spec_serializes_empty_and_reads_back() {
        let spec = EdgeClusterSpec::default();
        assert_eq!(serde_json::to_value(&spec).unwrap(), serde_json::json!({}));
        let read: EdgeClusterSpec = serde_json::from_value(serde_json::json!({})).unwrap();
        assert_eq!(read, spec);
        assert_eq!(read.deletion_policy, DeletionPolicy::Retain);
    }

    #[test]
    fn no_namespace_and_any_namespace_are_different_things() {
        let none: EdgeClusterSpec =
            serde_json::from_value(serde_json::json!({"allowedNamespaces": []})).unwrap();
        assert_eq!(none.allowed_namespaces, Some(Vec::new()));
        assert_ne!(none, EdgeClusterSpec::default());
        let written = serde_json::to_value(&none).unwrap();
        assert_eq!(written, serde_json::json!({"allowedNamespaces": []}));
    }
}
