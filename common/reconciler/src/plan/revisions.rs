//! Facts that follow from all revisions of a release: leftovers, the history to keep, and the last good revision.

use krypton_helm::releases::Status;
use krypton_helm::releases::labels::INSTALL_RUN;
use krypton_helm::releases::revision::Revision;

/// Returns a failed attempt of Krypton whose leftovers have not been swept yet.
pub(super) fn unswept_attempt(revisions: &[&Revision]) -> Option<u32> {
    let (newest, older) = revisions.split_last()?;
    let failed = older.iter().find(|revision| {
        newest.status == Status::Deployed
            && revision.status == Status::Failed
            && is_own_run(revisions, revision)
    });
    failed.map(|revision| revision.revision)
}

/// Returns the Go operator's or a user's revisions that Krypton adopted and has not swept yet, newest first. These
/// are the adopted revision and failed attempts on top of it.
pub(crate) fn adopted(revisions: &[&Revision]) -> Vec<u32> {
    let mut adopted = Vec::new();
    for revision in revisions.iter().rev() {
        // Krypton created this revision after the adoption.
        if revision.run.is_some() || adopted.len() >= MAX_UNSWEPT {
            continue;
        }
        if revision.is_foreign() {
            adopted.push(revision.revision);
        }
        // This revision already replaced all older ones.
        if revision.status != Status::Failed {
            break;
        }
    }
    adopted
}

/// Returns the newest revision of [`adopted`] if a Krypton run has upgraded it since.
pub(super) fn upgraded_adoption(revisions: &[&Revision]) -> Option<u32> {
    let newest = revisions.last()?;
    let is_upgraded = newest.status == Status::Deployed && is_own_run(revisions, newest);
    adopted(revisions).first().copied().filter(|_| is_upgraded)
}

/// Maximum number of failed attempts that Krypton keeps beyond the history limit.
const MAX_UNSWEPT: usize = 16;

/// Returns the failed attempts to forget, newest first, each with whether it alone declares an object. The candidates
/// are installations beyond the history limit and repeated upgrades.
///
/// Workloads may depend on such an object, so a bounded number of these attempts is kept. An attempt that cannot be
/// read (`None`) is kept too.
pub(crate) fn forgettable<T>(
    candidates: impl IntoIterator<Item = (T, Option<bool>)>,
) -> Vec<(T, bool)> {
    let mut kept = 0;
    let mut forgotten = Vec::new();
    for (attempt, is_only_declaration) in candidates {
        match is_only_declaration {
            Some(true) if kept < MAX_UNSWEPT => kept += 1,
            Some(is_only_declaration) => forgotten.push((attempt, is_only_declaration)),
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
pub(crate) fn history_limit(limit: u8, revisions: &[Revision], current: &str) -> u8 {
    let failed = failed_attempts(revisions);
    let repeated = repeated(revisions);
    let is_kept = |revision: &&Revision| {
        revision.fingerprint.as_deref() != Some(current) || repeated.contains(&revision.revision)
    };
    let extra = match failed.iter().position(is_kept) {
        Some(oldest) => (failed.len() - oldest).min(MAX_UNSWEPT),
        None => 0,
    };
    let all: Vec<&Revision> = revisions.iter().collect();
    let since_good = match last_good(&all) {
        Some(good) if good.status == Status::Superseded => {
            let newer = revisions
                .iter()
                .filter(|revision| revision.revision >= good.revision);
            newer.count() + 1
        }
        _ => 0,
    };
    let oldest = adopted(&all).last().copied();
    let oldest_at =
        oldest.and_then(|oldest| all.iter().position(|revision| revision.revision == oldest));
    // Count the revision that Helm is about to create, too.
    let adopted_count = oldest_at.map_or(0, |at| all.len() - at + 1);
    let adopted_count = adopted_count.min(usize::from(limit) + MAX_UNSWEPT);
    let count = usize::from(limit) + extra;
    u8::try_from(count.max(since_good).max(adopted_count)).unwrap_or(u8::MAX)
}

/// Returns the revision to roll back to. If a rollback died at its end, Helm left no deployed revision. The revision
/// from which it rolled back carries a mark, and is skipped.
pub(super) fn last_good<'a>(revisions: &[&'a Revision]) -> Option<&'a Revision> {
    let was_left = |revision: &Revision| {
        revision
            .rolled_back_by
            .is_some_and(|by| by > revision.revision)
    };
    let newest = |matches: &dyn Fn(&Revision) -> bool| {
        let mut newest_first = revisions.iter().rev();
        newest_first.find(|revision| matches(revision)).copied()
    };
    newest(&|revision| revision.status == Status::Deployed).or_else(|| {
        newest(&|revision| revision.status == Status::Superseded && !was_left(revision))
    })
}

