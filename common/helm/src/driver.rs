//! Helm driver: starts, supervises and stops Helm processes.
//!
//! The rest of the code does not depend on Helm being a process.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fmt;
use std::fs::File;
use std::io::{BufReader, Read as _};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use krypton_runtime::clock::BootTime;
use krypton_runtime::off_thread;
use semver::Version;
use serde_json::{Map, Value};
use thiserror::Error;
use tracing::Instrument as _;
use tracing::field::Empty;

use crate::metrics::HelmMetrics;
use crate::releases;
use crate::releases::labels::{INSTALL_RUN, RUN_LABEL};
use crate::slots::priority::Priority;

mod command;
mod keyring;
mod process;
mod scratch;
pub(crate) mod stderr;
mod stop;
mod supervisor;

pub use crate::slots::{Load, Slot};
pub use keyring::Keyring;
pub use process::{HelmCommand, Processes, Running, Supervisor};
pub use stop::{Order, Orders};
pub use stop::{StopHandle, StopSignal};
pub use supervisor::supervise;

use crate::slots::{Limits, Slots};
use process::{Ending, Job};
use scratch::Scratch;
use stderr::Complaint;
use supervisor::MEMORY_MAX;

/// Timeout of `helm get`, which reads a single Secret.
const LOOK: Duration = Duration::from_secs(10);
/// Part of Helm's error message for a Secret that exists and holds no valid release.
const UNDECODABLE: &str = "failed to decode data";
/// Oldest supported version. Older versions have vulnerabilities or lack flags that this driver uses.
const OLDEST: Version = Version::new(4, 2, 4);

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

/// Arguments of `helm upgrade --install` or `helm install --replace`.
#[derive(Clone)]
pub struct Upgrade {
    pub kubeconfig: PathBuf,
    pub release: String,
    pub namespace: String,
    /// Path of a local `.tgz`.
    pub chart: PathBuf,
    pub values: Map<String, Value>,
    /// JSON pointers to the secret values, regardless of their key names.
    pub secret_paths: Vec<String>,
    /// Labels for the release Secret.
    pub labels: BTreeMap<String, String>,
    /// Timeout of each of Helm's phases, in whole seconds.
    pub timeout: Duration,
    /// Whether to use server-side apply with forced conflicts. If false, Helm applies as Helm 3 did.
    pub server_side: bool,
    /// Whether to skip the CRDs in the chart's `crds` folder.
    pub skip_crds: bool,
    /// Number of revisions to keep. A repeated installation removes none.
    pub history_max: u8,
    pub description: String,
    /// Whether to repeat a failed installation: its hooks run again, and Helm adopts the objects it created.
    pub again: bool,
    /// Name of the member, which selects the discovery cache.
    pub cache_key: String,
}

impl fmt::Debug for Upgrade {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Upgrade")
            .field("release", &self.release)
            .field("namespace", &self.namespace)
            .field("chart", &self.chart)
            .finish_non_exhaustive()
    }
}

impl Upgrade {
    /// Returns the verb for metrics. Helm does not distinguish a first installation from an upgrade.
    fn verb(&self) -> &'static str {
        let run = self.labels.get(RUN_LABEL);
        match (self.again, run) {
            (true, _) => "reinstall",
            (false, Some(run)) if run.starts_with(INSTALL_RUN) => "install",
            (false, _) => "upgrade",
        }
    }
}

/// Arguments of `helm uninstall`.
#[derive(Clone, Debug)]
pub struct Uninstall {
    pub kubeconfig: PathBuf,
    pub release: String,
    pub namespace: String,
    /// Timeout of each of Helm's phases, in whole seconds.
    pub timeout: Duration,
    /// Whether to run the stored hooks.
    pub hooks: bool,
    /// Name of the member, which selects the discovery cache.
    pub cache_key: String,
}

