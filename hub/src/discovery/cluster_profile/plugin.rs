//! One run of an access provider's program, in its own process group, which never outlives the deadline.

use std::collections::{BTreeMap, VecDeque};
use std::ffi::OsString;
use std::io;
use std::os::unix::process::ExitStatusExt as _;
use std::path::PathBuf;
use std::process::{ExitStatus, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use krypton_helm::driver;
use krypton_runtime::{off_thread, process_group};
use rustix::process::{Pid, WaitId, WaitIdOptions, waitid};
use thiserror::Error;
use tokio::io::{AsyncRead, AsyncReadExt as _};
use tokio::process::{Child, ChildStderr, ChildStdout};
use tokio::sync::Semaphore;
use tokio::time::timeout;

use super::access_plan::Command;

/// Concurrent runs of all profiles. Each program uses about 50 MB.
const AT_ONCE: usize = 16;
/// Concurrent runs of one access provider. If all its runs hang, other providers still get slots.
const OF_A_PROVIDER: usize = 4;
/// Bytes kept of standard error. Messages show fewer.
const TAIL: usize = 4096;
const SHOWN: usize = 512;
/// Killed processes close their files immediately, but a process that left the group may not.
const LAST_WORDS: Duration = Duration::from_secs(2);
/// With these variables, a program in a pod finds its own cluster's API server and uses the mounted service
/// account. The other variables of a pod concern only the hub.
const OF_A_POD: [&str; 2] = ["KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT"];

/// Limits of one run.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    pub deadline: Duration,
    /// Bytes of standard output. A credential has a few thousand.
    pub answer: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            deadline: Duration::from_secs(20),
            answer: 256 * 1024,
        }
    }
}

/// Why a run returned no credential. Never contains standard output, which may be a credential.
#[derive(Debug, Error)]
pub(super) enum PluginError {
    #[error("starting {program} failed; correct its execConfig in the hub's provider file")]
    Start {
        program: String,
        #[source]
        source: io::Error,
    },
    #[error("running {program} failed")]
    Run {
        program: String,
        #[source]
        source: io::Error,
    },
    #[error("{program} did not end within {} s and was killed{said}", deadline.as_secs())]
    Deadline {
        program: String,
        deadline: Duration,
        said: Said,
    },
    #[error("{program} has written more than {} KiB and was killed; an ExecCredential is expected", limit / 1024)]
    TooMuch { program: String, limit: usize },
    #[error("{program} has ended with {how}{said}")]
    Failed {
        program: String,
        how: String,
        said: Said,
    },
}

/// The sanitized end of standard error.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Said(String);

impl Said {
    pub(crate) fn of(stderr: &[u8]) -> Self {
        let text = driver::last_words(stderr);
        let clean: String = text.chars().filter(|c| !c.is_control()).collect();
        let start = clean.ceil_char_boundary(clean.len().saturating_sub(SHOWN));
        Self(clean.get(start..).unwrap_or_default().to_owned())
    }
}

impl std::fmt::Display for Said {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.0.as_str() {
            "" => f.write_str("; it printed nothing"),
            said => write!(f, "; it printed: {said}"),
        }
    }
}

/// Runs programs with limited concurrency.
#[derive(Debug)]
pub(super) struct Plugins {
    slots: Semaphore,
    /// Semaphores by provider name, as in the provider file.
    of_provider: Mutex<BTreeMap<String, Arc<Semaphore>>>,
    limits: Limits,
    /// Each run gets its own directory here, which is deleted with the run.
    folder: PathBuf,
    /// The variables inherited from this process.
    host: Vec<(OsString, OsString)>,
}

impl Plugins {
    pub(super) fn new(folder: PathBuf, limits: Limits) -> Self {
        let host = ["PATH"].iter().chain(&OF_A_POD);
        let host = host.filter_map(|name| Some((name.into(), std::env::var_os(name)?)));
        Self {
            slots: Semaphore::new(AT_ONCE),
            of_provider: Mutex::default(),
            limits,
            folder,
            host: host.collect(),
        }
    }

    fn slots_of(&self, provider: &str) -> Arc<Semaphore> {
        let mut all = self
            .of_provider
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let slots = all.entry(provider.to_owned());
        Arc::clone(slots.or_insert_with(|| Arc::new(Semaphore::new(OF_A_PROVIDER))))
    }

