//! Throttles status messages about a wait, as each new message is a status write. Pure functions.

use std::time::Duration;

use krypton_runtime::clock::BootTime;
use krypton_types::conditions::{ClusterState, State, Truth};

/// Minimum time between two statuses that differ only in their messages.
pub(crate) const PAUSE: Duration = Duration::from_secs(5);
/// Time after which the status shows the cause of a wait.
pub(crate) const QUIET: Duration = Duration::from_secs(10);

/// Returns the time from which `next` may be written after `said`. `None` means now. Only changes of messages are
/// delayed.
pub(crate) fn not_before(
    said: Option<(&ClusterState, BootTime)>,
    next: &ClusterState,
    now: BootTime,
) -> Option<BootTime> {
    let (before, at) = said?;
    let free = BootTime(at.0 + PAUSE);
    (before != next && same_but_for_words(before, next) && now < free).then_some(free)
}

fn same_but_for_words(a: &ClusterState, b: &ClusterState) -> bool {
    fn bare(state: &State) -> (Truth, &str) {
        (state.truth, &state.reason)
    }
    bare(&a.ready) == bare(&b.ready)
        && a.progress.as_ref().map(bare) == b.progress.as_ref().map(bare)
        && a.error.as_ref().map(bare) == b.error.as_ref().map(bare)
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
        let before = state("Installing", "0 of 3");
        let said = Some((&before, at(0)));
        let later = state("Installing", "1 of 3");
        assert_eq!(not_before(said, &later, at(1)), Some(at(5000)));
        assert_eq!(not_before(said, &later, at(5000)), None);
        assert_eq!(not_before(said, &state("InstallFailed", ""), at(1)), None);
        assert_eq!(not_before(said, &before, at(1)), None, "it is no news");
        assert_eq!(not_before(None, &later, at(1)), None);
        let with_error = ClusterState {
            error: Some(before.ready.clone()),
            ..later
        };
        assert_eq!(not_before(said, &with_error, at(1)), None);
    }

    #[test]
    fn progress_message_includes_awaited_detail() {
        let now = with_detail(&state("Installing", "installing release"), "hook Pod a/b");
        assert_eq!(
            now.progress.unwrap().message,
            "installing release: hook Pod a/b"
        );
        assert_eq!(now.ready.message, "installing release: hook Pod a/b");
    }

    proptest! {
        /// Like the reconciler, the test retries a delayed message when it is due.
        #[test]
        fn changing_messages_are_throttled_and_last_is_published(
            steps in proptest::collection::vec((0..3000_u64, 0..4_u8), 1..200)
        ) {
            let (mut now, mut said, mut times) = (0, None::<(ClusterState, BootTime)>, Vec::new());
            let mut wake = None;
            let mut last = state("Installing", "");
            for (later, word) in steps {
                now += later;
                last = state("Installing", &word.to_string());
                let before = said.as_ref().map(|(state, at)| (state, *at));
                wake = not_before(before, &last, at(now));
                if wake.is_none() && said.as_ref().map(|(state, _)| state) != Some(&last) {
                    said = Some((last.clone(), at(now)));
                    times.push(now);
                }
            }
            prop_assert!(times.windows(2).all(|pair| pair[1] - pair[0] >= 5000), "{:?}", times);
            if let Some(wake) = wake {
                let before = said.as_ref().map(|(state, at)| (state, *at));
                prop_assert_eq!(not_before(before, &last, wake), None);
            } else {
                prop_assert_eq!(said.map(|(state, _)| state), Some(last));
            }
        }
    }
}
