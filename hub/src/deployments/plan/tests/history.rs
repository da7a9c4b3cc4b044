//! Tests of `status.history` across reports, moves and renamed members.

use std::collections::BTreeSet;
use std::ops::RangeInclusive;
use std::sync::Arc;

use krypton_crds::tenant::{HISTORY_MAX, HistoryEntry, RevisionCause, RevisionOutcome};
use krypton_types::deployment::{ReportedChart, ReportedRevision, ReportedRevisions};
use proptest::prelude::*;

use super::*;

/// A report with revisions of these numbers, the last one deployed.
fn with_revisions(numbers: impl IntoIterator<Item = u32>) -> DeploymentReport {
    let mut revisions: Vec<ReportedRevision> = numbers.into_iter().map(revision).collect();
    if let Some(newest) = revisions.last_mut() {
        "deployed".clone_into(&mut newest.status);
    }
    DeploymentReport {
        revisions: Some(Arc::new(ReportedRevisions::new(
            names::AGENT_MANAGER,
            revisions,
        ))),
        ..installed_report()
    }
}

fn revision(number: u32) -> ReportedRevision {
    ReportedRevision {
        revision: number,
        created: Some(i64::from(number)),
        status: "superseded".to_owned(),
        fingerprint: Some(number.to_string()),
        run: Some(format!("install-{number}-3")),
        ..ReportedRevision::default()
    }
}

fn shown(history: &[HistoryEntry]) -> Vec<(&str, u32, RevisionOutcome)> {
    let shown = history.iter().map(|entry| {
        let cluster = entry.cluster.as_deref().unwrap_or_default();
        (cluster, entry.revision, entry.outcome)
    });
    shown.collect()
}

impl DeploymentFixture {
    /// Writes the decided status to the object. The next decision then has the same history.
    #[track_caller]
    fn written(mut self) -> Self {
        let status = self.decide().status;
        self.object.status = Some(status.clone());
        assert_eq!(self.decide().status.history, status.history);
        self
    }

    fn history(&self) -> Vec<HistoryEntry> {
        self.decide().status.history
    }
}

const DEPLOYED: RevisionOutcome = RevisionOutcome::Deployed;
const SUPERSEDED: RevisionOutcome = RevisionOutcome::Superseded;

#[test]
fn history_names_cluster_and_spec_manager() {
    let mut fixture = reported(with_revisions([1]));
    let managed = serde_json::json!([
        { "manager": "flux", "time": "1970-01-01T00:00:01Z", "fieldsV1": { "f:spec": {} } }
    ]);
    fixture.object.metadata.managed_fields = serde_json::from_value(managed).unwrap();
    let history = fixture.written().history();
    assert_eq!(shown(&history), [("edge-1", 1, DEPLOYED)]);
    assert_eq!(history[0].cause, RevisionCause::Install);
    assert_eq!(history[0].by.as_deref(), Some("flux"));
}

#[test]
fn doubtful_report_keeps_recorded_history() {
    let fixture = reported(with_revisions([1, 2])).written();
    let recorded = fixture.history();
    assert_eq!(recorded.len(), 2);
    let other_uid = DeploymentReport {
        uid: "another".to_owned(),
        ..with_revisions([])
    };
    for report in [installed_report(), other_uid] {
        let fixture = reported(report);
        let fixture = DeploymentFixture {
            object: reported(with_revisions([1, 2])).written().object,
            ..fixture
        };
        assert_eq!(fixture.history(), recorded);
    }
    let mut earlier_reporter = fixture.with_report("edge-1", with_revisions([]));
    let member = earlier_reporter.members.get_mut("edge-1").unwrap();
    member.report.as_mut().unwrap().is_current = false;
    assert_eq!(earlier_reporter.history(), recorded);
    earlier_reporter.members.clear();
    assert_eq!(earlier_reporter.history(), recorded);
}

#[test]
fn history_outlives_revisions_and_is_bounded() {
    let mut fixture = fixture().with_placements(&HERE);
    for number in 1..30 {
        let report = with_revisions(number..number + 3);
        fixture = fixture.with_report("edge-1", report).written();
    }
    let history = fixture.history();
    let numbers = history.iter().map(|entry| entry.revision);
    assert!(numbers.eq((22..=31).rev()), "{history:?}");
    assert_eq!(history.len(), HISTORY_MAX);
}

