//! Plays a user who can edit the workspace of a release and tries to become cluster-admin.

use k8s_openapi::api::authorization::v1::{
    ResourceAttributes, SelfSubjectAccessReview, SelfSubjectAccessReviewSpec,
};
use k8s_openapi::api::core::v1::{Namespace, Secret};
use k8s_openapi::api::rbac::v1::{ClusterRoleBinding, RoleBinding};
use krypton_crds::tenant::Tenant;
use krypton_tests::fleet::{FleetClient, HUB_NAMESPACE, SYSTEM_NAMESPACE};
use krypton_tests::{
    Mode, Pair, Scenario, ServedChart, TestResult, by_agent, gate::EVENTS,
    release_payload::rewrite, wait_until_gone,
};
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::{Api, Client, ResourceExt};
use serde_json::{Value, json};

use super::{editor_client, is_forbidden};
use crate::tampering::{VICTIM, append, forged, tamper};

const WORKSPACE: &str = "acme";
const BINDING: &str = "apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: takeover}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: cluster-admin}
subjects: [{kind: ServiceAccount, name: mallory, namespace: acme}]
";

/// Adds the binding as an object of the release, and as a hook of each kind.
fn add_takeover(release: &mut Value) {
    append(release, &format!("\n---\n{BINDING}"));
    release["hooks"] = json!([{
        "name": "takeover", "kind": "ClusterRoleBinding", "path": "small/templates/hook.yaml",
        "manifest": BINDING, "events": EVENTS, "last_run": {"phase": ""},
    }]);
    // Helm renders an upgrade from the chart, but some commands use the stored chart.
    let template = json!({"name": "templates/takeover.yaml", "data": BINDING.as_bytes()});
    if let Some(templates) = release["chart"]["templates"].as_array_mut() {
        templates.push(template);
    }
}

/// The user, who has ClusterRole `edit` in the workspace.
pub(crate) struct Editor {
    client: Client,
    secrets: Api<Secret>,
    release: String,
    fleet_client: FleetClient,
}

impl Editor {
    pub(crate) async fn new(pair: &Pair, workspace: &str, tenant: &str) -> Self {
        let client = editor_client(pair.cluster(), workspace).await.unwrap();
        Self {
            secrets: Api::namespaced(client.clone(), workspace),
            client,
            release: pair.release(tenant),
            fleet_client: pair.fleet_client(),
        }
    }

    /// Returns the stored revisions, ordered by name.
    async fn stored_revisions(&self) -> Vec<Secret> {
        let labels = format!("owner=helm,name={}", self.release);
        let params = ListParams::default().labels(&labels);
        self.secrets.list(&params).await.unwrap().items
    }

    pub(crate) async fn tamper(&self) {
        let name = self.newest_revision().await.name_any();
        tamper(&self.secrets, &name, add_takeover).await;
    }

    async fn newest_revision(&self) -> Secret {
        self.stored_revisions().await.pop().unwrap()
    }

    /// Adds a revision that Helm never wrote.
    pub(crate) async fn forge(&self, number: u32, status: &str) -> TestResult {
        let change = |release: &mut Value| {
            release["info"]["status"] = json!(status);
            add_takeover(release);
        };
        let newest = self.newest_revision().await;
        let mut secret = forged(&newest, &self.release, number, change)?;
        let labels = secret.labels_mut();
        labels.insert("status".to_owned(), status.to_owned());
        labels.insert("mesh.openkcm.io/run".to_owned(), "upgrade-0000".to_owned());
        let params = PostParams::default();
        self.secrets.create(&params, &secret).await?;
        Ok(())
    }

    /// Deletes all stored revisions of the release.
    pub(crate) async fn delete_revisions(&self) {
        for secret in self.stored_revisions().await {
            let (name, params) = (secret.name_any(), DeleteParams::default());
            self.secrets.delete(&name, &params).await.unwrap();
        }
    }

    async fn wait_for_new_install(&self) {
        self.fleet_client
            .wait_deployed(WORKSPACE, &self.release, 1)
            .await
            .unwrap();
    }

