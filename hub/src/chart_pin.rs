//! Which chart a range of versions means, or which one has proven itself: found out once for all members, and
//! kept on home over restarts.

use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::ConfigMap;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use krypton_agent::chart::{ChartCache, ChartError, ChartRef, exact_version, is_range};
use krypton_agent::clock::{self, Boot};
use krypton_agent::effect;
use krypton_agent::plan::backoff;
use krypton_common::error_chain::chain;
use krypton_common::fingerprint::sha256_hex;
use kube::api::{Api, PostParams};
use kube::{Client, Error as KubeError};
use thiserror::Error;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::lead::Lead;

/// The ConfigMap in the hub's namespace that holds it.
pub const NAME: &str = "krypton-hub-chart";
const OF: &str = "of";
const RANGE: &str = "range";
const VERSION: &str = "version";
const RESOLVED: &str = "resolved";
const DEADLINE: Duration = Duration::from_secs(10);
const RETRY_MAX: Duration = Duration::from_secs(5 * 60);
/// A standby looks so often whether the record is another.
const RECORD_EVERY: Duration = Duration::from_secs(30);

#[derive(Debug, Error)]
enum PinError {
    #[error(
        "{attempt} ConfigMap {namespace}/{NAME} failed; check that home answers and that the hub has its rights there"
    )]
    Call {
        attempt: &'static str,
        namespace: String,
        #[source]
        source: KubeError,
    },
    #[error("{attempt} ConfigMap {namespace}/{NAME}: no answer within {} s; check that home answers", DEADLINE.as_secs())]
    Deadline {
        attempt: &'static str,
        namespace: String,
    },
    #[error("the range of chart versions could not be looked up")]
    Lookup(#[source] ChartError),
    #[error("the chart has not proven itself")]
    Unproven(#[source] Arc<ChartError>),
}

/// Which range, and where it is looked up.
pub struct ChartPin {
    pub client: Client,
    /// The hub's, on home.
    pub namespace: String,
    pub charts: Arc<ChartCache>,
    /// With the version as it was asked for.
    pub chart: ChartRef,
    /// How often it is looked up again; `None`: not for as long as repository, name and range are the same.
    pub every: Option<Duration>,
    /// Members are given a version only with the digest of a chart that `charts` has taken.
    pub proven: bool,
}

impl std::fmt::Debug for ChartPin {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ChartPin").finish_non_exhaustive()
    }
}

/// A pin that is looked after from here on.
#[derive(Debug)]
pub struct Kept {
    pin: ChartPin,
    tx: watch::Sender<String>,
    /// When to look again; `None`: never.
    next: Option<Duration>,
    failures: u32,
}

/// What home has on record of a range.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Record {
    version: String,
    resolved: Timestamp,
}

/// The record, when it is of this chart and range; the repository's URL may hold a password, and is not in it.
fn record(found: Option<&ConfigMap>, of: &str) -> Option<Record> {
    let data = found?.data.as_ref()?;
    if data.get(OF)? != of {
        return None;
    }
    Some(Record {
        version: data.get(VERSION).filter(|it| !it.is_empty())?.clone(),
        // Without a time it counts, and is looked up again if that is wanted at all.
        resolved: data
            .get(RESOLVED)
            .and_then(|text| text.parse().ok())
            .unwrap_or(Timestamp::UNIX_EPOCH),
    })
}

/// How long the record is still good for; `None`: for ever. A clock that was wrong puts nothing off for longer
/// than one interval.
fn good_for(record: &Record, every: Option<Duration>, now: Timestamp) -> Option<Duration> {
    let every = every?;
    let age = now.duration_since(record.resolved);
    match Duration::try_from(age) {
        Ok(age) => Some(every.saturating_sub(age)),
        Err(_) => Some(every),
    }
}

/// What stands in the place of a version whose chart has not proven itself: a range, with which members do
/// nothing.
pub fn withheld(version: &str) -> String {
    match unpinned(version) {
        "" => "*".to_owned(),
        exact if exact_version(exact).is_some() => format!("={exact}"),
        range => range.to_owned(),
    }
}

fn unpinned(version: &str) -> &str {
    version.split('@').next().unwrap_or_default()
}

/// The version to go on with. An older one than before is most likely a repository that is not whole.
fn chosen(before: Option<&str>, found: String) -> String {
    let parse = |text: &str| exact_version(unpinned(text));
    let pin = |text: &str| text.split_once('@').map(|(_, pin)| pin.to_owned());
    match before {
        // Written otherwise, it would be another version to helm.
        Some(before) if parse(before) == parse(&found) && pin(before) == pin(&found) => {
            before.to_owned()
        }
        Some(before) if parse(before) > parse(&found) => {
            tracing::warn!(%before, %found, "the repository offers an older version for the range than before; the newer one stays");
            before.to_owned()
        }
        _ => found,
    }
}

