//! Applies the watch events of home's Tenants to the store.

use std::sync::Arc;

use krypton_crds::tenant::Tenant;
use krypton_reconciler::index::tenant_key;
use krypton_types::tenant::TenantKey;
use kube::core::DeserializeGuard;
use kube::runtime::watcher::Event;

use super::{TenantEntry, TenantStore};
use crate::members::tenant_reports::TenantReports;
use crate::tenants::status::TenantSettings;

impl TenantStore {
    pub(super) fn apply_event(
        &mut self,
        event: Event<DeserializeGuard<Tenant>>,
        settings: &TenantSettings,
        reports: &TenantReports,
    ) {
        // The reconciler of the home cluster reports a Tenant that does not decode.
        let decode = |guard: DeserializeGuard<Tenant>| {
            let mut tenant = guard.0.ok()?;
            // Managed fields are larger than the rest of the object, and unused here.
            tenant.metadata.managed_fields = None;
            let key = tenant_key(&tenant.metadata)?;
            let is_watched = settings
                .namespaces
                .as_ref()
                .is_none_or(|namespaces| namespaces.contains(&key.namespace));
            is_watched.then_some((key, tenant))
        };
        match event {
            Event::Init => {
                self.listed.clear();
                self.crd_absent = false;
            }
            Event::InitApply(guard) | Event::Apply(guard) => {
                if let Some((key, tenant)) = decode(guard) {
                    self.listed.insert(key.clone());
                    self.put(key, tenant, reports);
                }
            }
            Event::InitDone => {
                let listed = std::mem::take(&mut self.listed);
                let gone = self.entries.keys().filter(|key| !listed.contains(key));
                let gone: Vec<_> = gone.cloned().collect();
                for key in gone {
                    self.remove(&key);
                }
                self.synced = true;
                let summarised = self
                    .entries
                    .iter()
                    .filter(|(_, entry)| entry.tenant.has_summary());
                reports.set_summarised(summarised.map(|(key, _)| key.clone()).collect());
            }
            Event::Delete(guard) => {
                if let Some((key, _)) = decode(guard) {
                    self.remove(&key);
                    reports.set_is_summarised(&key, false);
                }
            }
        }
    }

    pub(in crate::tenants) fn put(
        &mut self,
        key: TenantKey,
        tenant: Tenant,
        reports: &TenantReports,
    ) {
        if self.synced {
            reports.set_is_summarised(&key, tenant.has_summary());
        }
        let tenant = Arc::new(tenant);
        let previous = self.entries.get(&key).map(|entry| &*entry.tenant);
        self.index.update(&key, previous, Some(&tenant));
        self.queue.add(key.clone());
        self.planner.mark_dirty([key.clone()]);
        match self.entries.get_mut(&key) {
            // The Tenant was recreated: the memory belongs to its predecessor.
            Some(entry) if entry.tenant.metadata.uid != tenant.metadata.uid => {
                *entry = TenantEntry::new(tenant);
                self.queue.reset(&key);
            }
            Some(entry) => entry.tenant = tenant,
            None => {
                self.entries.insert(key, TenantEntry::new(tenant));
            }
        }
    }

    pub(super) fn remove(&mut self, key: &TenantKey) {
        if let Some(entry) = self.entries.remove(key) {
            self.index.update(key, Some(&entry.tenant), None);
            self.with_unnamed.remove(key);
        }
        self.planner.mark_dirty([key.clone()]);
        self.queue.forget(key);
    }
}
