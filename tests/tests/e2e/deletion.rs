//! Shows which objects Krypton deletes with a Tenant, which it keeps, and that a CRD deletion uninstalls nothing.

use k8s_openapi::api::admissionregistration::v1::{
    ValidatingAdmissionPolicy, ValidatingAdmissionPolicyBinding,
};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use krypton_crds::tenant::Tenant;
use krypton_tests::{
    Mode, Pair, Scenario, TestResult, assert_contains, by_agent, eventually, fleet::FleetClient,
    held::BlockedTenant, wait_until_replaced,
};
use krypton_types::names;
use kube::api::{DeleteParams, PostParams};
use kube::{Api, CustomResourceExt, ResourceExt};
use serde_json::json;

by_agent!(
    tenant_deletion_removes_release_and_only_own_namespace,
    tenants_and_releases_survive_crd_deletion,
    crd_stripped_of_finalizer_and_recreated_uninstalls_nothing,
    refused_tenant_keeps_no_other_from_its_restore
);

async fn tenant_deletion_removes_release_and_only_own_namespace(mode: Mode) -> TestResult {
    let (pair, _chart) = Scenario::new("deletion", mode).start().await?;
    let fleet_client = pair.fleet_client();
    pair.cluster().create_namespace("theirs").await?;
    for (name, spec) in [
        ("made", json!({"workspace": "made-ws"})),
        ("guest", json!({"workspace": "theirs"})),
        ("orphan", json!({"workspace": "orphan-ws"})),
    ] {
        fleet_client.create(name, spec).await?;
    }
    for name in ["made", "guest", "orphan"] {
        let tenant = fleet_client.wait_ready(name).await?;
        assert_eq!(tenant.finalizers(), [names::TENANT_FINALIZER]);
    }
    let theirs = fleet_client.namespace("theirs").await?.unwrap();

    fleet_client
        .annotate("orphan", names::ORPHAN_ANNOTATION, "true")
        .await?;
    for name in ["made", "guest", "orphan"] {
        fleet_client.delete(name).await?;
    }
    for name in ["made", "guest", "orphan"] {
        fleet_client.wait_gone(name).await?;
    }

    assert_eq!(
        fleet_client
            .revisions("made-ws", &pair.release("made"))
            .await?,
        []
    );
    assert_eq!(fleet_client.namespace("made-ws").await?, None);
    assert_eq!(
        fleet_client
            .revisions("theirs", &pair.release("guest"))
            .await?,
        []
    );
    let get = "get deploy,svc,cm -n theirs -o name";
    let remaining = pair.cluster().kubectl_line(get).await?;
    assert!(!remaining.contains("tenant-guest"), "{remaining}");
    let now = fleet_client.namespace("theirs").await?.unwrap();
    assert_eq!(now.metadata.deletion_timestamp, None);
    assert_eq!(
        (now.metadata.uid, now.metadata.labels),
        (theirs.metadata.uid, theirs.metadata.labels)
    );
    let orphaned = fleet_client
        .revisions("orphan-ws", &pair.release("orphan"))
        .await?;
    assert_eq!(orphaned, [(1, "deployed".to_owned())]);
    let get = format!("get deployment {} -n orphan-ws", pair.release("orphan"));
    pair.cluster().kubectl_line(&get).await?;
    for (name, reason) in [
        ("made", "HelmUninstalled"),
        ("made", "WorkspaceDeleted"),
        ("guest", "WorkspaceExists"),
        ("orphan", "Orphaned"),
    ] {
        fleet_client.event_message(name, reason).await?;
    }

    // A new Tenant with the name of a deleted one is an ordinary Tenant.
    fleet_client
        .create("made", json!({"workspace": "made-ws"}))
        .await?;
    fleet_client.wait_ready("made").await?;
    fleet_client
        .wait_deployed("made-ws", &pair.release("made"), 1)
        .await?;
    older_tenant_keeps_release(&pair).await
}

