//! Tests each step for given contents of the Secret and the EdgeClusters.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use krypton_crds::edge_cluster::{AgentRoots, EdgeClusterSpec, EdgeClusterStatus, SourceRef};
use proptest::prelude::*;

use super::*;

fn now() -> Timestamp {
    Timestamp::from_second(1_800_000_000).unwrap()
}

fn old() -> String {
    RootDigest::of(b"old").to_string()
}

fn new() -> String {
    RootDigest::of(b"new").to_string()
}

fn stage(phase: Phase) -> Stage {
    Stage {
        phase,
        root: RootDigest::of(b"new"),
    }
}

fn member(name: &str, roots: Option<(&[String], &str)>) -> EdgeCluster {
    let mut member = EdgeCluster::new(name, EdgeClusterSpec::default());
    member.status = Some(EdgeClusterStatus {
        certificate_expiry: Some(Time(now() + Duration::from_secs(60))),
        trusted_roots: roots.map(|(trusted, issuer)| AgentRoots {
            trusted: trusted.to_vec(),
            issuer: Some(issuer.to_owned()),
        }),
        ..EdgeClusterStatus::default()
    });
    member
}

fn ready(name: &str) -> EdgeCluster {
    member(name, Some((&[old(), new()], &old())))
}

fn renewed(name: &str) -> EdgeCluster {
    member(name, Some((&[old(), new()], &new())))
}

fn ignorant(name: &str) -> EdgeCluster {
    member(name, Some((&[old()], &old())))
}

fn why(phase: Phase, member: &EdgeCluster) -> Option<Why> {
    let awaited = awaited(stage(phase), std::slice::from_ref(member), now());
    awaited.first().map(|member| member.why)
}

#[test]
fn unfinished_member_is_awaited_with_reason() {
    use Phase::{Announced, Steady, Switched};
    use Why::{NotHeard, NotRenewed, NotTrusted, SaysNothing};
    let silent = member("a", Some((&[], &old())));
    let silent_renewed = member("a", Some((&[], &new())));
    let unheard = member("a", None);
    for (member, announced, switched) in [
        (&unheard, Some(NotHeard), Some(NotHeard)),
        (&silent, Some(SaysNothing), Some(SaysNothing)),
        (&silent_renewed, Some(SaysNothing), None),
        (&ignorant("a"), Some(NotTrusted), Some(NotTrusted)),
        (&ready("a"), None, Some(NotRenewed)),
        (&renewed("a"), None, None),
    ] {
        assert_eq!(why(Steady, member), None);
        assert_eq!(why(Announced, member), announced, "{member:?}");
        assert_eq!(why(Switched, member), switched, "{member:?}");
    }
}

#[test]
fn excluded_or_agentless_member_is_not_awaited() {
    let change = |change: &dyn Fn(&mut EdgeCluster)| {
        let mut member = member("a", None);
        change(&mut member);
        why(Phase::Announced, &member)
    };
    let source = || SourceRef {
        kind: "Secret".to_owned(),
        namespace: Some("krypton".to_owned()),
        name: Some("a".to_owned()),
    };
    assert_eq!(change(&|_| ()), Some(Why::NotHeard));
    assert_eq!(change(&|m| m.spec.banned = true), None);
    assert_eq!(
        change(&|m| m.metadata.deletion_timestamp = Some(Time(now()))),
        None
    );
    assert_eq!(
        change(&|m| m.metadata.name = Some("self-cluster".to_owned())),
        None
    );
    assert_eq!(
        change(&|m| m.status.as_mut().unwrap().certificate_expiry = Some(Time(now()))),
        None
    );
    // The agent has enrolled and not connected since: only its EdgeCluster exists.
    assert_eq!(change(&|m| m.status = None), Some(Why::NotHeard));
    // A member through a kubeconfig that never had an agent.
    assert_eq!(
        change(&|m| {
            m.status = None;
            m.spec.source_ref = Some(source());
        }),
        None
    );
    // A member through both a kubeconfig and an agent.
    assert_eq!(
        change(&|m| m.spec.source_ref = Some(source())),
        Some(Why::NotHeard)
    );
}

