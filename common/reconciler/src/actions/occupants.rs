//! Lists the objects that the deletion of a workspace would take along and that the release did not create.
//!
//! Reads metadata only, with Helm's rights. If a kind cannot be listed, the namespace counts as occupied.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use krypton_crds::tenant::Tenant;
use krypton_helm::releases::labels::ReleaseKey;
use krypton_runtime::call::call;
use krypton_runtime::events::ObjectEvent;
use kube::api::{Api, DynamicObject, ListParams};
use kube::core::discovery::v2::{APIGroupDiscovery, APIGroupDiscoveryList, APIResourceDiscovery};
use kube::core::{ApiResource, ObjectList, PartialObjectMeta};
use kube::{Client, Resource as _, ResourceExt as _};

use super::leftovers::bears_marks;
use super::{ActionError, ActionRunner, Job};
use crate::index::CrdState;

/// Objects in an answer.
const PAGE: u32 = 50;
/// Pages of one kind; a namespace with more of them is not judged further.
const PAGES: u32 = 20;
/// Objects in the event.
const SHOWN: usize = 10;
/// Kinds that only describe other objects or what happened to them.
const TRACES: [(&str, &str); 5] = [
    ("", "endpoints"),
    ("", "events"),
    ("coordination.k8s.io", "leases"),
    ("discovery.k8s.io", "endpointslices"),
    ("events.k8s.io", "events"),
];
/// How the names of API groups end that serve measurements and keep no objects.
const METRICS: &str = "metrics.k8s.io";
/// Objects that Kubernetes, OpenShift and Istio create in every namespace.
const EVERYWHERE: [(&str, &str); 9] = [
    ("configmaps", "istio-ca-root-cert"),
    ("configmaps", "kube-root-ca.crt"),
    ("configmaps", "openshift-service-ca.crt"),
    ("rolebindings", "system:deployers"),
    ("rolebindings", "system:image-builders"),
    ("rolebindings", "system:image-pullers"),
    ("serviceaccounts", "builder"),
    ("serviceaccounts", "default"),
    ("serviceaccounts", "deployer"),
];
const TOKEN_OF: &str = "kubernetes.io/service-account.name";

/// The kinds that a cluster serves, and whether their objects are in namespaces, by group and kind.
type Scopes = BTreeMap<(String, String), bool>;

/// The kinds to list in a namespace.
#[derive(Debug, Default, PartialEq)]
struct Kinds {
    listed: Vec<ApiResource>,
    /// Kinds that cannot be listed, as the event names them.
    hidden: Vec<String>,
    scopes: Scopes,
}

/// Decides which objects keep a workspace.
struct Judge<'a> {
    release: &'a ReleaseKey,
    /// The Tenant that is being deleted, where it lives in its own workspace.
    own: Option<&'a str>,
    scopes: &'a Scopes,
}

impl ActionRunner {
    /// Returns whether the workspace stays, and reports the objects that keep it.
    pub(super) async fn is_occupied(&self, job: &Job) -> Result<bool, ActionError> {
        let client = &self.member.helm_client;
        let kinds = served(client).await?;
        // Discovery may lag behind the CRDs.
        let tenants = (
            Tenant::group(&()).into_owned(),
            Tenant::kind(&()).into_owned(),
        );
        if job.tenants != CrdState::Missing && !kinds.scopes.contains_key(&tenants) {
            return Err(ActionError::Conflict);
        }
        let own = job.owner.tenant().and_then(|tenant| tenant.uid());
        let judge = Judge {
            release: &job.release,
            // A member that leaves keeps its Tenants.
            own: own.as_deref().filter(|_| !job.desired.retire),
            scopes: &kinds.scopes,
        };
        let mut found = kinds.hidden.clone();
        for kind in &kinds.listed {
            if found.len() > SHOWN {
                break;
            }
            found.extend(look(client, kind, &judge).await?);
        }
        if found.is_empty() {
            return Ok(false);
        }
        let told = ObjectEvent {
            warning: true,
            reason: "WorkspaceKept",
            message: message(&job.release.namespace, &found),
        };
        self.tell(&job.owner, told);
        Ok(true)
    }
}

fn message(namespace: &str, found: &[String]) -> String {
    let shown: Vec<&str> = found.iter().take(SHOWN).map(String::as_str).collect();
    let more = if found.len() > SHOWN {
        ", and more"
    } else {
        ""
    };
    format!(
        "kept namespace {namespace}, which is not empty: {}{more}; delete it yourself if nothing in it is needed",
        shown.join(", ")
    )
}

