//! Requests in the form that kube sends, for each class of kinds.

use serde_json::{Value, json};

use super::custom::{self, CRDS, widget, widgets};
use super::objects::{CONFIG_MAPS, SECRETS, config_map, object_path, resource_version, uid};
use super::run::{Call, CaseRun, MERGE, METADATA, METADATA_LIST};

super::table!(
    custom_metadata,
    namespace_metadata,
    crd_metadata,
    secret_watches,
    config_map_watch,
    workload_watches,
    custom_watch,
    deletions_with_preconditions,
    secret_replaced_and_copied,
    config_map_metadata,
);

/// Parameters of every watch of kube.
const WATCH: &str = "watch=true&timeoutSeconds=290&allowWatchBookmarks=true";

fn patch(run: &mut CaseRun<'_>, path: &str, body: &Value) -> Value {
    let call = Call::new("PATCH", path)
        .content_type(MERGE)
        .accept(METADATA);
    run.send(call.body(body))
}

fn metadata_list(run: &mut CaseRun<'_>, path: String) -> String {
    resource_version(&run.send(Call::new("GET", path).accept(METADATA_LIST)))
}

fn custom_metadata(run: &mut CaseRun<'_>) {
    let objects = widgets(run);
    let path = object_path(&objects, "one");
    let mut one = widget(run, "one", &json!({"color": "red"}));
    one["metadata"]["finalizers"] = json!(["example.com/a"]);
    let created = run.post(&objects, &one);
    run.send(Call::new("GET", path.clone()).accept(METADATA));
    run.send(Call::new("GET", object_path(&objects, "none")).accept(METADATA));
    let start = metadata_list(run, format!("{objects}?limit=1"));
    let watch = format!("{objects}?{WATCH}&resourceVersion={start}");
    let watch = run.watch(Call::new("GET", watch).accept(METADATA));
    let metadata = json!({"resourceVersion": resource_version(&created), "finalizers": []});
    patch(run, &path, &json!({"metadata": metadata}));
    patch(run, &path, &json!({"metadata": metadata}));
    patch(run, &path, &json!({"spec": {"color": "green"}}));
    run.delete(&path, &json!({}));
    run.events(watch, 3);
    run.expect_silence(watch);
}

fn namespace_metadata(run: &mut CaseRun<'_>) {
    let path = "/api/v1/namespaces/:ns";
    run.send(Call::new("GET", path).accept(METADATA));
    let field = format!("fieldSelector=metadata.name%3D{}", run.namespace());
    let start = metadata_list(run, format!("/api/v1/namespaces?{field}&limit=50"));
    let watch = format!("/api/v1/namespaces?{WATCH}&{field}&resourceVersion={start}");
    let watch = run.watch(Call::new("GET", watch).accept(METADATA));
    patch(run, path, &json!({"metadata": {"labels": {"a": "b"}}}));
    run.event(watch);
    run.expect_silence(watch);
}

fn crd_metadata(run: &mut CaseRun<'_>) {
    widgets(run);
    let crd = custom::crd_path(run);
    run.send(Call::new("GET", crd.clone()).accept(METADATA));
    run.send(Call::new("GET", object_path(CRDS, "none.example.com")).accept(METADATA));
    let field = format!(
        "fieldSelector=metadata.name%3Dwidgets.{}",
        custom::group(run)
    );
    let start = metadata_list(run, format!("{CRDS}?{field}&limit=50"));
    let watch = format!("{CRDS}?{WATCH}&{field}&resourceVersion={start}");
    let watch = run.watch(Call::new("GET", watch).accept(METADATA));
    run.send(
        Call::new("PATCH", crd)
            .content_type(MERGE)
            .body(&json!({"metadata": {"labels": {"a": "b"}}}))
            .only(&["/metadata"]),
    );
    run.event(watch);
    run.expect_silence(watch);
}

fn secret_watches(run: &mut CaseRun<'_>) {
    let label = "labelSelector=owner%3Dhelm";
    let both_selectors = format!("{label}&fieldSelector=type%3Dhelm.sh%2Frelease.v1");
    let name = "fieldSelector=metadata.name%3Done";
    let start = metadata_list(run, format!("{SECRETS}?{both_selectors}&limit=50"));
    let path = |selector: &str| format!("{SECRETS}?{WATCH}&{selector}&resourceVersion={start}");
    let metadata = run.watch(Call::new("GET", path(&both_selectors)).accept(METADATA));
    let full_objects = run.watch(path(&both_selectors));
    let labelled = run.watch(path(label));
    let named = run.watch(path(name));
    let metadata_of = |name: &str| json!({"name": name, "labels": {"owner": "helm"}});
    let release = json!({"metadata": metadata_of("one"), "type": "helm.sh/release.v1"});
    run.post(SECRETS, &release);
    run.post(SECRETS, &json!({"metadata": metadata_of("two")}));
    run.events(metadata, 1);
    run.events(full_objects, 1);
    run.events(labelled, 2);
    run.events(named, 1);
    run.expect_silence(metadata);
    run.expect_silence(named);
}

