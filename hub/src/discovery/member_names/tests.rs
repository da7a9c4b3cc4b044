use std::sync::Arc;

use super::*;
use crate::discovery::testkit::{self, FixedProvider, origin};
use crate::discovery::{Listing, SourceKind};

/// A provider with this prefix.
fn running(prefix: &str) -> RunningProvider {
    let prefixes = [(SourceKind::Secret, prefix.to_owned())];
    RunningProvider {
        prefixes: Arc::new(prefixes.into()),
        ..RunningProvider::new(Arc::new(FixedProvider(None)), Listing::default())
    }
}

fn source(is_renamed: bool) -> Source {
    Source {
        is_renamed,
        ..testkit::source(origin("one", "edge"), "edge")
    }
}

#[test]
fn prefix_names_new_members_only() {
    let (one, two) = (origin("one", "edge"), origin("two", "edge"));
    for (bound, dismissed, is_renamed, prefix, expected) in [
        (vec![], vec![], false, "", "edge"),
        (vec![], vec![], false, "k-", "k-edge"),
        (vec![], vec![], true, "k-", "edge"),
        // The prefix is new, changed or removed.
        (vec![("edge", &one)], vec![], false, "k-", "edge"),
        (vec![("k-edge", &one)], vec![], false, "z-", "k-edge"),
        (vec![("k-edge", &one)], vec![], false, "", "k-edge"),
        // A user deleted the EdgeCluster before the change.
        (vec![], vec![("k-edge", &one)], false, "z-", "k-edge"),
        (vec![("a", &one)], vec![("b", &one)], false, "k-", "a"),
        // The requested name comes first.
        (
            vec![("a", &one), ("k-edge", &one)],
            vec![],
            false,
            "k-",
            "k-edge",
        ),
        // Only the source itself keeps its name, and an annotation renames it.
        (
            vec![("edge", &two)],
            vec![("a", &two)],
            false,
            "k-",
            "k-edge",
        ),
        (vec![("a", &one)], vec![], true, "k-", "edge"),
    ] {
        let bound = bound.into_iter();
        let bound = bound.map(|(name, to)| (name.to_owned(), Some(to.source_ref())));
        let bound: BTreeMap<_, _> = bound.collect();
        let dismissed = dismissed.into_iter();
        let dismissed = dismissed.map(|(name, of): (&str, &Origin)| (name.to_owned(), of.clone()));
        let dismissed: BTreeSet<_> = dismissed.collect();
        let names = MemberNames::new(&bound, &dismissed);
        let name = names.name(&running(prefix), &source(is_renamed));
        assert_eq!(
            name, expected,
            "{bound:?} {dismissed:?} {is_renamed} {prefix}"
        );
    }
}
