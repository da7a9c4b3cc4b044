//! Reports of all members in, the status of home's Tenants out. On home nobody else writes it
//! (design §3, rule 10).

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures::StreamExt;
use jiff::Timestamp;
use krypton_agent::clock::{self, Boot};
use krypton_agent::effect;
use krypton_agent::fence::Hold;
use krypton_agent::index::tenant_key;
use krypton_agent::watch_backoff::listed_anew;
use krypton_common::account::{self, AccountDigest};
use krypton_common::allowed::Allowed;
use krypton_common::conditions::{self, ClusterState, State, Truth, reason};
use krypton_common::names;
use krypton_common::tenant::{TenantKey, TenantReport};
use krypton_crds::tenant::{Tenant, TenantStatus};
use kube::Client;
use kube::api::{Api, Patch, PatchParams};
use kube::core::DeserializeGuard;
use kube::runtime::watcher::{Config, Event, watcher};
use tokio::sync::{Notify, watch};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use krypton_common::error_chain::chain;

const DEADLINE: Duration = Duration::from_secs(10);
/// Two writes of one Tenant's status are at least so far apart.
const PACE: Duration = Duration::from_secs(1);
/// Status writes in flight: beyond it they wait, and a later report replaces an earlier one.
const WRITERS: usize = 8;
/// A member that has not been heard for this long after its beginning is unheard.
const START_GRACE: Duration = Duration::from_secs(45);

/// Tenants that are kept of one member: ten times what one cluster is meant for.
pub const TENANTS_MAX: usize = 10_000;

/// How a member stands, as far as its reports go.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Hearing {
    /// On its way, since the hub or the member's proxy was started.
    #[default]
    NotYet,
    /// It reports all it has.
    Full,
    /// It has fallen silent: why.
    Silent(String),
}

#[derive(Debug, Default)]
struct MemberReports {
    hearing: Hearing,
    /// When it was last begun with.
    begun: Boot,
    tenants: BTreeMap<TenantKey, TenantReport>,
    /// What was reported since: the rest goes once the member has said all it has.
    fresh: BTreeSet<TenantKey>,
    /// It has said all it has since it was begun with.
    whole: bool,
    digest: AccountDigest,
}

#[derive(Debug, Default)]
struct Board {
    members: BTreeMap<String, MemberReports>,
    /// What Tenants may name; `None` until the EdgeClusters are known.
    targets: Option<Arc<Targets>>,
    dirty: BTreeSet<TenantKey>,
    all_dirty: bool,
}

/// All members, by name.
pub type Targets = BTreeMap<String, Target>;

/// A member, as far as it concerns a Tenant that names it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Target {
    pub allowed: Allowed,
    /// `TargetClusterResolved` of its EdgeCluster.
    pub resolved: Option<State>,
}

/// Changes, with what each adds to the digest: made before any lock is taken.
#[derive(Debug)]
pub struct Changed(BTreeMap<TenantKey, Option<(TenantReport, u128)>>);

