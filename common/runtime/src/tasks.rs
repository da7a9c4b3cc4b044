//! Supervises permanent tasks. If one ends before the process stops, the process must exit. Otherwise, the task's
//! work would silently stop. [`KeyedTasks`] are short tasks, each for one key.

use std::collections::HashMap;

use futures::future::select_all;
use thiserror::Error;
use tokio::task::{AbortHandle, Id, JoinError, JoinHandle, JoinSet};

use crate::watchdog::Watchdog;

/// Why a task has ended.
#[derive(Debug, Error)]
pub enum TaskError {
    #[error("{0} ended unexpectedly")]
    EndedUnexpectedly(&'static str),
    #[error("{task} failed")]
    Failed {
        task: &'static str,
        #[source]
        source: JoinError,
    },
}

/// The running tasks with their names.
#[derive(Debug)]
pub struct Tasks {
    watchdog: Watchdog,
    running: Vec<(&'static str, JoinHandle<()>)>,
}

impl Tasks {
    pub fn new(watchdog: Watchdog) -> Self {
        let running = Vec::new();
        Self { watchdog, running }
    }

    pub fn spawn(&mut self, name: &'static str, task: impl Future<Output = ()> + Send + 'static) {
        let task = tokio::spawn(self.watchdog.watch(name, task));
        self.running.push((name, task));
    }

    /// Waits until a task ends, and returns the reason. Waits forever if there are no tasks.
    pub async fn wait_any(&mut self) -> TaskError {
        if self.running.is_empty() {
            return std::future::pending().await;
        }
        let (result, index, _) = select_all(self.running.iter_mut().map(|(_, task)| task)).await;
        let (name, _) = self.running.swap_remove(index);
        match join_result(name, result) {
            Ok(()) => TaskError::EndedUnexpectedly(name),
            Err(error) => error,
        }
    }

    /// Waits for a task that is stopping. Returns immediately if the task has already been reported.
    ///
    /// # Errors
    /// If the task panicked.
    pub async fn wait_for(&mut self, name: &'static str) -> Result<(), TaskError> {
        match self
            .running
            .iter()
            .position(|(running, _)| *running == name)
        {
            None => Ok(()),
            Some(index) => {
                let (name, task) = self.running.swap_remove(index);
                join_result(name, task.await)
            }
        }
    }

    /// Waits for all tasks, which must be stopping.
    ///
    /// # Errors
    /// If a task panicked.
    pub async fn wait_all(mut self) -> Result<(), TaskError> {
        while let Some((name, task)) = self.running.pop() {
            join_result(name, task.await)?;
        }
        Ok(())
    }
}

fn join_result(task: &'static str, result: Result<(), JoinError>) -> Result<(), TaskError> {
    result.map_err(|source| TaskError::Failed { task, source })
}

/// Short tasks that return their key when they end, even after a panic.
#[derive(Debug)]
pub struct KeyedTasks<K, T> {
    tasks: JoinSet<T>,
    keys: HashMap<Id, K>,
}

impl<K, T> Default for KeyedTasks<K, T> {
    fn default() -> Self {
        Self {
            tasks: JoinSet::new(),
            keys: HashMap::new(),
        }
    }
}

impl<K, T: Send + 'static> KeyedTasks<K, T> {
    pub fn spawn(&mut self, key: K, task: impl Future<Output = T> + Send + 'static) -> AbortHandle {
        let task = self.tasks.spawn(task);
        self.keys.insert(task.id(), key);
        task
    }

    /// Waits until a task ends. Waits forever if no task runs.
    pub async fn next(&mut self) -> (K, Result<T, JoinError>) {
        loop {
            let Some(result) = self.tasks.join_next_with_id().await else {
                return std::future::pending().await;
            };
            let id = result.as_ref().map_or_else(JoinError::id, |(id, _)| *id);
            if let Some(key) = self.keys.remove(&id) {
                return (key, result.map(|(_, result)| result));
            }
        }
    }

    /// Returns the keys of the running tasks.
    pub fn keys(&self) -> impl Iterator<Item = &K> {
        self.keys.values()
    }

    /// Waits until all tasks have ended, and drops their results.
    pub async fn wait_all(&mut self) {
        while self.tasks.join_next().await.is_some() {}
        self.keys.clear();
    }

    pub fn len(&self) -> usize {
        self.tasks.len()
    }

    pub fn is_empty(&self) -> bool {
        self.tasks.is_empty()
    }

    pub fn abort_all(&mut self) {
        self.tasks.abort_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn ended_task_is_named_and_others_are_awaited() {
        let mut tasks = Tasks::new(Watchdog::default());
        let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
        tasks.spawn("lasting", async { drop(stopped.await) });
        tasks.spawn("broken", async { panic!("a bug") });
        assert_eq!(tasks.wait_any().await.to_string(), "broken failed");
        tasks.spawn("short", async {});
        assert_eq!(
            tasks.wait_any().await.to_string(),
            "short ended unexpectedly"
        );
        tasks.wait_for("short").await.unwrap();
        stop.send(()).unwrap();
        tasks.wait_for("lasting").await.unwrap();
        tasks.spawn("broken too", async { panic!("a bug") });
        assert!(tasks.wait_all().await.is_err());
    }
    #[tokio::test]
    async fn keyed_task_names_its_key_after_panic() {
        let mut tasks = KeyedTasks::default();
        tasks.spawn("broken", async { panic!("a bug") });
        let (key, result) = tasks.next().await;
        assert!(key == "broken" && result.is_err_and(|error| error.is_panic()));
        tasks.spawn("well", async { 7 });
        let (key, result) = tasks.next().await;
        assert_eq!((key, result.ok()), ("well", Some(7)));
        assert!(tasks.is_empty() && tasks.keys.is_empty());
    }
}
