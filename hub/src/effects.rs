//! Lists the hub's side effects that a test can make fail: see [`krypton_runtime::failpoint`].

/// The hub's own effects, without the effects of the reconciler that it runs. Each has one place in this
/// crate.
pub const EFFECTS: [&str; 25] = [
    "authority.create",
    "authority.step",
    "chart-pin.create",
    "chart-pin.replace",
    "deployment.finalizers",
    "deployment.status",
    "edge-cluster.create",
    "edge-cluster.finalizers",
    "edge-cluster.status",
    "enrollment.edge-cluster",
    "enrollment.mark",
    "epoch.create",
    "epoch.replace",
    "home.tenant-status",
    "join-info.create",
    "join-info.replace",
    "join-token.redeem",
    "join-token.sweep",
    "lead.label",
    "placement.begin",
    "placement.end",
    "register.create",
    "register.replace",
    "values-salt.create",
    "values-salt.replace",
];
