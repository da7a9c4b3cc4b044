//! Which kinds a cluster serves, and where their objects are.

use std::collections::BTreeMap;
use std::time::Duration;

use krypton_runtime::clock::BootTime;

use super::object::ObjectId;

/// Asked again after so long.
const FRESH_FOR: Duration = Duration::from_secs(30 * 60);

/// Where the objects of a kind are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Place {
    /// As paths have it.
    pub(super) plural: String,
    pub(super) namespaced: bool,
}

/// By group and version; a kind that is not among those of a known one is not served.
#[derive(Debug, Default)]
pub(super) struct Kinds(BTreeMap<String, Served>);

#[derive(Debug)]
struct Served {
    since: BootTime,
    kinds: BTreeMap<String, Place>,
}

impl Kinds {
    pub(super) fn of(&self, id: &ObjectId, now: BootTime) -> Option<&Place> {
        let served = self.0.get(&id.api_version)?;
        let fresh = now.since(served.since) < FRESH_FOR;
        served.kinds.get(&id.kind).filter(|_| fresh)
    }

    pub(super) fn keep(&mut self, version: String, kinds: BTreeMap<String, Place>, now: BootTime) {
        self.0.insert(version, Served { since: now, kinds });
    }
}
