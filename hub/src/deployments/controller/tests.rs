use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use krypton_crds::edge_cluster::EdgeClusterStatus;
use krypton_crds::krypton_deployment::{DeploymentPhase, KryptonDeploymentStatus};
use krypton_crds::tenant::HistoryEntry;
use krypton_runtime::newest::Newest as _;
use krypton_types::conditions::{ClusterState, State, Truth, reason};
use krypton_types::deployment::{DeploymentReport, ReportedRevision, ReportedRevisions};
use krypton_types::names;
use kube::Config as KubeConfig;
use kube::runtime::watcher::{self, Event};

use super::watch_events::{ListErrorLog, list_error_log};
use super::*;
use crate::discovery::named_secrets::{SecretName, SecretState};
use crate::notify::Notifier;

struct ControllerFixture {
    controller: DeploymentController,
    store: DeploymentStore,
    secret_references: watch::Receiver<SecretReferences>,
}

fn fixture() -> ControllerFixture {
    let nowhere = KubeConfig::new("http://127.0.0.1:1".parse().unwrap());
    let (secret_references, secret_references_rx) = watch::channel(None);
    let controller = DeploymentController {
        client: Client::try_from(nowhere).unwrap(),
        deployments: Arc::default(),
        members: Arc::default(),
        notices: HomeEvents::discarding(),
        secret_references,
        secret_states: watch::channel(Arc::default()).1,
        namespaces: None,
        discovery_namespace: "fleet".to_owned(),
        open_namespaces: ["fleet".to_owned()].into(),
        check_interval: Duration::from_secs(60),
        writes: HomeWrites::default(),
        reports: Arc::default(),
    };
    ControllerFixture {
        controller,
        store: DeploymentStore::default(),
        secret_references: secret_references_rx,
    }
}

fn object(name: &str, region: serde_json::Value) -> KryptonDeployment {
    let spec = serde_json::json!({"account": {"name": "a"}, "region": region});
    let mut object = KryptonDeployment::new(name, serde_json::from_value(spec).unwrap());
    object.metadata.namespace = Some("accounts".to_owned());
    object.metadata.uid = Some(format!("uid-of-{name}"));
    object.metadata.finalizers = Some(vec![names::DEPLOYMENT_FINALIZER.to_owned()]);
    object
}

fn placed_object(name: &str, region: serde_json::Value, key: Option<&str>) -> KryptonDeployment {
    let mut object = object(name, region);
    let placements = vec![Placement {
        cluster: "edge-1".to_owned(),
        cluster_uid: "uid-of-edge-1".to_owned(),
        key: key.map(str::to_owned),
        removing: false,
    }];
    object.status = Some(KryptonDeploymentStatus {
        placements: Some(placements),
        ..KryptonDeploymentStatus::default()
    });
    object
}

fn secret_name(namespace: &str, name: &str) -> SecretName {
    SecretName {
        namespace: namespace.to_owned(),
        name: name.to_owned(),
    }
}

fn member(name: &str) -> EdgeCluster {
    let source =
        serde_json::json!({"sourceRef": {"kind": "Secret", "namespace": "fleet", "name": name}});
    let mut member = EdgeCluster::new(name, serde_json::from_value(source).unwrap());
    member.status = Some(EdgeClusterStatus {
        cluster_uid: Some(format!("uid-of-{name}")),
        ..EdgeClusterStatus::default()
    });
    member
}

impl ControllerFixture {
    fn apply_event(&mut self, event: Event<DeserializeGuard<KryptonDeployment>>) {
        self.store.apply_event(Ok(event), &self.controller);
    }

    fn list_objects(&mut self, objects: impl IntoIterator<Item = KryptonDeployment>) {
        self.apply_event(Event::Init);
        for object in objects {
            self.apply_event(Event::InitApply(DeserializeGuard(Ok(object))));
        }
        self.apply_event(Event::InitDone);
    }

    fn list_members(&mut self, names: &[&str]) {
        self.store.apply_member_event(Ok(Event::Init));
        for name in names {
            self.store
                .apply_member_event(Ok(Event::InitApply(member(name))));
        }
        self.store.apply_member_event(Ok(Event::InitDone));
    }

