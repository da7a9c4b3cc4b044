//! What a revision's manifest declares, and what of it another does not.

use std::collections::BTreeSet;

use k8s_openapi::api::core::v1::Secret;
use serde_json::Value;

use super::{ReleaseError, documents, stored};

/// An object that a release's manifest declares.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Declared {
    pub api_version: String,
    pub kind: String,
    /// As the manifest has it; helm puts those without one into the release's, where they can be in one.
    pub namespace: Option<String>,
    pub name: String,
}

/// All objects of a revision but its hooks, which helm keeps apart.
///
/// # Errors
/// As [`super::decode`].
pub fn objects(secret: &Secret) -> Result<BTreeSet<Declared>, ReleaseError> {
    let manifest = stored(secret)?.manifest.unwrap_or_default();
    let mut found = BTreeSet::new();
    for document in documents(&manifest) {
        let options = serde_saphyr::options! {
            duplicate_keys: serde_saphyr::DuplicateKeyPolicy::LastWins,
            with_snippet: false,
        };
        // What does not parse declares nothing that could be removed.
        if let Ok(object) = serde_saphyr::from_str_with_options::<Value>(&document, options) {
            collect(&object, &mut found);
        }
    }
    Ok(found)
}

fn collect(object: &Value, found: &mut BTreeSet<Declared>) {
    let text = |pointer: &str| {
        let text = object.pointer(pointer).and_then(Value::as_str);
        text.filter(|text| !text.is_empty()).map(str::to_owned)
    };
    if let Some(items) = object["items"].as_array() {
        items.iter().for_each(|item| collect(item, found));
    } else if let (Some(api_version), Some(kind), Some(name)) =
        (text("/apiVersion"), text("/kind"), text("/metadata/name"))
    {
        found.insert(Declared {
            api_version,
            kind,
            namespace: text("/metadata/namespace"),
            name,
        });
    }
}

/// What `former` declares and `kept` does not, in whatever version of its API. The two are of one release,
/// whose `namespace` is meant where none is written. Of what is in no namespace, whatever is written, see
/// [`declares_anywhere`].
pub fn left_over(
    former: &BTreeSet<Declared>,
    kept: &BTreeSet<Declared>,
    namespace: &str,
) -> Vec<Declared> {
    let identity = |object: &Declared| {
        let group = object.api_version.rsplit_once('/');
        (
            group.map(|(group, _)| group.to_owned()),
            object.kind.clone(),
            object
                .namespace
                .clone()
                .unwrap_or_else(|| namespace.to_owned()),
            object.name.clone(),
        )
    };
    let kept: BTreeSet<_> = kept.iter().map(identity).collect();
    let gone = |object: &&Declared| !kept.contains(&identity(object));
    former.iter().filter(gone).cloned().collect()
}

/// Where the original has created what a manifest gives no namespace: its kubeconfig pointed nowhere else
/// (reference 1.8, "Observed by running").
pub const ORIGINALS_NAMESPACE: &str = "default";

/// Where the original has put what `adopted`, a revision that it wrote, gives no namespace: in `default`. What
/// `kept` places there itself is left out, and so is all of a release whose own `namespace` that is.
pub fn in_default(
    adopted: &BTreeSet<Declared>,
    kept: &BTreeSet<Declared>,
    namespace: &str,
) -> Vec<Declared> {
    if namespace == ORIGINALS_NAMESPACE {
        return Vec::new();
    }
    let there = |object: &Declared| Declared {
        namespace: Some(ORIGINALS_NAMESPACE.to_owned()),
        ..object.clone()
    };
    let without = adopted.iter().filter(|object| object.namespace.is_none());
    left_over(&without.map(there).collect(), kept, namespace)
}

/// Whether `kept` declares one of that kind and name in whatever namespace: of a kind that is in none, it
/// is the same object, since the apiserver ignores a namespace that a manifest has for it.
pub fn declares_anywhere(kept: &BTreeSet<Declared>, object: &Declared) -> bool {
    let group = |object: &Declared| {
        let group = object.api_version.rsplit_once('/');
        group.map(|(group, _)| group.to_owned())
    };
    kept.iter().any(|other| {
        other.kind == object.kind && other.name == object.name && group(other) == group(object)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(yaml: &str) -> BTreeSet<Declared> {
        let mut found = BTreeSet::new();
        for document in documents(yaml) {
            if let Ok(object) = serde_saphyr::from_str::<Value>(&document) {
                collect(&object, &mut found);
            }
        }
        found
    }

    #[test]
    fn what_only_the_former_declares_is_left_over_by_group_kind_and_place() {
        let former = of(
            "---\n# Source: a\napiVersion: v1\nkind: ConfigMap\nmetadata: {name: stays}\n\
             ---\napiVersion: v1\nkind: ConfigMap\nmetadata: {name: gone}\n\
             ---\napiVersion: apps/v1beta1\nkind: Deployment\nmetadata: {name: newer}\n\
             ---\napiVersion: v1\nkind: List\nitems: [{apiVersion: v1, kind: Secret, metadata: {name: listed}}]\n\
             ---\nnot: an object\n---\n: [broken\n",
        );
        let kept = of(
            "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: stays, namespace: acme}\n\
             ---\napiVersion: apps/v1\nkind: Deployment\nmetadata: {name: newer}\n\
             ---\napiVersion: v1\nkind: ConfigMap\nmetadata: {name: gone, namespace: elsewhere}\n",
        );
        let names: Vec<String> = left_over(&former, &kept, "acme")
            .into_iter()
            .map(|object| object.name)
            .collect();
        assert_eq!(names, ["gone", "listed"]);
        assert_eq!(left_over(&former, &former, "acme"), []);
    }

    #[test]
    fn of_a_kind_without_namespaces_it_is_the_same_whatever_namespace_is_written() {
        let role = |version: &str, namespace: &str| {
            of(&format!(
                "apiVersion: rbac.authorization.k8s.io/{version}\nkind: ClusterRole\n\
                 metadata: {{name: reads, namespace: '{namespace}'}}\n"
            ))
        };
        let (former, kept) = (role("v1beta1", "one"), role("v1", "two"));
        let object = left_over(&former, &kept, "acme").pop().unwrap();
        assert!(declares_anywhere(&kept, &object));
        assert!(!declares_anywhere(
            &of("apiVersion: v1\nkind: ClusterRole\nmetadata: {name: reads}"),
            &object
        ));
        assert!(!declares_anywhere(&BTreeSet::new(), &object));
    }

    #[test]
    fn what_has_no_namespace_is_in_default_unless_it_is_placed_there() {
        let adopted = of("apiVersion: v1\nkind: ConfigMap\nmetadata: {name: plain}\n\
             ---\napiVersion: v1\nkind: ConfigMap\nmetadata: {name: placed, namespace: acme}\n\
             ---\napiVersion: v1\nkind: ConfigMap\nmetadata: {name: taken}\n");
        let kept = of("apiVersion: v1\nkind: ConfigMap\nmetadata: {name: plain}\n\
             ---\napiVersion: v1\nkind: ConfigMap\nmetadata: {name: taken, namespace: default}\n");
        let found = in_default(&adopted, &kept, "acme");
        let names: Vec<_> = found.iter().map(|object| object.name.as_str()).collect();
        assert_eq!(names, ["plain"]);
        assert_eq!(found[0].namespace.as_deref(), Some("default"));
        assert_eq!(in_default(&adopted, &kept, "default"), []);
    }
}
