//! Metrics of the members and of leadership, collected at scrape time without a second copy of the state.
//!
//! Only the leader exports metrics of each member. Standbys know less about members, and a sum over all
//! hubs would count twice.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use jiff::Timestamp;
use krypton_crds::edge_cluster::Mode;
use krypton_runtime::clock::{self, BootTime};
use krypton_runtime::metrics::gauge;
use krypton_runtime::newest::Newest as _;
use krypton_types::conditions::{Truth, reason};
use krypton_types::desired::Version;
use krypton_types::validity::{CredentialState, Validity};
use parking_lot::Mutex;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Unit;
use tokio::sync::watch;

use crate::agent_server::metrics::SessionMetrics;
use crate::ca::CurrentAuthority;
use crate::edgecluster::FleetChart;
use crate::leader::Leader;
use crate::members::MemberRegistry;
use crate::members::observation::MemberObservation;
use crate::members::tenant_reports::TenantReports;
use crate::notify::NotificationCounts;

/// Knowledge about members, from reports and from the hub's own calls, and the state that the metrics read.
#[derive(Debug, Default)]
pub struct FleetView {
    pub members: Arc<MemberRegistry>,
    pub reports: Arc<TenantReports>,
    pub sessions: Arc<SessionMetrics>,
    pub(crate) notifications: NotificationCounts,
    /// Set once the home cluster has responded.
    pub(crate) home_state: OnceLock<HomeState>,
    /// The CA of the agents' port.
    pub(crate) authority: OnceLock<Arc<CurrentAuthority>>,
    lags: Mutex<BTreeMap<String, MemberLag>>,
}

/// The state that exists only once the home cluster has responded.
#[derive(Debug)]
pub struct HomeState {
    pub leader: Leader,
    pub chart: watch::Receiver<FleetChart>,
    pub allow_chart_skip: bool,
}

/// Since when a member lags behind its desired state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct MemberLag {
    /// The oldest desired state that the member has not applied.
    wanted: Version,
    since: BootTime,
}

/// Computes the lag of a member. `wanted` is its desired state and the time it was published; `applied` is
/// the version it has. A newer desired state doesn't reset the lag of a member that has not applied an
/// older one.
fn member_lag(
    previous: Option<MemberLag>,
    wanted: (Version, BootTime),
    applied: Option<Version>,
) -> Option<MemberLag> {
    let (wanted, since) = wanted;
    if applied == Some(wanted) {
        return None;
    }
    let ongoing =
        previous.filter(|previous| applied.is_none_or(|applied| applied < previous.wanted));
    Some(ongoing.unwrap_or(MemberLag { wanted, since }))
}

/// The metrics of one member.
struct MemberRow {
    name: String,
    /// `None` if no process may act there. This is not an error.
    connected: Option<bool>,
    mode: Mode,
    applied: Option<Version>,
    /// Validity of the agent's certificate, and of the credentials in the kubeconfig.
    credentials: [Option<Validity>; 2],
}

impl MemberRow {
    pub(crate) fn new(name: &str, observation: &MemberObservation) -> Self {
        let may_connect =
            ![reason::BANNED, reason::SUSPENDED].contains(&observation.healthy.reason.as_str());
        Self {
            name: name.to_owned(),
            connected: may_connect.then_some(observation.connected.truth == Truth::True),
            mode: observation.mode,
            applied: observation.applied.as_ref().map(|(version, _)| *version),
            credentials: [observation.certificate, observation.access],
        }
    }
}

pub(crate) fn mode_name(mode: Mode) -> &'static str {
    match mode {
        Mode::Agent => "agent",
        Mode::Proxy => "proxy",
        Mode::None => "none",
    }
}

impl FleetView {
    pub fn new(reports: Arc<TenantReports>) -> Self {
        Self {
            members: Arc::new(MemberRegistry::new(Arc::clone(&reports))),
            reports,
            ..Self::default()
        }
    }

    /// Records that the home cluster has responded.
    pub fn set_home_state(&self, home_state: HomeState) {
        // Called once per process.
        drop(self.home_state.set(home_state));
    }

    pub(crate) fn set_authority(&self, authority: Arc<CurrentAuthority>) {
        // Called once per process.
        drop(self.authority.set(authority));
    }

    /// Returns how long each member has lagged behind its desired state, or zero if it doesn't lag.
    fn lags(&self, rows: &[MemberRow], now: BootTime) -> Vec<(String, Duration)> {
        let published = self.members.desired_versions();
        let mut lags = self.lags.lock();
        let mut next = BTreeMap::new();
        let mut durations = Vec::new();
        for row in rows {
            let Some(wanted) = published.get(&row.name) else {
                continue;
            };
            let lag = member_lag(lags.get(&row.name).copied(), *wanted, row.applied);
            let since = lag.map(|lag| now.since(lag.since));
            durations.push((row.name.clone(), since.unwrap_or_default()));
            next.extend(lag.map(|lag| (row.name.clone(), lag)));
        }
        *lags = next;
        durations
    }