    fn list_fails(&mut self, code: u16) -> bool {
        let status = kube::core::Status::failure("no", "NotFound").with_code(code);
        let error = watcher::Error::InitialListFailed(kube::Error::Api(Box::new(status)));
        self.store.apply_event(Err(error), &self.controller)
    }

    fn decide(&mut self) {
        self.store
            .decide(&self.controller, &SecretStates::default(), None);
    }

    fn ordered(&self) -> Option<Vec<String>> {
        let orders = self.controller.deployments.orders();
        let orders = orders.get();
        let orders = orders.as_ref()?.iter();
        Some(
            orders
                .flat_map(|(member, list)| {
                    list.iter().map(move |it| format!("{member}: {}", it.name))
                })
                .collect(),
        )
    }
}

#[tokio::test]
async fn deployment_shows_only_charts_given_by_hub() {
    let mut fixture = fixture();
    let region = serde_json::json!({"name": "paris", "kubeconfigSecretName": "edge-1"});
    fixture.list_objects([placed_object("acme", region, None)]);
    fixture.list_members(&["edge-1"]);
    let secret = secret_name("fleet", "edge-1");
    let present = SecretState::Present {
        member: "edge-1".to_owned(),
        open: true,
    };
    let secret_states: SecretStates = Arc::new([(secret, present)].into());
    let key = DeploymentKey::new("accounts", "acme");
    let reports = &fixture.controller.reports;
    reports.set_desired_chart("edge-1", "r/c:1");
    for (reported, shown) in [("https://elsewhere/c:1", None), ("r/c:1", Some("r/c:1"))] {
        let report = DeploymentReport {
            uid: "uid-of-acme".to_owned(),
            observed_generation: 0,
            gone: false,
            applied_chart: reported.to_owned(),
            state: ClusterState::from(State::new(Truth::True, reason::INSTALLED, "")),
            next: None,
            handled_request: None,
            events: Vec::new(),
            revisions: None,
        };
        let changes = [(key.clone(), Some(report))].into();
        fixture.controller.deployments.apply("edge-1", changes);
        let decisions = fixture
            .store
            .decide(&fixture.controller, &secret_states, None);
        let status = &decisions[0].1.status;
        assert_eq!(status.last_applied_chart.as_deref(), shown, "{reported}");
    }
}

#[tokio::test]
async fn decided_phase_is_notified() {
    let leader = Leader::always_leading();
    let (notifier, next_change) = Notifier::recording(leader.clone());
    let mut fixture = fixture();
    fixture.controller.notices = HomeEvents::discarding().with_notifier(notifier);
    let region = serde_json::json!({"name": "paris"});
    fixture.list_objects([placed_object("acme", region, None)]);
    fixture.list_members(&["edge-1"]);
    let mut requests = Requests::default();
    for phase in [DeploymentPhase::Ready, DeploymentPhase::Error] {
        let ControllerFixture {
            controller, store, ..
        } = &mut fixture;
        let mut decisions = store.decide(controller, &SecretStates::default(), None);
        decisions[0].1.status.phase = Some(phase);
        let shared = (&*controller, &leader);
        requests.start(store, decisions, shared, (true, None), BootTime::now());
    }
    let expected = "KryptonDeployment: Ready -> Error";
    assert_eq!(next_change().as_deref(), Some(expected));
}

#[tokio::test]
async fn written_status_is_forgotten_once_stored() {
    let mut fixture = fixture();
    let region = serde_json::json!({"name": "paris"});
    let object = placed_object("acme", region, None);
    let key = DeploymentKey::new("accounts", "acme");
    let written = || KryptonDeploymentStatus {
        history: vec![HistoryEntry::default()],
        ..KryptonDeploymentStatus::default()
    };
    fixture.list_objects([object.clone()]);
    let dropped = KryptonDeploymentStatus::default;
    for (stored, outcome, is_kept) in [
        (Some(dropped()), Some(WriteOutcome::Ok), true),
        // Another write came first.
        (Some(dropped()), None, false),
        (Some(written()), Some(WriteOutcome::Ok), false),
        (None, Some(WriteOutcome::Failed), false),
    ] {
        let entry = fixture.store.entries.get_mut(&key).unwrap();
        entry.written = Some(Box::new(written()));
        let result = DeploymentWriteResult {
            previous_version: None,
            object: stored.map(|status| KryptonDeployment {
                status: Some(status),
                ..object.clone()
            }),
            is_crd_outdated: false,
            events: Vec::new(),
            outcome,
        };
        let controller = &fixture.controller;
        fixture.store.write_ended(&key, Ok(result), controller);
        assert_eq!(fixture.store.entries[&key].written.is_some(), is_kept);
    }
    // A relist may follow an upgrade of the CRD.
    let entry = fixture.store.entries.get_mut(&key).unwrap();
    entry.written = Some(Box::new(written()));
    fixture.list_objects([object]);
    assert!(fixture.store.entries[&key].written.is_none());
}

