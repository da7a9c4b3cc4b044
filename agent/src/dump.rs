//! `/debug/agent.json`: how this agent stands now, for whoever looks for what is wrong.
//!
//! Each type here is for this alone, and says in so many words what is told: no values, no messages of conditions
//! (they are in the objects), no reasons why there is no session (they are in the log), no kubeconfigs, tokens or
//! keys, no arguments of helm. What is new elsewhere is not told before somebody writes it down here. The hub tells
//! of its helm and its charts in the same words.

use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use axum::Router;
use axum::http::{StatusCode, header};
use axum::response::IntoResponse as _;
use axum::routing::get;
use jiff::Timestamp;
use krypton_common::conditions::{State, Truth, reason};
use krypton_common::desired::DesiredState;
use serde::Serialize;
use tokio::sync::{mpsc, oneshot, watch};

use crate::chart::{ChartCache, ChartFault, ChartRef, Standing};
use crate::clock::{self, Boot};
use crate::helm::{Helm, Load};
use crate::newest::Newest as _;
use crate::precedence::Urgency;
use crate::reconciler::Question;
use crate::report::ReportBoard;
use crate::session::Contact;
use crate::work_metrics::WorkMetrics;

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

/// Which chart, without the user, password and query of its repository's URL.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct ChartShown {
    pub repo: String,
    pub name: String,
    pub version: String,
}

/// Who runs helm now, and who waits.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct HelmNow {
    in_all: usize,
    per_member: usize,
    running: BTreeMap<String, usize>,
    waiting: Vec<WaitingNow>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct WaitingNow {
    member: String,
    urgency: &'static str,
    for_seconds: u64,
}

/// A chart that was asked for.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct CachedChart {
    chart: ChartShown,
    /// here, failed or fetching.
    state: &'static str,
    for_seconds: Option<u64>,
    /// What it is, where it is here.
    found: Option<String>,
    sha256: Option<String>,
    /// Why it is not here: the reason that conditions have.
    fault: Option<&'static str>,
    attempts: u32,
    retry_in_seconds: Option<u64>,
}

/// What the reconciler tells.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ReconcilerNow {
    pub(crate) lease: LeaseNow,
    pub(crate) apiserver_heard_before_seconds: u64,
    /// missing, terminating or present; `None` before it was looked at.
    pub(crate) tenant_crd: Option<&'static str>,
    pub(crate) lists_complete: bool,
    /// The version that is on record on the cluster, and so acted on.
    pub(crate) on_record: Option<String>,
    /// A later one that is there, because of which ours is not acted on.
    pub(crate) later_on_record: Option<String>,
    /// Actions that are under way.
    pub(crate) running: usize,
    pub(crate) subjects_in_all: usize,
    /// What fails goes first; of very many, some.
    pub(crate) subjects: Vec<SubjectNow>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct LeaseNow {
    pub(crate) writes: bool,
    pub(crate) held_for_seconds: Option<u64>,
    pub(crate) renewed_before_seconds: Option<u64>,
    pub(crate) other_holder: Option<String>,
}

/// A Tenant or deployment.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct SubjectNow {
    pub(crate) kind: &'static str,
    pub(crate) key: String,
    pub(crate) generation: i64,
    pub(crate) being_removed: bool,
    pub(crate) release: String,
    pub(crate) revision: Option<u32>,
    pub(crate) locked: bool,
    pub(crate) ready: Option<StateNow>,
    pub(crate) progress: Option<StateNow>,
    pub(crate) error: Option<StateNow>,
    /// Something is done for it just now.
    pub(crate) at_work: bool,
    pub(crate) failed_with: Option<&'static str>,
    pub(crate) attempts: u32,
    pub(crate) retry_in_seconds: Option<u64>,
    /// What comes next, as `status.next` has it.
    pub(crate) next: Option<&'static str>,
    pub(crate) next_look_in_seconds: Option<u64>,
}

impl SubjectNow {
    pub(crate) fn is_in_error(&self) -> bool {
        self.error
            .as_ref()
            .is_some_and(|error| error.status == "True")
    }
}

/// A condition, without its message.
#[derive(Debug, Serialize)]
pub(crate) struct StateNow {
    status: &'static str,
    reason: String,
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
    pub board: Arc<ReportBoard>,
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
        self.view.seen(self.helm.load(), reconciler, Boot::now())
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

    fn seen(&self, helm: Load, reconciler: Result<ReconcilerNow, &'static str>, now: Boot) -> Dump {
        let joined = self.joined.get();
        let desired = self.desired.get();
        let expiry = self.expiry.get();
        let applied = self.board.applied();
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
            reports_unsent: self.board.unsent(),
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
    fn of(contact: &Contact, now: Boot) -> Self {
        let ago = |then: Boot| now.since(then).as_secs();
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

impl ChartShown {
    pub fn of(repo: &str, name: &str, version: &str) -> Self {
        let chart = ChartRef {
            repo: repo.to_owned(),
            name: name.to_owned(),
            version: version.to_owned(),
        };
        Self {
            repo: chart.repo_shown(),
            name: chart.name_shown(),
            version: chart.version,
        }
    }
}

impl HelmNow {
    pub fn of(load: Load, now: Boot) -> Self {
        let waiting = load.waiting.into_iter();
        Self {
            in_all: load.in_all,
            per_member: load.per_member,
            running: load.running,
            waiting: waiting
                .map(|(member, urgency, since)| WaitingNow {
                    member,
                    urgency: match urgency {
                        Urgency::High => "high",
                        Urgency::Low => "low",
                    },
                    for_seconds: now.since(since).as_secs(),
                })
                .collect(),
        }
    }
}

impl CachedChart {
    /// Sorted by what they are.
    pub fn all(standing: Vec<(ChartRef, Standing)>, now: Boot) -> Vec<Self> {
        let each = standing.into_iter();
        let mut all: Vec<Self> = each
            .map(|(chart, standing)| Self::of(&chart, standing, now))
            .collect();
        all.sort_by(|one, other| one.chart.cmp(&other.chart));
        all
    }

    fn of(chart: &ChartRef, standing: Standing, now: Boot) -> Self {
        let fetching = Self {
            chart: ChartShown::of(&chart.repo, &chart.name, &chart.version),
            state: "fetching",
            for_seconds: None,
            found: None,
            sha256: None,
            fault: None,
            attempts: 0,
            retry_in_seconds: None,
        };
        match standing {
            Standing::Fetching => fetching,
            Standing::Here {
                since,
                version,
                sha256,
            } => Self {
                state: "here",
                for_seconds: Some(now.since(since).as_secs()),
                found: Some(version),
                sha256: Some(sha256),
                ..fetching
            },
            Standing::Failed {
                fault,
                times,
                since,
                until,
            } => Self {
                state: "failed",
                for_seconds: Some(now.since(since).as_secs()),
                fault: Some(match fault {
                    ChartFault::NotLoaded => reason::CHART_NOT_LOADED,
                    ChartFault::VersionNotFound => reason::VERSION_NOT_FOUND,
                    ChartFault::VersionInvalid => reason::VERSION_INVALID,
                }),
                attempts: times,
                retry_in_seconds: Some(until.since(now).as_secs()),
                ..fetching
            },
        }
    }
}

impl StateNow {
    pub(crate) fn of(state: State) -> Self {
        Self {
            status: match state.truth {
                Truth::True => "True",
                Truth::False => "False",
                Truth::Unknown => "Unknown",
            },
            reason: state.reason,
        }
    }
}

#[cfg(test)]
mod tests;
