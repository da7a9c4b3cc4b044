//! The time of the next plan, and the next step to report.

use jiff::Timestamp;
use krypton_runtime::clock::BootTime;
use krypton_types::conditions::reason;
use krypton_types::tenant::{Next, Step};

use super::memory::Failure;
use super::state::{ReleaseState, Rollout};

/// The next step that Krypton takes without a user, as [`Next`] in a report.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Coming {
    pub step: Step,
    pub at: Option<BootTime>,
    /// Number of consecutive failed attempts.
    pub attempts: u32,
}

impl Coming {
    /// Converts the time to wall-clock time, where `now` and `wall` are the same moment.
    pub fn on_the_wall(self, now: BootTime, wall: Timestamp) -> Next {
        let on_the_wall = |at: BootTime| wall.checked_add(at.since(now)).unwrap_or(wall);
        let at = self.at.map(on_the_wall);
        Next::new(self.step, at, self.attempts)
    }

    /// Returns the retry after a failed attempt; `None` if the failure may end at any moment. Each attempt would then
    /// cause a status write without new information.
    pub(super) fn retry(failure: &Failure) -> Option<Self> {
        let soon = [reason::HELM_UNAVAILABLE, reason::SUSPENDED];
        (!soon.contains(&failure.reason)).then_some(Self {
            step: Step::Retry,
            at: Some(failure.retry_at),
            attempts: failure.attempts,
        })
    }
}

/// Returns the time of the next plan if nothing changes before, and the next step to report.
pub(super) fn coming(state: &ReleaseState<'_>) -> (Option<BootTime>, Option<Coming>) {
    let next = |step, at, attempts| Some(Coming { step, at, attempts });
    match state {
        ReleaseState::BackingOff(failure) | ReleaseState::RemovalFailed(failure) => {
            (Some(failure.retry_at), Coming::retry(failure))
        }
        ReleaseState::GivenUp(failure) => (None, next(Step::GivenUp, None, failure.attempts)),
        ReleaseState::Locked { until, .. } => (Some(*until), next(Step::Unlock, Some(*until), 0)),
        _ => match state.rollout() {
            // Report the next step only with the second message, because it would otherwise cause a separate write.
            Some(Rollout::Waiting {
                quiet_until: Some(quiet_until),
                deadline,
                ..
            }) => (Some(*quiet_until.min(deadline)), None),
            Some(Rollout::Waiting { deadline, .. }) => {
                (Some(*deadline), next(Step::Wait, Some(*deadline), 0))
            }
            _ => (None, None),
        },
    }
}
