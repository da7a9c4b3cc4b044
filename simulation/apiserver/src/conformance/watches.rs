//! Watches: start, events, bookmarks, selectors and ends.

use serde_json::{Value, json};

use super::custom::{widget, widgets};
use super::objects::{CONFIG_MAPS, ONE_SECRET, SECRETS, config_map, object_path, resource_version};
use super::run::{Call, CaseRun, CaseWatch, METADATA};

super::table!(
    watch_from_version,
    watch_from_list,
    watch_from_zero,
    watch_without_version,
    watch_of_metadata,
    watch_one_name,
    watch_selector_transitions,
    watch_field_selector_transitions,
    watch_times_out,
    watch_bookmark_after_start,
    watch_initial_events,
    watch_initial_events_need_bookmarks,
    watch_invalid_version,
    watch_of_custom_objects,
    watch_finalizers,
    watch_without_changes,
    watch_invalid,
    watch_all_namespaces,
);

fn secret(name: &str, label: &str) -> Value {
    json!({"metadata": {"name": name, "labels": {"state": label}}})
}

fn set_label(run: &mut CaseRun<'_>, name: &str, label: &str) -> Value {
    run.merge(
        &object_path(SECRETS, name),
        &json!({"metadata": {"labels": {"state": label}}}),
    )
}

/// Watches from the version of this object or list.
fn watch_secrets_from(run: &mut CaseRun<'_>, start: &Value) -> CaseWatch {
    let version = resource_version(start);
    run.watch(format!("{SECRETS}?watch=true&resourceVersion={version}"))
}

fn list_version(run: &mut CaseRun<'_>, path: &str) -> String {
    resource_version(&run.get(path))
}

fn watch_from_version(run: &mut CaseRun<'_>) {
    let first = run.post(SECRETS, &secret("one", "a"));
    let second = set_label(run, "one", "b");
    run.delete(ONE_SECRET, &json!({}));
    let watch = watch_secrets_from(run, &first);
    run.events(watch, 2);
    let later = watch_secrets_from(run, &second);
    run.event(later);
    run.post(SECRETS, &secret("two", "a"));
    run.event(watch);
    run.event(later);
    run.expect_silence(later);
}

fn watch_from_list(run: &mut CaseRun<'_>) {
    run.post(SECRETS, &secret("one", "a"));
    let start = list_version(run, &format!("{SECRETS}?limit=500"));
    let path = format!(
        "{SECRETS}?watch=true&timeoutSeconds=290&allowWatchBookmarks=true&resourceVersion={start}"
    );
    let watch = run.watch(path);
    run.expect_silence(watch);
    set_label(run, "one", "b");
    run.post(SECRETS, &secret("two", "a"));
    run.delete(ONE_SECRET, &json!({}));
    run.events(watch, 3);
    run.expect_silence(watch);
}

fn watch_from_zero(run: &mut CaseRun<'_>) {
    run.post(SECRETS, &secret("two", "a"));
    run.post(SECRETS, &secret("one", "a"));
    run.wait_for_cache(SECRETS, 2);
    let watch = run.watch(format!("{SECRETS}?watch=true&resourceVersion=0"));
    run.initial_events(watch, 2);
    set_label(run, "two", "b");
    run.event(watch);
}

fn watch_without_version(run: &mut CaseRun<'_>) {
    run.post(SECRETS, &secret("two", "a"));
    run.post(SECRETS, &secret("one", "a"));
    let watch = run.watch(format!("{SECRETS}?watch=1"));
    run.initial_events(watch, 2);
    set_label(run, "two", "b");
    run.event(watch);
}

fn watch_of_metadata(run: &mut CaseRun<'_>) {
    run.post(
        SECRETS,
        &json!({"metadata": {"name": "one"}, "stringData": {"a": "b"}}),
    );
    let start = list_version(run, SECRETS);
    let path = format!(
        "{SECRETS}?watch=true&timeoutSeconds=290&allowWatchBookmarks=true&resourceVersion={start}"
    );
    let watch = run.watch(Call::new("GET", path).accept(METADATA));
    set_label(run, "one", "b");
    run.event(watch);
    run.delete(ONE_SECRET, &json!({}));
    run.event(watch);
}

