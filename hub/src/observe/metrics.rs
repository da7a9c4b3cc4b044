//! The hub's Prometheus metrics.

use std::sync::Arc;

use krypton_reconciler::drift::DriftMetrics;
use krypton_reconciler::metrics::WorkMetrics;
use krypton_runtime::clock;
use krypton_runtime::metrics::ProcessMetrics;
use prometheus_client::registry::Registry;

use crate::observe::member_metrics::FleetView;

/// Prefix of all metrics except the process metrics.
pub const PREFIX: &str = "krypton_hub";

/// Registers all metrics under [`PREFIX`], and the process metrics with the current time as start time.
pub fn registry(fleet: Arc<FleetView>, drift: &DriftMetrics, work: &WorkMetrics) -> Registry {
    let mut root = Registry::default();
    root.register_collector(Box::new(ProcessMetrics::starting(clock::wall())));
    let registry = root.sub_registry_with_prefix(PREFIX);
    work.register(registry);
    drift.register(registry);
    registry.register(
        "home_writes",
        "Completed writes of EdgeClusters, Tenants and KryptonDeployments on the home cluster. The outcome conflict means \
         that another writer was faster",
        fleet.reports.writes.0.clone(),
    );
    registry.register(
        "notifications",
        "Notifications, by outcome. The hub retries failed ones. With dropped, too many changes waited",
        fleet.notifications.0.clone(),
    );
    let sessions = Arc::clone(&fleet.sessions);
    registry.register_collector(Box::new(fleet));
    sessions.register(registry);
    root
}