/// All kinds of the cluster, by aggregated discovery.
async fn served(client: &Client) -> Result<Kinds, ActionError> {
    let what = "listing the kinds of the cluster";
    let core = async { refused(client.list_core_api_versions_aggregated().await) };
    let others = async { refused(client.list_api_groups_aggregated().await) };
    let lists = [call(what, core).await?, call(what, others).await?];
    Ok(kinds(lists.map(Result::unwrap_or_default)))
}

fn kinds(lists: [APIGroupDiscoveryList; 2]) -> Kinds {
    let mut kinds = Kinds::default();
    // An old apiserver, or one that lies, answers without any group.
    if lists.iter().any(|list| list.items.is_empty()) {
        kinds
            .hidden
            .push("kinds that the cluster does not name".to_owned());
    }
    for group in lists.into_iter().flat_map(|list| list.items) {
        kinds.add(group);
    }
    kinds
}

impl Kinds {
    fn add(&mut self, group: APIGroupDiscovery) {
        let name = group
            .metadata
            .and_then(|meta| meta.name)
            .unwrap_or_default();
        // Versions come in the order of preference.
        for version in group.versions {
            let number = version.version.unwrap_or_default();
            // One that has never answered may serve anything.
            let unknown = version.resources.is_empty() || version.resources.iter().any(may_hold);
            let stale = version.freshness.as_deref() == Some("Stale");
            if stale && unknown && !name.ends_with(METRICS) {
                self.hidden
                    .push(format!("objects of {name}/{number} (API not available)"));
            }
            for resource in version.resources {
                self.add_resource(&name, &number, resource);
            }
        }
    }

    fn add_resource(&mut self, group: &str, version: &str, resource: APIResourceDiscovery) {
        let holds = may_hold(&resource);
        let listed = resource.verbs.iter().any(|verb| verb == "list");
        let kind = resource.response_kind.and_then(|kind| kind.kind);
        let kind = kind.unwrap_or_default();
        let plural = resource.resource.unwrap_or_default();
        let namespaced = resource.scope.as_deref() == Some("Namespaced");
        self.scopes
            .insert((group.to_owned(), kind.clone()), namespaced);
        let mut known = self.listed.iter();
        let known = known.any(|known| known.group == group && known.plural == plural);
        if known || !holds || TRACES.contains(&(group, plural.as_str())) {
            return;
        }
        if !listed {
            self.hidden.push(format!("{plural} (kind without lists)"));
            return;
        }
        self.listed.push(ApiResource {
            api_version: match group {
                "" => version.to_owned(),
                group => format!("{group}/{version}"),
            },
            group: group.to_owned(),
            version: version.to_owned(),
            kind,
            plural,
        });
    }
}

/// Whether a namespace takes objects of this kind along. Kubernetes deletes no others with it.
fn may_hold(resource: &APIResourceDiscovery) -> bool {
    let deleted = resource.verbs.iter().any(|verb| verb == "delete");
    deleted && resource.scope.as_deref() == Some("Namespaced")
}

/// The objects of one kind that keep the namespace.
async fn look(
    client: &Client,
    kind: &ApiResource,
    judge: &Judge<'_>,
) -> Result<Vec<String>, ActionError> {
    let api: Api<DynamicObject> =
        Api::namespaced_with(client.clone(), &judge.release.namespace, kind);
    let mut params = ListParams::default().limit(PAGE);
    let mut found = Vec::new();
    for _ in 0..PAGES {
        let what = format!("listing {}", kind.plural);
        let listing = async { refused(api.list_metadata(&params).await) };
        // After a 404, discovery runs again and shows whether the cluster serves the kind.
        let list: ObjectList<PartialObjectMeta<DynamicObject>> = match call(what, listing).await? {
            Ok(list) => list,
            Err(why) => return Ok(vec![format!("{} ({why})", kind.plural)]),
        };
        let objects = list.items.iter().map(|object| &object.metadata);
        found.extend(objects.filter_map(|object| judge.reason(kind, object)));
        let next = list.metadata.continue_.filter(|next| !next.is_empty());
        match next {
            Some(next) if found.len() <= SHOWN => params = params.continue_token(&next),
            _ => return Ok(found),
        }
    }
    found.push(format!("{} (too many to look at)", kind.plural));
    Ok(found)
}

/// Separates refusals that last from errors that a retry may overcome.
fn refused<T>(answer: kube::Result<T>) -> kube::Result<Result<T, &'static str>> {
    match answer {
        Ok(list) => Ok(Ok(list)),
        Err(kube::Error::Api(status)) if status.code == 403 => Ok(Err("forbidden")),
        Err(kube::Error::Api(status))
            if [405, 406].contains(&status.code)
                || status.message.contains("conversion webhook") =>
        {
            Ok(Err("cannot be listed"))
        }
        Err(error) => Err(error),
    }
}

