//! Chart cache: fetches and verifies each chart once per process and shares the result between callers.

use std::collections::HashMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures::future::BoxFuture;
use krypton_runtime::clock::BootTime;
use krypton_runtime::newest::Newest as _;
use krypton_runtime::{chance, off_thread};
use krypton_types::redact::url_shown;
use tokio::sync::watch;
use tracing::Instrument as _;
use tracing::field::Empty;

use crate::metrics::{ChartMetrics, Counted};

mod archive;
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) mod archive_promises;
mod astray;
mod cache_state;
mod credentials;
mod download;
mod error;
pub(crate) mod index;
mod index_store;
pub(crate) mod oci;
mod origin;
#[cfg(test)]
mod private_tests;
pub(crate) mod provenance;
pub(crate) mod range;
mod source;
#[cfg(test)]
mod tests;
pub(crate) mod version;

pub use archive::ArchiveError;
pub use cache_state::CacheState;
pub use credentials::{Credentials, CredentialsError};
pub use download::CHART_LIMIT;
pub use error::{ChartError, ChartFault};
pub use provenance::Prover;
pub use source::ChartSource;
pub use version::{exact_version, is_range};

use download::Way;
use index_store::IndexStore;
use origin::{Listed, Origin, inspected};
use version::{Asked, Wanted};

/// Deadline of a whole fetch, index and chart together.
const DEADLINE: Duration = Duration::from_secs(60);
/// Back-off after the first failure. It doubles with each further failure.
const FIRST_PAUSE: Duration = Duration::from_secs(2);
/// Longest back-off after a failure.
const LONGEST_PAUSE: Duration = Duration::from_secs(60);
/// Maximum number of cached charts. A fleet uses one; the others are older versions.
const REMEMBERED: usize = 256;
/// Prefix of incomplete files and temporary folders.
const PARTIAL: &str = ".partial-";

/// Reference to a chart.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct ChartRef {
    /// URL of the repository: `http`, `https` or `oci`. Empty if `name` is the path of a local `.tgz` or a
    /// complete `oci` URL.
    pub repo: String,
    pub name: String,
    /// Exact SemVer 2 version with an optional leading `v` and an optional digest: `1.2.3@sha256:…`. Empty
    /// means the newest stable version. [`ChartCache::resolve`] accepts a range; a fetch does not.
    pub version: String,
}

impl ChartRef {
    /// Returns the repository's URL for display: without user, password and query, because a query may
    /// contain a key.
    pub fn repo_shown(&self) -> String {
        url_shown(&self.repo)
    }

    /// Returns the name for display. If the name is a URL, removes user, password and query.
    pub fn name_shown(&self) -> String {
        match self.name.contains("://") {
            true => url_shown(&self.name),
            false => self.name.clone(),
        }
    }
}

impl fmt::Display for ChartRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let short: String = self.version.chars().take(64).collect();
        match (self.name_shown(), short.as_str()) {
            (name, "") => write!(f, "chart {name}, newest version")?,
            (name, version) => write!(f, "chart {name}, version {}", version.escape_debug())?,
        }
        if self.repo.is_empty() {
            Ok(())
        } else {
            write!(f, ", of {}", self.repo_shown())
        }
    }
}

impl fmt::Debug for ChartRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ChartRef({self})")
    }
}

/// A fetched and verified chart.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fetched {
    /// Path of the `.tgz`, whose name is its digest.
    pub path: PathBuf,
    pub sha256: String,
    pub name: String,
    /// The version in the chart's `Chart.yaml`.
    pub version: String,
}

/// Alternative source of charts for a process that cannot reach the repository.
pub trait Fallback: Send + Sync {
    /// Returns the archive. The error text completes a sentence.
    fn fetch(&self, chart: &ChartRef) -> BoxFuture<'_, Result<Vec<u8>, String>>;
}

/// The current credentials, or the reason why they are not available.
pub type CredentialsNow = Result<Arc<Credentials>, Arc<str>>;

/// The charts of a process. No other process may use its folder.
pub struct ChartCache {
    dir: PathBuf,
    /// Credentials without a login, for public charts.
    open: Arc<Credentials>,
    credentials: Option<watch::Receiver<CredentialsNow>>,
    plain_http: bool,
    indexes: IndexStore,
    slots: Mutex<HashMap<ChartRef, Arc<Slot>>>,
    fallback: Option<Arc<dyn Fallback>>,
    source: ChartSource,
    prover: Option<Arc<dyn Prover>>,
    metrics: ChartMetrics,
}

