//! Runs a proxy in front of an API server that parses requests and can answer some of them itself.

use std::{
    collections::{BTreeMap, BTreeSet},
    convert::Infallible,
    fs,
    io::Write as _,
    net::SocketAddr,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
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
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ServerConfig, pki_types::pem::PemObject};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::{
    net::{TcpListener, TcpStream},
    sync::{mpsc, watch},
    task::JoinHandle,
};
use tokio_rustls::{TlsAcceptor, server::TlsStream};

use crate::{cluster::Cluster, membership::write_secret};

/// Exceeds the size of all objects of the tests.
const LARGEST: usize = 64 << 20;

/// The kind of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Verb {
    Get,
    List,
    Watch,
    Write,
}

/// All verbs that read.
pub const READS: &[Verb] = &[Verb::Get, Verb::List, Verb::Watch];
pub const ALL: &[Verb] = &[Verb::Get, Verb::List, Verb::Watch, Verb::Write];

/// The response that the proxy sends instead of the API server's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answer {
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
pub struct Lie {
    pub verbs: &'static [Verb],
    /// Plural names. An empty list means all resources.
    pub resources: &'static [&'static str],
    pub answer: Answer,
}

impl Lie {
    fn is_of(self, asked: &Asked) -> bool {
        let of_verb = match self.answer {
            Answer::Nothing => asked.verb == Verb::List,
            Answer::Closed => asked.verb == Verb::Watch,
            Answer::Status(_) | Answer::Page(_) | Answer::Endless | Answer::Bomb => {
                self.verbs.contains(&asked.verb)
            }
        };
        of_verb && (self.resources.is_empty() || self.resources.contains(&asked.resource.as_str()))
    }
}

impl Lie {
    /// Returns true if the start of this lie closes an open watch.
    fn cuts(self, watch: &Asked) -> bool {
        let as_watch = match self.answer {
            // An open watch prevents new lists.
            Answer::Nothing => Answer::Closed,
            answer => answer,
        };
        Self {
            answer: as_watch,
            ..self
        }
        .is_of(watch)
    }
}

/// A request, reduced to the fields that select the response.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Asked {
    verb: Verb,
    resource: String,
}

