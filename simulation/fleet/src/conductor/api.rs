//! Requests to API servers, their responses and watches.

use std::io;

use bytes::Bytes;
use http::{Request, Response, StatusCode};
use jiff::{SignedDuration, Timestamp};
use krypton_sim_apiserver::server::{Answer, ApiServer, Events, WatchId};
use serde_json::Value;
use tokio::sync::mpsc;

use super::queue::Event;
use super::{Millis, Simulation};
use crate::network::Verdict;
use crate::observe::Event as Seen;
use crate::outbox::{Body, ProcessId, Reply};
use crate::plan::{Scope, Strike};
use crate::process::Delivery;

/// A client's connector gives up on a connection after this time.
const CONNECT_TIMEOUT: Millis = 10_000;
/// Interval at which a waiting request checks whether its server still hangs.
const HANGING: Millis = 1_000;

/// TCP sends lost parts again after this time.
const RESEND: Millis = 250;

/// What an API server does with requests.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Health {
    #[default]
    Up,
    /// No process listens.
    Down,
    /// It accepts requests and answers none.
    Hangs,
    /// It answers each request with this status and body, and does nothing.
    Answers {
        code: u16,
        content_type: &'static str,
        body: String,
        retry_after: Option<u32>,
    },
    /// It carries out each request, but its lists have no objects.
    EmptyLists,
    /// It carries out each request, but the client gets only half of the body.
    CutBodies,
}

/// A cluster with its API server.
#[derive(Debug)]
pub struct Cluster {
    pub server: ApiServer,
    pub health: Health,
    /// The requests that `health` concerns.
    pub scope: Scope,
    /// Error of the server's clock.
    pub skew: SignedDuration,
    authority: String,
    /// The time of the scheduled timer.
    timer: Option<Millis>,
}

impl Cluster {
    /// Address of the API server, as `host:port`.
    pub fn authority(&self) -> &str {
        &self.authority
    }

    /// What the server does with a request.
    fn health_for(&self, request: &Request<Bytes>) -> &Health {
        let concerned = self.scope.concerns(request.method(), request.uri().path());
        if concerned { &self.health } else { &Health::Up }
    }

    /// The time that the server's clock shows.
    fn clock(&self, wall: Timestamp) -> Timestamp {
        wall.saturating_add(self.skew).unwrap_or(wall)
    }
}

/// Where a request comes from.
pub(super) struct Sender {
    pub process: ProcessId,
    pub host: String,
    /// The request's number among those of the host.
    pub nth: u32,
    pub strike: Option<Strike>,
}

/// A request on its way.
pub(super) struct Arriving {
    id: u64,
    from: Sender,
    cluster: String,
    request: Request<Bytes>,
    reply: Reply,
}

/// A request whose client still waits or reads.
pub(super) struct OpenRequest {
    pub process: ProcessId,
    host: String,
    cluster: String,
    watch: Option<(WatchId, mpsc::UnboundedSender<io::Result<Bytes>>)>,
    /// When the last part arrives. Later parts do not overtake it.
    last: Millis,
    /// Parts that wait until the link is well.
    held: Vec<Bytes>,
    /// Whether the server has ended the watch after these parts.
    ended: bool,
    /// Whether its connection loses all later parts.
    severed: bool,
    /// A request or response that was lost, which the client still waits for.
    lost: Option<Reply>,
}

impl OpenRequest {
    /// Returns the delivery of what waits for the client, and its time.
    fn release(&mut self, at: Millis) -> Option<(ProcessId, Millis, Delivery)> {
        if self.severed || (self.held.is_empty() && !self.ended) {
            return None;
        }
        let (_, parts) = self.watch.as_ref()?;
        let (parts, lines) = (parts.clone(), std::mem::take(&mut self.held));
        if self.ended {
            self.watch = None;
        }
        self.last = self.last.max(at);
        let delivery: Delivery = Box::new(move || {
            for line in lines {
                drop(parts.send(Ok(line)));
            }
        });
        Some((self.process, self.last, delivery))
    }
}

impl Simulation {
    /// Adds a cluster whose API server has this authority (`host:port`).
    pub fn add_cluster(&mut self, name: &str, authority: &str, server: ApiServer) {
        let cluster = Cluster {
            server,
            health: Health::Up,
            scope: Scope::default(),
            skew: SignedDuration::ZERO,
            authority: authority.to_owned(),
            timer: None,
        };
        self.clusters.insert(name.to_owned(), cluster);
        self.after_server(name);
    }

