//! Identity of a cluster: its UID and its Kubernetes version.

use std::time::Duration;

use k8s_openapi::api::core::v1::Namespace;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use krypton_crds::HELM_KEEPS;
use kube::Client;
use kube::api::Api;
use thiserror::Error;

use crate::access::reason_of;
use crate::retry::StartupGrace;

const DEADLINE: Duration = Duration::from_secs(10);

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cluster {
    /// UID of the namespace kube-system, which exists as long as its cluster.
    pub uid: String,
    pub kubernetes_version: String,
}

#[derive(Debug, Error)]
pub enum ClusterError {
    #[error(
        "this agent may not get namespace kube-system: {0}; give its service account, or the user of its kubeconfig, the right to get namespaces"
    )]
    Forbidden(String),
    #[error(
        "the cluster does not know who we are: {0}; the credentials of the kubeconfig or of the pod are refused"
    )]
    Unauthorized(String),
    #[error("asking the cluster who it is failed; is its apiserver up, and is that its address?")]
    Call(#[source] kube::Error),
    #[error("the cluster does not answer within {} s; is its apiserver up?", DEADLINE.as_secs())]
    Deadline,
}

impl ClusterError {
    /// Returns whether a retry can succeed without a user's action.
    pub fn may_pass(&self, apiserver: &StartupGrace) -> bool {
        match self {
            Self::Call(_) | Self::Deadline => {
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

/// Queries the cluster once.
pub async fn ask(client: &Client) -> Result<Cluster, ClusterError> {
    let asked = async {
        let namespaces: Api<Namespace> = Api::all(client.clone());
        let system = namespaces.get_metadata("kube-system").await?;
        let version = client.apiserver_version().await?;
        Ok(Cluster {
            uid: system.metadata.uid.unwrap_or_default(),
            kubernetes_version: version.git_version,
        })
    };
    match tokio::time::timeout(DEADLINE, asked).await {
        Ok(answer) => answer.map_err(|error| match &error {
            kube::Error::Api(status) if status.code == 403 => {
                ClusterError::Forbidden(reason_of(&error))
            }
            kube::Error::Api(status) if status.code == 401 => {
                ClusterError::Unauthorized(reason_of(&error))
            }
            _ => ClusterError::Call(error),
        }),
        Err(_) => Err(ClusterError::Deadline),
    }
}
