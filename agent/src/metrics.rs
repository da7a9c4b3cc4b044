//! The agent's Prometheus metrics.

use std::fmt;
use std::sync::Arc;

use jiff::Timestamp;
use krypton_reconciler::drift::DriftMetrics;
use krypton_reconciler::metrics::WorkMetrics;
use krypton_reconciler::report_store::ReportStore;
use krypton_runtime::clock;
use krypton_runtime::metrics::{ProcessMetrics, gauge};
use krypton_runtime::newest::Newest as _;
use krypton_types::desired::DesiredState;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::{Registry, Unit};
use tokio::sync::watch;

use crate::session::Link;

/// Prefix of all metrics except the process metrics.
pub const PREFIX: &str = "krypton_agent";

/// State that each scrape reads directly, without a second copy.
#[derive(Debug)]
pub struct AgentMetrics {
    pub link: watch::Receiver<Link>,
    /// Expiry of the client certificate; 1970 before enrollment.
    pub expiry: watch::Receiver<Timestamp>,
    /// Newest known desired state, from the hub or from storage.
    pub desired: watch::Receiver<Option<Arc<DesiredState>>>,
    pub report_store: Arc<ReportStore>,
}

fn number(count: impl TryInto<i64>) -> i64 {
    count.try_into().unwrap_or(i64::MAX)
}

impl Collector for AgentMetrics {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let encoder = &mut encoder;
        let expiry = self.expiry.get();
        let desired = self.desired.get();
        let allow_chart_skip =
            (desired.as_ref()).is_some_and(|desired| desired.handling.allow_chart_skip);
        let phases = self.report_store.count_phases(allow_chart_skip);
        let up = i64::from(self.link.get().is_up());
        for (name, help, value) in [
            (
                "session_connected",
                "Whether the agent has a session with the hub.",
                up,
            ),
            (
                "tenants",
                "Known Tenants of this cluster.",
                number(self.report_store.tenant_count()),
            ),
            (
                "reports_unsent",
                "Tenants, KryptonDeployments and placed Tenants whose report the agent has not sent yet.",
                number(self.report_store.unsent_count()),
            ),
        ] {
            gauge(encoder, name, help, None, value)?;
        }
        if expiry != Timestamp::UNIX_EPOCH {
            let name = "certificate_expiry_timestamp";
            let help = "Expiry time of the client certificate, in seconds since 1970. Absent before enrollment.";
            let unit = Some(&Unit::Seconds);
            gauge(encoder, name, help, unit, expiry.as_second())?;
        }
        let kind = ConstGauge::new(0_i64).metric_type();
        let (name, help) = (
            "tenants_by_phase",
            "Known Tenants of this cluster, by phase.",
        );
        let mut family = encoder.encode_descriptor(name, help, None, kind)?;
        for (phase, count) in ["ready", "pending", "error"].into_iter().zip(phases) {
            let labels = [("phase", phase)];
            ConstGauge::new(number(count)).encode(family.encode_family(&labels)?)?;
        }
        let Some(desired) = desired else {
            return Ok(());
        };
        let is_acted_on = self.report_store.applied_version();
        let is_acted_on = is_acted_on.is_some_and(|(version, _)| version == desired.version);
        for (name, help, value) in [
            (
                "desired_state_epoch",
                "Epoch of the latest known desired state. Absent without a desired state.",
                number(desired.version.epoch),
            ),
            (
                "desired_state_generation",
                "Generation of the latest known desired state within its epoch. Absent without a desired state.",
                number(desired.version.generation),
            ),
            (
                "desired_state_acted_on",
                "Whether the latest known desired state is recorded on this cluster and acted on.",
                i64::from(is_acted_on),
            ),
        ] {
            gauge(encoder, name, help, None, value)?;
        }
        Ok(())
    }
}

/// Registers all metrics: the agent's under [`PREFIX`], and the process metrics, with the current time as start time.
pub fn registry(state: AgentMetrics, drift: &DriftMetrics, work: &WorkMetrics) -> Registry {
    let mut root = Registry::default();
    root.register_collector(Box::new(ProcessMetrics::starting(clock::wall())));
    let registry = root.sub_registry_with_prefix(PREFIX);
    work.register(registry);
    drift.register(registry);
    registry.register_collector(Box::new(state));
    root
}

#[cfg(test)]
mod tests {
    use krypton_types::desired::Version;
    use prometheus_client::encoding::text::encode;

    use super::*;

    #[test]
    fn expiry_metric_is_absent_before_enrollment() {
        let (expiry_tx, expiry) = watch::channel(Timestamp::UNIX_EPOCH);
        let (desired_tx, desired) = watch::channel(None);
        let state = AgentMetrics {
            link: watch::channel(Link::default()).1,
            expiry,
            desired,
            report_store: Arc::default(),
        };
        let registry = registry(state, &DriftMetrics::default(), &WorkMetrics::default());
        let scrape = || {
            let mut text = String::new();
            encode(&mut text, &registry).unwrap();
            text
        };
        let before = scrape();
        assert!(
            before.contains("\nkrypton_agent_session_connected 0\n"),
            "{before}"
        );
        assert!(
            !before.contains("\nkrypton_agent_certificate_expiry_timestamp"),
            "{before}"
        );
        assert!(
            !before.contains("\nkrypton_agent_desired_state_"),
            "{before}"
        );
        expiry_tx.send_replace(Timestamp::from_second(7000).unwrap());
        let (epoch, generation) = (1, 3);
        let desired_state = DesiredState {
            version: Version { epoch, generation },
            ..DesiredState::default()
        };
        desired_tx.send_replace(Some(Arc::new(desired_state)));
        let after = scrape();
        for line in [
            "krypton_agent_certificate_expiry_timestamp_seconds 7000",
            "krypton_agent_desired_state_generation 3",
            "krypton_agent_desired_state_acted_on 0",
            "krypton_agent_tenants_by_phase{phase=\"error\"} 0",
        ] {
            assert!(
                after.lines().any(|scraped| scraped == line),
                "{line}: {after}"
            );
        }
    }
}