    pub fn cluster(&self, name: &str) -> Option<&Cluster> {
        self.clusters.get(name)
    }

    /// Changes a cluster, then sends its watch events.
    pub fn change_cluster<R>(
        &mut self,
        name: &str,
        change: impl FnOnce(&mut Cluster, Timestamp) -> R,
    ) -> Option<R> {
        let wall = self.wall();
        let cluster = self.clusters.get_mut(name)?;
        let now = cluster.clock(wall);
        let result = change(cluster, now);
        self.after_server(name);
        Some(result)
    }

    /// Handles a request of a person, which no link delays.
    pub fn request(&mut self, cluster: &str, request: &Request<Bytes>) -> Option<Response<Bytes>> {
        self.change_cluster(cluster, |cluster, now| {
            match cluster.server.handle(now, request) {
                Answer::Complete(response) => Some(response),
                Answer::Watch(_, watch) => {
                    cluster.server.close_watch(watch);
                    None
                }
            }
        })?
    }

    pub(super) fn send_request(
        &mut self,
        from: Sender,
        id: u64,
        authority: &str,
        (request, reply): (Request<Bytes>, Reply),
    ) {
        let found = self
            .clusters
            .iter()
            .find(|(_, cluster)| cluster.authority == authority);
        let Some(cluster) = found.map(|(name, _)| name.clone()) else {
            refuse(reply, io::ErrorKind::AddrNotAvailable);
            return;
        };
        let open = OpenRequest {
            process: from.process,
            host: from.host.clone(),
            cluster: cluster.clone(),
            watch: None,
            last: self.now,
            held: Vec::new(),
            ended: false,
            severed: false,
            lost: None,
        };
        self.requests.insert(id, open);
        if from.strike == Some(Strike::Fail) {
            let delivery = Box::new(move || refuse(reply, io::ErrorKind::ConnectionReset));
            self.deliver(from.process, self.now + 2, delivery);
            return;
        }
        match self.links.verdict(&from.host, &cluster) {
            Verdict::Arrives(delay) => {
                let arriving = Arriving {
                    id,
                    from,
                    cluster,
                    request,
                    reply,
                };
                self.queue
                    .push(self.now + delay, Event::Arrives(Box::new(arriving)));
            }
            Verdict::Refused => {
                let delivery = Box::new(move || refuse(reply, io::ErrorKind::ConnectionRefused));
                self.deliver(from.process, self.now + 2, delivery);
            }
            Verdict::Lost => {
                self.observe_lost(&from.host, &cluster, &request);
                let delivery = Box::new(move || refuse(reply, io::ErrorKind::TimedOut));
                self.deliver(from.process, self.now + CONNECT_TIMEOUT, delivery);
            }
        }
    }

