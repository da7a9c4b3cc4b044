//! A task that plays the agent for one member: it runs the reconciler against the member's kubeconfig.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use k8s_openapi::api::core::v1::Namespace;
use krypton_agent::access;
use krypton_agent::plan::Policy;
use krypton_agent::reconciler::{self, Member, StatusMode, Tools};
use krypton_agent::report::{Changes, ReportBoard};
use krypton_common::conditions::{State, Truth};
use krypton_common::desired::{ChartState, DesiredState, Version};
use krypton_common::kubeconfig::Sanitized;
use krypton_common::names;
use kube::Client;
use kube::api::Api;
use thiserror::Error;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::aggregate::{Hearing, Reports};
use crate::facts::{FactsBoard, reason};
use crate::found::Found;
use crate::home;
use crate::identity::Verdict;
use krypton_common::error_chain::chain;

/// How a member is reached.
#[derive(Clone, Debug)]
pub enum Access {
    /// The home cluster itself.
    Home(Box<kube::Config>),
    Kubeconfig(Result<Arc<Sanitized>, String>),
}

/// What a person has said of the member, in its EdgeCluster.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Wishes {
    pub paused: bool,
    pub banned: bool,
}

/// The chart state of the fleet, and the epoch it is given in.
#[derive(Clone, Debug, PartialEq)]
pub struct Given {
    pub epoch: u64,
    pub chart: Arc<ChartState>,
}

/// What all proxies share.
pub struct Shared {
    pub tools: Tools,
    pub reports: Arc<Reports>,
    pub facts: Arc<FactsBoard>,
    /// Counts every desired state that is handed out within the epoch.
    pub generation: AtomicU64,
    /// The latest epoch that a member has seen and we have not given: home was restored.
    pub ahead: watch::Sender<u64>,
    pub scratch: PathBuf,
    /// Where the kubeconfig Secrets are.
    pub namespace: String,
    pub holder: String,
    pub instance: String,
    pub policy: Policy,
    pub retry_max: Duration,
    pub allow_chart_skip: bool,
    pub watch_namespaces: Option<std::collections::BTreeSet<String>>,
    pub found: Arc<Found>,
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared")
            .field("holder", &self.holder)
            .finish_non_exhaustive()
    }
}

/// What a proxy follows.
#[derive(Clone, Debug)]
pub struct Inputs {
    pub access: watch::Receiver<Access>,
    pub wishes: watch::Receiver<Wishes>,
    pub verdict: watch::Receiver<Verdict>,
    pub given: watch::Receiver<Given>,
}

