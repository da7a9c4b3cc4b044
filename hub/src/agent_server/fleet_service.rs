//! Implements the service `krypton.fleet.v1.Fleet`: authorizes callers and handles their calls.

use std::fmt;
use std::fs::File;
use std::io::{Read as _, Seek as _, SeekFrom};
use std::sync::Arc;
use std::time::Duration;

use futures::stream::BoxStream;
use krypton_helm::chart::{ChartCache, ChartRef, FetchedChart};
use krypton_proto::v1::{self, AgentMessage, HubMessage, chart_part, fleet_server::Fleet};
use krypton_proto::{AGENT_MESSAGE_MAX, CHUNK, HUB_MESSAGE_MAX};
use krypton_runtime::clock::{self, BootTime};
use krypton_runtime::newest::Newest as _;
use krypton_runtime::off_thread;
use krypton_types::error_chain::chain;
use krypton_types::validity::AGENT_CERTIFICATE_LIFE;
use kube::Client;
use rustls::pki_types::CertificateDer;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming};

use crate::agent_server::enrollment_service::{self, to_wire};
use crate::agent_server::listener::Peer;
use crate::agent_server::session::{Sessions, admit};
use crate::ca::{AgentCertificate, CurrentAuthority, read_agent_certificate};
use crate::members::agent_keys::{self, KeyStatus};
use crate::members::member::{Member, RequestKind};

/// Concurrent chart streams to agents. A chart has at most 10 MiB, and each stream holds two chunks.
const CHART_STREAMS: usize = 32;
/// Chunks of one chart in flight.
const CHUNKS_AHEAD: usize = 2;
/// As long as an agent waits for a chart.
const CHART_DEADLINE: Duration = Duration::from_secs(60);
/// Deadline for recording a renewed key.
const RECORD_DEADLINE: Duration = Duration::from_secs(10);
/// Time to wait for the record. The watch on EdgeClusters usually delivers it sooner.
const RECORD_VISIBLE_TIMEOUT: Duration = Duration::from_secs(2);

/// The service, for `FleetServer`.
pub struct FleetService {
    sessions: Arc<Sessions>,
    charts: Arc<ChartCache>,
    authority: Arc<CurrentAuthority>,
    chart_streams: Arc<Semaphore>,
    /// Where the hub records signed keys on EdgeClusters; `None` in tests without a home cluster.
    home: Option<Client>,
}

impl fmt::Debug for FleetService {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FleetService").finish_non_exhaustive()
    }
}

impl FleetService {
    pub fn new(
        sessions: Arc<Sessions>,
        charts: Arc<ChartCache>,
        authority: Arc<CurrentAuthority>,
        home: Option<Client>,
    ) -> Self {
        Self {
            sessions,
            charts,
            authority,
            chart_streams: Arc::new(Semaphore::new(CHART_STREAMS)),
            home,
        }
    }

    /// Returns the member that may make this call now, and its certificate.
    fn admit<T>(
        &self,
        request: &Request<T>,
        kind: RequestKind,
    ) -> Result<(Arc<Member>, AgentCertificate), Status> {
        self.sessions.leader.ensure_serving()?;
        let certificate = caller(request)?;
        let member = admit(&self.sessions.members, &certificate, &self.authority.get())?;
        self.sessions.check_key(&member, &certificate)?;
        check_rate(&member, kind)?;
        Ok((member, certificate))
    }

    /// Runs before the certificate leaves: the hub refuses keys that it has not recorded.
    async fn record(
        &self,
        member: &Member,
        certificate: &AgentCertificate,
        signed: Option<&CertificateDer<'static>>,
    ) -> Result<(), Status> {
        let (Some(home), Some(signed)) = (&self.home, signed) else {
            return Ok(());
        };
        self.sessions.leader.ensure_writing()?;
        let trust_domain = self.authority.get().trust_domain().to_owned();
        let next = read_agent_certificate(&trust_domain, signed)
            .map_err(|error| Status::internal(error.to_string()))?;
        let leader = &self.sessions.leader;
        let (home, now) = (home.clone(), clock::wall());
        let recording = enrollment_service::record_renewal(home, leader, certificate, &next, now);
        let recording = leader.tracked(recording);
        let result = tokio::time::timeout(RECORD_DEADLINE, recording).await;
        result.map_err(|_| {
            Status::unavailable("the home cluster does not respond; the agent retries")
        })??;
        // The agent reconnects with it immediately, so this hub waits until it knows the key.
        let key = next.recorded_key();
        let mut admission = member.admission.subscribe();
        let recorded = admission.wait_for(|admission| {
            let keys = admission.keys.as_ref();
            agent_keys::key_status(keys, &key, clock::wall()) == KeyStatus::Valid
        });
        if tokio::time::timeout(RECORD_VISIBLE_TIMEOUT, recorded)
            .await
            .is_err()
        {
            tracing::debug!(member = %certificate.cluster, "the new key is not recorded yet");
        }
        Ok(())
    }

