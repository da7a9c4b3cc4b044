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
use crate::backup::{self, Deleted, Deletions, Record, Restored};

/// Longest pause between two attempts to restore a Tenant.
const RETRY_MAX: Duration = Duration::from_secs(60);

/// A recorded Tenant that is not restored yet.
#[derive(Clone, Debug)]
pub(crate) struct Waiting {
    pub workspace: Option<String>,
    pub problem: String,
    failures: u32,
    pub not_before: BootTime,
}

/// The waiting Tenants by name.
pub(crate) type Known = BTreeMap<TenantKey, Waiting>;

/// The result of one round of work on the CRD.
#[derive(Debug, Default)]
pub(crate) struct CrdRound {
    /// Tenants that still wait. `None` means unknown.
    pub waiting: Option<Known>,
    pub problem: Option<String>,
}

/// Records the Tenants of a CRD that is being deleted.
pub(crate) async fn keep_tenants(client: &Client, known: &Deletions) -> CrdRound {
    let kept = async {
        let crds: Api<CustomResourceDefinition> = Api::all(client.clone());
        let reading = crds.get_metadata_opt(Tenant::crd_name());
        let crd = call("reading the CRD of Tenants", reading).await;
        let crd = crd.map_err(|error| chain(&error))?;
        let Some(deleted) = crd.and_then(|crd| crd.metadata.deletion_timestamp) else {
            return Ok(None);
        };
        let kept = backup::keep_and_release(client, deleted.0, known).await;
        let (released, refused) = kept.map_err(|error| chain(&error))?;
        if released > 0 {
            tracing::warn!(
                released,
                "the Tenant CRD is being deleted: Tenants are backed up and released, nothing is uninstalled"
            );
        }
        Ok(refused.map(|error| chain(&error)))
    };
    CrdRound {
        waiting: None,
        problem: kept.await.unwrap_or_else(Some),
    }
}

/// Ensures the CRD, and restores the recorded Tenants.
pub(crate) async fn put_back_tenants(performer: &ActionRunner, before: Known) -> CrdRound {
    let client = &performer.member.client;
    let records = match backup::records(client).await {
        Ok(records) => records,
        Err(error) => {
            return CrdRound {
                waiting: None,
                problem: Some(chain(&error)),
            };
        }
    };
    let ensured = krypton_runtime::crd::ensure(client, &Tenant::crd()).await;
    let problem = ensured.err().map(|error| chain(&error));
    let may = || problem.is_none() && performer.still_permitted().is_ok();
    let waiting = put_back_due(client, &performer.events, may, records, before).await;
    CrdRound {
        waiting: Some(waiting),
        problem,
    }
}

/// Tries all due records, each with its own back-off, and returns the waiting Tenants.
async fn put_back_due(
    client: &Client,
    events: &EventRecorder,
    may: impl Fn() -> bool,
    records: Vec<Record>,
    mut before: Known,
) -> Known {
    let mut waiting = Known::new();
    for record in records {
        let key = record.key();
        let kept = before.remove(&key).unwrap_or_else(|| Waiting {
            workspace: record.workspace(),
            problem: "not tried yet".to_owned(),
            failures: 0,
            not_before: BootTime::default(),
        });
        let due = kept.not_before <= BootTime::now();
        let kept = match due && may() {
            true => put_back(client, events, record, kept).await,
            false => Some(kept),
        };
        waiting.extend(kept.map(|kept| (key, kept)));
    }
    waiting
}

/// Restores one record. Returns `None` if the record is settled.
async fn put_back(
    client: &Client,
    events: &EventRecorder,
    record: Record,
    mut kept: Waiting,
) -> Option<Waiting> {
    let key = record.key();
    let problem = match record.put_back(client).await {
        Ok(restored) => {
            restored.iter().for_each(|back| tell(events, back));
            return None;
        }
        Err(error) => chain(&error),
    };
    if problem != kept.problem {
        tracing::warn!(tenant = %key, %problem, "Tenant not restored; retrying");
    }
    kept.failures += 1;
    let pause = backoff(kept.failures, RETRY_MAX, chance::random());
    kept.not_before = BootTime(BootTime::now().0 + pause);
    Some(Waiting { problem, ..kept })
}

