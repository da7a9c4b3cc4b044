//! Chart cache: fetches and verifies each chart once per process and shares the result between callers.

use std::collections::HashMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use futures::future::BoxFuture;
use krypton_runtime::clock::BootTime;
use krypton_runtime::{chance, off_thread};
use parking_lot::Mutex;
use tokio::sync::watch;

use crate::metrics::{ChartMetrics, GaugeGuard};

mod archive;
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) mod archive_properties;
mod chart_ref;
mod credentials;
mod download;
mod dump;
mod error;
mod files;
pub(crate) mod index;
mod index_store;
mod load;
pub(crate) mod oci;
mod origin;
#[cfg(test)]
mod private_tests;
pub(crate) mod provenance;
pub(crate) mod range;
mod source;
#[cfg(test)]
mod stub_site;
mod target_check;
#[cfg(test)]
mod tests;
pub(crate) mod version;

pub use archive::ArchiveError;
pub use chart_ref::ChartRef;
pub use credentials::{Credentials, CredentialsError};
pub use download::CHART_LIMIT;
pub use dump::CachedChartDump;
pub use error::{CacheError, ChartError, ChartProblem};
pub use provenance::SignatureVerifier;
pub use source::ChartSource;
pub use version::{is_range, parse as exact_version};

use files::{PARTIAL, partial_file};
use index_store::IndexStore;
use version::{RequestedVersion, VersionSelector};

/// Back-off after the first failure. It doubles with each further failure.
const FIRST_BACKOFF: Duration = Duration::from_secs(2);
/// Longest back-off after a failure.
const MAX_BACKOFF: Duration = Duration::from_secs(60);
/// Maximum number of cached charts. A fleet uses one; the others are older versions.
const MAX_ENTRIES: usize = 256;

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
    /// Credentials without a login, for public charts. Created at the first use, because the certificates of the
    /// system's authorities take memory.
    anonymous: OnceLock<Arc<Credentials>>,
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
    pub fn new(dir: PathBuf) -> Result<Self, CacheError> {
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
            Err(source) => return Err(CacheError::Folder { dir, source }),
        };
        Ok(Self {
            indexes: IndexStore::new(&dir),
            dir,
            anonymous: OnceLock::new(),
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
    pub fn with_credentials(mut self, credentials: watch::Receiver<CurrentCredentials>) -> Self {
        self.credentials = Some(credentials);
        self
    }

    /// Uses plain HTTP for registries and sends credentials over it.
    #[must_use]
    pub fn with_plain_http(mut self, plain_http: bool) -> Self {
        self.plain_http = plain_http;
        self
    }

    /// Requests charts from `fallback` as `source` defines.
    #[must_use]
    pub fn with_fallback(mut self, fallback: Arc<dyn Fallback>, source: ChartSource) -> Self {
        self.fallback = Some(fallback);
        self.source = source;
        self
    }

    /// Accepts only charts that `verifier` verifies with the provenance file next to the chart.
    #[must_use]
    pub fn with_signature_verifier(mut self, verifier: Arc<dyn SignatureVerifier>) -> Self {
        self.signature_verifier = Some(verifier);
        self
    }

    /// Records into `metrics`.
    #[must_use]
    pub fn with_metrics(mut self, metrics: &ChartMetrics) -> Self {
        self.metrics = metrics.clone();
        self
    }

    /// Drops all back-offs, because the credentials have changed.
    pub fn forget_failures(&self) {
        let entries = self.entries.lock();
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
    /// See [`ChartProblem`].
    pub async fn fetch(&self, chart: &ChartRef) -> Result<FetchedChart, Arc<ChartError>> {
        let Some(requested) = RequestedVersion::parse(&chart.version) else {
            let error = ChartError::new(chart, ChartProblem::VersionInvalid);
            return Err(Arc::new(error));
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
            Err(problem) => {
                let error = Arc::new(ChartError::new(&to_load, problem));
                let backoff = backoff(failures, chance::random::<f64>());
                let since = BootTime::now();
                let until = since + backoff;
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
        let mut entries = self.entries.lock();
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
        let mut entries = self.entries.lock();
        if let Some(entry) = entries.get(chart) {
            return Arc::clone(entry);
        }
        if entries.len() >= MAX_ENTRIES {
            entries.retain(|_, entry| Arc::strong_count(entry) > 1);
        }
        Arc::clone(entries.entry(chart.clone()).or_default())
    }
}

/// Returns the back-off after a failure. It doubles each time, and jitter spreads the retries of several
/// caches.
fn backoff(failures: u32, random: f64) -> Duration {
    let backoff = FIRST_BACKOFF
        .saturating_mul(2_u32.saturating_pow(failures))
        .min(MAX_BACKOFF);
    backoff.div_f64(2.0) + backoff.div_f64(2.0).mul_f64(random.clamp(0.0, 1.0))
}
