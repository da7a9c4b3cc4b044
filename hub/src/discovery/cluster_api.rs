//! Clusters of Cluster API (`cluster.x-k8s.io`), each with the Secret `<cluster>-kubeconfig` that the
//! contract of Cluster API requires.

use k8s_openapi::api::core::v1::Secret;
use kube::ResourceExt as _;
use kube::api::DynamicObject;
use kube::runtime::watcher::Config;
use serde_json::Value;

use super::SourceKind;
use super::object_and_secret::{ClusterFields, Pairing};
use super::provider::ApiKind;

const CLUSTER_NAME_LABEL: &str = "cluster.x-k8s.io/cluster-name";
const SECRET_TYPE: &str = "cluster.x-k8s.io/secret";
const PAUSED_ANNOTATION: &str = "cluster.x-k8s.io/paused";

/// The specifics of Cluster API.
#[derive(Clone, Copy, Debug)]
pub struct ClusterApi;

impl Pairing for ClusterApi {
    fn kind(&self) -> SourceKind {
        SourceKind::Cluster
    }

    fn api(&self) -> ApiKind {
        ApiKind {
            group: "cluster.x-k8s.io",
            versions: &["v1beta2", "v1beta1"],
            plural: "clusters",
        }
    }

    fn secrets(&self) -> Config {
        Config::default()
            .labels(CLUSTER_NAME_LABEL)
            .fields(&format!("type={SECRET_TYPE}"))
    }

    /// CAs and keys have the same type and label. Some providers also write `<cluster>-user-kubeconfig`,
    /// which is for users.
    fn may_pair(&self, secret: &Secret) -> bool {
        let cluster = secret.labels().get(CLUSTER_NAME_LABEL);
        secret.type_.as_deref() == Some(SECRET_TYPE)
            && cluster.is_some_and(|cluster| secret.name_any() == kubeconfig_secret(cluster))
    }

    fn read(&self, cluster: &DynamicObject) -> ClusterFields {
        let is_true = |pointer: &str| cluster.data.pointer(pointer) == Some(&Value::Bool(true));
        // Contract fields of v1beta2 and v1beta1, which Cluster API never resets. The v1beta1 condition
        // ControlPlaneReady reports health and is not part of the contract.
        let initialized = is_true("/status/initialization/controlPlaneInitialized")
            || is_true("/status/controlPlaneReady");
        let suspended = if cluster.metadata.deletion_timestamp.is_some() {
            Some("is being deleted")
        } else if is_true("/spec/paused") {
            Some("is paused (spec.paused)")
        } else if cluster.annotations().contains_key(PAUSED_ANNOTATION) {
            Some("is paused (annotation cluster.x-k8s.io/paused)")
        } else {
            None
        };
        ClusterFields {
            secret: Some(kubeconfig_secret(&cluster.name_any())),
            key: "value".to_owned(),
            waiting: (!initialized).then(|| "its control plane is not initialised".to_owned()),
            suspended: suspended.map(str::to_owned),
        }
    }
}

fn kubeconfig_secret(cluster: &str) -> String {
    format!("{cluster}-kubeconfig")
}

#[cfg(test)]
mod tests;
