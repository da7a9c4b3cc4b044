//! Reads CPU time and memory from /proc.

use std::{fs, path::Path};

use anyhow::{Context, Result};

/// USER_HZ, the unit of times in /proc. It is 100 in the user space of every architecture.
const TICKS_PER_SECOND: f64 = 100.0;

/// CPU time of the children that this process has waited for, including their descendants.
pub fn children_seconds() -> Result<f64> {
    let [_, children] = times(&read("/proc/self/stat")?)?;
    Ok(children)
}

/// CPU time of these processes and of this process, including the children that each has waited for.
pub fn total_seconds(pids: &[u32]) -> Result<f64> {
    let own = ["/proc/self/stat".to_owned()].into_iter();
    let all = own.chain(pids.iter().map(|pid| format!("/proc/{pid}/stat")));
    all.map(|path| Ok(times(&read(path)?)?.iter().sum::<f64>()))
        .sum()
}

/// Time since boot during which any CPU of the machine was busy.
pub fn busy_seconds() -> Result<f64> {
    busy(&read("/proc/stat")?)
}

/// Memory of a process, in bytes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Memory {
    pub resident: u64,
    /// Excludes the program and other file mappings, which the kernel can drop.
    pub anonymous: u64,
    /// Peak of `resident`.
    pub peak: u64,
}

impl Memory {
    pub fn read_for(pid: u32) -> Result<Self> {
        Self::read(&read(format!("/proc/{pid}/status"))?)
    }

    /// Parses `/proc/<pid>/status`.
    pub(crate) fn read(status: &str) -> Result<Self> {
        let bytes = |name: &str| {
            let value = status.lines().find_map(|line| line.strip_prefix(name));
            let kib = value.and_then(|line| line.trim().strip_suffix(" kB"));
            let kib = kib.with_context(|| format!("no {name} in /proc/<pid>/status"))?;
            Ok::<_, anyhow::Error>(kib.parse::<u64>()? * 1024)
        };
        Ok(Self {
            resident: bytes("VmRSS:")?,
            anonymous: bytes("RssAnon:")?,
            peak: bytes("VmHWM:")?,
        })
    }
}

/// CPU time of a process without its children, in seconds.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct CpuTimes {
    pub user: f64,
    pub kernel: f64,
}

impl CpuTimes {
    pub fn read_for(pid: u32) -> Result<Self> {
        let [user, kernel, ..] = ticks(&read(format!("/proc/{pid}/stat"))?)?;
        Ok(Self { user, kernel })
    }

    pub fn since(&self, earlier: &Self) -> Self {
        Self {
            user: self.user - earlier.user,
            kernel: self.kernel - earlier.kernel,
        }
    }

    pub fn total(&self) -> f64 {
        self.user + self.kernel
    }
}

/// CPU time of a process and of its children, in seconds.
pub(crate) fn times(stat: &str) -> Result<[f64; 2]> {
    let [user, kernel, children_user, children_kernel] = ticks(stat)?;
    Ok([user + kernel, children_user + children_kernel])
}

/// User and kernel time of a process, then of its children, from proc(5)'s stat, in seconds.
fn ticks(stat: &str) -> Result<[f64; 4]> {
    // The second field is the name in parentheses, which can contain any character. All other fields are numbers.
    let (_, fields) = stat
        .rsplit_once(')')
        .context("no name in /proc/<pid>/stat")?;
    let fields = fields.split_whitespace().skip(11).take(4);
    let ticks: Vec<f64> = fields.map(str::parse).collect::<Result<_, _>>()?;
    let ticks: [f64; 4] = ticks
        .try_into()
        .map_err(|_| anyhow::anyhow!("/proc/<pid>/stat ends early"))?;
    Ok(ticks.map(|ticks| ticks / TICKS_PER_SECOND))
}

/// Reads a file of /proc.
pub fn read(path: impl AsRef<Path>) -> Result<String> {
    let path = path.as_ref();
    fs::read_to_string(path).with_context(|| format!("reading {}", path.display()))
}

/// Sums user, nice, system, irq, softirq and steal from proc(5)'s stat. Omits idle and iowait. Omits the guest times,
/// because user includes them.
fn busy(stat: &str) -> Result<f64> {
    let line = stat
        .lines()
        .next()
        .and_then(|line| line.strip_prefix("cpu "));
    let fields = line
        .context("no line cpu in /proc/stat")?
        .split_whitespace()
        .take(8);
    let ticks: Vec<f64> = fields.map(str::parse).collect::<Result<_, _>>()?;
    let [user, nice, system, _idle, _iowait, irq, softirq, steal] = ticks.as_slice() else {
        anyhow::bail!("the line cpu of /proc/stat ends early");
    };
    Ok((user + nice + system + irq + softirq + steal) / TICKS_PER_SECOND)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_and_child_cpu_time_are_separate() {
        let stat = "42 (a ) b) S 1 42 42 0 -1 4194560 100 200 0 0 150 50 1000 300 20 0 9 0 7 8 9";
        assert_eq!(times(stat).unwrap(), [2.0, 13.0]);
        assert_eq!(ticks(stat).unwrap(), [1.5, 0.5, 10.0, 3.0]);
        assert!(times("42 (bench) S 1 2").is_err());
    }

    #[test]
    fn memory_is_read_in_bytes() {
        let status = "VmHWM:\t  9 kB\nVmRSS:\t 7 kB\nRssAnon:\t   5 kB\n";
        let expected = Memory {
            resident: 7 * 1024,
            anonymous: 5 * 1024,
            peak: 9 * 1024,
        };
        assert_eq!(Memory::read(status).unwrap(), expected);
        assert!(Memory::read("Name: zombie\n").is_err());
    }

    #[test]
    fn idle_and_iowait_are_not_busy_time() {
        let stat = "cpu  100 10 20 9000 500 3 4 5 77 88\ncpu0 1 2 3\n";
        assert_eq!(busy(stat).unwrap(), 1.42);
        assert!(busy("intr 1\n").is_err());
    }
}