#[test]
fn move_keeps_history_of_earlier_cluster() {
    let mut fixture = reported(with_revisions([1, 2])).written();
    fixture.target = Ok("edge-2");
    let mut fixture = fixture.member("edge-2").written();
    let earlier = [("edge-1", 2, DEPLOYED), ("edge-1", 1, SUPERSEDED)];
    assert_eq!(shown(&fixture.history()), earlier);
    // The release at the earlier cluster runs until the new one is ready.
    let unready = DeploymentReport {
        state: unready().state,
        ..with_revisions([1])
    };
    fixture = fixture.with_report("edge-2", unready).written();
    let both = [&[("edge-2", 1, DEPLOYED)], &earlier[..]].concat();
    assert_eq!(shown(&fixture.history()), both);
    fixture = fixture.with_report("edge-1", with_revisions([1, 2, 3]));
    let upgraded = fixture.history();
    let expected = [("edge-1", 3, DEPLOYED), ("edge-2", 1, DEPLOYED)];
    assert_eq!(shown(&upgraded)[..2], expected);
    let uninstalled = DeploymentReport {
        revisions: with_revisions([]).revisions,
        ..uninstalled_report()
    };
    fixture = fixture
        .with_report("edge-2", with_revisions([1]))
        .written()
        .with_report("edge-1", uninstalled)
        .written();
    assert_eq!(placements(&fixture.decide()), [("edge-2", false)]);
    let history = fixture.history();
    let removed = ("edge-1", 3, RevisionOutcome::Removed);
    assert_eq!(shown(&history)[..2], [removed, ("edge-2", 1, DEPLOYED)]);
    assert_eq!(history.len(), 4);
}

#[test]
fn orphaned_release_keeps_its_outcome() {
    let mut fixture = reported(with_revisions([1])).written();
    let orphan = (names::ORPHAN_ANNOTATION.to_owned(), "true".to_owned());
    let annotations = &mut fixture.object.metadata.annotations;
    annotations.get_or_insert_default().extend([orphan]);
    let fixture = fixture
        .with_report("edge-1", uninstalled_report())
        .written();
    assert_eq!(shown(&fixture.history()), [("edge-1", 1, DEPLOYED)]);
}

#[test]
fn renamed_member_keeps_its_history() {
    let mut fixture = reported(with_revisions([1])).written();
    fixture.members.clear();
    fixture.target = Ok("edge-2");
    let placements = &mut fixture.object.status.as_mut().unwrap().placements;
    placements.as_mut().unwrap()[0].cluster_uid = "uid-of-edge-2".to_owned();
    let fixture = fixture.member("edge-2");
    let fixture = fixture
        .with_report("edge-2", with_revisions([1, 2]))
        .written();
    let expected = [("edge-2", 2, DEPLOYED), ("edge-2", 1, SUPERSEDED)];
    assert_eq!(shown(&fixture.history()), expected);
}

/// A move from edge-1 to edge-2, of which both have the release and reported these revisions.
fn moving(earlier: RangeInclusive<u32>, now: RangeInclusive<u32>) -> DeploymentFixture {
    let mut fixture = reported(with_revisions(earlier)).written();
    fixture.target = Ok("edge-2");
    let unready = DeploymentReport {
        state: unready().state,
        ..with_revisions(now)
    };
    let fixture = fixture.member("edge-2").written();
    fixture.with_report("edge-2", unready).written()
}

#[test]
fn unknown_target_keeps_order_of_clusters() {
    let mut fixture = moving(1..=10, 1..=2);
    let history = fixture.history();
    let clusters = shown(&history).into_iter().map(|(cluster, ..)| cluster);
    assert!(clusters.take(2).all(|cluster| cluster == "edge-2"));
    assert_eq!(history.len(), HISTORY_MAX);
    fixture.target = Err(State::new(Truth::Unknown, "SecretNotFound", "none"));
    assert_eq!(fixture.history(), history);
}

#[test]
fn full_history_of_target_stays() {
    let mut fixture = moving(1..=10, 1..=10);
    let history = fixture.history();
    assert!(
        history
            .iter()
            .all(|entry| entry.cluster.as_deref() == Some("edge-2"))
    );
    for target in [
        Ok("edge-2"),
        Err(State::new(Truth::Unknown, "SecretNotFound", "none")),
    ] {
        fixture.target = target;
        assert_eq!(fixture.history(), history);
    }
}

