//! Runs simulated fleets.

use std::process::ExitCode;

use clap::Parser;
use krypton_sim::conductor::Simulation;
use krypton_sim::log;
use krypton_sim::run;

/// Runs simulated fleets under faults that a seed determines
#[derive(Debug, Parser)]
struct Args {
    /// First seed
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Number of seeds
    #[arg(long, default_value_t = 1)]
    seeds: u64,
    /// Print what happens
    #[arg(long)]
    trace: bool,
    /// Include log lines of this level in the trace
    #[arg(long)]
    log: Option<tracing::Level>,
}

fn main() -> ExitCode {
    let args = Args::parse();
    let _kept = args.log.map(log::keep);
    let started = std::time::Instant::now();
    for seed in args.seed..args.seed + args.seeds {
        let mut simulation = match Simulation::new(seed) {
            Ok(simulation) => simulation,
            Err(error) => {
                eprintln!("sim: {error}");
                return ExitCode::FAILURE;
            }
        };
        let outcome = run::smoke(&mut simulation, |observation| {
            if args.trace {
                println!("{observation}");
            }
        });
        println!(
            "seed {seed}: {outcome:?} after {} ms, {:?} real",
            simulation.now(),
            started.elapsed()
        );
    }
    ExitCode::SUCCESS
}
