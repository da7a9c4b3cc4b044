//! Actions of people on Tenants, damage to their releases and workspaces, and the repair of that damage.

use krypton_sim_apiserver::server::Key;
use krypton_types::names;
use serde_json::{Value, json};

use super::{FOREIGN_PREFIX, KRYPTON_API, text};
use crate::conductor::Simulation;
use crate::object::has_finalizer;
use crate::plan::{Settings, TENANT_NAMESPACE, TenantAction};
use crate::user_client::UserClient;

/// Label on revisions that people have forged.
const FORGED_LABEL: &str = "people.example/forged";
/// Base64 of base64 of bytes that gzip cannot decode.
const UNREADABLE_RELEASE: &str = "SDRzSUFBQUFBQUFBLzJSaGJXRm5aV1E9";
/// Resources of which a release may contain objects.
const RELEASE_RESOURCES: [(&str, &str, &str); 5] = [
    ("apps", "deployments", "/apis/apps/v1"),
    ("apps", "statefulsets", "/apis/apps/v1"),
    ("", "services", "/api/v1"),
    ("", "configmaps", "/api/v1"),
    ("", "secrets", "/api/v1"),
];

pub(super) fn perform_tenant_action(
    simulation: &mut Simulation,
    (cluster, tenant): (&str, &str),
    action: &TenantAction,
) {
    let collection = format!("{KRYPTON_API}/namespaces/{TENANT_NAMESPACE}/tenants");
    let path = format!("{collection}/{tenant}");
    let release_cluster = find_release_cluster(simulation, cluster, tenant);
    let mut client = UserClient::new(simulation, cluster);
    match action {
        TenantAction::Create { placed_on } => {
            client.create(&collection, &tenant_object(tenant, placed_on.as_deref()));
        }
        TenantAction::Edit { number } => {
            let values = json!({"message": format!("tenant-{number}")});
            client.patch(&path, &json!({"spec": {"values": values}}));
        }
        TenantAction::Delete => {
            client.delete(&path);
        }
        TenantAction::Orphan => {
            client.annotate(&path, names::ORPHAN_ANNOTATION, "true");
            client.delete(&path);
        }
        TenantAction::Relabel { number } => {
            let label = format!("{FOREIGN_PREFIX}team");
            let labels = json!({label: format!("team-{number}")});
            client.patch(&path, &json!({"metadata": {"labels": labels}}));
        }
        TenantAction::Pause => {
            client.annotate(&path, names::PAUSED_ANNOTATION, "true");
        }
        TenantAction::Resume => {
            client.annotate(&path, names::PAUSED_ANNOTATION, Value::Null);
        }
        TenantAction::Retry { number } => {
            let value = format!("request-{number}");
            client.annotate(&path, names::RECONCILE_REQUESTED_ANNOTATION, value);
        }
        TenantAction::AddForeign => set_foreign(&mut client, &path, true),
        TenantAction::RemoveForeign => set_foreign(&mut client, &path, false),
        TenantAction::SetClusterRef { member } => {
            let spec = json!({"clusterRef": {"secretName": member}});
            client.patch(&path, &json!({"spec": spec}));
        }
        TenantAction::Rewrite { member } => {
            client.replace(&path, &tenant_object(tenant, Some(member)));
        }
        TenantAction::Adopt => {
            client.annotate(&path, names::ADOPT_ANNOTATION, "true");
        }
        TenantAction::DeleteRelease
        | TenantAction::DamageRelease
        | TenantAction::ForgeRelease
        | TenantAction::DeleteNamespace
        | TenantAction::DeleteObject
        | TenantAction::AddOccupant => {
            damage_workspace(simulation, (&release_cluster, tenant), action)
        }
    }
}

/// A Tenant as people create it.
pub(super) fn tenant_object(name: &str, placed_on: Option<&str>) -> Value {
    let spec = match placed_on {
        Some(member) => json!({"clusterRef": {"secretName": member}}),
        None => json!({}),
    };
    json!({
        "apiVersion": "mesh.openkcm.io/v1alpha1",
        "kind": "Tenant",
        "metadata": {"name": name, "namespace": TENANT_NAMESPACE},
        "spec": spec,
    })
}

