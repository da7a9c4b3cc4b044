//! The cases of the table.

use http::Method;
use serde_json::{Value, json};

use super::{Case, CaseStep, Interruption};
use crate::chart::TestChart;

const COMMON_FLAGS: &str = "--namespace $NS --kubeconfig $KUBECONFIG --qps 50 --burst-limit 300";
const INSTALL_FLAGS: &str = "--wait=hookOnly --hide-notes --disable-openapi-validation --output json \
     --values $VALUES --labels example.org/run=1";
const FORCED_FLAGS: &str = "--server-side=true --force-conflicts";
const CLIENT_SIDE_FLAGS: &str = "--server-side=false";

fn helm(line: String, values: Value, interruption: Interruption) -> CaseStep {
    CaseStep::Helm {
        line,
        values,
        interruption,
    }
}

fn upgrade_line(chart: usize, flags: &str, seconds: u32) -> String {
    format!(
        "upgrade --install --reset-values --history-max 3 {INSTALL_FLAGS} {COMMON_FLAGS} --timeout {seconds}s {flags} -- r $CHART{chart}"
    )
}

fn upgrade(chart: usize) -> CaseStep {
    upgrade_with(chart, json!({}), Interruption::None)
}

fn upgrade_with(chart: usize, values: Value, interruption: Interruption) -> CaseStep {
    helm(upgrade_line(chart, FORCED_FLAGS, 20), values, interruption)
}

fn upgrade_with_flags(chart: usize, flags: &str) -> CaseStep {
    helm(
        upgrade_line(chart, flags, 20),
        json!({}),
        Interruption::None,
    )
}

/// An upgrade whose hooks have 2 seconds.
fn short_upgrade(chart: usize) -> CaseStep {
    helm(
        upgrade_line(chart, FORCED_FLAGS, 2),
        json!({}),
        Interruption::None,
    )
}

fn reinstall(chart: usize) -> CaseStep {
    let line = format!(
        "install --replace {INSTALL_FLAGS} {COMMON_FLAGS} --timeout 20s {FORCED_FLAGS} -- r $CHART{chart}"
    );
    helm(line, json!({}), Interruption::None)
}

fn uninstall(interruption: Interruption) -> CaseStep {
    let line = format!("uninstall --wait=hookOnly {COMMON_FLAGS} --timeout 2s -- r");
    helm(line, json!({}), interruption)
}

fn rollback(to: u32, interruption: Interruption) -> CaseStep {
    let line = format!(
        "rollback --wait=hookOnly --history-max 3 {COMMON_FLAGS} --timeout 2s {FORCED_FLAGS} -- r {to}"
    );
    helm(line, json!({}), interruption)
}

fn request(method: Method, path: &str, body: Value) -> CaseStep {
    CaseStep::Write {
        method,
        path: path.to_owned(),
        body,
    }
}

fn config_map(name: &str, annotations: Value) -> Value {
    json!({
        "apiVersion": "v1", "kind": "ConfigMap",
        "metadata": { "name": name, "annotations": annotations },
        "data": {
            "revision": "$REVISION", "version": "$CHART_VERSION", "at": "$NAMESPACE/$RELEASE",
            "message": "say $values.message.text.", "count": "x$values.count",
        },
    })
}

fn hook(name: &str, events: &str, policy: &str, weight: i64) -> Value {
    let mut annotations =
        json!({ "helm.sh/hook": events, "helm.sh/hook-weight": weight.to_string() });
    if !policy.is_empty() {
        annotations["helm.sh/hook-delete-policy"] = json!(policy);
    }
    config_map(name, annotations)
}

