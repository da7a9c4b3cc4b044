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
use crate::observe::Event as Seen;
use crate::plan::{
    Action, DeploymentAction, ELSEWHERE, HOME, MemberAction, SYSTEM, Settings, TENANTS, TWIN,
    TenantAction,
};
use crate::stage;

/// User agent of all requests of people.
pub const PEOPLE: &str = "people/1.0";
/// ConfigMap in the hub's namespace with chart values, in the key `values.yaml`. The hub gets it as `--chart-values-from`.
pub const VALUES: &str = "fleet-values";
/// Starts the keys of labels, annotations and finalizers that people write.
pub const FOREIGN: &str = "people.example/";

/// Time in which a replaced EdgeCluster goes.
const REPLACES: Millis = 5_000;
const KRYPTON: &str = "/apis/mesh.openkcm.io/v1alpha1";
const MERGE: &str = "application/merge-patch+json";
const JSON: &str = "application/json";
/// Label on revisions that people have forged.
const FORGED: &str = "people.example/forged";
/// Base64 of base64 of bytes that gzip cannot decode.
const UNREADABLE: &str = "SDRzSUFBQUFBQUFBLzJSaGJXRm5aV1E9";
/// Resources of which a release may contain objects.
const RELEASED: [(&str, &str, &str); 5] = [
    ("apps", "deployments", "/apis/apps/v1"),
    ("apps", "statefulsets", "/apis/apps/v1"),
    ("", "services", "/api/v1"),
    ("", "configmaps", "/api/v1"),
    ("", "secrets", "/api/v1"),
];

/// A person with a client for one cluster. No link delays requests, and no fault of the API server affects them.
#[derive(Debug)]
pub struct Person<'a> {
    pub simulation: &'a mut Simulation,
    pub cluster: &'a str,
}

impl<'a> Person<'a> {
    /// A person with a client for the home cluster.
    pub fn at_home(simulation: &'a mut Simulation) -> Self {
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
        self.send(Method::PATCH, path, MERGE, patch).0
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
pub(super) fn act(simulation: &mut Simulation, action: &Action) {
    match action {
        Action::Tenant {
            cluster,
            tenant,
            what,
        } => on_tenant(simulation, (cluster, tenant), what),
        Action::Member { member, what } => on_member(simulation, member, what),
        Action::Deployment { name, what } => on_deployment(simulation, name, what),
        Action::Values { number } => {
            let data = json!({"values.yaml": format!("message: fleet-{number}\n")});
            let mut person = Person::at_home(simulation);
            let all = format!("/api/v1/namespaces/{SYSTEM}/configmaps");
            if person.patch(&format!("{all}/{VALUES}"), &json!({"data": data})) == 404 {
                let metadata = json!({"name": VALUES, "namespace": SYSTEM});
                let new = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data});
                person.create(&all, &new);
            }
        }
        Action::RotateCa => {
            let annotations =
                json!({ca_rotation::REQUEST_ANNOTATION: simulation.wall().to_string()});
            let path = format!("/api/v1/namespaces/{SYSTEM}/secrets/{}", names::CA_SECRET);
            Person::at_home(simulation)
                .patch(&path, &json!({"metadata": {"annotations": annotations}}));
        }
        Action::DeleteCrd { cluster } => {
            let crds = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions";
            Person {
                simulation,
                cluster,
            }
            .delete(&format!("{crds}/tenants.mesh.openkcm.io"));
        }
        Action::DeleteHomeCrd { resource } => {
            let crds = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions";
            Person::at_home(simulation).delete(&format!("{crds}/{resource}.{}", names::GROUP));
        }
        Action::DeleteAnchor { cluster } => {
            let path = format!("/api/v1/namespaces/{SYSTEM}/configmaps/krypton-root-owner");
            Person {
                simulation,
                cluster,
            }
            .delete(&path);
        }
        _ => {}
    }
}

