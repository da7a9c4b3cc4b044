//! TenantControlPlanes of Kamaji (`kamaji.clastix.io`), each with the Secret that its status names, or with the
//! Secret that a KubeconfigGenerator writes for it.

use k8s_openapi::api::core::v1::Secret;
use kube::ResourceExt as _;
use kube::api::DynamicObject;
use kube::runtime::watcher::Config;
use serde_json::Value;

use super::SourceKind;
use super::object_and_secret::{ClusterFields, Pairing};
use super::provider::ApiKind;

const COMPONENT_LABEL: &str = "kamaji.clastix.io/component";
const COMPONENT: &str = "admin-kubeconfig";
/// Label of the Secrets of a KubeconfigGenerator, with its name.
const GENERATOR_LABEL: &str = "kamaji.clastix.io/managed-by";
/// Key of the kubeconfig in these Secrets.
const GENERATOR_KEY: &str = "value";
const KEY_ANNOTATION: &str = "kamaji.clastix.io/kubeconfig-secret-key";
/// Any value pauses the control plane.
const PAUSED_ANNOTATION: &str = "kamaji.clastix.io/paused";

/// The specifics of Kamaji.
#[derive(Clone, Debug)]
pub struct Kamaji {
    /// Key of the kubeconfig in the Secret that the status names, unless Kamaji's own annotation names another.
    pub key: String,
    /// The KubeconfigGenerator whose Secrets are used instead.
    pub generator: Option<String>,
}

impl Kamaji {
    /// The label of the Secrets, and its value.
    fn label(&self) -> (&str, &str) {
        match &self.generator {
            Some(generator) => (GENERATOR_LABEL, generator),
            None => (COMPONENT_LABEL, COMPONENT),
        }
    }
}

impl Pairing for Kamaji {
    fn kind(&self) -> SourceKind {
        SourceKind::TenantControlPlane
    }

    fn api(&self) -> ApiKind {
        ApiKind {
            group: "kamaji.clastix.io",
            versions: &["v1alpha1"],
            plural: "tenantcontrolplanes",
        }
    }

    fn secrets(&self) -> Config {
        let (label, value) = self.label();
        Config::default().labels(&format!("{label}={value}"))
    }

    fn may_pair(&self, secret: &Secret) -> bool {
        let (label, value) = self.label();
        secret.labels().get(label).map(String::as_str) == Some(value)
    }

    fn read(&self, plane: &DynamicObject) -> ClusterFields {
        let text = |pointer| plane.data.pointer(pointer).and_then(Value::as_str);
        let status = text("/status/kubernetesResources/version/status").unwrap_or("Provisioning");
        let (is_waiting, is_suspended) = match status {
            // NotReady means that no replica is ready. The cluster is still usable: a request shows whether it
            // responds, and the status lags behind short rollouts.
            "Ready" | "Upgrading" | "CertificateAuthorityRotating" | "NotReady" => (false, false),
            "Sleeping" | "WriteLimited" | "Migrating" => (false, true),
            // Also an unknown status, such as one of a later Kamaji version.
            _ => (true, false),
        };
        let suspended = if plane.metadata.deletion_timestamp.is_some() {
            Some("is being deleted".to_owned())
        } else if is_suspended {
            Some(format!("is {status}"))
        } else if plane.annotations().contains_key(PAUSED_ANNOTATION) {
            Some(format!("is paused (annotation {PAUSED_ANNOTATION})"))
        } else {
            None
        };
        let (secret, key) = match &self.generator {
            Some(generator) => (
                Some(format!("{}-{generator}", plane.name_any())),
                GENERATOR_KEY.to_owned(),
            ),
            None => {
                let secret = text("/status/kubeconfig/admin/secretName");
                let secret = secret.filter(|name| !name.is_empty()).map(str::to_owned);
                let annotation = plane.annotations().get(KEY_ANNOTATION);
                (secret, annotation.unwrap_or(&self.key).clone())
            }
        };
        ClusterFields {
            secret,
            key,
            waiting: is_waiting.then(|| format!("its status is {status}")),
            suspended,
        }
    }

    fn suspended_by(&self, secret: &Secret) -> Option<String> {
        let paused = secret.annotations().contains_key(PAUSED_ANNOTATION);
        paused.then(|| format!("is paused (annotation {PAUSED_ANNOTATION} on its Secret)"))
    }
}

#[cfg(test)]
mod tests;
