//! Measures the CPU time of the decisions that follow from one member's change, without a cluster.

use std::time::{Duration, Instant};

use anyhow::Result;
use krypton_hub::tenants::Rehearsal;

use crate::{load::Times, say, table::fixed};

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
pub(crate) struct Measured {
    options: Options,
    /// Time to decide all Tenants, as at the start of a hub.
    start: Duration,
    /// CPU time in seconds for one member's change, and the number of resulting decisions.
    rows: Vec<(&'static str, f64, u64)>,
}

pub(crate) fn measure(options: &Options) -> Result<Measured> {
    let (members, tenants) = (options.members as usize, options.tenants as usize);
    say(&format!(
        "home: {members} members with {tenants} Tenants each"
    ));
    let begun = Instant::now();
    let mut home = Rehearsal::new(members, tenants);
    let start = begun.elapsed();
    let apart = members / CHANGES;
    let mut rows = Vec::new();
    for what in ["falls silent", "reports again", "reports all again"] {
        let (before, mut decisions) = (Times::of(std::process::id())?, 0);
        for change in 0..CHANGES {
            let member = change * apart;
            match what {
                "falls silent" => home.is_heard(member, false),
                "reports again" => home.is_heard(member, true),
                _ => home.says(member, false),
            }
            decisions += home.decides();
        }
        let spent = Times::of(std::process::id())?.since(&before).total();
        let each = CHANGES as f64;
        rows.push((what, spent / each, decisions / CHANGES as u64));
    }
    Ok(Measured {
        options: options.clone(),
        start,
        rows,
    })
}

impl std::fmt::Display for Measured {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Options { members, tenants } = &self.options;
        writeln!(
            f,
            "home: {members} members x {tenants} Tenants; all decided in {} s",
            fixed(self.start.as_secs_f64(), 1)
        )?;
        for (what, seconds, decisions) in &self.rows {
            writeln!(
                f,
                "  a member {what}: {decisions} decisions, {} ms of CPU (target {} ms)",
                fixed(seconds * 1000.0, 2),
                TARGET.as_millis()
            )?;
        }
        Ok(())
    }
}
