//! `Tenant`: one installation of the fleet's chart, on the cluster it is on or the one it names.

#![expect(
    unreachable_pub,
    reason = "KubeSchema copies a struct into a function, `pub` and all"
)]

use k8s_openapi::{
    apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition,
    apimachinery::pkg::apis::meta::v1::{Condition, Time},
};
use kube::{CustomResource, CustomResourceExt, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::{condition_list, free_form, published::published};

/// What is wanted for a tenant. An object without a spec is a Tenant with all defaults.
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
    namespaced,
    status = "TenantStatus",
    derive = "PartialEq",
    doc = "A tenant, for which Krypton keeps the fleet's Helm chart installed.",
    // The release may be there by then, and would be left behind.
    validation = Rule::new("!has(self.spec) || !has(self.spec.workspace) || self.spec.workspace in ['', self.metadata.name] || (has(oldSelf.spec) && has(oldSelf.spec.workspace) && oldSelf.spec.workspace != '') || !self.metadata.name.matches('^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$')")
        .message("the workspace was the Tenant's name until now and cannot be changed; delete the Tenant and create it again"),
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
        name = "Message",
        type_ = "string",
        json_path = ".status.lastMessage",
        priority = 1
    ),
    printcolumn(
        name = "Age",
        type_ = "date",
        json_path = ".metadata.creationTimestamp"
    )
)]
#[x_kube(
    validation = Rule::new("!has(oldSelf.workspace) || oldSelf.workspace == '' || has(self.workspace)")
        .message("workspace cannot be removed once set; delete the Tenant and create it again")
)]
#[schemars(extend("default" = {}))]
#[serde(rename_all = "camelCase")]
pub struct TenantSpec {
    /// The namespace that the chart goes to, made if missing; by default the Tenant's name. It
    /// cannot be changed, and set later only to that name, or where that cannot be a namespace.
    // Every rule passes a value that was stored before: an object must stay open to updates, above
    // all to the removal of its finalizers.
    #[x_kube(
        validation = Rule::new("(oldSelf.hasValue() && oldSelf.value() == self) || (size(self) <= 63 && self.matches('^[a-z0-9]([-a-z0-9]*[a-z0-9])?$'))")
            .message("workspace must be a legal namespace name: 1 to 63 of a-z, 0-9 and '-', with a letter or digit first and last")
            .optional_old_self(true),
        validation = Rule::new("self == oldSelf || oldSelf == ''")
            .message("workspace cannot be changed once set; delete the Tenant and create it again")
    )]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub workspace: Option<String>,
    /// The member of the fleet that this Tenant is for; by default the cluster that it is on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cluster_ref: Option<ClusterRef>,
    /// Values for the chart, over all others. They count where the hub runs with `--tenant-values`; where
    /// it does not, a Tenant that has any is not changed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "free_form::schema")]
    pub values: Option<Map<String, Value>>,
    /// The service account of the Tenant's namespace that Helm acts as; by default that of the hub's
    /// `--default-service-account`, else the fleet's. Krypton needs the right to impersonate it.
    #[x_kube(
        validation = Rule::new("self == '' || (size(self) <= 253 && self.matches('^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$'))")
            .message("serviceAccountName must be the name of a service account: at most 253 of a-z, 0-9, '-' and '.', with a letter or digit first and last")
    )]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 253))]
    pub service_account_name: Option<String>,
}

/// A member of the fleet, named by the Secret that holds its kubeconfig.
#[derive(JsonSchema, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ClusterRef {
    /// The Secret's name, which is the member's name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub secret_name: Option<String>,
    /// The Secret's namespace; by default the one where the hub looks for kubeconfigs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub secret_namespace: Option<String>,
}

/// What is known of a tenant.
#[derive(JsonSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TenantStatus {
    /// `Pending`, `Ready` or `Error`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub phase: Option<String>,
    /// One line for people: how many clusters are ready, and what is wrong with the worst.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_message: Option<String>,
    /// `<repo>/<chart>:<version>` of what was last installed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_applied_chart: Option<String>,
    /// The `metadata.generation` that this status is about.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// How many clusters stand where, of a Tenant that is on more than its conditions list.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub summary: Option<ClusterSummary>,
    /// `Ready` over all clusters; per cluster `ClusterReady/<cluster>`, `ClusterProgress/<cluster>`
    /// and `ClusterError/<cluster>`. Beside a summary, of the clusters that are worst alone.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "condition_list::schema")]
    pub conditions: Vec<Condition>,
    /// The next automatic step of each cluster after a failure or while it waits.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["cluster"]))]
    pub next_steps: Vec<NextStep>,
    /// The cluster that the hub placed the Tenant on. The hub records it before it orders anything, and never
    /// changes it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub placement: Option<TenantPlacement>,
    /// The epoch of the hub that has written this last on home, as far as it has changed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hub_epoch: Option<u64>,
}

