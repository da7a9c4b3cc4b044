//! Charts whose hooks block Helm until the test completes them.

use anyhow::{Context, Result};
use k8s_openapi::api::core::v1::Pod;
use kube::{Api, ResourceExt, api::ListParams};
use serde_json::json;
use tempfile::TempDir;

use crate::{Merge as _, chart_repository::ChartSource, fleet::FleetClient, wait::eventually};

/// All events at which Helm can wait.
pub const EVENTS: [&str; 8] = [
    "pre-install",
    "post-install",
    "pre-upgrade",
    "post-upgrade",
    "pre-rollback",
    "post-rollback",
    "pre-delete",
    "post-delete",
];

/// The chart `gate`, version 1.0.0. Its hook is a pod that never runs.
#[derive(Debug)]
pub struct Gate {
    folder: TempDir,
}

impl Gate {
    pub fn new() -> Result<Self> {
        let folder = TempDir::with_prefix("krypton-gate-").context("creating a folder")?;
        let metadata = "name: '{{ .Release.Name }}', namespace: '{{ .Release.Namespace }}'";
        let hook = "annotations: {helm.sh/hook: 'pre-install,pre-upgrade'}";
        let container = "containers: [{name: main, image: krypton.test/gate}]";
        let gate = format!(
            "apiVersion: v1\nkind: Pod\nmetadata: {{{metadata}, {hook}}}\nspec: {{restartPolicy: Never, {container}}}\n"
        );
        let config_map =
            format!("apiVersion: v1\nkind: ConfigMap\nmetadata: {{{metadata}}}\ndata: {{a: b}}\n");
        let files = [
            ("templates/gate.yaml", gate.as_str()),
            ("templates/after.yaml", &config_map),
        ];
        ChartSource::write(folder.path(), "gate", &files)?;
        Ok(Self { folder })
    }

    /// The chart `gates`, version 1.0.0: a ConfigMap, a Deployment with one pod, and hook pods that never run. There is
    /// one hook for each of [`EVENTS`] in the value `gates`. The ConfigMap contains the value `message`. A second
    /// ConfigMap is named after the value `extra`, if set. In the namespace `brokenIn`, the API server rejects the
    /// Deployment.
    pub fn everywhere() -> Result<Self> {
        let folder = TempDir::with_prefix("krypton-gates-").context("creating a folder")?;
        let hooks = "{{- range .Values.gates }}\n---\napiVersion: v1\nkind: Pod\nmetadata:\n  \
             name: {{ $.Release.Name }}-{{ . }}\n  namespace: {{ $.Release.Namespace }}\n  \
             annotations: {helm.sh/hook: '{{ . }}', \
             helm.sh/hook-delete-policy: 'before-hook-creation,hook-succeeded'}\n\
             spec: {restartPolicy: Never, schedulerName: nobody, \
             containers: [{name: main, image: krypton.test/gate}]}\n{{- end }}\n";
        let main = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: '{{ .Release.Name }}'}\n\
             data: {message: '{{ .Values.message }}'}\n\
             {{- with .Values.extra }}\n---\napiVersion: v1\nkind: ConfigMap\n\
             metadata: {name: '{{ . }}'}\n{{- end }}\n---\n\
             apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: '{{ .Release.Name }}'}\n\
             spec:\n  {{- if eq .Release.Namespace (.Values.brokenIn | default \"\") }}\n  replicas: -1\n  {{- end }}\n  selector: {matchLabels: {app: '{{ .Release.Name }}'}}\n  template:\n    \
             metadata: {labels: {app: '{{ .Release.Name }}'}}\n    \
             spec: {containers: [{name: main, image: krypton.test/serves}]}\n";
        let files = [
            ("values.yaml", "{gates: [], message: first}"),
            ("templates/gates.yaml", hooks),
            ("templates/main.yaml", main),
        ];
        ChartSource::write(folder.path(), "gates", &files)?;
        Ok(Self { folder })
    }

    pub fn chart(&self) -> ChartSource {
        ChartSource::folder(self.folder.path())
    }
}

/// Waits until Helm waits for a hook in this namespace other than `known`.
pub async fn wait_for_any_hook(
    fleet_client: &FleetClient,
    namespace: &str,
    known: Option<&Pod>,
) -> Result<Pod> {
    let pods: Api<Pod> = Api::namespaced(fleet_client.client.clone(), namespace);
    let known = known.and_then(ResourceExt::uid);
    eventually("helm to wait for its hook", async || {
        let hook_pods = pods.list(&ListParams::default()).await?.items;
        Ok(hook_pods.into_iter().find(|pod| pod.uid() != known))
    })
    .await
}

/// Waits until Helm waits at this event of [`EVENTS`], in a later run than that of `known`.
pub async fn wait_for_hook(
    fleet_client: &FleetClient,
    namespace: &str,
    event: &str,
    known: Option<&Pod>,
) -> Result<Pod> {
    let pods: Api<Pod> = Api::namespaced(fleet_client.client.clone(), namespace);
    let known = known.and_then(ResourceExt::uid);
    let what = format!("helm to wait at {event} in {namespace}");
    eventually(&what, async || {
        let hook_pods = pods.list(&ListParams::default()).await?.items;
        let names: Vec<String> = hook_pods.iter().map(ResourceExt::name_any).collect();
        let pod = hook_pods.into_iter().find(|pod| {
            pod.name_any().ends_with(event)
                && pod.uid() != known
                && pod.metadata.deletion_timestamp.is_none()
        });
        if pod.is_none() {
            anyhow::bail!("there are {names:?}");
        }
        Ok(pod)
    })
    .await
}

/// Waits until Helm waits at `event`, and completes the hook.
pub async fn complete_next_hook(
    fleet_client: &FleetClient,
    namespace: &str,
    event: &str,
    known: Option<&Pod>,
) -> Result<()> {
    let hook = wait_for_hook(fleet_client, namespace, event, known).await?;
    complete_hook(fleet_client, namespace, &hook).await
}

/// Completes the hook successfully.
pub async fn complete_hook(fleet_client: &FleetClient, namespace: &str, hook: &Pod) -> Result<()> {
    let pods: Api<Pod> = Api::namespaced(fleet_client.client.clone(), namespace);
    let succeeded = json!({"phase": "Succeeded"});
    pods.merge_status(&hook.name_any(), succeeded).await?;
    Ok(())
}