impl Changed {
    pub fn new(changes: BTreeMap<TenantKey, Option<TenantReport>>) -> Self {
        let with_part = |(key, report): (TenantKey, Option<TenantReport>)| {
            let change = report.map(|report| {
                let part = account::part(&key, &report);
                (report, part)
            });
            (key, change)
        };
        Self(changes.into_iter().map(with_part).collect())
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// The newest reports of all members, a slot for each Tenant of each.
#[derive(Debug, Default)]
pub struct Reports {
    state: Mutex<Board>,
    changed: Notify,
}

impl Reports {
    /// Takes in one member's changes. False when there are more Tenants than are kept of one.
    pub fn report(&self, member: &str, changes: Changed) -> bool {
        let mut state = self.lock();
        let board = &mut *state;
        let reports = board.members.entry(member.to_owned()).or_default();
        for (key, change) in changes.0 {
            reports
                .digest
                .set_part(&key, change.as_ref().map(|(_, part)| *part));
            match change {
                Some((report, _)) => {
                    if !reports.whole {
                        reports.fresh.insert(key.clone());
                    }
                    reports.tenants.insert(key.clone(), report);
                }
                None => {
                    reports.tenants.remove(&key);
                }
            }
            board.dirty.insert(key);
        }
        let kept = reports.tenants.len() <= TENANTS_MAX;
        drop(state);
        self.changed.notify_one();
        kept
    }

    pub fn hearing(&self, member: &str, hearing: Hearing) {
        let mut state = self.lock();
        let reports = state.members.entry(member.to_owned()).or_default();
        if reports.hearing != hearing {
            if hearing == Hearing::Full {
                let fresh = std::mem::take(&mut reports.fresh);
                if !reports.whole {
                    reports.tenants.retain(|key, _| fresh.contains(key));
                    reports.digest.retain(|key| fresh.contains(key));
                    reports.whole = true;
                }
            }
            reports.hearing = hearing;
            state.all_dirty = true;
            drop(state);
            self.changed.notify_one();
        }
    }

    /// What Tenants may name, by what all EdgeClusters say.
    pub fn aim(&self, targets: Targets) {
        let mut state = self.lock();
        if state.targets.as_deref() != Some(&targets) {
            state.targets = Some(Arc::new(targets));
            state.all_dirty = true;
            drop(state);
            self.changed.notify_one();
        }
    }

    fn targets(&self) -> Option<Arc<Targets>> {
        self.lock().targets.clone()
    }

    /// A member begins anew: what it has said stands until it has said all again.
    pub fn begin(&self, member: &str, now: Boot) {
        let mut state = self.lock();
        let reports = state.members.entry(member.to_owned()).or_default();
        reports.hearing = Hearing::NotYet;
        reports.begun = now;
        reports.fresh.clear();
        reports.whole = false;
        state.all_dirty = true;
        drop(state);
        self.changed.notify_one();
    }

    /// How many Tenants the member has reported, and the digest of all that it has said of them; `None`
    /// until it has said all.
    pub fn digest(&self, member: &str) -> Option<(u64, u128)> {
        let state = self.lock();
        let reports = state.members.get(member)?;
        reports.whole.then(|| reports.digest.value())
    }

    /// How many of a member's Tenants say that their release has gone with the member; `None` until it has
    /// said all.
    pub fn retired(&self, member: &str) -> Option<Retired> {
        let state = self.lock();
        let reports = state.members.get(member)?;
        if !reports.whole || reports.hearing != Hearing::Full {
            return None;
        }
        let tenants = reports.tenants.values();
        let gone = tenants.filter(|report| report.state.ready.reason == reason::UNINSTALLED);
        Some(Retired {
            tenants: reports.tenants.len(),
            gone: gone.count(),
        })
    }

    /// Tenants of a member by phase: all, ready, pending, error.
    pub fn counts(&self, member: &str) -> Counts {
        let state = self.lock();
        let mut counts = Counts::default();
        for report in state
            .members
            .get(member)
            .into_iter()
            .flat_map(|found| found.tenants.values())
        {
            let one = [(String::new(), report.state.clone())].into();
            counts.total += 1;
            match conditions::summarise(&one, false).phase {
                conditions::Phase::Ready => counts.ready += 1,
                conditions::Phase::Pending => counts.pending += 1,
                conditions::Phase::Error => counts.error += 1,
            }
        }
        counts
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Board> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What the members say of one Tenant.
    fn of(&self, key: &TenantKey, now: Boot) -> BTreeMap<String, Saying> {
        self.lock()
            .members
            .iter()
            .map(|(name, member)| {
                let saying = Saying {
                    hearing: member.hearing.clone(),
                    report: member.tenants.get(key).cloned(),
                    patient: now.since(member.begun) < START_GRACE,
                };
                (name.clone(), saying)
            })
            .collect()
    }

    /// When the patience with the next member that is on its way ends.
    fn patience_ends(&self, now: Boot) -> Option<Boot> {
        let state = self.lock();
        let waiting = state
            .members
            .values()
            .filter(|member| member.hearing == Hearing::NotYet);
        waiting
            .map(|member| Boot(member.begun.0 + START_GRACE))
            .filter(|at| *at > now)
            .min()
    }
}

/// Tenants of a member that leaves with its releases, and how many of them are done with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Retired {
    pub tenants: usize,
    pub gone: usize,
}

/// What one member says of one Tenant.
#[derive(Clone, Debug)]
struct Saying {
    hearing: Hearing,
    report: Option<TenantReport>,
    /// It is on its way, and not yet late.
    patient: bool,
}

/// Tenants of a member by phase.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    pub total: u32,
    pub ready: u32,
    pub pending: u32,
    pub error: u32,
}

/// What holds for all of home's Tenants.
#[derive(Clone, Debug)]
pub struct Rules {
    pub self_cluster: bool,
    pub allow_chart_skip: bool,
    /// Only these namespaces; `None` for all.
    pub namespaces: Option<BTreeSet<String>>,
}

/// The status of one of home's Tenants, out of what its members say. `patient` while members may
/// still be on their way after the hub's start.
fn aggregated(
    tenant: &Tenant,
    said: &BTreeMap<String, Saying>,
    targets: Option<&Targets>,
    rules: &Rules,
    patient: bool,
    now: Timestamp,
) -> TenantStatus {
    let mut next = tenant.status.clone().unwrap_or_default();
    let generation = tenant.metadata.generation.unwrap_or_default();
    let own = rules.self_cluster
        && tenant
            .names_member()
            .is_none_or(|member| member == names::SELF_CLUSTER);
    // Its members are those that have last reported it: the conditions themselves remember.
    let mut before = conditions::clusters(&next.conditions);
    let departed: BTreeSet<String> = before.keys().cloned().collect();
    let mut clusters: BTreeMap<String, ClusterState> = BTreeMap::new();
    let mut charts = BTreeSet::new();
    let refusal = refusal(tenant, targets);
    if targets.is_some() {
        // It was our word, not the member's.
        before.retain(|_, state| state.ready.reason != reason::NAMESPACE_NOT_ALLOWED);
    }
    let names: BTreeSet<&String> = before.keys().chain(said.keys()).collect();
    for name in names {
        let (hearing, report, patient) = match said.get(name) {
            Some(saying) => (
                saying.hearing.clone(),
                saying.report.as_ref(),
                saying.patient,
            ),
            None => (Hearing::NotYet, None, patient),
        };
        if name == names::SELF_CLUSTER && !own {
            continue;
        }
        // It is not asked.
        if refusal.as_ref().is_some_and(|(refused, _)| refused == name) {
            continue;
        }
        let state = match (&hearing, report, before.get(name)) {
            (Hearing::NotYet, Some(report), _) if !patient => Some(unheard(
                &report.state,
                "it has begun anew and not said all again",
            )),
            (Hearing::Full | Hearing::NotYet, Some(report), _) => {
                charts.insert(report.applied_chart.clone());
                Some(report.state.clone())
            }
            // It says all it has, and this is not among it.
            (Hearing::Full, None, _) => None,
            (Hearing::Silent(why), Some(report), _) => Some(unheard(&report.state, why)),
            (Hearing::Silent(why), None, Some(before)) => Some(unheard(before, why)),
            (Hearing::NotYet, None, Some(before)) if patient => Some(before.clone()),
            (Hearing::NotYet, None, Some(before)) => {
                Some(unheard(before, "not heard since the hub was started"))
            }
            (_, None, None) => None,
        };
        clusters.extend(state.map(|state| (name.clone(), state)));
    }
    if targets.is_some() || tenant.names_member().is_none() {
        match resolved(tenant, refusal.as_ref(), targets) {
            Some(state) => conditions::set(
                &mut next.conditions,
                conditions::TARGET_RESOLVED,
                &state,
                generation,
                now,
            ),
            None => conditions::remove(&mut next.conditions, conditions::TARGET_RESOLVED),
        };
    }
    if let Some((member, ready)) = refusal {
        let refused = ClusterState {
            ready,
            progress: None,
            error: None,
        };
        clusters.insert(member.to_owned(), refused);
    }
    if own && !clusters.contains_key(names::SELF_CLUSTER) {
        let message = "the home cluster has not reported this Tenant yet";
        let ready = State::new(Truth::Unknown, reason::NOT_READY, message);
        let waiting = ClusterState {
            ready,
            progress: None,
            error: None,
        };
        clusters.insert(names::SELF_CLUSTER.to_owned(), waiting);
    }
    for departed in departed.iter().filter(|name| !clusters.contains_key(*name)) {
        conditions::remove_cluster(&mut next.conditions, departed);
    }
    for (name, state) in &clusters {
        conditions::set_cluster(&mut next.conditions, name, state, generation, now);
    }
    let mut summary = conditions::summarise(&clusters, rules.allow_chart_skip);
    if let (true, Some(member)) = (clusters.is_empty(), tenant.names_member()) {
        let message = format!(
            "clusterRef names {member}, which has not reported a Tenant of this namespace and name; create it there"
        );
        summary.ready.message.clone_from(&message);
        summary.last_message = message;
    }
    conditions::set(
        &mut next.conditions,
        conditions::READY,
        &summary.ready,
        generation,
        now,
    );
    next.phase = Some(summary.phase.to_string());
    next.last_message = Some(summary.last_message);
    next.observed_generation = Some(generation);
    if let Some(chart) = charts.iter().next_back().filter(|chart| !chart.is_empty()) {
        next.last_applied_chart = Some(chart.clone());
    }
    next
}

/// The member that the Tenant names, and what is said of it, where that does not take its namespace.
fn refusal<'a>(tenant: &'a Tenant, targets: Option<&Targets>) -> Option<(&'a str, State)> {
    let member = tenant.names_member()?;
    let namespace = tenant.metadata.namespace.as_deref().unwrap_or_default();
    let state = targets?.get(member)?.allowed.refusal(member, namespace)?;
    Some((member, state))
}

