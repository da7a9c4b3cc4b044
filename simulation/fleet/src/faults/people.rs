//! Actions of people: raw requests to API servers, with the user agent [`PEOPLE`].

use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use http::{Method, Request};
use krypton_sim_apiserver::server::Key;
use krypton_types::{ca_rotation, names};
use serde_json::{Value, json};

use crate::conductor::{Millis, Simulation};
use crate::observe::Event;
use crate::plan::{
    Action, DeploymentAction, HOME, MemberAction, SYSTEM_NAMESPACE, Settings, TENANT_NAMESPACE,
    TWIN_SUFFIX, TenantAction, UNTRUSTED_NAMESPACE,
};
use crate::stage;

/// User agent of all requests of people.
pub const PEOPLE: &str = "people/1.0";
/// ConfigMap in the hub's namespace with chart values, in the key `values.yaml`. The hub gets it as
/// `--chart-values-from`.
pub const VALUES_CONFIG_MAP: &str = "fleet-values";
/// Starts the keys of labels, annotations and finalizers that people write.
pub const FOREIGN_PREFIX: &str = "people.example/";

/// Time in which a replaced EdgeCluster disappears.
const REPLACEMENT_DELAY: Millis = 5_000;
const KRYPTON_API: &str = "/apis/mesh.openkcm.io/v1alpha1";
const MERGE_PATCH: &str = "application/merge-patch+json";
const JSON: &str = "application/json";
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

/// A client of people for one cluster. No link delays its requests, and no fault of the API server affects them.
#[derive(Debug)]
pub struct UserClient<'a> {
    pub simulation: &'a mut Simulation,
    pub cluster: &'a str,
}

impl<'a> UserClient<'a> {
    pub fn new(simulation: &'a mut Simulation, cluster: &'a str) -> Self {
        Self {
            simulation,
            cluster,
        }
    }

    /// Returns a client for the home cluster.
    pub fn for_home(simulation: &'a mut Simulation) -> Self {
        Self {
            simulation,
            cluster: HOME,
        }
    }

    /// Sends a request. Returns the code and the body, `Null` if it is not JSON.
    pub fn send(
        &mut self,
        method: Method,
        path: &str,
        content_type: &str,
        body: &Value,
    ) -> (u16, Value) {
        let bytes = match body {
            Value::Null => Bytes::new(),
            body => Bytes::from(body.to_string()),
        };
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header("user-agent", PEOPLE)
            .header("accept", JSON)
            .header("content-type", content_type)
            .body(bytes);
        let Ok(request) = request else {
            return (0, Value::Null);
        };
        match self.simulation.request(self.cluster, &request) {
            Some(response) => {
                let body = serde_json::from_slice(response.body()).unwrap_or_default();
                (response.status().as_u16(), body)
            }
            None => (0, Value::Null),
        }
    }

    pub fn create(&mut self, path: &str, object: &Value) -> u16 {
        self.send(Method::POST, path, JSON, object).0
    }

    pub fn patch(&mut self, path: &str, patch: &Value) -> u16 {
        self.send(Method::PATCH, path, MERGE_PATCH, patch).0
    }

    pub fn replace(&mut self, path: &str, object: &Value) -> u16 {
        self.send(Method::PUT, path, JSON, object).0
    }

    pub fn delete(&mut self, path: &str) -> u16 {
        self.send(Method::DELETE, path, JSON, &Value::Null).0
    }

    pub fn get(&mut self, path: &str) -> Option<Value> {
        let (code, body) = self.send(Method::GET, path, JSON, &Value::Null);
        (code == 200).then_some(body)
    }
}

