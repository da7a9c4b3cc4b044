//! Helm and chart sections of a dump, for hub and agent.

use std::collections::BTreeMap;

use krypton_runtime::clock::BootTime;
use serde::Serialize;

use crate::chart::ChartRef;
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
