//! Describes the machine, and measures the CPU usage of other processes.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use krypton_tests::{
    Tools,
    load::{self, read},
    process::Invocation,
};

use crate::{CHART, CHART_VERSION};

const COMMAND_DEADLINE: Duration = Duration::from_secs(60);

/// Returns the cores, memory, kernel, load and versions of the measured programs.
pub(crate) async fn describe() -> Result<String> {
    let tools = Tools::find()?;
    let cores = std::thread::available_parallelism().context("counting cores")?;
    let memory = read("/proc/meminfo")?;
    let total = memory
        .lines()
        .find_map(|line| line.strip_prefix("MemTotal:"));
    let total: f64 = total
        .and_then(|line| line.trim().strip_suffix(" kB"))
        .context("no MemTotal in /proc/meminfo")?
        .parse()?;
    let kernel = read("/proc/sys/kernel/osrelease")?;
    let load = read("/proc/loadavg")?;
    let one_minute = load.split_whitespace().next().unwrap_or_default();
    let version = async |tool: &str, args: &[&str]| {
        let invocation = Invocation::new(tools.binary(tool)).args(args.iter().copied());
        let version = invocation
            .env("HOME", "/nonexistent")
            .output(COMMAND_DEADLINE)
            .await?;
        Ok::<_, anyhow::Error>(version.lines().next().unwrap_or_default().trim().to_owned())
    };
    let helm = version("helm", &["version", "--template", "{{.Version}}"]).await?;
    let apiserver = version("kube-apiserver", &["--version"]).await?;
    let etcd = version("etcd", &["--version"]).await?;
    Ok(format!(
        "machine   {cores} cores, {:.0} GiB, Linux {}; load {one_minute} at the start\n\
         versions  krypton {}, helm {helm}, {apiserver}, {etcd}; chart {CHART} {CHART_VERSION}",
        total / 1024.0 / 1024.0,
        kernel.trim(),
        env!("CARGO_PKG_VERSION"),
    ))
}

/// CPU usage of other processes: the whole machine minus the known processes.
#[derive(Debug)]
pub(crate) struct OtherLoad {
    since: Instant,
    busy: f64,
    known: f64,
}

impl OtherLoad {
    pub(crate) fn watch(known: f64) -> Result<Self> {
        Ok(Self {
            since: Instant::now(),
            busy: load::busy_seconds()?,
            known,
        })
    }

    /// Returns the average number of cores used by other processes and by the kernel.
    pub(crate) fn cores(&self, known: f64) -> Result<f64> {
        let other_seconds = (load::busy_seconds()? - self.busy) - (known - self.known);
        Ok((other_seconds / self.since.elapsed().as_secs_f64()).max(0.0))
    }
}
