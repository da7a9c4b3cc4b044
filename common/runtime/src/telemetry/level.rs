//! Log filter of the process, and its changes at runtime.

use std::fmt;
use std::sync::Arc;

use jiff::Timestamp;
use parking_lot::Mutex;
use tracing::subscriber::Interest;
use tracing::{Metadata, Subscriber};
use tracing_subscriber::Registry;
use tracing_subscriber::filter::{LevelFilter, ParseError, Targets};
use tracing_subscriber::layer::{Context, Filter};
use tracing_subscriber::reload::Handle;

/// kube logs each failed call at ERROR, and an invalid response with its full content. The caller logs the
/// error with its context.
const KUBE_CALLS: &str = "kube_client::client";

/// Maximum length of a filter. Longer texts are not written by users.
const FILTER_MAX: usize = 4096;

/// Why a filter was rejected. The previous filter stays.
#[derive(Debug, thiserror::Error)]
pub enum FilterError {
    #[error(
        "not a log filter: write a level (error, warn, info, debug, trace, off), or target=level pairs, with commas between"
    )]
    Invalid,
    #[error(
        "{KUBE_CALLS} cannot be enabled at run time, because its lines can contain Secrets from API server responses; set RUST_LOG at startup"
    )]
    KubeCalls,
    #[error("logging has ended")]
    Ended,
}

/// Parses a filter. Keeps kube's own messages off unless the filter names them.
///
/// # Errors
/// Returns an error if a part is neither a level nor a target.
pub(super) fn targets(text: &str) -> Result<Targets, ParseError> {
    let targets: Targets = text.parse()?;
    let names_kube_calls = text.split(',').any(|part| part.contains(KUBE_CALLS));
    Ok(if names_kube_calls {
        targets
    } else {
        targets.with_target(KUBE_CALLS, LevelFilter::OFF)
    })
}

/// The log filter. It always enables Krypton's spans, because log events of other crates use their fields.
#[derive(Debug)]
pub(super) struct LogFilter(pub(super) Targets);

impl LogFilter {
    fn is_our_span(metadata: &Metadata<'_>) -> bool {
        metadata.is_span() && metadata.target().starts_with("krypton")
    }
}

impl<S: Subscriber> Filter<S> for LogFilter {
    fn enabled(&self, metadata: &Metadata<'_>, context: &Context<'_, S>) -> bool {
        Self::is_our_span(metadata) || Filter::enabled(&self.0, metadata, context)
    }

    fn callsite_enabled(&self, metadata: &'static Metadata<'static>) -> Interest {
        if Self::is_our_span(metadata) {
            Interest::always()
        } else {
            Filter::<S>::callsite_enabled(&self.0, metadata)
        }
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        // Krypton's spans have level ERROR.
        Filter::<S>::max_level_hint(&self.0).map(|level| level.max(LevelFilter::ERROR))
    }
}

/// Changes the log filter. Clones share their state.
#[derive(Clone, Debug)]
pub struct LogLevel {
    handle: Handle<LogFilter, Registry>,
    state: Arc<Mutex<State>>,
}

#[derive(Debug)]
struct State {
    /// The filter at startup.
    start: String,
    current: String,
    until: Option<Timestamp>,
    change_count: u64,
}

/// Identity of a change. The next change ends it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FilterChange(u64);

/// The current filter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FilterStatus {
    pub filter: String,
    /// When the filter ends, and the filter that follows.
    pub until: Option<(Timestamp, String)>,
}

impl fmt::Display for FilterStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.until {
            None => f.write_str(&self.filter),
            Some((until, after)) => write!(f, "{} until {until:.0}, then {after}", self.filter),
        }
    }
}

impl LogLevel {
    pub(super) fn new(handle: Handle<LogFilter, Registry>, start: &str) -> Self {
        let state = State {
            start: start.to_owned(),
            current: start.to_owned(),
            until: None,
            change_count: 0,
        };
        Self {
            handle,
            state: Arc::new(Mutex::new(state)),
        }
    }

    pub fn current(&self) -> FilterStatus {
        let state = self.state.lock();
        FilterStatus {
            filter: state.current.clone(),
            until: state.until.map(|until| (until, state.start.clone())),
        }
    }

    /// Replaces the filter. `until` is only for display: the caller must call [`Self::end`] at that time.
    /// Calls `before_change` right before the change, because the new filter may suppress all messages.
    ///
    /// # Errors
    /// Returns an error if the filter is invalid or names kube's calls. Also rejects a bare word that is not
    /// a level: as a target, it would enable all its messages and disable all other targets.
    pub fn set(
        &self,
        filter: &str,
        until: Option<Timestamp>,
        before_change: impl FnOnce(&FilterStatus),
    ) -> Result<FilterChange, FilterError> {
        let filter = filter.trim();
        // The parser would read an empty part as `error`.
        let is_level = |part: &str| !part.is_empty() && part.parse::<LevelFilter>().is_ok();
        let is_valid = |part: &str| is_level(part.trim()) || part.contains('=');
        if filter.len() > FILTER_MAX || !filter.split(',').all(is_valid) {
            return Err(FilterError::Invalid);
        }
        if filter.contains(KUBE_CALLS) {
            return Err(FilterError::KubeCalls);
        }
        let targets = targets(filter).map_err(|_| FilterError::Invalid)?;
        before_change(&FilterStatus {
            filter: filter.to_owned(),
            until: until.map(|until| (until, self.state.lock().start.clone())),
        });
        let mut state = self.state.lock();
        self.reload(targets)?;
        state.current = filter.to_owned();
        state.until = until;
        state.change_count += 1;
        Ok(FilterChange(state.change_count))
    }

