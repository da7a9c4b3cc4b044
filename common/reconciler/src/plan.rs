//! Decides the next action and the conditions of one Tenant or KryptonDeployment from a view of the member, without
//! I/O.
//!
//! A plan takes three steps: `state` names the situation of the release, `action` chooses the action for it, and
//! `conditions` words it for users. `coming` adds the time of the next plan, `history` the last revisions, and `drift`
//! the drift check. `refusal` replaces a plan that the API server has just refused.

mod action;
mod conditions;
mod drift;
mod history;
mod memory;
mod next_step;
mod ownership;
mod policy;
mod readiness;
mod refusal;
#[cfg(test)]
mod repair;
pub(crate) mod revisions;
mod state;
#[cfg(test)]
mod tests;
mod view;

use krypton_crds::tenant::HistoryEntry;
use krypton_runtime::clock::BootTime;
use krypton_types::conditions::{ClusterState, Truth};
use krypton_types::deployment::ReportedRevision;

pub use action::Action;
pub use history::deployment_history;
pub use memory::{AppliedRun, Attempt, FailedChecks, Failure, Memory, Refusal, RevisionDrift, Run};
pub use next_step::PlannedStep;
pub(crate) use ownership::may_use;
pub use ownership::{PREVIOUS_UID_ANNOTATION, previous_uids};
pub use policy::Policy;
pub(crate) use view::pause_reason;
pub use view::{Permit, View};

use self::conditions::{INSTALLING, UPGRADING};
use self::state::{ReleaseState, release_state};
use crate::drift::DriftSettings;

/// The next action, and the state to report with it.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    pub action: Action,
    /// The Tenant's conditions on this member.
    pub state: ClusterState,
    /// The chart that the release runs, if the release is as desired.
    pub applied_chart: Option<String>,
    /// The last revisions of the release, for the Tenant's status.
    pub history: Vec<HistoryEntry>,
    /// The last revisions of a KryptonDeployment's release; `None` if the reported ones stay.
    pub revisions: Option<Vec<ReportedRevision>>,
    /// Time of the next plan if nothing changes before.
    pub wake: Option<BootTime>,
    /// The next step to report.
    pub next: Option<PlannedStep>,
    /// Whether the member's report includes the Tenant.
    pub is_reported: bool,
    /// The removal that the home cluster ordered is complete.
    pub gone: bool,
    /// The release is as desired. Krypton only waits for its readiness or writes about it.
    pub settled: bool,
    /// Whether Krypton has handled the owner's reconcile request: it may write, and has nothing left to do or announce.
    pub handles_request: bool,
    /// How to check the release for drift; `None` if Krypton must not check it now.
    pub drift: Option<DriftSettings>,
}

/// Plans the next action. The same view always gives the same plan.
pub fn plan(view: &View<'_>) -> Plan {
    let release_state = release_state(view);
    let action = action::action(&release_state, view);
    let state = conditions::conditions(&release_state, view);
    let (wake, next) = next_step::next_step(&release_state);
    let settled = release_state.rollout().is_some();
    let waits_for_others = release_state.waits_for_others();
    // The next step does not happen while the permit is missing or a pause lasts.
    let is_held = view.hold().is_some() && !matches!(release_state, ReleaseState::Leftovers(..));
    // The announcement of a Helm run is written anyway.
    let is_written = matches!(action, Action::Helm(_) | Action::InstallAgain);
    let may_change = is_written || !is_announced(&state);
    let plan = Plan {
        action,
        applied_chart: (settled && !is_announced(&state)).then(|| view.chart.applied_name()),
        history: history::history(view, may_change),
        revisions: history::reported_revisions(view, may_change),
        state,
        wake,
        next: next.filter(|_| !is_held),
        is_reported: !matches!(
            release_state,
            ReleaseState::OtherMember | ReleaseState::NamespaceNotAllowed(_)
        ),
        gone: matches!(release_state, ReleaseState::Gone { retired: false, .. }),
        settled,
        handles_request: false,
        drift: None,
    };
    let plan = refusal::with_refusal(drift::with_drift(plan, view), view);
    let is_done = plan.action == Action::Nothing && !is_announced(&plan.state);
    Plan {
        handles_request: is_done && !waits_for_others && view.hold().is_none(),
        ..plan
    }
}

/// Whether the conditions still have the message from before the action, so there is nothing to write.
fn is_announced(state: &ClusterState) -> bool {
    state.progress.as_ref().is_some_and(|progress| {
        progress.truth == Truth::True && [INSTALLING, UPGRADING].contains(&&*progress.message)
    })
}
