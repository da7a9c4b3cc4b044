//! Runs hub and agent with exactly the service accounts, flags and rights of their charts. The API servers log every
//! denied request.

use std::{collections::BTreeSet, time::Duration};

use anyhow::Result;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Secret;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use krypton_crds::{krypton_deployment::KryptonDeployment, tenant::Tenant};
use krypton_kubectl::{Connection, join_token};
use krypton_runtime::clock::wall;
use krypton_tests::{
    Agent, AgentOptions, AgentPod, AuditedRequest, ChartRepository, ChartSource, Cluster, HubPod,
    OwnChart, Parts, ServiceAccountAccess, TestResult, assert_contains, eventually,
    fleet::{ALL_READY, CONNECTED, FleetClient},
    held::BlockedTenant,
    membership::bundle_in_namespace,
    service_account::username,
    wait_until_gone, wait_until_replaced,
};
use krypton_types::names;
use kube::{
    Api, CustomResourceExt, ResourceExt,
    api::{DeleteParams, ListParams, ObjectMeta, PostParams},
};
use serde_json::json;
use tempfile::TempDir;

const EDGE: &str = "edge-1";
/// Frequent drift checks, and fleet values in objects of home.
const EXTRA_VALUES: [&str; 4] = [
    "--set=namespaceConfiguration.labels.team=a",
    "--set=placeTenants=true",
    "--set=drift.mode=heal,drift.interval=2s",
    "--set=chart.valuesFrom={configmap/fleet,secret/fleet?}",
];
const SCHEMA_VERSION: &str = "mesh.openkcm.io/schema-version";

/// Returns the accounts of Krypton and of Helm.
fn accounts(chart: OwnChart) -> Vec<String> {
    let name = chart.name();
    [name.to_owned(), format!("{name}-helm")]
        .map(|account| username(chart.namespace(), &account))
        .into()
}

/// Returns the values for a fleet with the chart `small`.
pub(crate) fn hub_values(
    repository: &ChartRepository,
    version: &str,
    more: &[&str],
) -> Vec<String> {
    let own_objects = [
        format!("--set=chart.repo={}", repository.url()),
        "--set=chart.name=small".to_owned(),
        format!("--set=chart.version={version}"),
        "--set=chart.installCRDs=false,chart.values.replicaCount=0".to_owned(),
        "--set=helm.retryMax=5s".to_owned(),
    ];
    own_objects
        .into_iter()
        .chain(more.iter().map(|value| (*value).to_owned()))
        .collect()
}

async fn install_hub(
    cluster: &Cluster,
    repository: &ChartRepository,
    version: &str,
    more: &[&str],
) -> Result<String> {
    let values = hub_values(repository, version, more);
    OwnChart::Hub.install(cluster, values).await
}

async fn repository() -> ChartRepository {
    let charts = ["1.0.0", "1.1.0"].map(ChartSource::small);
    ChartRepository::start(&charts).await.unwrap()
}

fn describe(requests: &[AuditedRequest]) -> String {
    let lines = requests.iter().map(|request| format!("\n  {request}"));
    lines.collect()
}

/// Asserts that no request of these accounts was denied, and that each account sent requests.
async fn check_nothing_denied(cluster: &Cluster, accounts: &[String]) {
    let requests = cluster.audited_requests().await.unwrap();
    for account in accounts {
        let has_requests = requests.iter().any(|request| request.is_of(account));
        assert!(
            has_requests,
            "{account} sent no request to {}",
            cluster.name()
        );
    }
    let denied = cluster.denied_requests(accounts).await.unwrap();
    assert!(
        denied.is_empty(),
        "refused on {}:{}",
        cluster.name(),
        describe(&denied)
    );
}

async fn install_tenant(fleet_client: &FleetClient, tenant: &str) {
    let spec = json!({"workspace": format!("{tenant}-ws")});
    fleet_client.create(tenant, spec).await.unwrap();
    fleet_client.wait_ready(tenant).await.unwrap();
}

