//! Runs all processes and API servers of one simulation in the order of one event queue.

mod api;
mod helm_runs;
mod hosts;
mod queue;
mod streams;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;

use jiff::{SignedDuration, Timestamp};
use rand::rngs::Xoshiro256PlusPlus;
use rand::{RngExt as _, SeedableRng as _};
use tempfile::TempDir;
use tokio::sync::mpsc;

use crate::log;
use crate::network::{Link, Links};
use crate::observe::{Event as Seen, Observation};
use crate::outbox::{Message, Outbox, ProcessId};
use crate::plan::Strike;
use crate::process::{Delivery, Process};
use crate::streams::{End, SimStream};

pub use api::{Cluster, Health};
use api::{OpenRequest, Sender};
use helm_runs::HelmRun;
pub use hosts::{Context, Host, Program};
use queue::{Event, Queue};
use streams::Held;

/// Milliseconds since the start of the simulation.
pub type Millis = u64;

/// Wall time at the start.
const EPOCH: Timestamp = Timestamp::constant(1_767_225_600, 0);

/// One simulation.
pub struct Simulation {
    now: Millis,
    /// All processes run at least this often. A message leaves at most this late.
    window: Millis,
    queue: Queue,
    outbox: Outbox,
    links: Links,
    processes: BTreeMap<ProcessId, Process>,
    hosts: BTreeMap<String, Host>,
    clusters: BTreeMap<String, Cluster>,
    requests: BTreeMap<u64, OpenRequest>,
    listeners: BTreeMap<SocketAddr, (ProcessId, mpsc::UnboundedSender<(SimStream, SocketAddr)>)>,
    /// Both ends of each open stream, by their processes.
    streams: Vec<(Arc<End>, Arc<End>)>,
    held: Vec<Held>,
    helm_runs: BTreeMap<ProcessId, HelmRun>,
    /// Number of requests that each host has sent.
    sent: BTreeMap<String, u32>,
    /// Faults by host, with the number of the request that they strike, and the text that reports them.
    strikes: BTreeMap<String, (u32, Strike, String)>,
    /// Addresses of Services, each with a function that finds the listener behind it.
    services: BTreeMap<SocketAddr, fn(&Simulation) -> Option<SocketAddr>>,
    generator: Xoshiro256PlusPlus,
    observations: Vec<Observation>,
    folder: TempDir,
    /// Time by which all wall clocks have been moved.
    passed: SignedDuration,
    seed: u64,
    last_process: u64,
    last_run: u64,
}

/// A folder in memory if there is one. Its name depends only on thread and seed, because paths get into objects.
fn folder(seed: u64) -> std::io::Result<TempDir> {
    let (process, thread) = (std::process::id(), std::thread::current().id());
    let prefix = format!("krypton-sim-{process}-{thread:?}-{seed}");
    let mut folder = tempfile::Builder::new();
    let folder = folder.prefix(&prefix).rand_bytes(0);
    let memory = Path::new("/dev/shm");
    match memory.is_dir() {
        true => folder.tempdir_in(memory),
        false => folder.tempdir(),
    }
}

impl std::fmt::Debug for Simulation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Simulation(seed {}, {} ms)", self.seed, self.now)
    }
}

impl Simulation {
    /// Prepares an empty simulation.
    ///
    /// # Errors
    /// Returns an error if no folder for files can be created.
    pub fn new(seed: u64) -> std::io::Result<Self> {
        log::install();
        let mut generator = Xoshiro256PlusPlus::seed_from_u64(seed);
        let window = [10, 20, 50, 100][generator.random_range(0..4_usize)];
        let mut queue = Queue::default();
        queue.push(window, Event::Window);
        Ok(Self {
            now: 0,
            window,
            queue,
            outbox: Outbox::default(),
            links: Links::new(seed ^ 0x6e65_7477),
            processes: BTreeMap::new(),
            hosts: BTreeMap::new(),
            clusters: BTreeMap::new(),
            requests: BTreeMap::new(),
            listeners: BTreeMap::new(),
            streams: Vec::new(),
            held: Vec::new(),
            helm_runs: BTreeMap::new(),
            sent: BTreeMap::new(),
            strikes: BTreeMap::new(),
            services: BTreeMap::new(),
            generator,
            observations: Vec::new(),
            folder: folder(seed)?,
            passed: SignedDuration::ZERO,
            seed,
            last_process: 0,
            last_run: 0,
        })
    }

    pub fn now(&self) -> Millis {
        self.now
    }

    /// The true wall time.
    pub fn wall(&self) -> Timestamp {
        let passed = i64::try_from(self.now).unwrap_or(i64::MAX);
        EPOCH
            .saturating_add(SignedDuration::from_millis(passed) + self.passed)
            .unwrap_or(EPOCH)
    }

    /// The folder for files of this simulation.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Takes what happened since the last call.
    pub fn observations(&mut self) -> Vec<Observation> {
        std::mem::take(&mut self.observations)
    }

