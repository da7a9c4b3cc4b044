//! State machine of a process that holds or observes a Lease: clocks and responses come in, API calls go out.
//!
//! Renewals by this process count from before the call. Renewals by a different holder count from after the
//! response. Slow calls and a suspended process therefore err on the safe side.

use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;

use super::{LeaseGoal, LeaseState, LeaseTerm, LeaseTimes, is_previous_container};
use crate::clock::BootTime;

/// Upper limit of a holder's expiry. A record may request a longer duration than this process uses, and
/// outages of the API server may extend it, up to this limit.
const EXPIRY_MAX: Duration = Duration::from_secs(120);

/// A request to the API server.
#[derive(Clone, Debug, PartialEq)]
pub enum LeaseRequest {
    Read,
    Create(LeaseSpec),
    /// Replaces the Lease with this `resourceVersion` as the precondition.
    Replace(Box<Lease>),
}

/// Response of the API server.
#[derive(Clone, Debug, PartialEq)]
pub enum LeaseResponse {
    Read(Option<Box<Lease>>),
    Written(Box<Lease>),
    /// The precondition failed: 409, or 404.
    Conflict,
}

/// Decision of a round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RoundDecision {
    /// Write this process as the holder, regardless of the previous one.
    Write,
    /// Another holder is alive. Check again later.
    Wait,
}

/// The last observed state of the Lease, and the time from which it counts.
#[derive(Clone, Debug, PartialEq, Eq)]
struct ObservedLease {
    /// False if the Lease was deleted. Its last holder may not know this, so it keeps its full duration.
    exists: bool,
    uid: String,
    holder: String,
    /// Duration that its holder relies on.
    duration: Duration,
    renew_time: Option<Timestamp>,
    transitions: i32,
    since: BootTime,
    /// Time of the first observation of this state. Unlike `since`, an outage does not move it.
    first_observed: BootTime,
}

impl ObservedLease {
    /// Two reads of the same renewal keep the time of the first. Only the local clock counts.
    fn from_lease(lease: &Lease, previous: Option<&Self>, now: BootTime) -> Self {
        let spec = lease.spec.clone().unwrap_or_default();
        let observed = Self {
            exists: true,
            uid: lease.metadata.uid.clone().unwrap_or_default(),
            duration: spec
                .lease_duration_seconds
                .map_or(Duration::ZERO, |seconds| {
                    Duration::from_secs(u64::try_from(seconds).unwrap_or_default()).min(EXPIRY_MAX)
                }),
            holder: spec.holder_identity.unwrap_or_default(),
            renew_time: spec.renew_time.map(|time| time.0),
            transitions: spec.lease_transitions.unwrap_or_default(),
            since: now,
            first_observed: now,
        };
        observed.keep_times(previous)
    }

    fn deleted(previous: &Self, now: BootTime) -> Self {
        let observed = Self {
            exists: false,
            since: now,
            first_observed: now,
            ..previous.clone()
        };
        observed.keep_times(Some(previous))
    }

    fn keep_times(mut self, previous: Option<&Self>) -> Self {
        if let Some(previous) = previous {
            let observed_at = std::mem::replace(&mut self.since, previous.since);
            self.first_observed = previous.first_observed;
            if self != *previous {
                (self.since, self.first_observed) = (observed_at, observed_at);
            }
        }
        self
    }

    fn term(&self) -> LeaseTerm {
        LeaseTerm {
            lease: self.uid.clone(),
            transitions: self.transitions,
        }
    }
}

/// `is_own` means that this process holds the Lease and knows it. A process that lost the Lease competes like
/// any other. Otherwise, renewals with lost responses could block all processes.
fn decide(
    observed: Option<&ObservedLease>,
    me: &str,
    is_own: bool,
    now: BootTime,
    times: &LeaseTimes,
) -> RoundDecision {
    match observed {
        None => RoundDecision::Write,
        Some(observed) if is_own || observed.holder.is_empty() => RoundDecision::Write,
        // No process is left that could act as this holder.
        Some(observed) if is_previous_container(&observed.holder, me) => RoundDecision::Write,
        Some(observed) if now.since(observed.since) >= expires_after(observed, times) => {
            RoundDecision::Write
        }
        Some(_) => RoundDecision::Wait,
    }
}

