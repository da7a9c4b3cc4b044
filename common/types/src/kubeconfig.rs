//! Sanitizes kubeconfigs from Secrets, which are untrusted. The result is rebuilt from an allow-list of inline
//! fields. Fields that run a program, read a file or weaken TLS are rejected with their path. Performs no I/O: it
//! opens no file, resolves no name and makes no connection.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use jiff::Timestamp;
use serde_json::{Value, json};

use crate::document::{FieldError, Fields};
use crate::{fingerprint, names};

mod address;
mod credential_dates;
mod document;
mod fields;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
mod material;
mod server;

pub use address::refused_address;
use credential_dates::CredentialValidity;
pub use server::Authority;

/// Limit for the size of a kubeconfig in bytes.
pub const SIZE_MAX: usize = 256 * 1024;

/// Dangerous fields that are allowed. By default, none is. Each field is a flag of the hub.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Policy {
    /// `users[].user.exec`: runs a program in the hub that the Secret chooses.
    pub allow_exec: bool,
    /// `users[].user.auth-provider`: can run a program too.
    pub allow_auth_provider: bool,
    /// `users[].user.tokenFile`: sends the content of a hub's file to a server that the Secret chooses.
    pub allow_token_file: bool,
    /// `certificate-authority`, `client-certificate`, `client-key`: files of the hub.
    pub allow_files: bool,
    /// `insecure-skip-tls-verify: true`: the hub does not verify the server's identity.
    pub allow_insecure_tls: bool,
    /// A server or proxy on the hub's own machine, such as `localhost`. A service there may be intended for the hub
    /// only.
    pub allow_loopback: bool,
    /// A server or proxy at a link-local, metadata, multicast or broadcast address.
    pub allow_link_local: bool,
    /// `proxy-url`: the hub connects to a proxy that the Secret chooses, instead of the server.
    pub allow_proxy: bool,
}

/// A kubeconfig that is safe to use under the [`Policy`] that it was parsed with.
#[derive(Clone, PartialEq, Eq)]
pub struct SanitizedKubeconfig {
    /// `https://host[:port][/path]`.
    pub server: String,
    /// Host and port of `server`. A caller that resolves a host name must check each address with
    /// [`refused_address`].
    pub authority: Authority,
    /// Host and port of `proxy-url`, if set. The hub connects to it instead, and the proxy resolves the server's
    /// name.
    pub proxy: Option<Authority>,
    /// Namespace of the context, if set.
    pub namespace: Option<String>,
    /// A kubeconfig with one cluster, user and context, in JSON (which is YAML). Contains secrets.
    pub yaml: String,
    /// SHA-256 of `yaml`. Changes to unused parts of the kubeconfig do not affect it.
    pub digest: String,
    /// Earliest time at which one of the credentials is valid. `None` if a credential has no such date.
    pub not_before: Option<Timestamp>,
    /// Time from which none of the credentials is valid, according to the client certificate and a JWT. `None` if a
    /// credential has no such date.
    pub expires: Option<Timestamp>,
    credentials: Vec<CredentialValidity>,
}

impl SanitizedKubeconfig {
    /// Returns the host that a client connects to, which the caller must resolve and check.
    pub fn first_hop(&self) -> &Authority {
        self.proxy.as_ref().unwrap_or(&self.authority)
    }

    /// Returns the kubeconfig with this `proxy-url`.
    pub fn yaml_through(&self, proxy_url: &str) -> String {
        let mut config: Value = serde_json::from_str(&self.yaml).unwrap_or_default();
        let cluster = config.pointer_mut("/clusters/0/cluster");
        if let Some(cluster) = cluster.and_then(Value::as_object_mut) {
            cluster.insert("proxy-url".to_owned(), proxy_url.into());
        }
        config.to_string()
    }

