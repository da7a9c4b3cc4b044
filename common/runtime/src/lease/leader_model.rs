//! Model test of several hubs at one Lease in simulated time. Two hubs never hold a fresh renewal, one leads
//! soon after all faults end, and an API server outage causes no failover.
//!
//! The test simulates the API server, the network and the clocks. It runs the real [`LeaseStateMachine`] of the Lease.

use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::Lease;
use proptest::prelude::*;

use super::{LeaseGoal, LeaseTimes};
use crate::clock::BootTime;
use crate::lease::state::{LeaseRequest, LeaseResponse, LeaseStateMachine};

/// True time, in milliseconds.
type Millis = u64;

const STEP: Millis = 50;
const HUBS: usize = 3;
const DURATION: Millis = 5_000;
const TIMES: LeaseTimes = LeaseTimes::for_leader(Duration::from_millis(DURATION));
/// Without faults, a hub leads within this time, which includes the expiry of a holder that has just lost the
/// Lease.
const SETTLE_TIME: Millis = 3 * DURATION;

#[derive(Clone, Copy, Debug)]
enum Fault {
    /// `DropRequests` drops all requests of a hub, and `DropResponses` drops all responses.
    DropRequests(usize),
    DropResponses(usize),
    Reconnect(usize),
    /// SIGSTOP.
    Stop(usize),
    Resume(usize),
    Kill(usize),
    Start(usize),
    Terminate(usize),
    /// The API server answers no request for this time.
    Outage(Millis),
    /// Responses to writes have this delay.
    SlowWrites(Millis),
    /// Requests have this delay.
    SlowRequests(Millis),
    /// Another program writes to the Lease.
    Annotate,
}

struct SentRequest {
    number: u64,
    at: BootTime,
    response: Option<LeaseResponse>,
}

#[derive(Default)]
struct Hub {
    /// Clock drift in parts per million.
    speed: i64,
    offset: Millis,
    process: Option<(LeaseStateMachine, Option<SentRequest>, BootTime)>,
    starts: u32,
    drops_requests: bool,
    drops_responses: bool,
    stopped: bool,
}

enum Message {
    Request(usize, u64, LeaseRequest),
    Response(usize, u64, LeaseResponse),
}

#[derive(Default)]
struct Model {
    now: Millis,
    random: u64,
    hubs: Vec<Hub>,
    lease: Option<Lease>,
    version: u64,
    last_number: u64,
    messages: Vec<(Millis, Message)>,
    outage_until: Millis,
    slow_writes: Millis,
    slow_requests: Millis,
    /// The number of transitions of the latest leader.
    latest_transitions: i32,
    log: Vec<String>,
}

impl Model {
    fn new(seed: u64) -> Self {
        let mut model = Self {
            random: seed | 1,
            ..Self::default()
        };
        for index in 0..HUBS {
            let speed = i64::try_from(model.random_below(20_001)).unwrap() - 10_000;
            let offset = 1_000_000 + model.random_below(1_000_000_000);
            model.hubs.push(Hub {
                speed,
                offset,
                ..Hub::default()
            });
            model.start(index);
        }
        model
    }

    fn random_below(&mut self, end: u64) -> u64 {
        // splitmix64
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.random;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % end
    }

    fn boot_time(&self, index: usize) -> BootTime {
        let hub = &self.hubs[index];
        let drift = i64::try_from(self.now).unwrap() * hub.speed / 1_000_000;
        BootTime(Duration::from_millis(
            (hub.offset + self.now).strict_add_signed(drift),
        ))
    }

    fn wall(&self) -> Timestamp {
        Timestamp::from_millisecond(1_800_000_000_000 + i64::try_from(self.now).unwrap()).unwrap()
    }

    fn start(&mut self, index: usize) {
        let now = self.boot_time(index);
        let hub = &mut self.hubs[index];
        if hub.process.is_none() {
            hub.starts += 1;
            let machine = LeaseStateMachine::new(format!("hub/{index}/{}", hub.starts), TIMES);
            hub.process = Some((machine, None, now));
        }
    }

