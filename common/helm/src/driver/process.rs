//! Runs one Helm process: deadline, stop requests and standard error.

use std::collections::VecDeque;
use std::ffi::OsString;
use std::fmt;
use std::io;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use futures::future::BoxFuture;
use krypton_runtime::clock::BootTime;
use krypton_runtime::process_group::{self, reap_orphans};
use rustix::process::Pid;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt};
use tokio::process::{Child, ChildStderr, ChildStdin, ChildStdout, Command};
use tokio::time::{Instant, sleep_until, timeout};

use super::stop::{StopRequest, StopSignal};
use super::supervisor::{NOT_STARTED, OUTPUT_FLAG, SIGNALLED, TERMINATE, UNTIL, millis};

/// Number of bytes to keep of standard error.
const TAIL_MAX: usize = 64 << 10;
/// `helm version` sends no requests, so it needs little time.
const VERSION_DEADLINE: Duration = Duration::from_secs(30);
/// `helm version` prints only a few characters.
const VERSION_MAX: u64 = 256;
/// Time to read the rest of standard error. A killed process closes it immediately, but one outside its
/// process group may not.
const STDERR_DEADLINE: Duration = Duration::from_secs(5);
/// Time for SIGKILL to take effect, which is long only for a process that waits for a failed disk.
const KILL_DEADLINE: Duration = Duration::from_secs(30);

/// How a run ended.
#[derive(Debug)]
pub(super) enum RunOutcome {
    Succeeded,
    Failed { stderr: Vec<u8> },
    Killed { signal: i32, stderr: Vec<u8> },
    NotStarted { stderr: Vec<u8> },
    TimedOut { stderr: Vec<u8> },
    Stopped,
}

/// Starts Helm processes.
pub trait Processes: fmt::Debug + Send + Sync {
    /// Starts Helm. It ends at `until` at the latest, even without its driver.
    ///
    /// # Errors
    /// Returns an error if no process started.
    fn start(
        &self,
        command: &HelmCommand<'_>,
        until: Option<BootTime>,
    ) -> io::Result<Box<dyn Running>>;

    /// Returns the output of `helm version`.
    ///
    /// # Errors
    /// Returns an error if the program cannot run or does not answer.
    fn version<'a>(
        &'a self,
        binary: &'a Path,
        environment: Vec<(OsString, OsString)>,
    ) -> BoxFuture<'a, io::Result<String>>;
}

/// A started Helm process. Dropping it ends the process.
pub trait Running: Send {
    /// Asks Helm to shut down cleanly.
    fn terminate(&mut self) -> BoxFuture<'_, ()>;

    /// Replaces the time at which Helm ends without its driver. `None` removes it.
    fn set_time_limit(&mut self, until: Option<BootTime>) -> BoxFuture<'_, ()>;

    /// Kills Helm and its child processes.
    fn kill(&self);

    /// Waits until the process has ended. Cancel-safe.
    fn wait_for_exit(&mut self) -> BoxFuture<'_, ()>;

    /// Kills remaining processes. Returns the exit status and the end of standard error.
    fn reap(self: Box<Self>) -> BoxFuture<'static, io::Result<(ExitStatus, Vec<u8>)>>;
}

/// Command line and environment of a Helm process.
#[derive(Debug)]
pub struct HelmCommand<'a> {
    pub binary: &'a Path,
    pub arguments: Vec<OsString>,
    pub environment: Vec<(OsString, OsString)>,
    /// File for Helm's standard output. `None` discards the output.
    pub output: Option<&'a Path>,
}

/// Time limits of a run, in addition to the timeout of the run itself.
#[derive(Clone, Copy, Debug)]
pub struct DriverTimeouts {
    /// Added to three times the timeout, because Helm applies the timeout to each of its phases.
    pub beyond_timeout: Duration,
    /// Time from SIGTERM to SIGKILL after a run exceeds its deadline.
    pub after_deadline: Duration,
    /// Time from SIGTERM to SIGKILL after a soft stop.
    pub after_stop: Duration,
}

