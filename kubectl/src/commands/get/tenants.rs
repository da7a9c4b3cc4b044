//! The table of Tenants.

use std::collections::BTreeMap;

use jiff::Timestamp;
use krypton_crds::edge_cluster::{EdgeCluster, EdgeClusterStatus, SummarisedTenant};
use krypton_crds::tenant::{Tenant, TenantStatus};
use krypton_types::conditions::{self, ClusterState, State, Truth};
use serde_json::Value;

use crate::render::{
    Printed, Table, age_of, decoded, last_segment, one_line, or_dash, reason_and_message,
    shortened, text_at,
};

const HEADER: [&str; 7] = [
    "NAMESPACE",
    "NAME",
    "PHASE",
    "READY",
    "CHART",
    "MESSAGE",
    "AGE",
];
const MESSAGE_CHARS: usize = 60;

/// One row for each Tenant; `wide` shows charts and messages whole, and adds a line per cluster.
pub(crate) fn tenants_table(objects: &[Value], wide: bool, now: Timestamp) -> Table {
    let mut table = Table::new(&HEADER);
    for object in objects {
        let Some(status) = push_row(&mut table, object, wide, now) else {
            continue;
        };
        if wide {
            let clusters = conditions::clusters(&status.conditions);
            for (cluster, state) in &clusters {
                table.push(cluster_line(cluster, state));
            }
            if let Some(summary) = status.summary {
                let shown = u32::try_from(clusters.len()).unwrap_or(u32::MAX);
                let more = summary.clusters.saturating_sub(shown);
                table.push(vec![
                    String::new(),
                    format!("└ and {more} more, shown by its name"),
                ]);
            }
        }
    }
    table
}

/// Whether the Tenant's status does not list all its clusters: their EdgeClusters do.
pub(crate) fn is_summary(object: &Value) -> bool {
    let status = decoded::<Tenant>(object).and_then(|tenant| tenant.status);
    status.is_some_and(|status| status.summary.is_some())
}

/// One Tenant with a line for each cluster: as its own status has it, or else as `members` have it, the
/// EdgeClusters of the fleet.
pub(crate) fn one_tenant(object: &Value, members: &[Value], now: Timestamp) -> Printed {
    let mut table = Table::new(&HEADER);
    let mut stderr = String::new();
    if let Some(status) = push_row(&mut table, object, true, now) {
        let key = |pointer| object.pointer(pointer).and_then(Value::as_str);
        let key = (key("/metadata/namespace"), key("/metadata/name"));
        let mut lines: BTreeMap<String, Vec<String>> = BTreeMap::new();
        let mut without_room = 0;
        for member in members.iter().filter_map(decoded::<EdgeCluster>) {
            let name = member.metadata.name.unwrap_or_default();
            let status = member.status.unwrap_or_default();
            let summarised = status.summarised.as_ref();
            let mut listed = summarised.into_iter().flat_map(|found| &found.tenants);
            let found = listed.find(|tenant| {
                key == (Some(tenant.namespace.as_str()), Some(tenant.name.as_str()))
            });
            if let Some(found) = found {
                lines.insert(name.clone(), listed_line(&name, found, &status));
            } else if summarised.is_some_and(|found| found.omitted > 0) {
                without_room += 1;
            }
        }
        // It says more, and may be newer.
        for (cluster, state) in conditions::clusters(&status.conditions) {
            lines.insert(cluster.clone(), cluster_line(&cluster, &state));
        }
        let told = lines.len();
        lines.into_values().for_each(|line| table.push(line));
        if let Some(summary) = status
            .summary
            .filter(|found| (found.clusters as usize) > told)
        {
            stderr = format!(
                "{told} of {} clusters are told of; {without_room} EdgeClusters have no room for all of their Tenants, and what is new is there within half a minute\n",
                summary.clusters
            );
        }
    }
    Printed {
        stdout: table.render(),
        stderr,
    }
}

/// The Tenant's own row; its status, where it can be read.
fn push_row(table: &mut Table, object: &Value, wide: bool, now: Timestamp) -> Option<TenantStatus> {
    let namespace = or_dash(text_at(object, "/metadata/namespace"));
    let name = or_dash(text_at(object, "/metadata/name"));
    let Some(tenant) = decoded::<Tenant>(object) else {
        table.push(vec![namespace, name, "<not readable>".to_owned()]);
        return None;
    };
    let status = tenant.status.unwrap_or_default();
    let chart = status.last_applied_chart.as_deref().map(one_line);
    let message = status.last_message.as_deref().map(one_line);
    table.push(vec![
        namespace,
        name,
        or_dash(status.phase.as_deref().map(one_line)),
        ready_of_all(&status),
        or_dash(if wide {
            chart
        } else {
            chart.map(|chart| last_segment(&chart))
        }),
        or_dash(if wide {
            message
        } else {
            message.map(|text| shortened(&text, MESSAGE_CHARS))
        }),
        age_of(object, now),
    ]);
    Some(status)
}

fn ready_of_all(status: &TenantStatus) -> String {
    if let Some(summary) = status.summary {
        return format!("{}/{}", summary.ready, summary.clusters);
    }
    let clusters = conditions::clusters(&status.conditions);
    let counted = clusters.values().filter(|state| !state.has_departed());
    let is_ready = |state: &&ClusterState| state.ready.truth == Truth::True;
    format!(
        "{}/{}",
        counted.clone().filter(is_ready).count(),
        counted.count()
    )
}

/// Of a cluster that its EdgeCluster tells of. While that is not connected, it is the last word.
fn listed_line(
    cluster: &str,
    tenant: &SummarisedTenant,
    status: &EdgeClusterStatus,
) -> Vec<String> {
    let connected = conditions::find(&status.conditions, "Connected");
    let connected = connected.is_some_and(|state| state.truth == Truth::True);
    let standing = one_line(&tenant.standing);
    let (phase, ready, told) = match standing.as_str() {
        _ if !connected => ("Unknown", Truth::Unknown, format!("last known: {standing}")),
        "Ready" => ("Ready", Truth::True, one_line(&tenant.reason)),
        "Error" => ("Error", Truth::False, one_line(&tenant.reason)),
        "Unknown" => ("Unknown", Truth::Unknown, one_line(&tenant.reason)),
        _ => ("Pending", Truth::False, one_line(&tenant.reason)),
    };
    vec![
        String::new(),
        format!("└ {}", one_line(cluster)),
        phase.to_owned(),
        ready.as_str().to_owned(),
        String::new(),
        told,
    ]
}

fn cluster_line(cluster: &str, state: &ClusterState) -> Vec<String> {
    let is_true = |state: &Option<State>| {
        state
            .as_ref()
            .filter(|state| state.truth == Truth::True)
            .cloned()
    };
    let error = is_true(&state.error);
    let (phase, told) = match (error, state.ready.truth) {
        (Some(error), _) => ("Error", error),
        (None, Truth::True) => ("Ready", state.ready.clone()),
        (None, Truth::Unknown) => ("Unknown", state.ready.clone()),
        (None, Truth::False) => (
            "Pending",
            is_true(&state.progress).unwrap_or_else(|| state.ready.clone()),
        ),
    };
    vec![
        String::new(),
        format!("└ {}", one_line(cluster)),
        phase.to_owned(),
        state.ready.truth.as_str().to_owned(),
        String::new(),
        reason_and_message(&told.reason, &told.message),
    ]
}