/// A job without pods. It fails after `deadline` seconds.
fn job(name: &str, events: &str, deadline: Value) -> Value {
    json!({
        "apiVersion": "batch/v1", "kind": "Job",
        "metadata": {
            "name": name,
            "annotations": { "helm.sh/hook": events, "helm.sh/hook-delete-policy": "hook-failed" },
        },
        "spec": {
            "backoffLimit": 0, "activeDeadlineSeconds": deadline, "suspend": false,
            "template": { "spec": {
                "restartPolicy": "Never", "containers": [{ "name": "a", "image": "a" }],
            } },
        },
    })
}

fn deployment(label: &str) -> Value {
    json!({
        "apiVersion": "apps/v1", "kind": "Deployment", "metadata": { "name": "$RELEASE-d" },
        "spec": {
            "replicas": "$values.replicas",
            "selector": { "matchLabels": { "app": label } },
            "template": {
                "metadata": { "labels": { "app": label } },
                "spec": { "containers": [
                    { "name": "a", "image": "a:$CHART_VERSION" }, { "name": "b", "image": "b" },
                ] },
            },
        },
    })
}

fn secret() -> Value {
    json!({
        "apiVersion": "v1", "kind": "Secret", "metadata": { "name": "$RELEASE-s" },
        "stringData": { "message": "$values.message.text" },
    })
}

fn service_account(annotations: Value) -> Value {
    json!({
        "apiVersion": "v1", "kind": "ServiceAccount",
        "metadata": { "name": "$RELEASE-sa", "annotations": annotations },
    })
}

/// One object of each kind, and hooks for each event.
fn chart_with_hooks(version: &str) -> TestChart {
    let events = "pre-install,pre-upgrade,pre-rollback,pre-delete";
    let after = "post-install,post-upgrade,post-rollback,post-delete";
    TestChart::new("small", version)
        .value("message", json!({ "text": "hello" }))
        .value("replicas", json!(0))
        .object(deployment("one"))
        .object(config_map("$RELEASE-a", json!({})))
        .object(secret())
        .object(hook("$RELEASE-pre", events, "", 0))
        .object(hook("$RELEASE-post", after, "hook-succeeded", 0))
}

/// Without hooks.
fn chart_without_hooks(version: &str) -> TestChart {
    TestChart::new("small", version)
        .value("message", json!({ "text": "hello" }))
        .object(config_map("$RELEASE-a", json!({})))
        .object(secret())
}

fn case(name: impl Into<String>, charts: Vec<TestChart>, steps: Vec<CaseStep>) -> Case {
    Case {
        name: name.into(),
        charts,
        steps,
    }
}

/// Returns all cases.
pub fn all() -> Vec<Case> {
    let mut cases = success_cases();
    cases.extend(failure_cases());
    cases.extend(hook_cases());
    cases.extend(foreign_object_cases());
    cases.extend(write_method_cases());
    cases.extend(interrupted_cases());
    cases
}

fn success_cases() -> Vec<Case> {
    let values = json!({ "message": { "text": "other" }, "count": 3, "replicas": null });
    let mut conditional = chart_without_hooks("1.0.0");
    let mut extra = service_account(json!({}));
    extra["$when"] = json!("values.extra");
    conditional.objects.push(extra.clone());
    let mut kept = chart_without_hooks("1.0.0");
    kept.objects.push(service_account(
        json!({ "helm.sh/resource-policy": "keep" }),
    ));
    let upgrade_with_extra =
        |extra: bool| upgrade_with(0, json!({ "extra": extra }), Interruption::None);
    vec![
        case("install", vec![chart_with_hooks("1.0.0")], vec![upgrade(0)]),
        case(
            "upgrade",
            vec![chart_with_hooks("1.0.0"), chart_with_hooks("1.1.0")],
            vec![
                upgrade(0),
                upgrade_with(1, values, Interruption::None),
                upgrade(1),
            ],
        ),
        case(
            "dropped object",
            vec![conditional],
            vec![
                upgrade_with_extra(true),
                upgrade_with_extra(false),
                upgrade_with_extra(true),
            ],
        ),
        case(
            "kept object",
            vec![kept, chart_without_hooks("1.1.0")],
            vec![upgrade(0), upgrade(1), uninstall(Interruption::None)],
        ),
        case(
            "uninstall",
            vec![chart_with_hooks("1.0.0")],
            vec![
                upgrade(0),
                upgrade(0),
                uninstall(Interruption::None),
                uninstall(Interruption::None),
            ],
        ),
        case(
            "rollback",
            vec![chart_with_hooks("1.0.0"), chart_without_hooks("1.1.0")],
            vec![
                upgrade(0),
                upgrade(1),
                rollback(1, Interruption::None),
                rollback(9, Interruption::None),
            ],
        ),
        case(
            "history",
            vec![chart_without_hooks("1.0.0")],
            vec![
                upgrade(0),
                upgrade(0),
                upgrade(0),
                upgrade(0),
                upgrade(0),
                rollback(3, Interruption::None),
            ],
        ),
        case(
            "replace",
            vec![chart_without_hooks("1.0.0")],
            vec![reinstall(0), reinstall(0)],
        ),
    ]
}

