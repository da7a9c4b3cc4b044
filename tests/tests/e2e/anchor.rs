//! Verifies the anchor on a member: the garbage collector deletes the objects that the anchor owns, and Krypton
//! recreates them. After a restore, which changes all UIDs, no important object is deleted.

use std::{collections::BTreeMap, io::Write as _};

use anyhow::{Result, ensure};
use flate2::{Compression, write::GzEncoder};
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::{ConfigMap, Namespace, Secret};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use krypton_crds::tenant::Tenant;
use krypton_reconciler::{
    backup,
    record::{RECORD_NAME, anchor::ANCHOR_NAME},
};
use krypton_tests::{
    Merge as _, Mode, Pair, Parts, Scenario, TestResult, by_agent, eventually,
    fleet::{FleetClient, SYSTEM_NAMESPACE},
    wait_until_gone,
};
use kube::{
    Api, ResourceExt,
    api::{ApiResource, DeleteParams, DynamicObject, ListParams, PostParams},
    core::PartialObjectMeta,
    discovery::{Discovery, verbs},
};
use serde_json::json;

/// The Tenant's workspace has the same name.
const TENANT: &str = "acme";

by_agent!(
    record_replaces_old_anchor_and_keeps_other_owners,
    anchor_owns_only_record_and_loss_is_harmless
);

fn config_maps_api(fleet_client: &FleetClient) -> Api<ConfigMap> {
    Api::namespaced(fleet_client.client.clone(), SYSTEM_NAMESPACE)
}

fn secrets_api(fleet_client: &FleetClient) -> Api<Secret> {
    Api::namespaced(fleet_client.client.clone(), SYSTEM_NAMESPACE)
}

/// Returns the first owner of the record.
async fn record_owner(fleet_client: &FleetClient) -> Result<OwnerReference> {
    let record = secrets_api(fleet_client).get(RECORD_NAME).await?;
    Ok(record.owner_references()[0].clone())
}

/// Returns the UID of the anchor when it differs from `before` and the anchor owns the record.
async fn wait_for_anchor(fleet_client: &FleetClient, before: Option<&str>) -> String {
    let (maps, secrets) = (config_maps_api(fleet_client), secrets_api(fleet_client));
    eventually("the record to be owned by the anchor", async || {
        let anchor = maps.get(ANCHOR_NAME).await?.uid().unwrap_or_default();
        ensure!(Some(anchor.as_str()) != before, "still the previous anchor");
        let record = secrets.get(RECORD_NAME).await?;
        let owned = record
            .owner_references()
            .iter()
            .any(|owner| owner.uid == anchor);
        ensure!(owned, "{:?}", record.owner_references());
        Ok(Some(anchor))
    })
    .await
    .unwrap()
}

/// Returns kind, namespace and name of all objects of the cluster with this owner.
async fn objects_owned_by(fleet_client: &FleetClient, uid: &str) -> Result<Vec<String>> {
    let discovery = Discovery::new(fleet_client.client.clone()).run().await?;
    let kinds = discovery
        .groups()
        .flat_map(|group| group.recommended_resources());
    let mut owned = Vec::new();
    for (kind, capabilities) in kinds.filter(|(_, able)| able.supports_operation(verbs::LIST)) {
        drop(capabilities);
        let api: Api<DynamicObject> = Api::all_with(fleet_client.client.clone(), &kind);
        let all = match api.list_metadata(&ListParams::default()).await {
            Ok(all) => all,
            // Some kinds have no metadata to list.
            Err(kube::Error::Api(status)) if [404, 405, 406].contains(&status.code) => continue,
            Err(error) => return Err(error.into()),
        };
        let names_it = |object: &&PartialObjectMeta<DynamicObject>| {
            object
                .metadata
                .owner_references
                .iter()
                .flatten()
                .any(|owner| owner.uid == uid)
        };
        owned.extend(all.items.iter().filter(names_it).map(|object| {
            let namespace = object.metadata.namespace.clone().unwrap_or_default();
            format!("{} {namespace}/{}", kind.kind, object.name_any())
        }));
    }
    Ok(owned)
}

