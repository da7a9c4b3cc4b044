//! Runs a program of the user, such as Helm or kind, within a deadline.

use std::ffi::OsStr;
use std::io::{self, Write as _};
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use tempfile::NamedTempFile;
use tokio::process::Command;

use crate::error::KubectlError;
use crate::render::one_line;

/// Longest part of the error output that an error repeats.
const MAX_ERROR_CHARS: usize = 2000;

/// These variables would send Helm to another cluster than the one of the command.
const OTHER_CLUSTER: [&str; 8] = [
    "HELM_KUBEAPISERVER",
    "HELM_KUBEASGROUPS",
    "HELM_KUBEASUSER",
    "HELM_KUBECAFILE",
    "HELM_KUBECONTEXT",
    "HELM_KUBEINSECURE_SKIP_TLS_VERIFY",
    "HELM_KUBETLS_SERVER_NAME",
    "HELM_KUBETOKEN",
];

/// A program of the user.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tool<'a> {
    /// Name in messages.
    pub(crate) name: &'static str,
    pub(crate) path: &'a Path,
    /// Fix if the program is missing.
    pub(crate) remedy: &'static str,
}

impl Tool<'_> {
    /// Runs it with these arguments, and returns its output. After the deadline, kills it.
    ///
    /// # Errors
    ///
    /// An error contains `task`, as in `Helm failed for NAME`, and the end of the program's error output. After the
    /// deadline, it contains `next_step`.
    pub(crate) async fn run(
        &self,
        args: impl IntoIterator<Item = impl AsRef<OsStr>>,
        deadline: Duration,
        (task, next_step): (&str, &str),
    ) -> Result<String, KubectlError> {
        #[expect(
            clippy::disallowed_methods,
            reason = "the user's program, in the user's session"
        )]
        let mut command = Command::new(self.path);
        command.args(args).stdin(Stdio::null()).kill_on_drop(true);
        for variable in OTHER_CLUSTER {
            command.env_remove(variable);
        }
        let (name, path) = (self.name, self.path.display());
        let output = tokio::time::timeout(deadline, command.output()).await;
        let output = output.map_err(|_| {
            let seconds = deadline.as_secs();
            KubectlError::NoResponse(format!(
                "{name} did not end within {seconds} s; it was killed, and {next_step}"
            ))
        })?;
        let output = output.map_err(|error| {
            KubectlError::Failed(match error.kind() {
                io::ErrorKind::NotFound => format!("there is no program {path}; {}", self.remedy),
                _ => format!("{path} did not start: {error}"),
            })
        })?;
        if output.status.success() {
            return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
        }
        let stderr = one_line(&String::from_utf8_lossy(&output.stderr));
        // The error is in the last lines.
        let start = stderr.char_indices().rev().nth(MAX_ERROR_CHARS - 1);
        let start = start.map_or(0, |(start, _)| start);
        Err(KubectlError::Failed(format!(
            "{name} failed {task}: {}",
            stderr.get(start..).unwrap_or_default()
        )))
    }
}

/// Writes `what` for a tool into a file that only the user can read.
pub(crate) fn temporary_file(what: &str, content: &str) -> Result<NamedTempFile, KubectlError> {
    let write = || -> io::Result<NamedTempFile> {
        let mut file = NamedTempFile::new()?;
        file.write_all(content.as_bytes())?;
        Ok(file)
    };
    write().map_err(|error| {
        KubectlError::Failed(format!("writing {what} to a temporary file: {error}"))
    })
}
