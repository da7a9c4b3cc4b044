//! The home cluster: which one it is, and how it is reached.

use std::path::{Path, PathBuf};
use std::time::Duration;

use k8s_openapi::api::core::v1::Secret;
use krypton_agent::access::{CONNECT_TIMEOUT, client_named, reason_of};
use krypton_common::kubeconfig::{self as sanitizer, Policy};
use kube::config::{InClusterError, KubeConfigOptions, Kubeconfig, KubeconfigError};
use kube::{Api, Client, Config};

use crate::settings::{HomeChoice, HomeSource, LocalSource};

const SECRET_TIMEOUT: Duration = Duration::from_secs(30);
/// As the sanitizer's own cap, needed here where a context is set before it reads.
const KUBECONFIG_MAX_BYTES: usize = 256 * 1024;
const IN_CLUSTER: &str = "in-cluster";

/// The home cluster.
#[derive(Clone, Debug)]
pub struct Home {
    pub config: Config,
    /// Context of the kubeconfig, or `in-cluster`.
    pub context_name: String,
}

/// Why there is no home cluster. The texts up to the first colon or semicolon are the original's.
#[derive(Debug, thiserror::Error)]
pub enum HomeError {
    #[error("construct client failed for secret fetch")]
    SecretClient(#[source] Box<HomeError>),
    #[error(
        "fetch secret {namespace}/{name} failed: {reason}; check that it exists and that the hub may read it"
    )]
    FetchSecret {
        namespace: String,
        name: String,
        reason: String,
    },
    #[error(
        "fetch secret {namespace}/{name} failed: no answer within 30 s; check that the hub's own cluster is reachable"
    )]
    FetchSecretTimedOut { namespace: String, name: String },
    #[error(
        "secret {namespace}/{name} missing key {key:?}; put the kubeconfig there or name its key with --watch-kubeconfig-secret-key"
    )]
    MissingKey {
        namespace: String,
        name: String,
        key: String,
    },
    #[error("parse kubeconfig from secret failed: {namespace}/{name}")]
    ParseSecret {
        namespace: String,
        name: String,
        #[source]
        source: sanitizer::KubeconfigError,
    },
    /// Where the text cannot even take a context; says no more, as it holds credentials.
    #[error(
        "parse kubeconfig from secret failed: {namespace}/{name}: not a YAML mapping of at most 256 KiB"
    )]
    NotAKubeconfig { namespace: String, name: String },
    #[error("build rest config from secret failed: {namespace}/{name}")]
    SecretConfig {
        namespace: String,
        name: String,
        #[source]
        source: ConfigError,
    },
    #[error(
        "loading watch kubeconfig failed: {path}; correct it, or what WATCH_KUBECONFIG or --watch-kubeconfig says",
        path = path.display()
    )]
    WatchFile {
        path: PathBuf,
        #[source]
        source: ConfigError,
    },
    #[error(
        "loading the kubeconfig {path} failed; correct it, or what --kubeconfig or KUBECONFIG says",
        path = path.display()
    )]
    LocalFile {
        path: PathBuf,
        #[source]
        source: ConfigError,
    },
    #[error(
        "there is no cluster to use: no --kubeconfig, no KUBECONFIG, no .kube/config in HOME, and this is not a pod; name a kubeconfig"
    )]
    NoLocalConfig(#[source] InClusterError),
    #[error("building a client of the hub's own cluster failed")]
    Client(#[source] kube::Error),
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

impl Home {
    /// Chooses home by the precedence of reference 1.2: the Secret read with the local
    /// configuration, the watch file, the local configuration. Read once, at start.
    pub async fn choose(source: &HomeSource, policy: &Policy) -> Result<Self, HomeError> {
        choose_with(source, policy, Config::incluster).await
    }
}

/// Reads the configuration that Kubernetes gives to pods.
type InCluster = fn() -> Result<Config, InClusterError>;

async fn choose_with(
    source: &HomeSource,
    policy: &Policy,
    in_cluster: InCluster,
) -> Result<Home, HomeError> {
    let context = source.context.as_deref();
    match &source.choice {
        HomeChoice::Local => local(&source.local, context, in_cluster).await,
        HomeChoice::File(path) => {
            let read = read_kubeconfig(path).map(|found| (found, context));
            let wrap = |source| HomeError::WatchFile {
                path: path.clone(),
                source,
            };
            let (kubeconfig, context) = read.map_err(wrap)?;
            from_kubeconfig(kubeconfig, context).await.map_err(wrap)
        }
        HomeChoice::Secret {
            namespace,
            name,
            key,
        } => {
            let local = local(&source.local, None, in_cluster)
                .await
                .map_err(|source| HomeError::SecretClient(Box::new(source)))?;
            let client = client(local.config)
                .map_err(|source| HomeError::SecretClient(Box::new(HomeError::Client(source))))?;
            let secrets: Api<Secret> = Api::namespaced(client, namespace);
            let secret = tokio::time::timeout(SECRET_TIMEOUT, secrets.get(name))
                .await
                .map_err(|_| HomeError::FetchSecretTimedOut {
                    namespace: namespace.clone(),
                    name: name.clone(),
                })?
                .map_err(|error| HomeError::FetchSecret {
                    namespace: namespace.clone(),
                    name: name.clone(),
                    reason: reason_of(&error),
                })?;
            from_secret(&secret, (namespace, name, key), context, policy).await
        }
    }
}

/// [`client_named`] under the hub's name.
///
/// Must be called inside a tokio runtime.
pub fn client(config: Config) -> Result<Client, kube::Error> {
    client_named(config, concat!("krypton-hub/", env!("CARGO_PKG_VERSION")))
}

/// The configuration of a member from its sanitized kubeconfig.
pub async fn member_config(sanitized_yaml: &str) -> Result<Config, ConfigError> {
    let kubeconfig = Kubeconfig::from_yaml(sanitized_yaml).map_err(without_content)?;
    Ok(from_kubeconfig(kubeconfig, None).await?.config)
}

async fn local(
    source: &LocalSource,
    context: Option<&str>,
    in_cluster: InCluster,
) -> Result<Home, HomeError> {
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
                    "the watch context is not used: the in-cluster configuration has none"
                );
            }
            return Ok(Home {
                config,
                context_name: IN_CLUSTER.to_owned(),
            });
        }
        Err(error) => error,
    };
    match &source.user_file {
        Some(path) if path.is_file() => from_files(std::slice::from_ref(path), context).await,
        _ => Err(HomeError::NoLocalConfig(not_in_cluster)),
    }
}

