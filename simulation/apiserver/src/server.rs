//! The server: requests in, responses and watch events out.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response};
use jiff::Timestamp;
use serde_json::Value;

/// Settings of one server.
#[derive(Clone, Debug)]
pub struct Options {
    /// Name of the cluster. Different names give different UIDs.
    pub name: String,
    /// Version in the manner of `v1.33.5`.
    pub version: String,
    /// Time from the creation of a CRD until it is established and served.
    pub crd_delay: Duration,
    /// Time from a change until a controller reacts to it.
    pub controller_delay: Duration,
}

/// One cluster's API server with its store and controllers.
#[derive(Debug)]
pub struct ApiServer {
    _options: Options,
}

/// A watch that a client has opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct WatchId(pub u64);

#[derive(Debug)]
pub enum Answer {
    Complete(Response<Bytes>),
    /// The head of a watch's response. Its body follows in parts from [`ApiServer::take_events`].
    Watch(Response<()>, WatchId),
}

/// What a watch has to send.
#[derive(Debug, Default)]
pub struct Events {
    /// One JSON document each, with its final newline.
    pub lines: Vec<Bytes>,
    /// Whether the server has ended the watch after these lines.
    pub ended: bool,
}

/// Identity of an object.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Key {
    /// Empty for the core group.
    pub group: String,
    /// Plural, such as `tenants`.
    pub resource: String,
    /// Empty for cluster-scoped objects.
    pub namespace: String,
    pub name: String,
}

/// A write to the store.
#[derive(Clone, Debug)]
pub struct Change {
    pub revision: u64,
    pub at: Timestamp,
    pub key: Key,
    pub before: Option<Arc<Value>>,
    pub after: Option<Arc<Value>>,
    /// User agent of the request, or the controller's name.
    pub by: String,
    /// The subresource that was written, such as `status`, or empty.
    pub subresource: String,
}

/// The state of a store at one time.
#[derive(Clone, Debug)]
pub struct Snapshot {
    _objects: BTreeMap<Key, Arc<Value>>,
}

impl ApiServer {
    pub fn new(_options: Options, _now: Timestamp) -> Self {
        todo!()
    }

    /// Handles one request that arrives at `now`.
    pub fn handle(&mut self, _now: Timestamp, _request: &Request<Bytes>) -> Answer {
        todo!()
    }

    /// Runs the controllers and timers that are due.
    pub fn advance(&mut self, _now: Timestamp) {
        todo!()
    }

    /// Returns the time of the next timer.
    pub fn next_timer(&self) -> Option<Timestamp> {
        todo!()
    }

    /// Returns the watches with unsent events, in order of their ID.
    pub fn watches_with_events(&self) -> Vec<WatchId> {
        todo!()
    }

    /// Takes the events that a watch has to send.
    pub fn take_events(&mut self, _watch: WatchId) -> Events {
        todo!()
    }

    /// Forgets a watch whose client has gone.
    pub fn close_watch(&mut self, _watch: WatchId) {
        todo!()
    }

    /// Takes the writes since the last call, in order.
    pub fn take_changes(&mut self) -> Vec<Change> {
        todo!()
    }

    /// Returns an object.
    pub fn get(&self, _key: &Key) -> Option<Arc<Value>> {
        todo!()
    }

    /// Returns all objects of a resource, in order.
    pub fn all(&self, _group: &str, _resource: &str) -> Vec<Arc<Value>> {
        todo!()
    }

    /// Removes the watch history, as etcd's compaction does. Older watches and continue tokens get 410.
    pub fn compact(&mut self) {
        todo!()
    }

    /// Ends all watches, as a restart of the server does.
    pub fn end_watches(&mut self) {
        todo!()
    }

    pub fn snapshot(&self) -> Snapshot {
        todo!()
    }

    /// Replaces the store, as a restore of etcd does: revisions go back and watches end.
    pub fn restore(&mut self, _snapshot: Snapshot) {
        todo!()
    }
}
