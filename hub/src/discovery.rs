//! Discovers the members of the fleet. Each provider watches one kind of object and publishes all sources
//! that it finds in its own slot. A provider that hangs or floods its slot delays no other provider.

pub mod cluster_api;
pub mod cluster_profile;
pub mod kamaji;
pub mod kubeconfig_files;
mod kubeconfig_secret;
pub mod labelled_secrets;
mod member_names;
pub mod membership;
pub mod named_secrets;
pub mod object_and_secret;
mod provider;
pub mod register;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;

use futures::FutureExt as _;
use futures::future::BoxFuture;
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use krypton_crds::edge_cluster::SourceRef;
use krypton_runtime::newest::Newest as _;
use krypton_runtime::watchdog::Watchdog;
use krypton_types::conditions::reason;
use krypton_types::kubeconfig::SanitizedKubeconfig;
use krypton_types::names;
use parking_lot::Mutex;
use tokio::sync::{Notify, watch};
use tokio_util::sync::CancellationToken;
use tracing::Instrument as _;

/// Kind of the object that a member was discovered from: `spec.sourceRef.kind` of its EdgeCluster. Each has a provider.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum SourceKind {
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

impl SourceKind {
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

/// The object that a member was discovered from.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Origin {
    pub kind: SourceKind,
    /// `None` for a file.
    pub namespace: Option<String>,
    /// Name of the object, or the path of a file. A context that is not the file's current one follows after
    /// `+`.
    pub name: String,
}

impl Origin {
    /// Returns `None` if no provider covers the source: `self-cluster`, or a kind of a later version.
    pub fn from_source_ref(source: &SourceRef) -> Option<Self> {
        let kind = SourceKind::ALL
            .into_iter()
            .find(|kind| kind.as_str() == source.kind)?;
        Some(Self {
            kind,
            namespace: source.namespace.clone(),
            name: source.name.clone()?,
        })
    }

    /// The origin of a file, or of a context in it.
    fn file(name: impl Into<String>) -> Self {
        Self {
            kind: SourceKind::File,
            namespace: None,
            name: name.into(),
        }
    }

    /// Whether the object has this kind and namespace. `None` matches every namespace.
    fn is_in(&self, kind: SourceKind, namespace: Option<&String>) -> bool {
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

/// A source and its requested member name.
pub type NamedOrigin = (String, Origin);

/// Why a discovered cluster has no usable access. `reason` is a reason of `TargetClusterResolved`.
/// `message` names the object and the fix.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unresolved {
    pub reason: &'static str,
    pub message: String,
}

impl Unresolved {
    pub(crate) fn new(reason: &'static str, message: String) -> Self {
        Self { reason, message }
    }
}

/// A discovered cluster. A cluster without usable access is a member too: its EdgeCluster shows the error.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Source {
    pub origin: Origin,
    /// UID of the object; empty for a file.
    pub uid: String,
    /// The requested member name, without the prefix of its provider.
    pub member: String,
    /// Whether an annotation sets `member`. Then no prefix applies, and a change of the annotation requests
    /// another name.
    pub is_renamed: bool,
    /// Creation time of the object. If two sources request one name, the older source gets it.
    pub since: Option<Timestamp>,
    pub access: Result<Arc<SanitizedKubeconfig>, Unresolved>,
    /// Why `access` is outdated. The hub keeps using the last good access.
    pub stale: Option<Unresolved>,
    /// Why the hub must not write there for now, although nothing has failed: paused or asleep.
    pub suspended: Option<String>,
}

impl Source {
    /// A source whose access is not known yet, for this cause.
    fn unread(origin: Origin, member: String, message: String) -> Self {
        Self {
            origin,
            uid: String::new(),
            member,
            is_renamed: false,
            since: None,
            access: Err(Unresolved::new(reason::STARTING, message)),
            stale: None,
            suspended: None,
        }
    }