impl ChartPin {
    /// Finds the version, or what went wrong, within a minute or so. Without a version, members are given the
    /// range itself, with which they do nothing but say that it has no meaning yet.
    pub async fn begin(self, tx: watch::Sender<String>, stop: &CancellationToken) -> Kept {
        let mut kept = Kept {
            pin: self,
            tx,
            next: None,
            failures: 0,
        };
        if stop.run_until_cancelled(kept.look(None)).await.is_none() {
            tracing::debug!("stopped before the range was looked up");
        }
        kept
    }

    fn of(&self) -> String {
        let ChartRef {
            repo,
            name,
            version,
        } = &self.chart;
        let proven = if self.proven { "\nproven" } else { "" };
        sha256_hex(format!("{repo}\n{name}\n{version}{proven}").as_bytes())
    }

    /// What was asked for means now.
    async fn meaning(&self) -> Result<String, PinError> {
        let asked = &self.chart.version;
        let version = if asked.is_empty() || is_range(asked) {
            let resolved = Box::pin(self.charts.resolve(&self.chart)).await;
            resolved.map_err(PinError::Lookup)?
        } else {
            asked.clone()
        };
        if !self.proven {
            return Ok(version);
        }
        let chart = ChartRef {
            version: version.clone(),
            ..self.chart.clone()
        };
        let fetched = Box::pin(self.charts.fetch(&chart)).await;
        let sha256 = fetched.map_err(PinError::Unproven)?.sha256;
        Ok(format!("{}@sha256:{sha256}", unpinned(&version)))
    }

    /// The version that holds now, and how long for. It is recorded by whoever leads; others go by the record.
    async fn version(&self, lead: Option<&Lead>) -> Result<(String, Option<Duration>), PinError> {
        let leads = || lead.is_some_and(|lead| lead.writes(Boot::now()));
        let api: Api<ConfigMap> = Api::namespaced(self.client.clone(), &self.namespace);
        let of = self.of();
        let found = self.in_time("reading", api.get_opt(NAME)).await?;
        let before = record(found.as_ref(), &of);
        let now = clock::wall();
        if let Some(record) = &before {
            match good_for(record, self.every, now) {
                Some(Duration::ZERO) if leads() => {}
                Some(Duration::ZERO) => return Ok((record.version.clone(), Some(RECORD_EVERY))),
                left => return Ok((record.version.clone(), left)),
            }
        }
        let resolved = self.meaning().await?;
        let before = before.map(|record| record.version);
        let version = chosen(before.as_deref(), resolved);
        if !leads() {
            return Ok((version, Some(RETRY_MAX)));
        }
        let data = [
            (OF, of),
            (RANGE, self.chart.version.clone()),
            (VERSION, version.clone()),
            (RESOLVED, now.to_string()),
        ]
        .map(|(key, value)| (key.to_owned(), value));
        let data = Some(data.into());
        let params = PostParams::default();
        let attempt = "writing";
        match found {
            // The version that was read is the precondition: of two hubs one decides.
            Some(found) => {
                let object = ConfigMap { data, ..found };
                let call = effect!("chart-pin.replace", api.replace(NAME, &params, &object));
                self.in_time(attempt, call).await?
            }
            None => {
                let object = ConfigMap {
                    metadata: ObjectMeta {
                        name: Some(NAME.to_owned()),
                        ..ObjectMeta::default()
                    },
                    data,
                    ..ConfigMap::default()
                };
                let call = effect!("chart-pin.create", api.create(&params, &object));
                self.in_time(attempt, call).await?
            }
        };
        tracing::info!(range = %self.chart.version, %version, "the version of the chart was found out");
        Ok((version, self.every))
    }

    async fn in_time<T>(
        &self,
        attempt: &'static str,
        call: impl Future<Output = Result<T, KubeError>>,
    ) -> Result<T, PinError> {
        let namespace = || self.namespace.clone();
        tokio::time::timeout(DEADLINE, call)
            .await
            .map_err(|_| PinError::Deadline {
                attempt,
                namespace: namespace(),
            })?
            .map_err(|source| PinError::Call {
                attempt,
                namespace: namespace(),
                source,
            })
    }
}

impl Kept {
    /// Looks again when it is time and whenever this hub comes to lead, until `stop`.
    pub async fn keep(mut self, mut lead: Lead, stop: CancellationToken) {
        let mut led = None;
        loop {
            let next = self.next.map(|pause| Boot(Boot::now().0 + pause));
            let due = async {
                loop {
                    let now = Boot::now();
                    if let Some(tenure) = lead.tenure().filter(|_| lead.writes(now))
                        && led != Some(tenure.since)
                    {
                        // Another may have put another one on record.
                        led = Some(tenure.since);
                        return;
                    }
                    tokio::select! {
                        () = clock::sleep_until(next, now) => return,
                        decided = lead.changed() => if !decided { std::future::pending().await },
                    }
                }
            };
            if stop.run_until_cancelled(due).await.is_none() {
                return;
            }
            let look = self.look(Some(&lead));
            if stop.run_until_cancelled(look).await.is_none() {
                return;
            }
        }
    }

