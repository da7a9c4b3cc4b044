//! Registry of members that may connect, each with the slot of its desired state. Discovery fills the slots;
//! sessions and proxies read them.

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

/// The latest desired state of a member and the time since when it applies.
#[derive(Clone, Debug)]
pub struct Slot {
    pub desired: Arc<DesiredState>,
    /// The same as a protobuf message, encoded once for all members that receive it.
    pub message: Arc<krypton_proto::v1::Desired>,
    pub since: BootTime,
}

/// Whether the hub admits agents of a member.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Admission {
    /// Why not, and the fix. `None` admits agents.
    pub refused: Option<String>,
    /// UID of the recorded cluster; `None` admits any cluster.
    pub cluster_uid: Option<String>,
    /// The keys that its agents may use; `None` admits any key, because the hub has recorded none.
    pub keys: Option<AgentKeys>,
}

/// Message for an agent of a deleted EdgeCluster.
pub const GONE: &str = "its EdgeCluster is gone; run 'kubectl krypton join' again";

/// Concurrent chart downloads of one member: one for an agent and one for a second replica.
const CHARTS: usize = 2;
/// Live sessions of one member, enough for the few replicas of a Deployment. All sessions share one quota, and
/// each may exceed it by one message. The limit keeps the resulting delay below a heartbeat.
const SESSIONS: usize = 16;

/// Fixed cost of a message, because it wakes several tasks. Each report in it costs 1 more. A throttled agent
/// puts more reports into each message.
pub(crate) const MESSAGE: u64 = 20;
/// Quota of all sessions of one member. The burst covers the full report of the largest member. The rate then
/// allows 450 reports a second in large messages: a fortieth of the hub's capacity, and far more than Helm can
/// cause.
const SAYING: Rate = Rate {
    burst: 12_000,
    each: Duration::from_millis(2),
};
/// Short-term quota: a full report of 800 Tenants immediately, the largest one within two seconds. It keeps a
/// flood, which starts with the full burst of `SAYING`, from delaying other members.
const SAYING_AT_ONCE: Rate = Rate {
    burst: 1_000,
    each: Duration::from_micros(200),
};
/// A replica renews its certificate once in weeks, and retries a failed renewal with back-off.
const RENEWING: Rate = Rate {
    burst: 10,
    each: Duration::from_secs(60),
};
/// A replica fetches each new chart once, and retries a failed fetch with back-off.
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

/// A member of the fleet.
#[derive(Debug)]
pub struct Member {
    /// UID of its EdgeCluster. Certificates are bound to it.
    pub uid: String,
    pub admission: watch::Sender<Admission>,
    /// Survives a recreation of the EdgeCluster.
    pub slot: Arc<watch::Sender<Option<Slot>>>,
    /// Limits concurrent chart downloads of the member.
    pub charts: Arc<Semaphore>,
    allowances: Mutex<Allowances>,
    /// Live sessions by replica: the session's number and the token that cancels it.
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

    /// Charges `amount` to the member's quota and returns how long the session must not read.
    pub fn has_said(&self, now: BootTime, amount: u64) -> Duration {
        let mut allowances = self.allowances();
        let waits = allowances.saying.each_mut();
        waits
            .map(|bucket| bucket.charge(now, amount))
            .into_iter()
            .fold(Duration::ZERO, Duration::max)
    }

    /// Takes one request of this kind from the member's quota.
    ///
    /// # Errors Returns the time to wait if the quota is exhausted.
    pub fn asks(&self, now: BootTime, asking: Asking) -> Result<(), Duration> {
        let mut allowances = self.allowances();
        let bucket = match asking {
            Asking::Session => &mut allowances.connecting,
            Asking::Renewal => &mut allowances.renewing,
            Asking::Chart => &mut allowances.fetching,
        };
        bucket.take(now, 1, Duration::ZERO).map(drop)
    }

    /// Registers a session of this replica and cancels an older one. Returns `None` if the member has too many
    /// sessions.
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

    /// Unregisters a session, unless a newer one has replaced it.
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

/// State of a member for dumps and diagnostics.
#[derive(Clone, Debug)]
pub struct MemberSnapshot {
    /// UID of its EdgeCluster.
    pub uid: String,
    pub slot: Option<Slot>,
    /// Whether the hub rejects its agents.
    pub refused: bool,
    /// Numbers of the live sessions, by replica.
    pub sessions: BTreeMap<String, u64>,
}

/// Why the registry has no such member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotFound {
    /// The hub has not listed the EdgeClusters yet, or not since it became leader.
    NotYet,
    Gone,
}

