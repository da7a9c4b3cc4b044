//! Runs a proxy in front of an API server that parses requests and can answer some of them itself.

use std::{
    collections::{BTreeMap, BTreeSet},
    convert::Infallible,
    fs,
    io::Write as _,
    net::SocketAddr,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use anyhow::{Context, Result, ensure};
use axum::{
    Router,
    body::{Body, Bytes, to_bytes},
    extract::{Request, State},
    http::{HeaderValue, Method, StatusCode, Uri, header},
    response::{IntoResponse, Response},
    serve::Listener,
};
use flate2::{Compression, write::GzEncoder};
use futures::{Stream, StreamExt};
use krypton_runtime::newest::{Newest as _, NewestSeen as _};
use kube::{
    Client, Config,
    config::{KubeConfigOptions, Kubeconfig},
};
use parking_lot::Mutex;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ServerConfig, pki_types::pem::PemObject};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::{
    net::{TcpListener, TcpStream},
    sync::{mpsc, watch},
};
use tokio_rustls::{TlsAcceptor, server::TlsStream};
use tokio_util::task::AbortOnDropHandle;

use crate::{cluster::Cluster, membership::write_secret};

/// Exceeds the size of all objects of the tests.
const MAX_BODY: usize = 64 << 20;

/// The kind of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Verb {
    Get,
    List,
    Watch,
    Write,
}

/// All verbs that read.
pub const READ_VERBS: &[Verb] = &[Verb::Get, Verb::List, Verb::Watch];
pub const ALL_VERBS: &[Verb] = &[Verb::Get, Verb::List, Verb::Watch, Verb::Write];

/// The response that the proxy sends instead of the API server's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FalseResponse {
    /// A Status with this code, in the format of an API server. A 429 has `Retry-After: 1`.
    Status(u16),
    /// An HTML page with this code, like that of an intermediate proxy.
    Page(u16),
    /// Real lists and resourceVersions, but without objects. Watches without a preceding list are rejected.
    Nothing,
    /// A watch that ends immediately after its start. Other requests pass.
    Closed,
    /// An endless stream of spaces.
    Endless,
    /// 16 GiB of spaces in a gzip body, for clients that accept gzip, as Helm does.
    Bomb,
}

/// The requests that the proxy answers itself, and the response.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ResponseFault {
    pub verbs: &'static [Verb],
    /// Plural names. An empty list means all resources.
    pub resources: &'static [&'static str],
    pub response: FalseResponse,
}

impl ResponseFault {
    fn applies_to(self, target: &RequestTarget) -> bool {
        let is_matching_verb = match self.response {
            FalseResponse::Nothing => target.verb == Verb::List,
            FalseResponse::Closed => target.verb == Verb::Watch,
            FalseResponse::Status(_)
            | FalseResponse::Page(_)
            | FalseResponse::Endless
            | FalseResponse::Bomb => self.verbs.contains(&target.verb),
        };
        is_matching_verb
            && (self.resources.is_empty() || self.resources.contains(&target.resource.as_str()))
    }

    /// Returns true if the start of this fault closes an open watch.
    fn closes(self, watch: &RequestTarget) -> bool {
        let response = match self.response {
            // An open watch prevents new lists.
            FalseResponse::Nothing => FalseResponse::Closed,
            response => response,
        };
        Self { response, ..self }.applies_to(watch)
    }
}

/// A request, reduced to the fields that select the response.
#[derive(Debug, Clone, PartialEq, Eq)]
struct RequestTarget {
    verb: Verb,
    resource: String,
}

impl RequestTarget {
    fn from_request(method: &Method, uri: &Uri) -> Self {
        let mut segments = uri.path().split('/').filter(|segment| !segment.is_empty());
        // `/api/v1` and `/apis/<group>/<version>`.
        if segments.next() == Some("apis") {
            segments.next();
        }
        segments.next();
        let rest: Vec<&str> = segments.collect();
        let (resource, named) = match rest.as_slice() {
            ["namespaces", _, resource, named @ ..] => (*resource, !named.is_empty()),
            [resource, named @ ..] => (*resource, !named.is_empty()),
            [] => ("", true),
        };
        let watches = uri.query().is_some_and(|query| {
            query
                .split('&')
                .any(|segment| segment == "watch=true" || segment == "watch=1")
        });
        let verb = match *method {
            Method::GET if watches => Verb::Watch,
            Method::GET if named => Verb::Get,
            Method::GET => Verb::List,
            _ => Verb::Write,
        };
        Self {
            verb,
            resource: resource.to_owned(),
        }
    }
}

