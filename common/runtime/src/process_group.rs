//! Kills and reaps the process group of a program, including all its child processes.

use std::time::Duration;

use rustix::process::{Pid, Signal, WaitOptions, kill_process_group, waitpgid};
use tokio::time::sleep;

/// A process closes its files shortly before it can be reaped.
const REAP_INTERVAL: Duration = Duration::from_millis(10);

/// Kills the whole group. The caller must not have reaped the group's leader: until then, no other process can have
/// its PID.
pub fn kill(group: Pid) {
    match kill_process_group(group, Signal::KILL) {
        Ok(()) | Err(rustix::io::Errno::SRCH) => {}
        Err(error) => tracing::error!(%error, "a process group could not be killed"),
    }
}

/// Reaps orphaned processes of the group. As the first process of a container, this process inherits them, and no
/// other process reaps them. The caller must have reaped the leader already.
pub async fn reap_orphans(group: Pid) {
    // If this process is not the first one, it has no such child, and the loop ends immediately.
    while let Ok(reaped) = waitpgid(group, WaitOptions::NOHANG) {
        if reaped.is_none() {
            sleep(REAP_INTERVAL).await;
        }
    }
}
