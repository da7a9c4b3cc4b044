//! Finds payloads that Helm reads differently from Krypton. Go's decoder takes the last of two equal keys, and matches
//! keys without regard to case.

use std::fmt;

use k8s_openapi::api::core::v1::Secret;
use serde::de::{Deserialize, Deserializer, Error as _, MapAccess, Visitor};
use serde_json::value::RawValue;

use super::{ReleaseError, stored, unreadable};

/// An object with keys that can be read in one way only, and its values.
struct UnambiguousObject(Vec<(String, Box<RawValue>)>);

impl<'de> Deserialize<'de> for UnambiguousObject {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(UnambiguousObjectVisitor)
    }
}

struct UnambiguousObjectVisitor;

impl<'de> Visitor<'de> for UnambiguousObjectVisitor {
    type Value = UnambiguousObject;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<UnambiguousObject, A::Error> {
        let mut fields: Vec<(String, Box<RawValue>)> = Vec::new();
        while let Some((key, value)) = map.next_entry::<String, Box<RawValue>>()? {
            // All of Helm's own keys consist of these characters.
            let is_allowed = |byte: u8| byte.is_ascii_lowercase() || byte == b'_';
            let is_duplicate = fields.iter().any(|(earlier, _)| *earlier == key);
            if is_duplicate || !key.bytes().all(is_allowed) {
                return Err(A::Error::custom(format!("the key {key:?} is ambiguous")));
            }
            fields.push((key, value));
        }
        Ok(UnambiguousObject(fields))
    }
}

impl UnambiguousObject {
    fn get(&self, key: &str) -> &str {
        let field = self.0.iter().find(|(name, _)| name == key);
        field.map_or("null", |(_, value)| value.get())
    }
}

/// Checks the keys of everything that Helm acts on: the release, its state, its hooks.
///
/// # Errors
/// If a key occurs twice or has other characters than `a` to `z` and `_`, or the payload cannot be decoded.
pub fn check_keys(secret: &Secret) -> Result<(), ReleaseError> {
    let release: UnambiguousObject = stored(secret)?;
    let check = || {
        let _info: Option<UnambiguousObject> = serde_json::from_str(release.get("info"))?;
        let hooks: Option<Vec<UnambiguousObject>> = serde_json::from_str(release.get("hooks"))?;
        for hook in hooks.unwrap_or_default() {
            let _last_run: Option<UnambiguousObject> = serde_json::from_str(hook.get("last_run"))?;
        }
        Ok(())
    };
    check().map_err(|source| unreadable(secret, source))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::releases::packed_secret;

    fn is_unambiguous(json: &str) -> bool {
        check_keys(&packed_secret(json)).is_ok()
    }

    #[test]
    fn ambiguous_keys_are_refused() {
        let hooks = r#""hooks": [{"name": "a", "last_run": {"phase": ""}}]"#;
        let unambiguous = format!(r#"{{"name": "a", "info": {{"status": "b"}}, {hooks}}}"#);
        assert!(is_unambiguous(&unambiguous));
        assert!(is_unambiguous(
            r#"{"chart": {"Any": 1, "any": 2}, "hooks": null}"#
        ));
        for (part, ambiguous) in [
            (r#""name": "a""#, r#""name": "a", "Name": "b""#),
            (r#""name": "a""#, r#""name": "a", "name": "b""#),
            (r#""name": "a""#, r#""name": "a", "manife\u017ft": "b""#),
            (r#""status": "b""#, r#""status": "b", "Status": "c""#),
            (
                r#"{"name": "a", "last"#,
                r#"{"name": "a", "Events": [], "last"#,
            ),
            (r#""phase": """#, r#""phase": "", "PHASE": """#),
        ] {
            let json = unambiguous.replacen(part, ambiguous, 1);
            assert_ne!(json, unambiguous, "{part}");
            assert!(!is_unambiguous(&json), "{json}");
        }
    }
}