/// Arguments of `helm rollback`.
#[derive(Clone, Debug)]
pub struct Rollback {
    pub kubeconfig: PathBuf,
    pub release: String,
    pub namespace: String,
    /// The revision to roll back to.
    pub to: u32,
    /// Timeout of each of Helm's phases, in whole seconds.
    pub timeout: Duration,
    /// As in [`Upgrade`]. Must match the way Helm applied the latest revision.
    pub server_side: bool,
    /// Number of revisions to keep.
    pub history_max: u8,
    /// Values of the abandoned revision, to redact their secrets from Helm's messages.
    pub values: Map<String, Value>,
    /// JSON pointers to the secret values, regardless of their key names.
    pub secret_paths: Vec<String>,
    /// Name of the member, which selects the discovery cache.
    pub cache_key: String,
}

/// Arguments of `helm get metadata`.
#[derive(Clone, Debug)]
pub struct Look {
    pub kubeconfig: PathBuf,
    pub release: String,
    pub namespace: String,
    pub revision: u32,
    /// Name of the member, which selects the discovery cache.
    pub cache_key: String,
}

/// Why a Helm run failed.
#[derive(Debug, Error)]
pub enum HelmError {
    #[error(
        "{} cannot be run; install Helm {OLDEST} or newer of major version 4, or name where it is",
        .binary.display()
    )]
    Missing {
        binary: PathBuf,
        #[source]
        source: std::io::Error,
    },
    #[error(
        "{} has version {found:?}; install Helm {OLDEST} or newer of major version 4",
        .binary.display()
    )]
    Version { binary: PathBuf, found: String },
    #[error(
        "the folder {} for helm's files cannot be used; is the disk full or read-only? \
         Make room there, or name another folder (--private-dir; --helm-cache-dir of the hub, --cache-dir of the agent)",
        .path.display()
    )]
    Scratch {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    #[error(
        "label {key}={value} cannot be given to helm: it has a character that separates labels"
    )]
    Label { key: String, value: String },
    #[error("helm could not be started for release {release}")]
    Spawn {
        release: String,
        #[source]
        source: std::io::Error,
    },
    #[error("helm could not be started for release {release}: {complaint}")]
    Start { release: String, complaint: String },
    #[error(
        "helm {verb} of release {release} did not end within {} s and was stopped{}",
        .after.as_secs(), clause(.complaint)
    )]
    TimedOut {
        verb: &'static str,
        release: String,
        after: Duration,
        complaint: String,
    },
    #[error("helm was stopped")]
    Stopped,
    #[error("release {release} was not found")]
    ReleaseNotFound { release: String },
    #[error(
        "helm {verb} of release {release} was killed by signal {signal}, not by us; if memory ran out, \
         increase its memory or lower --max-concurrent-helm{}",
        clause(.complaint)
    )]
    Killed {
        verb: &'static str,
        release: String,
        signal: i32,
        complaint: String,
    },
    #[error(
        "helm {verb} of release {release} needs more than {} MiB of memory and was ended; check what the cluster's \
         API server answers, and the size of chart and values",
        MEMORY_MAX >> 20
    )]
    OutOfMemory { verb: &'static str, release: String },
    #[error("the cluster accepts no writes for now: {complaint}")]
    Suspended { complaint: String },
    #[error("helm {verb} of release {release} failed{}", clause(.complaint))]
    Failed {
        verb: &'static str,
        release: String,
        complaint: String,
        permanent: bool,
    },
}

/// Returns whether an API server's response means that the cluster's owner suspended writes.
pub fn is_suspended(answer: &str) -> bool {
    stderr::is_suspended(answer)
}

/// Returns the last message that a Kubernetes client program wrote to standard error, shortened and redacted.
pub fn last_words(stderr: &[u8]) -> String {
    Complaint::of(stderr, &[]).text
}

/// Upper limit of Helm's output. Helm cannot store a release larger than 10 MiB, chart included.
const OUTPUT_MOST: u64 = 64 << 20;

fn digest_of_file(file: &Path) -> std::io::Result<String> {
    let output = BufReader::new(File::open(file)?.take(OUTPUT_MOST));
    releases::digest_of(output).map_err(std::io::Error::from)
}

fn clause(complaint: &str) -> String {
    if complaint.is_empty() {
        String::new()
    } else {
        format!(": {complaint}")
    }
}

