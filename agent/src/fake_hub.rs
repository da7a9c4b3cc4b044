//! A fake hub for unit tests: the wire protocol over real TLS on loopback, with responses from the test.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use krypton_proto::v1::enrollment_server::{Enrollment, EnrollmentServer};
use krypton_proto::v1::fleet_server::{Fleet, FleetServer};
use krypton_proto::v1::{
    AgentMessage, ChartPart, EnrollRequest, EnrollResponse, FetchChartRequest, Hello, HubMessage,
    RenewRequest, RenewResponse, Welcome, agent_message, hub_message,
};
use krypton_runtime::tls::{self, Credential};
use krypton_types::spiffe::SpiffeId;
use parking_lot::Mutex;
use rcgen::{
    BasicConstraints, CertificateParams, CertificateSigningRequestParams, DistinguishedName,
    DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, KeyUsagePurpose, SanType,
    date_time_ymd,
};
use rustls::pki_types::{CertificateDer, CertificateSigningRequestDer, PrivateKeyDer};
use tokio::io::{DuplexStream, copy_bidirectional, duplex};
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio_rustls::TlsAcceptor;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::transport::Server;
use tonic::{Request, Response, Status, Streaming};

use crate::session::connect::Dialer;

pub(crate) const TRUST_DOMAIN: &str = "fake.krypton";

const LOOPBACK: &str = "127.0.0.1:0";

/// Bytes between the TLS stream and the server of a connection.
const BUFFER: usize = 64 * 1024;

/// Validity of certificates.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Validity {
    Now,
    Past,
}

/// A CA like the hub's.
pub(crate) struct FakeAuthority {
    issuer: Issuer<'static, KeyPair>,
    root: CertificateDer<'static>,
    pub(crate) root_pem: String,
}

impl FakeAuthority {
    pub(crate) fn new() -> Self {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let certificate = params.self_signed(&key).unwrap();
        Self {
            root: certificate.der().clone(),
            root_pem: certificate.pem(),
            issuer: Issuer::new(params, key),
        }
    }

    pub(crate) fn roots(&self) -> Vec<CertificateDer<'static>> {
        vec![self.root.clone()]
    }

    fn params(id: &SpiffeId, usage: ExtendedKeyUsagePurpose, valid: Validity) -> CertificateParams {
        let mut params = CertificateParams::default();
        params.distinguished_name = DistinguishedName::new();
        params.distinguished_name.push(DnType::CommonName, "fake");
        params.subject_alt_names = vec![SanType::URI(id.to_string().try_into().unwrap())];
        params.extended_key_usages = vec![usage];
        params.not_before = date_time_ymd(2020, 1, 1);
        params.not_after = match valid {
            Validity::Now => date_time_ymd(2100, 1, 1),
            Validity::Past => date_time_ymd(2021, 1, 1),
        };
        params
    }

    fn credential(
        &self,
        id: &SpiffeId,
        usage: ExtendedKeyUsagePurpose,
        valid: Validity,
    ) -> Credential {
        let key = KeyPair::generate().unwrap();
        let params = Self::params(id, usage, valid);
        let certificate = params.signed_by(&key, &self.issuer).unwrap();
        Credential {
            certificates: vec![certificate.der().clone()],
            key: PrivateKeyDer::Pkcs8(key.serialize_der().into()),
        }
    }

    pub(crate) fn hub(&self, valid: Validity) -> Credential {
        let id = SpiffeId::hub(TRUST_DOMAIN);
        self.credential(&id, ExtendedKeyUsagePurpose::ServerAuth, valid)
    }

    /// Returns a server credential that names a cluster instead of the hub.
    pub(crate) fn impostor(&self) -> Credential {
        let id = SpiffeId::cluster(TRUST_DOMAIN, "edge-2");
        self.credential(&id, ExtendedKeyUsagePurpose::ServerAuth, Validity::Now)
    }

    pub(crate) fn agent(&self, valid: Validity) -> Credential {
        let id = SpiffeId::cluster(TRUST_DOMAIN, "edge-1");
        self.credential(&id, ExtendedKeyUsagePurpose::ClientAuth, valid)
    }

    /// Signs a request as enrollment does.
    pub(crate) fn sign(&self, request: &[u8], cluster: &str, valid: Validity) -> Vec<u8> {
        let request = CertificateSigningRequestDer::from(request);
        let mut request = CertificateSigningRequestParams::from_der(&request).unwrap();
        let id = SpiffeId::cluster(TRUST_DOMAIN, cluster);
        request.params = Self::params(&id, ExtendedKeyUsagePurpose::ClientAuth, valid);
        request.signed_by(&self.issuer).unwrap().der().to_vec()
    }

    /// Returns a dialer with an agent's certificate.
    pub(crate) fn dialer(&self, addresses: Vec<String>, valid: Validity) -> Dialer {
        let config = tls::client_config(&self.roots(), Some(self.agent(valid))).unwrap();
        Dialer::new(addresses, config)
    }
}

