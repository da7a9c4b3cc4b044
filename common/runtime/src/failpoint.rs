//! Where a test kills this process or has an effect fail, to see that the next start or the next pass puts right
//! what was left: before each external effect and after it. Only with the feature `failpoints`: without it
//! `effect!` is the call that it is given and nothing else, and this module holds names that nobody uses.

#[cfg(feature = "failpoints")]
mod inject;

#[cfg(feature = "failpoints")]
pub use inject::{Injected, PLAN, STRUCK, around, around_now, around_or};

/// The moments of each effect: it has not been made, and it has been but nobody has noted so.
pub const MOMENTS: [&str; 2] = ["before", "after"];

/// The effects of the reconciler and of the agent's process, each at one place in this crate.
pub const EFFECTS: [&str; 62] = [
    "anchor.create",
    "anchor.update",
    "cert-manager-crd.delete",
    "chart-crd.apply",
    "chart.fetch",
    "chart.index",
    "chart.store",
    "crd.apply",
    "crd.replace",
    "drift.heal",
    "enrolment.enrol",
    "enrolment.renew",
    "event.write",
    "finalizer.add",
    "finalizer.remove",
    "helm.folders",
    "helm.install",
    "helm.look",
    "helm.rollback",
    "helm.run-folder",
    "helm.spawn",
    "helm.uninstall",
    "helm.upgrade",
    "helm.values",
    "helm.version",
    "hub-chart.fetch",
    "identity.create",
    "identity.keep",
    "identity.namespace",
    "kubeconfig.write",
    "lease.create",
    "lease.give-up",
    "lease.namespace",
    "lease.write",
    "ledger.create",
    "ledger.replace",
    "leftover.remove",
    "placement.create",
    "placement.delete",
    "placement.namespace",
    "placement.update",
    "release-record.create",
    "release-record.delete",
    "release-record.replace",
    "release.copy",
    "release.forget",
    "release.mark-seen-to",
    "release.set-aside",
    "release.sign-rollback",
    "release.unlock",
    "rescue.delete",
    "rescue.forget",
    "rescue.keep",
    "rescue.let-go",
    "rescue.put-back",
    "scratch.folder",
    "session.open",
    "tenant.annotate",
    "tenant.status",
    "workspace.configure",
    "workspace.create",
    "workspace.delete",
];

/// An effect on the world outside: a call that comes to a `Result`, under a name of [`EFFECTS`], or of the table
/// of the crate that it is in. The error that a test asks for is one of the call's own type; where that has none
/// that fits, the third argument makes it of a text.
#[cfg(feature = "failpoints")]
#[macro_export]
macro_rules! effect {
    ($name:literal, $call:expr) => {
        $crate::failpoint::around($name, $call)
    };
    ($name:literal, $call:expr, $failed:expr) => {
        $crate::failpoint::around_or($name, $call, $failed)
    };
}

#[cfg(not(feature = "failpoints"))]
#[macro_export]
macro_rules! effect {
    ($name:literal, $call:expr) => {
        $call
    };
    ($name:literal, $call:expr, $failed:expr) => {
        $call
    };
}

/// As [`effect!`], of what is done at once, without a future.
#[cfg(feature = "failpoints")]
#[macro_export]
macro_rules! effect_now {
    ($name:literal, $call:expr) => {
        $crate::failpoint::around_now($name, || $call)
    };
}

#[cfg(not(feature = "failpoints"))]
#[macro_export]
macro_rules! effect_now {
    ($name:literal, $call:expr) => {
        $call
    };
}
