//! Errors of a chart fetch. Every message names the repository, the chart, the version and the fix.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use thiserror::Error;

use super::archive::ArchiveError;
use super::chart_ref::ChartRef;

/// Effect of a failed fetch on a Tenant: each variant is a condition reason of krypton-operator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChartFault {
    NotLoaded,
    VersionNotFound,
    VersionInvalid,
}

/// Why a chart is not available.
#[derive(Debug, Error)]
pub enum ChartError {
    #[error(
        "chart version invalid: {chart}; set a SemVer 2 version such as 1.2.3, or a range such as ^1.2"
    )]
    VersionInvalid { chart: Arc<ChartRef> },
    #[error("chart version not found in repository: {chart}; {}", newest_version(.newest.as_deref()))]
    VersionNotFound {
        chart: Arc<ChartRef>,
        newest: Option<String>,
    },
    #[error(
        "chart not loaded: {chart}: the hub has not resolved its version and content yet; see the hub's log"
    )]
    Unresolved { chart: Arc<ChartRef> },
    #[error(
        "chart not loaded: {chart}: the repository must be an http(s) or oci URL; \
         for a local chart leave it empty and name the path of a .tgz"
    )]
    Address { chart: Arc<ChartRef> },
    #[error(
        "chart not loaded: {chart}: {problem}; write it as oci://HOST[:PORT]/PATH, in lower case"
    )]
    Registry {
        chart: Arc<ChartRef>,
        problem: &'static str,
    },
    #[error("chart not loaded: {chart}: no such chart in the repository; check its name")]
    Unlisted { chart: Arc<ChartRef> },
    #[error(
        "chart not loaded; repo unreachable? {chart}: {attempt} failed; check its address and the network path to it"
    )]
    Unreachable {
        chart: Arc<ChartRef>,
        attempt: &'static str,
        #[source]
        source: reqwest::Error,
    },
    #[error("chart not loaded; repo unreachable? {chart}: no complete response within {} s; check the network path to it", .limit.as_secs())]
    Deadline {
        chart: Arc<ChartRef>,
        limit: Duration,
    },
    #[error(
        "chart not loaded; repo unreachable? {chart}: {attempt} returned {status}; {}", status_remedy(*.status)
    )]
    Refused {
        chart: Arc<ChartRef>,
        attempt: &'static str,
        status: u16,
    },
    #[error("chart not loaded; repo unreachable? {chart}: {attempt}: {problem}; check its address")]
    Redirect {
        chart: Arc<ChartRef>,
        attempt: &'static str,
        problem: &'static str,
    },
    #[error(
        "chart not loaded: {chart}: {attempt}: {problem}; check the repository's address and content"
    )]
    InvalidResponse {
        chart: Arc<ChartRef>,
        attempt: &'static str,
        problem: &'static str,
    },
    #[error(
        "chart not loaded: {chart}: charts come from the hub only (--chart-source=hub): {problem}"
    )]
    Hub {
        chart: Arc<ChartRef>,
        problem: String,
    },
    #[error("chart not loaded: {chart}: {problem}")]
    Credentials {
        chart: Arc<ChartRef>,
        problem: Arc<str>,
    },
    #[error(
        "chart not loaded: {chart}: credentials are not sent over plain HTTP; \
         use https, or allow it with --insecure-chart-http"
    )]
    PlainHttp { chart: Arc<ChartRef> },
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
        "chart not loaded: {chart}: index.yaml is damaged; check the network path to the repository"
    )]
    Unpacking {
        chart: Arc<ChartRef>,
        #[source]
        source: std::io::Error,
    },
    #[error(
        "chart not loaded: {chart}: the index contains no usable URL for it; correct the index"
    )]
    EntryUrl { chart: Arc<ChartRef> },
    #[error(
        "chart not loaded: {chart}: sha256 is {actual} instead of {expected}; \
         the chart was changed after it was listed or pinned"
    )]
    Digest {
        chart: Arc<ChartRef>,
        expected: String,
        actual: String,
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
        "chart not loaded: {chart}: the archive holds chart {actual}; the repository needs repair"
    )]
    DifferentChart {
        chart: Arc<ChartRef>,
        actual: String,
    },
    #[error(
        "chart not loaded: {chart}: {problem}; charts must be signed by a key of --chart-keyring"
    )]
    UnverifiedSignature {
        chart: Arc<ChartRef>,
        problem: String,
    },
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
    #[error("failed to create the HTTP client of the chart cache")]
    Client(#[source] reqwest::Error),
}

fn newest_version(newest: Option<&str>) -> String {
    match newest {
        Some(newest) => format!("the newest stable version is {newest}"),
        None => "no stable version exists; set a version".to_owned(),
    }
}

fn status_remedy(status: u16) -> &'static str {
    match status {
        401 | 403 => {
            "check its address and the credentials (--chart-credentials-secret of the hub)"
        }
        _ => "check its address",
    }
}

impl ChartError {
    /// Returns whether the fallback may succeed. A registry returns 404 to unknown clients.
    pub(super) fn allows_fallback(&self) -> bool {
        match self {
            Self::Unreachable { .. }
            | Self::Deadline { .. }
            | Self::Refused { .. }
            | Self::Redirect { .. } => true,
            Self::Local { source, .. } => source.kind() == std::io::ErrorKind::NotFound,
            _ => false,
        }
    }

    /// Returns the condition reason.
    pub fn fault(&self) -> ChartFault {
        match self {
            Self::VersionInvalid { .. } => ChartFault::VersionInvalid,
            Self::VersionNotFound { .. } => ChartFault::VersionNotFound,
            _ => ChartFault::NotLoaded,
        }
    }

    /// Returns the outcome label for metrics.
    pub(super) fn outcome(&self) -> &'static str {
        match self.fault() {
            ChartFault::NotLoaded => "not_loaded",
            ChartFault::VersionNotFound => "version_not_found",
            ChartFault::VersionInvalid => "version_invalid",
        }
    }
}
