//! The requests that follow from decisions: at most one in flight for each object.

use std::collections::BTreeMap;
use std::sync::Arc;

use jiff::Timestamp;
use krypton_crds::krypton_deployment::{
    DeploymentPhase, KryptonDeployment, KryptonDeploymentStatus,
};
use krypton_runtime::clock::BootTime;
use krypton_runtime::events::ObjectEvent;
use krypton_runtime::tasks::KeyedTasks;
use krypton_types::deployment::{DeploymentKey, ReportedEvent};
use kube::ResourceExt as _;
use kube::api::Api;
use tracing::field::Empty;
use tracing::{Instrument as _, Span};

use super::{DeploymentController, DeploymentEntry, DeploymentStore, recorded_placements};
use crate::deployments::api::{self, DeploymentWrite, DeploymentWriteResult};
use crate::deployments::plan::DeploymentDecision;
use crate::leader::Leader;
use crate::leader::home_writer::{self, DeletionCause};

/// Requests in flight.
#[derive(Default)]
pub(super) struct Requests {
    pub(super) writes: KeyedTasks<DeploymentKey, DeploymentWriteResult>,
    /// By the object's key and UID.
    pub(super) deletion_reads: KeyedTasks<(DeploymentKey, String), Option<DeletionCause>>,
}

impl Requests {
    /// Starts the requests that are due. Returns the due time of the next waiting one.
    pub(super) fn start(
        &mut self,
        store: &mut DeploymentStore,
        decisions: Vec<DecidedDeployment>,
        (controller, leader): (&DeploymentController, &Leader),
        (may_write, term_start): (bool, Option<Timestamp>),
        now: BootTime,
    ) -> Option<BootTime> {
        if !may_write {
            return None;
        }
        let mut next_requests = BTreeMap::new();
        for (key, decision, reported_events) in decisions {
            let Some(entry) = store.entries.get_mut(&key) else {
                continue;
            };
            if let Some(term_start) = term_start {
                entry.record_events(reported_events, term_start, &controller.notices);
            }
            let notifier = controller.notices.notifier();
            notifier.deployment(&key, &decision.status);
            if decision.status.phase == Some(DeploymentPhase::Ready) {
                entry.recorded_events.end_repair();
            }
            let Some(mut request) = DeploymentRequest::new(decision, entry) else {
                continue;
            };
            let status = entry.object.status.as_ref();
            let Some(epoch) = leader.epoch_for_write(status.and_then(|status| status.hub_epoch))
            else {
                // A later leader wrote it. Check it again under a later epoch.
                continue;
            };
            if let DeploymentRequest::Write(DeploymentWrite::Status(status), _) = &mut request {
                status.hub_epoch = Some(epoch);
            }
            store.queue.add(key.clone());
            next_requests.insert(key, request);
        }
        while let Some(key) = store.queue.pop(now) {
            if let (Some(entry), Some(request)) =
                (store.entries.get_mut(&key), next_requests.remove(&key))
            {
                if let DeploymentRequest::Write(DeploymentWrite::Status(status), _) = &request {
                    entry.written = Some(status.clone());
                }
                home_writer::start(&mut store.queue, key.clone(), now);
                self.begin(key, &entry.object, request, (controller, leader));
            }
        }
        store.queue.wake()
    }

    fn begin(
        &mut self,
        key: DeploymentKey,
        object: &Arc<KryptonDeployment>,
        request: DeploymentRequest,
        (controller, leader): (&DeploymentController, &Leader),
    ) {
        let (client, span) = (controller.client.clone(), request_span(&key, object));
        match request {
            DeploymentRequest::ReadDeletion => {
                let uid = object.metadata.uid.clone().unwrap_or_default();
                let objects: Api<KryptonDeployment> =
                    Api::namespaced(client.clone(), &key.namespace);
                let name = key.name.clone();
                let read = home_writer::read_deletion(client, objects, name, uid.clone());
                self.deletion_reads.spawn((key, uid), read.instrument(span));
            }
            DeploymentRequest::Write(write, events) => {
                let write = api::write(
                    client,
                    leader.clone(),
                    key.clone(),
                    Arc::clone(object),
                    write,
                    events,
                );
                let write = leader.tracked(write.instrument(span));
                self.writes.spawn(key, write);
            }
        }
    }
}

