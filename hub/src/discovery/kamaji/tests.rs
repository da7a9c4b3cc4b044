use serde_json::json;

use super::*;
use crate::discovery::object_and_secret::tests::{deleting, object};

fn kamaji() -> Kamaji {
    Kamaji {
        key: "admin.conf".to_owned(),
        generator: None,
    }
}

fn with_status(status: &str) -> Value {
    json!({"status": {
        "kubernetesResources": {"version": {"status": status}},
        "kubeconfig": {"admin": {"secretName": "a-admin-kubeconfig"}},
    }})
}

#[test]
fn control_plane_status_decides_usable_waiting_or_suspended() {
    for (status, is_waiting, is_suspended) in [
        ("Unknown", true, false),
        ("Provisioning", true, false),
        ("CertificateAuthorityRotating", false, false),
        ("Upgrading", false, false),
        ("Migrating", false, true),
        ("Ready", false, false),
        ("NotReady", false, false),
        ("Sleeping", false, true),
        ("WriteLimited", false, true),
        ("OfTomorrow", true, false),
    ] {
        let fields = kamaji().read(&object("a", &[], with_status(status)));
        assert_eq!(fields.waiting.is_some(), is_waiting, "{status}");
        assert_eq!(fields.suspended.is_some(), is_suspended, "{status}");
        let message = fields.waiting.or(fields.suspended);
        assert!(
            message.is_none_or(|message| message.contains(status)),
            "{status}"
        );
        assert_eq!(fields.secret.as_deref(), Some("a-admin-kubeconfig"));
    }
    let new = kamaji().read(&object("a", &[], Value::Null));
    assert!(new.waiting.unwrap().contains("Provisioning"));
    assert_eq!(new.secret, None);
}

#[test]
fn paused_annotation_suspends_on_control_plane_or_secret() {
    let paused = object("a", &[PAUSED_ANNOTATION], with_status("Ready"));
    assert!(kamaji().read(&paused).suspended.unwrap().contains("paused"));
    let ready = kamaji().read(&object("a", &[], with_status("Ready")));
    assert_eq!(ready.suspended, None);
    let deleted = deleting(object("a", &[], with_status("Ready")));
    assert!(
        kamaji()
            .read(&deleted)
            .suspended
            .unwrap()
            .contains("deleted")
    );
    let mut secret = Secret::default();
    assert_eq!(kamaji().suspended_by(&secret), None);
    let annotation = (PAUSED_ANNOTATION.to_owned(), String::new());
    secret.metadata.annotations = Some([annotation].into());
    assert!(kamaji().suspended_by(&secret).unwrap().contains("Secret"));
}

#[test]
fn kamajis_own_annotation_names_the_key() {
    let mut plane = object("a", &[], with_status("Ready"));
    assert_eq!(kamaji().read(&plane).key, "admin.conf");
    let annotation = (KEY_ANNOTATION.to_owned(), "super-admin.svc".to_owned());
    plane.metadata.annotations = Some([annotation].into());
    assert_eq!(kamaji().read(&plane).key, "super-admin.svc");
}

#[test]
fn generator_replaces_secret_and_key() {
    let generated = Kamaji {
        generator: Some("krypton".to_owned()),
        ..kamaji()
    };
    // The annotation names a key of the Secret in the status.
    let plane = object("a", &[KEY_ANNOTATION], with_status("Ready"));
    let fields = generated.read(&plane);
    assert_eq!(fields.secret.as_deref(), Some("a-krypton"));
    assert_eq!(fields.key, "value");
    let selector = |kamaji: &Kamaji| kamaji.secrets().label_selector.unwrap();
    let (admin, krypton) = (
        "kamaji.clastix.io/component=admin-kubeconfig",
        "kamaji.clastix.io/managed-by=krypton",
    );
    assert_eq!(selector(&kamaji()), admin);
    assert_eq!(selector(&generated), krypton);
    for (label, by_status, by_generator) in [
        (admin, true, false),
        (krypton, false, true),
        ("kamaji.clastix.io/managed-by=other", false, false),
    ] {
        let (key, value) = label.split_once('=').unwrap();
        let mut secret = Secret::default();
        secret.metadata.labels = Some([(key.to_owned(), value.to_owned())].into());
        assert_eq!(kamaji().may_pair(&secret), by_status, "{label}");
        assert_eq!(generated.may_pair(&secret), by_generator, "{label}");
    }
}
