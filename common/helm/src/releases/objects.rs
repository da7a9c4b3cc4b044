//! Objects in a revision's manifest, and the difference between two manifests.

use std::collections::BTreeSet;
use std::fmt;

use k8s_openapi::api::core::v1::Secret;
use serde_json::Value;

use super::{ReleaseError, manifest};

/// Identity of an object in a manifest or a cluster.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ObjectId {
    pub api_version: String,
    pub kind: String,
    /// `None` for a cluster-scoped object, or if the manifest names none: then Helm uses the release's namespace.
    pub namespace: Option<String>,
    pub name: String,
}

/// The objects in a manifest.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Declarations {
    pub objects: BTreeSet<ObjectId>,
    /// Number of unreadable documents. They may declare any object.
    pub unreadable: usize,
}

impl Declarations {
    fn new((objects, unreadable): (Vec<Value>, usize)) -> Self {
        let mut declarations = Self {
            objects: BTreeSet::new(),
            unreadable,
        };
        for object in &objects {
            match ObjectId::from_object(object) {
                Some(id) => drop(declarations.objects.insert(id)),
                None => declarations.unreadable += 1,
            }
        }
        declarations
    }
}

impl fmt::Display for ObjectId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.namespace {
            Some(namespace) => write!(f, "{} {namespace}/{}", self.kind, self.name),
            None => write!(f, "{} {}", self.kind, self.name),
        }
    }
}

impl ObjectId {
    /// Returns the identity of the object in a manifest. `None` if it lacks an API version, a kind or a name.
    pub fn from_object(object: &Value) -> Option<Self> {
        let text = |pointer: &str| {
            let text = object.pointer(pointer).and_then(Value::as_str);
            text.filter(|text| !text.is_empty()).map(str::to_owned)
        };
        Some(Self {
            api_version: text("/apiVersion")?,
            kind: text("/kind")?,
            namespace: text("/metadata/namespace"),
            name: text("/metadata/name")?,
        })
    }

    fn group(&self) -> Option<&str> {
        self.api_version.rsplit_once('/').map(|(group, _)| group)
    }

    /// Returns what identifies the object regardless of its API version, in `namespace` if it names none.
    fn identity<'a>(&'a self, namespace: &'a str) -> (Option<&'a str>, &'a str, &'a str, &'a str) {
        let namespace = self.namespace.as_deref().unwrap_or(namespace);
        (self.group(), &self.kind, namespace, &self.name)
    }
}

/// Returns all objects of a revision except its hooks, which Helm stores separately.
///
/// # Errors
/// See [`super::decode`].
pub fn objects(secret: &Secret) -> Result<Declarations, ReleaseError> {
    manifest::objects(secret).map(Declarations::new)
}

/// Returns the objects of `former` that `kept` lacks, regardless of their API version. Both belong to one
/// release, and `namespace` applies to objects without one. For cluster-scoped objects, see
/// [`declares_anywhere`]. Returns `None` if a document of `kept` is unreadable, because then no object is
/// certainly left over.
pub fn leftovers(
    former: &Declarations,
    kept: &Declarations,
    namespace: &str,
) -> Option<Vec<ObjectId>> {
    let kept_objects = kept.objects.iter();
    let kept_objects: BTreeSet<_> = kept_objects
        .map(|object| object.identity(namespace))
        .collect();
    let is_left = |object: &&ObjectId| !kept_objects.contains(&object.identity(namespace));
    (kept.unreadable == 0).then(|| former.objects.iter().filter(is_left).cloned().collect())
}

/// Namespace in which krypton-operator created objects without a namespace: the default of its kubeconfig.
pub const ORIGINALS_NAMESPACE: &str = "default";

/// Returns the objects in `default` for which `adopted`, a revision of krypton-operator, gives no namespace.
/// Omits the objects that `kept` declares there. Returns none if `default` is the release's `namespace`.
/// Returns `None` in the same case as [`leftovers`].
pub fn leftovers_in_default(
    adopted: &Declarations,
    kept: &Declarations,
    namespace: &str,
) -> Option<Vec<ObjectId>> {
    if namespace == ORIGINALS_NAMESPACE {
        return Some(Vec::new());
    }
    let in_default = |object: &ObjectId| ObjectId {
        namespace: Some(ORIGINALS_NAMESPACE.to_owned()),
        ..object.clone()
    };
    let objects = adopted.objects.iter();
    let without_namespace = objects.filter(|object| object.namespace.is_none());
    let created_in_default = Declarations {
        objects: without_namespace.map(in_default).collect(),
        unreadable: adopted.unreadable,
    };
    leftovers(&created_in_default, kept, namespace)
}

