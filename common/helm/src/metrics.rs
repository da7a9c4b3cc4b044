//! Metrics of Helm and charts, for all members of a process together. All series exist from the start,
//! because a rate needs an initial zero.

use std::time::Duration;

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};

use crate::chart::{ChartError, ChartFault};
use crate::driver::HelmError;
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
    "repeat",
    "rollback",
    "uninstall",
    "look",
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
    here: Gauge,
}

impl Default for HelmMetrics {
    fn default() -> Self {
        let this = Self {
            runs: Family::default(),
            run_duration: Family::new_with_constructor(|| Histogram::new(RUN_BUCKETS)),
            wait_duration: Family::new_with_constructor(|| Histogram::new(WAIT_BUCKETS)),
            in_flight: Gauge::default(),
            limit: Gauge::default(),
            waiting: Family::default(),
        };
        for verb in HELM_VERBS {
            drop(this.run_duration.get_or_create(&[("verb", verb)]));
            for outcome in HELM_OUTCOMES {
                let labels = [("verb", verb), ("outcome", outcome)];
                drop(this.runs.get_or_create(&labels));
            }
        }
        for urgency in [Priority::High, Priority::Low].map(Priority::name) {
            drop(this.wait_duration.get_or_create(&[("urgency", urgency)]));
            drop(this.waiting.get_or_create(&[("urgency", urgency)]));
        }
        this
    }
}

impl Default for ChartMetrics {
    fn default() -> Self {
        let this = Self {
            fetches: Family::default(),
            fetch_duration: Family::new_with_constructor(|| Histogram::new(FETCH_BUCKETS)),
            hits: Counter::default(),
            here: Gauge::default(),
        };
        for from in CHART_SOURCES {
            drop(this.fetch_duration.get_or_create(&[("from", from)]));
            for outcome in CHART_OUTCOMES {
                let labels = [("from", from), ("outcome", outcome)];
                drop(this.fetches.get_or_create(&labels));
            }
        }
        this
    }
}

/// Increments a gauge until it is dropped.
#[derive(Debug)]
pub(crate) struct Counted(Gauge);

impl Counted {
    fn by(gauge: &Gauge) -> Self {
        gauge.inc();
        Self(gauge.clone())
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.dec();
    }
}

impl HelmMetrics {
    /// Records a run with its duration in its slot. Returns the value of the `outcome` label.
    pub fn ran(
        &self,
        verb: &'static str,
        took: Duration,
        error: Option<&HelmError>,
    ) -> &'static str {
        let outcome = error.map_or("ok", HelmError::outcome);
        let labels = [("verb", verb), ("outcome", outcome)];
        self.runs.get_or_create(&labels).inc();
        if outcome != "not_started" {
            let duration = self.run_duration.get_or_create(&[("verb", verb)]);
            duration.observe(took.as_secs_f64());
        }
        outcome
    }

    /// Counts a waiting run until the result is dropped.
    pub(crate) fn waits(&self, urgency: Priority) -> Counted {
        let waiting = self.waiting.get_or_create(&[("urgency", urgency.name())]);
        Counted::by(&waiting)
    }

    pub(crate) fn waited(&self, urgency: Priority, for_: Duration) {
        let wait = self
            .wait_duration
            .get_or_create(&[("urgency", urgency.name())]);
        wait.observe(for_.as_secs_f64());
    }

    /// Registers all metrics in `registry`.
    pub fn register(&self, registry: &mut Registry) {
        registry.register(
            "helm_runs",
            "Runs of helm that have ended",
            self.runs.clone(),
        );
        registry.register_with_unit(
            "helm_run_duration",
            "From the right to run helm to its end",
            Unit::Seconds,
            self.run_duration.clone(),
        );
        registry.register_with_unit(
            "helm_wait_duration",
            "Waiting for the right to run helm",
            Unit::Seconds,
            self.wait_duration.clone(),
        );
        registry.register(
            "helm_runs_in_flight",
            "Rights to run helm that are taken",
            self.in_flight.clone(),
        );
        registry.register(
            "helm_runs_limit",
            "How many helm processes may live at once",
            self.limit.clone(),
        );
        registry.register(
            "helm_waiting",
            "Tenants and deployments that wait for the right to run helm",
            self.waiting.clone(),
        );
    }
}

impl ChartMetrics {
    /// Records a fetch from the `repository` or the `hub`. Returns the value of the `outcome` label.
    pub(crate) fn fetched(
        &self,
        from: &'static str,
        took: Duration,
        error: Option<&ChartError>,
    ) -> &'static str {
        let outcome = match error.map(ChartError::fault) {
            None => "ok",
            Some(ChartFault::NotLoaded) => "not_loaded",
            Some(ChartFault::VersionNotFound) => "version_not_found",
            Some(ChartFault::VersionInvalid) => "version_invalid",
        };
        let labels = [("from", from), ("outcome", outcome)];
        self.fetches.get_or_create(&labels).inc();
        let duration = self.fetch_duration.get_or_create(&[("from", from)]);
        duration.observe(took.as_secs_f64());
        outcome
    }

    /// Registers all metrics in `registry`.
    pub fn register(&self, registry: &mut Registry) {
        registry.register(
            "chart_fetches",
            "Fetches of a chart that have ended",
            self.fetches.clone(),
        );
        registry.register_with_unit(
            "chart_fetch_duration",
            "From asking for a chart to having it checked and stored",
            Unit::Seconds,
            self.fetch_duration.clone(),
        );
        registry.register(
            "chart_cache_hits",
            "Charts that were asked for and were here",
            self.hits.clone(),
        );
        registry.register(
            "chart_cache_charts",
            "Charts that are here",
            self.here.clone(),
        );
    }

    /// Counts a cached chart until the result is dropped.
    pub(crate) fn keeps(&self) -> Counted {
        Counted::by(&self.here)
    }
}
