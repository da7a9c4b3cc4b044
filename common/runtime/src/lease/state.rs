//! State machine of a process that holds or observes a Lease: clocks and responses come in, API calls go out.
//!
//! Renewals by this process count from before the call. Renewals by a different holder count from after the
//! response. Slow calls and a suspended process therefore err on the safe side.

use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;

use super::{LeaseGoal, LeaseState, LeaseTerm, Times, is_former_life};
use crate::clock::BootTime;

/// Upper limit of a holder's expiry. A record may request a longer duration than this process uses, and
/// outages of the API server may extend it, up to this limit.
const LONGEST: Duration = Duration::from_secs(120);

/// An API call.
#[derive(Clone, Debug, PartialEq)]
pub enum Call {
    Read,
    Create(LeaseSpec),
    /// Replaces the Lease with this `resourceVersion` as the precondition.
    Replace(Box<Lease>),
}

/// Response of the API server.
#[derive(Clone, Debug, PartialEq)]
pub enum Answer {
    Found(Option<Box<Lease>>),
    Written(Box<Lease>),
    /// The precondition failed: 409, or 404.
    Overtaken,
}

/// Decision of a round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    /// Write this process as the holder, regardless of the previous one.
    Write,
    /// Another holder is alive. Check again later.
    Wait,
}

/// The last observed state of the Lease, and the time from which it counts.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Sighting {
    /// False if the Lease was deleted. Its last holder may not know this, so it keeps its full duration.
    there: bool,
    uid: String,
    holder: String,
    /// Duration that its holder relies on.
    duration: Duration,
    renew_time: Option<Timestamp>,
    transitions: i32,
    since: BootTime,
    /// Time of the first observation of this state. Unlike `since`, an outage does not move it.
    first: BootTime,
}

impl Sighting {
    /// Two reads of the same renewal keep the time of the first. Only the local clock counts.
    fn of(lease: &Lease, before: Option<&Self>, now: BootTime) -> Self {
        let spec = lease.spec.clone().unwrap_or_default();
        let seen = Self {
            there: true,
            uid: lease.metadata.uid.clone().unwrap_or_default(),
            duration: spec
                .lease_duration_seconds
                .map_or(Duration::ZERO, |seconds| {
                    Duration::from_secs(u64::try_from(seconds).unwrap_or_default()).min(LONGEST)
                }),
            holder: spec.holder_identity.unwrap_or_default(),
            renew_time: spec.renew_time.map(|time| time.0),
            transitions: spec.lease_transitions.unwrap_or_default(),
            since: now,
            first: now,
        };
        seen.after(before)
    }

    fn of_none(before: &Self, now: BootTime) -> Self {
        let seen = Self {
            there: false,
            since: now,
            first: now,
            ..before.clone()
        };
        seen.after(Some(before))
    }

