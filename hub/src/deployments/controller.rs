//! Reconciles KryptonDeployments: after each change, decides on all of them, then publishes the orders and
//! writes the objects that differ.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::ObjectReference;
use krypton_crds::edge_cluster::EdgeCluster;
use krypton_crds::krypton_deployment::{KryptonDeployment, Placement};
use krypton_runtime::chance;
use krypton_runtime::clock::{self, BootTime};
use krypton_runtime::events::ObjectEvent;
use krypton_runtime::newest::NewestSeen as _;
use krypton_runtime::tasks::KeyedTasks;
use krypton_runtime::watch::Watch;
use krypton_runtime::work_queue::{Outcome, WorkQueue};
use krypton_types::deployment::{DeploymentKey, DesiredDeployment, ReportedEvent};
use krypton_types::error_chain::chain;
use krypton_types::names;
use kube::api::Api;
use kube::core::DeserializeGuard;
use kube::runtime::watcher::{self, Config, Event};
use kube::{Client, CustomResourceExt as _, Resource as _, ResourceExt as _};
use tokio::sync::watch;
use tokio::task::JoinError;
use tokio_util::sync::CancellationToken;
use tracing::field::Empty;
use tracing::{Instrument as _, Span};

use crate::deployments::api::{Reading, Write, Written, read, write};
use crate::deployments::events::RecordedEvents;
use crate::deployments::plan::{At, Decision, Site, View, decide, warning};
use crate::deployments::target::{self, Cluster, Named as Aimed, Sight, named, trusted};
use crate::discovery::Kind;
use crate::discovery::named_secrets::{Findings, Named, Naming, SecretName};
use crate::leader::Leader;
use crate::leader::home_writer::{self, Deletion, HomeWrites, Wrote};
use crate::members::MemberRegistry;
use crate::members::deployment_orders::{DEPLOYMENTS_MAX, Deployments, ORDERS_MAX};
use crate::notices::HomeEvents;
use crate::tenants::Reports;

/// Pause after a failed read or a write conflict, with 50 % jitter.
const AFTER_FAILURE: Duration = Duration::from_secs(3);
/// Retry interval for checking whether home's CRD retains `status.placements`.
const TRY_AGAIN: Duration = Duration::from_secs(20);
const FORGETS: &str = "the CRD of KryptonDeployments on the home cluster is older than this hub and drops status.placements; update it, because until then the hub writes no KryptonDeployment and sends no new orders";
/// Minimum interval between two decisions on all objects.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// Maximum number of writes and reads in flight. Others wait.
const REQUESTS: usize = 8;
/// Maximum number of untrusted Secrets to read. An object may name them only if the Secret itself permits
/// it.
const UNTRUSTED_MAX: usize = 1_000;
/// How the hub logs a failed list of KryptonDeployments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Noted {
    Nothing,
    /// The home cluster does not serve the API, which is optional.
    Absent,
    Failed,
}

/// Selects the log level. `refused` means that the API server returned 403 or 404. `known` means that the
/// hub has just accepted the absence of KryptonDeployments.
fn noted(status: u16, refused: bool, known: bool) -> Noted {
    match (status, refused, known) {
        (404, _, true) => Noted::Absent,
        (404, ..) | (_, true, false) => Noted::Nothing,
        _ => Noted::Failed,
    }
}

/// Consecutive 403 or 404 responses after which the hub assumes that home has no KryptonDeployments.
const NOT_KNOWN: u32 = 2;

/// Inputs of the KryptonDeployment controller.
pub struct Controller {
    pub client: Client,
    pub deployments: Arc<Deployments>,
    pub members: Arc<MemberRegistry>,
    pub notices: HomeEvents,
    /// Publishes the named Secrets to discovery.
    pub named: watch::Sender<Named>,
    pub findings: watch::Receiver<Findings>,
    /// Namespaces whose KryptonDeployments are reconciled. `None` means all.
    pub namespaces: Option<BTreeSet<String>>,
    /// Default namespace of a named Secret.
    pub discovery_namespace: String,
    /// Namespaces whose Secrets any object may name.
    pub open_namespaces: BTreeSet<String>,
    /// Interval between two drift checks of a release.
    pub check_interval: Duration,
    pub writes: HomeWrites,
    /// Contains the charts that the hub sent to each member.
    pub reports: Arc<Reports>,
}

