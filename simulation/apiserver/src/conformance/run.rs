//! Executes the requests of one case and records its transcript.

use std::time::Duration;

use bytes::Bytes;
use http::header::{ACCEPT, CONTENT_TYPE, USER_AGENT, WARNING};
use http::{HeaderMap, Request};
use serde_json::{Map, Value, json};

use super::normalize;
use super::{Line, Opened, Server};

pub(super) const JSON: &str = "application/json";
pub(super) const MERGE: &str = "application/merge-patch+json";
pub(super) const APPLY: &str = "application/apply-patch+yaml";
pub(super) const METADATA: &str = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1";
pub(super) const METADATA_LIST: &str =
    "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1";

/// Limit of a wait and of an expected event. A controller of a real control plane can need seconds.
const LIMIT: Duration = Duration::from_secs(60);
const POLL: Duration = Duration::from_millis(100);
/// Time in which a watch must stay silent.
const SILENCE: Duration = Duration::from_millis(700);

/// A request of a case.
#[derive(Clone, Debug)]
pub(super) struct Call {
    method: &'static str,
    path: String,
    accept: &'static str,
    content_type: &'static str,
    body: Option<Bytes>,
    only: Vec<String>,
}

impl Call {
    pub(super) fn new(method: &'static str, path: impl Into<String>) -> Self {
        Self {
            method,
            path: path.into(),
            accept: JSON,
            content_type: JSON,
            body: None,
            only: Vec::new(),
        }
    }

    pub(super) fn accept(mut self, accept: &'static str) -> Self {
        self.accept = accept;
        self
    }

    pub(super) fn content_type(mut self, content_type: &'static str) -> Self {
        self.content_type = content_type;
        self
    }

    pub(super) fn body(self, body: &Value) -> Self {
        self.text(body.to_string())
    }

    pub(super) fn text(mut self, body: impl Into<Bytes>) -> Self {
        self.body = Some(body.into());
        self
    }

    /// Restricts the recorded body to these JSON pointers. For documents that a simulation doesn't copy in full.
    pub(super) fn only(mut self, pointers: &[&str]) -> Self {
        self.only = pointers
            .iter()
            .map(|pointer| (*pointer).to_owned())
            .collect();
        self
    }
}

/// An open watch of a case.
#[derive(Clone, Copy, Debug)]
pub(super) struct Watch {
    /// Number in the transcript, from 1.
    number: usize,
    /// Number at the server, unless it rejected the watch.
    open: Option<usize>,
}

/// One case in progress.
pub struct Run<'a> {
    server: &'a mut dyn Server,
    namespace: String,
    steps: Vec<Value>,
    is_quiet: bool,
    keeps_managers: bool,
    watches: Vec<Watch>,
    /// Paths of cluster-scoped objects to delete at the end.
    made: Vec<String>,
}

impl std::fmt::Debug for Run<'_> {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "run in {}", self.namespace)
    }
}

impl<'a> Run<'a> {
    pub(super) fn new(server: &'a mut dyn Server, case: &str) -> Self {
        let namespace = case.replace('_', "-");
        let mut run = Self {
            server,
            steps: Vec::new(),
            is_quiet: false,
            keeps_managers: false,
            watches: Vec::new(),
            made: vec![format!("/api/v1/namespaces/{namespace}")],
            namespace,
        };
        let name = run.namespace.clone();
        let create =
            Call::new("POST", "/api/v1/namespaces").body(&json!({"metadata": {"name": name}}));
        // A previous run of the table can still be deleting the namespace.
        run.quietly(|run| run.wait(create, |made| made.pointer("/metadata/uid").is_some()));
        run
    }

    /// Deletes the remaining objects and returns the transcript.
    pub(super) fn finish(mut self) -> Value {
        for watch in std::mem::take(&mut self.watches) {
            if let Some(open) = watch.open {
                self.server.close(open);
            }
        }
        self.is_quiet = true;
        while let Some(path) = self.made.pop() {
            self.delete(&path, &json!({}));
        }
        normalize::transcript(self.steps, self.keeps_managers)
    }

    /// The namespace of this case. `:ns` stands for it in paths.
    pub(super) fn namespace(&self) -> &str {
        &self.namespace
    }

    /// Keeps `managedFields` in the transcript.
    pub(super) fn keep_managers(&mut self) {
        self.keeps_managers = true;
    }

    /// Deletes a cluster-scoped object at the end of the case.
    pub(super) fn delete_later(&mut self, path: &str) {
        self.made.push(path.to_owned());
    }

