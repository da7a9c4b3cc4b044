//! The table of EdgeClusters.

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use krypton_crds::edge_cluster::{EdgeCluster, EdgeClusterStatus, Mode};
use krypton_types::desired::Version;
use serde_json::Value;

use crate::render::{Table, age, age_of, decoded, one_line, or_dash, reason_and_message, text_at};

const CONNECTED: &str = "Connected";
const HEADER: [&str; 7] = [
    "NAME",
    "MODE",
    "CONNECTED",
    "READY",
    "VERSION",
    "APPLIED",
    "AGE",
];
const WIDE_HEADER: [&str; 5] = ["WANTED", "LAST-SEEN", "HOLDER", "CLUSTER-UID", "MESSAGE"];

/// One row for each EdgeCluster; `wide` adds columns.
pub(crate) fn clusters_table(objects: &[Value], wide: bool, now: Timestamp) -> Table {
    let mut header = HEADER.to_vec();
    if wide {
        header.extend(WIDE_HEADER);
    }
    let mut table = Table::new(&header);
    for object in objects {
        table.push(row(object, wide, now));
    }
    table
}

fn row(object: &Value, wide: bool, now: Timestamp) -> Vec<String> {
    let name = or_dash(text_at(object, "/metadata/name"));
    let Some(cluster) = decoded::<EdgeCluster>(object) else {
        return vec![name, "<not readable>".to_owned()];
    };
    let status = cluster.status.clone().unwrap_or_default();
    let connected = status
        .conditions
        .iter()
        .find(|condition| condition.type_ == CONNECTED);
    let mut cells = vec![
        name,
        mode(&cluster, &status),
        connected.map_or("Unknown".to_owned(), |condition| {
            one_line(&condition.status)
        }),
        or_dash(
            status
                .tenants
                .map(|counts| format!("{}/{}", counts.ready, counts.total)),
        ),
        or_dash(status.kubernetes_version.as_deref().map(one_line)),
        or_dash(status.applied.as_ref().map(|applied| {
            Version {
                epoch: applied.epoch,
                generation: applied.generation,
            }
            .to_string()
        })),
        age_of(object, now),
    ];
    if wide {
        let wanted = status.desired.as_ref().map(|desired| {
            Version {
                epoch: desired.epoch,
                generation: desired.generation,
            }
            .to_string()
        });
        cells.extend([
            or_dash(wanted),
            or_dash(status.last_seen.as_ref().map(|time| age(time.0, now))),
            or_dash(status.holder.as_deref().map(one_line)),
            or_dash(status.cluster_uid.as_deref().map(one_line)),
            or_dash(message(&status.conditions)),
        ]);
    }
    cells
}

/// Who reconciles, and what keeps it from doing so, as in kubectl's `Ready,SchedulingDisabled`.
fn mode(cluster: &EdgeCluster, status: &EdgeClusterStatus) -> String {
    let mut words = vec![match status.mode {
        Some(Mode::Agent) => "agent",
        Some(Mode::Proxy) => "proxy",
        Some(Mode::None) => "none",
        None => "-",
    }];
    if cluster.spec.paused {
        words.push("paused");
    }
    if cluster.spec.banned {
        words.push("banned");
    }
    if cluster.spec.accepted == Some(false) {
        words.push("not accepted");
    }
    words.join(",")
}

/// The first condition that is not True.
fn message(conditions: &[Condition]) -> Option<String> {
    let wrong = conditions
        .iter()
        .find(|condition| condition.status != "True")?;
    Some(reason_and_message(&wrong.reason, &wrong.message))
}
