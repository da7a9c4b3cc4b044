//! The decisions of one pass on one member: its desired state, its finalizer, and the actor on its cluster.

use krypton_crds::edge_cluster::EdgeCluster;
use krypton_runtime::clock::BootTime;
use krypton_runtime::newest::{Newest as _, SendIfChanged as _};
use krypton_runtime::work_queue::WorkQueue;
use krypton_types::conditions::{Truth, reason};
use kube::api::Api;

use super::api::write_finalizers;
use super::controller::{FleetController, Pass, PassInputs, ban_message, enter_member};
use super::decommission::{self, DecommissionState, DecommissionStep};
use super::plan::{self, written_epoch};
use super::publisher::{MemberInputs, MemberOrder};
use super::values::size_problem;
use super::{RECONCILE_EVERY, acceptance, messages, namespaces};
use crate::leader::home_writer::{self, DeletionCause, MIN_WRITE_INTERVAL};
use crate::members::duplicates;
use crate::members::member::{Admission, Member};
use crate::members::tenant_reports::UninstallCounts;
use crate::proxy::Permit;

/// Whether the hub's proxy acts on a member now and may act from now on, and whether the member may get a new
/// desired state.
struct ActingDecision {
    acts_now: bool,
    may_act: bool,
    may_publish: bool,
}

impl FleetController {
    pub(super) fn reconcile_member(
        &mut self,
        name: &str,
        object: &EdgeCluster,
        inputs: &PassInputs,
        pass: &Pass,
    ) {
        self.report_source(name, object, inputs, pass);
        let is_paused = plan::is_paused(object);
        let source = inputs.membership.members.get(name);
        let suspended = source
            .and_then(|source| source.suspended.clone())
            .map(|message| (reason::SUSPENDED, message));
        let member = enter_member(&self.fleet.shared.members, name, object);
        let decision = inputs.act_decisions.get(name);
        let held_back =
            decision.and_then(|decision| duplicates::held_back(name, decision, object.spec.banned));
        let progress = decommission::is_decommissioning(object).then(|| {
            let reason = held_back.as_ref().or(suspended.as_ref());
            let reason = reason.map(|(_, reason)| reason.clone());
            let paused = is_paused.then(|| "the EdgeCluster is paused".to_owned());
            let deletion = self.decommissions.confirmed(object);
            self.progress(name, &member, deletion, reason.or(paused))
        });
        let step = decommission::next_step(object, &progress.unwrap_or_default());
        let order = step.order(is_paused || suspended.is_some());
        let is_retiring =
            (member.published.get().as_ref()).is_some_and(|published| published.desired.retire);
        let order = decommission::order_to_publish(order, held_back.is_some(), is_retiring);
        let acting = self.publish((name, object), &member, order, inputs, pass);
        let condition = step.condition();
        let shared = &self.fleet.shared;
        shared
            .members
            .observe(name, |observation| observation.uninstalled = condition);
        self.write_finalizers(name, object, &step, pass);
        self.read_deletion(name, object, &step, pass);
        self.report_step(object, &step, pass);
        let held_back = held_back.or(suspended);
        let may_act = held_back.is_none() && decision.is_some();
        self.admit((name, object), &member, may_act, &acting);
        self.fleet
            .shared
            .members
            .hold_back(name, held_back, pass.now);
    }

    /// Reports a source that is in doubt, that waits for an operator, or that is gone.
    fn report_source(&self, name: &str, object: &EdgeCluster, inputs: &PassInputs, pass: &Pass) {
        let (shared, membership) = (&self.fleet.shared, &inputs.membership);
        let problem = membership
            .troubled
            .get(name)
            .or_else(|| membership.unseen.get(name))
            .or_else(|| membership.members.get(name)?.stale.as_ref());
        messages::observe_source(shared, name, problem);
        let has_source =
            inputs.with_source.contains_key(name) || membership.unseen.contains_key(name);
        if inputs.waiting.contains_key(name) {
            acceptance::report_waiting(shared, name, object, pass.may_write, pass.now);
        } else if !has_source && !self.proxies.is_stopping(name) {
            let reason = membership.gone.get(name);
            messages::observe_missing_source(shared, name, object, reason, pass.now);
        }
    }

