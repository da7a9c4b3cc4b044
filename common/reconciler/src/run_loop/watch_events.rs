//! Applies the events of the watches to the index, and makes the owners due that they affect.

use std::collections::BTreeSet;
use std::sync::atomic::Ordering;

use krypton_crds::tenant::{Tenant, TenantSpec};
use krypton_runtime::clock::BootTime;
use krypton_runtime::events::ObjectEvent;
use krypton_types::error_chain::chain;
use kube::runtime::watcher::Event;
use kube::{Resource as _, ResourceExt as _};

use crate::index::CrdState;
use crate::owner::OwnerKey;
use crate::reconciler::Reconciler;
use crate::watches::{Watch, WatchEvent};

impl Reconciler {
    pub(super) fn apply_event(&mut self, event: WatchEvent, tenants: &mut Option<Watch>) {
        if self.bounds.has_ended_watches() {
            return;
        }
        let changed = match event {
            WatchEvent::Tenant(event) => {
                let event = self.decode_tenants(*event);
                event
                    .map(|event| self.index.tenant_event(event))
                    .unwrap_or_default()
            }
            WatchEvent::Release(event) => {
                let is_listed = matches!(event, Event::InitDone);
                let mut owners = self.index.release_event(event);
                if is_listed {
                    owners.extend(self.forget_tampering());
                }
                owners
            }
            WatchEvent::Workspace(event) => {
                let (namespaces, owners) = self.index.workspace_event(event);
                self.placed_tenants.queue_namespaces(&namespaces);
                self.workspaces.queue_changed(&namespaces, &self.index);
                owners
            }
            WatchEvent::Workload(kind, event) => self.index.workload_event(kind, event),
            WatchEvent::Crd(event) => {
                let is_listed = matches!(event, Event::InitDone);
                let (previous, schema) = (self.index.crd(), self.index.schema());
                self.index.crd_event(event);
                let current = self.index.crd();
                if is_listed && current == Some(CrdState::Present) {
                    // A restored etcd may hold records again, and lack their Tenants.
                    self.recheck_crd();
                }
                if self.index.schema() != schema {
                    self.listed_under = self.listed_under.with_schema(self.index.schema());
                    self.crd_checked = false;
                }
                if current != previous {
                    tracing::debug!(member = %self.member.name, crd = ?current, "Tenant CRD changed");
                    self.crd_checked = false;
                    if previous.is_some() && current != Some(CrdState::Present) {
                        self.crd_was_missing = true;
                        // Before the next round removes finalizers.
                        self.runner.crd_losses.fetch_add(1, Ordering::Relaxed);
                        self.recheck_crd();
                    }
                    // The watch on Tenants restarts with the CRD, without its back-off.
                    if current != Some(CrdState::Terminating) {
                        *tenants = None;
                    }
                    self.queue_all();
                }
                BTreeSet::new()
            }
            WatchEvent::Failed { resource, error } => {
                self.cluster_problem = Some(format!("watching {resource}: {}", chain(&error)));
                self.runner.tools.work.record_watch_failure(resource);
                tracing::debug!(member = %self.member.name, resource, error = %chain(&error), "watch failed; retrying");
                return;
            }
        };
        self.cluster_problem = None;
        self.owners_changed(changed);
        let excess = self
            .bounds
            .check(&mut self.index, self.queue.ready(), BootTime::now());
        if excess.is_some() {
            self.cluster_problem = excess;
            // Drop the keys of unknown Tenants: their number is unbounded.
            self.queue.clear();
            self.queue.extend(self.owner_states.keys().cloned());
            self.queue_all();
        }
    }

    /// Forgets which releases other users have changed, and returns their owners. A new list often follows a restore of
    /// etcd, which changes releases, too. Users cannot cause one.
    fn forget_tampering(&mut self) -> Vec<OwnerKey> {
        let states = self.owner_states.iter_mut();
        let forgotten =
            states.filter_map(|(key, state)| state.memory.forget_tampering().then(|| key.clone()));
        forgotten.collect()
    }

    /// Decodes the Tenants of an event. Reports a Tenant that does not decode, and drops it and Tenants of other
    /// namespaces.
    fn decode_tenants(
        &self,
        event: Event<kube::core::DeserializeGuard<Tenant>>,
    ) -> Option<Event<Tenant>> {
        let decode = |guard: kube::core::DeserializeGuard<Tenant>| match guard.0 {
            Ok(tenant) => Some(tenant),
            Err(invalid) => {
                let mut tenant = Tenant::new("", TenantSpec::default());
                tenant.metadata = invalid.metadata;
                let message = format!(
                    "ignoring this invalid Tenant until it is corrected: {}",
                    invalid.error
                );
                tracing::warn!(member = %self.member.name,
                    tenant = %format_args!("{}/{}", tenant.namespace().unwrap_or_default(), tenant.name_any()),
                    generation = tenant.metadata.generation, error = %invalid.error,
                    "ignoring invalid Tenant");
                let event = ObjectEvent::warning("TenantInvalid", message);
                self.runner
                    .events
                    .record_event(tenant.object_ref(&()), event);
                None
            }
        };
        let is_selected =
            |tenant: &Tenant| match (&self.member.namespaces, &tenant.metadata.namespace) {
                (Some(namespaces), Some(namespace)) => namespaces.contains(namespace),
                _ => true,
            };
        let decode = |guard| decode(guard).filter(&is_selected);
        Some(match event {
            Event::Apply(guard) => Event::Apply(decode(guard)?),
            Event::Delete(guard) => Event::Delete(decode(guard)?),
            Event::Init => Event::Init,
            Event::InitApply(guard) => Event::InitApply(decode(guard)?),
            Event::InitDone => Event::InitDone,
        })
    }
}
