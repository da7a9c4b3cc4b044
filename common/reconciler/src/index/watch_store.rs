//! The objects of one watch: a map that events and lists update.

use std::collections::BTreeSet;

use kube::runtime::watcher::Event;

use super::sized_map::{HeapSize, SizedMap};

/// Maximum number of deletions to remember. A response is delayed by at most one Helm run, with far fewer deletions.
const MAX_DELETIONS: usize = 4096;

/// The objects of one watch. An event never replaces an entry with an older version. A relist replaces all entries.
#[derive(Debug)]
pub struct WatchStore<K, V> {
    entries: SizedMap<K, V>,
    /// Entries of the list in progress.
    listing: Option<SizedMap<K, V>>,
    /// Number of objects in the list in progress, stored or not.
    listed_objects: usize,
    synced: bool,
    /// Recent deletions by resourceVersion, whose older responses may still arrive. At most [`MAX_DELETIONS`].
    deletions: SizedMap<K, ()>,
}

impl<K, V> Default for WatchStore<K, V> {
    fn default() -> Self {
        Self {
            entries: SizedMap::default(),
            listing: None,
            listed_objects: 0,
            synced: false,
            deletions: SizedMap::default(),
        }
    }
}

impl<K: Ord + Clone + HeapSize, V: PartialEq + Clone + HeapSize> WatchStore<K, V> {
    pub fn get(&self, key: &K) -> Option<&V> {
        self.entries.get(key).map(|entry| &entry.value)
    }

    /// Returns the resourceVersion of the entry, if it is a number.
    pub fn version(&self, key: &K) -> Option<u64> {
        let version = self.entries.get(key).map(|entry| entry.version);
        version.filter(|version| (1..u64::MAX).contains(version))
    }

    pub fn iter(&self) -> impl Iterator<Item = (&K, &V)> {
        let entries = self.entries.iter();
        entries.map(|(key, entry)| (key, &entry.value))
    }

    /// Returns the entries from `first` on, in key order.
    pub fn iter_from(&self, first: K) -> impl Iterator<Item = (&K, &V)> {
        self.entries
            .range(first..)
            .map(|(key, entry)| (key, &entry.value))
    }

    /// Returns the keys from `first` on, in order, with their resourceVersions.
    pub(super) fn versions_from(&self, first: K) -> impl Iterator<Item = (&K, u64)> {
        self.entries
            .range(first..)
            .map(|(key, entry)| (key, entry.version))
    }

    /// Returns true if the first list is complete.
    pub fn synced(&self) -> bool {
        self.synced
    }

    /// Marks the entries as incomplete until the next list.
    pub fn mark_incomplete(&mut self) {
        self.synced = false;
    }

    /// Returns the number of objects and their bytes. A list in progress replaces the stored entries.
    pub(super) fn size(&self) -> (usize, usize) {
        let listing = self.listing.as_ref();
        let bytes = listing.map_or(0, SizedMap::bytes).max(self.entries.bytes());
        let objects = self.listed_objects.max(self.entries.len());
        (objects, bytes + self.deletions.bytes())
    }

    /// Applies one event of kube's watcher. `read` returns the key, the version and the value of an object. Returns the
    /// changed keys.
    pub(super) fn apply_event<O>(
        &mut self,
        event: Event<O>,
        read: impl Fn(O) -> Option<(K, u64, V)>,
    ) -> BTreeSet<K> {
        match event {
            Event::Apply(object) => read(object)
                .and_then(|(key, version, value)| {
                    self.deletions.remove(&key);
                    self.apply(key, version, value)
                })
                .into_iter()
                .collect(),
            Event::Delete(object) => read(object)
                .and_then(|(key, version, _)| {
                    if self.deletions.len() >= MAX_DELETIONS {
                        self.deletions.clear();
                    }
                    self.deletions.insert(key.clone(), version, ());
                    self.delete(&key, version)
                })
                .into_iter()
                .collect(),
            Event::Init => {
                (self.listing, self.listed_objects) = (Some(SizedMap::default()), 0);
                // A restored etcd continues from an older resourceVersion.
                self.deletions.clear();
                BTreeSet::new()
            }
            Event::InitApply(object) => {
                self.listed_objects += 1;
                if let (Some((key, version, value)), Some(listing)) =
                    (read(object), self.listing.as_mut())
                {
                    let listed = listing.get(&key);
                    let is_newer_listed = listed.is_some_and(|known| known.version > version);
                    if !is_newer_listed {
                        listing.insert(key, version, value);
                    }
                }
                BTreeSet::new()
            }
            Event::InitDone => self.finish_list(),
        }
    }