#[tokio::test]
async fn unchanged_history_is_not_derived_again() {
    let mut fixture = fixture();
    let region = serde_json::json!({"name": "paris", "kubeconfigSecretName": "edge-1"});
    fixture.list_objects([placed_object("acme", region, None)]);
    fixture.list_members(&["edge-1"]);
    let key = DeploymentKey::new("accounts", "acme");
    let report = |revisions: u32| {
        let revision = |revision| ReportedRevision {
            revision,
            ..ReportedRevision::default()
        };
        let revisions = ReportedRevisions::new("agent", (0..revisions).map(revision).collect());
        DeploymentReport {
            uid: "uid-of-acme".to_owned(),
            observed_generation: 0,
            gone: false,
            applied_chart: String::new(),
            state: ClusterState::from(State::new(Truth::True, reason::INSTALLED, "")),
            next: None,
            handled_request: None,
            events: Vec::new(),
            revisions: Some(Arc::new(revisions)),
        }
    };
    for (revisions, is_settled) in [(0, true), (1, false), (1, true), (2, false), (2, true)] {
        let changes = [(key.clone(), Some(report(revisions)))].into();
        fixture.controller.deployments.apply("edge-1", changes);
        let states = SecretStates::default();
        let decisions = fixture.store.decide(&fixture.controller, &states, None);
        let history = decisions[0].1.status.history.clone();
        assert_eq!(history.len(), revisions as usize);
        let entry = fixture.store.entries.get_mut(&key).unwrap();
        let settled = entry.settled_history.as_ref();
        let is_same = settled.is_some_and(|(object, _)| Arc::ptr_eq(object, &entry.object));
        assert_eq!(is_same, is_settled, "{revisions}");
        // The home cluster stores the status.
        let mut object = KryptonDeployment::clone(&entry.object);
        object.status.get_or_insert_default().history = history;
        entry.object = Arc::new(object);
    }
}

#[tokio::test]
async fn nothing_is_ordered_before_both_lists_are_complete() {
    let mut fixture = fixture();
    let placed = placed_object("acme", serde_json::json!({"name": "paris"}), None);
    fixture.apply_event(Event::Init);
    fixture.apply_event(Event::InitApply(DeserializeGuard(Ok(placed))));
    fixture.list_members(&["edge-1"]);
    fixture.decide();
    assert_eq!(fixture.ordered(), None);
    assert_eq!(fixture.secret_references.get(), None);
    fixture.apply_event(Event::InitDone);
    fixture.decide();
    assert_eq!(fixture.ordered().unwrap(), ["edge-1: acme"]);
    // A restarted list removes nothing until it is complete.
    fixture.apply_event(Event::Init);
    fixture.decide();
    assert_eq!(fixture.ordered().unwrap(), ["edge-1: acme"]);
    fixture.apply_event(Event::InitDone);
    fixture.decide();
    assert!(fixture.ordered().unwrap().is_empty());
}

#[tokio::test]
async fn absent_kind_orders_nothing_but_keeps_known_orders() {
    let mut fixture = fixture();
    // Before the EdgeClusters are listed, home may just be unavailable.
    assert!(!fixture.list_fails(404));
    assert!(!fixture.list_fails(404));
    fixture.list_members(&["edge-1"]);
    assert!(!fixture.list_fails(500));
    assert!(!fixture.list_fails(404));
    fixture.decide();
    assert_eq!(fixture.ordered(), None);
    assert!(fixture.list_fails(403));
    fixture.decide();
    assert!(fixture.ordered().unwrap().is_empty());
    assert!(fixture.secret_references.get().as_ref().unwrap().is_empty());

    let region = serde_json::json!({"name": "paris"});
    fixture.list_objects([placed_object("acme", region, None)]);
    fixture.list_fails(404);
    fixture.list_fails(404);
    fixture.decide();
    assert_eq!(fixture.ordered().unwrap(), ["edge-1: acme"]);
}

