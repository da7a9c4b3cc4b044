//! Credentials for a chart repository: a login, a client certificate and a custom certificate authority.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use k8s_openapi::api::core::v1::Secret;
use krypton_types::error_chain::chain;
use reqwest::header::HeaderValue;
use reqwest::redirect::Policy;
use reqwest::{Certificate, Client, ClientBuilder, Identity, Url};
use serde::{Deserialize, Deserializer};
use thiserror::Error;
use zeroize::Zeroizing;

use super::CurrentCredentials;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum time without data before a connection counts as dead.
const READ_TIMEOUT: Duration = Duration::from_secs(20);
const DOCKER_CONFIG: &str = ".dockerconfigjson";
/// Host of Docker's own registry.
pub(super) const DOCKER_HUB: &str = "registry-1.docker.io";

/// Why a Secret is not usable. Never contains its content.
#[derive(Debug, Error)]
pub enum CredentialsError {
    #[error(
        "it has none of the keys username, token, tls.crt, ca.crt and {DOCKER_CONFIG}; add the keys that the repository requires"
    )]
    Empty,
    #[error("it has {0} without {1}; add the other one")]
    Incomplete(&'static str, &'static str),
    #[error("it has both token and username; leave out one of them")]
    Both,
    #[error("its {0} holds characters that cannot be sent; write it again")]
    Characters(&'static str),
    #[error(
        "its Docker configuration is not what 'kubectl create secret docker-registry' or 'helm registry login' writes; create it again"
    )]
    Docker,
    #[error("its ca.crt holds no certificate; write it again, as PEM")]
    NoCertificate,
    #[error("its {0} cannot be read as PEM; write it again")]
    Pem(&'static str, #[source] reqwest::Error),
    #[error(
        "failed to create an HTTP client with its certificates; check that key and certificate match"
    )]
    Client(#[source] reqwest::Error),
}

/// A login to a repository.
#[derive(Clone)]
pub(super) enum Login {
    Basic {
        username: String,
        password: Zeroizing<String>,
    },
    Bearer(Zeroizing<String>),
}

impl Login {
    /// Returns the header, marked as sensitive so that logs omit it.
    pub(super) fn header(&self) -> Option<HeaderValue> {
        match self {
            Self::Basic { username, password } => basic(username, password),
            Self::Bearer(token) => bearer(token),
        }
    }
}

pub(super) fn basic(username: &str, password: &str) -> Option<HeaderValue> {
    let pair = Zeroizing::new(format!("{username}:{password}"));
    let text = Zeroizing::new(format!("Basic {}", STANDARD.encode(pair.as_bytes())));
    sensitive(&text)
}

pub(super) fn bearer(token: &str) -> Option<HeaderValue> {
    sensitive(&Zeroizing::new(format!("Bearer {token}")))
}

fn sensitive(text: &str) -> Option<HeaderValue> {
    let mut value = HeaderValue::from_str(text).ok()?;
    value.set_sensitive(true);
    Some(value)
}

/// Content of one Secret, ready for use. Only the chart's own repository receives it.
#[derive(Clone)]
pub struct Credentials {
    /// Login for the repository, regardless of its host.
    login: Option<Login>,
    /// Logins of a Docker configuration, by `host[:port][/path]`.
    by_location: Vec<(String, Login)>,
    /// HTTP client with the custom authority and the client certificate.
    pub(super) repository_client: Client,
    /// HTTP client with the custom authority and without the client certificate, for other hosts that the
    /// repository names.
    pub(super) other_client: Client,
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Credentials").finish_non_exhaustive()
    }
}

impl Credentials {
    /// Returns empty credentials, for public charts.
    pub(super) fn none() -> CurrentCredentials {
        let client = client()
            .build()
            .map_err(|error| format!("failed to create an HTTP client: {}", chain(&error)))?;
        Ok(Arc::new(Self {
            login: None,
            by_location: Vec::new(),
            repository_client: client.clone(),
            other_client: client,
        }))
    }

