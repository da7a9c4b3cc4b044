//! Model of all writers of one member against one API server, in simulated time.
//!
//! The model simulates the API server, the network, the clocks, and the duration of Helm runs. The decisions are real:
//! the Lease's [`LeaseStateMachine`], the watchdog ([`enforce`]), the orders of a Helm run, and the proxy's [`proxy_role`].

mod network;
mod scenarios;

use std::fmt;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::Lease;
use krypton_helm::driver::{StopHandle, StopRequest, StopRequests, StopSignal};
use krypton_runtime::clock::BootTime;
use krypton_runtime::lease::state::{LeaseRequest, LeaseResponse, LeaseStateMachine};
use krypton_runtime::lease::{LeaseGoal, LeaseState, LeaseTimes, NO_NEW_RUNS_AFTER};
use proptest::prelude::*;

use crate::agent_presence::{Presence, ProxyRole, SILENCE, proxy_role};
use crate::lease_guard::enforce;

use self::network::{Flow, HEALTHY_LINK, Link, NetworkMessage};

/// True time, in milliseconds.
type Time = u64;

const STEP: Time = 250;
const GRACE: Duration = Duration::from_secs(60);
/// Same as in the reconciler: time that a Helm run gets after a stop, including the request to terminate.
const DRAIN: Duration = Duration::from_secs(35);
/// Longest time without an active writer after the last fault. A clock may be 1 % slow.
const LONGEST_GAP: Time = 121_500;
const AGENTS: usize = 2;
const PROXY: usize = AGENTS;

#[derive(Clone, Copy, Debug)]
enum Fault {
    /// Between the process and the API server.
    Link(usize, Link),
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
    stop_requests: StopRequests,
    until: Option<BootTime>,
    ends: BootTime,
}

struct PendingCall {
    number: u64,
    at: BootTime,
    reset: bool,
    response: Option<LeaseResponse>,
}

/// One run of a reconciler.
struct ReconcilerRun {
    state_machine: LeaseStateMachine,
    lease_state: LeaseState,
    goal: LeaseGoal,
    stop_handle: StopHandle,
    stop_signal: StopSignal,
    pending: Option<PendingCall>,
    next_round: BootTime,
    /// Time at which its lists are complete.
    ready_at: BootTime,
    /// Start time of a planned run that is being prepared.
    starting: Option<BootTime>,
    helm: Option<Helm>,
    stopping: Option<BootTime>,
}

struct WriterProcess {
    name: String,
    /// True if it is the only container of its pod. Its Helm process then dies with it.
    in_pod: bool,
    clock: Clock,
    link: Link,
    session_up: bool,
    stopped: bool,
    suspended: bool,
    is_running: bool,
    is_terminating: bool,
    incarnation: u32,
    run: Option<ReconcilerRun>,
    /// Helm processes without a driver. They end with its pipe.
    orphans: Vec<Helm>,
}

/// The hub's knowledge of an agent's session.
#[derive(Clone, Copy, Default)]
struct AgentSession {
    open: bool,
    ready: bool,
    last_report: BootTime,
    last_able: Option<BootTime>,
}

struct SimulatedMember {
    now: Time,
    random: u64,
    lease: Option<Lease>,
    version: u64,
    messages: Vec<(Time, NetworkMessage)>,
    slow_writes: Time,
    last_call_number: u64,
    processes: Vec<WriterProcess>,
    agent_sessions: [AgentSession; AGENTS],
    presence: Presence,
    last_fault: Time,
    last_active: Time,
    /// Faults are over: a process that ends is restarted.
    faults_ended: bool,
    /// History for a failure message.
    log: Vec<String>,
}

impl SimulatedMember {
    fn new(seed: u64, agent_known: bool, in_pods: bool) -> Self {
        let mut member = Self {
            now: 0,
            random: seed | 1,
            lease: None,
            version: 0,
            messages: Vec::new(),
            slow_writes: 0,
            last_call_number: 0,
            processes: Vec::new(),
            agent_sessions: Default::default(),
            presence: Presence::Never,
            last_fault: 0,
            last_active: 0,
            faults_ended: false,
            log: Vec::new(),
        };
        for index in 0..=AGENTS {
            let clock = Clock {
                speed: i64::try_from(member.random_below(20_001)).unwrap() - 10_000,
                offset: 1_000_000 + member.random_below(1_000_000_000),
                wall: i64::try_from(member.random_below(1_201)).unwrap() - 600,
            };
            let name = match index {
                PROXY => "hub".to_owned(),
                agent => format!("agent/{agent}"),
            };
            member.processes.push(WriterProcess {
                in_pod: in_pods && index != PROXY,
                name,
                clock,
                link: HEALTHY_LINK,
                session_up: true,
                stopped: false,
                suspended: false,
                is_running: true,
                is_terminating: false,
                incarnation: 0,
                run: None,
                orphans: Vec::new(),
            });
        }
        if agent_known {
            member.presence = Presence::Away(member.boot(PROXY));
        }
        member
    }

