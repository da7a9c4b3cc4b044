//! CustomResourceDefinitions and their objects.

use serde_json::{Value, json};

use super::objects::{OTHER_UID, object_path, resource_version, uid, with_version};
use super::run::{Call, CaseRun};
use super::schema::widget_schema;

super::table!(
    crd_becomes_established,
    crd_rejected,
    crd_name_conflict,
    crd_update,
    crd_schema_changes_fields,
    crd_apply,
    crd_deletion_deletes_objects,
    crd_deletion_waits_for_finalizers,
    custom_life,
    custom_defaults_and_pruning,
    custom_validation,
    custom_generation,
    custom_status,
    custom_without_status_subresource,
    custom_merge_patch,
    custom_finalizers,
    custom_preconditions,
    custom_dry_run,
    custom_cluster_scope,
    custom_field_validation,
);

pub(super) const CRDS: &str = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions";

/// Returns a definition of Widgets in this group.
pub(super) fn definition(group: &str, scope: &str) -> Value {
    json!({
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": format!("widgets.{group}")},
        "spec": {
            "group": group,
            "scope": scope,
            "names": {"plural": "widgets", "singular": "widget", "kind": "Widget", "listKind": "WidgetList"},
            "versions": [{
                "name": "v1",
                "served": true,
                "storage": true,
                "schema": {"openAPIV3Schema": widget_schema()},
                "subresources": {"status": {}}
            }]
        }
    })
}

pub(super) fn group(run: &CaseRun<'_>) -> String {
    format!("{}.example.com", run.namespace())
}

pub(super) fn crd_path(run: &CaseRun<'_>) -> String {
    format!("{CRDS}/widgets.{}", group(run))
}

pub(super) fn is_established(crd: &Value) -> bool {
    let conditions = crd.pointer("/status/conditions").and_then(Value::as_array);
    conditions.into_iter().flatten().any(|condition| {
        condition.get("type") == Some(&json!("Established"))
            && condition.get("status") == Some(&json!("True"))
    })
}

/// Creates this definition without a record and returns the path of its objects.
pub(super) fn serve(run: &mut CaseRun<'_>, definition: &Value) -> String {
    let (crd, group) = (crd_path(run), group(run));
    run.delete_at_end(&crd);
    let is_namespaced = definition.pointer("/spec/scope") == Some(&json!("Namespaced"));
    let widgets = match is_namespaced {
        true => format!("/apis/{group}/v1/namespaces/:ns/widgets"),
        false => format!("/apis/{group}/v1/widgets"),
    };
    run.unrecorded(|run| {
        run.wait(Call::new("POST", CRDS).body(definition), |created| {
            !uid(created).is_empty()
        });
        run.wait(crd.as_str(), is_established);
        run.wait(widgets.as_str(), |list| list.get("items").is_some());
    });
    widgets
}

/// Creates a definition of namespaced Widgets without a record and returns the path of its objects.
pub(super) fn widgets(run: &mut CaseRun<'_>) -> String {
    let definition = definition(&group(run), "Namespaced");
    serve(run, &definition)
}

pub(super) fn widget(run: &CaseRun<'_>, name: &str, spec: &Value) -> Value {
    json!({
        "apiVersion": format!("{}/v1", group(run)),
        "kind": "Widget",
        "metadata": {"name": name},
        "spec": spec
    })
}

fn crd_becomes_established(run: &mut CaseRun<'_>) {
    let definition = definition(&group(run), "Namespaced");
    let crd = crd_path(run);
    run.delete_at_end(&crd);
    run.post(CRDS, &definition);
    run.wait(crd.as_str(), is_established);
    let objects = format!("/apis/{}/v1/namespaces/:ns/widgets", group(run));
    run.wait(objects.as_str(), |list| list.get("items").is_some());
    run.post(CRDS, &definition);
    run.get(&format!("/apis/{}/v1/widgets?limit=1", group(run)));
    run.get(&format!("/apis/{}/v2/widgets", group(run)));
    run.get(&format!("{objects}/none"));
}

fn crd_rejected(run: &mut CaseRun<'_>) {
    let group = group(run);
    let valid = definition(&group, "Namespaced");
    let mut changed = valid.clone();
    changed["metadata"]["name"] = json!("other.example.com");
    run.post(CRDS, &changed);
    let mut changed = valid.clone();
    changed["spec"]["scope"] = json!("Everywhere");
    run.post(CRDS, &changed);
    let mut changed = valid.clone();
    changed["spec"]["versions"][0]["storage"] = json!(false);
    run.post(CRDS, &changed);
    let mut changed = valid;
    changed["spec"]["versions"][0]["schema"] = json!({});
    run.post(CRDS, &changed);
}

