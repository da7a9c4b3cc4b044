//! Derives the state of a member from the report of its selected reporter. Performs no I/O.

use krypton_crds::edge_cluster::Mode;
use krypton_types::conditions::{State, Truth, reason};
use krypton_types::desired::Version;
use krypton_types::member::MemberReport;

use crate::members::arbiter::{AGENT_HOLDER, Presence, ReporterId, SelectedReporter};
use crate::members::observation::MemberObservation;
use crate::members::tenant_reports::ReportState;

/// State of a member, derived from its reports. `None` leaves the previous value unchanged.
#[derive(Debug, Default)]
pub(super) struct MemberHealth {
    pub(super) mode: Mode,
    pub(super) connected: Option<State>,
    pub(super) healthy: Option<State>,
    pub(super) holder: Option<Option<String>>,
    pub(super) applied: Option<(Version, String)>,
    /// Epoch that the member has recorded, if it is later than the hub's.
    pub(super) ahead: Option<u64>,
    pub(super) report_state: Option<ReportState>,
}

impl MemberHealth {
    /// Changes nothing but the mode.
    fn unchanged(mode: Mode) -> Self {
        Self {
            mode,
            ..Self::default()
        }
    }

    pub(super) fn apply_to(&self, observation: &mut MemberObservation) {
        observation.mode = self.mode;
        if let Some(connected) = &self.connected {
            observation.connected.clone_from(connected);
        }
        if let Some(healthy) = &self.healthy {
            observation.healthy.clone_from(healthy);
        }
        if let Some(holder) = &self.holder {
            observation.holder.clone_from(holder);
        }
        if self.applied.is_some() {
            observation.applied.clone_from(&self.applied);
        }
    }
}

/// Derives the state from the selected reporter, or from the hub's own connection.
pub(super) fn health(
    selected: Option<SelectedReporter<'_>>,
    connection: Option<&State>,
    held_back: Option<&(&'static str, String)>,
    presence: Presence,
    silent: bool,
) -> MemberHealth {
    let mut health = match selected {
        Some(SelectedReporter {
            id,
            report: Some(report),
            complete,
        }) => reported(id, report, complete),
        Some(SelectedReporter { id, .. }) => {
            let agent = id != ReporterId::Proxy;
            let mode = if agent { Mode::Agent } else { Mode::Proxy };
            MemberHealth {
                connected: agent.then(|| State::new(Truth::True, reason::CONNECTED, "")),
                healthy: Some(State::default()),
                ..MemberHealth::unchanged(mode)
            }
        }
        None => unreported(connection, presence, silent),
    };
    if let Some((reason, message)) = held_back {
        health.mode = Mode::None;
        // A suspended member is not unhealthy.
        let truth = match *reason {
            reason::SUSPENDED => Truth::Unknown,
            _ => Truth::False,
        };
        health.healthy = Some(State::new(truth, *reason, message.clone()));
        // While the hub connects again, only an error of its connection tells that the member is silent.
        health.report_state = match *reason {
            reason::CONNECTING => health
                .report_state
                .filter(|state| matches!(state, ReportState::Silent(_))),
            _ => Some(ReportState::Silent(format!("{reason}: {message}"))),
        };
    }
    health
}

pub(super) fn reported(id: ReporterId, report: &MemberReport, complete: bool) -> MemberHealth {
    let problem = report.problem.clone().unwrap_or_default();
    let agent = id != ReporterId::Proxy;
    let connected = if report.connected {
        State::new(Truth::True, reason::CONNECTED, "")
    } else if agent {
        let message =
            format!("the agent is connected, but its API server does not respond: {problem}");
        State::new(Truth::False, reason::UNREACHABLE, message)
    } else {
        State::new(Truth::False, reason::UNREACHABLE, problem.clone())
    };
    let held_by_agent = report
        .holder
        .as_ref()
        .map(|holder| holder.starts_with(AGENT_HOLDER));
    // Until the full report is complete, a missing Tenant means nothing.
    let report_state = match (report.connected, report.synced && complete) {
        (true, true) => Some(ReportState::Complete),
        (true, false) => None,
        (false, _) => {
            let message = format!("the cluster does not respond: {problem}");
            Some(ReportState::Silent(message))
        }
    };
    MemberHealth {
        mode: if held_by_agent.unwrap_or(agent) {
            Mode::Agent
        } else {
            Mode::Proxy
        },
        connected: Some(connected),
        healthy: Some(healthy(agent, report)),
        holder: Some(report.holder.clone()),
        applied: report.applied.clone(),
        // Only the Lease holder has a record on the member to compare with.
        ahead: report
            .ahead
            .filter(|_| report.writing)
            .map(|version| version.epoch),
        report_state,
    }
}

fn healthy(agent: bool, report: &MemberReport) -> State {
    let problem = report.problem.clone().unwrap_or_default();
    if report.ahead.is_some() {
        let message = "the member has a later desired state; the hub takes a new epoch";
        return State::new(Truth::False, reason::STALE, message);
    }
    if let Some(holder) = report.holder.as_ref().filter(|_| !report.writing) {
        let observer = if agent {
            "the connected agent"
        } else {
            "this hub"
        };
        let message = format!("{holder} holds the Lease; {observer} observes");
        return State::new(Truth::True, reason::OBSERVING, message);
    }
    if !report.connected {
        return State::new(Truth::Unknown, reason::UNREACHABLE, problem);
    }
    if let Some(message) = &report.not_restored {
        return State::new(Truth::False, reason::NOT_RESTORED, message.clone());
    }
    if !(report.synced && report.writing && report.applied.is_some()) {
        return State::new(Truth::Unknown, reason::STARTING, problem);
    }
    if problem.is_empty() {
        return State::new(Truth::True, reason::RECONCILING, "");
    }
    let message = format!("the newest desired state is not recorded: {problem}");
    State::new(Truth::False, reason::STALE, message)
}

/// Derives the state of a member without a reporter from the hub's own connection, if there is one.
fn unreported(connection: Option<&State>, presence: Presence, silent: bool) -> MemberHealth {
    match (connection, presence) {
        // The agent may reconnect soon, so its last status stays for a while.
        (_, Presence::Away(_) | Presence::Ready) if !silent => MemberHealth::unchanged(Mode::Agent),
        (None, Presence::Away(_) | Presence::Ready) => {
            let message = "the agent is not connected and keeps its last desired state; check its log and its network path to the hub";
            MemberHealth {
                connected: Some(State::new(Truth::False, reason::AGENT_AWAY, message)),
                healthy: Some(State::new(Truth::Unknown, reason::AGENT_AWAY, message)),
                holder: Some(None),
                report_state: Some(ReportState::Silent(message.to_owned())),
                ..MemberHealth::unchanged(Mode::Agent)
            }
        }
        (Some(connection), _) if connection.truth == Truth::False => MemberHealth {
            connected: Some(connection.clone()),
            healthy: Some(State::new(
                Truth::Unknown,
                connection.reason.clone(),
                connection.message.clone(),
            )),
            holder: Some(None),
            report_state: Some(ReportState::Silent(connection.message.clone())),
            ..MemberHealth::unchanged(Mode::None)
        },
        (connection, _) => MemberHealth {
            connected: connection.cloned(),
            ..MemberHealth::unchanged(Mode::None)
        },
    }
}
