//! A control plane that loses its power, and one whose data is that of an earlier time.

use std::{fs, path::Path};

use anyhow::{Context, Result, ensure};
use tempfile::TempDir;

use super::{Cluster, Component, Parts, START_DEADLINE, lease::Ask, lock};
use crate::{port::Port, process::kill_all, wait::eventually};

/// All that was in etcd at one time.
#[derive(Debug)]
pub struct Snapshot {
    data: TempDir,
}

impl Cluster {
    /// SIGKILLs etcd and the apiserver at once, and waits until their ports refuse connections.
    ///
    /// # Errors
    /// When a port does not become free.
    pub async fn power_off(&self) -> Result<()> {
        self.kill(&[Component::Etcd, Component::Apiserver])?;
        free(&self.port).await?;
        free(&self.etcd_port).await
    }

    /// Starts both again, on the same ports and data, and waits until the apiserver is ready.
    ///
    /// # Errors
    /// When one runs already, ends or does not become ready.
    pub async fn power_on(&self) -> Result<()> {
        self.spawn(Component::Etcd)?;
        self.start_apiserver().await
    }

    /// Copies the data of etcd, which is away for a moment.
    ///
    /// # Errors
    /// When it cannot be copied, or etcd does not come back.
    pub async fn snapshot(&self) -> Result<Snapshot> {
        self.kill(&[Component::Etcd])?;
        free(&self.etcd_port).await?;
        let data = TempDir::with_prefix("krypton-snapshot-").context("making a folder")?;
        copy(&self.folder().join("etcd"), data.path()).context("copying the data of etcd")?;
        self.spawn(Component::Etcd)?;
        self.wait_ready().await?;
        Ok(Snapshot { data })
    }

    /// Puts the data of `snapshot` in the place of what there is, as after a disaster: all of the control
    /// plane is started again, and its resourceVersions go back.
    ///
    /// # Errors
    /// When the data cannot be put in place, or what ran does not come back.
    pub async fn restore(&self, snapshot: &Snapshot) -> Result<()> {
        ensure!(
            self.parts != Parts::WithPods,
            "kwok and the scheduler are not restarted here"
        );
        self.kill(&[Component::ControllerManager])?;
        self.power_off().await?;
        let data = self.folder().join("etcd");
        fs::remove_dir_all(&data).context("removing the data of etcd")?;
        copy(snapshot.data.path(), &data).context("putting the data of etcd back")?;
        self.power_on().await?;
        self.start_controllers(self.parts).await
    }

    pub(crate) fn kill(&self, components: &[Component]) -> Result<()> {
        if let Some(lease) = &self.lease {
            return lease.order(&Ask::Kill(components.to_vec()));
        }
        let mut running = lock(&self.processes);
        let mut killed: Vec<_> = components
            .iter()
            .filter_map(|component| running.remove(component.name()))
            .collect();
        kill_all(killed.iter_mut());
        Ok(())
    }
}

async fn free(port: &Port) -> Result<()> {
    let what = format!("port {} to be free", port.number());
    eventually(&what, START_DEADLINE, async || {
        Ok(port.is_free().then_some(()))
    })
    .await
}

fn copy(from: &Path, to: &Path) -> std::io::Result<()> {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let target = to.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            copy(&entry.path(), &target)?;
        } else {
            fs::copy(entry.path(), target)?;
        }
    }
    Ok(())
}
