//! The chart cache: each chart is fetched and checked once per process, whoever asks, however often.

use std::collections::HashMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures::future::BoxFuture;
use thiserror::Error;

use crate::clock::Boot;

mod archive;
mod download;
mod index;
#[cfg(test)]
mod tests;
mod version;

pub use archive::ArchiveError;
pub use download::CHART_LIMIT;

/// The whole of a fetch, index and chart.
const DEADLINE: Duration = Duration::from_secs(60);
/// The first pause after a failure; each further one is twice as long.
const FIRST_PAUSE: Duration = Duration::from_secs(2);
/// The longest pause after a failure.
const LONGEST_PAUSE: Duration = Duration::from_secs(60);
/// Distinct charts remembered. A fleet runs one; the rest are former ones.
const REMEMBERED: usize = 256;
/// Prefix of files that are not complete.
const PARTIAL: &str = ".partial-";

/// Which chart is meant.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct ChartRef {
    /// The repository's URL; empty when `name` is the path of a local `.tgz`.
    pub repo: String,
    pub name: String,
    /// Exact SemVer 2, a leading `v` allowed; empty means the newest stable one.
    pub version: String,
}

impl ChartRef {
    /// The repository's URL without user and password, for people.
    fn repo_shown(&self) -> String {
        match reqwest::Url::parse(&self.repo) {
            Ok(mut url) => {
                let hidden = url.set_username("").and_then(|()| url.set_password(None));
                if hidden.is_ok() {
                    url.to_string()
                } else {
                    "(not a URL)".to_owned()
                }
            }
            Err(_) => match self.repo.rsplit_once('@') {
                Some((_, host)) => host.escape_debug().to_string(),
                None => self.repo.escape_debug().to_string(),
            },
        }
    }
}

impl fmt::Display for ChartRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let short: String = self.version.chars().take(64).collect();
        match (self.name.as_str(), short.as_str()) {
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

/// A chart that is here and was checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fetched {
    /// The `.tgz`, named by its digest.
    pub path: PathBuf,
    pub sha256: String,
    pub name: String,
    /// As in the chart's Chart.yaml.
    pub version: String,
}

/// What a failed fetch means for a Tenant: each is a condition reason of the original operator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChartFault {
    NotLoaded,
    VersionNotFound,
    VersionInvalid,
}

/// Why a chart is not there. Every message names repository, chart, version and the remedy.
#[derive(Debug, Error)]
pub enum ChartError {
    #[error("chart version invalid: {chart}; set an exact SemVer 2 version such as 1.2.3")]
    VersionInvalid { chart: Arc<ChartRef> },
    #[error("chart version not found in repository: {chart}; {}", offer(.newest.as_deref()))]
    VersionNotFound {
        chart: Arc<ChartRef>,
        newest: Option<String>,
    },
    #[error(
        "chart not loaded: {chart}: OCI registries are not supported yet; \
         set an http(s) chart repository or the path of a .tgz"
    )]
    Oci { chart: Arc<ChartRef> },
    #[error(
        "chart not loaded: {chart}: the repository must be an http(s) URL; \
         for a local chart leave it empty and name the path of a .tgz"
    )]
    Address { chart: Arc<ChartRef> },
    #[error("chart not loaded: {chart}: no such chart in the repository; check its name")]
    Unlisted { chart: Arc<ChartRef> },
    #[error(
        "chart not loaded; repo unreachable? {chart}: {attempt} failed; check its address and the way to it"
    )]
    Unreachable {
        chart: Arc<ChartRef>,
        attempt: &'static str,
        #[source]
        source: reqwest::Error,
    },
    #[error("chart not loaded; repo unreachable? {chart}: no full answer within {} s; check the way to it", DEADLINE.as_secs())]
    Deadline { chart: Arc<ChartRef> },
    #[error(
        "chart not loaded; repo unreachable? {chart}: {attempt} was answered with {status}; check its address"
    )]
    Refused {
        chart: Arc<ChartRef>,
        attempt: &'static str,
        status: u16,
    },
    #[error("chart not loaded: {chart}: {what} is larger than {} MiB and was not read to its end; is it the right repository?", limit >> 20)]
    TooLarge {
        chart: Arc<ChartRef>,
        what: &'static str,
        limit: u64,
    },
    #[error(
        "chart not loaded: {chart}: index.yaml is not the index of a chart repository; check its address"
    )]
    Index {
        chart: Arc<ChartRef>,
        #[source]
        source: serde_saphyr::Error,
    },
    #[error(
        "chart not loaded: {chart}: the index names no usable address for it; the repository needs repair"
    )]
    Link { chart: Arc<ChartRef> },
    #[error(
        "chart not loaded: {chart}: sha256 is {found}, the index says {wanted}; the chart was changed after it was indexed"
    )]
    Digest {
        chart: Arc<ChartRef>,
        wanted: String,
        found: String,
    },
    #[error(
        "chart not loaded: {chart}: the archive is refused; get the chart from its author again"
    )]
    Archive {
        chart: Arc<ChartRef>,
        #[source]
        source: ArchiveError,
    },
    #[error(
        "chart not loaded: {chart}: the archive holds chart {found}; the repository needs repair"
    )]
    Other { chart: Arc<ChartRef>, found: String },
    #[error("chart not loaded: {chart}: reading the file failed; check the path")]
    Local {
        chart: Arc<ChartRef>,
        #[source]
        source: std::io::Error,
    },
    #[error("chart not loaded: {chart}: writing it to {} failed", .dir.display())]
    Store {
        chart: Arc<ChartRef>,
        dir: PathBuf,
        #[source]
        source: std::io::Error,
    },
    #[error("the chart cache {} cannot be used; it must be a writable folder", .dir.display())]
    Folder {
        dir: PathBuf,
        #[source]
        source: std::io::Error,
    },
    #[error("the HTTP client of the chart cache could not be made")]
    Client(#[source] reqwest::Error),
}

