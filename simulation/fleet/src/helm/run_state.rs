//! What a driver can observe of its Helm process.

use std::future::poll_fn;
use std::process::ExitStatus;
use std::task::{Poll, Waker};

use parking_lot::Mutex;

/// The state of a Helm process that its driver can observe.
#[derive(Debug, Default)]
pub struct HelmRunState(Mutex<HelmExitState>);

#[derive(Debug, Default)]
struct HelmExitState {
    exit: Option<(ExitStatus, Vec<u8>)>,
    waker: Option<Waker>,
}

impl HelmRunState {
    /// Records the exit status and the standard error of Helm.
    pub fn set_exit(&self, status: ExitStatus, stderr: Vec<u8>) {
        let mut state = self.0.lock();
        state.exit.get_or_insert((status, stderr));
        if let Some(waker) = state.waker.take() {
            waker.wake();
        }
    }

    pub(super) async fn wait_for_exit(&self) -> (ExitStatus, Vec<u8>) {
        poll_fn(|context| {
            let mut state = self.0.lock();
            match &state.exit {
                Some(exit) => Poll::Ready(exit.clone()),
                None => {
                    state.waker = Some(context.waker().clone());
                    Poll::Pending
                }
            }
        })
        .await
    }
}
