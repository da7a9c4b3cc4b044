//! The server: requests in, responses and watch events out.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{Method, Request, Response};
use jiff::{SignedDuration, Timestamp};
use serde_json::Value;
use sha2::{Digest as _, Sha256};

use crate::cause::Cause;
use crate::kind::Kind;
use crate::meta;
use crate::request::{ApiRequest, View, parse_version};
use crate::resources::Kinds;
use crate::status::{self, Failure, Outcome, respond};
use crate::store::{self, Store, WriteRecord};
use crate::tasks::Tasks;
use crate::watch::{self, Watches};
use crate::write::{DeletionResult, Write};

pub use crate::crd::Crds;
pub use crate::key::Key;
pub use crate::watch::{Events, WatchId};

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
    pub(crate) options: Options,
    pub(crate) store: Store,
    pub(crate) kinds: Kinds,
    pub(crate) watches: Watches,
    pub(crate) tasks: Tasks,
    changes: Vec<Change>,
    /// Template and revision of the Deployments, by UID.
    pub(crate) deployment_revisions: BTreeMap<String, (Value, u64)>,
    /// Whether the pods of each Job fail.
    pub(crate) jobs_fail: bool,
    /// Unknown fields in the request that is being handled.
    pub(crate) warnings: Vec<String>,
    /// Number of UIDs and name suffixes so far, which makes them unique. A restore doesn't reset it.
    hash_count: u64,
}

#[derive(Debug)]
pub enum Answer {
    Complete(Response<Bytes>),
    /// The head of a watch's response. Its body follows in parts from [`ApiServer::take_events`].
    Watch(Response<()>, WatchId),
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
    store: Store,
    kinds: Kinds,
}

impl ApiServer {
    pub fn new(options: Options, now: Timestamp) -> Self {
        let mut server = Self {
            options,
            store: Store::default(),
            kinds: Kinds::built_in(),
            watches: Watches::default(),
            tasks: Tasks::default(),
            changes: Vec::new(),
            deployment_revisions: BTreeMap::new(),
            jobs_fail: false,
            warnings: Vec::new(),
            hash_count: 0,
        };
        server.create_system_namespaces(now);
        server
    }

    /// Handles one request that arrives at `now`.
    pub fn handle(&mut self, now: Timestamp, request: &Request<Bytes>) -> Answer {
        self.advance(now);
        let request = ApiRequest::parse(now, request);
        let answer = self.route(&request);
        let mut answer = answer.unwrap_or_else(|failure| Answer::Complete(failure.response()));
        let warnings = std::mem::take(&mut self.warnings);
        if let Answer::Complete(response) = &mut answer {
            for field in warnings {
                let text = format!("299 - {:?}", format!("unknown field {field:?}"));
                if let Ok(value) = http::HeaderValue::from_str(&text) {
                    response.headers_mut().append(http::header::WARNING, value);
                }
            }
        }
        answer
    }

    /// Runs the controllers and timers that are due.
    pub fn advance(&mut self, now: Timestamp) {
        self.run_controllers(now);
        self.watches.advance(now, self.store.revision());
    }

    /// The clock was moved. Controllers and watches measure time by a monotonic clock, so none becomes due earlier or
    /// later.
    pub fn move_clock(&mut self, by: SignedDuration) {
        self.tasks.shift(by);
        self.watches.shift(by);
    }

    /// Returns the time of the next timer.
    pub fn next_timer(&self) -> Option<Timestamp> {
        let timers = [self.tasks.next_due(), self.watches.next_timer()];
        timers.into_iter().flatten().min()
    }

    /// Returns the watches with unsent events, in order of their ID.
    pub fn watches_with_events(&self) -> Vec<WatchId> {
        self.watches.with_events()
    }

    /// Takes the events that a watch has to send.
    pub fn take_events(&mut self, watch: WatchId) -> Events {
        self.watches.take(watch)
    }

    /// Forgets a watch whose client has gone.
    pub fn close_watch(&mut self, watch: WatchId) {
        self.watches.close(watch);
    }

    /// Takes the writes since the last call, in order.
    pub fn take_changes(&mut self) -> Vec<Change> {
        std::mem::take(&mut self.changes)
    }

    /// Returns an object.
    pub fn get(&self, key: &Key) -> Option<Arc<Value>> {
        self.store.get(key).cloned()
    }

