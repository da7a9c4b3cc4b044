//! Shows that a KryptonDeployment on the home cluster is installed on its member, reported at home, and removed only
//! after the uninstall on the member.

mod regions;

use krypton_crds::krypton_deployment::{
    DeploymentPhase, KryptonDeployment, KryptonDeploymentStatus,
};
use krypton_crds::tenant::{HistoryEntry, RevisionCause, RevisionOutcome};
use krypton_tests::{
    Merge as _, Mode, TestResult, argo_health, assert_contains, by_agent,
    fleet::{FleetClient, condition},
    kstatus, kubectl_krypton,
    no_tenants::assert_no_tenant_crd,
    wait_until_gone, wait_until_replaced,
};
use krypton_types::names;

use k8s_openapi::{
    api::core::v1::{ConfigMap, Namespace, Secret},
    apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition,
};
use kube::{
    Api, ResourceExt,
    api::{DeleteParams, PostParams},
};
use regions::{RegionOptions, Regions, placed_clusters};
use serde_json::json;

by_agent!(
    deployment_is_routed_installed_repaired_and_removed,
    namesake_is_rejected_and_crd_deletion_uninstalls_nothing,
);

const READY: (&str, &str, &str) = ("Ready", "True", "Deployed");

async fn deployment_is_routed_installed_repaired_and_removed(mode: Mode) -> TestResult {
    // With this interval, retries happen during the test only on a user's request.
    let unusual = RegionOptions {
        as_kamajis: true,
        flags: &["--retry-max=15m"],
    };
    let mut regions = Regions::start_with("routed", mode, &["paris"], unusual).await?;
    regions.replace_agent("paris", &["--retry-max=15m"]).await;
    let key = ("default", "acme");
    regions.create(key, regions.region("paris")).await;
    let object = regions.wait_for(key, READY).await;
    let status = object.status.clone().unwrap();
    assert_eq!(status.phase, Some(DeploymentPhase::Ready));
    let line = status.last_message.clone().unwrap();
    assert_eq!(line, "Successfully deployed to region paris");
    assert_derived(&regions, key.1, "Current: ", "Healthy").await?;
    let chart = status.last_applied_chart.clone().unwrap();
    assert!(chart.ends_with("/small:1.0.0"), "{chart}");
    let finalizers = object.finalizers();
    assert_eq!(finalizers, [names::DEPLOYMENT_FINALIZER]);
    assert_eq!(placed_clusters(&status), [regions.member("paris")]);
    let resolved = ("TargetClusterResolved", "True", "ByAgent");
    regions.wait_for(key, resolved).await;
    let explain = ["explain", "deployment", key.1, "-n", key.0];
    let explained = kubectl_krypton(&regions.home, &explain).await?;
    assert_contains!(explained, "✓ Deployed: ");
    let reasons = [
        "AccountValidated",
        "FinalizerAdded",
        "Routing",
        "EdgeNamespaceCreated",
        "HelmDeployed",
        "Ready",
    ];
    regions.wait_for_events(key, &reasons).await;
    let fleet_client = regions.edge("paris");
    fleet_client.wait_deployed("acme", "ced-acme", 1).await?;

    edge_changes_are_reverted(&regions, key).await?;
    chart_and_user_changes_reach_it(&regions, key).await?;

    let history = wait_for_history(&regions, key).await;
    // A new hub has only the state on the home cluster. The cleanup of the earlier failure is still running.
    regions.replace_hub().await?;
    let account = json!({"spec": {"account": {"displayName": "Acme"}}});
    regions.patch(key, account).await;
    regions.wait_for(key, READY).await;
    fleet_client.wait_deployed("acme", "ced-acme", 5).await?;
    assert_eq!(wait_for_history(&regions, key).await, history);

    regions.remove(key).await;
    assert!(fleet_client.revisions("acme", "ced-acme").await?.is_empty());
    fleet_client.wait_for_namespace_deletion("acme").await?;
    let reasons = [
        "DeleteStarted",
        "HelmUninstalled",
        "EdgeNamespaceDeleteRequested",
        "FinalizerRemoved",
    ];
    regions.wait_for_events(key, &reasons).await;
    assert_no_tenant_crd(&regions.edges["paris"]).await?;
    Ok(())
}

