//! The ordered store: objects, revisions and the log of writes.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::{Arc, OnceLock};

use bytes::Bytes;
use serde_json::Value;

use crate::key::Key;
use crate::kind::Kind;
use crate::meta;
use crate::render::{self, RenderedObject};
use crate::request::View;

/// Number of writes that the log keeps.
const LOG_LIMIT: usize = 20_000;

/// An object with its identity.
#[derive(Clone, Debug)]
pub(crate) struct StoredObject {
    pub(crate) key: Arc<Key>,
    pub(crate) value: Arc<Value>,
    /// The object in its stored version, once a client has got it.
    json: OnceLock<Bytes>,
}

/// A write in the log.
#[derive(Clone, Debug)]
pub(crate) struct WriteRecord {
    pub(crate) revision: u64,
    pub(crate) path: Arc<str>,
    pub(crate) key: Arc<Key>,
    pub(crate) before: Option<Arc<Value>>,
    pub(crate) after: Option<Arc<Value>>,
}

#[derive(Clone, Debug, Default)]
pub(crate) struct Store {
    objects: BTreeMap<Arc<str>, StoredObject>,
    revision: u64,
    /// The log contains all writes after this revision.
    compacted_revision: u64,
    log: VecDeque<Arc<WriteRecord>>,
    /// Paths of the objects with an owner, by the owner's UID.
    paths_by_owner: BTreeMap<String, BTreeSet<Arc<str>>>,
    /// Paths by UID.
    paths_by_uid: BTreeMap<String, Arc<str>>,
}

/// Returns the path of an object in the store. Its order is the order of etcd's keys.
pub(crate) fn path(key: &Key) -> String {
    prefix(&key.group, &key.resource, &key.namespace) + &key.name
}

/// Returns the common prefix of the paths of a resource's objects. An empty namespace selects all.
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
    pub(crate) fn compacted_revision(&self) -> u64 {
        self.compacted_revision
    }

    pub(crate) fn compact(&mut self) {
        self.log.clear();
        self.compacted_revision = self.revision;
    }

    pub(crate) fn get(&self, key: &Key) -> Option<&Arc<Value>> {
        self.get_by_path(&path(key)).map(|entry| &entry.value)
    }

    pub(crate) fn get_by_path(&self, path: &str) -> Option<&StoredObject> {
        self.objects.get(path)
    }

    /// Returns an object as JSON in the form that a client requests.
    pub(crate) fn render(&self, kind: &Kind, view: View, object: &Value) -> Bytes {
        let render = || render::json_bytes(&RenderedObject::new(kind, view, object));
        if view == View::Metadata || kind.api_version() != kind.stored_api_version {
            return render();
        }
        let key = kind.key(meta::text(object, "namespace"), meta::name(object));
        match self.get_by_path(&path(&key)) {
            Some(stored) if std::ptr::eq(&*stored.value, object) => {
                stored.json.get_or_init(render).clone()
            }
            _ => render(),
        }
    }

    pub(crate) fn get_by_uid(&self, uid: &str) -> Option<&StoredObject> {
        self.get_by_path(self.paths_by_uid.get(uid)?)
    }

    /// Returns the objects whose path starts with `prefix`, from `start` on, in order.
    pub(crate) fn scan<'a>(
        &'a self,
        prefix: &'a str,
        start: &str,
    ) -> impl Iterator<Item = (&'a Arc<str>, &'a StoredObject)> {
        let from: Arc<str> = start.max(prefix).into();
        let objects = self.objects.range(from..);
        objects.take_while(move |(path, _)| path.starts_with(prefix))
    }

    /// Returns the objects of `scan` as they were at `revision`, which must not be compacted.
    pub(crate) fn scan_at(&self, prefix: &str, start: &str, revision: u64) -> Vec<Arc<Value>> {
        let objects = self.scan(prefix, start);
        if revision >= self.revision {
            return objects.map(|(_, entry)| entry.value.clone()).collect();
        }
        let mut objects: BTreeMap<&str, Arc<Value>> = objects
            .map(|(path, entry)| (&**path, entry.value.clone()))
            .collect();
        let newer_first = self.log.iter().rev();
        for record in newer_first.take_while(|record| record.revision > revision) {
            if !record.path.starts_with(prefix) || *record.path < *start {
                continue;
            }
            match &record.before {
                Some(before) => objects.insert(&record.path, before.clone()),
                None => objects.remove(&*record.path),
            };
        }
        objects.into_values().collect()
    }

    /// Returns the writes after `revision`, in order.
    pub(crate) fn writes_since(&self, revision: u64) -> impl Iterator<Item = &Arc<WriteRecord>> {
        let start = self
            .log
            .partition_point(|record| record.revision <= revision);
        self.log.range(start..)
    }

    pub(crate) fn objects(&self) -> impl Iterator<Item = (&Arc<str>, &StoredObject)> {
        self.objects.iter()
    }

    /// Returns the paths of the objects that name `uid` as an owner.
    pub(crate) fn owned_by(&self, uid: &str) -> Vec<Arc<str>> {
        let paths = self.paths_by_owner.get(uid);
        paths.into_iter().flatten().cloned().collect()
    }

    /// Writes or deletes an object and returns the record. Sets the object's `resourceVersion`.
    pub(crate) fn commit(&mut self, key: &Key, after: Option<Value>) -> Arc<WriteRecord> {
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
            self.objects.insert(
                path.clone(),
                StoredObject {
                    key,
                    value,
                    json: OnceLock::new(),
                },
            );
        }
        let record = Arc::new(WriteRecord {
            revision,
            path,
            key,
            before: before.map(|before| before.value),
            after,
        });
        self.log.push_back(record.clone());
        if self.log.len() > LOG_LIMIT
            && let Some(oldest) = self.log.pop_front()
        {
            self.compacted_revision = oldest.revision;
        }
        record
    }

    fn index(&mut self, path: &Arc<str>, value: &Value) {
        for owner in meta::owners(value) {
            let paths = self.paths_by_owner.entry(owner.uid.to_owned()).or_default();
            paths.insert(path.clone());
        }
        let uid = meta::text(value, "uid").to_owned();
        self.paths_by_uid.insert(uid, path.clone());
    }

    fn unindex(&mut self, path: &Arc<str>, value: &Value) {
        for owner in meta::owners(value) {
            if let Some(paths) = self.paths_by_owner.get_mut(owner.uid) {
                paths.remove(path);
                if paths.is_empty() {
                    self.paths_by_owner.remove(owner.uid);
                }
            }
        }
        self.paths_by_uid.remove(meta::text(value, "uid"));
    }

    /// Forgets the log, as after a restore.
    pub(crate) fn without_log(&self) -> Self {
        Self {
            log: VecDeque::new(),
            compacted_revision: self.revision,
            ..self.clone()
        }
    }
}
