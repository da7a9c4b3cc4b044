//! Verifies members from ClusterProfiles, with the real CRD and the plugin that the Cluster Inventory API provides.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::ensure;
use k8s_openapi::api::{coordination::v1::Lease, core::v1::Secret};
use krypton_crds::krypton_deployment::KryptonDeployment;
use krypton_tests::{
    Cluster, ForeignCrd, Hub, HubOptions, Merge as _, Parts, STEP_DEADLINE, ServedChart,
    TestResult, Tools, assert_contains, eventually,
    fleet::{
        CONNECTED, ExpectedCondition, FleetClient, HEALTHY, HUB_NAMESPACE, RESOLVED,
        SYSTEM_NAMESPACE, condition,
    },
};
use kube::{
    Api,
    api::{DeleteParams, PostParams},
    core::{ApiResource, DynamicObject, GroupVersionKind},
};
use serde_json::{Value, json};
use tempfile::TempDir;

const CRD: &str = "clusterprofiles.multicluster.x-k8s.io";
const CREDENTIAL: &str = "edge-1-credential";
const PROVIDER: &str = "kubeconfig-secretreader";

fn unresolved(reason: &'static str) -> ExpectedCondition<'static> {
    ("TargetClusterResolved", "False", reason)
}

/// A hub's provider file, replaced like a mounted ConfigMap.
pub(crate) struct ProviderFile(TempDir);

impl ProviderFile {
    pub(crate) fn new(providers: &Value) -> Self {
        let file = Self(TempDir::with_prefix("krypton-providers-").unwrap());
        file.write(providers);
        file
    }

    fn path(&self) -> PathBuf {
        self.0.path().join("config.json")
    }

    fn write(&self, providers: &Value) {
        let next = self.0.path().join("next.json");
        fs::write(&next, json!({ "providers": providers }).to_string()).unwrap();
        fs::rename(next, self.path()).unwrap();
    }

    pub(crate) fn flag(&self) -> String {
        format!("--clusterprofile-provider-file={}", self.path().display())
    }
}

/// Returns the plugin of the Inventory API, which reads Secrets of home.
fn secret_reader(home: &Cluster) -> Value {
    provider(
        PROVIDER,
        &Tools::find().unwrap().program(PROVIDER).unwrap(),
        &[],
        &[("KUBECONFIG", home.kubeconfig().to_str().unwrap())],
    )
}

fn provider(name: &str, command: &Path, args: &[&str], env: &[(&str, &str)]) -> Value {
    let env = env
        .iter()
        .map(|(name, value)| json!({"name": name, "value": value}));
    json!({
        "name": name,
        "execConfig": {
            "apiVersion": "client.authentication.k8s.io/v1",
            "command": command,
            "args": args,
            "env": env.collect::<Vec<_>>(),
            "provideClusterInfo": true,
        },
    })
}

/// Returns a script that writes this to standard output.
pub(crate) fn credential_script(name: &str, credential: &str) -> Value {
    provider(
        name,
        Path::new("/bin/sh"),
        &["-c", "printf %s \"$ANSWER\""],
        &[("ANSWER", credential)],
    )
}

/// The ClusterProfiles of home, as their manager sees them.
struct Profiles(Api<DynamicObject>);

impl Profiles {
    /// Creates the CRD.
    async fn create_crd(home: &Cluster) -> Self {
        let (pin, file) = (
            "cluster-inventory-api-0.1.3",
            "multicluster.x-k8s.io_clusterprofiles.yaml",
        );
        let crd = ForeignCrd::read(home, pin, file).await.unwrap();
        crd.install(home).await.unwrap();
        let gvk = GroupVersionKind::gvk("multicluster.x-k8s.io", "v1alpha1", "ClusterProfile");
        let resource = ApiResource::from_gvk_with_plural(&gvk, "clusterprofiles");
        Self(Api::namespaced_with(
            home.client(),
            HUB_NAMESPACE,
            &resource,
        ))
    }

    async fn create(&self, name: &str, status: Value) {
        let profile = json!({
            "apiVersion": "multicluster.x-k8s.io/v1alpha1",
            "kind": "ClusterProfile",
            "metadata": {"name": name},
            "spec": {"displayName": name, "clusterManager": {"name": "a-manager"}},
        });
        let profile = serde_json::from_value(profile).unwrap();
        self.0
            .create(&PostParams::default(), &profile)
            .await
            .unwrap();
        self.set_status(name, status).await;
    }

    async fn set_status(&self, name: &str, status: Value) {
        self.0.merge_status(name, status).await.unwrap();
    }

    async fn delete(&self, name: &str) {
        self.0.delete(name, &DeleteParams::default()).await.unwrap();
    }
}

pub(crate) fn healthy(status: &str) -> Value {
    json!([{
        "type": "ControlPlaneHealthy",
        "status": status,
        "reason": "Probed",
        "message": "",
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }])
}

/// Returns the access to the edge cluster for the plugin that reads Secrets.
fn secret_reader_access(edge: &Cluster) -> Value {
    let kubeconfig: Value = serde_saphyr::from_str(&edge.kubeconfig_with_token()).unwrap();
    let mut cluster = kubeconfig["clusters"][0]["cluster"].clone();
    cluster["extensions"] = json!([{
        "name": "client.authentication.k8s.io/exec",
        "extension": {"name": CREDENTIAL, "key": "kubeconfig", "namespace": HUB_NAMESPACE},
    }]);
    json!([{"name": PROVIDER, "cluster": cluster}])
}

async fn write_credential(home: &FleetClient, kubeconfig: &str) {
    let secret = json!({"stringData": {"kubeconfig": kubeconfig}});
    home.apply_secret(CREDENTIAL, secret).await.unwrap();
}

/// Returns the holder of the member's Lease, its transitions, and the time of acquisition.
async fn lease_holder(edge: &FleetClient) -> (Option<String>, Option<i32>, String) {
    let leases: Api<Lease> = Api::namespaced(edge.client.clone(), SYSTEM_NAMESPACE);
    let spec = leases.get("krypton-agent").await.unwrap().spec.unwrap();
    let since = format!("{:?}", spec.acquire_time);
    (spec.holder_identity, spec.lease_transitions, since)
}

/// A KryptonDeployment that names a member's profile is deployed there. One that names a missing profile reports it.
async fn check_deployment_with_profile(home: &Cluster, at_edge: &FleetClient) {
    let all: Api<KryptonDeployment> = Api::namespaced(home.client(), "default");
    let create = async |name: &str, profile: &str| {
        let spec = json!({
            "account": {"name": "acme"},
            "region": {
                "name": "paris",
                "clusterProfileRef": {"name": profile, "namespace": HUB_NAMESPACE},
            },
        });
        let object = KryptonDeployment::new(name, serde_json::from_value(spec).unwrap());
        eventually("the KryptonDeployment to be admitted", async || {
            let params = PostParams::default();
            Ok(Some(all.create(&params, &object).await?))
        })
        .await
        .unwrap();
    };
    let wait_for_condition = async |name: &str, (type_, status, reason): ExpectedCondition<'_>| {
        let what = format!("KryptonDeployment {name} to show {type_} {status} {reason}");
        eventually(&what, async || {
            let conditions = all.get(name).await?.status.unwrap_or_default().conditions;
            let matches = condition(&conditions, type_)
                .is_some_and(|actual| actual.status == status && actual.reason == reason);
            ensure!(matches, "{conditions:?}");
            Ok(Some(()))
        })
        .await
        .unwrap();
    };
    create("lost", "edge-2").await;
    create("acme", "edge-1").await;
    wait_for_condition("acme", ("Ready", "True", "Deployed")).await;
    wait_for_condition("acme", RESOLVED).await;
    at_edge.wait_deployed("acme", "ced-acme", 1).await.unwrap();
    wait_for_condition("lost", unresolved("ClusterProfileNotFound")).await;
    wait_for_condition("lost", ("Ready", "False", "EdgeUnavailable")).await;
}

