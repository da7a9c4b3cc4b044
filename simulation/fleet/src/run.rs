//! One run: start, chaos, healing, convergence, and quiet.

use crate::conductor::Simulation;
use crate::coverage::Coverage;
use crate::faults;
use crate::observe::{Event, Observation};
use crate::oracles::{Oracles, Phase, Violation};
use crate::plan::{Action, MemberAction, Plan};
use crate::stage::{Fleet, START};
use crate::time::Millis;

const SECOND: Millis = 1000;
/// Time between the Tenants' creation and the chaos.
const INSTALL: Millis = 10 * SECOND;
/// Time from the end of the chaos until the fleet must have converged.
const CONVERGE: Millis = 240 * SECOND;
/// After this time, the oracles know which Leases an ended process has left behind, and wait for their next holders.
const STALE_LEASES: Millis = 30 * SECOND;
/// A departed member stays in the status for a minute, which a new leader counts again.
const DEPARTURE: Millis = 60 * SECOND;
/// Time between two checks of that.
const CHECK_INTERVAL: Millis = 5 * SECOND;
/// Name of the oracle for runs that do not get as far as the chaos.
const STARTS: &str = "the-fleet-starts";

/// How a run ended.
#[derive(Debug)]
pub struct Outcome {
    pub violation: Option<Violation>,
    /// Simulated time.
    pub simulated: Millis,
    pub coverage: Coverage,
}

/// Runs a plan. `trace` gets each observation.
///
/// # Errors
/// Returns an error if the machine has no room for the simulation's files.
pub fn run(plan: &Plan, trace: &mut dyn FnMut(&Observation)) -> std::io::Result<Outcome> {
    let mut runner = Runner {
        plan,
        simulation: Simulation::new(plan.seed)?,
        oracles: Oracles::new(plan),
        coverage: Coverage::default(),
        changes: 0,
        trace,
    };
    let violation = runner.run_phases().err();
    Ok(Outcome {
        violation,
        simulated: runner.simulation.now(),
        coverage: runner.coverage,
    })
}

struct Runner<'a> {
    plan: &'a Plan,
    simulation: Simulation,
    oracles: Oracles,
    coverage: Coverage,
    /// Number of changes of objects so far.
    changes: u64,
    trace: &'a mut dyn FnMut(&Observation),
}

impl Runner<'_> {
    fn run_phases(&mut self) -> Result<(), Violation> {
        let fleet = Fleet {
            settings: &self.plan.settings,
        };
        if let Some(action) = &self.plan.settings.at_start {
            faults::apply(&mut self.simulation, action);
        }
        self.set_up(|simulation| fleet.start(simulation))?;
        self.wait_until(START, "a hub leads", |simulation| {
            fleet.is_ready_for_agents(simulation)
        })?;
        self.set_up(|simulation| fleet.join_agents(simulation))?;
        self.wait_until(START, "all members are connected", |simulation| {
            fleet.all_connected(simulation)
        })?;
        faults::create_tenants(&mut self.simulation, &self.plan.settings);
        self.advance(INSTALL)?;

        self.enter_phase(Phase::Chaos);
        let start = self.simulation.now();
        faults::schedule_steps(&mut self.simulation, self.plan, start);
        self.advance(self.plan.settings.chaos)?;

        faults::heal(&mut self.simulation, self.plan);
        self.enter_phase(Phase::Converge);
        self.converge()?;

        self.enter_phase(Phase::Quiet);
        self.advance(self.plan.settings.quiet)?;
        self.oracles.check_converged(self.simulation.now())
    }

    /// Waits until the fleet has converged. At the end, the oracles report what is missing.
    fn converge(&mut self) -> Result<(), Violation> {
        let detection_delay = self.remaining_detection_delay();
        let limit = self.simulation.now() + detection_delay + CONVERGE;
        self.advance(self.settle_time(detection_delay))?;
        while self.simulation.now() < limit {
            self.advance(CHECK_INTERVAL)?;
            if self.oracles.check_converged(self.simulation.now()).is_ok() {
                break;
            }
        }
        Ok(())
    }

    /// Time from the end of the chaos until the oracles see all that is still to come.
    fn settle_time(&self, detection_delay: Millis) -> Millis {
        let mut steps = self.plan.steps.iter();
        // A hostile agent invents reports about Tenants, and departs from their status.
        let departs = |action: &Action| match action {
            Action::Member { action, .. } => !matches!(
                action,
                MemberAction::Pause | MemberAction::Resume | MemberAction::Rejoin
            ),
            action => matches!(action, Action::HostileAgent { .. }),
        };
        match steps.any(|step| departs(&step.action)) {
            true => detection_delay + DEPARTURE + self.plan.settings.leader_lease(),
            false => detection_delay.max(STALE_LEASES),
        }
    }

    /// Time from the end of the chaos until clients notice all half-open connections.
    fn remaining_detection_delay(&self) -> Millis {
        let chaos = self.plan.settings.chaos;
        let steps = self.plan.steps.iter();
        let ends =
            steps.map(|step| (step.at + step.action.detection_delay()).saturating_sub(chaos));
        ends.max().unwrap_or_default()
    }

    fn enter_phase(&mut self, phase: Phase) {
        self.oracles.enter_phase(phase, self.simulation.now());
    }

    fn set_up(
        &mut self,
        action: impl FnOnce(&mut Simulation) -> anyhow::Result<()>,
    ) -> Result<(), Violation> {
        let result = action(&mut self.simulation);
        self.process_observations()?;
        result.map_err(|error| self.start_violation(format!("{error:#}")))
    }

    fn start_violation(&self, text: String) -> Violation {
        Violation {
            oracle: STARTS,
            at: self.simulation.now(),
            text,
        }
    }

    /// Runs until the goal is reached, at most for this time.
    fn wait_until(
        &mut self,
        timeout: Millis,
        goal: &str,
        is_reached: impl Fn(&Simulation) -> bool,
    ) -> Result<(), Violation> {
        let limit = self.simulation.now() + timeout;
        // A goal is a state of objects, so only a change of one reaches it.
        let mut last_check = None;
        loop {
            if last_check.replace(self.changes) != Some(self.changes)
                && is_reached(&self.simulation)
            {
                return Ok(());
            }
            if !self.simulation.handle_next_event(limit) {
                let text = format!("not within {} s: {goal}", timeout / SECOND);
                return Err(self.start_violation(text));
            }
            self.process_observations()?;
        }
    }

    fn advance(&mut self, length: Millis) -> Result<(), Violation> {
        let limit = self.simulation.now() + length;
        while self.simulation.handle_next_event(limit) {
            self.process_observations()?;
        }
        self.simulation.run_until(limit);
        self.process_observations()
    }

    /// Passes the new observations to the trace, the coverage and the oracles.
    fn process_observations(&mut self) -> Result<(), Violation> {
        for observation in self.simulation.take_observations() {
            (self.trace)(&observation);
            self.changes += u64::from(matches!(observation.event, Event::Change { .. }));
            self.coverage.record(&observation);
            self.oracles.observe(&observation)?;
        }
        Ok(())
    }
}
