//! Resolves the chart version for all members: a range to a version, and a version to its content digest.
//! The result is stored in a ConfigMap on the home cluster, so it survives restarts.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::ConfigMap;
use krypton_helm::chart::{ChartCache, ChartRef, exact_version, is_range};
use krypton_runtime::call::call;
use krypton_runtime::chance;
use krypton_runtime::clock::{self, BootTime};
use krypton_runtime::newest::Newest as _;
use krypton_runtime::retry::backoff;
use krypton_types::error_chain::chain;
use krypton_types::fingerprint::sha256_hex;
use krypton_types::names::CHART_CONFIG_MAP;
use kube::Client;
use kube::api::Api;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::leader::home_writer::create_or_replace;
use crate::leader::{Leader, LeaderTerm};
use crate::notify::Notifier;

const DIGEST_KEY: &str = "of";
const RANGE_KEY: &str = "range";
const VERSION_KEY: &str = "version";
const CONTENT_KEY: &str = "content";
const RESOLVED_KEY: &str = "resolved";
const RETRY_MAX: Duration = Duration::from_secs(5 * 60);
/// How often a standby checks the record for changes.
const STANDBY_INTERVAL: Duration = Duration::from_secs(30);
/// Longest pause before the next read of the record while members wait for it.
const UNREAD_RETRY_MAX: Duration = Duration::from_secs(3);

/// The resolved chart version.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ResolvedVersion {
    pub version: String,
    /// See [`krypton_types::desired::ChartState::pinned`].
    pub pinned: Option<String>,
    /// Start of the leader term in which this hub read the record. `version` then includes the record of
    /// any earlier leader.
    pub read_in_term: Option<BootTime>,
}

impl ResolvedVersion {
    /// The value before the first lookup. If the chart needs verification, members get a range, which they
    /// never install.
    pub fn unread(version: &str, verified: bool) -> Self {
        let (version, pinned) = match verified {
            true => (unverified_range(version), None),
            false if is_pinned(version) || is_range(version) => (version.to_owned(), None),
            false => (version.to_owned(), Some(String::new())),
        };
        Self {
            version,
            pinned,
            read_in_term: None,
        }
    }

    /// Returns the epoch to send with this version: that of `leader_term`, once this hub has read the record in
    /// that term.
    pub fn epoch(&self, leader_term: Option<&LeaderTerm>) -> Option<u64> {
        let leader_term = leader_term?;
        (self.read_in_term == Some(leader_term.since)).then_some(leader_term.epoch)
    }
}

/// The version setting to resolve, and the repository to resolve it from.
pub(crate) struct ChartPin {
    pub client: Client,
    /// Namespace of the hub on the home cluster.
    pub namespace: String,
    pub charts: Arc<ChartCache>,
    /// The chart with the configured version.
    pub chart: ChartRef,
    /// Interval between lookups. `None` keeps the result while repository, name and range are unchanged.
    pub interval: Option<Duration>,
    /// Whether members get a version only with the digest of a chart that `charts` has accepted.
    pub verified: bool,
}

/// A pin with the state of its refresh loop.
pub(crate) struct PinnedVersion {
    pin: ChartPin,
    tx: watch::Sender<ResolvedVersion>,
    /// Pause until the next lookup; `None` means never.
    next: Option<Duration>,
    failures: u32,
    /// Time of the last lookup without a record.
    last_resolution: Option<BootTime>,
    notifier: Notifier,
}

/// The record of a range on the home cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
struct VersionRecord {
    version: String,
    /// The version with its digest, if known.
    content: Option<String>,
    resolved: Timestamp,
}

/// Returns the record if it belongs to this chart and range. The record omits the repository's URL, which
/// may contain a password.
fn record_in(config_map: Option<&ConfigMap>, digest: &str) -> Option<VersionRecord> {
    let data = config_map?.data.as_ref()?;
    if data.get(DIGEST_KEY)? != digest {
        return None;
    }
    Some(VersionRecord {
        version: version_in(config_map)?.clone(),
        content: data.get(CONTENT_KEY).filter(|it| is_pinned(it)).cloned(),
        // A record without a time is valid, but due for the next lookup.
        resolved: data
            .get(RESOLVED_KEY)
            .and_then(|text| text.parse().ok())
            .unwrap_or(Timestamp::UNIX_EPOCH),
    })
}

