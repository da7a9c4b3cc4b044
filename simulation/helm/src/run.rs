//! One Helm run.

use std::path::Path;

use krypton_helm::releases::Status;
use kube::Client;
use parking_lot::Mutex;
use serde_json::{Map, Value};
use tokio_util::sync::CancellationToken;

use crate::api::Api;
use crate::arguments::{CommandLine, Invocation, Verb};
use crate::chart::Chart;
use crate::fault::{ErrorCause, HelmError};
use crate::install::Install;
use crate::release::Release;
use crate::session::Session;
use crate::upgrade::Upgrade;

/// Exit code for a command line that the model doesn't support.
pub const NOT_MODELLED: i32 = 64;
/// Exit code after a SIGTERM that Helm doesn't handle, as a shell reports it.
pub const TERMINATED: i32 = 128 + 15;

/// How a run ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Exit {
    pub code: i32,
    pub stdout: Vec<u8>,
    pub stderr: Vec<u8>,
}

/// Runs Helm against the cluster of `client`. Dropping the future kills Helm. `terminate` is SIGTERM.
///
/// An unknown command line ends with [`NOT_MODELLED`].
pub async fn run(client: Client, invocation: Invocation, terminate: CancellationToken) -> Exit {
    let line = match CommandLine::parse(&invocation) {
        Ok(line) => line,
        Err(reason) => {
            return Exit {
                code: NOT_MODELLED,
                stdout: Vec::new(),
                stderr: format!("Error: the simulated Helm cannot run this: {reason}\n")
                    .into_bytes(),
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
        Err(RunError::Failed(error)) => {
            let line = format!("Error: {error}\n");
            crate::session::append(&session.stderr, &line);
            if error.cause == ErrorCause::NotModelled {
                NOT_MODELLED
            } else {
                1
            }
        }
        Err(RunError::Terminated) => TERMINATED,
    };
    Exit {
        code,
        stdout: session.stdout.into_inner().into_bytes(),
        stderr: session.stderr.into_inner().into_bytes(),
    }
}

enum RunError {
    Failed(HelmError),
    /// SIGTERM ended Helm.
    Terminated,
}

impl From<HelmError> for RunError {
    fn from(error: HelmError) -> Self {
        Self::Failed(error)
    }
}

/// Runs a step in which SIGTERM kills Helm.
async fn until_terminated<T>(
    terminate: &CancellationToken,
    step: impl Future<Output = Result<T, HelmError>>,
) -> Result<T, RunError> {
    tokio::select! {
        biased;
        () = terminate.cancelled() => Err(RunError::Terminated),
        result = step => result.map_err(RunError::Failed),
    }
}

impl Session {
    async fn run(
        &self,
        verb: Verb,
        chart: Option<&Path>,
        terminate: &CancellationToken,
    ) -> Result<(), RunError> {
        match verb {
            Verb::Uninstall => until_terminated(terminate, Box::pin(self.uninstall())).await,
            Verb::Rollback => until_terminated(terminate, Box::pin(self.rollback())).await,
            Verb::GetMetadata => until_terminated(terminate, self.metadata()).await,
            Verb::Upgrade | Verb::Install => {
                let replace_mode = match verb {
                    Verb::Install => Some(true),
                    _ => until_terminated(terminate, self.find_replace_mode()).await?,
                };
                let chart = self.load_chart(chart.unwrap_or(Path::new("")))?;
                let apply = self.apply(verb, replace_mode, &chart, terminate);
                let mut apply = std::pin::pin!(apply);
                let release = tokio::select! {
                    biased;
                    () = terminate.cancelled() => {
                        self.print(&format!("Release {} has been cancelled.\n", self.release));
                        apply.await
                    }
                    release = &mut apply => release,
                }?;
                let json = serde_json::to_string(&release);
                self.print(&json.map_err(HelmError::from_error)?);
                self.print("\n");
                Ok(())
            }
        }
    }

    async fn apply(
        &self,
        verb: Verb,
        replace_mode: Option<bool>,
        chart: &Chart,
        terminate: &CancellationToken,
    ) -> Result<Release, HelmError> {
        let session = self;
        if let Some(replace) = replace_mode {
            let install = Install {
                session,
                chart,
                replace,
            };
            let installed = Box::pin(install.run(terminate)).await;
            // An upgrade that installs adds no prefix.
            return installed.map_err(|error| match verb {
                Verb::Install => error.context("INSTALLATION FAILED"),
                _ => error,
            });
        }
        let upgrade = Upgrade { session, chart };
        let upgraded = Box::pin(upgrade.run(terminate)).await;
        upgraded.map_err(|error| error.context("UPGRADE FAILED"))
    }

    /// Returns whether an installation may replace an uninstalled release, or `None` for an upgrade.
    async fn find_replace_mode(&self) -> Result<Option<bool>, HelmError> {
        self.api.check_reachable().await?;
        let history = match self.store(0).history(&self.release).await {
            Err(error) if error.cause == ErrorCause::ReleaseNotFound => return Ok(Some(false)),
            history => history?,
        };
        let last = history.last().map(Release::status);
        Ok((last == Some(Status::Uninstalled)).then_some(true))
    }

    fn load_chart(&self, path: &Path) -> Result<Chart, HelmError> {
        let config = match &self.flags.values {
            Some(values) => {
                let text = std::fs::read(values).map_err(HelmError::from_error)?;
                serde_json::from_slice(&text).map_err(HelmError::from_error)?
            }
            None => Value::Object(Map::new()),
        };
        Chart::load(path, config)
    }

    /// `helm get metadata`.
    async fn metadata(&self) -> Result<(), HelmError> {
        self.api.check_reachable().await?;
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
