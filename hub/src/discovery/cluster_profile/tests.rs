//! Tests the provider with real processes and files, but without an API server. The tests set the listed
//! objects.

use krypton_runtime::watch::store::Store;
use krypton_types::conditions::reason;
use kube::runtime::watcher::Event;
use serde_json::json;

use super::provider_file::{AccessProvider, ApiVersion, ArgsPolicy, EnvsPolicy, Exec};
use super::*;
use crate::discovery::testkit::{FixedProvider, listing};
use crate::discovery::{Listing, RunningProvider, membership};

/// A fake program that answers with the content of `$ANSWER` and counts its runs.
const ANSWERS: &str = r#"
echo x >> "$COUNT"
printf '{"kind": "ExecCredential", "apiVersion": "client.authentication.k8s.io/v1", "status": %s}' "$(cat "$ANSWER")""#;

struct Fixture {
    folder: tempfile::TempDir,
    access: Arc<ProfileAccess>,
    file: watch::Sender<Option<Arc<ProviderFile>>>,
    listed: Store<Profile>,
    states: ProfileStates,
}

impl Fixture {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let (file, rx) = watch::channel(None);
        let access = ProfileAccess::new(rx, folder.path(), Policy::default()).unwrap();
        let mut fixture = Self {
            folder,
            access,
            file,
            listed: Store::default(),
            states: ProfileStates::default(),
        };
        fixture
            .listed
            .apply(Event::<DynamicObject>::InitDone, |_| None);
        fixture.set_programs(&[("a", ANSWERS)]);
        fixture.set_answer(&json!({"token": "one"}));
        fixture
    }

    fn set_programs(&mut self, programs: &[(&str, &str)]) {
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
        let providers = programs.iter().map(provider).collect();
        self.file
            .send_replace(Some(Arc::new(ProviderFile { providers })));
        self.follow();
    }

    fn set_answer(&self, status: &Value) {
        std::fs::write(self.folder.path().join("answer"), status.to_string()).unwrap();
    }

    /// Number of runs of the fake program.
    fn runs(&self) -> usize {
        std::fs::read(self.folder.path().join("count")).map_or(0, |count| count.len() / 2)
    }

    fn follow(&mut self) {
        let known = self.listed.known().unwrap();
        self.states
            .follow(known, self.file.get(), &Policy::default());
    }

    fn apply(&mut self, name: &str, status: Value) {
        let object = profile::object(name, status);
        self.listed
            .apply(Event::Apply(object), |object| Profile::read(&object));
        self.follow();
    }

    /// Performs all due work.
    async fn finish_due_work(&mut self) {
        loop {
            self.states.start_due_work(&self.access, BootTime::now());
            let Some(finished) = self.states.runs.join_next().await else {
                return;
            };
            let (key, plan, credential) = finished.unwrap();
            self.states
                .finish_run(&self.access, &key, &plan, credential);
        }
    }

    /// Lists the profile edge-1 and performs all due work.
    async fn list_edge_1(&mut self) {
        self.apply("edge-1", ready(json!({"server": "https://edge-1"})));
        self.finish_due_work().await;
    }

    fn source(&mut self, name: &str) -> Arc<Source> {
        let sources = self.states.sources(BootTime::now());
        let source = sources.values().find(|source| source.origin.name == name);
        Arc::clone(source.unwrap())
    }

    fn reason(&mut self, name: &str) -> &'static str {
        let source = self.source(name);
        match (&source.access, &source.stale) {
            (Ok(_), None) => "ok",
            (Ok(_), Some(stale)) => stale.reason,
            (Err(problem), _) => problem.reason,
        }
    }

    /// Ends the pauses between runs, and performs all work that is then due.
    async fn finish_without_pauses(&mut self) {
        for state in self.states.states.values_mut() {
            state.end_pauses();
        }
        self.finish_due_work().await;
    }
}

fn ready(cluster: Value) -> Value {
    json!({
        "conditions": [{"type": "ControlPlaneHealthy", "status": "True"}],
        "accessProviders": [{"name": "a", "cluster": cluster}],
    })
}

fn token_of(source: &Source) -> String {
    let access = source.access.as_ref().unwrap();
    let document: Value = serde_json::from_str(&access.yaml).unwrap();
    let path = document["users"][0]["user"]["tokenFile"].as_str().unwrap();
    std::fs::read_to_string(path).unwrap()
}

