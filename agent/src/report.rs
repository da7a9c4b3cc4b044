//! What a reconciler says to its caller: one slot per Tenant and one for the member, the latest wins.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;
use std::sync::{Mutex, PoisonError};

use krypton_common::desired::Version;
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

/// Some of the changes.
#[derive(Debug)]
pub struct Part {
    pub changes: Changes,
    /// Beyond these there is no more.
    pub last: bool,
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
    /// Puts `report` into the Tenant's slot; `None` when it is gone or names another member.
    pub fn tenant(&self, key: &TenantKey, report: Option<TenantReport>) {
        // What is compared with what the hub holds must be what reaches it.
        let report = report.map(TenantReport::trimmed);
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

    pub fn member(&self, report: &MemberReport) {
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
        self.changed().await;
        self.take(None, usize::MAX).changes
    }

    /// Waits until something has changed, and leaves it. For one waiter at a time.
    pub async fn changed(&self) {
        loop {
            let notified = self.changed.notified();
            {
                let slots = self.lock();
                if slots.member_changed || !slots.changed.is_empty() {
                    return;
                }
            }
            notified.await;
        }
    }

    /// Marks everything as changed: what is taken next is the whole account. Who is gone by now is not
    /// in it.
    pub fn resend(&self) {
        let mut slots = self.lock();
        slots.changed = slots.tenants.keys().cloned().collect();
        slots.member_changed = true;
        drop(slots);
        self.changed.notify_one();
    }

    /// Takes the changes of at most `limit` Tenants, in the order of their keys, beyond `after`. The
    /// member's comes with the last of them.
    pub fn take(&self, after: Option<&TenantKey>, limit: usize) -> Part {
        let mut slots = self.lock();
        let start = after.map_or(Bound::Unbounded, Bound::Excluded);
        let mut beyond = slots.changed.range((start, Bound::Unbounded));
        let keys: Vec<TenantKey> = beyond.by_ref().take(limit).cloned().collect();
        let last = beyond.next().is_none();
        let mut tenants = BTreeMap::new();
        for key in keys {
            slots.changed.remove(&key);
            let report = slots.tenants.get(&key).cloned();
            tenants.insert(key, report);
        }
        let member =
            (last && std::mem::take(&mut slots.member_changed)).then(|| slots.member.clone());
        let changes = Changes { member, tenants };
        Part { changes, last }
    }

    /// How many Tenants have a report.
    pub fn tenants(&self) -> usize {
        self.lock().tenants.len()
    }

    /// What is acted on, as last reported.
    pub fn applied(&self) -> Option<(Version, String)> {
        self.lock().member.applied.clone()
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

    #[tokio::test]
    async fn after_resend_the_next_changes_are_the_whole_account() {
        let board = ReportBoard::default();
        for name in ["a", "b", "gone"] {
            board.tenant(&key(name), Some(report(1)));
        }
        board.changes().await;
        board.tenant(&key("gone"), None);
        board.resend();
        let changes = board.changes().await;
        assert_eq!(changes.member, Some(MemberReport::default()));
        let named: Vec<_> = changes.tenants.keys().cloned().collect();
        assert_eq!(named, [key("a"), key("b")]);
    }

    #[test]
    fn an_account_in_parts_names_each_tenant_once_however_fast_they_change() {
        let board = ReportBoard::default();
        for name in ["a", "b", "c", "d", "e"] {
            board.tenant(&key(name), Some(report(1)));
        }
        board.resend();
        let mut after = None;
        let mut named = Vec::new();
        loop {
            let part = board.take(after.as_ref(), 2);
            assert!(part.changes.tenants.len() <= 2);
            assert_eq!(part.changes.member.is_some(), part.last);
            after = part.changes.tenants.keys().last().cloned().or(after);
            named.extend(part.changes.tenants.into_keys());
            // What was sent already changes again: it waits for its turn after the account.
            board.tenant(&key("a"), Some(report(named.len() as i64 + 1)));
            if part.last {
                break;
            }
        }
        assert_eq!(named, ["a", "b", "c", "d", "e"].map(key));
        let after = board.take(None, 2);
        assert_eq!(after.changes.tenants[&key("a")], Some(report(6)));
        assert!(after.last);
    }
}
