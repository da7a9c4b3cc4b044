//! Leader election of the hubs. The leader writes on the home cluster and serves agents. Owns the Lease
//! `krypton-hub` in the hub's namespace, and the hub's epoch.
//!
//! A hub writes only while [`Leader::may_write`] returns true. That check uses a clock that keeps running while
//! the process is frozen. A hub that wakes up after another one has taken over therefore cannot write.

mod election;
mod epoch;
pub mod home_writer;
pub mod pod_label;

use std::time::Duration;

use futures::future::{BoxFuture, OptionFuture};
use krypton_runtime::admin::Readiness;
use krypton_runtime::call::ApiError;
use krypton_runtime::clock::{self, BootTime};
use krypton_runtime::lease::{self, LeaseGoal, LeaseName, LeaseState, LeaseTimes};
use krypton_runtime::newest::{Newest as _, NewestSeen as _};
use krypton_types::error_chain::chain;
use krypton_types::names::HUB_LEASE;
use kube::Client;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tokio_util::task::task_tracker::TrackedFuture;
use tonic::Status;

use crate::args::LEASE_DURATION;
use election::{ElectionInput, ElectionState};
pub use election::{LeaderState, LeaderTerm};
use home_writer::later_epoch;

/// On shutdown, the hub waits this long for its writes before it releases the Lease. Writes that are still in
/// flight are safe because they carry the resource versions they were based on.
const WRITES_TIMEOUT: Duration = Duration::from_secs(2);
/// Time to release the Lease: one call, after one that may be in flight.
pub const RELEASE_TIMEOUT: Duration = Duration::from_secs(2);
const READINESS_NOTE: &str = "lead";

/// Leadership state for tasks that write on the home cluster or serve agents. Clones share it.
#[derive(Clone, Debug)]
pub struct Leader {
    state: watch::Receiver<LeaderState>,
    lease: watch::Receiver<LeaseState>,
    times: LeaseTimes,
    in_flight: TaskTracker,
    foreign_epoch: watch::Sender<u64>,
}

impl Leader {
    /// Creates a leader whose state a test controls. While the state is `Leading`, [`Self::may_write`] is always
    /// true.
    pub fn with_state(state: LeaderState) -> (watch::Sender<LeaderState>, Self) {
        let lease_term = state.leader_term().map(|it| it.lease_term.clone());
        let lease = LeaseState {
            renewed: Some(BootTime::now()),
            term: Some(lease_term.unwrap_or_default()),
            ..LeaseState::default()
        };
        let (state_tx, state_rx) = watch::channel(state);
        let times = LeaseTimes {
            fresh: Duration::MAX,
            ..LeaseTimes::for_leader(LEASE_DURATION)
        };
        let leader = Self {
            state: state_rx,
            lease: watch::channel(lease).1,
            times,
            in_flight: TaskTracker::new(),
            foreign_epoch: watch::Sender::new(0),
        };
        (state_tx, leader)
    }

    /// Creates a permanent leader, for a hub without others.
    pub fn always_leading() -> Self {
        Self::with_state(LeaderState::Leading(LeaderTerm {
            epoch: 1,
            lease_term: lease::LeaseTerm::default(),
            since: BootTime::now(),
            acquired_at: clock::wall(),
            previous_leader: None,
        }))
        .1
    }

    /// Waits for the next state change; renewals do not count. Returns false when the election has ended.
    pub async fn changed(&mut self) -> bool {
        self.state.changed().await.is_ok()
    }

    pub fn state(&self) -> LeaderState {
        self.state.get()
    }

    /// Whether the hub may write on the home cluster now. Check it before each write.
    pub fn may_write(&self, now: BootTime) -> bool {
        let state = self.state.get();
        let LeaderState::Leading(leader_term) = &state else {
            return false;
        };
        let lease = self.lease.get();
        lease.is_fresh(now, &self.times) && lease.term.as_ref() == Some(&leader_term.lease_term)
    }

    /// Whether the hub serves agents.
    pub fn serves_agents(&self) -> bool {
        self.state.get().leader_term().is_some()
    }

    /// Checks that this hub serves agents.
    ///
    /// # Errors
    /// Returns `Unavailable` with the name of the leader. The agent then connects to that hub.
    pub fn ensure_serving(&self) -> Result<(), Status> {
        let reason = match &self.state.get() {
            LeaderState::Leading(_) | LeaderState::Unconfirmed(_) => return Ok(()),
            LeaderState::Standby {
                leader: Some(leader),
            } => {
                format!("this hub is a standby; {leader} leads")
            }
            LeaderState::Standby { leader: None } => {
                "this hub is a standby; no hub is the leader yet".to_owned()
            }
            LeaderState::TakingEpoch => "this hub is about to lead".to_owned(),
            LeaderState::Leaving => "this hub stops".to_owned(),
        };
        Err(Status::unavailable(reason))
    }

