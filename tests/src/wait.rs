//! Waits for a condition with a deadline. The error contains the last observed state.

use std::{fmt::Debug, time::Duration};

use anyhow::{Result, anyhow, bail, ensure};
use kube::{Api, Resource, ResourceExt};
use serde::de::DeserializeOwned;
use tokio::time::{Instant, sleep, timeout_at};

/// Deadline beyond any single step of Krypton: a Lease (60 s), a back-off, and a slow machine.
pub const STEP_DEADLINE: Duration = Duration::from_secs(150);
const MIN_PAUSE: Duration = Duration::from_millis(20);
const MAX_PAUSE: Duration = Duration::from_millis(250);

/// Like `eventually_within`, with a deadline beyond any single step of Krypton.
pub async fn eventually<T>(what: &str, check: impl AsyncFnMut() -> Result<Option<T>>) -> Result<T> {
    eventually_within(what, STEP_DEADLINE, check).await
}

/// Like `eventually_within`, but fails as soon as `check_running` does.
pub async fn eventually_while_running<T>(
    what: &str,
    deadline: Duration,
    mut check_running: impl FnMut() -> Result<()>,
    mut check: impl AsyncFnMut() -> Result<Option<T>>,
) -> Result<T> {
    let waiting = eventually_within(what, deadline, async || match check_running() {
        Ok(()) => Ok(check().await?.map(Ok)),
        Err(error) => Ok(Some(Err(error))),
    });
    waiting.await?
}

/// Calls `check` until it returns `Some`, and returns that value.
///
/// `Ok(None)` and `Err` both mean "not yet". The error message of a timeout contains the last `Err`, so use
/// `bail!("phase is {phase}")` to report the observed state.
/// Returns an error with `what` and the last observed state if `deadline` expires.
pub async fn eventually_within<T>(
    what: &str,
    deadline: Duration,
    mut check: impl AsyncFnMut() -> Result<Option<T>>,
) -> Result<T> {
    let end = Instant::now() + deadline;
    let mut pause = MIN_PAUSE;
    let mut last_state = None;
    loop {
        match timeout_at(end, check()).await {
            Ok(Ok(Some(value))) => return Ok(value),
            Ok(Ok(None)) => last_state = Some("not there yet".to_owned()),
            Ok(Err(state)) => last_state = Some(format!("{state:#}")),
            Err(_) => {
                let previous_state = last_state.unwrap_or_else(|| "nothing".to_owned());
                return Err(anyhow!(
                    "{what}: not within {deadline:?}; the last check did not return, before it: {previous_state}"
                ));
            }
        }
        if Instant::now() + pause >= end {
            let last_state = last_state.unwrap_or_default();
            return Err(anyhow!(
                "{what}: not within {deadline:?}; last seen: {last_state}"
            ));
        }
        sleep(pause).await;
        pause = (pause * 2).min(MAX_PAUSE);
    }
}

/// Waits until the object is gone.
pub async fn wait_until_gone<K>(api: &Api<K>, name: &str) -> Result<()>
where
    K: Clone + DeserializeOwned + Debug,
{
    let what = format!("{name} to be gone");
    eventually(&what, async || match api.get_opt(name).await? {
        None => Ok(Some(())),
        Some(object) => bail!("{object:?}"),
    })
    .await
}

/// Waits until a new object has the name of this one, and returns the new object.
pub async fn wait_until_replaced<K>(api: &Api<K>, previous: &K) -> Result<K>
where
    K: Resource + Clone + DeserializeOwned + Debug,
{
    let name = previous.name_any();
    let what = format!("{name} to be replaced");
    eventually(&what, async || {
        let object = api.get(&name).await?;
        ensure!(object.uid() != previous.uid(), "{:?}", object.meta());
        Ok(Some(object))
    })
    .await
}
