//! Model of all writers of one member against one API server, in simulated time.
//!
//! The model simulates the API server, the network, the clocks, and the duration of Helm runs. The decisions are real:
//! the Lease's [`Actor`], the watchdog ([`enforce`]), the orders of a Helm run, and the proxy's [`role`].

use std::fmt;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::Lease;
use krypton_helm::driver::{Order, Orders, StopHandle, StopSignal};
use krypton_runtime::clock::BootTime;
use krypton_runtime::lease::state::{Actor, Answer, Call};
use krypton_runtime::lease::{LeaseGoal, LeaseState, NO_NEW_RUNS_AFTER, Times};
use proptest::prelude::*;

use crate::agent_presence::{Presence, Role, SILENCE, role};
use crate::lease_guard::enforce;

/// True time, in milliseconds.
type Time = u64;

const STEP: Time = 250;
const GRACE: Duration = Duration::from_secs(60);
/// Same as in the reconciler: time that a Helm run gets after a stop, including the request to terminate.
const DRAIN: Duration = Duration::from_secs(35);
/// Longest time without an active writer after the last fault. A clock may be 1 % slow.
const LONGEST_GAP: Time = 121_500;
/// Time within which an able agent acquires the Lease: the drain of the other holder and some rounds.
const AGENT_WINS: Time = 300_000;
const AGENTS: usize = 2;
const PROXY: usize = AGENTS;

/// Effect of one direction of a connection on a message.
#[derive(Clone, Copy, Debug)]
enum Flow {
    Pass,
    Swallow,
    Delay(Time),
}

#[derive(Clone, Copy, Debug)]
enum Way {
    Open { there: Flow, back: Flow },
    Reset,
}

const HEALTHY: Way = Way::Open {
    there: Flow::Pass,
    back: Flow::Pass,
};

#[derive(Clone, Copy, Debug)]
enum Fault {
    /// Between the actor and the API server.
    Way(usize, Way),
    /// Between the agent and the hub.
    Session(usize, bool),
    /// SIGSTOP to the process. Its Helm process keeps running.
    Stop(usize),
    /// The whole machine with its Helm process. Its clock keeps running.
    Suspend(usize),
    Wake(usize),
    Kill(usize),
    Terminate(usize),
    Start(usize),
    WallClock(usize, i64),
    /// A write to the Lease by another client.
    Annotate,
    /// The API server delays the responses to writes, but not to reads.
    SlowWrites(Time),
}

struct Clock {
    /// Deviation from true time, in millionths.
    speed: i64,
    offset: Time,
    wall: i64,
}

impl Clock {
    fn boot(&self, now: Time) -> BootTime {
        let drift = i64::try_from(now).unwrap() * self.speed / 1_000_000;
        BootTime(Duration::from_millis(
            (self.offset + now).strict_add_signed(drift),
        ))
    }

    fn wall(&self, now: Time) -> Timestamp {
        let millis = 1_800_000_000_000 + self.wall * 1_000 + i64::try_from(now).unwrap();
        Timestamp::from_millisecond(millis).unwrap()
    }
}

/// A Helm process with its supervisor, as its owner sees it.
struct Helm {
    orders: Orders,
    until: Option<BootTime>,
    ends: BootTime,
}

struct Asked {
    number: u64,
    at: BootTime,
    reset: bool,
    answer: Option<Answer>,
}

/// One run of a reconciler.
struct Life {
    actor: Actor,
    hold: LeaseState,
    wish: LeaseGoal,
    handle: StopHandle,
    signal: StopSignal,
    asked: Option<Asked>,
    next_round: BootTime,
    /// Time at which its lists are complete.
    ready_at: BootTime,
    /// Start time of a planned run that is being prepared.
    starting: Option<BootTime>,
    helm: Option<Helm>,
    stopping: Option<BootTime>,
}

struct Process {
    name: String,
    /// True if it is the only container of its pod. Its Helm process then dies with it.
    in_pod: bool,
    clock: Clock,
    way: Way,
    session: bool,
    stopped: bool,
    suspended: bool,
    up: bool,
    leaving: bool,
    incarnation: u32,
    life: Option<Life>,
    /// Helm processes without a driver. They end with its pipe.
    orphans: Vec<Helm>,
}

/// The hub's knowledge of an agent's session.
#[derive(Clone, Copy, Default)]
struct Reporter {
    open: bool,
    ready: bool,
    heard: BootTime,
    able: Option<BootTime>,
}

