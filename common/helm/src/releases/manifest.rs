//! Objects in a release's manifest, without hooks.

use k8s_openapi::api::core::v1::Secret;
use serde::Deserialize;
use serde_json::Value;

use super::{ReleaseError, documents, stored};

#[derive(Deserialize)]
struct StoredManifest {
    manifest: Option<String>,
}

/// Reads the manifest of a release Secret and flattens its lists. Returns the objects, and the number of
/// unreadable documents and items.
///
/// # Errors
/// See [`super::decode`]. Does not check the name.
pub fn objects(secret: &Secret) -> Result<(Vec<Value>, usize), ReleaseError> {
    text(secret).map(|text| read(&text))
}

/// Returns the manifest of a release Secret.
pub(super) fn text(secret: &Secret) -> Result<String, ReleaseError> {
    let stored: StoredManifest = stored(secret)?;
    Ok(stored.manifest.unwrap_or_default())
}

/// Returns the objects of a multi-document text, and the number of unreadable ones.
pub fn read(text: &str) -> (Vec<Value>, usize) {
    let (mut objects, mut unreadable) = (Vec::new(), 0);
    for document in documents(text) {
        unreadable += usize::from(!read_document(&document, &mut objects));
    }
    (objects, unreadable)
}

/// Adds the objects of one document to `objects`. Returns false if a part of it is unreadable.
pub(crate) fn read_document(document: &str, objects: &mut Vec<Value>) -> bool {
    // As in Helm's parser, the last of several equal keys wins, and numbers with a leading 0 are octal.
    let options = serde_saphyr::options! {
        duplicate_keys: serde_saphyr::DuplicateKeyPolicy::LastWins,
        legacy_octal_numbers: true,
        with_snippet: false,
    };
    match serde_saphyr::from_str_with_options::<Value>(document, options) {
        Ok(object) => collect_objects(object, objects),
        // A document with only comments has no object.
        Err(_) => is_blank(document),
    }
}

/// Flattens lists. Like Helm, treats any object with an array `items` as a list.
fn collect_objects(mut object: Value, objects: &mut Vec<Value>) -> bool {
    if let Some(Value::Array(items)) = object.get_mut("items") {
        let mut is_readable = true;
        for item in std::mem::take(items) {
            is_readable &= collect_objects(item, objects);
        }
        return is_readable;
    }
    if object.is_object() {
        objects.push(object);
        return true;
    }
    object.is_null()
}

fn is_blank(document: &str) -> bool {
    document
        .lines()
        .map(str::trim)
        .all(|line| line.is_empty() || line.starts_with('#'))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::releases::packed_secret;

    fn secret(manifest: &str) -> Secret {
        let release = json!({"name": "a", "version": 1, "manifest": manifest});
        packed_secret(&release.to_string())
    }

    #[test]
    fn manifest_objects_parse_like_helm() {
        let manifest = "---\n# Source: a\n---\nkind: A\nx: 0644\ny: yes\nx: 0600\n--- # two\n\
                        kind: ConfigMapList\nitems: [{kind: B}, {kind: C}]\n---\nkind: D\n";
        let (objects, unreadable) = objects(&secret(manifest)).unwrap();
        let expected = json!([{"kind": "A", "x": 384, "y": true}, {"kind": "B"}, {"kind": "C"}, {"kind": "D"}]);
        assert_eq!((Value::from(objects), unreadable), (expected, 0));
    }

    #[test]
    fn unparsable_document_is_counted_and_others_are_read() {
        let (objects, unreadable) = objects(&secret("{\n---\nkind: A\n---\n\n")).unwrap();
        assert_eq!((objects.len(), unreadable), (1, 1));
    }

    #[test]
    fn anything_with_items_is_a_list() {
        let (objects, unreadable) = read("kind: Shelf\nitems: [{kind: A}, {items: [{kind: B}]}]\n");
        assert_eq!(
            (Value::from(objects), unreadable),
            (json!([{"kind": "A"}, {"kind": "B"}]), 0)
        );
        let (objects, unreadable) = read("kind: Shelf\nitems: {a: b}\n---\nwords\n---\n- 1\n");
        let expected = json!([{"kind": "Shelf", "items": {"a": "b"}}]);
        assert_eq!((Value::from(objects), unreadable), (expected, 2));
    }

    #[test]
    fn secret_without_release_is_error() {
        assert!(matches!(
            objects(&Secret::default()),
            Err(ReleaseError::Missing { .. })
        ));
    }
}
