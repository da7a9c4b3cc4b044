//! Publishes the data for joining clusters and the hub's version in ConfigMap `krypton-hub-join` of its
//! namespace. Administrators therefore need no access to the Secret with the CA's key.

use std::time::Duration;

use k8s_openapi::api::core::v1::ConfigMap;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use krypton_runtime::clock::BootTime;
use krypton_runtime::effect;
use krypton_runtime::newest::NewestSeen as _;
use krypton_runtime::retry::backoff;
use krypton_types::error_chain::chain;
use krypton_types::join_info::{JoinInfo, NAME};
use kube::api::{Api, PostParams};
use kube::{Client, Error as KubeError};
use thiserror::Error;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::leader::Leader;

const DEADLINE: Duration = Duration::from_secs(10);
/// Attempts to write, because other writers may cause conflicts.
const TRIES: usize = 3;
/// Another writer may have deleted or changed the ConfigMap.
const CHECK_EVERY: Duration = Duration::from_secs(10 * 60);
const LONGEST_PAUSE: Duration = Duration::from_secs(60);

#[derive(Debug, Error)]
pub enum JoinInfoError {
    #[error("reading ConfigMap {namespace}/{NAME} failed")]
    Read {
        namespace: String,
        #[source]
        source: KubeError,
    },
    #[error(
        "writing ConfigMap {namespace}/{NAME} failed; check that the namespace exists and that the hub may create and update ConfigMaps there"
    )]
    Write {
        namespace: String,
        #[source]
        source: KubeError,
    },
    #[error("ConfigMap {namespace}/{NAME} is written by others all the time; find out by whom")]
    Unsteady { namespace: String },
    #[error(
        "ConfigMap {namespace}/{NAME}: no answer within {} s; check that home answers", DEADLINE.as_secs()
    )]
    Deadline { namespace: String },
}

/// Publishes `info` when it changes, and periodically until `stop`, because another writer may delete or change
/// it. Only the leader publishes, because a standby may have other addresses.
pub async fn keep(
    client: Client,
    namespace: String,
    mut info: watch::Receiver<JoinInfo>,
    mut lead: Leader,
    stop: CancellationToken,
) {
    let mut failures = 0;
    loop {
        if !lead.writes(BootTime::now()) {
            tokio::select! {
                () = stop.cancelled() => return,
                decided = lead.changed() => if !decided { return },
            }
            continue;
        }
        let newest = info.see();
        let pause = match lead
            .tracked(publish_while(client.clone(), &namespace, &newest, &|| {
                lead.writes(BootTime::now())
            }))
            .await
        {
            Ok(()) => {
                failures = 0;
                CHECK_EVERY
            }
            Err(error) => {
                tracing::warn!(error = %chain(&error), "publishing how to join failed; it is tried again");
                failures += 1;
                backoff(failures, LONGEST_PAUSE, rand::random())
            }
        };
        tokio::select! {
            () = stop.cancelled() => return,
            Ok(()) = info.changed() => {}
            decided = lead.changed() => if !decided { return },
            () = tokio::time::sleep(pause) => {}
        }
    }
}

/// Updates the ConfigMap. Costs one read if it is up to date.
pub async fn publish(
    client: Client,
    namespace: &str,
    info: &JoinInfo,
) -> Result<(), JoinInfoError> {
    publish_while(client, namespace, info, &|| true).await
}

/// Like [`publish`], as long as `may_write`: another hub may become leader between two attempts.
async fn publish_while(
    client: Client,
    namespace: &str,
    info: &JoinInfo,
    may_write: &(dyn Fn() -> bool + Sync),
) -> Result<(), JoinInfoError> {
    let api: Api<ConfigMap> = Api::namespaced(client, namespace);
    let params = PostParams::default();
    for _ in 0..TRIES {
        let written = match get(&api, namespace).await? {
            Some(found) if found.data.as_ref().map(JoinInfo::of).as_ref() == Some(info) => {
                return Ok(());
            }
            _ if !may_write() => return Ok(()),
            Some(mut found) => {
                found.data.get_or_insert_default().extend(info.data());
                // The object carries the resourceVersion of the read.
                let call = effect!("join-info.replace", api.replace(NAME, &params, &found));
                in_time(namespace, call).await?
            }
            None => {
                let new = ConfigMap {
                    metadata: ObjectMeta {
                        name: Some(NAME.to_owned()),
                        ..ObjectMeta::default()
                    },
                    data: Some(info.data().into()),
                    ..ConfigMap::default()
                };
                let call = effect!("join-info.create", api.create(&params, &new));
                in_time(namespace, call).await?
            }
        };
        match written {
            Ok(_) => return Ok(()),
            // Another writer created, changed or deleted the ConfigMap since the read.
            Err(KubeError::Api(status)) if status.code == 409 => {}
            Err(source) => {
                return Err(JoinInfoError::Write {
                    namespace: namespace.to_owned(),
                    source,
                });
            }
        }
    }
    let namespace = namespace.to_owned();
    Err(JoinInfoError::Unsteady { namespace })
}

async fn get(api: &Api<ConfigMap>, namespace: &str) -> Result<Option<ConfigMap>, JoinInfoError> {
    in_time(namespace, api.get_opt(NAME))
        .await?
        .map_err(|source| JoinInfoError::Read {
            namespace: namespace.to_owned(),
            source,
        })
}

async fn in_time<T>(
    namespace: &str,
    call: impl Future<Output = Result<T, KubeError>>,
) -> Result<Result<T, KubeError>, JoinInfoError> {
    tokio::time::timeout(DEADLINE, call)
        .await
        .map_err(|_| JoinInfoError::Deadline {
            namespace: namespace.to_owned(),
        })
}
