//! Labels of an object in one allocation, and selectors in the syntax of the Kubernetes API.

use std::collections::{BTreeMap, BTreeSet};

use kube::core::{Expression, Selector, SelectorExt as _};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use thiserror::Error;

use crate::names::{is_label_value, is_qualified_name};

/// Limit for all labels of an object in bytes, with two separators for each label.
pub const LABELS_MAX: usize = 1024;
/// Limit for the text of a selector in bytes.
pub const SELECTOR_MAX: usize = 4096;

/// Valid labels as the text `KEY=VALUE,` for each, sorted by key. The hub stores labels for each Tenant of each member,
/// and a map of a few labels needs several times as much memory. No labels need no allocation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Labels(Box<str>);

impl Labels {
    /// Returns no labels if one of them is invalid or if all of them exceed [`LABELS_MAX`]. A part of them would match
    /// selectors that all of them do not match.
    pub fn new(labels: &BTreeMap<String, String>) -> Self {
        let is_valid =
            |(key, value): (&String, &String)| is_qualified_name(key) && is_label_value(value);
        let sizes = labels
            .iter()
            .map(|(key, value)| key.len() + value.len() + 2);
        let size: usize = sizes.sum();
        if size > LABELS_MAX || !labels.iter().all(is_valid) {
            return Self::default();
        }
        let mut text = String::with_capacity(size);
        for (key, value) in labels {
            text.extend([key.as_str(), "=", value.as_str(), ","]);
        }
        Self(text.into())
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Size in bytes.
    pub fn size(&self) -> usize {
        self.0.len()
    }

    fn pairs(&self) -> impl Iterator<Item = (&str, &str)> {
        let pairs = self.0.split_terminator(',');
        pairs.filter_map(|pair| pair.split_once('='))
    }

    pub fn to_map(&self) -> BTreeMap<String, String> {
        let pairs = self.pairs();
        pairs
            .map(|(key, value)| (key.to_owned(), value.to_owned()))
            .collect()
    }

    /// Returns whether the selector matches the labels.
    pub fn match_selector(&self, selector: &Selector) -> bool {
        selector.selects_all() || selector.matches(&self.to_map())
    }
}

impl Serialize for Labels {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.pairs())
    }
}

impl<'de> Deserialize<'de> for Labels {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let labels = BTreeMap::<String, String>::deserialize(deserializer)?;
        Ok(Self::new(&labels))
    }
}

/// Why a selector cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum SelectorError {
    #[error("the selector has {0} bytes; write at most {SELECTOR_MAX}")]
    TooLong(usize),
    #[error(
        "{0:?} does not select labels; write KEY, !KEY, KEY=VALUE, KEY!=VALUE, KEY in (VALUE,...) or KEY notin (VALUE,...)"
    )]
    Expression(String),
}

/// Reads a selector such as `team=a,tier in (web, db),!old`. An empty one selects all objects.
///
/// # Errors
/// The first expression that is invalid.
pub fn parse_selector(text: &str) -> Result<Selector, SelectorError> {
    if text.len() > SELECTOR_MAX {
        return Err(SelectorError::TooLong(text.len()));
    }
    if text.trim().is_empty() {
        return Ok(Selector::default());
    }
    let mut in_list = false;
    let is_separator = |character: char| {
        match character {
            '(' => in_list = true,
            ')' => in_list = false,
            _ => {}
        }
        character == ',' && !in_list
    };
    let parse = |part: &str| {
        let part = part.trim();
        parse_expression(part).ok_or_else(|| SelectorError::Expression(part.to_owned()))
    };
    text.split(is_separator).map(parse).collect()
}

fn parse_expression(text: &str) -> Option<Expression> {
    if let Some((head, list)) = text.split_once('(') {
        let values = parse_values(list.strip_suffix(')')?)?;
        let mut words = head.split_whitespace();
        let key = parse_key(words.next()?)?;
        return match (words.next()?, words.next()) {
            ("in", None) => Some(Expression::In(key, values)),
            ("notin", None) => Some(Expression::NotIn(key, values)),
            _ => None,
        };
    }
    if let Some((key, value)) = text.split_once("!=") {
        return Some(Expression::NotEqual(parse_key(key)?, parse_value(value)?));
    }
    if let Some((key, value)) = text.split_once('=') {
        let value = value.strip_prefix('=').unwrap_or(value);
        return Some(Expression::Equal(parse_key(key)?, parse_value(value)?));
    }
    match text.strip_prefix('!') {
        Some(key) => Some(Expression::DoesNotExist(parse_key(key)?)),
        None => Some(Expression::Exists(parse_key(text)?)),
    }
}