/// Respects a holder with longer times, such as a process with a different version.
fn expires_after(observed: &ObservedLease, times: &LeaseTimes) -> Duration {
    times.duration.max(observed.duration)
}

/// The state of one process that uses one Lease.
#[derive(Debug)]
pub struct LeaseStateMachine {
    me: String,
    times: LeaseTimes,
    /// The Lease that the next write replaces. `None` while a write is in progress.
    current: Option<Lease>,
    observed: Option<ObservedLease>,
    state: LeaseState,
    /// The `renewTime` and the local time of the last write. The write may succeed although its response is
    /// lost.
    last_write: Option<(Timestamp, BootTime)>,
    /// Whether a write of this round failed its precondition.
    had_conflict: bool,
    round_failed: bool,
}

impl LeaseStateMachine {
    pub fn new(me: String, times: LeaseTimes) -> Self {
        Self {
            me,
            times,
            current: None,
            observed: None,
            state: LeaseState::default(),
            last_write: None,
            had_conflict: false,
            round_failed: false,
        }
    }

    pub fn state(&self) -> &LeaseState {
        &self.state
    }

    /// Starts a round and returns its first request.
    pub fn start_round(&mut self, goal: LeaseGoal, now: BootTime, wall: Timestamp) -> LeaseRequest {
        (self.had_conflict, self.round_failed) = (false, false);
        // A holder knows the version it wrote last, so it needs no read.
        let held = self
            .observed
            .as_ref()
            .is_some_and(|observed| observed.holder == self.me);
        match self.current.take() {
            Some(lease) if held && goal == LeaseGoal::Hold => self.replace(lease, now, wall),
            _ => LeaseRequest::Read,
        }
    }

    /// Processes a response. Returns the next request, or `None` at the end of the round. `sent_at` is the time of
    /// the request, and `now` the time of the response.
    pub fn handle_response(
        &mut self,
        goal: LeaseGoal,
        response: LeaseResponse,
        (sent_at, now): (BootTime, BootTime),
        wall: Timestamp,
    ) -> Option<LeaseRequest> {
        let next = self.process(goal, response, (sent_at, now), wall);
        // A process that can read but not write must not appear connected, or it would keep others from acting.
        if next.is_none() {
            self.state.last_response = Some(now);
            self.state.problem = None;
        }
        next
    }

    fn process(
        &mut self,
        goal: LeaseGoal,
        response: LeaseResponse,
        (sent_at, now): (BootTime, BootTime),
        wall: Timestamp,
    ) -> Option<LeaseRequest> {
        match response {
            LeaseResponse::Read(lease) => {
                let previous = self.observed.take();
                self.observed = match &lease {
                    Some(lease) => Some(ObservedLease::from_lease(lease, previous.as_ref(), now)),
                    None => previous.map(|previous| ObservedLease::deleted(&previous, now)),
                };
                self.restart_expiry_after_outage(now);
                self.recognize_own_write(now);
                let is_own = self
                    .observed
                    .as_ref()
                    .is_some_and(|observed| observed.holder == self.me);
                let is_valid = |renewed| now.since(renewed) < self.times.renew_deadline;
                let is_own = is_own && self.state.renewed.is_some_and(is_valid);
                let decision = decide(self.observed.as_ref(), &self.me, is_own, now, &self.times);
                if goal == LeaseGoal::Observe || decision == RoundDecision::Wait {
                    self.clear_ownership();
                    return None;
                }
                Some(match lease {
                    Some(lease) => self.replace(*lease, now, wall),
                    None => LeaseRequest::Create(self.renewal_spec(&Lease::default(), now, wall)),
                })
            }
            LeaseResponse::Written(lease) => {
                self.observed = Some(ObservedLease::from_lease(
                    &lease,
                    self.observed.as_ref(),
                    now,
                ));
                self.current = Some(*lease);
                self.state.renewed = Some(sent_at);
                self.state.term = self.observed.as_ref().map(ObservedLease::term);
                self.state.other_holder = None;
                None
            }
            // The conflict need not be another holder.
            LeaseResponse::Conflict if !self.had_conflict => {
                self.had_conflict = true;
                Some(LeaseRequest::Read)
            }
            LeaseResponse::Conflict => {
                self.round_failed = true;
                None
            }
        }
    }

