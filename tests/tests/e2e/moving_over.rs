//! Verifies the migration from the Go operator. Krypton adopts complete releases unchanged, repairs incomplete or
//! misplaced ones, and ignores objects that only look like the operator's.

mod astray;
mod crds;
mod migrate;

use std::collections::BTreeMap;

use anyhow::Result;
use k8s_openapi::api::core::v1::{ConfigMap, Secret};
use krypton_tests::{
    Agent, AgentOptions, ChartSource, Mode, Original, Pair, Parts, ServedChart, TestResult,
    by_agent, eventually,
    fleet::{ALL_READY, FleetClient},
    original::apply_crd,
};
use krypton_types::names;
use kube::{Api, ResourceExt, api::ListParams};
use serde_json::json;

const HANDWRITTEN_CRD: &str = "tenant-g1-by-hand.yaml";
/// Only one template sets a namespace.
const TEMPLATE: &str = r#"
apiVersion: v1
kind: ConfigMap
metadata: {name: {{ .Release.Name }}}
data: {message: {{ .Values.message | quote }}}
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: {{ .Release.Name }}}
spec:
  replicas: {{ .Values.replicaCount }}
  selector: {matchLabels: {app: {{ .Release.Name }}}}
  template:
    metadata: {labels: {app: {{ .Release.Name }}}}
    spec: {containers: [{name: main, image: registry.example.org/main:1}]}
---
apiVersion: v1
kind: Service
metadata: {name: {{ .Release.Name }}}
spec: {selector: {app: {{ .Release.Name }}}, ports: [{port: 80}]}
---
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: {{ .Release.Name }}-data}
spec: {accessModes: [ReadWriteOnce], resources: {requests: {storage: 1Gi}}}
---
apiVersion: v1
kind: ConfigMap
metadata: {name: {{ .Release.Name }}-kept, annotations: {helm.sh/resource-policy: keep}}
---
apiVersion: v1
kind: ConfigMap
metadata: {name: {{ .Release.Name }}-theirs}
---
apiVersion: v1
kind: ConfigMap
metadata: {name: {{ .Release.Name }}-placed, namespace: {{ .Release.Namespace }}}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {name: {{ .Release.Name }}}
"#;

by_agent!(
    long_history_is_adopted_cheaply_and_then_pruned,
    unfinished_tenants_are_repaired_and_deletions_completed
);

/// Serves the chart `plain` with its own values.
pub(crate) async fn plain_chart() -> TestResult<ServedChart> {
    let folder = tempfile::tempdir()?;
    let files = [
        ("values.yaml", "{replicaCount: 0, message: first}\n"),
        ("templates/all.yaml", TEMPLATE),
    ];
    let chart = ChartSource::write(folder.path(), "plain", &files)?;
    Ok(ServedChart::new(chart, ("plain", "1.0.0"), Some("{}")).await?)
}

pub(crate) fn original<'a>(pair: &'a Pair, chart: &'a ServedChart) -> Original<'a> {
    Original {
        cluster: pair.cluster(),
        repository: &chart.repository,
        chart: "plain",
        version: "1.0.0",
        member: pair.name(),
    }
}

/// Returns the UIDs of the ConfigMaps in a namespace that Helm created, except terminating ones.
pub(crate) async fn config_maps(
    fleet_client: &FleetClient,
    namespace: &str,
) -> Result<BTreeMap<String, String>> {
    let api: Api<ConfigMap> = Api::namespaced(fleet_client.client.clone(), namespace);
    let objects = api.list(&ListParams::default()).await?.into_iter();
    let ours = objects.filter(|map| {
        map.metadata.deletion_timestamp.is_none() && map.name_any() != "kube-root-ca.crt"
    });
    let uids = ours.map(|map| (map.name_any(), map.uid().unwrap_or_default()));
    Ok(uids
        .filter(|(name, _)| name.starts_with("tenant-"))
        .collect())
}

pub(crate) async fn check_no_helm_run(pair: &mut Pair) {
    let log = pair.actor().unwrap().log().unwrap();
    assert!(!log.contains("running helm"), "{log}");
}

/// Waits until Krypton has signed this revision of a release in namespace `acme-ws`.
pub(crate) async fn wait_until_signed(
    fleet_client: &FleetClient,
    release: &str,
    revision: u32,
) -> Result<()> {
    let secrets: Api<Secret> = Api::namespaced(fleet_client.client.clone(), "acme-ws");
    let name = format!("sh.helm.release.v1.{release}.v{revision}");
    eventually(&format!("{name} to be signed"), async || {
        let secret = secrets.get(&name).await?;
        let signed = secret.labels().contains_key("mesh.openkcm.io/tenant-uid");
        Ok(signed.then_some(()))
    })
    .await
}

