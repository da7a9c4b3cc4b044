//! Runs hub and agent over real TLS in one process: the hub's listener, service, sessions and members, and the
//! agent's dialer and session. There is no cluster, and the tests fill the report store directly.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test ends at the first thing that is not as it should be"
)]

#[path = "wire/golden.rs"]
mod golden;
#[path = "wire/lead.rs"]
mod lead;
#[path = "wire/rotation.rs"]
mod rotation;

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use arc_swap::ArcSwap;
use jiff::{SignedDuration, Timestamp};
use krypton_agent::session::connect::{Connection, DialError, Dialer};
use krypton_agent::session::{self, Link, Session};
use krypton_helm::chart::ChartCache;
use krypton_hub::agent_server::fleet_service::FleetService;
use krypton_hub::agent_server::listener;
use krypton_hub::agent_server::session::Sessions;
use krypton_hub::ca::{Authority, CurrentAuthority, read_agent_certificate};
use krypton_hub::edgecluster::publisher::{DesiredStatePublisher, MemberInputs, MemberOrder};
use krypton_hub::home_events::HomeEvents;
use krypton_hub::leader::Leader;
use krypton_hub::members::MemberRegistry;
use krypton_hub::members::agent_keys;
use krypton_hub::members::arbiter::Presence;
use krypton_hub::members::member::Admission;
use krypton_hub::members::observation::MemberObservation;
use krypton_hub::observe::metrics::{MessageLabels, SessionMetrics};
use krypton_hub::tenants::TenantReports;
use krypton_proto::REPORTS_PER_MESSAGE;
use krypton_proto::v1::{
    AgentMessage, Applied, FetchChartRequest, Heartbeat, Hello, HubMessage, RenewRequest, Report,
    Tenant, agent_message::Kind as FromAgent, hub_message::Kind as FromHub,
};
use krypton_reconciler::report_store::ReportStore;
use krypton_runtime::clock::{self, BootTime};
use krypton_runtime::newest::Newest as _;
use krypton_runtime::tls::{self, Credential};
use krypton_runtime::watchdog::Watchdog;
use krypton_types::conditions::{ClusterState, State, Truth};
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

