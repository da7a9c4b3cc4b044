use krypton_helm::releases::labels::UPGRADE_RUN;
use krypton_helm::releases::revision::run_label;
use krypton_types::names;
use proptest::prelude::*;

use super::actors::{ACTOR_MAX, Owner};
use super::*;
use crate::field_managers::FieldManager;
use crate::fixtures::foreign_revision;

/// A revision of Krypton, created in the second of its number.
fn own(number: u32, status: Status, fingerprint: &str) -> Revision {
    Revision {
        fingerprint: Some(fingerprint.to_owned()),
        owner_uid: Some("uid-1".to_owned()),
        owner_namespace: Some("team".to_owned()),
        run: Some(format!("upgrade-{number}")),
        created: Timestamp::from_second(i64::from(number)).ok(),
        ..foreign_revision(number, status)
    }
}

fn installed(second: i64) -> Revision {
    Revision {
        run: Some(format!("install-{second}")),
        created: Timestamp::from_second(second).ok(),
        ..own(1, Status::Deployed, "a")
    }
}

fn chart(version: &str) -> RevisionChart<'_> {
    RevisionChart {
        name: "echo",
        version,
        is_read: true,
    }
}

fn after(
    recorded: &[HistoryEntry],
    revisions: &[Revision],
    newest_chart: Option<RevisionChart<'_>>,
) -> Vec<HistoryEntry> {
    after_actors(recorded, revisions, newest_chart, &Actors::default())
}

fn after_actors(
    recorded: &[HistoryEntry],
    revisions: &[Revision],
    newest_chart: Option<RevisionChart<'_>>,
    actors: &Actors<'_>,
) -> Vec<HistoryEntry> {
    let revisions: Vec<&Revision> = revisions.iter().collect();
    let newest = revisions.last();
    let newest = newest.map(|newest| newest.revision);
    let charts: Vec<_> = newest.zip(newest_chart).into_iter().collect();
    history_after(recorded, &revisions, &charts, actors)
}

fn manager(name: &str, second: i64) -> Option<FieldManager<'_>> {
    let time = Timestamp::from_second(second).unwrap();
    Some(FieldManager { name, time })
}

/// Returns the revision of a run for this generation of the Tenant.
fn of_generation(generation: i64, revision: Revision) -> Revision {
    let random = revision.revision.into();
    Revision {
        run: Some(run_label(UPGRADE_RUN, random, generation)),
        ..revision
    }
}

