//! Kills Helm processes when their Lease is not renewed.

use std::sync::Arc;

use krypton_helm::driver::StopHandle;
use krypton_runtime::clock::{self, BootTime};
use krypton_runtime::lease::LeaseState;
use krypton_runtime::newest::NewestSeen as _;
use tokio::sync::watch;

/// Kills running Helm processes when the Lease has not been renewed for `KILL_AFTER`.
pub(crate) async fn guard_runs(
    mut lease_state: watch::Receiver<LeaseState>,
    stop_handle: Arc<StopHandle>,
) {
    loop {
        let now = BootTime::now();
        let next_check = enforce(&lease_state.get_and_update(), &stop_handle, now);
        tokio::select! {
            changed = lease_state.changed() => if changed.is_err() { return },
            () = clock::sleep_until(next_check, now) => {}
        }
    }
}

/// Extends the permission of running Helm processes to the limit of the Lease, or kills them. Returns the time of the
/// next check.
pub(crate) fn enforce(
    lease_state: &LeaseState,
    stop_handle: &StopHandle,
    now: BootTime,
) -> Option<BootTime> {
    let until = lease_state.runs_until(now);
    match until {
        Some(until) => stop_handle.permit(until),
        None => stop_handle.kill(),
    }
    until
}
