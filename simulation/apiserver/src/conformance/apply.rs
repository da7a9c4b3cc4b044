//! Server-side apply and the owners of fields.

use serde_json::{Value, json};

use super::custom::{widget, widgets};
use super::objects::{CONFIG_MAPS, ONE_CONFIG_MAP, config_map, object_path, resource_version};
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
    managers_cleared,
);

fn with_manager(path: &str, manager: &str) -> String {
    format!("{path}?fieldManager={manager}")
}

fn with_force(path: &str, manager: &str) -> String {
    format!("{path}?force=true&fieldManager={manager}")
}

/// Applies the ConfigMap `one` with this data.
fn apply_one(run: &mut CaseRun<'_>, manager: &str, data: &Value) {
    let path = with_manager(ONE_CONFIG_MAP, manager);
    run.apply(&path, &config_map("one", data));
}

fn force_one(run: &mut CaseRun<'_>, manager: &str, data: &Value) {
    let path = with_force(ONE_CONFIG_MAP, manager);
    run.apply(&path, &config_map("one", data));
}

fn apply_creates(run: &mut CaseRun<'_>) {
    run.keep_managed_fields();
    let mut object = config_map("one", &json!({"a": "1"}));
    object["metadata"]["labels"] = json!({"a": "b"});
    run.apply(&with_manager(ONE_CONFIG_MAP, "first"), &object);
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
    run.apply(&with_manager(ONE_CONFIG_MAP, "first"), &object);
    run.merge(
        &with_manager(ONE_CONFIG_MAP, "other"),
        &json!({"data": {"c": "1"}}),
    );
    object["metadata"]["labels"] = json!({"c": "d"});
    object["data"] = json!({"a": "1"});
    run.apply(&with_manager(ONE_CONFIG_MAP, "first"), &object);
    run.apply(
        &with_manager(ONE_CONFIG_MAP, "first"),
        &json!({
            "apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "one"}
        }),
    );
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
    run.merge(
        &with_manager(ONE_CONFIG_MAP, "creator"),
        &json!({"data": {"a": "3"}}),
    );
    apply_one(run, "first", &json!({"a": "2"}));
    apply_one(run, "first", &json!({"a": "3"}));
}

fn apply_dry_run(run: &mut CaseRun<'_>) {
    run.keep_managed_fields();
    run.apply(
        &format!("{}&dryRun=All", with_manager(ONE_CONFIG_MAP, "first")),
        &config_map("one", &json!({"a": "1"})),
    );
    run.get(ONE_CONFIG_MAP);
    apply_one(run, "first", &json!({"a": "1"}));
    run.apply(
        &format!("{}&dryRun=All", with_manager(ONE_CONFIG_MAP, "first")),
        &config_map("one", &json!({"a": "2"})),
    );
    run.apply(
        &format!("{}&dryRun=All", with_force(ONE_CONFIG_MAP, "second")),
        &config_map("one", &json!({"a": "3"})),
    );
    run.apply(
        &format!("{}&dryRun=All", with_manager(ONE_CONFIG_MAP, "second")),
        &config_map("one", &json!({"a": "3"})),
    );
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
    object["metadata"] = json!({"name": "one", "uid": "00000000-0000-4000-8000-000000000000"});
    run.apply(&path, &object);
    run.send(
        Call::new("PATCH", path.clone())
            .content_type(APPLY)
            .text("a: [1"),
    );
    let yaml = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: one}\ndata: {a: text}\n";
    run.send(
        Call::new("PATCH", path.clone())
            .content_type(APPLY)
            .text(yaml),
    );
    object["metadata"] = json!({"name": "one", "resourceVersion": "1"});
    run.apply(&path, &object);
}

fn apply_custom_lists(run: &mut CaseRun<'_>) {
    run.keep_managed_fields();
    let path = object_path(&widgets(run), "one");
    let first = widget(
        run,
        "one",
        &json!({
            "color": "red",
            "tags": ["a", "b"],
            "parts": [{"key": "a", "value": "1"}, {"key": "b", "value": "1"}],
            "labels": {"a": "1"},
            "free": {"a": [1, 2]}
        }),
    );
    run.apply(&with_manager(&path, "first"), &first);
    let second = widget(
        run,
        "one",
        &json!({
            "color": "red",
            "tags": ["b", "c"],
            "parts": [{"key": "c", "value": "2"}, {"key": "b", "other": "2"}],
            "labels": {"b": "2"}
        }),
    );
    run.apply(&with_manager(&path, "second"), &second);
    let conflicting = widget(
        run,
        "one",
        &json!({
            "color": "green",
            "size": 4,
            "parts": [{"key": "a", "value": "3"}],
            "free": {"a": [3]}
        }),
    );
    run.apply(&with_manager(&path, "third"), &conflicting);
    let fewer_fields = widget(
        run,
        "one",
        &json!({"color": "red", "tags": ["b"], "parts": [{"key": "b", "value": "1"}]}),
    );
    run.apply(&with_manager(&path, "first"), &fewer_fields);
    let invalid = widget(run, "one", &json!({"color": "red", "size": 11}));
    run.apply(&with_manager(&path, "first"), &invalid);
}

