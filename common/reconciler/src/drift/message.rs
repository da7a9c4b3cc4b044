//! Messages about drift: a part of the `ClusterReady` message, and events.

use krypton_runtime::events::ObjectEvent;

use super::{Difference, DriftReport, Finding, FindingOutcome};

/// Separates the drift from the rest of the message.
const SEPARATOR: &str = "; drift: ";
/// Maximum number of objects to name.
const MAX_OBJECTS: usize = 3;
/// Maximum number of fields to name for each object.
const MAX_FIELDS: usize = 3;
/// Maximum bytes of the API server's message. Together with the names, it stays well below the limit of 1,024.
const MAX_REASON_BYTES: usize = 160;

/// Returns the message without the part about drift.
fn without_findings(message: &str) -> &str {
    message
        .split_once(SEPARATOR)
        .map_or(message, |(rest, _)| rest)
}

/// Returns the part of the message about drift, if any.
pub(crate) fn findings_in(message: &str) -> Option<&str> {
    message.split_once(SEPARATOR).map(|(_, findings)| findings)
}

/// Replaces the part of the message about drift.
pub(crate) fn with_findings(message: &str, findings: Option<&str>) -> String {
    let rest = without_findings(message);
    match findings {
        Some(findings) => format!("{rest}{SEPARATOR}{findings}"),
        None => rest.to_owned(),
    }
}

/// Describes the remaining drift, or returns `None` without drift.
///
/// Equal findings produce equal text, as each change of the text causes a status write.
pub(crate) fn describe(report: &DriftReport) -> Option<String> {
    let mut parts = describe_findings(report, |outcome| *outcome != FindingOutcome::Healed);
    if let Some((object, reason)) = report.not_compared.first() {
        let reason = truncate(reason);
        parts.push(match report.not_compared.len() {
            1 => format!("{object} cannot be compared: {reason}"),
            count => format!("{count} objects cannot be compared, the first is {object}: {reason}"),
        });
    }
    (!parts.is_empty()).then(|| parts.join("; "))
}

/// Describes a few of the findings with such an outcome, and counts the rest.
fn describe_findings(
    report: &DriftReport,
    is_selected: impl Fn(&FindingOutcome) -> bool,
) -> Vec<String> {
    let findings = report.findings.iter();
    let findings: Vec<&Finding> = findings.filter(|it| is_selected(&it.outcome)).collect();
    let named = findings.iter().take(MAX_OBJECTS);
    let mut parts: Vec<String> = named.map(|finding| describe_finding(finding)).collect();
    if let Some(more @ 1..) = findings.len().checked_sub(MAX_OBJECTS) {
        parts.push(format!("and {more} more"));
    }
    parts
}

fn describe_finding(finding: &Finding) -> String {
    let difference = describe_difference(finding);
    let writer = match &finding.writer {
        Some(writer) => format!(", by {writer:?}"),
        None => String::new(),
    };
    match &finding.outcome {
        FindingOutcome::ReportedOnly | FindingOutcome::Healed => format!("{difference}{writer}"),
        FindingOutcome::HeldBack => {
            format!("{difference}{writer}, repeatedly: corrected at increasing intervals")
        }
        FindingOutcome::OtherRelease(release) => {
            format!("{difference}: it belongs to release {release} and stays unchanged")
        }
        FindingOutcome::Failed(reason) => format!(
            "{difference}{writer}, and cannot be corrected: {}",
            truncate(reason)
        ),
    }
}

fn describe_difference(finding: &Finding) -> String {
    let object = &finding.object;
    match &finding.difference {
        Difference::Deleted => format!("{object} is deleted"),
        Difference::Fields(fields) => {
            let named = fields.iter().take(MAX_FIELDS).map(|field| truncate(field));
            let named = named.collect::<Vec<_>>().join(", ");
            match fields.len().checked_sub(MAX_FIELDS) {
                Some(1..) => format!("{object} differs at {named} and more"),
                _ => format!("{object} differs at {named}"),
            }
        }
    }
}

fn truncate(text: &str) -> &str {
    let end = text.floor_char_boundary(MAX_REASON_BYTES);
    text.get(..end).unwrap_or_default()
}

