//! Process between the driver and Helm. It kills Helm's process group when the driver exits or the time limit
//! passes.

use std::ffi::OsString;
use std::fs::OpenOptions;
use std::io::Read;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use krypton_runtime::clock::BootTime;
use parking_lot::Mutex;
use rustix::io::Errno;
use rustix::process::{
    Pid, Resource, Rlimit, Signal, WaitId, WaitIdOptions, getpgrp, getpid, getrlimit,
    kill_current_process_group, kill_process, setpgid, setrlimit, waitid,
};

/// Command of the driver: send SIGTERM to Helm.
pub(super) const TERMINATE: u8 = b't';
/// Flag with the file for Helm's standard output.
pub(super) const OUTPUT_FLAG: &str = "--output-file";
/// Command of the driver: set the time limit. Eight bytes follow: see [`millis`], in little-endian order.
pub(super) const UNTIL: u8 = b'u';
/// Interval between two reads of the clock. Unlike the clock, a sleep pauses while the machine is suspended.
const CLOCK_INTERVAL: Duration = Duration::from_millis(500);
/// Exit code if Helm did not start. Helm itself exits with 0 or 1.
pub(super) const NOT_STARTED: u8 = 126;
/// Added to the number of the signal that killed Helm, as shells do.
pub(super) const SIGNALLED: u8 = 128;

/// Limit of writable memory that Helm may map. Data from a cluster or a chart has no size limit and must not
/// use up the container's memory. Go maps 90 MiB at startup, and its garbage collector tries to stay below
/// the 128 MiB of GOMEMLIMIT. RLIMIT_AS is not suitable, because Go reserves far more address space than it
/// uses.
pub(super) const MEMORY_MAX: u64 = 384 << 20;

/// Encodes a time for the supervisor, which reads the same clock.
pub(super) fn millis(until: BootTime) -> u64 {
    u64::try_from(until.0.as_millis()).unwrap_or(u64::MAX)
}

/// Runs `helm args...`, given as `[UNTIL] [OUTPUT_FLAG FILE] [--] helm args...`, and returns its exit code.
///
/// Standard input is the driver's pipe. A byte `t` sends SIGTERM to Helm. When the pipe closes, the
/// supervisor kills the whole process group immediately. For this, it becomes the leader of a new process
/// group.
///
/// `UNTIL` is the time limit of the group in milliseconds of CLOCK_BOOTTIME. It also applies while the driver
/// is stopped or starved. The driver extends it through the pipe.
///
/// Helm's standard output goes to FILE, which must not exist yet. Without FILE, it is discarded. Helm does
/// not inherit the supervisor's own standard output, so the driver sees from its end that this process has
/// exited.
///
/// Returns 128 plus the signal's number if a signal killed Helm, and 126 if Helm did not start.
pub fn supervise(args: impl Iterator<Item = OsString>) -> ExitCode {
    let mut args = args.peekable();
    let until = args.next_if(|arg| arg.to_str().is_some_and(|arg| arg.parse::<u64>().is_ok()));
    let until = until.and_then(|until| until.to_str()?.parse().ok());
    let until = Arc::new(AtomicU64::new(until.unwrap_or(u64::MAX)));
    let output = args.next_if(|arg| arg == OUTPUT_FLAG);
    let output = output.and_then(|_| args.next());
    let mut args = args.skip_while(|arg| arg == "--");
    if is_expired(&until) {
        return refuse("its deadline has passed");
    }
    let Some(binary) = args.next() else {
        return refuse("no command is given; this is for the driver's use");
    };
    if getpgrp() != getpid()
        && let Err(error) = setpgid(None, None)
    {
        return refuse(&format!("failed to create a process group: {error}"));
    }
    if let Err(error) = limit_memory() {
        return refuse(&format!("no limit of memory: {error}"));
    }
    let mut helm = match start(&binary, args, output) {
        Ok(helm) => helm,
        Err(error) => return refuse(&format!("{}: {error}", binary.display())),
    };
    let pid = Pid::from_child(&helm);
    // Cleared before Helm is reaped, because the kernel can reuse the process ID afterwards.
    let helm_pid = Arc::new(Mutex::new(Some(pid)));
    let thread = || std::thread::Builder::new().stack_size(64 << 10);
    let command_reader = {
        let (helm_pid, until) = (Arc::clone(&helm_pid), Arc::clone(&until));
        thread().spawn(move || read_commands(&helm_pid, &until))
    };
    let time_limit = thread().spawn(move || {
        while !is_expired(&until) {
            std::thread::sleep(CLOCK_INTERVAL);
        }
        kill_group();
    });
    if let Err(error) = command_reader.and(time_limit) {
        // Without these threads, Helm would outlive the driver.
        kill_and_reap(&mut helm);
        return refuse(&format!("no thread: {error}"));
    }
    let exited = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
    while matches!(waitid(WaitId::Pid(pid), exited), Err(Errno::INTR)) {}
    *helm_pid.lock() = None;
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
            report(&format!("waiting for helm: {error}"));
            ExitCode::FAILURE
        }
    }
}