fn on_tenant(simulation: &mut Simulation, (cluster, tenant): (&str, &str), what: &TenantAction) {
    let all = format!("{KRYPTON}/namespaces/{TENANTS}/tenants");
    let path = format!("{all}/{tenant}");
    let released = cluster_of_release(simulation, cluster, tenant);
    let mut person = Person {
        simulation,
        cluster,
    };
    let annotate = |key: &str, value: Value| json!({"metadata": {"annotations": {key: value}}});
    match what {
        TenantAction::Create { placed } => {
            person.create(&all, &tenant_object(tenant, placed.as_deref()));
        }
        TenantAction::Edit { number } => {
            let values = json!({"message": format!("tenant-{number}")});
            person.patch(&path, &json!({"spec": {"values": values}}));
        }
        TenantAction::Delete => {
            person.delete(&path);
        }
        TenantAction::Orphan => {
            person.patch(&path, &annotate(names::ORPHAN_ANNOTATION, json!("true")));
            person.delete(&path);
        }
        TenantAction::Relabel { number } => {
            let label = format!("{FOREIGN}team");
            let labels = json!({label: format!("team-{number}")});
            person.patch(&path, &json!({"metadata": {"labels": labels}}));
        }
        TenantAction::Pause => {
            person.patch(&path, &annotate(names::PAUSED_ANNOTATION, json!("true")));
        }
        TenantAction::Resume => {
            person.patch(&path, &annotate(names::PAUSED_ANNOTATION, Value::Null));
        }
        TenantAction::Retry { number } => {
            let value = json!(format!("request-{number}"));
            person.patch(
                &path,
                &annotate(names::RECONCILE_REQUESTED_ANNOTATION, value),
            );
        }
        TenantAction::AddForeign => set_foreign(&mut person, &path, true),
        TenantAction::RemoveForeign => set_foreign(&mut person, &path, false),
        TenantAction::Name { member } => {
            let spec = json!({"clusterRef": {"secretName": member}});
            person.patch(&path, &json!({"spec": spec}));
        }
        TenantAction::Rewrite { member } => {
            person.replace(&path, &tenant_object(tenant, Some(member)));
        }
        TenantAction::Adopt => {
            person.patch(&path, &annotate(names::ADOPT_ANNOTATION, json!("true")));
        }
        TenantAction::DeleteRelease
        | TenantAction::DamageRelease
        | TenantAction::ForgeRelease
        | TenantAction::DeleteNamespace
        | TenantAction::DeleteObject
        | TenantAction::AddOccupant => damage(simulation, (&released, tenant), what),
    }
}

/// A Tenant as people create it.
pub(crate) fn tenant_object(name: &str, placed: Option<&str>) -> Value {
    let spec = match placed {
        Some(member) => json!({"clusterRef": {"secretName": member}}),
        None => json!({}),
    };
    json!({
        "apiVersion": "mesh.openkcm.io/v1alpha1",
        "kind": "Tenant",
        "metadata": {"name": name, "namespace": TENANTS},
        "spec": spec,
    })
}

/// Adds or removes a finalizer, a label and an annotation.
fn set_foreign(person: &mut Person<'_>, path: &str, present: bool) {
    let Some(object) = person.get(path) else {
        return;
    };
    let finalizer = format!("{FOREIGN}hold");
    let listed = object.pointer("/metadata/finalizers");
    let listed = listed.and_then(Value::as_array).cloned();
    let mut finalizers = listed.unwrap_or_default();
    finalizers.retain(|each| each.as_str() != Some(&finalizer));
    // The API server rejects new finalizers of an object in deletion.
    if present && object.pointer("/metadata/deletionTimestamp").is_none() {
        finalizers.push(json!(finalizer));
    }
    let value = if present { json!("kept") } else { Value::Null };
    let key = format!("{FOREIGN}mark");
    let patch = json!({"metadata": {
        "resourceVersion": object.pointer("/metadata/resourceVersion"),
        "finalizers": finalizers,
        "labels": {&key: value},
        "annotations": {&key: value},
    }});
    person.patch(path, &patch);
}

