//! Updates the view with each observation: changes of objects, runs of Helm, and faults.

use std::sync::Arc;

use krypton_crds::krypton_deployment::KryptonDeployment;
use krypton_crds::tenant::Tenant;
use krypton_helm::releases::labels::OWNER_UID_LABEL;
use krypton_reconciler::backup::RECORD_LABEL;
use krypton_sim_apiserver::server::{Change, Key};
use krypton_types::names::{
    ORPHAN_ANNOTATION, PAUSED_ANNOTATION, SELF_CLUSTER, UNINSTALL_FINALIZER,
};
use kube::CustomResourceExt as _;
use serde_json::Value;

use super::{
    Phase, ReleaseOwner, Renewal, Run, View, agent_cluster, holder, is_placed_copy, is_product,
    restored_live,
};
use crate::faults::{REBUILD_WRITER, RESTORE_WRITER};
use crate::object::{annotation, has_finalizer, is_terminating, is_true, label, text};
use crate::observe::{Event, Observation};
use crate::oracles::AttributedWrite;
use crate::plan::{Action, FOREVER, HOME, ServerFault, Settings};
use crate::time::Millis;
use crate::user_client::PEOPLE;

/// Time in which a resumed machine finishes overdue work.
const RESUME_TIME: Millis = 1_000;

impl View {
    pub(in crate::oracles) fn enter_phase(&mut self, phase: Phase, at: Millis) {
        self.phase = phase;
        self.phase_start = at;
        self.advance(at);
    }

    pub(in crate::oracles) fn advance(&mut self, at: Millis) {
        self.now = self.now.max(at);
    }

    pub(in crate::oracles) fn observe(&mut self, observation: &Observation) {
        self.advance(observation.at);
        match &observation.event {
            Event::Change { cluster, change } => self.apply_change(cluster, change),
            Event::HelmStarted {
                run,
                host,
                arguments,
            } => {
                if let Some(parsed_run) = self.parse_helm_run(host, arguments) {
                    self.partly_restored.remove(&parsed_run.release);
                    self.helm_runs.insert(*run, parsed_run);
                }
            }
            Event::HelmEnded { run, .. } => drop(self.helm_runs.remove(run)),
            Event::Fault { .. } => self.record_fault(&observation.event),
            _ => {}
        }
    }

    fn apply_change(&mut self, cluster: &str, change: &Change) {
        let key = &change.key;
        if !differs_only_in_status(change.before.as_deref(), change.after.as_deref()) {
            self.last_changes
                .insert((cluster.to_owned(), key.clone()), self.now);
        }
        self.record_pauses(cluster, change);
        if self.was_never_reconciled(cluster, change) || self.was_never_placed(cluster, change) {
            self.wanted_tenants
                .remove(&(cluster.to_owned(), key.name.clone()));
        }
        let store = self.stores.entry(cluster.to_owned()).or_default();
        match &change.after {
            Some(after) => drop(store.insert(key.clone(), Arc::clone(after))),
            None => drop(store.remove(key)),
        }
        if key.resource == "deployments" {
            // Helm does not notice that a restore has removed what it has just created.
            let mut runs = self.helm_runs.values();
            let is_reverted = change.by == RESTORE_WRITER
                && runs.any(|run| {
                    run.cluster.as_deref() == Some(cluster) && run.namespace == key.namespace
                });
            let missing = self
                .missing_workloads
                .entry(cluster.to_owned())
                .or_default();
            match (&change.after, change.by.as_str()) {
                (Some(_), _) => drop(missing.remove(key)),
                (None, PEOPLE) => drop(missing.insert(key.clone())),
                (None, _) if is_reverted => drop(missing.insert(key.clone())),
                (None, _) => {}
            }
        }
        if key.resource == "leases" {
            let name = (cluster.to_owned(), key.name.clone());
            let holder = change
                .after
                .as_deref()
                .map(|lease| holder(lease).to_owned());
            match holder {
                Some(holder) => {
                    let renewal = Renewal {
                        holder,
                        host: None,
                        at: self.now,
                    };
                    self.renewals.insert(name, renewal);
                }
                None => drop(self.renewals.remove(&name)),
            }
        }
        match change.by.as_str() {
            RESTORE_WRITER => {
                self.last_restores.insert(cluster.to_owned(), self.now);
                let runs = self.helm_runs.values();
                let interrupted = runs.filter(|run| run.cluster.as_deref() == Some(cluster));
                self.partly_restored
                    .extend(interrupted.map(|run| run.release.clone()));
            }
            REBUILD_WRITER if key.resource == "tenants" => {
                self.wanted_tenants
                    .remove(&(cluster.to_owned(), key.name.clone()));
            }
            PEOPLE => self.record_user_change(cluster, change),
            by if is_product(by) => {
                let is_new_member = change.before.is_none() && key.resource == "edgeclusters";
                if is_new_member {
                    self.decommissioning.remove(&key.name);
                }
                self.unattributed_changes
                    .push((cluster.to_owned(), change.clone()));
            }
            _ => {}
        }
    }

