//! The helm driver. Nothing else knows that helm is a process.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fmt;
use std::fs::File;
use std::io::{BufReader, Read as _};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use krypton_runtime::clock::BootTime;
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
pub use stop::{Order, Orders};
pub use stop::{StopHandle, StopSignal};
pub use supervisor::supervise;

use crate::slots::{Limits, Slots};
use process::{Ending, Job};
use scratch::Scratch;
use stderr::Complaint;
use supervisor::MEMORY_MAX;

/// `helm get` asks for one Secret.
const LOOK: Duration = Duration::from_secs(10);
/// What helm says of a Secret that is there and holds no release.
const UNDECODABLE: &str = "failed to decode data";
/// Older ones have holes, or miss flags that are used here.
const OLDEST: Version = Version::new(4, 2, 4);

/// What the driver needs of the world.
#[derive(Clone, Debug)]
pub struct HelmConfig {
    /// The helm executable; a bare name is looked up in PATH.
    pub binary: PathBuf,
    /// Runs [`supervise`] with the arguments that follow: for instance `[current_exe, "helm-run"]`.
    pub supervisor: Vec<OsString>,
    /// A folder of this driver alone for helm's caches; it is created.
    pub scratch: PathBuf,
    /// The same for values and helm's temporary files; what an earlier process left is removed.
    pub private: PathBuf,
    /// How many helm processes may live at once; at least 1.
    pub max_concurrent: usize,
    /// How many of them may be of one member; at least 1.
    pub max_per_member: usize,
}

/// How long a run is waited for, beyond its own time-out.
#[derive(Clone, Copy, Debug)]
pub struct DriverTimeouts {
    /// Added to three times the time-out, which helm takes for each of its phases anew.
    pub beyond_timeout: Duration,
    /// From SIGTERM to SIGKILL, when a run is over its deadline.
    pub after_deadline: Duration,
    /// From SIGTERM to SIGKILL, when a run is to stop softly.
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

/// `helm upgrade --install`, or `helm install --replace`.
#[derive(Clone)]
pub struct Upgrade {
    pub kubeconfig: PathBuf,
    pub release: String,
    pub namespace: String,
    /// A local `.tgz`.
    pub chart: PathBuf,
    pub values: Map<String, Value>,
    /// JSON pointers to what is secret in them, whatever its name.
    pub secret_paths: Vec<String>,
    /// Put on the release Secret.
    pub labels: BTreeMap<String, String>,
    /// For each phase of helm; whole seconds.
    pub timeout: Duration,
    /// Server-side apply, with conflicts forced; else as Helm 3 did.
    pub server_side: bool,
    /// The CRDs in the chart's folder `crds` are left out.
    pub skip_crds: bool,
    /// Revisions kept of the release; repeating an installation takes none away.
    pub history_max: u8,
    pub description: String,
    /// Repeats an installation that failed: its hooks run again, and what it has made is taken over.
    pub again: bool,
    /// Whose discovery cache is used: the member's name.
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
    /// For metrics: helm itself does not tell a first installation from an upgrade.
    fn verb(&self) -> &'static str {
        let run = self.labels.get(RUN_LABEL);
        match (self.again, run) {
            (true, _) => "repeat",
            (false, Some(run)) if run.starts_with(INSTALL_RUN) => "install",
            (false, _) => "upgrade",
        }
    }
}

/// `helm uninstall`.
#[derive(Clone, Debug)]
pub struct Uninstall {
    pub kubeconfig: PathBuf,
    pub release: String,
    pub namespace: String,
    /// For each phase of helm; whole seconds.
    pub timeout: Duration,
    /// Whether the stored hooks run.
    pub hooks: bool,
    /// Whose discovery cache is used: the member's name.
    pub cache_key: String,
}

/// `helm rollback`.
#[derive(Clone, Debug)]
pub struct Rollback {
    pub kubeconfig: PathBuf,
    pub release: String,
    pub namespace: String,
    /// The revision that is to run again.
    pub to: u32,
    /// For each phase of helm; whole seconds.
    pub timeout: Duration,
    /// As for [`Upgrade`]: as the newest revision was applied.
    pub server_side: bool,
    /// Revisions kept of the release.
    pub history_max: u8,
    /// Of the revision that is given up: no secret of them is in what helm says.
    pub values: Map<String, Value>,
    /// JSON pointers to what is secret in them, whatever its name.
    pub secret_paths: Vec<String>,
    /// Whose discovery cache is used: the member's name.
    pub cache_key: String,
}

