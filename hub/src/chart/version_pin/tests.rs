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
    let stored = config_map(&[
        (DIGEST_KEY, "a"),
        (VERSION_KEY, "1.2.0"),
        (RESOLVED_KEY, "1970-01-01T00:01:40Z"),
    ]);
    let expected = VersionRecord {
        version: "1.2.0".to_owned(),
        content: None,
        resolved: at(100),
    };
    assert_eq!(record_in(Some(&stored), "a"), Some(expected));
    assert_eq!(record_in(Some(&stored), "b"), None);
    assert_eq!(record_in(None, "a"), None);
    for broken in [
        &[(DIGEST_KEY, "a")][..],
        &[(DIGEST_KEY, "a"), (VERSION_KEY, "")],
        &[(VERSION_KEY, "1.2.0")],
    ] {
        assert_eq!(record_in(Some(&config_map(broken)), "a"), None);
    }
    let timeless = config_map(&[
        (DIGEST_KEY, "a"),
        (VERSION_KEY, "1.2.0"),
        (RESOLVED_KEY, "soon"),
    ]);
    let read = record_in(Some(&timeless), "a").unwrap();
    assert_eq!(read.resolved, Timestamp::UNIX_EPOCH);
}

#[test]
fn record_expires_after_interval_or_never_without_one() {
    let record = VersionRecord {
        version: "1.2.0".to_owned(),
        content: None,
        resolved: at(1_000),
    };
    let interval = Duration::from_secs(600);
    let remaining = |now| valid_for(&record, Some(interval), at(now));
    assert_eq!(remaining(1_000), Some(interval));
    assert_eq!(remaining(1_500), Some(Duration::from_secs(100)));
    assert_eq!(remaining(1_600), Some(Duration::ZERO));
    assert_eq!(remaining(1_000_000), Some(Duration::ZERO));
    // The record's time is in the future.
    assert_eq!(remaining(10), Some(interval));
    assert_eq!(valid_for(&record, None, at(1_000_000)), None);
}

#[test]
fn range_never_resolves_to_older_version() {
    let previous = Some("1.2.0@sha256:a");
    for (previous, candidate, chosen) in [
        (None, "1.2.0", "1.2.0"),
        (Some("1.1.0"), "1.2.0", "1.2.0"),
        (Some("1.10.0"), "1.9.0", "1.10.0"),
        (Some("1.2.0"), "v1.2.0", "1.2.0"),
        (Some("rubbish"), "1.2.0", "1.2.0"),
        (previous, "v1.2.0@sha256:a", "1.2.0@sha256:a"),
        // Different content of the same version.
        (previous, "1.2.0@sha256:b", "1.2.0@sha256:b"),
        (Some("1.3.0@sha256:a"), "1.2.0@sha256:b", "1.3.0@sha256:a"),
    ] {
        assert_eq!(choose_version(previous, candidate.to_owned()), chosen);
    }
}

fn pinned_version(tx: watch::Sender<ResolvedVersion>) -> PinnedVersion {
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
        interval: None,
        verified: false,
    };
    PinnedVersion::new(pin, tx)
}

#[tokio::test]
async fn term_has_no_epoch_before_record_is_read() {
    let at = |seconds| BootTime(Duration::from_secs(seconds));
    let leader_term = |epoch, since| LeaderTerm {
        epoch,
        lease_term: LeaseTerm::default(),
        since: at(since),
        acquired_at: Timestamp::UNIX_EPOCH,
        previous_leader: None,
    };
    let (tx, rx) = watch::channel(ResolvedVersion::unread("1.0.0", false));
    let pinned = pinned_version(tx);
    let epoch = |leader_term: Option<&LeaderTerm>| rx.get().epoch(leader_term);
    let first = leader_term(7, 100);
    // A standby follows the record, which gives it no epoch.
    let version = |version: &str| Some((version.to_owned(), None));
    pinned.publish(version("1.1.0"), None);
    assert_eq!((epoch(None), epoch(Some(&first))), (None, None));
    // The hub becomes leader and reads the record: version and epoch change together.
    pinned.publish(version("1.2.0"), Some(at(100)));
    assert_eq!(epoch(Some(&first)), Some(7));
    assert_eq!(rx.get().version, "1.2.0");
    // Neither a later lookup nor a later epoch of the same term removes the epoch.
    pinned.publish(version("1.3.0"), None);
    assert_eq!(epoch(Some(&leader_term(8, 100))), Some(8));
    // After a lost and regained leadership, another hub may have written the record.
    let regained = leader_term(10, 200);
    assert_eq!((epoch(None), epoch(Some(&regained))), (None, None));
    // Without a record, the known version counts.
    pinned.publish(None, Some(at(200)));
    assert_eq!(epoch(Some(&regained)), Some(10));
    assert_eq!(rx.get().version, "1.3.0");
}

