//! Facts that follow from all revisions of a release: leftovers, the history to keep, and the last good revision.

use krypton_helm::releases::Status;
use krypton_helm::releases::labels::INSTALL_RUN;
use krypton_helm::releases::revision::Revision;

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
pub(crate) fn adopted(revisions: &[&Revision]) -> Vec<u32> {
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
pub(crate) fn forgettable<T>(
    beyond: impl IntoIterator<Item = (T, Option<bool>)>,
) -> Vec<(T, bool)> {
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
pub(crate) fn history(limit: u8, revisions: &[Revision], current: &str) -> u8 {
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
pub(crate) fn repeated(revisions: &[Revision]) -> Vec<u32> {
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
pub(super) fn was_installing(revisions: &[&Revision], revision: &Revision) -> bool {
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
pub(crate) fn is_first_install<'a>(revisions: impl IntoIterator<Item = &'a Revision>) -> bool {
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

    #[test]
    fn install_is_repeated_only_before_first_deployment() {
        let (first, second) = (Some("install-1"), Some("install-2"));
        let failed = |number, run| revision(number, Status::Failed, run);
        let by_hand = vec![revision(1, Status::Superseded, first), failed(2, first)];
        let deployed = vec![revision(1, Status::Deployed, first), failed(2, second)];
        for (revisions, repeated) in [
            (vec![failed(1, first)], true),
            (vec![failed(1, first), failed(2, second)], true),
            // An unknown run, an upgrade, a manual rollback, and a run on a deployed release.
            (vec![failed(1, None)], false),
            (vec![failed(2, Some("upgrade-1"))], false),
            (by_hand, false),
            (deployed, false),
        ] {
            let all: Vec<&Revision> = revisions.iter().collect();
            let newest = all[all.len() - 1];
            assert_eq!(was_installing(&all, newest), repeated, "{revisions:?}");
        }
    }

    #[test]
    fn run_after_possible_deployment_is_not_install() {
        let of = |status, run| revision(1, status, run);
        assert!(is_first_install(&[]));
        assert!(is_first_install(&[of(Status::Failed, Some("install-1"))]));
        assert!(is_first_install(&[of(Status::Uninstalled, None)]));
        for once_deployed in [
            of(Status::Failed, None),
            of(Status::Failed, Some("upgrade-1")),
            of(Status::Deployed, Some("install-1")),
            of(Status::Superseded, Some("install-1")),
        ] {
            let then = revision(2, Status::Failed, Some("install-2"));
            assert!(!is_first_install(&[once_deployed, then]));
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
}
