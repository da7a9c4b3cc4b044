//! Takes the hub's epoch on home.

use std::time::Duration;

use k8s_openapi::api::core::v1::ConfigMap;
use krypton_runtime::call::{ApiError, call_within};
use krypton_types::names::EPOCH_CONFIG_MAP;
use kube::Client;
use kube::api::Api;

use super::home_writer::create_or_replace;

const EPOCH_KEY: &str = "epoch";
/// A new leader waits for the epoch.
const DEADLINE: Duration = Duration::from_secs(3);

/// Takes the next epoch, above the recorded one and above `at_least`: if home was restored from a backup, a
/// member may know a later epoch. Within an epoch, the hub numbers generations itself.
pub(super) async fn next_epoch(
    client: &Client,
    namespace: &str,
    at_least: u64,
) -> Result<u64, ApiError> {
    let attempt = format!("taking an epoch from ConfigMap {namespace}/{EPOCH_CONFIG_MAP}");
    call_within(DEADLINE, attempt, take_epoch(client, namespace, at_least)).await
}

async fn take_epoch(client: &Client, namespace: &str, at_least: u64) -> kube::Result<u64> {
    let api: Api<ConfigMap> = Api::namespaced(client.clone(), namespace);
    let current = api.get_opt(EPOCH_CONFIG_MAP).await?;
    let next = recorded_epoch(current.as_ref())
        .max(at_least)
        .saturating_add(1);
    let mut config_map = current.unwrap_or_default();
    config_map.metadata.name = Some(EPOCH_CONFIG_MAP.to_owned());
    config_map.data = Some([(EPOCH_KEY.to_owned(), next.to_string())].into());
    // The version that was read is the precondition: two hubs never take the same epoch.
    create_or_replace(&api, &config_map).await?;
    Ok(next)
}

fn recorded_epoch(config_map: Option<&ConfigMap>) -> u64 {
    config_map
        .and_then(|config_map| config_map.data.as_ref()?.get(EPOCH_KEY)?.parse().ok())
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn non_numeric_recorded_epoch_counts_as_none() {
        let with = |text: &str| ConfigMap {
            data: Some([(EPOCH_KEY.to_owned(), text.to_owned())].into()),
            ..ConfigMap::default()
        };
        assert_eq!(recorded_epoch(Some(&with("41"))), 41);
        assert_eq!(recorded_epoch(Some(&with("rubbish"))), 0);
        assert_eq!(recorded_epoch(None), 0);
    }
}
