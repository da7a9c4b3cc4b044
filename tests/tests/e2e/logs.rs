//! Verifies that log lines about a Tenant name it, and that the log level can be changed at runtime.

use krypton_tests::{
    AgentOptions, Daemon, Hub, HubOptions, Parts, ServedChart, TestResult, assert_contains,
    eventually, fleet::FleetClient, home_and_edge, kubectl_krypton, membership::enrolled_agent,
};
use serde_json::{Value, json};

/// Targets whose log lines always concern one Tenant or deployment.
const TENANT_TARGETS: [&str; 3] = [
    "krypton_reconciler::actions",
    "krypton_helm::driver",
    "krypton_reconciler::drift",
];

/// Returns all log lines as JSON objects.
fn lines(daemon: &Daemon) -> Vec<Value> {
    let log = daemon.log().unwrap();
    let line = |line: &str| -> Value {
        let read = serde_json::from_str(line);
        read.unwrap_or_else(|error| panic!("{error} in line {line}"))
    };
    log.lines().map(line).collect()
}

fn is_message(line: &Value, message: &str) -> bool {
    line["message"] == message
}

fn check_lines(lines: &[Value], program: &str) {
    assert!(!lines.is_empty());
    for line in lines {
        for key in ["timestamp", "level", "target", "message"] {
            assert!(line[key].is_string(), "{key} of {line}");
        }
        assert_eq!(line["program"], program, "{line}");
        let target = line["target"].as_str().unwrap();
        let of_one = line["tenant"].is_string() || line["deployment"].is_string();
        if TENANT_TARGETS
            .iter()
            .any(|prefix| target.starts_with(prefix))
        {
            assert!(of_one, "{line}");
        }
        if of_one {
            assert!(line["member"].is_string(), "{line}");
            assert!(line["generation"].is_number(), "{line}");
        }
    }
}

/// Verifies the agent's log while its only Tenant fails.
async fn check_dump(agent: &Daemon) {
    let dump: Value = serde_json::from_str(&agent.debug("agent.json").await.unwrap()).unwrap();
    for (pointer, expected) in [
        ("/member", json!("edge-1")),
        ("/session/up", json!(true)),
        ("/desired/chart/name", json!("small")),
        ("/reconciling", json!("reported")),
        ("/reconciler/lease/writes", json!(true)),
        ("/reconciler/listsComplete", json!(true)),
        ("/reconciler/ownerCount", json!(1)),
        ("/reconciler/owners/0/key", json!("default/acme")),
        ("/reconciler/owners/0/error/reason", json!("UpgradeFailed")),
        ("/charts/0/state", json!("cached")),
    ] {
        assert_eq!(
            dump.pointer(pointer),
            Some(&expected),
            "{pointer} of {dump}"
        );
    }
    for pointer in [
        "/session/forSeconds",
        "/session/secondsSinceMessage",
        "/certificateExpiry",
        "/reconciler/lease/heldForSeconds",
    ] {
        let has_value = dump
            .pointer(pointer)
            .is_some_and(|has_value| !has_value.is_null());
        assert!(has_value, "{pointer} of {dump}");
    }
    assert_eq!(
        dump["desired"]["digest"], dump["applied"]["digest"],
        "{dump}"
    );
    let reconciler = &dump["reconciler"];
    assert_eq!(dump["desired"]["version"], reconciler["recordedVersion"]);
}

