//! Selects the home cluster and creates clients for it.

use std::path::PathBuf;
use std::time::Duration;

use k8s_openapi::api::core::v1::Secret;
use krypton_runtime::access::{
    ClusterConfig, ConfigError, InCluster, LocalError, from_kubeconfig, local, new_client,
    read_kubeconfig, redacted,
};
use krypton_runtime::call::{ApiError, call_within};
use krypton_runtime::retry::StartupGrace;
use krypton_types::kubeconfig::{self as sanitizer, Policy};
use kube::config::Kubeconfig;
use kube::{Api, Client, Config};

use crate::args::{HomeChoice, HomeSource};

/// User agent of the hub's requests.
pub(crate) const USER_AGENT: &str = concat!("krypton-hub/", env!("CARGO_PKG_VERSION"));
const SECRET_TIMEOUT: Duration = Duration::from_secs(30);
/// The sanitizer's own limit. Also needed here, because a context is set before the sanitizer reads the
/// text.
const KUBECONFIG_MAX_BYTES: usize = 256 * 1024;

/// Why the home cluster is unavailable. For compatibility, the texts up to the first colon or semicolon
/// must not change. `secret` is the namespace and the name.
#[derive(Debug, thiserror::Error)]
pub enum HomeError {
    #[error("construct client failed for secret fetch")]
    SecretClient(#[source] Box<HomeError>),
    #[error("fetch secret {secret} failed; check that it exists and that the hub may read it")]
    FetchSecret {
        secret: String,
        #[source]
        source: ApiError,
    },
    #[error(
        "secret {secret} missing key {key:?}; put the kubeconfig there or name its key with --watch-kubeconfig-secret-key"
    )]
    MissingKey { secret: String, key: String },
    #[error("parse kubeconfig from secret failed: {secret}")]
    ParseSecret {
        secret: String,
        #[source]
        source: sanitizer::KubeconfigError,
    },
    /// The text cannot take a context. The error omits details, because the text holds credentials.
    #[error("parse kubeconfig from secret failed: {secret}: not a YAML mapping of at most 256 KiB")]
    NotAKubeconfig { secret: String },
    #[error("build rest config from secret failed: {secret}")]
    SecretConfig {
        secret: String,
        #[source]
        source: ConfigError,
    },
    #[error(
        "loading watch kubeconfig failed: {path}; correct it, WATCH_KUBECONFIG or --watch-kubeconfig",
        path = path.display()
    )]
    WatchFile {
        path: PathBuf,
        #[source]
        source: ConfigError,
    },
    #[error(transparent)]
    Local(#[from] LocalError),
    #[error("building a client of the hub's own cluster failed")]
    Client(#[source] kube::Error),
}

impl HomeError {
    /// Whether the error may be temporary: the `apiserver` of the hub's own cluster may not be up yet.
    pub fn is_retryable(&self, apiserver: &StartupGrace) -> bool {
        match self {
            Self::FetchSecret { source, .. } => match source.status() {
                Some(status) if matches!(status.code, 401 | 403) => {
                    apiserver.covers(&status.message)
                }
                Some(status) if status.code < 500 && status.code != 429 => false,
                _ => {
                    apiserver.record_no_response();
                    true
                }
            },
            _ => false,
        }
    }
}

/// Selects the home cluster by precedence: the Secret read with the local configuration, the watch
/// file, the local configuration. Reads the source once, at startup.
pub async fn choose(source: &HomeSource, policy: &Policy) -> Result<ClusterConfig, HomeError> {
    choose_from(source, policy, Config::incluster).await
}

async fn choose_from(
    source: &HomeSource,
    policy: &Policy,
    in_cluster: InCluster,
) -> Result<ClusterConfig, HomeError> {
    let context = source.context.as_deref();
    match &source.choice {
        HomeChoice::Local => Ok(local(&source.local, context, in_cluster).await?),
        HomeChoice::File(path) => {
            let watch_file_error = |source| HomeError::WatchFile {
                path: path.clone(),
                source,
            };
            let kubeconfig = read_kubeconfig(path).map_err(watch_file_error)?;
            let config = from_kubeconfig(kubeconfig, context).await;
            config.map_err(watch_file_error)
        }
        HomeChoice::Secret {
            namespace,
            name,
            key,
        } => {
            let local = local(&source.local, None, in_cluster)
                .await
                .map_err(|source| HomeError::SecretClient(Box::new(source.into())))?;
            let client = client(local.config)
                .map_err(|source| HomeError::SecretClient(Box::new(HomeError::Client(source))))?;
            let secrets: Api<Secret> = Api::namespaced(client, namespace);
            let content = call_within(SECRET_TIMEOUT, "reading it", secrets.get(name)).await;
            let secret = format!("{namespace}/{name}");
            match content {
                Ok(content) => from_secret(&content, (&secret, key), context, policy).await,
                Err(source) => Err(HomeError::FetchSecret { secret, source }),
            }
        }
    }
}

/// Calls [`new_client`] with the hub's user agent.
///
/// Must be called inside a tokio runtime.
pub fn client(config: Config) -> Result<Client, kube::Error> {
    new_client(config, USER_AGENT)
}

/// Builds the configuration of a member from its sanitized kubeconfig.
pub async fn member_config(sanitized_yaml: &str) -> Result<Config, ConfigError> {
    let kubeconfig = Kubeconfig::from_yaml(sanitized_yaml).map_err(redacted)?;
    Ok(from_kubeconfig(kubeconfig, None).await?.config)
}

/// Builds the home cluster from a kubeconfig in a Secret. It is untrusted and passes the sanitizer, like
/// that of a member. But the user who starts the hub selects the home cluster, which may be this machine.
async fn from_secret(
    content: &Secret,
    (secret, key): (&str, &str),
    context: Option<&str>,
    policy: &Policy,
) -> Result<ClusterConfig, HomeError> {
    let secret = secret.to_owned();
    let policy = &Policy {
        allow_loopback: true,
        allow_link_local: true,
        ..*policy
    };
    let data = content.data.as_ref().and_then(|data| data.get(key));
    let data = data.map(|bytes| bytes.0.as_slice());
    let Some(bytes) = data.filter(|bytes| !bytes.is_empty()) else {
        let key = key.to_owned();
        return Err(HomeError::MissingKey { secret, key });
    };
    let parsed = match context {
        None => sanitizer::parse(bytes, policy),
        Some(context) => match with_current_context(bytes, context) {
            Some(bytes) => sanitizer::parse(&bytes, policy),
            None => return Err(HomeError::NotAKubeconfig { secret }),
        },
    };
    let sanitized = match parsed {
        Ok(sanitized) => sanitized,
        Err(source) => return Err(HomeError::ParseSecret { secret, source }),
    };
    let config = match Kubeconfig::from_yaml(&sanitized.yaml).map_err(redacted) {
        Ok(kubeconfig) => from_kubeconfig(kubeconfig, None).await,
        Err(error) => Err(error),
    };
    let mut home = config.map_err(|source| HomeError::SecretConfig { secret, source })?;
    // The sanitizer renames contexts.
    if let Some(context) = context
        .map(str::to_owned)
        .or_else(|| current_context(bytes))
    {
        home.context_name = context;
    }
    Ok(home)
}

fn parse_mapping(bytes: &[u8]) -> Option<serde_json::Map<String, serde_json::Value>> {
    if bytes.len() > KUBECONFIG_MAX_BYTES {
        return None;
    }
    serde_saphyr::from_slice(bytes).ok()
}

fn with_current_context(bytes: &[u8], context: &str) -> Option<Vec<u8>> {
    let mut kubeconfig = parse_mapping(bytes)?;
    kubeconfig.insert("current-context".to_owned(), context.into());
    serde_json::to_vec(&kubeconfig).ok()
}

fn current_context(bytes: &[u8]) -> Option<String> {
    parse_mapping(bytes)?
        .get("current-context")?
        .as_str()
        .map(str::to_owned)
}

#[cfg(test)]
mod tests;
