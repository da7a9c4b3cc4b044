//! Logs of a process: writes text or JSON lines to stderr, filtered by `RUST_LOG` or a filter set at runtime.

pub mod config;
mod json_line;
mod level;
pub mod traces;

use std::io::IsTerminal as _;

use krypton_types::by_word;
use tracing_subscriber::filter::{ParseError, Targets};
use tracing_subscriber::fmt::format::JsonFields;
use tracing_subscriber::layer::{Layer, SubscriberExt as _};
use tracing_subscriber::util::SubscriberInitExt as _;
use tracing_subscriber::{Registry, reload};

use json_line::JsonLine;
pub use json_line::ProcessFields;
use level::LogFilter;
pub use level::{FilterChange, FilterError, FilterStatus, LogLevel};

/// Log filter if neither `RUST_LOG` nor a flag sets another.
pub const DEFAULT_FILTER: &str = "info";

const VARIABLE: &str = "RUST_LOG";

/// Format of log lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogFormat {
    Text,
    Json,
}

impl LogFormat {
    /// All formats with their text.
    const ALL: [(&'static str, Self); 2] = [("text", Self::Text), ("json", Self::Json)];
}

by_word!(LogFormat);

#[derive(Debug, thiserror::Error)]
pub enum LogInitError {
    #[error(
        "{origin} is not a log filter: use a level (error, warn, info, debug, trace) or target=level pairs"
    )]
    Filter {
        origin: &'static str,
        #[source]
        source: ParseError,
    },
    #[error("logging was already set up in this process")]
    AlreadySet(#[source] tracing_subscriber::util::TryInitError),
}

/// Log of this process. Clones share their state.
#[derive(Clone, Debug)]
pub struct Log {
    pub process: ProcessFields,
    pub level: LogLevel,
}

#[cfg(feature = "simulation")]
impl Log {
    /// Returns the log of a simulated process: its level can be read, but not changed.
    pub fn unused() -> Self {
        let filter = tracing_subscriber::filter::Targets::new();
        let (_, handle) = reload::Layer::new(LogFilter(filter));
        Self {
            process: ProcessFields::default(),
            level: LogLevel::new(handle, DEFAULT_FILTER),
        }
    }
}

/// An additional layer for the spans and events of this process, with a separate filter.
pub type ExtraLayer = Box<dyn Layer<Registry> + Send + Sync>;

/// Starts the log with `default_filter`, which `RUST_LOG` overrides. Call this once per process.
pub fn init(
    format: LogFormat,
    default_filter: &str,
    traces: Option<ExtraLayer>,
) -> Result<Log, LogInitError> {
    let variable = std::env::var(VARIABLE).ok();
    let (text, targets) = filter(variable.as_deref(), default_filter)?;
    let (log_filter, handle) = reload::Layer::new(LogFilter(targets));
    let process = ProcessFields::default();
    // https://no-color.org
    let no_color = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    let lines = tracing_subscriber::fmt::layer().with_writer(std::io::stderr);
    let lines = match format {
        LogFormat::Text => lines
            .with_ansi(std::io::stderr().is_terminal() && !no_color)
            .with_filter(log_filter)
            .boxed(),
        LogFormat::Json => lines
            .fmt_fields(JsonFields::new())
            .event_format(JsonLine {
                process: process.clone(),
            })
            .with_filter(log_filter)
            .boxed(),
    };
    let mut layers = vec![lines];
    layers.extend(traces);
    tracing_subscriber::registry()
        .with(layers)
        .try_init()
        .map_err(LogInitError::AlreadySet)?;
    Ok(Log {
        process,
        level: LogLevel::new(handle, text),
    })
}

/// Returns the effective filter as text and parsed.
fn filter<'a>(
    variable: Option<&'a str>,
    default_filter: &'a str,
) -> Result<(&'a str, Targets), LogInitError> {
    let (text, origin) = match variable.map(str::trim).filter(|text| !text.is_empty()) {
        Some(text) => (text, VARIABLE),
        None => (default_filter, "the log level"),
    };
    match level::targets(text) {
        Ok(targets) => Ok((text, targets)),
        Err(source) => Err(LogInitError::Filter { origin, source }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn filter_variable_overrides_default_unless_empty() {
        let filter_text = |variable| filter(variable, "info").unwrap().0.to_owned();
        assert_eq!(filter_text(None), "info");
        assert_eq!(filter_text(Some("  ")), "info");
        assert_eq!(filter_text(Some("debug")), "debug");
        assert_eq!(filter_text(Some("kube=warn")), "kube=warn");
    }

    #[test]
    fn a_bad_filter_is_named_by_its_origin() {
        let error = filter(Some("hub=loud"), "info").unwrap_err();
        assert!(
            error
                .to_string()
                .starts_with("RUST_LOG is not a log filter"),
            "{error}"
        );
        let error = filter(None, "hub=loud").unwrap_err();
        assert!(
            error.to_string().starts_with("the log level is not"),
            "{error}"
        );
    }

    #[test]
    fn second_telemetry_setup_is_rejected() {
        assert!(init(LogFormat::Json, DEFAULT_FILTER, None).is_ok());
        assert!(matches!(
            init(LogFormat::Text, DEFAULT_FILTER, None),
            Err(LogInitError::AlreadySet(_))
        ));
    }
}
