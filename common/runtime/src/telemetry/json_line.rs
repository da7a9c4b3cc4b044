//! Formats a log event as one flat JSON object.
//!
//! The keys are time, level, target and message, then the fields of the process, of all spans from the root
//! inwards, and of the event. If a name occurs several times, only the innermost value is written.

use std::fmt;
use std::sync::Arc;

use jiff::Timestamp;
use parking_lot::RwLock;
use serde::ser::{Serialize, SerializeMap as _, Serializer};
use serde_json::Value;
use tracing::field::{Field, Visit};
use tracing::{Event, Subscriber};
use tracing_subscriber::fmt::format::{JsonFields, Writer};
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormattedFields};
use tracing_subscriber::registry::LookupSpan;

const MESSAGE: &str = "message";
/// Names of the event's own keys, which fields cannot use.
const RESERVED: [&str; 3] = ["timestamp", "level", "target"];
/// Prefix of the fields with a record's origin in the crate `log`, and the target of all its records.
const LOG: &str = "log";
const LOG_TARGET: &str = "log.target";

/// Fields of the process in each JSON line. Clones share their state.
#[derive(Clone, Debug, Default)]
pub struct ProcessFields(Arc<RwLock<Vec<(&'static str, String)>>>);

impl ProcessFields {
    /// Adds a field to all further lines. A span or event with a field of the same name overrides it.
    pub fn set(&self, name: &'static str, value: impl Into<String>) {
        let mut fields = self.0.write();
        fields.retain(|(known, _)| *known != name);
        fields.push((name, value.into()));
    }

    fn for_each(&self, mut visit: impl FnMut(&'static str, &str)) {
        let fields = self.0.read();
        for (name, value) in fields.iter() {
            visit(name, value);
        }
    }
}

pub(super) struct JsonLine {
    pub(super) process: ProcessFields,
}

impl<S> FormatEvent<S, JsonFields> for JsonLine
where
    S: Subscriber + for<'lookup> LookupSpan<'lookup>,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, JsonFields>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        let mut fields = LogFields::default();
        self.process
            .for_each(|name, value| fields.set(name, Value::from(value)));
        for span in context
            .event_scope()
            .into_iter()
            .flat_map(|scope| scope.from_root())
        {
            if let Some(span_fields) = span.extensions().get::<FormattedFields<JsonFields>>()
                && let Ok(Value::Object(span_fields)) = serde_json::from_str(&span_fields.fields)
            {
                for (name, value) in span_fields {
                    fields.set(&name, value);
                }
            }
        }
        event.record(&mut fields);
        let metadata = event.metadata();
        let target = fields.take_log_crate_target(metadata.target());
        let line = LogLine {
            timestamp: Timestamp::now(),
            level: metadata.level().as_str(),
            target: target.as_deref().unwrap_or_else(|| metadata.target()),
            fields,
        };
        let text = serde_json::to_string(&line).map_err(|_| fmt::Error)?;
        writeln!(writer, "{text}")
    }
}

#[derive(Default)]
struct LogFields {
    message: Option<Value>,
    others: Vec<(String, Value)>,
}

impl LogFields {
    fn set(&mut self, name: &str, value: Value) {
        let name = name.strip_prefix("r#").unwrap_or(name);
        // The message comes first.
        if name == MESSAGE && self.message.is_none() {
            self.message = Some(value);
            return;
        }
        let name = if name == MESSAGE || RESERVED.contains(&name) {
            format!("{name}_")
        } else {
            name.to_owned()
        };
        match self
            .others
            .iter_mut()
            .find(|(existing, _)| *existing == name)
        {
            Some((_, existing)) => *existing = value,
            None => self.others.push((name, value)),
        }
    }

    /// Returns the original target of a record of the crate `log` and drops its other fields about the
    /// origin.
    fn take_log_crate_target(&mut self, target: &str) -> Option<String> {
        if target != LOG {
            return None;
        }
        let mut original = None;
        self.others.retain(|(name, value)| {
            if name == LOG_TARGET {
                original = value.as_str().map(str::to_owned);
            }
            !name.starts_with("log.")
        });
        original
    }
}

impl Visit for LogFields {
    fn record_f64(&mut self, field: &Field, value: f64) {
        self.set(field.name(), Value::from(value));
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.set(field.name(), Value::from(value));
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.set(field.name(), Value::from(value));
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.set(field.name(), Value::from(value));
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.set(field.name(), Value::from(value));
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.set(field.name(), Value::from(format!("{value:?}")));
    }
}

struct LogLine<'a> {
    timestamp: Timestamp,
    level: &'a str,
    target: &'a str,
    fields: LogFields,
}

