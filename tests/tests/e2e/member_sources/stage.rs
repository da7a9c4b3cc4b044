//! Home with its hub and one cluster, the objects that name the cluster, and their Secrets and files.

use std::{collections::BTreeMap, fs, path::Path};

use anyhow::{Result, bail};
use k8s_openapi::api::core::v1::{Namespace, Secret};
use krypton_tests::{
    Cluster, Hub, HubOptions, Merge as _, Parts, ServedChart, TestResult, eventually,
    fleet::{ExpectedCondition, FleetClient},
    kubeconfig,
    port::Port,
};
use kube::{
    Api, Client,
    api::{ApiResource, DeleteParams, DynamicObject, Patch, PatchParams, PostParams},
    core::GroupVersionKind,
};
use serde_json::{Value, json};

const SUSPENDED: ExpectedCondition<'static> = ("Healthy", "Unknown", "Suspended");
/// Namespace of the objects that name clusters.
pub(crate) const FLEET: &str = "fleet";
pub(crate) const EDGE: &str = "edge-1";
/// User agents of the hub and of Helm.
const WRITERS: [&str; 2] = ["krypton-hub", "Helm"];

/// Home with its hub, and one cluster that the sources name.
pub(crate) struct Fleet {
    _hub: Hub,
    pub(crate) home: Cluster,
    pub(crate) fleet_client: FleetClient,
    pub(crate) edge: Cluster,
    pub(crate) at_edge: FleetClient,
    _chart: ServedChart,
}

pub(crate) async fn start(name: &str, flags: &[String]) -> TestResult<Fleet> {
    let (home, edge) = (format!("{name}-home"), format!("{name}-edge"));
    let (chart, home, edge) = tokio::try_join!(
        ServedChart::small("replicaCount: 0"),
        Cluster::start(&home, Parts::ControlPlane),
        Cluster::start_audited(&edge, Parts::WithControllers),
    )?;
    let namespaces: Api<Namespace> = Api::all(home.client());
    let mut fleet = Namespace::default();
    fleet.metadata.name = Some(FLEET.to_owned());
    let params = PostParams::default();
    namespaces.create(&params, &fleet).await?;
    let options = HubOptions::new(home.kubeconfig())
        .args(chart.flags(&["--self-cluster=false"]))
        .args(flags.iter().cloned());
    let hub = Hub::start(&options)?;
    Ok(Fleet {
        fleet_client: FleetClient::new(&home),
        at_edge: FleetClient::new(&edge),
        _hub: hub,
        home,
        edge,
        _chart: chart,
    })
}

impl Fleet {
    /// Installs a Tenant on the edge cluster, which shows that an actor reconciles it.
    pub(crate) async fn install(&self, tenant: &str) {
        let fleet_client = &self.at_edge;
        fleet_client.install(tenant).await.unwrap();
    }

    /// Waits until the member is suspended for this reason and its Lease has no holder. The releases must be unchanged,
    /// and nothing may have failed.
    pub(crate) async fn wait_suspended(&self, reason: &str) -> TestResult {
        let what = format!("{EDGE} to be suspended, as it {reason}");
        eventually(&what, async || {
            let message = self.condition_message(SUSPENDED).await?;
            let holder = self.at_edge.holder().await?;
            if !message.contains(reason) || !holder.is_empty() {
                bail!("{message}; the Lease is held by {holder:?}");
            }
            Ok(Some(()))
        })
        .await?;
        let status = self.at_edge.wait_ready("before").await?.status.unwrap();
        assert_eq!(status.phase.as_deref(), Some("Ready"), "{reason}");
        Ok(())
    }

    /// Returns the message of the member's condition when it is as expected.
    pub(crate) async fn condition_message(
        &self,
        expected: ExpectedCondition<'_>,
    ) -> Result<String> {
        self.fleet_client
            .member_condition_message(EDGE, &[expected])
            .await
    }

    /// Returns the hub's and Helm's changes on the edge cluster.
    async fn hub_changes(&self) -> Vec<String> {
        let mut requests = self.edge.audited_requests().await.unwrap();
        requests.retain(|request| {
            let reads = ["get", "list", "watch"].contains(&request.verb.as_str());
            !reads && WRITERS.iter().any(|name| request.user_agent.contains(name))
        });
        let lines = requests.iter().map(|request| format!("{request:?}"));
        lines.collect()
    }

    /// Returns the hub's requests to the edge cluster.
    pub(crate) async fn hub_requests(&self) -> Vec<String> {
        let mut requests = self.edge.audited_requests().await.unwrap();
        requests.retain(|request| request.user_agent.contains("krypton-hub"));
        let lines = requests.iter().map(|request| format!("{request:?}"));
        lines.collect()
    }

