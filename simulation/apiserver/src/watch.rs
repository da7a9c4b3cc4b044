//! Watches: events, bookmarks and their end.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::Response;
use jiff::Timestamp;
use serde_json::{Value, json};

use crate::list;
use crate::render::{self, RenderedObject};
use crate::request::{ApiRequest, View};
use crate::resources::Kind;
use crate::selectors::Selector;
use crate::server::{Answer, ApiServer, Events, WatchId};
use crate::status::{Failure, Outcome};
use crate::store::{self, WriteRecord};

const BOOKMARK_INTERVAL: Duration = Duration::from_secs(60);
/// The last bookmark is sent this long before the end of the watch.
const LAST_BOOKMARK_BEFORE_END: Duration = Duration::from_secs(2);
/// Least duration of a watch without `timeoutSeconds`. The real server adds up to as much again at random.
const MIN_TIMEOUT_SECONDS: u64 = 1800;

#[derive(Debug)]
struct Watch {
    kind: Arc<Kind>,
    /// Empty for all namespaces.
    namespace: String,
    selector: Selector,
    view: View,
    /// The watch reports the writes after this revision.
    start_revision: u64,
    pending: Vec<Bytes>,
    ended: bool,
    next_bookmark: Option<Timestamp>,
    deadline: Timestamp,
}

/// The open watches.
#[derive(Debug, Default)]
pub(crate) struct Watches {
    last_id: u64,
    open: BTreeMap<WatchId, Watch>,
}

impl Watch {
    fn covers(&self, record: &WriteRecord) -> bool {
        record.revision > self.start_revision
            && record.key.resource == self.kind.resource
            && record.key.group == self.kind.stored_group()
            && (self.namespace.is_empty() || record.key.namespace == self.namespace)
    }

    fn send(&mut self, record: &WriteRecord) {
        if self.ended || !self.covers(record) {
            return;
        }
        let is_selected = |object: &&Arc<Value>| self.selector.matches(object);
        let before = record.before.as_ref().filter(is_selected);
        let after = record.after.as_ref().filter(is_selected);
        let (event, object, version) = match (before, after) {
            (None, Some(after)) => ("ADDED", after, None),
            (Some(_), Some(after)) => ("MODIFIED", after, None),
            (Some(before), None) => ("DELETED", before, Some(record.revision)),
            (None, None) => return,
        };
        let line = self.line(event, object, version);
        self.pending.push(line);
    }

    fn line(&self, event: &'static str, object: &Value, version: Option<u64>) -> Bytes {
        let rendered = RenderedObject {
            object,
            kind: &self.kind,
            view: self.view,
            omits_type: false,
            version,
        };
        render::watch_event(event, &rendered)
    }

    fn send_bookmark(&mut self, revision: u64, ends_initial: bool) {
        let mut metadata = json!({"resourceVersion": revision.to_string()});
        if ends_initial {
            metadata["annotations"] = json!({"k8s.io/initial-events-end": "true"});
        }
        let (kind, api_version) = match self.view {
            View::Full => (self.kind.kind.clone(), self.kind.api_version()),
            View::Metadata => (
                "PartialObjectMetadata".to_owned(),
                "meta.k8s.io/v1".to_owned(),
            ),
        };
        let object = json!({"kind": kind, "apiVersion": api_version, "metadata": metadata});
        self.pending.push(render::watch_event("BOOKMARK", &object));
    }

    fn next_timer(&self) -> Timestamp {
        let next_timer = self.next_bookmark.unwrap_or(self.deadline);
        next_timer.min(self.deadline)
    }

    fn advance(&mut self, now: Timestamp, revision: u64) {
        if self.ended {
            return;
        }
        if self.next_bookmark.is_some_and(|bookmark| bookmark <= now) {
            self.send_bookmark(revision.max(self.start_revision), false);
            let last_bookmark = self.deadline - LAST_BOOKMARK_BEFORE_END;
            let next = now + BOOKMARK_INTERVAL;
            self.next_bookmark = match now < last_bookmark {
                true => Some(next.min(last_bookmark)),
                false => None,
            };
        }
        self.ended = self.deadline <= now;
    }
}

impl Watches {
    pub(crate) fn publish(&mut self, record: &WriteRecord) {
        for watch in self.open.values_mut() {
            watch.send(record);
        }
    }

    pub(crate) fn advance(&mut self, now: Timestamp, revision: u64) {
        for watch in self.open.values_mut() {
            watch.advance(now, revision);
        }
    }

    pub(crate) fn next_timer(&self) -> Option<Timestamp> {
        let open = self.open.values().filter(|watch| !watch.ended);
        open.map(Watch::next_timer).min()
    }

    pub(crate) fn with_events(&self) -> Vec<WatchId> {
        let has_events = |watch: &Watch| watch.ended || !watch.pending.is_empty();
        let open = self.open.iter();
        let open = open.filter(|(_, watch)| has_events(watch));
        open.map(|(id, _)| *id).collect()
    }