#[tokio::test]
async fn refreshed_token_keeps_file_and_kubeconfig() {
    let mut fixture = Fixture::new();
    fixture.apply(
        "edge-1",
        ready(json!({"server": "https://edge-1:6443", "tls-server-name": "other"})),
    );
    assert_eq!(fixture.reason("edge-1"), reason::STARTING);
    fixture.finish_due_work().await;
    let before = fixture.source("edge-1");
    assert_eq!(token_of(&before), "one");
    let access = before.access.as_ref().unwrap();
    assert_eq!(access.server, "https://edge-1:6443");
    assert!(access.yaml.contains("\"tls-server-name\":\"other\""));
    assert!(!access.yaml.contains("one"));

    fixture.set_answer(&json!({"token": "two"}));
    assert!(
        fixture
            .states
            .credential_rejected(&before.origin, BootTime::now())
    );
    fixture.finish_without_pauses().await;
    let after = fixture.source("edge-1");
    assert_eq!(token_of(&after), "two");
    assert_eq!(*after, *before);
    assert_eq!(fixture.runs(), 2);
}

#[tokio::test]
async fn irrelevant_profile_event_runs_no_plugin() {
    let mut fixture = Fixture::new();
    let mut status = ready(json!({"server": "https://edge-1"}));
    fixture.apply("edge-1", status.clone());
    fixture.finish_due_work().await;
    let before = fixture.source("edge-1");
    status["version"] = json!({"kubernetes": "v9"});
    status["properties"] = json!([{"name": "x", "value": "y"}]);
    fixture.apply("edge-1", status);
    fixture.finish_without_pauses().await;
    // The provider file gets a second program, which this profile doesn't use.
    fixture.set_programs(&[("a", ANSWERS), ("b", "exit 1")]);
    fixture.finish_due_work().await;
    assert_eq!(fixture.runs(), 1);
    assert_eq!(*fixture.source("edge-1"), *before);
}

#[tokio::test]
async fn new_client_certificate_changes_kubeconfig_digest() {
    let certificate = || {
        let key = rcgen::KeyPair::generate().unwrap();
        let params = rcgen::CertificateParams::new(Vec::new()).unwrap();
        let pem = params.self_signed(&key).unwrap().pem();
        json!({"clientCertificateData": pem, "clientKeyData": key.serialize_pem()})
    };
    let mut fixture = Fixture::new();
    fixture.set_answer(&certificate());
    fixture.list_edge_1().await;
    let before = fixture.source("edge-1").access.clone().unwrap();
    assert!(before.yaml.contains("client-key-data"));
    fixture.set_answer(&certificate());
    let origin = fixture.source("edge-1").origin.clone();
    fixture.states.credential_rejected(&origin, BootTime::now());
    fixture.finish_without_pauses().await;
    let after = fixture.source("edge-1").access.clone().unwrap();
    assert_ne!(after.digest, before.digest);
}

#[tokio::test]
async fn profiles_with_different_arguments_share_no_credentials() {
    let mut fixture = Fixture::new();
    let script = r#"printf '{"kind": "ExecCredential", "apiVersion": "client.authentication.k8s.io/v1", "status": {"token": "%s-%s"}}' "$*" "$MINE""#;
    fixture.set_programs(&[("a", script)]);
    for name in ["one", "two"] {
        let extensions = json!([
            {"name": "clusterprofiles.multicluster.x-k8s.io/exec/additional-args", "extension": [name]},
            {"name": "clusterprofiles.multicluster.x-k8s.io/exec/additional-envs", "extension": {"MINE": name}},
        ]);
        let server = format!("https://{name}");
        fixture.apply(
            name,
            ready(json!({"server": server, "extensions": extensions})),
        );
    }
    fixture.finish_due_work().await;
    for name in ["one", "two"] {
        assert_eq!(token_of(&fixture.source(name)), format!("{name}-{name}"));
    }
}