impl HelmError {
    /// Returns whether a retry would fail the same way until the chart, values, cluster or permissions
    /// change.
    pub fn is_permanent(&self) -> bool {
        match self {
            Self::Failed { permanent, .. } => *permanent,
            Self::Label { .. } => true,
            _ => false,
        }
    }

    /// Returns the outcome label for metrics.
    pub(crate) fn outcome(&self) -> &'static str {
        match self {
            Self::TimedOut { .. } => "timed_out",
            Self::Stopped => "stopped",
            Self::ReleaseNotFound { .. } => "not_found",
            Self::Killed { .. } | Self::OutOfMemory { .. } => "killed",
            Self::Suspended { .. } => "suspended",
            Self::Failed { .. } => "failed",
            Self::Missing { .. }
            | Self::Version { .. }
            | Self::Scratch { .. }
            | Self::Label { .. }
            | Self::Spawn { .. }
            | Self::Start { .. } => "not_started",
        }
    }

    /// Returns whether this machine caused the error before Helm started, so nothing changed on the cluster.
    pub fn is_local(&self) -> bool {
        matches!(
            self,
            Self::Missing { .. }
                | Self::Version { .. }
                | Self::Scratch { .. }
                | Self::Spawn { .. }
                | Self::Start { .. }
        )
    }
}

/// Identity of a file: device, inode, size, and time of the last change of any kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Stamp(u64, u64, u64, i64, i64);

impl Stamp {
    fn of(file: &Path) -> std::io::Result<Self> {
        let about = std::fs::metadata(file)?;
        let (seconds, nanos) = (about.ctime(), about.ctime_nsec());
        Ok(Self(about.dev(), about.ino(), about.size(), seconds, nanos))
    }
}

/// Runs Helm with limited concurrency.
#[derive(Debug)]
pub struct Helm {
    config: HelmConfig,
    host: command::Host,
    scratch: Scratch,
    slots: Slots,
    patience: DriverTimeouts,
    metrics: HelmMetrics,
    /// Identity of the last executable whose version was accepted.
    known: Mutex<Option<Stamp>>,
}

impl Helm {
    /// Checks the helm executable's version and prepares the scratch folder.
    ///
    /// # Errors
    /// Returns an error if Helm cannot run or its version is neither 4.2.4 nor a newer 4.x. Returns an error
    /// if the scratch folder is not writable.
    pub async fn new(mut config: HelmConfig) -> Result<Self, HelmError> {
        let host = command::Host::read();
        let scratch = Scratch::prepare(&config.scratch, &config.private)?;
        config.max_concurrent = config.max_concurrent.max(1);
        config.max_per_member = config.max_per_member.clamp(1, config.max_concurrent);
        let slots = Slots::new(Limits {
            in_all: config.max_concurrent,
            per_member: config.max_per_member,
        });
        let helm = Self {
            config,
            host,
            scratch,
            slots,
            patience: DriverTimeouts::default(),
            metrics: HelmMetrics::default(),
            known: Mutex::new(None),
        };
        helm.check().await?;
        Ok(helm)
    }

    /// Checks that Helm exists and its version fits. Runs `helm version` only if the file has changed.
    async fn check(&self) -> Result<(), HelmError> {
        let binary = &self.config.binary;
        let missing = |source| HelmError::Missing {
            binary: binary.clone(),
            source,
        };
        let stamp = Stamp::of(&self.host.found(binary)).map_err(missing)?;
        let known = |stamps: &Mutex<Option<Stamp>>| {
            *stamps.lock().unwrap_or_else(PoisonError::into_inner) == Some(stamp)
        };
        if known(&self.known) {
            return Ok(());
        }
        let environment = command::environment(&self.host, &self.scratch, None);
        let said = self
            .config
            .processes
            .version(binary, environment)
            .await
            .map_err(missing)?;
        let version = said
            .strip_prefix('v')
            .and_then(|text| Version::parse(text).ok());
        if !version.is_some_and(|found| found.major == OLDEST.major && found >= OLDEST) {
            return Err(HelmError::Version {
                binary: binary.clone(),
                found: said,
            });
        }
        *self.known.lock().unwrap_or_else(PoisonError::into_inner) = Some(stamp);
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
        self.check().await?;
        self.scratch.run(cache_key)?.write_values(values)?;
        Ok(())
    }