    pub(crate) fn take(&mut self, id: WatchId) -> Events {
        let Some(watch) = self.open.get_mut(&id) else {
            return Events {
                lines: Vec::new(),
                ended: true,
            };
        };
        let events = Events {
            lines: std::mem::take(&mut watch.pending),
            ended: watch.ended,
        };
        if events.ended {
            self.open.remove(&id);
        }
        events
    }

    pub(crate) fn close(&mut self, id: WatchId) {
        self.open.remove(&id);
    }

    pub(crate) fn end_all(&mut self) {
        for watch in self.open.values_mut() {
            watch.ended = true;
        }
    }

    /// Ends the watches of a resource that is no longer served.
    pub(crate) fn end_resource(&mut self, group: &str, resource: &str) {
        for watch in self.open.values_mut() {
            watch.ended |= watch.kind.is(group, resource);
        }
    }

    /// Opens a watch that has ended after one line.
    pub(crate) fn open_ended(&mut self, now: Timestamp, kind: &Arc<Kind>, line: Bytes) -> Answer {
        let id = self.open(Watch {
            kind: kind.clone(),
            namespace: String::new(),
            selector: Selector::default(),
            view: View::Full,
            start_revision: 0,
            pending: vec![line],
            ended: true,
            next_bookmark: None,
            deadline: now,
        });
        Answer::Watch(response_head(), id)
    }

    fn open(&mut self, watch: Watch) -> WatchId {
        self.last_id += 1;
        let id = WatchId(self.last_id);
        self.open.insert(id, watch);
        id
    }
}

fn response_head() -> Response<()> {
    let mut head = Response::new(());
    let content = http::HeaderValue::from_static("application/json");
    let headers = head.headers_mut();
    headers.insert(http::header::CONTENT_TYPE, content);
    head
}

impl ApiServer {
    pub(crate) fn watch(
        &mut self,
        request: &ApiRequest<'_>,
        kind: &Arc<Kind>,
        namespace: &str,
    ) -> Outcome<Answer> {
        list::validate_options(request, true)?;
        let query = &request.query;
        let selector =
            Selector::parse(kind, query.get("labelSelector"), query.get("fieldSelector"))?;
        let seconds = query
            .number("timeoutSeconds")?
            .filter(|seconds| *seconds > 0);
        let seconds = seconds
            .unwrap_or(MIN_TIMEOUT_SECONDS + self.watches.last_id * 97 % MIN_TIMEOUT_SECONDS);
        let deadline = request.now + Duration::from_secs(seconds);
        let sends_bookmarks = query.is_true("allowWatchBookmarks");
        let first_bookmark =
            (request.now + BOOKMARK_INTERVAL).min(deadline - LAST_BOOKMARK_BEFORE_END);
        let mut watch = Watch {
            kind: kind.clone(),
            namespace: namespace.to_owned(),
            selector,
            view: request.watch_view()?,
            start_revision: self.store.revision(),
            pending: Vec::new(),
            ended: false,
            next_bookmark: (sends_bookmarks && first_bookmark > request.now)
                .then_some(first_bookmark),
            deadline,
        };
        let requested = match query.get("resourceVersion") {
            "" => 0,
            text => text.parse().map_err(|_| {
                let message = format!(
                    "resourceVersion: Invalid value: {text:?}: strconv.ParseUint: parsing {text:?}: invalid syntax"
                );
                Failure::new(500, "", message, Value::Null)
            })?,
        };
        let initial_events = query.get("sendInitialEvents");
        if requested == 0 && initial_events != "false" || query.is_true("sendInitialEvents") {
            self.start_from_list(&mut watch, requested);
            // The server treats a watch without a version as one that requests initial events.
            if sends_bookmarks && !watch.ended {
                watch.send_bookmark(self.store.revision(), true);
            }
        } else if requested > 0 {
            self.start_from_log(&mut watch, requested);
        }
        Ok(Answer::Watch(response_head(), self.watches.open(watch)))
    }

    /// Sends the present objects.
    fn start_from_list(&self, watch: &mut Watch, requested: u64) {
        let current = self.store.revision();
        if requested > current {
            let failure = Failure::too_large_version(requested, current);
            watch.pending.push(failure.event());
            watch.ended = true;
            return;
        }
        let kind = watch.kind.clone();
        let prefix = store::prefix(kind.stored_group(), &kind.resource, &watch.namespace);
        for (_, entry) in self.store.scan(&prefix, "") {
            if watch.selector.matches(&entry.value) {
                let line = watch.line("ADDED", &entry.value, None);
                watch.pending.push(line);
            }
        }
    }

    /// Sends the writes after a revision. A revision in the future delays the first event.
    fn start_from_log(&self, watch: &mut Watch, requested: u64) {
        let oldest = self.store.compacted_revision();
        watch.start_revision = requested;
        if requested < oldest {
            let message = format!("too old resource version: {requested} ({})", oldest + 1);
            watch.pending.push(Failure::expired(message).event());
            watch.ended = true;
            return;
        }
        for record in self.store.writes_since(requested) {
            watch.send(record);
        }
    }
}
