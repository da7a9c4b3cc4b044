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
const WAITS: [&str; 4] = ["lists", "calls", "urgent", "runs"];
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
        for wait in WAITS {
            drop(this.waiting.get_or_create(&[("queue", wait)]));
        }
        for (_, what) in WATCHES {
            drop(this.watch_errors.get_or_create(&[("resource", what)]));
        }
        this
    }
}

/// Queue lengths of one reconciler in the order of [`WAITS`], and whether it holds its Lease.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Depths {
    pub(crate) waiting: [usize; 4],
    pub(crate) writes: bool,
}

/// One reconciler's part of the sums. It is subtracted when the reconciler ends.
#[derive(Debug)]
pub(crate) struct Part {
    of: WorkMetrics,
    told: Depths,
}

impl Part {
    pub(crate) fn tell(&mut self, now: Depths) {
        let before = std::mem::replace(&mut self.told, now);
        if before == now {
            return;
        }
        for (wait, (before, now)) in WAITS.iter().zip(before.waiting.iter().zip(now.waiting)) {
            let gauge = self.of.waiting.get_or_create(&[("queue", *wait)]);
            gauge.inc_by(number(now) - number(*before));
        }
        let leases = i64::from(now.writes) - i64::from(before.writes);
        self.of.leases.inc_by(leases);
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        self.tell(Depths::default());
    }
}

fn number(count: usize) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}

impl WorkMetrics {
    /// Returns the part of a new reconciler.
    pub(crate) fn part(&self) -> Part {
        Part {
            of: self.clone(),
            told: Depths::default(),
        }
    }

    /// Counts a finished action. The outcome is `ok`, `conflict`, `transient` or `failed`.
    pub(crate) fn reconciled(&self, action: &Action, took: Duration, outcome: &'static str) {
        let action = action.name();
        let labels = [("action", action), ("outcome", outcome)];
        self.reconciles.get_or_create(&labels).inc();
        let duration = self.reconcile_duration.get_or_create(&[("action", action)]);
        duration.observe(took.as_secs_f64());
    }

    /// Returns the queue lengths, summed over all reconcilers.
    pub fn waiting(&self) -> [(&'static str, i64); 4] {
        WAITS.map(|wait| (wait, self.waiting.get_or_create(&[("queue", wait)]).get()))
    }

    /// Counts a failed watch. `what` is the reconciler's name for it.
    pub(crate) fn watch_failed(&self, what: &str) {
        if let Some((_, what)) = WATCHES.iter().find(|(called, _)| *called == what) {
            self.watch_errors
                .get_or_create(&[("resource", *what)])
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
    use krypton_helm::driver::HelmError;

    fn rendered(metrics: &WorkMetrics) -> String {
        let mut registry = Registry::with_prefix("krypton_test");
        metrics.register(&mut registry);
        let mut text = String::new();
        encode(&mut text, &registry).unwrap();
        text
    }

    fn has(text: &str, line: &str) {
        let line = format!("krypton_test_{line}");
        assert!(text.lines().any(|found| found == line), "{line}: {text}");
    }

    #[test]
    fn all_series_exist_at_zero_and_count_events() {
        let metrics = WorkMetrics::default();
        let before = rendered(&metrics);
        has(
            &before,
            r#"helm_runs_total{verb="install",outcome="failed"} 0"#,
        );
        has(
            &before,
            r#"reconciles_total{action="status",outcome="ok"} 0"#,
        );
        has(
            &before,
            r#"chart_fetches_total{source="hub",outcome="ok"} 0"#,
        );
        has(&before, r#"watch_errors_total{resource="tenants"} 0"#);
        let took = Duration::from_secs(7);
        metrics.helm.ran("install", took, Some(&HelmError::Stopped));
        let not_started = HelmError::Start {
            release: String::new(),
            complaint: String::new(),
        };
        metrics.helm.ran("get", took, Some(&not_started));
        metrics.reconciled(&Action::Uninstall, took, "transient");
        for (called, _) in WATCHES {
            metrics.watch_failed(called);
        }
        let after = rendered(&metrics);
        has(
            &after,
            r#"helm_runs_total{verb="install",outcome="stopped"} 1"#,
        );
        has(
            &after,
            r#"helm_run_duration_seconds_sum{verb="install"} 7.0"#,
        );
        has(
            &after,
            r#"helm_runs_total{verb="get",outcome="not_started"} 1"#,
        );
        has(&after, r#"helm_run_duration_seconds_count{verb="get"} 0"#);
        has(
            &after,
            r#"reconciles_total{action="uninstall",outcome="transient"} 1"#,
        );
        has(&after, r#"watch_errors_total{resource="releases"} 1"#);
        let series = |text: &str| text.lines().filter(|line| !line.starts_with('#')).count();
        assert_eq!(series(&before), series(&after), "none is new");
    }

    #[test]
    fn waiting_counts_are_summed_and_removed_with_reconcilers() {
        let metrics = WorkMetrics::default();
        let (mut one, mut two) = (metrics.part(), metrics.part());
        let depths = |lists, runs| Depths {
            waiting: [lists, 0, 0, runs],
            writes: true,
        };
        one.tell(depths(3, 1));
        two.tell(depths(0, 4));
        one.tell(depths(1, 2));
        let text = rendered(&metrics);
        has(&text, r#"releases_waiting{queue="lists"} 1"#);
        has(&text, r#"releases_waiting{queue="runs"} 6"#);
        has(&text, "leases_held 2");
        drop(one);
        let text = rendered(&metrics);
        has(&text, r#"releases_waiting{queue="runs"} 4"#);
        has(&text, "leases_held 1");
    }
}