    /// The source that an object represents. Its access is not known yet.
    fn from_object(kind: SourceKind, meta: &ObjectMeta) -> Self {
        let origin = Origin {
            kind,
            namespace: meta.namespace.clone(),
            name: meta.name.clone().unwrap_or_default(),
        };
        let annotations = meta.annotations.as_ref();
        let renamed = annotations.and_then(|all| all.get(names::MEMBER_NAME_ANNOTATION));
        let member = renamed.unwrap_or(&origin.name).clone();
        Self {
            uid: meta.uid.clone().unwrap_or_default(),
            is_renamed: renamed.is_some(),
            since: meta.creation_timestamp.as_ref().map(|time| time.0),
            ..Self::unread(origin, member, String::new())
        }
    }

    /// Returns why a listed source has no access yet. Such a source is neither a member with an error nor gone.
    fn pending(&self) -> Option<&Unresolved> {
        let problem = self.access.as_ref().err();
        problem.filter(|problem| problem.reason == reason::STARTING)
    }

    /// Returns the requested member name with the prefix of the provider.
    fn requested_name(&self, prefix: &str) -> String {
        match self.is_renamed {
            true => self.member.clone(),
            false => format!("{prefix}{}", self.member),
        }
    }
}

/// Prefixes of the member names, by the kind of source.
pub type MemberPrefixes = BTreeMap<SourceKind, String>;

/// All sources of one provider.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Listing {
    /// `None` until the first list is complete. If the provider fails, its last sources stay.
    pub sources: Option<Arc<BTreeMap<Origin, Arc<Source>>>>,
    /// Why `sources` may be outdated.
    pub trouble: Option<String>,
    /// Whether the provider has ended. It finds no further sources.
    pub closed: bool,
}

impl Listing {
    /// Returns whether the source is listed, or may be there unseen.
    fn may_have(&self, origin: &Origin) -> bool {
        let sources = self.sources.as_ref();
        sources.is_none_or(|sources| sources.contains_key(origin))
            || self.unread_file(origin).is_some()
    }

    /// Returns whether the watch of this source has failed, so its object may have changed unseen.
    fn is_outdated(&self, source: &Source) -> bool {
        let stale = source.stale.as_ref();
        let watch_failed = stale.is_some_and(|stale| stale.reason == reason::SOURCE_UNAVAILABLE);
        self.trouble.is_some() || watch_failed
    }

    /// Returns why the file of a context cannot be read. After a restart, its contexts are unknown.
    fn unread_file(&self, context: &Origin) -> Option<&Unresolved> {
        let sources = self.sources.as_ref()?;
        let mut files = kubeconfig_files::files_of_context(&context.name);
        files.find_map(|path| sources.get(&Origin::file(path))?.access.as_ref().err())
    }
}

/// Discovers the sources of one kind.
pub trait Provider: Send + Sync + 'static {
    /// Describes the watched objects for logs.
    fn describe(&self) -> String;

    /// Whether the provider would find this object if it existed.
    fn covers(&self, origin: &Origin) -> bool;

    /// Whether the provider finds an object by the object itself, and not by a reference to it.
    fn finds_unreferenced(&self) -> bool {
        true
    }

    /// Publishes the sources until the future is dropped.
    fn follow(self: Arc<Self>, handle: ProviderHandle) -> BoxFuture<'static, ()>;
}

/// The provider's end: its listing, and the sources that it has to read again.
#[derive(Debug)]
pub struct ProviderHandle {
    all: watch::Sender<Sources>,
    /// The provider's place in `all`.
    index: usize,
    rereads: Arc<RereadRequests>,
    departures: Arc<Departures>,
}

