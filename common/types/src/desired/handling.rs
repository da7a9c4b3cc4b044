//! Handling of releases on every member: readiness, failed runs, history, and cleanup after the last release.

use std::ops::RangeInclusive;

use serde::{Deserialize, Serialize};

use crate::by_word;

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
}

by_word!(WaitPolicy);

/// Reaction to an upgrade that Krypton gives up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Remediation {
    /// Keep the failed revision. Objects that the upgrade did not change keep running.
    #[default]
    Keep,
    /// Roll back to the last deployed revision.
    Rollback,
}

impl Remediation {
    /// All remediations with their text.
    pub const ALL: [(&'static str, Self); 2] = [("keep", Self::Keep), ("rollback", Self::Rollback)];
}

by_word!(Remediation);

/// Allowed values of [`Handling::history_max`]. With fewer than 2, Helm would not keep a failed revision next to the
/// deployed one. Krypton could then not find the leftovers of the failed attempt.
pub const HISTORY: RangeInclusive<u8> = 2..=100;
const HISTORY_DEFAULT: u8 = 3;

/// Settings for all members. Fields with their default value are neither stored nor part of the digest of a desired
/// state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Handling {
    #[serde(skip_serializing_if = "krypton_crds::is_default")]
    pub wait: WaitPolicy,
    /// Delete the six CRDs of cert-manager together with the last release that created them, if no objects of their
    /// kinds exist.
    #[serde(skip_serializing_if = "krypton_crds::is_default")]
    pub delete_cert_manager_crds: bool,
    /// A failure to fetch the chart does not set a Tenant's phase to `Error` (`ALLOW_CHART_SKIP`).
    #[serde(skip_serializing_if = "krypton_crds::is_default")]
    pub allow_chart_skip: bool,
    /// Number of retries after a failed install or upgrade; unlimited if `None`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub retries: Option<u32>,
    #[serde(skip_serializing_if = "krypton_crds::is_default")]
    pub remediation: Remediation,
    /// Number of revisions that Helm keeps of a release: the running one and the latest attempts.
    #[serde(skip_serializing_if = "is_default_history")]
    pub history_max: u8,
}

impl Default for Handling {
    fn default() -> Self {
        Self {
            wait: WaitPolicy::default(),
            delete_cert_manager_crds: false,
            allow_chart_skip: false,
            retries: None,
            remediation: Remediation::default(),
            history_max: HISTORY_DEFAULT,
        }
    }
}

fn is_default_history(revisions: &u8) -> bool {
    *revisions == HISTORY_DEFAULT
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn defaults_are_neither_written_nor_required() {
        let default = Handling::default();
        assert_eq!(serde_json::to_string(&default).unwrap(), "{}");
        assert_eq!(serde_json::from_str::<Handling>("{}").unwrap(), default);
        assert!(HISTORY.contains(&default.history_max));
    }
}
