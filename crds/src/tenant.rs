//! `Tenant`: an installation of the fleet's chart, on the Tenant's cluster or on the member that it names.

#![expect(
    unreachable_pub,
    reason = "KubeSchema copies a struct into a function, `pub` and all"
)]

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

/// Most entries in `status.history`.
pub const HISTORY_MAX: usize = 10;

/// Longest chart name and version in the history, in bytes.
pub const CHART_TEXT_MAX: usize = 256;

/// Desired state of the Tenant. A Tenant without a spec has all defaults.
#[derive(
    CustomResource, KubeSchema, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize,
)]
#[kube(
    group = "mesh.openkcm.io",
    version = "v1alpha1",
    kind = "Tenant",
    plural = "tenants",
    singular = "tenant",
    shortname = "tn",
    category = "krypton",
    namespaced,
    status = "TenantStatus",
    derive = "PartialEq",
    doc = "Tenant is an installation of the fleet's Helm chart for one tenant.",
    // A change could leave a release behind in the previous workspace.
    validation = Rule::new("!has(self.spec) || !has(self.spec.workspace) || self.spec.workspace in ['', self.metadata.name] || (has(oldSelf.spec) && has(oldSelf.spec.workspace) && oldSelf.spec.workspace != '') || !self.metadata.name.matches('^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$')")
        .message("workspace defaulted to the name of the Tenant and cannot be changed; delete the Tenant and create it again"),
    printcolumn(name = "Phase", type_ = "string", json_path = ".status.phase"),
    printcolumn(name = "Workspace", type_ = "string", json_path = ".spec.workspace"),
    printcolumn(
        name = "Ready",
        type_ = "string",
        json_path = ".status.conditions[?(@.type==\"Ready\")].status"
    ),
    printcolumn(
        name = "Chart",
        type_ = "string",
        json_path = ".status.lastAppliedChart",
        priority = 1
    ),
    printcolumn(
        name = "Age",
        type_ = "date",
        json_path = ".metadata.creationTimestamp"
    ),
    printcolumn(
        name = "Message",
        type_ = "string",
        json_path = ".status.lastMessage"
    )
)]
#[x_kube(
    validation = Rule::new("!has(oldSelf.workspace) || oldSelf.workspace == '' || has(self.workspace)")
        .message("workspace cannot be removed once set; delete the Tenant and create it again")
)]
#[schemars(extend("default" = {}))]
#[serde(rename_all = "camelCase")]
pub struct TenantSpec {
    /// Namespace of the release. Krypton creates it if it is missing. Defaults to the name of the Tenant. You cannot
    /// change it. You can set it later only to the name of the Tenant, or if that name is not a valid namespace name.
    // Every rule accepts a value that is already stored. Otherwise, the API server would reject updates such as the
    // removal of a finalizer.
    #[x_kube(
        validation = Rule::new("(oldSelf.hasValue() && oldSelf.value() == self) || (size(self) <= 63 && self.matches('^[a-z0-9]([-a-z0-9]*[a-z0-9])?$'))")
            .message("workspace must be a legal namespace name: 1 to 63 of a-z, 0-9 and '-', with a letter or digit first and last")
            .optional_old_self(true),
        validation = Rule::new("self == oldSelf || oldSelf == ''")
            .message("workspace cannot be changed once set; delete the Tenant and create it again")
    )]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub workspace: Option<String>,
    /// Member of the fleet that installs the chart. Defaults to the cluster of the Tenant.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cluster_ref: Option<ClusterRef>,
    /// Chart values of this Tenant. They override all others. They require `--tenant-values` on the hub. Without that
    /// flag, Krypton does not install or upgrade a Tenant that sets them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "free_form::schema")]
    pub values: Option<Map<String, Value>>,
    /// Service account in the Tenant's namespace that Helm impersonates. Defaults to `--default-service-account` of the
    /// hub, or else to the account of the fleet. Krypton needs the right to impersonate it.
    #[x_kube(
        validation = Rule::new("self == '' || (size(self) <= 253 && self.matches('^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$'))")
            .message("serviceAccountName must be the name of a service account: at most 253 of a-z, 0-9, '-' and '.', with a letter or digit first and last")
    )]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 253))]
    pub service_account_name: Option<String>,
}

/// Reference to a member of the fleet.
#[derive(JsonSchema, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ClusterRef {
    /// Name of the member. For a kubeconfig Secret, it is the name of the Secret.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub secret_name: Option<String>,
    /// Namespace of the kubeconfig Secret. If it is not set, only the name has to match.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub secret_namespace: Option<String>,
}

