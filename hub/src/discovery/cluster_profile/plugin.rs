//! One run of an access provider's program, in its own process group, which never outlives the deadline.

use std::collections::{BTreeMap, VecDeque};
use std::ffi::OsString;
use std::io;
use std::os::unix::process::ExitStatusExt as _;
use std::path::PathBuf;
use std::process::{ExitStatus, Stdio};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use krypton_helm::driver;
use krypton_runtime::{off_thread, process_group};
use parking_lot::Mutex;
use rustix::process::{Pid, WaitId, WaitIdOptions, waitid};
use tokio::io::{AsyncRead, AsyncReadExt as _};
use tokio::process::{Child, ChildStderr, ChildStdout};
use tokio::sync::Semaphore;
use tokio::time::timeout;

use super::access_plan::Command;

/// Concurrent runs of all profiles. Each program uses about 50 MB.
const MAX_CONCURRENT: usize = 16;
/// Concurrent runs of one access provider. If all its runs hang, other providers still get slots.
const MAX_PER_PROVIDER: usize = 4;
/// Deadline of one run.
const DEADLINE: Duration = Duration::from_secs(20);
/// Bytes of standard output. A credential has a few thousand.
const STDOUT_MAX: usize = 256 * 1024;
/// Bytes kept of standard error. Messages show fewer.
const STDERR_KEPT: usize = 4096;
const STDERR_SHOWN: usize = 512;
/// Killed processes close their files immediately, but a process that left the group may not.
const CLEAN_UP_TIMEOUT: Duration = Duration::from_secs(2);
/// With these variables, a program in a pod finds its own cluster's API server and uses the mounted service
/// account. The other variables of a pod concern only the hub.
const POD_VARIABLES: [&str; 2] = ["KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT"];

/// Runs programs with limited concurrency.
#[derive(Debug)]
pub(super) struct Plugins {
    slots: Semaphore,
    /// Semaphores by provider name, as in the provider file.
    provider_slots: Mutex<BTreeMap<String, Arc<Semaphore>>>,
    deadline: Duration,
    /// Each run gets its own directory here, which is deleted with the run.
    folder: PathBuf,
    /// The variables inherited from this process.
    inherited_env: Vec<(OsString, OsString)>,
}

impl Plugins {
    pub(super) fn new(folder: PathBuf) -> Self {
        let names = ["PATH"].iter().chain(&POD_VARIABLES);
        let inherited = names.filter_map(|name| Some((name.into(), std::env::var_os(name)?)));
        Self {
            slots: Semaphore::new(MAX_CONCURRENT),
            provider_slots: Mutex::default(),
            deadline: DEADLINE,
            folder,
            inherited_env: inherited.collect(),
        }
    }

    fn slots_for(&self, provider: &str) -> Arc<Semaphore> {
        let mut all = self.provider_slots.lock();
        let slots = all.entry(provider.to_owned());
        Arc::clone(slots.or_insert_with(|| Arc::new(Semaphore::new(MAX_PER_PROVIDER))))
    }

    /// Runs the program once a slot is free, and returns its standard output. Dropping the future kills the
    /// process group. No error contains the standard output, which may be a credential.
    pub(super) async fn run(&self, command: &Command) -> anyhow::Result<Vec<u8>> {
        let program = &command.program;
        let failed = || format!("running {program} failed");
        let provider_slots = self.slots_for(&command.provider);
        // The semaphores are never closed.
        let _provider_slot = provider_slots.acquire().await;
        let _slot = self.slots.acquire().await;
        let home = tempfile::Builder::new()
            .prefix("plugin-")
            .tempdir_in(&self.folder)
            .with_context(failed)?;
        let mut process = self.start(command, home.path().as_os_str().to_owned())?;
        let timed_out = process.wait(self.deadline).await.with_context(failed)?;
        let status = process.clean_up(program).await.with_context(failed)?;
        let stderr = describe_stderr(process.stderr_tail.make_contiguous());
        if timed_out {
            let seconds = self.deadline.as_secs();
            bail!("{program} did not end within {seconds} s and was killed{stderr}");
        }
        ensure!(
            process.output.len() <= STDOUT_MAX,
            "{program} has written more than {} KiB and was killed; an ExecCredential is expected",
            STDOUT_MAX / 1024
        );
        let code = describe_status(status);
        ensure!(status.success(), "{program} has ended with {code}{stderr}");
        Ok(process.output)
    }