/// Leaves the release without a valid revision, as if Helm was killed at the end. Waits until the agent has repaired
/// it.
async fn check_repair(edge: &Cluster, fleet_client: &FleetClient, tenant: &str) -> TestResult {
    let (namespace, release) = (format!("{tenant}-ws"), names::tenant_release(tenant, EDGE));
    let (newest, _) = fleet_client
        .revisions(&namespace, &release)
        .await?
        .pop()
        .unwrap();
    let secret = format!("sh.helm.release.v1.{release}.v{newest}");
    let label = format!("label --overwrite secret {secret} status=superseded -n {namespace}");
    edge.kubectl_line(&label).await?;
    let agent = &accounts(OwnChart::Agent)[0];
    eventually("the release to be repaired", async || {
        let by_agent = edge.audited_requests().await?.into_iter().any(|request| {
            let sent_by_agent =
                request.user.username == *agent && request.impersonated_user.is_none();
            sent_by_agent && request.verb == "update" && request.object.namespace == namespace
        });
        Ok(by_agent.then_some(()))
    })
    .await?;
    fleet_client
        .wait_deployed(&namespace, &release, newest + 1)
        .await?;
    fleet_client.wait_ready(tenant).await?;
    Ok(())
}

/// Deletes an object of the release, and waits until the agent has recreated it with Helm's account.
async fn check_drift_correction(edge: &Cluster, tenant: &str) -> TestResult {
    let (namespace, release) = (format!("{tenant}-ws"), names::tenant_release(tenant, EDGE));
    let delete = ["delete", "configmap", &release, "-n", &namespace];
    edge.kubectl(delete).await?;
    let [agent, helm] = <[String; 2]>::try_from(accounts(OwnChart::Agent)).unwrap();
    eventually("the object to be recreated", async || {
        let as_helm = edge.audited_requests().await?.into_iter().any(|request| {
            // Helm wrote the object before.
            let own = request.user_agent.starts_with("krypton-agent/");
            let by_agent = own && request.user.username == agent;
            let helm = request
                .impersonated_user
                .is_some_and(|user| user.username == helm);
            by_agent && helm && request.verb == "patch" && request.object.name == release
        });
        let get = ["get", "configmap", &release, "-n", &namespace];
        Ok((as_helm && edge.kubectl(get).await.is_ok()).then_some(()))
    })
    .await?;
    Ok(())
}

/// Changes a label of the Tenant's workspace, and waits until the agent has restored it.
async fn check_label_restored(edge: &Cluster, tenant: &str) {
    let namespace = format!("{tenant}-ws");
    let label = format!("label --overwrite namespace {namespace} team=b");
    edge.kubectl_line(&label).await.unwrap();
    eventually("the label to be restored", async || {
        let get = format!("get namespace {namespace} -o=jsonpath={{.metadata.labels.team}}");
        Ok((edge.kubectl_line(&get).await? == "a").then_some(()))
    })
    .await
    .unwrap();
}

/// Deletes the CRD with its Tenants, and waits until the CRD and this Tenant are restored.
async fn check_crd_restored(
    cluster: &Cluster,
    fleet_client: &FleetClient,
    tenant: &str,
) -> TestResult {
    let crds: Api<CustomResourceDefinition> = Api::all(fleet_client.client.clone());
    let crd = crds.get(Tenant::crd_name()).await?;
    let old = fleet_client.tenants().get(tenant).await?;
    let going = BlockedTenant::delete(fleet_client, "going").await?;
    let releases = fleet_client.releases().await?;
    let delete = ["delete", "crd", Tenant::crd_name(), "--wait=false"];
    cluster.kubectl(delete).await?;
    wait_until_replaced(&crds, &crd).await?;
    wait_until_replaced(&fleet_client.tenants(), &old).await?;
    fleet_client.wait_ready(tenant).await?;
    fleet_client.event_message(tenant, "TenantRestored").await?;
    going.wait_deleted_again().await?;
    going.release().await?;
    assert_eq!(fleet_client.releases().await?, releases);
    Ok(())
}