    /// Reads a Secret of any type by its keys: `username` and `password`, or `token`; `tls.crt` and
    /// `tls.key`; `ca.crt`; `.dockerconfigjson`. Ignores a trailing newline.
    ///
    /// # Errors
    /// Returns an error if the Secret has none of these keys or an invalid value.
    pub fn from_secret(secret: &Secret) -> Result<Self, CredentialsError> {
        let bytes = |key: &str| {
            let data = secret.data.as_ref()?;
            data.get(key).map(|value| value.0.as_slice())
        };
        let text = |key: &'static str| -> Result<Option<Zeroizing<String>>, CredentialsError> {
            let Some(bytes) = bytes(key).filter(|bytes| !bytes.is_empty()) else {
                return Ok(None);
            };
            let text = std::str::from_utf8(bytes).map_err(|_| CredentialsError::Characters(key))?;
            let text = text.trim_end_matches(['\r', '\n']);
            if text.contains(char::is_control) {
                return Err(CredentialsError::Characters(key));
            }
            Ok(Some(Zeroizing::new(text.to_owned())))
        };
        let login = match (text("username")?, text("password")?, text("token")?) {
            (None, None, None) => None,
            (Some(username), Some(password), None) => Some(Login::Basic {
                username: username.to_string(),
                password,
            }),
            (None, None, Some(token)) => Some(Login::Bearer(token)),
            (_, _, Some(_)) => return Err(CredentialsError::Both),
            (Some(_), None, None) => {
                return Err(CredentialsError::Incomplete("username", "password"));
            }
            (None, Some(_), None) => {
                return Err(CredentialsError::Incomplete("password", "username"));
            }
        };
        if login.as_ref().is_some_and(|login| login.header().is_none()) {
            return Err(CredentialsError::Characters("token"));
        }
        let by_location = match bytes(DOCKER_CONFIG) {
            Some(bytes) => parse_docker_config(bytes).ok_or(CredentialsError::Docker)?,
            None => Vec::new(),
        };
        let pem = |key| bytes(key).filter(|bytes| !bytes.is_empty());
        let (authorities, certificate, key) = (pem("ca.crt"), pem("tls.crt"), pem("tls.key"));
        let is_empty = login.is_none() && by_location.is_empty();
        if is_empty && authorities.is_none() && certificate.is_none() && key.is_none() {
            return Err(CredentialsError::Empty);
        }
        let mut other_client = client();
        let mut repository_client = client();
        if let Some(authorities) = authorities {
            let certificates = Certificate::from_pem_bundle(authorities)
                .map_err(|error| CredentialsError::Pem("ca.crt", error))?;
            if certificates.is_empty() {
                return Err(CredentialsError::NoCertificate);
            }
            // Add to the system's authorities, because charts may be stored on another host than their index.
            other_client = other_client.tls_certs_merge(certificates.clone());
            repository_client = repository_client.tls_certs_merge(certificates);
        }
        repository_client = match (certificate, key) {
            (Some(certificate), Some(key)) => {
                let pem = Zeroizing::new([certificate, b"\n", key].concat());
                let identity = Identity::from_pem(&pem)
                    .map_err(|error| CredentialsError::Pem("tls.crt and tls.key", error))?;
                repository_client.identity(identity)
            }
            (None, None) => repository_client,
            (Some(_), None) => return Err(CredentialsError::Incomplete("tls.crt", "tls.key")),
            (None, Some(_)) => return Err(CredentialsError::Incomplete("tls.key", "tls.crt")),
        };
        Ok(Self {
            login,
            by_location,
            repository_client: repository_client
                .build()
                .map_err(CredentialsError::Client)?,
            other_client: other_client.build().map_err(CredentialsError::Client)?,
        })
    }

    /// Returns the subset for another host.
    pub(super) fn for_others(&self) -> Self {
        Self {
            login: None,
            by_location: Vec::new(),
            repository_client: self.other_client.clone(),
            other_client: self.other_client.clone(),
        }
    }

    /// Returns the login for a repository. `path` is the chart's path in it.
    pub(super) fn login(&self, repository: &Url, path: &str) -> Option<&Login> {
        let host = repository.host_str().unwrap_or_default();
        let with_port = match repository.port() {
            Some(port) => format!("{host}:{port}"),
            None => host.to_owned(),
        };
        let chart_path = format!("{with_port}/{path}/");
        let specific = self
            .by_location
            .iter()
            .filter(|(location, _)| chart_path.starts_with(&format!("{location}/")))
            // Prefer the longest matching prefix.
            .max_by_key(|(location, _)| location.len());
        specific.map(|(_, login)| login).or(self.login.as_ref())
    }
}

