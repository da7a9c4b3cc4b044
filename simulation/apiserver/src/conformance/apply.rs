//! Server-side apply and the owners of fields.

use serde_json::{Value, json};

use super::custom::{widget, widgets};
use super::objects::{MAPS, at, map, version};
use super::run::{APPLY, Call, METADATA, Run};

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

fn by(path: &str, manager: &str) -> String {
    format!("{path}?fieldManager={manager}")
}

fn forced(path: &str, manager: &str) -> String {
    format!("{path}?force=true&fieldManager={manager}")
}

fn one() -> String {
    at(MAPS, "one")
}

fn apply_creates(run: &mut Run<'_>) {
    run.keep_managers();
    let mut object = map("one", &json!({"a": "1"}));
    object["metadata"]["labels"] = json!({"a": "b"});
    run.apply(&by(&one(), "first"), &object);
    run.get(&one());
}

fn apply_updates(run: &mut Run<'_>) {
    run.keep_managers();
    run.apply(&by(&one(), "first"), &map("one", &json!({"a": "1"})));
    run.apply(
        &by(&one(), "first"),
        &map("one", &json!({"a": "2", "b": "3"})),
    );
    run.apply(&by(&one(), "second"), &map("one", &json!({"c": "4"})));
}

fn apply_without_change(run: &mut Run<'_>) {
    run.keep_managers();
    run.apply(&by(&one(), "first"), &map("one", &json!({"a": "1"})));
    run.apply(&by(&one(), "first"), &map("one", &json!({"a": "1"})));
    run.apply(&forced(&one(), "first"), &map("one", &json!({"a": "1"})));
}

fn apply_conflicts(run: &mut Run<'_>) {
    run.keep_managers();
    run.apply(
        &by(&one(), "first"),
        &map("one", &json!({"a": "1", "b": "1"})),
    );
    run.apply(&by(&one(), "second"), &map("one", &json!({"a": "2"})));
    run.apply(
        &by(&one(), "second"),
        &map("one", &json!({"a": "2", "b": "2"})),
    );
    run.apply(&by(&one(), "third"), &map("one", &json!({"c": "1"})));
    run.apply(
        &by(&one(), "fourth"),
        &map("one", &json!({"a": "2", "c": "2"})),
    );
    run.get(&one());
}

fn apply_forced(run: &mut Run<'_>) {
    run.keep_managers();
    run.apply(
        &by(&one(), "first"),
        &map("one", &json!({"a": "1", "b": "1"})),
    );
    run.apply(&forced(&one(), "second"), &map("one", &json!({"a": "2"})));
    run.apply(&by(&one(), "first"), &map("one", &json!({"b": "1"})));
    run.apply(&forced(&one(), "first"), &map("one", &json!({"a": "3"})));
}

fn apply_removes_owned_fields(run: &mut Run<'_>) {
    run.keep_managers();
    let mut object = map("one", &json!({"a": "1", "b": "1"}));
    object["metadata"]["labels"] = json!({"a": "b", "c": "d"});
    run.apply(&by(&one(), "first"), &object);
    run.merge(&by(&one(), "other"), &json!({"data": {"c": "1"}}));
    object["metadata"]["labels"] = json!({"c": "d"});
    object["data"] = json!({"a": "1"});
    run.apply(&by(&one(), "first"), &object);
    run.apply(
        &by(&one(), "first"),
        &json!({
            "apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "one"}
        }),
    );
}

fn apply_shares_fields(run: &mut Run<'_>) {
    run.keep_managers();
    run.apply(
        &by(&one(), "first"),
        &map("one", &json!({"a": "1", "b": "1"})),
    );
    run.apply(&by(&one(), "second"), &map("one", &json!({"a": "1"})));
    run.apply(&by(&one(), "first"), &map("one", &json!({"b": "1"})));
    run.apply(&by(&one(), "second"), &map("one", &json!({})));
}

fn apply_after_update(run: &mut Run<'_>) {
    run.keep_managers();
    run.post(
        &by(MAPS, "creator"),
        &map("one", &json!({"a": "1", "b": "1"})),
    );
    run.apply(&by(&one(), "first"), &map("one", &json!({"a": "2"})));
    run.apply(&forced(&one(), "first"), &map("one", &json!({"a": "2"})));
    run.merge(&by(&one(), "creator"), &json!({"data": {"a": "3"}}));
    run.apply(&by(&one(), "first"), &map("one", &json!({"a": "2"})));
    run.apply(&by(&one(), "first"), &map("one", &json!({"a": "3"})));
}

fn apply_dry_run(run: &mut Run<'_>) {
    run.keep_managers();
    run.apply(
        &format!("{}&dryRun=All", by(&one(), "first")),
        &map("one", &json!({"a": "1"})),
    );
    run.get(&one());
    run.apply(&by(&one(), "first"), &map("one", &json!({"a": "1"})));
    run.apply(
        &format!("{}&dryRun=All", by(&one(), "first")),
        &map("one", &json!({"a": "2"})),
    );
    run.apply(
        &format!("{}&dryRun=All", forced(&one(), "second")),
        &map("one", &json!({"a": "3"})),
    );
    run.apply(
        &format!("{}&dryRun=All", by(&one(), "second")),
        &map("one", &json!({"a": "3"})),
    );
    run.get(&one());
}

fn apply_needs_manager(run: &mut Run<'_>) {
    run.apply(&one(), &map("one", &json!({})));
    run.apply(&by(&one(), ""), &map("one", &json!({})));
    let long = "a".repeat(129);
    run.apply(&by(&one(), &long), &map("one", &json!({})));
}

