//! Watches: events, bookmarks and their end.

mod request;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::Response;
use jiff::{SignedDuration, Timestamp};
use serde_json::{Value, json};

use crate::kind::Kind;
use crate::render::{self, RenderedObject};
use crate::request::View;
use crate::selectors::Selector;
use crate::store::{Store, WriteRecord};

const BOOKMARK_INTERVAL: Duration = Duration::from_secs(60);
/// The last bookmark is sent this long before the end of the watch.
const LAST_BOOKMARK_BEFORE_END: Duration = Duration::from_secs(2);
/// Least duration of a watch without `timeoutSeconds`. The real server adds up to as much again at random.
const MIN_TIMEOUT_SECONDS: u64 = 1800;

/// A watch that a client has opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct WatchId(pub u64);

/// Events and bookmarks that a watch has yet to send.
#[derive(Debug, Default)]
pub struct Events {
    /// One JSON document each, with its final newline.
    pub lines: Vec<Bytes>,
    /// Whether the server has ended the watch after these lines.
    pub ended: bool,
}

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

    fn send(&mut self, record: &WriteRecord, store: &Store) {
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
        let json = match version {
            None => store.render(&self.kind, self.view, object),
            version => render::json_bytes(&RenderedObject {
                version,
                ..RenderedObject::new(&self.kind, self.view, object)
            }),
        };
        self.pending.push(render::watch_event(event, &json));
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
        let json = render::json_bytes(&object);
        self.pending.push(render::watch_event("BOOKMARK", &json));
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
    pub(crate) fn publish(&mut self, record: &WriteRecord, store: &Store) {
        for watch in self.open.values_mut() {
            watch.send(record, store);
        }
    }

    pub(crate) fn advance(&mut self, now: Timestamp, revision: u64) {
        for watch in self.open.values_mut() {
            watch.advance(now, revision);
        }
    }

    /// Moves the timers by the same time as the clock.
    pub(crate) fn shift(&mut self, by: SignedDuration) {
        for watch in self.open.values_mut() {
            watch.next_bookmark = watch.next_bookmark.map(|bookmark| bookmark + by);
            watch.deadline += by;
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
    pub(crate) fn open_ended(&mut self, now: Timestamp, kind: &Arc<Kind>, line: Bytes) -> WatchId {
        self.open(Watch {
            kind: kind.clone(),
            namespace: String::new(),
            selector: Selector::default(),
            view: View::Full,
            start_revision: 0,
            pending: vec![line],
            ended: true,
            next_bookmark: None,
            deadline: now,
        })
    }

    fn open(&mut self, watch: Watch) -> WatchId {
        self.last_id += 1;
        let id = WatchId(self.last_id);
        self.open.insert(id, watch);
        id
    }
}

/// The head of a watch's response.
pub(crate) fn response_head() -> Response<()> {
    let mut head = Response::new(());
    let content = http::HeaderValue::from_static("application/json");
    let headers = head.headers_mut();
    headers.insert(http::header::CONTENT_TYPE, content);
    head
}
