//! Effects of the namespace controller, the garbage collector and the workload controllers.

use serde_json::{Value, json};

use super::custom::{widget, widgets};
use super::objects::{
    CONFIG_MAPS, ONE_CONFIG_MAP, OTHER_UID, SECRETS, config_map, object_path, uid,
};
use super::run::{Call, CaseRun, METADATA};

super::table!(
    namespace_life,
    namespace_deletion,
    namespace_waits_for_finalizers,
    namespace_delete_precondition,
    namespace_rejected,
    garbage_of_background_deletion,
    garbage_of_orphaning_deletion,
    garbage_of_missing_owner,
    deployment_without_replicas,
    statefulset_and_daemonset,
);

const DEPLOYMENTS: &str = "/apis/apps/v1/namespaces/:ns/deployments";

fn is_gone(response: &Value) -> bool {
    response.get("code") == Some(&json!(404))
}

/// Returns the name and the path of a second namespace.
fn second_namespace(run: &mut CaseRun<'_>) -> (String, String) {
    let name = format!("{}-other", run.namespace());
    let path = format!("/api/v1/namespaces/{name}");
    run.delete_at_end(&path);
    (name, path)
}

fn namespace_life(run: &mut CaseRun<'_>) {
    let (name, path) = second_namespace(run);
    let labels = json!({"krypton.example.com/creator": "agent"});
    run.post(
        "/api/v1/namespaces",
        &json!({"metadata": {"name": name, "labels": labels}}),
    );
    run.post("/api/v1/namespaces", &json!({"metadata": {"name": name}}));
    run.get(&path);
    run.send(Call::new("GET", path.clone()).accept(METADATA));
    for labels in [
        json!({"kubernetes.io/metadata.name": null}),
        json!({"a": "b"}),
    ] {
        run.merge(&path, &json!({"metadata": {"labels": labels}}));
    }
    run.get(&format!("{path}/status"));
}

fn namespace_deletion(run: &mut CaseRun<'_>) {
    let (name, path) = second_namespace(run);
    let created = run.post("/api/v1/namespaces", &json!({"metadata": {"name": name}}));
    let secrets = format!("{path}/secrets");
    run.post(&secrets, &json!({"metadata": {"name": "one"}}));
    run.wait_for_cache(&secrets, 1);
    let watch = run.watch(format!("{secrets}?watch=true&resourceVersion=0"));
    run.event(watch);
    // The controller can be faster than a second look at the namespace.
    let delete = Call::new("DELETE", path.clone());
    let delete = delete.body(&json!({"preconditions": {"uid": uid(&created)}}));
    run.send(delete);
    run.event(watch);
    run.wait(path.as_str(), is_gone);
    run.get(&format!("{secrets}/one"));
    run.post(&secrets, &json!({"metadata": {"name": "one"}}));
    run.post("/api/v1/namespaces", &json!({"metadata": {"name": name}}));
}

fn namespace_waits_for_finalizers(run: &mut CaseRun<'_>) {
    let (name, path) = second_namespace(run);
    run.unrecorded(|run| run.post("/api/v1/namespaces", &json!({"metadata": {"name": name}})));
    let secrets = format!("{path}/secrets");
    run.post(
        &secrets,
        &json!({"metadata": {"name": "one", "finalizers": ["example.com/a"]}}),
    );
    run.unrecorded(|run| run.delete(&path, &json!({})));
    let secret_path = format!("{secrets}/one");
    run.wait(secret_path.as_str(), |secret| {
        secret.pointer("/metadata/deletionTimestamp").is_some()
    });
    run.post(&secrets, &json!({"metadata": {"name": "two"}}));
    run.apply(
        &format!("{path}/configmaps/two?fieldManager=a"),
        &config_map("two", &json!({})),
    );
    run.post("/api/v1/namespaces", &json!({"metadata": {"name": name}}));
    run.send(Call::new("GET", path.clone()).only(&["/spec", "/status/phase", "/metadata/labels"]));
    run.merge(&secret_path, &json!({"metadata": {"labels": {"a": "b"}}}));
    run.merge(&secret_path, &json!({"metadata": {"finalizers": null}}));
    run.wait(path.as_str(), is_gone);
}

fn namespace_delete_precondition(run: &mut CaseRun<'_>) {
    let (name, path) = second_namespace(run);
    run.post("/api/v1/namespaces", &json!({"metadata": {"name": name}}));
    for preconditions in [json!({"uid": OTHER_UID}), json!({"resourceVersion": "1"})] {
        run.delete(&path, &json!({"preconditions": preconditions}));
    }
    run.delete(&format!("{path}?dryRun=All"), &json!({}));
}

fn namespace_rejected(run: &mut CaseRun<'_>) {
    for name in ["With.Dots", "with.dots", &"a".repeat(64)] {
        run.post("/api/v1/namespaces", &json!({"metadata": {"name": name}}));
    }
    run.delete("/api/v1/namespaces/default?dryRun=All", &json!({}));
    run.delete("/api/v1/namespaces/kube-system", &json!({}));
}

fn owned(name: &str, owner: &Value) -> Value {
    let mut object = config_map(name, &json!({}));
    object["metadata"]["ownerReferences"] = json!([{
        "apiVersion": owner["apiVersion"],
        "kind": owner["kind"],
        "name": owner["metadata"]["name"],
        "uid": uid(owner)
    }]);
    object
}

