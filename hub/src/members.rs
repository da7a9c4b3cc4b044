//! The members that may connect, each with its slot of desired state: filled by the fleet, read by
//! sessions and proxies.

pub mod agent_keys;
pub mod arbiter;
mod claims;
pub mod deployment_orders;
pub mod duplicates;
pub mod found;
pub mod observation;
pub mod placement_orders;
pub mod remote_orders;
pub(crate) mod tenant_reports;
pub(crate) mod tenant_summary;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use krypton_crds::edge_cluster::AgentKeys;
use krypton_runtime::clock::BootTime;
use krypton_runtime::newest::Newest as _;
use krypton_runtime::rate_limit::{Bucket, Rate};
use krypton_types::deployment::DesiredDeployment;
use krypton_types::desired::crd_policy::CrdPolicy;
use krypton_types::desired::drift::DriftPolicy;
use krypton_types::desired::handling::Handling;
use krypton_types::desired::lockdown::Lockdown;
use krypton_types::desired::namespaces::NamespaceConfiguration;
use krypton_types::desired::{ChartState, DesiredState, Version};
use krypton_types::placed_tenant::PlacedTenant;
use tokio::sync::{Semaphore, watch};
use tokio_util::sync::CancellationToken;

/// The newest desired state of a member, and since when it is that.
#[derive(Clone, Debug)]
pub struct Slot {
    pub desired: Arc<DesiredState>,
    /// The same, ready to be sent: made once for all members that are given it.
    pub message: Arc<krypton_proto::v1::Desired>,
    pub since: BootTime,
}

/// Whether agents of a member are let in.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Admission {
    /// Why not, with what to do.
    pub refused: Option<String>,
    /// The cluster that the member is on record for; any when nothing is.
    pub cluster_uid: Option<String>,
    /// The keys that its agents may use; any if the hub has recorded none.
    pub keys: Option<AgentKeys>,
}

/// What the agent of a member is told whose EdgeCluster was deleted.
pub const GONE: &str = "its EdgeCluster is gone; run 'kubectl krypton join' again";

/// Charts of one member on their way at once: an agent fetches one, a second replica another.
const CHARTS: usize = 2;
/// Live sessions of one member: a Deployment has a few replicas. What each has said too much before it
/// is made to wait is waited for by all of them, so few enough that this stays below a heartbeat.
const SESSIONS: usize = 16;

/// What a message costs beside the reports in it, which count as one each: it wakes several tasks. An
/// agent that is made to wait puts more reports into each.
pub(crate) const MESSAGE: u64 = 20;
/// What all sessions of one member may say: the account of as many Tenants as are kept; then 450 reports
/// a second in large messages, a fortieth of what the hub takes in all and far more than helm can give
/// cause for.
const SAYING: Rate = Rate {
    burst: 12_000,
    each: Duration::from_millis(2),
};
/// And how fast: an account of 800 Tenants at once, the largest in two seconds. A flood begins with all
/// that it may say, and others are not to notice that either.
const SAYING_AT_ONCE: Rate = Rate {
    burst: 1_000,
    each: Duration::from_micros(200),
};
/// A replica asks once in weeks, and again after a failure, with back-off.
const RENEWING: Rate = Rate {
    burst: 10,
    each: Duration::from_secs(60),
};
/// One for each new chart and replica, and again after a failure, with back-off.
const FETCHING: Rate = Rate {
    burst: 30,
    each: Duration::from_secs(5),
};

/// Every replica may reconnect twice without a pause, then one replica every two seconds. A refused agent backs
/// off to 30 s. Each session makes the hub request a full report.
const CONNECTING: Rate = Rate {
    burst: 2 * SESSIONS as u64,
    each: Duration::from_secs(2),
};

/// A request of a member that the hub limits in rate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Asking {
    Session,
    Renewal,
    Chart,
}

#[derive(Debug)]
struct Allowances {
    saying: [Bucket; 2],
    connecting: Bucket,
    renewing: Bucket,
    fetching: Bucket,
}

/// One member.
#[derive(Debug)]
pub struct Member {
    /// UID of its EdgeCluster: certificates are bound to it.
    pub uid: String,
    pub admission: watch::Sender<Admission>,
    /// Stays the same when the EdgeCluster is made anew.
    pub slot: Arc<watch::Sender<Option<Slot>>>,
    /// Charts on their way to agents of this member.
    pub charts: Arc<Semaphore>,
    allowances: Mutex<Allowances>,
    /// Live sessions by replica: number, and what cuts them.
    sessions: Mutex<BTreeMap<String, (u64, CancellationToken)>>,
}