/// Observed state of the Tenant.
#[derive(JsonSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
// Tools that use kstatus, such as Flux and `helm --wait`, take an object without status for ready.
#[schemars(extend("default" = {"observedGeneration": -1}))]
#[serde(rename_all = "camelCase")]
pub struct TenantStatus {
    /// `Pending`, `Ready` or `Error`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub phase: Option<String>,
    /// Human-readable summary: the number of ready clusters and the problem of the worst one.
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
    /// Number of clusters by state. Set only if the Tenant is on more clusters than the conditions list.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub summary: Option<ClusterSummary>,
    /// State of the Tenant on each cluster that the conditions list. Set only on the home cluster.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["name"]))]
    pub clusters: Vec<ClusterStatus>,
    /// `Ready` for all clusters. For each cluster, `ClusterReady/<cluster>`, `ClusterProgress/<cluster>` and
    /// `ClusterError/<cluster>`. If `summary` is set, only for the worst clusters. If the Tenant is not ready, also
    /// `Reconciling` or `Stalled`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "condition_list::schema")]
    pub conditions: Vec<Condition>,
    /// Next automatic step of each cluster after a failure or while it waits.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["cluster"]))]
    pub next_steps: Vec<NextStep>,
    /// Last revisions of the release, newest first. On the home cluster, only the revisions on `self-cluster`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = HISTORY_MAX), extend("x-kubernetes-list-type" = "atomic"))]
    pub history: Vec<HistoryEntry>,
    /// Cluster on which the hub placed the Tenant. The hub records it before it creates the copy, and then uses no
    /// other cluster.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub placement: Option<TenantPlacement>,
    /// Epoch of the hub that last changed this status on the home cluster.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hub_epoch: Option<u64>,
}

/// State of a Tenant on one cluster.
#[derive(JsonSchema, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ClusterStatus {
    /// Name of the cluster.
    pub name: String,
    /// `Ready`, `NotReady`, `Error` or `Unknown`, as `summary` counts it.
    pub state: String,
    /// Reason of `ClusterError/<cluster>` if the state is `Error`, or else of `ClusterReady/<cluster>`.
    pub reason: String,
    /// Message of the same condition, up to 128 bytes.
    pub message: String,
    /// Chart that the cluster reports as installed last, up to 256 bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub chart: Option<String>,
}

/// Next automatic step on a cluster.
#[derive(JsonSchema, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NextStep {
    /// Name of the cluster.
    pub cluster: String,
    /// `Retry`: Krypton retries the failed action. `Unlock`: Krypton takes over the release from another Helm process.
    /// `GivenUp`: no step until the chart, the values or the Tenant change, or you request a retry. `Wait`: workloads
    /// have until then to become ready.
    pub action: String,
    /// Time of the step, by the clock of the cluster. Not set for `GivenUp`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub at: Option<Time>,
    /// Number of consecutive failed attempts.
    #[serde(default)]
    pub attempts: u32,
}

/// Revision of the release.
#[derive(JsonSchema, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct HistoryEntry {
    /// Helm's number of the revision. After an uninstallation, the numbers start again at 1.
    // Nothing could read a Tenant with a larger number.
    #[schemars(range(max = u32::MAX))]
    pub revision: u32,
    /// Name of the cluster with the release. Set only for a KryptonDeployment.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 253))]
    pub cluster: Option<String>,
    /// Name of the chart. Not set if Krypton does not know it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = CHART_TEXT_MAX))]
    pub chart: Option<String>,
    /// Version of the chart. Not set if Krypton does not know it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = CHART_TEXT_MAX))]
    pub chart_version: Option<String>,
    /// Time at which Helm created the revision, by the clock of the cluster's API server.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub time: Option<Time>,
    /// `Deployed`: the release runs it. `Superseded`: a later revision replaced it. `Failed`: the Helm run failed.
    /// `RolledBack`: it failed, and Krypton rolled it back. `Pending`: Helm has not finished it, or was interrupted.
    /// `Uninstalled`: Helm uninstalled it and kept its record. `Removed`: Helm's record of it is gone, for example
    /// after an uninstallation. `Unknown`: Krypton does not know its status.
    #[serde(default)]
    pub outcome: RevisionOutcome,
    /// `Install`: no release existed. `Chart`: the chart or its version differs from the previous revision. `Values`:
    /// only the values or the repository differ. `Retry`: the previous revision failed with the same chart and values.
    /// `Repair`: the chart and the values are the same, but another client changed the release, or Krypton was
    /// interrupted. `Rollback`: Krypton rolled a failed upgrade back. `Helm`: a user or another program ran Helm.
    /// `Unknown`: Krypton does not know the cause.
    #[serde(default)]
    pub cause: RevisionCause,
    /// Program or user that caused the revision, as the name of its field manager, up to 128 bytes. For a change of
    /// `spec` or of the annotation `mesh.openkcm.io/reconcile-requested-at`, the manager that changed it last, from
    /// `metadata.managedFields`. On a placed Tenant's own cluster, this is the program that places it. `krypton-hub`:
    /// the chart or values that the hub sends to this cluster changed. For `Repair`, `Rollback` and automatic retries,
    /// the program that runs Helm for this cluster: `krypton-agent` or `krypton-hub`. Not set if Krypton does not know
    /// it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 128))]
    pub by: Option<String>,
}

