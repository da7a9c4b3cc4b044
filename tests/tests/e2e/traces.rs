//! Verifies that actions are traced to a collector, and that an unreachable collector delays nothing.

use krypton_tests::{
    AgentOptions, Collector, Hub, HubOptions, Membership, Mode, Parts, ServedChart, TestResult,
    Traced, by_agent, eventually,
    fleet::{FleetClient, PATIENCE},
    home_and_edge,
};
use serde_json::json;

const SECRET: &str = "hunter2-traced";
const AWAY: &str = "failed to send traces";
const BACK: &str = "traces are sent again";
const GOOD: i32 = 1;
const BAD: i32 = 2;

by_agent!(tenant_work_is_traced_without_blocking_on_collector);

async fn tenant_work_is_traced_without_blocking_on_collector(mode: Mode) -> TestResult {
    let chart = ServedChart::small(&format!("{{replicaCount: 0, token: {SECRET}}}")).await?;
    let (home, edge) = home_and_edge("traces", Parts::ControlPlane).await?;
    let (fleet_client, on_edge) = (FleetClient::at(&home), FleetClient::at(&edge));
    let mut collector = Collector::start().await?;
    let mut options =
        HubOptions::new(home.kubeconfig()).args(chart.flags(&["--self-cluster=false"]));
    for (name, value) in collector.env() {
        options = options.env(&name, &value);
    }
    let mut hub = Hub::start(&options)?;
    hub.ready(PATIENCE).await?;
    let access = edge.kubeconfig_with_token();
    let options = AgentOptions::new(edge.kubeconfig()).env(collector.env());
    let by = (access.as_str(), options);
    let mut member = Membership::join_by(mode, &mut hub, &home, by, "edge-1").await?;

    on_edge.install("acme").await?;
    fleet_client.install("acme").await?;
    let broken = format!("{{replicaCount: 0, broken: true, token: {SECRET}}}");
    chart.write(&broken)?;
    let failed = ("ClusterError/edge-1", "True", "UpgradeFailed");
    on_edge.shows("acme", &[failed]).await?;

    let work = |name: &'static str, attribute: &'static str, value: &'static str| {
        let collector = &collector;
        eventually(value, async move || {
            let spans = collector.spans();
            let found = spans.into_iter().find(|span| {
                span.service == "krypton-agent" && span.name == name && span.of(attribute) == value
            });
            Ok(found)
        })
    };
    let about_acme = |span: &Traced| {
        assert_eq!(span.of("tenant"), "default/acme", "{span:?}");
        assert_eq!(span.of("member"), "edge-1", "{span:?}");
        assert_eq!(span.of("release"), "tenant-acme-edge-1", "{span:?}");
        assert_eq!(span.of("generation"), "1", "{span:?}");
        assert_eq!(span.parent, [0_u8; 0], "{span:?}");
    };
    let installed = work("work", "action", "install").await?;
    about_acme(&installed);
    assert_eq!(installed.status, GOOD, "{installed:?}");
    let helm = work("helm", "verb", "install").await?;
    assert_eq!(helm.trace, installed.trace);
    assert_eq!(helm.parent, installed.id);
    assert_eq!((helm.of("outcome"), helm.status), ("ok", GOOD), "{helm:?}");
    let output = helm
        .events
        .iter()
        .any(|event| event.contains("running helm"));
    assert!(
        output
            || installed
                .events
                .iter()
                .any(|event| event.contains("running helm"))
    );
    let chart = work("chart", "outcome", "ok").await?;
    assert!(chart.of("chart").contains("small"), "{chart:?}");
    let upgraded = work("helm", "outcome", "failed").await?;
    assert_eq!(upgraded.of("verb"), "upgrade", "{upgraded:?}");
    assert_eq!(upgraded.status, BAD, "{upgraded:?}");
    let homes = collector.spans();
    let written = homes.iter().find(|span| span.name == "home").unwrap();
    assert_eq!(written.service, "krypton-hub", "{written:?}");
    assert_eq!(written.of("tenant"), "default/acme", "{written:?}");
    let endless = ["reconciler", "session", "proxy", "discovery"];
    assert!(homes.iter().all(|span| !endless.contains(&&*span.name)));
    let text = format!("{homes:?}");
    assert!(!text.contains(SECRET), "{text}");

    collector.stop().await;
    on_edge.remove("acme").await?;
    let actor = member.actor(&mut hub);
    actor.logs(AWAY).await?;
    collector.serve().await?;
    on_edge.create("other", json!({})).await?;
    actor.logs(BACK).await?;
    assert!(actor.stop().await?.success());
    let log = actor.log()?;
    assert_eq!(
        (log.matches(AWAY).count(), log.matches(BACK).count()),
        (1, 1)
    );
    Ok(())
}
