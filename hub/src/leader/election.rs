//! Decides leadership from observations of the Lease. Reads no clock and makes no calls.

use std::time::Duration;

use jiff::Timestamp;
use krypton_runtime::clock::BootTime;
use krypton_runtime::lease::{LeaseState, LeaseTerm, Times};

/// Minimum time between two epochs of one leader term. Each epoch is a new desired state for every member.
pub(super) const EPOCH_EVERY: Duration = Duration::from_secs(10);
/// Delay after an epoch that members required could not be taken.
const EPOCH_AGAIN: Duration = Duration::from_secs(5);

/// A period in which this hub leads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeaderTerm {
    /// Taken after the hub acquired the Lease, and therefore greater than the epochs of all earlier leaders.
    pub epoch: u64,
    /// Term of the Lease. The leader term ends when it changes.
    pub term: LeaseTerm,
    pub since: BootTime,
    /// Wall-clock time at which the hub acquired the Lease.
    pub won: Timestamp,
    /// Holder name of the previous leader, if the hub has seen one.
    pub former: Option<String>,
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

    /// Whether the hub acts on members as a proxy. `before` is the previous result.
    ///
    /// A hub that lost leadership without a known successor keeps acting. A single hub has none, and of two hubs
    /// the member's own Lease selects one. A hub that does not act yet starts only when it becomes leader.
    pub fn acts(&self, before: bool) -> bool {
        match self {
            Self::Leading(_) | Self::Unconfirmed(_) => true,
            Self::Standby { leader: None } | Self::TakingEpoch => before,
            Self::Standby { leader: Some(_) } | Self::Leaving => false,
        }
    }

    /// Whether the hub may publish new desired states. `given` is the epoch of the published ones.
    ///
    /// An unconfirmed leader may not publish, because another hub may lead. A leader must first publish the
    /// epoch of its term. A hub that lost leadership may not publish while it still `acts`. Published desired
    /// states stay.
    pub fn deals(&self, given: u64, acts: bool) -> bool {
        match self {
            Self::Leading(leader_term) => given >= leader_term.epoch,
            Self::Unconfirmed(_) => false,
            Self::Standby { .. } | Self::TakingEpoch | Self::Leaving => !acts,
        }
    }
}

/// Observations at one moment.
#[derive(Debug)]
pub(super) struct Sight<'a> {
    pub hold: &'a LeaseState,
    /// The greatest epoch that a member or an object of the home cluster has from another hub.
    pub ahead: u64,
    /// Result of taking an epoch, if the call has ended.
    pub taken: Option<Result<u64, ()>>,
    pub leaving: bool,
    pub now: BootTime,
    pub wall: Timestamp,
}

/// Actions that accompany the new state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Next {
    /// Take an epoch now.
    pub take_epoch: bool,
    /// Time of the next evaluation without an event.
    pub wake: Option<BootTime>,
}

/// State machine of a hub's leadership and epoch.
#[derive(Debug)]
pub(super) struct ElectionState {
    pub stand: LeaderState,
    times: Times,
    /// Term of the Lease for which an epoch is being taken.
    taking: Option<LeaseTerm>,
    /// Earliest time to take the next epoch.
    epoch_due: BootTime,
    former: Option<String>,
}

impl ElectionState {
    pub(super) fn new(times: Times) -> Self {
        Self {
            stand: LeaderState::Standby { leader: None },
            times,
            taking: None,
            epoch_due: BootTime::default(),
            former: None,
        }
    }

