//! Reconciles one member through its kubeconfig, in place of an agent. It observes while an agent acts.

mod connect;
mod tunnel;

use std::ops::ControlFlow::{self, Break, Continue};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use krypton_reconciler::agent_presence::{Presence, Role, role};
use krypton_reconciler::plan::Policy;
use krypton_reconciler::report_store::ReportStore;
use krypton_reconciler::run_loop::{self, Member, StatusMode, Tools};
use krypton_runtime::access::ServiceAccount;
use krypton_runtime::call::ApiError;
use krypton_runtime::chance;
use krypton_runtime::clock::{self, BootTime};
use krypton_runtime::cluster;
use krypton_runtime::lease::LeaseGoal;
use krypton_runtime::newest::{Newest as _, NewestSeen as _};
use krypton_runtime::watchdog::Watchdog;
use krypton_types::allowed_namespaces::Allowed;
use krypton_types::conditions::{State, Truth, reason};
use krypton_types::desired::DesiredState;
use krypton_types::error_chain::chain;
use krypton_types::kubeconfig::{self, Sanitized};
use krypton_types::names;
use kube::Client;
use tokio::sync::{Semaphore, watch};
use tokio_util::sync::CancellationToken;
use tracing::Instrument as _;

use crate::discovery::{Origin, Sources, Unresolved};
use crate::members::MemberRegistry;
use crate::members::arbiter::ReporterId;
use crate::members::member::PublishedState;
use crate::notices::HomeEvents;

use connect::Reached;

pub use tunnel::{TunnelError, Tunnels};

/// The way to reach a member.
#[derive(Clone, Debug)]
pub enum Access {
    /// The home cluster itself.
    Home(Box<kube::Config>),
    Kubeconfig(Origin, Result<Arc<Sanitized>, Unresolved>),
}

impl Access {
    /// Returns whether `reached` uses this access.
    fn leads_to(&self, reached: &Reached) -> bool {
        let origin = match self {
            Self::Kubeconfig(origin, _) => Some(origin),
            Self::Home(_) => None,
        };
        let used = reached.used();
        self.digest() == Some(&used.digest) && origin == used.origin.as_ref()
    }

    /// Digest of the kubeconfig that the client is built from.
    fn digest(&self) -> Option<&String> {
        match self {
            Self::Kubeconfig(_, Ok(sanitized)) => Some(&sanitized.digest),
            Self::Home(_) | Self::Kubeconfig(_, Err(_)) => None,
        }
    }
}

/// State that all proxies share.
pub struct Shared {
    pub tools: Tools,
    pub members: Arc<MemberRegistry>,
    /// Time for which an agent must have been away before the hub acts on its member.
    pub grace: Duration,
    pub scratch: PathBuf,
    /// The service account that Helm uses on the home cluster.
    pub helm_account: Option<ServiceAccount>,
    pub notices: HomeEvents,
    pub holder: String,
    pub instance: String,
    pub policy: Policy,
    pub retry_max: Duration,
    pub allow_chart_skip: bool,
    pub watch_namespaces: Option<std::collections::BTreeSet<String>>,
    pub sources: watch::Receiver<Sources>,
    /// Restrictions on the content of kubeconfigs.
    pub kubeconfig_policy: kubeconfig::Policy,
    /// Tunnels through which Helm reaches members.
    pub tunnels: Tunnels,
    /// Limits concurrent identification of members, because dialing a whole fleet simultaneously overloads the
    /// hub.
    pub connecting: Semaphore,
    pub watchdog: Watchdog,
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared")
            .field("holder", &self.holder)
            .finish_non_exhaustive()
    }
}

/// Inputs that a proxy watches.
#[derive(Clone, Debug)]
pub struct Inputs {
    pub access: watch::Receiver<Access>,
    pub permit: watch::Receiver<Permit>,
    pub published: watch::Receiver<Option<PublishedState>>,
    pub presence: watch::Receiver<Presence>,
    /// Namespaces on the home cluster whose Tenants may reference the member.
    pub allowed: watch::Receiver<Allowed>,
}

