//! Injects a fault, keeps it for its duration, and repairs it.

use std::time::Duration;

use anyhow::{Context, Result, bail};
use futures::future::try_join_all;
use krypton_tests::{
    Answer, Fault as OfRepository, Lie, Traffic, answering_proxy::ALL, fleet::FleetClient,
};
use kube::Client;
use tokio::time::sleep;

use super::{
    expected_state::ExpectedState,
    fault::{Answered, Away, Fault, Way},
    hubs::{self, Post},
    person::Person,
    stage::{Stage, VERSIONS, message, values},
    whom::{Edge, Seat},
};

/// A restarted hub waits for home, which can be unreachable.
const AGAIN: Duration = Duration::from_secs(10);

pub(crate) async fn carry_out(
    fault: &Fault,
    stage: &Stage,
    home: &Client,
    expected_state: &ExpectedState,
) -> Result<()> {
    let away = fault.away();
    match fault {
        Fault::HubKilled { hub, .. } => {
            let post = stage.hubs.at(*hub)?;
            let mut hub = post.hub.lock().await;
            hub.kill9().await?;
            sleep(away).await;
            stage.start_hub(post, &mut hub)
        }
        Fault::HubStopped { hub, .. } => {
            let post = stage.hubs.at(*hub)?;
            let mut hub = post.hub.lock().await;
            hub.stop().await?;
            sleep(away).await;
            stage.start_hub(post, &mut hub)
        }
        Fault::HubFrozen { hub, .. } => frozen(stage.hubs.at(*hub)?, away).await,
        Fault::LeadFrozen { .. } => {
            let holder = hubs::holder(home).await?;
            let leads = Seat::holding(&holder).context("there is no leader")?;
            frozen(stage.hubs.at(leads)?, away).await
        }
        Fault::HubsKilled { .. } => {
            // Every code path locks the hubs in this order.
            let mut all = Vec::new();
            for post in stage.hubs.all() {
                all.push((post, post.hub.lock().await));
            }
            try_join_all(all.iter_mut().map(|(_, hub)| hub.kill9())).await?;
            sleep(away).await;
            all.iter_mut()
                .try_for_each(|(post, hub)| stage.start_hub(post, hub))
        }
        Fault::HomeWay { hub, way, .. } => {
            let post = stage.hubs.at(*hub)?;
            post.set_way(traffic(*way));
            sleep(away).await;
            post.set_way(Traffic::Pass);
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
            stage.hubs.set_links(*hub, traffic(*way));
            sleep(away).await;
            stage.hubs.set_links(*hub, Traffic::Pass);
            Ok(())
        }
        Fault::Way { edge, way, .. } => {
            let line = &stage.site(*edge).way;
            line.set(traffic(*way));
            sleep(away).await;
            line.set(Traffic::Pass);
            Ok(())
        }
        Fault::Answers { edge, answer, .. } => {
            let proxy = &stage.site(*edge).answers;
            proxy.lie(lie(*answer));
            sleep(away).await;
            proxy.forward_all();
            Ok(())
        }
        Fault::Kubeconfig { .. } => kubeconfig(stage, away).await,
        Fault::Message { number } => {
            expected_state.change(|expected| expected.message = message(*number));
            stage.values.write(&values(&message(*number)))
        }
        Fault::Version { number } => {
            let version = VERSIONS
                .get(*number as usize)
                .copied()
                .unwrap_or(VERSIONS[0]);
            expected_state.change(|expected| expected.version = version.to_owned());
            stage.hubs.set_version(*number);
            rolled_out(stage).await
        }
        Fault::Repository { how, .. } => repository(stage, *how, away).await,
        _ => Box::pin(by_person(fault, stage, home, expected_state)).await,
    }
}