    pub(super) fn next(&mut self, sight: &Sight<'_>) -> Next {
        let Sight { hold, now, .. } = *sight;
        if let Some(other) = &hold.other {
            self.former = Some(other.clone());
        }
        if sight.leaving {
            self.stand = LeaderState::Leaving;
            return Next::default();
        }
        let fresh = hold.is_fresh(now, &self.times);
        let term = hold.term.as_ref().filter(|_| fresh);
        let before = std::mem::replace(&mut self.stand, LeaderState::TakingEpoch);
        self.stand = match (before, term) {
            (
                LeaderState::Leading(leader_term) | LeaderState::Unconfirmed(leader_term),
                Some(term),
            ) if leader_term.term == *term => LeaderState::Leading(leader_term),
            (LeaderState::TakingEpoch, Some(_)) => LeaderState::TakingEpoch,
            // The Lease is new, or was lost and acquired again. Another hub may have led since.
            (_, Some(_)) => {
                self.epoch_due = now;
                LeaderState::TakingEpoch
            }
            (LeaderState::Leading(leader_term) | LeaderState::Unconfirmed(leader_term), None)
                if self.may_still(hold, now) =>
            {
                LeaderState::Unconfirmed(leader_term)
            }
            (_, None) => LeaderState::Standby {
                leader: hold.other.clone(),
            },
        };
        if let Some(taken) = &sight.taken {
            self.took(taken, sight);
        }
        let next = Next {
            take_epoch: self.wants_epoch(sight) && self.epoch_due <= now,
            wake: self.wake(sight),
        };
        if next.take_epoch {
            self.taking.clone_from(&hold.term);
        }
        next
    }

    /// Whether this hub may still hold the Lease.
    fn may_still(&self, hold: &LeaseState, now: BootTime) -> bool {
        hold.renewed
            .is_some_and(|renewed| now.since(renewed) < self.times.keep)
    }

    fn took(&mut self, taken: &Result<u64, ()>, sight: &Sight<'_>) {
        let under = self.taking.take();
        let Sight { hold, now, .. } = *sight;
        let Ok(epoch) = *taken else {
            self.epoch_due = match self.stand {
                LeaderState::TakingEpoch => BootTime(now.0 + self.times.retry),
                _ => BootTime(now.0 + EPOCH_AGAIN),
            };
            return;
        };
        // An epoch from another term may be lower than that of a later leader.
        let same = under.is_some() && under == hold.term;
        match &mut self.stand {
            LeaderState::TakingEpoch if same => {
                self.epoch_due = BootTime(now.0 + EPOCH_EVERY);
                self.stand = LeaderState::Leading(LeaderTerm {
                    epoch,
                    term: under.unwrap_or_default(),
                    since: now,
                    won: sight.wall,
                    former: self.former.take(),
                });
            }
            LeaderState::Leading(leader_term) if same => {
                self.epoch_due = BootTime(now.0 + EPOCH_EVERY);
                leader_term.epoch = epoch;
            }
            _ => {}
        }
    }

    fn wants_epoch(&self, sight: &Sight<'_>) -> bool {
        self.taking.is_none()
            && match &self.stand {
                LeaderState::TakingEpoch => true,
                LeaderState::Leading(leader_term) => sight.ahead >= leader_term.epoch,
                LeaderState::Standby { .. }
                | LeaderState::Unconfirmed(_)
                | LeaderState::Leaving => false,
            }
    }