/// Limits the memory of this process, which needs very little, and of its child processes.
fn limit_memory() -> rustix::io::Result<()> {
    let hard_limit = getrlimit(Resource::Data).maximum.unwrap_or(u64::MAX);
    let limit = Some(MEMORY_MAX.min(hard_limit));
    setrlimit(
        Resource::Data,
        Rlimit {
            current: limit,
            maximum: limit,
        },
    )
}

fn is_expired(until: &AtomicU64) -> bool {
    millis(BootTime::now()) >= until.load(Ordering::Relaxed)
}

fn kill_group() {
    if let Err(error) = kill_current_process_group(Signal::KILL) {
        report(&format!("SIGKILL to the group: {error}"));
    }
}

fn read_commands(helm_pid: &Mutex<Option<Pid>>, until: &AtomicU64) {
    let mut pipe = std::io::stdin().lock();
    let mut byte = [0];
    loop {
        match pipe.read(&mut byte) {
            Ok(1..) if byte == [UNTIL] => {
                let mut millis = [0; 8];
                // An incomplete command means that the pipe has closed. The next read reports this.
                if pipe.read_exact(&mut millis).is_ok() {
                    until.store(u64::from_le_bytes(millis), Ordering::Relaxed);
                }
            }
            Ok(1..) if byte == [TERMINATE] => {
                let helm_pid = helm_pid.lock();
                if let Some(pid) = *helm_pid
                    && let Err(error) = kill_process(pid, Signal::TERM)
                {
                    report(&format!("SIGTERM to helm: {error}"));
                }
            }
            Ok(1..) => {}
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Ok(0) | Err(_) => {
                kill_group();
                return;
            }
        }
    }
}

#[allow(
    clippy::disallowed_methods,
    reason = "the one place where helm itself is started"
)]
fn start(
    binary: &OsString,
    args: impl Iterator<Item = OsString>,
    output: Option<OsString>,
) -> std::io::Result<Child> {
    let stdout = match output {
        Some(file) => {
            let mut options = OpenOptions::new();
            let options = options.write(true).create_new(true).mode(0o600);
            Stdio::from(options.open(file)?)
        }
        None => Stdio::null(),
    };
    Command::new(binary)
        .args(args)
        .stdin(Stdio::null())
        .stdout(stdout)
        .spawn()
}

fn kill_and_reap(helm: &mut Child) {
    if let Err(error) = helm.kill().and_then(|()| helm.wait()) {
        report(&format!("SIGKILL to helm: {error}"));
    }
}

fn refuse(reason: &str) -> ExitCode {
    report(reason);
    ExitCode::from(NOT_STARTED)
}

fn report(message: &str) {
    // Standard error is the driver's pipe, not a log.
    eprintln!("helm-run: {message}");
}
