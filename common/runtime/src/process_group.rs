//! A program's whole process group: ended and reaped together, whatever it has started.

use std::time::Duration;

use rustix::process::{Pid, Signal, WaitOptions, kill_process_group, waitpgid};
use tokio::time::sleep;

/// A process closes its files a moment before it can be reaped.
const REAP_AGAIN: Duration = Duration::from_millis(10);

/// Ends all of the group at once. Its leader must not have been waited for: until then its number is
/// nobody else's.
pub fn kill(group: Pid) {
    match kill_process_group(group, Signal::KILL) {
        Ok(()) | Err(rustix::io::Errno::SRCH) => {}
        Err(error) => tracing::error!(%error, "a process group could not be killed"),
    }
}

/// Reaps what has lost its parent: as the first process of a container we inherit it, and nobody else
/// would. The leader itself must have been waited for.
pub async fn orphans_of(group: Pid) {
    // Elsewhere there is no such child, which ends the loop at once.
    while let Ok(ended) = waitpgid(group, WaitOptions::NOHANG) {
        if ended.is_none() {
            sleep(REAP_AGAIN).await;
        }
    }
}
