use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use krypton_crds::krypton_deployment::KryptonDeploymentSpec;
use krypton_types::conditions::ClusterState;
use krypton_types::deployment::DeploymentReport;

use super::*;

const UID: &str = "uid-of-acme";

/// One object, and the members' reports on it.
struct World {
    object: KryptonDeployment,
    /// The target member, or the reason for the lack of one.
    target: Result<&'static str, State>,
    members: BTreeMap<&'static str, At>,
    deletion: Option<Deletion>,
}

fn connected(truth: Truth) -> Cluster {
    Cluster {
        connected: Some(State::new(truth, "Reason", "why")),
        resolved: Some(State::new(Truth::True, "Resolved", "")),
        ..Cluster::default()
    }
}

fn world() -> World {
    let spec: KryptonDeploymentSpec = serde_json::from_value(serde_json::json!({
        "account": {"name": "acme"}, "region": {"name": "paris"},
    }))
    .unwrap();
    let mut object = KryptonDeployment::new("acme", spec);
    object.metadata.namespace = Some("accounts".to_owned());
    object.metadata.uid = Some(UID.to_owned());
    object.metadata.generation = Some(3);
    World {
        object,
        target: Ok("edge-1"),
        members: BTreeMap::new(),
        deletion: None,
    }
    .member("edge-1")
}

fn placement(cluster: &str, removing: bool) -> Placement {
    Placement {
        cluster: cluster.to_owned(),
        cluster_uid: format!("uid-of-{cluster}"),
        key: None,
        removing,
    }
}

fn report(ready: (Truth, &str), error: Option<&str>) -> DeploymentReport {
    let (truth, why) = ready;
    DeploymentReport {
        uid: UID.to_owned(),
        observed_generation: 3,
        gone: false,
        applied_chart: "https://charts/small:1.0.0".to_owned(),
        state: ClusterState {
            ready: State::new(truth, why, "words"),
            progress: None,
            error: error.map(|why| State::new(Truth::True, why, "what failed")),
        },
        events: Vec::new(),
    }
}

fn well() -> DeploymentReport {
    report((Truth::True, reason::INSTALLED), None)
}

fn gone() -> DeploymentReport {
    DeploymentReport {
        gone: true,
        ..report((Truth::False, reason::UNINSTALLED), None)
    }
}

impl World {
    fn member(mut self, name: &'static str) -> Self {
        let at = At {
            member: Some((name.to_owned(), connected(Truth::True))),
            ..At::default()
        };
        self.members.insert(name, at);
        self
    }

    fn says(mut self, member: &str, report: DeploymentReport) -> Self {
        let fresh = true;
        self.members.get_mut(member).unwrap().said = Some(Said { report, fresh });
        self
    }

    /// The member stops reporting.
    fn silent(mut self, member: &str) -> Self {
        let found = &mut self.members.get_mut(member).unwrap().member;
        found.as_mut().unwrap().1 = connected(Truth::False);
        self
    }

    fn finalized(mut self) -> Self {
        self.object.metadata.finalizers = Some(vec![names::DEPLOYMENT_FINALIZER.to_owned()]);
        self
    }

    /// Adds the finalizer and these recorded placements to the object.
    fn placed(mut self, placements: &[(&str, bool)]) -> Self {
        let placements = placements
            .iter()
            .map(|(name, removing)| placement(name, *removing));
        let status = self.object.status.get_or_insert_default();
        status.placements = Some(placements.collect());
        self.finalized()
    }

    fn annotated(mut self, name: &str, value: &str) -> Self {
        let annotations = self.object.metadata.annotations.get_or_insert_default();
        annotations.insert(name.to_owned(), value.to_owned());
        self
    }

    fn deleted(mut self, deletion: Option<Deletion>) -> Self {
        self.object.metadata.deletion_timestamp = Some(Time(Timestamp::UNIX_EPOCH));
        self.deletion = deletion;
        self
    }

    fn site(&self, placement: Placement) -> Site {
        let at = self.members.get(placement.cluster.as_str());
        Site {
            at: at.cloned().unwrap_or_default(),
            placement,
        }
    }