    /// Verifies that the hub writes nothing while it is alive, although there is work.
    pub(crate) async fn check_no_changes(&self, pending_work: &str) {
        let before = self.hub_changes().await;
        assert!(!before.is_empty(), "it wrote before");
        let tenant = self.at_edge.create(pending_work, json!({}));
        tenant.await.unwrap();
        // Two renewals are 15 seconds apart.
        for _ in 0..2 {
            self.wait_for_hub_renewals().await;
        }
        let after = self.hub_changes().await;
        assert_eq!(after[before.len()..], [] as [String; 0]);
    }

    /// Waits until the hub has renewed its Lease on home.
    pub(crate) async fn wait_for_hub_renewals(&self) {
        self.fleet_client.wait_for_hub_renewal().await.unwrap();
    }
}

/// One object in the fleet's namespace.
pub(crate) struct SourceObject {
    api: Api<DynamicObject>,
    resource: ApiResource,
    name: String,
}

impl SourceObject {
    pub(crate) fn cluster(home: &Cluster, version: &str, name: &str) -> Self {
        Self::new(home, ["cluster.x-k8s.io", version, "Cluster"], name)
    }

    pub(crate) fn control_plane(home: &Cluster, name: &str) -> Self {
        let kind = ["kamaji.clastix.io", "v1alpha1", "TenantControlPlane"];
        Self::new(home, kind, name)
    }

    pub(crate) fn profile(home: &Cluster, name: &str) -> Self {
        let kind = ["multicluster.x-k8s.io", "v1alpha1", "ClusterProfile"];
        Self::new(home, kind, name)
    }

    fn new(home: &Cluster, [group, version, kind]: [&str; 3], name: &str) -> Self {
        let resource = ApiResource::from_gvk(&GroupVersionKind::gvk(group, version, kind));
        Self {
            api: Api::namespaced_with(home.client(), FLEET, &resource),
            resource,
            name: name.to_owned(),
        }
    }

    /// Creates the object with the fields that its CRD requires.
    pub(crate) async fn create(&self) {
        let spec = match self.resource.kind.as_str() {
            "Cluster" => json!({"controlPlaneEndpoint": {"host": "edge", "port": 6443}}),
            "ClusterProfile" => {
                json!({"displayName": self.name, "clusterManager": {"name": "a-manager"}})
            }
            _ => json!({
                "controlPlane": {"service": {"serviceType": "ClusterIP"}},
                "kubernetes": {"version": "v1.31.0", "kubelet": {"cgroupfs": "systemd"}},
            }),
        };
        let object = DynamicObject::new(&self.name, &self.resource).data(json!({ "spec": spec }));
        let params = PostParams::default();
        eventually("the object to be accepted", async || {
            Ok(Some(self.api.create(&params, &object).await?))
        })
        .await
        .unwrap();
    }

    pub(crate) async fn merge(&self, patch: Value) {
        self.api.merge(&self.name, &patch).await.unwrap();
    }

    pub(crate) async fn merge_status(&self, status: Value) {
        self.api.merge_status(&self.name, status).await.unwrap();
    }

    pub(crate) async fn delete(&self) {
        let params = DeleteParams::default();
        self.api.delete(&self.name, &params).await.unwrap();
    }
}

pub(crate) async fn apply_secret(client: &Client, namespace: &str, secret: Value) {
    let secrets: Api<Secret> = Api::namespaced(client.clone(), namespace);
    let name = secret["metadata"]["name"].as_str().unwrap().to_owned();
    let params = PatchParams::apply("a-person").force();
    let patch = Patch::Apply(secret);
    secrets.patch(&name, &params, &patch).await.unwrap();
}

pub(crate) fn secret(name: &str, type_: &str, label: (&str, &str), data: &[(&str, &str)]) -> Value {
    let data: BTreeMap<&str, &str> = data.iter().copied().collect();
    json!({
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": name, "labels": {label.0: label.1}},
        "type": type_,
        "stringData": data,
    })
}

/// Returns a kubeconfig for an API server that refuses every connection.
pub(crate) fn unreachable_kubeconfig(port: &Port) -> String {
    kubeconfig::for_server(&format!("https://{}", port.address()))
}

/// Adds the context of the other kubeconfig under this name.
pub(crate) fn with_context(kubeconfig: &str, other: &str, name: &str) -> Result<String> {
    let mut kubeconfig: Value = serde_saphyr::from_str(kubeconfig)?;
    let mut other: Value = serde_json::from_str(other)?;
    other["contexts"][0]["name"] = name.into();
    for list in ["clusters", "contexts", "users"] {
        let entries = kubeconfig[list].as_array_mut();
        entries.unwrap().push(other[list][0].clone());
    }
    Ok(kubeconfig.to_string())
}

/// Replaces the content atomically.
pub(crate) fn write_file(folder: &Path, name: &str, content: &str) {
    let next = folder.join(".next");
    fs::write(&next, content).unwrap();
    fs::rename(next, folder.join(name)).unwrap();
}

pub(crate) fn flags(provider: &str) -> Vec<String> {
    vec![
        format!("--providers={provider}"),
        format!("--cluster-namespaces={FLEET}"),
        format!("--accept-namespaces={FLEET}"),
    ]
}