/// Carries out an action of a person.
pub(super) fn perform(simulation: &mut Simulation, action: &Action) {
    match action {
        Action::Tenant {
            cluster,
            tenant,
            action,
        } => perform_tenant_action(simulation, (cluster, tenant), action),
        Action::Member { member, action } => perform_member_action(simulation, member, action),
        Action::Deployment { name, action } => perform_deployment_action(simulation, name, action),
        Action::Values { number } => {
            let data = json!({"values.yaml": format!("message: fleet-{number}\n")});
            let mut client = UserClient::for_home(simulation);
            let collection = format!("/api/v1/namespaces/{SYSTEM_NAMESPACE}/configmaps");
            if client.patch(
                &format!("{collection}/{VALUES_CONFIG_MAP}"),
                &json!({"data": data}),
            ) == 404
            {
                let metadata = json!({"name": VALUES_CONFIG_MAP, "namespace": SYSTEM_NAMESPACE});
                let new = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data});
                client.create(&collection, &new);
            }
        }
        Action::RotateCa => {
            let annotations =
                json!({ca_rotation::REQUEST_ANNOTATION: simulation.wall_time().to_string()});
            let path = format!(
                "/api/v1/namespaces/{SYSTEM_NAMESPACE}/secrets/{}",
                names::CA_SECRET
            );
            UserClient::for_home(simulation)
                .patch(&path, &json!({"metadata": {"annotations": annotations}}));
        }
        Action::DeleteCrd { cluster } => {
            let crds = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions";
            UserClient::new(simulation, cluster).delete(&format!("{crds}/tenants.mesh.openkcm.io"));
        }
        Action::DeleteHomeCrd { resource } => {
            let crds = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions";
            UserClient::for_home(simulation).delete(&format!("{crds}/{resource}.{}", names::GROUP));
        }
        Action::DeleteAnchor { cluster } => {
            let path =
                format!("/api/v1/namespaces/{SYSTEM_NAMESPACE}/configmaps/krypton-root-owner");
            UserClient::new(simulation, cluster).delete(&path);
        }
        _ => {}
    }
}

fn perform_tenant_action(
    simulation: &mut Simulation,
    (cluster, tenant): (&str, &str),
    action: &TenantAction,
) {
    let collection = format!("{KRYPTON_API}/namespaces/{TENANT_NAMESPACE}/tenants");
    let path = format!("{collection}/{tenant}");
    let release_cluster = find_release_cluster(simulation, cluster, tenant);
    let mut client = UserClient::new(simulation, cluster);
    let annotate = |key: &str, value: Value| json!({"metadata": {"annotations": {key: value}}});
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
            client.patch(&path, &annotate(names::ORPHAN_ANNOTATION, json!("true")));
            client.delete(&path);
        }
        TenantAction::Relabel { number } => {
            let label = format!("{FOREIGN_PREFIX}team");
            let labels = json!({label: format!("team-{number}")});
            client.patch(&path, &json!({"metadata": {"labels": labels}}));
        }
        TenantAction::Pause => {
            client.patch(&path, &annotate(names::PAUSED_ANNOTATION, json!("true")));
        }
        TenantAction::Resume => {
            client.patch(&path, &annotate(names::PAUSED_ANNOTATION, Value::Null));
        }
        TenantAction::Retry { number } => {
            let value = json!(format!("request-{number}"));
            client.patch(
                &path,
                &annotate(names::RECONCILE_REQUESTED_ANNOTATION, value),
            );
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
            client.patch(&path, &annotate(names::ADOPT_ANNOTATION, json!("true")));
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
pub(crate) fn tenant_object(name: &str, placed_on: Option<&str>) -> Value {
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
pub(super) fn orphan_unreadable_tenants(simulation: &mut Simulation, clusters: &[String]) {
    for cluster in clusters {
        for tenant in objects(simulation, cluster, names::GROUP, "tenants") {
            let name = text(&tenant, "/metadata/name").unwrap_or_default();
            if tenant.pointer("/metadata/deletionTimestamp").is_none()
                || !has_unreadable_release(simulation, clusters, name)
            {
                continue;
            }
            let mut client = UserClient::new(simulation, cluster);
            let path = format!("{KRYPTON_API}/namespaces/{TENANT_NAMESPACE}/tenants/{name}");
            let annotations = json!({names::ORPHAN_ANNOTATION: "true"});
            client.patch(&path, &json!({"metadata": {"annotations": annotations}}));
        }
    }
}

/// Deletes the revisions that people have forged. Krypton refuses to work on them.
pub(super) fn delete_forged(simulation: &mut Simulation, clusters: &[String]) {
    for cluster in clusters {
        for secret in objects(simulation, cluster, "", "secrets") {
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
    let annotations = json!({names::RECONCILE_REQUESTED_ANNOTATION: "forged revision deleted"});
    for cluster in clusters {
        let mut client = UserClient::new(simulation, cluster);
        client.patch(&path, &json!({"metadata": {"annotations": &annotations}}));
    }
}

fn has_unreadable_release(simulation: &Simulation, clusters: &[String], workspace: &str) -> bool {
    clusters.iter().any(|cluster| {
        objects(simulation, cluster, "", "secrets")
            .iter()
            .any(|secret| {
                text(secret, "/metadata/namespace") == Some(workspace)
                    && text(secret, "/data/release") == Some(UNREADABLE_RELEASE)
            })
    })
}

/// The cluster where a Tenant's release is: the member that `clusterRef` names, or else the Tenant's cluster.
fn find_release_cluster(simulation: &Simulation, cluster: &str, tenant: &str) -> String {
    let key = Key {
        group: names::GROUP.to_owned(),
        resource: "tenants".to_owned(),
        namespace: TENANT_NAMESPACE.to_owned(),
        name: tenant.to_owned(),
    };
    let object = simulation
        .cluster(cluster)
        .and_then(|cluster| cluster.server.get(&key));
    let member = object.and_then(|object| {
        let name = object.pointer("/spec/clusterRef/secretName")?.as_str()?;
        Some(name.to_owned())
    });
    member.map_or_else(
        || cluster.to_owned(),
        |member| Settings::cluster_for(&member).to_owned(),
    )
}

fn objects(simulation: &Simulation, cluster: &str, group: &str, resource: &str) -> Vec<Arc<Value>> {
    simulation
        .cluster(cluster)
        .map(|cluster| cluster.server.all(group, resource))
        .unwrap_or_default()
}

/// Path of the newest release Secret in a workspace.
fn newest_release(simulation: &Simulation, cluster: &str, workspace: &str) -> Option<String> {
    let secrets = objects(simulation, cluster, "", "secrets");
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
        let objects_of_kind = objects(simulation, cluster, group, resource);
        let object = objects_of_kind.iter().find(|object| {
            text(object, "/metadata/namespace") == Some(workspace)
                && text(object, "/metadata/annotations/meta.helm.sh~1release-name").is_some()
        })?;
        let name = text(object, "/metadata/name")?;
        Some(format!("{api}/namespaces/{workspace}/{resource}/{name}"))
    })
}

fn text<'a>(object: &'a Value, pointer: &str) -> Option<&'a str> {
    object.pointer(pointer)?.as_str()
}

