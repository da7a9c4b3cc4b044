//! The hub's part of what a test can fail: see [`krypton_agent::failpoint`].

/// The effects of the hub beside those of the reconciler, which it runs, each at one place in this crate.
pub const EFFECTS: [&str; 24] = [
    "authority.create",
    "authority.step",
    "chart-pin.create",
    "chart-pin.replace",
    "deployment.marks",
    "deployment.status",
    "edge-cluster.bind",
    "edge-cluster.create",
    "edge-cluster.finalizers",
    "edge-cluster.status",
    "enrolment.edge-cluster",
    "enrolment.mark",
    "epoch.create",
    "epoch.replace",
    "home.tenant-status",
    "join-info.create",
    "join-info.replace",
    "join-token.redeem",
    "join-token.sweep",
    "notice.write",
    "register.create",
    "register.replace",
    "values-salt.create",
    "values-salt.replace",
];
