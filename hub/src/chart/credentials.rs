//! Polls the Secret with the credentials of the chart repository. Only the chart cache receives them.

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Secret;
use krypton_helm::chart::{ChartCache, Credentials, CurrentCredentials};
use krypton_runtime::call::{ApiError, call};
use krypton_runtime::newest::Newest as _;
use krypton_runtime::periodic::{NextRun, Periodic, Schedule};
use krypton_types::error_chain::chain;
use kube::Client;
use kube::api::Api;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

const DEADLINE: Duration = Duration::from_secs(10);
/// Jitter keeps two hubs from polling at the same moment.
const SCHEDULE: Schedule = Schedule {
    every: Duration::from_secs(30),
    jitter: 0.2,
    retry_max: Duration::from_secs(30),
};

/// The value before the first read.
pub const NOT_READ: Result<Arc<Credentials>, &str> =
    Err("the Secret of --chart-credentials-secret has not been read yet; retrying");

/// Location of the credentials, and their receiver.
pub(crate) struct ChartCredentials {
    pub client: Client,
    /// The hub's namespace.
    pub namespace: String,
    pub name: String,
    pub charts: Arc<ChartCache>,
}

/// Waits for the first attempt to read the credentials, at most until the deadline.
pub async fn wait_for_first_read(mut now: watch::Receiver<CurrentCredentials>) {
    if tokio::time::timeout(DEADLINE, now.changed()).await.is_err() {
        tracing::warn!("the charts' credentials are not read yet");
    }
}

/// Polls the Secret until `stop`. While it is unreadable or invalid, the last good credentials stay in use.
/// Deleting it removes them.
pub(crate) async fn poll_secret(
    credentials: ChartCredentials,
    tx: watch::Sender<CurrentCredentials>,
    stop: CancellationToken,
) {
    let secret_name = format!("{}/{}", credentials.namespace, credentials.name);
    let mut last_version = None;
    let mut periodic = Periodic::new("reading the charts' credentials", SCHEDULE);
    loop {
        let outcome = credentials.read().await.map(|secret| {
            if apply(&secret_name, secret.as_ref(), &mut last_version, &tx) {
                credentials.charts.forget_failures();
            }
            NextRun::AsScheduled
        });
        let pause = periodic.pause_after(outcome);
        if stop.run_until_cancelled(pause).await.is_none() {
            return;
        }
    }
}

/// Applies what was read. `last_version` is the Secret's resourceVersion at the last read. Returns whether the
/// credentials changed.
fn apply(
    name: &str,
    secret: Option<&Secret>,
    last_version: &mut Option<String>,
    tx: &watch::Sender<CurrentCredentials>,
) -> bool {
    let version = secret.and_then(|secret| secret.metadata.resource_version.clone());
    if version.is_some() && *last_version == version {
        return false;
    }
    *last_version = version;
    let problem = match secret.map(Credentials::from_secret) {
        Some(Ok(credentials)) => {
            tracing::info!(secret = %name, "using the chart credentials");
            tx.send_modify(|now| *now = Ok(Arc::new(credentials)));
            return true;
        }
        Some(Err(error)) => {
            let problem = chain(&error);
            tracing::warn!(secret = %name, %problem, "the charts' credentials cannot be used; the last good ones stay");
            if tx.get().is_ok() {
                return false;
            }
            format!("Secret {name} (--chart-credentials-secret) cannot be used: {problem}")
        }
        None => format!(
            "Secret {name} (--chart-credentials-secret) does not exist; create it, or remove the flag"
        ),
    };
    let problem: Arc<str> = problem.into();
    tx.send_if_modified(|now| {
        let is_reported = matches!(now, Err(previous) if *previous == problem);
        if !is_reported {
            tracing::warn!(%problem, "charts cannot be fetched");
            *now = Err(problem);
        }
        !is_reported
    })
}

impl ChartCredentials {
    async fn read(&self) -> Result<Option<Secret>, ApiError> {
        let api: Api<Secret> = Api::namespaced(self.client.clone(), &self.namespace);
        let attempt = format!("reading Secret {}/{}", self.namespace, self.name);
        call(attempt, api.get_opt(&self.name)).await
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::ByteString;
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

    use super::*;

    fn secret(version: &str, key: &str) -> Secret {
        Secret {
            metadata: ObjectMeta {
                resource_version: Some(version.to_owned()),
                ..ObjectMeta::default()
            },
            data: Some([(key.to_owned(), ByteString(b"hunter2".to_vec()))].into()),
            ..Secret::default()
        }
    }

    #[test]
    fn bad_secret_keeps_credentials_but_deletion_removes_them() {
        // Fails if another test has installed the provider.
        drop(rustls::crypto::aws_lc_rs::default_provider().install_default());
        let (tx, rx) = watch::channel(NOT_READ.map_err(Into::into));
        let mut last_version = None;
        let mut poll =
            |secret: Option<Secret>| apply("ns/name", secret.as_ref(), &mut last_version, &tx);
        let problem = || rx.get().as_ref().map(drop).map_err(ToString::to_string);

        assert!(poll(None));
        assert!(!poll(None), "reported twice");
        assert!(problem().unwrap_err().contains("Secret ns/name"));
        assert!(poll(Some(secret("1", "username"))));
        let error = problem().unwrap_err();
        assert!(error.contains("username without password"), "{error}");
        assert!(!error.contains("hunter2"), "{error}");

        assert!(poll(Some(secret("2", "token"))));
        assert!(problem().is_ok());
        assert!(!poll(Some(secret("2", "token"))), "the same");
        assert!(!poll(Some(secret("3", "password"))), "a bad one");
        assert!(problem().is_ok());
        assert!(poll(Some(secret("4", "token"))));
        assert!(poll(None));
        assert!(problem().is_err());
        assert!(poll(Some(secret("4", "token"))), "it is back");
        assert!(problem().is_ok());
    }
}
