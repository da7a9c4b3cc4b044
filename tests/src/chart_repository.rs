//! Runs a chart repository on loopback with real packages and switchable faults.

use std::{
    collections::BTreeMap,
    convert::Infallible,
    fs,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use anyhow::{Context, Result, bail};
use axum::{
    Router,
    body::{Body, Bytes},
    extract::State,
    http::{StatusCode, Uri, header},
    response::{IntoResponse, Response},
};
use krypton_types::fingerprint::sha256_hex;
use parking_lot::Mutex;
use tempfile::TempDir;
use tokio::runtime::{Builder, Runtime};

use crate::{folder, port::Port, process::Invocation, tools::Tools, wait::eventually_within};

const KEYS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/keys");
const SMALL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/charts/small");
const HELM_DEADLINE: Duration = Duration::from_secs(60);
const STOP_DEADLINE: Duration = Duration::from_secs(10);
/// 200 MiB in total, generated while the response is sent.
const HUGE_INDEX_CHUNKS: usize = 200 * 16;
const HUGE_INDEX_CHUNK_BYTES: usize = 64 * 1024;

/// A chart's folder, packaged under its own name and version or others.
#[derive(Debug, Clone)]
pub struct ChartSource {
    folder: PathBuf,
    name: Option<String>,
    version: Option<String>,
    signer: Option<Signer>,
}

/// The key that signs a chart. The keys are only for these tests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Signer {
    Signer,
    Stranger,
}

impl Signer {
    fn key_name(self) -> &'static str {
        match self {
            Self::Signer => "signer",
            Self::Stranger => "stranger",
        }
    }

    /// Returns the path of the public key, in the format of `gpg --export`.
    pub fn keyring(self) -> PathBuf {
        Path::new(KEYS).join(format!("{}.gpg", self.key_name()))
    }
}

impl ChartSource {
    pub fn folder(folder: impl Into<PathBuf>) -> Self {
        Self {
            folder: folder.into(),
            name: None,
            version: None,
            signer: None,
        }
    }

    /// Writes a chart of version 1.0.0 with these files into a folder.
    pub fn write(root: &Path, name: &str, files: &[(&str, &str)]) -> Result<Self> {
        let metadata = format!("{{apiVersion: v2, name: {name}, version: 1.0.0}}");
        for (file, content) in [&[("Chart.yaml", metadata.as_str())], files].concat() {
            let file = root.join(file);
            fs::create_dir_all(file.parent().context("a file without a folder")?)?;
            fs::write(&file, content).with_context(|| format!("writing {}", file.display()))?;
        }
        Ok(Self::folder(root))
    }

    /// Adds a provenance file to the package.
    #[must_use]
    pub fn signed(mut self, signer: Signer) -> Self {
        self.signer = Some(signer);
        self
    }

    /// The chart `small`: a ConfigMap, a Service and a Deployment. Its values are `replicaCount`, `message`, `broken`
    /// (the API server rejects the Deployment), `unready` (its pods never run) and `failWith` (rendering fails with
    /// this message).
    pub fn small(version: &str) -> Self {
        Self::folder(SMALL).version(version)
    }

    /// The chart `external-dns`, 1.19.0 or 1.20.0, a third-party chart.
    pub fn external_dns(version: &str) -> Result<Self> {
        Ok(Self::folder(
            Tools::find()?.chart(&format!("external-dns-{version}"))?,
        ))
    }

    #[must_use]
    pub fn name(mut self, name: &str) -> Self {
        self.name = Some(name.to_owned());
        self
    }

    #[must_use]
    pub fn version(mut self, version: &str) -> Self {
        self.version = Some(version.to_owned());
        self
    }

    /// Packages the chart into the folder `packages`.
    pub(crate) async fn package(&self, helm: &Invocation, packages: &Path) -> Result<()> {
        let renamed = match &self.name {
            Some(name) => Some(renamed_copy(&self.folder, name)?),
            None => None,
        };
        let folder = renamed
            .as_ref()
            .map_or(self.folder.as_path(), TempDir::path);
        let mut package = helm
            .clone()
            .arg("package")
            .arg(folder)
            .arg("--destination")
            .arg(packages);
        if let Some(version) = &self.version {
            package = package.args(["--version", version]);
        }
        if let Some(signer) = self.signer.map(Signer::key_name) {
            package = package
                .args(["--sign", "--key", &format!("Krypton tests, {signer}")])
                .arg("--keyring")
                .arg(Path::new(KEYS).join(format!("{signer}.secret.gpg")));
        }
        package.output(HELM_DEADLINE).await?;
        Ok(())
    }
}

/// A fault of the repository.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Fault {
    #[default]
    None,
    /// Every response has this HTTP status.
    Down(u16),
    /// Every response is 200 with bytes that are neither YAML nor a chart.
    Rubbish,
    /// The index contains 200 MiB of valid entries.
    HugeIndex,
}

#[derive(Debug, Default)]
struct RepositoryState {
    files: BTreeMap<String, Bytes>,
    fault: Fault,
}

/// A running repository. Dropping it stops it.
#[derive(Debug)]
pub struct ChartRepository {
    tools: Tools,
    folder: TempDir,
    port: Port,
    state: Arc<Mutex<RepositoryState>>,
    /// A separate runtime. Stopping it closes every connection.
    runtime: Mutex<Option<Runtime>>,
}