    fn fault(&mut self, fault: Fault) {
        self.log.push(format!("{:>7} --- {fault:?}", self.now));
        match fault {
            Fault::DropRequests(index) => self.hubs[index].drops_requests = true,
            Fault::DropResponses(index) => self.hubs[index].drops_responses = true,
            Fault::Reconnect(index) => {
                (
                    self.hubs[index].drops_requests,
                    self.hubs[index].drops_responses,
                ) = (false, false)
            }
            Fault::Stop(index) => self.hubs[index].stopped = true,
            Fault::Resume(index) => self.hubs[index].stopped = false,
            Fault::Kill(index) => {
                (self.hubs[index].process, self.hubs[index].stopped) = (None, false)
            }
            Fault::Start(index) => self.start(index),
            Fault::Terminate(index) => {
                let process = self.hubs[index].process.take();
                let lease = process.and_then(|(machine, ..)| machine.release(self.wall()));
                if let Some(lease) = lease {
                    self.serve(LeaseRequest::Replace(Box::new(lease)));
                }
            }
            Fault::Outage(length) => self.outage_until = self.now + length,
            Fault::SlowWrites(delay) => self.slow_writes = delay,
            Fault::SlowRequests(delay) => self.slow_requests = delay,
            Fault::Annotate => {
                self.version += 1;
                let version = self.version.to_string();
                if let Some(lease) = &mut self.lease {
                    lease.metadata.resource_version = Some(version);
                }
            }
        }
    }

    fn heal(&mut self) {
        self.outage_until = 0;
        (self.slow_writes, self.slow_requests) = (0, 0);
        for index in 0..HUBS {
            self.fault(Fault::Reconnect(index));
            self.fault(Fault::Resume(index));
            self.fault(Fault::Start(index));
        }
    }

    /// Simulates the API server.
    fn serve(&mut self, request: LeaseRequest) -> LeaseResponse {
        let present = self.lease.as_ref();
        let mut lease = match request {
            LeaseRequest::Read => return LeaseResponse::Read(present.cloned().map(Box::new)),
            LeaseRequest::Create(_) if present.is_some() => return LeaseResponse::Conflict,
            LeaseRequest::Create(spec) => Lease {
                spec: Some(spec),
                ..Lease::default()
            },
            LeaseRequest::Replace(lease) => {
                let version = |lease: &Lease| lease.metadata.resource_version.clone();
                if present.is_none_or(|present| version(present) != version(&lease)) {
                    return LeaseResponse::Conflict;
                }
                *lease
            }
        };
        self.version += 1;
        lease.metadata.resource_version = Some(self.version.to_string());
        lease.metadata.uid = Some("lease".to_owned());
        self.lease = Some(lease.clone());
        LeaseResponse::Written(Box::new(lease))
    }

    fn deliver_messages(&mut self) {
        let mut due: Vec<_> = self
            .messages
            .extract_if(.., |(at, _)| *at <= self.now)
            .collect();
        due.sort_by_key(|(at, _)| *at);
        for (_, message) in due {
            match message {
                Message::Request(index, number, request) => {
                    if self.now < self.outage_until {
                        continue;
                    }
                    let response = self.serve(request);
                    let written = !matches!(response, LeaseResponse::Read(_));
                    let delay = if written { self.slow_writes } else { 0 };
                    let at = self.now + delay + self.random_below(100);
                    if !self.hubs[index].drops_responses {
                        self.messages
                            .push((at, Message::Response(index, number, response)));
                    }
                }
                Message::Response(index, number, response) => {
                    if let Some((_, Some(pending), _)) = &mut self.hubs[index].process
                        && pending.number == number
                    {
                        pending.response = Some(response);
                    }
                }
            }
        }
    }

    fn send(&mut self, index: usize, request: LeaseRequest) -> SentRequest {
        self.last_number += 1;
        if !self.hubs[index].drops_requests {
            let at = self.now + self.slow_requests + self.random_below(100);
            let message = Message::Request(index, self.last_number, request);
            self.messages.push((at, message));
        }
        SentRequest {
            number: self.last_number,
            at: self.boot_time(index),
            response: None,
        }
    }

    /// Behaves like [`super::hold`].
    fn run_hub(&mut self, index: usize) {
        let (now, wall) = (self.boot_time(index), self.wall());
        let Some((mut machine, pending, next)) = self.hubs[index].process.take() else {
            return;
        };
        let goal = LeaseGoal::Hold;
        let (pending, next) = match pending {
            None if now < next => (None, next),
            None => {
                let request = machine.start_round(goal, now, wall);
                (Some(self.send(index, request)), next)
            }
            // A response that arrived while the process was suspended comes before the timer.
            Some(SentRequest {
                response: Some(response),
                at,
                ..
            }) => match machine.handle_response(goal, response, (at, now), wall) {
                Some(request) => (Some(self.send(index, request)), next),
                None => (None, now + machine.pause(goal, now)),
            },
            Some(pending) if now.since(pending.at) >= TIMES.call_timeout => {
                machine.handle_error("no answer".to_owned(), now);
                (None, now + machine.pause(goal, now))
            }
            pending => (pending, next),
        };
        self.hubs[index].process = Some((machine, pending, next));
    }

