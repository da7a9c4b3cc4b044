//! One Helm run.

use std::ffi::OsString;

use kube::Client;
use tokio_util::sync::CancellationToken;

/// Command line and environment of Helm, without the program's name.
#[derive(Clone, Debug)]
pub struct Invocation {
    pub arguments: Vec<OsString>,
    pub environment: Vec<(OsString, OsString)>,
}

/// How a run ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Exit {
    pub code: i32,
    pub stdout: Vec<u8>,
    pub stderr: Vec<u8>,
}

/// Runs Helm against the cluster of `client`. Dropping the future kills Helm. `terminate` is SIGTERM.
pub async fn run(_client: Client, _invocation: Invocation, _terminate: CancellationToken) -> Exit {
    todo!()
}
