//! Cache of the kinds that a cluster serves, and of their API paths.

use std::collections::BTreeMap;
use std::time::Duration;

use krypton_helm::releases::ObjectId;
use krypton_runtime::clock::BootTime;

/// Time after which the kinds are queried again.
const FRESH_FOR: Duration = Duration::from_secs(30 * 60);

/// API path of a kind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Place {
    /// Plural name, as in API paths.
    pub(super) plural: String,
    pub(super) namespaced: bool,
}

/// Served kinds by group and version. A kind that is missing in a cached group is not served.
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
