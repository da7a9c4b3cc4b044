//! Resource usage of the process, from /proc, under the metric names of the Prometheus client libraries.

use std::{fmt, fs};

use jiff::Timestamp;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Unit;
use rustix::process::{Resource, getrlimit};

/// USER_HZ, the unit of times in /proc. It is 100 in user space on every architecture.
const TICKS_PER_SECOND: f64 = 100.0;

/// Encodes a gauge without labels.
///
/// # Errors
/// If the scrape cannot be written.
pub fn gauge(
    encoder: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    unit: Option<&Unit>,
    value: i64,
) -> fmt::Result {
    let gauge = ConstGauge::new(value);
    let metric = encoder.encode_descriptor(name, help, unit, gauge.metric_type())?;
    gauge.encode(metric)
}

/// Collects the values during the scrape and omits unreadable ones. Helm runs in separate processes, which are not
/// included.
#[derive(Debug)]
pub struct ProcessMetrics {
    started: Timestamp,
}

impl ProcessMetrics {
    /// Creates the metrics of a process that starts now.
    pub fn starting(now: Timestamp) -> Self {
        Self { started: now }
    }
}

impl Collector for ProcessMetrics {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let mut gauge = |name, help, unit: Option<&Unit>, value: Option<u64>| {
            let Some(value) = value else { return Ok(()) };
            let value = i64::try_from(value).unwrap_or(i64::MAX);
            gauge(&mut encoder, name, help, unit, value)
        };
        gauge(
            "process_start_time",
            "Start time of the process, in seconds since 1970.",
            Some(&Unit::Seconds),
            u64::try_from(self.started.as_second()).ok(),
        )?;
        gauge(
            "process_resident_memory",
            "Resident memory of the process, without Helm runs.",
            Some(&Unit::Bytes),
            resident_bytes(),
        )?;
        gauge(
            "process_open_fds",
            "Open file descriptors of the process.",
            None,
            fs::read_dir("/proc/self/fd")
                .ok()
                .and_then(|entries| u64::try_from(entries.count()).ok()),
        )?;
        gauge(
            "process_max_fds",
            "Maximum number of open file descriptors of the process.",
            None,
            getrlimit(Resource::Nofile).current,
        )?;
        let stat = fs::read_to_string("/proc/self/stat").unwrap_or_default();
        let Some(seconds) = cpu_seconds(&stat) else {
            return Ok(());
        };
        let counter = ConstCounter::new(seconds);
        let metric = encoder.encode_descriptor(
            "process_cpu",
            "CPU time of the process, without Helm runs.",
            Some(&Unit::Seconds),
            counter.metric_type(),
        )?;
        counter.encode(metric)
    }
}

fn resident_bytes() -> Option<u64> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("VmRSS:"))?;
    let kibibytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kibibytes.checked_mul(1024)
}

/// Returns user and system time from /proc/…/stat. The second field is a name in parentheses that can contain any
/// character.
fn cpu_seconds(stat: &str) -> Option<f64> {
    let (_, fields) = stat.rsplit_once(')')?;
    let mut times = fields.split_whitespace().skip(11);
    let user: f64 = times.next()?.parse().ok()?;
    let system: f64 = times.next()?.parse().ok()?;
    Some((user + system) / TICKS_PER_SECOND)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processor_time_is_found_behind_any_name() {
        let stat = "42 (a ) b) S 1 2 3 4 5 6 7 8 9 10 150 50 0 0 20 0";
        assert_eq!(cpu_seconds(stat), Some(2.0));
        assert_eq!(cpu_seconds(""), None);
        assert!(resident_bytes().is_some_and(|bytes| bytes > 1 << 20));
    }
}
