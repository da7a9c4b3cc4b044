use std::collections::BTreeMap;

use jiff::Timestamp;
use krypton_types::kubeconfig::{self, Policy};
use proptest::prelude::*;

use super::*;
use crate::discovery::object_and_secret::tests::kubeconfig;
use crate::discovery::testkit::{self, FixedProvider, listing, origin};
use crate::discovery::{Listing, MemberPrefixes};

fn source(origin: Origin, member: &str, since: Option<i64>) -> Source {
    Source {
        since: since.map(|second| Timestamp::from_second(second).unwrap()),
        ..testkit::source(origin, member)
    }
}

fn running(namespace: &'static str, listing: Listing) -> RunningProvider {
    RunningProvider::new(Arc::new(FixedProvider(Some(namespace))), listing)
}

type Bound = BTreeMap<String, Option<SourceRef>>;

fn bound(name: &str, to: &Origin) -> Bound {
    [(name.to_owned(), Some(to.source_ref()))].into()
}

/// Decides after all providers had time to list.
fn decide(providers: &[RunningProvider], bound: &Bound) -> Membership {
    decide_with(providers, bound, &BTreeSet::new(), false)
}

fn decide_with(
    providers: &[RunningProvider],
    bound: &Bound,
    dismissed: &BTreeSet<NamedOrigin>,
    in_startup_grace: bool,
) -> Membership {
    let providers: Vec<&RunningProvider> = providers.iter().collect();
    let input = BindingInput {
        bound,
        dismissed,
        in_startup_grace,
    };
    bind_sources(&providers, input)
}

/// The source of a member.
fn member(membership: &Membership, name: &str) -> Option<Origin> {
    let member = membership.members.get(name)?;
    Some(member.origin.clone())
}

#[test]
fn older_source_wins_name_conflict() {
    let (one, two) = (origin("one", "edge"), origin("two", "edge"));
    for (from_one, from_two, winner, loser) in [
        (Some(1), Some(2), &one, &two),
        (Some(2), Some(1), &two, &one),
        // A source without a date counts as the youngest. Equal dates are ordered by name.
        (None, Some(9), &two, &one),
        (Some(1), Some(1), &one, &two),
    ] {
        let providers = [
            running("one", listing([source(one.clone(), "edge", from_one)])),
            running("two", listing([source(two.clone(), "edge", from_two)])),
        ];
        let decided = decide(&providers, &Bound::new());
        assert_eq!(member(&decided, "edge").as_ref(), Some(winner));
        let refusal = &decided.refused[loser];
        assert_eq!(refusal.member(), Some("edge"));
        assert_eq!(refusal.reason(), "NameTaken");
        let text = refusal.to_string();
        assert!(text.contains(&winner.to_string()), "{text}");
    }
}

#[test]
fn bound_name_is_never_inherited_by_another_source() {
    let (one, two) = (origin("one", "edge"), origin("two", "edge"));
    let bound = bound("edge", &one);
    let from_two = || running("two", listing([source(two.clone(), "edge", Some(1))]));
    let here = [
        running("one", listing([source(one.clone(), "edge", Some(2))])),
        from_two(),
    ];
    let decided = decide(&here, &bound);
    assert_eq!(member(&decided, "edge"), Some(one));
    assert!(decided.refused.contains_key(&two));

    let gone = [running("one", listing([])), from_two()];
    let decided = decide(&gone, &bound);
    assert_eq!(member(&decided, "edge"), None);
    assert!(decided.refused.contains_key(&two));
    assert_eq!(decided.gone["edge"].reason, reason::SOURCE_GONE);
}

#[test]
fn a_source_never_binds_to_an_existing_member() {
    let one = origin("one", "edge");
    let here = listing([source(one.clone(), "edge", Some(1))]);
    let providers = [running("one", here)];
    let unbound: Bound = [("edge".to_owned(), None)].into();
    let dismissed = [("edge".to_owned(), one.clone())].into();
    for dismissed in [BTreeSet::new(), dismissed] {
        let decided = decide_with(&providers, &unbound, &dismissed, false);
        assert!(decided.members.is_empty() && decided.gone.is_empty());
        let refusal = &decided.refused[&one];
        assert_eq!(refusal.reason(), "SourceNotBound");
        assert_eq!(refusal.member(), Some("edge"));
        let remedy = r#"kubectl patch edgecluster edge --type merge -p '{"spec":{"sourceRef":{"kind":"Secret","name":"edge","namespace":"one"}}}'"#;
        assert!(refusal.to_string().contains(remedy), "{refusal}");
    }
    // An operator sets the source.
    let decided = decide(&providers, &bound("edge", &one));
    assert_eq!(member(&decided, "edge"), Some(one));
}

