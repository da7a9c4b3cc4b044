//! Metrics of the members and of leadership, collected at scrape time without a second copy of the state.
//!
//! Only the leader exports metrics of each member. Standbys know less about members, and a sum over all
//! hubs would count twice.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use jiff::Timestamp;
use krypton_crds::edge_cluster::Mode;
use krypton_runtime::clock::{self, BootTime};
use krypton_runtime::newest::Newest as _;
use krypton_types::conditions::{Truth, reason};
use krypton_types::desired::Version;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Unit;
use tokio::sync::watch;

use crate::ca::Live;
use crate::edgecluster::FleetChart;
use crate::edgecluster::credential_expiry::{Credential, CredentialState, Validity};
use crate::leader::Leader;
use crate::members::MemberRegistry;
use crate::members::observation::MemberObservation;
use crate::tenants::Reports;

/// The state that the metrics read.
#[derive(Debug, Default)]
pub struct FleetView {
    pub members: Arc<MemberRegistry>,
    pub reports: Arc<Reports>,
    acting: OnceLock<Acting>,
    authority: OnceLock<Arc<Live>>,
    behind: Mutex<BTreeMap<String, Behind>>,
}

/// The state that exists only once the home cluster has responded.
#[derive(Debug)]
pub struct Acting {
    pub lead: Leader,
    pub given: watch::Receiver<FleetChart>,
    pub allow_chart_skip: bool,
}

/// Since when a member lags behind its desired state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Behind {
    /// The oldest desired state that the member has not applied.
    wanted: Version,
    since: BootTime,
}

/// Computes the lag of a member. `wanted` is its desired state and the time it was published; `applied` is
/// the version it has. A newer desired state doesn't reset the lag of a member that has not applied an
/// older one.
fn behind(
    before: Option<Behind>,
    wanted: (Version, BootTime),
    applied: Option<Version>,
) -> Option<Behind> {
    let (wanted, since) = wanted;
    if applied == Some(wanted) {
        return None;
    }
    let still = before.filter(|before| applied.is_none_or(|applied| applied < before.wanted));
    Some(still.unwrap_or(Behind { wanted, since }))
}

/// The metrics of one member.
struct Row {
    name: String,
    /// `None` if no process may act there. This is not an error.
    connected: Option<bool>,
    mode: Mode,
    applied: Option<Version>,
    credentials: [Option<Validity>; 2],
}

