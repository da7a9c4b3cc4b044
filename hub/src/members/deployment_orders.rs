//! Orders of KryptonDeployments to members.

use krypton_types::conditions::reason;
use krypton_types::deployment::{DeploymentKey, DeploymentReport, DesiredDeployment};

use crate::members::remote_orders::{self, Order, RemoteOrders};

/// Maximum number of deployments on one member.
pub const DEPLOYMENTS_MAX: usize = 2_000;
/// Maximum size of their orders as JSON, in bytes; one takes about 350. The member records them in a Secret of
/// 1 MiB, together with the chart's values and the placed Tenants.
pub const ORDERS_MAX: usize = 448 * 1024;

pub type Deployments = RemoteOrders<DesiredDeployment>;
pub type Orders = remote_orders::Orders<DesiredDeployment>;
pub type Said = remote_orders::Said<DeploymentReport>;

impl Order for DesiredDeployment {
    type Key = DeploymentKey;
    type Report = DeploymentReport;
    const MOST: usize = DEPLOYMENTS_MAX;

    fn key(&self) -> DeploymentKey {
        self.key()
    }
}

impl Deployments {
    /// Returns how many deployments a decommissioned member has, and how many of them are uninstalled.
    pub(crate) fn retired(&self, member: &str) -> (usize, usize) {
        self.count(member, |report| {
            report.state.ready.reason == reason::UNINSTALLED
        })
    }
}

#[cfg(test)]
mod tests {
    use krypton_runtime::newest::{Newest as _, NewestSeen as _};
    use krypton_types::conditions::{ClusterState, State, Truth};

    use std::collections::BTreeMap;
    use std::time::Duration;

    use krypton_runtime::clock::BootTime;

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
            state: ClusterState::from(State::new(Truth::False, why, "")),
            events: Vec::new(),
        }
    }

    fn said(deployments: &Deployments, name: &str, why: Option<&str>) {
        let change = (order("n", name).key(), why.map(report));
        deployments.report("edge-1", [change].into());
    }

    #[test]
    fn orders_are_sorted_and_notify_only_on_change() {
        let deployments = Deployments::default();
        let mut orders = deployments.orders();
        let of =
            |member: &str, orders: Vec<DesiredDeployment>| [(member.to_owned(), orders)].into();
        assert!(orders.get().is_none());
        deployments.order(of("edge-1", vec![order("b", "a"), order("a", "b")]));
        let given = orders.see().as_ref().unwrap()["edge-1"].to_vec();
        assert_eq!(given, [order("a", "b"), order("b", "a")]);
        deployments.order(of("edge-1", vec![order("a", "b"), order("b", "a")]));
        assert!(!orders.has_changed().unwrap());
        deployments.order(of("edge-1", Vec::new()));
        assert!(orders.see().as_ref().unwrap().is_empty());
        deployments.order(BTreeMap::new());
        assert!(!orders.has_changed().unwrap());
    }

    #[test]
    fn old_reports_stand_until_next_full_report() {
        let deployments = Deployments::default();
        let changes = deployments.changes();
        said(&deployments, "a", Some("Installed"));
        said(&deployments, "b", Some("Installed"));
        deployments.finish("edge-1");
        let before = deployments.digest("edge-1");
        deployments.begin("edge-1");
        let key = order("n", "b").key();
        assert!(!deployments.said("edge-1", &key).unwrap().fresh);
        said(&deployments, "a", Some("Installed"));
        assert_eq!(deployments.digest("edge-1"), before);
        deployments.finish("edge-1");
        assert_eq!(deployments.said("edge-1", &key), None);
        assert_eq!(deployments.digest("edge-1").0, 1);
        assert!(changes.has_changed().unwrap());
        said(&deployments, "a", None);
        assert_eq!(deployments.digest("edge-1"), (0, 0));
    }

    #[test]
    fn read_from_earlier_term_orders_nothing() {
        let deployments = Deployments::default();
        let mut orders = deployments.orders();
        let give = |deployments: &Deployments| {
            deployments.order([("edge-1".to_owned(), vec![order("n", "a")])].into());
        };
        let [first, second] = [1, 2].map(|since| Some(BootTime(Duration::from_secs(since))));
        give(&deployments);
        assert!(orders.see().is_some());
        deployments.reset_for_term(second.unwrap());
        assert!(orders.see().is_none());
        // From a task that has not noticed the new term, and from one that has read in an earlier term.
        for of in [None, first] {
            deployments.read_in(of);
            give(&deployments);
            assert!(orders.see().is_none(), "{of:?}");
        }
        deployments.read_in(second);
        give(&deployments);
        assert!(orders.see().is_some());
    }

    #[test]
    fn leaving_member_counts_uninstalled_deployments() {
        let deployments = Deployments::default();
        assert_eq!(deployments.retired("edge-1"), (0, 0));
        said(&deployments, "a", Some(reason::UNINSTALLED));
        said(&deployments, "b", Some(reason::DELETING));
        assert_eq!(deployments.retired("edge-1"), (2, 1));
    }
}