    pub(super) fn request_arrives(&mut self, arriving: Arriving) {
        let cluster = self.clusters.get(&arriving.cluster);
        let hangs = |cluster: &Cluster| *cluster.health_for(&arriving.request) == Health::Hangs;
        if cluster.is_some_and(hangs) {
            // The server answers when it no longer hangs, unless the client gives up before.
            if self.requests.contains_key(&arriving.id) {
                let again = Event::Arrives(Box::new(arriving));
                self.queue.push(self.now + HANGING, again);
            }
            return;
        }
        let Arriving {
            id,
            from:
                Sender {
                    process,
                    host,
                    nth,
                    strike,
                },
            cluster: name,
            request,
            reply,
        } = arriving;
        let answer = self.answer(&name, &request);
        // Later changes are events of this watch.
        let mut body = None;
        if let (Some(Ok(Answer::Watch(_, watch))), Some(open)) =
            (&answer, self.requests.get_mut(&id))
        {
            #[allow(
                clippy::disallowed_methods,
                reason = "the length of a run bounds what an API server sends"
            )]
            let (parts, received) = mpsc::unbounded_channel();
            open.watch = Some((*watch, parts));
            body = Some(received);
        }
        self.after_server(&name);
        let back = match strike {
            Some(Strike::LoseAnswer) => Verdict::Refused,
            _ => self.links.verdict(&name, &host),
        };
        if let Some(Ok(answer)) = &answer {
            let code = match answer {
                Answer::Complete(response) => response.status(),
                Answer::Watch(..) => StatusCode::OK,
            };
            self.observe(Seen::Answered {
                host: host.clone(),
                nth,
                cluster: name.clone(),
                method: request.method().to_string(),
                path: path_of(request.uri()),
                code: code.as_u16(),
            });
        }
        let (answer, delay) = match (answer, back) {
            (Some(Ok(answer)), Verdict::Arrives(delay)) => (answer, delay),
            (Some(Err(kind)), Verdict::Arrives(delay)) => {
                let delivery = Box::new(move || refuse(reply, kind));
                self.deliver(process, self.now + delay, delivery);
                return;
            }
            (Some(_), Verdict::Refused) => {
                let delivery = Box::new(move || refuse(reply, io::ErrorKind::ConnectionReset));
                self.deliver(process, self.now + 2, delivery);
                return;
            }
            (_, _) => {
                self.observe_lost(&host, &name, &request);
                if let Some(open) = self.requests.get_mut(&id) {
                    open.lost = Some(reply);
                }
                return;
            }
        };
        let at = self.now + delay;
        match answer {
            Answer::Complete(response) => {
                let response = response.map(Body::Complete);
                self.deliver(process, at, Box::new(move || respond(reply, response)));
            }
            Answer::Watch(head, watch) => {
                let Some((open, body)) = self.requests.get_mut(&id).zip(body) else {
                    self.change_cluster(&name, |cluster, _| cluster.server.close_watch(watch));
                    return;
                };
                open.last = at;
                let response = head.map(|()| Body::Parts(body));
                self.deliver(process, at, Box::new(move || respond(reply, response)));
            }
        }
    }

    /// Returns the answer of an API server, or the failure of the connection. `None` if it never answers.
    fn answer(
        &mut self,
        name: &str,
        request: &Request<Bytes>,
    ) -> Option<Result<Answer, io::ErrorKind>> {
        let wall = self.wall();
        let cluster = self.clusters.get_mut(name)?;
        let now = cluster.clock(wall);
        match cluster.health_for(request) {
            Health::Up => Some(Ok(cluster.server.handle(now, request))),
            Health::EmptyLists => Some(Ok(changed(cluster.server.handle(now, request), emptied))),
            Health::CutBodies => Some(Ok(changed(cluster.server.handle(now, request), |body| {
                body.slice(..body.len() / 2)
            }))),
            Health::Down => Some(Err(io::ErrorKind::ConnectionRefused)),
            Health::Hangs => None,
            Health::Answers {
                code,
                content_type,
                body,
                retry_after,
            } => {
                let mut response = Response::builder()
                    .status(*code)
                    .header("content-type", *content_type);
                if let Some(seconds) = retry_after {
                    response = response.header("retry-after", *seconds);
                }
                let response = response.body(Bytes::from(body.clone()));
                Some(Ok(Answer::Complete(response.unwrap_or_default())))
            }
        }
    }

    pub(super) fn drop_request(&mut self, id: u64) {
        let Some(open) = self.requests.remove(&id) else {
            return;
        };
        if let (Some((watch, _)), Some(cluster)) =
            (open.watch, self.clusters.get_mut(&open.cluster))
        {
            cluster.server.close_watch(watch);
        }
    }

    /// The clients of a process are gone.
    pub(super) fn drop_requests_of(&mut self, process: ProcessId) {
        let all = self
            .requests
            .iter()
            .filter(|(_, open)| open.process == process);
        let all: Vec<u64> = all.map(|(id, _)| *id).collect();
        for id in all {
            self.drop_request(id);
        }
    }

    pub(super) fn server_timer(&mut self, name: &str) {
        let now = self.now;
        self.change_cluster(name, |cluster, wall| {
            if cluster.timer == Some(now) {
                cluster.timer = None;
            }
            cluster.server.advance(wall);
        });
    }

    /// Records the changes of an API server, sends its watch events and schedules its next timer.
    fn after_server(&mut self, name: &str) {
        let wall = self.wall();
        let Some(cluster) = self.clusters.get_mut(name) else {
            return;
        };
        let changes = cluster.server.take_changes();
        let watches = cluster.server.watches_with_events();
        let sends: Vec<(WatchId, Events)> = watches
            .into_iter()
            .map(|watch| (watch, cluster.server.take_events(watch)))
            .collect();
        let next = cluster.server.next_timer().map(|timer| {
            let now = cluster.clock(wall);
            let wait = timer.duration_since(now).as_millis();
            self.now + u64::try_from(wait).unwrap_or_default() + 1
        });
        if let Some(next) = next
            && cluster
                .timer
                .is_none_or(|timer| timer > next || timer < self.now)
        {
            cluster.timer = Some(next);
            self.queue.push(next, Event::Server(name.to_owned()));
        }
        for change in changes {
            let cluster = name.to_owned();
            self.observe(Seen::Change { cluster, change });
        }
        for (watch, events) in sends {
            self.send_events(name, watch, events);
        }
    }

    fn send_events(&mut self, cluster: &str, watch: WatchId, events: Events) {
        let mut open = self.requests.values_mut();
        let open = open.find(|open| {
            open.cluster == cluster && open.watch.as_ref().is_some_and(|(id, _)| *id == watch)
        });
        let Some(open) = open else {
            return;
        };
        open.held.extend(events.lines);
        open.ended |= events.ended;
        if !self.links.passes(cluster, &open.host) {
            return;
        }
        let delay = match self.links.verdict(cluster, &open.host) {
            Verdict::Arrives(delay) => delay,
            Verdict::Lost | Verdict::Refused => RESEND,
        };
        if let Some((process, at, delivery)) = open.release(self.now + delay) {
            self.deliver(process, at, delivery);
        }
    }

    /// Sends the parts of watches whose link is well again.
    pub(super) fn release_watches(&mut self) {
        let at = self.now + RESEND;
        let links = &self.links;
        let open = self.requests.values_mut();
        let well = open.filter(|open| links.passes(&open.cluster, &open.host));
        let released: Vec<_> = well.filter_map(|open| open.release(at)).collect();
        for (process, at, delivery) in released {
            self.deliver(process, at, delivery);
        }
    }

    /// The watches of a host lose what the server sends. Helm has no deadline for its requests.
    pub(super) fn half_open_watches(&mut self, cluster: &str, host: &str) {
        let runs = &self.helm_runs;
        let open = self.requests.values_mut();
        let open = open.filter(|open| open.cluster == cluster && open.host == host);
        for open in open.filter(|open| !runs.contains_key(&open.process)) {
            open.severed = open.watch.is_some();
        }
    }

    pub(super) fn reset_lost_of_helm(&mut self) {
        let lost: Vec<_> = self
            .requests
            .values_mut()
            .filter(|open| self.helm_runs.contains_key(&open.process))
            .filter_map(|open| Some((open.process, open.lost.take()?)))
            .collect();
        for (process, reply) in lost {
            let delivery = Box::new(move || refuse(reply, io::ErrorKind::ConnectionReset));
            self.deliver(process, self.now + 1, delivery);
        }
    }

    fn observe_lost(&mut self, host: &str, cluster: &str, request: &Request<Bytes>) {
        self.observe(Seen::Lost {
            host: host.to_owned(),
            cluster: cluster.to_owned(),
            method: request.method().to_string(),
            path: path_of(request.uri()),
        });
    }
}

