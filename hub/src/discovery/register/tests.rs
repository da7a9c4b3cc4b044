use std::sync::Arc;

use super::*;
use crate::discovery::testkit::{FixedProvider, listing, origin, source};
use crate::discovery::{Listing, MemberPrefixes, Source, SourceKind};

fn running(sources: Option<&[(&str, &str, &str)]>) -> RunningProvider {
    let listing = sources.map_or_else(Listing::default, |sources| {
        let sources = sources.iter();
        listing(sources.map(|(namespace, name, member)| source(origin(namespace, name), member)))
    });
    RunningProvider::new(Arc::new(FixedProvider(None)), listing)
}

type Bound = BTreeMap<String, Option<SourceRef>>;

fn bound(names: &[&str]) -> Bound {
    let source = |name: &str| Some(origin("krypton", name).source_ref());
    let entry = |name: &&str| ((*name).to_owned(), source(name));
    names.iter().map(entry).collect()
}

/// The next record if no source has departed.
fn next(register: &Register, running: &RunningProvider, bound: &Bound) -> Register {
    register.next(&[running], &BTreeSet::new(), bound)
}

#[test]
fn member_without_edge_cluster_is_dismissed_until_absent() {
    let both = running(Some(&[("krypton", "a", "a"), ("krypton", "b", "b")]));
    let register = next(&Register::default(), &both, &bound(&["a", "b"]));
    assert_eq!(register.entries.len(), 2);
    assert!(register.dismissed(&bound(&["a", "b"])).is_empty());

    let without_b = bound(&["a"]);
    let register = next(&register, &both, &without_b);
    let dismissed = register.dismissed(&without_b);
    assert_eq!(dismissed, [("b".to_owned(), origin("krypton", "b"))].into());

    // The label is removed and added again, faster than the hub polls.
    let departed = [origin("krypton", "b")].into();
    let relabelled = register.next(&[&both], &departed, &without_b);
    assert!(relabelled.dismissed(&without_b).is_empty());
    // Not listed yet after a restart: the source may exist.
    let register = next(&register, &running(None), &without_b);
    assert_eq!(register.dismissed(&without_b).len(), 1);
    // The label is removed and added again.
    let only_a = running(Some(&[("krypton", "a", "a")]));
    let register = next(&next(&register, &only_a, &without_b), &both, &without_b);
    assert!(register.dismissed(&without_b).is_empty());
}

#[test]
fn source_back_before_edge_cluster_deletion_stays_dismissed() {
    let listed = running(Some(&[("krypton", "a", "a")]));
    let away = running(Some(&[]));
    let (present, deleted) = (bound(&["a"]), bound(&[]));
    let register = next(&Register::default(), &listed, &present);
    let register = next(&register, &away, &present);
    // The source returns, and the EdgeCluster is deleted, while no hub runs.
    let dismissed = next(&register, &listed, &deleted).dismissed(&deleted);
    assert_eq!(dismissed, [("a".to_owned(), origin("krypton", "a"))].into());
    // The EdgeCluster is deleted first.
    assert!(next(&register, &away, &deleted).entries.is_empty());
}

#[test]
fn rival_for_dismissed_name_is_dismissed_too() {
    let rivals = running(Some(&[("krypton", "a", "a"), ("elsewhere", "a", "a")]));
    let register = next(&Register::default(), &rivals, &bound(&["a"]));
    let register = next(&register, &rivals, &bound(&[]));
    assert_eq!(register.dismissed(&bound(&[])).len(), 2);
    // Under a different member name, it is a different entry.
    let renamed = running(Some(&[("krypton", "a", "a"), ("elsewhere", "a", "a-2")]));
    let register = next(&register, &renamed, &bound(&[]));
    assert_eq!(register.dismissed(&bound(&[])).len(), 1);
}

#[test]
fn agent_name_keeps_earlier_claimants_dismissed() {
    let rivals = running(Some(&[("krypton", "a", "a"), ("elsewhere", "a", "a")]));
    let register = next(&Register::default(), &rivals, &bound(&["a"]));
    // The EdgeCluster was deleted and recreated for an agent, so it has no source.
    let by_agent = [("a".to_owned(), None)].into();
    let register = next(&register, &rivals, &by_agent);
    assert_eq!(register.dismissed(&by_agent).len(), 2);
    // A later source was not dismissed.
    let later = running(Some(&[("third", "a", "a")]));
    let register = next(&register, &later, &by_agent);
    assert!(register.dismissed(&by_agent).is_empty());
}

