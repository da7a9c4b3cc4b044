//! Keeps the status of home's Tenants: what has changed is looked at, and written when it differs.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use krypton_agent::clock::{self, Boot};
use krypton_agent::effect;
use krypton_agent::fence::Hold;
use krypton_agent::index::tenant_key;
use krypton_agent::watch_backoff::listed_anew;
use krypton_common::error_chain::chain;
use krypton_common::tenant::TenantKey;
use krypton_crds::tenant::{Tenant, TenantStatus};
use kube::Client;
use kube::api::{Api, Patch, PatchParams};
use kube::core::DeserializeGuard;
use kube::runtime::watcher::{Config, Event, watcher};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use super::decision::{Memory, Now, Rules, decide};
use super::reports::{Reports, START_GRACE};

const DEADLINE: Duration = Duration::from_secs(10);
/// Two writes of one Tenant's status are at least so far apart.
const PACE: Duration = Duration::from_secs(1);
/// And two looks that find nothing to write: members may say much that changes nothing here.
const LOOK_EVERY: Duration = Duration::from_millis(250);
/// Status writes in flight: beyond it they wait, and a later report replaces an earlier one.
const WRITERS: usize = 8;

/// One of home's Tenants.
#[derive(Debug)]
struct Slot {
    tenant: Arc<Tenant>,
    memory: Memory,
    /// It is not looked at before.
    next: Boot,
    /// A write is in flight, and after it, it is looked at again.
    writing: bool,
}

impl Slot {
    fn new(tenant: Arc<Tenant>) -> Self {
        Self {
            tenant,
            memory: Memory::default(),
            next: Boot::default(),
            writing: false,
        }
    }

    fn version(&self) -> Option<&String> {
        self.tenant.metadata.resource_version.as_ref()
    }
}

/// Home's Tenants, and which of them are to be looked at.
#[derive(Debug, Default)]
pub(super) struct Desk {
    slots: BTreeMap<TenantKey, Slot>,
    listed: BTreeSet<TenantKey>,
    /// The first list is complete.
    synced: bool,
    dirty: BTreeSet<TenantKey>,
    /// To be looked at then.
    later: BTreeSet<(Boot, TenantKey)>,
}

/// A write that has ended.
struct Written {
    key: TenantKey,
    before: Option<String>,
    object: Option<Tenant>,
}

/// Keeps the status of home's Tenants until `stop`, while `lead` says that this hub is the one.
pub async fn run(
    client: Client,
    reports: Arc<Reports>,
    rules: Rules,
    mut lead: watch::Receiver<Hold>,
    stop: CancellationToken,
) {
    let api: Api<DeserializeGuard<Tenant>> = Api::all(client.clone());
    let mut events = listed_anew(move || watcher(api.clone(), Config::default()));
    let mut desk = Desk::default();
    let mut writes: JoinSet<Written> = JoinSet::new();
    let mut led = false;
    // Until then members may still be on their way.
    let mut patient_until = Some(Boot(Boot::now().0 + START_GRACE));
    let mut patience: Option<Boot> = None;
    loop {
        let now = Boot::now();
        let leading = lead.borrow_and_update().may_start(now);
        if leading && !led {
            // Another hub may have written meanwhile: what is on record is as good as after a start.
            patient_until = Some(Boot(now.0 + START_GRACE));
            desk.forget();
        }
        led = leading;
        let changed = reports.take_dirty();
        desk.touch(changed.keys);
        // Patience runs out without any event.
        let ended = [&mut patient_until, &mut patience]
            .into_iter()
            .filter_map(|end| end.take_if(|end| *end <= now));
        if ended.count() > 0 || changed.all {
            desk.touch_all();
        }
        patience = reports.patience_ends(now);
        let mut wake = [patient_until, patience].into_iter().flatten().min();
        if leading {
            let now = Now {
                boot: now,
                wall: clock::wall(),
                patient: patient_until.is_some(),
            };
            while writes.len() < WRITERS
                && let Some((key, tenant, status)) = desk.next(&reports, &rules, now)
            {
                writes.spawn(write(client.clone(), key, tenant, status));
            }
            wake = wake.into_iter().chain(desk.wakes()).min();
        }
        tokio::select! {
            () = stop.cancelled() => return,
            () = reports.changed.notified() => {}
            changed = lead.changed() => if changed.is_err() { return },
            Some(event) = events.next() => match event {
                Ok(event) => desk.see(event, &rules, &reports),
                Err(error) => tracing::debug!(error = %chain(&error), "watching home's Tenants failed; it is tried again"),
            },
            Some(written) = writes.join_next(), if !writes.is_empty() => match written {
                Ok(written) => desk.take_written(written, &reports),
                Err(error) => {
                    tracing::error!(%error, "a write of a status ended badly");
                    desk.none_in_flight();
                }
            },
            () = clock::sleep_until(wake, now) => {}
        }
    }
}

impl Desk {
    /// Looks at what is due, up to the first whose status is to be written.
    fn next(
        &mut self,
        reports: &Reports,
        rules: &Rules,
        now: Now,
    ) -> Option<(TenantKey, Arc<Tenant>, TenantStatus)> {
        while self.later.first().is_some_and(|(at, _)| *at <= now.boot) {
            let due = self.later.pop_first();
            self.dirty.extend(due.map(|(_, key)| key));
        }
        while let Some(key) = self.dirty.pop_first() {
            let Some(slot) = self.slots.get_mut(&key).filter(|slot| !slot.writing) else {
                continue;
            };
            if slot.next > now.boot {
                self.later.insert((slot.next, key));
                continue;
            }
            let recorded = slot.tenant.status.as_ref();
            let conditions = recorded.map(|status| status.conditions.as_slice());
            let recorded_with =
                krypton_common::conditions::clusters(conditions.unwrap_or_default());
            let heard = reports.of(&key, |name| recorded_with.contains_key(name), now.boot);
            let decision = decide(&slot.tenant, &heard, rules, &slot.memory, now);
            slot.memory = decision.memory;
            if let Some(due) = decision.due {
                self.later.insert((due, key.clone()));
            }
            if recorded == Some(&decision.status) {
                slot.next = Boot(now.boot.0 + LOOK_EVERY);
                continue;
            }
            slot.next = Boot(now.boot.0 + PACE);
            slot.writing = true;
            return Some((key, Arc::clone(&slot.tenant), decision.status));
        }
        None
    }

