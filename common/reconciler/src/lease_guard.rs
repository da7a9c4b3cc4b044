//! Kills Helm processes when their Lease is not renewed.

use std::sync::Arc;

use krypton_helm::driver::StopHandle;
use krypton_runtime::clock::{self, BootTime};
use krypton_runtime::lease::LeaseState;
use krypton_runtime::newest::NewestSeen as _;
use tokio::sync::watch;

/// Kills running Helm processes when the Lease has not been renewed for `KILL_AFTER`.
pub(crate) async fn end_runs(mut hold: watch::Receiver<LeaseState>, handle: Arc<StopHandle>) {
    loop {
        let now = BootTime::now();
        let until = enforce(&hold.see(), &handle, now);
        tokio::select! {
            changed = hold.changed() => if changed.is_err() { return },
            () = clock::sleep_until(until, now) => {}
        }
    }
}

/// Extends the permission of running Helm processes to the limit of the Lease, or kills them. Returns the time of the
/// next check.
pub(crate) fn enforce(hold: &LeaseState, runs: &StopHandle, now: BootTime) -> Option<BootTime> {
    let until = hold.runs_until(now);
    match until {
        Some(until) => runs.permit(until),
        None => runs.kill(),
    }
    until
}