fn damage(simulation: &mut Simulation, (cluster, tenant): (&str, &str), what: &TenantAction) {
    let path = match what {
        TenantAction::DeleteRelease | TenantAction::DamageRelease | TenantAction::ForgeRelease => {
            newest_release(simulation, cluster, tenant)
        }
        TenantAction::DeleteObject => first_object(simulation, cluster, tenant),
        _ => Some(format!("/api/v1/namespaces/{tenant}")),
    };
    let Some(path) = path else { return };
    let mut person = Person {
        simulation,
        cluster,
    };
    match what {
        TenantAction::AddOccupant => {
            let labels = json!({format!("{FOREIGN}occupant"): "true"});
            let object = json!({
                "apiVersion": "v1",
                "kind": "ConfigMap",
                "metadata": {"name": "occupant", "namespace": tenant, "labels": labels},
                "data": {"of": "a person"},
            });
            person.create(&format!("{path}/configmaps"), &object);
        }
        TenantAction::DamageRelease => {
            person.patch(&path, &json!({"data": {"release": UNREADABLE}}));
        }
        TenantAction::ForgeRelease => {
            forge(&mut person, &path);
        }
        _ => {
            person.delete(&path);
        }
    }
}

/// Creates the revision after the one at `path`, with the same content.
fn forge(person: &mut Person<'_>, path: &str) -> Option<()> {
    let newest = person.get(path)?;
    let (all, name) = path.rsplit_once('/')?;
    let (base, version) = name.rsplit_once(".v")?;
    let next = version.parse::<u32>().ok()? + 1;
    let mut labels = newest.pointer("/metadata/labels")?.clone();
    labels["version"] = json!(next.to_string());
    labels[FORGED] = json!("true");
    let forged = json!({
        "apiVersion": "v1",
        "kind": "Secret",
        "type": newest.get("type")?,
        "metadata": {"name": format!("{base}.v{next}"), "labels": labels},
        "data": newest.get("data")?,
    });
    person.create(all, &forged);
    Some(())
}

/// Orphans the Tenants whose deletion waits because Krypton cannot decode their release, as its message asks people to.
pub(super) fn give_up_unreadable(simulation: &mut Simulation, clusters: &[String]) {
    for cluster in clusters {
        for tenant in objects(simulation, cluster, names::GROUP, "tenants") {
            let name = text(&tenant, "/metadata/name").unwrap_or_default();
            if tenant.pointer("/metadata/deletionTimestamp").is_none()
                || !has_unreadable(simulation, clusters, name)
            {
                continue;
            }
            let mut person = Person {
                simulation,
                cluster,
            };
            let path = format!("{KRYPTON}/namespaces/{TENANTS}/tenants/{name}");
            let annotations = json!({names::ORPHAN_ANNOTATION: "true"});
            person.patch(&path, &json!({"metadata": {"annotations": annotations}}));
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
                    .is_some_and(|labels| labels.get(FORGED).is_some()),
                text(&secret, "/metadata/namespace"),
                text(&secret, "/metadata/name"),
            ) {
                let mut person = Person {
                    simulation,
                    cluster,
                };
                person.delete(&format!("/api/v1/namespaces/{namespace}/secrets/{name}"));
                request_retry(simulation, clusters, namespace);
            }
        }
    }
}

/// Without a request, Krypton repeats a permanent failure only after 15 minutes.
fn request_retry(simulation: &mut Simulation, clusters: &[String], tenant: &str) {
    let path = format!("{KRYPTON}/namespaces/{TENANTS}/tenants/{tenant}");
    let annotations = json!({names::RECONCILE_REQUESTED_ANNOTATION: "forged revision deleted"});
    for cluster in clusters {
        let mut person = Person {
            simulation,
            cluster,
        };
        person.patch(&path, &json!({"metadata": {"annotations": &annotations}}));
    }
}

