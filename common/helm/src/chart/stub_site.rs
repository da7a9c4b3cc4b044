//! A chart repository on the loopback interface, and a hub that serves charts, for tests.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::atomic::{AtomicU64, Ordering};

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{Request, State};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use futures::stream;
use tempfile::TempDir;
use tokio::net::TcpListener;

use super::archive::tests::{chart_yaml, file, packed};
use super::*;

/// Response for one path.
#[derive(Clone)]
pub(super) enum StubResponse {
    Body(Bytes),
    Status(u16),
    Redirect(String),
    /// An infinite body without a `Content-Length`.
    Endless,
    /// Declares a length and sends no body.
    DeclaresLength(u64),
}

/// A server that returns 404 for unknown paths. Clones share its responses and counts.
#[derive(Clone, Default)]
pub(super) struct StubSite {
    pub(super) responses: Arc<Mutex<BTreeMap<String, StubResponse>>>,
    /// Path and `authorization` header of each request, or an empty text.
    pub(super) requests: Arc<Mutex<Vec<(String, String)>>>,
    /// Bytes of endless bodies.
    pub(super) sent: Arc<AtomicU64>,
    pub(super) requires_login: bool,
    pub(super) tag: Option<&'static str>,
    pub(super) compresses_index: bool,
}

async fn respond(State(site): State<StubSite>, request: Request) -> Response {
    let path = request.uri().path().to_owned();
    let header = |name: &str| {
        let value = request.headers().get(name);
        value.map_or("", |value| value.to_str().unwrap()).to_owned()
    };
    let authorization = header("authorization");
    let has_login = !authorization.is_empty();
    let mut requests = site.requests.lock();
    requests.push((path.clone(), authorization));
    drop(requests);
    if site.requires_login && !has_login {
        return StatusCode::UNAUTHORIZED.into_response();
    }
    let response = site.responses.lock().get(&path).cloned();
    let file = match response.unwrap_or(StubResponse::Status(404)) {
        StubResponse::Body(file) => file,
        StubResponse::Status(code) => return StatusCode::from_u16(code).unwrap().into_response(),
        StubResponse::Redirect(to) => {
            return (StatusCode::FOUND, [("location", to)]).into_response();
        }
        StubResponse::Endless => {
            let blocks = stream::repeat_with(move || {
                site.sent.fetch_add(1 << 20, Ordering::Relaxed);
                Ok::<_, Infallible>(vec![b'a'; 1 << 20])
            });
            return Body::from_stream(blocks).into_response();
        }
        StubResponse::DeclaresLength(length) => {
            let nothing = Body::from_stream(stream::pending::<Result<Bytes, Infallible>>());
            return ([("content-length", length.to_string())], nothing).into_response();
        }
    };
    let mut headers = HeaderMap::new();
    if let Some(tag) = site.tag.filter(|_| path == "/index.yaml") {
        headers.insert("etag", tag.parse().unwrap());
        if header("if-none-match") == tag {
            return (StatusCode::NOT_MODIFIED, headers).into_response();
        }
    }
    if site.compresses_index && path == "/index.yaml" {
        assert_eq!(header("accept-encoding"), "gzip");
        headers.insert("content-encoding", "gzip".parse().unwrap());
    }
    (headers, file).into_response()
}

impl StubSite {
    /// Returns the URL of the running server.
    pub(super) async fn start(self) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let app = Router::new().fallback(respond).with_state(self);
        tokio::spawn(async move { axum::serve(listener, app).await });
        url
    }

    pub(super) fn respond(&self, path: &str, response: StubResponse) {
        let mut responses = self.responses.lock();
        responses.insert(path.to_owned(), response);
    }

    pub(super) fn serve(&self, path: &str, content: impl Into<Bytes>) {
        self.respond(path, StubResponse::Body(content.into()));
    }

    pub(super) fn with(self, path: &str, content: impl Into<Bytes>) -> Self {
        self.serve(path, content);
        self
    }

    pub(super) fn response(&self, path: &str) -> StubResponse {
        self.responses.lock()[path].clone()
    }

    pub(super) fn hits(&self, path: &str) -> usize {
        let requests = self.requests.lock();
        requests.iter().filter(|(other, _)| other == path).count()
    }

    pub(super) fn all_hits(&self) -> usize {
        self.requests.lock().len()
    }

    pub(super) fn take_requests(&self) -> Vec<(String, String)> {
        std::mem::take(&mut *self.requests.lock())
    }
}

/// A fallback that counts its calls and returns a chart of that name and version, or an error.
#[derive(Default)]
pub(super) struct StubFallback {
    pub(super) chart: Option<(&'static str, &'static str)>,
    pub(super) calls: AtomicU64,
}

impl Fallback for StubFallback {
    fn fetch(&self, _: &ChartRef) -> BoxFuture<'_, Result<Vec<u8>, String>> {
        self.calls.fetch_add(1, Ordering::Relaxed);
        Box::pin(async {
            let (name, version) = self.chart.ok_or("it has none")?;
            Ok(packed(&[chart_yaml(name, version)]))
        })
    }
}

pub(super) fn small(version: &str) -> Vec<u8> {
    packed(&[
        chart_yaml("small", version),
        file("small/values.yaml", "a: 1\n"),
    ])
}

pub(super) fn chart(repo: &str, version: &str) -> ChartRef {
    ChartRef {
        repo: repo.to_owned(),
        name: "small".to_owned(),
        version: version.to_owned(),
    }
}

pub(super) fn cache() -> (TempDir, ChartCache) {
    // Another test may have installed the provider already.
    drop(rustls::crypto::aws_lc_rs::default_provider().install_default());
    let dir = tempfile::tempdir().unwrap();
    let cache = ChartCache::new(dir.path().join("charts")).unwrap();
    (dir, cache)
}
