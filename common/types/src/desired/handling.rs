//! Handling of releases on every member: readiness, and cleanup after the last release.

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::keyword::by_word;

/// Condition under which a deployed release is ready. Helm itself always waits for hooks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum WaitPolicy {
    /// Ready once Helm has deployed it. Its workloads are not checked.
    None,
    /// Ready once its workloads are ready by Helm's own rule.
    #[default]
    Ready,
    /// Ready once Helm has deployed it and its hooks have succeeded. The message lists workloads that are not ready.
    Hooks,
}

impl WaitPolicy {
    /// All policies with their text.
    pub const ALL: [(&'static str, Self); 3] = [
        ("none", Self::None),
        ("ready", Self::Ready),
        ("hooks", Self::Hooks),
    ];

    /// Returns whether this is the behaviour of members that receive no policy.
    pub fn is_default(&self) -> bool {
        *self == Self::default()
    }
}

/// The text is not a policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("write none, ready or hooks")]
pub struct NotAWaitPolicy;

by_word!(WaitPolicy, NotAWaitPolicy);

/// Settings for all members. Fields with their default value are neither stored nor part of the digest of a desired
/// state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Handling {
    #[serde(skip_serializing_if = "WaitPolicy::is_default")]
    pub wait: WaitPolicy,
    /// Delete the six CRDs of cert-manager together with the last release that created them, if no objects of their
    /// kinds exist.
    #[serde(
        rename = "deleteCertManagerCrds",
        skip_serializing_if = "std::ops::Not::not"
    )]
    pub delete_cert_manager_crds: bool,
    /// A failure to fetch the chart does not set a Tenant's phase to `Error` (`ALLOW_CHART_SKIP`).
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
