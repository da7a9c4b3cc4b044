//! Kills what runs under a Lease that is not renewed.

use std::sync::Arc;

use krypton_helm::driver::StopHandle;
use krypton_runtime::clock::{self, BootTime};
use krypton_runtime::lease::LeaseState;
use krypton_runtime::newest::NewestSeen as _;
use tokio::sync::watch;

/// Kills what runs when the Lease has not been renewed for `KILL_AFTER`.
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

/// Lets what runs live for as long as the Lease allows, else kills it. Says when to look again though
/// nothing has happened.
pub(crate) fn enforce(hold: &LeaseState, runs: &StopHandle, now: BootTime) -> Option<BootTime> {
    let until = hold.runs_until(now);
    match until {
        Some(until) => runs.permit(until),
        None => runs.kill(),
    }
    until
}
