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
    ByItself(&'static str),
    #[error("{task} ended badly")]
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
    left: Vec<(&'static str, JoinHandle<()>)>,
}

impl Tasks {
    pub fn new(watchdog: Watchdog) -> Self {
        let left = Vec::new();
        Self { watchdog, left }
    }

    pub fn spawn(&mut self, what: &'static str, task: impl Future<Output = ()> + Send + 'static) {
        let task = tokio::spawn(self.watchdog.watch(what, task));
        self.left.push((what, task));
    }

    /// Waits until a task ends, and returns the reason. Waits forever if there are no tasks.
    pub async fn one_ends(&mut self) -> TaskError {
        if self.left.is_empty() {
            return std::future::pending().await;
        }
        let (ended, at, _) = select_all(self.left.iter_mut().map(|(_, task)| task)).await;
        let (what, _) = self.left.swap_remove(at);
        match said(what, ended) {
            Ok(()) => TaskError::ByItself(what),
            Err(error) => error,
        }
    }

    /// Waits for a task that is stopping. Returns immediately if the task has already been reported.
    ///
    /// # Errors
    /// If the task panicked.
    pub async fn end_of(&mut self, what: &'static str) -> Result<(), TaskError> {
        match self.left.iter().position(|(name, _)| *name == what) {
            None => Ok(()),
            Some(at) => {
                let (what, task) = self.left.swap_remove(at);
                said(what, task.await)
            }
        }
    }

    /// Waits for all tasks, which must be stopping.
    ///
    /// # Errors
    /// If a task panicked.
    pub async fn end(mut self) -> Result<(), TaskError> {
        while let Some((what, task)) = self.left.pop() {
            said(what, task.await)?;
        }
        Ok(())
    }
}

fn said(task: &'static str, ended: Result<(), JoinError>) -> Result<(), TaskError> {
    ended.map_err(|source| TaskError::Failed { task, source })
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
            let Some(ended) = self.tasks.join_next_with_id().await else {
                return std::future::pending().await;
            };
            let id = ended.as_ref().map_or_else(JoinError::id, |(id, _)| *id);
            if let Some(key) = self.keys.remove(&id) {
                return (key, ended.map(|(_, result)| result));
            }
        }
    }

    /// Returns the keys of the running tasks.
    pub fn keys(&self) -> impl Iterator<Item = &K> {
        self.keys.values()
    }

    /// Waits until all tasks have ended, and drops their results.
    pub async fn end(&mut self) {
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
        assert_eq!(tasks.one_ends().await.to_string(), "broken ended badly");
        tasks.spawn("short", async {});
        assert_eq!(
            tasks.one_ends().await.to_string(),
            "short ended unexpectedly"
        );
        tasks.end_of("short").await.unwrap();
        stop.send(()).unwrap();
        tasks.end_of("lasting").await.unwrap();
        tasks.spawn("broken too", async { panic!("a bug") });
        assert!(tasks.end().await.is_err());
    }
    #[tokio::test]
    async fn keyed_task_names_its_key_after_panic() {
        let mut tasks = KeyedTasks::default();
        tasks.spawn("broken", async { panic!("a bug") });
        let (key, ended) = tasks.next().await;
        assert!(key == "broken" && ended.is_err_and(|error| error.is_panic()));
        tasks.spawn("well", async { 7 });
        let (key, ended) = tasks.next().await;
        assert_eq!((key, ended.ok()), ("well", Some(7)));
        assert!(tasks.is_empty() && tasks.keys.is_empty());
    }
}
