//! Tests each step for given contents of the Secret and the EdgeClusters.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use krypton_crds::edge_cluster::{AgentRoots, EdgeClusterSpec, EdgeClusterStatus, Mode, SourceRef};
use proptest::prelude::*;

use super::*;

fn now() -> Timestamp {
    Timestamp::from_second(1_800_000_000).unwrap()
}

fn old() -> String {
    RootDigest::from_der(b"old").to_string()
}

fn new() -> String {
    RootDigest::from_der(b"new").to_string()
}

fn stage(phase: RotationPhase) -> RotationStage {
    RotationStage {
        phase,
        root: RootDigest::from_der(b"new"),
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

/// A Secret with the member's kubeconfig.
fn source() -> SourceRef {
    SourceRef {
        kind: "Secret".to_owned(),
        namespace: Some("krypton".to_owned()),
        name: Some("a".to_owned()),
    }
}

fn connected(is_connected: bool) -> Condition {
    Condition {
        type_: "Connected".to_owned(),
        status: if is_connected { "True" } else { "False" }.to_owned(),
        reason: String::new(),
        message: String::new(),
        last_transition_time: Time(now()),
        observed_generation: None,
    }
}

fn ready(name: &str) -> EdgeCluster {
    member(name, Some((&[old(), new()], &old())))
}

fn renewed(name: &str) -> EdgeCluster {
    member(name, Some((&[old(), new()], &new())))
}

fn untrusting(name: &str) -> EdgeCluster {
    member(name, Some((&[old()], &old())))
}

fn block_reason(phase: RotationPhase, member: &EdgeCluster) -> Option<BlockReason> {
    let blocking = blocking_members(stage(phase), std::slice::from_ref(member), now());
    blocking.first().map(|member| member.reason)
}

#[test]
fn unfinished_member_is_awaited_with_reason() {
    use BlockReason::{NotConnected, NotRenewed, NotTrusted, RootsUnreported};
    use RotationPhase::{Announced, Steady, Switched};
    let silent = member("a", Some((&[], &old())));
    let silent_renewed = member("a", Some((&[], &new())));
    let never_connected = member("a", None);
    for (member, announced, switched) in [
        (&never_connected, Some(NotConnected), Some(NotConnected)),
        (&silent, Some(RootsUnreported), Some(RootsUnreported)),
        (&silent_renewed, Some(RootsUnreported), None),
        (&untrusting("a"), Some(NotTrusted), Some(NotTrusted)),
        (&ready("a"), None, Some(NotRenewed)),
        (&renewed("a"), None, None),
    ] {
        assert_eq!(block_reason(Steady, member), None);
        assert_eq!(block_reason(Announced, member), announced, "{member:?}");
        assert_eq!(block_reason(Switched, member), switched, "{member:?}");
    }
}

#[test]
fn connected_agent_is_awaited_after_clock_jump() {
    let expired = |mode| {
        let mut member = untrusting("a");
        let status = member.status.as_mut().unwrap();
        status.certificate_expiry = Some(Time(now()));
        status.mode = Some(mode);
        status.conditions = vec![connected(true)];
        block_reason(RotationPhase::Announced, &member)
    };
    assert_eq!(expired(Mode::Agent), Some(BlockReason::NotTrusted));
    // Its agent is gone, and the hub reaches the member itself.
    assert_eq!(expired(Mode::Proxy), None);
}

#[test]
fn excluded_or_agentless_member_is_not_awaited() {
    type Change = fn(&mut EdgeCluster);
    let expire: Change = |m| m.status.as_mut().unwrap().certificate_expiry = Some(Time(now()));
    let leave_only_source: Change = |m| (m.status, m.spec.source_ref) = (None, Some(source()));
    let cases: [(Change, bool); 8] = [
        (|_| (), true),
        (|m| m.spec.banned = true, false),
        (|m| m.metadata.deletion_timestamp = Some(Time(now())), false),
        (|m| m.metadata.name = Some(SELF_CLUSTER.to_owned()), false),
        (expire, false),
        // The agent has enrolled and not connected since: only its EdgeCluster exists.
        (|m| m.status = None, true),
        // A member through a kubeconfig that never had an agent.
        (leave_only_source, false),
        // A member through both a kubeconfig and an agent.
        (|m| m.spec.source_ref = Some(source()), true),
    ];
    for (number, (change, is_awaited)) in cases.into_iter().enumerate() {
        let mut member = member("a", None);
        change(&mut member);
        let reason = block_reason(RotationPhase::Announced, &member);
        let expected = is_awaited.then_some(BlockReason::NotConnected);
        assert_eq!(reason, expected, "{number}");
    }
}

#[test]
fn enrolled_unseen_agent_is_awaited_until_expiry() {
    use BlockReason::{NotConnected, NotRenewed};
    let at = |seconds: i64| Time(now() + jiff::SignedDuration::from_secs(seconds));
    let roots = |issuer: String| AgentRoots {
        trusted: vec![old(), new()],
        issuer: Some(issuer),
    };
    let in_both = [Some(NotConnected); 2];
    let not_renewed = [None, Some(NotRenewed)];
    for (enrolled, seen, issuer, expected) in [
        // With a kubeconfig only.
        (None, None, None, [None; 2]),
        (Some(90), None, None, in_both),
        // A report of a previous agent does not count.
        (Some(90), Some(60), Some(new()), in_both),
        (Some(90), Some(-5), Some(new()), in_both),
        // The agent has connected and renewed since.
        (Some(90), Some(90), Some(old()), not_renewed),
        (Some(60), Some(90), Some(new()), [None; 2]),
        // The hub would no longer admit it.
        (Some(-5), None, None, [None; 2]),
        (Some(-5), Some(-9), Some(old()), [None; 2]),
    ] {
        let mut member = EdgeCluster::new("a", EdgeClusterSpec::default());
        member.spec.source_ref = Some(source());
        member.status = Some(EdgeClusterStatus {
            certificate_expiry: seen.map(at),
            pending_certificate_expiry: enrolled.map(at),
            trusted_roots: issuer.map(roots),
            ..EdgeClusterStatus::default()
        });
        let reasons = [RotationPhase::Announced, RotationPhase::Switched]
            .map(|phase| block_reason(phase, &member));
        assert_eq!(reasons, expected, "{enrolled:?} {seen:?}");
        // Alternatively, a user names the member.
        let lock_out = LockOut {
            root: new(),
            announced: ["a".to_owned()].into(),
            switched: BTreeSet::new(),
        };
        let request = RotationRequest {
            requested: false,
            lock_out,
        };
        let step = step(RotationPhase::Announced, &[member], &request, true);
        assert!(matches!(step, RotationStep::Switch(_)), "{step:?}");
    }
}

fn step(
    phase: RotationPhase,
    members: &[EdgeCluster],
    request: &RotationRequest,
    is_settled: bool,
) -> RotationStep {
    next(stage(phase), request, members, is_settled, now())
}

fn names(members: &[BlockingMember]) -> Vec<&str> {
    members.iter().map(|member| member.name.as_str()).collect()
}

#[test]
fn step_waits_for_all_members_and_pause() {
    use RotationPhase::{Announced, Steady, Switched};
    let idle = RotationRequest::default();
    let requested = RotationRequest {
        requested: true,
        ..RotationRequest::default()
    };
    let (ready, renewed) = ([ready("a"), renewed("b")], [renewed("a"), renewed("b")]);
    assert_eq!(step(Steady, &ready, &idle, true), RotationStep::Rest);
    let announced = step(Steady, &ready, &requested, false);
    assert_eq!(announced, RotationStep::Announce);
    let (switch, finish) = (RotationStep::Switch(vec![]), RotationStep::Finish(vec![]));
    // A second request during a rotation has no effect.
    for request in [&idle, &requested] {
        assert_eq!(step(Announced, &ready, request, false), RotationStep::Rest);
        assert_eq!(step(Announced, &ready, request, true), switch);
        assert_eq!(step(Switched, &renewed, request, false), RotationStep::Rest);
        assert_eq!(step(Switched, &renewed, request, true), finish);
    }
    // A fleet without members rotates too.
    assert_eq!(step(Announced, &[], &idle, true), switch);

    let mixed = [untrusting("c"), ready[0].clone(), untrusting("b")];
    for (phase, members, expected) in [
        (Announced, &mixed[..], &["b", "c"][..]),
        (Switched, &ready[..], &["a"][..]),
    ] {
        let step = step(phase, members, &idle, true);
        assert!(matches!(step, RotationStep::Wait(waiting) if names(&waiting) == expected));
    }
}

#[test]
fn named_member_is_not_awaited_in_that_phase() {
    use RotationPhase::{Announced, Switched};
    let lock_out = |root: String, announced: &[&str], switched: &[&str]| RotationRequest {
        requested: false,
        lock_out: LockOut {
            root,
            announced: announced.iter().map(|name| (*name).to_owned()).collect(),
            switched: switched.iter().map(|name| (*name).to_owned()).collect(),
        },
    };
    let named_before = lock_out(new(), &["a"], &[]);
    let members = [untrusting("a"), renewed("b")];
    assert!(
        matches!(step(Announced, &members, &named_before, true), RotationStep::Switch(out) if names(&out) == ["a"])
    );
    // A locked-out agent cannot return on its own, so the rotation does not wait for it.
    assert!(
        matches!(step(Switched, &members, &named_before, true), RotationStep::Finish(out) if names(&out) == ["a"])
    );
    // The agent has returned in time, and gets time to renew.
    let returned = [ready("a")];
    let waiting = step(Switched, &returned, &named_before, true);
    assert!(matches!(waiting, RotationStep::Wait(_)), "{waiting:?}");
    let named_later = lock_out(new(), &[], &["a"]);
    assert!(
        matches!(step(Switched, &returned, &named_later, true), RotationStep::Finish(out) if names(&out) == ["a"])
    );
    // For another rotation, another member, another phase.
    for request in [
        lock_out(old(), &["a"], &["a"]),
        lock_out(new(), &["b"], &["b"]),
        lock_out(new(), &[], &["a"]),
    ] {
        let waiting = step(Announced, &members, &request, true);
        assert!(matches!(waiting, RotationStep::Wait(_)), "{request:?}");
    }
}

#[test]
fn each_awaited_member_has_remedy() {
    let with = |mut member: EdgeCluster, is_connected: bool| {
        member.status.as_mut().unwrap().conditions = vec![connected(is_connected)];
        blocking_members(stage(RotationPhase::Switched), &[member], now())
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
                2 => untrusting(&name),
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
        let request = RotationRequest {
            requested: false,
            lock_out: LockOut { root: new(), announced: names.clone(), switched: names.clone() },
        };
        let phase = if switched { RotationPhase::Switched } else { RotationPhase::Announced };
        let blocking: BTreeSet<String> = blocking_members(stage(phase), &members, now())
            .into_iter().map(|member| member.name).collect();
        match next(stage(phase), &request, &members, true, now()) {
            RotationStep::Wait(waiting) => prop_assert!(waiting.iter().all(|member| !names.contains(&member.name))),
            RotationStep::Switch(out) | RotationStep::Finish(out) => {
                let out: BTreeSet<String> = out.into_iter().map(|member| member.name).collect();
                prop_assert!(out.is_subset(&names));
                prop_assert_eq!(out, blocking);
            }
            step => prop_assert!(false, "{:?}", step),
        }
    }
}
