//! What is done about releases that are no longer as their chart has them.

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::keyword::by_word;

/// What is done about drift.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DriftMode {
    /// It is not looked for.
    #[default]
    Off,
    /// It is told.
    Warn,
    /// It is told and put right.
    Heal,
}

impl DriftMode {
    /// All, each as it is written.
    pub const ALL: [(&'static str, Self); 3] = [
        ("off", Self::Off),
        ("warn", Self::Warn),
        ("heal", Self::Heal),
    ];
}

/// A word that is none of the modes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("write off, warn or heal")]
pub struct NotAMode;

by_word!(DriftMode, NotAMode);

/// That of a fleet; a Tenant may have another mode by annotation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DriftPolicy {
    pub mode: DriftMode,
    /// Between two looks at one release.
    pub interval_seconds: u32,
}

impl DriftPolicy {
    pub const INTERVAL_SECONDS: u32 = 600;

    /// Whether it is what members do that have been told nothing of it.
    pub fn is_default(&self) -> bool {
        *self == Self::default()
    }
}

impl Default for DriftPolicy {
    fn default() -> Self {
        Self {
            mode: DriftMode::Off,
            interval_seconds: Self::INTERVAL_SECONDS,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn drift_mode_parses_only_exact_names() {
        for (word, mode) in DriftMode::ALL {
            assert_eq!(word.parse(), Ok(mode));
            assert_eq!(mode.to_string(), word);
        }
        for word in ["", "Heal", "on", "true", "enabled"] {
            assert_eq!(word.parse::<DriftMode>(), Err(NotAMode), "{word:?}");
        }
    }
}
