//! `/debug/fleet.json`: this hub's current view of its fleet, for troubleshooting.
//!
//! Except for the number of Tenants, the dump has its own types, which list each exported field. It contains
//! no values, kubeconfigs, tokens, keys or Helm arguments. It omits the messages of conditions, which are in
//! the objects. A new field elsewhere appears in the dump only after a change here.

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::Router;
use axum::extract::RawQuery;
use axum::routing::get;
use jiff::Timestamp;
use krypton_crds::edge_cluster::TenantCounts;
use krypton_helm::chart::{CachedChartDump, ChartCache};
use krypton_helm::driver::Helm;
use krypton_helm::dump::{ChartDump, HelmDump};
use krypton_reconciler::metrics::WorkMetrics;
use krypton_reconciler::run_loop::ConditionDump;
use krypton_runtime::admin::json;
use krypton_runtime::clock::{self, BootTime};
use krypton_runtime::newest::Newest as _;
use krypton_types::root_digest::RootDigest;
use krypton_types::validity::Validity;
use serde::Serialize;

use crate::ca::Authority;
use crate::edgecluster::FleetChart;
use crate::leader::LeaderState;
use crate::members::member::MemberSnapshot;
use crate::members::observation::{MemberObservation, MemberValuesState};
use crate::observe::member_metrics::{FleetView, mode_name};

