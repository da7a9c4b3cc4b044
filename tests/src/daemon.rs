//! Runs the hub or an agent for a test, and provides access to its ports, log and resource usage.

use std::{
    collections::BTreeMap,
    ffi::OsString,
    fs,
    net::SocketAddr,
    path::{Path, PathBuf},
    process::ExitStatus,
    time::Duration,
};

use anyhow::{Context, Result, bail, ensure};
use rustix::process::Signal;
use tempfile::TempDir;

use crate::{
    cluster::path_with,
    load::{self, Memory},
    port::Port,
    process::{ChildProcess, Invocation, log_end},
    tools::Tools,
    wait::{eventually, eventually_while_running},
};

const HTTP_TIMEOUT: Duration = Duration::from_secs(10);
/// Helm runs end first: gracefully for 20 s, then by force.
const STOP_DEADLINE: Duration = Duration::from_secs(60);

/// A program of this workspace, and the variable that overrides its path.
#[derive(Debug, Clone, Copy)]
pub struct Program {
    pub name: &'static str,
    pub variable: &'static str,
}

impl Program {
    /// Returns the program that the variable names, or the one of the same build as this executable. An error names
    /// the build command.
    pub fn find(&self) -> Result<PathBuf> {
        let Self { name, variable } = self;
        if let Some(path) = std::env::var_os(variable).map(PathBuf::from) {
            if !path.is_file() {
                bail!("{variable}: there is no {}", path.display());
            }
            return Ok(path);
        }
        let executable = std::env::current_exe().context("finding the current executable")?;
        let candidates = executable
            .ancestors()
            .skip(1)
            .take(2)
            .map(|folder| folder.join(name));
        candidates
            .into_iter()
            .find(|binary| binary.is_file())
            .with_context(|| {
                format!(
                    "no {name} in the folder of {}; run 'cargo build --workspace --bins' with the same \
                     profile, or name it in {variable}",
                    executable.display()
                )
            })
    }
}

/// How a daemon is started.
#[derive(Debug)]
pub(crate) struct DaemonStart<'a> {
    pub(crate) program: Program,
    /// Flags of the harness. A flag that is also in `args` is left out.
    pub(crate) flags: Vec<(&'static str, OsString)>,
    /// The flag for the cache's folder, if the cache is not below TMPDIR anyway.
    pub(crate) cache_flag: Option<&'static str>,
    pub(crate) args: &'a [String],
    /// The environment besides PATH and TMPDIR.
    pub(crate) env: BTreeMap<String, OsString>,
    /// Size in bytes of a separate disk for caches and scratch files.
    pub(crate) disk: Option<u64>,
    /// Whether it runs as the first process of a container.
    pub(crate) is_contained: bool,
}

/// Runs a program in a user namespace, in which an unprivileged user may mount.
const WITH_OWN_DISK: [&str; 7] = [
    "unshare",
    "--user",
    "--map-root-user",
    "--mount",
    "sh",
    "-ec",
    "mount -t tmpfs -o size=\"$1\" none \"$TMPDIR\"; shift; exec \"$@\"",
];

/// Runs a program as the first process of a PID namespace. As in a container, the others die with it.
const AS_FIRST_PROCESS: [&str; 7] = [
    "unshare",
    "--user",
    "--map-root-user",
    "--pid",
    "--fork",
    "--mount-proc",
    "--kill-child=KILL",
];

/// A running hub or agent. Dropping it kills it. If the thread is panicking or `KRYPTON_KEEP` is set, the log stays
/// and its path is printed.
#[derive(Debug)]
pub struct Daemon {
    name: &'static str,
    process: ChildProcess,
    metrics: Port,
    health: Port,
    debug: Port,
    folder: Option<TempDir>,
}

