//! Reconciles one member through its kubeconfig, in place of an agent. It observes while an agent acts.

mod connect;
mod tunnel;

use std::ops::ControlFlow::{self, Break, Continue};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use krypton_reconciler::agent_presence::{Presence, ProxyRole, proxy_role};
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
use krypton_types::allowed_namespaces::AllowedNamespaces;
use krypton_types::conditions::{State, Truth, reason};
use krypton_types::desired::DesiredState;
use krypton_types::error_chain::chain;
use krypton_types::kubeconfig::{self, SanitizedKubeconfig};
use krypton_types::names;
use kube::Client;
use tokio::sync::{Semaphore, watch};
use tokio_util::sync::CancellationToken;
use tracing::Instrument as _;

use crate::discovery::{Origin, Sources, Unresolved};
use crate::home_events::HomeEvents;
use crate::members::MemberRegistry;
use crate::members::arbiter::ReporterId;
use crate::members::member::PublishedState;

use connect::MemberConnection;

pub use tunnel::Tunnels;

/// The way to reach a member.
#[derive(Clone, Debug)]
pub enum Access {
    /// The home cluster itself.
    Home(Box<kube::Config>),
    Kubeconfig(Origin, Result<Arc<SanitizedKubeconfig>, Unresolved>),
}

impl Access {
    /// Returns whether `connection` uses this access.
    fn is_used_by(&self, connection: &MemberConnection) -> bool {
        let origin = match self {
            Self::Kubeconfig(origin, _) => Some(origin),
            Self::Home(_) => None,
        };
        let used = connection.used();
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
pub struct ProxyInputs {
    pub access: watch::Receiver<Access>,
    pub permit: watch::Receiver<Permit>,
    pub published: watch::Receiver<Option<PublishedState>>,
    pub presence: watch::Receiver<Presence>,
    /// Namespaces on the home cluster whose Tenants may reference the member.
    pub allowed: watch::Receiver<AllowedNamespaces>,
}

/// Whether the hub may act on the member. By default, it may not.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Permit {
    pub may_act: bool,
    /// Whether this hub acts as the leader. A standby only observes, which avoids a cold start when it becomes leader.
    pub hub_acts: bool,
    /// UID of the recorded cluster; `None` accepts any cluster.
    pub cluster_uid: Option<String>,
}

/// Interval between two probes of a cluster where neither an agent nor this hub reconciles.
const PROBE_EVERY: Duration = Duration::from_secs(10);
const PROBE_DEADLINE: Duration = Duration::from_secs(5);
/// Interval at which a reconciling proxy checks that the cluster is still the same.
const IDENTITY_CHECK_EVERY: Duration = Duration::from_secs(60);
/// Retry delay for a refused access.
const REFUSED_RETRY: Duration = Duration::from_secs(60);
/// Number of failed probes in a row that make the cluster unreachable.
const PROBES_LOST_MAX: u32 = 2;

/// Runs the proxy of one member until `stop`. The last good client stays in use until the cluster has responded
/// to a newer one.
pub async fn run(
    name: String,
    shared: Arc<Shared>,
    mut inputs: ProxyInputs,
    stop: CancellationToken,
) {
    let proxy = Proxy { name, shared, stop };
    let mut access = inputs.access.clone();
    let mut connection: Option<MemberConnection> = None;
    loop {
        let next = match connection.take() {
            None => tokio::select! {
                () = proxy.stop.cancelled() => return,
                next = proxy.next_connection(&mut access, None) => next,
            },
            Some(current) => {
                let replaced = CancellationToken::new();
                let reconciling = proxy.reconcile_while_permitted(&mut inputs, &current, &replaced);
                tokio::pin!(reconciling);
                let ending = tokio::select! {
                    ending = &mut reconciling => Err(ending),
                    next = proxy.next_cluster(&mut access, &current) => Ok(next),
                };
                match ending {
                    Err(Break(())) => return,
                    // Another cluster responds: identify it again.
                    Err(Continue(())) => {
                        access.mark_changed();
                        continue;
                    }
                    Ok(next) => {
                        replaced.cancel();
                        if reconciling.await.is_break() {
                            return;
                        }
                        next
                    }
                }
            }
        };
        // The sender was dropped, so the fleet has shut down.
        let Some(next) = next else { return };
        connection = Some(next);
    }
}

/// The proxy of one member.
struct Proxy {
    name: String,
    shared: Arc<Shared>,
    stop: CancellationToken,
}

impl Proxy {
    /// Lets `current` take over each newer access of the same cluster. Returns the first access that it cannot take
    /// over, or `None` after the sender was dropped.
    async fn next_cluster(
        &self,
        access: &mut watch::Receiver<Access>,
        current: &MemberConnection,
    ) -> Option<MemberConnection> {
        loop {
            let next = self.next_connection(access, Some(current)).await?;
            if let Some(other) = current.take_over(next) {
                return Some(other);
            }
            tracing::info!(member = %self.name, "a newer kubeconfig of the same cluster is in use");
        }
    }

