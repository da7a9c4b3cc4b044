//! The requests for home's Tenants: sends the writes and stores their results, and reads the CRD of Tenants.

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use krypton_crds::tenant::{Tenant, TenantStatus};
use krypton_reconciler::status::PHASE_SET;
use krypton_runtime::call::call;
use krypton_runtime::chance;
use krypton_runtime::clock::BootTime;
use krypton_runtime::events::{EventRecorder, ObjectEvent};
use krypton_types::conditions::Phase;
use krypton_types::error_chain::chain;
use krypton_types::names;
use krypton_types::placed_tenant::{has_placed_finalizer, recorded_placement};
use krypton_types::tenant::TenantKey;
use kube::api::{Api, Patch, PatchParams};
use kube::{Client, CustomResourceExt, Resource, ResourceExt};
use serde_json::json;
use tracing::Span;
use tracing::field::Empty;

use super::{FinishedWrite, TenantStore, TenantWrite};
use crate::leader::home_writer;
use crate::members::tenant_reports::TenantReports;
use crate::tenants::placement::{FinalizerChange, TenantDeletionCause};
use crate::tenants::placement_orders::{CrdObservation, UnverifiedDeletions};

/// Retry interval after home's CRD dropped `status.placement`.
const RECORD_RETRY: Duration = Duration::from_secs(600);

/// Returns the span of a write. The member is the one that the Tenant names, or home.
pub(super) fn span(key: &TenantKey, tenant: &Tenant) -> Span {
    let member = tenant.referenced_member().unwrap_or(names::SELF_CLUSTER);
    let generation = tenant.metadata.generation;
    tracing::error_span!("home", tenant = %key, member, generation, outcome = Empty)
}

/// Sends one write. It fails with a conflict if the object changed after the decision.
pub(super) async fn send_write(
    client: Client,
    key: TenantKey,
    tenant: Arc<Tenant>,
    write: TenantWrite,
) -> FinishedWrite {
    let api: Api<Tenant> = Api::namespaced(client, &key.namespace);
    let base_version = tenant.metadata.resource_version.clone();
    let records_placement = matches!(&write, TenantWrite::Status(status) if status.placement.as_ref() != recorded_placement(&tenant));
    let request = async {
        let params = PatchParams::default();
        match &write {
            TenantWrite::Status(status) => {
                let mut patch = json!({
                    "metadata": { "resourceVersion": base_version },
                    "status": status,
                });
                // A merge patch removes only fields that are null.
                let fields = &mut patch["status"];
                for name in ["history", "summary", "nextSteps", "clusters"] {
                    fields[name] = fields.get(name).cloned().unwrap_or_default();
                }
                let patch = Patch::Merge(&patch);
                api.patch_status(&key.name, &params, &patch).await
            }
            TenantWrite::Finalizer(change) => {
                let mut finalizers = tenant.finalizers().to_vec();
                finalizers.retain(|finalizer| finalizer != names::PLACED_FINALIZER);
                let placed_on = match change {
                    FinalizerChange::Add(member) => {
                        finalizers.push(names::PLACED_FINALIZER.to_owned());
                        Some(member)
                    }
                    FinalizerChange::Remove { .. } => None,
                };
                let annotations = json!({ names::PLACED_ON_ANNOTATION: placed_on });
                let patch = Patch::Merge(json!({ "metadata": {
                    "resourceVersion": base_version,
                    "finalizers": finalizers,
                    "annotations": annotations,
                }}));
                api.patch(&key.name, &params, &patch).await
            }
        }
    };
    let (object, outcome) = home_writer::write(format!("writing Tenant {key}"), request).await;
    let object = object.map(|mut tenant| {
        tenant.metadata.managed_fields = None;
        tenant
    });
    Span::current().record("outcome", outcome.name());
    let (phase, written_status, orphaned) = match write {
        TenantWrite::Status(status) => {
            let phase = new_phase(tenant.status.as_ref(), &status);
            let is_dropped = drops_fields(&status, object.as_ref());
            (phase, is_dropped.then_some(*status), None)
        }
        TenantWrite::Finalizer(FinalizerChange::Add(_)) => (None, None, None),
        TenantWrite::Finalizer(FinalizerChange::Remove { orphaned }) => (None, None, orphaned),
    };
    FinishedWrite {
        base_version,
        object,
        records_placement,
        written_status,
        orphaned,
        phase,
        outcome,
    }
}

/// Returns whether the stored object lacks fields of the written status.
fn drops_fields(written: &TenantStatus, object: Option<&Tenant>) -> bool {
    let stored = object.and_then(|object| object.status.as_ref());
    stored.is_some_and(|stored| {
        stored.next_steps.len() != written.next_steps.len()
            || stored.clusters.len() != written.clusters.len()
            || stored.history != written.history
            || stored.last_handled_reconcile_at != written.last_handled_reconcile_at
    })
}

