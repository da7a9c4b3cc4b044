//! What members carry out for home: the orders of each member in, its newest reports out. Of which member an
//! order is, whoever gives it decides.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use krypton_runtime::clock::BootTime;
use krypton_types::report_digest::AccountDigest;
use serde::Serialize;
use tokio::sync::watch;

/// An order of home to a member.
pub trait Order: Clone + PartialEq {
    type Key: Ord + Clone + fmt::Debug + Serialize;
    type Report: Clone + fmt::Debug + Serialize;
    /// Of one member, at most: what is ordered of it is on record on it, in a Secret of 1 MiB.
    const MOST: usize;
    fn key(&self) -> Self::Key;
}

/// The orders of all members, by the member's name; each list by its keys.
pub type Orders<O> = BTreeMap<String, Arc<[O]>>;

/// The newest word of one member on one order.
#[derive(Clone, Debug, PartialEq)]
pub struct Said<R> {
    pub report: R,
    /// Whoever speaks for the member has said it. If not, it is from before, and stands until all is said
    /// again.
    pub fresh: bool,
}

#[derive(Debug)]
pub(crate) struct OfMember<O: Order> {
    pub(crate) said: BTreeMap<O::Key, Said<O::Report>>,
    digest: AccountDigest<O::Key>,
    whole: bool,
}

impl<O: Order> Default for OfMember<O> {
    fn default() -> Self {
        Self {
            said: BTreeMap::new(),
            digest: AccountDigest::default(),
            whole: false,
        }
    }
}

/// Orders and reports of all members.
#[derive(Debug)]
pub struct RemoteOrders<O: Order> {
    /// `None` until it is known what there is to be ordered.
    orders: watch::Sender<Option<Orders<O>>>,
    /// Orders that are not of this tenure, by its beginning, are of what was read before it, and are not taken.
    /// Changed while the orders are held.
    awaited: Mutex<Option<BootTime>>,
    members: Mutex<BTreeMap<String, OfMember<O>>>,
    /// How often a report has changed, to be waited for.
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
    /// A tenure begins: what was ordered by what was read before is not known any more, until
    /// [`Self::read_in`] this one.
    pub fn anew(&self, since: BootTime) {
        self.orders.send_modify(|all| {
            *self.awaited() = Some(since);
            *all = None;
        });
    }

    /// What is ordered from here on follows from what was read in this tenure.
    pub fn read_in(&self, since: Option<BootTime>) {
        let mut awaited = self.awaited();
        if *awaited == since {
            *awaited = None;
        }
    }

    fn awaited(&self) -> std::sync::MutexGuard<'_, Option<BootTime>> {
        self.awaited.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets all that members are to do. What is missing is left as it is on the member: only an order to
    /// remove removes. A list must not have more than [`Order::MOST`].
    pub fn order(&self, next: BTreeMap<String, Vec<O>>) {
        let ready = next.into_iter().map(|(name, orders)| (name, ready(orders)));
        let next: BTreeMap<String, Vec<O>> =
            ready.filter(|(_, orders)| !orders.is_empty()).collect();
        self.orders.send_if_modified(|all| {
            if self.awaited().is_some() {
                return false;
            }
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

    /// The same of one member, once it is known what there is to be ordered of all.
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

    /// The orders, to follow.
    pub fn orders(&self) -> watch::Receiver<Option<Orders<O>>> {
        self.orders.subscribe()
    }

    /// Wakes whoever follows when a report has changed.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.changed.subscribe()
    }

    /// Wakes all followers although no report has changed.
    pub(crate) fn look_again(&self) {
        self.changed.send_modify(|changes| *changes += 1);
    }

    /// What the member has last said of an order; `None` where it has said nothing, which says nothing of
    /// what was ordered.
    pub fn said(&self, member: &str, key: &O::Key) -> Option<Said<O::Report>> {
        self.lock().get(member)?.said.get(key).cloned()
    }

    /// All that the member has last said.
    pub fn all(&self, member: &str) -> BTreeMap<O::Key, Said<O::Report>> {
        let members = self.lock();
        members
            .get(member)
            .map(|found| found.said.clone())
            .unwrap_or_default()
    }

    /// Takes in one member's changes. False when there are more than are kept of one.
    pub(crate) fn report(
        &self,
        member: &str,
        changes: BTreeMap<O::Key, Option<O::Report>>,
    ) -> bool {
        if changes.is_empty() {
            return true;
        }
        let mut members = self.lock();
        let found = members.entry(member.to_owned()).or_default();
        for (key, report) in changes {
            found.digest.set(&key, report.as_ref());
            match report {
                Some(report) => {
                    let fresh = true;
                    found.said.insert(key, Said { report, fresh })
                }
                None => found.said.remove(&key),
            };
        }
        // What was said by a speaker before stands until all is said again, and may be of others.
        let kept = found.said.len() <= O::MOST
            || found.said.values().filter(|said| said.fresh).count() <= O::MOST;
        drop(members);
        self.changed.send_modify(|changes| *changes += 1);
        kept
    }

    /// Another speaks for the member, or says all again: what was said stands until then.
    pub(crate) fn begin(&self, member: &str) {
        if let Some(found) = self.lock().get_mut(member) {
            found.whole = false;
            found.said.values_mut().for_each(|said| said.fresh = false);
        }
    }

    /// The member has said all it has.
    pub(crate) fn whole(&self, member: &str) {
        let mut members = self.lock();
        let found = members.entry(member.to_owned()).or_default();
        if found.whole {
            return;
        }
        found.whole = true;
        let known = found.said.len();
        found.said.retain(|_, said| said.fresh);
        let said = &found.said;
        found.digest.retain(|key| said.contains_key(key));
        let fewer = said.len() < known;
        drop(members);
        if fewer {
            self.changed.send_modify(|changes| *changes += 1);
        }
    }

    /// How many the member has said something of, and the digest of it.
    pub(crate) fn digest(&self, member: &str) -> (u64, u128) {
        let members = self.lock();
        let found = members.get(member);
        found.map(|found| found.digest.value()).unwrap_or_default()
    }

    /// The member is no more. Its orders are for whoever gave them to take back.
    pub(crate) fn forget(&self, member: &str) {
        self.lock().remove(member);
    }

    pub(crate) fn lock(&self) -> std::sync::MutexGuard<'_, BTreeMap<String, OfMember<O>>> {
        // Plain values: a panic elsewhere cannot leave them half written.
        self.members.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// In the order of their keys, each once.
fn ready<O: Order>(mut orders: Vec<O>) -> Vec<O> {
    orders.sort_by_key(Order::key);
    orders.dedup_by_key(|order| order.key());
    orders
}
