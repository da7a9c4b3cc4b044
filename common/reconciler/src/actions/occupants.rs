//! Lists the objects in a workspace that the release did not create and that a deletion of the namespace would delete.
//!
//! Reads metadata only, with Helm's rights. If a kind cannot be listed, the namespace counts as occupied.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use krypton_crds::tenant::Tenant;
use krypton_helm::releases::labels::ReleaseKey;
use krypton_runtime::call::call;
use krypton_runtime::events::ObjectEvent;
use kube::api::{Api, DynamicObject, ListParams};
use kube::core::ApiResource;
use kube::core::discovery::v2::{APIGroupDiscovery, APIGroupDiscoveryList, APIResourceDiscovery};
use kube::{Client, Resource as _, ResourceExt as _};

use super::objects::{annotation, belongs_to};
use super::{ActionError, ActionResult, ActionRunner, Job};
use crate::index::CrdState;

/// Objects in a response.
const PAGE_SIZE: u32 = 50;
/// Pages of one kind; a namespace with more of them is not checked further.
const MAX_PAGES: u32 = 20;
/// Objects in the event.
const MAX_SHOWN: usize = 10;
/// Kinds that only describe other objects or what happened to them.
const IGNORED_KINDS: [(&str, &str); 5] = [
    ("", "endpoints"),
    ("", "events"),
    ("coordination.k8s.io", "leases"),
    ("discovery.k8s.io", "endpointslices"),
    ("events.k8s.io", "events"),
];
/// Suffix of the API groups that serve measurements and store no objects.
const METRICS_SUFFIX: &str = "metrics.k8s.io";
/// Objects that Kubernetes, OpenShift and Istio create in every namespace.
const DEFAULT_OBJECTS: [(&str, &str); 9] = [
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
const SERVICE_ACCOUNT_ANNOTATION: &str = "kubernetes.io/service-account.name";

/// The kinds that a cluster serves, and whether their objects are in namespaces, by group and kind.
type KindScopes = BTreeMap<(String, String), bool>;

/// The kinds to list in a namespace.
#[derive(Debug, Default, PartialEq)]
struct DiscoveredKinds {
    listed: Vec<ApiResource>,
    /// Kinds that cannot be listed, as the event names them.
    unlistable: Vec<String>,
    scopes: KindScopes,
}

/// Decides which objects keep a workspace.
struct OccupancyCheck<'a> {
    release: &'a ReleaseKey,
    /// UID of the Tenant that is being deleted. It may be in its own workspace.
    deleted_tenant: Option<&'a str>,
    scopes: &'a KindScopes,
}

impl ActionRunner {
    /// Returns whether the workspace stays, and reports the objects that keep it.
    pub(super) async fn is_occupied(&self, job: &Job) -> ActionResult<bool> {
        let client = &self.member.helm_client;
        let kinds = discover_kinds(client).await?;
        // Discovery may lag behind the CRDs.
        let tenant_kind = (
            Tenant::group(&()).into_owned(),
            Tenant::kind(&()).into_owned(),
        );
        if job.tenant_crd != CrdState::Missing && !kinds.scopes.contains_key(&tenant_kind) {
            return Err(ActionError::Conflict);
        }
        let tenant_uid = job.owner.tenant().and_then(|tenant| tenant.uid());
        let check = OccupancyCheck {
            release: &job.release,
            // A member that leaves keeps its Tenants.
            deleted_tenant: tenant_uid.as_deref().filter(|_| !job.desired.retire),
            scopes: &kinds.scopes,
        };
        let mut occupants = kinds.unlistable.clone();
        for kind in &kinds.listed {
            if occupants.len() > MAX_SHOWN {
                break;
            }
            occupants.extend(occupants_of_kind(client, kind, &check).await?);
        }
        if occupants.is_empty() {
            return Ok(false);
        }
        let message = message(&job.release.namespace, &occupants);
        let event = ObjectEvent::warning("WorkspaceKept", message);
        self.emit_event(&job.owner, event);
        Ok(true)
    }
}

fn message(namespace: &str, occupants: &[String]) -> String {
    let (shown, rest) = occupants.split_at(occupants.len().min(MAX_SHOWN));
    let more = if rest.is_empty() { "" } else { ", and more" };
    format!(
        "kept namespace {namespace}, which is not empty: {}{more}; delete it yourself if nothing in it is needed",
        shown.join(", ")
    )
}

/// All kinds of the cluster, by aggregated discovery.
async fn discover_kinds(client: &Client) -> ActionResult<DiscoveredKinds> {
    let attempt = "listing the kinds of the cluster";
    let core = async { split_refusal(client.list_core_api_versions_aggregated().await) };
    let others = async { split_refusal(client.list_api_groups_aggregated().await) };
    let lists = [call(attempt, core).await?, call(attempt, others).await?];
    Ok(parse_kinds(lists.map(Result::unwrap_or_default)))
}