    /// Returns the hubs that could write to the home cluster. Includes a stopped hub, because it may resume.
    fn writers(&self) -> Vec<usize> {
        let fresh = |index: &usize| {
            let process = self.hubs[*index].process.as_ref();
            process.is_some_and(|(machine, ..)| {
                machine.state().is_fresh(self.boot_time(*index), &TIMES)
            })
        };
        (0..HUBS).filter(fresh).collect()
    }

    fn step(&mut self) -> Result<(), TestCaseError> {
        self.now += STEP;
        self.deliver_messages();
        let first = usize::try_from(self.random_below(HUBS as u64)).unwrap();
        for offset in 0..HUBS {
            let index = (first + offset) % HUBS;
            if !self.hubs[index].stopped {
                self.run_hub(index);
            }
        }
        let writers = self.writers();
        prop_assert!(writers.len() <= 1, "{writers:?} may write at the same time");
        if let Some(leader) = writers.first()
            && let Some((machine, ..)) = &self.hubs[*leader].process
        {
            let term = machine.state().term.clone().unwrap_or_default();
            prop_assert!(
                term.transitions >= self.latest_transitions,
                "a previous leader writes"
            );
            self.latest_transitions = term.transitions;
        }
        Ok(())
    }

    fn run(&mut self, length: Millis) -> Result<(), TestCaseError> {
        let end = self.now + length;
        while self.now < end {
            let stepped = self.step();
            stepped.map_err(|error| {
                TestCaseError::fail(format!("{}: {error}\n{}", self.now, self.log.join("\n")))
            })?;
        }
        Ok(())
    }
}

fn any_fault() -> impl Strategy<Value = Fault> {
    let any_hub = || 0..HUBS;
    prop_oneof![
        2 => any_hub().prop_map(Fault::DropRequests),
        2 => any_hub().prop_map(Fault::DropResponses),
        4 => any_hub().prop_map(Fault::Reconnect),
        2 => any_hub().prop_map(Fault::Stop),
        4 => any_hub().prop_map(Fault::Resume),
        2 => any_hub().prop_map(Fault::Kill),
        4 => any_hub().prop_map(Fault::Start),
        1 => any_hub().prop_map(Fault::Terminate),
        2 => (0..20_000_u64).prop_map(Fault::Outage),
        2 => prop_oneof![Just(0), 0..4_000_u64].prop_map(Fault::SlowWrites),
        2 => prop_oneof![Just(0), 0..8_000_u64].prop_map(Fault::SlowRequests),
        1 => Just(Fault::Annotate),
    ]
}

fn any_faults() -> impl Strategy<Value = Vec<(Millis, Fault)>> {
    let pause = prop_oneof![3 => 0..2_000_u64, 2 => 2_000..12_000_u64, 1 => 12_000..40_000_u64];
    proptest::collection::vec((pause, any_fault()), 0..20)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(
        std::env::var("PROPTEST_CASES").ok().and_then(|cases| cases.parse().ok()).unwrap_or(1_000)
    ))]

    #[test]
    fn leader_is_unique_and_elected_again_after_faults(
        seed in any::<u64>(), faults in any_faults()
    ) {
        let mut model = Model::new(seed);
        for (pause, fault) in faults {
            model.run(pause)?;
            model.fault(fault);
        }
        model.heal();
        model.run(SETTLE_TIME)?;
        prop_assert_eq!(model.writers().len(), 1, "no leader\n{}", model.log.join("\n"));
    }

    #[test]
    fn api_server_outage_changes_no_leader(
        seed in any::<u64>(), calm in 8_000..12_000_u64, outage in 0..20_000_u64
    ) {
        let mut model = Model::new(seed);
        model.run(calm)?;
        let previous = model.writers();
        prop_assert_eq!(previous.len(), 1);
        model.fault(Fault::Outage(outage));
        model.run(outage + DURATION)?;
        prop_assert_eq!(model.writers(), previous);
    }

    #[test]
    fn killed_leader_is_replaced_soon_after_lease_expiry(
        seed in any::<u64>(), calm in 8_000..12_000_u64
    ) {
        let mut model = Model::new(seed);
        model.run(calm)?;
        let previous = model.writers();
        model.fault(Fault::Kill(previous[0]));
        // The last renewal arrives 0.15 s after the kill and is seen by a look 0.85 s later. A clock may be
        // slow by 1 %, so the Lease expires 5.1 s after that. Reading and writing take 0.3 s each.
        model.run(6_800)?;
        let after = model.writers();
        prop_assert_eq!(after.len(), 1);
        prop_assert_ne!(after, previous);
    }
}
