//! Records Tenants while their CRD is being deleted, and restores each separately after it.

use std::collections::BTreeMap;
use std::time::Duration;

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use krypton_crds::tenant::Tenant;
use krypton_runtime::call::call;
use krypton_runtime::chance;
use krypton_runtime::clock::BootTime;
use krypton_runtime::events::{EventRecorder, ObjectEvent};
use krypton_runtime::retry::backoff;
use krypton_types::error_chain::chain;
use krypton_types::tenant::TenantKey;
use kube::api::Api;
use kube::{Client, CustomResourceExt, Resource};

use crate::actions::ActionRunner;
use crate::backup::{self, BackupRecord, KnownDeletions, RestoreResult, UserDeletion};

/// Longest pause between two attempts to restore a Tenant.
const RETRY_MAX: Duration = Duration::from_secs(60);

/// A recorded Tenant that is not restored yet.
#[derive(Clone, Debug)]
pub(crate) struct UnrestoredTenant {
    pub workspace: Option<String>,
    pub problem: String,
    failures: u32,
    pub not_before: BootTime,
}

/// The waiting Tenants by name.
pub(crate) type UnrestoredTenants = BTreeMap<TenantKey, UnrestoredTenant>;

/// The result of one round of work on the CRD.
#[derive(Debug, Default)]
pub(crate) struct CrdRound {
    /// Tenants that still wait. `None` means unknown.
    pub unrestored: Option<UnrestoredTenants>,
    pub problem: Option<String>,
}

/// Records the Tenants of a CRD that is being deleted.
pub(crate) async fn back_up_tenants(client: &Client, known_deletions: &KnownDeletions) -> CrdRound {
    let backing_up = async {
        let crds: Api<CustomResourceDefinition> = Api::all(client.clone());
        let reading = crds.get_metadata_opt(Tenant::crd_name());
        let crd = call("reading the CRD of Tenants", reading).await;
        let crd = crd.map_err(|error| chain(&error))?;
        let Some(deleted) = crd.and_then(|crd| crd.metadata.deletion_timestamp) else {
            return Ok(None);
        };
        let backed_up = backup::back_up_and_release(client, deleted.0, known_deletions).await;
        let (released, first_error) = backed_up.map_err(|error| chain(&error))?;
        if released > 0 {
            tracing::warn!(
                released,
                "Tenant CRD is being deleted; saved Tenants and removed finalizers"
            );
        }
        Ok(first_error.map(|error| chain(&error)))
    };
    CrdRound {
        unrestored: None,
        problem: backing_up.await.unwrap_or_else(Some),
    }
}

/// Ensures the CRD, and restores the recorded Tenants.
pub(crate) async fn restore_tenants(
    runner: &ActionRunner,
    previous: UnrestoredTenants,
) -> CrdRound {
    let client = &runner.member.client;
    let records = match backup::list_records(client).await {
        Ok(records) => records,
        Err(error) => {
            return CrdRound {
                unrestored: None,
                problem: Some(chain(&error)),
            };
        }
    };
    let ensured = krypton_runtime::crd::ensure(client, Tenant::crd()).await;
    let problem = ensured.err().map(|error| chain(&error));
    let may_write = || problem.is_none() && runner.check_permit().is_ok();
    let unrestored = restore_due(client, &runner.events, may_write, records, previous).await;
    CrdRound {
        unrestored: Some(unrestored),
        problem,
    }
}

/// Tries all due records, each with its own back-off, and returns the waiting Tenants.
async fn restore_due(
    client: &Client,
    events: &EventRecorder,
    may_write: impl Fn() -> bool,
    records: Vec<BackupRecord>,
    mut previous: UnrestoredTenants,
) -> UnrestoredTenants {
    let mut unrestored = UnrestoredTenants::new();
    for record in records {
        let key = record.key();
        let tenant = previous.remove(&key).unwrap_or_else(|| UnrestoredTenant {
            workspace: record.workspace(),
            problem: "not tried yet".to_owned(),
            failures: 0,
            not_before: BootTime::default(),
        });
        let is_due = tenant.not_before <= BootTime::now();
        let tenant = match is_due && may_write() {
            true => restore_one(client, events, record, tenant).await,
            false => Some(tenant),
        };
        unrestored.extend(tenant.map(|tenant| (key, tenant)));
    }
    unrestored
}

/// Restores one record. Returns `None` if the record is settled.
async fn restore_one(
    client: &Client,
    events: &EventRecorder,
    record: BackupRecord,
    mut tenant: UnrestoredTenant,
) -> Option<UnrestoredTenant> {
    let key = record.key();
    let problem = match record.restore(client).await {
        Ok(result) => {
            result.iter().for_each(|result| emit_event(events, result));
            return None;
        }
        Err(error) => chain(&error),
    };
    if problem != tenant.problem {
        tracing::warn!(tenant = %key, %problem, "Tenant not restored; retrying");
    }
    tenant.failures += 1;
    let pause = backoff(tenant.failures, RETRY_MAX, chance::random());
    tenant.not_before = BootTime::now() + pause;
    Some(UnrestoredTenant { problem, ..tenant })
}

