//! Label and field selectors.

use serde_json::Value;

use crate::resources::Kind;
use crate::status::{Failure, Outcome};

#[derive(Clone, Debug, Default)]
pub(crate) struct Selector {
    labels: Vec<Requirement>,
    fields: Vec<Requirement>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Requirement {
    key: String,
    test: Test,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Test {
    In(Vec<String>),
    NotIn(Vec<String>),
    Exists,
    Absent,
}

impl Test {
    fn holds(&self, found: Option<&str>) -> bool {
        let among =
            |values: &[String]| found.is_some_and(|found| values.iter().any(|v| v == found));
        match self {
            Self::In(values) => among(values),
            Self::NotIn(values) => !among(values),
            Self::Exists => found.is_some(),
            Self::Absent => found.is_none(),
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
        let labelled = |one: &Requirement| one.test.holds(labels[&one.key].as_str());
        let has_field = |one: &Requirement| {
            let parts = one.key.split('.');
            let found = parts.fold(object, |value, part| &value[part]);
            one.test.holds(Some(found.as_str().unwrap_or_default()))
        };
        self.labels.iter().all(labelled) && self.fields.iter().all(has_field)
    }
}

/// Splits at commas outside parentheses.
fn parts(text: &str) -> Vec<&str> {
    let mut depth = 0_u32;
    let outside = |c: char| {
        match c {
            '(' => depth += 1,
            ')' => depth = depth.saturating_sub(1),
            _ => {}
        }
        c == ',' && depth == 0
    };
    let parts = text.split(outside).map(str::trim);
    parts.filter(|part| !part.is_empty()).collect()
}

fn parse_labels(text: &str) -> Outcome<Vec<Requirement>> {
    parts(text).into_iter().map(parse_label).collect()
}

fn parse_label(part: &str) -> Outcome<Requirement> {
    let requirement = |key: &str, test| {
        let key = key.trim().to_owned();
        Ok(Requirement { key, test })
    };
    let one = |value: &str| vec![value.trim().to_owned()];
    if let Some((head, list)) = part.split_once('(') {
        let values = list.trim_end_matches(')').split(',');
        let values = values.map(|value| value.trim().to_owned()).collect();
        let words: Vec<&str> = head.split_whitespace().collect();
        return match *words {
            [key, "in"] => requirement(key, Test::In(values)),
            [key, "notin"] => requirement(key, Test::NotIn(values)),
            _ => Err(unparsable(part)),
        };
    }
    let words: Vec<&str> = part.split_whitespace().collect();
    if let [_, "in" | "notin", found] = *words {
        return Err(Failure::bad_request(format!(
            "unable to parse requirement: found '{found}' expected: '('"
        )));
    }
    if part.contains("===") {
        let message = "unable to parse requirement: found '=', expected: identifier";
        return Err(Failure::bad_request(message));
    }
    if let Some((key, value)) = part.split_once("!=") {
        return requirement(key, Test::NotIn(one(value)));
    }
    if let Some((key, value)) = part.split_once("==").or_else(|| part.split_once('=')) {
        return requirement(key, Test::In(one(value)));
    }
    match part.strip_prefix('!') {
        Some(key) => requirement(key, Test::Absent),
        None if part.contains(char::is_whitespace) => Err(unparsable(part)),
        None => requirement(part, Test::Exists),
    }
}

fn unparsable(part: &str) -> Box<Failure> {
    Failure::not_modelled(format_args!("the label selector {part:?}"))
}

fn parse_fields(kind: &Kind, text: &str) -> Outcome<Vec<Requirement>> {
    let parse = |part: &str| {
        let split = part.split_once("!=").map(|(key, value)| (key, value, true));
        let equal = || {
            let (key, value) = part.split_once("==").or_else(|| part.split_once('='))?;
            Some((key, value, false))
        };
        let Some((key, value, negated)) = split.or_else(equal) else {
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
                kind.qualified()
            )));
        }
        let values = vec![value.to_owned()];
        let test = match negated {
            true => Test::NotIn(values),
            false => Test::In(values),
        };
        let key = key.to_owned();
        Ok(Requirement { key, test })
    };
    parts(text).into_iter().map(parse).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn label_selectors_match_as_documented() {
        let object = json!({"metadata": {"labels": {"app": "web", "tier": ""}}});
        for (selector, expected) in [
            ("app=web", true),
            ("app==web,tier=", true),
            ("app!=web", false),
            ("other!=x", true),
            ("app in (db, web)", true),
            ("app notin (db,web)", false),
            ("other notin (db)", true),
            ("app,!other", true),
            ("!app", false),
            ("other", false),
        ] {
            let labels = parse_labels(selector).unwrap();
            let selector_matches = Selector {
                labels,
                fields: Vec::new(),
            }
            .matches(&object);
            assert_eq!(selector_matches, expected, "{selector}");
        }
    }
}
