//! Runs the registry of the distribution project on loopback, with different logins.

use std::{fs, path::Path, sync::Arc, time::Duration};

use anyhow::{Context, Result};
use axum::{
    Router,
    extract::State,
    http::{HeaderMap, StatusCode, Uri},
    response::{IntoResponse, Response},
};
use base64::Engine;
use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};
use parking_lot::Mutex;
use rcgen::{CertificateParams, KeyPair, PKCS_RSA_SHA256, SigningKey};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio_util::task::AbortOnDropHandle;

use crate::{
    chart_repository::ChartSource,
    port::Port,
    process::{ChildProcess, Invocation},
    tools::Tools,
    wait::eventually_while_running,
};

/// Name of the only user.
pub const USERNAME: &str = "fleet";
pub const PASSWORD: &str = "hunter2-registry";
/// The password's bcrypt hash at minimum cost, from `htpasswd -nbB`.
const HTPASSWD: &str = "fleet:$2b$04$abcdefghijklmnopqrstuuM/Z0A7FUJ615yT0MkE8r/urtke.cnyW\n";
const SERVICE: &str = "charts";
const ISSUER: &str = "the fake token server";
const DEADLINE: Duration = Duration::from_secs(60);

/// Authentication that the registry requires.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Login {
    /// No authentication.
    Open,
    Basic,
    /// Tokens from a [`FakeTokenServer`], as in public registries.
    Token,
}

/// A running registry. Dropping it stops the process.
#[derive(Debug)]
pub struct Registry {
    tools: Tools,
    folder: TempDir,
    port: Port,
    login: Login,
    process: ChildProcess,
    token_server: Option<FakeTokenServer>,
}

impl Registry {
    /// Starts a registry, and waits until it responds.
    pub async fn start(login: Login) -> Result<Self> {
        let tools = Tools::find()?;
        let folder = TempDir::with_prefix("krypton-registry-").context("creating a folder")?;
        let port = Port::reserve()?;
        let path = folder.path();
        let (auth, token_server) = match login {
            Login::Open => (None, None),
            Login::Basic => {
                let file = path.join("htpasswd");
                fs::write(&file, HTPASSWD).context("writing htpasswd")?;
                (
                    Some(json!({"htpasswd": {"realm": "charts", "path": file}})),
                    None,
                )
            }
            Login::Token => {
                let token_server = FakeTokenServer::start().await?;
                let bundle = path.join("tokens.pem");
                fs::write(&bundle, &token_server.certificate).context("writing a certificate")?;
                let auth = json!({"token": {
                    "realm": token_server.url,
                    "service": SERVICE,
                    "issuer": ISSUER,
                    "rootcertbundle": bundle,
                }});
                (Some(auth), Some(token_server))
            }
        };
        let mut config = json!({
            "version": 0.1,
            "storage": {"filesystem": {"rootdirectory": path.join("data")}},
            "http": {"addr": port.address().to_string(), "secret": "for a test"},
            // Small enough to force pagination.
            "tags": {"maxtags": 2},
        });
        if let (Some(auth), Some(config)) = (auth, config.as_object_mut()) {
            config.insert("auth".to_owned(), auth);
        }
        let file = path.join("config.yaml");
        fs::write(&file, config.to_string()).context("writing the registry's configuration")?;
        let invocation = Invocation::new(tools.program("registry")?)
            .arg("serve")
            .arg(&file)
            .env("OTEL_TRACES_EXPORTER", "none");
        let mut process = ChildProcess::spawn("registry", &invocation, &path.join("log"))?;
        let address = port.address();
        let listening = async || Ok(Some(tokio::net::TcpStream::connect(address).await?));
        let check_running = || process.check_running();
        eventually_while_running("the registry to listen", DEADLINE, check_running, listening)
            .await?;
        Ok(Self {
            tools,
            folder,
            port,
            login,
            process,
            token_server,
        })
    }

    /// `oci://127.0.0.1:<port>/team/charts`.
    pub fn url(&self) -> String {
        format!("oci://{}/team/charts", self.port.address())
    }

    /// Returns the user of each token request. The name is empty for anonymous requests.
    pub fn token_requests(&self) -> Vec<String> {
        let token_server = self.token_server.as_ref();
        token_server
            .map(FakeTokenServer::token_requests)
            .unwrap_or_default()
    }

    /// Packages a chart and pushes it with Helm. Returns the digest of its manifest, `sha256:…`.
    pub async fn push(&self, chart: &ChartSource) -> Result<String> {
        let packages = TempDir::with_prefix("krypton-charts-").context("creating a folder")?;
        chart.package(&self.helm(), packages.path()).await?;
        let entries = fs::read_dir(packages.path()).context("finding the package")?;
        // The folder can also contain a provenance file, which Helm pushes together with the package.
        let package = entries
            .filter_map(|entry| Some(entry.ok()?.path()))
            .find(|path| path.extension().is_some_and(|extension| extension == "tgz"))
            .context("Helm created no package")?;
        let mut push = self
            .helm()
            .args(["push", "--plain-http"])
            .arg(&package)
            .arg(self.url());
        if self.login != Login::Open {
            push = push.args(["--username", USERNAME, "--password", PASSWORD]);
        }
        push.output(DEADLINE).await?;
        self.manifest_digest(&package)
    }

