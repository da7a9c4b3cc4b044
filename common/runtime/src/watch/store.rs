//! The listed objects of a watch.

use std::collections::BTreeMap;

use kube::runtime::watcher::Event;
use kube::{Resource, ResourceExt as _};

/// Namespace and name.
pub type Key = (String, String);

/// Exceeds the number of members of the largest fleet. Further objects are left out and reported.
pub const OBJECTS_MAX: usize = 20_000;

/// The listed objects, in the form that the caller needs. A new list replaces them once it is complete.
#[derive(Debug)]
pub struct Store<V> {
    known: BTreeMap<Key, V>,
    /// A new list that is not complete yet.
    listing: Option<BTreeMap<Key, V>>,
    complete: bool,
    left_out: bool,
}
impl<V> Default for Store<V> {
    fn default() -> Self {
        Self {
            known: BTreeMap::new(),
            listing: None,
            complete: false,
            left_out: false,
        }
    }
}

impl<V> Store<V> {
    /// `None` until the first list is complete.
    pub fn known(&self) -> Option<&BTreeMap<Key, V>> {
        self.complete.then_some(&self.known)
    }

    /// Applies one event. Returns whether `known` may have changed.
    pub fn apply<K: Resource>(
        &mut self,
        event: Event<K>,
        convert: impl Fn(K) -> Option<V>,
    ) -> bool {
        match event {
            Event::Init => {
                self.listing = Some(BTreeMap::new());
                false
            }
            Event::InitApply(object) => {
                let key = key(&object);
                if let Some(value) = convert(object) {
                    let listing = self.listing.get_or_insert_default();
                    self.left_out |= !insert_within_limit(listing, key, value);
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
                match convert(object) {
                    Some(value) => {
                        self.left_out |= !insert_within_limit(&mut self.known, key, value)
                    }
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

fn insert_within_limit<V>(map: &mut BTreeMap<Key, V>, key: Key, value: V) -> bool {
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

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::Secret;

    use super::*;

    fn secret(name: &str) -> Secret {
        let mut secret = Secret::default();
        secret.metadata.name = Some(name.to_owned());
        secret
    }

    fn apply(store: &mut Store<String>, event: Event<Secret>) -> bool {
        store.apply(event, |secret| {
            Some(secret.name_any()).filter(|name| name != "none")
        })
    }

    fn names(store: &Store<String>) -> Option<Vec<&str>> {
        let known = store.known()?;
        Some(known.values().map(String::as_str).collect())
    }

    #[test]
    fn incomplete_list_does_not_replace_known_objects() {
        let mut store = Store::default();
        assert!(!apply(&mut store, Event::Init));
        assert!(!apply(&mut store, Event::InitApply(secret("a"))));
        assert!(!apply(&mut store, Event::InitApply(secret("none"))));
        assert_eq!(names(&store), None, "half a list is none");
        assert!(apply(&mut store, Event::InitDone));
        assert!(apply(&mut store, Event::Apply(secret("b"))));
        assert_eq!(names(&store).unwrap(), ["a", "b"]);
        // A new list removes nothing until it is complete.
        apply(&mut store, Event::Init);
        apply(&mut store, Event::InitApply(secret("b")));
        assert_eq!(names(&store).unwrap(), ["a", "b"]);
        apply(&mut store, Event::InitDone);
        assert_eq!(names(&store).unwrap(), ["b"]);
        assert!(apply(&mut store, Event::Delete(secret("b"))));
        assert!(names(&store).unwrap().is_empty());
    }

    #[test]
    fn objects_over_limit_are_dropped_and_reported_once() {
        let mut store = Store::default();
        apply(&mut store, Event::Init);
        for number in 0..=OBJECTS_MAX {
            apply(&mut store, Event::InitApply(secret(&number.to_string())));
        }
        apply(&mut store, Event::InitDone);
        assert_eq!(store.known().unwrap().len(), OBJECTS_MAX);
        assert!(store.left_out());
        assert!(!store.left_out());
    }
}