async fn wait_until(condition: impl Fn() -> bool) {
    let waiting = async {
        while !condition() {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(TIMEOUT, waiting).await.unwrap();
}

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
            listener.into(),
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
        let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).unwrap();
        let request = rcgen::CertificateParams::default()
            .serialize_request(&key)
            .unwrap();
        let certificates = self
            .authority
            .get()
            .sign_agent(request.der(), name, uid, issued_at, life)
            .unwrap();
        Credential {
            certificates,
            key: PrivateKeyDer::try_from(key.serialize_der()).unwrap(),
        }
    }

    fn dialer_with(&self, address: SocketAddr, credential: Option<Credential>) -> Arc<Dialer> {
        let tls = tls::client_config(&self.authority.get().roots(), credential).unwrap();
        let tls = Arc::new(ArcSwap::from_pointee(tls));
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
        let messages = &self.metrics.messages;
        messages
            .get_or_create(&MessageLabels { sender, kind })
            .get()
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

    async fn send(&self, kind: FromAgent) {
        let message = AgentMessage { kind: Some(kind) };
        self.sender.send(message).await.unwrap();
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

#[tokio::test]
async fn desired_state_reaches_agent_and_updates_follow() {
    let members = names(1);
    let mut hub = TestHub::new().with_members(&members);
    let port = hub.listen(None).await;
    let mut agent = Agent::start(hub.dialer(port.address, "edge-0"), "a", "c");
    agent.wait_for_chart("1.0.0").await;
    hub.publish(&members, "1.0.1");
    agent.wait_for_chart("1.0.1").await;
    hub.wait_for_observation("edge-0", |observation| observation.agent_version.is_some())
        .await;
    agent.stop().await;
}

#[tokio::test]
async fn hub_with_different_ca_is_rejected() {
    let (ours, other) = (TestHub::new(), TestHub::new().with_members(&names(1)));
    let port = other.listen(None).await;
    // Our roots, but the listener of the other hub.
    let problem = ours
        .dialer(port.address, "edge-0")
        .connect()
        .await
        .unwrap_err();
    let message = chain(&problem);
    assert!(
        message.contains(&port.address.to_string()) && message.contains("CA"),
        "{message}"
    );
}

#[tokio::test]
async fn agent_of_foreign_authority_is_rejected() {
    let (ours, other) = (TestHub::new().with_members(&names(1)), TestHub::new());
    let port = ours.listen(None).await;
    let credential = other.credential("edge-0", &uid("edge-0"), clock::wall(), DAY);
    let dialer = ours.dialer_with(port.address, Some(credential));
    let mut agent = Agent::start(dialer, "a", "c");
    let reason = link_error(&mut agent).await;
    assert!(reason.contains("certificate"), "{reason}");
    agent.stop().await;
}

/// Returns why there is no session, after the first attempt.
async fn link_error(agent: &mut Agent) -> String {
    let initial = format!("{:?}", Link::default());
    let changed = agent.link.wait_for(|link| format!("{link:?}") != initial);
    let link = tokio::time::timeout(TIMEOUT, changed)
        .await
        .unwrap()
        .unwrap();
    match &*link {
        Link::Down(reason) => reason.clone(),
        Link::Up(_) => panic!("there is a session"),
    }
}

#[tokio::test]
async fn an_expired_certificate_is_not_let_in() {
    let hub = TestHub::new().with_members(&names(1));
    let port = hub.listen(None).await;
    let long_ago = clock::wall() - SignedDuration::from_hours(24 * 60);
    let credential = hub.credential("edge-0", &uid("edge-0"), long_ago, DAY);
    let mut agent = Agent::start(hub.dialer_with(port.address, Some(credential)), "a", "c");
    let reason = link_error(&mut agent).await;
    assert!(reason.contains("expired"), "{reason}");
    agent.stop().await;
}

#[tokio::test]
async fn a_session_ends_with_its_certificate() {
    let hub = TestHub::new().with_members(&names(1));
    let port = hub.listen(None).await;
    let credential = hub.credential(
        "edge-0",
        &uid("edge-0"),
        clock::wall(),
        Duration::from_secs(3),
    );
    let dialer = hub.dialer_with(port.address, Some(credential));
    let mut stream = RawSession::open(&dialer, FromAgent::Hello(hello(1, "0.1.0")))
        .await
        .unwrap();
    let status = stream.closing_status().await;
    assert!(
        status.code() == Code::Unauthenticated
            || status.code() == Code::Unknown
            || status.code() == Code::Unavailable,
        "{status:?}"
    );
}

#[tokio::test]
async fn missing_certificate_or_hub_certificate_is_rejected() {
    let hub = TestHub::new().with_members(&names(1));
    let port = hub.listen(None).await;
    let hub_credential = hub.authority.get().hub_credential(clock::wall()).unwrap();
    for credential in [None, Some(hub_credential)] {
        let dialer = hub.dialer_with(port.address, credential);
        let Ok(connection) = dialer.connect().await else {
            continue;
        };
        let mut fleet = connection.fleet();
        let (_sender, messages) = mpsc::channel::<AgentMessage>(1);
        let status = fleet
            .connect(ReceiverStream::new(messages))
            .await
            .unwrap_err();
        assert!(
            matches!(
                status.code(),
                Code::Unauthenticated | Code::Unknown | Code::Unavailable
            ),
            "{status:?}"
        );
    }
}

#[tokio::test]
async fn stale_or_unknown_member_is_refused_with_remedy() {
    let hub = TestHub::new().with_members(&names(1));
    let port = hub.listen(None).await;
    for (name, uid) in [("edge-0", "uid-before"), ("edge-7", "uid-of-edge-7")] {
        let credential = hub.credential(name, uid, an_hour_ago(), DAY);
        let dialer = hub.dialer_with(port.address, Some(credential));
        let status = RawSession::open(&dialer, FromAgent::Hello(hello(1, "0.1.0")))
            .await
            .err()
            .expect("a refusal");
        assert_eq!(status.code(), Code::PermissionDenied);
        assert!(
            status.message().contains("kubectl krypton join"),
            "{status:?}"
        );
    }
}

#[tokio::test]
async fn new_enrollment_retries_until_edge_cluster_is_seen() {
    let mut hub = TestHub::new().with_members(&names(1));
    let port = hub.listen(None).await;
    let cases = [
        // An EdgeCluster recreated, and one created.
        ("edge-0", "uid-after", 0),
        ("edge-7", "uid-of-edge-7", 0),
        // By a hub whose clock is ahead.
        ("edge-7", "uid-of-edge-7", -30),
    ];
    let open = async |hub: &TestHub, (name, uid, age): (&str, &str, i64)| {
        let issued_at = clock::wall() - SignedDuration::from_secs(age);
        let credential = hub.credential(name, uid, issued_at, DAY);
        let dialer = hub.dialer_with(port.address, Some(credential));
        RawSession::open(&dialer, FromAgent::Hello(hello(1, "0.1.0"))).await
    };
    let code = async |hub: &TestHub, case| open(hub, case).await.err().map(|status| status.code());
    for case in cases {
        assert_eq!(code(&hub, case).await, Some(Code::Unavailable), "{case:?}");
    }
    for age in [120, -3600] {
        let old = ("edge-7", "uid-of-edge-7", age);
        assert_eq!(code(&hub, old).await, Some(Code::PermissionDenied), "{age}");
    }
    assert_eq!(hub.metrics.sessions.get(), 0);
    // A member whose EdgeCluster was deleted is rejected, even with a new certificate.
    hub.members
        .retain(|_| false, |name| name == "edge-0", |_| true);
    let deleted = ("edge-0", "uid-of-edge-0", 0);
    assert_eq!(code(&hub, deleted).await, Some(Code::PermissionDenied));

    hub = hub.with_members(&["edge-7".to_owned()]);
    let mut stream = open(&hub, cases[1]).await.unwrap();
    assert!(matches!(
        stream.receive().await.unwrap(),
        FromHub::Welcome(_)
    ));
}

#[tokio::test]
async fn agent_session_is_bound_to_member_and_cluster() {
    let members = names(2);
    let hub = TestHub::new().with_members(&members);
    let port = hub.listen(None).await;
    // Messages contain no member name. A Tenant with the name of a member has no effect.
    let first = Agent::start(hub.dialer(port.address, "edge-0"), "a", "cluster-0");
    hub.wait_for_observation("edge-0", |observation| observation.uid.is_some())
        .await;
    let mut stream = RawSession::open(
        &hub.dialer(port.address, "edge-0"),
        FromAgent::Hello(Hello {
            replica: "edge-1".to_owned(),
            ..hello(1, "0.1.0")
        }),
    )
    .await
    .unwrap();
    let FromHub::Welcome(_) = stream.receive().await.unwrap() else {
        panic!("no Welcome")
    };
    stream
        .send(FromAgent::Report(Report {
            deployments: Vec::new(),
            placed: Vec::new(),
            tenants: vec![Tenant {
                namespace: "edge-1".to_owned(),
                name: "edge-1".to_owned(),
                state: None,
            }],
            member: Some((&lease_holder_report()).into()),
            complete: Some(0),
        }))
        .await;
    hub.wait_for_observation("edge-0", |observation| observation.holder.is_some())
        .await;
    assert_eq!(hub.members.observation("edge-1"), None);
    // The member is now recorded with another cluster.
    let recorded = Admission {
        refused: None,
        cluster_uid: Some("cluster-0".to_owned()),
        keys: None,
    };
    hub.members
        .get("edge-0")
        .unwrap()
        .admission
        .send_replace(recorded);
    let dialer = hub.dialer(port.address, "edge-0");
    let mut clone = RawSession::open(&dialer, FromAgent::Hello(hello(1, "0.1.0")))
        .await
        .unwrap();
    let status = clone.closing_status().await;
    assert_eq!(status.code(), Code::FailedPrecondition);
    assert!(
        status.message().contains("used on a second one"),
        "{status:?}"
    );
    assert!(!status.message().contains("cluster-0"), "{status:?}");
    assert!(first.link.get().is_up(), "the established session stays");
    first.stop().await;
}

#[tokio::test]
async fn incompatible_versions_are_refused_with_remedy() {
    let hub = TestHub::new().with_members(&names(1));
    let port = hub.listen(None).await;
    let cases = [
        (0, "0.1.0", "protocol"),
        (9, "0.1.0", "protocol"),
        (1, "0.9.0", "upgrade the hub"),
        (1, "latest", "SemVer"),
    ];
    for (protocol, version, expected) in cases {
        let dialer = hub.dialer(port.address, "edge-0");
        let mut stream = RawSession::open(&dialer, FromAgent::Hello(hello(protocol, version)))
            .await
            .unwrap();
        let status = stream.closing_status().await;
        assert_eq!(status.code(), Code::FailedPrecondition, "{version}");
        assert!(status.message().contains(expected), "{status:?}");
    }
}

#[tokio::test]
async fn protocol_violation_ends_only_its_own_session() {
    let members = names(2);
    let hub = TestHub::new().with_members(&members);
    let port = hub.listen(None).await;
    let mut other = Agent::start(hub.dialer(port.address, "edge-1"), "a", "c");
    other.wait_for_chart("1.0.0").await;
    let heartbeat = FromAgent::Heartbeat(Heartbeat {
        tenants: 0,
        digest_high: 0,
        digest_low: 0,
    });
    let nameless = FromAgent::Report(Report {
        deployments: Vec::new(),
        placed: Vec::new(),
        tenants: vec![Tenant {
            namespace: String::new(),
            name: "t".to_owned(),
            state: None,
        }],
        ..Report::default()
    });
    let oversized = FromAgent::Applied(Applied {
        version: None,
        digest: "x".repeat(2 << 20),
    });
    let dialer = hub.dialer(port.address, "edge-0");
    let mut not_hello = RawSession::open(&dialer, heartbeat).await.unwrap();
    assert_eq!(
        not_hello.closing_status().await.code(),
        Code::InvalidArgument
    );
    for (message, code) in [
        (nameless, Code::InvalidArgument),
        (oversized, Code::OutOfRange),
    ] {
        let mut stream = RawSession::open(&dialer, FromAgent::Hello(hello(1, "0.1.0")))
            .await
            .unwrap();
        let FromHub::Welcome(_) = stream.receive().await.unwrap() else {
            panic!("no Welcome")
        };
        stream.send(message).await;
        assert_eq!(stream.closing_status().await.code(), code);
    }
    assert!(other.link.get().is_up());
    other.stop().await;
}

#[tokio::test]
async fn newer_session_replaces_only_older_of_same_replica() {
    let hub = TestHub::new().with_members(&names(1));
    let port = hub.listen(None).await;
    let dialer = hub.dialer(port.address, "edge-0");
    let as_replica = |replica: &str| {
        let replica = replica.to_owned();
        FromAgent::Hello(Hello {
            replica,
            ..hello(1, "0.1.0")
        })
    };
    let mut other = RawSession::open(&dialer, as_replica("b")).await.unwrap();
    let mut older = RawSession::open(&dialer, as_replica("a")).await.unwrap();
    let FromHub::Welcome(_) = older.receive().await.unwrap() else {
        panic!("no Welcome")
    };
    let FromHub::Welcome(_) = other.receive().await.unwrap() else {
        panic!("no Welcome")
    };
    let mut newer = RawSession::open(&dialer, as_replica("a")).await.unwrap();
    assert_eq!(older.closing_status().await.code(), Code::Aborted);
    for stream in [&mut newer, &mut other] {
        let desired = loop {
            match stream.receive().await.unwrap() {
                FromHub::Desired(desired) => break desired,
                FromHub::Welcome(_) => {}
                message => panic!("{message:?}"),
            }
        };
        assert!(DesiredState::try_from(desired).is_ok());
    }
    assert_eq!(hub.metrics.sessions.get(), 2);
}

#[tokio::test]
async fn certificate_renews_for_requesting_member_unless_removed() {
    let hub = TestHub::new().with_members(&names(1));
    let port = hub.listen(None).await;
    let connection = hub.dialer(port.address, "edge-0").connect().await.unwrap();
    let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).unwrap();
    // The hub ignores the subject of the request.
    let named = rcgen::CertificateParams::new(vec!["edge-1".to_owned()]).unwrap();
    let request = RenewRequest {
        certificate_request: named.serialize_request(&key).unwrap().der().to_vec().into(),
    };
    let renewed = connection
        .fleet()
        .renew(request.clone())
        .await
        .unwrap()
        .into_inner();
    let certificate = read_agent_certificate(TRUST_DOMAIN, &renewed.certificates[0]).unwrap();
    assert_eq!(certificate.cluster, "edge-0");
    assert_eq!(certificate.uid, uid("edge-0"));
    hub.members.retain(|_| false, |_| false, |_| true);
    let status = connection.fleet().renew(request).await.unwrap_err();
    assert_eq!(status.code(), Code::PermissionDenied);
}

#[tokio::test]
async fn stolen_key_is_refused_and_reported_after_renewal() {
    let hub = TestHub::new().with_members(&names(1));
    let port = hub.listen(None).await;
    let mut agent = Agent::start(hub.dialer(port.address, "edge-0"), "a", "c");
    agent.wait_for_chart("1.0.0").await;
    // A thief has renewed a copied key.
    let renewed = hub.credential("edge-0", &uid("edge-0"), an_hour_ago(), DAY);
    let authority = hub.authority.get();
    let renewed = read_agent_certificate(authority.trust_domain(), &renewed.certificates[0]);
    let keys = agent_keys::enrolled(None, agent_keys::key_of(&renewed.unwrap()));
    let recorded = Admission {
        keys: Some(keys),
        ..Admission::default()
    };
    let member = hub.members.get("edge-0").unwrap();
    member.admission.send_replace(recorded);
    agent.wait_for_link(false).await;
    let reason = format!("{:?}", agent.link.get());
    assert!(reason.contains("voids all older keys"), "{reason}");
    hub.wait_for_observation("edge-0", |observation| observation.key_refused.is_some())
        .await;
    agent.stop().await;
    let dialer = hub.dialer(port.address, "edge-0");
    let renewal = dialer.connect().await.unwrap();
    let status = renewal.fleet().renew(RenewRequest::default()).await;
    assert_eq!(status.unwrap_err().code(), Code::PermissionDenied);
}

#[tokio::test]
async fn agent_reconnects_with_newer_certificate() {
    let hub = TestHub::new().with_members(&names(1));
    let port = hub.listen(None).await;
    let dialer = hub.dialer(port.address, "edge-0");
    let mut agent = Agent::start(Arc::clone(&dialer), "a", "c");
    agent.wait_for_chart("1.0.0").await;
    let longer = DAY * 2;
    let credential = hub.credential("edge-0", &uid("edge-0"), clock::wall(), longer);
    let not_after = clock::wall() + longer - DAY / 2;
    dialer.renew(tls::client_config(&hub.authority.get().roots(), Some(credential)).unwrap());
    hub.wait_for_observation("edge-0", |observation| {
        observation
            .certificate
            .is_some_and(|certificate| certificate.not_after > not_after)
    })
    .await;
    agent.stop().await;
}

#[tokio::test]
async fn banned_member_is_disconnected_immediately() {
    let hub = TestHub::new().with_members(&names(1));
    let port = hub.listen(None).await;
    let mut agent = Agent::start(hub.dialer(port.address, "edge-0"), "a", "c");
    agent.wait_for_chart("1.0.0").await;
    let refused = Admission {
        refused: Some("spec.banned is set".to_owned()),
        ..Admission::default()
    };
    hub.members
        .get("edge-0")
        .unwrap()
        .admission
        .send_replace(refused);
    agent.wait_for_link(false).await;
    let reason = format!("{:?}", &agent.link.get());
    assert!(reason.contains("spec.banned"), "{reason}");
    agent.stop().await;
}

#[tokio::test]
async fn deleted_or_recreated_edge_cluster_disconnects_member() {
    for is_recreated in [false, true] {
        let hub = TestHub::new().with_members(&names(1));
        let port = hub.listen(None).await;
        let mut agent = Agent::start(hub.dialer(port.address, "edge-0"), "a", "c");
        agent.wait_for_chart("1.0.0").await;
        if is_recreated {
            hub.members.get_or_create("edge-0", "another-uid");
        } else {
            hub.members.retain(|_| false, |_| false, |_| true);
        }
        agent.wait_for_link(false).await;
        let reason = format!("{:?}", &agent.link.get());
        assert!(reason.contains("kubectl krypton join"), "{reason}");
        agent.stop().await;
    }
}

#[tokio::test]
async fn agent_reconnects_to_restarted_hub_and_resends_report() {
    let hub = TestHub::new().with_members(&names(1));
    let port = hub.listen(None).await;
    let address = port.address;
    let mut agent = Agent::start(hub.dialer(address, "edge-0"), "a", "c");
    agent.wait_for_chart("1.0.0").await;
    agent.report_store.set_member(&lease_holder_report());
    hub.wait_for_observation("edge-0", |observation| observation.holder.is_some())
        .await;
    port.close().await;
    agent.wait_for_link(false).await;
    let _port = hub.listen(Some(address)).await;
    agent.wait_for_link(true).await;
    hub.wait_for_observation("edge-0", |observation| observation.holder.is_some())
        .await;
    agent.stop().await;
}

#[tokio::test]
async fn returning_agent_gets_latest_state_and_reports_once() {
    let members = names(1);
    let mut hub = TestHub::new().with_members(&members);
    let port = hub.listen(None).await;
    let address = port.address;
    let mut agent = Agent::start(hub.dialer(address, "edge-0"), "a", "c");
    agent.wait_for_chart("1.0.0").await;
    agent.report_store.set_member(&lease_holder_report());
    for number in 0..3 {
        agent
            .report_store
            .set_tenant(&tenant(number), Some(installed(1)));
    }
    hub.wait_for_observation("edge-0", |observation| observation.holder.is_some())
        .await;
    port.close().await;
    agent.wait_for_link(false).await;
    let counts = |hub: &TestHub| {
        [("hub", "desired"), ("agent", "report")].map(|(sender, kind)| hub.count(sender, kind))
    };
    let before = counts(&hub);
    // While they are disconnected, both sides change.
    for version in ["1.0.1", "1.0.2", "1.0.3"] {
        hub.publish(&members, version);
    }
    for generation in 2..10 {
        agent
            .report_store
            .set_tenant(&tenant(0), Some(installed(generation)));
    }
    agent.report_store.set_tenant(&tenant(1), None);
    let _port = hub.listen(Some(address)).await;
    agent.wait_for_chart("1.0.3").await;
    hub.publish(&members, "1.0.4");
    agent.wait_for_chart("1.0.4").await;
    // Messages arrive in order, so this change of the member arrives after all earlier ones.
    agent.report_store.set_member(&MemberReport {
        holder: Some("agent/b".to_owned()),
        ..lease_holder_report()
    });
    hub.wait_for_observation("edge-0", |observation| {
        observation.holder.as_deref() == Some("agent/b")
    })
    .await;
    let [desired, reports] = counts(&hub);
    assert_eq!(
        desired - before[0],
        2,
        "the last of three, and the one after"
    );
    assert_eq!(reports - before[1], 2, "the account, and the change after");
    agent.stop().await;
}

fn tenant(number: u32) -> TenantKey {
    TenantKey {
        namespace: "default".to_owned(),
        name: format!("t{number:05}"),
    }
}

fn installed(generation: i64) -> TenantReport {
    TenantReport {
        observed_generation: generation,
        applied_chart: String::new(),
        next: None,
        state: ClusterState::from(State::new(Truth::True, "Installed", "")),
    }
}

/// Returns a report with as many Tenants as fit into a message.
fn flood(from: u32, generation: i64) -> FromAgent {
    let keys = (from..from + REPORTS_PER_MESSAGE as u32).map(tenant);
    FromAgent::Report(Report {
        deployments: Vec::new(),
        placed: Vec::new(),
        tenants: keys
            .map(|key| Tenant::new(&key, Some(&installed(generation))))
            .collect(),
        member: None,
        complete: None,
    })
}

#[tokio::test]
async fn flooding_agent_is_throttled_without_loss_or_disruption() {
    // Small messages exhaust the quota also on a slow machine. The large ones wait for it for some seconds.
    const SMALL: u32 = 600;
    const MESSAGES: u32 = SMALL + 10;
    let members = names(2);
    let mut hub = TestHub::new().with_members(&members);
    let port = hub.listen(None).await;
    let mut other = Agent::start(hub.dialer(port.address, "edge-1"), "a", "c");
    other.wait_for_chart("1.0.0").await;
    let dialer = hub.dialer(port.address, "edge-0");
    let mut flooder = RawSession::open(&dialer, FromAgent::Hello(hello(1, "0.1.0")))
        .await
        .unwrap();
    let FromHub::Welcome(_) = flooder.receive().await.unwrap() else {
        panic!("no Welcome")
    };
    // A lone reporter counts, even if it only observes.
    flooder
        .send(FromAgent::Report(Report {
            deployments: Vec::new(),
            placed: Vec::new(),
            member: Some((&lease_holder_report()).into()),
            complete: Some(0),
            tenants: Vec::new(),
        }))
        .await;
    let FromHub::Desired(_) = flooder.receive().await.unwrap() else {
        panic!("no desired state")
    };
    let sender = flooder.sender.clone();
    let flooding = tokio::spawn(async move {
        for number in 0..MESSAGES {
            let kind = Some(match number < SMALL {
                true => FromAgent::Report(Report::default()),
                false => flood(200 * (number % 40), i64::from(number)),
            });
            sender.send(AgentMessage { kind }).await.unwrap();
        }
        let last = FromAgent::Heartbeat(Heartbeat {
            tenants: 1,
            digest_high: 2,
            digest_low: 3,
        });
        sender
            .send(AgentMessage { kind: Some(last) })
            .await
            .unwrap();
    });
    // The throttled agent still receives changes, and other agents' reports arrive.
    wait_until(|| hub.metrics.throttled.get() > 0).await;
    hub.publish(&members, "1.0.1");
    other.wait_for_chart("1.0.1").await;
    let FromHub::Desired(_) = flooder.receive().await.unwrap() else {
        panic!("no desired state")
    };
    other.report_store.set_member(&lease_holder_report());
    hub.wait_for_observation("edge-1", |observation| observation.holder.is_some())
        .await;
    assert!(hub.count("agent", "report") < u64::from(MESSAGES));
    // All messages arrive in the end. The heartbeat is the last and has a wrong digest, so the hub requests a
    // resync.
    let FromHub::Resync(_) = flooder.receive().await.unwrap() else {
        panic!("no question")
    };
    flooding.await.unwrap();
    // The flooding agent's first report and the two of the other agent are not part of the flood.
    assert!(hub.count("agent", "report") > u64::from(MESSAGES));
    assert_eq!(hub.metrics.sessions.get(), 2);
    assert!(other.link.get().is_up());
    other.stop().await;
}

#[tokio::test]
async fn flooding_agent_disconnect_is_detected_despite_backlog() {
    let hub = TestHub::new().with_members(&names(1));
    let port = hub.listen(None).await;
    let dialer = hub.dialer(port.address, "edge-0");
    let mut flooder = RawSession::open(&dialer, FromAgent::Hello(hello(1, "0.1.0")))
        .await
        .unwrap();
    let FromHub::Welcome(_) = flooder.receive().await.unwrap() else {
        panic!("no Welcome")
    };
    // One Tenant each: the hub would need minutes to read the messages in flight.
    let small = |generation| {
        FromAgent::Report(Report {
            deployments: Vec::new(),
            placed: Vec::new(),
            tenants: vec![Tenant::new(&tenant(0), Some(&installed(generation)))],
            ..Report::default()
        })
    };
    let sender = flooder.sender.clone();
    let flooding = tokio::spawn(async move {
        for generation in 0..1_000 {
            let kind = Some(small(generation));
            sender.send(AgentMessage { kind }).await.unwrap();
        }
    });
    // The queue of unread messages is full.
    wait_until(|| hub.metrics.throttled.get() > 0 && flooder.sender.capacity() == 0).await;
    let before = hub.count("agent", "report");
    flooding.abort();
    drop(flooder);
    let mut presence = hub.members.presence("edge-0");
    let away = presence.wait_for(|presence| matches!(presence, Presence::Away(_)));
    tokio::time::timeout(TIMEOUT, away).await.unwrap().unwrap();
    let after = hub.count("agent", "report");
    assert!(after < 900, "{before} and then {after} were heard");
}

#[tokio::test]
async fn renewals_and_chart_fetches_are_throttled_per_member() {
    let members = names(2);
    let hub = TestHub::new().with_members(&members);
    let port = hub.listen(None).await;
    let [greedy, other] = [0, 1].map(|number| hub.dialer(port.address, &members[number]));
    let [greedy, other] = [
        greedy.connect().await.unwrap(),
        other.connect().await.unwrap(),
    ];
    let chart = || FetchChartRequest {
        digest: "another".to_owned(),
        ..FetchChartRequest::default()
    };
    let renewal = || {
        let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).unwrap();
        let request = rcgen::CertificateParams::default();
        let request = request.serialize_request(&key).unwrap();
        RenewRequest {
            certificate_request: request.der().to_vec().into(),
        }
    };
    let mut refused = [Code::Ok; 2];
    for _ in 0..40 {
        if let Err(status) = greedy.fleet().renew(renewal()).await {
            refused[0] = status.code();
        }
        let fetched = greedy.fleet().fetch_chart(chart()).await;
        refused[1] = fetched.err().unwrap().code();
    }
    assert_eq!(refused, [Code::ResourceExhausted; 2]);
    other.fleet().renew(renewal()).await.unwrap();
    let fetched = other.fleet().fetch_chart(chart()).await;
    assert_eq!(fetched.err().unwrap().code(), Code::NotFound);
}

