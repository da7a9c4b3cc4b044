//! Identity of a cluster: its UID and its Kubernetes version.

use std::time::Duration;

use k8s_openapi::api::core::v1::Namespace;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use krypton_crds::HELM_KEEP_POLICY;
use kube::Client;
use kube::api::{Api, PostParams};
use thiserror::Error;

use crate::access::api_error_message;
use crate::call::{ApiError, call, call_within};
use crate::retry::StartupGrace;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClusterIdentity {
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
    pub fn is_retryable(&self, apiserver: &StartupGrace) -> bool {
        match self {
            Self::Call(_) => {
                apiserver.record_no_response();
                true
            }
            Self::Forbidden(message) | Self::Unauthorized(message) => apiserver.covers(message),
        }
    }
}

/// Creates a namespace for Krypton's own objects if it is missing. Helm keeps it when it uninstalls the chart that
/// contains it.
pub async fn ensure_own_namespace(client: &Client, name: &str) -> kube::Result<()> {
    let [key, value] = HELM_KEEP_POLICY.map(str::to_owned);
    let namespace = Namespace {
        metadata: ObjectMeta {
            name: Some(name.to_owned()),
            annotations: Some([(key, value)].into()),
            ..ObjectMeta::default()
        },
        ..Namespace::default()
    };
    let api: Api<Namespace> = Api::all(client.clone());
    match api.create(&PostParams::default(), &namespace).await {
        Err(kube::Error::Api(status)) if status.code == 409 => Ok(()),
        result => result.map(drop),
    }
}

impl ClusterIdentity {
    /// Reads the identity from the API server.
    ///
    /// # Errors
    /// If one of two requests fails, or both last longer than a call may.
    pub async fn read(client: &Client) -> Result<Self, ApiError> {
        let requests = async {
            let version = client.apiserver_version().await?;
            Ok(Self {
                uid: read_uid(client).await?,
                kubernetes_version: version.git_version,
            })
        };
        call("reading the UID and version of the cluster", requests).await
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

/// Reads the identity of the agent's cluster.
pub async fn read_own(client: &Client) -> Result<ClusterIdentity, ClusterError> {
    let result = ClusterIdentity::read(client).await;
    result.map_err(|error| match (&error, error.code()) {
        (ApiError::Failed { source, .. }, Some(403)) => {
            ClusterError::Forbidden(api_error_message(source))
        }
        (ApiError::Failed { source, .. }, Some(401)) => {
            ClusterError::Unauthorized(api_error_message(source))
        }
        _ => ClusterError::Call(error),
    })
}
