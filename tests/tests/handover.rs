//! Who acts when one of the two is away: the hub for a lost agent, the agent without its hub.

use anyhow::bail;
use krypton_tests::{
    ChartRepository, ChartSource, Cluster, Hub, HubOptions, Membership, Mode, Pair, Parts,
    eventually,
    fleet::{Desk, PATIENCE, ValuesFile, chart_flags, values_flag},
};
use serde_json::json;

const ALL_READY: (&str, &str, &str) = ("Ready", "True", "AllClustersReady");
const CONNECTED: (&str, &str, &str) = ("Connected", "True", "Connected");

#[tokio::test]
async fn the_hub_takes_over_from_a_lost_agent_and_gives_way_when_it_is_back() {
    let repository = ChartRepository::start(&[ChartSource::small("1.0.0")])
        .await
        .unwrap();
    let (home, edge) = tokio::try_join!(
        Cluster::start("handover-home", Parts::ControlPlane),
        Cluster::start("handover-edge", Parts::WithControllers),
    )
    .unwrap();
    let (desk, at_edge) = (Desk::at(&home), Desk::at(&edge));
    let values = ValuesFile::new("replicaCount: 0").unwrap();
    let options = HubOptions::new(home.kubeconfig())
        .args(chart_flags(&repository, "small", "1.0.0"))
        .args([values_flag(&values)])
        .args(["--self-cluster=false", "--proxy-grace=5s"]);
    let mut hub = Hub::start(&options).unwrap();
    let mut member = Membership::join(Mode::Agent, &mut hub, &home, &edge, "edge-1")
        .await
        .unwrap();
    at_edge
        .create("default", "before", json!({}))
        .await
        .unwrap();
    at_edge
        .shows("default", "before", &[ALL_READY])
        .await
        .unwrap();
    let agents = at_edge.holder().await.unwrap();
    assert!(agents.starts_with("agent/"), "{agents}");

    // A hub that could act does not while the agent is there.
    desk.add_member("edge-1", &edge.kubeconfig_with_token())
        .await
        .unwrap();
    let resolved = ("TargetClusterResolved", "True", "Resolved");
    desk.member_shows("edge-1", &[resolved, CONNECTED])
        .await
        .unwrap();
    at_edge.lease_renewed().await.unwrap();
    assert_eq!(at_edge.holder().await.unwrap(), agents);
    desk.member_is("edge-1", Mode::Agent).await.unwrap();
    let releases = at_edge.releases().await.unwrap();
    let log = hub.log().unwrap();
    assert!(!log.contains("running helm"), "{log}");

    member.agent().unwrap().kill9().await.unwrap();
    at_edge
        .create("default", "meanwhile", json!({}))
        .await
        .unwrap();
    let hubs = at_edge.held_by_another(&agents).await.unwrap();
    assert!(hubs.starts_with("hub/"), "{hubs}");
    at_edge
        .shows("default", "meanwhile", &[ALL_READY])
        .await
        .unwrap();
    desk.member_is("edge-1", Mode::Proxy).await.unwrap();
    let log = hub.log().unwrap();
    assert_eq!(log.matches("running helm").count(), 1, "{log}");

    member.start_again(&edge).unwrap();
    let agents = at_edge.held_by_another(&hubs).await.unwrap();
    assert!(agents.starts_with("agent/"), "{agents}");
    desk.member_is("edge-1", Mode::Agent).await.unwrap();
    at_edge.create("default", "after", json!({})).await.unwrap();
    at_edge
        .shows("default", "after", &[ALL_READY])
        .await
        .unwrap();
    let logs = [hub.log(), member.agent().unwrap().log()].map(Result::unwrap);
    for log in &logs {
        assert_eq!(log.matches("running helm").count(), 1, "{log}");
    }
    let mut now = at_edge.releases().await.unwrap();
    now.retain(|name, _| releases.contains_key(name));
    assert_eq!(now, releases, "what was there is as it was");
    for name in ["before", "meanwhile", "after"] {
        let release = format!("tenant-{name}-edge-1");
        at_edge
            .newest_is(name, &release, 1, "deployed")
            .await
            .unwrap();
    }
}

#[tokio::test]
async fn an_agent_goes_on_without_its_hub_and_over_a_restart_too() {
    let repository = ChartRepository::start(&[ChartSource::small("1.0.0")])
        .await
        .unwrap();
    let mut pair = Pair::start("alone", Mode::Agent, Parts::WithControllers)
        .await
        .unwrap();
    let (desk, at_edge) = (Desk::at(pair.home()), pair.desk());
    let values = ValuesFile::new("replicaCount: 0").unwrap();
    let mut flags = chart_flags(&repository, "small", "1.0.0");
    flags.push(values_flag(&values));
    pair.open(flags).await.unwrap();
    at_edge.create("default", "with", json!({})).await.unwrap();
    at_edge
        .shows("default", "with", &[ALL_READY])
        .await
        .unwrap();

    pair.hub().unwrap().kill9().await.unwrap();
    at_edge
        .create("default", "without", json!({}))
        .await
        .unwrap();
    at_edge
        .shows("default", "without", &[ALL_READY])
        .await
        .unwrap();

    assert!(pair.actor().unwrap().stop().await.unwrap().success());
    pair.start_agent_again().unwrap();
    pair.actor().unwrap().ready(PATIENCE).await.unwrap();
    at_edge
        .create("default", "restarted", json!({}))
        .await
        .unwrap();
    at_edge
        .shows("default", "restarted", &[ALL_READY])
        .await
        .unwrap();
    let releases = at_edge.releases().await.unwrap();

    pair.start_hub_again().unwrap();
    eventually("home to count all three", PATIENCE, async || {
        let member = desk.member_shows("edge-1", &[CONNECTED]).await?;
        let tenants = member.status.unwrap_or_default().tenants;
        match tenants.map(|tenants| (tenants.total, tenants.ready)) {
            Some((3, 3)) => Ok(Some(())),
            tenants => bail!("{tenants:?}"),
        }
    })
    .await
    .unwrap();
    assert_eq!(at_edge.releases().await.unwrap(), releases);
}
