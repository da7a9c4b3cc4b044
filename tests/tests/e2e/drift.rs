//! Verifies drift detection: foreign changes of a release are reported or corrected, and allowed changes stay.

use anyhow::{Result, bail};
use k8s_openapi::{
    api::{
        apps::v1::Deployment,
        core::v1::{ConfigMap, Service},
    },
    apimachinery::pkg::apis::meta::v1::Condition,
};
use krypton_tests::{
    Cluster, Mode, Pair, Parts, Scenario, ServedChart, TestResult, assert_contains, by_agent,
    eventually,
    fleet::{ALL_READY, FleetClient},
};
use krypton_types::names;
use kube::{
    Api, Client,
    api::{ApiResource, DeleteParams, DynamicObject},
};
use serde_json::{Value, json};

const OTHER_IMAGE: &str = "krypton.test/other:9";
const OWN_IMAGE: &str = "krypton.test/small:1";
const IMAGE: &str = "/spec/template/spec/containers/0/image";

by_agent!(
    adopted_release_is_healed_after_its_own_revision,
    drift_is_corrected_without_revision_sparing_foreign_fields,
    drift_is_reported_but_ignored_fields_are_skipped
);

/// A Tenant's release of the chart. The workspace has the Tenant's name.
struct Release<'a> {
    cluster: &'a Cluster,
    client: Client,
    namespace: &'a str,
    name: String,
}

impl<'a> Release<'a> {
    fn new(pair: &'a Pair, tenant: &'a str) -> Self {
        Self {
            cluster: pair.cluster(),
            client: pair.cluster().client(),
            namespace: tenant,
            name: pair.release(tenant),
        }
    }

    async fn kubectl(&self, args: &[&str]) -> Result<String> {
        let namespace = ["--namespace", self.namespace];
        let args = args.iter().chain(&namespace).copied();
        self.cluster.kubectl(args).await
    }

    fn api(&self, kind: &str) -> Api<DynamicObject> {
        let resource = match kind {
            "configmap" => ApiResource::erase::<ConfigMap>(&()),
            "deployment" => ApiResource::erase::<Deployment>(&()),
            "service" => ApiResource::erase::<Service>(&()),
            other => panic!("{other}"),
        };
        Api::namespaced_with(self.client.clone(), self.namespace, &resource)
    }

    /// Returns the value at this JSON pointer, or an empty string.
    async fn field(&self, kind: &str, pointer: &str) -> Result<String> {
        let object = self.api(kind).get(&self.name).await?;
        let object = serde_json::to_value(object)?;
        Ok(match object.pointer(pointer) {
            Some(Value::String(text)) => text.clone(),
            Some(other) => other.to_string(),
            None => String::new(),
        })
    }

    async fn wait_for_field(&self, kind: &str, pointer: &str, expected: &str) {
        let what = format!("{pointer} of {kind} {} to be {expected}", self.name);
        eventually(&what, async || {
            match self.field(kind, pointer).await?.as_str() {
                found if found == expected => Ok(Some(())),
                found => bail!("found {found:?}"),
            }
        })
        .await
        .unwrap();
    }

    async fn change_image(&self) {
        let deployment = format!("deployment/{}", self.name);
        let image = format!("main={OTHER_IMAGE}");
        self.kubectl(&["set", "image", &deployment, &image])
            .await
            .unwrap();
    }

    async fn delete(&self, kind: &str) {
        let params = DeleteParams::default();
        self.api(kind).delete(&self.name, &params).await.unwrap();
    }

    /// Waits for complete drift checks: two corrections of the last object, because the check between them covers all
    /// others.
    async fn wait_for_drift_checks(&self) {
        for _ in 0..2 {
            self.delete("service").await;
            self.wait_for_field("service", "/spec/ports/0/name", "http")
                .await;
        }
    }

    async fn exists(&self, kind: &str) -> bool {
        self.api(kind).get_opt(&self.name).await.unwrap().is_some()
    }
}

/// Waits until the Tenant's condition about the member satisfies the predicate.
async fn wait_for_condition(
    fleet_client: &FleetClient,
    tenant: &str,
    kind: &str,
    is_expected: impl Fn(&str) -> bool,
) {
    let is_expected = |found: &Condition| found.status == "True" && is_expected(&found.message);
    let waiting = fleet_client.wait_for_condition(tenant, kind, is_expected);
    waiting.await.unwrap();
}

async fn count_requests(cluster: &Cluster, verb: &str, resource: &str) -> Result<u64> {
    let counted = cluster.requests().await?;
    let key = (verb.to_owned(), resource.to_owned());
    Ok(counted.get(&key).copied().unwrap_or_default())
}

async fn start_pair(name: &str, mode: Mode, drift: &str) -> TestResult<(Pair, ServedChart)> {
    let scenario = Scenario::new(name, mode).parts(Parts::WithPods);
    let flags = [drift, "--drift-interval=1s"];
    let started = scenario.values("message: hello").flags(&flags).start();
    Ok(started.await?)
}

