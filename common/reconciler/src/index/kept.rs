//! A map that knows how many bytes it takes.

use std::collections::BTreeMap;
use std::ops::Deref;
use std::sync::Arc;

use krypton_crds::tenant::Tenant;
use krypton_helm::releases::revision::Revision;
use krypton_runtime::bound;
use krypton_types::tenant::TenantKey;

use super::{CrdState, ReleaseKey, Workspace};
use crate::workload::{WorkloadKey, WorkloadState};
use crate::workspaces::metadata::NamespaceMetadata;

/// Entries with their resourceVersions, and an estimate of their bytes.
#[derive(Debug)]
pub(super) struct Kept<K, V> {
    entries: BTreeMap<K, (u64, V)>,
    bytes: usize,
}

impl<K, V> Default for Kept<K, V> {
    fn default() -> Self {
        Self {
            entries: BTreeMap::new(),
            bytes: 0,
        }
    }
}

impl<K, V> Deref for Kept<K, V> {
    type Target = BTreeMap<K, (u64, V)>;

    fn deref(&self) -> &Self::Target {
        &self.entries
    }
}

impl<K: Ord + Heap, V: Heap> Kept<K, V> {
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    pub(super) fn insert(&mut self, key: K, version: u64, value: V) -> Option<(u64, V)> {
        let key_bytes = key.heap();
        self.bytes += size::<K, V>(key_bytes, &value);
        let old = self.entries.insert(key, (version, value));
        if let Some((_, old)) = &old {
            self.bytes -= size::<K, V>(key_bytes, old);
        }
        old
    }

    pub(super) fn remove(&mut self, key: &K) -> Option<(u64, V)> {
        let old = self.entries.remove(key)?;
        self.bytes -= size::<K, V>(key.heap(), &old.1);
        Some(old)
    }

    pub(super) fn clear(&mut self) {
        *self = Self::default();
    }

    pub(super) fn into_entries(self) -> BTreeMap<K, (u64, V)> {
        self.entries
    }
}

fn size<K, V: Heap>(key: usize, value: &V) -> usize {
    size_of::<(K, u64, V)>() + key + value.heap()
}

/// A value that owns memory.
pub trait Heap {
    /// The bytes on the heap, roughly.
    fn heap(&self) -> usize;
}

impl Heap for () {
    fn heap(&self) -> usize {
        0
    }
}

impl Heap for u32 {
    fn heap(&self) -> usize {
        0
    }
}

impl Heap for CrdState {
    fn heap(&self) -> usize {
        0
    }
}

#[cfg(test)]
impl Heap for &'static str {
    fn heap(&self) -> usize {
        0
    }
}

impl Heap for String {
    fn heap(&self) -> usize {
        self.len()
    }
}

impl<T: Heap> Heap for Option<T> {
    fn heap(&self) -> usize {
        self.as_ref().map_or(0, Heap::heap)
    }
}

impl<A: Heap, B: Heap> Heap for (A, B) {
    fn heap(&self) -> usize {
        self.0.heap() + self.1.heap()
    }
}

impl Heap for TenantKey {
    fn heap(&self) -> usize {
        self.namespace.len() + self.name.len()
    }
}

impl Heap for Arc<Tenant> {
    fn heap(&self) -> usize {
        size_of::<Tenant>() + bound::weight(&**self)
    }
}

impl Heap for ReleaseKey {
    fn heap(&self) -> usize {
        self.namespace.len() + self.name.len()
    }
}

impl Heap for Revision {
    fn heap(&self) -> usize {
        let optional = [
            &self.fingerprint,
            &self.owner_uid,
            &self.owner_namespace,
            &self.run,
        ];
        let optional = optional.into_iter().map(Heap::heap).sum::<usize>();
        optional + self.uid.len() + self.resource_version.len()
    }
}

impl Heap for Workspace {
    fn heap(&self) -> usize {
        let namespace_metadata = self
            .namespace_metadata
            .as_ref()
            .map_or(0, |namespace_metadata| {
                let NamespaceMetadata {
                    labels,
                    annotations,
                } = &**namespace_metadata;
                let all = labels.iter().chain(annotations);
                all.map(|(key, value)| size_of::<(String, String)>() + key.len() + value.len())
                    .sum()
            });
        namespace_metadata + self.creator.heap() + self.open_to.heap() + self.uid.len()
    }
}

impl Heap for WorkloadKey {
    fn heap(&self) -> usize {
        self.namespace.len() + self.name.len()
    }
}

impl Heap for WorkloadState {
    fn heap(&self) -> usize {
        self.detail.len()
    }
}