/// Whether the hub may act on the member. By default, it may not.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Permit {
    pub may_act: bool,
    /// Whether this hub leads. A standby only observes, which avoids a cold start when it becomes leader.
    pub acts: bool,
    /// UID of the recorded cluster; `None` accepts any cluster.
    pub cluster_uid: Option<String>,
}

/// Interval between two probes of a cluster where neither an agent nor this hub reconciles.
const PROBE_EVERY: Duration = Duration::from_secs(10);
const PROBE_DEADLINE: Duration = Duration::from_secs(5);
/// Interval at which a reconciling proxy checks that the cluster is still the same.
const SAME_EVERY: Duration = Duration::from_secs(60);
/// Retry delay for a refused access.
const REFUSED_AGAIN: Duration = Duration::from_secs(60);
/// Number of failed probes in a row that make the cluster unreachable.
const PROBES_LOST: u32 = 2;

/// Runs the proxy of one member until `stop`. The last good client stays in use until the cluster has responded
/// to a newer one.
pub async fn run(name: String, shared: Arc<Shared>, mut inputs: Inputs, stop: CancellationToken) {
    let mut access = inputs.access.clone();
    let mut good: Option<Arc<Reached>> = None;
    loop {
        let newer = match good.clone() {
            None => tokio::select! {
                () = stop.cancelled() => return,
                newer = newer(&name, &shared, &mut access, None) => newer,
            },
            Some(current) => {
                let replaced = CancellationToken::new();
                let acting = act(&name, &shared, &mut inputs, &current, &stop, &replaced);
                tokio::pin!(acting);
                let end = tokio::select! {
                    end = &mut acting => Err(end),
                    newer = successor(&name, &shared, &mut access, &current) => Ok(newer),
                };
                match end {
                    Err(Break(())) => return,
                    // Another cluster responds: identify it again.
                    Err(Continue(())) => {
                        good = None;
                        access.mark_changed();
                        continue;
                    }
                    Ok(newer) => {
                        replaced.cancel();
                        if acting.await.is_break() {
                            return;
                        }
                        newer
                    }
                }
            }
        };
        // The sender was dropped, so the fleet has shut down.
        let Some(newer) = newer else { return };
        good = Some(Arc::new(newer));
    }
}

/// Lets `current` take over each newer access of the same cluster. Returns the first access that it cannot take
/// over, or `None` after the sender was dropped.
async fn successor(
    name: &str,
    shared: &Arc<Shared>,
    access: &mut watch::Receiver<Access>,
    current: &Reached,
) -> Option<Reached> {
    loop {
        let newer = newer(name, shared, access, Some(current)).await?;
        if let Some(other) = current.take_over(newer) {
            return Some(other);
        }
        tracing::info!(member = %name, "a newer kubeconfig of the same cluster is in use");
    }
}

