//! Exit codes, which scripts can evaluate.

use std::error::Error;

use super::{JoinError, KubectlError, ReplaceError, RotateCaError};

/// Result of a command.
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

/// Each exit code with its meaning, as in `docs/reference/kubectl.md`.
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
        "told, and the Tenant is not Ready, or that is not known",
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
            Self::NoSuchKind { .. }
            | Self::NotFound { .. }
            | Self::NoTenant { .. }
            | Self::NoPod { .. } => ExitCode::NotFound,
            Self::Release { .. } => ExitCode::Failed,
            Self::NotReady { .. } => ExitCode::NotReady,
            Self::Forbidden { .. } | Self::Unauthorized { .. } => ExitCode::NotPermitted,
            Self::TimedOut { .. } | Self::Unreachable { .. } | Self::DebugPort { .. } => {
                ExitCode::NoAnswer
            }
            Self::Refused { .. } => ExitCode::Refused,
            Self::Partly { error, .. } => match error.exit_code() {
                // Part of the work is done, so a specific code such as `NotPermitted` would be misleading.
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

/// Derives the exit code from the API server's response, if any.
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

#[cfg(test)]
mod tests {
    use std::path::Path;

    use clap::{CommandFactory as _, Parser as _};

    use super::*;
    use crate::cli::Cli;

    fn page() -> String {
        let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/reference/kubectl.md");
        std::fs::read_to_string(page).unwrap()
    }

    #[test]
    fn page_documents_every_exit_code_and_command() {
        let page = page();
        for (code, meaning) in MEANINGS {
            let row = format!("| {} | {meaning} |", code as u8);
            assert!(page.contains(&row), "{row}");
        }
        for command in Cli::command().get_subcommands() {
            let name = command.get_name();
            let told = ["kubectl krypton ", ""].map(|before| format!("`{before}{name}"));
            assert!(told.iter().any(|told| page.contains(told)), "{name}");
        }
    }

    #[test]
    fn documented_commands_are_accepted_by_cli() {
        let page = page();
        let commands = page
            .split('`')
            .filter(|text| text.starts_with("kubectl krypton "));
        let mut seen = 0;
        for command in commands {
            let command = command
                .replace("NAMESPACE", "acme")
                .replace("NAME", "edge-1");
            let words = command.split(' ').skip(1);
            assert!(Cli::try_parse_from(words).is_ok(), "{command}");
            seen += 1;
        }
        assert!(seen > 10, "{seen}");
    }
}