fn config_map_watch(run: &mut CaseRun<'_>) {
    let field = "fieldSelector=metadata.name%3Done";
    let start = resource_version(&run.get(&format!("{CONFIG_MAPS}?{field}&limit=500")));
    let watch = run.watch(format!(
        "{CONFIG_MAPS}?{WATCH}&{field}&resourceVersion={start}"
    ));
    run.post(CONFIG_MAPS, &config_map("one", &json!({"a": "1"})));
    run.event(watch);
}

fn workload_watches(run: &mut CaseRun<'_>) {
    let label = format!("labelSelector=case%3D{}", run.namespace());
    for plural in ["deployments", "statefulsets", "daemonsets"] {
        let path = format!("/apis/apps/v1/{plural}");
        let start = resource_version(&run.get(&format!("{path}?{label}&limit=50")));
        let watch = run.watch(format!("{path}?{WATCH}&{label}&resourceVersion={start}"));
        run.expect_silence(watch);
    }
}

fn custom_watch(run: &mut CaseRun<'_>) {
    let objects = widgets(run);
    let everywhere = format!("/apis/{}/v1/widgets", custom::group(run));
    let start = resource_version(&run.get(&format!("{everywhere}?limit=50")));
    let watch = run.watch(format!("{everywhere}?{WATCH}&resourceVersion={start}"));
    let one = widget(run, "one", &json!({"color": "red"}));
    run.post(&objects, &one);
    run.event(watch);
}

fn deletions_with_preconditions(run: &mut CaseRun<'_>) {
    let preconditions =
        |object: &Value| json!({"uid": uid(object), "resourceVersion": resource_version(object)});
    let one = run.post(CONFIG_MAPS, &config_map("one", &json!({})));
    let options = json!({"propagationPolicy": "Background", "preconditions": preconditions(&one)});
    run.delete(&object_path(CONFIG_MAPS, "one"), &options);
    let one = run.post(SECRETS, &json!({"metadata": {"name": "one"}}));
    run.delete(
        &object_path(SECRETS, "one"),
        &json!({"preconditions": preconditions(&one)}),
    );
    widgets(run);
    let crd = custom::crd_path(run);
    let current_crd = run.send(Call::new("GET", crd.clone()).only(&["/metadata"]));
    let options = json!({"preconditions": preconditions(&current_crd)});
    let delete = Call::new("DELETE", crd).body(&options);
    run.send(delete.only(&["/kind", "/metadata/name"]));
    let path = "/api/v1/namespaces/:ns";
    let namespace = run.get(path);
    run.delete(path, &json!({"preconditions": preconditions(&namespace)}));
}

fn secret_replaced_and_copied(run: &mut CaseRun<'_>) {
    let labels = json!({"owner": "helm", "name": "one", "status": "pending-upgrade"});
    let release = json!({
        "metadata": {"name": "sh.helm.release.v1.one.v1", "labels": labels},
        "type": "helm.sh/release.v1",
        "data": {"release": "YQ=="}
    });
    let path = object_path(SECRETS, "sh.helm.release.v1.one.v1");
    let mut created = run.post(SECRETS, &release);
    run.get(&path);
    created["metadata"]["labels"]["status"] = json!("failed");
    run.put(&path, &created);
    run.put(&path, &created);
    let mut copy = created;
    copy["metadata"] = json!({"name": "copy", "labels": {"owner": "krypton"}});
    run.post(SECRETS, &copy);
}

fn config_map_metadata(run: &mut CaseRun<'_>) {
    run.post(
        CONFIG_MAPS,
        &json!({"metadata": {"name": "one", "labels": {"a": "b"}}}),
    );
    run.send(Call::new("GET", object_path(CONFIG_MAPS, "one")).accept(METADATA));
    // Controllers add objects without this label.
    metadata_list(run, format!("{CONFIG_MAPS}?labelSelector=a&limit=500"));
}
