//! Computes the fleet's chart from flags, the resolved version and all sources of values, and publishes each change.

use std::sync::Arc;

use krypton_helm::chart::ChartRef;
use krypton_runtime::admin::Readiness;
use krypton_runtime::clock::BootTime;
use krypton_runtime::newest::{Newest as _, NewestSeen as _};
use krypton_runtime::watchdog::Watchdog;
use krypton_types::desired::ChartState;
use kube::Client;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::parts::Engine;
use crate::args::Settings;
use crate::chart::values::{self, ValuesProblem, ValuesReadings};
use crate::chart::values_file;
use crate::chart::values_status::ValuesStatus;
use crate::chart::version_pin::{ChartPin, PinnedVersion, ResolvedVersion};
use crate::chart::{self, credentials};
use crate::edgecluster::FleetChart;
use crate::leader::Leader;

pub(super) type ChartValues = serde_json::Map<String, serde_json::Value>;

pub(super) async fn read_values_file(settings: &Settings) -> anyhow::Result<ChartValues> {
    Ok(match &settings.chart_values_file {
        Some(path) => values_file::load(path).await?,
        None => ChartValues::new(),
    })
}

/// Resolves the version before members get any: they never get two versions in turn. Also returns what looks up the
/// range later; `None` for a version with a digest.
pub(super) async fn resolve_version(
    settings: &Settings,
    client: &Client,
    engine: &Engine,
    stop: &CancellationToken,
) -> (watch::Receiver<ResolvedVersion>, Option<PinnedVersion>) {
    let chart = &settings.chart;
    let verified = chart.keyring.is_some();
    let (sender, mut current) = watch::channel(ResolvedVersion::unread(&chart.version, verified));
    if !verified && chart.version.contains("@sha256:") {
        return (current, None);
    }
    let pin = ChartPin {
        client: client.clone(),
        namespace: settings.namespace.clone(),
        charts: Arc::clone(&engine.charts),
        chart: ChartRef {
            repo: chart.repo.clone(),
            name: chart.name.clone(),
            version: chart.version.clone(),
        },
        interval: chart.resolve_every,
        verified,
    };
    if chart.credentials_secret.is_some() {
        credentials::wait_for_first_read(engine.credentials.clone()).await;
    }
    let pinned = pin.start(sender, stop).await;
    current.mark_unchanged();
    (current, Some(pinned))
}

/// The fleet's chart, or why it is not as it should be.
fn build_chart(
    settings: &Settings,
    resolved: &ResolvedVersion,
    values: &ChartValues,
    readings: &ValuesReadings,
) -> Result<Arc<ChartState>, ValuesProblem> {
    let (version, pinned) = (&resolved.version, resolved.pinned.as_deref());
    let file = chart::chart_state(&settings.chart, version, pinned, values);
    values::for_fleet(file, &settings.chart_values_from, readings).map(Arc::new)
}

/// Follows everything that the fleet's chart depends on.
pub(super) struct ChartFollower {
    settings: Arc<Settings>,
    resolved: ResolvedVersion,
    version: watch::Receiver<ResolvedVersion>,
    values: watch::Receiver<ChartValues>,
    readings: watch::Receiver<Arc<ValuesReadings>>,
    fleet_chart: watch::Sender<FleetChart>,
    /// Start of the term that the status on home was last reported for.
    reported_term: Option<BootTime>,
    changed: bool,
}

impl ChartFollower {
    pub(super) fn new(
        settings: Arc<Settings>,
        version: watch::Receiver<ResolvedVersion>,
        values: ChartValues,
        readings: watch::Receiver<Arc<ValuesReadings>>,
        (readiness, watchdog): (&Readiness, &Watchdog),
    ) -> Self {
        let mut resolved = version.get();
        let chart = build_chart(&settings, &resolved, &values, &readings.get());
        let (fleet_chart, _) = watch::channel(FleetChart {
            epoch: 0,
            problem: chart.as_ref().err().cloned(),
            chart: chart.ok(),
        });
        let (values_tx, values) = watch::channel(values);
        if let Some(path) = settings.chart_values_file.clone() {
            let readiness = readiness.clone();
            let following = async move { values_file::follow(&path, values_tx, readiness).await };
            tokio::spawn(watchdog.watch("the values file", following));
        }
        // A record counts only if it was read in a term of this hub.
        resolved.read_in_term = None;
        Self {
            settings,
            resolved,
            version,
            values,
            readings,
            fleet_chart,
            reported_term: None,
            changed: false,
        }
    }

    /// The chart and epoch that members get.
    pub(super) fn fleet_chart(&self) -> &watch::Sender<FleetChart> {
        &self.fleet_chart
    }

    /// Gives the members the newest chart, and after it the epoch.
    pub(super) fn publish(&mut self, leader: &Leader, values_status: &mut ValuesStatus) {
        if std::mem::take(&mut self.changed) {
            let previous = std::mem::replace(&mut self.resolved, self.version.get_and_update());
            if previous.version != self.resolved.version {
                let version = &self.resolved.version;
                tracing::info!(%version, "resolved the range to another version");
            }
            let values = self.values.get_and_update();
            let readings = self.readings.get_and_update();
            let next = build_chart(&self.settings, &self.resolved, &values, &readings);
            publish_chart(&self.fleet_chart, next, values_status);
        }
        if let Some(epoch) = self.resolved.epoch(leader.leader_term().as_ref()) {
            self.fleet_chart
                .send_if_modified(|current| std::mem::replace(&mut current.epoch, epoch) != epoch);
        }
    }

    /// Waits for a change of the chart. A sender that is gone has no task, or one whose end is noticed elsewhere.
    pub(super) async fn changed(&mut self) {
        tokio::select! {
            Ok(()) = self.values.changed() => tracing::info!("the values file has changed"),
            Ok(()) = self.version.changed() => {}
            Ok(()) = self.readings.changed() => {}
            else => std::future::pending().await,
        }
        self.changed = true;
    }

    /// Reports the chart's status again in a new term.
    pub(super) fn leader_changed(&mut self, leader: &Leader, values_status: &mut ValuesStatus) {
        if let Some(leader_term) = leader.leader_term()
            && self.reported_term != Some(leader_term.since)
        {
            self.reported_term = Some(leader_term.since);
            values_status.report_again(self.fleet_chart.get().chart.is_some());
        }
    }
}

/// A new chart goes to every member. Without one, the last good chart stays.
fn publish_chart(
    fleet_chart: &watch::Sender<FleetChart>,
    next: Result<Arc<ChartState>, ValuesProblem>,
    values_status: &mut ValuesStatus,
) {
    let problem = next.as_ref().err().cloned();
    values_status.report(problem.as_ref(), fleet_chart.get().chart.is_some());
    fleet_chart.send_if_modified(|current| {
        let problem_changed = current.problem != problem;
        current.problem = problem;
        match next {
            Ok(chart) if current.chart.as_ref() != Some(&chart) => {
                tracing::info!("publishing a new desired state");
                current.chart = Some(chart);
                true
            }
            _ => problem_changed,
        }
    });
}