/// Returns the newest entries of the history: the last upgrade, and the failed attempts before it.
async fn wait_for_history(regions: &Regions, key: (&str, &str)) -> Vec<HistoryEntry> {
    let expected = [
        (5, RevisionOutcome::Deployed, RevisionCause::Values),
        (4, RevisionOutcome::Failed, RevisionCause::Retry),
        (3, RevisionOutcome::Failed, RevisionCause::Values),
    ];
    let is_listed = |_: &KryptonDeployment, status: &KryptonDeploymentStatus| {
        let newest = status.history.iter().take(expected.len());
        let shown = newest.map(|entry| (entry.revision, entry.outcome, entry.cause));
        shown.eq(expected)
    };
    let what = "the history to list the last revisions";
    let object = regions.wait_until(key, what, is_listed).await;
    let mut history = object.status.unwrap_or_default().history;
    history.truncate(expected.len());
    let member = regions.member("paris");
    for entry in &history {
        let (cluster, version) = (entry.cluster.as_deref(), entry.chart_version.as_deref());
        assert_eq!(cluster, Some(member.as_str()), "{entry:?}");
        assert_eq!(version, Some("1.0.0"), "{entry:?}");
    }
    assert_eq!(history[0].by.as_deref(), Some(names::HUB_MANAGER));
    history
}

/// Checks what Flux, Helm and Argo CD derive from the KryptonDeployment in namespace default.
async fn assert_derived(regions: &Regions, name: &str, status: &str, health: &str) -> TestResult {
    let kind = "kryptondeployment";
    let derived = kstatus(&regions.home, kind, name).await?;
    assert!(derived.starts_with(status), "{name}: {derived}");
    let derived = argo_health(&regions.home, kind, name).await?;
    assert!(derived.starts_with(health), "{name}: {derived}");
    Ok(())
}

async fn edge_changes_are_reverted(regions: &Regions, key: (&str, &str)) -> TestResult {
    let fleet_client = regions.edge("paris");
    let maps: Api<ConfigMap> = Api::namespaced(fleet_client.client.clone(), "acme");
    let complete = async || {
        fleet_client
            .wait_for_message("acme", "ced-acme", "hello")
            .await
            .unwrap();
        fleet_client
            .wait_deployed("acme", "ced-acme", 1)
            .await
            .unwrap();
    };
    // Helm adds no revision.
    let before = fleet_client.releases().await?;
    let params = DeleteParams::default();
    maps.delete("ced-acme", &params).await?;
    complete().await;
    maps.merge("ced-acme", &json!({"data": {"message": "mine"}}))
        .await?;
    complete().await;
    assert_eq!(fleet_client.releases().await?, before);
    regions
        .wait_for_event(key, "RepairTriggered", "corrected")
        .await;

    let secrets: Api<Secret> = Api::namespaced(fleet_client.client.clone(), "acme");
    let first = "sh.helm.release.v1.ced-acme.v1";
    let before = secrets.get(first).await?;
    secrets.delete(first, &params).await?;
    wait_until_replaced(&secrets, &before).await?;
    complete().await;
    regions.wait_for_events(key, &["ReleaseMissing"]).await;
    regions.wait_for(key, READY).await;

    let uninstall = [
        "uninstall",
        "ced-acme",
        "--namespace=acme",
        "--keep-history",
    ];
    regions.edges["paris"].helm(uninstall).await?;
    fleet_client.wait_deployed("acme", "ced-acme", 2).await?;
    regions.wait_for_events(key, &["ReleaseNotInstalled"]).await;
    regions.wait_for(key, READY).await;

    let namespaces: Api<Namespace> = Api::all(fleet_client.client.clone());
    let before = namespaces.get("acme").await?;
    namespaces.delete("acme", &params).await?;
    wait_until_replaced(&namespaces, &before).await?;
    complete().await;
    regions.wait_for(key, READY).await;
    Ok(())
}