impl ChartRepository {
    /// Packages the charts with Helm and serves them.
    pub async fn start(charts: &[ChartSource]) -> Result<Self> {
        let repository = Self {
            tools: Tools::find()?,
            folder: TempDir::with_prefix("krypton-charts-")
                .context("creating a folder for charts")?,
            port: Port::reserve()?,
            state: Arc::default(),
            runtime: Mutex::default(),
        };
        let packages = repository.folder.path().join("packages");
        fs::create_dir(&packages).context("creating a folder for packages")?;
        for chart in charts {
            chart.package(&repository.helm(), &packages).await?;
        }
        let index = repository.helm().args(["repo", "index"]).arg(&packages);
        index.output(HELM_DEADLINE).await?;
        repository.state.lock().files = read_files(&packages)?;
        repository.restart()?;
        Ok(repository)
    }

    /// `http://127.0.0.1:<port>`.
    pub fn url(&self) -> String {
        format!("http://{}", self.port.address())
    }

    /// Returns the served files by name.
    pub fn files(&self) -> Vec<(String, Bytes)> {
        let files = self.state.lock().files.clone();
        files
            .into_iter()
            .map(|(path, bytes)| (path.trim_start_matches('/').to_owned(), bytes))
            .collect()
    }

    pub fn set_fault(&self, fault: Fault) {
        self.state.lock().fault = fault;
    }

    /// Closes all connections. The port refuses new ones and stays reserved.
    pub async fn stop(&self) -> Result<()> {
        if let Some(runtime) = self.runtime.lock().take() {
            runtime.shutdown_background();
        }
        let free = async || Ok(self.port.is_free().then_some(()));
        eventually_within("the chart repository to stop", STOP_DEADLINE, free).await
    }

    /// Serves again on the same port after `stop`.
    pub fn restart(&self) -> Result<()> {
        let mut running = self.runtime.lock();
        if running.is_some() {
            bail!("the chart repository {} already runs", self.url());
        }
        let runtime = Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .context("starting the chart repository's thread")?;
        let listener = self.port.listen()?;
        let app = Router::new()
            .fallback(respond)
            .with_state(self.state.clone());
        runtime.spawn(async move {
            let listener = tokio::net::TcpListener::from_std(listener)?;
            axum::serve(listener, app).await
        });
        *running = Some(runtime);
        Ok(())
    }

    fn helm(&self) -> Invocation {
        Invocation::new(self.tools.binary("helm")).env("HOME", self.folder.path())
    }
}

impl Drop for ChartRepository {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.lock().take() {
            runtime.shutdown_background();
        }
    }
}

async fn respond(State(state): State<Arc<Mutex<RepositoryState>>>, uri: Uri) -> Response {
    let path = uri.path().to_owned();
    let (fault, file) = {
        let state = state.lock();
        (state.fault, state.files.get(&path).cloned())
    };
    match (fault, file) {
        (Fault::Down(status), _) => StatusCode::from_u16(status)
            .unwrap_or(StatusCode::SERVICE_UNAVAILABLE)
            .into_response(),
        (Fault::Rubbish, _) => Bytes::from_static(b"\x00<html>{{ not: [a chart\n").into_response(),
        (Fault::HugeIndex, _) if path == "/index.yaml" => huge_index().into_response(),
        // Like most web servers, ignores a range request and sends the complete file.
        (Fault::None | Fault::HugeIndex, Some(file)) => {
            let tag = format!("\"{}\"", sha256_hex(&file));
            ([(header::ETAG, tag)], file).into_response()
        }
        (Fault::None | Fault::HugeIndex, None) => StatusCode::NOT_FOUND.into_response(),
    }
}

fn huge_index() -> Body {
    let header = "apiVersion: v1\nentries:\n";
    let description = "x".repeat(HUGE_INDEX_CHUNK_BYTES);
    let entries = (0..HUGE_INDEX_CHUNKS).map(move |n| {
        format!(
            "  filler-{n}:\n  - {{name: filler-{n}, version: 1.0.0, description: {description}}}\n"
        )
    });
    let chunks = std::iter::once(header.to_owned()).chain(entries);
    Body::from_stream(futures::stream::iter(chunks.map(Ok::<_, Infallible>)))
}

/// Copies the chart under another name, because `helm package` can't rename it.
fn renamed_copy(folder: &Path, name: &str) -> Result<TempDir> {
    let copy = TempDir::with_prefix("krypton-chart-").context("creating a folder for a chart")?;
    folder::copy(folder, copy.path()).with_context(|| format!("copying {}", folder.display()))?;
    let file = copy.path().join("Chart.yaml");
    let chart = fs::read_to_string(&file).with_context(|| format!("reading {}", file.display()))?;
    let renamed = |line: &str| match line.starts_with("name:") {
        true => format!("name: {name}\n"),
        false => format!("{line}\n"),
    };
    let chart: String = chart.lines().map(renamed).collect();
    fs::write(&file, chart).with_context(|| format!("writing {}", file.display()))?;
    Ok(copy)
}

fn read_files(folder: &Path) -> Result<BTreeMap<String, Bytes>> {
    let read = || -> std::io::Result<BTreeMap<String, Bytes>> {
        fs::read_dir(folder)?
            .map(|entry| {
                let entry = entry?;
                let path = format!("/{}", entry.file_name().to_string_lossy());
                Ok((path, fs::read(entry.path())?.into()))
            })
            .collect()
    };
    read().with_context(|| format!("reading the packages in {}", folder.display()))
}
