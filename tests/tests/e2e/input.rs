//! Verifies invalid input: each fault is reported with its remedy as early as possible, and affects nothing else.

use std::{fs, time::Duration};

use anyhow::Result;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use krypton_crds::tenant::Tenant;
use krypton_tests::{
    Hub, HubOptions, Merge as _, Mode, Pair, Parts, ServedChart, TestResult, assert_contains,
    eventually, fleet::FleetClient, home_and_edge, wait_until_gone,
};
use krypton_types::names;
use kube::{
    Api,
    api::{DynamicObject, PostParams},
};
use serde_json::json;

const MINUTE: Duration = Duration::from_secs(60);

/// Waits until a hub exits with this code, and verifies that it has logged these texts.
async fn check_startup_failure(
    options: HubOptions<'_>,
    code: i32,
    expected_texts: &[&str],
) -> Result<()> {
    let mut hub = Hub::start(&options)?;
    let status = hub.wait(MINUTE).await?;
    let log = hub.log()?;
    assert_eq!(status.code(), Some(code), "{options:?}: {log}");
    for text in expected_texts {
        assert_contains!(log, text);
    }
    assert!(!log.contains("panicked"), "{log}");
    Ok(())
}

#[tokio::test]
async fn hub_that_cannot_start_reports_cause_and_remedy() -> TestResult {
    let folder = tempfile::tempdir()?;
    let missing = folder.path().join("missing.yaml");
    let rubbish = folder.path().join("rubbish.yaml");
    fs::write(&rubbish, "clusters: [\n")?;
    let taken = std::net::TcpListener::bind("127.0.0.1:0")?;
    let port = taken.local_addr()?.to_string();
    let list = folder.path().join("list.yaml");
    fs::write(&list, "- not\n- a mapping\n")?;
    let list_flag = format!("--chart-values-file={}", list.display());
    let port_flag = format!("--metrics-bind-address={port}");
    for (flag, code, expected_texts) in [
        ("--chart-nam=x", 2, ["--chart-nam", "--chart-name"]),
        ("--self-cluster=perhaps", 2, ["self-cluster", "perhaps"]),
        (
            port_flag.as_str(),
            1,
            ["--metrics-bind-address", port.as_str()],
        ),
        (&list_flag, 1, ["list.yaml", "mapping"]),
        ("--helm=/no/such/helm", 1, ["/no/such/helm", "install Helm"]),
    ] {
        let options = HubOptions::new(&missing).args([flag]);
        check_startup_failure(options, code, &expected_texts).await?;
    }
    for (home, name) in [(&missing, "missing.yaml"), (&rubbish, "rubbish.yaml")] {
        check_startup_failure(HubOptions::new(home), 1, &[name]).await?;
    }
    let list = list.display().to_string();
    let options = HubOptions::new(&missing).env("HELM_REPOSITORY_CONFIG", &list);
    let expected_texts = ["list.yaml", "helm repo add", "HELM_REPOSITORY_CONFIG"];
    Ok(check_startup_failure(options, 1, &expected_texts).await?)
}

/// With kubeconfigs only, because an agent's kubeconfig never leaves its edge cluster.
#[tokio::test]
async fn invalid_kubeconfig_secret_is_reported_without_affecting_others() -> TestResult {
    let chart = ServedChart::small("replicaCount: 0").await?;
    let (home, edge) = home_and_edge("secrets", Parts::ControlPlane).await?;
    let (fleet_client, at_edge) = (FleetClient::new(&home), FleetClient::new(&edge));
    // `attacks::kubeconfig` has the ones that run a program, read a file or lead to this machine.
    let invalid_secrets = [("rubbish", "clusters: ["), ("empty", "")];
    for (name, kubeconfig) in invalid_secrets {
        fleet_client.add_member(name, kubeconfig).await?;
    }
    let keyless = json!({
        "metadata": {"labels": {names::DISCOVERY_LABEL: "true"}},
        "stringData": {"config": edge.kubeconfig_with_token()},
    });
    fleet_client.apply_secret("keyless", keyless).await?;
    fleet_client
        .add_member("good", &edge.kubeconfig_with_token())
        .await?;

    // Proxy variables apply to charts over HTTPS. A member's credential never passes such a proxy.
    let options = HubOptions::new(home.kubeconfig())
        .args(chart.flags(&[]))
        .env("HTTPS_PROXY", "http://127.0.0.1:9")
        .env("NO_PROXY", "unreadable, ,");
    let hub = Hub::start(&options.args(["--self-cluster=false"]))?;

    at_edge.install("acme").await?;
    let invalid = [
        ("TargetClusterResolved", "False", "KubeconfigInvalid"),
        ("Connected", "False", "KubeconfigInvalid"),
    ];
    for (name, word) in [
        ("rubbish", "default/rubbish"),
        ("empty", "default/empty"),
        ("keyless", "--kubeconfig-key"),
    ] {
        let message = fleet_client
            .member_condition_message(name, &invalid)
            .await?;
        assert_contains!(message, word, format!("default/{name}"));
        assert_contains!(hub.log()?, word);
    }
    let member = fleet_client
        .wait_for_member("good", &[("Healthy", "True", "Reconciling")])
        .await?;
    assert!(member.status.unwrap().cluster_uid.is_some());

    // Corrected without a restart.
    fleet_client
        .add_member("keyless", &edge.kubeconfig_with_token())
        .await?;
    fleet_client
        .wait_for_member("keyless", &[("Healthy", "False", "DuplicateCluster")])
        .await?;
    Ok(())
}

