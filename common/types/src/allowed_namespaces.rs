//! Decides which namespaces of the home cluster may target a member.
//!
//! An object targets a member by naming it, as a Tenant does through `clusterRef`. A Tenant without `clusterRef`
//! applies to the cluster that it is on. It targets no member, even on the home cluster.

use std::collections::BTreeSet;

use crate::conditions::{State, Truth, reason};

/// `spec.allowedNamespaces` of an EdgeCluster. By default, all namespaces are allowed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AllowedNamespaces(Option<BTreeSet<String>>);

impl AllowedNamespaces {
    pub fn new(namespaces: Option<&[String]>) -> Self {
        Self(namespaces.map(|listed| listed.iter().cloned().collect()))
    }

    /// Returns the condition for an object in `namespace` that names `member`, or `None` if the namespace is allowed.
    pub fn refusal(&self, member: &str, namespace: &str) -> Option<State> {
        let listed = self.0.as_ref()?;
        (!listed.contains(namespace)).then(|| {
            let message = format!(
                "namespace {namespace} is not in spec.allowedNamespaces of EdgeCluster {member}; add it, or name another member"
            );
            State::new(Truth::False, reason::NAMESPACE_NOT_ALLOWED, message)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn namespace_is_allowed_if_listed_or_unrestricted() {
        let listed = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        for (allowed, namespace, refused) in [
            (None, "team-a", false),
            (None, "", false),
            (Some(vec![]), "team-a", true),
            (Some(listed(&["team-a", "team-b"])), "team-b", false),
            (Some(listed(&["team-a", "team-b"])), "team-c", true),
            // An entry is neither a prefix nor a pattern.
            (Some(listed(&["team", "*"])), "team-a", true),
        ] {
            let allowed: Option<Vec<String>> = allowed;
            let allowed = AllowedNamespaces::new(allowed.as_deref());
            let refusal = allowed.refusal("edge-1", namespace);
            assert_eq!(refusal.is_some(), refused, "{allowed:?} {namespace:?}");
            if let Some(state) = refusal {
                assert_eq!(state.truth, Truth::False);
                assert_eq!(state.reason, "NamespaceNotAllowed");
                for word in ["EdgeCluster edge-1", namespace, "spec.allowedNamespaces"] {
                    assert!(state.message.contains(word), "{}", state.message);
                }
            }
        }
    }
}