fn watch_one_name(run: &mut CaseRun<'_>) {
    let start = list_version(
        run,
        &format!("{CONFIG_MAPS}?fieldSelector=metadata.name%3Done"),
    );
    let path = format!(
        "{CONFIG_MAPS}?watch=true&fieldSelector=metadata.name%3Done&resourceVersion={start}"
    );
    let watch = run.watch(path);
    run.post(CONFIG_MAPS, &config_map("two", &json!({})));
    run.post(CONFIG_MAPS, &config_map("one", &json!({})));
    run.delete(&object_path(CONFIG_MAPS, "two"), &json!({}));
    run.delete(&object_path(CONFIG_MAPS, "one"), &json!({}));
    run.events(watch, 2);
    run.expect_silence(watch);
}

fn watch_selector_transitions(run: &mut CaseRun<'_>) {
    let selector = "labelSelector=state%3Dwanted";
    let start = list_version(run, &format!("{SECRETS}?{selector}"));
    let watch = run.watch(format!(
        "{SECRETS}?watch=true&{selector}&resourceVersion={start}"
    ));
    run.post(SECRETS, &secret("one", "unwanted"));
    set_label(run, "one", "wanted");
    run.merge(ONE_SECRET, &json!({"stringData": {"a": "b"}}));
    set_label(run, "one", "unwanted");
    set_label(run, "one", "wanted");
    run.delete(ONE_SECRET, &json!({}));
    run.post(SECRETS, &secret("two", "unwanted"));
    run.delete(&object_path(SECRETS, "two"), &json!({}));
    run.events(watch, 5);
    run.expect_silence(watch);
}

fn watch_field_selector_transitions(run: &mut CaseRun<'_>) {
    let selector = "labelSelector=state&fieldSelector=type%3Dhelm.sh%2Frelease.v1";
    let start = list_version(run, &format!("{SECRETS}?{selector}"));
    let watch = run.watch(format!(
        "{SECRETS}?watch=true&{selector}&resourceVersion={start}"
    ));
    run.post(SECRETS, &secret("one", "a"));
    let mut release = secret("two", "a");
    release["type"] = json!("helm.sh/release.v1");
    run.post(SECRETS, &release);
    run.merge(
        &object_path(SECRETS, "two"),
        &json!({"metadata": {"labels": {"state": null}}}),
    );
    run.events(watch, 2);
    run.expect_silence(watch);
}

fn watch_times_out(run: &mut CaseRun<'_>) {
    run.post(SECRETS, &secret("one", "a"));
    run.wait_for_cache(SECRETS, 1);
    let watch = run.watch(format!(
        "{SECRETS}?watch=true&timeoutSeconds=1&resourceVersion=0"
    ));
    run.events(watch, 2);
}

fn watch_bookmark_after_start(run: &mut CaseRun<'_>) {
    run.post(SECRETS, &secret("one", "a"));
    run.wait_for_cache(SECRETS, 1);
    let path =
        format!("{SECRETS}?watch=true&allowWatchBookmarks=true&timeoutSeconds=5&resourceVersion=0");
    let watch = run.watch(path);
    run.event(watch);
    run.events_until(watch, |event| event.get("type") == Some(&json!("BOOKMARK")));
}

fn watch_initial_events(run: &mut CaseRun<'_>) {
    run.post(SECRETS, &secret("two", "a"));
    run.post(SECRETS, &secret("one", "a"));
    let path = format!(
        "{SECRETS}?watch=true&sendInitialEvents=true&resourceVersionMatch=NotOlderThan&allowWatchBookmarks=true"
    );
    let watch = run.watch(path.as_str());
    run.initial_events(watch, 2);
    run.event(watch);
    set_label(run, "one", "b");
    run.event(watch);
    let metadata =
        run.watch(Call::new("GET", format!("{path}&labelSelector=state%3Db")).accept(METADATA));
    run.events(metadata, 2);
}