    fn wakes(&self) -> Option<Boot> {
        self.later.first().map(|(at, _)| *at)
    }

    fn touch(&mut self, keys: BTreeSet<TenantKey>) {
        let here = keys.into_iter().filter(|key| self.slots.contains_key(key));
        self.dirty.extend(here);
    }

    fn touch_all(&mut self) {
        self.dirty.extend(self.slots.keys().cloned());
    }

    /// What was remembered of earlier decisions counts no more.
    fn forget(&mut self) {
        for slot in self.slots.values_mut() {
            slot.memory = Memory::default();
        }
        self.touch_all();
    }

    fn none_in_flight(&mut self) {
        for slot in self.slots.values_mut() {
            slot.writing = false;
        }
        self.touch_all();
    }

    fn see(&mut self, event: Event<DeserializeGuard<Tenant>>, rules: &Rules, reports: &Reports) {
        // One that does not decode is told of by the reconciler of the home cluster.
        let read = |guard: DeserializeGuard<Tenant>| {
            let mut tenant = guard.0.ok()?;
            // Larger than all the rest, and read by nobody here.
            tenant.metadata.managed_fields = None;
            let key = tenant_key(&tenant.metadata)?;
            let ours = rules
                .namespaces
                .as_ref()
                .is_none_or(|found| found.contains(&key.namespace));
            ours.then_some((key, tenant))
        };
        match event {
            Event::Init => self.listed.clear(),
            Event::InitApply(guard) | Event::Apply(guard) => {
                if let Some((key, tenant)) = read(guard) {
                    self.listed.insert(key.clone());
                    self.put(key, tenant, reports);
                }
            }
            Event::InitDone => {
                let listed = std::mem::take(&mut self.listed);
                self.slots.retain(|key, _| listed.contains(key));
                self.synced = true;
                let summarised = self
                    .slots
                    .iter()
                    .filter(|(_, slot)| is_summary(&slot.tenant));
                reports.summarise_only(summarised.map(|(key, _)| key.clone()).collect());
            }
            Event::Delete(guard) => {
                if let Some((key, _)) = read(guard) {
                    self.slots.remove(&key);
                    reports.summarised(&key, false);
                }
            }
        }
    }

    fn put(&mut self, key: TenantKey, tenant: Tenant, reports: &Reports) {
        if self.synced {
            reports.summarised(&key, is_summary(&tenant));
        }
        let tenant = Arc::new(tenant);
        self.dirty.insert(key.clone());
        match self.slots.get_mut(&key) {
            // Made anew: nothing that is remembered is of this one.
            Some(slot) if slot.tenant.metadata.uid != tenant.metadata.uid => {
                *slot = Slot {
                    writing: slot.writing,
                    ..Slot::new(tenant)
                };
            }
            Some(slot) => slot.tenant = tenant,
            None => {
                self.slots.insert(key, Slot::new(tenant));
            }
        }
    }

    /// What was written counts, unless the watch has brought something else since.
    fn take_written(&mut self, written: Written, reports: &Reports) {
        let Some(slot) = self.slots.get_mut(&written.key) else {
            return;
        };
        slot.writing = false;
        let newest = slot.version() == written.before.as_ref();
        if let Some(object) = written.object.filter(|_| newest) {
            self.put(written.key, object, reports);
        } else {
            // Refused or lost, or seen already: look again when the pace allows.
            self.dirty.insert(written.key);
        }
    }
}

fn is_summary(tenant: &Tenant) -> bool {
    let status = tenant.status.as_ref();
    status.is_some_and(|status| status.summary.is_some())
}

/// One write, on top of the version that the decision was made on.
async fn write(
    client: Client,
    key: TenantKey,
    tenant: Arc<Tenant>,
    status: TenantStatus,
) -> Written {
    let api: Api<Tenant> = Api::namespaced(client, &key.namespace);
    let before = tenant.metadata.resource_version.clone();
    let mut patch = serde_json::json!({
        "metadata": { "resourceVersion": before },
        "status": status,
    });
    // A merge removes only what is null.
    patch["status"]["summary"] = serde_json::json!(status.summary);
    let params = PatchParams::default();
    let patch = Patch::Merge(&patch);
    let call = effect!(
        "home.tenant-status",
        api.patch_status(&key.name, &params, &patch)
    );
    let object = match tokio::time::timeout(DEADLINE, call).await {
        Ok(Ok(mut tenant)) => {
            tenant.metadata.managed_fields = None;
            Some(tenant)
        }
        Ok(Err(kube::Error::Api(status))) if status.code == 409 || status.code == 404 => None,
        Ok(Err(error)) => {
            tracing::warn!(tenant = %key, error = %chain(&error), "writing the status failed; it is tried again");
            None
        }
        Err(_) => {
            tracing::warn!(tenant = %key, "writing the status: no answer in time; it is tried again");
            None
        }
    };
    Written {
        key,
        before,
        object,
    }
}

#[cfg(test)]
mod tests;