/// Returns the common settings of all clients. The process-wide rustls provider must be installed.
fn client() -> ClientBuilder {
    Client::builder()
        .user_agent(concat!("krypton/", env!("CARGO_PKG_VERSION")))
        .connect_timeout(CONNECT_TIMEOUT)
        .read_timeout(READ_TIMEOUT)
        // `RepositoryClient::send` follows redirects itself and checks their targets.
        .redirect(Policy::none())
        .referer(false)
}

#[derive(Deserialize)]
struct DockerConfig {
    #[serde(default)]
    auths: std::collections::BTreeMap<String, DockerAuth>,
}

#[derive(Deserialize)]
struct DockerAuth {
    username: Option<String>,
    #[serde(default, deserialize_with = "secret")]
    password: Option<Zeroizing<String>>,
    #[serde(default, deserialize_with = "secret")]
    auth: Option<Zeroizing<String>>,
    #[serde(default, deserialize_with = "secret")]
    registrytoken: Option<Zeroizing<String>>,
}

pub(super) fn secret<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<Zeroizing<String>>, D::Error> {
    Ok(Option::<String>::deserialize(deserializer)?.map(Zeroizing::new))
}

fn parse_docker_config(bytes: &[u8]) -> Option<Vec<(String, Login)>> {
    let config: DockerConfig = serde_json::from_slice(bytes).ok()?;
    config
        .auths
        .into_iter()
        .map(|(location, auth)| Some((docker_location(&location), docker_login(auth)?)))
        .collect()
}

/// Normalizes a key of a Docker configuration. Docker Hub has the URL of its v1 API as key, others have their
/// host.
fn docker_location(location: &str) -> String {
    let location = location
        .trim_start_matches("https://")
        .trim_start_matches("http://")
        .trim_end_matches('/');
    let location = location.trim_end_matches("/v1").trim_end_matches("/v2");
    match location {
        "index.docker.io" | "docker.io" => DOCKER_HUB.to_owned(),
        location => location.to_owned(),
    }
}

fn docker_login(auth: DockerAuth) -> Option<Login> {
    let login = match auth {
        DockerAuth {
            registrytoken: Some(token),
            ..
        } if !token.is_empty() => Login::Bearer(token),
        DockerAuth {
            username: Some(username),
            password: Some(password),
            ..
        } => Login::Basic { username, password },
        DockerAuth { auth, .. } => {
            let pair = Zeroizing::new(STANDARD.decode(auth?.as_bytes()).ok()?);
            let (username, password) = std::str::from_utf8(&pair).ok()?.split_once(':')?;
            Login::Basic {
                username: username.to_owned(),
                password: Zeroizing::new(password.trim_end_matches('\0').to_owned()),
            }
        }
    };
    login.header().is_some().then_some(login)
}

#[cfg(test)]
pub(super) mod tests {
    use k8s_openapi::ByteString;

    use super::*;

    pub(crate) fn secret(data: &[(&str, &str)]) -> Secret {
        let data = data
            .iter()
            .map(|(key, value)| ((*key).to_owned(), ByteString(value.as_bytes().to_vec())));
        Secret {
            data: Some(data.collect()),
            ..Secret::default()
        }
    }