    /// Waits for the agent, and checks that the user has no further rights.
    pub(crate) async fn wait_and_check_rights(&self) -> TestResult {
        self.fleet_client.wait_for_renewal().await?;
        self.check_rights().await
    }

    async fn check_rights(&self) -> TestResult {
        check_no_takeover(&self.fleet_client).await?;
        let everything = SelfSubjectAccessReviewSpec {
            resource_attributes: Some(ResourceAttributes {
                verb: Some("*".to_owned()),
                group: Some("*".to_owned()),
                resource: Some("*".to_owned()),
                ..ResourceAttributes::default()
            }),
            ..SelfSubjectAccessReviewSpec::default()
        };
        let review = SelfSubjectAccessReview {
            spec: everything,
            ..SelfSubjectAccessReview::default()
        };
        let reviews: Api<SelfSubjectAccessReview> = Api::all(self.client.clone());
        let review = reviews.create(&PostParams::default(), &review).await;
        assert!(!review?.status.unwrap().allowed);
        Ok(())
    }

    /// Tries each write outside the user's rights.
    async fn check_writes_forbidden(&self) -> TestResult {
        let client = || self.client.clone();
        let params = (PostParams::default(), PatchParams::default());
        let takeover = |role: &str| {
            json!({
                "metadata": {"name": "takeover"},
                "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role},
            })
        };
        let binding: ClusterRoleBinding = serde_json::from_value(takeover("cluster-admin"))?;
        let bindings = Api::all(client());
        assert!(is_forbidden(&bindings.create(&params.0, &binding).await));
        let admin: RoleBinding = serde_json::from_value(takeover("admin"))?;
        let bindings = Api::namespaced(client(), WORKSPACE);
        assert!(is_forbidden(&bindings.create(&params.0, &admin).await));

        let records: Api<Secret> = Api::namespaced(client(), SYSTEM_NAMESPACE);
        assert!(is_forbidden(&records.list(&ListParams::default()).await));
        let system: Api<Secret> =
            Api::namespaced(self.fleet_client.client.clone(), SYSTEM_NAMESPACE);
        let all = system.list(&ListParams::default()).await?.items;
        assert!(!all.is_empty());
        let patch =
            Patch::Merge(json!({"metadata": {"annotations": {"mesh.openkcm.io/adopt": "x"}}}));
        for secret in all {
            let name = secret.name_any();
            assert!(is_forbidden(&records.patch(&name, &params.1, &patch).await));
        }
        let forged = Secret::default();
        assert!(is_forbidden(&records.create(&params.0, &forged).await));
        let tenants: Api<Tenant> = Api::namespaced(client(), HUB_NAMESPACE);
        let annotated = tenants.patch("acme", &params.1, &patch).await;
        assert!(is_forbidden(&annotated));
        let namespaces: Api<Namespace> = Api::all(client());
        let annotated = namespaces.patch(WORKSPACE, &params.1, &patch).await;
        assert!(is_forbidden(&annotated));
        Ok(())
    }
}

async fn check_no_takeover(fleet_client: &FleetClient) -> TestResult {
    let bindings: Api<ClusterRoleBinding> = Api::all(fleet_client.client.clone());
    assert_eq!(bindings.get_opt("takeover").await?, None);
    Ok(())
}

by_agent!(workspace_editor_gets_no_cluster_rights);

