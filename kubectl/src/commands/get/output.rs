//! The value of `get --output`: a format, or a template that selects fields.

use std::ffi::OsStr;

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use clap::error::ErrorKind;
use clap::{Arg, Command, ValueEnum};
use serde_json::Value;

use crate::error::KubectlError;
use crate::json_path::Template;
use crate::output::{OutputFormat, encode};

const JSON_PATH: &str = "jsonpath=";

#[derive(Clone, Debug)]
pub(super) enum Output {
    Format(OutputFormat),
    JsonPath(Template),
}

impl Output {
    /// Returns whether the output is the objects themselves or their fields, and not a table or names.
    pub(super) fn is_document(&self) -> bool {
        match self {
            Self::Format(format) => matches!(format, OutputFormat::Json | OutputFormat::Yaml),
            Self::JsonPath(_) => true,
        }
    }

    pub(super) fn encode(&self, value: &Value) -> Result<String, KubectlError> {
        match self {
            Self::Format(format) => encode(*format, value),
            Self::JsonPath(template) => Ok(template.render(value)),
        }
    }
}

/// Parses one of the formats, or `jsonpath=TEMPLATE`.
#[derive(Clone, Debug)]
pub(super) struct OutputParser;

fn possible_values() -> Vec<PossibleValue> {
    let formats = OutputFormat::value_variants().iter();
    let mut values: Vec<_> = formats.filter_map(ValueEnum::to_possible_value).collect();
    values.push(PossibleValue::new(JSON_PATH));
    values
}

impl TypedValueParser for OutputParser {
    type Value = Output;

    fn parse_ref(
        &self,
        command: &Command,
        arg: Option<&Arg>,
        value: &OsStr,
    ) -> Result<Output, clap::Error> {
        let text = value.to_str().unwrap_or_default();
        if let Some(template) = text.strip_prefix(JSON_PATH) {
            let template = OsStr::new(template);
            let parsed = TypedValueParser::parse_ref(&Template::parse, command, arg, template);
            return parsed.map(Output::JsonPath);
        }
        let names = PossibleValuesParser::new(possible_values());
        let name = names.parse_ref(command, arg, value)?;
        let format = OutputFormat::from_str(&name, false);
        let invalid = |reason| clap::Error::raw(ErrorKind::InvalidValue, reason);
        format.map(Output::Format).map_err(invalid)
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        Some(Box::new(possible_values().into_iter()))
    }
}
