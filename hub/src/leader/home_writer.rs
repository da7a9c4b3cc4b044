//! The leader's writes to objects on home: sends and counts them, and prevents an earlier leader from
//! overwriting objects that a later leader has written. Rereads deletions before the hub acts on them.

use std::time::Duration;

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use krypton_runtime::call::{ApiError, call};
use krypton_runtime::clock::BootTime;
use krypton_runtime::retry::Backoff;
use krypton_runtime::work_queue::{Outcome, WorkQueue};
use krypton_types::error_chain::chain;
use kube::api::{Api, PostParams};
use kube::{Client, CustomResourceExt, Resource};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use serde::Serialize;
use serde::de::DeserializeOwned;

/// The outcome of a write on the home cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WriteOutcome {
    Ok,
    /// Another writer was faster, or the object is gone. The watch delivers the change.
    Conflict,
    Failed,
}

impl WriteOutcome {
    const ALL: [Self; 3] = [Self::Ok, Self::Conflict, Self::Failed];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Conflict => "conflict",
            Self::Failed => "failed",
        }
    }

    /// Returns when the object may be written again. The interval starts when the response arrives, so a slow API
    /// server gets no more writes than it can process.
    pub(crate) fn for_queue(self, now: BootTime) -> Outcome {
        match self {
            Self::Ok | Self::Conflict => Outcome::Again(now + MIN_WRITE_INTERVAL),
            Self::Failed => Outcome::Failed,
        }
    }
}

/// Counts the hub's writes to objects on the home cluster, including their status. Clones share the
/// counters.
#[derive(Clone, Debug)]
pub struct HomeWrites(pub(crate) Family<[(&'static str, &'static str); 2], Counter>);

impl HomeWrites {
    pub(crate) const EDGE_CLUSTER: &str = "edgecluster";
    pub(crate) const TENANT: &str = "tenant";
    pub(crate) const DEPLOYMENT: &str = "kryptondeployment";

    /// Counts a completed write. `kind` is one of the kinds above.
    pub(crate) fn count(&self, kind: &'static str, outcome: WriteOutcome) {
        let labels = [("kind", kind), ("outcome", outcome.name())];
        self.0.get_or_create(&labels).inc();
    }
}

impl Default for HomeWrites {
    fn default() -> Self {
        let writes = Family::default();
        for kind in [Self::EDGE_CLUSTER, Self::TENANT, Self::DEPLOYMENT] {
            for outcome in WriteOutcome::ALL {
                let labels = [("kind", kind), ("outcome", outcome.name())];
                drop(writes.get_or_create(&labels));
            }
        }
        Self(writes)
    }
}

/// Minimum interval between the end of a write and the next write of the same object.
pub(crate) const MIN_WRITE_INTERVAL: Duration = Duration::from_secs(1);
/// Back-off of failed writes. A conflict has none.
const BACKOFF: Backoff = Backoff {
    first: Duration::from_secs(1),
    max: Duration::from_secs(30),
};

/// Creates a queue of objects to write, with at most so many writes in flight.
pub(crate) fn queue<K: Ord + Clone>(writers: usize) -> WorkQueue<K> {
    WorkQueue::new(writers, BACKOFF, BACKOFF)
}

/// Starts a request for an object. The next one follows after [`MIN_WRITE_INTERVAL`] at the earliest.
pub(crate) fn start<K: Ord + Clone>(queue: &mut WorkQueue<K>, key: K, now: BootTime) {
    queue.delay(key.clone(), now + MIN_WRITE_INTERVAL);
    queue.start(key);
}

/// Sends a write that carries its precondition. The caller reconciles the object again after a failure.
pub(crate) async fn write<T>(
    attempt: String,
    request: impl Future<Output = kube::Result<T>>,
) -> (Option<T>, WriteOutcome) {
    outcome(call(attempt, request).await)
}

/// Creates an object that was not read, or replaces the version that was read, which is the precondition.
pub(crate) async fn create_or_replace<K>(api: &Api<K>, object: &K) -> kube::Result<K>
where
    K: Clone + DeserializeOwned + Serialize + std::fmt::Debug + Resource,
{
    let (params, meta) = (PostParams::default(), object.meta());
    match (&meta.resource_version, &meta.name) {
        (Some(_), Some(name)) => api.replace(name, &params, object).await,
        _ => api.create(&params, object).await,
    }
}

