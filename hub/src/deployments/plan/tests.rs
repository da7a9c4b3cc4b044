mod history;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use krypton_crds::krypton_deployment::{DeploymentPhase, KryptonDeploymentSpec};
use krypton_types::allowed_namespaces::AllowedNamespaces;
use krypton_types::conditions::{self, ClusterState, READY};
use krypton_types::deployment::DeploymentReport;
use krypton_types::tenant::{UpcomingStep, UpcomingStepKind};

use super::*;

const UID: &str = "uid-of-acme";

/// One object, and the members' reports on it.
struct DeploymentFixture {
    object: KryptonDeployment,
    /// The target member, or the reason for the lack of one.
    target: Result<&'static str, State>,
    members: BTreeMap<&'static str, ClusterView>,
    deletion: Option<DeletionCause>,
    repair: Option<Repair>,
}

fn target_member(connected: Truth) -> TargetMember {
    TargetMember {
        connected: Some(State::new(connected, "Reason", "why")),
        resolved: Some(State::new(Truth::True, "Resolved", "")),
        ..TargetMember::default()
    }
}

fn fixture() -> DeploymentFixture {
    let spec: KryptonDeploymentSpec = serde_json::from_value(serde_json::json!({
        "account": {"name": "acme"}, "region": {"name": "paris"},
    }))
    .unwrap();
    let mut object = KryptonDeployment::new("acme", spec);
    object.metadata.namespace = Some("accounts".to_owned());
    object.metadata.uid = Some(UID.to_owned());
    object.metadata.generation = Some(3);
    DeploymentFixture {
        object,
        target: Ok("edge-1"),
        members: BTreeMap::new(),
        deletion: None,
        repair: None,
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
    let (truth, ready_reason) = ready;
    DeploymentReport {
        uid: UID.to_owned(),
        observed_generation: 3,
        gone: false,
        applied_chart: "https://charts/small:1.0.0".to_owned(),
        state: ClusterState {
            ready: State::new(truth, ready_reason, "words"),
            progress: None,
            error: error.map(|error_reason| State::new(Truth::True, error_reason, "what failed")),
        },
        next: None,
        handled_request: None,
        events: Vec::new(),
        revisions: None,
    }
}

/// A deployment on edge-1 with this report of the member.
fn reported(report: DeploymentReport) -> DeploymentFixture {
    let fixture = fixture().with_placements(&HERE);
    fixture.with_report("edge-1", report)
}

fn failed(reason: &str) -> DeploymentReport {
    report((Truth::False, reason), Some(reason))
}

fn unready() -> DeploymentReport {
    report((Truth::False, reason::NOT_READY), None)
}

fn installed_report() -> DeploymentReport {
    report((Truth::True, reason::INSTALLED), None)
}

fn uninstalled_report() -> DeploymentReport {
    DeploymentReport {
        gone: true,
        ..report((Truth::False, reason::UNINSTALLED), None)
    }
}

impl DeploymentFixture {
    fn member(mut self, name: &'static str) -> Self {
        let cluster = ClusterView {
            member: Some((name.to_owned(), target_member(Truth::True))),
            ..ClusterView::default()
        };
        self.members.insert(name, cluster);
        self
    }

    fn with_report(mut self, member: &str, report: DeploymentReport) -> Self {
        self.members.get_mut(member).unwrap().report = Some(DeploymentOrderReport {
            report,
            is_current: true,
        });
        self
    }

    /// The member stops reporting.
    fn disconnected(mut self, member: &str) -> Self {
        let member = &mut self.members.get_mut(member).unwrap().member;
        member.as_mut().unwrap().1 = target_member(Truth::False);
        self
    }

    fn with_finalizer(mut self) -> Self {
        self.object.metadata.finalizers = Some(vec![names::DEPLOYMENT_FINALIZER.to_owned()]);
        self
    }

    /// Adds the finalizer and these recorded placements to the object.
    fn with_placements(mut self, placements: &[(&str, bool)]) -> Self {
        let placements = placements
            .iter()
            .map(|(name, removing)| placement(name, *removing));
        let status = self.object.status.get_or_insert_default();
        status.placements = Some(placements.collect());
        self.with_finalizer()
    }

    fn with_annotation(mut self, name: &str, value: &str) -> Self {
        let annotations = self.object.metadata.annotations.get_or_insert_default();
        annotations.insert(name.to_owned(), value.to_owned());
        self
    }

    fn with_deletion(mut self, deletion: Option<DeletionCause>) -> Self {
        self.object.metadata.deletion_timestamp = Some(Time(Timestamp::UNIX_EPOCH));
        self.deletion = deletion;
        self
    }

    fn site(&self, placement: Placement) -> Site {
        let cluster = self.members.get(placement.cluster.as_str());
        Site {
            cluster: cluster.cloned().unwrap_or_default(),
            placement,
        }
    }

    fn decide(&self) -> DeploymentDecision {
        let status = self.object.status.as_ref();
        let placements = status.and_then(|status| status.placements.clone());
        decide(&DeploymentView {
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
            drift_check_seconds: 60,
            repair: self.repair,
            is_history_settled: false,
            now: Timestamp::UNIX_EPOCH,
        })
    }
}

fn ready_condition(decision: &DeploymentDecision) -> (Truth, String) {
    let ready = conditions::find(&decision.status.conditions, READY).unwrap();
    (ready.truth, ready.reason)
}

/// Returns the members with an order, and whether it removes the release.
fn orders(decision: &DeploymentDecision) -> Vec<(&str, bool)> {
    let orders = decision.orders.iter();
    orders
        .map(|(cluster, order)| (cluster.as_str(), order.remove))
        .collect()
}

fn reasons(events: &[ObjectEvent]) -> Vec<&str> {
    events.iter().map(|event| event.reason).collect()
}

/// Returns the placements to record, and whether each is being removed.
fn placements(decision: &DeploymentDecision) -> Vec<(&str, bool)> {
    let placements = decision.status.placements.iter().flatten();
    placements
        .map(|placement| (placement.cluster.as_str(), placement.removing))
        .collect()
}

#[track_caller]
fn assert_orders_and_places(
    decision: &DeploymentDecision,
    expected_orders: &[(&str, bool)],
    expected_placements: &[(&str, bool)],
) {
    assert_eq!(orders(decision), expected_orders);
    assert_eq!(placements(decision), expected_placements);
}

const HERE: [(&str, bool); 1] = [("edge-1", false)];

#[test]
fn deployment_is_recorded_before_it_is_ordered() {
    let decision = fixture().decide();
    let finalizers = decision.finalizers.as_deref().unwrap();
    assert_eq!(finalizers, [names::DEPLOYMENT_FINALIZER]);
    assert_eq!(placements(&decision), HERE);
    assert!(decision.orders.is_empty(), "{:?}", decision.orders);
    let events = ["AccountValidated", "FinalizerAdded"];
    assert_eq!(reasons(&decision.finalizer_events), events);
    assert!(reasons(&decision.status_events).contains(&"Routing"));
    // Half of the record is not enough.
    let mut without_finalizer = fixture().with_placements(&HERE);
    without_finalizer.object.metadata.finalizers = None;
    for half in [without_finalizer, fixture().with_finalizer()] {
        let decision = half.decide();
        assert!(decision.orders.is_empty(), "{:?}", decision.orders);
        assert_eq!(placements(&decision), HERE);
    }
    let decision = fixture().with_placements(&HERE).decide();
    assert_eq!(decision.finalizers, None);
    assert_eq!(orders(&decision), HERE);
    let order = &decision.orders["edge-1"];
    assert_eq!((order.uid.as_str(), order.generation), (UID, 3));
    let drift = order.drift.unwrap();
    assert_eq!((drift.mode, drift.interval_seconds), (DriftMode::Heal, 60));
}

#[test]
fn reconcile_request_is_acknowledged_once_member_handled_it() {
    let decide = |handled: Option<&str>| {
        let member_report = DeploymentReport {
            handled_request: handled.map(str::to_owned),
            ..installed_report()
        };
        let mut fixture = fixture()
            .with_placements(&HERE)
            .with_annotation(names::RECONCILE_REQUESTED_ANNOTATION, "now")
            .with_report("edge-1", member_report);
        let status = fixture.object.status.as_mut().unwrap();
        status.last_handled_reconcile_at = Some("earlier".to_owned());
        fixture.decide().status.last_handled_reconcile_at
    };
    assert_eq!(decide(None).as_deref(), Some("earlier"));
    assert_eq!(decide(Some("earlier")).as_deref(), Some("earlier"));
    assert_eq!(decide(Some("now")).as_deref(), Some("now"));
}

#[test]
fn deployment_status_follows_member_report() {
    let failed = |reason| report((Truth::False, reason::NOT_READY), Some(reason));
    let older_generation = DeploymentReport {
        observed_generation: 2,
        ..installed_report()
    };
    let other_uid = DeploymentReport {
        uid: "another".to_owned(),
        ..installed_report()
    };
    let installing = report((Truth::False, reason::INSTALLING), None);
    let readiness_unknown = report((Truth::Unknown, reason::NOT_READY), None);
    let installed = (Truth::True, reason::INSTALLED);
    let unhealthy = report(installed, Some(reason::HEALTH_CHECK_FAILED));
    // The installed revision is ready, but the upgrade failed.
    let not_upgraded = report(installed, Some(reason::UPGRADE_FAILED));
    let pending = (Truth::False, "NotReady", DeploymentPhase::Pending);
    let unknown = (Truth::Unknown, "NotReady", DeploymentPhase::Pending);
    let ready = (Truth::True, "Deployed", DeploymentPhase::Ready);
    let error = |reason| (Truth::False, reason, DeploymentPhase::Error);
    for (report, (truth, ready_reason, phase)) in [
        (installed_report(), ready),
        (older_generation, pending),
        (other_uid, pending),
        (uninstalled_report(), pending),
        (installing, pending),
        (readiness_unknown, unknown),
        (failed(reason::INSTALL_FAILED), error("HelmFailed")),
        (failed(reason::CHART_NOT_LOADED), error("HelmFailed")),
        // A failure outside Helm keeps its own reason.
        (failed(reason::RELEASE_IN_USE), error("ReleaseInUse")),
        (unhealthy, error("HealthCheckFailed")),
        (not_upgraded, error("HelmFailed")),
    ] {
        let decision = reported(report.clone()).decide();
        let expected = (truth, ready_reason.to_owned());
        assert_eq!(ready_condition(&decision), expected, "{report:?}");
        assert_eq!(decision.status.phase, Some(phase), "{report:?}");
    }
}

#[test]
fn repair_is_shown_until_release_is_ready() {
    const REPAIR: &str = "RepairTriggered";
    let placed = |repair, report| DeploymentFixture {
        repair,
        ..reported(report)
    };
    let failed = failed(reason::INSTALL_FAILED);
    let (corrected, reinstalled) = (Some(Repair::Corrected), Some(Repair::Reinstalled));
    let deployed = vec!["HelmDeployed", "Ready"];
    for (repair, member_report, ready_reason, events) in [
        (None, unready(), "NotReady", vec!["NotReady"]),
        (reinstalled, unready(), REPAIR, vec![REPAIR]),
        // The correction has its own event.
        (corrected, unready(), REPAIR, vec![]),
        (reinstalled, failed, "HelmFailed", vec!["HelmDeployFailed"]),
        (corrected, installed_report(), "Deployed", deployed),
    ] {
        let decision = placed(repair, member_report).decide();
        assert_eq!(ready_condition(&decision).1, ready_reason, "{repair:?}");
        assert_eq!(reasons(&decision.status_events), events, "{repair:?}");
    }
    // Another hub reads the repair from the status.
    let mut later = placed(None, unready());
    later.object.status = Some(placed(corrected, unready()).decide().status);
    let decision = later.decide();
    assert_eq!(ready_condition(&decision).1, REPAIR);
    assert_eq!(decision.status.phase, Some(DeploymentPhase::Pending));
    assert!(decision.status_events.is_empty());
}

#[test]
fn repair_of_ready_release_is_shown_once() {
    let mut fixture = reported(installed_report());
    fixture.object.status = Some(fixture.decide().status);
    let (pending, ready) = (DeploymentPhase::Pending, DeploymentPhase::Ready);
    for (repair, phase, events) in [
        // The correction has its own event.
        (Repair::Corrected, pending, vec![]),
        (Repair::Corrected, ready, vec!["Ready"]),
        (Repair::Reinstalled, pending, vec!["RepairTriggered"]),
        (Repair::Reinstalled, ready, vec!["Ready"]),
    ] {
        fixture.repair = Some(repair);
        let decision = fixture.decide();
        assert_eq!(decision.status.phase, Some(phase), "{repair:?}");
        let is_shown = ready_condition(&decision).1 == "RepairTriggered";
        assert_eq!(is_shown, phase == DeploymentPhase::Pending, "{repair:?}");
        assert_eq!(reasons(&decision.status_events), events, "{repair:?}");
        fixture.object.status = Some(decision.status);
    }
}

#[test]
fn pause_is_shown_with_any_state() {
    let message = "paused by annotation on the KryptonDeployment";
    let paused = |mut report: DeploymentReport| {
        report.state.progress = Some(State::new(Truth::False, reason::PAUSED, message));
        report
    };
    let failed = failed(reason::UPGRADE_FAILED);
    for (report, (truth, reason)) in [
        (installed_report(), (Truth::True, "Deployed")),
        (failed, (Truth::False, "HelmFailed")),
        (unready(), (Truth::False, "NotReady")),
    ] {
        let decision = reported(paused(report)).decide();
        assert_eq!(ready_condition(&decision), (truth, reason.to_owned()));
        let line = decision.status.last_message.unwrap();
        assert!(line.ends_with(&format!("; {message}")), "{line}");
    }
}

#[test]
fn unready_deployment_is_reconciling_stalled_or_paused() {
    let unresolved = |reason: &str| DeploymentFixture {
        target: Err(State::new(Truth::False, reason, "why")),
        ..fixture()
    };
    let mut no_account = reported(installed_report());
    no_account.object.spec.account.name = String::new();
    let mut full = reported(installed_report());
    full.members.get_mut("edge-1").unwrap().is_full = true;
    let mut paused = failed(reason::UPGRADE_FAILED);
    paused.state.progress = Some(State::new(Truth::False, reason::PAUSED, ""));
    let older_generation = DeploymentReport {
        observed_generation: 2,
        ..failed(reason::RELEASE_IN_USE)
    };
    let given_up = DeploymentReport {
        next: Some(UpcomingStep::new(UpcomingStepKind::GivenUp, None, 3)),
        ..failed(reason::UPGRADE_FAILED)
    };
    let (reconciling, stalled) = (Some(conditions::RECONCILING), Some(conditions::STALLED));
    let failed_once = reported(failed(reason::UPGRADE_FAILED));
    let silent = reported(installed_report()).disconnected("edge-1");
    let unreported = fixture().with_placements(&HERE);
    let closed_member = unresolved(reason::NAMESPACE_NOT_ALLOWED);
    for (case, mut fixture, expected) in [
        ("installed", reported(installed_report()), None),
        ("failed", failed_once, reconciling),
        ("given up", reported(given_up), stalled),
        ("not reported", unreported, reconciling),
        ("earlier refusal", reported(older_generation), reconciling),
        ("refused", reported(failed(reason::RELEASE_IN_USE)), stalled),
        ("paused", reported(paused), None),
        ("silent", silent, reconciling),
        ("no account", no_account, stalled),
        ("full", full, stalled),
        ("no Secret", unresolved("SecretNotFound"), reconciling),
        ("closed Secret", unresolved("SecretNotAllowed"), stalled),
        ("closed member", closed_member, stalled),
    ] {
        let status = fixture.decide().status;
        let ready = conditions::find(&status.conditions, READY).unwrap();
        let shown: Vec<&str> = [conditions::RECONCILING, conditions::STALLED]
            .into_iter()
            .filter(|type_| {
                let found = conditions::find(&status.conditions, type_);
                found.is_some_and(|found| found.reason == ready.reason)
            })
            .collect();
        assert_eq!(shown, Vec::from_iter(expected), "{case}");
        fixture.object.status = Some(status.clone());
        assert_eq!(fixture.decide().status, status, "{case}");
    }
}

#[test]
fn silent_member_makes_ready_unknown_and_removes_nothing() {
    let placed = || reported(installed_report());
    let decision = placed().disconnected("edge-1").decide();
    let unavailable = (Truth::Unknown, "EdgeUnavailable".to_owned());
    assert_eq!(ready_condition(&decision), unavailable);
    assert_eq!(orders(&decision), HERE);
    let not_found = || State::new(Truth::False, "SecretNotFound", "there is no Secret");
    for (target, account) in [(Err(not_found()), "acme"), (Ok("edge-1"), "")] {
        let mut fixture = placed();
        fixture.target = target;
        fixture.object.spec.account.name = account.to_owned();
        let decision = fixture.decide();
        assert_eq!(decision.status.phase, Some(DeploymentPhase::Error));
        assert_eq!(orders(&decision), HERE);
        assert_eq!(placements(&decision), HERE);
        // A member that no longer allows the namespace gets no order, and nothing is removed.
        let member = fixture.members.get_mut("edge-1").unwrap().member.as_mut();
        member.unwrap().1.allowed = AllowedNamespaces::new(Some(&[]));
        let decision = fixture.decide();
        assert!(orders(&decision).is_empty());
        assert_eq!(placements(&decision), HERE);
    }
}

#[test]
fn old_place_stays_until_new_one_is_ready() {
    const BOTH: [(&str, bool); 2] = [("edge-0", false), ("edge-1", false)];
    const REMOVING: [(&str, bool); 2] = [("edge-0", true), ("edge-1", false)];
    let moving = || fixture().member("edge-0").with_placements(&BOTH);
    assert_eq!(orders(&moving().decide()), BOTH);
    let installing = report((Truth::False, reason::INSTALLING), None);
    let decision = moving().with_report("edge-1", installing).decide();
    assert_orders_and_places(&decision, &BOTH, &BOTH);
    // The removal is recorded before it is ordered, and it is final.
    let decision = moving().with_report("edge-1", installed_report()).decide();
    assert_orders_and_places(&decision, &BOTH, &REMOVING);
    // A report from before a change of hub or reporter is not enough.
    let mut stale = moving().with_report("edge-1", installed_report());
    let report = &mut stale.members.get_mut("edge-1").unwrap().report;
    report.as_mut().unwrap().is_current = false;
    assert_eq!(placements(&stale.decide()), BOTH);

    let removing = || fixture().member("edge-0").with_placements(&REMOVING);
    for fixture in [
        removing(),
        removing().with_report("edge-1", installed_report()),
        removing().disconnected("edge-1"),
    ] {
        let decision = fixture.decide();
        assert_orders_and_places(&decision, &REMOVING, &REMOVING);
    }
    let decision = removing()
        .with_report("edge-0", uninstalled_report())
        .decide();
    assert_eq!(placements(&decision), HERE);
    assert!(reasons(&decision.status_events).contains(&"HelmUninstalled"));
    // The removal answered an order of an earlier generation, or one that is not recorded. The release may
    // exist again.
    let earlier_generation = DeploymentReport {
        observed_generation: 2,
        ..uninstalled_report()
    };
    let unanswered = removing().with_report("edge-0", earlier_generation);
    assert_eq!(placements(&unanswered.decide()), REMOVING);
    let unrecorded = moving().with_report("edge-0", uninstalled_report());
    assert_eq!(placements(&unrecorded.decide()), BOTH);
    // If the object targets the cluster again, the hub records this before it orders the release.
    let mut reverted = removing();
    reverted.target = Ok("edge-0");
    let decision = reverted.decide();
    assert_eq!(placements(&decision), BOTH);
    assert_eq!(orders(&decision), HERE);
}

#[test]
fn lost_member_stays_recorded_until_orphan_annotation() {
    let both = [("edge-0", false), ("edge-1", false)];
    let lost = || {
        fixture()
            .with_placements(&both)
            .with_report("edge-1", installed_report())
    };
    let decision = lost().decide();
    assert_orders_and_places(&decision, &HERE, &[("edge-0", true), ("edge-1", false)]);
    let line = decision.status.last_message.unwrap();
    let explains = line.contains("edge-0") && line.contains(names::ORPHAN_ANNOTATION);
    assert!(explains, "{line}");
    let decision = lost()
        .with_annotation(names::ORPHAN_ANNOTATION, "true")
        .decide();
    assert_eq!(placements(&decision), HERE);
    assert!(reasons(&decision.status_events).contains(&"Orphaned"));
}

#[test]
fn renamed_cluster_is_same_place() {
    let mut fixture = fixture().member("kamaji").with_placements(&HERE);
    let mut renamed = fixture.site(placement("kamaji", false));
    renamed.placement.cluster_uid = "uid-of-edge-1".to_owned();
    let view = DeploymentView {
        object: &fixture.object,
        target: Ok(renamed),
        sites: vec![fixture.site(placement("edge-1", false))],
        deletion: None,
        drift_check_seconds: 60,
        repair: None,
        is_history_settled: false,
        now: Timestamp::UNIX_EPOCH,
    };
    let decision = decide(&view);
    assert_orders_and_places(&decision, &[("kamaji", false)], &[("kamaji", false)]);
    // The hub never orders its removal.
    fixture.object.status = Some(decision.status);
    assert!(!placements(&fixture.decide()).iter().any(|place| place.1));
}

#[test]
fn deletion_is_confirmed_recorded_ordered_then_finished() {
    const REMOVING: [(&str, bool); 1] = [("edge-1", true)];
    let deleted_at = |placements: &[(&str, bool)], deletion| {
        fixture()
            .with_placements(placements)
            .with_report("edge-1", installed_report())
            .with_deletion(deletion)
    };
    let decision = deleted_at(&HERE, None).decide();
    assert!(decision.must_read_deletion);
    assert_orders_and_places(&decision, &HERE, &HERE);
    assert!(decision.orders["edge-1"].paused, "it is left as it is");
    assert_eq!(decision.finalizers, None);
    let decision = deleted_at(&HERE, Some(DeletionCause::Object)).decide();
    assert!(!decision.must_read_deletion);
    assert_orders_and_places(&decision, &HERE, &REMOVING);
    // A hub that starts reads the removal from the record.
    for deletion in [None, Some(DeletionCause::Object)] {
        let decision = deleted_at(&REMOVING, deletion).decide();
        assert!(!decision.must_read_deletion);
        assert_eq!(orders(&decision), REMOVING);
        assert!(!decision.orders["edge-1"].paused);
        assert_eq!(decision.finalizers, None);
        let decision = deleted_at(&REMOVING, deletion)
            .with_report("edge-1", uninstalled_report())
            .decide();
        assert_eq!(decision.finalizers, Some(Vec::new()));
        let events = ["HelmUninstalled", "FinalizerRemoved"];
        assert_eq!(reasons(&decision.finalizer_events), events);
    }
    let decision = deleted_at(&HERE, Some(DeletionCause::Object))
        .with_report("edge-1", uninstalled_report())
        .decide();
    assert_eq!(decision.finalizers, None, "that was another order");
    let paused = deleted_at(&REMOVING, None).with_annotation(names::PAUSED_ANNOTATION, "true");
    assert!(paused.decide().orders["edge-1"].paused);
}

#[test]
fn removal_is_ordered_until_it_is_recorded() {
    const MOVED: [(&str, bool); 2] = [("edge-0", true), ("edge-1", false)];
    let moved = || {
        fixture()
            .member("edge-0")
            .with_placements(&MOVED)
            .with_report("edge-0", uninstalled_report())
    };
    // The writes may fail for a long time, and the members must keep their reports until then.
    assert_orders_and_places(&moved().decide(), &MOVED, &HERE);
    let mut deleting = fixture()
        .with_placements(&[("edge-1", true)])
        .with_report("edge-1", uninstalled_report())
        .with_deletion(Some(DeletionCause::Object));
    let decision = deleting.decide();
    assert_orders_and_places(&decision, &[("edge-1", true)], &[]);
    assert!(!decision.orders["edge-1"].paused);
    // Another controller's finalizer keeps the object.
    deleting.object.metadata.finalizers = decision.finalizers;
    assert!(deleting.decide().orders.is_empty());
}

#[test]
fn unrecorded_deployment_is_assumed_at_its_target() {
    let unrecorded = |deletion| fixture().with_finalizer().with_deletion(deletion);
    let decision = unrecorded(None).decide();
    assert!(decision.must_read_deletion);
    assert_eq!(placements(&decision), HERE);
    let decision = unrecorded(Some(DeletionCause::Object)).decide();
    assert_eq!(placements(&decision), [("edge-1", true)]);
    assert_eq!(decision.finalizers, None);
    let mut without_target = unrecorded(Some(DeletionCause::Object));
    without_target.target = Err(State::new(Truth::False, "SecretNotFound", "no Secret x"));
    let decision = without_target.decide();
    assert_eq!(decision.finalizers, None);
    let line = decision.status.last_message.unwrap();
    for word in ["deletion waits", "no Secret x", names::ORPHAN_ANNOTATION] {
        assert!(line.contains(word), "{line}");
    }
    let orphaned = without_target
        .with_annotation(names::ORPHAN_ANNOTATION, "true")
        .decide();
    assert_eq!(orphaned.finalizers, Some(Vec::new()));
    let events = ["Orphaned", "FinalizerRemoved"];
    assert_eq!(reasons(&orphaned.finalizer_events), events);
    // No placement is recorded any longer.
    let done = fixture().with_placements(&[]).with_deletion(None).decide();
    assert_eq!(done.finalizers, Some(Vec::new()));
}

#[test]
fn orphan_annotation_and_deleted_crd_release_immediately() {
    let with_deletion = |deletion| fixture().with_placements(&HERE).with_deletion(deletion);
    let orphan = with_deletion(None).with_annotation(names::ORPHAN_ANNOTATION, "true");
    for fixture in [orphan, with_deletion(Some(DeletionCause::Crd))] {
        let decision = fixture.decide();
        assert!(decision.orders.is_empty());
        assert_eq!(decision.finalizers, Some(Vec::new()));
        let events = &decision.finalizer_events;
        assert_eq!(reasons(events), ["Orphaned", "FinalizerRemoved"]);
        for word in ["ced-acme", "namespace acme", "edge-1"] {
            assert!(events[0].message.contains(word), "{}", events[0].message);
        }
    }
}

#[test]
fn deletion_waits_for_unavailable_member_and_reports_it() {
    let deleted = fixture()
        .with_placements(&[("edge-1", true)])
        .with_deletion(Some(DeletionCause::Object));
    let decision = deleted.disconnected("edge-1").decide();
    assert_eq!(orders(&decision), [("edge-1", true)]);
    let line = decision.status.last_message.unwrap();
    let explains = line.starts_with("deletion waits: EdgeCluster edge-1");
    assert!(
        explains && line.contains(names::ORPHAN_ANNOTATION),
        "{line}"
    );
}

#[test]
fn events_are_emitted_only_on_change() {
    let mut fixture = reported(installed_report());
    let decision = fixture.decide();
    assert_eq!(reasons(&decision.status_events), ["HelmDeployed", "Ready"]);
    fixture.object.status = Some(decision.status.clone());
    let again = fixture.decide();
    assert_eq!(again.status, decision.status);
    assert!(again.status_events.is_empty());
    let decision = fixture
        .with_report("edge-1", failed(reason::UPGRADE_FAILED))
        .decide();
    assert_eq!(reasons(&decision.status_events), ["HelmDeployFailed"]);
}

#[test]
fn full_member_gets_deletion_orders_only() {
    let mut fixture = fixture().with_placements(&HERE);
    fixture.members.get_mut("edge-1").unwrap().is_full = true;
    let decision = fixture.decide();
    assert!(decision.orders.is_empty());
    assert_eq!(decision.status.phase, Some(DeploymentPhase::Error));
    let long = "x".repeat(ANNOTATION_MAX + 1);
    let removing = fixture
        .with_placements(&[("edge-1", true)])
        .with_annotation(names::DRIFT_IGNORE_ANNOTATION, &long)
        .with_deletion(Some(DeletionCause::Object))
        .decide();
    assert_eq!(orders(&removing), [("edge-1", true)]);
    assert!(removing.orders["edge-1"].annotations.is_empty());
}