    /// Runs the program once a slot is free, and returns its standard output. Dropping the future kills the
    /// process group.
    pub(super) async fn run(&self, command: &Command) -> Result<Vec<u8>, PluginError> {
        let failed = |source| PluginError::Run {
            program: command.program.clone(),
            source,
        };
        let of_provider = self.slots_of(&command.provider);
        // The semaphores are never closed.
        let _of_provider = of_provider.acquire().await;
        let _slot = self.slots.acquire().await;
        let home = tempfile::Builder::new()
            .prefix("plugin-")
            .tempdir_in(&self.folder)
            .map_err(failed)?;
        let mut process = self.start(command, home.path().as_os_str().to_owned())?;
        let Limits { deadline, answer } = self.limits;
        let late = process.end(self.limits).await.map_err(failed)?;
        let status = process.clean_up(&command.program, answer).await;
        let status = status.map_err(failed)?;
        let program = command.program.clone();
        let said = process.said();
        if late {
            return Err(PluginError::Deadline {
                program,
                deadline,
                said,
            });
        }
        if process.answer.len() > answer {
            let limit = answer;
            return Err(PluginError::TooMuch { program, limit });
        }
        if !status.success() {
            let how = how(status);
            return Err(PluginError::Failed { program, how, said });
        }
        Ok(process.answer)
    }

    #[allow(
        clippy::disallowed_methods,
        reason = "the one place where an access provider's program starts"
    )]
    fn start(&self, command: &Command, home: OsString) -> Result<Process, PluginError> {
        let failed = |source| PluginError::Start {
            program: command.program.clone(),
            source,
        };
        let mut child = tokio::process::Command::new(&command.program)
            .args(&command.args)
            .env_clear()
            .envs(self.host.iter().map(|(name, value)| (name, value)))
            .env("HOME", &home)
            .env("TMPDIR", &home)
            .envs(&command.env)
            .env("KUBERNETES_EXEC_INFO", &command.info)
            .current_dir(&home)
            .process_group(0)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(failed)?;
        let pid = child.id().and_then(|id| Pid::from_raw(id.cast_signed()));
        let pid = pid.ok_or_else(|| failed(io::ErrorKind::NotFound.into()))?;
        Ok(Process {
            group: Group { pid, reaped: false },
            stdout: child.stdout.take(),
            stderr: child.stderr.take(),
            child,
            answer: Vec::new(),
            tail: VecDeque::new(),
        })
    }
}

fn how(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exit code {code}"),
        (None, Some(signal)) => format!("signal {signal}"),
        (None, None) => "an unknown status".to_owned(),
    }
}

/// A running program and its output.
struct Process {
    // Dropped before the child, which would reap it: the PID must still be valid when the group is killed.
    group: Group,
    child: Child,
    /// `None` once the stream is closed, as for standard error.
    stdout: Option<ChildStdout>,
    stderr: Option<ChildStderr>,
    answer: Vec<u8>,
    /// The end of standard error.
    tail: VecDeque<u8>,
}

impl Process {
    /// Waits until the program ends, writes too much, or reaches its deadline. Returns whether it is late.
    async fn end(&mut self, limits: Limits) -> io::Result<bool> {
        let ended = self.group.ended();
        let deadline = tokio::time::sleep(limits.deadline);
        tokio::pin!(ended, deadline);
        while self.answer.len() <= limits.answer {
            tokio::select! {
                biased;
                ended = &mut ended => return ended.map(|()| false),
                () = &mut deadline => return Ok(true),
                () = self.read(limits.answer + 1) => {}
            }
        }
        Ok(false)
    }

    /// Kills all processes that the program left running, even after a successful exit, and reads the rest of
    /// the output.
    async fn clean_up(&mut self, program: &str, answer: usize) -> io::Result<ExitStatus> {
        let pid = self.group.pid;
        process_group::kill(pid);
        let rest = async {
            while self.stdout.is_some() || self.stderr.is_some() {
                self.read(answer + 1).await;
            }
        };
        if timeout(LAST_WORDS, rest).await.is_err() {
            tracing::warn!(plugin = %program, "a process of the plugin left its group and keeps running");
        }
        let status = self.child.wait().await?;
        self.group.reaped = true;
        let orphans = process_group::orphans_of(pid);
        if timeout(LAST_WORDS, orphans).await.is_err() {
            tracing::warn!(plugin = %program, "a killed process of the plugin still exists");
        }
        Ok(status)
    }

