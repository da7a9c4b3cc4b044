//! Runs child processes that end with this process: on drop, and if this process dies.

use std::{
    collections::BTreeMap,
    ffi::OsString,
    fs::File,
    io::{Read, Seek, SeekFrom},
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{Child, ChildStdin, Command, ExitStatus, Stdio},
    time::Duration,
};

use anyhow::{Context, Result, anyhow, bail};
use rustix::process::{Pid, Signal, kill_process, kill_process_group};

use crate::wait::eventually_within;

/// Size of the log excerpt in an error message.
const QUOTED_LOG_BYTES: u64 = 4096;

/// Starts the program in a shell, which it replaces. A background shell waits until the pipe on the child's stdin
/// closes. It then kills the process group that it shares with the child. It also keeps the group's ID from being
/// reused.
const WITH_LIFELINE: &str = "exec 3<&0 </dev/null; \
    ( read -r _ <&3; kill -KILL 0 ) >/dev/null 2>&1 & \
    exec 3<&-; exec \"$@\"";

/// A program to run. Its environment contains only these variables.
#[derive(Debug, Clone, Default)]
pub struct Invocation {
    program: PathBuf,
    args: Vec<OsString>,
    env: BTreeMap<OsString, OsString>,
}

/// Exit status and output of a program.
#[derive(Clone, Debug)]
pub struct CommandOutput {
    pub status: ExitStatus,
    pub stdout: String,
    pub stderr: String,
}

impl Invocation {
    pub fn new(program: impl Into<PathBuf>) -> Self {
        Self {
            program: program.into(),
            ..Self::default()
        }
    }

    #[must_use]
    pub fn arg(mut self, arg: impl Into<OsString>) -> Self {
        self.args.push(arg.into());
        self
    }

    #[must_use]
    pub fn args<A: Into<OsString>>(mut self, args: impl IntoIterator<Item = A>) -> Self {
        self.args.extend(args.into_iter().map(Into::into));
        self
    }

    #[must_use]
    pub fn env(mut self, name: impl Into<OsString>, value: impl Into<OsString>) -> Self {
        self.env.insert(name.into(), value.into());
        self
    }

    /// Creates the command in a separate process group. Ctrl-C in a terminal then reaches only this process, which
    /// stops its children in order.
    fn command(&self) -> Command {
        let mut command = new_command("/bin/sh");
        command
            .args(["-c", WITH_LIFELINE, "sh"])
            .arg(&self.program)
            .args(&self.args)
            .env_clear()
            .envs(&self.env)
            .process_group(0)
            .stdin(Stdio::piped());
        command
    }

    /// Runs the program to its end, or kills it at `deadline`. Returns its stdout, or an error with its stderr.
    pub async fn output(&self, deadline: Duration) -> Result<String> {
        let output = self.run(deadline).await?;
        if !output.status.success() {
            bail!(
                "{}: {}: {}",
                self.command_line(),
                output.status,
                output.stderr.trim()
            );
        }
        Ok(output.stdout)
    }

    /// Runs the program to its end, or kills it at `deadline`.
    pub async fn run(&self, deadline: Duration) -> Result<CommandOutput> {
        let command_line = || self.command_line();
        let mut command = tokio::process::Command::from(self.command());
        command
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true);
        let mut child = command
            .spawn()
            .with_context(|| format!("starting {}", command_line()))?;
        // Taken out, because waiting closes stdin and thereby kills the child.
        let lifeline = child.stdin.take();
        let output = tokio::time::timeout(deadline, child.wait_with_output()).await;
        drop(lifeline);
        let output = output
            .map_err(|_| anyhow!("{}: killed after {deadline:?}", command_line()))?
            .with_context(|| format!("running {}", command_line()))?;
        let text = |bytes, stream| {
            String::from_utf8(bytes)
                .with_context(|| format!("reading the {stream} of {}", command_line()))
        };
        Ok(CommandOutput {
            status: output.status,
            stdout: text(output.stdout, "stdout")?,
            stderr: text(output.stderr, "stderr")?,
        })
    }

    fn command_line(&self) -> String {
        let name = self.program.file_name().unwrap_or(self.program.as_os_str());
        let mut command_line = name.to_string_lossy().into_owned();
        for arg in &self.args {
            command_line.push(' ');
            command_line.push_str(&arg.to_string_lossy());
        }
        command_line
    }
}