/// Whether the member that the Tenant names can be had: what its EdgeCluster says, to whom it may concern.
fn resolved(
    tenant: &Tenant,
    refusal: Option<&(&str, State)>,
    targets: Option<&Targets>,
) -> Option<State> {
    let member = tenant.names_member()?;
    if let Some((_, refused)) = refusal {
        return Some(refused.clone());
    }
    let Some(target) = targets.and_then(|targets| targets.get(member)) else {
        let message = format!(
            "there is no EdgeCluster {member}: clusterRef names a member of the fleet, by the name that it has there"
        );
        return Some(State::new(Truth::False, reason::CLUSTER_NOT_FOUND, message));
    };
    let unknown = || State::new(Truth::Unknown, reason::UNSPECIFIED, "not looked at yet");
    Some(target.resolved.clone().unwrap_or_else(unknown))
}

/// The last known state of a member that is silent: whether it is ready is no longer known.
fn unheard(last: &ClusterState, why: &str) -> ClusterState {
    ClusterState {
        ready: State::new(Truth::Unknown, reason::CLUSTER_UNREACHABLE, why),
        ..last.clone()
    }
}

/// Keeps the status of home's Tenants until `stop`, while `lead` says that this hub is the one.
pub async fn run(
    client: Client,
    reports: Arc<Reports>,
    rules: Rules,
    mut lead: watch::Receiver<Hold>,
    stop: CancellationToken,
) {
    let started = Boot::now();
    let api: Api<DeserializeGuard<Tenant>> = Api::all(client.clone());
    let mut events = listed_anew(move || watcher(api.clone(), Config::default()));
    let mut tenants: BTreeMap<TenantKey, Arc<Tenant>> = BTreeMap::new();
    let mut listed: BTreeSet<TenantKey> = BTreeSet::new();
    let mut dirty: BTreeSet<TenantKey> = BTreeSet::new();
    let mut next_write: BTreeMap<TenantKey, Boot> = BTreeMap::new();
    let mut writes: JoinSet<(TenantKey, Option<Tenant>)> = JoinSet::new();
    let mut writing: BTreeSet<TenantKey> = BTreeSet::new();
    let mut patient = true;
    let mut due: Option<Boot> = None;
    loop {
        let now = Boot::now();
        if patient && now.since(started) >= START_GRACE {
            patient = false;
            dirty.extend(tenants.keys().cloned());
        }
        {
            let mut state = reports.lock();
            if std::mem::take(&mut state.all_dirty) {
                dirty.extend(tenants.keys().cloned());
            }
            dirty.extend(std::mem::take(&mut state.dirty));
        }
        // Patience runs out without any event.
        let patience = reports.patience_ends(now);
        if due.is_some_and(|due| due <= now) {
            dirty.extend(tenants.keys().cloned());
        }
        due = patience;
        let mut wake: Option<Boot> = patience
            .into_iter()
            .chain(patient.then_some(Boot(started.0 + START_GRACE)))
            .min();
        let leading = lead.borrow_and_update().may_start(now);
        for key in dirty.clone() {
            if !leading {
                break;
            }
            let Some(tenant) = tenants.get(&key) else {
                dirty.remove(&key);
                next_write.remove(&key);
                continue;
            };
            if writing.contains(&key) || writes.len() >= WRITERS {
                continue;
            }
            if let Some(at) = next_write.get(&key).filter(|at| **at > now) {
                wake = Some(wake.map_or(*at, |wake| wake.min(*at)));
                continue;
            }
            dirty.remove(&key);
            let wall = clock::wall();
            let (said, targets) = (reports.of(&key, now), reports.targets());
            let status = aggregated(tenant, &said, targets.as_deref(), &rules, patient, wall);
            if tenant.status.as_ref() == Some(&status) {
                continue;
            }
            next_write.insert(key.clone(), Boot(now.0 + PACE));
            writing.insert(key.clone());
            writes.spawn(write(client.clone(), key, Arc::clone(tenant), status));
        }
        tokio::select! {
            () = stop.cancelled() => return,
            () = reports.changed.notified() => {}
            changed = lead.changed() => if changed.is_err() { return },
            Some(event) = events.next() => match event {
                Ok(event) => see(event, &rules, &mut tenants, &mut listed, &mut dirty),
                Err(error) => tracing::debug!(error = %chain(&error), "watching home's Tenants failed; it is tried again"),
            },
            Some(written) = writes.join_next(), if !writes.is_empty() => {
                if let Ok((key, tenant)) = written {
                    writing.remove(&key);
                    match tenant {
                        Some(tenant) => { tenants.insert(key, Arc::new(tenant)); }
                        // Refused or lost: look again when the pace allows.
                        None => { dirty.insert(key); }
                    }
                }
            }
            () = clock::sleep_until(wake, now) => {}
        }
    }
}

