//! The conditions `Reconciling` and `Stalled` of an object that is not ready. From them, kstatus
//! derives whether the object is in progress or has failed.

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;

use super::{ClusterState, State, Truth, reason, remove, set};
use crate::tenant::{UpcomingStep, UpcomingStepKind};

/// Condition of an object that is not ready, while Krypton or the cluster works on it.
pub const RECONCILING: &str = "Reconciling";

/// Condition of an object that does not become ready until a user changes something.
pub const STALLED: &str = "Stalled";

/// The cause that keeps an object from being ready. If an object has several members, the greatest
/// outlook counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Outlook {
    /// Krypton does nothing on purpose: the object is paused, suspended or managed elsewhere.
    Idle,
    /// Krypton works on it or retries, or waits for a cluster.
    Reconciling,
    /// A user must change something.
    Stalled,
}

impl Outlook {
    /// Returns the outlook of a Tenant or KryptonDeployment that is not ready on one member.
    pub fn from_state(state: &ClusterState, next: Option<UpcomingStep>) -> Self {
        let outlook = |state: &State| Self::from_reason(&state.reason);
        let is_idle = |state: &State| outlook(state) == Self::Idle;
        if is_idle(&state.ready) || state.progress.as_ref().is_some_and(is_idle) {
            return Self::Idle;
        }
        let error = state
            .error
            .as_ref()
            .filter(|error| error.truth == Truth::True);
        let gave_up = next.is_some_and(|next| next.step == UpcomingStepKind::GivenUp);
        // As an error, this reason means that Krypton does not know the status of the release.
        let is_unknown = error.is_some_and(|error| error.reason == reason::LOCKED);
        if gave_up || is_unknown {
            return Self::Stalled;
        }
        outlook(error.unwrap_or(&state.ready))
    }

    /// Returns the outlook of an object that is not ready for this reason.
    pub fn from_reason(reason: &str) -> Self {
        match reason {
            reason::NOT_THIS_CLUSTER | reason::PAUSED | reason::SUSPENDED | reason::UNINSTALLED => {
                Self::Idle
            }
            reason::BANNED
            | reason::BELONGS_TO_ANOTHER
            | reason::CLUSTER_REF_CHANGED
            | reason::DUPLICATE
            | reason::IDENTITY_CHANGED
            | reason::KUBECONFIG_INVALID
            | reason::MULTICLUSTER_DISABLED
            | reason::NAMESPACE_NOT_ALLOWED
            | reason::NAMESPACE_NOT_OWNED
            | reason::NAME_TAKEN
            | reason::NOT_ACCEPTED
            | reason::NOT_A_NAME
            | reason::NOT_PLACING
            | reason::PROVIDER_NOT_CONFIGURED
            | reason::RELEASE_IN_USE
            | reason::RELEASE_TAMPERED
            | reason::RENAMED
            | reason::SECRET_NOT_ALLOWED
            | reason::SOURCE_GONE
            | reason::TOO_MANY
            | reason::VALUES_NOT_ALLOWED
            | reason::VALUES_TOO_LARGE
            | reason::WORKSPACE_INVALID => Self::Stalled,
            _ => Self::Reconciling,
        }
    }
}