/// Waits for an access other than the current one to which a cluster responds. Returns `None` after the sender
/// was dropped. `current` is the last good access, if any.
async fn newer(
    name: &str,
    shared: &Arc<Shared>,
    access: &mut watch::Receiver<Access>,
    current: Option<&Reached>,
) -> Option<Reached> {
    let in_use = current.is_some();
    let mut told: Option<Unresolved> = None;
    if in_use {
        access.changed().await.ok()?;
    }
    loop {
        let wanted = access.see();
        // The refused access was reverted to the current one.
        if current.is_some_and(|current| wanted.leads_to(current)) {
            resolved(name, shared, is_resolved());
            access.changed().await.ok()?;
            continue;
        }
        let found = match connect::reach(name, shared, wanted).await {
            Ok(reached) => {
                if !in_use {
                    resolved(name, shared, is_resolved());
                }
                let failed = |problem| say_unanswered(name, shared, in_use, problem);
                tokio::select! {
                    changed = access.changed() => { changed.ok()?; continue }
                    answer = connect::identify(shared, &reached, failed) => Ok((reached, answer)),
                }
            }
            Err(why) => Err(why),
        };
        match found {
            Ok((mut reached, answer)) => {
                resolved(name, shared, is_resolved());
                shared.members.observe(name, |facts| {
                    facts.kubernetes_version = Some(answer.kubernetes_version);
                    facts.access = reached.used().validity;
                });
                let link = State::new(Truth::True, reason::CONNECTED, "");
                let uid = Some(answer.uid.clone());
                shared.members.dialed(name, link, uid, BootTime::now());
                reached.uid = answer.uid;
                return Some(reached);
            }
            Err(why) => {
                if told.as_ref() != Some(&why) {
                    tracing::warn!(member = %name, reason = why.reason, problem = %why.message, in_use,
                    "rejected the member's access; keeping the last good one");
                }
                let state = State::new(Truth::False, why.reason, why.message.clone());
                told = Some(why);
                resolved(name, shared, state.clone());
                if !in_use {
                    // Other members that wait for this one's identity must not wait for a kubeconfig.
                    shared.members.dialed(name, state, None, BootTime::now());
                }
                // Another access may succeed. So may a later attempt, if a certificate is not valid yet.
                if let Ok(changed) = tokio::time::timeout(REFUSED_AGAIN, access.changed()).await {
                    changed.ok()?;
                }
            }
        }
    }
}

fn is_resolved() -> State {
    State::new(Truth::True, reason::RESOLVED, "")
}

fn resolved(name: &str, shared: &Shared, state: State) {
    shared.members.observe(name, |facts| facts.resolved = state);
}

fn say_unanswered(name: &str, shared: &Shared, in_use: bool, problem: String) {
    if in_use {
        let message =
            format!("the last good client stays in use, as the new one is not answered: {problem}");
        let state = State::new(Truth::False, reason::CLUSTER_STALE, message);
        resolved(name, shared, state);
    } else {
        let link = connect::unreachable(problem);
        shared.members.dialed(name, link, None, BootTime::now());
    }
}

/// Reconciles while the hub may act on the member, until `stop` or until the client is `replaced`. Returns
/// `Continue` if another cluster responds.
async fn act(
    name: &str,
    shared: &Arc<Shared>,
    inputs: &mut Inputs,
    reached: &Reached,
    stop: &CancellationToken,
    replaced: &CancellationToken,
) -> ControlFlow<()> {
    let mut lost = 0;
    loop {
        let now = BootTime::now();
        let permit = inputs.permit.see();
        let may_act = is_of(name, shared, reached, &permit) && permit.may_act;
        let presence = inputs.presence.see();
        let (role, look_again) = role_of(presence, permit.acts, shared.grace, now);
        let published = inputs.published.see();
        if let (true, Some(published), Role::Act | Role::Observe) = (may_act, published, role) {
            let run = Run {
                role,
                look_again,
                first: published.desired,
            };
            if let Some(end) = reconcile(name, shared, inputs, reached, run, (stop, replaced)).await
            {
                return end;
            }
            continue;
        }
        tokio::select! {
            () = stop.cancelled() => return Break(()),
            () = replaced.cancelled() => return Continue(()),
            changed = inputs.permit.changed() => if changed.is_err() { return Break(()) },
            changed = inputs.published.changed() => if changed.is_err() { return Break(()) },
            changed = inputs.presence.changed() => if changed.is_err() { return Break(()) },
            () = clock::sleep_until(look_again, now) => {}
            uid = probe(&reached.client, PROBE_EVERY) => {
                lost = if uid.is_ok() { 0 } else { lost + 1 };
                if probed(name, shared, reached, uid, lost).is_break() {
                    return Continue(());
                }
            }
        }
    }
}