fn see(
    event: Event<DeserializeGuard<Tenant>>,
    rules: &Rules,
    tenants: &mut BTreeMap<TenantKey, Arc<Tenant>>,
    listed: &mut BTreeSet<TenantKey>,
    dirty: &mut BTreeSet<TenantKey>,
) {
    // One that does not decode is told of by the reconciler of the home cluster.
    let read = |guard: DeserializeGuard<Tenant>| {
        let tenant = guard.0.ok()?;
        let key = tenant_key(&tenant.metadata)?;
        let ours = rules
            .namespaces
            .as_ref()
            .is_none_or(|found| found.contains(&key.namespace));
        ours.then_some((key, Arc::new(tenant)))
    };
    match event {
        Event::Init => listed.clear(),
        Event::InitApply(guard) | Event::Apply(guard) => {
            if let Some((key, tenant)) = read(guard) {
                listed.insert(key.clone());
                dirty.insert(key.clone());
                tenants.insert(key, tenant);
            }
        }
        Event::InitDone => tenants.retain(|key, _| listed.contains(key)),
        Event::Delete(guard) => {
            if let Some((key, _)) = read(guard) {
                tenants.remove(&key);
            }
        }
    }
}

/// One write, on top of the version that the decision was made on.
async fn write(
    client: Client,
    key: TenantKey,
    tenant: Arc<Tenant>,
    status: TenantStatus,
) -> (TenantKey, Option<Tenant>) {
    let api: Api<Tenant> = Api::namespaced(client, &key.namespace);
    let patch = serde_json::json!({
        "metadata": { "resourceVersion": tenant.metadata.resource_version },
        "status": status,
    });
    let params = PatchParams::default();
    let patch = Patch::Merge(&patch);
    let call = effect!(
        "home.tenant-status",
        api.patch_status(&key.name, &params, &patch)
    );
    match tokio::time::timeout(DEADLINE, call).await {
        Ok(Ok(tenant)) => (key, Some(tenant)),
        Ok(Err(kube::Error::Api(status))) if status.code == 409 || status.code == 404 => {
            (key, None)
        }
        Ok(Err(error)) => {
            tracing::warn!(tenant = %key, error = %chain(&error), "writing the status failed; it is tried again");
            (key, None)
        }
        Err(_) => {
            tracing::warn!(tenant = %key, "writing the status: no answer in time; it is tried again");
            (key, None)
        }
    }
}