#[derive(Debug, Default)]
struct Registry {
    listed: bool,
    /// Start of the leader term in which the hub must list the EdgeClusters before it admits agents.
    awaited: Option<BootTime>,
    members: BTreeMap<String, Arc<Member>>,
}

/// All members, by name.
#[derive(Debug, Default)]
pub struct Members {
    registry: Mutex<Registry>,
}

impl Members {
    /// Starts a leader term. [`Self::get`] finds no member until the EdgeClusters are [listed](Self::listed_in)
    /// in it.
    pub fn reset_for_term(&self, since: BootTime) {
        self.lock().awaited = Some(since);
    }

    /// Records that the EdgeClusters were listed in this term and the admissions derive from that list.
    pub fn listed_in(&self, since: Option<BootTime>) {
        let mut registry = self.lock();
        if registry.awaited == since {
            registry.awaited = None;
        }
    }

    /// Returns the member of this name.
    ///
    /// # Errors Fails if there is no such member, or if the EdgeClusters are not listed yet.
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

    /// Returns the version of each member's desired state and the time since when it applies.
    pub fn wanted(&self) -> BTreeMap<String, (Version, BootTime)> {
        let registry = self.lock();
        let wanted = registry.members.iter().filter_map(|(name, member)| {
            let slot = member.slot.get();
            let slot = slot.as_ref()?;
            Some((name.clone(), (slot.desired.version, slot.since)))
        });
        wanted.collect()
    }

    /// Returns a snapshot of each member, by name.
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

    /// Returns the member of this EdgeCluster. A new UID creates a new member and rejects the sessions of the
    /// old one.
    pub fn enter(&self, name: &str, uid: &str) -> Arc<Member> {
        let mut registry = self.lock();
        let slot = match registry.members.get(name) {
            Some(found) if found.uid == uid => return Arc::clone(found),
            Some(found) => {
                refuse(
                    found,
                    "its EdgeCluster was recreated; run 'kubectl krypton join' again",
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

    /// Rejects the sessions of this EdgeCluster's member immediately, because a reconcile of a large fleet
    /// takes time.
    pub fn cut(&self, name: &str, uid: Option<&str>, why: &str) {
        let registry = self.lock();
        let member = registry.members.get(name);
        if let Some(member) = member.filter(|member| Some(&*member.uid) == uid) {
            refuse(member, why);
        }
    }

    /// Rejects the sessions of members without an EdgeCluster, once all EdgeClusters are known. Keeps the entry
    /// of a member that is still needed, because its EdgeCluster is about to be created.
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

/// Creates desired states. Members with equal inputs share one, and the version of each member only increases.
#[derive(Debug, Default)]
pub struct DesiredStatePublisher {
    /// The fields up to `lockdown` are the same for all members.
    drift: DriftPolicy,
    chart_crds: CrdPolicy,
    tenant_values: bool,
    handling: Handling,
    lockdown: Lockdown,
    generation: u64,
    /// The latest shared slot for each combination of `paused` and `retire`.
    latest: [Option<Slot>; 4],
}

/// How a member handles its releases.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Order {
    pub paused: bool,
    pub retire: bool,
}

/// The inputs of a member's desired state.
#[derive(Clone, Copy, Debug)]
pub struct MemberInputs<'a> {
    pub chart: &'a ChartState,
    /// Whether only this member receives this chart state. Then the desired state is not shared.
    pub own: bool,
    /// Metadata of workspaces. Where it differs from the fleet's, `own` is true.
    pub namespaces: &'a NamespaceConfiguration,
    /// Orders of the home cluster for this member. If there are any, the desired state is not shared.
    pub deployments: &'a [DesiredDeployment],
    /// Tenants of the home cluster that are placed on this member. If there are any, the desired state is not
    /// shared.
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

    /// Sets the isolation of tenants.
    #[must_use]
    pub fn locked_down(self, lockdown: Lockdown) -> Self {
        Self { lockdown, ..self }
    }

    /// Returns the slot's next content; `None` if the current one is up to date.
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
            ..ChartState::default()
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
        // A member without its override gets the shared chart, with a later version than its own.
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
        // From then on it is slow, even if all its sessions send one more of the largest messages concurrently.
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
        // A thousand Tenants at the start of a session, then ten changes a second, each in its own message.
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
    fn members_are_unknown_until_term_lists_edge_clusters() {
        let members = Members::default();
        members.enter("a", "u");
        let [first, second] = [1, 2].map(|since| BootTime(Duration::from_secs(since)));
        members.reset_for_term(second);
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