#[tokio::test]
async fn sessions_of_one_member_are_paced() {
    let members = names(2);
    let hub = TestHub::new().with_members(&members);
    let port = hub.listen(None).await;
    let [greedy, other] = [0, 1].map(|number| hub.dialer(port.address, &members[number]));
    let greedy = greedy.connect().await.unwrap();
    let mut refused = Code::Ok;
    for _ in 0..40 {
        let (_sender, messages) = mpsc::channel(1);
        let result = greedy.fleet().connect(ReceiverStream::new(messages)).await;
        if let Err(status) = result {
            refused = status.code();
        }
    }
    assert_eq!(refused, Code::ResourceExhausted);
    let other = other.connect().await.unwrap();
    let (_sender, messages) = mpsc::channel(1);
    let result = other.fleet().connect(ReceiverStream::new(messages)).await;
    result.unwrap();
}

#[tokio::test]
async fn agent_started_before_hub_connects_once_available() {
    let hub = TestHub::new().with_members(&names(1));
    let port = hub.listen(None).await;
    let address = port.address;
    port.close().await;
    let mut agent = Agent::start(hub.dialer(address, "edge-0"), "a", "c");
    let reason = link_error(&mut agent).await;
    assert!(reason.contains(&address.to_string()), "{reason}");
    let _port = hub.listen(Some(address)).await;
    agent.wait_for_chart("1.0.0").await;
    agent.stop().await;
}

