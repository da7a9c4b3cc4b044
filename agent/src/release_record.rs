//! The record of what Krypton deployed: a Secret per release in `krypton-system`, where the users of a workspace
//! cannot write. A release Secret that does not match its record is not trusted.

use std::collections::BTreeMap;
use std::time::Duration;

use futures::{StreamExt as _, TryStreamExt as _, stream};
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use krypton_common::error_chain::chain;
use krypton_common::fingerprint::sha256_hex;
use kube::api::{Api, DeleteParams, ListParams, PostParams, Preconditions};
use kube::{Client, ResourceExt};
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::bound::{Beyond, Pages};
use crate::effect;
use crate::fence::SYSTEM_NAMESPACE;
use crate::index::Revision;
use crate::ledger::LEDGER_NAME;
use crate::release::labels::{RUN_LABEL, ReleaseKey};
use crate::release::{self, Status};

pub(crate) const KEY: &str = "record.json";
/// Label of all records.
pub const RECORD_LABEL: (&str, &str) = ("mesh.openkcm.io/release-record", "true");

/// The Secret that shows that the releases of this cluster were recorded once.
const MARKER: &str = "krypton-release-records";
const DEADLINE: Duration = Duration::from_secs(10);
/// Releases per page, and releases that are recorded at the same time.
const PAGE: u32 = 500;
const AT_ONCE: usize = 8;

/// Why the existing releases could not be recorded.
#[derive(Debug, Error)]
pub enum RecordError {
    #[error("failed to record the existing releases in namespace {SYSTEM_NAMESPACE}")]
    Call(#[source] kube::Error),
    #[error("failed to record the existing releases: no response within {} s", DEADLINE.as_secs())]
    Deadline,
    #[error("failed to record the existing releases: the list of their Secrets does not end")]
    Endless(#[source] Beyond),
}

/// The digests of one release's revisions.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ReleaseRecord {
    /// By revision, as [`crate::release::digest`] returns them.
    pub digests: BTreeMap<u32, String>,
    /// The Secret that it was read from; `None` for a new record.
    secret: Option<Secret>,
}

#[derive(Deserialize, Serialize)]
struct Stored {
    namespace: String,
    name: String,
    digests: BTreeMap<u32, String>,
}

/// Whether a stored revision is what Krypton deployed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    Recorded,
    /// Krypton has no digest of this revision: another program wrote it, or Krypton stopped before it could record it.
    Unrecorded,
    /// The revision has changed since Krypton deployed it.
    Tampered,
}

impl ReleaseRecord {
    /// Compares a revision's digest with the record.
    pub fn verdict(&self, revision: u32, digest: &str) -> Verdict {
        match self.digests.get(&revision) {
            Some(recorded) if recorded == digest => Verdict::Recorded,
            Some(_) => Verdict::Tampered,
            None => Verdict::Unrecorded,
        }
    }

    /// Reads the record of a release; an empty one if there is none.
    ///
    /// # Errors
    /// If the API server does not return it. A record that cannot be decoded counts as empty: it vouches for nothing.
    pub async fn read(client: &Client, release: &ReleaseKey) -> kube::Result<Self> {
        let secret = api(client).get_opt(&name(release)).await?;
        let digests = secret.as_ref().and_then(|secret| stored(secret, release));
        Ok(Self {
            digests: digests.unwrap_or_default(),
            secret,
        })
    }

    pub(crate) fn content(&self, release: &ReleaseKey) -> serde_json::Result<Vec<u8>> {
        serde_json::to_vec(&Stored {
            namespace: release.namespace.clone(),
            name: release.name.clone(),
            digests: self.digests.clone(),
        })
    }

    /// Writes the record over the version that it was read from.
    ///
    /// # Errors
    /// 409 if it has changed since, or if a new record exists already.
    pub async fn write(&self, client: &Client, release: &ReleaseKey) -> kube::Result<()> {
        let content = self.content(release).map_err(kube::Error::SerdeError)?;
        let (label, value) = RECORD_LABEL;
        let mut secret = self.secret.clone().unwrap_or_else(|| Secret {
            metadata: ObjectMeta {
                name: Some(name(release)),
                labels: Some([(label.to_owned(), value.to_owned())].into()),
                ..ObjectMeta::default()
            },
            ..Secret::default()
        });
        secret.data = Some([(KEY.to_owned(), ByteString(content))].into());
        let (api, params) = (api(client), PostParams::default());
        let name = secret.name_any();
        match self.secret.is_some() {
            true => {
                effect!(
                    "release-record.replace",
                    api.replace(&name, &params, &secret)
                )
                .await?
            }
            false => effect!("release-record.create", api.create(&params, &secret)).await?,
        };
        Ok(())
    }

