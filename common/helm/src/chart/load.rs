//! Loads charts and resolves versions: asks the repository, a local file or the hub, then checks and stores what it
//! gets.

use std::sync::Arc;
use std::time::Duration;

use krypton_runtime::clock::BootTime;
use krypton_runtime::newest::Newest as _;
use krypton_runtime::off_thread;
use tracing::Instrument as _;
use tracing::field::Empty;

use super::download::{CHART_LIMIT, RepositoryClient};
use super::files::write_file;
use super::origin::{ListedChart, Origin};
use super::version::{self, RequestedVersion, VersionSelector};
use super::{
    ChartCache, ChartError, ChartProblem, ChartRef, ChartSource, Credentials, FetchedChart,
    archive, index, oci, provenance,
};

/// Deadline of a whole fetch, index and chart together.
const DEADLINE: Duration = Duration::from_secs(60);

impl ChartCache {
    /// Returns the version that `chart.version`, usually a range, currently resolves to. Caches nothing.
    ///
    /// # Errors
    /// Returns an error if the repository is unreachable or has no matching version.
    pub async fn resolve(&self, chart: &ChartRef) -> Result<String, ChartError> {
        let resolved = Box::pin(self.resolve_version(chart)).await;
        resolved.map_err(|problem| ChartError::new(chart, problem))
    }

    async fn resolve_version(&self, chart: &ChartRef) -> Result<String, ChartProblem> {
        let requested = parse_version(chart)?;
        let resolved = async {
            if oci::is_oci(chart) {
                let client = self.client()?;
                oci::resolve(&client, chart, &requested.selector).await
            } else if chart.repo.is_empty() {
                let bytes = read_local_file(chart, "", CHART_LIMIT).await?;
                let metadata = off_thread::run(move || archive::inspect(&bytes)).await?;
                let offered = [metadata.version];
                match version::pick(&requested.selector, &offered, String::as_str) {
                    Some(version) => Ok(version.clone()),
                    None => {
                        let newest = offered.into_iter().next();
                        Err(ChartProblem::VersionNotFound { newest })
                    }
                }
            } else {
                let (_, _, entry) = self.index_entry(chart, &requested.selector).await?;
                Ok(entry.version)
            }
        };
        with_deadline(resolved).await
    }

