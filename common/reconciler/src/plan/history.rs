//! The last revisions of a release, for the status of its Tenant or KryptonDeployment.
//!
//! The history depends only on the recorded history, Helm's revisions and the managed fields of the object, so a
//! restart does not change it. The history after itself is the same: otherwise, each status write would cause another
//! one. The hub derives the history of a KryptonDeployment (`deployment`), because its object is on the home cluster.

mod actors;
mod deployment;

use std::cmp::Reverse;

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use krypton_crds::tenant::{
    CHART_TEXT_MAX, HISTORY_MAX, HistoryEntry, RevisionCause, RevisionOutcome,
};
use krypton_helm::chart::exact_version;
use krypton_helm::releases::Status;
use krypton_helm::releases::revision::Revision;
use krypton_types::text::truncated;

pub use self::deployment::deployment_history;
pub(super) use self::deployment::reported_revisions;

use self::actors::Actors;
use super::ownership::{Ownership, ownership};
use super::revisions::{has_copied_run, is_install_run, is_marked_as_rollback, is_own_run};
use super::view::View;

/// Chart of a revision.
#[derive(Clone, Copy, Debug)]
struct RevisionChart<'a> {
    name: &'a str,
    version: &'a str,
    /// Whether Krypton has read it in the revision. Otherwise, it follows from the fingerprint.
    is_read: bool,
}

/// Returns the history for the Tenant's status; empty for a KryptonDeployment. It does not change while the release
/// belongs to another owner, nor between the announcement of a Helm run and its end (`may_change`).
pub(super) fn history(view: &View<'_>, may_change: bool) -> Vec<HistoryEntry> {
    let Some(tenant) = view.owner.tenant() else {
        return Vec::new();
    };
    let recorded = tenant.status.as_ref();
    let recorded = recorded
        .map(|status| status.history.as_slice())
        .unwrap_or_default();
    match ownership(view) {
        Ownership::Free | Ownership::Mine if may_change => {
            let actors = Actors::new(&tenant.metadata, view.program);
            let charts: Vec<_> = newest_chart(view).into_iter().collect();
            history_after(recorded, view.revisions, &charts, &actors)
        }
        _ => recorded.to_vec(),
    }
}

/// Returns the newest revision and its chart.
fn newest_chart<'v>(view: &'v View<'_>) -> Option<(u32, RevisionChart<'v>)> {
    let newest = view.newest()?;
    if let Some(release_details) = view.decoded(newest) {
        let chart = RevisionChart {
            name: &release_details.chart_name,
            version: &release_details.chart_version,
            is_read: true,
        };
        return Some((newest.revision, chart));
    }
    let chart = view.chart;
    let is_desired = newest.fingerprint.as_deref() == Some(view.fingerprint)
        && is_own_run(view.revisions, newest);
    // The path of an archive does not name its chart.
    let is_named = !chart.repo.is_empty() || chart.name.contains("://");
    let is_known = is_desired && is_named && exact_version(&chart.version).is_some();
    let chart = RevisionChart {
        name: chart.name.rsplit('/').next().unwrap_or_default(),
        version: &chart.version,
        is_read: false,
    };
    is_known.then_some((newest.revision, chart))
}