impl Judge<'_> {
    /// Names an object that keeps the namespace, and the reason.
    fn reason(&self, kind: &ApiResource, object: &ObjectMeta) -> Option<String> {
        let name = object.name.as_deref().unwrap_or_default();
        let tenant = kind.kind == Tenant::kind(&()) && kind.group == Tenant::group(&());
        let going = object.deletion_timestamp.is_some() && !tenant;
        if going
            || (object.uid.is_some() && object.uid.as_deref() == self.own)
            || EVERYWHERE.contains(&(kind.plural.as_str(), name))
            || self.is_of_krypton(kind, name)
            || is_token(object, name)
        {
            return None;
        }
        let annotation = |key: &str| object.annotations.as_ref()?.get(key).map(String::as_str);
        let of_release = bears_marks(object, self.release) || annotation("helm.sh/hook").is_some();
        let why = if of_release && annotation("helm.sh/resource-policy") == Some("keep") {
            "kept by the chart"
        } else if kind.plural == "persistentvolumeclaims" && !self.is_owned(object) {
            "holds data"
        } else if of_release || self.is_owned(object) {
            return None;
        } else {
            "not created by the release"
        };
        Some(format!("{} {name} ({why})", kind.kind))
    }

    /// Whether the object goes with another object of the namespace, which has its own verdict.
    fn is_owned(&self, object: &ObjectMeta) -> bool {
        let within = |owner: &OwnerReference| {
            let group = owner
                .api_version
                .rsplit_once('/')
                .map_or("", |(group, _)| group);
            let kind = (group.to_owned(), owner.kind.clone());
            self.scopes.get(&kind) == Some(&true)
        };
        object.owner_references.iter().flatten().any(within)
    }

    /// Whether it is a copy of a release that could not be decoded.
    fn is_of_krypton(&self, kind: &ApiResource, name: &str) -> bool {
        let copy = format!("unreadable.{}.v", self.release.name);
        kind.group.is_empty() && kind.plural == "secrets" && name.starts_with(&copy)
    }
}

