//! Runs simulated fleets.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Parser;
use krypton_sim::batch::run_all;
use krypton_sim::log;
use krypton_sim::oracles::Violation;
use krypton_sim::plan::Plan;
use krypton_sim::run::run;
use krypton_sim::shrink::shrink;
use krypton_sim::walk;

/// Attempts to make a failing plan smaller.
const ATTEMPTS: usize = 200;

/// Runs simulated fleets under faults that a seed determines, and checks Krypton's guarantees
#[derive(Debug, Parser)]
struct Args {
    /// First seed
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Number of seeds
    #[arg(long, default_value_t = 1)]
    seeds: u64,
    /// Run more seeds until this time has passed
    #[arg(long)]
    minutes: Option<u64>,
    /// Draw short plans for one edge cluster
    #[arg(long)]
    short: bool,
    /// Strike the plan at each kind of request: it fails, loses its answer, or kills its sender
    #[arg(long)]
    walk: bool,
    /// Number of runs at the same time
    #[arg(long, default_value_t = 2)]
    threads: usize,
    /// Print what happens
    #[arg(long)]
    trace: bool,
    /// Include log lines of this level in the trace
    #[arg(long)]
    log: Option<tracing::Level>,
    /// Run the plan in this file, or each plan in this folder, instead of a seed's
    #[arg(long)]
    plan: Option<PathBuf>,
    /// Print the plan of the first seed, and run nothing
    #[arg(long)]
    print: bool,
    /// Print failing plans as they are
    #[arg(long)]
    no_shrink: bool,
    /// Print what the runs have reached
    #[arg(long)]
    coverage: bool,
}

impl Args {
    fn draw_plan(&self, seed: u64) -> Plan {
        match self.short {
            true => Plan::short(seed),
            false => Plan::new(seed),
        }
    }

    /// The plan in the file, or else of the first seed.
    fn first_plan(&self) -> anyhow::Result<Plan> {
        match &self.plan {
            Some(path) => Ok(std::fs::read_to_string(path)?.parse()?),
            None => Ok(self.draw_plan(self.seed)),
        }
    }
}

fn main() -> ExitCode {
    let args = Args::parse();
    match execute(&args) {
        Ok(0) => ExitCode::SUCCESS,
        Ok(_) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("sim: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Returns the number of failed runs.
fn execute(args: &Args) -> anyhow::Result<u64> {
    if args.print {
        print!("{}", args.first_plan()?);
        return Ok(0);
    }
    if let Some(folder) = args.plan.as_deref().filter(|path| path.is_dir()) {
        return run_folder(folder, args);
    }
    match args.trace || args.plan.is_some() && !args.walk {
        true => run_traced(args, &args.first_plan()?),
        false => run_seeds(args),
    }
}

/// Runs the plans in a folder, and prints which fail.
fn run_folder(folder: &Path, args: &Args) -> anyhow::Result<u64> {
    let mut plans = BTreeMap::new();
    for file in std::fs::read_dir(folder)? {
        let path = file?.path();
        let plan: Plan = std::fs::read_to_string(&path)?.parse()?;
        plans.insert(path, plan);
    }
    let on_failure = |failed_plan: Plan, violation: &Violation| {
        let names = plans.iter().filter(|(_, plan)| **plan == failed_plan);
        for (path, _) in names {
            println!("{}: {violation}", path.display());
        }
    };
    let totals = run_all(
        args.threads,
        |index| plans.values().nth(index).cloned(),
        on_failure,
    )?;
    println!("{} runs, {} failed", totals.runs, totals.failed);
    Ok(u64::try_from(totals.failed)?)
}

/// Runs one plan and prints its observations.
fn run_traced(args: &Args, plan: &Plan) -> anyhow::Result<u64> {
    let _log_guard = args.log.map(log::capture);
    let outcome = run(plan, &mut |observation| println!("{observation}"))?;
    match outcome.violation {
        Some(violation) => {
            println!("{violation}");
            Ok(1)
        }
        None => Ok(0),
    }
}

/// Runs one plan after the other on all threads, and prints the failures.
fn run_seeds(args: &Args) -> anyhow::Result<u64> {
    let started = Instant::now();
    let on_failure = |plan: Plan, violation: &Violation| print_failure(args, plan, violation);
    let totals = if args.walk {
        let plans = walk::request_fault_plans(&args.first_plan()?)?;
        run_all(args.threads, |index| plans.get(index).cloned(), on_failure)?
    } else {
        let has_next = |index: u64| match args.minutes {
            Some(minutes) => started.elapsed() < Duration::from_mins(minutes),
            None => index < args.seeds,
        };
        let next_plan = |index: usize| {
            let index = index as u64;
            has_next(index).then(|| args.draw_plan(args.seed + index))
        };
        run_all(args.threads, next_plan, on_failure)?
    };
    if args.coverage {
        println!("{}", totals.coverage);
    }
    let seconds = started.elapsed().as_secs_f64();
    let hours = Duration::from_millis(totals.simulated).as_secs_f64() / 3600.0;
    println!(
        "{} runs, {} failed, {hours:.1} simulated hours in {seconds:.1} s: {:.1} runs per second, {} points",
        totals.runs,
        totals.failed,
        f64::from(u32::try_from(totals.runs)?) / seconds,
        totals.coverage.points(),
    );
    Ok(u64::try_from(totals.failed)?)
}

/// Prints a plan that failed, as small as possible.
fn print_failure(args: &Args, plan: Plan, violation: &Violation) {
    let seed = plan.seed;
    println!("seed {seed}: {violation}");
    if args.no_shrink {
        if let Some(action) = &plan.settings.at_start {
            println!("at-start {action}");
        }
        return;
    }
    let shrunk = shrink(plan, violation.oracle, ATTEMPTS, |plan| {
        let outcome = run(plan, &mut |_| ()).ok()?;
        outcome.violation.map(|violation| violation.oracle)
    });
    println!(
        "seed {seed}, after {} attempts:\n{}",
        shrunk.attempts, shrunk.plan
    );
}