    /// Reads the digest of the newly pushed tag from the registry's storage.
    fn manifest_digest(&self, package: &Path) -> Result<String> {
        let stem = package.file_stem().unwrap_or_default().to_string_lossy();
        let (name, version) = stem
            .split_once('-')
            .context("a package without a version")?;
        let link = self.folder.path().join(format!(
            "data/docker/registry/v2/repositories/team/charts/{name}/_manifests/tags/{}/current/link",
            version.replace('+', "_")
        ));
        fs::read_to_string(&link).with_context(|| format!("reading {}", link.display()))
    }

    /// Corrupts the stored content of this digest.
    pub fn damage(&self, digest: &str) -> Result<()> {
        let hex = digest.trim_start_matches("sha256:");
        let start = hex.get(..2).context("a digest")?;
        let blob = self.folder.path().join(format!(
            "data/docker/registry/v2/blobs/sha256/{start}/{hex}/data"
        ));
        let mut content = fs::read(&blob).with_context(|| format!("reading {}", blob.display()))?;
        if let Some(last) = content.last_mut() {
            *last ^= 1;
        }
        fs::write(&blob, content).with_context(|| format!("writing {}", blob.display()))
    }

    fn helm(&self) -> Invocation {
        Invocation::new(self.tools.binary("helm")).env("HOME", self.folder.path())
    }

    /// Kills the registry. The port refuses connections and stays reserved.
    pub fn stop(&mut self) {
        self.process.kill();
    }
}

/// Stands in for the token server of a public registry. The user gets a token for every requested scope, and an
/// anonymous client gets a token without any rights. The tokens are real, and the registry verifies them.
#[derive(Debug)]
struct FakeTokenServer {
    url: String,
    certificate: String,
    requests: Arc<Mutex<Vec<String>>>,
    _serving: AbortOnDropHandle<std::io::Result<()>>,
}

struct TokenSigner {
    key: KeyPair,
    certificate: String,
    requests: Arc<Mutex<Vec<String>>>,
}

impl FakeTokenServer {
    async fn start() -> Result<Self> {
        let key = KeyPair::generate_for(&PKCS_RSA_SHA256).context("generating a key")?;
        let params = CertificateParams::new(Vec::new()).context("generating a certificate")?;
        let certificate = params
            .self_signed(&key)
            .context("generating a certificate")?;
        let requests: Arc<Mutex<Vec<String>>> = Arc::default();
        let signer = TokenSigner {
            key,
            certificate: STANDARD.encode(certificate.der()),
            requests: Arc::clone(&requests),
        };
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0")
            .await
            .context("binding the token server")?;
        let address = listener.local_addr().context("reading the bound address")?;
        let app = Router::new()
            .fallback(issue_token)
            .with_state(Arc::new(signer));
        let serving = tokio::spawn(async move { axum::serve(listener, app).await });
        Ok(Self {
            url: format!("http://{address}/token"),
            certificate: certificate.pem(),
            requests,
            _serving: AbortOnDropHandle::new(serving),
        })
    }

    fn token_requests(&self) -> Vec<String> {
        self.requests.lock().clone()
    }
}

async fn issue_token(
    State(signer): State<Arc<TokenSigner>>,
    uri: Uri,
    headers: HeaderMap,
) -> Response {
    let Ok(url) = reqwest::Url::parse(&format!("http://localhost{uri}")) else {
        return StatusCode::BAD_REQUEST.into_response();
    };
    let credentials = headers
        .get("authorization")
        .and_then(|value| value.to_str().ok()?.strip_prefix("Basic "))
        .and_then(|pair| String::from_utf8(STANDARD.decode(pair).ok()?).ok())
        .unwrap_or_default();
    let (name, password) = credentials.split_once(':').unwrap_or_default();
    signer.requests.lock().push(name.to_owned());
    let known = name == USERNAME && password == PASSWORD;
    if !known && !name.is_empty() {
        return StatusCode::UNAUTHORIZED.into_response();
    }
    let scopes = url.query_pairs().filter(|(key, _)| key == "scope");
    let granted: Vec<Value> = scopes
        .filter(|_| known)
        .filter_map(|(_, scope)| {
            let mut fields = scope.splitn(3, ':');
            let (kind, name, actions) = (fields.next()?, fields.next()?, fields.next()?);
            let actions: Vec<&str> = actions.split(',').collect();
            Some(json!({"type": kind, "name": name, "actions": actions}))
        })
        .collect();
    let now = krypton_runtime::clock::wall().as_second();
    let header = json!({"alg": "RS256", "typ": "JWT", "x5c": [signer.certificate]});
    let claims = json!({
        "iss": ISSUER, "sub": name, "aud": SERVICE, "jti": "one",
        "exp": now + 300, "nbf": now - 300, "iat": now,
        "access": granted,
    });
    let segment = |value: &Value| URL_SAFE_NO_PAD.encode(value.to_string());
    let signing_input = format!("{}.{}", segment(&header), segment(&claims));
    match signer.key.sign(signing_input.as_bytes()) {
        Ok(signature) => {
            let token = format!("{signing_input}.{}", URL_SAFE_NO_PAD.encode(signature));
            json!({"token": token}).to_string().into_response()
        }
        Err(_) => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
    }
}