    /// Restores the startup filter unless another change has replaced `change`. Returns whether it did.
    pub fn end(&self, change: FilterChange) -> bool {
        let mut state = self.state.lock();
        if state.change_count != change.0 {
            return false;
        }
        // The startup filter was parsed successfully before.
        let result = targets(&state.start).map(|targets| self.reload(targets));
        state.current = state.start.clone();
        state.until = None;
        matches!(result, Ok(Ok(())))
    }

    fn reload(&self, targets: Targets) -> Result<(), FilterError> {
        let result = self.handle.reload(LogFilter(targets));
        result.map_err(|_| FilterError::Ended)
    }
}

#[cfg(test)]
mod tests {
    use tracing_subscriber::layer::{Layer as _, SubscriberExt as _};
    use tracing_subscriber::{registry, reload};

    use super::super::json_line::tests::LogBuffer;
    use super::*;

    fn test_log(start: &str) -> (LogLevel, LogBuffer, impl Subscriber + Send + Sync + use<>) {
        let (filter, handle) = reload::Layer::new(LogFilter(targets(start).unwrap()));
        let buffer = LogBuffer::default();
        let writer = buffer.clone();
        let lines = tracing_subscriber::fmt::layer()
            .without_time()
            .with_ansi(false)
            .with_writer(move || writer.clone());
        let subscriber = registry().with(lines.with_filter(filter));
        (LogLevel::new(handle, start), buffer, subscriber)
    }

    #[test]
    fn only_newest_log_filter_can_end() {
        let (level, buffer, subscriber) = test_log("info");
        tracing::subscriber::with_default(subscriber, || {
            let log = |text: &str| tracing::debug!("{text}");
            log("before");
            let until = Timestamp::from_second(1_800_000_000).unwrap();
            let first = level.set(" debug\n", Some(until), |_| {}).unwrap();
            log("first");
            assert_eq!(
                level.current().to_string(),
                "debug until 2027-01-15T08:00:00Z, then info"
            );
            let second = level
                .set("krypton_runtime=debug,warn", None, |_| {})
                .unwrap();
            log("second");
            assert_eq!(level.current().to_string(), "krypton_runtime=debug,warn");
            assert!(!level.end(first));
            log("still");
            assert!(level.end(second));
            log("after");
            assert_eq!(level.current().to_string(), "info");
        });
        let messages: Vec<_> = buffer.text().lines().map(last_word).collect();
        assert_eq!(messages, ["first", "second", "still"]);
    }

    #[test]
    fn invalid_filter_keeps_current_one() {
        let (level, ..) = test_log("info");
        let long = "a=info,".repeat(1000);
        for text in ["", "loud", "krypton_hub", "krypton_hub=loud", &long] {
            assert!(
                matches!(level.set(text, None, |_| {}), Err(FilterError::Invalid)),
                "{text}"
            );
        }
        assert_eq!(level.current().to_string(), "info");
    }

    #[test]
    fn logging_off_is_logged_and_kube_calls_rejected() {
        let (level, buffer, subscriber) = test_log("info");
        tracing::subscriber::with_default(subscriber, || {
            let before_change = |status: &FilterStatus| tracing::warn!("now {status}");
            level.set("off", None, before_change).unwrap();
            tracing::error!("silenced");
            let calls = level.set(
                "info,kube_client::client::builder=debug",
                None,
                before_change,
            );
            assert!(matches!(calls, Err(FilterError::KubeCalls)));
        });
        let text = buffer.text();
        assert_eq!(text.lines().map(last_word).collect::<Vec<_>>(), ["off"]);
    }

    #[test]
    fn own_spans_label_foreign_lines_under_any_filter() {
        let (level, buffer, subscriber) = test_log("off");
        tracing::subscriber::with_default(subscriber, || {
            level.set("kube=info", None, |_| {}).unwrap();
            let _span = tracing::error_span!("member", member = "edge-1").entered();
            tracing::info!(target: "kube", "theirs");
            tracing::error!("ours");
        });
        let text = buffer.text();
        assert!(
            text.contains("member{member=\"edge-1\"}: kube: theirs"),
            "{text}"
        );
        assert!(!text.contains("ours"), "{text}");
    }

    #[test]
    fn kube_calls_are_logged_only_on_explicit_request() {
        let enables_kube_calls = |text: &str| {
            let targets = targets(text).unwrap();
            targets.would_enable(KUBE_CALLS, &tracing::Level::ERROR)
        };
        assert!(!enables_kube_calls("trace"));
        assert!(!enables_kube_calls("kube_client=debug"));
        assert!(enables_kube_calls(
            "info,kube_client::client::builder=debug"
        ));
    }

    fn last_word(line: &str) -> String {
        line.rsplit(' ').next().unwrap_or_default().to_owned()
    }
}
