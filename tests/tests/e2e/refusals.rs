//! Verifies that conditions show repeated rejections of the API server and of Helm, with the remedy.

use anyhow::Result;
use krypton_tests::{
    ChartSource, Mode, Pair, Parts, Scenario, ServedChart, TestResult, assert_contains, eventually,
    fleet::FleetClient,
};
use krypton_types::names;
use serde_json::json;
use tempfile::TempDir;

/// Name, refused operation and resource of each policy, and the condition for a request to be admitted.
const POLICIES: [[&str; 4]; 3] = [
    [
        "no-finalizers",
        "UPDATE",
        "tenants",
        "!has(object.metadata.finalizers) || size(object.metadata.finalizers) == 0",
    ],
    [
        "no-workspace",
        "CREATE",
        "namespaces",
        "object.metadata.name != 'acme'",
    ],
    [
        "no-status",
        "UPDATE",
        "tenants/status",
        "object.metadata.name != 'beta'",
    ],
];
const WIDGETS: &str = "apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: widgets.krypton.test}
spec:
  group: krypton.test
  scope: Namespaced
  names: {kind: Widget, listKind: WidgetList, plural: widgets, singular: widget}
  versions:
    - {name: v1, served: true, storage: true, schema: {openAPIV3Schema: {type: object}}}
";

/// Returns the YAML of a policy of [`POLICIES`] and its binding.
fn policy([name, operation, resource, admitted]: [&str; 4]) -> String {
    format!(
        "apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicy
metadata: {{name: {name}}}
spec:
  failurePolicy: Fail
  matchConstraints:
    resourceRules:
      - {{apiGroups: ['*'], apiVersions: ['*'], operations: [{operation}], resources: [{resource}]}}
  validations:
    - expression: \"{admitted}\"
      message: {name} here
---
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicyBinding
metadata: {{name: {name}}}
spec: {{policyName: {name}, validationActions: [Deny]}}
---
"
    )
}

/// Waits until a condition of Tenant acme has this reason and a message that contains this text.
async fn wait_for_condition(
    fleet_client: &FleetClient,
    kind: &str,
    reason: &str,
    expected_text: &str,
) -> Result<()> {
    let waiting = fleet_client.wait_for_condition("acme", kind, |found| {
        found.reason == reason && found.message.contains(expected_text)
    });
    waiting.await.map(drop)
}

#[tokio::test]
async fn refused_request_sets_condition_and_retries_on_demand() -> TestResult {
    // An agent writes the status of its Tenants itself.
    let (mut pair, _chart) = Scenario::new("refused", Mode::Agent).start().await?;
    let fleet_client = pair.fleet_client();
    let log = pair.hub()?.log()?;
    assert!(!log.contains("failed to list KryptonDeployments"), "{log}");
    let paused = [(names::PAUSED_ANNOTATION, "true")];
    fleet_client
        .create_annotated("acme", json!({}), &paused)
        .await?;
    let cluster = pair.cluster();
    cluster.apply(&POLICIES.map(policy).concat()).await?;
    let patch = r#"{"metadata":{"finalizers":["krypton.test/probe"]}}"#;
    let probe = format!("patch tenant acme --type=merge --dry-run=server --patch {patch}");
    eventually("the policy to be enforced", async || {
        let patched = cluster.kubectl_line(&probe).await;
        let created = cluster.kubectl_line("create namespace acme --dry-run=server");
        let are_refused = patched.is_err() && created.await.is_err();
        Ok(are_refused.then_some(()))
    })
    .await?;

    fleet_client
        .annotate("acme", names::PAUSED_ANNOTATION, "false")
        .await?;
    let error = pair.condition("ClusterError");
    wait_for_condition(
        &fleet_client,
        &error,
        "RequestRefused",
        "no-finalizers here",
    )
    .await?;
    fleet_client.event_message("acme", "RequestRefused").await?;

    let admit = async |name: &str, tenant: &str| {
        let delete = ["delete", "validatingadmissionpolicybinding", name];
        cluster.kubectl(delete).await.unwrap();
        let annotation = names::RECONCILE_REQUESTED_ANNOTATION;
        let request = fleet_client.annotate(tenant, annotation, name);
        request.await.unwrap();
    };
    admit("no-finalizers", "acme").await;
    let message = fleet_client.event_message("acme", "WorkspaceCreateFailed");
    assert_contains!(message.await?, "no-workspace here");
    admit("no-workspace", "acme").await;
    fleet_client.wait_ready("acme").await?;

    fleet_client.create("beta", json!({})).await?;
    let message = fleet_client.event_message("beta", "StatusUpdateFailed");
    assert_contains!(message.await?, "no-status here");
    admit("no-status", "beta").await;
    fleet_client.wait_ready("beta").await?;
    Ok(())
}

/// Creates a chart with an object of a custom kind.
fn with_widget() -> Result<TempDir> {
    let folder = TempDir::with_prefix("krypton-widget-chart-")?;
    let objects = "apiVersion: krypton.test/v1\nkind: Widget\nmetadata: {name: '{{ .Release.Name }}'}\n\
        ---\napiVersion: v1\nkind: ConfigMap\nmetadata: {name: '{{ .Release.Name }}'}\n\
        data: {message: '{{ .Values.message }}'}\n";
    let templates = objects.replace(
        "apiVersion: krypton.test/v1",
        "{{- if .Values.widget }}\napiVersion: krypton.test/v1",
    );
    let templates = templates.replace("---\n", "{{- end }}\n---\n");
    let files = [("templates/objects.yaml", templates.as_str())];
    ChartSource::write(folder.path(), "widgets", &files)?;
    Ok(folder)
}

#[tokio::test]
async fn upgrade_past_deleted_kind_names_workaround() -> TestResult {
    let chart = with_widget()?;
    let source = ChartSource::folder(chart.path());
    let values = Some("{message: first, widget: true}");
    let chart = ServedChart::new(source, ("widgets", "1.0.0"), values).await?;
    let mut pair = Pair::start("widgets", Mode::SelfCluster, Parts::WithControllers).await?;
    let fleet_client = pair.fleet_client();
    pair.cluster().apply(WIDGETS).await?;
    pair.start_hub_and_join(chart.flags(&[])).await?;
    fleet_client.install("acme").await?;
    // Helm caches the known kinds for a while, so a new process is necessary.
    pair.stop().await?;
    let delete = "delete crd widgets.krypton.test";
    pair.cluster().kubectl_line(delete).await?;
    chart.write("{message: second}")?;
    pair.start_hub_and_join(chart.flags(&[])).await?;

    let error = pair.condition("ClusterError");
    let way_out = "delete the release's Secrets (label owner=helm";
    wait_for_condition(&fleet_client, &error, "UpgradeFailed", way_out).await?;
    fleet_client
        .wait_deployed("acme", &pair.release("acme"), 1)
        .await?;

    let selector = format!("owner=helm,name={}", pair.release("acme"));
    let delete = format!("delete secrets -n acme --selector {selector}");
    pair.cluster().kubectl_line(&delete).await?;
    fleet_client.wait_ready("acme").await?;
    fleet_client
        .wait_deployed("acme", &pair.release("acme"), 1)
        .await?;
    Ok(())
}
