//! `EdgeCluster`: a member of the fleet, on the home cluster.

#![expect(clippy::duplicated_attributes, reason = "every printcolumn sets type_")]
#![expect(
    unreachable_pub,
    reason = "KubeSchema copies a struct into a function, `pub` and all"
)]

use std::collections::BTreeMap;
use std::sync::LazyLock;

use k8s_openapi::{
    apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition,
    apimachinery::pkg::apis::meta::v1::{Condition, Time},
};
use kube::{CustomResource, CustomResourceExt, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::{condition_list, free_form, published::published};

/// Desired configuration of the member.
// Default values are not serialized. A field manager that applies a spec owns only the fields that it sets.
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
    category = "krypton",
    status = "EdgeClusterStatus",
    derive = "PartialEq",
    doc = "EdgeCluster represents a member: a cluster of the fleet.",
    printcolumn(name = "Mode", type_ = "string", json_path = ".status.mode"),
    printcolumn(
        name = "Ready",
        type_ = "string",
        json_path = ".status.conditions[?(@.type==\"Ready\")].status"
    ),
    printcolumn(
        name = "Tenants",
        type_ = "integer",
        json_path = ".status.tenants.total",
        description = "Number of Tenants on the member."
    ),
    printcolumn(
        name = "ReadyTenants",
        type_ = "integer",
        json_path = ".status.tenants.ready",
        description = "Number of Tenants that are ready."
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
        description = "Generation of the desired state that the member has applied."
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
    ),
    printcolumn(
        name = "Message",
        type_ = "string",
        json_path = ".status.conditions[?(@.type==\"Ready\")].message"
    )
)]
#[schemars(extend("default" = {}))]
#[serde(rename_all = "camelCase")]
pub struct EdgeClusterSpec {
    /// Pauses the member: Krypton writes only status there. Defaults to false.
    #[serde(default, skip_serializing_if = "crate::is_default")]
    pub paused: bool,
    /// Bans the member: the hub rejects its agent and does not connect to the cluster. Releases keep running.
    /// Defaults to false.
    #[serde(default, skip_serializing_if = "crate::is_default")]
    pub banned: bool,
    /// Whether the hub may connect through `sourceRef`. If it is not set, the hub may. The hub creates the
    /// EdgeCluster with `false` if the source is in a namespace other than the hub's. An agent needs no
    /// acceptance.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub accepted: Option<bool>,
    /// The object on the home cluster from which the hub discovered the member. Not set if the member joined only
    /// through its agent. The hub never sets it on an existing EdgeCluster.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source_ref: Option<SourceRef>,
    /// Whether a deletion of this object keeps or uninstalls the member's releases. Defaults to `Retain`. With
    /// `Uninstall`, the object stays until the member has uninstalled them. Has no effect on `self-cluster`.
    #[serde(default, skip_serializing_if = "crate::is_default")]
    pub deletion_policy: DeletionPolicy,
    /// Namespaces of the home cluster whose Tenants and KryptonDeployments may name this member. If it is not set,
    /// all may. If it is empty, none may.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-kubernetes-list-type" = "set"))]
    pub allowed_namespaces: Option<Vec<String>>,
    /// ConfigMaps and Secrets in the hub's namespace with chart values for this member. They override the values of
    /// the fleet. Each overrides the ones before it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16))]
    pub values_from: Vec<ValuesReference>,
    /// Chart values for this member. They override `valuesFrom`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "free_form::schema")]
    pub values: Option<Map<String, Value>>,
    /// Labels and annotations of the namespaces that Krypton creates for workspaces on this member. They override
    /// the fleet's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub namespace_configuration: Option<NamespaceConfiguration>,
}

/// Labels and annotations of the namespaces that Krypton creates for workspaces. Keys of Krypton and of Kubernetes
/// are not allowed.
#[derive(JsonSchema, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NamespaceConfiguration {
    /// Labels of the namespaces.
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
    /// Annotations of the namespaces.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(extend("maxProperties" = 64))]
    pub annotations: BTreeMap<String, String>,
}

/// A ConfigMap or Secret in the hub's namespace that contains chart values.
#[derive(JsonSchema, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ValuesReference {
    /// `ConfigMap` or `Secret`.
    pub kind: ValuesKind,
    /// Name of the object.
    #[schemars(
        length(min = 1, max = 253),
        regex(pattern = r"^[a-z0-9]([-.a-z0-9]*[a-z0-9])?$")
    )]
    pub name: String,
    /// Key in the data of the object. Defaults to `values.yaml`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 253))]
    pub values_key: Option<String>,
    /// Whether the object or the key may be missing. Defaults to false: if one is missing, Krypton keeps the last good
    /// values.
    #[serde(default, skip_serializing_if = "crate::is_default")]
    pub optional: bool,
}

