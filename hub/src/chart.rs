//! The chart of the fleet: which version, with which credentials and values.

pub mod credentials;
pub mod helm_credentials;
pub mod values;
pub mod values_file;
pub mod values_reader;
pub mod values_status;
pub mod version_pin;

use krypton_types::desired::ChartState;
use serde_json::{Map, Value};

use crate::args::ChartSettings;

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
