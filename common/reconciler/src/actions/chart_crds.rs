//! Updates the CRDs in a chart's folder `crds` before an upgrade. Helm creates them with the first installation and
//! never updates them. Krypton never deletes them.

use std::io::{self, Read};
use std::path::{Path, PathBuf};

use flate2::read::MultiGzDecoder;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use krypton_helm::releases::manifest;
use krypton_runtime::call::{ApiError, call};
use krypton_runtime::crd;
use krypton_types::names;
use kube::api::{Api, Patch, PatchParams};
use kube::{Client, ResourceExt};
use serde_json::Value;
use tar::Archive;
use thiserror::Error;

use crate::drift::HELM;

/// Limit for all data that is read from an archive, unpacked. The chart cache accepts no larger chart.
const MAX_UNPACKED: u64 = 100 << 20;
/// Number of attempts if another client writes at the same time.
const MAX_ATTEMPTS: u32 = 3;

#[derive(Debug, Error)]
pub(crate) enum ChartCrdError {
    #[error("reading the CRDs of the chart {path} failed", path = path.display())]
    Archive {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("{file} of the chart is not valid YAML; correct the chart")]
    Yaml { file: String },
    #[error(transparent)]
    Read(#[from] ApiError),
    #[error("failed to update CRD {name}; apply it yourself, or use --chart-crds=create")]
    Write { name: String, source: ApiError },
    #[error("CRD {name} belongs to {owner} and stays unchanged; use --chart-crds=create")]
    OtherOwner { name: String, owner: String },
    #[error("CRD {name} exists, but the API server does not serve it yet")]
    NotServed { name: String },
    #[error("lost the Lease of this cluster")]
    NotPermitted,
}

/// Returns the CRDs of a packaged chart, without its subcharts: only Helm knows whether a subchart is in use. Slow
/// for large charts, so don't call it on async threads.
pub(crate) fn read_chart_crds(path: &Path) -> Result<Vec<Value>, ChartCrdError> {
    let archive_error = |source| ChartCrdError::Archive {
        path: path.to_owned(),
        source,
    };
    let file = std::fs::File::open(path).map_err(archive_error)?;
    let mut tar = Archive::new(MultiGzDecoder::new(file).take(MAX_UNPACKED));
    let mut crds = Vec::new();
    for entry in tar.entries().map_err(archive_error)? {
        let mut entry = entry.map_err(archive_error)?;
        let name = String::from_utf8_lossy(&entry.path_bytes()).into_owned();
        let path_in_chart = name.split_once('/').map(|(_, path_in_chart)| path_in_chart);
        let is_in_crds_folder =
            path_in_chart.is_some_and(|path_in_chart| path_in_chart.starts_with("crds/"));
        let is_manifest = [".yaml", ".yml", ".json"]
            .iter()
            .any(|end| name.ends_with(end));
        if !(is_in_crds_folder && is_manifest && entry.header().entry_type().is_file()) {
            continue;
        }
        let mut text = String::new();
        entry.read_to_string(&mut text).map_err(archive_error)?;
        let (objects, unread) = manifest::read(&text);
        if unread > 0 {
            return Err(ChartCrdError::Yaml { file: name });
        }
        let is_crd = |object: &Value| object["kind"] == "CustomResourceDefinition";
        crds.extend(objects.into_iter().filter(is_crd));
    }
    Ok(crds)
}

/// Applies each CRD, and waits until the API server serves it.
pub(crate) async fn replace(
    client: &Client,
    crds: &[Value],
    permitted: impl Fn() -> bool,
) -> Result<(), ChartCrdError> {
    let api: Api<CustomResourceDefinition> = Api::all(client.clone());
    for crd in crds {
        let name = crd.pointer("/metadata/name").and_then(Value::as_str);
        let name = name.unwrap_or_default().to_owned();
        let mut attempts = 0;
        while !apply(&api, &name, crd, &permitted).await? {
            attempts += 1;
            if attempts == MAX_ATTEMPTS {
                return Err(ChartCrdError::NotServed { name });
            }
        }
        let waiting = crd::wait_until_established(&api, &name);
        let waited = tokio::time::timeout(crd::SERVED_TIMEOUT, waiting).await;
        waited.map_err(|_| ChartCrdError::NotServed { name })?;
    }
    Ok(())
}

/// Applies a CRD. Returns `false` if another client wrote it at the same time.
async fn apply(
    api: &Api<CustomResourceDefinition>,
    name: &str,
    crd: &Value,
    permitted: &impl Fn() -> bool,
) -> Result<bool, ChartCrdError> {
    let existing = call(format!("reading CRD {name}"), api.get_opt(name)).await?;
    if let Some(owner) = owner(name, existing.as_ref()) {
        let name = name.to_owned();
        return Err(ChartCrdError::OtherOwner { name, owner });
    }
    let mut desired = crd.clone();
    if let (Some(existing), Some(meta)) = (&existing, desired.pointer_mut("/metadata")) {
        meta["uid"] = existing.uid().into();
        meta["resourceVersion"] = existing.resource_version().into();
    }
    if !permitted() {
        return Err(ChartCrdError::NotPermitted);
    }
    let params = PatchParams {
        // Don't take over a CRD that another client has just created.
        force: existing.is_some(),
        ..PatchParams::apply(HELM)
    };
    let patch = Patch::Apply(&desired);
    let applying = api.patch(name, &params, &patch);
    match call(format!("applying CRD {name}"), applying).await {
        Ok(_) => Ok(true),
        Err(error) if error.code() == Some(409) => Ok(false),
        Err(source) => Err(ChartCrdError::Write {
            name: name.to_owned(),
            source,
        }),
    }
}

/// Returns the CRD's owner: Krypton, or a release that has the CRD in its templates.
fn owner(name: &str, existing: Option<&CustomResourceDefinition>) -> Option<String> {
    if name.ends_with(&format!(".{}", names::GROUP)) {
        return Some("Krypton".to_owned());
    }
    let annotations = existing?.annotations();
    let release = annotations.get("meta.helm.sh/release-name")?;
    Some(format!("release {release}"))
}

#[cfg(test)]
mod tests {
    use flate2::Compression;
    use flate2::write::GzEncoder;