fn failure_cases() -> Vec<Case> {
    let immutable = chart_without_hooks("1.1.0").object(deployment("two"));
    let mut invalid = chart_without_hooks("1.0.0").object(service_account(json!({})));
    invalid.objects.push(json!({
        "apiVersion": "v1", "kind": "Service", "metadata": { "name": "$RELEASE-x" },
        "spec": { "ports": [{ "port": 99999 }] },
    }));
    let failing =
        chart_without_hooks("1.0.0").object(json!({ "$fail": "no values", "kind": "ConfigMap" }));
    let unknown = chart_without_hooks("1.0.0").object(json!({
        "apiVersion": "example.org/v1", "kind": "Widget", "metadata": { "name": "w" },
    }));
    let nonsense = json!({ "data": { "release": "bm9uc2Vuc2U=" } });
    let first_revision = "/api/v1/namespaces/$NS/secrets/sh.helm.release.v1.r.v1";
    let undecodable = || request(Method::PATCH, first_revision, nonsense.clone());
    vec![
        case(
            "immutable field",
            vec![chart_with_hooks("1.0.0"), immutable],
            vec![upgrade(0), upgrade(1), upgrade(1), upgrade(0)],
        ),
        case(
            "invalid object",
            vec![invalid, chart_without_hooks("1.1.0")],
            vec![upgrade(0), upgrade(0), reinstall(0), upgrade(1)],
        ),
        case(
            "failed then replaced",
            vec![
                chart_without_hooks("1.0.0"),
                TestChart::new("small", "1.0.1").object(json!({
                    "apiVersion": "v1", "kind": "Service", "metadata": { "name": "$RELEASE-x" },
                    "spec": { "ports": [{ "port": 99999 }] },
                })),
            ],
            vec![upgrade(1), reinstall(0), upgrade(0)],
        ),
        case("unknown kind", vec![unknown], vec![upgrade(0)]),
        case(
            "failed template",
            vec![chart_without_hooks("1.0.0"), failing],
            vec![upgrade(0), upgrade(1)],
        ),
        case(
            "undecodable",
            vec![chart_without_hooks("1.0.0")],
            vec![
                upgrade(0),
                undecodable(),
                upgrade(0),
                uninstall(Interruption::None),
            ],
        ),
        case(
            "undecodable old revision",
            vec![chart_without_hooks("1.0.0")],
            vec![
                upgrade(0),
                upgrade(0),
                undecodable(),
                upgrade(0),
                rollback(1, Interruption::None),
            ],
        ),
    ]
}

