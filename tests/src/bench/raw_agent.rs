//! Implements agent sessions for messages that the real agent never sends: probes and floods. A probe makes the hub
//! confirm that it has processed a report.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use krypton_agent::session::connect::Connection;
use krypton_proto::v1::{
    AgentMessage, Applied, Heartbeat, Hello, HubMessage, Report, Tenant,
    agent_message::Kind as AgentMessageKind, hub_message::Kind as HubMessageKind,
};
use krypton_runtime::clock;
use krypton_types::{
    desired::Version,
    member::MemberReport,
    tenant::{TenantKey, TenantReport},
};
use parking_lot::Mutex;
use serde::Deserialize;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;

use crate::simulated::{Enrolled, KUBERNETES_VERSION, REPLICA, installed_report};

/// Longer than the hub's minimum interval between two resync requests to one agent.
const PROBE_INTERVAL: Duration = Duration::from_millis(10_200);
/// Capacity of the queue of outgoing messages. When the stream's window is full too, the sender waits.
const OUTGOING_CAPACITY: usize = 4;
/// Number of Tenants in a flood. The flood changes these and creates no others.
const FLOOD_TENANTS: u64 = 200;

/// Time of each request, and the latency of the response.
pub(crate) type Samples = Arc<Mutex<Vec<(Instant, Duration)>>>;

struct RawSession {
    sender: mpsc::Sender<AgentMessage>,
    incoming: Streaming<HubMessage>,
    _connection: Connection,
}

impl RawSession {
    /// Opens a session and completes a full report without Tenants.
    async fn open(enrolled: &Enrolled) -> Result<Self> {
        let connection = enrolled.dialer.connect().await?;
        let (sender, messages) = mpsc::channel(OUTGOING_CAPACITY);
        let hello = Hello {
            protocol_min: 1,
            protocol_max: 1,
            agent_version: env!("CARGO_PKG_VERSION").to_owned(),
            replica: REPLICA.to_owned(),
            cluster_uid: format!("cluster-of-{}", enrolled.name),
            kubernetes_version: KUBERNETES_VERSION.to_owned(),
            applied: None,
            now: clock::wall().as_second(),
            // Simulates an agent that is too old for CA rotation.
            trusted_roots: None,
        };
        let mut session = {
            let mut fleet = connection.fleet();
            let hello_message = agent_message(AgentMessageKind::Hello(hello));
            sender.send(hello_message).await.context("saying Hello")?;
            let response = fleet.connect(ReceiverStream::new(messages)).await?;
            Self {
                sender,
                incoming: response.into_inner(),
                _connection: connection,
            }
        };
        let HubMessageKind::Welcome(_) = session.receive().await? else {
            bail!("the hub's first message is not a Welcome");
        };
        session.send_full_report(0).await?;
        Ok(session)
    }

    async fn send_message(&self, kind: AgentMessageKind) -> Result<()> {
        let sent = self.sender.send(agent_message(kind)).await;
        sent.context("the session has ended")
    }

    async fn receive(&mut self) -> Result<HubMessageKind> {
        loop {
            let received = self.incoming.message().await?;
            let received = received.context("the hub has ended the session")?;
            if let Some(kind) = received.kind {
                return Ok(kind);
            }
        }
    }

    async fn send_full_report(&self, number: u64) -> Result<()> {
        let member = MemberReport {
            synced: true,
            ready: true,
            writing: true,
            connected: true,
            holder: Some(format!("agent/{REPLICA}")),
            ..MemberReport::default()
        };
        self.send_message(AgentMessageKind::Report(Report {
            deployments: Vec::new(),
            placed: Vec::new(),
            tenants: Vec::new(),
            member: Some(member.into()),
            complete: Some(number),
        }))
        .await
    }
}

fn agent_message(kind: AgentMessageKind) -> AgentMessage {
    AgentMessage { kind: Some(kind) }
}

fn tenant_report(number: u64, generation: i64) -> AgentMessageKind {
    let key = TenantKey::new("default", format!("flood-{number:03}"));
    let report = TenantReport {
        observed_generation: generation,
        ..installed_report()
    };
    AgentMessageKind::Report(Report {
        deployments: Vec::new(),
        placed: Vec::new(),
        tenants: vec![Tenant::new(&key, Some(&report))],
        member: None,
        complete: None,
    })
}

/// Reports a Tenant's change with a wrong digest, and measures the time until the hub requests a resync. By then, the
/// hub has processed the report. `offset` delays the first report, as a fraction of the interval.
pub(crate) async fn probe(enrolled: Enrolled, offset: f64, samples: Samples) -> Result<()> {
    let mut session = RawSession::open(&enrolled).await?;
    let mut sent_at = None;
    let mut generation = 0;
    let next = tokio::time::sleep(PROBE_INTERVAL.mul_f64(offset));
    tokio::pin!(next);
    loop {
        tokio::select! {
            () = &mut next => {
                next.as_mut().reset(tokio::time::Instant::now() + PROBE_INTERVAL);
                generation += 1;
                sent_at = Some(Instant::now());
                session.send_message(tenant_report(0, generation)).await?;
                session.send_message(AgentMessageKind::Heartbeat(Heartbeat { tenants: 0, digest_high: 0, digest_low: 0 })).await?;
            }
            incoming = session.receive() => match incoming? {
                HubMessageKind::Resync(resync) => {
                    if let Some(sent_at) = sent_at.take() {
                        samples.lock().push((sent_at, sent_at.elapsed()));
                    }
                    session.send_full_report(resync.number).await?;
                }
                HubMessageKind::Desired(desired) => {
                    // Only the version is needed: a thousand agents share one process.
                    let state: VersionedState = serde_json::from_slice(&desired.state)?;
                    let applied = Applied::new(state.version, desired.digest);
                    session.send_message(AgentMessageKind::Applied(applied)).await?;
                }
                _ => {}
            }
        }
    }
}

#[derive(Deserialize)]
struct VersionedState {
    version: Version,
}

/// Reports changes of one Tenant after the other, as fast as possible.
pub(crate) async fn flood(enrolled: Enrolled) -> Result<()> {
    let mut session = RawSession::open(&enrolled).await?;
    let sender = session.sender.clone();
    let flooding = async {
        for number in 0_u64.. {
            let generation = i64::try_from(number).unwrap_or(i64::MAX);
            let next = agent_message(tenant_report(number % FLOOD_TENANTS, generation));
            sender.send(next).await.context("the session has ended")?;
        }
        Ok(())
    };
    let receiving = async {
        loop {
            session.receive().await?;
        }
    };
    tokio::select! {
        ended = flooding => ended,
        ended = receiving => ended,
    }
}
