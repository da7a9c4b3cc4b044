//! Server-side apply and the owners of fields.

use serde_json::{Value, json};

use super::custom::{definition, group, serve, widget, widgets};
use super::objects::{
    CONFIG_MAPS, ONE_CONFIG_MAP, ONE_SECRET, OTHER_UID, config_map, object_path, resource_version,
};
use super::run::{APPLY, Call, CaseRun, METADATA};

super::table!(
    apply_creates,
    apply_updates,
    apply_without_change,
    apply_conflicts,
    apply_forced,
    apply_removes_owned_fields,
    apply_shares_fields,
    apply_after_update,
    apply_dry_run,
    apply_needs_manager,
    apply_rejected,
    apply_custom_lists,
    apply_custom_status,
    apply_with_finalizers_and_owner,
    apply_secret,
    apply_namespace,
    managers_of_other_writes,
    managers_of_metadata_changes,
    managers_cleared,
);

fn with_manager(path: &str, manager: &str) -> String {
    format!("{path}?fieldManager={manager}")
}

fn with_force(path: &str, manager: &str) -> String {
    format!("{path}?force=true&fieldManager={manager}")
}

fn apply(run: &mut CaseRun<'_>, path: &str, manager: &str, object: &Value) {
    run.apply(&with_manager(path, manager), object);
}

fn merge(run: &mut CaseRun<'_>, path: &str, manager: &str, patch: &Value) {
    run.merge(&with_manager(path, manager), patch);
}

/// Applies the ConfigMap `one` with this data.
fn apply_one(run: &mut CaseRun<'_>, manager: &str, data: &Value) {
    apply(run, ONE_CONFIG_MAP, manager, &config_map("one", data));
}

fn force_one(run: &mut CaseRun<'_>, manager: &str, data: &Value) {
    let path = with_force(ONE_CONFIG_MAP, manager);
    run.apply(&path, &config_map("one", data));
}

fn apply_creates(run: &mut CaseRun<'_>) {
    run.keep_managed_fields();
    let mut object = config_map("one", &json!({"a": "1"}));
    object["metadata"]["labels"] = json!({"a": "b"});
    apply(run, ONE_CONFIG_MAP, "first", &object);
    run.get(ONE_CONFIG_MAP);
}

fn apply_updates(run: &mut CaseRun<'_>) {
    run.keep_managed_fields();
    apply_one(run, "first", &json!({"a": "1"}));
    apply_one(run, "first", &json!({"a": "2", "b": "3"}));
    apply_one(run, "second", &json!({"c": "4"}));
}

fn apply_without_change(run: &mut CaseRun<'_>) {
    run.keep_managed_fields();
    apply_one(run, "first", &json!({"a": "1"}));
    apply_one(run, "first", &json!({"a": "1"}));
    force_one(run, "first", &json!({"a": "1"}));
}

fn apply_conflicts(run: &mut CaseRun<'_>) {
    run.keep_managed_fields();
    apply_one(run, "first", &json!({"a": "1", "b": "1"}));
    apply_one(run, "second", &json!({"a": "2"}));
    apply_one(run, "second", &json!({"a": "2", "b": "2"}));
    apply_one(run, "third", &json!({"c": "1"}));
    apply_one(run, "fourth", &json!({"a": "2", "c": "2"}));
    run.get(ONE_CONFIG_MAP);
}

fn apply_forced(run: &mut CaseRun<'_>) {
    run.keep_managed_fields();
    apply_one(run, "first", &json!({"a": "1", "b": "1"}));
    force_one(run, "second", &json!({"a": "2"}));
    apply_one(run, "first", &json!({"b": "1"}));
    force_one(run, "first", &json!({"a": "3"}));
}

fn apply_removes_owned_fields(run: &mut CaseRun<'_>) {
    run.keep_managed_fields();
    let mut object = config_map("one", &json!({"a": "1", "b": "1"}));
    object["metadata"]["labels"] = json!({"a": "b", "c": "d"});
    apply(run, ONE_CONFIG_MAP, "first", &object);
    merge(run, ONE_CONFIG_MAP, "other", &json!({"data": {"c": "1"}}));
    object["metadata"]["labels"] = json!({"c": "d"});
    object["data"] = json!({"a": "1"});
    apply(run, ONE_CONFIG_MAP, "first", &object);
    let empty = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "one"}});
    apply(run, ONE_CONFIG_MAP, "first", &empty);
}

fn apply_shares_fields(run: &mut CaseRun<'_>) {
    run.keep_managed_fields();
    apply_one(run, "first", &json!({"a": "1", "b": "1"}));
    apply_one(run, "second", &json!({"a": "1"}));
    apply_one(run, "first", &json!({"b": "1"}));
    apply_one(run, "second", &json!({}));
}