/// Waits until another cluster responds at the member's address. It was rebuilt behind the same name and
/// credential.
async fn another_answers(client: &Client, uid: &str) {
    loop {
        let found = probe(client, SAME_EVERY).await;
        if found.is_ok_and(|found| found != uid) {
            return;
        }
    }
}

/// Returns the UID of the cluster that responds after a pause of `after`, plus or minus a fifth.
async fn probe(client: &Client, after: Duration) -> Result<String, ApiError> {
    tokio::time::sleep(after.mul_f64(0.8 + 0.4 * chance::random::<f64>())).await;
    cluster::uid(client, PROBE_DEADLINE).await
}

/// Reports the state of the connection. Returns `Break` if another cluster responds.
fn probed(
    name: &str,
    shared: &Shared,
    reached: &Reached,
    uid: Result<String, ApiError>,
    lost: u32,
) -> ControlFlow<()> {
    let link = match uid {
        Ok(uid) if uid != reached.uid => return Break(()),
        Ok(_) => State::new(Truth::True, reason::CONNECTED, ""),
        Err(_) if lost < PROBES_LOST => return Continue(()),
        Err(error) => connect::unreachable(chain(&error)),
    };
    shared.members.link(name, Some(link), BootTime::now());
    Continue(())
}

/// Returns whether the reached cluster is the recorded one. An agent may run on the right cluster although the
/// kubeconfig leads to another one.
fn is_of(name: &str, shared: &Shared, reached: &Reached, permit: &Permit) -> bool {
    let ours = match &permit.cluster_uid {
        None => true,
        Some(recorded) => *recorded == reached.uid,
    };
    if ours {
        shared.members.observe(name, |facts| {
            if permit.may_act {
                facts.uid = Some(reached.uid.clone());
            }
            // The EdgeCluster was recreated, so the other cluster is the right one now.
            if facts.resolved.reason == reason::IDENTITY_CHANGED {
                facts.resolved = is_resolved();
            }
        });
    } else {
        let message = format!(
            "the kubeconfig leads to another cluster (UID {}) than the recorded one; correct the kubeconfig, or, if the cluster was rebuilt, run 'kubectl krypton join {name} --replace'",
            reached.uid
        );
        resolved(
            name,
            shared,
            State::new(Truth::False, reason::IDENTITY_CHANGED, message),
        );
    }
    ours
}

/// A standby never acts.
fn role_of(
    presence: Presence,
    acts: bool,
    grace: Duration,
    now: BootTime,
) -> (Role, Option<BootTime>) {
    match role(presence, grace, now) {
        (Role::Act, look_again) if !acts => (Role::Observe, look_again),
        role => role,
    }
}

/// One run of the reconciler.
struct Run {
    role: Role,
    look_again: Option<BootTime>,
    first: Arc<DesiredState>,
}

impl Run {
    /// Returns whether this run can continue with the current presence. An observing run may start to act with
    /// its knowledge of the Lease, but an acting run cannot return to observing.
    fn goes_on(
        &mut self,
        presence: Presence,
        acts: bool,
        grace: Duration,
        wish: &watch::Sender<LeaseGoal>,
    ) -> bool {
        let (next, look_again) = role_of(presence, acts, grace, BootTime::now());
        self.look_again = look_again;
        match (self.role, next) {
            (before, next) if before == next => true,
            (Role::Observe, Role::Act) => {
                self.role = next;
                wish.send_replace(LeaseGoal::Hold);
                true
            }
            _ => false,
        }
    }
}