    /// Returns all objects of a resource, in order.
    pub fn all(&self, group: &str, resource: &str) -> Vec<Arc<Value>> {
        let prefix = store::prefix(group, resource, "");
        let objects = self.store.scan(&prefix, "");
        objects.map(|(_, entry)| entry.value.clone()).collect()
    }

    /// Removes the watch history, as etcd's compaction does. Older watches and continue tokens get 410.
    pub fn compact(&mut self) {
        self.store.compact();
    }

    /// Ends all watches, as a restart of the server does.
    pub fn end_watches(&mut self) {
        self.watches.end_all();
    }

    pub fn snapshot(&self) -> Snapshot {
        Snapshot {
            store: self.store.without_log(),
            kinds: self.kinds.clone(),
        }
    }

    /// Replaces the store, as a restore of etcd does: revisions go back and watches end. The controllers check all
    /// objects again when they next run.
    pub fn restore(&mut self, snapshot: Snapshot) {
        self.watches.end_all();
        self.store = snapshot.store;
        self.kinds = snapshot.kinds;
        self.reschedule_all();
    }

    /// Writes or deletes an object and reports the write to watches and controllers.
    pub(crate) fn commit(&mut self, write: &Write, after: Option<Value>) -> Arc<Value> {
        let record = self.store(write, after);
        self.watches.publish(&record, &self.store);
        self.observe(&record, write.now);
        let object = record.after.clone().or_else(|| record.before.clone());
        object.unwrap_or_default()
    }

    /// Writes or deletes an object.
    pub(crate) fn store(&mut self, write: &Write, after: Option<Value>) -> Arc<WriteRecord> {
        let record = self.store.commit(&write.key(), after);
        self.changes.push(Change {
            revision: record.revision,
            at: write.now,
            key: (*record.key).clone(),
            before: record.before.clone(),
            after: record.after.clone(),
            by: write.author.clone(),
            subresource: write.subresource.clone(),
        });
        record
    }

    fn next_hash(&mut self) -> [u8; 32] {
        self.hash_count += 1;
        let mut hash = Sha256::new();
        hash.update(self.options.name.as_bytes());
        hash.update([0]);
        hash.update(self.hash_count.to_be_bytes());
        hash.finalize().into()
    }

    pub(crate) fn next_uid(&mut self) -> String {
        format_uid(&self.next_hash())
    }

    /// Returns a UID for the result of a dry run.
    pub(crate) fn dry_run_uid(&self) -> String {
        let hash = Sha256::digest(self.options.name.as_bytes());
        format_uid(&hash.into())
    }

    /// Returns five characters for `generateName`.
    pub(crate) fn next_name_suffix(&mut self) -> String {
        const LETTERS: &[u8; 27] = b"bcdfghjklmnpqrstvwxz2456789";
        let letters = self.next_hash().into_iter().take(5);
        letters
            .map(|byte| char::from(LETTERS[usize::from(byte) % LETTERS.len()]))
            .collect()
    }
}

fn format_uid(hash: &[u8; 32]) -> String {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    let digits = hash.iter().take(16);
    let digits = digits.flat_map(|byte| [byte >> 4, byte & 15]);
    let mut uid = String::with_capacity(36);
    for (position, digit) in digits.enumerate() {
        if matches!(position, 8 | 12 | 16 | 20) {
            uid.push('-');
        }
        uid.push(match position {
            12 => '4',
            16 => 'a',
            _ => char::from(DIGITS[usize::from(digit)]),
        });
    }
    uid
}

/// The object or the collection that a path names.
#[derive(Debug)]
struct Target {
    kind: Arc<Kind>,
    namespace: String,
    /// Empty for a collection.
    name: String,
    subresource: String,
}

impl ApiServer {
    fn route(&mut self, request: &ApiRequest<'_>) -> Outcome<Answer> {
        let path = request.segments.clone();
        let target = match &*path {
            ["api", "v1", rest @ ..] if !rest.is_empty() => self.parse_target("", "v1", rest)?,
            ["apis", group, version, rest @ ..] if !rest.is_empty() => {
                self.parse_target(group, version, rest)?
            }
            _ => return self.discover(request),
        };
        match target.name.is_empty() {
            true => self.handle_collection(request, &target),
            false => self.handle_object(request, &target),
        }
    }