    fn after(mut self, before: Option<&Self>) -> Self {
        if let Some(before) = before {
            let now = std::mem::replace(&mut self.since, before.since);
            self.first = before.first;
            if self != *before {
                (self.since, self.first) = (now, now);
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

/// `ours` means that this process holds the Lease and knows it. A process that lost the Lease competes like
/// any other. Otherwise, renewals with lost responses could block all processes.
fn step(seen: Option<&Sighting>, me: &str, ours: bool, now: BootTime, times: &Times) -> Step {
    match seen {
        None => Step::Write,
        Some(seen) if ours || seen.holder.is_empty() => Step::Write,
        // No process is left that could act as this holder.
        Some(seen) if is_former_life(&seen.holder, me) => Step::Write,
        Some(seen) if now.since(seen.since) >= dead_after(seen, times) => Step::Write,
        Some(_) => Step::Wait,
    }
}

/// Respects a holder with longer times, such as a process with a different version.
fn dead_after(seen: &Sighting, times: &Times) -> Duration {
    times.duration.max(seen.duration)
}

/// One process that uses one Lease.
#[derive(Debug)]
pub struct Actor {
    me: String,
    times: Times,
    /// The Lease that the next write replaces. `None` while a write is in progress.
    current: Option<Lease>,
    seen: Option<Sighting>,
    hold: LeaseState,
    /// The `renewTime` and the local time of the last write. The write may succeed although its response is
    /// lost.
    wrote: Option<(Timestamp, BootTime)>,
    /// Whether a write of this round failed its precondition.
    overtaken: bool,
    failed: bool,
}

impl Actor {
    pub fn new(me: String, times: Times) -> Self {
        Self {
            me,
            times,
            current: None,
            seen: None,
            hold: LeaseState::default(),
            wrote: None,
            overtaken: false,
            failed: false,
        }
    }

    pub fn hold(&self) -> &LeaseState {
        &self.hold
    }

    /// Starts a round and returns its first call.
    pub fn begin(&mut self, wish: LeaseGoal, now: BootTime, wall: Timestamp) -> Call {
        (self.overtaken, self.failed) = (false, false);
        // A holder knows the version it wrote last, so it needs no read.
        let held = self
            .seen
            .as_ref()
            .is_some_and(|seen| seen.holder == self.me);
        match self.current.take() {
            Some(lease) if held && wish == LeaseGoal::Hold => self.replace(lease, now, wall),
            _ => Call::Read,
        }
    }

    /// Processes a response. Returns the next call, or `None` at the end of the round. `asked` is the time of
    /// the call, and `now` the time of the response.
    pub fn answered(
        &mut self,
        wish: LeaseGoal,
        answer: Answer,
        (asked, now): (BootTime, BootTime),
        wall: Timestamp,
    ) -> Option<Call> {
        let next = self.after(wish, answer, (asked, now), wall);
        // A process that can read but not write must not appear connected, or it would keep others from acting.
        if next.is_none() {
            self.hold.heard = Some(now);
            self.hold.problem = None;
        }
        next
    }

    fn after(
        &mut self,
        wish: LeaseGoal,
        answer: Answer,
        (asked, now): (BootTime, BootTime),
        wall: Timestamp,
    ) -> Option<Call> {
        match answer {
            Answer::Found(lease) => {
                let before = self.seen.take();
                self.seen = match &lease {
                    Some(lease) => Some(Sighting::of(lease, before.as_ref(), now)),
                    None => before.map(|before| Sighting::of_none(&before, now)),
                };
                self.excuse(now);
                self.recognise(now);
                let ours = self
                    .seen
                    .as_ref()
                    .is_some_and(|seen| seen.holder == self.me);
                let known = |renewed| now.since(renewed) < self.times.keep;
                let ours = ours && self.hold.renewed.is_some_and(known);
                let step = step(self.seen.as_ref(), &self.me, ours, now, &self.times);
                if wish == LeaseGoal::Observe || step == Step::Wait {
                    self.lost();
                    return None;
                }
                Some(match lease {
                    Some(lease) => self.replace(*lease, now, wall),
                    None => Call::Create(self.renewal(&Lease::default(), now, wall)),
                })
            }
            Answer::Written(lease) => {
                self.seen = Some(Sighting::of(&lease, self.seen.as_ref(), now));
                self.current = Some(*lease);
                self.hold.renewed = Some(asked);
                self.hold.term = self.seen.as_ref().map(Sighting::term);
                self.hold.other = None;
                None
            }
            // The conflict need not be another holder.
            Answer::Overtaken if !self.overtaken => {
                self.overtaken = true;
                Some(Call::Read)
            }
            Answer::Overtaken => {
                self.failed = true;
                None
            }
        }
    }

    /// Ends a round after an error. The Lease stays valid until its time runs out.
    pub fn failed(&mut self, problem: String, now: BootTime) {
        self.failed = true;
        self.hold.problem = Some(problem);
        let late = |renewed| now.since(renewed) >= self.times.keep;
        if self.hold.renewed.is_some_and(late) {
            (self.hold.renewed, self.hold.term) = (None, None);
        }
    }

    /// Returns the time until the next round.
    pub fn pause(&self, wish: LeaseGoal, now: BootTime) -> Duration {
        let times = &self.times;
        if self.failed {
            return times.retry;
        }
        match (self.hold.renewed, &self.seen) {
            (Some(renewed), _) => times.renew_every.saturating_sub(now.since(renewed)),
            // Do not wait beyond the expiry of the other holder.
            (None, Some(seen)) if wish == LeaseGoal::Hold => {
                let dead = dead_after(seen, times).saturating_sub(now.since(seen.since));
                times.retry.min(dead)
            }
            _ => times.renew_every,
        }
    }

    /// Returns the Lease to write when this process releases it. Returns `None` if it is not the holder.
    pub fn release(mut self, wall: Timestamp) -> Option<Lease> {
        self.hold.renewed?;
        let lease = self.current.take()?;
        let spec = self.spec_of(&lease, "", wall);
        Some(Lease {
            spec: Some(spec),
            ..lease
        })
    }

    /// Restarts the holder's expiry after an outage of the API server, because no holder could renew. A limit
    /// prevents a permanently slow API server from keeping a dead holder forever.
    fn excuse(&mut self, now: BootTime) {
        let (Some(gap), Some(heard)) = (self.times.gap, self.hold.heard) else {
            return;
        };
        if let Some(seen) = &mut self.seen
            && now.since(heard) > gap
            && now.since(seen.first) < LONGEST
        {
            seen.since = now;
        }
    }

    fn lost(&mut self) {
        (self.hold.renewed, self.hold.term) = (None, None);
        let seen = self.seen.as_ref();
        self.hold.other = seen
            .filter(|seen| seen.there && !seen.holder.is_empty() && seen.holder != self.me)
            .map(|seen| seen.holder.clone());
    }

    /// Recognizes a write by this process whose response was lost. Otherwise, a process with slow writes would
    /// block the Lease without knowing that it holds it.
    fn recognise(&mut self, now: BootTime) {
        let Some((seen, (wrote, at))) = self.seen.as_ref().zip(self.wrote) else {
            return;
        };
        // The API server stores microseconds.
        let renewed = seen.renew_time.map(Timestamp::as_microsecond);
        let ours = seen.there && seen.holder == self.me && renewed == Some(wrote.as_microsecond());
        // Accepting an older write would let a process renew the Lease without acting.
        if ours && now.since(at) < self.times.fresh {
            self.hold.renewed = self.hold.renewed.max(Some(at));
            self.hold.term = Some(seen.term());
        }
    }

    /// Returns the spec with this process as the holder. `recognise` compares its time with the stored one.
    fn renewal(&mut self, lease: &Lease, now: BootTime, wall: Timestamp) -> LeaseSpec {
        let spec = self.spec_of(lease, &self.me, wall);
        self.wrote = spec.renew_time.as_ref().map(|time| (time.0, now));
        spec
    }

    fn replace(&mut self, lease: Lease, now: BootTime, wall: Timestamp) -> Call {
        let spec = self.renewal(&lease, now, wall);
        Call::Replace(Box::new(Lease {
            spec: Some(spec),
            ..lease
        }))
    }

    fn spec_of(&self, lease: &Lease, holder: &str, now: Timestamp) -> LeaseSpec {
        let before = lease.spec.clone().unwrap_or_default();
        let same = before.holder_identity.as_deref() == Some(holder);
        let transitions = before.lease_transitions.unwrap_or_default();
        // If the clock was set back, do not repeat a time: other processes would miss the renewal.
        let later = before.renew_time.filter(|_| same);
        let later = later.and_then(|time| time.0.checked_add(Duration::from_micros(1)).ok());
        let renewed = later.map_or(now, |later| later.max(now));
        LeaseSpec {
            holder_identity: Some(holder.to_owned()),
            lease_duration_seconds: i32::try_from(self.times.duration.as_secs_f64().ceil() as i64)
                .ok(),
            acquire_time: if same {
                before.acquire_time
            } else {
                Some(MicroTime(now))
            },
            renew_time: Some(MicroTime(renewed)),
            lease_transitions: Some(if same || holder.is_empty() {
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

    fn found(holder: &str, renewed: i64) -> Answer {
        Answer::Found(Some(Box::new(lease(holder, renewed))))
    }

    fn wall(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

    fn at(seconds: u64) -> BootTime {
        BootTime(Duration::from_secs(seconds))
    }

    /// Runs a round whose read returns this response. Returns the resulting write.
    fn round(actor: &mut Actor, says: Answer, second: u64) -> Option<Call> {
        assert_eq!(actor.begin(HOLD, at(0), wall(0)), Call::Read);
        actor.answered(HOLD, says, (at(second), at(second)), wall(0))
    }

    fn holding(renewed: u64) -> Actor {
        let mut actor = Actor::new("me".to_owned(), Times::MEMBER);
        let asked = (at(renewed), at(renewed));
        let Some(Call::Create(spec)) = round(&mut actor, Answer::Found(None), renewed) else {
            panic!("it is free");
        };
        let written = Lease {
            spec: Some(spec),
            ..Lease::default()
        };
        actor.answered(HOLD, Answer::Written(Box::new(written)), asked, wall(0));
        assert_eq!(actor.hold().renewed, Some(at(renewed)));
        actor
    }

    #[test]
    fn renewing_holder_keeps_lease_despite_wrong_clock() {
        let mut actor = Actor::new("me".to_owned(), Times::MEMBER);
        for second in 0..600_u64 {
            // The other holder's clock is years behind, but it renews every 15 s.
            let renewed = 1_000 + i64::try_from(second / 15).unwrap();
            let next = round(&mut actor, found("other", renewed), second);
            assert_eq!(next, None, "second {second}");
        }
    }

    #[test]
    fn silent_holder_is_replaced_after_locally_measured_duration() {
        // The holder's clock may be minutes ahead or behind.
        for renewed in [-600, 0, 600] {
            let mut actor = Actor::new("me".to_owned(), Times::MEMBER);
            assert_eq!(round(&mut actor, found("other", renewed), 100), None);
            assert_eq!(round(&mut actor, found("other", renewed), 159), None);
            assert_eq!(actor.pause(HOLD, at(159)), Duration::from_secs(1));
            let next = round(&mut actor, found("other", renewed), 160);
            assert!(matches!(next, Some(Call::Replace(_))), "{next:?}");
        }
    }

    #[test]
    fn renewals_count_from_call_and_observations_from_answer() {
        let mut actor = Actor::new("me".to_owned(), Times::MEMBER);
        actor.begin(HOLD, at(0), wall(0));
        // The other holder may have written it just before the response.
        actor.answered(HOLD, found("other", 5), (at(100), at(140)), wall(0));
        assert_eq!(round(&mut actor, found("other", 5), 199), None);
        let next = round(&mut actor, found("other", 5), 200);
        assert!(matches!(next, Some(Call::Replace(_))), "{next:?}");
        let written = Answer::Written(Box::new(lease("me", 6)));
        actor.answered(HOLD, written, (at(200), at(207)), wall(0));
        assert_eq!(actor.hold().renewed, Some(at(200)));
    }

    #[test]
    fn released_lease_is_acquired_immediately() {
        let mut actor = Actor::new("me".to_owned(), Times::MEMBER);
        let next = round(&mut actor, found("", 5), 1);
        assert!(matches!(next, Some(Call::Replace(_))), "{next:?}");
        let mut actor = holding(1);
        let next = actor.begin(HOLD, at(0), wall(0));
        assert!(matches!(next, Call::Replace(_)), "{next:?}");
    }

    #[test]
    fn lease_of_previous_process_is_acquired_immediately() {
        let pod = |name: &str| Actor::new(name.to_owned(), Times::MEMBER);
        let (me, former, other) = ("agent/a/2@uid-1", "agent/a/1@uid-1", "agent/a/1@uid-2");
        let mut actor = pod(me);
        let next = round(&mut actor, found(former, 5), 1);
        assert!(matches!(next, Some(Call::Replace(_))), "{next:?}");
        // The same applies after the Lease was deleted.
        let mut actor = pod(me);
        let look = |actor: &mut Actor, says| {
            actor.begin(LeaseGoal::Observe, at(0), wall(0));
            actor.answered(LeaseGoal::Observe, says, (at(1), at(1)), wall(0))
        };
        assert_eq!(look(&mut actor, found(former, 5)), None);
        let next = round(&mut actor, Answer::Found(None), 2);
        assert!(matches!(next, Some(Call::Create(_))), "{next:?}");
        // A process that lost the Lease treats its own record like any other record.
        for (me, holder) in [
            (me, other),
            (me, me),
            (me, "agent/a/1"),
            ("agent/a/2", former),
        ] {
            assert_eq!(
                round(&mut pod(me), found(holder, 5), 1),
                None,
                "{me} {holder}"
            );
        }
    }

    #[test]
    fn deleted_lease_stays_with_holder_for_lease_duration() {
        let mut actor = Actor::new("me".to_owned(), Times::MEMBER);
        assert_eq!(round(&mut actor, found("other", 5), 50), None);
        assert_eq!(round(&mut actor, Answer::Found(None), 80), None);
        assert_eq!(round(&mut actor, Answer::Found(None), 139), None);
        let next = round(&mut actor, Answer::Found(None), 140);
        assert!(matches!(next, Some(Call::Create(_))), "{next:?}");

        let mut holder = holding(10);
        holder.begin(HOLD, at(0), wall(0));
        let asked = (at(25), at(25));
        let next = holder.answered(HOLD, Answer::Overtaken, asked, wall(0));
        assert_eq!(next, Some(Call::Read));
        let next = holder.answered(HOLD, Answer::Found(None), asked, wall(0));
        assert!(matches!(next, Some(Call::Create(_))), "{next:?}");
    }

    #[test]
    fn conflicting_write_does_not_end_lease_term() {
        let mut actor = holding(10);
        actor.begin(HOLD, at(0), wall(0));
        let asked = (at(25), at(25));
        let next = actor.answered(HOLD, Answer::Overtaken, asked, wall(0));
        assert_eq!(next, Some(Call::Read));
        assert_eq!(actor.hold().renewed, Some(at(10)));
        let next = actor.answered(HOLD, found("me", 10), asked, wall(0));
        assert!(matches!(next, Some(Call::Replace(_))), "{next:?}");
        // After a second conflict, the process retries soon while the last renewal is valid.
        let next = actor.answered(HOLD, Answer::Overtaken, asked, wall(0));
        assert_eq!(
            (next, actor.pause(HOLD, at(25))),
            (None, Times::MEMBER.retry)
        );
        assert_eq!(actor.hold().renewed, Some(at(10)));
        assert_eq!(round(&mut actor, found("other", 26), 28), None);
        assert_eq!(actor.hold().renewed, None);
        assert_eq!(actor.hold().other.as_deref(), Some("other"));
    }

    #[test]
    fn unanswered_renewal_counts_from_call_once_read_back() {
        let mut actor = holding(10);
        actor.begin(HOLD, at(25), wall(25));
        actor.failed("no answer".to_owned(), at(33));
        assert_eq!(actor.begin(HOLD, at(36), wall(36)), Call::Read);
        let asked = (at(36), at(40));
        let next = actor.answered(HOLD, found("me", 25), asked, wall(40));
        assert!(matches!(next, Some(Call::Replace(_))), "{next:?}");
        assert_eq!(actor.hold().renewed, Some(at(25)));
        // This write has not succeeded, or not yet.
        actor.failed("no answer".to_owned(), at(48));
        actor.begin(HOLD, at(51), wall(51));
        actor.answered(HOLD, found("me", 25), (at(51), at(52)), wall(52));
        assert_eq!(actor.hold().renewed, Some(at(25)));
    }

    #[test]
    fn lost_lease_is_not_reclaimed_before_lease_duration() {
        let mut actor = holding(10);
        actor.begin(HOLD, at(25), wall(25));
        actor.failed("no answer".to_owned(), at(33));
        // The write succeeded, but its holder learns this too late. Other processes get their chance.
        assert_eq!(round(&mut actor, found("me", 25), 55), None);
        let hold = actor.hold();
        assert_eq!((hold.renewed, hold.other.clone()), (None, None));
        assert_eq!(round(&mut actor, found("me", 25), 114), None);
        let next = round(&mut actor, found("me", 25), 115);
        assert!(matches!(next, Some(Call::Replace(_))), "{next:?}");
    }

    #[test]
    fn holder_without_answers_loses_lease_before_expiry() {
        let mut actor = holding(10);
        actor.begin(HOLD, at(0), wall(0));
        actor.failed("no answer".to_owned(), at(54));
        assert_eq!(actor.hold().renewed, Some(at(10)));
        assert_eq!(actor.begin(HOLD, at(0), wall(0)), Call::Read);
        actor.failed("no answer".to_owned(), at(55));
        assert_eq!(actor.hold().renewed, None);
        assert_eq!(actor.release(wall(0)), None);
    }

    #[test]
    fn longer_recorded_duration_is_honoured_within_cap() {
        let other = |seconds| {
            let mut lease = lease("other", 5);
            if let Some(spec) = &mut lease.spec {
                spec.lease_duration_seconds = Some(seconds);
            }
            Answer::Found(Some(Box::new(lease)))
        };
        // Duration in the record, and the effective expiry. The expiry has an upper limit.
        for (says, dead) in [(0, 5), (-7, 5), (5, 5), (60, 60), (i32::MAX, 120)] {
            let times = Times::of_lead(Duration::from_secs(5));
            let mut actor = Actor::new("me".to_owned(), times);
            for second in 100..100 + dead {
                assert_eq!(round(&mut actor, other(says), second), None, "{says}");
            }
            assert!(actor.pause(HOLD, at(99 + dead)) <= times.retry);
            let next = round(&mut actor, other(says), 100 + dead);
            assert!(matches!(next, Some(Call::Replace(_))), "{says}: {next:?}");
        }
    }

    #[test]
    fn outage_restarts_holder_expiry_for_lead_lease_only() {
        // Returns the index of the round that takes over. `answered` are the times of successful rounds.
        let looks = |times, answered: &[u64]| {
            let mut actor = Actor::new("me".to_owned(), times);
            let mut looks = answered.iter();
            looks.position(|second| round(&mut actor, found("other", 5), *second).is_some())
        };
        let lead = Times::of_lead(Duration::from_secs(5));
        assert_eq!(looks(lead, &[100, 102, 104, 105]), Some(3));
        assert_eq!(looks(lead, &[100, 102, 105, 106, 108, 109, 110]), Some(6));
        assert_eq!(looks(Times::MEMBER, &[100, 150, 160]), Some(2));
        // A permanently slow API server keeps a dead holder for two minutes only.
        let slow: Vec<u64> = (100..300).step_by(3).collect();
        assert_eq!(looks(lead, &slow), Some(41));
    }

    #[test]
    fn reacquired_lease_starts_new_term() {
        let written = |transitions| {
            let mut lease = lease("me", 1);
            lease.metadata.uid = Some("of-lease".to_owned());
            if let Some(spec) = &mut lease.spec {
                spec.lease_transitions = Some(transitions);
            }
            Answer::Written(Box::new(lease))
        };
        let mut actor = holding(10);
        let asked = (at(25), at(25));
        let mut term_after = |transitions| {
            actor.answered(HOLD, written(transitions), asked, wall(0));
            actor.hold().term.clone().unwrap()
        };
        let first = term_after(1);
        assert_eq!(first.lease, "of-lease");
        assert_eq!(term_after(1), first);
        assert_ne!(term_after(3), first);
        actor.failed("no answer".to_owned(), at(80));
        assert_eq!(actor.hold().term, None);
    }

    #[test]
    fn a_clock_set_back_repeats_no_renew_time() {
        let mut actor = holding(10);
        let mut renew = |wall| {
            let Call::Replace(lease) = actor.begin(HOLD, at(0), wall) else {
                panic!("it is held");
            };
            let time = lease.spec.clone().unwrap().renew_time.unwrap().0;
            actor.answered(HOLD, Answer::Written(lease), (at(25), at(25)), wall);
            time
        };
        let times = [500, 400, 500, 501].map(|second| renew(wall(second)));
        assert!(times.is_sorted_by(|one, next| one < next), "{times:?}");
        assert_eq!(times[3], wall(501));
    }

    #[test]
    fn transitions_count_changes_of_the_holder_only() {
        let me = Actor::new("me".to_owned(), Times::MEMBER);
        let taken = me.spec_of(&lease("other", 5), "me", wall(9));
        assert_eq!(taken.lease_transitions, Some(1));
        let renewed = me.spec_of(
            &Lease {
                spec: Some(taken),
                ..Lease::default()
            },
            "me",
            wall(9),
        );
        assert_eq!(renewed.lease_transitions, Some(1));
    }
}
