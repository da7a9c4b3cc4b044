//! A task that plays the agent for one member: it runs the reconciler against the member's kubeconfig,
//! as far as no agent of the member does (design §3, rule 4).

use std::ops::ControlFlow::{self, Break, Continue};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Namespace;
use krypton_agent::access::{self, ServiceAccount};
use krypton_agent::clock::{self, Boot};
use krypton_agent::fence::LeaseWish;
use krypton_agent::plan::Policy;
use krypton_agent::reconciler::{self, Member, StatusMode, Tools};
use krypton_agent::report::ReportBoard;
use krypton_common::conditions::{State, Truth};
use krypton_common::desired::DesiredState;
use krypton_common::kubeconfig::Sanitized;
use krypton_common::names;
use kube::Client;
use kube::api::Api;
use thiserror::Error;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::discovery::{Origin, Unresolved};
use crate::facts::{FactsBoard, reason};
use crate::found::Found;
use crate::home;
use crate::members::Slot;
use crate::notices::Notices;
use crate::voices::{Presence, SILENCE, VoiceId, Voices};
use krypton_common::error_chain::chain;

/// How a member is reached.
#[derive(Clone, Debug)]
pub enum Access {
    /// The home cluster itself.
    Home(Box<kube::Config>),
    Kubeconfig(Origin, Result<Arc<Sanitized>, Unresolved>),
}

/// What all proxies share.
pub struct Shared {
    pub tools: Tools,
    pub facts: Arc<FactsBoard>,
    pub voices: Arc<Voices>,
    /// How long an agent must have been away before the hub acts in its place.
    pub grace: Duration,
    pub scratch: PathBuf,
    /// What helm acts as on home.
    pub helm_account: Option<ServiceAccount>,
    pub notices: Notices,
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
    /// `None` while nobody may act on the member.
    pub permit: watch::Receiver<Option<Permit>>,
    pub slot: watch::Receiver<Option<Slot>>,
    pub presence: watch::Receiver<Presence>,
}

/// The member may be acted on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Permit {
    /// The cluster that it is on record for; any when nothing is.
    pub cluster_uid: Option<String>,
}

/// What the proxy does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    /// An agent reconciles, or is about to, or has been until a moment ago.
    Rest,
    /// The agent has been away for a while: it may live and be cut off from us only.
    Observe,
    Act,
}

/// What to do, and when to look again though nothing has happened.
fn role(presence: Presence, grace: Duration, now: Boot) -> (Role, Option<Boot>) {
    match presence {
        Presence::Never => (Role::Act, None),
        Presence::Ready => (Role::Rest, None),
        Presence::Away(since) => {
            let after = |pause| Some(Boot(since.0 + pause));
            // A session that is made anew within seconds is none of our business.
            match now.since(since) {
                away if away >= grace => (Role::Act, None),
                away if away >= SILENCE => (Role::Observe, after(grace)),
                _ => (Role::Rest, after(grace.min(SILENCE))),
            }
        }
    }
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
    /// What the client was made from; `None`: home itself.
    origin: Option<Origin>,
    /// Of the cluster that has answered; empty before.
    uid: String,
}

const IDENTIFY_DEADLINE: Duration = Duration::from_secs(10);
const RETRY_MAX: Duration = Duration::from_secs(30);

