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
    LetGo,
    /// Keep a copy of the Secret under another name and delete the Secret. Then continue as for the previous
    /// revision.
    SetAside,
    /// Leave the release unchanged, and report in a condition how to inspect it.
    Ask,
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
            Self::LetGo => "delete the workspace, remove the finalizer",
            Self::SetAside => {
                "keep a copy of the Secret and delete it, then as for the previous revision"
            }
            Self::Ask => "nothing; a condition reports it",
        }
    }
}

/// One row of the table.
struct Row {
    /// Whether a state belongs to this row, while no removal is due.
    is: fn(&ReleaseState<'_>) -> bool,
    /// The newest revision's label `status`, or a description if the label is not sufficient.
    name: &'static str,
    /// Cause of the state.
    cause: &'static str,
    /// Remedy for a Tenant that is not deleted.
    present: Remedy,
    /// Remedy for a deleted Tenant.
    deleted: Remedy,
    /// Guarantee that holds until the remedy is complete.
    promise: &'static str,
}

fn is_deployed(is: &ReleaseState<'_>) -> bool {
    let unsettled = matches!(
        is,
        ReleaseState::Unread(_) | ReleaseState::Unrecorded | ReleaseState::OutOfDate
    );
    unsettled || is.rollout().is_some()
}

fn is_locked(is: &ReleaseState<'_>, status: Status) -> bool {
    matches!(
        is,
        ReleaseState::StaleLock(newest) | ReleaseState::Locked { newest, .. } if newest.status == status
    )
}

/// The repair table, with one row for each state.
const TABLE: [Row; 12] = [
    Row {
        is: |is| matches!(is, ReleaseState::Absent),
        name: "(no revision)",
        cause: "not installed yet, or a user deleted all Secrets",
        present: Remedy::Apply,
        deleted: Remedy::LetGo,
        promise: "Krypton adopts existing objects with the release's name and does not recreate them",
    },
    Row {
        is: is_deployed,
        name: "deployed",
        cause: "Helm succeeded",
        present: Remedy::Compare,
        deleted: Remedy::Uninstall,
        promise: "in the desired state: no request and no Helm run",
    },
    Row {
        is: |is| is_locked(is, Status::PendingInstall),
        name: "pending-install",
        cause: "Helm died during an installation",
        present: Remedy::BreakLock,
        deleted: Remedy::Uninstall,
        promise: "created objects stay",
    },
    Row {
        is: |is| is_locked(is, Status::PendingUpgrade),
        name: "pending-upgrade",
        cause: "Helm died during an upgrade",
        present: Remedy::BreakLock,
        deleted: Remedy::Uninstall,
        promise: "the previous revision stays deployed and keeps serving",
    },
    Row {
        is: |is| is_locked(is, Status::PendingRollback),
        name: "pending-rollback",
        cause: "`helm rollback` of Krypton or a user died, or one of its hooks failed",
        present: Remedy::BreakLock,
        deleted: Remedy::Uninstall,
        promise: "as for `pending-upgrade`",
    },
    Row {
        is: |is| is_locked(is, Status::Uninstalling),
        name: "uninstalling",
        cause: "`helm uninstall` died, or one of its hooks failed",
        present: Remedy::BreakLock,
        deleted: Remedy::Uninstall,
        promise: "for an existing Tenant: nothing more is deleted, and missing objects are recreated",
    },
    Row {
        is: |is| matches!(is, ReleaseState::FailedInstall),
        name: "failed (installation)",
        cause: "Krypton's installation failed or died, and no revision was ever deployed",
        present: Remedy::InstallAgain,
        deleted: Remedy::Uninstall,
        promise: "pre-install and post-install hooks run again, nothing is uninstalled, and objects stay",
    },
    Row {
        is: |is| matches!(is, ReleaseState::Failed),
        name: "failed",
        cause: "an upgrade or rollback failed or died",
        present: Remedy::Apply,
        deleted: Remedy::Uninstall,
        promise: "the previous revision keeps serving",
    },
    Row {
        is: |is| matches!(is, ReleaseState::Superseded(_)),
        name: "superseded",
        cause: "a user deleted the newest Secret, or Helm died between its last two writes",
        present: Remedy::Unlock,
        deleted: Remedy::Uninstall,
        promise: "workloads keep running",
    },
    Row {
        is: |is| matches!(is, ReleaseState::Uninstalled),
        name: "uninstalled",
        cause: "a user ran `helm uninstall --keep-history`",
        present: Remedy::Apply,
        deleted: Remedy::Uninstall,
        promise: "installed again, with hooks",
    },
    Row {
        is: |is| matches!(is, ReleaseState::Unknown(_)),
        name: "unknown, or any other status",
        cause: "a Helm version that is newer than Krypton",
        present: Remedy::Ask,
        deleted: Remedy::Uninstall,
        promise: "workloads keep running",
    },
    Row {
        is: |_| false,
        name: "(cannot be decoded)",
        cause: "the newest Secret is damaged: Helm skips it and then fails on its name",
        present: Remedy::SetAside,
        deleted: Remedy::SetAside,
        promise: "only if Helm cannot decode it either. Workloads keep running. If no other revision is left, a \
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
            row.promise,
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
    let rows: Vec<&Row> = world.state(|is| TABLE.iter().filter(|row| (row.is)(is)).collect());
    assert_eq!(rows.len(), 1, "{revisions:?}");
    (rows[0], world)
}

fn fits(remedy: Remedy, action: &Action) -> bool {
    match remedy {
        Remedy::Compare | Remedy::Ask | Remedy::SetAside => *action == Action::Nothing,
        Remedy::Apply => matches!(action, Action::Helm(_)),
        Remedy::InstallAgain => *action == Action::InstallAgain,
        Remedy::Unlock | Remedy::BreakLock => matches!(action, Action::Unlock { .. }),
        Remedy::Uninstall => *action == Action::Uninstall,
        Remedy::LetGo => *action == Action::DeleteWorkspace,
    }
}

#[test]
fn each_release_state_has_exactly_one_row() {
    let of = |status, run: &str| {
        let revision = Revision {
            run: Some(run.to_owned()),
            ..world().ours(1, status)
        };
        (Some(status), vec![revision])
    };
    let upgrades = Status::ALL.map(|status| of(status, "upgrade-1"));
    let installs = Status::ALL.map(|status| of(status, "install-1"));
    let all = upgrades.into_iter().chain(installs).chain([(None, vec![])]);
    for (status, revisions) in all {
        let (row, world) = row(&revisions);
        let status = status.map_or("(no revision)", Status::as_str);
        assert!(row.name.starts_with(status), "{status}");
        let action = world.plan().action;
        assert!(fits(row.present, &action), "{status}: {action:?}");
        let action = world.deleted().plan().action;
        assert!(fits(row.deleted, &action), "{status}: {action:?}");
    }
}

#[test]
fn no_row_uninstalls_present_tenant() {
    for row in &TABLE {
        let removes = [Remedy::Uninstall, Remedy::LetGo].contains(&row.present);
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
            Revision { run: (*run > 0).then_some(own), ..world().foreign(number, *status) }
        }).collect();
        let before = row(&revisions).0.name;
        let at = missing.index(revisions.len());
        if at + 1 < revisions.len() && revisions[at].status != Status::Deployed {
            revisions.remove(at);
            prop_assert_eq!(row(&revisions).0.name, before);
        }
    }
}

#[test]
fn the_page_shows_the_table() {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/explanation/repair.md");
    check_part(&page, &markdown()).unwrap();
}
