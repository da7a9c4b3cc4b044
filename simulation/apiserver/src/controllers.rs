//! Controllers: the tasks that follow from a write. Namespaces, workloads, owners and CRDs have their own modules.

use std::sync::Arc;

use jiff::Timestamp;
use serde_json::{Value, json};

use crate::key::Key;
use crate::kind::Kind;
use crate::server::ApiServer;
use crate::store::{StoredObject, WriteRecord};
use crate::tasks::{Task, Tasks};
use crate::write::{DeletionResult, Write};
use crate::{crd, garbage, meta, namespaces, workloads};

/// Name of the controllers, also as a field manager.
pub(crate) const CONTROLLER_NAME: &str = "kube-controller-manager";

fn initial_tasks(entry: &StoredObject) -> Vec<Task> {
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
    /// Schedules a check of all objects of a restored store.
    pub(crate) fn reschedule_all(&mut self) {
        self.tasks = Tasks::default();
        for (_, entry) in self.store.objects() {
            for task in initial_tasks(entry) {
                self.tasks.add(Timestamp::UNIX_EPOCH, task);
            }
        }
    }

    /// Schedules the work that follows from a write.
    pub(crate) fn observe(&mut self, record: &WriteRecord, now: Timestamp) {
        let due = now + self.options.controller_delay;
        let key = &record.key;
        match (key.group.as_str(), key.resource.as_str()) {
            ("", "namespaces") => self.tasks.add(due, Task::Namespace(key.name.clone())),
            ("apiextensions.k8s.io", _) => {
                let due = now + self.options.crd_delay;
                if crd::needs_sync(record) {
                    self.tasks.add(due, Task::Crd(key.name.clone()));
                }
            }
            _ if workloads::is_workload(key) && workloads::needs_sync(record) => {
                let due = due + workloads::completion_delay(record.after.as_deref());
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
        let crd_name = format!("{}.{}", key.resource, key.group);
        if self
            .crd(&crd_name)
            .is_some_and(|crd| meta::is_terminating(&crd))
        {
            self.tasks.add(due, Task::Crd(crd_name));
        }
    }

    pub(crate) fn run_controllers(&mut self, now: Timestamp) {
        while let Some((due, task)) = self.tasks.pop_due(now) {
            // A task after a restore has no due time.
            let due = match due == Timestamp::UNIX_EPOCH {
                true => now,
                false => due,
            };
            match task {
                Task::Namespace(name) => self.sync_namespace(&name, due),
                Task::Crd(name) => self.sync_crd(&name, due),
                Task::Workload(key) => self.sync_workload(&key, due),
                Task::Owner(uid) => self.sync_owner(&uid, due),
                Task::Dependent(key) => self.sync_dependent(&key, due),
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
            field_manager: CONTROLLER_NAME.to_owned(),
            is_apply: false,
            field_validation: "Ignore".to_owned(),
            dry_run: false,
            now,
            author: CONTROLLER_NAME.to_owned(),
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
        let (Some(kind), Some(previous)) = (self.kinds.for_key(key).cloned(), self.get(key)) else {
            return;
        };
        let write = self.controller_write(&kind, key, subresource, now);
        drop(self.update(&write, &previous, next));
    }

    /// Deletes an object on behalf of a controller. Returns whether it is gone.
    pub(crate) fn controller_delete(&mut self, key: &Key, options: &Value, now: Timestamp) -> bool {
        let Some(kind) = self.kinds.for_key(key).cloned() else {
            return false;
        };
        let write = self.controller_write(&kind, key, "", now);
        matches!(self.delete(&write, options), Ok(DeletionResult::Gone(_)))
    }

    /// Creates the namespaces of a new cluster.
    pub(crate) fn create_system_namespaces(&mut self, now: Timestamp) {
        for name in namespaces::SYSTEM_NAMESPACES {
            let object = json!({"metadata": {"name": name}});
            if let Some(kind) = self.kinds.get("", "v1", "namespaces").cloned() {
                let write = self.controller_write(&kind, &kind.key("", name), "", now);
                drop(self.create(write, object));
            }
        }
    }
}
