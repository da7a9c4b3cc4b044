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
pub(super) struct SizedMap<K, V> {
    entries: BTreeMap<K, Entry<V>>,
    bytes: usize,
}

#[derive(Debug)]
pub(super) struct Entry<V> {
    pub(super) version: u64,
    pub(super) value: V,
    /// Estimate for key and value. It takes long, so each entry keeps it.
    bytes: usize,
}

impl<K, V> Default for SizedMap<K, V> {
    fn default() -> Self {
        Self {
            entries: BTreeMap::new(),
            bytes: 0,
        }
    }
}

impl<K, V> Deref for SizedMap<K, V> {
    type Target = BTreeMap<K, Entry<V>>;

    fn deref(&self) -> &Self::Target {
        &self.entries
    }
}

impl<K: Ord + HeapSize, V: HeapSize> SizedMap<K, V> {
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    pub(super) fn insert(&mut self, key: K, version: u64, value: V) {
        let bytes = size_of::<(K, Entry<V>)>() + key.heap_bytes() + value.heap_bytes();
        self.bytes += bytes;
        let entry = Entry {
            version,
            value,
            bytes,
        };
        if let Some(previous) = self.entries.insert(key, entry) {
            self.bytes -= previous.bytes;
        }
    }

    /// Changes the version of an entry.
    pub(super) fn set_version(&mut self, key: &K, version: u64) {
        if let Some(entry) = self.entries.get_mut(key) {
            entry.version = version;
        }
    }

    /// Returns whether it contained the entry.
    pub(super) fn remove(&mut self, key: &K) -> bool {
        let previous = self.entries.remove(key);
        self.bytes -= previous.as_ref().map_or(0, |previous| previous.bytes);
        previous.is_some()
    }

    pub(super) fn clear(&mut self) {
        *self = Self::default();
    }
}

/// A value that may own memory.
pub trait HeapSize {
    /// The bytes on the heap, roughly.
    fn heap_bytes(&self) -> usize {
        0
    }
}

impl HeapSize for () {}

impl HeapSize for u32 {}

impl HeapSize for CrdState {}

#[cfg(test)]
impl HeapSize for &'static str {}

impl HeapSize for String {
    fn heap_bytes(&self) -> usize {
        self.len()
    }
}

impl<T: HeapSize> HeapSize for Option<T> {
    fn heap_bytes(&self) -> usize {
        self.as_ref().map_or(0, HeapSize::heap_bytes)
    }
}

impl<A: HeapSize, B: HeapSize> HeapSize for (A, B) {
    fn heap_bytes(&self) -> usize {
        self.0.heap_bytes() + self.1.heap_bytes()
    }
}

impl HeapSize for TenantKey {
    fn heap_bytes(&self) -> usize {
        self.namespace.len() + self.name.len()
    }
}

impl HeapSize for Arc<Tenant> {
    fn heap_bytes(&self) -> usize {
        size_of::<Tenant>() + bound::memory_size(&**self)
    }
}

impl HeapSize for ReleaseKey {
    fn heap_bytes(&self) -> usize {
        self.namespace.len() + self.name.len()
    }
}

impl HeapSize for Revision {
    fn heap_bytes(&self) -> usize {
        let labels = [
            &self.fingerprint,
            &self.owner_uid,
            &self.owner_namespace,
            &self.run,
        ];
        let labels = labels.into_iter().map(HeapSize::heap_bytes).sum::<usize>();
        labels + self.uid.len() + self.resource_version.len()
    }
}

impl HeapSize for Workspace {
    fn heap_bytes(&self) -> usize {
        let metadata_bytes = self.namespace_metadata.as_ref().map_or(0, |metadata| {
            let NamespaceMetadata {
                labels,
                annotations,
            } = &**metadata;
            let all = labels.iter().chain(annotations);
            all.map(|(key, value)| size_of::<(String, String)>() + key.len() + value.len())
                .sum()
        });
        metadata_bytes + self.creator.heap_bytes() + self.open_to.heap_bytes() + self.uid.len()
    }
}

impl HeapSize for WorkloadKey {
    fn heap_bytes(&self) -> usize {
        self.namespace.len() + self.name.len()
    }
}

impl HeapSize for WorkloadState {
    fn heap_bytes(&self) -> usize {
        self.detail.len()
    }
}