fn tell(events: &EventRecorder, restored: &Restored) {
    let (tenant, reason, message) = match restored {
        Restored::Back(tenant, deleted) => {
            let more = match deleted {
                Deleted::No => "Krypton kept its release",
                Deleted::Perhaps => {
                    "it may have been deleted before its CRD; delete it again if you don't need it"
                }
                Deleted::Yes => "it was being deleted, so Krypton deleted it again",
            };
            let message = format!("recreated after a deletion of its CRD; {more}");
            (tenant, "TenantRestored", message)
        }
        Restored::InTheWay(tenant, workspace) => {
            let message = format!(
                "this Tenant replaces one of the same name that was lost with the CRD; Krypton keeps its release in \
                 namespace {workspace}, if it had one"
            );
            (tenant, "TenantNotRestored", message)
        }
    };
    let told = ObjectEvent {
        warning: true,
        reason,
        message,
    };
    events.tell(tenant.object_ref(&()), told);
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;
    use std::sync::{Arc, Mutex};

    use krypton_crds::tenant::TenantSpec;
    use kube::client::Body;
    use serde_json::{Value, json};

    use super::*;

    fn tenant(name: &str) -> Tenant {
        let mut tenant = Tenant::new(name, TenantSpec::default());
        tenant.metadata.namespace = Some("team".to_owned());
        tenant.metadata.uid = Some(format!("{name}-old"));
        tenant
    }

    /// Returns an API server with these records that rejects the Tenant `bad`.
    fn server(records: &[&str]) -> (Client, Arc<Mutex<Vec<String>>>) {
        let kept = records.iter().map(|name| backup::record_of(&tenant(name)));
        let kept: Arc<Mutex<Vec<_>>> = Arc::new(Mutex::new(kept.collect()));
        let asked = Arc::new(Mutex::new(Vec::new()));
        let log = Arc::clone(&asked);
        let service = tower::service_fn(move |request: http::Request<Body>| {
            let (kept, log) = (Arc::clone(&kept), Arc::clone(&log));
            async move {
                let (parts, body) = request.into_parts();
                let sent = body.collect_bytes().await.unwrap_or_default();
                let sent: Value = serde_json::from_slice(&sent).unwrap_or_default();
                let last = parts.uri.path().rsplit('/').next().unwrap_or_default();
                let named = sent["metadata"]["name"].as_str();
                let what = format!("{} {}", parts.method, named.unwrap_or(last));
                let (code, answer) = match what.as_str() {
                    "GET secrets" => {
                        let items = kept.lock().unwrap().clone();
                        (200, json!({"metadata": {}, "items": items}))
                    }
                    "GET team" => (200, json!({"metadata": {"name": "team"}})),
                    "POST bad" => (
                        403,
                        json!({"kind": "Status", "status": "Failure", "code": 403,
                            "message": "exceeded quota", "reason": "Forbidden"}),
                    ),
                    _ if parts.method == "DELETE" => {
                        let others = |secret: &k8s_openapi::api::core::v1::Secret| {
                            secret.metadata.name.as_deref() != Some(last)
                        };
                        kept.lock().unwrap().retain(others);
                        (200, json!({"kind": "Status", "status": "Success"}))
                    }
                    _ => (201, sent),
                };
                if !what.starts_with("GET") {
                    log.lock().unwrap().push(what);
                }
                let mut response = http::Response::new(Body::from(answer.to_string().into_bytes()));
                *response.status_mut() = http::StatusCode::from_u16(code).unwrap();
                Ok::<_, Infallible>(response)
            }
        });
        (Client::new(service, "default"), asked)
    }

    fn created(asked: &Mutex<Vec<String>>, name: &str) -> usize {
        let asked = asked.lock().unwrap();
        let wanted = format!("POST {name}");
        asked.iter().filter(|what| **what == wanted).count()
    }

    /// Runs one round of a process with this state.
    async fn round(client: &Client, may: bool, before: Known) -> Known {
        let events = EventRecorder::queue(8).0;
        let records = backup::records(client).await.unwrap();
        put_back_due(client, &events, || may, records, before).await
    }

    #[tokio::test]
    async fn refused_tenant_keeps_no_other_away() {
        let (client, asked) = server(&["bad", "good"]);
        let waiting = round(&client, true, Known::new()).await;
        let left: Vec<_> = waiting.keys().map(ToString::to_string).collect();
        assert_eq!(left, ["team/bad"]);
        let bad = waiting.values().next().unwrap();
        assert!(bad.problem.contains("exceeded quota"), "{}", bad.problem);
        assert_eq!((created(&asked, "good"), bad.failures), (1, 1));
        // The failed Tenant backs off.
        let waiting = round(&client, true, waiting).await;
        assert_eq!((created(&asked, "bad"), waiting.len()), (1, 1));
    }

    #[tokio::test]
    async fn restored_tenant_is_not_created_again_after_restart() {
        let (client, asked) = server(&["bad", "good"]);
        round(&client, true, Known::new()).await;
        // A new process has no state and reads the records.
        let waiting = round(&client, true, Known::new()).await;
        assert_eq!((created(&asked, "good"), created(&asked, "bad")), (1, 2));
        assert_eq!(waiting.len(), 1);
    }

    #[tokio::test]
    async fn without_the_lease_no_tenant_is_restored() {
        let (client, asked) = server(&["good"]);
        let waiting = round(&client, false, Known::new()).await;
        assert_eq!((created(&asked, "good"), waiting.len()), (0, 1));
    }
}
