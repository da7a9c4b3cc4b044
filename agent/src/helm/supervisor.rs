//! The small process between the driver and helm: helm's whole group dies with the driver.

use std::ffi::OsString;
use std::io::Read;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::{Arc, Mutex, PoisonError};

use rustix::io::Errno;
use rustix::process::{
    Pid, Signal, WaitId, WaitIdOptions, getpgrp, getpid, kill_current_process_group, kill_process,
    setpgid, waitid,
};

/// The driver's word for "send SIGTERM to helm".
pub(super) const TERMINATE: u8 = b't';
/// The exit code when helm was never started; helm itself ends with 0 or 1.
pub(super) const NOT_STARTED: u8 = 126;
/// Added to the number of the signal that killed helm, as shells do.
pub(super) const SIGNALLED: u8 = 128;

/// Runs `helm args...`, given as `[--] helm args...`, and returns its exit code.
///
/// Standard input is the driver's pipe: a byte `t` sends SIGTERM to helm, its end kills the whole
/// process group at once. That is why the process makes itself the leader of a group of its own.
/// Standard output, which helm does not get, shows the driver by its end that this process is gone.
/// Helm that a signal killed gives 128 and the signal's number; one that could not be started, 126.
pub fn supervise(args: impl Iterator<Item = OsString>) -> ExitCode {
    let mut line = args.skip_while(|word| word == "--");
    let Some(binary) = line.next() else {
        return refuse("no command is given; this is for the driver's use");
    };
    if getpgrp() != getpid()
        && let Err(error) = setpgid(None, None)
    {
        return refuse(&format!("no process group of its own: {error}"));
    }
    let mut helm = match start(&binary, line) {
        Ok(helm) => helm,
        Err(error) => return refuse(&format!("{}: {error}", binary.display())),
    };
    let pid = Pid::from_child(&helm);
    // Emptied before helm is reaped, after which its number may be another process's.
    let target = Arc::new(Mutex::new(Some(pid)));
    let listener = {
        let target = Arc::clone(&target);
        std::thread::Builder::new()
            .stack_size(64 << 10)
            .spawn(move || listen(&target))
    };
    if let Err(error) = listener {
        // Unwatched, helm would outlive the driver.
        end(&mut helm);
        return refuse(&format!("no thread: {error}"));
    }
    let exited = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
    while matches!(waitid(WaitId::Pid(pid), exited), Err(Errno::INTR)) {}
    *target.lock().unwrap_or_else(PoisonError::into_inner) = None;
    match helm.wait() {
        Ok(status) => {
            let code = status.code().map_or_else(
                || {
                    u8::try_from(status.signal().unwrap_or(0))
                        .unwrap_or(0)
                        .saturating_add(SIGNALLED)
                },
                |code| u8::try_from(code).unwrap_or(1),
            );
            ExitCode::from(code)
        }
        Err(error) => {
            complain(&format!("waiting for helm: {error}"));
            ExitCode::FAILURE
        }
    }
}

fn listen(target: &Mutex<Option<Pid>>) {
    let mut pipe = std::io::stdin().lock();
    let mut byte = [0];
    loop {
        match pipe.read(&mut byte) {
            Ok(1..) if byte == [TERMINATE] => {
                let target = target.lock().unwrap_or_else(PoisonError::into_inner);
                if let Some(pid) = *target
                    && let Err(error) = kill_process(pid, Signal::TERM)
                {
                    complain(&format!("SIGTERM to helm: {error}"));
                }
            }
            Ok(1..) => {}
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Ok(0) | Err(_) => {
                if let Err(error) = kill_current_process_group(Signal::KILL) {
                    complain(&format!("SIGKILL to the group: {error}"));
                }
                return;
            }
        }
    }
}

#[allow(
    clippy::disallowed_methods,
    reason = "the one place where helm itself is started"
)]
fn start(binary: &OsString, args: impl Iterator<Item = OsString>) -> std::io::Result<Child> {
    Command::new(binary)
        .args(args)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .spawn()
}

fn end(helm: &mut Child) {
    if let Err(error) = helm.kill().and_then(|()| helm.wait()) {
        complain(&format!("SIGKILL to helm: {error}"));
    }
}

fn refuse(why: &str) -> ExitCode {
    complain(why);
    ExitCode::from(NOT_STARTED)
}

fn complain(what: &str) {
    // Standard error is the driver's pipe, and no log.
    eprintln!("helm-run: {what}");
}