impl Default for DriverTimeouts {
    fn default() -> Self {
        Self {
            beyond_timeout: Duration::from_secs(60),
            after_deadline: Duration::from_secs(30),
            after_stop: Duration::from_secs(20),
        }
    }
}

/// A Helm process to run.
pub(super) struct HelmJob<'a> {
    pub processes: &'a dyn Processes,
    pub command: HelmCommand<'a>,
    pub deadline: Duration,
    pub timeouts: DriverTimeouts,
    /// Whether Helm shuts down cleanly on SIGTERM. If not, a soft stop waits for the end of the run.
    pub terminate_on_soft_stop: bool,
}

/// Why the driver ends a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum StopCause {
    None,
    Stopped,
    TimedOut,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RunPhase {
    Running,
    /// The driver requested a clean shutdown within a limited time.
    Terminating,
    Killed,
}

impl HelmJob<'_> {
    /// Runs Helm. If the future is dropped, the supervisor's pipe closes and the supervisor kills the process
    /// group.
    pub(super) async fn run(self, stop: &StopSignal) -> io::Result<RunOutcome> {
        let mut requests = stop.requests();
        if requests.at(BootTime::now()) != StopRequest::None {
            return Ok(RunOutcome::Stopped);
        }
        let mut until = requests.until();
        let mut process = self.processes.start(&self.command, until)?;
        let mut request = StopRequest::None;
        let mut phase = RunPhase::Running;
        let mut cause = StopCause::None;
        let mut limit = Instant::now() + self.deadline;
        loop {
            tokio::select! {
                biased;
                (next, next_until) = requests.changed_from((request, until)) => {
                    if next_until != until {
                        until = next_until;
                        process.set_time_limit(until).await;
                    }
                    if next == std::mem::replace(&mut request, next) {
                        continue;
                    }
                    if next == StopRequest::Kill {
                        process.kill();
                        (phase, cause) = (RunPhase::Killed, StopCause::Stopped);
                        limit = Instant::now() + KILL_DEADLINE;
                    } else if phase == RunPhase::Running {
                        (phase, cause) = (RunPhase::Terminating, StopCause::Stopped);
                        limit = limit.min(Instant::now() + self.timeouts.after_stop);
                        if self.terminate_on_soft_stop {
                            process.terminate().await;
                        }
                    }
                }
                () = process.wait_for_exit() => break,
                () = sleep_until(limit) => match phase {
                    RunPhase::Running => {
                        (phase, cause) = (RunPhase::Terminating, StopCause::TimedOut);
                        limit = Instant::now() + self.timeouts.after_deadline;
                        process.terminate().await;
                    }
                    RunPhase::Terminating => {
                        process.kill();
                        phase = RunPhase::Killed;
                        limit = Instant::now() + KILL_DEADLINE;
                    }
                    RunPhase::Killed => {
                        let seconds = KILL_DEADLINE.as_secs();
                        let message = format!("it still exists {seconds} s after SIGKILL");
                        return Err(io::Error::new(io::ErrorKind::TimedOut, message));
                    }
                }
            }
        }
        let (status, stderr) = process.reap().await?;
        Ok(match cause {
            // Helm received a stop request but completed successfully.
            _ if status.success() => RunOutcome::Succeeded,
            // This process was suspended beyond the time limit, so it saw no request before the run ended.
            StopCause::None if requests.at(BootTime::now()) == StopRequest::Kill => {
                RunOutcome::Stopped
            }
            StopCause::None => run_outcome(status, stderr),
            StopCause::Stopped => RunOutcome::Stopped,
            StopCause::TimedOut => RunOutcome::TimedOut { stderr },
        })
    }
}

