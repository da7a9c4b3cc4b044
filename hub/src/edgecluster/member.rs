//! The decisions of one pass on one member: its desired state, its finalizer, and the actor on its cluster.

use krypton_crds::edge_cluster::EdgeCluster;
use krypton_runtime::clock::BootTime;
use krypton_runtime::newest::{Newest as _, PutNews as _};
use krypton_runtime::work_queue::WorkQueue;
use krypton_types::conditions::{Truth, reason};

use super::api::{EdgeClusters, write_finalizers};
use super::controller::{Controller, Pass, View, banned, enter};
use super::decommission::{self, DecommissionState, Step};
use super::plan::{self, Wishes, mark};
use super::publisher::{MemberInputs, Order};
use super::values::too_large;
use super::{LOOK_EVERY, acceptance, messages, namespaces};
use crate::leader::home_writer::{Deletion, PACE};
use crate::members::duplicates;
use crate::members::member::{Admission, Member};
use crate::proxy::Permit;
use crate::tenants::Retired;

/// Whether the hub's proxy acts on a member, and whether the member may get a new desired state.
struct Acting {
    acted: bool,
    acts: bool,
    deals: bool,
}

impl Controller {
    pub(super) fn reconcile_member(
        &mut self,
        name: &str,
        object: &EdgeCluster,
        known: &EdgeClusters,
        view: &View,
        pass: &Pass,
    ) {
        self.report_source(name, object, view, pass);
        let wishes = plan::wishes(object);
        let source = view.membership.members.get(name);
        let asleep = source
            .and_then(|source| source.suspended.clone())
            .map(|why| (reason::SUSPENDED, why));
        let entry = enter(&self.fleet.shared.members, known, name);
        let verdict = view.verdicts.get(name);
        let held_back =
            verdict.and_then(|verdict| duplicates::held_back(name, verdict, wishes.banned));
        let progress = decommission::leaving(object).then(|| {
            let why = held_back.as_ref().or(asleep.as_ref());
            let why = why.map(|(_, why)| why.clone());
            let paused = wishes.paused.then(|| "it is paused".to_owned());
            let read = self.retirements.of(object);
            self.progress(name, &entry, read, why.or(paused))
        });
        let step = decommission::step(object, &progress.unwrap_or_default());
        let order = step.order(wishes.paused || asleep.is_some());
        let retires =
            (entry.published.get().as_ref()).is_some_and(|published| published.desired.retire);
        let order = decommission::given(order, held_back.is_some(), retires);
        let acting = self.publish((name, object), &entry, order, view, pass);
        let condition = step.condition();
        let shared = &self.fleet.shared;
        shared
            .members
            .observe(name, |facts| facts.uninstalled = condition);
        self.write_finalizers(name, object, &step, pass);
        self.read_deletion(name, object, &step, pass);
        self.report_step(object, &step, pass);
        let held_back = held_back.or(asleep);
        let may_act = held_back.is_none() && verdict.is_some();
        self.admit((name, object), &entry, wishes, may_act, &acting);
        self.fleet
            .shared
            .members
            .hold_back(name, held_back, pass.now);
    }

    /// Reports a source that is in doubt, that waits for an operator, or that is gone.
    fn report_source(&self, name: &str, object: &EdgeCluster, view: &View, pass: &Pass) {
        let (shared, membership) = (&self.fleet.shared, &view.membership);
        let doubt = membership
            .troubled
            .get(name)
            .or_else(|| membership.unseen.get(name))
            .or_else(|| membership.members.get(name)?.stale.as_ref());
        messages::say_of_source(shared, name, doubt);
        let seen = view.wanted.contains_key(name) || membership.unseen.contains_key(name);
        if view.waiting.contains_key(name) {
            acceptance::say_waiting(shared, name, object, pass.leading, pass.now);
        } else if !seen && !self.proxies.is_leaving(name) {
            let why = membership.gone.get(name);
            messages::say_source_gone(shared, name, object, why, pass.now);
        }
    }

    /// How a member stands that departs together with its releases.
    fn progress(
        &self,
        name: &str,
        entry: &Member,
        read: Option<Deletion>,
        held_back: Option<String>,
    ) -> DecommissionState {
        let facts = self
            .fleet
            .shared
            .members
            .observation(name)
            .unwrap_or_default();
        let ordered = entry.published.get().as_ref().and_then(|published| {
            let desired = &published.desired;
            desired.retire.then(|| (desired.version, desired.digest()))
        });
        let deployments = self.fleet.shared.members.deployments();
        DecommissionState {
            read,
            held_back,
            connected: facts.connected.truth == Truth::True,
            taken: ordered.is_some() && ordered == facts.applied,
            retired: self.fleet.reports.retired(name).map(|retired| {
                let (deployments, gone) = deployments.retired(name);
                Retired {
                    tenants: retired.tenants + deployments,
                    gone: retired.gone + gone,
                }
            }),
        }
    }