fn hook_cases() -> Vec<Case> {
    let ordered = chart_without_hooks("1.0.0")
        .object(hook("$RELEASE-b", "pre-install", "hook-succeeded", 5))
        .object(hook(
            "$RELEASE-c",
            "pre-install",
            "before-hook-creation,hook-succeeded",
            -5,
        ))
        .object(hook("$RELEASE-d", "post-install,pre-install", "", 5))
        .object(hook("$RELEASE-e", "test", "", 0));
    let endless = |events: &str| {
        let chart =
            chart_without_hooks("1.1.0").object(hook("$RELEASE-b", events, "hook-succeeded", -1));
        chart.object(job("$RELEASE-j", events, Value::Null))
    };
    let failing = chart_without_hooks("1.1.0").object(job("$RELEASE-j", "pre-upgrade", json!(1)));
    let invalid = {
        let mut broken = hook("$RELEASE-broken", "pre-upgrade", "", 0);
        broken["metadata"]["labels"] = json!({ "a": "not valid!" });
        chart_without_hooks("1.1.0").object(broken)
    };
    vec![
        case(
            "ordered hooks",
            vec![ordered],
            vec![upgrade(0), uninstall(Interruption::None)],
        ),
        case(
            "hook times out",
            vec![chart_without_hooks("1.0.0"), endless("pre-upgrade")],
            vec![upgrade(0), short_upgrade(1), upgrade(0)],
        ),
        case(
            "install hook times out",
            vec![endless("post-install")],
            vec![short_upgrade(0)],
        ),
        case(
            "hook fails",
            vec![chart_without_hooks("1.0.0"), failing],
            vec![upgrade(0), upgrade(1)],
        ),
        case(
            "hook is invalid",
            vec![chart_without_hooks("1.0.0"), invalid],
            vec![upgrade(0), upgrade(1)],
        ),
        case(
            "pre delete hook fails",
            vec![endless("pre-delete")],
            vec![upgrade(0), uninstall(Interruption::None), upgrade(0)],
        ),
        case(
            "post delete hook fails",
            vec![endless("post-delete")],
            vec![upgrade(0), uninstall(Interruption::None)],
        ),
        case(
            "rollback hook fails",
            vec![endless("pre-rollback"), chart_without_hooks("1.2.0")],
            vec![
                upgrade(0),
                upgrade(1),
                rollback(1, Interruption::None),
                upgrade(1),
            ],
        ),
    ]
}

