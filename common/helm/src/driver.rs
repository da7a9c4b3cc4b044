//! Helm driver: starts, supervises and stops Helm processes.
//!
//! The rest of the code does not depend on Helm being a process.

use std::ffi::OsString;
use std::fs::File;
use std::io::{BufReader, Read as _};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use krypton_runtime::clock::BootTime;
use krypton_runtime::off_thread;
use parking_lot::Mutex;
use serde_json::{Map, Value};
use tracing::Instrument as _;
use tracing::field::Empty;

use crate::metrics::HelmMetrics;
use crate::releases;
use crate::slots::priority::Priority;

mod arguments;
mod command;
mod error;
mod keyring;
mod process;
mod scratch;
pub(crate) mod stderr;
mod stop;
mod supervisor;
mod version;

pub use crate::slots::{Load, Slot};
pub use arguments::{ReleaseTarget, Rollback, Uninstall, Upgrade};
pub use error::HelmError;
pub use keyring::Keyring;
pub use process::{DriverTimeouts, HelmCommand, Processes, Running, Supervisor};
pub use stderr::is_suspended;
pub use stop::{StopHandle, StopRequest, StopRequests, StopSignal};
pub use supervisor::supervise;

use crate::slots::{Limits, Slots};
use process::{HelmJob, RunOutcome};
use scratch::Scratch;
use stderr::HelmStderr;
use version::is_supported;

/// Timeout of `helm get`, which reads a single Secret.
const GET_TIMEOUT: Duration = Duration::from_secs(10);
/// Part of Helm's error message for a Secret that exists and holds no valid release.
const UNDECODABLE: &str = "failed to decode data";

/// Settings of the driver.
#[derive(Clone, Debug)]
pub struct HelmConfig {
    /// The Helm executable. A bare name is looked up in `PATH`.
    pub binary: PathBuf,
    /// Starts the processes, usually a [`Supervisor`].
    pub processes: Arc<dyn Processes>,
    /// Folder for Helm's caches, exclusive to this driver. The driver creates it.
    pub scratch: PathBuf,
    /// Folder for values and Helm's temporary files, with the same rules. The driver removes files of an
    /// earlier process.
    pub private: PathBuf,
    /// Maximum number of concurrent Helm processes, at least 1.
    pub max_concurrent: usize,
    /// Maximum number of concurrent Helm processes for one member, at least 1.
    pub max_per_member: usize,
}

/// Returns the last message that a Kubernetes client program wrote to standard error, shortened and redacted.
pub fn last_error_message(stderr: &[u8]) -> String {
    HelmStderr::parse(stderr, &[]).text
}

/// Upper limit of Helm's output. Helm cannot store a release larger than 10 MiB, chart included.
const OUTPUT_MAX: u64 = 64 << 20;

fn digest_of_file(file: &Path) -> std::io::Result<String> {
    let output = BufReader::new(File::open(file)?.take(OUTPUT_MAX));
    releases::digest_of_json(output).map_err(std::io::Error::from)
}

/// Identity of a file: device, inode, size, and time of the last change of any kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct FileIdentity(u64, u64, u64, i64, i64);

impl FileIdentity {
    fn read(file: &Path) -> std::io::Result<Self> {
        let metadata = std::fs::metadata(file)?;
        let (seconds, nanos) = (metadata.ctime(), metadata.ctime_nsec());
        Ok(Self(
            metadata.dev(),
            metadata.ino(),
            metadata.size(),
            seconds,
            nanos,
        ))
    }
}

/// Parameters of a run, in addition to Helm's arguments.
struct RunParams<'a> {
    verb: &'static str,
    release: &'a str,
    timeout: Duration,
    /// Texts that error messages omit.
    secrets: Vec<String>,
    terminate_on_soft_stop: bool,
    /// File for Helm's standard output.
    output: Option<&'a Path>,
}

impl<'a> RunParams<'a> {
    /// Returns the parameters of a run that a soft stop ends. It has no secrets and keeps no output.
    fn new(verb: &'static str, release: &'a str, timeout: Duration) -> Self {
        Self {
            verb,
            release,
            timeout,
            secrets: Vec::new(),
            terminate_on_soft_stop: true,
            output: None,
        }
    }
}

