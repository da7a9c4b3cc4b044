//! How releases are handled on every member: what is waited for, and what goes with the last of them.

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::keyword::by_word;

/// What makes a release that helm has deployed ready. Helm itself waits for hooks, always.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum WaitPolicy {
    /// That helm has deployed it; its workloads are not looked at.
    None,
    /// Its workloads are, by helm's own rule.
    #[default]
    Ready,
    /// That helm has deployed it, and its hooks have ended well; of workloads it is said what they lack.
    Hooks,
}

impl WaitPolicy {
    /// All, each as it is written.
    pub const ALL: [(&'static str, Self); 3] = [
        ("none", Self::None),
        ("ready", Self::Ready),
        ("hooks", Self::Hooks),
    ];

    /// Whether it is what members do that have been told nothing of it.
    pub fn is_default(&self) -> bool {
        *self == Self::default()
    }
}

/// A word that is none of the policies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("write none, ready or hooks")]
pub struct NotAWaitPolicy;

by_word!(WaitPolicy, NotAWaitPolicy);

/// The same for all members. What is as it was before there was such a field is neither on record nor in
/// the digest of a desired state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Handling {
    #[serde(skip_serializing_if = "WaitPolicy::is_default")]
    pub wait: WaitPolicy,
    /// The six CRDs of cert-manager go with the last release that has made them, where nothing of their
    /// kinds is left.
    #[serde(
        rename = "deleteCertManagerCrds",
        skip_serializing_if = "std::ops::Not::not"
    )]
    pub delete_cert_manager_crds: bool,
    /// A chart that cannot be had is no error of a Tenant's phase (`ALLOW_CHART_SKIP`).
    #[serde(rename = "allowChartSkip", skip_serializing_if = "std::ops::Not::not")]
    pub allow_chart_skip: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wait_policy_text_and_wire_form_agree() {
        for (word, policy) in WaitPolicy::ALL {
            assert_eq!(word.parse(), Ok(policy));
            assert_eq!(policy.to_string(), word);
            assert_eq!(serde_json::to_value(policy).unwrap(), word);
        }
        assert_eq!("watcher".parse::<WaitPolicy>(), Err(NotAWaitPolicy));
    }
}
