//! Shows that Krypton doesn't act on a stored release that a user with write access to Secrets has changed.

use k8s_openapi::api::core::v1::Secret;
use krypton_helm::releases::record::RECORD_LABEL;
use krypton_tests::{
    Mode, Pair, Scenario, ServedChart, TestResult, assert_contains, by_agent, eventually,
    fleet::FleetClient, kubectl_krypton, release_payload::rewrite,
};
use kube::{
    Api, ResourceExt,
    api::{DeleteParams, ListParams, PostParams},
};
use serde_json::{Value, json};

const SYSTEM_NAMESPACE: &str = "krypton-system";
const BINDING: &str = "
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: takeover}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: cluster-admin}
subjects: [{apiGroup: rbac.authorization.k8s.io, kind: User, name: mallory}]
";
pub(crate) const VICTIM: &str = "
---
apiVersion: v1
kind: Namespace
metadata: {name: victim}
";

by_agent!(tampered_release_is_not_healed_from);

struct Attack {
    chart: ServedChart,
    pair: Pair,
    fleet_client: FleetClient,
    tenant: String,
    release: String,
}

impl Attack {
    async fn start(name: &str, mode: Mode, flags: &[&str]) -> TestResult<Self> {
        let scenario = Scenario::new(name, mode).flags(flags);
        let values = "{replicaCount: 0, message: v1}";
        let (pair, chart) = scenario.values(values).start().await?;
        pair.cluster().create_namespace("victim").await?;
        let mut attack = Self {
            fleet_client: pair.fleet_client(),
            chart,
            pair,
            tenant: String::new(),
            release: String::new(),
        };
        attack.install("acme").await?;
        Ok(attack)
    }

    /// Installs the Tenant that is attacked from now on.
    async fn install(&mut self, tenant: &str) -> TestResult {
        self.fleet_client.install(tenant).await?;
        self.select(tenant);
        Ok(())
    }

    fn select(&mut self, tenant: &str) {
        self.release = self.pair.release(tenant);
        self.tenant = tenant.to_owned();
    }

    fn secret_name(&self, revision: u32) -> String {
        format!("sh.helm.release.v1.{}.v{revision}", self.release)
    }

    fn secrets(&self, namespace: &str) -> Api<Secret> {
        Api::namespaced(self.fleet_client.client.clone(), namespace)
    }

    async fn tamper(&self, revision: u32, change: impl Fn(&mut Value)) {
        let secrets = self.secrets(&self.tenant);
        tamper(&secrets, &self.secret_name(revision), change).await;
    }

    /// Adds a revision that Helm never wrote.
    async fn forge(&self, revision: u32, change: impl Fn(&mut Value)) -> TestResult {
        let secrets = self.secrets(&self.tenant);
        let secret = secrets.get(&self.secret_name(revision - 1)).await?;
        let mut forged = forged(&secret, &self.release, revision, change)?;
        let labels = forged.labels_mut();
        labels.insert("mesh.openkcm.io/run".to_owned(), "upgrade-0000".to_owned());
        let params = PostParams::default();
        secrets.create(&params, &forged).await?;
        Ok(())
    }

    async fn wait_until_tampered(&self) {
        let error = self.pair.condition("ClusterError");
        self.fleet_client
            .wait_for(&self.tenant, &[(&error, "True", "ReleaseTampered")])
            .await
            .unwrap();
    }

    async fn exists(&self, kind: &str, name: &str) -> bool {
        let object = self.pair.cluster();
        let object = object.kubectl(["get", kind, name, "--ignore-not-found"]);
        !object.await.unwrap().is_empty()
    }

    async fn check_no_takeover(&self) {
        assert!(!self.exists("clusterrolebinding", "takeover").await);
        assert!(self.exists("namespace", "victim").await);
    }

    async fn delete_secret(&self, revision: u32) {
        let params = DeleteParams::default();
        let name = self.secret_name(revision);
        self.secrets(&self.tenant)
            .delete(&name, &params)
            .await
            .unwrap();
    }
}

