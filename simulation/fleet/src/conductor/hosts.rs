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

use super::queue::Event;
use super::{Millis, Simulation};
use crate::helm::SimHelm;
use crate::observe::Event as Seen;
use crate::outbox::{Outbox, ProcessId};
use crate::plan::{FOREVER, Strike};
use crate::process::{Main, Process, Start};
use crate::streams::SimNetwork;
use crate::world::Clocks;

/// The charts' grace period: a program that has not ended after SIGTERM is killed.
const TERMINATION: Millis = 60_000;

/// What a program knows at its start.
#[derive(Clone, Debug)]
pub struct Context {
    pub process: ProcessId,
    pub outbox: Outbox,
    /// A folder that survives restarts.
    pub folder: PathBuf,
    /// SIGTERM.
    pub stop: CancellationToken,
}

impl Context {
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
pub type Program = Rc<dyn Fn(Context) -> LocalBoxFuture<'static, Result<(), String>>>;

/// A machine or pod with one program.
pub struct Host {
    pub ip: [u8; 4],
    program: Program,
    process: Option<ProcessId>,
    /// Whether the program is started again after it has ended.
    restarts: bool,
    /// SIGTERM for the program.
    stop: CancellationToken,
    /// When the program starts again after the SIGTERM that it got.
    stopping: Option<Millis>,
    boot: Duration,
    rate: i64,
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
            restarts: true,
            stop: CancellationToken::new(),
            stopping: None,
            boot: Duration::from_secs(self.generator.random_range(60..10_000_000)),
            // Quartz is off by up to a few hundred millionths.
            rate: self.generator.random_range(-200..=200),
            skew: SignedDuration::from_millis(self.generator.random_range(-500..=500)),
        };
        self.hosts.insert(name.to_owned(), host);
        self.start(name);
    }

    pub fn ip(&self, host: &str) -> Option<[u8; 4]> {
        self.hosts.get(host).map(|host| host.ip)
    }

    /// Returns whether the host's program runs.
    pub fn runs(&self, host: &str) -> bool {
        self.process_of(host).is_some()
    }

    /// Starts the host's program unless it runs.
    pub fn start(&mut self, name: &str) {
        if self.runs(name) {
            return;
        }
        let id = self.next_process();
        let (now, wall, seed) = (self.now, self.wall(), self.process_seed(id));
        let folder = self.folder.path().join(name);
        let Some(host) = self.hosts.get_mut(name) else {
            return;
        };
        host.restarts = true;
        host.process = Some(id);
        host.stop = CancellationToken::new();
        host.stopping = None;
        let context = Context {
            process: id,
            outbox: self.outbox.clone(),
            folder: folder.clone(),
            stop: host.stop.clone(),
        };
        let program = Rc::clone(&host.program);
        let main: Main = Box::new(move || program(context));
        let start = Start {
            id,
            host: name.to_owned(),
            seed,
            clocks: Clocks {
                boot: host.boot + Duration::from_millis(now),
                wall,
                suspended: Duration::ZERO,
                skew: host.skew,
            },
            rate: host.rate,
            at: now,
            folder: folder.clone(),
            outbox: self.outbox.clone(),
        };
        self.observe(Seen::Started {
            host: name.to_owned(),
        });
        let process = std::fs::create_dir_all(&folder).and_then(|()| Process::start(start, main));
        match process {
            Ok(process) => {
                self.processes.insert(id, process);
                self.run_process(id, Vec::new());
            }
            Err(error) => self.observe(Seen::Ended {
                host: name.to_owned(),
                problem: Some(format!("it did not start: {error}")),
            }),
        }
    }

    /// Kills the host's program (SIGKILL), and starts it again after this time.
    pub fn crash(&mut self, name: &str, restart_after: Option<Millis>) {
        if let Some(id) = self.process_of(name) {
            self.remove_process(id);
        }
        if let Some(host) = self.hosts.get_mut(name) {
            host.restarts = restart_after.is_some();
        }
        if let Some(after) = restart_after {
            self.queue
                .push(self.now + after, Event::Restart(name.to_owned()));
        }
    }

    /// Stops the host's program (SIGTERM). It starts again after this time, or later once it has ended.
    pub fn stop(&mut self, name: &str, restart_after: Option<Millis>) {
        let Some(id) = self.process_of(name) else {
            return;
        };
        let Some(host) = self.hosts.get_mut(name) else {
            return;
        };
        host.restarts = restart_after.is_some();
        host.stopping = Some(self.now + restart_after.unwrap_or_default());
        let stop = host.stop.clone();
        let name = name.to_owned();
        self.at(self.now + TERMINATION, move |simulation| {
            if simulation.process_of(&name) == Some(id) {
                simulation.remove_process(id);
                simulation.stopped(&name, false);
            }
        });
        self.run_process(id, vec![Box::new(move || stop.cancel())]);
    }

    /// A program has ended after SIGTERM.
    fn stopped(&mut self, name: &str, in_time: bool) {
        let host = name.to_owned();
        self.observe(Seen::Stopped { host, in_time });
        let again = self.hosts.get(name).and_then(|host| host.stopping);
        let again = again.unwrap_or_default().max(self.now);
        self.queue.push(again, Event::Restart(name.to_owned()));
    }

    /// Strikes the `nth` request that the host sends from now, and then reports the fault with this text.
    pub fn strike_at_request(&mut self, host: &str, nth: u32, strike: Strike, text: String) {
        let nth = self.sent(host).saturating_add(nth);
        self.strikes.insert(host.to_owned(), (nth, strike, text));
    }

    /// Forgets the strikes that have not happened yet.
    pub fn cancel_strikes(&mut self) {
        self.strikes.clear();
    }

    /// Number of requests that the host has sent.
    fn sent(&self, host: &str) -> u32 {
        self.sent.get(host).copied().unwrap_or_default()
    }

    /// Counts a request. Returns its number and the fault that strikes it.
    pub(super) fn count_request(&mut self, name: &str) -> (u32, Option<Strike>) {
        let nth = self.sent(name) + 1;
        self.sent.insert(name.to_owned(), nth);
        if self.strikes.get(name).is_none_or(|(at, ..)| *at != nth) {
            return (nth, None);
        }
        let Some((_, strike, text)) = self.strikes.remove(name) else {
            return (nth, None);
        };
        self.observe(Seen::Fault { text });
        if let Strike::Crash { restart } = strike {
            let restart = (restart != FOREVER).then_some(restart);
            let name = name.to_owned();
            self.at(self.now, move |simulation| simulation.crash(&name, restart));
        }
        (nth, Some(strike))
    }

    /// Stops the host's program (SIGSTOP) for this time.
    pub fn freeze(&mut self, name: &str, length: Millis) {
        let until = self.now + length;
        if let Some(process) = self
            .process_of(name)
            .and_then(|id| self.processes.get_mut(&id))
        {
            process.stopped_until = Some(until);
            let id = process.id;
            self.queue.push(until, Event::Resume(id));
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
            process.suspended_for(length);
            self.queue.push(until, Event::Resume(process.id));
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

    /// Moves all wall clocks, also those of API servers.
    pub fn pass(&mut self, by: SignedDuration) {
        self.passed += by;
        for process in self.processes.values() {
            process.skew(by);
        }
        let clusters: Vec<String> = self.clusters.keys().cloned().collect();
        for name in clusters {
            self.change_cluster(&name, |cluster, now| cluster.server.advance(now));
        }
    }

    pub(super) fn restart(&mut self, name: &str) {
        if self.hosts.get(name).is_some_and(|host| host.restarts) {
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

    /// A process has ended by itself.
    pub(super) fn process_ended(&mut self, id: ProcessId, ended: Result<(), String>) {
        if self.helm_runs.contains_key(&id) {
            return self.helm_ended(id);
        }
        let Some(host) = self.processes.get(&id).map(|process| process.host.clone()) else {
            return;
        };
        self.remove_process(id);
        let stopping = self.hosts.get(&host).and_then(|host| host.stopping);
        if stopping.is_some() && ended.is_ok() {
            return self.stopped(&host, true);
        }
        self.observe(Seen::Ended {
            host: host.clone(),
            problem: ended.err(),
        });
        self.queue.push(self.now + 1_000, Event::Restart(host));
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
        self.kill_children_of(id);
        if let Some(host) = self.hosts.get_mut(&host)
            && host.process == Some(id)
        {
            host.process = None;
        }
    }

    fn process_of(&self, host: &str) -> Option<ProcessId> {
        let id = self.hosts.get(host)?.process?;
        self.processes.contains_key(&id).then_some(id)
    }
}
