//! Tests the provider with real processes and files, but without an API server. The tests set the listed
//! objects.

use std::time::Duration;

use krypton_runtime::watch::store::Store;
use krypton_types::conditions::reason;
use kube::runtime::watcher::Event;
use serde_json::json;

use super::provider_file::{AccessProvider, ApiVersion, ArgsPolicy, EnvsPolicy, Exec};
use super::*;
use crate::discovery::testkit::{Given, listing};
use crate::discovery::{Found, Listing, membership};

/// A fake program that answers with the content of `$ANSWER` and counts its runs.
const ANSWERS: &str = r#"
echo x >> "$COUNT"
printf '{"kind": "ExecCredential", "apiVersion": "client.authentication.k8s.io/v1", "status": %s}' "$(cat "$ANSWER")""#;

struct Stage {
    folder: tempfile::TempDir,
    access: Arc<Access>,
    file: watch::Sender<Option<Arc<ProviderFile>>>,
    listed: Store<Profile>,
    members: Members,
}

impl Stage {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let (file, rx) = watch::channel(None);
        let limits = Limits {
            deadline: Duration::from_secs(20),
            ..Limits::default()
        };
        let access = Access::new(rx, folder.path(), Policy::default(), limits).unwrap();
        let mut stage = Self {
            folder,
            access,
            file,
            listed: Store::default(),
            members: Members::default(),
        };
        stage
            .listed
            .apply(Event::<DynamicObject>::InitDone, |_| None);
        stage.fakes(&[("a", ANSWERS)]);
        stage.answer(&json!({"token": "one"}));
        stage
    }

    fn fakes(&mut self, fakes: &[(&str, &str)]) {
        let path = |name: &str| self.folder.path().join(name).to_str().unwrap().to_owned();
        let provider = |(name, script): &(&str, &str)| AccessProvider {
            name: (*name).to_owned(),
            exec: Exec {
                api_version: ApiVersion::V1,
                command: "/bin/sh".to_owned(),
                args: vec!["-c".to_owned(), (*script).to_owned(), "fake".to_owned()],
                env: vec![
                    ("ANSWER".to_owned(), path("answer")),
                    ("COUNT".to_owned(), path("count")),
                ],
                provide_cluster_info: true,
            },
            args: ArgsPolicy::Append,
            envs: EnvsPolicy::Replace,
        };
        let providers = fakes.iter().map(provider).collect();
        self.file
            .send_replace(Some(Arc::new(ProviderFile { providers })));
        self.follow();
    }

    fn answer(&self, status: &Value) {
        std::fs::write(self.folder.path().join("answer"), status.to_string()).unwrap();
    }

    /// Number of runs of the fake program.
    fn runs(&self) -> usize {
        std::fs::read(self.folder.path().join("count")).map_or(0, |count| count.len() / 2)
    }

    fn follow(&mut self) -> bool {
        let known = self.listed.known().unwrap();
        self.members
            .follow(known, self.file.get(), &Policy::default())
    }

    fn apply(&mut self, name: &str, status: Value) -> bool {
        let object = profile::object(name, status);
        self.listed
            .apply(Event::Apply(object), |object| Profile::read(&object));
        self.follow()
    }

    /// Performs all due work.
    async fn settle(&mut self) {
        loop {
            self.members.start_due_work(&self.access, BootTime::now());
            let Some(ended) = self.members.runs.join_next().await else {
                return;
            };
            let (key, plan, answer) = ended.unwrap();
            self.members.run_ended(&self.access, &key, &plan, answer);
        }
    }

    /// Lists the profile edge-1 and performs all due work.
    async fn settled_edge_1(&mut self) {
        self.apply("edge-1", ready(json!({"server": "https://edge-1"})));
        self.settle().await;
    }

    fn source(&mut self, name: &str) -> Arc<Source> {
        let sources = self.members.sources(BootTime::now());
        let found = sources.values().find(|source| source.origin.name == name);
        Arc::clone(found.unwrap())
    }

    fn reason(&mut self, name: &str) -> &'static str {
        let source = self.source(name);
        match (&source.access, &source.stale) {
            (Ok(_), None) => "ok",
            (Ok(_), Some(stale)) => stale.reason,
            (Err(why), _) => why.reason,
        }
    }

    /// Ends the pauses between runs.
    fn later(&mut self) {
        for held in self.members.held.values_mut() {
            held.rested();
        }
    }
}

