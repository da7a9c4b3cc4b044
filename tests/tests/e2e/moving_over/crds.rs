//! Verifies that ours replaces each CRD of the original under stored objects, and that the stored objects keep their
//! content.

use anyhow::ensure;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use krypton_crds::{krypton_deployment::KryptonDeployment, tenant::Tenant};
use krypton_tests::{
    Cluster, Merge as _, Mode, Original, Pair, Parts, ServedChart, TestResult, assert_contains,
    by_agent, eventually, fleet::FleetClient, kubectl_krypton, original::apply_crd,
    wait_until_gone,
};
use kube::{
    Api, CustomResourceExt, ResourceExt,
    api::{ApiResource, DeleteParams, DynamicObject, PostParams},
    core::GroupVersionKind,
};
use serde_json::{Value, json};

use super::{ALL_READY, HANDWRITTEN_CRD, check_no_helm_run, original, plain_chart};

const API_CRDS: &str = "tenant-g1-api-crds.yaml";
const WITHOUT_WORKSPACE: &str = "tenant-g3-generated.yaml";
const EMBEDDED: &str = "kryptondeployment-embedded.yaml";
const CHART_CRD: &str = "kryptondeployment-chart.yaml";

by_agent!(
    tenants_of_each_generation_are_adopted_without_reinstall,
    deployments_are_adopted_without_reinstall
);

async fn get_crd(cluster: &Cluster, name: &str) -> CustomResourceDefinition {
    Api::all(cluster.client()).get(name).await.unwrap()
}

fn is_ours(crd: &CustomResourceDefinition) -> bool {
    krypton_crds::schema_version(&crd.metadata) == Some(krypton_crds::SCHEMA_VERSION)
}

/// One of the original's CRDs, an object that was stored with it, and a status of that time.
struct StoredObject {
    file: &'static str,
    spec: Value,
    status: Value,
    /// The content as returned by the API server, if the original's CRD added a default.
    read: Option<Value>,
}

fn condition(type_: &str) -> Value {
    json!({"phase": "Ready", "conditions": [{"type": type_, "status": "True", "reason": "Installed",
        "message": "release installed", "lastTransitionTime": "2026-01-13T10:00:00Z"}]})
}

#[tokio::test]
async fn original_crds_are_replaced_and_stored_objects_kept() -> TestResult {
    let cluster = Cluster::start("old-crds", Parts::ControlPlane).await?;
    let slash = condition("ClusterReady/edge-1");
    let reference = json!({"secretName": "edge-1", "secretNamespace": "default"});
    let account = json!({"name": "acme", "displayName": "Acme", "owner": "team-a"});
    let secret = json!({"name": "kubeconfig-edge01", "namespace": "krypton-operator"});
    let mut keyed = secret.clone();
    keyed["key"] = json!("kubeconfig");
    let region =
        |kubeconfig: &Value| json!({"name": "edge01", "kubeconfig": {"secret": kubeconfig}});
    let tenants = [
        StoredObject {
            file: HANDWRITTEN_CRD,
            spec: json!({"workspace": "acme-ws", "clusterRef": reference}),
            status: slash.clone(),
            read: None,
        },
        StoredObject {
            file: API_CRDS,
            spec: json!({"workspace": "acme-ws", "clusterRef": {"secretName": "edge-1"}}),
            status: json!({"phase": "Pending", "lastMessage": "installing"}),
            read: None,
        },
        StoredObject {
            file: WITHOUT_WORKSPACE,
            spec: json!({ "clusterRef": reference }),
            status: json!({"phase": "Ready"}),
            read: None,
        },
    ];
    let deployments = [
        StoredObject {
            file: "kryptondeployment-config.yaml",
            spec: json!({"account": account, "region": {"name": "edge01", "kubeconfigSecretName": "old"}}),
            status: condition("Ready"),
            read: None,
        },
        StoredObject {
            file: EMBEDDED,
            spec: json!({"account": account, "region": region(&secret)}),
            status: condition("Ready"),
            read: None,
        },
        StoredObject {
            file: CHART_CRD,
            spec: json!({"account": account, "region": region(&secret)}),
            status: condition("Ready"),
            read: Some(json!({"account": account, "region": region(&keyed)})),
        },
    ];
    for stored in tenants {
        let kind = ApiResource::erase::<Tenant>(&());
        Box::pin(check_replacement(&cluster, Tenant::crd(), &kind, &stored)).await?;
    }
    let kind = ApiResource::erase::<KryptonDeployment>(&());
    for stored in deployments {
        let crd = KryptonDeployment::crd();
        Box::pin(check_replacement(&cluster, crd, &kind, &stored)).await?;
    }
    Ok(())
}

