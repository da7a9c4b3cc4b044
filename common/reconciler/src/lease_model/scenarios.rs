//! Generates faults, and verifies that one writer acts at a time and that writing resumes.

use std::fmt;

use proptest::prelude::*;

use super::network::{Flow, HEALTHY_LINK, Link, holder};
use super::{AGENTS, Fault, PROXY, SimulatedMember, Time};

/// Time within which an able agent acquires the Lease: the drain of the other holder and some rounds.
const AGENT_WINS: Time = 300_000;

/// Delays are well below or well above the deadline of a call, both ways together. Close to it, an agent's reads would
/// succeed and keep the hub away, while its writes would fail.
fn any_flow() -> impl Strategy<Value = Flow> {
    prop_oneof![
        2 => Just(Flow::Pass),
        1 => Just(Flow::Drop),
        2 => (0..2_500_u64).prop_map(Flow::Delay),
        2 => (9_000..100_000_u64).prop_map(Flow::Delay),
    ]
}

fn any_fault() -> impl Strategy<Value = Fault> {
    let index = || 0..=AGENTS;
    let link = prop_oneof![
        1 => Just(Link::Reset),
        2 => Just(HEALTHY_LINK),
        4 => (any_flow(), any_flow()).prop_map(|(request, response)| Link::Open { request, response }),
    ];
    prop_oneof![
        6 => (index(), link).prop_map(|(index, link)| Fault::Link(index, link)),
        2 => (0..AGENTS, any::<bool>()).prop_map(|(index, open)| Fault::Session(index, open)),
        2 => index().prop_map(Fault::Stop),
        2 => index().prop_map(Fault::Suspend),
        4 => index().prop_map(Fault::Wake),
        2 => index().prop_map(Fault::Kill),
        1 => index().prop_map(Fault::Terminate),
        3 => index().prop_map(Fault::Start),
        1 => (index(), -600..=600_i64).prop_map(|(index, wall)| Fault::WallClock(index, wall)),
        1 => Just(Fault::Annotate),
        1 => prop_oneof![Just(0), Just(2_000), 9_000..20_000_u64].prop_map(Fault::SlowWrites),
    ]
}

/// Short and long pauses before each fault.
fn any_scenario() -> impl Strategy<Value = Vec<(Time, Fault)>> {
    let pause = prop_oneof![
        3 => 0..15_000_u64,
        2 => 15_000..70_000_u64,
        1 => 70_000..200_000_u64,
    ];
    proptest::collection::vec((pause, any_fault()), 0..14)
}

fn with_log(member: &SimulatedMember, error: impl fmt::Display) -> TestCaseError {
    TestCaseError::fail(format!("{error}\n{}", member.log.join("\n")))
}

fn advance(member: &mut SimulatedMember, millis: Time) -> Result<(), TestCaseError> {
    let end = member.now + millis;
    while member.now < end {
        let stepped = member.step();
        stepped.map_err(|error| with_log(member, error))?;
    }
    Ok(())
}

fn run_scenario(
    mut member: SimulatedMember,
    scenario: &[(Time, Fault)],
) -> Result<(), TestCaseError> {
    for (pause, fault) in scenario {
        advance(&mut member, *pause)?;
        member.fault(*fault);
    }
    member.end_faults();
    advance(&mut member, AGENT_WINS)?;
    let agent = holder(member.lease.as_ref()).starts_with("agent/");
    let is_acting = (0..AGENTS).any(|index| member.is_acting(index));
    if !agent || !is_acting || member.is_acting(PROXY) {
        return Err(with_log(&member, "no agent has the Lease in the end"));
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(
        std::env::var("PROPTEST_CASES").ok().and_then(|cases| cases.parse().ok()).unwrap_or(2_000)
    ))]

    #[test]
    fn random_faults_keep_single_writer_and_progress(
        seed in any::<u64>(), known in any::<bool>(), in_pods in any::<bool>(), scenario in any_scenario()
    ) {
        run_scenario(SimulatedMember::new(seed, known, in_pods), &scenario)?;
    }
}

/// The other agent and the hub would wait for a minute.
#[test]
fn restarted_agent_in_same_pod_acts_within_seconds() {
    for seed in 0..20 {
        let mut member = SimulatedMember::new(seed, true, true);
        let steps = |member: &mut SimulatedMember, millis: Time| {
            if let Err(error) = advance(member, millis) {
                panic!("seed {seed}: {error}");
            }
        };
        steps(&mut member, 200_000);
        let Some(acting) = (0..AGENTS).find(|index| member.is_acting(*index)) else {
            panic!("seed {seed}: no process acts");
        };
        member.fault(Fault::Kill(acting));
        steps(&mut member, 1_000);
        member.fault(Fault::Start(acting));
        steps(&mut member, 12_000);
        let log = member.log.join("\n");
        assert!(member.is_acting(acting), "seed {seed}\n{log}");
    }
}

/// The responses arrive after their deadline, but the writes succeed.
#[test]
fn slow_writes_do_not_block_lease_acquisition() {
    let scenario = [
        (10_000, Fault::SlowWrites(9_000)),
        (600_000, Fault::Annotate),
    ];
    for seed in 0..20 {
        if let Err(error) = run_scenario(SimulatedMember::new(seed, true, false), &scenario) {
            panic!("seed {seed}: {error}");
        }
    }
}