/// Returns the phase over all members, if it differs from the recorded one. A new Tenant is Pending.
fn new_phase(recorded: Option<&TenantStatus>, status: &TenantStatus) -> Option<String> {
    let pending = Phase::Pending.as_str();
    let previous = recorded.and_then(|recorded| recorded.phase.as_deref());
    let phase = status.phase.as_deref();
    phase
        .filter(|phase| *phase != previous.unwrap_or(pending))
        .map(str::to_owned)
}

impl TenantStore {
    /// Stores the written object, unless the watch has delivered a newer one.
    pub(super) fn finish_write(
        &mut self,
        key: TenantKey,
        written: FinishedWrite,
        reports: &TenantReports,
        now: BootTime,
    ) {
        let outcome = written.outcome.for_queue(now);
        self.queue.done(&key, outcome, now, chance::random());
        let Some(entry) = self.entries.get_mut(&key) else {
            return self.queue.forget(&key);
        };
        entry.written_status = written.written_status;
        if let Some(object) = &written.object
            && written.records_placement
        {
            match recorded_placement(object) {
                // The next step writes no status, so the throttle does not apply. A user waits for it.
                Some(_) if !has_placed_finalizer(object) => self.queue.reset(&key),
                Some(_) => {}
                None => self.record_dropped_until = Some(now + RECORD_RETRY),
            }
        }
        // Otherwise, the watch has delivered a newer object.
        let is_newest = entry.version() == written.base_version.as_ref();
        if let Some(object) = written.object.filter(|_| is_newest) {
            self.put(key, object, reports);
        }
    }
}

/// Records the events of a write after it succeeded. A rejected write is retried.
pub(super) fn record_events(recorder: &EventRecorder, written: &FinishedWrite) {
    let Some(tenant) = &written.object else {
        return;
    };
    let orphaned = written.orphaned.as_deref();
    let orphaned = orphaned.map(|message| ObjectEvent::warning("Orphaned", message));
    let phase = written.phase.as_deref();
    let phase = phase.map(|phase| ObjectEvent::normal(PHASE_SET, phase));
    for event in orphaned.into_iter().chain(phase) {
        recorder.record_event(tenant.object_ref(&()), event);
    }
}

/// Reads the CRD to determine why these Tenants were deleted. If the CRD is not being deleted, the users
/// deleted the Tenants.
pub(super) async fn read_crd(
    client: Client,
    deletions: UnverifiedDeletions,
    self_cluster: bool,
) -> (UnverifiedDeletions, Option<CrdObservation>) {
    let crds: Api<CustomResourceDefinition> = Api::all(client);
    let request = crds.get_metadata(Tenant::crd_name());
    let observation = match call("reading the CRD of Tenants", request).await {
        Ok(crd) => Some(CrdObservation {
            cause: match crd.metadata.deletion_timestamp {
                None => TenantDeletionCause::User,
                Some(_) if self_cluster => TenantDeletionCause::Crd,
                Some(_) => TenantDeletionCause::CrdWithoutRestore,
            },
            created: crd.metadata.creation_timestamp.map(|time| time.0),
        }),
        Err(error) => {
            tracing::warn!(error = %chain(&error), "deletions of Tenants wait; retrying");
            None
        }
    };
    (deletions, observation)
}

#[cfg(test)]
mod tests {
    use krypton_crds::tenant::HistoryEntry;

    use super::*;

    #[test]
    fn history_that_crd_drops_is_noticed() {
        let written = |by: Option<&str>| TenantStatus {
            history: vec![HistoryEntry {
                revision: 1,
                by: by.map(str::to_owned),
                ..HistoryEntry::default()
            }],
            ..TenantStatus::default()
        };
        let status = written(Some("flux"));
        for (stored, is_dropped) in [
            (written(Some("flux")), false),
            (written(None), true),
            (TenantStatus::default(), true),
        ] {
            let mut tenant = Tenant::new("acme", krypton_crds::tenant::TenantSpec::default());
            tenant.status = Some(stored);
            let drops_fields = drops_fields(&status, Some(&tenant));
            assert_eq!(drops_fields, is_dropped, "{:?}", tenant.status);
        }
    }

    #[test]
    fn phase_event_on_home_reports_all_members() {
        let with_phase = |phase: Option<&str>| TenantStatus {
            phase: phase.map(str::to_owned),
            ..TenantStatus::default()
        };
        for (before, after, event_phase) in [
            (None, Some("Pending"), None),
            (None, Some("Ready"), Some("Ready")),
            (Some(with_phase(None)), Some("Error"), Some("Error")),
            (Some(with_phase(Some("Ready"))), Some("Ready"), None),
            (
                Some(with_phase(Some("Ready"))),
                Some("Error"),
                Some("Error"),
            ),
            (
                Some(with_phase(Some("Ready"))),
                Some("Pending"),
                Some("Pending"),
            ),
        ] {
            let phase = new_phase(before.as_ref(), &with_phase(after));
            assert_eq!(phase.as_deref(), event_phase, "{before:?} {after:?}");
        }
    }
}
