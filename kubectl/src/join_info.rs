//! Reads the hub's join information.

use k8s_openapi::api::core::v1::ConfigMap;
use krypton_types::join_info::{JoinInfo, NAME};

use crate::error::KubectlError;
use crate::home::Connection;

/// Reads the join information that the hub in `namespace` publishes. Returns `None` if it is missing.
pub async fn read(home: &Connection, namespace: &str) -> Result<Option<JoinInfo>, KubectlError> {
    let config_map = home.namespaced::<ConfigMap>(namespace).find(NAME).await?;
    Ok(config_map.map(|config_map| JoinInfo::from_data(&config_map.data.unwrap_or_default())))
}
