//! The objects of a release: what its manifest declares, hooks left out.

use k8s_openapi::api::core::v1::Secret;
use serde::Deserialize;
use serde_json::Value;

use super::{ReleaseError, documents, full_name, payload};

#[derive(Deserialize)]
struct Stored {
    manifest: Option<String>,
}

/// Reads the manifest of a release Secret, and takes its lists apart. The second is how many documents and
/// items cannot be read.
///
/// # Errors
/// As [`super::decode`], but for the name.
pub fn objects(secret: &Secret) -> Result<(Vec<Value>, usize), ReleaseError> {
    let stored: Stored =
        serde_json::from_reader(payload(secret)?).map_err(|source| ReleaseError::Unreadable {
            secret: full_name(secret),
            source,
        })?;
    Ok(read(&stored.manifest.unwrap_or_default()))
}

/// The objects of a text of several documents.
pub fn read(text: &str) -> (Vec<Value>, usize) {
    let (mut objects, mut unread) = (Vec::new(), 0);
    for document in documents(text) {
        unread += usize::from(!read_document(&document, &mut objects));
    }
    (objects, unread)
}

/// Adds the objects of one document to `found`. False when not all of it can be read.
pub(crate) fn read_document(document: &str, found: &mut Vec<Value>) -> bool {
    // As helm's parser has it: of two equal keys the last, and numbers with a 0 before them in octal.
    let options = serde_saphyr::options! {
        duplicate_keys: serde_saphyr::DuplicateKeyPolicy::LastWins,
        legacy_octal_numbers: true,
        with_snippet: false,
    };
    match serde_saphyr::from_str_with_options::<Value>(document, options) {
        Ok(object) => collect(object, found),
        // Nothing but comments.
        Err(_) => blank(document),
    }
}

/// Takes lists apart. Like Helm, it reads any object with an array `items` as a list.
fn collect(mut object: Value, found: &mut Vec<Value>) -> bool {
    if let Some(Value::Array(items)) = object.get_mut("items") {
        let mut whole = true;
        for item in std::mem::take(items) {
            whole &= collect(item, found);
        }
        return whole;
    }
    if object.is_object() {
        found.push(object);
        return true;
    }
    object.is_null()
}

fn blank(document: &str) -> bool {
    document
        .lines()
        .map(str::trim)
        .all(|line| line.is_empty() || line.starts_with('#'))
}

#[cfg(test)]
mod tests {
    use k8s_openapi::ByteString;
    use serde_json::json;

    use super::*;
    use crate::releases::{DATA_KEY, pack};

    fn secret(manifest: &str) -> Secret {
        let json = json!({"name": "a", "version": 1, "manifest": manifest}).to_string();
        let data = ByteString(pack(json.as_bytes()).unwrap());
        Secret {
            data: Some([(DATA_KEY.to_owned(), data)].into()),
            ..Secret::default()
        }
    }

    #[test]
    fn manifest_objects_parse_like_helm() {
        let manifest = "---\n# Source: a\n---\nkind: A\nx: 0644\ny: yes\nx: 0600\n--- # two\n\
                        kind: ConfigMapList\nitems: [{kind: B}, {kind: C}]\n---\nkind: D\n";
        let (objects, unread) = objects(&secret(manifest)).unwrap();
        let expected = json!([{"kind": "A", "x": 384, "y": true}, {"kind": "B"}, {"kind": "C"}, {"kind": "D"}]);
        assert_eq!((Value::from(objects), unread), (expected, 0));
    }

    #[test]
    fn unparsable_document_is_counted_and_others_are_read() {
        let (objects, unread) = objects(&secret("{\n---\nkind: A\n---\n\n")).unwrap();
        assert_eq!((objects.len(), unread), (1, 1));
    }

    #[test]
    fn anything_with_items_is_a_list() {
        let (objects, unread) = read("kind: Shelf\nitems: [{kind: A}, {items: [{kind: B}]}]\n");
        assert_eq!(
            (Value::from(objects), unread),
            (json!([{"kind": "A"}, {"kind": "B"}]), 0)
        );
        let (objects, unread) = read("kind: Shelf\nitems: {a: b}\n---\nwords\n---\n- 1\n");
        let expected = json!([{"kind": "Shelf", "items": {"a": "b"}}]);
        assert_eq!((Value::from(objects), unread), (expected, 2));
    }

    #[test]
    fn secret_without_release_is_error() {
        assert!(matches!(
            objects(&Secret::default()),
            Err(ReleaseError::Missing { .. })
        ));
    }
}
