//! Objects of built-in kinds: create, get, list, replace and delete.

use serde_json::{Value, json};

use super::run::{Call, CaseRun};
use crate::meta;

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

pub(super) const CONFIG_MAPS: &str = "/api/v1/namespaces/:ns/configmaps";
pub(super) const SECRETS: &str = "/api/v1/namespaces/:ns/secrets";
/// Path of the ConfigMap `one`.
pub(super) const ONE_CONFIG_MAP: &str = "/api/v1/namespaces/:ns/configmaps/one";
pub(super) const ONE_SECRET: &str = "/api/v1/namespaces/:ns/secrets/one";

/// A UID that no object has.
pub(super) const OTHER_UID: &str = "00000000-0000-4000-8000-000000000000";

/// Returns the path of an object in a collection.
pub(super) fn object_path(collection: &str, name: &str) -> String {
    format!("{collection}/{name}")
}

pub(super) fn config_map(name: &str, data: &Value) -> Value {
    json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": data})
}

pub(super) fn resource_version(object: &Value) -> String {
    meta::text(object, "resourceVersion").to_owned()
}

pub(super) fn uid(object: &Value) -> String {
    meta::text(object, "uid").to_owned()
}

pub(super) fn with_version(mut object: Value, version: &str) -> Value {
    meta::set(&mut object, "resourceVersion", version);
    object
}

fn config_map_life(run: &mut CaseRun<'_>) {
    run.post(CONFIG_MAPS, &config_map("one", &json!({"a": "1"})));
    run.get(ONE_CONFIG_MAP);
    run.put(
        ONE_CONFIG_MAP,
        &config_map("one", &json!({"a": "2", "b": ""})),
    );
    run.get(&format!("{CONFIG_MAPS}?fieldSelector=metadata.name%3Done"));
    run.delete(ONE_CONFIG_MAP, &json!({}));
    run.get(ONE_CONFIG_MAP);
    run.get(&format!("{CONFIG_MAPS}?fieldSelector=metadata.name%3Done"));
}

fn create_needs_a_name(run: &mut CaseRun<'_>) {
    for object in [
        json!({"metadata": {}}),
        config_map("Not_A_Name", &json!({})),
        config_map("one", &json!({"not a key": "1"})),
        json!({"metadata": {"name": "one", "labels": {"a b": "c d"}}}),
        json!({"metadata": {"name": "one", "namespace": "default"}}),
        json!({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "one"}}),
        json!({"apiVersion": "v2", "kind": "ConfigMap", "metadata": {"name": "one"}}),
        with_version(config_map("one", &json!({})), "5"),
    ] {
        run.post(CONFIG_MAPS, &object);
    }
}

fn create_conflicts(run: &mut CaseRun<'_>) {
    run.post(CONFIG_MAPS, &config_map("one", &json!({"a": "1"})));
    run.post(CONFIG_MAPS, &config_map("one", &json!({"a": "2"})));
    run.post(
        "/api/v1/namespaces/no-such-namespace/configmaps",
        &config_map("one", &json!({})),
    );
    let ns = run.namespace().to_owned();
    run.post("/api/v1/namespaces", &json!({"metadata": {"name": ns}}));
}

fn get_missing_object(run: &mut CaseRun<'_>) {
    run.get(&object_path(CONFIG_MAPS, "none"));
    run.get(&object_path(SECRETS, "none"));
    run.get("/api/v1/namespaces/no-such-namespace/configmaps/none");
    run.get("/api/v1/namespaces/no-such-namespace/configmaps");
    run.get("/api/v1/namespaces/no-such-namespace");
    run.get("/apis/coordination.k8s.io/v1/namespaces/:ns/leases/none");
    run.get("/apis/apiextensions.k8s.io/v1/customresourcedefinitions/none.example.com");
}

fn generate_name(run: &mut CaseRun<'_>) {
    let body = json!({"metadata": {"generateName": "token-", "labels": {"a": "b"}}});
    run.post(SECRETS, &body);
    run.post(SECRETS, &body);
    run.post(&format!("{SECRETS}?dryRun=All"), &body);
}

fn replace_needs_current_version(run: &mut CaseRun<'_>) {
    let first = run.post(CONFIG_MAPS, &config_map("one", &json!({"a": "1"})));
    let with_data =
        |value: &str, version: &str| with_version(config_map("one", &json!({"a": value})), version);
    let changed = with_data("2", &resource_version(&first));
    run.put(ONE_CONFIG_MAP, &changed);
    run.put(ONE_CONFIG_MAP, &changed);
    run.put(ONE_CONFIG_MAP, &with_data("3", "text"));
    let mut foreign = config_map("one", &json!({"a": "4"}));
    foreign["metadata"]["uid"] = json!(OTHER_UID);
    run.put(ONE_CONFIG_MAP, &foreign);
    run.put(ONE_CONFIG_MAP, &config_map("two", &json!({})));
    run.get(ONE_CONFIG_MAP);
}

