//! `status.history` of a KryptonDeployment, from the recorded history and the members' reports.
//!
//! Without a report, the recorded entries stay. A decision on the new history gives the same history, because each
//! status write would otherwise cause another one.

use krypton_crds::tenant::{HISTORY_MAX, HistoryEntry};
use krypton_reconciler::plan::deployment_history;

use super::{DeploymentView, Site};

impl DeploymentView<'_> {
    /// Returns the history. The entries of the target cluster come first, followed by the other clusters that have the
    /// release, and by earlier ones. Times of different clusters are not compared, because their clocks differ.
    pub(super) fn history(&self) -> Vec<HistoryEntry> {
        let status = self.object.status.as_ref();
        let mut recorded = status.map_or_else(Vec::new, |status| status.history.clone());
        let target = self.target.as_ref().ok();
        let target_uid = target.map(|target| &target.placement.cluster_uid);
        let is_target = |site: &&Site| Some(&site.placement.cluster_uid) == target_uid;
        // The member may have another name now.
        let former = self.sites.iter().find(is_target);
        if let Some((former, target)) = former.zip(target) {
            let (former, cluster) = (&former.placement.cluster, &target.placement.cluster);
            let is_former = |entry: &&mut HistoryEntry| entry.cluster.as_ref() == Some(former);
            for entry in recorded.iter_mut().filter(is_former) {
                entry.cluster = Some(cluster.clone());
            }
        }
        let others = self.sites.iter().filter(|site| !is_target(site));
        let mut history = Vec::new();
        for site in target.into_iter().chain(others) {
            let cluster = Some(&site.placement.cluster);
            let is_here = |entry: &HistoryEntry| entry.cluster.as_ref() == cluster;
            let (here, elsewhere) = recorded.into_iter().partition(is_here);
            history.extend(self.history_of(site, here));
            recorded = elsewhere;
        }
        history.extend(recorded);
        history.truncate(HISTORY_MAX);
        history
    }

    /// Returns the entries of one cluster.
    fn history_of(&self, site: &Site, recorded: Vec<HistoryEntry>) -> Vec<HistoryEntry> {
        let stored = self.report_on(site).filter(|stored| stored.is_current);
        let Some(revisions) = stored.and_then(|stored| stored.report.revisions.as_deref()) else {
            return recorded;
        };
        let mut history = deployment_history(&recorded, revisions, &self.object.metadata);
        for entry in &mut history {
            entry.cluster = Some(site.placement.cluster.clone());
        }
        history
    }
}
