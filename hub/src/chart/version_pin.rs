//! Resolves the chart version for all members: a range to a version, and a version to its content digest.
//! The result is stored in a ConfigMap on the home cluster, so it survives restarts.

use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::ConfigMap;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use krypton_helm::chart::{ChartCache, ChartError, ChartRef, exact_version, is_range};
use krypton_runtime::call::{ApiError, call};
use krypton_runtime::chance;
use krypton_runtime::clock::{self, BootTime};
use krypton_runtime::newest::Newest as _;
use krypton_runtime::retry::backoff;
use krypton_types::error_chain::chain;
use krypton_types::fingerprint::sha256_hex;
use krypton_types::names::CHART_CONFIG_MAP;
use kube::Client;
use kube::api::{Api, PostParams};
use thiserror::Error;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::leader::{Leader, LeaderTerm};

const OF: &str = "of";
const RANGE: &str = "range";
const VERSION: &str = "version";
const CONTENT: &str = "content";
const RESOLVED: &str = "resolved";
const RETRY_MAX: Duration = Duration::from_secs(5 * 60);
/// How often a standby checks the record for changes.
const RECORD_EVERY: Duration = Duration::from_secs(30);
/// Longest pause before the next read of the record while members wait for it.
const UNREAD_MAX: Duration = Duration::from_secs(3);

/// The resolved chart version.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Meaning {
    pub version: String,
    /// See [`krypton_types::desired::ChartState::pinned`].
    pub pinned: Option<String>,
    /// Start of the leader term in which this hub read the record. `version` then includes the record of
    /// any earlier leader.
    pub under: Option<BootTime>,
}

impl Meaning {
    /// The value before the first lookup. If the chart needs verification, members get a range, which they
    /// never install.
    pub fn unread(version: &str, proven: bool) -> Self {
        let (version, pinned) = match proven {
            true => (withheld(version), None),
            false if is_pinned(version) || is_range(version) => (version.to_owned(), None),
            false => (version.to_owned(), Some(String::new())),
        };
        Self {
            version,
            pinned,
            under: None,
        }
    }

    /// Returns the epoch to send with this version: that of `leader_term`, once this hub has read the record in
    /// that term.
    pub fn epoch(&self, leader_term: Option<&LeaderTerm>) -> Option<u64> {
        let leader_term = leader_term?;
        (self.under == Some(leader_term.since)).then_some(leader_term.epoch)
    }
}