    fn decide(&self) -> Decision {
        let status = self.object.status.as_ref();
        let placements = status.and_then(|status| status.placements.clone());
        decide(&View {
            object: &self.object,
            target: self
                .target
                .clone()
                .map(|name| self.site(placement(name, false))),
            sites: placements
                .iter()
                .flatten()
                .map(|it| self.site(it.clone()))
                .collect(),
            deletion: self.deletion,
            check_every: 60,
            now: Timestamp::UNIX_EPOCH,
        })
    }
}

fn ready(decision: &Decision) -> (Truth, String) {
    let ready = conditions::find(&decision.status.conditions, READY).unwrap();
    (ready.truth, ready.reason)
}

/// Returns the members with an order, and whether it removes the release.
fn orders(decision: &Decision) -> Vec<(&str, bool)> {
    let each = decision.orders.iter();
    each.map(|(cluster, order)| (cluster.as_str(), order.remove))
        .collect()
}

fn reasons(news: &[ObjectEvent]) -> Vec<&str> {
    news.iter().map(|news| news.reason).collect()
}

/// Returns the placements to record, and whether each is being removed.
fn placements(decision: &Decision) -> Vec<(&str, bool)> {
    let placements = decision.status.placements.iter().flatten();
    placements
        .map(|placement| (placement.cluster.as_str(), placement.removing))
        .collect()
}

#[track_caller]
fn assert_orders_and_places(decision: &Decision, ordered: &[(&str, bool)], kept: &[(&str, bool)]) {
    assert_eq!(orders(decision), ordered);
    assert_eq!(placements(decision), kept);
}

const HERE: [(&str, bool); 1] = [("edge-1", false)];

#[test]
fn deployment_is_recorded_before_it_is_ordered() {
    let decision = world().decide();
    let finalizers = decision.finalizers.as_deref().unwrap();
    assert_eq!(finalizers, [names::DEPLOYMENT_FINALIZER]);
    assert_eq!(placements(&decision), HERE);
    assert!(decision.orders.is_empty(), "{:?}", decision.orders);
    assert_eq!(
        reasons(&decision.with_finalizers),
        ["AccountValidated", "FinalizerAdded"]
    );
    assert!(reasons(&decision.with_status).contains(&"Routing"));
    // Half of the record is not enough.
    let mut without = world().placed(&HERE);
    without.object.metadata.finalizers = None;
    for half in [without, world().finalized()] {
        let decision = half.decide();
        assert!(decision.orders.is_empty(), "{:?}", decision.orders);
        assert_eq!(placements(&decision), HERE);
    }
    let decision = world().placed(&HERE).decide();
    assert_eq!(decision.finalizers, None);
    assert_eq!(orders(&decision), HERE);
    let order = &decision.orders["edge-1"];
    assert_eq!((order.uid.as_str(), order.generation), (UID, 3));
    let drift = order.drift.unwrap();
    assert_eq!((drift.mode, drift.interval_seconds), (DriftMode::Heal, 60));
}

#[test]
fn deployment_status_follows_member_report() {
    let failed = |why| report((Truth::False, reason::NOT_READY), Some(why));
    let older = DeploymentReport {
        observed_generation: 2,
        ..well()
    };
    let anothers = DeploymentReport {
        uid: "another".to_owned(),
        ..well()
    };
    let (pending, error) = (DeploymentPhase::Pending, DeploymentPhase::Error);
    let (no, unknown) = (Truth::False, Truth::Unknown);
    let installing = report((no, reason::INSTALLING), None);
    let not_known = report((unknown, reason::NOT_READY), None);
    let installed = (Truth::True, reason::INSTALLED);
    // The installed revision is ready, but the upgrade failed.
    let not_upgraded = report(installed, Some(reason::UPGRADE_FAILED));
    for (said, truth, why, in_phase) in [
        (well(), Truth::True, "Deployed", DeploymentPhase::Ready),
        (older, no, "NotReady", pending),
        (anothers, no, "NotReady", pending),
        (gone(), no, "NotReady", pending),
        (installing, no, "NotReady", pending),
        (not_known, unknown, "NotReady", pending),
        (failed(reason::INSTALL_FAILED), no, "HelmFailed", error),
        (failed(reason::CHART_NOT_LOADED), no, "HelmFailed", error),
        // A failure outside Helm keeps its own reason.
        (failed(reason::RELEASE_IN_USE), no, "ReleaseInUse", error),
        (not_upgraded, no, "HelmFailed", error),
    ] {
        let decision = world().placed(&HERE).says("edge-1", said.clone()).decide();
        assert_eq!(ready(&decision), (truth, why.to_owned()), "{said:?}");
        assert_eq!(decision.status.phase, Some(in_phase), "{said:?}");
    }
}

