//! Runs hub and agent over real TLS in one process: the hub's listener, service, sessions and members, and the
//! agent's dialer and session. There is no cluster, and the tests fill the report store directly.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test ends at the first thing that is not as it should be"
)]

#[path = "wire/admission.rs"]
mod admission;
#[path = "wire/connection.rs"]
mod connection;
#[path = "wire/golden.rs"]
mod golden;
#[path = "wire/lead.rs"]
mod lead;
#[path = "wire/limits.rs"]
mod limits;
#[path = "wire/protocol.rs"]
mod protocol;
#[path = "wire/rotation.rs"]
mod rotation;

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use arc_swap::ArcSwap;
use jiff::{SignedDuration, Timestamp};
use krypton_agent::session::connect::{Connection, Dialer};
use krypton_agent::session::{self, Link, Session};
use krypton_helm::chart::ChartCache;
use krypton_hub::agent_server::fleet_service::FleetService;
use krypton_hub::agent_server::listener;
use krypton_hub::agent_server::metrics::SessionMetrics;
use krypton_hub::agent_server::session::Sessions;
use krypton_hub::ca::{Authority, CurrentAuthority};
use krypton_hub::edgecluster::publisher::{DesiredStatePublisher, MemberInputs, MemberOrder};
use krypton_hub::home_events::HomeEvents;
use krypton_hub::leader::Leader;
use krypton_hub::members::MemberRegistry;
use krypton_hub::members::arbiter::Presence;
use krypton_hub::members::observation::MemberObservation;
use krypton_hub::members::tenant_reports::TenantReports;
use krypton_proto::v1::{
    AgentMessage, Hello, HubMessage, RenewRequest, agent_message::Kind as FromAgent,
    hub_message::Kind as FromHub,
};
use krypton_reconciler::report_store::ReportStore;
use krypton_runtime::clock::{self, BootTime};
use krypton_runtime::newest::Newest as _;
use krypton_runtime::tls::{self, Credential};
use krypton_runtime::watchdog::Watchdog;
use krypton_types::conditions::{State, Truth};
use krypton_types::desired::namespaces::NamespaceConfiguration;
use krypton_types::desired::{ChartState, DesiredState};
use krypton_types::error_chain::chain;
use krypton_types::member::MemberReport;
use krypton_types::tenant::{TenantKey, TenantReport};
use rcgen::{KeyPair, PKCS_ECDSA_P256_SHA256};
use rustls::pki_types::PrivateKeyDer;
use tempfile::TempDir;
use tokio::net::TcpListener;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::{CancellationToken, DropGuard};
use tonic::{Code, Status, Streaming};

const TRUST_DOMAIN: &str = "test.krypton";
const DAY: Duration = Duration::from_secs(24 * 60 * 60);
/// Far longer than any step here takes.
const TIMEOUT: Duration = Duration::from_secs(60);

fn chart(version: &str) -> Arc<ChartState> {
    Arc::new(ChartState {
        repo: "https://charts.example.org".to_owned(),
        name: "small".to_owned(),
        version: version.to_owned(),
        ..ChartState::default()
    })
}

/// State of a hub that survives a restart of its listener.
struct TestHub {
    authority: Arc<CurrentAuthority>,
    members: Arc<MemberRegistry>,
    publisher: DesiredStatePublisher,
    reports: Arc<TenantReports>,
    metrics: Arc<SessionMetrics>,
    charts: Arc<ChartCache>,
    /// How far the hub's clock is ahead when it creates certificates.
    clock_offset: SignedDuration,
    leader: Leader,
    _folder: TempDir,
}

impl TestHub {
    fn new() -> Self {
        Self::with_clock_offset(SignedDuration::ZERO)
    }

    /// Starts a hub with so many members.
    async fn start(members: usize) -> (Self, HubListener) {
        let hub = Self::new().with_members(&names(members));
        let port = hub.listen(None).await;
        (hub, port)
    }

    /// Starts a hub with one member, and an agent that has received its desired state.
    async fn start_with_agent() -> (Self, HubListener, Agent) {
        let (hub, port) = Self::start(1).await;
        let mut agent = Agent::start(hub.dialer(port.address, "edge-0"), "a", "c");
        agent.wait_for_chart("1.0.0").await;
        (hub, port, agent)
    }

    fn with_clock_offset(clock_offset: SignedDuration) -> Self {
        let authority = Authority::generate(TRUST_DOMAIN, clock::wall() + clock_offset).unwrap();
        Self {
            clock_offset,
            ..Self::with_authority(authority)
        }
    }

