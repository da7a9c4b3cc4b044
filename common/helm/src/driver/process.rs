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
use krypton_runtime::process_group::{self, orphans_of};
use rustix::process::Pid;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt};
use tokio::process::{Child, ChildStderr, ChildStdin, ChildStdout, Command};
use tokio::time::{Instant, sleep_until, timeout};

use super::DriverTimeouts;
use super::stop::{Order, StopSignal};
use super::supervisor::{NOT_STARTED, OUTPUT_FLAG, SIGNALLED, TERMINATE, UNTIL, millis};

/// Number of bytes to keep of standard error.
const TAIL: usize = 64 << 10;
/// `helm version` sends no requests, so it needs little time.
const VERSION_DEADLINE: Duration = Duration::from_secs(30);
/// `helm version` prints only a few characters.
const VERSION_LENGTH: u64 = 256;
/// Time to read the rest of standard error. A killed process closes it immediately, but one outside its
/// process group may not.
const LAST_WORDS: Duration = Duration::from_secs(5);
/// Time for SIGKILL to take effect, which is long only for a process that waits for a failed disk.
const DYING: Duration = Duration::from_secs(30);

/// How a run ended.
#[derive(Debug)]
pub(super) enum Ending {
    Well,
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
    fn lives_until(&mut self, until: Option<BootTime>) -> BoxFuture<'_, ()>;

    /// Kills Helm and its child processes.
    fn kill(&self);

    /// Waits until the process has ended. Cancel-safe.
    fn ended(&mut self) -> BoxFuture<'_, ()>;

    /// Kills remaining processes. Returns the exit status and the end of standard error.
    fn end(self: Box<Self>) -> BoxFuture<'static, io::Result<(ExitStatus, Vec<u8>)>>;
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

/// A Helm process to run.
pub(super) struct Job<'a> {
    pub processes: &'a dyn Processes,
    pub command: HelmCommand<'a>,
    pub deadline: Duration,
    pub patience: DriverTimeouts,
    /// Whether Helm shuts down cleanly on SIGTERM. If not, a soft stop waits for the end of the run.
    pub asks_to_stop: bool,
}

/// Why the driver ends a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Cause {
    None,
    Stopped,
    TimedOut,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Running,
    /// The driver requested a clean shutdown within a limited time.
    Asked,
    Killed,
}

impl Job<'_> {
    /// Runs Helm. If the future is dropped, the supervisor's pipe closes and the supervisor kills the process
    /// group.
    pub(super) async fn run(self, stop: &StopSignal) -> io::Result<Ending> {
        let mut orders = stop.orders();
        if orders.at(BootTime::now()) != Order::Go {
            return Ok(Ending::Stopped);
        }
        let mut until = orders.until();
        let mut process = self.processes.start(&self.command, until)?;
        let mut order = Order::Go;
        let mut stage = Stage::Running;
        let mut cause = Cause::None;
        let mut limit = Instant::now() + self.deadline;
        loop {
            tokio::select! {
                biased;
                (next, next_until) = orders.other_than((order, until)) => {
                    if next_until != until {
                        until = next_until;
                        process.lives_until(until).await;
                    }
                    if next == std::mem::replace(&mut order, next) {
                        continue;
                    }
                    if next == Order::Kill {
                        process.kill();
                        (stage, cause) = (Stage::Killed, Cause::Stopped);
                        limit = Instant::now() + DYING;
                    } else if stage == Stage::Running {
                        (stage, cause) = (Stage::Asked, Cause::Stopped);
                        limit = limit.min(Instant::now() + self.patience.after_stop);
                        if self.asks_to_stop {
                            process.terminate().await;
                        }
                    }
                }
                () = process.ended() => break,
                () = sleep_until(limit) => match stage {
                    Stage::Running => {
                        (stage, cause) = (Stage::Asked, Cause::TimedOut);
                        limit = Instant::now() + self.patience.after_deadline;
                        process.terminate().await;
                    }
                    Stage::Asked => {
                        process.kill();
                        stage = Stage::Killed;
                        limit = Instant::now() + DYING;
                    }
                    Stage::Killed => {
                        let seconds = DYING.as_secs();
                        let what = format!("killed, it is still there after {seconds} s");
                        return Err(io::Error::new(io::ErrorKind::TimedOut, what));
                    }
                }
            }
        }
        let (status, stderr) = process.end().await?;
        Ok(match cause {
            // Helm received a stop request but completed successfully.
            _ if status.success() => Ending::Well,
            // This process was suspended beyond the time limit, so it saw no order before the run ended.
            Cause::None if orders.at(BootTime::now()) == Order::Kill => Ending::Stopped,
            Cause::None => ending(status, stderr),
            Cause::Stopped => Ending::Stopped,
            Cause::TimedOut => Ending::TimedOut { stderr },
        })
    }
}