    /// Checks that one of the credentials can be valid now. Tolerates a clock skew of ten minutes.
    ///
    /// # Errors
    /// The problem of the first credential if none is valid.
    pub fn check_dates(&self, now: Timestamp) -> Result<(), KubeconfigError> {
        let credentials = self.credentials.iter();
        let mut checks = credentials.map(|credential| credential.check(now));
        let first = checks.next().unwrap_or(Ok(()));
        if checks.any(|check| check.is_ok()) {
            return Ok(());
        }
        first
    }
}

impl fmt::Debug for SanitizedKubeconfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sanitized")
            .field("server", &self.server)
            .field("proxy", &self.proxy)
            .field("namespace", &self.namespace)
            .field("digest", &self.digest)
            .field("expires", &self.expires)
            .finish_non_exhaustive()
    }
}

/// Why a kubeconfig is rejected. Messages contain no values, only names of entries, quoted and shortened. The caller
/// adds the Secret and the key.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KubeconfigError {
    #[error(
        "kubeconfig has {size} bytes, more than the {SIZE_MAX} allowed: keep only the context that is needed (kubectl config view --raw --minify)"
    )]
    TooLarge { size: usize },
    #[error("kubeconfig is not UTF-8 text, at byte {position}")]
    NotUtf8 { position: usize },
    #[error("kubeconfig has a NUL at byte {position}: it must be plain UTF-8 text")]
    Nul { position: usize },
    #[error("kubeconfig is not read{}: {problem}", fields::position(*line, *column))]
    Yaml {
        line: u64,
        column: u64,
        problem: &'static str,
    },
    #[error("failed to determine current context: current-context is missing or empty")]
    NoCurrentContext,
    #[error("{kind} {name} not found in {list}")]
    NotFound {
        kind: &'static str,
        list: &'static str,
        name: String,
    },
    #[error("{list} has the name {name} more than once: keep one of them")]
    Duplicate { list: &'static str, name: String },
    #[error("{path} is not allowed: {remedy}")]
    Forbidden { path: String, remedy: &'static str },
    #[error(transparent)]
    Field(#[from] FieldError),
    #[error(
        "{path} has no credential: set token, or client-certificate-data and client-key-data; anonymous access is refused"
    )]
    NoCredential { path: String },
    #[error("{path} expired on {expires}: replace the kubeconfig with a newer one")]
    Expired { path: String, expires: Timestamp },
    #[error(
        "{path} is not valid before {not_before}, and the local time is {now}; wait, or correct the clock"
    )]
    NotYetValid {
        path: String,
        not_before: Timestamp,
        now: Timestamp,
    },
}

impl KubeconfigError {
    /// Returns the stable reason for a condition.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Forbidden { .. } | Self::Field(FieldError::Unknown { .. }) => {
                "KubeconfigForbiddenField"
            }
            _ => "KubeconfigInvalid",
        }
    }
}

/// Reads only the parts that the current context uses, and rebuilds them.
///
/// # Errors
/// The first reason to reject the kubeconfig. The function reads only the names of entries that the current context
/// does not use.
pub fn parse(bytes: &[u8], policy: &Policy) -> Result<SanitizedKubeconfig, KubeconfigError> {
    let document = document::parse(bytes)?;
    let root = read_root(&document)?;
    read_context(&root, current_context(&root)?, policy)
}

/// Contexts by name. An error affects only its context.
pub type Contexts = BTreeMap<String, Result<SanitizedKubeconfig, KubeconfigError>>;

/// Reads each context except the current one, at most `max`, in the order of their names.
///
/// # Errors
/// The reason to reject the whole kubeconfig. A kubeconfig without a current context is rejected too.
pub fn parse_other_contexts(
    bytes: &[u8],
    policy: &Policy,
    max: usize,
) -> Result<Contexts, KubeconfigError> {
    let document = document::parse(bytes)?;
    let root = read_root(&document)?;
    let current = current_context(&root)?;
    let items = root.list("contexts")?.unwrap_or_default();
    let names = items.iter().filter_map(|item| item.get("name")?.as_str());
    let others: BTreeSet<&str> = names
        .filter(|name| !name.is_empty() && *name != current)
        .collect();
    let read = |name: &str| (name.to_owned(), read_context(&root, name, policy));
    Ok(others.into_iter().take(max).map(read).collect())
}

