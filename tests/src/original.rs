//! Creates the state that the original Go operator leaves on a cluster: CRDs, Tenants and releases.

use std::{fs, path::Path};

use anyhow::{Context, Result, bail};
use futures::{StreamExt, TryStreamExt};
use k8s_openapi::api::core::v1::Secret;
use krypton_crds::tenant::Tenant;
use krypton_helm::releases::{self, ObjectId};
use krypton_types::{fingerprint, names};
use kube::{
    Api, Client, ResourceExt,
    api::{DeleteParams, DynamicObject, ObjectMeta, Patch, PatchParams, PostParams},
    core::GroupVersionKind,
    discovery::{Scope, pinned_kind},
};
use serde_json::{Value, json};

use crate::{
    chart_repository::ChartRepository, cluster::Cluster, release_payload, wait::eventually,
};

const CRDS: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/../crds/testdata/original-crds"
);
/// Number of Secrets that are created concurrently.
const CONCURRENCY: usize = 16;

/// Returns one of the original's CRDs as YAML.
pub fn crd(file: &str) -> Result<String> {
    let path = Path::new(CRDS).join(file);
    fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))
}

/// Applies one of the original's CRDs to a cluster, over any existing version, and waits until it is established.
pub async fn apply_crd(cluster: &Cluster, file: &str) -> Result<()> {
    cluster.apply(&crd(file)?).await?;
    cluster.wait_for_crds().await
}

/// The original operator on one cluster, with its configured chart.
#[derive(Clone, Copy, Debug)]
pub struct Original<'a> {
    pub cluster: &'a Cluster,
    pub repository: &'a ChartRepository,
    pub chart: &'a str,
    pub version: &'a str,
    /// The original's name for the cluster.
    pub member: &'a str,
}

impl Original<'_> {
    fn install_args(&self, release: &str, workspace: &str, flags: &[&str]) -> Vec<String> {
        let (repository, version) = (self.repository.url(), self.version);
        let args = [
            "install".to_owned(),
            release.to_owned(),
            self.chart.to_owned(),
            format!("--repo={repository}"),
            format!("--version={version}"),
            format!("--namespace={workspace}"),
            "--create-namespace".to_owned(),
            // The original uses the library of Helm 3, which applies on the client side.
            "--server-side=false".to_owned(),
        ];
        let flags = flags.iter().map(|flag| (*flag).to_owned());
        args.into_iter().chain(flags).collect()
    }

    /// Installs a release in its workspace.
    pub async fn install(&self, release: &str, workspace: &str) -> Result<()> {
        let args = self.install_args(release, workspace, &[]);
        self.cluster.helm(args).await.map(drop)
    }

    /// Installs a release, and kills Helm while it waits for the release's workloads.
    pub async fn kill_during_install(
        &self,
        release: &str,
        workspace: &str,
        flags: &[&str],
    ) -> Result<()> {
        let flags = [flags, &["--wait", "--timeout=170s"]].concat();
        let client = self.cluster.client();
        let waiting = eventually("Helm to wait for a workload", async || {
            let name = releases::secret_name(release, 1);
            let secrets: Api<Secret> = Api::namespaced(client.clone(), workspace);
            let deployments: Api<k8s_openapi::api::apps::v1::Deployment> =
                Api::namespaced(client.clone(), workspace);
            let (secret, deployment) = (
                secrets.get_opt(&name).await?,
                deployments.get_opt(release).await?,
            );
            Ok(secret.and(deployment).map(drop))
        });
        tokio::select! {
            ended = self.cluster.helm(self.install_args(release, workspace, &flags)) =>
                bail!("helm ended before it was killed: {ended:?}"),
            waited = waiting => waited,
        }
    }

    /// Installs a release as the original does if a template sets no namespace. The Secret is in the workspace, and the
    /// objects are in `default`.
    pub async fn install_outside_workspace(&self, release: &str, workspace: &str) -> Result<()> {
        self.install(release, workspace).await?;
        let client = self.cluster.client();
        let secrets: Api<Secret> = Api::namespaced(client.clone(), workspace);
        let secret = secrets.get(&releases::secret_name(release, 1)).await?;
        for object in releases::objects(&secret)?.objects {
            if object.namespace.is_none() {
                move_to_default(&client, workspace, &object).await?;
            }
        }
        Ok(())
    }

    /// Creates revisions 2 to `last` from the first. The original upgrades in every reconcile and thereby creates them.
    pub async fn create_revisions(&self, release: &str, workspace: &str, last: u32) -> Result<()> {
        let secrets: Api<Secret> = Api::namespaced(self.cluster.client(), workspace);
        let first = secrets.get(&releases::secret_name(release, 1)).await?;
        let revisions = (2..=last).map(|number| {
            let status = if number == last {
                "deployed"
            } else {
                "superseded"
            };
            with_revision(&first, release, number, status)
        });
        let revisions: Vec<Secret> = revisions.collect::<Result<_>>()?;
        futures::stream::iter(revisions)
            .map(|secret| {
                let secrets = secrets.clone();
                async move { secrets.create(&PostParams::default(), &secret).await }
            })
            .buffer_unordered(CONCURRENCY)
            .try_collect::<Vec<_>>()
            .await?;
        let mut first_superseded = with_revision(&first, release, 1, "superseded")?;
        first_superseded.metadata.resource_version = first.resource_version();
        secrets
            .replace(&first.name_any(), &PostParams::default(), &first_superseded)
            .await?;
        Ok(())
    }

    /// Returns the annotation in which the original stores the fingerprint of the installed chart.
    pub fn fingerprint(&self) -> (String, String) {
        let url = self.repository.url();
        (
            names::fingerprint_annotation(self.member),
            fingerprint::original(&url, self.chart, self.version),
        )
    }

    /// Creates a Tenant with the original's finalizer, annotations and status. The cluster must have the original's
    /// CRD.
    pub async fn tenant(&self, name: &str, spec: Value, status: Value) -> Result<()> {
        let (annotation, value) = self.fingerprint();
        let mut tenant = Tenant::new(name, serde_json::from_value(spec)?);
        tenant.metadata.annotations = Some([(annotation, value)].into());
        tenant.metadata.finalizers = Some(vec![names::TENANT_FINALIZER.to_owned()]);
        let api: Api<Tenant> = Api::namespaced(self.cluster.client(), "default");
        let what = format!("Tenant {name} to be admitted");
        eventually(&what, async || {
            Ok(Some(api.create(&PostParams::default(), &tenant).await?))
        })
        .await?;
        let patch = Patch::Merge(json!({ "status": status }));
        api.patch_status(name, &PatchParams::default(), &patch)
            .await?;
        Ok(())
    }

    /// Returns the status of a Tenant whose installation the original considers complete. None of its conditions
    /// becomes False again.
    pub fn status(&self, error: Option<&str>) -> Value {
        let transition_time = "2026-01-13T10:00:00Z";
        let condition = |kind: &str, status: &str, reason: &str, message: &str| {
            json!({"type": format!("{kind}/{}", self.member), "status": status, "reason": reason,
                "message": message, "lastTransitionTime": transition_time})
        };
        let mut conditions = vec![
            condition("ClusterReady", "True", "Installed", "release installed"),
            condition(
                "ClusterProgress",
                "False",
                "InstallComplete",
                "install complete",
            ),
        ];
        conditions
            .extend(error.map(|reason| condition("ClusterError", "True", reason, "it broke")));
        let phase = if error.is_some() { "Error" } else { "Ready" };
        json!({"phase": phase, "lastMessage": "release installed", "conditions": conditions})
    }
}

