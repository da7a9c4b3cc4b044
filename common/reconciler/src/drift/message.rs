//! Messages about drift: a part of the `ClusterReady` message, and events.

use krypton_runtime::events::ObjectEvent;

use super::{Difference, Finding, Outcome, Seen};

/// Separates the drift from the rest of the message.
const MARK: &str = "; drift: ";
/// Maximum number of objects to name.
const NAMED: usize = 3;
/// Maximum number of fields to name for each object.
const FIELDS: usize = 3;
/// Maximum bytes of the API server's message. Together with the names, it stays well below the limit of 1,024.
const REASON: usize = 160;

/// Returns the message without the part about drift.
fn without_findings(message: &str) -> &str {
    message.split_once(MARK).map_or(message, |(rest, _)| rest)
}

/// Returns the part of the message about drift, if any.
pub(crate) fn findings_in(message: &str) -> Option<&str> {
    message.split_once(MARK).map(|(_, findings)| findings)
}

/// Replaces the part of the message about drift.
pub(crate) fn with_findings(message: &str, findings: Option<&str>) -> String {
    let rest = without_findings(message);
    match findings {
        Some(findings) => format!("{rest}{MARK}{findings}"),
        None => rest.to_owned(),
    }
}

/// Describes the remaining drift, or returns `None` without drift.
///
/// Equal findings produce equal text, as each change of the text causes a status write.
pub(crate) fn described(seen: &Seen) -> Option<String> {
    let mut parts = Vec::new();
    let uncorrected = |finding: &&Finding| finding.outcome != Outcome::Healed;
    let uncorrected: Vec<&Finding> = seen.findings.iter().filter(uncorrected).collect();
    parts.extend(uncorrected.iter().take(NAMED).map(|finding| one(finding)));
    if let Some(more @ 1..) = uncorrected.len().checked_sub(NAMED) {
        parts.push(format!("and {more} more"));
    }
    if let Some((object, why)) = seen.unseen.first() {
        let why = cut(why);
        parts.push(match seen.unseen.len() {
            1 => format!("{object} cannot be compared: {why}"),
            count => format!("{count} objects cannot be compared, the first is {object}: {why}"),
        });
    }
    (!parts.is_empty()).then(|| parts.join("; "))
}

fn one(finding: &Finding) -> String {
    let what = what(finding);
    let writer = match &finding.writer {
        Some(writer) => format!(", by {writer:?}"),
        None => String::new(),
    };
    match &finding.outcome {
        Outcome::Left | Outcome::Healed => format!("{what}{writer}"),
        Outcome::HeldBack => {
            format!("{what}{writer}, repeatedly: corrected at growing intervals")
        }
        Outcome::NotOurs(release) => {
            format!("{what}: it belongs to release {release} and stays unchanged")
        }
        Outcome::Failed(why) => format!("{what}{writer}, and cannot be corrected: {}", cut(why)),
    }
}

fn what(finding: &Finding) -> String {
    let object = &finding.object;
    match &finding.difference {
        Difference::Deleted => format!("{object} is deleted"),
        Difference::Fields(fields) => {
            let named = fields.iter().take(FIELDS).map(|field| cut(field));
            let named = named.collect::<Vec<_>>().join(", ");
            match fields.len().checked_sub(FIELDS) {
                Some(1..) => format!("{object} differs at {named} and more"),
                _ => format!("{object} differs at {named}"),
            }
        }
    }
}

fn cut(text: &str) -> &str {
    let end = text.floor_char_boundary(REASON);
    text.get(..end).unwrap_or_default()
}

/// Returns the events for corrections. `found` returns the event for remaining drift when the message changes.
pub(crate) fn told(seen: &Seen) -> Vec<ObjectEvent> {
    let healed = |finding: &&Finding| finding.outcome == Outcome::Healed;
    let healed: Vec<&Finding> = seen.findings.iter().filter(healed).collect();
    if healed.is_empty() {
        return Vec::new();
    }
    let mut parts: Vec<String> = healed
        .iter()
        .take(NAMED)
        .map(|finding| one(finding))
        .collect();
    if let Some(more @ 1..) = healed.len().checked_sub(NAMED) {
        parts.push(format!("and {more} more"));
    }
    vec![ObjectEvent {
        warning: false,
        reason: "DriftHealed",
        message: format!("corrected: {}", parts.join("; ")),
    }]
}