fn ending(status: ExitStatus, stderr: Vec<u8>) -> Ending {
    let signalled = i32::from(SIGNALLED);
    match (status.code(), status.signal()) {
        (Some(0), _) => Ending::Well,
        (Some(code), _) if code == i32::from(NOT_STARTED) => Ending::NotStarted { stderr },
        (Some(code), _) if code > signalled => Ending::Killed {
            signal: code - signalled,
            stderr,
        },
        (_, Some(signal)) => Ending::Killed { signal, stderr },
        _ => Ending::Failed { stderr },
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
        let life = child.stdout.take().expect("standard output is piped");
        let stderr = child.stderr.take().expect("standard error is piped");
        let ears = Ears {
            stderr: Some(stderr),
            tail: Tail::default(),
        };
        Ok(Box::new(Process {
            child,
            group,
            life,
            pipe,
            ears,
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
    life: ChildStdout,
    /// The supervisor kills the process group when this pipe closes.
    pipe: Option<ChildStdin>,
    ears: Ears,
}

async fn end_of(life: &mut ChildStdout) {
    while let Ok(1..) = life.read(&mut [0; 64]).await {}
}

impl Process {
    /// Sends a command to the supervisor.
    async fn write(&mut self, word: &[u8]) -> io::Result<()> {
        match &mut self.pipe {
            Some(pipe) => pipe.write_all(word).await,
            None => Ok(()),
        }
    }
}

impl Running for Process {
    fn terminate(&mut self) -> BoxFuture<'_, ()> {
        Box::pin(async {
            if let Err(error) = self.write(&[TERMINATE]).await {
                // Helm has exited, or reaches its time limit soon.
                tracing::debug!(%error, "asking helm to stop");
            }
        })
    }

    fn lives_until(&mut self, until: Option<BootTime>) -> BoxFuture<'_, ()> {
        Box::pin(async move {
            let mut word = [UNTIL; 9];
            let until = until.map_or(u64::MAX, millis);
            word[1..].copy_from_slice(&until.to_le_bytes());
            if let Err(error) = self.write(&word).await {
                // Helm has exited, or exits at its previous time limit.
                tracing::debug!(%error, "telling helm's supervisor of more time");
            }
        })
    }

    fn kill(&self) {
        process_group::kill(self.group);
    }

    fn ended(&mut self) -> BoxFuture<'_, ()> {
        Box::pin(async {
            let end = end_of(&mut self.life);
            tokio::pin!(end);
            loop {
                tokio::select! {
                    biased;
                    () = &mut end => return,
                    () = self.ears.listen() => {}
                }
            }
        })
    }

    /// Kills remaining processes, reads the rest of standard error and reaps the supervisor.
    fn end(mut self: Box<Self>) -> BoxFuture<'static, io::Result<(ExitStatus, Vec<u8>)>> {
        Box::pin(async move {
            self.kill();
            // Standard error closes when the last process that could hold it has exited.
            let rest = async {
                while self.ears.stderr.is_some() {
                    self.ears.listen().await;
                }
            };
            if timeout(LAST_WORDS, rest).await.is_err() {
                tracing::warn!("a child process of Helm left its process group and still runs");
            }
            drop(self.pipe.take());
            let status = self.child.wait().await?;
            if timeout(LAST_WORDS, orphans_of(self.group)).await.is_err() {
                tracing::warn!("a killed process that helm started is still there");
            }
            Ok((status, self.ears.tail.bytes.into()))
        })
    }
}

/// Reads standard error until it closes.
struct Ears {
    stderr: Option<ChildStderr>,
    tail: Tail,
}

impl Ears {
    /// Reads the next bytes. Stays pending forever after the stream has closed. Cancel-safe.
    async fn listen(&mut self) {
        match &mut self.stderr {
            Some(stderr) => {
                if !self.tail.read(stderr).await {
                    self.stderr = None;
                }
            }
            None => std::future::pending().await,
        }
    }
}

/// The last bytes of a stream.
#[derive(Default)]
struct Tail {
    bytes: VecDeque<u8>,
}

