//! Where members come from. Several providers look at once, each at one kind of object; each tells of
//! all that it has found, in one slot, so that one that hangs or floods costs nobody else.

pub mod cluster_api;
pub mod cluster_profile;
pub mod kamaji;
pub mod kubeconfig_files;
mod kubeconfig_secret;
pub mod labelled_secrets;
pub mod listed;
pub mod membership;
pub mod named_secrets;
pub mod object_and_secret;
pub mod register;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use futures::future::BoxFuture;
use futures::{FutureExt as _, StreamExt as _};
use jiff::Timestamp;
use krypton_crds::edge_cluster::SourceRef;
use krypton_runtime::newest::{Newest as _, NewestSeen as _};
use krypton_runtime::watchdog::Watchdog;
use krypton_types::kubeconfig::Sanitized;
use tokio::sync::{Notify, watch};
use tokio_util::sync::CancellationToken;
use tracing::Instrument as _;

/// What kind of object a member was found by: `spec.sourceRef.kind` of its EdgeCluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// A labelled kubeconfig Secret.
    Secret,
    /// `multicluster.x-k8s.io`.
    ClusterProfile,
    /// `cluster.x-k8s.io`.
    Cluster,
    /// `kamaji.clastix.io`.
    TenantControlPlane,
    /// A kubeconfig in a file of the hub.
    File,
}

impl Kind {
    const ALL: [Self; 5] = [
        Self::Secret,
        Self::ClusterProfile,
        Self::Cluster,
        Self::TenantControlPlane,
        Self::File,
    ];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Secret => "Secret",
            Self::ClusterProfile => "ClusterProfile",
            Self::Cluster => "Cluster",
            Self::TenantControlPlane => "TenantControlPlane",
            Self::File => "File",
        }
    }
}

/// The object that a member was found by.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Origin {
    pub kind: Kind,
    /// `None` for a file.
    pub namespace: Option<String>,
    /// Of a file: its path.
    pub name: String,
}

impl Origin {
    /// `None` when it is none of a provider's: `self-cluster`, or of a later version.
    pub fn of(source: &SourceRef) -> Option<Self> {
        let kind = Kind::ALL
            .into_iter()
            .find(|kind| kind.as_str() == source.kind)?;
        Some(Self {
            kind,
            namespace: source.namespace.clone(),
            name: source.name.clone()?,
        })
    }

    /// Whether it is an object of this kind in this namespace; `None`: in any.
    fn is_in(&self, kind: Kind, namespace: Option<&String>) -> bool {
        self.kind == kind && (namespace.is_none() || namespace == self.namespace.as_ref())
    }

    pub fn source_ref(&self) -> SourceRef {
        SourceRef {
            kind: self.kind.as_str().to_owned(),
            namespace: self.namespace.clone(),
            name: Some(self.name.clone()),
        }
    }
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = self.kind.as_str();
        match &self.namespace {
            Some(namespace) => write!(f, "{kind} {namespace}/{}", self.name),
            None => write!(f, "{kind} {}", self.name),
        }
    }
}

/// Why a cluster that was found cannot be reached: a reason of `TargetClusterResolved`, and a text that
/// names the object and says what to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unresolved {
    pub reason: &'static str,
    pub message: String,
}

/// A cluster that was found. One that cannot be reached is a member all the same: it is shown with its
/// fault.
#[derive(Clone, Debug, PartialEq)]
pub struct Source {
    pub origin: Origin,
    /// Of the object; empty for a file.
    pub uid: String,
    /// The name that it asks for.
    pub member: String,
    /// When the object was made: of two that ask for one name, the older gets it.
    pub since: Option<Timestamp>,
    pub access: Result<Arc<Sanitized>, Unresolved>,
    /// Why that is not what it should be now: what was known before stays in use.
    pub stale: Option<Unresolved>,
    /// Why nothing is to be written there for now, though nothing has failed: paused, asleep.
    pub suspended: Option<String>,
}

/// All that one provider has found.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Listing {
    /// `None` until its first list is complete. What was found stays while it is in trouble.
    pub sources: Option<Arc<BTreeMap<Origin, Arc<Source>>>>,
    /// Why it does not see what there is now.
    pub trouble: Option<String>,
    /// It has ended, and finds nothing any more.
    pub closed: bool,
}

