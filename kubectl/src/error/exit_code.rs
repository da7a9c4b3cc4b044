//! Exit codes, which scripts can evaluate.

use krypton_runtime::call::ApiError;

use super::{CallError, KubectlError};

/// Result of a command. `docs/reference/kubectl.md` lists the meanings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum ExitCode {
    Success = 0,
    Failed = 1,
    Usage = 2,
    NotFound = 3,
    NotPermitted = 4,
    NoResponse = 5,
    NotReady = 6,
    Refused = 7,
}

impl KubectlError {
    pub fn exit_code(&self) -> ExitCode {
        match self {
            Self::Usage(error) if error.exit_code() == 0 => ExitCode::Success,
            Self::Usage(_) => ExitCode::Usage,
            Self::Call(error) => error.exit_code(),
            Self::NotFound(_) => ExitCode::NotFound,
            Self::NoResponse(_) => ExitCode::NoResponse,
            Self::NotReady { .. } => ExitCode::NotReady,
            Self::Refused(_) => ExitCode::Refused,
            Self::Interrupted { source, .. } => source.exit_code(),
            // Part of the work may be done, so a specific code such as `NotPermitted` would be misleading.
            Self::Partial { .. } | Self::Kubeconfig(_) | Self::Client(_) | Self::Failed(_) => {
                ExitCode::Failed
            }
        }
    }
}

impl CallError {
    fn exit_code(&self) -> ExitCode {
        match self.error.code() {
            Some(401 | 403) => ExitCode::NotPermitted,
            Some(404) => ExitCode::NotFound,
            None if self.is_unreachable() => ExitCode::NoResponse,
            None if matches!(self.error, ApiError::Timeout { .. }) => ExitCode::NoResponse,
            _ => ExitCode::Failed,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use clap::CommandFactory as _;

    use super::*;
    use crate::cli::Cli;

    fn read_page(page: &str) -> String {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/reference");
        std::fs::read_to_string(folder.join(page)).unwrap()
    }

    #[test]
    fn page_documents_every_exit_code_and_command() {
        use ExitCode::{
            Failed, NoResponse, NotFound, NotPermitted, NotReady, Refused, Success, Usage,
        };
        let page = read_page("kubectl.md");
        for (code, meaning) in [
            (Success, "the command succeeded |"),
            (Failed, "the command failed, or changed only some objects"),
            (Usage, "wrong usage; the command contacted no cluster |"),
            (NotFound, "the object, its kind, or the hub does not exist"),
            (NotPermitted, "the cluster rejects your credentials"),
            (NoResponse, "the cluster is unreachable, or did not"),
            (NotReady, "the explained object is not Ready, or its"),
            (Refused, "the current state does not allow"),
        ] {
            let row = format!("| {} | {meaning}", code as u8);
            assert!(page.contains(&row), "{row}");
        }
        for command in Cli::command().get_subcommands() {
            let name = command.get_name();
            let page = read_page(&format!("kubectl/{name}.md"));
            assert!(page.contains(&format!("kubectl krypton {name}")), "{name}");
        }
    }
}
