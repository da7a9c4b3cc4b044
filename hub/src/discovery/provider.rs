//! The loop that all providers run, and the watches that they share.
//!
//! A provider consists of the lists that it watches and a function from these lists to sources. The loop
//! publishes the sources after each change. A list that fails or is incomplete keeps the sources of the last
//! complete one.

use std::collections::BTreeMap;
use std::sync::Arc;

use anyhow::bail;
use futures::{TryFutureExt as _, TryStreamExt as _};
use k8s_openapi::api::core::v1::Secret;
use krypton_runtime::call::call;
use krypton_runtime::periodic::FailureLog;
use krypton_runtime::watch::Watch;
use krypton_runtime::watch::store::{Key, OBJECTS_MAX, Store};
use krypton_types::error_chain::chain;
use kube::api::{Api, ApiResource, DynamicObject};
use kube::core::GroupVersionKind;
use kube::runtime::watcher::{self, Config, Event, watcher};
use kube::{Client, Resource};

use super::{Origin, ProviderHandle, Source};

/// Most events taken in before the sources are published. It splits a flood into batches.
pub(super) const BATCH: usize = 512;
/// Objects per page of a list. The client decodes a page as a whole, and a kubeconfig has about 10 KiB.
const PAGE: u32 = 100;

/// The state of a running provider.
pub(super) trait ProviderState: Send {
    /// Waits until the sources may have changed. Safe to drop. Returns `false` if the provider has ended.
    fn changed(&mut self) -> impl Future<Output = bool> + Send;

    /// Reads a source again immediately, because its cluster has rejected the credential.
    fn reread(&mut self, origin: &Origin) -> impl Future<Output = ()> + Send;

    /// All sources. `None` until the first list is complete.
    fn sources(&mut self) -> Option<BTreeMap<Origin, Arc<Source>>>;

    /// Why the sources may be outdated.
    fn trouble(&self) -> Option<String>;

    /// Called after the sources were published.
    fn published(&mut self) {}
}

/// Publishes the sources of a provider until it ends.
pub(super) async fn run(mut state: impl ProviderState, handle: ProviderHandle) {
    loop {
        tokio::select! {
            running = state.changed() => if !running { return },
            origin = handle.next_reread() => state.reread(&origin).await,
        }
        handle.publish(state.sources(), state.trouble());
        state.published();
    }
}

/// Returns the sources by their origins.
pub(super) fn by_origin<'a>(
    sources: impl IntoIterator<Item = &'a Arc<Source>>,
) -> BTreeMap<Origin, Arc<Source>> {
    let entry = |source: &Arc<Source>| (source.origin.clone(), Arc::clone(source));
    sources.into_iter().map(entry).collect()
}

/// A kind of custom object.
#[derive(Clone, Copy, Debug)]
pub struct ApiKind {
    pub group: &'static str,
    /// The supported versions. The first version that the API server serves is used.
    pub versions: &'static [&'static str],
    /// The plural resource name, as in API paths.
    pub plural: &'static str,
}

impl ApiKind {
    /// Returns the best served version.
    async fn served(&self, client: &Client) -> anyhow::Result<ApiResource> {
        for version in self.versions {
            let group_version = format!("{}/{version}", self.group);
            let attempt = format!("reading the served versions of {}", self.group);
            let resources = client.list_api_group_resources(&group_version);
            let list = match call(attempt, resources).await {
                Err(error) if error.code() == Some(404) => continue,
                result => result?,
            };
            if let Some(resource) = list.resources.iter().find(|it| it.name == self.plural) {
                let kind = GroupVersionKind::gvk(self.group, version, &resource.kind);
                return Ok(ApiResource::from_gvk_with_plural(&kind, self.plural));
            }
        }
        bail!(
            "the API server serves no {}.{} of version {}; the hub retries until their CRD exists",
            self.plural,
            self.group,
            self.versions.join(" or ")
        )
    }
}

/// A watch and its listed objects, in the form that the provider needs.
pub(super) struct WatchedObjects<K, V> {
    kind_name: &'static str,
    watch: Watch<K, anyhow::Error>,
    store: Store<V>,
    read: Box<dyn Fn(K) -> Option<V> + Send + Sync>,
    log: FailureLog,
}

impl<V> WatchedObjects<Secret, V> {
    /// Watches Secrets of a namespace, or of all.
    pub(super) fn secrets(
        client: &Client,
        namespace: Option<&str>,
        config: Config,
        read: impl Fn(Secret) -> Option<V> + Send + Sync + 'static,
    ) -> Self {
        let api = secrets(client, namespace);
        let config = config.page_size(PAGE);
        let open = move || {
            watcher(api.clone(), config.clone()).map_err(|error| watch_error("Secrets", error))
        };
        Self::new("Secrets", Watch::new(open), read)
    }
}

