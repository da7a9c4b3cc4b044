//! Settings with a fixed set of words, which the type's table `ALL` defines.

use thiserror::Error;

/// The setting does not accept the text. The message lists the accepted words.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("write {0}")]
pub struct UnknownWord(String);

impl UnknownWord {
    /// Creates the error for a setting that accepts these words.
    pub fn new(words: &[&str]) -> Self {
        match words {
            [others @ .., last] if !others.is_empty() => {
                Self(format!("{} or {last}", others.join(", ")))
            }
            _ => Self(words.concat()),
        }
    }
}

/// Implements `FromStr` and `Display` for a type with the table `ALL`.
#[macro_export]
macro_rules! by_word {
    ($setting:ty) => {
        impl std::str::FromStr for $setting {
            type Err = $crate::keyword::UnknownWord;

            fn from_str(text: &str) -> Result<Self, Self::Err> {
                let mut all = Self::ALL.iter();
                let setting = all.find_map(|(word, setting)| (*word == text).then_some(*setting));
                setting.ok_or_else(|| Self::Err::new(&Self::ALL.map(|(word, _)| word)))
            }
        }

        impl std::fmt::Display for $setting {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                let mut all = Self::ALL.iter();
                let word = all.find_map(|(word, setting)| (setting == self).then_some(*word));
                f.write_str(word.unwrap_or_default())
            }
        }
    };
}

#[cfg(test)]
mod tests {
    use std::fmt::{Debug, Display};
    use std::str::FromStr;

    use serde::Serialize;

    use super::*;
    use crate::desired::crd_policy::CrdPolicy;
    use crate::desired::drift::DriftMode;
    use crate::desired::handling::{Remediation, WaitPolicy};

    fn check<T>(all: &[(&str, T)], unknown: &[&str], message: &str)
    where
        T: Copy + Debug + Display + FromStr<Err = UnknownWord> + PartialEq + Serialize,
    {
        for (word, setting) in all {
            assert_eq!(word.parse::<T>(), Ok(*setting));
            assert_eq!(setting.to_string(), *word);
            assert_eq!(serde_json::to_value(setting).unwrap(), *word);
        }
        for word in unknown {
            let error = word.parse::<T>().unwrap_err();
            assert_eq!(error.to_string(), message, "{word:?}");
        }
    }

    #[test]
    fn text_and_wire_form_of_settings_agree() {
        let crd_policies = "write skip, create or create-replace";
        check(&CrdPolicy::ALL, &["CreateReplace"], crd_policies);
        let unknown_modes = ["", "Heal", "on", "true", "enabled"];
        check(&DriftMode::ALL, &unknown_modes, "write off, warn or heal");
        check(&WaitPolicy::ALL, &["watcher"], "write none, ready or hooks");
        check(&Remediation::ALL, &["Keep"], "write keep or rollback");
    }
}
