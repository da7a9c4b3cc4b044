//! One member: whether its agents are admitted, its desired state, its sessions and its quotas.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use krypton_crds::edge_cluster::AgentKeys;
use krypton_runtime::clock::BootTime;
use krypton_runtime::newest::Newest as _;
use krypton_runtime::rate_limit::{Rate, TokenBucket};
use krypton_runtime::sync::Mutex;
use krypton_types::desired::DesiredState;
use tokio::sync::{Semaphore, watch};
use tokio_util::sync::CancellationToken;

/// The latest desired state of a member and the time since when it applies.
#[derive(Clone, Debug)]
pub struct PublishedState {
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

/// Concurrent chart downloads of one member: one for an agent and one for a second replica.
const CHART_DOWNLOADS_MAX: usize = 2;
/// Live sessions of one member, enough for the few replicas of a Deployment. All sessions share one quota, and
/// each may exceed it by one message. The limit keeps the resulting delay below a heartbeat.
const SESSIONS_MAX: usize = 16;

/// Fixed cost of a message, because it wakes several tasks. Each report in it costs 1 more. A throttled agent
/// puts more reports into each message.
pub(crate) const MESSAGE_COST: u64 = 20;
/// Quota of all sessions of one member. The burst covers the full report of the largest member. The rate then
/// allows 450 reports a second in large messages: a fortieth of the hub's capacity, and far more than Helm can
/// cause.
const REPORT_RATE: Rate = Rate {
    burst: 12_000,
    per_token: Duration::from_millis(2),
};
/// Short-term quota: a full report of 800 Tenants immediately, the largest one within two seconds. It keeps a
/// flood, which starts with the full burst of `REPORT_RATE`, from delaying other members.
const REPORT_BURST_RATE: Rate = Rate {
    burst: 1_000,
    per_token: Duration::from_micros(200),
};
/// A replica renews its certificate every few days, and retries a failed renewal with back-off.
const RENEWAL_RATE: Rate = Rate {
    burst: 10,
    per_token: Duration::from_secs(60),
};
/// A replica fetches each new chart once, and retries a failed fetch with back-off.
const CHART_RATE: Rate = Rate {
    burst: 30,
    per_token: Duration::from_secs(5),
};

/// Every replica may reconnect twice without a pause, then one replica every two seconds. A refused agent backs
/// off to 30 s. Each session makes the hub request a full report.
const SESSION_RATE: Rate = Rate {
    burst: 2 * SESSIONS_MAX as u64,
    per_token: Duration::from_secs(2),
};

/// A request of a member that the hub limits in rate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequestKind {
    Session,
    Renewal,
    Chart,
}

#[derive(Debug)]
struct MemberQuotas {
    reports: [TokenBucket; 2],
    sessions: TokenBucket,
    renewals: TokenBucket,
    charts: TokenBucket,
}

/// A member of the fleet.
#[derive(Debug)]
pub struct Member {
    /// UID of its EdgeCluster. Certificates are bound to it.
    pub uid: String,
    pub admission: watch::Sender<Admission>,
    /// Survives a recreation of the EdgeCluster.
    pub published: Arc<watch::Sender<Option<PublishedState>>>,
    /// Limits concurrent chart downloads of the member.
    pub charts: Arc<Semaphore>,
    quotas: Mutex<MemberQuotas>,
    /// Live sessions by replica: the session's number and the token that cancels it.
    sessions: Mutex<BTreeMap<String, (u64, CancellationToken)>>,
}

impl Member {
    pub(super) fn new(uid: String, published: Arc<watch::Sender<Option<PublishedState>>>) -> Self {
        Self {
            uid,
            admission: watch::Sender::new(Admission::default()),
            published,
            charts: Arc::new(Semaphore::new(CHART_DOWNLOADS_MAX)),
            quotas: Mutex::new(MemberQuotas {
                reports: [REPORT_RATE, REPORT_BURST_RATE].map(TokenBucket::new),
                sessions: TokenBucket::new(SESSION_RATE),
                renewals: TokenBucket::new(RENEWAL_RATE),
                charts: TokenBucket::new(CHART_RATE),
            }),
            sessions: Mutex::default(),
        }
    }

    /// Charges `amount` to the member's quota and returns how long the session must not read.
    pub fn charge_reports(&self, now: BootTime, amount: u64) -> Duration {
        let mut quotas = self.quotas.lock();
        let buckets = quotas.reports.iter_mut();
        let waits = buckets.map(|bucket| bucket.charge(now, amount));
        waits.max().unwrap_or_default()
    }

    /// Takes one request of this kind from the member's quota.
    ///
    /// # Errors
    /// Returns the time to wait if the quota is exhausted.
    pub fn take_request(&self, now: BootTime, kind: RequestKind) -> Result<(), Duration> {
        let mut quotas = self.quotas.lock();
        let bucket = match kind {
            RequestKind::Session => &mut quotas.sessions,
            RequestKind::Renewal => &mut quotas.renewals,
            RequestKind::Chart => &mut quotas.charts,
        };
        bucket.take(now, 1, Duration::ZERO).map(drop)
    }

