//! The kinds of objects that the server knows.

use std::collections::BTreeMap;
use std::sync::{Arc, LazyLock};

use crate::builtin;
use crate::key::Key;
use crate::kind::Kind;
use crate::managed;

/// The kinds that are served now.
#[derive(Clone, Debug, Default)]
pub(crate) struct Kinds {
    /// By group, version and resource.
    served: BTreeMap<(String, String, String), Arc<Kind>>,
}

impl Kinds {
    pub(crate) fn built_in() -> Self {
        static BUILT_IN: LazyLock<Kinds> = LazyLock::new(|| {
            let mut kinds = Kinds::default();
            for kind in builtin::kinds() {
                kinds.serve(kind);
            }
            kinds
        });
        BUILT_IN.clone()
    }

    pub(crate) fn serve(&mut self, mut kind: Kind) {
        kind.fields = managed::field_schema(&kind);
        self.add(Arc::new(kind));
    }

    /// Serves a kind of another server.
    pub(crate) fn add(&mut self, kind: Arc<Kind>) {
        let key = (
            kind.group.clone(),
            kind.version.clone(),
            kind.resource.clone(),
        );
        self.served.insert(key, kind);
    }

    /// Stops serving a custom resource.
    pub(crate) fn withdraw(&mut self, group: &str, resource: &str) {
        self.served
            .retain(|_, kind| !(kind.is_custom() && kind.is(group, resource)));
    }

    pub(crate) fn get(&self, group: &str, version: &str, resource: &str) -> Option<&Arc<Kind>> {
        let key = (group.to_owned(), version.to_owned(), resource.to_owned());
        self.served.get(&key)
    }

    /// Returns the kind of stored objects.
    pub(crate) fn for_key(&self, key: &Key) -> Option<&Arc<Kind>> {
        let mut kinds = self.served.values();
        kinds.find(|kind| kind.is(&key.group, &key.resource))
    }

    pub(crate) fn all(&self) -> impl Iterator<Item = &Arc<Kind>> {
        self.served.values()
    }
}
