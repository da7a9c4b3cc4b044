//! Policy for the CRDs in a chart's folder `crds`.

use serde::{Deserialize, Serialize};

use crate::by_word;

/// Policy for CRDs. No policy deletes a CRD.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum CrdPolicy {
    /// Ignore the CRDs.
    Skip,
    /// Create missing CRDs with the first installation, as Helm does.
    #[default]
    Create,
    /// Like `Create`, and update the CRDs before each upgrade.
    CreateReplace,
}

impl CrdPolicy {
    /// All policies with their text.
    pub const ALL: [(&'static str, Self); 3] = [
        ("skip", Self::Skip),
        ("create", Self::Create),
        ("create-replace", Self::CreateReplace),
    ];
}

by_word!(CrdPolicy);
