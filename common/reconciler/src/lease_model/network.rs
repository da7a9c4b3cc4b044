//! Simulates the API server with the Lease, and the connections to it.

use std::time::Duration;

use k8s_openapi::api::coordination::v1::Lease;
use krypton_runtime::lease::LeaseTimes;
use krypton_runtime::lease::state::{LeaseRequest, LeaseResponse};
use proptest::prelude::*;

use super::{PendingCall, SimulatedMember, Time};

/// Effect of one direction of a connection on a message.
#[derive(Clone, Copy, Debug)]
pub(super) enum Flow {
    Pass,
    Drop,
    Delay(Time),
}

#[derive(Clone, Copy, Debug)]
pub(super) enum Link {
    Open { request: Flow, response: Flow },
    Reset,
}

pub(super) const HEALTHY_LINK: Link = Link::Open {
    request: Flow::Pass,
    response: Flow::Pass,
};

pub(super) enum NetworkMessage {
    Request(usize, u64, LeaseRequest, Time),
    Response(usize, u64, LeaseResponse),
}

impl SimulatedMember {
    /// Delivers messages that are due.
    pub(super) fn deliver_messages(&mut self) -> Result<(), TestCaseError> {
        let mut due: Vec<_> = self
            .messages
            .extract_if(.., |(at, _)| *at <= self.now)
            .collect();
        due.sort_by_key(|(at, _)| *at);
        for (_, message) in due {
            match message {
                NetworkMessage::Request(index, number, call, sent) => {
                    let is_late =
                        Duration::from_millis(self.now - sent) > LeaseTimes::MEMBER.call_timeout;
                    if is_late && call != LeaseRequest::Read {
                        // A late write counts as a fault, even if its sender is healthy by now.
                        self.last_fault = self.now;
                    }
                    let response = self.handle_call(index, call)?;
                    self.respond(index, number, response);
                }
                NetworkMessage::Response(index, number, response) => {
                    if let Some(run) = &mut self.processes[index].run
                        && let Some(pending) = &mut run.pending
                        && pending.number == number
                    {
                        pending.response = Some(response);
                    }
                }
            }
        }
        Ok(())
    }

    fn latency(&mut self, flow: Flow) -> Option<Time> {
        let base = self.random_below(400);
        match flow {
            Flow::Pass => Some(base),
            Flow::Drop => None,
            Flow::Delay(delay) => Some(delay + base),
        }
    }

    fn respond(&mut self, index: usize, number: u64, response: LeaseResponse) {
        let Link::Open { response: flow, .. } = self.processes[index].link else {
            return;
        };
        if let Some(latency) = self.latency(flow) {
            let is_write = !matches!(response, LeaseResponse::Read(_));
            let delay = if is_write { self.slow_writes } else { 0 };
            let message = NetworkMessage::Response(index, number, response);
            self.messages.push((self.now + delay + latency, message));
        }
    }

    /// Simulates the API server.
    fn handle_call(
        &mut self,
        index: usize,
        call: LeaseRequest,
    ) -> Result<LeaseResponse, TestCaseError> {
        let present = self.lease.as_ref();
        let written = match call {
            LeaseRequest::Read => return Ok(LeaseResponse::Read(present.cloned().map(Box::new))),
            LeaseRequest::Create(_) if present.is_some() => return Ok(LeaseResponse::Conflict),
            LeaseRequest::Create(spec) => Lease {
                spec: Some(spec),
                ..Lease::default()
            },
            LeaseRequest::Replace(lease) => {
                let version = |lease: &Lease| lease.metadata.resource_version.clone();
                if present.is_none_or(|present| version(present) != version(&lease)) {
                    return Ok(LeaseResponse::Conflict);
                }
                *lease
            }
        };
        self.version += 1;
        let mut lease = written;
        lease.metadata.resource_version = Some(self.version.to_string());
        let previous = self.lease.replace(lease.clone());
        let holder = holder(Some(&lease));
        if holder != self::holder(previous.as_ref()) {
            self.log_line(format_args!(
                "the Lease is {holder:?}'s, written by {index}"
            ));
            for (other, process) in self.processes.iter().enumerate() {
                let alive = process.has_active_helm() && process.holder() != holder;
                prop_assert!(
                    !alive,
                    "the Lease goes to {holder:?} while helm of {other} lives"
                );
            }
        }
        Ok(LeaseResponse::Written(Box::new(lease)))
    }

    pub(super) fn send(&mut self, index: usize, call: LeaseRequest) -> PendingCall {
        self.last_call_number += 1;
        let number = self.last_call_number;
        let mut reset = false;
        match self.processes[index].link {
            Link::Reset => reset = true,
            Link::Open { request: flow, .. } => {
                if let Some(latency) = self.latency(flow) {
                    let message = NetworkMessage::Request(index, number, call, self.now);
                    self.messages.push((self.now + latency, message));
                }
            }
        }
        PendingCall {
            number,
            at: self.boot(index),
            reset,
            response: None,
        }
    }
}

pub(super) fn holder(lease: Option<&Lease>) -> String {
    let spec = lease.and_then(|lease| lease.spec.as_ref());
    let holder = spec.and_then(|spec| spec.holder_identity.clone());
    holder.unwrap_or_default()
}
