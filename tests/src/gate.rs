//! A chart that helm waits in the middle of, until somebody lets its hook end.

use std::fs;

use anyhow::{Context, Result};
use k8s_openapi::api::core::v1::Pod;
use kube::{
    Api, ResourceExt,
    api::{ListParams, Patch, PatchParams},
};
use serde_json::json;
use tempfile::TempDir;

use crate::{
    chart_repository::ChartSource,
    fleet::{Desk, PATIENCE},
    wait::eventually,
};

/// The chart `gate`, version 1.0.0. Its hook is a pod that nobody runs.
#[derive(Debug)]
pub struct Gate {
    folder: TempDir,
}

impl Gate {
    /// # Errors
    /// When it cannot be written.
    pub fn new() -> Result<Self> {
        let folder = TempDir::with_prefix("krypton-gate-").context("making a folder")?;
        let metadata = "name: '{{ .Release.Name }}', namespace: '{{ .Release.Namespace }}'";
        let hook = "annotations: {helm.sh/hook: 'pre-install,pre-upgrade'}";
        let container = "containers: [{name: main, image: krypton.test/gate}]";
        let files = [
            (
                "Chart.yaml",
                "{apiVersion: v2, name: gate, version: 1.0.0, description: Waits for its hook.}"
                    .to_owned(),
            ),
            (
                "templates/gate.yaml",
                format!(
                    "apiVersion: v1\nkind: Pod\nmetadata: {{{metadata}, {hook}}}\nspec: {{restartPolicy: Never, {container}}}\n"
                ),
            ),
            (
                "templates/after.yaml",
                format!(
                    "apiVersion: v1\nkind: ConfigMap\nmetadata: {{{metadata}}}\ndata: {{a: b}}\n"
                ),
            ),
        ];
        fs::create_dir(folder.path().join("templates")).context("making a folder")?;
        for (name, content) in files {
            fs::write(folder.path().join(name), content).context("writing a chart")?;
        }
        Ok(Self { folder })
    }

    pub fn chart(&self) -> ChartSource {
        ChartSource::folder(self.folder.path())
    }
}

/// Waits until helm waits for a hook in this namespace, another than `known`.
///
/// # Errors
/// When it does not in time.
pub async fn hook(desk: &Desk, namespace: &str, known: Option<&Pod>) -> Result<Pod> {
    let pods: Api<Pod> = Api::namespaced(desk.client.clone(), namespace);
    let known = known.and_then(ResourceExt::uid);
    eventually("helm to wait for its hook", PATIENCE, async || {
        let found = pods.list(&ListParams::default()).await?.items;
        Ok(found.into_iter().find(|pod| pod.uid() != known))
    })
    .await
}

/// Lets the hook end well.
///
/// # Errors
/// When the apiserver refuses.
pub async fn open(desk: &Desk, namespace: &str, hook: &Pod) -> Result<()> {
    let pods: Api<Pod> = Api::namespaced(desk.client.clone(), namespace);
    let done = Patch::Merge(json!({"status": {"phase": "Succeeded"}}));
    let params = PatchParams::default();
    pods.patch_status(&hook.name_any(), &params, &done).await?;
    Ok(())
}