enum Parcel {
    Request(usize, u64, Call, Time),
    Answer(usize, u64, Answer),
}

struct World {
    now: Time,
    random: u64,
    lease: Option<Lease>,
    version: u64,
    parcels: Vec<(Time, Parcel)>,
    slow_writes: Time,
    numbers: u64,
    processes: Vec<Process>,
    reporters: [Reporter; AGENTS],
    presence: Presence,
    quiet_since: Time,
    last_acted: Time,
    /// Faults are over: a process that ends is restarted.
    healed: bool,
    /// History for a failure message.
    log: Vec<String>,
}

impl World {
    pub(crate) fn new(seed: u64, agent_known: bool, in_pods: bool) -> Self {
        let mut world = Self {
            now: 0,
            random: seed | 1,
            lease: None,
            version: 0,
            parcels: Vec::new(),
            slow_writes: 0,
            numbers: 0,
            processes: Vec::new(),
            reporters: Default::default(),
            presence: Presence::Never,
            quiet_since: 0,
            last_acted: 0,
            healed: false,
            log: Vec::new(),
        };
        for index in 0..=AGENTS {
            let clock = Clock {
                speed: i64::try_from(world.below(20_001)).unwrap() - 10_000,
                offset: 1_000_000 + world.below(1_000_000_000),
                wall: i64::try_from(world.below(1_201)).unwrap() - 600,
            };
            let name = match index {
                PROXY => "hub".to_owned(),
                agent => format!("agent/{agent}"),
            };
            world.processes.push(Process {
                in_pod: in_pods && index != PROXY,
                name,
                clock,
                way: HEALTHY,
                session: true,
                stopped: false,
                suspended: false,
                up: true,
                leaving: false,
                incarnation: 0,
                life: None,
                orphans: Vec::new(),
            });
        }
        if agent_known {
            world.presence = Presence::Away(world.boot(PROXY));
        }
        world
    }

    fn below(&mut self, end: u64) -> u64 {
        // splitmix64
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.random;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % end
    }

    fn seconds(&mut self, end: u64) -> Duration {
        Duration::from_millis(self.below(end * 1_000))
    }

    fn boot(&self, index: usize) -> BootTime {
        self.processes[index].clock.boot(self.now)
    }

    fn note(&mut self, line: impl fmt::Display) {
        self.log
            .push(format!("{:>8.2} {line}", self.now as f64 / 1_000.0));
    }

