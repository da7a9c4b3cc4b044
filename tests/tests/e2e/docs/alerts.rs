//! The page of the alerts, from the charts' files.

use super::generated::{check, code, sentence, table};
use crate::metrics::{Alert, alerts};

/// Replaces the labels in a template by words in capitals.
fn placeholders(template: &str) -> String {
    let mut parts = template.split("{{ $labels.");
    let mut text = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let (label, rest) = part.split_once(" }}").unwrap_or((part, ""));
        text += &label.to_uppercase();
        text += rest;
    }
    text
}

#[test]
fn docs_alerts_page_is_current() -> Result<(), String> {
    let row = |alert: &Alert| {
        let rule = &alert.rule;
        let text = |value: &serde_json::Value| value.as_str().unwrap_or_default().to_owned();
        let name = format!(
            "[{0}](runbook.md#{1})",
            alert.name,
            alert.name.to_lowercase()
        );
        let summary = placeholders(&text(&rule["annotations"]["summary"]));
        [
            name,
            text(&rule["labels"]["severity"]),
            text(&rule["for"]),
            sentence(&summary),
            code(&text(&rule["expr"])),
        ]
    };
    let mut part = String::new();
    for (chart, title) in [("krypton-hub", "The hub"), ("krypton-agent", "The agent")] {
        let rows: Vec<_> = alerts()
            .iter()
            .filter(|alert| alert.chart == chart)
            .map(row)
            .collect();
        let head = ["Alert", "Severity", "After", "Summary", "Expression"];
        part += &format!("## {title}\n\n{}\n", table(head, &rows));
    }
    check("alerts.md", &part)
}
