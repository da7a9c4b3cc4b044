//! Shows that mutually untrusted Tenants are confined to a namespace and a service account each.

use anyhow::Result;
use krypton_tests::{
    Cluster, Mode, Scenario, TestResult, assert_contains, by_agent, fleet::FleetClient,
};
use serde_json::{Value, json};

use crate::attacks::workspace::Editor;

const TEAMS: [&str; 2] = ["team-a", "team-b"];

by_agent!(tenant_reaches_nothing_beyond_its_namespace_and_account);

/// Creates a namespace with an account that can edit it.
async fn create_team(cluster: &Cluster, name: &str) {
    let bind = "create rolebinding installer --clusterrole=edit";
    for args in [
        format!("create namespace {name}"),
        format!("create serviceaccount installer -n {name}"),
        format!("{bind} --serviceaccount={name}:installer -n {name}"),
    ] {
        cluster.kubectl_line(&args).await.unwrap();
    }
}

/// Creates a Tenant of the first team that fails for this reason, and returns the message.
async fn wait_for_failure(
    team: &FleetClient,
    error: &str,
    name: &str,
    spec: Value,
    reason: &str,
) -> Result<String> {
    team.create(name, spec).await?;
    let expected = (error, "True", reason);
    team.condition_message(name, &[expected]).await
}

async fn tenant_reaches_nothing_beyond_its_namespace_and_account(mode: Mode) -> TestResult {
    let flags = [
        "--tenant-values=true",
        "--no-cross-namespace-refs=true",
        "--default-service-account=installer",
    ];
    let (pair, _chart) = Scenario::new("lockdown", mode)
        .flags(&flags)
        .start()
        .await?;
    let (fleet_client, error) = (pair.fleet_client(), pair.condition("ClusterError"));
    let team = fleet_client.in_namespace(TEAMS[0]);
    for name in TEAMS {
        create_team(pair.cluster(), name).await;
        let spec = json!({"workspace": name, "values": {"replicaCount": 0}});
        fleet_client.in_namespace(name).create("acme", spec).await?;
        fleet_client.in_namespace(name).wait_ready("acme").await?;
    }

    let other = json!({"workspace": TEAMS[1]});
    let message = wait_for_failure(&team, &error, "raid", other, "NamespaceNotOwned").await?;
    assert_contains!(message, "mesh.openkcm.io/adopt=team-a/raid");
    let with = |values: Value| json!({"workspace": TEAMS[0], "values": values});
    let cases = [
        ("elsewhere", with(json!({"elsewhere": TEAMS[1]}))),
        ("wide", with(json!({"clusterWide": true}))),
        // An account without rights.
        (
            "nobody",
            json!({"workspace": TEAMS[0], "serviceAccountName": "nobody"}),
        ),
    ];
    for (name, spec) in cases {
        let message = wait_for_failure(&team, &error, name, spec, "InstallFailed").await?;
        let message = format!("{name}: {message}");
        assert_contains!(message, "forbidden", "system:serviceaccount:team-a:");
    }
    for object in ["configmap beyond -n team-b", "clusterrole beyond"] {
        let get = format!("get --ignore-not-found -o name {object}");
        assert_eq!(pair.cluster().kubectl_line(&get).await?, "");
    }
    // The Tenant author's annotation alone doesn't transfer a release.
    team.annotate("raid", "mesh.openkcm.io/adopt", "true")
        .await?;
    // A user who can edit the namespace changes the stored release.
    let editor = Editor::new(&pair, TEAMS[0], "acme").await;
    let tampered = (error.as_str(), "True", "ReleaseTampered");
    editor.tamper().await;
    team.wait_for("acme", &[tampered]).await?;
    editor.wait_and_check_rights().await?;
    editor.delete_revisions().await;
    team.wait_ready("acme").await?;
    editor.forge(2, "failed").await?;
    editor.wait_and_check_rights().await?;
    editor.delete_revisions().await;
    team.wait_ready("acme").await?;
    let refused = (error.as_str(), "True", "NamespaceNotOwned");
    team.wait_for("raid", &[refused]).await?;
    let raid = pair.release("raid");
    assert_eq!(fleet_client.revisions(TEAMS[1], &raid).await?, []);

    // The deletion works with the same rights as the installation.
    team.remove("acme").await?;
    let release = pair.release("acme");
    let revisions = fleet_client.revisions(TEAMS[0], &release).await?;
    assert!(revisions.is_empty(), "{revisions:?}");
    fleet_client
        .in_namespace(TEAMS[1])
        .wait_ready("acme")
        .await?;
    Ok(())
}