async fn check_replacement(
    cluster: &Cluster,
    ours: &CustomResourceDefinition,
    kind: &ApiResource,
    stored: &StoredObject,
) -> TestResult {
    let file = stored.file;
    let client = cluster.client();
    apply_crd(cluster, file).await?;
    let name = ours.name_any();
    let before = get_crd(cluster, &name).await;
    assert!(!is_ours(&before), "{file}");
    let api: Api<DynamicObject> = Api::namespaced_with(client.clone(), "default", kind);
    let object = DynamicObject::new("acme", kind).data(json!({ "spec": stored.spec }));
    eventually(file, async || {
        Ok(Some(api.create(&PostParams::default(), &object).await?))
    })
    .await?;
    let write = async |status: &Value| api.merge_status("acme", status.clone()).await;
    let slash = condition("ClusterReady/edge-1");
    // Most copies of the original's CRD reject the operator's own writes.
    let takes = write(&slash).await.is_ok();
    let lenient = [HANDWRITTEN_CRD, EMBEDDED];
    assert_eq!(takes, lenient.contains(&file), "{file}");
    let statuses = write(&stored.status).await?;

    krypton_runtime::crd::ensure(&client, ours).await?;
    let after = get_crd(cluster, &name).await;
    assert!(is_ours(&after), "{file}");
    assert_eq!(after.uid(), before.uid(), "{file}");
    let read = api.get("acme").await?;
    let spec = stored.read.as_ref().unwrap_or(&stored.spec);
    assert_eq!(&read.data["spec"], spec, "{file}");
    assert_eq!(read.data["status"], statuses.data["status"], "{file}");
    assert_eq!(read.uid(), statuses.uid(), "{file}");
    assert_eq!(
        read.resource_version(),
        statuses.resource_version(),
        "{file}: nothing was written"
    );
    // Stored objects can still be updated.
    write(&slash).await?;
    let touched = api
        .merge(
            "acme",
            &json!({"metadata": {"labels": {"touched": "true"}}}),
        )
        .await?;
    assert_eq!(&touched.data["spec"], spec, "{file}");

    api.delete("acme", &DeleteParams::default()).await?;
    let crds: Api<CustomResourceDefinition> = Api::all(client);
    crds.delete(&name, &DeleteParams::default()).await?;
    Ok(wait_until_gone(&crds, &name).await?)
}

/// Creates a Tenant with its release under each of the original's CRDs, and one that the last of them has robbed of its
/// workspace.
async fn create_tenants_of_each_generation(pair: &Pair, chart: &ServedChart) -> TestResult {
    let fleet_client = pair.fleet_client();
    let original = original(pair, chart);
    let healthy = original.status(None);
    let bare = json!({"phase": "Ready", "lastMessage": "release installed"});
    // The Tenant exists on the edge cluster and at home, and names the edge cluster in both places.
    let reference = json!({"secretName": pair.name(), "secretNamespace": "default"});
    let named = json!({"workspace": "first-ws", "clusterRef": reference});
    let generations = [
        (HANDWRITTEN_CRD, "first", named.clone(), healthy.clone()),
        (
            API_CRDS,
            "second",
            json!({"workspace": "second-ws"}),
            bare.clone(),
        ),
        // From the README of that time: the namespace has the Tenant's name.
        (WITHOUT_WORKSPACE, "third", json!({}), bare),
    ];
    for (file, name, spec, status) in generations {
        apply_crd(original.cluster, file).await?;
        let workspace = spec["workspace"].as_str().unwrap_or(name).to_owned();
        let release = pair.release(name);
        original.install(&release, &workspace).await?;
        original.tenant(name, spec, status).await?;
    }
    // The last CRD drops the workspace of every Tenant that is written, such as by a new label.
    apply_crd(original.cluster, HANDWRITTEN_CRD).await?;
    let release = pair.release("lost");
    original.install(&release, "lost-ws").await?;
    let spec = json!({"workspace": "lost-ws"});
    let status = original.status(None);
    original.tenant("lost", spec, status).await?;
    apply_crd(original.cluster, WITHOUT_WORKSPACE).await?;
    let name = "default/lost to be without a workspace";
    eventually(name, async || {
        let lost = fleet_client.tenants().get("lost").await?;
        Ok(lost.spec.workspace.is_none().then_some(()))
    })
    .await?;
    fleet_client
        .annotate("lost", "example.org/touched", "true")
        .await?;
    for file in [CHART_CRD, HANDWRITTEN_CRD] {
        apply_crd(pair.home(), file).await?;
    }
    let at_home = Original {
        cluster: pair.home(),
        ..original
    };
    at_home.tenant("first", named, healthy).await?;
    Ok(())
}

