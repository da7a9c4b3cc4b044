//! How a running helm is told to stop.

use tokio::sync::watch;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct State {
    closed: bool,
    soft: bool,
    killed: bool,
    /// How often `kill` was said: a run that was under way then is over, though a permit came since.
    kills: u64,
}

/// Tells runs to stop. When it is dropped, that is a `kill`: nobody watches over them any more.
#[derive(Debug)]
pub struct StopHandle(watch::Sender<State>);

/// What runs look at. Cheap to clone.
#[derive(Clone, Debug)]
pub struct StopSignal(watch::Receiver<State>);

impl StopHandle {
    /// Nothing is to stop yet.
    pub fn new() -> (Self, StopSignal) {
        let (sender, receiver) = watch::channel(State::default());
        (Self(sender), StopSignal(receiver))
    }

    /// No new run is to be begun; those under way go on. Not to be taken back.
    pub fn close(&self) {
        self.0
            .send_if_modified(|state| !std::mem::replace(&mut state.closed, true));
    }

    /// No new run starts, and those under way are asked to end. Not to be taken back.
    pub fn soft(&self) {
        self.0
            .send_if_modified(|state| !std::mem::replace(&mut state.soft, true));
    }

    /// Those under way are killed at once, and no new run starts until [`Self::permit`].
    pub fn kill(&self) {
        self.0.send_if_modified(|state| {
            let news = !std::mem::replace(&mut state.killed, true);
            state.kills += u64::from(news);
            news
        });
    }

    /// New runs may start again after a [`Self::kill`].
    pub fn permit(&self) {
        self.0
            .send_if_modified(|state| std::mem::replace(&mut state.killed, false));
    }
}

/// What a run is to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Order {
    Go,
    Soft,
    Kill,
}

/// One run's view: a kill stays a kill.
#[derive(Debug)]
pub(super) struct Orders {
    state: watch::Receiver<State>,
    kills: u64,
}

impl StopSignal {
    /// Whether a new run may be begun, which is for who would begin it to ask.
    pub fn is_open(&self) -> bool {
        let state = self.0.borrow();
        !state.closed && !state.soft
    }

    /// To be called before the run starts.
    pub(super) fn orders(&self) -> Orders {
        let state = self.0.clone();
        let kills = state.borrow().kills;
        Orders { state, kills }
    }
}

impl Orders {
    pub(super) fn now(&self) -> Order {
        let state = *self.state.borrow();
        if state.killed || state.kills != self.kills || self.state.has_changed().is_err() {
            Order::Kill
        } else if state.soft {
            Order::Soft
        } else {
            Order::Go
        }
    }

    /// Waits until the order is another than `known`.
    pub(super) async fn other_than(&mut self, known: Order) -> Order {
        loop {
            let now = self.now();
            if now != known {
                return now;
            }
            if self.state.changed().await.is_err() && known == Order::Kill {
                // There will be no other order.
                return std::future::pending().await;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kill_holds_for_the_run_it_met_and_not_for_one_after_the_next_permit() {
        let (handle, signal) = StopHandle::new();
        let met = signal.orders();
        assert_eq!(met.now(), Order::Go);
        handle.kill();
        assert_eq!(signal.orders().now(), Order::Kill);
        handle.permit();
        assert_eq!(met.now(), Order::Kill);
        assert_eq!(signal.orders().now(), Order::Go);
    }

    #[test]
    fn what_is_closed_lets_those_under_way_go_on() {
        let (handle, signal) = StopHandle::new();
        assert!(signal.is_open());
        handle.close();
        handle.permit();
        assert!(!signal.is_open());
        assert_eq!(signal.orders().now(), Order::Go);
    }

    #[test]
    fn a_soft_stop_outlives_permits_and_gives_way_to_a_kill() {
        let (handle, signal) = StopHandle::new();
        handle.soft();
        handle.permit();
        assert_eq!(signal.orders().now(), Order::Soft);
        handle.kill();
        assert_eq!(signal.orders().now(), Order::Kill);
        handle.permit();
        assert_eq!(signal.orders().now(), Order::Soft);
    }

    #[tokio::test]
    async fn a_dropped_handle_is_a_kill() {
        let (handle, signal) = StopHandle::new();
        let mut orders = signal.orders();
        drop(handle);
        assert_eq!(orders.other_than(Order::Go).await, Order::Kill);
        assert_eq!(signal.orders().now(), Order::Kill);
    }
}