/// Returns the failed attempts that a newer one repeats. [`forgettable`] keeps an attempt that alone declares an
/// object.
pub(crate) fn repeated(revisions: &[Revision]) -> Vec<u32> {
    let failed = failed_attempts(revisions);
    let repeated = |(at, revision): (usize, &&Revision)| {
        let newer = failed.get(at + 1..).unwrap_or_default();
        let is_same = |other: &&Revision| other.fingerprint == revision.fingerprint;
        (revision.fingerprint.is_some() && newer.iter().any(is_same)).then_some(revision.revision)
    };
    failed.iter().enumerate().filter_map(repeated).collect()
}

/// Returns the failed attempts that have not been swept yet, oldest first.
fn failed_attempts(revisions: &[Revision]) -> Vec<&Revision> {
    let all: Vec<&Revision> = revisions.iter().collect();
    let is_unswept =
        |revision: &&&Revision| revision.status == Status::Failed && is_own_run(&all, revision);
    all.iter().filter(is_unswept).copied().collect()
}

/// Whether the run that wrote this revision was an installation, and no revision has been deployed since. If that is
/// uncertain, the answer is no: the hooks of an installation may not suit a release that once ran.
pub(super) fn is_failed_install(revisions: &[&Revision], revision: &Revision) -> bool {
    is_install_run(revision)
        && !has_copied_run(revisions, revision)
        && !revisions
            .iter()
            .any(|other| other.status == Status::Deployed)
}

pub(super) fn is_install_run(revision: &Revision) -> bool {
    let is_install = |run: &String| run.starts_with(INSTALL_RUN);
    revision.run.as_ref().is_some_and(is_install)
}

/// Whether a run after these revisions is an installation, because no revision was ever deployed. A revision that
/// Krypton unlocked may lack its run label, and then counts as deployed.
pub(crate) fn is_first_install<'a>(revisions: impl IntoIterator<Item = &'a Revision>) -> bool {
    let mut revisions = revisions.into_iter();
    revisions.all(|revision| match revision.status {
        Status::Deployed | Status::Superseded => false,
        Status::Uninstalled => true,
        _ => is_install_run(revision),
    })
}

/// Whether the revision's run mark is a copy. Helm copies labels from one revision to the next, so a repeated mark
/// shows that a user ran Helm.
pub(super) fn has_copied_run(revisions: &[&Revision], revision: &Revision) -> bool {
    revision.run.is_some()
        && revisions
            .iter()
            .any(|other| other.revision < revision.revision && other.run == revision.run)
}

/// Whether an installation or upgrade by Krypton created the revision.
pub(super) fn is_own_run(revisions: &[&Revision], revision: &Revision) -> bool {
    revision.run.is_some() && !has_copied_run(revisions, revision)
}