async fn tenants_of_each_generation_are_adopted_without_reinstall(mode: Mode) -> TestResult {
    let chart = plain_chart().await?;
    let mut pair = Pair::start("moving", mode, Parts::WithControllers).await?;
    let (fleet_client, home) = (pair.fleet_client(), FleetClient::new(pair.home()));
    create_tenants_of_each_generation(&pair, &chart).await?;
    let kind = ApiResource::erase::<KryptonDeployment>(&());
    let deployments: Api<DynamicObject> =
        Api::namespaced_with(home.client.clone(), "default", &kind);
    // The named cluster is not a member of this fleet.
    let deployment = json!({"account": {"name": "acme"}, "region": {"name": "edge01",
        "kubeconfig": {"secret": {"name": "kubeconfig-edge01", "namespace": "elsewhere"}}}});
    let mut object = DynamicObject::new("acme", &kind).data(json!({ "spec": deployment }));
    object.metadata.finalizers = Some(vec![
        "mesh.openkcm.io/kryptondeployment-finalizer".to_owned(),
    ]);
    let object = eventually("a KryptonDeployment to be admitted", async || {
        Ok(Some(
            deployments.create(&PostParams::default(), &object).await?,
        ))
    })
    .await?;
    let before = fleet_client.releases().await?;
    assert_eq!(before.len(), 4);
    let old = get_crd(pair.cluster(), Tenant::crd_name()).await;
    let mut uids = Vec::new();
    for name in ["first", "second", "third"] {
        uids.push(fleet_client.tenants().get(name).await?.uid());
    }

    let flags = chart.flags(&["--ensure-watch-crds"]);
    pair.start_hub_and_join(flags).await?;
    let [ready, error] = ["ClusterReady", "ClusterError"].map(|kind| pair.condition(kind));
    for (name, reason, uid) in [
        ("first", "Installed", &uids[0]),
        ("second", "NoChange", &uids[1]),
        ("third", "NoChange", &uids[2]),
    ] {
        let adopted = [
            ALL_READY,
            (ready.as_str(), "True", reason),
            (error.as_str(), "False", "NoError"),
        ];
        let tenant = fleet_client.wait_for(name, &adopted).await?;
        assert_eq!(tenant.uid(), *uid);
        let workspace = if name == "third" {
            name.to_owned()
        } else {
            format!("{name}-ws")
        };
        assert_eq!(tenant.workspace(), workspace);
        assert_eq!(tenant.status.unwrap().phase.as_deref(), Some("Ready"));
    }
    let mirrored = [ALL_READY, (ready.as_str(), "True", "Installed")];
    home.wait_for("first", &mirrored).await?;
    let refused = [(error.as_str(), "True", "ReleaseInUse")];
    let lost = fleet_client.wait_for("lost", &refused).await?;
    let message = lost.status.unwrap().last_message.unwrap();
    assert_contains!(message, "spec.workspace: lost-ws");
    assert_eq!(fleet_client.namespace("lost").await?, None);
    let now = get_crd(pair.cluster(), Tenant::crd_name()).await;
    assert!(is_ours(&now));
    assert_eq!(now.uid(), old.uid());
    check_no_helm_run(&mut pair).await;
    fleet_client.wait_for_renewal().await?;
    assert_eq!(fleet_client.releases().await?, before);

    assert!(is_ours(
        &get_crd(pair.home(), KryptonDeployment::crd_name()).await
    ));
    let kept_deployment = deployments.get("acme").await?;
    assert_eq!(
        (kept_deployment.uid(), &kept_deployment.data["spec"]),
        (object.uid(), &object.data["spec"])
    );
    assert_eq!(kept_deployment.finalizers(), object.finalizers());
    Ok(())
}