    /// Deletes the record, if it is still the one that was read.
    ///
    /// # Errors
    /// 404 and 409 if it has gone or changed since.
    pub async fn delete(&self, client: &Client) -> kube::Result<()> {
        let Some(secret) = &self.secret else {
            return Ok(());
        };
        let params = DeleteParams {
            preconditions: Some(Preconditions {
                uid: secret.uid(),
                resource_version: secret.resource_version(),
            }),
            ..DeleteParams::default()
        };
        let (api, name) = (api(client), secret.name_any());
        effect!("release-record.delete", api.delete(&name, &params)).await?;
        Ok(())
    }
}

/// Records the revisions that a version of Krypton without records has deployed. This happens once per cluster: later,
/// a revision without a record is not trusted.
///
/// Call it before the desired state is recorded. A cluster without a recorded desired state has never been managed, so
/// a release with Krypton's labels is forged there.
///
/// # Errors
/// If the API server does not return them all. The next call starts again and repeats nothing that is done.
pub async fn record_existing(client: &Client) -> Result<(), RecordError> {
    let secrets = api(client);
    let marker = in_time(secrets.get_metadata_opt(MARKER)).await?;
    if marker.is_some() {
        return Ok(());
    }
    let managed = in_time(secrets.get_metadata_opt(LEDGER_NAME)).await?;
    if managed.is_some() {
        record_all(client).await?;
    }
    let marker = Secret {
        metadata: ObjectMeta {
            name: Some(MARKER.to_owned()),
            ..ObjectMeta::default()
        },
        ..Secret::default()
    };
    let params = PostParams::default();
    let marking = secrets.create(&params, &marker);
    in_time(effect!("release-record.mark", marking)).await?;
    Ok(())
}

async fn record_all(client: &Client) -> Result<(), RecordError> {
    let all: Api<Secret> = Api::all(client.clone());
    let mut params = ListParams::default()
        .labels(&format!("owner=helm,{RUN_LABEL}"))
        .limit(PAGE);
    let mut releases: BTreeMap<ReleaseKey, Vec<u32>> = BTreeMap::new();
    let mut pages = Pages::default();
    loop {
        let page = in_time(all.list_metadata(&params)).await?;
        for (key, revision) in page
            .items
            .iter()
            .filter_map(|it| Revision::of(&it.metadata))
        {
            if matches!(revision.status, Status::Deployed | Status::Superseded) {
                releases.entry(key).or_default().push(revision.revision);
            }
        }
        let more = pages.follow(&mut params, page.metadata, page.items.len());
        if !more.map_err(RecordError::Endless)? {
            break;
        }
    }
    let recording = releases
        .into_iter()
        .map(|(release, revisions)| record_release(client.clone(), release, revisions));
    let recording = stream::iter(recording).buffer_unordered(AT_ONCE);
    recording.try_collect::<()>().await
}

async fn record_release(
    client: Client,
    release: ReleaseKey,
    revisions: Vec<u32>,
) -> Result<(), RecordError> {
    let mut record = in_time(ReleaseRecord::read(&client, &release)).await?;
    if record.secret.is_some() {
        return Ok(());
    }
    let api: Api<Secret> = Api::namespaced(client.clone(), &release.namespace);
    for revision in revisions {
        let name = release::secret_name(&release.name, revision);
        let Some(secret) = in_time(api.get_opt(&name)).await? else {
            continue;
        };
        match release::digest(&secret) {
            Ok(digest) => {
                record.digests.insert(revision, digest);
            }
            Err(error) => tracing::warn!(error = %chain(&error), "release not recorded"),
        }
    }
    in_time(record.write(&client, &release)).await
}

async fn in_time<T>(call: impl Future<Output = kube::Result<T>>) -> Result<T, RecordError> {
    tokio::time::timeout(DEADLINE, Box::pin(call))
        .await
        .map_err(|_| RecordError::Deadline)?
        .map_err(RecordError::Call)
}

/// The name of the record's Secret. A release's namespace and name together can exceed the limit of a name.
pub fn name(release: &ReleaseKey) -> String {
    let of = format!("{}/{}", release.namespace, release.name);
    let digest = sha256_hex(of.as_bytes());
    format!("krypton-release-{}", digest.get(..40).unwrap_or(&digest))
}

fn api(client: &Client) -> Api<Secret> {
    Api::namespaced(client.clone(), SYSTEM_NAMESPACE)
}