/// A younger Tenant of the same name doesn't get the release, and its deletion doesn't remove it.
async fn older_tenant_keeps_release(pair: &Pair) -> TestResult {
    let fleet_client = pair.fleet_client();
    for namespace in ["older", "younger"] {
        pair.cluster().create_namespace(namespace).await?;
    }
    let [older, younger] = ["older", "younger"].map(|name| fleet_client.in_namespace(name));
    let spec = json!({"workspace": "shared"});
    older.create("acme", spec.clone()).await?;
    older.wait_ready("acme").await?;
    let releases = fleet_client.releases().await?;

    younger.create("acme", spec).await?;
    let error = pair.condition("ClusterError");
    let refused = (error.as_str(), "True", "ReleaseInUse");
    let tenant = younger.wait_for("acme", &[refused]).await?;
    let status = tenant.status.unwrap();
    assert_eq!(status.phase.as_deref(), Some("Error"));
    let message = status.last_message.unwrap();
    assert_contains!(message, "Tenant older/acme");
    younger.event_message("acme", "ReleaseInUse").await?;

    younger.remove("acme").await?;
    older.wait_ready("acme").await?;
    assert_eq!(fleet_client.releases().await?, releases);
    let shared = fleet_client.namespace("shared").await?.unwrap();
    assert_eq!(shared.metadata.deletion_timestamp, None);
    Ok(())
}

async fn crd_stripped_of_finalizer_and_recreated_uninstalls_nothing(mode: Mode) -> TestResult {
    let (mut pair, _chart) = Scenario::new("stripped", mode).start().await?;
    let fleet_client = pair.fleet_client();
    let spec = json!({"workspace": "acme-ws"});
    fleet_client.create("acme", spec).await?;
    fleet_client.wait_ready("acme").await?;
    // With hub and agent stopped, no process saves the Tenants, and their finalizers block the deletion of the CRD.
    pair.stop().await?;
    let releases = fleet_client.releases().await?;
    let name = Tenant::crd_name();
    let cluster = pair.cluster();
    let delete = ["delete", "crd", name, "--wait=false"];
    cluster.kubectl(delete).await?;
    let deleted = eventually("the Tenant to be terminating", async || {
        let tenant = fleet_client.tenants().get("acme").await?;
        Ok(tenant.metadata.deletion_timestamp)
    })
    .await?;
    let none = r#"{"metadata":{"finalizers":[]}}"#;
    let strip = ["patch", "crd", name, "--type=merge", "--patch", none];
    cluster.kubectl(strip).await?;
    // Times in the API have a resolution of one second.
    eventually("another second", async || {
        let now = krypton_runtime::clock::wall().as_second();
        Ok((now > deleted.0.as_second() + 1).then_some(()))
    })
    .await?;

    pair.start_hub_again()?;
    pair.start_agent_again()?;
    let error = pair.condition("ClusterError");
    let uninstall_failed = [(error.as_str(), "True", "UninstallFailed")];
    let tenant = fleet_client.wait_for("acme", &uninstall_failed).await?;
    assert!(tenant.metadata.deletion_timestamp.is_some(), "etcd kept it");
    fleet_client
        .event_message("acme", "HelmUninstallFailed")
        .await?;
    assert_eq!(fleet_client.releases().await?, releases);
    let orphan = names::ORPHAN_ANNOTATION;
    fleet_client.annotate("acme", orphan, "true").await?;
    fleet_client.wait_gone("acme").await?;
    assert_eq!(fleet_client.releases().await?, releases);
    Ok(())
}

