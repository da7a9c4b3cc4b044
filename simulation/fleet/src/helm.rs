//! Helm processes of simulated hubs and agents.

use std::ffi::OsString;
use std::future::poll_fn;
use std::io;
use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::process::ExitStatus;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};

use futures::future::BoxFuture;
use krypton_helm::driver::{HelmCommand, Processes, Running};
use krypton_runtime::clock::BootTime;

use crate::outbox::{Message, Outbox, ProcessId};

const VERSION: &str = "v4.2.4";

/// Starts simulated Helm processes for one hub or agent.
#[derive(Clone, Debug)]
pub struct SimHelm {
    pub process: ProcessId,
    pub outbox: Outbox,
}

/// What the driver knows of its Helm process.
#[derive(Debug, Default)]
pub struct RunState(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    ended: Option<(ExitStatus, Vec<u8>)>,
    waiting: Option<Waker>,
}

impl RunState {
    /// Helm has ended with this status and standard error.
    pub fn end(&self, status: ExitStatus, stderr: Vec<u8>) {
        let mut state = self.lock();
        state.ended.get_or_insert((status, stderr));
        if let Some(waker) = state.waiting.take() {
            waker.wake();
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn ended(&self) -> (ExitStatus, Vec<u8>) {
        poll_fn(|context| {
            let mut state = self.lock();
            match &state.ended {
                Some(ended) => Poll::Ready(ended.clone()),
                None => {
                    state.waiting = Some(context.waker().clone());
                    Poll::Pending
                }
            }
        })
        .await
    }
}

impl Processes for SimHelm {
    fn start(
        &self,
        command: &HelmCommand<'_>,
        until: Option<BootTime>,
    ) -> io::Result<Box<dyn Running>> {
        let run = Run {
            helm: self.clone(),
            state: Arc::default(),
        };
        run.send(Message::Helm {
            arguments: command.arguments.clone(),
            environment: command.environment.clone(),
            output: command.output.map(Path::to_path_buf),
            until: until.map(|until| until.0),
            state: Arc::clone(&run.state),
        });
        Ok(Box::new(run))
    }

    fn version<'a>(
        &'a self,
        _: &'a Path,
        _: Vec<(OsString, OsString)>,
    ) -> BoxFuture<'a, io::Result<String>> {
        Box::pin(async { Ok(VERSION.to_owned()) })
    }
}

/// A Helm process as its driver has it. Like the supervisor's pipe, dropping it kills Helm.
struct Run {
    helm: SimHelm,
    state: Arc<RunState>,
}

impl Run {
    fn send(&self, message: Message) {
        self.helm.outbox.push(self.helm.process, message);
    }
}

impl Running for Run {
    fn terminate(&mut self) -> BoxFuture<'_, ()> {
        let state = Arc::clone(&self.state);
        self.send(Message::HelmTerminate { state });
        Box::pin(async {})
    }

    fn lives_until(&mut self, until: Option<BootTime>) -> BoxFuture<'_, ()> {
        let state = Arc::clone(&self.state);
        let until = until.map(|until| until.0);
        self.send(Message::HelmUntil { state, until });
        Box::pin(async {})
    }

    fn kill(&self) {
        let state = Arc::clone(&self.state);
        self.send(Message::HelmKill { state });
    }

    fn ended(&mut self) -> BoxFuture<'_, ()> {
        Box::pin(async {
            self.state.ended().await;
        })
    }

    fn end(self: Box<Self>) -> BoxFuture<'static, io::Result<(ExitStatus, Vec<u8>)>> {
        Box::pin(async move {
            self.kill();
            Ok(self.state.ended().await)
        })
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        self.kill();
    }
}

/// The status of a process that ended with this code.
pub(crate) fn exited(code: i32) -> ExitStatus {
    ExitStatus::from_raw((code & 0xff) << 8)
}

/// The status of the supervisor of a killed Helm.
pub(crate) fn killed() -> ExitStatus {
    exited(128 + 9)
}