#[test]
fn pause_is_shown_with_any_state() {
    let why = "paused by annotation on the KryptonDeployment";
    let paused = |mut report: DeploymentReport| {
        report.state.progress = Some(State::new(Truth::False, reason::PAUSED, why));
        report
    };
    let failed = report(
        (Truth::False, reason::UPGRADE_FAILED),
        Some(reason::UPGRADE_FAILED),
    );
    let unready = report((Truth::False, reason::NOT_READY), None);
    for (report, (truth, reason)) in [
        (well(), (Truth::True, "Deployed")),
        (failed, (Truth::False, "HelmFailed")),
        (unready, (Truth::False, "NotReady")),
    ] {
        let world = world().placed(&[("edge-1", false)]);
        let decision = world.says("edge-1", paused(report)).decide();
        assert_eq!(ready(&decision), (truth, reason.to_owned()));
        let line = decision.status.last_message.unwrap();
        assert!(line.ends_with(&format!("; {why}")), "{line}");
    }
}

#[test]
fn silent_member_makes_ready_unknown_and_removes_nothing() {
    let here = || world().placed(&HERE).says("edge-1", well());
    let decision = here().silent("edge-1").decide();
    assert_eq!(
        ready(&decision),
        (Truth::Unknown, "EdgeUnavailable".to_owned())
    );
    assert_eq!(orders(&decision), HERE);
    let why = || State::new(Truth::False, "SecretNotFound", "there is no Secret");
    for (target, account) in [(Err(why()), "acme"), (Ok("edge-1"), "")] {
        let mut world = here();
        world.target = target;
        world.object.spec.account.name = account.to_owned();
        let decision = world.decide();
        assert_eq!(decision.status.phase, Some(DeploymentPhase::Error));
        assert_eq!(orders(&decision), HERE);
        assert_eq!(placements(&decision), HERE);
        // A member that no longer allows the namespace gets no order, and nothing is removed.
        let member = world.members.get_mut("edge-1").unwrap().member.as_mut();
        member.unwrap().1.allowed = krypton_types::allowed_namespaces::Allowed::new(Some(&[]));
        let decision = world.decide();
        assert!(orders(&decision).is_empty());
        assert_eq!(placements(&decision), HERE);
    }
}

#[test]
fn old_place_stays_until_new_one_is_ready() {
    const BOTH: [(&str, bool); 2] = [("edge-0", false), ("edge-1", false)];
    const LEAVES: [(&str, bool); 2] = [("edge-0", true), ("edge-1", false)];
    let moved = || world().member("edge-0").placed(&BOTH);
    assert_eq!(orders(&moved().decide()), BOTH);
    let installing = report((Truth::False, reason::INSTALLING), None);
    let decision = moved().says("edge-1", installing).decide();
    assert_orders_and_places(&decision, &BOTH, &BOTH);
    // The removal is recorded before it is ordered, and it is final.
    let decision = moved().says("edge-1", well()).decide();
    assert_orders_and_places(&decision, &BOTH, &LEAVES);
    // A report from before a change of hub or reporter is not enough.
    let mut stale = moved().says("edge-1", well());
    let said = &mut stale.members.get_mut("edge-1").unwrap().said;
    said.as_mut().unwrap().fresh = false;
    assert_eq!(placements(&stale.decide()), BOTH);

    let leaves = || world().member("edge-0").placed(&LEAVES);
    for world in [
        leaves(),
        leaves().says("edge-1", well()),
        leaves().silent("edge-1"),
    ] {
        let decision = world.decide();
        assert_orders_and_places(&decision, &LEAVES, &LEAVES);
    }
    let decision = leaves().says("edge-0", gone()).decide();
    assert_eq!(placements(&decision), HERE);
    assert!(reasons(&decision.with_status).contains(&"HelmUninstalled"));
    // The removal answered an order of an earlier generation, or one that is not recorded. The release may
    // exist again.
    let before = DeploymentReport {
        observed_generation: 2,
        ..gone()
    };
    assert_eq!(
        placements(&leaves().says("edge-0", before).decide()),
        LEAVES
    );
    assert_eq!(placements(&moved().says("edge-0", gone()).decide()), BOTH);
    // If the object targets the cluster again, the hub records this before it orders the release.
    let mut back = leaves();
    back.target = Ok("edge-0");
    let decision = back.decide();
    assert_eq!(placements(&decision), BOTH);
    assert_eq!(orders(&decision), HERE);
}

