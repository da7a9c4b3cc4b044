//! One Helm run.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use krypton_helm::releases::Status;
use kube::Client;
use serde_json::{Map, Value};
use tokio_util::sync::CancellationToken;

use crate::api::Api;
use crate::arguments::{CommandLine, Verb};
use crate::chart::Chart;
use crate::fault::{Cause, Fault};
use crate::install::Install;
use crate::release::Release;
use crate::session::Session;
use crate::upgrade::Upgrade;

/// Exit code for a command line that the model doesn't support.
pub const NOT_MODELLED: i32 = 64;
/// Exit code after a SIGTERM that Helm doesn't handle, as a shell reports it.
pub const TERMINATED: i32 = 128 + 15;

/// Command line and environment of Helm, without the program's name.
#[derive(Clone, Debug)]
pub struct Invocation {
    pub arguments: Vec<OsString>,
    pub environment: Vec<(OsString, OsString)>,
}

/// How a run ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Exit {
    pub code: i32,
    pub stdout: Vec<u8>,
    pub stderr: Vec<u8>,
}

/// Returns the path after `--kubeconfig`.
pub fn kubeconfig_of(invocation: &Invocation) -> Option<PathBuf> {
    let mut arguments = invocation.arguments.iter();
    while let Some(argument) = arguments.next() {
        match argument.to_str() {
            Some("--") => return None,
            Some("--kubeconfig") => return arguments.next().map(PathBuf::from),
            Some(text) => {
                if let Some(path) = text.strip_prefix("--kubeconfig=") {
                    return Some(path.into());
                }
            }
            None => {}
        }
    }
    None
}

/// Runs Helm against the cluster of `client`. Dropping the future kills Helm. `terminate` is SIGTERM.
///
/// An unknown command line ends with [`NOT_MODELLED`].
pub async fn run(client: Client, invocation: Invocation, terminate: CancellationToken) -> Exit {
    let line = match CommandLine::parse(&invocation) {
        Ok(line) => line,
        Err(why) => {
            return Exit {
                code: NOT_MODELLED,
                stdout: Vec::new(),
                stderr: format!("Error: the simulated Helm cannot run this: {why}\n").into_bytes(),
            };
        }
    };
    let session = Session {
        api: Api::new(client),
        flags: line.flags,
        release: line.release,
        stdout: Mutex::default(),
        stderr: Mutex::default(),
    };
    let result = Box::pin(session.run(line.verb, line.chart.as_deref(), &terminate)).await;
    let code = match result {
        Ok(()) => 0,
        Err(End::Failed(fault)) => {
            let error = format!("Error: {fault}\n");
            crate::session::append(&session.stderr, &error);
            if fault.cause == Cause::NotModelled {
                NOT_MODELLED
            } else {
                1
            }
        }
        Err(End::Killed) => TERMINATED,
    };
    let take = |output: Mutex<String>| output.into_inner().unwrap_or_else(PoisonError::into_inner);
    Exit {
        code,
        stdout: take(session.stdout).into_bytes(),
        stderr: take(session.stderr).into_bytes(),
    }
}

enum End {
    Failed(Fault),
    /// SIGTERM ended Helm.
    Killed,
}

impl From<Fault> for End {
    fn from(fault: Fault) -> Self {
        Self::Failed(fault)
    }
}

/// Runs a step in which SIGTERM kills Helm.
async fn killable<T>(
    terminate: &CancellationToken,
    step: impl Future<Output = Result<T, Fault>>,
) -> Result<T, End> {
    tokio::select! {
        biased;
        () = terminate.cancelled() => Err(End::Killed),
        result = step => result.map_err(End::Failed),
    }
}

impl Session {
    async fn run(
        &self,
        verb: Verb,
        chart: Option<&Path>,
        terminate: &CancellationToken,
    ) -> Result<(), End> {
        match verb {
            Verb::Uninstall => killable(terminate, Box::pin(self.uninstall())).await,
            Verb::Rollback => killable(terminate, Box::pin(self.rollback())).await,
            Verb::GetMetadata => killable(terminate, self.metadata()).await,
            Verb::Upgrade | Verb::Install => {
                let installs = verb == Verb::Install;
                let replaces = if installs {
                    Some(true)
                } else {
                    killable(terminate, self.replaces()).await?
                };
                let chart = self.load(chart.unwrap_or(Path::new("")))?;
                let work = self.apply(verb, replaces, &chart, terminate);
                let mut work = std::pin::pin!(work);
                let release = tokio::select! {
                    biased;
                    () = terminate.cancelled() => {
                        self.print(&format!("Release {} has been cancelled.\n", self.release));
                        work.await
                    }
                    release = &mut work => release,
                }?;
                let json = serde_json::to_string(&release);
                self.print(&json.map_err(|error| Fault::new(error.to_string()))?);
                self.print("\n");
                Ok(())
            }
        }
    }

    async fn apply(
        &self,
        verb: Verb,
        replaces: Option<bool>,
        chart: &Chart,
        terminate: &CancellationToken,
    ) -> Result<Release, Fault> {
        let session = self;
        if let Some(replace) = replaces {
            let install = Install {
                session,
                chart,
                replace,
            };
            let installed = Box::pin(install.run(terminate)).await;
            // An upgrade that installs adds no prefix.
            return installed.map_err(|fault| match verb {
                Verb::Install => fault.within("INSTALLATION FAILED"),
                _ => fault,
            });
        }
        let upgrade = Upgrade { session, chart };
        let upgraded = Box::pin(upgrade.run(terminate)).await;
        upgraded.map_err(|fault| fault.within("UPGRADE FAILED"))
    }

    /// Returns `None` for an upgrade. An installation replaces an uninstalled release.
    async fn replaces(&self) -> Result<Option<bool>, Fault> {
        self.api.is_reachable().await?;
        let history = match self.store(0).history(&self.release).await {
            Err(fault) if fault.cause == Cause::ReleaseNotFound => return Ok(Some(false)),
            history => history?,
        };
        let last = history.last().map(Release::status);
        Ok((last == Some(Status::Uninstalled)).then_some(true))
    }

    fn load(&self, path: &Path) -> Result<Chart, Fault> {
        let failed = |error: &dyn std::fmt::Display| Fault::new(error.to_string());
        let config = match &self.flags.values {
            Some(values) => {
                let text = std::fs::read(values).map_err(|error| failed(&error))?;
                serde_json::from_slice(&text).map_err(|error| failed(&error))?
            }
            None => Value::Object(Map::new()),
        };
        Chart::load(path, config)
    }

    /// `helm get metadata`.
    async fn metadata(&self) -> Result<(), Fault> {
        self.api.is_reachable().await?;
        let revision = self.flags.revision;
        let release = self.store(0).get(&self.release, revision).await?;
        let chart = |field: &str| {
            let text = release.chart["metadata"][field].as_str();
            text.unwrap_or_default().to_owned()
        };
        self.print(&format!(
            "NAME: {}\nCHART: {}\nVERSION: {}\nAPP_VERSION: {}\nNAMESPACE: {}\nREVISION: {}\nSTATUS: {}\n",
            release.name,
            chart("name"),
            chart("version"),
            chart("appVersion"),
            release.namespace,
            release.version,
            release.info.status,
        ));
        Ok(())
    }
}