impl Daemon {
    pub(crate) fn start(start: DaemonStart<'_>) -> Result<Self> {
        crate::install_tls_provider();
        let name = start.program.name;
        let (tools, binary) = (Tools::find()?, start.program.find()?);
        let folder = TempDir::with_prefix(format!("{name}-"))
            .with_context(|| format!("creating a folder for {name}"))?;
        let [scratch, cache] = ["tmp", "cache"].map(|directory| folder.path().join(directory));
        for directory in [&scratch, &cache] {
            fs::create_dir(directory)
                .with_context(|| format!("creating {}", directory.display()))?;
        }
        let cache = start.cache_flag.map(|flag| (flag, cache.into_os_string()));
        let [metrics, health, debug] = [Port::reserve()?, Port::reserve()?, Port::reserve()?];
        let address = |port: &Port| port.address().to_string().into();
        let default_flags = [
            ("--metrics-bind-address", address(&metrics)),
            ("--health-probe-bind-address", address(&health)),
            ("--helm", tools.binary("helm").into_os_string()),
        ];
        let mut invocation = match start.disk {
            None if start.is_contained => {
                let [unshare, options @ ..] = AS_FIRST_PROCESS;
                Invocation::new(unshare).args(options).args([binary])
            }
            None => Invocation::new(binary),
            Some(bytes) => {
                let [unshare, options @ ..] = WITH_OWN_DISK;
                let size = ["sh".to_owned(), bytes.to_string()];
                Invocation::new(unshare)
                    .args(options)
                    .args(size)
                    .arg(binary)
            }
        };
        for (flag, value) in default_flags.into_iter().chain(cache).chain(start.flags) {
            if !start.args.iter().any(|arg| is_flag(arg, flag)) {
                let mut arg = OsString::from(flag);
                arg.push("=");
                arg.push(value);
                invocation = invocation.args([arg]);
            }
        }
        invocation = invocation
            .args(start.args)
            .env("PATH", path_with(&tools))
            .env("TMPDIR", scratch)
            .env("KRYPTON_DEBUG_BIND_ADDRESS", debug.address().to_string());
        for (name, value) in start.env {
            invocation = invocation.env(name, value);
        }
        let process = ChildProcess::spawn(name, &invocation, &folder.path().join("log"))?;
        Ok(Self {
            name,
            process,
            metrics,
            health,
            debug,
            folder: Some(folder),
        })
    }

    /// Returns the folder of the scratch files, also on a separate disk, which is mounted only for the process.
    pub fn scratch(&self) -> Result<PathBuf> {
        let scratch = self.folder()?.join("tmp");
        let root = PathBuf::from(format!("/proc/{}/root", self.pid()));
        let inside = scratch.strip_prefix("/").context("a relative TMPDIR")?;
        Ok(root.join(inside))
    }

    /// Waits until `/readyz` answers 200.
    pub async fn wait_ready(&mut self, deadline: Duration) -> Result<()> {
        let url = format!("http://{}/readyz", self.health.address());
        let what = format!("{} to be ready", self.name);
        let check_running = || self.process.check_running();
        let ready = async || fetch(&url).await.map(|_| Some(()));
        eventually_while_running(&what, deadline, check_running, ready).await
    }

    pub fn pid(&self) -> u32 {
        self.process.pid()
    }

    /// Sends SIGKILL to this process only, as in a crash.
    pub async fn kill9(&mut self) -> Result<()> {
        self.process.signal(Signal::KILL)?;
        self.process.wait(STOP_DEADLINE).await.map(drop)
    }

    /// Sends SIGSTOP to this process only. Its children continue.
    pub fn freeze(&mut self) -> Result<()> {
        self.process.signal(Signal::STOP)
    }

    /// Sends SIGCONT after `freeze`.
    pub fn thaw(&mut self) -> Result<()> {
        self.process.signal(Signal::CONT)
    }

    /// Returns the process's folder. Helm processes with this path in their arguments belong to it.
    pub fn folder(&self) -> Result<&Path> {
        let folder = self
            .folder
            .as_ref()
            .context("the process is being dropped")?;
        Ok(folder.path())
    }

    /// Sends SIGTERM and waits for the end.
    pub async fn stop(&mut self) -> Result<ExitStatus> {
        self.process.signal(Signal::TERM)?;
        self.process.wait(STOP_DEADLINE).await
    }

