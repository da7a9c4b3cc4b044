//! Shows the migration of objects that the original created in `default`, because no template set a namespace. An
//! adoption leaves them there. The next upgrade moves only the objects of this release.

use anyhow::{Result, bail};
use k8s_openapi::api::{
    apps::v1::Deployment,
    core::v1::{ConfigMap, PersistentVolumeClaim, Service},
    rbac::v1::ClusterRole,
};
use krypton_tests::{
    Merge as _, Mode, Pair, Parts, TestResult, assert_contains, by_agent, eventually,
    fleet::FleetClient, original::apply_crd,
};
use kube::{
    Api, ResourceExt,
    api::{ApiResource, DynamicObject, ListParams, PostParams},
};
use serde_json::{Value, json};

use super::{
    HANDWRITTEN_CRD, check_no_helm_run, config_maps, original, plain_chart, wait_until_signed,
};

by_agent!(next_upgrade_moves_only_original_objects_from_default);

/// Returns kind and name of the release's objects in `default`.
async fn objects_in_default(fleet_client: &FleetClient, release: &str) -> Result<Vec<String>> {
    let mut objects = Vec::new();
    for (kind, resource) in [
        ("Claim", ApiResource::erase::<PersistentVolumeClaim>(&())),
        ("ConfigMap", ApiResource::erase::<ConfigMap>(&())),
        ("Deployment", ApiResource::erase::<Deployment>(&())),
        ("Service", ApiResource::erase::<Service>(&())),
    ] {
        let client = fleet_client.client.clone();
        let api: Api<DynamicObject> = Api::namespaced_with(client, "default", &resource);
        let listed = api.list_metadata(&ListParams::default()).await?;
        let names = listed.items.iter().map(ResourceExt::name_any);
        let names = names.filter(|name| name.starts_with(release));
        objects.extend(names.map(|name| format!("{kind} {name}")));
    }
    Ok(objects)
}

async fn wait_for_objects(fleet_client: &FleetClient, release: &str, parts: &[&str]) {
    let mut expected: Vec<String> = parts
        .iter()
        .map(|pattern| pattern.replace("{}", release))
        .collect();
    expected.sort();
    let what = format!("only {expected:?} to be left in default");
    eventually(&what, async || {
        let mut objects = objects_in_default(fleet_client, release).await?;
        objects.sort();
        if objects != expected {
            bail!("{objects:?}");
        }
        Ok(Some(()))
    })
    .await
    .unwrap();
}

/// Assigns the ConfigMap `<release>-theirs` in `default` to another release. Creates a ConfigMap with this release's
/// annotations, but outside its manifest.
async fn create_bystanders(
    fleet_client: &FleetClient,
    release: &str,
    workspace: &str,
) -> TestResult {
    let maps: Api<ConfigMap> = Api::namespaced(fleet_client.client.clone(), "default");
    let theirs =
        json!({"metadata": {"annotations": {"meta.helm.sh/release-name": "somebody-elses"}}});
    let name = format!("{release}-theirs");
    maps.merge(&name, &theirs).await?;
    let unnamed: Value = json!({"metadata": {"name": format!("{release}-unnamed"),
        "labels": {"app.kubernetes.io/managed-by": "Helm"},
        "annotations": {"meta.helm.sh/release-name": release, "meta.helm.sh/release-namespace": workspace}}});
    let unnamed = serde_json::from_value(unnamed)?;
    maps.create(&PostParams::default(), &unnamed).await?;
    Ok(())
}

const ALL_OBJECTS: [&str; 7] = [
    "Claim {}-data",
    "ConfigMap {}",
    "ConfigMap {}-kept",
    "ConfigMap {}-theirs",
    "ConfigMap {}-unnamed",
    "Deployment {}",
    "Service {}",
];
/// Objects that Krypton never removes.
const NEVER_REMOVED: [&str; 4] = [
    "Claim {}-data",
    "ConfigMap {}-kept",
    "ConfigMap {}-theirs",
    "ConfigMap {}-unnamed",
];

