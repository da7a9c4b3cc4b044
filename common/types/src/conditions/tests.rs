use proptest::prelude::*;

use super::*;

fn at(second: i64) -> Timestamp {
    Timestamp::from_second(second).unwrap()
}

fn state(truth: Truth, reason: &str, message: &str) -> State {
    State::new(truth, reason, message)
}

fn ready(truth: Truth) -> ClusterState {
    let reason = if truth == Truth::True {
        reason::INSTALLED
    } else {
        reason::NOT_READY
    };
    ClusterState::from(state(truth, reason, ""))
}

fn failed(reason: &str) -> ClusterState {
    ClusterState {
        ready: state(Truth::False, reason::NOT_READY, "release failed"),
        progress: None,
        error: Some(state(Truth::True, reason, "no space left")),
    }
}

fn fleet<const N: usize>(members: [(&str, ClusterState); N]) -> BTreeMap<String, ClusterState> {
    members
        .into_iter()
        .map(|(name, state)| (name.to_owned(), state))
        .collect()
}

fn foreign() -> Condition {
    Condition {
        type_: "Other".to_owned(),
        status: "True".to_owned(),
        reason: "R".to_owned(),
        message: "m".to_owned(),
        observed_generation: None,
        last_transition_time: Time(at(1)),
    }
}

/// Sets the condition `Ready` at this second.
fn set_ready(
    conditions: &mut Vec<Condition>,
    (truth, reason, message): (Truth, &str, &str),
    generation: i64,
    second: i64,
) -> bool {
    let state = State::new(truth, reason, message);
    set(conditions, "Ready", &state, generation, at(second))
}

#[test]
fn unread_source_is_unknown_and_others_unresolved() {
    for (reason, truth) in [
        (reason::STARTING, Truth::Unknown),
        (reason::SOURCE_UNAVAILABLE, Truth::Unknown),
        (reason::PROFILE_UNAVAILABLE, Truth::False),
        (reason::CLUSTER_STALE, Truth::False),
        (reason::PROVIDER_CLOSED, Truth::False),
    ] {
        assert_eq!(reason::source_truth(reason), truth, "{reason}");
    }
}

#[test]
fn condition_types_are_the_originals_and_read_back() {
    for (kind, cluster, type_) in [
        (Kind::Ready, "edge-1", "ClusterReady/edge-1"),
        (Kind::Progress, "edge-1", "ClusterProgress/edge-1"),
        (Kind::Error, "a.b/c", "ClusterError/a.b/c"),
    ] {
        assert_eq!(condition_type(kind, cluster), type_);
        assert_eq!(parse_condition_type(type_), Some((kind, cluster)));
    }
    for other in [
        "Ready",
        "ClusterReady",
        "ClusterReady/",
        "clusterReady/a",
        "/a",
        "",
    ] {
        assert_eq!(parse_condition_type(other), None, "{other}");
    }
}

#[test]
fn the_transition_time_moves_only_with_the_status() {
    let mut conditions = Vec::new();
    assert!(set_ready(&mut conditions, (Truth::False, "A", "a"), 1, 10));
    assert!(set_ready(&mut conditions, (Truth::False, "B", "b"), 2, 20));
    assert_eq!(conditions[0].last_transition_time, Time(at(10)));
    assert_eq!(conditions[0].reason, "B");
    assert_eq!(conditions[0].observed_generation, Some(2));
    assert!(set_ready(&mut conditions, (Truth::True, "B", "b"), 2, 30));
    assert_eq!(conditions[0].last_transition_time, Time(at(30)));
}

#[test]
fn obsolete_member_conditions_are_removed_preserving_order() {
    let mut conditions = vec![foreign()];
    let installing = ClusterState {
        progress: Some(state(Truth::True, reason::INSTALLING, "")),
        ..failed(reason::INSTALL_FAILED)
    };
    set_cluster(&mut conditions, "edge-1", &installing, 1, at(1));
    set_cluster(&mut conditions, "edge-10", &installing, 1, at(1));
    conditions.push(Condition {
        type_: "Last".to_owned(),
        ..foreign()
    });
    let is_ready = ready(Truth::True);
    assert!(set_cluster(&mut conditions, "edge-1", &is_ready, 1, at(2)));
    let types: Vec<_> = conditions
        .iter()
        .map(|condition| condition.type_.as_str())
        .collect();
    assert_eq!(
        types,
        [
            "Other",
            "ClusterReady/edge-1",
            "ClusterReady/edge-10",
            "ClusterProgress/edge-10",
            "ClusterError/edge-10",
            "Last"
        ]
    );
    assert_eq!(conditions[0], foreign());
}

