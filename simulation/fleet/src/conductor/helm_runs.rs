//! Helm runs, each in a separate process, with the supervisor's rules.

use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use krypton_runtime::access;
use krypton_sim_helm::arguments::{Invocation, kubeconfig_of};
use krypton_sim_helm::run::Exit;
use kube::Config;
use kube::config::{KubeConfigOptions, Kubeconfig};
use parking_lot::Mutex;
use tokio_util::sync::CancellationToken;

use super::Simulation;
use super::queue::QueuedEvent;
use crate::helm::run_state::HelmRunState;
use crate::helm::{exit_status, killed_status};
use crate::observe::{Event, HelmEnd};
use crate::outbox::ProcessId;
use crate::process::{MainFunction, Process, ProcessConfig};
use crate::world::Clocks;

/// A running Helm.
pub(super) struct HelmRun {
    parent: ProcessId,
    number: u64,
    state: Arc<HelmRunState>,
    terminate: CancellationToken,
    /// The supervisor kills Helm at this time since boot.
    time_limit: Option<Duration>,
    output: Option<PathBuf>,
    exit: Arc<Mutex<Option<Exit>>>,
}

impl Simulation {
    pub(super) fn start_helm(
        &mut self,
        (parent, host): (ProcessId, String),
        (arguments, environment): (Vec<OsString>, Vec<(OsString, OsString)>),
        (output, time_limit): (Option<PathBuf>, Option<Duration>),
        state: Arc<HelmRunState>,
    ) {
        let id = self.next_process_id();
        self.last_run += 1;
        let number = self.last_run;
        let command_line = arguments
            .iter()
            .map(|argument| argument.to_string_lossy().into_owned());
        self.record(Event::HelmStarted {
            run: number,
            host: host.clone(),
            arguments: command_line.collect(),
        });
        let Some(clocks) = self.processes.get(&parent).map(|process| Clocks {
            boot: process.boot_time(self.now),
            wall: self.wall_time(),
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
        let (stop, exit_slot) = (terminate.clone(), Arc::clone(&exit));
        let main: MainFunction = Box::new(move || {
            Box::pin(async move {
                let exit = helm_main(invocation, stop).await;
                *exit_slot.lock() = Some(exit);
                Ok(())
            })
        });
        let config = ProcessConfig {
            id,
            host,
            seed: self.process_seed(id),
            clocks,
            drift_ppm: 0,
            started_at: self.now,
            // Its files are its driver's.
            folder: self.folder.path().join("none"),
            outbox: self.outbox.clone(),
        };
        let run = HelmRun {
            parent,
            number,
            state,
            terminate,
            time_limit,
            output,
            exit,
        };
        match Process::start(config, main) {
            Ok(process) => {
                self.processes.insert(id, process);
                self.helm_runs.insert(id, run);
                self.schedule_helm_time_limit(id);
                self.run_process(id, Vec::new());
            }
            Err(error) => run
                .state
                .set_exit(exit_status(127), error.to_string().into_bytes()),
        }
    }

    pub(super) fn terminate_helm(&mut self, state: &Arc<HelmRunState>) {
        if let Some((id, run)) = self.find_run(state) {
            run.terminate.cancel();
            self.run_process(id, Vec::new());
        }
    }

    pub(super) fn kill_helm(&mut self, state: &Arc<HelmRunState>) {
        if let Some((id, _)) = self.find_run(state) {
            self.end_helm(id, None);
        }
    }

    pub(super) fn set_helm_time_limit(
        &mut self,
        state: &Arc<HelmRunState>,
        time_limit: Option<Duration>,
    ) {
        let id = self.find_run(state).map(|(id, _)| id);
        if let Some(id) = id {
            if let Some(run) = self.helm_runs.get_mut(&id) {
                run.time_limit = time_limit;
            }
            self.schedule_helm_time_limit(id);
        }
    }

    pub(super) fn enforce_helm_time_limit(&mut self, id: ProcessId) {
        let (Some(run), Some(process)) = (self.helm_runs.get(&id), self.processes.get(&id)) else {
            return;
        };
        if run
            .time_limit
            .is_some_and(|limit| process.boot_time(self.now) >= limit)
        {
            self.end_helm(id, None);
        }
    }

    /// Handles the return of Helm's main function.
    pub(super) fn handle_helm_exit(&mut self, id: ProcessId) {
        let run = self.helm_runs.get(&id);
        let exit = run.and_then(|run| run.exit.lock().take());
        self.end_helm(id, exit);
    }

    /// Kills the Helm runs of a killed driver, whose pipe to the supervisor closes.
    pub(super) fn kill_helm_runs_of(&mut self, parent: ProcessId) {
        let runs = self
            .helm_runs
            .iter()
            .filter(|(_, run)| run.parent == parent);
        let runs: Vec<ProcessId> = runs.map(|(id, _)| *id).collect();
        for id in runs {
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
        let end = match &exit {
            Some(exit) => HelmEnd::Exited {
                code: exit.code,
                stderr: String::from_utf8_lossy(&exit.stderr).into_owned(),
            },
            None => HelmEnd::Killed,
        };
        self.record(Event::HelmEnded {
            run: run.number,
            host: host.unwrap_or_default(),
            end,
        });
        let (status, stderr) = match exit {
            Some(exit) => {
                if let Some(output) = &run.output {
                    drop(std::fs::write(output, &exit.stdout));
                }
                (exit_status(exit.code), exit.stderr)
            }
            None => (killed_status(), Vec::new()),
        };
        let state = run.state;
        self.deliver(
            run.parent,
            self.now + 1,
            Box::new(move || state.set_exit(status, stderr)),
        );
    }

    fn schedule_helm_time_limit(&mut self, id: ProcessId) {
        let (Some(run), Some(process)) = (self.helm_runs.get(&id), self.processes.get(&id)) else {
            return;
        };
        if let Some(limit) = run.time_limit {
            let at = process.time_at_boot_time(limit).max(self.now);
            self.queue.push(at, QueuedEvent::HelmTimeLimit(id));
        }
    }

    fn find_run(&self, state: &Arc<HelmRunState>) -> Option<(ProcessId, &HelmRun)> {
        let mut runs = self.helm_runs.iter();
        let entry = runs.find(|(_, run)| Arc::ptr_eq(&run.state, state));
        entry.map(|(id, run)| (*id, run))
    }
}

/// The main function of a Helm process.
async fn helm_main(invocation: Invocation, terminate: CancellationToken) -> Exit {
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
        Ok(config) => access::new_client(config, "Helm/4.2.4"),
        Err(error) => return failed(&error),
    };
    match client {
        Ok(client) => krypton_sim_helm::run::run(client, invocation, terminate).await,
        Err(error) => failed(&error),
    }
}