    /// Whether a Tenant was deleted with its CRD before any process had reconciled it: without a finalizer, a release,
    /// or a record in the cluster. A process reconciles none while it waits for a Lease.
    fn was_never_reconciled(&self, cluster: &str, change: &Change) -> bool {
        let (Some(before), None) = (&change.before, &change.after) else {
            return false;
        };
        let uid = text(before, "/metadata/uid");
        let belongs_to_tenant = |(key, object): (&Key, &Arc<Value>)| {
            key.resource == "secrets"
                && (label(object, OWNER_UID_LABEL) == Some(uid)
                    || label(object, RECORD_LABEL).is_some())
        };
        let mut store = self.stores.get(cluster).into_iter().flatten();
        change.key.resource == "tenants"
            && change.by == "kube-controller-manager"
            && !has_finalizer(before, UNINSTALL_FINALIZER)
            && !store.any(belongs_to_tenant)
    }

    /// Whether a Tenant at home was deleted with its CRD before its member got a copy. Where home is not a member, no
    /// process saves its Tenants.
    fn was_never_placed(&self, cluster: &str, change: &Change) -> bool {
        let mut copies = self.stores.iter().filter(|(name, _)| *name != cluster);
        change.key.resource == "tenants"
            && change.after.is_none()
            && cluster == HOME
            && !self.settings.self_cluster
            && !self.has_crd(HOME, Tenant::crd_name())
            && !copies.any(|(_, store)| store.contains_key(&change.key))
    }

    /// Records the pauses of Tenants and members, and the deletion of orphaned KryptonDeployments.
    fn record_pauses(&mut self, cluster: &str, change: &Change) {
        let key = &change.key;
        let is_annotated = |object: &Option<Arc<Value>>, name: &str| {
            let object = object.as_deref();
            object.is_some_and(|object| annotation(object, name) == Some("true"))
        };
        let object_key = (cluster.to_owned(), key.name.clone());
        match key.resource.as_str() {
            "tenants" if is_annotated(&change.after, PAUSED_ANNOTATION) => {
                self.tenant_pauses.entry(object_key).or_insert(self.now);
            }
            "tenants" => drop(self.tenant_pauses.remove(&object_key)),
            "edgeclusters" => {
                let after = change.after.as_deref();
                match after.is_some_and(|after| is_true(after, "/spec/paused")) {
                    true => drop(
                        self.member_pauses
                            .entry(key.name.clone())
                            .or_insert(self.now),
                    ),
                    false => drop(self.member_pauses.remove(&key.name)),
                }
            }
            // The deletion of the CRD leaves the releases.
            "kryptondeployments"
                if change.after.is_none()
                    && (is_annotated(&change.before, ORPHAN_ANNOTATION)
                        || !self.has_crd(HOME, KryptonDeployment::crd_name())) =>
            {
                let uid = change.before.as_deref().map(|it| text(it, "/metadata/uid"));
                self.orphaned_uids.extend(uid.map(str::to_owned));
                self.orphaned_deployments.insert(key.name.clone(), self.now);
            }
            // A restore can undo the deletion.
            "kryptondeployments" if let Some(restored) = restored_live(change) => {
                self.orphaned_deployments.remove(&key.name);
                self.orphaned_uids.remove(text(restored, "/metadata/uid"));
            }
            _ => {}
        }
    }