    /// Sends requests that the transcript omits.
    pub(super) fn quietly<T>(&mut self, requests: impl FnOnce(&mut Self) -> T) -> T {
        let before = std::mem::replace(&mut self.is_quiet, true);
        let result = requests(self);
        self.is_quiet = before;
        result
    }

    pub(super) fn get(&mut self, path: &str) -> Value {
        self.send(Call::new("GET", path))
    }

    pub(super) fn post(&mut self, path: &str, body: &Value) -> Value {
        self.send(Call::new("POST", path).body(body))
    }

    pub(super) fn put(&mut self, path: &str, body: &Value) -> Value {
        self.send(Call::new("PUT", path).body(body))
    }

    pub(super) fn merge(&mut self, path: &str, patch: &Value) -> Value {
        self.send(Call::new("PATCH", path).content_type(MERGE).body(patch))
    }

    pub(super) fn apply(&mut self, path: &str, object: &Value) -> Value {
        self.send(Call::new("PATCH", path).content_type(APPLY).body(object))
    }

    pub(super) fn delete(&mut self, path: &str, options: &Value) -> Value {
        self.send(Call::new("DELETE", path).body(options))
    }

    /// Sends a request, records it with its response and returns the raw body.
    pub(super) fn send(&mut self, call: Call) -> Value {
        let (step, body) = self.exchange(&call);
        self.record(step);
        body
    }

    /// Like `send`, but replaces the numbers in the recorded pointers, which depend on the kinds that the server has.
    pub(super) fn send_renumbered(&mut self, call: Call) -> Value {
        let (mut step, body) = self.exchange(&call);
        if let Some(Value::Object(parts)) = step.get_mut("response") {
            let named = std::mem::take(parts).into_iter().map(|(pointer, part)| {
                let name = ["name", "resource"]
                    .iter()
                    .find_map(|key| part.get(*key)?.as_str());
                let name = name.or_else(|| part.pointer("/metadata/name")?.as_str());
                (name.map_or(without_numbers(&pointer), str::to_owned), part)
            });
            *parts = named.collect();
        }
        self.record(step);
        body
    }

    /// Repeats a request until the body satisfies the condition. Records only the last response.
    pub(super) fn wait(&mut self, call: impl Into<Call>, done: impl Fn(&Value) -> bool) -> Value {
        let call = call.into();
        let mut left = LIMIT;
        loop {
            let (step, body) = self.exchange(&call);
            let is_done = done(&body);
            if is_done || left.is_zero() || step.get("failure").is_some() {
                if !is_done {
                    self.fail(format!("{} never satisfied the condition", call.path));
                }
                self.record(step);
                return body;
            }
            self.server.pass(POLL);
            left = left.saturating_sub(POLL);
        }
    }

    /// Opens a watch and records the head of the response.
    pub(super) fn watch(&mut self, call: impl Into<Call>) -> Watch {
        let call = call.into();
        let number = self.watches.len() + 1;
        let mut step = self.describe(&call);
        step.insert("watch".to_owned(), json!(number));
        let opened = self
            .request(&call)
            .and_then(|request| self.server.watch(request));
        let open = match opened {
            Ok(Opened::Watch(head, open)) => {
                step.insert("status".to_owned(), json!(head.status().as_u16()));
                headers(&mut step, head.headers());
                Some(open)
            }
            Ok(Opened::Rejected(response)) => {
                step.insert("status".to_owned(), json!(response.status().as_u16()));
                headers(&mut step, response.headers());
                step.insert("response".to_owned(), parse(response.body()));
                None
            }
            Err(failure) => {
                self.fail(failure);
                None
            }
        };
        let watch = Watch { number, open };
        self.watches.push(watch);
        self.record(Value::Object(step));
        watch
    }

    /// Reads and records the next event.
    pub(super) fn event(&mut self, watch: Watch) -> Value {
        let event = self.line(watch, LIMIT);
        self.record(json!({"watch": watch.number, "event": event}));
        event
    }

    /// Reads and records this number of events.
    pub(super) fn events(&mut self, watch: Watch, count: usize) {
        for _ in 0..count {
            self.event(watch);
        }
    }

    /// Reads this number of events and records them by name. For the initial events of a watch, which have no order.
    pub(super) fn initial_events(&mut self, watch: Watch, count: usize) {
        let mut events: Vec<Value> = (0..count).map(|_| self.line(watch, LIMIT)).collect();
        events.sort_by_key(|event| event.pointer("/object/metadata/name").map(Value::to_string));
        for event in events {
            self.record(json!({"watch": watch.number, "event": event}));
        }
    }