fn perform_member_action(simulation: &mut Simulation, member: &str, action: &MemberAction) {
    let path = format!("{KRYPTON_API}/edgeclusters/{member}");
    let mut client = UserClient::for_home(simulation);
    let spec = match action {
        MemberAction::Pause => json!({"paused": true}),
        MemberAction::Resume => json!({"paused": false}),
        MemberAction::Ban => json!({"banned": true}),
        MemberAction::Unban => json!({"banned": false}),
        MemberAction::Delete { uninstall } => {
            client.patch(
                &path,
                &json!({"spec": {"deletionPolicy": deletion_policy(*uninstall)}}),
            );
            client.delete(&path);
            return;
        }
        MemberAction::Policy { uninstall } => {
            json!({"deletionPolicy": deletion_policy(*uninstall)})
        }
        MemberAction::Allow { namespace } => {
            json!({"allowedNamespaces": namespace.as_ref().map(|name| vec![name])})
        }
        MemberAction::Orphan => {
            let annotations = json!({names::ORPHAN_ANNOTATION: "true"});
            client.patch(&path, &json!({"metadata": {"annotations": annotations}}));
            return;
        }
        MemberAction::Rebuild => return stage::rebuild(simulation, member),
        MemberAction::Replace => return replace_member(simulation, member),
        MemberAction::Rejoin => return rejoin_agent(simulation, member),
        MemberAction::AddTwin { .. } => return add_twin(simulation, member, action),
        MemberAction::AddElsewhere { .. } => return add_elsewhere(simulation, member, action),
        MemberAction::DamageKubeconfig { .. }
        | MemberAction::DeleteKubeconfig { .. }
        | MemberAction::RelabelKubeconfig { .. } => {
            return disturb_kubeconfig(simulation, member, action);
        }
    };
    client.patch(&path, &json!({"spec": spec}));
}

fn deletion_policy(uninstall: bool) -> &'static str {
    if uninstall { "Uninstall" } else { "Retain" }
}