/// Runs Helm with limited concurrency.
#[derive(Debug)]
pub struct Helm {
    config: HelmConfig,
    inherited: command::InheritedEnv,
    scratch: Scratch,
    slots: Slots,
    timeouts: DriverTimeouts,
    metrics: HelmMetrics,
    /// Identity of the last executable whose version was accepted.
    accepted_binary: Mutex<Option<FileIdentity>>,
}

impl Helm {
    /// Checks the helm executable's version and prepares the scratch folder.
    ///
    /// # Errors
    /// Returns an error if Helm cannot run or its version is neither 4.2.4 nor a newer 4.x. Returns an error
    /// if the scratch folder is not writable.
    pub async fn new(mut config: HelmConfig) -> Result<Self, HelmError> {
        let inherited = command::InheritedEnv::read();
        let scratch = Scratch::prepare(&config.scratch, &config.private)?;
        config.max_concurrent = config.max_concurrent.max(1);
        config.max_per_member = config.max_per_member.clamp(1, config.max_concurrent);
        let slots = Slots::new(Limits {
            total: config.max_concurrent,
            per_member: config.max_per_member,
        });
        let helm = Self {
            config,
            inherited,
            scratch,
            slots,
            timeouts: DriverTimeouts::default(),
            metrics: HelmMetrics::default(),
            accepted_binary: Mutex::new(None),
        };
        helm.check_version().await?;
        Ok(helm)
    }

    /// Checks that Helm exists and its version fits. Runs `helm version` only if the file has changed.
    async fn check_version(&self) -> Result<(), HelmError> {
        let binary = &self.config.binary;
        let missing = |source| HelmError::Missing {
            binary: binary.clone(),
            source,
        };
        let identity = FileIdentity::read(&self.inherited.resolve(binary)).map_err(missing)?;
        if *self.accepted_binary.lock() == Some(identity) {
            return Ok(());
        }
        let environment = command::environment(&self.inherited, &self.scratch, None);
        let output = self
            .config
            .processes
            .version(binary, environment)
            .await
            .map_err(missing)?;
        if !is_supported(&output) {
            return Err(HelmError::Version {
                binary: binary.clone(),
                found: output,
            });
        }
        *self.accepted_binary.lock() = Some(identity);
        Ok(())
    }

    /// Returns the running and waiting Helm runs.
    pub fn load(&self) -> Load {
        self.slots.load()
    }

    /// Returns the maximum number of concurrent runs for one member, at least 1.
    pub fn max_per_member(&self) -> usize {
        self.config.max_per_member
    }

    /// Checks that a run could start now: Helm exists, and there is disk space for its files.
    ///
    /// # Errors
    /// Only errors for which [`HelmError::is_local`] is true.
    pub async fn ready(
        &self,
        cache_key: &str,
        values: &Map<String, Value>,
    ) -> Result<(), HelmError> {
        self.prepare_run(cache_key).await?.write_values(values)?;
        Ok(())
    }

    /// Checks that Helm exists, and creates the folder of a run.
    async fn prepare_run(&self, cache_key: &str) -> Result<scratch::RunFolder, HelmError> {
        self.check_version().await?;
        self.scratch.create_run(cache_key)
    }

    /// Replaces [`DriverTimeouts::default`].
    #[must_use]
    pub fn with_timeouts(mut self, timeouts: DriverTimeouts) -> Self {
        self.timeouts = timeouts;
        self
    }

    /// Records into `metrics`. Call this before the first run.
    #[must_use]
    pub fn with_metrics(mut self, metrics: &HelmMetrics) -> Self {
        self.metrics = metrics.clone();
        let limit = i64::try_from(self.config.max_concurrent).unwrap_or(i64::MAX);
        self.metrics.limit.set(limit);
        self.slots = self.slots.with_gauge(self.metrics.in_flight.clone());
        self
    }