async fn deployments_are_adopted_without_reinstall(mode: Mode) -> TestResult {
    let chart = plain_chart().await?;
    let mut pair = Pair::start("moving-deployments", mode, Parts::WithControllers).await?;
    let (fleet_client, home) = (pair.fleet_client(), FleetClient::new(pair.home()));
    let region = match mode {
        Mode::Agent => json!({"name": pair.name()}),
        _ => json!({"name": "paris", "kubeconfig":
            {"secret": {"name": pair.name(), "namespace": "default"}}}),
    };
    let spec = json!({"account": {"name": "acme"}, "region": region});
    for file in [EMBEDDED, "cryptoedgedeployment-g4.yaml"] {
        apply_crd(pair.home(), file).await?;
    }
    let make = async |kind: &str, finalizer: &str, name: &str| {
        let kind = GroupVersionKind::gvk("mesh.openkcm.io", "v1alpha1", kind);
        let kind = ApiResource::from_gvk(&kind);
        let api: Api<DynamicObject> = Api::namespaced_with(home.client.clone(), "default", &kind);
        let mut object = DynamicObject::new(name, &kind).data(json!({ "spec": spec }));
        object.metadata.finalizers = Some(vec![format!("mesh.openkcm.io/{finalizer}")]);
        eventually(name, async || {
            Ok(Some(api.create(&PostParams::default(), &object).await?))
        })
        .await
        .unwrap();
        api.merge_status(name, condition("Ready")).await.unwrap();
        api
    };
    {
        let original = original(&pair, &chart);
        for name in ["acme", "goes", "second"] {
            let release = format!("ced-{name}");
            original.install(&release, name).await?;
        }
    }
    let finalizer = "kryptondeployment-finalizer";
    let deployments = make("KryptonDeployment", finalizer, "acme").await;
    make("KryptonDeployment", finalizer, "goes").await;
    let finalizer = "cryptoedgedeployment-finalizer";
    let olds = make("CryptoEdgeDeployment", finalizer, "second").await;
    let old = olds.get("second").await?;
    let before = fleet_client.releases().await?;
    assert_eq!(before.len(), 3);

    // By default, the hub doesn't create that CRD.
    pair.start_hub_and_join(chart.flags(&[])).await?;
    let is_ready = async |name: &str| {
        eventually("a KryptonDeployment to be ready", async || {
            let deployment = deployments.get(name).await?;
            let status = &deployment.data["status"];
            let ready = status["phase"] == "Ready" && status["placements"].is_array();
            ensure!(ready, "{name}: {status}");
            Ok(Some(()))
        })
        .await
        .unwrap();
    };
    is_ready("acme").await;
    is_ready("goes").await;
    assert!(is_ours(
        &get_crd(pair.home(), KryptonDeployment::crd_name()).await
    ));
    kubectl_krypton(pair.home(), &["migrate"]).await?;
    is_ready("second").await;
    let args = ["get", "deployments", "-n", "default"];
    let table = kubectl_krypton(pair.home(), &args).await?;
    let row = table.lines().find(|line| line.contains("second")).unwrap();
    assert_contains!(row, pair.name(), "Ready", "True", "plain:1.0.0");
    let old_object = olds.get("second").await?;
    assert_eq!(old_object.resource_version(), old.resource_version());
    check_no_helm_run(&mut pair).await;
    assert_eq!(fleet_client.releases().await?, before);

    // Another client applies the original's CRD over ours, and a Tenant is deleted. No stored data is lost.
    apply_crd(pair.home(), EMBEDDED).await?;
    let params = DeleteParams::default();
    deployments.delete("goes", &params).await?;
    wait_until_gone(&deployments, "goes").await?;
    let remaining = fleet_client.revisions("goes", "ced-goes").await?;
    assert!(remaining.is_empty(), "{remaining:?}");
    assert!(is_ours(
        &get_crd(pair.home(), KryptonDeployment::crd_name()).await
    ));
    is_ready("acme").await;
    assert_eq!(fleet_client.revisions("acme", "ced-acme").await?.len(), 1);
    // The original doesn't mark the objects that it created.
    assert!(fleet_client.namespace("goes").await?.is_some());
    Ok(())
}
