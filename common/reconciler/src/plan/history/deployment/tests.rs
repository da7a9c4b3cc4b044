use krypton_crds::tenant::{RevisionCause, RevisionOutcome};
use krypton_helm::releases::labels::{INSTALL_RUN, UPGRADE_RUN};
use krypton_helm::releases::revision::run_label;
use krypton_types::names;
use proptest::prelude::*;
use serde_json::json;

use super::*;

/// A revision of Krypton for this generation, created in the second of its number.
fn reported(number: u32, generation: i64, status: &str, fingerprint: &str) -> ReportedRevision {
    let prefix = match number {
        1 => INSTALL_RUN,
        _ => UPGRADE_RUN,
    };
    ReportedRevision {
        revision: number,
        created: Some(i64::from(number)),
        status: status.to_owned(),
        fingerprint: Some(fingerprint.to_owned()),
        owner_uid: Some("uid-1".to_owned()),
        run: Some(run_label(prefix, number.into(), generation)),
        rolled_back_by: None,
        chart: Some(ReportedChart {
            name: "echo".to_owned(),
            version: "1.0.0".to_owned(),
            is_read: true,
        }),
    }
}

/// A KryptonDeployment of this generation, whose spec and reconcile request were changed in this second.
fn metadata(generation: i64, second: i64) -> ObjectMeta {
    let time = Timestamp::from_second(second).unwrap();
    let request = json!({ format!("f:{}", names::RECONCILE_REQUESTED_ANNOTATION): {} });
    let request = json!({ "f:metadata": { "f:annotations": request } });
    let managed = json!([
        { "manager": "kubectl", "time": time, "fieldsV1": { "f:spec": {} } },
        { "manager": "flux", "time": time, "fieldsV1": request },
    ]);
    let metadata = json!({ "generation": generation, "managedFields": managed });
    serde_json::from_value(metadata).unwrap()
}

fn after(
    recorded: &[HistoryEntry],
    revisions: &[ReportedRevision],
    metadata: &ObjectMeta,
) -> Vec<HistoryEntry> {
    after_move(false, recorded, revisions, metadata)
}

fn after_move(
    has_moved: bool,
    recorded: &[HistoryEntry],
    revisions: &[ReportedRevision],
    metadata: &ObjectMeta,
) -> Vec<HistoryEntry> {
    let reported = ReportedRevisions::new(names::AGENT_MANAGER, revisions.to_vec());
    deployment_history(recorded, &reported, metadata, has_moved)
}

fn newest(history: &[HistoryEntry]) -> (RevisionCause, Option<&str>) {
    (history[0].cause, history[0].by.as_deref())
}

#[test]
fn spec_manager_installs_its_own_generation() {
    let (kubectl, install) = (Some("kubectl"), RevisionCause::Install);
    for (generation, second, expected) in [
        (1, 1, kubectl),
        (1, 0, kubectl),
        // The clock of the member is behind.
        (1, 2, None),
        // A later change, by a clock that is behind.
        (2, 1, None),
    ] {
        let revisions = [reported(1, 1, "deployed", "a")];
        let history = after(&[], &revisions, &metadata(generation, second));
        assert_eq!(
            newest(&history),
            (install, expected),
            "{generation} {second}"
        );
    }
}

#[test]
fn installation_after_move_back_names_manager() {
    let first = after(&[], &[reported(1, 1, "deployed", "a")], &metadata(1, 1));
    let left = after(&first, &[], &metadata(3, 5));
    assert_eq!(left[0].outcome, RevisionOutcome::Removed);
    let again = |has_moved| {
        let revision = ReportedRevision {
            created: Some(6),
            ..reported(1, 3, "deployed", "a")
        };
        after_move(has_moved, &left, &[revision], &metadata(3, 5))
    };
    let moved_back = again(true);
    assert_eq!(moved_back.len(), 2);
    let install = RevisionCause::Install;
    assert_eq!(newest(&moved_back), (install, Some("kubectl")));
    // The user has changed the spec as well.
    let removed_by_user = again(false);
    let agent = Some(names::AGENT_MANAGER);
    assert_eq!(newest(&removed_by_user), (install, agent));
}

#[test]
fn upgrade_is_caused_by_hub_or_request() {
    let (hub, flux) = (Some(names::HUB_MANAGER), Some("flux"));
    let first = || reported(1, 1, "superseded", "a");
    let failed = |number| reported(number, 2, "failed", "b");
    let changed = ReportedRevision {
        chart: Some(ReportedChart {
            version: "2.0.0".to_owned(),
            ..first().chart.unwrap()
        }),
        ..reported(2, 2, "deployed", "b")
    };
    for (revisions, second, cause, expected) in [
        // The spec has changed as well, but it contains no values.
        (vec![first(), failed(2)], 2, RevisionCause::Values, hub),
        (vec![first(), changed], 2, RevisionCause::Chart, hub),
        (vec![failed(2), failed(3)], 3, RevisionCause::Retry, flux),
    ] {
        let history = after(&[], &revisions, &metadata(2, second));
        assert_eq!(newest(&history), (cause, expected), "{revisions:?}");
        let unread: Vec<ReportedRevision> = revisions
            .into_iter()
            .map(|revision| ReportedRevision {
                chart: None,
                ..revision
            })
            .collect();
        assert_eq!(after(&history, &unread, &metadata(3, 9)), history);
    }
}

fn any_revision() -> impl Strategy<Value = ReportedRevision> {
    let status = prop::sample::select(vec!["deployed", "failed", "superseded", "", "else"]);
    let chart = prop::option::of(("[a-z]{0,300}", any::<bool>()));
    let mark = prop::option::of(0..9_u32);
    (
        0..9_u32,
        any::<Option<i64>>(),
        0..3_i64,
        status,
        chart,
        mark,
    )
        .prop_map(
            |(number, created, generation, status, chart, mark)| ReportedRevision {
                created,
                rolled_back_by: mark,
                chart: chart.map(|(name, is_read)| ReportedChart {
                    version: name.clone(),
                    name,
                    is_read,
                }),
                ..reported(number, generation, status, &generation.to_string())
            },
        )
}

proptest! {
    /// Each report gives valid entries, and the next decision on it changes nothing.
    #[test]
    fn any_report_gives_valid_stable_history(
        earlier in prop::collection::vec(any_revision(), 0..14),
        now in prop::collection::vec(any_revision(), 0..14),
        has_moved: bool,
    ) {
        let metadata = metadata(2, 4);
        let recorded = after(&[], &earlier, &metadata);
        let history = after_move(has_moved, &recorded, &now, &metadata);
        prop_assert!(history.len() <= HISTORY_MAX);
        prop_assert_eq!(&after(&history, &now, &metadata), &history);
        let mut times = history.iter().filter_map(|entry| entry.time.as_ref());
        prop_assert!(times.all(|time| time.0 >= Timestamp::UNIX_EPOCH));
    }
}
