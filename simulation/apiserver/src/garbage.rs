//! The garbage collector: deletes objects whose owners are gone, and finishes foreground and orphan deletions.

use jiff::Timestamp;
use serde_json::{Value, json};

use crate::key::Key;
use crate::meta;
use crate::server::ApiServer;
use crate::store::{Store, WriteRecord};
use crate::tasks::{Task, Tasks};

const FOREGROUND: &str = "foregroundDeletion";
const ORPHAN: &str = "orphan";

/// Schedules the work that follows from a write.
pub(crate) fn observe(store: &Store, tasks: &mut Tasks, record: &WriteRecord, due: Timestamp) {
    let references = |object: &Value| object["metadata"]["ownerReferences"].clone();
    let before = record.before.as_deref();
    match record.after.as_deref() {
        Some(after) => {
            let has_owners = !references(after).is_null();
            if has_owners && before.map(references) != Some(references(after)) {
                tasks.add(due, Task::Dependent((*record.key).clone()));
            }
            let delays_deletion = |finalizer: &str| finalizer == FOREGROUND || finalizer == ORPHAN;
            if meta::is_terminating(after) && meta::finalizers(after).any(delays_deletion) {
                tasks.add(due, Task::Owner(meta::text(after, "uid").to_owned()));
            }
        }
        None => {
            let Some(before) = before else { return };
            let uid = meta::text(before, "uid");
            if !store.owned_by(uid).is_empty() {
                tasks.add(due, Task::Owner(uid.to_owned()));
            }
        }
    }
    // Owners that wait for the deletion of their dependents.
    for owner in before.into_iter().flat_map(meta::owners) {
        let object = store.get_by_uid(owner.uid);
        if object.is_some_and(|object| meta::is_terminating(&object.value)) {
            tasks.add(due, Task::Owner(owner.uid.to_owned()));
        }
    }
}

impl ApiServer {
    /// Whether an owner exists, in the same namespace or outside namespaces.
    fn has_owner(&self, dependent: &Key, uid: &str) -> bool {
        let owner = self.store.get_by_uid(uid);
        owner.is_some_and(|owner| {
            owner.key.namespace.is_empty() || owner.key.namespace == dependent.namespace
        })
    }

    pub(crate) fn sync_dependent(&mut self, key: &Key, now: Timestamp) {
        let Some(object) = self.get(key) else {
            return;
        };
        let owners_exist: Vec<bool> = meta::owners(&object)
            .map(|owner| self.has_owner(key, owner.uid))
            .collect();
        if owners_exist.is_empty()
            || meta::is_terminating(&object)
            || owners_exist.iter().all(|exists| *exists)
        {
            return;
        }
        if !owners_exist.contains(&true) {
            let uid = meta::text(&object, "uid");
            let options = json!({"preconditions": {"uid": uid}, "propagationPolicy": "Background"});
            self.controller_delete(key, &options, now);
            return;
        }
        let mut next = (*object).clone();
        let mut keep = owners_exist.into_iter();
        if let Some(list) = next["metadata"]["ownerReferences"].as_array_mut() {
            list.retain(|_| keep.next().unwrap_or(true));
        }
        self.controller_update(key, "", now, next);
    }

    pub(crate) fn sync_owner(&mut self, uid: &str, now: Timestamp) {
        let dependents: Vec<Key> = self
            .store
            .owned_by(uid)
            .iter()
            .filter_map(|path| self.store.get_by_path(path))
            .map(|entry| (*entry.key).clone())
            .collect();
        let owner = self.store.get_by_uid(uid).cloned();
        let Some(owner) = owner else {
            for dependent in dependents {
                self.sync_dependent(&dependent, now);
            }
            return;
        };
        if !meta::is_terminating(&owner.value) {
            return;
        }
        if meta::finalizers(&owner.value).any(|finalizer| finalizer == ORPHAN) {
            for dependent in &dependents {
                self.orphan(dependent, uid, now);
            }
            self.remove_finalizer(&owner.key, ORPHAN, now);
        } else if meta::finalizers(&owner.value).any(|finalizer| finalizer == FOREGROUND) {
            let blocking: Vec<Key> = dependents
                .into_iter()
                .filter(|key| self.blocks_deletion(key, uid))
                .collect();
            let mut remaining = false;
            for dependent in blocking {
                remaining |= !self.controller_delete(&dependent, &json!({}), now);
            }
            if !remaining {
                self.remove_finalizer(&owner.key, FOREGROUND, now);
            }
        }
    }

    fn blocks_deletion(&self, dependent: &Key, uid: &str) -> bool {
        self.store.get(dependent).is_some_and(|object| {
            meta::owners(object).any(|owner| owner.uid == uid && owner.blocks_deletion)
        })
    }

    fn orphan(&mut self, dependent: &Key, uid: &str, now: Timestamp) {
        let Some(object) = self.get(dependent) else {
            return;
        };
        let mut next = (*object).clone();
        if let Some(list) = next["metadata"]["ownerReferences"].as_array_mut() {
            list.retain(|owner| owner["uid"] != uid);
        }
        self.controller_update(dependent, "", now, next);
    }

    fn remove_finalizer(&mut self, key: &Key, finalizer: &str, now: Timestamp) {
        if let Some(object) = self.get(key) {
            let mut next = (*object).clone();
            meta::remove_finalizer(&mut next, finalizer);
            self.controller_update(key, "", now, next);
        }
    }
}
