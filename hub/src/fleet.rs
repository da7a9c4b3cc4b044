//! The members: an EdgeCluster and a proxy for each source, a place for each that an agent was enrolled
//! for, what each is to do, and the verdict which of them may act.

mod acceptance;
mod agenda;
mod book;
mod edge_clusters;
mod given;
mod namespaces;
mod overlays;
mod retirement;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use krypton_agent::clock::{self, Boot};
use krypton_agent::newest::{Newest as _, NewestSeen as _, PutNews as _};
use krypton_agent::watch_backoff::listed_anew;
use krypton_common::allowed::Allowed;
use krypton_common::conditions::{State, TARGET_RESOLVED, Truth, find};
use krypton_common::crd_policy::CrdPolicy;
use krypton_common::desired::ChartState;
use krypton_common::drift::DriftPolicy;
use krypton_common::handling::Handling;
use krypton_common::lockdown::Lockdown;
use krypton_common::names;
use krypton_common::namespaces::NamespaceConfiguration;
use krypton_crds::edge_cluster::{EdgeCluster, SourceRef};
use kube::Client;
use kube::api::Api;
use kube::runtime::watcher::{Config, Event, watcher};
use tokio::sync::watch;
use tokio::task::{JoinHandle, JoinSet};
use tokio_util::sync::CancellationToken;
use tracing::Instrument as _;

use crate::aggregate::{Reports, Retired, Target, Targets};
use crate::chart_values::{self, Problem};
use crate::discovery::membership::{self, Before, Membership, Refusal};
use crate::discovery::{Found, Origin, Source, Sources, Unresolved};
use crate::expiry::{Reminders, Validity};
use crate::facts::{self, Values, reason};
use crate::found::Found as Clusters;
use crate::identity::{self, Claim};
use crate::lead::{Lead, Stand, Watched};
use crate::members::{self, Admission, Dealer, Dealt, Member, Members};
use crate::metrics::HomeWrites;
use crate::notices::Notice;
use crate::proxy::{self, Access, Inputs, Permit, Shared};
use krypton_common::error_chain::chain;

pub use acceptance::Accepting;
use agenda::Agenda;
use book::Book;
use edge_clusters::{
    Bound, EdgeClusters, Written, certificate_end, create, enrolled, joined, status_patch,
    write_finalizers, write_status,
};
pub use overlays::Overlaying;

use overlays::{Overlays, too_large};
use retirement::{Reading, Retirements, Standing, Step};

/// Two writes of one EdgeCluster's status are at least so far apart.
const PACE: Duration = Duration::from_secs(1);
/// The pause after a read or a write of the register that failed, give or take half of it.
const AFTER_FAILURE: Duration = Duration::from_secs(3);
/// `lastSeen` is looked at so often; it is written once a minute.
const HEARTBEAT: Duration = Duration::from_secs(20);
/// Writes of EdgeClusters in flight.
const WRITERS: usize = 16;
/// What is found out about clusters is looked at so often.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// Sources that have not listed yet are waited for so long before a new name is given away.
const PATIENCE: Duration = Duration::from_secs(10);
/// What is on record of a member of which nothing has been heard counts for so long after the lead was won: an
/// agent is given up after 30 s, and whoever is reached by kubeconfig has answered by then, or has not.
const UNHEARD: Duration = Duration::from_secs(45);
/// Events taken in before the next look.
const BATCH: usize = 512;

/// The chart state of the fleet, and the epoch it is given in.
#[derive(Clone, Debug, PartialEq)]
pub struct Given {
    pub epoch: u64,
    /// `None` while there has not been one yet.
    pub chart: Option<Arc<ChartState>>,
    /// Why `chart` is not what it should be.
    pub problem: Option<Problem>,
}