#[test]
fn read_register_is_merged_unless_crd_differs() {
    let both = running(Some(&[("krypton", "a", "a"), ("krypton", "b", "b")]));
    let none = BTreeSet::new();
    let seen = Register::default().next(&[&both], &none, &bound(&["a"]));
    let read = Register::default().next(&[&both], &none, &bound(&["b"]));
    assert_eq!(seen.merge(&read).entries.len(), 2);
    let of_another_crd = Register {
        crd: "other".to_owned(),
        ..read
    };
    assert_eq!(seen.merge(&of_another_crd), seen);
}

#[test]
fn register_round_trips_and_rubbish_reads_as_empty() {
    let both = running(Some(&[("krypton", "a", "a"), ("krypton", "b", "c")]));
    let register = Register {
        crd: "u".to_owned(),
        ..Register::default()
    };
    let register = next(&register, &both, &bound(&["a", "c"]));
    assert_eq!(Register::from_json(&register.to_json()), register);
    assert_eq!(Register::from_json("{rubbish"), Register::default());
}

fn dismissed_entry(name: &str, origin: &Origin) -> Register {
    let entry = ((name.to_owned(), origin.clone()), String::new());
    Register {
        entries: [entry].into(),
        ..Register::default()
    }
}

#[test]
fn dismissed_member_stays_away_when_prefix_changes() {
    let edge = origin("krypton", "edge");
    let register = dismissed_entry("k-edge", &edge);
    for (is_renamed, remaining) in [(false, 1), (true, 0)] {
        let source = Source {
            is_renamed,
            ..source(edge.clone(), "edge")
        };
        let prefixes = MemberPrefixes::from([(SourceKind::Secret, "z-".to_owned())]);
        let running = RunningProvider {
            prefixes: Arc::new(prefixes),
            ..RunningProvider::new(Arc::new(FixedProvider(None)), listing([source]))
        };
        let next = next(&register, &running, &bound(&[]));
        assert_eq!(next.dismissed(&bound(&[])).len(), remaining, "{is_renamed}");
    }
}

#[test]
fn unreadable_file_keeps_its_contexts_dismissed() {
    let register = dismissed_entry("edge", &Origin::file("/d/a.yaml+b"));
    for (file, remaining) in [("/d/a.yaml", 1), ("/d/b.yaml", 0)] {
        let sources = listing([source(Origin::file(file), "other")]);
        let running = RunningProvider::new(Arc::new(FixedProvider(None)), sources);
        let next = next(&register, &running, &bound(&[]));
        assert_eq!(next.entries.len(), remaining, "{file}");
    }
}

#[test]
fn only_dismissed_source_has_recorded_uid() {
    let edge = origin("krypton", "a");
    let provider =
        |source: Source| RunningProvider::new(Arc::new(FixedProvider(None)), listing([source]));
    let read = |uid: &str| {
        provider(Source {
            uid: uid.to_owned(),
            ..source(edge.clone(), "a")
        })
    };
    let unread = provider(Source::unread(edge.clone(), "a".to_owned(), String::new()));
    let (present, deleted) = (bound(&["a"]), bound(&[]));
    let uids =
        |register: &Register| -> Vec<String> { register.entries.values().cloned().collect() };
    let member = next(&Register::default(), &read("u"), &present);
    assert_eq!(uids(&member), [""]);

    // The object is recreated and the EdgeCluster deleted before a hub writes. The next hub reads the object by its
    // name later.
    let dismissed = next(&next(&member, &unread, &deleted), &read("v"), &deleted);
    assert_eq!(uids(&dismissed), ["v"]);
    let both = [&read("v"), &unread];
    let dismissed = dismissed.next(&both, &BTreeSet::new(), &deleted);
    assert_eq!(uids(&dismissed), ["v"]);
    // The object is recreated before the dismissal, while its watch fails.
    let mut outdated = read("u");
    outdated.listing.trouble = Some("the watch failed".to_owned());
    let recreated = next(&next(&member, &outdated, &deleted), &read("v"), &deleted);
    assert_eq!(uids(&recreated), ["v"]);
    // The object is recreated after the dismissal was recorded.
    assert!(next(&dismissed, &read("w"), &deleted).entries.is_empty());
    // The member is back.
    assert_eq!(uids(&next(&dismissed, &read("v"), &present)), [""]);
}
