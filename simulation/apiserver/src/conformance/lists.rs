//! Lists: selectors, pages and versions.

use serde_json::{Value, json};

use super::objects::{SECRETS, object_path, resource_version};
use super::run::{Call, CaseRun, METADATA_LIST};
use crate::meta;

super::table!(
    label_selectors,
    field_selectors,
    pages,
    pages_with_selector,
    pages_of_custom_objects,
    pages_of_metadata,
    list_from_version_zero,
    list_at_exact_version,
    list_not_older_than,
    list_across_namespaces,
);

/// Creates Secrets with labels without a record.
fn create_secrets(run: &mut CaseRun<'_>, names: &[&str]) -> Value {
    let mut last = Value::Null;
    for name in names {
        let metadata = json!({"name": name, "labels": {"name": name, "case": run.namespace()}});
        last = run.unrecorded(|run| run.post(SECRETS, &json!({"metadata": metadata})));
    }
    last
}

fn continue_token(list: &Value) -> String {
    meta::text(list, "continue").to_owned()
}

fn label_selectors(run: &mut CaseRun<'_>) {
    create_secrets(run, &["one", "two"]);
    run.post(
        SECRETS,
        &json!({"metadata": {"name": "three", "labels": {"other": ""}}}),
    );
    let selectors = [
        "name%3Done",
        "name%3D%3Done",
        "name%21%3Done",
        "name%20in%20%28one%2Ctwo%29",
        "name%20notin%20%28one%29",
        "name",
        "%21name",
        "other",
        "other%3D",
        "name%3Done%2Cother",
        "name%2Ccase",
        "",
    ];
    for selector in selectors {
        let call = Call::new("GET", format!("{SECRETS}?labelSelector={selector}"));
        run.send(call.accept(METADATA_LIST));
    }
}

fn field_selectors(run: &mut CaseRun<'_>) {
    create_secrets(run, &["one", "two"]);
    run.post(
        SECRETS,
        &json!({"metadata": {"name": "three"}, "type": "example.com/three"}),
    );
    let selectors = [
        "metadata.name%3Done",
        "metadata.name%21%3Done",
        "type%3DOpaque",
        "type%3Dexample.com%2Fthree%2Cmetadata.name%3Dthree",
        "type%3DOpaque%2Cmetadata.name%3Dthree",
        "metadata.namespace%3Ddefault",
        "data%3Da",
    ];
    for selector in selectors {
        let call = Call::new("GET", format!("{SECRETS}?fieldSelector={selector}"));
        run.send(call.accept(METADATA_LIST));
    }
}

fn pages(run: &mut CaseRun<'_>) {
    create_secrets(run, &["a", "b", "c", "d", "e"]);
    let first = run.get(&format!("{SECRETS}?limit=2"));
    // Later pages show the state of the first one.
    run.delete(&object_path(SECRETS, "c"), &json!({}));
    let labels = json!({"metadata": {"labels": {"later": "true"}}});
    run.merge(&object_path(SECRETS, "d"), &labels);
    run.post(SECRETS, &json!({"metadata": {"name": "bb"}}));
    let token = continue_token(&first);
    let second = run.get(&format!("{SECRETS}?limit=2&continue={token}"));
    let next_token = continue_token(&second);
    for query in [
        format!("limit=2&continue={next_token}"),
        format!("continue={token}"),
        format!("limit=2&continue={token}&resourceVersion=1"),
        "limit=9".to_owned(),
        "limit=0".to_owned(),
    ] {
        run.get(&format!("{SECRETS}?{query}"));
    }
}

fn pages_with_selector(run: &mut CaseRun<'_>) {
    create_secrets(run, &["a", "b", "c", "d"]);
    let labels = json!({"metadata": {"labels": {"case": "other"}}});
    run.merge(&object_path(SECRETS, "b"), &labels);
    let selector = format!("labelSelector=case%3D{}", run.namespace());
    let path = format!("{SECRETS}?{selector}&limit=2");
    let token = continue_token(&run.get(&path));
    run.get(&format!("{path}&continue={token}"));
}

fn pages_of_custom_objects(run: &mut CaseRun<'_>) {
    let objects = super::custom::widgets(run);
    for name in ["a", "b", "c"] {
        let object = super::custom::widget(run, name, &json!({"color": "red"}));
        run.post(&objects, &object);
    }
    let path = format!("{objects}?limit=2");
    let token = continue_token(&run.get(&path));
    run.delete(&object_path(&objects, "c"), &json!({}));
    run.get(&format!("{path}&continue={token}"));
    run.get(&path);
}

fn pages_of_metadata(run: &mut CaseRun<'_>) {
    create_secrets(run, &["a", "b", "c"]);
    let list = |path: String| Call::new("GET", path).accept(METADATA_LIST);
    let path = format!("{SECRETS}?limit=2");
    let token = continue_token(&run.send(list(path.clone())));
    run.send(list(format!("{path}&continue={token}")));
}

fn list_from_version_zero(run: &mut CaseRun<'_>) {
    create_secrets(run, &["a", "b"]);
    run.wait_for_cache(SECRETS, 2);
    run.get(&format!("{SECRETS}?resourceVersion=0"));
    // From the cache, the server ignores the limit.
    run.get(&format!("{SECRETS}?resourceVersion=0&limit=1"));
    run.get(&format!(
        "{SECRETS}?resourceVersion=0&resourceVersionMatch=NotOlderThan"
    ));
    run.get(&format!("{SECRETS}/a?resourceVersion=0"));
}

fn list_at_exact_version(run: &mut CaseRun<'_>) {
    let last = create_secrets(run, &["a", "b"]);
    let version = resource_version(&last);
    let exact = format!("resourceVersion={version}&resourceVersionMatch=Exact");
    run.delete(&object_path(SECRETS, "a"), &json!({}));
    run.get(&format!("{SECRETS}?{exact}"));
    run.get(&format!("{SECRETS}?{exact}&limit=1"));
}

fn list_not_older_than(run: &mut CaseRun<'_>) {
    let last = create_secrets(run, &["a", "b"]);
    let at_least = format!("resourceVersion={}", resource_version(&last));
    for parameter in ["", "&resourceVersionMatch=NotOlderThan", "&limit=1"] {
        run.get(&format!("{SECRETS}?{at_least}{parameter}"));
    }
    run.get(&format!("{SECRETS}/b?{at_least}"));
}

fn list_across_namespaces(run: &mut CaseRun<'_>) {
    create_secrets(run, &["a"]);
    let selector = format!("labelSelector=case%3D{}", run.namespace());
    run.get(&format!("/api/v1/secrets?{selector}"));
    run.get(&format!("/api/v1/secrets?{selector}&limit=1"));
    run.get(&format!(
        "/api/v1/namespaces?fieldSelector=metadata.name%3D{}",
        run.namespace()
    ));
}