    /// Waits for the right to run Helm for this member. A run's deadline starts after this wait, so a run
    /// that hangs does not shorten the time of the next one.
    pub async fn slot(&self, member: &str, priority: Priority) -> Slot {
        let started = BootTime::now();
        let waiting = self.metrics.count_waiting(priority);
        let slot = self.slots.take(member, priority).await;
        drop(waiting);
        self.metrics
            .record_wait(priority, BootTime::now().since(started));
        slot
    }

    /// Records the outcome of a run in the metrics and in a span.
    async fn record_run<T>(
        &self,
        verb: &'static str,
        run: impl Future<Output = Result<T, HelmError>>,
    ) -> Result<T, HelmError> {
        let span = tracing::error_span!("helm", verb, outcome = Empty);
        let started = BootTime::now();
        let result = run.instrument(span.clone()).await;
        let duration = BootTime::now().since(started);
        let outcome = result.as_ref().err().map_or("ok", HelmError::outcome);
        self.metrics.record_run(verb, duration, outcome);
        span.record("outcome", outcome);
        result
    }

    /// Installs or upgrades a release. `Ok` means that Helm exited successfully; the release Secret is
    /// authoritative. Returns the digest of the release that Helm created, or `None` if Helm printed no
    /// release.
    ///
    /// # Errors
    /// See [`HelmError`]. Returns [`HelmError::Stopped`] if `stop` ended the run or prevented its start.
    pub async fn upgrade(
        &self,
        slot: Slot,
        upgrade: &Upgrade,
        stop: &StopSignal,
    ) -> Result<Option<String>, HelmError> {
        let run = async {
            let folder = self.prepare_run(&upgrade.target.cache_key).await?;
            let values = folder.write_values(&upgrade.values)?;
            let arguments = command::upgrade(upgrade, &values)?;
            let output = folder.path().join("release.json");
            let verb = if upgrade.again { "install" } else { "upgrade" };
            let params = RunParams {
                secrets: stderr::secrets(&upgrade.values, &upgrade.secret_paths),
                output: Some(&output),
                ..RunParams::new(verb, &upgrade.target.release, upgrade.timeout)
            };
            self.run(Some(slot), &folder, arguments, params, stop)
                .await?;
            // Users of the workspace can write to the release Secret. Only this process and Helm can write to
            // this file.
            let digest = off_thread::start(move || digest_of_file(&output));
            let digest = digest.await.map_err(std::io::Error::other).flatten();
            let log_failure =
                |error: &std::io::Error| tracing::warn!(%error, "failed to read Helm's output");
            Ok::<_, HelmError>(digest.inspect_err(log_failure).ok())
        };
        self.record_run(upgrade.verb(), run).await
    }

    /// Uninstalls a release, including its hooks.
    ///
    /// # Errors
    /// See [`HelmError`]. Returns [`HelmError::ReleaseNotFound`] only if Helm searched and found no release.
    pub async fn uninstall(
        &self,
        slot: Slot,
        uninstall: &Uninstall,
        stop: &StopSignal,
    ) -> Result<(), HelmError> {
        let run = async {
            let folder = self.prepare_run(&uninstall.target.cache_key).await?;
            let arguments = command::uninstall(uninstall);
            let params = RunParams {
                // On SIGTERM, `helm uninstall` would exit halfway, so a soft stop waits for its end.
                terminate_on_soft_stop: false,
                ..RunParams::new("uninstall", &uninstall.target.release, uninstall.timeout)
            };
            self.run(Some(slot), &folder, arguments, params, stop).await
        };
        self.record_run("uninstall", run).await
    }

    /// Rolls back to a revision, including its hooks. `Ok` means that Helm exited successfully; the release
    /// Secret is authoritative.
    ///
    /// # Errors
    /// See [`HelmError`].
    pub async fn rollback(
        &self,
        slot: Slot,
        rollback: &Rollback,
        stop: &StopSignal,
    ) -> Result<(), HelmError> {
        let run = async {
            let folder = self.prepare_run(&rollback.target.cache_key).await?;
            let arguments = command::rollback(rollback);
            let params = RunParams {
                secrets: stderr::secrets(&rollback.values, &rollback.secret_paths),
                // On SIGTERM, `helm rollback` would exit halfway, like `helm uninstall`.
                terminate_on_soft_stop: false,
                ..RunParams::new("rollback", &rollback.target.release, rollback.timeout)
            };
            self.run(Some(slot), &folder, arguments, params, stop).await
        };
        self.record_run("rollback", run).await
    }