struct Shared {
    upstream: Client,
    fault: watch::Sender<Option<ResponseFault>>,
    false_responses: AtomicU64,
    /// The paths whose lists were emptied since the fault started.
    emptied: Mutex<BTreeSet<String>>,
    /// Number of forwarded requests by verb and resource, for error messages.
    forwarded: Mutex<BTreeMap<(Verb, String), u64>>,
}

/// A running proxy. It authenticates every client as the administrator. The API server also stays reachable directly.
pub struct AnsweringProxy {
    shared: Arc<Shared>,
    _tasks: [AbortOnDropHandle<()>; 2],
    address: SocketAddr,
    folder: TempDir,
}

impl std::fmt::Debug for AnsweringProxy {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("AnsweringProxy")
            .field("lie", &self.shared.fault.get())
            .finish_non_exhaustive()
    }
}

impl AnsweringProxy {
    /// Starts a proxy in front of the API server of `cluster`. It forwards all requests.
    pub async fn start(cluster: &Cluster) -> Result<Self> {
        crate::install_tls_provider();
        let listener = TcpListener::bind("127.0.0.1:0")
            .await
            .context("listening for the answering proxy")?;
        let address = listener.local_addr().context("reading the bound port")?;
        let kubeconfig =
            fs::read_to_string(cluster.kubeconfig()).context("reading a kubeconfig")?;
        let proxied = kubeconfig.replace(&cluster.server(), &format!("https://{address}"));
        let folder = TempDir::with_prefix("krypton-answers-").context("creating a folder")?;
        write_secret(&folder.path().join("kubeconfig.yaml"), &proxied)?;
        let (fault, _) = watch::channel(None);
        let shared = Arc::new(Shared {
            upstream: admin_client(cluster).await?,
            fault,
            false_responses: AtomicU64::new(0),
            emptied: Mutex::default(),
            forwarded: Mutex::default(),
        });
        let (sender, receiver) = mpsc::channel(64);
        let acceptor = acceptor(cluster.folder())?;
        let accepting = tokio::spawn(accept(listener, acceptor, sender));
        let router = Router::new()
            .fallback(respond)
            .with_state(Arc::clone(&shared));
        let serving = tokio::spawn(async move {
            // The server never ends without an error.
            drop(axum::serve(AcceptedConnections(receiver, address), router).await);
        });
        Ok(Self {
            shared,
            _tasks: [accepting, serving].map(AbortOnDropHandle::new),
            address,
            folder,
        })
    }

    /// `https://127.0.0.1:<port>`.
    pub fn server(&self) -> String {
        format!("https://{}", self.address)
    }

    /// Returns the path of the administrator's kubeconfig for the proxy.
    pub fn kubeconfig(&self) -> PathBuf {
        self.folder.path().join("kubeconfig.yaml")
    }

    /// Starts a fault, resets the counters, and closes the watches that the fault affects.
    pub fn inject(&self, fault: ResponseFault) {
        self.shared.false_responses.store(0, Ordering::SeqCst);
        self.shared.forwarded.lock().clear();
        self.shared.emptied.lock().clear();
        self.shared.fault.send_replace(Some(fault));
    }

    /// Ends the fault: the proxy forwards all requests. Open false responses continue.
    pub fn forward_all(&self) {
        self.shared.fault.send_replace(None);
    }

    /// Returns how often the proxy gave the latest false response.
    pub fn false_responses(&self) -> u64 {
        self.shared.false_responses.load(Ordering::SeqCst)
    }

    /// Returns the number of forwarded requests since the latest fault started.
    pub fn forwarded_requests(&self) -> BTreeMap<(Verb, String), u64> {
        self.shared.forwarded.lock().clone()
    }
}

/// Creates an administrator's client with a timeout longer than a silent watch.
async fn admin_client(cluster: &Cluster) -> Result<Client> {
    let kubeconfig = Kubeconfig::read_from(cluster.kubeconfig())?;
    let options = KubeConfigOptions::default();
    let mut config = Config::from_custom_kubeconfig(kubeconfig, &options).await?;
    config.read_timeout = None;
    config.default_retry = false;
    Ok(Client::try_from(config)?)
}

/// Uses the API server's certificate, which names the address and is valid for any port.
fn acceptor(folder: &Path) -> Result<TlsAcceptor> {
    let read = |name: &str| {
        let path = folder.join(name);
        fs::read(&path).with_context(|| format!("reading {}", path.display()))
    };
    let chain: Vec<CertificateDer<'_>> =
        CertificateDer::pem_slice_iter(&read("apiserver.crt")?).collect::<Result<_, _>>()?;
    ensure!(!chain.is_empty(), "the apiserver's certificate is empty");
    let key = PrivateKeyDer::from_pem_slice(&read("apiserver.key")?)?;
    let mut config = ServerConfig::builder()
        .with_no_client_auth()
        .with_single_cert(chain, key)?;
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(TlsAcceptor::from(Arc::new(config)))
}