/// Returns the recorded version, which may belong to another chart or range.
fn version_in(config_map: Option<&ConfigMap>) -> Option<&String> {
    let data = config_map?.data.as_ref()?;
    data.get(VERSION_KEY).filter(|it| !it.is_empty())
}

/// Returns how long the record stays valid, or `None` if it never expires. A wrong clock delays the next
/// lookup by at most one interval.
fn valid_for(
    record: &VersionRecord,
    interval: Option<Duration>,
    now: Timestamp,
) -> Option<Duration> {
    let age = Duration::try_from(now.duration_since(record.resolved));
    Some(interval?.saturating_sub(age.unwrap_or_default()))
}

/// Replaces a version whose chart is not verified with a range, which members never install.
fn unverified_range(version: &str) -> String {
    match unpinned(version) {
        "" => "*".to_owned(),
        exact if exact_version(exact).is_some() => format!("={exact}"),
        range => range.to_owned(),
    }
}

fn is_pinned(version: &str) -> bool {
    version.contains("@sha256:")
}

fn unpinned(version: &str) -> &str {
    version.split('@').next().unwrap_or_default()
}

/// Chooses between the previous and the found version. An older version most likely means an incomplete
/// repository.
fn choose_version(previous: Option<&str>, candidate: String) -> String {
    let parse = |text: &str| exact_version(unpinned(text));
    let pin = |text: &str| text.split_once('@').map(|(_, pin)| pin.to_owned());
    match previous {
        // Keep the previous spelling: Helm compares versions as text.
        Some(previous)
            if parse(previous) == parse(&candidate) && pin(previous) == pin(&candidate) =>
        {
            previous.to_owned()
        }
        Some(previous) if parse(previous) > parse(&candidate) => {
            tracing::warn!(before = %previous, found = %candidate, "ignoring an older version from the repository");
            previous.to_owned()
        }
        _ => candidate,
    }
}

impl ChartPin {
    /// Resolves version and content, or fails, within about a minute. Without a version, members get the
    /// range itself. They install nothing and report that it is unresolved.
    pub(crate) async fn start(
        self,
        tx: watch::Sender<ResolvedVersion>,
        stop: &CancellationToken,
    ) -> PinnedVersion {
        let mut pinned = PinnedVersion::new(self, tx);
        let refresh = pinned.refresh(None);
        if stop.run_until_cancelled(refresh).await.is_none() {
            tracing::debug!("stopped before the version range was resolved");
        }
        pinned
    }

    /// Digest of repository, name, version setting and verification, which identifies the record.
    fn digest(&self) -> String {
        let ChartRef {
            repo,
            name,
            version,
        } = &self.chart;
        let verified = if self.verified { "\nproven" } else { "" };
        sha256_hex(format!("{repo}\n{name}\n{version}{verified}").as_bytes())
    }

    /// Resolves the setting to a version with its digest. `recorded_version` is the version of a record
    /// without a digest.
    async fn resolve(&self, recorded_version: Option<&str>) -> anyhow::Result<String> {
        let setting = &self.chart.version;
        let version = match recorded_version {
            Some(recorded_version) => recorded_version.to_owned(),
            None if setting.is_empty() || is_range(setting) => {
                let resolved = Box::pin(self.charts.resolve(&self.chart)).await;
                resolved.context("failed to resolve the range of chart versions")?
            }
            None => setting.clone(),
        };
        let chart = ChartRef {
            version,
            ..self.chart.clone()
        };
        let pinned = Box::pin(self.charts.pin(&chart)).await;
        pinned.context("failed to find the content of the chart")
    }

    /// Returns the version for members and the version that they fetch, if the setting resolves to
    /// `content`. `content` is a version with its digest. For a verified chart, the digest is part of the
    /// release. Otherwise only the fetch uses it.
    fn for_members(&self, content: &str) -> (String, Option<String>) {
        let setting = &self.chart.version;
        match (self.verified, is_range(setting)) {
            (true, _) => (content.to_owned(), None),
            (false, true) => (unpinned(content).to_owned(), Some(content.to_owned())),
            (false, false) => (setting.clone(), Some(content.to_owned())),
        }
    }

