//! The members: an EdgeCluster and a proxy for each source, a place for each that an agent was enrolled
//! for, what each is to do, and the verdict which of them may act.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Duration;

use futures::{FutureExt, StreamExt};
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, ObjectMeta};
use krypton_agent::clock::{self, Boot};
use krypton_agent::fence::Hold;
use krypton_agent::watch_backoff::WatchBackoff;
use krypton_common::conditions::{State, Truth};
use krypton_common::desired::ChartState;
use krypton_common::names;
use krypton_crds::edge_cluster::{EdgeCluster, EdgeClusterSpec, SourceRef};
use kube::Client;
use kube::api::{Api, Patch, PatchParams, PostParams};
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{Config, Event, watcher};
use tokio::sync::watch;
use tokio::task::{JoinHandle, JoinSet};
use tokio_util::sync::CancellationToken;

use crate::aggregate::Reports;
use crate::discovery::membership::{self, Before, Membership, Refusal};
use crate::discovery::register::{self, OnRecord, Register, RegisterError};
use crate::discovery::{Found, Origin, Source, Sources, Unresolved};
use crate::expiry::{Reminders, Validity};
use crate::facts::{self, reason};
use crate::found::Found as Clusters;
use crate::identity::{self, Claim};
use crate::members::{self, Admission, Dealer, Member, Members};
use crate::notices::Notice;
use crate::proxy::{self, Access, Inputs, Permit, Shared};
use krypton_common::error_chain::chain;

const DEADLINE: Duration = Duration::from_secs(10);
/// Two writes of one EdgeCluster's status are at least so far apart.
const PACE: Duration = Duration::from_secs(1);
/// The pause after a write that did not go through, give or take half of it.
const AFTER_FAILURE: Duration = Duration::from_secs(3);
/// `lastSeen` is looked at so often; it is written once a minute.
const HEARTBEAT: Duration = Duration::from_secs(20);
/// Writes of EdgeClusters in flight.
const WRITERS: usize = 8;
/// What is found out about clusters is looked at so often.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// Sources that have not listed yet are waited for so long before a new name is given away.
const PATIENCE: Duration = Duration::from_secs(10);
/// Events taken in before the next look.
const BATCH: usize = 512;

/// The chart state of the fleet, and the epoch it is given in.
#[derive(Clone, Debug, PartialEq)]
pub struct Given {
    pub epoch: u64,
    pub chart: Arc<ChartState>,
}

/// A member's proxy.
struct Running {
    access: watch::Sender<Access>,
    permit: watch::Sender<Option<Permit>>,
    stop: CancellationToken,
    task: JoinHandle<()>,
}

/// What the fleet is built from.
pub struct Fleet {
    pub client: Client,
    /// The hub's, on home.
    pub namespace: String,
    /// How home is reached as a member; `None` without `--self-cluster`.
    pub home: Option<kube::Config>,
    pub sources: watch::Receiver<Sources>,
    pub given: watch::Receiver<Given>,
    /// Whether this hub is the one that writes on home.
    pub lead: watch::Receiver<Hold>,
    pub shared: Arc<Shared>,
    pub members: Arc<Members>,
    pub reports: Arc<Reports>,
    pub found: Arc<Clusters>,
}

impl std::fmt::Debug for Fleet {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Fleet").finish_non_exhaustive()
    }
}

#[derive(Default)]
struct Known {
    edge_clusters: BTreeMap<String, EdgeCluster>,
    listed: Option<BTreeSet<String>>,
    synced: bool,
    /// Members that there have been; `None` until it is read.
    on_record: Option<OnRecord>,
    /// Sources that were away since that was written, and those that are being written.
    departed: BTreeSet<Origin>,
    departing: BTreeSet<Origin>,
    /// An EdgeCluster has gone: deleted by a person, or with the CRD.
    vanished: bool,
    /// Sources that are no members, as it was last told.
    refused: BTreeMap<Origin, Refusal>,
    /// Members whose EdgeCluster has gone or was made anew: what was known of them is of another.
    anew: BTreeSet<String>,
}