    /// Returns whether Helm can decode a revision whose Secret exists.
    ///
    /// # Errors
    /// Returns an error if Helm could not read the Secret.
    pub async fn can_decode(
        &self,
        slot: Slot,
        target: &ReleaseTarget,
        revision: u32,
        stop: &StopSignal,
    ) -> Result<bool, HelmError> {
        let run = async {
            let folder = self.prepare_run(&target.cache_key).await?;
            let arguments = command::get_metadata(target, revision);
            let params = RunParams::new("get metadata", &target.release, GET_TIMEOUT);
            let result = self.run(Some(slot), &folder, arguments, params, stop).await;
            match result {
                Ok(()) => Ok(true),
                Err(HelmError::Failed { message, .. }) if message.contains(UNDECODABLE) => {
                    Ok(false)
                }
                Err(error) => Err(error),
            }
        };
        self.record_run("get", run).await
    }

    /// Runs Helm, and frees the slot once Helm has ended.
    async fn run(
        &self,
        slot: Option<Slot>,
        folder: &scratch::RunFolder,
        arguments: Vec<OsString>,
        params: RunParams<'_>,
        stop: &StopSignal,
    ) -> Result<(), HelmError> {
        let job = HelmJob {
            processes: self.config.processes.as_ref(),
            command: HelmCommand {
                binary: &self.config.binary,
                arguments,
                environment: command::environment(&self.inherited, &self.scratch, Some(folder)),
                output: params.output,
            },
            deadline: self.deadline(params.timeout),
            timeouts: self.timeouts,
            terminate_on_soft_stop: params.terminate_on_soft_stop,
        };
        let outcome = Box::pin(job.run(stop)).await;
        drop(slot);
        let outcome = outcome.map_err(|source| HelmError::Spawn {
            release: params.release.to_owned(),
            source,
        })?;
        self.check_outcome(&params, outcome)
    }

    fn deadline(&self, timeout: Duration) -> Duration {
        timeout
            .saturating_mul(3)
            .saturating_add(self.timeouts.beyond_timeout)
    }

    fn check_outcome(&self, params: &RunParams<'_>, outcome: RunOutcome) -> Result<(), HelmError> {
        let (verb, release) = (params.verb, params.release.to_owned());
        let parse = |stderr: &[u8]| HelmStderr::parse(stderr, &params.secrets);
        match outcome {
            RunOutcome::Succeeded => Ok(()),
            RunOutcome::Stopped => Err(HelmError::Stopped),
            RunOutcome::NotStarted { stderr } => Err(HelmError::Start {
                release,
                message: parse(&stderr).text,
            }),
            RunOutcome::TimedOut { stderr } => Err(HelmError::TimedOut {
                verb,
                release,
                after: self.deadline(params.timeout),
                message: parse(&stderr).text,
            }),
            RunOutcome::Killed { signal, stderr } => Err(HelmError::Killed {
                verb,
                release,
                signal,
                message: parse(&stderr).text,
            }),
            RunOutcome::Failed { stderr } if stderr::is_out_of_memory(&stderr) => {
                Err(HelmError::OutOfMemory { verb, release })
            }
            RunOutcome::Failed { stderr } => {
                let HelmStderr {
                    text,
                    permanent,
                    not_found,
                    suspended,
                } = parse(&stderr);
                if suspended {
                    return Err(HelmError::Suspended { message: text });
                }
                if not_found && verb == "uninstall" {
                    return Err(HelmError::ReleaseNotFound { release });
                }
                Err(HelmError::Failed {
                    verb,
                    release,
                    message: text,
                    permanent,
                })
            }
        }
    }
}