#[tokio::test]
async fn two_hundred_simultaneous_agents_are_served() {
    let members = names(200);
    let hub = TestHub::new().with_members(&members);
    let port = hub.listen(None).await;
    let mut agents: Vec<Agent> = members
        .iter()
        .map(|name| Agent::start(hub.dialer(port.address, name), "a", name))
        .collect();
    for agent in &mut agents {
        agent.wait_for_chart("1.0.0").await;
    }
    assert_eq!(hub.metrics.sessions.get(), 200);
    // All of them lose their hub simultaneously and reconnect.
    let address = port.address;
    port.close().await;
    for agent in &mut agents {
        agent.wait_for_link(false).await;
    }
    let _port = hub.listen(Some(address)).await;
    for agent in &mut agents {
        agent.wait_for_link(true).await;
    }
    assert_eq!(hub.metrics.sessions.get(), 200);
    // They share one address, as behind a NAT. Concurrent handshakes stay within its share.
    let max_handshakes = hub.metrics.port.handshakes_max.get();
    assert!((1..=64).contains(&max_handshakes), "{max_handshakes}");
    println!("most handshakes at a time: {max_handshakes}");
    for agent in agents {
        agent.stop().await;
    }
}

#[tokio::test]
async fn small_clock_skew_is_harmless_large_is_reported() {
    for hours in [-1, 1] {
        let hub =
            TestHub::with_clock_offset(SignedDuration::from_hours(hours)).with_members(&names(1));
        let port = hub.listen(None).await;
        let issued_at = clock::wall() + hub.clock_offset;
        let credential = hub.credential("edge-0", &uid("edge-0"), issued_at, DAY);
        let mut agent = Agent::start(hub.dialer_with(port.address, Some(credential)), "a", "c");
        agent.wait_for_chart("1.0.0").await;
        agent.stop().await;
    }
    let hub = TestHub::with_clock_offset(SignedDuration::from_hours(72)).with_members(&names(1));
    let port = hub.listen(None).await;
    let problem = hub
        .dialer_with(port.address, None)
        .connect()
        .await
        .unwrap_err();
    let message = chain(&problem);
    assert!(message.contains("clock"), "{message}");
}

