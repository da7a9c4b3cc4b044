//! Posts CloudEvents to the receiver, each signed with HMAC-SHA256. Never follows a redirect.

use std::path::{Path, PathBuf};
use std::time::Duration;

use aws_lc_rs::hmac;
use krypton_runtime::newest::Newest as _;
use krypton_runtime::periodic::file::{FileError, POLL_INTERVAL, SettingsFile, follow_file};
use krypton_types::fingerprint::{hex, sha256_hex};
use krypton_types::loopback::is_loopback;
use reqwest::header::CONTENT_TYPE;
use reqwest::redirect::Policy;
use reqwest::{Client, Response, Url};
use serde::Serialize;
use tokio::sync::watch;
use zeroize::Zeroizing;

use super::changes::{Change, Kind};

/// Deadline of one post, with its response.
const DEADLINE: Duration = Duration::from_secs(10);
/// The hub reads this much of a response, only to use the connection again.
const RESPONSE_MAX: usize = 16 * 1024;
/// Shortest key, in bytes.
const KEY_MIN: usize = 16;
/// As in Flux's provider `generic-hmac`.
const SIGNATURE: &str = "X-Signature";

#[derive(Debug, thiserror::Error)]
pub(crate) enum WebhookError {
    #[error(transparent)]
    File(#[from] FileError),
    #[error("the notification key {} is shorter than {KEY_MIN} bytes; write a random key", .0.display())]
    ShortKey(PathBuf),
    #[error("failed to prepare the HTTP client for notifications")]
    Client(#[source] reqwest::Error),
    #[error("failed to encode a notification")]
    Encode(#[from] serde_json::Error),
    #[error("posting a notification to {url} failed; check that the receiver is reachable")]
    Unreachable {
        url: String,
        #[source]
        source: reqwest::Error,
    },
    #[error("{url} rejected a notification with status {status}; check the receiver's log")]
    Rejected { url: String, status: u16 },
}

impl WebhookError {
    /// Whether the receiver rejects this notification, and not each one.
    pub(super) fn is_permanent(&self) -> bool {
        matches!(
            self,
            Self::Encode(_)
                | Self::Rejected {
                    status: 400 | 413 | 422,
                    ..
                }
        )
    }
}

#[derive(Clone, PartialEq)]
struct Key(Zeroizing<Vec<u8>>);

/// The receiver of notifications.
pub(crate) struct Webhook {
    client: Client,
    url: Url,
    /// Follows the file with the key.
    key: watch::Receiver<Key>,
    /// The hub, as the source of its events.
    source: String,
}

impl Webhook {
    /// Reads the key, and follows its file.
    pub(crate) async fn open(
        url: Url,
        key_file: PathBuf,
        namespace: &str,
    ) -> Result<Self, WebhookError> {
        let file = SettingsFile {
            name: "notification key",
            flag: "--notify-key-file",
            path: key_file,
        };
        let key = parse_key(&file.path, &file.read_with_deadline().await?)?;
        let (key_tx, key) = watch::channel(key);
        tokio::spawn(follow_file(file, POLL_INTERVAL, key_tx, parse_key, |_| {}));
        let mut client = Client::builder()
            .user_agent(concat!("krypton/", env!("CARGO_PKG_VERSION")))
            .timeout(DEADLINE)
            .redirect(Policy::none())
            .referer(false);
        if url.host_str().is_some_and(is_loopback) {
            // A proxy could read plain HTTP.
            client = client.no_proxy();
        }
        Ok(Self {
            client: client.build().map_err(WebhookError::Client)?,
            url,
            key,
            source: format!("/krypton-hub/{namespace}"),
        })
    }

    pub(super) async fn post(&self, change: &Change) -> Result<(), WebhookError> {
        let body = serde_json::to_vec(&CloudEvent::new(&self.source, change))?;
        let request = self
            .client
            .post(self.url.clone())
            .header(CONTENT_TYPE, "application/cloudevents+json")
            .header(SIGNATURE, signature(&self.key.get(), &body))
            .body(body);
        // Path and query may contain a token.
        let url = || self.url.origin().ascii_serialization();
        let response = request
            .send()
            .await
            .map_err(|source| WebhookError::Unreachable {
                url: url(),
                source: source.without_url(),
            })?;
        let status = response.status();
        discard(response).await;
        match status.is_success() {
            true => Ok(()),
            false => Err(WebhookError::Rejected {
                url: url(),
                status: status.as_u16(),
            }),
        }
    }
}

fn parse_key(path: &Path, bytes: &[u8]) -> Result<Key, WebhookError> {
    let key = bytes.trim_ascii_end();
    match key.len() < KEY_MIN {
        true => Err(WebhookError::ShortKey(path.to_owned())),
        false => Ok(Key(Zeroizing::new(key.to_vec()))),
    }
}

fn signature(key: &Key, body: &[u8]) -> String {
    let tag = hmac::sign(&hmac::Key::new(hmac::HMAC_SHA256, &key.0), body);
    format!("sha256={}", hex(tag.as_ref()))
}

/// Reads the rest of a response within the limit. Its content does not matter.
async fn discard(mut response: Response) {
    let mut size = 0;
    while size < RESPONSE_MAX
        && let Ok(Some(chunk)) = response.chunk().await
    {
        size += chunk.len();
    }
}

/// A CloudEvent 1.0 in structured mode.
#[derive(Serialize)]
struct CloudEvent<'a> {
    specversion: &'static str,
    id: String,
    source: &'a str,
    #[serde(rename = "type")]
    type_: &'static str,
    subject: String,
    time: String,
    datacontenttype: &'static str,
    data: EventData<'a>,
}

#[derive(Serialize)]
struct EventData<'a> {
    kind: &'static str,
    #[serde(skip_serializing_if = "str::is_empty")]
    namespace: &'a str,
    #[serde(skip_serializing_if = "str::is_empty")]
    name: &'a str,
    #[serde(skip_serializing_if = "str::is_empty")]
    member: &'a str,
    from: &'a str,
    to: &'a str,
    #[serde(skip_serializing_if = "str::is_empty")]
    reason: &'a str,
    #[serde(skip_serializing_if = "str::is_empty")]
    message: &'a str,
}

/// Returns the name of the kind, and the type of its events.
fn names(kind: Kind) -> (&'static str, &'static str) {
    match kind {
        Kind::EdgeCluster => ("EdgeCluster", "io.openkcm.mesh.edgecluster.state"),
        Kind::Tenant => ("Tenant", "io.openkcm.mesh.tenant.phase"),
        Kind::KryptonDeployment => (
            "KryptonDeployment",
            "io.openkcm.mesh.kryptondeployment.phase",
        ),
        Kind::Chart => ("Chart", "io.openkcm.mesh.chart.version"),
        Kind::CertificateAuthority => (
            "CertificateAuthority",
            "io.openkcm.mesh.certificateauthority.phase",
        ),
        Kind::Credential => ("Credential", "io.openkcm.mesh.credential.state"),
    }
}

impl<'a> CloudEvent<'a> {
    fn new(source: &'a str, change: &'a Change) -> Self {
        let (kind, type_) = names(change.kind);
        let mut subject = kind.to_owned();
        for part in [&change.member, &change.namespace, &change.name] {
            if !part.is_empty() {
                subject = format!("{subject}/{part}");
            }
        }
        let (from, to, time) = (&*change.from, &*change.to, change.at.to_string());
        Self {
            specversion: "1.0",
            // Equal for all attempts, so a receiver can drop duplicates.
            id: sha256_hex(format!("{source}\n{subject}\n{from}\n{to}\n{time}").as_bytes()),
            source,
            type_,
            subject,
            time,
            datacontenttype: "application/json",
            data: EventData {
                kind,
                namespace: &change.namespace,
                name: &change.name,
                member: &change.member,
                from,
                to,
                reason: &change.reason,
                message: &change.message,
            },
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use axum::Router;
    use axum::body::Bytes;
    use axum::http::header::LOCATION;
    use axum::http::{HeaderMap, StatusCode};
    use axum::routing::any;
    use serde_json::{Value, json};
    use tokio::net::TcpListener;
    use tokio::sync::mpsc;

    use super::super::changes::tests::change;
    use super::*;

    const KEY: &[u8] = b"0123456789abcdef0123456789abcdef";

    /// A receiver that answers each request with `status`, a redirect and a long body, and passes the request on.
    async fn receiver(status: StatusCode) -> (Url, mpsc::Receiver<(HeaderMap, Bytes)>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}/hook", listener.local_addr().unwrap());
        let (tx, rx) = mpsc::channel(8);
        let handler = move |headers: HeaderMap, body: Bytes| {
            let tx = tx.clone();
            async move {
                tx.send((headers, body)).await.unwrap();
                let long = vec![b'x'; 64 * RESPONSE_MAX];
                (status, [(LOCATION, "/other")], long)
            }
        };
        let router = Router::new().fallback(any(handler));
        tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });
        (url.parse().unwrap(), rx)
    }