fn run_outcome(status: ExitStatus, stderr: Vec<u8>) -> RunOutcome {
    let signalled = i32::from(SIGNALLED);
    match (status.code(), status.signal()) {
        (Some(0), _) => RunOutcome::Succeeded,
        (Some(code), _) if code == i32::from(NOT_STARTED) => RunOutcome::NotStarted { stderr },
        (Some(code), _) if code > signalled => RunOutcome::Killed {
            signal: code - signalled,
            stderr,
        },
        (_, Some(signal)) => RunOutcome::Killed { signal, stderr },
        _ => RunOutcome::Failed { stderr },
    }
}

/// Starts each Helm process under a supervisor.
#[derive(Debug)]
pub struct Supervisor {
    program: OsString,
    arguments: Vec<OsString>,
}

impl Supervisor {
    /// Runs this program with the argument `helm-run`.
    pub fn of_this_program() -> Self {
        // Not the path: the program may be replaced on disk while it runs.
        Self::new("/proc/self/exe", &["helm-run"])
    }

    /// `program` with `arguments` runs [`supervise`](super::supervise) with the arguments appended.
    pub fn new(program: impl Into<OsString>, arguments: &[&str]) -> Self {
        Self {
            program: program.into(),
            arguments: arguments.iter().map(OsString::from).collect(),
        }
    }
}

impl Processes for Supervisor {
    #[allow(
        clippy::disallowed_methods,
        reason = "the one place where a helm run starts"
    )]
    fn start(
        &self,
        command: &HelmCommand<'_>,
        until: Option<BootTime>,
    ) -> io::Result<Box<dyn Running>> {
        let output = command
            .output
            .map(|file| [OUTPUT_FLAG.as_ref(), file.as_os_str()]);
        let mut child = Command::new(&self.program)
            .args(&self.arguments)
            .args(until.map(|until| millis(until).to_string()))
            .args(output.into_iter().flatten())
            .arg("--")
            .arg(command.binary)
            .args(&command.arguments)
            .env_clear()
            .envs(
                command
                    .environment
                    .iter()
                    .map(|(name, value)| (name, value)),
            )
            .process_group(0)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()?;
        let group = child.id().and_then(|id| Pid::from_raw(id.cast_signed()));
        let group = group.expect("a process that was not waited for has a number");
        let pipe = child.stdin.take();
        let exit_signal = child.stdout.take().expect("standard output is piped");
        let stream = child.stderr.take().expect("standard error is piped");
        Ok(Box::new(Process {
            child,
            group,
            exit_signal,
            pipe,
            stderr: StderrReader::new(stream),
        }))
    }

    fn version<'a>(
        &'a self,
        binary: &'a Path,
        environment: Vec<(OsString, OsString)>,
    ) -> BoxFuture<'a, io::Result<String>> {
        Box::pin(version(binary, environment))
    }
}

/// The supervisor, Helm and their child processes.
struct Process {
    child: Child,
    /// Process ID of the supervisor, which is also the ID of the process group.
    group: Pid,
    /// Standard output of the supervisor, which Helm does not inherit. It closes when the supervisor exits.
    /// Unlike `wait`, this does not reap the process, so the kernel cannot reuse the group's ID before the
    /// kill.
    exit_signal: ChildStdout,
    /// The supervisor kills the process group when this pipe closes.
    pipe: Option<ChildStdin>,
    stderr: StderrReader<ChildStderr>,
}

async fn wait_for_close(pipe: &mut ChildStdout) {
    while let Ok(1..) = pipe.read(&mut [0; 64]).await {}
}

impl Process {
    /// Sends a command to the supervisor.
    async fn send(&mut self, command: &[u8]) -> io::Result<()> {
        match &mut self.pipe {
            Some(pipe) => pipe.write_all(command).await,
            None => Ok(()),
        }
    }
}