#[cfg(test)]
mod tests {
    use krypton_crds::tenant::TenantSpec;

    use super::*;

    fn report(truth: Truth, why: &str) -> TenantReport {
        TenantReport {
            observed_generation: 1,
            applied_chart: "r/c:1".to_owned(),
            state: ClusterState {
                ready: State::new(truth, why, ""),
                progress: None,
                error: Some(State::new(Truth::False, reason::NO_ERROR, "")),
            },
        }
    }

    fn rules() -> Rules {
        Rules {
            self_cluster: true,
            allow_chart_skip: false,
            namespaces: None,
        }
    }

    fn tenant() -> Tenant {
        let mut tenant = Tenant::new("acme", TenantSpec::default());
        tenant.metadata.generation = Some(1);
        tenant
    }

    fn ready(status: &TenantStatus, type_: &str) -> Option<(String, String)> {
        let condition = status
            .conditions
            .iter()
            .find(|condition| condition.type_ == type_)?;
        Some((condition.status.clone(), condition.reason.clone()))
    }

    fn full(members: &[(&str, Option<TenantReport>)]) -> BTreeMap<String, Saying> {
        members
            .iter()
            .map(|(name, report)| {
                let hearing = Hearing::Full;
                let report = report.clone();
                (
                    (*name).to_owned(),
                    Saying {
                        hearing,
                        report,
                        patient: false,
                    },
                )
            })
            .collect()
    }

