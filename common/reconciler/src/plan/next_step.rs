//! The time of the next plan, and the next step to report.

use jiff::Timestamp;
use krypton_runtime::clock::BootTime;
use krypton_types::conditions::reason;
use krypton_types::tenant::{UpcomingStep, UpcomingStepKind};

use super::memory::Failure;
use super::state::{ReleaseState, Rollout};

/// The next step that Krypton takes without a user, as [`UpcomingStep`] in a report.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlannedStep {
    pub step: UpcomingStepKind,
    pub at: Option<BootTime>,
    /// Number of consecutive failed attempts.
    pub attempts: u32,
}

impl PlannedStep {
    /// Converts the time to wall-clock time, where `now` and `wall` are the same moment.
    pub fn to_wall_clock(self, now: BootTime, wall: Timestamp) -> UpcomingStep {
        let to_wall = |at: BootTime| wall.checked_add(at.since(now)).unwrap_or(wall);
        UpcomingStep::new(self.step, self.at.map(to_wall), self.attempts)
    }

    /// Returns the retry after a failed attempt; `None` if the failure may end at any moment. Each attempt would then
    /// cause a status write without new information.
    pub(super) fn retry(failure: &Failure) -> Option<Self> {
        let may_end_soon = [reason::HELM_UNAVAILABLE, reason::SUSPENDED];
        (!may_end_soon.contains(&failure.reason)).then_some(Self {
            step: UpcomingStepKind::Retry,
            at: Some(failure.retry_at),
            attempts: failure.attempts,
        })
    }
}

/// Returns the time of the next plan if nothing changes before, and the next step to report.
pub(super) fn next_step(state: &ReleaseState<'_>) -> (Option<BootTime>, Option<PlannedStep>) {
    let planned = |step, at, attempts| Some(PlannedStep { step, at, attempts });
    match state {
        ReleaseState::BackingOff(failure) | ReleaseState::RemovalFailed(failure) => {
            (Some(failure.retry_at), PlannedStep::retry(failure))
        }
        ReleaseState::GivenUp(failure) => (
            None,
            planned(UpcomingStepKind::GivenUp, None, failure.attempts),
        ),
        ReleaseState::Locked { until, .. } => (
            Some(*until),
            planned(UpcomingStepKind::Unlock, Some(*until), 0),
        ),
        _ => match state.rollout() {
            // Report the next step only with the second message, because it would otherwise cause a separate write.
            Some(Rollout::Waiting {
                quiet_until: Some(quiet_until),
                deadline,
                ..
            }) => (Some(*quiet_until.min(deadline)), None),
            Some(Rollout::Waiting { deadline, .. }) => (
                Some(*deadline),
                planned(UpcomingStepKind::Wait, Some(*deadline), 0),
            ),
            _ => (None, None),
        },
    }
}