    fn fault(&mut self, fault: Fault) {
        self.note(format_args!("--- {fault:?}"));
        self.quiet_since = self.now;
        match fault {
            Fault::Way(index, way) => {
                self.processes[index].way = way;
                if matches!(way, Way::Reset)
                    && let Some(life) = &mut self.processes[index].life
                    && let Some(asked) = &mut life.asked
                {
                    asked.reset = true;
                }
            }
            Fault::Session(index, open) => self.processes[index].session = open,
            Fault::Stop(index) => self.processes[index].stopped = true,
            Fault::Suspend(index) => self.processes[index].suspended = true,
            Fault::Wake(index) => {
                self.processes[index].stopped = false;
                self.processes[index].suspended = false;
            }
            Fault::Kill(index) => {
                let process = &mut self.processes[index];
                process.up = false;
                process.leaving = false;
                // A signal that kills a process also kills a stopped one.
                process.stopped = false;
                let helm = process.life.take().and_then(|life| life.helm);
                process.orphans.extend(helm.filter(|_| !process.in_pod));
            }
            Fault::Terminate(index) => {
                let process = &mut self.processes[index];
                process.leaving = process.up;
            }
            Fault::Start(index) => {
                let process = &mut self.processes[index];
                if !process.up {
                    process.up = true;
                    process.incarnation += 1;
                    if index == PROXY {
                        self.reporters = Default::default();
                        self.presence = Presence::Away(self.boot(PROXY));
                    }
                }
            }
            Fault::WallClock(index, seconds) => self.processes[index].clock.wall = seconds,
            Fault::SlowWrites(late) => self.slow_writes = late,
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
        self.healed = true;
        self.fault(Fault::SlowWrites(0));
        for index in 0..self.processes.len() {
            for fault in [
                Fault::Way(index, HEALTHY),
                Fault::Session(index, true),
                Fault::Wake(index),
                Fault::Start(index),
            ] {
                self.fault(fault);
            }
        }
    }

    /// Advances the time by one step, with the processes in random order.
    fn step(&mut self) -> Result<(), TestCaseError> {
        self.now += STEP;
        for index in 0..self.processes.len() {
            self.supervise(index);
        }
        self.carry()?;
        let mut order: Vec<usize> = (0..self.processes.len()).collect();
        for place in (1..order.len()).rev() {
            let other = usize::try_from(self.below(place as u64 + 1)).unwrap();
            order.swap(place, other);
        }
        for index in order {
            let process = &self.processes[index];
            if process.up && !process.stopped && !process.suspended {
                self.act(index);
            }
        }
        self.check()
    }

    /// Simulates Helm's supervisors, which outlive their process.
    fn supervise(&mut self, index: usize) {
        if self.processes[index].suspended {
            return;
        }
        let now = self.boot(index);
        let process = &mut self.processes[index];
        process.orphans.clear();
        if let Some(life) = &mut process.life
            && let Some(helm) = &life.helm
            && (now >= helm.ends || helm.until.is_some_and(|until| now >= until))
        {
            life.helm = None;
            self.note(format_args!("{index}: helm has ended"));
        }
    }

    /// Delivers messages that are due.
    fn carry(&mut self) -> Result<(), TestCaseError> {
        let mut due: Vec<_> = self
            .parcels
            .extract_if(.., |(at, _)| *at <= self.now)
            .collect();
        due.sort_by_key(|(at, _)| *at);
        for (_, parcel) in due {
            match parcel {
                Parcel::Request(index, number, call, sent) => {
                    let late = Duration::from_millis(self.now - sent) > Times::MEMBER.call;
                    if late && call != Call::Read {
                        // A late write counts as a fault, even if its sender is healthy by now.
                        self.quiet_since = self.now;
                    }
                    let answer = self.serve(index, call)?;
                    self.answer(index, number, answer);
                }
                Parcel::Answer(index, number, answer) => {
                    if let Some(life) = &mut self.processes[index].life
                        && let Some(asked) = &mut life.asked
                        && asked.number == number
                    {
                        asked.answer = Some(answer);
                    }
                }
            }
        }
        Ok(())
    }

    fn latency(&mut self, flow: Flow) -> Option<Time> {
        let usual = self.below(400);
        match flow {
            Flow::Pass => Some(usual),
            Flow::Swallow => None,
            Flow::Delay(delay) => Some(delay + usual),
        }
    }

    fn answer(&mut self, index: usize, number: u64, answer: Answer) {
        let Way::Open { back, .. } = self.processes[index].way else {
            return;
        };
        if let Some(after) = self.latency(back) {
            let written = !matches!(answer, Answer::Found(_));
            let late = if written { self.slow_writes } else { 0 };
            let parcel = Parcel::Answer(index, number, answer);
            self.parcels.push((self.now + late + after, parcel));
        }
    }

    /// Simulates the API server.
    fn serve(&mut self, index: usize, call: Call) -> Result<Answer, TestCaseError> {
        let present = self.lease.as_ref();
        let written = match call {
            Call::Read => return Ok(Answer::Found(present.cloned().map(Box::new))),
            Call::Create(_) if present.is_some() => return Ok(Answer::Overtaken),
            Call::Create(spec) => Lease {
                spec: Some(spec),
                ..Lease::default()
            },
            Call::Replace(lease) => {
                let version = |lease: &Lease| lease.metadata.resource_version.clone();
                if present.is_none_or(|present| version(present) != version(&lease)) {
                    return Ok(Answer::Overtaken);
                }
                *lease
            }
        };
        self.version += 1;
        let mut lease = written;
        lease.metadata.resource_version = Some(self.version.to_string());
        let before = self.lease.replace(lease.clone());
        let holder = holder(Some(&lease));
        if holder != self::holder(before.as_ref()) {
            self.note(format_args!(
                "the Lease is {holder:?}'s, written by {index}"
            ));
            for (other, process) in self.processes.iter().enumerate() {
                let alive = process.active_helm() && process.holder() != holder;
                prop_assert!(
                    !alive,
                    "the Lease goes to {holder:?} while helm of {other} lives"
                );
            }
        }
        Ok(Answer::Written(Box::new(lease)))
    }

    fn send(&mut self, index: usize, call: Call) -> Asked {
        self.numbers += 1;
        let number = self.numbers;
        let mut reset = false;
        match self.processes[index].way {
            Way::Reset => reset = true,
            Way::Open { there, .. } => {
                if let Some(after) = self.latency(there) {
                    let parcel = Parcel::Request(index, number, call, self.now);
                    self.parcels.push((self.now + after, parcel));
                }
            }
        }
        Asked {
            number,
            at: self.boot(index),
            reset,
            answer: None,
        }
    }

    /// Advances a running process.
    fn act(&mut self, index: usize) {
        if index == PROXY {
            self.listen();
        }
        let now = self.boot(index);
        let wanted = if self.processes[index].leaving {
            None
        } else if index == PROXY {
            match role(self.presence, GRACE, now).0 {
                Role::Rest => None,
                Role::Observe => Some(LeaseGoal::Observe),
                Role::Act => Some(LeaseGoal::Hold),
            }
        } else {
            Some(LeaseGoal::Hold)
        };
        let Some(mut life) = self.processes[index].life.take() else {
            match wanted {
                Some(_) => self.begin(index),
                None if self.processes[index].leaving => {
                    self.processes[index].up = false;
                    self.processes[index].leaving = false;
                    if self.healed {
                        self.fault(Fault::Start(index));
                    }
                }
                None => {}
            }
            return;
        };
        if wanted.is_none() && life.stopping.is_none() {
            life.handle.close();
            life.stopping = Some(now);
        }
        if let Some(wish) = wanted
            && life.stopping.is_none()
            && now >= life.ready_at
            && life.hold.heard.is_some()
            && life.wish != wish
        {
            if wish == LeaseGoal::Observe {
                // The goal is never revoked: this run ends and another one starts.
                life.handle.close();
                life.stopping = Some(now);
            } else {
                life.wish = wish;
                life.next_round = now;
            }
        }
        // Concurrent tasks run in random order.
        let first = self.below(3);
        for part in 0..3 {
            match (first + part) % 3 {
                0 => self.fence(index, &mut life, now),
                1 => {
                    enforce(&life.hold, &life.handle, now);
                }
                _ => self.drive(index, &mut life, now),
            }
        }
        let idle = life.helm.is_none() && life.starting.is_none() && life.asked.is_none();
        if life.stopping.is_some() && idle {
            let wall = self.processes[index].clock.wall(self.now);
            if let Some(lease) = life.actor.release(wall) {
                self.send(index, Call::Replace(Box::new(lease)));
            }
        } else {
            self.processes[index].life = Some(life);
        }
    }

    pub(crate) fn begin(&mut self, index: usize) {
        let now = self.boot(index);
        let (handle, signal) = StopHandle::new();
        let ready_at = BootTime(now.0 + self.seconds(3));
        let name = self.processes[index].holder();
        self.processes[index].life = Some(Life {
            actor: Actor::new(name, Times::MEMBER),
            hold: LeaseState::default(),
            wish: LeaseGoal::Observe,
            handle,
            signal,
            asked: None,
            next_round: now,
            ready_at,
            starting: None,
            helm: None,
            stopping: None,
        });
    }

    /// Same as `lease::hold`.
    fn fence(&mut self, index: usize, life: &mut Life, now: BootTime) {
        let wall = self.processes[index].clock.wall(self.now);
        if let Some(asked) = &mut life.asked {
            if let Some(answer) = asked.answer.take() {
                let times = (asked.at, now);
                let next = life.actor.answered(life.wish, answer, times, wall);
                life.asked = next.map(|call| self.send(index, call));
            } else if asked.reset || now.since(asked.at) >= Times::MEMBER.call {
                life.actor.failed("no answer".to_owned(), now);
                life.asked = None;
            }
            life.hold.clone_from(life.actor.hold());
            if life.asked.is_none() {
                life.next_round = BootTime(now.0 + life.actor.pause(life.wish, now));
            }
        } else if now >= life.next_round && life.stopping.is_none() {
            let call = life.actor.begin(life.wish, now, wall);
            life.asked = Some(self.send(index, call));
        }
    }

    /// Same as the reconciler and the Helm driver, with permanent work.
    fn drive(&mut self, index: usize, life: &mut Life, now: BootTime) {
        match &mut life.helm {
            Some(helm) => {
                helm.until = helm.orders.until();
                let late = life.stopping.is_some_and(|since| now.since(since) >= DRAIN);
                if helm.orders.now() == Order::Kill || late {
                    life.helm = None;
                    self.note(format_args!("{index}: kills its helm"));
                }
            }
            None => match life.starting {
                None if life.hold.may_start(now) && life.signal.is_open() => {
                    // Two API requests with a deadline of 10 s each come first.
                    life.starting = Some(BootTime(now.0 + self.seconds(20)));
                }
                Some(at) if now >= at => {
                    life.starting = None;
                    let orders = life.signal.orders();
                    if orders.at(now) == Order::Go {
                        let takes = self.seconds(120);
                        life.helm = Some(Helm {
                            until: orders.until(),
                            orders,
                            ends: BootTime(now.0 + takes),
                        });
                        self.note(format_args!("{index}: starts helm"));
                    }
                }
                _ => {}
            },
        }
    }

    /// Updates the hub's knowledge of the agents.
    fn listen(&mut self) {
        let now = self.boot(PROXY);
        for index in 0..AGENTS {
            let process = &self.processes[index];
            let speaks = process.up && !process.stopped && !process.suspended;
            let reachable = process.session && !process.suspended;
            let theirs = process.clock.boot(self.now);
            let (ready, connected) = process.life.as_ref().map_or((false, true), |life| {
                let heard = life.hold.heard;
                let connected = heard.is_none_or(|heard| theirs.since(heard) < NO_NEW_RUNS_AFTER);
                let listed = theirs >= life.ready_at && heard.is_some();
                (life.stopping.is_none() && listed && connected, connected)
            });
            let reporter = &mut self.reporters[index];
            if speaks && reachable {
                if ready {
                    reporter.able = Some(now);
                } else if reporter.ready && !connected {
                    reporter.able = reporter.able.map(Presence::able_before);
                }
                (reporter.open, reporter.ready, reporter.heard) = (true, ready, now);
            } else if (reachable && !process.up) || now.since(reporter.heard) >= SILENCE {
                // The kernel of a dead process closes the session immediately. Otherwise, only silence shows it.
                reporter.open = false;
            }
        }
        let ready = self
            .reporters
            .iter()
            .any(|reporter| reporter.open && reporter.ready);
        let able = self
            .reporters
            .iter()
            .filter_map(|reporter| reporter.able)
            .max();
        self.presence = self.presence.next(ready, able.unwrap_or(now));
    }

    fn acts(&self, index: usize) -> bool {
        let process = &self.processes[index];
        let hold = process.life.as_ref().map(|life| &life.hold);
        let awake = process.up && !process.stopped && !process.suspended;
        awake && hold.is_some_and(|hold| hold.may_start(self.boot(index)))
    }

    fn check(&mut self) -> Result<(), TestCaseError> {
        let alive: Vec<usize> = (0..self.processes.len())
            .filter(|index| self.processes[*index].active_helm())
            .collect();
        prop_assert!(alive.len() <= 1, "helm of {alive:?} at the same time");
        if (0..self.processes.len()).any(|index| self.acts(index)) {
            self.last_acted = self.now;
        }
        let able = self.processes.iter().any(Process::able);
        if !able {
            self.last_acted = self.now;
        }
        let nobody = self.now - self.last_acted.max(self.quiet_since);
        prop_assert!(
            nobody <= LONGEST_GAP,
            "no process has acted for {nobody} ms"
        );
        Ok(())
    }
}

impl Process {
    fn holder(&self) -> String {
        let life = format!("{}/{}", self.name, self.incarnation);
        match self.in_pod {
            true => format!("{life}@{}", self.name.replace('/', "-")),
            false => life,
        }
    }

