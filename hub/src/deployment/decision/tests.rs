use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use krypton_common::conditions::ClusterState;
use krypton_common::deployment::DeploymentReport;
use krypton_crds::krypton_deployment::KryptonDeploymentSpec;

use super::*;

const UID: &str = "uid-of-acme";

/// One object, and what members say of it.
struct World {
    object: KryptonDeployment,
    aim: Result<&'static str, State>,
    at: BTreeMap<String, At>,
    deletion: Deletion,
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
        aim: Ok("edge-1"),
        at: BTreeMap::new(),
        deletion: Deletion::NotRead,
    }
    .member("edge-1")
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
    fn member(mut self, name: &str) -> Self {
        let at = At {
            cluster: Some(connected(Truth::True)),
            ..At::default()
        };
        self.at.insert(name.to_owned(), at);
        self
    }

    fn says(mut self, member: &str, report: DeploymentReport) -> Self {
        let fresh = true;
        self.at.get_mut(member).unwrap().said = Some(Said { report, fresh });
        self
    }

    /// The object is as a decision has marked it.
    fn marked(mut self, places: &str) -> Self {
        self.object.metadata.finalizers = Some(vec![names::DEPLOYMENT_FINALIZER.to_owned()]);
        self.annotated(names::DEPLOYED_ON_ANNOTATION, places)
    }

    fn annotated(mut self, name: &str, value: &str) -> Self {
        let annotations = self.object.metadata.annotations.get_or_insert_default();
        annotations.insert(name.to_owned(), value.to_owned());
        self
    }

    fn deleted(mut self, deletion: Deletion) -> Self {
        self.object.metadata.deletion_timestamp = Some(Time(Timestamp::UNIX_EPOCH));
        self.deletion = deletion;
        self
    }

    fn decide(&self) -> Decision {
        decide(&View {
            object: &self.object,
            aim: self.aim.clone().map(|cluster| Place {
                cluster: cluster.to_owned(),
                key: None,
            }),
            at: self.at.clone(),
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

/// Where it is ordered to be, and where to go.
fn orders(decision: &Decision) -> Vec<(&str, bool)> {
    let each = decision.orders.iter();
    each.map(|(cluster, order)| (cluster.as_str(), order.remove))
        .collect()
}

fn reasons(news: &[News]) -> Vec<&str> {
    news.iter().map(|news| news.reason).collect()
}

#[test]
fn it_is_put_on_record_before_it_is_ordered() {
    let decision = world().decide();
    let marks = decision.marks.unwrap();
    assert_eq!(marks.finalizers, [names::DEPLOYMENT_FINALIZER]);
    assert_eq!(marks.places.as_deref(), Some("edge-1"));
    assert!(decision.orders.is_empty(), "{:?}", decision.orders);
    let told = ["AccountValidated", "FinalizerAdded", "Routing"];
    assert_eq!(reasons(&decision.with_marks), told);
    // Nor by half a record.
    for half in [
        world().annotated(names::DEPLOYED_ON_ANNOTATION, "edge-1"),
        world().marked("edge-0"),
    ] {
        let decision = half.decide();
        assert!(decision.orders.is_empty(), "{:?}", decision.orders);
        assert!(decision.marks.is_some());
    }
    let decision = world().marked("edge-1").decide();
    assert_eq!(decision.marks, None);
    assert_eq!(orders(&decision), [("edge-1", false)]);
    let order = &decision.orders["edge-1"];
    assert_eq!((order.uid.as_str(), order.generation), (UID, 3));
    let drift = order.drift.unwrap();
    assert_eq!((drift.mode, drift.interval_seconds), (DriftMode::Heal, 60));
}

#[test]
fn what_its_member_says_is_what_the_object_says() {
    let failed = |why| report((Truth::False, reason::NOT_READY), Some(why));
    let older = DeploymentReport {
        observed_generation: 2,
        ..well()
    };
    let anothers = DeploymentReport {
        uid: "another".to_owned(),
        ..well()
    };
    let (truth, phase) = (Truth::False, DeploymentPhase::Error);
    for (said, expected, in_phase) in [
        (well(), (Truth::True, "Deployed"), DeploymentPhase::Ready),
        (older, (truth, "NotReady"), DeploymentPhase::Pending),
        (anothers, (truth, "NotReady"), DeploymentPhase::Pending),
        (gone(), (truth, "NotReady"), DeploymentPhase::Pending),
        (
            report((truth, reason::INSTALLING), None),
            (truth, "NotReady"),
            DeploymentPhase::Pending,
        ),
        (
            report((Truth::Unknown, reason::NOT_READY), None),
            (Truth::Unknown, "NotReady"),
            DeploymentPhase::Pending,
        ),
        (failed(reason::INSTALL_FAILED), (truth, "HelmFailed"), phase),
        (
            failed(reason::CHART_NOT_LOADED),
            (truth, "HelmFailed"),
            phase,
        ),
        // What is nobody's failure of helm keeps its own word.
        (
            failed(reason::RELEASE_IN_USE),
            (truth, "ReleaseInUse"),
            phase,
        ),
        // What runs is well, and what was wanted failed.
        (
            report(
                (Truth::True, reason::INSTALLED),
                Some(reason::UPGRADE_FAILED),
            ),
            (truth, "HelmFailed"),
            phase,
        ),
    ] {
        let decision = world()
            .marked("edge-1")
            .says("edge-1", said.clone())
            .decide();
        let (truth, why) = expected;
        assert_eq!(ready(&decision), (truth, why.to_owned()), "{said:?}");
        assert_eq!(decision.status.phase, Some(in_phase), "{said:?}");
    }
}

#[test]
fn a_member_that_is_not_heard_makes_it_unknown_and_takes_nothing_away() {
    let mut away = world().marked("edge-1").says("edge-1", well());
    away.at.get_mut("edge-1").unwrap().cluster = Some(connected(Truth::False));
    let decision = away.decide();
    assert_eq!(
        ready(&decision),
        (Truth::Unknown, "EdgeUnavailable".to_owned())
    );
    assert_eq!(orders(&decision), [("edge-1", false)]);
    let why = || State::new(Truth::False, "SecretNotFound", "there is no Secret");
    for (aim, account) in [(Err(why()), "acme"), (Ok("edge-1"), "")] {
        let mut world = world().marked("edge-1").says("edge-1", well());
        world.aim = aim;
        world.object.spec.account.name = account.to_owned();
        let decision = world.decide();
        assert_eq!(decision.status.phase, Some(DeploymentPhase::Error));
        assert_eq!(orders(&decision), [("edge-1", false)]);
        assert_eq!(decision.marks, None);
        // Who may not aim at it any more gets nothing of it, and nothing is removed.
        let cluster = world
            .at
            .get_mut("edge-1")
            .unwrap()
            .cluster
            .as_mut()
            .unwrap();
        cluster.allowed = krypton_common::allowed::Allowed::new(Some(&[]));
        let decision = world.decide();
        assert!(orders(&decision).is_empty());
        assert_eq!(decision.marks, None);
    }
}

#[test]
fn where_it_was_before_it_goes_only_when_it_is_well_where_it_is_now() {
    let moved = || world().member("edge-0").marked("edge-0,edge-1");
    let both = [("edge-0", false), ("edge-1", false)];
    let removed = [("edge-0", true), ("edge-1", false)];
    assert_eq!(orders(&moved().decide()), both);
    let installing = report((Truth::False, reason::INSTALLING), None);
    assert_eq!(orders(&moved().says("edge-1", installing).decide()), both);
    let here = moved().says("edge-1", well());
    let decision = here.decide();
    assert_eq!(orders(&decision), removed);
    assert_eq!(decision.marks, None);
    // What was said before the hub or the speaker was another is not enough.
    let mut stale = moved().says("edge-1", well());
    let said = &mut stale.at.get_mut("edge-1").unwrap().said;
    said.as_mut().unwrap().fresh = false;
    assert_eq!(orders(&stale.decide()), both);

    let decision = here.says("edge-0", gone()).decide();
    assert_eq!(decision.marks.unwrap().places.as_deref(), Some("edge-1"));
    assert_eq!(reasons(&decision.with_marks), ["HelmUninstalled"]);
    // Gone by an order of an earlier generation, and perhaps there again since.
    let before = DeploymentReport {
        observed_generation: 2,
        ..gone()
    };
    let decision = moved()
        .says("edge-1", well())
        .says("edge-0", before)
        .decide();
    assert_eq!(decision.marks, None);
    // Nothing can be ordered of a member that is no more: the annotation lets go.
    let mut lost = moved().says("edge-1", well());
    lost.at.get_mut("edge-0").unwrap().cluster = None;
    let decision = lost.decide();
    assert_eq!(orders(&decision), [("edge-1", false)]);
    assert_eq!(decision.marks, None);
    let line = decision.status.last_message.unwrap();
    assert!(
        line.contains("edge-0") && line.contains(names::ORPHAN_ANNOTATION),
        "{line}"
    );
    let decision = lost.annotated(names::ORPHAN_ANNOTATION, "true").decide();
    assert_eq!(decision.marks.unwrap().places.as_deref(), Some("edge-1"));
    assert_eq!(reasons(&decision.with_marks), ["Orphaned"]);
}

#[test]
fn a_deletion_is_read_twice_then_ordered_and_over_when_its_member_says_so() {
    let deleted = |deletion| {
        world()
            .marked("edge-1")
            .says("edge-1", well())
            .deleted(deletion)
    };
    let decision = deleted(Deletion::NotRead).decide();
    assert!(decision.read);
    assert_eq!(orders(&decision), [("edge-1", false)]);
    assert_eq!(decision.marks, None);
    let decision = deleted(Deletion::OfTheObject).decide();
    assert!(!decision.read);
    assert_eq!(orders(&decision), [("edge-1", true)]);
    assert_eq!(decision.marks, None);
    assert_eq!(reasons(&decision.with_status), ["DeleteStarted"]);
    let decision = deleted(Deletion::OfTheObject)
        .says("edge-1", gone())
        .decide();
    let marks = decision.marks.unwrap();
    assert_eq!((marks.finalizers.len(), marks.places), (0, None));
    let told = ["HelmUninstalled", "FinalizerRemoved"];
    assert_eq!(reasons(&decision.with_marks), told);
    // That it was not read again is as good as that it is not so.
    let decision = deleted(Deletion::NotRead).says("edge-1", gone()).decide();
    assert_eq!(decision.marks, None);
    // Nothing was ever ordered.
    let mut never = world().deleted(Deletion::NotRead);
    never.object.metadata.finalizers = Some(vec![names::DEPLOYMENT_FINALIZER.to_owned()]);
    let decision = never.decide();
    assert!(decision.marks.unwrap().finalizers.is_empty());
}

#[test]
fn the_annotation_and_a_deleted_crd_let_go_at_once_and_say_what_stays() {
    let deleted = |deletion| world().marked("edge-1").deleted(deletion);
    let orphan = deleted(Deletion::NotRead).annotated(names::ORPHAN_ANNOTATION, "true");
    for world in [orphan, deleted(Deletion::OfTheCrd)] {
        let decision = world.decide();
        assert!(decision.orders.is_empty());
        assert!(decision.marks.unwrap().finalizers.is_empty());
        assert_eq!(
            reasons(&decision.with_marks),
            ["Orphaned", "FinalizerRemoved"]
        );
        let said = &decision.with_marks[0].message;
        for word in ["ced-acme", "namespace acme", "edge-1"] {
            assert!(said.contains(word), "{said}");
        }
    }
}

#[test]
fn a_deletion_waits_for_a_member_that_is_away_and_says_so() {
    let mut away = world().marked("edge-1").deleted(Deletion::OfTheObject);
    away.at.get_mut("edge-1").unwrap().cluster = Some(connected(Truth::False));
    let decision = away.decide();
    assert_eq!(orders(&decision), [("edge-1", true)]);
    let line = decision.status.last_message.unwrap();
    assert!(
        line.starts_with("deletion waits: EdgeCluster edge-1"),
        "{line}"
    );
    assert!(line.contains(names::ORPHAN_ANNOTATION), "{line}");
}

#[test]
fn it_is_told_when_it_is_another_and_not_again() {
    let mut world = world().marked("edge-1").says("edge-1", well());
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
fn places_are_read_as_they_were_written_and_what_is_none_is_left_out() {
    let place = |cluster: &str, key: Option<&str>| Place {
        cluster: cluster.to_owned(),
        key: key.map(str::to_owned),
    };
    let all = [place("edge-1", None), place("a.b", Some("admin.conf"))];
    let text = recorded(&all).unwrap();
    assert_eq!(text, "edge-1,a.b:admin.conf");
    assert_eq!(places(&world().marked(&text).object), all);
    let odd = world().marked(" edge-1 ,,Not A Name,a.b:admin.conf");
    assert_eq!(places(&odd.object), all);
    assert_eq!(recorded(&[]), None);
}

#[test]
fn of_more_than_a_member_takes_the_rest_is_told_and_not_ordered() {
    let mut world = world().marked("edge-1");
    world.at.get_mut("edge-1").unwrap().full = true;
    let decision = world.decide();
    assert!(decision.orders.is_empty());
    assert_eq!(decision.status.phase, Some(DeploymentPhase::Error));
}
