//! `KryptonDeployment`: an installation of the fleet's chart for an account, in a region.

#![expect(clippy::duplicated_attributes, reason = "every printcolumn sets type_")]
#![expect(
    unreachable_pub,
    reason = "KubeSchema copies a struct into a function, `pub` and all"
)]

use std::sync::LazyLock;

use k8s_openapi::{
    apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition,
    apimachinery::pkg::apis::meta::v1::Condition,
};
use kube::{CustomResource, CustomResourceExt, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{
    condition_list,
    published::published,
    tenant::{HISTORY_MAX, HistoryEntry},
};

/// Desired state of the deployment.
#[derive(
    CustomResource, JsonSchema, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize,
)]
#[kube(
    group = "mesh.openkcm.io",
    version = "v1alpha1",
    kind = "KryptonDeployment",
    plural = "kryptondeployments",
    singular = "kryptondeployment",
    shortname = "kd",
    category = "krypton",
    namespaced,
    status = "KryptonDeploymentStatus",
    derive = "PartialEq",
    doc = "KryptonDeployment is an installation of the fleet's Helm chart for an account on the cluster of a region, in a namespace with the object's name.",
    printcolumn(name = "Phase", type_ = "string", json_path = ".status.phase"),
    printcolumn(name = "Region", type_ = "string", json_path = ".spec.region.name"),
    printcolumn(
        name = "Ready",
        type_ = "string",
        json_path = ".status.conditions[?(@.type==\"Ready\")].status"
    ),
    printcolumn(
        name = "Age",
        type_ = "date",
        json_path = ".metadata.creationTimestamp"
    ),
    printcolumn(name = "Message", type_ = "string", json_path = ".status.lastMessage")
)]
#[serde(rename_all = "camelCase")]
pub struct KryptonDeploymentSpec {
    /// Account that the deployment belongs to.
    pub account: Account,
    /// Region whose cluster runs the release.
    pub region: Region,
}

/// Account that a deployment belongs to.
#[derive(JsonSchema, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Account {
    /// Name of the account. If it is empty, a condition reports that it is missing.
    pub name: String,
    /// Display name of the account. Krypton does not use it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub display_name: Option<String>,
    /// Owner of the account. Krypton does not use it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owner: Option<String>,
}

/// Region whose cluster runs the release. With a name only, it is the member of this name that joined through its
/// agent. If no such member exists, the hub uses Secret `<name>-kubeconfig` in the namespace where it looks for
/// kubeconfigs.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[x_kube(
    validation = Rule::new("!has(self.clusterProfileRef) || (!has(self.kubeconfig) && !has(self.kubeconfigSecretName))")
        .message("name a ClusterProfile or a kubeconfig, not both")
)]
#[serde(rename_all = "camelCase")]
pub struct Region {
    /// Name of the region.
    pub name: String,
    /// Kubeconfig of the cluster.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kubeconfig: Option<RegionKubeconfig>,
    /// Name of the kubeconfig Secret. Deprecated: use `kubeconfig.secret.name`, which takes precedence.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kubeconfig_secret_name: Option<String>,
    /// ClusterProfile through which the hub discovered the member. You cannot combine it with a kubeconfig.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cluster_profile_ref: Option<ClusterProfileRef>,
}

/// Reference to a ClusterProfile (`multicluster.x-k8s.io`) on the home cluster.
#[derive(JsonSchema, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ClusterProfileRef {
    /// Name of the ClusterProfile.
    #[schemars(length(min = 1))]
    pub name: String,
    /// Namespace of the ClusterProfile.
    #[schemars(length(min = 1))]
    pub namespace: String,
}

/// Kubeconfig of the region's cluster.
#[derive(JsonSchema, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RegionKubeconfig {
    /// Secret that contains the kubeconfig.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub secret: Option<KubeconfigSecret>,
}

/// Secret that contains a kubeconfig.
#[derive(JsonSchema, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct KubeconfigSecret {
    /// Name of the Secret. Defaults to `<region>-kubeconfig`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Namespace of the Secret. Defaults to the namespace where the hub looks for kubeconfigs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub namespace: Option<String>,
    /// Key in the data of the Secret. Defaults to the key that the Secret's annotation
    /// `mesh.openkcm.io/kubeconfig-key` names, or else to `--kubeconfig-key` of the hub.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
}

/// Observed state of the deployment.
#[derive(JsonSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
// Tools that use kstatus, such as Flux and `helm --wait`, take an object without status for ready.
#[schemars(extend("default" = {"observedGeneration": -1}))]
#[serde(rename_all = "camelCase")]
pub struct KryptonDeploymentStatus {
    /// `Pending`, `Ready` or `Error`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub phase: Option<DeploymentPhase>,
    /// Human-readable summary of the conditions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_message: Option<String>,
    /// Chart that was installed last, as `<repo>/<chart>:<version>`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_applied_chart: Option<String>,
    /// The `metadata.generation` that this status describes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// Value of the annotation `mesh.openkcm.io/reconcile-requested-at` that Krypton handled last.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_handled_reconcile_at: Option<String>,
    /// `TargetClusterResolved` and `Ready`. If it is not ready, also `Reconciling` or `Stalled`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "condition_list::schema")]
    pub conditions: Vec<Condition>,
    /// Clusters on which the release is installed or is being uninstalled. Not set until the hub orders the first
    /// installation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub placements: Option<Vec<Placement>>,
    /// Last revisions of the release, newest first. New revisions come first, on every cluster, and the other entries
    /// keep their order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = HISTORY_MAX), extend("x-kubernetes-list-type" = "atomic"))]
    pub history: Vec<HistoryEntry>,
    /// Epoch of the hub that last changed this status.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hub_epoch: Option<u64>,
}

/// Cluster on which the release is installed or is being uninstalled.
#[derive(JsonSchema, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Placement {
    /// Last known name of the member.
    pub cluster: String,
    /// UID of the namespace `kube-system` on the cluster. It identifies the cluster even if the member is renamed.
    pub cluster_uid: String,
    /// Key of the kubeconfig in the member's Secret, if the spec named one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
    /// Whether Krypton is uninstalling the release from the cluster.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub removing: bool,
}

/// Phase of a deployment.
#[derive(JsonSchema, Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum DeploymentPhase {
    Pending,
    Ready,
    Error,
}

impl DeploymentPhase {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Pending => "Pending",
            Self::Ready => "Ready",
            Self::Error => "Error",
        }
    }
}

impl KryptonDeployment {
    /// Returns the CRD with its schema version. Shadows the method of the derive, which lacks the version.
    pub fn crd() -> &'static CustomResourceDefinition {
        static CRD: LazyLock<CustomResourceDefinition> =
            LazyLock::new(|| published(<KryptonDeployment as CustomResourceExt>::crd()));
        &CRD
    }
}