    pub fn observe(&mut self, event: Seen) {
        let at = self.now;
        self.observations.push(Observation { at, event });
    }

    /// Schedules an action of a person or a fault.
    pub fn at(&mut self, at: Millis, action: impl FnOnce(&mut Self) + 'static) {
        self.queue.push(at, Event::Action(Box::new(action)));
    }

    /// Routes connections to `address` to the listener that `find` returns.
    pub fn service(&mut self, address: SocketAddr, find: fn(&Self) -> Option<SocketAddr>) {
        self.services.insert(address, find);
    }

    /// Changes one direction of a link. If it is well again, held bytes arrive.
    pub fn link(&mut self, from: &str, to: &str, link: Link) {
        self.links.set(from, to, link);
        self.release_held();
    }

    /// Makes all links well. Requests whose connection was lost fail for Helm, which has no deadline for them.
    pub fn heal_links(&mut self) {
        self.links.clear();
        self.release_held();
        self.reset_lost_of_helm();
    }

    /// Handles the next event, unless it is later than `limit`. Returns false if there is none.
    pub fn step(&mut self, limit: Millis) -> bool {
        let Some((at, event)) = self.queue.pop(limit) else {
            return false;
        };
        self.now = at;
        match event {
            Event::Window => self.run_all(),
            Event::Arrives(request) => self.request_arrives(*request),
            Event::Server(cluster) => self.server_timer(&cluster),
            Event::Deliver(process, delivery) => self.run_process(process, vec![delivery]),
            Event::HelmLimit(run) => self.helm_limit(run),
            Event::Resume(process) => self.resume(process),
            Event::Restart(host) => self.restart(&host),
            Event::Action(action) => action(self),
        }
        self.dispatch();
        true
    }

    /// Handles all events until `limit`.
    pub fn run_until(&mut self, limit: Millis) {
        while self.step(limit) {}
        self.now = self.now.max(limit);
    }

    fn run_all(&mut self) {
        let all: Vec<ProcessId> = self.processes.keys().copied().collect();
        for process in all {
            self.run_process(process, Vec::new());
        }
        self.queue.push(self.now + self.window, Event::Window);
    }

    /// Runs a process up to now. A stopped process gets what arrives when it continues.
    fn run_process(&mut self, id: ProcessId, arriving: Vec<Delivery>) {
        let Some(process) = self.processes.get_mut(&id) else {
            return;
        };
        if let Some(until) = process.stopped_until {
            for delivery in arriving {
                self.queue
                    .push(until.max(self.now), Event::Deliver(id, delivery));
            }
            return;
        }
        process.run(self.now, arriving);
        let host = process.host.clone();
        let ended = process.ended();
        for line in log::lines() {
            let host = host.clone();
            self.observe(Seen::Log { host, line });
        }
        for message in log::panics() {
            let host = host.clone();
            self.observe(Seen::Panicked { host, message });
        }
        self.dispatch();
        if let Some(ended) = ended {
            self.process_ended(id, ended);
        }
    }

    /// Handles what processes have sent.
    fn dispatch(&mut self) {
        for (from, message) in self.outbox.take() {
            let Some(process) = self.processes.get(&from) else {
                continue;
            };
            let host = process.host.clone();
            match message {
                Message::Request {
                    id,
                    authority,
                    request,
                    reply,
                } => {
                    let (nth, strike) = self.count_request(&host);
                    let from = Sender {
                        process: from,
                        host,
                        nth,
                        strike,
                    };
                    self.send_request(from, id, &authority, (*request, reply));
                }
                Message::RequestDropped { id } => self.drop_request(id),
                Message::Listen { address, accepted } => {
                    self.listeners.insert(address, (from, accepted));
                }
                Message::Unlisten { address } => {
                    self.listeners.remove(&address);
                }
                Message::Dial { address, reply } => self.dial((from, host), address, reply),
                Message::Bytes { to, bytes } => self.send(&host, to, Some(bytes), false),
                Message::Finish { to, reset } => self.send(&host, to, None, reset),
                Message::Helm {
                    arguments,
                    environment,
                    output,
                    until,
                    state,
                } => self.start_helm(
                    (from, host),
                    (arguments, environment),
                    (output, until),
                    state,
                ),
                Message::HelmTerminate { state } => self.terminate_helm(&state),
                Message::HelmKill { state } => self.kill_helm(&state),
                Message::HelmUntil { state, until } => self.limit_helm(&state, until),
            }
        }
    }

    fn deliver(&mut self, process: ProcessId, at: Millis, delivery: Delivery) {
        self.queue.push(at, Event::Deliver(process, delivery));
    }

    fn next_process(&mut self) -> ProcessId {
        self.last_process += 1;
        ProcessId(self.last_process)
    }

    fn process_seed(&self, id: ProcessId) -> u64 {
        self.seed ^ id.0.wrapping_mul(0x9e37_79b9_7f4a_7c15)
    }
}