    fn rows(&self, encoder: &mut Encoder<'_>, home_state: &HomeState) -> fmt::Result {
        // While the home cluster doesn't respond, the hub still serves agents and exports their reports.
        let rows = if home_state.leader.serves_agents() {
            self.members.observations(MemberRow::new)
        } else {
            Vec::new()
        };
        encoder.family(
            "member_connected",
            "Whether the EdgeCluster's condition Connected is True. Absent for banned and suspended members.",
            None,
            rows.iter().filter_map(|row| {
                let labels = vec![("member", row.name.as_str())];
                Some((labels, i64::from(row.connected?)))
            }),
        )?;
        encoder.family(
            "member_mode",
            "Always 1. The label names the process that reconciles the member: agent, proxy (the hub) or none.",
            None,
            rows.iter().map(|row| {
                let member = ("member", row.name.as_str());
                (vec![member, ("mode", mode_name(row.mode))], 1)
            }),
        )?;
        let lags = self.lags(&rows, BootTime::now());
        encoder.family(
            "member_behind",
            "How long the member has lagged behind its desired state, or 0 if it acts on the latest one.",
            Some(&Unit::Seconds),
            lags.iter().map(|(member, lag)| {
                let seconds = i64::try_from(lag.as_secs()).unwrap_or(i64::MAX);
                (vec![("member", member.as_str())], seconds)
            }),
        )?;
        let counts = rows.iter().flat_map(|row| {
            let counts = self.reports.counts(&row.name, home_state.allow_chart_skip);
            let phases = [
                ("ready", counts.ready),
                ("pending", counts.pending),
                ("error", counts.error),
            ];
            let member = ("member", row.name.as_str());
            phases.map(|(phase, count)| (vec![member, ("phase", phase)], i64::from(count)))
        });
        encoder.family(
            "member_tenants",
            "Tenants of the member as last reported, by phase.",
            None,
            counts,
        )?;
        self.credentials(encoder, &rows, clock::wall())
    }

    fn credentials(
        &self,
        encoder: &mut Encoder<'_>,
        rows: &[MemberRow],
        now: Timestamp,
    ) -> fmt::Result {
        let expiries = |index: usize| {
            rows.iter().filter_map(move |row| {
                let expiry = row.credentials[index]?.not_after.as_second();
                Some((vec![("member", row.name.as_str())], expiry))
            })
        };
        encoder.family(
            "agent_certificate_expiry_timestamp",
            "Expiry time of the certificate of the member's agent, in seconds since 1970.",
            Some(&Unit::Seconds),
            expiries(0),
        )?;
        encoder.family(
            "access_expiry_timestamp",
            "Expiry time of the credential in the member's kubeconfig, in seconds since 1970.",
            Some(&Unit::Seconds),
            expiries(1),
        )?;
        let due = rows.iter().flat_map(|row| {
            let validities = ["agent", "access"].into_iter().zip(row.credentials);
            validities.filter_map(move |(name, validity)| {
                let is_due = validity?.state_at(now) != CredentialState::Current;
                let labels = vec![("member", row.name.as_str()), ("credential", name)];
                Some((labels, i64::from(is_due)))
            })
        });
        encoder.family(
            "member_credential_due",
            "Whether at most a fifth of the credential's lifetime is left, as the EdgeCluster's conditions CertificateCurrent \
             (agent) and AccessCurrent (access) report.",
            None,
            due,
        )
    }
}

struct Encoder<'a>(DescriptorEncoder<'a>);

impl Encoder<'_> {
    fn family<'l>(
        &mut self,
        name: &str,
        help: &str,
        unit: Option<&Unit>,
        rows: impl Iterator<Item = (Vec<(&'static str, &'l str)>, i64)>,
    ) -> fmt::Result {
        let kind = ConstGauge::new(0_i64).metric_type();
        let mut family = self.0.encode_descriptor(name, help, unit, kind)?;
        for (labels, value) in rows {
            ConstGauge::new(value).encode(family.encode_family(&labels)?)?;
        }
        Ok(())
    }
}