#[derive(Debug, Error)]
enum ReachError {
    #[error("the kubeconfig cannot be used")]
    Config(#[source] access::ConfigError),
    #[error("the kubeconfig of the home cluster cannot be handed to helm")]
    Render(#[source] access::RenderError),
    #[error("no client can be made from the kubeconfig")]
    Client(#[source] kube::Error),
    #[error("the kubeconfig for helm cannot be written to {0}")]
    Write(PathBuf, #[source] std::io::Error),
}

/// A member that can be talked to.
#[derive(Clone)]
struct Reached {
    client: Client,
    kubeconfig: PathBuf,
}

const IDENTIFY_DEADLINE: Duration = Duration::from_secs(10);
const RETRY_MAX: Duration = Duration::from_secs(30);

/// Follows one member until `stop`.
pub async fn run(name: String, shared: Arc<Shared>, mut inputs: Inputs, stop: CancellationToken) {
    let mut reached: Option<Reached> = None;
    loop {
        let access = inputs.access.borrow_and_update().clone();
        match reach(&name, &shared.scratch, access).await {
            Ok(fresh) => {
                shared.facts.set(&name, |facts| {
                    facts.resolved = State::new(Truth::True, reason::RESOLVED, "");
                });
                reached = Some(fresh);
            }
            // The last good client stays in use; without one, only a new kubeconfig can help.
            Err((why, problem)) => {
                tracing::warn!(member = %name, %problem, "the member's kubeconfig is refused");
                shared.facts.set(&name, |facts| {
                    facts.resolved = State::new(Truth::False, why, problem.clone());
                });
                if reached.is_none() {
                    silent(&name, &shared, why, &problem);
                    // Whoever waits for our identity must not wait for a kubeconfig.
                    shared.found.set(&name, None);
                }
            }
        }
        let Some(current) = reached.clone() else {
            tokio::select! {
                () = stop.cancelled() => return,
                changed = inputs.access.changed() => if changed.is_err() { return },
            }
            continue;
        };
        tokio::select! {
            () = stop.cancelled() => return,
            changed = inputs.access.changed() => if changed.is_err() { return },
            () = identify(&name, &shared, &current.client) => {
                if act(&name, &shared, &mut inputs, current, &stop).await.is_break() {
                    return;
                }
            }
        }
    }
}

/// Makes a client and the file that helm reads.
async fn reach(
    name: &str,
    scratch: &Path,
    access: Access,
) -> Result<Reached, (&'static str, String)> {
    let made = match access {
        Access::Kubeconfig(Err(problem)) => return Err((reason::KUBECONFIG_INVALID, problem)),
        Access::Kubeconfig(Ok(sanitized)) => home::member_config(&sanitized.yaml)
            .await
            .map(|config| (config, sanitized.yaml.clone()))
            .map_err(ReachError::Config),
        Access::Home(config) => access::kubeconfig_yaml(&config)
            .map(|yaml| (*config, yaml))
            .map_err(ReachError::Render),
    };
    let reached = match made {
        Err(error) => Err(error),
        Ok((config, yaml)) => match home::client(config) {
            Err(error) => Err(ReachError::Client(error)),
            Ok(client) => write_kubeconfig(scratch, name, &yaml)
                .map(|kubeconfig| Reached { client, kubeconfig }),
        },
    };
    reached.map_err(|error| (reason::CLIENT_FAILED, chain(&error)))
}

/// Readable by us alone, and never seen half written.
fn write_kubeconfig(scratch: &Path, name: &str, yaml: &str) -> Result<PathBuf, ReachError> {
    use std::io::Write;
    let path = scratch.join(format!("{name}.kubeconfig"));
    let failed = |error| ReachError::Write(path.clone(), error);
    let mut file = tempfile::NamedTempFile::new_in(scratch).map_err(failed)?;
    file.write_all(yaml.as_bytes()).map_err(failed)?;
    file.persist(&path).map_err(|error| failed(error.error))?;
    Ok(path)
}

/// Asks the cluster who it is until it answers.
async fn identify(name: &str, shared: &Shared, client: &Client) {
    let mut attempts = 0;
    loop {
        match tokio::time::timeout(IDENTIFY_DEADLINE, ask(client)).await {
            Ok(Ok((uid, version))) => {
                shared.facts.set(name, |facts| {
                    facts.uid = Some(uid.clone());
                    facts.kubernetes_version = Some(version);
                    facts.connected = State::new(Truth::True, reason::CONNECTED, "");
                });
                shared.found.set(name, Some(uid));
                return;
            }
            Ok(Err(error)) => silent(name, shared, reason::UNREACHABLE, &chain(&error)),
            Err(_) => {
                let problem = format!("no answer within {} s", IDENTIFY_DEADLINE.as_secs());
                silent(name, shared, reason::UNREACHABLE, &problem);
            }
        }
        shared.found.set(name, None);
        attempts += 1;
        let pause = krypton_agent::plan::backoff(attempts, RETRY_MAX, rand::random());
        tokio::time::sleep(pause).await;
    }
}

async fn ask(client: &Client) -> kube::Result<(String, String)> {
    let namespaces: Api<Namespace> = Api::all(client.clone());
    let system = namespaces.get_metadata("kube-system").await?;
    let version = client.apiserver_version().await?;
    Ok((system.metadata.uid.unwrap_or_default(), version.git_version))
}

fn silent(name: &str, shared: &Shared, why: &str, problem: &str) {
    shared.facts.set(name, |facts| {
        facts.connected = State::new(Truth::False, why, problem);
        facts.proxied = false;
        facts.holder = None;
    });
    shared
        .reports
        .hearing(name, Hearing::Silent(problem.to_owned()));
}

/// Reconciles while the member is ours to act on. Returns to be started anew when its access has
/// changed.
async fn act(
    name: &str,
    shared: &Arc<Shared>,
    inputs: &mut Inputs,
    reached: Reached,
    stop: &CancellationToken,
) -> std::ops::ControlFlow<()> {
    use std::ops::ControlFlow::{Break, Continue};
    loop {
        let held_back = held_back(
            &inputs.verdict.borrow_and_update(),
            *inputs.wishes.borrow_and_update(),
        );
        let Some((why, message)) = held_back else {
            break;
        };
        // While it is only being found out who goes first, its last word stands.
        if why != reason::CONNECTING {
            tracing::warn!(member = %name, reason = why, %message, "the member is left alone");
            shared
                .reports
                .hearing(name, Hearing::Silent(format!("{why}: {message}")));
        }
        shared.facts.set(name, |facts| {
            facts.proxied = false;
            facts.healthy = State::new(Truth::False, why, message.clone());
        });
        tokio::select! {
            () = stop.cancelled() => return Break(()),
            changed = inputs.access.changed() => {
                return if changed.is_err() { Break(()) } else { Continue(()) };
            }
            changed = inputs.verdict.changed() => if changed.is_err() { return Break(()) },
            changed = inputs.wishes.changed() => if changed.is_err() { return Break(()) },
        }
    }
    tracing::info!(member = %name, "acting as the member's proxy");
    shared
        .reports
        .begin(name, krypton_agent::clock::Boot::now());
    shared.facts.set(name, |facts| facts.proxied = true);
    let desire = |given: &Given, wishes: Wishes| {
        let generation = shared.generation.fetch_add(1, Ordering::Relaxed) + 1;
        Arc::new(DesiredState {
            version: Version {
                epoch: given.epoch,
                generation,
            },
            chart: (*given.chart).clone(),
            paused: wishes.paused,
        })
    };
    let first = desire(&inputs.given.borrow_and_update(), *inputs.wishes.borrow());
    let (desired, desired_rx) = watch::channel(first);
    let board = Arc::new(ReportBoard::default());
    let inner = CancellationToken::new();
    let home = name == names::SELF_CLUSTER;
    let member = Member {
        name: name.to_owned(),
        source_namespace: (!home).then(|| shared.namespace.clone()),
        client: reached.client,
        kubeconfig: reached.kubeconfig,
        holder: shared.holder.clone(),
        instance: shared.instance.clone(),
        status: if home {
            StatusMode::Report
        } else {
            StatusMode::Write
        },
        namespaces: shared.watch_namespaces.clone().filter(|_| home),
        allow_chart_skip: shared.allow_chart_skip,
        retry_max: shared.retry_max,
        policy: shared.policy.clone(),
    };
    let running = tokio::spawn(reconciler::run(
        member,
        shared.tools.clone(),
        desired_rx,
        Arc::clone(&board),
        inner.clone(),
    ));
    let ended = loop {
        tokio::select! {
            () = stop.cancelled() => break Break(()),
            changes = board.changes() => forward(name, shared, changes),
            changed = inputs.given.changed() => {
                if changed.is_err() { break Break(()) }
                desired.send_replace(desire(&inputs.given.borrow_and_update(), *inputs.wishes.borrow()));
            }
            changed = inputs.wishes.changed() => {
                if changed.is_err() { break Break(()) }
                let wishes = *inputs.wishes.borrow_and_update();
                if wishes.banned { break Continue(()) }
                desired.send_replace(desire(&inputs.given.borrow(), wishes));
            }
            changed = inputs.verdict.changed() => {
                if changed.is_err() { break Break(()) }
                if *inputs.verdict.borrow_and_update() != Verdict::Act { break Continue(()) }
            }
            changed = inputs.access.changed() => {
                if changed.is_err() { break Break(()) }
                let refused = match &*inputs.access.borrow_and_update() {
                    Access::Kubeconfig(Err(problem)) => Some(problem.clone()),
                    _ => None,
                };
                // Any other is taken up by starting anew.
                let Some(problem) = refused else { break Continue(()) };
                tracing::warn!(member = %name, %problem, "the new kubeconfig is refused; the last good one stays in use");
                let state = State::new(Truth::False, reason::KUBECONFIG_INVALID, problem);
                shared.facts.set(name, |facts| facts.resolved = state);
            }
        }
    };
    inner.cancel();
    // Until it has ended, its helm runs live and its Lease is held.
    if let Err(error) = running.await {
        tracing::error!(member = %name, %error, "the reconciler ended badly");
    }
    ended
}

fn held_back(verdict: &Verdict, wishes: Wishes) -> Option<(&'static str, String)> {
    if wishes.banned {
        return Some((
            reason::BANNED,
            "spec.banned is set on the EdgeCluster".to_owned(),
        ));
    }
    match verdict {
        Verdict::Act => None,
        Verdict::Wait => Some((
            reason::CONNECTING,
            "waiting until it is known that no older member is the same cluster".to_owned(),
        )),
        Verdict::Duplicate(other) => Some((
            reason::DUPLICATE,
            format!(
                "this is the same cluster as member {other}, which acts on it; remove one of the two"
            ),
        )),
        Verdict::Renamed(old) => Some((
            reason::RENAMED,
            format!(
                "this cluster is known as member {old}; releases carry that name. Put the Secret back under the old name, or delete EdgeCluster {old} to have everything installed anew under this one"
            ),
        )),
        Verdict::Changed { recorded, found } => Some((
            reason::IDENTITY_CHANGED,
            format!(
                "another cluster answers (UID {found}) than the one on record (UID {recorded}); delete the EdgeCluster if that is meant"
            ),
        )),
    }
}

/// Hands on what the reconciler says.
fn forward(name: &str, shared: &Shared, changes: Changes) {
    if !changes.tenants.is_empty() {
        shared.reports.report(name, changes.tenants);
        shared.facts.touch(name);
    }
    let Some(report) = changes.member else { return };
    if let Some(ahead) = report.ahead {
        shared.ahead.send_if_modified(|known| {
            let later = ahead.epoch > *known;
            *known = (*known).max(ahead.epoch);
            later
        });
    }
    let problem = report.problem.clone().unwrap_or_default();
    let connected = if report.connected {
        State::new(Truth::True, reason::CONNECTED, "")
    } else {
        State::new(Truth::False, reason::UNREACHABLE, problem.clone())
    };
    let healthy = if report.ahead.is_some() {
        let message = "the member has seen a later desired state; the hub takes a new epoch";
        State::new(Truth::False, reason::STALE, message)
    } else if let Some(other) = &report.other_holder {
        let message = format!("{other} holds the Lease; this hub observes");
        State::new(Truth::True, reason::OBSERVING, message)
    } else if report.connected && report.synced && report.writing && report.applied.is_some() {
        State::new(Truth::True, reason::RECONCILING, "")
    } else if report.connected {
        State::new(Truth::Unknown, reason::STARTING, problem.clone())
    } else {
        State::new(Truth::Unknown, reason::UNREACHABLE, problem.clone())
    };
    shared.facts.set(name, |facts| {
        facts.connected = connected;
        facts.healthy = healthy;
        facts.holder = report
            .other_holder
            .clone()
            .or_else(|| report.writing.then(|| shared.holder.clone()));
        if report.applied.is_some() {
            facts.applied = report.applied.clone();
        }
    });
    // Until all is listed, absence from the reports means nothing.
    let hearing = match (report.connected, report.synced) {
        (true, true) => Hearing::Full,
        (true, false) => return,
        (false, _) => Hearing::Silent(format!("the cluster does not answer: {problem}")),
    };
    shared.reports.hearing(name, hearing);
}
