//! Summarizes a soak run for the terminal and for docs/contributing/soak.md.

use std::{collections::BTreeMap, fmt::Write as _, fs, time::Duration};

use super::{fault::Kind, judgement::Violation};

/// Counters and times of a run.
#[derive(Debug, Default)]
pub(crate) struct Summary {
    pub(crate) seed: u64,
    pub(crate) tenants: usize,
    pub(crate) hubs: usize,
    pub(crate) settle: Duration,
    pub(crate) lasted: Duration,
    pub(crate) bursts: usize,
    pub(crate) faults: BTreeMap<Kind, usize>,
    /// Faults that found no target.
    pub(crate) skipped: usize,
    /// Number of reads of all clusters.
    pub(crate) checks: usize,
    pub(crate) helm_runs: usize,
    /// Number of leader changes.
    pub(crate) epoch: u64,
    /// For each burst, the time from the end of the faults until the state was as expected.
    pub(crate) recovery_times: Vec<Duration>,
    /// The highest load average at the end of a burst.
    pub(crate) load: f64,
    pub(crate) violations: Vec<Violation>,
}

impl Summary {
    /// Renders a section for docs/contributing/soak.md.
    pub(crate) fn markdown(&self) -> String {
        let mut text = format!(
            "## Seed {}, {} minutes, {} Tenants, {}\n\n| | |\n| --- | --- |\n",
            self.seed,
            self.lasted.as_secs().div_ceil(60),
            self.tenants,
            match self.hubs {
                1 => "1 hub".to_owned(),
                hubs => format!("{hubs} hubs"),
            }
        );
        let mut recovery_times = self.recovery_times.clone();
        recovery_times.sort();
        let median = recovery_times.get(recovery_times.len() / 2);
        let [slowest, median] = [recovery_times.last(), median]
            .map(|time| time.copied().unwrap_or_default().as_secs_f64());
        let faults: usize = self.faults.values().sum();
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        let mut row = |label: &str, value: String| {
            // Writing to a String can't fail.
            writeln!(text, "| {label} | {value} |").ok();
        };
        row("violations", self.violations.len().to_string());
        row("bursts of faults", self.bursts.to_string());
        row("faults", faults.to_string());
        row("faults without a target", self.skipped.to_string());
        row("helm runs", self.helm_runs.to_string());
        row("leader changes", self.epoch.to_string());
        row("reads of all clusters", self.checks.to_string());
        row(
            "slowest and median time to the expected state",
            format!(
                "{slowest:.1} s, {median:.1} s (limit {} s)",
                self.settle.as_secs()
            ),
        );
        row(
            "highest load average, processors",
            format!("{:.1}, {processors}", self.load),
        );
        for (kind, count) in &self.faults {
            row(kind.description(), count.to_string());
        }
        for violation in &self.violations {
            writeln!(text, "\n**{}**: {}", violation.promise, violation.details).ok();
        }
        text
    }
}

/// Returns the load average of the last minute.
pub(crate) fn load_average() -> f64 {
    let text = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let one_minute = text.split(' ').next();
    one_minute
        .and_then(|text| text.parse().ok())
        .unwrap_or_default()
}