#[test]
fn a_long_message_is_cut_between_characters() {
    let mut conditions = Vec::new();
    let long = format!("{}€€", "a".repeat(MESSAGE_MAX - 4));
    let ready = (Truth::True, "A", &*long);
    assert!(set_ready(&mut conditions, ready, 1, 1));
    let expected = format!("{}€", "a".repeat(MESSAGE_MAX - 4));
    assert_eq!(conditions[0].message, expected);
    assert!(!set_ready(&mut conditions, ready, 1, 2));
}

#[test]
fn invalid_condition_reason_is_replaced() {
    let mut conditions = Vec::new();
    for bad in ["", "two words", "1st", "A:", "ü", &"A".repeat(1025)] {
        conditions.clear();
        set_ready(&mut conditions, (Truth::True, bad, ""), 1, 1);
        assert_eq!(conditions[0].reason, reason::UNSPECIFIED, "{bad}");
    }
    set_ready(&mut conditions, (Truth::True, "A:b,c_", ""), 1, 1);
    assert_eq!(conditions[0].reason, "A:b,c_");
}

#[test]
fn member_known_only_by_error_has_unknown_readiness() {
    let condition = Condition {
        type_: "ClusterError/edge-1".to_owned(),
        ..foreign()
    };
    let clusters = clusters(&[foreign(), condition]);
    assert_eq!(clusters.len(), 1);
    assert_eq!(clusters["edge-1"].ready.truth, Truth::Unknown);
    assert_eq!(clusters["edge-1"].error, Some(state(Truth::True, "R", "m")));
}

#[test]
fn cluster_state_json_round_trips_in_api_terms() {
    let json = serde_json::to_value(failed(reason::INSTALL_FAILED)).unwrap();
    assert_eq!(json["error"]["truth"], "True");
    assert!(json.get("progress").is_none());
    assert_eq!(
        serde_json::from_value::<ClusterState>(json).unwrap(),
        failed(reason::INSTALL_FAILED)
    );
    assert_eq!(
        serde_json::to_value(Phase::Pending).unwrap(),
        Phase::Pending.to_string()
    );
}

#[test]
fn phase_ready_and_message_follow_the_members() {
    let skipped = ClusterState {
        ready: ready(Truth::True).ready,
        ..failed(reason::CHART_NOT_LOADED)
    };
    let recovered = ClusterState {
        error: Some(state(Truth::False, reason::NO_ERROR, "")),
        ..ready(Truth::True)
    };
    let not_ready = || ready(Truth::False);
    let is_ready = || ready(Truth::True);
    let unknown = || ready(Truth::Unknown);
    let failing = [
        ("a", unknown()),
        ("b", not_ready()),
        ("c", is_ready()),
        ("d", failed(reason::UPGRADE_FAILED)),
        ("e", failed(reason::INSTALL_FAILED)),
    ];
    for (members, skip, expected) in [
        (
            fleet([]),
            false,
            "Pending False NoClusters 0 of 0 clusters ready",
        ),
        (
            fleet([("a", is_ready()), ("b", is_ready())]),
            false,
            "Ready True AllClustersReady 2 of 2 clusters ready",
        ),
        (
            fleet([("a", is_ready()), ("b", not_ready()), ("c", is_ready())]),
            false,
            "Ready False ClustersNotReady 2 of 3 clusters ready; b: NotReady",
        ),
        (
            fleet([("a", is_ready()), ("b", unknown())]),
            false,
            "Ready Unknown ClustersUnknown 1 of 2 clusters ready; b: NotReady",
        ),
        (
            fleet([("a", unknown()), ("b", not_ready())]),
            false,
            "Pending False ClustersNotReady 0 of 2 clusters ready; b: NotReady",
        ),
        (
            fleet(failing),
            true,
            "Error False ClustersNotReady 1 of 5 clusters ready; d: UpgradeFailed: no space left",
        ),
        (
            fleet([("a", skipped.clone())]),
            false,
            "Error False ClustersNotReady 0 of 1 clusters ready; a: ChartNotLoaded: no space left",
        ),
        (
            fleet([("a", skipped)]),
            true,
            "Ready True AllClustersReady 1 of 1 clusters ready",
        ),
        (
            fleet([("a", failed(reason::VERSION_NOT_FOUND))]),
            true,
            "Pending False ClustersNotReady 0 of 1 clusters ready; a: VersionNotFound: no space left",
        ),
        // An error that is over does not count.
        (
            fleet([("a", recovered)]),
            false,
            "Ready True AllClustersReady 1 of 1 clusters ready",
        ),
    ] {
        let summary = summarise(&members, skip);
        let (phase, ready) = (summary.phase, summary.ready);
        let shown = format!("{phase} {} {} {}", ready.truth, ready.reason, ready.message);
        assert_eq!(shown, expected);
    }
}