    fn wake(&self, sight: &Sight<'_>) -> Option<BootTime> {
        let after = |pause| Some(BootTime(sight.hold.renewed?.0 + pause));
        let lapses = match self.stand {
            LeaderState::TakingEpoch | LeaderState::Leading(_) => after(self.times.fresh),
            LeaderState::Unconfirmed(_) => after(self.times.keep),
            LeaderState::Standby { .. } | LeaderState::Leaving => None,
        };
        let epoch = Some(self.epoch_due).filter(|due| self.wants_epoch(sight) && *due > sight.now);
        lapses.into_iter().chain(epoch).min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIMES: Times = Times::of_lead(Duration::from_secs(5));

    fn at(seconds: f64) -> BootTime {
        BootTime(Duration::from_secs_f64(seconds))
    }

    fn term(transitions: i32) -> LeaseTerm {
        LeaseTerm {
            lease: "of-lease".to_owned(),
            transitions,
        }
    }

    fn ours(renewed: f64, transitions: i32) -> LeaseState {
        LeaseState {
            renewed: Some(at(renewed)),
            term: Some(term(transitions)),
            ..LeaseState::default()
        }
    }

    fn others() -> LeaseState {
        LeaseState {
            other: Some("hub/b".to_owned()),
            ..LeaseState::default()
        }
    }

    struct Table {
        election: ElectionState,
        ahead: u64,
    }

    impl Table {
        fn new() -> Self {
            let election = ElectionState::new(TIMES);
            Self { election, ahead: 0 }
        }

        fn look(&mut self, hold: &LeaseState, now: f64, taken: Option<Result<u64, ()>>) -> Next {
            self.election.next(&Sight {
                hold,
                ahead: self.ahead,
                taken,
                leaving: false,
                now: at(now),
                wall: Timestamp::UNIX_EPOCH,
            })
        }

        /// Leads since 100 s with epoch 7, in term 1.
        fn leading() -> Self {
            let mut table = Self::new();
            table.look(&others(), 90.0, None);
            assert!(table.look(&ours(100.0, 1), 100.0, None).take_epoch);
            table.look(&ours(100.0, 1), 100.1, Some(Ok(7)));
            assert_eq!(table.word(), "leads 7");
            table
        }

        pub(crate) fn word(&self) -> String {
            match &self.election.stand {
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
        let mut table = Table::new();
        assert_eq!(
            table.look(&LeaseState::default(), 1.0, None),
            Next::default()
        );
        assert_eq!(table.word(), "standby of nobody");
        table.look(&others(), 2.0, None);
        assert_eq!(table.word(), "standby of hub/b");
        let next = table.look(&ours(10.0, 1), 10.0, None);
        assert_eq!((next.take_epoch, table.word()), (true, "enters".to_owned()));
        // The epoch is requested only once.
        let next = table.look(&ours(10.0, 1), 10.1, None);
        assert_eq!((next.take_epoch, next.wake), (false, Some(at(13.5))));
        // The failed request is retried after half a second.
        let next = table.look(&ours(11.0, 1), 11.0, Some(Err(())));
        assert_eq!((next.take_epoch, next.wake), (false, Some(at(11.5))));
        assert!(table.look(&ours(11.0, 1), 11.5, None).take_epoch);
        table.look(&ours(11.0, 1), 11.6, Some(Ok(7)));
        assert_eq!(table.word(), "leads 7");
        let leader_term = table.election.stand.leader_term().cloned();
        assert_eq!(
            leader_term.and_then(|it| it.former).as_deref(),
            Some("hub/b")
        );
    }

    #[test]
    fn epoch_of_different_term_is_dropped() {
        let mut table = Table::new();
        assert!(table.look(&ours(10.0, 1), 10.0, None).take_epoch);
        // Another hub has led since, with an epoch above the late one.
        table.look(&others(), 16.0, None);
        assert_eq!(table.word(), "standby of hub/b");
        table.look(&ours(30.0, 3), 30.0, None);
        let next = table.look(&ours(30.0, 3), 30.1, Some(Ok(7)));
        assert_eq!((next.take_epoch, table.word()), (true, "enters".to_owned()));
        table.look(&ours(30.0, 3), 30.2, Some(Ok(9)));
        assert_eq!(table.word(), "leads 9");
        // An epoch that arrives after the renewal has become stale is unused, too.
        let mut table = Table::new();
        table.look(&ours(10.0, 1), 10.0, None);
        table.look(&ours(10.0, 1), 14.0, Some(Ok(7)));
        assert_eq!(table.word(), "standby of nobody");
    }

    #[test]
    fn leader_with_failed_renewals_resumes_same_epoch() {
        let mut table = Table::leading();
        let next = table.look(&ours(100.0, 1), 103.4, None);
        assert_eq!(
            (table.word(), next.wake),
            ("leads 7".to_owned(), Some(at(103.5)))
        );
        let next = table.look(&ours(100.0, 1), 103.5, None);
        assert_eq!(
            (table.word(), next.wake),
            ("doubts 7".to_owned(), Some(at(130.0)))
        );
        table.look(&ours(129.0, 1), 129.1, None);
        assert_eq!(table.word(), "leads 7");
    }

    #[test]
    fn leadership_ends_on_other_holder_or_long_silence() {
        let mut table = Table::leading();
        table.look(&others(), 101.0, None);
        assert_eq!(table.word(), "standby of hub/b");
        let mut table = Table::leading();
        table.look(&ours(100.0, 1), 110.0, None);
        table.look(&others(), 111.0, None);
        assert_eq!(table.word(), "standby of hub/b");
        let mut table = Table::leading();
        table.look(&ours(100.0, 1), 110.0, None);
        table.look(&ours(100.0, 1), 130.0, None);
        assert_eq!(table.word(), "standby of nobody");
        // A process that was frozen for long does not become unconfirmed first.
        let mut table = Table::leading();
        table.look(&ours(100.0, 1), 500.0, None);
        assert_eq!(table.word(), "standby of nobody");
    }

    #[test]
    fn regained_lease_requires_new_epoch() {
        for doubts in [false, true] {
            let mut table = Table::leading();
            if doubts {
                table.look(&ours(100.0, 1), 110.0, None);
            }
            let next = table.look(&ours(112.0, 3), 112.0, None);
            assert_eq!((next.take_epoch, table.word()), (true, "enters".to_owned()));
        }
        // The same applies to a Lease that no other hub has held since it seemed lost.
        let mut table = Table::leading();
        table.look(&ours(100.0, 1), 131.0, None);
        assert!(table.look(&ours(140.0, 1), 140.0, None).take_epoch);
    }

    #[test]
    fn leader_takes_later_epoch_at_limited_rate() {
        let mut table = Table::leading();
        table.ahead = 6;
        assert!(!table.look(&ours(101.0, 1), 101.0, None).take_epoch);
        table.ahead = 7;
        let next = table.look(&ours(108.0, 1), 108.0, None);
        assert_eq!((next.take_epoch, next.wake), (false, Some(at(110.1))));
        assert!(table.look(&ours(110.0, 1), 110.1, None).take_epoch);
        let next = table.look(&ours(110.0, 1), 110.2, Some(Err(())));
        assert_eq!(table.word(), "leads 7");
        assert_eq!((next.take_epoch, next.wake), (false, Some(at(113.5))));
        assert!(table.look(&ours(115.0, 1), 115.2, None).take_epoch);
        table.look(&ours(115.0, 1), 115.3, Some(Ok(8)));
        assert_eq!(table.word(), "leads 8");
        let next = table.look(&ours(130.0, 1), 130.0, None);
        assert!(!next.take_epoch);
    }

    #[test]
    fn only_leader_or_unreplaced_predecessor_acts() {
        let leads = || Table::leading().election.stand;
        let doubts = || LeaderState::Unconfirmed(leads().leader_term().unwrap().clone());
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
            (true, doubts(), 7, true, false),
            // The proxy acts for longer than the hub serves agents.
            (true, nobody, 7, true, false),
            (true, LeaderState::TakingEpoch, 7, true, false),
            // The hub leads again and has not read the sources yet.
            (true, leads(), 6, true, false),
            (true, other, 7, false, true),
            (true, LeaderState::Leaving, 7, false, true),
        ];
        for (before, stand, given, acts, deals) in rows {
            assert_eq!(stand.acts(before), acts, "{before} {stand:?}");
            assert_eq!(stand.deals(given, acts), deals, "{stand:?} {given}");
        }
    }

    #[test]
    fn lost_leader_acts_until_another_is_seen() {
        let mut table = Table::leading();
        let mut acts = true;
        for (hold, now, word, expected) in [
            (ours(100.0, 1), 104.0, "doubts 7", true),
            (ours(100.0, 1), 131.0, "standby of nobody", true),
            (ours(100.0, 1), 500.0, "standby of nobody", true),
            (others(), 501.0, "standby of hub/b", false),
            // The API server has not responded since.
            (LeaseState::default(), 502.0, "standby of nobody", false),
        ] {
            table.look(&hold, now, None);
            acts = table.election.stand.acts(acts);
            assert_eq!((table.word().as_str(), acts), (word, expected), "{now}");
        }
        // The Lease is renewed again, and no other hub has held it.
        let mut table = Table::leading();
        table.look(&ours(100.0, 1), 131.0, None);
        table.look(&ours(140.0, 1), 140.0, None);
        assert_eq!(table.word(), "enters");
        assert!(table.election.stand.acts(true));
    }

    #[test]
    fn leaving_hub_does_not_lead_again() {
        let mut table = Table::leading();
        let hold = ours(101.0, 1);
        table.election.next(&Sight {
            hold: &hold,
            ahead: 0,
            taken: None,
            leaving: true,
            now: at(101.0),
            wall: Timestamp::UNIX_EPOCH,
        });
        assert_eq!(table.word(), "leaves");
    }
}