    /// Reads the next output, at most `most` bytes of standard output. Never resolves once both streams are
    /// closed. Safe to cancel.
    async fn read(&mut self, most: usize) {
        let (mut out, mut err) = ([0; 4096], [0; 4096]);
        tokio::select! {
            read = next(&mut self.stdout, &mut out) => match read {
                0 => self.stdout = None,
                count => {
                    let room = most.saturating_sub(self.answer.len());
                    self.answer.extend(out.iter().take(count.min(room)));
                }
            },
            read = next(&mut self.stderr, &mut err) => match read {
                0 => self.stderr = None,
                count => {
                    self.tail.extend(err.iter().take(count));
                    let over = self.tail.len().saturating_sub(TAIL);
                    self.tail.drain(..over);
                }
            },
        }
    }

    fn said(&mut self) -> Said {
        Said::of(self.tail.make_contiguous())
    }
}

/// The program's process group, killed on drop.
struct Group {
    pid: Pid,
    reaped: bool,
}

impl Group {
    /// Waits for the leader's exit without reaping it. This keeps the kernel from reusing the group's ID.
    fn ended(&self) -> impl Future<Output = io::Result<()>> + use<> {
        let pid = self.pid;
        let exited = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
        // One thread per run is acceptable because runs are few. The thread ends with the process, which is
        // always killed.
        let waiting = off_thread::start(move || {
            loop {
                match waitid(WaitId::Pid(pid), exited) {
                    Err(rustix::io::Errno::INTR) => {}
                    Err(error) => return Err(error.into()),
                    Ok(_) => return Ok(()),
                }
            }
        });
        async move { waiting.await.map_err(io::Error::other)? }
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        if !self.reaped {
            process_group::kill(self.pid);
        }
    }
}

