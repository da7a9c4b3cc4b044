//! The cluster that a process is told of on its command line, or that it runs on.

use std::path::{Path, PathBuf};

use kube::Config;
use kube::config::{InClusterError, KubeConfigOptions, Kubeconfig, KubeconfigError};
use thiserror::Error;

use super::CONNECT_TIMEOUT;

const IN_CLUSTER: &str = "in-cluster";

const SERVICE_ACCOUNT_NAMESPACE_FILE: &str =
    "/var/run/secrets/kubernetes.io/serviceaccount/namespace";

/// The namespace of the pod's service account; `None` outside of a pod.
pub fn service_account_namespace() -> Option<String> {
    std::fs::read_to_string(SERVICE_ACCOUNT_NAMESPACE_FILE).ok()
}

/// Where the configuration of a process' own cluster is looked for, in this order; in-cluster comes
/// between `kubeconfig_variable` and `user_file`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LocalSource {
    pub flag: Option<PathBuf>,
    pub kubeconfig_variable: Vec<PathBuf>,
    pub user_file: Option<PathBuf>,
}

/// A cluster that was found.
#[derive(Clone, Debug)]
pub struct Found {
    pub config: Config,
    /// Context of the kubeconfig, or `in-cluster`.
    pub context_name: String,
}

/// Why there is none. The texts are the original operator's where it had one.
#[derive(Debug, Error)]
pub enum LocalError {
    #[error(
        "loading the kubeconfig {path} failed; correct it, or what --kubeconfig or KUBECONFIG says",
        path = path.display()
    )]
    File {
        path: PathBuf,
        #[source]
        source: ConfigError,
    },
    #[error(
        "there is no cluster to use: no --kubeconfig, no KUBECONFIG, no .kube/config in HOME, and this is not a pod; name a kubeconfig"
    )]
    Nowhere(#[source] InClusterError),
}

/// Why a kubeconfig makes no configuration.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    #[error("reading it failed")]
    Read(#[source] std::io::Error),
    /// With the place, without the text around it: that may be a credential.
    #[error("it is not a kubeconfig in YAML (line {line})")]
    Yaml { line: u64 },
    #[error("its context {0:?} does not exist; its contexts are: {1}")]
    NoContext(String, String),
    #[error("it has no current-context; set it, or name a context by flag")]
    NoCurrentContext,
    /// Without the URL: it may hold a password.
    #[error("its cluster has a proxy-url, which is not supported; remove it")]
    Proxy,
    #[error("it cannot be used")]
    Unusable(#[source] KubeconfigError),
}

/// Reads the configuration that Kubernetes gives to pods.
pub type InCluster = fn() -> Result<Config, InClusterError>;

/// The first of the places that has one; `in_cluster` is [`Config::incluster`].
pub async fn local(
    source: &LocalSource,
    context: Option<&str>,
    in_cluster: InCluster,
) -> Result<Found, LocalError> {
    let paths = match &source.flag {
        Some(path) => vec![path.clone()],
        None => source.kubeconfig_variable.clone(),
    };
    if !paths.is_empty() {
        return from_files(&paths, context).await;
    }
    let not_in_cluster = match in_cluster() {
        Ok(config) => {
            if let Some(context) = context {
                tracing::warn!(
                    context,
                    "the context is not used: the in-cluster configuration has none"
                );
            }
            return Ok(Found {
                config,
                context_name: IN_CLUSTER.to_owned(),
            });
        }
        Err(error) => error,
    };
    match &source.user_file {
        Some(path) if path.is_file() => from_files(std::slice::from_ref(path), context).await,
        _ => Err(LocalError::Nowhere(not_in_cluster)),
    }
}

/// The files merged as kubectl merges them: of several, those that do not exist are passed over.
async fn from_files(paths: &[PathBuf], context: Option<&str>) -> Result<Found, LocalError> {
    let mut merged: Option<(&Path, Kubeconfig)> = None;
    for path in paths {
        let wrap = |source| LocalError::File {
            path: path.clone(),
            source,
        };
        let next = match read_kubeconfig(path) {
            Err(ConfigError::Read(error))
                if error.kind() == std::io::ErrorKind::NotFound && paths.len() > 1 =>
            {
                continue;
            }
            read => read.map_err(wrap)?,
        };
        merged = Some(match merged {
            None => (path, next),
            Some((first, so_far)) => {
                let both = so_far
                    .merge(next)
                    .map_err(|error| wrap(ConfigError::Unusable(error)))?;
                (first, both)
            }
        });
    }
    let Some((path, kubeconfig)) = merged else {
        let path = paths.first().cloned().unwrap_or_default();
        let source = ConfigError::Read(std::io::ErrorKind::NotFound.into());
        return Err(LocalError::File { path, source });
    };
    from_kubeconfig(kubeconfig, context)
        .await
        .map_err(|source| LocalError::File {
            path: path.to_owned(),
            source,
        })
}

/// From one file.
pub fn read_kubeconfig(path: &Path) -> Result<Kubeconfig, ConfigError> {
    Kubeconfig::read_from(path).map_err(|error| match error {
        KubeconfigError::ReadConfig(source, _) => ConfigError::Read(source),
        other => without_content(other),
    })
}

/// kube's own text of a YAML error quotes the lines around it.
pub fn without_content(error: KubeconfigError) -> ConfigError {
    match error {
        KubeconfigError::Parse(error) => ConfigError::Yaml {
            line: error.location().map_or(0, |location| location.line()),
        },
        other => ConfigError::Unusable(other),
    }
}

/// The cluster of one context of a kubeconfig, its current one without `context`.
pub async fn from_kubeconfig(
    kubeconfig: Kubeconfig,
    context: Option<&str>,
) -> Result<Found, ConfigError> {
    let context_name = match (context, &kubeconfig.current_context) {
        (Some(context), _) => context.to_owned(),
        (None, Some(current)) if !current.is_empty() => current.clone(),
        _ => return Err(ConfigError::NoCurrentContext),
    };
    let Some(named) = kubeconfig
        .contexts
        .iter()
        .find(|named| named.name == context_name)
    else {
        let names: Vec<&str> = kubeconfig
            .contexts
            .iter()
            .map(|named| named.name.as_str())
            .collect();
        return Err(ConfigError::NoContext(context_name, names.join(", ")));
    };
    let cluster = named
        .context
        .as_ref()
        .map(|context| context.cluster.clone());
    let own_proxy = kubeconfig
        .clusters
        .iter()
        .find(|named| Some(&named.name) == cluster.as_ref())
        .and_then(|named| named.cluster.as_ref()?.proxy_url.clone())
        .filter(|proxy| !proxy.is_empty());
    if own_proxy.is_some() {
        return Err(ConfigError::Proxy);
    }
    let options = KubeConfigOptions {
        context: Some(context_name.clone()),
        ..Default::default()
    };
    let mut config = Config::from_custom_kubeconfig(kubeconfig, &options)
        .await
        .map_err(ConfigError::Unusable)?;
    // Here only HTTPS_PROXY can have set it. It is meant for chart repositories: kube would refuse
    // to start with it, and does not know NO_PROXY without its proxy support.
    config.proxy_url = None;
    config.connect_timeout = Some(CONNECT_TIMEOUT);
    config.read_timeout = None;
    Ok(Found {
        config,
        context_name,
    })
}
