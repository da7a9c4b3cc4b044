//! A Tenant that is deleted and uninstalled, and does not go: something in its namespace is held.

use anyhow::Result;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::{
    Api,
    api::{DeleteParams, Patch, PatchParams, PostParams},
};
use serde_json::json;

use crate::{
    fleet::{FleetClient, PATIENCE},
    wait::eventually,
};

const NAMESPACE: &str = "default";
const READY: (&str, &str, &str) = ("Ready", "True", "AllClustersReady");

/// The Tenant is its workspace's namesake.
#[derive(Debug)]
pub struct Held<'a> {
    desk: &'a FleetClient,
    name: &'a str,
}

impl<'a> Held<'a> {
    /// Makes one, and deletes it when it is ready.
    ///
    /// # Errors
    /// When it is not installed, or not uninstalled, in time.
    pub async fn delete(desk: &'a FleetClient, name: &'a str) -> Result<Self> {
        let held = Self { desk, name };
        desk.create(NAMESPACE, name, json!({})).await?;
        desk.shows(NAMESPACE, name, &[READY]).await?;
        let map = json!({"metadata": {"name": "held", "finalizers": ["example.org/hold"]}});
        let map = serde_json::from_value(map)?;
        held.maps().create(&PostParams::default(), &map).await?;
        // It is going already, so it does not keep the namespace, but holds it.
        let params = DeleteParams::default();
        held.maps().delete("held", &params).await?;
        desk.delete(NAMESPACE, name).await?;
        eventually("its release to be gone", PATIENCE, async || {
            let left = desk.releases().await?;
            let own = format!("tenant-{name}-");
            Ok((!left.keys().any(|release| release.contains(&own))).then_some(()))
        })
        .await?;
        Ok(held)
    }

    /// Waits until it is there again after its CRD was deleted, and is being deleted.
    ///
    /// # Errors
    /// When it is not in time.
    pub async fn is_deleted_again(&self) -> Result<()> {
        let tenants = self.desk.tenants(NAMESPACE);
        let what = format!("{} to be put back and deleted again", self.name);
        eventually(&what, PATIENCE, async || {
            Ok(tenants.get(self.name).await?.metadata.deletion_timestamp)
        })
        .await
        .map(drop)
    }

    /// Lets it go.
    ///
    /// # Errors
    /// When it does not go in time.
    pub async fn let_go(self) -> Result<()> {
        let free = Patch::Merge(json!({"metadata": {"finalizers": null}}));
        self.maps()
            .patch("held", &PatchParams::default(), &free)
            .await?;
        self.desk.gone(NAMESPACE, self.name).await
    }

    fn maps(&self) -> Api<ConfigMap> {
        Api::namespaced(self.desk.client.clone(), self.name)
    }
}