/// Kind of an object with chart values.
#[derive(
    JsonSchema, Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize,
)]
pub enum ValuesKind {
    ConfigMap,
    Secret,
}

/// The object on the home cluster from which the hub discovered the member.
#[derive(
    KubeSchema, Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize,
)]
#[x_kube(
    validation = Rule::new("self.kind == 'SelfCluster' || (has(self.name) && (self.kind == 'File' || has(self.namespace)))")
        .message("sourceRef needs namespace and name, unless its kind is SelfCluster, or File, which has a name only")
)]
#[serde(rename_all = "camelCase")]
pub struct SourceRef {
    /// `Secret`, `ClusterProfile`, `Cluster` (Cluster API), `TenantControlPlane` (Kamaji), `File`, or
    /// `SelfCluster` for the home cluster.
    #[schemars(length(min = 1, max = 63))]
    pub kind: String,
    /// Namespace of the object. Required, except for `File` and `SelfCluster`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 63))]
    pub namespace: Option<String>,
    /// Name of the object. Required, except for `SelfCluster`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 253))]
    pub name: Option<String>,
}

/// Effect of a deletion of an EdgeCluster on the releases of its member.
#[derive(JsonSchema, Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum DeletionPolicy {
    #[default]
    Retain,
    Uninstall,
}

/// Observed state of the member.
#[derive(JsonSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
// Tools that use kstatus, such as Flux and `helm --wait`, take an object without status for ready.
#[schemars(extend("default" = {"observedGeneration": -1}))]
#[serde(rename_all = "camelCase")]
pub struct EdgeClusterStatus {
    /// Process that reconciles the member: `agent`, `proxy` (the hub, through a kubeconfig) or `none`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mode: Option<Mode>,
    /// `Ready`, which summarizes `Connected` and `Healthy`; `TargetClusterResolved`. `ValuesResolved` if the member has
    /// its own values, and `Uninstalled` while it uninstalls its releases. If the member is not ready, also
    /// `Reconciling` or `Stalled`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "condition_list::schema")]
    pub conditions: Vec<Condition>,
    /// Generation of the spec that this status describes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// Kubernetes version of the member.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kubernetes_version: Option<String>,
    /// Version of the agent that connected last.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub agent_version: Option<String>,
    /// UID of the namespace `kube-system` on the member. It identifies the cluster, and the hub never changes it.
    #[serde(
        default,
        rename = "clusterUID",
        skip_serializing_if = "Option::is_none"
    )]
    pub cluster_uid: Option<String>,
    /// Holder of the Lease `krypton-agent` on the member, the only process that writes there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lease_holder: Option<String>,
    /// Number of Tenants on the member, by phase.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tenants: Option<TenantCounts>,
    /// State on this member of each Tenant whose own status does not list all members, and of the 20 worst others.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tenant_summaries: Option<TenantSummaries>,
    /// The desired state that the member has applied.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub applied: Option<Applied>,
    /// The desired state that the hub sends to the member. While `applied` has other numbers, the member is behind.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub desired: Option<Desired>,
    /// Time at which the agent's certificate expires.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub certificate_expiry: Option<Time>,
    /// Time at which the certificate of the latest enrollment expires. While `certificateExpiry` is earlier, the
    /// enrolled agent has not connected yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pending_certificate_expiry: Option<Time>,
    /// Keys with which the hub accepts the member's agent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub agent_keys: Option<AgentKeys>,
    /// Roots of the hub's CA that the agent trusts, and the issuer of its certificate.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trusted_roots: Option<AgentRoots>,
    /// Time at which the member last responded. The hub writes it at most once a minute.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_seen: Option<Time>,
    /// Epoch of the hub that last changed this status.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hub_epoch: Option<u64>,
}

/// Process that reconciles a member.
#[derive(JsonSchema, Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Mode {
    /// The agent on the member.
    Agent,
    /// The hub, through the member's kubeconfig.
    Proxy,
    /// No process.
    #[default]
    None,
}

/// Number of Tenants on a member, by phase.
#[derive(JsonSchema, Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TenantCounts {
    /// All Tenants.
    pub total: u32,
    /// Tenants in phase `Ready`.
    pub ready: u32,
    /// Tenants in phase `Pending`.
    pub pending: u32,
    /// Tenants in phase `Error`.
    pub error: u32,
}