#[test]
fn enrolled_unseen_agent_is_awaited_until_expiry() {
    use Why::{NotHeard, NotRenewed};
    let at = |seconds: i64| Time(now() + jiff::SignedDuration::from_secs(seconds));
    let roots = |issuer: String| AgentRoots {
        trusted: vec![old(), new()],
        issuer: Some(issuer),
    };
    let both = |why| [Some(why); 2];
    for (enrolled, seen, roots, expected) in [
        // With a kubeconfig only.
        (None, None, None, [None; 2]),
        (Some(90), None, None, both(NotHeard)),
        // A report of a previous agent does not count.
        (Some(90), Some(60), Some(roots(new())), both(NotHeard)),
        (Some(90), Some(-5), Some(roots(new())), both(NotHeard)),
        // The agent has connected and renewed since.
        (
            Some(90),
            Some(90),
            Some(roots(old())),
            [None, Some(NotRenewed)],
        ),
        (Some(60), Some(90), Some(roots(new())), [None; 2]),
        // The hub would no longer admit it.
        (Some(-5), None, None, [None; 2]),
        (Some(-5), Some(-9), Some(roots(old())), [None; 2]),
    ] {
        let mut member = EdgeCluster::new("a", EdgeClusterSpec::default());
        member.spec.source_ref = Some(SourceRef {
            kind: "Secret".to_owned(),
            namespace: Some("krypton".to_owned()),
            name: Some("a".to_owned()),
        });
        member.status = Some(EdgeClusterStatus {
            certificate_expiry: seen.map(at),
            pending_certificate_expiry: enrolled.map(at),
            trusted_roots: roots,
            ..EdgeClusterStatus::default()
        });
        let found = [Phase::Announced, Phase::Switched].map(|phase| why(phase, &member));
        assert_eq!(found, expected, "{enrolled:?} {seen:?}");
        // Alternatively, a user names the member.
        let named = LockOut {
            root: new(),
            announced: ["a".to_owned()].into(),
            switched: BTreeSet::new(),
        };
        let wishes = Wishes {
            requested: false,
            lock_out: named,
        };
        let step = step(Phase::Announced, &[member], &wishes, true);
        assert!(matches!(step, Step::Switch(_)), "{step:?}");
    }
}

fn step(phase: Phase, members: &[EdgeCluster], wishes: &Wishes, settled: bool) -> Step {
    next(stage(phase), wishes, members, settled, now())
}

fn names(members: &[Awaited]) -> Vec<&str> {
    members.iter().map(|member| member.name.as_str()).collect()
}

#[test]
fn step_waits_for_all_members_and_pause() {
    use Phase::{Announced, Steady, Switched};
    let idle = Wishes::default();
    let asked = Wishes {
        requested: true,
        ..Wishes::default()
    };
    let (ready, renewed) = ([ready("a"), renewed("b")], [renewed("a"), renewed("b")]);
    assert_eq!(step(Steady, &ready, &idle, true), Step::Rest);
    assert_eq!(step(Steady, &ready, &asked, false), Step::Announce);
    // A second request during a rotation has no effect.
    for wishes in [&idle, &asked] {
        assert_eq!(step(Announced, &ready, wishes, false), Step::Rest);
        assert_eq!(step(Announced, &ready, wishes, true), Step::Switch(vec![]));
        assert_eq!(step(Switched, &renewed, wishes, false), Step::Rest);
        assert_eq!(step(Switched, &renewed, wishes, true), Step::Finish(vec![]));
    }
    // A fleet without members rotates too.
    assert_eq!(step(Announced, &[], &idle, true), Step::Switch(vec![]));

    let Step::Wait(waiting) = step(
        Announced,
        &[ignorant("c"), ready[0].clone(), ignorant("b")],
        &idle,
        true,
    ) else {
        panic!("two are waited for");
    };
    assert_eq!(names(&waiting), ["b", "c"]);
    let Step::Wait(waiting) = step(Switched, &ready, &idle, true) else {
        panic!("one is waited for");
    };
    assert_eq!(names(&waiting), ["a"]);
}

