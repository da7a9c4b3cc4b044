//! Defines the three APIs of Krypton as Rust types, and generates the CRDs from them.
//!
//! Imports no other crate of Krypton.

mod condition_list;
pub mod edge_cluster;
mod free_form;
pub mod krypton_deployment;
mod published;
pub mod tenant;

use std::collections::BTreeMap;

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use crate::{edge_cluster::EdgeCluster, krypton_deployment::KryptonDeployment, tenant::Tenant};

/// Version of the schemas. Increase it with every change. Krypton does not replace a CRD with this or a higher version,
/// because two versions of Krypton on one cluster would otherwise alternate.
pub const SCHEMA_VERSION: u32 = 18;

/// Annotation of a CRD with its `SCHEMA_VERSION`.
pub const SCHEMA_VERSION_ANNOTATION: &str = "mesh.openkcm.io/schema-version";

/// Annotation of objects that outlive a release. Without it, the next upgrade of a chart would delete a CRD that Krypton
/// recreated, with all its objects
/// (<https://helm.sh/docs/howto/charts_tips_and_tricks/#tell-helm-not-to-uninstall-a-resource>).
pub const HELM_KEEP_POLICY: [&str; 2] = ["helm.sh/resource-policy", "keep"];

/// Returns all CRDs. They need Kubernetes 1.30 for `optionalOldSelf` in rules and for validation ratcheting, which
/// accepts unchanged fields that an older schema has stored.
pub fn all() -> [&'static CustomResourceDefinition; 3] {
    [Tenant::crd(), KryptonDeployment::crd(), EdgeCluster::crd()]
}

/// Returns the schema version from the metadata of a CRD. `None` (annotation missing or not a number) is older than
/// every version: CRDs of krypton-operator have none.
pub fn schema_version(metadata: &ObjectMeta) -> Option<u32> {
    metadata
        .annotations
        .as_ref()?
        .get(SCHEMA_VERSION_ANNOTATION)?
        .parse()
        .ok()
}

/// Returns whether a field can be left out because it has its default value.
pub fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

/// Returns all CRDs as YAML for kubectl, by file name (`<plural>.<group>.yaml`).
pub fn manifests() -> BTreeMap<String, String> {
    let options = serde_saphyr::ser_options! { prefer_block_scalars: false };
    let manifest = |crd: &CustomResourceDefinition| {
        let name = crd
            .metadata
            .name
            .as_deref()
            .expect("the derive names every CRD");
        let yaml = serde_saphyr::to_string_with_options(crd, options.clone())
            .expect("a CRD is strings, numbers, lists and maps with string keys");
        (format!("{name}.yaml"), yaml)
    };
    all().into_iter().map(manifest).collect()
}