/// Follows one member until `stop`.
pub async fn run(name: String, shared: Arc<Shared>, mut inputs: Inputs, stop: CancellationToken) {
    let mut reached: Option<Reached> = None;
    loop {
        let access = inputs.access.borrow_and_update().clone();
        match reach(&name, &shared, access).await {
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
                    let link = State::new(Truth::False, why, problem);
                    shared.voices.link(&name, Some(link), Boot::now());
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
            uid = identify(&name, &shared, &current.client) => {
                let current = Reached { uid, ..current };
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
    shared: &Shared,
    access: Access,
) -> Result<Reached, (&'static str, String)> {
    let origin = match &access {
        Access::Kubeconfig(origin, _) => Some(origin.clone()),
        Access::Home(_) => None,
    };
    let made = match access {
        Access::Kubeconfig(_, Err(why)) => return Err((why.reason, why.message)),
        Access::Kubeconfig(_, Ok(sanitized)) => home::member_config(&sanitized.yaml)
            .await
            .map(|config| (config, sanitized.yaml.clone()))
            .map_err(ReachError::Config),
        Access::Home(config) => access::kubeconfig_yaml(&config, shared.helm_account.as_ref())
            .map(|yaml| (*config, yaml))
            .map_err(ReachError::Render),
    };
    let reached = match made {
        Err(error) => Err(error),
        Ok((config, yaml)) => match home::client(config) {
            Err(error) => Err(ReachError::Client(error)),
            Ok(client) => {
                let kubeconfig = shared.scratch.join(format!("{name}.kubeconfig"));
                match access::write_kubeconfig(&shared.scratch, &kubeconfig, &yaml) {
                    Ok(()) => Ok(Reached {
                        client,
                        kubeconfig,
                        origin,
                        uid: String::new(),
                    }),
                    Err(error) => Err(ReachError::Write(kubeconfig, error)),
                }
            }
        },
    };
    reached.map_err(|error| (reason::CLIENT_FAILED, chain(&error)))
}

/// Asks the cluster who it is until it answers.
async fn identify(name: &str, shared: &Shared, client: &Client) -> String {
    let mut attempts = 0;
    loop {
        let problem = match tokio::time::timeout(IDENTIFY_DEADLINE, ask(client)).await {
            Ok(Ok((uid, version))) => {
                shared
                    .facts
                    .set(name, |facts| facts.kubernetes_version = Some(version));
                let link = State::new(Truth::True, reason::CONNECTED, "");
                shared.voices.link(name, Some(link), Boot::now());
                shared.found.set(name, Some(uid.clone()));
                return uid;
            }
            Ok(Err(error)) => chain(&error),
            Err(_) => format!("no answer within {} s", IDENTIFY_DEADLINE.as_secs()),
        };
        let link = State::new(Truth::False, reason::UNREACHABLE, problem);
        shared.voices.link(name, Some(link), Boot::now());
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

/// Reconciles while the member is ours to act on. Returns to be started anew when its access has
/// changed.
async fn act(
    name: &str,
    shared: &Arc<Shared>,
    inputs: &mut Inputs,
    reached: Reached,
    stop: &CancellationToken,
) -> ControlFlow<()> {
    loop {
        let now = Boot::now();
        let permit = inputs.permit.borrow_and_update().clone();
        let may_act = permit.is_some_and(|permit| is_of(name, shared, &reached, &permit));
        let (role, look_again) = role(*inputs.presence.borrow_and_update(), shared.grace, now);
        let slot = inputs.slot.borrow_and_update().clone();
        if let (true, Some(slot), Role::Act | Role::Observe) = (may_act, slot, role) {
            let run = Run {
                role,
                look_again,
                first: slot.desired,
            };
            if let Some(end) = reconcile(name, shared, inputs, &reached, run, stop).await {
                return end;
            }
            continue;
        }
        tokio::select! {
            () = stop.cancelled() => return Break(()),
            changed = inputs.access.changed() => {
                return if changed.is_err() { Break(()) } else { Continue(()) };
            }
            changed = inputs.permit.changed() => if changed.is_err() { return Break(()) },
            changed = inputs.slot.changed() => if changed.is_err() { return Break(()) },
            changed = inputs.presence.changed() => if changed.is_err() { return Break(()) },
            () = clock::sleep_until(look_again, now) => {}
        }
    }
}

/// Whether the cluster that we reach is the one on record. An agent of the member may be on the right
/// one while our kubeconfig leads elsewhere.
fn is_of(name: &str, shared: &Shared, reached: &Reached, permit: &Permit) -> bool {
    let ours = match &permit.cluster_uid {
        None => true,
        Some(recorded) => *recorded == reached.uid,
    };
    if ours {
        shared
            .facts
            .set(name, |facts| facts.uid = Some(reached.uid.clone()));
    } else {
        let message = format!(
            "the kubeconfig leads to another cluster (UID {}) than the one on record; correct the Secret",
            reached.uid
        );
        let state = State::new(Truth::False, reason::IDENTITY_CHANGED, message);
        shared.facts.set(name, |facts| facts.resolved = state);
    }
    ours
}

/// One life of the reconciler.
struct Run {
    role: Role,
    look_again: Option<Boot>,
    first: Arc<DesiredState>,
}

/// Runs the reconciler for as long as the role and the verdict stand; `None` when they are to be looked
/// at again.
async fn reconcile(
    name: &str,
    shared: &Arc<Shared>,
    inputs: &mut Inputs,
    reached: &Reached,
    run: Run,
    stop: &CancellationToken,
) -> Option<ControlFlow<()>> {
    tracing::info!(member = %name, role = ?run.role, "acting as the member's proxy");
    let mut asks = shared.voices.open(name, VoiceId::Proxy, Boot::now());
    let mut complete = Some(0);
    let (desired, desired_rx) = watch::channel(run.first);
    let board = Arc::new(ReportBoard::default());
    let inner = CancellationToken::new();
    let home = name == names::SELF_CLUSTER;
    let member = Member {
        name: name.to_owned(),
        source_namespace: reached
            .origin
            .as_ref()
            .and_then(|origin| origin.namespace.clone()),
        client: reached.client.clone(),
        kubeconfig: reached.kubeconfig.clone(),
        // Two members that lead to one cluster must not take each other for themselves.
        holder: format!("{}/{name}", shared.holder),
        lease: match run.role {
            Role::Act => LeaseWish::Hold,
            Role::Observe | Role::Rest => LeaseWish::Observe,
        },
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
            () = stop.cancelled() => break Some(Break(())),
            changes = board.changes() => {
                shared.voices.say(name, VoiceId::Proxy, changes, complete.take(), Boot::now());
            }
            changed = asks.changed() => {
                if changed.is_err() { break Some(Break(())) }
                board.resend();
                complete = Some(*asks.borrow_and_update());
            }
            changed = inputs.slot.changed() => {
                if changed.is_err() { break Some(Break(())) }
                if let Some(slot) = inputs.slot.borrow_and_update().as_ref() {
                    desired.send_replace(Arc::clone(&slot.desired));
                }
            }
            changed = inputs.permit.changed() => {
                if changed.is_err() { break Some(Break(())) }
                let permit = inputs.permit.borrow_and_update().clone();
                if !permit.is_some_and(|permit| is_of(name, shared, reached, &permit)) { break None }
            }
            changed = inputs.presence.changed() => {
                if changed.is_err() { break Some(Break(())) }
                let presence = *inputs.presence.borrow_and_update();
                if role(presence, shared.grace, Boot::now()).0 != run.role { break None }
            }
            () = clock::sleep_until(run.look_again, Boot::now()) => break None,
            changed = inputs.access.changed() => {
                if changed.is_err() { break Some(Break(())) }
                let refused = match &*inputs.access.borrow_and_update() {
                    Access::Kubeconfig(_, Err(why)) => Some(why.clone()),
                    _ => None,
                };
                // Any other is taken up by starting anew.
                let Some(why) = refused else { break Some(Continue(())) };
                tracing::warn!(member = %name, reason = why.reason, problem = %why.message, "the member's new access is refused; the last good one stays in use");
                let state = State::new(Truth::False, why.reason, why.message);
                shared.facts.set(name, |facts| facts.resolved = state);
            }
        }
    };
    inner.cancel();
    // Until it has ended, its helm runs live and its Lease is held.
    if let Err(error) = running.await {
        tracing::error!(member = %name, %error, "the reconciler ended badly");
    }
    shared.voices.close(name, VoiceId::Proxy, Boot::now());
    ended
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hub_acts_only_where_no_agent_was_or_one_has_been_away_for_the_grace() {
        let at = |seconds| Boot(Duration::from_secs(seconds));
        let grace = Duration::from_secs(60);
        let cases = [
            (Presence::Never, (Role::Act, None)),
            (Presence::Ready, (Role::Rest, None)),
            (Presence::Away(at(100)), (Role::Rest, Some(at(130)))),
            (Presence::Away(at(71)), (Role::Rest, Some(at(101)))),
            (Presence::Away(at(70)), (Role::Observe, Some(at(130)))),
            (Presence::Away(at(41)), (Role::Observe, Some(at(101)))),
            (Presence::Away(at(40)), (Role::Act, None)),
        ];
        let short = Duration::from_secs(5);
        assert_eq!(
            role(Presence::Away(at(96)), short, at(100)),
            (Role::Rest, Some(at(101)))
        );
        for (presence, expected) in cases {
            assert_eq!(role(presence, grace, at(100)), expected, "{presence:?}");
        }
    }
}