    /// The state of a member that is decommissioned together with its releases.
    fn progress(
        &self,
        name: &str,
        member: &Member,
        deletion: Option<DeletionCause>,
        held_back: Option<String>,
    ) -> DecommissionState {
        let observation = self
            .fleet
            .shared
            .members
            .observation(name)
            .unwrap_or_default();
        let ordered = member.published.get().as_ref().and_then(|published| {
            let desired = &published.desired;
            desired.retire.then(|| (desired.version, desired.digest()))
        });
        let deployments = self.fleet.shared.members.deployments();
        DecommissionState {
            deletion,
            held_back,
            connected: observation.connected.truth == Truth::True,
            is_order_applied: ordered.is_some() && ordered == observation.applied,
            uninstall_counts: self.fleet.reports.uninstall_counts(name).map(|counts| {
                let (deployments, uninstalled) = deployments.uninstall_counts(name);
                UninstallCounts {
                    total: counts.total + deployments,
                    uninstalled: counts.uninstalled + uninstalled,
                }
            }),
        }
    }

    /// Publishes the member's desired state, if it has changed and may be published now.
    fn publish(
        &mut self,
        (name, object): (&str, &EdgeCluster),
        member: &Member,
        order: Option<MemberOrder>,
        inputs: &PassInputs,
        pass: &Pass,
    ) -> ActingDecision {
        let previous = || Some(member.published.get().as_ref()?.desired.chart.clone());
        let chart =
            self.member_charts
                .chart_for((name, object), &inputs.chart, &inputs.values, previous);
        let previous = || Some(member.published.get().as_ref()?.desired.namespaces.clone());
        let namespaces =
            namespaces::merge_for_member(&self.fleet.desired.namespaces, &object.spec, previous);
        let next = order.and_then(|order| {
            let deployments = inputs.deployment_orders.as_ref()?.get(name);
            let placements = inputs.placement_orders.as_ref()?.get(name);
            let member_inputs = MemberInputs {
                chart: chart.chart.as_deref()?,
                is_override: chart.is_override,
                namespaces: &namespaces.configuration,
                deployments: deployments.map_or(&[], |orders| orders),
                placed: placements.map_or(&[], |orders| orders),
            };
            let current = member.published.get();
            self.publisher.next(
                current.as_ref(),
                self.published_epoch,
                &member_inputs,
                order,
                pass.now,
            )
        });
        let too_large = next.as_ref().and_then(|next| size_problem(&next.desired));
        let problem = too_large.as_ref().or(namespaces.problem.as_ref());
        let values = problem.unwrap_or(&chart.values);
        messages::report_values(&self.fleet.shared, object, values, pass.may_write);
        let proxy = self.proxies.running.get(name);
        let acts_now = proxy.is_some_and(|proxy| proxy.permit.get().hub_acts);
        let may_act = pass.leader_state.may_act(acts_now);
        let may_publish = pass.leader_state.may_publish(inputs.chart.epoch, may_act);
        if let Some(next) = next.filter(|_| too_large.is_none() && may_publish) {
            let chart = next.desired.chart.applied_name();
            if self.fleet.reports.set_desired_chart(name, &chart) {
                self.fleet.shared.members.deployments().notify();
            }
            member.published.send_replace(Some(next));
        }
        ActingDecision {
            acts_now,
            may_act,
            may_publish,
        }
    }

    fn write_finalizers(
        &mut self,
        name: &str,
        object: &EdgeCluster,
        step: &DecommissionStep,
        pass: &Pass,
    ) {
        let may_write = pass.may_write
            && self
                .fleet
                .leader
                .epoch_for_write(written_epoch(object))
                .is_some();
        let Some(finalizers) = step.finalizers(object).filter(|_| may_write) else {
            return;
        };
        if !self.may_write_now(name, pass.now) {
            return self.request_reconcile_at(next_check(&self.queue, name, pass.now));
        }
        let version = object.metadata.resource_version.clone();
        let client = self.fleet.client.clone();
        let write = write_finalizers(client, name.to_owned(), version, finalizers);
        self.start_write(name, write, pass.now);
    }