async fn tenants_and_releases_survive_crd_deletion(mode: Mode) -> TestResult {
    let (mut pair, _chart) = Scenario::new("crd", mode).start().await?;
    let fleet_client = pair.fleet_client();
    pair.cluster().create_namespace("team").await?;
    // Half of the Tenants are in a second namespace.
    let namespaces = ["default", "team"].map(|name| (name, fleet_client.in_namespace(name)));
    let mut names = Vec::new();
    for number in 0..2 {
        for (namespace, client) in &namespaces {
            let name = format!("{namespace}-{number}");
            let spec = json!({"workspace": format!("{name}-ws")});
            client.create(&name, spec).await?;
            names.push((client, name));
        }
    }
    let mut before = Vec::new();
    for (client, name) in &names {
        before.push(client.wait_ready(name).await?);
    }
    // The annotation is the last write of an installation, so no action is pending afterwards.
    for (client, name) in &names {
        client.event_message(name, "FingerprintUpdated").await?;
    }
    fleet_client.install("paused").await?;
    fleet_client
        .event_message("paused", "FingerprintUpdated")
        .await?;
    let going = BlockedTenant::delete(&fleet_client, "going").await?;
    let releases = fleet_client.releases().await?;
    let runs = count_helm_runs(&mut pair)?;
    // Krypton hasn't processed this deletion yet.
    fleet_client
        .annotate("paused", names::PAUSED_ANNOTATION, "true")
        .await?;
    fleet_client.delete("paused").await?;
    recreate_crd(&pair).await?;

    for ((client, name), old) in names.iter().zip(before) {
        let tenants = client.tenants();
        wait_until_replaced(&tenants, &old).await?;
        let restored = client.wait_ready(name).await?;
        assert_eq!(restored.spec, old.spec);
        // On the home cluster, the member's earlier report is written to the restored Tenant immediately.
        eventually(&format!("the finalizer of {name}"), async || {
            let tenant = tenants.get(name).await?;
            Ok((tenant.finalizers() == [names::TENANT_FINALIZER]).then_some(()))
        })
        .await?;
        client.event_message(name, "TenantRestored").await?;
    }
    check_restored_deletions(&fleet_client, going).await?;
    assert_eq!(
        fleet_client.releases().await?,
        releases,
        "no release was changed"
    );
    assert_eq!(count_helm_runs(&mut pair)?, runs);

    // The restored Tenants are complete. Deleting a namespace removes its Tenants and no others.
    let delete = "delete namespace team --wait=false";
    pair.cluster().kubectl_line(delete).await?;
    let (deleted, kept): (Vec<_>, Vec<_>) =
        (names.iter()).partition(|(_, name)| name.starts_with("team-"));
    for (client, name) in deleted {
        client.wait_gone(name).await?;
    }
    fleet_client.wait_for_namespace_deletion("team").await?;
    let mut remaining = releases;
    remaining.retain(|name, _| !name.contains("tenant-team-"));
    assert_eq!(fleet_client.releases().await?, remaining);
    for (client, name) in kept {
        client.wait_ready(name).await?;
    }
    Ok(())
}

/// Krypton resumes only a deletion that certainly preceded the deletion of the CRD.
async fn check_restored_deletions(
    fleet_client: &FleetClient,
    going: BlockedTenant<'_>,
) -> TestResult {
    let paused = eventually("Tenant paused to be restored", async || {
        Ok(fleet_client.tenants().get_opt("paused").await?)
    })
    .await?;
    assert_eq!(paused.metadata.deletion_timestamp, None);
    going.wait_deleted_again().await?;
    fleet_client
        .event_message("going", "TenantRestored")
        .await?;
    going.release().await?;
    assert_eq!(fleet_client.namespace("going").await?, None);
    Ok(())
}

fn count_helm_runs(pair: &mut Pair) -> TestResult<usize> {
    Ok(pair.actor()?.log()?.matches("running helm").count())
}

/// Deletes the CRD of Tenants, and waits until Krypton has created it again.
async fn recreate_crd(pair: &Pair) -> TestResult {
    let crds: Api<CustomResourceDefinition> = Api::all(pair.fleet_client().client);
    let old = crds.get(Tenant::crd_name()).await?;
    let delete = ["delete", "crd", Tenant::crd_name(), "--wait=false"];
    pair.cluster().kubectl(delete).await?;
    wait_until_replaced(&crds, &old).await?;
    Ok(())
}

