//! Finds the local cluster: from the command line, the environment, or the pod of this process.

use std::path::{Path, PathBuf};

use kube::Config;
use kube::config::{
    Cluster, Context, ExecAuthCluster, InClusterError, Kubeconfig, KubeconfigError,
};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject as _;
use thiserror::Error;

use super::transport::CONNECT_TIMEOUT;
use crate::dial::https_proxy_of;

const IN_CLUSTER: &str = "in-cluster";

const SERVICE_ACCOUNT_NAMESPACE_FILE: &str =
    "/var/run/secrets/kubernetes.io/serviceaccount/namespace";

/// Returns the namespace of the pod's service account, or `None` outside a pod.
pub fn service_account_namespace() -> Option<String> {
    std::fs::read_to_string(SERVICE_ACCOUNT_NAMESPACE_FILE).ok()
}

/// Sources of the local cluster's configuration, in order of priority. In-cluster configuration comes between
/// `kubeconfig_variable` and `user_file`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LocalSource {
    pub flag: Option<PathBuf>,
    pub kubeconfig_variable: Vec<PathBuf>,
    pub user_file: Option<PathBuf>,
}

/// The configuration of a cluster.
#[derive(Clone, Debug)]
pub struct ClusterConfig {
    pub config: Config,
    /// Context of the kubeconfig, or `in-cluster`.
    pub context_name: String,
}

/// Why no configuration was found. Texts of krypton-operator are unchanged.
#[derive(Debug, Error)]
pub enum LocalError {
    #[error(
        "loading the kubeconfig {path} failed; correct it, --kubeconfig or KUBECONFIG",
        path = path.display()
    )]
    File {
        path: PathBuf,
        #[source]
        source: ConfigError,
    },
    #[error(
        "no cluster found: no --kubeconfig, no KUBECONFIG, no .kube/config in HOME, and this is not a pod; set --kubeconfig"
    )]
    NotFound(#[source] InClusterError),
    /// Omits the value, because it may contain a password.
    #[error(
        "the value of HTTPS_PROXY is not supported; write it as http://HOST:PORT or socks5://HOST:PORT, or add the host of the API server to NO_PROXY"
    )]
    EnvironmentProxy,
}

/// Why a kubeconfig is not usable.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    #[error("reading it failed")]
    Read(#[source] std::io::Error),
    /// Contains the line number without the text, which may be a credential.
    #[error("it is not a kubeconfig in YAML (line {line})")]
    Yaml { line: u64 },
    #[error("its context {0:?} does not exist; its contexts are: {1}")]
    NoContext(String, String),
    #[error("it has no current-context; set it, or name a context by flag")]
    NoCurrentContext,
    /// Omits the URL, because it may contain a password.
    #[error(
        "its cluster has a proxy-url that is not supported; write it as http://HOST:PORT or socks5://HOST:PORT"
    )]
    Proxy,
    #[error("its certificate authority holds no PEM certificate, or one that is damaged")]
    Authority,
    #[error("it cannot be used")]
    Unusable(#[source] KubeconfigError),
}

/// Reads the in-cluster configuration.
pub type InCluster = fn() -> Result<Config, InClusterError>;

/// Returns the configuration from the first source that has one. `in_cluster` is [`Config::incluster`].
pub async fn local(
    source: &LocalSource,
    context: Option<&str>,
    in_cluster: InCluster,
) -> Result<ClusterConfig, LocalError> {
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
                    "ignoring the context; the in-cluster configuration has none"
                );
            }
            return Ok(ClusterConfig {
                config,
                context_name: IN_CLUSTER.to_owned(),
            });
        }
        Err(error) => error,
    };
    match &source.user_file {
        Some(path) if path.is_file() => from_files(std::slice::from_ref(path), context).await,
        _ => Err(LocalError::NotFound(not_in_cluster)),
    }
}