fn parse_kinds(lists: [APIGroupDiscoveryList; 2]) -> DiscoveredKinds {
    let mut kinds = DiscoveredKinds::default();
    // An old API server, or one that lies, responds without any group.
    if lists.iter().any(|list| list.items.is_empty()) {
        kinds
            .unlistable
            .push("kinds that the cluster does not name".to_owned());
    }
    for group in lists.into_iter().flat_map(|list| list.items) {
        kinds.add(group);
    }
    kinds
}

impl DiscoveredKinds {
    fn add(&mut self, group: APIGroupDiscovery) {
        let group_name = group
            .metadata
            .and_then(|meta| meta.name)
            .unwrap_or_default();
        // Versions come in the order of preference.
        for version in group.versions {
            let version_name = version.version.unwrap_or_default();
            // An API service that has never responded may serve any kind.
            let may_have_objects = version.resources.is_empty()
                || version.resources.iter().any(is_deleted_with_namespace);
            let is_stale = version.freshness.as_deref() == Some("Stale");
            if is_stale && may_have_objects && !group_name.ends_with(METRICS_SUFFIX) {
                self.unlistable.push(format!(
                    "objects of {group_name}/{version_name} (API not available)"
                ));
            }
            for resource in version.resources {
                self.add_resource(&group_name, &version_name, resource);
            }
        }
    }

