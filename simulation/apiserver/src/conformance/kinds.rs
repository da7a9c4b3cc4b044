//! Leases, events, pods, service accounts and jobs.

use serde_json::{Value, json};

use super::objects::{object_path, resource_version, uid};
use super::run::{Call, CaseRun, MERGE, METADATA};

super::table!(
    lease_life,
    lease_rejected,
    events_core,
    events_group,
    suspended_job,
    pod_labels,
    service_account,
    rbac_objects,
    cluster_role_apply,
);

const LEASES: &str = "/apis/coordination.k8s.io/v1/namespaces/:ns/leases";

fn lease(holder: &str, second: u32) -> Value {
    json!({
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {"name": "krypton-hub"},
        "spec": {
            "holderIdentity": holder,
            "leaseDurationSeconds": 30,
            "leaseTransitions": 0,
            "acquireTime": "2001-02-03T04:05:06.000000Z",
            "renewTime": format!("2001-02-03T04:05:{second:02}.123456Z")
        }
    })
}

fn lease_life(run: &mut CaseRun<'_>) {
    let path = object_path(LEASES, "krypton-hub");
    run.get(&path);
    let created = run.post(LEASES, &lease("a", 6));
    run.get(&path);
    run.post(LEASES, &lease("b", 6));
    let replaced = |object: &Value, second| {
        let mut next = lease("a", second);
        next["metadata"]["resourceVersion"] = json!(resource_version(object));
        next["metadata"]["uid"] = json!(uid(object));
        next
    };
    let next = run.put(&path, &replaced(&created, 16));
    run.put(&path, &replaced(&created, 26));
    run.put(&path, &replaced(&next, 36));
    let start = resource_version(&next);
    let watch = run.watch(format!(
        "{LEASES}?watch=true&fieldSelector=metadata.name%3Dkrypton-hub&resourceVersion={start}"
    ));
    run.event(watch);
    let mut released = lease("", 46);
    released["spec"]["renewTime"] = Value::Null;
    released["spec"]["acquireTime"] = Value::Null;
    run.put(&path, &released);
    run.delete(&path, &json!({}));
    run.put(&path, &replaced(&next, 36));
}

fn lease_rejected(run: &mut CaseRun<'_>) {
    let mut object = lease("a", 6);
    object["spec"]["leaseDurationSeconds"] = json!(0);
    run.post(LEASES, &object);
    object["spec"]["leaseDurationSeconds"] = json!(30);
    object["spec"]["leaseTransitions"] = json!(-1);
    run.post(LEASES, &object);
    object["spec"]["leaseTransitions"] = json!(0);
    object["spec"]["renewTime"] = json!("text");
    run.post(LEASES, &object);
    run.post(
        "/apis/coordination.k8s.io/v1/namespaces/no-such-namespace/leases",
        &lease("a", 6),
    );
}

fn events_core(run: &mut CaseRun<'_>) {
    let events = "/api/v1/namespaces/:ns/events";
    let namespace = run.namespace().to_owned();
    let event = json!({
        "metadata": {"name": "one.1", "namespace": namespace},
        "involvedObject": {"apiVersion": "v1", "kind": "ConfigMap", "name": "one", "namespace": namespace},
        "reason": "Installed",
        "message": "installed the chart",
        "type": "Normal",
        "count": 1,
        "firstTimestamp": "2001-02-03T04:05:06Z",
        "lastTimestamp": "2001-02-03T04:05:06Z",
        "eventTime": "2001-02-03T04:05:06.123456Z",
        "action": "Install",
        "reportingComponent": "krypton-agent",
        "reportingInstance": "agent-1",
        "source": {"component": "krypton-agent"}
    });
    run.post(events, &event);
    run.post(events, &event);
    run.get(&format!(
        "/apis/events.k8s.io/v1/namespaces/{namespace}/events/one.1"
    ));
    let mut foreign = event;
    foreign["metadata"] = json!({"name": "two.1"});
    foreign["involvedObject"]["namespace"] = json!("default");
    run.post(events, &foreign);
}