/// Kinds of Krypton's and its chart's important objects.
fn important_kinds() -> [ApiResource; 5] {
    use k8s_openapi::api::{apps::v1::Deployment, coordination::v1::Lease, core::v1::Service};
    [
        ApiResource::erase::<Secret>(&()),
        ApiResource::erase::<ConfigMap>(&()),
        ApiResource::erase::<Service>(&()),
        ApiResource::erase::<Deployment>(&()),
        ApiResource::erase::<Lease>(&()),
    ]
}

/// Returns all objects of a namespace that only a backup can restore.
async fn list_objects(
    fleet_client: &FleetClient,
    namespace: &str,
) -> Result<Vec<(ApiResource, DynamicObject)>> {
    let mut owned = Vec::new();
    for kind in important_kinds() {
        let api: Api<DynamicObject> =
            Api::namespaced_with(fleet_client.client.clone(), namespace, &kind);
        for mut object in api.list(&ListParams::default()).await? {
            if object.name_any() != "kube-root-ca.crt" {
                object.types = Some(kube::core::TypeMeta {
                    api_version: kind.api_version.clone(),
                    kind: kind.kind.clone(),
                });
                owned.push((kind.clone(), object));
            }
        }
    }
    Ok(owned)
}

/// Returns the important objects by kind, namespace and name, with their UIDs.
async fn important_objects(fleet_client: &FleetClient) -> Result<BTreeMap<String, String>> {
    let mut objects = BTreeMap::new();
    for namespace in [TENANT, SYSTEM_NAMESPACE] {
        for (kind, object) in list_objects(fleet_client, namespace).await? {
            let name = format!("{} {namespace}/{}", kind.kind, object.name_any());
            objects.insert(name, object.uid().unwrap_or_default());
        }
    }
    let (tenants, params) = (fleet_client.tenants(), ListParams::default());
    for tenant in tenants.list_metadata(&params).await? {
        let name = format!("Tenant default/{}", tenant.name_any());
        objects.insert(name, tenant.uid().unwrap_or_default());
    }
    // The only object that is deleted and recreated.
    objects.remove(&format!("Secret {SYSTEM_NAMESPACE}/{RECORD_NAME}"));
    Ok(objects)
}

/// Returns the object as in a backup: with its owners, without the fields that the API server sets.
fn without_server_fields(object: &DynamicObject) -> DynamicObject {
    let mut new = object.clone();
    let metadata = &mut new.metadata;
    (metadata.uid, metadata.resource_version) = (None, None);
    (metadata.creation_timestamp, metadata.managed_fields) = (None, None);
    if let Some(fields) = new.data.as_object_mut() {
        fields.remove("status");
    }
    // The API server assigns addresses again.
    if let Some(spec) = new
        .data
        .get_mut("spec")
        .and_then(|spec| spec.as_object_mut())
    {
        spec.remove("clusterIP");
        spec.remove("clusterIPs");
    }
    new
}

/// Deletes all objects of Krypton and recreates them with new UIDs, like the restore of a backup. Returns the recreated
/// objects.
async fn recreate_all(fleet_client: &FleetClient) -> Result<BTreeMap<String, String>> {
    let (client, params) = (fleet_client.client.clone(), PostParams::default());
    let namespaces: Api<Namespace> = Api::all(client.clone());
    let tenants = fleet_client.tenants();
    let mut backup = Vec::new();
    for name in [SYSTEM_NAMESPACE, TENANT] {
        backup.push((
            namespaces.get(name).await?,
            list_objects(fleet_client, name).await?,
        ));
    }
    let tenant = tenants.get(TENANT).await?;

    tenants
        .merge(TENANT, &json!({"metadata": {"finalizers": null}}))
        .await?;
    tenants.delete(TENANT, &DeleteParams::default()).await?;
    for (namespace, _) in &backup {
        namespaces
            .delete(&namespace.name_any(), &DeleteParams::default())
            .await?;
    }
    for (namespace, _) in &backup {
        wait_until_gone(&namespaces, &namespace.name_any()).await?;
    }

    for (namespace, objects) in backup {
        let mut new = Namespace::default();
        new.metadata.name = Some(namespace.name_any());
        new.metadata.labels = Some(namespace.labels().clone());
        new.metadata.annotations = Some(namespace.annotations().clone());
        namespaces.create(&params, &new).await?;
        for (kind, object) in objects {
            let api: Api<DynamicObject> =
                Api::namespaced_with(client.clone(), &namespace.name_any(), &kind);
            api.create(&params, &without_server_fields(&object)).await?;
        }
    }
    let mut new = Tenant::new(TENANT, tenant.spec.clone());
    new.metadata.labels = Some(tenant.labels().clone());
    new.metadata.annotations = Some(tenant.annotations().clone());
    new.metadata.finalizers = Some(tenant.finalizers().to_vec());
    tenants.create(&params, &new).await?;
    important_objects(fleet_client).await
}