/// Places a Tenant in a namespace that is missing on the edge cluster: creates it, writes it and deletes it. Then
/// orphans another one.
async fn check_placement(cluster: &Cluster, edge: &FleetClient) -> TestResult {
    cluster.create_namespace("team").await?;
    let spec = json!({"clusterRef": {"secretName": EDGE}, "workspace": "sent-ws"});
    let placed = [ALL_READY, ("Placed", "True", "Placed")];
    let home = FleetClient::new(cluster).in_namespace("team");
    let edge_tenants = edge.in_namespace("team").tenants();
    home.create("sent", spec.clone()).await?;
    home.wait_for("sent", &placed).await?;
    let requested = names::RECONCILE_REQUESTED_ANNOTATION;
    home.annotate("sent", requested, "now").await?;
    eventually("the request to be passed on", async || {
        let tenant_on_edge = edge_tenants.get("sent").await?;
        Ok(tenant_on_edge.annotations().get(requested).cloned())
    })
    .await?;
    home.remove("sent").await?;
    assert_eq!(edge_tenants.get_opt("sent").await?, None);

    home.create("kept", spec).await?;
    home.wait_for("kept", &placed).await?;
    let orphan = names::ORPHAN_ANNOTATION;
    home.annotate("kept", orphan, "true").await?;
    home.remove("kept").await?;
    home.event_message("kept", "Orphaned").await?;
    Ok(())
}

async fn check_all_repairs(home: &Cluster, edge: &Cluster) -> TestResult {
    let (at_home, at_edge) = (FleetClient::new(home), FleetClient::new(edge));
    check_placement(home, &at_edge).await?;
    check_repair(edge, &at_edge, "beta").await?;
    check_drift_correction(edge, "beta").await?;
    check_label_restored(edge, "beta").await;
    tokio::try_join!(
        check_crd_restored(edge, &at_edge, "beta"),
        check_crd_restored(home, &at_home, "acme"),
    )?;
    Ok(())
}

/// Runs an agent on another cluster with the edge cluster's identity, until the hub has reported it twice, in one event
/// with its count.
async fn check_credential_used_twice(
    home: &Cluster,
    edge: &Cluster,
    fleet_client: &FleetClient,
) -> TestResult {
    let copy = Cluster::start("chart-rights-copy", Parts::ControlPlane).await?;
    let namespace = OwnChart::Agent.namespace();
    let secrets = |cluster: &Cluster| Api::<Secret>::namespaced(cluster.client(), namespace);
    let mut identity = secrets(edge).get("krypton-agent-identity").await?;
    identity.metadata = ObjectMeta {
        name: identity.metadata.name,
        ..ObjectMeta::default()
    };
    copy.create_namespace(namespace).await?;
    secrets(&copy)
        .create(&PostParams::default(), &identity)
        .await?;
    let _agent = Agent::start(&AgentOptions::new(copy.kubeconfig()))?;
    fleet_client
        .event_message(EDGE, "CredentialUsedTwice")
        .await?;
    eventually("the event to be counted", async || {
        let counted = home.audited_requests().await?.into_iter().any(|request| {
            let of_hub = request.is_of(&accounts(OwnChart::Hub)[0]);
            of_hub && request.verb == "patch" && request.object.resource == "events"
        });
        Ok(counted.then_some(()))
    })
    .await?;
    Ok(())
}

/// The fleet's values are missing. The hub reports it on the referenced object until the object exists.
async fn check_missing_values(home: &Cluster, fleet_client: &FleetClient) -> TestResult {
    let namespace = OwnChart::Hub.namespace();
    let fleet_client = fleet_client.in_namespace(namespace);
    fleet_client.event_message("fleet", "ValuesMissing").await?;
    let values = json!({
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "fleet", "namespace": namespace},
        "data": {"values.yaml": "message: from a ConfigMap"},
    });
    home.apply(&values.to_string()).await?;
    fleet_client
        .event_message("fleet", "ValuesResolved")
        .await?;
    Ok(())
}