impl Member {
    fn new(uid: String, slot: Arc<watch::Sender<Option<Slot>>>) -> Self {
        Self {
            uid,
            admission: watch::Sender::new(Admission::default()),
            slot,
            charts: Arc::new(Semaphore::new(CHARTS)),
            allowances: Mutex::new(Allowances {
                saying: [SAYING, SAYING_AT_ONCE].map(Bucket::new),
                connecting: Bucket::new(CONNECTING),
                renewing: Bucket::new(RENEWING),
                fetching: Bucket::new(FETCHING),
            }),
            sessions: Mutex::default(),
        }
    }

    /// A session has said so much: how long nothing more is to be read from it.
    pub fn has_said(&self, now: BootTime, amount: u64) -> Duration {
        let mut allowances = self.allowances();
        let waits = allowances.saying.each_mut();
        waits
            .map(|bucket| bucket.charge(now, amount))
            .into_iter()
            .fold(Duration::ZERO, Duration::max)
    }

    /// Whether the member may ask for this now.
    ///
    /// # Errors
    /// When it has asked too often, with how long it is to wait.
    pub fn asks(&self, now: BootTime, asking: Asking) -> Result<(), Duration> {
        let mut allowances = self.allowances();
        let bucket = match asking {
            Asking::Session => &mut allowances.connecting,
            Asking::Renewal => &mut allowances.renewing,
            Asking::Chart => &mut allowances.fetching,
        };
        bucket.take(now, 1, Duration::ZERO).map(drop)
    }

    /// A session of this replica begins; an older one of it is cut. `None` when the member has as many
    /// as it may.
    pub fn begin_session(&self, replica: &str, number: u64) -> Option<CancellationToken> {
        let cut = CancellationToken::new();
        let mut sessions = self.lock();
        if sessions.len() >= SESSIONS && !sessions.contains_key(replica) {
            return None;
        }
        let before = sessions.insert(replica.to_owned(), (number, cut.clone()));
        if let Some((_, older)) = before {
            older.cancel();
        }
        Some(cut)
    }

    /// The session ends. One that has been replaced leaves its successor alone.
    pub fn end_session(&self, replica: &str, number: u64) {
        let mut sessions = self.lock();
        if sessions
            .get(replica)
            .is_some_and(|(live, _)| *live == number)
        {
            sessions.remove(replica);
        }
    }

    fn allowances(&self) -> std::sync::MutexGuard<'_, Allowances> {
        let allowances = &self.allowances;
        allowances.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, BTreeMap<String, (u64, CancellationToken)>> {
        self.sessions.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A member, as it is told of.
#[derive(Clone, Debug)]
pub struct MemberSnapshot {
    /// Of its EdgeCluster.
    pub uid: String,
    pub slot: Option<Slot>,
    /// Its agents are not let in.
    pub refused: bool,
    /// Numbers of the live sessions, by replica.
    pub sessions: BTreeMap<String, u64>,
}

/// Why a member is not found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotFound {
    /// The EdgeClusters have not been listed yet, or not since this hub leads.
    NotYet,
    Gone,
}

#[derive(Debug, Default)]
struct Registry {
    listed: bool,
    /// The tenure, by its beginning, in which they are to be listed before anybody is let in.
    awaited: Option<BootTime>,
    members: BTreeMap<String, Arc<Member>>,
}

/// All members, by name.
#[derive(Debug, Default)]
pub struct Members {
    registry: Mutex<Registry>,
}

impl Members {
    /// A tenure begins: who may come in is not known until the EdgeClusters are [listed](Self::listed_in) in it.
    pub fn anew(&self, since: BootTime) {
        self.lock().awaited = Some(since);
    }

    /// The EdgeClusters were listed in this tenure, and admissions follow from that.
    pub fn listed_in(&self, since: Option<BootTime>) {
        let mut registry = self.lock();
        if registry.awaited == since {
            registry.awaited = None;
        }
    }

    /// # Errors
    /// When there is none of this name, or it is not known yet.
    pub fn get(&self, name: &str) -> Result<Arc<Member>, NotFound> {
        let registry = self.lock();
        if registry.awaited.is_some() {
            return Err(NotFound::NotYet);
        }
        match registry.members.get(name) {
            Some(member) => Ok(Arc::clone(member)),
            None if registry.listed => Err(NotFound::Gone),
            None => Err(NotFound::NotYet),
        }
    }