/// `helm get metadata`.
#[derive(Clone, Debug)]
pub struct Look {
    pub kubeconfig: PathBuf,
    pub release: String,
    pub namespace: String,
    pub revision: u32,
    /// Whose discovery cache is used: the member's name.
    pub cache_key: String,
}

/// Why helm did not do what it was asked to.
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
        "{} says its version is {found:?}; install Helm {OLDEST} or newer of major version 4",
        .binary.display()
    )]
    Version { binary: PathBuf, found: String },
    #[error("no supervisor was named to run helm under")]
    NoSupervisor,
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
         give Krypton more or run fewer at once (--max-concurrent-helm){}",
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
    #[error("the cluster takes no writes for now: {complaint}")]
    Suspended { complaint: String },
    #[error("helm {verb} of release {release} failed{}", clause(.complaint))]
    Failed {
        verb: &'static str,
        release: String,
        complaint: String,
        permanent: bool,
    },
}

/// Whether an answer says that the cluster takes no writes for now, as its owner wishes it.
pub fn is_suspended(answer: &str) -> bool {
    stderr::is_suspended(answer)
}

/// What a program of Kubernetes' kind wrote to standard error last, cut short for people and without what
/// looks like a secret.
pub fn last_words(stderr: &[u8]) -> String {
    Complaint::of(stderr, &[]).text
}

/// A release with its chart is below 10 MiB; Helm cannot store a larger one.
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
    /// Whether the same run would fail the same way: only a change of chart, values, cluster or
    /// permissions helps.
    pub fn is_permanent(&self) -> bool {
        match self {
            Self::Failed { permanent, .. } => *permanent,
            Self::Label { .. } => true,
            _ => false,
        }
    }

    /// For metrics.
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
            | Self::NoSupervisor
            | Self::Scratch { .. }
            | Self::Label { .. }
            | Self::Spawn { .. }
            | Self::Start { .. } => "not_started",
        }
    }

    /// Whether it is this machine's fault, and helm has not begun: nothing has changed on the cluster.
    pub fn is_local(&self) -> bool {
        matches!(
            self,
            Self::Missing { .. }
                | Self::Version { .. }
                | Self::NoSupervisor
                | Self::Scratch { .. }
                | Self::Spawn { .. }
                | Self::Start { .. }
        )
    }
}

/// By which a file is known to be the same: device, number, size, and when it was last changed in any way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Stamp(u64, u64, u64, i64, i64);

impl Stamp {
    fn of(file: &Path) -> std::io::Result<Self> {
        let about = std::fs::metadata(file)?;
        let (seconds, nanos) = (about.ctime(), about.ctime_nsec());
        Ok(Self(about.dev(), about.ino(), about.size(), seconds, nanos))
    }
}

/// Runs helm, at most so many times at once.
#[derive(Debug)]
pub struct Helm {
    config: HelmConfig,
    host: command::Host,
    scratch: Scratch,
    slots: Slots,
    patience: DriverTimeouts,
    metrics: HelmMetrics,
    /// The executable whose version is known to fit.
    known: Mutex<Option<Stamp>>,
}

