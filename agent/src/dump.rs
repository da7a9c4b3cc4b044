//! `/debug/agent.json`: how this agent stands now, for whoever looks for what is wrong.
//!
//! Each type here is for this alone, and says in so many words what is told: no values, no messages of conditions
//! (they are in the objects), no reasons why there is no session (they are in the log), no kubeconfigs, tokens or
//! keys, no arguments of helm. What is new elsewhere is not told before somebody writes it down here.

use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use axum::Router;
use axum::http::{StatusCode, header};
use axum::response::IntoResponse as _;
use axum::routing::get;
use jiff::Timestamp;
use krypton_helm::chart::ChartCache;
use krypton_helm::driver::{Helm, Load};
use krypton_helm::dump::{CachedChart, ChartShown, HelmNow};
use krypton_reconciler::metrics::WorkMetrics;
use krypton_reconciler::report_store::ReportStore;
use krypton_reconciler::run_loop::{Question, ReconcilerNow};
use krypton_runtime::clock::{self, BootTime};
use krypton_runtime::newest::Newest as _;
use krypton_types::desired::DesiredState;
use serde::Serialize;
use tokio::sync::{mpsc, oneshot, watch};

use crate::session::Contact;

/// For as long the reconciler is waited for: it answers between two looks.
const PATIENCE: Duration = Duration::from_secs(2);

/// The dump. Times are of the wall clock, ages in whole seconds.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Dump {
    version: &'static str,
    replica: String,
    started: Timestamp,
    now: Timestamp,
    /// `None` until it has joined.
    member: Option<String>,
    certificate_ends: Option<Timestamp>,
    session: SessionNow,
    /// The newest that is known, from the hub or of the record.
    wanted: Option<WantedNow>,
    /// What is acted on, as it was last reported.
    applied: Option<AppliedNow>,
    reports_unsent: usize,
    helm: HelmNow,
    charts: Vec<CachedChart>,
    /// Tenants and deployments that wait to be looked at, by what they wait for.
    waiting: BTreeMap<&'static str, i64>,
    /// Whether it has answered: told, notJoined, nothingWanted, busy or ended.
    reconciling: &'static str,
    reconciler: Option<ReconcilerNow>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct SessionNow {
    up: bool,
    /// For how long it is so.
    for_seconds: Option<u64>,
    heard_before_seconds: Option<u64>,
    hub: Option<String>,
    hub_version: Option<String>,
    number: Option<u64>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct WantedNow {
    version: String,
    /// sha256 of what it says, in hex.
    digest: String,
    chart: ChartShown,
    paused: bool,
    retire: bool,
    deployments: usize,
    placed: usize,
}

#[derive(Debug, Serialize)]
struct AppliedNow {
    version: String,
    digest: String,
}

/// What the dump looks at, nothing of which waits.
#[derive(Debug)]
pub struct AgentView {
    pub replica: String,
    pub started: Timestamp,
    pub contact: watch::Receiver<Contact>,
    /// When the client certificate ends; 1970 before enrolment.
    pub expiry: watch::Receiver<Timestamp>,
    pub desired: watch::Receiver<Option<Arc<DesiredState>>>,
    pub report_store: Arc<ReportStore>,
    pub work: WorkMetrics,
    /// The member's name and charts, once it has joined.
    pub joined: OnceLock<(String, Arc<ChartCache>)>,
}

/// Who is asked.
#[derive(Debug)]
pub struct Dumper {
    pub view: AgentView,
    pub helm: Arc<Helm>,
    /// The reconciler's ear.
    pub questions: mpsc::Sender<Question>,
}

impl Dumper {
    /// Asks the reconciler too, which may be busy.
    pub async fn dump(&self) -> Dump {
        let reconciler = match self.view.silent() {
            Some(why) => Err(why),
            None => ask(&self.questions).await,
        };
        self.view
            .seen(self.helm.load(), reconciler, BootTime::now())
    }
}

/// What the reconciler says, or why it says nothing.
async fn ask(questions: &mpsc::Sender<Question>) -> Result<ReconcilerNow, &'static str> {
    let (question, answer) = oneshot::channel();
    let asking = async {
        // Only who has ended hears nothing more.
        questions.send(question).await.ok()?;
        answer.await.ok()
    };
    let told = tokio::time::timeout(PATIENCE, asking).await;
    told.map_err(|_| "busy")?.ok_or("ended")
}

impl AgentView {
    /// Why there is no reconciler to ask yet.
    fn silent(&self) -> Option<&'static str> {
        match (self.joined.get(), &self.desired.get()) {
            (None, _) => Some("notJoined"),
            (Some(_), None) => Some("nothingWanted"),
            (Some(_), Some(_)) => None,
        }
    }

    fn seen(
        &self,
        helm: Load,
        reconciler: Result<ReconcilerNow, &'static str>,
        now: BootTime,
    ) -> Dump {
        let joined = self.joined.get();
        let desired = self.desired.get();
        let expiry = self.expiry.get();
        let applied = self.report_store.applied();
        Dump {
            version: env!("CARGO_PKG_VERSION"),
            replica: self.replica.clone(),
            started: self.started,
            now: clock::wall(),
            member: joined.map(|(name, _)| name.clone()),
            certificate_ends: (expiry != Timestamp::UNIX_EPOCH).then_some(expiry),
            session: SessionNow::of(&self.contact.get(), now),
            wanted: desired.as_deref().map(WantedNow::of),
            applied: applied.map(|(version, digest)| AppliedNow {
                version: version.to_string(),
                digest,
            }),
            reports_unsent: self.report_store.unsent(),
            helm: HelmNow::of(helm, now),
            charts: joined.map_or_else(Vec::new, |(_, charts)| {
                CachedChart::all(charts.standing(), now)
            }),
            waiting: self.work.waiting().into(),
            reconciling: reconciler.as_ref().err().copied().unwrap_or("told"),
            reconciler: reconciler.ok(),
        }
    }
}

/// `GET /debug/agent.json`.
pub fn router(dumper: Arc<Dumper>) -> Router {
    let answer = move || async move {
        let json = [(header::CONTENT_TYPE, "application/json")];
        match serde_json::to_string(&dumper.dump().await) {
            Ok(text) => (json, text + "\n").into_response(),
            Err(_) => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
        }
    };
    Router::new().route("/debug/agent.json", get(answer))
}

impl SessionNow {
    fn of(contact: &Contact, now: BootTime) -> Self {
        let ago = |then: BootTime| now.since(then).as_secs();
        Self {
            up: contact.up,
            for_seconds: contact.since.map(ago),
            heard_before_seconds: contact.heard.map(ago),
            hub: contact.address.clone(),
            hub_version: contact.hub_version.clone(),
            number: contact.session,
        }
    }
}

impl WantedNow {
    fn of(desired: &DesiredState) -> Self {
        let chart = &desired.chart;
        Self {
            version: desired.version.to_string(),
            digest: desired.digest(),
            chart: ChartShown::of(&chart.repo, &chart.name, &chart.version),
            paused: desired.paused,
            retire: desired.retire,
            deployments: desired.deployments.len(),
            placed: desired.placed.len(),
        }
    }
}

#[cfg(test)]
mod tests;
