//! Discovery: version, groups, resources and OpenAPI.

use std::collections::BTreeMap;
use std::sync::Arc;

use bytes::Bytes;
use http::{Method, Response, StatusCode};
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

use crate::kind::Kind;
use crate::request::ApiRequest;
use crate::server::{Answer, ApiServer};
use crate::status::{Failure, Outcome, respond};

const AGGREGATED: &str = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList";
const VERBS: [&str; 8] = [
    "create",
    "delete",
    "deletecollection",
    "get",
    "list",
    "patch",
    "update",
    "watch",
];
const CUSTOM_VERBS: [&str; 8] = [
    "delete",
    "deletecollection",
    "get",
    "list",
    "patch",
    "create",
    "update",
    "watch",
];
const STATUS_VERBS: [&str; 3] = ["get", "patch", "update"];

fn json_response(body: &Value) -> Outcome<Answer> {
    let body = body.to_string();
    Ok(Answer::Complete(respond(200, "application/json", body)))
}

impl ApiServer {
    pub(crate) fn discover(&self, request: &ApiRequest<'_>) -> Outcome<Answer> {
        if request.method != Method::GET {
            return Err(Failure::not_modelled(format_args!(
                "{} {}",
                request.method, request.path
            )));
        }
        match *request.segments {
            ["readyz" | "livez" | "healthz"] => Ok(Answer::Complete(respond(
                200,
                "text/plain; charset=utf-8",
                "ok",
            ))),
            ["version"] => json_response(&self.version()),
            ["api"] if wants_aggregated(request) => {
                aggregated_response(&self.aggregated_groups(true))
            }
            ["apis"] if wants_aggregated(request) => {
                aggregated_response(&self.aggregated_groups(false))
            }
            ["api"] => json_response(&json!({
                "kind": "APIVersions",
                "versions": ["v1"],
                "serverAddressByClientCIDRs": [
                    {"clientCIDR": "0.0.0.0/0", "serverAddress": "10.0.0.1:6443"},
                ],
            })),
            ["apis"] => {
                let groups = self.groups();
                let groups = groups.iter().filter(|(group, _)| !group.is_empty());
                let groups: Vec<Value> =
                    groups.map(|(name, kinds)| api_group(name, kinds)).collect();
                json_response(
                    &json!({"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}),
                )
            }
            ["api", "v1"] => self.list_resources("", "v1"),
            ["apis", name] => match self.groups().get(name) {
                Some(kinds) => {
                    let mut body = api_group(name, kinds);
                    body["kind"] = "APIGroup".into();
                    body["apiVersion"] = "v1".into();
                    json_response(&body)
                }
                None => Err(Failure::no_such_path()),
            },
            ["apis", group, version] => self.list_resources(group, version),
            ["openapi", "v3", "apis", group, version] => self.open_api(group, version),
            ["api", _] => Err(Failure::no_such_resource()),
            [
                "openapi" | "swagger.json" | "metrics" | "logs" | "debug" | ".well-known",
                ..,
            ]
            | ["openid", ..]
            | [] => Err(Failure::not_modelled(format_args!(
                "the path {}",
                request.path
            ))),
            _ => Err(Failure::no_such_path()),
        }
    }

    fn version(&self) -> Value {
        let version = &self.options.version;
        let mut numbers = version.trim_start_matches('v').split('.');
        let (major, minor) = (numbers.next(), numbers.next());
        json!({
            "major": major,
            "minor": minor,
            "emulationMajor": major,
            "emulationMinor": minor,
            "gitVersion": version,
            "gitCommit": "0000000000000000000000000000000000000000",
            "gitTreeState": "clean",
            "buildDate": "2025-01-01T00:00:00Z",
            "goVersion": "go1.24.6",
            "compiler": "gc",
            "platform": "linux/amd64",
        })
    }

    /// Returns the served kinds by group, in the order of their versions and resources.
    fn groups(&self) -> BTreeMap<&str, Vec<&Arc<Kind>>> {
        let mut groups: BTreeMap<&str, Vec<&Arc<Kind>>> = BTreeMap::new();
        for kind in self.kinds.all() {
            groups.entry(&kind.group).or_default().push(kind);
        }
        groups
    }

    fn kinds_in<'a>(&'a self, group: &'a str, version: &'a str) -> Vec<&'a Arc<Kind>> {
        let kinds = self.kinds.all();
        kinds
            .filter(|kind| kind.group == group && kind.version == version)
            .collect()
    }

    fn list_resources(&self, group: &str, version: &str) -> Outcome<Answer> {
        let kinds = self.kinds_in(group, version);
        let Some(first) = kinds.first() else {
            return Err(self.not_served(group, version, ""));
        };
        let resources: Vec<Value> = kinds.iter().flat_map(|kind| api_resources(kind)).collect();
        let mut body = json!({
            "kind": "APIResourceList",
            "groupVersion": first.api_version(),
            "resources": resources,
        });
        if !group.is_empty() {
            body["apiVersion"] = "v1".into();
        }
        json_response(&body)
    }

