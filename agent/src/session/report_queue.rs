//! Selects the next message to the hub and maintains the digest of the sent reports. Performs no I/O.

use std::collections::BTreeMap;

use krypton_proto::REPORTS_PER_MESSAGE;
use krypton_proto::v1::{
    Applied, Deployment, Heartbeat, Placed, Report, Tenant, TrustedRoots, agent_message,
};
use krypton_reconciler::report_store::{ReportKey, ReportStore};
use krypton_types::deployment::DeploymentKey;
use krypton_types::desired::Version;
use krypton_types::report_digest::{ReportDigest, combine};
use krypton_types::tenant::TenantKey;
use serde::Serialize;

/// One slot for each kind of message. A newer message replaces an unsent one.
#[derive(Debug, Default)]
pub(super) struct ReportQueue {
    applied: Option<Applied>,
    trusted_roots: Option<TrustedRoots>,
    full_report: Option<FullReport>,
    heartbeat: bool,
    changed: bool,
    tenant_digest: ReportDigest,
    deployment_digest: ReportDigest<DeploymentKey>,
    placed_digest: ReportDigest<TenantKey>,
}

/// A full report in progress.
#[derive(Debug)]
struct FullReport {
    /// Number of the hub's request; 0 for the full report at the start of a session.
    number: u64,
    /// Key of the last report that was sent.
    after: Option<ReportKey>,
}

impl ReportQueue {
    /// Starts with a full report. The caller must call [`ReportStore::resend`].
    pub(super) fn new() -> Self {
        Self {
            full_report: Some(FullReport::new(0)),
            ..Self::default()
        }
    }

    pub(super) fn set_applied(&mut self, version: Version, digest: String) {
        self.applied = Some(Applied::new(version, digest));
    }

    pub(super) fn set_trusted_roots(&mut self, trusted_roots: TrustedRoots) {
        self.trusted_roots = Some(trusted_roots);
    }

    /// Restarts the full report. The caller must call [`ReportStore::resend`].
    pub(super) fn resync(&mut self, number: u64) {
        self.full_report = Some(FullReport::new(number));
        self.tenant_digest = ReportDigest::default();
        self.deployment_digest = ReportDigest::default();
        self.placed_digest = ReportDigest::default();
    }

    pub(super) fn request_heartbeat(&mut self) {
        self.heartbeat = true;
    }

    /// Notes that the report store has unsent reports.
    pub(super) fn mark_changed(&mut self) {
        self.changed = true;
    }

    pub(super) fn has_changes(&self) -> bool {
        self.changed || self.full_report.is_some()
    }

    pub(super) fn has_message(&self) -> bool {
        self.applied.is_some()
            || self.trusted_roots.is_some()
            || self.full_report.is_some()
            || self.heartbeat
            || self.changed
    }

    /// Returns the next message with the newest content. A heartbeat waits for the end of a full report, because the
    /// digest of a partial one would not match. Changes wait for a heartbeat, because they could delay it forever.
    pub(super) fn next_message(
        &mut self,
        report_store: &ReportStore,
    ) -> Option<agent_message::Kind> {
        if let Some(applied) = self.applied.take() {
            return Some(agent_message::Kind::Applied(applied));
        }
        if let Some(trusted_roots) = self.trusted_roots.take() {
            return Some(agent_message::Kind::TrustedRoots(trusted_roots));
        }
        if let Some(full_report) = self.full_report.take() {
            return Some(agent_message::Kind::Report(
                self.full_report_part(full_report, report_store),
            ));
        }
        if std::mem::take(&mut self.heartbeat) {
            let digest = combine([
                self.tenant_digest.value(),
                self.deployment_digest.value(),
                self.placed_digest.value(),
            ]);
            return Some(agent_message::Kind::Heartbeat(Heartbeat::new(digest)));
        }
        if !std::mem::take(&mut self.changed) {
            return None;
        }
        let batch = report_store.take(None, REPORTS_PER_MESSAGE);
        self.changed = !batch.last;
        let report = self.report(batch.changes, None);
        let is_empty = report.tenants.is_empty()
            && report.deployments.is_empty()
            && report.placed.is_empty()
            && report.member.is_none();
        (!is_empty).then_some(agent_message::Kind::Report(report))
    }

    fn full_report_part(&mut self, full_report: FullReport, report_store: &ReportStore) -> Report {
        let batch = report_store.take(full_report.after.as_ref(), REPORTS_PER_MESSAGE);
        let after = batch.changes.last();
        let complete = batch.last.then_some(full_report.number);
        if batch.last {
            // The report store has marked the reports that changed in the meantime.
            self.changed = true;
        } else {
            self.full_report = Some(FullReport {
                after,
                ..full_report
            });
        }
        self.report(batch.changes, complete)
    }

