//! The small process between the driver and helm: helm's whole group dies with the driver, and when its
//! time is over.

use std::ffi::OsString;
use std::fs::OpenOptions;
use std::io::Read;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use krypton_runtime::clock::BootTime;
use rustix::io::Errno;
use rustix::process::{
    Pid, Resource, Rlimit, Signal, WaitId, WaitIdOptions, getpgrp, getpid, getrlimit,
    kill_current_process_group, kill_process, setpgid, setrlimit, waitid,
};

/// The driver's word for "send SIGTERM to helm".
pub(super) const TERMINATE: u8 = b't';
/// Before the name of the file for Helm's standard output.
pub(super) const OUTPUT_FLAG: &str = "--output-file";
/// The driver's word for "live until then", before eight bytes: see [`millis`], the lowest first.
pub(super) const UNTIL: u8 = b'u';
/// Between two looks at the clock: a sleep does not go on while the machine is suspended, the clock does.
const TICK: Duration = Duration::from_millis(500);
/// The exit code when helm was never started; helm itself ends with 0 or 1.
pub(super) const NOT_STARTED: u8 = 126;
/// Added to the number of the signal that killed helm, as shells do.
pub(super) const SIGNALLED: u8 = 128;

/// The most memory that a helm may map to write to: what it reads of a cluster or a chart may be without end, and
/// is not to take the memory of the others in the container. Go maps 90 MiB before it does anything, and its
/// collector keeps below the 128 MiB of GOMEMLIMIT what it can. Not RLIMIT_AS: Go reserves far more than it uses.
pub(super) const MEMORY_MAX: u64 = 384 << 20;

/// How a time is told to the supervisor: both have the same clock.
pub(super) fn millis(until: BootTime) -> u64 {
    u64::try_from(until.0.as_millis()).unwrap_or(u64::MAX)
}

/// Runs `helm args...`, given as `[UNTIL] [OUTPUT_FLAG FILE] [--] helm args...`, and returns its exit code.
///
/// Standard input is the driver's pipe: a byte `t` sends SIGTERM to helm, its end kills the whole
/// process group at once. That is why the process makes itself the leader of a group of its own.
/// `UNTIL`, in milliseconds of CLOCK_BOOTTIME, is when the group dies though the driver says nothing, which
/// may be stopped or starved; the driver moves it on through the pipe.
/// Helm's standard output goes to FILE, which must not exist yet, or nowhere.
/// The supervisor's own standard output, which helm does not get, shows the driver by its end that this process is gone.
/// Helm that a signal killed gives 128 and the signal's number; one that could not be started, 126.
pub fn supervise(args: impl Iterator<Item = OsString>) -> ExitCode {
    let mut line = args.peekable();
    let until = line.next_if(|word| {
        word.to_str()
            .is_some_and(|word| word.parse::<u64>().is_ok())
    });
    let until = until.and_then(|until| until.to_str()?.parse().ok());
    let until = Arc::new(AtomicU64::new(until.unwrap_or(u64::MAX)));
    let output = line.next_if(|word| word == OUTPUT_FLAG);
    let output = output.and_then(|_| line.next());
    let mut line = line.skip_while(|word| word == "--");
    if is_over(&until) {
        return refuse("its time is over");
    }
    let Some(binary) = line.next() else {
        return refuse("no command is given; this is for the driver's use");
    };
    if getpgrp() != getpid()
        && let Err(error) = setpgid(None, None)
    {
        return refuse(&format!("no process group of its own: {error}"));
    }
    if let Err(error) = limit_memory() {
        return refuse(&format!("no limit of memory: {error}"));
    }
    let mut helm = match start(&binary, line, output) {
        Ok(helm) => helm,
        Err(error) => return refuse(&format!("{}: {error}", binary.display())),
    };
    let pid = Pid::from_child(&helm);
    // Emptied before helm is reaped, after which its number may be another process's.
    let target = Arc::new(Mutex::new(Some(pid)));
    let thread = || std::thread::Builder::new().stack_size(64 << 10);
    let listener = {
        let (target, until) = (Arc::clone(&target), Arc::clone(&until));
        thread().spawn(move || listen(&target, &until))
    };
    let clock = thread().spawn(move || {
        while !is_over(&until) {
            std::thread::sleep(TICK);
        }
        kill_group();
    });
    if let Err(error) = listener.and(clock) {
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

/// Of this process, which needs next to nothing, and of all that it starts.
fn limit_memory() -> rustix::io::Result<()> {
    let most = getrlimit(Resource::Data).maximum.unwrap_or(u64::MAX);
    let limit = Some(MEMORY_MAX.min(most));
    setrlimit(
        Resource::Data,
        Rlimit {
            current: limit,
            maximum: limit,
        },
    )
}

fn is_over(until: &AtomicU64) -> bool {
    millis(BootTime::now()) >= until.load(Ordering::Relaxed)
}

fn kill_group() {
    if let Err(error) = kill_current_process_group(Signal::KILL) {
        complain(&format!("SIGKILL to the group: {error}"));
    }
}

fn listen(target: &Mutex<Option<Pid>>, until: &AtomicU64) {
    let mut pipe = std::io::stdin().lock();
    let mut byte = [0];
    loop {
        match pipe.read(&mut byte) {
            Ok(1..) if byte == [UNTIL] => {
                let mut time = [0; 8];
                // A word that is cut short is the pipe's end, which is read next.
                if pipe.read_exact(&mut time).is_ok() {
                    until.store(u64::from_le_bytes(time), Ordering::Relaxed);
                }
            }
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