    pub(super) async fn load_or_fall_back(
        &self,
        chart: &ChartRef,
    ) -> Result<FetchedChart, ChartProblem> {
        let requested = parse_version(chart)?;
        let fallback = match (&self.fallback, self.source) {
            (None, _) | (_, ChartSource::Direct) => return self.load(chart, &requested).await,
            (Some(fallback), _) => fallback,
        };
        let first_problem = match self.source {
            ChartSource::Hub => None,
            _ => match self.load(chart, &requested).await {
                Err(problem) if problem.allows_fallback() => Some(problem),
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
            let archive = (response.map_err(ChartProblem::Hub)?, None, Origin::Fallback);
            self.verify_and_store(chart, &requested, archive).await
        };
        match (self.record_fetch("hub", chart, fetch).await, first_problem) {
            // Report the problem of the repository, because users can fix that one.
            (Err(ChartProblem::Hub(problem)), Some(first_problem)) => {
                tracing::warn!(%chart, %problem, "the hub cannot provide the chart either");
                Err(first_problem)
            }
            (fetched, _) => fetched,
        }
    }

    /// Records the outcome of a fetch in the metrics and in a span.
    async fn record_fetch(
        &self,
        source: &'static str,
        chart: &ChartRef,
        fetch: impl Future<Output = Result<FetchedChart, ChartProblem>>,
    ) -> Result<FetchedChart, ChartProblem> {
        let span = tracing::error_span!("chart", %chart, source, outcome = Empty);
        let started = BootTime::now();
        let fetched = fetch.instrument(span.clone()).await;
        let duration = BootTime::now().since(started);
        let outcome = fetched.as_ref().err().map_or("ok", ChartProblem::outcome);
        self.metrics.record_fetch(source, duration, outcome);
        span.record("outcome", outcome);
        fetched
    }

    async fn load(
        &self,
        chart: &ChartRef,
        requested: &RequestedVersion,
    ) -> Result<FetchedChart, ChartProblem> {
        if matches!(requested.selector, VersionSelector::Range(_)) {
            // The hub could not resolve the range. The cause probably affects this process too, so report its
            // own error.
            Box::pin(self.resolve_version(chart)).await?;
            return Err(ChartProblem::Unresolved);
        }
        let needs_provenance = self.signature_verifier.is_some();
        let fetch = async {
            let archive = if oci::is_oci(chart) {
                let client = self.client()?;
                let pulled = oci::pull(&client, chart, requested, needs_provenance).await?;
                let listed = ListedChart {
                    name: pulled.name,
                    version: pulled.version,
                    sha256: Some(pulled.sha256),
                    manifest_sha256: Some(pulled.manifest_sha256),
                };
                (pulled.bytes, pulled.provenance, Origin::Listed(listed))
            } else if chart.repo.is_empty() {
                let bytes = read_local_file(chart, "", CHART_LIMIT).await?;
                let read = read_local_file(chart, provenance::SUFFIX, provenance::LIMIT);
                let provenance = provenance::fetch_if(needs_provenance, read).await?;
                (bytes, provenance, Origin::File)
            } else {
                let (client, repo, entry) = self.index_entry(chart, &requested.selector).await?;
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
        self.record_fetch("repository", chart, with_deadline(fetch))
            .await
    }

    /// Returns the chart's entry in the index of an HTTP repository, with the repository and its client.
    async fn index_entry(
        &self,
        chart: &ChartRef,
        selector: &VersionSelector,
    ) -> Result<(RepositoryClient, reqwest::Url, index::IndexEntry), ChartProblem> {
        let repo = repository_url(chart)?;
        let client = self.client()?;
        let index = self.indexes.read(&client, &repo).await?;
        let (name, selector) = (chart.name.clone(), selector.clone());
        let entry = off_thread::run(move || index::find_entry(&name, &selector, &index)).await?;
        Ok((client, repo, entry))
    }

    /// Returns a client with the current credentials.
    fn client(&self) -> Result<RepositoryClient, ChartProblem> {
        let credentials = match (&self.credentials, self.anonymous.get()) {
            (Some(current), _) => current.get(),
            (None, Some(anonymous)) => Ok(Arc::clone(anonymous)),
            // A failure is not kept: the next fetch tries again.
            (None, None) => Credentials::none()
                .map(|anonymous| Arc::clone(self.anonymous.get_or_init(|| anonymous))),
        };
        Ok(RepositoryClient {
            credentials: credentials.map_err(ChartProblem::Credentials)?,
            plain_http: self.plain_http,
        })
    }

    /// Checks the archive and stores it under its digest.
    async fn verify_and_store(
        &self,
        chart: &ChartRef,
        requested: &RequestedVersion,
        (bytes, provenance, origin): ReceivedArchive,
    ) -> Result<FetchedChart, ChartProblem> {
        let bytes = Arc::new(bytes);
        let (sha256, metadata) = {
            let (chart, requested) = (chart.clone(), requested.clone());
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
            signed.verify(verifier.as_ref()).await?;
        }
        let dir = self.dir.clone();
        off_thread::run(move || {
            let path = dir.join(format!("{sha256}.tgz"));
            match write_file(&dir, &path, &bytes) {
                Ok(()) => Ok(FetchedChart {
                    path,
                    sha256,
                    name: metadata.name,
                    version: metadata.version,
                }),
                Err(source) => Err(ChartProblem::Store { dir, source }),
            }
        })
        .await
    }
}

/// A received archive, and its provenance file if one was requested.
type ReceivedArchive = (Vec<u8>, Option<Vec<u8>>, Origin);

fn parse_version(chart: &ChartRef) -> Result<RequestedVersion, ChartProblem> {
    RequestedVersion::parse(&chart.version).ok_or(ChartProblem::VersionInvalid)
}

fn repository_url(chart: &ChartRef) -> Result<reqwest::Url, ChartProblem> {
    let url = reqwest::Url::parse(&chart.repo).ok();
    url.filter(|url| matches!(url.scheme(), "http" | "https"))
        .ok_or(ChartProblem::Address)
}

async fn with_deadline<T>(
    work: impl Future<Output = Result<T, ChartProblem>>,
) -> Result<T, ChartProblem> {
    let result = tokio::time::timeout(DEADLINE, work).await;
    result.unwrap_or(Err(ChartProblem::Deadline(DEADLINE)))
}

/// Reads the file whose path is the chart's name plus `suffix`.
async fn read_local_file(
    chart: &ChartRef,
    suffix: &str,
    limit: u64,
) -> Result<Vec<u8>, ChartProblem> {
    if !chart.name.ends_with(".tgz") {
        return Err(ChartProblem::Address);
    }
    let path = format!("{}{suffix}", chart.name);
    off_thread::run(move || {
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
            Ok(bytes) if bytes.len() as u64 > limit => Err(ChartProblem::TooLarge {
                what: "the file",
                limit,
            }),
            Ok(bytes) => Ok(bytes),
            Err(error) => Err(ChartProblem::Local(error)),
        }
    })
    .await
}
