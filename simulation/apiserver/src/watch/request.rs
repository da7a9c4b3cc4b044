//! Opens the watch that a request asks for.

use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;

use super::{
    BOOKMARK_INTERVAL, LAST_BOOKMARK_BEFORE_END, MIN_TIMEOUT_SECONDS, Watch, response_head,
};
use crate::kind::Kind;
use crate::list;
use crate::render;
use crate::request::ApiRequest;
use crate::selectors::Selector;
use crate::server::{Answer, ApiServer};
use crate::status::{Failure, Outcome};
use crate::store;

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
                let json = self.store.render(&kind, watch.view, &entry.value);
                watch.pending.push(render::watch_event("ADDED", &json));
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
            watch.send(record, &self.store);
        }
    }
}