/// The peer vanishes silently: from some moment on, the relay discards all bytes.
#[tokio::test]
async fn half_open_connection_is_detected_by_both_sides() {
    let hub = TestHub::new().with_members(&names(1));
    let port = hub.listen(None).await;
    let relay = Relay::start(port.address).await;
    let mut agent = Agent::start(hub.dialer(relay.address, "edge-0"), "a", "c");
    agent.wait_for_chart("1.0.0").await;
    relay.discard.cancel();
    agent.wait_for_link(false).await;
    let mut presence = hub.members.presence("edge-0");
    let away = presence.wait_for(|presence| matches!(presence, Presence::Away(_)));
    tokio::time::timeout(TIMEOUT, away).await.unwrap().unwrap();
    assert_eq!(hub.metrics.sessions.get(), 0);
    agent.stop().await;
}

/// Relays bytes in both directions until it discards them, and keeps its sockets open.
struct Relay {
    address: SocketAddr,
    discard: CancellationToken,
    _stop: DropGuard,
}

impl Relay {
    async fn start(to: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (discard, stop) = (CancellationToken::new(), CancellationToken::new());
        let (discarding, stopping) = (discard.clone(), stop.clone());
        tokio::spawn(async move {
            while let Some(Ok((mut from, _))) =
                stopping.run_until_cancelled(listener.accept()).await
            {
                let (discarding, stopping) = (discarding.clone(), stopping.clone());
                tokio::spawn(async move {
                    let mut to = tokio::net::TcpStream::connect(to).await.unwrap();
                    let copying = tokio::io::copy_bidirectional(&mut from, &mut to);
                    if discarding.run_until_cancelled(copying).await.is_none() {
                        stopping.cancelled().await;
                    }
                });
            }
        });
        Self {
            address,
            discard,
            _stop: stop.drop_guard(),
        }
    }
}

#[tokio::test]
async fn dial_error_names_port_without_tls() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let serving = tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        let response = b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n";
        tokio::io::AsyncWriteExt::write_all(&mut stream, response)
            .await
            .unwrap();
        stream
    });
    let hub = TestHub::new();
    let problem: DialError = hub.dialer(address, "edge-0").connect().await.unwrap_err();
    let message = chain(&problem);
    assert!(
        message.contains(&address.to_string()) && message.contains("TLS"),
        "{message}"
    );
    serving.await.unwrap();
}