impl std::fmt::Debug for Controller {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Keep").finish_non_exhaustive()
    }
}

#[derive(Debug)]
struct Slot {
    object: Arc<KryptonDeployment>,
    deletion: Option<Deletion>,
    told: RecordedEvents,
}

/// The state of the list of one kind.
#[derive(Debug, Default)]
struct Known {
    listed: BTreeSet<String>,
    synced: bool,
}

#[derive(Debug)]
struct DeploymentStore {
    slots: BTreeMap<DeploymentKey, Slot>,
    /// The objects to write or read.
    queue: WorkQueue<DeploymentKey>,
    listing: BTreeSet<DeploymentKey>,
    synced: bool,
    /// Consecutive 403 or 404 responses of home.
    refused: u32,
    clusters: target::Clusters,
    of_clusters: Known,
    /// Home's CRD drops `status.placements`. The hub decides nothing until this time.
    forgets: Option<BootTime>,
}

impl Default for DeploymentStore {
    fn default() -> Self {
        Self {
            slots: BTreeMap::new(),
            queue: home_writer::queue(REQUESTS),
            listing: BTreeSet::new(),
            synced: false,
            refused: 0,
            clusters: target::Clusters::default(),
            of_clusters: Known::default(),
            forgets: None,
        }
    }
}

/// Reconciles KryptonDeployments until `stop`. Every hub publishes orders. Only the leader writes.
pub async fn run(keep: Controller, mut lead: Leader, stop: CancellationToken) {
    let objects: Api<DeserializeGuard<KryptonDeployment>> = Api::all(keep.client.clone());
    let mut objects = Watch::of(objects, Config::default());
    let members: Api<EdgeCluster> = Api::all(keep.client.clone());
    let mut members = Watch::of(members, Config::default());
    let mut said = keep.deployments.changes();
    let mut findings = keep.findings.clone();
    let (mut store, mut led) = (DeploymentStore::default(), None);
    let mut requests = Requests::default();
    let (mut look, mut look_next, mut rested) = (false, BootTime::default(), BootTime::default());
    loop {
        let now = BootTime::now();
        let leading = lead.writes(now);
        let leader_term = lead.leader_term();
        let won = leader_term.as_ref().map(|leader_term| leader_term.won);
        let leader_term = leader_term.map(|leader_term| leader_term.since);
        if objects.begin(leader_term) {
            members.begin(leader_term);
            // A standby's view may be stale: the leader orders and writes nothing based on it.
            store.unlist();
            for key in std::mem::take(&mut requests.readings).keys() {
                store.queue.done(key, Outcome::Done, now, 0.0);
            }
        }
        if leading && led != leader_term {
            // The previous leader recorded the earlier events.
            store.forget_told();
            led = leader_term;
            look = true;
        }
        if store.forgets.is_some_and(|until| until <= now) {
            // Objects read before this may lack their stored placements.
            objects.restart();
            (store.forgets, store.synced, store.refused) = (None, false, 0);
        }
        if look && now >= look_next {
            let found = findings.see();
            let decisions = store.decide(&keep, &found, objects.term());
            let wake = requests.start(&mut store, decisions, (&keep, &lead), (leading, won), now);
            look = wake.is_some();
            // As in the fleet's loop: pause for as long as the decisions took, so other tasks can run.
            let ended = BootTime::now();
            rested = BootTime(ended.0 + LOOK_EVERY.max(ended.since(now)));
            look_next = wake.map_or(rested, |wake| wake.max(rested));
            tokio::task::yield_now().await;
        }
        let due = look.then_some(look_next).into_iter().chain(store.forgets);
        let due = due.min();
        let mut news = false;
        tokio::select! {
            () = stop.cancelled() => return,
            decided = lead.changed() => { if !decided { return } look = true; }
            Ok(()) = said.changed() => news = true,
            Ok(()) = findings.changed() => news = true,
            event = objects.next() => news = store.see(event, &keep),
            event = members.next() => news = store.see_member(event),
            (key, written) = requests.writes.next() => {
                store.write_ended(key, written, &keep);
                news = true;
            }
            (key, reading) = requests.readings.next() => {
                store.reading_ended(key, reading);
                news = true;
            }
            () = clock::sleep_until(due, now) => {}
        }
        if news {
            let soon = rested.max(BootTime(now.0 + LOOK_EVERY));
            (look, look_next) = (true, look_next.min(soon));
        }
    }
}