async fn move_to_default(client: &Client, from: &str, object: &ObjectId) -> Result<()> {
    let (group, version) = object
        .api_version
        .split_once('/')
        .unwrap_or(("", &object.api_version));
    let kind = GroupVersionKind::gvk(group, version, &object.kind);
    let (resource, capabilities) = pinned_kind(client, &kind).await?;
    if capabilities.scope == Scope::Cluster {
        return Ok(());
    }
    let [from, to]: [Api<DynamicObject>; 2] = [from, "default"]
        .map(|namespace| Api::namespaced_with(client.clone(), namespace, &resource));
    let original = from.get(&object.name).await?;
    let mut moved = original.clone();
    moved.metadata = ObjectMeta {
        name: original.metadata.name.clone(),
        labels: original.metadata.labels.clone(),
        annotations: original.metadata.annotations.clone(),
        ..ObjectMeta::default()
    };
    if let Some(fields) = moved.data.as_object_mut() {
        fields.remove("status");
        if let Some(Value::Object(spec)) = fields.get_mut("spec") {
            spec.retain(|field, _| !field.starts_with("clusterIP"));
        }
    }
    to.create(&PostParams::default(), &moved).await?;
    from.delete(&object.name, &DeleteParams::background())
        .await?;
    let what = format!("{} {} to be gone", object.kind, object.name);
    eventually(&what, async || {
        Ok(from.get_opt(&object.name).await?.is_none().then_some(()))
    })
    .await
}

/// Returns a copy of a revision's Secret with another number and status, also in the payload.
fn with_revision(secret: &Secret, release: &str, number: u32, status: &str) -> Result<Secret> {
    let mut labels = secret.metadata.labels.clone().unwrap_or_default();
    labels.insert("version".to_owned(), number.to_string());
    labels.insert("status".to_owned(), status.to_owned());
    let mut revision = Secret {
        metadata: ObjectMeta {
            name: Some(releases::secret_name(release, number)),
            labels: Some(labels),
            ..ObjectMeta::default()
        },
        type_: secret.type_.clone(),
        data: secret.data.clone(),
        ..Secret::default()
    };
    release_payload::rewrite(&mut revision, &|payload: &mut Value| {
        payload["version"] = number.into();
        payload["info"]["status"] = status.into();
    })?;
    Ok(revision)
}