    /// Reads a deletion from the API server before anything follows from it.
    fn read_deletion(
        &mut self,
        name: &str,
        object: &EdgeCluster,
        step: &DecommissionStep,
        pass: &Pass,
    ) {
        let uid = object.metadata.uid.clone().unwrap_or_default();
        let is_reading = self
            .deletion_reads
            .keys()
            .any(|(_, reading)| *reading == uid);
        if *step != DecommissionStep::RereadDeletion || is_reading {
            return;
        }
        if !self.may_write_now(name, pass.now) {
            return self.request_reconcile_at(next_check(&self.queue, name, pass.now));
        }
        let key = (name.to_owned(), uid.clone());
        let client = self.fleet.client.clone();
        let objects: Api<EdgeCluster> = Api::all(client.clone());
        let read = home_writer::read_deletion(client, objects, name.to_owned(), uid);
        self.deletion_reads.spawn(key, read);
    }

    fn may_write_now(&self, name: &str, now: BootTime) -> bool {
        let queue = &self.queue;
        queue.is_free() && !queue.is_busy(name) && queue.not_before(name) <= now
    }

    fn report_step(&mut self, object: &EdgeCluster, step: &DecommissionStep, pass: &Pass) {
        let event = self.decommissions.event(object, step);
        let Some(event) = event.filter(|_| pass.may_write) else {
            return;
        };
        let (uid, reason) = (event.uid.clone(), event.reason);
        if self.fleet.shared.notices.try_record_normal(event) {
            self.decommissions.mark_recorded(uid, reason);
        } else {
            self.request_reconcile_at(pass.now + MIN_WRITE_INTERVAL);
        }
    }

    /// Decides whether the agent is admitted, and whether the proxy acts.
    fn admit(
        &self,
        (name, object): (&str, &EdgeCluster),
        member: &Member,
        may_act: bool,
        acting: &ActingDecision,
    ) {
        let status = object.status.as_ref();
        let cluster_uid = status.and_then(|status| status.cluster_uid.clone());
        member.admission.send_if_changed(Admission {
            refused: object.spec.banned.then(|| ban_message(name)),
            cluster_uid: cluster_uid.clone(),
            keys: status.and_then(|status| status.agent_keys.clone()),
        });
        let Some(proxy) = self.proxies.running.get(name) else {
            return;
        };
        proxy.allowed.send_if_changed(plan::allowed(object));
        // The desired state comes first. A standby has one without an epoch, or of an earlier term, and a proxy does not
        // start with one of an earlier term.
        let published = member.published.get();
        let epoch = published
            .as_ref()
            .map(|published| published.desired.version.epoch);
        let is_current = |epoch| epoch > 0 && (acting.acts_now || epoch >= self.first_epoch);
        let is_published = acting.acts_now || acting.may_publish;
        proxy.permit.send_if_changed(Permit {
            may_act,
            hub_acts: acting.may_act && is_published && epoch.is_some_and(is_current),
            cluster_uid,
        });
    }
}

/// Returns when to check a waiting member again: at its due time, after its write, or when a writer may be free.
fn next_check(queue: &WorkQueue<String>, name: &str, now: BootTime) -> BootTime {
    let least = match queue.is_busy(name) {
        true => MIN_WRITE_INTERVAL,
        false => RECONCILE_EVERY,
    };
    queue.not_before(name).max(now + least)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn waiting_member_is_not_polled() {
        let at = |second| BootTime(Duration::from_secs(second));
        let mut queue = home_writer::queue(1);
        let soon = at(10) + RECONCILE_EVERY;
        assert_eq!(next_check(&queue, "a", at(10)), soon);
        queue.start("a".to_owned());
        assert_eq!(next_check(&queue, "a", at(10)), at(11));
        queue.delay("a".to_owned(), at(13));
        assert_eq!(next_check(&queue, "a", at(10)), at(13));
        queue.forget(&"a".to_owned());
        queue.delay("a".to_owned(), at(13));
        assert_eq!(next_check(&queue, "a", at(10)), at(13));
    }
}