    /// Records a change by people, and with it the objects that they want.
    fn record_user_change(&mut self, cluster: &str, change: &Change) {
        let key = &change.key;
        let created = change.before.is_none();
        let deleted = change.after.as_deref().is_none_or(is_terminating);
        let object_key = (cluster.to_owned(), key.name.clone());
        match key.resource.as_str() {
            // A change of a placed copy by people has no effect.
            "tenants" if change.before.as_deref().is_some_and(is_placed_copy) => {}
            "tenants" if created => drop(self.wanted_tenants.insert(object_key, true)),
            "tenants" if deleted => drop(self.wanted_tenants.insert(object_key, false)),
            "kryptondeployments" if created => {
                self.orphaned_deployments.remove(&key.name);
                self.wanted_deployments.insert(key.name.clone(), true);
            }
            "kryptondeployments" if deleted => {
                self.wanted_deployments.insert(key.name.clone(), false);
            }
            "edgeclusters" if deleted => {
                let before = change.before.as_deref().unwrap_or(&Value::Null);
                let is_orphan = annotation(before, ORPHAN_ANNOTATION) == Some("true");
                if text(before, "/spec/deletionPolicy") == "Uninstall" && !is_orphan {
                    self.decommissioning.insert(key.name.clone());
                }
            }
            _ => {}
        }
    }

    fn record_fault(&mut self, event: &Event) {
        let Some((action, has_ended)) = event.action() else {
            return;
        };
        if let Action::ChartVersion { version } = action {
            self.chart_version = version;
        }
        // A request fault is reported again when it happens.
        if action.is_user_action() || matches!(action, Action::AtRequest { .. }) && !has_ended {
            return;
        }
        self.calm_since = self.now;
        self.busy_until = self.busy_until.max(self.now + action.detection_delay());
        if let Action::Server {
            cluster,
            fault: ServerFault::Hangs,
            ..
        } = &action
            && has_ended
        {
            self.last_hang_ends.insert(cluster.clone(), self.now);
        }
        if let Action::Restore { cluster, .. } = &action {
            let missing = self.missing_workloads.entry(cluster.clone()).or_default();
            let in_snapshots = &mut self.missing_in_snapshots;
            match has_ended {
                false => drop(in_snapshots.insert(cluster.clone(), missing.clone())),
                true => missing.extend(in_snapshots.remove(cluster).unwrap_or_default()),
            }
        }
        if let Action::ServerClock { cluster, .. } = &action {
            self.wrong_clocks.insert(cluster.clone());
        }
        match action {
            _ if has_ended => self.active_faults.retain(|fault| *fault != action),
            // These have no observation at their end.
            Action::Crash { .. }
            | Action::Stop { .. }
            | Action::Freeze { .. }
            | Action::Suspend { .. } => {
                let length = action.length().filter(|length| *length != FOREVER);
                let end = self.now + length.unwrap_or_default();
                self.busy_until = self.busy_until.max(end);
                if matches!(action, Action::Suspend { .. }) {
                    self.suspended_until = self.suspended_until.max(end + RESUME_TIME);
                }
            }
            Action::Skew { .. }
            | Action::PassDays { .. }
            | Action::HalfOpen { .. }
            | Action::EndWatches { .. }
            | Action::Compact { .. } => {}
            _ if action.length() == Some(FOREVER) => {}
            _ => self.active_faults.push(action),
        }
    }

    /// Whether no request has changed the cluster since the last one that was attributed to its host.
    pub(in crate::oracles) fn is_unchanged(&self, cluster: &str) -> bool {
        self.unattributed_changes
            .iter()
            .all(|(name, _)| name != cluster)
    }