    /// Returns the gRPC server with its message size limits.
    pub fn into_server(self) -> v1::fleet_server::FleetServer<Self> {
        v1::fleet_server::FleetServer::new(self)
            .max_decoding_message_size(AGENT_MESSAGE_MAX)
            .max_encoding_message_size(HUB_MESSAGE_MAX)
    }
}

/// Returns the caller's client certificate, the only accepted proof of identity. Messages cannot change it.
fn caller<T>(request: &Request<T>) -> Result<AgentCertificate, Status> {
    let peer = request.extensions().get::<Peer>();
    match peer.map(|peer| peer.certificate.clone()) {
        Some(Ok(certificate)) => Ok(certificate),
        Some(Err(problem)) => Err(Status::unauthenticated(problem)),
        None => Err(Status::unauthenticated("no client certificate")),
    }
}

fn check_rate(member: &Member, asking: RequestKind) -> Result<(), Status> {
    member
        .take_request(BootTime::now(), asking)
        .map_err(|wait| {
            let resource = match asking {
                RequestKind::Session => "a session",
                RequestKind::Renewal => "a certificate",
                RequestKind::Chart => "a chart",
            };
            Status::resource_exhausted(format!(
                "this member has requested {resource} too often; retry in {} s",
                wait.as_secs() + 1
            ))
        })
}

#[tonic::async_trait]
impl Fleet for FleetService {
    type ConnectStream = ReceiverStream<Result<HubMessage, Status>>;
    type FetchChartStream = BoxStream<'static, Result<v1::ChartPart, Status>>;

    async fn connect(
        &self,
        request: Request<Streaming<AgentMessage>>,
    ) -> Result<Response<Self::ConnectStream>, Status> {
        let (member, certificate) = self.admit(&request, RequestKind::Session)?;
        let messages = self.sessions.start(
            member,
            certificate,
            request.into_inner(),
            self.authority.subscribe(),
        );
        Ok(Response::new(ReceiverStream::new(messages)))
    }

    async fn renew(
        &self,
        request: Request<v1::RenewRequest>,
    ) -> Result<Response<v1::RenewResponse>, Status> {
        let (member, certificate) = self.admit(&request, RequestKind::Renewal)?;
        let certificate_request = request.into_inner().certificate_request;
        let authority = self.authority.get_to_sign(&self.sessions.leader)?;
        let certificates = authority
            .sign_agent(
                &certificate_request,
                &certificate.cluster,
                &certificate.uid,
                clock::wall(),
                AGENT_CERTIFICATE_LIFE,
            )
            .map_err(|error| Status::invalid_argument(chain(&error)))?;
        self.record(&member, &certificate, certificates.first())
            .await?;
        tracing::info!(member = %certificate.cluster, "an agent's certificate was renewed");
        Ok(Response::new(v1::RenewResponse {
            certificates: to_wire(certificates),
            roots: to_wire(authority.roots()),
        }))
    }

    async fn fetch_chart(
        &self,
        request: Request<v1::FetchChartRequest>,
    ) -> Result<Response<Self::FetchChartStream>, Status> {
        let (member, _) = self.admit(&request, RequestKind::Chart)?;
        let request = request.into_inner();
        // The hub fetches only charts from the member's desired state, so agents cannot use it to reach other
        // addresses.
        let desired = member
            .published
            .get()
            .as_ref()
            .map(|published| Arc::clone(&published.desired))
            .filter(|desired| desired.digest() == request.digest)
            .ok_or_else(|| Status::not_found("the member's desired state has changed"))?;
        let [total, of_member] = [&self.chart_streams, &member.charts].map(|slots| {
            Arc::clone(slots).try_acquire_owned().map_err(|_| {
                Status::resource_exhausted("too many charts are being fetched; try again")
            })
        });
        let permits = [total?, of_member?];
        let chart = ChartRef {
            repo: desired.chart.repo.clone(),
            name: desired.chart.name.clone(),
            version: desired.chart.version_to_fetch().into_owned(),
        };
        let fetched = Box::pin(self.charts.fetch(&chart)).await.map_err(|error| {
            Status::unavailable(format!("the hub has no chart either: {}", chain(&*error)))
        })?;
        let (parts, stream) = mpsc::channel(CHUNKS_AHEAD);
        tokio::spawn(send_chart(fetched, request, parts, permits));
        Ok(Response::new(Box::pin(ReceiverStream::new(stream))))
    }
}

type PartSender = mpsc::Sender<Result<v1::ChartPart, Status>>;