    fn with_authority(authority: Authority) -> Self {
        install_tls_provider();
        let folder = TempDir::new().unwrap();
        let reports = Arc::new(TenantReports::default());
        Self {
            authority: Arc::new(CurrentAuthority::new(authority)),
            members: Arc::new(MemberRegistry::new(Arc::clone(&reports))),
            publisher: DesiredStatePublisher::default(),
            reports,
            metrics: Arc::default(),
            charts: Arc::new(ChartCache::new(folder.path().join("charts")).unwrap()),
            clock_offset: SignedDuration::ZERO,
            leader: Leader::always_leading(),
            _folder: folder,
        }
    }

    /// Registers members like the fleet, each with a desired state.
    fn with_members(mut self, names: &[String]) -> Self {
        for name in names {
            self.members.get_or_create(name, &uid(name));
        }
        let known = names.to_vec();
        self.members.retain(
            |name| known.iter().any(|known| known == name),
            |_| false,
            |_| true,
        );
        self.publish(names, "1.0.0");
        self
    }

    fn publish(&mut self, names: &[String], version: &str) {
        for name in names {
            let member = self.members.get(name).unwrap();
            let previous = member.published.get();
            let next = self.publisher.next(
                previous.as_ref(),
                1,
                &MemberInputs {
                    chart: &chart(version),
                    is_override: false,
                    namespaces: &NamespaceConfiguration::default(),
                    deployments: &[],
                    placed: &[],
                },
                MemberOrder::default(),
                BootTime::now(),
            );
            member.published.send_replace(next.or(previous));
        }
    }

    async fn listen(&self, address: Option<SocketAddr>) -> HubListener {
        self.listen_with_version(env!("CARGO_PKG_VERSION"), address)
            .await
    }

    /// Listens as a hub of this version.
    async fn listen_with_version(
        &self,
        hub_version: &str,
        address: Option<SocketAddr>,
    ) -> HubListener {
        let address = address.unwrap_or_else(|| SocketAddr::from(([127, 0, 0, 1], 0)));
        let listener = TcpListener::bind(address).await.unwrap();
        let address = listener.local_addr().unwrap();
        let stop = CancellationToken::new();
        let sessions = Sessions {
            members: Arc::clone(&self.members),
            metrics: Arc::clone(&self.metrics),
            events: HomeEvents::discarding(),
            hub_version: hub_version.to_owned(),
            last_number: AtomicU64::new(0),
            watchdog: Watchdog::default(),
            leader: self.leader.clone(),
            stop: stop.clone(),
        };
        let fleet = FleetService::new(
            Arc::new(sessions),
            Arc::clone(&self.charts),
            Arc::clone(&self.authority),
            None,
        );
        let now = clock::wall() + self.clock_offset;
        let tls = listener::server_config(&self.authority.get(), now).unwrap();
        let tls = Arc::new(ArcSwap::from_pointee(tls));
        tokio::spawn(listener::renew_credential(
            Arc::clone(&self.authority),
            Arc::clone(&tls),
            Arc::clone(&self.metrics),
            stop.clone(),
        ));
        let serving = listener::serve(
            Box::new(listener),
            tls,
            TRUST_DOMAIN.to_owned(),
            tonic::service::Routes::new(fleet.into_server()),
            self.metrics.port.clone(),
            stop.clone(),
        );
        HubListener {
            address,
            serving: tokio::spawn(async move { serving.await.unwrap() }),
            stop: stop.drop_guard(),
        }
    }

    /// Issues a certificate of this hub to an agent.
    fn credential(
        &self,
        name: &str,
        uid: &str,
        issued_at: Timestamp,
        life: Duration,
    ) -> Credential {
        credential_from(&self.authority.get(), (name, uid), issued_at, life)
    }

    fn dialer_with(&self, address: SocketAddr, credential: Option<Credential>) -> Arc<Dialer> {
        let tls = tls::client_config(&self.authority.get().roots(), credential).unwrap();
        Arc::new(Dialer::new(vec![address.to_string()], tls))
    }

    /// Returns the dialer of an agent that enrolled an hour ago, so the hub does not treat its certificate as
    /// new.
    fn dialer(&self, address: SocketAddr, name: &str) -> Arc<Dialer> {
        let credential = self.credential(name, &uid(name), an_hour_ago(), DAY);
        self.dialer_with(address, Some(credential))
    }

    /// Waits until the hub's observation of a member satisfies `condition`.
    async fn wait_for_observation(
        &self,
        name: &str,
        condition: impl Fn(&MemberObservation) -> bool,
    ) {
        let waiting = async {
            while !self
                .members
                .observation(name)
                .is_some_and(|observation| condition(&observation))
            {
                self.members.changed.notified().await;
            }
        };
        let result = tokio::time::timeout(TIMEOUT, waiting).await;
        assert!(result.is_ok(), "{:?}", self.members.observation(name));
    }