#[test]
fn lost_member_stays_recorded_until_orphan_annotation() {
    let both = [("edge-0", false), ("edge-1", false)];
    let lost = || world().placed(&both).says("edge-1", well());
    let decision = lost().decide();
    assert_orders_and_places(&decision, &HERE, &[("edge-0", true), ("edge-1", false)]);
    let line = decision.status.last_message.unwrap();
    let told = line.contains("edge-0") && line.contains(names::ORPHAN_ANNOTATION);
    assert!(told, "{line}");
    let decision = lost().annotated(names::ORPHAN_ANNOTATION, "true").decide();
    assert_eq!(placements(&decision), HERE);
    assert!(reasons(&decision.with_status).contains(&"Orphaned"));
}

#[test]
fn renamed_cluster_is_same_place() {
    let mut world = world().member("kamaji").placed(&HERE);
    let mut renamed = world.site(placement("kamaji", false));
    renamed.placement.cluster_uid = "uid-of-edge-1".to_owned();
    let view = View {
        object: &world.object,
        target: Ok(renamed),
        sites: vec![world.site(placement("edge-1", false))],
        deletion: None,
        check_every: 60,
        now: Timestamp::UNIX_EPOCH,
    };
    let decision = decide(&view);
    assert_orders_and_places(&decision, &[("kamaji", false)], &[("kamaji", false)]);
    // The hub never orders its removal.
    world.object.status = Some(decision.status);
    assert!(!placements(&world.decide()).iter().any(|place| place.1));
}

#[test]
fn deletion_is_confirmed_recorded_ordered_then_finished() {
    const GOES: [(&str, bool); 1] = [("edge-1", true)];
    let at = |placements: &[(&str, bool)], deletion| {
        world()
            .placed(placements)
            .says("edge-1", well())
            .deleted(deletion)
    };
    let decision = at(&HERE, None).decide();
    assert!(decision.read);
    assert_orders_and_places(&decision, &HERE, &HERE);
    assert!(decision.orders["edge-1"].paused, "it is left as it is");
    assert_eq!(decision.finalizers, None);
    let decision = at(&HERE, Some(Deletion::OfTheObject)).decide();
    assert!(!decision.read);
    assert_orders_and_places(&decision, &HERE, &GOES);
    // A hub that starts reads the removal from the record.
    for deletion in [None, Some(Deletion::OfTheObject)] {
        let decision = at(&GOES, deletion).decide();
        assert!(!decision.read);
        assert_eq!(orders(&decision), GOES);
        assert!(!decision.orders["edge-1"].paused);
        assert_eq!(decision.finalizers, None);
        let decision = at(&GOES, deletion).says("edge-1", gone()).decide();
        assert_eq!(decision.finalizers, Some(Vec::new()));
        let told = ["HelmUninstalled", "FinalizerRemoved"];
        assert_eq!(reasons(&decision.with_finalizers), told);
    }
    let decision = at(&HERE, Some(Deletion::OfTheObject))
        .says("edge-1", gone())
        .decide();
    assert_eq!(decision.finalizers, None, "that was another order");
    let paused = at(&GOES, None).annotated(names::PAUSED_ANNOTATION, "true");
    assert!(paused.decide().orders["edge-1"].paused);
}

