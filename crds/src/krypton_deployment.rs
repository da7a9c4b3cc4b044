//! `KryptonDeployment`: the fleet's chart for an account, in a region.

#![expect(
    clippy::duplicated_attributes,
    reason = "every printcolumn has a type_ of its own"
)]
#![expect(
    unreachable_pub,
    reason = "KubeSchema copies a struct into a function, `pub` and all"
)]

use k8s_openapi::{
    apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition,
    apimachinery::pkg::apis::meta::v1::Condition,
};
use kube::{CustomResource, CustomResourceExt, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{condition_list, published::published};

/// What is wanted: whose deployment, and where.
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
    namespaced,
    status = "KryptonDeploymentStatus",
    derive = "PartialEq",
    doc = "The fleet's Helm chart, installed for an account on a region's cluster, in a namespace of this object's name.",
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
    )
)]
#[serde(rename_all = "camelCase")]
pub struct KryptonDeploymentSpec {
    pub account: Account,
    pub region: Region,
}

/// Whose deployment it is.
#[derive(JsonSchema, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Account {
    /// An empty name is admitted, as it always was; a condition says that it is missing.
    pub name: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub display_name: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owner: Option<String>,
}

/// Where it runs. Without a word on its kubeconfig: the member of this name that an agent has joined, else
/// Secret `<name>-kubeconfig` in the namespace where the hub looks for kubeconfigs.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[x_kube(
    validation = Rule::new("!has(self.clusterProfileRef) || (!has(self.kubeconfig) && !has(self.kubeconfigSecretName))")
        .message("name a ClusterProfile or a kubeconfig, not both")
)]
#[serde(rename_all = "camelCase")]
pub struct Region {
    pub name: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kubeconfig: Option<RegionKubeconfig>,
    /// Deprecated: use `kubeconfig.secret.name`, which wins over it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kubeconfig_secret_name: Option<String>,
    /// The cluster of a ClusterProfile that the hub finds members by, in the place of a kubeconfig.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cluster_profile_ref: Option<ClusterProfileRef>,
}

/// A ClusterProfile (`multicluster.x-k8s.io`) on home.
#[derive(JsonSchema, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ClusterProfileRef {
    #[schemars(length(min = 1))]
    pub name: String,
    #[schemars(length(min = 1))]
    pub namespace: String,
}

/// How the region's cluster is reached.
#[derive(JsonSchema, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RegionKubeconfig {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub secret: Option<KubeconfigSecret>,
}

/// The Secret that holds the kubeconfig.
#[derive(JsonSchema, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct KubeconfigSecret {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// By default the namespace where the hub looks for kubeconfigs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub namespace: Option<String>,
    /// The key in the Secret's data; by default `kubeconfig`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
}

/// What is known of the deployment.
#[derive(JsonSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct KryptonDeploymentStatus {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub phase: Option<DeploymentPhase>,
    /// One line for people.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_message: Option<String>,
    /// `<repo>/<chart>:<version>` of what was last installed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_applied_chart: Option<String>,
    /// The `metadata.generation` that this status is about.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "condition_list::schema")]
    pub conditions: Vec<Condition>,
    /// The clusters on which the release is ordered or being removed. Unset until the hub orders the first one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub placements: Option<Vec<Placement>>,
    /// The epoch of the hub that has written this last, as far as it has changed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hub_epoch: Option<u64>,
}

/// A cluster on which the release is ordered.
#[derive(JsonSchema, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Placement {
    /// The member, by the name that it had last.
    pub cluster: String,
    /// By which the cluster is known, whichever member it is.
    pub cluster_uid: String,
    /// The key of the kubeconfig in the member's Secret, where it was named.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
    /// The release is being removed from the cluster.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub removing: bool,
}

/// The summary of the conditions.
#[derive(JsonSchema, Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum DeploymentPhase {
    Pending,
    Ready,
    Error,
}

impl KryptonDeployment {
    /// The CRD as it is applied. Shadows the derive's own, which lacks our schema version.
    pub fn crd() -> CustomResourceDefinition {
        published(<Self as CustomResourceExt>::crd())
    }
}