/// Merges the files as kubectl does: skips missing files if there are several.
async fn from_files(paths: &[PathBuf], context: Option<&str>) -> Result<ClusterConfig, LocalError> {
    let in_file = |path: &Path, source| LocalError::File {
        path: path.to_owned(),
        source,
    };
    let mut merged: Option<(&Path, Kubeconfig)> = None;
    for path in paths {
        let kubeconfig = match read_kubeconfig(path) {
            Err(ConfigError::Read(error))
                if error.kind() == std::io::ErrorKind::NotFound && paths.len() > 1 =>
            {
                continue;
            }
            result => result.map_err(|error| in_file(path, error))?,
        };
        merged = Some(match merged {
            None => (path, kubeconfig),
            Some((first, earlier)) => {
                let result = earlier.merge(kubeconfig).map_err(ConfigError::Unusable);
                (first, result.map_err(|error| in_file(path, error))?)
            }
        });
    }
    let Some((path, kubeconfig)) = merged else {
        let path = paths.first().cloned().unwrap_or_default();
        let missing = ConfigError::Read(std::io::ErrorKind::NotFound.into());
        return Err(in_file(&path, missing));
    };
    let result = from_kubeconfig(kubeconfig, context).await;
    result.map_err(|error| in_file(path, error))
}

/// Reads a kubeconfig from one file.
pub fn read_kubeconfig(path: &Path) -> Result<Kubeconfig, ConfigError> {
    Kubeconfig::read_from(path).map_err(|error| match error {
        KubeconfigError::ReadConfig(source, _) => ConfigError::Read(source),
        other => redacted(other),
    })
}

/// Converts an error. kube's own text of a YAML error quotes the surrounding lines.
pub fn redacted(error: KubeconfigError) -> ConfigError {
    match error {
        KubeconfigError::Parse(error) => ConfigError::Yaml {
            line: error.location().map_or(0, |location| location.line()),
        },
        other => ConfigError::Unusable(other),
    }
}

/// Returns the cluster of a context of the kubeconfig, by default the current one.
pub async fn from_kubeconfig(
    kubeconfig: Kubeconfig,
    context: Option<&str>,
) -> Result<ClusterConfig, ConfigError> {
    let context_name = match (context, &kubeconfig.current_context) {
        (Some(context), _) => context.to_owned(),
        (None, Some(current)) if !current.is_empty() => current.clone(),
        _ => return Err(ConfigError::NoCurrentContext),
    };
    let contexts = &kubeconfig.contexts;
    let Some(named) = contexts.iter().find(|named| named.name == context_name) else {
        let names: Vec<&str> = contexts.iter().map(|named| named.name.as_str()).collect();
        return Err(ConfigError::NoContext(context_name, names.join(", ")));
    };
    let unusable = |error| Err(ConfigError::Unusable(error));
    let Some(context) = &named.context else {
        return unusable(KubeconfigError::LoadContext(context_name));
    };
    let mut clusters = kubeconfig.clusters.iter();
    let cluster = clusters.find(|named| named.name == context.cluster);
    let Some(cluster) = cluster.and_then(|named| named.cluster.as_ref()) else {
        let cluster = context.cluster.clone();
        return unusable(KubeconfigError::LoadClusterOfContext(cluster));
    };
    let config = build_config(&kubeconfig, context, cluster)?;
    Ok(ClusterConfig {
        config,
        context_name,
    })
}

/// Builds the configuration as kube does, but ignores the environment. The kube crate also applies HTTPS_PROXY, and
/// fails on an invalid NO_PROXY. Hub and agent use HTTPS_PROXY only for chart repositories and their own connection. A
/// user's program adds [`environment_proxy`].
fn build_config(
    kubeconfig: &Kubeconfig,
    context: &Context,
    cluster: &Cluster,
) -> Result<Config, ConfigError> {
    let server = cluster.server.as_deref();
    let server = server.ok_or(ConfigError::Unusable(KubeconfigError::MissingClusterUrl))?;
    let url = server
        .parse()
        .map_err(|error| ConfigError::Unusable(KubeconfigError::ParseClusterUrl(error)))?;
    // The conversion reads the file of the certificate authority, if any.
    let exec_cluster = ExecAuthCluster::try_from(cluster).map_err(ConfigError::Unusable)?;
    let mut config = Config::new(url);
    config.root_cert = match &exec_cluster.certificate_authority_data {
        None => None,
        Some(pem) => Some(certificates(pem)?),
    };
    config.accept_invalid_certs = cluster.insecure_skip_tls_verify.unwrap_or(false);
    config.disable_compression = cluster.disable_compression.unwrap_or(false);
    config.tls_server_name = cluster.tls_server_name.clone();
    config.proxy_url = proxy(cluster)?;
    if let Some(namespace) = &context.namespace {
        config.default_namespace.clone_from(namespace);
    }
    let user = kubeconfig
        .auth_infos
        .iter()
        .find(|named| Some(&named.name) == context.user.as_ref());
    // Like kubectl, use anonymous access without a user.
    config.auth_info = user
        .and_then(|named| named.auth_info.clone())
        .unwrap_or_default();
    if let Some(exec) = &mut config.auth_info.exec
        && exec.provide_cluster_info
    {
        exec.cluster = Some(exec_cluster);
    }
    config.connect_timeout = Some(CONNECT_TIMEOUT);
    config.read_timeout = None;
    Ok(config)
}

