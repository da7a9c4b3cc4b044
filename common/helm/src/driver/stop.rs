//! Stop requests for running Helm processes.

use krypton_runtime::clock::BootTime;
use krypton_runtime::newest::Newest as _;
use tokio::sync::watch;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct State {
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
pub struct StopHandle(watch::Sender<State>);

/// Receives stop requests. Cheap to clone.
#[derive(Clone, Debug)]
pub struct StopSignal(watch::Receiver<State>);

impl StopHandle {
    /// Creates a handle without any stop request.
    pub fn new() -> (Self, StopSignal) {
        let (sender, receiver) = watch::channel(State::default());
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
            let news = !std::mem::replace(&mut state.killed, true);
            state.kills += u64::from(news);
            news
        });
    }

    /// Extends the time limit of runs to `until` and allows new runs after a [`Self::kill`].
    pub fn permit(&self, until: BootTime) {
        self.0.send_if_modified(|state| {
            let killed = std::mem::replace(&mut state.killed, false);
            let before = state.until.replace(until);
            killed || before != Some(until)
        });
    }
}

/// Instruction for a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    Go,
    Soft,
    Kill,
}

/// Stop requests from the view of one run. Once killed, it stays killed.
#[derive(Clone, Debug)]
pub struct Orders {
    state: watch::Receiver<State>,
    kills: u64,
}

impl StopSignal {
    /// Returns whether new runs may start. The caller that starts runs must check this.
    pub fn is_open(&self) -> bool {
        let state = self.0.get();
        !state.closed && !state.soft
    }

    /// Returns the view of a new run. Call this before the run starts.
    pub fn orders(&self) -> Orders {
        let state = self.0.clone();
        let kills = state.get().kills;
        Orders { state, kills }
    }
}

impl Orders {
    /// Returns the time limit of the run.
    pub fn until(&self) -> Option<BootTime> {
        self.state.get().until
    }

    pub fn at(&self, now: BootTime) -> Order {
        let late = self.until().is_some_and(|until| now >= until);
        if late { Order::Kill } else { self.now() }
    }

    pub fn now(&self) -> Order {
        let state = self.state.get();
        if state.killed || state.kills != self.kills || self.state.has_changed().is_err() {
            Order::Kill
        } else if state.soft {
            Order::Soft
        } else {
            Order::Go
        }
    }

    /// Waits until the order or the time limit differs from `known`.
    pub(super) async fn other_than(
        &mut self,
        known: (Order, Option<BootTime>),
    ) -> (Order, Option<BootTime>) {
        loop {
            let now = (self.now(), self.until());
            if now != known {
                return now;
            }
            let (known, _) = known;
            if self.state.changed().await.is_err() && known == Order::Kill {
                // No other order can follow.
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
        let met = signal.orders();
        assert_eq!(met.now(), Order::Go);
        handle.kill();
        assert_eq!(signal.orders().now(), Order::Kill);
        handle.permit(LATER);
        assert_eq!(met.now(), Order::Kill);
        assert_eq!(signal.orders().now(), Order::Go);
    }

    #[test]
    fn run_is_killed_when_its_permit_expires() {
        let (handle, signal) = StopHandle::new();
        let orders = signal.orders();
        assert_eq!((orders.until(), orders.at(LATER)), (None, Order::Go));
        handle.permit(LATER);
        assert_eq!(orders.at(BootTime::default()), Order::Go);
        assert_eq!(orders.at(LATER), Order::Kill);
        handle.permit(BootTime(LATER.0 * 2));
        assert_eq!(orders.at(LATER), Order::Go);
    }

    #[test]
    fn closed_handle_lets_running_work_continue() {
        let (handle, signal) = StopHandle::new();
        assert!(signal.is_open());
        handle.close();
        handle.permit(LATER);
        assert!(!signal.is_open());
        assert_eq!(signal.orders().now(), Order::Go);
    }

    #[test]
    fn soft_stop_survives_permits_and_yields_to_kill() {
        let (handle, signal) = StopHandle::new();
        handle.soft();
        handle.permit(LATER);
        assert_eq!(signal.orders().now(), Order::Soft);
        handle.kill();
        assert_eq!(signal.orders().now(), Order::Kill);
        handle.permit(LATER);
        assert_eq!(signal.orders().now(), Order::Soft);
    }

    #[tokio::test]
    async fn a_dropped_handle_is_a_kill() {
        let (handle, signal) = StopHandle::new();
        let mut orders = signal.orders();
        drop(handle);
        assert_eq!(orders.other_than((Order::Go, None)).await.0, Order::Kill);
        assert_eq!(signal.orders().now(), Order::Kill);
    }
}