impl fmt::Debug for ChartCache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ChartCache")
            .field("dir", &self.dir)
            .finish_non_exhaustive()
    }
}

/// Entry of one chart. Its lock ensures that only one fetch runs at a time.
type Slot = tokio::sync::Mutex<Memory>;

#[derive(Debug, Default)]
enum Memory {
    #[default]
    Nothing,
    Have(
        Fetched,
        BootTime,
        #[expect(dead_code, reason = "it is held, not read")] Counted,
    ),
    Failed {
        error: Arc<ChartError>,
        times: u32,
        since: BootTime,
        until: BootTime,
    },
}

impl ChartCache {
    /// Opens the cache in `dir` and creates the folder if it is missing.
    ///
    /// # Errors
    /// Returns an error if the folder is not writable.
    pub fn new(dir: PathBuf) -> Result<Self, ChartError> {
        let prepare = |dir: &Path| {
            std::fs::create_dir_all(dir)?;
            for entry in std::fs::read_dir(dir)? {
                let entry = entry?;
                if entry.file_name().to_string_lossy().starts_with(PARTIAL) {
                    if entry.file_type()?.is_dir() {
                        std::fs::remove_dir_all(entry.path())?;
                    } else {
                        std::fs::remove_file(entry.path())?;
                    }
                }
            }
            // Report a full or read-only disk at startup, not at the first fetch.
            partial_file(dir).map(drop)?;
            std::path::absolute(dir)
        };
        let dir = match prepare(&dir) {
            Ok(dir) => dir,
            Err(source) => return Err(ChartError::Folder { dir, source }),
        };
        let open = Credentials::none().map_err(ChartError::Client)?;
        Ok(Self {
            indexes: IndexStore::new(&dir),
            dir,
            open: Arc::new(open),
            credentials: None,
            plain_http: false,
            slots: Mutex::default(),
            fallback: None,
            source: ChartSource::Auto,
            prover: None,
            metrics: ChartMetrics::default(),
        })
    }

    /// Uses the current value of `credentials` for each fetch. While that is an error, fetches fail.
    #[must_use]
    pub fn with_credentials(self, credentials: watch::Receiver<CredentialsNow>) -> Self {
        Self {
            credentials: Some(credentials),
            ..self
        }
    }

    /// Uses plain HTTP for registries and sends credentials over it.
    #[must_use]
    pub fn with_plain_http(self, plain_http: bool) -> Self {
        Self { plain_http, ..self }
    }

    /// Requests charts from `fallback` as `source` defines.
    #[must_use]
    pub fn with_fallback(self, fallback: Arc<dyn Fallback>, source: ChartSource) -> Self {
        Self {
            fallback: Some(fallback),
            source,
            ..self
        }
    }

    /// Accepts only charts that `prover` verifies with the provenance file next to the chart.
    #[must_use]
    pub fn with_prover(self, prover: Arc<dyn Prover>) -> Self {
        Self {
            prover: Some(prover),
            ..self
        }
    }

    /// Records into `metrics`.
    #[must_use]
    pub fn with_metrics(self, metrics: &ChartMetrics) -> Self {
        Self {
            metrics: metrics.clone(),
            ..self
        }
    }

    /// Returns the version that `chart.version`, usually a range, currently resolves to. Caches nothing.
    ///
    /// # Errors
    /// Returns an error if the repository is unreachable or has no matching version.
    pub async fn resolve(&self, chart: &ChartRef) -> Result<String, ChartError> {
        let chart = Arc::new(chart.clone());
        let Some(asked) = Asked::parse(&chart.version) else {
            return Err(ChartError::VersionInvalid { chart });
        };
        let resolved = async {
            if oci::is_meant(&chart) {
                let credentials = self.credentials(&chart)?;
                let way = self.way(&chart, &credentials);
                oci::resolve(&way, &asked.wanted).await
            } else if chart.repo.is_empty() {
                let bytes = local(&chart, String::new(), CHART_LIMIT).await?;
                let inside = {
                    let chart = Arc::clone(&chart);
                    off_thread::run(move || inspected(&chart, &bytes)).await?
                };
                let offered = [inside.version];
                match version::pick(&asked.wanted, &offered, String::as_str) {
                    Some(version) => Ok(version.clone()),
                    None => {
                        let [newest] = offered;
                        let (chart, newest) = (Arc::clone(&chart), Some(newest));
                        Err(ChartError::VersionNotFound { chart, newest })
                    }
                }
            } else {
                let (_, entry) = self.listed(&chart, &asked.wanted).await?;
                Ok(entry.version)
            }
        };
        in_time(&chart, resolved).await
    }