/// Runs `kubectl krypton join --replace`: deletes the EdgeCluster and creates it again. An agent gets a new bundle.
fn replace_member(simulation: &mut Simulation, member: &str) {
    let collection = format!("{KRYPTON_API}/edgeclusters");
    let path = format!("{collection}/{member}");
    let mut client = UserClient::for_home(simulation);
    let Some(mut object) = client.get(&path) else {
        return;
    };
    let annotations = json!({names::ORPHAN_ANNOTATION: "true"});
    client.patch(&path, &json!({"metadata": {"annotations": annotations}}));
    client.delete(&path);
    if let Some(fields) = object.as_object_mut() {
        fields.remove("status");
    }
    if let Some(metadata) = object.get_mut("metadata").and_then(Value::as_object_mut) {
        metadata.remove("finalizers");
    }
    let member = member.to_owned();
    let at = simulation.now() + REPLACEMENT_DELAY;
    simulation.schedule(at, move |simulation| {
        UserClient::for_home(simulation).create(&collection, &without_server_fields(object));
        if simulation.ip(&format!("agent-{member}")).is_some() {
            rejoin_agent(simulation, &member);
            simulation.start(&format!("agent-{member}"));
        }
    });
}

/// Runs `kubectl krypton join`, gives the bundle to the agent, and restarts it.
pub(super) fn rejoin_agent(simulation: &mut Simulation, member: &str) {
    let path = format!("{KRYPTON_API}/edgeclusters/{member}");
    let mut client = UserClient::for_home(simulation);
    let uid = client
        .get(&path)
        .and_then(|object| Some(text(&object, "/metadata/uid")?.to_owned()));
    let host = format!("agent-{member}");
    if let Err(error) = stage::write_join_bundle(simulation, (member, uid.as_deref()), &host) {
        let text = format!("{member} gets no join bundle: {error:#}");
        simulation.record(Event::Fault { text });
    } else if simulation.is_running(&host) {
        simulation.crash(&host, Some(super::RESTART_TIME));
    }
}

fn add_twin(simulation: &mut Simulation, member: &str, action: &MemberAction) {
    let twin = format!("{member}{TWIN_SUFFIX}");
    let collection = format!("/api/v1/namespaces/{SYSTEM_NAMESPACE}/secrets");
    let Some(secret) = stage::kubeconfig_secret(simulation, member, &twin) else {
        return;
    };
    let mut client = UserClient::for_home(simulation);
    client.create(&collection, &secret);
    let action = Action::Member {
        member: member.to_owned(),
        action: action.clone(),
    };
    super::schedule_end(simulation, &action, move |simulation| {
        let mut client = UserClient::for_home(simulation);
        client.delete(&format!("{collection}/{twin}"));
        let uninstall = false;
        perform_member_action(simulation, &twin, &MemberAction::Delete { uninstall });
    });
}

fn add_elsewhere(simulation: &mut Simulation, member: &str, action: &MemberAction) {
    let collection = format!("/api/v1/namespaces/{UNTRUSTED_NAMESPACE}/secrets");
    let new_name = format!("{member}-{UNTRUSTED_NAMESPACE}");
    // A hub that uses one of them talks to a cluster with an agent, if there is one.
    let edges = ["edge-1", "edge-2", "edge-3"];
    let has_agent = |edge: &str| simulation.ip(&format!("agent-{edge}")).is_some();
    let with_agent = edges.into_iter().find(|edge| has_agent(edge));
    let cluster = match has_agent(member) {
        true => member,
        false => with_agent.unwrap_or(member),
    };
    for name in [member, &new_name] {
        if let Some(secret) = stage::kubeconfig_secret(simulation, cluster, name) {
            UserClient::for_home(simulation).create(&collection, &secret);
        }
    }
    let action = Action::Member {
        member: member.to_owned(),
        action: action.clone(),
    };
    let member = member.to_owned();
    super::schedule_end(simulation, &action, move |simulation| {
        let mut client = UserClient::for_home(simulation);
        for name in [&member, &new_name] {
            client.delete(&format!("{collection}/{name}"));
        }
        let uninstall = false;
        perform_member_action(simulation, &new_name, &MemberAction::Delete { uninstall });
    });
}

/// Changes the Secret with a kubeconfig for a time.
fn disturb_kubeconfig(simulation: &mut Simulation, member: &str, action: &MemberAction) {
    let collection = format!("/api/v1/namespaces/{SYSTEM_NAMESPACE}/secrets");
    let path = format!("{collection}/{member}");
    let mut client = UserClient::for_home(simulation);
    let Some(secret) = client.get(&path) else {
        return;
    };
    let label = |value: &str| json!({"metadata": {"labels": {names::DISCOVERY_LABEL: value}}});
    let undo = match action {
        MemberAction::DeleteKubeconfig { .. } => {
            client.delete(&path);
            None
        }
        MemberAction::RelabelKubeconfig { .. } => {
            client.patch(&path, &label("false"));
            Some(label("true"))
        }
        _ => {
            let damaged = STANDARD.encode("not a kubeconfig");
            client.patch(&path, &json!({"data": {names::KUBECONFIG_KEY: damaged}}));
            Some(json!({"data": secret.get("data")}))
        }
    };
    let action = Action::Member {
        member: member.to_owned(),
        action: action.clone(),
    };
    super::schedule_end(simulation, &action, move |simulation| {
        let mut client = UserClient::for_home(simulation);
        match undo {
            Some(patch) => client.patch(&path, &patch),
            None => client.create(&collection, &without_server_fields(secret)),
        };
    });
}

