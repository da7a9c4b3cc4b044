//! Leader election of the hubs. The leader writes on the home cluster and serves agents. Owns the Lease
//! `krypton-hub` in the hub's namespace, and the hub's epoch.
//!
//! A hub writes only while [`Leader::writes`] returns true. That check uses a clock that keeps running while
//! the process is frozen. A hub that wakes up after another one has taken over therefore cannot write.

mod election;
mod epoch;
pub mod home_writer;
pub mod pod_label;

use std::pin::Pin;
use std::time::Duration;

use krypton_runtime::admin::Readiness;
use krypton_runtime::call::ApiError;
use krypton_runtime::clock::{self, BootTime};
use krypton_runtime::lease::{self, LeaseGoal, LeaseName, LeaseState, Times};
use krypton_runtime::newest::{Newest as _, NewestSeen as _};
use krypton_types::error_chain::chain;
use krypton_types::names::HUB_LEASE;
use kube::Client;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tokio_util::task::task_tracker::TrackedFuture;
use tonic::Status;

use election::{ElectionState, Sight};
pub use election::{LeaderState, LeaderTerm};
use home_writer::{Verdict, verdict};

/// Duration of the Lease without a renewal. After the leader is killed, another hub takes over after this time and
/// one more poll. The duration exceeds an API server outage of half a second many times over.
pub const DURATION: Duration = Duration::from_secs(5);

/// On shutdown, the hub waits this long for its writes before it releases the Lease. Writes that are still in
/// flight are safe because they carry the resource versions they were based on.
const IN_FLIGHT: Duration = Duration::from_secs(2);
/// Time to release the Lease: one call, after one that may be in flight.
pub const GIVING_UP: Duration = Duration::from_secs(2);
const ABOUT: &str = "lead";

/// Leadership state for tasks that write on the home cluster or serve agents. Clones share it.
#[derive(Clone, Debug)]
pub struct Leader {
    stand: watch::Receiver<LeaderState>,
    hold: watch::Receiver<LeaseState>,
    times: Times,
    in_flight: TaskTracker,
    ahead: watch::Sender<u64>,
}

impl Leader {
    /// Creates a leader whose state a test controls. While the state is `Leading`, [`Self::writes`] is always
    /// true.
    pub fn by_hand(stand: LeaderState) -> (watch::Sender<LeaderState>, Self) {
        let hold = LeaseState {
            renewed: Some(BootTime::now()),
            term: Some(
                stand
                    .leader_term()
                    .map_or_else(Default::default, |leader_term| leader_term.term.clone()),
            ),
            ..LeaseState::default()
        };
        let (stand, rx) = watch::channel(stand);
        let times = Times {
            fresh: Duration::MAX,
            ..Times::of_lead(DURATION)
        };
        let lead = Self {
            stand: rx,
            hold: watch::channel(hold).1,
            times,
            in_flight: TaskTracker::new(),
            ahead: watch::Sender::new(0),
        };
        (stand, lead)
    }

    /// Creates a permanent leader, for a hub without others.
    pub fn alone() -> Self {
        Self::by_hand(LeaderState::Leading(LeaderTerm {
            epoch: 1,
            term: lease::LeaseTerm::default(),
            since: BootTime::now(),
            won: clock::wall(),
            former: None,
        }))
        .1
    }

    /// Waits for the next state change; renewals do not count. Returns false when the election has ended.
    pub async fn changed(&mut self) -> bool {
        self.stand.changed().await.is_ok()
    }

    pub fn stand(&self) -> LeaderState {
        self.stand.get()
    }

    /// Whether the hub may write on the home cluster now. Check it before each write.
    pub fn writes(&self, now: BootTime) -> bool {
        let stand = self.stand.get();
        let LeaderState::Leading(leader_term) = &stand else {
            return false;
        };
        let hold = self.hold.get();
        hold.is_fresh(now, &self.times) && hold.term.as_ref() == Some(&leader_term.term)
    }

    /// Whether the hub serves agents.
    pub fn serves(&self) -> bool {
        self.stand.get().leader_term().is_some()
    }

