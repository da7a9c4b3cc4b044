//! Metrics of Helm and charts, for all members of a process together. All series exist from the start,
//! because a rate needs an initial zero.

use std::time::Duration;

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};

use crate::slots::priority::Priority;

/// Labels with static values, which limits the number of series.
pub(crate) type Labels<const N: usize> = [(&'static str, &'static str); N];
pub type Counters<const N: usize> = Family<Labels<N>, Counter>;
pub type Gauges<const N: usize> = Family<Labels<N>, Gauge>;
pub type Histograms = Family<Labels<1>, Histogram, fn() -> Histogram>;

/// Values of the `verb` label.
pub const HELM_VERBS: [&str; 6] = [
    "install",
    "upgrade",
    "reinstall",
    "rollback",
    "uninstall",
    "get",
];
/// Values of the `outcome` label of Helm runs.
pub const HELM_OUTCOMES: [&str; 8] = [
    "ok",
    "failed",
    "timed_out",
    "stopped",
    "killed",
    "not_started",
    "suspended",
    "not_found",
];
const CHART_SOURCES: [&str; 2] = ["repository", "hub"];
const CHART_OUTCOMES: [&str; 4] = ["ok", "not_loaded", "version_not_found", "version_invalid"];

/// Buckets of Helm runs in seconds: from a run without changes to one that uses up all its timeouts.
const RUN_BUCKETS: [f64; 11] = [
    1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 180.0, 300.0, 600.0, 900.0,
];
const WAIT_BUCKETS: [f64; 8] = [0.01, 0.1, 1.0, 5.0, 30.0, 60.0, 300.0, 900.0];
const FETCH_BUCKETS: [f64; 7] = [0.05, 0.25, 1.0, 2.5, 10.0, 30.0, 60.0];

/// Metrics of the Helm driver.
#[derive(Clone, Debug)]
pub struct HelmMetrics {
    runs: Counters<2>,
    run_duration: Histograms,
    wait_duration: Histograms,
    /// Number of Helm slots in use, set by the slots.
    pub(crate) in_flight: Gauge,
    pub(crate) limit: Gauge,
    waiting: Gauges<1>,
}

/// Metrics of the chart cache.
#[derive(Clone, Debug)]
pub struct ChartMetrics {
    fetches: Counters<2>,
    fetch_duration: Histograms,
    pub(crate) hits: Counter,
    cached: Gauge,
}

impl Default for HelmMetrics {
    fn default() -> Self {
        let metrics = Self {
            runs: Family::default(),
            run_duration: Family::new_with_constructor(|| Histogram::new(RUN_BUCKETS)),
            wait_duration: Family::new_with_constructor(|| Histogram::new(WAIT_BUCKETS)),
            in_flight: Gauge::default(),
            limit: Gauge::default(),
            waiting: Family::default(),
        };
        for verb in HELM_VERBS {
            drop(metrics.run_duration.get_or_create(&[("verb", verb)]));
            for outcome in HELM_OUTCOMES {
                let labels = [("verb", verb), ("outcome", outcome)];
                drop(metrics.runs.get_or_create(&labels));
            }
        }
        for priority in [Priority::High, Priority::Low].map(Priority::name) {
            drop(
                metrics
                    .wait_duration
                    .get_or_create(&[("priority", priority)]),
            );
            drop(metrics.waiting.get_or_create(&[("priority", priority)]));
        }
        metrics
    }
}

impl Default for ChartMetrics {
    fn default() -> Self {
        let metrics = Self {
            fetches: Family::default(),
            fetch_duration: Family::new_with_constructor(|| Histogram::new(FETCH_BUCKETS)),
            hits: Counter::default(),
            cached: Gauge::default(),
        };
        for source in CHART_SOURCES {
            drop(metrics.fetch_duration.get_or_create(&[("source", source)]));
            for outcome in CHART_OUTCOMES {
                let labels = [("source", source), ("outcome", outcome)];
                drop(metrics.fetches.get_or_create(&labels));
            }
        }
        metrics
    }
}

/// Increments a gauge until it is dropped.
#[derive(Debug)]
pub(crate) struct GaugeGuard(Gauge);

impl GaugeGuard {
    fn new(gauge: &Gauge) -> Self {
        gauge.inc();
        Self(gauge.clone())
    }
}

impl Drop for GaugeGuard {
    fn drop(&mut self) {
        self.0.dec();
    }
}

impl HelmMetrics {
    /// Records a run with its duration in its slot.
    pub fn record_run(&self, verb: &'static str, duration: Duration, outcome: &'static str) {
        let labels = [("verb", verb), ("outcome", outcome)];
        self.runs.get_or_create(&labels).inc();
        if outcome != "not_started" {
            let histogram = self.run_duration.get_or_create(&[("verb", verb)]);
            histogram.observe(duration.as_secs_f64());
        }
    }

    /// Counts a waiting run until the result is dropped.
    pub(crate) fn count_waiting(&self, priority: Priority) -> GaugeGuard {
        let waiting = self.waiting.get_or_create(&[("priority", priority.name())]);
        GaugeGuard::new(&waiting)
    }

    pub(crate) fn record_wait(&self, priority: Priority, waited: Duration) {
        let histogram = self
            .wait_duration
            .get_or_create(&[("priority", priority.name())]);
        histogram.observe(waited.as_secs_f64());
    }

    /// Registers all metrics in `registry`.
    pub fn register(&self, registry: &mut Registry) {
        registry.register("helm_runs", "Completed Helm runs", self.runs.clone());
        registry.register_with_unit(
            "helm_run_duration",
            "Duration of Helm runs, from the slot to the end",
            Unit::Seconds,
            self.run_duration.clone(),
        );
        registry.register_with_unit(
            "helm_wait_duration",
            "Time that a Helm run waited for a slot",
            Unit::Seconds,
            self.wait_duration.clone(),
        );
        registry.register(
            "helm_runs_in_flight",
            "Helm slots in use",
            self.in_flight.clone(),
        );
        registry.register(
            "helm_runs_limit",
            "Number of Helm slots",
            self.limit.clone(),
        );
        registry.register(
            "helm_waiting",
            "Tenants and KryptonDeployments that wait for a Helm slot",
            self.waiting.clone(),
        );
    }
}

impl ChartMetrics {
    /// Records a fetch from the `repository` or the `hub`.
    pub(crate) fn record_fetch(
        &self,
        source: &'static str,
        duration: Duration,
        outcome: &'static str,
    ) {
        let labels = [("source", source), ("outcome", outcome)];
        self.fetches.get_or_create(&labels).inc();
        let histogram = self.fetch_duration.get_or_create(&[("source", source)]);
        histogram.observe(duration.as_secs_f64());
    }

    /// Registers all metrics in `registry`.
    pub fn register(&self, registry: &mut Registry) {
        registry.register(
            "chart_fetches",
            "Completed chart fetches",
            self.fetches.clone(),
        );
        registry.register_with_unit(
            "chart_fetch_duration",
            "Time from the request for a chart until it is verified and stored",
            Unit::Seconds,
            self.fetch_duration.clone(),
        );
        registry.register(
            "chart_cache_hits",
            "Requests for a chart that the cache answered",
            self.hits.clone(),
        );
        registry.register(
            "chart_cache_charts",
            "Charts in the cache",
            self.cached.clone(),
        );
    }

    /// Counts a cached chart until the result is dropped.
    pub(crate) fn count_cached(&self) -> GaugeGuard {
        GaugeGuard::new(&self.cached)
    }
}