/// Rewrites a stored release, as a user of the workspace can.
pub(crate) async fn tamper(secrets: &Api<Secret>, name: &str, change: impl Fn(&mut Value)) {
    eventually("the release Secret to be changed", async || {
        let mut secret = secrets.get(name).await?;
        rewrite(&mut secret, &change)?;
        let params = PostParams::default();
        Ok(Some(secrets.replace(name, &params, &secret).await?))
    })
    .await
    .unwrap();
}

/// Returns a changed copy of a stored revision with this number, which can be created.
pub(crate) fn forged(
    secret: &Secret,
    release: &str,
    revision: u32,
    change: impl Fn(&mut Value),
) -> anyhow::Result<Secret> {
    let mut forged = secret.clone();
    rewrite(&mut forged, &|stored: &mut Value| {
        stored["version"] = json!(revision);
        change(stored);
    })?;
    let labels = forged.labels_mut();
    labels.insert("version".to_owned(), revision.to_string());
    let metadata = &mut forged.metadata;
    metadata.name = Some(format!("sh.helm.release.v1.{release}.v{revision}"));
    (metadata.resource_version, metadata.uid) = (None, None);
    Ok(forged)
}

pub(crate) fn append(release: &mut Value, document: &str) {
    let manifest = release["manifest"].as_str().unwrap_or_default().to_owned();
    release["manifest"] = json!(manifest + document);
}

fn delete_hook(release: &mut Value) {
    release["hooks"] = json!([{
        "name": "takeover", "kind": "ClusterRoleBinding", "path": "small/templates/hook.yaml",
        "manifest": BINDING.trim_start().trim_start_matches("---"), "events": ["pre-delete"],
        "last_run": {"phase": ""},
    }]);
}

async fn tampered_release_is_not_healed_from(mode: Mode) -> TestResult {
    let flags = ["--drift=heal", "--drift-interval=1s"];
    let attack = Attack::start("tamper-heal", mode, &flags).await?;
    attack.tamper(1, |release| append(release, BINDING)).await;
    attack.wait_until_tampered().await;
    // Drift of the other Tenant is corrected in the same time, so this one's would be, too.
    let fleet_client = &attack.fleet_client;
    fleet_client.install("beta").await?;
    for _ in 0..2 {
        let name = attack.pair.release("beta");
        let service = ["delete", "configmap", &name, "--namespace=beta"];
        attack.pair.cluster().kubectl(service).await?;
        eventually("beta to be healed", async || {
            let args = ["get", "configmap", &name, "--namespace=beta"];
            Ok(Some(attack.pair.cluster().kubectl(args).await?))
        })
        .await?;
    }
    attack.check_no_takeover().await;

    // After the release is rendered from the chart again, it is correct.
    attack.delete_secret(1).await;
    fleet_client.wait_ready("acme").await?;
    fleet_client
        .wait_deployed("acme", &attack.release, 1)
        .await?;
    attack.check_no_takeover().await;
    Ok(())
}

#[tokio::test]
async fn tampered_release_is_left_as_it_is() -> TestResult {
    let mut attack = Attack::start("tamper", Mode::SelfCluster, &[]).await?;
    lost_record_renders_the_chart_again(&mut attack).await?;
    attack.install("restart").await?;
    tampered_release_stays_tampered_after_a_restart(&mut attack).await?;
    attack.install("hooks").await?;
    tampered_release_is_not_uninstalled_with_its_hooks(&attack).await?;
    attack.install("forged").await?;
    forged_revision_is_uninstalled_without_its_hooks(&mut attack).await?;
    upgrade_deletes_nothing_that_changed_revisions_list(&mut attack).await
}

