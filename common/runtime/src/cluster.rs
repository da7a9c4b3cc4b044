//! Identity of a cluster: its UID and its Kubernetes version.

use std::time::Duration;

use k8s_openapi::api::core::v1::Namespace;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use krypton_crds::HELM_KEEPS;
use kube::Client;
use kube::api::Api;
use thiserror::Error;

use crate::access::reason_of;
use crate::call::{ApiError, call, call_within};
use crate::retry::StartupGrace;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cluster {
    /// UID of the namespace kube-system, which exists as long as its cluster.
    pub uid: String,
    pub kubernetes_version: String,
}

#[derive(Debug, Error)]
pub enum ClusterError {
    #[error(
        "the agent is not allowed to get namespace kube-system: {0}; grant its service account, or the user of its kubeconfig, the right to get namespaces"
    )]
    Forbidden(String),
    #[error("the cluster rejects the credentials of the kubeconfig or the pod: {0}")]
    Unauthorized(String),
    #[error(transparent)]
    Call(ApiError),
}

impl ClusterError {
    /// Returns whether a retry can succeed without a user's action.
    pub fn may_pass(&self, apiserver: &StartupGrace) -> bool {
        match self {
            Self::Call(_) => {
                apiserver.was_silent();
                true
            }
            Self::Forbidden(_) | Self::Unauthorized(_) => apiserver.is_settling(),
        }
    }
}

/// Returns a namespace for Krypton's own objects. Helm keeps it when it uninstalls the chart that contains it.
pub fn own_namespace(name: &str) -> Namespace {
    let [key, value] = HELM_KEEPS.map(str::to_owned);
    Namespace {
        metadata: ObjectMeta {
            name: Some(name.to_owned()),
            annotations: Some([(key, value)].into()),
            ..ObjectMeta::default()
        },
        ..Namespace::default()
    }
}

impl Cluster {
    /// Asks the cluster.
    ///
    /// # Errors
    /// If one of two requests fails, or both last longer than a call may.
    pub async fn read(client: &Client) -> Result<Self, ApiError> {
        let asked = async {
            let version = client.apiserver_version().await?;
            Ok(Self {
                uid: read_uid(client).await?,
                kubernetes_version: version.git_version,
            })
        };
        call("reading the UID and version of the cluster", asked).await
    }
}

/// Returns the UID of the cluster alone.
pub async fn uid(client: &Client, deadline: Duration) -> Result<String, ApiError> {
    call_within(deadline, "reading namespace kube-system", read_uid(client)).await
}

async fn read_uid(client: &Client) -> kube::Result<String> {
    let namespaces: Api<Namespace> = Api::all(client.clone());
    let system = namespaces.get_metadata("kube-system").await?;
    Ok(system.metadata.uid.unwrap_or_default())
}

/// Asks the agent's cluster.
pub async fn ask(client: &Client) -> Result<Cluster, ClusterError> {
    let asked = Cluster::read(client).await;
    asked.map_err(|error| match (&error, error.code()) {
        (ApiError::Failed { source, .. }, Some(403)) => ClusterError::Forbidden(reason_of(source)),
        (ApiError::Failed { source, .. }, Some(401)) => {
            ClusterError::Unauthorized(reason_of(source))
        }
        _ => ClusterError::Call(error),
    })
}
