//! The observations of a simulation, for oracles and traces.

use std::fmt;

use krypton_sim_apiserver::server::Change;

use crate::plan::Action;
use crate::time::Millis;

/// Start of the text of an observation that reports the end of a fault.
pub const END_PREFIX: &str = "end of ";

/// Something that happened at a time.
#[derive(Clone, Debug)]
pub struct Observation {
    /// Milliseconds since the start of the simulation.
    pub at: Millis,
    pub event: Event,
}

#[derive(Clone, Debug)]
pub enum Event {
    /// A cluster's store changed.
    Change {
        cluster: String,
        change: Change,
    },
    /// A cluster's API server answered a request. `host` sent it, as its `nth` one.
    Responded {
        host: String,
        nth: u32,
        cluster: String,
        method: String,
        path: String,
        code: u16,
        /// Whether a fault responded in place of the API server, which did nothing.
        from_fault: bool,
    },
    /// A request or its response was lost.
    RequestLost {
        host: String,
        cluster: String,
        method: String,
        path: String,
    },
    HelmStarted {
        run: u64,
        host: String,
        arguments: Vec<String>,
    },
    HelmEnded {
        run: u64,
        host: String,
        end: HelmEnd,
    },
    ProcessStarted {
        host: String,
    },
    /// A process exited without a request or a fault.
    ProcessEnded {
        host: String,
        error: Option<String>,
    },
    /// A process ended after SIGTERM, or was killed because it did not.
    ProcessStopped {
        host: String,
        in_time: bool,
    },
    ProcessPanicked {
        host: String,
        message: String,
    },
    /// A fault or an action of a user.
    Fault {
        text: String,
    },
    Log {
        host: String,
        line: String,
    },
}

impl Event {
    /// The fault or action of a user that this event reports, and whether it reports the end.
    pub fn action(&self) -> Option<(Action, bool)> {
        let Self::Fault { text } = self else {
            return None;
        };
        let ended = text.strip_prefix(END_PREFIX);
        Some((ended.unwrap_or(text).parse().ok()?, ended.is_some()))
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HelmEnd {
    Exited { code: i32, stderr: String },
    Killed,
}

impl fmt::Display for Observation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (seconds, millis) = (self.at / 1000, self.at % 1000);
        write!(f, "{seconds:>5}.{millis:03} ")?;
        match &self.event {
            Event::Change { cluster, change } => {
                let key = &change.key;
                let verb = match (&change.before, &change.after) {
                    (None, _) => "created",
                    (_, None) => "deleted",
                    _ => "changed",
                };
                let (resource, namespace, name) = (&key.resource, &key.namespace, &key.name);
                write!(
                    f,
                    "{:<10} {cluster}  {resource}/{namespace}/{name} {verb}",
                    ""
                )?;
                match change.subresource.as_str() {
                    "" => write!(f, " rv={} by {}", change.revision, change.by),
                    sub => write!(f, " ({sub}) rv={} by {}", change.revision, change.by),
                }
            }
            Event::Responded {
                host,
                nth,
                cluster,
                method,
                path,
                code,
                ..
            } => write!(
                f,
                "{host:<10} -> {cluster}  {method} {path}  {code}  #{nth}"
            ),
            Event::RequestLost {
                host,
                cluster,
                method,
                path,
            } => write!(f, "{host:<10} -> {cluster}  {method} {path}  lost"),
            Event::HelmStarted {
                run,
                host,
                arguments,
            } => write!(
                f,
                "{host:<10} helm {run} starts: {}",
                without_paths(arguments)
            ),
            Event::HelmEnded { run, host, end } => match end {
                HelmEnd::Exited { code, stderr } => {
                    write!(f, "{host:<10} helm {run} exits with {code} {stderr}")
                }
                HelmEnd::Killed => write!(f, "{host:<10} helm {run} is killed"),
            },
            Event::ProcessStarted { host } => write!(f, "{host:<10} starts"),
            Event::ProcessEnded { host, error } => {
                let error = error.as_deref().unwrap_or("without an error");
                write!(f, "{host:<10} ends: {error}")
            }
            Event::ProcessStopped { host, in_time } => {
                let result = if *in_time { "stops" } else { "does not stop" };
                write!(f, "{host:<10} {result}")
            }
            Event::ProcessPanicked { host, message } => write!(f, "{host:<10} panics: {message}"),
            Event::Fault { text } => write!(f, "{:<10} {text}", "fault"),
            Event::Log { host, line } => write!(f, "{host:<10} {line}"),
        }
    }
}

/// The verb of a Helm run with its flags, without paths, whose names are random.
fn without_paths(arguments: &[String]) -> String {
    let words = arguments
        .iter()
        .filter(|argument| !argument.starts_with('/'));
    words.map(String::as_str).collect::<Vec<_>>().join(" ")
}