/// Adds or removes a finalizer, a label and an annotation.
fn set_foreign(client: &mut UserClient<'_>, path: &str, present: bool) {
    let Some(object) = client.get(path) else {
        return;
    };
    let finalizer = format!("{FOREIGN_PREFIX}hold");
    let existing = object.pointer("/metadata/finalizers");
    let existing = existing.and_then(Value::as_array).cloned();
    let mut finalizers = existing.unwrap_or_default();
    finalizers.retain(|each| each.as_str() != Some(&finalizer));
    // The API server rejects new finalizers of an object in deletion.
    if present && object.pointer("/metadata/deletionTimestamp").is_none() {
        finalizers.push(json!(finalizer));
    }
    let value = if present { json!("kept") } else { Value::Null };
    let key = format!("{FOREIGN_PREFIX}mark");
    let patch = json!({"metadata": {
        "resourceVersion": object.pointer("/metadata/resourceVersion"),
        "finalizers": finalizers,
        "labels": {&key: value},
        "annotations": {&key: value},
    }});
    client.patch(path, &patch);
}

fn damage_workspace(
    simulation: &mut Simulation,
    (cluster, tenant): (&str, &str),
    action: &TenantAction,
) {
    let path = match action {
        TenantAction::DeleteRelease | TenantAction::DamageRelease | TenantAction::ForgeRelease => {
            newest_release(simulation, cluster, tenant)
        }
        TenantAction::DeleteObject => first_object(simulation, cluster, tenant),
        _ => Some(format!("/api/v1/namespaces/{tenant}")),
    };
    let Some(path) = path else { return };
    let mut client = UserClient::new(simulation, cluster);
    match action {
        TenantAction::AddOccupant => {
            let labels = json!({format!("{FOREIGN_PREFIX}occupant"): "true"});
            let object = json!({
                "apiVersion": "v1",
                "kind": "ConfigMap",
                "metadata": {"name": "occupant", "namespace": tenant, "labels": labels},
                "data": {"of": "a person"},
            });
            client.create(&format!("{path}/configmaps"), &object);
        }
        TenantAction::DamageRelease => {
            client.patch(&path, &json!({"data": {"release": UNREADABLE_RELEASE}}));
        }
        TenantAction::ForgeRelease => {
            forge_next_revision(&mut client, &path);
        }
        _ => {
            client.delete(&path);
        }
    }
}

/// Creates the revision after the one at `path`, with the same content.
fn forge_next_revision(client: &mut UserClient<'_>, path: &str) -> Option<()> {
    let newest = client.get(path)?;
    let (collection, name) = path.rsplit_once('/')?;
    let (base, version) = name.rsplit_once(".v")?;
    let next = version.parse::<u32>().ok()? + 1;
    let mut labels = newest.pointer("/metadata/labels")?.clone();
    labels["version"] = json!(next.to_string());
    labels[FORGED_LABEL] = json!("true");
    let forged = json!({
        "apiVersion": "v1",
        "kind": "Secret",
        "type": newest.get("type")?,
        "metadata": {"name": format!("{base}.v{next}"), "labels": labels},
        "data": newest.get("data")?,
    });
    client.create(collection, &forged);
    Some(())
}

/// Orphans the Tenants whose deletion waits because Krypton cannot decode their release, as its message suggests.
pub(in crate::faults) fn orphan_unreadable_tenants(
    simulation: &mut Simulation,
    clusters: &[String],
) {
    for cluster in clusters {
        for tenant in simulation.objects(cluster, names::GROUP, "tenants") {
            let name = text(&tenant, "/metadata/name").unwrap_or_default();
            if tenant.pointer("/metadata/deletionTimestamp").is_none()
                || !has_unreadable_release(simulation, clusters, name)
            {
                continue;
            }
            let mut client = UserClient::new(simulation, cluster);
            let path = format!("{KRYPTON_API}/namespaces/{TENANT_NAMESPACE}/tenants/{name}");
            client.annotate(&path, names::ORPHAN_ANNOTATION, "true");
        }
    }
}