    fn parse_target(&self, group: &str, version: &str, rest: &[&str]) -> Outcome<Target> {
        let (namespace, rest) = match rest {
            ["watch", ..] => return Err(Failure::not_modelled("paths with the prefix watch")),
            ["namespaces", name, subresource @ ("status" | "finalize")] if group.is_empty() => {
                ("", vec!["namespaces", name, subresource])
            }
            ["namespaces", namespace, rest @ ..] if !rest.is_empty() => (*namespace, rest.to_vec()),
            rest => ("", rest.to_vec()),
        };
        let (resource, name, subresource) = match *rest {
            [resource] => (resource, "", ""),
            [resource, name] => (resource, name, ""),
            [resource, name, subresource] => (resource, name, subresource),
            _ => return Err(Failure::no_such_path()),
        };
        let Some(kind) = self.kinds.get(group, version, resource) else {
            return Err(self.not_served(group, version, resource));
        };
        let is_valid_scope = match kind.namespaced {
            true => !namespace.is_empty() || name.is_empty(),
            false => namespace.is_empty(),
        };
        if !is_valid_scope {
            return Err(Failure::no_such_path());
        }
        Ok(Target {
            kind: kind.clone(),
            namespace: namespace.to_owned(),
            name: name.to_owned(),
            subresource: subresource.to_owned(),
        })
    }

    /// Returns the failure for a resource that the server doesn't know. A group with a dot may come from a CRD.
    pub(crate) fn not_served(&self, group: &str, version: &str, resource: &str) -> Box<Failure> {
        const NOT_MODELLED_RESOURCES: [&str; 9] = [
            "bindings",
            "componentstatuses",
            "controllerrevisions",
            "endpoints",
            "ingressclasses",
            "persistentvolumes",
            "podtemplates",
            "replicationcontrollers",
            "ipaddresses",
        ];
        const NOT_MODELLED_GROUPS: [&str; 8] = [
            "autoscaling",
            "admissionregistration.k8s.io",
            "apiregistration.k8s.io",
            "certificates.k8s.io",
            "discovery.k8s.io",
            "flowcontrol.apiserver.k8s.io",
            "scheduling.k8s.io",
            "storage.k8s.io",
        ];
        let is_not_modelled = NOT_MODELLED_RESOURCES.contains(&resource)
            || NOT_MODELLED_GROUPS.contains(&group)
            || group.ends_with("authentication.k8s.io")
            || group == "authorization.k8s.io";
        let mut kinds = self.kinds.all();
        if is_not_modelled {
            Failure::not_modelled(format_args!("{resource} in {group}/{version}"))
        } else if kinds.any(|kind| kind.group == group && !kind.is_custom()) {
            Failure::no_such_resource()
        } else {
            Failure::no_such_path()
        }
    }

    fn handle_collection(&mut self, request: &ApiRequest<'_>, target: &Target) -> Outcome<Answer> {
        let kind = &target.kind;
        match *request.method {
            Method::GET if request.query.is_true("watch") => {
                self.watch(request, kind, &target.namespace)
            }
            Method::GET => self.list(request, kind, &target.namespace),
            Method::POST if kind.namespaced && target.namespace.is_empty() => {
                Err(Failure::method_not_allowed())
            }
            Method::POST => {
                let view = request.view()?;
                if kind.is_custom() && self.is_crd_terminating(kind) {
                    let object = request.parse_object(&kind.kind)?;
                    let cause =
                        "create not allowed while custom resource definition is terminating";
                    return Err(Failure::forbidden(kind, meta::name(&object), cause));
                }
                request.check_options("CreateOptions")?;
                request.check_content_type()?;
                let created = self.create(
                    new_write(request, target),
                    request.parse_object(&kind.kind)?,
                )?;
                Ok(self.object_response(kind, view, &created, 201))
            }
            Method::DELETE if !kind.is("", "namespaces") => {
                Err(Failure::not_modelled("deletion of collections"))
            }
            _ => Err(Failure::method_not_allowed()),
        }
    }