/// Waits until the garbage collector has deleted the objects of this deleted owner.
async fn wait_for_garbage_collection(fleet_client: &FleetClient, owner: &OwnerReference) {
    let maps = config_maps_api(fleet_client);
    let mut canary = ConfigMap::default();
    canary.metadata.name = Some("canary".to_owned());
    canary.metadata.owner_references = Some(vec![owner.clone()]);
    maps.create(&PostParams::default(), &canary).await.unwrap();
    let secrets = secrets_api(fleet_client);
    eventually(
        "the objects of the previous anchor to be deleted",
        async || {
            let canary = maps.get_opt("canary").await?;
            let record = secrets.get_metadata_opt(RECORD_NAME).await?;
            let former = record.is_some_and(|record| record.owner_references().contains(owner));
            Ok((canary.is_none() && !former).then_some(()))
        },
    )
    .await
    .unwrap();
}

async fn anchor_owns_only_record_and_loss_is_harmless(mode: Mode) -> TestResult {
    let (mut pair, chart) = Scenario::new("anchor", mode).start().await?;
    let (fleet_client, release) = (pair.fleet_client(), pair.release(TENANT));
    fleet_client.install(TENANT).await?;
    let first = wait_for_anchor(&fleet_client, None).await;
    let record = format!("Secret {SYSTEM_NAMESPACE}/{RECORD_NAME}");
    let owned = objects_owned_by(&fleet_client, &first).await?;
    assert_eq!(owned, [record.as_str()]);
    let owner = record_owner(&fleet_client).await?;
    assert_eq!((owner.controller, owner.block_owner_deletion), (None, None));

    // A user deletes the anchor while all components run.
    let anchor = format!("ConfigMap {SYSTEM_NAMESPACE}/{ANCHOR_NAME}");
    let mut before = important_objects(&fleet_client).await?;
    before.remove(&anchor);
    config_maps_api(&fleet_client)
        .delete(ANCHOR_NAME, &DeleteParams::default())
        .await?;
    wait_for_garbage_collection(&fleet_client, &owner).await;
    assert_eq!(important_objects(&fleet_client).await?, before);
    chart.write("{replicaCount: 0, message: later}")?;
    fleet_client
        .wait_for_message(TENANT, &release, "later")
        .await?;
    fleet_client.wait_ready(TENANT).await?;
    fleet_client.wait_deployed(TENANT, &release, 2).await?;
    let second = wait_for_anchor(&fleet_client, Some(&first)).await;
    let owned = objects_owned_by(&fleet_client, &second).await?;
    assert_eq!(owned, [record.as_str()]);

    // All objects are restored while no component runs.
    let owner = record_owner(&fleet_client).await?;
    pair.stop().await?;
    backup_without_namespace(&fleet_client).await?;
    let revisions = fleet_client.revisions(TENANT, &release).await?;
    let former = important_objects(&fleet_client).await?;
    let restored = recreate_all(&fleet_client).await?;
    assert!(restored.keys().eq(former.keys()), "{former:?} {restored:?}");
    let unlike = restored.iter().all(|(name, uid)| former[name] != *uid);
    assert!(unlike, "{former:?} {restored:?}");
    wait_for_garbage_collection(&fleet_client, &owner).await;
    assert_eq!(important_objects(&fleet_client).await?, restored);

    if mode == Mode::Agent {
        // Without the hub, the agent has no desired state and takes no action.
        pair.start_agent_again()?;
        let agent = pair.actor()?;
        agent.wait_for_log("waiting for a desired state").await?;
        assert_eq!(important_objects(&fleet_client).await?, restored);
    }
    pair.start_hub_again()?;
    fleet_client.wait_ready(TENANT).await?;
    let third = wait_for_anchor(&fleet_client, Some(&second)).await;
    assert_eq!(objects_owned_by(&fleet_client, &third).await?, [record]);
    assert_eq!(fleet_client.revisions(TENANT, &release).await?, revisions);
    let mut now = important_objects(&fleet_client).await?;
    // The Tenant's namespace is gone, so the Tenant is not restored, and its record is deleted.
    let record_name = backup::record_name("gone", "acme");
    let secret = format!("Secret {SYSTEM_NAMESPACE}/{record_name}");
    now.insert(secret.clone(), restored[&secret].clone());
    assert_eq!(now, restored);
    Ok(())
}