type Connection = (TlsStream<TcpStream>, SocketAddr);

async fn accept(listener: TcpListener, acceptor: TlsAcceptor, sender: mpsc::Sender<Connection>) {
    while let Ok((stream, address)) = listener.accept().await {
        let (acceptor, sender) = (acceptor.clone(), sender.clone());
        tokio::spawn(async move {
            if let Ok(stream) = acceptor.accept(stream).await {
                drop(sender.send((stream, address)).await);
            }
        });
    }
}

struct AcceptedConnections(mpsc::Receiver<Connection>, SocketAddr);

impl Listener for AcceptedConnections {
    type Io = TlsStream<TcpStream>;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> Connection {
        match self.0.recv().await {
            Some(connection) => connection,
            None => std::future::pending().await,
        }
    }

    fn local_addr(&self) -> std::io::Result<SocketAddr> {
        Ok(self.1)
    }
}

async fn respond(State(shared): State<Arc<Shared>>, request: Request) -> Response {
    let target = RequestTarget::from_request(request.method(), request.uri());
    let mut faults = shared.fault.subscribe();
    let current_fault = faults.get_and_update();
    // A client that continues a watch doesn't list.
    let must_list_first = current_fault.is_some_and(|fault| {
        fault.response == FalseResponse::Nothing
            && fault.closes(&target)
            && !shared.emptied.lock().contains(&target.resource)
    });
    if must_list_first {
        return status_response(410, &target);
    }
    let accepts_gzip = request.headers().get(header::ACCEPT_ENCODING).is_some();
    let fault = current_fault.filter(|fault| {
        fault.applies_to(&target) && (accepts_gzip || fault.response != FalseResponse::Bomb)
    });
    match fault.map(|fault| fault.response) {
        Some(response) => {
            shared.false_responses.fetch_add(1, Ordering::SeqCst);
            match response {
                FalseResponse::Status(code) => status_response(code, &target),
                FalseResponse::Page(code) => html_response(code),
                FalseResponse::Closed => json_response(Vec::new()),
                FalseResponse::Endless => {
                    let spaces = Bytes::from_static(&[b' '; 64 << 10]);
                    streamed(futures::stream::repeat(spaces))
                }
                FalseResponse::Bomb => {
                    let chunk = gzipped_spaces(16 << 20);
                    let mut response = streamed(futures::stream::repeat(chunk).take(1 << 10));
                    let gzip = HeaderValue::from_static("gzip");
                    response
                        .headers_mut()
                        .insert(header::CONTENT_ENCODING, gzip);
                    response
                }
                FalseResponse::Nothing => {
                    shared.emptied.lock().insert(target.resource);
                    without_items(forward(&shared, request, true).await).await
                }
            }
        }
        None => {
            *shared
                .forwarded
                .lock()
                .entry((target.verb, target.resource.clone()))
                .or_default() += 1;
            let response = forward(&shared, request, false).await;
            if target.verb != Verb::Watch {
                return response;
            }
            // A false response in the meantime breaks the stream, like a lost connection.
            let (parts, body) = response.into_parts();
            let fault_starts = async move {
                while faults.changed().await.is_ok() {
                    let fault = faults.get_and_update();
                    if fault.is_some_and(|fault| fault.closes(&target)) {
                        return;
                    }
                }
            };
            let reset = futures::stream::once(async { Err(axum::Error::new("cut off")) });
            let stream = body
                .into_data_stream()
                .take_until(fault_starts)
                .chain(reset);
            Response::from_parts(parts, Body::from_stream(stream))
        }
    }
}

fn streamed(chunks: impl Stream<Item = Bytes> + Send + 'static) -> Response {
    let body = Body::from_stream(chunks.map(Ok::<_, Infallible>));
    ([(header::CONTENT_TYPE, "application/json")], body).into_response()
}

/// Returns one gzip member. A gzip file can contain many.
fn gzipped_spaces(bytes: usize) -> Bytes {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::best());
    // Writing to memory can't fail.
    drop(encoder.write_all(&vec![b' '; bytes]));
    encoder.finish().unwrap_or_default().into()
}

