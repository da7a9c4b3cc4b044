//! The repair table of `docs/explanation/repair.md`, and the tests that compare it with the plans.

use std::path::Path;

use krypton_helm::releases::Status;
use krypton_helm::releases::revision::Revision;
use krypton_runtime::args::page::check_part;
use krypton_runtime::clock::BootTime;
use proptest::prelude::*;

use super::Action;
use super::state::ReleaseState;
use super::tests::{World, world};
use crate::fixtures::foreign_revision;

/// Krypton's action for a state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Remedy {
    /// Nothing if the release is as desired, otherwise [`Self::Apply`].
    Compare,
    /// `helm upgrade --install`.
    Apply,
    /// `helm install --replace`: runs the installation's hooks again and adopts the existing objects.
    InstallAgain,
    /// Mark the revision as failed, which changes no workload, and continue as for a failed revision.
    Unlock,
    /// Like `Unlock`, but only when no Helm process can be running. That is immediately if the dead one was
    /// Krypton's.
    BreakLock,
    /// `helm uninstall`, including hooks.
    Uninstall,
    /// Delete the workspace and remove the finalizer.
    CleanUp,
    /// Keep a copy of the Secret under another name and delete the Secret. Then continue as for the previous
    /// revision.
    SetAside,
    /// Leave the release unchanged, and report in a condition how to inspect it.
    ReportOnly,
}

impl Remedy {
    fn description(self) -> &'static str {
        match self {
            Self::Compare => {
                "nothing, or `helm upgrade --install` if it differs from the desired state"
            }
            Self::Apply => "`helm upgrade --install`",
            Self::InstallAgain => "`helm install --replace`",
            Self::Unlock => "mark it failed, then as for `failed`",
            Self::BreakLock => {
                "when no Helm process can be running, mark it failed, then as for `failed`"
            }
            Self::Uninstall => "`helm uninstall`",
            Self::CleanUp => "delete the workspace, remove the finalizer",
            Self::SetAside => {
                "keep a copy of the Secret and delete it, then as for the previous revision"
            }
            Self::ReportOnly => "nothing; a condition reports it",
        }
    }
}