impl Serialize for LogLine<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        map.serialize_entry("timestamp", &format_args!("{:.6}", self.timestamp))?;
        map.serialize_entry("level", self.level)?;
        map.serialize_entry("target", self.target)?;
        let empty = Value::from("");
        map.serialize_entry(MESSAGE, self.fields.message.as_ref().unwrap_or(&empty))?;
        for (name, value) in &self.fields.others {
            map.serialize_entry(name, value)?;
        }
        map.end()
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::io;
    use std::sync::Arc;

    use parking_lot::Mutex;
    use serde_json::json;
    use tracing::{error_span, info, warn};
    use tracing_subscriber::layer::SubscriberExt as _;
    use tracing_subscriber::registry;

    use super::*;

    /// Returns the written text.
    fn log_text(process: &ProcessFields, run: impl FnOnce()) -> String {
        let log_text = LogBuffer::default();
        let writer = log_text.clone();
        let layer = tracing_subscriber::fmt::layer()
            .with_writer(move || writer.clone())
            .fmt_fields(JsonFields::new())
            .event_format(JsonLine {
                process: process.clone(),
            });
        tracing::subscriber::with_default(registry().with(layer), run);
        log_text.text()
    }

    /// Returns the resulting lines, each with its keys in order.
    fn lines(process: &ProcessFields, run: impl FnOnce()) -> Vec<(Value, Vec<String>)> {
        let text = log_text(process, run);
        let read = |line: &str| {
            let value: Value = serde_json::from_str(line).unwrap();
            // Each key occurs once: the text has as many as the object.
            let mut keys: Vec<_> = value.as_object().unwrap().keys().collect();
            keys.sort_by_key(|key| line.find(&format!("\"{key}\":")));
            let keys = keys.into_iter().cloned().collect();
            (value, keys)
        };
        text.lines().map(read).collect()
    }

    #[test]
    fn line_merges_span_fields_and_innermost_wins() {
        let process = ProcessFields::default();
        process.set("program", "krypton-hub");
        process.set("member", "of the process");
        let lines = lines(&process, || {
            let _outer = error_span!("member", member = "edge-1", generation = 1).entered();
            let _inner = error_span!("job", tenant = %"a/b", generation = 7_i64).entered();
            info!(attempts = 2_u64, retry = true, "running helm");
            warn!(tenant = "c/d", "other");
        });
        let (line, keys) = &lines[0];
        let mut line = line.clone();
        assert!(line["timestamp"].as_str().unwrap().ends_with('Z'), "{line}");
        line["timestamp"] = Value::Null;
        assert_eq!(
            line,
            json!({
                "timestamp": null, "level": "INFO", "target": module_path!(), "message": "running helm",
                "program": "krypton-hub", "member": "edge-1", "tenant": "a/b", "generation": 7,
                "attempts": 2, "retry": true,
            })
        );
        assert_eq!(keys[..4], ["timestamp", "level", "target", "message"]);
        assert_eq!(lines[1].0["tenant"], "c/d");
        assert_eq!(lines[1].0["generation"], 7);
    }

    #[test]
    fn keys_are_unique_and_reserved_keys_are_protected() {
        let text = log_text(&ProcessFields::default(), || {
            let span = error_span!("job", member = "a", later = tracing::field::Empty);
            span.record("later", "now");
            let _span_guard = span.entered();
            info!(
                member = "b",
                level = "of a field",
                target = "too",
                message = "third",
                "said"
            );
        });
        assert_eq!(text.matches("\"member\":").count(), 1, "{text}");
        assert_eq!(text.matches("\"level\":").count(), 1, "{text}");
        assert_eq!(text.matches("\"message\":\"said\"").count(), 1, "{text}");
        let line: Value = serde_json::from_str(&text).unwrap();
        for (key, value) in [
            ("member", "b"),
            ("level", "INFO"),
            ("level_", "of a field"),
            ("later", "now"),
        ] {
            assert_eq!(line[key], value, "{text}");
        }
    }

    #[test]
    fn message_with_control_characters_stays_one_line() {
        let text = "first\nsecond \"quoted\"\tand \u{1b}[31m";
        let lines = lines(&ProcessFields::default(), || {
            info!(problem = text, "{text}");
            info!(only = 1);
        });
        assert_eq!(lines.len(), 2);
        assert_eq!(lines[0].0["problem"], text);
        assert_eq!(lines[0].0["message"], text);
        assert_eq!(lines[1].0["message"], "");
    }

    #[test]
    fn log_crate_record_keeps_its_own_target() {
        let mut fields = LogFields::default();
        for (name, value) in [
            (LOG_TARGET, "rustls::conn"),
            ("log.line", "7"),
            ("kept", "x"),
        ] {
            fields.set(name, Value::from(value));
        }
        assert_eq!(fields.take_log_crate_target("krypton"), None);
        assert_eq!(
            fields.take_log_crate_target(LOG).as_deref(),
            Some("rustls::conn")
        );
        assert_eq!(fields.others, [("kept".to_owned(), json!("x"))]);
    }

    #[derive(Clone, Default)]
    pub(in super::super) struct LogBuffer(Arc<Mutex<Vec<u8>>>);

    impl LogBuffer {
        pub(in super::super) fn text(&self) -> String {
            String::from_utf8(self.0.lock().clone()).unwrap()
        }
    }

    impl io::Write for LogBuffer {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
}