#[derive(Debug, Error)]
enum PinError {
    #[error(transparent)]
    Api(#[from] ApiError),
    #[error("the range of chart versions could not be looked up")]
    Lookup(#[source] ChartError),
    #[error("the content of the chart could not be found")]
    Content(#[source] Arc<ChartError>),
}

/// The version setting to resolve, and the repository to resolve it from.
pub struct ChartPin {
    pub client: Client,
    /// Namespace of the hub on the home cluster.
    pub namespace: String,
    pub charts: Arc<ChartCache>,
    /// The chart with the configured version.
    pub chart: ChartRef,
    /// Interval between lookups. `None` keeps the result while repository, name and range are unchanged.
    pub every: Option<Duration>,
    /// Whether members get a version only with the digest of a chart that `charts` has accepted.
    pub proven: bool,
}

impl std::fmt::Debug for ChartPin {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ChartPin").finish_non_exhaustive()
    }
}

/// A pin with the state of its refresh loop.
#[derive(Debug)]
pub struct Kept {
    pin: ChartPin,
    tx: watch::Sender<Meaning>,
    /// Pause until the next lookup; `None` means never.
    next: Option<Duration>,
    failures: u32,
    /// Time of the last lookup without a record.
    looked_up: Option<BootTime>,
}

/// The record of a range on the home cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Record {
    version: String,
    /// The version with its digest, if known.
    content: Option<String>,
    resolved: Timestamp,
}

/// Returns the record if it belongs to this chart and range. The record omits the repository's URL, which
/// may contain a password.
fn record(found: Option<&ConfigMap>, of: &str) -> Option<Record> {
    let data = found?.data.as_ref()?;
    if data.get(OF)? != of {
        return None;
    }
    Some(Record {
        version: data.get(VERSION).filter(|it| !it.is_empty())?.clone(),
        content: data.get(CONTENT).filter(|it| is_pinned(it)).cloned(),
        // A record without a time is valid, but due for the next lookup.
        resolved: data
            .get(RESOLVED)
            .and_then(|text| text.parse().ok())
            .unwrap_or(Timestamp::UNIX_EPOCH),
    })
}

/// Returns how long the record stays valid, or `None` if it never expires. A wrong clock delays the next
/// lookup by at most one interval.
fn good_for(record: &Record, every: Option<Duration>, now: Timestamp) -> Option<Duration> {
    let every = every?;
    let age = now.duration_since(record.resolved);
    match Duration::try_from(age) {
        Ok(age) => Some(every.saturating_sub(age)),
        Err(_) => Some(every),
    }
}

/// Replaces a version whose chart is not verified with a range, which members never install.
fn withheld(version: &str) -> String {
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
fn chosen(before: Option<&str>, found: String) -> String {
    let parse = |text: &str| exact_version(unpinned(text));
    let pin = |text: &str| text.split_once('@').map(|(_, pin)| pin.to_owned());
    match before {
        // Keep the previous spelling: Helm compares versions as text.
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
    /// Resolves version and content, or fails, within about a minute. Without a version, members get the
    /// range itself. They install nothing and report that it is unresolved.
    pub async fn begin(self, tx: watch::Sender<Meaning>, stop: &CancellationToken) -> Kept {
        let mut kept = Kept {
            pin: self,
            tx,
            next: None,
            failures: 0,
            looked_up: None,
        };
        if stop.run_until_cancelled(kept.look(None)).await.is_none() {
            tracing::debug!("stopped before the range was looked up");
        }
        kept
    }

    pub(crate) fn of(&self) -> String {
        let ChartRef {
            repo,
            name,
            version,
        } = &self.chart;
        let proven = if self.proven { "\nproven" } else { "" };
        sha256_hex(format!("{repo}\n{name}\n{version}{proven}").as_bytes())
    }

    /// Resolves the setting to a version with its digest. `settled` is the version of a record without a
    /// digest.
    async fn meaning(&self, settled: Option<&str>) -> Result<String, PinError> {
        let asked = &self.chart.version;
        let version = match settled {
            Some(settled) => settled.to_owned(),
            None if asked.is_empty() || is_range(asked) => {
                let resolved = Box::pin(self.charts.resolve(&self.chart)).await;
                resolved.map_err(PinError::Lookup)?
            }
            None => asked.clone(),
        };
        let chart = ChartRef {
            version,
            ..self.chart.clone()
        };
        let pinned = Box::pin(self.charts.pin(&chart)).await;
        pinned.map_err(PinError::Content)
    }

    /// Returns the version for members and the version that they fetch, if the setting resolves to
    /// `content`. `content` is a version with its digest. For a verified chart, the digest is part of the
    /// release. Otherwise only the fetch uses it.
    fn given(&self, content: &str) -> (String, Option<String>) {
        let asked = &self.chart.version;
        match (self.proven, is_range(asked)) {
            (true, _) => (content.to_owned(), None),
            (false, true) => (unpinned(content).to_owned(), Some(content.to_owned())),
            (false, false) => (asked.clone(), Some(content.to_owned())),
        }
    }

    /// Like `given`, for a record, which may lack a digest.
    fn recorded(&self, record: &Record) -> (String, Option<String>) {
        match &record.content {
            Some(content) => self.given(content),
            None if self.proven => (record.version.clone(), None),
            None => (self.given(&record.version).0, Some(String::new())),
        }
    }

    fn api(&self) -> Api<ConfigMap> {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    /// Returns the current content and how long it stays valid. `found` is the ConfigMap. The leader writes
    /// the record, and other hubs use it.
    async fn version(
        &self,
        found: Option<ConfigMap>,
        lead: Option<&Leader>,
    ) -> Result<(String, Option<Duration>), PinError> {
        let leads = || lead.is_some_and(|lead| lead.writes(BootTime::now()));
        let (api, of) = (self.api(), self.of());
        let before = record(found.as_ref(), &of);
        let now = clock::wall();
        let every = self.every.filter(|_| {
            let asked = &self.chart.version;
            asked.is_empty() || is_range(asked)
        });
        let mut settled = None;
        if let Some(record) = &before {
            let content = record.content.clone();
            match (good_for(record, every, now), content) {
                (Some(Duration::ZERO), _) if leads() => {}
                (Some(Duration::ZERO), Some(content)) => return Ok((content, Some(RECORD_EVERY))),
                (left, Some(content)) => return Ok((content, left)),
                (_, None) => settled = Some(record.version.as_str()),
            }
        }
        let resolved = self.meaning(settled).await?;
        let known = |record: &Record| record.content.clone().unwrap_or(record.version.clone());
        let content = chosen(before.as_ref().map(known).as_deref(), resolved);
        if !leads() {
            return Ok((content, Some(RETRY_MAX)));
        }
        let version = if self.proven {
            &content
        } else {
            unpinned(&content)
        };
        let data = [
            (OF, of),
            (RANGE, self.chart.version.clone()),
            (VERSION, version.to_owned()),
            (CONTENT, content.clone()),
            (RESOLVED, now.to_string()),
        ]
        .map(|(key, value)| (key.to_owned(), value));
        let data = Some(data.into());
        let params = PostParams::default();
        let attempt = format!("writing ConfigMap {}/{CHART_CONFIG_MAP}", self.namespace);
        match found {
            // The resourceVersion that was read is the precondition: if two hubs write, one succeeds.
            Some(found) => {
                let object = ConfigMap { data, ..found };
                let request = api.replace(CHART_CONFIG_MAP, &params, &object);
                call(attempt, request).await?
            }
            None => {
                let object = ConfigMap {
                    metadata: ObjectMeta {
                        name: Some(CHART_CONFIG_MAP.to_owned()),
                        ..ObjectMeta::default()
                    },
                    data,
                    ..ConfigMap::default()
                };
                let request = api.create(&params, &object);
                call(attempt, request).await?
            }
        };
        tracing::info!(range = %self.chart.version, version = %content, "the version of the chart was found out");
        Ok((content, every))
    }
}

impl Kept {
    /// Repeats the lookup until `stop`: when it is due, when this hub becomes leader, and at the standby
    /// interval while it is a standby.
    pub async fn keep(mut self, mut lead: Leader, stop: CancellationToken) {
        let mut led = None;
        loop {
            let begun = BootTime::now();
            let next = self.next.map(|pause| BootTime(begun.0 + pause));
            let of_standby = BootTime(begun.0 + a_little_later(RECORD_EVERY));
            let due = async {
                loop {
                    let now = BootTime::now();
                    if let Some(leader_term) = lead.leader_term().filter(|_| lead.writes(now))
                        && led != Some(leader_term.since)
                    {
                        // Another leader may have changed the record.
                        led = Some(leader_term.since);
                        return;
                    }
                    let standby = lead.leader_term().is_none().then_some(of_standby);
                    let next = next.into_iter().chain(standby).min();
                    tokio::select! {
                        () = clock::sleep_until(next, now) => return,
                        decided = lead.changed() => if !decided { std::future::pending().await },
                    }
                }
            };
            if stop.run_until_cancelled(due).await.is_none() {
                return;
            }
            let now_led = lead.clone();
            let look = async {
                tokio::select! {
                    () = self.look(Some(&now_led)) => {}
                    // Members wait for the record, and resolving a range may take long.
                    () = another_leader_term(&mut lead, now_led.leader_term()) => {}
                }
            };
            if stop.run_until_cancelled(look).await.is_none() {
                return;
            }
        }
    }

    async fn look(&mut self, lead: Option<&Leader>) {
        // Take the term before the read. A record that is read in this term includes the writes of all
        // earlier leaders.
        let under = lead
            .and_then(Leader::leader_term)
            .map(|leader_term| leader_term.since);
        let ended = match self.read(under).await {
            Ok(found) => self.look_up(found, lead).await,
            Err(error) => Err(error),
        };
        self.next = match ended {
            // Add at most a fifth to keep hubs from looking up at the same moment. The first lookup serves
            // all hubs.
            Ok(left) => {
                self.failures = 0;
                left.map(a_little_later)
            }
            Err(error) => {
                let range = &self.pin.chart.version;
                tracing::warn!(%range, error = %chain(&error), "resolving the chart version failed; keeping the last one and retrying");
                self.failures += 1;
                let waited_for = under.is_some() && self.tx.get().under != under;
                let most = if waited_for { UNREAD_MAX } else { RETRY_MAX };
                Some(backoff(self.failures, most, chance::random()))
            }
        };
    }

    /// Reads the record and publishes it immediately: members don't have to wait for a repository.
    async fn read(&mut self, under: Option<BootTime>) -> Result<Option<ConfigMap>, PinError> {
        let api = self.pin.api();
        let attempt = format!(
            "reading ConfigMap {}/{CHART_CONFIG_MAP}",
            self.pin.namespace
        );
        let found = call(attempt, api.get_opt(CHART_CONFIG_MAP)).await?;
        let record = record(found.as_ref(), &self.pin.of());
        self.tell(record.map(|record| self.pin.recorded(&record)), under);
        Ok(found)
    }

    /// Resolves the version and returns how long it stays valid.
    async fn look_up(
        &mut self,
        found: Option<ConfigMap>,
        lead: Option<&Leader>,
    ) -> Result<Option<Duration>, PinError> {
        let recorded = record(found.as_ref(), &self.pin.of());
        let recorded = recorded.is_some_and(|record| record.content.is_some());
        let leads = lead.is_some_and(|lead| lead.leader_term().is_some());
        // Without a record, a standby resolves the version itself, but less often than it checks for a
        // record.
        let lately = |at: BootTime| BootTime::now().since(at) < RETRY_MAX;
        if !recorded && !leads && self.looked_up.is_some_and(lately) {
            return Ok(None);
        }
        let (content, left) = Box::pin(self.pin.version(found, lead)).await?;
        if !recorded {
            self.looked_up = Some(BootTime::now());
        }
        self.tell(Some(self.pin.given(&content)), None);
        Ok(left)
    }

    /// Publishes the version. `None` keeps the current value.
    fn tell(&self, found: Option<(String, Option<String>)>, under: Option<BootTime>) {
        self.tx.send_if_modified(|meaning| {
            let before = meaning.clone();
            if let Some((version, pinned)) = found {
                (meaning.version, meaning.pinned) = (version, pinned);
            }
            meaning.under = under.or(meaning.under);
            *meaning != before
        });
    }
}

fn a_little_later(pause: Duration) -> Duration {
    pause.mul_f64(1.0 + 0.2 * chance::random::<f64>())
}

/// Waits until this hub leads in a different term than `before`.
async fn another_leader_term(lead: &mut Leader, before: Option<LeaderTerm>) {
    let before = before.map(|leader_term| leader_term.since);
    loop {
        let now = lead.leader_term().map(|leader_term| leader_term.since);
        if now.is_some() && now != before {
            return;
        }
        if !lead.changed().await {
            std::future::pending().await
        }
    }
}

#[cfg(test)]
mod tests {
    use krypton_runtime::lease::LeaseTerm;

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
    fn record_counts_only_for_its_chart_and_range() {
        let kept = config_map(&[
            (OF, "a"),
            (VERSION, "1.2.0"),
            (RESOLVED, "1970-01-01T00:01:40Z"),
        ]);
        let expected = Record {
            version: "1.2.0".to_owned(),
            content: None,
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
    fn record_expires_after_interval_or_never_without_one() {
        let record = Record {
            version: "1.2.0".to_owned(),
            content: None,
            resolved: at(1_000),
        };
        let every = Duration::from_secs(600);
        let left = |now| good_for(&record, Some(every), at(now));
        assert_eq!(left(1_000), Some(every));
        assert_eq!(left(1_500), Some(Duration::from_secs(100)));
        assert_eq!(left(1_600), Some(Duration::ZERO));
        assert_eq!(left(1_000_000), Some(Duration::ZERO));
        // The record's time is in the future.
        assert_eq!(left(10), Some(every));
        assert_eq!(good_for(&record, None, at(1_000_000)), None);
    }

    #[test]
    fn range_never_resolves_to_older_version() {
        let chosen = |before, found: &str| chosen(before, found.to_owned());
        assert_eq!(chosen(None, "1.2.0"), "1.2.0");
        assert_eq!(chosen(Some("1.1.0"), "1.2.0"), "1.2.0");
        assert_eq!(chosen(Some("1.10.0"), "1.9.0"), "1.10.0");
        assert_eq!(chosen(Some("1.2.0"), "v1.2.0"), "1.2.0");
        assert_eq!(chosen(Some("rubbish"), "1.2.0"), "1.2.0");
        // Different content of the same version.
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

    fn kept(tx: watch::Sender<Meaning>) -> Kept {
        let folder = tempfile::tempdir().unwrap();
        let config = kube::Config::new("http://127.0.0.1:1".parse().unwrap());
        let pin = ChartPin {
            client: Client::try_from(config).unwrap(),
            namespace: "hub".to_owned(),
            charts: Arc::new(ChartCache::new(folder.path().to_owned()).unwrap()),
            chart: ChartRef {
                repo: String::new(),
                name: "crossplane".to_owned(),
                version: "^1".to_owned(),
            },
            every: None,
            proven: false,
        };
        Kept {
            pin,
            tx,
            next: None,
            failures: 0,
            looked_up: None,
        }
    }

    #[tokio::test]
    async fn term_has_no_epoch_before_record_is_read() {
        let at = |seconds| BootTime(Duration::from_secs(seconds));
        let leader_term = |epoch, since| LeaderTerm {
            epoch,
            term: LeaseTerm::default(),
            since: at(since),
            won: Timestamp::UNIX_EPOCH,
            former: None,
        };
        let (tx, rx) = watch::channel(Meaning::unread("1.0.0", false));
        let kept = kept(tx);
        let epoch = |leader_term: Option<&LeaderTerm>| rx.get().epoch(leader_term);
        let first = leader_term(7, 100);
        // A standby follows the record, which gives it no epoch.
        let version = |version: &str| Some((version.to_owned(), None));
        kept.tell(version("1.1.0"), None);
        assert_eq!((epoch(None), epoch(Some(&first))), (None, None));
        // The hub becomes leader and reads the record: version and epoch change together.
        kept.tell(version("1.2.0"), Some(at(100)));
        assert_eq!(epoch(Some(&first)), Some(7));
        assert_eq!(rx.get().version, "1.2.0");
        // Neither a later lookup nor a later epoch of the same term removes the epoch.
        kept.tell(version("1.3.0"), None);
        assert_eq!(epoch(Some(&leader_term(8, 100))), Some(8));
        // After a lost and regained leadership, another hub may have written the record.
        assert_eq!(
            (epoch(None), epoch(Some(&leader_term(10, 200)))),
            (None, None)
        );
        // Without a record, the known version counts.
        kept.tell(None, Some(at(200)));
        assert_eq!(epoch(Some(&leader_term(10, 200))), Some(10));
        assert_eq!(rx.get().version, "1.3.0");
    }

    #[tokio::test]
    async fn members_get_versions_with_their_content() {
        let content = "1.2.0@sha256:ab";
        let pinned = |version: &str| (version.to_owned(), Some(content.to_owned()));
        for (asked, proven, expected) in [
            ("^1", false, pinned("1.2.0")),
            ("1.2.0", false, pinned("1.2.0")),
            ("v1.2.0", false, pinned("v1.2.0")),
            ("", false, pinned("")),
            ("^1", true, (content.to_owned(), None)),
            ("1.2.0", true, (content.to_owned(), None)),
        ] {
            let (tx, _rx) = watch::channel(Meaning::unread(asked, proven));
            let mut pin = kept(tx).pin;
            asked.clone_into(&mut pin.chart.version);
            pin.proven = proven;
            assert_eq!(pin.given(content), expected, "{asked}");
            let record = |content: Option<&str>| Record {
                version: "1.2.0".to_owned(),
                content: content.map(ToOwned::to_owned),
                resolved: at(1),
            };
            assert_eq!(pin.recorded(&record(Some(content))), expected, "{asked}");
            // The version of a record without content stays, and members wait for the content.
            let older = pin.recorded(&record(None)).1;
            assert_eq!(older.as_deref(), (!proven).then_some(""), "{asked}");
        }
    }

    #[test]
    fn unread_chart_is_not_fetched() {
        for (asked, proven, version, pinned) in [
            ("1.2.3", false, "1.2.3", Some("")),
            ("", false, "", Some("")),
            ("^1", false, "^1", None),
            ("1.2.3@sha256:ab", false, "1.2.3@sha256:ab", None),
            ("1.2.3", true, "=1.2.3", None),
        ] {
            let unread = Meaning::unread(asked, proven);
            let found = (unread.version.as_str(), unread.pinned.as_deref());
            assert_eq!(found, (version, pinned));
        }
    }

    #[test]
    fn withheld_version_is_shown_as_range() {
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
        // Members reject it unchanged.
        assert_eq!(withheld("rubbish"), "rubbish");
    }
}
