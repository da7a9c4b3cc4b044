//! Orders of KryptonDeployments to members.

use krypton_types::conditions::reason;
use krypton_types::deployment::{
    DeploymentKey, DeploymentReport, DesiredDeployment, ReportedRevisions,
};

use crate::members::remote_orders::{self, Order, RemoteOrders};

/// Maximum number of deployments on one member.
pub const DEPLOYMENTS_MAX: usize = 2_000;
/// Maximum size of their orders as JSON, in bytes; one takes about 350. The member records them in a Secret of
/// 1 MiB, together with the chart's values and the placed Tenants.
pub const ORDERS_MAX: usize = 448 * 1024;
/// Limit for the texts of the revisions of one member, in bytes. 2,000 deployments need about 3.5 MiB.
const REVISIONS_MAX: usize = 4 * 1024 * 1024;

pub type DeploymentOrders = RemoteOrders<DesiredDeployment>;
pub type DeploymentOrderReport = remote_orders::OrderReport<DeploymentReport>;

impl Order for DesiredDeployment {
    type Key = DeploymentKey;
    type Report = DeploymentReport;
    const MAX: usize = DEPLOYMENTS_MAX;
    const OPTIONAL_MAX: usize = REVISIONS_MAX;

    fn key(&self) -> DeploymentKey {
        self.key()
    }

    fn optional_size(report: &DeploymentReport) -> usize {
        let revisions = report.revisions.as_deref();
        revisions.map_or(0, ReportedRevisions::text_size)
    }

    fn drop_optional(report: &mut DeploymentReport) {
        report.revisions = None;
    }
}

