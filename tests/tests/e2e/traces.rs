//! Verifies that actions are traced to a collector, and that an unreachable collector delays nothing.

use krypton_tests::{
    AgentOptions, Collector, Hub, HubOptions, Membership, Mode, Parts, ReceivedSpan, ServedChart,
    TestResult, by_agent, eventually, fleet::FleetClient, home_and_edge,
};
use serde_json::json;

const SECRET: &str = "hunter2-traced";
const EXPORT_FAILED: &str = "failed to send traces";
const EXPORT_RESUMED: &str = "traces are sent again";
const STATUS_OK: i32 = 1;
const STATUS_ERROR: i32 = 2;

by_agent!(tenant_work_is_traced_without_blocking_on_collector);

async fn tenant_work_is_traced_without_blocking_on_collector(mode: Mode) -> TestResult {
    let chart = ServedChart::small(&format!("{{replicaCount: 0, token: {SECRET}}}")).await?;
    let (home, edge) = home_and_edge("traces", Parts::ControlPlane).await?;
    let (fleet_client, on_edge) = (FleetClient::new(&home), FleetClient::new(&edge));
    let mut collector = Collector::start().await?;
    let mut options =
        HubOptions::new(home.kubeconfig()).args(chart.flags(&["--self-cluster=false"]));
    for (name, value) in collector.env() {
        options = options.env(&name, &value);
    }
    let mut hub = Hub::start_ready(&options).await?;
    let access = edge.kubeconfig_with_token();
    let options = AgentOptions::new(edge.kubeconfig()).env(collector.env());
    let access_and_options = (access.as_str(), options);
    let mut member =
        Membership::join_with(mode, &mut hub, &home, access_and_options, "edge-1").await?;

    on_edge.install("acme").await?;
    fleet_client.install("acme").await?;
    let broken = format!("{{replicaCount: 0, broken: true, token: {SECRET}}}");
    chart.write(&broken)?;
    let failed = ("ClusterError/edge-1", "True", "UpgradeFailed");
    on_edge.wait_for("acme", &[failed]).await?;

    let work = |name: &'static str, attribute: &'static str, value: &'static str| {
        let collector = &collector;
        eventually(value, async move || {
            let spans = collector.spans();
            let matching = spans.into_iter().find(|span| {
                span.service == "krypton-agent"
                    && span.name == name
                    && span.attribute(attribute) == value
            });
            Ok(matching)
        })
    };
    let about_acme = |span: &ReceivedSpan| {
        assert_eq!(span.attribute("tenant"), "default/acme", "{span:?}");
        assert_eq!(span.attribute("member"), "edge-1", "{span:?}");
        assert_eq!(span.attribute("release"), "tenant-acme-edge-1", "{span:?}");
        assert_eq!(span.attribute("generation"), "1", "{span:?}");
        assert_eq!(span.parent, [0_u8; 0], "{span:?}");
    };
    let installed = work("work", "action", "install").await?;
    about_acme(&installed);
    assert_eq!(installed.status, STATUS_OK, "{installed:?}");
    let helm = work("helm", "verb", "install").await?;
    assert_eq!(helm.trace, installed.trace);
    assert_eq!(helm.parent, installed.id);
    assert_eq!(
        (helm.attribute("outcome"), helm.status),
        ("ok", STATUS_OK),
        "{helm:?}"
    );
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
    assert!(chart.attribute("chart").contains("small"), "{chart:?}");
    let upgraded = work("helm", "outcome", "failed").await?;
    assert_eq!(upgraded.attribute("verb"), "upgrade", "{upgraded:?}");
    assert_eq!(upgraded.status, STATUS_ERROR, "{upgraded:?}");
    let homes = collector.spans();
    let written = homes.iter().find(|span| span.name == "home").unwrap();
    assert_eq!(written.service, "krypton-hub", "{written:?}");
    assert_eq!(written.attribute("tenant"), "default/acme", "{written:?}");
    let endless = ["reconciler", "session", "proxy", "discovery"];
    assert!(homes.iter().all(|span| !endless.contains(&&*span.name)));
    let text = format!("{homes:?}");
    assert!(!text.contains(SECRET), "{text}");

    collector.stop().await;
    on_edge.remove("acme").await?;
    let actor = member.actor(&mut hub);
    actor.wait_for_log(EXPORT_FAILED).await?;
    collector.serve().await?;
    on_edge.create("other", json!({})).await?;
    actor.wait_for_log(EXPORT_RESUMED).await?;
    assert!(actor.stop().await?.success());
    let log = actor.log()?;
    assert_eq!(
        (
            log.matches(EXPORT_FAILED).count(),
            log.matches(EXPORT_RESUMED).count()
        ),
        (1, 1)
    );
    Ok(())
}