fn parse_key(text: &str) -> Option<String> {
    let text = text.trim();
    is_qualified_name(text).then(|| text.to_owned())
}

fn parse_value(text: &str) -> Option<String> {
    let text = text.trim();
    is_label_value(text).then(|| text.to_owned())
}

fn parse_values(list: &str) -> Option<BTreeSet<String>> {
    let values: BTreeSet<String> = list.split(',').map(parse_value).collect::<Option<_>>()?;
    let has_value = values.iter().any(|value| !value.is_empty());
    has_value.then_some(values)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
        let pairs = pairs.iter();
        pairs
            .map(|(key, value)| ((*key).to_owned(), (*value).to_owned()))
            .collect()
    }

    #[test]
    fn labels_are_kept_completely_or_not_at_all() {
        let labels = map(&[("example.com/team", "a"), ("tier", "")]);
        let stored = Labels::new(&labels);
        assert_eq!(stored.to_map(), labels);
        assert_eq!(stored.size(), "example.com/team=a,tier=,".len());
        let json = serde_json::to_string(&stored).unwrap();
        assert_eq!(json, r#"{"example.com/team":"a","tier":""}"#);
        assert_eq!(serde_json::from_str::<Labels>(&json).unwrap(), stored);
        for invalid in [
            ("a=b", ""),
            ("a,b", ""),
            ("", "a"),
            ("a", "b c"),
            ("a", "\u{1b}"),
        ] {
            let labels = map(&[("team", "a"), invalid]);
            assert_eq!(Labels::new(&labels), Labels::default(), "{invalid:?}");
        }
    }

    #[test]
    fn labels_beyond_limit_are_dropped() {
        let labels = |count: usize| -> BTreeMap<String, String> {
            let numbers = 0..count;
            numbers
                .map(|number| (format!("key-{number:02}"), "v".repeat(56)))
                .collect()
        };
        let most = Labels::new(&labels(16));
        assert_eq!(most.size(), LABELS_MAX);
        assert!(Labels::new(&labels(17)).is_empty());
    }

    #[test]
    fn selectors_match_as_documented() {
        let labels = Labels::new(&map(&[("app.kubernetes.io/name", "web"), ("tier", "")]));
        for (selector, expected) in [
            ("", true),
            ("app.kubernetes.io/name=web", true),
            ("app.kubernetes.io/name == web , tier=", true),
            ("app.kubernetes.io/name!=web", false),
            ("other!=x", true),
            ("app.kubernetes.io/name in (db, web)", true),
            ("app.kubernetes.io/name notin (db,web)", false),
            ("other notin(db)", true),
            ("tier in (,a),!other", true),
            ("!tier", false),
            ("other", false),
        ] {
            let parsed = parse_selector(selector).unwrap();
            assert_eq!(labels.match_selector(&parsed), expected, "{selector}");
            let reparsed = parse_selector(&parsed.to_string());
            assert_eq!(reparsed, Ok(parsed), "{selector}");
        }
    }

    #[test]
    fn invalid_selectors_are_rejected_with_their_part() {
        for (selector, part) in [
            ("a=b=c", "a=b=c"),
            ("a,,b", ""),
            ("team=a, tier in web", "tier in web"),
            ("a in ()", "a in ()"),
            ("a in (b", "a in (b"),
            ("a of (b)", "a of (b)"),
            ("a>1", "a>1"),
            ("a=b&c", "a=b&c"),
            ("!", "!"),
        ] {
            let error = SelectorError::Expression(part.to_owned());
            assert_eq!(parse_selector(selector), Err(error), "{selector}");
        }
        let long = format!("a in ({})", "b,".repeat(SELECTOR_MAX / 2));
        let error = SelectorError::TooLong(long.len());
        assert_eq!(parse_selector(&long), Err(error));
    }
}