async fn next_upgrade_moves_only_original_objects_from_default(mode: Mode) -> TestResult {
    let chart = plain_chart().await?;
    let mut pair = Pair::start("astray", mode, Parts::WithControllers).await?;
    let fleet_client = pair.fleet_client();
    let [acme, going, home] = ["acme", "going", "home"].map(|name| pair.release(name));
    {
        let original = original(&pair, &chart);
        apply_crd(original.cluster, HANDWRITTEN_CRD).await?;
        for (name, release) in [("acme", &acme), ("going", &going)] {
            let workspace = format!("{name}-ws");
            original
                .install_outside_workspace(release, &workspace)
                .await?;
            create_bystanders(&fleet_client, release, &workspace).await?;
            let status = original.status(None);
            let spec = json!({ "workspace": workspace });
            original.tenant(name, spec, status).await?;
        }
        original.install(&home, "default").await?;
        let status = original.status(None);
        let spec = json!({"workspace": "default"});
        original.tenant("home", spec, status).await?;
    }
    let before = fleet_client.releases().await?;
    let objects_in_default = config_maps(&fleet_client, "default").await?;
    let roles: Api<ClusterRole> = Api::all(fleet_client.client.clone());
    let role = roles.get(&acme).await?;

    // Adopted: the Tenants are ready with the objects in `default`, and Helm doesn't run.
    pair.start_hub_and_join(chart.flags(&[])).await?;
    for name in ["acme", "going", "home"] {
        fleet_client.wait_ready(name).await?;
    }
    check_no_helm_run(&mut pair).await;
    assert_eq!(fleet_client.releases().await?, before);
    for release in [&acme, &going] {
        wait_for_objects(&fleet_client, release, &ALL_OBJECTS).await;
    }
    assert_eq!(
        config_maps(&fleet_client, "default").await?,
        objects_in_default
    );

    // Deleted before an upgrade: Helm would search for the objects in the workspace.
    fleet_client.remove("going").await?;
    wait_for_objects(&fleet_client, &going, &NEVER_REMOVED).await;
    wait_for_objects(&fleet_client, &acme, &ALL_OBJECTS).await;

    // The next upgrade creates the objects in the workspace and removes those in `default`.
    chart.write("message: second")?;
    fleet_client.wait_deployed("acme-ws", &acme, 2).await?;
    wait_for_objects(&fleet_client, &acme, &NEVER_REMOVED).await;
    fleet_client.wait_ready("acme").await?;
    let removed = fleet_client
        .event_message("acme", "LeftoversRemoved")
        .await?;
    assert_contains!(removed, "namespace default", format!("Deployment {acme}"));
    let stay = fleet_client.event_message("acme", "LeftoversStay").await?;
    let claim = format!("PersistentVolumeClaim {acme}-data");
    assert_contains!(stay, claim, format!("ConfigMap {acme}-kept"));
    assert!(!stay.contains("ClusterRole"), "{stay}");
    assert_eq!(roles.get(&acme).await?.uid(), role.uid());
    let now = config_maps(&fleet_client, "acme-ws").await?;
    let names: Vec<&str> = now.keys().map(String::as_str).collect();
    let expected = ["", "-kept", "-placed", "-theirs"].map(|part| format!("{acme}{part}"));
    assert_eq!(names, expected.each_ref().map(String::as_str));
    let deployments: Api<Deployment> = Api::namespaced(fleet_client.client.clone(), "acme-ws");
    deployments.get(&acme).await?;

    // If `default` is the workspace, all objects stay in place.
    fleet_client.wait_deployed("default", &home, 2).await?;
    fleet_client.wait_ready("home").await?;
    let after = config_maps(&fleet_client, "default").await?;
    for part in ["", "-kept", "-theirs", "-placed"] {
        let name = format!("{home}{part}");
        assert_eq!(after.get(&name), objects_in_default.get(&name), "{name}");
        assert!(after.contains_key(&name), "{name}");
    }

    // The cleanup runs once. Krypton ignores objects that appear there later.
    let maps_of_default: Api<ConfigMap> = Api::namespaced(fleet_client.client.clone(), "default");
    let recreated = json!({"metadata": {"name": acme, "labels": {"app.kubernetes.io/managed-by": "Helm"},
        "annotations": {"meta.helm.sh/release-name": acme, "meta.helm.sh/release-namespace": "acme-ws"}}});
    let recreated: ConfigMap = serde_json::from_value(recreated)?;
    wait_until_signed(&fleet_client, &acme, 1).await?;
    maps_of_default
        .create(&PostParams::default(), &recreated)
        .await?;
    chart.write("message: third")?;
    fleet_client.wait_deployed("acme-ws", &acme, 3).await?;
    fleet_client.wait_ready("acme").await?;
    fleet_client.remove("acme").await?;
    maps_of_default.get(&acme).await?;
    Ok(())
}
