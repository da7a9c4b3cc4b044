//! The table of Tenants.

use std::collections::BTreeMap;

use jiff::Timestamp;
use krypton_crds::edge_cluster::{EdgeCluster, EdgeClusterStatus, TenantSummary};
use krypton_crds::tenant::{Tenant, TenantStatus};
use krypton_types::conditions::{self, ClusterState, Readiness, State, Truth};
use serde_json::Value;

use crate::render::{
    Column, CommandOutput, Table, View, chart_cell, common_columns, decode, message_cell, one_line,
    or_dash, reason_and_message,
};

const COLUMNS: [Column<Tenant>; 7] = [
    ("NAMESPACE", common_columns::namespace),
    ("NAME", common_columns::name),
    ("PHASE", |it, _| {
        or_dash(status(it).and_then(|status| status.phase.as_deref()))
    }),
    ("READY", |it, _| ready(it)),
    ("CHART", |it, view| {
        let chart = status(it).and_then(|it| it.last_applied_chart.as_deref());
        chart_cell(chart, view)
    }),
    ("MESSAGE", |it, view| {
        message_cell(status(it).and_then(|it| it.last_message.as_deref()), view)
    }),
    ("AGE", common_columns::age),
];

/// One row for each Tenant. If wide, complete charts and messages, and one line for each cluster.
pub(crate) fn tenants_table(objects: &[Value], view: View) -> Table {
    let mut table = Table::with_columns(&COLUMNS);
    for object in objects {
        let tenant = table.push_object(&COLUMNS, object, view);
        let Some(status) = tenant
            .and_then(|tenant| tenant.status)
            .filter(|_| view.wide)
        else {
            continue;
        };
        let clusters = conditions::clusters(&status.conditions);
        for (cluster, state) in &clusters {
            table.push(cluster_row(cluster, phase_and_message(state)));
        }
        if let Some(summary) = status.summary {
            let shown = u32::try_from(clusters.len()).unwrap_or(u32::MAX);
            let more = summary.clusters.saturating_sub(shown);
            let note = format!("└ and {more} more, shown by its name");
            table.push(vec![String::new(), note]);
        }
    }
    table
}

/// Returns whether the Tenant's status omits clusters, whose EdgeClusters then list the Tenant.
pub(crate) fn is_summary(object: &Value) -> bool {
    decode::<Tenant>(object).is_some_and(|tenant| tenant.has_summary())
}

/// One Tenant with a line for each cluster: from its own status, and otherwise from `members`, the EdgeClusters of the
/// fleet.
pub(crate) fn single_tenant(
    object: &Value,
    members: &[Value],
    has_header: bool,
    now: Timestamp,
) -> CommandOutput {
    let mut table = Table::with_columns(&COLUMNS).with_header(has_header);
    let mut stderr = String::new();
    if let Some(tenant) = table.push_object(&COLUMNS, object, View { wide: true, now }) {
        let status = tenant.status.unwrap_or_default();
        let key = (tenant.metadata.namespace, tenant.metadata.name);
        let mut rows: BTreeMap<String, Vec<String>> = BTreeMap::new();
        let mut truncated = 0;
        for member in members.iter().filter_map(decode::<EdgeCluster>) {
            let name = member.metadata.name.unwrap_or_default();
            let status = member.status.unwrap_or_default();
            let Some(summaries) = &status.tenant_summaries else {
                continue;
            };
            let is_tenant = |tenant: &&TenantSummary| {
                key.0.as_ref() == Some(&tenant.namespace) && key.1.as_ref() == Some(&tenant.name)
            };
            if let Some(tenant) = summaries.tenants.iter().find(is_tenant) {
                rows.insert(name.clone(), row_from_summary(&name, tenant, &status));
            } else if summaries.omitted > 0 {
                truncated += 1;
            }
        }
        // The Tenant's own status has more details, and may be newer.
        for (cluster, state) in conditions::clusters(&status.conditions) {
            let row = cluster_row(&cluster, phase_and_message(&state));
            rows.insert(cluster, row);
        }
        let shown = rows.len();
        rows.into_values().for_each(|row| table.push(row));
        let total = status
            .summary
            .map_or(0, |summary| summary.clusters as usize);
        if total > shown {
            stderr = format!(
                "{shown} of {total} clusters are shown; {truncated} EdgeClusters have no room for all of their Tenants, and new Tenants appear within 30 seconds\n"
            );
        }
    }
    CommandOutput {
        stdout: table.render(),
        stderr,
    }
}

fn status(tenant: &Tenant) -> Option<&TenantStatus> {
    tenant.status.as_ref()
}

/// Formats the number of clusters on which the Tenant is ready, and of all its clusters. After a failed upgrade, a
/// cluster has an error although its previous release is ready.
fn ready(tenant: &Tenant) -> String {
    let status = status(tenant);
    if let Some(summary) = status.and_then(|status| status.summary) {
        return format!("{}/{}", summary.ready, summary.clusters);
    }
    let conditions = status.map_or(&[][..], |status| &status.conditions);
    let clusters = conditions::clusters(conditions);
    let active = clusters.values().filter(|state| !state.has_departed());
    // Only the hub knows whether it ignores chart errors. If it does, the phase is not Error because of them.
    let allow_chart_skip = status.and_then(|status| status.phase.as_deref()) != Some("Error");
    let ready = active
        .clone()
        .filter(|state| Readiness::from_state(state, allow_chart_skip) == Readiness::Ready);
    format!("{}/{}", ready.count(), active.count())
}

/// `state`: the phase on the cluster, whether it is Ready, and why.
fn cluster_row(cluster: &str, state: (&str, Truth, String)) -> Vec<String> {
    let (phase, ready, message) = state;
    let name = format!("└ {}", one_line(cluster));
    let (ready, empty) = (ready.as_str().to_owned(), String::new());
    vec![empty.clone(), name, phase.to_owned(), ready, empty, message]
}

/// The row of a cluster from its EdgeCluster. While that is not connected, its state is the last known.
fn row_from_summary(
    cluster: &str,
    tenant: &TenantSummary,
    status: &EdgeClusterStatus,
) -> Vec<String> {
    let connected = conditions::find(&status.conditions, "Connected");
    let state = one_line(&tenant.state);
    if connected.is_none_or(|connected| connected.truth != Truth::True) {
        let message = format!("last known: {state}");
        return cluster_row(cluster, ("Unknown", Truth::Unknown, message));
    }
    let (phase, ready) = match state.as_str() {
        "Ready" => ("Ready", Truth::True),
        "Error" => ("Error", Truth::False),
        "Unknown" => ("Unknown", Truth::Unknown),
        _ => ("Pending", Truth::False),
    };
    cluster_row(cluster, (phase, ready, one_line(&tenant.reason)))
}

/// Returns the phase on a cluster, whether it is Ready, and why.
pub(super) fn phase_and_message(state: &ClusterState) -> (&'static str, Truth, String) {
    let is_true = |state: &&State| state.truth == Truth::True;
    let error = state.error.as_ref().filter(is_true);
    let progress = state.progress.as_ref().filter(is_true);
    let (phase, relevant) = match (error, state.ready.truth) {
        (Some(error), _) => ("Error", error),
        (None, Truth::True) => ("Ready", &state.ready),
        (None, Truth::Unknown) => ("Unknown", &state.ready),
        (None, Truth::False) => ("Pending", progress.unwrap_or(&state.ready)),
    };
    let message = reason_and_message(&relevant.reason, &relevant.message);
    (phase, state.ready.truth, message)
}