/// Follows sources and EdgeClusters until `stop`, then stops all proxies and waits for them.
pub async fn run(mut fleet: Fleet, stop: CancellationToken) {
    let api: Api<EdgeCluster> = Api::all(fleet.client.clone());
    let mut events = watcher(api, Config::default())
        .backoff(WatchBackoff::default())
        .boxed();
    let mut known = Known::default();
    let mut running: BTreeMap<String, Running> = BTreeMap::new();
    let mut leaving: JoinSet<String> = JoinSet::new();
    let mut gone: BTreeSet<String> = BTreeSet::new();
    let mut dealer = Dealer::default();
    let mut writes: JoinSet<(String, Option<EdgeCluster>)> = JoinSet::new();
    let mut writing: BTreeSet<String> = BTreeSet::new();
    let mut next_write: BTreeMap<String, Boot> = BTreeMap::new();
    let mut dirty: BTreeSet<String> = BTreeSet::new();
    let mut heartbeat = tokio::time::interval(HEARTBEAT);
    let begun = Boot::now();
    let mut book: JoinSet<Booked> = JoinSet::new();
    let mut book_next = Boot::default();
    let mut led = false;
    let mut reminders = Reminders::default();
    // Facts change often, and the rest does not follow from them.
    let (mut look, mut look_soon, mut look_next) = (true, false, Boot::default());
    loop {
        let now = Boot::now();
        let leading = fleet.lead.borrow_and_update().may_start(now);
        if leading && !led {
            // Another hub may have written it meanwhile.
            known.on_record = None;
            // And told of what was to be told of.
            reminders = Reminders::default();
        }
        led = leading;
        if book.is_empty() && now >= book_next {
            let (client, namespace) = (fleet.client.clone(), fleet.namespace.clone());
            match &known.on_record {
                None => drop(book.spawn(read_book(client, namespace))),
                Some(_) if std::mem::take(&mut known.vanished) => {
                    book.spawn(read_crd(client, namespace));
                }
                Some(on_record) if leading => {
                    known
                        .departed
                        .extend(fleet.sources.borrow().take_departed());
                    let next = members_on_record(&fleet, &known, &on_record.register);
                    let departed = std::mem::take(&mut known.departed);
                    if next != on_record.register {
                        known.departing = departed;
                        book.spawn(write_book(client, namespace, on_record.clone(), next));
                        book_next = Boot(now.0 + PACE);
                    }
                }
                Some(_) => {}
            }
        }
        // Members that come one after the other are looked at together.
        look |= look_soon && now >= look_next;
        if look && known.synced {
            (look, look_soon) = (false, false);
            look_next = Boot(now.0 + LOOK_EVERY);
            let membership = members_now(&fleet, &known, now.since(begun) < PATIENCE);
            tell_refused(&fleet.shared, &mut known, &membership.refused);
            look_soon |= membership.waiting;
            let wanted = &wanted(&fleet, &membership);
            for name in std::mem::take(&mut known.anew) {
                fleet.shared.voices.forget_agent(&name, now);
                fleet.found.forget_agent(&name);
            }
            for (name, object) in &known.edge_clusters {
                if let Some(until) = certificate_end(object) {
                    fleet.shared.voices.agent_known(name, now);
                    // Until it is heard itself.
                    fleet.shared.facts.set(name, |facts| {
                        facts.certificate.get_or_insert(Validity::until(until));
                    });
                }
            }
            for (name, member) in wanted {
                // An EdgeCluster comes first: its age decides between two that are one cluster.
                let object = known.edge_clusters.get(name);
                if object.is_none_or(|object| object.spec.source_ref.is_none()) {
                    // One that was dismissed is not made again: first it is read who was.
                    let due = next_write.get(name).is_none_or(|at| *at <= now)
                        && (object.is_some() || known.on_record.is_some());
                    if leading && due && !writing.contains(name) && writes.len() < WRITERS {
                        writing.insert(name.clone());
                        next_write.insert(name.clone(), Boot(now.0 + PACE));
                        let (client, source) = (fleet.client.clone(), member.1.clone());
                        match object {
                            None => writes.spawn(create(client, name.clone(), source)),
                            Some(object) => {
                                let version = object.metadata.resource_version.clone();
                                writes.spawn(bind(client, name.clone(), version, source))
                            }
                        };
                    } else {
                        look = true;
                    }
                }
                if object.is_none() {
                    continue;
                }
                if let Some(proxy) = running.get(name) {
                    update(&proxy.access, member.0.clone());
                } else if !gone.contains(name) {
                    let entry = enter(&fleet.members, &known, name);
                    running.insert(name.clone(), start(&fleet, name, member.0.clone(), &entry));
                }
            }
            let departed: Vec<String> = running
                .keys()
                .filter(|name| !wanted.contains_key(*name))
                .filter(|name| !membership.unseen.contains_key(*name))
                .cloned()
                .collect();
            for name in departed {
                let Some(proxy) = running.remove(&name) else {
                    continue;
                };
                tracing::info!(member = %name, "the hub's own way to the member ends; nothing is uninstalled");
                proxy.stop.cancel();
                gone.insert(name.clone());
                leaving.spawn(async move {
                    if let Err(error) = proxy.task.await {
                        tracing::error!(member = %name, %error, "the proxy ended badly");
                    }
                    name
                });
            }
            let given = fleet.given.borrow_and_update().clone();
            let claims = claims(&known, wanted, &membership, &fleet.found);
            let verdicts = identity::verdicts(&claims);
            for (name, object) in &known.edge_clusters {
                let doubt = membership
                    .troubled
                    .get(name)
                    .or_else(|| membership.unseen.get(name));
                say_of_source(&fleet.shared, name, doubt);
                let seen = wanted.contains_key(name) || membership.unseen.contains_key(name);
                // Without a source, and after a restart too: say so.
                if !seen && !gone.contains(name) {
                    let why = membership.gone.get(name);
                    say_source_gone(&fleet.shared, name, object, why, now);
                }
                let wishes = wishes(object);
                let suspended = membership
                    .members
                    .get(name)
                    .and_then(|source| source.suspended.clone());
                let entry = enter(&fleet.members, &known, name);
                let next = dealer.next(
                    entry.slot.borrow().as_ref(),
                    given.epoch,
                    &given.chart,
                    wishes.paused || suspended.is_some(),
                    now,
                );
                let held_back = verdicts
                    .get(name)
                    .and_then(|verdict| identity::held_back(name, verdict, wishes.banned));
                // Whoever is not to act is given nothing new.
                if let Some(next) = next.filter(|_| held_back.is_none()) {
                    entry.slot.send_replace(Some(next));
                }
                let held_back = held_back.or_else(|| suspended.map(|why| (reason::SUSPENDED, why)));
                let admission = Admission {
                    refused: wishes.banned.then(|| banned(name)),
                    cluster_uid: object
                        .status
                        .as_ref()
                        .and_then(|status| status.cluster_uid.clone()),
                };
                send(&entry.admission, admission.clone());
                if let Some(proxy) = running.get(name) {
                    let may_act = held_back.is_none() && verdicts.contains_key(name);
                    let permit = Permit {
                        cluster_uid: admission.cluster_uid.clone(),
                    };
                    send(&proxy.permit, may_act.then_some(permit));
                }
                fleet.shared.voices.hold_back(name, held_back, now);
            }
            let here = |name: &str| known.edge_clusters.contains_key(name);
            reminders.keep(here);
            fleet.members.keep(here, |name| running.contains_key(name));
        }
        for name in fleet.shared.facts.take_changed() {
            // A change of the chart changes the facts of all at once: first it goes to the members.
            if dirty.insert(name.clone()) {
                let at = next_write.entry(name).or_default();
                *at = (*at).max(Boot(now.0 + PACE));
            }
        }
        // A member that is still to be made waits for its turn.
        let mut wake = look.then(|| Boot(now.0 + PACE));
        if book_next > now {
            wake = Some(wake.map_or(book_next, |wake| wake.min(book_next)));
        }
        if look_soon {
            wake = Some(wake.map_or(look_next, |wake| wake.min(look_next)));
        }
        for name in dirty.clone() {
            if !leading || writes.len() >= WRITERS {
                break;
            }
            if writing.contains(&name) {
                continue;
            }
            if let Some(at) = next_write.get(&name).filter(|at| **at > now) {
                wake = Some(wake.map_or(*at, |wake| wake.min(*at)));
                continue;
            }
            dirty.remove(&name);
            let (Some(object), Some(facts)) = (
                known.edge_clusters.get(&name),
                fleet.shared.facts.get(&name),
            ) else {
                continue;
            };
            let counts = fleet.reports.counts(&name);
            let generation = object.metadata.generation.unwrap_or_default();
            let status = facts::status(
                &name,
                object.status.as_ref(),
                &facts,
                counts,
                generation,
                clock::wall(),
            );
            let (record, next) = (conditions(object), &status.conditions);
            let due = reminders.look(&name, record, next, clock::wall());
            for (reason, message) in due {
                fleet.shared.notices.tell(Notice {
                    member: name.clone(),
                    uid: object.metadata.uid.clone().unwrap_or_default(),
                    reason,
                    message,
                });
            }
            if object.status.as_ref() == Some(&status) {
                continue;
            }
            next_write.insert(name.clone(), Boot(now.0 + PACE));
            writing.insert(name.clone());
            let patch = serde_json::json!({
                "metadata": { "resourceVersion": object.metadata.resource_version },
                "status": status,
            });
            writes.spawn(write_status(fleet.client.clone(), name, patch));
        }
        tokio::select! {
            () = stop.cancelled() => break,
            changed = fleet.sources.changed() => { if changed.is_err() { break } look_soon = true; }
            changed = fleet.given.changed() => { if changed.is_err() { break } look = true; }
            changed = fleet.lead.changed() => { if changed.is_err() { break } look = true; }
            () = fleet.found.changed.notified() => look_soon = true,
            () = fleet.shared.facts.changed.notified() => {}
            _ = heartbeat.tick() => {
                look = true;
                dirty.extend(known.edge_clusters.keys().cloned());
            }
            Some(event) = events.next() => match event {
                Ok(event) => {
                    cut_off(&fleet.members, &event);
                    look |= see(&mut known, &mut dirty, event);
                    // What is ready already is taken in together.
                    for _ in 0..BATCH {
                        match events.next().now_or_never() {
                            Some(Some(Ok(event))) => {
                                cut_off(&fleet.members, &event);
                                look |= see(&mut known, &mut dirty, event);
                            }
                            _ => break,
                        }
                    }
                }
                Err(error) => tracing::warn!(error = %chain(&error), "watching EdgeClusters failed; it is tried again"),
            },
            Some(left) = leaving.join_next(), if !leaving.is_empty() => {
                if let Ok(name) = left {
                    look = true;
                    fleet.shared.voices.link(&name, None, Boot::now());
                    fleet.found.forget(&name);
                    fleet.shared.facts.set(&name, |facts| facts.access = None);
                    gone.remove(&name);
                }
            }
            Some(booked) = book.join_next(), if !book.is_empty() => {
                look_soon = true;
                let booked = booked.unwrap_or(Booked::Failed);
                if take_booked(&mut known, booked).is_break() {
                    let pause = AFTER_FAILURE.mul_f64(0.5 + rand::random::<f64>());
                    book_next = Boot(Boot::now().0 + pause);
                }
            }
            Some(written) = writes.join_next(), if !writes.is_empty() => {
                if let Ok((name, object)) = written {
                    writing.remove(&name);
                    match object {
                        Some(object) => {
                            if object.status.is_none() { dirty.insert(name.clone()); }
                            look |= put(&mut known, name, object);
                        }
                        // Refused or lost: a while later, not all at once.
                        None => {
                            look = true;
                            let pause = AFTER_FAILURE.mul_f64(0.5 + rand::random::<f64>());
                            next_write.insert(name.clone(), Boot(Boot::now().0 + pause));
                            dirty.insert(name);
                        }
                    }
                }
            }
            () = clock::sleep_until(wake, now) => {}
        }
    }
    for member in running.values() {
        member.stop.cancel();
    }
    for (name, member) in running {
        if let Err(error) = member.task.await {
            tracing::error!(member = %name, %error, "the proxy ended badly");
        }
    }
    while leaving.join_next().await.is_some() {}
}