/// Returns the actor of the newest revision. The chart of the older revisions is recorded as `1.0.0`.
fn newest_actor(
    revisions: &[Revision],
    version: &str,
    actors: &Actors<'_>,
) -> (RevisionCause, Option<String>) {
    let older = &revisions[..revisions.len() - 1];
    let mut recorded = Vec::new();
    for count in 1..=older.len() {
        recorded = after(&recorded, &older[..count], Some(chart("1.0.0")));
    }
    let history = after_actors(&recorded, revisions, Some(chart(version)), actors);
    (history[0].cause, history[0].by.clone())
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
    let superseded = Revision {
        status: Status::Superseded,
        ..installed(1)
    };
    let revisions = [superseded, early];
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
    let marked = Revision {
        rolled_back_by: Some(3),
        ..own(2, Status::Failed, "b")
    };
    let newest = |fingerprint: &str| own(3, Status::Deployed, fingerprint);
    for (revisions, expected) in [
        (vec![installed(1)], RevisionCause::Install),
        (vec![newest("c")], RevisionCause::Unknown),
        (vec![swept.clone()], RevisionCause::Unknown),
        (
            vec![foreign_revision(1, Status::Superseded)],
            RevisionCause::Helm,
        ),
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
    let desired = RevisionChart {
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

#[test]
fn change_of_spec_names_its_manager_in_time() {
    let deployed = |generation, number, fingerprint| {
        of_generation(generation, own(number, Status::Deployed, fingerprint))
    };
    let unlabelled = || own(3, Status::Superseded, "a");
    let older = || deployed(1, 3, "a");
    let other_owner = || Revision {
        owner_uid: Some("uid-2".to_owned()),
        ..older()
    };
    let (hub, kubectl) = (Some(names::HUB_MANAGER), Some("kubectl"));
    for (case, older, generation, second, expected) in [
        ("changed", older(), 2, 4, kubectl),
        ("second of the previous revision", older(), 2, 3, kubectl),
        ("values were removed", older(), 2, 2, None),
        ("changed again later", older(), 2, 5, None),
        ("same spec", older(), 1, 2, hub),
        ("same spec, annotated", older(), 1, 4, hub),
        ("recreated", other_owner(), 1, 4, kubectl),
        ("earlier version", unlabelled(), 1, 4, kubectl),
        ("earlier version, same spec", unlabelled(), 1, 2, None),
    ] {
        let actors = Actors {
            spec: manager("kubectl", second),
            request: manager("kubectl-krypton", second),
            program: "agent",
            ..Actors::default()
        };
        let revisions = [older, deployed(generation, 4, "b")];
        let (cause, actor) = newest_actor(&revisions, "1.0.0", &actors);
        assert_eq!(cause, RevisionCause::Values, "{case}");
        assert_eq!(actor.as_deref(), expected, "{case}");
        let (cause, actor) = newest_actor(&revisions, "2.0.0", &actors);
        assert_eq!(cause, RevisionCause::Chart, "{case}");
        assert_eq!(actor.as_deref(), hub, "{case}");
    }
}

#[test]
fn each_cause_has_its_actor() {
    use RevisionCause::{Helm, Install, Repair, Retry, Rollback, Values};
    let failed = |number| of_generation(1, own(number, Status::Failed, "b"));
    let marked = || Revision {
        rolled_back_by: Some(3),
        ..failed(2)
    };
    let first = || of_generation(1, own(1, Status::Superseded, "a"));
    let rollback = || Revision {
        run: first().run,
        ..own(3, Status::Superseded, "a")
    };
    let by_helm = |number| Revision {
        run: first().run,
        ..own(number, Status::Deployed, "a")
    };
    let retried = || vec![first(), failed(2), failed(3)];
    let rolled_back = || vec![first(), marked(), rollback()];
    let rolled_back_then = |last: Revision| [rolled_back(), vec![last]].concat();
    let changed = rolled_back_then(of_generation(1, own(4, Status::Deployed, "c")));
    let repaired = vec![first(), by_helm(2), own(3, Status::Deployed, "a")];
    let (agent, flux) = (Some("agent"), Some("flux"));
    // The managers changed the Tenant in this second.
    for (revisions, second, cause, expected) in [
        (vec![installed(1)], 1, Install, Some("kubectl")),
        (vec![installed(1)], 2, Install, None),
        (retried(), 1, Retry, agent),
        (retried(), 3, Retry, flux),
        (rolled_back(), 3, Rollback, agent),
        (rolled_back_then(failed(4)), 4, Values, flux),
        (rolled_back_then(failed(4)), 2, Values, agent),
        (changed, 4, Values, Some(names::HUB_MANAGER)),
        (vec![first(), by_helm(2)], 2, Helm, None),
        (repaired, 3, Repair, agent),
    ] {
        let actors = Actors {
            spec: manager("kubectl", second),
            request: manager("flux", second),
            program: "agent",
            ..Actors::default()
        };
        let (actual, actor) = newest_actor(&revisions, "1.0.0", &actors);
        assert_eq!(actual, cause, "{revisions:?}");
        assert_eq!(actor.as_deref(), expected, "{revisions:?}");
    }
}

#[test]
fn recorded_actor_stays_and_reinstallation_names_program() {
    let actors = |name, second| Actors {
        spec: manager(name, second),
        program: "agent",
        ..Actors::default()
    };
    let chart = Some(chart("1.0.0"));
    let first = after_actors(&[], &[installed(5)], chart, &actors("kubectl", 1));
    let actor = |history: &[HistoryEntry]| history[0].by.clone();
    assert_eq!(actor(&first).as_deref(), Some("kubectl"));
    let later = after_actors(&first, &[installed(5)], chart, &actors("flux", 9));
    assert_eq!(later, first);
    let again = after_actors(&first, &[installed(10)], chart, &actors("flux", 9));
    assert_eq!(actor(&again).as_deref(), Some("agent"));
    // A CRD of an earlier schema has dropped it.
    let mut dropped = first;
    dropped[0].by = None;
    let later = after_actors(&dropped, &[installed(5)], chart, &actors("kubectl", 1));
    assert_eq!(later, dropped);
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
            cluster: None,
            by: revision.is_multiple_of(2).then(|| "somebody".to_owned()),
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
        actor in ("é{0,100}", 0..9_i64),
    ) {
        let newest_chart = newest.as_ref().map(|(name, is_read)| RevisionChart {
            name,
            version: "1.0.0",
            is_read: *is_read,
        });
        let (name, second) = &actor;
        let actors = Actors {
            spec: manager(name, *second),
            request: manager(name, 3),
            program: name,
            owner: Owner::Tenant,
        };
        let history = after_actors(&recorded, &revisions, newest_chart, &actors);
        prop_assert!(history.len() <= HISTORY_MAX);
        prop_assert_eq!(&after_actors(&history, &revisions, newest_chart, &actors), &history);
        let mut actors = history.iter().filter_map(|entry| entry.by.as_ref());
        prop_assert!(actors.all(|actor| (1..=ACTOR_MAX).contains(&actor.len())));
        let texts = history.iter().flat_map(|entry| [&entry.chart, &entry.chart_version]);
        let mut lengths = texts.flatten().map(String::len);
        prop_assert!(lengths.all(|length| (1..=CHART_TEXT_MAX).contains(&length)));
        let has_revision = |entry: &&HistoryEntry| revisions.iter().any(|it| is_entry_of(entry, it));
        let numbers = history.iter().filter(has_revision).map(|entry| entry.revision);
        prop_assert!(numbers.is_sorted_by(|newer, older| newer > older));
        let is_deployed = |entry: &&HistoryEntry| entry.outcome == RevisionOutcome::Deployed;
        let running = revisions.iter().filter(|revision| revision.status == Status::Deployed);
        prop_assert!(history.iter().filter(is_deployed).count() <= running.count());
    }
}
