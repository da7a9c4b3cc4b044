//! Runs all processes and API servers of one simulation in the order of one event queue.

mod api;
mod helm_runs;
mod hosts;
mod queue;
mod requests;
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
use crate::observe::{Event, Observation};
use crate::outbox::stream::{SimStream, StreamEnd};
use crate::outbox::{Message, Outbox, ProcessId};
use crate::plan::RequestFault;
use crate::process::{Delivery, Process};
use crate::time::Millis;

pub use api::{Cluster, Health};
use helm_runs::HelmRun;
pub use hosts::{Host, Program, ProgramContext};
use queue::{EventQueue, QueuedEvent};
use requests::{OpenRequest, RequestSender};
use streams::BlockedSend;

/// Wall time at the start.
const EPOCH: Timestamp = Timestamp::constant(1_767_225_600, 0);

/// One simulation.
pub struct Simulation {
    now: Millis,
    /// All processes run at least this often. It bounds the delay of a message.
    tick_interval: Millis,
    queue: EventQueue,
    outbox: Outbox,
    links: Links,
    processes: BTreeMap<ProcessId, Process>,
    hosts: BTreeMap<String, Host>,
    clusters: BTreeMap<String, Cluster>,
    requests: BTreeMap<u64, OpenRequest>,
    listeners: BTreeMap<SocketAddr, (ProcessId, mpsc::UnboundedSender<(SimStream, SocketAddr)>)>,
    /// Both ends of each open stream, by their processes.
    streams: Vec<(Arc<StreamEnd>, Arc<StreamEnd>)>,
    blocked: Vec<BlockedSend>,
    helm_runs: BTreeMap<ProcessId, HelmRun>,
    /// Number of requests that each host has sent.
    request_counts: BTreeMap<String, u32>,
    /// Request faults by host, with the number of the request that they affect, and the text that reports them.
    request_faults: BTreeMap<String, (u32, RequestFault, String)>,
    /// Addresses of Services, each with a function that finds the listener behind it.
    services: BTreeMap<SocketAddr, fn(&Simulation) -> Option<SocketAddr>>,
    generator: Xoshiro256PlusPlus,
    observations: Vec<Observation>,
    folder: TempDir,
    /// Time by which actions have moved all wall clocks.
    clock_offset: SignedDuration,
    seed: u64,
    last_process: u64,
    last_run: u64,
}

