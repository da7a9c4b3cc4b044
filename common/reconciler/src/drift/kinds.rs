//! Cache of the kinds that a cluster serves, and of their API paths.

use std::collections::BTreeMap;
use std::time::Duration;

use krypton_helm::releases::ObjectId;
use krypton_runtime::clock::BootTime;

/// Time after which the kinds are queried again.
const MAX_AGE: Duration = Duration::from_secs(30 * 60);

/// API path of a kind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ResourcePath {
    /// Plural name, as in API paths.
    pub(super) plural: String,
    pub(super) namespaced: bool,
}

/// Served kinds by group and version. A kind that is missing in a cached group is not served.
#[derive(Debug, Default)]
pub(super) struct KindCache(BTreeMap<String, ServedKinds>);

#[derive(Debug)]
struct ServedKinds {
    queried_at: BootTime,
    kinds: BTreeMap<String, ResourcePath>,
}

impl KindCache {
    pub(super) fn get(&self, id: &ObjectId, now: BootTime) -> Option<&ResourcePath> {
        let served = self.0.get(&id.api_version)?;
        let fresh = now.since(served.queried_at) < MAX_AGE;
        served.kinds.get(&id.kind).filter(|_| fresh)
    }

    pub(super) fn insert(
        &mut self,
        version: String,
        kinds: BTreeMap<String, ResourcePath>,
        now: BootTime,
    ) {
        self.0.insert(
            version,
            ServedKinds {
                queried_at: now,
                kinds,
            },
        );
    }
}