/// Creates the record of a Tenant whose namespace is gone.
async fn backup_without_namespace(fleet_client: &FleetClient) -> TestResult {
    let tenant = json!({"namespace": "gone", "name": "acme", "uid": "1", "labels": {},
        "annotations": {}, "spec": {}});
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    encoder.write_all(tenant.to_string().as_bytes())?;
    let mut record = Secret::default();
    record.metadata.name = Some(backup::record_name("gone", "acme"));
    record.metadata.labels = Some([(backup::RECORD_LABEL.to_owned(), "true".to_owned())].into());
    let packed = ByteString(encoder.finish()?);
    record.data = Some([(backup::RECORD_KEY.to_owned(), packed)].into());
    secrets_api(fleet_client)
        .create(&PostParams::default(), &record)
        .await?;
    Ok(())
}

/// Runs without a garbage collector, which could be faster.
async fn record_replaces_old_anchor_and_keeps_other_owners(mode: Mode) -> TestResult {
    let mut pair = Pair::start("anchored", mode, Parts::ControlPlane).await?;
    let flags = ["--chart-repo=http://127.0.0.1:9", "--chart-name=none"];
    pair.start_hub_and_join(flags.map(str::to_owned)).await?;
    let fleet_client = pair.fleet_client();
    let uid = wait_for_anchor(&fleet_client, None).await;
    let ours = record_owner(&fleet_client).await?;
    pair.actor()?.stop().await?;

    let former = OwnerReference {
        uid: "8d1b3c1e-0000-4000-8000-000000000000".to_owned(),
        ..ours.clone()
    };
    let theirs = OwnerReference {
        name: "theirs".to_owned(),
        uid: "8d1b3c1e-0000-4000-8000-000000000001".to_owned(),
        ..ours.clone()
    };
    let owners = json!({"metadata": {"ownerReferences": [former, theirs]}});
    let secrets = secrets_api(&fleet_client);
    secrets.merge(RECORD_NAME, &owners).await?;
    let bare = json!({"metadata": {"labels": {"team": "a"}, "annotations": null}});
    let labelled = json!({"metadata": {"labels": null}});
    for patch in [labelled, bare] {
        config_maps_api(&fleet_client)
            .merge(ANCHOR_NAME, &patch)
            .await?;
    }
    pair.start_actor_again()?;

    assert_eq!(wait_for_anchor(&fleet_client, None).await, uid);
    let record = secrets_api(&fleet_client).get(RECORD_NAME).await?;
    assert_eq!(record.owner_references(), [theirs, ours]);
    let anchor = config_maps_api(&fleet_client).get(ANCHOR_NAME).await?;
    assert_eq!(anchor.labels().get("team").map(String::as_str), Some("a"));
    let label = anchor.labels().get("app.kubernetes.io/managed-by");
    assert_eq!(label.map(String::as_str), Some("krypton"));
    let marked = anchor.annotations().get("mesh.openkcm.io/anchor");
    assert_eq!(marked.map(String::as_str), Some("true"));
    Ok(())
}
