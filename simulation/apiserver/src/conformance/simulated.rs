//! Runs the cases against the simulated server. Time passes only while a case waits.

use std::collections::VecDeque;
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response};
use jiff::Timestamp;

use super::{Line, Opened, Server};
use crate::server::{Answer, ApiServer, Options, WatchId};

/// Longest step of the simulated time.
const STEP: Duration = Duration::from_millis(100);

#[derive(Debug)]
pub struct Simulated {
    server: ApiServer,
    now: Timestamp,
    watches: Vec<WatchLines>,
}

/// The unread lines of one watch.
#[derive(Debug)]
struct WatchLines {
    id: WatchId,
    unread: VecDeque<Bytes>,
    ended: bool,
}

impl Simulated {
    pub fn new() -> Self {
        // 2026-01-01. Any time serves.
        let now = Timestamp::from_second(1_767_225_600).unwrap_or(Timestamp::UNIX_EPOCH);
        let options = Options {
            name: "conformance".to_owned(),
            version: "v1.37.2".to_owned(),
            crd_delay: Duration::from_millis(500),
            controller_delay: Duration::from_millis(50),
        };
        Self {
            server: ApiServer::new(options, now),
            now,
            watches: Vec::new(),
        }
    }

    fn advance(&mut self, time: Duration) {
        let mut remaining = time;
        while !remaining.is_zero() {
            let step = remaining.min(STEP);
            remaining -= step;
            self.now = self.now.checked_add(step).unwrap_or(self.now);
            self.server.advance(self.now);
        }
    }

    /// Returns the next line that the server has sent.
    fn next_pending_line(&mut self, watch: usize) -> Option<Line> {
        let lines = self.watches.get_mut(watch)?;
        let events = self.server.take_events(lines.id);
        lines.unread.extend(events.lines);
        lines.ended |= events.ended;
        if let Some(line) = lines.unread.pop_front() {
            return Some(Line::Text(String::from_utf8_lossy(&line).into_owned()));
        }
        lines.ended.then_some(Line::End)
    }
}

impl Default for Simulated {
    fn default() -> Self {
        Self::new()
    }
}

impl Server for Simulated {
    fn send(&mut self, request: Request<Bytes>) -> Result<Response<Bytes>, String> {
        match self.server.handle(self.now, &request) {
            Answer::Complete(response) => Ok(response),
            Answer::Watch(..) => Err("the server opened a watch".to_owned()),
        }
    }

    fn watch(&mut self, request: Request<Bytes>) -> Result<Opened, String> {
        Ok(match self.server.handle(self.now, &request) {
            Answer::Complete(response) => Opened::Rejected(response),
            Answer::Watch(head, id) => {
                self.watches.push(WatchLines {
                    id,
                    unread: VecDeque::new(),
                    ended: false,
                });
                Opened::Watch(head, self.watches.len() - 1)
            }
        })
    }

    fn next_line(&mut self, watch: usize, limit: Duration) -> Result<Line, String> {
        let mut remaining = limit;
        loop {
            if let Some(line) = self.next_pending_line(watch) {
                return Ok(line);
            }
            if remaining.is_zero() {
                return Ok(Line::Silence);
            }
            let step = remaining.min(STEP);
            remaining -= step;
            self.advance(step);
        }
    }

    fn close(&mut self, watch: usize) {
        if let Some(lines) = self.watches.get(watch) {
            self.server.close_watch(lines.id);
        }
    }

    fn pass(&mut self, time: Duration) {
        self.advance(time);
    }
}