async fn drift_is_corrected_without_revision_sparing_foreign_fields(mode: Mode) -> TestResult {
    let (pair, chart) = start_pair("drift-heal", mode, "--drift=heal").await?;
    let fleet_client = pair.fleet_client();
    for tenant in ["acme", "beta"] {
        fleet_client.install(tenant).await?;
    }
    let [acme, beta] = ["acme", "beta"].map(|tenant| Release::new(&pair, tenant));

    acme.change_image().await;
    acme.wait_for_field("deployment", IMAGE, OWN_IMAGE).await;
    let message = fleet_client.event_message("acme", "DriftHealed").await?;
    let field = "/spec/template/spec/containers/0/image";
    assert_contains!(message, field, "kubectl");
    acme.delete("configmap").await;
    acme.wait_for_field("configmap", "/data/message", "hello")
        .await;
    let marks = "/metadata/annotations/meta.helm.sh~1release-name";
    acme.wait_for_field("configmap", marks, &acme.name).await;

    // A field that Helm doesn't set is not owned by Helm.
    let theirs = r#"{"metadata": {"labels": {"theirs": "yes"}}, "data": {"theirs": "yes"}}"#;
    acme.kubectl(&["patch", "configmap", &acme.name, "--patch", theirs])
        .await?;
    // The autoscaler scales up to the minimum, even without metrics.
    let scaler = ["autoscale", "deployment", &acme.name, "--min=2", "--max=3"];
    acme.kubectl(&scaler).await?;
    acme.wait_for_field("deployment", "/spec/replicas", "2")
        .await;
    acme.wait_for_drift_checks().await;
    // Correcting a different field keeps the number.
    acme.change_image().await;
    acme.wait_for_field("deployment", IMAGE, OWN_IMAGE).await;
    let found = async |kind: &str, pointer: &str| acme.field(kind, pointer).await.unwrap();
    assert_eq!(found("deployment", "/spec/replicas").await, "2");
    assert_eq!(found("configmap", "/data/theirs").await, "yes");
    assert_eq!(found("configmap", "/metadata/labels/theirs").await, "yes");

    let paused = names::PAUSED_ANNOTATION;
    fleet_client.annotate("acme", paused, "true").await?;
    beta.wait_for_drift_checks().await;
    acme.delete("configmap").await;
    beta.wait_for_drift_checks().await;
    assert!(!acme.exists("configmap").await);
    fleet_client.annotate("acme", paused, "false").await?;
    acme.wait_for_field("configmap", "/data/message", "hello")
        .await;

    for release in [&acme, &beta] {
        let revisions = fleet_client
            .revisions(release.namespace, &release.name)
            .await?;
        assert_eq!(revisions, [(1, "deployed".to_owned())]);
        fleet_client.wait_ready(release.namespace).await?;
    }
    // Corrected drift doesn't block a later upgrade.
    chart.write("message: second")?;
    acme.wait_for_field("configmap", "/data/message", "second")
        .await;
    fleet_client.wait_deployed("acme", &acme.name, 2).await?;
    assert_eq!(found("deployment", IMAGE).await, OWN_IMAGE);
    Ok(())
}

async fn drift_is_reported_but_ignored_fields_are_skipped(mode: Mode) -> TestResult {
    let (pair, _chart) = start_pair("drift-warn", mode, "--drift=warn").await?;
    let fleet_client = pair.fleet_client();
    fleet_client.install("acme").await?;
    let acme = Release::new(&pair, "acme");
    let ready = pair.condition("ClusterReady");

    // Checks without drift read each object once and send no other request.
    let wait_for_checks = async |least: u64| {
        eventually("looks", async || {
            let reads = count_requests(acme.cluster, "GET", "services").await?;
            Ok((reads >= least).then_some(reads))
        })
        .await
        .unwrap()
    };
    let first = wait_for_checks(0).await;
    let before = wait_for_checks(first + 3).await;
    let applies_before = count_requests(acme.cluster, "APPLY", "services").await?;
    assert!(applies_before > 0, "applies are not counted");
    wait_for_checks(before + 4).await;
    let applies_after = count_requests(acme.cluster, "APPLY", "services").await?;
    assert_eq!(applies_before, applies_after);

    acme.change_image().await;
    let field = "/spec/template/spec/containers/0/image";
    let names_field = |message: &str| message.contains("; drift: ") && message.contains(field);
    wait_for_condition(&fleet_client, "acme", &ready, names_field).await;
    let message = fleet_client.event_message("acme", "DriftDetected").await?;
    assert_contains!(message, field, "kubectl");
    let ignore = names::DRIFT_IGNORE_ANNOTATION;
    let rule = "Deployment:/spec/template/spec/containers/*/image";
    fleet_client.annotate("acme", ignore, rule).await?;
    wait_for_condition(&fleet_client, "acme", &ready, |message| {
        !message.contains("drift")
    })
    .await;

    acme.delete("configmap").await;
    let deleted = |message: &str| message.contains("ConfigMap") && message.contains("is deleted");
    wait_for_condition(&fleet_client, "acme", &ready, deleted).await;
    assert!(!acme.exists("configmap").await);
    fleet_client
        .annotate("acme", names::DRIFT_ANNOTATION, "heal")
        .await?;
    acme.wait_for_field("configmap", "/data/message", "hello")
        .await;
    wait_for_condition(&fleet_client, "acme", &ready, |message| {
        !message.contains("drift")
    })
    .await;
    let user_patch = json!({
        "metadata": {"annotations": {ignore: "/data/message"}},
        "data": {"message": "mine", "version": "mine"},
    });
    let user_patch = user_patch.to_string();
    acme.kubectl(&["patch", "configmap", &acme.name, "--patch", &user_patch])
        .await?;
    acme.wait_for_field("configmap", "/data/version", "1.0.0")
        .await;
    acme.wait_for_drift_checks().await;
    let found = async |kind: &str, pointer: &str| acme.field(kind, pointer).await.unwrap();
    assert_eq!(found("configmap", "/data/message").await, "mine");
    assert_eq!(found("deployment", IMAGE).await, OTHER_IMAGE);

    fleet_client
        .annotate("acme", names::DRIFT_ANNOTATION, "Heal")
        .await?;
    wait_for_condition(&fleet_client, "acme", &ready, |message| {
        message.contains("write off, warn or heal")
    })
    .await;
    let revisions = fleet_client.revisions("acme", &acme.name).await?;
    assert_eq!(revisions, [(1, "deployed".to_owned())]);
    Ok(())
}