/// A member's proxy.
struct Running {
    access: watch::Sender<Access>,
    permit: watch::Sender<Permit>,
    allowed: watch::Sender<Allowed>,
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
    pub accepting: Accepting,
    pub given: watch::Receiver<Given>,
    /// For all members.
    pub drift: DriftPolicy,
    pub chart_crds: CrdPolicy,
    pub tenant_values: bool,
    /// Whether Tenants of home are placed on members.
    pub place_tenants: bool,
    /// Of members, over the fleet's.
    pub overlaying: Overlaying,
    pub handling: Handling,
    pub lockdown: Lockdown,
    /// Of workspaces; a member may have its own over it.
    pub namespaces: NamespaceConfiguration,
    /// Whether this hub is the one that writes on home.
    pub lead: Lead,
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

/// Follows sources and EdgeClusters until `stop`, then stops all proxies and waits for them.
pub async fn run(mut fleet: Fleet, stop: CancellationToken) {
    let api: Api<EdgeCluster> = Api::all(fleet.client.clone());
    let mut events = Watched::new(move || {
        let api = api.clone();
        listed_anew(move || watcher(api.clone(), Config::default()))
    });
    let mut known = EdgeClusters::default();
    // Sources that are no members, as it was last told, and whether on an EdgeCluster too.
    let mut refused: BTreeMap<Origin, (Refusal, bool)> = BTreeMap::new();
    let mut running: BTreeMap<String, Running> = BTreeMap::new();
    let mut leaving: JoinSet<String> = JoinSet::new();
    let mut gone: BTreeSet<String> = BTreeSet::new();
    let mut dealer = Dealer::new(
        fleet.drift,
        fleet.chart_crds,
        fleet.tenant_values,
        fleet.handling,
    )
    .locked_down(fleet.lockdown.clone());
    let mut overlays = Overlays::default();
    let mut writes: JoinSet<Written> = JoinSet::new();
    let mut writing: BTreeSet<String> = BTreeSet::new();
    let mut wrote = given::Wrote::default();
    let mut agenda = Agenda::default();
    let mut heartbeat = tokio::time::interval(HEARTBEAT);
    let begun = Boot::now();
    let mut book = Book::new(
        fleet.client.clone(),
        fleet.namespace.clone(),
        fleet.sources.clone(),
    );
    let mut reminders = Reminders::default();
    let mut retirements = Retirements::default();
    let mut readings: JoinSet<Reading> = JoinSet::new();
    let mut orders = fleet.shared.voices.deployments().orders();
    let mut placements = fleet.shared.voices.placements().orders();
    let mut led = None;
    // The epoch that this hub's tenure began with, and the one that was dealt in last.
    let (mut first_epoch, mut dealt_epoch) = (0, 0);
    // Facts change often, and the rest does not follow from them.
    let (mut look, mut look_next) = (true, Boot::default());
    // When there is to be a look though nothing changes.
    let mut look_at: Option<Boot> = None;
    loop {
        let now = Boot::now();
        look |= look_at.take_if(|at| *at <= now).is_some();
        let leading = fleet.lead.writes(now);
        let stand = fleet.lead.stand();
        let tenure = stand.tenure();
        if events.begins(tenure) {
            // Nothing is decided by what a standby has seen: it may be old.
            known.unlist();
            fleet.reports.aim_anew();
            retirements.read_again();
            readings = JoinSet::new();
            first_epoch = tenure.map_or(0, |tenure| tenure.epoch);
        }
        if leading && led != tenure.map(|tenure| tenure.since) {
            // Another hub may have told of what was to be told of, and written who is a member.
            reminders = Reminders::default();
            wrote = given::Wrote::default();
            book.read_again();
            agenda.extend(known.objects.keys().cloned());
            led = tenure.map(|tenure| tenure.since);
        }
        // Changes that come one after the other are looked at together.
        let ends = stand == Stand::Leaving;
        if look && known.synced && now >= look_next && !ends {
            look = false;
            let marks = known.objects.values().filter_map(mark);
            fleet.lead.sees(marks);
            let bound = known.bound();
            book.follow(&bound);
            let membership = members_now(&fleet, &bound, &book, now.since(begun) < PATIENCE);
            tell_refused(
                &fleet.shared,
                &known,
                &mut refused,
                &membership.refused,
                leading,
            );
            look_at = patience_ends(membership.waiting, begun, now);
            // Before anybody new is heard of it.
            fleet.reports.aim(targets(&known));
            let mut wanted = wanted(&fleet, &membership);
            let waiting = acceptance::take_waiting(&mut wanted, &known, &fleet.accepting);
            let wanted = &wanted;
            for name in std::mem::take(&mut known.anew) {
                fleet.shared.voices.forget_agent(&name, now);
                fleet.found.forget_agent(&name);
            }
            for (name, object) in &known.objects {
                if let Some(until) = certificate_end(object) {
                    fleet.shared.voices.agent_known(name, now);
                    // Until it is heard itself, by this hub and in this tenure.
                    let leads = tenure.is_some();
                    fleet.shared.facts.set(name, |facts| {
                        facts.certificate_said &= leads;
                        if !facts.certificate_said {
                            facts.certificate = Some(Validity::until(until));
                        }
                    });
                }
            }
            for (name, member) in wanted.iter().chain(&waiting) {
                // An EdgeCluster comes first: its age decides between two that are one cluster.
                if !known.objects.contains_key(name) {
                    // One that was dismissed is not made again: first it is read who was.
                    let may = leading && book.is_read() && !writing.contains(name);
                    let due = agenda.time(name);
                    if may && due > now {
                        look_at = Some(look_at.map_or(due, |at| at.min(due)));
                    } else if may && writes.len() < WRITERS {
                        writing.insert(name.clone());
                        agenda.wait(name, Boot(now.0 + PACE));
                        let (client, source) = (fleet.client.clone(), member.1.clone());
                        let accepted = waiting.contains_key(name).then_some(false);
                        let write = create(client, name.clone(), source, accepted);
                        writes.spawn(fleet.lead.tracked(write));
                    } else {
                        // It waits for its turn; else what it waits for is a change.
                        look |= may;
                    }
                    continue;
                }
                if waiting.contains_key(name) {
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
                .filter(|name| {
                    let object = known.objects.get(*name);
                    !membership.unseen.contains_key(*name)
                        || object.is_some_and(|object| !acceptance::is_accepted(object))
                })
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
            let given = fleet.given.see();
            // The epoch of a tenure may be given before it is told of: by then all is to be listed anew.
            if let Some(tenure) = tenure.filter(|tenure| given.epoch >= tenure.epoch) {
                dealt_epoch = tenure.epoch;
            }
            // Until home's objects are known nobody is given anything (design §3, rule 1).
            let ordered = orders.see();
            let placed = placements.see();
            let placed = placed.or_else(|| (!fleet.place_tenants).then(BTreeMap::new));
            fleet.overlaying.ask(known.objects.values());
            let held = fleet.overlaying.readings.see();
            let claims = claims(&known, wanted, &membership, &fleet.found);
            let verdicts = identity::verdicts(&claims);
            for (name, object) in &known.objects {
                let doubt = membership
                    .troubled
                    .get(name)
                    .or_else(|| membership.unseen.get(name))
                    .or_else(|| membership.members.get(name)?.stale.as_ref());
                say_of_source(&fleet.shared, name, doubt);
                let seen = wanted.contains_key(name) || membership.unseen.contains_key(name);
                // Without a source, and after a restart too: say so.
                if waiting.contains_key(name) {
                    acceptance::say_waiting(&fleet.shared, name, object, leading, now);
                } else if !seen && !gone.contains(name) {
                    let why = membership.gone.get(name);
                    say_source_gone(&fleet.shared, name, object, why, now);
                }
                let wishes = wishes(object);
                let suspended = membership
                    .members
                    .get(name)
                    .and_then(|source| source.suspended.clone());
                let entry = enter(&fleet.members, &known, name);
                let verdict = verdicts.get(name);
                let held_back =
                    verdict.and_then(|verdict| identity::held_back(name, verdict, wishes.banned));
                let asleep = suspended.map(|why| (reason::SUSPENDED, why));
                let standing = retirement::leaving(object).then(|| {
                    let paused = wishes.paused.then(|| "it is paused".to_owned());
                    let held_back = held_back.as_ref().or(asleep.as_ref());
                    let held_back = held_back.map(|(_, why)| why.clone());
                    standing(
                        &fleet,
                        name,
                        &entry,
                        retirements.of(object),
                        held_back.or(paused),
                    )
                });
                let step = retirement::step(object, &standing.unwrap_or_default());
                let order = step.order(wishes.paused || asleep.is_some());
                let retires = (entry.slot.get().as_ref()).is_some_and(|slot| slot.desired.retire);
                let order = retirement::given(order, held_back.is_some(), retires);
                let had = || Some(entry.slot.get().as_ref()?.desired.chart.clone());
                let chart = overlays.of((name, object), &given, &held, had);
                let had = || Some(entry.slot.get().as_ref()?.desired.namespaces.clone());
                let namespaces = namespaces::of_member(&fleet.namespaces, &object.spec, had);
                let next = order.and_then(|order| {
                    let before = entry.slot.get();
                    let deployments = ordered.as_ref()?.get(name);
                    let placed_there = placed.as_ref()?.get(name);
                    let dealt = Dealt {
                        chart: chart.chart.as_deref()?,
                        own: chart.own || namespaces.own,
                        namespaces: &namespaces.configuration,
                        deployments: deployments.map_or(&[], |orders| orders),
                        placed: placed_there.map_or(&[], |orders| orders),
                    };
                    dealer.next(before.as_ref(), dealt_epoch, &dealt, order, now)
                });
                let too_large = next.as_ref().and_then(|next| too_large(&next.desired));
                let problem = too_large.as_ref().or(namespaces.problem.as_ref());
                let values = problem.unwrap_or(&chart.values);
                tell_of_values(&fleet.shared, object, values, leading);
                let acted = (running.get(name)).is_some_and(|proxy| proxy.permit.get().acts);
                let acts = stand.acts(acted);
                let deals = stand.deals(given.epoch, acts);
                if let Some(next) = next.filter(|_| too_large.is_none() && deals) {
                    let chart = next.desired.chart.applied_name();
                    if fleet.reports.dealt(name, &chart) {
                        fleet.shared.voices.deployments().look_again();
                    }
                    entry.slot.send_replace(Some(next));
                }
                let condition = step.condition();
                fleet
                    .shared
                    .facts
                    .set(name, |facts| facts.uninstalled = condition);
                let due =
                    agenda.is_due(name, now) && !writing.contains(name) && writes.len() < WRITERS;
                let again = agenda.look_again(name, writing.contains(name), now);
                let mut look_again =
                    |at: Boot| look_at = Some(look_at.map_or(at, |due| due.min(at)));
                let may_write = leading && fleet.lead.mark(mark(object)).is_some();
                if let Some(finalizers) = step.finalizers(object).filter(|_| may_write) {
                    if due {
                        writing.insert(name.clone());
                        agenda.wait(name, Boot(now.0 + PACE));
                        writes.spawn(fleet.lead.tracked(write_finalizers(
                            fleet.client.clone(),
                            name.clone(),
                            object.metadata.resource_version.clone(),
                            finalizers,
                        )));
                    } else {
                        look_again(again);
                    }
                }
                let uid = object.metadata.uid.clone().unwrap_or_default();
                if step == Step::Read && !retirements.reading.contains(&uid) {
                    if due {
                        retirements.reading.insert(uid.clone());
                        let client = fleet.client.clone();
                        readings.spawn(retirement::read(client, name.clone(), uid));
                    } else {
                        look_again(again);
                    }
                }
                if leading && let Some(news) = retirements.news(object, &step) {
                    let (uid, reason) = (news.uid.clone(), news.reason);
                    if fleet.shared.notices.offer_news(news) {
                        retirements.was_told(uid, reason);
                    } else {
                        look_again(Boot(now.0 + PACE));
                    }
                }
                let held_back = held_back.or(asleep);
                let admission = Admission {
                    refused: wishes.banned.then(|| banned(name)),
                    cluster_uid: object
                        .status
                        .as_ref()
                        .and_then(|status| status.cluster_uid.clone()),
                    keys: (object.status.as_ref()).and_then(|status| status.agent_keys.clone()),
                };
                entry.admission.put(admission.clone());
                if let Some(proxy) = running.get(name) {
                    proxy.allowed.put(allowed(object));
                    let may_act = held_back.is_none() && verdicts.contains_key(name);
                    // After what it is to act by: a standby's orders are of no epoch, or of an earlier lead's.
                    let slot = entry.slot.get();
                    let slot_epoch = slot.as_ref().map(|slot| slot.desired.version.epoch);
                    // Nor does it begin by those of an earlier tenure.
                    let of_now = |epoch| epoch > 0 && (acted || epoch >= first_epoch);
                    let acts = acts && (acted || deals) && slot_epoch.is_some_and(of_now);
                    let permit = Permit {
                        may_act,
                        acts,
                        cluster_uid: admission.cluster_uid.clone(),
                    };
                    proxy.permit.put(permit);
                }
                fleet.shared.voices.hold_back(name, held_back, now);
            }
            let here = |name: &str| known.objects.contains_key(name);
            // Where a person has deleted the EdgeCluster, nobody acts.
            for (_, proxy) in running.iter().filter(|(name, _)| !here(name)) {
                proxy.permit.put(Permit::default());
            }
            reminders.keep(here);
            overlays.keep(here);
            let uids: BTreeSet<&str> = known
                .objects
                .values()
                .filter_map(|object| object.metadata.uid.as_deref())
                .collect();
            retirements.keep(|uid| uids.contains(uid));
            fleet.members.keep(here, |name| running.contains_key(name));
            fleet.members.listed_in(events.of());
            let needed = |name: &str| {
                here(name)
                    || running.contains_key(name)
                    || gone.contains(name)
                    || wanted.contains_key(name)
            };
            for name in fleet.shared.facts.forget(needed) {
                fleet.shared.voices.forget(&name);
                fleet.found.remove(&name);
                wrote.forget(&name);
                agenda.forget(&name);
            }
            // With many members a look is long, and the calls that wait for this loop get as much time as it took.
            let ended = Boot::now();
            look_next = Boot(ended.0 + LOOK_EVERY.max(ended.since(now)));
            // Without this the loop would go on for as long as anything is ready, in one poll.
            tokio::task::yield_now().await;
        }
        let book_due = book.work(&mut known, &fleet.lead, now);
        for name in fleet.shared.facts.take_changed() {
            // It goes once its member has said that it is done.
            look |= known.objects.get(&name).is_some_and(retirement::leaving);
            // A change of the chart changes the facts of all at once: first it goes to the members.
            if agenda.add(&name) {
                let at = agenda.time(&name).max(Boot(now.0 + PACE));
                agenda.wait(&name, at);
            }
        }
        let mut wake = (look && known.synced && !ends).then_some(look_next);
        for due in book_due.into_iter().chain(look_at) {
            wake = Some(wake.map_or(due, |wake| wake.min(due)));
        }
        let (mut looked, mut more) = (0, false);
        while leading && known.synced && writes.len() < WRITERS {
            if looked >= BATCH {
                more = true;
                break;
            }
            let Some(name) = agenda.next(now) else {
                wake = wake.into_iter().chain(agenda.wakes()).min();
                break;
            };
            looked += 1;
            // The end of the write puts it here again.
            if writing.contains(&name) {
                continue;
            }
            let (Some(object), Some(mut facts)) =
                (known.objects.get(&name), fleet.shared.facts.get(&name))
            else {
                continue;
            };
            facts.unheard = tenure.is_none_or(|tenure| now.since(tenure.since) >= UNHEARD);
            let skip = fleet.shared.allow_chart_skip;
            let counts = fleet.reports.counts(&name, skip);
            let summarised = fleet.reports.listing(&name, skip);
            let generation = object.metadata.generation.unwrap_or_default();
            let Some(epoch) = fleet.lead.mark(mark(object)) else {
                // It is of a later lead: looked at again under a later epoch.
                agenda.wait(&name, Boot(now.0 + AFTER_FAILURE));
                agenda.add(&name);
                look = true;
                continue;
            };
            let mut status = facts::status(
                &name,
                object.status.as_ref(),
                &facts,
                counts,
                summarised,
                generation,
                clock::wall(),
            );
            let recorded = object.status.as_ref();
            let member = fleet.members.get(&name).ok();
            let slot = member.and_then(|member| member.slot.get());
            status.desired = given::desired(
                recorded.and_then(|status| status.desired.as_ref()),
                wrote.of(&name),
                slot.as_ref(),
                now,
                clock::wall(),
            );
            let (record, next) = (conditions(object), &status.conditions);
            reminders.look(&name, record, next, clock::wall(), |(reason, message)| {
                fleet.shared.notices.offer(Notice {
                    member: name.clone(),
                    uid: object.metadata.uid.clone().unwrap_or_default(),
                    reason,
                    message,
                })
            });
            if wrote.is_so(&name, recorded, &status) {
                continue;
            }
            wrote.note(&name, &status);
            status.hub_epoch = Some(epoch);
            agenda.wait(&name, Boot(now.0 + PACE));
            writing.insert(name.clone());
            let version = object.metadata.resource_version.clone();
            let patch = status_patch(recorded, &status);
            let write = write_status(fleet.client.clone(), name, version, patch);
            writes.spawn(fleet.lead.tracked(write));
        }
        tokio::select! {
            () = stop.cancelled() => break,
            () = tokio::task::yield_now(), if more => {}
            changed = fleet.sources.changed() => { if changed.is_err() { break } look = true; }
            changed = fleet.given.changed() => {
                if changed.is_err() { break }
                // A new chart goes out at once.
                (look, look_next) = (true, Boot::default());
            }
            changed = fleet.overlaying.readings.changed() => { if changed.is_err() { break } look = true; }
            // They are given by somebody who may have ended, and stand.
            Ok(()) = orders.changed() => look = true,
            Ok(()) = placements.changed() => look = true,
            decided = fleet.lead.changed() => {
                if !decided { break }
                (look, look_next) = (true, Boot::default());
            }
            () = fleet.found.changed.notified() => look = true,
            () = fleet.shared.facts.changed.notified() => {}
            _ = heartbeat.tick() => {
                look = true;
                agenda.extend(known.objects.keys().cloned());
            }
            Some(event) = events.next() => match event {
                Ok(event) => {
                    cut_off(&fleet.members, &event);
                    let mut dirty = BTreeSet::new();
                    look |= known.see(event, &mut dirty);
                    // What is ready already is taken in together.
                    for _ in 0..BATCH {
                        match events.next().now_or_never() {
                            Some(Some(Ok(event))) => {
                                cut_off(&fleet.members, &event);
                                look |= known.see(event, &mut dirty);
                            }
                            _ => break,
                        }
                    }
                    agenda.extend(dirty);
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
            () = book.answered(&mut known) => look = true,
            Some(reading) = readings.join_next(), if !readings.is_empty() => {
                if let Ok(reading) = reading {
                    look = true;
                    retirements.take(&reading);
                    if reading.found.is_none() {
                        let pause = AFTER_FAILURE.mul_f64(0.5 + rand::random::<f64>());
                        agenda.wait(&reading.name, Boot(Boot::now().0 + pause));
                    }
                }
            }
            Some(written) = writes.join_next(), if !writes.is_empty() => {
                if let Ok(written) = written {
                    let of = HomeWrites::EDGE_CLUSTER;
                    fleet.reports.writes.count(of, written.came);
                    let name = written.name.clone();
                    writing.remove(&name);
                    agenda.add(&name);
                    if !written.went_through() {
                        wrote.forget(&name);
                    }
                    let failures = agenda.ended(&name, written.came);
                    if let Some(pause) = written.again_after(failures, rand::random()) {
                        // A while later, not all at once.
                        look = true;
                        agenda.wait(&name, Boot(Boot::now().0 + pause));
                    }
                    look |= known.take_written(written);
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

/// How the values stand that a member is to get: in its EdgeCluster, and in an event where they are its own
/// and cannot be had.
fn tell_of_values(shared: &Shared, object: &EdgeCluster, values: &Values, leading: bool) {
    let name = object.metadata.name.as_deref().unwrap_or_default();
    let mut news = None;
    shared.facts.set(name, |facts| {
        if *values == Values::NotKnown {
            return;
        }
        if facts.values != *values
            && let Values::Said(state) = values
            && state.truth == Truth::False
        {
            news = Some(state.message.clone());
        }
        facts.values = values.clone();
    });
    let own = chart_values::has_own(&object.spec) || object.spec.namespace_configuration.is_some();
    if let Some(message) = news.filter(|_| leading && own) {
        shared.notices.tell(Notice {
            member: name.to_owned(),
            uid: object.metadata.uid.clone().unwrap_or_default(),
            reason: "ValuesUnresolved",
            message,
        });
    }
}

/// When new names are given away though a provider has not listed yet; `None` where nothing waits for that
/// alone. A source that is yet to be read is a change when it has been.
fn patience_ends(waiting: bool, begun: Boot, now: Boot) -> Option<Boot> {
    let ends = Boot(begun.0 + PATIENCE);
    (waiting && now < ends).then_some(ends)
}

/// Which source is which member, by what is known now.
fn members_now(fleet: &Fleet, bound: &Bound, book: &Book, patient: bool) -> Membership {
    let sources = fleet.sources.get();
    let found: Vec<&Found> = sources.iter().collect();
    let before = Before {
        bound,
        dismissed: &book.dismissed(bound),
        patient,
    };
    membership::membership(&found, before)
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

/// Tells of sources that are no members: once, in the log, and on the EdgeCluster whose name they ask
/// for.
fn tell_refused(
    shared: &Shared,
    known: &EdgeClusters,
    told: &mut BTreeMap<Origin, (Refusal, bool)>,
    refused: &BTreeMap<Origin, Refusal>,
    leading: bool,
) {
    told.retain(|origin, _| refused.contains_key(origin));
    for (origin, refusal) in refused {
        let before = told.get(origin).filter(|(before, _)| before == refusal);
        if before.is_none() {
            tracing::warn!(%origin, reason = refusal.reason(), "is no member: {refusal}");
        }
        let holder = refusal
            .member()
            .and_then(|member| known.objects.get(member));
        let mut on_holder = before.is_some_and(|(_, on_holder)| *on_holder);
        if let Some(holder) = holder.filter(|_| leading && !on_holder) {
            on_holder = shared.notices.offer(Notice {
                member: holder.metadata.name.clone().unwrap_or_default(),
                uid: holder.metadata.uid.clone().unwrap_or_default(),
                reason: refusal.reason(),
                message: format!("{origin} is no member: {refusal}"),
            });
        }
        told.insert(origin.clone(), (refusal.clone(), on_holder));
    }
}

fn claims(
    known: &EdgeClusters,
    wanted: &BTreeMap<String, (Access, SourceRef)>,
    membership: &Membership,
    found: &Clusters,
) -> BTreeMap<String, Claim> {
    // Members that are yet to get their EdgeCluster count too: one of them may go first.
    let names: BTreeSet<&String> = known.objects.keys().chain(wanted.keys()).collect();
    names
        .into_iter()
        .map(|name| {
            let object = known.objects.get(name);
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

/// How a member that leaves with its releases stands.
fn standing(
    fleet: &Fleet,
    name: &str,
    entry: &Member,
    read: Option<retirement::Deletion>,
    held_back: Option<String>,
) -> Standing {
    let facts = fleet.shared.facts.get(name).unwrap_or_default();
    let ordered = entry.slot.get().as_ref().and_then(|slot| {
        let desired = &slot.desired;
        desired.retire.then(|| (desired.version, desired.digest()))
    });
    Standing {
        read,
        held_back,
        connected: facts.connected.truth == Truth::True,
        taken: ordered.is_some() && ordered == facts.applied,
        retired: fleet.reports.retired(name).map(|retired| {
            let (deployments, gone) = fleet.shared.voices.deployments().retired(name);
            Retired {
                tenants: retired.tenants + deployments,
                gone: retired.gone + gone,
            }
        }),
    }
}

/// The epoch of the hub that has written it last.
fn mark(object: &EdgeCluster) -> Option<u64> {
    object.status.as_ref()?.hub_epoch
}

fn conditions(object: &EdgeCluster) -> &[Condition] {
    let status = object.status.as_ref();
    status.map_or(&[], |status| &status.conditions)
}

fn enter(members: &Members, known: &EdgeClusters, name: &str) -> Arc<Member> {
    let uid = known
        .objects
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

/// Whose Tenants on home may name the member.
fn allowed(object: &EdgeCluster) -> Allowed {
    Allowed::new(object.spec.allowed_namespaces.as_deref())
}

/// What Tenants on home may name.
fn targets(known: &EdgeClusters) -> Targets {
    let objects = known.objects.iter();
    objects
        .map(|(name, object)| {
            let source = object.spec.source_ref.as_ref();
            let target = Target {
                source_namespace: source.and_then(|source| source.namespace.clone()),
                allowed: allowed(object),
                cluster_uid: (object.status.as_ref()).and_then(|status| status.cluster_uid.clone()),
                duplicate: conditions(object)
                    .iter()
                    .any(|condition| condition.reason == facts::reason::DUPLICATE),
                resolved: find(conditions(object), TARGET_RESOLVED),
            };
            (name.clone(), target)
        })
        .collect()
}

fn start(fleet: &Fleet, name: &str, access: Access, member: &Member) -> Running {
    let (access, access_rx) = watch::channel(access);
    let (permit, permit_rx) = watch::channel(Permit::default());
    let (allowed, allowed_rx) = watch::channel(Allowed::default());
    let stop = CancellationToken::new();
    let inputs = Inputs {
        access: access_rx,
        permit: permit_rx,
        slot: member.slot.subscribe(),
        presence: fleet.shared.voices.presence(name),
        allowed: allowed_rx,
    };
    let following = proxy::run(
        name.to_owned(),
        Arc::clone(&fleet.shared),
        inputs,
        stop.clone(),
    );
    let span = tracing::error_span!("proxy", member = name);
    let watched = format!("the proxy of member {name}");
    let following = fleet.shared.watchdog.watch(watched, following);
    let task = tokio::spawn(following.instrument(span));
    Running {
        access,
        permit,
        allowed,
        stop,
        task,
    }
}

/// A kubeconfig of the same content is no news.
fn update(channel: &watch::Sender<Access>, access: Access) {
    channel.send_if_modified(|before| {
        let changed = match (&*before, &access) {
            (Access::Kubeconfig(a, before), Access::Kubeconfig(b, after)) => {
                a != b || before != after
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unreadable_source_causes_no_polling() {
        let (begun, soon) = (Boot(PATIENCE), Boot(PATIENCE + LOOK_EVERY));
        let ends = Boot(PATIENCE + PATIENCE);
        assert_eq!(patience_ends(true, begun, soon), Some(ends));
        assert_eq!(patience_ends(false, begun, soon), None);
        assert_eq!(patience_ends(true, begun, ends), None);
    }
}
