//! Shows which objects the CRDs admit and reject on a real API server, and with which messages.

use std::{
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context, Result, bail};
use k8s_openapi::{
    apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition,
    apimachinery::pkg::apis::meta::v1::{Condition, Time},
    jiff::Timestamp,
};
use krypton_crds::{
    edge_cluster::{Applied, EdgeCluster, EdgeClusterSpec, EdgeClusterStatus, Mode, TenantCounts},
    tenant::Tenant,
};
use krypton_tests::{Cluster, Merge as _, Parts, TestResult, assert_contains, eventually_within};
use kube::{
    Api, ResourceExt,
    api::{DeleteParams, DynamicObject, Patch, PatchParams, PostParams},
};
use serde_json::{Value, json};

const MINUTE: Duration = Duration::from_secs(60);

fn crds(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../crds")
        .join(path)
}

fn samples(folder: &str) -> Result<Vec<PathBuf>> {
    let entries = fs::read_dir(crds(folder))?.map(|entry| Ok(entry?.path()));
    let mut files = entries.collect::<Result<Vec<_>>>()?;
    files.sort();
    assert!(!files.is_empty(), "no samples in {folder}");
    Ok(files)
}

async fn apply_file(cluster: &Cluster, file: &Path, args: &[&str]) -> Result<String> {
    let file = file.to_str().context("a path in UTF-8")?;
    cluster
        .kubectl([&["apply", "-f", file], args].concat())
        .await
}

/// Starts a control plane and installs the CRDs with kubectl, as a user does.
async fn cluster_with_crds(name: &str) -> Result<Cluster> {
    let cluster = Cluster::start(name, Parts::ControlPlane).await?;
    apply_file(&cluster, &crds("crds"), &[]).await?;
    cluster.wait_for_crds().await?;
    Ok(cluster)
}

/// Returns the quoted text in the first line of a rejected sample.
fn expected_text(file: &Path) -> Result<String> {
    let text = fs::read_to_string(file)?;
    let line = text.lines().next().unwrap_or_default();
    let quoted = line
        .split_once('"')
        .and_then(|(_, rest)| rest.rsplit_once('"'));
    let (message, _) =
        quoted.with_context(|| format!("no words in quotes in {}", file.display()))?;
    Ok(message.to_owned())
}

fn tenant(name: &str, spec: Value) -> Result<Tenant> {
    Ok(Tenant::new(name, serde_json::from_value(spec)?))
}

fn condition(type_: &str, at: Timestamp) -> Condition {
    Condition {
        type_: type_.to_owned(),
        status: "True".to_owned(),
        reason: "Installed".to_owned(),
        message: "release installed".to_owned(),
        last_transition_time: Time(at),
        observed_generation: Some(1),
    }
}

/// Asserts that the API server rejected an object as invalid, with this text.
#[track_caller]
fn check_rejected<T: std::fmt::Debug>(result: kube::Result<T>, expected: &str) {
    match result {
        Err(kube::Error::Api(status)) if status.code == 422 => {
            assert!(status.message.contains(expected), "{}", status.message);
        }
        other => panic!("not rejected as invalid: {other:?}"),
    }
}

#[tokio::test]
async fn original_samples_are_admitted_and_invalid_ones_rejected() -> TestResult {
    let cluster = cluster_with_crds("samples").await?;

    for file in samples("testdata/original")? {
        // Only a chart in a Tenant is outside the schema, as in the original's CRD.
        let lenient = file.ends_with("tenant-with-chart.yaml");
        let args: &[&str] = if lenient { &["--validate=warn"] } else { &[] };
        apply_file(&cluster, &file, args).await?;
    }
    let tenants: Api<Tenant> = Api::namespaced(cluster.client(), "default");
    assert_eq!(tenants.get("hello").await?.workspace(), "hello");
    let named_only = tenants.get("named-only").await?;
    assert_eq!(named_only.referenced_member(), Some("edge-1"));

    for file in samples("testdata/refused")? {
        let message = expected_text(&file)?;
        let refused = apply_file(&cluster, &file, &[]).await;
        let Err(error) = refused else {
            panic!("{} is admitted", file.display())
        };
        let error = format!("{error:#}");
        assert!(error.contains(&message), "{}: {error}", file.display());
    }
    Box::pin(check_columns(&cluster)).await
}

