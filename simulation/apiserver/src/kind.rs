//! A kind of objects: its names, paths and types.

use std::sync::Arc;

use serde_json::Value;

use crate::fields::schema::Schema;
use crate::key::Key;
use crate::schema::StructuralSchema;

/// Which changes increment `metadata.generation`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Generation {
    /// The objects have no generation.
    None,
    /// Changes outside metadata and status.
    Spec,
    /// Changes outside metadata, for custom resources without a status subresource.
    Content,
    /// Also changes of annotations, for Deployments.
    SpecAndAnnotations,
}

/// Converts an object to the form of its type.
pub(crate) type Normalize = fn(&Value) -> Result<Value, String>;

/// A kind of objects in one version.
#[derive(Debug)]
pub(crate) struct Kind {
    pub(crate) group: String,
    pub(crate) version: String,
    /// Plural, such as `tenants`.
    pub(crate) resource: String,
    pub(crate) singular: String,
    pub(crate) kind: String,
    pub(crate) list_kind: String,
    pub(crate) namespaced: bool,
    /// Whether there is a subresource `status`.
    pub(crate) has_status: bool,
    pub(crate) generation: Generation,
    /// Whether an update without `resourceVersion` is allowed.
    pub(crate) allows_unconditional_update: bool,
    /// Whether a PUT creates a missing object.
    pub(crate) create_on_update: bool,
    /// Folder of the objects in etcd, which some messages contain.
    pub(crate) etcd_folder: String,
    pub(crate) short_names: Vec<String>,
    pub(crate) categories: Vec<String>,
    /// Converts an object to the form of its type.
    pub(crate) normalize: Option<Normalize>,
    /// Types of the fields, for field managers.
    pub(crate) fields: Option<Schema>,
    /// Schema of a custom resource.
    pub(crate) schema: Option<Arc<StructuralSchema>>,
    /// `apiVersion` of stored objects.
    pub(crate) stored_api_version: String,
}

impl Kind {
    pub(crate) fn api_version(&self) -> String {
        match self.group.as_str() {
            "" => self.version.clone(),
            group => format!("{group}/{}", self.version),
        }
    }

    /// Returns the resource with its group, such as `tenants.mesh.openkcm.io`.
    pub(crate) fn group_resource(&self) -> String {
        match self.group.as_str() {
            "" => self.resource.clone(),
            group => format!("{}.{group}", self.resource),
        }
    }

    pub(crate) fn is_custom(&self) -> bool {
        self.schema.is_some()
    }

    pub(crate) fn is(&self, group: &str, resource: &str) -> bool {
        self.group == group && self.resource == resource
    }

    /// Returns the group under which the objects are stored.
    pub(crate) fn stored_group(&self) -> &str {
        match self.group.as_str() {
            "events.k8s.io" => "",
            group => group,
        }
    }

    pub(crate) fn key(&self, namespace: &str, name: &str) -> Key {
        Key::new(self.stored_group(), &self.resource, namespace, name)
    }

    /// Returns the object's path in etcd.
    pub(crate) fn etcd_path(&self, namespace: &str, name: &str) -> String {
        match namespace {
            "" => format!("/registry/{}/{name}", self.etcd_folder),
            namespace => format!("/registry/{}/{namespace}/{name}", self.etcd_folder),
        }
    }

    /// Whether a DELETE returns the removed object instead of a status.
    pub(crate) fn returns_deleted(&self) -> bool {
        const RETURNED: [&str; 4] = [
            "pods",
            "serviceaccounts",
            "persistentvolumeclaims",
            "resourcequotas",
        ];
        self.group.is_empty() && RETURNED.contains(&&*self.resource)
    }

    pub(crate) fn has_field_selector(&self, field: &str) -> bool {
        let selectable: &[&str] = match (self.group.as_str(), self.resource.as_str()) {
            ("", "secrets") => &["type"],
            ("", "pods") => &["spec.nodeName", "status.phase"],
            ("", "namespaces") => &["status.phase"],
            ("", "events") => &[
                "involvedObject.kind",
                "involvedObject.name",
                "involvedObject.namespace",
                "involvedObject.uid",
                "reason",
                "type",
            ],
            _ => &[],
        };
        field == "metadata.name"
            || (field == "metadata.namespace" && self.namespaced)
            || selectable.contains(&field)
    }
}