    /// Like `for_members`, for a record, which may lack a digest.
    fn record_for_members(&self, record: &VersionRecord) -> (String, Option<String>) {
        match &record.content {
            Some(content) => self.for_members(content),
            None if self.verified => (record.version.clone(), None),
            None => (self.for_members(&record.version).0, Some(String::new())),
        }
    }

    fn api(&self) -> Api<ConfigMap> {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    /// Returns the current content and how long it stays valid. The leader writes the record, and
    /// other hubs use it.
    async fn version(
        &self,
        config_map: Option<ConfigMap>,
        leader: Option<&Leader>,
    ) -> anyhow::Result<(String, Option<Duration>)> {
        let may_write = || leader.is_some_and(|leader| leader.may_write(BootTime::now()));
        let (api, digest) = (self.api(), self.digest());
        let previous = record_in(config_map.as_ref(), &digest);
        let now = clock::wall();
        let interval = self.interval.filter(|_| {
            let setting = &self.chart.version;
            setting.is_empty() || is_range(setting)
        });
        let mut recorded_version = None;
        if let Some(record) = &previous {
            let content = record.content.clone();
            match (valid_for(record, interval, now), content) {
                (Some(Duration::ZERO), _) if may_write() => {}
                (Some(Duration::ZERO), Some(content)) => {
                    return Ok((content, Some(STANDBY_INTERVAL)));
                }
                (remaining, Some(content)) => return Ok((content, remaining)),
                (_, None) => recorded_version = Some(record.version.as_str()),
            }
        }
        let resolved = self.resolve(recorded_version).await?;
        let content_of =
            |record: &VersionRecord| record.content.clone().unwrap_or(record.version.clone());
        let content = choose_version(previous.as_ref().map(content_of).as_deref(), resolved);
        if !may_write() {
            return Ok((content, Some(RETRY_MAX)));
        }
        let version = if self.verified {
            &content
        } else {
            unpinned(&content)
        };
        let data = [
            (DIGEST_KEY, digest),
            (RANGE_KEY, self.chart.version.clone()),
            (VERSION_KEY, version.to_owned()),
            (CONTENT_KEY, content.clone()),
            (RESOLVED_KEY, now.to_string()),
        ]
        .map(|(key, value)| (key.to_owned(), value));
        let mut object = config_map.unwrap_or_default();
        object.metadata.name = Some(CHART_CONFIG_MAP.to_owned());
        object.data = Some(data.into());
        let attempt = format!("writing ConfigMap {}/{CHART_CONFIG_MAP}", self.namespace);
        // The resourceVersion that was read is the precondition: if two hubs write, one succeeds.
        call(attempt, create_or_replace(&api, &object)).await?;
        tracing::info!(range = %self.chart.version, version = %content, "resolved the chart version");
        Ok((content, interval))
    }
}

impl PinnedVersion {
    fn new(pin: ChartPin, tx: watch::Sender<ResolvedVersion>) -> Self {
        Self {
            pin,
            tx,
            next: None,
            failures: 0,
            last_resolution: None,
            notifier: Notifier::default(),
        }
    }

    /// Repeats the lookup until `stop`: when it is due, when this hub becomes leader, and at the standby
    /// interval while it is a standby.
    pub(crate) async fn run(
        mut self,
        mut leader: Leader,
        notifier: Notifier,
        stop: CancellationToken,
    ) {
        self.notifier = notifier;
        let mut last_term = None;
        loop {
            let start = BootTime::now();
            let next = self.next.map(|pause| start + pause);
            let standby_check = start + with_jitter(STANDBY_INTERVAL);
            let due = async {
                loop {
                    let now = BootTime::now();
                    let term = leader.term_since();
                    if term.is_some() && leader.may_write(now) && last_term != term {
                        // Another leader may have changed the record.
                        last_term = term;
                        return;
                    }
                    let standby = term.is_none().then_some(standby_check);
                    let next = next.into_iter().chain(standby).min();
                    tokio::select! {
                        () = clock::sleep_until(next, now) => return,
                        is_open = leader.changed() => if !is_open { std::future::pending().await },
                    }
                }
            };
            if stop.run_until_cancelled(due).await.is_none() {
                return;
            }
            let current_leader = leader.clone();
            let attempt = async {
                tokio::select! {
                    () = self.refresh(Some(&current_leader)) => {}
                    // Members wait for the record, and resolving a range may take long.
                    () = until_other_term(&mut leader, current_leader.term_since()) => {}
                }
            };
            if stop.run_until_cancelled(attempt).await.is_none() {
                return;
            }
        }
    }

