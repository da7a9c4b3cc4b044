//! The hub's Prometheus metrics.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use jiff::Timestamp;
use krypton_agent::drift::DriftMetrics;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::{ConstGauge, Gauge};
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::{Registry, Unit};

use crate::expiry::Credential;
use crate::facts::FactsBoard;

/// Read at the time of the scrape: nothing is kept twice.
#[derive(Debug)]
struct Members(Arc<FactsBoard>);

impl Collector for Members {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let (connected, all) = self.0.connected();
        // A member that has left leaves none behind.
        let runtime = tokio::runtime::Handle::try_current();
        let tasks = runtime.map_or(0, |runtime| runtime.metrics().num_alive_tasks());
        for (name, help, value) in [
            ("members", "Members of the fleet that are known", all),
            (
                "members_connected",
                "Members whose apiserver has answered within 30 s",
                connected,
            ),
            ("tasks", "Tasks of the hub that have not ended", tasks),
        ] {
            let gauge = ConstGauge::new(i64::try_from(value).unwrap_or(i64::MAX));
            let metric = encoder.encode_descriptor(name, help, None, gauge.metric_type())?;
            gauge.encode(metric)?;
        }
        for (of, name, help) in [
            (
                Credential::Agent,
                "agent_certificate_expiry_timestamp",
                "When the certificate of the member's agent expires, in seconds since 1970",
            ),
            (
                Credential::Access,
                "access_expiry_timestamp",
                "When the credential of the member's kubeconfig expires, in seconds since 1970",
            ),
        ] {
            let kind = ConstGauge::new(0_i64).metric_type();
            let mut family = encoder.encode_descriptor(name, help, Some(&Unit::Seconds), kind)?;
            for (member, end) in self.0.ends(of) {
                let labels = [("member", member)];
                ConstGauge::new(end.as_second()).encode(family.encode_family(&labels)?)?;
            }
        }
        Ok(())
    }
}

/// A kind of message.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct Message {
    pub of: &'static str,
    pub kind: &'static str,
}

/// Why a connection was refused.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Why {
    why: &'static str,
}

/// What the agents' port counts before anybody has a session.
#[derive(Clone, Debug, Default)]
pub struct DoorMetrics {
    /// Handshakes that go on.
    pub handshakes: Gauge,
    /// The most of them at a time since the start.
    pub handshakes_most: Gauge,
    refused: Family<Why, Counter>,
}

impl DoorMetrics {
    /// Counts a handshake until what is returned is dropped.
    pub(crate) fn handshake(&self) -> Handshake<'_> {
        let now = self.handshakes.inc() + 1;
        let most = self.handshakes_most.inner();
        most.fetch_max(now, Ordering::Relaxed);
        Handshake(self)
    }

    pub(crate) fn refused(&self, why: &'static str) {
        self.refused.get_or_create(&Why { why }).inc();
    }

    /// How many were refused for this reason.
    pub fn refusals(&self, why: &'static str) -> u64 {
        self.refused.get_or_create(&Why { why }).get()
    }
}

/// A handshake that goes on.
#[derive(Debug)]
pub(crate) struct Handshake<'a>(&'a DoorMetrics);

impl Drop for Handshake<'_> {
    fn drop(&mut self) {
        self.0.handshakes.dec();
    }
}

/// What sessions count.
#[derive(Debug)]
pub struct SessionMetrics {
    pub door: DoorMetrics,
    pub sessions: Gauge,
    /// How often a session was made to wait with its next message.
    pub slowed: Counter,
    /// Messages of sessions, by who says them and what they are.
    pub messages: Family<Message, Counter>,
    /// Reports on Tenants that sessions have brought.
    pub reports: Counter,
    /// Seconds from a new desired state to an agent's word that it is in its slot.
    pub propagation: Histogram,
    /// When the hub's own certificates end.
    certificates: Family<[(&'static str, &'static str); 1], Gauge>,
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
    /// When one of the hub's own certificates ends: `hub` or `ca`.
    pub fn certificate(&self, which: &'static str, end: Timestamp) {
        self.certificates
            .get_or_create(&[("certificate", which)])
            .set(end.as_second());
    }

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
            door: DoorMetrics::default(),
            sessions: Gauge::default(),
            slowed: Counter::default(),
            messages: Family::default(),
            reports: Counter::default(),
            propagation: Histogram::new(exponential_buckets(0.001, 1.5, 30)),
            certificates: Family::default(),
            enrolments: Family::default(),
        }
    }
}

/// All metrics, under the prefix `krypton_hub`.
pub fn registry(
    facts: Arc<FactsBoard>,
    sessions: &SessionMetrics,
    drift: &DriftMetrics,
) -> Registry {
    let mut registry = Registry::with_prefix("krypton_hub");
    drift.register(&mut registry);
    registry.register_collector(Box::new(Members(facts)));
    registry.register(
        "sessions",
        "Live sessions of agents",
        sessions.sessions.clone(),
    );
    let door = &sessions.door;
    registry.register(
        "handshakes_in_flight",
        "TLS handshakes that go on",
        door.handshakes.clone(),
    );
    registry.register(
        "handshakes_in_flight_most",
        "The most TLS handshakes at a time since the start",
        door.handshakes_most.clone(),
    );
    registry.register(
        "connections_refused",
        "Connections that were refused at the agents' port",
        door.refused.clone(),
    );
    registry.register(
        "sessions_slowed",
        "How often a session was made to wait since its member says too much",
        sessions.slowed.clone(),
    );
    registry.register(
        "messages",
        "Messages of sessions, by who says them",
        sessions.messages.clone(),
    );
    registry.register(
        "tenant_reports",
        "Reports on Tenants that sessions have brought",
        sessions.reports.clone(),
    );
    registry.register_with_unit(
        "certificate_expiry_timestamp",
        "When the hub's certificate and its CA expire, in seconds since 1970",
        Unit::Seconds,
        sessions.certificates.clone(),
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

#[cfg(test)]
mod tests {
    use prometheus_client::encoding::text::encode;

    use super::*;
    use crate::expiry::Validity;

    #[test]
    fn the_ends_of_all_certificates_are_told_by_member() {
        let facts = Arc::new(FactsBoard::default());
        let sessions = SessionMetrics::default();
        let end = |second| Timestamp::from_second(second).unwrap();
        facts.set("edge-1", |facts| {
            facts.certificate = Some(Validity::until(end(1000)));
        });
        facts.set("edge-2", |facts| {
            facts.access = Some(Validity::until(end(2000)));
        });
        sessions.certificate("hub", end(3000));
        sessions.certificate("ca", end(4000));
        sessions.enrolment(Outcome::Refused);
        let mut text = String::new();
        encode(
            &mut text,
            &registry(facts, &sessions, &DriftMetrics::default()),
        )
        .unwrap();
        for line in [
            "krypton_hub_agent_certificate_expiry_timestamp_seconds{member=\"edge-1\"} 1000",
            "krypton_hub_access_expiry_timestamp_seconds{member=\"edge-2\"} 2000",
            "krypton_hub_certificate_expiry_timestamp_seconds{certificate=\"hub\"} 3000",
            "krypton_hub_certificate_expiry_timestamp_seconds{certificate=\"ca\"} 4000",
            "krypton_hub_enrolments_total{outcome=\"refused\"} 1",
        ] {
            assert!(text.lines().any(|found| found == line), "{line}: {text}");
        }
    }
}