    /// Fails unless this hub serves agents and may write on the home cluster now.
    ///
    /// # Errors
    /// Returns `Unavailable`, as [`Self::ensure_serving`] does.
    pub fn ensure_writing(&self) -> Result<(), Status> {
        self.ensure_serving()?;
        match self.may_write(BootTime::now()) {
            true => Ok(()),
            false => Err(Status::unavailable(
                "the home cluster does not respond to this hub; retry later",
            )),
        }
    }

    /// Waits until this hub loses leadership while it keeps running.
    pub async fn until_lost(&self) {
        let mut state = self.state.clone();
        let is_lost = |state: &LeaderState| {
            matches!(
                state,
                LeaderState::Standby { .. } | LeaderState::TakingEpoch
            )
        };
        if state.wait_for(is_lost).await.is_err() {
            std::future::pending().await
        }
    }

    /// Waits until this hub shuts down.
    pub async fn until_leaving(&self) {
        let mut state = self.state.clone();
        let leaving = state.wait_for(|state| *state == LeaderState::Leaving).await;
        // An error means that the election has ended.
        drop(leaving);
    }

    /// Returns the current leader term, also while it is unconfirmed.
    pub fn leader_term(&self) -> Option<LeaderTerm> {
        self.state.get().leader_term().cloned()
    }

    /// Returns the start of the current leader term.
    pub(crate) fn term_since(&self) -> Option<BootTime> {
        self.state.get().term_since()
    }

    /// Returns the epoch to write to an object of the home cluster whose recorded epoch is `recorded`. Returns
    /// `None` if this hub is not the leader, or if a later leader has written the object. The hub then takes an
    /// epoch above the recorded one.
    pub fn epoch_for_write(&self, recorded: Option<u64>) -> Option<u64> {
        let own_epoch = self.state.get().leader_term()?.epoch;
        let Some(later) = later_epoch(own_epoch, recorded) else {
            return Some(own_epoch);
        };
        raise_epoch(&self.foreign_epoch, later);
        None
    }

    /// Records the epochs of objects on the home cluster. The next leader takes an epoch above all of them.
    pub fn observe_epochs(&self, recorded: impl Iterator<Item = u64>) {
        let own_epoch = self.state.get().leader_term().map_or(0, |it| it.epoch);
        let later = recorded.filter_map(|epoch| later_epoch(own_epoch, Some(epoch)));
        if let Some(epoch) = later.max() {
            raise_epoch(&self.foreign_epoch, epoch);
        }
    }

    /// Tracks a write on the home cluster. The hub waits for it before it releases the Lease.
    pub fn tracked<F: Future>(&self, write: F) -> TrackedFuture<F> {
        self.in_flight.track_future(write)
    }
}

/// Records an epoch from another hub. An epoch that is not the greatest one wakes no receiver.
pub(crate) fn raise_epoch(greatest: &watch::Sender<u64>, epoch: u64) {
    greatest.send_if_modified(|greatest| {
        let is_greater = epoch > *greatest;
        *greatest = epoch.max(*greatest);
        is_greater
    });
}

/// Inputs of the leader election.
pub(crate) struct LeaderElection {
    /// A separate client: other calls cannot delay Lease renewals on its connection.
    pub client: Client,
    /// Namespace of the hub on the home cluster.
    pub namespace: String,
    /// Name of this hub in the Lease.
    pub holder: String,
    pub times: LeaseTimes,
    /// The greatest epoch that a member or an object of the home cluster has from another hub.
    pub foreign_epoch: watch::Sender<u64>,
    pub readiness: Readiness,
}

/// Handle of a running election.
#[derive(Debug)]
pub struct ElectionHandle {
    pub leader: Leader,
    leaving: CancellationToken,
    idle: CancellationToken,
}

impl LeaderElection {
    /// Returns the handle, and a task that runs the election until [`ElectionHandle::leave`]. The task calls
    /// `on_epoch` with each new epoch, before it publishes the leadership. The second argument is true for the first
    /// epoch of a leader term.
    pub(crate) fn start(
        self,
        on_epoch: impl Fn(&LeaderTerm, bool) + Send + 'static,
    ) -> (ElectionHandle, impl Future<Output = ()> + Send + 'static) {
        let (lease_tx, lease_rx) = watch::channel(LeaseState::default());
        let (state_tx, state_rx) = watch::channel(LeaderState::Standby { leader: None });
        let (leaving, idle) = (CancellationToken::new(), CancellationToken::new());
        let leader = Leader {
            state: state_rx,
            lease: lease_rx.clone(),
            times: self.times,
            in_flight: TaskTracker::new(),
            foreign_epoch: self.foreign_epoch.clone(),
        };
        let name = LeaseName {
            namespace: self.namespace.clone(),
            name: HUB_LEASE.to_owned(),
        };
        let lease = lease::hold(
            self.client.clone(),
            (name, self.times),
            self.holder.clone(),
            watch::channel(LeaseGoal::Hold).1,
            lease_tx,
            leaving.clone(),
            idle.clone(),
        );
        let election = self.run(state_tx, lease_rx, on_epoch, leaving.clone());
        let task = async {
            tokio::join!(lease, election);
        };
        let election_handle = ElectionHandle {
            leader,
            leaving,
            idle,
        };
        (election_handle, task)
    }