fn has_unreadable(simulation: &Simulation, clusters: &[String], workspace: &str) -> bool {
    clusters.iter().any(|cluster| {
        objects(simulation, cluster, "", "secrets")
            .iter()
            .any(|secret| {
                text(secret, "/metadata/namespace") == Some(workspace)
                    && text(secret, "/data/release") == Some(UNREADABLE)
            })
    })
}

/// The cluster where a Tenant's release is: the member that `clusterRef` names, or else the Tenant's cluster.
fn cluster_of_release(simulation: &Simulation, cluster: &str, tenant: &str) -> String {
    let key = Key {
        group: names::GROUP.to_owned(),
        resource: "tenants".to_owned(),
        namespace: TENANTS.to_owned(),
        name: tenant.to_owned(),
    };
    let object = simulation
        .cluster(cluster)
        .and_then(|cluster| cluster.server.get(&key));
    let member = object.and_then(|object| {
        let member = object.pointer("/spec/clusterRef/secretName")?.as_str()?;
        Some(member.to_owned())
    });
    member.map_or_else(
        || cluster.to_owned(),
        |member| Settings::cluster(&member).to_owned(),
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
    RELEASED.iter().find_map(|(group, resource, api)| {
        let all = objects(simulation, cluster, group, resource);
        let found = all.iter().find(|object| {
            text(object, "/metadata/namespace") == Some(workspace)
                && text(object, "/metadata/annotations/meta.helm.sh~1release-name").is_some()
        })?;
        let name = text(found, "/metadata/name")?;
        Some(format!("{api}/namespaces/{workspace}/{resource}/{name}"))
    })
}

fn text<'a>(object: &'a Value, pointer: &str) -> Option<&'a str> {
    object.pointer(pointer)?.as_str()
}

fn on_member(simulation: &mut Simulation, member: &str, what: &MemberAction) {
    let path = format!("{KRYPTON}/edgeclusters/{member}");
    let mut person = Person::at_home(simulation);
    let spec = match what {
        MemberAction::Pause => json!({"paused": true}),
        MemberAction::Resume => json!({"paused": false}),
        MemberAction::Ban => json!({"banned": true}),
        MemberAction::Unban => json!({"banned": false}),
        MemberAction::Delete { uninstall } => {
            person.patch(
                &path,
                &json!({"spec": {"deletionPolicy": policy(*uninstall)}}),
            );
            person.delete(&path);
            return;
        }
        MemberAction::Policy { uninstall } => json!({"deletionPolicy": policy(*uninstall)}),
        MemberAction::Allow { namespace } => {
            json!({"allowedNamespaces": namespace.as_ref().map(|name| vec![name])})
        }
        MemberAction::Orphan => {
            let annotations = json!({names::ORPHAN_ANNOTATION: "true"});
            person.patch(&path, &json!({"metadata": {"annotations": annotations}}));
            return;
        }
        MemberAction::Rebuild => return stage::rebuild(simulation, member),
        MemberAction::Replace => return replace(simulation, member),
        MemberAction::Rejoin => return rejoin(simulation, member),
        MemberAction::AddTwin { .. } => return add_twin(simulation, member, what),
        MemberAction::AddElsewhere { .. } => return add_elsewhere(simulation, member, what),
        MemberAction::DamageKubeconfig { .. }
        | MemberAction::DeleteKubeconfig { .. }
        | MemberAction::RelabelKubeconfig { .. } => {
            return kubeconfig(simulation, member, what);
        }
    };
    person.patch(&path, &json!({"spec": spec}));
}

fn policy(uninstall: bool) -> &'static str {
    if uninstall { "Uninstall" } else { "Retain" }
}

