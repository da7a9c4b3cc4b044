//! Decides leadership from observations of the Lease. Reads no clock and makes no calls.

use std::time::Duration;

use jiff::Timestamp;
use krypton_runtime::clock::BootTime;
use krypton_runtime::lease::{LeaseState, LeaseTerm, LeaseTimes};

/// Minimum time between two epochs of one leader term. Each epoch is a new desired state for every member.
pub(super) const MIN_EPOCH_INTERVAL: Duration = Duration::from_secs(10);
/// Delay before another attempt to take an epoch that members require.
const EPOCH_RETRY_DELAY: Duration = Duration::from_secs(5);

/// A period in which this hub leads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeaderTerm {
    /// Taken after the hub acquired the Lease, and therefore greater than the epochs of all earlier leaders.
    pub epoch: u64,
    /// The leader term ends when the term of the Lease changes.
    pub lease_term: LeaseTerm,
    pub since: BootTime,
    /// Wall-clock time at which the hub acquired the Lease.
    pub acquired_at: Timestamp,
    /// Holder name of the previous leader, if the hub has seen one.
    pub previous_leader: Option<String>,
}

/// Leadership state of this hub.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LeaderState {
    /// Another hub leads, or none yet.
    Standby {
        leader: Option<String>,
    },
    /// This hub holds the Lease and takes an epoch.
    TakingEpoch,
    Leading(LeaderTerm),
    /// The last renewal is too old to write by, and no other leader is known. If the API server is down, no hub
    /// can lead. This hub keeps serving agents for a while.
    Unconfirmed(LeaderTerm),
    /// The process shuts down.
    Leaving,
}

impl LeaderState {
    pub fn leader_term(&self) -> Option<&LeaderTerm> {
        match self {
            Self::Leading(leader_term) | Self::Unconfirmed(leader_term) => Some(leader_term),
            Self::Standby { .. } | Self::TakingEpoch | Self::Leaving => None,
        }
    }

    /// Returns the start of the leader term.
    pub fn term_since(&self) -> Option<BootTime> {
        self.leader_term().map(|leader_term| leader_term.since)
    }

    /// Whether the hub acts on members as a proxy. `previous` is the previous result.
    ///
    /// A hub that lost leadership without a known successor keeps acting. A single hub has none, and of two hubs
    /// the member's own Lease selects one. A hub that does not act yet starts only when it becomes leader.
    pub fn may_act(&self, previous: bool) -> bool {
        match self {
            Self::Leading(_) | Self::Unconfirmed(_) => true,
            Self::Standby { leader: None } | Self::TakingEpoch => previous,
            Self::Standby { leader: Some(_) } | Self::Leaving => false,
        }
    }

    /// Whether the hub may publish new desired states. `published_epoch` is the epoch of the published ones.
    ///
    /// An unconfirmed leader may not publish, because another hub may lead. A leader must first publish the
    /// epoch of its term. A hub that lost leadership may not publish while it still acts on members (`acts`).
    /// Published desired states stay.
    pub fn may_publish(&self, published_epoch: u64, acts: bool) -> bool {
        match self {
            Self::Leading(leader_term) => published_epoch >= leader_term.epoch,
            Self::Unconfirmed(_) => false,
            Self::Standby { .. } | Self::TakingEpoch | Self::Leaving => !acts,
        }
    }
}

/// Inputs of one evaluation of the election.
#[derive(Debug)]
pub(super) struct ElectionInput<'a> {
    pub lease: &'a LeaseState,
    /// The greatest epoch that a member or an object of the home cluster has from another hub.
    pub foreign_epoch: u64,
    /// Result of the request for an epoch, if it has completed.
    pub epoch_result: Option<Result<u64, ()>>,
    pub leaving: bool,
    pub now: BootTime,
    pub wall: Timestamp,
}

/// Actions that accompany the new state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct ElectionActions {
    /// Take an epoch now.
    pub take_epoch: bool,
    /// Time of the next evaluation without an event.
    pub next_check: Option<BootTime>,
}