#[test]
fn named_member_is_not_awaited_in_that_phase() {
    use Phase::{Announced, Switched};
    let lock_out = |root: String, announced: &[&str], switched: &[&str]| Wishes {
        requested: false,
        lock_out: LockOut {
            root,
            announced: announced.iter().map(|name| (*name).to_owned()).collect(),
            switched: switched.iter().map(|name| (*name).to_owned()).collect(),
        },
    };
    let before = lock_out(new(), &["a"], &[]);
    let members = [ignorant("a"), renewed("b")];
    let Step::Switch(out) = step(Announced, &members, &before, true) else {
        panic!("nobody else is waited for");
    };
    assert_eq!(names(&out), ["a"]);
    // A locked-out agent cannot return on its own, so the rotation does not wait for it.
    assert!(
        matches!(step(Switched, &members, &before, true), Step::Finish(out) if names(&out) == ["a"])
    );
    // The agent has returned in time, and gets time to renew.
    let back = [ready("a")];
    assert!(matches!(
        step(Switched, &back, &before, true),
        Step::Wait(_)
    ));
    let later = lock_out(new(), &[], &["a"]);
    assert!(
        matches!(step(Switched, &back, &later, true), Step::Finish(out) if names(&out) == ["a"])
    );
    // For another rotation, another member, another phase.
    for wishes in [
        lock_out(old(), &["a"], &["a"]),
        lock_out(new(), &["b"], &["b"]),
        lock_out(new(), &[], &["a"]),
    ] {
        assert!(
            matches!(step(Announced, &members, &wishes, true), Step::Wait(_)),
            "{wishes:?}"
        );
    }
}

#[test]
fn each_awaited_member_has_remedy() {
    let with = |mut member: EdgeCluster, connected: bool| {
        let condition = Condition {
            type_: "Connected".to_owned(),
            status: if connected { "True" } else { "False" }.to_owned(),
            last_transition_time: Time(now()),
            message: String::new(),
            observed_generation: None,
            reason: "x".to_owned(),
        };
        member.status.as_mut().unwrap().conditions = vec![condition];
        awaited(stage(Phase::Switched), &[member], now())
            .remove(0)
            .remedy()
    };
    assert!(with(member("a", None), false).contains("delete EdgeCluster a"));
    assert!(with(member("a", Some((&[], &old()))), true).contains("upgrade"));
    assert!(with(ready("a"), true).contains("log"));
    assert!(with(ready("a"), false).contains("delete EdgeCluster a"));
}

proptest! {
    #[test]
    fn only_named_members_are_locked_out(
        kinds in proptest::collection::vec(0_u8..6, 0..8),
        named in proptest::collection::btree_set(0_usize..8, 0..8),
        switched: bool,
    ) {
        let members: Vec<EdgeCluster> = kinds.iter().enumerate().map(|(index, kind)| {
            let name = format!("edge-{index}");
            match kind {
                0 => member(&name, None),
                1 => member(&name, Some((&[], &old()))),
                2 => ignorant(&name),
                3 => ready(&name),
                4 => renewed(&name),
                _ => {
                    let mut member = renewed(&name);
                    let until = Time(now() + Duration::from_secs(90));
                    member.status.as_mut().unwrap().pending_certificate_expiry = Some(until);
                    member
                }
            }
        }).collect();
        let names: BTreeSet<String> = named.iter().map(|index| format!("edge-{index}")).collect();
        let wishes = Wishes {
            requested: false,
            lock_out: LockOut { root: new(), announced: names.clone(), switched: names.clone() },
        };
        let phase = if switched { Phase::Switched } else { Phase::Announced };
        let would_be: BTreeSet<String> = awaited(stage(phase), &members, now())
            .into_iter().map(|member| member.name).collect();
        match next(stage(phase), &wishes, &members, true, now()) {
            Step::Wait(waiting) => prop_assert!(waiting.iter().all(|member| !names.contains(&member.name))),
            Step::Switch(out) | Step::Finish(out) => {
                let out: BTreeSet<String> = out.into_iter().map(|member| member.name).collect();
                prop_assert!(out.is_subset(&names));
                prop_assert_eq!(out, would_be);
            }
            step => prop_assert!(false, "{:?}", step),
        }
    }
}