/// Returns the name of an expired join token.
async fn create_expired_token(home: &Cluster) -> TestResult<String> {
    let (namespace, hour) = (OwnChart::Hub.namespace(), Duration::from_secs(60 * 60));
    let secrets: Api<Secret> = Api::namespaced(home.client(), namespace);
    let names = async || {
        let result = secrets.list_metadata(&ListParams::default()).await;
        result
            .unwrap()
            .items
            .iter()
            .map(ResourceExt::name_any)
            .collect()
    };
    let before: BTreeSet<String> = names().await;
    let long_ago = Timestamp::from_second(wall().as_second() - 48 * 3600)?;
    let connection = Connection::new(home.client(), "home");
    join_token::create(&connection, namespace, "edge-9", hour, long_ago).await?;
    let now: BTreeSet<String> = names().await;
    Ok(now.difference(&before).next().unwrap().clone())
}

/// Creates and deletes a KryptonDeployment of the agent's member on home.
async fn check_deployment(fleet_client: &FleetClient, at_edge: &FleetClient) -> TestResult {
    let all: Api<KryptonDeployment> = Api::namespaced(fleet_client.client.clone(), "default");
    let spec = json!({"account": {"name": "somebody"}, "region": {"name": EDGE}});
    let object = KryptonDeployment::new("ordered", serde_json::from_value(spec)?);
    all.create(&PostParams::default(), &object).await?;
    fleet_client.event_message("ordered", "Ready").await?;
    at_edge.wait_deployed("ordered", "ced-ordered", 1).await?;
    let params = DeleteParams::default();
    all.delete("ordered", &params).await?;
    Ok(wait_until_gone(&all, "ordered").await?)
}

/// Writes the output of `kubectl krypton join` to a file.
async fn bundle_file(home: &Cluster, folder: &TempDir) -> Result<String> {
    let bundle = bundle_in_namespace(home, OwnChart::Hub.namespace(), EDGE).await?;
    let file = folder.path().join("edge-1.yaml");
    std::fs::write(&file, bundle)?;
    Ok(format!("--set-file=join.bundle={}", file.display()))
}