    fn handle_object(&mut self, request: &ApiRequest<'_>, target: &Target) -> Outcome<Answer> {
        let kind = &target.kind;
        match target.subresource.as_str() {
            "" => {}
            "status" if kind.has_status => {}
            "finalize" if kind.is("", "namespaces") && request.method == Method::PUT => {}
            "status" if kind.is_custom() => return Err(Failure::not_found(kind, &target.name)),
            _ if kind.is_custom() => return Err(Failure::no_such_path()),
            "status" => return Err(Failure::no_such_resource()),
            other => {
                return Err(Failure::not_modelled(format_args!(
                    "the subresource {other} of {}",
                    kind.group_resource()
                )));
            }
        }
        let view = request.view()?;
        match *request.method {
            // The real server sends the object and ends the response.
            Method::GET if request.query.is_true("watch") => {
                let object = self.get_object(request, target)?;
                let line = [&*self.store.render(kind, view, &object), b"\n"].concat();
                let id = self.watches.open_ended(request.now, kind, line.into());
                Ok(Answer::Watch(watch::response_head(), id))
            }
            Method::GET => {
                let object = self.get_object(request, target)?;
                Ok(self.object_response(kind, view, &object, 200))
            }
            Method::PUT => {
                request.check_options("UpdateOptions")?;
                request.check_content_type()?;
                let next = request.parse_object(&kind.kind)?;
                let (object, code) = self.replace(new_write(request, target), next)?;
                Ok(self.object_response(kind, view, &object, code))
            }
            Method::PATCH => {
                request.check_options("PatchOptions")?;
                let (object, code) = self.patch(request, new_write(request, target))?;
                Ok(self.object_response(kind, view, &object, code))
            }
            Method::DELETE if target.subresource.is_empty() => {
                self.delete_object(request, target, view)
            }
            _ => Err(Failure::method_not_allowed()),
        }
    }

    fn object_response(&self, kind: &Kind, view: View, object: &Value, code: u16) -> Answer {
        let body = self.store.render(kind, view, object);
        Answer::Complete(respond(code, "application/json", body))
    }

    fn get_object(&self, request: &ApiRequest<'_>, target: &Target) -> Outcome<Arc<Value>> {
        let requested = match request.query.get("resourceVersion") {
            "" => 0,
            text => parse_version(text)?,
        };
        if requested > self.store.revision() {
            return Err(Failure::too_large_version(requested, self.store.revision()));
        }
        let key = target.kind.key(&target.namespace, &target.name);
        let object = self.store.get(&key).cloned();
        object.ok_or_else(|| Failure::not_found(&target.kind, &target.name))
    }

    fn delete_object(
        &mut self,
        request: &ApiRequest<'_>,
        target: &Target,
        view: View,
    ) -> Outcome<Answer> {
        let kind = &target.kind;
        let mut options = request.parse_delete_options()?;
        let mut write = new_write(request, target);
        // Options in a body replace those in the query.
        if request.body.is_empty() {
            request.check_options("DeleteOptions")?;
        } else {
            write.dry_run = false;
        }
        let policy = request.query.get("propagationPolicy");
        if request.body.is_empty() && !policy.is_empty() {
            options["propagationPolicy"] = policy.into();
        }
        check_propagation_policy(&options)?;
        write.dry_run |= options["dryRun"] == serde_json::json!(["All"]);
        Ok(match self.delete(&write, &options)? {
            DeletionResult::Remains(object) => self.object_response(kind, view, &object, 200),
            DeletionResult::Gone(object) if kind.returns_deleted() => {
                let mut object = (*object).clone();
                if !write.dry_run {
                    meta::set(
                        &mut object,
                        "resourceVersion",
                        self.store.revision().to_string(),
                    );
                }
                self.object_response(kind, view, &object, 200)
            }
            DeletionResult::Gone(object) => {
                let body = status::deletion_status(kind, &target.name, meta::text(&object, "uid"));
                Answer::Complete(respond(200, "application/json", body.to_string()))
            }
        })
    }
}

fn check_propagation_policy(options: &Value) -> Outcome<()> {
    let policy = &options["propagationPolicy"];
    let cause = match policy.as_str() {
        None => return Ok(()),
        Some(_) if !options["orphanDependents"].is_null() => Cause::invalid(
            "propagationPolicy",
            policy,
            "orphanDependents and deletionPropagation cannot be both set",
        ),
        Some("Foreground" | "Background" | "Orphan") => return Ok(()),
        Some(_) => Cause::unsupported(
            "propagationPolicy",
            policy,
            r#""Foreground", "Background", "Orphan", "nil""#,
        ),
    };
    Err(Failure::invalid_options("DeleteOptions", &[cause]))
}

fn new_write(request: &ApiRequest<'_>, target: &Target) -> Write {
    Write {
        kind: target.kind.clone(),
        namespace: target.namespace.clone(),
        name: target.name.clone(),
        subresource: target.subresource.clone(),
        field_manager: request.field_manager(),
        is_apply: false,
        field_validation: request.query.get("fieldValidation").to_owned(),
        dry_run: request.dry_run(),
        now: request.now,
        author: request.user_agent.to_owned(),
    }
}