/// An object's key, its decision, and the events that members reported.
pub(super) type DecidedDeployment = (
    DeploymentKey,
    DeploymentDecision,
    Vec<(String, Vec<ReportedEvent>)>,
);

/// The next request for an object: a read of its deletion, or a write and the events to record after it.
enum DeploymentRequest {
    ReadDeletion,
    Write(DeploymentWrite, Vec<ObjectEvent>),
}

impl DeploymentRequest {
    fn new(decision: DeploymentDecision, entry: &DeploymentEntry) -> Option<Self> {
        let object = &*entry.object;
        // Krypton has nothing left to do for this object.
        if object.metadata.deletion_timestamp.is_some() && object.finalizers().is_empty() {
            return None;
        }
        if decision.must_read_deletion {
            return Some(Self::ReadDeletion);
        }
        if let Some(finalizers) = decision.finalizers {
            return Some(Self::Write(
                DeploymentWrite::Finalizers(finalizers),
                decision.finalizer_events,
            ));
        }
        let status = &decision.status;
        let is_recorded = object.status.as_ref().is_some_and(|recorded| {
            recorded == status || is_without_dropped(recorded, status, entry.written.as_deref())
        });
        (!is_recorded).then_some(Self::Write(
            DeploymentWrite::Status(Box::new(decision.status)),
            decision.status_events,
        ))
    }
}

/// Returns whether only fields are missing that the hub has written and a CRD with an earlier schema drops.
fn is_without_dropped(
    recorded: &KryptonDeploymentStatus,
    status: &KryptonDeploymentStatus,
    written: Option<&KryptonDeploymentStatus>,
) -> bool {
    let is_written = written.is_some_and(|written| has_later_fields_of(written, status));
    let mut stored = status.clone();
    if recorded.last_handled_reconcile_at.is_none() {
        stored.last_handled_reconcile_at = None;
    }
    if recorded.history.is_empty() {
        stored.history.clear();
    }
    is_written && *recorded == stored
}

/// Returns whether the fields are the same that a CRD with an earlier schema drops.
pub(super) fn has_later_fields_of(
    status: &KryptonDeploymentStatus,
    other: &KryptonDeploymentStatus,
) -> bool {
    status.last_handled_reconcile_at == other.last_handled_reconcile_at
        && status.history == other.history
}

/// Returns the span of a read or write, with the cluster of the latest placement.
pub(super) fn request_span(key: &DeploymentKey, object: &KryptonDeployment) -> Span {
    let member = recorded_placements(object)
        .last()
        .map(|placement| &*placement.cluster);
    let generation = object.metadata.generation;
    tracing::error_span!("home", deployment = %key, member, generation, outcome = Empty)
}

#[cfg(test)]
mod tests {
    use krypton_crds::tenant::HistoryEntry;

    use super::*;

    #[test]
    fn fields_dropped_by_older_schema_are_written_once() {
        let status = |requests: bool, revisions: usize| KryptonDeploymentStatus {
            last_handled_reconcile_at: requests.then(|| "now".to_owned()),
            history: vec![HistoryEntry::default(); revisions],
            ..KryptonDeploymentStatus::default()
        };
        let desired = status(true, 1);
        let other = KryptonDeploymentStatus {
            observed_generation: Some(2),
            ..status(false, 0)
        };
        for (recorded, written, expected) in [
            (status(true, 0), Some(status(true, 1)), true),
            (status(false, 0), Some(status(true, 1)), true),
            // The hub has not written it yet, or another history.
            (status(true, 0), None, false),
            (status(true, 0), Some(status(true, 2)), false),
            (status(true, 2), Some(status(true, 1)), false),
            (other, Some(status(true, 1)), false),
        ] {
            let is_recorded = is_without_dropped(&recorded, &desired, written.as_ref());
            assert_eq!(is_recorded, expected, "{recorded:?} {written:?}");
        }
    }
}