    /// Ends a round after an error. The Lease stays valid until its time runs out.
    pub fn handle_error(&mut self, problem: String, now: BootTime) {
        self.round_failed = true;
        self.state.problem = Some(problem);
        let is_expired = |renewed| now.since(renewed) >= self.times.renew_deadline;
        if self.state.renewed.is_some_and(is_expired) {
            (self.state.renewed, self.state.term) = (None, None);
        }
    }

    /// Returns the time until the next round.
    pub fn pause(&self, goal: LeaseGoal, now: BootTime) -> Duration {
        let times = &self.times;
        if self.round_failed {
            return times.retry;
        }
        match (self.state.renewed, &self.observed) {
            (Some(renewed), _) => times.renew_every.saturating_sub(now.since(renewed)),
            // Do not wait beyond the expiry of the other holder.
            (None, Some(observed)) if goal == LeaseGoal::Hold => {
                let until_expiry =
                    expires_after(observed, times).saturating_sub(now.since(observed.since));
                times.retry.min(until_expiry)
            }
            _ => times.renew_every,
        }
    }

    /// Returns the Lease to write when this process releases it. Returns `None` if it is not the holder.
    pub fn release(mut self, wall: Timestamp) -> Option<Lease> {
        self.state.renewed?;
        let lease = self.current.take()?;
        let spec = self.next_spec(&lease, "", wall);
        Some(Lease {
            spec: Some(spec),
            ..lease
        })
    }

    /// Restarts the holder's expiry after an outage of the API server, because no holder could renew. A limit
    /// prevents a permanently slow API server from keeping a dead holder forever.
    fn restart_expiry_after_outage(&mut self, now: BootTime) {
        let (Some(outage_gap), Some(last_response)) =
            (self.times.outage_gap, self.state.last_response)
        else {
            return;
        };
        if let Some(observed) = &mut self.observed
            && now.since(last_response) > outage_gap
            && now.since(observed.first_observed) < EXPIRY_MAX
        {
            observed.since = now;
        }
    }

    fn clear_ownership(&mut self) {
        (self.state.renewed, self.state.term) = (None, None);
        let observed = self.observed.as_ref();
        self.state.other_holder = observed
            .filter(|observed| {
                observed.exists && !observed.holder.is_empty() && observed.holder != self.me
            })
            .map(|observed| observed.holder.clone());
    }

    /// Recognizes a write by this process whose response was lost. Otherwise, a process with slow writes would
    /// block the Lease without knowing that it holds it.
    fn recognize_own_write(&mut self, now: BootTime) {
        let Some((observed, (renew_time, written_at))) =
            self.observed.as_ref().zip(self.last_write)
        else {
            return;
        };
        // The API server stores microseconds.
        let observed_time = observed.renew_time.map(Timestamp::as_microsecond);
        let is_own = observed.exists
            && observed.holder == self.me
            && observed_time == Some(renew_time.as_microsecond());
        // Accepting an older write would let a process renew the Lease without acting.
        if is_own && now.since(written_at) < self.times.fresh {
            self.state.renewed = self.state.renewed.max(Some(written_at));
            self.state.term = Some(observed.term());
        }
    }

    /// Returns the spec with this process as the holder. `recognize_own_write` compares its time with the stored one.
    fn renewal_spec(&mut self, lease: &Lease, now: BootTime, wall: Timestamp) -> LeaseSpec {
        let spec = self.next_spec(lease, &self.me, wall);
        self.last_write = spec.renew_time.as_ref().map(|time| (time.0, now));
        spec
    }

