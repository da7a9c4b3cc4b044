//! Retries of operations that can succeed later.

use std::cell::Cell;
use std::error::Error;
use std::time::Duration;

use krypton_types::error_chain::chain;
use tokio_util::sync::CancellationToken;

use crate::chance;
use crate::clock::BootTime;

/// Grace period after an API server's start. It serves requests before it has read all roles, so it rejects some
/// requests at first.
const STARTUP_GRACE: Duration = Duration::from_secs(15);
/// Part of a rejection by an API server that has not read its roles. Every Kubernetes cluster has this role.
const MISSING_ROLE: &str = "\"system:discovery\" not found";
const RETRY_MAX: Duration = Duration::from_secs(15);

/// Distinguishes temporary rejections from permanent ones by the time since the API server last failed to respond.
#[derive(Debug)]
pub struct StartupGrace(Cell<BootTime>);

impl StartupGrace {
    #[allow(
        clippy::new_without_default,
        reason = "it starts now, which is not a default"
    )]
    pub fn new() -> Self {
        Self(Cell::new(BootTime::now()))
    }

    /// Records that the API server did not respond.
    pub fn record_no_response(&self) {
        self.0.set(BootTime::now());
    }

    /// Returns whether a rejection with this message can be temporary.
    pub fn covers(&self, message: &str) -> bool {
        message.contains(MISSING_ROLE) || BootTime::now().since(self.0.get()) < STARTUP_GRACE
    }
}

/// Calls `attempt` until it succeeds, and logs each failure. Returns an error for which `is_retryable` returns `false`.
/// Returns `None` if `stop` is cancelled.
pub async fn retry_until_ready<T, E: Error, F: Future<Output = Result<T, E>>>(
    name: &str,
    stop: &CancellationToken,
    is_retryable: impl Fn(&E) -> bool,
    attempt: impl Fn() -> F,
) -> Result<Option<T>, E> {
    let mut attempts = 0;
    loop {
        let error = tokio::select! {
            () = stop.cancelled() => return Ok(None),
            result = attempt() => match result {
                Ok(value) => return Ok(Some(value)),
                Err(error) => error,
            },
        };
        if !is_retryable(&error) {
            return Err(error);
        }
        attempts += 1;
        tracing::warn!(error = %chain(&error), "{name} is not ready; retrying");
        tokio::select! {
            () = stop.cancelled() => return Ok(None),
            () = tokio::time::sleep(backoff(attempts, RETRY_MAX, chance::random())) => {}
        }
    }
}

/// A pause that doubles with each attempt.
#[derive(Clone, Copy, Debug)]
pub struct Backoff {
    pub first: Duration,
    pub max: Duration,
}

impl Backoff {
    /// Returns the pause after `attempts` attempts, without jitter.
    pub fn without_jitter(self, attempts: u32) -> Duration {
        let doubled = self
            .first
            .saturating_mul(1 << attempts.saturating_sub(1).min(20));
        doubled.min(self.max)
    }

    /// Returns the pause after `attempts` attempts. `jitter` in 0..1 selects a point in the upper half of the longest
    /// pause.
    pub fn pause(self, attempts: u32, jitter: f64) -> Duration {
        let full = self.without_jitter(attempts);
        full / 2 + full.mul_f64(jitter.clamp(0.0, 1.0) / 2.0)
    }

    /// Back-off of a failed request, from 5 s up to `max`.
    pub const fn up_to(max: Duration) -> Self {
        let first = Duration::from_secs(5);
        Self { first, max }
    }
}

/// Returns the pause after `attempts` failed attempts, with [`Backoff::up_to`].
pub fn backoff(attempts: u32, cap: Duration, jitter: f64) -> Duration {
    Backoff::up_to(cap).pause(attempts, jitter)
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("attempt {0}")]
    struct Failed(u32);

    #[tokio::test(start_paused = true)]
    async fn only_transient_errors_are_retried() {
        let stop = CancellationToken::new();
        let count = Cell::new(0);
        let attempt = async || {
            count.set(count.get() + 1);
            if count.get() < 4 {
                Err(Failed(count.get()))
            } else {
                Ok(())
            }
        };
        let result = retry_until_ready("test", &stop, |_| true, attempt).await;
        assert!(matches!(result, Ok(Some(()))) && count.get() == 4);
        count.set(0);
        let error = retry_until_ready("test", &stop, |error| error.0 < 2, attempt).await;
        assert!(matches!(error, Err(Failed(2))));
    }

    #[test]
    fn rejection_is_permanent_once_roles_are_read() {
        let unread = r#"RBAC: clusterrole.rbac.authorization.k8s.io "system:discovery" not found"#;
        let started = StartupGrace::new();
        assert!(started.covers("forbidden") && started.covers(unread));
        let running = StartupGrace(Cell::new(BootTime::default()));
        assert!(!running.covers("forbidden") && running.covers(unread));
    }

    #[tokio::test(start_paused = true)]
    async fn it_ends_when_told_to() {
        let stop = CancellationToken::new();
        let attempt = async || {
            stop.cancel();
            Err::<(), _>(Failed(1))
        };
        let result = retry_until_ready("test", &stop, |_| true, attempt).await;
        assert!(matches!(result, Ok(None)));
    }

    #[test]
    fn backoff_doubles_up_to_its_cap() {
        let cap = Duration::from_secs(900);
        assert_eq!(backoff(1, cap, 1.0), Duration::from_secs(5));
        assert_eq!(backoff(2, cap, 1.0), Duration::from_secs(10));
        assert_eq!(backoff(60, cap, 1.0), cap);
        assert_eq!(backoff(60, cap, 0.0), cap / 2);
    }
}