    fn aggregated_groups(&self, core: bool) -> Value {
        let groups = self.groups();
        let groups = groups.iter().filter(|(name, _)| name.is_empty() == core);
        let items = groups.map(|(name, kinds)| {
            let versions: Vec<Value> = group_versions(kinds)
                .into_iter()
                .map(|version| {
                    let resources: Vec<Value> = kinds
                        .iter()
                        .filter(|kind| kind.version == version)
                        .map(|kind| aggregated_resource(kind))
                        .collect();
                    json!({"version": version, "resources": resources, "freshness": "Current"})
                })
                .collect();
            let metadata = match core {
                true => json!({}),
                false => json!({"name": name}),
            };
            json!({"metadata": metadata, "versions": versions})
        });
        json!({
            "kind": "APIGroupDiscoveryList",
            "apiVersion": "apidiscovery.k8s.io/v2",
            "metadata": {},
            "items": items.collect::<Vec<_>>(),
        })
    }

    fn open_api(&self, group: &str, version: &str) -> Outcome<Answer> {
        let kinds = self.kinds_in(group, version);
        if kinds.is_empty() {
            let mut response = Response::new(Bytes::new());
            *response.status_mut() = StatusCode::NOT_FOUND;
            return Ok(Answer::Complete(response));
        }
        let mut schemas = serde_json::Map::new();
        for kind in kinds {
            let mut parts: Vec<&str> = kind.group.rsplit('.').collect();
            parts.retain(|part| !part.is_empty());
            parts.extend([kind.version.as_str(), kind.kind.as_str()]);
            let mut schema = match &kind.schema {
                Some(schema) => schema.root().clone(),
                None => json!({"type": "object"}),
            };
            schema["x-kubernetes-group-version-kind"] =
                json!([{"group": kind.group, "version": kind.version, "kind": kind.kind}]);
            schemas.insert(parts.join("."), schema);
        }
        json_response(&json!({
            "openapi": "3.0.0",
            "info": {"title": "Kubernetes", "version": self.options.version},
            "paths": {},
            "components": {"schemas": schemas},
        }))
    }
}

fn verbs(kind: &Kind) -> Vec<&'static str> {
    let is_supported = |verb: &&str| !kind.is("", "namespaces") || *verb != "deletecollection";
    match kind.is_custom() {
        true => CUSTOM_VERBS.to_vec(),
        false => VERBS.into_iter().filter(is_supported).collect(),
    }
}

fn wants_aggregated(request: &ApiRequest<'_>) -> bool {
    request.accept.contains("as=APIGroupDiscoveryList") && request.accept.contains("v=v2")
}

fn aggregated_response(body: &Value) -> Outcome<Answer> {
    Ok(Answer::Complete(respond(200, AGGREGATED, body.to_string())))
}

fn group_versions<'a>(kinds: &[&'a Arc<Kind>]) -> Vec<&'a str> {
    let mut versions: Vec<&str> = kinds.iter().map(|kind| &*kind.version).collect();
    versions.dedup();
    versions
}

fn api_group(name: &str, kinds: &[&Arc<Kind>]) -> Value {
    let versions: Vec<Value> = group_versions(kinds)
        .into_iter()
        .map(|version| json!({"groupVersion": format!("{name}/{version}"), "version": version}))
        .collect();
    json!({"name": name, "versions": versions, "preferredVersion": versions.first()})
}

fn api_resources(kind: &Arc<Kind>) -> Vec<Value> {
    let mut resource = json!({
        "name": kind.resource,
        "singularName": kind.singular,
        "namespaced": kind.namespaced,
        "kind": kind.kind,
        "verbs": verbs(kind),
        "storageVersionHash": storage_version_hash(kind),
    });
    add_aliases(kind, &mut resource);
    let status = kind.has_status.then(|| {
        json!({
            "name": format!("{}/status", kind.resource),
            "singularName": "",
            "namespaced": kind.namespaced,
            "kind": kind.kind,
            "verbs": STATUS_VERBS,
        })
    });
    std::iter::once(resource).chain(status).collect()
}

fn add_aliases(kind: &Kind, resource: &mut Value) {
    for (name, list) in [
        ("shortNames", &kind.short_names),
        ("categories", &kind.categories),
    ] {
        if !list.is_empty() {
            resource[name] = json!(list);
        }
    }
}

fn storage_version_hash(kind: &Kind) -> String {
    use base64::Engine as _;
    let text = format!("{}/{}", kind.stored_api_version, kind.kind);
    let hash = Sha256::digest(text.as_bytes());
    base64::engine::general_purpose::STANDARD.encode(hash.get(..8).unwrap_or_default())
}

fn aggregated_resource(kind: &Arc<Kind>) -> Value {
    let response_kind = match kind.is_custom() {
        true => json!({"group": kind.group, "version": kind.version, "kind": kind.kind}),
        false => json!({"group": "", "version": "", "kind": kind.kind}),
    };
    let mut resource = json!({
        "resource": kind.resource,
        "responseKind": response_kind,
        "scope": match kind.namespaced { true => "Namespaced", false => "Cluster" },
        "singularResource": kind.singular,
        "verbs": verbs(kind),
    });
    add_aliases(kind, &mut resource);
    let subresource = |name: &str, verbs: &[&str]| json!({"subresource": name, "responseKind": response_kind, "verbs": verbs});
    let finalize = kind
        .is("", "namespaces")
        .then(|| subresource("finalize", &["update"]));
    let status = kind
        .has_status
        .then(|| subresource("status", &STATUS_VERBS));
    let subresources: Vec<Value> = finalize.into_iter().chain(status).collect();
    if !subresources.is_empty() {
        resource["subresources"] = subresources.into();
    }
    resource
}
