//! Requests that the server rejects before it reads an object, and formats of requests and responses.

use serde_json::json;

use super::objects::{
    CONFIG_MAPS, ONE_CONFIG_MAP, ONE_SECRET, OTHER_UID, SECRETS, config_map, object_path,
};
use super::run::{Call, CaseRun, JSON, MERGE, METADATA, METADATA_LIST};

super::table!(
    unknown_paths,
    unknown_resources,
    unsupported_methods,
    malformed_bodies,
    unsupported_content_types,
    unsupported_accepts,
    patch_content_types,
    invalid_parameters,
    metadata_get,
    metadata_list,
    metadata_patch,
);

const PROTOBUF: &str = "application/vnd.kubernetes.protobuf";

fn unknown_paths(run: &mut CaseRun<'_>) {
    run.get("/no/such/path");
    run.get("/api/v2");
    run.get("/apis/no-such-group.example.com");
    run.get("/apis/no-such-group.example.com/v1");
    run.get("/apis/apps/v7");
    run.get("/apis/no-such-group.example.com/v1/namespaces/:ns/things");
    run.get("/apis/no-such-group.example.com/v1/things/one");
    run.post("/apis/no-such-group.example.com/v1/things", &json!({}));
}

fn unknown_resources(run: &mut CaseRun<'_>) {
    run.get("/api/v1/namespaces/:ns/no-such-things");
    run.get("/api/v1/no-such-things/one");
    run.get("/apis/apps/v1/namespaces/:ns/no-such-things");
    run.get("/apis/apps/v7/namespaces/:ns/deployments");
    run.post("/api/v1/namespaces/:ns/no-such-things", &json!({}));
    run.delete("/api/v1/namespaces/:ns/no-such-things/one", &json!({}));
}

fn unsupported_methods(run: &mut CaseRun<'_>) {
    run.post(CONFIG_MAPS, &config_map("one", &json!({})));
    run.put(CONFIG_MAPS, &config_map("one", &json!({})));
    run.merge(CONFIG_MAPS, &json!({}));
    run.post(ONE_CONFIG_MAP, &config_map("one", &json!({})));
    run.post("/api/v1/configmaps", &config_map("one", &json!({})));
    run.delete("/api/v1/namespaces", &json!({}));
    run.get(&object_path(CONFIG_MAPS, "one/status"));
}

fn malformed_bodies(run: &mut CaseRun<'_>) {
    run.send(Call::new("POST", CONFIG_MAPS).text("{"));
    run.send(Call::new("POST", CONFIG_MAPS).text(""));
    run.send(Call::new("POST", CONFIG_MAPS).text("[]"));
    for data in [json!({"a": 1}), json!(["a"])] {
        let object = json!({"metadata": {"name": "one"}, "data": data});
        run.post(CONFIG_MAPS, &object);
    }
    run.post(CONFIG_MAPS, &config_map("one", &json!({})));
    let patch = Call::new("PATCH", ONE_CONFIG_MAP).content_type(MERGE);
    run.send(patch.text("{"));
    run.merge(ONE_CONFIG_MAP, &json!(["a"]));
    run.merge(ONE_CONFIG_MAP, &json!({"data": {"a": 1}}));
    run.send(Call::new("DELETE", ONE_CONFIG_MAP).text("{"));
    run.delete(
        ONE_CONFIG_MAP,
        &json!({"kind": "ConfigMap", "apiVersion": "v1"}),
    );
}

fn unsupported_content_types(run: &mut CaseRun<'_>) {
    let body = config_map("one", &json!({}));
    let post = Call::new("POST", CONFIG_MAPS).content_type("text/plain");
    run.send(post.body(&body));
    run.post(CONFIG_MAPS, &body);
    for content_type in ["text/plain", MERGE] {
        let put = Call::new("PUT", ONE_CONFIG_MAP).content_type(content_type);
        run.send(put.body(&body));
    }
}

fn unsupported_accepts(run: &mut CaseRun<'_>) {
    run.post(CONFIG_MAPS, &config_map("one", &json!({})));
    run.send(Call::new("GET", ONE_CONFIG_MAP).accept("text/plain"));
    run.send(Call::new("GET", ONE_CONFIG_MAP).accept("*/*"));
    run.send(Call::new("GET", object_path(CONFIG_MAPS, "none")).accept("*/*"));
    run.send(Call::new("GET", object_path(CONFIG_MAPS, "none")).accept(METADATA));
}

