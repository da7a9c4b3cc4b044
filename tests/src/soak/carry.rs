//! Injects a fault, keeps it for its duration, and repairs it.

use std::time::Duration;

use anyhow::{Context, Result, bail};
use futures::future::try_join_all;
use krypton_tests::{
    FalseResponse, Fault as RepositoryMode, ResponseFault, Traffic, answering_proxy::ALL_VERBS,
    fleet::FleetClient,
};
use kube::Client;
use tokio::time::sleep;

use super::{
    expected_state::ExpectedState,
    fault::{ApiserverFault, Fault, RepositoryFault, TrafficFault},
    hubs::{self, RunningHub, VERSIONS},
    person::UserActions,
    stage::{Stage, message, values},
    whom::{Edge, HubId},
};

/// A restarted hub waits for home, which can be unreachable.
const RESTART_DEADLINE: Duration = Duration::from_secs(10);

pub(crate) async fn carry_out(
    fault: &Fault,
    stage: &Stage,
    home: &Client,
    expected_state: &ExpectedState,
) -> Result<()> {
    let away = fault.away();
    match fault {
        Fault::HubKilled { hub, .. } => {
            let running_hub = stage.hubs.get(*hub)?;
            let mut hub = running_hub.hub.lock().await;
            hub.kill9().await?;
            sleep(away).await;
            stage.start_hub(running_hub, &mut hub)
        }
        Fault::HubStopped { hub, .. } => {
            let running_hub = stage.hubs.get(*hub)?;
            let mut hub = running_hub.hub.lock().await;
            hub.stop().await?;
            sleep(away).await;
            stage.start_hub(running_hub, &mut hub)
        }
        Fault::HubFrozen { hub, .. } => freeze_hub(stage.hubs.get(*hub)?, away).await,
        Fault::LeadFrozen { .. } => {
            let holder = hubs::holder(home).await?;
            let leader = HubId::holding(&holder).context("there is no leader")?;
            freeze_hub(stage.hubs.get(leader)?, away).await
        }
        Fault::HubsKilled { .. } => {
            // Every code path locks the hubs in this order.
            let mut all = Vec::new();
            for running_hub in stage.hubs.all() {
                all.push((running_hub, running_hub.hub.lock().await));
            }
            try_join_all(all.iter_mut().map(|(_, hub)| hub.kill9())).await?;
            sleep(away).await;
            all.iter_mut()
                .try_for_each(|(running_hub, hub)| stage.start_hub(running_hub, hub))
        }
        Fault::HomeWay { hub, way, .. } => {
            let running_hub = stage.hubs.get(*hub)?;
            running_hub.set_home_traffic(to_traffic(*way));
            sleep(away).await;
            running_hub.set_home_traffic(Traffic::Pass);
            Ok(())
        }
        Fault::AgentKilled { .. } => {
            let mut agent = stage.agent.lock().await;
            agent.kill9().await?;
            sleep(away).await;
            stage.start_agent(&mut agent)
        }
        Fault::HelmKilled => {
            stage.kill_helms();
            Ok(())
        }
        Fault::AgentFrozen { .. } => {
            let mut agent = stage.agent.lock().await;
            agent.freeze()?;
            sleep(away).await;
            agent.thaw()
        }
        Fault::ApiserverKilled { edge, .. } => {
            let cluster = &stage.site(*edge).cluster;
            cluster.stop_apiserver().await?;
            sleep(away).await;
            cluster.start_apiserver().await
        }
        Fault::PowerLost { edge, .. } => {
            let cluster = &stage.site(*edge).cluster;
            cluster.power_off().await?;
            sleep(away).await;
            cluster.power_on().await
        }
        Fault::Link { hub, way, .. } => {
            stage.hubs.set_links(*hub, to_traffic(*way));
            sleep(away).await;
            stage.hubs.set_links(*hub, Traffic::Pass);
            Ok(())
        }
        Fault::Way { edge, way, .. } => {
            let proxy = &stage.site(*edge).fault_proxy;
            proxy.set(to_traffic(*way));
            sleep(away).await;
            proxy.set(Traffic::Pass);
            Ok(())
        }
        Fault::Answers { edge, answer, .. } => {
            let proxy = &stage.site(*edge).answering_proxy;
            proxy.inject(response_fault(*answer));
            sleep(away).await;
            proxy.forward_all();
            Ok(())
        }
        Fault::Kubeconfig { .. } => kubeconfig(stage, away).await,
        Fault::Message { number } => {
            expected_state.update(|expected| expected.message = message(*number));
            stage.values.write(&values(&message(*number)))
        }
        Fault::Version { number } => {
            let version = VERSIONS
                .get(*number as usize)
                .copied()
                .unwrap_or(VERSIONS[0]);
            expected_state.update(|expected| expected.version = version.to_owned());
            stage.hubs.set_version(*number);
            restart_all_hubs(stage).await
        }
        Fault::Repository { how, .. } => repository(stage, *how, away).await,
        _ => Box::pin(perform_user_action(fault, stage, home, expected_state)).await,
    }
}