    async fn wait_for_holder(&self, name: &str) {
        self.wait_for_observation(name, |observation| observation.holder.is_some())
            .await;
    }

    async fn wait_until_away(&self, name: &str) {
        let mut presence = self.members.presence(name);
        let away = presence.wait_for(|presence| matches!(presence, Presence::Away(_)));
        tokio::time::timeout(TIMEOUT, away).await.unwrap().unwrap();
    }
}

/// A running listener of the hub.
struct HubListener {
    address: SocketAddr,
    serving: JoinHandle<()>,
    stop: DropGuard,
}

impl HubListener {
    /// Stops the listener like a shutdown of the hub.
    async fn close(self) {
        drop(self.stop);
        tokio::time::timeout(TIMEOUT, self.serving)
            .await
            .unwrap()
            .unwrap();
    }
}

/// Issues a certificate of this authority to an agent.
fn credential_from(
    authority: &Authority,
    (name, uid): (&str, &str),
    issued_at: Timestamp,
    life: Duration,
) -> Credential {
    let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).unwrap();
    let request = certificate_request(&key);
    let certificates = authority.sign_agent(&request, name, uid, issued_at, life);
    Credential {
        certificates: certificates.unwrap(),
        key: PrivateKeyDer::try_from(key.serialize_der()).unwrap(),
    }
}

fn certificate_request(key: &KeyPair) -> Vec<u8> {
    let request = rcgen::CertificateParams::default().serialize_request(key);
    request.unwrap().der().to_vec()
}

/// Returns a request to renew a certificate with a new key.
fn renew_request() -> RenewRequest {
    let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).unwrap();
    RenewRequest {
        certificate_request: certificate_request(&key).into(),
    }
}

fn install_tls_provider() {
    // Fails if another test of this process has installed the provider.
    drop(rustls::crypto::aws_lc_rs::default_provider().install_default());
}

fn uid(name: &str) -> String {
    format!("uid-of-{name}")
}

fn an_hour_ago() -> Timestamp {
    clock::wall() - SignedDuration::from_hours(1)
}

fn names(count: usize) -> Vec<String> {
    (0..count).map(|number| format!("edge-{number}")).collect()
}

fn hello(protocol: u32, version: &str) -> Hello {
    Hello {
        protocol_min: protocol,
        protocol_max: protocol,
        agent_version: version.to_owned(),
        replica: "agent".to_owned(),
        cluster_uid: "cluster".to_owned(),
        kubernetes_version: "v1.36.3".to_owned(),
        applied: None,
        now: clock::wall().as_second(),
        trusted_roots: None,
    }
}

impl TestHub {
    /// Returns the number of messages of a kind.
    fn count(&self, sender: &'static str, kind: &'static str) -> u64 {
        self.metrics.messages(sender, kind).get()
    }
}

/// A raw stream, for messages that our own agent never sends.
struct RawSession {
    sender: mpsc::Sender<AgentMessage>,
    receiver: Streaming<HubMessage>,
    connection: Connection,
}

impl RawSession {
    async fn open(dialer: &Dialer, first: FromAgent) -> Result<Self, Status> {
        let connection = dialer.connect().await.unwrap();
        let (sender, messages) = mpsc::channel(4);
        sender
            .send(AgentMessage { kind: Some(first) })
            .await
            .unwrap();
        let mut fleet = connection.fleet().max_encoding_message_size(usize::MAX);
        let receiver = fleet
            .connect(ReceiverStream::new(messages))
            .await?
            .into_inner();
        Ok(Self {
            sender,
            receiver,
            connection,
        })
    }

    async fn opened(dialer: &Dialer, first: FromAgent) -> Self {
        Self::open(dialer, first).await.unwrap()
    }

    /// Opens a session with an ordinary Hello.
    async fn greet(dialer: &Dialer) -> Result<Self, Status> {
        Self::open(dialer, FromAgent::Hello(hello(1, "0.1.0"))).await
    }

    /// Opens a session with an ordinary Hello, and receives the response.
    async fn start(dialer: &Dialer) -> Self {
        let mut session = Self::greet(dialer).await.unwrap();
        session.receive_welcome().await;
        session
    }

    async fn send(&self, kind: FromAgent) {
        let message = AgentMessage { kind: Some(kind) };
        self.sender.send(message).await.unwrap();
    }

    /// Receives the response to Hello.
    async fn receive_welcome(&mut self) {
        let FromHub::Welcome(_) = self.receive().await.unwrap() else {
            panic!("no Welcome")
        };
    }