    /// Drops all back-offs, because the credentials have changed.
    pub fn forget_failures(&self) {
        let slots = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
        for slot in slots.values() {
            // A locked entry has a fetch in progress.
            if let Ok(mut memory) = slot.try_lock()
                && matches!(*memory, Memory::Failed { .. })
            {
                *memory = Memory::Nothing;
            }
        }
    }

    /// Returns the chart from the cache, or fetches it. Concurrent callers for the same chart share one fetch
    /// and its result. The cache keeps a failure for 1 to 60 s.
    ///
    /// # Errors
    /// See [`ChartError::fault`].
    pub async fn fetch(&self, chart: &ChartRef) -> Result<Fetched, Arc<ChartError>> {
        let asked = match Asked::parse(&chart.version) {
            None => {
                let chart = Arc::new(chart.clone());
                return Err(Arc::new(ChartError::VersionInvalid { chart }));
            }
            Some(asked) => asked,
        };
        let slot = self.slot(chart);
        let mut memory = slot.lock().await;
        let mut wanted = chart.clone();
        let failures = match &*memory {
            Memory::Have(fetched, ..) => {
                let path = fetched.path.clone();
                if off_thread::run(move || path.exists()).await {
                    self.metrics.hits.inc();
                    return Ok(fetched.clone());
                }
                // Within one process, "newest" always means the version that it meant first.
                if asked.wanted == Wanted::Newest {
                    wanted.version.clone_from(&fetched.version);
                }
                0
            }
            Memory::Failed { error, until, .. } if BootTime::now() < *until => {
                return Err(Arc::clone(error));
            }
            Memory::Failed { times, .. } => *times,
            Memory::Nothing => 0,
        };
        let wanted = Arc::new(wanted);
        match Box::pin(self.load_or_fall_back(&wanted)).await {
            Ok(fetched) => {
                tracing::info!(%chart, version = %fetched.version, sha256 = %fetched.sha256, "chart loaded");
                *memory = Memory::Have(fetched.clone(), BootTime::now(), self.metrics.keeps());
                Ok(fetched)
            }
            Err(error) => {
                let error = Arc::new(error);
                let pause = pause(failures, chance::random::<f64>());
                let since = BootTime::now();
                let until = BootTime(since.0 + pause);
                // A failed fetch of a deleted file does not replace an entry that succeeded before.
                if !matches!(*memory, Memory::Have(..)) {
                    *memory = Memory::Failed {
                        error: Arc::clone(&error),
                        times: failures + 1,
                        since,
                        until,
                    };
                }
                Err(error)
            }
        }
    }

    /// Fetches the chart and returns its version with its digest. Also caches the chart under that version.
    ///
    /// # Errors
    /// See [`Self::fetch`].
    pub async fn pin(&self, chart: &ChartRef) -> Result<String, Arc<ChartError>> {
        let sha256 = self.fetch(chart).await?.sha256;
        let version = chart.version.split('@').next().unwrap_or_default();
        let version = format!("{version}@sha256:{sha256}");
        let mut slots = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(slot) = slots.get(chart).cloned() {
            let pinned = ChartRef {
                version: version.clone(),
                ..chart.clone()
            };
            slots.entry(pinned).or_insert(slot);
        }
        Ok(version)
    }

    fn slot(&self, chart: &ChartRef) -> Arc<Slot> {
        let mut slots = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(slot) = slots.get(chart) {
            return Arc::clone(slot);
        }
        if slots.len() >= REMEMBERED {
            slots.retain(|_, slot| Arc::strong_count(slot) > 1);
        }
        Arc::clone(slots.entry(chart.clone()).or_default())
    }

