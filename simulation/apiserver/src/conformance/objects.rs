//! Objects of built-in kinds: create, get, list, replace and delete.

use serde_json::{Value, json};

use super::run::{Call, Run};

super::table!(
    config_map_life,
    create_needs_a_name,
    create_conflicts,
    get_missing_object,
    generate_name,
    replace_needs_current_version,
    replace_without_change,
    replace_missing_object,
    delete_by_uid,
    delete_by_version,
    delete_missing_object,
    finalizer_delays_deletion,
    secret_types,
    secret_immutable,
    config_map_binary_data,
);

pub(super) const MAPS: &str = "/api/v1/namespaces/:ns/configmaps";
pub(super) const SECRETS: &str = "/api/v1/namespaces/:ns/secrets";

/// Returns the path of an object in a collection.
pub(super) fn at(collection: &str, name: &str) -> String {
    format!("{collection}/{name}")
}

pub(super) fn map(name: &str, data: &Value) -> Value {
    json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": data})
}

pub(super) fn version(object: &Value) -> String {
    let version = object.pointer("/metadata/resourceVersion");
    version
        .and_then(Value::as_str)
        .unwrap_or_default()
        .to_owned()
}

pub(super) fn uid(object: &Value) -> String {
    let uid = object.pointer("/metadata/uid");
    uid.and_then(Value::as_str).unwrap_or_default().to_owned()
}

pub(super) fn with_version(mut object: Value, version: &str) -> Value {
    if let Some(Value::Object(metadata)) = object.get_mut("metadata") {
        metadata.insert("resourceVersion".to_owned(), json!(version));
    }
    object
}

fn config_map_life(run: &mut Run<'_>) {
    run.post(MAPS, &map("one", &json!({"a": "1"})));
    run.get(&at(MAPS, "one"));
    run.put(&at(MAPS, "one"), &map("one", &json!({"a": "2", "b": ""})));
    run.get(&format!("{MAPS}?fieldSelector=metadata.name%3Done"));
    run.delete(&at(MAPS, "one"), &json!({}));
    run.get(&at(MAPS, "one"));
    run.get(&format!("{MAPS}?fieldSelector=metadata.name%3Done"));
}

fn create_needs_a_name(run: &mut Run<'_>) {
    run.post(MAPS, &json!({"metadata": {}}));
    run.post(MAPS, &map("Not_A_Name", &json!({})));
    run.post(MAPS, &map("one", &json!({"not a key": "1"})));
    run.post(
        MAPS,
        &json!({"metadata": {"name": "one", "labels": {"a b": "c d"}}}),
    );
    run.post(
        MAPS,
        &json!({"metadata": {"name": "one", "namespace": "default"}}),
    );
    run.post(
        MAPS,
        &json!({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "one"}}),
    );
    run.post(
        MAPS,
        &json!({"apiVersion": "v2", "kind": "ConfigMap", "metadata": {"name": "one"}}),
    );
    run.post(MAPS, &with_version(map("one", &json!({})), "5"));
}

fn create_conflicts(run: &mut Run<'_>) {
    run.post(MAPS, &map("one", &json!({"a": "1"})));
    run.post(MAPS, &map("one", &json!({"a": "2"})));
    run.post(
        "/api/v1/namespaces/no-such-namespace/configmaps",
        &map("one", &json!({})),
    );
    let ns = run.namespace().to_owned();
    run.post("/api/v1/namespaces", &json!({"metadata": {"name": ns}}));
}

fn get_missing_object(run: &mut Run<'_>) {
    run.get(&at(MAPS, "none"));
    run.get(&at(SECRETS, "none"));
    run.get("/api/v1/namespaces/no-such-namespace/configmaps/none");
    run.get("/api/v1/namespaces/no-such-namespace/configmaps");
    run.get("/api/v1/namespaces/no-such-namespace");
    run.get("/apis/coordination.k8s.io/v1/namespaces/:ns/leases/none");
    run.get("/apis/apiextensions.k8s.io/v1/customresourcedefinitions/none.example.com");
}

fn generate_name(run: &mut Run<'_>) {
    let body = json!({"metadata": {"generateName": "token-", "labels": {"a": "b"}}});
    run.post(SECRETS, &body);
    run.post(SECRETS, &body);
    run.post(&format!("{SECRETS}?dryRun=All"), &body);
}

fn replace_needs_current_version(run: &mut Run<'_>) {
    let first = run.post(MAPS, &map("one", &json!({"a": "1"})));
    let changed = with_version(map("one", &json!({"a": "2"})), &version(&first));
    run.put(&at(MAPS, "one"), &changed);
    run.put(&at(MAPS, "one"), &changed);
    run.put(
        &at(MAPS, "one"),
        &with_version(map("one", &json!({"a": "3"})), "text"),
    );
    let mut foreign = map("one", &json!({"a": "4"}));
    foreign["metadata"]["uid"] = json!("00000000-0000-4000-8000-000000000000");
    run.put(&at(MAPS, "one"), &foreign);
    run.put(&at(MAPS, "one"), &map("two", &json!({})));
    run.get(&at(MAPS, "one"));
}

fn replace_without_change(run: &mut Run<'_>) {
    let first = run.post(MAPS, &map("one", &json!({"a": "1"})));
    run.put(&at(MAPS, "one"), &first);
    run.merge(&at(MAPS, "one"), &json!({"data": {"a": "1"}}));
    run.get(&at(MAPS, "one"));
}

