//! Selects the next message to the hub and maintains the digest of the sent reports. Performs no I/O.

use krypton_proto::REPORTS_PER_MESSAGE;
use krypton_proto::v1::{
    Applied, Deployment, Heartbeat, Placed, Report, Tenant, TrustedRoots, agent_message,
};
use krypton_reconciler::report_store::{ReportStore, SlotKey};
use krypton_types::deployment::DeploymentKey;
use krypton_types::desired::Version;
use krypton_types::report_digest::{ReportDigest, together};
use krypton_types::tenant::TenantKey;

/// One slot for each kind of message. A newer message replaces an unsent one.
#[derive(Debug)]
pub(super) struct ReportQueue {
    applied: Option<Applied>,
    trusted_roots: Option<TrustedRoots>,
    account: Option<Account>,
    heartbeat: bool,
    changed: bool,
    digest: ReportDigest,
    deployments: ReportDigest<DeploymentKey>,
    placed: ReportDigest<TenantKey>,
}

/// A full report in progress.
#[derive(Debug)]
struct Account {
    /// Number of the hub's request; 0 for the full report at the start of a session.
    number: u64,
    /// Key of the last report that was sent.
    after: Option<SlotKey>,
}

impl ReportQueue {
    /// Starts with a full report. The caller must call [`ReportStore::resend`].
    pub(super) fn new() -> Self {
        Self {
            applied: None,
            trusted_roots: None,
            account: Some(Account::new(0)),
            heartbeat: false,
            changed: false,
            digest: ReportDigest::default(),
            deployments: ReportDigest::default(),
            placed: ReportDigest::default(),
        }
    }

    pub(super) fn applied(&mut self, version: Version, digest: String) {
        self.applied = Some(Applied::new(version, digest));
    }

    pub(super) fn trusted_roots(&mut self, trusted_roots: TrustedRoots) {
        self.trusted_roots = Some(trusted_roots);
    }

    /// Restarts the full report. The caller must call [`ReportStore::resend`].
    pub(super) fn resync(&mut self, number: u64) {
        self.account = Some(Account::new(number));
        self.digest = ReportDigest::default();
        self.deployments = ReportDigest::default();
        self.placed = ReportDigest::default();
    }

    pub(super) fn heartbeat(&mut self) {
        self.heartbeat = true;
    }

    /// Notes that the report store has unsent reports.
    pub(super) fn changed(&mut self) {
        self.changed = true;
    }

    pub(super) fn has_changes(&self) -> bool {
        self.changed || self.account.is_some()
    }

    pub(super) fn has_something(&self) -> bool {
        self.applied.is_some()
            || self.trusted_roots.is_some()
            || self.account.is_some()
            || self.heartbeat
            || self.changed
    }

    /// Returns the next message with the newest content. A heartbeat waits for the end of a full report, because the
    /// digest of a partial one would not match. Changes wait for a heartbeat, because they could delay it forever.
    pub(super) fn next(&mut self, report_store: &ReportStore) -> Option<agent_message::Kind> {
        if let Some(applied) = self.applied.take() {
            return Some(agent_message::Kind::Applied(applied));
        }
        if let Some(trusted_roots) = self.trusted_roots.take() {
            return Some(agent_message::Kind::TrustedRoots(trusted_roots));
        }
        if let Some(account) = self.account.take() {
            return Some(agent_message::Kind::Report(
                self.part_of_account(account, report_store),
            ));
        }
        if std::mem::take(&mut self.heartbeat) {
            let (tenants, digest) = together([
                self.digest.value(),
                self.deployments.value(),
                self.placed.value(),
            ]);
            return Some(agent_message::Kind::Heartbeat(Heartbeat {
                tenants,
                digest_high: (digest >> 64) as u64,
                digest_low: digest as u64,
            }));
        }
        if !std::mem::take(&mut self.changed) {
            return None;
        }
        let part = report_store.take(None, REPORTS_PER_MESSAGE);
        self.changed = !part.last;
        let report = self.report(part.changes, None);
        let empty = report.tenants.is_empty()
            && report.deployments.is_empty()
            && report.placed.is_empty()
            && report.member.is_none();
        (!empty).then_some(agent_message::Kind::Report(report))
    }

    fn part_of_account(&mut self, account: Account, report_store: &ReportStore) -> Report {
        let part = report_store.take(account.after.as_ref(), REPORTS_PER_MESSAGE);
        let after = part.changes.last();
        let complete = part.last.then_some(account.number);
        if part.last {
            // The report store has marked the reports that changed in the meantime.
            self.changed = true;
        } else {
            self.account = Some(Account { after, ..account });
        }
        self.report(part.changes, complete)
    }

