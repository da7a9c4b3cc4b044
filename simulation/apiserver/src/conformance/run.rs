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
pub(super) struct CaseWatch {
    /// Number in the transcript, from 1.
    number: usize,
    /// Number at the server, unless it rejected the watch.
    server_id: Option<usize>,
}

/// One case in progress.
pub struct CaseRun<'a> {
    server: &'a mut dyn Server,
    namespace: String,
    steps: Vec<Value>,
    is_unrecorded: bool,
    keeps_managed_fields: bool,
    watches: Vec<CaseWatch>,
    /// Paths of cluster-scoped objects to delete at the end.
    cleanup_paths: Vec<String>,
}

impl std::fmt::Debug for CaseRun<'_> {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "run in {}", self.namespace)
    }
}

impl<'a> CaseRun<'a> {
    pub(super) fn new(server: &'a mut dyn Server, case: &str) -> Self {
        let namespace = case.replace('_', "-");
        let mut run = Self {
            server,
            steps: Vec::new(),
            is_unrecorded: false,
            keeps_managed_fields: false,
            watches: Vec::new(),
            cleanup_paths: vec![format!("/api/v1/namespaces/{namespace}")],
            namespace,
        };
        let name = run.namespace.clone();
        let create =
            Call::new("POST", "/api/v1/namespaces").body(&json!({"metadata": {"name": name}}));
        // A previous run of the table can still be deleting the namespace.
        run.unrecorded(|run| run.wait(create, |body| body.pointer("/metadata/uid").is_some()));
        run
    }

    /// Deletes the remaining objects and returns the transcript.
    pub(super) fn finish(mut self) -> Value {
        for watch in std::mem::take(&mut self.watches) {
            if let Some(server_id) = watch.server_id {
                self.server.close(server_id);
            }
        }
        self.is_unrecorded = true;
        while let Some(path) = self.cleanup_paths.pop() {
            self.delete(&path, &json!({}));
        }
        normalize::transcript(self.steps, self.keeps_managed_fields)
    }

    /// The namespace of this case. `:ns` stands for it in paths.
    pub(super) fn namespace(&self) -> &str {
        &self.namespace
    }

    /// Keeps `managedFields` in the transcript.
    pub(super) fn keep_managed_fields(&mut self) {
        self.keeps_managed_fields = true;
    }

    /// Deletes a cluster-scoped object at the end of the case.
    pub(super) fn delete_at_end(&mut self, path: &str) {
        self.cleanup_paths.push(path.to_owned());
    }

    /// Sends requests that the transcript omits.
    pub(super) fn unrecorded<T>(&mut self, requests: impl FnOnce(&mut Self) -> T) -> T {
        let previous = std::mem::replace(&mut self.is_unrecorded, true);
        let result = requests(self);
        self.is_unrecorded = previous;
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
        if let Some(Value::Object(fields)) = step.get_mut("response") {
            let renamed = std::mem::take(fields).into_iter().map(|(pointer, value)| {
                let name = ["name", "resource"]
                    .iter()
                    .find_map(|key| value.get(*key)?.as_str());
                let name = name.or_else(|| value.pointer("/metadata/name")?.as_str());
                (name.map_or(without_numbers(&pointer), str::to_owned), value)
            });
            *fields = renamed.collect();
        }
        self.record(step);
        body
    }

    /// Repeats a request until the body satisfies the condition. Records only the last response.
    pub(super) fn wait(
        &mut self,
        call: impl Into<Call>,
        is_satisfied: impl Fn(&Value) -> bool,
    ) -> Value {
        let call = call.into();
        let mut remaining = LIMIT;
        loop {
            let (step, body) = self.exchange(&call);
            let is_last = is_satisfied(&body);
            if is_last || remaining.is_zero() || step.get("failure").is_some() {
                if !is_last {
                    self.fail(format!("{} never satisfied the condition", call.path));
                }
                self.record(step);
                return body;
            }
            self.server.pass(POLL);
            remaining = remaining.saturating_sub(POLL);
        }
    }

    /// Waits until a list of version zero has this many objects. The cache of a real server, from which the list and a
    /// watch of version zero start, can lag behind the last write.
    pub(super) fn wait_for_cache(&mut self, collection: &str, count: usize) {
        let has_all = |list: &Value| {
            let items = list.get("items").and_then(Value::as_array);
            items.is_some_and(|items| items.len() == count)
        };
        let path = format!("{collection}?resourceVersion=0");
        self.unrecorded(|run| run.wait(path, has_all));
    }