    #[test]
    fn home_counts_every_member_that_reports_the_tenant() {
        let said = full(&[
            (names::SELF_CLUSTER, Some(report(Truth::True, "Installed"))),
            ("edge-1", Some(report(Truth::True, "Installed"))),
            ("edge-2", Some(report(Truth::False, "Installing"))),
            ("edge-3", None),
        ]);
        let status = aggregated(
            &tenant(),
            &said,
            None,
            &rules(),
            false,
            Timestamp::UNIX_EPOCH,
        );
        assert!(
            status
                .last_message
                .clone()
                .unwrap()
                .starts_with("2 of 3 clusters ready")
        );
        assert_eq!(status.phase.as_deref(), Some("Ready"));
        assert_eq!(ready(&status, "Ready").unwrap().0, "False");
        assert_eq!(ready(&status, "ClusterReady/edge-3"), None);
        assert_eq!(status.last_applied_chart.as_deref(), Some("r/c:1"));
    }

    #[test]
    fn a_silent_member_is_unknown_and_not_dropped() {
        let mut acme = tenant();
        let said = full(&[
            (names::SELF_CLUSTER, Some(report(Truth::True, "Installed"))),
            ("edge-1", Some(report(Truth::True, "Installed"))),
        ]);
        acme.status = Some(aggregated(
            &acme,
            &said,
            None,
            &rules(),
            false,
            Timestamp::UNIX_EPOCH,
        ));
        let mut said = said;
        said.get_mut("edge-1").unwrap().hearing = Hearing::Silent("no answer".to_owned());
        let status = aggregated(&acme, &said, None, &rules(), false, Timestamp::UNIX_EPOCH);
        let unknown = Some(("Unknown".to_owned(), reason::CLUSTER_UNREACHABLE.to_owned()));
        assert_eq!(ready(&status, "ClusterReady/edge-1"), unknown);
        assert_eq!(ready(&status, "Ready").unwrap().0, "Unknown");
    }

    #[test]
    fn after_a_restart_members_are_kept_from_the_conditions_until_they_are_heard() {
        let mut acme = tenant();
        let said = full(&[
            (names::SELF_CLUSTER, Some(report(Truth::True, "Installed"))),
            ("edge-1", Some(report(Truth::True, "Installed"))),
        ]);
        acme.status = Some(aggregated(
            &acme,
            &said,
            None,
            &rules(),
            false,
            Timestamp::UNIX_EPOCH,
        ));
        let nothing = BTreeMap::new();
        let status = aggregated(&acme, &nothing, None, &rules(), true, Timestamp::UNIX_EPOCH);
        assert_eq!(Some(status), acme.status);
        let status = aggregated(
            &acme,
            &nothing,
            None,
            &rules(),
            false,
            Timestamp::UNIX_EPOCH,
        );
        assert_eq!(ready(&status, "ClusterReady/edge-1").unwrap().0, "Unknown");
    }