/// Which source is which member, by what is known now.
fn members_now(fleet: &Fleet, known: &Known, patient: bool) -> Membership {
    let sources = fleet.sources.borrow();
    let found: Vec<&Found> = sources.iter().collect();
    let bound = bound(known);
    let on_record = known.on_record.as_ref();
    let dismissed = on_record.map(|on_record| on_record.register.dismissed(&bound));
    let before = Before {
        bound: &bound,
        dismissed: &dismissed.unwrap_or_default(),
        patient,
    };
    membership::membership(&found, before)
}

fn members_on_record(fleet: &Fleet, known: &Known, register: &Register) -> Register {
    if !known.synced {
        return register.clone();
    }
    let sources = fleet.sources.borrow();
    let found: Vec<&Found> = sources.iter().collect();
    register.next(&found, &known.departed, &bound(known))
}

fn bound(known: &Known) -> BTreeMap<String, Option<SourceRef>> {
    let objects = known.edge_clusters.iter();
    objects
        .map(|(name, object)| (name.clone(), object.spec.source_ref.clone()))
        .collect()
}

/// What came of a look into the register.
enum Booked {
    Here(OnRecord),
    /// UID of the CRD of EdgeClusters, if it is there to stay.
    Crd(Option<String>),
    Failed,
}

async fn read_book(client: Client, namespace: String) -> Booked {
    booked(register::load(client, &namespace).await.map(Booked::Here))
}