impl Collector for FleetView {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let mut encoder = Encoder(encoder);
        let number = |count: usize| i64::try_from(count).unwrap_or(i64::MAX);
        let (connected, all) = self.members.connected();
        // Export no series for members that have left.
        let runtime = tokio::runtime::Handle::try_current();
        let tasks = runtime.map_or(0, |runtime| runtime.metrics().num_alive_tasks());
        let home_state = self.home_state.get();
        let leading =
            home_state.is_some_and(|home_state| home_state.leader.may_write(BootTime::now()));
        let epoch = home_state.map_or(0, |home_state| home_state.chart.get().epoch);
        for (name, help, value) in [
            (
                "leader",
                "Whether this hub is the leader.",
                i64::from(leading),
            ),
            (
                "epoch",
                "Epoch in which this hub last published desired states, or 0 before it was the leader.",
                i64::try_from(epoch).unwrap_or(i64::MAX),
            ),
            ("members", "Known members of the fleet.", number(all)),
            (
                "members_connected",
                "Members whose EdgeCluster's condition Connected is True.",
                number(connected),
            ),
            ("tasks", "Running tasks of the hub.", number(tasks)),
        ] {
            gauge(&mut encoder.0, name, help, None, value)?;
        }
        match home_state {
            Some(home_state) => self.rows(&mut encoder, home_state),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use krypton_reconciler::drift::DriftMetrics;
    use krypton_reconciler::metrics::WorkMetrics;
    use krypton_types::conditions::State;
    use prometheus_client::encoding::text::encode;

    use super::*;
    use crate::agent_server::metrics::EnrollmentOutcome;
    use crate::leader::LeaderState;
    use crate::observe::metrics::registry;

    fn version(generation: u64) -> Version {
        Version {
            epoch: 1,
            generation,
        }
    }

    #[test]
    fn member_lags_since_first_unapplied_desired_state() {
        let at = |second| BootTime(Duration::from_secs(second));
        let lag = |generation, since| {
            Some(MemberLag {
                wanted: version(generation),
                since: at(since),
            })
        };
        for (previous, wanted, applied, after) in [
            (None, (1, 10), None, lag(1, 10)),
            (None, (1, 10), Some(1), None),
            (lag(1, 10), (1, 10), Some(1), None),
            // The desired state changes, but the member doesn't follow.
            (lag(2, 10), (3, 50), Some(1), lag(2, 10)),
            // The member follows one version behind.
            (lag(2, 10), (3, 50), Some(2), lag(3, 50)),
            // The member has a version from before a restore of the home cluster.
            (None, (3, 50), Some(9), lag(3, 50)),
        ] {
            let (wanted, since) = wanted;
            let current = member_lag(previous, (version(wanted), at(since)), applied.map(version));
            assert_eq!(current, after, "{previous:?} {wanted} {applied:?}");
        }
    }

    struct MetricsFixture {
        view: Arc<FleetView>,
        leader_state: watch::Sender<LeaderState>,
    }

    impl MetricsFixture {
        fn new() -> Self {
            let view = Arc::new(FleetView::default());
            let (leader_state, leader) = Leader::with_state(LeaderState::Standby { leader: None });
            let chart = FleetChart {
                epoch: 7,
                chart: None,
                problem: None,
            };
            view.set_home_state(HomeState {
                leader,
                chart: watch::channel(chart).1,
                allow_chart_skip: false,
            });
            Self { view, leader_state }
        }

        fn scrape(&self) -> String {
            let (drift, work) = (DriftMetrics::default(), WorkMetrics::default());
            let registry = registry(Arc::clone(&self.view), &drift, &work);
            let mut text = String::new();
            encode(&mut text, &registry).unwrap();
            text
        }
    }

    fn assert_has_line(text: &str, line: &str) {
        let line = format!("krypton_hub_{line}");
        assert!(text.lines().any(|found| found == line), "{line}: {text}");
    }

    #[test]
    fn only_leading_hub_exports_member_metrics() {
        let fixture = MetricsFixture::new();
        let at = |second| Timestamp::from_second(second).unwrap();
        fixture.view.members.observe("edge-1", |observation| {
            observation.certificate = Some(Validity::until(at(1000)));
            observation.connected = State::new(Truth::True, reason::CONNECTED, "");
            observation.mode = Mode::Agent;
        });
        fixture.view.members.observe("edge-2", |observation| {
            let now = clock::wall();
            observation.access = Some(Validity {
                not_before: now,
                not_after: at(now.as_second() + 1000),
            });
        });
        fixture.view.members.observe("asleep", |observation| {
            observation.healthy = State::new(Truth::Unknown, reason::SUSPENDED, "");
        });
        fixture
            .view
            .sessions
            .set_certificate_expiry("hub", at(3000));
        fixture.view.sessions.set_certificate_expiry("ca", at(4000));
        fixture
            .view
            .sessions
            .count_enrollment(EnrollmentOutcome::Refused);
        let standby = fixture.scrape();
        assert_has_line(&standby, "leader 0");
        assert_has_line(&standby, "members 3");
        assert!(!standby.contains("{member="), "{standby}");
        fixture
            .leader_state
            .send_replace(Leader::always_leading().state());
        let leader = fixture.scrape();
        for line in [
            "leader 1",
            "epoch 7",
            "members_connected 1",
            "member_connected{member=\"edge-1\"} 1",
            "member_connected{member=\"edge-2\"} 0",
            "member_mode{member=\"edge-1\",mode=\"agent\"} 1",
            "member_tenants{member=\"edge-2\",phase=\"error\"} 0",
            "agent_certificate_expiry_timestamp_seconds{member=\"edge-1\"} 1000",
            "member_credential_due{member=\"edge-1\",credential=\"agent\"} 1",
            "member_credential_due{member=\"edge-2\",credential=\"access\"} 0",
            "certificate_expiry_timestamp_seconds{certificate=\"hub\"} 3000",
            "certificate_expiry_timestamp_seconds{certificate=\"ca\"} 4000",
            "enrollments_total{outcome=\"refused\"} 1",
        ] {
            assert_has_line(&leader, line);
        }
        assert!(!leader.contains("member_connected{member=\"asleep\"}"));
    }
}
