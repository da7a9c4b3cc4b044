//! The table of KryptonDeployments.

use jiff::Timestamp;
use krypton_crds::krypton_deployment::{DeploymentPhase, KryptonDeployment, Place};
use krypton_types::conditions;
use serde_json::Value;

use crate::render::{Table, age_of, decoded, last_segment, one_line, or_dash, shortened, text_at};

const HEADER: [&str; 9] = [
    "NAMESPACE",
    "NAME",
    "REGION",
    "CLUSTER",
    "PHASE",
    "READY",
    "CHART",
    "MESSAGE",
    "AGE",
];
const MESSAGE_CHARS: usize = 60;

/// One row for each KryptonDeployment; `wide` shows charts and messages whole.
pub(crate) fn deployments_table(objects: &[Value], wide: bool, now: Timestamp) -> Table {
    let mut table = Table::new(&HEADER);
    for object in objects {
        table.push(row(object, wide, now));
    }
    table
}

fn row(object: &Value, wide: bool, now: Timestamp) -> Vec<String> {
    let namespace = or_dash(text_at(object, "/metadata/namespace"));
    let name = or_dash(text_at(object, "/metadata/name"));
    let Some(found) = decoded::<KryptonDeployment>(object) else {
        return vec![namespace, name, "<not readable>".to_owned()];
    };
    let status = found.status.unwrap_or_default();
    let ready = conditions::find(&status.conditions, conditions::READY);
    let phase = status.phase.map(|phase| match phase {
        DeploymentPhase::Pending => "Pending",
        DeploymentPhase::Ready => "Ready",
        DeploymentPhase::Error => "Error",
    });
    let chart = status.last_applied_chart.as_deref().map(one_line);
    let message = status.last_message.as_deref().map(one_line);
    vec![
        namespace,
        name,
        one_line(&found.spec.region.name),
        or_dash(Some(clusters(status.places.as_deref().unwrap_or_default()))),
        or_dash(phase.map(str::to_owned)),
        ready
            .map_or("Unknown", |state| state.truth.as_str())
            .to_owned(),
        or_dash(match wide {
            true => chart,
            false => chart.map(|chart| last_segment(&chart)),
        }),
        or_dash(match wide {
            true => message,
            false => message.map(|text| shortened(&text, MESSAGE_CHARS)),
        }),
        age_of(object, now),
    ]
}

/// Where it is ordered to be; those that it is to go from are marked.
fn clusters(places: &[Place]) -> String {
    let named = places.iter().map(|place| {
        let mark = if place.removing { "(leaving)" } else { "" };
        format!("{}{mark}", one_line(&place.cluster))
    });
    named.collect::<Vec<_>>().join(",")
}