async fn read_crd(client: Client, namespace: String) -> Booked {
    booked(register::crd(client, &namespace).await.map(Booked::Crd))
}

async fn write_book(client: Client, namespace: String, before: OnRecord, next: Register) -> Booked {
    booked(
        register::save(client, &namespace, &before, next)
            .await
            .map(Booked::Here),
    )
}

fn booked(result: Result<Booked, RegisterError>) -> Booked {
    result.unwrap_or_else(|error| {
        tracing::warn!(error = %chain(&error), "the register of members is not up to date; it is tried again");
        Booked::Failed
    })
}

/// `Break` when it is to be tried again after a while.
fn take_booked(known: &mut Known, booked: Booked) -> ControlFlow<()> {
    match booked {
        Booked::Here(on_record) => {
            known.on_record = Some(on_record);
            known.departing.clear();
        }
        Booked::Crd(uid) => {
            let Some(on_record) = &mut known.on_record else {
                return ControlFlow::Continue(());
            };
            if uid.as_ref() != Some(&on_record.register.crd) {
                tracing::warn!(
                    "the CRD of EdgeClusters was deleted, and with it all of them: every member comes back"
                );
                on_record.register = Register {
                    crd: uid.clone().unwrap_or_default(),
                    ..Register::default()
                };
                // Until there is one again.
                known.vanished |= uid.is_none();
            }
        }
        // Another hub may have written it: it is read again.
        Booked::Failed => {
            known.on_record = None;
            let departing = std::mem::take(&mut known.departing);
            known.departed.extend(departing);
            return ControlFlow::Break(());
        }
    }
    ControlFlow::Continue(())
}

