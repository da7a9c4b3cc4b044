//! Helm processes of simulated hubs and agents.

pub mod run_state;

use std::ffi::OsString;
use std::io;
use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::process::ExitStatus;
use std::sync::Arc;

use futures::future::BoxFuture;
use krypton_helm::driver::{HelmCommand, Processes, Running};
use krypton_runtime::clock::BootTime;

use self::run_state::HelmRunState;
use crate::outbox::{Message, Outbox, ProcessId};

const VERSION: &str = "v4.2.4";

/// Starts simulated Helm processes for one hub or agent.
#[derive(Clone, Debug)]
pub struct SimHelm {
    pub process: ProcessId,
    pub outbox: Outbox,
}

impl Processes for SimHelm {
    fn start(
        &self,
        command: &HelmCommand<'_>,
        time_limit: Option<BootTime>,
    ) -> io::Result<Box<dyn Running>> {
        let handle = HelmHandle {
            helm: self.clone(),
            state: Arc::default(),
        };
        handle.send(Message::StartHelm {
            arguments: command.arguments.clone(),
            environment: command.environment.clone(),
            output: command.output.map(Path::to_path_buf),
            time_limit: time_limit.map(|limit| limit.0),
            state: Arc::clone(&handle.state),
        });
        Ok(Box::new(handle))
    }

    fn version<'a>(
        &'a self,
        _: &'a Path,
        _: Vec<(OsString, OsString)>,
    ) -> BoxFuture<'a, io::Result<String>> {
        Box::pin(async { Ok(VERSION.to_owned()) })
    }
}

/// The handle of a Helm process for its driver. Like the supervisor's pipe, dropping it kills Helm.
struct HelmHandle {
    helm: SimHelm,
    state: Arc<HelmRunState>,
}

impl HelmHandle {
    fn send(&self, message: Message) {
        self.helm.outbox.push(self.helm.process, message);
    }
}

impl Running for HelmHandle {
    fn terminate(&mut self) -> BoxFuture<'_, ()> {
        let state = Arc::clone(&self.state);
        self.send(Message::TerminateHelm { state });
        Box::pin(async {})
    }

    fn set_time_limit(&mut self, time_limit: Option<BootTime>) -> BoxFuture<'_, ()> {
        let state = Arc::clone(&self.state);
        let time_limit = time_limit.map(|limit| limit.0);
        self.send(Message::SetHelmTimeLimit { state, time_limit });
        Box::pin(async {})
    }

    fn kill(&self) {
        let state = Arc::clone(&self.state);
        self.send(Message::KillHelm { state });
    }

    fn wait_for_exit(&mut self) -> BoxFuture<'_, ()> {
        Box::pin(async {
            self.state.wait_for_exit().await;
        })
    }

    fn reap(self: Box<Self>) -> BoxFuture<'static, io::Result<(ExitStatus, Vec<u8>)>> {
        Box::pin(async move {
            self.kill();
            Ok(self.state.wait_for_exit().await)
        })
    }
}

impl Drop for HelmHandle {
    fn drop(&mut self) {
        self.kill();
    }
}

/// The status of a process that ended with this code.
pub(crate) fn exit_status(code: i32) -> ExitStatus {
    ExitStatus::from_raw((code & 0xff) << 8)
}

/// The status of the supervisor of a killed Helm.
pub(crate) fn killed_status() -> ExitStatus {
    exit_status(128 + 9)
}