impl ProviderHandle {
    /// Publishes the sources, and why they may be outdated. Without `sources`, the earlier ones stay. An
    /// unchanged listing notifies no receiver.
    pub fn publish(&self, sources: Option<BTreeMap<Origin, Arc<Source>>>, trouble: Option<String>) {
        let previous = self.all.get().0.swap_remove(self.index).listing;
        let next = match (sources, trouble) {
            (Some(sources), trouble) => {
                self.departures.record(&previous, &sources);
                Listing {
                    sources: Some(Arc::new(sources)),
                    trouble,
                    closed: false,
                }
            }
            (None, trouble @ Some(_)) => Listing {
                trouble,
                ..previous.clone()
            },
            (None, None) => return,
        };
        if next != previous {
            self.all.send_modify(|all| all.0[self.index].listing = next);
        }
    }

    /// Waits for a source to read again immediately because its cluster has rejected the credential.
    pub async fn next_reread(&self) -> Origin {
        loop {
            let added = self.rereads.added.notified();
            if let Some(origin) = self.rereads.origins.lock().pop_first() {
                return origin;
            }
            added.await;
        }
    }
}

/// Sources whose credential was rejected. A set, so its size is limited by the number of sources.
#[derive(Debug, Default)]
struct RereadRequests {
    origins: Mutex<BTreeSet<Origin>>,
    added: Notify,
}

impl RereadRequests {
    fn add(&self, origin: &Origin) {
        self.origins.lock().insert(origin.clone());
        self.added.notify_one();
    }
}

/// Sources that this provider has lost since the last call of `take`. The value records whether it lists
/// them again. The latest listing alone doesn't show that a source was away.
#[derive(Debug, Default)]
struct Departures(Mutex<BTreeMap<Origin, bool>>);

impl Departures {
    fn record(&self, previous: &Listing, current: &BTreeMap<Origin, Arc<Source>>) {
        let Some(sources) = previous.sources.as_deref() else {
            return;
        };
        let mut departures = self.0.lock();
        for origin in current.keys() {
            departures
                .entry(origin.clone())
                .and_modify(|listed_again| *listed_again = true);
        }
        for (origin, source) in sources {
            // It is unknown whether a source that the provider hasn't read yet existed.
            if source.pending().is_some() {
                continue;
            }
            match current.get(origin) {
                None => drop(departures.insert(origin.clone(), false)),
                // An object that was deleted and recreated is a different source. After a failed watch, it may have
                // been recreated long ago, and only the UID in the register decides.
                Some(current)
                    if current.uid != source.uid
                        && current.pending().is_none()
                        && !previous.is_outdated(source) =>
                {
                    departures.insert(origin.clone(), true);
                }
                Some(_) => {}
            }
        }
    }

    /// Returns the departed sources. A source that another provider still lists has not departed, unless a
    /// provider that finds unreferenced objects lists it again. Until then, the entry of such a provider stays.
    fn take(
        &self,
        finds_unreferenced: bool,
        listed_elsewhere: impl Fn(&Origin) -> bool,
    ) -> BTreeSet<Origin> {
        let mut departed = BTreeSet::new();
        self.0.lock().retain(|origin, listed_again| {
            if !listed_elsewhere(origin) || (finds_unreferenced && *listed_again) {
                departed.insert(origin.clone());
                return false;
            }
            finds_unreferenced
        });
        departed
    }
}

/// A running provider and its sources.
#[derive(Clone)]
pub struct RunningProvider {
    pub provider: Arc<dyn Provider>,
    pub listing: Listing,
    prefixes: Arc<MemberPrefixes>,
    rereads: Arc<RereadRequests>,
    departures: Arc<Departures>,
}

impl fmt::Debug for RunningProvider {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RunningProvider")
            .field("provider", &self.provider.describe())
            .field("listing", &self.listing)
            .finish_non_exhaustive()
    }
}

/// All running providers with their listings.
#[derive(Clone, Debug, Default)]
pub struct Sources(Vec<RunningProvider>);

impl Sources {
    pub fn iter(&self) -> impl Iterator<Item = &RunningProvider> {
        self.0.iter()
    }

