//! Errors with the texts of Helm and client-go.

use std::fmt;

/// Error of a step of Helm.
#[derive(Clone, Debug)]
pub(crate) struct HelmError {
    pub(crate) message: String,
    pub(crate) cause: ErrorCause,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ErrorCause {
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

impl HelmError {
    pub(crate) fn new(message: impl Into<String>) -> Self {
        Self {
            message: message.into(),
            cause: ErrorCause::Other,
        }
    }

    /// Passes the text of another error on.
    pub(crate) fn from_error(error: impl fmt::Display) -> Self {
        Self::new(error.to_string())
    }

    pub(crate) fn release_not_found() -> Self {
        Self {
            message: "release: not found".to_owned(),
            cause: ErrorCause::ReleaseNotFound,
        }
    }

    pub(crate) fn no_deployed_releases(release: &str) -> Self {
        Self {
            message: format!("\"{release}\" has no deployed releases"),
            cause: ErrorCause::NoDeployedReleases,
        }
    }

    /// Wraps the error as `fmt.Errorf("{prefix}: %w")` does.
    #[must_use]
    pub(crate) fn context(self, prefix: impl fmt::Display) -> Self {
        Self {
            message: format!("{prefix}: {}", self.message),
            cause: self.cause,
        }
    }

    pub(crate) fn is_not_found(&self) -> bool {
        matches!(self.cause, ErrorCause::Status { code: 404, .. })
    }

    pub(crate) fn is_already_exists(&self) -> bool {
        matches!(&self.cause, ErrorCause::Status { reason, .. } if reason == "AlreadyExists")
    }

    pub(crate) fn is_conflict(&self) -> bool {
        matches!(&self.cause, ErrorCause::Status { code: 409, reason } if reason != "AlreadyExists")
    }

    /// Joins errors. Returns `None` for an empty list.
    pub(crate) fn join(errors: &[Self], separator: &str) -> Option<Self> {
        let first = errors.first()?;
        let messages: Vec<&str> = errors.iter().map(|error| error.message.as_str()).collect();
        Some(Self {
            message: messages.join(separator),
            cause: first.cause.clone(),
        })
    }
}

impl fmt::Display for HelmError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}
