//! Failpoints before and after each external effect. A test kills the process there or makes the effect fail,
//! and checks that the next start or reconcile repairs the result. Only with the feature `failpoints`:
//! without it, `effect!` is just the call, and this module only defines unused names.

#[cfg(feature = "failpoints")]
mod inject;

#[cfg(feature = "failpoints")]
pub use inject::{Injected, PLAN, STRUCK, around, around_now, around_or};

/// Positions of a failpoint: before the effect, and after it but before any code has recorded it.
pub const MOMENTS: [&str; 2] = ["before", "after"];

/// Effects of the reconciler and of the agent process, each at one place in this crate.
pub const EFFECTS: [&str; 62] = [
    "anchor.create",
    "anchor.update",
    "backup.delete",
    "backup.forget",
    "backup.keep",
    "backup.let-go",
    "backup.put-back",
    "cert-manager-crd.delete",
    "chart-crd.apply",
    "chart.fetch",
    "chart.index",
    "chart.store",
    "crd.apply",
    "crd.replace",
    "drift.heal",
    "enrollment.enroll",
    "enrollment.renew",
    "event.write",
    "finalizer.add",
    "finalizer.remove",
    "helm.folders",
    "helm.get",
    "helm.install",
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
    "leftover.remove",
    "placement.create",
    "placement.delete",
    "placement.namespace",
    "placement.update",
    "record.create",
    "record.replace",
    "release-record.create",
    "release-record.delete",
    "release-record.replace",
    "release.copy",
    "release.forget",
    "release.mark-seen-to",
    "release.set-aside",
    "release.sign-rollback",
    "release.unlock",
    "scratch.folder",
    "session.open",
    "tenant.annotate",
    "tenant.status",
    "workspace.configure",
    "workspace.create",
    "workspace.delete",
];

/// An external effect: a call with a `Result`, under a name of [`EFFECTS`] or of its crate's table.
/// An injected error has the type of the call's error. If that type cannot represent one, the third argument
/// converts a text into it.
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

/// Like [`effect!`], for a synchronous call.
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