/// A source of members.
pub trait Provider: Send + Sync + 'static {
    /// For logs: what it looks at.
    fn describe(&self) -> String;

    /// Whether it would find this object, were it there.
    fn covers(&self, origin: &Origin) -> bool;

    /// Whether it finds an object by a mark on the object itself, and not by a reference to it.
    fn marks(&self) -> bool {
        true
    }

    /// Tells of what there is until it is dropped.
    fn follow(self: Arc<Self>, finds: Finds) -> BoxFuture<'static, ()>;
}

/// The far end of a provider: its slot, and what it is asked to look at again.
#[derive(Debug)]
pub struct Finds {
    listing: watch::Sender<Listing>,
    doubts: Arc<Doubts>,
    departures: Arc<Departures>,
}

impl Finds {
    /// All that is there now. What is the same as before is no news.
    pub fn found(&self, sources: BTreeMap<Origin, Arc<Source>>) {
        self.found_amid(None, sources);
    }

    /// What there is, as far as can be seen: a part of it is in trouble.
    pub fn found_amid(&self, trouble: Option<String>, sources: BTreeMap<Origin, Arc<Source>>) {
        if let Some(before) = &self.listing.get().sources {
            self.departures.note(before, &sources);
        }
        self.listing.send_if_modified(|listing| {
            let next = Listing {
                sources: Some(Arc::new(sources)),
                trouble,
                closed: false,
            };
            let changed = *listing != next;
            *listing = next;
            changed
        });
    }

    /// As before, it cannot be seen what there is; of what is known, more is known.
    pub fn known_better(&self, sources: BTreeMap<Origin, Arc<Source>>) {
        self.listing.send_if_modified(|listing| {
            let changed = listing.sources.as_deref() != Some(&sources);
            listing.sources = Some(Arc::new(sources));
            changed
        });
    }

    /// It cannot be seen what there is.
    pub fn trouble(&self, why: String) {
        self.listing.send_if_modified(|listing| {
            let changed = listing.trouble.as_ref() != Some(&why);
            listing.trouble = Some(why);
            changed
        });
    }

    /// Waits for a source to look at again at once: its cluster has refused the credential.
    pub async fn doubted(&self) -> Origin {
        self.doubts.next().await
    }
}

/// Sources whose credential was refused, each once: bounded by the number of sources.
#[derive(Debug, Default)]
struct Doubts {
    origins: Mutex<BTreeSet<Origin>>,
    more: Notify,
}

impl Doubts {
    fn add(&self, origin: &Origin) {
        let mut origins = self.origins.lock().unwrap_or_else(PoisonError::into_inner);
        origins.insert(origin.clone());
        drop(origins);
        self.more.notify_one();
    }

    async fn next(&self) -> Origin {
        loop {
            let first = {
                let mut origins = self.origins.lock().unwrap_or_else(PoisonError::into_inner);
                origins.pop_first()
            };
            match first {
                Some(origin) => return origin,
                None => self.more.notified().await,
            }
        }
    }
}

/// Sources that this provider has lost since their departure was last judged, and whether it has them
/// again: the newest listing alone does not tell.
#[derive(Debug, Default)]
struct Departures(Mutex<BTreeMap<Origin, bool>>);

impl Departures {
    fn note(&self, before: &BTreeMap<Origin, Arc<Source>>, now: &BTreeMap<Origin, Arc<Source>>) {
        let mut departures = self.lock();
        for origin in now.keys() {
            departures
                .entry(origin.clone())
                .and_modify(|back| *back = true);
        }
        for (origin, source) in before {
            // Of one that is yet to be read it is not known whether it was there.
            if membership::pending(source).is_some() {
                continue;
            }
            match now.get(origin) {
                None => drop(departures.insert(origin.clone(), false)),
                // One that was deleted and made again is another.
                Some(now) if now.uid != source.uid && membership::pending(now).is_none() => {
                    departures.insert(origin.clone(), true);
                }
                Some(_) => {}
            }
        }
    }

