//! Loads charts and resolves versions: asks the repository, a local file or the hub, then checks and stores what it
//! gets.

use std::sync::Arc;
use std::time::Duration;

use krypton_runtime::clock::BootTime;
use krypton_runtime::newest::Newest as _;
use krypton_runtime::off_thread;
use tracing::Instrument as _;
use tracing::field::Empty;

use super::credentials::Credentials;
use super::download::{CHART_LIMIT, RepositoryClient};
use super::files::write_file;
use super::origin::{ListedChart, Origin, inspect};
use super::version::{self, RequestedVersion, VersionSelector};
use super::{ChartCache, ChartError, ChartRef, ChartSource, FetchedChart, index, oci, provenance};

/// Deadline of a whole fetch, index and chart together.
const DEADLINE: Duration = Duration::from_secs(60);

impl ChartCache {
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

    pub(super) async fn load_or_fall_back(
        &self,
        chart: &Arc<ChartRef>,
    ) -> Result<FetchedChart, ChartError> {
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
                .unwrap_or_else(|_| {
                    Err(format!(
                        "no complete response within {} s",
                        DEADLINE.as_secs()
                    ))
                });
            let bytes = response.map_err(|problem| ChartError::Hub {
                chart: Arc::clone(chart),
                problem,
            })?;
            let archive = (bytes, None, Origin::Fallback);
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
        let outcome = fetched.as_ref().err().map_or("ok", ChartError::outcome);
        self.metrics.record_fetch(source, duration, outcome);
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
                (pulled.bytes, pulled.provenance, Origin::Listed(listed))
            } else if chart.repo.is_empty() {
                let bytes = read_local_file(chart, String::new(), CHART_LIMIT).await?;
                let suffix = provenance::SUFFIX.to_owned();
                let read = read_local_file(chart, suffix, provenance::LIMIT);
                let provenance = provenance::fetch_if(needs_provenance, read).await?;
                (bytes, provenance, Origin::File)
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
                (bytes, provenance, Origin::Listed(listed))
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
        (bytes, provenance, origin): ReceivedArchive,
    ) -> Result<FetchedChart, ChartError> {
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

/// A received archive, and its provenance file if one was requested.
type ReceivedArchive = (Vec<u8>, Option<Vec<u8>>, Origin);

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
                limit: DEADLINE,
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