    #[allow(
        clippy::disallowed_methods,
        reason = "the one place where an access provider's program starts"
    )]
    fn start(&self, command: &Command, home: OsString) -> anyhow::Result<PluginProcess> {
        let failed = || {
            let program = &command.program;
            format!("starting {program} failed; correct its execConfig in the hub's provider file")
        };
        let mut child = tokio::process::Command::new(&command.program)
            .args(&command.args)
            .env_clear()
            .envs(self.inherited_env.iter().map(|(name, value)| (name, value)))
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
            .with_context(failed)?;
        let pid = child.id().and_then(|id| Pid::from_raw(id.cast_signed()));
        let pid = pid.ok_or_else(|| io::Error::from(io::ErrorKind::NotFound));
        let pid = pid.with_context(failed)?;
        Ok(PluginProcess {
            group: ProcessGroup { pid, reaped: false },
            stdout: child.stdout.take(),
            stderr: child.stderr.take(),
            child,
            output: Vec::new(),
            stderr_tail: VecDeque::new(),
        })
    }
}

/// Returns the sanitized end of standard error, to append to a message.
fn describe_stderr(stderr: &[u8]) -> String {
    let text = driver::last_error_message(stderr);
    let clean: String = text.chars().filter(|c| !c.is_control()).collect();
    let start = clean.ceil_char_boundary(clean.len().saturating_sub(STDERR_SHOWN));
    match clean.get(start..).unwrap_or_default() {
        "" => "; it printed nothing".to_owned(),
        end => format!("; it printed: {end}"),
    }
}

fn describe_status(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exit code {code}"),
        (None, Some(signal)) => format!("signal {signal}"),
        (None, None) => "an unknown status".to_owned(),
    }
}

/// A running program and its output.
struct PluginProcess {
    // Dropped before the child, which would reap it: the PID must still be valid when the group is killed.
    group: ProcessGroup,
    child: Child,
    /// `None` once the stream is closed, as for standard error.
    stdout: Option<ChildStdout>,
    stderr: Option<ChildStderr>,
    /// The standard output.
    output: Vec<u8>,
    /// The end of standard error.
    stderr_tail: VecDeque<u8>,
}

impl PluginProcess {
    /// Waits until the program ends, writes too much, or reaches its deadline. Returns whether it timed out.
    async fn wait(&mut self, deadline: Duration) -> io::Result<bool> {
        let exited = self.group.exited();
        let deadline = tokio::time::sleep(deadline);
        tokio::pin!(exited, deadline);
        while self.output.len() <= STDOUT_MAX {
            tokio::select! {
                biased;
                result = &mut exited => return result.map(|()| false),
                () = &mut deadline => return Ok(true),
                () = self.read() => {}
            }
        }
        Ok(false)
    }

    /// Kills all processes that the program left running, even after a successful exit, and reads the rest of
    /// the output.
    async fn clean_up(&mut self, program: &str) -> io::Result<ExitStatus> {
        let pid = self.group.pid;
        process_group::kill(pid);
        let rest = async {
            while self.stdout.is_some() || self.stderr.is_some() {
                self.read().await;
            }
        };
        if timeout(CLEAN_UP_TIMEOUT, rest).await.is_err() {
            tracing::warn!(plugin = %program, "a child process of the plugin left its group");
        }
        let status = self.child.wait().await?;
        self.group.reaped = true;
        let orphans = process_group::reap_orphans(pid);
        if timeout(CLEAN_UP_TIMEOUT, orphans).await.is_err() {
            tracing::warn!(plugin = %program, "a killed process of the plugin still exists");
        }
        Ok(status)
    }

