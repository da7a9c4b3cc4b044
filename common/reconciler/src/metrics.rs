//! Metrics of Helm, charts and reconcilers, summed over all members of a process.
//!
//! Hub and agent export them under their own prefixes. No label names a Tenant or a member, so the number of series
//! does not grow with the fleet. All series exist from the start, as a rate needs a zero to start from.

use std::time::Duration;

use krypton_helm::metrics::{ChartMetrics, Counters, Gauges, HelmMetrics, Histograms};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::{Registry, Unit};

use crate::plan::Action;

const RECONCILE_OUTCOMES: [&str; 4] = ["ok", "conflict", "transient", "failed"];
/// The queues in which Tenants and KryptonDeployments wait.
const QUEUES: [&str; 4] = ["lists", "calls", "urgent", "runs"];
/// The watches on a member: the reconciler's name and the value of the label.
const WATCHES: [(&str, &str); 7] = [
    ("CRD", "crd"),
    ("Secrets", "releases"),
    ("namespaces", "namespaces"),
    ("Deployments", "deployments"),
    ("StatefulSets", "statefulsets"),
    ("DaemonSets", "daemonsets"),
    ("Tenants", "tenants"),
];
/// Buckets for actions, in seconds. Most actions are one API request, some are a Helm run.
const ACTION_BUCKETS: [f64; 9] = [0.01, 0.05, 0.25, 1.0, 5.0, 30.0, 120.0, 300.0, 900.0];

/// Metrics of the reconcilers. Clones share their values.
#[derive(Clone, Debug)]
pub struct WorkMetrics {
    pub helm: HelmMetrics,
    pub charts: ChartMetrics,
    reconciles: Counters<2>,
    reconcile_duration: Histograms,
    waiting: Gauges<1>,
    leases: Gauge,
    watch_errors: Counters<1>,
    /// Events dropped because the queue was full.
    pub events_dropped: Counter,
}

impl Default for WorkMetrics {
    fn default() -> Self {
        let this = Self {
            helm: HelmMetrics::default(),
            charts: ChartMetrics::default(),
            reconciles: Family::default(),
            reconcile_duration: Family::new_with_constructor(|| Histogram::new(ACTION_BUCKETS)),
            waiting: Family::default(),
            leases: Gauge::default(),
            watch_errors: Family::default(),
            events_dropped: Counter::default(),
        };
        for action in Action::NAMES {
            drop(this.reconcile_duration.get_or_create(&[("action", action)]));
            for outcome in RECONCILE_OUTCOMES {
                let labels = [("action", action), ("outcome", outcome)];
                drop(this.reconciles.get_or_create(&labels));
            }
        }
        for queue in QUEUES {
            drop(this.waiting.get_or_create(&[("queue", queue)]));
        }
        for (_, resource) in WATCHES {
            drop(this.watch_errors.get_or_create(&[("resource", resource)]));
        }
        this
    }
}

/// Queue lengths of one reconciler in the order of [`QUEUES`], and whether it holds its Lease.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct QueueDepths {
    pub(crate) waiting: [usize; 4],
    pub(crate) writes: bool,
}

/// One reconciler's share of the sums. It is subtracted when the reconciler ends.
#[derive(Debug)]
pub(crate) struct ReconcilerShare {
    metrics: WorkMetrics,
    published: QueueDepths,
}

impl ReconcilerShare {
    pub(crate) fn publish(&mut self, current: QueueDepths) {
        let previous = std::mem::replace(&mut self.published, current);
        if previous == current {
            return;
        }
        for (queue, (previous, current)) in QUEUES
            .iter()
            .zip(previous.waiting.iter().zip(current.waiting))
        {
            let gauge = self.metrics.waiting.get_or_create(&[("queue", *queue)]);
            gauge.inc_by(number(current) - number(*previous));
        }
        let leases = i64::from(current.writes) - i64::from(previous.writes);
        self.metrics.leases.inc_by(leases);
    }
}

impl Drop for ReconcilerShare {
    fn drop(&mut self) {
        self.publish(QueueDepths::default());
    }
}

fn number(count: usize) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}

impl WorkMetrics {
    /// Returns the share of a new reconciler.
    pub(crate) fn new_share(&self) -> ReconcilerShare {
        ReconcilerShare {
            metrics: self.clone(),
            published: QueueDepths::default(),
        }
    }

    /// Counts a finished action. The outcome is `ok`, `conflict`, `transient` or `failed`.
    pub(crate) fn record_action(&self, action: &Action, duration: Duration, outcome: &'static str) {
        let action = action.name();
        let labels = [("action", action), ("outcome", outcome)];
        self.reconciles.get_or_create(&labels).inc();
        let histogram = self.reconcile_duration.get_or_create(&[("action", action)]);
        histogram.observe(duration.as_secs_f64());
    }

