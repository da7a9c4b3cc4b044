//! Reports about sources and values, in a member's observation, in events, and in the log.

use std::collections::BTreeMap;

use krypton_crds::edge_cluster::EdgeCluster;
use krypton_runtime::clock::BootTime;
use krypton_types::conditions::{State, Truth, reason};

use super::api::{EdgeClusters, is_enrolled, is_joined};
use crate::chart::values;
use crate::discovery::membership::Refusal;
use crate::discovery::{Origin, Unresolved};
use crate::home_events::MemberEvent;
use crate::members::observation::MemberValuesState;
use crate::proxy::Shared;

/// Reports the state of a member's values in its EdgeCluster. Emits an event if the member's own values are invalid.
pub(super) fn report_values(
    shared: &Shared,
    object: &EdgeCluster,
    values: &MemberValuesState,
    may_write: bool,
) {
    let name = object.metadata.name.as_deref().unwrap_or_default();
    let mut failure = None;
    shared.members.observe(name, |observation| {
        if *values == MemberValuesState::Unknown {
            return;
        }
        if observation.values != *values
            && let MemberValuesState::Reported(state) = values
            && state.truth == Truth::False
        {
            failure = Some(state.message.clone());
        }
        observation.values = values.clone();
    });
    let has_own_values =
        values::has_own_values(&object.spec) || object.spec.namespace_configuration.is_some();
    if let Some(message) = failure.filter(|_| may_write && has_own_values) {
        let event = MemberEvent::new(object, "ValuesUnresolved", message);
        shared.notices.warn(event);
    }
}

/// Reports rejected sources once, in the log and on the EdgeCluster whose name they request.
pub(super) fn report_refused(
    shared: &Shared,
    edge_clusters: &EdgeClusters,
    reported: &mut BTreeMap<Origin, (Refusal, bool)>,
    refused: &BTreeMap<Origin, Refusal>,
    may_write: bool,
) {
    reported.retain(|origin, _| refused.contains_key(origin));
    for (origin, refusal) in refused {
        let previous = reported
            .get(origin)
            .filter(|(previous, _)| previous == refusal);
        if previous.is_none() {
            tracing::warn!(%origin, reason = refusal.reason(), problem = %refusal, "rejected member source");
        }
        let holder = refusal
            .member()
            .and_then(|member| edge_clusters.objects.get(member));
        let mut is_on_holder = previous.is_some_and(|(_, is_on_holder)| *is_on_holder);
        if let Some(holder) = holder.filter(|_| may_write && !is_on_holder) {
            let message = format!("{origin} is not a member: {refusal}");
            let event = MemberEvent::new(holder, refusal.reason(), message);
            is_on_holder = shared.notices.try_warn(event);
        }
        reported.insert(origin.clone(), (refusal.clone(), is_on_holder));
    }
}

/// Reports a source that its provider cannot read.
pub(super) fn observe_source(shared: &Shared, name: &str, problem: Option<&Unresolved>) {
    let state = problem.map(|problem| {
        let truth = reason::source_truth(problem.reason);
        State::new(truth, problem.reason, problem.message.clone())
    });
    shared
        .members
        .observe(name, |observation| observation.source = state);
}

/// Reports a member without a source: it has an agent, or its source is gone.
pub(super) fn observe_missing_source(
    shared: &Shared,
    name: &str,
    object: &EdgeCluster,
    reason: Option<&Unresolved>,
    now: BootTime,
) {
    if is_joined(object) {
        let message = "an agent connects it to the hub, which has no kubeconfig for it";
        shared.members.observe(name, |observation| {
            observation.resolved = State::new(Truth::True, reason::BY_AGENT, message);
        });
        let connection = missing_agent(name, object);
        shared.members.set_connection(name, connection, now);
        return;
    }
    let gone = match reason {
        Some(reason) => State::new(Truth::False, reason.reason, reason.message.clone()),
        None => State::new(
            Truth::False,
            reason::SOURCE_GONE,
            "the hub runs without --self-cluster and the member's releases stay; set the flag, or delete the EdgeCluster",
        ),
    };
    shared
        .members
        .observe(name, |observation| observation.resolved = gone.clone());
    shared.members.set_connection(name, Some(gone), now);
}

/// Returns the state of a member without a source whose agent has never connected.
fn missing_agent(name: &str, object: &EdgeCluster) -> Option<State> {
    if is_enrolled(object) {
        return None;
    }
    let status = object.status.as_ref();
    let has_enrolled = status.is_some_and(|status| status.pending_certificate_expiry.is_some());
    let message = match has_enrolled {
        true => "the agent has enrolled, but it has not connected yet; check its log".to_owned(),
        false => format!(
            "no agent has joined yet; to join the cluster, run: kubectl krypton join {name}"
        ),
    };
    Some(State::new(Truth::Unknown, reason::STARTING, message))
}

#[cfg(test)]
mod tests {
    use jiff::Timestamp;
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
    use krypton_crds::edge_cluster::{EdgeClusterSpec, TenantCounts};
    use krypton_types::conditions::{self, READY};

    use super::*;
    use crate::edgecluster::status;
    use crate::members::MemberRegistry;

    #[test]
    fn member_without_agent_names_the_fix() {
        let now = Timestamp::UNIX_EPOCH;
        let mut object = EdgeCluster::new("edge-1", EdgeClusterSpec::default());
        let members = MemberRegistry::default();
        let ready = |object: &EdgeCluster| {
            let connection = missing_agent("edge-1", object);
            members.set_connection("edge-1", connection, BootTime::default());
            let observation = members.observation("edge-1").unwrap();
            let counts = TenantCounts::default();
            let status = status::status("edge-1", None, &observation, counts, None, 1, now);
            conditions::find(&status.conditions, READY).unwrap()
        };
        let state = ready(&object);
        assert_eq!((state.truth, &*state.reason), (Truth::Unknown, "Starting"));
        assert!(state.message.ends_with("run: kubectl krypton join edge-1"));

        object
            .status
            .get_or_insert_default()
            .pending_certificate_expiry = Some(Time(now));
        assert!(ready(&object).message.ends_with("check its log"));

        object.status.get_or_insert_default().certificate_expiry = Some(Time(now));
        assert_eq!(missing_agent("edge-1", &object), None);
    }
}
