//! Requests to API servers, their responses and watches.

use std::io;
use std::sync::Arc;

use bytes::Bytes;
use http::{Request, Response, StatusCode};
use jiff::{SignedDuration, Timestamp};
use krypton_sim_apiserver::server::{Answer, ApiServer, Events, Key, WatchId};
use serde_json::Value;
use tokio::sync::mpsc;

use super::Simulation;
use super::queue::QueuedEvent;
use super::requests::{OpenRequest, RequestInTransit, RequestSender};
use crate::network::Transmission;
use crate::observe::Event;
use crate::outbox::{Body, ProcessId, ReplySender};
use crate::plan::{RequestFault, Scope};
use crate::time::Millis;

/// A client's connector gives up on a connection after this time.
const CONNECT_TIMEOUT: Millis = 10_000;
/// Interval at which a waiting request checks whether its server still hangs.
const HANG_CHECK: Millis = 1_000;

/// TCP sends lost segments again after this time.
const RESEND: Millis = 250;

/// An API server's treatment of requests.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Health {
    #[default]
    Up,
    /// No process listens.
    Down,
    /// It accepts requests and never responds.
    Hangs,
    /// It responds to each request with this status and body, and does nothing.
    RespondsWith {
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
    /// The requests to which `health` applies.
    pub scope: Scope,
    /// Error of the server's clock.
    skew: SignedDuration,
    authority: String,
    /// The time of the scheduled timer.
    timer: Option<Millis>,
}

impl Cluster {
    /// Address of the API server, as `host:port`.
    pub fn authority(&self) -> &str {
        &self.authority
    }

    /// The server's treatment of a request.
    fn health_for(&self, request: &Request<Bytes>) -> &Health {
        match &self.health {
            Health::Up => &Health::Up,
            health if self.scope.matches(request.method(), request.uri().path()) => health,
            _ => &Health::Up,
        }
    }

    /// Moves the server's clock.
    pub fn move_clock(&mut self, by: SignedDuration) {
        self.skew += by;
        self.server.move_clock(by);
    }

    /// The time that the server's clock shows.
    fn clock_time(&self, wall_time: Timestamp) -> Timestamp {
        wall_time.saturating_add(self.skew).unwrap_or(wall_time)
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
        self.process_server_changes(name);
    }

    pub fn cluster(&self, name: &str) -> Option<&Cluster> {
        self.clusters.get(name)
    }

    /// Returns an object of a cluster.
    pub fn object(&self, cluster: &str, key: &Key) -> Option<Arc<Value>> {
        self.clusters.get(cluster)?.server.get(key)
    }

    /// Returns all objects of a resource on a cluster.
    pub fn objects(&self, cluster: &str, group: &str, resource: &str) -> Vec<Arc<Value>> {
        let cluster = self.clusters.get(cluster);
        cluster
            .map(|cluster| cluster.server.all(group, resource))
            .unwrap_or_default()
    }

    /// Changes a cluster, then sends its watch events.
    pub fn change_cluster<R>(
        &mut self,
        name: &str,
        change: impl FnOnce(&mut Cluster, Timestamp) -> R,
    ) -> Option<R> {
        let wall_time = self.wall_time();
        let cluster = self.clusters.get_mut(name)?;
        let now = cluster.clock_time(wall_time);
        let result = change(cluster, now);
        self.process_server_changes(name);
        Some(result)
    }