/// Requests in flight.
#[derive(Default)]
struct Requests {
    writes: KeyedTasks<DeploymentKey, Written>,
    readings: KeyedTasks<DeploymentKey, Reading>,
}

impl Requests {
    /// Starts the steps that are due. Returns the due time of the next waiting step.
    fn start(
        &mut self,
        store: &mut DeploymentStore,
        decisions: Vec<Decided>,
        (keep, lead): (&Controller, &Leader),
        (leading, won): (bool, Option<Timestamp>),
        now: BootTime,
    ) -> Option<BootTime> {
        if !leading {
            return None;
        }
        let mut steps = BTreeMap::new();
        for (key, decision, reported_events) in decisions {
            let Some(slot) = store.slots.get_mut(&key) else {
                continue;
            };
            if let Some(won) = won {
                slot.tell(reported_events, won, &keep.notices);
            }
            let Some(mut step) = Step::of(decision, &slot.object) else {
                continue;
            };
            let status = slot.object.status.as_ref();
            let Some(epoch) = lead.mark(status.and_then(|status| status.hub_epoch)) else {
                // A later leader wrote it. Check it again under a later epoch.
                continue;
            };
            if let Step::Write(Write::Status(status), _) = &mut step {
                status.hub_epoch = Some(epoch);
            }
            store.queue.add(key.clone());
            steps.insert(key, step);
        }
        while let Some(key) = store.queue.pop(now) {
            if let (Some(slot), Some(step)) = (store.slots.get(&key), steps.remove(&key)) {
                home_writer::start(&mut store.queue, key.clone(), now);
                self.begin(key, &slot.object, step, (keep, lead));
            }
        }
        store.queue.wake()
    }

    fn begin(
        &mut self,
        key: DeploymentKey,
        object: &Arc<KryptonDeployment>,
        step: Step,
        (keep, lead): (&Controller, &Leader),
    ) {
        let (client, of, span) = (keep.client.clone(), key.clone(), span(&key, object));
        match step {
            Step::Read => {
                let uid = object.metadata.uid.clone().unwrap_or_default();
                let read = read(client, of, uid).instrument(span);
                self.readings.spawn(key, read);
            }
            Step::Write(what, news) => {
                let write = write(client, of, Arc::clone(object), what, news);
                let write = lead.tracked(write.instrument(span));
                self.writes.spawn(key, write);
            }
        }
    }
}

/// An object's key, its decision, and the events that members reported.
type Decided = (DeploymentKey, Decision, Vec<(String, Vec<ReportedEvent>)>);

/// The next request for an object.
enum Step {
    Read,
    Write(Write, Vec<ObjectEvent>),
}

impl Step {
    pub(crate) fn of(decision: Decision, object: &KryptonDeployment) -> Option<Self> {
        // Krypton has nothing left to do for this object.
        if object.metadata.deletion_timestamp.is_some() && object.finalizers().is_empty() {
            return None;
        }
        if decision.read {
            return Some(Self::Read);
        }
        if let Some(finalizers) = decision.finalizers {
            let news = decision.with_finalizers;
            return Some(Self::Write(Write::Finalizers(finalizers), news));
        }
        let same = object.status.as_ref() == Some(&decision.status);
        (!same).then_some(Self::Write(
            Write::Status(decision.status),
            decision.with_status,
        ))
    }
}

