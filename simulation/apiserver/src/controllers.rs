//! Controllers: their queue, and what they notice. Namespaces, workloads, owners and CRDs have their own modules.

use std::collections::BTreeSet;
use std::sync::Arc;

use jiff::Timestamp;
use serde_json::{Value, json};

use crate::objects::{Deleted, Write};
use crate::resources::Kind;
use crate::server::{ApiServer, Key};
use crate::store::{Entry, Record, Store};
use crate::{crd, garbage, meta, namespaces, workloads};

/// Name of the controllers, also as a field manager.
pub(crate) const CONTROLLER: &str = "kube-controller-manager";

/// Work of a controller.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Task {
    Namespace(String),
    Crd(String),
    Workload(Key),
    /// Looks at the dependents of an owner, by its UID.
    Owner(String),
    /// Looks at the owners of an object.
    Dependent(Key),
}

/// Work with its time.
#[derive(Debug, Default)]
pub(crate) struct Tasks(BTreeSet<(Timestamp, Task)>);

impl Tasks {
    pub(crate) fn next(&self) -> Option<Timestamp> {
        self.0.first().map(|(at, _)| *at)
    }

    pub(crate) fn add(&mut self, at: Timestamp, task: Task) {
        self.0.insert((at, task));
    }

    fn take(&mut self, now: Timestamp) -> Option<(Timestamp, Task)> {
        match self.next()? <= now {
            true => self.0.pop_first(),
            false => None,
        }
    }

    /// Schedules a look at all objects of a restored store.
    pub(crate) fn resume(&mut self, store: &Store) {
        self.0.clear();
        for (_, entry) in store.entries() {
            for task in first_looks(entry) {
                self.add(Timestamp::UNIX_EPOCH, task);
            }
        }
    }
}

fn first_looks(entry: &Entry) -> Vec<Task> {
    let key = &entry.key;
    let mut tasks = Vec::new();
    match (key.group.as_str(), key.resource.as_str()) {
        ("", "namespaces") => tasks.push(Task::Namespace(key.name.clone())),
        ("apiextensions.k8s.io", _) => tasks.push(Task::Crd(key.name.clone())),
        _ if workloads::is_workload(key) => tasks.push(Task::Workload((**key).clone())),
        _ => {}
    }
    if meta::owners(&entry.value).next().is_some() {
        tasks.push(Task::Dependent((**key).clone()));
    }
    if meta::is_terminating(&entry.value) {
        tasks.push(Task::Owner(meta::text(&entry.value, "uid").to_owned()));
    }
    tasks
}

impl ApiServer {
    /// Schedules the work that follows from a write.
    pub(crate) fn observe(&mut self, record: &Record, now: Timestamp) {
        let due = now + self.options.controller_delay;
        let key = &record.key;
        match (key.group.as_str(), key.resource.as_str()) {
            ("", "namespaces") => self.tasks.add(due, Task::Namespace(key.name.clone())),
            ("apiextensions.k8s.io", _) => {
                let due = now + self.options.crd_delay;
                if crd::needs_work(record) {
                    self.tasks.add(due, Task::Crd(key.name.clone()));
                }
            }
            _ if workloads::is_workload(key) && workloads::needs_work(record) => {
                let due = due + workloads::duration(record.after.as_deref());
                self.tasks.add(due, Task::Workload((**key).clone()));
            }
            _ => {}
        }
        garbage::observe(&self.store, &mut self.tasks, record, due);
        if record.after.is_none() {
            self.observe_deletion(key, due);
        }
    }

    /// Continues the deletion of a namespace or CRD that waited for an object.
    fn observe_deletion(&mut self, key: &Key, due: Timestamp) {
        if !key.namespace.is_empty() && self.is_namespace_terminating(&key.namespace) {
            self.tasks.add(due, Task::Namespace(key.namespace.clone()));
        }
        let crd = format!("{}.{}", key.resource, key.group);
        if self
            .crd(&crd)
            .is_some_and(|found| meta::is_terminating(&found))
        {
            self.tasks.add(due, Task::Crd(crd));
        }
    }

    pub(crate) fn run_controllers(&mut self, now: Timestamp) {
        while let Some((at, task)) = self.tasks.take(now) {
            // Work after a restore has no time of its own.
            let at = match at == Timestamp::UNIX_EPOCH {
                true => now,
                false => at,
            };
            match task {
                Task::Namespace(name) => self.sync_namespace(&name, at),
                Task::Crd(name) => self.sync_crd(&name, at),
                Task::Workload(key) => self.sync_workload(&key, at),
                Task::Owner(uid) => self.sync_owner(&uid, at),
                Task::Dependent(key) => self.sync_dependent(&key, at),
            }
        }
    }

    pub(crate) fn controller_write(
        &self,
        kind: &Arc<Kind>,
        key: &Key,
        subresource: &str,
        now: Timestamp,
    ) -> Write {
        Write {
            kind: kind.clone(),
            namespace: key.namespace.clone(),
            name: key.name.clone(),
            subresource: subresource.to_owned(),
            manager: CONTROLLER.to_owned(),
            applied: false,
            validation: "Ignore".to_owned(),
            dry_run: false,
            now,
            by: CONTROLLER.to_owned(),
        }
    }

    /// Writes an object on behalf of a controller. A rejected write changes nothing, as in a real controller.
    pub(crate) fn controller_update(
        &mut self,
        key: &Key,
        subresource: &str,
        now: Timestamp,
        next: Value,
    ) {
        let (Some(kind), Some(before)) = (self.kinds.of(key).cloned(), self.get(key)) else {
            return;
        };
        let write = self.controller_write(&kind, key, subresource, now);
        drop(self.update(&write, &before, next));
    }

    /// Deletes an object on behalf of a controller. Returns whether it is gone.
    pub(crate) fn controller_delete(&mut self, key: &Key, options: &Value, now: Timestamp) -> bool {
        let Some(kind) = self.kinds.of(key).cloned() else {
            return false;
        };
        let write = self.controller_write(&kind, key, "", now);
        matches!(self.delete(&write, options), Ok(Deleted::Gone(_)))
    }

    /// Creates the namespaces of a new cluster.
    pub(crate) fn create_system_namespaces(&mut self, now: Timestamp) {
        for name in namespaces::SYSTEM {
            let object = json!({"metadata": {"name": name}});
            if let Some(kind) = self.kinds.get("", "v1", "namespaces").cloned() {
                let write = self.controller_write(&kind, &kind.key("", name), "", now);
                drop(self.create(write, object));
            }
        }
    }
}
