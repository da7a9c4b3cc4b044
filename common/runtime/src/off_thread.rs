//! Runs blocking work, such as file access and long computations, outside the runtime's threads.
//!
//! In a simulation, the work runs on the thread of the simulated process, so its order is determined.

use tokio::task::JoinHandle;

/// Starts `work` on a separate thread. Dropping the handle does not end it. The handle returns an error if the work
/// panics.
#[allow(
    clippy::disallowed_methods,
    reason = "the one place that leaves the runtime's threads"
)]
pub fn start<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> JoinHandle<T> {
    #[cfg(feature = "simulation")]
    if crate::world::current().is_some() {
        return tokio::spawn(async move { work() });
    }
    tokio::task::spawn_blocking(work)
}

/// Runs `work` on a separate thread and waits for the result.
///
/// # Panics
/// Panics if the work panics.
pub async fn run<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    match start(work).await {
        Ok(result) => result,
        Err(error) => match error.try_into_panic() {
            Ok(panic) => std::panic::resume_unwind(panic),
            // The runtime cancels blocking tasks only at its own shutdown, which also ends this task.
            Err(_) => std::future::pending().await,
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn panic_of_the_work_is_an_error() {
        assert_eq!(start(|| 7).await.unwrap(), 7);
        assert!(start(|| panic!("of a test")).await.unwrap_err().is_panic());
    }

    #[tokio::test]
    #[should_panic(expected = "of a test")]
    async fn run_panics_with_its_work() {
        run(|| panic!("of a test")).await
    }
}