#[test]
fn home_name_and_invalid_names_are_refused() {
    let sources = [
        source(origin("one", "a"), names::SELF_CLUSTER, Some(1)),
        source(origin("one", "b"), "Not_A_Name", Some(1)),
        source(origin("one", "c"), "", Some(1)),
    ];
    let decided = decide(&[running("one", listing(sources))], &Bound::new());
    assert!(decided.members.is_empty());
    let reason = |name| decided.refused[&origin("one", name)].reason();
    assert_eq!(reason("a"), "NameTaken");
    assert_eq!(reason("b"), "NotAName");
    assert_eq!(reason("c"), "NotAName");
}

#[test]
fn source_of_deleted_edge_cluster_is_refused() {
    let one = origin("one", "edge");
    let here = listing([source(one.clone(), "edge", Some(1))]);
    let providers = [running("one", here)];
    let dismissed = [("edge".to_owned(), one.clone())].into();
    let decided = decide_with(&providers, &Bound::new(), &dismissed, false);
    assert!(decided.members.is_empty());
    let refusal = &decided.refused[&one];
    assert_eq!(refusal.reason(), "Dismissed");
    assert_eq!(refusal.member(), None, "there is nothing to tell it on");
}

/// Outcomes for a member that is bound to a source of `one`, by the state of its provider.
#[test]
fn member_is_gone_only_without_source_or_provider() {
    let one = origin("one", "edge");
    let bound = bound("edge", &one);
    let in_trouble = |sources: Listing| Listing {
        trouble: Some("the watch failed".to_owned()),
        ..sources
    };
    let ended = |sources: Listing| Listing {
        closed: true,
        ..sources
    };
    let here = || listing([source(one.clone(), "edge", Some(1))]);
    let never = Listing::default;

    let unseen = |listing| {
        let decided = decide(&[running("one", listing)], &bound);
        assert!(decided.members.is_empty() && decided.gone.is_empty());
        decided.unseen["edge"].reason
    };
    assert_eq!(unseen(never()), reason::STARTING);
    assert_eq!(unseen(in_trouble(never())), reason::SOURCE_UNAVAILABLE);
    assert_eq!(unseen(ended(never())), reason::PROVIDER_CLOSED);

    let troubled = |listing| {
        let decided = decide(&[running("one", listing)], &bound);
        assert_eq!(member(&decided, "edge"), Some(one.clone()));
        assert!(decided.gone.is_empty() && decided.unseen.is_empty());
        decided.troubled.get("edge").map(|problem| problem.reason)
    };
    assert_eq!(troubled(here()), None);
    let unavailable = Some(reason::SOURCE_UNAVAILABLE);
    assert_eq!(troubled(in_trouble(here())), unavailable);
    assert_eq!(troubled(ended(here())), Some(reason::PROVIDER_CLOSED));

    let gone = |providers: &[RunningProvider]| {
        let decided = decide(providers, &bound);
        assert!(decided.members.is_empty() && decided.unseen.is_empty());
        decided.gone["edge"].reason
    };
    assert_eq!(gone(&[running("one", listing([]))]), reason::SOURCE_GONE);
    let no_provider = reason::PROVIDER_NOT_CONFIGURED;
    assert_eq!(gone(&[running("two", listing([]))]), no_provider);
    assert_eq!(gone(&[]), no_provider);
}

#[test]
fn home_member_needs_no_provider() {
    let home = SourceRef {
        kind: SELF_CLUSTER.to_owned(),
        namespace: None,
        name: None,
    };
    let bound = [(names::SELF_CLUSTER.to_owned(), Some(home))].into();
    let decided = decide(&[running("one", listing([]))], &bound);
    assert!(decided.gone.is_empty() && decided.unseen.is_empty());
}

