//! Watches: events, bookmarks and their end.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::Response;
use jiff::Timestamp;
use serde_json::{Value, json};

use crate::list;
use crate::render::{self, Rendered};
use crate::request::{Call, View};
use crate::resources::Kind;
use crate::selectors::Selector;
use crate::server::{Answer, ApiServer, Events, WatchId};
use crate::status::{Failure, Outcome};
use crate::store::{self, Record};

const BOOKMARKS: Duration = Duration::from_secs(60);
/// The last bookmark is sent this long before the end of the watch.
const BEFORE_END: Duration = Duration::from_secs(2);
/// Least duration of a watch without `timeoutSeconds`. The real server adds up to as much again at random.
const DURATION: u64 = 1800;

#[derive(Debug)]
struct Watch {
    kind: Arc<Kind>,
    /// Empty for all namespaces.
    namespace: String,
    selector: Selector,
    view: View,
    /// The watch reports the writes after this revision.
    after: u64,
    pending: Vec<Bytes>,
    ended: bool,
    bookmark: Option<Timestamp>,
    end: Timestamp,
}

/// The open watches.
#[derive(Debug, Default)]
pub(crate) struct Watches {
    last: u64,
    open: BTreeMap<WatchId, Watch>,
}

impl Watch {
    fn covers(&self, record: &Record) -> bool {
        record.revision > self.after
            && record.key.resource == self.kind.resource
            && record.key.group == self.kind.stored_group()
            && (self.namespace.is_empty() || record.key.namespace == self.namespace)
    }

    fn send(&mut self, record: &Record) {
        if self.ended || !self.covers(record) {
            return;
        }
        let selected = |object: &&Arc<Value>| self.selector.matches(object);
        let before = record.before.as_ref().filter(selected);
        let after = record.after.as_ref().filter(selected);
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
        let rendered = Rendered {
            object,
            kind: &self.kind,
            view: self.view,
            bare: false,
            version,
        };
        render::event(event, &rendered)
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
        self.pending.push(render::event("BOOKMARK", &object));
    }

    fn next_timer(&self) -> Timestamp {
        let bookmark = self.bookmark.unwrap_or(self.end);
        bookmark.min(self.end)
    }

    fn advance(&mut self, now: Timestamp, revision: u64) {
        if self.ended {
            return;
        }
        if self.bookmark.is_some_and(|bookmark| bookmark <= now) {
            self.send_bookmark(revision.max(self.after), false);
            let before_end = self.end - BEFORE_END;
            let next = now + BOOKMARKS;
            self.bookmark = match now < before_end {
                true => Some(next.min(before_end)),
                false => None,
            };
        }
        self.ended = self.end <= now;
    }
}

impl Watches {
    pub(crate) fn publish(&mut self, record: &Record) {
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
            after: 0,
            pending: vec![line],
            ended: true,
            bookmark: None,
            end: now,
        });
        Answer::Watch(head(), id)
    }

    fn open(&mut self, watch: Watch) -> WatchId {
        self.last += 1;
        let id = WatchId(self.last);
        self.open.insert(id, watch);
        id
    }
}

fn head() -> Response<()> {
    let mut head = Response::new(());
    let content = http::HeaderValue::from_static("application/json");
    let headers = head.headers_mut();
    headers.insert(http::header::CONTENT_TYPE, content);
    head
}

impl ApiServer {
    pub(crate) fn watch(
        &mut self,
        call: &Call<'_>,
        kind: &Arc<Kind>,
        namespace: &str,
    ) -> Outcome<Answer> {
        list::validate(call, true)?;
        let query = &call.query;
        let selector =
            Selector::parse(kind, query.get("labelSelector"), query.get("fieldSelector"))?;
        let seconds = query
            .number("timeoutSeconds")?
            .filter(|seconds| *seconds > 0);
        let seconds = seconds.unwrap_or(DURATION + self.watches.last * 97 % DURATION);
        let end = call.now + Duration::from_secs(seconds);
        let bookmarks = query.is_true("allowWatchBookmarks");
        let first = (call.now + BOOKMARKS).min(end - BEFORE_END);
        let mut watch = Watch {
            kind: kind.clone(),
            namespace: namespace.to_owned(),
            selector,
            view: call.watch_view()?,
            after: self.store.revision(),
            pending: Vec::new(),
            ended: false,
            bookmark: (bookmarks && first > call.now).then_some(first),
            end,
        };
        let asked = match query.get("resourceVersion") {
            "" => 0,
            text => text.parse().map_err(|_| {
                let message = format!(
                    "resourceVersion: Invalid value: {text:?}: strconv.ParseUint: parsing {text:?}: invalid syntax"
                );
                Failure::new(500, "", message, Value::Null)
            })?,
        };
        let initial = query.get("sendInitialEvents");
        if asked == 0 && initial != "false" || query.is_true("sendInitialEvents") {
            self.start_from_list(&mut watch, asked);
            // The server treats a watch without a version as one that requests initial events.
            if bookmarks && !watch.ended {
                watch.send_bookmark(self.store.revision(), true);
            }
        } else if asked > 0 {
            self.start_from_log(&mut watch, asked);
        }
        Ok(Answer::Watch(head(), self.watches.open(watch)))
    }

    /// Sends the present objects.
    fn start_from_list(&self, watch: &mut Watch, asked: u64) {
        let current = self.store.revision();
        if asked > current {
            let failure = Failure::too_large_version(asked, current);
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
    fn start_from_log(&self, watch: &mut Watch, asked: u64) {
        let oldest = self.store.compacted();
        watch.after = asked;
        if asked < oldest {
            let message = format!("too old resource version: {asked} ({})", oldest + 1);
            watch.pending.push(Failure::expired(message).event());
            watch.ended = true;
            return;
        }
        for record in self.store.since(asked) {
            watch.send(record);
        }
    }
}