async fn workspace_editor_gets_no_cluster_rights(mode: Mode) -> TestResult {
    let flags = [
        "--drift=heal",
        "--drift-interval=1s",
        "--remediation=rollback",
    ];
    let scenario = Scenario::new("attack-editor", mode).flags(&flags);
    let values = "{replicaCount: 0, message: v1}";
    let (pair, chart) = scenario.values(values).start().await?;
    let fleet_client = pair.fleet_client();
    fleet_client.create("acme", json!({})).await?;
    let ready = async || fleet_client.wait_ready("acme").await.unwrap();
    ready().await;
    let editor = Editor::new(&pair, WORKSPACE, WORKSPACE).await;
    let error = pair.condition("ClusterError");
    let tampered = async || {
        let tampered = (error.as_str(), "True", "ReleaseTampered");
        fleet_client.wait_for("acme", &[tampered]).await.unwrap();
    };
    editor.check_writes_forbidden().await?;

    // Krypton neither heals from the user's changes, nor upgrades over them, nor rolls back to them.
    editor.tamper().await;
    tampered().await;
    editor.wait_and_check_rights().await?;
    for status in ["deployed", "failed", "pending-rollback"] {
        editor.forge(2, status).await?;
        editor.wait_and_check_rights().await?;
        let name = format!("sh.helm.release.v1.{}.v2", editor.release);
        let params = DeleteParams::default();
        // The agent may have deleted it during the cleanup of an interrupted run.
        drop(editor.secrets.delete(&name, &params).await);
    }
    chart.write("{replicaCount: 0, message: v2}")?;
    editor.wait_and_check_rights().await?;
    // Without any revision, Krypton renders the chart again.
    editor.delete_revisions().await;
    editor.wait_for_new_install().await;
    ready().await;
    editor.wait_and_check_rights().await?;
    // A forged revision over a good one, when the chart changes.
    editor.forge(2, "failed").await?;
    chart.write("{replicaCount: 0, message: v3}")?;
    editor.wait_and_check_rights().await?;
    editor.delete_revisions().await;
    editor.wait_for_new_install().await;
    ready().await;

    // The removal runs no hook of the user.
    editor.forge(2, "deployed").await?;
    fleet_client.delete("acme").await?;
    editor.wait_and_check_rights().await?;
    editor.delete_revisions().await;
    fleet_client.wait_gone("acme").await?;
    check_no_takeover(&fleet_client).await
}

/// Returns a copy of the newest revision with the binding. Helm reads it differently from its labels.
async fn shadow_revision(editor: &Editor, kind: &str) -> Secret {
    let number = if kind == "relabelled" { 2 } else { 99 };
    let change = |release: &mut Value| {
        release["info"]["status"] = json!("deployed");
        add_takeover(release);
        append(release, VICTIM);
    };
    let newest = editor.newest_revision().await;
    let mut secret = forged(&newest, &editor.release, number, change).unwrap();
    match kind {
        "retyped" => secret.type_ = Some("Opaque".to_owned()),
        "renamed" => secret.metadata.name = Some("shadow".to_owned()),
        _ => {
            let labels = secret.labels_mut();
            labels.insert("status".to_owned(), "failed".to_owned());
        }
    }
    secret
}

#[tokio::test]
async fn forged_revisions_give_no_cluster_rights() -> TestResult {
    let (pair, chart) = Scenario::new("attack-forged", Mode::SelfCluster)
        .start()
        .await?;
    pair.cluster().create_namespace("victim").await?;
    shadow_revisions_give_no_rights(&pair, &chart).await?;
    revision_that_helm_skips_gives_no_rights(&pair, &chart).await?;
    announced_uninstall_gives_no_rights(&pair, &chart).await?;
    let victim = pair.fleet_client().namespace("victim").await?.unwrap();
    assert_eq!(victim.metadata.deletion_timestamp, None);
    Ok(())
}

async fn shadow_revisions_give_no_rights(pair: &Pair, chart: &ServedChart) -> TestResult {
    let (fleet_client, error) = (pair.fleet_client(), pair.condition("ClusterError"));
    let mut shadows = Vec::new();
    for kind in ["retyped", "renamed", "relabelled"] {
        fleet_client.install(kind).await?;
        let editor = Editor::new(pair, kind, kind).await;
        let secret = shadow_revision(&editor, kind).await;
        let created = editor.secrets.create(&PostParams::default(), &secret).await;
        shadows.push((kind, created?.name_any(), editor));
    }
    let gained_nothing = async || {
        fleet_client.wait_for_renewal().await.unwrap();
        for (_, _, editor) in &shadows {
            editor.check_rights().await.unwrap();
        }
    };
    let refused = [(error.as_str(), "True", "ReleaseTampered")];
    chart.write("{replicaCount: 0, message: v2}")?;
    for (kind, _, _) in &shadows {
        fleet_client.wait_for(kind, &refused).await?;
    }
    gained_nothing().await;
    for (kind, _, _) in &shadows {
        fleet_client.delete(kind).await?;
        fleet_client.wait_for(kind, &refused).await?;
    }
    gained_nothing().await;
    for (kind, name, editor) in &shadows {
        let params = DeleteParams::default();
        drop(editor.secrets.delete(name, &params).await?);
        fleet_client.wait_gone(kind).await?;
    }
    gained_nothing().await;
    Ok(())
}