/// Installs a release like Helm 3 and the original do it. No pods run here, and the chart requests none.
async fn install_as_original(
    cluster: &Cluster,
    chart: &ServedChart,
    (tenant, release): (&str, &str),
) -> TestResult {
    let repo = chart.repository.url();
    let install = format!("install {release} small --repo {repo} --version 1.0.0 -n {tenant}");
    let options = "--create-namespace --server-side=false --set replicaCount=0";
    let install = format!("{install} {options}");
    cluster.helm(install.split(' ')).await?;
    Ok(())
}

async fn adopted_release_is_healed_after_its_own_revision(mode: Mode) -> TestResult {
    let chart = ServedChart::small("{}").await?;
    let mut pair = Pair::start("drift-adopted", mode, Parts::WithControllers).await?;
    let [name, stray] = ["acme", "stray"].map(|tenant| pair.release(tenant));
    for release in [("acme", name.as_str()), ("stray", &stray)] {
        install_as_original(pair.cluster(), &chart, release).await?;
    }
    let fleet_client = pair.fleet_client();
    let releases = fleet_client.releases().await?;
    pair.start_hub_and_join(chart.flags(&["--drift=heal", "--drift-interval=1s"]))
        .await?;
    let url = chart.repository.url();
    let original = krypton_types::fingerprint::original(&url, "small", "1.0.0");
    let annotation = names::fingerprint_annotation(pair.name());
    fleet_client
        .create_annotated("acme", json!({}), &[(&annotation, &original)])
        .await?;
    // Without the annotation of the original, the release is foreign.
    fleet_client.create("stray", json!({})).await?;
    let [ready, error] = ["ClusterReady", "ClusterError"].map(|kind| pair.condition(kind));
    let adopted = [ALL_READY, (ready.as_str(), "True", "NoChange")];
    fleet_client.wait_for("acme", &adopted).await?;
    fleet_client.event_message("acme", "HelmSkip").await?;
    let refused = [
        ("Ready", "False", "ClustersNotReady"),
        (error.as_str(), "True", "ReleaseInUse"),
    ];
    let refused = fleet_client.wait_for("stray", &refused).await?;
    let message = refused.status.unwrap().last_message.unwrap();
    assert_contains!(message, stray, "mesh.openkcm.io/adopt=true");
    let log = pair.actor()?.log()?;
    assert!(!log.contains("running helm"), "{log}");

    let acme = Release::new(&pair, "acme");
    acme.change_image().await;
    wait_for_condition(&fleet_client, "acme", &ready, |message| {
        message.contains("not corrected")
    })
    .await;
    assert_eq!(acme.field("deployment", IMAGE).await?, OTHER_IMAGE);
    let unchanged = fleet_client.releases().await?;
    assert_eq!(unchanged, releases, "both are unchanged");
    fleet_client
        .annotate("stray", "mesh.openkcm.io/adopt", "true")
        .await?;
    fleet_client.wait_deployed("stray", &stray, 2).await?;
    fleet_client.wait_deployed("acme", &name, 1).await?;

    chart.write("{replicaCount: 0, message: v2}")?;
    fleet_client.wait_deployed("acme", &acme.name, 2).await?;
    acme.change_image().await;
    acme.wait_for_field("deployment", IMAGE, OWN_IMAGE).await;
    acme.wait_for_drift_checks().await;
    let revisions = fleet_client.revisions("acme", &acme.name).await?;
    let statuses = ["superseded", "deployed"].map(str::to_owned);
    assert_eq!(
        revisions,
        [1, 2].into_iter().zip(statuses).collect::<Vec<_>>()
    );
    Ok(())
}
