//! Creates join tokens, with the rights of the person who runs the command.

use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::Secret;
use krypton_crds::edge_cluster::EdgeCluster;
use krypton_types::join_token::{self, Made};
use kube::api::{Api, PostParams};
use kube::{Client, Error as KubeError};
use thiserror::Error;

const DEADLINE: Duration = Duration::from_secs(10);

#[derive(Debug, Error)]
pub enum TokenError {
    #[error(
        "making a join token in the namespace {namespace} failed; check that the namespace exists and that you may create Secrets there"
    )]
    Make {
        namespace: String,
        #[source]
        source: KubeError,
    },
    #[error("reading EdgeCluster {cluster} failed; check that you may get EdgeClusters")]
    EdgeCluster {
        cluster: String,
        #[source]
        source: KubeError,
    },
    #[error(
        "Secrets in the namespace {namespace}: no answer within {} s; check that home answers", DEADLINE.as_secs()
    )]
    Deadline { namespace: String },
}

/// Makes a token for `cluster`. If its EdgeCluster exists, the token is good for no later one of that name.
pub async fn make(
    client: Client,
    namespace: &str,
    cluster: &str,
    life: Duration,
    now: Timestamp,
) -> Result<Made, TokenError> {
    let members: Api<EdgeCluster> = Api::all(client.clone());
    let member = in_time(namespace, members.get_metadata_opt(cluster)).await?;
    let member = member.map_err(|source| TokenError::EdgeCluster {
        cluster: cluster.to_owned(),
        source,
    })?;
    let uid = member.and_then(|member| member.metadata.uid);
    let random: ([u8; 8], [u8; 32]) = (rand::random(), rand::random());
    let (object, made) =
        join_token::new(cluster, uid.as_deref(), life, now, (&random.0, &random.1));
    let api: Api<Secret> = Api::namespaced(client, namespace);
    in_time(namespace, api.create(&PostParams::default(), &object))
        .await?
        .map_err(|source| TokenError::Make {
            namespace: namespace.to_owned(),
            source,
        })?;
    Ok(made)
}

async fn in_time<T>(
    namespace: &str,
    call: impl Future<Output = Result<T, KubeError>>,
) -> Result<Result<T, KubeError>, TokenError> {
    tokio::time::timeout(DEADLINE, call)
        .await
        .map_err(|_| TokenError::Deadline {
            namespace: namespace.to_owned(),
        })
}
