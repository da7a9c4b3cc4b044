//! Injects a fault, keeps it for its duration, and repairs it.

use std::time::Duration;

use anyhow::{Context, Result, bail};
use futures::future::try_join_all;
use krypton_tests::{
    Fault as RepositoryFault, ResponseFault, Traffic, answering_proxy::ALL_VERBS,
    fleet::FleetClient,
};
use kube::Client;
use tokio::time::sleep;

use super::{
    expected_state::ExpectedState,
    fault::{Action, Fault},
    hubs::{self, RunningHub, VERSIONS},
    person::UserActions,
    stage::{Stage, message, values},
    whom::{Edge, HubId},
};

/// A restarted hub waits for home, which can be unreachable.
const RESTART_DEADLINE: Duration = Duration::from_secs(10);

pub(crate) async fn carry_out(
    Fault { action, away }: Fault,
    stage: &Stage,
    home: &Client,
    expected_state: &ExpectedState,
) -> Result<()> {
    match action {
        Action::HubKilled(hub) => {
            let running_hub = stage.hubs.get(hub)?;
            let mut hub = running_hub.hub.lock().await;
            hub.kill9().await?;
            sleep(away).await;
            stage.start_hub(running_hub, &mut hub)
        }
        Action::HubStopped(hub) => {
            let running_hub = stage.hubs.get(hub)?;
            let mut hub = running_hub.hub.lock().await;
            hub.stop().await?;
            sleep(away).await;
            stage.start_hub(running_hub, &mut hub)
        }
        Action::HubFrozen(hub) => freeze_hub(stage.hubs.get(hub)?, away).await,
        Action::LeadFrozen => {
            let holder = hubs::holder(home).await?;
            let leader = HubId::holding(&holder).context("there is no leader")?;
            freeze_hub(stage.hubs.get(leader)?, away).await
        }
        Action::HubsKilled => {
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
        Action::HomeWay(hub, traffic) => {
            let running_hub = stage.hubs.get(hub)?;
            running_hub.set_home_traffic(traffic);
            sleep(away).await;
            running_hub.set_home_traffic(Traffic::Pass);
            Ok(())
        }
        Action::AgentKilled => {
            let mut agent = stage.agent.lock().await;
            agent.kill9().await?;
            sleep(away).await;
            stage.start_agent(&mut agent)
        }
        Action::HelmKilled => {
            stage.kill_helms();
            Ok(())
        }
        Action::AgentFrozen => {
            let mut agent = stage.agent.lock().await;
            agent.freeze()?;
            sleep(away).await;
            agent.thaw()
        }
        Action::ApiserverKilled(edge) => {
            let cluster = &stage.site(edge).cluster;
            cluster.stop_apiserver().await?;
            sleep(away).await;
            cluster.start_apiserver().await
        }
        Action::PowerLost(edge) => {
            let cluster = &stage.site(edge).cluster;
            cluster.power_off().await?;
            sleep(away).await;
            cluster.power_on().await
        }
        Action::Link(hub, traffic) => {
            stage.hubs.set_links(hub, traffic);
            sleep(away).await;
            stage.hubs.set_links(hub, Traffic::Pass);
            Ok(())
        }
        Action::Way(edge, traffic) => {
            let proxy = &stage.site(edge).fault_proxy;
            proxy.set(traffic);
            sleep(away).await;
            proxy.set(Traffic::Pass);
            Ok(())
        }
        Action::Answers(edge, response) => {
            let proxy = &stage.site(edge).answering_proxy;
            proxy.inject(ResponseFault {
                verbs: ALL_VERBS,
                resources: &[],
                response,
            });
            sleep(away).await;
            proxy.forward_all();
            Ok(())
        }
        Action::Kubeconfig => kubeconfig(stage, away).await,
        Action::Message(number) => {
            expected_state.update(|expected| expected.message = message(number));
            stage.values.write(&values(&message(number)))
        }
        Action::Version(number) => {
            let version = VERSIONS.get(number as usize).unwrap_or(&VERSIONS[0]);
            expected_state.update(|expected| expected.version = (*version).to_owned());
            stage.hubs.set_version(number);
            restart_all_hubs(stage).await
        }
        Action::Repository(fault) => repository(stage, fault, away).await,
        _ => {
            Box::pin(perform_user_action(
                action,
                away,
                stage,
                home,
                expected_state,
            ))
            .await
        }
    }
}

/// Performs a user's action at an API server.
async fn perform_user_action(
    action: Action,
    away: Duration,
    stage: &Stage,
    home: &Client,
    expected_state: &ExpectedState,
) -> Result<()> {
    let edge = action.edge().context("no user action")?;
    let user = UserActions::new(stage.site(edge), home, expected_state);
    match action {
        Action::Crd(_) => user.delete_crd().await,
        Action::Created(tenant, workspace) => user.create(tenant, workspace).await,
        Action::Deleted(tenant) => user.delete(tenant).await,
        Action::Recreated(tenant, workspace) => {
            user.delete(tenant).await?;
            user.create(tenant, workspace).await
        }
        Action::WorkspaceSet(tenant) => user.set_workspace(tenant).await,
        Action::Paused(tenant) => {
            user.pause(tenant, true).await?;
            sleep(away).await;
            user.pause(tenant, false).await
        }
        Action::ReleaseDeleted(tenant, all) => user.delete_release(tenant, all).await,
        Action::ReleaseDamaged(tenant) => user.damage_release(tenant).await,
        Action::ReleaseMarked(tenant, mark) => user.mark_release(tenant, mark).await,
        Action::ForeignObject(tenant, number) => user.create_foreign_object(tenant, number).await,
        Action::ForeignRelease(tenant, number) => {
            user.install_foreign_release(tenant, number).await
        }
        Action::ForeignFinalizer(tenant) => user.set_finalizer(tenant, true).await,
        Action::Drift(tenant, object, gone) => user.drift(tenant, object, gone).await,
        _ => bail!("{action:?} is not a user's action"),
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

async fn kubeconfig(stage: &Stage, away: Duration) -> Result<()> {
    let fleet_client = FleetClient::new(&stage.home);
    let name = Edge::Two.name();
    fleet_client.add_member(name, "{rubbish: [").await?;
    sleep(away).await;
    fleet_client.add_member(name, &stage.kubeconfig()?).await
}

/// Injects a fault into the repository, or stops it.
async fn repository(stage: &Stage, fault: Option<RepositoryFault>, away: Duration) -> Result<()> {
    let repository = &stage.repository;
    match fault {
        Some(fault) => repository.set_fault(fault),
        None => repository.stop().await?,
    }
    sleep(away).await;
    match fault {
        Some(_) => repository.set_fault(RepositoryFault::None),
        None => repository.restart()?,
    }
    Ok(())
}