/// One stream of an agent, controlled by the test.
pub(crate) struct FakeSession {
    pub(crate) incoming: Streaming<AgentMessage>,
    outgoing: mpsc::Sender<Result<HubMessage, Status>>,
}

impl FakeSession {
    pub(crate) async fn next(&mut self) -> Option<agent_message::Kind> {
        self.incoming.message().await.ok()??.kind
    }

    pub(crate) async fn send(&self, kind: hub_message::Kind) {
        let message = HubMessage { kind: Some(kind) };
        self.outgoing.send(Ok(message)).await.unwrap();
    }

    pub(crate) async fn fail(self, status: Status) {
        self.outgoing.send(Err(status)).await.unwrap();
    }

    /// Receives Hello and sends Welcome.
    pub(crate) async fn greet(&mut self) -> Hello {
        let Some(agent_message::Kind::Hello(hello)) = self.next().await else {
            panic!("expected Hello");
        };
        let welcome = Welcome {
            protocol: 1,
            hub_version: "0.1.0".to_owned(),
            session: 7,
            heartbeat_millis: 1000,
            now: krypton_runtime::clock::wall().as_second(),
        };
        self.send(hub_message::Kind::Welcome(welcome)).await;
        hello
    }
}

type Enroll = Box<dyn Fn(EnrollRequest) -> Result<EnrollResponse, Status> + Send + Sync>;
/// Parts of a chart stream, with an optional final error.
type ChartParts = Vec<Result<ChartPart, Status>>;
type Renew = Box<dyn Fn(RenewRequest) -> Result<RenewResponse, Status> + Send + Sync>;

/// Responses of the fake hub.
pub(crate) struct FakeResponses {
    pub(crate) enroll: Enroll,
    pub(crate) renew: Renew,
    pub(crate) chart: Mutex<(Option<FetchChartRequest>, ChartParts)>,
}

impl Default for FakeResponses {
    fn default() -> Self {
        Self {
            enroll: Box::new(|_| Err(Status::unimplemented("no enrollment in this test"))),
            renew: Box::new(|_| Err(Status::unimplemented("no renewal in this test"))),
            chart: Mutex::default(),
        }
    }
}

pub(crate) struct FakeHub {
    pub(crate) address: SocketAddr,
    pub(crate) responses: Arc<FakeResponses>,
    sessions: mpsc::Receiver<FakeSession>,
    stop: CancellationToken,
}

impl FakeHub {
    pub(crate) async fn start(authority: &FakeAuthority) -> Self {
        Self::start_with(authority, FakeResponses::default()).await
    }

    pub(crate) async fn start_with(authority: &FakeAuthority, responses: FakeResponses) -> Self {
        let credential = authority.hub(Validity::Now);
        Self::listen(authority, credential, responses, LOOPBACK).await
    }

    pub(crate) async fn start_as(authority: &FakeAuthority, credential: Credential) -> Self {
        Self::listen(authority, credential, FakeResponses::default(), LOOPBACK).await
    }

    /// Starts a hub that signs every request for a certificate.
    pub(crate) async fn start_signing(
        authority: &Arc<FakeAuthority>,
        cluster: &'static str,
    ) -> Self {
        let [enrolling, renewing] = [authority, authority].map(Arc::clone);
        let responses = FakeResponses {
            enroll: Box::new(move |request| {
                assert_eq!(request.cluster_uid, "uid-1");
                let request = &request.certificate_request;
                let certificate = enrolling.sign(request, cluster, Validity::Now);
                Ok(EnrollResponse {
                    certificates: vec![certificate.into()],
                    roots: vec![enrolling.root.to_vec().into()],
                })
            }),
            renew: Box::new(move |request| {
                let request = &request.certificate_request;
                let certificate = renewing.sign(request, cluster, Validity::Now);
                Ok(RenewResponse {
                    certificates: vec![certificate.into()],
                    roots: vec![renewing.root.to_vec().into()],
                })
            }),
            ..FakeResponses::default()
        };
        Self::start_with(authority, responses).await
    }

