//! Label and field selectors.

use serde_json::Value;

use crate::kind::Kind;
use crate::status::{Failure, Outcome};

#[derive(Clone, Debug, Default)]
pub(crate) struct Selector {
    labels: Vec<Requirement>,
    fields: Vec<Requirement>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Requirement {
    key: String,
    operator: Operator,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Operator {
    In(Vec<String>),
    NotIn(Vec<String>),
    Exists,
    Absent,
}

impl Operator {
    fn matches_value(&self, value: Option<&str>) -> bool {
        let is_one_of = |values: &[String]| {
            value.is_some_and(|value| values.iter().any(|candidate| candidate == value))
        };
        match self {
            Self::In(values) => is_one_of(values),
            Self::NotIn(values) => !is_one_of(values),
            Self::Exists => value.is_some(),
            Self::Absent => value.is_none(),
        }
    }
}

impl Selector {
    pub(crate) fn parse(kind: &Kind, labels: &str, fields: &str) -> Outcome<Self> {
        Ok(Self {
            labels: parse_labels(labels)?,
            fields: parse_fields(kind, fields)?,
        })
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.labels.is_empty() && self.fields.is_empty()
    }

    pub(crate) fn matches(&self, object: &Value) -> bool {
        let labels = &object["metadata"]["labels"];
        let matches_label = |requirement: &Requirement| {
            requirement
                .operator
                .matches_value(labels[&requirement.key].as_str())
        };
        let matches_field = |requirement: &Requirement| {
            let parts = requirement.key.split('.');
            let field = parts.fold(object, |value, part| &value[part]);
            requirement
                .operator
                .matches_value(Some(field.as_str().unwrap_or_default()))
        };
        self.labels.iter().all(matches_label) && self.fields.iter().all(matches_field)
    }
}

/// Splits at commas outside parentheses.
fn split_requirements(text: &str) -> Vec<&str> {
    let mut depth = 0_u32;
    let is_separator = |c: char| {
        match c {
            '(' => depth += 1,
            ')' => depth = depth.saturating_sub(1),
            _ => {}
        }
        c == ',' && depth == 0
    };
    let parts = text.split(is_separator).map(str::trim);
    parts.filter(|part| !part.is_empty()).collect()
}

fn parse_labels(text: &str) -> Outcome<Vec<Requirement>> {
    split_requirements(text)
        .into_iter()
        .map(parse_label)
        .collect()
}

fn parse_label(part: &str) -> Outcome<Requirement> {
    let requirement = |key: &str, operator| {
        let key = key.trim().to_owned();
        Ok(Requirement { key, operator })
    };
    let single_value = |value: &str| vec![value.trim().to_owned()];
    if let Some((head, list)) = part.split_once('(') {
        let values = list.trim_end_matches(')').split(',');
        let values = values.map(|value| value.trim().to_owned()).collect();
        let words: Vec<&str> = head.split_whitespace().collect();
        return match *words {
            [key, "in"] => requirement(key, Operator::In(values)),
            [key, "notin"] => requirement(key, Operator::NotIn(values)),
            _ => Err(not_modelled_label(part)),
        };
    }
    let words: Vec<&str> = part.split_whitespace().collect();
    if let [_, "in" | "notin", value] = *words {
        return Err(Failure::bad_request(format!(
            "unable to parse requirement: found '{value}' expected: '('"
        )));
    }
    if part.contains("===") {
        let message = "unable to parse requirement: found '=', expected: identifier";
        return Err(Failure::bad_request(message));
    }
    if let Some((key, value)) = part.split_once("!=") {
        return requirement(key, Operator::NotIn(single_value(value)));
    }
    if let Some((key, value)) = part.split_once("==").or_else(|| part.split_once('=')) {
        return requirement(key, Operator::In(single_value(value)));
    }
    match part.strip_prefix('!') {
        Some(key) => requirement(key, Operator::Absent),
        None if part.contains(char::is_whitespace) => Err(not_modelled_label(part)),
        None => requirement(part, Operator::Exists),
    }
}

fn not_modelled_label(part: &str) -> Box<Failure> {
    Failure::not_modelled(format_args!("the label selector {part:?}"))
}

fn parse_fields(kind: &Kind, text: &str) -> Outcome<Vec<Requirement>> {
    let parse = |part: &str| {
        let not_equal = part.split_once("!=").map(|(key, value)| (key, value, true));
        let equal = || {
            let (key, value) = part.split_once("==").or_else(|| part.split_once('='))?;
            Some((key, value, false))
        };
        let Some((key, value, negated)) = not_equal.or_else(equal) else {
            return Err(Failure::bad_request(format!(
                "invalid selector: '{part}'; can't understand '{part}'"
            )));
        };
        if !kind.has_field_selector(key) {
            if kind.is("", "configmaps") {
                return Err(Failure::bad_request(format!(
                    "{key:?} is not a known field selector: only \"metadata.name\", \"metadata.namespace\""
                )));
            }
            if kind.is_custom() || kind.is("", "secrets") {
                let message = format!("field label not supported: {key}");
                return Err(Failure::bad_request(message));
            }
            return Err(Failure::not_modelled(format_args!(
                "the field selector {key:?} of {}",
                kind.group_resource()
            )));
        }
        let values = vec![value.to_owned()];
        let operator = match negated {
            true => Operator::NotIn(values),
            false => Operator::In(values),
        };
        let key = key.to_owned();
        Ok(Requirement { key, operator })
    };
    split_requirements(text).into_iter().map(parse).collect()
}