#[tokio::test]
async fn recorded_secret_stays_named_after_spec_change() {
    let mut fixture = fixture();
    let region = |namespace: &str, key: &str| serde_json::json!({"name": "x", "kubeconfig": {"secret": {"namespace": namespace, "name": "new", "key": key}}});
    let mut elder = placed_object("elder", region("theirs", "admin.conf"), Some("value"));
    let created = |second| Some(Time(Timestamp::from_second(second).unwrap()));
    elder.metadata.creation_timestamp = created(1);
    let mut younger = object("younger", region("accounts", "other"));
    younger.metadata.creation_timestamp = created(2);
    let mut same_namespace = object("also", region("accounts", "admin.conf"));
    same_namespace.metadata.creation_timestamp = created(1);
    // An object that may not name the Secret does not determine its key.
    let mut outsider = object("stranger", region("victims", "another"));
    outsider.metadata.creation_timestamp = created(0);
    let mut victim = object("victim", region("victims", ""));
    victim.metadata.namespace = Some("victims".to_owned());
    fixture.list_members(&["edge-1"]);
    fixture.list_objects([elder, younger, same_namespace, outsider, victim]);
    fixture.decide();
    let secret_references = fixture.secret_references.get().unwrap();
    let reference = |namespace: &str, name: &str| {
        let reference = &secret_references[&secret_name(namespace, name)];
        (reference.key.clone().unwrap_or_default(), reference.trusted)
    };
    assert_eq!(reference("fleet", "edge-1"), ("value".to_owned(), true));
    assert_eq!(reference("theirs", "new"), ("admin.conf".to_owned(), false));
    assert_eq!(
        reference("accounts", "new"),
        ("admin.conf".to_owned(), true)
    );
    assert_eq!(reference("victims", "new"), (String::new(), true));
    assert_eq!(secret_references.len(), 4);
}

#[tokio::test]
async fn failed_writes_back_off() {
    let mut fixture = fixture();
    let region = serde_json::json!({"name": "paris"});
    fixture.list_objects([object("acme", region)]);
    let key = fixture.store.entries.keys().next().unwrap().clone();
    let mut pause_after = |outcome| {
        let start = BootTime::now();
        let result = DeploymentWriteResult {
            outcome: Some(outcome),
            ..DeploymentWriteResult::default()
        };
        let store = &mut fixture.store;
        home_writer::start(&mut store.queue, key.clone(), start);
        store.write_ended(&key, Ok(result), &fixture.controller);
        store.queue.not_before(&key).since(start)
    };
    for seconds in [1, 2, 4, 8, 16, 30, 30] {
        let seconds = Duration::from_secs(seconds);
        let pause = pause_after(WriteOutcome::Failed);
        let max = seconds + Duration::from_secs(1);
        assert!(
            (seconds / 2..max).contains(&pause),
            "{pause:?} of {seconds:?}"
        );
    }
    assert!(pause_after(WriteOutcome::Conflict) < Duration::from_secs(6));
    assert!(pause_after(WriteOutcome::Failed) < Duration::from_secs(6));
}

#[test]
fn absent_api_is_noted_once_not_as_failure() {
    for (status, is_refused, is_newly_absent, expected) in [
        (404, false, false, ListErrorLog::Hidden),
        (404, true, false, ListErrorLog::Hidden),
        (404, true, true, ListErrorLog::Absent),
        (403, true, false, ListErrorLog::Hidden),
        (403, true, true, ListErrorLog::Failed),
        (403, false, false, ListErrorLog::Failed),
        (500, false, false, ListErrorLog::Failed),
        (0, false, false, ListErrorLog::Failed),
    ] {
        let log = list_error_log(status, is_refused, is_newly_absent);
        assert_eq!(log, expected, "{status} {is_refused} {is_newly_absent}");
    }
}