fn replace_missing_object(run: &mut Run<'_>) {
    run.put(&at(MAPS, "none"), &map("none", &json!({"a": "1"})));
    run.put(
        &at(MAPS, "none"),
        &with_version(map("none", &json!({})), "5"),
    );
    run.merge(&at(MAPS, "none"), &json!({"data": {"a": "1"}}));
}

fn delete_by_uid(run: &mut Run<'_>) {
    let first = run.post(MAPS, &map("one", &json!({})));
    let other = json!({"preconditions": {"uid": "00000000-0000-4000-8000-000000000000"}});
    run.delete(&at(MAPS, "one"), &other);
    run.delete(
        &at(MAPS, "one"),
        &json!({"preconditions": {"uid": uid(&first)}}),
    );
    run.delete(
        &at(MAPS, "one"),
        &json!({"preconditions": {"uid": uid(&first)}}),
    );
}

fn delete_by_version(run: &mut Run<'_>) {
    let first = run.post(MAPS, &map("one", &json!({})));
    let next = run.merge(&at(MAPS, "one"), &json!({"data": {"a": "1"}}));
    let stale = json!({"preconditions": {"resourceVersion": version(&first)}});
    run.delete(&at(MAPS, "one"), &stale);
    let conditions = json!({"uid": uid(&first), "resourceVersion": version(&next)});
    run.delete(
        &format!("{}?dryRun=All", at(MAPS, "one")),
        &json!({"preconditions": conditions}),
    );
    let options = json!({
        "apiVersion": "v1",
        "kind": "DeleteOptions",
        "dryRun": ["All"],
        "preconditions": conditions
    });
    run.delete(&at(MAPS, "one"), &options);
    run.delete(&at(MAPS, "one"), &json!({"preconditions": conditions}));
    run.get(&at(MAPS, "one"));
}

fn delete_missing_object(run: &mut Run<'_>) {
    run.delete(&at(MAPS, "none"), &json!({}));
    run.send(Call::new("DELETE", at(MAPS, "none")));
    run.post(MAPS, &map("one", &json!({})));
    run.send(Call::new("DELETE", at(MAPS, "one")));
}

fn finalizer_delays_deletion(run: &mut Run<'_>) {
    let metadata = json!({"name": "one", "finalizers": ["example.com/a", "example.com/b"]});
    run.post(MAPS, &json!({"metadata": metadata}));
    run.delete(&at(MAPS, "one"), &json!({}));
    let found = run.get(&at(MAPS, "one"));
    run.delete(
        &at(MAPS, "one"),
        &json!({"preconditions": {"uid": uid(&found)}}),
    );
    run.merge(&at(MAPS, "one"), &json!({"data": {"a": "1"}}));
    run.merge(
        &at(MAPS, "one"),
        &json!({"metadata": {"finalizers": ["example.com/b"]}}),
    );
    run.merge(
        &at(MAPS, "one"),
        &json!({"metadata": {"finalizers": ["example.com/b", "example.com/c"]}}),
    );
    let mut left = run.get(&at(MAPS, "one"));
    left["metadata"]["finalizers"] = json!([]);
    run.put(&at(MAPS, "one"), &left);
    run.get(&at(MAPS, "one"));
}

fn secret_types(run: &mut Run<'_>) {
    run.post(
        SECRETS,
        &json!({"metadata": {"name": "one"}, "stringData": {"a": "text"}}),
    );
    run.post(
        SECRETS,
        &json!({
            "metadata": {"name": "two"},
            "type": "helm.sh/release.v1",
            "data": {"a": "b2xk", "b": "YQ=="},
            "stringData": {"a": "new"}
        }),
    );
    run.merge(&at(SECRETS, "two"), &json!({"type": "Opaque"}));
    run.merge(&at(SECRETS, "two"), &json!({"stringData": {"c": "d"}}));
    run.merge(&at(SECRETS, "two"), &json!({"data": {"c": "not base64"}}));
    run.post(
        SECRETS,
        &json!({"metadata": {"name": "three"}, "type": "kubernetes.io/tls"}),
    );
    run.get(&format!(
        "{SECRETS}?fieldSelector=type%3Dhelm.sh%2Frelease.v1"
    ));
    run.get(&format!(
        "{SECRETS}?fieldSelector=type%21%3Dhelm.sh%2Frelease.v1"
    ));
}

fn secret_immutable(run: &mut Run<'_>) {
    run.post(
        SECRETS,
        &json!({"metadata": {"name": "one"}, "immutable": true, "data": {"a": "YQ=="}}),
    );
    run.merge(&at(SECRETS, "one"), &json!({"data": {"a": "Yg=="}}));
    run.merge(&at(SECRETS, "one"), &json!({"immutable": false}));
    run.merge(
        &at(SECRETS, "one"),
        &json!({"metadata": {"labels": {"a": "b"}}}),
    );
    run.delete(&at(SECRETS, "one"), &json!({}));
}

fn config_map_binary_data(run: &mut Run<'_>) {
    run.post(
        MAPS,
        &json!({"metadata": {"name": "one"}, "binaryData": {"a": "AAEC"}, "data": {"b": "c"}}),
    );
    run.merge(&at(MAPS, "one"), &json!({"binaryData": {"b": "AAEC"}}));
    run.merge(
        &at(MAPS, "one"),
        &json!({"binaryData": {"a": null, "d": "AAEC"}}),
    );
}