    fn random_below(&mut self, end: u64) -> u64 {
        // splitmix64
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.random;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % end
    }

    fn random_seconds(&mut self, end: u64) -> Duration {
        Duration::from_millis(self.random_below(end * 1_000))
    }

    fn boot(&self, index: usize) -> BootTime {
        self.processes[index].clock.boot(self.now)
    }

    fn log_line(&mut self, line: impl fmt::Display) {
        self.log
            .push(format!("{:>8.2} {line}", self.now as f64 / 1_000.0));
    }

    fn fault(&mut self, fault: Fault) {
        self.log_line(format_args!("--- {fault:?}"));
        self.last_fault = self.now;
        match fault {
            Fault::Link(index, link) => {
                self.processes[index].link = link;
                if matches!(link, Link::Reset)
                    && let Some(run) = &mut self.processes[index].run
                    && let Some(pending) = &mut run.pending
                {
                    pending.reset = true;
                }
            }
            Fault::Session(index, open) => self.processes[index].session_up = open,
            Fault::Stop(index) => self.processes[index].stopped = true,
            Fault::Suspend(index) => self.processes[index].suspended = true,
            Fault::Wake(index) => {
                self.processes[index].stopped = false;
                self.processes[index].suspended = false;
            }
            Fault::Kill(index) => {
                let process = &mut self.processes[index];
                process.is_running = false;
                process.is_terminating = false;
                // A signal that kills a process also kills a stopped one.
                process.stopped = false;
                let helm = process.run.take().and_then(|run| run.helm);
                process.orphans.extend(helm.filter(|_| !process.in_pod));
            }
            Fault::Terminate(index) => {
                let process = &mut self.processes[index];
                process.is_terminating = process.is_running;
            }
            Fault::Start(index) => {
                let process = &mut self.processes[index];
                if !process.is_running {
                    process.is_running = true;
                    process.incarnation += 1;
                    if index == PROXY {
                        self.agent_sessions = Default::default();
                        self.presence = Presence::Away(self.boot(PROXY));
                    }
                }
            }
            Fault::WallClock(index, seconds) => self.processes[index].clock.wall = seconds,
            Fault::SlowWrites(delay) => self.slow_writes = delay,
            Fault::Annotate => {
                self.version += 1;
                let version = self.version.to_string();
                if let Some(lease) = &mut self.lease {
                    lease.metadata.resource_version = Some(version);
                }
            }
        }
    }

