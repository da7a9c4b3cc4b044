//! Encodes objects for programs, and prints text while a command runs.

use std::io::{self, ErrorKind};

use clap::ValueEnum;
use serde_json::{Value, json};

use crate::error::KubectlError;

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum OutputFormat {
    Table,
    Wide,
    Name,
    Json,
    Yaml,
}

/// Format of a document for programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum DocumentFormat {
    Json,
    Yaml,
}

impl From<DocumentFormat> for OutputFormat {
    fn from(format: DocumentFormat) -> Self {
        match format {
            DocumentFormat::Json => Self::Json,
            DocumentFormat::Yaml => Self::Yaml,
        }
    }
}

/// Prints a text while the command runs. Returns false if the reader has closed `out`.
pub(crate) fn print_now(out: &mut dyn io::Write, text: &str) -> Result<bool, KubectlError> {
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(false),
        Err(error) => {
            let reason = format!("writing the output failed: {error}");
            Err(KubectlError::Failed(reason))
        }
    }
}

pub(crate) fn encode_list(format: OutputFormat, items: Vec<Value>) -> Result<String, KubectlError> {
    encode(format, &as_list(items))
}

/// One list of these objects, as kubectl prints it.
pub(crate) fn as_list(items: Vec<Value>) -> Value {
    json!({ "apiVersion": "v1", "kind": "List", "metadata": {}, "items": items })
}

pub(crate) fn encode(format: OutputFormat, value: &Value) -> Result<String, KubectlError> {
    let failed = |format, error: &dyn std::error::Error| {
        KubectlError::Failed(format!("writing the {format} failed: {error}"))
    };
    match format {
        OutputFormat::Json => match serde_json::to_string_pretty(value) {
            Ok(text) => Ok(text + "\n"),
            Err(error) => Err(failed("JSON", &error)),
        },
        _ => serde_saphyr::to_string(value).map_err(|error| failed("YAML", &error)),
    }
}