fn read_root(document: &Value) -> Result<Fields<'_>, KubeconfigError> {
    if document.is_null() {
        return Err(KubeconfigError::NoCurrentContext);
    }
    let root = Fields::new(document, "").map_err(|_| KubeconfigError::Yaml {
        line: 0,
        column: 0,
        problem: "its root is not a map",
    })?;
    root.expect_value(
        "kind",
        "Config",
        "must be Config: this is another kind of object",
    )?;
    root.expect_value("apiVersion", "v1", "must be v1")?;
    root.allow_only(&[
        "kind",
        "apiVersion",
        "preferences",
        "extensions",
        "clusters",
        "contexts",
        "users",
        "current-context",
    ])?;
    Ok(root)
}

fn current_context<'a>(root: &Fields<'a>) -> Result<&'a str, KubeconfigError> {
    root.text("current-context")?
        .ok_or(KubeconfigError::NoCurrentContext)
}

fn read_context(
    root: &Fields<'_>,
    name: &str,
    policy: &Policy,
) -> Result<SanitizedKubeconfig, KubeconfigError> {
    let context = root.entry("contexts", "context", name)?;
    context.allow_only(&["cluster", "user", "namespace", "extensions"])?;
    let cluster_name = context.required("cluster", "is not set: name an entry of clusters")?;
    let user_name = context.required(
        "user",
        "is not set: name an entry of users; anonymous access is refused",
    )?;
    let namespace = context.text("namespace")?;
    if namespace.is_some_and(|namespace| !names::is_dns_label(namespace)) {
        let problem = "is not a legal namespace name";
        return Err(context.invalid("namespace", problem).into());
    }

    let cluster = read_cluster(&root.entry("clusters", "cluster", cluster_name)?, policy)?;
    let user = read_user(&root.entry("users", "user", user_name)?, policy)?;
    Ok(rebuild(cluster, namespace, user))
}

struct Cluster {
    server: String,
    authority: Authority,
    proxy: Option<Authority>,
    fields: Value,
}

fn read_cluster(input: &Fields<'_>, policy: &Policy) -> Result<Cluster, KubeconfigError> {
    let insecure = input.flag("insecure-skip-tls-verify")?;
    if insecure && !policy.allow_insecure_tls {
        return Err(input.forbidden("insecure-skip-tls-verify", remedy::TLS));
    }
    if !policy.allow_proxy {
        input.forbid("proxy-url", remedy::PROXY)?;
    }
    if !policy.allow_files {
        input.forbid("certificate-authority", remedy::CA_FILE)?;
    }
    input.allow_only(&[
        "server",
        "certificate-authority-data",
        "certificate-authority",
        "tls-server-name",
        "insecure-skip-tls-verify",
        "proxy-url",
        "extensions",
        // Affects traffic only, so the rebuilt kubeconfig omits it.
        "disable-compression",
    ])?;

    let server = input.required(
        "server",
        "is not set: give the https:// URL of the apiserver",
    )?;
    let server =
        server::parse_server(server).map_err(|problem| input.invalid("server", problem))?;
    let server = check_address(server, input, "server", policy)?;
    let mut fields = json!({ "server": server.text });
    let proxy = match input.text("proxy-url")? {
        None => None,
        Some(url) => {
            let parsed = server::parse_proxy(url);
            let proxy = parsed.map_err(|problem| input.invalid("proxy-url", problem))?;
            let proxy = check_address(proxy, input, "proxy-url", policy)?;
            fields["proxy-url"] = proxy.text.into();
            Some(proxy.authority)
        }
    };
    if let Some(data) = material::authorities(input)? {
        fields["certificate-authority-data"] = data.into();
    }
    if let Some(path) = input.path("certificate-authority")? {
        fields["certificate-authority"] = path.into();
    }
    if let Some(name) = input.text("tls-server-name")? {
        if rustls_pki_types::ServerName::try_from(name).is_err() {
            let problem = "is not a host name or IP address";
            return Err(input.invalid("tls-server-name", problem).into());
        }
        fields["tls-server-name"] = name.into();
    }
    if insecure {
        // client-go rejects this combination, so Helm would fail too.
        if has_either(&fields, "certificate-authority") {
            let problem =
                "contradicts the certificate authority in the same entry; remove one of them";
            return Err(input.invalid("insecure-skip-tls-verify", problem).into());
        }
        fields["insecure-skip-tls-verify"] = true.into();
    }
    Ok(Cluster {
        server: server.text,
        authority: server.authority,
        proxy,
        fields,
    })
}