    async fn run(
        self,
        state: watch::Sender<LeaderState>,
        mut lease_updates: watch::Receiver<LeaseState>,
        on_epoch: impl Fn(&LeaderTerm, bool),
        leaving: CancellationToken,
    ) {
        let mut foreign_epoch = self.foreign_epoch.subscribe();
        let mut election = ElectionState::new(self.times);
        let mut epoch_request: Option<BoxFuture<'static, Result<u64, ApiError>>> = None;
        let mut epoch_result = None;
        // The greatest epoch that this hub has taken.
        let mut own_epoch = 0;
        let mut last_renewal = None;
        loop {
            let lease = lease_updates.get_and_update();
            let now = BootTime::now();
            let previous = election.state.clone();
            let actions = election.evaluate(&ElectionInput {
                lease: &lease,
                foreign_epoch: foreign_epoch.get_and_update(),
                epoch_result: epoch_result.take(),
                leaving: leaving.is_cancelled(),
                now,
                wall: clock::wall(),
            });
            if actions.take_epoch {
                let (client, namespace) = (self.client.clone(), self.namespace.clone());
                // Include our own epoch, because the ConfigMap may have been deleted since.
                let at_least = own_epoch.max(foreign_epoch.get());
                epoch_request = Some(Box::pin(async move {
                    epoch::next_epoch(&client, &namespace, at_least).await
                }));
            }
            if election.state != previous {
                if let LeaderState::Leading(leader_term) = &election.state
                    && previous.leader_term() != Some(leader_term)
                {
                    let is_new_term = previous.leader_term().is_none();
                    on_epoch(leader_term, is_new_term);
                }
                self.report_change(&previous, &election.state, now);
                state.send_replace(election.state.clone());
            } else if was_stale(last_renewal, lease.renewed, &self.times) {
                // The Lease was stale before this renewal. Tasks that stopped writing must check again.
                state.send_replace(election.state.clone());
            }
            last_renewal = lease.renewed;
            if election.state == LeaderState::Leaving {
                return;
            }
            tokio::select! {
                () = leaving.cancelled() => {}
                changed = lease_updates.changed() => if changed.is_err() { return },
                Ok(()) = foreign_epoch.changed() => {}
                Some(epoch) = OptionFuture::from(epoch_request.as_mut()) => {
                    epoch_request = None;
                    if let Err(error) = &epoch {
                        tracing::warn!(error = %chain(error), "taking a new epoch failed; retrying");
                    }
                    own_epoch = own_epoch.max(*epoch.as_ref().unwrap_or(&0));
                    epoch_result = Some(epoch.map_err(drop));
                }
                () = clock::sleep_until(actions.next_check, now) => {}
            }
        }
    }

    fn report_change(&self, previous: &LeaderState, state: &LeaderState, now: BootTime) {
        let note = match state {
            LeaderState::Standby {
                leader: Some(leader),
            } => {
                tracing::info!(%leader, "this hub is a standby");
                Some(format!("standby: {leader} leads"))
            }
            LeaderState::Standby { leader: None } => {
                if previous.leader_term().is_some() {
                    tracing::warn!("lost leadership: no response from the home API server");
                }
                Some("standby: no leader yet".to_owned())
            }
            LeaderState::TakingEpoch => Some("standby: about to lead".to_owned()),
            LeaderState::Leading(leader_term) => {
                match previous {
                    LeaderState::Unconfirmed(_) => {
                        tracing::info!(
                            epoch = leader_term.epoch,
                            "the home API server responds again; still the leader"
                        );
                    }
                    LeaderState::Leading(_) => {
                        tracing::warn!(
                            epoch = leader_term.epoch,
                            "took a new epoch after a member's claim"
                        );
                    }
                    _ => {
                        tracing::info!(
                            epoch = leader_term.epoch,
                            previous = leader_term.previous_leader,
                            "became leader"
                        );
                    }
                }
                None
            }
            LeaderState::Unconfirmed(leader_term) => {
                tracing::warn!(
                    led_for_s = now.since(leader_term.since).as_secs(),
                    "Lease not renewed in time; writes are suspended"
                );
                Some(
                    "home cluster does not respond; writing nothing, serving agents for now"
                        .to_owned(),
                )
            }
            LeaderState::Leaving => None,
        };
        self.readiness.note(READINESS_NOTE, note);
    }
}

/// Whether a renewal came only after the previous one was too old to write by.
fn was_stale(previous: Option<BootTime>, renewed: Option<BootTime>, times: &LeaseTimes) -> bool {
    previous
        .zip(renewed)
        .is_some_and(|(previous, renewed)| renewed.since(previous) >= times.fresh)
}

impl ElectionHandle {
    /// Stops new writes, waits for writes in flight, and then releases the Lease.
    pub async fn leave(&self) {
        self.leaving.cancel();
        self.leader.in_flight.close();
        let written = self.leader.in_flight.wait();
        if tokio::time::timeout(WRITES_TIMEOUT, written).await.is_err() {
            tracing::warn!("slow writes on the home cluster; releasing the Lease without them");
        }
        self.idle.cancel();
    }
}