async fn chart_and_user_changes_reach_it(regions: &Regions, key: (&str, &str)) -> TestResult {
    let fleet_client = regions.edge("paris");
    let newest = async |number: u32, status: &str| {
        fleet_client
            .wait_for_revision("acme", "ced-acme", number, status)
            .await
            .unwrap();
    };
    let phase_of = |object: KryptonDeployment| object.status.unwrap().phase;
    // The annotation and the owner are changed together. The owner shows when the order has arrived.
    let pause = json!({
        "metadata": {"annotations": {names::PAUSED_ANNOTATION: "true"}},
        "spec": {"account": {"owner": "somebody"}},
    });
    regions.patch(key, pause).await;
    regions.wait_for(key, READY).await;
    regions.chart.write("replicaCount: 1")?;
    let paused = |_: &KryptonDeployment, status: &KryptonDeploymentStatus| {
        let line = status.last_message.as_deref().unwrap_or_default();
        line.contains("paused by annotation on the KryptonDeployment")
    };
    regions.wait_until(key, "that it is paused", paused).await;
    newest(1, "deployed").await;
    let go_on = json!({"metadata": {"annotations": {names::PAUSED_ANNOTATION: null}}});
    regions.patch(key, go_on).await;
    newest(2, "deployed").await;

    // No pods run on the member.
    let waits_for_workload = |_: &KryptonDeployment, status: &KryptonDeploymentStatus| {
        let ready = condition(&status.conditions, "Ready");
        ready.is_some_and(|ready| {
            ready.status == "False"
                && ready.reason == "NotReady"
                && ready
                    .message
                    .contains("upgrade applied, waiting: Deployment")
        })
    };
    let object = regions
        .wait_until(key, "what it waits for", waits_for_workload)
        .await;
    assert_eq!(phase_of(object), Some(DeploymentPhase::Pending));
    assert_derived(regions, key.1, "InProgress: ", "Progressing").await?;

    regions.chart.write("{replicaCount: 0, broken: true}")?;
    let failed = regions
        .wait_for(key, ("Ready", "False", "HelmFailed"))
        .await;
    let line = failed.status.clone().unwrap().last_message.unwrap();
    assert_contains!(line, "revision 2 keeps running");
    assert_eq!(phase_of(failed), Some(DeploymentPhase::Error));
    regions.wait_for_events(key, &["HelmDeployFailed"]).await;
    let revisions = fleet_client.revisions("acme", "ced-acme").await?;
    let expected = [(1, "superseded"), (2, "deployed"), (3, "failed")];
    let expected = expected.map(|(number, status)| (number, status.to_owned()));
    assert_eq!(revisions, expected);
    let reconcile_request =
        json!({"metadata": {"annotations": {names::RECONCILE_REQUESTED_ANNOTATION: "now"}}});
    regions.patch(key, reconcile_request).await;
    newest(4, "failed").await;
    let acknowledged = |_: &KryptonDeployment, status: &KryptonDeploymentStatus| {
        status.last_handled_reconcile_at.as_deref() == Some("now")
    };
    regions
        .wait_until(key, "the handled request", acknowledged)
        .await;

    regions.chart.write("replicaCount: 0")?;
    newest(5, "deployed").await;
    let object = regions.wait_for(key, READY).await;
    assert_eq!(phase_of(object), Some(DeploymentPhase::Ready));
    Ok(())
}

async fn namesake_is_rejected_and_crd_deletion_uninstalls_nothing(mode: Mode) -> TestResult {
    let unusual = RegionOptions {
        flags: &["--watch-namespaces=default,kube-public"],
        ..RegionOptions::default()
    };
    let regions = Regions::start_with("named", mode, &["paris"], unusual).await?;
    let fleet_client = regions.edge("paris");
    let long = "a".repeat(63);
    let paris = json!({"name": "paris"});
    // The first namespace is outside Krypton's scope.
    let outside = ("kube-node-lease", "outside");
    let (older, younger) = (("default", "acme"), ("kube-public", "acme"));
    regions.create(outside, paris.clone()).await;
    for key in [older, ("default", long.as_str())] {
        regions.create(key, paris.clone()).await;
        regions.wait_for(key, READY).await;
    }
    let release = names::deployment_release(&long);
    assert!(release.len() <= names::RELEASE_NAME_MAX);
    fleet_client.wait_deployed(&long, &release, 1).await?;
    let object = regions.api(outside.0).get(outside.1).await?;
    assert!(object.finalizers().is_empty(), "{:?}", object.metadata);
    let status = object.status.unwrap_or_default();
    assert_eq!((status.phase, status.observed_generation), (None, Some(-1)));

    let in_use = ("Ready", "False", "ReleaseInUse");
    let before = fleet_client.releases().await?;
    regions.create(younger, paris.clone()).await;
    let rejected = regions.wait_for(younger, in_use).await;
    let line = rejected.status.unwrap().last_message.unwrap();
    assert_contains!(line, "belongs to KryptonDeployment default/acme");
    let dots = ("default", "too.many.dots");
    regions.create(dots, paris.clone()).await;
    let invalid = ("Ready", "False", "WorkspaceInvalid");
    regions.wait_for(dots, invalid).await;
    regions.remove(dots).await;
    assert_eq!(fleet_client.releases().await?, before);

    // Deleting the older one removes its release, and the younger one is installed.
    regions.remove(older).await;
    regions.wait_for(younger, READY).await;
    fleet_client.wait_deployed("acme", "ced-acme", 1).await?;
    let before = fleet_client.releases().await?;
    // A new KryptonDeployment is the younger one, and its deletion removes nothing.
    regions.create(older, paris.clone()).await;
    regions.wait_for(older, in_use).await;
    regions.remove(older).await;
    assert_eq!(fleet_client.releases().await?, before);

    let crds: Api<CustomResourceDefinition> = Api::all(regions.home.client());
    let name = KryptonDeployment::crd().name_any();
    crds.delete(&name, &DeleteParams::default()).await?;
    wait_until_gone(&crds, &name).await?;
    assert_eq!(fleet_client.releases().await?, before);
    // Recreated, the KryptonDeployments adopt their releases.
    let params = PostParams::default();
    crds.create(&params, KryptonDeployment::crd()).await?;
    regions.create(younger, paris).await;
    regions.wait_for(younger, READY).await;
    assert_eq!(fleet_client.releases().await?, before);

    // The namespace that was created for the first KryptonDeployment is deleted with the last.
    regions.remove(younger).await;
    fleet_client.wait_for_namespace_deletion("acme").await?;
    Ok(())
}

