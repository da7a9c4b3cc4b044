use super::*;

const HOLD: LeaseGoal = LeaseGoal::Hold;

fn lease_of(spec: LeaseSpec) -> Lease {
    Lease {
        spec: Some(spec),
        ..Lease::default()
    }
}

fn lease(holder: &str, renewed: i64) -> Lease {
    lease_of(LeaseSpec {
        holder_identity: Some(holder.to_owned()),
        renew_time: Some(MicroTime(wall(renewed))),
        ..LeaseSpec::default()
    })
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
    let Some(LeaseRequest::Create(spec)) = round(&mut machine, LeaseResponse::Read(None), renewed)
    else {
        panic!("it is free");
    };
    let written = LeaseResponse::Written(Box::new(lease_of(spec)));
    machine.handle_response(HOLD, written, times, wall(0));
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
        for second in [100, 159] {
            let next = round(&mut machine, read_response("other", renewed), second);
            assert_eq!(next, None, "second {second}");
        }
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
        let next = round(&mut machine_of(me), read_response(holder, 5), 1);
        assert_eq!(next, None, "{me} {holder}");
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
    assert_eq!(next, None);
    assert_eq!(machine.pause(HOLD, at(25)), LeaseTimes::MEMBER.retry);
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
        rounds.position(|second| round(&mut machine, read_response("other", 5), *second).is_some())
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
    let renewed = me.next_spec(&lease_of(acquired), "me", wall(9));
    assert_eq!(renewed.lease_transitions, Some(1));
}

#[test]
fn runs_stop_starting_half_lease_after_renewal() {
    let state = LeaseState {
        renewed: Some(at(10)),
        ..LeaseState::default()
    };
    assert!(state.may_start(at(39)));
    assert!(!state.may_start(at(40)));
    assert!(!LeaseState::default().may_start(at(0)));
}
