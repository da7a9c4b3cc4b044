//! `/debug/agent.json`: the current state of this agent, for diagnosis.
//!
//! Its types serve only the dump and list every field explicitly, so new fields elsewhere do not appear here by
//! accident. The dump contains no values, kubeconfigs, tokens, keys or Helm arguments. It also omits condition
//! messages, which are in the objects, and session errors, which are in the log.

use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use axum::Router;
use axum::routing::get;
use jiff::Timestamp;
use krypton_helm::chart::{CachedChartDump, ChartCache};
use krypton_helm::driver::{Helm, Load};
use krypton_helm::dump::{ChartDump, HelmDump};
use krypton_reconciler::metrics::WorkMetrics;
use krypton_reconciler::report_store::ReportStore;
use krypton_reconciler::run_loop::{DumpRequest, ReconcilerDump};
use krypton_runtime::admin::json;
use krypton_runtime::clock::{self, BootTime};
use krypton_runtime::newest::Newest as _;
use krypton_types::desired::DesiredState;
use serde::Serialize;
use tokio::sync::{mpsc, oneshot, watch};

use crate::session::Contact;

/// How long to wait for the reconciler, which answers between two reconciles.
const RECONCILER_TIMEOUT: Duration = Duration::from_secs(2);

/// The dump. Times are wall-clock times, and ages are whole seconds.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Dump {
    version: &'static str,
    replica: String,
    started: Timestamp,
    now: Timestamp,
    /// `None` before the agent has joined.
    member: Option<String>,
    certificate_expiry: Option<Timestamp>,
    session: SessionDump,
    /// Newest known desired state, from the hub or from storage.
    desired: Option<DesiredStateDump>,
    /// Last reported desired state that the agent acts on.
    applied: Option<AppliedDump>,
    unsent_reports: usize,
    helm: HelmDump,
    charts: Vec<CachedChartDump>,
    /// Number of waiting Tenants and KryptonDeployments, by queue.
    waiting: BTreeMap<&'static str, i64>,
    /// Result of the query to the reconciler: reported, notJoined, noDesiredState, busy or ended.
    reconciling: &'static str,
    reconciler: Option<ReconcilerDump>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct SessionDump {
    up: bool,
    /// Seconds since the last change of `up`.
    for_seconds: Option<u64>,
    seconds_since_message: Option<u64>,
    hub: Option<String>,
    hub_version: Option<String>,
    number: Option<u64>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct DesiredStateDump {
    version: String,
    /// SHA-256 of the desired state, in hexadecimal.
    digest: String,
    chart: ChartDump,
    paused: bool,
    decommission: bool,
    deployments: usize,
    placed: usize,
}

#[derive(Debug, Serialize)]
struct AppliedDump {
    version: String,
    digest: String,
}

/// Sources of the dump. Reading them never blocks.
#[derive(Debug)]
pub struct AgentView {
    pub replica: String,
    pub started: Timestamp,
    pub contact: watch::Receiver<Contact>,
    /// Expiry of the client certificate; 1970 before enrollment.
    pub expiry: watch::Receiver<Timestamp>,
    pub desired: watch::Receiver<Option<Arc<DesiredState>>>,
    pub report_store: Arc<ReportStore>,
    pub work: WorkMetrics,
    /// Name and charts of the member, after it has joined.
    pub joined: OnceLock<(String, Arc<ChartCache>)>,
}

/// Creates dumps.
#[derive(Debug)]
pub struct Dumper {
    pub view: AgentView,
    pub helm: Arc<Helm>,
    /// Channel of requests to the reconciler.
    pub dump_requests: mpsc::Sender<DumpRequest>,
}

impl Dumper {
    /// Creates a dump. Includes the reconciler's state unless it is busy.
    pub async fn dump(&self) -> Dump {
        let reconciler = match self.view.no_reconciler_reason() {
            Some(reason) => Err(reason),
            None => query_reconciler(&self.dump_requests).await,
        };
        self.view
            .snapshot(self.helm.load(), reconciler, BootTime::now())
    }
}

/// Requests the reconciler's state. Returns the reason if it does not respond.
async fn query_reconciler(
    dump_requests: &mpsc::Sender<DumpRequest>,
) -> Result<ReconcilerDump, &'static str> {
    let (response_tx, response_rx) = oneshot::channel();
    let exchange = async {
        // Sending fails only if the reconciler has ended.
        dump_requests.send(response_tx).await.ok()?;
        response_rx.await.ok()
    };
    let result = tokio::time::timeout(RECONCILER_TIMEOUT, exchange).await;
    result.map_err(|_| "busy")?.ok_or("ended")
}

impl AgentView {
    /// Returns why there is no reconciler to query yet.
    fn no_reconciler_reason(&self) -> Option<&'static str> {
        match (self.joined.get(), &self.desired.get()) {
            (None, _) => Some("notJoined"),
            (Some(_), None) => Some("noDesiredState"),
            (Some(_), Some(_)) => None,
        }
    }

    fn snapshot(
        &self,
        helm: Load,
        reconciler: Result<ReconcilerDump, &'static str>,
        now: BootTime,
    ) -> Dump {
        let joined = self.joined.get();
        let desired = self.desired.get();
        let expiry = self.expiry.get();
        let applied = self.report_store.applied_version();
        Dump {
            version: env!("CARGO_PKG_VERSION"),
            replica: self.replica.clone(),
            started: self.started,
            now: clock::wall(),
            member: joined.map(|(name, _)| name.clone()),
            certificate_expiry: (expiry != Timestamp::UNIX_EPOCH).then_some(expiry),
            session: SessionDump::new(&self.contact.get(), now),
            desired: desired.as_deref().map(DesiredStateDump::new),
            applied: applied.map(|(version, digest)| AppliedDump {
                version: version.to_string(),
                digest,
            }),
            unsent_reports: self.report_store.unsent_count(),
            helm: HelmDump::new(helm, now),
            charts: joined.map_or_else(Vec::new, |(_, charts)| charts.dump(now)),
            waiting: self.work.waiting().into(),
            reconciling: reconciler.as_ref().err().copied().unwrap_or("reported"),
            reconciler: reconciler.ok(),
        }
    }
}

/// Serves `GET /debug/agent.json`.
pub fn router(dumper: Arc<Dumper>) -> Router {
    let get_dump = move || async move { json(&dumper.dump().await) };
    Router::new().route("/debug/agent.json", get(get_dump))
}

impl SessionDump {
    fn new(contact: &Contact, now: BootTime) -> Self {
        let ago = |time: BootTime| now.since(time).as_secs();
        Self {
            up: contact.up,
            for_seconds: contact.since.map(ago),
            seconds_since_message: contact.last_message.map(ago),
            hub: contact.address.clone(),
            hub_version: contact.hub_version.clone(),
            number: contact.session,
        }
    }
}

impl DesiredStateDump {
    fn new(desired: &DesiredState) -> Self {
        let chart = &desired.chart;
        Self {
            version: desired.version.to_string(),
            digest: desired.digest(),
            chart: ChartDump::new(&chart.repo, &chart.name, &chart.version),
            paused: desired.paused,
            decommission: desired.retire,
            deployments: desired.deployments.len(),
            placed: desired.placed.len(),
        }
    }
}

#[cfg(test)]
mod tests;