    /// Returns whether a source is away: a provider covers it, and all that do have listed without it.
    pub fn is_away(&self, origin: &Origin) -> bool {
        let covering = self.0.iter();
        let mut covering = covering
            .filter(|running| running.provider.covers(origin))
            .peekable();
        covering.peek().is_some() && covering.all(|running| !running.listing.may_have(origin))
    }

    /// Returns the sources that departed since the last call, whichever provider listed them.
    pub fn take_departed(&self) -> BTreeSet<Origin> {
        let others_list = |index: usize, origin: &Origin| {
            let others = self
                .0
                .iter()
                .enumerate()
                .filter(|(other, _)| *other != index);
            let mut listings = others.filter_map(|(_, running)| running.listing.sources.as_deref());
            listings.any(|sources| sources.contains_key(origin))
        };
        let providers = self.0.iter().enumerate();
        providers
            .flat_map(|(index, running)| {
                let finds_unreferenced = running.provider.finds_unreferenced();
                running
                    .departures
                    .take(finds_unreferenced, |origin| others_list(index, origin))
            })
            .collect()
    }

    /// Requests an immediate read of this source because its cluster rejected the credential.
    pub fn request_reread(&self, origin: &Origin) {
        // Two providers can find one Secret: by its label and by a reference.
        for running in self
            .0
            .iter()
            .filter(|running| running.provider.covers(origin))
        {
            running.rereads.add(origin);
        }
    }
}

/// Starts all providers, which run until `stop`. The receiver holds the latest listing of each.
pub fn start(
    providers: Vec<Arc<dyn Provider>>,
    prefixes: MemberPrefixes,
    watchdog: &Watchdog,
    stop: &CancellationToken,
) -> watch::Receiver<Sources> {
    let prefixes = Arc::new(prefixes);
    let new = |provider| RunningProvider {
        prefixes: Arc::clone(&prefixes),
        ..RunningProvider::new(provider, Listing::default())
    };
    let (all, sources) = watch::channel(Sources(providers.into_iter().map(new).collect()));
    for (index, running) in all.get().0.into_iter().enumerate() {
        let name = running.provider.describe();
        tracing::info!(provider = name, "looking for members");
        let handle = ProviderHandle {
            all: all.clone(),
            index,
            rereads: running.rereads,
            departures: running.departures,
        };
        let task = format!("looking for members: {name}");
        let span = tracing::error_span!("discovery", provider = name);
        let following = run_provider(running.provider, handle, stop.clone());
        tokio::spawn(watchdog.watch(task, following.instrument(span)));
    }
    let stop = stop.clone();
    tokio::spawn(async move {
        // Keep the channel open although all providers have ended. Otherwise members would leave the fleet.
        stop.cancelled().await;
        drop(all);
    });
    sources
}

/// Runs a provider. Its end or panic closes its listing and affects no other provider.
async fn run_provider(
    provider: Arc<dyn Provider>,
    handle: ProviderHandle,
    stop: CancellationToken,
) {
    let (all, index) = (handle.all.clone(), handle.index);
    let name = provider.describe();
    let following = std::panic::AssertUnwindSafe(provider.follow(handle)).catch_unwind();
    // During shutdown, the tasks that a provider depends on end too, so its end is not an error.
    if let Some(result) = stop.run_until_cancelled(following).await
        && !stop.is_cancelled()
    {
        tracing::error!(
            provider = name,
            panicked = result.is_err(),
            "discovery stopped; members stay unchanged until a restart"
        );
        all.send_modify(|all| all.0[index].listing.closed = true);
    }
}

impl RunningProvider {
    pub(crate) fn new(provider: Arc<dyn Provider>, listing: Listing) -> Self {
        Self {
            provider,
            listing,
            prefixes: Arc::default(),
            rereads: Arc::default(),
            departures: Arc::default(),
        }
    }

    /// Prefix of the names of members from sources of this kind.
    fn prefix(&self, kind: SourceKind) -> &str {
        self.prefixes.get(&kind).map_or("", String::as_str)
    }
}

#[cfg(test)]
mod testkit;
#[cfg(test)]
mod tests;