#[test]
fn move_back_keeps_entries_of_running_cluster() {
    let uninstalled = DeploymentReport {
        revisions: with_revisions([]).revisions,
        ..uninstalled_report()
    };
    let mut fixture = moving(1..=10, 1..=5)
        .with_report("edge-2", with_revisions(1..=5))
        .written()
        .with_report("edge-1", uninstalled)
        .written();
    assert_eq!(placements(&fixture.decide()), [("edge-2", false)]);
    let history = fixture.history();
    fixture.target = Ok("edge-1");
    fixture.members.get_mut("edge-1").unwrap().report = None;
    let fixture = fixture.written();
    assert_eq!(fixture.history(), history);
    let again = ReportedRevision {
        created: Some(99),
        status: "deployed".to_owned(),
        ..revision(1)
    };
    let revisions = ReportedRevisions::new(names::AGENT_MANAGER, vec![again]);
    let back = DeploymentReport {
        revisions: Some(Arc::new(revisions)),
        ..unready()
    };
    let fixture = fixture.with_report("edge-1", back).written();
    let back = fixture.history();
    assert_eq!(shown(&back)[0], ("edge-1", 1, DEPLOYED));
    assert_eq!(back[1..], history[..HISTORY_MAX - 1]);
}

#[test]
fn only_a_move_makes_reinstallation_requested() {
    let managed = serde_json::json!([
        { "manager": "flux", "time": "1970-01-01T00:00:50Z", "fieldsV1": { "f:spec": {} } }
    ]);
    let reinstalled = |mut fixture: DeploymentFixture| {
        fixture.object.metadata.managed_fields = serde_json::from_value(managed.clone()).unwrap();
        let again = ReportedRevision {
            created: Some(99),
            ..revision(1)
        };
        let revisions = ReportedRevisions::new(names::AGENT_MANAGER, vec![again]);
        let report = DeploymentReport {
            revisions: Some(Arc::new(revisions)),
            ..unready()
        };
        let history = fixture.with_report("edge-1", report).written().history();
        assert_eq!(history[0].cause, RevisionCause::Install, "{history:?}");
        history[0].by.clone()
    };
    let removed = reported(with_revisions([1])).written();
    let removed = removed.with_report("edge-1", with_revisions([])).written();
    assert_eq!(reinstalled(removed).as_deref(), Some(names::AGENT_MANAGER));
    let mut moved_back = moving(1..=1, 1..=1);
    moved_back.target = Ok("edge-1");
    assert_eq!(reinstalled(moved_back).as_deref(), Some("flux"));
}

#[test]
fn entries_of_uninstalled_release_are_removed() {
    let fixture = reported(with_revisions([1, 2])).written();
    let fixture = fixture.with_report("edge-1", uninstalled_report());
    let expected = [
        ("edge-1", 2, RevisionOutcome::Removed),
        ("edge-1", 1, SUPERSEDED),
    ];
    assert_eq!(shown(&fixture.written().history()), expected);
}

const CLUSTERS: [&str; 4] = ["edge-1", "edge-2", "edge-3", "edge-4"];

/// Cluster, number and time of a reported revision.
type RevisionKey = (String, u32, Option<i64>);