fn offer(newest: Option<&str>) -> String {
    match newest {
        Some(newest) => format!("the newest stable one there is {newest}"),
        None => "there is no stable one; set a version".to_owned(),
    }
}

impl ChartError {
    /// Whether another way to the chart is worth a try.
    fn is_no_way(&self) -> bool {
        match self {
            Self::Unreachable { .. } | Self::Deadline { .. } | Self::Refused { .. } => true,
            Self::Local { source, .. } => source.kind() == std::io::ErrorKind::NotFound,
            _ => false,
        }
    }

    /// Which condition it is.
    pub fn fault(&self) -> ChartFault {
        match self {
            Self::VersionInvalid { .. } => ChartFault::VersionInvalid,
            Self::VersionNotFound { .. } => ChartFault::VersionNotFound,
            _ => ChartFault::NotLoaded,
        }
    }
}

/// Where else a chart may be had when there is no way to its repository.
pub trait Fallback: Send + Sync {
    /// The archive. The error completes a sentence.
    fn fetch(&self, chart: &ChartRef) -> BoxFuture<'_, Result<Vec<u8>, String>>;
}

/// The charts of a process. Its folder belongs to it alone.
pub struct ChartCache {
    dir: PathBuf,
    http: reqwest::Client,
    slots: Mutex<HashMap<ChartRef, Arc<Slot>>>,
    fallback: Option<Arc<dyn Fallback>>,
}

impl fmt::Debug for ChartCache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ChartCache")
            .field("dir", &self.dir)
            .finish_non_exhaustive()
    }
}

/// Where an archive comes from, and what it must hold therefore.
enum Origin {
    Index(index::Entry),
    /// The name is a path.
    File,
    Fallback,
}

/// One chart; its lock makes the flight single.
type Slot = tokio::sync::Mutex<Memory>;

#[derive(Debug, Default)]
enum Memory {
    #[default]
    Nothing,
    Have(Fetched),
    Failed {
        error: Arc<ChartError>,
        times: u32,
        until: Boot,
    },
}

impl ChartCache {
    /// Opens the cache in `dir`, which is created when missing.
    ///
    /// # Errors
    /// When the folder cannot be written to.
    pub fn new(dir: PathBuf) -> Result<Self, ChartError> {
        let prepare = |dir: &Path| {
            std::fs::create_dir_all(dir)?;
            for entry in std::fs::read_dir(dir)? {
                let entry = entry?;
                if entry.file_name().to_string_lossy().starts_with(PARTIAL) {
                    std::fs::remove_file(entry.path())?;
                }
            }
            // A full or read-only disk is better noticed now.
            partial_file(dir).map(drop)?;
            std::path::absolute(dir)
        };
        let dir = match prepare(&dir) {
            Ok(dir) => dir,
            Err(source) => return Err(ChartError::Folder { dir, source }),
        };
        let http = download::client().map_err(ChartError::Client)?;
        Ok(Self {
            dir,
            http,
            slots: Mutex::default(),
            fallback: None,
        })
    }

