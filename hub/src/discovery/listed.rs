//! What a watch has listed so far: the events of one list, made into a map.

use std::collections::BTreeMap;

use krypton_agent::watch_backoff::WatchBackoff;
use kube::api::Api;
use kube::runtime::WatchStreamExt as _;
use kube::runtime::watcher::{self, Config, Event};
use kube::{Resource, ResourceExt as _};
use serde::de::DeserializeOwned;

/// Namespace and name.
pub type Key = (String, String);

/// More objects than the largest fleet has members. What comes after is left out, and said.
pub const OBJECTS_MAX: usize = 20_000;
/// Objects in one page of a list: a page is decoded at once, and a kubeconfig has some 10 KiB.
const PAGE: u32 = 100;

/// The objects of one list, each as what was read of it.
#[derive(Debug)]
pub struct Listed<V> {
    known: BTreeMap<Key, V>,
    /// A new list that is not complete yet.
    listing: Option<BTreeMap<Key, V>>,
    complete: bool,
    left_out: bool,
}

impl<V> Default for Listed<V> {
    fn default() -> Self {
        Self {
            known: BTreeMap::new(),
            listing: None,
            complete: false,
            left_out: false,
        }
    }
}

impl<V> Listed<V> {
    /// `None` until the first list is complete.
    pub fn known(&self) -> Option<&BTreeMap<Key, V>> {
        self.complete.then_some(&self.known)
    }

    /// Takes in one event; says whether `known` may be another now.
    pub fn take<K: Resource>(&mut self, event: Event<K>, read: impl Fn(K) -> Option<V>) -> bool {
        match event {
            Event::Init => {
                self.listing = Some(BTreeMap::new());
                false
            }
            Event::InitApply(object) => {
                let key = key(&object);
                if let Some(value) = read(object) {
                    let listing = self.listing.get_or_insert_default();
                    self.left_out |= !put(listing, key, value);
                }
                false
            }
            Event::InitDone => {
                self.known = self.listing.take().unwrap_or_default();
                self.complete = true;
                true
            }
            Event::Apply(object) => {
                let key = key(&object);
                match read(object) {
                    Some(value) => self.left_out |= !put(&mut self.known, key, value),
                    None => drop(self.known.remove(&key)),
                }
                self.complete
            }
            Event::Delete(object) => {
                self.known.remove(&key(&object));
                self.complete
            }
        }
    }

    /// Whether there were more than are kept, since it was last asked.
    pub fn left_out(&mut self) -> bool {
        std::mem::take(&mut self.left_out)
    }
}

fn put<V>(map: &mut BTreeMap<Key, V>, key: Key, value: V) -> bool {
    let fits = map.len() < OBJECTS_MAX || map.contains_key(&key);
    if fits {
        map.insert(key, value);
    }
    fits
}

/// By what an object is known.
pub fn key<K: Resource>(object: &K) -> Key {
    (object.namespace().unwrap_or_default(), object.name_any())
}

/// A watch that is begun anew, with pauses, whatever happens.
pub fn watch<K>(
    api: Api<K>,
    config: Config,
) -> futures::stream::BoxStream<'static, watcher::Result<Event<K>>>
where
    K: Resource + Clone + DeserializeOwned + std::fmt::Debug + Send + 'static,
{
    Box::pin(watcher::watcher(api, config.page_size(PAGE)).backoff(WatchBackoff::default()))
}