    /// Applies an object that was read or written outside the watch.
    ///
    /// If the watch has shown a later deletion, the object stays deleted. Its absence from the watch proves nothing, as
    /// a list may be incomplete.
    pub(super) fn apply_response(&mut self, key: K, resource_version: u64, value: V) -> Option<K> {
        let is_deleted = self
            .deletions
            .get(&key)
            .is_some_and(|deletion| deletion.version >= resource_version);
        match is_deleted {
            true => None,
            false => self.apply(key, resource_version, value),
        }
    }

    /// Removes an entry that a read outside the watch has shown to be gone.
    pub(super) fn remove(&mut self, key: &K) {
        self.entries.remove(key);
    }

    /// Applies one object and ignores a version older than the known one. The watch delivers this process's writes
    /// after their responses.
    fn apply(&mut self, key: K, resource_version: u64, value: V) -> Option<K> {
        // A paged list is as old as its first page, so it lacks later writes of this process.
        if let Some(listing) = &mut self.listing {
            listing.insert(key.clone(), resource_version, value.clone());
        }
        if let Some(known) = self.entries.get(&key) {
            if known.version > resource_version {
                return None;
            }
            if known.value == value {
                self.entries.set_version(&key, resource_version);
                return None;
            }
        }
        self.entries.insert(key.clone(), resource_version, value);
        Some(key)
    }

    fn delete(&mut self, key: &K, resource_version: u64) -> Option<K> {
        let known = self.entries.get(key);
        let is_newer_known = known.is_some_and(|known| known.version > resource_version);
        (!is_newer_known && self.entries.remove(key)).then(|| key.clone())
    }

    fn finish_list(&mut self) -> BTreeSet<K> {
        // A list comes from a quorum read, so it wins even if it is older than the known state. A restored etcd causes
        // that.
        let listing = self.listing.take().unwrap_or_default();
        let previous = std::mem::replace(&mut self.entries, listing);
        self.listed_objects = 0;
        let is_changed = |(key, value): &(&K, &V)| {
            let previous = previous.get(key);
            previous.is_none_or(|previous| previous.value != **value)
        };
        let mut changed: BTreeSet<K> = self
            .iter()
            .filter(is_changed)
            .map(|(key, _)| key.clone())
            .collect();
        let removed = previous.keys().filter(|key| self.get(key).is_none());
        changed.extend(removed.cloned());
        self.synced = true;
        changed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    type Object = (&'static str, u64, &'static str);
    type Store = WatchStore<&'static str, &'static str>;

    fn store_after(events: impl IntoIterator<Item = Event<Object>>) -> Store {
        let mut store = Store::default();
        for event in events {
            store.apply_event(event, Some);
        }
        store
    }

    fn entries(store: &Store) -> Vec<(&'static str, &'static str)> {
        store.iter().map(|(key, value)| (*key, *value)).collect()
    }

    #[test]
    fn own_writes_survive_concurrent_list() {
        let mut store = store_after([
            Event::Apply(("a", 1, "old")),
            Event::Init,
            Event::InitApply(("a", 1, "old")),
        ]);
        store.apply("a", 5, "new");
        store.apply("b", 6, "new");
        for event in [Event::InitApply(("b", 2, "old")), Event::InitDone] {
            store.apply_event(event, Some);
        }
        assert_eq!(entries(&store), [("a", "new"), ("b", "new")]);
    }

    #[test]
    fn relist_replaces_newer_cached_objects() {
        let relisted = store_after([
            Event::Apply(("a", 9, "known")),
            Event::Apply(("gone", 9, "known")),
            Event::Init,
            Event::InitApply(("a", 3, "restored")),
            Event::InitDone,
        ]);
        assert_eq!(entries(&relisted), [("a", "restored")]);
    }

    #[test]
    fn late_response_does_not_restore_deleted_object() {
        let mut store = store_after([
            Event::Apply(("a", 5, "new")),
            Event::Apply(("other", 6, "other")),
            Event::Delete(("a", 7, "new")),
        ]);
        let late_response = store.apply_response("a", 5, "new");
        assert_eq!(late_response, None, "older than its end");
        assert_eq!(store.apply_response("a", 8, "again"), Some("a"));
        assert_eq!(store.apply_response("other", 9, "newer"), Some("other"));
        // The list was incomplete and omitted it.
        assert_eq!(store.apply_response("b", 2, "old"), Some("b"));
        store.apply_event(Event::Apply(("a", 9, "new")), Some);
        assert_eq!(store.apply_response("a", 10, "newer"), Some("a"));
        // A restored etcd continues from an older resourceVersion.
        store.apply_event(Event::Delete(("a", 11, "newer")), Some);
        for event in [Event::Init, Event::InitDone] {
            store.apply_event(event, Some);
        }
        assert_eq!(store.apply_response("a", 3, "restored"), Some("a"));
    }

    #[test]
    fn an_event_takes_nothing_back_in_time() {
        let store = store_after([Event::Apply(("a", 5, "new")), Event::Apply(("a", 4, "old"))]);
        assert_eq!(entries(&store), [("a", "new")]);
    }
}
