//! Explains an EdgeCluster: its reporter, its desired state and its Tenants.

use jiff::Timestamp;
use krypton_crds::edge_cluster::{EdgeCluster, EdgeClusterStatus, TenantSummary};
use krypton_types::conditions::{self, READY, TARGET_RESOLVED, Truth};
use kube::ResourceExt as _;

use super::super::remedy;
use super::super::sources::{Lookup, ObjectSources};
use super::{Explainer, Explanation, is_behind, is_current};
use crate::statement::Mark;

/// Tenants with their own lines.
const MAX_TENANTS: usize = 10;

pub(in crate::explain) fn explain_cluster(
    sources: &ObjectSources<EdgeCluster>,
    now: Timestamp,
) -> Explanation {
    let cluster = &sources.object;
    let (name, status) = (cluster.name_any(), cluster.status.clone());
    let status = status.unwrap_or_default();
    let mut explainer = Explainer::new(now);
    let is_led = explainer.explain_leader(&sources.leader_lease, &sources.hub_namespaces);
    explainer.set_member(&name);
    let is_connected = explainer.explain_member(&name, &Lookup::Found(cluster.clone()));
    if is_behind(cluster, status.observed_generation) {
        let text = "it was changed, and its status does not reflect the change yet";
        explainer.add(Mark::Note, text);
    }
    explainer.explain_conditions(&status);
    explainer.explain_tenants(&name, &status, is_connected);
    explainer.member = None;
    explainer.explain_events(&sources.events);
    let ready = conditions::find(&status.conditions, READY);
    let is_ready = ready.is_some_and(|ready| ready.truth == Truth::True)
        && is_current(cluster, status.observed_generation);
    Explanation {
        ready: is_led && is_connected && is_ready,
        lines: explainer.lines,
    }
}

impl Explainer {
    /// Describes a source that is not usable, and a deletion that waits.
    fn explain_conditions(&mut self, status: &EdgeClusterStatus) {
        let find = |type_| conditions::find(&status.conditions, type_);
        // Earlier lines show these conditions, whose reasons the others can repeat.
        let shown: Vec<String> = ["Connected", "Healthy"]
            .into_iter()
            .filter_map(|type_| Some(find(type_)?.reason))
            .collect();
        for type_ in [TARGET_RESOLVED, READY, "Uninstalled"] {
            let state = find(type_).filter(|it| it.truth != Truth::True);
            if let Some(state) = state.filter(|it| !shown.contains(&it.reason)) {
                self.add_condition(Mark::Note, &state, remedy::for_member(&state.reason));
            }
        }
    }

    /// Counts the Tenants, and lists the worst.
    fn explain_tenants(&mut self, member: &str, status: &EdgeClusterStatus, is_connected: bool) {
        if let Some(counts) = status.tenants {
            let mark = match (is_connected, counts.ready == counts.total) {
                (false, _) => Mark::Unknown,
                (true, false) => Mark::Note,
                (true, true) => Mark::Ok,
            };
            let text = format!("{} of {} Tenants are Ready", counts.ready, counts.total);
            let text = match is_connected {
                true => text,
                false => format!("at the last contact, {text}"),
            };
            self.add(mark, text);
        }
        let summaries = status.tenant_summaries.iter().flat_map(|it| &it.tenants);
        let mut failing: Vec<&TenantSummary> = summaries.filter(|it| it.state != "Ready").collect();
        failing.sort_by_key(|&tenant| (tenant.state != "Error", &tenant.namespace, &tenant.name));
        for tenant in failing.into_iter().take(MAX_TENANTS) {
            let TenantSummary {
                namespace,
                name,
                state,
                reason,
            } = tenant;
            let text = format!("Tenant {namespace}/{name}: {state}: {reason}");
            let explain =
                format!("kubectl krypton explain tenant {name} -n {namespace} --on {member}");
            self.add_with_remedy(Mark::Note, text, explain.as_str());
        }
    }
}