fn garbage_of_background_deletion(run: &mut CaseRun<'_>) {
    let objects = widgets(run);
    let owner = widget(run, "owner", &json!({"color": "red"}));
    let owner = run.post(&objects, &owner);
    run.post(CONFIG_MAPS, &owned("one", &owner));
    run.get(ONE_CONFIG_MAP);
    let options = json!({"propagationPolicy": "Background", "preconditions": {"uid": uid(&owner)}});
    run.delete(&object_path(&objects, "owner"), &options);
    run.wait(ONE_CONFIG_MAP, is_gone);
}

fn garbage_of_orphaning_deletion(run: &mut CaseRun<'_>) {
    let owner = run.post(SECRETS, &json!({"metadata": {"name": "owner"}}));
    let mut owner_with_kind = owner;
    owner_with_kind["apiVersion"] = json!("v1");
    owner_with_kind["kind"] = json!("Secret");
    run.post(CONFIG_MAPS, &owned("one", &owner_with_kind));
    run.delete(
        &object_path(SECRETS, "owner"),
        &json!({"propagationPolicy": "Orphan"}),
    );
    run.wait(object_path(SECRETS, "owner"), is_gone);
    run.get(ONE_CONFIG_MAP);
    run.delete(ONE_CONFIG_MAP, &json!({"propagationPolicy": "Sideways"}));
    run.delete(
        ONE_CONFIG_MAP,
        &json!({"propagationPolicy": "Background", "orphanDependents": true}),
    );
}

fn garbage_of_missing_owner(run: &mut CaseRun<'_>) {
    let mut owner = config_map("gone", &json!({}));
    owner["metadata"]["uid"] = json!("00000000-0000-4000-8000-000000000001");
    run.unrecorded(|run| run.post(CONFIG_MAPS, &owned("one", &owner)));
    run.wait(ONE_CONFIG_MAP, is_gone);
}

fn deployment(replicas: u32) -> Value {
    json!({
        "metadata": {"name": "one"},
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": {"app": "one"}},
            "template": {
                "metadata": {"labels": {"app": "one"}},
                "spec": {"containers": [{"name": "main", "image": "example.com/main:1"}]}
            }
        }
    })
}

/// The part of a workload that the product reads.
const READ_FIELDS: [&str; 6] = [
    "/apiVersion",
    "/kind",
    "/metadata/generation",
    "/metadata/annotations",
    "/spec/replicas",
    "/status",
];

fn deployment_without_replicas(run: &mut CaseRun<'_>) {
    run.send(
        Call::new("POST", DEPLOYMENTS)
            .body(&deployment(0))
            .only(&READ_FIELDS),
    );
    let is_observed = |generation: u32| {
        move |object: &Value| {
            object.pointer("/status/observedGeneration") == Some(&json!(generation))
                && object.pointer("/status/conditions").is_some()
        }
    };
    let get = || Call::new("GET", object_path(DEPLOYMENTS, "one"));
    run.wait(
        get().only(&["/metadata/generation", "/metadata/annotations"]),
        is_observed(1),
    );
    let patch = json!({"spec": {"template": {"metadata": {"annotations": {"a": "b"}}}}});
    run.unrecorded(|run| run.merge(&object_path(DEPLOYMENTS, "one"), &patch));
    run.wait(get().only(&["/metadata/generation"]), is_observed(2));
    let mut changed = deployment(0);
    changed["spec"]["selector"]["matchLabels"]["app"] = json!("two");
    changed["spec"]["template"]["metadata"]["labels"]["app"] = json!("two");
    run.put(&object_path(DEPLOYMENTS, "one"), &changed);
    run.delete(
        &object_path(DEPLOYMENTS, "one"),
        &json!({"propagationPolicy": "Background"}),
    );
    run.wait(get(), is_gone);
    run.wait("/apis/apps/v1/namespaces/:ns/replicasets", |list| {
        list.get("items")
            .and_then(Value::as_array)
            .is_some_and(Vec::is_empty)
    });
}

fn statefulset_and_daemonset(run: &mut CaseRun<'_>) {
    let sets = "/apis/apps/v1/namespaces/:ns/statefulsets";
    let mut set = deployment(0);
    set["spec"]["serviceName"] = json!("one");
    run.send(Call::new("POST", sets).body(&set).only(&[
        "/kind",
        "/metadata/generation",
        "/spec/replicas",
    ]));
    let get = Call::new("GET", object_path(sets, "one"))
        .only(&["/metadata/generation", "/status/replicas"]);
    run.wait(get, |set| {
        set.pointer("/status/observedGeneration") == Some(&json!(1))
    });
    let daemons = "/apis/apps/v1/namespaces/:ns/daemonsets";
    let mut set = deployment(0);
    if let Some(Value::Object(spec)) = set.get_mut("spec") {
        spec.remove("replicas");
    }
    run.send(
        Call::new("POST", daemons)
            .body(&set)
            .only(&["/kind", "/metadata/generation"]),
    );
    let list = format!("{daemons}?limit=500");
    let list = Call::new("GET", list).only(&["/kind", "/apiVersion", "/items/0/metadata/name"]);
    run.send(list);
}
