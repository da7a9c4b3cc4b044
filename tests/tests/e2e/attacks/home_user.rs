//! Plays a user of home who may write Secrets, Tenants and KryptonDeployments in one namespace.

use k8s_openapi::api::core::v1::Secret;
use krypton_crds::edge_cluster::{EdgeCluster, SourceRef};
use krypton_crds::krypton_deployment::KryptonDeployment;
use krypton_crds::tenant::Tenant;
use krypton_tests::fleet::{FleetClient, condition};
use krypton_tests::{
    Cluster, Hub, HubOptions, Merge as _, Parts, ServedChart, TestResult, eventually,
};
use krypton_types::names;
use kube::api::PostParams;
use kube::{Api, Client};
use serde_json::{Value, json};

use super::{CONNECTED, TrapServer, editor_client, is_forbidden, wait_for_hub_renewals};

const TEAM: &str = "team";
const RIGHTS: &str = "
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata: {name: installer, namespace: team}
rules: [{apiGroups: [mesh.openkcm.io], resources: [tenants, kryptondeployments], verbs: ['*']}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {name: installer, namespace: team}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: Role, name: installer}
subjects: [{kind: ServiceAccount, name: mallory, namespace: team}]
";

/// A Secret with the labels of discovery and a kubeconfig for the lure.
fn labelled_secret(name: &str, lure: &TrapServer, member: Option<&str>) -> Secret {
    let annotations = member.map(|member| json!({names::MEMBER_NAME_ANNOTATION: member}));
    let secret = json!({
        "metadata": {
            "name": name,
            "labels": {
                names::DISCOVERY_LABEL: "true",
                names::OPEN_TO_DEPLOYMENTS_LABEL: "true",
            },
            "annotations": annotations,
        },
        "stringData": {names::KUBECONFIG_KEY: lure.kubeconfig()},
    });
    serde_json::from_value(secret).unwrap()
}

/// Creates a KryptonDeployment as the user, and returns the reason for which it has no cluster.
async fn rejection_reason(mallory: &Client, name: &str, region: Value) -> TestResult<String> {
    let spec = json!({"account": {"name": "mallory"}, "region": region});
    let object = KryptonDeployment::new(name, serde_json::from_value(spec)?);
    let all: Api<KryptonDeployment> = Api::namespaced(mallory.clone(), TEAM);
    all.create(&PostParams::default(), &object).await?;
    Ok(eventually(&format!("{name} to be rejected"), async || {
        let status = all.get(name).await?.status.unwrap_or_default();
        let resolved = condition(&status.conditions, "TargetClusterResolved");
        match resolved.filter(|resolved| resolved.status == "False") {
            Some(resolved) => Ok(Some(resolved.reason.clone())),
            None => anyhow::bail!("{:?}", status.conditions),
        }
    })
    .await?)
}

/// Returns the UID of a member's cluster. The hub records it once the member has a mode, which can be after it is
/// connected.
async fn cluster_uid(members: &Api<EdgeCluster>, name: &str) -> anyhow::Result<String> {
    eventually("the cluster's UID", async || {
        let status = members.get(name).await?.status;
        Ok(status.and_then(|status| status.cluster_uid))
    })
    .await
}