fn patch_content_types(run: &mut CaseRun<'_>) {
    run.post(CONFIG_MAPS, &config_map("one", &json!({"a": "1"})));
    let with_charset = "application/merge-patch+json; charset=utf-8";
    for content_type in [JSON, "text/plain", PROTOBUF, with_charset] {
        let call = Call::new("PATCH", ONE_CONFIG_MAP).content_type(content_type);
        run.send(call.body(&json!({"data": {"b": "2"}})));
    }
}

fn invalid_parameters(run: &mut CaseRun<'_>) {
    for query in [
        "labelSelector=a%3D%3D%3Db",
        "labelSelector=a%20in%20b",
        "fieldSelector=metadata.labels%3Da",
        "fieldSelector=metadata.name",
        "limit=many",
    ] {
        run.get(&format!("{CONFIG_MAPS}?{query}"));
    }
    for query in [
        "limit=1&continue=no-token",
        "resourceVersion=text",
        "resourceVersionMatch=Exact",
        "resourceVersion=0&resourceVersionMatch=Exact",
        "resourceVersion=0&resourceVersionMatch=Other",
    ] {
        run.get(&format!("{SECRETS}?{query}"));
    }
    for query in ["dryRun=Some", "fieldManager=%0A", "fieldValidation=Other"] {
        let path = format!("{CONFIG_MAPS}?{query}");
        run.post(&path, &config_map("one", &json!({})));
    }
    run.merge(&format!("{ONE_CONFIG_MAP}?force=true"), &json!({}));
}

fn metadata_get(run: &mut CaseRun<'_>) {
    run.post(
        SECRETS,
        &json!({"metadata": {"name": "one", "labels": {"a": "b"}}, "data": {"a": "YQ=="}}),
    );
    run.send(Call::new("GET", ONE_SECRET).accept(METADATA));
    run.send(Call::new("GET", object_path(SECRETS, "none")).accept(METADATA));
    run.send(
        Call::new("GET", "/api/v1/namespaces/kube-system")
            .accept(METADATA)
            .only(&["/kind", "/apiVersion", "/metadata/name", "/metadata/labels"]),
    );
}

fn metadata_list(run: &mut CaseRun<'_>) {
    for name in ["one", "two"] {
        let metadata = json!({"name": name, "labels": {"owner": name}});
        run.post(
            SECRETS,
            &json!({"metadata": metadata, "data": {"a": "YQ=="}}),
        );
    }
    run.send(Call::new("GET", SECRETS).accept(METADATA_LIST));
    run.send(Call::new("GET", format!("{SECRETS}?limit=1")).accept(METADATA_LIST));
    let path = format!("{SECRETS}?labelSelector=owner%3Dtwo&fieldSelector=type%3DOpaque&limit=1");
    run.send(Call::new("GET", path).accept(METADATA_LIST));
    let path = format!("{SECRETS}?labelSelector=owner%3Dthree");
    run.send(Call::new("GET", path).accept(METADATA_LIST));
    // A list in the format of one object.
    run.send(Call::new("GET", SECRETS).accept(METADATA));
}

fn metadata_patch(run: &mut CaseRun<'_>) {
    let first = json!({"metadata": {"name": "one", "labels": {"a": "b"}}, "data": {"a": "YQ=="}});
    run.post(SECRETS, &first);
    for body in [
        json!({"metadata": {"labels": {"a": null, "c": "d"}}}),
        json!({"metadata": {"uid": OTHER_UID}}),
        json!({"metadata": {"resourceVersion": "1"}}),
        json!({
            "apiVersion": "meta.k8s.io/v1",
            "kind": "PartialObjectMetadata",
            "metadata": {"annotations": {"e": "f"}}
        }),
    ] {
        let call = Call::new("PATCH", ONE_SECRET).content_type(MERGE);
        run.send(call.accept(METADATA).body(&body));
    }
    run.get(ONE_SECRET);
}
