//! KryptonDeployments, as far as members carry them out: the orders of each member in, its newest reports
//! out. Of which member a deployment is, whoever gives the orders decides.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use krypton_common::account::AccountDigest;
use krypton_common::conditions::reason;
use krypton_common::deployment::{DeploymentKey, DeploymentReport, DesiredDeployment};
use tokio::sync::watch;

/// Deployments of one member, at most.
pub const DEPLOYMENTS_MAX: usize = 2_000;
/// Bytes of their orders as JSON, at most: they are on record on the member, in a Secret of 1 MiB, with the
/// chart's values. One has some 350.
pub const ORDERS_MAX: usize = 720 * 1024;

/// The orders of all members, by the member's name; each list by namespace and name.
pub type Orders = BTreeMap<String, Arc<[DesiredDeployment]>>;

/// The newest word of one member on one of its deployments.
#[derive(Clone, Debug, PartialEq)]
pub struct Said {
    pub report: DeploymentReport,
    /// Whoever speaks for the member has said it. If not, it is from before, and stands until all is said
    /// again.
    pub fresh: bool,
}

#[derive(Debug, Default)]
struct OfMember {
    said: BTreeMap<DeploymentKey, Said>,
    digest: AccountDigest<DeploymentKey>,
    whole: bool,
}

/// Orders and reports of all members.
#[derive(Debug, Default)]
pub struct Deployments {
    /// `None` until it is known what there is to be ordered.
    orders: watch::Sender<Option<Orders>>,
    members: Mutex<BTreeMap<String, OfMember>>,
    /// How often a report has changed, to be waited for.
    changed: watch::Sender<u64>,
}

impl Deployments {
    /// Sets all that members are to do. What is missing is left as it is on the member: only an order to
    /// remove uninstalls (design §3, rule 1). A list is within [`DEPLOYMENTS_MAX`]
    /// and [`ORDERS_MAX`].
    pub fn order(&self, mut next: BTreeMap<String, Vec<DesiredDeployment>>) {
        next.retain(|_, orders| !orders.is_empty());
        for orders in next.values_mut() {
            orders.sort_by_key(DesiredDeployment::key);
            orders.dedup_by_key(|order| order.key());
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

    /// The orders, to follow.
    pub fn orders(&self) -> watch::Receiver<Option<Orders>> {
        self.orders.subscribe()
    }

    /// Wakes whoever follows when a report has changed.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.changed.subscribe()
    }

    /// What the member has last said of a deployment; `None` where it has said nothing, which says nothing
    /// of the release.
    pub fn said(&self, member: &str, key: &DeploymentKey) -> Option<Said> {
        self.lock().get(member)?.said.get(key).cloned()
    }

    /// All that the member has last said.
    pub fn all(&self, member: &str) -> BTreeMap<DeploymentKey, Said> {
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
        changes: BTreeMap<DeploymentKey, Option<DeploymentReport>>,
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
        let kept = found.said.len() <= DEPLOYMENTS_MAX;
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

    /// Of a member that leaves with its releases: how many deployments it has, and how many of them say
    /// that they have gone with it.
    pub(crate) fn retired(&self, member: &str) -> (usize, usize) {
        let members = self.lock();
        let Some(found) = members.get(member) else {
            return (0, 0);
        };
        let gone = |said: &&Said| said.report.state.ready.reason == reason::UNINSTALLED;
        let gone = found.said.values().filter(gone);
        (found.said.len(), gone.count())
    }

    /// The member is no more. Its orders are for whoever gave them to take back.
    pub(crate) fn forget(&self, member: &str) {
        self.lock().remove(member);
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, BTreeMap<String, OfMember>> {
        // Plain values: a panic elsewhere cannot leave them half written.
        self.members.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use krypton_common::conditions::{ClusterState, State, Truth};

    use super::*;

    fn order(namespace: &str, name: &str) -> DesiredDeployment {
        DesiredDeployment {
            namespace: namespace.to_owned(),
            name: name.to_owned(),
            uid: format!("uid-of-{name}"),
            ..DesiredDeployment::default()
        }
    }

    fn report(why: &str) -> DeploymentReport {
        DeploymentReport {
            uid: "uid-1".to_owned(),
            observed_generation: 1,
            gone: false,
            applied_chart: String::new(),
            state: ClusterState {
                ready: State::new(Truth::False, why, ""),
                progress: None,
                error: None,
            },
        }
    }

    fn said(deployments: &Deployments, name: &str, why: Option<&str>) {
        let change = (order("n", name).key(), why.map(report));
        deployments.report("edge-1", [change].into());
    }

    #[test]
    fn orders_are_sorted_and_news_only_where_they_differ() {
        let deployments = Deployments::default();
        let mut orders = deployments.orders();
        let of =
            |member: &str, orders: Vec<DesiredDeployment>| [(member.to_owned(), orders)].into();
        assert!(orders.borrow().is_none());
        deployments.order(of("edge-1", vec![order("b", "a"), order("a", "b")]));
        let given = orders.borrow_and_update().as_ref().unwrap()["edge-1"].to_vec();
        assert_eq!(given, [order("a", "b"), order("b", "a")]);
        deployments.order(of("edge-1", vec![order("a", "b"), order("b", "a")]));
        assert!(!orders.has_changed().unwrap());
        deployments.order(of("edge-1", Vec::new()));
        assert!(orders.borrow_and_update().as_ref().unwrap().is_empty());
        deployments.order(BTreeMap::new());
        assert!(!orders.has_changed().unwrap());
    }

    #[test]
    fn what_was_said_stands_until_all_is_said_again_and_the_digest_is_of_what_is_held() {
        let deployments = Deployments::default();
        let changes = deployments.changes();
        said(&deployments, "a", Some("Installed"));
        said(&deployments, "b", Some("Installed"));
        deployments.whole("edge-1");
        let before = deployments.digest("edge-1");
        deployments.begin("edge-1");
        let key = order("n", "b").key();
        assert!(!deployments.said("edge-1", &key).unwrap().fresh);
        said(&deployments, "a", Some("Installed"));
        assert_eq!(deployments.digest("edge-1"), before);
        deployments.whole("edge-1");
        assert_eq!(deployments.said("edge-1", &key), None);
        assert_eq!(deployments.digest("edge-1").0, 1);
        assert!(changes.has_changed().unwrap());
        said(&deployments, "a", None);
        assert_eq!(deployments.digest("edge-1"), (0, 0));
    }

    #[test]
    fn of_a_member_that_leaves_those_count_that_have_gone_with_it() {
        let deployments = Deployments::default();
        assert_eq!(deployments.retired("edge-1"), (0, 0));
        said(&deployments, "a", Some(reason::UNINSTALLED));
        said(&deployments, "b", Some(reason::DELETING));
        assert_eq!(deployments.retired("edge-1"), (2, 1));
    }
}
