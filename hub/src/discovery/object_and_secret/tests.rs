use jiff::Timestamp;
use k8s_openapi::ByteString;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use krypton_types::names;
use serde_json::{Value, json};

use super::*;
use crate::discovery::cluster_api::ClusterApi;
use crate::discovery::kamaji::Kamaji;

/// A kubeconfig that is good.
pub(in crate::discovery) fn kubeconfig(server: &str) -> String {
    json!({
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        "clusters": [{"name": "c", "cluster": {"server": server}}],
        "users": [{"name": "u", "user": {"token": "t"}}],
    })
    .to_string()
}

pub(in crate::discovery) fn object(name: &str, annotations: &[&str], data: Value) -> DynamicObject {
    let annotations = annotations
        .iter()
        .map(|key| ((*key).to_owned(), String::new()));
    DynamicObject {
        types: None,
        metadata: ObjectMeta {
            name: Some(name.to_owned()),
            namespace: Some("fleet".to_owned()),
            uid: Some("u".to_owned()),
            annotations: Some(annotations.collect()),
            ..ObjectMeta::default()
        },
        data,
    }
}

pub(in crate::discovery) fn deleting(mut object: DynamicObject) -> DynamicObject {
    object.metadata.deletion_timestamp = Some(Time(Timestamp::UNIX_EPOCH));
    object
}

fn key(name: &str) -> Key {
    ("fleet".to_owned(), name.to_owned())
}

fn secret(version: &str, data: &[(&str, &str)]) -> Secret {
    let data = data
        .iter()
        .map(|(key, text)| ((*key).to_owned(), ByteString(text.as_bytes().to_vec())));
    Secret {
        metadata: ObjectMeta {
            name: Some("a-kubeconfig".to_owned()),
            namespace: Some("fleet".to_owned()),
            resource_version: Some(version.to_owned()),
            ..ObjectMeta::default()
        },
        data: Some(data.collect()),
        ..Secret::default()
    }
}

/// One cluster through changes of its two halves.
#[derive(Default)]
struct ClusterFixture {
    objects: BTreeMap<Key, ClusterObject>,
    secrets: BTreeMap<Key, Secret>,
    pairs: BTreeMap<Key, Pair>,
}

impl ClusterFixture {
    fn cluster(&mut self, uid: &str, initialized: bool) -> &mut Self {
        let status = json!({"initialization": {"controlPlaneInitialized": initialized}});
        let mut cluster = object("a", &[], json!({ "status": status }));
        cluster.metadata.uid = Some(uid.to_owned());
        self.objects
            .insert(key("a"), ClusterObject::new(&cluster, &ClusterApi));
        self
    }

    fn secret(&mut self, secret: Secret) -> &mut Self {
        self.secrets.insert(key("a-kubeconfig"), secret);
        self
    }

    fn read(&mut self) -> Arc<Source> {
        let policy = Policy::default();
        self.pairs = read_pairs(
            &ClusterApi,
            &policy,
            &self.objects,
            &self.secrets,
            &self.pairs,
        );
        Arc::clone(&self.pairs[&key("a")].source)
    }

    fn access_error(&mut self) -> Unresolved {
        self.read().access.clone().unwrap_err()
    }
}

#[test]
fn waiting_cluster_reports_missing_prerequisite() {
    let mut fixture = ClusterFixture::default();
    let waiting = fixture.cluster("u", false).access_error();
    assert_eq!(waiting.reason, reason::SOURCE_NOT_READY);
    assert!(waiting.message.contains("Cluster fleet/a"), "{waiting:?}");
    assert!(waiting.message.contains("not initialised"), "{waiting:?}");

    let waiting = fixture.cluster("u", true).access_error();
    assert_eq!(waiting.reason, reason::SOURCE_NOT_READY);
    assert!(
        waiting.message.contains("Secret fleet/a-kubeconfig"),
        "{waiting:?}"
    );

    let invalid = fixture.secret(secret("1", &[("other", "")])).access_error();
    assert_eq!(invalid.reason, reason::KUBECONFIG_INVALID);
    assert!(invalid.message.contains("\"value\""), "{invalid:?}");

    let good = kubeconfig("https://a:6443");
    let source = fixture.secret(secret("2", &[("value", &good)])).read();
    assert_eq!(source.access.as_ref().unwrap().server, "https://a:6443");
    assert_eq!(source.origin.to_string(), "Cluster fleet/a");
}

#[test]
fn access_survives_status_regression_but_not_new_uid() {
    let mut fixture = ClusterFixture::default();
    let good = kubeconfig("https://a:6443");
    fixture
        .cluster("u", true)
        .secret(secret("1", &[("value", &good)]))
        .read();
    assert!(fixture.cluster("u", false).read().access.is_ok());
    assert!(fixture.read().access.is_ok(), "for good");
    assert!(fixture.cluster("v", false).read().access.is_err());
}

#[test]
fn unchanged_object_and_secret_are_not_reread() {
    let mut fixture = ClusterFixture::default();
    let good = kubeconfig("https://a:6443");
    let first = fixture
        .cluster("u", true)
        .secret(secret("1", &[("value", &good)]))
        .read();
    assert!(Arc::ptr_eq(&first, &fixture.read()));
    let rotated = kubeconfig("https://b:6443");
    let next = fixture.secret(secret("2", &[("value", &rotated)])).read();
    assert_eq!(next.access.as_ref().unwrap().server, "https://b:6443");
}

#[test]
fn paused_secret_suspends_its_cluster() {
    let kamaji = Kamaji {
        key: "admin.conf".to_owned(),
        generator: None,
    };
    let status = json!({"status": {
        "kubernetesResources": {"version": {"status": "Ready"}},
        "kubeconfig": {"admin": {"secretName": "a-kubeconfig"}},
    }});
    let plane = ClusterObject::new(&object("a", &[], status), &kamaji);
    let objects = [(key("a"), plane)].into();
    let good = kubeconfig("https://a:6443");
    let mut pairs = BTreeMap::new();
    let mut read = |version: &str, annotations: &[&str]| {
        let annotations = annotations.iter();
        let annotations = annotations.map(|key| ((*key).to_owned(), String::new()));
        let mut secret = secret(version, &[("admin.conf", &good)]);
        secret.metadata.annotations = Some(annotations.collect());
        let secrets = [(key("a-kubeconfig"), secret)].into();
        pairs = read_pairs(&kamaji, &Policy::default(), &objects, &secrets, &pairs);
        Arc::clone(&pairs[&key("a")].source)
    };
    assert_eq!(read("1", &[]).suspended, None);
    let paused = read("2", &["kamaji.clastix.io/paused"]);
    let reason = paused.suspended.as_deref().unwrap();
    assert!(
        reason.contains("TenantControlPlane fleet/a is paused"),
        "{reason}"
    );
    assert!(reason.contains("on its Secret"), "{reason}");
    assert!(paused.access.is_ok());
    assert_eq!(read("3", &[]).suspended, None);
}

#[test]
fn annotation_overrides_member_name() {
    let mut renamed = object("a", &[], Value::Null);
    let annotation = (names::MEMBER_NAME_ANNOTATION.to_owned(), "paris".to_owned());
    renamed.metadata.annotations = Some([annotation].into());
    let source = ClusterObject::new(&renamed, &ClusterApi).source;
    assert_eq!((source.member.as_str(), source.is_renamed), ("paris", true));
}