fn replace_without_change(run: &mut CaseRun<'_>) {
    let first = run.post(CONFIG_MAPS, &config_map("one", &json!({"a": "1"})));
    run.put(ONE_CONFIG_MAP, &first);
    run.merge(ONE_CONFIG_MAP, &json!({"data": {"a": "1"}}));
    run.get(ONE_CONFIG_MAP);
}

fn replace_missing_object(run: &mut CaseRun<'_>) {
    let path = object_path(CONFIG_MAPS, "none");
    run.put(&path, &config_map("none", &json!({"a": "1"})));
    run.put(&path, &with_version(config_map("none", &json!({})), "5"));
    run.merge(&path, &json!({"data": {"a": "1"}}));
}

fn delete_by_uid(run: &mut CaseRun<'_>) {
    let first = run.post(CONFIG_MAPS, &config_map("one", &json!({})));
    let uid = uid(&first);
    for uid in [OTHER_UID, &uid, &uid] {
        run.delete(ONE_CONFIG_MAP, &json!({"preconditions": {"uid": uid}}));
    }
}

fn delete_by_version(run: &mut CaseRun<'_>) {
    let first = run.post(CONFIG_MAPS, &config_map("one", &json!({})));
    let next = run.merge(ONE_CONFIG_MAP, &json!({"data": {"a": "1"}}));
    let stale = json!({"preconditions": {"resourceVersion": resource_version(&first)}});
    run.delete(ONE_CONFIG_MAP, &stale);
    let conditions = json!({"uid": uid(&first), "resourceVersion": resource_version(&next)});
    run.delete(
        &format!("{ONE_CONFIG_MAP}?dryRun=All"),
        &json!({"preconditions": conditions}),
    );
    let options = json!({
        "apiVersion": "v1",
        "kind": "DeleteOptions",
        "dryRun": ["All"],
        "preconditions": conditions
    });
    run.delete(ONE_CONFIG_MAP, &options);
    run.delete(ONE_CONFIG_MAP, &json!({"preconditions": conditions}));
    run.get(ONE_CONFIG_MAP);
}

fn delete_missing_object(run: &mut CaseRun<'_>) {
    run.delete(&object_path(CONFIG_MAPS, "none"), &json!({}));
    run.send(Call::new("DELETE", object_path(CONFIG_MAPS, "none")));
    run.post(CONFIG_MAPS, &config_map("one", &json!({})));
    run.send(Call::new("DELETE", ONE_CONFIG_MAP));
}

fn finalizer_delays_deletion(run: &mut CaseRun<'_>) {
    let metadata = json!({"name": "one", "finalizers": ["example.com/a", "example.com/b"]});
    run.post(CONFIG_MAPS, &json!({"metadata": metadata}));
    run.delete(ONE_CONFIG_MAP, &json!({}));
    let terminating = run.get(ONE_CONFIG_MAP);
    run.delete(
        ONE_CONFIG_MAP,
        &json!({"preconditions": {"uid": uid(&terminating)}}),
    );
    for patch in [
        json!({"data": {"a": "1"}}),
        json!({"metadata": {"finalizers": ["example.com/b"]}}),
        json!({"metadata": {"finalizers": ["example.com/b", "example.com/c"]}}),
    ] {
        run.merge(ONE_CONFIG_MAP, &patch);
    }
    let mut with_finalizers = run.get(ONE_CONFIG_MAP);
    with_finalizers["metadata"]["finalizers"] = json!([]);
    run.put(ONE_CONFIG_MAP, &with_finalizers);
    run.get(ONE_CONFIG_MAP);
}

fn secret_types(run: &mut CaseRun<'_>) {
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
    for patch in [
        json!({"type": "Opaque"}),
        json!({"stringData": {"c": "d"}}),
        json!({"data": {"c": "not base64"}}),
    ] {
        run.merge(&object_path(SECRETS, "two"), &patch);
    }
    run.post(
        SECRETS,
        &json!({"metadata": {"name": "three"}, "type": "kubernetes.io/tls"}),
    );
    for operator in ["%3D", "%21%3D"] {
        let selector = format!("type{operator}helm.sh%2Frelease.v1");
        run.get(&format!("{SECRETS}?fieldSelector={selector}"));
    }
}

fn secret_immutable(run: &mut CaseRun<'_>) {
    run.post(
        SECRETS,
        &json!({"metadata": {"name": "one"}, "immutable": true, "data": {"a": "YQ=="}}),
    );
    run.merge(ONE_SECRET, &json!({"data": {"a": "Yg=="}}));
    run.merge(ONE_SECRET, &json!({"immutable": false}));
    run.merge(ONE_SECRET, &json!({"metadata": {"labels": {"a": "b"}}}));
    run.delete(ONE_SECRET, &json!({}));
}

fn config_map_binary_data(run: &mut CaseRun<'_>) {
    run.post(
        CONFIG_MAPS,
        &json!({"metadata": {"name": "one"}, "binaryData": {"a": "AAEC"}, "data": {"b": "c"}}),
    );
    run.merge(ONE_CONFIG_MAP, &json!({"binaryData": {"b": "AAEC"}}));
    run.merge(
        ONE_CONFIG_MAP,
        &json!({"binaryData": {"a": null, "d": "AAEC"}}),
    );
}