    /// Returns true if a Helm process can act. A suspended one cannot, and is dead when it wakes.
    fn active_helm(&self) -> bool {
        let helm = self.life.as_ref().and_then(|life| life.helm.as_ref());
        !self.suspended && (helm.is_some() || !self.orphans.is_empty())
    }

    /// Returns true if only the other processes can keep this one from acting.
    fn able(&self) -> bool {
        let healthy = matches!(
            self.way,
            Way::Open {
                there: Flow::Pass,
                back: Flow::Pass
            }
        );
        self.up && !self.leaving && !self.stopped && !self.suspended && healthy
    }
}

fn holder(lease: Option<&Lease>) -> String {
    let spec = lease.and_then(|lease| lease.spec.as_ref());
    let holder = spec.and_then(|spec| spec.holder_identity.clone());
    holder.unwrap_or_default()
}

/// Delays are well below or well above the deadline of a call, both ways together. Close to it, an agent's reads would
/// succeed and keep the hub away, while its writes would fail.
fn any_flow() -> impl Strategy<Value = Flow> {
    prop_oneof![
        2 => Just(Flow::Pass),
        1 => Just(Flow::Swallow),
        2 => (0..2_500_u64).prop_map(Flow::Delay),
        2 => (9_000..100_000_u64).prop_map(Flow::Delay),
    ]
}

fn any_fault() -> impl Strategy<Value = Fault> {
    let who = || 0..=AGENTS;
    let way = prop_oneof![
        1 => Just(Way::Reset),
        2 => Just(HEALTHY),
        4 => (any_flow(), any_flow()).prop_map(|(there, back)| Way::Open { there, back }),
    ];
    prop_oneof![
        6 => (who(), way).prop_map(|(who, way)| Fault::Way(who, way)),
        2 => (0..AGENTS, any::<bool>()).prop_map(|(who, open)| Fault::Session(who, open)),
        2 => who().prop_map(Fault::Stop),
        2 => who().prop_map(Fault::Suspend),
        4 => who().prop_map(Fault::Wake),
        2 => who().prop_map(Fault::Kill),
        1 => who().prop_map(Fault::Terminate),
        3 => who().prop_map(Fault::Start),
        1 => (who(), -600..=600_i64).prop_map(|(who, wall)| Fault::WallClock(who, wall)),
        1 => Just(Fault::Annotate),
        1 => prop_oneof![Just(0), Just(2_000), 9_000..20_000_u64].prop_map(Fault::SlowWrites),
    ]
}

/// Short and long pauses before each fault.
fn any_story() -> impl Strategy<Value = Vec<(Time, Fault)>> {
    let pause = prop_oneof![
        3 => 0..15_000_u64,
        2 => 15_000..70_000_u64,
        1 => 70_000..200_000_u64,
    ];
    proptest::collection::vec((pause, any_fault()), 0..14)
}

fn play(mut world: World, story: &[(Time, Fault)]) -> Result<(), TestCaseError> {
    let told = |world: &World, error: TestCaseError| {
        TestCaseError::fail(format!("{error}\n{}", world.log.join("\n")))
    };
    for (pause, fault) in story {
        let end = world.now + pause;
        while world.now < end {
            let stepped = world.step();
            stepped.map_err(|error| told(&world, error))?;
        }
        world.fault(*fault);
    }
    world.heal();
    let end = world.now + AGENT_WINS;
    while world.now < end {
        let stepped = world.step();
        stepped.map_err(|error| told(&world, error))?;
    }
    let agent = holder(world.lease.as_ref()).starts_with("agent/");
    let acts = (0..AGENTS).any(|index| world.acts(index));
    if !agent || !acts || world.acts(PROXY) {
        let error = TestCaseError::fail("no agent has the Lease in the end");
        return Err(told(&world, error));
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(
        std::env::var("PROPTEST_CASES").ok().and_then(|cases| cases.parse().ok()).unwrap_or(2_000)
    ))]

