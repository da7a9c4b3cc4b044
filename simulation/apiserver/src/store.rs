//! The ordered store: objects, revisions and the log of writes.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use serde_json::Value;

use crate::meta;
use crate::server::Key;

/// Number of writes that the log keeps.
const LOG: usize = 20_000;

/// An object with its identity.
#[derive(Clone, Debug)]
pub(crate) struct Entry {
    pub(crate) key: Arc<Key>,
    pub(crate) value: Arc<Value>,
}

/// One write.
#[derive(Clone, Debug)]
pub(crate) struct Record {
    pub(crate) revision: u64,
    pub(crate) path: Arc<str>,
    pub(crate) key: Arc<Key>,
    pub(crate) before: Option<Arc<Value>>,
    pub(crate) after: Option<Arc<Value>>,
}

#[derive(Clone, Debug, Default)]
pub(crate) struct Store {
    objects: BTreeMap<Arc<str>, Entry>,
    revision: u64,
    /// The log contains all writes after this revision.
    compacted: u64,
    log: VecDeque<Arc<Record>>,
    /// Paths of the objects with an owner, by the owner's UID.
    owned: BTreeMap<String, BTreeSet<Arc<str>>>,
    /// Paths by UID.
    uids: BTreeMap<String, Arc<str>>,
}

/// Returns the position of an object in the store. Its order is the order of etcd's keys.
pub(crate) fn path(key: &Key) -> String {
    prefix(&key.group, &key.resource, &key.namespace) + &key.name
}

/// Returns the common start of the positions of a resource's objects. An empty namespace selects all.
pub(crate) fn prefix(group: &str, resource: &str, namespace: &str) -> String {
    let mut prefix = format!("{group}/{resource}/");
    if !namespace.is_empty() {
        prefix.push_str(namespace);
        prefix.push('/');
    }
    prefix
}

impl Store {
    pub(crate) fn revision(&self) -> u64 {
        self.revision
    }

    /// Returns the revision up to which the log is lost.
    pub(crate) fn compacted(&self) -> u64 {
        self.compacted
    }

    pub(crate) fn compact(&mut self) {
        self.log.clear();
        self.compacted = self.revision;
    }

    pub(crate) fn get(&self, key: &Key) -> Option<&Arc<Value>> {
        self.at(&path(key)).map(|entry| &entry.value)
    }

    pub(crate) fn at(&self, path: &str) -> Option<&Entry> {
        self.objects.get(path)
    }

    pub(crate) fn by_uid(&self, uid: &str) -> Option<&Entry> {
        self.at(self.uids.get(uid)?)
    }

    /// Returns the objects whose position starts with `prefix`, from `start` on, in order.
    pub(crate) fn scan<'a>(
        &'a self,
        prefix: &'a str,
        start: &str,
    ) -> impl Iterator<Item = (&'a Arc<str>, &'a Entry)> {
        let from: Arc<str> = start.max(prefix).into();
        let rows = self.objects.range(from..);
        rows.take_while(move |(path, _)| path.starts_with(prefix))
    }

    /// Returns the rows of `scan` as they were at `revision`, which must not be compacted.
    pub(crate) fn scan_at(&self, prefix: &str, start: &str, revision: u64) -> Vec<Arc<Value>> {
        let rows = self.scan(prefix, start);
        if revision >= self.revision {
            return rows.map(|(_, entry)| entry.value.clone()).collect();
        }
        let mut rows: BTreeMap<&str, Arc<Value>> = rows
            .map(|(path, entry)| (&**path, entry.value.clone()))
            .collect();
        let undone = self.log.iter().rev();
        for record in undone.take_while(|record| record.revision > revision) {
            if !record.path.starts_with(prefix) || *record.path < *start {
                continue;
            }
            match &record.before {
                Some(before) => rows.insert(&record.path, before.clone()),
                None => rows.remove(&*record.path),
            };
        }
        rows.into_values().collect()
    }

    /// Returns the writes after `revision`, in order.
    pub(crate) fn since(&self, revision: u64) -> impl Iterator<Item = &Arc<Record>> {
        let first = self
            .log
            .partition_point(|record| record.revision <= revision);
        self.log.range(first..)
    }

    pub(crate) fn entries(&self) -> impl Iterator<Item = (&Arc<str>, &Entry)> {
        self.objects.iter()
    }

    /// Returns the positions of the objects that name `uid` as an owner.
    pub(crate) fn owned_by(&self, uid: &str) -> Vec<Arc<str>> {
        let owned = self.owned.get(uid);
        owned.into_iter().flatten().cloned().collect()
    }

    /// Writes or deletes an object and returns the record. Sets the object's `resourceVersion`.
    pub(crate) fn commit(&mut self, key: &Key, after: Option<Value>) -> Arc<Record> {
        self.revision += 1;
        let revision = self.revision;
        let path: Arc<str> = path(key).into();
        let before = self.objects.remove(&path);
        if let Some(before) = &before {
            self.unindex(&path, &before.value);
        }
        let key = match &before {
            Some(before) => before.key.clone(),
            None => Arc::new(key.clone()),
        };
        let after = after.map(|mut after| {
            meta::set(&mut after, "resourceVersion", revision.to_string());
            Arc::new(after)
        });
        if let Some(value) = &after {
            self.index(&path, value);
            let (key, value) = (key.clone(), value.clone());
            self.objects.insert(path.clone(), Entry { key, value });
        }
        let record = Arc::new(Record {
            revision,
            path,
            key,
            before: before.map(|before| before.value),
            after,
        });
        self.log.push_back(record.clone());
        if self.log.len() > LOG
            && let Some(lost) = self.log.pop_front()
        {
            self.compacted = lost.revision;
        }
        record
    }

    fn index(&mut self, path: &Arc<str>, value: &Value) {
        for owner in meta::owners(value) {
            let owned = self.owned.entry(owner.uid.to_owned()).or_default();
            owned.insert(path.clone());
        }
        let uid = meta::text(value, "uid").to_owned();
        self.uids.insert(uid, path.clone());
    }

    fn unindex(&mut self, path: &Arc<str>, value: &Value) {
        for owner in meta::owners(value) {
            if let Some(owned) = self.owned.get_mut(owner.uid) {
                owned.remove(path);
                if owned.is_empty() {
                    self.owned.remove(owner.uid);
                }
            }
        }
        self.uids.remove(meta::text(value, "uid"));
    }

    /// Forgets the log, as after a restore.
    pub(crate) fn without_log(&self) -> Self {
        Self {
            log: VecDeque::new(),
            compacted: self.revision,
            ..self.clone()
        }
    }
}