impl Running for Process {
    fn terminate(&mut self) -> BoxFuture<'_, ()> {
        Box::pin(async {
            if let Err(error) = self.send(&[TERMINATE]).await {
                // Helm has exited, or reaches its time limit soon.
                tracing::debug!(%error, "failed to ask helm to stop");
            }
        })
    }

    fn set_time_limit(&mut self, until: Option<BootTime>) -> BoxFuture<'_, ()> {
        Box::pin(async move {
            let mut command = [UNTIL; 9];
            let until = until.map_or(u64::MAX, millis);
            command[1..].copy_from_slice(&until.to_le_bytes());
            if let Err(error) = self.send(&command).await {
                // Helm has exited, or exits at its previous time limit.
                tracing::debug!(%error, "failed to extend helm's deadline");
            }
        })
    }

    fn kill(&self) {
        process_group::kill(self.group);
    }

    fn wait_for_exit(&mut self) -> BoxFuture<'_, ()> {
        Box::pin(async {
            let closed = wait_for_close(&mut self.exit_signal);
            tokio::pin!(closed);
            loop {
                tokio::select! {
                    biased;
                    () = &mut closed => return,
                    () = self.stderr.read_next() => {}
                }
            }
        })
    }

    /// Kills remaining processes, reads the rest of standard error and reaps the supervisor.
    fn reap(mut self: Box<Self>) -> BoxFuture<'static, io::Result<(ExitStatus, Vec<u8>)>> {
        Box::pin(async move {
            self.kill();
            // Standard error closes when the last process that could hold it has exited.
            let rest = async {
                while self.stderr.stream.is_some() {
                    self.stderr.read_next().await;
                }
            };
            if timeout(STDERR_DEADLINE, rest).await.is_err() {
                tracing::warn!("a child process of Helm left its group");
            }
            drop(self.pipe.take());
            let status = self.child.wait().await?;
            if timeout(STDERR_DEADLINE, reap_orphans(self.group))
                .await
                .is_err()
            {
                tracing::warn!("a killed child process of Helm still exists");
            }
            Ok((status, self.stderr.tail.into()))
        })
    }
}

/// Reads standard error until it closes, and keeps its last bytes.
struct StderrReader<R> {
    stream: Option<R>,
    tail: VecDeque<u8>,
}

impl<R: AsyncRead + Unpin> StderrReader<R> {
    fn new(stream: R) -> Self {
        Self {
            stream: Some(stream),
            tail: VecDeque::new(),
        }
    }

    /// Reads the next bytes. Stays pending forever after the stream has closed. Cancel-safe.
    async fn read_next(&mut self) {
        let Some(stream) = &mut self.stream else {
            return std::future::pending().await;
        };
        let mut buffer = [0; 4096];
        match stream.read(&mut buffer).await {
            Ok(0) | Err(_) => self.stream = None,
            Ok(count) => {
                self.tail.extend(buffer.iter().take(count));
                let excess = self.tail.len().saturating_sub(TAIL_MAX);
                self.tail.drain(..excess);
            }
        }
    }
}