#[tokio::test]
async fn workspace_cannot_be_changed_once_set() -> TestResult {
    let cluster = cluster_with_crds("workspace").await?;
    let tenants: Api<Tenant> = Api::namespaced(cluster.client(), "default");
    let params = PostParams::default();
    for name in ["acme", "unset", "of.dots"] {
        tenants.create(&params, &tenant(name, json!({}))?).await?;
    }
    let set = async |name: &str, workspace: &str| {
        tenants
            .merge(name, &json!({"spec": {"workspace": workspace}}))
            .await
    };
    let later = set("unset", "another").await;
    check_rejected(later, "workspace defaulted to the name of the Tenant");
    set("unset", "unset").await?;
    set("of.dots", "another").await?;
    let patch = async |spec: Value| tenants.merge("acme", &json!({"spec": spec})).await;

    let illegal = patch(json!({"workspace": "Acme"})).await;
    check_rejected(illegal, "legal namespace name");
    patch(json!({"workspace": "acme"})).await?;
    patch(json!({"clusterRef": {"secretName": "edge-1"}})).await?;
    let changed = patch(json!({"workspace": "second"})).await;
    check_rejected(changed, "workspace cannot be changed once set");
    let no_removal = "workspace cannot be removed once set";
    check_rejected(patch(json!({"workspace": null})).await, no_removal);
    let remove = r#"[{"op":"remove","path":"/spec"}]"#;
    let empty = ["patch", "tn", "acme", "--type=json", "-p", remove];
    let emptied = format!("{:#}", cluster.kubectl(empty).await.unwrap_err());
    assert_contains!(emptied, no_removal);

    let stored = tenants.get("acme").await?;
    assert_eq!(stored.workspace(), "acme");
    assert_eq!(stored.referenced_member(), Some("edge-1"));
    Ok(())
}

#[tokio::test]
async fn conditions_round_trip_and_merge_by_type() -> TestResult {
    let cluster = cluster_with_crds("conditions").await?;
    let tenants: Api<Tenant> = Api::namespaced(cluster.client(), "default");
    let params = PostParams::default();
    tenants.create(&params, &tenant("acme", json!({}))?).await?;
    let time = Timestamp::from_second(1_700_000_000)?;
    let types = [
        "ClusterReady/edge-1",
        "ClusterReady/a.b",
        "ClusterError/a.b.c",
        "Ready",
    ];
    let apply = async |manager: &str, types: &[&str]| {
        let conditions: Vec<_> = types.iter().map(|type_| condition(type_, time)).collect();
        let patch = json!({
            "apiVersion": "mesh.openkcm.io/v1alpha1",
            "kind": "Tenant",
            "status": {"phase": "Ready", "conditions": conditions},
        });
        let params = PatchParams::apply(manager).force();
        tenants
            .patch_status("acme", &params, &Patch::Apply(&patch))
            .await
    };

    let long = format!("ClusterProgress/{}", "c".repeat(300));
    for type_ in types.into_iter().chain([long.as_str()]) {
        apply(&format!("writer-of-{}", type_.len()), &[type_]).await?;
    }
    let status = tenants.get("acme").await?.status.unwrap();
    for type_ in types {
        let expected = condition(type_, time);
        assert!(status.conditions.contains(&expected), "{type_}: {status:?}");
    }
    assert_eq!(status.conditions.len(), 5, "{status:?}");
    let too_long = apply("last", &[&format!("{long}c")]).await;
    check_rejected(too_long, "may not be more than 316");

    let wait = "wait --for=condition=Ready tenant/acme --timeout=30s";
    cluster.kubectl_line(wait).await?;
    Ok(())
}

/// Checks the columns of `kubectl get`. The cluster has a Tenant and a KryptonDeployment.
async fn check_columns(cluster: &Cluster) -> TestResult {
    let members: Api<EdgeCluster> = Api::all(cluster.client());
    let member = EdgeCluster::new("edge-1", EdgeClusterSpec::default());
    let mut member = members.create(&PostParams::default(), &member).await?;
    let time = Timestamp::from_second(1_700_000_000)?;
    let status = EdgeClusterStatus {
        mode: Some(Mode::Proxy),
        conditions: vec![condition("Ready", time)],
        kubernetes_version: Some("v1.36.0".to_owned()),
        tenants: Some(TenantCounts {
            total: 7,
            ready: 6,
            pending: 1,
            error: 0,
        }),
        applied: Some(Applied {
            epoch: 1,
            generation: 42,
            digest: "0a".to_owned(),
        }),
        last_seen: Some(Time(time)),
        cluster_uid: Some("an-uid".to_owned()),
        ..EdgeClusterStatus::default()
    };
    member.status = Some(status.clone());
    members
        .replace_status("edge-1", &PostParams::default(), &member)
        .await?;
    assert_eq!(members.get("edge-1").await?.status, Some(status));

    let output = cluster.kubectl(["get", "ec", "-o", "wide"]).await?;
    let [header, row] = [0, 1].map(|number| words(&output, number));
    let expected = "NAME MODE READY TENANTS READYTENANTS VERSION APPLIED AGE ";
    assert!(header.starts_with(expected), "{output}");
    let expected = "edge-1 proxy True 7 6 v1.36.0 42 ";
    assert!(row.starts_with(expected), "{output}");

    for (short, header) in [
        ("tn", "NAME PHASE WORKSPACE READY AGE MESSAGE"),
        ("kd", "NAME PHASE REGION READY AGE MESSAGE"),
    ] {
        let output = cluster.kubectl(["get", short]).await?;
        assert_eq!(words(&output, 0), header, "{output}");
    }
    Ok(())
}

