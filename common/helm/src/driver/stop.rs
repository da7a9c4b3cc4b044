//! Stop requests for running Helm processes.

use krypton_runtime::clock::BootTime;
use krypton_runtime::newest::Newest as _;
use tokio::sync::watch;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct StopState {
    closed: bool,
    soft: bool,
    killed: bool,
    /// Number of calls of `kill`. A run that started before the last one must end, even after a later
    /// `permit`.
    kills: u64,
    /// Time limit of all runs, in case this process hangs. `None` means no limit.
    until: Option<BootTime>,
}

/// Sends stop requests to runs. Dropping it kills all runs, because their supervision has ended.
#[derive(Debug)]
pub struct StopHandle(watch::Sender<StopState>);

/// Receives stop requests. Cheap to clone.
#[derive(Clone, Debug)]
pub struct StopSignal(watch::Receiver<StopState>);

impl StopHandle {
    /// Creates a handle without any stop request.
    pub fn new() -> (Self, StopSignal) {
        let (sender, receiver) = watch::channel(StopState::default());
        (Self(sender), StopSignal(receiver))
    }

    /// Prevents new runs and lets current ones finish. Irreversible.
    pub fn close(&self) {
        self.0
            .send_if_modified(|state| !std::mem::replace(&mut state.closed, true));
    }

    /// Prevents new runs and requests that current ones shut down. Irreversible.
    pub fn soft(&self) {
        self.0
            .send_if_modified(|state| !std::mem::replace(&mut state.soft, true));
    }

    /// Kills current runs immediately and prevents new ones until [`Self::permit`].
    pub fn kill(&self) {
        self.0.send_if_modified(|state| {
            let is_new = !std::mem::replace(&mut state.killed, true);
            state.kills += u64::from(is_new);
            is_new
        });
    }

    /// Extends the time limit of runs to `until` and allows new runs after a [`Self::kill`].
    pub fn permit(&self, until: BootTime) {
        self.0.send_if_modified(|state| {
            let killed = std::mem::replace(&mut state.killed, false);
            let previous = state.until.replace(until);
            killed || previous != Some(until)
        });
    }
}

/// Stop request for a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StopRequest {
    None,
    Soft,
    Kill,
}

/// The stop requests as one run sees them. Once killed, it stays killed.
#[derive(Clone, Debug)]
pub struct StopRequests {
    state: watch::Receiver<StopState>,
    kills: u64,
}

impl StopSignal {
    /// Returns whether new runs may start. The caller that starts runs must check this.
    pub fn is_open(&self) -> bool {
        let state = self.0.get();
        !state.closed && !state.soft
    }

    /// Returns the view of a new run. Call this before the run starts.
    pub fn requests(&self) -> StopRequests {
        let state = self.0.clone();
        let kills = state.get().kills;
        StopRequests { state, kills }
    }
}

impl StopRequests {
    /// Returns the time limit of the run.
    pub fn until(&self) -> Option<BootTime> {
        self.state.get().until
    }

    /// Returns the request at `now`. After the time limit, this is [`StopRequest::Kill`].
    pub fn at(&self, now: BootTime) -> StopRequest {
        let is_expired = self.until().is_some_and(|until| now >= until);
        if is_expired {
            StopRequest::Kill
        } else {
            self.current()
        }
    }

    /// Returns the current request, regardless of the time limit.
    pub fn current(&self) -> StopRequest {
        let state = self.state.get();
        if state.killed || state.kills != self.kills || self.state.has_changed().is_err() {
            StopRequest::Kill
        } else if state.soft {
            StopRequest::Soft
        } else {
            StopRequest::None
        }
    }

    /// Waits until the request or the time limit differs from `known`.
    pub(super) async fn changed_from(
        &mut self,
        known: (StopRequest, Option<BootTime>),
    ) -> (StopRequest, Option<BootTime>) {
        loop {
            let current = (self.current(), self.until());
            if current != known {
                return current;
            }
            let (known_request, _) = known;
            if self.state.changed().await.is_err() && known_request == StopRequest::Kill {
                // No other request can follow.
                return std::future::pending().await;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const LATER: BootTime = BootTime(Duration::from_secs(60));

    #[test]
    fn kill_outlives_permit_for_its_run_only() {
        let (handle, signal) = StopHandle::new();
        let earlier_run = signal.requests();
        assert_eq!(earlier_run.current(), StopRequest::None);
        handle.kill();
        assert_eq!(signal.requests().current(), StopRequest::Kill);
        handle.permit(LATER);
        assert_eq!(earlier_run.current(), StopRequest::Kill);
        assert_eq!(signal.requests().current(), StopRequest::None);
    }

    #[test]
    fn run_is_killed_when_its_permit_expires() {
        let (handle, signal) = StopHandle::new();
        let requests = signal.requests();
        assert_eq!(
            (requests.until(), requests.at(LATER)),
            (None, StopRequest::None)
        );
        handle.permit(LATER);
        assert_eq!(requests.at(BootTime::default()), StopRequest::None);
        assert_eq!(requests.at(LATER), StopRequest::Kill);
        handle.permit(BootTime(LATER.0 * 2));
        assert_eq!(requests.at(LATER), StopRequest::None);
    }

    #[test]
    fn closed_handle_lets_running_work_continue() {
        let (handle, signal) = StopHandle::new();
        assert!(signal.is_open());
        handle.close();
        handle.permit(LATER);
        assert!(!signal.is_open());
        assert_eq!(signal.requests().current(), StopRequest::None);
    }

    #[test]
    fn soft_stop_survives_permits_and_yields_to_kill() {
        let (handle, signal) = StopHandle::new();
        handle.soft();
        handle.permit(LATER);
        assert_eq!(signal.requests().current(), StopRequest::Soft);
        handle.kill();
        assert_eq!(signal.requests().current(), StopRequest::Kill);
        handle.permit(LATER);
        assert_eq!(signal.requests().current(), StopRequest::Soft);
    }

    #[tokio::test]
    async fn a_dropped_handle_is_a_kill() {
        let (handle, signal) = StopHandle::new();
        let mut requests = signal.requests();
        drop(handle);
        assert_eq!(
            requests.changed_from((StopRequest::None, None)).await.0,
            StopRequest::Kill
        );
        assert_eq!(signal.requests().current(), StopRequest::Kill);
    }
}