#[test]
fn unrecorded_deployment_is_assumed_at_its_target() {
    let unrecorded = |deletion| world().finalized().deleted(deletion);
    let decision = unrecorded(None).decide();
    assert!(decision.read);
    assert_eq!(placements(&decision), HERE);
    let decision = unrecorded(Some(Deletion::OfTheObject)).decide();
    assert_eq!(placements(&decision), [("edge-1", true)]);
    assert_eq!(decision.finalizers, None);
    let mut nowhere = unrecorded(Some(Deletion::OfTheObject));
    nowhere.target = Err(State::new(Truth::False, "SecretNotFound", "no Secret x"));
    let decision = nowhere.decide();
    assert_eq!(decision.finalizers, None);
    let line = decision.status.last_message.unwrap();
    for word in ["deletion waits", "no Secret x", names::ORPHAN_ANNOTATION] {
        assert!(line.contains(word), "{line}");
    }
    let let_go = nowhere.annotated(names::ORPHAN_ANNOTATION, "true").decide();
    assert_eq!(let_go.finalizers, Some(Vec::new()));
    assert_eq!(
        reasons(&let_go.with_finalizers),
        ["Orphaned", "FinalizerRemoved"]
    );
    // No placement is recorded any longer.
    let done = world().placed(&[]).deleted(None).decide();
    assert_eq!(done.finalizers, Some(Vec::new()));
}

#[test]
fn orphan_annotation_and_deleted_crd_release_immediately() {
    let deleted = |deletion| world().placed(&HERE).deleted(deletion);
    let orphan = deleted(None).annotated(names::ORPHAN_ANNOTATION, "true");
    for world in [orphan, deleted(Some(Deletion::OfTheCrd))] {
        let decision = world.decide();
        assert!(decision.orders.is_empty());
        assert_eq!(decision.finalizers, Some(Vec::new()));
        let told = &decision.with_finalizers;
        assert_eq!(reasons(told), ["Orphaned", "FinalizerRemoved"]);
        for word in ["ced-acme", "namespace acme", "edge-1"] {
            assert!(told[0].message.contains(word), "{}", told[0].message);
        }
    }
}

#[test]
fn deletion_waits_for_unavailable_member_and_reports_it() {
    let away = world()
        .placed(&[("edge-1", true)])
        .deleted(Some(Deletion::OfTheObject));
    let decision = away.silent("edge-1").decide();
    assert_eq!(orders(&decision), [("edge-1", true)]);
    let line = decision.status.last_message.unwrap();
    assert!(
        line.starts_with("deletion waits: EdgeCluster edge-1"),
        "{line}"
    );
    assert!(line.contains(names::ORPHAN_ANNOTATION), "{line}");
}

#[test]
fn events_are_emitted_only_on_change() {
    let mut world = world().placed(&HERE).says("edge-1", well());
    let decision = world.decide();
    assert_eq!(reasons(&decision.with_status), ["HelmDeployed", "Ready"]);
    world.object.status = Some(decision.status.clone());
    let again = world.decide();
    assert_eq!(again.status, decision.status);
    assert!(again.with_status.is_empty());
    let world = world.says(
        "edge-1",
        report((Truth::False, "X"), Some(reason::UPGRADE_FAILED)),
    );
    assert_eq!(reasons(&world.decide().with_status), ["HelmDeployFailed"]);
}

#[test]
fn full_member_gets_deletion_orders_only() {
    let mut world = world().placed(&HERE);
    world.members.get_mut("edge-1").unwrap().full = true;
    let decision = world.decide();
    assert!(decision.orders.is_empty());
    assert_eq!(decision.status.phase, Some(DeploymentPhase::Error));
    let long = "x".repeat(ANNOTATION_MAX + 1);
    let going = world
        .placed(&[("edge-1", true)])
        .annotated(names::DRIFT_IGNORE_ANNOTATION, &long)
        .deleted(Some(Deletion::OfTheObject))
        .decide();
    assert_eq!(orders(&going), [("edge-1", true)]);
    assert!(going.orders["edge-1"].annotations.is_empty());
}