/// Returns the event for corrections. [`drift_event`] returns the event for remaining drift when the message changes.
pub(crate) fn correction_event(report: &DriftReport) -> Option<ObjectEvent> {
    let parts = describe_findings(report, |outcome| *outcome == FindingOutcome::Healed);
    let message = || format!("corrected: {}", parts.join("; "));
    (!parts.is_empty()).then(|| ObjectEvent::normal("DriftHealed", message()))
}

/// Returns an event if the new message describes other drift than the previous one.
pub(crate) fn drift_event(previous: Option<&str>, current: &str) -> Option<ObjectEvent> {
    let current = findings_in(current)?;
    let is_new = previous.and_then(findings_in) != Some(current);
    is_new.then(|| ObjectEvent::warning("DriftDetected", current))
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

    fn finding(name: &str, outcome: FindingOutcome) -> Finding {
        Finding {
            object: id(name),
            difference: Difference::Fields(vec!["/data/a".to_owned()]),
            writer: Some("kubectl-edit".to_owned()),
            outcome,
        }
    }

    fn report_with(findings: Vec<Finding>) -> DriftReport {
        DriftReport {
            revision: 1,
            findings,
            not_compared: Vec::new(),
        }
    }

    #[test]
    fn open_drift_is_described_and_corrections_emit_events() {
        let deleted = Finding {
            difference: Difference::Deleted,
            writer: None,
            ..finding("gone", FindingOutcome::ReportedOnly)
        };
        let failed = FindingOutcome::Failed("forbidden".to_owned());
        for (findings, message) in [
            (vec![], None),
            (vec![finding("a", FindingOutcome::Healed)], None),
            (vec![deleted], Some("ConfigMap acme/gone is deleted")),
            (
                vec![finding("a", FindingOutcome::ReportedOnly)],
                Some("ConfigMap acme/a differs at /data/a, by \"kubectl-edit\""),
            ),
            (
                vec![finding("a", FindingOutcome::HeldBack)],
                Some(
                    "ConfigMap acme/a differs at /data/a, by \"kubectl-edit\", repeatedly: corrected at increasing intervals",
                ),
            ),
            (
                vec![finding("a", failed)],
                Some(
                    "ConfigMap acme/a differs at /data/a, by \"kubectl-edit\", and cannot be corrected: forbidden",
                ),
            ),
        ] {
            assert_eq!(describe(&report_with(findings)).as_deref(), message);
        }
        let both = report_with(vec![
            finding("a", FindingOutcome::Healed),
            finding("b", FindingOutcome::ReportedOnly),
        ]);
        let message = correction_event(&both).unwrap().message;
        assert!(message.contains("acme/a") && !message.contains("acme/b"));
        let reported = report_with(vec![finding("b", FindingOutcome::ReportedOnly)]);
        assert_eq!(correction_event(&reported), None);
    }

    #[test]
    fn drift_findings_are_replaced_and_rest_is_kept() {
        let first = with_findings("release installed", Some("a is deleted"));
        assert_eq!(first, "release installed; drift: a is deleted");
        let second = with_findings(&first, Some("b is deleted"));
        assert_eq!(second, "release installed; drift: b is deleted");
        assert_eq!(with_findings(&second, None), "release installed");
        assert_eq!(without_findings("plain"), "plain");
        let event = drift_event(Some(&first), &second).unwrap();
        assert_eq!(event.message, "b is deleted");
        assert_eq!(drift_event(Some(&second), &second), None);
        assert_eq!(drift_event(Some(&second), "release installed"), None);
        assert_eq!(drift_event(None, &first).unwrap().reason, "DriftDetected");
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
                outcome: FindingOutcome::ReportedOnly,
            }
        };
        let report = DriftReport {
            revision: 1,
            findings: (0..1000).map(long).collect(),
            not_compared: (0..1000).map(|_| (id("u"), "w".repeat(5000))).collect(),
        };
        let message = describe(&report).unwrap();
        assert!(message.len() < 4000, "{}", message.len());
        assert!(
            message.contains("and 997 more") && message.contains("1000 objects"),
            "{message}"
        );
    }
}