#[tokio::test]
async fn log_lines_identify_tenant_and_level_changes_live() -> TestResult {
    let chart = ServedChart::small("replicaCount: 0").await?;
    let (home, edge) = home_and_edge("logs", Parts::ControlPlane).await?;
    let (fleet_client, on_edge) = (FleetClient::new(&home), FleetClient::new(&edge));
    let options = HubOptions::new(home.kubeconfig())
        .args(chart.flags(&["--self-cluster=false", "--log-format=json"]))
        .env("POD_NAME", "krypton-hub-0");
    let hub = Hub::start_ready(&options).await?;
    let json = [("KRYPTON_LOG_FORMAT".to_owned(), "json".to_owned())];
    let options = AgentOptions::new(edge.kubeconfig()).env(json);
    let agent = enrolled_agent(&home, "edge-1", options).await?;
    assert_eq!(agent.debug("log").await?, "info\n");
    assert!(agent.set_log_filter("loud", "").await.is_err());
    assert!(agent.set_log_filter("debug", "?for=25h").await.is_err());
    // The debug address that `kubectl krypton` otherwise finds through a pod.
    let debug_address = format!("--debug-address={}", agent.debug_address());
    let level = async |args: &[&str]| {
        let args = [&["log-level", "agent", &debug_address], args].concat();
        kubectl_krypton(&edge, &args).await
    };
    let expected = format!("{}: info\n", agent.debug_address());
    assert_eq!(level(&[]).await?, expected);
    let refused = format!("{:#}", level(&["loud"]).await.unwrap_err());
    assert_contains!(refused, "loud");
    let set = level(&["debug", "--for=24h"]).await?;
    assert!(
        set.contains(": debug until ") && set.ends_with(", then info\n"),
        "{set}"
    );

    on_edge.install("acme").await?;
    chart.write("{replicaCount: 0, broken: true}")?;
    let failed = ("ClusterError/edge-1", "True", "UpgradeFailed");
    on_edge.wait_for("acme", &[failed]).await?;
    // The Tenant of the same name on home, which the hub writes.
    fleet_client.create("acme", json!({})).await?;
    fleet_client.wait_for("acme", &[failed]).await?;

    check_dump(&agent).await;
    assert!(hub.debug("agent.json").await.is_err());
    agent.set_log_filter("debug", "?for=1s").await?;
    eventually("the initial level", async || {
        let now = agent.debug("log").await?;
        Ok((now == "info\n").then_some(()))
    })
    .await?;
    on_edge.remove("acme").await?;

    let dump: Value = serde_json::from_str(&hub.debug("fleet.json").await?)?;
    assert_eq!(dump["leader"]["state"], "leading", "{dump}");
    assert_eq!(dump["replica"], "krypton-hub-0");
    assert_eq!(dump["chart"]["name"], "small", "{dump}");
    assert_eq!(dump["ca"]["phase"], "Steady", "{dump}");
    let member = &dump["members"]["edge-1"];
    assert_eq!(member["mode"], "agent", "{dump}");
    assert_eq!(member["conditions"]["Connected"]["status"], "True");
    let desired = &member["snapshot"]["desired"];
    assert!(desired["digest"].is_string(), "{dump}");
    let other = hub.debug("fleet.json?member=edge-2").await?;
    let other: Value = serde_json::from_str(&other)?;
    assert_eq!(other["members"], json!({}));

    let hubs = lines(&hub);
    check_lines(&hubs, "krypton-hub");
    assert!(hubs.iter().all(|line| line["replica"] == "krypton-hub-0"));
    let logged = lines(&agent);
    check_lines(&logged, "krypton-agent");
    let of_acme = |message: &str| {
        let mut matching = logged.iter().filter(|line| is_message(line, message));
        let line = matching
            .next()
            .unwrap_or_else(|| panic!("{message:?} is missing"));
        assert_eq!(line["tenant"], "default/acme", "{line}");
        assert_eq!(line["member"], "edge-1", "{line}");
        assert_eq!(line["release"], "tenant-acme-edge-1", "{line}");
    };
    for message in [
        "running helm",
        "deployed",
        "action failed; retrying",
        "running helm uninstall",
    ] {
        of_acme(message);
    }
    let position = |message: &str| logged.iter().position(|line| is_message(line, message));
    let first = position("changed the log filter by PUT /debug/log").unwrap();
    let last = position("running helm uninstall").unwrap();
    let debug = |line: &Value| line["level"] == "DEBUG";
    assert!(!logged[..first].iter().any(debug));
    assert!(logged[first..last].iter().any(debug));
    assert!(!logged[last..].iter().any(debug));
    assert!(position("restored the log filter of the start").is_some());
    Ok(())
}