    fn report(
        &mut self,
        changes: krypton_reconciler::report_store::Changes,
        complete: Option<u64>,
    ) -> Report {
        let deployment_digest = &mut self.deployment_digest;
        Report {
            tenants: messages(&changes.tenants, &mut self.tenant_digest, Tenant::new),
            deployments: messages(&changes.deployments, deployment_digest, Deployment::new),
            placed: messages(&changes.placed, &mut self.placed_digest, Placed::new),
            member: changes.member.map(Into::into),
            complete,
        }
    }
}

/// Returns the messages of the changed reports, and adds the reports to the digest.
fn messages<K: Ord + Clone + Serialize, R: Serialize, M>(
    changes: &BTreeMap<K, Option<R>>,
    digest: &mut ReportDigest<K>,
    new_message: impl Fn(&K, Option<&R>) -> M,
) -> Vec<M> {
    let mut messages = Vec::with_capacity(changes.len());
    for (key, report) in changes {
        digest.set(key, report.as_ref());
        messages.push(new_message(key, report.as_ref()));
    }
    messages
}

impl FullReport {
    fn new(number: u64) -> Self {
        Self {
            number,
            after: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use krypton_types::conditions::{State, Truth};
    use krypton_types::deployment::DeploymentReport;
    use krypton_types::placed_tenant::PlacedReport;
    use krypton_types::tenant::{TenantKey, TenantReport};
    use proptest::prelude::*;

    use super::*;

    fn key(name: u16) -> TenantKey {
        TenantKey::new("default", format!("t{name:04}"))
    }

    fn report(generation: i64) -> TenantReport {
        TenantReport::new(generation, State::new(Truth::True, "Installed", ""))
    }

    fn report_store(tenants: u16) -> ReportStore {
        let report_store = ReportStore::default();
        for name in 0..tenants {
            report_store.set_tenant(&key(name), Some(report(1)));
        }
        report_store
    }

    /// Model of the hub, which stores the reports and computes the digest as the protocol requires.
    #[derive(Default)]
    struct FakeHub {
        reports: BTreeMap<TenantKey, TenantReport>,
        full_report: Option<BTreeMap<TenantKey, TenantReport>>,
        deployments: ReportDigest<DeploymentKey>,
        placed: ReportDigest<TenantKey>,
        completed: Vec<u64>,
        messages: usize,
        /// Number of objects that each heartbeat counts.
        heartbeats: Vec<u64>,
    }

    impl FakeHub {
        /// Expects a full report.
        fn new() -> Self {
            Self {
                full_report: Some(BTreeMap::new()),
                ..Self::default()
            }
        }

        /// Receives messages until the queue is empty.
        fn drain(&mut self, report_queue: &mut ReportQueue, report_store: &ReportStore) {
            while report_queue.has_message() {
                match report_queue.next_message(report_store) {
                    Some(agent_message::Kind::Report(report)) => self.receive(report),
                    Some(agent_message::Kind::Heartbeat(heartbeat)) => {
                        let mut tenants = ReportDigest::default();
                        for (key, report) in &self.reports {
                            tenants.set(key, Some(report));
                        }
                        let other_digests = [self.deployments.value(), self.placed.value()];
                        let digests = [tenants.value(), combine(other_digests)];
                        assert_eq!(heartbeat.digest(), combine(digests));
                        self.heartbeats.push(heartbeat.tenants);
                    }
                    _ => {}
                }
            }
        }

        fn receive(&mut self, message: Report) {
            self.messages += 1;
            let count = message.tenants.len() + message.deployments.len() + message.placed.len();
            assert!(count <= REPORTS_PER_MESSAGE);
            for deployment in message.deployments {
                let (key, report) = deployment.read().unwrap();
                self.deployments.set(&key, report.as_ref());
            }
            for placed in message.placed {
                let (key, report) = placed.read().unwrap();
                self.placed.set(&key, report.as_ref());
            }
            for tenant in message.tenants {
                let (key, report) = tenant.read().unwrap();
                for reports in [Some(&mut self.reports), self.full_report.as_mut()] {
                    match (reports, &report) {
                        (Some(reports), Some(report)) => {
                            reports.insert(key.clone(), report.clone());
                        }
                        (Some(reports), None) => {
                            reports.remove(&key);
                        }
                        (None, _) => {}
                    }
                }
            }
            if let Some(number) = message.complete {
                assert!(message.member.is_some(), "the account ends with the member");
                self.completed.push(number);
                self.reports = self.full_report.take().unwrap();
            }
        }
    }

    #[test]
    fn session_starts_with_full_report_in_bounded_messages() {
        let report_store = report_store(450);
        report_store.resend();
        let mut report_queue = ReportQueue::new();
        let mut hub = FakeHub::new();
        report_queue.request_heartbeat();
        hub.drain(&mut report_queue, &report_store);
        assert_eq!((hub.reports.len(), hub.messages), (450, 3));
        assert_eq!((hub.completed, hub.heartbeats), (vec![0], vec![450]));
    }

    #[test]
    fn heartbeat_digest_covers_tenants_deployments_and_placements() {
        let report_store = report_store(150);
        let deployment = |name: u16| DeploymentKey::new("default", format!("t{name:04}"));
        for name in 0..150 {
            let deployment_report = DeploymentReport {
                uid: format!("uid-{name}"),
                observed_generation: 1,
                gone: false,
                applied_chart: String::new(),
                state: report(1).state,
                next: None,
                handled_request: None,
                events: Vec::new(),
                revisions: None,
            };
            report_store.set_deployment(&deployment(name), Some(deployment_report));
            let placed = PlacedReport {
                uid: format!("uid-{name}"),
                observed_generation: 1,
                gone: false,
                state: State::new(Truth::True, "Placed", ""),
            };
            report_store.set_placed(&key(name), Some(placed));
        }
        report_store.resend();
        let mut report_queue = ReportQueue::new();
        report_queue.request_heartbeat();
        let mut hub = FakeHub::new();
        hub.drain(&mut report_queue, &report_store);
        assert_eq!(hub.heartbeats, [450]);
    }

    #[test]
    fn empty_full_report_is_complete() {
        let report_store = report_store(0);
        report_store.resend();
        let mut hub = FakeHub::new();
        hub.drain(&mut ReportQueue::new(), &report_store);
        assert_eq!((hub.messages, hub.completed), (1, vec![0]));
    }

    #[test]
    fn applied_answer_and_heartbeat_precede_changes() {
        let report_store = report_store(1);
        report_store.resend();
        let mut report_queue = ReportQueue::new();
        report_queue.next_message(&report_store);
        report_store.set_tenant(&key(0), Some(report(2)));
        report_queue.mark_changed();
        report_queue.request_heartbeat();
        report_queue.set_applied(Version::default(), String::new());
        let kinds: Vec<_> =
            std::iter::from_fn(|| report_queue.next_message(&report_store)).collect();
        assert!(matches!(
            kinds.as_slice(),
            [
                agent_message::Kind::Applied(_),
                agent_message::Kind::Heartbeat(_),
                agent_message::Kind::Report(_)
            ]
        ));
    }

    #[derive(Clone, Debug)]
    enum TestAction {
        Tenant(u16, Option<i64>),
        Send(usize),
        Heartbeat,
        Resync(u64),
    }

    proptest! {
        // Full reports of three messages are large.
        #![proptest_config(ProptestConfig::with_cases(24))]

        /// After any sequence of changes, messages, heartbeats and resyncs, the hub has the content of the report
        /// store. No heartbeat on the way differs from the hub's state at that time.
        #[test]
        fn hub_converges_to_report_store_content(actions in proptest::collection::vec(prop_oneof![
            (0_u16..500, proptest::option::of(0_i64..4)).prop_map(|(name, generation)| TestAction::Tenant(name, generation)),
            (0_usize..3).prop_map(TestAction::Send),
            Just(TestAction::Heartbeat),
            (1_u64..9).prop_map(TestAction::Resync),
        ], 0..60)) {
            let report_store = report_store(450);
            report_store.resend();
            let mut expected: BTreeMap<_, _> = (0..450).map(|name| (key(name), report(1))).collect();
            let mut report_queue = ReportQueue::new();
            let mut hub = FakeHub::new();
            for action in actions {
                match action {
                    TestAction::Tenant(name, generation) => {
                        let report = generation.map(report);
                        report_store.set_tenant(&key(name), report.clone());
                        match report {
                            Some(report) => expected.insert(key(name), report),
                            None => expected.remove(&key(name)),
                        };
                        report_queue.mark_changed();
                    }
                    TestAction::Send(count) => for _ in 0..count {
                        match report_queue.next_message(&report_store) {
                            Some(agent_message::Kind::Report(report)) => hub.receive(report),
                            Some(agent_message::Kind::Heartbeat(heartbeat)) => {
                                prop_assert_eq!(heartbeat.tenants, hub.reports.len() as u64);
                            }
                            _ => {}
                        }
                    },
                    TestAction::Heartbeat => report_queue.request_heartbeat(),
                    TestAction::Resync(number) => {
                        report_store.resend();
                        report_queue.resync(number);
                        hub.full_report = Some(BTreeMap::new());
                    }
                }
            }
            report_queue.request_heartbeat();
            hub.drain(&mut report_queue, &report_store);
            prop_assert_eq!(hub.reports, expected);
        }
    }
}
