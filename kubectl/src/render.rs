//! Formats columns and ages like kubectl, and makes text safe for a terminal.

use std::fmt::Write as _;

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde::de::DeserializeOwned;
use serde_json::Value;

const COLUMN_GAP: usize = 3;
const ABSENT: &str = "-";
const MAX_MESSAGE_CHARS: usize = 60;

/// How a table shows objects.
#[derive(Clone, Copy, Debug)]
pub(crate) struct View {
    /// `-o wide`: more columns or complete texts.
    pub(crate) wide: bool,
    pub(crate) now: Timestamp,
}

/// A column of a table of `K`: its header, and the cell of an object.
pub(crate) type Column<K> = (&'static str, fn(&K, View) -> String);

/// The columns of every object.
pub(crate) mod common_columns {
    use kube::Resource;

    use super::{View, age_of, or_dash};

    pub(crate) fn namespace<K: Resource>(object: &K, _: View) -> String {
        or_dash(object.meta().namespace.as_deref())
    }

    pub(crate) fn name<K: Resource>(object: &K, _: View) -> String {
        or_dash(object.meta().name.as_deref())
    }

    pub(crate) fn age<K: Resource>(object: &K, view: View) -> String {
        age_of(object.meta(), view.now)
    }
}

/// Rows of cells under a header.
#[derive(Clone, Debug)]
pub(crate) struct Table {
    header: Option<Vec<String>>,
    rows: Vec<Vec<String>>,
}

impl Table {
    pub(crate) fn new<'a>(header: impl IntoIterator<Item = &'a str>) -> Self {
        let header = header.into_iter().map(str::to_owned);
        Self {
            header: Some(header.collect()),
            rows: Vec::new(),
        }
    }

    pub(crate) fn with_header(mut self, has_header: bool) -> Self {
        self.header = self.header.filter(|_| has_header);
        self
    }

    pub(crate) fn with_columns<K>(columns: &[Column<K>]) -> Self {
        Self::new(columns.iter().map(|(header, _)| *header))
    }

    /// Adds the row of an object. Returns `None` if the object does not decode.
    pub(crate) fn push_object<K: DeserializeOwned>(
        &mut self,
        columns: &[Column<K>],
        object: &Value,
        view: View,
    ) -> Option<K> {
        let decoded = decode::<K>(object);
        self.push(match &decoded {
            Some(decoded) => columns
                .iter()
                .map(|(_, cell)| cell(decoded, view))
                .collect(),
            None => {
                let names = ["/metadata/namespace", "/metadata/name"];
                let names = names.into_iter().filter_map(|path| text_at(object, path));
                names.chain(["<not readable>".to_owned()]).collect()
            }
        });
        decoded
    }

    pub(crate) fn of_objects<K: DeserializeOwned>(
        columns: &[Column<K>],
        objects: &[Value],
        view: View,
    ) -> Self {
        let mut table = Self::with_columns(columns);
        for object in objects {
            table.push_object(columns, object, view);
        }
        table
    }

    pub(crate) fn push(&mut self, cells: Vec<String>) {
        self.rows.push(cells);
    }

    /// Pads each column to its widest cell, without trailing spaces.
    pub(crate) fn render(self) -> String {
        self.render_below(&mut Vec::new())
    }

    /// Renders below earlier output with these column widths, which are empty before the first output: prints the header
    /// only once and never narrows a column.
    pub(crate) fn render_below(self, widths: &mut Vec<usize>) -> String {
        let header = self.header.filter(|_| widths.is_empty());
        let rows: Vec<_> = header.into_iter().chain(self.rows).collect();
        let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
        widths.resize(widths.len().max(columns), 0);
        for row in &rows {
            for (cell, width) in row.iter().zip(widths.iter_mut()) {
                *width = cell.chars().count().max(*width);
            }
        }
        let mut text = String::new();
        for row in &rows {
            let mut line = String::new();
            for (cell, width) in row.iter().zip(widths.iter()) {
                write!(line, "{cell:<width$}", width = width + COLUMN_GAP)
                    .expect("a String takes every write");
            }
            text.push_str(line.trim_end());
            text.push('\n');
        }
        text
    }
}

/// Returns the text on one line, or a dash if it is missing or empty.
pub(crate) fn or_dash(text: Option<impl AsRef<str>>) -> String {
    let line = text.map(|text| one_line(text.as_ref()));
    line.filter(|line| !line.is_empty())
        .unwrap_or_else(|| ABSENT.to_owned())
}