impl Tail {
    /// Reads once. Returns false at the end of the stream. Cancel-safe.
    async fn read(&mut self, from: &mut (impl AsyncRead + Unpin)) -> bool {
        let mut buffer = [0; 4096];
        match from.read(&mut buffer).await {
            Ok(0) | Err(_) => false,
            Ok(count) => {
                self.bytes.extend(buffer.iter().take(count));
                let over = self.bytes.len().saturating_sub(TAIL);
                self.bytes.drain(..over);
                true
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
    let mut said = Vec::new();
    let ended = async {
        stdout.take(VERSION_LENGTH).read_to_end(&mut said).await?;
        child.wait().await
    };
    timeout(VERSION_DEADLINE, ended).await.map_err(|_| {
        let seconds = VERSION_DEADLINE.as_secs();
        io::Error::new(
            io::ErrorKind::TimedOut,
            format!("no response within {seconds} s"),
        )
    })??;
    Ok(String::from_utf8_lossy(&said).trim().to_owned())
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use tokio::sync::Notify;

    use super::*;
    use crate::driver::StopHandle;

    /// A Helm that ignores SIGTERM. Records what it receives, and when.
    #[derive(Clone, Debug)]
    struct Stubborn {
        begun: Instant,
        received: Arc<Mutex<Vec<(&'static str, u64)>>>,
        killed: Arc<Notify>,
    }

    impl Stubborn {
        fn receive(&self, order: &'static str) {
            let seconds = self.begun.elapsed().as_secs();
            self.received.lock().unwrap().push((order, seconds));
        }
    }

    impl Processes for Stubborn {
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

    impl Running for Stubborn {
        fn terminate(&mut self) -> BoxFuture<'_, ()> {
            self.receive("terminate");
            Box::pin(async {})
        }

        fn lives_until(&mut self, _: Option<BootTime>) -> BoxFuture<'_, ()> {
            Box::pin(async {})
        }

        fn kill(&self) {
            self.receive("kill");
            self.killed.notify_one();
        }

        fn ended(&mut self) -> BoxFuture<'_, ()> {
            Box::pin(self.killed.notified())
        }

        fn end(self: Box<Self>) -> BoxFuture<'static, io::Result<(ExitStatus, Vec<u8>)>> {
            Box::pin(async { Ok((ExitStatus::from_raw(9), b"slow".to_vec())) })
        }
    }

    #[tokio::test(start_paused = true)]
    async fn overdue_helm_is_terminated_and_then_killed() {
        let helm = Stubborn {
            begun: Instant::now(),
            received: Arc::default(),
            killed: Arc::default(),
        };
        let job = Job {
            processes: &helm,
            command: HelmCommand {
                binary: Path::new("helm"),
                arguments: Vec::new(),
                environment: Vec::new(),
                output: None,
            },
            deadline: Duration::from_secs(600),
            patience: DriverTimeouts::default(),
            asks_to_stop: true,
        };
        let (_handle, stop) = StopHandle::new();
        let ending = job.run(&stop).await.unwrap();
        assert!(matches!(ending, Ending::TimedOut { stderr } if stderr == b"slow"));
        let received = helm.received.lock().unwrap();
        assert_eq!(*received, [("terminate", 600), ("kill", 630)]);
    }

    #[tokio::test]
    async fn only_the_last_bytes_are_kept() {
        let mut said = vec![b'a'; TAIL];
        said.extend_from_slice(b"the end");
        let mut from = said.as_slice();
        let mut tail = Tail::default();
        while tail.read(&mut from).await {
            assert!(tail.bytes.len() <= TAIL);
        }
        let kept = Vec::from(tail.bytes);
        assert_eq!(kept.len(), TAIL);
        assert!(kept.ends_with(b"aathe end"));
    }

    #[test]
    fn supervisor_exit_status_maps_to_helm_outcome() {
        let ended = |raw: i32| ending(ExitStatus::from_raw(raw), Vec::new());
        assert!(matches!(ended(0), Ending::Well));
        assert!(matches!(ended(1 << 8), Ending::Failed { .. }));
        assert!(matches!(
            ended(i32::from(NOT_STARTED) << 8),
            Ending::NotStarted { .. }
        ));
        assert!(matches!(
            ended((128 + 9) << 8),
            Ending::Killed { signal: 9, .. }
        ));
        assert!(matches!(ended(15), Ending::Killed { signal: 15, .. }));
    }
}