    /// Waits for an access other than the current one to which a cluster responds. Returns `None` after the sender
    /// was dropped. `current` is the last good access, if any.
    async fn next_connection(
        &self,
        access: &mut watch::Receiver<Access>,
        current: Option<&MemberConnection>,
    ) -> Option<MemberConnection> {
        let in_use = current.is_some();
        let mut reported: Option<Unresolved> = None;
        if in_use {
            access.changed().await.ok()?;
        }
        loop {
            let latest = access.get_and_update();
            // The refused access was reverted to the current one.
            if current.is_some_and(|current| latest.is_used_by(current)) {
                self.set_resolved(resolved_state());
                access.changed().await.ok()?;
                continue;
            }
            let result = match connect::prepare(&self.name, &self.shared, latest).await {
                Ok(connection) => {
                    if !in_use {
                        self.set_resolved(resolved_state());
                    }
                    let on_failure = |problem| self.report_unanswered(in_use, problem);
                    tokio::select! {
                        changed = access.changed() => { changed.ok()?; continue }
                        identity = connect::identify(&self.shared, &connection, on_failure) => Ok((connection, identity)),
                    }
                }
                Err(problem) => Err(problem),
            };
            match result {
                Ok((mut connection, identity)) => {
                    self.set_resolved(resolved_state());
                    self.shared.members.observe(&self.name, |observation| {
                        observation.kubernetes_version = Some(identity.kubernetes_version);
                        observation.access = connection.used().validity;
                    });
                    let link = State::new(Truth::True, reason::CONNECTED, "");
                    self.connection_attempted(link, Some(identity.uid.clone()));
                    connection.uid = identity.uid;
                    return Some(connection);
                }
                Err(problem) => {
                    if reported.as_ref() != Some(&problem) {
                        tracing::warn!(member = %self.name, reason = problem.reason, problem = %problem.message, in_use,
                            "rejected the member's access; keeping the last good one");
                    }
                    let state = State::new(Truth::False, problem.reason, problem.message.clone());
                    reported = Some(problem);
                    self.set_resolved(state.clone());
                    if !in_use {
                        // Other members that wait for this one's identity must not wait for a kubeconfig.
                        self.connection_attempted(state, None);
                    }
                    // Another access may succeed. So may a later attempt, if a certificate is not valid yet.
                    if let Ok(changed) = tokio::time::timeout(REFUSED_RETRY, access.changed()).await
                    {
                        changed.ok()?;
                    }
                }
            }
        }
    }

    fn set_resolved(&self, state: State) {
        let members = &self.shared.members;
        members.observe(&self.name, |observation| observation.resolved = state);
    }

    fn connection_attempted(&self, link: State, uid: Option<String>) {
        let members = &self.shared.members;
        members.connection_attempted(&self.name, link, uid, BootTime::now());
    }

    fn report_unanswered(&self, in_use: bool, problem: String) {
        if in_use {
            let message = format!(
                "no response to the new kubeconfig, so the last good one stays in use: {problem}"
            );
            self.set_resolved(State::new(Truth::False, reason::CLUSTER_STALE, message));
        } else {
            self.connection_attempted(connect::unreachable(problem), None);
        }
    }

    /// Reconciles while the hub may act on the member, until `stop` or until the client is `replaced`. Returns
    /// `Continue` if another cluster responds.
    async fn reconcile_while_permitted(
        &self,
        inputs: &mut ProxyInputs,
        connection: &MemberConnection,
        replaced: &CancellationToken,
    ) -> ControlFlow<()> {
        let mut failed_probes = 0;
        loop {
            let now = BootTime::now();
            let permit = inputs.permit.get_and_update();
            let may_act = self.is_recorded_cluster(connection, &permit) && permit.may_act;
            let presence = inputs.presence.get_and_update();
            let grace = self.shared.grace;
            let (role, recheck_at) = permitted_role(presence, permit.hub_acts, grace, now);
            let published = inputs.published.get_and_update();
            if let (true, Some(published), ProxyRole::Act | ProxyRole::Observe) =
                (may_act, published, role)
            {
                let run = ReconcilerRun {
                    role,
                    recheck_at,
                    desired: published.desired,
                };
                if let Some(end) = self.reconcile(inputs, connection, run, replaced).await {
                    return end;
                }
                continue;
            }
            tokio::select! {
                () = self.stop.cancelled() => return Break(()),
                () = replaced.cancelled() => return Continue(()),
                changed = inputs.permit.changed() => if changed.is_err() { return Break(()) },
                changed = inputs.published.changed() => if changed.is_err() { return Break(()) },
                changed = inputs.presence.changed() => if changed.is_err() { return Break(()) },
                () = clock::sleep_until(recheck_at, now) => {}
                uid = probe(&connection.client, PROBE_EVERY) => {
                    failed_probes = if uid.is_ok() { 0 } else { failed_probes + 1 };
                    if self.probed(connection, uid, failed_probes).is_break() {
                        return Continue(());
                    }
                }
            }
        }
    }