async fn send_chart(
    fetched: FetchedChart,
    request: v1::FetchChartRequest,
    parts: PartSender,
    _permits: [OwnedSemaphorePermit; 2],
) {
    let sending = async {
        let read_error = |error: std::io::Error| {
            Status::unavailable(format!("reading the chart failed: {error}"))
        };
        let path = fetched.path.clone();
        let opening = off_thread::run(move || {
            let file = File::open(path)?;
            let size = file.metadata()?.len();
            Ok::<_, std::io::Error>((file, size))
        });
        let (mut file, size) = opening.await.map_err(read_error)?;
        let from = first_offset(&request, &fetched.sha256, size);
        let head = v1::ChartHead {
            sha256: fetched.sha256.clone(),
            size,
            version: fetched.version.clone(),
            from,
        };
        send_part(&parts, chart_part::Kind::Head(head)).await?;
        if request.have_sha256 == fetched.sha256 {
            return Ok(());
        }
        file.seek(SeekFrom::Start(from)).map_err(read_error)?;
        loop {
            let reading = off_thread::run(move || {
                let mut chunk = vec![0; CHUNK];
                let length = file.read(&mut chunk)?;
                chunk.truncate(length);
                Ok::<_, std::io::Error>((file, chunk))
            });
            let chunk;
            (file, chunk) = reading.await.map_err(read_error)?;
            if chunk.is_empty() {
                return Ok(());
            }
            send_part(&parts, chart_part::Kind::Chunk(chunk.into())).await?;
        }
    };
    let result: Result<(), Status> = tokio::time::timeout(CHART_DEADLINE, sending)
        .await
        .unwrap_or_else(|_| Err(Status::deadline_exceeded("the agent reads too slowly")));
    if let Err(status) = result {
        tracing::debug!(reason = status.message(), "chart transfer aborted");
        if parts.try_send(Err(status)).is_err() {
            tracing::trace!("the agent closed the stream");
        }
    }
}

/// Returns the offset of the first chunk: after the part that the agent already has of this chart.
fn first_offset(request: &v1::FetchChartRequest, sha256: &str, size: u64) -> u64 {
    if request.from_sha256 == sha256 && request.from <= size {
        request.from
    } else {
        0
    }
}

async fn send_part(parts: &PartSender, kind: chart_part::Kind) -> Result<(), Status> {
    let part = v1::ChartPart { kind: Some(kind) };
    parts
        .send(Ok(part))
        .await
        .map_err(|_| Status::cancelled("the agent closed the stream"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chart_download_resumes_only_for_same_digest() {
        for (from, sha256, offset) in [
            (0, "", 0),
            (4, "ab", 4),
            (10, "ab", 10),
            (4, "cd", 0),
            (4, "", 0),
            (11, "ab", 0),
        ] {
            let request = v1::FetchChartRequest {
                from,
                from_sha256: sha256.to_owned(),
                ..v1::FetchChartRequest::default()
            };
            assert_eq!(first_offset(&request, "ab", 10), offset, "{request:?}");
        }
    }

    /// Returns the offset that the hub announces and the bytes that it sends.
    async fn receive(fetched: &FetchedChart, request: v1::FetchChartRequest) -> (u64, Vec<u8>) {
        let permit = async || {
            let permit = Arc::new(Semaphore::new(1)).acquire_owned();
            permit.await.unwrap()
        };
        let (parts, mut stream) = mpsc::channel(CHUNKS_AHEAD);
        let permits = [permit().await, permit().await];
        let sending = tokio::spawn(send_chart(fetched.clone(), request, parts, permits));
        let (mut from, mut bytes) = (None, Vec::new());
        while let Some(part) = stream.recv().await {
            match part.unwrap().kind.unwrap() {
                chart_part::Kind::Head(head) => from = Some(head.from),
                chart_part::Kind::Chunk(chunk) => bytes.extend_from_slice(&chunk),
            }
        }
        sending.await.unwrap();
        (from.unwrap(), bytes)
    }

    #[tokio::test]
    async fn agent_receives_only_missing_chart_bytes() {
        let whole = vec![7; CHUNK + 10];
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("chart.tgz");
        std::fs::write(&path, &whole).unwrap();
        let fetched = FetchedChart {
            path,
            sha256: "ab".to_owned(),
            name: "small".to_owned(),
            version: "1.0.0".to_owned(),
        };
        let plain = v1::FetchChartRequest::default();
        assert_eq!(receive(&fetched, plain.clone()).await, (0, whole.clone()));
        let rest = v1::FetchChartRequest {
            from: 20,
            from_sha256: "ab".to_owned(),
            ..plain.clone()
        };
        assert_eq!(receive(&fetched, rest).await, (20, whole[20..].to_vec()));
        let all = v1::FetchChartRequest {
            have_sha256: "ab".to_owned(),
            ..plain
        };
        assert_eq!(receive(&fetched, all).await, (0, Vec::new()));
    }
}