/// Returns the history, newest first: the revisions that Helm has (`revisions`, oldest first), then the recorded
/// entries of other revisions. Only the numbers order revisions, because clocks jump.
fn history_after(
    recorded: &[HistoryEntry],
    revisions: &[&Revision],
    charts: &[(u32, RevisionChart<'_>)],
    actors: &Actors<'_>,
) -> Vec<HistoryEntry> {
    let newest_first = || revisions.iter().rev().take(HISTORY_MAX).copied();
    let mut entries: Vec<HistoryEntry> = newest_first()
        .map(|revision| entry(recorded, revisions, revision))
        .collect();
    for entry in &mut entries {
        let chart = charts.iter().find(|(number, _)| *number == entry.revision);
        if let Some((_, chart)) = chart.filter(|(_, chart)| chart.is_read || entry.chart.is_none())
        {
            entry.chart = bounded_text(chart.name);
            entry.chart_version = bounded_text(chart.version);
        }
    }
    // Each entry may depend on older ones.
    for (at, revision) in newest_first().enumerate().rev() {
        let (newer, older) = entries.split_at_mut(at + 1);
        let Some(entry) = newer.last_mut() else {
            continue;
        };
        if entry.chart.is_none()
            && let Some(restored) = restored(revisions, revision, older)
        {
            entry.chart.clone_from(&restored.chart);
            entry.chart_version.clone_from(&restored.chart_version);
        }
        if entry.cause == RevisionCause::Unknown {
            entry.cause = cause(revisions, revision, entry, older.first());
            entry.by = actors.actor(entry.cause, recorded, revisions, revision);
        }
    }
    let is_gone = |entry: &&HistoryEntry| {
        !revisions
            .iter()
            .any(|revision| is_entry_of(entry, revision))
    };
    // Krypton and Helm also delete revisions between others. Entries of an earlier installation, with other numbers, follow.
    let (same_installation, earlier) = recorded.split_at(same_installation(recorded, is_gone));
    let gone = |part: &[HistoryEntry]| -> Vec<HistoryEntry> {
        part.iter().filter(&is_gone).map(without_revision).collect()
    };
    entries.extend(gone(same_installation));
    entries.sort_by_key(|entry| Reverse(entry.revision));
    entries.extend(gone(earlier));
    entries.truncate(HISTORY_MAX);
    entries
}

/// Returns the number of recorded entries of the installation that Helm has now. In one installation, the numbers decrease.
fn same_installation(recorded: &[HistoryEntry], is_gone: impl Fn(&&HistoryEntry) -> bool) -> usize {
    let pairs = recorded.iter().zip(recorded.iter().skip(1));
    let decreasing = pairs.take_while(|(newer, older)| newer.revision >= older.revision);
    let count = (decreasing.count() + 1).min(recorded.len());
    match recorded.iter().take(count).all(|entry| is_gone(&entry)) {
        true => 0,
        false => count,
    }
}

/// Returns the entry of a revision that Helm has. The recorded chart, cause and actor stay.
fn entry(recorded: &[HistoryEntry], revisions: &[&Revision], revision: &Revision) -> HistoryEntry {
    let recorded = recorded.iter().find(|entry| is_entry_of(entry, revision));
    let mut entry = recorded.cloned().unwrap_or_default();
    entry.revision = revision.revision;
    entry.time = created(revision);
    let outcome = outcome(revisions, revision);
    // Helm may have dropped the revisions that show the rollback.
    let stays_rolled_back = entry.outcome == RevisionOutcome::RolledBack
        && matches!(
            outcome,
            RevisionOutcome::Failed | RevisionOutcome::Superseded
        );
    if !stays_rolled_back {
        entry.outcome = outcome;
    }
    entry
}

/// Returns the entry of a revision that Helm no longer has.
fn without_revision(entry: &HistoryEntry) -> HistoryEntry {
    let mut entry = entry.clone();
    if matches!(
        entry.outcome,
        RevisionOutcome::Deployed | RevisionOutcome::Pending
    ) {
        entry.outcome = RevisionOutcome::Removed;
    }
    entry
}

fn outcome(revisions: &[&Revision], revision: &Revision) -> RevisionOutcome {
    let is_rolled_back = revisions.iter().any(|other| {
        other.revision > revision.revision
            && revision.rolled_back_by == Some(other.revision)
            && matches!(other.status, Status::Deployed | Status::Superseded)
            && is_rollback(revisions, other)
    });
    let is_replaced = revisions
        .iter()
        .any(|other| other.revision > revision.revision && other.status == Status::Deployed);
    match revision.status {
        Status::Failed | Status::Superseded if is_rolled_back => RevisionOutcome::RolledBack,
        // Helm changes the older one last.
        Status::Deployed if is_replaced => RevisionOutcome::Superseded,
        Status::Deployed => RevisionOutcome::Deployed,
        Status::Superseded => RevisionOutcome::Superseded,
        Status::Failed => RevisionOutcome::Failed,
        Status::Uninstalled => RevisionOutcome::Uninstalled,
        Status::Uninstalling
        | Status::PendingInstall
        | Status::PendingUpgrade
        | Status::PendingRollback => RevisionOutcome::Pending,
        Status::Unknown => RevisionOutcome::Unknown,
    }
}

/// Returns the cause of a revision, as far as the labels and the charts show it. `older` is the next older entry.
fn cause(
    revisions: &[&Revision],
    revision: &Revision,
    entry: &HistoryEntry,
    older: Option<&HistoryEntry>,
) -> RevisionCause {
    if is_rollback(revisions, revision) {
        return RevisionCause::Rollback;
    }
    if !is_own_run(revisions, revision) {
        // Krypton removes its own run label from revisions that it has swept or unlocked.
        return match revision.run.is_some() || revision.is_foreign() {
            true => RevisionCause::Helm,
            false => RevisionCause::Unknown,
        };
    }
    // Either Helm has dropped the revision that this one restored, or Krypton died before it rolled back.
    if is_marked_as_rollback(revisions, revision) {
        return RevisionCause::Unknown;
    }
    let Some(previous) = previous(revisions, revision) else {
        return match revision.revision == 1 && is_install_run(revision) {
            true => RevisionCause::Install,
            false => RevisionCause::Unknown,
        };
    };
    // Helm copies the fingerprint label to the revisions of other clients.
    let is_krypton = previous.fingerprint.is_some()
        && (is_rollback(revisions, previous) || !has_copied_run(revisions, previous));
    if previous.fingerprint.is_some() && previous.fingerprint == revision.fingerprint {
        return match is_krypton && previous.status == Status::Failed {
            true => RevisionCause::Retry,
            false => RevisionCause::Repair,
        };
    }
    let older = older.filter(|older| older.revision == previous.revision);
    match older.and_then(|older| is_same_chart(entry, older)) {
        Some(false) => RevisionCause::Chart,
        Some(true) if is_krypton => RevisionCause::Values,
        _ => RevisionCause::Unknown,
    }
}

/// Returns the revision before this one, unless Helm has dropped it.
fn previous<'r>(revisions: &[&'r Revision], revision: &Revision) -> Option<&'r Revision> {
    let number = revision.revision.checked_sub(1)?;
    let mut others = revisions.iter();
    others.find(|other| other.revision == number).copied()
}

