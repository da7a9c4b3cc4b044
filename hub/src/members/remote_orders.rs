//! Stores the home cluster's orders to each member and the members' latest reports. The caller assigns an order
//! to a member.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use krypton_runtime::clock::BootTime;
use krypton_runtime::sync::Mutex;
use krypton_types::report_digest;
use serde::Serialize;
use tokio::sync::watch;

use crate::members::report_set::ReportSet;

/// An order of the home cluster to a member.
pub trait Order: Clone + PartialEq {
    type Key: Ord + Clone + fmt::Debug + Serialize;
    type Report: Clone + fmt::Debug + Serialize;
    /// Maximum number of orders to one member. The member records its orders in a Secret of at most 1 MiB.
    const MAX: usize;
    fn key(&self) -> Self::Key;

    /// Returns the size in bytes of the part of a report that the hub can do without.
    fn optional_size(_report: &Self::Report) -> usize {
        0
    }

    /// Limit for this part of one member's reports, in bytes. Reports beyond it lose the part.
    const OPTIONAL_MAX: usize = 0;

    fn drop_optional(_report: &mut Self::Report) {}
}

/// The orders of all members, by the member's name. Each list is sorted by key.
pub type Orders<O> = BTreeMap<String, Arc<[O]>>;

/// Latest report of one member on one order.
#[derive(Clone, Debug, PartialEq)]
pub struct OrderReport<R> {
    pub report: R,
    /// Whether the current reporter has sent it. Otherwise it comes from an earlier one and stays until the full
    /// report is complete.
    pub is_current: bool,
}

/// Reports of one member.
#[derive(Debug)]
struct OrderReports<O: Order> {
    set: ReportSet<O::Key, O::Report>,
    /// Sum of [`Order::optional_size`].
    optional_size: usize,
}

impl<O: Order> Default for OrderReports<O> {
    fn default() -> Self {
        Self {
            set: ReportSet::default(),
            optional_size: 0,
        }
    }
}

impl<O: Order> OrderReports<O> {
    fn insert(&mut self, key: O::Key, mut report: O::Report) {
        let part = report_digest::part(&key, &report);
        let previous = self.set.get(&key).map_or(0, O::optional_size);
        let others = self.optional_size - previous;
        if others + O::optional_size(&report) > O::OPTIONAL_MAX {
            O::drop_optional(&mut report);
        }
        self.optional_size = others + O::optional_size(&report);
        self.set.insert(key, report, part);
    }

    fn remove(&mut self, key: &O::Key) {
        let removed = self.set.remove(key);
        self.optional_size -= removed.as_ref().map_or(0, O::optional_size);
    }

    /// Ends the full report. Returns whether it lacks earlier reports.
    fn finish_full_report(&mut self) -> bool {
        let dropped = self.set.finish_full_report();
        self.optional_size -= dropped.values().map(O::optional_size).sum::<usize>();
        !dropped.is_empty()
    }
}

/// Orders and reports of all members.
#[derive(Debug, Default)]
pub struct RemoteOrders<O: Order> {
    /// `None` until the orders are known.
    orders: watch::Sender<Option<Orders<O>>>,
    /// Start of the leader term whose sources have not been read yet. Until then, orders are ignored because
    /// they derive from older reads. Locked before the orders.
    awaited: Mutex<Option<BootTime>>,
    members: Mutex<BTreeMap<String, OrderReports<O>>>,
    /// Counts changes of reports. Callers wait on it for the next change.
    changed: watch::Sender<u64>,
}

impl<O: Order> RemoteOrders<O> {
    /// Starts a leader term. Clears the orders until the sources are [read in it](Self::read_in).
    pub fn reset_for_term(&self, since: BootTime) {
        let mut awaited = self.awaited.lock();
        *awaited = Some(since);
        self.orders.send_replace(None);
    }

    /// Records that orders now derive from sources read in this term.
    pub fn read_in(&self, since: Option<BootTime>) {
        let mut awaited = self.awaited.lock();
        if *awaited == since {
            *awaited = None;
        }
    }

    /// Sets the orders of all members. A missing order changes nothing on its member: only an order to remove
    /// removes. A list must not have more than [`Order::MAX`] entries.
    pub fn set_orders(&self, next: BTreeMap<String, Vec<O>>) {
        let sorted = next
            .into_iter()
            .map(|(name, orders)| (name, sorted(orders)));
        let next: BTreeMap<String, Vec<O>> =
            sorted.filter(|(_, orders)| !orders.is_empty()).collect();
        let awaited = self.awaited.lock();
        if awaited.is_some() {
            return;
        }
        self.orders.send_if_modified(|all| {
            let same = all.as_ref().is_some_and(|all| {
                let current = all.iter().map(|(name, orders)| (name, &**orders));
                current.eq(next.iter().map(|(name, orders)| (name, &**orders)))
            });
            if !same {
                let shared = next.into_iter().map(|(name, orders)| (name, orders.into()));
                *all = Some(shared.collect());
            }
            !same
        });
    }

