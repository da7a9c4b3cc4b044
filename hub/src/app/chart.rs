//! Keeps the fleet's chart as flags, version, values file, ConfigMaps and Secrets have it, and gives it to the members.

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
use crate::chart::values::{self, Problem, Readings};
use crate::chart::values_file;
use crate::chart::values_status::Teller;
use crate::chart::version_pin::{ChartPin, Kept, Meaning};
use crate::chart::{self, credentials};
use crate::edgecluster::FleetChart;
use crate::leader::Leader;

pub(super) type Values = serde_json::Map<String, serde_json::Value>;

pub(super) async fn values_of_file(settings: &Settings) -> anyhow::Result<Values> {
    Ok(match &settings.chart_values_file {
        Some(path) => values_file::load(path).await?,
        None => Values::new(),
    })
}

/// The version of the chart, which may follow a range.
pub(super) struct Version {
    pub(super) now: watch::Receiver<Meaning>,
    /// Looks up the range; `None` for a version with a digest.
    pub(super) pinned: Option<Kept>,
    /// Keeps the channel open as long as the hub runs.
    _sender: watch::Sender<Meaning>,
}

impl Version {
    /// Looks the version up before members get any: they never see two meanings in turn.
    pub(super) async fn look_up(
        settings: &Settings,
        client: &Client,
        engine: &Engine,
        stop: &CancellationToken,
    ) -> Self {
        let chart = &settings.chart;
        let proven = chart.keyring.is_some();
        let by_digest = !proven && chart.version.contains("@sha256:");
        let (sender, mut now) = watch::channel(Meaning::unread(&chart.version, proven));
        let mut pinned = None;
        if !by_digest {
            let pin = ChartPin {
                client: client.clone(),
                namespace: settings.namespace.clone(),
                charts: Arc::clone(&engine.charts),
                chart: ChartRef {
                    repo: chart.repo.clone(),
                    name: chart.name.clone(),
                    version: chart.version.clone(),
                },
                every: chart.resolve_every,
                proven,
            };
            if chart.credentials_secret.is_some() {
                credentials::first(engine.credentials.clone()).await;
            }
            pinned = Some(pin.begin(sender.clone(), stop).await);
            now.mark_unchanged();
        }
        Self {
            now,
            pinned,
            _sender: sender,
        }
    }
}

/// The fleet's chart, or why it is not as it should be.
fn fleet_chart(
    settings: &Settings,
    meaning: &Meaning,
    values: &Values,
    readings: &Readings,
) -> Result<Arc<ChartState>, Problem> {
    let (version, pinned) = (&meaning.version, meaning.pinned.as_deref());
    let file = chart::chart_state(&settings.chart, version, pinned, values);
    values::fleet(file, &settings.chart_values_from, readings).map(Arc::new)
}

/// Follows everything that the fleet's chart depends on.
pub(super) struct ChartFollower {
    settings: Arc<Settings>,
    meaning: Meaning,
    version: watch::Receiver<Meaning>,
    values: watch::Receiver<Values>,
    readings: watch::Receiver<Arc<Readings>>,
    given: watch::Sender<FleetChart>,
    /// Start of the term that the status on home was last reported for.
    led: Option<BootTime>,
    changed: bool,
}

impl ChartFollower {
    pub(super) fn new(
        settings: Arc<Settings>,
        version: &Version,
        values: Values,
        readings: watch::Receiver<Arc<Readings>>,
        (readiness, watchdog): (&Readiness, &Watchdog),
    ) -> Self {
        let mut meaning = version.now.get();
        let first = fleet_chart(&settings, &meaning, &values, &readings.get());
        let (given, _) = watch::channel(FleetChart {
            epoch: 0,
            problem: first.as_ref().err().cloned(),
            chart: first.ok(),
        });
        let (values_tx, values) = watch::channel(values);
        if let Some(path) = settings.chart_values_file.clone() {
            let readiness = readiness.clone();
            let following = async move { values_file::follow(&path, values_tx, readiness).await };
            tokio::spawn(watchdog.watch("the values file", following));
        }
        // A record counts only if it was read in a term of this hub.
        meaning.under = None;
        Self {
            settings,
            meaning,
            version: version.now.clone(),
            values,
            readings,
            given,
            led: None,
            changed: false,
        }
    }

    /// The chart and epoch that members get.
    pub(super) fn given(&self) -> &watch::Sender<FleetChart> {
        &self.given
    }

    /// Gives the members the newest chart, and after it the epoch.
    pub(super) fn give(&mut self, lead: &Leader, teller: &mut Teller) {
        if std::mem::take(&mut self.changed) {
            let before = std::mem::replace(&mut self.meaning, self.version.see());
            if before.version != self.meaning.version {
                let version = &self.meaning.version;
                tracing::info!(%version, "the range means another version; every member gets it");
            }
            let values = self.values.see();
            let readings = self.readings.see();
            let next = fleet_chart(&self.settings, &self.meaning, &values, &readings);
            put(&self.given, next, teller);
        }
        if let Some(epoch) = self.meaning.epoch(lead.leader_term().as_ref()) {
            self.given
                .send_if_modified(|given| std::mem::replace(&mut given.epoch, epoch) != epoch);
        }
    }

    /// Waits for a change of the chart. A sender that is gone went with its task, whose end is noticed elsewhere.
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
    pub(super) fn lead_changed(&mut self, lead: &Leader, teller: &mut Teller) {
        if let Some(leader_term) = lead.leader_term()
            && self.led != Some(leader_term.since)
        {
            self.led = Some(leader_term.since);
            teller.reset(self.given.get().chart.is_some());
        }
    }
}

/// A new chart goes to every member. Without one, the last good chart stays.
fn put(
    given: &watch::Sender<FleetChart>,
    next: Result<Arc<ChartState>, Problem>,
    teller: &mut Teller,
) {
    let problem = next.as_ref().err().cloned();
    teller.tell(problem.as_ref(), given.get().chart.is_some());
    given.send_if_modified(|given| {
        let changed = given.problem != problem;
        given.problem = problem;
        match next {
            Ok(chart) if given.chart.as_ref() != Some(&chart) => {
                tracing::info!("every member gets the new desired state");
                given.chart = Some(chart);
                true
            }
            _ => changed,
        }
    });
}