#[tokio::test]
async fn user_of_one_home_namespace_gets_no_member() -> TestResult {
    let (chart, home, edge) = tokio::try_join!(
        ServedChart::small("replicaCount: 0"),
        Cluster::start("attack-user-home", Parts::WithControllers),
        Cluster::start("attack-user-edge", Parts::ControlPlane),
    )?;
    let flags = [
        "--kubeconfig-namespaces=default,team",
        "--no-cross-namespace-refs=true",
        "--place-tenants=true",
        "--ensure-watch-crds=true",
    ];
    let options = HubOptions::new(home.kubeconfig()).args(chart.flags(&flags));
    home.create_namespace(TEAM).await?;
    let hub = Hub::start(&options)?;
    let fleet_client = FleetClient::new(&home);
    let kubeconfig = edge.kubeconfig_with_token();
    fleet_client.add_member("edge-1", &kubeconfig).await?;
    let members: Api<EdgeCluster> = Api::all(home.client());
    let source = async |name: &str| members.get(name).await.unwrap().spec.source_ref;
    for name in ["edge-1", "self-cluster"] {
        fleet_client.wait_for_member(name, &[CONNECTED]).await?;
        let spec = json!({"allowedNamespaces": ["default"]});
        fleet_client.patch_member(name, spec).await?;
    }
    let uid = async |name: &str| cluster_uid(&members, name).await;
    let before = [uid("edge-1").await?, uid("self-cluster").await?];
    let self_source = source("self-cluster").await;
    // A Secret of a second team.
    home.create_namespace("vault").await?;
    let secret = json!({"stringData": {"kubeconfig": kubeconfig}});
    let vault = fleet_client.in_namespace("vault");
    vault.apply_secret("edge-1", secret).await?;

    let mallory = editor_client(&home, TEAM).await?;
    home.apply(RIGHTS).await?;
    let trap = TrapServer::start().await;
    let secrets: Api<Secret> = Api::namespaced(mallory.clone(), TEAM);
    for secret in [
        labelled_secret("edge-1", &trap, None),
        labelled_secret("as-edge-1", &trap, Some("edge-1")),
        labelled_secret("self-cluster", &trap, None),
        labelled_secret("as-self-cluster", &trap, Some("self-cluster")),
        labelled_secret("mallory", &trap, None),
    ] {
        secrets.create(&PostParams::default(), &secret).await?;
    }
    let not_accepted = [
        ("TargetClusterResolved", "False", "NotAccepted"),
        ("Connected", "False", "NotAccepted"),
    ];
    fleet_client
        .wait_for_member("mallory", &not_accepted)
        .await?;
    fleet_client.event_message("edge-1", "NameTaken").await?;
    // The user can neither accept the member nor take over another.
    let members_as_mallory: Api<EdgeCluster> = Api::all(mallory.clone());
    let mallory_secret = json!({"kind": "Secret", "namespace": TEAM, "name": "mallory"});
    for (name, spec) in [
        ("mallory", json!({"accepted": true})),
        ("edge-1", json!({"sourceRef": mallory_secret})),
    ] {
        let result = members_as_mallory
            .merge(name, &json!({ "spec": spec }))
            .await;
        assert!(is_forbidden(&result), "{result:?}");
    }

    let secret = |name: &str, namespace: &str| {
        let secret = json!({"name": name, "namespace": namespace});
        json!({"name": "paris", "kubeconfig": {"secret": secret}})
    };
    for (name, region, expected) in [
        ("by-region", json!({"name": "edge-1"}), "SecretNotAllowed"),
        ("of-hub", secret("edge-1", "default"), "NamespaceNotAllowed"),
        ("of-vault", secret("edge-1", "vault"), "SecretNotAllowed"),
        ("of-home", secret("self-cluster", ""), "NamespaceNotAllowed"),
        (
            "of-home-too",
            secret("self-cluster", TEAM),
            "NamespaceNotAllowed",
        ),
        ("own", secret("mallory", TEAM), "NotAccepted"),
        ("own-other", secret("as-edge-1", TEAM), "NameTaken"),
    ] {
        assert_eq!(
            rejection_reason(&mallory, name, region).await?,
            expected,
            "{name}"
        );
    }
    // The member does not accept Tenants of this namespace.
    let tenants: Api<Tenant> = Api::namespaced(mallory.clone(), TEAM);
    let tenant_spec = json!({"clusterRef": {"secretName": "edge-1"}, "workspace": TEAM});
    let tenant = Tenant::new("raid", serde_json::from_value(tenant_spec)?);
    tenants.create(&PostParams::default(), &tenant).await?;
    let refused = ("Placed", "False", "NamespaceNotAllowed");
    fleet_client
        .in_namespace(TEAM)
        .wait_for("raid", &[refused])
        .await?;

    wait_for_hub_renewals(&home).await;
    assert_eq!(trap.connections(), 0);
    let rightful = SourceRef {
        kind: "Secret".to_owned(),
        namespace: Some("default".to_owned()),
        name: Some("edge-1".to_owned()),
    };
    assert_eq!(source("edge-1").await, Some(rightful));
    assert_eq!(source("self-cluster").await, self_source);
    assert_eq!([uid("edge-1").await?, uid("self-cluster").await?], before);
    for name in ["edge-1", "self-cluster"] {
        fleet_client.wait_for_member(name, &[CONNECTED]).await?;
    }
    for cluster in [&home, &edge] {
        let releases = FleetClient::new(cluster).releases().await?;
        assert!(releases.is_empty(), "{releases:?}");
    }
    assert!(!hub.log()?.contains("panicked"));
    Ok(())
}