fn check_address(
    url: server::CheckedUrl,
    input: &Fields<'_>,
    key: &str,
    policy: &Policy,
) -> Result<server::CheckedUrl, KubeconfigError> {
    match address::refused_host(&url.authority.host, policy) {
        Some(remedy) => Err(input.forbidden(key, remedy)),
        None => Ok(url),
    }
}

/// Returns whether the content of a file is given, as its path or as its data.
fn has_either(fields: &Value, field: &str) -> bool {
    fields.get(field).is_some() || fields.get(format!("{field}-data")).is_some()
}

struct User {
    fields: Value,
    credentials: Vec<CredentialValidity>,
}

fn read_user(input: &Fields<'_>, policy: &Policy) -> Result<User, KubeconfigError> {
    for (key, allowed, remedy) in [
        ("exec", policy.allow_exec, remedy::EXEC),
        (
            "auth-provider",
            policy.allow_auth_provider,
            remedy::AUTH_PROVIDER,
        ),
        ("tokenFile", policy.allow_token_file, remedy::TOKEN_FILE),
        (
            "client-certificate",
            policy.allow_files,
            remedy::CLIENT_FILE,
        ),
        ("client-key", policy.allow_files, remedy::CLIENT_FILE),
        ("username", false, remedy::BASIC),
        ("password", false, remedy::BASIC),
    ] {
        if !allowed {
            input.forbid(key, remedy)?;
        }
    }
    let is_impersonation =
        |key: &str| key == "as" || key.starts_with("as-") || key.starts_with("impersonate");
    for key in input.keys().filter(|key| is_impersonation(key)) {
        input.forbid(key, remedy::IMPERSONATION)?;
    }
    input.allow_only(&[
        "token",
        "client-certificate-data",
        "client-key-data",
        "exec",
        "auth-provider",
        "tokenFile",
        "client-certificate",
        "client-key",
        "username",
        "password",
        "as",
        "as-uid",
        "as-groups",
        "as-user-extra",
        "extensions",
    ])?;

    let mut fields = json!({});
    let mut credentials = Vec::new();
    if let Some(token) = input.text("token")? {
        if !token.bytes().all(|byte| byte.is_ascii_graphic()) {
            let problem =
                "has an invalid character, like a space or a line end: check how it was pasted";
            return Err(input.invalid("token", problem).into());
        }
        credentials.push(CredentialValidity::from_token(
            input.path_to("token"),
            token,
        ));
        fields["token"] = token.into();
    }
    let certificate = material::client_certificate(input)?;
    let key = material::client_key(input)?;
    if let Some(certificate) = &certificate {
        credentials.push(material::validity(input, certificate));
        fields["client-certificate-data"] = certificate.data.clone().into();
    }
    if let Some(key) = &key {
        fields["client-key-data"] = key.data.clone().into();
    }
    for key in ["tokenFile", "client-certificate", "client-key"] {
        if let Some(path) = input.path(key)? {
            // A key without its certificate is not a credential.
            if key != "client-key" {
                credentials.push(CredentialValidity::unlimited(input.path_to(key)));
            }
            fields[key] = path.into();
        }
    }
    for key in ["exec", "auth-provider"] {
        if let Some(map) = input.nested(key)?.and_then(|fields| fields.map) {
            credentials.push(CredentialValidity::unlimited(input.path_to(key)));
            fields[key] = Value::Object(map.clone());
        }
    }

    let has_key = has_either(&fields, "client-key");
    if has_either(&fields, "client-certificate") != has_key {
        let missing = if has_key {
            "client-certificate-data"
        } else {
            "client-key-data"
        };
        let problem = "is missing: a client certificate needs its key";
        return Err(input.invalid(missing, problem).into());
    }
    if let (Some(certificate), Some(key)) = (&certificate, &key) {
        material::check_pair(input, certificate, key)?;
    }
    if fields == json!({}) {
        return Err(input.no_credential());
    }
    Ok(User {
        fields,
        credentials,
    })
}

