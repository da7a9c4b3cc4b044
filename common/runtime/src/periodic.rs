//! The pace of tasks that repeat at intervals and retry with back-off. Logs the first of equal failures and the
//! recovery.

pub mod file;

use std::error::Error;
use std::time::Duration;

use krypton_types::error_chain::chain;

use crate::chance;
use crate::retry::backoff;

/// When a task runs again.
#[derive(Clone, Copy, Debug)]
pub struct Schedule {
    /// Longest pause after a success.
    pub every: Duration,
    /// Share of `every` by which a pause may be shorter, in 0..1. It separates processes that started together.
    pub jitter: f64,
    /// Longest pause after failures.
    pub retry_max: Duration,
}

/// The pause after a success.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NextRun {
    AsScheduled,
    After(Duration),
    /// Only a trigger starts the task again.
    OnTrigger,
}

/// The pace of a task that its own loop runs:
///
/// ```ignore
/// let mut pace = Periodic::new("the task", SCHEDULE);
/// loop {
///     let result = attempt().await;
///     tokio::select! {
///         () = stop.cancelled() => return,
///         () = trigger.notified() => {}
///         () = pace.pause_after(result) => {}
///     }
/// }
/// ```
#[derive(Debug)]
pub struct Periodic {
    schedule: Schedule,
    failures: u32,
    log: FailureLog,
}

impl Periodic {
    pub fn new(task: &'static str, schedule: Schedule) -> Self {
        Self {
            schedule,
            failures: 0,
            log: FailureLog::new(task),
        }
    }

    /// Records the result of an attempt. The future ends when the next one is due.
    pub fn pause_after<E: Into<Box<dyn Error + Send + Sync>>>(
        &mut self,
        result: Result<NextRun, E>,
    ) -> impl Future<Output = ()> + use<E> {
        let pause = match result {
            Ok(next) => {
                self.failures = 0;
                self.log.succeeded();
                match next {
                    NextRun::AsScheduled => {
                        let shorter = self.schedule.jitter * chance::random::<f64>();
                        Some(self.schedule.every.mul_f64(1.0 - shorter))
                    }
                    NextRun::After(pause) => Some(pause),
                    NextRun::OnTrigger => None,
                }
            }
            Err(error) => {
                self.failures += 1;
                let error: Box<dyn Error + Send + Sync> = error.into();
                self.log.failed(chain(&*error));
                let retry_max = self.schedule.retry_max;
                Some(backoff(self.failures, retry_max, chance::random()))
            }
        };
        async move {
            match pause {
                Some(pause) => tokio::time::sleep(pause).await,
                None => std::future::pending().await,
            }
        }
    }
}

/// Logs a failure of a task once, and the recovery. Logs equal failures at debug level.
#[derive(Debug)]
pub struct FailureLog {
    task: String,
    problem: Option<String>,
}

impl FailureLog {
    pub fn new(task: impl Into<String>) -> Self {
        let task = task.into();
        Self {
            task,
            problem: None,
        }
    }

    /// The failure since the last success.
    pub fn problem(&self) -> Option<&String> {
        self.problem.as_ref()
    }

    /// Records a failure, and returns whether it differs from the previous one.
    pub fn failed(&mut self, problem: String) -> bool {
        let is_new = self.problem.as_ref() != Some(&problem);
        if is_new {
            tracing::warn!(task = self.task, problem, "task failed; retrying");
        } else {
            tracing::debug!(task = self.task, problem, "task still fails");
        }
        self.problem = Some(problem);
        is_new
    }

    /// Records a success, and returns whether it follows a failure.
    pub fn succeeded(&mut self) -> bool {
        let recovered = self.problem.take().is_some();
        if recovered {
            tracing::info!(task = self.task, "task succeeded again");
        }
        recovered
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::Instant;

    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("broken")]
    struct Broken;

    const SCHEDULE: Schedule = Schedule {
        every: Duration::from_secs(100),
        jitter: 0.2,
        retry_max: Duration::from_secs(60),
    };

    #[tokio::test(start_paused = true)]
    async fn task_repeats_as_scheduled_and_backs_off() {
        let seconds = Duration::from_secs;
        let mut pace = Periodic::new("test", SCHEDULE);
        for (result, least, most) in [
            (Ok(NextRun::AsScheduled), 80.0, 100.0),
            (Err(Broken), 2.5, 5.0),
            (Err(Broken), 5.0, 10.0),
            (Ok(NextRun::After(seconds(7))), 7.0, 7.0),
            (Err(Broken), 2.5, 5.0),
        ] {
            let started = Instant::now();
            pace.pause_after(result).await;
            let pause = started.elapsed().as_secs_f64();
            assert!((least..=most + 0.01).contains(&pause), "{least}: {pause}");
        }
        for _ in 0..20 {
            let started = Instant::now();
            pace.pause_after(Err(Broken)).await;
            assert!(started.elapsed() <= SCHEDULE.retry_max + seconds(1));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn result_counts_though_trigger_ends_pause() {
        let mut pace = Periodic::new("test", SCHEDULE);
        drop(pace.pause_after(Err(Broken)));
        assert_eq!(pace.log.problem().unwrap(), "broken");
        let pause = pace.pause_after(Ok::<_, Broken>(NextRun::OnTrigger));
        assert_eq!(pace.log.problem(), None);
        let year = Duration::from_secs(365 * 86400);
        assert!(tokio::time::timeout(year, pause).await.is_err());
    }

    #[test]
    fn equal_failures_are_new_once() {
        let mut log = FailureLog::new("test");
        assert!(!log.succeeded());
        assert!(log.failed("a".to_owned()));
        assert!(!log.failed("a".to_owned()));
        assert!(log.failed("b".to_owned()));
        assert_eq!(log.problem().unwrap(), "b");
        assert!(log.succeeded() && log.problem().is_none());
        assert!(log.failed("b".to_owned()));
    }
}