/// The members there are to be, with how they are reached and where they come from.
fn wanted(fleet: &Fleet, membership: &Membership) -> BTreeMap<String, (Access, SourceRef)> {
    let mut wanted: BTreeMap<String, (Access, SourceRef)> = membership
        .members
        .iter()
        .map(|(name, source)| {
            let member = (access(source), source.origin.source_ref());
            (name.clone(), member)
        })
        .collect();
    if let Some(config) = &fleet.home {
        let source = SourceRef {
            kind: membership::SELF_CLUSTER.to_owned(),
            namespace: None,
            name: None,
        };
        let access = Access::Home(Box::new(config.clone()));
        wanted.insert(names::SELF_CLUSTER.to_owned(), (access, source));
    }
    wanted
}

fn access(source: &Source) -> Access {
    Access::Kubeconfig(source.origin.clone(), source.access.clone())
}

/// Tells of sources that are no members: once, on the EdgeCluster whose name they ask for.
fn tell_refused(shared: &Shared, known: &mut Known, refused: &BTreeMap<Origin, Refusal>) {
    for (origin, refusal) in refused {
        if known.refused.get(origin) == Some(refusal) {
            continue;
        }
        tracing::warn!(%origin, reason = refusal.reason(), "is no member: {refusal}");
        let holder = refusal
            .member()
            .and_then(|member| known.edge_clusters.get(member));
        if let Some(holder) = holder {
            shared.notices.tell(Notice {
                member: holder.metadata.name.clone().unwrap_or_default(),
                uid: holder.metadata.uid.clone().unwrap_or_default(),
                reason: refusal.reason(),
                message: format!("{origin} is no member: {refusal}"),
            });
        }
    }
    known.refused.clone_from(refused);
}