async fn tampered_release_stays_tampered_after_a_restart(attack: &mut Attack) -> TestResult {
    attack.tamper(1, |release| append(release, BINDING)).await;
    attack.wait_until_tampered().await;
    attack.pair.stop().await?;
    attack.pair.start_actor_again()?;
    let fleet_client = attack.fleet_client.clone();
    fleet_client.install("beta").await?;
    attack.wait_until_tampered().await;

    let cluster = attack.pair.cluster();
    let accept = ["accept-release", &attack.release, "-n", &attack.tenant];
    let output = kubectl_krypton(cluster, &accept).await?;
    assert_contains!(output, "revision 1 of release");
    let resync = ["resync", "tenant", &attack.tenant, "-n", "default"];
    kubectl_krypton(cluster, &resync).await?;
    fleet_client.wait_ready(&attack.tenant).await?;
    attack.check_no_takeover().await;
    Ok(())
}

async fn tampered_release_is_not_uninstalled_with_its_hooks(attack: &Attack) -> TestResult {
    attack.tamper(1, delete_hook).await;
    attack.wait_until_tampered().await;
    attack.fleet_client.delete(&attack.tenant).await?;
    attack.wait_until_tampered().await;
    attack.check_no_takeover().await;
    attack.delete_secret(1).await;
    attack.fleet_client.wait_gone(&attack.tenant).await?;
    attack.check_no_takeover().await;
    Ok(())
}

async fn forged_revision_is_uninstalled_without_its_hooks(attack: &mut Attack) -> TestResult {
    // A running actor would upgrade the release before the deletion.
    attack.pair.stop().await?;
    attack.forge(2, delete_hook).await?;
    attack.fleet_client.delete(&attack.tenant).await?;
    attack.pair.start_actor_again()?;
    let (fleet_client, tenant) = (&attack.fleet_client, &attack.tenant);
    let message = fleet_client.event_message(tenant, "HooksSkipped").await;
    assert_contains!(message?, "revision 2");
    fleet_client.wait_gone(tenant).await?;
    attack.check_no_takeover().await;
    Ok(())
}

async fn upgrade_deletes_nothing_that_changed_revisions_list(attack: &mut Attack) -> TestResult {
    let fleet_client = attack.fleet_client.clone();
    attack.install("upgraded").await?;
    attack.tamper(1, |release| append(release, VICTIM)).await;
    attack.wait_until_tampered().await;
    attack.install("listed").await?;
    attack.forge(2, |release| append(release, VICTIM)).await?;
    attack.chart.write("{replicaCount: 0, message: v2}")?;
    attack.wait_until_tampered().await;
    attack.check_no_takeover().await;
    attack.delete_secret(2).await;
    fleet_client
        .wait_deployed("listed", &attack.release, 2)
        .await?;
    fleet_client.wait_ready("listed").await?;

    let upgrading = "HelmUpgradeStart";
    fleet_client.event_message("upgraded", upgrading).await?;
    attack.select("upgraded");
    attack.wait_until_tampered().await;
    fleet_client.wait_for_renewal().await?;
    attack.check_no_takeover().await;
    Ok(())
}

async fn lost_record_renders_the_chart_again(attack: &mut Attack) -> TestResult {
    attack.pair.stop().await?;
    let system = attack.secrets(SYSTEM_NAMESPACE);
    let records = async || {
        let (key, value) = RECORD_LABEL;
        let params = ListParams::default().labels(&format!("{key}={value}"));
        let all = system.list_metadata(&params).await.unwrap().items;
        all.iter().map(ResourceExt::name_any).collect::<Vec<_>>()
    };
    let before = records().await;
    assert_eq!(before.len(), 1, "{before:?}");
    system.delete(&before[0], &DeleteParams::default()).await?;
    attack.pair.start_actor_again()?;
    let fleet_client = &attack.fleet_client;
    fleet_client
        .wait_deployed(&attack.tenant, &attack.release, 2)
        .await?;
    fleet_client.wait_ready(&attack.tenant).await?;
    assert_eq!(records().await, before);
    Ok(())
}