/// Outcome of a revision.
#[derive(JsonSchema, Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum RevisionOutcome {
    Deployed,
    Superseded,
    Failed,
    RolledBack,
    Pending,
    Uninstalled,
    Removed,
    // Also each word of a later version.
    #[default]
    #[serde(other)]
    Unknown,
}

/// Cause of a revision.
#[derive(JsonSchema, Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum RevisionCause {
    Install,
    Chart,
    Values,
    Retry,
    Repair,
    Rollback,
    Helm,
    // Also each word of a later version.
    #[default]
    #[serde(other)]
    Unknown,
}

/// Cluster on which the hub placed a Tenant.
#[derive(JsonSchema, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TenantPlacement {
    /// Name that the member had at that time.
    pub cluster: String,
    /// UID of the namespace `kube-system` on the cluster. It identifies the cluster even if the member is renamed.
    pub cluster_uid: String,
}

/// Number of clusters of a Tenant, by state.
#[derive(JsonSchema, Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ClusterSummary {
    /// All clusters.
    pub clusters: u32,
    /// Clusters on which the Tenant is ready.
    pub ready: u32,
    /// Clusters on which the last action failed.
    pub error: u32,
    /// Clusters without an error on which the Tenant is not ready.
    pub not_ready: u32,
    /// Clusters whose state is unknown.
    pub unknown: u32,
}

impl Tenant {
    /// Returns the CRD with its schema version. Shadows the method of the derive, which lacks the version.
    pub fn crd() -> &'static CustomResourceDefinition {
        static CRD: LazyLock<CustomResourceDefinition> =
            LazyLock::new(|| published(<Tenant as CustomResourceExt>::crd()));
        &CRD
    }

    /// Returns the namespace of the release. It can be invalid: names of objects and older schemas allow more.
    pub fn workspace(&self) -> &str {
        let set = self
            .spec
            .workspace
            .as_deref()
            .filter(|workspace| !workspace.is_empty());
        set.or(self.metadata.name.as_deref()).unwrap_or_default()
    }

    /// Returns whether the status summarizes the members instead of listing them.
    pub fn has_summary(&self) -> bool {
        let status = self.status.as_ref();
        status.is_some_and(|status| status.summary.is_some())
    }

    /// Returns the member that `clusterRef` names.
    pub fn referenced_member(&self) -> Option<&str> {
        let secret = self.spec.cluster_ref.as_ref()?.secret_name.as_deref()?;
        Some(secret).filter(|name| !name.is_empty())
    }

    /// Returns whether the member `name` reconciles this Tenant: `clusterRef` names this member or none. `namespace` is
    /// that of the member's kubeconfig Secret, if it has one.
    pub fn is_for(&self, name: &str, namespace: Option<&str>) -> bool {
        let Some(member) = self.referenced_member() else {
            return true;
        };
        let reference = self.spec.cluster_ref.as_ref();
        let wanted = reference
            .and_then(|reference| reference.secret_namespace.as_deref())
            .filter(|wanted| !wanted.is_empty());
        let same_namespace = match (wanted, namespace) {
            (Some(wanted), Some(namespace)) => wanted == namespace,
            _ => true,
        };
        member == name && same_namespace
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn tenant(spec: Value) -> Tenant {
        Tenant::new("acme", serde_json::from_value(spec).unwrap())
    }

    #[test]
    fn cluster_ref_matches_secret_and_optional_namespace() {
        let named = |value| tenant(json!({ "clusterRef": value }));
        let short = named(json!({ "secretName": "edge-1" }));
        let full = named(json!({ "secretName": "edge-1", "secretNamespace": "krypton" }));
        assert!(tenant(json!({})).is_for("edge-1", Some("krypton")));
        assert!(short.is_for("edge-1", Some("krypton")));
        assert!(!short.is_for("edge-2", Some("krypton")));
        assert!(full.is_for("edge-1", Some("krypton")));
        assert!(!full.is_for("edge-1", Some("other")));
        assert!(full.is_for("edge-1", None));
    }

    #[test]
    fn workspace_defaults_to_the_name() {
        for (spec, expected) in [
            (json!({}), "acme"),
            (json!({"workspace": ""}), "acme"),
            (json!({"workspace": "acme-ws"}), "acme-ws"),
        ] {
            assert_eq!(tenant(spec).workspace(), expected);
        }
    }

    #[test]
    fn cluster_ref_without_secret_name_names_no_member() {
        for spec in [
            json!({}),
            json!({"clusterRef": {}}),
            json!({"clusterRef": {"secretName": "", "secretNamespace": "krypton"}}),
        ] {
            assert_eq!(tenant(spec.clone()).referenced_member(), None, "{spec}");
        }
        let named = tenant(json!({"clusterRef": {"secretName": "edge-1"}}));
        assert_eq!(named.referenced_member(), Some("edge-1"));
    }

    #[test]
    fn unset_fields_are_not_serialized() {
        let mut tenant = tenant(json!({}));
        tenant.status = Some(TenantStatus::default());
        let written = serde_json::to_value(&tenant).unwrap();
        assert_eq!(written["spec"], json!({}));
        assert_eq!(written["status"], json!({}));
    }
}