#[tokio::test]
async fn cluster_profile_member_survives_rotation_and_lost_access() -> TestResult {
    let (chart, home, edge) = tokio::try_join!(
        ServedChart::small("replicaCount: 0"),
        Cluster::start("profile-home", Parts::ControlPlane),
        Cluster::start("profile-edge", Parts::WithControllers),
    )?;
    let file = ProviderFile::new(&json!([secret_reader(&home)]));
    let options = HubOptions::new(home.kubeconfig()).args(chart.flags(&[
        "--self-cluster=false",
        "--providers=cluster-profile",
        "--ensure-watch-crds",
        &file.flag(),
    ]));
    let mut hub = Hub::start(&options)?;
    let (fleet_client, at_edge) = (FleetClient::new(&home), FleetClient::new(&edge));
    write_credential(&fleet_client, &edge.kubeconfig_with_token()).await;
    // The API doesn't exist yet.
    hub.wait_ready(STEP_DEADLINE).await?;
    let profiles = Profiles::create_crd(&home).await;
    let status =
        json!({"conditions": healthy("False"), "accessProviders": secret_reader_access(&edge)});
    profiles.create("edge-1", status).await;
    let not_ready = unresolved("ClusterProfileNotReady");
    fleet_client.wait_for_member("edge-1", &[not_ready]).await?;

    profiles
        .set_status("edge-1", json!({"conditions": healthy("True")}))
        .await;
    at_edge.install("first").await?;
    let healthy_conditions = [RESOLVED, CONNECTED, HEALTHY];
    fleet_client
        .wait_for_member("edge-1", &healthy_conditions)
        .await?;
    check_deployment_with_profile(&home, &at_edge).await;
    let (lease, releases) = (lease_holder(&at_edge).await, at_edge.releases().await?);

    // Unrelated changes of the manager cause no update.
    let noise = json!({"properties": [{"name": "zone.example.org", "value": "a"}]});
    profiles.set_status("edge-1", noise).await;
    // The API server rejects the current token from now on, without a notice to the hub.
    write_credential(&fleet_client, &edge.kubeconfig_with_next_token()).await;
    edge.rotate_token().await?;
    at_edge.install("rotated").await?;
    fleet_client
        .wait_for_member("edge-1", &healthy_conditions)
        .await?;
    assert_eq!(
        lease_holder(&at_edge).await,
        lease,
        "the proxy continues unchanged"
    );

    for (providers, problem) in [
        (json!([]), PROVIDER),
        (
            json!([provider(PROVIDER, Path::new("/bin/false"), &[], &[])]),
            "exit code 1",
        ),
    ] {
        file.write(&providers);
        let stale = [unresolved("RemoteClusterStale"), CONNECTED, HEALTHY];
        let message = fleet_client
            .member_condition_message("edge-1", &stale)
            .await?;
        assert_contains!(message, "ClusterProfile default/edge-1", problem);
        if problem == PROVIDER {
            at_edge.install("stale").await?;
        }
        file.write(&json!([secret_reader(&home)]));
        fleet_client
            .wait_for_member("edge-1", &healthy_conditions)
            .await?;
    }
    assert_eq!(
        lease_holder(&at_edge).await,
        lease,
        "the proxy continues unchanged"
    );

    profiles.delete("edge-1").await;
    let profile_not_found = unresolved("ClusterProfileNotFound");
    fleet_client
        .wait_for_member("edge-1", &[profile_not_found])
        .await?;
    let remaining = at_edge.releases().await?;
    assert_eq!(remaining.len(), 4);
    for (name, version) in releases {
        assert_eq!(remaining.get(&name), Some(&version), "{name}");
    }
    // The log doesn't contain the token.
    let log = hub.log()?;
    for kubeconfig in [
        edge.kubeconfig_with_token(),
        edge.kubeconfig_with_next_token(),
    ] {
        let kubeconfig: Value = serde_saphyr::from_str(&kubeconfig)?;
        let token = kubeconfig["users"][0]["user"]["token"].as_str().unwrap();
        assert!(!log.contains(token));
    }
    let secrets: Api<Secret> = Api::namespaced(fleet_client.client.clone(), HUB_NAMESPACE);
    assert!(secrets.get(CREDENTIAL).await.is_ok());
    Ok(())
}

