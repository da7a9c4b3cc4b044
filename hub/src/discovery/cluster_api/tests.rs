use serde_json::json;

use super::*;
use crate::discovery::object_and_secret::tests::{deleting, object};

fn cluster(data: Value) -> DynamicObject {
    object("a", &[], data)
}

#[test]
fn initialization_is_read_from_status_fields_not_conditions() {
    let is_waiting = |data| ClusterApi.read(&cluster(data)).waiting.is_some();
    assert!(is_waiting(Value::Null));
    assert!(is_waiting(
        json!({"status": {"initialization": {"infrastructureProvisioned": true}}})
    ));
    assert!(is_waiting(
        json!({"status": {"conditions": [{"type": "ControlPlaneReady", "status": "True"}]}})
    ));
    assert!(!is_waiting(
        json!({"status": {"initialization": {"controlPlaneInitialized": true}}})
    ));
    assert!(!is_waiting(json!({"status": {"controlPlaneReady": true}})));
}

#[test]
fn paused_or_deleted_cluster_is_suspended_with_reason() {
    let paused = json!({"spec": {"paused": true}});
    let table = [
        (cluster(Value::Null), None),
        (cluster(json!({"spec": {"paused": false}})), None),
        (cluster(paused.clone()), Some("spec.paused")),
        (
            object("a", &[PAUSED_ANNOTATION], Value::Null),
            Some("annotation"),
        ),
        (deleting(cluster(paused)), Some("deleted")),
    ];
    for (cluster, expected) in table {
        let suspended = ClusterApi.read(&cluster).suspended;
        match expected {
            None => assert_eq!(suspended, None),
            Some(text) => assert!(suspended.unwrap().contains(text), "{text}"),
        }
    }
}

#[test]
fn only_contract_kubeconfig_secret_is_kept() {
    let secret = |name: &str, type_: &str, cluster: Option<&str>| {
        let mut secret = Secret {
            type_: Some(type_.to_owned()),
            ..Secret::default()
        };
        secret.metadata.name = Some(name.to_owned());
        let label = cluster.map(|cluster| (CLUSTER_NAME_LABEL.to_owned(), cluster.to_owned()));
        secret.metadata.labels = Some(label.into_iter().collect());
        secret
    };
    let table = [
        ("a-kubeconfig", SECRET_TYPE, Some("a"), true),
        ("a-user-kubeconfig", SECRET_TYPE, Some("a"), false),
        ("a-user-kubeconfig", SECRET_TYPE, Some("a-user"), true),
        ("a-ca", SECRET_TYPE, Some("a"), false),
        ("a-kubeconfig", "Opaque", Some("a"), false),
        ("a-kubeconfig", SECRET_TYPE, None, false),
    ];
    for (name, type_, cluster, expected) in table {
        assert_eq!(
            ClusterApi.may_pair(&secret(name, type_, cluster)),
            expected,
            "{name} {type_} {cluster:?}"
        );
    }
}