    /// Returns the next message except the CA's roots, which these tests ignore.
    async fn receive(&mut self) -> Result<FromHub, Status> {
        loop {
            match self.receive_any().await? {
                FromHub::Roots(_) => {}
                message => return Ok(message),
            }
        }
    }

    async fn receive_any(&mut self) -> Result<FromHub, Status> {
        let message = tokio::time::timeout(TIMEOUT, self.receiver.message()).await;
        let message = message.expect("the hub says something")?;
        Ok(message.and_then(|message| message.kind).expect("a message"))
    }

    /// Returns the status with which the hub ends the stream.
    async fn closing_status(&mut self) -> Status {
        loop {
            if let Err(status) = self.receive().await {
                return status;
            }
        }
    }
}

/// Asserts the code of a status, and that its message contains this text.
#[track_caller]
fn check_status(status: &Status, code: Code, expected: &str) {
    assert_eq!(status.code(), code, "{status:?}");
    assert!(status.message().contains(expected), "{status:?}");
}

/// Our own agent, without a cluster.
struct Agent {
    report_store: Arc<ReportStore>,
    desired: watch::Receiver<Option<Arc<DesiredState>>>,
    link: watch::Receiver<Link>,
    stop: CancellationToken,
    task: JoinHandle<()>,
}

impl Agent {
    fn start(dialer: Arc<Dialer>, replica: &str, cluster_uid: &str) -> Self {
        let (desired, desired_rx) = watch::channel(None);
        let (link, link_rx) = watch::channel(Link::default());
        let (report_store, stop) = (Arc::new(ReportStore::default()), CancellationToken::new());
        let session = Session {
            dialer,
            replica: replica.to_owned(),
            cluster_uid: cluster_uid.to_owned(),
            kubernetes_version: "v1.36.3".to_owned(),
            report_store: Arc::clone(&report_store),
            desired,
            recorded: None,
            link,
            contact: watch::Sender::default(),
        };
        Self {
            report_store,
            desired: desired_rx,
            link: link_rx,
            task: tokio::spawn(session::run(session, stop.clone())),
            stop,
        }
    }

    async fn wait_for_chart(&mut self, version: &str) {
        let received = self.desired.wait_for(|desired| {
            desired
                .as_ref()
                .is_some_and(|desired| desired.chart.version == version)
        });
        let received = tokio::time::timeout(TIMEOUT, received).await;
        received.expect("the desired state comes").unwrap();
    }

    async fn wait_for_link(&mut self, up: bool) {
        let link = self.link.wait_for(|link| link.is_up() == up);
        let link = tokio::time::timeout(TIMEOUT, link).await;
        link.expect("the link changes").unwrap();
    }

    /// Waits until the link is down for this reason.
    async fn wait_for_lost_link(&mut self, expected: &str) {
        self.wait_for_link(false).await;
        let reason = format!("{:?}", self.link.get());
        assert!(reason.contains(expected), "{reason}");
    }

    async fn stop(self) {
        self.stop.cancel();
        self.task.await.unwrap();
    }
}

fn lease_holder_report() -> MemberReport {
    MemberReport {
        synced: true,
        ready: true,
        writing: true,
        connected: true,
        holder: Some("agent/a".to_owned()),
        ..MemberReport::default()
    }
}

/// Returns why there is no session after the first attempt, which must contain this text.
async fn check_link_error(agent: &mut Agent, expected: &str) -> String {
    let initial = format!("{:?}", Link::default());
    let changed = agent.link.wait_for(|link| format!("{link:?}") != initial);
    let link = tokio::time::timeout(TIMEOUT, changed)
        .await
        .unwrap()
        .unwrap();
    let Link::Down(reason) = &*link else {
        panic!("there is a session")
    };
    assert!(reason.contains(expected), "{reason}");
    reason.clone()
}

/// Returns the message of the error that prevents a connection.
async fn dial_error(dialer: &Dialer) -> String {
    chain(&dialer.connect().await.unwrap_err())
}

fn tenant(number: u32) -> TenantKey {
    TenantKey::new("default", format!("t{number:05}"))
}

fn installed(generation: i64) -> TenantReport {
    TenantReport::new(generation, State::new(Truth::True, "Installed", ""))
}

#[tokio::test]
async fn desired_state_reaches_agent_and_updates_follow() {
    let (mut hub, _port, mut agent) = TestHub::start_with_agent().await;
    hub.publish(&names(1), "1.0.1");
    agent.wait_for_chart("1.0.1").await;
    hub.wait_for_observation("edge-0", |observation| observation.agent_version.is_some())
        .await;
    agent.stop().await;
}