    async fn look(&mut self, lead: Option<&Lead>) {
        self.next = match Box::pin(self.pin.version(lead)).await {
            Ok((version, left)) => {
                self.failures = 0;
                self.tx.send_if_modified(|before| {
                    let other = *before != version;
                    *before = version;
                    other
                });
                // A fifth later at most, so that hubs do not ask at one moment; the first that does, does for all.
                left.map(|left| left.mul_f64(1.0 + 0.2 * rand::random::<f64>()))
            }
            Err(error) => {
                let range = &self.pin.chart.version;
                tracing::warn!(%range, error = %chain(&error), "which chart members are to run is not known; what is known stays, and it is tried again");
                self.failures += 1;
                Some(backoff(self.failures, RETRY_MAX, rand::random()))
            }
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config_map(pairs: &[(&str, &str)]) -> ConfigMap {
        let pairs = pairs
            .iter()
            .map(|(key, value)| ((*key).to_owned(), (*value).to_owned()));
        ConfigMap {
            data: Some(pairs.collect()),
            ..ConfigMap::default()
        }
    }

    fn at(seconds: i64) -> Timestamp {
        Timestamp::from_second(seconds).unwrap()
    }

    #[test]
    fn a_record_counts_for_its_own_chart_and_range_only() {
        let kept = config_map(&[
            (OF, "a"),
            (VERSION, "1.2.0"),
            (RESOLVED, "1970-01-01T00:01:40Z"),
        ]);
        let expected = Record {
            version: "1.2.0".to_owned(),
            resolved: at(100),
        };
        assert_eq!(record(Some(&kept), "a"), Some(expected));
        assert_eq!(record(Some(&kept), "b"), None);
        assert_eq!(record(None, "a"), None);
        for broken in [
            &[(OF, "a")][..],
            &[(OF, "a"), (VERSION, "")],
            &[(VERSION, "1.2.0")],
        ] {
            assert_eq!(record(Some(&config_map(broken)), "a"), None);
        }
        let timeless = config_map(&[(OF, "a"), (VERSION, "1.2.0"), (RESOLVED, "soon")]);
        let read = record(Some(&timeless), "a").unwrap();
        assert_eq!(read.resolved, Timestamp::UNIX_EPOCH);
    }

    #[test]
    fn a_record_is_good_for_its_interval_and_without_one_for_ever() {
        let record = Record {
            version: "1.2.0".to_owned(),
            resolved: at(1_000),
        };
        let every = Duration::from_secs(600);
        let left = |now| good_for(&record, Some(every), at(now));
        assert_eq!(left(1_000), Some(every));
        assert_eq!(left(1_500), Some(Duration::from_secs(100)));
        assert_eq!(left(1_600), Some(Duration::ZERO));
        assert_eq!(left(1_000_000), Some(Duration::ZERO));
        // Written by a clock that was ahead.
        assert_eq!(left(10), Some(every));
        assert_eq!(good_for(&record, None, at(1_000_000)), None);
    }

    #[test]
    fn a_range_never_leads_back_to_an_older_version() {
        let chosen = |before, found: &str| chosen(before, found.to_owned());
        assert_eq!(chosen(None, "1.2.0"), "1.2.0");
        assert_eq!(chosen(Some("1.1.0"), "1.2.0"), "1.2.0");
        assert_eq!(chosen(Some("1.10.0"), "1.9.0"), "1.10.0");
        assert_eq!(chosen(Some("1.2.0"), "v1.2.0"), "1.2.0");
        assert_eq!(chosen(Some("rubbish"), "1.2.0"), "1.2.0");
        // Another content of the same version.
        assert_eq!(
            chosen(Some("1.2.0@sha256:a"), "v1.2.0@sha256:a"),
            "1.2.0@sha256:a"
        );
        assert_eq!(
            chosen(Some("1.2.0@sha256:a"), "1.2.0@sha256:b"),
            "1.2.0@sha256:b"
        );
        assert_eq!(
            chosen(Some("1.3.0@sha256:a"), "1.2.0@sha256:b"),
            "1.3.0@sha256:a"
        );
    }

    #[test]
    fn what_is_withheld_is_a_range_with_which_members_do_nothing() {
        for (asked, shown) in [
            ("", "*"),
            ("1.2.3", "=1.2.3"),
            ("v1.2.3", "=v1.2.3"),
            ("1.2.3@sha256:ab", "=1.2.3"),
            ("^1", "^1"),
        ] {
            assert_eq!(withheld(asked), shown);
            assert!(is_range(shown), "{shown}");
        }
        // Members refuse it as it is.
        assert_eq!(withheld("rubbish"), "rubbish");
    }
}