/// Performs a user's action at an API server.
async fn by_person(
    fault: &Fault,
    stage: &Stage,
    home: &Client,
    expected_state: &ExpectedState,
) -> Result<()> {
    let person = |edge: Edge| Person::at(stage.site(edge), home, expected_state);
    match fault {
        Fault::Crd { edge } => person(*edge).delete_crd().await,
        Fault::Created { tenant, workspace } => {
            person(tenant.edge()).create(*tenant, *workspace).await
        }
        Fault::Deleted { tenant } => person(tenant.edge()).delete(*tenant).await,
        Fault::Recreated { tenant, workspace } => {
            let person = person(tenant.edge());
            person.delete(*tenant).await?;
            person.create(*tenant, *workspace).await
        }
        Fault::WorkspaceSet { tenant } => person(tenant.edge()).set_workspace(*tenant).await,
        Fault::Paused { tenant, .. } => {
            let person = person(tenant.edge());
            person.pause(*tenant, true).await?;
            sleep(fault.away()).await;
            person.pause(*tenant, false).await
        }
        Fault::ReleaseDeleted { tenant, all } => {
            person(tenant.edge()).delete_release(*tenant, *all).await
        }
        Fault::ReleaseDamaged { tenant } => person(tenant.edge()).damage_release(*tenant).await,
        Fault::ReleaseMarked { tenant, mark } => {
            person(tenant.edge()).mark_release(*tenant, *mark).await
        }
        Fault::ForeignObject { tenant, number } => {
            person(tenant.edge()).put_object(*tenant, *number).await
        }
        Fault::ForeignRelease { tenant, number } => {
            person(tenant.edge()).put_release(*tenant, *number).await
        }
        Fault::ForeignFinalizer { tenant } => person(tenant.edge()).finalizer(*tenant, true).await,
        Fault::Drift {
            tenant,
            object,
            gone,
        } => person(tenant.edge()).drift(*tenant, *object, *gone).await,
        _ => bail!("{fault:?} is not a user's action"),
    }
}

async fn frozen(post: &Post, away: Duration) -> Result<()> {
    let mut hub = post.hub.lock().await;
    hub.freeze()?;
    sleep(away).await;
    hub.thaw()
}

/// Waits like a Deployment: the next hub stops when this one is ready or the time is over.
async fn rolled_out(stage: &Stage) -> Result<()> {
    for post in stage.hubs.all() {
        let mut hub = post.hub.lock().await;
        hub.stop().await?;
        stage.start_hub(post, &mut hub)?;
        // The end of the burst reports a hub that has ended again.
        hub.ready(AGAIN).await.ok();
    }
    Ok(())
}

fn traffic(way: Way) -> Traffic {
    match way {
        Way::Cut => Traffic::Cut,
        Way::Slow(delay) => Traffic::Delay(delay),
        Way::Swallowed => Traffic::Swallow {
            there: true,
            back: true,
        },
        Way::Frozen => Traffic::Freeze,
    }
}

fn lie(answer: Answered) -> Lie {
    Lie {
        verbs: ALL,
        resources: &[],
        answer: match answer {
            Answered::Status(code) => Answer::Status(code),
            Answered::Page(code) => Answer::Page(code),
            Answered::Nothing => Answer::Nothing,
            Answered::Closed => Answer::Closed,
        },
    }
}

async fn kubeconfig(stage: &Stage, away: Duration) -> Result<()> {
    let fleet_client = FleetClient::at(&stage.home);
    let name = Edge::Two.name();
    fleet_client.add_member(name, "{rubbish: [").await?;
    sleep(away).await;
    fleet_client.add_member(name, &stage.kubeconfig()?).await
}

async fn repository(stage: &Stage, how: Away, away: Duration) -> Result<()> {
    let repository = &stage.repository;
    match how {
        Away::Gone => repository.stop().await?,
        Away::Failing => repository.set_fault(OfRepository::Down(503)),
        Away::Rubbish => repository.set_fault(OfRepository::Rubbish),
    }
    sleep(away).await;
    match how {
        Away::Gone => repository.start_again(),
        Away::Failing | Away::Rubbish => {
            repository.set_fault(OfRepository::None);
            Ok(())
        }
    }
}
