//! The cases that a simulated and a real API server must answer alike.
//!
//! A case sends raw HTTP requests and deletes the objects that it creates. Its transcript contains no value that differs
//! between two runs. The folder `recorded` contains the transcripts of a real API server, one file for each topic.
//! An end-to-end test compares them with a real server and rewrites them if `WRITE_CONFORMANCE` is set.

#[cfg(test)]
mod calls;
mod normalize;
pub mod recorded;
mod run;
pub mod simulated;

mod apply;
mod clients;
mod controllers;
mod custom;
mod discovery;
mod kinds;
mod lists;
mod objects;
mod requests;
mod schema;
mod watches;

use std::fmt;
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response};
use serde_json::Value;

pub use run::CaseRun;

/// An API server as the cases use it. An error is a failure of the transport.
pub trait Server {
    /// Sends a request and reads the whole response.
    fn send(&mut self, request: Request<Bytes>) -> Result<Response<Bytes>, String>;

    /// Sends a request for a watch.
    fn watch(&mut self, request: Request<Bytes>) -> Result<Opened, String>;

    /// Reads the next line of a watch. Waits for at most `limit`.
    fn next_line(&mut self, watch: usize, limit: Duration) -> Result<Line, String>;

    /// Closes a watch.
    fn close(&mut self, watch: usize);

    /// Lets time pass.
    fn pass(&mut self, time: Duration);
}

/// The response to a request for a watch.
#[derive(Debug)]
pub enum Opened {
    /// The head of the response and the number of the watch.
    Watch(Response<()>, usize),
    /// The server has rejected the request.
    Rejected(Response<Bytes>),
}

/// The next part of a watch.
#[derive(Debug)]
pub enum Line {
    Text(String),
    /// The server has ended the response.
    End,
    /// The limit has passed.
    Silence,
}

type CaseFunction = fn(&mut CaseRun<'_>);

/// One case of the table.
#[derive(Clone, Copy)]
pub struct Case {
    pub topic: &'static str,
    pub name: &'static str,
    function: CaseFunction,
}

impl fmt::Debug for Case {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}/{}", self.topic, self.name)
    }
}

impl Case {
    /// Runs this case and returns its normalized transcript.
    pub fn run(&self, server: &mut dyn Server) -> Value {
        let mut run = CaseRun::new(server, self.name);
        (self.function)(&mut run);
        run.finish()
    }
}

/// Lists functions as cases, with their names.
macro_rules! table {
    ($($name:ident),+ $(,)?) => {
        pub(super) const CASES: &[(&str, super::CaseFunction)] = &[$((stringify!($name), $name)),+];
    };
}
use table;

const TOPICS: &[(&str, &[(&str, CaseFunction)])] = &[
    ("objects", objects::CASES),
    ("requests", requests::CASES),
    ("lists", lists::CASES),
    ("watches", watches::CASES),
    ("custom", custom::CASES),
    ("apply", apply::CASES),
    ("kinds", kinds::CASES),
    ("controllers", controllers::CASES),
    ("clients", clients::CASES),
    ("discovery", discovery::CASES),
];

/// Returns all cases, in order.
pub fn cases() -> Vec<Case> {
    let cases = TOPICS.iter().flat_map(|(topic, cases)| {
        cases.iter().map(move |(name, function)| Case {
            topic,
            name,
            function: *function,
        })
    });
    cases.collect()
}

#[cfg(test)]
mod tests {
    use super::{cases, recorded, simulated::Simulated};

    /// Cases in which the simulated server still differs. A case that agrees must leave the list.
    const DIFFERING: [&str; 3] = [
        // The message names a line of the server's code.
        "metadata_patch",
        // The order of checks of an invalid apply patch, and YAML.
        "apply_rejected",
        // The generation of a new Pod.
        "pod_labels",
    ];

    #[test]
    fn simulated_server_answers_as_recorded() {
        let recorded = recorded::read().unwrap();
        let mut server = Simulated::new();
        let only = std::env::var("CONFORMANCE_CASE").unwrap_or_default();
        let differing: Vec<String> = cases()
            .iter()
            .filter(|case| case.name.contains(&only) && !DIFFERING.contains(&case.name))
            .filter_map(|case| recorded::difference(case, &recorded, &case.run(&mut server)))
            .collect();
        let count = differing.len();
        assert!(count == 0, "{}\n{count} cases differ", differing.join("\n"));
    }

    #[test]
    fn listed_cases_still_differ() {
        let recorded = recorded::read().unwrap();
        let mut server = Simulated::new();
        for case in cases().iter().filter(|case| DIFFERING.contains(&case.name)) {
            let difference = recorded::difference(case, &recorded, &case.run(&mut server));
            assert!(
                difference.is_some(),
                "{case:?} agrees; remove it from the list"
            );
        }
    }

    #[test]
    fn every_recording_belongs_to_a_case() {
        let known: Vec<_> = cases().iter().map(|case| (case.topic, case.name)).collect();
        for (topic, transcripts) in recorded::read().unwrap() {
            for (name, _) in transcripts {
                assert!(
                    known.contains(&(topic.as_str(), name.as_str())),
                    "{topic}/{name}"
                );
            }
        }
        assert!(known.len() >= 80, "{}", known.len());
    }
}