    fn report(
        &mut self,
        changes: krypton_reconciler::report_store::Changes,
        complete: Option<u64>,
    ) -> Report {
        let tenants = changes
            .tenants
            .iter()
            .map(|(key, report)| {
                self.digest.set(key, report.as_ref());
                Tenant::new(key, report.as_ref())
            })
            .collect();
        let deployments = changes
            .deployments
            .iter()
            .map(|(key, report)| {
                self.deployments.set(key, report.as_ref());
                Deployment::new(key, report.as_ref())
            })
            .collect();
        let placed = changes
            .placed
            .iter()
            .map(|(key, report)| {
                self.placed.set(key, report.as_ref());
                Placed::new(key, report.as_ref())
            })
            .collect();
        Report {
            tenants,
            deployments,
            placed,
            member: changes.member.as_ref().map(Into::into),
            complete,
        }
    }
}

impl Account {
    fn new(number: u64) -> Self {
        Self {
            number,
            after: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use krypton_types::conditions::{ClusterState, State, Truth};
    use krypton_types::deployment::DeploymentReport;
    use krypton_types::placed_tenant::PlacedReport;
    use krypton_types::tenant::{TenantKey, TenantReport};
    use proptest::prelude::*;

    use super::*;

    fn key(name: u16) -> TenantKey {
        TenantKey {
            namespace: "default".to_owned(),
            name: format!("t{name:04}"),
        }
    }

    fn report(generation: i64) -> TenantReport {
        TenantReport {
            observed_generation: generation,
            applied_chart: String::new(),
            next: None,
            state: ClusterState::from(State::new(Truth::True, "Installed", "")),
        }
    }

    fn report_store(tenants: u16) -> ReportStore {
        let report_store = ReportStore::default();
        for name in 0..tenants {
            report_store.tenant(&key(name), Some(report(1)));
        }
        report_store
    }

    /// Model of the hub, which stores the reports and computes the digest as the protocol requires.
    #[derive(Default)]
    struct Hub {
        known: BTreeMap<TenantKey, TenantReport>,
        account: Option<BTreeMap<TenantKey, TenantReport>>,
        completed: Vec<u64>,
        messages: usize,
        beats: usize,
    }

    impl Hub {
        /// Receives messages until the queue is empty.
        fn listen(&mut self, report_queue: &mut ReportQueue, report_store: &ReportStore) {
            while report_queue.has_something() {
                match report_queue.next(report_store) {
                    Some(agent_message::Kind::Report(report)) => self.hear(report),
                    Some(agent_message::Kind::Heartbeat(beat)) => {
                        let mut digest = ReportDigest::default();
                        for (key, report) in &self.known {
                            digest.set(key, Some(report));
                        }
                        let said = u128::from(beat.digest_high) << 64 | u128::from(beat.digest_low);
                        assert_eq!((beat.tenants, said), digest.value());
                        self.beats += 1;
                    }
                    _ => {}
                }
            }
        }

        fn hear(&mut self, report: Report) {
            self.messages += 1;
            assert!(report.tenants.len() <= REPORTS_PER_MESSAGE);
            for tenant in report.tenants {
                let (key, said) = tenant.read().unwrap();
                for known in [Some(&mut self.known), self.account.as_mut()] {
                    match (known, &said) {
                        (Some(known), Some(said)) => {
                            known.insert(key.clone(), said.clone());
                        }
                        (Some(known), None) => {
                            known.remove(&key);
                        }
                        (None, _) => {}
                    }
                }
            }
            if let Some(number) = report.complete {
                assert!(report.member.is_some(), "the account ends with the member");
                self.completed.push(number);
                self.known = self.account.take().unwrap();
            }
        }
    }

    #[test]
    fn session_starts_with_full_report_in_bounded_messages() {
        let report_store = report_store(450);
        report_store.resend();
        let mut report_queue = ReportQueue::new();
        let mut hub = Hub {
            account: Some(BTreeMap::new()),
            ..Hub::default()
        };
        report_queue.heartbeat();
        hub.listen(&mut report_queue, &report_store);
        assert_eq!((hub.known.len(), hub.messages, hub.beats), (450, 3, 1));
        assert_eq!(hub.completed, [0]);
    }

    #[test]
    fn heartbeat_digest_covers_tenants_deployments_and_placements() {
        let report_store = report_store(150);
        let deployment = |name: u16| DeploymentKey {
            namespace: "default".to_owned(),
            name: format!("t{name:04}"),
        };
        for name in 0..150 {
            let said = report(1);
            let said = DeploymentReport {
                uid: format!("uid-{name}"),
                observed_generation: 1,
                gone: false,
                applied_chart: String::new(),
                state: said.state,
                events: Vec::new(),
            };
            report_store.deployment(&deployment(name), Some(said));
            let placed = PlacedReport {
                uid: format!("uid-{name}"),
                observed_generation: 1,
                gone: false,
                state: State::new(Truth::True, "Placed", ""),
            };
            report_store.placed(&key(name), Some(placed));
        }
        report_store.resend();
        let mut report_queue = ReportQueue::new();
        report_queue.heartbeat();
        let mut tenants: ReportDigest = ReportDigest::default();
        let mut deployments = ReportDigest::default();
        let mut placed = ReportDigest::default();
        let mut beats = 0;
        while report_queue.has_something() {
            match report_queue.next(&report_store) {
                Some(agent_message::Kind::Report(report)) => {
                    let slots =
                        report.tenants.len() + report.deployments.len() + report.placed.len();
                    assert!(slots <= REPORTS_PER_MESSAGE);
                    for tenant in report.tenants {
                        let (key, said) = tenant.read().unwrap();
                        tenants.set(&key, said.as_ref());
                    }
                    for said in report.deployments {
                        let (key, said) = said.read().unwrap();
                        deployments.set(&key, said.as_ref());
                    }
                    for said in report.placed {
                        let (key, said) = said.read().unwrap();
                        placed.set(&key, said.as_ref());
                    }
                }
                Some(agent_message::Kind::Heartbeat(beat)) => {
                    let accounts = [tenants.value(), deployments.value(), placed.value()];
                    let (count, digest) = together(accounts);
                    let said = u128::from(beat.digest_high) << 64 | u128::from(beat.digest_low);
                    assert_eq!((beat.tenants, said), (count, digest));
                    assert_eq!(count, 450);
                    beats += 1;
                }
                _ => {}
            }
        }
        assert_eq!(beats, 1);
    }

    #[test]
    fn empty_full_report_is_complete() {
        let report_store = report_store(0);
        report_store.resend();
        let mut hub = Hub {
            account: Some(BTreeMap::new()),
            ..Hub::default()
        };
        hub.listen(&mut ReportQueue::new(), &report_store);
        assert_eq!((hub.messages, hub.completed), (1, vec![0]));
    }

    #[test]
    fn applied_answer_and_heartbeat_precede_changes() {
        let report_store = report_store(1);
        report_store.resend();
        let mut report_queue = ReportQueue::new();
        report_queue.next(&report_store);
        report_store.tenant(&key(0), Some(report(2)));
        report_queue.changed();
        report_queue.heartbeat();
        report_queue.applied(Version::default(), String::new());
        let kinds: Vec<_> = std::iter::from_fn(|| report_queue.next(&report_store)).collect();
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
    enum Step {
        Tenant(u16, Option<i64>),
        Send(usize),
        Beat,
        Resync(u64),
    }

    proptest! {
        // Full reports of three messages are large.
        #![proptest_config(ProptestConfig::with_cases(24))]

        /// After any sequence of changes, messages, heartbeats and resyncs, the hub has the content of the report
        /// store. No heartbeat on the way differs from the hub's state at that time.
        #[test]
        fn hub_converges_to_report_store_content(steps in proptest::collection::vec(prop_oneof![
            (0_u16..500, proptest::option::of(0_i64..4)).prop_map(|(name, said)| Step::Tenant(name, said)),
            (0_usize..3).prop_map(Step::Send),
            Just(Step::Beat),
            (1_u64..9).prop_map(Step::Resync),
        ], 0..60)) {
            let report_store = report_store(450);
            report_store.resend();
            let mut truth: BTreeMap<_, _> = (0..450).map(|name| (key(name), report(1))).collect();
            let mut report_queue = ReportQueue::new();
            let mut hub = Hub { account: Some(BTreeMap::new()), ..Hub::default() };
            for step in steps {
                match step {
                    Step::Tenant(name, said) => {
                        let said = said.map(report);
                        report_store.tenant(&key(name), said.clone());
                        match said {
                            Some(said) => truth.insert(key(name), said),
                            None => truth.remove(&key(name)),
                        };
                        report_queue.changed();
                    }
                    Step::Send(count) => for _ in 0..count {
                        match report_queue.next(&report_store) {
                            Some(agent_message::Kind::Report(report)) => hub.hear(report),
                            Some(agent_message::Kind::Heartbeat(beat)) => {
                                prop_assert_eq!(beat.tenants, hub.known.len() as u64);
                            }
                            _ => {}
                        }
                    },
                    Step::Beat => report_queue.heartbeat(),
                    Step::Resync(number) => {
                        report_store.resend();
                        report_queue.resync(number);
                        hub.account = Some(BTreeMap::new());
                    }
                }
            }
            report_queue.heartbeat();
            hub.listen(&mut report_queue, &report_store);
            prop_assert_eq!(hub.known, truth);
        }
    }
}
