//! Reads and writes KryptonDeployments on home. Each request has a deadline. Each write requires the
//! version that the decision was based on.

use std::sync::Arc;

use krypton_crds::krypton_deployment::{KryptonDeployment, KryptonDeploymentStatus};
use krypton_runtime::events::ObjectEvent;
use krypton_types::deployment::DeploymentKey;
use krypton_types::error_chain::chain;
use kube::Client;
use kube::api::{Api, Patch, PatchParams};
use serde_json::json;

use crate::leader::home_writer::{self, Deletion, Wrote, read_deletion};

/// The fields of an object to write.
#[derive(Debug)]
pub(super) enum Write {
    Finalizers(Vec<String>),
    Status(KryptonDeploymentStatus),
}

/// A completed write.
pub(super) struct Written {
    /// The version before the write.
    pub(super) before: Option<String>,
    /// `None` if nothing was written.
    pub(super) object: Option<KryptonDeployment>,
    /// Whether the hub wrote nothing because home's CRD drops `status.placements`.
    pub(super) forgets: bool,
    /// Events to record now.
    pub(super) news: Vec<ObjectEvent>,
    /// `None` if no write was necessary after all.
    pub(super) came: Option<Wrote>,
}

/// The result of a write.
enum Outcome {
    Written(KryptonDeployment),
    /// Nothing was written: the object differs from the one that the decision was based on.
    Read(KryptonDeployment),
    Forgets,
}

pub(super) async fn write(
    client: Client,
    key: DeploymentKey,
    object: Arc<KryptonDeployment>,
    write: Write,
    news: Vec<ObjectEvent>,
) -> Written {
    let before = object.metadata.resource_version.clone();
    let call = write_now(&client, &key, &object, &write);
    let (outcome, came) =
        home_writer::write(format!("writing KryptonDeployment {key}"), call).await;
    let wrote_nothing = matches!(outcome, Some(Outcome::Read(_) | Outcome::Forgets));
    let came = (!wrote_nothing).then_some(came);
    if let Some(came) = came {
        tracing::Span::current().record("outcome", came.name());
    }
    let forgets = matches!(outcome, Some(Outcome::Forgets));
    // Since the hub's start, another client has replaced the CRD.
    if forgets
        && let Err(error) = krypton_runtime::crd::follow(&client, &KryptonDeployment::crd()).await
    {
        tracing::warn!(error = %chain(&error), "the CRD of KryptonDeployments is not brought up to date");
    }
    let (object, news) = match outcome {
        Some(Outcome::Written(object)) => (Some(object), news),
        Some(Outcome::Read(object)) => (Some(object), Vec::new()),
        Some(Outcome::Forgets) | None => (None, Vec::new()),
    };
    Written {
        before,
        object,
        forgets,
        news,
        came,
    }
}

/// Prevents the loss of recorded placements. Under a CRD that lacks the field, every write of an object drops
/// its stored placements. A dry run detects this before the write. Before the first record, the object is
/// reread: under such a CRD it is read without placements even if some are stored.
async fn write_now(
    client: &Client,
    key: &DeploymentKey,
    object: &KryptonDeployment,
    write: &Write,
) -> kube::Result<Outcome> {
    let api: Api<KryptonDeployment> = Api::namespaced(client.clone(), &key.namespace);
    let placements = |object: &KryptonDeployment| object.status.as_ref()?.placements.clone();
    let records = match write {
        Write::Finalizers(_) => placements(object).is_some(),
        Write::Status(status) => status.placements.is_some(),
    };
    if records && placements(object).is_none() {
        let fresh = api.get(&key.name).await?;
        if placements(&fresh).is_some() {
            return Ok(Outcome::Read(fresh));
        }
    }
    let version = &object.metadata.resource_version;
    let patch = Patch::Merge(match write {
        Write::Finalizers(finalizers) => json!({ "metadata": {
            "resourceVersion": version,
            "finalizers": finalizers,
        }}),
        Write::Status(status) => json!({
            "metadata": { "resourceVersion": version },
            "status": status,
        }),
    });
    let send = async |params: &PatchParams| match write {
        Write::Finalizers(_) => api.patch(&key.name, params, &patch).await,
        Write::Status(_) => api.patch_status(&key.name, params, &patch).await,
    };
    if records {
        let trial = PatchParams {
            dry_run: true,
            ..PatchParams::default()
        };
        if placements(&send(&trial).await?).is_none() {
            return Ok(Outcome::Forgets);
        }
    }
    let params = PatchParams::default();
    let call = send(&params);
    let written = match write {
        Write::Finalizers(_) => call.await,
        Write::Status(_) => call.await,
    };
    written.map(Outcome::Written)
}

/// A reread deletion. `found` is `None` if the read failed or the object is not deleted.
pub(super) struct Reading {
    pub(super) uid: String,
    pub(super) found: Option<Deletion>,
}