fn claims(
    known: &Known,
    wanted: &BTreeMap<String, (Access, SourceRef)>,
    membership: &Membership,
    found: &Clusters,
) -> BTreeMap<String, Claim> {
    // Members that are yet to get their EdgeCluster count too: one of them may go first.
    let names: BTreeSet<&String> = known.edge_clusters.keys().chain(wanted.keys()).collect();
    names
        .into_iter()
        .map(|name| {
            let object = known.edge_clusters.get(name);
            let uid = found.get(name);
            let agent = object.is_some_and(enrolled);
            let recorded = object.and_then(|object| object.status.as_ref()?.cluster_uid.clone());
            let claim = Claim {
                present: wanted.contains_key(name)
                    || membership.unseen.contains_key(name)
                    || object.is_some_and(joined),
                agent,
                created: object
                    .and_then(|object| object.metadata.creation_timestamp.as_ref())
                    .map(|time| time.0),
                // Whom the hub has no way to is not waited for.
                attempted: uid.is_some() || !wanted.contains_key(name),
                // An agent that is yet to come back goes on meanwhile as what it was.
                found: uid.flatten().or_else(|| recorded.clone().filter(|_| agent)),
                recorded,
            };
            (name.clone(), claim)
        })
        .collect()
}

/// An agent was enrolled for the member, and has been here.
fn enrolled(object: &EdgeCluster) -> bool {
    certificate_end(object).is_some()
}

/// When the certificate ends that its agent was seen with last.
fn certificate_end(object: &EdgeCluster) -> Option<Timestamp> {
    let end = object.status.as_ref()?.certificate_expiry.as_ref()?;
    Some(end.0)
}

/// It is a member by its agent, with or without a source.
fn joined(object: &EdgeCluster) -> bool {
    enrolled(object) || object.spec.source_ref.is_none()
}

fn conditions(object: &EdgeCluster) -> &[Condition] {
    let status = object.status.as_ref();
    status.map_or(&[], |status| &status.conditions)
}

fn enter(members: &Members, known: &Known, name: &str) -> Arc<Member> {
    let uid = known
        .edge_clusters
        .get(name)
        .and_then(|object| object.metadata.uid.as_deref());
    members.enter(name, uid.unwrap_or_default())
}

/// What a person has said of the member, in its EdgeCluster.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Wishes {
    paused: bool,
    banned: bool,
}

fn wishes(object: &EdgeCluster) -> Wishes {
    let annotated = object
        .metadata
        .annotations
        .as_ref()
        .and_then(|annotations| annotations.get(names::PAUSED_ANNOTATION))
        .is_some_and(|value| value != "false");
    Wishes {
        paused: object.spec.paused || annotated,
        banned: object.spec.banned,
    }
}

