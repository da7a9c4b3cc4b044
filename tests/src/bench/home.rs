//! Measures the CPU time of the decisions that follow from one member's change, without a cluster.

use std::time::{Duration, Instant};

use anyhow::Result;
use krypton_hub::tenants::HomeSimulation;

use crate::{load::CpuTimes, log_progress, table::fixed};

const TARGET: Duration = Duration::from_millis(50);
/// Number of members that change, one after the other.
const CHANGES: usize = 50;

#[derive(Debug, Clone, clap::Args)]
pub(crate) struct Options {
    /// Members of the fleet
    #[arg(long, default_value_t = 5000, value_parser = clap::value_parser!(u32).range(50..=10_000))]
    pub(crate) members: u32,
    /// Tenants of each, which home has too
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub(crate) tenants: u32,
}

#[derive(Debug)]
pub(crate) struct HomeResults {
    options: Options,
    /// Time to decide all Tenants, as at the start of a hub.
    start: Duration,
    /// CPU time in seconds for one member's change, and the number of resulting decisions.
    rows: Vec<(&'static str, f64, u64)>,
}

pub(crate) fn measure(options: &Options) -> Result<HomeResults> {
    let (members, tenants) = (options.members as usize, options.tenants as usize);
    log_progress(&format!(
        "home: {members} members with {tenants} Tenants each"
    ));
    let started = Instant::now();
    let mut home = HomeSimulation::new(members, tenants);
    let start = started.elapsed();
    let step = members / CHANGES;
    let mut rows = Vec::new();
    for change in ["falls silent", "reports again", "reports all again"] {
        let (before, mut decisions) = (CpuTimes::read_for(std::process::id())?, 0);
        for index in 0..CHANGES {
            let member = index * step;
            match change {
                "falls silent" => home.set_connected(member, false),
                "reports again" => home.set_connected(member, true),
                _ => home.report_all(member, false),
            }
            decisions += home.reconcile();
        }
        let cpu_seconds = CpuTimes::read_for(std::process::id())?
            .since(&before)
            .total();
        let each = CHANGES as f64;
        rows.push((change, cpu_seconds / each, decisions / CHANGES as u64));
    }
    Ok(HomeResults {
        options: options.clone(),
        start,
        rows,
    })
}

impl std::fmt::Display for HomeResults {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Options { members, tenants } = &self.options;
        writeln!(
            f,
            "home: {members} members x {tenants} Tenants; all decided in {} s",
            fixed(self.start.as_secs_f64(), 1)
        )?;
        for (change, seconds, decisions) in &self.rows {
            writeln!(
                f,
                "  a member {change}: {decisions} decisions, {} ms of CPU (target {} ms)",
                fixed(seconds * 1000.0, 2),
                TARGET.as_millis()
            )?;
        }
        Ok(())
    }
}
