//! Takes the hub's epoch on home, and composes the chart state of the fleet.

use std::time::Duration;

use k8s_openapi::api::core::v1::ConfigMap;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use krypton_runtime::call::{ApiError, call_within};
use krypton_runtime::effect;
use krypton_types::desired::ChartState;
use krypton_types::names::EPOCH_CONFIG_MAP;
use kube::Client;
use kube::api::{Api, PostParams};
use serde_json::{Map, Value};

use crate::args::ChartSettings;

const KEY: &str = "epoch";
/// A new leader waits for the epoch.
const DEADLINE: Duration = Duration::from_secs(3);

/// Takes the next epoch, above the recorded one and above `at_least`: if home was restored from a backup, a
/// member may know a later epoch. Within an epoch, the hub numbers generations itself.
pub async fn next_epoch(client: &Client, namespace: &str, at_least: u64) -> Result<u64, ApiError> {
    let attempt = format!("taking an epoch from ConfigMap {namespace}/{EPOCH_CONFIG_MAP}");
    call_within(
        DEADLINE,
        attempt,
        next_epoch_now(client, namespace, at_least),
    )
    .await
}

async fn next_epoch_now(client: &Client, namespace: &str, at_least: u64) -> kube::Result<u64> {
    let api: Api<ConfigMap> = Api::namespaced(client.clone(), namespace);
    let found = api.get_opt(EPOCH_CONFIG_MAP).await?;
    let next = recorded(found.as_ref()).max(at_least).saturating_add(1);
    let data = Some([(KEY.to_owned(), next.to_string())].into());
    let params = PostParams::default();
    match found {
        // The version that was read is the precondition: two hubs never take the same epoch.
        Some(found) => {
            let next = ConfigMap { data, ..found };
            effect!(
                "epoch.replace",
                api.replace(EPOCH_CONFIG_MAP, &params, &next)
            )
            .await?
        }
        None => {
            let metadata = ObjectMeta {
                name: Some(EPOCH_CONFIG_MAP.to_owned()),
                ..ObjectMeta::default()
            };
            let new = ConfigMap {
                metadata,
                data,
                ..ConfigMap::default()
            };
            effect!("epoch.create", api.create(&params, &new)).await?
        }
    };
    Ok(next)
}

fn recorded(found: Option<&ConfigMap>) -> u64 {
    found
        .and_then(|found| found.data.as_ref()?.get(KEY)?.parse().ok())
        .unwrap_or_default()
}

/// Composes the chart state from the flags, the resolved version and the values file.
pub fn chart_state(
    chart: &ChartSettings,
    version: &str,
    pinned: Option<&str>,
    values: &Map<String, Value>,
) -> ChartState {
    ChartState {
        repo: chart.repo.clone(),
        name: chart.name.clone(),
        version: version.to_owned(),
        install_crds: chart.install_crds,
        values: values.clone(),
        confidential: None,
        pinned: pinned.map(ToOwned::to_owned),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn non_numeric_recorded_epoch_counts_as_none() {
        let with = |text: &str| ConfigMap {
            data: Some([(KEY.to_owned(), text.to_owned())].into()),
            ..ConfigMap::default()
        };
        assert_eq!(recorded(Some(&with("41"))), 41);
        assert_eq!(recorded(Some(&with("rubbish"))), 0);
        assert_eq!(recorded(None), 0);
    }
}
