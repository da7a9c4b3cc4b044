//! Hosts with their programs: start, kill, stop, suspension, and clocks.

use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use futures::future::LocalBoxFuture;
use jiff::SignedDuration;
use krypton_helm::driver::Processes;
use krypton_runtime::net::Network;
use rand::RngExt as _;
use tokio_util::sync::CancellationToken;

use super::Simulation;
use super::queue::QueuedEvent;
use crate::helm::SimHelm;
use crate::observe::Event;
use crate::outbox::{Outbox, ProcessId};
use crate::plan::{FOREVER, RequestFault};
use crate::process::{MainFunction, Process, ProcessConfig};
use crate::process_network::SimNetwork;
use crate::time::Millis;
use crate::world::Clocks;

/// The charts' grace period: a program that has not ended after SIGTERM is killed.
const TERMINATION_GRACE_PERIOD: Millis = 60_000;

/// The surroundings of a program at its start.
#[derive(Clone, Debug)]
pub struct ProgramContext {
    pub process: ProcessId,
    pub outbox: Outbox,
    /// A folder that survives restarts.
    pub folder: PathBuf,
    /// SIGTERM.
    pub stop: CancellationToken,
}

impl ProgramContext {
    pub fn network(&self) -> Arc<dyn Network> {
        Arc::new(SimNetwork {
            process: self.process,
            outbox: self.outbox.clone(),
        })
    }

    pub fn helm(&self) -> Arc<dyn Processes> {
        Arc::new(SimHelm {
            process: self.process,
            outbox: self.outbox.clone(),
        })
    }
}

/// Starts a program on a host.
pub type Program = Rc<dyn Fn(ProgramContext) -> LocalBoxFuture<'static, Result<(), String>>>;

/// A machine or pod with one program.
pub struct Host {
    pub ip: [u8; 4],
    program: Program,
    process: Option<ProcessId>,
    /// Whether the program is started again after it has ended.
    may_restart: bool,
    /// SIGTERM for the program.
    stop: CancellationToken,
    /// When the program starts again after the SIGTERM that it got.
    restart_at: Option<Millis>,
    boot: Duration,
    drift_ppm: i64,
    skew: SignedDuration,
}

impl std::fmt::Debug for Host {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Host")
            .field("ip", &self.ip)
            .finish_non_exhaustive()
    }
}

impl Simulation {
    /// Adds a host and starts its program.
    pub fn add_host(&mut self, name: &str, ip: [u8; 4], program: Program) {
        let host = Host {
            ip,
            program,
            process: None,
            may_restart: true,
            stop: CancellationToken::new(),
            restart_at: None,
            boot: Duration::from_secs(self.generator.random_range(60..10_000_000)),
            // Quartz is off by up to a few hundred millionths.
            drift_ppm: self.generator.random_range(-200..=200),
            skew: SignedDuration::from_millis(self.generator.random_range(-500..=500)),
        };
        self.hosts.insert(name.to_owned(), host);
        self.start(name);
    }

    pub fn ip(&self, host: &str) -> Option<[u8; 4]> {
        self.hosts.get(host).map(|host| host.ip)
    }

    /// Returns whether the host's program runs.
    pub fn is_running(&self, host: &str) -> bool {
        self.process_id(host).is_some()
    }

    /// Starts the host's program unless it runs.
    pub fn start(&mut self, name: &str) {
        if self.is_running(name) {
            return;
        }
        let id = self.next_process_id();
        let (now, wall_time, seed) = (self.now, self.wall_time(), self.process_seed(id));
        let folder = self.folder.path().join(name);
        let Some(host) = self.hosts.get_mut(name) else {
            return;
        };
        host.may_restart = true;
        host.process = Some(id);
        host.stop = CancellationToken::new();
        host.restart_at = None;
        let context = ProgramContext {
            process: id,
            outbox: self.outbox.clone(),
            folder: folder.clone(),
            stop: host.stop.clone(),
        };
        let program = Rc::clone(&host.program);
        let main: MainFunction = Box::new(move || program(context));
        let config = ProcessConfig {
            id,
            host: name.to_owned(),
            seed,
            clocks: Clocks {
                boot: host.boot + Duration::from_millis(now),
                wall: wall_time,
                suspended: Duration::ZERO,
                skew: host.skew,
            },
            drift_ppm: host.drift_ppm,
            started_at: now,
            folder: folder.clone(),
            outbox: self.outbox.clone(),
        };
        self.record(Event::ProcessStarted {
            host: name.to_owned(),
        });
        let process = std::fs::create_dir_all(&folder).and_then(|()| Process::start(config, main));
        match process {
            Ok(process) => {
                self.processes.insert(id, process);
                self.run_process(id, Vec::new());
            }
            Err(error) => self.record(Event::ProcessEnded {
                host: name.to_owned(),
                error: Some(format!("it did not start: {error}")),
            }),
        }
    }

    /// Kills the host's program (SIGKILL), and starts it again after this time.
    pub fn crash(&mut self, name: &str, restart_after: Option<Millis>) {
        if let Some(id) = self.process_id(name) {
            self.remove_process(id);
        }
        if let Some(host) = self.hosts.get_mut(name) {
            host.may_restart = restart_after.is_some();
        }
        if let Some(after) = restart_after {
            self.queue
                .push(self.now + after, QueuedEvent::Restart(name.to_owned()));
        }
    }

