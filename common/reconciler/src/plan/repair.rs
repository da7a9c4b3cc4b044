//! The repair table: the states of a release, and Krypton's action in each. `docs/explanation/repair.md` shows it.

use krypton_helm::releases::Status;
use krypton_helm::releases::labels::INSTALL_RUN;
use krypton_helm::releases::revision::Revision;

/// State of a release by its newest revision, as Helm itself sees it. A missing older revision changes nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Found {
    Absent,
    Deployed,
    PendingInstall,
    PendingUpgrade,
    PendingRollback,
    Uninstalling,
    /// The newest revision failed, and it was an installation: no revision was ever deployed.
    FailedInstall,
    Failed,
    Superseded,
    Uninstalled,
    Unknown,
    /// Neither Krypton nor Helm can decode the newest Secret. Labels don't show that, so Krypton detects it on a
    /// read.
    Unreadable,
}

/// Krypton's action for a state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Remedy {
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
    fn words(self) -> &'static str {
        match self {
            Self::Compare => "nothing; `helm upgrade --install` when it is not as desired",
            Self::Apply => "`helm upgrade --install`",
            Self::InstallAgain => "`helm install --replace`",
            Self::Unlock => "mark it failed, then as for that",
            Self::BreakLock => "once nobody can be at it, mark it failed, then as for that",
            Self::Uninstall => "`helm uninstall`",
            Self::LetGo => "let go",
            Self::SetAside => "set the Secret aside, then as for the revision before",
            Self::Ask => "leave it alone, and say so",
        }
    }
}

/// One row of the table.
#[derive(Clone, Copy, Debug)]
pub struct Row {
    pub found: Found,
    /// The newest revision's label `status`, or a description if the label is not sufficient.
    pub name: &'static str,
    /// Cause of the state.
    pub cause: &'static str,
    /// Remedy for a Tenant that is not deleted.
    pub present: Remedy,
    /// Remedy for a deleted Tenant.
    pub deleted: Remedy,
    /// Guarantee that holds until the remedy is complete.
    pub promise: &'static str,
}

/// The repair table, with one row for each state.
pub const TABLE: [Row; 12] = [
    Row {
        found: Found::Absent,
        name: "(no revision)",
        cause: "not installed yet; or all Secrets were deleted by hand",
        present: Remedy::Apply,
        deleted: Remedy::LetGo,
        promise: "objects that carry the release's name are taken over, not made anew",
    },
    Row {
        found: Found::Deployed,
        name: "deployed",
        cause: "helm ended well",
        present: Remedy::Compare,
        deleted: Remedy::Uninstall,
        promise: "as desired: no request and no helm run",
    },
    Row {
        found: Found::PendingInstall,
        name: "pending-install",
        cause: "helm died in an installation",
        present: Remedy::BreakLock,
        deleted: Remedy::Uninstall,
        promise: "what it has made stays",
    },
    Row {
        found: Found::PendingUpgrade,
        name: "pending-upgrade",
        cause: "helm died in an upgrade",
        present: Remedy::BreakLock,
        deleted: Remedy::Uninstall,
        promise: "the revision before stays deployed and keeps serving",
    },
    Row {
        found: Found::PendingRollback,
        name: "pending-rollback",
        cause: "a `helm rollback` died, ours or a person's, or a hook of it failed",
        present: Remedy::BreakLock,
        deleted: Remedy::Uninstall,
        promise: "as for pending-upgrade",
    },
    Row {
        found: Found::Uninstalling,
        name: "uninstalling",
        cause: "`helm uninstall` died, or a hook of it failed",
        present: Remedy::BreakLock,
        deleted: Remedy::Uninstall,
        promise: "of a Tenant that is to be there nothing more is removed: what is gone is made again",
    },
    Row {
        found: Found::FailedInstall,
        name: "failed (installation)",
        cause: "an installation of ours failed or died; nothing was ever deployed",
        present: Remedy::InstallAgain,
        deleted: Remedy::Uninstall,
        promise: "pre-install and post-install hooks run again; nothing is uninstalled, objects stay the same",
    },
    Row {
        found: Found::Failed,
        name: "failed",
        cause: "an upgrade or rollback failed or died",
        present: Remedy::Apply,
        deleted: Remedy::Uninstall,
        promise: "the revision before keeps serving",
    },
    Row {
        found: Found::Superseded,
        name: "superseded",
        cause: "the newest Secret was deleted by hand; or helm died between its last two writes",
        present: Remedy::Unlock,
        deleted: Remedy::Uninstall,
        promise: "what runs stays",
    },
    Row {
        found: Found::Uninstalled,
        name: "uninstalled",
        cause: "a person's `helm uninstall --keep-history`",
        present: Remedy::Apply,
        deleted: Remedy::Uninstall,
        promise: "installed anew, with its hooks",
    },
    Row {
        found: Found::Unknown,
        name: "unknown, or any other word",
        cause: "a helm that is newer than Krypton",
        present: Remedy::Ask,
        deleted: Remedy::Uninstall,
        promise: "what runs stays",
    },
    Row {
        found: Found::Unreadable,
        name: "(cannot be decoded)",
        cause: "the newest Secret is damaged: helm itself passes over it, and then stumbles on its name",
        present: Remedy::SetAside,
        deleted: Remedy::SetAside,
        promise: "only when helm says so too; what runs stays; where no other revision is left, a deletion \
                  waits and asks, since nobody knows what to remove",
    },
];

