//! Reads the hub's join information.

use std::time::Duration;

use k8s_openapi::api::core::v1::ConfigMap;
use krypton_types::join_info::{JoinInfo, NAME};
use kube::{Api, Client};
use thiserror::Error;

const DEADLINE: Duration = Duration::from_secs(10);

#[derive(Debug, Error)]
pub enum JoinInfoError {
    #[error("reading ConfigMap {namespace}/{NAME} failed")]
    Read {
        namespace: String,
        #[source]
        source: kube::Error,
    },
    #[error(
        "ConfigMap {namespace}/{NAME}: no answer within {} s; check that home answers", DEADLINE.as_secs()
    )]
    Deadline { namespace: String },
}

impl JoinInfoError {
    /// Returns whether the API server rejected the request because a permission is missing.
    pub fn is_forbidden(&self) -> bool {
        matches!(
            self,
            Self::Read { source: kube::Error::Api(status), .. } if status.code == 403
        )
    }
}

/// Reads the join information that the hub in `namespace` publishes. Returns `None` if it is missing.
pub async fn read(client: Client, namespace: &str) -> Result<Option<JoinInfo>, JoinInfoError> {
    let api: Api<ConfigMap> = Api::namespaced(client, namespace);
    let namespace = || namespace.to_owned();
    let found = tokio::time::timeout(DEADLINE, api.get_opt(NAME))
        .await
        .map_err(|_| JoinInfoError::Deadline {
            namespace: namespace(),
        })?
        .map_err(|source| JoinInfoError::Read {
            namespace: namespace(),
            source,
        })?;
    Ok(found.map(|found| JoinInfo::of(&found.data.unwrap_or_default())))
}
