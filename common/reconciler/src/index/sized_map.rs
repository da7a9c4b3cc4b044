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
    entries: BTreeMap<K, (u64, V)>,
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
    type Target = BTreeMap<K, (u64, V)>;

    fn deref(&self) -> &Self::Target {
        &self.entries
    }
}

impl<K: Ord + HeapSize, V: HeapSize> SizedMap<K, V> {
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    pub(super) fn insert(&mut self, key: K, version: u64, value: V) -> Option<(u64, V)> {
        let key_bytes = key.heap_bytes();
        self.bytes += entry_bytes::<K, V>(key_bytes, &value);
        let previous = self.entries.insert(key, (version, value));
        if let Some((_, previous)) = &previous {
            self.bytes -= entry_bytes::<K, V>(key_bytes, previous);
        }
        previous
    }

    pub(super) fn remove(&mut self, key: &K) -> Option<(u64, V)> {
        let previous = self.entries.remove(key)?;
        self.bytes -= entry_bytes::<K, V>(key.heap_bytes(), &previous.1);
        Some(previous)
    }

    pub(super) fn clear(&mut self) {
        *self = Self::default();
    }

    pub(super) fn into_entries(self) -> BTreeMap<K, (u64, V)> {
        self.entries
    }
}

fn entry_bytes<K, V: HeapSize>(key_bytes: usize, value: &V) -> usize {
    size_of::<(K, u64, V)>() + key_bytes + value.heap_bytes()
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