/// Returns the row of a state.
pub fn row(found: Found) -> &'static Row {
    let fits = |row: &&Row| row.found == found;
    TABLE.iter().find(fits).unwrap_or(&TABLE[0])
}

/// Renders the table as Markdown, as in `docs/explanation/repair.md`.
pub fn markdown() -> String {
    let mut text = String::from(
        "| newest revision | how it comes about | Tenant is to be there | Tenant is to go | promised |\n\
         | --- | --- | --- | --- | --- |\n",
    );
    for row in &TABLE {
        let cells = [
            row.name,
            row.cause,
            row.present.words(),
            row.deleted.words(),
            row.promise,
        ];
        text.push_str(&format!("| {} |\n", cells.join(" | ")));
    }
    text
}

/// Returns the state of a release with these `revisions`, oldest first.
pub fn found(revisions: &[&Revision]) -> Found {
    let Some(newest) = revisions.last() else {
        return Found::Absent;
    };
    match newest.status {
        Status::Deployed => Found::Deployed,
        Status::PendingInstall => Found::PendingInstall,
        Status::PendingUpgrade => Found::PendingUpgrade,
        Status::PendingRollback => Found::PendingRollback,
        Status::Uninstalling => Found::Uninstalling,
        Status::Failed if was_installing(revisions, newest) => Found::FailedInstall,
        Status::Failed => Found::Failed,
        Status::Superseded => Found::Superseded,
        Status::Uninstalled => Found::Uninstalled,
        Status::Unknown => Found::Unknown,
    }
}

/// Returns a failed attempt of Krypton whose leftovers have not been swept yet.
pub(super) fn unswept(revisions: &[&Revision]) -> Option<u32> {
    let (newest, older) = revisions.split_last()?;
    let failed = older.iter().find(|revision| {
        newest.status == Status::Deployed
            && revision.status == Status::Failed
            && revision.run.is_some()
            && !inherited(revisions, revision)
    });
    failed.map(|revision| revision.revision)
}

/// Returns the Go operator's or a user's revisions that Krypton adopted and has not swept yet, newest first. These
/// are the adopted revision and failed attempts on top of it.
pub fn adopted(revisions: &[&Revision]) -> Vec<u32> {
    let mut found = Vec::new();
    for revision in revisions.iter().rev() {
        // Krypton created this revision after the adoption.
        if revision.run.is_some() || found.len() >= UNSWEPT_MOST {
            continue;
        }
        if revision.is_foreign() {
            found.push(revision.revision);
        }
        // This revision already replaced all older ones.
        if revision.status != Status::Failed {
            break;
        }
    }
    found
}

/// Returns the newest revision of [`adopted`] if a Krypton run has upgraded it since.
pub(super) fn overtaken(revisions: &[&Revision]) -> Option<u32> {
    let newest = revisions.last()?;
    let ours = newest.run.is_some() && !inherited(revisions, newest);
    let upgraded = newest.status == Status::Deployed && ours;
    adopted(revisions).first().copied().filter(|_| upgraded)
}

