//! The invariants of Krypton, each checked on the observations of a run.
//!
//! Create [`Oracles`] with the plan, pass each observation to [`Oracles::see`], report phases with
//! [`Oracles::enter`], and call [`Oracles::quiet`] at the end of [`Phase::Quiet`]. The first violation is the result
//! of the run. Oracles know the stores only from [`Event::Change`], so histories in tests are lists of observations.
//!
//! Two rules need more observations than the conductor makes: the preconditions of deletes need the body of a
//! request, and the deadlines of requests need its start.

mod content;
mod handover;
mod home;
mod leases;
mod leaving;
mod liveness;
mod members;
mod people;
mod placed;
mod process;
mod releases;
mod status;
#[cfg(test)]
mod story;
mod upgrades;
mod view;

use std::fmt;

use krypton_sim_apiserver::server::Change;

use crate::conductor::Millis;
use crate::observe::{Event, Observation};
use crate::plan::Plan;

pub use people::PLANTED;
pub(crate) use view::condition;
pub use view::{Phase, View};

/// Result of a check: the reason for the violation, in one sentence.
pub type Check = Result<(), String>;

/// An invariant.
pub trait Oracle: fmt::Debug {
    fn name(&self) -> &'static str;

    /// Checks an observation. The view already contains it.
    fn see(&mut self, _view: &View, _seen: &Observation) -> Check {
        Ok(())
    }

    /// Checks a write that a host's request has made. It follows `see` of the same change.
    fn wrote(&mut self, _view: &View, _by: &Writer<'_>) -> Check {
        Ok(())
    }

    /// Checks the state after the idle time, when everything must have converged.
    fn quiet(&mut self, _view: &View) -> Check {
        Ok(())
    }
}

/// A change of a store with the host that requested it.
#[derive(Clone, Copy, Debug)]
pub struct Writer<'a> {
    pub host: &'a str,
    pub cluster: &'a str,
    pub change: &'a Change,
}

/// A violated invariant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    pub oracle: &'static str,
    /// Milliseconds since the start of the simulation.
    pub at: Millis,
    pub text: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (seconds, millis) = (self.at / 1000, self.at % 1000);
        let (oracle, text) = (self.oracle, &self.text);
        write!(f, "{seconds}.{millis:03} {oracle}: {text}")
    }
}

/// All invariants with the state that they share.
#[derive(Debug)]
pub struct Oracles {
    view: View,
    all: Vec<Box<dyn Oracle>>,
}

impl Oracles {
    pub fn new(plan: &Plan) -> Self {
        let all = releases::all()
            .into_iter()
            .chain(upgrades::all())
            .chain(leases::all())
            .chain(members::all())
            .chain(leaving::all())
            .chain(people::all())
            .chain(status::all())
            .chain(process::all())
            .chain(content::all())
            .chain(handover::all())
            .chain(liveness::all())
            .chain(home::all())
            .chain(placed::all());
        Self {
            view: View::new(plan),
            all: all.collect(),
        }
    }

    /// Names of all invariants.
    pub fn names(&self) -> Vec<&'static str> {
        self.all.iter().map(|oracle| oracle.name()).collect()
    }

    pub fn view(&self) -> &View {
        &self.view
    }

    /// Starts a phase of the run.
    pub fn enter(&mut self, phase: Phase, at: Millis) {
        self.view.enter(phase, at);
    }

    /// Checks an observation. Pass all observations of a run in order.
    ///
    /// # Errors
    /// The first violation.
    pub fn see(&mut self, seen: &Observation) -> Result<(), Violation> {
        self.view.see(seen);
        let at = seen.at;
        for oracle in &mut self.all {
            oracle
                .see(&self.view, seen)
                .map_err(|text| violation(oracle.as_ref(), at, text))?;
        }
        let (Event::Answered { host, cluster, .. } | Event::Lost { host, cluster, .. }) =
            &seen.event
        else {
            return Ok(());
        };
        for change in self.view.take_unattributed(cluster) {
            let writer = Writer {
                host,
                cluster,
                change: &change,
            };
            for oracle in &mut self.all {
                oracle
                    .wrote(&self.view, &writer)
                    .map_err(|text| violation(oracle.as_ref(), at, text))?;
            }
            self.view.wrote(&writer);
        }
        Ok(())
    }

    /// Checks the state after the idle time.
    ///
    /// # Errors
    /// The first violation.
    pub fn quiet(&mut self, at: Millis) -> Result<(), Violation> {
        self.view.advance(at);
        for oracle in &mut self.all {
            oracle
                .quiet(&self.view)
                .map_err(|text| violation(oracle.as_ref(), at, text))?;
        }
        Ok(())
    }
}

fn violation(oracle: &dyn Oracle, at: Millis, text: String) -> Violation {
    Violation {
        oracle: oracle.name(),
        at,
        text,
    }
}

/// Fails with the text unless the rule holds.
fn ensure(holds: bool, text: impl FnOnce() -> String) -> Check {
    match holds {
        true => Ok(()),
        false => Err(text()),
    }
}

/// Declares an invariant without state.
macro_rules! stateless {
    ($(#[$doc:meta])* $name:ident, $text:literal, $($body:tt)*) => {
        $(#[$doc])*
        #[derive(Debug, Default)]
        struct $name;

        impl Oracle for $name {
            fn name(&self) -> &'static str {
                $text
            }

            $($body)*
        }
    };
}
use stateless;