    /// Replaces [`DriverTimeouts::default`].
    #[must_use]
    pub fn with_timeouts(mut self, patience: DriverTimeouts) -> Self {
        self.patience = patience;
        self
    }

    /// Records into `metrics`. Call this before the first run.
    #[must_use]
    pub fn with_metrics(mut self, metrics: &HelmMetrics) -> Self {
        self.metrics = metrics.clone();
        let limit = i64::try_from(self.config.max_concurrent).unwrap_or(i64::MAX);
        self.metrics.limit.set(limit);
        self.slots = self.slots.counted(self.metrics.in_flight.clone());
        self
    }

    /// Waits for the right to run Helm for this member. A run's deadline starts after this wait, so a run
    /// that hangs does not shorten the time of the next one.
    pub async fn slot(&self, member: &str, priority: Priority) -> Slot {
        let since = BootTime::now();
        let waits = self.metrics.waits(priority);
        let slot = self.slots.take(member, priority).await;
        drop(waits);
        self.metrics.waited(priority, BootTime::now().since(since));
        slot
    }

    /// Records the outcome of a run in the metrics and in a span.
    async fn counted<T>(
        &self,
        verb: &'static str,
        run: impl Future<Output = Result<T, HelmError>>,
    ) -> Result<T, HelmError> {
        let span = tracing::error_span!("helm", verb, outcome = Empty);
        let since = BootTime::now();
        let result = run.instrument(span.clone()).await;
        let took = BootTime::now().since(since);
        let outcome = self.metrics.ran(verb, took, result.as_ref().err());
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
        let run = self.run_upgrade(slot, upgrade, stop);
        self.counted(upgrade.verb(), run).await
    }

    async fn run_upgrade(
        &self,
        slot: Slot,
        upgrade: &Upgrade,
        stop: &StopSignal,
    ) -> Result<Option<String>, HelmError> {
        self.check().await?;
        let run = self.scratch.run(&upgrade.cache_key)?;
        let values = run.write_values(&upgrade.values)?;
        let arguments = command::upgrade(upgrade, &values)?;
        let secrets = stderr::secrets(&upgrade.values, &upgrade.secret_paths);
        let output = run.path().join("release.json");
        let ending = self
            .run(
                &upgrade.release,
                &run,
                arguments,
                (upgrade.timeout, true),
                Some(&output),
                stop,
            )
            .await;
        drop(slot);
        self.judge(
            if upgrade.again { "install" } else { "upgrade" },
            &upgrade.release,
            ending?,
            &secrets,
            upgrade.timeout,
        )?;
        // Users of the workspace can write to the release Secret. Only this process and Helm can write to
        // this file.
        let read = off_thread::start(move || digest_of_file(&output));
        let read = read.await.map_err(std::io::Error::other).flatten();
        let failed =
            |error: &std::io::Error| tracing::warn!(%error, "failed to read Helm's output");
        Ok(read.inspect_err(failed).ok())
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
        let run = self.run_uninstall(slot, uninstall, stop);
        self.counted("uninstall", run).await
    }

    async fn run_uninstall(
        &self,
        slot: Slot,
        uninstall: &Uninstall,
        stop: &StopSignal,
    ) -> Result<(), HelmError> {
        self.check().await?;
        let run = self.scratch.run(&uninstall.cache_key)?;
        let arguments = command::uninstall(uninstall);
        // On SIGTERM, `helm uninstall` would exit halfway, so a soft stop waits for its end.
        let ending = self
            .run(
                &uninstall.release,
                &run,
                arguments,
                (uninstall.timeout, false),
                None,
                stop,
            )
            .await;
        drop(slot);
        self.judge(
            "uninstall",
            &uninstall.release,
            ending?,
            &[],
            uninstall.timeout,
        )
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
        let run = self.run_rollback(slot, rollback, stop);
        self.counted("rollback", run).await
    }

