//! Errors of a chart fetch. Every message names the repository, the chart, the version and the fix.

use std::fmt;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use krypton_types::conditions::reason;
use thiserror::Error;

use super::archive::ArchiveError;
use super::chart_ref::ChartRef;

/// Why a chart cache cannot be opened.
#[derive(Debug, Error)]
pub enum CacheError {
    #[error("the chart cache {} cannot be used; it must be a writable folder", .dir.display())]
    Folder {
        dir: PathBuf,
        #[source]
        source: io::Error,
    },
}

/// Why a chart is not available.
#[derive(Debug)]
pub struct ChartError {
    chart: Box<ChartRef>,
    pub problem: ChartProblem,
}

/// Why a chart is not available. The message completes that of a [`ChartError`].
#[derive(Debug, Error)]
pub enum ChartProblem {
    #[error("set a SemVer 2 version such as 1.2.3, or a range such as ^1.2")]
    VersionInvalid,
    #[error("{}", newest_version(.newest.as_deref()))]
    VersionNotFound { newest: Option<String> },
    #[error("the hub has not resolved its version and content yet; see the hub's log")]
    Unresolved,
    #[error(
        "the repository must be an http(s) or oci URL; \
         for a local chart leave it empty and name the path of a .tgz"
    )]
    Address,
    #[error("{0}; write it as oci://HOST[:PORT]/PATH, in lower case")]
    Registry(&'static str),
    #[error("no such chart in the repository; check its name")]
    Unlisted,
    #[error("{attempt} failed; check its address and the network path to it")]
    Unreachable {
        attempt: &'static str,
        #[source]
        source: reqwest::Error,
    },
    #[error("no complete response within {} s; check the network path to it", .0.as_secs())]
    Deadline(Duration),
    #[error("{attempt} returned {status}; {}", status_remedy(*.status))]
    Refused { attempt: &'static str, status: u16 },
    #[error("{attempt}: {problem}; check its address")]
    Redirect {
        attempt: &'static str,
        problem: &'static str,
    },
    #[error("{attempt}: {problem}; check the repository's address and content")]
    InvalidResponse {
        attempt: &'static str,
        problem: &'static str,
    },
    #[error("charts come from the hub only (--chart-source=hub): {0}")]
    Hub(String),
    #[error("{0}")]
    Credentials(Arc<str>),
    #[error(
        "credentials are not sent over plain HTTP; use https, or allow it with --insecure-chart-http"
    )]
    PlainHttp,
    #[error("{what} is larger than {} MiB and was not read to its end; is it the right repository?", limit >> 20)]
    TooLarge { what: &'static str, limit: u64 },
    #[error("index.yaml is not the index of a chart repository; check its address")]
    Index(#[source] serde_saphyr::Error),
    #[error("index.yaml is damaged; check the network path to the repository")]
    Unpacking(#[source] io::Error),
    #[error("the index contains no usable URL for it; correct the index")]
    EntryUrl,
    #[error(
        "sha256 is {actual} instead of {expected}; \
         the chart was changed after it was listed or pinned"
    )]
    Digest { expected: String, actual: String },
    #[error("the archive is refused; get the chart from its author again")]
    Archive(#[from] ArchiveError),
    #[error("the archive holds chart {0}; the repository needs repair")]
    DifferentChart(String),
    #[error("{0}; charts must be signed by a key of --chart-keyring")]
    UnverifiedSignature(String),
    #[error("reading the file failed; check the path")]
    Local(#[source] io::Error),
    #[error("writing it to {} failed", .dir.display())]
    Store {
        dir: PathBuf,
        #[source]
        source: io::Error,
    },
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

impl ChartProblem {
    /// Returns whether the repository did not provide what was requested.
    fn is_unavailable(&self) -> bool {
        matches!(
            self,
            Self::Unreachable { .. }
                | Self::Deadline(_)
                | Self::Refused { .. }
                | Self::Redirect { .. }
        )
    }

    /// Returns whether the fallback may succeed. A registry returns 404 to unknown clients.
    pub(super) fn allows_fallback(&self) -> bool {
        let is_missing_file =
            matches!(self, Self::Local(source) if source.kind() == io::ErrorKind::NotFound);
        self.is_unavailable() || is_missing_file
    }

    /// Returns the outcome label for metrics.
    pub(super) fn outcome(&self) -> &'static str {
        match self {
            Self::VersionInvalid => "version_invalid",
            Self::VersionNotFound { .. } => "version_not_found",
            _ => "not_loaded",
        }
    }
}

impl ChartError {
    pub(super) fn new(chart: &ChartRef, problem: ChartProblem) -> Self {
        let chart = Box::new(chart.clone());
        Self { chart, problem }
    }

    /// Returns the condition reason, which krypton-operator uses too.
    pub fn reason(&self) -> &'static str {
        match self.problem {
            ChartProblem::VersionInvalid => reason::VERSION_INVALID,
            ChartProblem::VersionNotFound { .. } => reason::VERSION_NOT_FOUND,
            _ => reason::CHART_NOT_LOADED,
        }
    }
}

impl fmt::Display for ChartError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { chart, problem } = self;
        match problem {
            ChartProblem::VersionInvalid => write!(f, "chart version invalid: {chart}; {problem}"),
            ChartProblem::VersionNotFound { .. } => write!(
                f,
                "chart version not found in repository: {chart}; {problem}"
            ),
            problem if problem.is_unavailable() => {
                write!(f, "chart not loaded; repo unreachable? {chart}: {problem}")
            }
            problem => write!(f, "chart not loaded: {chart}: {problem}"),
        }
    }
}

impl std::error::Error for ChartError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.problem.source()
    }
}