fn events_group(run: &mut CaseRun<'_>) {
    let events = "/apis/events.k8s.io/v1/namespaces/:ns/events";
    let namespace = run.namespace().to_owned();
    let event = json!({
        "metadata": {"name": "one.1"},
        "regarding": {"apiVersion": "v1", "kind": "ConfigMap", "name": "one", "namespace": namespace},
        "reason": "Installed",
        "note": "installed the chart",
        "type": "Normal",
        "eventTime": "2001-02-03T04:05:06.123456Z",
        "action": "Install",
        "reportingController": "krypton-agent",
        "reportingInstance": "agent-1"
    });
    run.post(events, &event);
    let series = json!({"series": {"count": 2, "lastObservedTime": "2001-02-03T04:05:16.123456Z"}});
    run.merge(&object_path(events, "one.1"), &series);
    run.merge(&object_path(events, "none.1"), &series);
    run.get(&format!("/api/v1/namespaces/{namespace}/events/one.1"));
    let mut invalid = event;
    invalid["metadata"]["name"] = json!("two.1");
    invalid["action"] = json!("");
    invalid["note"] = json!("a".repeat(1025));
    run.post(events, &invalid);
}

fn suspended_job(run: &mut CaseRun<'_>) {
    let jobs = "/apis/batch/v1/namespaces/:ns/jobs";
    let job = json!({
        "metadata": {"name": "one", "labels": {"app.kubernetes.io/managed-by": "Helm"}},
        "spec": {
            "suspend": true,
            "template": {
                "spec": {
                    "restartPolicy": "Never",
                    "containers": [{"name": "main", "image": "example.com/main:1"}]
                }
            }
        }
    });
    run.send(Call::new("POST", jobs).body(&job).only(&[
        "/kind",
        "/metadata/name",
        "/spec/suspend",
    ]));
    let list = format!("{jobs}?labelSelector=app.kubernetes.io%2Fmanaged-by%3DHelm&limit=500");
    run.send(Call::new("GET", list).only(&["/kind", "/items/0/metadata/name"]));
    run.send(
        Call::new("DELETE", object_path(jobs, "one"))
            .body(&json!({"propagationPolicy": "Background"}))
            .only(&["/kind", "/status"]),
    );
}

fn pod_labels(run: &mut CaseRun<'_>) {
    let account = "/api/v1/namespaces/:ns/serviceaccounts/default";
    run.unrecorded(|run| run.wait(account, |account| !uid(account).is_empty()));
    let pods = "/api/v1/namespaces/:ns/pods";
    let pod = json!({
        "metadata": {"name": "one", "labels": {"app": "hub"}},
        "spec": {"containers": [{"name": "main", "image": "example.com/main:1"}]}
    });
    run.send(
        Call::new("POST", pods)
            .body(&pod)
            .only(&["/kind", "/metadata", "/status/phase"]),
    );
    let call = Call::new("PATCH", object_path(pods, "one"))
        .content_type(MERGE)
        .accept(METADATA);
    run.send(call.body(&json!({"metadata": {"labels": {"leader": "true"}}})));
    run.send(Call::new("GET", object_path(pods, "one")).accept(METADATA));
}

fn service_account(run: &mut CaseRun<'_>) {
    let accounts = "/api/v1/namespaces/:ns/serviceaccounts";
    run.post(accounts, &json!({"metadata": {"name": "one"}}));
    run.send(Call::new("GET", object_path(accounts, "one")).accept(METADATA));
    run.delete(&object_path(accounts, "one"), &json!({}));
}

fn rbac_objects(run: &mut CaseRun<'_>) {
    let roles = "/apis/rbac.authorization.k8s.io/v1/namespaces/:ns/roles";
    let rules = json!([{"apiGroups": [""], "resources": ["secrets"], "verbs": ["get"]}]);
    run.post(roles, &json!({"metadata": {"name": "one"}, "rules": rules}));
    run.merge(&object_path(roles, "one"), &json!({"rules": []}));
    run.delete(&object_path(roles, "one"), &json!({}));
}

fn cluster_role_apply(run: &mut CaseRun<'_>) {
    let name = format!("{}-one", run.namespace());
    let path = format!("/apis/rbac.authorization.k8s.io/v1/clusterroles/{name}");
    run.delete_at_end(&path);
    let role = json!({
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRole",
        "metadata": {"name": name},
        "rules": [{"apiGroups": [""], "resources": ["secrets"], "verbs": ["get"]}]
    });
    run.apply(&format!("{path}?fieldManager=helm&force=true"), &role);
    run.apply(
        &format!("{path}?fieldManager=helm&force=true&dryRun=All"),
        &role,
    );
}
