//! The hub's Prometheus metrics.

use std::fmt;
use std::sync::Arc;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::{ConstGauge, Gauge};
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::{Registry, Unit};

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

/// What sessions count.
#[derive(Debug)]
pub struct SessionMetrics {
    pub sessions: Gauge,
    /// Seconds from a new desired state to an agent's word that it is in its slot.
    pub propagation: Histogram,
    /// By outcome.
    enrolments: Family<[(&'static str, &'static str); 1], Counter>,
}

/// What came of an attempt to enrol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    Admitted,
    Refused,
    /// For a reason of ours: it is to be tried again.
    Failed,
    /// Not looked at, after too many that were refused.
    Slowed,
}

impl SessionMetrics {
    pub fn enrolment(&self, outcome: Outcome) {
        let outcome = match outcome {
            Outcome::Admitted => "admitted",
            Outcome::Refused => "refused",
            Outcome::Failed => "failed",
            Outcome::Slowed => "slowed",
        };
        self.enrolments.get_or_create(&[("outcome", outcome)]).inc();
    }
}

impl Default for SessionMetrics {
    fn default() -> Self {
        Self {
            sessions: Gauge::default(),
            propagation: Histogram::new(exponential_buckets(0.001, 1.5, 30)),
            enrolments: Family::default(),
        }
    }
}

/// All metrics, under the prefix `krypton_hub`.
pub fn registry(facts: Arc<FactsBoard>, sessions: &SessionMetrics) -> Registry {
    let mut registry = Registry::with_prefix("krypton_hub");
    registry.register_collector(Box::new(Members(facts)));
    registry.register(
        "sessions",
        "Live sessions of agents",
        sessions.sessions.clone(),
    );
    registry.register(
        "enrolments",
        "Attempts of agents to get a first certificate, by outcome",
        sessions.enrolments.clone(),
    );
    registry.register_with_unit(
        "desired_propagation",
        "From a new desired state to an agent's word that it has it",
        Unit::Seconds,
        sessions.propagation.clone(),
    );
    registry
}