    fn end_faults(&mut self) {
        self.faults_ended = true;
        self.fault(Fault::SlowWrites(0));
        for index in 0..self.processes.len() {
            for fault in [
                Fault::Link(index, HEALTHY_LINK),
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
            self.step_supervisors(index);
        }
        self.deliver_messages()?;
        let mut order: Vec<usize> = (0..self.processes.len()).collect();
        for last in (1..order.len()).rev() {
            let other = usize::try_from(self.random_below(last as u64 + 1)).unwrap();
            order.swap(last, other);
        }
        for index in order {
            if self.processes[index].is_awake() {
                self.step_process(index);
            }
        }
        self.check()
    }

    /// Simulates Helm's supervisors, which outlive their process.
    fn step_supervisors(&mut self, index: usize) {
        if self.processes[index].suspended {
            return;
        }
        let now = self.boot(index);
        let process = &mut self.processes[index];
        process.orphans.clear();
        if let Some(run) = &mut process.run
            && let Some(helm) = &run.helm
            && (now >= helm.ends || helm.until.is_some_and(|until| now >= until))
        {
            run.helm = None;
            self.log_line(format_args!("{index}: helm has ended"));
        }
    }

    /// Advances a running process.
    fn step_process(&mut self, index: usize) {
        if index == PROXY {
            self.update_presence();
        }
        let now = self.boot(index);
        let desired_goal = if self.processes[index].is_terminating {
            None
        } else if index == PROXY {
            match proxy_role(self.presence, GRACE, now).0 {
                ProxyRole::Idle => None,
                ProxyRole::Observe => Some(LeaseGoal::Observe),
                ProxyRole::Act => Some(LeaseGoal::Hold),
            }
        } else {
            Some(LeaseGoal::Hold)
        };
        let Some(mut run) = self.processes[index].run.take() else {
            match desired_goal {
                Some(_) => self.start_run(index),
                None if self.processes[index].is_terminating => {
                    self.processes[index].is_running = false;
                    self.processes[index].is_terminating = false;
                    if self.faults_ended {
                        self.fault(Fault::Start(index));
                    }
                }
                None => {}
            }
            return;
        };
        if desired_goal.is_none() && run.stopping.is_none() {
            run.stop_handle.close();
            run.stopping = Some(now);
        }
        if let Some(goal) = desired_goal
            && run.stopping.is_none()
            && now >= run.ready_at
            && run.lease_state.last_response.is_some()
            && run.goal != goal
        {
            if goal == LeaseGoal::Observe {
                // The goal is never revoked: this run ends and another one starts.
                run.stop_handle.close();
                run.stopping = Some(now);
            } else {
                run.goal = goal;
                run.next_round = now;
            }
        }
        // Concurrent tasks run in random order.
        let first_task = self.random_below(3);
        for task in 0..3 {
            match (first_task + task) % 3 {
                0 => self.step_lease(index, &mut run, now),
                1 => {
                    enforce(&run.lease_state, &run.stop_handle, now);
                }
                _ => self.step_helm(index, &mut run, now),
            }
        }
        let is_idle = run.helm.is_none() && run.starting.is_none() && run.pending.is_none();
        if run.stopping.is_some() && is_idle {
            let wall = self.processes[index].clock.wall(self.now);
            if let Some(lease) = run.state_machine.release(wall) {
                self.send(index, LeaseRequest::Replace(Box::new(lease)));
            }
        } else {
            self.processes[index].run = Some(run);
        }
    }

    fn start_run(&mut self, index: usize) {
        let now = self.boot(index);
        let (stop_handle, stop_signal) = StopHandle::new();
        let ready_at = now + self.random_seconds(3);
        let name = self.processes[index].holder();
        self.processes[index].run = Some(ReconcilerRun {
            state_machine: LeaseStateMachine::new(name, LeaseTimes::MEMBER),
            lease_state: LeaseState::default(),
            goal: LeaseGoal::Observe,
            stop_handle,
            stop_signal,
            pending: None,
            next_round: now,
            ready_at,
            starting: None,
            helm: None,
            stopping: None,
        });
    }

    /// Same as `lease::hold`.
    fn step_lease(&mut self, index: usize, run: &mut ReconcilerRun, now: BootTime) {
        let wall = self.processes[index].clock.wall(self.now);
        if let Some(pending) = &mut run.pending {
            if let Some(response) = pending.response.take() {
                let times = (pending.at, now);
                let next = run
                    .state_machine
                    .handle_response(run.goal, response, times, wall);
                run.pending = next.map(|call| self.send(index, call));
            } else if pending.reset || now.since(pending.at) >= LeaseTimes::MEMBER.call_timeout {
                run.state_machine.handle_error("no answer".to_owned(), now);
                run.pending = None;
            }
            run.lease_state.clone_from(run.state_machine.state());
            if run.pending.is_none() {
                run.next_round = now + run.state_machine.pause(run.goal, now);
            }
        } else if now >= run.next_round && run.stopping.is_none() {
            let call = run.state_machine.start_round(run.goal, now, wall);
            run.pending = Some(self.send(index, call));
        }
    }

    /// Same as the reconciler and the Helm driver, with permanent work.
    fn step_helm(&mut self, index: usize, run: &mut ReconcilerRun, now: BootTime) {
        match &mut run.helm {
            Some(helm) => {
                helm.until = helm.stop_requests.until();
                let is_drain_over = run.stopping.is_some_and(|since| now.since(since) >= DRAIN);
                if helm.stop_requests.current() == StopRequest::Kill || is_drain_over {
                    run.helm = None;
                    self.log_line(format_args!("{index}: kills its helm"));
                }
            }
            None => match run.starting {
                None if run.lease_state.may_start(now) && run.stop_signal.is_open() => {
                    // Two API requests with a deadline of 10 s each come first.
                    run.starting = Some(now + self.random_seconds(20));
                }
                Some(at) if now >= at => {
                    run.starting = None;
                    let stop_requests = run.stop_signal.requests();
                    if stop_requests.at(now) == StopRequest::None {
                        let duration = self.random_seconds(120);
                        run.helm = Some(Helm {
                            until: stop_requests.until(),
                            stop_requests,
                            ends: now + duration,
                        });
                        self.log_line(format_args!("{index}: starts helm"));
                    }
                }
                _ => {}
            },
        }
    }

    /// Updates the hub's knowledge of the agents.
    fn update_presence(&mut self) {
        let now = self.boot(PROXY);
        for index in 0..AGENTS {
            let process = &self.processes[index];
            let is_reachable = process.session_up && !process.suspended;
            let agent_now = process.clock.boot(self.now);
            let (ready, connected) = process.run.as_ref().map_or((false, true), |run| {
                let last_response = run.lease_state.last_response;
                let connected =
                    last_response.is_none_or(|at| agent_now.since(at) < NO_NEW_RUNS_AFTER);
                let listed = agent_now >= run.ready_at && last_response.is_some();
                (run.stopping.is_none() && listed && connected, connected)
            });
            let session = &mut self.agent_sessions[index];
            if process.is_awake() && is_reachable {
                if ready {
                    session.last_able = Some(now);
                } else if session.ready && !connected {
                    session.last_able = session.last_able.map(Presence::able_before);
                }
                (session.open, session.ready, session.last_report) = (true, ready, now);
            } else if (is_reachable && !process.is_running)
                || now.since(session.last_report) >= SILENCE
            {
                // The kernel of a dead process closes the session immediately. Otherwise, only silence shows it.
                session.open = false;
            }
        }
        let ready = self
            .agent_sessions
            .iter()
            .any(|session| session.open && session.ready);
        let last_able = self
            .agent_sessions
            .iter()
            .filter_map(|session| session.last_able)
            .max();
        self.presence = self.presence.next(ready, last_able.unwrap_or(now));
    }

    fn is_acting(&self, index: usize) -> bool {
        let process = &self.processes[index];
        let lease_state = process.run.as_ref().map(|run| &run.lease_state);
        process.is_awake()
            && lease_state.is_some_and(|lease_state| lease_state.may_start(self.boot(index)))
    }

    fn check(&mut self) -> Result<(), TestCaseError> {
        let alive: Vec<usize> = (0..self.processes.len())
            .filter(|index| self.processes[*index].has_active_helm())
            .collect();
        prop_assert!(alive.len() <= 1, "helm of {alive:?} at the same time");
        if (0..self.processes.len()).any(|index| self.is_acting(index)) {
            self.last_active = self.now;
        }
        let is_any_able = self.processes.iter().any(WriterProcess::is_able);
        if !is_any_able {
            self.last_active = self.now;
        }
        let idle_time = self.now - self.last_active.max(self.last_fault);
        prop_assert!(
            idle_time <= LONGEST_GAP,
            "no process has acted for {idle_time} ms"
        );
        Ok(())
    }
}

impl WriterProcess {
    fn holder(&self) -> String {
        let holder = format!("{}/{}", self.name, self.incarnation);
        match self.in_pod {
            true => format!("{holder}@{}", self.name.replace('/', "-")),
            false => holder,
        }
    }

    fn is_awake(&self) -> bool {
        self.is_running && !self.stopped && !self.suspended
    }

    /// Returns true if a Helm process can act. A suspended one cannot, and is dead when it wakes.
    fn has_active_helm(&self) -> bool {
        let helm = self.run.as_ref().and_then(|run| run.helm.as_ref());
        !self.suspended && (helm.is_some() || !self.orphans.is_empty())
    }

    /// Returns true if only the other processes can keep this one from acting.
    fn is_able(&self) -> bool {
        let healthy = matches!(
            self.link,
            Link::Open {
                request: Flow::Pass,
                response: Flow::Pass
            }
        );
        self.is_awake() && !self.is_terminating && healthy
    }
}