    /// Checks that this hub serves agents.
    ///
    /// # Errors
    /// Returns `Unavailable` with the name of the leader. The agent then connects to that hub.
    pub fn gate(&self) -> Result<(), Status> {
        let why = match &self.stand.get() {
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
        Err(Status::unavailable(why))
    }

    /// Waits until this hub loses leadership while it keeps running.
    pub async fn lost(&self) {
        let mut stand = self.stand.clone();
        let lost = |stand: &LeaderState| {
            matches!(
                stand,
                LeaderState::Standby { .. } | LeaderState::TakingEpoch
            )
        };
        if stand.wait_for(lost).await.is_err() {
            std::future::pending().await
        }
    }

    /// Waits until this hub shuts down.
    pub async fn left(&self) {
        let mut stand = self.stand.clone();
        let left = stand.wait_for(|stand| *stand == LeaderState::Leaving).await;
        // An error means that the election has ended.
        drop(left);
    }

    /// Returns the current leader term, also while it is unconfirmed.
    pub fn leader_term(&self) -> Option<LeaderTerm> {
        self.stand.get().leader_term().cloned()
    }

    /// Returns the epoch to write to an object of the home cluster whose recorded epoch is `recorded`. Returns
    /// `None` if this hub is not the leader, or if a later leader has written the object. The hub then takes an
    /// epoch above the recorded one.
    pub fn mark(&self, recorded: Option<u64>) -> Option<u64> {
        let ours = self.stand.get().leader_term()?.epoch;
        match verdict(ours, recorded) {
            Verdict::Write => Some(ours),
            Verdict::Overtaken(epoch) => {
                self.is_ahead(epoch);
                None
            }
        }
    }

    /// Records the epochs of objects on the home cluster. The next leader takes an epoch above all of them.
    pub fn sees(&self, recorded: impl Iterator<Item = u64>) {
        let ours = self.stand.get().leader_term().map_or(0, |it| it.epoch);
        let greatest =
            recorded.filter(|it| matches!(verdict(ours, Some(*it)), Verdict::Overtaken(_)));
        if let Some(epoch) = greatest.max() {
            self.is_ahead(epoch);
        }
    }

    fn is_ahead(&self, epoch: u64) {
        self.ahead.send_if_modified(|known| {
            let later = epoch > *known;
            *known = (*known).max(epoch);
            later
        });
    }

    /// Tracks a write on the home cluster. The hub waits for it before it releases the Lease.
    pub fn tracked<F: Future>(&self, write: F) -> TrackedFuture<F> {
        self.in_flight.track_future(write)
    }
}

/// Inputs of the leader election.
pub struct LeaderElection {
    /// A separate client: other calls cannot delay Lease renewals on its connection.
    pub client: Client,
    /// Namespace of the hub on the home cluster.
    pub namespace: String,
    /// Name of this hub in the Lease.
    pub holder: String,
    pub times: Times,
    /// The greatest epoch that a member or an object of the home cluster has from another hub.
    pub ahead: watch::Sender<u64>,
    pub readiness: Readiness,
}

impl std::fmt::Debug for LeaderElection {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Election")
            .field("holder", &self.holder)
            .finish_non_exhaustive()
    }
}

/// Handle of a running election.
#[derive(Debug)]
pub struct ElectionHandle {
    pub lead: Leader,
    leaving: CancellationToken,
    idle: CancellationToken,
}

type Taking = Pin<Box<dyn Future<Output = Result<u64, ApiError>> + Send>>;

impl LeaderElection {
    /// Starts a task that runs the election until [`ElectionHandle::leave`]. Calls `won` with each new epoch, before
    /// the hub publishes its leadership. The second argument is true for the first epoch of a leader term.
    pub fn stand(
        self,
        won: impl Fn(&LeaderTerm, bool) + Send + 'static,
    ) -> (ElectionHandle, impl Future<Output = ()> + Send + 'static) {
        let (holds, hold) = watch::channel(LeaseState::default());
        let (stand, stand_rx) = watch::channel(LeaderState::Standby { leader: None });
        let (leaving, idle) = (CancellationToken::new(), CancellationToken::new());
        let lead = Leader {
            stand: stand_rx,
            hold: hold.clone(),
            times: self.times,
            in_flight: TaskTracker::new(),
            ahead: self.ahead.clone(),
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
            holds,
            leaving.clone(),
            idle.clone(),
        );
        let deciding = self.run(stand, hold, won, leaving.clone());
        let task = async {
            tokio::join!(lease, deciding);
        };
        let election_handle = ElectionHandle {
            lead,
            leaving,
            idle,
        };
        (election_handle, task)
    }