    /// Reads the next output. Keeps one byte more of standard output than allowed, to detect an excess. Never resolves
    /// once both streams are closed. Safe to cancel.
    async fn read(&mut self) {
        let (mut out, mut err) = ([0; 4096], [0; 4096]);
        tokio::select! {
            count = read_stream(&mut self.stdout, &mut out) => match count {
                0 => self.stdout = None,
                count => {
                    let room = (STDOUT_MAX + 1).saturating_sub(self.output.len());
                    self.output.extend(out.iter().take(count.min(room)));
                }
            },
            count = read_stream(&mut self.stderr, &mut err) => match count {
                0 => self.stderr = None,
                count => {
                    self.stderr_tail.extend(err.iter().take(count));
                    let excess = self.stderr_tail.len().saturating_sub(STDERR_KEPT);
                    self.stderr_tail.drain(..excess);
                }
            },
        }
    }
}

/// The program's process group, killed on drop.
struct ProcessGroup {
    pid: Pid,
    reaped: bool,
}

impl ProcessGroup {
    /// Waits for the leader's exit without reaping it. This keeps the kernel from reusing the group's ID.
    fn exited(&self) -> impl Future<Output = io::Result<()>> + use<> {
        let pid = self.pid;
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
        // One thread per run is acceptable because runs are few. The thread ends with the process, which is
        // always killed.
        let waiting = off_thread::start(move || {
            loop {
                match waitid(WaitId::Pid(pid), options) {
                    Err(rustix::io::Errno::INTR) => {}
                    Err(error) => return Err(error.into()),
                    Ok(_) => return Ok(()),
                }
            }
        });
        async move { waiting.await.map_err(io::Error::other)? }
    }
}

impl Drop for ProcessGroup {
    fn drop(&mut self) {
        if !self.reaped {
            process_group::kill(self.pid);
        }
    }
}

