//! Statements about the fleet, each with a mark and the next step. `explain` and `check` print them.

use clap::ValueEnum;
use serde_json::{Value, json};

use crate::render::one_line;

/// One statement.
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

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mark {
    Well,
    Note,
    Wrong,
    NotKnown,
}

impl Mark {
    fn sign(self) -> char {
        match self {
            Self::Well => '✓',
            Self::Note => '!',
            Self::Wrong => '✗',
            Self::NotKnown => '?',
        }
    }
}

/// Output of a command with statements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    Json,
}

/// Formats one line per statement, grouped by member.
pub(crate) fn text(lines: &[Line]) -> String {
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
        text += &format!("{indent}{} {}\n", line.mark.sign(), one_line(&line.text));
        if let Some(remedy) = &line.remedy {
            text += &format!("{indent}    → {}\n", one_line(remedy));
        }
    }
    text
}

pub(crate) fn as_json(lines: &[Line]) -> Value {
    let line = |line: &Line| {
        json!({
            "mark": format!("{:?}", line.mark),
            "member": line.member,
            "text": one_line(&line.text),
            "remedy": line.remedy.as_deref().map(one_line),
        })
    };
    lines.iter().map(line).collect()
}
