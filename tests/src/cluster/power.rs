//! Simulates a power loss of a control plane, and the restore of etcd data from a snapshot.

use std::fs;

use anyhow::{Context, Result, ensure};
use tempfile::TempDir;

use super::{Cluster, Component, Parts, START_DEADLINE, lease::PoolRequest};
use crate::{folder, port::Port, process::kill_all, wait::eventually_within};

/// A copy of all etcd data.
#[derive(Debug)]
pub struct Snapshot {
    data: TempDir,
}

impl Cluster {
    /// Kills etcd and the API server together with SIGKILL, and waits until their ports refuse connections.
    pub async fn power_off(&self) -> Result<()> {
        self.kill(&[Component::Etcd, Component::Apiserver])?;
        wait_until_free(&self.port).await?;
        wait_until_free(&self.etcd_port).await
    }

    /// Starts both again on the same ports and data, and waits until the API server is ready.
    pub async fn power_on(&self) -> Result<()> {
        self.spawn(Component::Etcd)?;
        self.start_apiserver().await
    }

    /// Copies the data of etcd. Stops etcd during the copy.
    pub async fn snapshot(&self) -> Result<Snapshot> {
        self.kill(&[Component::Etcd])?;
        wait_until_free(&self.etcd_port).await?;
        let data = TempDir::with_prefix("krypton-snapshot-").context("creating a folder")?;
        folder::copy(&self.folder().join("etcd"), data.path())
            .context("copying the data of etcd")?;
        self.spawn(Component::Etcd)?;
        self.wait_ready().await?;
        Ok(Snapshot { data })
    }

    /// Replaces the current data by `snapshot`, as in disaster recovery. Restarts the whole control plane, and its
    /// resourceVersions decrease.
    pub async fn restore(&self, snapshot: &Snapshot) -> Result<()> {
        ensure!(
            self.parts != Parts::WithPods,
            "kwok and the scheduler are not restarted here"
        );
        self.kill(&[Component::ControllerManager])?;
        self.power_off().await?;
        let data = self.folder().join("etcd");
        fs::remove_dir_all(&data).context("removing the data of etcd")?;
        folder::copy(snapshot.data.path(), &data).context("restoring the data of etcd")?;
        self.power_on().await?;
        self.start_controllers(self.parts).await
    }

    pub(crate) fn kill(&self, components: &[Component]) -> Result<()> {
        if let Some(lease) = &self.lease {
            return lease.execute(&PoolRequest::Kill(components.to_vec()));
        }
        let mut running = self.processes.lock();
        let mut killed: Vec<_> = components
            .iter()
            .filter_map(|component| running.remove(component.name()))
            .collect();
        kill_all(killed.iter_mut());
        Ok(())
    }
}

pub(super) async fn wait_until_free(port: &Port) -> Result<()> {
    let what = format!("port {} to be free", port.number());
    eventually_within(&what, START_DEADLINE, async || {
        Ok(port.is_free().then_some(()))
    })
    .await
}