    /// Returns the queue lengths, summed over all reconcilers.
    pub fn waiting(&self) -> [(&'static str, i64); 4] {
        QUEUES.map(|queue| (queue, self.waiting.get_or_create(&[("queue", queue)]).get()))
    }

    /// Counts a failed watch. `watch` is the reconciler's name for it.
    pub(crate) fn record_watch_failure(&self, watch: &str) {
        if let Some((_, resource)) = WATCHES.iter().find(|(name, _)| *name == watch) {
            self.watch_errors
                .get_or_create(&[("resource", *resource)])
                .inc();
        }
    }

    /// Registers all metrics and the version of the build.
    pub fn register(&self, registry: &mut Registry) {
        let build = Info::new([("version", env!("CARGO_PKG_VERSION"))]);
        registry.register("build", "Version of the running build", build);
        self.helm.register(registry);
        self.charts.register(registry);
        registry.register(
            "reconciles",
            "Completed actions on Tenants and KryptonDeployments. The outcome conflict means that the object had changed, \
             transient that the API server did not accept the request",
            self.reconciles.clone(),
        );
        registry.register_with_unit(
            "reconcile_duration",
            "Duration of actions, without the wait for a Helm slot",
            Unit::Seconds,
            self.reconcile_duration.clone(),
        );
        registry.register(
            "releases_waiting",
            "Tenants and KryptonDeployments that wait for a reconcile, by queue",
            self.waiting.clone(),
        );
        registry.register(
            "leases_held",
            "Members whose Lease this process holds",
            self.leases.clone(),
        );
        registry.register(
            "watch_errors",
            "Failures of watches on members",
            self.watch_errors.clone(),
        );
        registry.register(
            "events_dropped",
            "Kubernetes events that were dropped because the queue was full",
            self.events_dropped.clone(),
        );
    }
}

#[cfg(test)]
mod tests {
    use prometheus_client::encoding::text::encode;

    use super::*;

    fn rendered(metrics: &WorkMetrics) -> String {
        let mut registry = Registry::with_prefix("krypton_test");
        metrics.register(&mut registry);
        let mut text = String::new();
        encode(&mut text, &registry).unwrap();
        text
    }

    fn assert_has_lines(text: &str, lines: &[&str]) {
        for line in lines {
            let line = format!("krypton_test_{line}");
            assert!(text.lines().any(|other| other == line), "{line}: {text}");
        }
    }

    #[test]
    fn all_series_exist_at_zero_and_count_events() {
        let metrics = WorkMetrics::default();
        let before = rendered(&metrics);
        let lines = [
            r#"helm_runs_total{verb="install",outcome="failed"} 0"#,
            r#"reconciles_total{action="status",outcome="ok"} 0"#,
            r#"chart_fetches_total{source="hub",outcome="ok"} 0"#,
            r#"watch_errors_total{resource="tenants"} 0"#,
        ];
        assert_has_lines(&before, &lines);
        let duration = Duration::from_secs(7);
        metrics.helm.record_run("install", duration, "stopped");
        metrics.helm.record_run("get", duration, "not_started");
        metrics.record_action(&Action::Uninstall, duration, "transient");
        for (name, _) in WATCHES {
            metrics.record_watch_failure(name);
        }
        let after = rendered(&metrics);
        let lines = [
            r#"helm_runs_total{verb="install",outcome="stopped"} 1"#,
            r#"helm_run_duration_seconds_sum{verb="install"} 7.0"#,
            r#"helm_runs_total{verb="get",outcome="not_started"} 1"#,
            r#"helm_run_duration_seconds_count{verb="get"} 0"#,
            r#"reconciles_total{action="uninstall",outcome="transient"} 1"#,
            r#"watch_errors_total{resource="releases"} 1"#,
        ];
        assert_has_lines(&after, &lines);
        let series = |text: &str| text.lines().filter(|line| !line.starts_with('#')).count();
        assert_eq!(series(&before), series(&after), "none is new");
    }

    #[test]
    fn waiting_counts_are_summed_and_removed_with_reconcilers() {
        let metrics = WorkMetrics::default();
        let (mut one, mut two) = (metrics.new_share(), metrics.new_share());
        let depths = |lists, runs| QueueDepths {
            waiting: [lists, 0, 0, runs],
            writes: true,
        };
        one.publish(depths(3, 1));
        two.publish(depths(0, 4));
        one.publish(depths(1, 2));
        let waiting = [
            r#"releases_waiting{queue="lists"} 1"#,
            r#"releases_waiting{queue="runs"} 6"#,
            "leases_held 2",
        ];
        assert_has_lines(&rendered(&metrics), &waiting);
        drop(one);
        let waiting = [r#"releases_waiting{queue="runs"} 4"#, "leases_held 1"];
        assert_has_lines(&rendered(&metrics), &waiting);
    }
}