fn certificates(pem: &[u8]) -> Result<Vec<Vec<u8>>, ConfigError> {
    let read: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem)
        .map(|certificate| certificate.map(|der| der.to_vec()))
        .collect();
    let certificates = read.map_err(|_| ConfigError::Authority)?;
    if certificates.is_empty() {
        return Err(ConfigError::Authority);
    }
    Ok(certificates)
}

/// Returns the proxy. Rejects HTTPS proxies: kube would verify their certificate against the cluster's
/// authority.
fn proxy(cluster: &Cluster) -> Result<Option<http::Uri>, ConfigError> {
    let Some(url) = cluster.proxy_url.as_deref().filter(|url| !url.is_empty()) else {
        return Ok(None);
    };
    parse_proxy(url).map(Some).ok_or(ConfigError::Proxy)
}

fn parse_proxy(url: &str) -> Option<http::Uri> {
    let url: http::Uri = url.parse().ok()?;
    let has_login = url.authority()?.as_str().contains('@');
    let is_supported = match url.scheme_str() {
        Some("http") => true,
        // kube sends no credentials to such a proxy.
        Some("socks5") => !has_login,
        _ => false,
    };
    (is_supported && url.host().is_some()).then_some(url)
}

/// Returns the proxy that kubectl uses for the API server at this URL, from HTTPS_PROXY and NO_PROXY. A proxy of the
/// kubeconfig precedes it.
///
/// # Errors
/// Returns an error if the server needs the proxy, and its URL is not supported.
pub fn environment_proxy(
    server: &http::Uri,
    env: &dyn Fn(&str) -> Option<String>,
) -> Result<Option<http::Uri>, LocalError> {
    let Some(value) = https_proxy_of(server, env) else {
        return Ok(None);
    };
    let url = match value.contains("://") {
        true => value,
        false => format!("http://{value}"),
    };
    let url = parse_proxy(&url);
    url.map(Some).ok_or(LocalError::EnvironmentProxy)
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpListener;

    use super::*;

    async fn config_with_proxy(proxy: &str) -> Config {
        let kubeconfig = json!({
            "clusters": [{
                "name": "c",
                "cluster": {"server": "https://edge.invalid:6443", "proxy-url": proxy},
            }],
            "users": [{"name": "u", "user": {"token": "hunter2"}}],
            "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
            "current-context": "x",
        });
        let kubeconfig = Kubeconfig::from_yaml(&kubeconfig.to_string()).unwrap();
        from_kubeconfig(kubeconfig, None).await.unwrap().config
    }

    /// Returns the first bytes that a client sends to a proxy of this scheme. The proxy answers the first
    /// `greeting` bytes with `response`.
    async fn bytes_sent_to(
        scheme: &str,
        greeting: usize,
        response: &[u8],
        rest_length: usize,
    ) -> Vec<u8> {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let proxy = format!("{scheme}://{}", listener.local_addr().unwrap());
        let client = super::super::new_client(config_with_proxy(&proxy).await, "test/1").unwrap();
        let request = tokio::spawn(async move { client.apiserver_version().await.map(drop) });
        let (mut socket, _) = listener.accept().await.unwrap();
        let mut sent = vec![0; greeting];
        socket.read_exact(&mut sent).await.unwrap();
        socket.write_all(response).await.unwrap();
        let mut rest = vec![0; rest_length];
        socket.read_exact(&mut rest).await.unwrap();
        sent.extend(rest);
        drop(socket);
        request.await.unwrap().unwrap_err();
        sent
    }

    #[tokio::test]
    async fn http_proxy_receives_host_name_but_no_request() {
        let connect = "CONNECT edge.invalid:6443 HTTP/1.1\r\n";
        let host = "Host: edge.invalid:6443\r\n\r\n";
        let response = b"HTTP/1.1 200 OK\r\n\r\n";
        let sent = bytes_sent_to("http", connect.len() + host.len(), response, 1).await;
        let (handshake, head) = sent.split_last().unwrap();
        assert_eq!(
            std::str::from_utf8(head).unwrap(),
            format!("{connect}{host}")
        );
        assert_eq!(*handshake, 0x16, "TLS follows");
    }

    #[tokio::test]
    async fn a_socks_proxy_is_spoken_to_as_such() {
        let name = b"edge.invalid";
        let sent = bytes_sent_to("socks5", 3, &[5, 0], 5 + name.len() + 2).await;
        assert_eq!(sent[..3], [5, 1, 0]);
        assert_eq!(sent[3..7], [5, 1, 0, 3]);
        assert_eq!(sent[8..8 + name.len()], *name);
    }

    #[test]
    fn unsupported_proxy_url_is_rejected_without_echoing_it() {
        for url in [
            "https://p:1",
            "socks4://p:1",
            "ftp://u:hunter2@p:1",
            "p",
            "http://",
        ] {
            let cluster = Cluster {
                proxy_url: Some(url.to_owned()),
                ..Default::default()
            };
            let error = proxy(&cluster).unwrap_err();
            assert!(matches!(error, ConfigError::Proxy), "{url}");
            assert!(!error.to_string().contains("hunter2"), "{error}");
        }
    }

    #[test]
    fn environment_proxy_is_chosen_as_by_kubectl() {
        let exempt = "other.org, 10.0.0.0/8, *.inner.org";
        for (server, name, value, expected) in [
            (
                "https://a.org:6443",
                "HTTPS_PROXY",
                "http://me:pw@p:1",
                "http://me:pw@p:1/",
            ),
            ("https://a.org:6443", "https_proxy", "p:1", "http://p:1/"),
            (
                "https://a.org",
                "HTTPS_PROXY",
                "socks5://p:1",
                "socks5://p:1/",
            ),
            (
                "https://a.org",
                "HTTPS_PROXY",
                "https://me:hunter2@p:1",
                "error",
            ),
            (
                "https://a.org",
                "HTTPS_PROXY",
                "socks5://me:hunter2@p:1",
                "error",
            ),
            ("https://a.org", "HTTPS_PROXY", "http://", "error"),
            ("https://a.org", "HTTPS_PROXY", "", ""),
            ("https://a.org", "ALL_PROXY", "http://p:1", ""),
            ("http://a.org", "HTTPS_PROXY", "http://p:1", ""),
            ("https://other.org", "HTTPS_PROXY", "http://p:1", ""),
            ("https://10.1.2.3:6443", "HTTPS_PROXY", "http://p:1", ""),
            ("https://api.inner.org", "HTTPS_PROXY", "ftp://p:1", ""),
            ("https://127.0.0.1:6443", "HTTPS_PROXY", "http://p:1", ""),
            ("https://[::1]:6443", "HTTPS_PROXY", "http://p:1", ""),
            ("https://localhost:6443", "HTTPS_PROXY", "http://p:1", ""),
        ] {
            let env = |variable: &str| match variable {
                "no_proxy" => Some(exempt.to_owned()),
                _ => (variable == name).then(|| value.to_owned()),
            };
            let proxy = match environment_proxy(&server.parse().unwrap(), &env) {
                Ok(proxy) => proxy.map(|proxy| proxy.to_string()).unwrap_or_default(),
                Err(error) => {
                    assert!(!error.to_string().contains("hunter2"), "{error}");
                    "error".to_owned()
                }
            };
            assert_eq!(proxy, expected, "{server} {name}={value}");
        }
        let env = |variable: &str| match variable {
            "NO_PROXY" => Some("a, *".to_owned()),
            _ => Some("http://p:1".to_owned()),
        };
        for server in [
            "https://a.org",
            "https://10.1.2.3",
            "https://[fd00::1]:6443",
        ] {
            let proxy = environment_proxy(&server.parse().unwrap(), &env);
            assert_eq!(proxy.unwrap(), None, "{server}");
        }
    }

    #[test]
    fn an_authority_must_hold_a_certificate() {
        let unterminated = "-----BEGIN CERTIFICATE-----\nAAAA\n";
        for pem in ["", "hello", unterminated] {
            assert!(matches!(
                certificates(pem.as_bytes()),
                Err(ConfigError::Authority)
            ));
        }
    }
}