/// Returns the entry that a rollback restored, if its chart is known. Helm copies its run label to the rollback.
fn restored<'a>(
    revisions: &[&Revision],
    revision: &Revision,
    older: &'a [HistoryEntry],
) -> Option<&'a HistoryEntry> {
    let is_restored = |entry: &&HistoryEntry| {
        entry.chart.is_some()
            && revisions.iter().any(|other| {
                other.revision == entry.revision && other.run.is_some() && other.run == revision.run
            })
    };
    older
        .iter()
        .find(is_restored)
        .filter(|_| is_rollback(revisions, revision))
}

/// Whether Krypton rolled back to create the revision.
fn is_rollback(revisions: &[&Revision], revision: &Revision) -> bool {
    is_marked_as_rollback(revisions, revision) && !is_own_run(revisions, revision)
}

/// Whether the charts are the same; `None` if one is unknown.
fn is_same_chart(a: &HistoryEntry, b: &HistoryEntry) -> Option<bool> {
    let has_same_name = a.chart.as_ref()? == b.chart.as_ref()?;
    // A desired version may have the prefix `v`.
    let version = |entry: &HistoryEntry| exact_version(entry.chart_version.as_deref()?);
    Some(has_same_name && version(a)? == version(b)?)
}

fn is_entry_of(entry: &HistoryEntry, revision: &Revision) -> bool {
    entry.revision == revision.revision && entry.time == created(revision)
}

/// Returns the time in whole seconds, as the status has it.
fn created(revision: &Revision) -> Option<Time> {
    let second = revision.created?.as_second();
    Timestamp::from_second(second).ok().map(Time)
}

/// Limits a text from a release Secret as the schema does.
fn bounded_text(text: &str) -> Option<String> {
    let text = truncated(text.to_owned(), CHART_TEXT_MAX);
    (!text.is_empty()).then_some(text)
}

#[cfg(test)]
mod tests;
