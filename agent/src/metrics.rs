//! The agent's Prometheus metrics.

use std::fmt;
use std::sync::Arc;

use jiff::Timestamp;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Registry;
use tokio::sync::watch;

use crate::drift::DriftMetrics;
use crate::report::ReportBoard;
use crate::session::Link;

/// Read at the time of the scrape: nothing is kept twice.
#[derive(Debug)]
struct State {
    link: watch::Receiver<Link>,
    expiry: watch::Receiver<Timestamp>,
    board: Arc<ReportBoard>,
}

impl Collector for State {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let tenants = i64::try_from(self.board.tenants()).unwrap_or(i64::MAX);
        for (name, help, value) in [
            (
                "session_connected",
                "Whether there is a session with the hub",
                i64::from(self.link.borrow().is_up()),
            ),
            (
                "certificate_expiry_seconds",
                "When the client certificate ends, in seconds since 1970; 0 before enrolment",
                self.expiry.borrow().as_second(),
            ),
            ("tenants", "Tenants of this cluster that are known", tenants),
        ] {
            let gauge = ConstGauge::new(value);
            let metric = encoder.encode_descriptor(name, help, None, gauge.metric_type())?;
            gauge.encode(metric)?;
        }
        Ok(())
    }
}

/// All metrics, under the prefix `krypton_agent`.
pub fn registry(
    link: watch::Receiver<Link>,
    expiry: watch::Receiver<Timestamp>,
    board: Arc<ReportBoard>,
    drift: &DriftMetrics,
) -> Registry {
    let mut registry = Registry::with_prefix("krypton_agent");
    drift.register(&mut registry);
    registry.register_collector(Box::new(State {
        link,
        expiry,
        board,
    }));
    registry
}