/// One row of the table.
struct Row {
    /// Whether a state belongs to this row, while no removal is due.
    matches: fn(&ReleaseState<'_>) -> bool,
    /// The newest revision's label `status`, or a description if the label is not sufficient.
    name: &'static str,
    /// Cause of the state.
    cause: &'static str,
    /// Remedy for a Tenant that is not deleted.
    present: Remedy,
    /// Remedy for a deleted Tenant.
    deleted: Remedy,
    /// Guarantee that holds until the remedy is complete.
    guarantee: &'static str,
}

fn is_deployed(state: &ReleaseState<'_>) -> bool {
    let is_unsettled = matches!(
        state,
        ReleaseState::Unread(_) | ReleaseState::Unrecorded | ReleaseState::OutOfDate
    );
    is_unsettled || state.rollout().is_some()
}

fn is_locked(state: &ReleaseState<'_>, status: Status) -> bool {
    matches!(
        state,
        ReleaseState::StaleLock(newest) | ReleaseState::Locked { newest, .. } if newest.status == status
    )
}

/// The repair table, with one row for each state.
const TABLE: [Row; 12] = [
    Row {
        matches: |state| matches!(state, ReleaseState::Absent),
        name: "(no revision)",
        cause: "not installed yet, or a user deleted all Secrets",
        present: Remedy::Apply,
        deleted: Remedy::CleanUp,
        guarantee: "Krypton adopts existing objects with the release's name and does not recreate them",
    },
    Row {
        matches: is_deployed,
        name: "deployed",
        cause: "Helm succeeded",
        present: Remedy::Compare,
        deleted: Remedy::Uninstall,
        guarantee: "in the desired state: no request and no Helm run",
    },
    Row {
        matches: |state| is_locked(state, Status::PendingInstall),
        name: "pending-install",
        cause: "Helm died during an installation",
        present: Remedy::BreakLock,
        deleted: Remedy::Uninstall,
        guarantee: "created objects stay",
    },
    Row {
        matches: |state| is_locked(state, Status::PendingUpgrade),
        name: "pending-upgrade",
        cause: "Helm died during an upgrade",
        present: Remedy::BreakLock,
        deleted: Remedy::Uninstall,
        guarantee: "the previous revision stays deployed and keeps serving",
    },
    Row {
        matches: |state| is_locked(state, Status::PendingRollback),
        name: "pending-rollback",
        cause: "`helm rollback` of Krypton or a user died, or one of its hooks failed",
        present: Remedy::BreakLock,
        deleted: Remedy::Uninstall,
        guarantee: "as for `pending-upgrade`",
    },
    Row {
        matches: |state| is_locked(state, Status::Uninstalling),
        name: "uninstalling",
        cause: "`helm uninstall` died, or one of its hooks failed",
        present: Remedy::BreakLock,
        deleted: Remedy::Uninstall,
        guarantee: "for an existing Tenant: nothing more is deleted, and missing objects are recreated",
    },
    Row {
        matches: |state| matches!(state, ReleaseState::FailedInstall),
        name: "failed (installation)",
        cause: "Krypton's installation failed or died, and no revision was ever deployed",
        present: Remedy::InstallAgain,
        deleted: Remedy::Uninstall,
        guarantee: "pre-install and post-install hooks run again, nothing is uninstalled, and objects stay",
    },
    Row {
        matches: |state| matches!(state, ReleaseState::Failed),
        name: "failed",
        cause: "an upgrade or rollback failed or died",
        present: Remedy::Apply,
        deleted: Remedy::Uninstall,
        guarantee: "the previous revision keeps serving",
    },
    Row {
        matches: |state| matches!(state, ReleaseState::Superseded(_)),
        name: "superseded",
        cause: "a user deleted the newest Secret, or Helm died between its last two writes",
        present: Remedy::Unlock,
        deleted: Remedy::Uninstall,
        guarantee: "workloads keep running",
    },
    Row {
        matches: |state| matches!(state, ReleaseState::Uninstalled),
        name: "uninstalled",
        cause: "a user ran `helm uninstall --keep-history`",
        present: Remedy::Apply,
        deleted: Remedy::Uninstall,
        guarantee: "installed again, with hooks",
    },
    Row {
        matches: |state| matches!(state, ReleaseState::Unknown(_)),
        name: "unknown, or any other status",
        cause: "a Helm version that is newer than Krypton",
        present: Remedy::ReportOnly,
        deleted: Remedy::Uninstall,
        guarantee: "workloads keep running",
    },
    Row {
        matches: |_| false,
        name: "(cannot be decoded)",
        cause: "the newest Secret is damaged: Helm skips it and then fails on its name",
        present: Remedy::SetAside,
        deleted: Remedy::SetAside,
        guarantee: "only if Helm cannot decode it either. Workloads keep running. If no other revision is left, a \
                  deletion waits, because Krypton does not know the objects to delete",
    },
];

/// Renders the table as Markdown, as in `docs/explanation/repair.md`.
fn markdown() -> String {
    let mut text = String::from(
        "| Newest revision | Cause | Tenant exists | Tenant is being deleted | Guarantee |\n\
         | --- | --- | --- | --- | --- |\n",
    );
    for row in &TABLE {
        let cells = [
            row.name,
            row.cause,
            row.present.description(),
            row.deleted.description(),
            row.guarantee,
        ];
        text.push_str(&format!("| {} |\n", cells.join(" | ")));
    }
    text
}

/// Returns the only row of a release with these revisions. Its locks are older than the grace period.
fn row(revisions: &[Revision]) -> (&'static Row, World) {
    let mut world = world();
    world.revisions = revisions.to_vec();
    let newest = revisions.last().map(|newest| newest.revision);
    world.memory.locked = newest.map(|newest| (newest, BootTime::default()));
    let rows: Vec<&Row> =
        world.with_state(|state| TABLE.iter().filter(|row| (row.matches)(state)).collect());
    assert_eq!(rows.len(), 1, "{revisions:?}");
    (rows[0], world)
}

fn is_action_for(remedy: Remedy, action: &Action) -> bool {
    match remedy {
        Remedy::Compare | Remedy::ReportOnly | Remedy::SetAside => *action == Action::Nothing,
        Remedy::Apply => matches!(action, Action::Helm(_)),
        Remedy::InstallAgain => *action == Action::InstallAgain,
        Remedy::Unlock | Remedy::BreakLock => matches!(action, Action::Unlock { .. }),
        Remedy::Uninstall => *action == Action::Uninstall,
        Remedy::CleanUp => *action == Action::DeleteWorkspace,
    }
}

#[test]
fn each_release_state_has_exactly_one_row() {
    let case = |status, run: &str| {
        let revision = Revision {
            run: Some(run.to_owned()),
            ..world().own_revision(1, status)
        };
        (Some(status), vec![revision])
    };
    let upgrades = Status::ALL.map(|status| case(status, "upgrade-1"));
    let installs = Status::ALL.map(|status| case(status, "install-1"));
    let cases = upgrades.into_iter().chain(installs).chain([(None, vec![])]);
    for (status, revisions) in cases {
        let (row, world) = row(&revisions);
        let status = status.map_or("(no revision)", Status::as_str);
        assert!(row.name.starts_with(status), "{status}");
        let action = world.plan().action;
        assert!(is_action_for(row.present, &action), "{status}: {action:?}");
        let action = world.deleted().plan().action;
        assert!(is_action_for(row.deleted, &action), "{status}: {action:?}");
    }
}

#[test]
fn no_row_uninstalls_present_tenant() {
    for row in &TABLE {
        let removes = [Remedy::Uninstall, Remedy::CleanUp].contains(&row.present);
        assert!(!removes, "{}", row.name);
    }
}

proptest! {
    #[test]
    fn missing_older_revision_does_not_change_state(
        history in prop::collection::vec((prop::sample::select(Status::ALL.to_vec()), 0..3_u8), 1..6),
        missing in any::<prop::sample::Index>(),
    ) {
        let mut revisions: Vec<Revision> = (1..).zip(&history).map(|(number, (status, run))| {
            let own = format!("{}-{number}", if *run == 1 { "install" } else { "upgrade" });
            Revision { run: (*run > 0).then_some(own), ..foreign_revision(number, *status) }
        }).collect();
        let expected = row(&revisions).0.name;
        let at = missing.index(revisions.len());
        if at + 1 < revisions.len() && revisions[at].status != Status::Deployed {
            revisions.remove(at);
            prop_assert_eq!(row(&revisions).0.name, expected);
        }
    }
}

#[test]
fn the_page_shows_the_table() {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/explanation/repair.md");
    check_part(&page, &markdown()).unwrap();
}
