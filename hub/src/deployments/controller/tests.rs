use krypton_crds::edge_cluster::EdgeClusterStatus;
use krypton_crds::krypton_deployment::KryptonDeploymentStatus;
use krypton_runtime::newest::Newest as _;
use kube::Config as Reach;
use kube::core::ObjectMeta;

use super::*;

struct World {
    keep: Controller,
    store: DeploymentStore,
    named: watch::Receiver<Named>,
}

fn world() -> World {
    let nowhere = Reach::new("http://127.0.0.1:1".parse().unwrap());
    let (named, named_rx) = watch::channel(None);
    let keep = Controller {
        client: Client::try_from(nowhere).unwrap(),
        deployments: Arc::default(),
        members: Arc::default(),
        notices: HomeEvents::nowhere(),
        named,
        findings: watch::channel(Arc::default()).1,
        namespaces: None,
        discovery_namespace: "fleet".to_owned(),
        open_namespaces: ["fleet".to_owned()].into(),
        check_interval: Duration::from_secs(60),
        writes: HomeWrites::default(),
        reports: Arc::default(),
    };
    World {
        keep,
        store: DeploymentStore::default(),
        named: named_rx,
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

fn placed(name: &str, region: serde_json::Value, key: Option<&str>) -> KryptonDeployment {
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

impl World {
    fn sees(&mut self, event: Event<KryptonDeployment>) {
        let guarded = match event {
            Event::Init => Event::Init,
            Event::InitDone => Event::InitDone,
            Event::InitApply(object) => Event::InitApply(DeserializeGuard(Ok(object))),
            Event::Apply(object) => Event::Apply(DeserializeGuard(Ok(object))),
            Event::Delete(object) => Event::Delete(DeserializeGuard(Ok(object))),
        };
        self.store.see(Ok(guarded), &self.keep);
    }

    fn sees_members(&mut self, names: &[&str]) {
        self.store.see_member(Ok(Event::Init));
        for name in names {
            self.store.see_member(Ok(Event::InitApply(member(name))));
        }
        self.store.see_member(Ok(Event::InitDone));
    }

    fn refused(&mut self, code: u16) -> bool {
        let status = kube::core::Status::failure("no", "NotFound").with_code(code);
        let error = watcher::Error::InitialListFailed(kube::Error::Api(Box::new(status)));
        self.store.see(Err(error), &self.keep)
    }

    fn decide(&mut self) {
        self.store.decide(&self.keep, &Findings::default(), None);
    }

    fn ordered(&self) -> Option<Vec<String>> {
        let orders = self.keep.deployments.orders();
        let orders = orders.get();
        let all = orders.as_ref()?.iter();
        Some(
            all.flat_map(|(at, list)| list.iter().map(move |it| format!("{at}: {}", it.name)))
                .collect(),
        )
    }
}

#[tokio::test]
async fn deployment_shows_only_charts_given_by_hub() {
    use krypton_types::conditions::{ClusterState, State, Truth, reason};
    use krypton_types::deployment::DeploymentReport;

    let mut world = world();
    let region = serde_json::json!({"name": "paris", "kubeconfigSecretName": "edge-1"});
    world.sees(Event::Init);
    world.sees(Event::InitApply(placed("acme", region, None)));
    world.sees(Event::InitDone);
    world.sees_members(&["edge-1"]);
    let secret = SecretName {
        namespace: "fleet".to_owned(),
        name: "edge-1".to_owned(),
    };
    let there = crate::discovery::named_secrets::Finding::There {
        member: "edge-1".to_owned(),
        open: true,
    };
    let findings: Findings = Arc::new([(secret, there)].into());
    let key = DeploymentKey {
        namespace: "accounts".to_owned(),
        name: "acme".to_owned(),
    };
    world.keep.reports.dealt("edge-1", "r/c:1");
    for (claimed, shown) in [("https://elsewhere/c:1", None), ("r/c:1", Some("r/c:1"))] {
        let report = DeploymentReport {
            uid: "uid-of-acme".to_owned(),
            observed_generation: 0,
            gone: false,
            applied_chart: claimed.to_owned(),
            state: ClusterState::from(State::new(Truth::True, reason::INSTALLED, "")),
            events: Vec::new(),
        };
        let said = [(key.clone(), Some(report))].into();
        world.keep.deployments.report("edge-1", said);
        let decided = world.store.decide(&world.keep, &findings, None);
        let status = &decided[0].1.status;
        assert_eq!(status.last_applied_chart.as_deref(), shown, "{claimed}");
    }
}

#[tokio::test]
async fn nothing_is_ordered_before_both_lists_are_complete() {
    let mut world = world();
    let region = || serde_json::json!({"name": "paris"});
    world.sees(Event::Init);
    world.sees(Event::InitApply(placed("acme", region(), None)));
    world.sees_members(&["edge-1"]);
    world.decide();
    assert_eq!(world.ordered(), None);
    assert_eq!(world.named.get(), None);
    world.sees(Event::InitDone);
    world.decide();
    assert_eq!(world.ordered().unwrap(), ["edge-1: acme"]);
    // A restarted list removes nothing until it is complete.
    world.sees(Event::Init);
    world.decide();
    assert_eq!(world.ordered().unwrap(), ["edge-1: acme"]);
    world.sees(Event::InitDone);
    world.decide();
    assert!(world.ordered().unwrap().is_empty());
}

#[tokio::test]
async fn absent_kind_orders_nothing_but_keeps_known_orders() {
    let mut world = world();
    // Before the EdgeClusters are listed, home may just be unavailable.
    assert!(!world.refused(404));
    assert!(!world.refused(404));
    world.sees_members(&["edge-1"]);
    assert!(!world.refused(500));
    assert!(!world.refused(404));
    world.decide();
    assert_eq!(world.ordered(), None);
    assert!(world.refused(403));
    world.decide();
    assert!(world.ordered().unwrap().is_empty());
    assert!(world.named.get().as_ref().unwrap().is_empty());

    world.sees(Event::Init);
    world.sees(Event::InitApply(placed(
        "acme",
        serde_json::json!({"name": "paris"}),
        None,
    )));
    world.sees(Event::InitDone);
    world.refused(404);
    world.refused(404);
    world.decide();
    assert_eq!(world.ordered().unwrap(), ["edge-1: acme"]);
}

#[tokio::test]
async fn recorded_secret_stays_named_after_spec_change() {
    let mut world = world();
    let of = |namespace: &str, key: &str| serde_json::json!({"name": "x", "kubeconfig": {"secret": {"namespace": namespace, "name": "new", "key": key}}});
    let mut elder = placed("elder", of("theirs", "admin.conf"), Some("value"));
    let created = |second| ObjectMeta {
        creation_timestamp: Some(k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(
            jiff::Timestamp::from_second(second).unwrap(),
        )),
        ..ObjectMeta::default()
    };
    elder.metadata.creation_timestamp = created(1).creation_timestamp;
    let mut younger = object("younger", of("accounts", "other"));
    younger.metadata.creation_timestamp = created(2).creation_timestamp;
    let mut also = object("also", of("accounts", "admin.conf"));
    also.metadata.creation_timestamp = created(1).creation_timestamp;
    // An object that may not name the Secret does not determine its key.
    let mut stranger = object("stranger", of("victims", "another"));
    stranger.metadata.creation_timestamp = created(0).creation_timestamp;
    let mut victim = object("victim", of("victims", ""));
    victim.metadata.namespace = Some("victims".to_owned());
    world.sees_members(&["edge-1"]);
    world.sees(Event::Init);
    for object in [elder, younger, also, stranger, victim] {
        world.sees(Event::InitApply(object));
    }
    world.sees(Event::InitDone);
    world.decide();
    let named = world.named.get().unwrap();
    let naming = |namespace: &str, name: &str| {
        let secret = SecretName {
            namespace: namespace.to_owned(),
            name: name.to_owned(),
        };
        let naming = &named[&secret];
        (naming.key.clone().unwrap_or_default(), naming.trusted)
    };
    assert_eq!(naming("fleet", "edge-1"), ("value".to_owned(), true));
    assert_eq!(naming("theirs", "new"), ("admin.conf".to_owned(), false));
    assert_eq!(naming("accounts", "new"), ("admin.conf".to_owned(), true));
    assert_eq!(naming("victims", "new"), (String::new(), true));
    assert_eq!(named.len(), 4);
}

#[tokio::test]
async fn failed_writes_back_off() {
    let mut world = world();
    world.sees(Event::Apply(object(
        "acme",
        serde_json::json!({"name": "paris"}),
    )));
    let key = world.store.slots.keys().next().unwrap().clone();
    let mut pause = |came| {
        let before = BootTime::now();
        let written = Written {
            before: None,
            object: None,
            forgets: false,
            news: Vec::new(),
            came: Some(came),
        };
        let store = &mut world.store;
        home_writer::start(&mut store.queue, key.clone(), before);
        store.take_written(key.clone(), written, &HomeEvents::nowhere());
        store.queue.not_before(&key).since(before)
    };
    for full in [1, 2, 4, 8, 16, 30, 30] {
        let full = Duration::from_secs(full);
        let found = pause(Wrote::Failed);
        let most = full + Duration::from_secs(1);
        assert!((full / 2..most).contains(&found), "{found:?} of {full:?}");
    }
    assert!(pause(Wrote::Conflict) < Duration::from_secs(6));
    assert!(pause(Wrote::Failed) < Duration::from_secs(6));
}

#[test]
fn absent_api_is_noted_once_not_as_failure() {
    for (status, refused, known, expected) in [
        (404, false, false, Noted::Nothing),
        (404, true, false, Noted::Nothing),
        (404, true, true, Noted::Absent),
        (403, true, false, Noted::Nothing),
        (403, true, true, Noted::Failed),
        (403, false, false, Noted::Failed),
        (500, false, false, Noted::Failed),
        (0, false, false, Noted::Failed),
    ] {
        let found = noted(status, refused, known);
        assert_eq!(found, expected, "{status} {refused} {known}");
    }
}