    async fn load_or_fall_back(&self, chart: &Arc<ChartRef>) -> Result<Fetched, ChartError> {
        let Some(asked) = Asked::parse(&chart.version) else {
            let chart = Arc::clone(chart);
            return Err(ChartError::VersionInvalid { chart });
        };
        let fallback = match (&self.fallback, self.source) {
            (None, _) | (_, ChartSource::Direct) => return self.load(chart, &asked).await,
            (Some(fallback), _) => fallback,
        };
        let error = match self.source {
            ChartSource::Hub => None,
            _ => match self.load(chart, &asked).await {
                Err(error) if error.is_no_way() => Some(error),
                loaded => return loaded,
            },
        };
        let given = async {
            let given = tokio::time::timeout(DEADLINE, fallback.fetch(chart))
                .await
                .unwrap_or_else(|_| Err(format!("no full answer within {} s", DEADLINE.as_secs())));
            let bytes = given.map_err(|problem| ChartError::Hub {
                chart: Arc::clone(chart),
                problem,
            })?;
            let came = Came {
                bytes,
                provenance: None,
                origin: Origin::Fallback,
            };
            self.keep(chart, &asked, came).await
        };
        match (self.counted("hub", chart, given).await, error) {
            // Report the error of the repository, because users can fix that one.
            (Err(ChartError::Hub { problem, .. }), Some(error)) => {
                tracing::warn!(%chart, %problem, "the hub cannot provide the chart either");
                Err(error)
            }
            (given, _) => given,
        }
    }

    /// Records the outcome of a fetch in the metrics and in a span.
    async fn counted(
        &self,
        source: &'static str,
        chart: &ChartRef,
        fetch: impl Future<Output = Result<Fetched, ChartError>>,
    ) -> Result<Fetched, ChartError> {
        let span = tracing::error_span!("chart", %chart, source, outcome = Empty);
        let since = BootTime::now();
        let fetched = fetch.instrument(span.clone()).await;
        let took = BootTime::now().since(since);
        let outcome = self.metrics.fetched(source, took, fetched.as_ref().err());
        span.record("outcome", outcome);
        fetched
    }

    async fn load(&self, chart: &Arc<ChartRef>, asked: &Asked) -> Result<Fetched, ChartError> {
        if matches!(asked.wanted, Wanted::Range(_)) {
            // The hub could not resolve the range. The cause probably affects this process too, so report its
            // own error.
            Box::pin(self.resolve(chart)).await?;
            let chart = Arc::clone(chart);
            return Err(ChartError::Unresolved { chart });
        }
        let proven = self.prover.is_some();
        let fetched = async {
            let came = if oci::is_meant(chart) {
                let credentials = self.credentials(chart)?;
                let pulled = oci::pull(&self.way(chart, &credentials), asked, proven).await?;
                let listed = Listed {
                    name: pulled.name,
                    version: pulled.version,
                    sha256: Some(pulled.sha256),
                    manifest_sha256: Some(pulled.manifest_sha256),
                };
                Came {
                    bytes: pulled.bytes,
                    provenance: pulled.provenance,
                    origin: Origin::Listed(listed),
                }
            } else if chart.repo.is_empty() {
                let bytes = local(chart, String::new(), CHART_LIMIT).await?;
                let beside = local(chart, provenance::SUFFIX.to_owned(), provenance::LIMIT);
                let provenance = provenance::where_asked(proven, beside).await?;
                Came {
                    bytes,
                    provenance,
                    origin: Origin::File,
                }
            } else {
                let (repo, entry) = self.listed(chart, &asked.wanted).await?;
                let credentials = self.credentials(chart)?;
                let way = self.way(chart, &credentials);
                let bytes = way.archive(&repo, &entry).await?;
                let beside = way.provenance(&repo, &entry);
                let provenance = provenance::where_asked(proven, beside).await?;
                let listed = Listed {
                    name: chart.name.clone(),
                    version: entry.version,
                    sha256: entry.digest,
                    manifest_sha256: None,
                };
                Came {
                    bytes,
                    provenance,
                    origin: Origin::Listed(listed),
                }
            };
            self.keep(chart, asked, came).await
        };
        self.counted("repository", chart, in_time(chart, fetched))
            .await
    }

    /// Returns the chart's entry in the index of an HTTP repository.
    async fn listed(
        &self,
        chart: &Arc<ChartRef>,
        wanted: &Wanted,
    ) -> Result<(reqwest::Url, index::Entry), ChartError> {
        let repo = repository(chart)?;
        let credentials = self.credentials(chart)?;
        let index = self
            .indexes
            .read(&self.way(chart, &credentials), &repo)
            .await?;
        let (chart, wanted) = (Arc::clone(chart), wanted.clone());
        let entry = off_thread::run(move || index::find(&chart, &wanted, &index)).await?;
        Ok((repo, entry))
    }

    fn credentials(&self, chart: &Arc<ChartRef>) -> Result<Arc<Credentials>, ChartError> {
        match &self.credentials {
            None => Ok(Arc::clone(&self.open)),
            Some(now) => now.get().map_err(|problem| ChartError::Credentials {
                chart: Arc::clone(chart),
                problem,
            }),
        }
    }

