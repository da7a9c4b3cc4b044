//! Settings with a fixed set of words, which the type's table `ALL` defines.

use thiserror::Error;

/// The setting does not accept the text. The message lists the accepted words.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("write {0}")]
pub struct UnknownWord(String);

impl UnknownWord {
    pub(crate) fn new(words: &[&str]) -> Self {
        match words {
            [others @ .., last] if !others.is_empty() => {
                Self(format!("{} or {last}", others.join(", ")))
            }
            _ => Self(words.concat()),
        }
    }
}

/// Implements `FromStr` and `Display` for a type with the table `ALL`.
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

pub(crate) use by_word;