/// Whether an older revision has the mark that Krypton rolled it back by this one.
pub(super) fn is_marked_as_rollback(revisions: &[&Revision], revision: &Revision) -> bool {
    revisions.iter().any(|older| {
        older.revision < revision.revision && older.rolled_back_by == Some(revision.revision)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::foreign_revision;

    fn revision(number: u32, status: Status, run: Option<&str>) -> Revision {
        Revision {
            run: run.map(str::to_owned),
            ..foreign_revision(number, status)
        }
    }

    #[test]
    fn failed_installations_stay_bounded_over_500_failures() {
        // Each attempt declares an object with a random name.
        let mut failed: Vec<u32> = Vec::new();
        for number in 1..=500 {
            failed.insert(0, number);
            let candidates = failed.iter().skip(2).map(|number| (*number, Some(true)));
            let forgotten: Vec<u32> = forgettable(candidates)
                .into_iter()
                .map(|(number, _)| number)
                .collect();
            failed.retain(|number| !forgotten.contains(number));
            assert!(failed.len() <= 2 + MAX_UNSWEPT);
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
        let swept = Revision {
            run: None,
            ..failed(2, "a")
        };
        for (revisions, current, expected_limit, expected_repeated) in [
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
            (vec![deployed, swept, failed(3, "b")], "b", 3, vec![]),
        ] {
            let limit = history_limit(3, &revisions, current);
            assert_eq!(limit, expected_limit, "{revisions:?}");
            assert_eq!(repeated(&revisions), expected_repeated, "{revisions:?}");
        }
        // Helm spares no revision here, because a rollback died after it had removed the deployed status.
        let rolled_back = Revision {
            rolled_back_by: Some(3),
            ..revision(2, Status::Superseded, Some("u2"))
        };
        let died = |number| revision(number, Status::Failed, None);
        let mut died = vec![
            revision(1, Status::Superseded, Some("u1")),
            rolled_back,
            died(3),
            died(4),
        ];
        let good = |all: &[Revision]| last_good(&all.iter().collect::<Vec<_>>()).unwrap().revision;
        assert_eq!(good(&died), 1);
        assert_eq!(history_limit(3, &died, "b"), 5);
        died.push(revision(5, Status::Deployed, None));
        assert_eq!(good(&died), 5);
        assert_eq!(history_limit(3, &died, "b"), 3);
        let many: Vec<Revision> = (0..200).map(|n| failed(n, &n.to_string())).collect();
        assert_eq!(history_limit(3, &many, "x"), 19);
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
            assert_eq!(is_failed_install(&all, newest), repeated, "{revisions:?}");
        }
    }

    #[test]
    fn run_after_possible_deployment_is_not_install() {
        let first = |status, run| revision(1, status, run);
        assert!(is_first_install(&[]));
        assert!(is_first_install(&[first(
            Status::Failed,
            Some("install-1")
        )]));
        assert!(is_first_install(&[first(Status::Uninstalled, None)]));
        for once_deployed in [
            first(Status::Failed, None),
            first(Status::Failed, Some("upgrade-1")),
            first(Status::Deployed, Some("install-1")),
            first(Status::Superseded, Some("install-1")),
        ] {
            let failed_install = revision(2, Status::Failed, Some("install-2"));
            assert!(!is_first_install(&[once_deployed, failed_install]));
        }
    }

    #[test]
    fn failed_attempt_is_swept_once_later_one_deploys() {
        let failed = revision(2, Status::Failed, Some("upgrade-2"));
        let deployed = revision(3, Status::Deployed, Some("upgrade-3"));
        let swept = revision(2, Status::Failed, None);
        assert_eq!(unswept_attempt(&[&failed, &deployed]), Some(2));
        assert_eq!(unswept_attempt(&[&failed]), None);
        assert_eq!(unswept_attempt(&[&swept, &deployed]), None);
        assert_eq!(unswept_attempt(&[&deployed]), None);
    }

    #[test]
    fn adopted_revision_is_swept_once_own_run_deploys() {
        let foreign = |number, status| revision(number, status, None);
        let own = |number, status| revision(number, status, Some(&format!("upgrade-{number}")));
        let swept = |number| Revision {
            owner_uid: Some("uid-1".to_owned()),
            ..foreign(number, Status::Superseded)
        };
        let (deployed, superseded) = (Status::Deployed, Status::Superseded);
        for (revisions, expected_adopted, expected_sweep, expected_limit) in [
            (vec![], vec![], None, 3),
            (vec![own(1, deployed)], vec![], None, 3),
            // Adopted, without a Krypton run since.
            (
                vec![foreign(1, superseded), foreign(2, deployed)],
                vec![2],
                None,
                3,
            ),
            (
                vec![
                    foreign(1, superseded),
                    foreign(2, superseded),
                    own(3, deployed),
                ],
                vec![2],
                Some(2),
                3,
            ),
            (
                vec![foreign(1, superseded), swept(2), own(3, deployed)],
                vec![],
                None,
                3,
            ),
            // A failed attempt is on top of the adopted revision.
            (
                vec![
                    foreign(1, superseded),
                    foreign(2, Status::Failed),
                    own(3, deployed),
                ],
                vec![2, 1],
                Some(2),
                4,
            ),
            (
                vec![foreign(1, deployed), own(2, Status::Failed)],
                vec![1],
                None,
                4,
            ),
            (
                vec![
                    foreign(1, superseded),
                    own(2, superseded),
                    own(3, superseded),
                    own(4, deployed),
                ],
                vec![1],
                Some(1),
                5,
            ),
            // A user rolled back to the adopted revision, which now runs.
            (
                vec![
                    foreign(1, superseded),
                    own(2, superseded),
                    foreign(3, deployed),
                ],
                vec![3],
                None,
                3,
            ),
        ] {
            let all: Vec<&Revision> = revisions.iter().collect();
            assert_eq!(adopted(&all), expected_adopted, "{revisions:?}");
            assert_eq!(upgraded_adoption(&all), expected_sweep, "{revisions:?}");
            let limit = history_limit(3, &revisions, "a");
            assert_eq!(limit, expected_limit, "{revisions:?}");
        }
        let failed: Vec<Revision> = (1..=300).map(|n| foreign(n, Status::Failed)).collect();
        let all: Vec<&Revision> = failed.iter().collect();
        assert_eq!(adopted(&all).len(), MAX_UNSWEPT);
        assert_eq!(history_limit(3, &failed, "a"), 17);
    }
}
