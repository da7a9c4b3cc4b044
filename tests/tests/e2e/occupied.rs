//! Verifies workspaces with foreign objects: they stay, and the Tenant's deletion completes.

use k8s_openapi::api::core::v1::{ConfigMap, PersistentVolumeClaim, Secret};
use krypton_tests::{
    ChartRepository, ChartSource, Mode, Pair, Parts, TestResult, assert_contains, by_agent,
    fleet::{FleetClient, chart_flags},
};
use kube::api::PostParams;
use kube::core::NamespaceResourceScope;
use kube::{Api, Resource, ResourceExt};
use serde::{Serialize, de::DeserializeOwned};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::input::unreadable_tenant;

const TEMPLATE: &str = r#"
apiVersion: v1
kind: ConfigMap
metadata: {name: of-the-chart}
---
apiVersion: v1
kind: ConfigMap
metadata: {name: left-by-hook, annotations: {helm.sh/hook: pre-install}}
{{- if contains "kept" .Release.Name }}
---
apiVersion: v1
kind: ConfigMap
metadata: {name: of-value, annotations: {helm.sh/resource-policy: keep}}
{{- end }}
"#;

by_agent!(workspace_with_other_objects_stays);

fn chart(folder: &TempDir) -> ChartSource {
    ChartSource::write(folder.path(), "maps", &[("templates/all.yaml", TEMPLATE)]).unwrap()
}

/// Creates an object, and returns its UID.
async fn create_object<K>(
    fleet_client: &FleetClient,
    namespace: &str,
    object: Value,
) -> TestResult<String>
where
    K: Resource<DynamicType = (), Scope = NamespaceResourceScope>
        + Clone
        + std::fmt::Debug
        + Serialize
        + DeserializeOwned,
{
    let api: Api<K> = Api::namespaced(fleet_client.client.clone(), namespace);
    let object = serde_json::from_value(object)?;
    let created = api.create(&PostParams::default(), &object).await?;
    Ok(created.uid().unwrap())
}

async fn check_namespace_stays(fleet_client: &FleetClient, name: &str) {
    let namespace = fleet_client.namespace(name).await.unwrap().unwrap();
    assert_eq!(namespace.metadata.deletion_timestamp, None, "{name}");
}

async fn workspace_with_other_objects_stays(mode: Mode) -> TestResult {
    let folder = tempfile::tempdir()?;
    let repository = ChartRepository::start(&[chart(&folder)]).await?;
    let mut pair = Pair::start("occupied", mode, Parts::WithControllers).await?;
    let fleet_client = pair.fleet_client();
    let cluster = pair.cluster();
    cluster.create_namespace("odd").await?;
    let label = "label namespace odd mesh.openkcm.io/created-for=x";
    cluster.kubectl_line(label).await?;
    unreadable_tenant(&fleet_client, "odd").await?;
    pair.start_hub_and_join(chart_flags(&repository, "maps", "1.0.0"))
        .await?;
    let names = ["plain", "shared", "kept", "notes", "odd"];
    fleet_client.install_all(&names).await?;
    let map = json!({"metadata": {"name": "theirs"}});
    let map = create_object::<ConfigMap>(&fleet_client, "shared", map).await?;
    let claim = json!({"metadata": {"name": "data"}, "spec": {"accessModes": ["ReadWriteOnce"],
        "resources": {"requests": {"storage": "1Gi"}}}});
    let claim = create_object::<PersistentVolumeClaim>(&fleet_client, "shared", claim).await?;
    // The object is deleted with its owner, so it doesn't count.
    let owner = json!([{"apiVersion": "v1", "kind": "ConfigMap", "name": "theirs", "uid": map}]);
    let owned = json!({"metadata": {"name": "owned", "ownerReferences": owner}});
    create_object::<ConfigMap>(&fleet_client, "shared", owned).await?;
    // Neither is a revision: one has no type, and the other has another name.
    let labels = json!({"owner": "helm", "name": pair.release("notes"), "version": "7",
        "status": "deployed"});
    for (name, type_) in [("notes", "Opaque"), ("copy", "helm.sh/release.v1")] {
        let secret = json!({"metadata": {"name": name, "labels": labels}, "type": type_});
        create_object::<Secret>(&fleet_client, "notes", secret).await?;
    }

    for name in names {
        fleet_client.delete(name).await?;
    }
    for name in names {
        fleet_client.wait_gone(name).await?;
    }

    fleet_client.wait_for_namespace_deletion("plain").await?;
    for (name, expected) in [
        (
            "shared",
            "ConfigMap theirs (not created by the release), PersistentVolumeClaim data (holds data);",
        ),
        ("kept", "ConfigMap of-value (kept by the chart);"),
        ("notes", "Secret copy"),
        ("odd", "Tenant unreadable"),
    ] {
        check_namespace_stays(&fleet_client, name).await;
        let message = fleet_client.event_message(name, "WorkspaceKept").await?;
        assert_contains!(message, expected);
    }
    for name in ["shared", "kept"] {
        let release = pair.release(name);
        assert_eq!(fleet_client.revisions(name, &release).await?, []);
    }
    let maps: Api<ConfigMap> = Api::namespaced(fleet_client.client.clone(), "shared");
    assert_eq!(maps.get("theirs").await?.uid(), Some(map));
    assert!(maps.get_opt("of-the-chart").await?.is_none());
    let claims: Api<PersistentVolumeClaim> = Api::namespaced(fleet_client.client.clone(), "shared");
    assert_eq!(claims.get("data").await?.uid(), Some(claim));
    let maps: Api<ConfigMap> = Api::namespaced(fleet_client.client.clone(), "kept");
    maps.get("of-value").await?;
    Ok(())
}