/// Returns zero at the end of the stream.
async fn read_stream<R: AsyncRead + Unpin>(stream: &mut Option<R>, buffer: &mut [u8]) -> usize {
    match stream {
        Some(stream) => stream.read(buffer).await.unwrap_or(0),
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

    struct Fixture {
        plugins: Plugins,
        folder: tempfile::TempDir,
    }

    impl Fixture {
        fn new() -> Self {
            let folder = tempfile::tempdir().unwrap();
            let plugins = Plugins::new(folder.path().to_owned());
            Self { plugins, folder }
        }

        async fn run(&self, script: &str) -> Result<String, String> {
            let result = timeout(TEST_TIMEOUT, self.plugins.run(&shell(script)))
                .await
                .unwrap();
            assert_eq!(std::fs::read_dir(self.folder.path()).unwrap().count(), 0);
            result
                .map(|output| String::from_utf8(output).unwrap())
                .map_err(|error| chain(&*error))
        }
    }

    /// Stops a hung test.
    const TEST_TIMEOUT: Duration = Duration::from_secs(60);

    async fn until(done: impl Fn() -> bool) {
        let waiting = async {
            while !done() {
                tokio::task::yield_now().await;
            }
        };
        timeout(TEST_TIMEOUT, waiting).await.unwrap();
    }

    async fn wait_until_gone(pid: &str) {
        let stat = Path::new("/proc").join(pid.trim()).join("stat");
        // A zombie that init has not reaped yet counts as gone.
        let exists = || std::fs::read_to_string(&stat).is_ok_and(|stat| !stat.contains(") Z "));
        until(|| !exists()).await;
    }

    #[tokio::test]
    async fn plugin_output_is_read_to_end() {
        let fixture = Fixture::new();
        let output = fixture.run("echo one; echo noise >&2; echo two").await;
        assert_eq!(output.as_deref(), Ok("one\ntwo\n"));
    }

    #[tokio::test]
    async fn plugin_sees_only_required_environment() {
        let fixture = Fixture::new();
        let mut command = shell("echo $KUBERNETES_EXEC_INFO; pwd; env");
        command.env.insert("CONFIGURED".to_owned(), "1".to_owned());
        let output = String::from_utf8(fixture.plugins.run(&command).await.unwrap()).unwrap();
        assert!(output.contains(&command.info), "{output}");
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
        for name in output
            .lines()
            .skip(2)
            .filter_map(|line| Some(line.split_once('=')?.0))
        {
            assert!(known.contains(&name), "{name}");
        }
        let folder = fixture.folder.path().to_str().unwrap();
        assert!(
            output.contains(&format!("HOME={folder}/plugin-")),
            "{output}"
        );
    }

    #[tokio::test]
    async fn hanging_plugin_is_killed_with_its_children() {
        let mut fixture = Fixture::new();
        fixture.plugins.deadline = Duration::from_millis(300);
        let pids = tempfile::tempdir().unwrap();
        let file = pids.path().join("pid");
        let script = format!(
            "sleep 1000 & echo $! > {}; echo stuck on the wire >&2; sleep 1000",
            file.display()
        );
        let error = fixture.run(&script).await.unwrap_err();
        assert!(error.contains("did not end within"), "{error}");
        assert!(error.contains("it printed: stuck on the wire"), "{error}");
        wait_until_gone(&std::fs::read_to_string(file).unwrap()).await;
    }

    #[tokio::test]
    async fn provider_with_hanging_runs_does_not_block_others() {
        let fixture = Fixture::new();
        let hung = shell("sleep 1000");
        let mut other = shell("echo here");
        other.provider = "another".to_owned();
        let hanging =
            futures::future::join_all((0..MAX_CONCURRENT).map(|_| fixture.plugins.run(&hung)));
        let output = tokio::select! {
            _ = hanging => panic!("they hang"),
            output = fixture.plugins.run(&other) => output.unwrap(),
        };
        assert_eq!(output, b"here\n");
    }

    #[tokio::test]
    async fn surviving_plugin_child_is_killed_without_delay() {
        let fixture = Fixture::new();
        let output = fixture.run("sleep 1000 & echo $!").await.unwrap();
        wait_until_gone(&output).await;
    }

    #[tokio::test]
    async fn plugin_output_flood_is_limited() {
        let fixture = Fixture::new();
        let error = fixture
            .run("exec head -c 1073741824 /dev/zero")
            .await
            .unwrap_err();
        assert!(error.contains("more than 256 KiB"), "{error}");
        let error = fixture
            .run("head -c 104857600 /dev/zero >&2; exit 3")
            .await
            .unwrap_err();
        assert!(error.contains("exit code 3"), "{error}");
    }

    #[tokio::test]
    async fn failed_plugin_error_quotes_redacted_standard_error() {
        let fixture = Fixture::new();
        let script = "echo hunter2; printf 'cannot \\033[31mread\\nSecret a/b: token: abcdefgh\\n' >&2; exit 4";
        let error = fixture.run(script).await.unwrap_err();
        assert!(
            error.contains("/bin/sh has ended with exit code 4; it printed: cannot"),
            "{error}"
        );
        assert!(error.contains("Secret a/b"), "{error}");
        assert!(
            !error.contains("hunter2") && !error.contains("abcdefgh"),
            "{error}"
        );
        assert!(!error.chars().any(char::is_control), "{error:?}");
        let error = fixture.run("exit 1").await.unwrap_err();
        assert!(error.ends_with("it printed nothing"), "{error}");
        let error = fixture.run("kill -9 $$").await.unwrap_err();
        assert!(error.contains("signal 9"), "{error}");
    }

    #[tokio::test]
    async fn a_program_that_is_not_there_is_named() {
        let fixture = Fixture::new();
        let mut command = shell("");
        command.program = "/plugins/nobody".to_owned();
        let error = chain(&*fixture.plugins.run(&command).await.unwrap_err());
        assert!(error.contains("starting /plugins/nobody failed"), "{error}");
        assert!(error.contains("provider file"), "{error}");
    }

    #[tokio::test]
    async fn abandoned_plugin_run_is_killed() {
        let fixture = Fixture::new();
        let pids = tempfile::tempdir().unwrap();
        let file = pids.path().join("pid");
        let command = shell(&format!("echo $$ > {}; sleep 1000", file.display()));
        let written = until(|| std::fs::read_to_string(&file).is_ok_and(|pid| !pid.is_empty()));
        tokio::select! {
            _ = fixture.plugins.run(&command) => unreachable!("it sleeps"),
            () = written => {}
        }
        wait_until_gone(&std::fs::read_to_string(file).unwrap()).await;
    }
}
