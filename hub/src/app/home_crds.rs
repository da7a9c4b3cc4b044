//! Creates the CRDs of the home cluster at the start, and again if a user deletes them.

use std::sync::Arc;
use std::time::Duration;

use krypton_crds::edge_cluster::EdgeCluster;
use krypton_crds::krypton_deployment::KryptonDeployment;
use krypton_crds::tenant::Tenant;
use krypton_runtime::clock::BootTime;
use krypton_runtime::crd::{self, CrdError};
use krypton_runtime::periodic::{NextRun, Periodic, Schedule};
use krypton_runtime::retry::retry_until_ready;
use krypton_types::error_chain::chain;
use kube::Client;
use tokio_util::sync::CancellationToken;

use crate::args::Settings;
use crate::leader::Leader;

const SCHEDULE: Schedule = Schedule {
    every: Duration::from_secs(60),
    jitter: 0.2,
    retry_max: Duration::from_secs(10),
};

/// Creates or updates the CRDs. Returns false if the hub must stop before the API server answers.
pub(super) async fn prepare(
    settings: &Settings,
    client: &Client,
    stop: &CancellationToken,
) -> bool {
    let mut crds = vec![Tenant::crd(), EdgeCluster::crd()];
    if settings.ensure_watch_crds {
        crds.push(KryptonDeployment::crd());
    }
    let preparing = retry_until_ready(
        "home",
        stop,
        |_| true,
        async || {
            for crd in &crds {
                match crd::ensure(client, crd).await {
                    // Its objects may have Krypton's finalizers, which only a running hub removes.
                    Err(error @ CrdError::Terminating(_)) => {
                        tracing::warn!(%error, "CRD is being deleted; starting without it");
                    }
                    ensured => ensured?,
                }
            }
            Ok::<(), CrdError>(())
        },
    );
    let Ok(Some(())) = preparing.await else {
        return false;
    };
    // With the CRD of krypton-operator, the record of a deployment would be lost. Without the flag, the hub creates
    // no CRD and waits for none.
    if !settings.ensure_watch_crds
        && let Err(error) = crd::upgrade_existing(client, KryptonDeployment::crd()).await
    {
        tracing::warn!(error = %chain(&error), "failed to update the CRD of KryptonDeployments");
    }
    true
}

/// Creates deleted CRDs again while this hub leads.
///
/// The CRD of EdgeClusters is not among them, because the register of members creates it. Neither is the CRD of
/// Tenants if there is a self-cluster, because its reconciler also restores the Tenants.
pub(super) async fn recreate_deleted(
    settings: Arc<Settings>,
    client: Client,
    leader: Leader,
    stop: CancellationToken,
) {
    let tenants = (!settings.self_cluster).then(Tenant::crd);
    let deployments = settings.ensure_watch_crds.then(KryptonDeployment::crd);
    let crds: Vec<_> = tenants.into_iter().chain(deployments).collect();
    let mut periodic = Periodic::new("checking the CRDs of the home cluster", SCHEDULE);
    // A CRD whose deletion waits for its objects delays no other.
    let ensure_all = async || {
        let mut result = Ok(NextRun::AsScheduled);
        for crd in &crds {
            if leader.may_write(BootTime::now())
                && let Err(error) = crd::ensure(&client, crd).await
            {
                result = Err(error);
            }
        }
        result
    };
    loop {
        let pause = periodic.pause_after(ensure_all().await);
        if stop.run_until_cancelled(pause).await.is_none() {
            return;
        }
    }
}