/// Removes the finalizers of people from all Tenants.
pub(in crate::faults) fn remove_foreign(simulation: &mut Simulation, clusters: &[String]) {
    for cluster in clusters {
        for tenant in simulation.objects(cluster, names::GROUP, "tenants") {
            if has_finalizer(&tenant, &format!("{FOREIGN_PREFIX}hold")) {
                let name = text(&tenant, "/metadata/name").unwrap_or_default();
                let path = format!("{KRYPTON_API}/namespaces/{TENANT_NAMESPACE}/tenants/{name}");
                set_foreign(&mut UserClient::new(simulation, cluster), &path, false);
            }
        }
    }
}

/// Deletes the revisions that people have forged. Krypton refuses to work on them.
pub(in crate::faults) fn delete_forged(simulation: &mut Simulation, clusters: &[String]) {
    for cluster in clusters {
        for secret in simulation.objects(cluster, "", "secrets") {
            if let (true, Some(namespace), Some(name)) = (
                secret
                    .pointer("/metadata/labels")
                    .is_some_and(|labels| labels.get(FORGED_LABEL).is_some()),
                text(&secret, "/metadata/namespace"),
                text(&secret, "/metadata/name"),
            ) {
                let mut client = UserClient::new(simulation, cluster);
                client.delete(&format!("/api/v1/namespaces/{namespace}/secrets/{name}"));
                request_retry(simulation, clusters, namespace);
            }
        }
    }
}

/// Without a request, Krypton repeats a permanent failure only after 15 minutes.
fn request_retry(simulation: &mut Simulation, clusters: &[String], tenant: &str) {
    let path = format!("{KRYPTON_API}/namespaces/{TENANT_NAMESPACE}/tenants/{tenant}");
    let reason = "forged revision deleted";
    for cluster in clusters {
        let mut client = UserClient::new(simulation, cluster);
        client.annotate(&path, names::RECONCILE_REQUESTED_ANNOTATION, reason);
    }
}

fn has_unreadable_release(simulation: &Simulation, clusters: &[String], workspace: &str) -> bool {
    clusters.iter().any(|cluster| {
        let secrets = simulation.objects(cluster, "", "secrets");
        secrets.iter().any(|secret| {
            text(secret, "/metadata/namespace") == Some(workspace)
                && text(secret, "/data/release") == Some(UNREADABLE_RELEASE)
        })
    })
}

/// The cluster where a Tenant's release is: the member that `clusterRef` names, or else the Tenant's cluster.
fn find_release_cluster(simulation: &Simulation, cluster: &str, tenant: &str) -> String {
    let key = Key::new(names::GROUP, "tenants", TENANT_NAMESPACE, tenant);
    let member = simulation.object(cluster, &key).and_then(|object| {
        let name = object.pointer("/spec/clusterRef/secretName")?.as_str()?;
        Some(name.to_owned())
    });
    member.map_or_else(
        || cluster.to_owned(),
        |member| Settings::cluster_for(&member).to_owned(),
    )
}

/// Path of the newest release Secret in a workspace.
fn newest_release(simulation: &Simulation, cluster: &str, workspace: &str) -> Option<String> {
    let secrets = simulation.objects(cluster, "", "secrets");
    let releases = secrets.iter().filter(|secret| {
        text(secret, "/metadata/namespace") == Some(workspace)
            && text(secret, "/type") == Some("helm.sh/release.v1")
    });
    let newest = releases.max_by_key(|secret| {
        text(secret, "/metadata/labels/version").and_then(|version| version.parse::<u32>().ok())
    })?;
    let name = text(newest, "/metadata/name")?;
    Some(format!("/api/v1/namespaces/{workspace}/secrets/{name}"))
}

/// Path of the first object that Helm has created in a workspace.
fn first_object(simulation: &Simulation, cluster: &str, workspace: &str) -> Option<String> {
    RELEASE_RESOURCES.iter().find_map(|(group, resource, api)| {
        let objects = simulation.objects(cluster, group, resource);
        let object = objects.iter().find(|object| {
            text(object, "/metadata/namespace") == Some(workspace)
                && text(object, "/metadata/annotations/meta.helm.sh~1release-name").is_some()
        })?;
        let name = text(object, "/metadata/name")?;
        Some(format!("{api}/namespaces/{workspace}/{resource}/{name}"))
    })
}
