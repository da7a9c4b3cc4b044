//! The charts of a cache in a dump.

use krypton_runtime::clock::BootTime;
use serde::Serialize;

use super::{ChartCache, ChartRef, EntryState};
use crate::dump::ChartDump;

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

impl ChartCache {
    /// Returns all charts that were requested, sorted by their reference. Does not wait for fetches.
    pub fn dump(&self, now: BootTime) -> Vec<CachedChartDump> {
        let entries = self.entries.lock();
        let charts = entries.iter().filter_map(|(chart, entry)| {
            let state = entry.try_lock().ok();
            CachedChartDump::new(chart, state.as_deref(), now)
        });
        let mut charts: Vec<_> = charts.collect();
        charts.sort_by(|a, b| a.chart.cmp(&b.chart));
        charts
    }
}

impl CachedChartDump {
    /// Returns `None` if nothing is known of the chart. Without a state, a fetch is in progress.
    fn new(chart: &ChartRef, state: Option<&EntryState>, now: BootTime) -> Option<Self> {
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
        match state {
            None => Some(fetching),
            Some(EntryState::Empty) => None,
            Some(EntryState::Loaded(fetched, since, _)) => Some(Self {
                state: "cached",
                for_seconds: Some(now.since(*since).as_secs()),
                resolved_version: Some(fetched.version.clone()),
                sha256: Some(fetched.sha256.clone()),
                ..fetching
            }),
            Some(EntryState::Failed {
                error,
                times,
                since,
                until,
            }) => Some(Self {
                state: "failed",
                for_seconds: Some(now.since(*since).as_secs()),
                fault: Some(error.reason()),
                attempts: *times,
                retry_in_seconds: Some(until.since(now).as_secs()),
                ..fetching
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;
    use std::sync::Arc;
    use std::time::Duration;

    use serde_json::json;

    use super::super::stub_site::{cache, chart};
    use super::super::{ChartError, ChartProblem, FetchedChart};
    use super::*;

    #[test]
    fn each_requested_chart_is_dumped_without_credentials() {
        let (_dir, cache) = cache();
        let at = |seconds| BootTime(Duration::from_secs(seconds));
        let requested = |version| chart("https://me:hunter2@charts.example.org", version);
        let failed = EntryState::Failed {
            error: Arc::new(ChartError::new(
                &requested("1.1.0"),
                ChartProblem::Unresolved,
            )),
            times: 3,
            since: at(95),
            until: at(103),
        };
        let fetched = FetchedChart {
            path: PathBuf::new(),
            sha256: "sum".to_owned(),
            name: "small".to_owned(),
            version: "1.0.0".to_owned(),
        };
        let loaded = EntryState::Loaded(fetched, at(40), cache.metrics.count_cached());
        for (version, state) in [("1.1.0", failed), ("1.0.0", loaded)] {
            *cache.entry(&requested(version)).try_lock().unwrap() = state;
        }
        cache.entry(&requested("1.2.0"));
        let fetching = cache.entry(&requested("1.3.0"));
        let _fetch = fetching.try_lock().unwrap();
        let shown = |version: &str| json!({"repo": "https://charts.example.org", "name": "small", "version": version});
        assert_eq!(
            serde_json::to_value(cache.dump(at(100))).unwrap(),
            json!([
                {
                    "chart": shown("1.0.0"), "state": "cached", "forSeconds": 60, "resolvedVersion": "1.0.0",
                    "sha256": "sum", "fault": null, "attempts": 0, "retryInSeconds": null,
                },
                {
                    "chart": shown("1.1.0"), "state": "failed", "forSeconds": 5, "resolvedVersion": null,
                    "sha256": null, "fault": "ChartNotLoaded", "attempts": 3, "retryInSeconds": 3,
                },
                {
                    "chart": shown("1.3.0"), "state": "fetching", "forSeconds": null, "resolvedVersion": null,
                    "sha256": null, "fault": null, "attempts": 0, "retryInSeconds": null,
                },
            ])
        );
    }
}