    /// What each member is to do that is to do anything: which desired state, and since when.
    pub fn wanted(&self) -> BTreeMap<String, (Version, BootTime)> {
        let registry = self.lock();
        let wanted = registry.members.iter().filter_map(|(name, member)| {
            let slot = member.slot.get();
            let slot = slot.as_ref()?;
            Some((name.clone(), (slot.desired.version, slot.since)))
        });
        wanted.collect()
    }

    /// What there is to tell of each member, by name.
    pub fn snapshots(&self) -> BTreeMap<String, MemberSnapshot> {
        let registry = self.lock();
        let members = registry.members.iter();
        let snapshot = |member: &Member| MemberSnapshot {
            uid: member.uid.clone(),
            slot: member.slot.get(),
            refused: member.admission.get().refused.is_some(),
            sessions: member
                .lock()
                .iter()
                .map(|(replica, (number, _))| (replica.clone(), *number))
                .collect(),
        };
        members
            .map(|(name, member)| (name.clone(), snapshot(member)))
            .collect()
    }

    /// The member of this EdgeCluster. Another UID than before is another member: the sessions of the
    /// one before are cut.
    pub fn enter(&self, name: &str, uid: &str) -> Arc<Member> {
        let mut registry = self.lock();
        let slot = match registry.members.get(name) {
            Some(found) if found.uid == uid => return Arc::clone(found),
            Some(found) => {
                refuse(
                    found,
                    "its EdgeCluster was made anew; run 'kubectl krypton join' again",
                );
                Arc::clone(&found.slot)
            }
            None => Arc::new(watch::Sender::new(None)),
        };
        let member = Arc::new(Member::new(uid.to_owned(), slot));
        registry
            .members
            .insert(name.to_owned(), Arc::clone(&member));
        member
    }

    /// Cuts the sessions of this EdgeCluster's member, before it is looked at what else follows: a look
    /// at a large fleet takes its time.
    pub fn cut(&self, name: &str, uid: Option<&str>, why: &str) {
        let registry = self.lock();
        let member = registry.members.get(name);
        if let Some(member) = member.filter(|member| Some(&*member.uid) == uid) {
            refuse(member, why);
        }
    }

    /// All EdgeClusters are known; the sessions of members without one are cut. The place of a member
    /// that is still needed stays for the EdgeCluster that is to come.
    pub fn keep(&self, has_object: impl Fn(&str) -> bool, needed: impl Fn(&str) -> bool) {
        let mut registry = self.lock();
        registry.listed = true;
        registry.members.retain(|name, member| {
            let here = has_object(name);
            if !here {
                refuse(member, GONE);
            }
            here || needed(name)
        });
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Registry> {
        self.registry.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn refuse(member: &Member, why: &str) {
    member.admission.send_if_modified(|admission| {
        let changed = admission.refused.as_deref() != Some(why);
        if changed {
            admission.refused = Some(why.to_owned());
        }
        changed
    });
}

/// Hands out desired states: one for all members that are to do the same, each member's newer than
/// the one it had.
#[derive(Debug, Default)]
pub struct DesiredStatePublisher {
    /// The same for all.
    drift: DriftPolicy,
    chart_crds: CrdPolicy,
    tenant_values: bool,
    handling: Handling,
    lockdown: Lockdown,
    generation: u64,
    /// The latest for members of each order.
    latest: [Option<Slot>; 4],
}

/// What a member is to do with the chart.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Order {
    pub paused: bool,
    pub retire: bool,
}

/// A chart state that is given, and what else is to be done with it.
#[derive(Clone, Copy, Debug)]
pub struct MemberInputs<'a> {
    pub chart: &'a ChartState,
    /// Whether it is one member's alone: then nobody else is given the same.
    pub own: bool,
    /// Of workspaces; where it is not the fleet's, `own` says so.
    pub namespaces: &'a NamespaceConfiguration,
    /// What home orders of this member; then it is its alone, too.
    pub deployments: &'a [DesiredDeployment],
    /// As deployments: Tenants of home that are placed there.
    pub placed: &'a [PlacedTenant],
}

impl DesiredStatePublisher {
    pub fn new(
        drift: DriftPolicy,
        chart_crds: CrdPolicy,
        tenant_values: bool,
        handling: Handling,
    ) -> Self {
        Self {
            drift,
            chart_crds,
            tenant_values,
            handling,
            ..Self::default()
        }
    }