fn apply_custom_status(run: &mut CaseRun<'_>) {
    run.keep_managed_fields();
    let path = object_path(&widgets(run), "one");
    let mut object = widget(run, "one", &json!({"color": "red"}));
    object["status"] = json!({"state": "ignored"});
    run.apply(
        &with_manager(&object_path(&path, "status"), "reporter"),
        &object,
    );
    run.apply(&with_manager(&path, "first"), &object);
    let mut status = widget(run, "one", &json!({"color": "green"}));
    status["status"] = json!({"state": "new", "observed": 1});
    run.apply(
        &with_manager(&object_path(&path, "status"), "reporter"),
        &status,
    );
    run.merge(
        &with_manager(&object_path(&path, "status"), "patcher"),
        &json!({"status": {"observed": 2}}),
    );
    run.apply(
        &with_manager(&object_path(&path, "status"), "reporter"),
        &status,
    );
    run.merge(
        &with_manager(&path, "patcher"),
        &json!({"spec": {"size": 4}}),
    );
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
    run.apply(&with_manager(ONE_CONFIG_MAP, "first"), &object);
    run.merge(
        &with_manager(ONE_CONFIG_MAP, "other"),
        &json!({"metadata": {"finalizers": ["example.com/a", "example.com/b"]}}),
    );
    apply_one(run, "first", &json!({"a": "1"}));
    run.unrecorded(|run| run.merge(ONE_CONFIG_MAP, &json!({"metadata": {"finalizers": null}})));
}

fn apply_secret(run: &mut CaseRun<'_>) {
    run.keep_managed_fields();
    let path = "/api/v1/namespaces/:ns/secrets/one";
    run.apply(
        &with_manager(path, "first"),
        &json!({
            "apiVersion": "v1", "kind": "Secret", "metadata": {"name": "one"},
            "data": {"a": "YQ=="}, "type": "Opaque"
        }),
    );
    run.apply(
        &with_manager(path, "second"),
        &json!({
            "apiVersion": "v1", "kind": "Secret", "metadata": {"name": "one"}, "data": {"a": "Yg=="}
        }),
    );
}

fn apply_namespace(run: &mut CaseRun<'_>) {
    run.keep_managed_fields();
    let name = format!("{}-other", run.namespace());
    let path = format!("/api/v1/namespaces/{name}");
    run.delete_at_end(&path);
    let metadata = json!({"name": name, "labels": {"a": "b"}});
    run.apply(
        &with_manager(&path, "first"),
        &json!({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata}),
    );
    let metadata = json!({"name": name});
    run.apply(
        &with_manager(&path, "first"),
        &json!({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata}),
    );
}

fn managers_of_other_writes(run: &mut CaseRun<'_>) {
    run.keep_managed_fields();
    let objects = widgets(run);
    let path = object_path(&objects, "one");
    let object = widget(
        run,
        "one",
        &json!({"color": "red", "tags": ["a"], "parts": [{"key": "a"}]}),
    );
    let created = run.post(&objects, &object);
    run.merge(
        &path,
        &json!({"spec": {"size": 5}, "metadata": {"annotations": {"a": "b"}}}),
    );
    run.merge(
        &with_manager(&path, "other"),
        &json!({"spec": {"tags": ["b"], "color": "green"}}),
    );
    run.merge(
        &object_path(&path, "status"),
        &json!({"status": {"state": "new"}}),
    );
    let current = run.send(Call::new("GET", path.clone()).accept(METADATA));
    let mut replaced = created;
    replaced["metadata"]["resourceVersion"] = Value::String(resource_version(&current));
    run.put(&with_manager(&path, "replacer"), &replaced);
}

fn managers_cleared(run: &mut CaseRun<'_>) {
    run.keep_managed_fields();
    apply_one(run, "first", &json!({"a": "1"}));
    run.merge(
        ONE_CONFIG_MAP,
        &json!({"metadata": {"managedFields": [{}]}}),
    );
    apply_one(run, "second", &json!({"a": "2"}));
}