fn start(fleet: &Fleet, name: &str, access: Access, member: &Member) -> Running {
    let (access, access_rx) = watch::channel(access);
    let (permit, permit_rx) = watch::channel(None);
    let stop = CancellationToken::new();
    let inputs = Inputs {
        access: access_rx,
        permit: permit_rx,
        slot: member.slot.subscribe(),
        presence: fleet.shared.voices.presence(name),
    };
    let task = tokio::spawn(proxy::run(
        name.to_owned(),
        Arc::clone(&fleet.shared),
        inputs,
        stop.clone(),
    ));
    Running {
        access,
        permit,
        stop,
        task,
    }
}

fn send<T: PartialEq>(channel: &watch::Sender<T>, value: T) {
    channel.send_if_modified(|before| {
        let changed = *before != value;
        *before = value;
        changed
    });
}

/// A kubeconfig of the same content is no news.
fn update(channel: &watch::Sender<Access>, access: Access) {
    channel.send_if_modified(|before| {
        let changed = match (&*before, &access) {
            (Access::Kubeconfig(_, Ok(before)), Access::Kubeconfig(_, Ok(after))) => {
                before.digest != after.digest
            }
            (Access::Kubeconfig(_, Err(before)), Access::Kubeconfig(_, Err(after))) => {
                before != after
            }
            (Access::Home(_), Access::Home(_)) => false,
            _ => true,
        };
        if changed {
            *before = access;
        }
        changed
    });
}

/// What is known of a member's source, while it cannot be looked at.
fn say_of_source(shared: &Shared, name: &str, doubt: Option<&Unresolved>) {
    let state = doubt.map(|doubt| State::new(Truth::Unknown, doubt.reason, doubt.message.clone()));
    shared.facts.set(name, |facts| facts.source = state);
}

/// A member without a source is one by its agent, or has left.
fn say_source_gone(
    shared: &Shared,
    name: &str,
    object: &EdgeCluster,
    why: Option<&Unresolved>,
    now: Boot,
) {
    if joined(object) {
        let message = "a member by its agent; the hub has no kubeconfig for it";
        shared.facts.set(name, |facts| {
            facts.resolved = State::new(Truth::True, reason::BY_AGENT, message);
        });
        shared.voices.link(name, None, now);
        return;
    }
    let gone = match why {
        Some(why) => State::new(Truth::False, why.reason, why.message.clone()),
        None => State::new(
            Truth::False,
            reason::SOURCE_GONE,
            "the hub runs without --self-cluster; the member's releases are left alone",
        ),
    };
    shared
        .facts
        .set(name, |facts| facts.resolved = gone.clone());
    shared.voices.link(name, Some(gone), now);
}

/// Who is banned or deleted is cut off at once.
fn cut_off(members: &Members, event: &Event<EdgeCluster>) {
    let (object, why) = match event {
        Event::Apply(object) if object.spec.banned => (object, None),
        Event::Delete(object) => (object, Some(members::GONE.to_owned())),
        _ => return,
    };
    let name = object.metadata.name.as_deref().unwrap_or_default();
    let why = why.unwrap_or_else(|| banned(name));
    members.cut(name, object.metadata.uid.as_deref(), &why);
}

fn banned(name: &str) -> String {
    format!("spec.banned is set on EdgeCluster {name}; whoever set it can lift it")
}

/// Takes in one event; says whether anything follows from it but a status to be written.
fn see(known: &mut Known, dirty: &mut BTreeSet<String>, event: Event<EdgeCluster>) -> bool {
    let name = |object: &EdgeCluster| object.metadata.name.clone().unwrap_or_default();
    match event {
        Event::Init => {
            known.listed = Some(BTreeSet::new());
            false
        }
        Event::InitApply(object) => {
            let name = name(&object);
            known.listed.get_or_insert_default().insert(name.clone());
            put(known, name, object);
            false
        }
        Event::InitDone => {
            let listed = known.listed.take().unwrap_or_default();
            let anew = &mut known.anew;
            known.edge_clusters.retain(|name, _| {
                let stays = listed.contains(name);
                if !stays {
                    anew.insert(name.clone());
                    known.vanished = true;
                }
                stays
            });
            known.synced = true;
            dirty.extend(known.edge_clusters.keys().cloned());
            true
        }
        Event::Apply(object) => {
            let name = name(&object);
            // Our own writes come back, and are no news.
            let before = known.edge_clusters.get(&name);
            if before.is_none_or(|before| before.status != object.status) {
                dirty.insert(name.clone());
            }
            put(known, name, object)
        }
        Event::Delete(object) => {
            known.edge_clusters.remove(&name(&object));
            known.vanished = true;
            known.anew.insert(name(&object));
            true
        }
    }
}

