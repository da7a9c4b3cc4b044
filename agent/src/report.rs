//! What a reconciler says to its caller: one slot per Tenant and one for the member, the latest wins.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, PoisonError};

use krypton_common::member::MemberReport;
use krypton_common::tenant::{TenantKey, TenantReport};
use tokio::sync::Notify;

/// What has changed since the last look.
#[derive(Debug, Default)]
pub struct Changes {
    pub member: Option<MemberReport>,
    /// `None` for a Tenant that is gone or names another member.
    pub tenants: BTreeMap<TenantKey, Option<TenantReport>>,
}

#[derive(Debug, Default)]
struct Slots {
    member: MemberReport,
    member_changed: bool,
    tenants: BTreeMap<TenantKey, TenantReport>,
    changed: BTreeSet<TenantKey>,
}

/// The slots, filled by the reconciler and emptied by its caller. Bounded by the number of Tenants.
#[derive(Debug, Default)]
pub struct ReportBoard {
    slots: Mutex<Slots>,
    changed: Notify,
}

impl ReportBoard {
    pub(crate) fn tenant(&self, key: &TenantKey, report: Option<TenantReport>) {
        let mut slots = self.lock();
        let same = slots.tenants.get(key) == report.as_ref();
        if same {
            return;
        }
        match report {
            Some(report) => slots.tenants.insert(key.clone(), report),
            None => slots.tenants.remove(key),
        };
        slots.changed.insert(key.clone());
        drop(slots);
        self.changed.notify_one();
    }

    /// The generation that was last reported of a Tenant.
    pub(crate) fn generation(&self, key: &TenantKey) -> Option<i64> {
        self.lock()
            .tenants
            .get(key)
            .map(|report| report.observed_generation)
    }

    pub(crate) fn member(&self, report: &MemberReport) {
        let mut slots = self.lock();
        if slots.member == *report {
            return;
        }
        slots.member = report.clone();
        slots.member_changed = true;
        drop(slots);
        self.changed.notify_one();
    }

    /// Waits until something has changed, and takes it.
    pub async fn changes(&self) -> Changes {
        loop {
            let notified = self.changed.notified();
            let changes = self.take();
            if changes.member.is_some() || !changes.tenants.is_empty() {
                return changes;
            }
            notified.await;
        }
    }

    /// Marks all as changed: the next `changes` is the whole account.
    pub fn resend(&self) {
        let mut slots = self.lock();
        let keys: Vec<TenantKey> = slots.tenants.keys().cloned().collect();
        slots.changed.extend(keys);
        slots.member_changed = true;
        drop(slots);
        self.changed.notify_one();
    }

    fn take(&self) -> Changes {
        let mut slots = self.lock();
        let keys = std::mem::take(&mut slots.changed);
        let tenants = keys
            .into_iter()
            .map(|key| {
                let report = slots.tenants.get(&key).cloned();
                (key, report)
            })
            .collect();
        let member = std::mem::take(&mut slots.member_changed).then(|| slots.member.clone());
        Changes { member, tenants }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Slots> {
        // The slots hold plain values: a panic elsewhere cannot leave them half written.
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use krypton_common::conditions::{ClusterState, State, Truth};

    use super::*;

    fn key(name: &str) -> TenantKey {
        TenantKey {
            namespace: "default".to_owned(),
            name: name.to_owned(),
        }
    }

    fn report(generation: i64) -> TenantReport {
        TenantReport {
            observed_generation: generation,
            applied_chart: String::new(),
            state: ClusterState {
                ready: State {
                    truth: Truth::True,
                    reason: "Installed".to_owned(),
                    message: String::new(),
                },
                progress: None,
                error: None,
            },
        }
    }

    #[tokio::test]
    async fn only_the_newest_report_of_a_tenant_is_seen() {
        let board = ReportBoard::default();
        for generation in 1..=1000 {
            board.tenant(&key("a"), Some(report(generation)));
        }
        let changes = board.changes().await;
        assert_eq!(changes.tenants.len(), 1);
        assert_eq!(
            changes.tenants[&key("a")]
                .as_ref()
                .unwrap()
                .observed_generation,
            1000
        );
    }

    #[tokio::test]
    async fn a_repeated_report_is_no_change_and_a_removal_is_one() {
        let board = ReportBoard::default();
        board.tenant(&key("a"), Some(report(1)));
        board.changes().await;
        board.tenant(&key("a"), Some(report(1)));
        board.tenant(&key("b"), None);
        board.tenant(&key("a"), None);
        let changes = board.changes().await;
        assert_eq!(
            changes.tenants.into_iter().collect::<Vec<_>>(),
            vec![(key("a"), None)]
        );
    }
}