impl Slot {
    /// Records the events that members reported. `won` is the start of this hub's leadership.
    fn tell(
        &mut self,
        reported_events: Vec<(String, Vec<ReportedEvent>)>,
        won: Timestamp,
        notices: &HomeEvents,
    ) {
        let created = self.object.metadata.creation_timestamp.as_ref();
        let was_there = created.is_some_and(|time| time.0 < won);
        for (member, reported_events) in reported_events {
            let news = self.told.news(&member, &reported_events, was_there);
            tell(&self.object, news, notices);
        }
    }
}

impl DeploymentStore {
    /// Starts over with new lists of home's objects, and rereads deletions.
    fn unlist(&mut self) {
        (self.synced, self.refused, self.of_clusters.synced) = (false, 0, false);
        self.forgets = None;
        for slot in self.slots.values_mut() {
            slot.deletion = None;
        }
    }

    /// Decides on all objects, and publishes the orders. Returns nothing until home's lists are complete.
    fn decide(
        &mut self,
        keep: &Controller,
        findings: &Findings,
        of: Option<BootTime>,
    ) -> Vec<Decided> {
        if self.forgets.is_some()
            || !self.of_clusters.synced
            || !(self.synced || self.refused >= NOT_KNOWN)
        {
            return Vec::new();
        }
        // The hub records no UID for a member that does not act, so use the UID that it found. Only a user
        // changes a recorded one.
        self.clusters
            .learn(|name| keep.members.cluster_uid(name).flatten());
        // Oldest first: beyond the member's limit, the newest objects wait.
        let slots = self.by_age();
        keep.named.send_if_modified(|before| {
            let next = self.named(&slots, keep);
            let news = before.as_deref() != Some(&next);
            if news {
                *before = Some(Arc::new(next));
            }
            news
        });
        let mut ordered: BTreeMap<String, Vec<DesiredDeployment>> = BTreeMap::new();
        let mut sizes: BTreeMap<String, usize> = BTreeMap::new();
        let mut decisions = Vec::new();
        for (key, slot) in slots {
            let full = |cluster: &str| {
                let taken = ordered.get(cluster).map_or(0, Vec::len);
                let bytes = sizes.get(cluster).copied().unwrap_or_default();
                taken >= DEPLOYMENTS_MAX || bytes >= ORDERS_MAX
            };
            let view = self.view(key, slot, keep, findings, full);
            let (decision, reported_events) = (decide(&view), view.reported_events());
            for (cluster, order) in &decision.orders {
                let orders = ordered.entry(cluster.clone()).or_default();
                *sizes.entry(cluster.clone()).or_insert(0) += order.size();
                orders.push(order.clone());
            }
            decisions.push((key.clone(), decision, reported_events));
        }
        // The orders are based on reads of this term.
        keep.deployments.read_in(of);
        keep.deployments.order(ordered);
        decisions
    }

    fn by_age(&self) -> Vec<(&DeploymentKey, &Slot)> {
        let mut slots: Vec<_> = self.slots.iter().collect();
        slots.sort_by_key(|(key, slot)| (created(&slot.object), *key));
        slots
    }