    /// Keeps tenants apart in this way.
    #[must_use]
    pub fn locked_down(self, lockdown: Lockdown) -> Self {
        Self { lockdown, ..self }
    }

    /// The slot's next content; `None` when it is as it should be.
    pub fn next(
        &mut self,
        before: Option<&Slot>,
        epoch: u64,
        chart: &MemberInputs<'_>,
        order: Order,
        now: BootTime,
    ) -> Option<Slot> {
        let MemberInputs {
            chart,
            own,
            namespaces,
            deployments,
            placed,
        } = *chart;
        let own = own || !deployments.is_empty() || !placed.is_empty();
        let as_wanted = |slot: &Slot| {
            slot.desired.version.epoch == epoch
                && (slot.desired.paused, slot.desired.retire) == (order.paused, order.retire)
                && slot.desired.drift == self.drift
                && slot.desired.chart_crds == self.chart_crds
                && slot.desired.tenant_values == self.tenant_values
                && slot.desired.handling == self.handling
                && slot.desired.lockdown == self.lockdown
                && slot.desired.chart == *chart
                && slot.desired.namespaces == *namespaces
                && slot.desired.deployments == deployments
                && slot.desired.placed == placed
        };
        if before.is_some_and(as_wanted) {
            return None;
        }
        let after =
            |slot: &Slot| before.is_none_or(|before| before.desired.version < slot.desired.version);
        let latest = &mut self.latest[usize::from(order.paused) + 2 * usize::from(order.retire)];
        if let Some(slot) = latest
            .as_ref()
            .filter(|slot| !own && as_wanted(slot) && after(slot))
        {
            return Some(slot.clone());
        }
        self.generation += 1;
        let desired = DesiredState {
            version: Version {
                epoch,
                generation: self.generation,
            },
            chart: chart.clone(),
            paused: order.paused,
            retire: order.retire,
            drift: self.drift,
            chart_crds: self.chart_crds,
            tenant_values: self.tenant_values,
            handling: self.handling,
            lockdown: self.lockdown.clone(),
            namespaces: namespaces.clone(),
            deployments: deployments.to_vec(),
            placed: placed.to_vec(),
        };
        let slot = Slot {
            message: Arc::new((&desired).into()),
            desired: Arc::new(desired),
            since: now,
        };
        if !own {
            *latest = Some(slot.clone());
        }
        Some(slot)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    static PLAIN: NamespaceConfiguration = NamespaceConfiguration {
        labels: BTreeMap::new(),
        annotations: BTreeMap::new(),
    };

    fn chart(version: u8) -> Arc<ChartState> {
        Arc::new(ChartState {
            repo: "https://example.org".to_owned(),
            name: "small".to_owned(),
            version: format!("1.0.{version}"),
            install_crds: false,
            values: serde_json::Map::new(),
            confidential: None,
            pinned: None,
        })
    }

    fn of_all(chart: &ChartState) -> MemberInputs<'_> {
        MemberInputs {
            chart,
            own: false,
            namespaces: &PLAIN,
            deployments: &[],
            placed: &[],
        }
    }

    #[test]
    fn member_override_leaves_shared_desired_state_unchanged() {
        let mut publisher = DesiredStatePublisher::default();
        let (now, order) = (BootTime::now(), Order::default());
        let (all, alone) = (chart(1), chart(2));
        let first = publisher.next(None, 1, &of_all(&all), order, now).unwrap();
        let own = MemberInputs {
            chart: &alone,
            own: true,
            namespaces: &PLAIN,
            deployments: &[],
            placed: &[],
        };
        let mine = publisher.next(Some(&first), 1, &own, order, now).unwrap();
        assert!(mine.desired.version > first.desired.version);
        assert!(publisher.next(Some(&mine), 1, &own, order, now).is_none());
        let second = publisher.next(None, 1, &of_all(&all), order, now).unwrap();
        assert!(Arc::ptr_eq(&first.desired, &second.desired));
        // Whoever gives it up is given what the others have, and later than what it had.
        let back = publisher
            .next(Some(&mine), 1, &of_all(&all), order, now)
            .unwrap();
        assert_eq!(back.desired.chart, *all);
        assert!(back.desired.version > mine.desired.version);
    }

