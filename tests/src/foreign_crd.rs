//! Installs CRDs of other projects, read from the Go modules of those projects.

use std::ffi::OsString;

use anyhow::{Context, Result, bail};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::{
    Api,
    api::{DeleteParams, Patch, PatchParams},
};
use serde_json::Value;

use crate::{cluster::Cluster, tools::Tools, wait::eventually};

/// A CRD that can be installed on a cluster.
#[derive(Debug, Clone)]
pub struct ForeignCrd {
    content: Value,
}

impl ForeignCrd {
    /// Reads a file from a folder of `hack/tools/crds`.
    ///
    /// The file lacks the conversion webhook, which the project's kustomization adds. The API server here converts only
    /// the name of the version, so install one version at a time (see `with_only_version`).
    pub async fn read(cluster: &Cluster, pin: &str, file: &str) -> Result<Self> {
        let path = Tools::find()?.crd(pin, file)?;
        let arguments = ["create", "--dry-run=client", "--output=json", "--filename"];
        let arguments = arguments.map(OsString::from).into_iter();
        let json = cluster.kubectl(arguments.chain([path.into()])).await?;
        let content = serde_json::from_str(&json).context("reading kubectl's JSON")?;
        Ok(Self { content })
    }

    /// Keeps only this version, as the served and stored one.
    pub fn with_only_version(mut self, version: &str) -> Result<Self> {
        let versions = self.content["spec"]["versions"]
            .as_array_mut()
            .context("a CRD without versions")?;
        versions.retain(|candidate| candidate["name"] == version);
        let [remaining] = versions.as_mut_slice() else {
            bail!("the CRD has no version {version}");
        };
        remaining["storage"] = true.into();
        Ok(self)
    }

    /// Allows additional values of a field such as `status.phase` in the first version, like a later release of the
    /// CRD.
    pub fn with_enum_values(mut self, field: &str, values: &[&str]) -> Result<Self> {
        let pointer = format!(
            "/spec/versions/0/schema/openAPIV3Schema/properties/{}/enum",
            field.replace('.', "/properties/")
        );
        let enum_values = self.content.pointer_mut(&pointer);
        let enum_values = enum_values
            .and_then(Value::as_array_mut)
            .context("no enum")?;
        enum_values.extend(values.iter().map(|value| Value::from(*value)));
        Ok(self)
    }

    /// Applies the CRD to the cluster, and waits until the API server serves it.
    pub async fn install(&self, cluster: &Cluster) -> Result<()> {
        let crds: Api<CustomResourceDefinition> = Api::all(cluster.client());
        let name = self.name()?;
        let params = PatchParams::apply("a-person").force();
        let patch = Patch::Apply(&self.content);
        crds.patch(name, &params, &patch).await?;
        eventually(&format!("{name} to be served"), async || {
            let status = crds.get(name).await?.status.unwrap_or_default();
            let established =
                status.conditions.into_iter().flatten().any(|condition| {
                    condition.type_ == "Established" && condition.status == "True"
                });
            Ok(established.then_some(()))
        })
        .await
    }

    /// Deletes the CRD with all its objects, and waits until it is gone.
    pub async fn remove(&self, cluster: &Cluster) -> Result<()> {
        let crds: Api<CustomResourceDefinition> = Api::all(cluster.client());
        let name = self.name()?;
        crds.delete(name, &DeleteParams::default()).await?;
        eventually(&format!("{name} to be gone"), async || {
            Ok(crds.get_opt(name).await?.is_none().then_some(()))
        })
        .await
    }

    fn name(&self) -> Result<&str> {
        let name = self.content["metadata"]["name"].as_str();
        name.context("a CRD without a name")
    }
}