impl DeploymentOrders {
    /// Returns how many deployments a decommissioned member has, and how many of them are uninstalled.
    pub(crate) fn uninstall_counts(&self, member: &str) -> (usize, usize) {
        self.count(member, |report| {
            report.state.ready.reason == reason::UNINSTALLED
        })
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::ops::Range;
    use std::sync::Arc;
    use std::time::Duration;

    use krypton_runtime::clock::BootTime;
    use krypton_runtime::newest::{Newest as _, NewestSeen as _};
    use krypton_types::conditions::{ClusterState, State, Truth};
    use krypton_types::deployment::{ReportedChart, ReportedRevision};

    use super::*;

    fn order(namespace: &str, name: &str) -> DesiredDeployment {
        DesiredDeployment {
            namespace: namespace.to_owned(),
            name: name.to_owned(),
            uid: format!("uid-of-{name}"),
            ..DesiredDeployment::default()
        }
    }

    fn report(reason: &str) -> DeploymentReport {
        DeploymentReport {
            uid: "uid-1".to_owned(),
            observed_generation: 1,
            gone: false,
            applied_chart: String::new(),
            state: ClusterState::from(State::new(Truth::False, reason, "")),
            next: None,
            handled_request: None,
            events: Vec::new(),
            revisions: None,
        }
    }

    fn report_state(deployments: &DeploymentOrders, name: &str, reason: Option<&str>) {
        let change = (order("n", name).key(), reason.map(report));
        deployments.apply("edge-1", [change].into());
    }

    #[test]
    fn orders_are_sorted_and_notify_only_on_change() {
        let deployments = DeploymentOrders::default();
        let mut orders = deployments.orders();
        let for_member =
            |member: &str, orders: Vec<DesiredDeployment>| [(member.to_owned(), orders)].into();
        assert!(orders.get().is_none());
        deployments.set_orders(for_member("edge-1", vec![order("b", "a"), order("a", "b")]));
        let ordered = orders.get_and_update().as_ref().unwrap()["edge-1"].to_vec();
        assert_eq!(ordered, [order("a", "b"), order("b", "a")]);
        deployments.set_orders(for_member("edge-1", vec![order("a", "b"), order("b", "a")]));
        assert!(!orders.has_changed().unwrap());
        deployments.set_orders(for_member("edge-1", Vec::new()));
        assert!(orders.get_and_update().as_ref().unwrap().is_empty());
        deployments.set_orders(BTreeMap::new());
        assert!(!orders.has_changed().unwrap());
    }

    #[test]
    fn old_reports_stand_until_next_full_report() {
        let deployments = DeploymentOrders::default();
        let changes = deployments.changes();
        report_state(&deployments, "a", Some("Installed"));
        report_state(&deployments, "b", Some("Installed"));
        deployments.finish_full_report("edge-1");
        let full_digest = deployments.digest("edge-1");
        deployments.begin_full_report("edge-1");
        let key = order("n", "b").key();
        let old = deployments.latest_report("edge-1", &key).unwrap();
        assert!(!old.is_current);
        report_state(&deployments, "a", Some("Installed"));
        assert_eq!(deployments.digest("edge-1"), full_digest);
        deployments.finish_full_report("edge-1");
        assert_eq!(deployments.latest_report("edge-1", &key), None);
        assert_eq!(deployments.digest("edge-1").0, 1);
        assert!(changes.has_changed().unwrap());
        report_state(&deployments, "a", None);
        assert_eq!(deployments.digest("edge-1"), (0, 0));
    }

    #[test]
    fn reported_revisions_of_member_are_bounded() {
        let deployments = DeploymentOrders::default();
        let long = || Some("l".repeat(1000));
        let revision = |revision: u32| ReportedRevision {
            revision,
            fingerprint: long(),
            owner_uid: long(),
            run: long(),
            chart: Some(ReportedChart {
                name: "n".repeat(1000),
                version: "v".repeat(1000),
                is_read: true,
            }),
            ..ReportedRevision::default()
        };
        let revisions = ReportedRevisions::new("agent", (0..10).map(revision).collect());
        let revisions = Arc::new(revisions);
        let key = |number: usize| order("n", &number.to_string()).key();
        let send = |numbers: Range<usize>| {
            let report = || DeploymentReport {
                revisions: Some(Arc::clone(&revisions)),
                ..report("Installed")
            };
            let changes = numbers.map(|number| (key(number), Some(report())));
            assert!(deployments.apply("edge-1", changes.collect()));
        };
        let has_revisions = |number| {
            let stored = deployments.latest_report("edge-1", &key(number));
            stored.unwrap().report.revisions.is_some()
        };
        // The same reports again need no more room.
        for _ in 0..9 {
            send(0..500);
            assert!((0..500).all(has_revisions));
        }
        send(0..DEPLOYMENTS_MAX);
        assert!((0..500).all(has_revisions));
        let kept = (0..DEPLOYMENTS_MAX).filter(|it| has_revisions(*it));
        let texts = kept.count() * 10 * 700;
        assert!(texts <= REVISIONS_MAX, "{texts}");
        // Removed reports make room.
        let removed = (0..500).map(|number| (key(number), None));
        deployments.apply("edge-1", removed.collect());
        send(DEPLOYMENTS_MAX - 500..DEPLOYMENTS_MAX);
        assert!(has_revisions(DEPLOYMENTS_MAX - 1));
    }

    #[test]
    fn read_from_earlier_term_orders_nothing() {
        let deployments = DeploymentOrders::default();
        let mut orders = deployments.orders();
        let set_orders = |deployments: &DeploymentOrders| {
            deployments.set_orders([("edge-1".to_owned(), vec![order("n", "a")])].into());
        };
        let [first, second] = [1, 2].map(|since| Some(BootTime(Duration::from_secs(since))));
        set_orders(&deployments);
        assert!(orders.get_and_update().is_some());
        deployments.reset_for_term(second.unwrap());
        assert!(orders.get_and_update().is_none());
        // From a task that has not noticed the new term, and from one that has read in an earlier term.
        for term in [None, first] {
            deployments.read_in(term);
            set_orders(&deployments);
            assert!(orders.get_and_update().is_none(), "{term:?}");
        }
        deployments.read_in(second);
        set_orders(&deployments);
        assert!(orders.get_and_update().is_some());
    }

    #[test]
    fn leaving_member_counts_uninstalled_deployments() {
        let deployments = DeploymentOrders::default();
        assert_eq!(deployments.uninstall_counts("edge-1"), (0, 0));
        report_state(&deployments, "a", Some(reason::UNINSTALLED));
        report_state(&deployments, "b", Some(reason::DELETING));
        assert_eq!(deployments.uninstall_counts("edge-1"), (2, 1));
    }
}