/// State machine of a hub's leadership and epoch.
#[derive(Debug)]
pub(super) struct ElectionState {
    pub state: LeaderState,
    times: LeaseTimes,
    /// Term of the Lease for which an epoch was requested.
    requested_term: Option<LeaseTerm>,
    /// Earliest time to take the next epoch.
    epoch_due: BootTime,
    previous_leader: Option<String>,
}

impl ElectionState {
    pub(super) fn new(times: LeaseTimes) -> Self {
        Self {
            state: LeaderState::Standby { leader: None },
            times,
            requested_term: None,
            epoch_due: BootTime::default(),
            previous_leader: None,
        }
    }

    pub(super) fn evaluate(&mut self, input: &ElectionInput<'_>) -> ElectionActions {
        let ElectionInput { lease, now, .. } = *input;
        if let Some(other) = &lease.other_holder {
            self.previous_leader = Some(other.clone());
        }
        if input.leaving {
            self.state = LeaderState::Leaving;
            return ElectionActions::default();
        }
        let is_fresh = lease.is_fresh(now, &self.times);
        let term = lease.term.as_ref().filter(|_| is_fresh);
        let previous = std::mem::replace(&mut self.state, LeaderState::TakingEpoch);
        self.state = match (previous, term) {
            (
                LeaderState::Leading(leader_term) | LeaderState::Unconfirmed(leader_term),
                Some(term),
            ) if leader_term.lease_term == *term => LeaderState::Leading(leader_term),
            (LeaderState::TakingEpoch, Some(_)) => LeaderState::TakingEpoch,
            // The Lease is new, or was lost and acquired again. Another hub may have led since.
            (_, Some(_)) => {
                self.epoch_due = now;
                LeaderState::TakingEpoch
            }
            (LeaderState::Leading(leader_term) | LeaderState::Unconfirmed(leader_term), None)
                if self.may_still_hold(lease, now) =>
            {
                LeaderState::Unconfirmed(leader_term)
            }
            (_, None) => LeaderState::Standby {
                leader: lease.other_holder.clone(),
            },
        };
        if let Some(epoch_result) = &input.epoch_result {
            self.record_epoch(epoch_result, input);
        }
        let actions = ElectionActions {
            take_epoch: self.needs_epoch(input) && self.epoch_due <= now,
            next_check: self.next_check(input),
        };
        if actions.take_epoch {
            self.requested_term.clone_from(&lease.term);
        }
        actions
    }

    /// Whether this hub may still hold the Lease.
    fn may_still_hold(&self, lease: &LeaseState, now: BootTime) -> bool {
        lease
            .renewed
            .is_some_and(|renewed| now.since(renewed) < self.times.renew_deadline)
    }

    fn record_epoch(&mut self, epoch_result: &Result<u64, ()>, input: &ElectionInput<'_>) {
        let term = self.requested_term.take();
        let ElectionInput { lease, now, .. } = *input;
        let Ok(epoch) = *epoch_result else {
            self.epoch_due = match self.state {
                LeaderState::TakingEpoch => now + self.times.retry,
                _ => now + EPOCH_RETRY_DELAY,
            };
            return;
        };
        // An epoch from another term may be lower than that of a later leader.
        let is_current_term = term.is_some() && term == lease.term;
        match &mut self.state {
            LeaderState::TakingEpoch if is_current_term => {
                self.epoch_due = now + MIN_EPOCH_INTERVAL;
                self.state = LeaderState::Leading(LeaderTerm {
                    epoch,
                    lease_term: term.unwrap_or_default(),
                    since: now,
                    acquired_at: input.wall,
                    previous_leader: self.previous_leader.take(),
                });
            }
            LeaderState::Leading(leader_term) if is_current_term => {
                self.epoch_due = now + MIN_EPOCH_INTERVAL;
                leader_term.epoch = epoch;
            }
            _ => {}
        }
    }

    fn needs_epoch(&self, input: &ElectionInput<'_>) -> bool {
        self.requested_term.is_none()
            && match &self.state {
                LeaderState::TakingEpoch => true,
                LeaderState::Leading(leader_term) => input.foreign_epoch >= leader_term.epoch,
                LeaderState::Standby { .. }
                | LeaderState::Unconfirmed(_)
                | LeaderState::Leaving => false,
            }
    }

