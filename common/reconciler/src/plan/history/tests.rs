use proptest::prelude::*;

use super::*;

/// A revision of Krypton, created in the second of its number.
fn own(number: u32, status: Status, fingerprint: &str) -> Revision {
    Revision {
        revision: number,
        status,
        fingerprint: Some(fingerprint.to_owned()),
        owner_uid: Some("uid-1".to_owned()),
        owner_namespace: Some("team".to_owned()),
        run: Some(format!("upgrade-{number}")),
        rolled_back_by: None,
        uid: format!("secret-{number}"),
        resource_version: number.to_string(),
        created: Timestamp::from_second(i64::from(number)).ok(),
    }
}

fn installed(second: i64) -> Revision {
    Revision {
        run: Some(format!("install-{second}")),
        created: Timestamp::from_second(second).ok(),
        ..own(1, Status::Deployed, "a")
    }
}

fn chart(version: &str) -> NewestChart<'_> {
    NewestChart {
        name: "echo",
        version,
        is_read: true,
    }
}

fn after(
    recorded: &[HistoryEntry],
    revisions: &[Revision],
    newest_chart: Option<NewestChart<'_>>,
) -> Vec<HistoryEntry> {
    let revisions: Vec<&Revision> = revisions.iter().collect();
    history_after(recorded, &revisions, newest_chart)
}

fn shown(history: &[HistoryEntry]) -> Vec<(u32, RevisionOutcome, RevisionCause)> {
    history
        .iter()
        .map(|entry| (entry.revision, entry.outcome, entry.cause))
        .collect()
}

#[test]
fn entries_outlive_the_revisions_of_helm() {
    let labels_of = |labels: u32, revision: Revision| Revision {
        run: Some(format!("upgrade-{labels}")),
        ..revision
    };
    let failed = Revision {
        rolled_back_by: Some(6),
        ..own(5, Status::Failed, "d")
    };
    let mut revisions: Vec<Revision> = Vec::new();
    let mut history: Vec<HistoryEntry> = Vec::new();
    for (revision, version) in [
        (installed(1), "1.0.0"),
        (own(2, Status::Deployed, "b"), "1.0.0"),
        (own(3, Status::Deployed, "c"), "2.0.0"),
        (own(4, Status::Failed, "d"), "v2.0.0"),
        (failed, "v2.0.0"),
        // Krypton rolls back to revision 3. Then a user runs Helm, and Krypton replaces that.
        (labels_of(3, own(6, Status::Deployed, "c")), "2.0.0"),
        (labels_of(3, own(7, Status::Deployed, "c")), "3.0.0"),
        (own(8, Status::Deployed, "c"), "2.0.0"),
    ] {
        for older in &mut revisions {
            if (older.status, revision.status) == (Status::Deployed, Status::Deployed) {
                older.status = Status::Superseded;
            }
        }
        revisions.push(revision);
        // Krypton deletes repeated attempts, and Helm the oldest revisions.
        if revisions.len() > 5 {
            revisions.retain(|revision| revision.revision != 4);
        }
        revisions.drain(..revisions.len().saturating_sub(5));
        history = after(&history, &revisions, Some(chart(version)));
    }
    assert_eq!(
        shown(&history),
        [
            (8, RevisionOutcome::Deployed, RevisionCause::Repair),
            (7, RevisionOutcome::Superseded, RevisionCause::Helm),
            (6, RevisionOutcome::Superseded, RevisionCause::Rollback),
            (5, RevisionOutcome::RolledBack, RevisionCause::Retry),
            (4, RevisionOutcome::Failed, RevisionCause::Values),
            (3, RevisionOutcome::Superseded, RevisionCause::Chart),
            (2, RevisionOutcome::Superseded, RevisionCause::Values),
            (1, RevisionOutcome::Superseded, RevisionCause::Install),
        ]
    );
    let versions = history.iter().map(|entry| entry.chart_version.as_deref());
    let expected = [
        "2.0.0", "3.0.0", "2.0.0", "v2.0.0", "v2.0.0", "2.0.0", "1.0.0", "1.0.0",
    ];
    assert!(versions.eq(expected.map(Some)), "{history:?}");
}

#[test]
fn reinstalled_release_keeps_earlier_entries() {
    let first = after(&[], &[installed(1)], Some(chart("1.0.0")));
    let uninstalled = after(&first, &[], None);
    let removed = (1, RevisionOutcome::Removed, RevisionCause::Install);
    assert_eq!(shown(&uninstalled), [removed]);
    let second = after(&uninstalled, &[installed(100)], Some(chart("1.0.0")));
    let deployed = (1, RevisionOutcome::Deployed, RevisionCause::Install);
    assert_eq!(shown(&second), [deployed, removed]);
}

#[test]
fn clock_that_jumps_back_changes_no_order() {
    let early = Revision {
        created: Timestamp::from_second(-5).ok(),
        ..own(2, Status::Deployed, "b")
    };
    let first = after(&[], &[installed(1)], Some(chart("1.0.0")));
    let revisions = [
        Revision {
            status: Status::Superseded,
            ..installed(1)
        },
        early,
    ];
    let history = after(&first, &revisions, Some(chart("1.0.0")));
    let numbers: Vec<u32> = history.iter().map(|entry| entry.revision).collect();
    assert_eq!(numbers, [2, 1]);
    assert_eq!(history[0].cause, RevisionCause::Values);
}