    /// Opens a watch and records the head of the response.
    pub(super) fn watch(&mut self, call: impl Into<Call>) -> CaseWatch {
        let call = call.into();
        let number = self.watches.len() + 1;
        let mut step = self.describe(&call);
        step.insert("watch".to_owned(), json!(number));
        let opened = self
            .request(&call)
            .and_then(|request| self.server.watch(request));
        let server_id = match opened {
            Ok(Opened::Watch(head, server_id)) => {
                step.insert("status".to_owned(), json!(head.status().as_u16()));
                record_headers(&mut step, head.headers());
                Some(server_id)
            }
            Ok(Opened::Rejected(response)) => {
                step.insert("status".to_owned(), json!(response.status().as_u16()));
                record_headers(&mut step, response.headers());
                step.insert("response".to_owned(), parse(response.body()));
                None
            }
            Err(failure) => {
                self.fail(failure);
                None
            }
        };
        let watch = CaseWatch { number, server_id };
        self.watches.push(watch);
        self.record(Value::Object(step));
        watch
    }

    /// Reads and records the next event.
    pub(super) fn event(&mut self, watch: CaseWatch) -> Value {
        let event = self.read_event(watch, LIMIT);
        self.record(json!({"watch": watch.number, "event": event}));
        event
    }

    /// Reads and records this number of events.
    pub(super) fn events(&mut self, watch: CaseWatch, count: usize) {
        for _ in 0..count {
            self.event(watch);
        }
    }

    /// Reads this number of events and records them by name. For the initial events of a watch, which have no order.
    pub(super) fn initial_events(&mut self, watch: CaseWatch, count: usize) {
        let mut events: Vec<Value> = (0..count).map(|_| self.read_event(watch, LIMIT)).collect();
        events.sort_by_key(|event| event.pointer("/object/metadata/name").map(Value::to_string));
        for event in events {
            self.record(json!({"watch": watch.number, "event": event}));
        }
    }

    /// Reads and records events up to one that satisfies the condition.
    pub(super) fn events_until(
        &mut self,
        watch: CaseWatch,
        is_last: impl Fn(&Value) -> bool,
    ) -> Value {
        for _ in 0..100 {
            let event = self.event(watch);
            if is_last(&event) || event.is_string() {
                return event;
            }
        }
        Value::Null
    }

    /// Records that the watch has no event to send.
    pub(super) fn expect_silence(&mut self, watch: CaseWatch) {
        let event = self.read_event(watch, SILENCE);
        self.record(json!({"watch": watch.number, "event": event}));
    }

    fn read_event(&mut self, watch: CaseWatch, limit: Duration) -> Value {
        let Some(server_id) = watch.server_id else {
            return json!("rejected");
        };
        match self.server.next_line(server_id, limit) {
            Ok(Line::Text(line)) => parse(line.as_bytes()),
            Ok(Line::End) => json!("end"),
            Ok(Line::Silence) => json!("silence"),
            Err(failure) => json!(failure),
        }
    }

    fn exchange(&mut self, call: &Call) -> (Value, Value) {
        let mut step = self.describe(call);
        let response = self
            .request(call)
            .and_then(|request| self.server.send(request));
        let body = match response {
            Ok(response) => {
                step.insert("status".to_owned(), json!(response.status().as_u16()));
                record_headers(&mut step, response.headers());
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
        if !self.is_unrecorded {
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
fn record_headers(step: &mut Map<String, Value>, headers: &HeaderMap) {
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

fn restrict(body: &Value, pointers: &[String]) -> Value {
    if pointers.is_empty() {
        return body.clone();
    }
    let fields = pointers.iter().map(|pointer| {
        let value = body.pointer(pointer).cloned().unwrap_or_default();
        (pointer.clone(), value)
    });
    Value::Object(fields.collect())
}

fn without_numbers(pointer: &str) -> String {
    let segments = pointer.split('/').map(|segment| {
        let is_number = segment.bytes().all(|byte| byte.is_ascii_digit()) && !segment.is_empty();
        if is_number { "*" } else { segment }
    });
    segments.collect::<Vec<_>>().join("/")
}