    #[test]
    fn a_member_that_begins_anew_keeps_its_word_until_it_has_said_all_again() {
        let reports = Reports::default();
        let key = |name: &str| TenantKey {
            namespace: "n".to_owned(),
            name: name.to_owned(),
        };
        let said = || Some(report(Truth::True, "Installed"));
        reports.begin("edge-1", Boot::default());
        let both = [(key("a"), said()), (key("b"), said())].into();
        assert!(reports.report("edge-1", Changed::new(both)));
        reports.hearing("edge-1", Hearing::Full);
        reports.begin("edge-1", Boot::default());
        assert!(reports.report("edge-1", Changed::new([(key("a"), said())].into())));
        assert!(
            reports.of(&key("b"), Boot::default())["edge-1"]
                .report
                .is_some()
        );
        reports.hearing("edge-1", Hearing::Full);
        assert!(
            reports.of(&key("a"), Boot::default())["edge-1"]
                .report
                .is_some()
        );
        assert!(
            reports.of(&key("b"), Boot::default())["edge-1"]
                .report
                .is_none()
        );
    }

    #[test]
    fn a_tenant_for_another_member_is_not_expected_on_home() {
        let mut acme = tenant();
        acme.spec =
            serde_json::from_value(serde_json::json!({ "clusterRef": { "secretName": "edge-1" } }))
                .unwrap();
        let said = full(&[(names::SELF_CLUSTER, None), ("edge-1", None)]);
        let status = aggregated(&acme, &said, None, &rules(), false, Timestamp::UNIX_EPOCH);
        assert_eq!(ready(&status, "Ready").unwrap().0, "False");
        assert!(status.last_message.unwrap().contains("edge-1"));
    }

    fn naming(namespace: &str, member: Option<&str>) -> Tenant {
        let mut tenant = tenant();
        tenant.metadata.namespace = Some(namespace.to_owned());
        if let Some(member) = member {
            let spec = serde_json::json!({ "clusterRef": { "secretName": member } });
            tenant.spec = serde_json::from_value(spec).unwrap();
        }
        tenant
    }

    #[test]
    fn a_tenant_that_names_a_member_says_whether_that_can_be_had() {
        let resolved = |acme: &Tenant, targets: Option<&Targets>| {
            let now = Timestamp::UNIX_EPOCH;
            let status = aggregated(acme, &full(&[]), targets, &rules(), false, now);
            let state = conditions::find(&status.conditions, conditions::TARGET_RESOLVED);
            (status, state.map(|state| (state.truth, state.reason)))
        };
        let stale = State::new(Truth::False, "RemoteClusterStale", "why");
        let target = Target {
            resolved: Some(stale),
            ..Target::default()
        };
        let here: Targets = [("edge-1".to_owned(), target)].into();
        let mut acme = naming("team-a", Some("edge-1"));
        let (status, said) = resolved(&acme, Some(&here));
        let is_stale = Some((Truth::False, "RemoteClusterStale".to_owned()));
        assert_eq!(said, is_stale);
        // While the EdgeClusters are not known, what was said stands.
        acme.status = Some(status);
        assert_eq!(resolved(&acme, None).1, is_stale);
        let nowhere = Some((Truth::False, reason::CLUSTER_NOT_FOUND.to_owned()));
        assert_eq!(resolved(&acme, Some(&Targets::new())).1, nowhere);
        acme.spec.cluster_ref = None;
        assert_eq!(resolved(&acme, Some(&here)).1, None, "it names nobody now");
    }