    pub fn try_wait(&mut self) -> Result<Option<ExitStatus>> {
        self.process.try_wait()
    }

    pub async fn wait(&mut self, deadline: Duration) -> Result<ExitStatus> {
        self.process.wait(deadline).await
    }

    pub fn log_path(&self) -> &Path {
        self.process.log()
    }

    pub fn log(&self) -> Result<String> {
        let log = self.process.log();
        let bytes = fs::read(log).with_context(|| format!("reading {}", log.display()))?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// Waits until the log contains this text.
    pub async fn wait_for_log(&self, text: &str) -> Result<()> {
        let what = format!("{} to log {text:?}", self.name);
        eventually(&what, async || {
            let log = self.log()?;
            ensure!(log.contains(text), "{log}");
            Ok(Some(()))
        })
        .await
    }

    pub async fn metrics(&self) -> Result<String> {
        fetch(&format!("http://{}/metrics", self.metrics.address())).await
    }

    pub fn health_address(&self) -> SocketAddr {
        self.health.address()
    }

    pub fn debug_address(&self) -> SocketAddr {
        self.debug.address()
    }

    /// Returns a response below `/debug/`.
    pub async fn debug(&self, path: &str) -> Result<String> {
        fetch(&format!("http://{}/debug/{path}", self.debug_address())).await
    }

    /// Sets the log filter with `PUT /debug/log` and this query.
    pub async fn set_log_filter(&self, filter: &str, query: &str) -> Result<String> {
        let url = format!("http://{}/debug/log{query}", self.debug_address());
        let put = client()?.put(url).body(filter.to_owned());
        Ok(put.send().await?.error_for_status()?.text().await?)
    }

    /// Returns the resident memory without that of its children.
    pub fn rss_bytes(&self) -> Result<u64> {
        Ok(Memory::read(&self.proc("status")?)?.resident)
    }

    /// Returns the CPU time since the start, including that of ended children (Helm).
    pub fn cpu_seconds(&self) -> Result<f64> {
        Ok(load::times(&self.proc("stat")?)?.iter().sum())
    }

    /// Returns the number of open sockets.
    pub fn sockets(&self) -> Result<usize> {
        let path = format!("/proc/{}/fd", self.pid());
        let descriptors = fs::read_dir(&path).with_context(|| format!("reading {path}"))?;
        let targets = descriptors.filter_map(|fd| fs::read_link(fd.ok()?.path()).ok());
        let is_socket = |target: &PathBuf| target.to_string_lossy().starts_with("socket:");
        Ok(targets.filter(is_socket).count())
    }

    fn proc(&self, file: &str) -> Result<String> {
        let path = format!("/proc/{}/{file}", self.pid());
        fs::read_to_string(&path).with_context(|| {
            format!(
                "reading {path}; the log of {} ends:\n{}",
                self.name,
                log_end(self.process.log())
            )
        })
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        self.process.kill();
        let keep = std::thread::panicking() || std::env::var_os("KRYPTON_KEEP").is_some();
        if let Some(folder) = self.folder.take().filter(|_| keep) {
            eprintln!("{}: its log is in {}", self.name, folder.keep().display());
        }
    }
}

fn is_flag(arg: &str, flag: &str) -> bool {
    arg.strip_prefix(flag)
        .is_some_and(|rest| rest.is_empty() || rest.starts_with('='))
}

fn client() -> reqwest::Result<reqwest::Client> {
    let client = reqwest::Client::builder();
    // Reading the certificates of the machine takes most of the time of a request, and all addresses are plain HTTP.
    let client = client.no_proxy().tls_certs_only([]);
    client.timeout(HTTP_TIMEOUT).build()
}

async fn fetch(url: &str) -> Result<String> {
    Ok(client()?
        .get(url)
        .send()
        .await?
        .error_for_status()?
        .text()
        .await?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flag_is_recognised_with_or_without_value() {
        assert!(is_flag("--helm", "--helm") && is_flag("--helm=/x", "--helm"));
        assert!(!is_flag("--helm-timeout", "--helm"));
    }
}
