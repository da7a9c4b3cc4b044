//! The table of EdgeClusters.

use krypton_crds::edge_cluster::{EdgeCluster, EdgeClusterStatus, Mode};
use krypton_types::conditions;
use krypton_types::desired::Version;
use serde_json::Value;

use crate::render::{
    Column, Table, View, age, common_columns, message_cell, or_dash, reason_and_message,
};

const COLUMNS: [Column<EdgeCluster>; 9] = [
    ("NAME", common_columns::name),
    ("MODE", |it, _| mode(it)),
    ("CONNECTED", |it, _| truth(it, "Connected")),
    ("READY", |it, _| truth(it, conditions::READY)),
    ("TENANTS", |it, _| {
        let counts = status(it).and_then(|status| status.tenants);
        or_dash(counts.map(|counts| format!("{}/{}", counts.ready, counts.total)))
    }),
    ("VERSION", |it, _| {
        or_dash(status(it).and_then(|status| status.kubernetes_version.as_deref()))
    }),
    ("APPLIED", |it, _| {
        let applied = status(it).and_then(|status| status.applied.as_ref());
        or_dash(applied.map(|applied| version(applied.epoch, applied.generation)))
    }),
    ("MESSAGE", |it, view| {
        message_cell(message(it).as_deref(), view)
    }),
    ("AGE", common_columns::age),
];

const WIDE_COLUMNS: [Column<EdgeCluster>; 4] = [
    ("WANTED", |it, _| {
        let desired = status(it).and_then(|status| status.desired.as_ref());
        or_dash(desired.map(|desired| version(desired.epoch, desired.generation)))
    }),
    ("LAST-SEEN", |it, view| {
        let seen = status(it).and_then(|status| status.last_seen.as_ref());
        or_dash(seen.map(|seen| age(seen.0, view.now)))
    }),
    ("HOLDER", |it, _| {
        or_dash(status(it).and_then(|status| status.lease_holder.as_deref()))
    }),
    ("CLUSTER-UID", |it, _| {
        or_dash(status(it).and_then(|status| status.cluster_uid.as_deref()))
    }),
];

/// One row for each EdgeCluster; more columns and complete messages if wide.
pub(crate) fn clusters_table(objects: &[Value], view: View) -> Table {
    match view.wide {
        true => Table::of_objects(&[&COLUMNS[..], &WIDE_COLUMNS].concat(), objects, view),
        false => Table::of_objects(&COLUMNS, objects, view),
    }
}

fn status(cluster: &EdgeCluster) -> Option<&EdgeClusterStatus> {
    cluster.status.as_ref()
}

fn version(epoch: u64, generation: u64) -> String {
    Version { epoch, generation }.to_string()
}

/// Returns the process that reconciles, and obstacles to that, as in kubectl's `Ready,SchedulingDisabled`.
fn mode(cluster: &EdgeCluster) -> String {
    let mut modes = vec![match status(cluster).and_then(|status| status.mode) {
        Some(Mode::Agent) => "agent",
        Some(Mode::Proxy) => "proxy",
        Some(Mode::None) => "none",
        None => "-",
    }];
    if cluster.spec.paused {
        modes.push("paused");
    }
    if cluster.spec.banned {
        modes.push("banned");
    }
    if cluster.spec.accepted == Some(false) {
        modes.push("not accepted");
    }
    modes.join(",")
}

fn truth(cluster: &EdgeCluster, type_: &str) -> String {
    let state = status(cluster).and_then(|it| conditions::find(&it.conditions, type_));
    state
        .map_or("Unknown", |state| state.truth.as_str())
        .to_owned()
}

/// The first condition that is not True.
fn message(cluster: &EdgeCluster) -> Option<String> {
    let mut conditions = status(cluster)?.conditions.iter();
    let failing = conditions.find(|condition| condition.status != "True")?;
    Some(reason_and_message(&failing.reason, &failing.message))
}