    #[test]
    fn what_a_member_says_goes_to_no_tenant_that_names_it_from_a_namespace_it_does_not_take() {
        let limit = |members: &[&str]| -> Targets {
            let target = Target {
                allowed: Allowed::new(Some(&["team-a".to_owned()])),
                resolved: None,
            };
            let members = members.iter().map(|name| (*name).to_owned());
            members.map(|name| (name, target.clone())).collect()
        };
        let said = full(&[
            (names::SELF_CLUSTER, Some(report(Truth::True, "Installed"))),
            ("edge-1", Some(report(Truth::True, "Installed"))),
        ]);
        let refused = Some(("False".to_owned(), reason::NAMESPACE_NOT_ALLOWED.to_owned()));
        let well = Some(("True".to_owned(), reason::INSTALLED.to_owned()));
        let all = [names::SELF_CLUSTER, "edge-1"];
        for (namespace, named, limited, on_self, on_edge) in [
            ("team-b", Some("edge-1"), &["edge-1"][..], &None, &refused),
            ("team-b", Some("edge-1"), &all[..], &None, &refused),
            ("team-b", Some("edge-1"), &["edge-2"][..], &None, &well),
            ("team-a", Some("edge-1"), &all[..], &None, &well),
            (
                "team-b",
                Some(names::SELF_CLUSTER),
                &all[..],
                &refused,
                &well,
            ),
            ("team-a", Some(names::SELF_CLUSTER), &all[..], &well, &well),
            // Who names nobody is where it is to be, and counts who else has such a Tenant.
            ("team-b", None, &all[..], &well, &well),
        ] {
            let case = format!("{namespace} {named:?} {limited:?}");
            let mut acme = naming(namespace, named);
            let now = Timestamp::UNIX_EPOCH;
            let status = |acme: &Tenant, targets: Option<&Targets>| {
                aggregated(acme, &said, targets, &rules(), false, now)
            };
            // As it was without the limit, with it, and without again.
            acme.status = Some(status(&acme, Some(&Targets::new())));
            let free = acme.status.clone();
            let limits = limit(limited);
            let limited = status(&acme, Some(&limits));
            assert_eq!(
                ready(&limited, "ClusterReady/self-cluster"),
                *on_self,
                "{case}"
            );
            assert_eq!(ready(&limited, "ClusterReady/edge-1"), *on_edge, "{case}");
            let told = limited
                .conditions
                .iter()
                .find(|condition| condition.reason == reason::NAMESPACE_NOT_ALLOWED);
            if let Some(told) = told {
                let member = named.unwrap();
                assert_eq!(ready(&limited, &format!("ClusterError/{member}")), None);
                for word in [member, namespace, "spec.allowedNamespaces"] {
                    assert!(told.message.contains(word), "{told:?}");
                }
                assert_eq!(ready(&limited, "Ready").unwrap().0, "False");
            }
            acme.status = Some(limited);
            assert_eq!(acme.status, Some(status(&acme, Some(&limits))), "{case}");
            let again = status(&acme, Some(&Targets::new()));
            let types = |status: &TenantStatus| -> BTreeMap<String, String> {
                let conditions = status.conditions.iter().cloned();
                conditions
                    .map(|found| (found.type_, found.reason))
                    .collect()
            };
            assert_eq!(types(&again), types(free.as_ref().unwrap()), "{case}");
        }
    }

    #[test]
    fn a_refusal_stays_over_a_restart_and_goes_with_the_limit_also_when_the_member_is_silent() {
        let mut acme = naming("team-b", Some("edge-1"));
        let allowed = Allowed::new(Some(&["team-a".to_owned()]));
        let target = Target {
            allowed,
            resolved: None,
        };
        let limits: Targets = [("edge-1".to_owned(), target)].into();
        let nothing = BTreeMap::new();
        let now = Timestamp::UNIX_EPOCH;
        let status =
            |acme: &Tenant, said, limits| aggregated(acme, said, limits, &rules(), true, now);
        acme.status = Some(status(&acme, &nothing, Some(&limits)));
        assert!(ready(acme.status.as_ref().unwrap(), "ClusterReady/edge-1").is_some());
        // The EdgeClusters are not known yet.
        assert_eq!(Some(status(&acme, &nothing, None)), acme.status);
        let mut said = full(&[("edge-1", None)]);
        said.get_mut("edge-1").unwrap().hearing = Hearing::Silent("no answer".to_owned());
        let after = status(&acme, &said, Some(&Targets::new()));
        assert_eq!(ready(&after, "ClusterReady/edge-1"), None);
    }
}
