//! Statements about the fleet, each with a mark and the next step. `explain` and `check` print them.

use clap::ValueEnum;
use serde_json::{Value, json};

use crate::render::one_line;

/// One statement, printed as one line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Line {
    pub(crate) mark: Mark,
    /// Member that the line is about. `None` for the home cluster.
    pub(crate) member: Option<String>,
    pub(crate) text: String,
    /// Action that the user can take.
    pub(crate) remedy: Option<String>,
}

impl Line {
    /// A line about the home cluster.
    pub(crate) fn new<'r>(
        mark: Mark,
        text: impl Into<String>,
        remedy: impl Into<Option<&'r str>>,
    ) -> Self {
        Self {
            mark,
            member: None,
            text: text.into(),
            remedy: remedy.into().map(str::to_owned),
        }
    }
}

/// Result that a line reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mark {
    Ok,
    Note,
    Problem,
    Unknown,
}

impl Mark {
    fn symbol(self) -> char {
        match self {
            Self::Ok => '✓',
            Self::Note => '!',
            Self::Problem => '✗',
            Self::Unknown => '?',
        }
    }

    /// Name in the JSON output, on which programs depend.
    fn json_name(self) -> &'static str {
        match self {
            Self::Ok => "Well",
            Self::Note => "Note",
            Self::Problem => "Wrong",
            Self::Unknown => "NotKnown",
        }
    }
}

/// Output format of a command with statements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum StatementFormat {
    Json,
}

/// Formats one line per statement, grouped by member.
pub(crate) fn to_text(lines: &[Line]) -> String {
    let mut text = String::new();
    let mut member = None;
    for line in lines {
        if line.member != member {
            member.clone_from(&line.member);
            if let Some(member) = &member {
                text += &format!("{}\n", one_line(member));
            }
        }
        let indent = if member.is_some() { "  " } else { "" };
        text += &format!("{indent}{} {}\n", line.mark.symbol(), one_line(&line.text));
        if let Some(remedy) = &line.remedy {
            text += &format!("{indent}    → {}\n", one_line(remedy));
        }
    }
    text
}

pub(crate) fn to_json(lines: &[Line]) -> Value {
    let line = |line: &Line| {
        json!({
            "mark": line.mark.json_name(),
            "member": line.member,
            "text": one_line(&line.text),
            "remedy": line.remedy.as_deref().map(one_line),
        })
    };
    lines.iter().map(line).collect()
}
