//! Formats a log event as one flat JSON object.
//!
//! The keys are time, level, target and message, then the fields of the process, of all spans from the root
//! inwards, and of the event. If a name occurs several times, only the innermost value is written.

use std::fmt;

use jiff::Timestamp;
use serde::ser::{Serialize, SerializeMap as _, Serializer};
use serde_json::Value;
use tracing::field::{Field, Visit};
use tracing::{Event, Subscriber};
use tracing_subscriber::fmt::format::{JsonFields, Writer};
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormattedFields};
use tracing_subscriber::registry::LookupSpan;

use super::AboutProcess;

const MESSAGE: &str = "message";
/// Names of the event's own keys, which fields cannot use.
const RESERVED: [&str; 3] = ["timestamp", "level", "target"];
/// Prefix of the fields with a record's origin in the crate `log`, and the target of all its records.
const LOG: &str = "log";
const LOG_TARGET: &str = "log.target";

pub(super) struct JsonLine {
    pub(super) process: AboutProcess,
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
        let mut fields = Fields::default();
        self.process
            .each(|name, value| fields.put(name, Value::from(value)));
        for span in context
            .event_scope()
            .into_iter()
            .flat_map(|it| it.from_root())
        {
            if let Some(of_span) = span.extensions().get::<FormattedFields<JsonFields>>()
                && let Ok(Value::Object(of_span)) = serde_json::from_str(&of_span.fields)
            {
                for (name, value) in of_span {
                    fields.put(&name, value);
                }
            }
        }
        event.record(&mut fields);
        let metadata = event.metadata();
        let target = fields.of_log_crate(metadata.target());
        let line = Line {
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
struct Fields {
    message: Option<Value>,
    rest: Vec<(String, Value)>,
}

impl Fields {
    fn put(&mut self, name: &str, value: Value) {
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
        match self.rest.iter_mut().find(|(known, _)| *known == name) {
            Some((_, known)) => *known = value,
            None => self.rest.push((name, value)),
        }
    }

    /// Returns the original target of a record of the crate `log` and drops its other fields about the
    /// origin.
    fn of_log_crate(&mut self, target: &str) -> Option<String> {
        if target != LOG {
            return None;
        }
        let mut own = None;
        self.rest.retain(|(name, value)| {
            if name == LOG_TARGET {
                own = value.as_str().map(str::to_owned);
            }
            !name.starts_with("log.")
        });
        own
    }
}

impl Visit for Fields {
    fn record_f64(&mut self, field: &Field, value: f64) {
        self.put(field.name(), Value::from(value));
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.put(field.name(), Value::from(value));
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.put(field.name(), Value::from(value));
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.put(field.name(), Value::from(value));
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.put(field.name(), Value::from(value));
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.put(field.name(), Value::from(format!("{value:?}")));
    }
}

struct Line<'a> {
    timestamp: Timestamp,
    level: &'a str,
    target: &'a str,
    fields: Fields,
}

impl Serialize for Line<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        map.serialize_entry("timestamp", &format_args!("{:.6}", self.timestamp))?;
        map.serialize_entry("level", self.level)?;
        map.serialize_entry("target", self.target)?;
        let none = Value::from("");
        map.serialize_entry(MESSAGE, self.fields.message.as_ref().unwrap_or(&none))?;
        for (name, value) in &self.fields.rest {
            map.serialize_entry(name, value)?;
        }
        map.end()
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::io;
    use std::sync::{Arc, Mutex};

    use serde_json::json;
    use tracing::{error_span, info, warn};
    use tracing_subscriber::layer::SubscriberExt as _;
    use tracing_subscriber::registry;

    use super::*;

    /// Returns the written text.
    fn written(process: &AboutProcess, says: impl FnOnce()) -> String {
        let written = Written::default();
        let to = written.clone();
        let layer = tracing_subscriber::fmt::layer()
            .with_writer(move || to.clone())
            .fmt_fields(JsonFields::new())
            .event_format(JsonLine {
                process: process.clone(),
            });
        tracing::subscriber::with_default(registry().with(layer), says);
        written.text()
    }

    /// Returns the resulting lines, each with its keys in order.
    fn lines(process: &AboutProcess, says: impl FnOnce()) -> Vec<(Value, Vec<String>)> {
        let text = written(process, says);
        let read = |line: &str| {
            let value: Value = serde_json::from_str(line).unwrap();
            // Each key occurs once: the text has as many as the object.
            let mut at: Vec<_> = value.as_object().unwrap().keys().collect();
            at.sort_by_key(|key| line.find(&format!("\"{key}\":")));
            let keys = at.into_iter().cloned().collect();
            (value, keys)
        };
        text.lines().map(read).collect()
    }

    #[test]
    fn line_merges_span_fields_and_innermost_wins() {
        let process = AboutProcess::default();
        process.put("program", "krypton-hub");
        process.put("member", "of the process");
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
        let text = written(&AboutProcess::default(), || {
            let span = error_span!("job", member = "a", later = tracing::field::Empty);
            span.record("later", "now");
            let _in = span.entered();
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
        assert_eq!(
            (
                &line["member"],
                &line["level"],
                &line["level_"],
                &line["later"]
            ),
            (
                &json!("b"),
                &json!("INFO"),
                &json!("of a field"),
                &json!("now")
            )
        );
    }

    #[test]
    fn message_with_control_characters_stays_one_line() {
        let said = "first\nsecond \"quoted\"\tand \u{1b}[31m";
        let lines = lines(&AboutProcess::default(), || {
            info!(problem = said, "{said}");
            info!(only = 1);
        });
        assert_eq!(lines.len(), 2);
        assert_eq!(lines[0].0["problem"], said);
        assert_eq!(lines[0].0["message"], said);
        assert_eq!(lines[1].0["message"], "");
    }

    #[test]
    fn log_crate_record_keeps_its_own_target() {
        let mut fields = Fields::default();
        for (name, value) in [
            (LOG_TARGET, "rustls::conn"),
            ("log.line", "7"),
            ("kept", "x"),
        ] {
            fields.put(name, Value::from(value));
        }
        assert_eq!(fields.of_log_crate("krypton"), None);
        assert_eq!(fields.of_log_crate(LOG).as_deref(), Some("rustls::conn"));
        assert_eq!(fields.rest, [("kept".to_owned(), json!("x"))]);
    }

    #[derive(Clone, Default)]
    pub(in super::super) struct Written(Arc<Mutex<Vec<u8>>>);

    impl Written {
        pub(in super::super) fn text(&self) -> String {
            String::from_utf8(self.0.lock().unwrap().clone()).unwrap()
        }
    }

    impl io::Write for Written {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
}