fn apply_after_update(run: &mut CaseRun<'_>) {
    run.keep_managed_fields();
    run.post(
        &with_manager(CONFIG_MAPS, "creator"),
        &config_map("one", &json!({"a": "1", "b": "1"})),
    );
    apply_one(run, "first", &json!({"a": "2"}));
    force_one(run, "first", &json!({"a": "2"}));
    merge(run, ONE_CONFIG_MAP, "creator", &json!({"data": {"a": "3"}}));
    apply_one(run, "first", &json!({"a": "2"}));
    apply_one(run, "first", &json!({"a": "3"}));
}

/// Applies the ConfigMap `one` as a dry run.
fn try_one(run: &mut CaseRun<'_>, path: &str, value: &str) {
    let object = config_map("one", &json!({"a": value}));
    run.apply(&format!("{path}&dryRun=All"), &object);
}

fn apply_dry_run(run: &mut CaseRun<'_>) {
    run.keep_managed_fields();
    let [first, second] = ["first", "second"].map(|manager| with_manager(ONE_CONFIG_MAP, manager));
    try_one(run, &first, "1");
    run.get(ONE_CONFIG_MAP);
    apply_one(run, "first", &json!({"a": "1"}));
    try_one(run, &first, "2");
    try_one(run, &with_force(ONE_CONFIG_MAP, "second"), "3");
    try_one(run, &second, "3");
    run.get(ONE_CONFIG_MAP);
}

fn apply_needs_manager(run: &mut CaseRun<'_>) {
    run.apply(ONE_CONFIG_MAP, &config_map("one", &json!({})));
    apply_one(run, "", &json!({}));
    let long = "a".repeat(129);
    apply_one(run, &long, &json!({}));
}

fn apply_rejected(run: &mut CaseRun<'_>) {
    let path = with_manager(ONE_CONFIG_MAP, "first");
    run.apply(&path, &json!({"metadata": {"name": "one"}}));
    run.apply(
        &path,
        &json!({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "one"}}),
    );
    run.apply(&path, &config_map("two", &json!({})));
    run.apply(&path, &config_map("one", &json!({"a": 1})));
    let mut object = config_map("one", &json!({}));
    object["unknown"] = json!("a");
    run.apply(&path, &object);
    object = config_map("one", &json!({}));
    object["metadata"]["managedFields"] = json!([{"manager": "a"}]);
    run.apply(&path, &object);
    object = config_map("one", &json!({}));
    object["metadata"]["resourceVersion"] = json!("1");
    run.apply(&path, &object);
    object["metadata"] = json!({"name": "one", "uid": OTHER_UID});
    run.apply(&path, &object);
    let yaml = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: one}\ndata: {a: text}\n";
    for body in ["a: [1", yaml] {
        let call = Call::new("PATCH", path.clone()).content_type(APPLY);
        run.send(call.text(body));
    }
    object["metadata"] = json!({"name": "one", "resourceVersion": "1"});
    run.apply(&path, &object);
}

/// Applies the Widget `one` with this specification.
fn apply_widget(run: &mut CaseRun<'_>, path: &str, manager: &str, spec: &Value) {
    let object = widget(run, "one", spec);
    apply(run, path, manager, &object);
}

fn apply_custom_lists(run: &mut CaseRun<'_>) {
    run.keep_managed_fields();
    let path = object_path(&widgets(run), "one");
    let spec = json!({
        "color": "red",
        "tags": ["a", "b"],
        "parts": [{"key": "a", "value": "1"}, {"key": "b", "value": "1"}],
        "labels": {"a": "1"},
        "free": {"a": [1, 2]}
    });
    apply_widget(run, &path, "first", &spec);
    let spec = json!({
        "color": "red",
        "tags": ["b", "c"],
        "parts": [{"key": "c", "value": "2"}, {"key": "b", "other": "2"}],
        "labels": {"b": "2"}
    });
    apply_widget(run, &path, "second", &spec);
    let conflicting = json!({
        "color": "green",
        "size": 4,
        "parts": [{"key": "a", "value": "3"}],
        "free": {"a": [3]}
    });
    apply_widget(run, &path, "third", &conflicting);
    let fewer_fields =
        json!({"color": "red", "tags": ["b"], "parts": [{"key": "b", "value": "1"}]});
    apply_widget(run, &path, "first", &fewer_fields);
    let invalid = json!({"color": "red", "size": 11});
    apply_widget(run, &path, "first", &invalid);
}