    #[test]
    fn random_faults_keep_single_writer_and_progress(
        seed in any::<u64>(), known in any::<bool>(), in_pods in any::<bool>(), story in any_story()
    ) {
        play(World::new(seed, known, in_pods), &story)?;
    }
}

/// The other agent and the hub would wait for a minute.
#[test]
fn restarted_agent_in_same_pod_acts_within_seconds() {
    for seed in 0..20 {
        let mut world = World::new(seed, true, true);
        let steps = |world: &mut World, millis: Time| {
            let end = world.now + millis;
            while world.now < end {
                if let Err(error) = world.step() {
                    panic!("seed {seed}: {error}\n{}", world.log.join("\n"));
                }
            }
        };
        steps(&mut world, 200_000);
        let Some(acting) = (0..AGENTS).find(|index| world.acts(*index)) else {
            panic!("seed {seed}: no process acts");
        };
        world.fault(Fault::Kill(acting));
        steps(&mut world, 1_000);
        world.fault(Fault::Start(acting));
        steps(&mut world, 12_000);
        assert!(world.acts(acting), "seed {seed}\n{}", world.log.join("\n"));
    }
}

/// The responses arrive after their deadline, but the writes succeed.
#[test]
fn slow_writes_do_not_block_lease_acquisition() {
    let story = [
        (10_000, Fault::SlowWrites(9_000)),
        (600_000, Fault::Annotate),
    ];
    for seed in 0..20 {
        if let Err(error) = play(World::new(seed, true, false), &story) {
            panic!("seed {seed}: {error}");
        }
    }
}