    pub(crate) async fn listen(
        authority: &FakeAuthority,
        credential: Credential,
        responses: FakeResponses,
        address: &str,
    ) -> Self {
        let config = tls::server_config(&authority.roots(), credential).unwrap();
        let acceptor = TlsAcceptor::from(Arc::new(config));
        let listener = TcpListener::bind(address).await.unwrap();
        let address = listener.local_addr().unwrap();
        let stop = CancellationToken::new();
        let (streams, incoming) = mpsc::channel::<io::Result<DuplexStream>>(8);
        let stop_accepting = stop.clone();
        tokio::spawn(async move {
            loop {
                let accepted = tokio::select! {
                    () = stop_accepting.cancelled() => return,
                    accepted = listener.accept() => accepted,
                };
                let Ok((tcp, _)) = accepted else { return };
                let Ok(mut tls) = acceptor.accept(tcp).await else {
                    continue;
                };
                let (near, mut far) = duplex(BUFFER);
                let stopped = stop_accepting.clone();
                tokio::spawn(async move {
                    let copying = copy_bidirectional(&mut tls, &mut far);
                    stopped.run_until_cancelled(copying).await
                });
                if streams.send(Ok(near)).await.is_err() {
                    return;
                }
            }
        });
        let (sessions_tx, sessions) = mpsc::channel(8);
        let responses = Arc::new(responses);
        let service = FakeService {
            responses: Arc::clone(&responses),
            sessions: sessions_tx,
        };
        let server = Server::builder()
            .add_service(FleetServer::new(service.clone()))
            .add_service(EnrollmentServer::new(service))
            .serve_with_incoming_shutdown(
                ReceiverStream::new(incoming),
                stop.clone().cancelled_owned(),
            );
        tokio::spawn(server);
        Self {
            address,
            responses,
            sessions,
            stop,
        }
    }

    pub(crate) fn addresses(&self) -> Vec<String> {
        vec![self.address.to_string()]
    }

    pub(crate) async fn session(&mut self) -> FakeSession {
        self.sessions.recv().await.unwrap()
    }

    /// Closes all connections immediately, like a killed process.
    pub(crate) fn kill(&self) {
        self.stop.cancel();
    }
}

impl Drop for FakeHub {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

#[derive(Clone)]
struct FakeService {
    responses: Arc<FakeResponses>,
    sessions: mpsc::Sender<FakeSession>,
}

#[tonic::async_trait]
impl Fleet for FakeService {
    type ConnectStream = ReceiverStream<Result<HubMessage, Status>>;
    type FetchChartStream = tokio_stream::Iter<std::vec::IntoIter<Result<ChartPart, Status>>>;

    async fn connect(
        &self,
        request: Request<Streaming<AgentMessage>>,
    ) -> Result<Response<Self::ConnectStream>, Status> {
        let (outgoing, messages) = mpsc::channel(8);
        let session = FakeSession {
            incoming: request.into_inner(),
            outgoing,
        };
        let test_ended = |_| Status::unavailable("the test is over");
        self.sessions.send(session).await.map_err(test_ended)?;
        Ok(Response::new(ReceiverStream::new(messages)))
    }

    async fn renew(
        &self,
        request: Request<RenewRequest>,
    ) -> Result<Response<RenewResponse>, Status> {
        (self.responses.renew)(request.into_inner()).map(Response::new)
    }

    async fn fetch_chart(
        &self,
        request: Request<FetchChartRequest>,
    ) -> Result<Response<Self::FetchChartStream>, Status> {
        let mut chart = self.responses.chart.lock();
        chart.0 = Some(request.into_inner());
        let parts: Vec<_> = chart.1.clone();
        Ok(Response::new(tokio_stream::iter(parts)))
    }
}

#[tonic::async_trait]
impl Enrollment for FakeService {
    async fn enroll(
        &self,
        request: Request<EnrollRequest>,
    ) -> Result<Response<EnrollResponse>, Status> {
        (self.responses.enroll)(request.into_inner()).map(Response::new)
    }
}
