//! The three APIs of Krypton as Rust types, and the CRDs generated from them.
//!
//! It imports no other crate of Krypton.

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

/// Rises with every change of a schema. A CRD on a cluster with this number or a higher one is left
/// alone, so that two versions of Krypton on one cluster do not take turns.
pub const SCHEMA_VERSION: u32 = 12;

/// The annotation of a CRD that holds its `SCHEMA_VERSION`.
pub const SCHEMA_VERSION_ANNOTATION: &str = "mesh.openkcm.io/schema-version";

/// An annotation for what outlives a release. What a chart has installed and somebody deleted, and what
/// Krypton then recreated, would go with the chart's next upgrade; with a CRD go all its objects
/// (<https://helm.sh/docs/howto/charts_tips_and_tricks/#tell-helm-not-to-uninstall-a-resource>).
pub const HELM_KEEPS: [&str; 2] = ["helm.sh/resource-policy", "keep"];

/// All CRDs, as they are applied. They need Kubernetes 1.30: for `optionalOldSelf` in their rules,
/// and so that objects stored under an older schema are only held to what is changed in them.
pub fn all() -> Vec<CustomResourceDefinition> {
    vec![Tenant::crd(), KryptonDeployment::crd(), EdgeCluster::crd()]
}

/// The schema version that a CRD says it has. `None` (no annotation, or no number in it) is older
/// than all of ours: the original's CRDs have none.
pub fn schema_version(crd: &CustomResourceDefinition) -> Option<u32> {
    schema_version_of(&crd.metadata)
}

/// The same out of the CRD's metadata.
pub fn schema_version_of(metadata: &ObjectMeta) -> Option<u32> {
    metadata
        .annotations
        .as_ref()?
        .get(SCHEMA_VERSION_ANNOTATION)?
        .parse()
        .ok()
}

/// All CRDs as YAML for kubectl, by file name (`<plural>.<group>.yaml`).
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
    all().iter().map(manifest).collect()
}
