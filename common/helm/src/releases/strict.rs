//! Strict parser for an untrusted manifest: any text that Helm might interpret differently is an error.

use k8s_openapi::api::core::v1::Secret;

use super::{ObjectId, ReleaseError, manifest};

/// Description of a manifest that the parser cannot fully read.
pub const UNREADABLE_OBJECT: &str = "an object that cannot be read";

/// Returns the objects of a revision without its hooks, or `None` if any part of the manifest is unclear.
///
/// # Errors
/// See [`super::decode`].
pub fn strict_objects(secret: &Secret) -> Result<Option<Vec<ObjectId>>, ReleaseError> {
    manifest::text(secret).map(|manifest| read_strictly(&manifest))
}

fn read_strictly(manifest: &str) -> Option<Vec<ObjectId>> {
    // Helm ends a document at every line that starts with `---`, regardless of the rest of the line.
    let is_clear = |line: &str| {
        let rest = line.strip_prefix("---");
        rest.is_none_or(|rest| rest.is_empty() || rest.starts_with(char::is_whitespace))
    };
    if !manifest.lines().all(is_clear) {
        return None;
    }
    let (objects, unreadable) = manifest::read(manifest);
    let ids = objects.iter().map(ObjectId::from_object);
    ids.collect::<Option<_>>().filter(|_| unreadable == 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: &str = "apiVersion: v1\nkind: Namespace\nmetadata: {name: one}\n";

    #[test]
    fn untrusted_manifest_is_read_completely_or_rejected() {
        let names = |manifest: &str| -> Option<Vec<String>> {
            Some(
                read_strictly(manifest)?
                    .into_iter()
                    .map(|id| id.name)
                    .collect(),
            )
        };
        let two = format!(
            "---\n# a comment\n---\n{ONE}--- # next\n{}",
            ONE.replace("one", "two")
        );
        assert_eq!(names(&two), Some(vec!["one".to_owned(), "two".to_owned()]));
        let list = r#"{"apiVersion": "v1", "kind": "List", "items": [
            {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "listed"}}]}"#;
        assert_eq!(names(list), Some(vec!["listed".to_owned()]));
        for unclear in [
            "{\n",
            "kind: Namespace\nmetadata: {name: no-version}\n",
            "apiVersion: v1\nkind: Namespace\n",
            "---apiVersion: v1\nkind: Namespace\nmetadata: {name: a}\n",
            r#"{"apiVersion": "v1", "kind": "A", "metadata": {"name": "a"}}{"kind": "B"}"#,
            r#"{"kind": "List", "items": [{"kind": "B"}]}"#,
        ] {
            assert_eq!(names(&format!("{ONE}---\n{unclear}")), None, "{unclear}");
        }
    }
}
