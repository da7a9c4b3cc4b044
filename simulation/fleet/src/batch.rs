//! Runs many plans on several threads.

use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;

use crate::coverage::Coverage;
use crate::oracles::Violation;
use crate::plan::Plan;
use crate::run::run;
use crate::time::Millis;

/// Sums over all runs.
#[derive(Debug, Default)]
pub struct Totals {
    pub runs: usize,
    pub failed: usize,
    /// Simulated time.
    pub simulated: Millis,
    pub coverage: Coverage,
}

/// Runs the plans that `next_plan` returns for 0, 1, ... until it returns `None`. `on_failure` gets each that violates
/// an invariant.
///
/// # Errors
/// Returns an error if the machine has no room for the simulation's files.
pub fn run_all(
    threads: usize,
    next_plan: impl Fn(usize) -> Option<Plan> + Sync,
    on_failure: impl Fn(Plan, &Violation) + Sync,
) -> io::Result<Totals> {
    let next_index = AtomicUsize::new(0);
    let totals = Mutex::new(Totals::default());
    let worker = || -> io::Result<()> {
        while let Some(plan) = next_plan(next_index.fetch_add(1, Ordering::Relaxed)) {
            let outcome = run(&plan, &mut |_| ())?;
            {
                let mut totals = totals.lock();
                totals.runs += 1;
                totals.failed += usize::from(outcome.violation.is_some());
                totals.simulated += outcome.simulated;
                totals.coverage.merge(&outcome.coverage);
            }
            if let Some(violation) = &outcome.violation {
                on_failure(plan, violation);
            }
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..threads).map(|_| scope.spawn(worker)).collect();
        let results = threads.into_iter().map(|thread| thread.join());
        results
            .map(|result| result.unwrap_or_else(|_| Err(io::Error::other("a run panicked"))))
            .collect::<io::Result<Vec<()>>>()
    })?;
    Ok(totals.into_inner())
}