    /// Reports the state of the connection. Returns `Break` if another cluster responds.
    fn probed(
        &self,
        connection: &MemberConnection,
        uid: Result<String, ApiError>,
        failed_probes: u32,
    ) -> ControlFlow<()> {
        let link = match uid {
            Ok(uid) if uid != connection.uid => return Break(()),
            Ok(_) => State::new(Truth::True, reason::CONNECTED, ""),
            Err(_) if failed_probes < PROBES_LOST_MAX => return Continue(()),
            Err(error) => connect::unreachable(chain(&error)),
        };
        let members = &self.shared.members;
        members.set_connection(&self.name, Some(link), BootTime::now());
        Continue(())
    }

    /// Returns whether the reached cluster is the recorded one. An agent may run on the right cluster although the
    /// kubeconfig leads to another one.
    fn is_recorded_cluster(&self, connection: &MemberConnection, permit: &Permit) -> bool {
        let recorded = permit.cluster_uid.as_ref();
        let is_recorded = recorded.is_none_or(|recorded| *recorded == connection.uid);
        if is_recorded {
            self.shared.members.observe(&self.name, |observation| {
                if permit.may_act {
                    observation.uid = Some(connection.uid.clone());
                }
                // The EdgeCluster was recreated, so the other cluster is the right one now.
                if observation.resolved.reason == reason::IDENTITY_CHANGED {
                    observation.resolved = resolved_state();
                }
            });
        } else {
            let message = format!(
                "the cluster of the kubeconfig (UID {}) is not the recorded one; correct the kubeconfig, or, if you rebuilt the cluster, run 'kubectl krypton join {} --replace'",
                connection.uid, self.name
            );
            self.set_resolved(State::new(Truth::False, reason::IDENTITY_CHANGED, message));
        }
        is_recorded
    }

    /// Runs the reconciler while the role and the permit allow it. Returns `None` if the caller must evaluate them
    /// again.
    async fn reconcile(
        &self,
        inputs: &mut ProxyInputs,
        connection: &MemberConnection,
        mut run: ReconcilerRun,
        replaced: &CancellationToken,
    ) -> Option<ControlFlow<()>> {
        let (name, shared) = (&*self.name, &self.shared);
        tracing::info!(member = %name, role = ?run.role, "acting as the member's proxy");
        let mut report_requests = shared
            .members
            .open(name, ReporterId::Proxy, BootTime::now());
        let mut complete = Some(0);
        let (desired, desired_rx) = watch::channel(Arc::clone(&run.desired));
        let report_store = Arc::new(ReportStore::default());
        let run_stop = CancellationToken::new();
        let (lease_goal, lease_goal_rx) = watch::channel(match run.role {
            ProxyRole::Act => LeaseGoal::Hold,
            ProxyRole::Observe | ProxyRole::Idle => LeaseGoal::Observe,
        });
        let reconciler = run_loop::run(
            self.member(connection, lease_goal_rx, inputs.allowed.clone()),
            shared.tools.clone(),
            desired_rx,
            Arc::clone(&report_store),
            run_stop.clone(),
        );
        let task_name = format!("the reconciler of member {name}");
        let reconciler = shared.watchdog.watch(task_name, reconciler);
        let reconciler = tokio::spawn(reconciler.in_current_span());
        let replaced_cluster = until_cluster_replaced(&connection.client, &connection.uid);
        tokio::pin!(replaced_cluster);
        let outcome = loop {
            tokio::select! {
                () = &mut replaced_cluster => break Some(Continue(())),
                () = self.stop.cancelled() => break Some(Break(())),
                () = replaced.cancelled() => break Some(Continue(())),
                changes = report_store.changes() => {
                    shared.members.report(name, ReporterId::Proxy, changes, complete.take(), BootTime::now());
                }
                changed = report_requests.changed() => {
                    if changed.is_err() { break Some(Break(())) }
                    report_store.resend();
                    complete = Some(report_requests.get_and_update());
                }
                changed = inputs.published.changed() => {
                    if changed.is_err() { break Some(Break(())) }
                    if let Some(published) = inputs.published.get_and_update().as_ref() {
                        desired.send_replace(Arc::clone(&published.desired));
                    }
                }
                changed = inputs.permit.changed() => {
                    if changed.is_err() { break Some(Break(())) }
                    let permit = inputs.permit.get_and_update();
                    if !(self.is_recorded_cluster(connection, &permit) && permit.may_act) { break None }
                    if !run.may_continue(inputs, permit.hub_acts, shared.grace, &lease_goal) { break None }
                }
                changed = inputs.presence.changed() => {
                    if changed.is_err() { break Some(Break(())) }
                    let hub_acts = inputs.permit.get().hub_acts;
                    if !run.may_continue(inputs, hub_acts, shared.grace, &lease_goal) { break None }
                }
                () = clock::sleep_until(run.recheck_at, BootTime::now()) => {
                    let hub_acts = inputs.permit.get().hub_acts;
                    if !run.may_continue(inputs, hub_acts, shared.grace, &lease_goal) { break None }
                }
            }
        };
        run_stop.cancel();
        // The reconciler's Helm processes keep running and it holds its Lease until it has ended.
        if let Err(error) = reconciler.await {
            tracing::error!(member = %name, %error, "the reconciler failed");
        }
        shared
            .members
            .close(name, ReporterId::Proxy, BootTime::now());
        outcome
    }