fn apply_custom_status(run: &mut CaseRun<'_>) {
    run.keep_managed_fields();
    let path = object_path(&widgets(run), "one");
    let status_path = object_path(&path, "status");
    let mut object = widget(run, "one", &json!({"color": "red"}));
    object["status"] = json!({"state": "ignored"});
    apply(run, &status_path, "reporter", &object);
    apply(run, &path, "first", &object);
    let mut status = widget(run, "one", &json!({"color": "green"}));
    status["status"] = json!({"state": "new", "observed": 1});
    apply(run, &status_path, "reporter", &status);
    let patch = json!({"status": {"observed": 2}});
    merge(run, &status_path, "patcher", &patch);
    apply(run, &status_path, "reporter", &status);
    merge(run, &path, "patcher", &json!({"spec": {"size": 4}}));
}

fn apply_with_finalizers_and_owner(run: &mut CaseRun<'_>) {
    run.keep_managed_fields();
    let owner = run.post(
        &with_manager(CONFIG_MAPS, "creator"),
        &config_map("owner", &json!({})),
    );
    let mut object = config_map("one", &json!({"a": "1"}));
    object["metadata"]["finalizers"] = json!(["example.com/a"]);
    object["metadata"]["ownerReferences"] = json!([{
        "apiVersion": "v1", "kind": "ConfigMap", "name": "owner", "uid": owner["metadata"]["uid"]
    }]);
    apply(run, ONE_CONFIG_MAP, "first", &object);
    let patch = json!({"metadata": {"finalizers": ["example.com/a", "example.com/b"]}});
    merge(run, ONE_CONFIG_MAP, "other", &patch);
    apply_one(run, "first", &json!({"a": "1"}));
    run.unrecorded(|run| run.merge(ONE_CONFIG_MAP, &json!({"metadata": {"finalizers": null}})));
}

fn apply_secret(run: &mut CaseRun<'_>) {
    run.keep_managed_fields();
    let mut secret = json!({
        "apiVersion": "v1", "kind": "Secret", "metadata": {"name": "one"}, "data": {"a": "Yg=="}
    });
    let conflicting = secret.clone();
    secret["data"]["a"] = json!("YQ==");
    secret["type"] = json!("Opaque");
    apply(run, ONE_SECRET, "first", &secret);
    apply(run, ONE_SECRET, "second", &conflicting);
}

fn apply_namespace(run: &mut CaseRun<'_>) {
    run.keep_managed_fields();
    let name = format!("{}-other", run.namespace());
    let path = format!("/api/v1/namespaces/{name}");
    run.delete_at_end(&path);
    for metadata in [
        json!({"name": name, "labels": {"a": "b"}}),
        json!({"name": name}),
    ] {
        let namespace = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata});
        apply(run, &path, "first", &namespace);
    }
}

fn managers_of_other_writes(run: &mut CaseRun<'_>) {
    run.keep_managed_fields();
    let objects = widgets(run);
    let path = object_path(&objects, "one");
    let spec = json!({"color": "red", "tags": ["a"], "parts": [{"key": "a"}]});
    let object = widget(run, "one", &spec);
    let created = run.post(&objects, &object);
    let patch = json!({"spec": {"size": 5}, "metadata": {"annotations": {"a": "b"}}});
    run.merge(&path, &patch);
    let patch = json!({"spec": {"tags": ["b"], "color": "green"}});
    merge(run, &path, "other", &patch);
    let status = object_path(&path, "status");
    run.merge(&status, &json!({"status": {"state": "new"}}));
    let current = run.send(Call::new("GET", path.clone()).accept(METADATA));
    let mut replaced = created;
    replaced["metadata"]["resourceVersion"] = Value::String(resource_version(&current));
    run.put(&with_manager(&path, "replacer"), &replaced);
}

/// A change of the metadata does not change the owners of defaults.
fn managers_of_metadata_changes(run: &mut CaseRun<'_>) {
    run.keep_managed_fields();
    let mut definition = definition(&group(run), "Namespaced");
    let schema = &mut definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"];
    *schema = json!({
        "type": "object",
        "properties": {"spec": {"type": "object", "default": {}, "properties": {"size": {"type": "integer", "default": 3}}}}
    });
    let objects = serve(run, &definition);
    let object = widget(run, "one", &json!({}));
    let mut replaced = run.post(&with_manager(&objects, "first"), &object);
    let path = object_path(&objects, "one");
    let labels = json!({"metadata": {"labels": {"a": "b"}}});
    merge(run, &path, "second", &labels);
    replaced["metadata"]["resourceVersion"] = Value::Null;
    replaced["metadata"]["labels"] = json!({"a": "c"});
    run.put(&with_manager(&path, "third"), &replaced);
    merge(run, "/api/v1/namespaces/:ns", "second", &labels);
}

fn managers_cleared(run: &mut CaseRun<'_>) {
    run.keep_managed_fields();
    apply_one(run, "first", &json!({"a": "1"}));
    let reset = json!({"metadata": {"managedFields": [{}]}});
    run.merge(ONE_CONFIG_MAP, &reset);
    apply_one(run, "second", &json!({"a": "2"}));
}