fn foreign_object_cases() -> Vec<Case> {
    let config_maps = "/api/v1/namespaces/$NS/configmaps";
    let create_config_map = |metadata: Value| {
        let body = json!({ "apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata });
        request(Method::POST, config_maps, body)
    };
    let helm_metadata = json!({
        "name": "r-a", "labels": { "app.kubernetes.io/managed-by": "Helm" },
        "annotations": {
            "meta.helm.sh/release-name": "r", "meta.helm.sh/release-namespace": "$NS",
        },
    });
    let other_owner =
        json!({ "metadata": { "annotations": { "meta.helm.sh/release-name": "other" } } });
    let conflicting_apply = || {
        request(
            Method::PATCH,
            &format!("{config_maps}/r-a?fieldManager=other&force=true"),
            json!({
                "apiVersion": "v1", "kind": "ConfigMap", "metadata": { "name": "r-a" },
                "data": { "version": "theirs", "own": "x" },
            }),
        )
    };
    vec![
        case(
            "foreign object at install",
            vec![chart_without_hooks("1.0.0")],
            vec![create_config_map(json!({ "name": "r-a" })), upgrade(0)],
        ),
        case(
            "foreign object at upgrade",
            vec![
                TestChart::new("small", "1.0.0").object(secret()),
                chart_without_hooks("1.1.0"),
            ],
            vec![
                upgrade(0),
                create_config_map(json!({ "name": "r-a" })),
                upgrade(1),
            ],
        ),
        case(
            "adopted object",
            vec![chart_without_hooks("1.0.0")],
            vec![create_config_map(helm_metadata), upgrade(0)],
        ),
        case(
            "object of another release",
            vec![chart_without_hooks("1.0.0")],
            vec![
                upgrade(0),
                request(Method::PATCH, &format!("{config_maps}/r-a"), other_owner),
                uninstall(Interruption::None),
            ],
        ),
        case(
            "conflict",
            vec![chart_without_hooks("1.0.0"), chart_without_hooks("1.1.0")],
            vec![
                upgrade(0),
                conflicting_apply(),
                upgrade_with_flags(1, "--server-side=true"),
                upgrade(1),
            ],
        ),
        case(
            "deleted object",
            vec![chart_without_hooks("1.0.0")],
            vec![
                upgrade(0),
                request(Method::DELETE, &format!("{config_maps}/r-a"), json!({})),
                upgrade(0),
                request(Method::DELETE, &format!("{config_maps}/r-a"), json!({})),
                uninstall(Interruption::None),
            ],
        ),
    ]
}

fn write_method_cases() -> Vec<Case> {
    let charts = || vec![chart_with_hooks("1.0.0"), chart_with_hooks("1.1.0")];
    vec![
        case(
            "client side",
            charts(),
            vec![
                upgrade_with_flags(0, CLIENT_SIDE_FLAGS),
                upgrade_with_flags(0, CLIENT_SIDE_FLAGS),
                upgrade_with_flags(1, CLIENT_SIDE_FLAGS),
            ],
        ),
        case(
            "client to server side",
            charts(),
            vec![
                upgrade_with_flags(0, CLIENT_SIDE_FLAGS),
                upgrade(1),
                rollback(1, Interruption::None),
            ],
        ),
        case(
            "server to client side",
            charts(),
            vec![upgrade(0), upgrade_with_flags(1, CLIENT_SIDE_FLAGS)],
        ),
    ]
}

/// Helm dies, or gets SIGTERM, at some of its writes.
fn interrupted_cases() -> Vec<Case> {
    let mut cases = Vec::new();
    let mut add = |name: String, steps: Vec<CaseStep>| {
        let charts = vec![chart_with_hooks("1.0.0"), chart_with_hooks("1.1.0")];
        cases.push(case(name, charts, steps));
    };
    for write in [1, 2, 3, 4, 5, 6, 7, 8, 11] {
        let killed = upgrade_with(0, json!({}), Interruption::Kill(write));
        add(format!("install killed {write}"), vec![killed, upgrade(1)]);
    }
    for write in [1, 4, 6, 11] {
        let killed = upgrade_with(1, json!({}), Interruption::Kill(write));
        let steps = vec![upgrade(0), killed, upgrade(1)];
        add(format!("upgrade killed {write}"), steps);
    }
    for write in [2, 4, 6, 11] {
        let killed = uninstall(Interruption::Kill(write));
        let again = uninstall(Interruption::None);
        let steps = vec![upgrade(0), killed, upgrade(1), again];
        add(format!("uninstall killed {write}"), steps);
    }
    for write in [1, 3, 5, 10] {
        let killed = rollback(1, Interruption::Kill(write));
        let steps = vec![upgrade(0), upgrade(1), killed, upgrade(1)];
        add(format!("rollback killed {write}"), steps);
    }
    for write in [4, 6] {
        let terminated = upgrade_with(0, json!({}), Interruption::Terminate(write));
        let steps = vec![terminated, upgrade(1)];
        add(format!("install terminated {write}"), steps);
    }
    for write in [4, 6] {
        let terminated = upgrade_with(1, json!({}), Interruption::Terminate(write));
        let steps = vec![upgrade(0), terminated, upgrade(1)];
        add(format!("upgrade terminated {write}"), steps);
    }
    let terminated = uninstall(Interruption::Terminate(5));
    let steps = vec![upgrade(0), terminated, upgrade(1)];
    add("uninstall terminated".to_owned(), steps);
    let terminated = rollback(1, Interruption::Terminate(5));
    let steps = vec![upgrade(0), upgrade(1), terminated];
    add("rollback terminated".to_owned(), steps);
    cases
}
