//! SHA-256 of a root certificate of the hub's CA, which hub and agents use as its name.

use std::fmt;
use std::str::FromStr;

use sha2::{Digest as _, Sha256};

use crate::fingerprint::is_hex;

const BYTES: usize = 32;
/// Limit for the number of trusted roots. A rotation needs two, and a user can add more.
pub const ROOTS_MAX: usize = 8;

/// Displayed and parsed as lower-case hex.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RootDigest([u8; BYTES]);

impl RootDigest {
    pub fn from_der(der: &[u8]) -> Self {
        Self(Sha256::digest(der).into())
    }

    /// Returns the digests of all certificates, sorted and without duplicates.
    pub fn from_ders(ders: &[impl AsRef<[u8]>]) -> Vec<Self> {
        let mut all: Vec<_> = ders
            .iter()
            .map(|der| Self::from_der(der.as_ref()))
            .collect();
        all.sort_unstable();
        all.dedup();
        all
    }

    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        bytes.try_into().ok().map(Self)
    }

    pub fn bytes(&self) -> [u8; BYTES] {
        self.0
    }
}

impl fmt::Display for RootDigest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for RootDigest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The text is not a digest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("it is not a SHA-256 in lower-case hex")]
pub struct NotADigest;

impl FromStr for RootDigest {
    type Err = NotADigest;

    fn from_str(text: &str) -> Result<Self, NotADigest> {
        // The parser of numbers would accept capital letters and a sign too.
        if !is_hex(text, 2 * BYTES) {
            return Err(NotADigest);
        }
        let parse = |half: &str| u128::from_str_radix(half, 16).map(u128::to_be_bytes);
        let (first, last) = text.split_at(BYTES);
        match (parse(first), parse(last)) {
            (Ok(first), Ok(last)) => Self::from_bytes(&[first, last].concat()).ok_or(NotADigest),
            _ => Err(NotADigest),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::fingerprint::sha256_hex;

    proptest! {
        #[test]
        fn digest_round_trips_through_text_and_bytes(bytes in any::<Vec<u8>>()) {
            let digest = RootDigest::from_der(&bytes);
            prop_assert_eq!(digest.to_string(), sha256_hex(&bytes));
            prop_assert_eq!(digest.to_string().parse(), Ok(digest));
            prop_assert_eq!(RootDigest::from_bytes(&digest.bytes()), Some(digest));
        }
    }

    #[test]
    fn malformed_digest_is_rejected() {
        let good = RootDigest::from_der(b"a").to_string();
        let mut short = good.clone();
        short.pop();
        for wrong in ["", "0", &good.to_uppercase(), &good.repeat(2), &short] {
            assert_eq!(wrong.parse::<RootDigest>(), Err(NotADigest), "{wrong}");
        }
        assert_eq!(RootDigest::from_bytes(&[0; 31]), None);
    }
}
