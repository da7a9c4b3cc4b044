//! Helm processes, each a process of its own, with the supervisor's rules.

use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use krypton_runtime::access;
use krypton_sim_helm::run::{Exit, Invocation, kubeconfig_of};
use kube::Config;
use kube::config::{KubeConfigOptions, Kubeconfig};
use tokio_util::sync::CancellationToken;

use super::Simulation;
use super::queue::Event;
use crate::helm::{RunState, exited, killed};
use crate::observe::{Event as Seen, HelmEnd};
use crate::outbox::ProcessId;
use crate::process::{Main, Process, Start};
use crate::world::Clocks;

/// A running Helm.
pub(super) struct HelmRun {
    parent: ProcessId,
    number: u64,
    state: Arc<RunState>,
    terminate: CancellationToken,
    /// The supervisor kills Helm at this time since boot.
    until: Option<Duration>,
    output: Option<PathBuf>,
    exit: Arc<Mutex<Option<Exit>>>,
}

impl Simulation {
    pub(super) fn start_helm(
        &mut self,
        (parent, host): (ProcessId, String),
        (arguments, environment): (Vec<OsString>, Vec<(OsString, OsString)>),
        (output, until): (Option<PathBuf>, Option<Duration>),
        state: Arc<RunState>,
    ) {
        let id = self.next_process();
        self.last_run += 1;
        let number = self.last_run;
        let shown = arguments
            .iter()
            .map(|argument| argument.to_string_lossy().into_owned());
        self.observe(Seen::HelmStarted {
            run: number,
            host: host.clone(),
            arguments: shown.collect(),
        });
        let Some(clocks) = self.processes.get(&parent).map(|process| Clocks {
            boot: process.boot(self.now),
            wall: self.wall(),
            suspended: Duration::ZERO,
            skew: jiff::SignedDuration::ZERO,
        }) else {
            return;
        };
        let terminate = CancellationToken::new();
        let exit: Arc<Mutex<Option<Exit>>> = Arc::default();
        let invocation = Invocation {
            arguments,
            environment,
        };
        let (stop, into) = (terminate.clone(), Arc::clone(&exit));
        let main: Main = Box::new(move || {
            Box::pin(async move {
                let ended = helm(invocation, stop).await;
                *into.lock().unwrap_or_else(PoisonError::into_inner) = Some(ended);
                Ok(())
            })
        });
        let start = Start {
            id,
            host,
            seed: self.process_seed(id),
            clocks,
            rate: 0,
            at: self.now,
            // Its files are its driver's.
            folder: self.folder.path().join("none"),
            outbox: self.outbox.clone(),
        };
        let run = HelmRun {
            parent,
            number,
            state,
            terminate,
            until,
            output,
            exit,
        };
        match Process::start(start, main) {
            Ok(process) => {
                self.processes.insert(id, process);
                self.helm_runs.insert(id, run);
                self.schedule_limit(id);
                self.run_process(id, Vec::new());
            }
            Err(error) => run.state.end(exited(127), error.to_string().into_bytes()),
        }
    }

    pub(super) fn terminate_helm(&mut self, state: &Arc<RunState>) {
        if let Some((id, run)) = self.run_of(state) {
            run.terminate.cancel();
            self.run_process(id, Vec::new());
        }
    }

    pub(super) fn kill_helm(&mut self, state: &Arc<RunState>) {
        if let Some((id, _)) = self.run_of(state) {
            self.end_helm(id, None);
        }
    }

    pub(super) fn limit_helm(&mut self, state: &Arc<RunState>, until: Option<Duration>) {
        let id = self.run_of(state).map(|(id, _)| id);
        if let Some(id) = id {
            if let Some(run) = self.helm_runs.get_mut(&id) {
                run.until = until;
            }
            self.schedule_limit(id);
        }
    }

    pub(super) fn helm_limit(&mut self, id: ProcessId) {
        let (Some(run), Some(process)) = (self.helm_runs.get(&id), self.processes.get(&id)) else {
            return;
        };
        if run
            .until
            .is_some_and(|until| process.boot(self.now) >= until)
        {
            self.end_helm(id, None);
        }
    }

    /// Helm's main function has returned.
    pub(super) fn helm_ended(&mut self, id: ProcessId) {
        let exit = self.helm_runs.get(&id).and_then(|run| {
            let mut exit = run.exit.lock().unwrap_or_else(PoisonError::into_inner);
            exit.take()
        });
        self.end_helm(id, exit);
    }

    /// The pipe to the supervisor of a killed driver closes.
    pub(super) fn kill_children_of(&mut self, parent: ProcessId) {
        let children = self
            .helm_runs
            .iter()
            .filter(|(_, run)| run.parent == parent);
        let children: Vec<ProcessId> = children.map(|(id, _)| *id).collect();
        for id in children {
            self.end_helm(id, None);
        }
    }

    /// Ends Helm. Without an exit, it was killed.
    fn end_helm(&mut self, id: ProcessId, exit: Option<Exit>) {
        let Some(run) = self.helm_runs.remove(&id) else {
            return;
        };
        let host = self.processes.get(&id).map(|process| process.host.clone());
        self.remove_process(id);
        let how = match &exit {
            Some(exit) => HelmEnd::Exited {
                code: exit.code,
                stderr: String::from_utf8_lossy(&exit.stderr).into_owned(),
            },
            None => HelmEnd::Killed,
        };
        self.observe(Seen::HelmEnded {
            run: run.number,
            host: host.unwrap_or_default(),
            how,
        });
        let (status, stderr) = match exit {
            Some(exit) => {
                if let Some(output) = &run.output {
                    drop(std::fs::write(output, &exit.stdout));
                }
                (exited(exit.code), exit.stderr)
            }
            None => (killed(), Vec::new()),
        };
        let state = run.state;
        self.deliver(
            run.parent,
            self.now + 1,
            Box::new(move || state.end(status, stderr)),
        );
    }

    fn schedule_limit(&mut self, id: ProcessId) {
        let (Some(run), Some(process)) = (self.helm_runs.get(&id), self.processes.get(&id)) else {
            return;
        };
        if let Some(until) = run.until {
            let at = process.when(until).max(self.now);
            self.queue.push(at, Event::HelmLimit(id));
        }
    }

    fn run_of(&self, state: &Arc<RunState>) -> Option<(ProcessId, &HelmRun)> {
        let mut runs = self.helm_runs.iter();
        let found = runs.find(|(_, run)| Arc::ptr_eq(&run.state, state));
        found.map(|(id, run)| (*id, run))
    }
}

/// The main function of a Helm process.
async fn helm(invocation: Invocation, terminate: CancellationToken) -> Exit {
    let failed = |error: &dyn std::fmt::Display| Exit {
        code: 1,
        stdout: Vec::new(),
        stderr: format!("Error: {error}\n").into_bytes(),
    };
    let Some(path) = kubeconfig_of(&invocation) else {
        return failed(&"the simulated Helm needs --kubeconfig");
    };
    let config = match Kubeconfig::read_from(path) {
        Ok(kubeconfig) => {
            Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await
        }
        Err(error) => Err(error),
    };
    let client = match config {
        Ok(config) => access::client_named(config, "Helm/4.2.4"),
        Err(error) => return failed(&error),
    };
    match client {
        Ok(client) => krypton_sim_helm::run::run(client, invocation, terminate).await,
        Err(error) => failed(&error),
    }
}