#[tokio::test]
async fn deployment_uses_only_kubeconfig_secrets_open_to_it() -> TestResult {
    let regions = Regions::start("secrets", Mode::Proxy, &["paris", "rome"]).await;
    let rome = &regions.edges["rome"];
    let keys = ["admin.conf"];
    regions
        .create_secret("team-a", "rome-admin", rome, &keys)
        .await?;
    let region = |name: &str| {
        let secret = json!({"namespace": "team-a", "name": name, "key": "admin.conf"});
        json!({"name": "somewhere", "kubeconfig": {"secret": secret}})
    };
    let unresolved = |reason| ("TargetClusterResolved", "False", reason);
    let (theirs, own) = (("default", "theirs"), ("team-a", "own"));
    // A Secret in a foreign namespace and a missing Secret produce the same message.
    for (key, secret) in [(theirs, "rome-admin"), (("default", "guessed"), "guessed")] {
        regions.create(key, region(secret)).await;
        let not_allowed = unresolved("SecretNotAllowed");
        regions.wait_for(key, not_allowed).await;
        let unavailable = ("Ready", "False", "EdgeUnavailable");
        regions.wait_for(key, unavailable).await;
        let failed = "Failed: Edge cluster somewhere ";
        assert_derived(&regions, key.1, failed, "Degraded").await?;
    }
    regions.create(own, region("rome-admin")).await;
    // The Secret is not in the hub's namespace.
    regions.wait_for(own, unresolved("NotAccepted")).await;
    let fleet_client = FleetClient::new(&regions.home);
    fleet_client.accept_member("rome-admin").await?;
    regions.wait_for(own, READY).await;
    // Referenced from its own namespace, the Secret becomes a member, but stays closed to other namespaces.
    let not_allowed = unresolved("SecretNotAllowed");
    regions.wait_for(theirs, not_allowed).await;
    let label = format!("{}=true", names::OPEN_TO_DEPLOYMENTS_LABEL);
    let label = format!("label secret rome-admin -n team-a {label}");
    regions.home.kubectl_line(&label).await?;
    regions.wait_for(theirs, READY).await;

    // With the deprecated field, with a missing key, and without an account.
    let region = json!({"name": "x", "kubeconfigSecretName": "paris-kubeconfig"});
    let deprecated = ("default", "deprecated");
    regions.create(deprecated, region).await;
    regions.wait_for(deprecated, READY).await;
    let nameless = json!({"spec": {"account": {"name": ""}}});
    regions.patch(deprecated, nameless).await;
    let account_missing = ("Ready", "False", "AccountMissing");
    let missing = regions.wait_for(deprecated, account_missing).await;
    assert_eq!(missing.status.unwrap().phase, Some(DeploymentPhase::Error));
    let failed = "Failed: spec.account.name is empty";
    assert_derived(&regions, deprecated.1, failed, "Degraded").await?;
    let fleet_client = regions.edge("paris");
    fleet_client
        .wait_deployed("deprecated", "ced-deprecated", 1)
        .await?;
    let reasons = ["AccountMissing"];
    regions.wait_for_events(deprecated, &reasons).await;
    // A missing account doesn't block the deletion.
    regions.remove(deprecated).await;
    let remaining = fleet_client.revisions("deprecated", "ced-deprecated");
    assert_eq!(remaining.await?, []);
    Ok(())
}
