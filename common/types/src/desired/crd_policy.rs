//! What becomes of the CRDs in a chart's folder `crds`.

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::keyword::by_word;

/// Nothing ever deletes one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum CrdPolicy {
    /// They are left out.
    Skip,
    /// Made with the first installation where they are missing, as helm does it.
    #[default]
    Create,
    /// And brought up to date before each upgrade.
    CreateReplace,
}

impl CrdPolicy {
    /// All, each as it is written.
    pub const ALL: [(&'static str, Self); 3] = [
        ("skip", Self::Skip),
        ("create", Self::Create),
        ("create-replace", Self::CreateReplace),
    ];

    /// Whether it is what members do that have been told nothing of it.
    pub fn is_default(&self) -> bool {
        *self == Self::default()
    }
}

/// A word that is none of the policies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("write skip, create or create-replace")]
pub struct NotAPolicy;

by_word!(CrdPolicy, NotAPolicy);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn crd_policy_text_and_wire_form_agree() {
        for (word, policy) in CrdPolicy::ALL {
            assert_eq!(word.parse(), Ok(policy));
            assert_eq!(policy.to_string(), word);
            assert_eq!(serde_json::to_value(policy).unwrap(), word);
        }
        assert_eq!("CreateReplace".parse::<CrdPolicy>(), Err(NotAPolicy));
    }
}