fn watch_initial_events_need_bookmarks(run: &mut CaseRun<'_>) {
    for query in [
        "sendInitialEvents=true",
        "resourceVersionMatch=NotOlderThan",
        "sendInitialEvents=true&resourceVersionMatch=Exact&resourceVersion=5",
    ] {
        run.watch(format!("{SECRETS}?watch=true&{query}"));
    }
    run.get(&format!("{SECRETS}?sendInitialEvents=true"));
}

fn watch_invalid_version(run: &mut CaseRun<'_>) {
    run.watch(format!("{SECRETS}?watch=true&resourceVersion=text"));
}

fn watch_of_custom_objects(run: &mut CaseRun<'_>) {
    let objects = widgets(run);
    let start = list_version(run, &objects);
    let watch = run.watch(format!("{objects}?watch=true&resourceVersion={start}"));
    let path = format!("{objects}?watch=true&resourceVersion={start}");
    let metadata = run.watch(Call::new("GET", path).accept(METADATA));
    let one = widget(run, "one", &json!({"color": "red"}));
    run.post(&objects, &one);
    run.merge(
        &object_path(&objects, "one/status"),
        &json!({"status": {"state": "new"}}),
    );
    run.delete(&object_path(&objects, "one"), &json!({}));
    run.events(watch, 3);
    run.events(metadata, 3);
}

fn watch_finalizers(run: &mut CaseRun<'_>) {
    let start = run.get(SECRETS);
    let watch = watch_secrets_from(run, &start);
    run.post(
        SECRETS,
        &json!({"metadata": {"name": "one", "finalizers": ["example.com/a"]}}),
    );
    run.delete(ONE_SECRET, &json!({}));
    run.delete(ONE_SECRET, &json!({}));
    run.merge(ONE_SECRET, &json!({"metadata": {"finalizers": null}}));
    run.events(watch, 3);
    run.expect_silence(watch);
}

fn watch_without_changes(run: &mut CaseRun<'_>) {
    let created = run.post(SECRETS, &secret("one", "a"));
    let watch = watch_secrets_from(run, &created);
    run.put(ONE_SECRET, &created);
    set_label(run, "one", "a");
    run.merge(
        &format!("{ONE_SECRET}?dryRun=All"),
        &json!({"stringData": {"a": "b"}}),
    );
    run.delete(&format!("{ONE_SECRET}?dryRun=All"), &json!({}));
    run.expect_silence(watch);
}

fn watch_invalid(run: &mut CaseRun<'_>) {
    run.watch(format!("{SECRETS}?watch=true&labelSelector=a%3D%3D%3Db"));
    run.watch(format!("{SECRETS}?watch=true&fieldSelector=data%3Da"));
    run.watch("/api/v1/namespaces/:ns/no-such-things?watch=true");
    run.watch(Call::new("GET", format!("{SECRETS}?watch=true")).accept("text/plain"));
    run.watch("/apis/no-such-group.example.com/v1/things?watch=true&resourceVersion=5");
}

fn watch_all_namespaces(run: &mut CaseRun<'_>) {
    run.post(
        SECRETS,
        &json!({"metadata": {"name": "one", "labels": {"case": run.namespace()}}}),
    );
    let selector = format!("labelSelector=case%3D{}", run.namespace());
    let start = list_version(run, &format!("/api/v1/secrets?{selector}&limit=500"));
    let watch = run.watch(format!(
        "/api/v1/secrets?watch=true&{selector}&resourceVersion={start}"
    ));
    run.merge(ONE_SECRET, &json!({"stringData": {"a": "b"}}));
    run.event(watch);
    let name = run.namespace().to_owned();
    let one = format!(
        "/api/v1/namespaces?watch=true&fieldSelector=metadata.name%3D{name}&resourceVersion={start}"
    );
    let namespaces = run.watch(one);
    run.merge(
        "/api/v1/namespaces/:ns",
        &json!({"metadata": {"labels": {"a": "b"}}}),
    );
    run.event(namespaces);
}