    /// Sets the orders of one member. Has no effect until the orders of all members are known.
    pub fn set_member_orders(&self, member: &str, orders: Vec<O>) {
        let orders = sorted(orders);
        self.orders.send_if_modified(|all| {
            let Some(all) = all else { return false };
            let previous = all.get(member).map_or(&[][..], |previous| previous);
            let changed = previous != orders.as_slice();
            if changed && orders.is_empty() {
                all.remove(member);
            } else if changed {
                all.insert(member.to_owned(), orders.into());
            }
            changed
        });
    }

    /// Subscribes to the orders.
    pub fn orders(&self) -> watch::Receiver<Option<Orders<O>>> {
        self.orders.subscribe()
    }

    /// Subscribes to changes of reports.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.changed.subscribe()
    }

    /// Wakes all subscribers although no report has changed.
    pub(crate) fn notify(&self) {
        self.changed.send_modify(|changes| *changes += 1);
    }

    /// Returns the member's latest report on an order. `None` does not mean that the order was not carried out.
    pub fn latest_report(&self, member: &str, key: &O::Key) -> Option<OrderReport<O::Report>> {
        let members = self.members.lock();
        let reports = &members.get(member)?.set;
        Some(OrderReport {
            report: reports.get(key)?.clone(),
            is_current: reports.is_current(key),
        })
    }

    /// Counts the orders that the member has reported on, and those whose report matches.
    pub(crate) fn count(
        &self,
        member: &str,
        matches: impl Fn(&O::Report) -> bool,
    ) -> (usize, usize) {
        let members = self.members.lock();
        members.get(member).map_or((0, 0), |reports| {
            let matching = reports.set.iter().filter(|(_, report)| matches(report));
            (reports.set.len(), matching.count())
        })
    }

    /// Applies one member's changes. Returns false if the member has more reports than [`Order::MAX`].
    pub(crate) fn apply(&self, member: &str, changes: BTreeMap<O::Key, Option<O::Report>>) -> bool {
        if changes.is_empty() {
            return true;
        }
        let mut members = self.members.lock();
        let reports = members.entry(member.to_owned()).or_default();
        let mut all_fit = true;
        for (key, report) in changes {
            match report {
                // An agent that never completes a report would otherwise add to the earlier ones forever.
                Some(_) if reports.set.len() >= 2 * O::MAX && reports.set.get(&key).is_none() => {
                    all_fit = false;
                }
                Some(report) => reports.insert(key, report),
                None => reports.remove(&key),
            }
        }
        // Reports of an earlier reporter stay until the full report is complete, and may be on other orders.
        let set = &reports.set;
        let within_limit = all_fit && (set.len() <= O::MAX || set.current_len() <= O::MAX);
        drop(members);
        self.notify();
        within_limit
    }

    /// Starts a new full report. Earlier reports stay until it is complete.
    pub(crate) fn begin_full_report(&self, member: &str) {
        if let Some(reports) = self.members.lock().get_mut(member) {
            reports.set.begin_full_report();
        }
    }

    /// Records that the full report is complete, and drops reports that it does not contain.
    pub(crate) fn finish_full_report(&self, member: &str) {
        let mut members = self.members.lock();
        let has_dropped = members
            .entry(member.to_owned())
            .or_default()
            .finish_full_report();
        drop(members);
        if has_dropped {
            self.notify();
        }
    }

    /// Returns the number of orders that the member has reported on, and the digest of these reports.
    pub(crate) fn digest(&self, member: &str) -> (u64, u128) {
        let members = self.members.lock();
        let reports = members.get(member);
        reports.map_or((0, 0), |reports| reports.set.digest())
    }

    /// Forgets a deleted member. The caller withdraws its orders.
    pub(crate) fn forget(&self, member: &str) {
        self.members.lock().remove(member);
    }
}

/// Sorts the orders by key and removes duplicates.
fn sorted<O: Order>(mut orders: Vec<O>) -> Vec<O> {
    orders.sort_by_key(Order::key);
    orders.dedup_by_key(|order| order.key());
    orders
}