/// Forwards a request. Requests JSON if the proxy parses the response.
async fn forward(shared: &Shared, request: Request, needs_json: bool) -> Response {
    let (mut parts, body) = request.into_parts();
    // The proxy authenticates with its own credentials.
    for name in [header::AUTHORIZATION, header::HOST, header::ACCEPT_ENCODING] {
        parts.headers.remove(name);
    }
    if needs_json
        && let Some(accept) = parts.headers.get(header::ACCEPT)
        && !accept.to_str().unwrap_or_default().contains("json")
    {
        parts.headers.remove(header::ACCEPT);
    }
    let body = match to_bytes(body, MAX_BODY).await {
        Ok(body) => body.to_vec(),
        Err(error) => return bad_gateway(&error),
    };
    let path = parts.uri.path_and_query().map(ToString::to_string);
    parts.uri = path.unwrap_or_default().parse().unwrap_or_default();
    let request = axum::http::Request::from_parts(parts, body.into());
    match shared.upstream.send(request).await {
        Ok(response) => response.map(Body::new),
        Err(error) => bad_gateway(&error),
    }
}

fn bad_gateway(error: &dyn std::fmt::Display) -> Response {
    (
        StatusCode::BAD_GATEWAY,
        format!("the apiserver does not answer: {error}"),
    )
        .into_response()
}

async fn without_items(response: Response) -> Response {
    let (mut parts, body) = response.into_parts();
    let bytes = to_bytes(body, MAX_BODY).await.ok();
    let list = bytes.and_then(|body| serde_json::from_slice::<Value>(&body).ok());
    match list {
        Some(mut list) if list["items"].is_array() => {
            list["items"] = json!([]);
            if let Some(metadata) = list["metadata"].as_object_mut() {
                metadata.remove("continue");
                metadata.remove("remainingItemCount");
            }
            for name in [header::CONTENT_LENGTH, header::TRANSFER_ENCODING] {
                parts.headers.remove(name);
            }
            Response::from_parts(parts, Body::from(list.to_string()))
        }
        other => bad_gateway(&format!("not a list: {} {other:?}", parts.status)),
    }
}

fn json_response(body: Vec<u8>) -> Response {
    ([(header::CONTENT_TYPE, "application/json")], body).into_response()
}

fn status_response(code: u16, target: &RequestTarget) -> Response {
    let reason = match code {
        403 => "Forbidden",
        404 => "NotFound",
        410 => "Expired",
        429 => "TooManyRequests",
        503 => "ServiceUnavailable",
        _ => "InternalError",
    };
    let message = format!(
        "{} for {:?}: injected by the test",
        target.resource, target.verb
    );
    let body = json!({
        "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
        "message": message, "reason": reason, "code": code,
    });
    let mut response = json_response(body.to_string().into_bytes());
    *response.status_mut() =
        StatusCode::from_u16(code).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    if code == 429 {
        let headers = response.headers_mut();
        headers.insert(header::RETRY_AFTER, header::HeaderValue::from_static("1"));
    }
    response
}

fn html_response(code: u16) -> Response {
    let code = StatusCode::from_u16(code).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let headers = [(header::CONTENT_TYPE, "text/html; charset=utf-8")];
    let body = "<!DOCTYPE html>\n<html><body><h1>Please sign in</h1></body></html>\n";
    (code, headers, body).into_response()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn verb_and_resource_are_read_from_request() {
        let parse = |method: Method, uri: &str| {
            let target = RequestTarget::from_request(&method, &uri.parse().unwrap());
            (target.verb, target.resource)
        };
        let expected = |verb: Verb, resource: &str| (verb, resource.to_owned());
        let group = "/apis/mesh.openkcm.io/v1alpha1";
        assert_eq!(
            parse(Method::GET, &format!("{group}/tenants?limit=50")),
            expected(Verb::List, "tenants")
        );
        assert_eq!(
            parse(
                Method::GET,
                &format!("{group}/tenants?watch=true&timeoutSeconds=290")
            ),
            expected(Verb::Watch, "tenants")
        );
        assert_eq!(
            parse(
                Method::GET,
                &format!("{group}/namespaces/default/tenants/acme")
            ),
            expected(Verb::Get, "tenants")
        );
        assert_eq!(
            parse(
                Method::GET,
                "/api/v1/namespaces/acme/secrets?labelSelector=owner%3Dhelm"
            ),
            expected(Verb::List, "secrets")
        );
        assert_eq!(
            parse(Method::GET, "/api/v1/namespaces/acme"),
            expected(Verb::Get, "namespaces")
        );
        assert_eq!(
            parse(Method::GET, "/api/v1/namespaces?limit=50"),
            expected(Verb::List, "namespaces")
        );
        assert_eq!(
            parse(Method::DELETE, "/api/v1/namespaces/acme"),
            expected(Verb::Write, "namespaces")
        );
        assert_eq!(parse(Method::GET, "/version").0, Verb::Get);
    }
}