/// Maximum number of failed attempts that Krypton keeps beyond the history limit.
const UNSWEPT_MOST: usize = 16;

/// Returns the failed attempts to forget, newest first, each with whether it alone declares an object. The candidates
/// are installations beyond the history limit and repeated upgrades.
///
/// Workloads may depend on such an object, so a bounded number of these attempts is kept. An attempt that cannot be
/// read (`None`) is kept too.
pub fn forgettable<T>(beyond: impl IntoIterator<Item = (T, Option<bool>)>) -> Vec<(T, bool)> {
    let mut kept = 0;
    let mut forgotten = Vec::new();
    for (attempt, alone) in beyond {
        match alone {
            Some(true) if kept < UNSWEPT_MOST => kept += 1,
            Some(alone) => forgotten.push((attempt, alone)),
            None => {}
        }
    }
    forgotten
}

/// Returns the number of revisions for Helm to keep while it applies the fingerprint `current`.
///
/// Beyond the limit, Helm keeps unswept failed attempts that have another fingerprint or were repeated. It also keeps
/// unswept adopted revisions and the last good revision. Helm drops the oldest revisions first, and spares only a
/// deployed one.
pub fn history(limit: u8, revisions: &[Revision], current: &str) -> u8 {
    let failed = failed_attempts(revisions);
    let repeated = repeated(revisions);
    let kept = |revision: &&Revision| {
        revision.fingerprint.as_deref() != Some(current) || repeated.contains(&revision.revision)
    };
    let more = match failed.iter().position(kept) {
        Some(oldest) => (failed.len() - oldest).min(UNSWEPT_MOST),
        None => 0,
    };
    let all: Vec<&Revision> = revisions.iter().collect();
    let since_good = match last_good(&all) {
        Some(good) if good.status == Status::Superseded => {
            let since = revisions.iter().filter(|it| it.revision >= good.revision);
            since.count() + 1
        }
        _ => 0,
    };
    let oldest = adopted(&all).last().copied();
    let back_to = oldest.and_then(|oldest| all.iter().position(|found| found.revision == oldest));
    // Count the revision that Helm is about to create, too.
    let adopted = back_to.map_or(0, |at| all.len() - at + 1);
    let adopted = adopted.min(usize::from(limit) + UNSWEPT_MOST);
    let kept = usize::from(limit) + more;
    u8::try_from(kept.max(since_good).max(adopted)).unwrap_or(u8::MAX)
}

/// Returns the revision to roll back to. If a rollback died at its end, Helm left no deployed revision. The revision
/// from which it rolled back carries a mark, and is skipped.
pub(super) fn last_good<'a>(revisions: &[&'a Revision]) -> Option<&'a Revision> {
    let left = |it: &Revision| it.rolled_back_by.is_some_and(|by| by > it.revision);
    let newest = |is: &dyn Fn(&Revision) -> bool| {
        let mut newest_first = revisions.iter().rev();
        newest_first.find(|it| is(it)).copied()
    };
    newest(&|it| it.status == Status::Deployed)
        .or_else(|| newest(&|it| it.status == Status::Superseded && !left(it)))
}

/// Returns the failed attempts that a newer one repeats. [`forgettable`] keeps an attempt that alone declares an
/// object.
pub fn repeated(revisions: &[Revision]) -> Vec<u32> {
    let failed = failed_attempts(revisions);
    let repeats = |(at, revision): (usize, &&Revision)| {
        let newer = failed.get(at + 1..).unwrap_or_default();
        let same = |other: &&Revision| other.fingerprint == revision.fingerprint;
        (revision.fingerprint.is_some() && newer.iter().any(same)).then_some(revision.revision)
    };
    failed.iter().enumerate().filter_map(repeats).collect()
}

/// Returns the failed attempts that have not been swept yet, oldest first.
fn failed_attempts(revisions: &[Revision]) -> Vec<&Revision> {
    let all: Vec<&Revision> = revisions.iter().collect();
    let unswept = |revision: &&&Revision| {
        revision.status == Status::Failed && revision.run.is_some() && !inherited(&all, revision)
    };
    all.iter().filter(unswept).copied().collect()
}