/// The files merged as kubectl merges them: of several, those that do not exist are passed over.
async fn from_files(paths: &[PathBuf], context: Option<&str>) -> Result<Home, HomeError> {
    let mut merged: Option<(&Path, Kubeconfig)> = None;
    for path in paths {
        let wrap = |source| HomeError::LocalFile {
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
        return Err(HomeError::LocalFile { path, source });
    };
    from_kubeconfig(kubeconfig, context)
        .await
        .map_err(|source| HomeError::LocalFile {
            path: path.to_owned(),
            source,
        })
}

fn read_kubeconfig(path: &Path) -> Result<Kubeconfig, ConfigError> {
    Kubeconfig::read_from(path).map_err(|error| match error {
        KubeconfigError::ReadConfig(source, _) => ConfigError::Read(source),
        other => without_content(other),
    })
}

/// kube's own text of a YAML error quotes the lines around it.
fn without_content(error: KubeconfigError) -> ConfigError {
    match error {
        KubeconfigError::Parse(error) => ConfigError::Yaml {
            line: error.location().map_or(0, |location| location.line()),
        },
        other => ConfigError::Unusable(other),
    }
}

/// A kubeconfig in a Secret is untrusted: it goes through the sanitizer, as a member's does.
async fn from_secret(
    secret: &Secret,
    (namespace, name, key): (&str, &str, &str),
    context: Option<&str>,
    policy: &Policy,
) -> Result<Home, HomeError> {
    let (namespace, name) = (namespace.to_owned(), name.to_owned());
    let data = secret
        .data
        .as_ref()
        .and_then(|data| data.get(key))
        .map(|bytes| bytes.0.as_slice());
    let Some(bytes) = data.filter(|bytes| !bytes.is_empty()) else {
        return Err(HomeError::MissingKey {
            namespace,
            name,
            key: key.to_owned(),
        });
    };
    let chosen = match context {
        None => sanitizer::parse(bytes, policy),
        Some(context) => match with_current_context(bytes, context) {
            Some(bytes) => sanitizer::parse(&bytes, policy),
            None => return Err(HomeError::NotAKubeconfig { namespace, name }),
        },
    };
    let sanitized = match chosen {
        Ok(sanitized) => sanitized,
        Err(source) => {
            return Err(HomeError::ParseSecret {
                namespace,
                name,
                source,
            });
        }
    };
    let built = match Kubeconfig::from_yaml(&sanitized.yaml).map_err(without_content) {
        Ok(kubeconfig) => from_kubeconfig(kubeconfig, None).await,
        Err(error) => Err(error),
    };
    let mut home = built.map_err(|source| HomeError::SecretConfig {
        namespace,
        name,
        source,
    })?;
    // The sanitizer gives contexts names of its own.
    if let Some(context) = context
        .map(str::to_owned)
        .or_else(|| current_context(bytes))
    {
        home.context_name = context;
    }
    Ok(home)
}

fn mapping(bytes: &[u8]) -> Option<serde_json::Map<String, serde_json::Value>> {
    if bytes.len() > KUBECONFIG_MAX_BYTES {
        return None;
    }
    serde_saphyr::from_slice(bytes).ok()
}

fn with_current_context(bytes: &[u8], context: &str) -> Option<Vec<u8>> {
    let mut kubeconfig = mapping(bytes)?;
    kubeconfig.insert("current-context".to_owned(), context.into());
    serde_json::to_vec(&kubeconfig).ok()
}

fn current_context(bytes: &[u8]) -> Option<String> {
    mapping(bytes)?
        .get("current-context")?
        .as_str()
        .map(str::to_owned)
}

async fn from_kubeconfig(
    kubeconfig: Kubeconfig,
    context: Option<&str>,
) -> Result<Home, ConfigError> {
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
    Ok(Home {
        config,
        context_name,
    })
}

#[cfg(test)]
mod tests;
