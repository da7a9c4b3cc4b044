//! The table of KryptonDeployments.

use krypton_crds::krypton_deployment::{
    DeploymentPhase, KryptonDeployment, KryptonDeploymentStatus,
};
use krypton_types::conditions;
use serde_json::Value;

use crate::render::{
    Column, Table, View, chart_cell, common_columns, message_cell, one_line, or_dash,
};

const COLUMNS: [Column<KryptonDeployment>; 9] = [
    ("NAMESPACE", common_columns::namespace),
    ("NAME", common_columns::name),
    ("REGION", |it, _| one_line(&it.spec.region.name)),
    ("CLUSTER", |it, _| or_dash(status(it).map(clusters))),
    ("PHASE", |it, _| {
        let phase = status(it).and_then(|status| status.phase);
        or_dash(phase.map(DeploymentPhase::as_str))
    }),
    ("READY", |it, _| {
        let ready = status(it).and_then(|it| conditions::find(&it.conditions, conditions::READY));
        ready
            .map_or("Unknown", |ready| ready.truth.as_str())
            .to_owned()
    }),
    ("CHART", |it, view| {
        let chart = status(it).and_then(|it| it.last_applied_chart.as_deref());
        chart_cell(chart, view)
    }),
    ("MESSAGE", |it, view| {
        message_cell(status(it).and_then(|it| it.last_message.as_deref()), view)
    }),
    ("AGE", common_columns::age),
];

/// One row for each KryptonDeployment; complete charts and messages if wide.
pub(crate) fn deployments_table(objects: &[Value], view: View) -> Table {
    Table::of_objects(&COLUMNS, objects, view)
}

fn status(deployment: &KryptonDeployment) -> Option<&KryptonDeploymentStatus> {
    deployment.status.as_ref()
}

/// The clusters of the release. Marks clusters that will lose it.
fn clusters(status: &KryptonDeploymentStatus) -> String {
    let names = status.placements.iter().flatten().map(|placement| {
        let mark = if placement.removing { "(leaving)" } else { "" };
        format!("{}{mark}", one_line(&placement.cluster))
    });
    names.collect::<Vec<_>>().join(",")
}