/// Whether the run that wrote this revision was an installation, and no revision has been deployed since. If that is
/// uncertain, the answer is no: the hooks of an installation may not suit a release that once ran.
fn was_installing(revisions: &[&Revision], revision: &Revision) -> bool {
    is_installations(revision)
        && !inherited(revisions, revision)
        && !revisions
            .iter()
            .any(|other| other.status == Status::Deployed)
}

fn is_installations(revision: &Revision) -> bool {
    let install = |run: &String| run.starts_with(INSTALL_RUN);
    revision.run.as_ref().is_some_and(install)
}

/// Whether a run after these revisions is an installation, because no revision was ever deployed. A revision that
/// Krypton unlocked may lack its run label, and then counts as deployed.
pub fn begins_anew<'a>(revisions: impl IntoIterator<Item = &'a Revision>) -> bool {
    let mut revisions = revisions.into_iter();
    revisions.all(|revision| match revision.status {
        Status::Deployed | Status::Superseded => false,
        Status::Uninstalled => true,
        _ => is_installations(revision),
    })
}

/// Whether the revision's run mark is a copy. Helm copies labels from one revision to the next, so a repeated mark
/// shows that a user ran Helm.
pub(super) fn inherited(revisions: &[&Revision], revision: &Revision) -> bool {
    revision.run.is_some()
        && revisions
            .iter()
            .any(|other| other.revision < revision.revision && other.run == revision.run)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use proptest::prelude::*;

    use super::*;

    fn revision(number: u32, status: Status, run: Option<&str>) -> Revision {
        Revision {
            revision: number,
            status,
            fingerprint: None,
            owner_uid: None,
            owner_namespace: None,
            run: run.map(str::to_owned),
            rolled_back_by: None,
            uid: format!("secret-{number}"),
            resource_version: "1".to_owned(),
            created: None,
        }
    }

    #[test]
    fn failed_installations_stay_bounded_over_500_failures() {
        // Each attempt declares an object with a random name.
        let mut failed: Vec<u32> = Vec::new();
        for number in 1..=500 {
            failed.insert(0, number);
            let beyond = failed.iter().skip(2).map(|number| (*number, Some(true)));
            let forgotten: Vec<u32> = forgettable(beyond).into_iter().map(|it| it.0).collect();
            failed.retain(|number| !forgotten.contains(number));
            assert!(failed.len() <= 2 + UNSWEPT_MOST);
        }
        assert_eq!(failed.first(), Some(&500));
        assert_eq!(failed.last(), Some(&483));
        let repeats = [(3, Some(false)), (2, None), (1, Some(true))];
        assert_eq!(forgettable(repeats), [(3, false)], "doubt forgets nothing");
    }

    #[test]
    fn history_keeps_unswept_failed_attempts_and_last_good() {
        let failed = |number, fingerprint: &str| Revision {
            fingerprint: Some(fingerprint.to_owned()),
            ..revision(number, Status::Failed, Some(&format!("u{number}")))
        };
        let deployed = revision(1, Status::Deployed, Some("u1"));
        let seen_to = Revision {
            run: None,
            ..failed(2, "a")
        };
        for (revisions, current, kept, repeats) in [
            (vec![], "a", 3, vec![]),
            (vec![deployed.clone()], "a", 3, vec![]),
            (vec![deployed.clone(), failed(2, "a")], "a", 3, vec![]),
            // A repeated attempt may have created other objects, so Helm must not drop it.
            (
                vec![deployed.clone(), failed(2, "a"), failed(3, "a")],
                "a",
                5,
                vec![2],
            ),
            // A run with another fingerprint must not drop the attempt.
            (vec![deployed.clone(), failed(2, "a")], "b", 4, vec![]),
            (
                vec![deployed.clone(), failed(2, "a"), failed(3, "b")],
                "b",
                5,
                vec![],
            ),
            (
                vec![
                    deployed.clone(),
                    failed(2, "a"),
                    failed(3, "b"),
                    failed(4, "b"),
                ],
                "b",
                6,
                vec![3],
            ),
            (vec![deployed, seen_to, failed(3, "b")], "b", 3, vec![]),
        ] {
            assert_eq!(history(3, &revisions, current), kept, "{revisions:?}");
            assert_eq!(repeated(&revisions), repeats, "{revisions:?}");
        }
        // Helm spares no revision here, because a rollback died after it had removed the deployed status.
        let left = Revision {
            rolled_back_by: Some(3),
            ..revision(2, Status::Superseded, Some("u2"))
        };
        let died = |number| revision(number, Status::Failed, None);
        let mut died = vec![
            revision(1, Status::Superseded, Some("u1")),
            left,
            died(3),
            died(4),
        ];
        let good = |all: &[Revision]| last_good(&all.iter().collect::<Vec<_>>()).unwrap().revision;
        assert_eq!(good(&died), 1);
        assert_eq!(history(3, &died, "b"), 5);
        died.push(revision(5, Status::Deployed, None));
        assert_eq!(good(&died), 5);
        assert_eq!(history(3, &died, "b"), 3);
        let many: Vec<Revision> = (0..200).map(|n| failed(n, &n.to_string())).collect();
        assert_eq!(history(3, &many, "x"), 19);
    }

    fn found_in(revisions: &[Revision]) -> Found {
        found(&revisions.iter().collect::<Vec<_>>())
    }

    #[test]
    fn each_release_state_has_exactly_one_row() {
        for status in Status::ALL {
            let found = found_in(&[revision(1, status, None)]);
            assert_eq!(row(found).found, found, "{status}");
            assert!(row(found).name.starts_with(status.as_str()), "{status}");
        }
        for one in &TABLE {
            let rows = TABLE.iter().filter(|row| row.found == one.found);
            assert_eq!(rows.count(), 1, "{}", one.name);
        }
    }

    #[test]
    fn no_row_uninstalls_present_tenant() {
        for row in &TABLE {
            let removes = [Remedy::Uninstall, Remedy::LetGo].contains(&row.present);
            assert!(!removes, "{}", row.name);
        }
    }

    #[test]
    fn install_is_repeated_only_before_first_deployment() {
        let (first, second) = (Some("install-1"), Some("install-2"));
        let failed = |number, run| revision(number, Status::Failed, run);
        assert_eq!(found_in(&[failed(1, first)]), Found::FailedInstall);
        assert_eq!(
            found_in(&[failed(1, first), failed(2, second)]),
            Found::FailedInstall
        );
        // Not failed installations: an unknown run, an upgrade, a manual rollback, and a run on a deployed release.
        assert_eq!(found_in(&[failed(1, None)]), Found::Failed);
        assert_eq!(found_in(&[failed(2, Some("upgrade-1"))]), Found::Failed);
        let by_hand = [revision(1, Status::Superseded, first), failed(2, first)];
        assert_eq!(found_in(&by_hand), Found::Failed);
        let runs = [revision(1, Status::Deployed, first), failed(2, second)];
        assert_eq!(found_in(&runs), Found::Failed);
    }

    #[test]
    fn run_after_possible_deployment_is_not_install() {
        let of = |status, run| revision(1, status, run);
        assert!(begins_anew(&[]));
        assert!(begins_anew(&[of(Status::Failed, Some("install-1"))]));
        assert!(begins_anew(&[of(Status::Uninstalled, None)]));
        for once_deployed in [
            of(Status::Failed, None),
            of(Status::Failed, Some("upgrade-1")),
            of(Status::Deployed, Some("install-1")),
            of(Status::Superseded, Some("install-1")),
        ] {
            let then = revision(2, Status::Failed, Some("install-2"));
            assert!(!begins_anew(&[once_deployed, then]));
        }
    }

    #[test]
    fn failed_attempt_is_swept_once_later_one_deploys() {
        let failed = revision(2, Status::Failed, Some("upgrade-2"));
        let deployed = revision(3, Status::Deployed, Some("upgrade-3"));
        let seen_to = revision(2, Status::Failed, None);
        assert_eq!(unswept(&[&failed, &deployed]), Some(2));
        assert_eq!(unswept(&[&failed]), None);
        assert_eq!(unswept(&[&seen_to, &deployed]), None);
        assert_eq!(unswept(&[&deployed]), None);
    }

    #[test]
    fn adopted_revision_is_swept_once_own_run_deploys() {
        let theirs = |number, status| revision(number, status, None);
        let ours = |number, status| revision(number, status, Some(&format!("upgrade-{number}")));
        let seen_to = |number| Revision {
            owner_uid: Some("uid-1".to_owned()),
            ..theirs(number, Status::Superseded)
        };
        let (deployed, superseded) = (Status::Deployed, Status::Superseded);
        for (revisions, found, sees_to, kept) in [
            (vec![], vec![], None, 3),
            (vec![ours(1, deployed)], vec![], None, 3),
            // Adopted, without a Krypton run since.
            (
                vec![theirs(1, superseded), theirs(2, deployed)],
                vec![2],
                None,
                3,
            ),
            (
                vec![
                    theirs(1, superseded),
                    theirs(2, superseded),
                    ours(3, deployed),
                ],
                vec![2],
                Some(2),
                3,
            ),
            (
                vec![theirs(1, superseded), seen_to(2), ours(3, deployed)],
                vec![],
                None,
                3,
            ),
            // A failed attempt is on top of the adopted revision.
            (
                vec![
                    theirs(1, superseded),
                    theirs(2, Status::Failed),
                    ours(3, deployed),
                ],
                vec![2, 1],
                Some(2),
                4,
            ),
            (
                vec![theirs(1, deployed), ours(2, Status::Failed)],
                vec![1],
                None,
                4,
            ),
            (
                vec![
                    theirs(1, superseded),
                    ours(2, superseded),
                    ours(3, superseded),
                    ours(4, deployed),
                ],
                vec![1],
                Some(1),
                5,
            ),
            // A user rolled back to the adopted revision, which now runs.
            (
                vec![
                    theirs(1, superseded),
                    ours(2, superseded),
                    theirs(3, deployed),
                ],
                vec![3],
                None,
                3,
            ),
        ] {
            let all: Vec<&Revision> = revisions.iter().collect();
            assert_eq!(adopted(&all), found, "{revisions:?}");
            assert_eq!(overtaken(&all), sees_to, "{revisions:?}");
            assert_eq!(history(3, &revisions, "a"), kept, "{revisions:?}");
        }
        let failed: Vec<Revision> = (1..=300).map(|n| theirs(n, Status::Failed)).collect();
        assert_eq!(
            adopted(&failed.iter().collect::<Vec<_>>()).len(),
            UNSWEPT_MOST
        );
        assert_eq!(history(3, &failed, "a"), 17);
    }

    proptest! {
        #[test]
        fn missing_older_revision_does_not_change_state(
            history in prop::collection::vec((prop::sample::select(Status::ALL.to_vec()), 0..3_u8), 1..6),
            missing in any::<prop::sample::Index>(),
        ) {
            let mut revisions: Vec<Revision> = (1..).zip(&history).map(|(number, (status, run))| {
                let own = format!("{}-{number}", if *run == 1 { "install" } else { "upgrade" });
                revision(number, *status, (*run > 0).then_some(own.as_str()))
            }).collect();
            let before = found_in(&revisions);
            let at = missing.index(revisions.len());
            if at + 1 < revisions.len() && revisions[at].status != Status::Deployed {
                revisions.remove(at);
                prop_assert_eq!(found_in(&revisions), before);
            }
        }
    }

    #[test]
    fn the_page_shows_the_table() {
        let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/explanation/repair.md");
        let text = std::fs::read_to_string(&page).unwrap();
        let (begin, end) = ("<!-- table -->\n", "<!-- end of the table -->\n");
        let (before, rest) = text.split_once(begin).unwrap();
        let (shown, after) = rest.split_once(end).unwrap();
        if std::env::var_os("WRITE_DOCS").is_some() {
            let now = format!("{before}{begin}{}{end}{after}", markdown());
            std::fs::write(&page, now).unwrap();
        } else {
            assert_eq!(shown, markdown(), "WRITE_DOCS=1 writes it anew");
        }
    }
}
