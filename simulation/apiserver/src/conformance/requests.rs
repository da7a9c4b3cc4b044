//! Requests that the server rejects before it reads an object, and formats of requests and responses.

use serde_json::json;

use super::objects::{CONFIG_MAPS, ONE_CONFIG_MAP, ONE_SECRET, SECRETS, config_map, object_path};
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
    run.post(
        CONFIG_MAPS,
        &json!({"metadata": {"name": "one"}, "data": {"a": 1}}),
    );
    run.post(
        CONFIG_MAPS,
        &json!({"metadata": {"name": "one"}, "data": ["a"]}),
    );
    run.post(CONFIG_MAPS, &config_map("one", &json!({})));
    run.send(
        Call::new("PATCH", ONE_CONFIG_MAP)
            .content_type(MERGE)
            .text("{"),
    );
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
    run.send(
        Call::new("POST", CONFIG_MAPS)
            .content_type("text/plain")
            .body(&body),
    );
    run.post(CONFIG_MAPS, &body);
    run.send(
        Call::new("PUT", ONE_CONFIG_MAP)
            .content_type("text/plain")
            .body(&body),
    );
    run.send(
        Call::new("PUT", ONE_CONFIG_MAP)
            .content_type(MERGE)
            .body(&body),
    );
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
    let patch = |content_type| {
        let call = Call::new("PATCH", ONE_CONFIG_MAP).content_type(content_type);
        call.body(&json!({"data": {"b": "2"}}))
    };
    run.send(patch(JSON));
    run.send(patch("text/plain"));
    run.send(patch(PROTOBUF));
    run.send(patch("application/merge-patch+json; charset=utf-8"));
}

fn invalid_parameters(run: &mut CaseRun<'_>) {
    run.get(&format!("{CONFIG_MAPS}?labelSelector=a%3D%3D%3Db"));
    run.get(&format!("{CONFIG_MAPS}?labelSelector=a%20in%20b"));
    run.get(&format!("{CONFIG_MAPS}?fieldSelector=metadata.labels%3Da"));
    run.get(&format!("{CONFIG_MAPS}?fieldSelector=metadata.name"));
    run.get(&format!("{CONFIG_MAPS}?limit=many"));
    run.get(&format!("{SECRETS}?limit=1&continue=no-token"));
    run.get(&format!("{SECRETS}?resourceVersion=text"));
    run.get(&format!("{SECRETS}?resourceVersionMatch=Exact"));
    run.get(&format!(
        "{SECRETS}?resourceVersion=0&resourceVersionMatch=Exact"
    ));
    run.get(&format!(
        "{SECRETS}?resourceVersion=0&resourceVersionMatch=Other"
    ));
    run.post(
        &format!("{CONFIG_MAPS}?dryRun=Some"),
        &config_map("one", &json!({})),
    );
    run.post(
        &format!("{CONFIG_MAPS}?fieldManager=%0A"),
        &config_map("one", &json!({})),
    );
    run.post(
        &format!("{CONFIG_MAPS}?fieldValidation=Other"),
        &config_map("one", &json!({})),
    );
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
    let patch = |body: serde_json::Value| {
        let call = Call::new("PATCH", ONE_SECRET);
        call.content_type(MERGE).accept(METADATA).body(&body)
    };
    run.send(patch(
        json!({"metadata": {"labels": {"a": null, "c": "d"}}}),
    ));
    run.send(patch(
        json!({"metadata": {"uid": "00000000-0000-4000-8000-000000000000"}}),
    ));
    run.send(patch(json!({"metadata": {"resourceVersion": "1"}})));
    run.send(patch(json!({
        "apiVersion": "meta.k8s.io/v1",
        "kind": "PartialObjectMetadata",
        "metadata": {"annotations": {"e": "f"}}
    })));
    run.get(ONE_SECRET);
}
