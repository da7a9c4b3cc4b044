//! What who joins a cluster has to know of the hub, and its version: ConfigMap `krypton-hub-join` in its namespace, so
//! that nobody needs to read the Secret with the CA's key for it.

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
/// Writes that other writers may get in the way of.
const TRIES: usize = 3;
/// Somebody may have deleted or changed it.
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

/// Publishes what is in `info` when it changes, and again and again until `stop`, in case somebody
/// deletes or changes it; where this hub leads, as another may have other addresses.
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

/// Brings the ConfigMap up to date. Costs one read when it is.
pub async fn publish(
    client: Client,
    namespace: &str,
    info: &JoinInfo,
) -> Result<(), JoinInfoError> {
    publish_while(client, namespace, info, &|| true).await
}

/// The same, for as long as it is ours to write: another hub may have begun to lead between two tries.
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
                // What was read carries its resourceVersion.
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
            // Somebody was faster, or has deleted it in between.
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