pub(crate) fn with_token() -> String {
    let credential = json!({
        "apiVersion": "client.authentication.k8s.io/v1",
        "kind": "ExecCredential",
        "status": {"token": "a-token"},
    });
    credential.to_string()
}

/// Returns a certificate and a key that don't match, although each is valid.
fn mismatched() -> String {
    let pair = || {
        let key = rcgen::KeyPair::generate().unwrap();
        let params = rcgen::CertificateParams::new(Vec::new()).unwrap();
        (params.self_signed(&key).unwrap().pem(), key.serialize_pem())
    };
    let credential = json!({
        "apiVersion": "client.authentication.k8s.io/v1",
        "kind": "ExecCredential",
        "status": {"clientCertificateData": pair().0, "clientKeyData": pair().1},
    });
    credential.to_string()
}

#[tokio::test]
async fn unreachable_cluster_profile_shows_reason_on_edge_cluster() -> TestResult {
    let home = Cluster::start("reasons-home", Parts::ControlPlane).await?;
    let fleet_client = FleetClient::new(&home);
    let profiles = Profiles::create_crd(&home).await;
    let server = json!({"server": home.server()});
    let status = |access: &str| {
        json!({
            "conditions": healthy("True"),
            "accessProviders": [{"name": access, "cluster": server}],
        })
    };
    profiles.create("edge-1", status("broken")).await;
    profiles.create("edge-2", status("mismatched")).await;
    profiles.create("edge-3", status("unknown")).await;
    // A file of the hub that is allowed, but missing.
    let mut filed = status("tokens");
    filed["accessProviders"][0]["cluster"]["certificate-authority"] = json!("/nonexistent/ca.crt");
    profiles.create("edge-4", filed).await;
    let start = |extra_flags: &[&str]| {
        let options = HubOptions::new(home.kubeconfig()).args(["--self-cluster=false"]);
        Hub::start(&options.args(extra_flags.iter().copied())).unwrap()
    };
    let by_profiles = "--providers=cluster-profile";
    let reason = async |name: &str, reason: &'static str| {
        let member = fleet_client
            .wait_for_member(name, &[unresolved(reason)])
            .await
            .unwrap();
        let conditions = member.status.unwrap().conditions;
        condition(&conditions, "TargetClusterResolved")
            .unwrap()
            .message
            .clone()
    };

    let mut hub = start(&[by_profiles]);
    for name in ["edge-1", "edge-2", "edge-3", "edge-4"] {
        let message = reason(name, "AccessProviderNotConfigured").await;
        assert_contains!(message, "--clusterprofile-provider-file");
    }
    hub.stop().await?;

    let broken = ["-c", "echo the vault is sealed >&2; exit 3"];
    let file = ProviderFile::new(&json!([
        provider("broken", Path::new("/bin/sh"), &broken, &[]),
        credential_script("mismatched", &mismatched()),
        credential_script("tokens", &with_token()),
    ]));
    let mut hub = start(&[
        by_profiles,
        &file.flag(),
        "--insecure-kubeconfig-files=true",
    ]);
    let message = reason("edge-1", "AccessProviderFailed").await;
    assert_contains!(message, "exit code 3; it printed: the vault is sealed");
    let message = reason("edge-2", "AccessProviderFailed").await;
    assert_contains!(message, "client-key-data");
    let message = reason("edge-4", "RemoteClientCreationFailed").await;
    assert_contains!(message, "/nonexistent/ca.crt");
    let message = reason("edge-3", "MulticlusterDisabled").await;
    assert_contains!(message, "(unknown)", "broken, mismatched, tokens");
    hub.stop().await?;

    let mut hub = start(&["--providers=kubeconfig", &file.flag()]);
    let message = reason("edge-1", "AccessProviderNotConfigured").await;
    assert_contains!(message, "--providers");
    hub.stop().await?;

    home.kubectl(["delete", "crd", CRD]).await?;
    let mut hub = start(&[by_profiles, &file.flag()]);
    let unavailable = [unresolved("ClusterProfileUnavailable")];
    let message = fleet_client
        .member_condition_message("edge-1", &unavailable)
        .await?;
    assert_contains!(message, CRD);
    hub.stop().await?;

    // The hub rejects an invalid file at startup, before any other action.
    fs::write(file.path(), r#"{"providers": [{"name": "a"}]}"#)?;
    let mut hub = start(&[by_profiles, &file.flag()]);
    assert!(!hub.wait(STEP_DEADLINE).await?.success());
    let log = hub.log()?;
    assert_contains!(log, "$.providers[0].execConfig is missing", "config.json");
    Ok(())
}
