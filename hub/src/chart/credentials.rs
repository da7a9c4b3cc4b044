//! Polls the Secret with the credentials of the chart repository. Only the chart cache receives them.

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Secret;
use krypton_helm::chart::{ChartCache, Credentials, CredentialsError, CredentialsNow};
use krypton_runtime::call::{ApiError, call};
use krypton_runtime::newest::Newest as _;
use krypton_runtime::periodic::{Next, Periodic, Schedule};
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
pub struct ChartCredentials {
    pub client: Client,
    /// The hub's namespace.
    pub namespace: String,
    pub name: String,
    pub charts: Arc<ChartCache>,
}

impl std::fmt::Debug for ChartCredentials {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ChartCredentials").finish_non_exhaustive()
    }
}

/// Waits for the first attempt to read the credentials, at most until the deadline.
pub async fn first(mut now: watch::Receiver<CredentialsNow>) {
    if tokio::time::timeout(DEADLINE, now.changed()).await.is_err() {
        tracing::warn!("the charts' credentials are not read yet");
    }
}

/// The result of reading the Secret.
#[derive(Debug)]
enum Meaning {
    Same,
    New(Arc<Credentials>),
    /// The Secret exists but is unusable.
    Bad(CredentialsError),
    Gone,
}

/// Compares the Secret with the last read. `seen` is its resourceVersion at that time.
fn meaning(secret: Option<&Secret>, seen: &mut Option<String>) -> Meaning {
    let Some(secret) = secret else {
        *seen = None;
        return Meaning::Gone;
    };
    let version = secret.metadata.resource_version.clone();
    if version.is_some() && *seen == version {
        return Meaning::Same;
    }
    *seen = version;
    match Credentials::from_secret(secret) {
        Ok(read) => Meaning::New(Arc::new(read)),
        Err(error) => Meaning::Bad(error),
    }
}

/// Polls the Secret until `stop`. While it is unreadable or invalid, the last good credentials stay in use.
/// Deleting it removes them.
pub async fn keep(
    of: ChartCredentials,
    tx: watch::Sender<CredentialsNow>,
    stop: CancellationToken,
) {
    let secret = format!("{}/{}", of.namespace, of.name);
    let mut seen = None;
    let mut pace = Periodic::new("reading the charts' credentials", SCHEDULE);
    loop {
        let done = of.read().await.map(|found| {
            let meaning = meaning(found.as_ref(), &mut seen);
            if follow(&secret, meaning, &tx) {
                of.charts.forget_failures();
            }
            Next::AsScheduled
        });
        if stop.run_until_cancelled(pace.rest(done)).await.is_none() {
            return;
        }
    }
}

/// Applies the result. Returns whether the credentials changed.
fn follow(secret: &str, meaning: Meaning, tx: &watch::Sender<CredentialsNow>) -> bool {
    let problem = match meaning {
        Meaning::Same => return false,
        Meaning::New(read) => {
            tracing::info!(%secret, "using the chart credentials");
            tx.send_modify(|now| *now = Ok(read));
            return true;
        }
        Meaning::Bad(error) => {
            let problem = chain(&error);
            tracing::warn!(%secret, %problem, "the charts' credentials cannot be used; the last good ones stay");
            if tx.get().is_ok() {
                return false;
            }
            format!("Secret {secret} (--chart-credentials-secret) cannot be used: {problem}")
        }
        Meaning::Gone => format!(
            "Secret {secret} (--chart-credentials-secret) does not exist; create it, or remove the flag"
        ),
    };
    let problem: Arc<str> = problem.into();
    tx.send_if_modified(|now| {
        let told = matches!(now, Err(before) if *before == problem);
        if !told {
            tracing::warn!(%problem, "charts cannot be fetched");
            *now = Err(problem);
        }
        !told
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
        let mut seen = None;
        let mut look = |secret: Option<Secret>| {
            let meaning = meaning(secret.as_ref(), &mut seen);
            follow("ns/name", meaning, &tx)
        };
        let problem = || rx.get().as_ref().map(drop).map_err(ToString::to_string);

        assert!(look(None));
        assert!(!look(None), "told once");
        assert!(problem().unwrap_err().contains("Secret ns/name"));
        assert!(look(Some(secret("1", "username"))));
        let said = problem().unwrap_err();
        assert!(said.contains("username without password"), "{said}");
        assert!(!said.contains("hunter2"), "{said}");

        assert!(look(Some(secret("2", "token"))));
        assert!(problem().is_ok());
        assert!(!look(Some(secret("2", "token"))), "the same");
        assert!(!look(Some(secret("3", "password"))), "a bad one");
        assert!(problem().is_ok());
        assert!(look(Some(secret("4", "token"))));
        assert!(look(None));
        assert!(problem().is_err());
        assert!(look(Some(secret("4", "token"))), "it is back");
        assert!(problem().is_ok());
    }
}
