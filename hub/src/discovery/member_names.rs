//! Determines the member name of each source. A source that has a member keeps its name when the prefix of its
//! provider changes. Pure.

use std::collections::{BTreeMap, BTreeSet};

use krypton_crds::edge_cluster::SourceRef;

use super::{NamedOrigin, Origin, RunningProvider, Source};

/// The name of the existing or deleted EdgeCluster of each source.
pub(super) struct MemberNames<'a>(BTreeMap<Origin, Vec<&'a str>>);

impl<'a> MemberNames<'a> {
    pub(super) fn new(
        bound: &'a BTreeMap<String, Option<SourceRef>>,
        dismissed: &'a BTreeSet<NamedOrigin>,
    ) -> Self {
        let bound = bound.iter().filter_map(|(name, source)| {
            let origin = Origin::from_source_ref(source.as_ref()?)?;
            Some((origin, name.as_str()))
        });
        let dismissed = dismissed.iter();
        let dismissed = dismissed.map(|(name, origin)| (origin.clone(), name.as_str()));
        let mut names: BTreeMap<Origin, Vec<&str>> = BTreeMap::new();
        for (origin, name) in bound.chain(dismissed) {
            names.entry(origin).or_default().push(name);
        }
        Self(names)
    }

    /// Returns the member name of a source of this provider.
    pub(super) fn name(&self, running: &RunningProvider, source: &Source) -> String {
        let requested = source.requested_name(running.prefix(source.origin.kind));
        let names = self.0.get(&source.origin).filter(|_| !source.is_renamed);
        let names = names.map_or(&[][..], Vec::as_slice);
        match names.first() {
            Some(first) if !names.contains(&requested.as_str()) => (*first).to_owned(),
            _ => requested,
        }
    }
}

#[cfg(test)]
mod tests;
