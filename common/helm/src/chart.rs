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

use crate::metrics::{ChartMetrics, GaugeGuard};

mod archive;
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) mod archive_properties;
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
mod target_check;
#[cfg(test)]
mod tests;
pub(crate) mod version;

pub use archive::ArchiveError;
pub use cache_state::CacheState;
pub use credentials::{Credentials, CredentialsError};
pub use download::CHART_LIMIT;
pub use error::{ChartError, ChartFault};
pub use provenance::SignatureVerifier;
pub use source::ChartSource;
pub use version::{exact_version, is_range};

use download::RepositoryClient;
use index_store::IndexStore;
use origin::{ListedChart, Origin, inspect};
use version::{RequestedVersion, VersionSelector};

/// Deadline of a whole fetch, index and chart together.
const DEADLINE: Duration = Duration::from_secs(60);
/// Back-off after the first failure. It doubles with each further failure.
const FIRST_BACKOFF: Duration = Duration::from_secs(2);
/// Longest back-off after a failure.
const MAX_BACKOFF: Duration = Duration::from_secs(60);
/// Maximum number of cached charts. A fleet uses one; the others are older versions.
const MAX_ENTRIES: usize = 256;
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
pub struct FetchedChart {
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
pub type CurrentCredentials = Result<Arc<Credentials>, Arc<str>>;

/// The charts of a process. No other process may use its folder.
pub struct ChartCache {
    dir: PathBuf,
    /// Credentials without a login, for public charts.
    anonymous: Arc<Credentials>,
    credentials: Option<watch::Receiver<CurrentCredentials>>,
    plain_http: bool,
    indexes: IndexStore,
    entries: Mutex<HashMap<ChartRef, Arc<CacheEntry>>>,
    fallback: Option<Arc<dyn Fallback>>,
    source: ChartSource,
    signature_verifier: Option<Arc<dyn SignatureVerifier>>,
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
type CacheEntry = tokio::sync::Mutex<EntryState>;

#[derive(Debug, Default)]
enum EntryState {
    #[default]
    Empty,
    Loaded(
        FetchedChart,
        BootTime,
        #[expect(dead_code, reason = "it is held, not read")] GaugeGuard,
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
        let prepare_folder = |dir: &Path| {
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
        let dir = match prepare_folder(&dir) {
            Ok(dir) => dir,
            Err(source) => return Err(ChartError::Folder { dir, source }),
        };
        let anonymous = Credentials::none().map_err(ChartError::Client)?;
        Ok(Self {
            indexes: IndexStore::new(&dir),
            dir,
            anonymous: Arc::new(anonymous),
            credentials: None,
            plain_http: false,
            entries: Mutex::default(),
            fallback: None,
            source: ChartSource::Auto,
            signature_verifier: None,
            metrics: ChartMetrics::default(),
        })
    }

    /// Uses the current value of `credentials` for each fetch. While that is an error, fetches fail.
    #[must_use]
    pub fn with_credentials(self, credentials: watch::Receiver<CurrentCredentials>) -> Self {
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

    /// Accepts only charts that `verifier` verifies with the provenance file next to the chart.
    #[must_use]
    pub fn with_signature_verifier(self, verifier: Arc<dyn SignatureVerifier>) -> Self {
        Self {
            signature_verifier: Some(verifier),
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
        let Some(requested) = RequestedVersion::parse(&chart.version) else {
            return Err(ChartError::VersionInvalid { chart });
        };
        let resolved = async {
            if oci::is_oci(&chart) {
                let credentials = self.credentials(&chart)?;
                let client = self.client(&chart, &credentials);
                oci::resolve(&client, &requested.selector).await
            } else if chart.repo.is_empty() {
                let bytes = read_local_file(&chart, String::new(), CHART_LIMIT).await?;
                let metadata = {
                    let chart = Arc::clone(&chart);
                    off_thread::run(move || inspect(&chart, &bytes)).await?
                };
                let offered = [metadata.version];
                match version::pick(&requested.selector, &offered, String::as_str) {
                    Some(version) => Ok(version.clone()),
                    None => {
                        let [newest] = offered;
                        let (chart, newest) = (Arc::clone(&chart), Some(newest));
                        Err(ChartError::VersionNotFound { chart, newest })
                    }
                }
            } else {
                let (_, entry) = self.index_entry(&chart, &requested.selector).await?;
                Ok(entry.version)
            }
        };
        with_deadline(&chart, resolved).await
    }

    /// Drops all back-offs, because the credentials have changed.
    pub fn forget_failures(&self) {
        let entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        for entry in entries.values() {
            // A locked entry has a fetch in progress.
            if let Ok(mut state) = entry.try_lock()
                && matches!(*state, EntryState::Failed { .. })
            {
                *state = EntryState::Empty;
            }
        }
    }

    /// Returns the chart from the cache, or fetches it. Concurrent callers for the same chart share one fetch
    /// and its result. The cache keeps a failure for 1 to 60 s.
    ///
    /// # Errors
    /// See [`ChartError::fault`].
    pub async fn fetch(&self, chart: &ChartRef) -> Result<FetchedChart, Arc<ChartError>> {
        let requested = match RequestedVersion::parse(&chart.version) {
            None => {
                let chart = Arc::new(chart.clone());
                return Err(Arc::new(ChartError::VersionInvalid { chart }));
            }
            Some(requested) => requested,
        };
        let entry = self.entry(chart);
        let mut state = entry.lock().await;
        let mut to_load = chart.clone();
        let failures = match &*state {
            EntryState::Loaded(fetched, ..) => {
                let path = fetched.path.clone();
                if off_thread::run(move || path.exists()).await {
                    self.metrics.hits.inc();
                    return Ok(fetched.clone());
                }
                // Within one process, "newest" always means the version that it meant first.
                if requested.selector == VersionSelector::Newest {
                    to_load.version.clone_from(&fetched.version);
                }
                0
            }
            EntryState::Failed { error, until, .. } if BootTime::now() < *until => {
                return Err(Arc::clone(error));
            }
            EntryState::Failed { times, .. } => *times,
            EntryState::Empty => 0,
        };
        let to_load = Arc::new(to_load);
        match Box::pin(self.load_or_fall_back(&to_load)).await {
            Ok(fetched) => {
                tracing::info!(%chart, version = %fetched.version, sha256 = %fetched.sha256, "chart loaded");
                *state = EntryState::Loaded(
                    fetched.clone(),
                    BootTime::now(),
                    self.metrics.count_cached(),
                );
                Ok(fetched)
            }
            Err(error) => {
                let error = Arc::new(error);
                let backoff = backoff(failures, chance::random::<f64>());
                let since = BootTime::now();
                let until = BootTime(since.0 + backoff);
                // A failed fetch of a deleted file does not replace an entry that succeeded before.
                if !matches!(*state, EntryState::Loaded(..)) {
                    *state = EntryState::Failed {
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
        let mut entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(entry) = entries.get(chart).cloned() {
            let pinned = ChartRef {
                version: version.clone(),
                ..chart.clone()
            };
            entries.entry(pinned).or_insert(entry);
        }
        Ok(version)
    }

    fn entry(&self, chart: &ChartRef) -> Arc<CacheEntry> {
        let mut entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(entry) = entries.get(chart) {
            return Arc::clone(entry);
        }
        if entries.len() >= MAX_ENTRIES {
            entries.retain(|_, entry| Arc::strong_count(entry) > 1);
        }
        Arc::clone(entries.entry(chart.clone()).or_default())
    }

    async fn load_or_fall_back(&self, chart: &Arc<ChartRef>) -> Result<FetchedChart, ChartError> {
        let Some(requested) = RequestedVersion::parse(&chart.version) else {
            let chart = Arc::clone(chart);
            return Err(ChartError::VersionInvalid { chart });
        };
        let fallback = match (&self.fallback, self.source) {
            (None, _) | (_, ChartSource::Direct) => return self.load(chart, &requested).await,
            (Some(fallback), _) => fallback,
        };
        let error = match self.source {
            ChartSource::Hub => None,
            _ => match self.load(chart, &requested).await {
                Err(error) if error.allows_fallback() => Some(error),
                loaded => return loaded,
            },
        };
        let fetch = async {
            let response = tokio::time::timeout(DEADLINE, fallback.fetch(chart))
                .await
                .unwrap_or_else(|_| Err(format!("no full answer within {} s", DEADLINE.as_secs())));
            let bytes = response.map_err(|problem| ChartError::Hub {
                chart: Arc::clone(chart),
                problem,
            })?;
            let archive = ReceivedArchive {
                bytes,
                provenance: None,
                origin: Origin::Fallback,
            };
            self.verify_and_store(chart, &requested, archive).await
        };
        match (self.record_fetch("hub", chart, fetch).await, error) {
            // Report the error of the repository, because users can fix that one.
            (Err(ChartError::Hub { problem, .. }), Some(error)) => {
                tracing::warn!(%chart, %problem, "the hub cannot provide the chart either");
                Err(error)
            }
            (fetched, _) => fetched,
        }
    }

    /// Records the outcome of a fetch in the metrics and in a span.
    async fn record_fetch(
        &self,
        source: &'static str,
        chart: &ChartRef,
        fetch: impl Future<Output = Result<FetchedChart, ChartError>>,
    ) -> Result<FetchedChart, ChartError> {
        let span = tracing::error_span!("chart", %chart, source, outcome = Empty);
        let started = BootTime::now();
        let fetched = fetch.instrument(span.clone()).await;
        let duration = BootTime::now().since(started);
        let outcome = self
            .metrics
            .record_fetch(source, duration, fetched.as_ref().err());
        span.record("outcome", outcome);
        fetched
    }

    async fn load(
        &self,
        chart: &Arc<ChartRef>,
        requested: &RequestedVersion,
    ) -> Result<FetchedChart, ChartError> {
        if matches!(requested.selector, VersionSelector::Range(_)) {
            // The hub could not resolve the range. The cause probably affects this process too, so report its
            // own error.
            Box::pin(self.resolve(chart)).await?;
            let chart = Arc::clone(chart);
            return Err(ChartError::Unresolved { chart });
        }
        let needs_provenance = self.signature_verifier.is_some();
        let fetch = async {
            let archive = if oci::is_oci(chart) {
                let credentials = self.credentials(chart)?;
                let client = self.client(chart, &credentials);
                let pulled = oci::pull(&client, requested, needs_provenance).await?;
                let listed = ListedChart {
                    name: pulled.name,
                    version: pulled.version,
                    sha256: Some(pulled.sha256),
                    manifest_sha256: Some(pulled.manifest_sha256),
                };
                ReceivedArchive {
                    bytes: pulled.bytes,
                    provenance: pulled.provenance,
                    origin: Origin::Listed(listed),
                }
            } else if chart.repo.is_empty() {
                let bytes = read_local_file(chart, String::new(), CHART_LIMIT).await?;
                let suffix = provenance::SUFFIX.to_owned();
                let read = read_local_file(chart, suffix, provenance::LIMIT);
                let provenance = provenance::fetch_if(needs_provenance, read).await?;
                ReceivedArchive {
                    bytes,
                    provenance,
                    origin: Origin::File,
                }
            } else {
                let (repo, entry) = self.index_entry(chart, &requested.selector).await?;
                let credentials = self.credentials(chart)?;
                let client = self.client(chart, &credentials);
                let bytes = client.archive(&repo, &entry).await?;
                let download = client.provenance(&repo, &entry);
                let provenance = provenance::fetch_if(needs_provenance, download).await?;
                let listed = ListedChart {
                    name: chart.name.clone(),
                    version: entry.version,
                    sha256: entry.digest,
                    manifest_sha256: None,
                };
                ReceivedArchive {
                    bytes,
                    provenance,
                    origin: Origin::Listed(listed),
                }
            };
            self.verify_and_store(chart, requested, archive).await
        };
        self.record_fetch("repository", chart, with_deadline(chart, fetch))
            .await
    }

    /// Returns the chart's entry in the index of an HTTP repository.
    async fn index_entry(
        &self,
        chart: &Arc<ChartRef>,
        selector: &VersionSelector,
    ) -> Result<(reqwest::Url, index::IndexEntry), ChartError> {
        let repo = repository_url(chart)?;
        let credentials = self.credentials(chart)?;
        let index = self
            .indexes
            .read(&self.client(chart, &credentials), &repo)
            .await?;
        let (chart, selector) = (Arc::clone(chart), selector.clone());
        let entry = off_thread::run(move || index::find_entry(&chart, &selector, &index)).await?;
        Ok((repo, entry))
    }

    fn credentials(&self, chart: &Arc<ChartRef>) -> Result<Arc<Credentials>, ChartError> {
        match &self.credentials {
            None => Ok(Arc::clone(&self.anonymous)),
            Some(current) => current.get().map_err(|problem| ChartError::Credentials {
                chart: Arc::clone(chart),
                problem,
            }),
        }
    }

    fn client<'a>(
        &self,
        chart: &'a Arc<ChartRef>,
        credentials: &'a Credentials,
    ) -> RepositoryClient<'a> {
        RepositoryClient {
            chart,
            credentials,
            plain_http: self.plain_http,
        }
    }

    /// Checks the archive and stores it under its digest.
    async fn verify_and_store(
        &self,
        chart: &Arc<ChartRef>,
        requested: &RequestedVersion,
        archive: ReceivedArchive,
    ) -> Result<FetchedChart, ChartError> {
        let ReceivedArchive {
            bytes,
            provenance,
            origin,
        } = archive;
        let bytes = Arc::new(bytes);
        let (sha256, metadata) = {
            let (chart, requested) = (Arc::clone(chart), requested.clone());
            let bytes = Arc::clone(&bytes);
            off_thread::run(move || origin.verify(&chart, &requested, &bytes)).await?
        };
        if let Some(verifier) = &self.signature_verifier {
            let signed = provenance::SignedChart {
                dir: self.dir.clone(),
                metadata: &metadata,
                archive: Arc::clone(&bytes),
                provenance,
            };
            signed.verify(verifier.as_ref(), chart).await?;
        }
        let (chart, dir) = (Arc::clone(chart), self.dir.clone());
        off_thread::run(move || {
            let path = dir.join(format!("{sha256}.tgz"));
            match write_file(&dir, &path, &bytes) {
                Ok(()) => Ok(FetchedChart {
                    path,
                    sha256,
                    name: metadata.name,
                    version: metadata.version,
                }),
                Err(source) => Err(ChartError::Store { chart, dir, source }),
            }
        })
        .await
    }
}

/// A received archive, with its provenance file if one was requested.
struct ReceivedArchive {
    bytes: Vec<u8>,
    provenance: Option<Vec<u8>>,
    origin: Origin,
}

fn repository_url(chart: &Arc<ChartRef>) -> Result<reqwest::Url, ChartError> {
    let url = reqwest::Url::parse(&chart.repo);
    url.ok()
        .filter(|url| matches!(url.scheme(), "http" | "https"))
        .ok_or_else(|| ChartError::Address {
            chart: Arc::clone(chart),
        })
}

async fn with_deadline<T>(
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
async fn read_local_file(
    chart: &Arc<ChartRef>,
    suffix: String,
    limit: u64,
) -> Result<Vec<u8>, ChartError> {
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
fn backoff(failures: u32, random: f64) -> Duration {
    let backoff = FIRST_BACKOFF
        .saturating_mul(2_u32.saturating_pow(failures))
        .min(MAX_BACKOFF);
    backoff.div_f64(2.0) + backoff.div_f64(2.0).mul_f64(random.clamp(0.0, 1.0))
}