/// Performs a user's action at an API server.
async fn perform_user_action(
    fault: &Fault,
    stage: &Stage,
    home: &Client,
    expected_state: &ExpectedState,
) -> Result<()> {
    let user = |edge: Edge| UserActions::new(stage.site(edge), home, expected_state);
    match fault {
        Fault::Crd { edge } => user(*edge).delete_crd().await,
        Fault::Created { tenant, workspace } => {
            user(tenant.edge()).create(*tenant, *workspace).await
        }
        Fault::Deleted { tenant } => user(tenant.edge()).delete(*tenant).await,
        Fault::Recreated { tenant, workspace } => {
            let user = user(tenant.edge());
            user.delete(*tenant).await?;
            user.create(*tenant, *workspace).await
        }
        Fault::WorkspaceSet { tenant } => user(tenant.edge()).set_workspace(*tenant).await,
        Fault::Paused { tenant, .. } => {
            let user = user(tenant.edge());
            user.pause(*tenant, true).await?;
            sleep(fault.away()).await;
            user.pause(*tenant, false).await
        }
        Fault::ReleaseDeleted { tenant, all } => {
            user(tenant.edge()).delete_release(*tenant, *all).await
        }
        Fault::ReleaseDamaged { tenant } => user(tenant.edge()).damage_release(*tenant).await,
        Fault::ReleaseMarked { tenant, mark } => {
            user(tenant.edge()).mark_release(*tenant, *mark).await
        }
        Fault::ForeignObject { tenant, number } => {
            user(tenant.edge())
                .create_foreign_object(*tenant, *number)
                .await
        }
        Fault::ForeignRelease { tenant, number } => {
            user(tenant.edge())
                .install_foreign_release(*tenant, *number)
                .await
        }
        Fault::ForeignFinalizer { tenant } => {
            user(tenant.edge()).set_finalizer(*tenant, true).await
        }
        Fault::Drift {
            tenant,
            object,
            gone,
        } => user(tenant.edge()).drift(*tenant, *object, *gone).await,
        _ => bail!("{fault:?} is not a user's action"),
    }
}

async fn freeze_hub(running_hub: &RunningHub, away: Duration) -> Result<()> {
    let mut hub = running_hub.hub.lock().await;
    hub.freeze()?;
    sleep(away).await;
    hub.thaw()
}

/// Waits like a Deployment: the next hub stops when this one is ready or the time is over.
async fn restart_all_hubs(stage: &Stage) -> Result<()> {
    for running_hub in stage.hubs.all() {
        let mut hub = running_hub.hub.lock().await;
        hub.stop().await?;
        stage.start_hub(running_hub, &mut hub)?;
        // The end of the burst reports a hub that has ended again.
        hub.wait_ready(RESTART_DEADLINE).await.ok();
    }
    Ok(())
}

fn to_traffic(way: TrafficFault) -> Traffic {
    match way {
        TrafficFault::Cut => Traffic::Cut,
        TrafficFault::Slow(delay) => Traffic::Delay(delay),
        TrafficFault::Swallowed => Traffic::Swallow {
            there: true,
            back: true,
        },
        TrafficFault::Frozen => Traffic::Freeze,
    }
}

fn response_fault(fault: ApiserverFault) -> ResponseFault {
    ResponseFault {
        verbs: ALL_VERBS,
        resources: &[],
        response: match fault {
            ApiserverFault::Status(code) => FalseResponse::Status(code),
            ApiserverFault::Page(code) => FalseResponse::Page(code),
            ApiserverFault::Nothing => FalseResponse::Nothing,
            ApiserverFault::Closed => FalseResponse::Closed,
        },
    }
}

async fn kubeconfig(stage: &Stage, away: Duration) -> Result<()> {
    let fleet_client = FleetClient::new(&stage.home);
    let name = Edge::Two.name();
    fleet_client.add_member(name, "{rubbish: [").await?;
    sleep(away).await;
    fleet_client.add_member(name, &stage.kubeconfig()?).await
}

async fn repository(stage: &Stage, how: RepositoryFault, away: Duration) -> Result<()> {
    let repository = &stage.repository;
    match how {
        RepositoryFault::Gone => repository.stop().await?,
        RepositoryFault::Failing => repository.set_fault(RepositoryMode::Down(503)),
        RepositoryFault::Rubbish => repository.set_fault(RepositoryMode::Rubbish),
    }
    sleep(away).await;
    match how {
        RepositoryFault::Gone => repository.restart(),
        RepositoryFault::Failing | RepositoryFault::Rubbish => {
            repository.set_fault(RepositoryMode::None);
            Ok(())
        }
    }
}
