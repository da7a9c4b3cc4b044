//! Stores the home cluster's orders to each member and the members' latest reports. The caller assigns an order
//! to a member.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, PoisonError};

use krypton_runtime::clock::BootTime;
use krypton_runtime::sync::{Mutex, MutexGuard};
use krypton_types::report_digest;
use serde::Serialize;
use tokio::sync::watch;

use crate::members::report_set::ReportSet;

/// An order of the home cluster to a member.
pub trait Order: Clone + PartialEq {
    type Key: Ord + Clone + fmt::Debug + Serialize;
    type Report: Clone + fmt::Debug + Serialize;
    /// Maximum number of orders to one member. The member records its orders in a Secret of at most 1 MiB.
    const MOST: usize;
    fn key(&self) -> Self::Key;
}

/// The orders of all members, by the member's name. Each list is sorted by key.
pub type Orders<O> = BTreeMap<String, Arc<[O]>>;

/// Latest report of one member on one order.
#[derive(Clone, Debug, PartialEq)]
pub struct Said<R> {
    pub report: R,
    /// The current reporter has sent it. Otherwise it comes from an earlier one and stays until the full report
    /// is complete.
    pub fresh: bool,
}

type Reports<O> = ReportSet<<O as Order>::Key, <O as Order>::Report>;

/// Orders and reports of all members.
#[derive(Debug)]
pub struct RemoteOrders<O: Order> {
    /// `None` until the orders are known.
    orders: watch::Sender<Option<Orders<O>>>,
    /// Start of the leader term whose sources have not been read yet. Until then, orders are ignored because
    /// they derive from older reads. Locked before the orders.
    awaited: Mutex<Option<BootTime>>,
    members: Mutex<BTreeMap<String, Reports<O>>>,
    /// Counts changes of reports. Callers wait on it for the next change.
    changed: watch::Sender<u64>,
}

impl<O: Order> Default for RemoteOrders<O> {
    fn default() -> Self {
        Self {
            orders: watch::Sender::default(),
            awaited: Mutex::default(),
            members: Mutex::default(),
            changed: watch::Sender::default(),
        }
    }
}

impl<O: Order> RemoteOrders<O> {
    /// Starts a leader term. Clears the orders until the sources are [read in it](Self::read_in).
    pub fn reset_for_term(&self, since: BootTime) {
        let mut awaited = self.awaited();
        *awaited = Some(since);
        self.orders.send_replace(None);
    }

    /// Records that orders now derive from sources read in this term.
    pub fn read_in(&self, since: Option<BootTime>) {
        let mut awaited = self.awaited();
        if *awaited == since {
            *awaited = None;
        }
    }

    fn awaited(&self) -> MutexGuard<'_, Option<BootTime>> {
        self.awaited.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets the orders of all members. A missing order changes nothing on its member: only an order to remove
    /// removes. A list must not have more than [`Order::MOST`] entries.
    pub fn order(&self, next: BTreeMap<String, Vec<O>>) {
        let ready = next.into_iter().map(|(name, orders)| (name, ready(orders)));
        let next: BTreeMap<String, Vec<O>> =
            ready.filter(|(_, orders)| !orders.is_empty()).collect();
        let awaited = self.awaited();
        if awaited.is_some() {
            return;
        }
        self.orders.send_if_modified(|all| {
            let same = all.as_ref().is_some_and(|all| {
                let held = all.iter().map(|(name, orders)| (name, &**orders));
                held.eq(next.iter().map(|(name, orders)| (name, &**orders)))
            });
            if !same {
                let shared = next.into_iter().map(|(name, orders)| (name, orders.into()));
                *all = Some(shared.collect());
            }
            !same
        });
    }

    /// Sets the orders of one member. Has no effect until the orders of all members are known.
    pub fn order_of(&self, member: &str, orders: Vec<O>) {
        let orders = ready(orders);
        self.orders.send_if_modified(|all| {
            let Some(all) = all else { return false };
            let before = all.get(member).map_or(&[][..], |before| before);
            let changed = before != orders.as_slice();
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
    pub(crate) fn look_again(&self) {
        self.changed.send_modify(|changes| *changes += 1);
    }

    /// Returns the member's latest report on an order. `None` does not mean that the order was not carried out.
    pub fn said(&self, member: &str, key: &O::Key) -> Option<Said<O::Report>> {
        let members = self.lock();
        let reports = members.get(member)?;
        Some(said::<O>(reports, key, reports.get(key)?))
    }

    /// Returns the member's latest reports on all orders.
    pub fn all(&self, member: &str) -> BTreeMap<O::Key, Said<O::Report>> {
        let members = self.lock();
        let reports = members.get(member).into_iter();
        reports
            .flat_map(|reports| {
                let all = reports.iter();
                all.map(|(key, report)| (key.clone(), said::<O>(reports, key, report)))
            })
            .collect()
    }

    /// Counts the orders that the member has reported on, and those whose report fulfils `is`.
    pub(crate) fn count(&self, member: &str, is: impl Fn(&O::Report) -> bool) -> (usize, usize) {
        let members = self.lock();
        members.get(member).map_or((0, 0), |reports| {
            let fulfil = reports.iter().filter(|(_, report)| is(report));
            (reports.len(), fulfil.count())
        })
    }

    /// Applies one member's changes. Returns false if the member has more reports than [`Order::MOST`].
    pub(crate) fn report(
        &self,
        member: &str,
        changes: BTreeMap<O::Key, Option<O::Report>>,
    ) -> bool {
        if changes.is_empty() {
            return true;
        }
        let mut members = self.lock();
        let reports = members.entry(member.to_owned()).or_default();
        for (key, report) in changes {
            match report {
                Some(report) => {
                    let part = report_digest::part(&key, &report);
                    reports.insert(key, report, part);
                }
                None => drop(reports.remove(&key)),
            }
        }
        // Reports of an earlier reporter stay until the full report is complete, and may be on other orders.
        let kept = reports.len() <= O::MOST || reports.current_len() <= O::MOST;
        drop(members);
        self.look_again();
        kept
    }

    /// Starts a new full report. Earlier reports stay until it is complete.
    pub(crate) fn begin(&self, member: &str) {
        if let Some(reports) = self.lock().get_mut(member) {
            reports.begin();
        }
    }

    /// Records that the full report is complete, and drops reports that it does not contain.
    pub(crate) fn finish(&self, member: &str) {
        let mut members = self.lock();
        let dropped = members.entry(member.to_owned()).or_default().finish();
        drop(members);
        if !dropped.is_empty() {
            self.look_again();
        }
    }

    /// Returns the number of orders that the member has reported on, and the digest of these reports.
    pub(crate) fn digest(&self, member: &str) -> (u64, u128) {
        let members = self.lock();
        let reports = members.get(member);
        reports.map(ReportSet::digest).unwrap_or_default()
    }

    /// Forgets a deleted member. The caller withdraws its orders.
    pub(crate) fn forget(&self, member: &str) {
        self.lock().remove(member);
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Reports<O>>> {
        // A panic cannot leave these plain values half written, so a poisoned lock is safe to use.
        self.members.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn said<O: Order>(reports: &Reports<O>, key: &O::Key, report: &O::Report) -> Said<O::Report> {
    Said {
        report: report.clone(),
        fresh: reports.is_current(key),
    }
}

/// Sorts the orders by key and removes duplicates.
fn ready<O: Order>(mut orders: Vec<O>) -> Vec<O> {
    orders.sort_by_key(Order::key);
    orders.dedup_by_key(|order| order.key());
    orders
}