/// The next step of a cluster, unless something changes before.
#[derive(JsonSchema, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NextStep {
    pub cluster: String,
    /// `Retry`: the failed action is retried. `Unlock`: the release is unlocked. `GivenUp`: nothing happens until
    /// chart, values or Tenant change, or you request a retry. `Wait`: the workloads have until then to become ready.
    pub action: String,
    /// By the cluster's clock.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub at: Option<Time>,
    /// Attempts that have failed, in a row.
    #[serde(default)]
    pub attempts: u32,
}

/// The cluster that a Tenant of home is placed on.
#[derive(JsonSchema, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TenantPlacement {
    /// The member, by the name that it had then.
    pub cluster: String,
    /// By which the cluster is known, whichever member it is.
    pub cluster_uid: String,
}

/// Clusters of a Tenant by how they stand.
#[derive(JsonSchema, Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ClusterSummary {
    /// All of them.
    pub clusters: u32,
    pub ready: u32,
    pub error: u32,
    pub not_ready: u32,
    pub unknown: u32,
}

impl Tenant {
    /// The CRD as it is applied. Shadows the derive's own, which lacks our schema version.
    pub fn crd() -> CustomResourceDefinition {
        published(<Self as CustomResourceExt>::crd())
    }

    /// The namespace that the chart goes to. Not always a legal one: names have more freedom, and
    /// so had older schemas.
    pub fn workspace(&self) -> &str {
        let set = self
            .spec
            .workspace
            .as_deref()
            .filter(|workspace| !workspace.is_empty());
        set.or(self.metadata.name.as_deref()).unwrap_or_default()
    }

    /// The member that `clusterRef` names, if it names one.
    pub fn names_member(&self) -> Option<&str> {
        let secret = self.spec.cluster_ref.as_ref()?.secret_name.as_deref()?;
        Some(secret).filter(|name| !name.is_empty())
    }

    /// Whether the member `name`, whose kubeconfig Secret is in `namespace` where it has one, is to
    /// look after this Tenant: it names no member, or this one.
    pub fn is_for(&self, name: &str, namespace: Option<&str>) -> bool {
        let Some(member) = self.names_member() else {
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
    use super::*;

    fn tenant(spec: serde_json::Value) -> Tenant {
        Tenant::new("acme", serde_json::from_value(spec).unwrap())
    }

    #[test]
    fn cluster_ref_matches_secret_and_optional_namespace() {
        let named = |value| tenant(serde_json::json!({ "clusterRef": value }));
        let short = named(serde_json::json!({ "secretName": "edge-1" }));
        let full =
            named(serde_json::json!({ "secretName": "edge-1", "secretNamespace": "krypton" }));
        assert!(tenant(serde_json::json!({})).is_for("edge-1", Some("krypton")));
        assert!(short.is_for("edge-1", Some("krypton")));
        assert!(!short.is_for("edge-2", Some("krypton")));
        assert!(full.is_for("edge-1", Some("krypton")));
        assert!(!full.is_for("edge-1", Some("other")));
        assert!(full.is_for("edge-1", None));
    }

    #[test]
    fn the_workspace_is_by_default_the_name() {
        assert_eq!(tenant(serde_json::json!({})).workspace(), "acme");
        assert_eq!(
            tenant(serde_json::json!({"workspace": ""})).workspace(),
            "acme"
        );
        assert_eq!(
            tenant(serde_json::json!({"workspace": "acme-ws"})).workspace(),
            "acme-ws"
        );
    }

    #[test]
    fn cluster_ref_without_secret_name_names_no_member() {
        for spec in [
            serde_json::json!({}),
            serde_json::json!({"clusterRef": {}}),
            serde_json::json!({"clusterRef": {"secretName": "", "secretNamespace": "krypton"}}),
        ] {
            assert_eq!(tenant(spec.clone()).names_member(), None, "{spec}");
        }
        let named = tenant(serde_json::json!({"clusterRef": {"secretName": "edge-1"}}));
        assert_eq!(named.names_member(), Some("edge-1"));
    }

    #[test]
    fn unset_fields_are_not_serialized() {
        let mut tenant = tenant(serde_json::json!({}));
        tenant.status = Some(TenantStatus::default());
        let written = serde_json::to_value(&tenant).unwrap();
        assert_eq!(written["spec"], serde_json::json!({}));
        assert_eq!(written["status"], serde_json::json!({}));
    }
}