    /// The sources that were away. One that another provider lists meanwhile was not, unless it was
    /// marked anew: that is awaited.
    fn take(&self, marks: bool, elsewhere: impl Fn(&Origin) -> bool) -> BTreeSet<Origin> {
        let mut away = BTreeSet::new();
        self.lock().retain(|origin, back| {
            let stays = elsewhere(origin);
            if !stays || (marks && *back) {
                away.insert(origin.clone());
                return false;
            }
            marks
        });
        away
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, BTreeMap<Origin, bool>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A provider that runs, and what it has found.
#[derive(Clone)]
pub struct Found {
    pub provider: Arc<dyn Provider>,
    pub listing: Listing,
    doubts: Arc<Doubts>,
    departures: Arc<Departures>,
}

impl fmt::Debug for Found {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Found")
            .field("provider", &self.provider.describe())
            .field("listing", &self.listing)
            .finish_non_exhaustive()
    }
}

/// All providers.
#[derive(Clone, Debug, Default)]
pub struct Sources(Vec<Found>);

impl Sources {
    pub fn iter(&self) -> impl Iterator<Item = &Found> {
        self.0.iter()
    }

    /// The sources that were away since the last call, whoever lists them.
    pub fn take_departed(&self) -> BTreeSet<Origin> {
        let lists = |at: usize, origin: &Origin| {
            let others = self.0.iter().enumerate().filter(|(other, _)| *other != at);
            let mut listings = others.filter_map(|(_, found)| found.listing.sources.as_deref());
            listings.any(|sources| sources.contains_key(origin))
        };
        let each = self.0.iter().enumerate();
        each.flat_map(|(at, found)| {
            let marks = found.provider.marks();
            found.departures.take(marks, |origin| lists(at, origin))
        })
        .collect()
    }

    /// The credential of this source was refused: it is looked at again at once.
    pub fn doubt(&self, origin: &Origin) {
        // A Secret may be found by its label and by who names it.
        for found in self.0.iter().filter(|found| found.provider.covers(origin)) {
            found.doubts.add(origin);
        }
    }
}

/// Starts all providers; they end with `stop`. The receiver has the newest of each.
pub fn start(
    providers: Vec<Arc<dyn Provider>>,
    watchdog: &Watchdog,
    stop: &CancellationToken,
) -> watch::Receiver<Sources> {
    let mut changes = futures::stream::SelectAll::new();
    let mut all = Vec::new();
    for (index, provider) in providers.into_iter().enumerate() {
        let doubts = Arc::new(Doubts::default());
        let departures = Arc::new(Departures::default());
        let (listing, listings) = watch::channel(Listing::default());
        let finds = Finds {
            listing: listing.clone(),
            doubts: Arc::clone(&doubts),
            departures: Arc::clone(&departures),
        };
        tracing::info!(provider = provider.describe(), "looking for members");
        let name = provider.describe();
        let watched = format!("looking for members: {name}");
        let following = Arc::clone(&provider).follow(finds);
        let stop = stop.clone();
        let span = tracing::error_span!("discovery", provider = name);
        let following = async move {
            // A panic of one provider is its own.
            let following = std::panic::AssertUnwindSafe(following).catch_unwind();
            // At the stop those whom it rests on end as well.
            if let Some(ended) = stop.run_until_cancelled(following).await
                && !stop.is_cancelled()
            {
                tracing::error!(
                    provider = name,
                    panicked = ended.is_err(),
                    "looking for members has ended; those that were found stay as they are, until the hub is started again"
                );
            }
            listing.send_modify(|listing| listing.closed = true);
        };
        tokio::spawn(watchdog.watch(watched, following.instrument(span)));
        changes.push(Box::pin(futures::stream::unfold(
            listings,
            move |mut listings| async move {
                listings.changed().await.ok()?;
                let listing = listings.see();
                Some(((index, listing), listings))
            },
        )));
        all.push(Found {
            provider,
            listing: Listing::default(),
            doubts,
            departures,
        });
    }
    let (sources, receiver) = watch::channel(Sources(all));
    let stop = stop.clone();
    let gathering = async move {
        while let Some(Some((index, listing))) = stop.run_until_cancelled(changes.next()).await {
            sources.send_modify(|sources| sources.0[index].listing = listing);
        }
        // Nobody leaves because the hub stops.
        stop.cancelled().await;
    };
    tokio::spawn(watchdog.watch("gathering members", gathering));
    receiver
}

#[cfg(test)]
impl Found {
    /// What a provider has found, without one that runs.
    pub(crate) fn given(provider: Arc<dyn Provider>, listing: Listing) -> Self {
        Self {
            provider,
            listing,
            doubts: Arc::default(),
            departures: Arc::default(),
        }
    }
}

#[cfg(test)]
mod tests;