/// Runs the reconciler while the role and the permit allow it. Returns `None` if the caller must evaluate them
/// again.
async fn reconcile(
    name: &str,
    shared: &Arc<Shared>,
    inputs: &mut Inputs,
    reached: &Reached,
    mut run: Run,
    (stop, replaced): (&CancellationToken, &CancellationToken),
) -> Option<ControlFlow<()>> {
    tracing::info!(member = %name, role = ?run.role, "acting as the member's proxy");
    let mut asks = shared
        .members
        .open(name, ReporterId::Proxy, BootTime::now());
    let mut complete = Some(0);
    let (desired, desired_rx) = watch::channel(Arc::clone(&run.first));
    let report_store = Arc::new(ReportStore::default());
    let inner = CancellationToken::new();
    let home = name == names::SELF_CLUSTER;
    let (wish, wishes) = watch::channel(match run.role {
        Role::Act => LeaseGoal::Hold,
        Role::Observe | Role::Rest => LeaseGoal::Observe,
    });
    let member = Member {
        name: name.to_owned(),
        source_namespace: reached
            .used()
            .origin
            .as_ref()
            .and_then(|origin| origin.namespace.clone()),
        client: reached.client.clone(),
        helm_client: reached.helm_client.clone(),
        kubeconfig: reached.kubeconfig().to_owned(),
        // Two members of one cluster must have different holder names.
        holder: format!("{}/{name}", shared.holder),
        lease: wishes,
        instance: shared.instance.clone(),
        status: if home {
            StatusMode::Report
        } else {
            StatusMode::Write
        },
        namespaces: shared.watch_namespaces.clone().filter(|_| home),
        // On an edge cluster, the allowed namespaces apply to the edge's own Tenants.
        allowed: match home {
            true => inputs.allowed.clone(),
            false => watch::channel(Allowed::default()).1,
        },
        retry_max: shared.retry_max,
        policy: shared.policy.clone(),
        beyond: reached
            .used()
            .origin
            .as_ref()
            .map(|_| connect::report_to(name, shared)),
    };
    let running = run_loop::run(
        member,
        shared.tools.clone(),
        desired_rx,
        Arc::clone(&report_store),
        inner.clone(),
    );
    let watched = format!("the reconciler of member {name}");
    let running = shared.watchdog.watch(watched, running);
    let running = tokio::spawn(running.in_current_span());
    let another = another_answers(&reached.client, &reached.uid);
    tokio::pin!(another);
    let ended = loop {
        tokio::select! {
            () = &mut another => break Some(Continue(())),
            () = stop.cancelled() => break Some(Break(())),
            () = replaced.cancelled() => break Some(Continue(())),
            changes = report_store.changes() => {
                shared.members.report(name, ReporterId::Proxy, changes, complete.take(), BootTime::now());
            }
            changed = asks.changed() => {
                if changed.is_err() { break Some(Break(())) }
                report_store.resend();
                complete = Some(asks.see());
            }
            changed = inputs.published.changed() => {
                if changed.is_err() { break Some(Break(())) }
                if let Some(published) = inputs.published.see().as_ref() {
                    desired.send_replace(Arc::clone(&published.desired));
                }
            }
            changed = inputs.permit.changed() => {
                if changed.is_err() { break Some(Break(())) }
                let permit = inputs.permit.see();
                if !(is_of(name, shared, reached, &permit) && permit.may_act) { break None }
                let presence = inputs.presence.get();
                if !run.goes_on(presence, permit.acts, shared.grace, &wish) { break None }
            }
            changed = inputs.presence.changed() => {
                if changed.is_err() { break Some(Break(())) }
                let presence = inputs.presence.see();
                let acts = inputs.permit.get().acts;
                if !run.goes_on(presence, acts, shared.grace, &wish) { break None }
            }
            () = clock::sleep_until(run.look_again, BootTime::now()) => {
                let (presence, acts) = (inputs.presence.get(), inputs.permit.get().acts);
                if !run.goes_on(presence, acts, shared.grace, &wish) { break None }
            }
        }
    };
    inner.cancel();
    // The reconciler's Helm processes keep running and it holds its Lease until it has ended.
    if let Err(error) = running.await {
        tracing::error!(member = %name, %error, "the reconciler ended badly");
    }
    shared
        .members
        .close(name, ReporterId::Proxy, BootTime::now());
    ended
}