impl Helm {
    /// Checks the helm executable's version and prepares the scratch folder.
    ///
    /// # Errors
    /// When helm cannot be run or is of another version than 4.2.4 or newer of major version 4, and
    /// when the scratch folder cannot be written to.
    pub async fn new(mut config: HelmConfig) -> Result<Self, HelmError> {
        if config.supervisor.is_empty() {
            return Err(HelmError::NoSupervisor);
        }
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

    /// That helm is there and its version fits. Asked anew only when the file is another than before.
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
        let said = krypton_runtime::effect!("helm.version", process::version(binary, environment))
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

    /// Who runs helm now, and who waits.
    pub fn load(&self) -> Load {
        self.slots.load()
    }

    /// How many may run at once for one member, at least 1.
    pub fn max_per_member(&self) -> usize {
        self.config.max_per_member
    }

    /// That a run could begin now: helm is there, and its files find room.
    ///
    /// # Errors
    /// Such that [`HelmError::is_local`].
    pub async fn ready(
        &self,
        cache_key: &str,
        values: &Map<String, Value>,
    ) -> Result<(), HelmError> {
        self.check().await?;
        self.scratch.run(cache_key)?.write_values(values)?;
        Ok(())
    }

    /// Replaces the times of [`DriverTimeouts::default`].
    #[must_use]
    pub fn with_timeouts(mut self, patience: DriverTimeouts) -> Self {
        self.patience = patience;
        self
    }

    /// Counts with `metrics`. To be said before the first run.
    #[must_use]
    pub fn with_metrics(mut self, metrics: &HelmMetrics) -> Self {
        self.metrics = metrics.clone();
        let limit = i64::try_from(self.config.max_concurrent).unwrap_or(i64::MAX);
        self.metrics.limit.set(limit);
        self.slots = self.slots.counted(self.metrics.in_flight.clone());
        self
    }

    /// Waits for the right to run helm for this member. A run's deadline starts after that, so one that
    /// hangs takes nothing from another's time.
    pub async fn slot(&self, member: &str, urgency: Priority) -> Slot {
        let since = BootTime::now();
        let waits = self.metrics.waits(urgency);
        let slot = self.slots.take(member, urgency).await;
        drop(waits);
        self.metrics.waited(urgency, BootTime::now().since(since));
        slot
    }

    /// Counts and traces what comes of a run.
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

    /// Installs or upgrades. `Ok` says that helm ended well; the release Secret is the truth. Returns the digest
    /// of the release that Helm made, or `None` if Helm did not print one.
    ///
    /// # Errors
    /// See [`HelmError`]; [`HelmError::Stopped`] when `stop` ended it or did not let it start.
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
        // The workspace's own users can write to the release Secret; nobody else can write to this file.
        let read = tokio::task::spawn_blocking(move || digest_of_file(&output));
        let read = read.await.map_err(std::io::Error::other).flatten();
        let failed =
            |error: &std::io::Error| tracing::warn!(%error, "failed to read Helm's output");
        Ok(read.inspect_err(failed).ok())
    }

    /// Uninstalls, hooks included.
    ///
    /// # Errors
    /// See [`HelmError`]; [`HelmError::ReleaseNotFound`] only when helm has looked and found none.
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
        // Helm's uninstall has no answer to SIGTERM but to die halfway, so it is left to end.
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

    /// Puts a revision back, hooks included. `Ok` says that helm ended well; the release Secret is the truth.
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
        // As uninstall, it would die halfway of SIGTERM.
        let ending = self
            .run(release, &run, arguments, (timeout, false), None, stop)
            .await;
        drop(slot);
        let secrets = stderr::secrets(&rollback.values, &rollback.secret_paths);
        self.judge("rollback", release, ending?, &secrets, timeout)
    }

    /// Whether helm can decode a revision whose Secret is there.
    ///
    /// # Errors
    /// When it has not been able to look.
    pub async fn can_decode(
        &self,
        slot: Slot,
        look: &Look,
        stop: &StopSignal,
    ) -> Result<bool, HelmError> {
        let run = self.run_look(slot, look, stop);
        self.counted("look", run).await
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
            supervisor: &self.config.supervisor,
            binary: &self.config.binary,
            arguments,
            environment: command::environment(&self.host, &self.scratch, Some(run)),
            deadline: self.deadline(timeout),
            patience: self.patience,
            asks_to_stop,
            output,
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

#[cfg(feature = "failpoints")]
impl krypton_runtime::failpoint::Injected for HelmError {
    fn refused(point: String) -> Self {
        Self::Start {
            release: String::new(),
            complaint: format!("failpoint {point}"),
        }
    }

    fn lost(point: String) -> Self {
        Self::Killed {
            verb: "run",
            release: String::new(),
            signal: rustix::process::Signal::KILL.as_raw(),
            complaint: format!("failpoint {point}"),
        }
    }
}
