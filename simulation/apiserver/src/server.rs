//! The server: requests in, responses and watch events out.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{Method, Request, Response};
use jiff::Timestamp;
use serde_json::Value;
use sha2::{Digest as _, Sha256};

use crate::controllers::Tasks;
use crate::objects::{Deleted, Write};
use crate::render::{self, Rendered};
use crate::request::{Call, View};
use crate::resources::{Kind, Kinds};
use crate::status::{self, Cause, Failure, Outcome, respond};
use crate::store::{self, Store};
use crate::watch::Watches;
use crate::{list, meta};

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
    pub(crate) templates: BTreeMap<String, (Value, u64)>,
    /// Whether the pods of each Job fail.
    pub(crate) jobs_fail: bool,
    /// Unknown fields in the request that is being handled.
    pub(crate) warnings: Vec<String>,
    /// Number of UIDs and name suffixes so far. A restore doesn't reset it.
    drawn: u64,
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
    /// Empty for the core group. Events of `events.k8s.io` belong to the core group too.
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
            templates: BTreeMap::new(),
            jobs_fail: false,
            warnings: Vec::new(),
            drawn: 0,
        };
        server.create_system_namespaces(now);
        server
    }

    /// Handles one request that arrives at `now`.
    pub fn handle(&mut self, now: Timestamp, request: &Request<Bytes>) -> Answer {
        self.advance(now);
        let call = Call::parse(now, request);
        let answer = self.route(&call);
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

    /// Returns the time of the next timer.
    pub fn next_timer(&self) -> Option<Timestamp> {
        let timers = [self.tasks.next(), self.watches.next_timer()];
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
        let rows = self.store.scan(&prefix, "");
        rows.map(|(_, entry)| entry.value.clone()).collect()
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

    /// Replaces the store, as a restore of etcd does: revisions go back and watches end. The controllers look at all
    /// objects again at their next turn.
    pub fn restore(&mut self, snapshot: Snapshot) {
        self.watches.end_all();
        self.store = snapshot.store;
        self.kinds = snapshot.kinds;
        self.tasks.resume(&self.store);
    }

    /// Writes or deletes an object and reports the write to watches and controllers.
    pub(crate) fn commit(&mut self, write: &Write, after: Option<Value>) -> Arc<Value> {
        let record = self.store.commit(&write.key(), after);
        self.watches.publish(&record);
        self.observe(&record, write.now);
        self.changes.push(Change {
            revision: record.revision,
            at: write.now,
            key: (*record.key).clone(),
            before: record.before.clone(),
            after: record.after.clone(),
            by: write.by.clone(),
            subresource: write.subresource.clone(),
        });
        let object = record.after.clone().or_else(|| record.before.clone());
        object.unwrap_or_default()
    }

    fn draw(&mut self) -> [u8; 32] {
        self.drawn += 1;
        let mut hash = Sha256::new();
        hash.update(self.options.name.as_bytes());
        hash.update([0]);
        hash.update(self.drawn.to_be_bytes());
        hash.finalize().into()
    }

    pub(crate) fn next_uid(&mut self) -> String {
        uid(&self.draw())
    }

    /// Returns a UID for the result of a dry run.
    pub(crate) fn dry_uid(&self) -> String {
        let hash = Sha256::digest(self.options.name.as_bytes());
        uid(&hash.into())
    }

    /// Returns five characters for `generateName`.
    pub(crate) fn suffix(&mut self) -> String {
        const LETTERS: &[u8; 27] = b"bcdfghjklmnpqrstvwxz2456789";
        let letters = self.draw().into_iter().take(5);
        letters
            .map(|byte| char::from(LETTERS[usize::from(byte) % LETTERS.len()]))
            .collect()
    }
}

fn uid(hash: &[u8; 32]) -> String {
    let mut hex: Vec<char> = hash
        .iter()
        .take(16)
        .flat_map(|byte| format!("{byte:02x}").chars().collect::<Vec<_>>())
        .collect();
    hex[12] = '4';
    hex[16] = 'a';
    for position in [8, 13, 18, 23] {
        hex.insert(position, '-');
    }
    hex.into_iter().collect()
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
    fn route(&mut self, call: &Call<'_>) -> Outcome<Answer> {
        let segments = call.segments.clone();
        let target = match &*segments {
            ["api", "v1", rest @ ..] if !rest.is_empty() => self.target("", "v1", rest)?,
            ["apis", group, version, rest @ ..] if !rest.is_empty() => {
                self.target(group, version, rest)?
            }
            _ => return self.discover(call),
        };
        match target.name.is_empty() {
            true => self.collection(call, &target),
            false => self.object(call, &target),
        }
    }

    fn target(&self, group: &str, version: &str, rest: &[&str]) -> Outcome<Target> {
        let (namespace, rest) = match rest {
            ["watch", ..] => return Err(Failure::not_modelled("paths with the prefix watch")),
            ["namespaces", name, part @ ("status" | "finalize")] if group.is_empty() => {
                ("", vec!["namespaces", name, part])
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
        let fits = match kind.namespaced {
            true => !namespace.is_empty() || name.is_empty(),
            false => namespace.is_empty(),
        };
        if !fits {
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
        const MISSING: [&str; 9] = [
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
        const MISSING_GROUPS: [&str; 8] = [
            "autoscaling",
            "admissionregistration.k8s.io",
            "apiregistration.k8s.io",
            "certificates.k8s.io",
            "discovery.k8s.io",
            "flowcontrol.apiserver.k8s.io",
            "scheduling.k8s.io",
            "storage.k8s.io",
        ];
        let missing = MISSING.contains(&resource)
            || MISSING_GROUPS.contains(&group)
            || group.ends_with("authentication.k8s.io")
            || group == "authorization.k8s.io";
        let mut all = self.kinds.all();
        if missing {
            Failure::not_modelled(format_args!("{resource} in {group}/{version}"))
        } else if all.any(|kind| kind.group == group && !kind.is_custom()) {
            Failure::no_such_resource()
        } else {
            Failure::no_such_path()
        }
    }

    fn collection(&mut self, call: &Call<'_>, target: &Target) -> Outcome<Answer> {
        let kind = &target.kind;
        match *call.method {
            Method::GET if call.query.is_true("watch") => self.watch(call, kind, &target.namespace),
            Method::GET => self.list(call, kind, &target.namespace),
            Method::POST if kind.namespaced && target.namespace.is_empty() => {
                Err(Failure::method_not_allowed())
            }
            Method::POST => {
                let view = call.view()?;
                if kind.is_custom() && self.is_crd_terminating(kind) {
                    let object = call.object(&kind.kind)?;
                    let cause =
                        "create not allowed while custom resource definition is terminating";
                    return Err(Failure::forbidden(kind, meta::name(&object), cause));
                }
                call.check_options("CreateOptions")?;
                call.check_content()?;
                let created = self.create(write(call, target), call.object(&kind.kind)?)?;
                Ok(answer(kind, view, &created, 201))
            }
            Method::DELETE if !kind.is("", "namespaces") => {
                Err(Failure::not_modelled("deletion of collections"))
            }
            _ => Err(Failure::method_not_allowed()),
        }
    }

    fn object(&mut self, call: &Call<'_>, target: &Target) -> Outcome<Answer> {
        let kind = &target.kind;
        match target.subresource.as_str() {
            "" => {}
            "status" if kind.status => {}
            "finalize" if kind.is("", "namespaces") && call.method == Method::PUT => {}
            "status" if kind.is_custom() => return Err(Failure::not_found(kind, &target.name)),
            _ if kind.is_custom() => return Err(Failure::no_such_path()),
            "status" => return Err(Failure::no_such_resource()),
            other => {
                return Err(Failure::not_modelled(format_args!(
                    "the subresource {other} of {}",
                    kind.qualified()
                )));
            }
        }
        let view = call.view()?;
        match *call.method {
            // The real server sends the object and ends the response.
            Method::GET if call.query.is_true("watch") => {
                let found = self.read(call, target)?;
                let line = render::line(&rendered(kind, view, &found));
                Ok(self.watches.open_ended(call.now, kind, line))
            }
            Method::GET => {
                let found = self.read(call, target)?;
                Ok(answer(kind, view, &found, 200))
            }
            Method::PUT => {
                call.check_options("UpdateOptions")?;
                call.check_content()?;
                let next = call.object(&kind.kind)?;
                let (object, code) = self.replace(write(call, target), next)?;
                Ok(answer(kind, view, &object, code))
            }
            Method::PATCH => {
                call.check_options("PatchOptions")?;
                let (object, code) = self.patch(call, write(call, target))?;
                Ok(answer(kind, view, &object, code))
            }
            Method::DELETE if target.subresource.is_empty() => self.remove(call, target, view),
            _ => Err(Failure::method_not_allowed()),
        }
    }

    fn read(&self, call: &Call<'_>, target: &Target) -> Outcome<Arc<Value>> {
        let asked = match call.query.get("resourceVersion") {
            "" => 0,
            text => list::version(text)?,
        };
        if asked > self.store.revision() {
            return Err(Failure::too_large_version(asked, self.store.revision()));
        }
        let key = target.kind.key(&target.namespace, &target.name);
        let found = self.store.get(&key).cloned();
        found.ok_or_else(|| Failure::not_found(&target.kind, &target.name))
    }

    fn remove(&mut self, call: &Call<'_>, target: &Target, view: View) -> Outcome<Answer> {
        let kind = &target.kind;
        let mut options = call.delete_options()?;
        let mut write = write(call, target);
        // Options in a body replace those in the query.
        if call.body.is_empty() {
            call.check_options("DeleteOptions")?;
        } else {
            write.dry_run = false;
        }
        let policy = call.query.get("propagationPolicy");
        if call.body.is_empty() && !policy.is_empty() {
            options["propagationPolicy"] = policy.into();
        }
        check_policy(&options)?;
        write.dry_run |= options["dryRun"] == serde_json::json!(["All"]);
        Ok(match self.delete(&write, &options)? {
            Deleted::Remains(object) => answer(kind, view, &object, 200),
            Deleted::Gone(object) if kind.returns_deleted() => {
                let mut object = (*object).clone();
                if !write.dry_run {
                    meta::set(
                        &mut object,
                        "resourceVersion",
                        self.store.revision().to_string(),
                    );
                }
                answer(kind, view, &object, 200)
            }
            Deleted::Gone(object) => {
                let body = status::deleted(kind, &target.name, meta::text(&object, "uid"));
                Answer::Complete(respond(200, "application/json", body.to_string()))
            }
        })
    }
}

fn check_policy(options: &Value) -> Outcome<()> {
    let policy = &options["propagationPolicy"];
    let cause = match policy.as_str() {
        None => return Ok(()),
        Some(_) if !options["orphanDependents"].is_null() => Cause::invalid(
            "propagationPolicy",
            policy,
            "orphanDependents and deletionPropagation cannot be both set",
        ),
        Some("Foreground" | "Background" | "Orphan") => return Ok(()),
        Some(_) => Cause {
            reason: "FieldValueNotSupported",
            message: format!(
                "Unsupported value: {policy}: supported values: \"Foreground\", \"Background\", \"Orphan\", \"nil\""
            ),
            field: "propagationPolicy".to_owned(),
        },
    };
    Err(Failure::invalid_options("DeleteOptions", &[cause]))
}

fn write(call: &Call<'_>, target: &Target) -> Write {
    Write {
        kind: target.kind.clone(),
        namespace: target.namespace.clone(),
        name: target.name.clone(),
        subresource: target.subresource.clone(),
        manager: call.manager(),
        applied: false,
        validation: call.query.get("fieldValidation").to_owned(),
        dry_run: call.dry_run(),
        now: call.now,
        by: call.agent.to_owned(),
    }
}

fn rendered<'a>(kind: &'a Kind, view: View, object: &'a Value) -> Rendered<'a> {
    Rendered {
        object,
        kind,
        view,
        bare: false,
        version: None,
    }
}

fn answer(kind: &Kind, view: View, object: &Value, code: u16) -> Answer {
    let body = render::bytes(&rendered(kind, view, object));
    Answer::Complete(respond(code, "application/json", body))
}
