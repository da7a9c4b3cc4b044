//! Service account that Helm impersonates. Because of it, Krypton itself does not need the rights that charts need.

use std::path::Path;
use std::{fmt, io};

use http::header::InvalidHeaderValue;
use http::{HeaderValue, Request};
use krypton_types::names::{is_dns_label, is_dns_subdomain};
use kube::client::Body;
use kube::config::AuthInfo;
use kube::{Client, Config};
use serde_json::Value;
use tempfile::TempPath;

/// A service account of the target cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServiceAccount {
    namespace: String,
    name: String,
}

impl ServiceAccount {
    pub fn namespace(&self) -> &str {
        &self.namespace
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    /// Parses `NAMESPACE/NAME`, or `NAME` in `own_namespace`.
    pub fn parse(text: &str, own_namespace: &str) -> Option<Self> {
        let (namespace, name) = text.split_once('/').unwrap_or((own_namespace, text));
        (is_dns_label(namespace) && is_dns_subdomain(name)).then(|| Self {
            namespace: namespace.to_owned(),
            name: name.to_owned(),
        })
    }
}

/// Returns the configuration for the same cluster that acts as `account` with Krypton's credential. Returns `None`
/// without an account.
pub fn impersonating_config(config: &Config, account: Option<&ServiceAccount>) -> Option<Config> {
    let mut config = config.clone();
    impersonate(&mut config.auth_info, account?);
    Some(config)
}

/// Sets no groups: the API server adds the groups of the service account itself
/// (<https://kubernetes.io/docs/reference/access-authn-authz/user-impersonation/>).
pub(super) fn impersonate(user: &mut AuthInfo, account: &ServiceAccount) {
    user.impersonate = Some(account.to_string());
    user.impersonate_groups = None;
}

/// Returns a client that sends its requests through `client` as another user. `client` itself must not impersonate a
/// user.
pub fn client_as(client: &Client, user: &str) -> Result<Client, InvalidHeaderValue> {
    let user = HeaderValue::from_str(user)?;
    let client = client.clone();
    let send = move |mut request: Request<Body>| {
        let headers = request.headers_mut();
        headers.insert("impersonate-user", user.clone());
        let client = client.clone();
        async move { client.send(request).await }
    };
    Ok(Client::new(tower::service_fn(send), "default"))
}

/// Writes a copy of a kubeconfig from [`super::kubeconfig_yaml`] for another user. The copy is in the same folder as
/// `file`.
pub fn kubeconfig_as(file: &Path, user: &str) -> io::Result<TempPath> {
    let mut kubeconfig: Value = serde_json::from_slice(&std::fs::read(file)?)?;
    let user_entry = kubeconfig.pointer_mut("/users/0/user");
    let user_entry = user_entry.and_then(Value::as_object_mut);
    let user_entry =
        user_entry.ok_or_else(|| io::Error::other("the kubeconfig of helm has no user"))?;
    user_entry.insert("as".to_owned(), Value::String(user.to_owned()));
    for key in ["as-uid", "as-groups", "as-user-extra"] {
        user_entry.remove(key);
    }
    let folder = file.parent().unwrap_or(Path::new("."));
    super::write_kubeconfig(folder, &kubeconfig.to_string())
}

/// Formats the user name of the service account in Kubernetes.
impl fmt::Display for ServiceAccount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "system:serviceaccount:{}:{}", self.namespace, self.name)
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use super::*;

    #[test]
    fn kubeconfig_is_written_for_another_user() {
        let folder = tempfile::tempdir().unwrap();
        let mut config = Config::new("https://a".parse().unwrap());
        config.auth_info.token = Some("t".to_owned().into());
        let fleet = ServiceAccount::parse("helm", "krypton");
        for account in [None, fleet.as_ref()] {
            let yaml = super::super::kubeconfig_yaml(&config, account).unwrap();
            let file = super::super::write_kubeconfig(folder.path(), &yaml).unwrap();
            let other = kubeconfig_as(&file, "system:serviceaccount:team-a:own").unwrap();
            assert_eq!(other.parent(), file.parent());
            let read: Value = serde_json::from_slice(&std::fs::read(&other).unwrap()).unwrap();
            let expected =
                serde_json::json!({"token": "t", "as": "system:serviceaccount:team-a:own"});
            assert_eq!(read["users"][0]["user"], expected);
        }
    }

    #[tokio::test]
    async fn client_sends_everything_as_the_other_user() {
        let (user_tx, mut user_rx) = tokio::sync::mpsc::channel(1);
        let respond = move |request: Request<Body>| {
            let user = request.headers().get("impersonate-user").cloned();
            let user_tx = user_tx.clone();
            async move {
                user_tx.send(user).await.unwrap();
                Ok::<_, Infallible>(http::Response::new(Body::empty()))
            }
        };
        let client = Client::new(tower::service_fn(respond), "default");
        let other = client_as(&client, "system:serviceaccount:team-a:own").unwrap();
        other.send(Request::new(Body::empty())).await.unwrap();
        let user = user_rx.recv().await.flatten().unwrap();
        assert_eq!(user, "system:serviceaccount:team-a:own");
        assert!(client_as(&client, "a\nb").is_err());
    }

    #[test]
    fn service_account_defaults_to_own_namespace() {
        let user = |text| ServiceAccount::parse(text, "krypton").map(|account| account.to_string());
        for (text, expected) in [
            ("helm", Some("system:serviceaccount:krypton:helm")),
            ("ops/helm.v2", Some("system:serviceaccount:ops:helm.v2")),
            ("", None),
            ("ops/", None),
            ("/helm", None),
            ("a/b/c", None),
            ("Helm", None),
            ("o.p.s/helm", None),
            ("system:admin", None),
        ] {
            assert_eq!(user(text).as_deref(), expected, "{text:?}");
        }
    }
}