/// Runs `kubectl krypton join --replace`: deletes the EdgeCluster and creates it again. An agent gets a new bundle.
fn replace(simulation: &mut Simulation, member: &str) {
    let all = format!("{KRYPTON}/edgeclusters");
    let path = format!("{all}/{member}");
    let mut person = Person::at_home(simulation);
    let Some(mut object) = person.get(&path) else {
        return;
    };
    let annotations = json!({names::ORPHAN_ANNOTATION: "true"});
    person.patch(&path, &json!({"metadata": {"annotations": annotations}}));
    person.delete(&path);
    if let Some(fields) = object.as_object_mut() {
        fields.remove("status");
    }
    if let Some(metadata) = object.get_mut("metadata").and_then(Value::as_object_mut) {
        metadata.remove("finalizers");
    }
    let member = member.to_owned();
    let at = simulation.now() + REPLACES;
    simulation.at(at, move |simulation| {
        Person::at_home(simulation).create(&all, &as_new(object));
        if simulation.ip(&format!("agent-{member}")).is_some() {
            rejoin(simulation, &member);
            simulation.start(&format!("agent-{member}"));
        }
    });
}

/// Runs `kubectl krypton join`, gives the bundle to the agent, and restarts it.
pub(super) fn rejoin(simulation: &mut Simulation, member: &str) {
    let path = format!("{KRYPTON}/edgeclusters/{member}");
    let mut person = Person::at_home(simulation);
    let uid = person
        .get(&path)
        .and_then(|object| Some(text(&object, "/metadata/uid")?.to_owned()));
    let host = format!("agent-{member}");
    if let Err(error) = stage::invite(simulation, (member, uid.as_deref()), &host) {
        let text = format!("{member} gets no join bundle: {error:#}");
        simulation.observe(Seen::Fault { text });
    } else if simulation.runs(&host) {
        simulation.crash(&host, Some(super::RESTART));
    }
}

fn add_twin(simulation: &mut Simulation, member: &str, what: &MemberAction) {
    let twin = format!("{member}{TWIN}");
    let all = format!("/api/v1/namespaces/{SYSTEM}/secrets");
    let Some(secret) = stage::kubeconfig_secret(simulation, member, &twin) else {
        return;
    };
    let mut person = Person::at_home(simulation);
    person.create(&all, &secret);
    let action = Action::Member {
        member: member.to_owned(),
        what: what.clone(),
    };
    super::end_later(simulation, &action, move |simulation| {
        let mut person = Person::at_home(simulation);
        person.delete(&format!("{all}/{twin}"));
        let uninstall = false;
        on_member(simulation, &twin, &MemberAction::Delete { uninstall });
    });
}

fn add_elsewhere(simulation: &mut Simulation, member: &str, what: &MemberAction) {
    let all = format!("/api/v1/namespaces/{ELSEWHERE}/secrets");
    let other = format!("{member}-{ELSEWHERE}");
    // A hub that uses one of them talks to a cluster with an agent, if there is one.
    let edges = ["edge-1", "edge-2", "edge-3"];
    let has_agent = |edge: &str| simulation.ip(&format!("agent-{edge}")).is_some();
    let with_agent = edges.into_iter().find(|edge| has_agent(edge));
    let cluster = match has_agent(member) {
        true => member,
        false => with_agent.unwrap_or(member),
    };
    for name in [member, &other] {
        if let Some(secret) = stage::kubeconfig_secret(simulation, cluster, name) {
            Person::at_home(simulation).create(&all, &secret);
        }
    }
    let action = Action::Member {
        member: member.to_owned(),
        what: what.clone(),
    };
    let member = member.to_owned();
    super::end_later(simulation, &action, move |simulation| {
        let mut person = Person::at_home(simulation);
        for name in [&member, &other] {
            person.delete(&format!("{all}/{name}"));
        }
        let uninstall = false;
        on_member(simulation, &other, &MemberAction::Delete { uninstall });
    });
}

