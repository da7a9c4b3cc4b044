//! Creates join tokens with the user's permissions.

use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::Secret;
use krypton_crds::edge_cluster::EdgeCluster;
use krypton_runtime::chance;
use krypton_types::join_token::{self, NewToken};

use crate::error::KubectlError;
use crate::home::Connection;

/// Creates a token for `cluster`. If its EdgeCluster exists, the token is invalid for a later one of that name.
pub async fn create(
    home: &Connection,
    namespace: &str,
    cluster: &str,
    lifetime: Duration,
    now: Timestamp,
) -> Result<NewToken, KubectlError> {
    let members = home.all::<EdgeCluster>();
    let member = members.api.get_metadata_opt(cluster);
    let member = members.call("get", cluster, member).await?;
    let uid = member.and_then(|member| member.metadata.uid);
    let random_bytes: ([u8; 8], [u8; 32]) = (chance::secret(), chance::secret());
    let (secret, token) = join_token::new(
        cluster,
        uid.as_deref(),
        lifetime,
        now,
        (&random_bytes.0, &random_bytes.1),
    );
    let secrets = home.namespaced::<Secret>(namespace);
    secrets.create("", &secret).await?;
    Ok(token)
}
