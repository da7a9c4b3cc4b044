//! Collects the events of a watch into a map of listed objects.

use std::collections::BTreeMap;
use std::fmt::Debug;

use futures::StreamExt as _;
use futures::stream::{self, BoxStream};
use krypton_runtime::watch::WatchBackoff;
use kube::api::Api;
use kube::runtime::utils::Backoff as _;
use kube::runtime::watcher::{self, Config, Event};
use kube::{Resource, ResourceExt as _};
use serde::de::DeserializeOwned;

/// Namespace and name.
pub type Key = (String, String);

/// Exceeds the number of members of the largest fleet. Further objects are left out and reported.
pub const OBJECTS_MAX: usize = 20_000;
/// Objects per page of a list. The client decodes a page as a whole, and a kubeconfig has about 10 KiB.
const PAGE: u32 = 100;

/// The objects of one list. Each entry holds the parsed object.
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

    /// Applies one event. Returns whether `known` may have changed.
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

    /// Returns whether objects were left out since the last call.
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

/// The key of an object.
pub fn key<K: Resource>(object: &K) -> Key {
    (object.namespace().unwrap_or_default(), object.name_any())
}

type Events<K> = BoxStream<'static, watcher::Result<Event<K>>>;

/// A watch that restarts after every failure, with a pause. After a failure it lists all objects again.
/// Without a new list, the watch would be silent until the next change, and callers could not detect the
/// recovery.
pub fn watch<K>(api: Api<K>, config: Config) -> Events<K>
where
    K: Resource + Clone + DeserializeOwned + Debug + Send + 'static,
{
    begun_anew(move || {
        let events = once(api.clone(), config.clone());
        async move { Ok(events) }
    })
}

/// A watch that ends at the first failure.
pub fn once<K>(api: Api<K>, config: Config) -> Events<K>
where
    K: Resource + Clone + DeserializeOwned + Debug + Send + 'static,
{
    watcher::watcher(api, config.page_size(PAGE)).boxed()
}

/// Runs the stream that `open` returns. After a failure, it pauses and calls `open` again.
pub fn begun_anew<K, E, F>(
    open: impl Fn() -> F + Send + 'static,
) -> BoxStream<'static, Result<Event<K>, E>>
where
    K: Send + 'static,
    E: From<watcher::Error> + Send + 'static,
    F: Future<Output = Result<Events<K>, E>> + Send + 'static,
{
    struct Following<K, O> {
        open: O,
        events: Option<Events<K>>,
        failed: bool,
        pauses: WatchBackoff,
    }
    let following = Following {
        open,
        events: None,
        failed: false,
        pauses: WatchBackoff::default(),
    };
    stream::unfold(following, |mut this| async move {
        loop {
            let Some(events) = &mut this.events else {
                let pause = this.pauses.next().filter(|_| this.failed);
                tokio::time::sleep(pause.unwrap_or_default()).await;
                match (this.open)().await {
                    Ok(events) => this.events = Some(events),
                    Err(error) => {
                        this.failed = true;
                        return Some((Err(error), this));
                    }
                }
                continue;
            };
            match events.next().await {
                Some(Ok(event)) => {
                    if !matches!(event, Event::Init | Event::InitApply(_)) {
                        this.pauses.reset();
                        this.failed = false;
                    }
                    return Some((Ok(event), this));
                }
                Some(Err(error)) => {
                    (this.events, this.failed) = (None, true);
                    return Some((Err(error.into()), this));
                }
                None => (this.events, this.failed) = (None, true),
            }
        }
    })
    .boxed()
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use k8s_openapi::api::core::v1::Secret;

    use super::*;

    fn secret(name: &str) -> Secret {
        let mut secret = Secret::default();
        secret.metadata.name = Some(name.to_owned());
        secret
    }

    fn take(listed: &mut Listed<String>, event: Event<Secret>) -> bool {
        listed.take(event, |secret| {
            Some(secret.name_any()).filter(|name| name != "none")
        })
    }

    fn names(listed: &Listed<String>) -> Option<Vec<&str>> {
        let known = listed.known()?;
        Some(known.values().map(String::as_str).collect())
    }

    #[test]
    fn incomplete_list_does_not_replace_known_objects() {
        let mut listed = Listed::default();
        assert!(!take(&mut listed, Event::Init));
        assert!(!take(&mut listed, Event::InitApply(secret("a"))));
        assert!(!take(&mut listed, Event::InitApply(secret("none"))));
        assert_eq!(names(&listed), None, "half a list is none");
        assert!(take(&mut listed, Event::InitDone));
        assert!(take(&mut listed, Event::Apply(secret("b"))));
        assert_eq!(names(&listed).unwrap(), ["a", "b"]);
        // A new list removes nothing until it is complete.
        take(&mut listed, Event::Init);
        take(&mut listed, Event::InitApply(secret("b")));
        assert_eq!(names(&listed).unwrap(), ["a", "b"]);
        take(&mut listed, Event::InitDone);
        assert_eq!(names(&listed).unwrap(), ["b"]);
        assert!(take(&mut listed, Event::Delete(secret("b"))));
        assert!(names(&listed).unwrap().is_empty());
    }

    #[test]
    fn objects_over_limit_are_dropped_and_reported_once() {
        let mut listed = Listed::default();
        take(&mut listed, Event::Init);
        for number in 0..=OBJECTS_MAX {
            take(&mut listed, Event::InitApply(secret(&number.to_string())));
        }
        take(&mut listed, Event::InitDone);
        assert_eq!(listed.known().unwrap().len(), OBJECTS_MAX);
        assert!(listed.left_out());
        assert!(!listed.left_out());
    }

    #[tokio::test]
    async fn failed_watch_is_followed_by_complete_relist() {
        let lists = Mutex::new(vec![
            vec![Ok(Event::Init), Ok(Event::InitDone)],
            vec![
                Ok(Event::Init),
                Ok(Event::InitDone),
                Err(watcher::Error::NoResourceVersion),
            ],
        ]);
        let events = begun_anew::<Secret, watcher::Error, _>(move || {
            let list = lists.lock().unwrap().pop().unwrap_or_default();
            let events: Events<Secret> = stream::iter(list).chain(stream::pending()).boxed();
            async move { Ok(events) }
        });
        let seen: Vec<_> = events.take(5).collect().await;
        let done = |index: usize| matches!(seen[index], Ok(Event::InitDone));
        assert!(done(1) && seen[2].is_err() && done(4), "{seen:?}");
    }
}