impl<V> WatchedObjects<DynamicObject, V> {
    /// Watches objects of a namespace, or of all. It looks up their version before each list.
    pub(super) fn objects(
        client: &Client,
        namespace: Option<&str>,
        kind: ApiKind,
        read: impl Fn(DynamicObject) -> Option<V> + Send + Sync + 'static,
    ) -> Self {
        let (client, namespace) = (client.clone(), namespace.map(str::to_owned));
        let open = move || {
            let (client, namespace) = (client.clone(), namespace.clone());
            let stream = async move {
                let resource = kind.served(&client).await?;
                let api: Api<DynamicObject> = match namespace {
                    Some(namespace) => Api::namespaced_with(client, &namespace, &resource),
                    None => Api::all_with(client, &resource),
                };
                let events = watcher(api, Config::default().page_size(PAGE));
                Ok(events.map_err(move |error| watch_error(kind.plural, error)))
            };
            stream.try_flatten_stream()
        };
        Self::new(kind.plural, Watch::new(open), read)
    }
}

impl<K: Resource + Send + 'static, V> WatchedObjects<K, V> {
    fn new(
        kind_name: &'static str,
        watch: Watch<K, anyhow::Error>,
        read: impl Fn(K) -> Option<V> + Send + Sync + 'static,
    ) -> Self {
        Self {
            kind_name,
            watch,
            store: Store::default(),
            read: Box::new(read),
            log: FailureLog::new(format!("watching {kind_name}")),
        }
    }

    /// Waits until the objects or the trouble may have changed. Takes in all events that have arrived. Safe to
    /// drop.
    pub(super) async fn changed(&mut self) {
        loop {
            let event = self.watch.next().await;
            let mut changed = self.apply(event);
            for _ in 0..BATCH {
                let Some(event) = self.watch.try_next() else {
                    break;
                };
                changed |= self.apply(event);
            }
            if self.store.left_out() {
                tracing::warn!(
                    kind = self.kind_name,
                    limit = OBJECTS_MAX,
                    "too many objects; ignoring the others"
                );
            }
            if changed {
                return;
            }
        }
    }

    fn apply(&mut self, event: anyhow::Result<Event<K>>) -> bool {
        match event {
            Ok(event) => {
                let listing = matches!(event, Event::Init | Event::InitApply(_));
                let recovered = !listing && self.log.succeeded();
                self.store.apply(event, &self.read) || recovered
            }
            Err(error) => self.log.failed(chain(&*error)),
        }
    }

    /// Takes in an object that was read separately.
    pub(super) fn store_object(&mut self, object: K) {
        self.store.apply(Event::Apply(object), &self.read);
    }

    /// `None` until the first list is complete.
    pub(super) fn known(&self) -> Option<&BTreeMap<Key, V>> {
        self.store.known()
    }

    /// Why the objects may be outdated.
    pub(super) fn trouble(&self) -> Option<String> {
        self.log.problem().cloned()
    }
}

fn watch_error(kind_name: &str, error: watcher::Error) -> anyhow::Error {
    anyhow::Error::new(error).context(format!("failed to watch {kind_name}; retrying"))
}

/// The Secrets of a namespace, or of all.
pub(super) fn secrets(client: &Client, namespace: Option<&str>) -> Api<Secret> {
    match namespace {
        Some(namespace) => Api::namespaced(client.clone(), namespace),
        None => Api::all(client.clone()),
    }
}

#[cfg(test)]
mod tests {
    use futures::{StreamExt as _, stream};
    use kube::ResourceExt as _;
    use parking_lot::Mutex;

    use super::*;

    fn failure() -> anyhow::Result<Event<Secret>> {
        Err(watch_error("Secrets", watcher::Error::NoResourceVersion))
    }

    #[tokio::test(start_paused = true)]
    async fn failed_watch_keeps_objects_until_next_list() {
        let mut secret = Secret::default();
        secret.metadata.name = Some("a".to_owned());
        // In reverse order.
        let watches = Mutex::new(vec![
            vec![Ok(Event::Init), Ok(Event::InitDone)],
            vec![failure()],
            vec![
                Ok(Event::Init),
                Ok(Event::InitApply(secret)),
                Ok(Event::InitDone),
                failure(),
            ],
        ]);
        let watch = Watch::new(move || {
            let events = watches.lock().pop().unwrap_or_default();
            stream::iter(events).chain(stream::pending())
        });
        let name = |secret: Secret| Some(secret.name_any());
        let mut listed = WatchedObjects::new("Secrets", watch, name);
        assert_eq!(listed.known(), None);
        listed.changed().await;
        assert!(listed.known().unwrap().values().eq(["a"]));
        assert!(listed.trouble().unwrap().contains("watch Secrets"));
        // The next failure is the same and no change.
        listed.changed().await;
        assert!(listed.known().unwrap().is_empty());
        assert_eq!(listed.trouble(), None);
    }
}
