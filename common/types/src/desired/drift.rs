//! Policy for releases that differ from their chart.

use serde::{Deserialize, Serialize};

use crate::by_word;

/// Reaction to drift.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DriftMode {
    /// Drift is not detected.
    #[default]
    Off,
    /// Drift is reported.
    Warn,
    /// Drift is reported and corrected.
    Heal,
}

impl DriftMode {
    /// All modes with their text.
    pub const ALL: [(&'static str, Self); 3] = [
        ("off", Self::Off),
        ("warn", Self::Warn),
        ("heal", Self::Heal),
    ];
}

by_word!(DriftMode);

/// Drift policy of a fleet. A Tenant can override the mode through an annotation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DriftPolicy {
    pub mode: DriftMode,
    /// Interval between two checks of one release.
    pub interval_seconds: u32,
}

impl DriftPolicy {
    pub const INTERVAL_SECONDS: u32 = 600;
}

impl Default for DriftPolicy {
    fn default() -> Self {
        Self {
            mode: DriftMode::Off,
            interval_seconds: Self::INTERVAL_SECONDS,
        }
    }
}