#[tokio::test]
async fn chart_rights_suffice_for_hub_and_agent() -> TestResult {
    let repository = repository().await;
    let (home, edge) = tokio::try_join!(
        Cluster::start_audited("chart-rights-home", Parts::WithControllers),
        Cluster::start_audited("chart-rights-edge", Parts::WithControllers),
    )?;
    let (fleet_client, at_edge) = (FleetClient::new(&home), FleetClient::new(&edge));
    let (of_hub, of_agent) = (accounts(OwnChart::Hub), accounts(OwnChart::Agent));

    install_hub(&home, &repository, "1.0.0", &EXTRA_VALUES).await?;
    let mut hub = HubPod::start(&home, None).await?;
    let folder = TempDir::with_prefix("krypton-join-")?;
    let bundle = bundle_file(&home, &folder).await?;
    let values = [bundle.as_str(), "--set=helm.retryMax=5s"];
    OwnChart::Agent.install(&edge, values).await?;
    let mut agent = AgentPod::start(&edge).await?;
    fleet_client.wait_for_member(EDGE, &[CONNECTED]).await?;
    check_missing_values(&home, &fleet_client).await?;

    tokio::join!(
        install_tenant(&fleet_client, "acme"),
        install_tenant(&at_edge, "beta"),
        install_tenant(&at_edge, "gone"),
    );
    at_edge.remove("gone").await?;

    check_deployment(&fleet_client, &at_edge).await?;

    // A new version needs a new hub, which also cleans up after the previous pod.
    hub.hub.stop().await?;
    let stale = create_expired_token(&home).await?;
    install_hub(&home, &repository, "1.1.0", &EXTRA_VALUES).await?;
    hub = HubPod::start(&home, Some(&hub)).await?;
    let secrets: Api<Secret> = Api::namespaced(home.client(), OwnChart::Hub.namespace());
    wait_until_gone(&secrets, &stale).await?;
    let releases = [
        (&fleet_client, "acme", names::SELF_CLUSTER),
        (&at_edge, "beta", EDGE),
    ];
    for (client, tenant, member) in releases {
        let release = names::tenant_release(tenant, member);
        let namespace = format!("{tenant}-ws");
        client.wait_deployed(&namespace, &release, 2).await?;
        client.wait_ready(tenant).await?;
    }

    // The restarted agent uses its stored state, and updates a CRD of an older version.
    agent.agent.stop().await?;
    let version = async || {
        let crds: Api<CustomResourceDefinition> = Api::all(edge.client());
        let crd = crds.get(Tenant::crd_name()).await.unwrap();
        crd.annotations().get(SCHEMA_VERSION).cloned()
    };
    let (now, older) = (version().await, format!("{SCHEMA_VERSION}=0"));
    let annotate = ["annotate", "--overwrite", "crd", Tenant::crd_name(), &older];
    edge.kubectl(annotate).await?;
    agent = AgentPod::start(&edge).await?;
    fleet_client.wait_for_member(EDGE, &[CONNECTED]).await?;
    eventually("the current CRD", async || {
        Ok((version().await == now).then_some(()))
    })
    .await?;

    let spec = json!({"paused": true});
    fleet_client.patch_member(EDGE, spec).await?;
    let paused = (&*format!("ClusterProgress/{EDGE}"), "False", "Paused");
    at_edge.create("late", json!({})).await?;
    at_edge.wait_for("late", &[paused]).await?;
    let spec = json!({"paused": false});
    fleet_client.patch_member(EDGE, spec).await?;
    at_edge.wait_ready("late").await?;

    // The hub counts a reported event once a minute.
    tokio::try_join!(
        check_credential_used_twice(&home, &edge, &fleet_client),
        check_all_repairs(&home, &edge),
    )?;

    for (client, tenant) in [(&fleet_client, "acme"), (&at_edge, "beta")] {
        client.remove(tenant).await?;
    }
    home.kubectl(["delete", "edgecluster", EDGE]).await?;
    at_edge.wait_for_renewal().await?;
    fleet_client.wait_for_renewal().await?;
    assert!(at_edge.tenants().get_opt("late").await?.is_some());
    check_nothing_denied(&home, &of_hub).await;
    check_nothing_denied(&edge, &of_agent).await;

    // With one rule less, the API server would have denied a request.
    let patch = r#"-p=[{"op":"remove","path":"/rules/0"}]"#;
    let role = "patch role krypton-agent-member -n krypton-system --type=json";
    edge.kubectl_line(&format!("{role} {patch}")).await?;
    eventually("a refusal", async || {
        let denied = edge.denied_requests(&of_agent).await?;
        let lease = denied
            .iter()
            .any(|request| request.object.resource == "leases");
        Ok(lease.then_some(()))
    })
    .await?;
    agent.agent.stop().await?;
    hub.hub.stop().await?;
    Ok(())
}

/// Rights for the objects of the chart `small`, except its Service.
const TOO_FEW: &str = "apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {name: too-few}
rules:
- {apiGroups: [''], resources: [configmaps, secrets], verbs: ['*']}
- {apiGroups: [''], resources: [namespaces], verbs: [get, create]}
- {apiGroups: [apps], resources: [deployments], verbs: ['*']}
- {apiGroups: [apps], resources: [replicasets], verbs: [get, list, watch]}
- {apiGroups: [''], resources: [pods], verbs: [get, list, watch]}
";

