//! The table of Tenants.

use jiff::Timestamp;
use krypton_common::conditions::{self, ClusterState, State, Truth};
use krypton_crds::tenant::Tenant;
use serde_json::Value;

use super::decoded;
use super::layout::{Table, age_of, one_line, or_dash, reason_and_message, shortened, text_at};

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
pub fn tenants_table(objects: &[Value], wide: bool, now: Timestamp) -> String {
    let mut table = Table::new(&HEADER);
    for object in objects {
        let namespace = or_dash(text_at(object, "/metadata/namespace"));
        let name = or_dash(text_at(object, "/metadata/name"));
        let Some(tenant) = decoded::<Tenant>(object) else {
            table.push(vec![namespace, name, "<not readable>".to_owned()]);
            continue;
        };
        let status = tenant.status.unwrap_or_default();
        let clusters = conditions::clusters(&status.conditions);
        let ready = clusters
            .values()
            .filter(|state| state.ready.truth == Truth::True)
            .count();
        let chart = status.last_applied_chart.as_deref().map(one_line);
        let message = status.last_message.as_deref().map(one_line);
        table.push(vec![
            namespace,
            name,
            or_dash(status.phase.as_deref().map(one_line)),
            format!("{ready}/{}", clusters.len()),
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
        if wide {
            for (cluster, state) in &clusters {
                table.push(cluster_line(cluster, state));
            }
        }
    }
    table.render()
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

/// `cert-manager:1.19.1` of `https://charts.jetstack.io/cert-manager:1.19.1`.
fn last_segment(chart: &str) -> String {
    chart.rsplit('/').next().unwrap_or(chart).to_owned()
}
