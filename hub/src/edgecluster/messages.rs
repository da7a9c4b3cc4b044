//! Reports about sources and values, in a member's observation, in events, and in the log.

use std::collections::BTreeMap;

use krypton_crds::edge_cluster::EdgeCluster;
use krypton_runtime::clock::BootTime;
use krypton_types::conditions::{State, Truth, reason};

use super::api::{EdgeClusters, joined};
use crate::chart::values;
use crate::discovery::membership::Refusal;
use crate::discovery::{Origin, Unresolved};
use crate::members::observation::Values;
use crate::notices::MemberEvent;
use crate::proxy::Shared;

/// Reports the state of a member's values in its EdgeCluster. Emits an event if the member's own values are invalid.
pub(super) fn tell_of_values(
    shared: &Shared,
    object: &EdgeCluster,
    values: &Values,
    leading: bool,
) {
    let name = object.metadata.name.as_deref().unwrap_or_default();
    let mut news = None;
    shared.members.observe(name, |facts| {
        if *values == Values::NotKnown {
            return;
        }
        if facts.values != *values
            && let Values::Said(state) = values
            && state.truth == Truth::False
        {
            news = Some(state.message.clone());
        }
        facts.values = values.clone();
    });
    let own = values::has_own(&object.spec) || object.spec.namespace_configuration.is_some();
    if let Some(message) = news.filter(|_| leading && own) {
        shared.notices.tell(MemberEvent {
            member: name.to_owned(),
            uid: object.metadata.uid.clone().unwrap_or_default(),
            reason: "ValuesUnresolved",
            message,
        });
    }
}

/// Reports rejected sources once, in the log and on the EdgeCluster whose name they request.
pub(super) fn tell_refused(
    shared: &Shared,
    known: &EdgeClusters,
    told: &mut BTreeMap<Origin, (Refusal, bool)>,
    refused: &BTreeMap<Origin, Refusal>,
    leading: bool,
) {
    told.retain(|origin, _| refused.contains_key(origin));
    for (origin, refusal) in refused {
        let before = told.get(origin).filter(|(before, _)| before == refusal);
        if before.is_none() {
            tracing::warn!(%origin, reason = refusal.reason(), "is not a member: {refusal}");
        }
        let holder = refusal
            .member()
            .and_then(|member| known.objects.get(member));
        let mut on_holder = before.is_some_and(|(_, on_holder)| *on_holder);
        if let Some(holder) = holder.filter(|_| leading && !on_holder) {
            on_holder = shared.notices.offer(MemberEvent {
                member: holder.metadata.name.clone().unwrap_or_default(),
                uid: holder.metadata.uid.clone().unwrap_or_default(),
                reason: refusal.reason(),
                message: format!("{origin} is not a member: {refusal}"),
            });
        }
        told.insert(origin.clone(), (refusal.clone(), on_holder));
    }
}

/// Reports a source that its provider cannot read.
pub(super) fn say_of_source(shared: &Shared, name: &str, doubt: Option<&Unresolved>) {
    let state = doubt.map(|doubt| State::new(Truth::Unknown, doubt.reason, doubt.message.clone()));
    shared.members.observe(name, |facts| facts.source = state);
}

/// Reports a member without a source: it has an agent, or its source is gone.
pub(super) fn say_source_gone(
    shared: &Shared,
    name: &str,
    object: &EdgeCluster,
    why: Option<&Unresolved>,
    now: BootTime,
) {
    if joined(object) {
        let message = "joined through its agent; the hub has no kubeconfig for it";
        shared.members.observe(name, |facts| {
            facts.resolved = State::new(Truth::True, reason::BY_AGENT, message);
        });
        shared.members.link(name, None, now);
        return;
    }
    let gone = match why {
        Some(why) => State::new(Truth::False, why.reason, why.message.clone()),
        None => State::new(
            Truth::False,
            reason::SOURCE_GONE,
            "the hub runs without --self-cluster; the member's releases stay",
        ),
    };
    shared
        .members
        .observe(name, |facts| facts.resolved = gone.clone());
    shared.members.link(name, Some(gone), now);
}
