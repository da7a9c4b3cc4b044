//! Readiness of a release that runs while Krypton does not change it.

use krypton_types::conditions::{State, Truth, reason};
use krypton_types::desired::handling::WaitPolicy;

use super::ownership::{Ownership, ownership};
use super::view::View;
use crate::drift::{findings_in, with_findings};

/// Returns the deployed revision if it has not been read.
pub(super) fn unread(view: &View<'_>) -> Option<u32> {
    let deployed = view.deployed();
    let unread = deployed.filter(|newest| view.read(newest).is_none());
    unread.map(|newest| newest.revision)
}

/// Returns the deployed revision to read while attempts fail before Helm starts.
pub(super) fn unread_kept(view: &View<'_>) -> Option<u32> {
    let said = view.said()?.ready;
    unread(view).filter(|_| follows(view, &said))
}

/// Returns the readiness of the running release while attempts fail before Helm starts; `None` if it was not ready.
pub(super) fn kept(view: &View<'_>) -> Option<State> {
    let said = view.said()?.ready;
    match follows(view, &said) {
        true => Some(followed(view, said)),
        false => (said.truth == Truth::True).then_some(said),
    }
}

fn follows(view: &View<'_>, said: &State) -> bool {
    view.deployed().is_some()
        && ownership(view) == Ownership::Mine
        && (said.truth == Truth::True || said.reason == reason::NOT_READY)
}

/// Updates the readiness of a deployed revision that has been read.
pub(super) fn followed(view: &View<'_>, said: State) -> State {
    match view.deployed().and_then(|newest| view.read(newest)) {
        Some(_) => readiness(said, view.desired.handling.wait, view.unready),
        None => said,
    }
}

/// Evaluates the workloads of a deployed revision although another action is due. The condition of a failed attempt
/// stays.
fn readiness(said: State, wait: WaitPolicy, unready: Option<&str>) -> State {
    let was_ready = said.truth == Truth::True;
    match (wait, unready) {
        (WaitPolicy::Ready, Some(detail)) if was_ready || said.reason == reason::NOT_READY => {
            return State::new(Truth::False, reason::NOT_READY, detail);
        }
        (WaitPolicy::Ready, Some(_)) => return said,
        (WaitPolicy::Ready, None) | (WaitPolicy::Hooks | WaitPolicy::None, _) => {}
    }
    let of_workloads = [reason::NOT_READY, reason::INSTALLING, reason::UPGRADING];
    let mut now = match of_workloads.contains(&said.reason.as_str()) {
        true => State::new(Truth::True, reason::NO_CHANGE, "release ready"),
        false => said,
    };
    if now.truth == Truth::True {
        now.message = with_note(&now.message, wait, unready);
    }
    now
}

/// Separates the note from the rest of the message.
const MARK: &str = "; not waited for";

/// Returns `message` with the current note instead of the previous one. `unready` describes the workloads' state.
pub(super) fn with_note(message: &str, policy: WaitPolicy, unready: Option<&str>) -> String {
    let findings = findings_in(message);
    let rest = with_findings(message, None);
    let rest = rest.split_once(MARK).map_or(&*rest, |(rest, _)| rest);
    let now = match (policy, unready) {
        (WaitPolicy::None, _) => format!("{rest}{MARK}"),
        (WaitPolicy::Hooks, Some(what)) => format!("{rest}{MARK}: {what}"),
        (WaitPolicy::Hooks, None) | (WaitPolicy::Ready, _) => rest.to_owned(),
    };
    with_findings(&now, findings)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wait_note_replaces_itself_and_keeps_drift() {
        let none = with_note(
            "release installed; drift: ConfigMap a is deleted",
            WaitPolicy::None,
            None,
        );
        assert_eq!(
            none,
            "release installed; not waited for; drift: ConfigMap a is deleted"
        );
        let lacks = with_note(
            &none,
            WaitPolicy::Hooks,
            Some("Deployment a/b: 0 of 1 available"),
        );
        assert_eq!(
            lacks,
            "release installed; not waited for: Deployment a/b: 0 of 1 available; drift: ConfigMap a is deleted"
        );
        assert_eq!(
            with_note(&lacks, WaitPolicy::Hooks, None),
            with_note(&lacks, WaitPolicy::Ready, None)
        );
        assert_eq!(
            with_note(&lacks, WaitPolicy::Ready, None),
            "release installed; drift: ConfigMap a is deleted"
        );
    }
}
