//! Statements about the fleet, each with a mark and the next step. `explain` and `check` print them.

use serde_json::{Value, json};

use crate::render::one_line;

/// Folder of the documentation of this version.
const DOCS: &str = concat!(
    "https://github.com/openkcm/krypton/blob/v",
    env!("CARGO_PKG_VERSION"),
    "/docs/"
);

/// Returns the address of a page, as `how-to/install.md#prerequisites`.
pub(crate) fn docs_url(page: &str) -> String {
    format!("{DOCS}{page}")
}

/// Action that the user can take, and page and section of the documentation, for [`docs_url`].
pub(crate) type NextStep<'a> = (&'a str, &'static str);

/// One statement, printed as one line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Line {
    pub(crate) mark: Mark,
    /// Member that the line is about. `None` for the home cluster.
    pub(crate) member: Option<String>,
    pub(crate) text: String,
    /// Action that the user can take.
    pub(crate) remedy: Option<String>,
    /// Page and section of the documentation, for [`docs_url`].
    pub(crate) docs: Option<&'static str>,
}

impl Line {
    /// A line about the home cluster, without a defect.
    pub(crate) fn ok(text: impl Into<String>) -> Self {
        Self {
            mark: Mark::Ok,
            member: None,
            text: text.into(),
            remedy: None,
            docs: None,
        }
    }

    /// A warning, failed or unknown line about the home cluster.
    pub(crate) fn defect(mark: Mark, text: impl Into<String>, step: NextStep<'_>) -> Self {
        let line = Self {
            mark,
            ..Self::ok(text)
        };
        line.with_step(step)
    }

    pub(crate) fn of_member(self, member: &str) -> Self {
        Self {
            member: Some(member.to_owned()),
            ..self
        }
    }

    /// Adds the parts of the next step that a warning, failed or unknown line lacks.
    pub(crate) fn with_step(mut self, (remedy, page): NextStep<'_>) -> Self {
        if self.mark != Mark::Ok {
            self.remedy.get_or_insert_with(|| remedy.to_owned());
            self.docs.get_or_insert(page);
        }
        self
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
            Self::Ok => "ok",
            Self::Note => "warning",
            Self::Problem => "failed",
            Self::Unknown => "unknown",
        }
    }
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
        let remedy = line.remedy.as_deref().map(one_line);
        let docs = line.docs.map(|page| format!("see {}", docs_url(page)));
        let steps: Vec<String> = remedy.into_iter().chain(docs).collect();
        if !steps.is_empty() {
            text += &format!("{indent}    → {}\n", steps.join("; "));
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
            "docs": line.docs.map(docs_url),
        })
    };
    lines.iter().map(line).collect()
}