    fn view<'a>(
        &self,
        key: &DeploymentKey,
        slot: &'a Slot,
        keep: &Controller,
        findings: &Findings,
        full: impl Fn(&str) -> bool,
    ) -> View<'a> {
        let object = &*slot.object;
        let aimed = named(&object.spec, &keep.discovery_namespace);
        let sight = Sight {
            clusters: &self.clusters,
            findings,
            open_namespaces: &keep.open_namespaces,
        };
        let key_named = match &aimed {
            Aimed::Secret { key, .. } => key.clone(),
            Aimed::Profile { .. } => None,
        };
        let target = target::select(&aimed, &object.spec.region.name, &key.namespace, sight);
        let site = |placement: Placement| {
            let member = target::acting(&placement.cluster_uid, &placement.cluster, &self.clusters);
            let at = member.and_then(|name| {
                let cluster = self.clusters.get(&name)?.clone();
                Some(At {
                    said: keep.deployments.said(&name, key).map(|mut said| {
                        let chart = &mut said.report.applied_chart;
                        // Show only a chart text that the hub sent: the report merely confirms it.
                        if !keep.reports.was_dealt(&name, chart) {
                            chart.clear();
                        }
                        said
                    }),
                    full: full(&name),
                    member: Some((name, cluster)),
                })
            });
            Site {
                placement,
                at: at.unwrap_or_default(),
            }
        };
        View {
            object,
            sites: recorded(object).iter().cloned().map(site).collect(),
            target: target.map(|(cluster, cluster_uid)| {
                site(Placement {
                    cluster,
                    cluster_uid,
                    key: key_named,
                    removing: false,
                })
            }),
            deletion: slot.deletion,
            check_every: u32::try_from(keep.check_interval.as_secs()).unwrap_or(u32::MAX),
            now: clock::wall(),
        }
    }

    /// Returns all named Secrets, and the Secrets of members that still have releases.
    fn named(
        &self,
        by_age: &[(&DeploymentKey, &Slot)],
        keep: &Controller,
    ) -> BTreeMap<SecretName, Naming> {
        let mut all: BTreeMap<SecretName, Naming> = BTreeMap::new();
        let mut untrusted = 0;
        let mut name = |secret: SecretName, key: Option<String>, trusted: bool| {
            if secret.name == names::SELF_CLUSTER {
                return;
            }
            let naming = match all.entry(secret) {
                Entry::Occupied(naming) => naming.into_mut(),
                // Limits how many Secrets an object outside their namespaces can make the hub read.
                Entry::Vacant(_) if !trusted && untrusted >= UNTRUSTED_MAX => return,
                Entry::Vacant(naming) => {
                    untrusted += usize::from(!trusted);
                    naming.insert(Naming::default())
                }
            };
            // The oldest object determines the key. A trusted object precedes any untrusted one.
            if trusted && !naming.trusted {
                *naming = Naming { key, trusted };
            } else if trusted == naming.trusted {
                naming.key = naming.key.take().or(key);
            }
        };
        for (key, slot) in by_age {
            for placement in recorded(&slot.object) {
                let source = self.clusters.get(&placement.cluster);
                let same = |it: &&Cluster| it.cluster_uid.as_ref() == Some(&placement.cluster_uid);
                let source = source
                    .filter(same)
                    .and_then(|cluster| cluster.source.as_ref());
                let source = source.filter(|source| source.kind == Kind::Secret.as_str());
                if let Some((namespace, secret)) =
                    source.and_then(|source| source.namespace.clone().zip(source.name.clone()))
                {
                    let secret = SecretName {
                        namespace,
                        name: secret,
                    };
                    name(secret, placement.key.clone(), true);
                }
            }
            if let Aimed::Secret {
                secret, key: of, ..
            } = named(&slot.object.spec, &keep.discovery_namespace)
            {
                let trusted = trusted(&secret, &key.namespace, &keep.open_namespaces);
                name(secret, of, trusted);
            }
        }
        all
    }

    /// Applies a watch event. Returns whether a new decision is necessary.
    fn see(
        &mut self,
        event: watcher::Result<Event<DeserializeGuard<KryptonDeployment>>>,
        keep: &Controller,
    ) -> bool {
        let read = |guard: DeserializeGuard<KryptonDeployment>| {
            let mut object = match guard.0 {
                Ok(object) => object,
                Err(error) => {
                    let (namespace, name) = (&error.metadata.namespace, &error.metadata.name);
                    tracing::warn!(?namespace, ?name, %error, "ignoring invalid KryptonDeployment");
                    return None;
                }
            };
            object.metadata.managed_fields = None;
            let key = DeploymentKey {
                namespace: object.namespace()?,
                name: object.metadata.name.clone()?,
            };
            let ours = keep.namespaces.as_ref();
            ours.is_none_or(|ours| ours.contains(&key.namespace))
                .then_some((key, object))
        };
        match event {
            Ok(Event::Init) => {
                self.listing.clear();
                false
            }
            Ok(Event::InitApply(guard)) => {
                if let Some((key, object)) = read(guard) {
                    self.listing.insert(key.clone());
                    self.put(key, object);
                }
                false
            }
            Ok(Event::InitDone) => {
                let listed = std::mem::take(&mut self.listing);
                let gone = self.slots.extract_if(.., |key, _| !listed.contains(key));
                gone.for_each(|(key, _)| self.queue.forget(&key));
                self.synced = true;
                true
            }
            Ok(Event::Apply(guard)) => {
                if let Some((key, object)) = read(guard) {
                    self.put(key, object);
                }
                true
            }
            Ok(Event::Delete(guard)) => {
                if let Some((key, _)) = read(guard) {
                    self.slots.remove(&key);
                    self.queue.forget(&key);
                }
                true
            }
            Err(error) => {
                let status = match &error {
                    watcher::Error::InitialListFailed(kube::Error::Api(status)) => status.code,
                    _ => 0,
                };
                // If the API is absent or forbidden, do not wait for its list. Earlier objects remain
                // valid.
                let refused = matches!(status, 403 | 404) && self.of_clusters.synced;
                self.refused += u32::from(refused);
                let unknown = refused && self.refused == NOT_KNOWN && !self.synced;
                match noted(status, refused, unknown) {
                    Noted::Nothing => {
                        tracing::debug!(error = %chain(&error), "failed to list KryptonDeployments; retrying");
                    }
                    Noted::Absent => {
                        tracing::info!(
                            crd = KryptonDeployment::crd_name(),
                            "CRD not installed; ignoring KryptonDeployments"
                        );
                    }
                    Noted::Failed => {
                        tracing::warn!(error = %chain(&error), waits = !self.synced && !unknown, "failed to list KryptonDeployments; retrying");
                    }
                }
                unknown
            }
        }
    }

    fn put(&mut self, key: DeploymentKey, object: KryptonDeployment) {
        let same = |slot: &&mut Slot| slot.object.metadata.uid == object.metadata.uid;
        if let Some(slot) = self.slots.get_mut(&key).filter(same) {
            // If home was restored from a backup, the object may not be deleted there.
            if object.metadata.deletion_timestamp.is_none() {
                slot.deletion = None;
            }
            slot.object = Arc::new(object);
            return;
        }
        let slot = Slot {
            object: Arc::new(object),
            deletion: None,
            told: RecordedEvents::default(),
        };
        self.queue.reset(&key);
        self.slots.insert(key, slot);
    }

    fn see_member(&mut self, event: watcher::Result<Event<EdgeCluster>>) -> bool {
        match event {
            Ok(Event::Init) => {
                self.of_clusters.listed.clear();
                false
            }
            Ok(Event::InitApply(object)) => {
                self.of_clusters.listed.insert(object.name_any());
                self.put_member(&object);
                false
            }
            Ok(Event::InitDone) => {
                let listed = std::mem::take(&mut self.of_clusters.listed);
                self.clusters.retain(|name| listed.contains(name));
                self.of_clusters.synced = true;
                true
            }
            Ok(Event::Apply(object)) => self.put_member(&object),
            Ok(Event::Delete(object)) => self.clusters.remove(&object.name_any()).is_some(),
            Err(error) => {
                tracing::debug!(error = %chain(&error), "watching EdgeClusters failed; retrying");
                false
            }
        }
    }

    fn put_member(&mut self, object: &EdgeCluster) -> bool {
        let cluster = Cluster::of(object);
        let before = self.clusters.insert(object.name_any(), cluster.clone());
        before.as_ref() != Some(&cluster)
    }

    fn write_ended(
        &mut self,
        key: DeploymentKey,
        written: Result<Written, JoinError>,
        keep: &Controller,
    ) {
        match written {
            Ok(written) => {
                if let Some(came) = written.came {
                    keep.writes.count(HomeWrites::DEPLOYMENT, came);
                }
                self.take_written(key, written, &keep.notices);
            }
            Err(error) => {
                tracing::error!(%error, deployment = %key, "the write of a KryptonDeployment panicked");
                self.ended(&key, Outcome::Failed);
            }
        }
    }

    fn reading_ended(&mut self, key: DeploymentKey, reading: Result<Reading, JoinError>) {
        match reading {
            Ok(reading) => self.take_reading(&key, &reading),
            Err(error) => {
                tracing::error!(%error, deployment = %key, "the read of a KryptonDeployment panicked");
                self.ended(&key, Outcome::Failed);
            }
        }
    }

    /// Stores the written object, unless the watch has delivered a newer one.
    fn take_written(&mut self, key: DeploymentKey, written: Written, notices: &HomeEvents) {
        if written.forgets
            && self.forgets.is_none()
            && let Some(slot) = self.slots.get(&key)
        {
            span(&key, &slot.object).in_scope(|| tracing::warn!("{FORGETS}"));
            tell(&slot.object, vec![warning("CrdOutdated", FORGETS)], notices);
        }
        if written.forgets {
            self.forgets = Some(BootTime(BootTime::now().0 + TRY_AGAIN));
        }
        if let Some(object) = &written.object {
            tell(object, written.news, notices);
        }
        let outcome = match (&written.object, written.came) {
            (Some(_), _) => Outcome::Done,
            (None, Some(Wrote::Failed)) => Outcome::Failed,
            (None, Some(Wrote::Ok | Wrote::Conflict) | None) => Outcome::Again(later()),
        };
        self.ended(&key, outcome);
        // The watch may have delivered the object's deletion first.
        let Some(slot) = self.slots.get_mut(&key) else {
            return;
        };
        if let Some(mut object) = written.object
            && slot.object.metadata.resource_version == written.before
        {
            object.metadata.managed_fields = None;
            slot.object = Arc::new(object);
        }
    }

    fn take_reading(&mut self, key: &DeploymentKey, reading: &Reading) {
        let slot = self.slots.get_mut(key);
        let same = slot.filter(|slot| slot.object.metadata.uid.as_ref() == Some(&reading.uid));
        let outcome = match (same, reading.found) {
            (Some(slot), Some(found)) => {
                slot.deletion = Some(found);
                Outcome::Done
            }
            _ => Outcome::Again(later()),
        };
        self.ended(key, outcome);
    }

    /// Ends a request. The next decision finds what is left to do.
    fn ended(&mut self, key: &DeploymentKey, outcome: Outcome) {
        self.queue
            .done(key, outcome, BootTime::now(), chance::random());
        if !self.slots.contains_key(key) {
            self.queue.forget(key);
        }
    }

    /// Discards the events recorded in an earlier term.
    fn forget_told(&mut self) {
        for slot in self.slots.values_mut() {
            slot.told = RecordedEvents::default();
        }
    }
}