    fn replace(&mut self, lease: Lease, now: BootTime, wall: Timestamp) -> LeaseRequest {
        let spec = self.renewal_spec(&lease, now, wall);
        LeaseRequest::Replace(Box::new(Lease {
            spec: Some(spec),
            ..lease
        }))
    }

    fn next_spec(&self, lease: &Lease, holder: &str, wall: Timestamp) -> LeaseSpec {
        let previous = lease.spec.clone().unwrap_or_default();
        let is_same_holder = previous.holder_identity.as_deref() == Some(holder);
        let transitions = previous.lease_transitions.unwrap_or_default();
        // If the clock was set back, do not repeat a time: other processes would miss the renewal.
        let after_previous = previous.renew_time.filter(|_| is_same_holder);
        let after_previous =
            after_previous.and_then(|time| time.0.checked_add(Duration::from_micros(1)).ok());
        let renewed = after_previous.map_or(wall, |after_previous| after_previous.max(wall));
        LeaseSpec {
            holder_identity: Some(holder.to_owned()),
            lease_duration_seconds: i32::try_from(self.times.duration.as_secs_f64().ceil() as i64)
                .ok(),
            acquire_time: if is_same_holder {
                previous.acquire_time
            } else {
                Some(MicroTime(wall))
            },
            renew_time: Some(MicroTime(renewed)),
            lease_transitions: Some(if is_same_holder || holder.is_empty() {
                transitions
            } else {
                transitions + 1
            }),
            ..LeaseSpec::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOLD: LeaseGoal = LeaseGoal::Hold;

    fn lease(holder: &str, renewed: i64) -> Lease {
        Lease {
            spec: Some(LeaseSpec {
                holder_identity: Some(holder.to_owned()),
                renew_time: Some(MicroTime(wall(renewed))),
                ..LeaseSpec::default()
            }),
            ..Lease::default()
        }
    }

    fn read_response(holder: &str, renewed: i64) -> LeaseResponse {
        LeaseResponse::Read(Some(Box::new(lease(holder, renewed))))
    }

    fn wall(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

    fn at(seconds: u64) -> BootTime {
        BootTime(Duration::from_secs(seconds))
    }

    /// Runs a round whose read returns this response. Returns the resulting write.
    fn round(
        machine: &mut LeaseStateMachine,
        response: LeaseResponse,
        second: u64,
    ) -> Option<LeaseRequest> {
        assert_eq!(
            machine.start_round(HOLD, at(0), wall(0)),
            LeaseRequest::Read
        );
        machine.handle_response(HOLD, response, (at(second), at(second)), wall(0))
    }

    fn holder_renewed_at(renewed: u64) -> LeaseStateMachine {
        let mut machine = LeaseStateMachine::new("me".to_owned(), LeaseTimes::MEMBER);
        let times = (at(renewed), at(renewed));
        let Some(LeaseRequest::Create(spec)) =
            round(&mut machine, LeaseResponse::Read(None), renewed)
        else {
            panic!("it is free");
        };
        let written = Lease {
            spec: Some(spec),
            ..Lease::default()
        };
        machine.handle_response(
            HOLD,
            LeaseResponse::Written(Box::new(written)),
            times,
            wall(0),
        );
        assert_eq!(machine.state().renewed, Some(at(renewed)));
        machine
    }

    #[test]
    fn renewing_holder_keeps_lease_despite_wrong_clock() {
        let mut machine = LeaseStateMachine::new("me".to_owned(), LeaseTimes::MEMBER);
        for second in 0..600_u64 {
            // The other holder's clock is years behind, but it renews every 15 s.
            let renewed = 1_000 + i64::try_from(second / 15).unwrap();
            let next = round(&mut machine, read_response("other", renewed), second);
            assert_eq!(next, None, "second {second}");
        }
    }

    #[test]
    fn silent_holder_is_replaced_after_locally_measured_duration() {
        // The holder's clock may be minutes ahead or behind.
        for renewed in [-600, 0, 600] {
            let mut machine = LeaseStateMachine::new("me".to_owned(), LeaseTimes::MEMBER);
            assert_eq!(
                round(&mut machine, read_response("other", renewed), 100),
                None
            );
            assert_eq!(
                round(&mut machine, read_response("other", renewed), 159),
                None
            );
            assert_eq!(machine.pause(HOLD, at(159)), Duration::from_secs(1));
            let next = round(&mut machine, read_response("other", renewed), 160);
            assert!(matches!(next, Some(LeaseRequest::Replace(_))), "{next:?}");
        }
    }

    #[test]
    fn renewals_count_from_call_and_observations_from_answer() {
        let mut machine = LeaseStateMachine::new("me".to_owned(), LeaseTimes::MEMBER);
        machine.start_round(HOLD, at(0), wall(0));
        // The other holder may have written it just before the response.
        machine.handle_response(HOLD, read_response("other", 5), (at(100), at(140)), wall(0));
        assert_eq!(round(&mut machine, read_response("other", 5), 199), None);
        let next = round(&mut machine, read_response("other", 5), 200);
        assert!(matches!(next, Some(LeaseRequest::Replace(_))), "{next:?}");
        let written = LeaseResponse::Written(Box::new(lease("me", 6)));
        machine.handle_response(HOLD, written, (at(200), at(207)), wall(0));
        assert_eq!(machine.state().renewed, Some(at(200)));
    }

    #[test]
    fn released_lease_is_acquired_immediately() {
        let mut machine = LeaseStateMachine::new("me".to_owned(), LeaseTimes::MEMBER);
        let next = round(&mut machine, read_response("", 5), 1);
        assert!(matches!(next, Some(LeaseRequest::Replace(_))), "{next:?}");
        let mut machine = holder_renewed_at(1);
        let next = machine.start_round(HOLD, at(0), wall(0));
        assert!(matches!(next, LeaseRequest::Replace(_)), "{next:?}");
    }

    #[test]
    fn lease_of_previous_process_is_acquired_immediately() {
        let machine_of = |name: &str| LeaseStateMachine::new(name.to_owned(), LeaseTimes::MEMBER);
        let (me, previous, other) = ("agent/a/2@uid-1", "agent/a/1@uid-1", "agent/a/1@uid-2");
        let mut machine = machine_of(me);
        let next = round(&mut machine, read_response(previous, 5), 1);
        assert!(matches!(next, Some(LeaseRequest::Replace(_))), "{next:?}");
        // The same applies after the Lease was deleted.
        let mut machine = machine_of(me);
        let observe = |machine: &mut LeaseStateMachine, response| {
            machine.start_round(LeaseGoal::Observe, at(0), wall(0));
            machine.handle_response(LeaseGoal::Observe, response, (at(1), at(1)), wall(0))
        };
        assert_eq!(observe(&mut machine, read_response(previous, 5)), None);
        let next = round(&mut machine, LeaseResponse::Read(None), 2);
        assert!(matches!(next, Some(LeaseRequest::Create(_))), "{next:?}");
        // A process that lost the Lease treats its own record like any other record.
        for (me, holder) in [
            (me, other),
            (me, me),
            (me, "agent/a/1"),
            ("agent/a/2", previous),
        ] {
            assert_eq!(
                round(&mut machine_of(me), read_response(holder, 5), 1),
                None,
                "{me} {holder}"
            );
        }
    }

    #[test]
    fn deleted_lease_stays_with_holder_for_lease_duration() {
        let mut machine = LeaseStateMachine::new("me".to_owned(), LeaseTimes::MEMBER);
        assert_eq!(round(&mut machine, read_response("other", 5), 50), None);
        assert_eq!(round(&mut machine, LeaseResponse::Read(None), 80), None);
        assert_eq!(round(&mut machine, LeaseResponse::Read(None), 139), None);
        let next = round(&mut machine, LeaseResponse::Read(None), 140);
        assert!(matches!(next, Some(LeaseRequest::Create(_))), "{next:?}");

        let mut holder = holder_renewed_at(10);
        holder.start_round(HOLD, at(0), wall(0));
        let times = (at(25), at(25));
        let next = holder.handle_response(HOLD, LeaseResponse::Conflict, times, wall(0));
        assert_eq!(next, Some(LeaseRequest::Read));
        let next = holder.handle_response(HOLD, LeaseResponse::Read(None), times, wall(0));
        assert!(matches!(next, Some(LeaseRequest::Create(_))), "{next:?}");
    }

    #[test]
    fn conflicting_write_does_not_end_lease_term() {
        let mut machine = holder_renewed_at(10);
        machine.start_round(HOLD, at(0), wall(0));
        let times = (at(25), at(25));
        let next = machine.handle_response(HOLD, LeaseResponse::Conflict, times, wall(0));
        assert_eq!(next, Some(LeaseRequest::Read));
        assert_eq!(machine.state().renewed, Some(at(10)));
        let next = machine.handle_response(HOLD, read_response("me", 10), times, wall(0));
        assert!(matches!(next, Some(LeaseRequest::Replace(_))), "{next:?}");
        // After a second conflict, the process retries soon while the last renewal is valid.
        let next = machine.handle_response(HOLD, LeaseResponse::Conflict, times, wall(0));
        assert_eq!(
            (next, machine.pause(HOLD, at(25))),
            (None, LeaseTimes::MEMBER.retry)
        );
        assert_eq!(machine.state().renewed, Some(at(10)));
        assert_eq!(round(&mut machine, read_response("other", 26), 28), None);
        assert_eq!(machine.state().renewed, None);
        assert_eq!(machine.state().other_holder.as_deref(), Some("other"));
    }

    #[test]
    fn unanswered_renewal_counts_from_call_once_read_back() {
        let mut machine = holder_renewed_at(10);
        machine.start_round(HOLD, at(25), wall(25));
        machine.handle_error("no answer".to_owned(), at(33));
        assert_eq!(
            machine.start_round(HOLD, at(36), wall(36)),
            LeaseRequest::Read
        );
        let times = (at(36), at(40));
        let next = machine.handle_response(HOLD, read_response("me", 25), times, wall(40));
        assert!(matches!(next, Some(LeaseRequest::Replace(_))), "{next:?}");
        assert_eq!(machine.state().renewed, Some(at(25)));
        // This write has not succeeded, or not yet.
        machine.handle_error("no answer".to_owned(), at(48));
        machine.start_round(HOLD, at(51), wall(51));
        machine.handle_response(HOLD, read_response("me", 25), (at(51), at(52)), wall(52));
        assert_eq!(machine.state().renewed, Some(at(25)));
    }

    #[test]
    fn lost_lease_is_not_reclaimed_before_lease_duration() {
        let mut machine = holder_renewed_at(10);
        machine.start_round(HOLD, at(25), wall(25));
        machine.handle_error("no answer".to_owned(), at(33));
        // The write succeeded, but its holder learns this too late. Other processes get their chance.
        assert_eq!(round(&mut machine, read_response("me", 25), 55), None);
        let state = machine.state();
        assert_eq!((state.renewed, state.other_holder.clone()), (None, None));
        assert_eq!(round(&mut machine, read_response("me", 25), 114), None);
        let next = round(&mut machine, read_response("me", 25), 115);
        assert!(matches!(next, Some(LeaseRequest::Replace(_))), "{next:?}");
    }

    #[test]
    fn holder_without_answers_loses_lease_before_expiry() {
        let mut machine = holder_renewed_at(10);
        machine.start_round(HOLD, at(0), wall(0));
        machine.handle_error("no answer".to_owned(), at(54));
        assert_eq!(machine.state().renewed, Some(at(10)));
        assert_eq!(
            machine.start_round(HOLD, at(0), wall(0)),
            LeaseRequest::Read
        );
        machine.handle_error("no answer".to_owned(), at(55));
        assert_eq!(machine.state().renewed, None);
        assert_eq!(machine.release(wall(0)), None);
    }

    #[test]
    fn longer_recorded_duration_is_honoured_within_cap() {
        let other_response = |seconds| {
            let mut lease = lease("other", 5);
            if let Some(spec) = &mut lease.spec {
                spec.lease_duration_seconds = Some(seconds);
            }
            LeaseResponse::Read(Some(Box::new(lease)))
        };
        // Duration in the record, and the effective expiry. The expiry has an upper limit.
        for (recorded, expiry) in [(0, 5), (-7, 5), (5, 5), (60, 60), (i32::MAX, 120)] {
            let times = LeaseTimes::for_leader(Duration::from_secs(5));
            let mut machine = LeaseStateMachine::new("me".to_owned(), times);
            for second in 100..100 + expiry {
                assert_eq!(
                    round(&mut machine, other_response(recorded), second),
                    None,
                    "{recorded}"
                );
            }
            assert!(machine.pause(HOLD, at(99 + expiry)) <= times.retry);
            let next = round(&mut machine, other_response(recorded), 100 + expiry);
            assert!(
                matches!(next, Some(LeaseRequest::Replace(_))),
                "{recorded}: {next:?}"
            );
        }
    }

    #[test]
    fn outage_restarts_holder_expiry_for_lead_lease_only() {
        // Returns the index of the round that takes over. `seconds` are the times of successful rounds.
        let takeover_round = |times, seconds: &[u64]| {
            let mut machine = LeaseStateMachine::new("me".to_owned(), times);
            let mut rounds = seconds.iter();
            rounds.position(|second| {
                round(&mut machine, read_response("other", 5), *second).is_some()
            })
        };
        let leader = LeaseTimes::for_leader(Duration::from_secs(5));
        assert_eq!(takeover_round(leader, &[100, 102, 104, 105]), Some(3));
        assert_eq!(
            takeover_round(leader, &[100, 102, 105, 106, 108, 109, 110]),
            Some(6)
        );
        assert_eq!(
            takeover_round(LeaseTimes::MEMBER, &[100, 150, 160]),
            Some(2)
        );
        // A permanently slow API server keeps a dead holder for two minutes only.
        let slow: Vec<u64> = (100..300).step_by(3).collect();
        assert_eq!(takeover_round(leader, &slow), Some(41));
    }

    #[test]
    fn reacquired_lease_starts_new_term() {
        let written_response = |transitions| {
            let mut lease = lease("me", 1);
            lease.metadata.uid = Some("of-lease".to_owned());
            if let Some(spec) = &mut lease.spec {
                spec.lease_transitions = Some(transitions);
            }
            LeaseResponse::Written(Box::new(lease))
        };
        let mut machine = holder_renewed_at(10);
        let times = (at(25), at(25));
        let mut term_after = |transitions| {
            machine.handle_response(HOLD, written_response(transitions), times, wall(0));
            machine.state().term.clone().unwrap()
        };
        let first = term_after(1);
        assert_eq!(first.lease, "of-lease");
        assert_eq!(term_after(1), first);
        assert_ne!(term_after(3), first);
        machine.handle_error("no answer".to_owned(), at(80));
        assert_eq!(machine.state().term, None);
    }

    #[test]
    fn a_clock_set_back_repeats_no_renew_time() {
        let mut machine = holder_renewed_at(10);
        let mut renew = |wall| {
            let LeaseRequest::Replace(lease) = machine.start_round(HOLD, at(0), wall) else {
                panic!("it is held");
            };
            let time = lease.spec.clone().unwrap().renew_time.unwrap().0;
            machine.handle_response(HOLD, LeaseResponse::Written(lease), (at(25), at(25)), wall);
            time
        };
        let times = [500, 400, 500, 501].map(|second| renew(wall(second)));
        assert!(times.is_sorted_by(|one, next| one < next), "{times:?}");
        assert_eq!(times[3], wall(501));
    }

    #[test]
    fn transitions_count_changes_of_the_holder_only() {
        let me = LeaseStateMachine::new("me".to_owned(), LeaseTimes::MEMBER);
        let acquired = me.next_spec(&lease("other", 5), "me", wall(9));
        assert_eq!(acquired.lease_transitions, Some(1));
        let renewed = me.next_spec(
            &Lease {
                spec: Some(acquired),
                ..Lease::default()
            },
            "me",
            wall(9),
        );
        assert_eq!(renewed.lease_transitions, Some(1));
    }
}
