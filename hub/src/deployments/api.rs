//! Writes KryptonDeployments on home. Each request has a deadline. Each write requires the
//! version that the decision was based on.

use std::sync::Arc;

use krypton_crds::krypton_deployment::{KryptonDeployment, KryptonDeploymentStatus};
use krypton_runtime::clock::BootTime;
use krypton_runtime::events::ObjectEvent;
use krypton_types::deployment::DeploymentKey;
use krypton_types::error_chain::chain;
use kube::Client;
use kube::api::{Api, Patch, PatchParams};
use serde_json::json;

use crate::leader::Leader;
use crate::leader::home_writer::{self, WriteOutcome};

/// The fields of an object to write.
#[derive(Debug)]
pub(super) enum DeploymentWrite {
    Finalizers(Vec<String>),
    Status(Box<KryptonDeploymentStatus>),
}

/// A completed write.
#[derive(Default)]
pub(super) struct DeploymentWriteResult {
    /// The version before the write.
    pub(super) previous_version: Option<String>,
    /// `None` if nothing was written.
    pub(super) object: Option<KryptonDeployment>,
    /// Whether the hub wrote nothing because home's CRD drops `status.placements`.
    pub(super) is_crd_outdated: bool,
    /// Events to record now.
    pub(super) events: Vec<ObjectEvent>,
    /// `None` if no write was necessary after all, or the hub may not write anymore.
    pub(super) outcome: Option<WriteOutcome>,
}

/// The result of a write.
enum WriteResponse {
    Written(KryptonDeployment),
    /// Nothing was written: the object differs from the one that the decision was based on.
    Changed(KryptonDeployment),
    CrdOutdated,
    /// Nothing was written: the hub may not write anymore.
    NotLeading,
}

pub(super) async fn write(
    client: Client,
    leader: Leader,
    key: DeploymentKey,
    object: Arc<KryptonDeployment>,
    write: DeploymentWrite,
    events: Vec<ObjectEvent>,
) -> DeploymentWriteResult {
    let previous_version = object.metadata.resource_version.clone();
    let request = send_write(&client, &leader, &key, &object, &write);
    let (response, outcome) =
        home_writer::write(format!("writing KryptonDeployment {key}"), request).await;
    let mut result = DeploymentWriteResult {
        previous_version,
        ..DeploymentWriteResult::default()
    };
    match response {
        Some(WriteResponse::Written(object)) => {
            (result.object, result.events) = (Some(object), events);
            result.outcome = Some(outcome);
        }
        Some(WriteResponse::Changed(object)) => result.object = Some(object),
        Some(WriteResponse::CrdOutdated) => {
            result.is_crd_outdated = true;
            // Since the hub's start, another client has replaced the CRD.
            let crd = KryptonDeployment::crd();
            if let Err(error) = krypton_runtime::crd::upgrade_existing(&client, crd).await {
                tracing::warn!(error = %chain(&error), "failed to update the CRD of KryptonDeployments");
            }
        }
        Some(WriteResponse::NotLeading) => {}
        None => result.outcome = Some(outcome),
    }
    if let Some(outcome) = result.outcome {
        tracing::Span::current().record("outcome", outcome.name());
    }
    result
}

/// Prevents the loss of recorded placements. Under a CRD that lacks the field, every write of an object drops
/// its stored placements. A dry run detects this before the write. Before the first record, the object is
/// reread: under such a CRD it is read without placements even if some are stored. The Lease may expire before
/// they respond.
async fn send_write(
    client: &Client,
    leader: &Leader,
    key: &DeploymentKey,
    object: &KryptonDeployment,
    write: &DeploymentWrite,
) -> kube::Result<WriteResponse> {
    let api: Api<KryptonDeployment> = Api::namespaced(client.clone(), &key.namespace);
    let placements = |object: &KryptonDeployment| object.status.as_ref()?.placements.clone();
    let has_placements = match write {
        DeploymentWrite::Finalizers(_) => placements(object).is_some(),
        DeploymentWrite::Status(status) => status.placements.is_some(),
    };
    if has_placements && placements(object).is_none() {
        let current = api.get(&key.name).await?;
        if placements(&current).is_some() {
            return Ok(WriteResponse::Changed(current));
        }
    }
    let version = &object.metadata.resource_version;
    let patch = Patch::Merge(match write {
        DeploymentWrite::Finalizers(finalizers) => json!({ "metadata": {
            "resourceVersion": version,
            "finalizers": finalizers,
        }}),
        DeploymentWrite::Status(status) => json!({
            "metadata": { "resourceVersion": version },
            "status": status,
        }),
    });
    let send = async |params: &PatchParams| match write {
        DeploymentWrite::Finalizers(_) => api.patch(&key.name, params, &patch).await,
        DeploymentWrite::Status(_) => api.patch_status(&key.name, params, &patch).await,
    };
    if has_placements {
        let dry_run = PatchParams {
            dry_run: true,
            ..PatchParams::default()
        };
        if placements(&send(&dry_run).await?).is_none() {
            return Ok(WriteResponse::CrdOutdated);
        }
    }
    if !leader.may_write(BootTime::now()) {
        return Ok(WriteResponse::NotLeading);
    }
    let written = send(&PatchParams::default()).await?;
    Ok(WriteResponse::Written(written))
}