    /// Gives the member its desired state, if that has changed and may be given now.
    fn publish(
        &mut self,
        (name, object): (&str, &EdgeCluster),
        entry: &Member,
        order: Option<Order>,
        view: &View,
        pass: &Pass,
    ) -> Acting {
        let had = || Some(entry.published.get().as_ref()?.desired.chart.clone());
        let chart = self
            .overlays
            .of((name, object), &view.given, &view.readings, had);
        let had = || Some(entry.published.get().as_ref()?.desired.namespaces.clone());
        let namespaces = namespaces::of_member(&self.fleet.namespaces, &object.spec, had);
        let next = order.and_then(|order| {
            let deployments = view.ordered.as_ref()?.get(name);
            let placed = view.placed.as_ref()?.get(name);
            let dealt = MemberInputs {
                chart: chart.chart.as_deref()?,
                own: chart.own || namespaces.own,
                namespaces: &namespaces.configuration,
                deployments: deployments.map_or(&[], |orders| orders),
                placed: placed.map_or(&[], |orders| orders),
            };
            let before = entry.published.get();
            self.publisher
                .next(before.as_ref(), self.dealt_epoch, &dealt, order, pass.now)
        });
        let too_large = next.as_ref().and_then(|next| too_large(&next.desired));
        let problem = too_large.as_ref().or(namespaces.problem.as_ref());
        let values = problem.unwrap_or(&chart.values);
        messages::tell_of_values(&self.fleet.shared, object, values, pass.leading);
        let proxy = self.proxies.running.get(name);
        let acted = proxy.is_some_and(|proxy| proxy.permit.get().acts);
        let acts = pass.stand.acts(acted);
        let deals = pass.stand.deals(view.given.epoch, acts);
        if let Some(next) = next.filter(|_| too_large.is_none() && deals) {
            let chart = next.desired.chart.applied_name();
            if self.fleet.reports.dealt(name, &chart) {
                self.fleet.shared.members.deployments().look_again();
            }
            entry.published.send_replace(Some(next));
        }
        Acting { acted, acts, deals }
    }

    fn write_finalizers(&mut self, name: &str, object: &EdgeCluster, step: &Step, pass: &Pass) {
        let may_write = pass.leading && self.fleet.lead.mark(mark(object)).is_some();
        let Some(finalizers) = step.finalizers(object).filter(|_| may_write) else {
            return;
        };
        if !self.may_write_now(name, pass.now) {
            return self.look_again(next_look(&self.queue, name, pass.now));
        }
        let version = object.metadata.resource_version.clone();
        let client = self.fleet.client.clone();
        let write = write_finalizers(client, name.to_owned(), version, finalizers);
        self.start_write(name, write, pass.now);
    }

    /// Reads a deletion from the API server before anything follows from it.
    fn read_deletion(&mut self, name: &str, object: &EdgeCluster, step: &Step, pass: &Pass) {
        let uid = object.metadata.uid.clone().unwrap_or_default();
        if *step != Step::Read || self.retirements.reading.contains(&uid) {
            return;
        }
        if !self.may_write_now(name, pass.now) {
            return self.look_again(next_look(&self.queue, name, pass.now));
        }
        self.retirements.reading.insert(uid.clone());
        let client = self.fleet.client.clone();
        self.readings
            .spawn(decommission::read(client, name.to_owned(), uid));
    }

    fn may_write_now(&self, name: &str, now: BootTime) -> bool {
        let queue = &self.queue;
        queue.is_free() && !queue.is_busy(name) && queue.not_before(name) <= now
    }

    fn report_step(&mut self, object: &EdgeCluster, step: &Step, pass: &Pass) {
        let news = self.retirements.news(object, step);
        let Some(news) = news.filter(|_| pass.leading) else {
            return;
        };
        let (uid, reason) = (news.uid.clone(), news.reason);
        if self.fleet.shared.notices.offer_news(news) {
            self.retirements.was_told(uid, reason);
        } else {
            self.look_again(BootTime(pass.now.0 + PACE));
        }
    }

    /// Decides whether the agent is admitted, and whether the proxy acts.
    fn admit(
        &self,
        (name, object): (&str, &EdgeCluster),
        entry: &Member,
        wishes: Wishes,
        may_act: bool,
        acting: &Acting,
    ) {
        let status = object.status.as_ref();
        let cluster_uid = status.and_then(|status| status.cluster_uid.clone());
        entry.admission.put(Admission {
            refused: wishes.banned.then(|| banned(name)),
            cluster_uid: cluster_uid.clone(),
            keys: status.and_then(|status| status.agent_keys.clone()),
        });
        let Some(proxy) = self.proxies.running.get(name) else {
            return;
        };
        proxy.allowed.put(plan::allowed(object));
        // The desired state comes first. A standby has one without an epoch, or of an earlier term, and a proxy does not
        // start with one of an earlier term.
        let published = entry.published.get();
        let epoch = published
            .as_ref()
            .map(|published| published.desired.version.epoch);
        let of_now = |epoch| epoch > 0 && (acting.acted || epoch >= self.first_epoch);
        let given = acting.acted || acting.deals;
        proxy.permit.put(Permit {
            may_act,
            acts: acting.acts && given && epoch.is_some_and(of_now),
            cluster_uid,
        });
    }
}

/// Returns when to check a waiting member again: at its due time, after its write, or when a writer may be free.
fn next_look(queue: &WorkQueue<String>, name: &str, now: BootTime) -> BootTime {
    let least = match queue.is_busy(name) {
        true => PACE,
        false => LOOK_EVERY,
    };
    queue.not_before(name).max(BootTime(now.0 + least))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::leader::home_writer;

    #[test]
    fn waiting_member_is_not_polled() {
        let at = |second| BootTime(Duration::from_secs(second));
        let mut queue = home_writer::queue(1);
        let soon = BootTime(at(10).0 + LOOK_EVERY);
        assert_eq!(next_look(&queue, "a", at(10)), soon);
        queue.start("a".to_owned());
        assert_eq!(next_look(&queue, "a", at(10)), at(11));
        queue.delay("a".to_owned(), at(13));
        assert_eq!(next_look(&queue, "a", at(10)), at(13));
        queue.forget(&"a".to_owned());
        queue.delay("a".to_owned(), at(13));
        assert_eq!(next_look(&queue, "a", at(10)), at(13));
    }
}
