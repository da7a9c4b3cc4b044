//! A service account that helm acts as, so that we ourselves need not have the rights that charts need.

use std::fmt;

use krypton_common::names::{is_dns_label, is_dns_subdomain};
use kube::Config;
use kube::config::AuthInfo;

/// A service account of the cluster that is acted on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServiceAccount {
    namespace: String,
    name: String,
}

impl ServiceAccount {
    pub fn namespace(&self) -> &str {
        &self.namespace
    }

    /// From `NAMESPACE/NAME`, or `NAME` in `own_namespace`.
    pub fn parse(text: &str, own_namespace: &str) -> Option<Self> {
        let (namespace, name) = text.split_once('/').unwrap_or((own_namespace, text));
        (is_dns_label(namespace) && is_dns_subdomain(name)).then(|| Self {
            namespace: namespace.to_owned(),
            name: name.to_owned(),
        })
    }
}

/// The same cluster as `account`, with our credential; `None` without an account.
pub fn acting_as(config: &Config, account: Option<&ServiceAccount>) -> Option<Config> {
    let mut config = config.clone();
    impersonate(&mut config.auth_info, account?);
    Some(config)
}

/// With the groups that the apiserver knows it has
/// (<https://kubernetes.io/docs/reference/access-authn-authz/user-impersonation/>).
pub(super) fn impersonate(user: &mut AuthInfo, account: &ServiceAccount) {
    user.impersonate = Some(account.to_string());
    user.impersonate_groups = None;
}

/// As a user name of Kubernetes.
impl fmt::Display for ServiceAccount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "system:serviceaccount:{}:{}", self.namespace, self.name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_account_is_of_our_own_namespace_unless_it_says_another() {
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
