//! Values that the tests of several modules start from.

use std::os::unix::fs::PermissionsExt as _;
use std::sync::Arc;

use krypton_helm::chart::ChartCache;
use krypton_helm::driver::{Helm, HelmConfig, Supervisor};
use krypton_helm::releases::Status;
use krypton_helm::releases::revision::Revision;
use krypton_runtime::watchdog::Watchdog;
use tempfile::TempDir;

use crate::drift::DriftMetrics;
use crate::inputs::Tools;
use crate::metrics::WorkMetrics;

/// Returns a revision without Krypton's labels.
pub(crate) fn foreign_revision(revision: u32, status: Status) -> Revision {
    Revision {
        revision,
        status,
        fingerprint: None,
        owner_uid: None,
        owner_namespace: None,
        run: None,
        rolled_back_by: None,
        uid: format!("secret-{revision}"),
        resource_version: revision.to_string(),
        created: None,
    }
}

/// Returns tools with one slot of a Helm that the test never runs.
pub(crate) async fn tools(folder: &TempDir) -> Tools {
    drop(rustls::crypto::aws_lc_rs::default_provider().install_default());
    let binary = folder.path().join("helm");
    std::fs::write(&binary, "#!/bin/sh\necho v4.3.1\n").unwrap();
    std::fs::set_permissions(&binary, std::fs::Permissions::from_mode(0o755)).unwrap();
    let config = HelmConfig {
        binary,
        processes: Arc::new(Supervisor::new("/bin/false", &[])),
        scratch: folder.path().join("scratch"),
        private: folder.path().join("private"),
        max_concurrent: 1,
        max_per_member: 1,
    };
    Tools {
        helm: Arc::new(Helm::new(config).await.unwrap()),
        charts: Arc::new(ChartCache::new(folder.path().join("charts")).unwrap()),
        drift: DriftMetrics::default(),
        work: WorkMetrics::default(),
        watchdog: Watchdog::default(),
    }
}