/// Creates an unreadable Tenant, with a permissive CRD like an older one.
pub(crate) async fn unreadable_tenant(
    fleet_client: &FleetClient,
    namespace: &str,
) -> Result<Api<DynamicObject>> {
    let schema = json!({"openAPIV3Schema": {
        "type": "object",
        "x-kubernetes-preserve-unknown-fields": true,
    }});
    let mut crd = Tenant::crd().clone();
    crd.metadata.annotations = None;
    crd.spec.versions[0].additional_printer_columns = None;
    crd.spec.versions[0].schema = serde_json::from_value(schema)?;
    let crds: Api<CustomResourceDefinition> = Api::all(fleet_client.client.clone());
    crds.create(&PostParams::default(), &crd).await?;
    let resource = kube::api::ApiResource::erase::<Tenant>(&());
    let raw: Api<DynamicObject> =
        Api::namespaced_with(fleet_client.client.clone(), namespace, &resource);
    let unreadable: DynamicObject = serde_json::from_value(json!({
        "apiVersion": "mesh.openkcm.io/v1alpha1",
        "kind": "Tenant",
        "metadata": {"name": "unreadable"},
        "spec": {"workspace": ["a", "list"]},
    }))?;
    eventually("the permissive CRD to be served", async || {
        Ok(Some(raw.create(&PostParams::default(), &unreadable).await?))
    })
    .await?;
    Ok(raw)
}

/// On home, where the hub watches the same Tenants a second time for aggregation.
#[tokio::test]
async fn invalid_tenant_is_reported_without_affecting_others() -> TestResult {
    let chart = ServedChart::small("replicaCount: 0").await?;
    let mut pair = Pair::start("tenants", Mode::SelfCluster, Parts::WithControllers).await?;
    let fleet_client = pair.fleet_client();
    let raw = unreadable_tenant(&fleet_client, "default").await?;

    let flags = chart.flags(&[]);
    pair.start_hub_and_join(flags).await?;
    let error = pair.condition("ClusterError");
    let long = "a".repeat(70);
    let invalid = [
        (
            "of-kubernetes",
            json!({"workspace": "kube-system"}),
            "NamespaceNotOwned",
            "kube-system",
        ),
        (
            "of-krypton",
            json!({"workspace": "krypton-system"}),
            "NamespaceNotOwned",
            "krypton-system",
        ),
        (
            "two.labels",
            json!({}),
            "WorkspaceInvalid",
            "set spec.workspace",
        ),
        (
            long.as_str(),
            json!({}),
            "WorkspaceInvalid",
            "at most 63 characters",
        ),
    ];
    for (name, spec, _, _) in &invalid {
        fleet_client.create(name, spec.clone()).await?;
    }
    fleet_client.install("good").await?;
    for (name, _, reason, expected_texts) in &invalid {
        let refused = (error.as_str(), "True", *reason);
        let not_ready = ("Ready", "False", "ClustersNotReady");
        let tenant = fleet_client.wait_for(name, &[refused, not_ready]).await?;
        assert_eq!(tenant.metadata.finalizers, None, "{name}");
        let message = tenant.status.unwrap().last_message.unwrap();
        assert!(message.contains(expected_texts), "{name}: {message}");
        fleet_client.event_message(name, reason).await?;
    }
    let event = fleet_client
        .event_message("unreadable", "TenantInvalid")
        .await?;
    assert_contains!(event, "until it is corrected", "a string");
    let log = pair.actor()?.log()?;
    assert_contains!(log, "unreadable");
    let releases = fleet_client.releases().await?;
    assert_eq!(
        releases.into_keys().collect::<Vec<_>>(),
        [format!("sh.helm.release.v1.{}.v1", pair.release("good"))]
    );

    // After the correction, the Tenant is an ordinary Tenant.
    let right = json!({"spec": {"workspace": "short"}});
    fleet_client.tenants().merge(&long, &right).await?;
    fleet_client.wait_ready(&long).await?;
    raw.delete("unreadable", &Default::default()).await?;
    Ok(wait_until_gone(&raw, "unreadable").await?)
}