    /// Reads and records events up to one that satisfies the condition.
    pub(super) fn events_until(&mut self, watch: Watch, last: impl Fn(&Value) -> bool) -> Value {
        for _ in 0..100 {
            let event = self.event(watch);
            if last(&event) || event.is_string() {
                return event;
            }
        }
        Value::Null
    }

    /// Records that the watch has no event to send.
    pub(super) fn silence(&mut self, watch: Watch) {
        let event = self.line(watch, SILENCE);
        self.record(json!({"watch": watch.number, "event": event}));
    }

    fn line(&mut self, watch: Watch, limit: Duration) -> Value {
        let Some(open) = watch.open else {
            return json!("rejected");
        };
        match self.server.next_line(open, limit) {
            Ok(Line::Text(line)) => parse(line.as_bytes()),
            Ok(Line::End) => json!("end"),
            Ok(Line::Silence) => json!("silence"),
            Err(failure) => json!(failure),
        }
    }

    fn exchange(&mut self, call: &Call) -> (Value, Value) {
        let mut step = self.describe(call);
        let sent = self
            .request(call)
            .and_then(|request| self.server.send(request));
        let body = match sent {
            Ok(response) => {
                step.insert("status".to_owned(), json!(response.status().as_u16()));
                headers(&mut step, response.headers());
                let body = parse(response.body());
                step.insert("response".to_owned(), restrict(&body, &call.only));
                body
            }
            Err(failure) => {
                step.insert("failure".to_owned(), json!(failure));
                Value::Null
            }
        };
        (Value::Object(step), body)
    }

    fn describe(&self, call: &Call) -> Map<String, Value> {
        let mut step = Map::new();
        let request = format!("{} {}", call.method, self.path(call));
        step.insert("request".to_owned(), json!(request));
        if call.accept != JSON {
            step.insert("accept".to_owned(), json!(call.accept));
        }
        if let Some(body) = &call.body {
            if call.content_type != JSON {
                step.insert("sends".to_owned(), json!(call.content_type));
            }
            step.insert("body".to_owned(), parse(body));
        }
        step
    }

    fn path(&self, call: &Call) -> String {
        call.path.replace(":ns", &self.namespace)
    }

    fn request(&self, call: &Call) -> Result<Request<Bytes>, String> {
        let mut request = Request::builder()
            .method(call.method)
            .uri(self.path(call))
            .header(ACCEPT, call.accept)
            .header(USER_AGENT, "conformance");
        if call.body.is_some() {
            request = request.header(CONTENT_TYPE, call.content_type);
        }
        let body = call.body.clone().unwrap_or_default();
        request.body(body).map_err(|error| error.to_string())
    }

    fn record(&mut self, step: Value) {
        if !self.is_quiet {
            self.steps.push(step);
        }
    }

    fn fail(&mut self, failure: String) {
        self.steps.push(json!({"failure": failure}));
    }
}

impl From<&str> for Call {
    fn from(path: &str) -> Self {
        Self::new("GET", path)
    }
}

impl From<String> for Call {
    fn from(path: String) -> Self {
        Self::new("GET", path)
    }
}

/// Records the headers that clients read. The others depend on the server's configuration.
fn headers(step: &mut Map<String, Value>, headers: &HeaderMap) {
    for (name, key) in [(CONTENT_TYPE, "type"), (WARNING, "warning")] {
        let value = headers.get(name).and_then(|value| value.to_str().ok());
        if let Some(value) = value.filter(|value| *value != JSON) {
            step.insert(key.to_owned(), json!(value));
        }
    }
}

/// A JSON document, or any other text as a string.
fn parse(body: &[u8]) -> Value {
    serde_json::from_slice(body)
        .unwrap_or_else(|_| Value::String(String::from_utf8_lossy(body).into_owned()))
}

fn restrict(body: &Value, only: &[String]) -> Value {
    if only.is_empty() {
        return body.clone();
    }
    let parts = only.iter().map(|pointer| {
        let part = body.pointer(pointer).cloned().unwrap_or_default();
        (pointer.clone(), part)
    });
    Value::Object(parts.collect())
}

fn without_numbers(pointer: &str) -> String {
    let steps = pointer.split('/').map(|step| {
        let is_number = step.bytes().all(|byte| byte.is_ascii_digit()) && !step.is_empty();
        if is_number { "*" } else { step }
    });
    steps.collect::<Vec<_>>().join("/")
}