fn any_state() -> impl Strategy<Value = State> {
    let truth = prop_oneof![Just(Truth::True), Just(Truth::False), Just(Truth::Unknown)];
    let reason = prop_oneof![
        Just(reason::INSTALLED),
        Just(reason::CHART_NOT_LOADED),
        Just(reason::VERSION_INVALID),
        Just(reason::UPGRADE_FAILED),
        Just(reason::NO_ERROR),
    ];
    (truth, reason, ".{0,40}").prop_map(|(truth, reason, message)| state(truth, reason, &message))
}

fn any_cluster_state() -> impl Strategy<Value = ClusterState> {
    let maybe = || proptest::option::of(any_state());
    (any_state(), maybe(), maybe()).prop_map(|(ready, progress, error)| ClusterState {
        ready,
        progress,
        error,
    })
}

fn any_fleet() -> impl Strategy<Value = BTreeMap<String, ClusterState>> {
    proptest::collection::btree_map("[a-c]([-.][a-c])?", any_cluster_state(), 0..5)
}

proptest! {
    #[test]
    fn cluster_states_read_back_from_conditions(fleet in any_fleet()) {
        let mut conditions = vec![foreign()];
        for (name, state) in &fleet {
            set_cluster(&mut conditions, name, state, 1, at(1));
        }
        prop_assert_eq!(clusters(&conditions), fleet);
        prop_assert_eq!(&conditions[0], &foreign());
    }

    #[test]
    fn a_second_time_changes_nothing(
        before in any_fleet(), after in any_cluster_state(),
    ) {
        let mut conditions = vec![foreign()];
        for (name, state) in &before {
            set_cluster(&mut conditions, name, state, 1, at(1));
        }
        set_cluster(&mut conditions, "a", &after, 2, at(2));
        let once = conditions.clone();
        prop_assert!(!set_cluster(&mut conditions, "a", &after, 2, at(3)));
        prop_assert_eq!(conditions, once);
    }

    #[test]
    fn set_cluster_returns_true_only_on_change(
        first in any_cluster_state(), second in any_cluster_state(),
    ) {
        let mut conditions = Vec::new();
        set_cluster(&mut conditions, "a", &first, 1, at(1));
        let before = conditions.clone();
        let changed = set_cluster(&mut conditions, "a", &second, 1, at(2));
        prop_assert_eq!(changed, conditions != before);
    }

    #[test]
    fn other_members_are_never_touched(
        fleet in any_fleet(), state in any_cluster_state(),
    ) {
        let mut conditions = Vec::new();
        for (name, state) in &fleet {
            set_cluster(&mut conditions, name, state, 1, at(1));
        }
        let before = conditions.clone();
        set_cluster(&mut conditions, "z", &state, 9, at(9));
        prop_assert_eq!(&conditions[..before.len()], &before[..]);
    }

    #[test]
    fn ready_is_true_only_when_every_member_is(fleet in any_fleet(), skip: bool) {
        let summary = summarise(&fleet, skip);
        if summary.ready.truth == Truth::True {
            prop_assert!(!fleet.is_empty());
            prop_assert!(fleet.values().all(|state| state.ready.truth == Truth::True));
            prop_assert_eq!(summary.phase, Phase::Ready);
        }
        prop_assert!(summary.ready.message.len() <= MESSAGE_MAX);
    }

    #[test]
    fn any_error_sets_error_phase_without_chart_skip(fleet in any_fleet()) {
        let any_error = fleet
            .values()
            .any(|state| state.error.as_ref().is_some_and(|error| error.truth == Truth::True));
        prop_assert_eq!(summarise(&fleet, false).phase == Phase::Error, any_error);
    }
}