    fn way<'a>(&self, chart: &'a Arc<ChartRef>, credentials: &'a Credentials) -> Way<'a> {
        Way {
            chart,
            credentials,
            plain_http: self.plain_http,
        }
    }

    /// Checks the archive and stores it under its digest.
    async fn keep(
        &self,
        chart: &Arc<ChartRef>,
        asked: &Asked,
        came: Came,
    ) -> Result<Fetched, ChartError> {
        let Came {
            bytes,
            provenance,
            origin,
        } = came;
        let bytes = Arc::new(bytes);
        let (sha256, inside) = {
            let (chart, asked) = (Arc::clone(chart), asked.clone());
            let bytes = Arc::clone(&bytes);
            off_thread::run(move || origin.checked(&chart, &asked, &bytes)).await?
        };
        if let Some(prover) = &self.prover {
            let archive = provenance::Signed {
                dir: self.dir.clone(),
                inside: &inside,
                archive: Arc::clone(&bytes),
                provenance,
            };
            archive.prove(prover.as_ref(), chart).await?;
        }
        let (chart, dir) = (Arc::clone(chart), self.dir.clone());
        off_thread::run(move || {
            let path = dir.join(format!("{sha256}.tgz"));
            match write_file(&dir, &path, &bytes) {
                Ok(()) => Ok(Fetched {
                    path,
                    sha256,
                    name: inside.name,
                    version: inside.version,
                }),
                Err(source) => Err(ChartError::Store { chart, dir, source }),
            }
        })
        .await
    }
}

/// A received archive, with its provenance file if one was requested.
struct Came {
    bytes: Vec<u8>,
    provenance: Option<Vec<u8>>,
    origin: Origin,
}

fn repository(chart: &Arc<ChartRef>) -> Result<reqwest::Url, ChartError> {
    let url = reqwest::Url::parse(&chart.repo);
    url.ok()
        .filter(|url| matches!(url.scheme(), "http" | "https"))
        .ok_or_else(|| ChartError::Address {
            chart: Arc::clone(chart),
        })
}

async fn in_time<T>(
    chart: &Arc<ChartRef>,
    work: impl Future<Output = Result<T, ChartError>>,
) -> Result<T, ChartError> {
    tokio::time::timeout(DEADLINE, work)
        .await
        .unwrap_or_else(|_| {
            Err(ChartError::Deadline {
                chart: Arc::clone(chart),
            })
        })
}

/// Reads the file whose path is the chart's name plus `suffix`.
async fn local(chart: &Arc<ChartRef>, suffix: String, limit: u64) -> Result<Vec<u8>, ChartError> {
    if !chart.name.ends_with(".tgz") {
        return Err(ChartError::Address {
            chart: Arc::clone(chart),
        });
    }
    let chart = Arc::clone(chart);
    off_thread::run(move || {
        let path = format!("{}{suffix}", chart.name);
        let read = || {
            // Reading a pipe or a device could block forever.
            if !std::fs::metadata(&path)?.is_file() {
                return Err(std::io::Error::other("it is not a file"));
            }
            let mut bytes = Vec::new();
            let file = std::fs::File::open(&path)?;
            let limited = std::io::Read::take(file, limit + 1);
            std::io::copy(&mut std::io::BufReader::new(limited), &mut bytes)?;
            Ok(bytes)
        };
        match read() {
            Ok(bytes) if bytes.len() as u64 > limit => Err(ChartError::TooLarge {
                chart,
                what: "the file",
                limit,
            }),
            Ok(bytes) => Ok(bytes),
            Err(source) => Err(ChartError::Local { chart, source }),
        }
    })
    .await
}

fn partial_file(dir: &Path) -> std::io::Result<tempfile::NamedTempFile> {
    tempfile::Builder::new().prefix(PARTIAL).tempfile_in(dir)
}

/// Writes the file atomically.
fn write_file(dir: &Path, path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    let mut file = partial_file(dir)?;
    std::io::Write::write_all(&mut file, bytes)?;
    file.persist(path).map(drop).map_err(|error| error.error)
}

/// Returns the back-off after a failure. It doubles each time, and jitter spreads the retries of several
/// caches.
fn pause(failures: u32, random: f64) -> Duration {
    let full = FIRST_PAUSE
        .saturating_mul(2_u32.saturating_pow(failures))
        .min(LONGEST_PAUSE);
    full.div_f64(2.0) + full.div_f64(2.0).mul_f64(random.clamp(0.0, 1.0))
}
