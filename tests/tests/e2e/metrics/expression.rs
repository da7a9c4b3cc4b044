//! Parses enough of Prometheus' language to find the metrics and labels of an expression.

use std::collections::BTreeSet;
use std::fmt;

use super::exposition::Sample;

pub(super) const FUNCTIONS: [&str; 13] = [
    "absent",
    "bottomk",
    "changes",
    "count",
    "histogram_quantile",
    "increase",
    "last_over_time",
    "max",
    "min",
    "rate",
    "sum",
    "time",
    "topk",
];
const GROUPING: [&str; 5] = ["by", "without", "on", "ignoring", "group_left"];
const OPERATORS: [&str; 3] = ["and", "or", "unless"];

#[derive(Debug)]
pub(super) struct Matcher {
    pub(super) label: String,
    operator: String,
    value: String,
}

impl Matcher {
    /// Returns the literal values. Omits values that the dashboard inserts.
    pub(super) fn literals(&self) -> impl Iterator<Item = &str> {
        let values = self.value.split('|');
        values.filter(|value| !value.contains('$'))
    }

    fn fits(&self, sample: &Sample) -> bool {
        // A target label, or a label that the dashboard inserts.
        let Some(value) = sample.labels.get(&self.label) else {
            return true;
        };
        let named = self.value.contains('$') || self.literals().any(|literal| literal == value);
        named == self.operator.starts_with('=')
    }
}

#[derive(Debug)]
pub(super) struct Selector {
    pub(super) metric: String,
    pub(super) matchers: Vec<Matcher>,
}

impl Selector {
    pub(super) fn selects(&self, sample: &Sample) -> bool {
        sample.name == self.metric && self.matchers.iter().all(|matcher| matcher.fits(sample))
    }
}

impl fmt::Display for Selector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.metric)?;
        for Matcher {
            label,
            operator,
            value,
        } in &self.matchers
        {
            write!(f, " {label}{operator}{value:?}")?;
        }
        Ok(())
    }
}

#[derive(Debug, Default)]
pub(super) struct Expression {
    pub(super) selectors: Vec<Selector>,
    /// Labels of grouping and matching clauses.
    pub(super) grouping: BTreeSet<String>,
    pub(super) functions: BTreeSet<String>,
}

struct Reader<'a>(&'a str);

impl<'a> Reader<'a> {
    fn blank(&mut self) {
        self.0 = self.0.trim_start();
    }

    fn word(&mut self) -> &'a str {
        let end = self
            .0
            .find(|c: char| !c.is_ascii_alphanumeric() && c != '_');
        let (word, rest) = self.0.split_at(end.unwrap_or(self.0.len()));
        self.0 = rest;
        word
    }

    fn take(&mut self, what: &str) -> bool {
        self.blank();
        let rest = self.0.strip_prefix(what);
        self.0 = rest.unwrap_or(self.0);
        rest.is_some()
    }

    fn until(&mut self, end: char) -> Result<&'a str, String> {
        let (inside, rest) = self.0.split_once(end).ok_or(format!("no {end} follows"))?;
        self.0 = rest;
        Ok(inside)
    }
}

impl Expression {
    pub(super) fn parse(text: &str) -> Result<Self, String> {
        let mut this = Self::default();
        let mut reader = Reader(text);
        let mut open = 0_i32;
        loop {
            reader.blank();
            let Some(first) = reader.0.chars().next() else {
                break;
            };
            if first.is_ascii_alphabetic() {
                this.take(&mut reader)?;
            } else if first == '[' {
                reader.until(']')?;
            } else {
                open += match first {
                    '(' => 1,
                    ')' => -1,
                    '0'..='9' | '.' | '+' | '-' | '*' | '/' | '<' | '>' | '=' | '!' | ',' => 0,
                    other => return Err(format!("{other} is not understood")),
                };
                reader.0 = reader.0.strip_prefix(first).unwrap_or_default();
            }
            if open < 0 {
                return Err("a bracket too many".to_owned());
            }
        }
        if open > 0 {
            return Err("a bracket is not closed".to_owned());
        }
        Ok(this)
    }

    fn take(&mut self, reader: &mut Reader<'_>) -> Result<(), String> {
        let word = reader.word();
        if OPERATORS.contains(&word) {
            return Ok(());
        }
        if GROUPING.contains(&word) {
            if !reader.take("(") {
                return Err(format!("no ( follows {word}"));
            }
            let labels = reader.until(')')?.split(',');
            let labels = labels.map(|label| label.trim().to_owned());
            self.grouping.extend(labels);
            return Ok(());
        }
        reader.blank();
        let aggregates = GROUPING.iter().any(|by| {
            let rest = reader.0.strip_prefix(by);
            rest.is_some_and(|rest| rest.trim_start().starts_with('('))
        });
        if reader.0.starts_with('(') || (aggregates && FUNCTIONS.contains(&word)) {
            self.functions.insert(word.to_owned());
            return Ok(());
        }
        let mut matchers = Vec::new();
        if reader.take("{") {
            while !reader.take("}") {
                reader.blank();
                let label = reader.word().to_owned();
                let operator = ["=~", "!~", "!=", "="]
                    .into_iter()
                    .find(|operator| reader.take(operator))
                    .ok_or("no operator follows a label")?;
                if !reader.take("\"") {
                    return Err("no value follows an operator".to_owned());
                }
                matchers.push(Matcher {
                    label,
                    operator: operator.to_owned(),
                    value: reader.until('"')?.to_owned(),
                });
                reader.take(",");
            }
        }
        self.selectors.push(Selector {
            metric: word.to_owned(),
            matchers,
        });
        Ok(())
    }
}
