//! The note in a ready release's message about workloads that Krypton does not wait for.

use krypton_types::desired::handling::WaitPolicy;

use crate::drift::{findings_in, with_findings};

/// Separates the note from the rest of the message.
const MARK: &str = "; not waited for";

/// Returns `message` with the current note instead of the previous one. `unready` describes the workloads' state.
pub(super) fn told(message: &str, policy: WaitPolicy, unready: Option<&str>) -> String {
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
        let none = told(
            "release installed; drift: ConfigMap a is deleted",
            WaitPolicy::None,
            None,
        );
        assert_eq!(
            none,
            "release installed; not waited for; drift: ConfigMap a is deleted"
        );
        let lacks = told(
            &none,
            WaitPolicy::Hooks,
            Some("Deployment a/b: 0 of 1 available"),
        );
        assert_eq!(
            lacks,
            "release installed; not waited for: Deployment a/b: 0 of 1 available; drift: ConfigMap a is deleted"
        );
        assert_eq!(
            told(&lacks, WaitPolicy::Hooks, None),
            told(&lacks, WaitPolicy::Ready, None)
        );
        assert_eq!(
            told(&lacks, WaitPolicy::Ready, None),
            "release installed; drift: ConfigMap a is deleted"
        );
    }
}
