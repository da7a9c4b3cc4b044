//! The history of a KryptonDeployment. The member reports Helm's revisions. The hub derives the history, because the
//! recorded one and the managed fields are on the home cluster.

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use krypton_crds::tenant::{HISTORY_MAX, HistoryEntry};
use krypton_helm::releases::revision::Revision;
use krypton_types::deployment::{ReportedChart, ReportedRevision, ReportedRevisions};

use super::actors::Actors;
use super::{RevisionChart, history_after, newest_chart};
use crate::plan::ownership::{Ownership, ownership};
use crate::plan::view::View;

/// Returns the revisions to report for a KryptonDeployment. `None` for a Tenant, and whenever a Tenant's history does
/// not change: the earlier report stays.
pub(in crate::plan) fn reported_revisions(
    view: &View<'_>,
    may_change: bool,
) -> Option<Vec<ReportedRevision>> {
    view.owner.deployment()?;
    let is_own = matches!(ownership(view), Ownership::Free | Ownership::Mine);
    if !may_change || !is_own {
        return None;
    }
    let newest_chart = newest_chart(view);
    let newest_first = view.revisions.iter().rev().take(HISTORY_MAX);
    let reported = newest_first.map(|revision| {
        let chart = newest_chart.filter(|(newest, _)| *newest == revision.revision);
        ReportedRevision {
            revision: revision.revision,
            created: revision.created.map(Timestamp::as_second),
            status: revision.status.as_str().to_owned(),
            fingerprint: revision.fingerprint.clone(),
            owner_uid: revision.owner_uid.clone(),
            run: revision.run.clone(),
            rolled_back_by: revision.rolled_back_by,
            chart: chart.map(|(_, chart)| ReportedChart {
                name: chart.name.to_owned(),
                version: chart.version.to_owned(),
                is_read: chart.is_read,
            }),
        }
    });
    Some(reported.collect())
}

/// Returns the history of the release on one cluster, newest first. `recorded` are the entries of this cluster, and
/// `metadata` is that of the KryptonDeployment, with its managed fields. `has_moved` is true if the newest recorded
/// entry of all clusters is on another one.
pub fn deployment_history(
    recorded: &[HistoryEntry],
    reported: &ReportedRevisions,
    metadata: &ObjectMeta,
    has_moved: bool,
) -> Vec<HistoryEntry> {
    let newest_first = reported.newest_first();
    let revisions: Vec<Revision> = newest_first.iter().rev().map(revision).collect();
    let revisions: Vec<&Revision> = revisions.iter().collect();
    let charts = newest_first.iter().filter_map(|revision| {
        let chart = revision.chart.as_ref()?;
        let chart = RevisionChart {
            name: &chart.name,
            version: &chart.version,
            is_read: chart.is_read,
        };
        Some((revision.revision, chart))
    });
    let charts: Vec<_> = charts.collect();
    let actors = Actors::of_deployment(metadata, reported.program(), has_moved);
    history_after(recorded, &revisions, &charts, &actors)
}

fn revision(reported: &ReportedRevision) -> Revision {
    // The API server rejects a status with a negative year.
    let second = reported.created.filter(|second| *second >= 0);
    Revision {
        revision: reported.revision,
        status: reported.status.parse().unwrap_or_default(),
        fingerprint: reported.fingerprint.clone(),
        owner_uid: reported.owner_uid.clone(),
        owner_namespace: None,
        run: reported.run.clone(),
        rolled_back_by: reported.rolled_back_by,
        uid: String::new(),
        resource_version: String::new(),
        created: second.and_then(|second| Timestamp::from_second(second).ok()),
    }
}

#[cfg(test)]
mod tests;