fn emit_event(events: &EventRecorder, result: &RestoreResult) {
    let (tenant, reason, message) = match result {
        RestoreResult::Recreated(tenant, deletion) => {
            let deletion_note = match deletion {
                UserDeletion::No => "Krypton kept its release",
                UserDeletion::Perhaps => {
                    "it may have been deleted before its CRD; delete it again if you don't need it"
                }
                UserDeletion::Yes => "it was being deleted, so Krypton deleted it again",
            };
            let message = format!("recreated after a deletion of its CRD; {deletion_note}");
            (tenant, "TenantRestored", message)
        }
        RestoreResult::Replaced(tenant, workspace) => {
            let message = format!(
                "this Tenant replaces one of the same name that was lost with the CRD; Krypton keeps its release in \
                 namespace {workspace}, if it had one"
            );
            (tenant, "TenantNotRestored", message)
        }
    };
    let event = ObjectEvent::warning(reason, message);
    events.record_event(tenant.object_ref(&()), event);
}

#[cfg(test)]
mod tests {
    use http::Method;
    use krypton_crds::tenant::TenantSpec;
    use parking_lot::Mutex;
    use serde_json::json;

    use super::*;
    use crate::backup::tests::record_for;
    use crate::stub_server::StubServer;

    fn tenant(name: &str) -> Tenant {
        let mut tenant = Tenant::new(name, TenantSpec::default());
        tenant.metadata.namespace = Some("team".to_owned());
        tenant.metadata.uid = Some(format!("{name}-old"));
        tenant
    }

    /// Returns an API server with these records that rejects the Tenant `bad`.
    fn server(records: &[&str]) -> StubServer {
        let records = records.iter().map(|name| record_for(&tenant(name)));
        let records: Mutex<Vec<_>> = Mutex::new(records.collect());
        StubServer::start(move |request| {
            let mut records = records.lock();
            let name = request.body["metadata"]["name"].as_str();
            match request.line().as_str() {
                "GET secrets" => (200, json!({"metadata": {}, "items": *records})),
                "GET team" => (200, json!({"metadata": {"name": "team"}})),
                "POST tenants" if name == Some("bad") => (403, json!("exceeded quota")),
                _ if request.method == Method::DELETE => {
                    let last = Some(request.last_segment());
                    records.retain(|secret| secret.metadata.name.as_deref() != last);
                    (200, json!({"kind": "Status", "status": "Success"}))
                }
                _ => (201, request.body.clone()),
            }
        })
    }

    fn created(server: &StubServer, name: &str) -> usize {
        let requests = server.requests().into_iter();
        let created = requests.filter(|request| {
            request.method == Method::POST && request.body["metadata"]["name"] == name
        });
        created.count()
    }

    /// Runs one round of a process with this state.
    async fn round(
        client: &Client,
        may_write: bool,
        previous: UnrestoredTenants,
    ) -> UnrestoredTenants {
        let events = EventRecorder::queue(8).0;
        let records = backup::list_records(client).await.unwrap();
        restore_due(client, &events, || may_write, records, previous).await
    }

    #[tokio::test]
    async fn refused_tenant_keeps_no_other_away() {
        let server = server(&["bad", "good"]);
        let unrestored = round(&server.client, true, UnrestoredTenants::new()).await;
        let names: Vec<_> = unrestored.keys().map(ToString::to_string).collect();
        assert_eq!(names, ["team/bad"]);
        let bad = unrestored.values().next().unwrap();
        assert!(bad.problem.contains("exceeded quota"), "{}", bad.problem);
        assert_eq!((created(&server, "good"), bad.failures), (1, 1));
        // The failed Tenant backs off.
        let unrestored = round(&server.client, true, unrestored).await;
        assert_eq!((created(&server, "bad"), unrestored.len()), (1, 1));
    }

    #[tokio::test]
    async fn restored_tenant_is_not_created_again_after_restart() {
        let server = server(&["bad", "good"]);
        round(&server.client, true, UnrestoredTenants::new()).await;
        // A new process has no state and reads the records.
        let unrestored = round(&server.client, true, UnrestoredTenants::new()).await;
        assert_eq!((created(&server, "good"), created(&server, "bad")), (1, 2));
        assert_eq!(unrestored.len(), 1);
    }

    #[tokio::test]
    async fn without_the_lease_no_tenant_is_restored() {
        let server = server(&["good"]);
        let unrestored = round(&server.client, false, UnrestoredTenants::new()).await;
        assert_eq!((created(&server, "good"), unrestored.len()), (0, 1));
    }
}