/// Whether it is a token that Kubernetes before 1.24 created for each service account.
fn is_token(object: &ObjectMeta, name: &str) -> bool {
    let annotations = object.annotations.as_ref();
    let account = annotations.and_then(|annotations| annotations.get(TOKEN_OF));
    account.is_some_and(|account| name.starts_with(&format!("{account}-token-")))
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use kube::client::Body;
    use serde_json::{Value, json};

    use super::*;

    pub(super) fn release() -> ReleaseKey {
        ReleaseKey {
            namespace: "acme".to_owned(),
            name: "tenant-acme-edge-1".to_owned(),
        }
    }

    /// Objects by resource, and what discovery lists of each: kind, scope and verbs.
    fn resource(plural: &str, kind: &str, scope: &str, verbs: &[&str]) -> Value {
        json!({"resource": plural, "scope": scope, "verbs": verbs, "responseKind":
            {"group": "", "version": "v1", "kind": kind}})
    }

    fn discovered(path: &str) -> Value {
        let all = ["list", "delete"];
        let of_core = [
            resource("configmaps", "ConfigMap", "Namespaced", &all),
            resource(
                "persistentvolumeclaims",
                "PersistentVolumeClaim",
                "Namespaced",
                &all,
            ),
            resource("secrets", "Secret", "Namespaced", &all),
            resource("serviceaccounts", "ServiceAccount", "Namespaced", &all),
            resource("services", "Service", "Namespaced", &all),
            resource("pods", "Pod", "Namespaced", &all),
            resource("events", "Event", "Namespaced", &all),
            resource("endpoints", "Endpoints", "Namespaced", &all),
            resource("nodes", "Node", "Cluster", &all),
        ];
        let tenants = [resource("tenants", "Tenant", "Namespaced", &all)];
        let metrics = [resource("pods", "PodMetrics", "Namespaced", &["list"])];
        let apps = [
            resource("deployments", "Deployment", "Namespaced", &all),
            resource("replicasets", "ReplicaSet", "Namespaced", &all),
        ];
        let group = |name: &str, resources: Value| {
            json!({"metadata": {"name": name},
                "versions": [{"version": "v1", "freshness": "Current", "resources": resources}]})
        };
        match path {
            "/api" => json!({"items": [group("", json!(of_core))]}),
            "/apis" => json!({"items": [
                group("mesh.openkcm.io", json!(tenants)),
                group("metrics.k8s.io", json!(metrics)),
                group("apps", json!(apps)),
            ]}),
            other => panic!("{other}"),
        }
    }

    fn known() -> Kinds {
        kinds(["/api", "/apis"].map(|path| serde_json::from_value(discovered(path)).unwrap()))
    }

    fn kind(plural: &str) -> ApiResource {
        let found = known().listed.into_iter();
        let mut found = found.filter(|kind| kind.plural == plural);
        found.next().unwrap()
    }

    fn judged(plural: &str, metadata: &Value) -> Option<String> {
        let (release, kinds) = (release(), known());
        let judge = Judge {
            release: &release,
            own: Some("own"),
            scopes: &kinds.scopes,
        };
        judge.reason(
            &kind(plural),
            &serde_json::from_value(metadata.clone()).unwrap(),
        )
    }

    fn marked(name: &str, more: &Value) -> Value {
        let mut annotations = json!({
            "meta.helm.sh/release-name": release().name,
            "meta.helm.sh/release-namespace": "acme",
        });
        let more = more.as_object().unwrap().clone();
        annotations.as_object_mut().unwrap().extend(more);
        json!({"name": name, "annotations": annotations,
            "labels": {"app.kubernetes.io/managed-by": "Helm"}})
    }

    #[test]
    fn foreign_kept_and_data_objects_occupy_namespace() {
        let owned = |kind: &str| {
            json!({"name": "x", "ownerReferences":
            [{"apiVersion": "apps/v1", "kind": kind, "name": "y", "uid": "z"}]})
        };
        let keep = json!({"helm.sh/resource-policy": "keep"});
        let hook = json!({"name": "x", "annotations": {"helm.sh/hook": "pre-install"}});
        let by_node = json!({"name": "x", "ownerReferences":
            [{"apiVersion": "v1", "kind": "Node", "name": "y", "uid": "z"}]});
        let going = json!({"name": "x", "uid": "o", "deletionTimestamp": "2026-01-01T00:00:00Z"});
        let token = json!({"name": "default-token-x1",
            "annotations": {"kubernetes.io/service-account.name": "default"}});
        let own = json!({"name": "acme", "uid": "own"});
        let unreadable = json!({"name": format!("unreadable.{}.v1.abc", release().name)});
        let gone = [
            ("configmaps", json!({"name": "kube-root-ca.crt"})),
            ("serviceaccounts", json!({"name": "default"})),
            ("secrets", token),
            ("secrets", unreadable),
            ("configmaps", going.clone()),
            ("replicasets", owned("Deployment")),
            ("pods", owned("ReplicaSet")),
            ("persistentvolumeclaims", owned("Deployment")),
            ("configmaps", marked("x", &json!({}))),
            ("configmaps", hook.clone()),
            ("tenants", own),
        ];
        for (plural, metadata) in gone {
            assert_eq!(judged(plural, &metadata), None, "{plural} {metadata}");
        }
        let foreign = "not created by the release";
        let other = marked("x", &json!({"meta.helm.sh/release-name": "other"}));
        let stays = [
            ("configmaps", json!({"name": "x"}), foreign),
            ("secrets", json!({"name": "kube-root-ca.crt"}), foreign),
            ("serviceaccounts", json!({"name": "x"}), foreign),
            ("configmaps", other, foreign),
            ("configmaps", owned("Unheard"), foreign),
            ("pods", by_node, foreign),
            ("tenants", going, foreign),
            ("configmaps", marked("x", &keep), "kept by the chart"),
            ("persistentvolumeclaims", json!({"name": "x"}), "holds data"),
            (
                "persistentvolumeclaims",
                marked("x", &json!({})),
                "holds data",
            ),
            ("persistentvolumeclaims", hook, "holds data"),
        ];
        for (plural, metadata, why) in stays {
            let expected = format!("{} x ({why})", kind(plural).kind);
            let expected =
                expected.replace(" x ", &format!(" {} ", metadata["name"].as_str().unwrap()));
            assert_eq!(judged(plural, &metadata), Some(expected), "{metadata}");
        }
    }

    #[test]
    fn kinds_that_cannot_be_listed_are_named() {
        let known = known();
        let listed: Vec<_> = known
            .listed
            .iter()
            .map(|kind| kind.plural.as_str())
            .collect();
        assert!(
            !listed.contains(&"events") && !listed.contains(&"nodes"),
            "{listed:?}"
        );
        assert_eq!(listed.iter().filter(|plural| **plural == "pods").count(), 1);
        assert_eq!(known.hidden, Vec::<String>::new());
        let of = |value: &Value| {
            let list = serde_json::from_value(value.clone()).unwrap();
            let core = serde_json::from_value(discovered("/api")).unwrap();
            kinds([core, list]).hidden
        };
        // As an apiserver answers that knows no aggregated discovery.
        assert_eq!(of(&json!({"kind": "APIGroupList", "groups": []})).len(), 1);
        let version = |freshness: &str, verbs: &[&str]| {
            json!({"items": [{"metadata": {"name": "g"}, "versions": [{"version": "v1",
                "freshness": freshness, "resources":
                [resource("widgets", "Widget", "Namespaced", verbs)]}]}]})
        };
        assert_eq!(
            of(&version("Current", &["list", "delete"])),
            Vec::<String>::new()
        );
        assert_eq!(of(&version("Stale", &["list", "delete"])).len(), 1);
        assert_eq!(of(&version("Current", &["delete"])).len(), 1);
        assert_eq!(of(&version("Current", &["get"])), Vec::<String>::new());
        assert_eq!(of(&version("Stale", &["get"])), Vec::<String>::new());
        let silent = |group: &str| {
            json!({"items": [{"metadata": {"name": group},
                "versions": [{"version": "v1", "freshness": "Stale"}]}]})
        };
        assert_eq!(of(&silent("g")).len(), 1);
        assert_eq!(of(&silent("custom.metrics.k8s.io")), Vec::<String>::new());
    }

    /// Looks at ConfigMaps of an apiserver that answers so.
    async fn looked(answer: fn(&str) -> (u16, Value)) -> Result<Vec<String>, ActionError> {
        let service = tower::service_fn(move |request: http::Request<Body>| async move {
            let (code, body) = answer(request.uri().query().unwrap_or_default());
            let mut response = http::Response::new(Body::from(body.to_string().into_bytes()));
            *response.status_mut() = http::StatusCode::from_u16(code).unwrap();
            Ok::<_, Infallible>(response)
        });
        let client = Client::new(service, "default");
        let (release, kinds) = (release(), known());
        let judge = Judge {
            release: &release,
            own: None,
            scopes: &kinds.scopes,
        };
        look(&client, &kind("configmaps"), &judge).await
    }

    fn status(code: u16, message: &str) -> (u16, Value) {
        (
            code,
            json!({"kind": "Status", "status": "Failure", "code": code, "message": message,
            "reason": "x"}),
        )
    }

    fn page(names: &[&str], next: &str) -> (u16, Value) {
        let items: Vec<Value> = names
            .iter()
            .map(|name| {
                json!({"apiVersion": "meta.k8s.io/v1", "kind": "PartialObjectMetadata",
                "metadata": {"name": name}})
            })
            .collect();
        (
            200,
            json!({"apiVersion": "meta.k8s.io/v1", "kind": "PartialObjectMetadataList",
            "metadata": {"continue": next}, "items": items}),
        )
    }

    #[tokio::test]
    async fn unlistable_kinds_keep_namespace_and_failures_are_retried() {
        for (answer, expected) in [
            (
                (|_| status(403, "no")) as fn(&str) -> _,
                "configmaps (forbidden)",
            ),
            (|_| status(406, "no"), "configmaps (cannot be listed)"),
            (
                |_| status(500, "conversion webhook for x failed"),
                "configmaps (cannot be listed)",
            ),
        ] {
            assert_eq!(looked(answer).await.ok().unwrap(), [expected]);
        }
        let unserved = looked(|_| status(404, "gone")).await;
        assert!(matches!(unserved, Err(ActionError::Conflict)));
        let failed = looked(|_| status(500, "etcdserver: request timed out")).await;
        assert!(matches!(failed, Err(ActionError::Transient(_))));
    }

    #[tokio::test]
    async fn objects_on_later_pages_are_found() {
        let found = looked(|query| match query.contains("continue=") {
            false => page(&["kube-root-ca.crt"], "more"),
            true => page(&["theirs"], ""),
        });
        let found = found.await.ok().unwrap();
        assert_eq!(found, ["ConfigMap theirs (not created by the release)"]);
        let endless = looked(|_| page(&[], "more")).await.ok().unwrap();
        assert_eq!(endless, ["configmaps (too many to look at)"]);
    }

    #[test]
    fn the_event_names_ten_objects() {
        let found: Vec<String> = (0..11)
            .map(|number| format!("ConfigMap m{number}"))
            .collect();
        let text = message("acme", &found);
        assert!(
            text.contains("ConfigMap m9, and more") && !text.contains("m10"),
            "{text}"
        );
        assert!(!message("acme", &found[..10]).contains("and more"));
    }
}