fn crd_name_conflict(run: &mut CaseRun<'_>) {
    widgets(run);
    let group = group(run);
    let mut other = definition(&group, "Namespaced");
    other["metadata"]["name"] = json!(format!("gadgets.{group}"));
    other["spec"]["names"]["plural"] = json!("gadgets");
    other["spec"]["names"]["singular"] = json!("gadget");
    let crd = format!("{CRDS}/gadgets.{group}");
    run.delete_at_end(&crd);
    run.unrecorded(|run| run.post(CRDS, &other));
    let call = Call::new("GET", crd).only(&["/status/acceptedNames", "/status/conditions"]);
    run.wait(call, |crd| {
        let conditions = crd.pointer("/status/conditions").and_then(Value::as_array);
        conditions.is_some_and(|conditions| !conditions.is_empty())
    });
}

fn crd_update(run: &mut CaseRun<'_>) {
    widgets(run);
    let crd = crd_path(run);
    let current = get_metadata(run, &crd);
    let mut next = definition(&group(run), "Namespaced");
    run.put(&crd, &next);
    next["metadata"]["labels"] = json!({"a": "b"});
    run.put(&crd, &with_version(next.clone(), "1"));
    let version = resource_version(&current);
    run.put(&crd, &with_version(next.clone(), &version));
    next["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["extra"] =
        json!({"type": "string"});
    let current = get_metadata(run, &crd);
    let replace = Call::new("PUT", crd.clone())
        .body(&with_version(next.clone(), &resource_version(&current)));
    run.send(replace.only(&["/metadata", "/status"]));
    next["spec"]["scope"] = json!("Cluster");
    let current = get_metadata(run, &crd);
    run.put(&crd, &with_version(next, &resource_version(&current)));
    run.merge(&crd, &json!({"metadata": {"annotations": {"c": "d"}}}));
}

fn get_metadata(run: &mut CaseRun<'_>, path: &str) -> Value {
    run.send(Call::new("GET", path).only(&["/metadata"]))
}

fn crd_schema_changes_fields(run: &mut CaseRun<'_>) {
    let objects = widgets(run);
    let object = widget(run, "one", &json!({"color": "red", "extra": "kept later"}));
    run.post(&objects, &object);
    let (crd, group) = (crd_path(run), group(run));
    let patch = json!({"type": "string"});
    let mut next = definition(&group, "Namespaced");
    next["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]
        ["extra"] = patch;
    let current = get_metadata(run, &crd);
    run.unrecorded(|run| run.put(&crd, &with_version(next, &resource_version(&current))));
    let labels: Vec<&str> = group.rsplit('.').collect();
    let name = format!("{}.v1.Widget", labels.join("."));
    let schema = format!("/components/schemas/{name}");
    let fields = format!("{schema}/properties/spec/properties");
    let kinds = format!("{schema}/x-kubernetes-group-version-kind");
    let openapi = Call::new("GET", format!("/openapi/v3/apis/{group}/v1"));
    run.wait(openapi.only(&[&fields, &kinds]), |document| {
        document.pointer(&format!("{fields}/extra")).is_some()
    });
    let one = object_path(&objects, "one");
    run.get(&one);
    run.merge(&one, &json!({"spec": {"extra": "kept"}}));
}

fn crd_apply(run: &mut CaseRun<'_>) {
    let definition = definition(&group(run), "Namespaced");
    let crd = crd_path(run);
    run.delete_at_end(&crd);
    let path = format!("{crd}?fieldManager=krypton&force=true");
    run.apply(&path, &definition);
    run.unrecorded(|run| run.wait(crd.as_str(), is_established));
    run.apply(&path, &definition);
    let other = format!("{crd}?fieldManager=helm&force=true&dryRun=All");
    run.apply(&other, &definition);
}

fn crd_deletion_deletes_objects(run: &mut CaseRun<'_>) {
    let objects = widgets(run);
    let one = widget(run, "one", &json!({"color": "red"}));
    run.post(&objects, &one);
    run.wait_for_cache(&objects, 1);
    let watch = run.watch(format!("{objects}?watch=true&resourceVersion=0"));
    run.event(watch);
    let crd = crd_path(run);
    let current = get_metadata(run, &crd);
    let other = json!({"preconditions": {"uid": OTHER_UID}});
    run.delete(&crd, &other);
    let options = json!({"preconditions": {"uid": uid(&current)}});
    let delete = Call::new("DELETE", crd.clone()).body(&options);
    run.send(delete.only(&["/kind", "/metadata/name", "/metadata/finalizers"]));
    run.event(watch);
    run.wait(crd.as_str(), |crd| crd.get("code") == Some(&json!(404)));
    run.wait(objects.as_str(), |list| list.get("items").is_none());
}

fn crd_deletion_waits_for_finalizers(run: &mut CaseRun<'_>) {
    let objects = widgets(run);
    let mut one = widget(run, "one", &json!({"color": "red"}));
    one["metadata"]["finalizers"] = json!(["example.com/a"]);
    run.post(&objects, &one);
    let crd = crd_path(run);
    run.unrecorded(|run| run.delete(&crd, &json!({})));
    let object = object_path(&objects, "one");
    run.wait(object.as_str(), |object| {
        object.pointer("/metadata/deletionTimestamp").is_some()
    });
    let two = widget(run, "two", &json!({"color": "red"}));
    let terminating =
        Call::new("GET", crd.clone()).only(&["/metadata/finalizers", "/status/conditions"]);
    run.wait(terminating, |crd| {
        crd.pointer("/status/conditions")
            .is_some_and(|all| all.to_string().contains("InstanceDeletionInProgress"))
    });
    run.wait(Call::new("POST", objects.clone()).body(&two), |created| {
        created.get("code").is_some()
    });
    run.merge(&object, &json!({"metadata": {"finalizers": null}}));
    run.wait(crd.as_str(), |crd| crd.get("code") == Some(&json!(404)));
}

fn custom_life(run: &mut CaseRun<'_>) {
    let objects = widgets(run);
    let one = widget(run, "one", &json!({"color": "red"}));
    let created = run.post(&objects, &one);
    run.post(&objects, &one);
    run.get(&object_path(&objects, "one"));
    run.put(&object_path(&objects, "one"), &one);
    let mut next = created;
    next["spec"]["color"] = json!("green");
    let next = run.put(&object_path(&objects, "one"), &next);
    run.put(&object_path(&objects, "one"), &with_version(next, "1"));
    run.get(&objects);
    run.get(&format!("{objects}?fieldSelector=metadata.name%3Dtwo"));
    run.get(&format!("{objects}?fieldSelector=spec.color%3Dred"));
    run.delete(&object_path(&objects, "one"), &json!({}));
    run.delete(&object_path(&objects, "one"), &json!({}));
    run.get(&object_path(&objects, "one"));
    run.put(&object_path(&objects, "one"), &one);
}

fn custom_defaults_and_pruning(run: &mut CaseRun<'_>) {
    let objects = widgets(run);
    let spec = json!({
        "color": "red",
        "unknown": {"a": 1},
        "note": null,
        "size": null,
        "labels": {"a": "b"},
        "free": {"a": {"b": [1, 2.5, null]}, "c": null}
    });
    let mut one = widget(run, "one", &spec);
    one["other"] = json!("pruned");
    one["metadata"]["unknown"] = json!("pruned");
    one["status"] = json!({"state": "dropped"});
    run.post(&objects, &one);
    let parts = json!({"color": "red", "parts": [{"key": "a", "unknown": "pruned"}], "tags": []});
    let two = widget(run, "two", &parts);
    run.post(&objects, &two);
}

fn custom_validation(run: &mut CaseRun<'_>) {
    let objects = widgets(run);
    let specs = [
        json!({}),
        json!({"color": "blue"}),
        json!({"color": 7}),
        json!({"color": "red", "size": 0}),
        json!({"color": "red", "size": 11}),
        json!({"color": "red", "size": "4"}),
        json!({"color": "red", "size": 1.5}),
        json!({"color": "red", "name": "a"}),
        json!({"color": "red", "name": "Aa"}),
        json!({"color": "red", "name": "abcdef"}),
        json!({"color": "red", "tags": ["a", "a"]}),
        json!({"color": "red", "tags": ["a", "b", "c", "d"]}),
        json!({"color": "red", "parts": [{"key": "a"}, {"key": "a"}]}),
        json!({"color": "red", "parts": [{"value": "a"}]}),
        json!({"color": "red", "free": "text"}),
        json!("text"),
    ];
    for spec in specs {
        let object = widget(run, "one", &spec);
        run.post(&objects, &object);
    }
    let api_version = format!("{}/v1", group(run));
    let metadata = json!({"name": "one"});
    for object in [
        json!({"apiVersion": api_version, "kind": "Widget", "metadata": metadata}),
        json!({"metadata": metadata}),
        json!({"apiVersion": api_version, "kind": "Gadget", "metadata": metadata}),
        widget(run, "Not_A_Name", &json!({"color": "red"})),
    ] {
        run.post(&objects, &object);
    }
}

fn custom_generation(run: &mut CaseRun<'_>) {
    let objects = widgets(run);
    let mut one = widget(run, "one", &json!({"color": "red"}));
    one["metadata"]["generation"] = json!(7);
    run.post(&objects, &one);
    let path = object_path(&objects, "one");
    for patch in [
        json!({"metadata": {"labels": {"a": "b"}}}),
        json!({"spec": {"color": "green"}}),
        json!({"spec": {"color": "green"}}),
        json!({"metadata": {"generation": 9}}),
    ] {
        run.merge(&path, &patch);
    }
    let status = object_path(&path, "status");
    run.merge(&status, &json!({"status": {"state": "new"}}));
    let finalizers = |finalizers: Value| json!({"metadata": {"finalizers": finalizers}});
    run.merge(&path, &finalizers(json!(["example.com/a"])));
    run.delete(&path, &json!({}));
    run.merge(&path, &json!({"spec": {"color": "red"}}));
    run.merge(&path, &finalizers(json!([])));
}

fn custom_status(run: &mut CaseRun<'_>) {
    let objects = widgets(run);
    let (path, status) = (
        object_path(&objects, "one"),
        object_path(&objects, "one/status"),
    );
    let one = widget(run, "one", &json!({"color": "red"}));
    run.merge(&status, &json!({"status": {"state": "none"}}));
    let created = run.post(&objects, &one);
    run.get(&status);
    let patch = json!({
        "spec": {"color": "green"},
        "metadata": {"labels": {"a": "b"}},
        "status": {"state": "new", "observed": 1, "unknown": "pruned", "since": "2001-02-03T04:05:06Z"}
    });
    run.merge(&status, &patch);
    run.merge(&path, &json!({"status": {"state": "ignored"}}));
    let (version, uid) = (resource_version(&created), uid(&created));
    for patch in [
        json!({"status": {"state": null, "observed": 2}}),
        json!({"metadata": {"resourceVersion": version}, "status": {"observed": 3}}),
        json!({"metadata": {"uid": OTHER_UID}, "status": {"observed": 3}}),
        json!({"metadata": {"uid": uid}, "status": {"observed": "text"}}),
    ] {
        run.merge(&status, &patch);
    }
    let mut current = run.get(&path);
    current["status"]["state"] = json!("replaced");
    current["spec"]["color"] = json!("green");
    run.put(&status, &current);
    run.put(&status, &current);
    run.merge(&status, &json!({"status": null}));
    let dry_run = format!("{status}?dryRun=All");
    run.merge(&dry_run, &json!({"status": {"state": "trial"}}));
    run.get(&path);
}

fn custom_without_status_subresource(run: &mut CaseRun<'_>) {
    let mut definition = definition(&group(run), "Namespaced");
    if let Some(Value::Object(version)) = definition.pointer_mut("/spec/versions/0") {
        version.remove("subresources");
    }
    let objects = serve(run, &definition);
    let mut one = widget(run, "one", &json!({"color": "red"}));
    one["status"] = json!({"state": "new"});
    run.post(&objects, &one);
    for (path, state) in [("one", "next"), ("one/status", "last")] {
        let path = object_path(&objects, path);
        run.merge(&path, &json!({"status": {"state": state}}));
    }
}

fn custom_merge_patch(run: &mut CaseRun<'_>) {
    let objects = widgets(run);
    let spec = json!({
        "color": "red",
        "tags": ["a", "b"],
        "labels": {"a": "1", "b": "2"},
        "free": {"a": {"b": 1, "c": [1]}}
    });
    let one = widget(run, "one", &spec);
    let created = run.post(&objects, &one);
    let (version, uid) = (resource_version(&created), uid(&created));
    for patch in [
        json!({"spec": {"labels": {"a": null, "c": "3"}, "tags": ["c"]}}),
        json!({"spec": {"free": {"a": {"b": null, "d": {"e": null}}, "f": {"g": null}}}}),
        json!({"spec": {"size": null, "note": null, "labels": null}}),
        json!({"spec": {"color": null}}),
        json!({"spec": null}),
        json!({}),
        json!({"metadata": {"name": "two"}}),
        json!({"metadata": {"namespace": "default"}}),
        json!({"kind": "Gadget"}),
        json!({"metadata": {"resourceVersion": version}, "spec": {"size": 4}}),
        json!({"metadata": {"uid": uid}, "spec": {"size": 4}}),
        json!({"metadata": {"uid": OTHER_UID}}),
        json!({"metadata": {"creationTimestamp": null, "labels": {}, "annotations": {"a": "b"}}}),
        json!({"metadata": {"annotations": null}}),
    ] {
        run.merge(&object_path(&objects, "one"), &patch);
    }
}

fn custom_finalizers(run: &mut CaseRun<'_>) {
    let objects = widgets(run);
    let mut one = widget(run, "one", &json!({"color": "red"}));
    one["metadata"]["finalizers"] = json!(["example.com/a", "example.com/b"]);
    let path = object_path(&objects, "one");
    run.post(&objects, &one);
    run.delete(&path, &json!({}));
    let current = run.delete(&path, &json!({"propagationPolicy": "Background"}));
    run.merge(
        &object_path(&path, "status"),
        &json!({"status": {"state": "deleting"}}),
    );
    let only_b = |current: &Value| {
        let version = resource_version(current);
        json!({"metadata": {"finalizers": ["example.com/b"], "resourceVersion": version}})
    };
    run.merge(&path, &only_b(&current));
    let current = run.get(&path);
    run.merge(&path, &only_b(&current));
    let finalizers = ["example.com/b", "example.com/c"];
    run.merge(&path, &json!({"metadata": {"finalizers": finalizers}}));
    run.post(&objects, &one);
    run.merge(&path, &json!({"metadata": {"finalizers": null}}));
    run.merge(&path, &json!({"metadata": {"finalizers": null}}));
    run.post(
        &objects,
        &json!({
            "apiVersion": one["apiVersion"], "kind": "Widget", "spec": {"color": "red"},
            "metadata": {"name": "two", "finalizers": ["no slash"]}
        }),
    );
    run.delete(&object_path(&objects, "two"), &json!({}));
}

fn custom_preconditions(run: &mut CaseRun<'_>) {
    let objects = widgets(run);
    let one = widget(run, "one", &json!({"color": "red"}));
    let path = object_path(&objects, "one");
    let created = run.post(&objects, &one);
    let next = run.merge(&path, &json!({"spec": {"size": 5}}));
    let (old_version, version) = (resource_version(&created), resource_version(&next));
    for preconditions in [
        json!({"uid": OTHER_UID}),
        json!({"resourceVersion": old_version}),
        json!({"uid": OTHER_UID, "resourceVersion": old_version}),
        json!({"uid": uid(&created), "resourceVersion": version}),
    ] {
        run.delete(&path, &json!({"preconditions": preconditions}));
    }
    let again = run.post(&objects, &one);
    run.delete(&path, &json!({"preconditions": {"uid": uid(&created)}}));
    let mut stale = created;
    stale["spec"]["size"] = json!(6);
    run.put(&path, &stale);
    stale["metadata"]["resourceVersion"] = json!(resource_version(&again));
    run.put(&path, &stale);
}

fn custom_dry_run(run: &mut CaseRun<'_>) {
    let objects = widgets(run);
    let one = widget(run, "one", &json!({"color": "red"}));
    let path = object_path(&objects, "one");
    let dry_run = |path: &str| format!("{path}?dryRun=All");
    run.post(&dry_run(&objects), &one);
    run.get(&path);
    run.post(&objects, &one);
    run.post(&dry_run(&objects), &one);
    run.merge(&dry_run(&path), &json!({"spec": {"color": "green"}}));
    run.merge(&dry_run(&path), &json!({"spec": {"color": "blue"}}));
    run.put(&dry_run(&path), &one);
    run.delete(&dry_run(&path), &json!({}));
    run.get(&path);
}

fn custom_cluster_scope(run: &mut CaseRun<'_>) {
    let definition = definition(&group(run), "Cluster");
    let objects = serve(run, &definition);
    let one = widget(run, "one", &json!({"color": "red"}));
    run.post(&objects, &one);
    run.get(&objects);
    run.get(&object_path(&objects, "one"));
    run.get(&format!("/apis/{}/v1/namespaces/:ns/widgets", group(run)));
    let mut two = widget(run, "two", &json!({"color": "red"}));
    two["metadata"]["namespace"] = json!("default");
    run.post(&objects, &two);
    run.delete(&object_path(&objects, "one"), &json!({}));
}

fn custom_field_validation(run: &mut CaseRun<'_>) {
    let objects = widgets(run);
    let one = widget(run, "one", &json!({"color": "red", "unknown": 1}));
    run.post(&format!("{objects}?fieldValidation=Strict"), &one);
    run.post(&format!("{objects}?fieldValidation=Ignore"), &one);
    run.merge(
        &format!("{}?fieldValidation=Strict", object_path(&objects, "one")),
        &json!({"spec": {"unknown": 1}}),
    );
}
