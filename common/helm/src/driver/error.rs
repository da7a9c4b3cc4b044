//! Why a Helm run failed, and what that means for a retry.

use std::path::PathBuf;
use std::time::Duration;

use thiserror::Error;

use super::supervisor::MEMORY_MAX;
use super::version::OLDEST_VERSION;

/// Why a Helm run failed.
#[derive(Debug, Error)]
pub enum HelmError {
    #[error(
        "{} cannot be run; install Helm {OLDEST_VERSION} or newer of major version 4, or name where it is",
        .binary.display()
    )]
    Missing {
        binary: PathBuf,
        #[source]
        source: std::io::Error,
    },
    #[error(
        "{} has version {found:?}; install Helm {OLDEST_VERSION} or newer of major version 4",
        .binary.display()
    )]
    Version { binary: PathBuf, found: String },
    #[error(
        "the folder {} for helm's files cannot be used; is the disk full or read-only? \
         Make room there, or name another folder (--private-dir; --helm-cache-dir of the hub, --cache-dir of the agent)",
        .path.display()
    )]
    Scratch {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    #[error("label {key}={value} cannot be passed to Helm: it contains a separator of labels")]
    Label { key: String, value: String },
    #[error("helm could not be started for release {release}")]
    Spawn {
        release: String,
        #[source]
        source: std::io::Error,
    },
    #[error("helm could not be started for release {release}: {message}")]
    Start { release: String, message: String },
    #[error(
        "helm {verb} of release {release} did not end within {} s and was stopped{}",
        .after.as_secs(), message_suffix(.message)
    )]
    TimedOut {
        verb: &'static str,
        release: String,
        after: Duration,
        message: String,
    },
    #[error("helm was stopped")]
    Stopped,
    #[error("release {release} was not found")]
    ReleaseNotFound { release: String },
    #[error(
        "helm {verb} of release {release} was killed by signal {signal} from outside Krypton; if memory ran out, \
         raise the memory limit or lower --max-concurrent-helm{}",
        message_suffix(.message)
    )]
    Killed {
        verb: &'static str,
        release: String,
        signal: i32,
        message: String,
    },
    #[error(
        "helm {verb} of release {release} exceeded {} MiB of memory and was stopped; check the responses of \
         the cluster's API server, and the size of chart and values",
        MEMORY_MAX >> 20
    )]
    OutOfMemory { verb: &'static str, release: String },
    #[error("the cluster accepts no writes for now: {message}")]
    Suspended { message: String },
    #[error("helm {verb} of release {release} failed{}", message_suffix(.message))]
    Failed {
        verb: &'static str,
        release: String,
        message: String,
        permanent: bool,
    },
}

impl HelmError {
    /// Returns whether a retry would fail the same way until the chart, values, cluster or permissions
    /// change.
    pub fn is_permanent(&self) -> bool {
        match self {
            Self::Failed { permanent, .. } => *permanent,
            Self::Label { .. } => true,
            _ => false,
        }
    }

    /// Returns the outcome label for metrics.
    pub(super) fn outcome(&self) -> &'static str {
        match self {
            Self::TimedOut { .. } => "timed_out",
            Self::Stopped => "stopped",
            Self::ReleaseNotFound { .. } => "not_found",
            Self::Killed { .. } | Self::OutOfMemory { .. } => "killed",
            Self::Suspended { .. } => "suspended",
            Self::Failed { .. } => "failed",
            Self::Missing { .. }
            | Self::Version { .. }
            | Self::Scratch { .. }
            | Self::Label { .. }
            | Self::Spawn { .. }
            | Self::Start { .. } => "not_started",
        }
    }

    /// Returns whether this machine caused the error before Helm started, so nothing changed on the cluster.
    pub fn is_local(&self) -> bool {
        matches!(
            self,
            Self::Missing { .. }
                | Self::Version { .. }
                | Self::Scratch { .. }
                | Self::Spawn { .. }
                | Self::Start { .. }
        )
    }
}

fn message_suffix(message: &str) -> String {
    if message.is_empty() {
        String::new()
    } else {
        format!(": {message}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outcome_tells_whether_helm_has_started() {
        let start = HelmError::Start {
            release: "acme".to_owned(),
            message: String::new(),
        };
        assert_eq!(start.outcome(), "not_started");
        assert_eq!(HelmError::Stopped.outcome(), "stopped");
    }
}