    /// Returns the webhook of a receiver that answers with this status, and the requests.
    pub(in crate::notify) async fn answering(
        status: u16,
    ) -> (Webhook, mpsc::Receiver<(HeaderMap, Bytes)>) {
        let (url, requests) = receiver(StatusCode::from_u16(status).unwrap()).await;
        (webhook(url, KEY).await.unwrap(), requests)
    }

    async fn webhook(url: Url, key: &[u8]) -> Result<Webhook, WebhookError> {
        // Fails if another test has installed the provider.
        drop(rustls::crypto::aws_lc_rs::default_provider().install_default());
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), key).unwrap();
        Webhook::open(url, file.path().to_owned(), "krypton-system").await
    }

    #[tokio::test]
    async fn event_is_signed_and_redacted() {
        let (url, mut requests) = receiver(StatusCode::ACCEPTED).await;
        let key_file = [KEY, b"\n"].concat();
        let webhook = webhook(url, &key_file).await.unwrap();
        for _ in 0..2 {
            webhook.post(&change()).await.unwrap();
        }
        let (headers, body) = requests.recv().await.unwrap();
        assert_eq!(headers["content-type"], "application/cloudevents+json");
        let tag = hmac::sign(&hmac::Key::new(hmac::HMAC_SHA256, KEY), &body);
        let signature = format!("sha256={}", hex(tag.as_ref()));
        assert_eq!(headers["x-signature"], signature);
        let mut event: Value = serde_json::from_slice(&body).unwrap();
        let id = event["id"].take();
        assert_eq!(id.as_str().map(str::len), Some(64));
        let expected = json!({
            "specversion": "1.0",
            "id": null,
            "source": "/krypton-hub/krypton-system",
            "type": "io.openkcm.mesh.tenant.phase",
            "subject": "Tenant/edge-1/default/acme",
            "time": "1970-01-01T00:00:01Z",
            "datacontenttype": "application/json",
            "data": {
                "kind": "Tenant",
                "namespace": "default",
                "name": "acme",
                "member": "edge-1",
                "from": "Ready",
                "to": "Error",
                "reason": "HelmFailed",
                "message": "the upgrade failed; password: [redacted]",
            },
        });
        assert_eq!(event, expected);
        let (_, repeated) = requests.recv().await.unwrap();
        assert_eq!(body, repeated, "the id differs between attempts");
    }

    #[tokio::test]
    async fn redirects_and_errors_are_failures() {
        for status in [302, 307, 400, 500] {
            let (webhook, mut requests) = answering(status).await;
            let error = webhook.post(&change()).await.unwrap_err();
            assert!(error.to_string().contains(&status.to_string()), "{error}");
            assert!(requests.recv().await.is_some());
            assert!(requests.try_recv().is_err(), "{status} was followed");
        }
    }

    #[tokio::test]
    async fn failure_hides_secrets_of_the_url() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        drop(listener);
        let url = format!("http://{address}/hunter2?token=hunter2");
        let webhook = webhook(url.parse().unwrap(), KEY).await.unwrap();
        let error = webhook.post(&change()).await.unwrap_err();
        let text = krypton_types::error_chain::chain(&error);
        let shows_address = text.contains(&address.to_string());
        assert!(shows_address && !text.contains("hunter2"), "{text}");
    }

    #[tokio::test]
    async fn short_key_is_refused() {
        let url: Url = "https://receiver.example.org".parse().unwrap();
        let error = webhook(url, b"0123456789abcde\n").await.err().unwrap();
        assert!(error.to_string().contains("16 bytes"), "{error}");
    }
}