    pub(in crate::oracles) fn take_unattributed(&mut self, cluster: &str) -> Vec<Change> {
        let changes = std::mem::take(&mut self.unattributed_changes);
        let (taken, rest) = changes.into_iter().partition(|(name, _)| name == cluster);
        self.unattributed_changes = rest;
        let taken: Vec<(String, Change)> = taken;
        taken.into_iter().map(|(_, change)| change).collect()
    }

    /// Records the host that has renewed a Lease.
    pub(in crate::oracles) fn record_write(&mut self, write: &AttributedWrite<'_>) {
        let key = &write.change.key;
        let name = (write.cluster.to_owned(), key.name.clone());
        if key.resource == "leases"
            && let Some(renewal) = self.renewals.get_mut(&name)
        {
            renewal.host = Some(write.host.to_owned());
        }
    }

    /// Reads a command line of Helm. `None` if it does not write.
    fn parse_helm_run(&self, host: &str, arguments: &[String]) -> Option<Run> {
        let verb = arguments.first()?.clone();
        if !["upgrade", "install", "uninstall", "rollback"].contains(&verb.as_str()) {
            return None;
        }
        let argument_after = |word: &str| {
            let position = arguments.iter().position(|argument| argument == word)?;
            arguments.get(position + 1).cloned()
        };
        let release = argument_after("--")?;
        let mut members = vec![SELF_CLUSTER.to_owned()];
        members.extend(self.settings.edges.iter().map(|edge| edge.name.clone()));
        let (owner, member) = parse_release_name(&release, &members);
        let agent_cluster = agent_cluster(host).map(str::to_owned);
        let cluster = member.map(|member| Settings::cluster_for(&member).to_owned());
        Some(Run {
            host: host.to_owned(),
            verb,
            namespace: argument_after("--namespace").unwrap_or_default(),
            cluster: cluster.or(agent_cluster),
            owner,
            release,
            started: self.now,
        })
    }
}

/// Whether only the status or bookkeeping differs.
fn differs_only_in_status(before: Option<&Value>, after: Option<&Value>) -> bool {
    let (Some(before), Some(after)) = (before, after) else {
        return false;
    };
    let is_same = |name: &str| {
        let [before, after] = [before, after].map(|object| object.get("metadata")?.get(name));
        before == after
    };
    before.get("spec") == after.get("spec")
        && ["uid", "deletionTimestamp", "labels", "annotations"]
            .into_iter()
            .all(is_same)
}

/// Splits a release name into its owner and the member.
fn parse_release_name(release: &str, members: &[String]) -> (ReleaseOwner, Option<String>) {
    if let Some(name) = release.strip_prefix("ced-") {
        return (ReleaseOwner::Deployment(name.to_owned()), None);
    }
    let owner = release.strip_prefix("tenant-").and_then(|rest| {
        members.iter().find_map(|member| {
            let tenant = rest.strip_suffix(member.as_str())?.strip_suffix('-')?;
            Some((
                ReleaseOwner::Tenant(tenant.to_owned()),
                Some(member.clone()),
            ))
        })
    });
    owner.unwrap_or((ReleaseOwner::Unknown, None))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn release_names_lead_to_owner_and_member() {
        let members = ["self-cluster".to_owned(), "edge-1".to_owned()];
        let tenant = |name: &str| ReleaseOwner::Tenant(name.to_owned());
        for (release, owner, member) in [
            ("tenant-t0-edge-1", tenant("t0"), Some("edge-1")),
            ("tenant-t1-self-cluster", tenant("t1"), Some("self-cluster")),
            ("ced-d0", ReleaseOwner::Deployment("d0".to_owned()), None),
            ("other", ReleaseOwner::Unknown, None),
        ] {
            let member = member.map(str::to_owned);
            assert_eq!(
                parse_release_name(release, &members),
                (owner, member),
                "{release}"
            );
        }
    }
}