/// Returns the object without the fields that the API server sets.
fn without_server_fields(mut object: Value) -> Value {
    if let Some(metadata) = object.get_mut("metadata").and_then(Value::as_object_mut) {
        for field in [
            "uid",
            "resourceVersion",
            "creationTimestamp",
            "generation",
            "managedFields",
        ] {
            metadata.remove(field);
        }
    }
    object
}

fn perform_deployment_action(simulation: &mut Simulation, name: &str, action: &DeploymentAction) {
    let collection = format!("{KRYPTON_API}/namespaces/{TENANT_NAMESPACE}/kryptondeployments");
    let path = format!("{collection}/{name}");
    let mut client = UserClient::for_home(simulation);
    match action {
        DeploymentAction::Create { region } => {
            let region = region_spec(&mut client, region);
            client.create(&collection, &deployment_object(name, &region));
        }
        DeploymentAction::Edit { number } => {
            let account = json!({"name": "account", "displayName": format!("account {number}")});
            client.patch(&path, &json!({"spec": {"account": account}}));
        }
        DeploymentAction::Move { region } => {
            let region = region_spec(&mut client, region);
            // Without null, a merge patch keeps the previous region's Secret.
            let mut patch = json!({"kubeconfig": null});
            for (field, value) in region.as_object().into_iter().flatten() {
                patch[field] = value.clone();
            }
            client.patch(&path, &json!({"spec": {"region": patch}}));
        }
        DeploymentAction::Delete => {
            client.delete(&path);
        }
        DeploymentAction::Orphan => {
            let annotations = json!({names::ORPHAN_ANNOTATION: "true"});
            client.patch(&path, &json!({"metadata": {"annotations": annotations}}));
            client.delete(&path);
        }
    }
}

/// Returns the `region` field of a KryptonDeployment: the name and, for a member without an agent, the Secret with its
/// kubeconfig. The Secret has the label [`names::OPEN_TO_DEPLOYMENTS_LABEL`].
fn region_spec(client: &mut UserClient<'_>, region: &str) -> Value {
    match client.get(&format!(
        "/api/v1/namespaces/{SYSTEM_NAMESPACE}/secrets/{region}"
    )) {
        Some(_) => {
            let secret = json!({"name": region, "namespace": SYSTEM_NAMESPACE});
            json!({"name": region, "kubeconfig": {"secret": secret}})
        }
        None => json!({"name": region}),
    }
}

fn deployment_object(name: &str, region: &Value) -> Value {
    json!({
        "apiVersion": "mesh.openkcm.io/v1alpha1",
        "kind": "KryptonDeployment",
        "metadata": {"name": name, "namespace": TENANT_NAMESPACE},
        "spec": {"account": {"name": "account"}, "region": region},
    })
}

#[cfg(test)]
mod tests {
    use krypton_crds::krypton_deployment::KryptonDeployment;
    use krypton_crds::tenant::Tenant;

    use super::*;

    #[test]
    fn objects_of_people_fit_the_types() {
        let placed: Tenant = serde_json::from_value(tenant_object("t0", Some("edge-1"))).unwrap();
        assert_eq!(placed.referenced_member(), Some("edge-1"));
        let plain: Tenant = serde_json::from_value(tenant_object("t0", None)).unwrap();
        assert_eq!(plain.referenced_member(), None);
        let object = deployment_object("d0", &json!({"name": "edge-1"}));
        let deployment: KryptonDeployment = serde_json::from_value(object).unwrap();
        assert_eq!(deployment.spec.region.name, "edge-1");
    }

    #[test]
    fn recreated_object_has_no_server_fields() {
        let old =
            json!({"metadata": {"name": "a", "uid": "u", "resourceVersion": "7", "labels": {}}});
        assert_eq!(
            without_server_fields(old),
            json!({"metadata": {"name": "a", "labels": {}}})
        );
    }
}