    /// Handles a request of a user, which no link delays.
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
        from: RequestSender,
        id: u64,
        authority: &str,
        (request, reply): (Request<Bytes>, ReplySender),
    ) {
        let entry = self
            .clusters
            .iter()
            .find(|(_, cluster)| cluster.authority == authority);
        let Some(cluster) = entry.map(|(name, _)| name.clone()) else {
            send_error(reply, io::ErrorKind::AddrNotAvailable);
            return;
        };
        let open = OpenRequest {
            process: from.process,
            host: from.host.clone(),
            cluster: cluster.clone(),
            watch: None,
            last_arrival: self.now,
            blocked: Vec::new(),
            ended: false,
            severed: false,
            lost_reply: None,
        };
        self.requests.insert(id, open);
        if from.fault == Some(RequestFault::Fail) {
            let delivery = Box::new(move || send_error(reply, io::ErrorKind::ConnectionReset));
            self.deliver(from.process, self.now + 2, delivery);
            return;
        }
        match self.links.transmit(&from.host, &cluster) {
            Transmission::Arrives(delay) => {
                let in_transit = RequestInTransit {
                    id,
                    from,
                    cluster,
                    request,
                    reply,
                };
                self.queue.push(
                    self.now + delay,
                    QueuedEvent::RequestArrives(Box::new(in_transit)),
                );
            }
            Transmission::Refused => {
                let delivery =
                    Box::new(move || send_error(reply, io::ErrorKind::ConnectionRefused));
                self.deliver(from.process, self.now + 2, delivery);
            }
            Transmission::Lost => {
                self.record_lost_request(&from.host, &cluster, &request);
                let delivery = Box::new(move || send_error(reply, io::ErrorKind::TimedOut));
                self.deliver(from.process, self.now + CONNECT_TIMEOUT, delivery);
            }
        }
    }

    pub(super) fn handle_request(&mut self, in_transit: RequestInTransit) {
        let cluster = self.clusters.get(&in_transit.cluster);
        let health = cluster.map(|cluster| cluster.health_for(&in_transit.request));
        let from_fault = matches!(health, Some(Health::RespondsWith { .. }));
        if health == Some(&Health::Hangs) {
            // The server responds when it no longer hangs, unless the client gives up before.
            if self.requests.contains_key(&in_transit.id) {
                let retry = QueuedEvent::RequestArrives(Box::new(in_transit));
                self.queue.push(self.now + HANG_CHECK, retry);
            }
            return;
        }
        let RequestInTransit {
            id,
            from:
                RequestSender {
                    process,
                    host,
                    nth,
                    fault,
                },
            cluster: name,
            request,
            reply,
        } = in_transit;
        let response = self.server_response(&name, &request);
        // Later changes are events of this watch.
        let mut body = None;
        if let (Some(Ok(Answer::Watch(_, watch))), Some(open)) =
            (&response, self.requests.get_mut(&id))
        {
            #[allow(
                clippy::disallowed_methods,
                reason = "the length of a run bounds what an API server sends"
            )]
            let (chunks, received) = mpsc::unbounded_channel();
            open.watch = Some((*watch, chunks));
            body = Some(received);
        }
        self.process_server_changes(&name);
        let return_transmission = match fault {
            Some(RequestFault::LoseResponse) => Transmission::Refused,
            _ => self.links.transmit(&name, &host),
        };
        if let Some(Ok(answer)) = &response {
            let code = match answer {
                Answer::Complete(response) => response.status(),
                Answer::Watch(..) => StatusCode::OK,
            };
            self.record(Event::Responded {
                host: host.clone(),
                nth,
                cluster: name.clone(),
                method: request.method().to_string(),
                path: path_and_query(request.uri()),
                code: code.as_u16(),
                from_fault,
            });
        }
        let (answer, delay) = match (response, return_transmission) {
            (Some(Ok(answer)), Transmission::Arrives(delay)) => (answer, delay),
            (Some(Err(kind)), Transmission::Arrives(delay)) => {
                let delivery = Box::new(move || send_error(reply, kind));
                self.deliver(process, self.now + delay, delivery);
                return;
            }
            (Some(_), Transmission::Refused) => {
                let delivery = Box::new(move || send_error(reply, io::ErrorKind::ConnectionReset));
                self.deliver(process, self.now + 2, delivery);
                return;
            }
            (_, _) => {
                self.record_lost_request(&host, &name, &request);
                if let Some(open) = self.requests.get_mut(&id) {
                    open.lost_reply = Some(reply);
                }
                return;
            }
        };
        let at = self.now + delay;
        let response = match answer {
            Answer::Complete(response) => response.map(Body::Complete),
            Answer::Watch(head, watch) => {
                let Some((open, body)) = self.requests.get_mut(&id).zip(body) else {
                    self.change_cluster(&name, |cluster, _| cluster.server.close_watch(watch));
                    return;
                };
                // A chunk with earlier changes may already be on its way, and arrive after the head.
                open.reserve_arrival(at);
                head.map(|()| Body::Chunks(body))
            }
        };
        let delivery = Box::new(move || drop(reply.send(Ok(response))));
        self.deliver(process, at, delivery);
    }

    /// Returns the response of an API server, or the failure of the connection. `None` if it never responds.
    fn server_response(
        &mut self,
        name: &str,
        request: &Request<Bytes>,
    ) -> Option<Result<Answer, io::ErrorKind>> {
        let wall_time = self.wall_time();
        let cluster = self.clusters.get_mut(name)?;
        let now = cluster.clock_time(wall_time);
        match cluster.health_for(request) {
            Health::Up => Some(Ok(cluster.server.handle(now, request))),
            Health::EmptyLists => Some(Ok(map_body(
                cluster.server.handle(now, request),
                without_items,
            ))),
            Health::CutBodies => Some(Ok(map_body(cluster.server.handle(now, request), |body| {
                body.slice(..body.len() / 2)
            }))),
            Health::Down => Some(Err(io::ErrorKind::ConnectionRefused)),
            Health::Hangs => None,
            Health::RespondsWith {
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

    /// Drops the requests of a process that has ended.
    pub(super) fn drop_requests_of(&mut self, process: ProcessId) {
        let requests = self
            .requests
            .iter()
            .filter(|(_, open)| open.process == process);
        let ids: Vec<u64> = requests.map(|(id, _)| *id).collect();
        for id in ids {
            self.drop_request(id);
        }
    }

    pub(super) fn handle_server_timer(&mut self, name: &str) {
        let now = self.now;
        self.change_cluster(name, |cluster, wall_time| {
            if cluster.timer == Some(now) {
                cluster.timer = None;
            }
            cluster.server.advance(wall_time);
        });
    }

    /// Records the changes of an API server, sends its watch events and schedules its next timer.
    fn process_server_changes(&mut self, name: &str) {
        let wall_time = self.wall_time();
        let Some(cluster) = self.clusters.get_mut(name) else {
            return;
        };
        let changes = cluster.server.take_changes();
        let watches = cluster.server.watches_with_events();
        let sent_events: Vec<(WatchId, Events)> = watches
            .into_iter()
            .map(|watch| (watch, cluster.server.take_events(watch)))
            .collect();
        let next = cluster.server.next_timer().map(|timer| {
            let now = cluster.clock_time(wall_time);
            let delay = timer.duration_since(now).as_millis();
            self.now + u64::try_from(delay).unwrap_or_default() + 1
        });
        if let Some(next) = next
            && cluster
                .timer
                .is_none_or(|timer| timer > next || timer < self.now)
        {
            cluster.timer = Some(next);
            self.queue
                .push(next, QueuedEvent::ServerTimer(name.to_owned()));
        }
        for change in changes {
            let cluster = name.to_owned();
            self.record(Event::Change { cluster, change });
        }
        for (watch, events) in sent_events {
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
        open.blocked.extend(events.lines);
        open.ended |= events.ended;
        if !self.links.passes(cluster, &open.host) {
            return;
        }
        let delay = match self.links.transmit(cluster, &open.host) {
            Transmission::Arrives(delay) => delay,
            Transmission::Lost | Transmission::Refused => RESEND,
        };
        if let Some((process, at, delivery)) = open.take_delivery(self.now + delay) {
            self.deliver(process, at, delivery);
        }
    }

    /// Sends the blocked chunks of watches whose link works again.
    pub(super) fn send_blocked_watches(&mut self) {
        let at = self.now + RESEND;
        let links = &self.links;
        let open = self.requests.values_mut();
        let unblocked = open.filter(|open| links.passes(&open.cluster, &open.host));
        let deliveries: Vec<_> = unblocked
            .filter_map(|open| open.take_delivery(at))
            .collect();
        for (process, at, delivery) in deliveries {
            self.deliver(process, at, delivery);
        }
    }

    /// The watches of a host lose all later chunks. Helm has no deadline for its requests.
    pub(super) fn half_open_watches(&mut self, cluster: &str, host: &str) {
        let runs = &self.helm_runs;
        let open = self.requests.values_mut();
        let open = open.filter(|open| open.cluster == cluster && open.host == host);
        for open in open.filter(|open| !runs.contains_key(&open.process)) {
            open.severed = open.watch.is_some();
        }
    }

    pub(super) fn reset_lost_helm_requests(&mut self) {
        let lost: Vec<_> = self
            .requests
            .values_mut()
            .filter(|open| self.helm_runs.contains_key(&open.process))
            .filter_map(|open| Some((open.process, open.lost_reply.take()?)))
            .collect();
        for (process, reply) in lost {
            let delivery = Box::new(move || send_error(reply, io::ErrorKind::ConnectionReset));
            self.deliver(process, self.now + 1, delivery);
        }
    }

    fn record_lost_request(&mut self, host: &str, cluster: &str, request: &Request<Bytes>) {
        self.record(Event::RequestLost {
            host: host.to_owned(),
            cluster: cluster.to_owned(),
            method: request.method().to_string(),
            path: path_and_query(request.uri()),
        });
    }
}

fn path_and_query(uri: &http::Uri) -> String {
    uri.path_and_query()
        .map(ToString::to_string)
        .unwrap_or_default()
}

/// Changes the body of a complete response.
fn map_body(answer: Answer, change: impl FnOnce(Bytes) -> Bytes) -> Answer {
    match answer {
        Answer::Complete(response) => Answer::Complete(response.map(change)),
        watch => watch,
    }
}

/// Returns a list without its objects. Other bodies do not change.
fn without_items(body: Bytes) -> Bytes {
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

fn send_error(reply: ReplySender, kind: io::ErrorKind) {
    drop(reply.send(Err(kind.into())));
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn emptied_list_keeps_only_its_version() {
        let list = json!({"metadata": {"resourceVersion": "7", "continue": "c"}, "items": [1]});
        let list_without_items = without_items(list.to_string().into());
        let expected = json!({"metadata": {"resourceVersion": "7"}, "items": []});
        assert_eq!(
            serde_json::from_slice::<Value>(&list_without_items).unwrap(),
            expected
        );
        let object = Bytes::from_static(br#"{"data":{}}"#);
        assert_eq!(super::without_items(object.clone()), object);
    }
}