/// Creates a folder, in memory if possible. Its name depends only on thread and seed, because paths get into objects.
fn create_folder(seed: u64) -> std::io::Result<TempDir> {
    let (process, thread) = (std::process::id(), std::thread::current().id());
    let prefix = format!("krypton-sim-{process}-{thread:?}-{seed}");
    let mut builder = tempfile::Builder::new();
    let builder = builder.prefix(&prefix).rand_bytes(0);
    let shared_memory = Path::new("/dev/shm");
    match shared_memory.is_dir() {
        true => builder.tempdir_in(shared_memory),
        false => builder.tempdir(),
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
        log::install_panic_hook();
        let mut generator = Xoshiro256PlusPlus::seed_from_u64(seed);
        let tick_interval = [50, 100, 200][generator.random_range(0..3_usize)];
        let mut queue = EventQueue::default();
        queue.push(tick_interval, QueuedEvent::Tick);
        Ok(Self {
            now: 0,
            tick_interval,
            queue,
            outbox: Outbox::default(),
            links: Links::new(seed ^ 0x6e65_7477),
            processes: BTreeMap::new(),
            hosts: BTreeMap::new(),
            clusters: BTreeMap::new(),
            requests: BTreeMap::new(),
            listeners: BTreeMap::new(),
            streams: Vec::new(),
            blocked: Vec::new(),
            helm_runs: BTreeMap::new(),
            request_counts: BTreeMap::new(),
            request_faults: BTreeMap::new(),
            services: BTreeMap::new(),
            generator,
            observations: Vec::new(),
            folder: create_folder(seed)?,
            clock_offset: SignedDuration::ZERO,
            seed,
            last_process: 0,
            last_run: 0,
        })
    }

    pub fn now(&self) -> Millis {
        self.now
    }

    /// The true wall time.
    pub fn wall_time(&self) -> Timestamp {
        let elapsed = i64::try_from(self.now).unwrap_or(i64::MAX);
        EPOCH
            .saturating_add(SignedDuration::from_millis(elapsed) + self.clock_offset)
            .unwrap_or(EPOCH)
    }

    /// The folder for files of this simulation.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Takes the observations since the last call.
    pub fn take_observations(&mut self) -> Vec<Observation> {
        std::mem::take(&mut self.observations)
    }

    pub fn record(&mut self, event: Event) {
        let at = self.now;
        self.observations.push(Observation { at, event });
    }

    /// Schedules an action of a user or a fault.
    pub fn schedule(&mut self, at: Millis, action: impl FnOnce(&mut Self) + 'static) {
        self.queue.push(at, QueuedEvent::Action(Box::new(action)));
    }

    /// Routes connections to `address` to the listener that `find_listener` returns.
    pub fn add_service(
        &mut self,
        address: SocketAddr,
        find_listener: fn(&Self) -> Option<SocketAddr>,
    ) {
        self.services.insert(address, find_listener);
    }

    /// Changes one direction of a link. If it works again, blocked bytes arrive.
    pub fn set_link(&mut self, from: &str, to: &str, link: Link) {
        self.links.set(from, to, link);
        self.send_blocked();
    }

    /// Removes the faults of all links. Requests whose connection was lost fail for Helm, which has no deadline for
    /// them.
    pub fn heal_links(&mut self) {
        self.links.clear();
        self.send_blocked();
        self.reset_lost_helm_requests();
    }

    /// Handles the next event up to `limit`. Returns false if no event is due by then.
    pub fn handle_next_event(&mut self, limit: Millis) -> bool {
        let Some((at, event)) = self.queue.pop(limit) else {
            return false;
        };
        self.now = at;
        match event {
            QueuedEvent::Tick => self.run_processes(),
            QueuedEvent::RequestArrives(request) => self.handle_request(*request),
            QueuedEvent::ServerTimer(cluster) => self.handle_server_timer(&cluster),
            QueuedEvent::Deliver(process, delivery) => self.run_process(process, vec![delivery]),
            QueuedEvent::HelmTimeLimit(run) => self.enforce_helm_time_limit(run),
            QueuedEvent::Resume(process) => self.resume(process),
            QueuedEvent::Restart(host) => self.restart(&host),
            QueuedEvent::Action(action) => action(self),
        }
        self.handle_messages();
        true
    }

    /// Handles all events until `limit`.
    pub fn run_until(&mut self, limit: Millis) {
        while self.handle_next_event(limit) {}
        self.now = self.now.max(limit);
    }

    fn run_processes(&mut self) {
        let processes: Vec<ProcessId> = self.processes.keys().copied().collect();
        for process in processes {
            self.run_process(process, Vec::new());
        }
        self.queue
            .push(self.now + self.tick_interval, QueuedEvent::Tick);
    }

    /// Runs a process up to now. A stopped process gets the deliveries when it continues.
    fn run_process(&mut self, id: ProcessId, deliveries: Vec<Delivery>) {
        let Some(process) = self.processes.get_mut(&id) else {
            return;
        };
        if let Some(until) = process.stopped_until {
            for delivery in deliveries {
                self.queue
                    .push(until.max(self.now), QueuedEvent::Deliver(id, delivery));
            }
            return;
        }
        process.run(self.now, deliveries);
        let host = process.host.clone();
        let exit = process.take_exit();
        for line in log::take_lines() {
            let host = host.clone();
            self.record(Event::Log { host, line });
        }
        for message in log::take_panics() {
            let host = host.clone();
            self.record(Event::ProcessPanicked { host, message });
        }
        self.handle_messages();
        if let Some(exit) = exit {
            self.handle_process_exit(id, exit);
        }
    }

    /// Handles the messages of processes.
    fn handle_messages(&mut self) {
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
                    let (nth, fault) = self.count_request(&host);
                    let from = RequestSender {
                        process: from,
                        host,
                        nth,
                        fault,
                    };
                    self.send_request(from, id, &authority, (*request, reply));
                }
                Message::RequestDropped { id } => self.drop_request(id),
                Message::Listen {
                    address,
                    connections,
                } => {
                    self.listeners.insert(address, (from, connections));
                }
                Message::Unlisten { address } => {
                    self.listeners.remove(&address);
                }
                Message::Dial { address, reply } => self.dial((from, host), address, reply),
                Message::Bytes { to, bytes } => self.send(&host, to, Some(bytes), false),
                Message::Finish { to, reset } => self.send(&host, to, None, reset),
                Message::StartHelm {
                    arguments,
                    environment,
                    output,
                    time_limit,
                    state,
                } => self.start_helm(
                    (from, host),
                    (arguments, environment),
                    (output, time_limit),
                    state,
                ),
                Message::TerminateHelm { state } => self.terminate_helm(&state),
                Message::KillHelm { state } => self.kill_helm(&state),
                Message::SetHelmTimeLimit { state, time_limit } => {
                    self.set_helm_time_limit(&state, time_limit)
                }
            }
        }
    }

    fn deliver(&mut self, process: ProcessId, at: Millis, delivery: Delivery) {
        self.queue.push(at, QueuedEvent::Deliver(process, delivery));
    }

    fn next_process_id(&mut self) -> ProcessId {
        self.last_process += 1;
        ProcessId(self.last_process)
    }

    fn process_seed(&self, id: ProcessId) -> u64 {
        self.seed ^ id.0.wrapping_mul(0x9e37_79b9_7f4a_7c15)
    }
}
