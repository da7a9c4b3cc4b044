//! What the program ends with, so that scripts can tell what happened.

use std::error::Error;

use super::{JoinError, KubectlError, ReplaceError, RotateCaError};

/// How a call has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum ExitCode {
    Done = 0,
    Failed = 1,
    Usage = 2,
    NotFound = 3,
    NotPermitted = 4,
    NoAnswer = 5,
    NotReady = 6,
    Refused = 7,
}

/// Each with what it means, as the documentation has it.
pub const MEANINGS: [(ExitCode, &str); 8] = [
    (ExitCode::Done, "done"),
    (
        ExitCode::Failed,
        "failed, or done in part: what was done is said",
    ),
    (
        ExitCode::Usage,
        "wrong usage: nothing was asked of any cluster",
    ),
    (ExitCode::NotFound, "there is no such object, kind, or hub"),
    (
        ExitCode::NotPermitted,
        "you may not, or your credentials are not accepted: the message names verb and resource",
    ),
    (
        ExitCode::NoAnswer,
        "the cluster cannot be reached, or did not answer in time",
    ),
    (
        ExitCode::NotReady,
        "`explain`: all was told, and the Tenant is not Ready",
    ),
    (
        ExitCode::Refused,
        "refused, and nothing was changed: the state of things does not allow it now",
    ),
];

impl KubectlError {
    pub fn exit_code(&self) -> ExitCode {
        match self {
            Self::Usage(error) if error.exit_code() == 0 => ExitCode::Done,
            Self::Usage(_) => ExitCode::Usage,
            Self::NoSuchKind { .. } | Self::NotFound { .. } => ExitCode::NotFound,
            Self::Forbidden { .. } | Self::Unauthorized { .. } => ExitCode::NotPermitted,
            Self::TimedOut { .. } | Self::Unreachable { .. } => ExitCode::NoAnswer,
            Self::Refused { .. } => ExitCode::Refused,
            Self::Partly { error, .. } => match error.exit_code() {
                // Some of it is done: that it was not permitted is not all.
                ExitCode::Done => ExitCode::Done,
                _ => ExitCode::Failed,
            },
            Self::Join(error) => match error.as_ref() {
                JoinError::NoHub { .. } => ExitCode::NotFound,
                JoinError::NoAddress { .. } => ExitCode::Refused,
                JoinError::Replace(ReplaceError::None(_)) => ExitCode::NotFound,
                JoinError::Replace(ReplaceError::Changed(_) | ReplaceError::Held { .. }) => {
                    ExitCode::Refused
                }
                JoinError::Replace(ReplaceError::Deadline { .. }) => ExitCode::NoAnswer,
                error => by_cause(error),
            },
            Self::RotateCa(error) => match error.as_ref() {
                RotateCaError::NoHub { .. } => ExitCode::NotFound,
                RotateCaError::TimedOut { .. } => ExitCode::NoAnswer,
                RotateCaError::UnderWay { .. }
                | RotateCaError::Asked
                | RotateCaError::NothingToForce
                | RotateCaError::NobodyAwaited
                | RotateCaError::NotNamed(_)
                | RotateCaError::NotAwaited(_) => ExitCode::Refused,
                error => by_cause(error),
            },
            error => by_cause(error),
        }
    }
}

/// By what the apiserver has said, if it was asked.
fn by_cause(error: &(dyn Error + 'static)) -> ExitCode {
    let mut next = Some(error);
    while let Some(error) = next {
        match error.downcast_ref::<kube::Error>() {
            Some(kube::Error::Api(status)) => {
                return match status.code {
                    401 | 403 => ExitCode::NotPermitted,
                    404 => ExitCode::NotFound,
                    _ => ExitCode::Failed,
                };
            }
            Some(kube::Error::HyperError(_) | kube::Error::Service(_)) => {
                return ExitCode::NoAnswer;
            }
            _ => next = error.source(),
        }
    }
    ExitCode::Failed
}