    fn read(data: &[(&str, &str)]) -> Result<Credentials, CredentialsError> {
        // Another test may have installed the provider already.
        drop(rustls::crypto::aws_lc_rs::default_provider().install_default());
        Credentials::from_secret(&secret(data))
    }

    fn login_header(credentials: &Credentials, url: &str, path: &str) -> Option<String> {
        let login = credentials.login(&Url::parse(url).unwrap(), path)?;
        Some(login.header().unwrap().to_str().unwrap().to_owned())
    }

    #[test]
    fn a_login_is_read_and_never_shown() {
        let basic = read(&[("username", "me\n"), ("password", "hunter2\n")]).unwrap();
        let header = login_header(&basic, "https://a", "x").unwrap();
        assert_eq!(header, format!("Basic {}", STANDARD.encode("me:hunter2")));
        let token = read(&[("token", "t0ken\r\n")]).unwrap();
        assert_eq!(
            login_header(&token, "https://a", "x").unwrap(),
            "Bearer t0ken"
        );
        let shown = format!("{basic:?}{:?}", basic.login.as_ref().map(Login::header));
        assert!(
            !shown.contains("hunter2") && !shown.contains(&header),
            "{shown}"
        );
    }

    #[test]
    fn most_specific_docker_config_entry_wins() {
        let config = format!(
            r#"{{"auths": {{
                "registry.example.org": {{"auth": "{}"}},
                "https://registry.example.org/team": {{"username": "team", "password": "b"}},
                "localhost:5000": {{"registrytoken": "c"}},
                "https://index.docker.io/v1/": {{"username": "hub", "password": "d"}}
            }}}}"#,
            STANDARD.encode("all:a")
        );
        let credentials = read(&[(DOCKER_CONFIG, &config)]).unwrap();
        for (url, path, expected) in [
            ("https://registry.example.org", "other/x", Some("all:a")),
            ("https://registry.example.org", "team/x", Some("team:b")),
            ("https://registry.example.org", "teams/x", Some("all:a")),
            ("https://registry-1.docker.io", "me/x", Some("hub:d")),
            ("https://registry.example.org:444", "team/x", None),
            ("https://example.org", "x", None),
        ] {
            let expected = expected.map(|pair| format!("Basic {}", STANDARD.encode(pair)));
            assert_eq!(
                login_header(&credentials, url, path),
                expected,
                "{url} {path}"
            );
        }
        let token = login_header(&credentials, "http://localhost:5000", "x");
        assert_eq!(token.as_deref(), Some("Bearer c"));
    }

    #[test]
    fn unusable_credentials_error_hides_content() {
        for (data, expected) in [
            (&[][..], "none of the keys"),
            (&[("other", "hunter2")], "none of the keys"),
            (&[("username", "hunter2")], "username without password"),
            (&[("password", "hunter2")], "password without username"),
            (&[("username", "a"), ("token", "hunter2")], "both"),
            (&[("token", "hunter2\nx")], "token holds characters"),
            (&[("ca.crt", "hunter2")], "ca.crt"),
            (&[("tls.crt", "hunter2")], "tls.crt without tls.key"),
            (&[("tls.key", "hunter2")], "tls.key without tls.crt"),
            (
                &[("tls.crt", "hunter2"), ("tls.key", "x")],
                "tls.crt and tls.key",
            ),
            (&[(DOCKER_CONFIG, "hunter2")], "docker-registry"),
            (
                &[(DOCKER_CONFIG, r#"{"auths": {"a": {"auth": "hunter2"}}}"#)],
                "docker-registry",
            ),
        ] {
            let error = read(data).map(drop).unwrap_err();
            let text = krypton_types::error_chain::chain(&error);
            assert!(text.contains(expected), "{expected}: {text}");
            assert!(!text.contains("hunter2"), "{text}");
        }
    }
}