    #[test]
    fn orders_reach_their_member_and_changes_bump_version() {
        let mut publisher = DesiredStatePublisher::default();
        let (now, order, all) = (BootTime::now(), Order::default(), chart(1));
        let first = publisher.next(None, 1, &of_all(&all), order, now).unwrap();
        let mut orders = [DesiredDeployment {
            name: "acme".to_owned(),
            ..DesiredDeployment::default()
        }];
        fn dealt<'a>(
            chart: &'a ChartState,
            deployments: &'a [DesiredDeployment],
        ) -> MemberInputs<'a> {
            MemberInputs {
                deployments,
                ..of_all(chart)
            }
        }
        let mine = publisher.next(Some(&first), 1, &dealt(&all, &orders), order, now);
        let mine = mine.unwrap();
        assert_eq!(mine.desired.deployments, orders);
        let again = publisher.next(Some(&mine), 1, &dealt(&all, &orders), order, now);
        assert!(again.is_none());
        let other = publisher.next(None, 1, &of_all(&all), order, now).unwrap();
        assert!(Arc::ptr_eq(&first.desired, &other.desired));
        orders[0].remove = true;
        let removes = publisher.next(Some(&mine), 1, &dealt(&all, &orders), order, now);
        assert!(removes.unwrap().desired.version > mine.desired.version);
    }

    #[test]
    fn lockdown_goes_to_every_member() {
        let lockdown = Lockdown {
            no_cross_namespace_refs: true,
            default_service_account: "installer".to_owned(),
        };
        let (now, order) = (BootTime::now(), Order::default());
        let plain = DesiredStatePublisher::default().next(None, 1, &of_all(&chart(1)), order, now);
        let mut publisher = DesiredStatePublisher::default().locked_down(lockdown.clone());
        let locked = publisher.next(plain.as_ref(), 1, &of_all(&chart(1)), order, now);
        assert_eq!(locked.unwrap().desired.lockdown, lockdown);
    }

    #[test]
    fn members_with_equal_orders_share_desired_state() {
        let mut publisher = DesiredStatePublisher::default();
        let now = BootTime::now();
        let first = publisher
            .next(None, 1, &of_all(&chart(1)), Order::default(), now)
            .unwrap();
        let second = publisher
            .next(None, 1, &of_all(&chart(1)), Order::default(), now)
            .unwrap();
        assert!(Arc::ptr_eq(&first.desired, &second.desired));
        assert!(
            publisher
                .next(Some(&first), 1, &of_all(&chart(1)), Order::default(), now)
                .is_none()
        );
    }

    proptest! {
        #[test]
        fn desired_state_version_only_increases_per_member(
            steps in proptest::collection::vec((0_usize..3, 0_u8..3, any::<[bool; 2]>(), any::<bool>()), 1..60)
        ) {
            let mut publisher = DesiredStatePublisher::default();
            let mut epoch = 1;
            let mut members: [Option<Slot>; 3] = [None, None, None];
            for (member, version, [paused, retire], later_epoch) in steps {
                let order = Order { paused, retire };
                epoch += u64::from(later_epoch);
                let before = members[member].clone();
                if let Some(next) = publisher.next(before.as_ref(), epoch, &of_all(&chart(version)), order, BootTime::now()) {
                    prop_assert!(before.is_none_or(|before| before.desired.version < next.desired.version));
                    members[member] = Some(next);
                }
                let now = members[member].as_ref().unwrap();
                prop_assert_eq!((now.desired.paused, now.desired.retire), (paused, retire));
                prop_assert_eq!(&now.desired.chart, &*chart(version));
            }
        }
    }

    #[test]
    fn newer_session_cancels_older_and_survives_its_end() {
        let member = Member::new("u".to_owned(), Arc::new(watch::Sender::new(None)));
        let begin = |replica, number| member.begin_session(replica, number).unwrap();
        let first = begin("a", 1);
        let other = begin("b", 2);
        let second = begin("a", 3);
        assert!(first.is_cancelled() && !other.is_cancelled() && !second.is_cancelled());
        member.end_session("a", 1);
        begin("a", 4);
        assert!(
            second.is_cancelled(),
            "the end of the first left the second registered"
        );
    }

    #[test]
    fn member_session_limit_ignores_returning_replica() {
        let member = Member::new("u".to_owned(), Arc::new(watch::Sender::new(None)));
        for number in 1..=SESSIONS as u64 {
            let begun = member.begin_session(&number.to_string(), number);
            assert!(begun.is_some());
        }
        assert!(member.begin_session("another", 100).is_none());
        assert!(member.begin_session("1", 101).is_some());
        member.end_session("2", 2);
        assert!(member.begin_session("another", 102).is_some());
    }

