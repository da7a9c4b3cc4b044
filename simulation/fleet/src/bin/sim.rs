//! Runs simulated fleets.

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use clap::Parser;
use krypton_sim::coverage::Coverage;
use krypton_sim::log;
use krypton_sim::plan::Plan;
use krypton_sim::run::run;
use krypton_sim::shrink::shrink;

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
    /// Number of seeds that run at the same time
    #[arg(long, default_value_t = 2)]
    threads: usize,
    /// Print what happens
    #[arg(long)]
    trace: bool,
    /// Include log lines of this level in the trace
    #[arg(long)]
    log: Option<tracing::Level>,
    /// Run the plan in this file instead of a seed's
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

fn main() -> ExitCode {
    let args = Args::parse();
    match work(&args) {
        Ok(0) => ExitCode::SUCCESS,
        Ok(_) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("sim: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Returns the number of failed runs.
fn work(args: &Args) -> anyhow::Result<u64> {
    if args.print {
        print!("{}", Plan::new(args.seed));
        return Ok(0);
    }
    if let Some(path) = &args.plan {
        let plan: Plan = std::fs::read_to_string(path)?.parse()?;
        return traced(args, &plan);
    }
    if args.trace {
        return traced(args, &Plan::new(args.seed));
    }
    many(args)
}

/// Runs one plan and prints what happens.
fn traced(args: &Args, plan: &Plan) -> anyhow::Result<u64> {
    let _kept = args.log.map(log::keep);
    let outcome = run(plan, &mut |seen| println!("{seen}"))?;
    match outcome.violation {
        Some(violation) => {
            println!("{violation}");
            Ok(1)
        }
        None => Ok(0),
    }
}

fn many(args: &Args) -> anyhow::Result<u64> {
    let started = Instant::now();
    let (next, failed) = (AtomicU64::new(args.seed), AtomicU64::new(0));
    let totals = Mutex::new((0_u64, 0_u64, Coverage::default()));
    let problem = Mutex::new(None);
    std::thread::scope(|scope| {
        for _ in 0..args.threads {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= args.seed + args.seeds {
                        return;
                    }
                    match one(args, seed) {
                        Ok((failure, simulated, coverage)) => {
                            failed.fetch_add(u64::from(failure), Ordering::Relaxed);
                            if let Ok(mut totals) = totals.lock() {
                                totals.0 += 1;
                                totals.1 += simulated;
                                totals.2.merge(&coverage);
                            }
                        }
                        Err(error) => {
                            if let Ok(mut problem) = problem.lock() {
                                *problem = Some(error);
                            }
                            return;
                        }
                    }
                }
            });
        }
    });
    if let Some(error) = problem.into_inner().ok().flatten() {
        return Err(error.into());
    }
    let (seeds, simulated, coverage) = totals.into_inner().unwrap_or_default();
    let failed = failed.into_inner();
    if args.coverage {
        println!("{coverage}");
    }
    let real = started.elapsed().as_secs_f64();
    let hours = std::time::Duration::from_millis(simulated).as_secs_f64() / 3600.0;
    println!(
        "{seeds} seeds, {failed} failed, {hours:.1} simulated hours in {real:.1} s: {:.1} seeds per second, {} points",
        f64::from(u32::try_from(seeds)?) / real,
        coverage.points(),
    );
    Ok(failed)
}

/// Runs one seed. Returns whether it failed, and the simulated time.
fn one(args: &Args, seed: u64) -> std::io::Result<(bool, u64, Coverage)> {
    let plan = Plan::new(seed);
    let outcome = run(&plan, &mut |_| ())?;
    let Some(violation) = &outcome.violation else {
        return Ok((false, outcome.simulated, outcome.coverage));
    };
    println!("seed {seed}: {violation}");
    if !args.no_shrink {
        let oracle = violation.oracle;
        let shrunk = shrink(plan, oracle, ATTEMPTS, |plan| {
            let outcome = run(plan, &mut |_| ()).ok()?;
            outcome.violation.map(|violation| violation.oracle)
        });
        println!(
            "seed {seed}, after {} attempts:\n{}",
            shrunk.attempts, shrunk.plan
        );
    }
    Ok((true, outcome.simulated, outcome.coverage))
}