/// Returns an event if the new message describes other drift than the previous one.
pub(crate) fn found(before: Option<&str>, after: &str) -> Option<ObjectEvent> {
    let after = findings_in(after)?;
    (before.and_then(findings_in) != Some(after)).then(|| ObjectEvent {
        warning: true,
        reason: "DriftDetected",
        message: after.to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use krypton_helm::releases::ObjectId;

    fn id(name: &str) -> ObjectId {
        ObjectId {
            api_version: "v1".to_owned(),
            kind: "ConfigMap".to_owned(),
            namespace: Some("acme".to_owned()),
            name: name.to_owned(),
        }
    }

    fn finding(name: &str, outcome: Outcome) -> Finding {
        Finding {
            object: id(name),
            difference: Difference::Fields(vec!["/data/a".to_owned()]),
            writer: Some("kubectl-edit".to_owned()),
            outcome,
        }
    }

    fn seen(findings: Vec<Finding>) -> Seen {
        Seen {
            revision: 1,
            findings,
            unseen: Vec::new(),
        }
    }

    #[test]
    fn open_drift_is_described_and_corrections_emit_events() {
        let deleted = Finding {
            difference: Difference::Deleted,
            writer: None,
            ..finding("gone", Outcome::Left)
        };
        let failed = Outcome::Failed("forbidden".to_owned());
        for (findings, said) in [
            (vec![], None),
            (vec![finding("a", Outcome::Healed)], None),
            (vec![deleted], Some("ConfigMap acme/gone is deleted")),
            (
                vec![finding("a", Outcome::Left)],
                Some("ConfigMap acme/a differs at /data/a, by \"kubectl-edit\""),
            ),
            (
                vec![finding("a", Outcome::HeldBack)],
                Some(
                    "ConfigMap acme/a differs at /data/a, by \"kubectl-edit\", repeatedly: corrected at growing intervals",
                ),
            ),
            (
                vec![finding("a", failed)],
                Some(
                    "ConfigMap acme/a differs at /data/a, by \"kubectl-edit\", and cannot be corrected: forbidden",
                ),
            ),
        ] {
            assert_eq!(described(&seen(findings)).as_deref(), said);
        }
        let both = seen(vec![
            finding("a", Outcome::Healed),
            finding("b", Outcome::Left),
        ]);
        let events = told(&both);
        assert_eq!(events.len(), 1);
        assert!(events[0].message.contains("acme/a") && !events[0].message.contains("acme/b"));
        assert_eq!(told(&seen(vec![finding("b", Outcome::Left)])), []);
    }

    #[test]
    fn drift_findings_are_replaced_and_rest_is_kept() {
        let first = with_findings("release installed", Some("a is deleted"));
        assert_eq!(first, "release installed; drift: a is deleted");
        let second = with_findings(&first, Some("b is deleted"));
        assert_eq!(second, "release installed; drift: b is deleted");
        assert_eq!(with_findings(&second, None), "release installed");
        assert_eq!(without_findings("plain"), "plain");
        assert_eq!(
            found(Some(&first), &second).unwrap().message,
            "b is deleted"
        );
        assert_eq!(found(Some(&second), &second), None);
        assert_eq!(found(Some(&second), "release installed"), None);
        assert_eq!(found(None, &first).unwrap().reason, "DriftDetected");
    }

    #[test]
    fn a_thousand_findings_stay_a_short_message() {
        let long = |n: usize| {
            let name = format!("{}{n}", "x".repeat(250));
            let fields = (0..10).map(|field| format!("/{}{field}", "y".repeat(500)));
            Finding {
                object: id(&name),
                difference: Difference::Fields(fields.collect()),
                writer: Some("z".repeat(128)),
                outcome: Outcome::Left,
            }
        };
        let seen = Seen {
            revision: 1,
            findings: (0..1000).map(long).collect(),
            unseen: (0..1000).map(|_| (id("u"), "w".repeat(5000))).collect(),
        };
        let said = described(&seen).unwrap();
        assert!(said.len() < 4000, "{}", said.len());
        assert!(
            said.contains("and 997 more") && said.contains("1000 objects"),
            "{said}"
        );
    }
}