/// Puts in a newer object; says whether anything but its reported state is another.
fn put(known: &mut Known, name: String, mut object: EdgeCluster) -> bool {
    // Larger than all the rest, and read by nobody here.
    object.metadata.managed_fields = None;
    let matters = |object: &EdgeCluster| {
        let uid = object
            .status
            .as_ref()
            .and_then(|status| status.cluster_uid.clone());
        let meta = &object.metadata;
        (
            object.spec.clone(),
            meta.uid.clone(),
            meta.annotations.clone(),
            uid,
            enrolled(object),
        )
    };
    let before = known.edge_clusters.get(&name).map(matters);
    let after = matters(&object);
    if before.as_ref().is_some_and(|before| before.1 != after.1) {
        known.anew.insert(name.clone());
    }
    let changed = before != Some(after);
    known.edge_clusters.insert(name, object);
    changed
}

async fn create(client: Client, name: String, source: SourceRef) -> (String, Option<EdgeCluster>) {
    let object = EdgeCluster {
        metadata: ObjectMeta {
            name: Some(name.clone()),
            ..ObjectMeta::default()
        },
        spec: EdgeClusterSpec {
            source_ref: Some(source),
            ..EdgeClusterSpec::default()
        },
        status: None,
    };
    let api: Api<EdgeCluster> = Api::all(client.clone());
    let params = PostParams::default();
    let made = tokio::time::timeout(DEADLINE, api.create(&params, &object)).await;
    if matches!(&made, Ok(Err(kube::Error::Api(status))) if status.code == 404)
        && let Err(error) = krypton_agent::crd::ensure(&client, &EdgeCluster::crd()).await
    {
        tracing::warn!(error = %chain(&error), "the CRD of EdgeClusters is gone and cannot be made again; it is tried again");
    }
    (name.clone(), outcome(&name, "making", made))
}

/// A member by its agent alone is from here on one by this source too.
async fn bind(
    client: Client,
    name: String,
    version: Option<String>,
    source: SourceRef,
) -> (String, Option<EdgeCluster>) {
    let api: Api<EdgeCluster> = Api::all(client);
    let params = PatchParams::default();
    let patch = Patch::Merge(serde_json::json!({
        "metadata": { "resourceVersion": version },
        "spec": { "sourceRef": source },
    }));
    let call = api.patch(&name, &params, &patch);
    let result = tokio::time::timeout(DEADLINE, call).await;
    let object = outcome(&name, "naming the source of", result);
    (name, object)
}

async fn write_status(
    client: Client,
    name: String,
    patch: serde_json::Value,
) -> (String, Option<EdgeCluster>) {
    let api: Api<EdgeCluster> = Api::all(client);
    let params = PatchParams::default();
    let patch = Patch::Merge(patch);
    let call = api.patch_status(&name, &params, &patch);
    let result = tokio::time::timeout(DEADLINE, call).await;
    let object = outcome(&name, "writing the status of", result);
    (name, object)
}

fn outcome(
    name: &str,
    what: &str,
    result: Result<kube::Result<EdgeCluster>, tokio::time::error::Elapsed>,
) -> Option<EdgeCluster> {
    match result {
        Ok(Ok(object)) => Some(object),
        // Somebody was faster; the watch brings what they wrote.
        Ok(Err(kube::Error::Api(status))) if status.code == 409 || status.code == 404 => None,
        Ok(Err(error)) => {
            tracing::warn!(member = name, error = %chain(&error), "{what} the EdgeCluster failed; it is tried again");
            None
        }
        Err(_) => {
            tracing::warn!(
                member = name,
                "{what} the EdgeCluster: no answer in time; it is tried again"
            );
            None
        }
    }
}