/// Returns the words of a line, with single spaces.
fn words(output: &str, line: usize) -> String {
    let line = output.lines().nth(line).unwrap_or_default();
    line.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// A Tenant CRD like the original's hand-written one, with almost no validation.
fn permissive_crd() -> Result<CustomResourceDefinition> {
    let condition = json!({
        "type": "object",
        "required": ["type", "status", "lastTransitionTime", "reason", "message"],
        "properties": {
            "type": {"type": "string"},
            "status": {"type": "string"},
            "lastTransitionTime": {"type": "string", "format": "date-time"},
            "reason": {"type": "string"},
            "message": {"type": "string"},
        },
    });
    let schema = json!({
        "type": "object",
        "properties": {
            "spec": {"type": "object", "properties": {"workspace": {"type": "string"}}},
            "status": {
                "type": "object",
                "properties": {
                    "phase": {"type": "string"},
                    "conditions": {"type": "array", "items": condition},
                },
            },
        },
    });
    let mut crd = Tenant::crd().clone();
    crd.metadata.annotations = None;
    crd.spec.names.short_names = None;
    crd.spec.versions[0].additional_printer_columns = None;
    let schema = json!({ "openAPIV3Schema": schema });
    crd.spec.versions[0].schema = serde_json::from_value(schema)?;
    Ok(crd)
}

/// Replaces an older CRD with ours, and waits until the API server enforces it.
async fn replace_crd(cluster: &Cluster) -> Result<()> {
    let api: Api<CustomResourceDefinition> = Api::all(cluster.client());
    let mut ours = Tenant::crd().clone();
    let stored = api.get(&ours.name_any()).await?;
    ours.metadata.resource_version = stored.metadata.resource_version;
    api.replace(&ours.name_any(), &PostParams::default(), &ours)
        .await?;

    let tenants: Api<Tenant> = Api::namespaced(cluster.client(), "default");
    let probe = tenant("probe", json!({"workspace": "Illegal"}))?;
    let params = PostParams {
        dry_run: true,
        ..PostParams::default()
    };
    eventually_within(
        "the new schema to be enforced",
        MINUTE,
        async || match tenants.create(&params, &probe).await {
            Err(kube::Error::Api(status)) if status.code == 422 => Ok(Some(())),
            other => bail!("an invalid Tenant got {other:?}"),
        },
    )
    .await
}

#[tokio::test]
async fn older_schema_objects_can_be_updated_and_deleted() -> TestResult {
    let cluster = Cluster::start("older", Parts::ControlPlane).await?;
    let crds: Api<CustomResourceDefinition> = Api::all(cluster.client());
    let older = permissive_crd()?;
    crds.create(&PostParams::default(), &older).await?;
    cluster.wait_for_crds().await?;

    let resource = kube::api::ApiResource::erase::<Tenant>(&());
    let raw: Api<DynamicObject> = Api::namespaced_with(cluster.client(), "default", &resource);
    let stored = [
        ("illegal", json!({"spec": {"workspace": "Acme.WS"}})),
        ("endless", json!({"spec": {"workspace": "a".repeat(300)}})),
        ("unset", json!({"spec": {"workspace": ""}})),
        ("specless", json!({})),
    ];
    // The old CRD admits an invalid condition status and an empty reason, and ours rejects them.
    let old_condition = json!({
        "type": "ClusterReady/edge-1", "status": "yes", "reason": "", "message": "",
        "lastTransitionTime": "2025-12-08T00:00:00Z",
    });
    for (name, mut object) in stored.clone() {
        object["apiVersion"] = json!("mesh.openkcm.io/v1alpha1");
        object["kind"] = json!("Tenant");
        object["metadata"] = json!({"name": name, "finalizers": ["mesh.openkcm.io/cleanup"]});
        let object: DynamicObject = serde_json::from_value(object)?;
        eventually_within("the older schema to be served", MINUTE, async || {
            Ok(Some(raw.create(&PostParams::default(), &object).await?))
        })
        .await?;
        let status = json!({"phase": "Ready", "conditions": [old_condition]});
        raw.merge_status(name, status).await?;
    }

    replace_crd(&cluster).await?;

    let tenants: Api<Tenant> = Api::namespaced(cluster.client(), "default");
    assert_eq!(tenants.get("specless").await?.workspace(), "specless");
    assert_eq!(tenants.get("unset").await?.workspace(), "unset");
    let time = Timestamp::from_second(1_700_000_000)?;
    for (name, _) in stored {
        let labelled = json!({"metadata": {"labels": {"seen": "true"}}});
        tenants.merge(name, &labelled).await?;
        let spec = json!({"spec": {"clusterRef": {"secretName": "edge-1"}}});
        tenants.merge(name, &spec).await?;
        let conditions = json!([old_condition, condition("Ready", time)]);
        let status = json!({ "conditions": conditions });
        let written = tenants.merge_status(name, status).await?;
        assert_eq!(written.status.unwrap().conditions.len(), 2);

        tenants.delete(name, &DeleteParams::default()).await?;
        let released = json!({"metadata": {"finalizers": null}});
        tenants.merge(name, &released).await?;
        assert_eq!(tenants.get_opt(name).await?, None);
    }
    Ok(())
}