    async fn run_rollback(
        &self,
        slot: Slot,
        rollback: &Rollback,
        stop: &StopSignal,
    ) -> Result<(), HelmError> {
        self.check().await?;
        let run = self.scratch.run(&rollback.cache_key)?;
        let arguments = command::rollback(rollback);
        let (release, timeout) = (&rollback.release, rollback.timeout);
        // On SIGTERM, `helm rollback` would exit halfway, like `helm uninstall`.
        let ending = self
            .run(release, &run, arguments, (timeout, false), None, stop)
            .await;
        drop(slot);
        let secrets = stderr::secrets(&rollback.values, &rollback.secret_paths);
        self.judge("rollback", release, ending?, &secrets, timeout)
    }

    /// Returns whether Helm can decode a revision whose Secret exists.
    ///
    /// # Errors
    /// Returns an error if Helm could not read the Secret.
    pub async fn can_decode(
        &self,
        slot: Slot,
        look: &Look,
        stop: &StopSignal,
    ) -> Result<bool, HelmError> {
        let run = self.run_look(slot, look, stop);
        self.counted("get", run).await
    }

    async fn run_look(
        &self,
        slot: Slot,
        look: &Look,
        stop: &StopSignal,
    ) -> Result<bool, HelmError> {
        self.check().await?;
        let run = self.scratch.run(&look.cache_key)?;
        let arguments = command::look(look);
        let ending = self
            .run(&look.release, &run, arguments, (LOOK, true), None, stop)
            .await;
        drop(slot);
        match self.judge("get metadata", &look.release, ending?, &[], LOOK) {
            Ok(()) => Ok(true),
            Err(HelmError::Failed { complaint, .. }) if complaint.contains(UNDECODABLE) => {
                Ok(false)
            }
            Err(error) => Err(error),
        }
    }

    async fn run(
        &self,
        release: &str,
        run: &scratch::Run,
        arguments: Vec<OsString>,
        (timeout, asks_to_stop): (Duration, bool),
        output: Option<&Path>,
        stop: &StopSignal,
    ) -> Result<Ending, HelmError> {
        let job = Job {
            processes: self.config.processes.as_ref(),
            command: HelmCommand {
                binary: &self.config.binary,
                arguments,
                environment: command::environment(&self.host, &self.scratch, Some(run)),
                output,
            },
            deadline: self.deadline(timeout),
            patience: self.patience,
            asks_to_stop,
        };
        Box::pin(job.run(stop))
            .await
            .map_err(|source| HelmError::Spawn {
                release: release.to_owned(),
                source,
            })
    }

    fn deadline(&self, timeout: Duration) -> Duration {
        timeout
            .saturating_mul(3)
            .saturating_add(self.patience.beyond_timeout)
    }

    fn judge(
        &self,
        verb: &'static str,
        release: &str,
        ending: Ending,
        secrets: &[String],
        timeout: Duration,
    ) -> Result<(), HelmError> {
        let release = release.to_owned();
        let complaint = |stderr: &[u8]| Complaint::of(stderr, secrets);
        match ending {
            Ending::Well => Ok(()),
            Ending::Stopped => Err(HelmError::Stopped),
            Ending::NotStarted { stderr } => Err(HelmError::Start {
                release,
                complaint: complaint(&stderr).text,
            }),
            Ending::TimedOut { stderr } => Err(HelmError::TimedOut {
                verb,
                release,
                after: self.deadline(timeout),
                complaint: complaint(&stderr).text,
            }),
            Ending::Killed { signal, stderr } => Err(HelmError::Killed {
                verb,
                release,
                signal,
                complaint: complaint(&stderr).text,
            }),
            Ending::Failed { stderr } if stderr::is_out_of_memory(&stderr) => {
                Err(HelmError::OutOfMemory { verb, release })
            }
            Ending::Failed { stderr } => {
                let Complaint {
                    text,
                    permanent,
                    not_found,
                    suspended,
                } = complaint(&stderr);
                if suspended {
                    return Err(HelmError::Suspended { complaint: text });
                }
                if not_found && verb == "uninstall" {
                    return Err(HelmError::ReleaseNotFound { release });
                }
                Err(HelmError::Failed {
                    verb,
                    release,
                    complaint: text,
                    permanent,
                })
            }
        }
    }
}