/// A running child with its log. Dropping it kills its process group.
#[derive(Debug)]
pub struct ChildProcess {
    name: String,
    child: Child,
    log: PathBuf,
    lifeline: Option<ChildStdin>,
}

impl ChildProcess {
    /// Starts `invocation` and appends its stdout and stderr to `log`.
    pub fn spawn(name: &str, invocation: &Invocation, log: &Path) -> Result<Self> {
        let out = File::options()
            .create(true)
            .append(true)
            .open(log)
            .with_context(|| format!("opening {}", log.display()))?;
        let err = out
            .try_clone()
            .with_context(|| format!("opening {}", log.display()))?;
        let mut child = invocation
            .command()
            .stdout(out)
            .stderr(err)
            .spawn()
            .with_context(|| format!("starting {name}"))?;
        let lifeline = child.stdin.take();
        Ok(Self {
            name: name.to_owned(),
            child,
            log: log.to_owned(),
            lifeline,
        })
    }

    /// Returns the program's own process ID. The program has replaced the shell.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub fn log(&self) -> &Path {
        &self.log
    }

    pub fn try_wait(&mut self) -> Result<Option<ExitStatus>> {
        self.child
            .try_wait()
            .with_context(|| format!("polling {}", self.name))
    }

    /// Returns an error with the end of the log if the process has ended.
    pub fn check_running(&mut self) -> Result<()> {
        match self.try_wait()? {
            None => Ok(()),
            Some(status) => {
                bail!(
                    "{} ended with {status}; its log ends:\n{}",
                    self.name,
                    log_end(&self.log)
                )
            }
        }
    }

    /// Sends a signal to the program only, not to its group. Does nothing if the program has ended.
    pub fn signal(&mut self, signal: Signal) -> Result<()> {
        if self.try_wait()?.is_some() {
            return Ok(());
        }
        kill_process(self.group(), signal).with_context(|| format!("signalling {}", self.name))
    }

    /// Waits until the program ends.
    pub async fn wait(&mut self, deadline: Duration) -> Result<ExitStatus> {
        let what = format!("the end of {}", self.name);
        eventually_within(&what, deadline, async || match self.try_wait()? {
            Some(status) => Ok(Some(status)),
            None => bail!("still running; its log ends:\n{}", log_end(&self.log)),
        })
        .await
    }

    /// Sends SIGKILL to the whole group, without waiting.
    fn send_kill(&mut self) {
        if matches!(self.child.try_wait(), Ok(None)) {
            // Fails only if the program has ended. Closing the lifeline kills the rest of the group.
            kill_process_group(self.group(), Signal::KILL).ok();
        }
        self.lifeline = None;
    }

    /// Kills the program and its group with SIGKILL, and reaps the program.
    pub fn kill(&mut self) {
        self.send_kill();
        // A killed child always ends, so an error needs no handling.
        drop(self.child.wait());
    }

    fn group(&self) -> Pid {
        Pid::from_child(&self.child)
    }
}

impl Drop for ChildProcess {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Kills several processes: signals all before it waits for the first.
pub fn kill_all<'a>(processes: impl IntoIterator<Item = &'a mut ChildProcess>) {
    let mut killed: Vec<_> = processes.into_iter().collect();
    killed.iter_mut().for_each(|process| process.send_kill());
    killed.iter_mut().for_each(|process| process.kill());
}

/// Returns the last 4 KiB of a log, for an error message.
pub fn log_end(log: &Path) -> String {
    let read = || -> std::io::Result<String> {
        let mut file = File::open(log)?;
        let length = file.metadata()?.len();
        file.seek(SeekFrom::Start(length.saturating_sub(QUOTED_LOG_BYTES)))?;
        let mut end = Vec::new();
        file.take(QUOTED_LOG_BYTES).read_to_end(&mut end)?;
        Ok(String::from_utf8_lossy(&end).into_owned())
    };
    read().unwrap_or_else(|error| format!("({} cannot be read: {error})", log.display()))
}

#[allow(
    clippy::disallowed_methods,
    reason = "the harness starts its processes here and nowhere else"
)]
pub(crate) fn new_command(program: &str) -> Command {
    Command::new(program)
}
