//! Versions, discovery and health.

use serde_json::{Value, json};

use super::custom::{self, CRDS, widgets};
use super::run::{Call, CaseRun};

super::table!(
    version_and_health,
    discovery_of_core,
    discovery_of_groups,
    discovery_of_custom_group,
    discovery_aggregated_core,
    discovery_aggregated_custom,
    openapi_of_custom_group,
);

const AGGREGATED: &str = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList,application/json;g=apidiscovery.k8s.io;v=v2beta1;as=APIGroupDiscoveryList,application/json";

/// Keeps the resources with these names. A simulated server doesn't serve all kinds.
fn get_resources(run: &mut CaseRun<'_>, path: &str, names: &[&str]) {
    let list = run.unrecorded(|run| run.get(path));
    let resources = list
        .get("resources")
        .and_then(Value::as_array)
        .cloned()
        .unwrap_or_default();
    let resource_pointer = |name: &&str| {
        let index = resources
            .iter()
            .position(|resource| resource.get("name") == Some(&json!(name)));
        index.map(|index| format!("/resources/{index}"))
    };
    let mut pointers = vec![
        "/kind".to_owned(),
        "/apiVersion".to_owned(),
        "/groupVersion".to_owned(),
    ];
    pointers.extend(names.iter().filter_map(resource_pointer));
    let pointers: Vec<&str> = pointers.iter().map(String::as_str).collect();
    run.send_renumbered(Call::new("GET", path).only(&pointers));
}

fn version_and_health(run: &mut CaseRun<'_>) {
    // The values depend on the version.
    run.send(Call::new("GET", "/version").only(&["/major"]));
    run.get("/readyz");
    run.get("/livez");
    run.get("/healthz");
}

fn discovery_of_core(run: &mut CaseRun<'_>) {
    get_resources(
        run,
        "/api/v1",
        &[
            "configmaps",
            "events",
            "namespaces",
            "namespaces/status",
            "secrets",
            "serviceaccounts",
        ],
    );
    run.send(Call::new("GET", "/api").only(&["/kind", "/versions"]));
}

fn discovery_of_groups(run: &mut CaseRun<'_>) {
    get_resources(run, "/apis/coordination.k8s.io/v1", &["leases"]);
    get_resources(
        run,
        "/apis/apps/v1",
        &["deployments", "statefulsets", "daemonsets"],
    );
    get_resources(
        run,
        "/apis/apiextensions.k8s.io/v1",
        &[
            "customresourcedefinitions",
            "customresourcedefinitions/status",
        ],
    );
    get_resources(run, "/apis/events.k8s.io/v1", &["events"]);
    run.get("/apis/coordination.k8s.io");
    run.send(Call::new("GET", "/apis").only(&["/kind", "/apiVersion"]));
}

fn discovery_of_custom_group(run: &mut CaseRun<'_>) {
    let group = custom::group(run);
    let path = format!("/apis/{group}/v1");
    run.get(&path);
    widgets(run);
    run.wait(path.as_str(), |list| list.get("resources").is_some());
    run.wait(format!("/apis/{group}"), |body| {
        body.get("versions").is_some()
    });
    run.get(&format!("/apis/{group}/v2"));
    let crd = custom::crd_path(run);
    run.unrecorded(|run| run.delete(&crd, &json!({})));
    run.wait(path.as_str(), |list| list.get("resources").is_none());
    run.wait(format!("{CRDS}/none"), |_| true);
}

fn group_pointer(list: &Value, name: &str) -> String {
    let items = list.get("items").and_then(Value::as_array);
    let index = items.and_then(|items| {
        items
            .iter()
            .position(|item| item.pointer("/metadata/name") == Some(&json!(name)))
    });
    index
        .map(|index| format!("/items/{index}"))
        .unwrap_or_default()
}

fn discovery_aggregated_core(run: &mut CaseRun<'_>) {
    let call = Call::new("GET", "/api").accept(AGGREGATED);
    let list = run.unrecorded(|run| run.send(call.clone()));
    let resources = list
        .pointer("/items/0/versions/0/resources")
        .and_then(Value::as_array);
    let resource_pointer = |name: &str| {
        let index = resources?
            .iter()
            .position(|resource| resource.get("resource") == Some(&json!(name)))?;
        Some(format!("/items/0/versions/0/resources/{index}"))
    };
    let mut pointers: Vec<String> = ["configmaps", "namespaces", "secrets"]
        .into_iter()
        .filter_map(resource_pointer)
        .collect();
    pointers.extend(
        [
            "/kind",
            "/apiVersion",
            "/metadata",
            "/items/0/metadata",
            "/items/0/versions/0/version",
            "/items/0/versions/0/freshness",
        ]
        .map(str::to_owned),
    );
    let pointers: Vec<&str> = pointers.iter().map(String::as_str).collect();
    run.send_renumbered(call.only(&pointers));
}

fn discovery_aggregated_custom(run: &mut CaseRun<'_>) {
    widgets(run);
    let group = custom::group(run);
    let call = Call::new("GET", "/apis").accept(AGGREGATED);
    let list = run.unrecorded(|run| {
        run.wait(call.clone(), |list| {
            let resource = list.pointer(&format!(
                "{}/versions/0/resources/0",
                group_pointer(list, &group)
            ));
            !group_pointer(list, &group).is_empty() && resource.is_some()
        })
    });
    let leases = format!("{}/metadata", group_pointer(&list, "coordination.k8s.io"));
    run.send_renumbered(call.only(&[
        "/kind",
        "/apiVersion",
        &group_pointer(&list, &group),
        &leases,
    ]));
}

fn openapi_of_custom_group(run: &mut CaseRun<'_>) {
    widgets(run);
    let group = custom::group(run);
    let path = format!("/openapi/v3/apis/{group}/v1");
    let labels: Vec<&str> = group.rsplit('.').collect();
    let schema = format!("/components/schemas/{}.v1.Widget", labels.join("."));
    let spec = format!("{schema}/properties/spec");
    let status = format!("{schema}/properties/status");
    let kinds = format!("{schema}/x-kubernetes-group-version-kind");
    let call = Call::new("GET", path).only(&[&spec, &status, &kinds]);
    run.wait(call, |document| document.pointer(&spec).is_some());
    run.get("/openapi/v3/apis/no-such-group.example.com/v1");
}
