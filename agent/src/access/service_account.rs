//! A service account that helm acts as, so that we ourselves need not have the rights that charts need.

use std::fmt;

use krypton_common::names::{is_dns_label, is_dns_subdomain};

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