    /// Registers a session of this replica and cancels an older one. Returns `None` if the member has too many
    /// sessions.
    pub fn begin_session(&self, replica: &str, number: u64) -> Option<CancellationToken> {
        let token = CancellationToken::new();
        let mut sessions = self.sessions.lock();
        if sessions.len() >= SESSIONS_MAX && !sessions.contains_key(replica) {
            return None;
        }
        let previous = sessions.insert(replica.to_owned(), (number, token.clone()));
        if let Some((_, older)) = previous {
            older.cancel();
        }
        Some(token)
    }

    /// Unregisters a session, unless a newer one has replaced it.
    pub fn end_session(&self, replica: &str, number: u64) {
        let mut sessions = self.sessions.lock();
        if sessions
            .get(replica)
            .is_some_and(|(live, _)| *live == number)
        {
            sessions.remove(replica);
        }
    }

    pub(super) fn snapshot(&self) -> MemberSnapshot {
        let sessions = self.sessions.lock();
        let sessions = sessions.iter();
        MemberSnapshot {
            uid: self.uid.clone(),
            published: self.published.get(),
            refused: self.admission.get().refused.is_some(),
            sessions: sessions
                .map(|(replica, (number, _))| (replica.clone(), *number))
                .collect(),
        }
    }
}

/// State of a member for dumps and diagnostics.
#[derive(Clone, Debug)]
pub struct MemberSnapshot {
    /// UID of its EdgeCluster.
    pub uid: String,
    pub published: Option<PublishedState>,
    /// Whether the hub rejects its agents.
    pub refused: bool,
    /// Numbers of the live sessions, by replica.
    pub sessions: BTreeMap<String, u64>,
}

/// Ends the sessions of a member's agents.
pub(super) fn reject(member: &Member, reason: &str) {
    member.admission.send_if_modified(|admission| {
        let previous = admission.refused.replace(reason.to_owned());
        previous.as_deref() != Some(reason)
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn newer_session_cancels_older_and_survives_its_end() {
        let member = Member::new("u".to_owned(), Arc::default());
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
        let member = Member::new("u".to_owned(), Arc::default());
        for number in 1..=SESSIONS_MAX as u64 {
            let token = member.begin_session(&number.to_string(), number);
            assert!(token.is_some());
        }
        assert!(member.begin_session("another", 100).is_none());
        assert!(member.begin_session("1", 101).is_some());
        member.end_session("2", 2);
        assert!(member.begin_session("another", 102).is_some());
    }

    #[test]
    fn throttling_of_largest_member_stays_below_heartbeat() {
        use crate::agent_server::session::HEARTBEAT;
        use crate::members::tenant_reports::TENANTS_MAX;
        use krypton_proto::REPORTS_PER_MESSAGE;
        let member = Member::new("u".to_owned(), Arc::default());
        let largest = MESSAGE_COST + REPORTS_PER_MESSAGE as u64;
        let begin = BootTime::now();
        let mut now = begin;
        for _ in 0..TENANTS_MAX / REPORTS_PER_MESSAGE {
            now += member.charge_reports(now, largest);
        }
        let took = now.since(begin);
        assert!(took < Duration::from_secs(3), "{took:?}");
        // From then on it is slow, even if all its sessions send one more of the largest messages concurrently.
        for _ in 0..100 {
            let waits = (0..SESSIONS_MAX).map(|_| member.charge_reports(now, largest));
            let longest = waits.max().unwrap_or_default();
            assert!(longest < HEARTBEAT, "{longest:?}");
            now += longest;
        }
        let messages = TENANTS_MAX / REPORTS_PER_MESSAGE + 100 * SESSIONS_MAX;
        let earned = messages as u64 * largest - REPORT_RATE.burst;
        assert!(now.since(begin) >= REPORT_RATE.time_to_earn(earned));
    }

    #[test]
    fn well_behaved_agent_is_never_throttled() {
        let member = Member::new("u".to_owned(), Arc::default());
        let mut now = BootTime::now();
        // A thousand Tenants at the start of a session, then ten changes a second, each in its own message.
        for _ in 0..5 {
            now += member.charge_reports(now, MESSAGE_COST + 200);
        }
        now += Duration::from_secs(1);
        for _ in 0..100_000 {
            now += Duration::from_millis(100);
            assert_eq!(member.charge_reports(now, MESSAGE_COST + 1), Duration::ZERO);
        }
    }

    #[test]
    fn repeated_member_requests_are_throttled() {
        let member = Member::new("u".to_owned(), Arc::default());
        let now = BootTime::now();
        for (kind, rate) in [
            (RequestKind::Session, SESSION_RATE),
            (RequestKind::Renewal, RENEWAL_RATE),
            (RequestKind::Chart, CHART_RATE),
        ] {
            for _ in 0..rate.burst {
                assert_eq!(member.take_request(now, kind), Ok(()));
            }
            assert_eq!(member.take_request(now, kind), Err(rate.per_token));
            assert_eq!(member.take_request(now + rate.per_token, kind), Ok(()));
        }
    }
}