/// Returns the output of `helm version`.
#[allow(
    clippy::disallowed_methods,
    reason = "asking for the version needs no supervisor"
)]
async fn version(binary: &Path, environment: Vec<(OsString, OsString)>) -> io::Result<String> {
    let mut child = Command::new(binary)
        .args(["version", "--template", "{{.Version}}"])
        .env_clear()
        .envs(environment)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .kill_on_drop(true)
        .spawn()?;
    let stdout = child.stdout.take().expect("standard output is piped");
    let mut output = Vec::new();
    let exited = async {
        stdout.take(VERSION_MAX).read_to_end(&mut output).await?;
        child.wait().await
    };
    timeout(VERSION_DEADLINE, exited).await.map_err(|_| {
        let seconds = VERSION_DEADLINE.as_secs();
        io::Error::new(
            io::ErrorKind::TimedOut,
            format!("no response within {seconds} s"),
        )
    })??;
    Ok(String::from_utf8_lossy(&output).trim().to_owned())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use parking_lot::Mutex;
    use tokio::sync::Notify;

    use super::*;
    use crate::driver::StopHandle;

    /// A Helm that ignores SIGTERM. Records what it receives, and when.
    #[derive(Clone, Debug)]
    struct StubbornHelm {
        started: Instant,
        received: Arc<Mutex<Vec<(&'static str, u64)>>>,
        killed: Arc<Notify>,
    }

    impl StubbornHelm {
        fn receive(&self, signal: &'static str) {
            let seconds = self.started.elapsed().as_secs();
            self.received.lock().push((signal, seconds));
        }
    }

    impl Processes for StubbornHelm {
        fn start(&self, _: &HelmCommand<'_>, _: Option<BootTime>) -> io::Result<Box<dyn Running>> {
            Ok(Box::new(self.clone()))
        }

        fn version<'a>(
            &'a self,
            _: &'a Path,
            _: Vec<(OsString, OsString)>,
        ) -> BoxFuture<'a, io::Result<String>> {
            Box::pin(async { Ok(String::new()) })
        }
    }

    impl Running for StubbornHelm {
        fn terminate(&mut self) -> BoxFuture<'_, ()> {
            self.receive("terminate");
            Box::pin(async {})
        }

        fn set_time_limit(&mut self, _: Option<BootTime>) -> BoxFuture<'_, ()> {
            Box::pin(async {})
        }

        fn kill(&self) {
            self.receive("kill");
            self.killed.notify_one();
        }

        fn wait_for_exit(&mut self) -> BoxFuture<'_, ()> {
            Box::pin(self.killed.notified())
        }

        fn reap(self: Box<Self>) -> BoxFuture<'static, io::Result<(ExitStatus, Vec<u8>)>> {
            Box::pin(async { Ok((ExitStatus::from_raw(9), b"slow".to_vec())) })
        }
    }

    #[tokio::test(start_paused = true)]
    async fn overdue_helm_is_terminated_and_then_killed() {
        let helm = StubbornHelm {
            started: Instant::now(),
            received: Arc::default(),
            killed: Arc::default(),
        };
        let job = HelmJob {
            processes: &helm,
            command: HelmCommand {
                binary: Path::new("helm"),
                arguments: Vec::new(),
                environment: Vec::new(),
                output: None,
            },
            deadline: Duration::from_secs(600),
            timeouts: DriverTimeouts::default(),
            terminate_on_soft_stop: true,
        };
        let (_handle, stop) = StopHandle::new();
        let outcome = job.run(&stop).await.unwrap();
        assert!(matches!(outcome, RunOutcome::TimedOut { stderr } if stderr == b"slow"));
        let received = helm.received.lock();
        assert_eq!(*received, [("terminate", 600), ("kill", 630)]);
    }

    #[tokio::test]
    async fn only_the_last_bytes_are_kept() {
        let mut output = vec![b'a'; TAIL_MAX];
        output.extend_from_slice(b"the end");
        let mut reader = StderrReader::new(output.as_slice());
        while reader.stream.is_some() {
            reader.read_next().await;
            assert!(reader.tail.len() <= TAIL_MAX);
        }
        let bytes = Vec::from(reader.tail);
        assert_eq!(bytes.len(), TAIL_MAX);
        assert!(bytes.ends_with(b"aathe end"));
    }

    #[test]
    fn supervisor_exit_status_maps_to_helm_outcome() {
        let outcome = |raw: i32| run_outcome(ExitStatus::from_raw(raw), Vec::new());
        assert!(matches!(outcome(0), RunOutcome::Succeeded));
        assert!(matches!(outcome(1 << 8), RunOutcome::Failed { .. }));
        assert!(matches!(
            outcome(i32::from(NOT_STARTED) << 8),
            RunOutcome::NotStarted { .. }
        ));
        assert!(matches!(
            outcome((128 + 9) << 8),
            RunOutcome::Killed { signal: 9, .. }
        ));
        assert!(matches!(outcome(15), RunOutcome::Killed { signal: 15, .. }));
    }
}