    use super::*;

    fn chart(files: &[(&str, &str)]) -> tempfile::NamedTempFile {
        let mut tar = tar::Builder::new(Vec::new());
        for (path, text) in files {
            let mut header = tar::Header::new_gnu();
            header.set_size(text.len() as u64);
            header.set_mode(0o644);
            tar.append_data(&mut header, path, text.as_bytes()).unwrap();
        }
        let file = tempfile::NamedTempFile::new().unwrap();
        let mut gzip = GzEncoder::new(file.reopen().unwrap(), Compression::fast());
        io::Write::write_all(&mut gzip, &tar.into_inner().unwrap()).unwrap();
        gzip.finish().unwrap();
        file
    }

    #[test]
    fn chart_crds_come_only_from_own_folder() {
        let crd =
            |name: &str| format!("kind: CustomResourceDefinition\nmetadata: {{name: {name}}}\n");
        let file = chart(&[
            ("c/Chart.yaml", "name: c\nversion: 1.0.0\n"),
            ("c/crds/a.yaml", &format!("{}---\n{}", crd("a"), crd("b"))),
            (
                "c/crds/deep/c.json",
                r#"{"kind": "CustomResourceDefinition", "metadata": {"name": "c"}}"#,
            ),
            ("c/crds/README.md", "not: yaml: at: all"),
            (
                "c/crds/other.yaml",
                "kind: ConfigMap\nmetadata: {name: x}\n",
            ),
            ("c/templates/d.yaml", "{{ .Values.d }}"),
            ("c/charts/sub/crds/e.yaml", &crd("e")),
        ]);
        let crds = read_chart_crds(file.path()).unwrap();
        let names: Vec<_> = crds.iter().map(|crd| &crd["metadata"]["name"]).collect();
        assert_eq!(names, ["a", "b", "c"]);
        let broken = chart(&[("c/crds/a.yaml", "{")]);
        let error = read_chart_crds(broken.path()).unwrap_err();
        assert!(error.to_string().contains("c/crds/a.yaml"), "{error}");
    }

    #[test]
    fn crds_of_krypton_and_releases_have_owner() {
        let mut crd = CustomResourceDefinition::default();
        assert_eq!(owner("widgets.example.org", Some(&crd)), None);
        assert_eq!(owner("widgets.example.org", None), None);
        assert!(owner("tenants.mesh.openkcm.io", None).is_some());
        let annotations = crd.annotations_mut();
        annotations.insert("meta.helm.sh/release-name".to_owned(), "web".to_owned());
        let owner = owner("widgets.example.org", Some(&crd));
        assert_eq!(owner.as_deref(), Some("release web"));
    }
}