pub(super) async fn read(client: Client, key: DeploymentKey, uid: String) -> Reading {
    let objects: Api<KryptonDeployment> = Api::namespaced(client.clone(), &key.namespace);
    let found = read_deletion(client, &objects, &key.name, &uid).await;
    Reading { uid, found }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use axum::Router;
    use axum::body::Bytes;
    use axum::http::{Method, Uri};
    use kube::Config;
    use serde_json::Value;

    use super::*;

    type Asked = Arc<Mutex<Vec<&'static str>>>;

    fn object(placements: Option<&[&str]>) -> KryptonDeployment {
        let spec = json!({"account": {"name": "a"}, "region": {"name": "paris"}});
        let mut object = KryptonDeployment::new("acme", serde_json::from_value(spec).unwrap());
        object.metadata.namespace = Some("accounts".to_owned());
        object.metadata.resource_version = Some("7".to_owned());
        object.status = Some(status(placements));
        object
    }

    fn status(placements: Option<&[&str]>) -> KryptonDeploymentStatus {
        let placement = |cluster: &&str| json!({"cluster": cluster, "clusterUid": "u"});
        let placements =
            placements.map(|placements| placements.iter().map(placement).collect::<Vec<_>>());
        serde_json::from_value(json!({"placements": placements})).unwrap()
    }

    /// A home cluster with this object, and the log of its requests. It keeps the sent placements or drops
    /// them.
    async fn home(stored: KryptonDeployment, keeps: bool) -> (Client, Asked) {
        let asked = Asked::default();
        let log = Arc::clone(&asked);
        let router = Router::new().fallback(move |method: Method, uri: Uri, body: Bytes| {
            let trial = uri.query().unwrap_or_default().contains("dryRun");
            let what = match (&method, trial) {
                (&Method::GET, _) => "read",
                (_, true) => "try",
                (_, false) => "write",
            };
            // The CRD is not available.
            let of_crd = uri.path().contains("customresourcedefinitions");
            log.lock().unwrap().push(if of_crd { "crd" } else { what });
            let mut answer = serde_json::to_value(&stored).unwrap();
            let sent: Value = serde_json::from_slice(&body).unwrap_or_default();
            if sent["status"].is_object() {
                answer["status"] = sent["status"].clone();
            }
            if !keeps && method != Method::GET {
                answer["status"] = json!({});
            }
            let gone = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure",
                "code": 404, "reason": "NotFound", "message": "gone"});
            let (code, answer) = if of_crd { (404, gone) } else { (200, answer) };
            let code = axum::http::StatusCode::from_u16(code).unwrap();
            async move { (code, answer.to_string()) }
        });
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        tokio::spawn(axum::serve(listener, router).into_future());
        let config = Config::new(url.parse().unwrap());
        (Client::try_from(config).unwrap(), asked)
    }

    #[tokio::test]
    async fn write_is_withheld_when_places_would_be_lost() {
        type Places<'a> = Option<&'a [&'a str]>;
        let finalizers = || Write::Finalizers(Vec::new());
        let record = |placements: &[&str]| Write::Status(status(Some(placements)));
        type Case<'a> = (
            Places<'a>,
            Places<'a>,
            bool,
            Write,
            &'a [&'a str],
            Places<'a>,
        );
        let table: Vec<Case<'_>> = vec![
            // Read object, stored object, whether the CRD keeps placements, the write; then the requests and
            // the known placements.
            (
                None,
                None,
                true,
                record(&["paris"]),
                &["read", "try", "write"],
                Some(&["paris"]),
            ),
            (
                None,
                Some(&["rome"]),
                true,
                record(&["paris"]),
                &["read"],
                Some(&["rome"]),
            ),
            (
                None,
                None,
                false,
                record(&["paris"]),
                &["read", "try", "crd"],
                None,
            ),
            (
                Some(&["rome"]),
                Some(&["rome"]),
                true,
                record(&[]),
                &["try", "write"],
                Some(&[]),
            ),
            (
                Some(&["rome"]),
                Some(&["rome"]),
                false,
                record(&[]),
                &["try", "crd"],
                None,
            ),
            (
                Some(&["rome"]),
                Some(&["rome"]),
                true,
                finalizers(),
                &["try", "write"],
                Some(&["rome"]),
            ),
            (
                Some(&["rome"]),
                Some(&["rome"]),
                false,
                finalizers(),
                &["try", "crd"],
                None,
            ),
            (None, None, false, finalizers(), &["write"], None),
        ];
        for (read, stored, keeps, what, asked, known) in table {
            let case = format!("{read:?} {stored:?} {keeps} {what:?}");
            let key = DeploymentKey {
                namespace: "accounts".to_owned(),
                name: "acme".to_owned(),
            };
            let (client, log) = home(object(stored), keeps).await;
            let written = write(client, key, Arc::new(object(read)), what, Vec::new()).await;
            assert_eq!(*log.lock().unwrap(), asked, "{case}");
            assert_eq!(written.forgets, asked.contains(&"crd"), "{case}");
            let placements = written.object.and_then(|it| it.status?.placements);
            let placements: Option<Vec<String>> =
                placements.map(|placements| placements.into_iter().map(|it| it.cluster).collect());
            let known = known.map(|known| known.iter().map(|it| (*it).to_owned()).collect());
            assert_eq!(placements, known, "{case}");
        }
    }
}