fn ready(cluster: Value) -> Value {
    json!({
        "conditions": [{"type": "ControlPlaneHealthy", "status": "True"}],
        "accessProviders": [{"name": "a", "cluster": cluster}],
    })
}

fn token_in(source: &Source) -> String {
    let access = source.access.as_ref().unwrap();
    let document: Value = serde_json::from_str(&access.yaml).unwrap();
    let path = document["users"][0]["user"]["tokenFile"].as_str().unwrap();
    std::fs::read_to_string(path).unwrap()
}

#[tokio::test]
async fn refreshed_token_keeps_file_and_kubeconfig() {
    let mut stage = Stage::new();
    stage.apply(
        "edge-1",
        ready(json!({"server": "https://edge-1:6443", "tls-server-name": "other"})),
    );
    assert_eq!(stage.reason("edge-1"), reason::STARTING);
    stage.settle().await;
    let before = stage.source("edge-1");
    assert_eq!(token_in(&before), "one");
    let access = before.access.as_ref().unwrap();
    assert_eq!(access.server, "https://edge-1:6443");
    assert!(access.yaml.contains("\"tls-server-name\":\"other\""));
    assert!(!access.yaml.contains("one"));

    stage.answer(&json!({"token": "two"}));
    assert!(stage.members.doubt(&before.origin, BootTime::now()));
    stage.later();
    stage.settle().await;
    let after = stage.source("edge-1");
    assert_eq!(token_in(&after), "two");
    assert_eq!(*after, *before);
    assert_eq!(stage.runs(), 2);
}

#[tokio::test]
async fn irrelevant_profile_event_runs_no_plugin() {
    let mut stage = Stage::new();
    let mut status = ready(json!({"server": "https://edge-1"}));
    assert!(stage.apply("edge-1", status.clone()));
    stage.settle().await;
    let before = stage.source("edge-1");
    status["version"] = json!({"kubernetes": "v9"});
    status["properties"] = json!([{"name": "x", "value": "y"}]);
    assert!(!stage.apply("edge-1", status.clone()));
    stage.later();
    stage.settle().await;
    // The provider file gets a second program, which this profile doesn't use.
    stage.fakes(&[("a", ANSWERS), ("b", "exit 1")]);
    stage.settle().await;
    assert_eq!(stage.runs(), 1);
    assert_eq!(*stage.source("edge-1"), *before);
}

#[tokio::test]
async fn new_client_certificate_changes_kubeconfig_digest() {
    let certificate = || {
        let key = rcgen::KeyPair::generate().unwrap();
        let params = rcgen::CertificateParams::new(Vec::new()).unwrap();
        let pem = params.self_signed(&key).unwrap().pem();
        json!({"clientCertificateData": pem, "clientKeyData": key.serialize_pem()})
    };
    let mut stage = Stage::new();
    stage.answer(&certificate());
    stage.settled_edge_1().await;
    let before = stage.source("edge-1").access.clone().unwrap();
    assert!(before.yaml.contains("client-key-data"));
    stage.answer(&certificate());
    let origin = stage.source("edge-1").origin.clone();
    stage.members.doubt(&origin, BootTime::now());
    stage.later();
    stage.settle().await;
    let after = stage.source("edge-1").access.clone().unwrap();
    assert_ne!(after.digest, before.digest);
}

#[tokio::test]
async fn profiles_with_different_arguments_share_no_credentials() {
    let mut stage = Stage::new();
    let script = r#"printf '{"kind": "ExecCredential", "apiVersion": "client.authentication.k8s.io/v1", "status": {"token": "%s-%s"}}' "$*" "$MINE""#;
    stage.fakes(&[("a", script)]);
    for name in ["one", "two"] {
        let extensions = json!([
            {"name": "clusterprofiles.multicluster.x-k8s.io/exec/additional-args", "extension": [name]},
            {"name": "clusterprofiles.multicluster.x-k8s.io/exec/additional-envs", "extension": {"MINE": name}},
        ]);
        let server = format!("https://{name}");
        stage.apply(
            name,
            ready(json!({"server": server, "extensions": extensions})),
        );
    }
    stage.settle().await;
    for name in ["one", "two"] {
        assert_eq!(token_in(&stage.source(name)), format!("{name}-{name}"));
    }
}

