//! State machine of a process that holds or observes a Lease: clocks and responses come in, API calls go out.
//!
//! Renewals by this process count from before the call. Renewals by a different holder count from after the
//! response. Slow calls and a suspended process therefore err on the safe side.

use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;

use super::holder::is_previous_container;
use super::times::{KILL_AFTER, LeaseTimes};
use crate::clock::BootTime;

/// Upper limit of a holder's expiry. A record may request a longer duration than this process uses, and
/// outages of the API server may extend it, up to this limit.
const EXPIRY_MAX: Duration = Duration::from_secs(120);

/// A term of a Lease: the Lease's UID, which changes when it is deleted and recreated, and the number of
/// transitions.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LeaseTerm {
    pub lease: String,
    pub transitions: i32,
}

/// State of the Lease.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LeaseState {
    /// Time of the last own renewal. `None` if another process holds the Lease.
    pub renewed: Option<BootTime>,
    /// Term of this process. It changes when the process loses and acquires the Lease again.
    pub term: Option<LeaseTerm>,
    /// The holder, if it is another process.
    pub other_holder: Option<String>,
    /// Time of the API server's last response.
    pub last_response: Option<BootTime>,
    /// Error of the last call.
    pub problem: Option<String>,
}

impl LeaseState {
    /// Returns whether a Helm run may start under a member's Lease.
    pub fn may_start(&self, now: BootTime) -> bool {
        self.is_fresh(now, &LeaseTimes::MEMBER)
    }

    /// Returns whether work that the Lease guards may start, because no other process can hold the Lease yet.
    pub fn is_fresh(&self, now: BootTime, times: &LeaseTimes) -> bool {
        self.renewed
            .is_some_and(|renewed| now.since(renewed) < times.fresh)
    }

    /// Returns the time limit of runs, or `None` if the limit has passed.
    pub fn runs_until(&self, now: BootTime) -> Option<BootTime> {
        let until = self.renewed? + KILL_AFTER;
        (now < until).then_some(until)
    }
}

/// Intended use of the Lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LeaseGoal {
    /// Hold the Lease and become the only writer.
    Hold,
    /// Observe the holder without any write.
    Observe,
}

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

/// Returns true if this process may write itself as the holder, regardless of the previous one.
///
/// `is_own` means that this process holds the Lease and knows it. A process that lost the Lease competes like
/// any other. Otherwise, renewals with lost responses could block all processes.
fn may_hold(
    observed: Option<&ObservedLease>,
    me: &str,
    is_own: bool,
    now: BootTime,
    times: &LeaseTimes,
) -> bool {
    observed.is_none_or(|observed| {
        is_own
            || observed.holder.is_empty()
            // No process is left that could act as this holder.
            || is_previous_container(&observed.holder, me)
            || now.since(observed.since) >= expires_after(observed, times)
    })
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
        let held = self.is_recorded_holder();
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
                let is_valid = |renewed| now.since(renewed) < self.times.renew_deadline;
                let is_own = self.is_recorded_holder() && self.state.renewed.is_some_and(is_valid);
                let may_hold = may_hold(self.observed.as_ref(), &self.me, is_own, now, &self.times);
                if goal == LeaseGoal::Observe || !may_hold {
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

    fn is_recorded_holder(&self) -> bool {
        let observed = self.observed.as_ref();
        observed.is_some_and(|observed| observed.holder == self.me)
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
mod tests;
