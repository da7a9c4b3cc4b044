//! The members: an EdgeCluster and a proxy for each source, and the verdict which of them may act.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use krypton_agent::clock::{self, Boot};
use krypton_agent::fence::Hold;
use krypton_agent::watch_backoff::WatchBackoff;
use krypton_common::conditions::{State, Truth};
use krypton_common::names;
use krypton_crds::edge_cluster::{EdgeCluster, EdgeClusterSpec, SourceRef};
use kube::Client;
use kube::api::{Api, Patch, PatchParams, PostParams};
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{Config, Event, watcher};
use tokio::sync::watch;
use tokio::task::{JoinHandle, JoinSet};
use tokio_util::sync::CancellationToken;

use crate::aggregate::Hearing;
use crate::discovery::{Source, Sources};
use crate::facts::{self, reason};
use crate::found::Found;
use crate::identity::{self, Claim, Verdict};
use crate::proxy::{self, Access, Given, Inputs, Shared, Wishes};
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

struct Running {
    access: watch::Sender<Access>,
    wishes: watch::Sender<Wishes>,
    verdict: watch::Sender<Verdict>,
    stop: CancellationToken,
    task: JoinHandle<()>,
}

/// What the fleet is built from.
pub struct Fleet {
    pub client: Client,
    /// How home is reached as a member; `None` without `--self-cluster`.
    pub home: Option<kube::Config>,
    pub sources: watch::Receiver<Sources>,
    pub given: watch::Receiver<Given>,
    /// Whether this hub is the one that writes on home.
    pub lead: watch::Receiver<Hold>,
    pub shared: Arc<Shared>,
    pub found: Arc<Found>,
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
    let mut writes: JoinSet<(String, Option<EdgeCluster>)> = JoinSet::new();
    let mut writing: BTreeSet<String> = BTreeSet::new();
    let mut next_write: BTreeMap<String, Boot> = BTreeMap::new();
    let mut dirty: BTreeSet<String> = BTreeSet::new();
    let mut heartbeat = tokio::time::interval(HEARTBEAT);
    loop {
        let now = Boot::now();
        let wanted = wanted(&fleet);
        let leading = fleet.lead.borrow_and_update().may_start(now);
        if let Some(wanted) = wanted.as_ref().filter(|_| known.synced) {
            for (name, member) in wanted {
                // An EdgeCluster comes first: its age decides between two that are one cluster.
                if !known.edge_clusters.contains_key(name) {
                    let due = next_write.get(name).is_none_or(|at| *at <= now);
                    if leading && due && !writing.contains(name) && writes.len() < WRITERS {
                        writing.insert(name.clone());
                        next_write.insert(name.clone(), Boot(now.0 + PACE));
                        writes.spawn(create(fleet.client.clone(), name.clone(), member.1.clone()));
                    }
                } else if !running.contains_key(name) && !gone.contains(name) {
                    running.insert(name.clone(), start(&fleet, name, member.0.clone()));
                } else if let Some(member_task) = running.get(name) {
                    update(&member_task.access, member.0.clone());
                }
            }
            let departed: Vec<String> = running
                .keys()
                .filter(|name| !wanted.contains_key(*name))
                .cloned()
                .collect();
            for name in departed {
                let Some(member) = running.remove(&name) else {
                    continue;
                };
                tracing::info!(member = %name, "the member leaves; nothing is uninstalled");
                member.stop.cancel();
                gone.insert(name.clone());
                leaving.spawn(async move {
                    if let Err(error) = member.task.await {
                        tracing::error!(member = %name, %error, "the proxy ended badly");
                    }
                    name
                });
            }
            // An EdgeCluster without a source, after a restart: say so.
            for name in known.edge_clusters.keys() {
                if !wanted.contains_key(name) && !gone.contains(name) {
                    say_source_gone(&fleet.shared, name);
                }
            }
            let verdicts = identity::verdicts(&claims(&known, wanted, &fleet.found));
            for (name, member) in &running {
                let wishes = known
                    .edge_clusters
                    .get(name)
                    .map(wishes)
                    .unwrap_or_default();
                send(&member.wishes, wishes);
                send(
                    &member.verdict,
                    verdicts.get(name).cloned().unwrap_or(Verdict::Wait),
                );
            }
        }
        dirty.extend(fleet.shared.facts.take_changed());
        let mut wake: Option<Boot> = None;
        for name in dirty.clone() {
            if !leading {
                break;
            }
            let (Some(object), Some(facts)) = (
                known.edge_clusters.get(&name),
                fleet.shared.facts.get(&name),
            ) else {
                continue;
            };
            if writing.contains(&name) || writes.len() >= WRITERS {
                continue;
            }
            if let Some(at) = next_write.get(&name).filter(|at| **at > now) {
                wake = Some(wake.map_or(*at, |wake| wake.min(*at)));
                continue;
            }
            dirty.remove(&name);
            let counts = fleet.shared.reports.counts(&name);
            let generation = object.metadata.generation.unwrap_or_default();
            let status = facts::status(
                object.status.as_ref(),
                &facts,
                counts,
                generation,
                clock::wall(),
            );
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
            changed = fleet.sources.changed() => if changed.is_err() { break },
            changed = fleet.lead.changed() => if changed.is_err() { break },
            () = fleet.found.changed.notified() => {}
            () = fleet.shared.facts.changed.notified() => {}
            _ = heartbeat.tick() => dirty.extend(known.edge_clusters.keys().cloned()),
            Some(event) = events.next() => match event {
                Ok(event) => see(&mut known, &mut dirty, event),
                Err(error) => tracing::warn!(error = %chain(&error), "watching EdgeClusters failed; it is tried again"),
            },
            Some(left) = leaving.join_next(), if !leaving.is_empty() => {
                if let Ok(name) = left {
                    fleet.found.forget(&name);
                    say_source_gone(&fleet.shared, &name);
                    gone.remove(&name);
                }
            }
            Some(written) = writes.join_next(), if !writes.is_empty() => {
                if let Ok((name, object)) = written {
                    writing.remove(&name);
                    match object {
                        Some(object) => { known.edge_clusters.insert(name, object); }
                        // Refused or lost: a while later, not all at once.
                        None => {
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

/// The members there are to be, with how they are reached and where they come from. `None` while
/// the sources are not known: then nobody leaves.
fn wanted(fleet: &Fleet) -> Option<BTreeMap<String, (Access, SourceRef)>> {
    let sources = fleet.sources.borrow().clone()?;
    let mut wanted: BTreeMap<String, (Access, SourceRef)> = sources
        .iter()
        .map(|(name, source)| (name.clone(), (access(source), source_ref(source))))
        .collect();
    if let Some(config) = &fleet.home {
        let source = SourceRef {
            kind: "SelfCluster".to_owned(),
            namespace: None,
            name: None,
        };
        let access = Access::Home(Box::new(config.clone()));
        wanted.insert(names::SELF_CLUSTER.to_owned(), (access, source));
    }
    Some(wanted)
}

fn access(source: &Source) -> Access {
    Access::Kubeconfig(source.access.clone())
}

fn source_ref(source: &Source) -> SourceRef {
    SourceRef {
        kind: "Secret".to_owned(),
        namespace: Some(source.namespace.clone()),
        name: Some(source.name.clone()),
    }
}

fn claims(
    known: &Known,
    wanted: &BTreeMap<String, (Access, SourceRef)>,
    found: &Found,
) -> BTreeMap<String, Claim> {
    // Members that are yet to get their EdgeCluster count too: one of them may go first.
    let names: BTreeSet<&String> = known.edge_clusters.keys().chain(wanted.keys()).collect();
    names
        .into_iter()
        .map(|name| {
            let object = known.edge_clusters.get(name);
            let uid = found.get(name);
            let claim = Claim {
                present: wanted.contains_key(name),
                created: object
                    .and_then(|object| object.metadata.creation_timestamp.as_ref())
                    .map(|time| time.0),
                recorded: object.and_then(|object| object.status.as_ref()?.cluster_uid.clone()),
                attempted: uid.is_some(),
                found: uid.flatten(),
            };
            (name.clone(), claim)
        })
        .collect()
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

fn start(fleet: &Fleet, name: &str, access: Access) -> Running {
    let (access, access_rx) = watch::channel(access);
    let (wishes, wishes_rx) = watch::channel(Wishes::default());
    let (verdict, verdict_rx) = watch::channel(Verdict::Wait);
    let stop = CancellationToken::new();
    let inputs = Inputs {
        access: access_rx,
        wishes: wishes_rx,
        verdict: verdict_rx,
        given: fleet.given.clone(),
    };
    let task = tokio::spawn(proxy::run(
        name.to_owned(),
        Arc::clone(&fleet.shared),
        inputs,
        stop.clone(),
    ));
    Running {
        access,
        wishes,
        verdict,
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
            (Access::Kubeconfig(Ok(before)), Access::Kubeconfig(Ok(after))) => {
                before.digest != after.digest
            }
            (Access::Kubeconfig(Err(before)), Access::Kubeconfig(Err(after))) => before != after,
            (Access::Home(_), Access::Home(_)) => false,
            _ => true,
        };
        if changed {
            *before = access;
        }
        changed
    });
}

fn say_source_gone(shared: &Shared, name: &str) {
    let message =
        "the kubeconfig Secret is gone or no longer labelled; its releases are left alone";
    shared.facts.set(name, |facts| {
        facts.proxied = false;
        facts.holder = None;
        facts.resolved = State::new(Truth::False, reason::SOURCE_GONE, message);
        facts.connected = State::new(Truth::False, reason::SOURCE_GONE, message);
        facts.healthy = State::new(Truth::Unknown, reason::SOURCE_GONE, message);
    });
    let why = "the cluster has left the fleet: its kubeconfig Secret is gone".to_owned();
    shared.reports.hearing(name, Hearing::Silent(why));
}

fn see(known: &mut Known, dirty: &mut BTreeSet<String>, event: Event<EdgeCluster>) {
    let name = |object: &EdgeCluster| object.metadata.name.clone().unwrap_or_default();
    match event {
        Event::Init => known.listed = Some(BTreeSet::new()),
        Event::InitApply(object) => {
            known.listed.get_or_insert_default().insert(name(&object));
            known.edge_clusters.insert(name(&object), object);
        }
        Event::InitDone => {
            let listed = known.listed.take().unwrap_or_default();
            known.edge_clusters.retain(|name, _| listed.contains(name));
            known.synced = true;
            dirty.extend(known.edge_clusters.keys().cloned());
        }
        Event::Apply(object) => {
            dirty.insert(name(&object));
            known.edge_clusters.insert(name(&object), object);
        }
        Event::Delete(object) => {
            known.edge_clusters.remove(&name(&object));
        }
    }
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
    let api: Api<EdgeCluster> = Api::all(client);
    let params = PostParams::default();
    let call = api.create(&params, &object);
    (
        name.clone(),
        outcome(&name, "making", tokio::time::timeout(DEADLINE, call).await),
    )
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