    fn add_resource(&mut self, group: &str, version: &str, resource: APIResourceDiscovery) {
        let is_deleted = is_deleted_with_namespace(&resource);
        let is_listable = resource.verbs.iter().any(|verb| verb == "list");
        let kind = resource.response_kind.and_then(|kind| kind.kind);
        let kind = kind.unwrap_or_default();
        let plural = resource.resource.unwrap_or_default();
        let namespaced = resource.scope.as_deref() == Some("Namespaced");
        self.scopes
            .insert((group.to_owned(), kind.clone()), namespaced);
        let mut kinds = self.listed.iter();
        let is_known = kinds.any(|kind| kind.group == group && kind.plural == plural);
        if is_known || !is_deleted || IGNORED_KINDS.contains(&(group, plural.as_str())) {
            return;
        }
        if !is_listable {
            self.unlistable
                .push(format!("{plural} (kind without lists)"));
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
fn is_deleted_with_namespace(resource: &APIResourceDiscovery) -> bool {
    let is_deletable = resource.verbs.iter().any(|verb| verb == "delete");
    is_deletable && resource.scope.as_deref() == Some("Namespaced")
}

/// The objects of one kind that keep the namespace.
async fn occupants_of_kind(
    client: &Client,
    kind: &ApiResource,
    check: &OccupancyCheck<'_>,
) -> ActionResult<Vec<String>> {
    let api: Api<DynamicObject> =
        Api::namespaced_with(client.clone(), &check.release.namespace, kind);
    let mut params = ListParams::default().limit(PAGE_SIZE);
    let mut occupants = Vec::new();
    for _ in 0..MAX_PAGES {
        let attempt = format!("listing {}", kind.plural);
        let listing = async { split_refusal(api.list_metadata(&params).await) };
        // After a 404, discovery runs again and shows whether the cluster serves the kind.
        let list = match call(attempt, listing).await? {
            Ok(list) => list,
            Err(reason) => return Ok(vec![format!("{} ({reason})", kind.plural)]),
        };
        let objects = list.items.iter().map(|object| &object.metadata);
        occupants.extend(objects.filter_map(|object| check.occupant(kind, object)));
        let next = list.metadata.continue_.filter(|next| !next.is_empty());
        match next {
            Some(next) if occupants.len() <= MAX_SHOWN => params = params.continue_token(&next),
            _ => return Ok(occupants),
        }
    }
    occupants.push(format!("{} (too many to check)", kind.plural));
    Ok(occupants)
}

/// Separates refusals that last from errors that a retry may overcome.
fn split_refusal<T>(response: kube::Result<T>) -> kube::Result<Result<T, &'static str>> {
    match response {
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

impl OccupancyCheck<'_> {
    /// Names an object that keeps the namespace, and the reason.
    fn occupant(&self, kind: &ApiResource, object: &ObjectMeta) -> Option<String> {
        let name = object.name.as_deref().unwrap_or_default();
        let is_tenant = kind.kind == Tenant::kind(&()) && kind.group == Tenant::group(&());
        let is_terminating = object.deletion_timestamp.is_some() && !is_tenant;
        if is_terminating
            || (object.uid.is_some() && object.uid.as_deref() == self.deleted_tenant)
            || DEFAULT_OBJECTS.contains(&(kind.plural.as_str(), name))
            || self.is_saved_copy(kind, name)
            || is_token(object, name)
        {
            return None;
        }
        let is_of_release =
            belongs_to(object, self.release) || annotation(object, "helm.sh/hook").is_some();
        let is_kept = annotation(object, "helm.sh/resource-policy") == Some("keep");
        let reason = if is_of_release && is_kept {
            "kept by the chart"
        } else if kind.plural == "persistentvolumeclaims" && !self.is_owned(object) {
            "holds data"
        } else if is_of_release || self.is_owned(object) {
            return None;
        } else {
            "not created by the release"
        };
        Some(format!("{} {name} ({reason})", kind.kind))
    }

    /// Whether the object goes with another object of the namespace, which has its own check.
    fn is_owned(&self, object: &ObjectMeta) -> bool {
        let is_in_namespace = |owner: &OwnerReference| {
            let group = owner
                .api_version
                .rsplit_once('/')
                .map_or("", |(group, _)| group);
            let kind = (group.to_owned(), owner.kind.clone());
            self.scopes.get(&kind) == Some(&true)
        };
        object
            .owner_references
            .iter()
            .flatten()
            .any(is_in_namespace)
    }

    /// Whether it is a copy that Krypton saved of a release that could not be decoded.
    fn is_saved_copy(&self, kind: &ApiResource, name: &str) -> bool {
        let prefix = format!("unreadable.{}.v", self.release.name);
        kind.group.is_empty() && kind.plural == "secrets" && name.starts_with(&prefix)
    }
}

/// Whether it is a token that Kubernetes before 1.24 created for each service account.
fn is_token(object: &ObjectMeta, name: &str) -> bool {
    annotation(object, SERVICE_ACCOUNT_ANNOTATION)
        .is_some_and(|service_account| name.starts_with(&format!("{service_account}-token-")))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::stub_server::StubServer;

    pub(super) fn release() -> ReleaseKey {
        ReleaseKey::new("acme", "tenant-acme-edge-1")
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

    fn known_kinds() -> DiscoveredKinds {
        parse_kinds(["/api", "/apis"].map(|path| serde_json::from_value(discovered(path)).unwrap()))
    }

    fn kind(plural: &str) -> ApiResource {
        let mut kinds = known_kinds().listed.into_iter();
        kinds.find(|kind| kind.plural == plural).unwrap()
    }

    fn occupant(plural: &str, metadata: &Value) -> Option<String> {
        let (release, kinds) = (release(), known_kinds());
        let check = OccupancyCheck {
            release: &release,
            deleted_tenant: Some("own"),
            scopes: &kinds.scopes,
        };
        check.occupant(
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
        let keep_policy = json!({"helm.sh/resource-policy": "keep"});
        let hook = json!({"name": "x", "annotations": {"helm.sh/hook": "pre-install"}});
        let by_node = json!({"name": "x", "ownerReferences":
            [{"apiVersion": "v1", "kind": "Node", "name": "y", "uid": "z"}]});
        let terminating =
            json!({"name": "x", "uid": "o", "deletionTimestamp": "2026-01-01T00:00:00Z"});
        let token = json!({"name": "default-token-x1",
            "annotations": {"kubernetes.io/service-account.name": "default"}});
        let own = json!({"name": "acme", "uid": "own"});
        let unreadable = json!({"name": format!("unreadable.{}.v1.abc", release().name)});
        let ignored = [
            ("configmaps", json!({"name": "kube-root-ca.crt"})),
            ("serviceaccounts", json!({"name": "default"})),
            ("secrets", token),
            ("secrets", unreadable),
            ("configmaps", terminating.clone()),
            ("replicasets", owned("Deployment")),
            ("pods", owned("ReplicaSet")),
            ("persistentvolumeclaims", owned("Deployment")),
            ("configmaps", marked("x", &json!({}))),
            ("configmaps", hook.clone()),
            ("tenants", own),
        ];
        for (plural, metadata) in ignored {
            assert_eq!(occupant(plural, &metadata), None, "{plural} {metadata}");
        }
        let not_created = "not created by the release";
        let other = marked("x", &json!({"meta.helm.sh/release-name": "other"}));
        let kept = [
            ("configmaps", json!({"name": "x"}), not_created),
            ("secrets", json!({"name": "kube-root-ca.crt"}), not_created),
            ("serviceaccounts", json!({"name": "x"}), not_created),
            ("configmaps", other, not_created),
            ("configmaps", owned("Unheard"), not_created),
            ("pods", by_node, not_created),
            ("tenants", terminating, not_created),
            ("configmaps", marked("x", &keep_policy), "kept by the chart"),
            ("persistentvolumeclaims", json!({"name": "x"}), "holds data"),
            (
                "persistentvolumeclaims",
                marked("x", &json!({})),
                "holds data",
            ),
            ("persistentvolumeclaims", hook, "holds data"),
        ];
        for (plural, metadata, reason) in kept {
            let expected = format!("{} x ({reason})", kind(plural).kind);
            let expected =
                expected.replace(" x ", &format!(" {} ", metadata["name"].as_str().unwrap()));
            assert_eq!(occupant(plural, &metadata), Some(expected), "{metadata}");
        }
    }

    #[test]
    fn kinds_that_cannot_be_listed_are_named() {
        let kinds = known_kinds();
        let listed: Vec<_> = kinds
            .listed
            .iter()
            .map(|kind| kind.plural.as_str())
            .collect();
        assert!(
            !listed.contains(&"events") && !listed.contains(&"nodes"),
            "{listed:?}"
        );
        assert_eq!(listed.iter().filter(|plural| **plural == "pods").count(), 1);
        assert_eq!(kinds.unlistable, Vec::<String>::new());
        let unlistable = |value: &Value| {
            let list = serde_json::from_value(value.clone()).unwrap();
            let core = serde_json::from_value(discovered("/api")).unwrap();
            parse_kinds([core, list]).unlistable
        };
        let version = |freshness: &str, verbs: &[&str]| {
            json!({"items": [{"metadata": {"name": "g"}, "versions": [{"version": "v1",
                "freshness": freshness, "resources":
                [resource("widgets", "Widget", "Namespaced", verbs)]}]}]})
        };
        let without_resources = |group: &str| {
            json!({"items": [{"metadata": {"name": group},
                "versions": [{"version": "v1", "freshness": "Stale"}]}]})
        };
        for (list, count) in [
            // The response of an API server without aggregated discovery.
            (json!({"kind": "APIGroupList", "groups": []}), 1),
            (version("Current", &["list", "delete"]), 0),
            (version("Stale", &["list", "delete"]), 1),
            (version("Current", &["delete"]), 1),
            (version("Current", &["get"]), 0),
            (version("Stale", &["get"]), 0),
            (without_resources("g"), 1),
            (without_resources("custom.metrics.k8s.io"), 0),
        ] {
            assert_eq!(unlistable(&list).len(), count, "{list}");
        }
    }

    /// Returns the ConfigMaps that keep the namespace, if the API server responds like this.
    async fn occupying_config_maps(
        respond: impl Fn(&str) -> (u16, Value) + Send + Sync + 'static,
    ) -> ActionResult<Vec<String>> {
        let server = StubServer::start(move |request| respond(&request.query));
        let (release, kinds) = (release(), known_kinds());
        let check = OccupancyCheck {
            release: &release,
            deleted_tenant: None,
            scopes: &kinds.scopes,
        };
        occupants_of_kind(&server.client, &kind("configmaps"), &check).await
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
        for (code, message, expected) in [
            (403, "no", "configmaps (forbidden)"),
            (406, "no", "configmaps (cannot be listed)"),
            (
                500,
                "conversion webhook for x failed",
                "configmaps (cannot be listed)",
            ),
        ] {
            let occupants = occupying_config_maps(move |_| (code, json!(message)));
            assert_eq!(occupants.await.ok().unwrap(), [expected]);
        }
        let unserved = occupying_config_maps(|_| (404, json!("gone"))).await;
        assert!(matches!(unserved, Err(ActionError::Conflict)));
        let failed = occupying_config_maps(|_| (500, json!("etcdserver: request timed out")));
        assert!(matches!(failed.await, Err(ActionError::Transient(_))));
    }

    #[tokio::test]
    async fn objects_on_later_pages_are_found() {
        let occupants = occupying_config_maps(|query| match query.contains("continue=") {
            false => page(&["kube-root-ca.crt"], "more"),
            true => page(&["theirs"], ""),
        });
        let occupants = occupants.await.ok().unwrap();
        assert_eq!(occupants, ["ConfigMap theirs (not created by the release)"]);
        let endless = occupying_config_maps(|_| page(&[], "more")).await;
        let expected = ["configmaps (too many to check)"];
        assert_eq!(endless.ok().unwrap(), expected);
    }

    #[test]
    fn the_event_names_ten_objects() {
        let occupants: Vec<String> = (0..11)
            .map(|number| format!("ConfigMap m{number}"))
            .collect();
        let text = message("acme", &occupants);
        assert!(
            text.contains("ConfigMap m9, and more") && !text.contains("m10"),
            "{text}"
        );
        assert!(!message("acme", &occupants[..10]).contains("and more"));
    }
}