    async fn run(
        self,
        stand: watch::Sender<LeaderState>,
        mut holds: watch::Receiver<LeaseState>,
        won: impl Fn(&LeaderTerm, bool),
        leaving: CancellationToken,
    ) {
        let mut ahead = self.ahead.subscribe();
        let mut election = ElectionState::new(self.times);
        let mut taking: Option<Taking> = None;
        let mut taken = None;
        // The greatest epoch that this hub has taken.
        let mut own = 0;
        let mut renewed = None;
        loop {
            let hold = holds.see();
            let now = BootTime::now();
            let before = election.stand.clone();
            let next = election.next(&Sight {
                hold: &hold,
                ahead: ahead.see(),
                taken: taken.take(),
                leaving: leaving.is_cancelled(),
                now,
                wall: clock::wall(),
            });
            if next.take_epoch {
                let (client, namespace) = (self.client.clone(), self.namespace.clone());
                // Include our own epoch, because the ConfigMap may have been deleted since.
                let at_least = own.max(ahead.get());
                taking = Some(Box::pin(async move {
                    epoch::next_epoch(&client, &namespace, at_least).await
                }));
            }
            if election.stand != before {
                if let LeaderState::Leading(leader_term) = &election.stand
                    && before.leader_term() != Some(leader_term)
                {
                    let begins = before.leader_term().is_none();
                    won(leader_term, begins);
                }
                self.tell(&before, &election.stand, now);
                stand.send_replace(election.stand.clone());
            } else if late(renewed, hold.renewed, &self.times) {
                // The Lease was stale before this renewal. Tasks that stopped writing must check again.
                stand.send_replace(election.stand.clone());
            }
            renewed = hold.renewed;
            if election.stand == LeaderState::Leaving {
                return;
            }
            tokio::select! {
                () = leaving.cancelled() => {}
                changed = holds.changed() => if changed.is_err() { return },
                Ok(()) = ahead.changed() => {}
                epoch = ended(&mut taking) => {
                    if let Err(error) = &epoch {
                        tracing::warn!(error = %chain(error), "taking a new epoch failed; retrying");
                    }
                    own = own.max(*epoch.as_ref().unwrap_or(&0));
                    taken = Some(epoch.map_err(drop));
                }
                () = clock::sleep_until(next.wake, now) => {}
            }
        }
    }

    fn tell(&self, before: &LeaderState, stand: &LeaderState, now: BootTime) {
        let note = match stand {
            LeaderState::Standby {
                leader: Some(leader),
            } => {
                tracing::info!(%leader, "this hub is a standby");
                Some(format!("standby: {leader} leads"))
            }
            LeaderState::Standby { leader: None } => {
                if before.leader_term().is_some() {
                    tracing::warn!("lost leadership: no response from the home API server");
                }
                Some("standby: no leader yet".to_owned())
            }
            LeaderState::TakingEpoch => Some("standby: about to lead".to_owned()),
            LeaderState::Leading(leader_term) => {
                match before {
                    LeaderState::Unconfirmed(_) => {
                        tracing::info!(
                            epoch = leader_term.epoch,
                            "the home API server responds again; still the leader"
                        );
                    }
                    LeaderState::Leading(_) => {
                        tracing::warn!(
                            epoch = leader_term.epoch,
                            "a member has a later epoch; the home cluster was restored, or another hub acted"
                        );
                    }
                    _ => {
                        tracing::info!(
                            epoch = leader_term.epoch,
                            former = leader_term.former,
                            "this hub leads"
                        );
                    }
                }
                None
            }
            LeaderState::Unconfirmed(leader_term) => {
                tracing::warn!(
                    led_for_s = now.since(leader_term.since).as_secs(),
                    "the Lease was not renewed in time: nothing is written until it is"
                );
                Some(
                    "home cluster does not respond; writing nothing, serving agents for now"
                        .to_owned(),
                )
            }
            LeaderState::Leaving => None,
        };
        self.readiness.note(ABOUT, note);
    }
}

/// Whether a renewal came only after the previous one was too old to write by.
fn late(before: Option<BootTime>, now: Option<BootTime>, times: &Times) -> bool {
    before
        .zip(now)
        .is_some_and(|(before, now)| now.since(before) >= times.fresh)
}

/// Waits forever if no epoch is being taken.
async fn ended(taking: &mut Option<Taking>) -> Result<u64, ApiError> {
    let Some(call) = taking else {
        return std::future::pending().await;
    };
    let epoch = call.await;
    *taking = None;
    epoch
}

impl ElectionHandle {
    /// Stops new writes, waits for writes in flight, and then releases the Lease.
    pub async fn leave(&self) {
        self.leaving.cancel();
        self.lead.in_flight.close();
        let written = self.lead.in_flight.wait();
        if tokio::time::timeout(IN_FLIGHT, written).await.is_err() {
            tracing::warn!("slow writes on the home cluster; releasing the Lease without them");
        }
        self.idle.cancel();
    }
}
