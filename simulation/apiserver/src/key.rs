//! Identities of objects.

/// Identity of an object.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Key {
    /// Empty for the core group. Events of `events.k8s.io` belong to the core group too.
    pub group: String,
    /// Plural, such as `tenants`.
    pub resource: String,
    /// Empty for cluster-scoped objects.
    pub namespace: String,
    pub name: String,
}

impl Key {
    pub fn new(group: &str, resource: &str, namespace: &str, name: &str) -> Self {
        Self {
            group: group.to_owned(),
            resource: resource.to_owned(),
            namespace: namespace.to_owned(),
            name: name.to_owned(),
        }
    }

    /// Returns the key of a CRD.
    pub fn of_crd(name: &str) -> Self {
        let group = "apiextensions.k8s.io";
        Self::new(group, "customresourcedefinitions", "", name)
    }
}