    /// Asks `fallback` for what cannot be fetched from where it is kept.
    #[must_use]
    pub fn with_fallback(self, fallback: Arc<dyn Fallback>) -> Self {
        Self {
            fallback: Some(fallback),
            ..self
        }
    }

    /// The chart, from the cache or from where it is kept. Callers that ask for the same chart share
    /// one fetch and its result; a failure is remembered for 1 to 60 s.
    ///
    /// # Errors
    /// See [`ChartError::fault`].
    pub async fn fetch(&self, chart: &ChartRef) -> Result<Fetched, Arc<ChartError>> {
        if !chart.version.is_empty() && version::parse(&chart.version).is_none() {
            let chart = Arc::new(chart.clone());
            return Err(Arc::new(ChartError::VersionInvalid { chart }));
        }
        let slot = self.slot(chart);
        let mut memory = slot.lock().await;
        let mut wanted = chart.clone();
        let failures = match &*memory {
            Memory::Have(fetched) => {
                if tokio::fs::try_exists(&fetched.path).await.unwrap_or(false) {
                    return Ok(fetched.clone());
                }
                // "Newest" means what it meant first, for as long as the process lives.
                wanted.version.clone_from(&fetched.version);
                0
            }
            Memory::Failed { error, until, .. } if Boot::now() < *until => {
                return Err(Arc::clone(error));
            }
            Memory::Failed { times, .. } => *times,
            Memory::Nothing => 0,
        };
        match Box::pin(self.load_or_fall_back(&Arc::new(wanted))).await {
            Ok(fetched) => {
                tracing::info!(%chart, version = %fetched.version, sha256 = %fetched.sha256, "chart loaded");
                *memory = Memory::Have(fetched.clone());
                Ok(fetched)
            }
            Err(error) => {
                let error = Arc::new(error);
                let pause = pause(failures, rand::random::<f64>());
                let until = Boot(Boot::now().0 + pause);
                // What was there once is not forgotten over a failure to get it back.
                if !matches!(*memory, Memory::Have(_)) {
                    *memory = Memory::Failed {
                        error: Arc::clone(&error),
                        times: failures + 1,
                        until,
                    };
                }
                Err(error)
            }
        }
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
        let error = match self.load(chart).await {
            Err(error) if error.is_no_way() => error,
            loaded => return loaded,
        };
        let Some(fallback) = &self.fallback else {
            return Err(error);
        };
        let given = tokio::time::timeout(DEADLINE, fallback.fetch(chart))
            .await
            .unwrap_or_else(|_| Err(format!("no full answer within {} s", DEADLINE.as_secs())));
        match given {
            Ok(bytes) => self.keep(chart, bytes, Origin::Fallback).await,
            // A person is told of the repository: the other way is not theirs to mend.
            Err(problem) => {
                tracing::warn!(%chart, %problem, "the chart is not to be had from the hub either");
                Err(error)
            }
        }
    }

    async fn load(&self, chart: &Arc<ChartRef>) -> Result<Fetched, ChartError> {
        let fetched = async {
            if chart.repo.is_empty() {
                let bytes = local(chart).await?;
                self.keep(chart, bytes, Origin::File).await
            } else {
                let repo = repository(chart)?;
                let index = download::index(&self.http, chart, &repo).await?;
                let entry = {
                    let chart = Arc::clone(chart);
                    off_thread(move || index::find(&chart, &index)).await?
                };
                let bytes = download::chart(&self.http, chart, &repo, &entry).await?;
                self.keep(chart, bytes, Origin::Index(entry)).await
            }
        };
        tokio::time::timeout(DEADLINE, fetched)
            .await
            .unwrap_or_else(|_| {
                Err(ChartError::Deadline {
                    chart: Arc::clone(chart),
                })
            })
    }