/// The dump. Timestamps use the wall clock, ages are whole seconds.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Dump {
    version: &'static str,
    replica: Option<String>,
    started: Timestamp,
    now: Timestamp,
    /// `None` until the home cluster has responded.
    leader: Option<LeaderDump>,
    chart: Option<FleetChartDump>,
    /// The CA that agents verify this hub with; `None` if the hub serves no agents.
    ca: Option<CaDump>,
    helm: HelmDump,
    /// Charts that this hub has fetched, for its proxies and for agents.
    charts: Vec<CachedChartDump>,
    /// Tenants and deployments that wait in this hub's proxies, by reason.
    waiting: BTreeMap<&'static str, i64>,
    members: BTreeMap<String, MemberDump>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct LeaderDump {
    /// standby, acquiring, leading, uncertain or leaving.
    state: &'static str,
    /// The Lease holder, as a standby sees it.
    holder: Option<String>,
    epoch: Option<u64>,
    acquired: Option<Timestamp>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct FleetChartDump {
    epoch: u64,
    /// Without user, password and query.
    repo: Option<String>,
    name: Option<String>,
    version: Option<String>,
    /// The reason why the chart is not the configured one.
    problem: Option<&'static str>,
}

#[derive(Debug, Serialize)]
struct CaDump {
    /// Phase of a rotation: Steady, Announced or Switched.
    phase: String,
    /// SHA-256 digests of the certificates, in hex. The signing root comes first.
    roots: Vec<String>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct MemberDump {
    mode: &'static str,
    conditions: BTreeMap<&'static str, ConditionDump>,
    cluster_uid: Option<String>,
    kubernetes_version: Option<String>,
    agent_version: Option<String>,
    lease_holder: Option<String>,
    certificate_expiry: Option<Timestamp>,
    access_expiry: Option<Timestamp>,
    applied: Option<DesiredDump>,
    tenants: TenantCounts,
    /// The hub's state for the member apart from its reports; `None` before the home cluster has shown its
    /// EdgeCluster.
    snapshot: Option<SnapshotDump>,
}

#[derive(Debug, Serialize)]
struct DesiredDump {
    version: String,
    /// SHA-256 digest of the content, in hex.
    digest: String,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct SnapshotDump {
    edge_cluster_uid: String,
    desired: Option<DesiredDump>,
    desired_for_seconds: Option<u64>,
    paused: bool,
    decommission: bool,
    deployments: usize,
    placed: usize,
    /// Whether the hub rejects its agents.
    refused: bool,
    /// Number of sessions of each agent replica.
    sessions: BTreeMap<String, u64>,
}

/// The inputs of the dump.
#[derive(Debug)]
pub struct Dumper {
    pub replica: Option<String>,
    pub started: Timestamp,
    pub view: Arc<FleetView>,
    pub helm: Arc<Helm>,
    pub charts: Arc<ChartCache>,
    pub work: WorkMetrics,
}

impl Dumper {
    /// Dumps all members, or one. Holds each lock only as long as a metrics scrape does.
    pub fn dump(&self, only: Option<&str>) -> Dump {
        let authority = self.view.authority.get();
        let dump = Dump {
            version: env!("CARGO_PKG_VERSION"),
            replica: self.replica.clone(),
            started: self.started,
            now: clock::wall(),
            leader: None,
            chart: None,
            ca: authority.map(|authority| CaDump::new(&authority.get())),
            helm: HelmDump::new(self.helm.load(), BootTime::now()),
            charts: self.charts.dump(BootTime::now()),
            waiting: self.work.waiting().into(),
            members: BTreeMap::new(),
        };
        with_fleet(dump, &self.view, only, BootTime::now())
    }
}

/// Serves `GET /debug/fleet.json`. `?member=NAME` selects one member.
pub fn router(dumper: Arc<Dumper>) -> Router {
    let handler = move |RawQuery(query): RawQuery| async move {
        let query = query.unwrap_or_default();
        let only = query.split('&').find_map(|it| it.strip_prefix("member="));
        json(&dumper.dump(only))
    };
    Router::new().route("/debug/fleet.json", get(handler))
}

fn with_fleet(mut dump: Dump, view: &FleetView, only: Option<&str>, now: BootTime) -> Dump {
    let home_state = view.home_state.get();
    let mut snapshots = view.members.snapshots();
    let observations = view.members.observations(|name, observation| {
        let is_selected = only.is_none_or(|only| only == name);
        is_selected.then(|| (name.to_owned(), observation.clone()))
    });
    let skip = home_state.is_some_and(|home_state| home_state.allow_chart_skip);
    for (name, observation) in observations.into_iter().flatten() {
        let counts = view.reports.counts(&name, skip);
        let snapshot = snapshots.remove(&name);
        let member = MemberDump::new(observation, counts, snapshot, now);
        dump.members.insert(name, member);
    }
    if let Some(home_state) = home_state {
        dump.leader = Some(LeaderDump::new(&home_state.leader.state()));
        dump.chart = Some(FleetChartDump::new(&home_state.chart.get()));
    }
    dump
}

impl LeaderDump {
    pub(crate) fn new(state: &LeaderState) -> Self {
        let (state_name, holder) = match state {
            LeaderState::Standby { leader } => ("standby", leader.clone()),
            LeaderState::TakingEpoch => ("acquiring", None),
            LeaderState::Leading(_) => ("leading", None),
            LeaderState::Unconfirmed(_) => ("uncertain", None),
            LeaderState::Leaving => ("leaving", None),
        };
        let leader_term = state.leader_term();
        Self {
            state: state_name,
            holder,
            epoch: leader_term.map(|leader_term| leader_term.epoch),
            acquired: leader_term.map(|leader_term| leader_term.acquired_at),
        }
    }
}

impl FleetChartDump {
    pub(crate) fn new(fleet_chart: &FleetChart) -> Self {
        let chart = fleet_chart.chart.as_deref();
        let chart = chart.map(|it| ChartDump::new(&it.repo, &it.name, &it.version));
        let (repo, name, version) = match chart {
            Some(chart) => (Some(chart.repo), Some(chart.name), Some(chart.version)),
            None => (None, None, None),
        };
        Self {
            epoch: fleet_chart.epoch,
            repo,
            name,
            version,
            problem: fleet_chart.problem.as_ref().map(|problem| problem.reason()),
        }
    }
}

impl CaDump {
    pub(crate) fn new(authority: &Authority) -> Self {
        let roots = authority.roots();
        Self {
            phase: authority.phase().to_string(),
            roots: roots
                .iter()
                .map(|root| RootDigest::from_der(root).to_string())
                .collect(),
        }
    }
}

impl MemberDump {
    pub(crate) fn new(
        observation: MemberObservation,
        counts: TenantCounts,
        snapshot: Option<MemberSnapshot>,
        now: BootTime,
    ) -> Self {
        let mut conditions = BTreeMap::from([
            ("Connected", ConditionDump::new(&observation.connected)),
            ("Healthy", ConditionDump::new(&observation.healthy)),
            (
                "TargetClusterResolved",
                ConditionDump::new(observation.source.as_ref().unwrap_or(&observation.resolved)),
            ),
        ]);
        if let Some(uninstalled) = &observation.uninstalled {
            conditions.insert("Uninstalled", ConditionDump::new(uninstalled));
        }
        if let MemberValuesState::Reported(values) = &observation.values {
            conditions.insert("ValuesResolved", ConditionDump::new(values));
        }
        let expiry = |validity: Validity| validity.not_after;
        Self {
            mode: mode_name(observation.mode),
            conditions,
            cluster_uid: observation.uid,
            kubernetes_version: observation.kubernetes_version,
            agent_version: observation.agent_version,
            lease_holder: observation.holder,
            certificate_expiry: observation.certificate.map(expiry),
            access_expiry: observation.access.map(expiry),
            applied: observation.applied.map(|(version, digest)| DesiredDump {
                version: version.to_string(),
                digest,
            }),
            tenants: counts,
            snapshot: snapshot.map(|snapshot| SnapshotDump::new(snapshot, now)),
        }
    }
}

impl SnapshotDump {
    pub(crate) fn new(snapshot: MemberSnapshot, now: BootTime) -> Self {
        let published = snapshot.published.as_ref();
        let desired = published.map(|published| &published.desired);
        Self {
            edge_cluster_uid: snapshot.uid,
            desired: published.map(|published| DesiredDump {
                version: published.desired.version.to_string(),
                digest: published.message.digest.clone(),
            }),
            desired_for_seconds: published.map(|published| now.since(published.since).as_secs()),
            paused: desired.is_some_and(|desired| desired.paused),
            decommission: desired.is_some_and(|desired| desired.retire),
            deployments: desired.map_or(0, |desired| desired.deployments.len()),
            placed: desired.map_or(0, |desired| desired.placed.len()),
            refused: snapshot.refused,
            sessions: snapshot.sessions,
        }
    }
}

#[cfg(test)]
mod tests;
