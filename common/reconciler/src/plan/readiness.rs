//! Readiness of a release that runs while Krypton does not change it.

use krypton_types::conditions::{State, Truth, reason};
use krypton_types::desired::handling::WaitPolicy;

use super::ownership::{Ownership, ownership};
use super::view::View;
use crate::drift::{findings_in, with_findings};

/// Returns the deployed revision if it has not been read.
pub(super) fn unread_revision(view: &View<'_>) -> Option<u32> {
    let deployed = view.deployed();
    let unread = deployed.filter(|newest| view.decoded(newest).is_none());
    unread.map(|newest| newest.revision)
}

/// Returns the deployed revision to read while attempts fail before Helm starts.
pub(super) fn unread_running_revision(view: &View<'_>) -> Option<u32> {
    let reported = view.reported_state()?.ready;
    unread_revision(view).filter(|_| is_tracked(view, &reported))
}

/// Returns the readiness of the running release while attempts fail before Helm starts; `None` if it was not ready.
pub(super) fn running_readiness(view: &View<'_>) -> Option<State> {
    let reported = view.reported_state()?.ready;
    match is_tracked(view, &reported) {
        true => Some(updated_readiness(view, reported)),
        false => (reported.truth == Truth::True).then_some(reported),
    }
}

/// Whether the workloads of the deployed revision still decide about its readiness.
fn is_tracked(view: &View<'_>, reported: &State) -> bool {
    view.deployed().is_some()
        && ownership(view) == Ownership::Mine
        && (reported.truth == Truth::True || reported.reason == reason::NOT_READY)
}

/// Updates the readiness of a deployed revision that has been read. A release whose newest revision is not deployed is no
/// longer ready.
pub(super) fn updated_readiness(view: &View<'_>, reported: State) -> State {
    let was_ready = reported.truth == Truth::True || reported.reason == reason::NOT_READY;
    match view.deployed() {
        Some(newest) if view.decoded(newest).is_some() => {
            evaluated(reported, view.desired.handling.wait, view.unready)
        }
        None if was_ready => State::new(Truth::False, reason::NOT_READY, undeployed(view)),
        _ => reported,
    }
}

fn undeployed(view: &View<'_>) -> String {
    let name = &view.release_key.name;
    match view.newest() {
        Some(newest) => format!(
            "revision {} of release {name} is {}",
            newest.revision, newest.status
        ),
        None => format!("release {name} not found"),
    }
}

/// Evaluates the workloads of a deployed revision although another action is due. The condition of a failed attempt
/// stays.
fn evaluated(reported: State, wait: WaitPolicy, unready: Option<&str>) -> State {
    let was_ready = reported.truth == Truth::True;
    match (wait, unready) {
        (WaitPolicy::Ready, Some(detail)) if was_ready || reported.reason == reason::NOT_READY => {
            return State::new(Truth::False, reason::NOT_READY, detail);
        }
        (WaitPolicy::Ready, Some(_)) => return reported,
        (WaitPolicy::Ready, None) | (WaitPolicy::Hooks | WaitPolicy::None, _) => {}
    }
    let of_workloads = [reason::NOT_READY, reason::INSTALLING, reason::UPGRADING];
    let mut ready = match of_workloads.contains(&reported.reason.as_str()) {
        true => State::new(Truth::True, reason::NO_CHANGE, "release ready"),
        false => reported,
    };
    if ready.truth == Truth::True {
        ready.message = with_note(&ready.message, wait, unready);
    }
    ready
}

/// Separates the note from the rest of the message.
const NOTE: &str = "; not waited for";

/// Returns `message` with the current note instead of the previous one. `unready` describes the workloads' state.
pub(super) fn with_note(message: &str, policy: WaitPolicy, unready: Option<&str>) -> String {
    let findings = findings_in(message);
    let rest = with_findings(message, None);
    let rest = rest.split_once(NOTE).map_or(&*rest, |(rest, _)| rest);
    let noted = match (policy, unready) {
        (WaitPolicy::None, _) => format!("{rest}{NOTE}"),
        (WaitPolicy::Hooks, Some(detail)) => format!("{rest}{NOTE}: {detail}"),
        (WaitPolicy::Hooks, None) | (WaitPolicy::Ready, _) => rest.to_owned(),
    };
    with_findings(&noted, findings)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wait_note_replaces_itself_and_keeps_drift() {
        let plain = "release installed; drift: a is deleted";
        let noted = "release installed; not waited for; drift: a is deleted";
        let lacks = "release installed; not waited for: 0 of 1 available; drift: a is deleted";
        let unready = Some("0 of 1 available");
        for (message, policy, unready, expected) in [
            (plain, WaitPolicy::None, None, noted),
            (noted, WaitPolicy::Hooks, unready, lacks),
            (lacks, WaitPolicy::Hooks, None, plain),
            (lacks, WaitPolicy::Ready, None, plain),
        ] {
            assert_eq!(with_note(message, policy, unready), expected);
        }
    }
}