#[cfg(test)]
mod tests {
    use axum::Router;
    use axum::body::Bytes;
    use axum::http::{Method, StatusCode, Uri};
    use kube::Config;
    use parking_lot::Mutex;
    use serde_json::Value;

    use super::*;
    use crate::leader::LeaderState;

    type RequestLog = Arc<Mutex<Vec<&'static str>>>;

    /// The clusters of the recorded placements.
    type Clusters = Option<&'static [&'static str]>;

    const PARIS: Clusters = Some(&["paris"]);
    const ROME: Clusters = Some(&["rome"]);
    const NOWHERE: Clusters = Some(&[]);

    fn object(placements: Clusters) -> KryptonDeployment {
        let spec = json!({"account": {"name": "a"}, "region": {"name": "paris"}});
        let mut object = KryptonDeployment::new("acme", serde_json::from_value(spec).unwrap());
        object.metadata.namespace = Some("accounts".to_owned());
        object.metadata.resource_version = Some("7".to_owned());
        object.status = Some(status(placements));
        object
    }

    fn status(placements: Clusters) -> KryptonDeploymentStatus {
        let placement = |cluster: &&str| json!({"cluster": cluster, "clusterUid": "u"});
        let placements =
            placements.map(|placements| placements.iter().map(placement).collect::<Vec<_>>());
        serde_json::from_value(json!({"placements": placements})).unwrap()
    }

    /// A home cluster with this object, and the log of its requests. It keeps the sent placements or drops
    /// them.
    async fn home(stored: KryptonDeployment, keeps_placements: bool) -> (Client, RequestLog) {
        let requests = RequestLog::default();
        let log = Arc::clone(&requests);
        let router = Router::new().fallback(move |method: Method, uri: Uri, body: Bytes| {
            let is_dry_run = uri.query().unwrap_or_default().contains("dryRun");
            let request = match (&method, is_dry_run) {
                (&Method::GET, _) => "read",
                (_, true) => "try",
                (_, false) => "write",
            };
            // The CRD is not available.
            let is_crd = uri.path().contains("customresourcedefinitions");
            log.lock().push(if is_crd { "crd" } else { request });
            let mut response = serde_json::to_value(&stored).unwrap();
            let sent: Value = serde_json::from_slice(&body).unwrap_or_default();
            if sent["status"].is_object() {
                response["status"] = sent["status"].clone();
            }
            if !keeps_placements && method != Method::GET {
                response["status"] = json!({});
            }
            let not_found = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure",
                "code": 404, "reason": "NotFound", "message": "gone"});
            let (code, response) = if is_crd {
                (StatusCode::NOT_FOUND, not_found)
            } else {
                (StatusCode::OK, response)
            };
            async move { (code, response.to_string()) }
        });
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        tokio::spawn(axum::serve(listener, router).into_future());
        let config = Config::new(url.parse().unwrap());
        (Client::try_from(config).unwrap(), requests)
    }

    #[tokio::test]
    async fn write_is_withheld_when_places_would_be_lost() {
        let finalizers = || DeploymentWrite::Finalizers(Vec::new());
        let record = |placements: Clusters| DeploymentWrite::Status(Box::new(status(placements)));
        let (written, outdated) = ("try write", "try crd");
        let (refused, recorded) = ("read try crd", "read try write");
        for ((read, stored, keeps_placements), request, requests, expected) in [
            // Read object, stored object, whether the CRD keeps placements, the write; then the requests and
            // the known placements.
            ((None, None, true), record(PARIS), recorded, PARIS),
            ((None, ROME, true), record(PARIS), "read", ROME),
            ((None, None, false), record(PARIS), refused, None),
            ((ROME, ROME, true), record(NOWHERE), written, NOWHERE),
            ((ROME, ROME, false), record(NOWHERE), outdated, None),
            ((ROME, ROME, true), finalizers(), written, ROME),
            ((ROME, ROME, false), finalizers(), outdated, None),
            ((None, None, false), finalizers(), "write", None),
        ] {
            let case = format!("{read:?} {stored:?} {keeps_placements} {request:?}");
            let key = DeploymentKey::new("accounts", "acme");
            let (client, log) = home(object(stored), keeps_placements).await;
            let (leader, read) = (Leader::always_leading(), Arc::new(object(read)));
            let result = write(client, leader, key, read, request, Vec::new()).await;
            assert_eq!(log.lock().join(" "), requests, "{case}");
            assert_eq!(result.is_crd_outdated, requests.contains("crd"), "{case}");
            let placements = result.object.and_then(|it| it.status?.placements);
            assert_eq!(placements, status(expected).placements, "{case}");
        }
    }

    #[tokio::test]
    async fn write_waits_if_lease_expires_during_dry_run() {
        let (_state, leader) = Leader::with_state(LeaderState::Standby { leader: None });
        let (client, log) = home(object(ROME), true).await;
        let key = DeploymentKey::new("accounts", "acme");
        let request = DeploymentWrite::Status(Box::new(status(PARIS)));
        let read = Arc::new(object(ROME));
        let result = write(client, leader, key, read, request, Vec::new()).await;
        assert_eq!(log.lock().join(" "), "try");
        assert!(result.object.is_none());
        assert_eq!(result.outcome, None);
    }
}
