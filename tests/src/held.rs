//! Creates a Tenant whose deletion is blocked after the uninstall, because its namespace can't terminate.

use crate::Merge as _;
use anyhow::Result;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::{
    Api,
    api::{DeleteParams, PostParams},
};
use serde_json::json;

use crate::{fleet::FleetClient, wait::eventually};

/// A blocked Tenant. Its workspace has the same name.
#[derive(Debug)]
pub struct BlockedTenant<'a> {
    fleet_client: &'a FleetClient,
    name: &'a str,
}

impl<'a> BlockedTenant<'a> {
    /// Creates a Tenant, waits until it is ready, and deletes it.
    pub async fn delete(fleet_client: &'a FleetClient, name: &'a str) -> Result<Self> {
        let blocked = Self { fleet_client, name };
        fleet_client.install(name).await?;
        let config_map = json!({"metadata": {"name": "held", "finalizers": ["example.org/hold"]}});
        let config_map = serde_json::from_value(config_map)?;
        blocked
            .config_maps()
            .create(&PostParams::default(), &config_map)
            .await?;
        // The ConfigMap is already terminating. Krypton therefore deletes the namespace, but the finalizer blocks its
        // removal.
        let params = DeleteParams::default();
        blocked.config_maps().delete("held", &params).await?;
        fleet_client.delete(name).await?;
        eventually("its release to be gone", async || {
            let releases = fleet_client.releases().await?;
            let release_prefix = format!("tenant-{name}-");
            Ok((!releases
                .keys()
                .any(|release| release.contains(&release_prefix)))
            .then_some(()))
        })
        .await?;
        Ok(blocked)
    }

    /// Waits until the Tenant is restored after the deletion of its CRD, and is being deleted again.
    pub async fn wait_deleted_again(&self) -> Result<()> {
        let tenants = self.fleet_client.tenants();
        let what = format!("{} to be put back and deleted again", self.name);
        eventually(&what, async || {
            Ok(tenants.get(self.name).await?.metadata.deletion_timestamp)
        })
        .await
        .map(drop)
    }

    /// Removes the finalizer and waits until the Tenant is gone.
    pub async fn release(self) -> Result<()> {
        self.config_maps()
            .merge("held", &json!({"metadata": {"finalizers": null}}))
            .await?;
        self.fleet_client.wait_gone(self.name).await
    }

    fn config_maps(&self) -> Api<ConfigMap> {
        Api::namespaced(self.fleet_client.client.clone(), self.name)
    }
}
