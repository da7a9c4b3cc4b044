//! Errors in the words of Helm and client-go.

use std::fmt;

/// Why a step of Helm failed.
#[derive(Clone, Debug)]
pub(crate) struct Fault {
    pub(crate) text: String,
    pub(crate) cause: Cause,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Cause {
    /// The API server's response.
    Status {
        code: u16,
        reason: String,
    },
    ReleaseNotFound,
    NoDeployedReleases,
    /// The model doesn't support the chart.
    NotModelled,
    Other,
}

impl Fault {
    pub(crate) fn new(text: impl Into<String>) -> Self {
        Self {
            text: text.into(),
            cause: Cause::Other,
        }
    }

    pub(crate) fn release_not_found() -> Self {
        Self {
            text: "release: not found".to_owned(),
            cause: Cause::ReleaseNotFound,
        }
    }

    pub(crate) fn no_deployed_releases(release: &str) -> Self {
        Self {
            text: format!("\"{release}\" has no deployed releases"),
            cause: Cause::NoDeployedReleases,
        }
    }

    /// Wraps the error as `fmt.Errorf("{prefix}: %w")` does.
    #[must_use]
    pub(crate) fn within(self, prefix: impl fmt::Display) -> Self {
        Self {
            text: format!("{prefix}: {}", self.text),
            cause: self.cause,
        }
    }

    pub(crate) fn is_not_found(&self) -> bool {
        matches!(self.cause, Cause::Status { code: 404, .. })
    }

    pub(crate) fn is_already_exists(&self) -> bool {
        matches!(&self.cause, Cause::Status { reason, .. } if reason == "AlreadyExists")
    }

    pub(crate) fn is_conflict(&self) -> bool {
        matches!(&self.cause, Cause::Status { code: 409, reason } if reason != "AlreadyExists")
    }

    /// Joins errors. `None` if there are none.
    pub(crate) fn joined(faults: &[Self], separator: &str) -> Option<Self> {
        let first = faults.first()?;
        let texts: Vec<&str> = faults.iter().map(|fault| fault.text.as_str()).collect();
        Some(Self {
            text: texts.join(separator),
            cause: first.cause.clone(),
        })
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}