#[test]
fn cause_without_evidence_is_unknown() {
    let swept = Revision {
        run: None,
        ..own(2, Status::Failed, "b")
    };
    let foreign = Revision {
        fingerprint: None,
        owner_uid: None,
        owner_namespace: None,
        run: None,
        ..own(1, Status::Superseded, "")
    };
    let marked = Revision {
        rolled_back_by: Some(3),
        ..own(2, Status::Failed, "b")
    };
    let newest = |fingerprint: &str| own(3, Status::Deployed, fingerprint);
    for (revisions, expected) in [
        (vec![installed(1)], RevisionCause::Install),
        (vec![newest("c")], RevisionCause::Unknown),
        (vec![swept.clone()], RevisionCause::Unknown),
        (vec![foreign], RevisionCause::Helm),
        // The chart of the previous revision is not known.
        (vec![swept.clone(), newest("c")], RevisionCause::Unknown),
        (vec![swept, newest("b")], RevisionCause::Retry),
        // The mark contradicts the run label.
        (vec![marked, newest("c")], RevisionCause::Unknown),
    ] {
        let history = after(&[], &revisions, Some(chart("1.0.0")));
        assert_eq!(history[0].cause, expected, "{revisions:?}");
    }
}

#[test]
fn read_chart_precedes_recorded_and_desired_one() {
    let desired = NewestChart {
        is_read: false,
        ..chart("v1.0.0")
    };
    let revisions = [installed(1)];
    let version = |history: &[HistoryEntry]| history[0].chart_version.clone().unwrap();
    let first = after(&[], &revisions, Some(desired));
    assert_eq!(version(&first), "v1.0.0");
    let read = after(&first, &revisions, Some(chart("1.0.0")));
    assert_eq!(version(&read), "1.0.0");
    for unread in [None, Some(desired)] {
        assert_eq!(after(&read, &revisions, unread), read);
    }
}

#[test]
fn rollback_shows_the_chart_that_it_restored() {
    let revisions = [
        own(1, Status::Superseded, "a"),
        Revision {
            rolled_back_by: Some(3),
            ..own(2, Status::Failed, "b")
        },
        Revision {
            run: Some("upgrade-1".to_owned()),
            ..own(3, Status::Deployed, "a")
        },
    ];
    let first = after(&[], &revisions[..1], Some(chart("1.0.0")));
    let history = after(&first, &revisions, None);
    let rollback = &history[0];
    assert_eq!(rollback.cause, RevisionCause::Rollback);
    assert_eq!(rollback.chart_version.as_deref(), Some("1.0.0"));
    assert_eq!(history[1].outcome, RevisionOutcome::RolledBack);
    assert_eq!(history[1].chart, None);
}

fn entries() -> impl Strategy<Value = HistoryEntry> {
    let outcomes = prop::sample::select(vec![
        RevisionOutcome::Deployed,
        RevisionOutcome::RolledBack,
        RevisionOutcome::Pending,
        RevisionOutcome::Unknown,
    ]);
    let causes = prop::sample::select(vec![
        RevisionCause::Values,
        RevisionCause::Helm,
        RevisionCause::Unknown,
    ]);
    let chart = prop::option::of("é{1,100}");
    (0..9_u32, 0..9_i64, chart, outcomes, causes).prop_map(
        |(revision, second, chart, outcome, cause)| HistoryEntry {
            revision,
            chart_version: chart.clone(),
            chart,
            time: Timestamp::from_second(second).ok().map(Time),
            outcome,
            cause,
        },
    )
}

fn revision_lists() -> impl Strategy<Value = Vec<Revision>> {
    let status = prop::sample::select(Status::ALL.to_vec());
    let run = prop::option::of(0..5_u32);
    let mark = prop::option::of(0..16_u32);
    let one = (status, 0..3_u32, run, mark, 0..9_i64);
    prop::collection::vec(one, 0..14).prop_map(|all| {
        let numbered = (1_u32..).zip(all);
        numbered
            .map(
                |(number, (status, fingerprint, run, mark, second))| Revision {
                    run: run.map(|run| format!("upgrade-{run}")),
                    rolled_back_by: mark,
                    created: Timestamp::from_second(second).ok(),
                    ..own(number, status, &fingerprint.to_string())
                },
            )
            .collect()
    })
}

proptest! {
    /// For any status and labels, the history is bounded, and its own history is the same.
    #[test]
    fn history_is_bounded_and_stable(
        recorded in prop::collection::vec(entries(), 0..=HISTORY_MAX),
        revisions in revision_lists(),
        newest in prop::option::of(("[a-z]{0,300}", any::<bool>())),
    ) {
        let newest_chart = newest.as_ref().map(|(name, is_read)| NewestChart {
            name,
            version: "1.0.0",
            is_read: *is_read,
        });
        let history = after(&recorded, &revisions, newest_chart);
        prop_assert!(history.len() <= HISTORY_MAX);
        prop_assert_eq!(&after(&history, &revisions, newest_chart), &history);
        let texts = history.iter().flat_map(|entry| [&entry.chart, &entry.chart_version]);
        let mut lengths = texts.flatten().map(String::len);
        prop_assert!(lengths.all(|length| (1..=TEXT_MAX).contains(&length)));
        let has_revision = |entry: &&HistoryEntry| revisions.iter().any(|it| is_entry_of(entry, it));
        let numbers = history.iter().filter(has_revision).map(|entry| entry.revision);
        prop_assert!(numbers.is_sorted_by(|newer, older| newer > older));
        let is_deployed = |entry: &&HistoryEntry| entry.outcome == RevisionOutcome::Deployed;
        let running = revisions.iter().filter(|revision| revision.status == Status::Deployed);
        prop_assert!(history.iter().filter(is_deployed).count() <= running.count());
    }
}