async fn unfinished_tenants_are_repaired_and_deletions_completed(mode: Mode) -> TestResult {
    let chart = plain_chart().await?;
    let mut pair = Pair::start("unfinished", mode, Parts::WithControllers).await?;
    let fleet_client = pair.fleet_client();
    let [dead, wrong, doomed, spared] =
        ["dead", "wrong", "doomed", "spared"].map(|name| pair.release(name));
    {
        let original = original(&pair, &chart);
        apply_crd(original.cluster, HANDWRITTEN_CRD).await?;
        let spec = |name: &str| json!({"workspace": format!("{name}-ws")});
        // The operator was killed during an installation, and its successor reported success.
        original
            .kill_during_install(&dead, "dead-ws", &["--set=replicaCount=1"])
            .await?;
        let healthy = original.status(None);
        original
            .tenant("dead", spec("dead"), healthy.clone())
            .await?;
        // The installation failed once, and the Tenant has stayed in error.
        original.install(&wrong, "wrong-ws").await?;
        let error = original.status(Some("InstallFailed"));
        original.tenant("wrong", spec("wrong"), error).await?;
        // One Tenant in the middle of its deletion, and one that a backup of this state restored.
        for (name, release) in [("doomed", &doomed), ("spared", &spared)] {
            let workspace = format!("{name}-ws");
            original.install(release, &workspace).await?;
            original.tenant(name, spec(name), healthy.clone()).await?;
            let deleting = "mesh.openkcm.io/deleting";
            fleet_client.annotate(name, deleting, "true").await?;
        }
    }
    fleet_client.delete("doomed").await?;
    let before = fleet_client.releases().await?;
    let maps_before = config_maps(&fleet_client, "spared-ws").await?;

    // Krypton takes over a foreign lock after three times this timeout and a minute.
    let short = ["--helm-timeout=5s"];
    pair.start_hub_and_join(chart.flags(&short)).await?;
    let mut agent = None;
    if mode == Mode::Agent {
        pair.actor()?.stop().await?;
        let options = AgentOptions::new(pair.cluster().kubeconfig()).args(short);
        agent = Some(Agent::start(&options)?);
    }
    let [ready, error, progress] =
        ["ClusterReady", "ClusterError", "ClusterProgress"].map(|kind| pair.condition(kind));

    let adopted = [
        ALL_READY,
        (ready.as_str(), "True", "Installed"),
        (error.as_str(), "False", "NoError"),
    ];
    let recovered = fleet_client.wait_for("wrong", &adopted).await?;
    assert_eq!(recovered.status.unwrap().phase.as_deref(), Some("Ready"));
    let locked = (progress.as_str(), "True", "Locked");
    fleet_client.wait_for("dead", &[locked]).await?;
    let spared_tenant = fleet_client.wait_for("spared", &adopted).await?;
    assert!(
        spared_tenant
            .annotations()
            .contains_key("mesh.openkcm.io/deleting")
    );
    assert_eq!(spared_tenant.finalizers(), [names::TENANT_FINALIZER]);
    fleet_client.wait_gone("doomed").await?;
    assert_eq!(fleet_client.revisions("doomed-ws", &doomed).await?, []);

    fleet_client.wait_deployed("dead-ws", &dead, 2).await?;
    fleet_client.wait_ready("dead").await?;
    let after = fleet_client.releases().await?;
    for release in [&wrong, &spared] {
        let name = format!("sh.helm.release.v1.{release}.v1");
        assert_eq!(after.get(&name), before.get(&name), "{name} is unchanged");
    }
    assert_eq!(config_maps(&fleet_client, "spared-ws").await?, maps_before);
    let actor = match &mut agent {
        Some(agent) => agent,
        None => pair.actor()?,
    };
    let log = actor.log()?;
    for line in log.lines().filter(|line| line.contains("running helm")) {
        assert!(line.contains(&dead) || line.contains(&doomed), "{line}");
    }
    Ok(())
}

/// Returns the numbers of GET and LIST requests for Secrets, and of DELETE requests.
async fn count_reads_and_deletes(pair: &Pair) -> [u64; 2] {
    let requests = pair.cluster().requests().await.unwrap();
    let count = |verb: &str| {
        let key = (verb.to_owned(), "secrets".to_owned());
        requests.get(&key).copied().unwrap_or_default()
    };
    [count("GET") + count("LIST"), count("DELETE")]
}

async fn long_history_is_adopted_cheaply_and_then_pruned(mode: Mode) -> TestResult {
    const REVISIONS: u32 = 300;
    let chart = plain_chart().await?;
    let mut pair = Pair::start("piled", mode, Parts::WithControllers).await?;
    let fleet_client = pair.fleet_client();
    let release = pair.release("acme");
    {
        let original = original(&pair, &chart);
        apply_crd(original.cluster, HANDWRITTEN_CRD).await?;
        original.install(&release, "acme-ws").await?;
        original
            .create_revisions(&release, "acme-ws", REVISIONS)
            .await?;
        let spec = json!({"workspace": "acme-ws"});
        let status = original.status(None);
        original.tenant("acme", spec, status).await?;
    }
    let before = fleet_client.releases().await?;
    assert_eq!(before.len(), REVISIONS as usize);
    let [read, _] = count_reads_and_deletes(&pair).await;
    pair.start_hub_and_join(chart.flags(&[])).await?;
    fleet_client.wait_ready("acme").await?;
    check_no_helm_run(&mut pair).await;
    let [adopted, deleted] = count_reads_and_deletes(&pair).await;
    assert!(adopted - read < 20, "{} reads of Secrets", adopted - read);
    assert_eq!(fleet_client.releases().await?, before);

    chart.write("message: second")?;
    fleet_client
        .wait_deployed("acme-ws", &release, REVISIONS + 1)
        .await?;
    fleet_client.wait_ready("acme").await?;
    let remaining: Vec<u32> = fleet_client
        .revisions("acme-ws", &release)
        .await?
        .into_iter()
        .map(|(number, _)| number)
        .collect();
    assert_eq!(remaining, [REVISIONS - 1, REVISIONS, REVISIONS + 1]);
    let [upgraded, trimmed] = count_reads_and_deletes(&pair).await;
    assert_eq!(trimmed - deleted, u64::from(REVISIONS - 2));
    // Helm reads each revision that it deletes. Krypton reads all once, in pages. A slow run is polled more often.
    assert!(
        upgraded - adopted < 2 * u64::from(REVISIONS),
        "{} reads of Secrets",
        upgraded - adopted
    );
    wait_until_signed(&fleet_client, &release, REVISIONS).await?;
    fleet_client.remove("acme").await?;
    assert!(fleet_client.releases().await?.is_empty());
    Ok(())
}