    /// Stops the host's program (SIGTERM). It starts again after this time, or later once it has ended.
    pub fn stop(&mut self, name: &str, restart_after: Option<Millis>) {
        let Some(id) = self.process_id(name) else {
            return;
        };
        let Some(host) = self.hosts.get_mut(name) else {
            return;
        };
        host.may_restart = restart_after.is_some();
        host.restart_at = Some(self.now + restart_after.unwrap_or_default());
        let stop = host.stop.clone();
        let name = name.to_owned();
        self.schedule(self.now + TERMINATION_GRACE_PERIOD, move |simulation| {
            if simulation.process_id(&name) == Some(id) {
                simulation.remove_process(id);
                simulation.handle_stop(&name, false);
            }
        });
        self.run_process(id, vec![Box::new(move || stop.cancel())]);
    }

    /// Handles the end of a program after SIGTERM.
    fn handle_stop(&mut self, name: &str, in_time: bool) {
        let host = name.to_owned();
        self.record(Event::ProcessStopped { host, in_time });
        let restart_at = self.hosts.get(name).and_then(|host| host.restart_at);
        let restart_at = restart_at.unwrap_or_default().max(self.now);
        self.queue
            .push(restart_at, QueuedEvent::Restart(name.to_owned()));
    }

    /// Adds a fault of the `nth` request that the host sends from now. Its observation has this text.
    pub fn add_request_fault(&mut self, host: &str, nth: u32, fault: RequestFault, text: String) {
        let nth = self.request_count(host).saturating_add(nth);
        self.request_faults
            .insert(host.to_owned(), (nth, fault, text));
    }

    /// Cancels the request faults that have not happened yet.
    pub fn cancel_request_faults(&mut self) {
        self.request_faults.clear();
    }

    /// Number of requests that the host has sent.
    fn request_count(&self, host: &str) -> u32 {
        self.request_counts.get(host).copied().unwrap_or_default()
    }

    /// Counts a request. Returns its number and its fault.
    pub(super) fn count_request(&mut self, name: &str) -> (u32, Option<RequestFault>) {
        let nth = self.request_count(name) + 1;
        self.request_counts.insert(name.to_owned(), nth);
        if self
            .request_faults
            .get(name)
            .is_none_or(|(number, ..)| *number != nth)
        {
            return (nth, None);
        }
        let Some((_, fault, text)) = self.request_faults.remove(name) else {
            return (nth, None);
        };
        self.record(Event::Fault { text });
        if let RequestFault::Crash { restart } = fault {
            let restart = (restart != FOREVER).then_some(restart);
            let name = name.to_owned();
            self.schedule(self.now, move |simulation| simulation.crash(&name, restart));
        }
        (nth, Some(fault))
    }

    /// Stops the host's program (SIGSTOP) for this time.
    pub fn freeze(&mut self, name: &str, length: Millis) {
        let until = self.now + length;
        if let Some(process) = self
            .process_id(name)
            .and_then(|id| self.processes.get_mut(&id))
        {
            process.stopped_until = Some(until);
            let id = process.id;
            self.queue.push(until, QueuedEvent::Resume(id));
        }
    }

    /// Suspends the host with all its processes for this time.
    pub fn suspend(&mut self, name: &str, length: Millis) {
        let until = self.now + length;
        for process in self
            .processes
            .values_mut()
            .filter(|process| process.host == name)
        {
            process.stopped_until = Some(until);
            process.add_suspension(length);
            self.queue.push(until, QueuedEvent::Resume(process.id));
        }
    }

    /// Moves the host's wall clock.
    pub fn skew(&mut self, name: &str, by: SignedDuration) {
        if let Some(host) = self.hosts.get_mut(name) {
            host.skew += by;
        }
        for process in self
            .processes
            .values()
            .filter(|process| process.host == name)
        {
            process.skew(by);
        }
    }

    /// Moves all wall clocks, including the clocks of API servers.
    pub fn advance_wall_clocks(&mut self, by: SignedDuration) {
        self.clock_offset += by;
        for process in self.processes.values() {
            process.skew(by);
        }
        let clusters: Vec<String> = self.clusters.keys().cloned().collect();
        for name in clusters {
            self.change_cluster(&name, |cluster, now| cluster.server.advance(now));
        }
    }

    pub(super) fn restart(&mut self, name: &str) {
        if self.hosts.get(name).is_some_and(|host| host.may_restart) {
            self.start(name);
        }
    }

    pub(super) fn resume(&mut self, id: ProcessId) {
        let now = self.now;
        if let Some(process) = self.processes.get_mut(&id)
            && process.stopped_until.is_some_and(|until| until <= now)
        {
            process.resume(now);
            self.run_process(id, Vec::new());
        }
    }

    /// Handles the exit of a process that was not killed.
    pub(super) fn handle_process_exit(&mut self, id: ProcessId, exit: Result<(), String>) {
        if self.helm_runs.contains_key(&id) {
            return self.handle_helm_exit(id);
        }
        let Some(host) = self.processes.get(&id).map(|process| process.host.clone()) else {
            return;
        };
        self.remove_process(id);
        let restart_at = self.hosts.get(&host).and_then(|host| host.restart_at);
        if restart_at.is_some() && exit.is_ok() {
            return self.handle_stop(&host, true);
        }
        self.record(Event::ProcessEnded {
            host: host.clone(),
            error: exit.err(),
        });
        self.queue
            .push(self.now + 1_000, QueuedEvent::Restart(host));
    }

    /// Ends a process without its cooperation.
    pub(super) fn remove_process(&mut self, id: ProcessId) {
        let Some(process) = self.processes.remove(&id) else {
            return;
        };
        let host = process.host.clone();
        drop(process);
        self.drop_requests_of(id);
        self.break_streams_of(id, &host);
        self.kill_helm_runs_of(id);
        if let Some(host) = self.hosts.get_mut(&host)
            && host.process == Some(id)
        {
            host.process = None;
        }
    }

    fn process_id(&self, host: &str) -> Option<ProcessId> {
        let id = self.hosts.get(host)?.process?;
        self.processes.contains_key(&id).then_some(id)
    }
}