fn path_of(uri: &http::Uri) -> String {
    uri.path_and_query()
        .map(ToString::to_string)
        .unwrap_or_default()
}

/// Changes the body of a complete answer.
fn changed(answer: Answer, change: impl FnOnce(Bytes) -> Bytes) -> Answer {
    match answer {
        Answer::Complete(response) => Answer::Complete(response.map(change)),
        watch => watch,
    }
}

/// The same list without its objects. Other bodies do not change.
fn emptied(body: Bytes) -> Bytes {
    let Ok(mut list) = serde_json::from_slice::<Value>(&body) else {
        return body;
    };
    let Some(items) = list.get_mut("items").and_then(Value::as_array_mut) else {
        return body;
    };
    items.clear();
    for field in ["continue", "remainingItemCount"] {
        if let Some(metadata) = list.get_mut("metadata").and_then(Value::as_object_mut) {
            metadata.remove(field);
        }
    }
    list.to_string().into()
}

fn refuse(reply: Reply, kind: io::ErrorKind) {
    drop(reply.send(Err(kind.into())));
}

fn respond(reply: Reply, response: Response<Body>) {
    drop(reply.send(Ok(response)));
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn emptied_list_keeps_only_its_version() {
        let list = json!({"metadata": {"resourceVersion": "7", "continue": "c"}, "items": [1]});
        let emptied = emptied(list.to_string().into());
        let expected = json!({"metadata": {"resourceVersion": "7"}, "items": []});
        assert_eq!(serde_json::from_slice::<Value>(&emptied).unwrap(), expected);
        let object = Bytes::from_static(br#"{"data":{}}"#);
        assert_eq!(super::emptied(object.clone()), object);
    }
}