/// Builds the kubeconfig with fixed entry names: they have no effect, and the digest stays stable.
fn rebuild(cluster: Cluster, namespace: Option<&str>, user: User) -> SanitizedKubeconfig {
    let mut context = json!({ "cluster": "member", "user": "member" });
    if let Some(namespace) = namespace {
        context["namespace"] = namespace.into();
    }
    let yaml = json!({
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{ "name": "member", "cluster": cluster.fields }],
        "users": [{ "name": "member", "user": user.fields }],
        "contexts": [{ "name": "member", "context": context }],
        "current-context": "member",
    })
    .to_string();
    // `None` if one credential has no date: that credential is always valid.
    let dates = |date: fn(&CredentialValidity) -> Option<Timestamp>| {
        let dates: Option<Vec<_>> = user.credentials.iter().map(date).collect();
        dates.unwrap_or_default()
    };
    SanitizedKubeconfig {
        not_before: dates(|credential| credential.not_before).into_iter().min(),
        expires: dates(|credential| credential.expires).into_iter().max(),
        server: cluster.server,
        authority: cluster.authority,
        proxy: cluster.proxy,
        namespace: namespace.map(str::to_owned),
        digest: fingerprint::sha256_hex(yaml.as_bytes()),
        yaml,
        credentials: user.credentials,
    }
}

mod remedy {
    pub(super) const EXEC: &str = "it would run a program in the hub; use a token or a client \
        certificate, or start the hub with --insecure-kubeconfig-exec";
    pub(super) const AUTH_PROVIDER: &str = "it may run a program in the hub; use a token or a \
        client certificate, or start the hub with --insecure-kubeconfig-auth-provider";
    pub(super) const TOKEN_FILE: &str = "it would send a file of the hub to the server; put the \
        token into token, or start the hub with --insecure-kubeconfig-token-file";
    pub(super) const CLIENT_FILE: &str = "it names a file of the hub; put the content into \
        client-certificate-data and client-key-data (kubectl config view --raw --flatten), or \
        start the hub with --insecure-kubeconfig-files";
    pub(super) const CA_FILE: &str = "it names a file of the hub; put the content into \
        certificate-authority-data (kubectl config view --raw --flatten), or start the hub with \
        --insecure-kubeconfig-files";
    pub(super) const TLS: &str = "the server could be anyone; give certificate-authority-data, \
        or, in a lab, start the hub with --insecure-kubeconfig-tls";
    pub(super) const PROXY: &str = "it would choose where the hub connects to; remove it, or start \
        the hub with --insecure-kubeconfig-proxy";
    pub(super) const IMPERSONATION: &str =
        "a member is used with its own credential only; remove it";
    pub(super) const BASIC: &str = "apiservers have no basic authentication; use a token or a \
        client certificate";
}

#[cfg(test)]
mod property_tests;
#[cfg(test)]
mod tests;