/// A change before a decision.
#[derive(Debug)]
enum Change {
    Report {
        cluster: &'static str,
        revisions: Arc<ReportedRevisions>,
        is_ready: bool,
        gone: bool,
    },
    /// The report of this member does not count until the next one.
    Outdated(&'static str),
    Target(Option<&'static str>),
}

impl DeploymentFixture {
    fn after(mut self, change: Change) -> Self {
        match change {
            Change::Report {
                cluster,
                revisions,
                is_ready,
                gone,
            } => {
                let report = match is_ready {
                    true => installed_report(),
                    false => unready(),
                };
                let report = DeploymentReport {
                    gone,
                    revisions: Some(revisions),
                    ..report
                };
                return self.with_report(cluster, report);
            }
            Change::Outdated(cluster) => {
                if let Some(report) = &mut self.members.get_mut(cluster).unwrap().report {
                    report.is_current = false;
                }
            }
            Change::Target(cluster) => {
                let unknown = || State::new(Truth::Unknown, "SecretNotFound", "none");
                self.target = cluster.ok_or_else(unknown);
            }
        }
        self
    }

    /// Writes the decided status to the object. Returns whether it has changed.
    fn write(&mut self) -> bool {
        let status = Some(self.decide().status);
        let is_changed = self.object.status != status;
        self.object.status = status;
        is_changed
    }

    /// Checks the written history. `reported` contains the revisions of all reports.
    fn check_history(&self, reported: &BTreeSet<RevisionKey>) -> Result<(), TestCaseError> {
        let status = self.object.status.as_ref().unwrap();
        let history = &status.history;
        prop_assert!(history.len() <= HISTORY_MAX);
        let second = |entry: &HistoryEntry| entry.time.as_ref().map(|time| time.0.as_second());
        for entry in history {
            let cluster = entry.cluster.clone().unwrap();
            let key = (cluster, entry.revision, second(entry));
            prop_assert!(reported.contains(&key), "{:?}", entry);
        }
        for placement in status.placements.iter().flatten() {
            let stored = self.members[&*placement.cluster].report.as_ref();
            let current = stored.filter(|stored| stored.is_current && !stored.report.gone);
            let revisions = current.and_then(|stored| stored.report.revisions.as_deref());
            let revisions = revisions.map_or(&[][..], ReportedRevisions::newest_first);
            let is_reported = |entry: &&HistoryEntry| {
                let mut revisions = revisions.iter();
                entry.cluster.as_ref() == Some(&placement.cluster)
                    && revisions
                        .any(|it| (it.revision, it.created) == (entry.revision, second(entry)))
            };
            let numbers = history.iter().filter(is_reported);
            let numbers = numbers.map(|entry| entry.revision);
            prop_assert!(
                numbers.is_sorted_by(|newer, older| newer > older),
                "{:?}",
                history
            );
        }
        Ok(())
    }
}

fn any_revision() -> impl Strategy<Value = ReportedRevision> {
    let statuses = vec!["deployed", "failed", "superseded", "pending-upgrade", ""];
    let status = proptest::sample::select(statuses);
    let run = proptest::option::of(0..4_u32);
    let mark = proptest::option::of(0..14_u32);
    let chart = proptest::option::of((0..3_u32, any::<bool>()));
    (0..14_u32, 0..3_i64, status, run, mark, chart).prop_map(
        |(number, second, status, run, rolled_back_by, chart)| ReportedRevision {
            created: Some(second),
            status: status.to_owned(),
            run: run.map(|run| format!("install-{run}-3")),
            rolled_back_by,
            chart: chart.map(|(minor, is_read)| ReportedChart {
                name: "echo".to_owned(),
                version: format!("1.{minor}.0"),
                is_read,
            }),
            ..revision(number)
        },
    )
}

fn any_change() -> impl Strategy<Value = Change> {
    let cluster = || proptest::sample::select(&CLUSTERS[..]);
    let revisions = proptest::collection::vec(any_revision(), 0..14);
    let gone = proptest::bool::weighted(0.1);
    let reports = (cluster(), revisions, any::<bool>(), gone);
    let reports = reports.prop_map(|(cluster, revisions, is_ready, gone)| Change::Report {
        cluster,
        revisions: Arc::new(ReportedRevisions::new(names::AGENT_MANAGER, revisions)),
        is_ready,
        gone,
    });
    let targets = proptest::option::weighted(0.9, cluster());
    prop_oneof![
        8 => reports,
        1 => cluster().prop_map(Change::Outdated),
        3 => targets.prop_map(Change::Target),
    ]
}

proptest! {
    /// With the same reports, the status stops changing, so the hub stops writing.
    #[test]
    fn history_of_several_clusters_settles(
        changes in proptest::collection::vec(any_change(), 1..12),
    ) {
        let clusters = CLUSTERS.into_iter();
        let mut fixture = clusters.fold(fixture().with_finalizer(), DeploymentFixture::member);
        let mut reported = BTreeSet::new();
        for change in changes {
            if let Change::Report { cluster, revisions, .. } = &change {
                let revisions = revisions.newest_first().iter();
                let keys = revisions.map(|it| ((*cluster).to_owned(), it.revision, it.created));
                reported.extend(keys);
            }
            fixture = fixture.after(change);
            fixture.write();
            fixture.check_history(&reported)?;
        }
        let mut writes = 0;
        while fixture.write() {
            writes += 1;
            prop_assert!(writes <= 2 * CLUSTERS.len() + 2);
            fixture.check_history(&reported)?;
        }
    }
}