    #[test]
    fn throttling_of_largest_member_stays_below_heartbeat() {
        use crate::agent_server::session::HEARTBEAT;
        use crate::tenants::TENANTS_MAX;
        use krypton_proto::REPORTS_PER_MESSAGE;
        let member = Member::new("u".to_owned(), Arc::new(watch::Sender::new(None)));
        let largest = MESSAGE + REPORTS_PER_MESSAGE as u64;
        let begin = BootTime::now();
        let mut now = begin;
        for _ in 0..TENANTS_MAX / REPORTS_PER_MESSAGE {
            now = BootTime(now.0 + member.has_said(now, largest));
        }
        let took = now.since(begin);
        assert!(took < Duration::from_secs(3), "{took:?}");
        // From then on it is slow, also for all its sessions at once, each with one more of the largest.
        for _ in 0..100 {
            let waits = (0..SESSIONS).map(|_| member.has_said(now, largest));
            let longest = waits.max().unwrap_or_default();
            assert!(longest < HEARTBEAT, "{longest:?}");
            now = BootTime(now.0 + longest);
        }
        let messages = TENANTS_MAX / REPORTS_PER_MESSAGE + 100 * SESSIONS;
        let earned = messages as u64 * largest - SAYING.burst;
        assert!(now.since(begin) >= SAYING.time(earned));
    }

    #[test]
    fn well_behaved_agent_is_never_throttled() {
        let member = Member::new("u".to_owned(), Arc::new(watch::Sender::new(None)));
        let mut now = BootTime::now();
        // A thousand Tenants in a session's beginning; then ten changes a second, each in its message.
        for _ in 0..5 {
            now = BootTime(now.0 + member.has_said(now, MESSAGE + 200));
        }
        now = BootTime(now.0 + Duration::from_secs(1));
        for _ in 0..100_000 {
            now = BootTime(now.0 + Duration::from_millis(100));
            assert_eq!(member.has_said(now, MESSAGE + 1), Duration::ZERO);
        }
    }

    #[test]
    fn repeated_member_requests_are_throttled() {
        let member = Member::new("u".to_owned(), Arc::new(watch::Sender::new(None)));
        let now = BootTime::now();
        for (asking, rate) in [
            (Asking::Session, CONNECTING),
            (Asking::Renewal, RENEWING),
            (Asking::Chart, FETCHING),
        ] {
            for _ in 0..rate.burst {
                assert_eq!(member.asks(now, asking), Ok(()));
            }
            assert_eq!(member.asks(now, asking), Err(rate.each));
            assert_eq!(member.asks(BootTime(now.0 + rate.each), asking), Ok(()));
        }
    }

    #[test]
    fn cut_hits_only_member_with_matching_uid() {
        let members = Members::default();
        let (one, other) = (members.enter("a", "u"), members.enter("b", "u"));
        members.cut("a", Some("before"), "gone");
        members.cut("a", None, "gone");
        assert_eq!(one.admission.get().refused, None);
        members.cut("a", Some("u"), "gone");
        assert_eq!(one.admission.get().refused.as_deref(), Some("gone"));
        assert_eq!(other.admission.get().refused, None);
    }

    #[test]
    fn members_are_unknown_until_tenure_lists_edge_clusters() {
        let members = Members::default();
        members.enter("a", "u");
        let [first, second] = [1, 2].map(|since| BootTime(Duration::from_secs(since)));
        members.anew(second);
        for of in [None, Some(first)] {
            members.keep(|name| name == "a", |_| false);
            members.listed_in(of);
            assert_eq!(members.get("a").unwrap_err(), NotFound::NotYet);
            assert_eq!(members.get("b").unwrap_err(), NotFound::NotYet);
        }
        members.listed_in(Some(second));
        assert!(members.get("a").is_ok());
        assert_eq!(members.get("b").unwrap_err(), NotFound::Gone);
    }

    #[test]
    fn member_is_unknown_until_listed_and_then_gone() {
        let members = Members::default();
        assert_eq!(members.get("a").unwrap_err(), NotFound::NotYet);
        members.enter("a", "u");
        members.keep(|name| name == "a", |_| false);
        assert_eq!(members.get("b").unwrap_err(), NotFound::Gone);
        let before = members.get("a").unwrap();
        let after = members.enter("a", "v");
        assert!(before.admission.get().refused.is_some());
        assert_eq!(after.admission.get().refused, None);
    }
}
