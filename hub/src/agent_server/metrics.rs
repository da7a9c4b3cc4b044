//! Metrics of the agents' port: connections, enrollments and sessions.

use std::sync::atomic::Ordering;

use jiff::Timestamp;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::{Registry, Unit};

/// `N` names and values of labels.
type Labels<const N: usize> = [(&'static str, &'static str); N];

/// All values of `ConnectionRefusal::reason` of the listener.
const REFUSAL_REASONS: [&str; 5] = ["slow", "handshake", "unauthenticated", "address", "member"];

/// Metrics of the agents' port before a session exists.
#[derive(Clone, Debug)]
pub struct PortMetrics {
    /// Handshakes in progress.
    pub handshakes: Gauge,
    /// Maximum number of concurrent handshakes since the start.
    pub handshakes_max: Gauge,
    refused: Family<Labels<1>, Counter>,
}

impl Default for PortMetrics {
    fn default() -> Self {
        let refused = Family::default();
        for reason in REFUSAL_REASONS {
            drop(refused.get_or_create(&[("reason", reason)]));
        }
        Self {
            handshakes: Gauge::default(),
            handshakes_max: Gauge::default(),
            refused,
        }
    }
}

impl PortMetrics {
    /// Counts a handshake in progress until the returned guard is dropped.
    pub(crate) fn start_handshake(&self) -> HandshakeGuard<'_> {
        let current = self.handshakes.inc() + 1;
        let max = self.handshakes_max.inner();
        max.fetch_max(current, Ordering::Relaxed);
        HandshakeGuard(self)
    }

    pub(crate) fn count_refused(&self, reason: &'static str) {
        self.refused.get_or_create(&[("reason", reason)]).inc();
    }

    /// Number of connections rejected for this reason.
    #[cfg(test)]
    pub(crate) fn refused_count(&self, reason: &'static str) -> u64 {
        self.refused.get_or_create(&[("reason", reason)]).get()
    }
}

/// A handshake in progress.
#[derive(Debug)]
pub(crate) struct HandshakeGuard<'a>(&'a PortMetrics);

impl Drop for HandshakeGuard<'_> {
    fn drop(&mut self) {
        self.0.handshakes.dec();
    }
}

/// Metrics of sessions.
#[derive(Debug)]
pub struct SessionMetrics {
    pub port: PortMetrics,
    pub sessions: Gauge,
    /// How often the hub throttled a session.
    pub throttled: Counter,
    /// Messages of sessions, by sender and kind.
    messages: Family<Labels<2>, Counter>,
    /// Reports on Tenants received from sessions.
    pub reports: Counter,
    /// Seconds from a new desired state until an agent confirms it.
    pub propagation: Histogram,
    /// Expiry times of the hub's own certificates.
    certificates: Family<Labels<1>, Gauge>,
    /// Enrollments by outcome.
    enrollments: Family<Labels<1>, Counter>,
}

/// The outcome of an enrollment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EnrollmentOutcome {
    Admitted,
    Refused,
    /// The hub failed; the agent should retry.
    Failed,
    /// Not processed because too many earlier attempts were rejected.
    Throttled,
}

impl EnrollmentOutcome {
    const ALL: [Self; 4] = [Self::Admitted, Self::Refused, Self::Failed, Self::Throttled];

    fn name(self) -> &'static str {
        match self {
            Self::Admitted => "admitted",
            Self::Refused => "refused",
            Self::Failed => "failed",
            Self::Throttled => "throttled",
        }
    }
}

impl SessionMetrics {
    /// Sets the expiry time of one of the hub's own certificates: `hub` or `ca`.
    pub fn set_certificate_expiry(&self, certificate: &'static str, expiry: Timestamp) {
        self.certificates
            .get_or_create(&[("certificate", certificate)])
            .set(expiry.as_second());
    }

    pub fn count_enrollment(&self, outcome: EnrollmentOutcome) {
        self.enrollments
            .get_or_create(&[("outcome", outcome.name())])
            .inc();
    }

    /// The counter of the messages of this kind.
    pub fn messages(&self, sender: &'static str, kind: &'static str) -> Counter {
        self.messages
            .get_or_create_owned(&[("sender", sender), ("kind", kind)])
    }

    pub(crate) fn register(&self, registry: &mut Registry) {
        registry.register("sessions", "Open agent sessions", self.sessions.clone());
        let port = &self.port;
        registry.register(
            "handshakes_in_flight",
            "TLS handshakes in progress",
            port.handshakes.clone(),
        );
        registry.register(
            "handshakes_in_flight_max",
            "Maximum number of concurrent TLS handshakes since the start",
            port.handshakes_max.clone(),
        );
        registry.register(
            "connections_refused",
            "Rejected connections to the agents' port",
            port.refused.clone(),
        );
        registry.register(
            "sessions_throttled",
            "Number of times that the hub throttled a session because of its member's message rate",
            self.throttled.clone(),
        );
        registry.register(
            "messages",
            "Messages of sessions, by sender",
            self.messages.clone(),
        );
        registry.register(
            "tenant_reports",
            "Reports on Tenants received from sessions",
            self.reports.clone(),
        );
        registry.register_with_unit(
            "certificate_expiry_timestamp",
            "Expiry time of the hub's certificate and of its CA, in seconds since 1970",
            Unit::Seconds,
            self.certificates.clone(),
        );
        registry.register(
            "enrollments",
            "Enrollment attempts of agents, by outcome",
            self.enrollments.clone(),
        );
        registry.register_with_unit(
            "desired_propagation",
            "Time from a new desired state until an agent confirms it",
            Unit::Seconds,
            self.propagation.clone(),
        );
    }
}

/// Messages by sender.
const MESSAGES: [(&str, &[&str]); 2] = [
    (
        "agent",
        &[
            "hello",
            "report",
            "heartbeat",
            "applied",
            "trusted_roots",
            "unknown",
        ],
    ),
    ("hub", &["desired", "roots", "resync"]),
];

impl Default for SessionMetrics {
    fn default() -> Self {
        let (messages, enrollments) = (Family::default(), Family::default());
        for (sender, kinds) in MESSAGES {
            for kind in kinds {
                drop(messages.get_or_create(&[("sender", sender), ("kind", *kind)]));
            }
        }
        for outcome in EnrollmentOutcome::ALL {
            drop(enrollments.get_or_create(&[("outcome", outcome.name())]));
        }
        Self {
            port: PortMetrics::default(),
            sessions: Gauge::default(),
            throttled: Counter::default(),
            messages,
            reports: Counter::default(),
            propagation: Histogram::new(exponential_buckets(0.001, 1.5, 30)),
            certificates: Family::default(),
            enrollments,
        }
    }
}