/// Replaces control characters, because clusters control the content of statuses.
pub(crate) fn one_line(text: &str) -> String {
    let is_invisible = |c: char| matches!(c, '\u{200b}'..='\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}');
    let is_blank = |c: char| c.is_whitespace() || c.is_control() || is_invisible(c);
    let visible: String = text
        .chars()
        .map(|c| if is_blank(c) { ' ' } else { c })
        .collect();
    visible.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Formats reason and message of a condition, without a trailing colon.
pub(crate) fn reason_and_message(reason: &str, message: &str) -> String {
    let (reason, message) = (one_line(reason), one_line(message));
    if message.is_empty() {
        reason
    } else {
        format!("{reason}: {message}")
    }
}

/// Shortens a text to at most `max_chars` characters; an ellipsis marks the cut.
fn shortened(text: &str, max_chars: usize) -> String {
    if text.chars().count() <= max_chars {
        return text.to_owned();
    }
    let start: String = text.chars().take(max_chars.saturating_sub(1)).collect();
    format!("{}…", start.trim_end())
}

/// A chart's cell: `cert-manager:1.19.1` for `https://charts.jetstack.io/cert-manager:1.19.1`, complete if wide.
pub(crate) fn chart_cell(chart: Option<&str>, view: View) -> String {
    or_dash(match view.wide {
        true => chart,
        false => chart.and_then(|chart| chart.rsplit('/').next()),
    })
}

/// A message's cell: shortened, complete if wide.
pub(crate) fn message_cell(message: Option<&str>, view: View) -> String {
    let message = or_dash(message);
    match view.wide {
        true => message,
        false => shortened(&message, MAX_MESSAGE_CHARS),
    }
}

/// A text field of an untyped object, by path.
pub(crate) fn text_at(object: &Value, pointer: &str) -> Option<String> {
    object
        .pointer(pointer)
        .and_then(Value::as_str)
        .map(one_line)
}

/// The items of a list field of an untyped object, by path.
pub(crate) fn list_at<'a>(object: &'a Value, pointer: &str) -> impl Iterator<Item = &'a Value> {
    let list = object.pointer(pointer).and_then(Value::as_array);
    list.into_iter().flatten()
}

pub(crate) fn age_of(metadata: &ObjectMeta, now: Timestamp) -> String {
    let created = metadata.creation_timestamp.as_ref();
    or_dash(created.map(|created| age(created.0, now)))
}

/// Formats an age like apimachinery's `duration.HumanDuration`: at most two units, the second only for small values.
pub(crate) fn age(since: Timestamp, now: Timestamp) -> String {
    let seconds = now.as_second() - since.as_second();
    let (minutes, hours, days) = (seconds / 60, seconds / 3600, seconds / 86_400);
    let two_units = |large: i64, unit: &str, small: i64, small_unit: &str| match small {
        0 => format!("{large}{unit}"),
        _ => format!("{large}{unit}{small}{small_unit}"),
    };
    match seconds {
        ..-1 => "<invalid>".to_owned(),
        -1 => "0s".to_owned(),
        _ if seconds < 120 => format!("{seconds}s"),
        _ if minutes < 10 => two_units(minutes, "m", seconds % 60, "s"),
        _ if minutes < 180 => format!("{minutes}m"),
        _ if hours < 8 => two_units(hours, "h", minutes % 60, "m"),
        _ if hours < 48 => format!("{hours}h"),
        _ if days < 8 => two_units(days, "d", hours % 24, "h"),
        _ if days < 365 * 2 => format!("{days}d"),
        _ if days < 365 * 8 => two_units(days / 365, "y", days % 365, "d"),
        _ => format!("{}y", days / 365),
    }
}

/// Output of a command.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CommandOutput {
    pub stdout: String,
    /// A remark for the terminal, as kubectl's "No resources found".
    pub stderr: String,
}

impl CommandOutput {
    pub(crate) fn stdout(text: impl Into<String>) -> Self {
        Self {
            stdout: text.into(),
            ..Self::default()
        }
    }
}

/// Returns the typed form of `object`, or `None` if it does not decode.
pub(crate) fn decode<K: DeserializeOwned>(object: &Value) -> Option<K> {
    K::deserialize(object).ok()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn ages_match_kubectl() {
        let cases = [
            (-5, "<invalid>"),
            (-1, "0s"),
            (0, "0s"),
            (119, "119s"),
            (120, "2m"),
            (125, "2m5s"),
            (599, "9m59s"),
            (600, "10m"),
            (10_799, "179m"),
            (10_800, "3h"),
            (10_860, "3h1m"),
            (28_800, "8h"),
            (172_799, "47h"),
            (172_800, "2d"),
            (176_400, "2d1h"),
            (691_200, "8d"),
            (63_072_000, "2y"),
            (63_158_400, "2y1d"),
            (252_288_000, "8y"),
        ];
        let start = Timestamp::from_second(1_000_000_000).unwrap();
        for (seconds, expected) in cases {
            let now = Timestamp::from_second(1_000_000_000 + seconds).unwrap();
            assert_eq!(age(start, now), expected, "{seconds}");
        }
    }

    #[test]
    fn later_output_keeps_columns_without_repeating_header() {
        let mut widths = Vec::new();
        let table = |name: &str| {
            let mut table = Table::new(["NAME", "AGE"]);
            table.push(vec![name.to_owned(), "1s".to_owned()]);
            table
        };
        let output = [table("abcdef"), table("a"), table("abcdefgh"), table("b")]
            .map(|table| table.render_below(&mut widths));
        assert_eq!(
            output.concat(),
            "NAME     AGE\nabcdef   1s\na        1s\nabcdefgh   1s\nb          1s\n"
        );
    }

    proptest! {
        #[test]
        fn no_text_reaches_the_terminal_with_control_characters(text in "\\PC*[\\x00-\\x9f]*\\PC*") {
            let line = one_line(&text);
            prop_assert!(!line.chars().any(char::is_control), "{:?}", line);
            prop_assert!(shortened(&line, 20).chars().count() <= 20);
        }
    }
}