fn tell(object: &KryptonDeployment, news: Vec<ObjectEvent>, notices: &HomeEvents) {
    let about = reference(object);
    for event in news {
        notices.tell_about(about.clone(), event);
    }
}

/// Returns the span of a read or write, with the cluster of the latest placement.
fn span(key: &DeploymentKey, object: &KryptonDeployment) -> Span {
    let member = recorded(object).last().map(|placement| &*placement.cluster);
    let generation = object.metadata.generation;
    tracing::error_span!("home", deployment = %key, member, generation, outcome = Empty)
}

fn recorded(object: &KryptonDeployment) -> &[Placement] {
    let status = object.status.as_ref();
    status
        .and_then(|status| status.placements.as_deref())
        .unwrap_or_default()
}

fn later() -> BootTime {
    BootTime(BootTime::now().0 + AFTER_FAILURE.mul_f64(0.5 + chance::random::<f64>()))
}

/// Returns the creation time in nanoseconds since 1970.
fn created(object: &KryptonDeployment) -> Option<i128> {
    let created = object.metadata.creation_timestamp.as_ref();
    created.map(|time| time.0.as_nanosecond())
}

fn reference(object: &KryptonDeployment) -> ObjectReference {
    ObjectReference {
        api_version: Some(KryptonDeployment::api_version(&()).into_owned()),
        kind: Some(KryptonDeployment::kind(&()).into_owned()),
        namespace: object.namespace(),
        name: object.metadata.name.clone(),
        uid: object.metadata.uid.clone(),
        ..ObjectReference::default()
    }
}

#[cfg(test)]
mod tests;