/// Changes the Secret with a kubeconfig for a time.
fn kubeconfig(simulation: &mut Simulation, member: &str, what: &MemberAction) {
    let all = format!("/api/v1/namespaces/{SYSTEM}/secrets");
    let path = format!("{all}/{member}");
    let mut person = Person::at_home(simulation);
    let Some(secret) = person.get(&path) else {
        return;
    };
    let label = |value: &str| json!({"metadata": {"labels": {names::DISCOVERY_LABEL: value}}});
    let undo = match what {
        MemberAction::DeleteKubeconfig { .. } => {
            person.delete(&path);
            None
        }
        MemberAction::RelabelKubeconfig { .. } => {
            person.patch(&path, &label("false"));
            Some(label("true"))
        }
        _ => {
            let damaged = STANDARD.encode("not a kubeconfig");
            person.patch(&path, &json!({"data": {names::KUBECONFIG_KEY: damaged}}));
            Some(json!({"data": secret.get("data")}))
        }
    };
    let action = Action::Member {
        member: member.to_owned(),
        what: what.clone(),
    };
    super::end_later(simulation, &action, move |simulation| {
        let mut person = Person::at_home(simulation);
        match undo {
            Some(patch) => person.patch(&path, &patch),
            None => person.create(&all, &as_new(secret)),
        };
    });
}

/// The object without the fields that the API server sets.
fn as_new(mut object: Value) -> Value {
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

fn on_deployment(simulation: &mut Simulation, name: &str, what: &DeploymentAction) {
    let all = format!("{KRYPTON}/namespaces/{TENANTS}/kryptondeployments");
    let path = format!("{all}/{name}");
    let mut person = Person::at_home(simulation);
    match what {
        DeploymentAction::Create { region } => {
            let region = region_of(&mut person, region);
            person.create(&all, &deployment_object(name, &region));
        }
        DeploymentAction::Edit { number } => {
            let account = json!({"name": "account", "displayName": format!("account {number}")});
            person.patch(&path, &json!({"spec": {"account": account}}));
        }
        DeploymentAction::Move { region } => {
            let region = region_of(&mut person, region);
            // Without null, a merge patch keeps the previous region's Secret.
            let mut patch = json!({"kubeconfig": null});
            for (field, value) in region.as_object().into_iter().flatten() {
                patch[field] = value.clone();
            }
            person.patch(&path, &json!({"spec": {"region": patch}}));
        }
        DeploymentAction::Delete => {
            person.delete(&path);
        }
        DeploymentAction::Orphan => {
            let annotations = json!({names::ORPHAN_ANNOTATION: "true"});
            person.patch(&path, &json!({"metadata": {"annotations": annotations}}));
            person.delete(&path);
        }
    }
}

/// Names a region and, for a member without an agent, the Secret with its kubeconfig. The Secret has the label
/// [`names::OPEN_TO_DEPLOYMENTS_LABEL`].
fn region_of(person: &mut Person<'_>, region: &str) -> Value {
    match person.get(&format!("/api/v1/namespaces/{SYSTEM}/secrets/{region}")) {
        Some(_) => {
            let secret = json!({"name": region, "namespace": SYSTEM});
            json!({"name": region, "kubeconfig": {"secret": secret}})
        }
        None => json!({"name": region}),
    }
}

fn deployment_object(name: &str, region: &Value) -> Value {
    json!({
        "apiVersion": "mesh.openkcm.io/v1alpha1",
        "kind": "KryptonDeployment",
        "metadata": {"name": name, "namespace": TENANTS},
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
        assert_eq!(placed.names_member(), Some("edge-1"));
        let plain: Tenant = serde_json::from_value(tenant_object("t0", None)).unwrap();
        assert_eq!(plain.names_member(), None);
        let object = deployment_object("d0", &json!({"name": "edge-1"}));
        let deployment: KryptonDeployment = serde_json::from_value(object).unwrap();
        assert_eq!(deployment.spec.region.name, "edge-1");
    }

    #[test]
    fn recreated_object_has_no_server_fields() {
        let old =
            json!({"metadata": {"name": "a", "uid": "u", "resourceVersion": "7", "labels": {}}});
        assert_eq!(
            as_new(old),
            json!({"metadata": {"name": "a", "labels": {}}})
        );
    }
}