#[tokio::test]
async fn plugin_failure_is_stale_only_after_earlier_success() {
    let mut stage = Stage::new();
    stage.fakes(&[("a", "echo the vault is sealed >&2; exit 1")]);
    stage.settled_edge_1().await;
    assert_eq!(stage.reason("edge-1"), "AccessProviderFailed");
    let why = stage.source("edge-1").access.clone().unwrap_err().message;
    assert!(why.contains("ClusterProfile fleet/edge-1"), "{why}");
    assert!(why.contains("the vault is sealed"), "{why}");

    stage.fakes(&[("a", ANSWERS)]);
    stage.later();
    stage.settle().await;
    assert_eq!(stage.reason("edge-1"), "ok");
    let good = stage.source("edge-1").access.clone().unwrap();

    for broken in ["echo the vault is sealed >&2; exit 1", "echo no JSON"] {
        stage.fakes(&[("a", broken)]);
        stage.later();
        stage.settle().await;
        assert_eq!(stage.reason("edge-1"), "RemoteClusterStale");
        assert_eq!(stage.source("edge-1").access.clone().unwrap(), good);
    }
    stage.fakes(&[]);
    assert_eq!(stage.reason("edge-1"), "RemoteClusterStale");
    assert_eq!(token_in(&stage.source("edge-1")), "one");
}

#[tokio::test]
async fn expired_credential_is_ignored() {
    let mut stage = Stage::new();
    stage.answer(&json!({"token": "one", "expirationTimestamp": "2001-01-01T00:00:00Z"}));
    stage.settled_edge_1().await;
    let why = stage.source("edge-1").access.clone().unwrap_err();
    assert_eq!(why.reason, "AccessProviderFailed");
    assert!(why.message.contains("expired"), "{why:?}");
}

#[tokio::test]
async fn deleted_profile_removes_token_and_recreated_one_restarts() {
    let mut stage = Stage::new();
    stage.settled_edge_1().await;
    let source = stage.source("edge-1");
    let folder = stage.folder.path().join("cluster-profiles");
    let files = || std::fs::read_dir(&folder).unwrap().count();
    assert_eq!(files(), 1);
    drop(source);
    let object = profile::object("edge-1", Value::Null);
    stage.listed.apply(Event::Delete(object), |_| None);
    assert!(stage.follow());
    assert!(stage.members.sources(BootTime::now()).is_empty());
    assert_eq!(files(), 0);
    stage.apply("edge-1", ready(json!({"server": "https://edge-1"})));
    assert_eq!(stage.reason("edge-1"), reason::STARTING);
}

/// The hub's decision about a member that is bound to ClusterProfile fleet/edge-1.
fn decided(listing: Listing, covered: bool) -> membership::Membership {
    let namespace = if covered { "fleet" } else { "elsewhere" };
    let found = Found::new(Arc::new(Given(Some(namespace))), listing);
    let origin = Origin {
        kind: Kind::ClusterProfile,
        namespace: Some("fleet".to_owned()),
        name: "edge-1".to_owned(),
    };
    let bound = [("edge-1".to_owned(), Some(origin.source_ref()))].into();
    let before = membership::Before {
        bound: &bound,
        dismissed: &Default::default(),
        patient: false,
    };
    membership::membership(&[&found], before)
}

#[test]
fn missing_or_unseen_profile_shows_its_reason() {
    let gone = decided(listing([]), true);
    assert_eq!(gone.gone["edge-1"].reason, "ClusterProfileNotFound");
    let elsewhere = &decided(listing([]), false).gone["edge-1"];
    assert_eq!(elsewhere.reason, "AccessProviderNotConfigured");
    let trouble = Listing {
        trouble: Some("the cluster has no ClusterProfiles".to_owned()),
        ..Listing::default()
    };
    let trouble = &decided(trouble, true).unseen["edge-1"];
    assert_eq!(trouble.reason, "ClusterProfileUnavailable");
    let closed = Listing {
        closed: true,
        ..Listing::default()
    };
    let closed = &decided(closed, true).unseen["edge-1"];
    assert_eq!(closed.reason, "ClusterProviderClosed");
}

#[tokio::test]
async fn profile_awaiting_first_credential_shows_starting() {
    let mut stage = Stage::new();
    stage.apply("edge-1", ready(json!({"server": "https://edge-1"})));
    let starting = decided(listing([(*stage.source("edge-1")).clone()]), true);
    assert_eq!(starting.unseen["edge-1"].reason, reason::STARTING);
    assert!(starting.gone.is_empty() && starting.members.is_empty());
    stage.settle().await;
    let there = decided(listing([(*stage.source("edge-1")).clone()]), true);
    assert!(there.members.contains_key("edge-1"));
    assert!(there.gone.is_empty() && there.unseen.is_empty());
}