    /// The inputs of the reconciler.
    fn member(
        &self,
        connection: &MemberConnection,
        lease_goal: watch::Receiver<LeaseGoal>,
        allowed_on_home: watch::Receiver<AllowedNamespaces>,
    ) -> Member {
        let (name, shared) = (&self.name, &self.shared);
        let is_home = name == names::SELF_CLUSTER;
        let used = connection.used();
        let origin = used.origin.as_ref();
        Member {
            name: name.clone(),
            source_namespace: origin.and_then(|origin| origin.namespace.clone()),
            client: connection.client.clone(),
            helm_client: connection.helm_client.clone(),
            kubeconfig: connection.kubeconfig().to_owned(),
            // Two members of one cluster must have different holder names.
            holder: format!("{}/{name}", shared.holder),
            lease_goal,
            instance: shared.instance.clone(),
            program: names::HUB_MANAGER,
            status_mode: match is_home {
                true => StatusMode::Report,
                false => StatusMode::Write,
            },
            namespaces: shared.watch_namespaces.clone().filter(|_| is_home),
            // On an edge cluster, the allowed namespaces apply to the edge's own Tenants.
            allowed_namespaces: match is_home {
                true => allowed_on_home,
                false => watch::channel(AllowedNamespaces::default()).1,
            },
            retry_max: shared.retry_max,
            policy: shared.policy.clone(),
            on_excess: origin.map(|_| connect::oversize_reporter(name, shared)),
        }
    }
}

fn resolved_state() -> State {
    State::new(Truth::True, reason::RESOLVED, "")
}

/// Waits until another cluster responds at the member's address. It was rebuilt behind the same name and
/// credential.
async fn until_cluster_replaced(client: &Client, uid: &str) {
    loop {
        let answering_uid = probe(client, IDENTITY_CHECK_EVERY).await;
        if answering_uid.is_ok_and(|answering_uid| answering_uid != uid) {
            return;
        }
    }
}

/// Returns the UID of the cluster that responds after a pause of `after`, plus or minus a fifth.
async fn probe(client: &Client, after: Duration) -> Result<String, ApiError> {
    tokio::time::sleep(after.mul_f64(0.8 + 0.4 * chance::random::<f64>())).await;
    cluster::uid(client, PROBE_DEADLINE).await
}

/// A standby never acts.
fn permitted_role(
    presence: Presence,
    hub_acts: bool,
    grace: Duration,
    now: BootTime,
) -> (ProxyRole, Option<BootTime>) {
    match proxy_role(presence, grace, now) {
        (ProxyRole::Act, recheck_at) if !hub_acts => (ProxyRole::Observe, recheck_at),
        role => role,
    }
}

/// One run of the reconciler.
struct ReconcilerRun {
    role: ProxyRole,
    recheck_at: Option<BootTime>,
    desired: Arc<DesiredState>,
}

impl ReconcilerRun {
    /// Returns whether this run can continue with the current presence. An observing run may start to act with its
    /// knowledge of the Lease, but an acting run cannot return to observing.
    fn may_continue(
        &mut self,
        inputs: &mut ProxyInputs,
        hub_acts: bool,
        grace: Duration,
        lease_goal: &watch::Sender<LeaseGoal>,
    ) -> bool {
        let presence = inputs.presence.get_and_update();
        let (next, recheck_at) = permitted_role(presence, hub_acts, grace, BootTime::now());
        self.recheck_at = recheck_at;
        match (self.role, next) {
            (current, next) if current == next => true,
            (ProxyRole::Observe, ProxyRole::Act) => {
                self.role = next;
                lease_goal.send_replace(LeaseGoal::Hold);
                true
            }
            _ => false,
        }
    }
}
