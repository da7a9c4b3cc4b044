//! Shows `kubectl krypton migrate` on a real API server with the original's CRDs.

use krypton_crds::krypton_deployment::KryptonDeployment;
use krypton_tests::{
    Cluster, Parts, TestResult, assert_contains, eventually, kubectl_krypton, original::apply_crd,
};
use kube::{
    Api, Client, ResourceExt,
    api::{ApiResource, DynamicObject, PostParams},
    core::GroupVersionKind,
};
use serde_json::{Value, json};

fn api(client: &Client, kind: &str, namespace: &str) -> (Api<DynamicObject>, ApiResource) {
    let kind = ApiResource::from_gvk(&GroupVersionKind::gvk("mesh.openkcm.io", "v1alpha1", kind));
    (Api::namespaced_with(client.clone(), namespace, &kind), kind)
}

async fn create(client: &Client, kind: &str, (namespace, name): (&str, &str), spec: Value) {
    let (api, kind) = api(client, kind, namespace);
    let mut object = DynamicObject::new(name, &kind).data(json!({ "spec": spec }));
    if kind.kind == "CryptoEdgeDeployment" {
        let finalizer = "mesh.openkcm.io/cryptoedgedeployment-finalizer";
        object.metadata.finalizers = Some(vec![finalizer.to_owned()]);
    }
    eventually(name, async || {
        Ok(Some(api.create(&PostParams::default(), &object).await?))
    })
    .await
    .unwrap();
}

async fn read_spec(client: &Client, namespace: &str, name: &str) -> Option<Value> {
    let (api, _) = api(client, "KryptonDeployment", namespace);
    let object = api.get_opt(name).await.unwrap();
    object.map(|object| object.data["spec"].clone())
}

async fn read_version(client: &Client, namespace: &str, name: &str) -> Option<String> {
    let (api, _) = api(client, "CryptoEdgeDeployment", namespace);
    api.get(name).await.unwrap().resource_version()
}

#[tokio::test]
async fn old_deployments_are_migrated_and_left_unchanged() -> TestResult {
    let home = Cluster::start("migrate", Parts::ControlPlane).await?;
    let client = home.client();
    let migrate = async |extra_args: &[&str]| {
        let args = [&["migrate"], extra_args].concat();
        kubectl_krypton(&home, &args).await
    };
    assert_eq!(
        migrate(&[]).await?,
        "",
        "there is nothing, and that is no failure"
    );

    // G3: by reference.
    for file in [
        "cryptoedgedeployment-g3.yaml",
        "account-g3.yaml",
        "region-g3.yaml",
    ] {
        apply_crd(&home, file).await?;
    }
    home.create_namespace("krypton-operator").await?;
    create(
        &client,
        "Account",
        ("default", "acme-inc"),
        json!({"displayName": "Acme", "owner": "ann"}),
    )
    .await;
    create(
        &client,
        "Region",
        ("krypton-operator", "eu"),
        json!({"kubeconfigSecretName": "eu-access"}),
    )
    .await;
    let old = json!({"accountRef": {"name": "acme-inc"}, "targetRegion": "eu"});
    create(&client, "CryptoEdgeDeployment", ("default", "acme"), old).await;
    let before = read_version(&client, "default", "acme").await;
    let expected = json!({
        "account": {"name": "acme-inc", "displayName": "Acme", "owner": "ann"},
        "region": {"name": "eu", "kubeconfig":
            {"secret": {"name": "eu-access", "namespace": "krypton-operator"}}},
    });
    // A dry run works without the CRD of the new objects, and creates nothing.
    let report = migrate(&["--dry-run", "-o", "json"]).await?;
    let report: Value = serde_json::from_str(&report)?;
    assert_eq!(report["items"][0]["spec"], expected, "{report}");
    let error = migrate(&[]).await.unwrap_err().to_string();
    assert_contains!(error, "kryptondeployments");
    krypton_runtime::crd::ensure(&client, KryptonDeployment::crd()).await?;
    let table = migrate(&["--dry-run"]).await?;
    assert_contains!(table, "acme/ced-acme", "would be created");
    assert_eq!(read_spec(&client, "default", "acme").await, None);
    // kubectl accepts the output of `-o yaml`.
    let yaml = migrate(&["--dry-run", "-o", "yaml"]).await?;
    home.apply(&yaml.replace("name: acme\n", "name: by-hand\n"))
        .await?;
    assert_eq!(
        read_spec(&client, "default", "by-hand").await,
        Some(expected.clone())
    );

    let table = migrate(&[]).await?;
    assert!(
        table.contains("created") && !table.contains("would be"),
        "{table}"
    );
    assert_eq!(
        read_spec(&client, "default", "acme").await,
        Some(expected.clone())
    );
    assert_eq!(
        read_version(&client, "default", "acme").await,
        before,
        "the old one is as it was"
    );

    // G4: inline. One object already exists, and one can't be converted.
    apply_crd(&home, "cryptoedgedeployment-g4.yaml").await?;
    home.create_namespace("team").await?;
    let within = |account: &str| json!({"account": {"name": account}, "region": {"name": "us"}});
    for (name, account) in [("second", "b"), ("there", "c"), ("nobodys", "")] {
        create(
            &client,
            "CryptoEdgeDeployment",
            ("team", name),
            within(account),
        )
        .await;
    }
    create(
        &client,
        "KryptonDeployment",
        ("team", "there"),
        within("theirs"),
    )
    .await;
    for _ in 0..2 {
        let error = migrate(&["-n", "team"]).await.unwrap_err();
        let error = format!("{error:#}");
        assert_contains!(error, "1 of the objects were not moved over");
        assert_eq!(
            read_spec(&client, "team", "second").await,
            Some(within("b"))
        );
        assert_eq!(
            read_spec(&client, "team", "there").await,
            Some(within("theirs"))
        );
        assert_eq!(read_spec(&client, "team", "nobodys").await, None);
    }
    for name in ["second", "there", "nobodys"] {
        read_version(&client, "team", name).await.unwrap();
    }
    assert_eq!(read_spec(&client, "default", "acme").await, Some(expected));
    Ok(())
}