pub(crate) fn stored(secret: &Secret, release: &ReleaseKey) -> Option<BTreeMap<u32, String>> {
    let content = secret.data.as_ref()?.get(KEY)?;
    let stored: Stored = serde_json::from_slice(&content.0).ok()?;
    let same = stored.namespace == release.namespace && stored.name == release.name;
    same.then_some(stored.digests)
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::{Arc, Mutex};

    use kube::client::Body;
    use serde_json::{Value, json};

    use super::*;

    fn release(name: &str) -> ReleaseKey {
        ReleaseKey {
            namespace: "acme".to_owned(),
            name: name.to_owned(),
        }
    }

    #[test]
    fn revision_is_trusted_only_with_its_own_digest() {
        let record = ReleaseRecord {
            digests: [(2, "a".to_owned()), (3, "b".to_owned())].into(),
            secret: None,
        };
        assert_eq!(record.verdict(3, "b"), Verdict::Recorded);
        assert_eq!(record.verdict(3, "a"), Verdict::Tampered);
        assert_eq!(record.verdict(4, "b"), Verdict::Unrecorded);
        assert_eq!(
            ReleaseRecord::default().verdict(1, "a"),
            Verdict::Unrecorded
        );
    }

    #[test]
    fn record_of_another_release_vouches_for_nothing() {
        let content = serde_json::json!({"namespace": "acme", "name": "a", "digests": {"1": "x"}});
        let secret = Secret {
            data: Some([(KEY.to_owned(), ByteString(content.to_string().into_bytes()))].into()),
            ..Secret::default()
        };
        assert_eq!(
            stored(&secret, &release("a")),
            Some([(1, "x".to_owned())].into())
        );
        assert_eq!(stored(&secret, &release("b")), None);
        assert_eq!(stored(&Secret::default(), &release("a")), None);
        assert_ne!(name(&release("a")), name(&release("b")));
    }

    /// A cluster with one stored release, and the names of the Secrets that are written to it.
    fn cluster(managed: bool, pages: usize) -> (Client, Arc<Mutex<Vec<String>>>) {
        let written = Arc::new(Mutex::new(Vec::new()));
        let (log, asked) = (Arc::clone(&written), Arc::new(AtomicUsize::new(0)));
        let service = tower::service_fn(move |request: http::Request<Body>| {
            let (log, asked) = (Arc::clone(&log), Arc::clone(&asked));
            async move {
                let (parts, body) = request.into_parts();
                let body = body.collect_bytes().await.unwrap_or_default();
                let sent: Value = serde_json::from_slice(&body).unwrap_or_default();
                let path = parts.uri.path();
                let (code, answer) = match parts.method.as_str() {
                    "POST" => {
                        let name = sent["metadata"]["name"].as_str().unwrap_or_default();
                        log.lock().unwrap().push(name.to_owned());
                        (201, sent)
                    }
                    _ if path == "/api/v1/secrets" => {
                        let more = asked.fetch_add(1, Ordering::Relaxed) + 1 < pages;
                        let next = if more { "more" } else { "" };
                        let items = if more {
                            json!([])
                        } else {
                            json!([stored_release()])
                        };
                        (200, json!({"metadata": {"continue": next}, "items": items}))
                    }
                    _ if path.ends_with("/sh.helm.release.v1.a.v1") => (200, stored_release()),
                    _ if managed && path.ends_with("/krypton-desired-state") => {
                        let name = json!({"name": "krypton-desired-state"});
                        (200, json!({"metadata": name}))
                    }
                    _ => (
                        404,
                        json!({"kind": "Status", "code": 404, "reason": "NotFound"}),
                    ),
                };
                let mut response = http::Response::new(Body::from(answer.to_string().into_bytes()));
                *response.status_mut() = http::StatusCode::from_u16(code).unwrap();
                Ok::<_, Infallible>(response)
            }
        });
        (Client::new(service, "default"), written)
    }

    fn stored_release() -> Value {
        json!({"metadata": {"name": "sh.helm.release.v1.a.v1", "namespace": "acme",
            "labels": {"owner": "helm", "name": "a", "version": "1", "status": "deployed",
                "mesh.openkcm.io/run": "install-1"}}})
    }

    #[tokio::test]
    async fn only_a_managed_cluster_has_releases_to_record() {
        for (managed, expected) in [
            (true, vec![name(&release("a")), MARKER.to_owned()]),
            (false, vec![MARKER.to_owned()]),
        ] {
            let (client, written) = cluster(managed, 2);
            record_existing(&client).await.unwrap();
            assert_eq!(*written.lock().unwrap(), expected, "managed: {managed}");
        }
    }

    #[tokio::test]
    async fn endless_pages_of_releases_are_an_error() {
        let (client, written) = cluster(true, 20_000);
        let error = record_existing(&client).await.unwrap_err();
        assert!(chain(&error).contains("more than 4000 pages"), "{error:?}");
        assert!(written.lock().unwrap().is_empty());
    }
}