    fn next_check(&self, input: &ElectionInput<'_>) -> Option<BootTime> {
        let after_renewal = |time: Duration| Some(input.lease.renewed? + time);
        let expiry = match self.state {
            LeaderState::TakingEpoch | LeaderState::Leading(_) => after_renewal(self.times.fresh),
            LeaderState::Unconfirmed(_) => after_renewal(self.times.renew_deadline),
            LeaderState::Standby { .. } | LeaderState::Leaving => None,
        };
        let epoch_due =
            Some(self.epoch_due).filter(|due| self.needs_epoch(input) && *due > input.now);
        expiry.into_iter().chain(epoch_due).min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIMES: LeaseTimes = LeaseTimes::for_leader(Duration::from_secs(5));

    fn at(seconds: f64) -> BootTime {
        BootTime(Duration::from_secs_f64(seconds))
    }

    fn term(transitions: i32) -> LeaseTerm {
        LeaseTerm {
            lease: "of-lease".to_owned(),
            transitions,
        }
    }

    fn our_lease(renewed: f64, transitions: i32) -> LeaseState {
        LeaseState {
            renewed: Some(at(renewed)),
            term: Some(term(transitions)),
            ..LeaseState::default()
        }
    }

    fn other_lease() -> LeaseState {
        LeaseState {
            other_holder: Some("hub/b".to_owned()),
            ..LeaseState::default()
        }
    }

    struct Candidate {
        election: ElectionState,
        foreign_epoch: u64,
    }

    impl Candidate {
        fn new() -> Self {
            let election = ElectionState::new(TIMES);
            Self {
                election,
                foreign_epoch: 0,
            }
        }

        fn observe(
            &mut self,
            lease: &LeaseState,
            now: f64,
            epoch_result: Option<Result<u64, ()>>,
        ) -> ElectionActions {
            self.election.evaluate(&ElectionInput {
                lease,
                foreign_epoch: self.foreign_epoch,
                epoch_result,
                leaving: false,
                now: at(now),
                wall: Timestamp::UNIX_EPOCH,
            })
        }

        fn takes_epoch(&mut self, lease: &LeaseState, now: f64) -> bool {
            self.observe(lease, now, None).take_epoch
        }

        /// Returns when to evaluate again. Takes no epoch before.
        fn next_check(
            &mut self,
            lease: &LeaseState,
            now: f64,
            epoch_result: Option<Result<u64, ()>>,
        ) -> Option<BootTime> {
            let actions = self.observe(lease, now, epoch_result);
            assert!(!actions.take_epoch);
            actions.next_check
        }

        /// Leads since 100 s with epoch 7, in term 1.
        fn leading() -> Self {
            let mut candidate = Self::new();
            candidate.observe(&other_lease(), 90.0, None);
            assert!(candidate.takes_epoch(&our_lease(100.0, 1), 100.0));
            candidate.observe(&our_lease(100.0, 1), 100.1, Some(Ok(7)));
            assert_eq!(candidate.summary(), "leads 7");
            candidate
        }

        pub(crate) fn summary(&self) -> String {
            match &self.election.state {
                LeaderState::Standby { leader } => {
                    format!("standby of {}", leader.as_deref().unwrap_or("nobody"))
                }
                LeaderState::TakingEpoch => "enters".to_owned(),
                LeaderState::Leading(leader_term) => format!("leads {}", leader_term.epoch),
                LeaderState::Unconfirmed(leader_term) => format!("doubts {}", leader_term.epoch),
                LeaderState::Leaving => "leaves".to_owned(),
            }
        }
    }

    #[test]
    fn lease_holder_leads_after_taking_epoch() {
        let mut candidate = Candidate::new();
        let actions = candidate.observe(&LeaseState::default(), 1.0, None);
        assert_eq!(actions, ElectionActions::default());
        assert_eq!(candidate.summary(), "standby of nobody");
        candidate.observe(&other_lease(), 2.0, None);
        assert_eq!(candidate.summary(), "standby of hub/b");
        assert!(candidate.takes_epoch(&our_lease(10.0, 1), 10.0));
        assert_eq!(candidate.summary(), "enters");
        // The epoch is requested only once.
        let check = candidate.next_check(&our_lease(10.0, 1), 10.1, None);
        assert_eq!(check, Some(at(13.5)));
        // The failed request is retried after half a second.
        let check = candidate.next_check(&our_lease(11.0, 1), 11.0, Some(Err(())));
        assert_eq!(check, Some(at(11.5)));
        assert!(candidate.takes_epoch(&our_lease(11.0, 1), 11.5));
        candidate.observe(&our_lease(11.0, 1), 11.6, Some(Ok(7)));
        assert_eq!(candidate.summary(), "leads 7");
        let leader_term = candidate.election.state.leader_term().unwrap();
        assert_eq!(leader_term.previous_leader.as_deref(), Some("hub/b"));
    }

    #[test]
    fn epoch_of_different_term_is_dropped() {
        let mut candidate = Candidate::new();
        assert!(candidate.takes_epoch(&our_lease(10.0, 1), 10.0));
        // Another hub has led since, with an epoch above the late one.
        candidate.observe(&other_lease(), 16.0, None);
        assert_eq!(candidate.summary(), "standby of hub/b");
        candidate.observe(&our_lease(30.0, 3), 30.0, None);
        let actions = candidate.observe(&our_lease(30.0, 3), 30.1, Some(Ok(7)));
        assert!(actions.take_epoch);
        assert_eq!(candidate.summary(), "enters");
        candidate.observe(&our_lease(30.0, 3), 30.2, Some(Ok(9)));
        assert_eq!(candidate.summary(), "leads 9");
        // An epoch that arrives after the renewal has become stale is unused, too.
        let mut candidate = Candidate::new();
        candidate.observe(&our_lease(10.0, 1), 10.0, None);
        candidate.observe(&our_lease(10.0, 1), 14.0, Some(Ok(7)));
        assert_eq!(candidate.summary(), "standby of nobody");
    }

    #[test]
    fn leader_with_failed_renewals_resumes_same_epoch() {
        let mut candidate = Candidate::leading();
        for (now, summary, next_check) in [(103.4, "leads 7", 103.5), (103.5, "doubts 7", 130.0)] {
            let check = candidate.next_check(&our_lease(100.0, 1), now, None);
            assert_eq!(candidate.summary(), summary);
            assert_eq!(check, Some(at(next_check)));
        }
        candidate.observe(&our_lease(129.0, 1), 129.1, None);
        assert_eq!(candidate.summary(), "leads 7");
    }

    #[test]
    fn leadership_ends_on_other_holder_or_long_silence() {
        let mut candidate = Candidate::leading();
        candidate.observe(&other_lease(), 101.0, None);
        assert_eq!(candidate.summary(), "standby of hub/b");
        let mut candidate = Candidate::leading();
        candidate.observe(&our_lease(100.0, 1), 110.0, None);
        candidate.observe(&other_lease(), 111.0, None);
        assert_eq!(candidate.summary(), "standby of hub/b");
        let mut candidate = Candidate::leading();
        candidate.observe(&our_lease(100.0, 1), 110.0, None);
        candidate.observe(&our_lease(100.0, 1), 130.0, None);
        assert_eq!(candidate.summary(), "standby of nobody");
        // A process that was frozen for long does not become unconfirmed first.
        let mut candidate = Candidate::leading();
        candidate.observe(&our_lease(100.0, 1), 500.0, None);
        assert_eq!(candidate.summary(), "standby of nobody");
    }

    #[test]
    fn regained_lease_requires_new_epoch() {
        for unconfirmed in [false, true] {
            let mut candidate = Candidate::leading();
            if unconfirmed {
                candidate.observe(&our_lease(100.0, 1), 110.0, None);
            }
            assert!(candidate.takes_epoch(&our_lease(112.0, 3), 112.0));
            assert_eq!(candidate.summary(), "enters");
        }
        // The same applies to a Lease that no other hub has held since it seemed lost.
        let mut candidate = Candidate::leading();
        candidate.observe(&our_lease(100.0, 1), 131.0, None);
        assert!(candidate.takes_epoch(&our_lease(140.0, 1), 140.0));
    }

    #[test]
    fn leader_takes_later_epoch_at_limited_rate() {
        let mut candidate = Candidate::leading();
        candidate.foreign_epoch = 6;
        assert!(!candidate.takes_epoch(&our_lease(101.0, 1), 101.0));
        candidate.foreign_epoch = 7;
        let check = candidate.next_check(&our_lease(108.0, 1), 108.0, None);
        assert_eq!(check, Some(at(110.1)));
        assert!(candidate.takes_epoch(&our_lease(110.0, 1), 110.1));
        let check = candidate.next_check(&our_lease(110.0, 1), 110.2, Some(Err(())));
        assert_eq!(candidate.summary(), "leads 7");
        assert_eq!(check, Some(at(113.5)));
        assert!(candidate.takes_epoch(&our_lease(115.0, 1), 115.2));
        candidate.observe(&our_lease(115.0, 1), 115.3, Some(Ok(8)));
        assert_eq!(candidate.summary(), "leads 8");
        assert!(!candidate.takes_epoch(&our_lease(130.0, 1), 130.0));
    }

    #[test]
    fn only_leader_or_unreplaced_predecessor_acts() {
        let leads = || Candidate::leading().election.state;
        let unconfirmed = || LeaderState::Unconfirmed(leads().leader_term().unwrap().clone());
        let standby = |leader: Option<&str>| LeaderState::Standby {
            leader: leader.map(str::to_owned),
        };
        let (nobody, other) = (standby(None), standby(Some("hub/b")));
        // Columns: before, state, published epoch, acts, deals.
        let rows = [
            (false, nobody.clone(), 0, false, true),
            (false, other.clone(), 0, false, true),
            (false, LeaderState::TakingEpoch, 0, false, true),
            (false, leads(), 0, true, false),
            (false, leads(), 7, true, true),
            (true, leads(), 7, true, true),
            (true, unconfirmed(), 7, true, false),
            // The proxy acts for longer than the hub serves agents.
            (true, nobody, 7, true, false),
            (true, LeaderState::TakingEpoch, 7, true, false),
            // The hub leads again and has not read the sources yet.
            (true, leads(), 6, true, false),
            (true, other, 7, false, true),
            (true, LeaderState::Leaving, 7, false, true),
        ];
        for (previous, state, published_epoch, acts, may_publish) in rows {
            assert_eq!(state.may_act(previous), acts, "{previous} {state:?}");
            let publishes = state.may_publish(published_epoch, acts);
            assert_eq!(publishes, may_publish, "{state:?} {published_epoch}");
        }
    }

    #[test]
    fn lost_leader_acts_until_another_is_seen() {
        let mut candidate = Candidate::leading();
        let mut acts = true;
        for (lease, now, summary, expected) in [
            (our_lease(100.0, 1), 104.0, "doubts 7", true),
            (our_lease(100.0, 1), 131.0, "standby of nobody", true),
            (our_lease(100.0, 1), 500.0, "standby of nobody", true),
            (other_lease(), 501.0, "standby of hub/b", false),
            // The API server has not responded since.
            (LeaseState::default(), 502.0, "standby of nobody", false),
        ] {
            candidate.observe(&lease, now, None);
            acts = candidate.election.state.may_act(acts);
            assert_eq!((&*candidate.summary(), acts), (summary, expected), "{now}");
        }
        // The Lease is renewed again, and no other hub has held it.
        let mut candidate = Candidate::leading();
        candidate.observe(&our_lease(100.0, 1), 131.0, None);
        candidate.observe(&our_lease(140.0, 1), 140.0, None);
        assert_eq!(candidate.summary(), "enters");
        assert!(candidate.election.state.may_act(true));
    }

    #[test]
    fn leaving_hub_does_not_lead_again() {
        let mut candidate = Candidate::leading();
        let lease = our_lease(101.0, 1);
        candidate.election.evaluate(&ElectionInput {
            lease: &lease,
            foreign_epoch: 0,
            epoch_result: None,
            leaving: true,
            now: at(101.0),
            wall: Timestamp::UNIX_EPOCH,
        });
        assert_eq!(candidate.summary(), "leaves");
    }
}