#[test]
fn only_new_name_waits_for_unlisted_providers() {
    let one = origin("one", "edge");
    let from_one = || running("one", listing([source(one.clone(), "edge", Some(1))]));
    let late = || running("two", Listing::default());
    let none = BTreeSet::new();
    let decided = decide_with(&[from_one(), late()], &Bound::new(), &none, true);
    assert!(decided.waiting && decided.members.is_empty() && decided.refused.is_empty());
    let decided = decide_with(&[from_one(), late()], &Bound::new(), &none, false);
    assert!(!decided.waiting && decided.members.contains_key("edge"));
    let decided = decide_with(&[from_one(), late()], &bound("edge", &one), &none, true);
    assert!(!decided.waiting && decided.members.contains_key("edge"));
    // A provider in trouble is not waited for.
    let troubled = Listing {
        trouble: Some("no CRD".to_owned()),
        ..Listing::default()
    };
    let providers = [from_one(), running("two", troubled)];
    let decided = decide_with(&providers, &Bound::new(), &none, true);
    assert!(decided.members.contains_key("edge"));
}

#[test]
fn prefix_resolves_conflict_and_keeps_bound_names() {
    let secret = origin("one", "edge");
    let plane = Origin {
        kind: SourceKind::TenantControlPlane,
        ..origin("two", "edge")
    };
    let decide_with_prefix = |prefix: &str, bound: &Bound| {
        let prefixes = [(SourceKind::TenantControlPlane, prefix.to_owned())];
        let prefixes = Arc::new(MemberPrefixes::from(prefixes));
        let providers = [("one", &secret), ("two", &plane)].map(|(namespace, origin)| {
            let source = Source {
                is_renamed: false,
                ..source(origin.clone(), "edge", Some(1))
            };
            RunningProvider {
                prefixes: Arc::clone(&prefixes),
                ..running(namespace, listing([source]))
            }
        });
        decide(&providers, bound)
    };
    let mut bindings = bound("edge", &secret);
    let conflict = decide_with_prefix("", &bindings);
    assert_eq!(conflict.refused[&plane].reason(), "NameTaken");
    let resolved = decide_with_prefix("k-", &bindings);
    assert_eq!(member(&resolved, "edge").as_ref(), Some(&secret));
    assert_eq!(member(&resolved, "k-edge").as_ref(), Some(&plane));

    bindings.extend(bound("k-edge", &plane));
    for prefix in ["", "k-", "z-"] {
        let decided = decide_with_prefix(prefix, &bindings);
        assert!(decided.members.keys().eq(["edge", "k-edge"]), "{prefix}");
        assert!(decided.gone.is_empty() && decided.refused.is_empty());
    }
}

#[test]
fn context_of_unreadable_file_is_not_gone() {
    let bindings = bound("edge", &Origin::file("/d/a+b.yaml+arn:c/d"));
    let decide_with = |file: &str, is_readable: bool| {
        let mut source = source(Origin::file(file), "other", None);
        if is_readable {
            let text = kubeconfig("https://a:6443");
            let access = kubeconfig::parse(text.as_bytes(), &Policy::default());
            source.access = Ok(Arc::new(access.unwrap()));
        }
        let running = RunningProvider::new(Arc::new(FixedProvider(None)), listing([source]));
        decide(&[running], &bindings)
    };
    let unread = decide_with("/d/a+b.yaml", false);
    assert_eq!(unread.unseen["edge"].reason, reason::KUBECONFIG_INVALID);
    assert!(unread.gone.is_empty() && unread.members.contains_key("other"));
    for (file, is_readable) in [("/d/a+b.yaml", true), ("/d/b.yaml", false)] {
        let gone = decide_with(file, is_readable);
        assert_eq!(gone.gone["edge"].reason, reason::SOURCE_GONE, "{file}");
        assert!(gone.unseen.is_empty());
    }
}

const NAMESPACES: [&str; 3] = ["one", "two", "three"];
const MEMBERS: [&str; 5] = ["a", "b", "c", names::SELF_CLUSTER, "Not a name"];

fn any_source() -> impl Strategy<Value = Source> {
    let namespace = proptest::sample::select(&NAMESPACES[..]);
    let member = proptest::sample::select(&MEMBERS[..]);
    (namespace, 0..4_u8, member, proptest::option::of(0..3_i64)).prop_map(
        |(namespace, object, member, since)| {
            source(origin(namespace, &object.to_string()), member, since)
        },
    )
}