/// Returns zero at the end of the stream.
async fn next<R: AsyncRead + Unpin>(from: &mut Option<R>, buffer: &mut [u8]) -> usize {
    match from {
        Some(from) => from.read(buffer).await.unwrap_or(0),
        None => std::future::pending().await,
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use krypton_types::error_chain::chain;

    use super::super::provider_file::ApiVersion;
    use super::*;

    fn shell(script: &str) -> Command {
        Command {
            provider: "fake".to_owned(),
            program: "/bin/sh".to_owned(),
            args: vec!["-c".to_owned(), script.to_owned()],
            env: Default::default(),
            api_version: ApiVersion::V1,
            info: "{\"kind\": \"ExecCredential\"}".to_owned(),
        }
    }

    struct Stage {
        plugins: Plugins,
        folder: tempfile::TempDir,
    }

    impl Stage {
        fn new(limits: Limits) -> Self {
            let folder = tempfile::tempdir().unwrap();
            let plugins = Plugins::new(folder.path().to_owned(), limits);
            Self { plugins, folder }
        }

        async fn run(&self, script: &str) -> Result<String, String> {
            let ran = timeout(LONG, self.plugins.run(&shell(script)))
                .await
                .unwrap();
            assert_eq!(std::fs::read_dir(self.folder.path()).unwrap().count(), 0);
            ran.map(|said| String::from_utf8(said).unwrap())
                .map_err(|error| chain(&error))
        }
    }

    /// Stops a hung test.
    const LONG: Duration = Duration::from_secs(60);

    fn short() -> Limits {
        Limits {
            deadline: Duration::from_millis(300),
            ..Limits::default()
        }
    }

    async fn until(done: impl Fn() -> bool) {
        let waiting = async {
            while !done() {
                tokio::task::yield_now().await;
            }
        };
        timeout(LONG, waiting).await.unwrap();
    }

    async fn is_gone(pid: &str) {
        let stat = Path::new("/proc").join(pid.trim()).join("stat");
        // A zombie that init has not reaped yet counts as gone.
        let there = || std::fs::read_to_string(&stat).is_ok_and(|stat| !stat.contains(") Z "));
        until(|| !there()).await;
    }

    #[tokio::test]
    async fn plugin_output_is_read_to_end() {
        let stage = Stage::new(Limits::default());
        let said = stage.run("echo one; echo noise >&2; echo two").await;
        assert_eq!(said.as_deref(), Ok("one\ntwo\n"));
    }

    #[tokio::test]
    async fn plugin_sees_only_required_environment() {
        let stage = Stage::new(Limits::default());
        let mut command = shell("echo $KUBERNETES_EXEC_INFO; pwd; env");
        command.env.insert("CONFIGURED".to_owned(), "1".to_owned());
        let said = String::from_utf8(stage.plugins.run(&command).await.unwrap()).unwrap();
        assert!(said.contains(&command.info), "{said}");
        let known = [
            "PATH",
            "HOME",
            "TMPDIR",
            "CONFIGURED",
            "KUBERNETES_EXEC_INFO",
            "KUBERNETES_SERVICE_HOST",
            "KUBERNETES_SERVICE_PORT",
            // Set by the shell itself.
            "PWD",
            "OLDPWD",
            "SHLVL",
            "_",
        ];
        for name in said
            .lines()
            .skip(2)
            .filter_map(|line| Some(line.split_once('=')?.0))
        {
            assert!(known.contains(&name), "{name}");
        }
        let folder = stage.folder.path().to_str().unwrap();
        assert!(said.contains(&format!("HOME={folder}/plugin-")), "{said}");
    }

    #[tokio::test]
    async fn hanging_plugin_is_killed_with_its_children() {
        let stage = Stage::new(short());
        let pids = tempfile::tempdir().unwrap();
        let file = pids.path().join("pid");
        let script = format!(
            "sleep 1000 & echo $! > {}; echo stuck on the wire >&2; sleep 1000",
            file.display()
        );
        let said = stage.run(&script).await.unwrap_err();
        assert!(said.contains("did not end within"), "{said}");
        assert!(said.contains("it printed: stuck on the wire"), "{said}");
        is_gone(&std::fs::read_to_string(file).unwrap()).await;
    }

    #[tokio::test]
    async fn provider_with_hanging_runs_does_not_block_others() {
        let stage = Stage::new(Limits::default());
        let hung = shell("sleep 1000");
        let mut other = shell("echo here");
        other.provider = "another".to_owned();
        let hanging = futures::future::join_all((0..AT_ONCE).map(|_| stage.plugins.run(&hung)));
        let said = tokio::select! {
            _ = hanging => panic!("they hang"),
            said = stage.plugins.run(&other) => said.unwrap(),
        };
        assert_eq!(said, b"here\n");
    }

    #[tokio::test]
    async fn surviving_plugin_child_is_killed_without_delay() {
        let stage = Stage::new(Limits::default());
        let said = stage.run("sleep 1000 & echo $!").await.unwrap();
        is_gone(&said).await;
    }

    #[tokio::test]
    async fn plugin_output_flood_is_limited() {
        let stage = Stage::new(Limits::default());
        let said = stage
            .run("exec head -c 1073741824 /dev/zero")
            .await
            .unwrap_err();
        assert!(said.contains("more than 256 KiB"), "{said}");
        let said = stage
            .run("head -c 104857600 /dev/zero >&2; exit 3")
            .await
            .unwrap_err();
        assert!(said.contains("exit code 3"), "{said}");
    }

    #[tokio::test]
    async fn failed_plugin_error_quotes_redacted_standard_error() {
        let stage = Stage::new(Limits::default());
        let script = "echo hunter2; printf 'cannot \\033[31mread\\nSecret a/b: token: abcdefgh\\n' >&2; exit 4";
        let said = stage.run(script).await.unwrap_err();
        assert!(
            said.contains("/bin/sh has ended with exit code 4; it printed: cannot"),
            "{said}"
        );
        assert!(said.contains("Secret a/b"), "{said}");
        assert!(
            !said.contains("hunter2") && !said.contains("abcdefgh"),
            "{said}"
        );
        assert!(!said.chars().any(char::is_control), "{said:?}");
        let said = stage.run("exit 1").await.unwrap_err();
        assert!(said.ends_with("it printed nothing"), "{said}");
        let said = stage.run("kill -9 $$").await.unwrap_err();
        assert!(said.contains("signal 9"), "{said}");
    }

    #[tokio::test]
    async fn a_program_that_is_not_there_is_named() {
        let stage = Stage::new(Limits::default());
        let mut command = shell("");
        command.program = "/plugins/nobody".to_owned();
        let said = chain(&stage.plugins.run(&command).await.unwrap_err());
        assert!(said.contains("starting /plugins/nobody failed"), "{said}");
        assert!(said.contains("provider file"), "{said}");
    }

    #[tokio::test]
    async fn abandoned_plugin_run_is_killed() {
        let stage = Stage::new(Limits::default());
        let pids = tempfile::tempdir().unwrap();
        let file = pids.path().join("pid");
        let command = shell(&format!("echo $$ > {}; sleep 1000", file.display()));
        let written = until(|| std::fs::read_to_string(&file).is_ok_and(|pid| !pid.is_empty()));
        tokio::select! {
            _ = stage.plugins.run(&command) => unreachable!("it sleeps"),
            () = written => {}
        }
        is_gone(&std::fs::read_to_string(file).unwrap()).await;
    }
}