    async fn refresh(&mut self, leader: Option<&Leader>) {
        // Take the term before the read. A record that is read in this term includes the writes of all
        // earlier leaders.
        let term = leader.and_then(Leader::term_since);
        let result = match self.read(term).await {
            Ok(config_map) => self.resolve(config_map, leader).await,
            Err(error) => Err(error),
        };
        self.next = match result {
            // Add at most a fifth to keep hubs from looking up at the same moment. The first lookup serves
            // all hubs.
            Ok(remaining) => {
                self.failures = 0;
                remaining.map(with_jitter)
            }
            Err(error) => {
                let range = &self.pin.chart.version;
                tracing::warn!(%range, error = %chain(&*error), "failed to resolve the chart version; retrying");
                self.failures += 1;
                let members_wait = term.is_some() && self.tx.get().read_in_term != term;
                let retry_max = if members_wait {
                    UNREAD_RETRY_MAX
                } else {
                    RETRY_MAX
                };
                Some(backoff(self.failures, retry_max, chance::random()))
            }
        };
    }

    /// Reads the record and publishes it immediately: members don't have to wait for a repository.
    async fn read(&mut self, term: Option<BootTime>) -> anyhow::Result<Option<ConfigMap>> {
        let api = self.pin.api();
        let attempt = format!(
            "reading ConfigMap {}/{CHART_CONFIG_MAP}",
            self.pin.namespace
        );
        let config_map = call(attempt, api.get_opt(CHART_CONFIG_MAP)).await?;
        let record = record_in(config_map.as_ref(), &self.pin.digest());
        let version = record.map(|record| self.pin.record_for_members(&record));
        self.publish(version, term);
        Ok(config_map)
    }

    /// Resolves the version and returns how long it stays valid.
    async fn resolve(
        &mut self,
        config_map: Option<ConfigMap>,
        leader: Option<&Leader>,
    ) -> anyhow::Result<Option<Duration>> {
        let record = record_in(config_map.as_ref(), &self.pin.digest());
        let is_recorded = record.is_some_and(|record| record.content.is_some());
        let is_leader = leader.is_some_and(Leader::serves_agents);
        // Without a record, a standby resolves the version itself, but less often than it checks for a
        // record.
        let is_recent = |at: BootTime| BootTime::now().since(at) < RETRY_MAX;
        if !is_recorded && !is_leader && self.last_resolution.is_some_and(is_recent) {
            return Ok(None);
        }
        if let Some(recorded) = version_in(config_map.as_ref()) {
            self.notifier.recorded_chart(unpinned(recorded));
        }
        let (content, remaining) = Box::pin(self.pin.version(config_map, leader)).await?;
        self.notifier.chart(unpinned(&content));
        if !is_recorded {
            self.last_resolution = Some(BootTime::now());
        }
        self.publish(Some(self.pin.for_members(&content)), None);
        Ok(remaining)
    }

    /// Publishes the version. `None` keeps the current value.
    fn publish(&self, version: Option<(String, Option<String>)>, term: Option<BootTime>) {
        self.tx.send_if_modified(|current| {
            let previous = current.clone();
            if let Some((version, pinned)) = version {
                (current.version, current.pinned) = (version, pinned);
            }
            current.read_in_term = term.or(current.read_in_term);
            *current != previous
        });
    }
}

fn with_jitter(pause: Duration) -> Duration {
    pause.mul_f64(1.0 + 0.2 * chance::random::<f64>())
}

/// Waits until this hub leads in a different term than `previous`.
async fn until_other_term(leader: &mut Leader, previous: Option<BootTime>) {
    loop {
        let current = leader.term_since();
        if current.is_some() && current != previous {
            return;
        }
        if !leader.changed().await {
            std::future::pending().await
        }
    }
}

#[cfg(test)]
mod tests;