/// Returns whether `kept` declares an object of that kind and name in any namespace. For a cluster-scoped
/// kind, this is the same object, because the API server ignores the namespace of the manifest.
pub fn declares_anywhere(kept: &Declarations, object: &ObjectId) -> bool {
    kept.objects.iter().any(|other| {
        other.kind == object.kind && other.name == object.name && other.group() == object.group()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn declarations(yaml: &str) -> Declarations {
        Declarations::new(manifest::read(yaml))
    }

    #[test]
    fn leftovers_are_matched_by_group_kind_and_place() {
        let former = declarations(
            "---\n# Source: a\napiVersion: v1\nkind: ConfigMap\nmetadata: {name: stays}\n\
             ---\napiVersion: v1\nkind: ConfigMap\nmetadata: {name: gone}\n\
             ---\napiVersion: apps/v1beta1\nkind: Deployment\nmetadata: {name: newer}\n\
             ---\napiVersion: v1\nkind: List\nitems: [{apiVersion: v1, kind: Secret, metadata: {name: listed}}]\n\
             ---\nnot: an object\n---\n: [broken\n",
        );
        let kept = declarations(
            "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: stays, namespace: acme}\n\
             ---\napiVersion: apps/v1\nkind: Deployment\nmetadata: {name: newer}\n\
             ---\napiVersion: v1\nkind: ConfigMap\nmetadata: {name: gone, namespace: elsewhere}\n",
        );
        assert_eq!(former.unreadable, 2);
        let names: Vec<String> = leftovers(&former, &kept, "acme")
            .unwrap()
            .into_iter()
            .map(|object| object.name)
            .collect();
        assert_eq!(names, ["gone", "listed"]);
        assert_eq!(leftovers(&kept, &kept, "acme"), Some(Vec::new()));
    }

    #[test]
    fn unreadable_document_removes_nothing() {
        let former = declarations("apiVersion: v1\nkind: ConfigMap\nmetadata: {name: live}\n");
        let kept = declarations(
            "apiVersion: v1\nkind: Secret\nmetadata: {name: other}\n\
             ---\napiVersion: v1\nkind: ConfigMap\nmetadata: {name: live}\ndata: {a: [broken}\n",
        );
        assert_eq!(leftovers(&former, &kept, "acme"), None);
        assert_eq!(leftovers_in_default(&former, &kept, "acme"), None);
        let nameless =
            declarations("apiVersion: v1\nkind: ConfigMap\nmetadata: {labels: {a: b}}\n");
        assert_eq!(leftovers(&former, &nameless, "acme"), None);
    }

    #[test]
    fn cluster_scoped_object_matches_despite_namespace() {
        let role = |version: &str, namespace: &str| {
            declarations(&format!(
                "apiVersion: rbac.authorization.k8s.io/{version}\nkind: ClusterRole\n\
                 metadata: {{name: reads, namespace: '{namespace}'}}\n"
            ))
        };
        let (former, kept) = (role("v1beta1", "one"), role("v1", "two"));
        let object = leftovers(&former, &kept, "acme").unwrap().pop().unwrap();
        assert!(declares_anywhere(&kept, &object));
        assert!(!declares_anywhere(
            &declarations("apiVersion: v1\nkind: ClusterRole\nmetadata: {name: reads}"),
            &object
        ));
        assert!(!declares_anywhere(&Declarations::default(), &object));
    }

    #[test]
    fn namespaceless_object_is_left_in_default_unless_redeclared() {
        let adopted = declarations(
            "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: plain}\n\
             ---\napiVersion: v1\nkind: ConfigMap\nmetadata: {name: placed, namespace: acme}\n\
             ---\napiVersion: v1\nkind: ConfigMap\nmetadata: {name: taken}\n",
        );
        let kept = declarations(
            "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: plain}\n\
             ---\napiVersion: v1\nkind: ConfigMap\nmetadata: {name: taken, namespace: default}\n",
        );
        let leftovers = leftovers_in_default(&adopted, &kept, "acme").unwrap();
        let names: Vec<_> = leftovers
            .iter()
            .map(|object| object.name.as_str())
            .collect();
        assert_eq!(names, ["plain"]);
        assert_eq!(leftovers[0].namespace.as_deref(), Some("default"));
        assert_eq!(
            leftovers_in_default(&adopted, &kept, "default"),
            Some(Vec::new())
        );
    }
}