impl Row {
    pub(crate) fn of(name: &str, facts: &MemberObservation) -> Self {
        let wanted = ![reason::BANNED, reason::SUSPENDED].contains(&facts.healthy.reason.as_str());
        Self {
            name: name.to_owned(),
            connected: wanted.then_some(facts.connected.truth == Truth::True),
            mode: facts.mode,
            applied: facts.applied.as_ref().map(|(version, _)| *version),
            credentials: [facts.certificate, facts.access],
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
    pub fn new(members: Arc<MemberRegistry>, reports: Arc<Reports>) -> Self {
        Self {
            members,
            reports,
            ..Self::default()
        }
    }

    /// Records that the home cluster has responded.
    pub fn acts(&self, acting: Acting) {
        // Called once per process.
        drop(self.acting.set(acting));
    }

    /// Records the CA of the agents' port.
    pub(crate) fn serves_by(&self, authority: Arc<Live>) {
        // Called once per process.
        drop(self.authority.set(authority));
    }

    pub(crate) fn authority(&self) -> Option<&Live> {
        self.authority.get().map(Arc::as_ref)
    }

    /// The state that exists once the home cluster has responded.
    pub(crate) fn acting(&self) -> Option<&Acting> {
        self.acting.get()
    }

    /// Returns how long each member has lagged behind its desired state, or zero if it doesn't lag.
    fn behind(&self, rows: &[Row], now: BootTime) -> Vec<(String, Duration)> {
        let published = self.members.wanted();
        let mut known = self.behind.lock().unwrap_or_else(PoisonError::into_inner);
        let mut next = BTreeMap::new();
        let mut found = Vec::new();
        for row in rows {
            let Some(wanted) = published.get(&row.name) else {
                continue;
            };
            let late = behind(known.get(&row.name).copied(), *wanted, row.applied);
            let since = late.map(|late| now.since(late.since));
            found.push((row.name.clone(), since.unwrap_or_default()));
            next.extend(late.map(|late| (row.name.clone(), late)));
        }
        *known = next;
        found
    }

    fn rows(&self, encoder: &mut Encoder<'_>, acting: &Acting, leads: bool) -> fmt::Result {
        let rows = if leads {
            self.members.observations(Row::of)
        } else {
            Vec::new()
        };
        encoder.family(
            "member_connected",
            "Whether the member's API server answered within the last 30 s. Absent for banned and suspended members.",
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
        let late = self.behind(&rows, BootTime::now());
        encoder.family(
            "member_behind",
            "How long the member has lagged behind its desired state, or 0 if it acts on the latest one.",
            Some(&Unit::Seconds),
            late.iter().map(|(member, late)| {
                let seconds = i64::try_from(late.as_secs()).unwrap_or(i64::MAX);
                (vec![("member", member.as_str())], seconds)
            }),
        )?;
        let counts = rows.iter().flat_map(|row| {
            let counts = self.reports.counts(&row.name, acting.allow_chart_skip);
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

    fn credentials(&self, encoder: &mut Encoder<'_>, rows: &[Row], now: Timestamp) -> fmt::Result {
        let ends = |which: usize| {
            rows.iter().filter_map(move |row| {
                let end = row.credentials[which]?.not_after.as_second();
                Some((vec![("member", row.name.as_str())], end))
            })
        };
        encoder.family(
            "agent_certificate_expiry_timestamp",
            "Expiry time of the certificate of the member's agent, in seconds since 1970.",
            Some(&Unit::Seconds),
            ends(0),
        )?;
        encoder.family(
            "access_expiry_timestamp",
            "Expiry time of the credential in the member's kubeconfig, in seconds since 1970.",
            Some(&Unit::Seconds),
            ends(1),
        )?;
        let due = rows.iter().flat_map(|row| {
            let named = [(Credential::Agent, "agent"), (Credential::Access, "access")];
            let with = named.into_iter().zip(row.credentials);
            with.filter_map(move |((_, name), validity)| {
                let due = validity?.at(now) != CredentialState::Current;
                let labels = vec![("member", row.name.as_str()), ("credential", name)];
                Some((labels, i64::from(due)))
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
    fn gauge(&mut self, name: &str, help: &str, value: i64) -> fmt::Result {
        let gauge = ConstGauge::new(value);
        let metric = self
            .0
            .encode_descriptor(name, help, None, gauge.metric_type())?;
        gauge.encode(metric)
    }

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
        let acting = self.acting.get();
        let leading = acting.is_some_and(|acting| acting.lead.writes(BootTime::now()));
        let epoch = acting.map_or(0, |acting| acting.given.get().epoch);
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
                "Members whose API server answered within the last 30 s.",
                number(connected),
            ),
            ("tasks", "Running tasks of the hub.", number(tasks)),
        ] {
            encoder.gauge(name, help, value)?;
        }
        match acting {
            // While the home cluster doesn't respond, the hub still serves agents and exports their
            // reports.
            Some(acting) => self.rows(&mut encoder, acting, acting.lead.serves()),
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
    use crate::leader::LeaderState;
    use crate::observe::metrics::{Outcome, SessionMetrics, registry};

    fn version(generation: u64) -> Version {
        Version {
            epoch: 1,
            generation,
        }
    }

    #[test]
    fn member_lags_since_first_unapplied_desired_state() {
        let at = |second| BootTime(Duration::from_secs(second));
        let late = |generation, since| {
            Some(Behind {
                wanted: version(generation),
                since: at(since),
            })
        };
        for (before, wanted, applied, after) in [
            (None, (1, 10), None, late(1, 10)),
            (None, (1, 10), Some(1), None),
            (late(1, 10), (1, 10), Some(1), None),
            // The desired state changes, but the member doesn't follow.
            (late(2, 10), (3, 50), Some(1), late(2, 10)),
            // The member follows one version behind.
            (late(2, 10), (3, 50), Some(2), late(3, 50)),
            // The member has a version from before a restore of the home cluster.
            (None, (3, 50), Some(9), late(3, 50)),
        ] {
            let (wanted, since) = wanted;
            let found = behind(before, (version(wanted), at(since)), applied.map(version));
            assert_eq!(found, after, "{before:?} {wanted} {applied:?}");
        }
    }

    struct Stage {
        view: Arc<FleetView>,
        stand: watch::Sender<LeaderState>,
        sessions: SessionMetrics,
    }

    impl Stage {
        fn new() -> Self {
            let view = Arc::new(FleetView::default());
            let (stand, lead) = Leader::by_hand(LeaderState::Standby { leader: None });
            let given = FleetChart {
                epoch: 7,
                chart: None,
                problem: None,
            };
            view.acts(Acting {
                lead,
                given: watch::channel(given).1,
                allow_chart_skip: false,
            });
            Self {
                view,
                stand,
                sessions: SessionMetrics::default(),
            }
        }

        fn scrape(&self) -> String {
            let (drift, work) = (DriftMetrics::default(), WorkMetrics::default());
            let registry = registry(Arc::clone(&self.view), &self.sessions, &drift, &work);
            let mut text = String::new();
            encode(&mut text, &registry).unwrap();
            text
        }
    }

    fn has(text: &str, line: &str) {
        let line = format!("krypton_hub_{line}");
        assert!(text.lines().any(|found| found == line), "{line}: {text}");
    }

    #[test]
    fn only_leading_hub_exports_member_metrics() {
        let stage = Stage::new();
        let end = |second| Timestamp::from_second(second).unwrap();
        stage.view.members.observe("edge-1", |facts| {
            facts.certificate = Some(Validity::until(end(1000)));
            facts.connected = State::new(Truth::True, reason::CONNECTED, "");
            facts.mode = Mode::Agent;
        });
        stage.view.members.observe("edge-2", |facts| {
            let now = clock::wall();
            facts.access = Some(Validity {
                not_before: now,
                not_after: end(now.as_second() + 1000),
            });
        });
        stage.view.members.observe("asleep", |facts| {
            facts.healthy = State::new(Truth::Unknown, reason::SUSPENDED, "");
        });
        stage.sessions.certificate("hub", end(3000));
        stage.sessions.certificate("ca", end(4000));
        stage.sessions.enrollment(Outcome::Refused);
        let standby = stage.scrape();
        has(&standby, "leader 0");
        has(&standby, "members 3");
        assert!(!standby.contains("{member="), "{standby}");
        stage.stand.send_replace(Leader::alone().stand());
        let leader = stage.scrape();
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
            has(&leader, line);
        }
        assert!(!leader.contains("member_connected{member=\"asleep\"}"));
    }
}