    /// Checks the archive and writes it under its digest.
    async fn keep(
        &self,
        chart: &Arc<ChartRef>,
        bytes: Vec<u8>,
        origin: Origin,
    ) -> Result<Fetched, ChartError> {
        let chart = Arc::clone(chart);
        let dir = self.dir.clone();
        off_thread(move || {
            let sha256 = krypton_common::fingerprint::sha256_hex(&bytes);
            let digest = match &origin {
                Origin::Index(entry) => entry.digest.as_deref(),
                Origin::File | Origin::Fallback => None,
            };
            if let Some(wanted) = digest.filter(|wanted| *wanted != sha256) {
                let (wanted, found) = (wanted.escape_debug().to_string(), sha256);
                return Err(ChartError::Digest {
                    chart,
                    wanted,
                    found,
                });
            }
            let inside = match archive::inspect(&bytes) {
                Ok(inside) => inside,
                Err(source) => return Err(ChartError::Archive { chart, source }),
            };
            let found = || format!("{} {}", inside.name, inside.version);
            match &origin {
                Origin::Index(entry)
                    if inside.name != chart.name
                        || !version::same(&inside.version, &entry.version) =>
                {
                    let found = found();
                    return Err(ChartError::Other { chart, found });
                }
                Origin::Fallback if !chart.repo.is_empty() && inside.name != chart.name => {
                    let found = found();
                    return Err(ChartError::Other { chart, found });
                }
                Origin::File | Origin::Fallback
                    if !chart.version.is_empty()
                        && !version::same(&inside.version, &chart.version) =>
                {
                    return Err(ChartError::VersionNotFound {
                        chart,
                        newest: Some(inside.version),
                    });
                }
                _ => {}
            }
            let path = dir.join(format!("{sha256}.tgz"));
            let written = partial_file(&dir).and_then(|mut file| {
                std::io::Write::write_all(&mut file, &bytes)?;
                file.persist(&path).map_err(|error| error.error)
            });
            match written {
                Ok(_) => Ok(Fetched {
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

fn repository(chart: &Arc<ChartRef>) -> Result<reqwest::Url, ChartError> {
    let url = reqwest::Url::parse(&chart.repo);
    match url.as_ref().map(reqwest::Url::scheme) {
        Ok("http" | "https") => url.map_err(|_| ChartError::Address {
            chart: Arc::clone(chart),
        }),
        Ok("oci") => Err(ChartError::Oci {
            chart: Arc::clone(chart),
        }),
        _ => Err(ChartError::Address {
            chart: Arc::clone(chart),
        }),
    }
}

async fn local(chart: &Arc<ChartRef>) -> Result<Vec<u8>, ChartError> {
    if chart.name.starts_with("oci://") {
        return Err(ChartError::Oci {
            chart: Arc::clone(chart),
        });
    }
    if !chart.name.ends_with(".tgz") {
        return Err(ChartError::Address {
            chart: Arc::clone(chart),
        });
    }
    let chart = Arc::clone(chart);
    off_thread(move || {
        let read = || {
            // A pipe or a device of that name would be read for ever.
            if !std::fs::metadata(&chart.name)?.is_file() {
                return Err(std::io::Error::other("it is not a file"));
            }
            let mut bytes = Vec::new();
            let file = std::fs::File::open(&chart.name)?;
            let limited = std::io::Read::take(file, download::CHART_LIMIT + 1);
            std::io::copy(&mut std::io::BufReader::new(limited), &mut bytes)?;
            Ok(bytes)
        };
        match read() {
            Ok(bytes) if bytes.len() as u64 > download::CHART_LIMIT => {
                let limit = download::CHART_LIMIT;
                Err(ChartError::TooLarge {
                    chart,
                    what: "the file",
                    limit,
                })
            }
            Ok(bytes) => Ok(bytes),
            Err(source) => Err(ChartError::Local { chart, source }),
        }
    })
    .await
}

fn partial_file(dir: &Path) -> std::io::Result<tempfile::NamedTempFile> {
    tempfile::Builder::new().prefix(PARTIAL).tempfile_in(dir)
}

/// How long a failure is remembered: twice as long each time, and never the same for two caches.
fn pause(failures: u32, random: f64) -> Duration {
    let full = FIRST_PAUSE
        .saturating_mul(2_u32.saturating_pow(failures))
        .min(LONGEST_PAUSE);
    full.div_f64(2.0) + full.div_f64(2.0).mul_f64(random.clamp(0.0, 1.0))
}

async fn off_thread<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => result,
        Err(error) => match error.try_into_panic() {
            Ok(panic) => std::panic::resume_unwind(panic),
            // Blocking tasks are cancelled only with their runtime, and this one goes with it.
            Err(_) => std::future::pending().await,
        },
    }
}