/// Tenants on a member whose status on the home cluster is a summary, and the worst others.
#[derive(JsonSchema, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TenantSummaries {
    /// Tenants with their states.
    // Both fields are always serialized: a merge patch then clears the previous content.
    #[serde(default)]
    #[schemars(extend("x-kubernetes-list-type" = "atomic"))]
    pub tenants: Vec<TenantSummary>,
    /// Number of Tenants left out for lack of space. Ready Tenants are left out first.
    #[serde(default)]
    pub omitted: u32,
}

/// State of a Tenant on the member.
#[derive(JsonSchema, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TenantSummary {
    /// Namespace of the Tenant.
    pub namespace: String,
    /// Name of the Tenant.
    pub name: String,
    /// `Error`, `NotReady`, `Unknown` or `Ready`.
    pub state: String,
    /// Reason of the condition that determines the state.
    pub reason: String,
}

/// Version of the desired state that a member has applied.
#[derive(JsonSchema, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Applied {
    /// Epoch of the hub that sent it.
    pub epoch: u64,
    /// Generation within the epoch.
    pub generation: u64,
    /// Digest of the content.
    pub digest: String,
}

/// Version of the desired state that the hub sends to a member.
#[derive(JsonSchema, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Desired {
    /// Epoch of the hub that sends it.
    pub epoch: u64,
    /// Generation within the epoch.
    pub generation: u64,
    /// Chart to install, as `<repo>/<chart>:<version>`.
    pub chart: String,
    /// Time since which a hub has sent it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub since: Option<Time>,
}

/// Keys of a member's agent. The hub accepts no other keys.
#[derive(JsonSchema, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct AgentKeys {
    /// Key that the agent uses.
    pub current: AgentKey,
    /// Key for which the agent requested a certificate last. It becomes the current key a few minutes after its
    /// first use.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next: Option<AgentKey>,
}

/// Key of an agent, with its certificate.
#[derive(JsonSchema, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct AgentKey {
    /// SHA-256 of the public key (SubjectPublicKeyInfo) in hex.
    #[serde(rename = "keySHA256")]
    pub key_sha256: String,
    /// Serial number of the certificate in hex.
    pub serial: String,
    /// Time at which the certificate was issued.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub since: Option<Time>,
    /// Time of the first session with the next key.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub used: Option<Time>,
}

/// Roots of the hub's CA, each as the SHA-256 of its certificate.
#[derive(JsonSchema, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct AgentRoots {
    /// Roots that the agent trusts. Empty if the agent does not report them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub trusted: Vec<String>,
    /// Root that issued the agent's certificate.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub issuer: Option<String>,
}

impl EdgeClusterStatus {
    /// Returns whether the member has applied an earlier desired state than the hub sends, or `None` if that is
    /// unknown. A later one comes from a hub that does not record what it sends.
    pub fn is_behind(&self) -> Option<bool> {
        let (applied, desired) = (self.applied.as_ref()?, self.desired.as_ref()?);
        let applied = (applied.epoch, applied.generation);
        let desired = (desired.epoch, desired.generation);
        (applied <= desired).then_some(applied < desired)
    }

    /// Returns the expiry of the certificate of an agent that has enrolled but not connected since, or `None` if no
    /// such agent exists.
    pub fn expiry_before_connection(&self) -> Option<&Time> {
        let seen = self.certificate_expiry.as_ref();
        let pending = self.pending_certificate_expiry.as_ref()?;
        seen.is_none_or(|seen| seen.0 < pending.0)
            .then_some(pending)
    }
}

impl EdgeCluster {
    /// Returns the CRD with its schema version. Shadows the method of the derive, which lacks the version.
    pub fn crd() -> &'static CustomResourceDefinition {
        static CRD: LazyLock<CustomResourceDefinition> =
            LazyLock::new(|| published(<EdgeCluster as CustomResourceExt>::crd()));
        &CRD
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn default_spec_serializes_empty_and_reads_back() {
        let spec = EdgeClusterSpec::default();
        assert_eq!(serde_json::to_value(&spec).unwrap(), json!({}));
        let read: EdgeClusterSpec = serde_json::from_value(json!({})).unwrap();
        assert_eq!(read, spec);
        assert_eq!(read.deletion_policy, DeletionPolicy::Retain);
    }

    #[test]
    fn empty_allowed_namespaces_differ_from_unset() {
        let none: EdgeClusterSpec =
            serde_json::from_value(json!({"allowedNamespaces": []})).unwrap();
        assert_eq!(none.allowed_namespaces, Some(Vec::new()));
        assert_ne!(none, EdgeClusterSpec::default());
        let written = serde_json::to_value(&none).unwrap();
        assert_eq!(written, json!({"allowedNamespaces": []}));
    }
}
