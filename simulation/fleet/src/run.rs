//! One run: start, chaos, healing, convergence, and quiet.

use crate::conductor::{Millis, Simulation};
use crate::coverage::Coverage;
use crate::faults;
use crate::observe::{Event, Observation};
use crate::oracles::{Oracles, Phase, Violation};
use crate::plan::{Plan, SYSTEM};
use crate::stage::Fleet;

const SECOND: Millis = 1000;
/// Time until the hub has started, and until all members are connected.
const START: Millis = 180 * SECOND;
/// Time between the Tenants' creation and the chaos.
const INSTALL: Millis = 10 * SECOND;
/// Time from the end of the chaos until everything must be as people want it.
const CONVERGE: Millis = 240 * SECOND;
/// A process that was restarted waits this long for the Lease of its predecessor to expire.
const LEASE: Millis = 65 * SECOND;
/// Time between two checks for that.
const CHECK: Millis = 10 * SECOND;
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
    let mut run = Run {
        plan,
        simulation: Simulation::new(plan.seed)?,
        oracles: Oracles::new(plan),
        coverage: Coverage::default(),
        trace,
    };
    let violation = run.phases().err();
    Ok(Outcome {
        violation,
        simulated: run.simulation.now(),
        coverage: run.coverage,
    })
}

struct Run<'a> {
    plan: &'a Plan,
    simulation: Simulation,
    oracles: Oracles,
    coverage: Coverage,
    trace: &'a mut dyn FnMut(&Observation),
}

impl Run<'_> {
    fn phases(&mut self) -> Result<(), Violation> {
        let fleet = Fleet {
            settings: &self.plan.settings,
        };
        if let Some(action) = &self.plan.settings.at_start {
            faults::apply(&mut self.simulation, action);
        }
        self.staged(|simulation| fleet.start(simulation))?;
        self.until(START, "a hub leads", |simulation| {
            fleet.awaits_agents(simulation)
        })?;
        self.staged(|simulation| fleet.join_agents(simulation))?;
        self.until(START, "all members are connected", |simulation| {
            fleet.is_connected(simulation)
        })?;
        fleet.create_tenants(&mut self.simulation);
        self.advance(INSTALL)?;

        self.enter(Phase::Chaos);
        let start = self.simulation.now();
        faults::schedule(&mut self.simulation, self.plan, start);
        self.advance(self.plan.settings.chaos)?;

        faults::heal(&mut self.simulation, self.plan);
        self.enter(Phase::Converge);
        self.converge()?;

        self.enter(Phase::Quiet);
        self.advance(self.plan.settings.quiet)?;
        self.oracles.quiet(self.simulation.now())
    }

    /// Waits until everything is as people want it. The oracles of the end report what is not.
    fn converge(&mut self) -> Result<(), Violation> {
        let lingering = self.lingering();
        let limit = self.simulation.now() + lingering + CONVERGE;
        self.advance(LEASE.max(lingering))?;
        while self.simulation.now() < limit {
            self.advance(CHECK)?;
            if self.oracles.quiet(self.simulation.now()).is_ok() {
                break;
            }
        }
        Ok(())
    }

    /// Time from the end of the chaos until clients notice all half-open connections.
    fn lingering(&self) -> Millis {
        let chaos = self.plan.settings.chaos;
        let steps = self.plan.steps.iter();
        let ends = steps.map(|step| (step.at + step.action.lingers()).saturating_sub(chaos));
        ends.max().unwrap_or_default()
    }

    fn enter(&mut self, phase: Phase) {
        self.oracles.enter(phase, self.simulation.now());
    }

    fn staged(
        &mut self,
        act: impl FnOnce(&mut Simulation) -> anyhow::Result<()>,
    ) -> Result<(), Violation> {
        let done = act(&mut self.simulation);
        self.look()?;
        done.map_err(|error| self.not_started(format!("{error:#}")))
    }

    fn not_started(&self, text: String) -> Violation {
        Violation {
            oracle: STARTS,
            at: self.simulation.now(),
            text,
        }
    }

    /// Runs until `done`, at most for this time.
    fn until(
        &mut self,
        length: Millis,
        what: &str,
        done: impl Fn(&Simulation) -> bool,
    ) -> Result<(), Violation> {
        let limit = self.simulation.now() + length;
        while !done(&self.simulation) {
            if !self.simulation.step(limit) {
                let text = format!("not within {} s: {what}", length / SECOND);
                return Err(self.not_started(text));
            }
            self.look()?;
        }
        Ok(())
    }

    fn advance(&mut self, length: Millis) -> Result<(), Violation> {
        let limit = self.simulation.now() + length;
        while self.simulation.step(limit) {
            self.look()?;
        }
        self.simulation.run_until(limit);
        self.look()
    }

    /// Passes what has happened to the trace, the coverage and the oracles.
    fn look(&mut self) -> Result<(), Violation> {
        for seen in self.simulation.observations() {
            (self.trace)(&seen);
            self.coverage.see(&seen);
            if let Event::Answered {
                code: 501, path, ..
            } = &seen.event
            {
                return Err(Violation {
                    oracle: "the-model-knows-each-request",
                    at: seen.at,
                    text: format!("the simulated API server does not know {path} in {SYSTEM}"),
                });
            }
            self.oracles.see(&seen)?;
        }
        Ok(())
    }
}
