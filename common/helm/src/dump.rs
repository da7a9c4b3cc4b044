//! Helm and chart sections of a dump, for hub and agent.

use std::collections::BTreeMap;

use krypton_runtime::clock::BootTime;
use krypton_types::conditions::reason;
use serde::Serialize;

use crate::chart::{CacheState, ChartFault, ChartRef};
use crate::driver::Load;

/// Reference to a chart, without the user, password and query of its repository's URL.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct ChartDump {
    pub repo: String,
    pub name: String,
    pub version: String,
}

/// Running and waiting Helm runs.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct HelmDump {
    /// Maximum number of parallel runs.
    limit: usize,
    /// Maximum number of parallel runs of one member.
    limit_per_member: usize,
    running: BTreeMap<String, usize>,
    waiting: Vec<WaitingRunDump>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct WaitingRunDump {
    member: String,
    priority: &'static str,
    for_seconds: u64,
}

/// State of a requested chart.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct CachedChartDump {
    chart: ChartDump,
    /// One of `cached`, `failed` and `fetching`.
    state: &'static str,
    for_seconds: Option<u64>,
    /// Version of the chart, if it is cached.
    resolved_version: Option<String>,
    sha256: Option<String>,
    /// Why the chart is not available, as a condition reason.
    fault: Option<&'static str>,
    attempts: u32,
    retry_in_seconds: Option<u64>,
}

impl ChartDump {
    pub fn new(repo: &str, name: &str, version: &str) -> Self {
        let chart = ChartRef {
            repo: repo.to_owned(),
            name: name.to_owned(),
            version: version.to_owned(),
        };
        Self {
            repo: chart.repo_shown(),
            name: chart.name_shown(),
            version: chart.version,
        }
    }
}

impl HelmDump {
    pub fn new(load: Load, now: BootTime) -> Self {
        let waiting = load.waiting.into_iter();
        Self {
            limit: load.total,
            limit_per_member: load.per_member,
            running: load.running,
            waiting: waiting
                .map(|(member, priority, since)| WaitingRunDump {
                    member,
                    priority: priority.name(),
                    for_seconds: now.since(since).as_secs(),
                })
                .collect(),
        }
    }
}

impl CachedChartDump {
    /// Returns all charts, sorted by their reference.
    pub fn all(cache_state: Vec<(ChartRef, CacheState)>, now: BootTime) -> Vec<Self> {
        let charts = cache_state.into_iter();
        let mut charts: Vec<Self> = charts
            .map(|(chart, cache_state)| Self::new(&chart, cache_state, now))
            .collect();
        charts.sort_by(|a, b| a.chart.cmp(&b.chart));
        charts
    }

    fn new(chart: &ChartRef, cache_state: CacheState, now: BootTime) -> Self {
        let fetching = Self {
            chart: ChartDump::new(&chart.repo, &chart.name, &chart.version),
            state: "fetching",
            for_seconds: None,
            resolved_version: None,
            sha256: None,
            fault: None,
            attempts: 0,
            retry_in_seconds: None,
        };
        match cache_state {
            CacheState::Fetching => fetching,
            CacheState::Cached {
                since,
                version,
                sha256,
            } => Self {
                state: "cached",
                for_seconds: Some(now.since(since).as_secs()),
                resolved_version: Some(version),
                sha256: Some(sha256),
                ..fetching
            },
            CacheState::Failed {
                fault,
                times,
                since,
                until,
            } => Self {
                state: "failed",
                for_seconds: Some(now.since(since).as_secs()),
                fault: Some(match fault {
                    ChartFault::NotLoaded => reason::CHART_NOT_LOADED,
                    ChartFault::VersionNotFound => reason::VERSION_NOT_FOUND,
                    ChartFault::VersionInvalid => reason::VERSION_INVALID,
                }),
                attempts: times,
                retry_in_seconds: Some(until.since(now).as_secs()),
                ..fetching
            },
        }
    }
}