fn any_listing(sources: Vec<Source>, namespace: &str, state: u8) -> Listing {
    if state == 0 {
        return Listing::default();
    }
    let own = sources
        .into_iter()
        .filter(|source| source.origin.namespace.as_deref() == Some(namespace));
    Listing {
        trouble: (state == 2).then(|| "trouble".to_owned()),
        closed: state == 3,
        ..listing(own)
    }
}

proptest! {
    #[test]
    fn bindings_hold_and_each_source_has_one_outcome(
        sources in proptest::collection::vec(any_source(), 0..12),
        states in proptest::collection::vec(0..4_u8, 3),
        bindings in proptest::collection::btree_map(
            proptest::sample::select(&MEMBERS[..3]),
            proptest::option::of((proptest::sample::select(&NAMESPACES[..]), 0..4_u8)),
            0..4,
        ),
        dismissed in proptest::collection::vec(
            (proptest::sample::select(&MEMBERS[..3]), (proptest::sample::select(&NAMESPACES[..]), 0..4_u8)),
            0..4,
        ),
        in_startup_grace: bool,
    ) {
        let providers: Vec<RunningProvider> = NAMESPACES
            .iter()
            .zip(&states)
            .map(|(namespace, state)| running(namespace, any_listing(sources.clone(), namespace, *state)))
            .collect();
        let origin_of = |(namespace, object): (&str, u8)| origin(namespace, &object.to_string());
        let bound: Bound = bindings
            .into_iter()
            .map(|(name, to)| (name.to_owned(), to.map(|to| origin_of(to).source_ref())))
            .collect();
        // A source with an EdgeCluster was not dismissed.
        let dismissed: BTreeSet<NamedOrigin> = dismissed
            .into_iter()
            .filter(|(name, _)| !bound.contains_key(*name))
            .map(|(name, to)| (name.to_owned(), origin_of(to)))
            .collect();
        let decided = decide_with(&providers, &bound, &dismissed, in_startup_grace);

        for (name, source) in &decided.members {
            prop_assert_eq!(name, &source.member);
            if let Some(Some(to)) = bound.get(name) {
                prop_assert_eq!(&source.origin.source_ref(), to);
            }
            prop_assert!(!decided.refused.contains_key(&source.origin));
            prop_assert!(!dismissed.contains(&(name.clone(), source.origin.clone())));
        }
        let listed = providers.iter().filter_map(|running| running.listing.sources.as_deref());
        for source in listed.flat_map(BTreeMap::values) {
            let is_member = decided
                .members
                .get(&source.member)
                .is_some_and(|member| member.origin == source.origin);
            let refused = decided.refused.contains_key(&source.origin);
            prop_assert!(!(is_member && refused));
            prop_assert!(is_member || refused || decided.waiting);
            if !in_startup_grace {
                prop_assert!(is_member || refused);
            }
        }
        for (name, to) in &bound {
            let places = [
                decided.members.contains_key(name),
                decided.unseen.contains_key(name),
                decided.gone.contains_key(name),
            ];
            let count = places.iter().filter(|is| **is).count();
            // Without a source, the member may have an agent only.
            prop_assert!(count == 1 || (to.is_none() && count == 0), "{} {:?}", name, places);
        }
    }
}

#[test]
fn secret_listed_by_either_provider_stays_member() {
    let secret = origin("fleet", "admin");
    let bound = bound("admin", &secret);
    let by_name = || source(secret.clone(), "admin", Some(1));
    let labelled = || running("fleet", listing([]));
    let member = decide(
        &[labelled(), running("fleet", listing([by_name()]))],
        &bound,
    );
    assert!(member.members.contains_key("admin"));
    assert!(member.gone.is_empty() && member.unseen.is_empty());
    let mut other = by_name();
    other.member = "another-name".to_owned();
    let both = [
        running("fleet", listing([by_name()])),
        running("fleet", listing([other])),
    ];
    let both = decide(&both, &bound);
    assert!(both.members.contains_key("admin") && both.refused.is_empty());
    // One of the providers has not listed yet.
    let member = decide(&[labelled(), running("fleet", Listing::default())], &bound);
    assert!(member.unseen.contains_key("admin"), "{member:?}");
    let member = decide(&[labelled(), labelled()], &bound);
    assert!(member.gone.contains_key("admin"), "{member:?}");
}
