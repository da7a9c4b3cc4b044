//! Tests of the checked-in CRDs and sample objects.

use std::{collections::BTreeMap, fs, io, path::Path};

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use krypton_crds::{
    SCHEMA_VERSION, edge_cluster::EdgeCluster, krypton_deployment::KryptonDeployment,
    schema_version, tenant::Tenant,
};
use serde_json::Value;

fn files(folder: &str) -> io::Result<BTreeMap<String, String>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join(folder);
    let mut files = BTreeMap::new();
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        files.insert(name, fs::read_to_string(entry.path())?);
    }
    Ok(files)
}

#[test]
fn generated_files_are_current() {
    assert!(
        files("crds").unwrap() == krypton_crds::manifests(),
        "crds/crds/*.yaml are stale; run: cargo run -p krypton-crds --example crdgen"
    );
}

#[test]
fn generated_manifest_reads_back_as_crd_without_status() {
    let read: BTreeMap<String, CustomResourceDefinition> = krypton_crds::manifests()
        .into_iter()
        .map(|(name, yaml)| (name, serde_saphyr::from_str(&yaml).unwrap()))
        .collect();
    for crd in krypton_crds::all() {
        let name = format!("{}.yaml", crd.metadata.name.as_deref().unwrap());
        assert_eq!(&read[&name], crd, "{name}");
        assert_eq!(crd.status, None, "{name}");
    }
}

#[test]
fn crds_have_schema_version_and_invalid_is_ignored() {
    for mut crd in krypton_crds::all().map(Clone::clone) {
        assert_eq!(schema_version(&crd.metadata), Some(SCHEMA_VERSION));
        let annotations = crd.metadata.annotations.as_mut().unwrap();
        annotations.insert(
            "mesh.openkcm.io/schema-version".to_owned(),
            "newest".to_owned(),
        );
        assert_eq!(schema_version(&crd.metadata), None);
        crd.metadata.annotations = None;
        assert_eq!(schema_version(&crd.metadata), None);
    }
}

#[test]
fn nothing_in_a_schema_is_nullable() {
    for (name, yaml) in krypton_crds::manifests() {
        assert!(!yaml.contains("nullable"), "{name}");
        assert!(!yaml.contains("uint"), "{name}");
    }
}

#[test]
fn every_sample_object_of_the_original_decodes() {
    let samples = files("testdata/original").unwrap();
    assert!(samples.len() > 5);
    for (name, yaml) in samples {
        let object: Value = serde_saphyr::from_str(&yaml).unwrap();
        let decoded = match object["kind"].as_str().unwrap() {
            "Tenant" => serde_json::from_value::<Tenant>(object).map(drop),
            "KryptonDeployment" => serde_json::from_value::<KryptonDeployment>(object).map(drop),
            "EdgeCluster" => serde_json::from_value::<EdgeCluster>(object).map(drop),
            kind => panic!("{name}: {kind}"),
        };
        decoded.unwrap_or_else(|error| panic!("{name}: {error}"));
    }
}