async fn revision_that_helm_skips_gives_no_rights(pair: &Pair, chart: &ServedChart) -> TestResult {
    const WORKSPACE: &str = "skipped";
    let (fleet_client, error) = (pair.fleet_client(), pair.condition("ClusterError"));
    fleet_client.install(WORKSPACE).await?;
    let editor = Editor::new(pair, WORKSPACE, WORKSPACE).await;
    // Only Helm evaluates the time.
    let mut newest = editor.newest_revision().await;
    let spoil = |release: &mut Value| release["info"]["first_deployed"] = json!("never");
    rewrite(&mut newest, &spoil)?;
    let (name, params) = (newest.name_any(), PostParams::default());
    editor.secrets.replace(&name, &params, &newest).await?;
    let change = |release: &mut Value| {
        release["info"] = json!({"status": "superseded"});
        add_takeover(release);
        append(release, VICTIM);
    };
    let mut older = forged(&newest, &editor.release, 0, change)?;
    let labels = older.labels_mut();
    labels.insert("status".to_owned(), "superseded".to_owned());

    editor.secrets.create(&params, &older).await?;
    chart.write("{replicaCount: 0, message: v3}")?;
    let failed = (error.as_str(), "True", "UpgradeFailed");
    fleet_client.wait_for(WORKSPACE, &[failed]).await?;
    editor.wait_and_check_rights().await?;
    // The first one was deleted.
    editor.secrets.create(&params, &older).await?;
    fleet_client.delete(WORKSPACE).await?;
    let failed = (error.as_str(), "True", "UninstallFailed");
    fleet_client.wait_for(WORKSPACE, &[failed]).await?;
    editor.wait_and_check_rights().await?;
    editor.delete_revisions().await;
    fleet_client.wait_gone(WORKSPACE).await?;
    Ok(())
}

/// Older revisions go before an uninstallation, so a user who sees that knows what comes next.
async fn announced_uninstall_gives_no_rights(pair: &Pair, chart: &ServedChart) -> TestResult {
    const WORKSPACE: &str = "announced";
    let fleet_client = pair.fleet_client();
    fleet_client.install(WORKSPACE).await?;
    let editor = Editor::new(pair, WORKSPACE, WORKSPACE).await;
    chart.write("{replicaCount: 0, message: v4}")?;
    fleet_client
        .wait_deployed(WORKSPACE, &editor.release, 2)
        .await?;
    fleet_client.wait_ready(WORKSPACE).await?;
    let [first, newest]: [Secret; 2] = editor.stored_revisions().await.try_into().unwrap();
    let mut changed = newest.clone();
    let change = |release: &mut Value| {
        add_takeover(release);
        append(release, VICTIM);
    };
    rewrite(&mut changed, &change)?;
    let (first, newest) = (first.name_any(), newest.name_any());

    fleet_client.delete(WORKSPACE).await?;
    wait_until_gone(&editor.secrets, &first).await?;
    let params = PostParams::default();
    editor.secrets.replace(&newest, &params, &changed).await?;

    let error = pair.condition("ClusterError");
    let refused = (error.as_str(), "True", "ReleaseTampered");
    fleet_client.wait_for(WORKSPACE, &[refused]).await?;
    editor.wait_and_check_rights().await?;
    editor.delete_revisions().await;
    fleet_client.wait_gone(WORKSPACE).await?;
    Ok(())
}
