//! Settings with a fixed set of words, which the type's table `ALL` defines.

/// Implements `FromStr` and `Display` for a type with the table `ALL`. Other texts result in the error.
macro_rules! by_word {
    ($setting:ty, $error:ident) => {
        impl std::str::FromStr for $setting {
            type Err = $error;

            fn from_str(text: &str) -> Result<Self, $error> {
                let mut all = Self::ALL.iter();
                let setting = all.find_map(|(word, setting)| (*word == text).then_some(*setting));
                setting.ok_or($error)
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