/// Logs a failure.
pub(crate) fn outcome<T>(response: Result<T, ApiError>) -> (Option<T>, WriteOutcome) {
    match response {
        Ok(object) => (Some(object), WriteOutcome::Ok),
        Err(error) if matches!(error.code(), Some(404 | 409)) => (None, WriteOutcome::Conflict),
        Err(error) => {
            tracing::warn!(error = %chain(&error), "failed to write on the home cluster; retrying");
            (None, WriteOutcome::Failed)
        }
    }
}

/// Why an object is being deleted. The deletion of a CRD deletes all its objects, which does not request the
/// removal of any of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DeletionCause {
    Object,
    Crd,
}

/// Rereads the deletion of an object. Returns `None` if it is not being deleted, or if the read failed. Deleting
/// the CRD precedes deleting its objects, so the CRD is read last.
pub(crate) async fn read_deletion<K>(
    client: Client,
    objects: Api<K>,
    name: String,
    uid: String,
) -> Option<DeletionCause>
where
    K: Clone + DeserializeOwned + std::fmt::Debug + Resource<DynamicType = ()> + CustomResourceExt,
{
    let attempt = format!("reading the deletion of {} {name}", K::kind(&()));
    let request = async {
        let object = objects.get_metadata(&name).await?.metadata;
        if object.uid.as_ref() != Some(&uid) || object.deletion_timestamp.is_none() {
            return Ok(None);
        }
        let crds: Api<CustomResourceDefinition> = Api::all(client);
        let crd = crds.get_metadata(K::crd_name()).await?;
        Ok(Some(match crd.metadata.deletion_timestamp {
            Some(_) => DeletionCause::Crd,
            None => DeletionCause::Object,
        }))
    };
    call(attempt, request).await.unwrap_or_else(|error| {
        tracing::warn!(error = %chain(&error), "the deletion stays unconfirmed; retrying");
        None
    })
}

/// Upper bound for epochs. A hub never writes a greater number, so such a number is ignored.
const EPOCH_LIMIT: u64 = 1 << 53;

/// Returns the epoch `recorded` on an object if a later leader has written it. Then this hub must not write it. An
/// older CRD stores no epoch. Together with the write's resourceVersion, the check and the write are atomic.
pub(super) fn later_epoch(own_epoch: u64, recorded: Option<u64>) -> Option<u64> {
    recorded.filter(|epoch| *epoch > own_epoch && *epoch < EPOCH_LIMIT)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn next_write_waits_a_second_for_slow_server() {
        let (mut queue, now) = (queue(1), BootTime::default());
        start(&mut queue, "a", now);
        let answered = BootTime(Duration::from_secs(9));
        queue.done(&"a", WriteOutcome::Ok.for_queue(answered), answered, 0.0);
        assert_eq!(queue.pop(answered), None);
        let next = answered + MIN_WRITE_INTERVAL;
        assert_eq!(queue.wake(), Some(next));
    }

    #[test]
    fn failed_writes_back_off() {
        let (mut queue, now) = (queue(1), BootTime::default());
        for seconds in [1, 2, 4, 8, 16, 30, 30] {
            start(&mut queue, "a", now);
            queue.done(&"a", Outcome::Failed, now, 0.5);
            let pause = Duration::from_secs(seconds).mul_f64(0.75);
            assert_eq!(queue.not_before(&"a"), BootTime(pause));
        }
    }

    #[test]
    fn missing_or_newer_object_is_a_conflict() {
        let outcome = |code| {
            let status = kube::core::Status::failure("no", "No").with_code(code);
            outcome::<()>(Err(ApiError::Failed {
                attempt: "writing".into(),
                source: Box::new(kube::Error::Api(status.boxed())),
            }))
        };
        for (code, expected) in [
            (404, WriteOutcome::Conflict),
            (409, WriteOutcome::Conflict),
            (403, WriteOutcome::Failed),
            (500, WriteOutcome::Failed),
        ] {
            assert_eq!(outcome(code), (None, expected), "{code}");
        }
    }

    #[test]
    fn later_leader_writes_are_not_overwritten() {
        for epoch in [8, EPOCH_LIMIT - 1] {
            assert_eq!(later_epoch(7, Some(epoch)), Some(epoch));
        }
        for recorded in [None, Some(6), Some(7), Some(EPOCH_LIMIT), Some(u64::MAX)] {
            assert_eq!(later_epoch(7, recorded), None, "{recorded:?}");
        }
    }
}
