//! Throttles status messages about a wait, as each new message is a status write. Pure functions.

use std::time::Duration;

use krypton_runtime::clock::BootTime;
use krypton_types::conditions::{ClusterState, State, Truth};

/// Minimum time between two statuses that differ only in their messages.
pub(crate) const PAUSE: Duration = Duration::from_secs(5);
/// Time after which the status shows the cause of a wait.
pub(crate) const QUIET: Duration = Duration::from_secs(10);

/// Returns the time from which `next` may be written after `reported`. `None` means now. Only changes of messages are
/// delayed.
pub(crate) fn not_before(
    reported: Option<(&ClusterState, BootTime)>,
    next: &ClusterState,
    now: BootTime,
) -> Option<BootTime> {
    let (previous, at) = reported?;
    let earliest = at + PAUSE;
    (previous != next && differ_only_in_messages(previous, next) && now < earliest)
        .then_some(earliest)
}

fn differ_only_in_messages(a: &ClusterState, b: &ClusterState) -> bool {
    fn without_message(state: &State) -> (Truth, &str) {
        (state.truth, &state.reason)
    }
    without_message(&a.ready) == without_message(&b.ready)
        && a.progress.as_ref().map(without_message) == b.progress.as_ref().map(without_message)
        && a.error.as_ref().map(without_message) == b.error.as_ref().map(without_message)
}

/// Adds the cause of the wait to an announced state.
pub(crate) fn with_detail(announced: &ClusterState, detail: &str) -> ClusterState {
    let mut state = announced.clone();
    let add = |state: &mut State| state.message = format!("{}: {detail}", state.message);
    if let Some(progress) = &mut state.progress
        && progress.truth == Truth::True
    {
        add(progress);
    }
    if state.ready.truth == Truth::False {
        add(&mut state.ready);
    }
    state
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn state(reason: &str, message: &str) -> ClusterState {
        let state = State {
            truth: Truth::False,
            reason: reason.to_owned(),
            message: message.to_owned(),
        };
        ClusterState {
            progress: Some(State {
                truth: Truth::True,
                ..state.clone()
            }),
            ready: state,
            error: None,
        }
    }

    pub(super) fn at(millis: u64) -> BootTime {
        BootTime(Duration::from_millis(millis))
    }

    #[test]
    fn new_message_waits_but_new_state_does_not() {
        let previous = state("Installing", "0 of 3");
        let reported = Some((&previous, at(0)));
        let later = state("Installing", "1 of 3");
        assert_eq!(not_before(reported, &later, at(1)), Some(at(5000)));
        assert_eq!(not_before(reported, &later, at(5000)), None);
        assert_eq!(not_before(None, &later, at(1)), None);
        let with_error = ClusterState {
            error: Some(previous.ready.clone()),
            ..later
        };
        for next in [with_error, state("InstallFailed", ""), previous.clone()] {
            assert_eq!(not_before(reported, &next, at(1)), None, "{next:?}");
        }
    }

    #[test]
    fn progress_message_includes_awaited_detail() {
        let announced = state("Installing", "installing release");
        let expected = state("Installing", "installing release: hook Pod a/b");
        assert_eq!(with_detail(&announced, "hook Pod a/b"), expected);
    }

    proptest! {
        /// Like the reconciler, the test retries a delayed message when it is due.
        #[test]
        fn changing_messages_are_throttled_and_last_is_published(
            steps in proptest::collection::vec((0..3000_u64, 0..4_u8), 1..200)
        ) {
            let (mut now, mut reported, mut times) = (0, None::<(ClusterState, BootTime)>, Vec::new());
            let mut wake = None;
            let mut last = state("Installing", "");
            for (elapsed, message) in steps {
                now += elapsed;
                last = state("Installing", &message.to_string());
                let previous = reported.as_ref().map(|(state, at)| (state, *at));
                wake = not_before(previous, &last, at(now));
                if wake.is_none() && reported.as_ref().map(|(state, _)| state) != Some(&last) {
                    reported = Some((last.clone(), at(now)));
                    times.push(now);
                }
            }
            prop_assert!(times.windows(2).all(|pair| pair[1] - pair[0] >= 5000), "{:?}", times);
            if let Some(wake) = wake {
                let previous = reported.as_ref().map(|(state, at)| (state, *at));
                prop_assert_eq!(not_before(previous, &last, wake), None);
            } else {
                prop_assert_eq!(reported.map(|(state, _)| state), Some(last));
            }
        }
    }
}