#[tokio::test]
async fn plugin_failure_is_stale_only_after_earlier_success() {
    let mut fixture = Fixture::new();
    fixture.set_programs(&[("a", "echo the vault is sealed >&2; exit 1")]);
    fixture.list_edge_1().await;
    assert_eq!(fixture.reason("edge-1"), "AccessProviderFailed");
    let problem = fixture.source("edge-1").access.clone().unwrap_err().message;
    assert!(problem.contains("ClusterProfile fleet/edge-1"), "{problem}");
    assert!(problem.contains("the vault is sealed"), "{problem}");

    fixture.set_programs(&[("a", ANSWERS)]);
    fixture.finish_without_pauses().await;
    assert_eq!(fixture.reason("edge-1"), "ok");
    let good = fixture.source("edge-1").access.clone().unwrap();

    for broken in ["echo the vault is sealed >&2; exit 1", "echo no JSON"] {
        fixture.set_programs(&[("a", broken)]);
        fixture.finish_without_pauses().await;
        assert_eq!(fixture.reason("edge-1"), "RemoteClusterStale");
        assert_eq!(fixture.source("edge-1").access.clone().unwrap(), good);
    }
    fixture.set_programs(&[]);
    assert_eq!(fixture.reason("edge-1"), "RemoteClusterStale");
    assert_eq!(token_of(&fixture.source("edge-1")), "one");
}

#[tokio::test]
async fn expired_credential_is_ignored() {
    let mut fixture = Fixture::new();
    fixture.set_answer(&json!({"token": "one", "expirationTimestamp": "2001-01-01T00:00:00Z"}));
    fixture.list_edge_1().await;
    let problem = fixture.source("edge-1").access.clone().unwrap_err();
    assert_eq!(problem.reason, "AccessProviderFailed");
    assert!(problem.message.contains("expired"), "{problem:?}");
}

#[tokio::test]
async fn deleted_profile_removes_token_and_recreated_one_restarts() {
    let mut fixture = Fixture::new();
    fixture.list_edge_1().await;
    let source = fixture.source("edge-1");
    let folder = fixture.folder.path().join("cluster-profiles");
    let files = || std::fs::read_dir(&folder).unwrap().count();
    assert_eq!(files(), 1);
    drop(source);
    let object = profile::object("edge-1", Value::Null);
    fixture.listed.apply(Event::Delete(object), |_| None);
    fixture.follow();
    assert!(fixture.states.sources(BootTime::now()).is_empty());
    assert_eq!(files(), 0);
    fixture.apply("edge-1", ready(json!({"server": "https://edge-1"})));
    assert_eq!(fixture.reason("edge-1"), reason::STARTING);
}

/// The hub's decision about a member that is bound to ClusterProfile fleet/edge-1.
fn decide(listing: Listing, covered: bool) -> membership::Membership {
    let namespace = if covered { "fleet" } else { "elsewhere" };
    let running = RunningProvider::new(Arc::new(FixedProvider(Some(namespace))), listing);
    let origin = Origin {
        kind: SourceKind::ClusterProfile,
        namespace: Some("fleet".to_owned()),
        name: "edge-1".to_owned(),
    };
    let bound = [("edge-1".to_owned(), Some(origin.source_ref()))].into();
    let input = membership::BindingInput {
        bound: &bound,
        dismissed: &Default::default(),
        in_startup_grace: false,
    };
    membership::bind_sources(&[&running], input)
}

#[test]
fn missing_or_unseen_profile_shows_its_reason() {
    let gone = decide(listing([]), true);
    assert_eq!(gone.gone["edge-1"].reason, "ClusterProfileNotFound");
    let elsewhere = &decide(listing([]), false).gone["edge-1"];
    assert_eq!(elsewhere.reason, "AccessProviderNotConfigured");
    let trouble = Listing {
        trouble: Some("the cluster has no ClusterProfiles".to_owned()),
        ..Listing::default()
    };
    let trouble = &decide(trouble, true).unseen["edge-1"];
    assert_eq!(trouble.reason, "ClusterProfileUnavailable");
    let closed = Listing {
        closed: true,
        ..Listing::default()
    };
    let closed = &decide(closed, true).unseen["edge-1"];
    assert_eq!(closed.reason, "ClusterProviderClosed");
}

#[tokio::test]
async fn profile_awaiting_first_credential_shows_starting() {
    let mut fixture = Fixture::new();
    fixture.apply("edge-1", ready(json!({"server": "https://edge-1"})));
    let starting = decide(listing([(*fixture.source("edge-1")).clone()]), true);
    assert_eq!(starting.unseen["edge-1"].reason, reason::STARTING);
    assert!(starting.gone.is_empty() && starting.members.is_empty());
    fixture.finish_due_work().await;
    let there = decide(listing([(*fixture.source("edge-1")).clone()]), true);
    assert!(there.members.contains_key("edge-1"));
    assert!(there.gone.is_empty() && there.unseen.is_empty());
}