/// Makes the API server reject every new Tenant of this name.
async fn refuse(fleet_client: &FleetClient, name: &str) -> TestResult {
    let tenants = json!({"apiGroups": ["mesh.openkcm.io"], "apiVersions": ["*"],
        "operations": ["CREATE"], "resources": ["tenants"]});
    let policy = json!({"metadata": {"name": "refuse"}, "spec": {
        "failurePolicy": "Fail",
        "matchConstraints": {"resourceRules": [tenants]},
        "validations": [{"expression": format!("object.metadata.name != '{name}'"),
            "message": "not this one"}],
    }});
    let binding = json!({"metadata": {"name": "refuse"},
        "spec": {"policyName": "refuse", "validationActions": ["Deny"]}});
    let params = PostParams::default();
    let policies: Api<ValidatingAdmissionPolicy> = Api::all(fleet_client.client.clone());
    let policy = serde_json::from_value(policy)?;
    policies.create(&params, &policy).await?;
    let bindings: Api<ValidatingAdmissionPolicyBinding> = Api::all(fleet_client.client.clone());
    let binding = serde_json::from_value(binding)?;
    bindings.create(&params, &binding).await?;
    let probe = Tenant::new(name, serde_json::from_value(json!({}))?);
    let dry = PostParams {
        dry_run: true,
        ..PostParams::default()
    };
    eventually("the policy to be enforced", async || {
        let tried = fleet_client
            .in_namespace("kube-public")
            .tenants()
            .create(&dry, &probe)
            .await;
        Ok(tried.is_err().then_some(()))
    })
    .await?;
    Ok(())
}

async fn refused_tenant_keeps_no_other_from_its_restore(mode: Mode) -> TestResult {
    let (mut pair, _chart) = Scenario::new("refused", mode).start().await?;
    let (fleet_client, home) = (pair.fleet_client(), FleetClient::new(pair.home()));
    for name in ["bad", "good", "other"] {
        fleet_client.create(name, json!({})).await?;
    }
    let mut before = Vec::new();
    for name in ["bad", "good", "other"] {
        before.push(fleet_client.wait_ready(name).await?);
        fleet_client
            .event_message(name, "FingerprintUpdated")
            .await?;
    }
    let releases = fleet_client.releases().await?;
    refuse(&fleet_client, "bad").await?;
    let delete = ["delete", "crd", Tenant::crd_name(), "--wait=false"];
    pair.cluster().kubectl(delete).await?;
    for old in &before[1..] {
        wait_until_replaced(&fleet_client.tenants(), old).await?;
    }
    let not_restored = ("Healthy", "False", "TenantsNotRestored");
    let edge_cluster = home.wait_for_member(pair.name(), &[not_restored]).await?;
    let status = serde_json::to_string(&edge_cluster.status)?;
    assert_contains!(status, "deleted: 1;", "default/bad");

    // The other Tenants are reconciled. One is deleted, and stays deleted after a restart.
    fleet_client.remove("good").await?;
    pair.stop().await?;
    pair.start_hub_again()?;
    pair.start_agent_again()?;
    fleet_client.wait_for_renewal().await?;
    home.wait_for_member(pair.name(), &[not_restored]).await?;
    assert!(fleet_client.tenants().get_opt("good").await?.is_none());

    let bindings: Api<ValidatingAdmissionPolicyBinding> = Api::all(fleet_client.client.clone());
    let params = DeleteParams::default();
    bindings.delete("refuse", &params).await?;
    fleet_client.event_message("bad", "TenantRestored").await?;
    for name in ["bad", "other"] {
        fleet_client.wait_ready(name).await?;
    }
    let healthy = ("Healthy", "True", "Reconciling");
    home.wait_for_member(pair.name(), &[healthy]).await?;
    assert!(fleet_client.tenants().get_opt("good").await?.is_none());
    let mut remaining = releases;
    remaining.retain(|name, _| !name.contains("tenant-good-"));
    assert_eq!(fleet_client.releases().await?, remaining);
    Ok(())
}