#[tokio::test]
async fn members_get_versions_with_their_content() {
    let content = "1.2.0@sha256:ab";
    let pinned = |version: &str| (version.to_owned(), Some(content.to_owned()));
    for (setting, verified, expected) in [
        ("^1", false, pinned("1.2.0")),
        ("1.2.0", false, pinned("1.2.0")),
        ("v1.2.0", false, pinned("v1.2.0")),
        ("", false, pinned("")),
        ("^1", true, (content.to_owned(), None)),
        ("1.2.0", true, (content.to_owned(), None)),
    ] {
        let (tx, _rx) = watch::channel(ResolvedVersion::unread(setting, verified));
        let mut pin = pinned_version(tx).pin;
        setting.clone_into(&mut pin.chart.version);
        pin.verified = verified;
        assert_eq!(pin.for_members(content), expected, "{setting}");
        let record = |content: Option<&str>| VersionRecord {
            version: "1.2.0".to_owned(),
            content: content.map(ToOwned::to_owned),
            resolved: at(1),
        };
        let recorded = pin.record_for_members(&record(Some(content)));
        assert_eq!(recorded, expected, "{setting}");
        // The version of a record without content stays, and members wait for the content.
        let older = pin.record_for_members(&record(None)).1;
        assert_eq!(older.as_deref(), (!verified).then_some(""), "{setting}");
    }
}

#[test]
fn unread_chart_is_not_fetched() {
    for (setting, verified, version, pinned) in [
        ("1.2.3", false, "1.2.3", Some("")),
        ("", false, "", Some("")),
        ("^1", false, "^1", None),
        ("1.2.3@sha256:ab", false, "1.2.3@sha256:ab", None),
        ("1.2.3", true, "=1.2.3", None),
    ] {
        let unread = ResolvedVersion::unread(setting, verified);
        let published = (unread.version.as_str(), unread.pinned.as_deref());
        assert_eq!(published, (version, pinned));
    }
}

#[test]
fn withheld_version_is_shown_as_range() {
    for (setting, shown) in [
        ("", "*"),
        ("1.2.3", "=1.2.3"),
        ("v1.2.3", "=v1.2.3"),
        ("1.2.3@sha256:ab", "=1.2.3"),
        ("^1", "^1"),
    ] {
        assert_eq!(unverified_range(setting), shown);
        assert!(is_range(shown), "{shown}");
    }
    // Members reject it unchanged.
    assert_eq!(unverified_range("rubbish"), "rubbish");
}

#[tokio::test]
async fn recorded_version_is_baseline_of_notifications() {
    let leader = Leader::always_leading();
    let (notifier, next_change) = Notifier::recording(leader.clone());
    let (tx, _rx) = watch::channel(ResolvedVersion::unread("^1", false));
    let mut pinned = pinned_version(tx);
    pinned.notifier = notifier;
    // The record belongs to an earlier range. No repository resolves the new one.
    let earlier = config_map(&[(DIGEST_KEY, "earlier"), (VERSION_KEY, "1.1.0")]);
    let resolved = pinned.resolve(Some(earlier), Some(&leader)).await;
    assert!(resolved.is_err());
    let digest = pinned.pin.digest();
    let recorded = config_map(&[
        (DIGEST_KEY, digest.as_str()),
        (VERSION_KEY, "1.2.0"),
        (CONTENT_KEY, "1.2.0@sha256:ab"),
    ]);
    let resolved = pinned.resolve(Some(recorded), Some(&leader)).await;
    assert!(resolved.is_ok());
    assert_eq!(next_change().as_deref(), Some("Chart: 1.1.0 -> 1.2.0"));
}
