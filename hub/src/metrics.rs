//! The hub's Prometheus metrics.

use std::fmt;
use std::sync::Arc;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Registry;

use crate::facts::FactsBoard;

/// Read at the time of the scrape: nothing is kept twice.
#[derive(Debug)]
struct Members(Arc<FactsBoard>);

impl Collector for Members {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let (connected, all) = self.0.connected();
        for (name, help, value) in [
            ("members", "Members of the fleet that are known", all),
            (
                "members_connected",
                "Members whose apiserver has answered within 30 s",
                connected,
            ),
        ] {
            let gauge = ConstGauge::new(i64::try_from(value).unwrap_or(i64::MAX));
            let metric = encoder.encode_descriptor(name, help, None, gauge.metric_type())?;
            gauge.encode(metric)?;
        }
        Ok(())
    }
}

/// All metrics, under the prefix `krypton_hub`.
pub fn registry(facts: Arc<FactsBoard>) -> Registry {
    let mut registry = Registry::with_prefix("krypton_hub");
    registry.register_collector(Box::new(Members(facts)));
    registry
}