#[tokio::test]
async fn missing_helm_right_is_reported_until_chart_upgrade() -> TestResult {
    let repository = repository().await;
    let home = Cluster::start_audited("few-rights", Parts::WithControllers).await?;
    home.apply(TOO_FEW).await?;
    let fleet_client = FleetClient::new(&home);
    // The hub creates the CRDs itself, and always has the rights for it.
    let few = [
        "--set=helmRights.clusterRole=too-few",
        "--set=crds.install=false,watchCluster.ensureCrds=true",
    ];
    install_hub(&home, &repository, "1.0.0", &few).await?;
    let mut hub = HubPod::start(&home, None).await?;
    fleet_client.create("acme", json!({})).await?;
    let error = format!("ClusterError/{}", names::SELF_CLUSTER);
    let failed = (error.as_str(), "True", "InstallFailed");
    let message = fleet_client.condition_message("acme", &[failed]).await?;
    let helm = &accounts(OwnChart::Hub)[1];
    assert_contains!(message, "forbidden", "services", helm);

    // Only requests of Helm's account were denied. The hub continues to work.
    fleet_client.wait_for_renewal().await?;
    let denied = home.denied_requests(&accounts(OwnChart::Hub)).await?;
    let others: Vec<AuditedRequest> = denied
        .iter()
        .filter(|request| {
            let impersonated = request.impersonated_user.as_ref();
            impersonated.is_none_or(|user| user.username != *helm)
                || request.object.resource != "services"
        })
        .cloned()
        .collect();
    assert!(!denied.is_empty());
    assert!(others.is_empty(), "{}", describe(&others));

    install_hub(&home, &repository, "1.0.0", &[]).await?;
    fleet_client.wait_ready("acme").await?;
    hub.hub.stop().await?;
    Ok(())
}

#[tokio::test]
async fn hub_manages_remote_home_with_chart_rights() -> TestResult {
    let repository = repository().await;
    let (home, own) = tokio::try_join!(
        Cluster::start_audited("away-home", Parts::WithControllers),
        Cluster::start_audited("away-own", Parts::ControlPlane),
    )?;
    let only_rights = ["--set=installMode.crdsRbacOnly=true"];
    install_hub(&home, &repository, "1.0.0", &only_rights).await?;
    let deployments = "get deployments -n krypton -o name";
    assert_eq!(home.kubectl_line(deployments).await?, "");

    let namespace = OwnChart::Hub.namespace();
    let access = ServiceAccountAccess::new(&home, namespace, OwnChart::Hub.name()).await?;
    let token = std::fs::read_to_string(access.token_file())?;
    own.create_namespace(namespace).await?;
    let secret = json!({"stringData": {"kubeconfig": home.kubeconfig_with(&token)}});
    let on_own = FleetClient::new(&own).in_namespace(namespace);
    on_own.apply_secret("home", secret).await?;
    let elsewhere = ["--set=watchCluster.secretName=home"];
    install_hub(&own, &repository, "1.0.0", &elsewhere).await?;
    assert_eq!(own.kubectl_line("get crds -o name").await?, "");

    let mut hub = HubPod::start(&own, None).await?;
    let fleet_client = FleetClient::new(&home);
    install_tenant(&fleet_client, "acme").await;
    fleet_client.remove("acme").await?;
    check_nothing_denied(&home, &accounts(OwnChart::Hub)).await;
    check_nothing_denied(&own, &accounts(OwnChart::Hub)[..1]).await;
    hub.hub.stop().await?;
    Ok(())
}

#[tokio::test]
async fn hub_without_home_member_needs_fewer_rights() -> TestResult {
    let repository = repository().await;
    let (home, edge) = tokio::try_join!(
        Cluster::start_audited("fewest-home", Parts::ControlPlane),
        Cluster::start("fewest-edge", Parts::ControlPlane),
    )?;
    let away = ["--set=selfCluster=false"];
    install_hub(&home, &repository, "1.0.0", &away).await?;
    let mut hub = HubPod::start(&home, None).await?;
    let fleet_client = FleetClient::new(&home).in_namespace(OwnChart::Hub.namespace());
    fleet_client
        .add_member(EDGE, &edge.kubeconfig_with_token())
        .await?;
    fleet_client.wait_for_member(EDGE, &[CONNECTED]).await?;
    check_nothing_denied(&home, &accounts(OwnChart::Hub)[..1]).await;
    hub.hub.stop().await?;
    Ok(())
}