/// Sets `Reconciling` or `Stalled`, with the reason and message of `state`, and removes the other.
/// Removes both if `state` is True or the object is idle.
pub fn set_progress(
    conditions: &mut Vec<Condition>,
    state: &State,
    outlook: Outlook,
    generation: i64,
    now: Timestamp,
) {
    let is_ready = state.truth == Truth::True;
    let shown = match outlook {
        Outlook::Reconciling if !is_ready => Some(RECONCILING),
        Outlook::Stalled if !is_ready => Some(STALLED),
        _ => None,
    };
    for type_ in [RECONCILING, STALLED] {
        if shown != Some(type_) {
            remove(conditions, type_);
        }
    }
    if let Some(type_) = shown {
        let state = State {
            truth: Truth::True,
            ..state.clone()
        };
        set(conditions, type_, &state, generation, now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state(ready: &str, progress: &str, error: Option<&str>) -> ClusterState {
        let state = |truth, reason: &str| State::new(truth, reason, "");
        ClusterState {
            ready: state(Truth::False, ready),
            progress: Some(state(Truth::False, progress)),
            error: Some(match error {
                Some(reason) => state(Truth::True, reason),
                None => state(Truth::False, reason::NO_ERROR),
            }),
        }
    }

    #[test]
    fn outlook_depends_on_reasons_and_next_step() {
        use Outlook::{Idle, Reconciling, Stalled};
        let next = |step| Some(UpcomingStep::new(step, None, 1));
        let given_up = next(UpcomingStepKind::GivenUp);
        let retry = next(UpcomingStepKind::Retry);
        let failed = |reason| state(reason, reason, Some(reason));
        let unfailed = |reason| state(reason, reason, None);
        let only_ready = |reason| ClusterState::from(State::new(Truth::False, reason, ""));
        for (state, next, expected) in [
            (only_ready(reason::NOT_READY), None, Reconciling),
            (only_ready(reason::NAMESPACE_NOT_ALLOWED), None, Stalled),
            (only_ready(reason::NOT_THIS_CLUSTER), None, Idle),
            (unfailed(reason::INSTALLING), None, Reconciling),
            (failed(reason::UPGRADE_FAILED), None, Reconciling),
            (failed(reason::UPGRADE_FAILED), retry, Reconciling),
            (failed(reason::UPGRADE_FAILED), given_up, Stalled),
            (failed(reason::RELEASE_IN_USE), None, Stalled),
            (failed(reason::RELEASE_TAMPERED), retry, Stalled),
            // The running release is ready, and the error decides.
            (
                state(reason::INSTALLED, "", Some(reason::VALUES_NOT_ALLOWED)),
                retry,
                Stalled,
            ),
            (failed(reason::LOCKED), None, Stalled),
            (
                unfailed(reason::LOCKED),
                next(UpcomingStepKind::Unlock),
                Reconciling,
            ),
            (
                state(
                    reason::UPGRADE_FAILED,
                    reason::PAUSED,
                    Some(reason::UPGRADE_FAILED),
                ),
                given_up,
                Idle,
            ),
            (unfailed(reason::SUSPENDED), None, Idle),
        ] {
            assert_eq!(
                Outlook::from_state(&state, next),
                expected,
                "{state:?} {next:?}"
            );
        }
    }

    #[test]
    fn at_most_one_condition_is_set_until_ready() {
        let at = |second| Timestamp::from_second(second).unwrap();
        let failed = State::new(Truth::False, "Failed", "why");
        let unknown = State::new(Truth::Unknown, "Silent", "no answer");
        let ready = State::new(Truth::True, "Installed", "");
        let foreign = State::new(Truth::True, "Other", "");
        let mut conditions = Vec::new();
        set(&mut conditions, "Ready/other", &foreign, 1, at(0));
        for (second, state, outlook, expected) in [
            (1, &failed, Outlook::Reconciling, Some((RECONCILING, 1))),
            // Only the message changes, so the time of the transition stays.
            (2, &unknown, Outlook::Reconciling, Some((RECONCILING, 1))),
            (3, &failed, Outlook::Stalled, Some((STALLED, 3))),
            (4, &failed, Outlook::Idle, None),
            (5, &unknown, Outlook::Stalled, Some((STALLED, 5))),
            (6, &ready, Outlook::Stalled, None),
            (7, &ready, Outlook::Reconciling, None),
        ] {
            set_progress(&mut conditions, state, outlook, 1, at(second));
            let (other, ours) = conditions.split_first().unwrap();
            assert_eq!(other.type_, "Ready/other");
            let shown: Vec<_> = ours
                .iter()
                .map(|found| {
                    assert_eq!((&*found.status, &found.reason), ("True", &state.reason));
                    assert_eq!(found.message, state.message);
                    (&*found.type_, found.last_transition_time.0.as_second())
                })
                .collect();
            assert_eq!(shown, Vec::from_iter(expected), "{second}");
            let before = conditions.clone();
            set_progress(&mut conditions, state, outlook, 1, at(second + 100));
            assert_eq!(conditions, before, "{second}");
        }
    }
}
