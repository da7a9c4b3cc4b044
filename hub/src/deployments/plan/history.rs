//! `status.history` of a KryptonDeployment, from the recorded history and the members' reports.
//!
//! Without a report, the recorded entries stay. With the same reports, the history stops to change after a few
//! decisions, because each status write would otherwise cause another one.

use std::sync::Arc;

use krypton_crds::krypton_deployment::Placement;
use krypton_crds::tenant::{HISTORY_MAX, HistoryEntry};
use krypton_reconciler::plan::deployment_history;
use krypton_types::deployment::ReportedRevisions;
use krypton_types::names;

use super::{DeploymentView, Site};

/// The reports from which a history is derived, by cluster. Otherwise, it depends only on the object.
pub(in crate::deployments) type HistorySources = Vec<(Placement, Option<Arc<ReportedRevisions>>)>;

impl DeploymentView<'_> {
    pub(in crate::deployments) fn history_sources(&self) -> HistorySources {
        let sites = self.sites.iter().chain(self.target.as_ref().ok());
        let sources = sites.map(|site| (site.placement.clone(), self.revisions_on(site)));
        sources.collect()
    }

    /// Returns the history. New revisions come first, and the other entries keep their order: the hub cannot compare
    /// the times of different clusters, because their clocks differ.
    pub(super) fn history(&self) -> Vec<HistoryEntry> {
        let status = self.object.status.as_ref();
        let mut history = status.map_or_else(Vec::new, |status| status.history.clone());
        if self.is_history_settled {
            return history;
        }
        let target = self.target.as_ref().ok();
        let target_uid = target.map(|target| &target.placement.cluster_uid);
        let is_target = |site: &&Site| Some(&site.placement.cluster_uid) == target_uid;
        let others = || self.sites.iter().filter(|site| !is_target(site));
        // The member may have another name now. Another member may have its earlier name.
        let former = self.sites.iter().find(is_target).filter(|former| {
            others().all(|other| other.placement.cluster != former.placement.cluster)
        });
        if let Some((former, target)) = former.zip(target) {
            let (former, cluster) = (&former.placement.cluster, &target.placement.cluster);
            let is_former = |entry: &&mut HistoryEntry| entry.cluster.as_ref() == Some(former);
            for entry in history.iter_mut().filter(is_former) {
                entry.cluster = Some(cluster.clone());
            }
        }
        let newest_on = history.first().and_then(|newest| newest.cluster.clone());
        for site in others() {
            self.add_revisions(site, None, &mut history);
        }
        // Last, because later additions come first.
        if let Some(target) = target {
            let has_moved = newest_on.is_some_and(|newest| newest != target.placement.cluster);
            self.add_revisions(target, Some(has_moved), &mut history);
        }
        history.truncate(HISTORY_MAX);
        history
    }

    /// Updates the entries of one cluster. Reported revisions older than these entries come last, because the history
    /// was perhaps too short for them. For the target, `has_moved` is whether the newest entry is on another cluster.
    fn add_revisions(&self, site: &Site, has_moved: Option<bool>, history: &mut Vec<HistoryEntry>) {
        let Some(revisions) = self.revisions_on(site) else {
            return;
        };
        let cluster = &site.placement.cluster;
        let is_here = |entry: &HistoryEntry| entry.cluster.as_ref() == Some(cluster);
        let here = history.iter().filter(|entry| is_here(entry));
        let here: Vec<HistoryEntry> = here.cloned().collect();
        let metadata = &self.object.metadata;
        let mut entries = deployment_history(&here, &revisions, metadata, has_moved == Some(true));
        for entry in &mut entries {
            entry.cluster = Some(cluster.clone());
        }
        let is_same = |entry: &HistoryEntry, other: &HistoryEntry| {
            (entry.revision, &entry.time) == (other.revision, &other.time)
        };
        let new_count = match here.first() {
            Some(newest) => entries.iter().position(|entry| is_same(entry, newest)),
            None => has_moved.is_none().then_some(0),
        };
        let mut known = entries
            .split_off(new_count.unwrap_or(entries.len()))
            .into_iter();
        for entry in std::mem::take(history) {
            if is_here(&entry) {
                entries.extend(known.next());
            } else {
                entries.push(entry);
            }
        }
        entries.extend(known);
        *history = entries;
    }

    /// Returns the revisions on a cluster. `None` if the recorded entries stay.
    fn revisions_on(&self, site: &Site) -> Option<Arc<ReportedRevisions>> {
        let stored = self.report_on(site).filter(|stored| stored.is_current)?;
        if stored.report.gone {
            // The member may have kept the release.
            if self.is_orphaned() {
                return None;
            }
            let none = ReportedRevisions::new(names::AGENT_MANAGER, Vec::new());
            return Some(Arc::new(none));
        }
        stored.report.revisions.clone()
    }
}