impl Asked {
    fn of(method: &Method, uri: &Uri) -> Self {
        let mut parts = uri.path().split('/').filter(|part| !part.is_empty());
        // `/api/v1` and `/apis/<group>/<version>`.
        if parts.next() == Some("apis") {
            parts.next();
        }
        parts.next();
        let rest: Vec<&str> = parts.collect();
        let (resource, named) = match rest.as_slice() {
            ["namespaces", _, resource, named @ ..] => (*resource, !named.is_empty()),
            [resource, named @ ..] => (*resource, !named.is_empty()),
            [] => ("", true),
        };
        let watches = uri.query().is_some_and(|query| {
            query
                .split('&')
                .any(|part| part == "watch=true" || part == "watch=1")
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
    lie: watch::Sender<Option<Lie>>,
    lied: AtomicU64,
    /// The paths that were listed since the lie started.
    listed: Mutex<BTreeSet<String>>,
    /// Number of forwarded requests by verb and resource, for error messages.
    passed: Mutex<BTreeMap<(Verb, String), u64>>,
}

/// A running proxy. It authenticates every client as the administrator. The API server also stays reachable directly.
pub struct AnsweringProxy {
    shared: Arc<Shared>,
    tasks: [JoinHandle<()>; 2],
    address: SocketAddr,
    folder: TempDir,
}

impl std::fmt::Debug for AnsweringProxy {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("AnsweringProxy")
            .field("lie", &self.shared.lie.get())
            .finish_non_exhaustive()
    }
}

impl AnsweringProxy {
    /// Starts a proxy in front of the API server of `cluster`. It forwards all requests.
    pub async fn before(cluster: &Cluster) -> Result<Self> {
        crate::install_tls_provider();
        let listener = TcpListener::bind("127.0.0.1:0")
            .await
            .context("listening for the answering proxy")?;
        let address = listener.local_addr().context("reading the bound port")?;
        let direct = fs::read_to_string(cluster.kubeconfig()).context("reading a kubeconfig")?;
        let through = direct.replace(&cluster.server(), &format!("https://{address}"));
        let folder = TempDir::with_prefix("krypton-answers-").context("creating a folder")?;
        write_secret(&folder.path().join("kubeconfig.yaml"), &through)?;
        let (lie, _) = watch::channel(None);
        let shared = Arc::new(Shared {
            upstream: upstream(cluster).await?,
            lie,
            lied: AtomicU64::new(0),
            listed: Mutex::default(),
            passed: Mutex::default(),
        });
        let (connections, accepted) = mpsc::channel(64);
        let acceptor = acceptor(cluster.folder())?;
        let accepting = tokio::spawn(accept(listener, acceptor, connections));
        let router = Router::new()
            .fallback(answer)
            .with_state(Arc::clone(&shared));
        let serving = tokio::spawn(async move {
            // The server never ends without an error.
            drop(axum::serve(Accepted(accepted, address), router).await);
        });
        Ok(Self {
            shared,
            tasks: [accepting, serving],
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

    /// Starts a lie, resets the counters, and closes the watches that the lie affects.
    pub fn lie(&self, lie: Lie) {
        self.shared.lied.store(0, Ordering::SeqCst);
        lock(&self.shared.passed).clear();
        lock(&self.shared.listed).clear();
        self.shared.lie.send_replace(Some(lie));
    }

    /// Ends the lie: the proxy forwards all requests. Open false responses continue.
    pub fn forward_all(&self) {
        self.shared.lie.send_replace(None);
    }

    /// Returns how often the proxy gave the latest false response.
    pub fn lied(&self) -> u64 {
        self.shared.lied.load(Ordering::SeqCst)
    }

    /// Returns the number of forwarded requests since the latest lie started.
    pub fn passed(&self) -> BTreeMap<(Verb, String), u64> {
        lock(&self.shared.passed).clone()
    }
}

impl Drop for AnsweringProxy {
    fn drop(&mut self) {
        for task in &self.tasks {
            task.abort();
        }
    }
}

/// Creates an administrator's client with a timeout longer than a silent watch.
async fn upstream(cluster: &Cluster) -> Result<Client> {
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

async fn accept(listener: TcpListener, acceptor: TlsAcceptor, to: mpsc::Sender<Connection>) {
    while let Ok((stream, address)) = listener.accept().await {
        let (acceptor, to) = (acceptor.clone(), to.clone());
        tokio::spawn(async move {
            if let Ok(stream) = acceptor.accept(stream).await {
                drop(to.send((stream, address)).await);
            }
        });
    }
}

struct Accepted(mpsc::Receiver<Connection>, SocketAddr);

impl Listener for Accepted {
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

async fn answer(State(shared): State<Arc<Shared>>, request: Request) -> Response {
    let asked = Asked::of(request.method(), request.uri());
    let mut lies = shared.lie.subscribe();
    let now = lies.see();
    // A client that continues a watch doesn't list.
    let lists_first = now.is_some_and(|lie| {
        lie.answer == Answer::Nothing
            && lie.cuts(&asked)
            && !lock(&shared.listed).contains(&asked.resource)
    });
    if lists_first {
        return status(410, &asked);
    }
    let packed = request.headers().get(header::ACCEPT_ENCODING).is_some();
    let lie = now.filter(|lie| lie.is_of(&asked) && (packed || lie.answer != Answer::Bomb));
    match lie.map(|lie| lie.answer) {
        Some(answer) => {
            shared.lied.fetch_add(1, Ordering::SeqCst);
            match answer {
                Answer::Status(code) => status(code, &asked),
                Answer::Page(code) => page(code),
                Answer::Closed => of_json(Vec::new()),
                Answer::Endless => {
                    let spaces = Bytes::from_static(&[b' '; 64 << 10]);
                    streamed(futures::stream::repeat(spaces))
                }
                Answer::Bomb => {
                    let part = packed_spaces(16 << 20);
                    let mut bomb = streamed(futures::stream::repeat(part).take(1 << 10));
                    let gzip = HeaderValue::from_static("gzip");
                    bomb.headers_mut().insert(header::CONTENT_ENCODING, gzip);
                    bomb
                }
                Answer::Nothing => {
                    lock(&shared.listed).insert(asked.resource);
                    emptied(forward(&shared, request, true).await).await
                }
            }
        }
        None => {
            *lock(&shared.passed)
                .entry((asked.verb, asked.resource.clone()))
                .or_default() += 1;
            let answer = forward(&shared, request, false).await;
            if asked.verb != Verb::Watch {
                return answer;
            }
            // A false response in the meantime breaks the stream, like a lost connection.
            let (parts, body) = answer.into_parts();
            let cut = async move {
                while lies.changed().await.is_ok() {
                    let lie = lies.see();
                    if lie.is_some_and(|lie| lie.cuts(&asked)) {
                        return;
                    }
                }
            };
            let broken = futures::stream::once(async { Err(axum::Error::new("cut off")) });
            let stream = body.into_data_stream().take_until(cut).chain(broken);
            Response::from_parts(parts, Body::from_stream(stream))
        }
    }
}

fn streamed(parts: impl Stream<Item = Bytes> + Send + 'static) -> Response {
    let body = Body::from_stream(parts.map(Ok::<_, Infallible>));
    ([(header::CONTENT_TYPE, "application/json")], body).into_response()
}

/// Returns one gzip member. A gzip file can contain many.
fn packed_spaces(bytes: usize) -> Bytes {
    let mut packed = GzEncoder::new(Vec::new(), Compression::best());
    // Writing to memory can't fail.
    drop(packed.write_all(&vec![b' '; bytes]));
    packed.finish().unwrap_or_default().into()
}

/// Forwards a request. Requests JSON if the proxy parses the response.
async fn forward(shared: &Shared, request: Request, to_be_read: bool) -> Response {
    let (mut parts, body) = request.into_parts();
    // The proxy authenticates with its own credentials.
    for name in [header::AUTHORIZATION, header::HOST, header::ACCEPT_ENCODING] {
        parts.headers.remove(name);
    }
    if to_be_read
        && let Some(accepted) = parts.headers.get(header::ACCEPT)
        && !accepted.to_str().unwrap_or_default().contains("json")
    {
        parts.headers.remove(header::ACCEPT);
    }
    let body = match to_bytes(body, LARGEST).await {
        Ok(body) => body.to_vec(),
        Err(error) => return lost(&error),
    };
    let path = parts.uri.path_and_query().map(ToString::to_string);
    parts.uri = path.unwrap_or_default().parse().unwrap_or_default();
    let request = axum::http::Request::from_parts(parts, body.into());
    match shared.upstream.send(request).await {
        Ok(answer) => answer.map(Body::new),
        Err(error) => lost(&error),
    }
}

fn lost(error: &dyn std::fmt::Display) -> Response {
    (
        StatusCode::BAD_GATEWAY,
        format!("the apiserver does not answer: {error}"),
    )
        .into_response()
}

async fn emptied(answer: Response) -> Response {
    let (mut parts, body) = answer.into_parts();
    let read = to_bytes(body, LARGEST).await.ok();
    let list = read.and_then(|body| serde_json::from_slice::<Value>(&body).ok());
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
        other => lost(&format!("not a list: {} {other:?}", parts.status)),
    }
}

fn of_json(body: Vec<u8>) -> Response {
    ([(header::CONTENT_TYPE, "application/json")], body).into_response()
}

fn status(code: u16, asked: &Asked) -> Response {
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
        asked.resource, asked.verb
    );
    let body = json!({
        "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
        "message": message, "reason": reason, "code": code,
    });
    let mut answer = of_json(body.to_string().into_bytes());
    *answer.status_mut() = StatusCode::from_u16(code).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    if code == 429 {
        let headers = answer.headers_mut();
        headers.insert(header::RETRY_AFTER, header::HeaderValue::from_static("1"));
    }
    answer
}

fn page(code: u16) -> Response {
    let code = StatusCode::from_u16(code).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let headers = [(header::CONTENT_TYPE, "text/html; charset=utf-8")];
    let body = "<!DOCTYPE html>\n<html><body><h1>Please sign in</h1></body></html>\n";
    (code, headers, body).into_response()
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn verb_and_resource_are_read_from_request() {
        let of = |method: Method, uri: &str| {
            let asked = Asked::of(&method, &uri.parse().unwrap());
            (asked.verb, asked.resource)
        };
        let expected = |verb: Verb, resource: &str| (verb, resource.to_owned());
        let group = "/apis/mesh.openkcm.io/v1alpha1";
        assert_eq!(
            of(Method::GET, &format!("{group}/tenants?limit=50")),
            expected(Verb::List, "tenants")
        );
        assert_eq!(
            of(
                Method::GET,
                &format!("{group}/tenants?watch=true&timeoutSeconds=290")
            ),
            expected(Verb::Watch, "tenants")
        );
        assert_eq!(
            of(
                Method::GET,
                &format!("{group}/namespaces/default/tenants/acme")
            ),
            expected(Verb::Get, "tenants")
        );
        assert_eq!(
            of(
                Method::GET,
                "/api/v1/namespaces/acme/secrets?labelSelector=owner%3Dhelm"
            ),
            expected(Verb::List, "secrets")
        );
        assert_eq!(
            of(Method::GET, "/api/v1/namespaces/acme"),
            expected(Verb::Get, "namespaces")
        );
        assert_eq!(
            of(Method::GET, "/api/v1/namespaces?limit=50"),
            expected(Verb::List, "namespaces")
        );
        assert_eq!(
            of(Method::DELETE, "/api/v1/namespaces/acme"),
            expected(Verb::Write, "namespaces")
        );
        assert_eq!(of(Method::GET, "/version").0, Verb::Get);
    }
}
