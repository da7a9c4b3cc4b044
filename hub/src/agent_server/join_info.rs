//! Publishes the data for joining clusters and the hub's version in ConfigMap `krypton-hub-join` of its
//! namespace. Administrators therefore need no access to the Secret with the CA's key.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, bail};
use k8s_openapi::api::core::v1::ConfigMap;
use krypton_runtime::call::call;
use krypton_runtime::clock::BootTime;
use krypton_runtime::newest::NewestSeen as _;
use krypton_runtime::periodic::{NextRun, Periodic, Schedule};
use krypton_types::join_info::{JoinInfo, NAME};
use kube::Client;
use kube::api::Api;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::ca::Authority;
use crate::leader::Leader;
use crate::leader::home_writer::create_or_replace;

/// Attempts to write, because other writers may cause conflicts.
const TRIES: usize = 3;
/// Another writer may have deleted or changed the ConfigMap.
const SCHEDULE: Schedule = Schedule {
    every: Duration::from_secs(10 * 60),
    jitter: 0.0,
    retry_max: Duration::from_secs(60),
};

/// Publishes the roots of the CA and the addresses of this hub, until `stop`. Does so when the CA changes, and
/// periodically, because another writer may change them. A standby may have other addresses, so only the leader
/// publishes.
pub(crate) async fn run(
    client: Client,
    namespace: String,
    addresses: Vec<String>,
    mut authority: watch::Receiver<Arc<Authority>>,
    mut leader: Leader,
    stop: CancellationToken,
) {
    let mut periodic = Periodic::new("publishing join information", SCHEDULE);
    loop {
        let result = match leader.may_write(BootTime::now()) {
            true => {
                let info = JoinInfo {
                    ca_pem: authority.get_and_update().ca_pem(),
                    addresses: addresses.clone(),
                    version: env!("CARGO_PKG_VERSION").to_owned(),
                };
                let may_write = || leader.may_write(BootTime::now());
                let publication = publish(client.clone(), &namespace, &info, &may_write);
                leader
                    .tracked(publication)
                    .await
                    .map(|()| NextRun::AsScheduled)
            }
            false => Ok(NextRun::OnTrigger),
        };
        tokio::select! {
            () = periodic.pause_after(result) => {}
            () = stop.cancelled() => return,
            Ok(()) = authority.changed() => {}
            changed = leader.changed() => if !changed { return },
        }
    }
}

/// Updates the ConfigMap as long as `may_write`: another hub may become leader between two attempts. Costs one read if
/// the ConfigMap is up to date.
pub async fn publish(
    client: Client,
    namespace: &str,
    info: &JoinInfo,
    may_write: &(dyn Fn() -> bool + Sync),
) -> anyhow::Result<()> {
    let api: Api<ConfigMap> = Api::namespaced(client, namespace);
    let attempt = |verb| format!("{verb} ConfigMap {namespace}/{NAME}");
    for _ in 0..TRIES {
        let current = call(attempt("reading"), api.get_opt(NAME)).await?;
        let mut config_map = current.unwrap_or_default();
        let published = config_map.data.as_ref().map(JoinInfo::from_data);
        if published.as_ref() == Some(info) || !may_write() {
            return Ok(());
        }
        config_map.metadata.name = Some(NAME.to_owned());
        config_map.data.get_or_insert_default().extend(info.data());
        // The object carries the resourceVersion of the read.
        match call(attempt("writing"), create_or_replace(&api, &config_map)).await {
            // Another writer created, changed or deleted the ConfigMap since the read.
            Err(error) if error.code() == Some(409) => {}
            result => {
                return result.map(drop).with_context(|| {
                    format!("failed to publish the join information; check that namespace {namespace} exists and that the hub may create and update ConfigMaps there")
                });
            }
        }
    }
    bail!("another client keeps changing ConfigMap {namespace}/{NAME}; find and stop that client")
}