fn apply_rejected(run: &mut Run<'_>) {
    let path = by(&one(), "first");
    run.apply(&path, &json!({"metadata": {"name": "one"}}));
    run.apply(
        &path,
        &json!({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "one"}}),
    );
    run.apply(&path, &map("two", &json!({})));
    run.apply(&path, &map("one", &json!({"a": 1})));
    let mut object = map("one", &json!({}));
    object["unknown"] = json!("a");
    run.apply(&path, &object);
    object = map("one", &json!({}));
    object["metadata"]["managedFields"] = json!([{"manager": "a"}]);
    run.apply(&path, &object);
    object = map("one", &json!({}));
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

fn apply_custom_lists(run: &mut Run<'_>) {
    run.keep_managers();
    let path = at(&widgets(run), "one");
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
    run.apply(&by(&path, "first"), &first);
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
    run.apply(&by(&path, "second"), &second);
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
    run.apply(&by(&path, "third"), &conflicting);
    let less = widget(
        run,
        "one",
        &json!({"color": "red", "tags": ["b"], "parts": [{"key": "b", "value": "1"}]}),
    );
    run.apply(&by(&path, "first"), &less);
    let invalid = widget(run, "one", &json!({"color": "red", "size": 11}));
    run.apply(&by(&path, "first"), &invalid);
}

fn apply_custom_status(run: &mut Run<'_>) {
    run.keep_managers();
    let path = at(&widgets(run), "one");
    let mut object = widget(run, "one", &json!({"color": "red"}));
    object["status"] = json!({"state": "ignored"});
    run.apply(&by(&at(&path, "status"), "reporter"), &object);
    run.apply(&by(&path, "first"), &object);
    let mut status = widget(run, "one", &json!({"color": "green"}));
    status["status"] = json!({"state": "new", "observed": 1});
    run.apply(&by(&at(&path, "status"), "reporter"), &status);
    run.merge(
        &by(&at(&path, "status"), "patcher"),
        &json!({"status": {"observed": 2}}),
    );
    run.apply(&by(&at(&path, "status"), "reporter"), &status);
    run.merge(&by(&path, "patcher"), &json!({"spec": {"size": 4}}));
}

fn apply_with_finalizers_and_owner(run: &mut Run<'_>) {
    run.keep_managers();
    let owner = run.post(&by(MAPS, "creator"), &map("owner", &json!({})));
    let mut object = map("one", &json!({"a": "1"}));
    object["metadata"]["finalizers"] = json!(["example.com/a"]);
    object["metadata"]["ownerReferences"] = json!([{
        "apiVersion": "v1", "kind": "ConfigMap", "name": "owner", "uid": owner["metadata"]["uid"]
    }]);
    run.apply(&by(&one(), "first"), &object);
    run.merge(
        &by(&one(), "other"),
        &json!({"metadata": {"finalizers": ["example.com/a", "example.com/b"]}}),
    );
    run.apply(&by(&one(), "first"), &map("one", &json!({"a": "1"})));
    run.quietly(|run| run.merge(&one(), &json!({"metadata": {"finalizers": null}})));
}

fn apply_secret(run: &mut Run<'_>) {
    run.keep_managers();
    let path = "/api/v1/namespaces/:ns/secrets/one";
    run.apply(
        &by(path, "first"),
        &json!({
            "apiVersion": "v1", "kind": "Secret", "metadata": {"name": "one"},
            "data": {"a": "YQ=="}, "type": "Opaque"
        }),
    );
    run.apply(
        &by(path, "second"),
        &json!({
            "apiVersion": "v1", "kind": "Secret", "metadata": {"name": "one"}, "data": {"a": "Yg=="}
        }),
    );
}

fn apply_namespace(run: &mut Run<'_>) {
    run.keep_managers();
    let name = format!("{}-other", run.namespace());
    let path = format!("/api/v1/namespaces/{name}");
    run.delete_later(&path);
    let metadata = json!({"name": name, "labels": {"a": "b"}});
    run.apply(
        &by(&path, "first"),
        &json!({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata}),
    );
    let metadata = json!({"name": name});
    run.apply(
        &by(&path, "first"),
        &json!({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata}),
    );
}

fn managers_of_other_writes(run: &mut Run<'_>) {
    run.keep_managers();
    let objects = widgets(run);
    let path = at(&objects, "one");
    let object = widget(
        run,
        "one",
        &json!({"color": "red", "tags": ["a"], "parts": [{"key": "a"}]}),
    );
    let made = run.post(&objects, &object);
    run.merge(
        &path,
        &json!({"spec": {"size": 5}, "metadata": {"annotations": {"a": "b"}}}),
    );
    run.merge(
        &by(&path, "other"),
        &json!({"spec": {"tags": ["b"], "color": "green"}}),
    );
    run.merge(&at(&path, "status"), &json!({"status": {"state": "new"}}));
    let mut next = run.send(Call::new("GET", path.clone()).accept(METADATA));
    next = Value::String(version(&next));
    let mut replaced = made;
    replaced["metadata"]["resourceVersion"] = next;
    run.put(&by(&path, "replacer"), &replaced);
}

fn managers_cleared(run: &mut Run<'_>) {
    run.keep_managers();
    run.apply(&by(&one(), "first"), &map("one", &json!({"a": "1"})));
    run.merge(&one(), &json!({"metadata": {"managedFields": [{}]}}));
    run.apply(&by(&one(), "second"), &map("one", &json!({"a": "2"})));
}
