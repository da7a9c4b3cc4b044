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
use krypton_hub::ca::{Authority, Live, read_agent_certificate};
use krypton_hub::edgecluster::publisher::{DesiredStatePublisher, MemberInputs, Order};
use krypton_hub::leader::Leader;
use krypton_hub::members::MemberRegistry;
use krypton_hub::members::agent_keys;
use krypton_hub::members::arbiter::Presence;
use krypton_hub::members::member::Admission;
use krypton_hub::members::observation::MemberObservation;
use krypton_hub::notices::HomeEvents;
use krypton_hub::observe::metrics::{Message, SessionMetrics};
use krypton_hub::tenants::Reports;
use krypton_proto::REPORTS_PER_MESSAGE;
use krypton_proto::v1::{
    AgentMessage, Applied, FetchChartRequest, Heartbeat, Hello, HubMessage, RenewRequest, Report,
    Tenant, agent_message::Kind as Said, hub_message::Kind as Say,
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
const PATIENCE: Duration = Duration::from_secs(60);

async fn until(done: impl Fn() -> bool) {
    let waiting = async {
        while !done() {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(PATIENCE, waiting).await.unwrap();
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
struct Home {
    authority: Arc<Live>,
    members: Arc<MemberRegistry>,
    publisher: DesiredStatePublisher,
    reports: Arc<Reports>,
    metrics: Arc<SessionMetrics>,
    charts: Arc<ChartCache>,
    /// How far the hub's clock is ahead when it creates certificates.
    ahead: SignedDuration,
    lead: Leader,
    _folder: TempDir,
}

impl Home {
    fn new() -> Self {
        Self::ahead(SignedDuration::ZERO)
    }

    fn ahead(ahead: SignedDuration) -> Self {
        let authority = Authority::generate(TRUST_DOMAIN, clock::wall() + ahead).unwrap();
        Self {
            ahead,
            ..Self::of(authority)
        }
    }

    fn of(authority: Authority) -> Self {
        krypton_tls_provider();
        let folder = TempDir::new().unwrap();
        let reports = Arc::new(Reports::default());
        Self {
            authority: Arc::new(Live::new(authority)),
            members: Arc::new(MemberRegistry::new(Arc::clone(&reports))),
            publisher: DesiredStatePublisher::default(),
            reports,
            metrics: Arc::default(),
            charts: Arc::new(ChartCache::new(folder.path().join("charts")).unwrap()),
            ahead: SignedDuration::ZERO,
            lead: Leader::alone(),
            _folder: folder,
        }
    }

    /// Registers members like the fleet, each with a desired state.
    fn with_members(mut self, names: &[String]) -> Self {
        for name in names {
            self.members.enter(name, &uid(name));
        }
        let known = names.to_vec();
        self.members.retain(
            |name| known.iter().any(|known| known == name),
            |_| false,
            |_| true,
        );
        self.give(names, "1.0.0");
        self
    }

    fn give(&mut self, names: &[String], version: &str) {
        for name in names {
            let member = self.members.get(name).unwrap();
            let before = member.published.get();
            let next = self.publisher.next(
                before.as_ref(),
                1,
                &MemberInputs {
                    chart: &chart(version),
                    own: false,
                    namespaces: &NamespaceConfiguration::default(),
                    deployments: &[],
                    placed: &[],
                },
                Order::default(),
                BootTime::now(),
            );
            member.published.send_replace(next.or(before));
        }
    }

    async fn listen(&self, address: Option<SocketAddr>) -> Port {
        self.listen_as(env!("CARGO_PKG_VERSION"), address).await
    }

    /// Listens as a hub of this version.
    async fn listen_as(&self, hub_version: &str, address: Option<SocketAddr>) -> Port {
        let address = address.unwrap_or_else(|| SocketAddr::from(([127, 0, 0, 1], 0)));
        let listener = TcpListener::bind(address).await.unwrap();
        let address = listener.local_addr().unwrap();
        let stop = CancellationToken::new();
        let sessions = Sessions {
            members: Arc::clone(&self.members),
            metrics: Arc::clone(&self.metrics),
            notices: HomeEvents::nowhere(),
            hub_version: hub_version.to_owned(),
            numbers: AtomicU64::new(0),
            watchdog: Watchdog::default(),
            lead: self.lead.clone(),
            stop: stop.clone(),
        };
        let fleet = FleetService::new(
            Arc::new(sessions),
            Arc::clone(&self.charts),
            Arc::clone(&self.authority),
        );
        let now = clock::wall() + self.ahead;
        let tls = listener::server_config(&self.authority.now(), now).unwrap();
        let tls = Arc::new(ArcSwap::from_pointee(tls));
        tokio::spawn(listener::keep_credential(
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
            self.metrics.door.clone(),
            stop.clone(),
        );
        Port {
            address,
            serving: tokio::spawn(async move { serving.await.unwrap() }),
            stop: stop.drop_guard(),
        }
    }

    /// Issues a certificate of this hub to an agent.
    fn credential(&self, name: &str, uid: &str, made: Timestamp, life: Duration) -> Credential {
        let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).unwrap();
        let request = rcgen::CertificateParams::default()
            .serialize_request(&key)
            .unwrap();
        let certificates = self
            .authority
            .now()
            .sign_agent(request.der(), name, uid, made, life)
            .unwrap();
        Credential {
            certificates,
            key: PrivateKeyDer::try_from(key.serialize_der()).unwrap(),
        }
    }

    fn dialer_with(&self, address: SocketAddr, credential: Option<Credential>) -> Arc<Dialer> {
        let tls = tls::client_config(&self.authority.now().roots(), credential).unwrap();
        let tls = Arc::new(ArcSwap::from_pointee(tls));
        Arc::new(Dialer::new(vec![address.to_string()], tls))
    }

    /// Returns the dialer of an agent that enrolled an hour ago, so the hub does not treat its certificate as
    /// new.
    fn dialer(&self, address: SocketAddr, name: &str) -> Arc<Dialer> {
        let credential = self.credential(name, &uid(name), a_while_ago(), DAY);
        self.dialer_with(address, Some(credential))
    }

    /// Waits until the hub's observation of a member satisfies `wanted`.
    async fn knows(&self, name: &str, wanted: impl Fn(&MemberObservation) -> bool) {
        let all = async {
            while !self
                .members
                .observation(name)
                .is_some_and(|facts| wanted(&facts))
            {
                self.members.changed.notified().await;
            }
        };
        let waited = tokio::time::timeout(PATIENCE, all).await;
        assert!(waited.is_ok(), "{:?}", self.members.observation(name));
    }
}

/// A running listener of the hub.
struct Port {
    address: SocketAddr,
    serving: JoinHandle<()>,
    stop: DropGuard,
}

impl Port {
    /// Stops the listener like a shutdown of the hub.
    async fn close(self) {
        drop(self.stop);
        tokio::time::timeout(PATIENCE, self.serving)
            .await
            .unwrap()
            .unwrap();
    }
}

fn krypton_tls_provider() {
    // Fails if another test of this process has installed the provider.
    drop(rustls::crypto::aws_lc_rs::default_provider().install_default());
}

fn uid(name: &str) -> String {
    format!("uid-of-{name}")
}

fn a_while_ago() -> Timestamp {
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

impl Home {
    /// Returns the number of messages of a kind.
    fn count(&self, sender: &'static str, kind: &'static str) -> u64 {
        let messages = &self.metrics.messages;
        messages.get_or_create(&Message { sender, kind }).get()
    }
}

/// A raw stream, for messages that our own agent never sends.
struct Stream {
    say: mpsc::Sender<AgentMessage>,
    heard: Streaming<HubMessage>,
    connection: Connection,
}

impl Stream {
    async fn open(dialer: &Dialer, first: Said) -> Result<Self, Status> {
        let connection = dialer.connect().await.unwrap();
        let (say, said) = mpsc::channel(4);
        say.send(AgentMessage { kind: Some(first) }).await.unwrap();
        let mut fleet = connection.fleet().max_encoding_message_size(usize::MAX);
        let heard = fleet.connect(ReceiverStream::new(said)).await?.into_inner();
        Ok(Self {
            say,
            heard,
            connection,
        })
    }

    async fn say(&self, kind: Said) {
        let message = AgentMessage { kind: Some(kind) };
        self.say.send(message).await.unwrap();
    }

    /// Returns the next message except the CA's roots, which these tests ignore.
    async fn hear(&mut self) -> Result<Say, Status> {
        loop {
            match self.hear_any().await? {
                Say::Roots(_) => {}
                said => return Ok(said),
            }
        }
    }

    async fn hear_any(&mut self) -> Result<Say, Status> {
        let heard = tokio::time::timeout(PATIENCE, self.heard.message()).await;
        let message = heard.expect("the hub says something")?;
        Ok(message.and_then(|message| message.kind).expect("a message"))
    }

    /// Returns the status with which the hub ends the stream.
    async fn end(&mut self) -> Status {
        loop {
            if let Err(status) = self.hear().await {
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

    async fn has(&mut self, version: &str) {
        let there = self.desired.wait_for(|desired| {
            desired
                .as_ref()
                .is_some_and(|desired| desired.chart.version == version)
        });
        let there = tokio::time::timeout(PATIENCE, there).await;
        there.expect("the desired state comes").unwrap();
    }

    async fn is_up(&mut self, up: bool) {
        let link = self.link.wait_for(|link| link.is_up() == up);
        let link = tokio::time::timeout(PATIENCE, link).await;
        link.expect("the link changes").unwrap();
    }

    async fn stop(self) {
        self.stop.cancel();
        self.task.await.unwrap();
    }
}

fn holds_the_lease() -> MemberReport {
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
    let mut home = Home::new().with_members(&members);
    let port = home.listen(None).await;
    let mut agent = Agent::start(home.dialer(port.address, "edge-0"), "a", "c");
    agent.has("1.0.0").await;
    home.give(&members, "1.0.1");
    agent.has("1.0.1").await;
    home.knows("edge-0", |facts| facts.agent_version.is_some())
        .await;
    agent.stop().await;
}

#[tokio::test]
async fn hub_with_different_ca_is_rejected() {
    let (ours, other) = (Home::new(), Home::new().with_members(&names(1)));
    let port = other.listen(None).await;
    // Our roots, but the listener of the other hub.
    let problem = ours
        .dialer(port.address, "edge-0")
        .connect()
        .await
        .unwrap_err();
    let said = chain(&problem);
    assert!(
        said.contains(&port.address.to_string()) && said.contains("CA"),
        "{said}"
    );
}

#[tokio::test]
async fn agent_of_foreign_authority_is_rejected() {
    let (ours, other) = (Home::new().with_members(&names(1)), Home::new());
    let port = ours.listen(None).await;
    let credential = other.credential("edge-0", &uid("edge-0"), clock::wall(), DAY);
    let dialer = ours.dialer_with(port.address, Some(credential));
    let mut agent = Agent::start(dialer, "a", "c");
    let why = refusal(&mut agent).await;
    assert!(why.contains("certificate"), "{why}");
    agent.stop().await;
}

/// Returns why there is no session, after the first attempt.
async fn refusal(agent: &mut Agent) -> String {
    let never_tried = format!("{:?}", Link::default());
    let down = agent
        .link
        .wait_for(|link| format!("{link:?}") != never_tried);
    let link = tokio::time::timeout(PATIENCE, down).await.unwrap().unwrap();
    match &*link {
        Link::Down(why) => why.clone(),
        Link::Up(_) => panic!("there is a session"),
    }
}

#[tokio::test]
async fn an_expired_certificate_is_not_let_in() {
    let home = Home::new().with_members(&names(1));
    let port = home.listen(None).await;
    let long_ago = clock::wall() - SignedDuration::from_hours(24 * 60);
    let credential = home.credential("edge-0", &uid("edge-0"), long_ago, DAY);
    let mut agent = Agent::start(home.dialer_with(port.address, Some(credential)), "a", "c");
    let why = refusal(&mut agent).await;
    assert!(why.contains("expired"), "{why}");
    agent.stop().await;
}

#[tokio::test]
async fn a_session_ends_with_its_certificate() {
    let home = Home::new().with_members(&names(1));
    let port = home.listen(None).await;
    let credential = home.credential(
        "edge-0",
        &uid("edge-0"),
        clock::wall(),
        Duration::from_secs(3),
    );
    let dialer = home.dialer_with(port.address, Some(credential));
    let mut stream = Stream::open(&dialer, Said::Hello(hello(1, "0.1.0")))
        .await
        .unwrap();
    let status = stream.end().await;
    assert!(
        status.code() == Code::Unauthenticated
            || status.code() == Code::Unknown
            || status.code() == Code::Unavailable,
        "{status:?}"
    );
}

#[tokio::test]
async fn missing_certificate_or_hub_certificate_is_rejected() {
    let home = Home::new().with_members(&names(1));
    let port = home.listen(None).await;
    let own = home.authority.now().hub_credential(clock::wall()).unwrap();
    for credential in [None, Some(own)] {
        let dialer = home.dialer_with(port.address, credential);
        let Ok(connection) = dialer.connect().await else {
            continue;
        };
        let mut fleet = connection.fleet();
        let (_say, said) = mpsc::channel::<AgentMessage>(1);
        let status = fleet.connect(ReceiverStream::new(said)).await.unwrap_err();
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
    let home = Home::new().with_members(&names(1));
    let port = home.listen(None).await;
    for (name, uid) in [("edge-0", "uid-before"), ("edge-7", "uid-of-edge-7")] {
        let credential = home.credential(name, uid, a_while_ago(), DAY);
        let dialer = home.dialer_with(port.address, Some(credential));
        let status = Stream::open(&dialer, Said::Hello(hello(1, "0.1.0")))
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
    let mut home = Home::new().with_members(&names(1));
    let port = home.listen(None).await;
    let cases = [
        // An EdgeCluster recreated, and one created.
        ("edge-0", "uid-after", 0),
        ("edge-7", "uid-of-edge-7", 0),
        // By a hub whose clock is ahead.
        ("edge-7", "uid-of-edge-7", -30),
    ];
    let open = async |home: &Home, (name, uid, age): (&str, &str, i64)| {
        let made = clock::wall() - SignedDuration::from_secs(age);
        let credential = home.credential(name, uid, made, DAY);
        let dialer = home.dialer_with(port.address, Some(credential));
        Stream::open(&dialer, Said::Hello(hello(1, "0.1.0"))).await
    };
    let code = async |home: &Home, case| open(home, case).await.err().map(|status| status.code());
    for case in cases {
        assert_eq!(code(&home, case).await, Some(Code::Unavailable), "{case:?}");
    }
    for age in [120, -3600] {
        let old = ("edge-7", "uid-of-edge-7", age);
        assert_eq!(
            code(&home, old).await,
            Some(Code::PermissionDenied),
            "{age}"
        );
    }
    assert_eq!(home.metrics.sessions.get(), 0);
    // A member whose EdgeCluster was deleted is rejected, even with a new certificate.
    home.members
        .retain(|_| false, |name| name == "edge-0", |_| true);
    let cut_off = ("edge-0", "uid-of-edge-0", 0);
    assert_eq!(code(&home, cut_off).await, Some(Code::PermissionDenied));

    home = home.with_members(&["edge-7".to_owned()]);
    let mut stream = open(&home, cases[1]).await.unwrap();
    assert!(matches!(stream.hear().await.unwrap(), Say::Welcome(_)));
}

#[tokio::test]
async fn agent_session_is_bound_to_member_and_cluster() {
    let members = names(2);
    let home = Home::new().with_members(&members);
    let port = home.listen(None).await;
    // Messages contain no member name. A Tenant with the name of a member has no effect.
    let first = Agent::start(home.dialer(port.address, "edge-0"), "a", "cluster-0");
    home.knows("edge-0", |facts| facts.uid.is_some()).await;
    let mut stream = Stream::open(
        &home.dialer(port.address, "edge-0"),
        Said::Hello(Hello {
            replica: "edge-1".to_owned(),
            ..hello(1, "0.1.0")
        }),
    )
    .await
    .unwrap();
    let Say::Welcome(_) = stream.hear().await.unwrap() else {
        panic!("no Welcome")
    };
    stream
        .say(Said::Report(Report {
            deployments: Vec::new(),
            placed: Vec::new(),
            tenants: vec![Tenant {
                namespace: "edge-1".to_owned(),
                name: "edge-1".to_owned(),
                state: None,
            }],
            member: Some((&holds_the_lease()).into()),
            complete: Some(0),
        }))
        .await;
    home.knows("edge-0", |facts| facts.holder.is_some()).await;
    assert_eq!(home.members.observation("edge-1"), None);
    // The member is now recorded with another cluster.
    let recorded = Admission {
        refused: None,
        cluster_uid: Some("cluster-0".to_owned()),
        keys: None,
    };
    home.members
        .get("edge-0")
        .unwrap()
        .admission
        .send_replace(recorded);
    let dialer = home.dialer(port.address, "edge-0");
    let mut clone = Stream::open(&dialer, Said::Hello(hello(1, "0.1.0")))
        .await
        .unwrap();
    let status = clone.end().await;
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
    let home = Home::new().with_members(&names(1));
    let port = home.listen(None).await;
    let cases = [
        (0, "0.1.0", "protocol"),
        (9, "0.1.0", "protocol"),
        (1, "0.9.0", "upgrade the hub"),
        (1, "latest", "SemVer"),
    ];
    for (protocol, version, word) in cases {
        let dialer = home.dialer(port.address, "edge-0");
        let mut stream = Stream::open(&dialer, Said::Hello(hello(protocol, version)))
            .await
            .unwrap();
        let status = stream.end().await;
        assert_eq!(status.code(), Code::FailedPrecondition, "{version}");
        assert!(status.message().contains(word), "{status:?}");
    }
}

#[tokio::test]
async fn protocol_violation_ends_only_its_own_session() {
    let members = names(2);
    let home = Home::new().with_members(&members);
    let port = home.listen(None).await;
    let mut other = Agent::start(home.dialer(port.address, "edge-1"), "a", "c");
    other.has("1.0.0").await;
    let heartbeat = Said::Heartbeat(Heartbeat {
        tenants: 0,
        digest_high: 0,
        digest_low: 0,
    });
    let nameless = Said::Report(Report {
        deployments: Vec::new(),
        placed: Vec::new(),
        tenants: vec![Tenant {
            namespace: String::new(),
            name: "t".to_owned(),
            state: None,
        }],
        ..Report::default()
    });
    let oversized = Said::Applied(Applied {
        version: None,
        digest: "x".repeat(2 << 20),
    });
    let dialer = home.dialer(port.address, "edge-0");
    let mut not_hello = Stream::open(&dialer, heartbeat).await.unwrap();
    assert_eq!(not_hello.end().await.code(), Code::InvalidArgument);
    for (message, code) in [
        (nameless, Code::InvalidArgument),
        (oversized, Code::OutOfRange),
    ] {
        let mut stream = Stream::open(&dialer, Said::Hello(hello(1, "0.1.0")))
            .await
            .unwrap();
        let Say::Welcome(_) = stream.hear().await.unwrap() else {
            panic!("no Welcome")
        };
        stream.say(message).await;
        assert_eq!(stream.end().await.code(), code);
    }
    assert!(other.link.get().is_up());
    other.stop().await;
}

#[tokio::test]
async fn newer_session_replaces_only_older_of_same_replica() {
    let home = Home::new().with_members(&names(1));
    let port = home.listen(None).await;
    let dialer = home.dialer(port.address, "edge-0");
    let as_replica = |replica: &str| {
        let replica = replica.to_owned();
        Said::Hello(Hello {
            replica,
            ..hello(1, "0.1.0")
        })
    };
    let mut other = Stream::open(&dialer, as_replica("b")).await.unwrap();
    let mut older = Stream::open(&dialer, as_replica("a")).await.unwrap();
    let Say::Welcome(_) = older.hear().await.unwrap() else {
        panic!("no Welcome")
    };
    let Say::Welcome(_) = other.hear().await.unwrap() else {
        panic!("no Welcome")
    };
    let mut newer = Stream::open(&dialer, as_replica("a")).await.unwrap();
    assert_eq!(older.end().await.code(), Code::Aborted);
    for stream in [&mut newer, &mut other] {
        let heard = loop {
            match stream.hear().await.unwrap() {
                Say::Desired(desired) => break desired,
                Say::Welcome(_) => {}
                heard => panic!("{heard:?}"),
            }
        };
        assert!(DesiredState::try_from(heard).is_ok());
    }
    assert_eq!(home.metrics.sessions.get(), 2);
}

#[tokio::test]
async fn certificate_renews_for_requesting_member_unless_removed() {
    let home = Home::new().with_members(&names(1));
    let port = home.listen(None).await;
    let connection = home.dialer(port.address, "edge-0").connect().await.unwrap();
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
    home.members.retain(|_| false, |_| false, |_| true);
    let status = connection.fleet().renew(request).await.unwrap_err();
    assert_eq!(status.code(), Code::PermissionDenied);
}

#[tokio::test]
async fn stolen_key_is_refused_and_reported_after_renewal() {
    let home = Home::new().with_members(&names(1));
    let port = home.listen(None).await;
    let mut agent = Agent::start(home.dialer(port.address, "edge-0"), "a", "c");
    agent.has("1.0.0").await;
    // A thief has renewed a copied key.
    let another = home.credential("edge-0", &uid("edge-0"), a_while_ago(), DAY);
    let authority = home.authority.now();
    let another = read_agent_certificate(authority.trust_domain(), &another.certificates[0]);
    let keys = agent_keys::enrolled(None, agent_keys::key_of(&another.unwrap()));
    let recorded = Admission {
        keys: Some(keys),
        ..Admission::default()
    };
    let member = home.members.get("edge-0").unwrap();
    member.admission.send_replace(recorded);
    agent.is_up(false).await;
    let why = format!("{:?}", agent.link.get());
    assert!(why.contains("voids all older keys"), "{why}");
    home.knows("edge-0", |facts| facts.key_refused.is_some())
        .await;
    agent.stop().await;
    let dialer = home.dialer(port.address, "edge-0");
    let renewal = dialer.connect().await.unwrap();
    let status = renewal.fleet().renew(RenewRequest::default()).await;
    assert_eq!(status.unwrap_err().code(), Code::PermissionDenied);
}

#[tokio::test]
async fn agent_reconnects_with_newer_certificate() {
    let home = Home::new().with_members(&names(1));
    let port = home.listen(None).await;
    let dialer = home.dialer(port.address, "edge-0");
    let mut agent = Agent::start(Arc::clone(&dialer), "a", "c");
    agent.has("1.0.0").await;
    let longer = DAY * 2;
    let credential = home.credential("edge-0", &uid("edge-0"), clock::wall(), longer);
    let not_after = clock::wall() + longer - DAY / 2;
    dialer.renew(tls::client_config(&home.authority.now().roots(), Some(credential)).unwrap());
    home.knows("edge-0", |facts| {
        facts
            .certificate
            .is_some_and(|own| own.not_after > not_after)
    })
    .await;
    agent.stop().await;
}

#[tokio::test]
async fn banned_member_is_disconnected_immediately() {
    let home = Home::new().with_members(&names(1));
    let port = home.listen(None).await;
    let mut agent = Agent::start(home.dialer(port.address, "edge-0"), "a", "c");
    agent.has("1.0.0").await;
    let refused = Admission {
        refused: Some("spec.banned is set".to_owned()),
        ..Admission::default()
    };
    home.members
        .get("edge-0")
        .unwrap()
        .admission
        .send_replace(refused);
    agent.is_up(false).await;
    let why = format!("{:?}", &agent.link.get());
    assert!(why.contains("spec.banned"), "{why}");
    agent.stop().await;
}

#[tokio::test]
async fn deleted_or_recreated_edge_cluster_disconnects_member() {
    for again in [false, true] {
        let home = Home::new().with_members(&names(1));
        let port = home.listen(None).await;
        let mut agent = Agent::start(home.dialer(port.address, "edge-0"), "a", "c");
        agent.has("1.0.0").await;
        if again {
            home.members.enter("edge-0", "another-uid");
        } else {
            home.members.retain(|_| false, |_| false, |_| true);
        }
        agent.is_up(false).await;
        let why = format!("{:?}", &agent.link.get());
        assert!(why.contains("kubectl krypton join"), "{why}");
        agent.stop().await;
    }
}

#[tokio::test]
async fn agent_reconnects_to_restarted_hub_and_resends_report() {
    let home = Home::new().with_members(&names(1));
    let port = home.listen(None).await;
    let address = port.address;
    let mut agent = Agent::start(home.dialer(address, "edge-0"), "a", "c");
    agent.has("1.0.0").await;
    agent.report_store.member(&holds_the_lease());
    home.knows("edge-0", |facts| facts.holder.is_some()).await;
    port.close().await;
    agent.is_up(false).await;
    let _port = home.listen(Some(address)).await;
    agent.is_up(true).await;
    home.knows("edge-0", |facts| facts.holder.is_some()).await;
    agent.stop().await;
}

#[tokio::test]
async fn returning_agent_gets_latest_state_and_reports_once() {
    let members = names(1);
    let mut home = Home::new().with_members(&members);
    let port = home.listen(None).await;
    let address = port.address;
    let mut agent = Agent::start(home.dialer(address, "edge-0"), "a", "c");
    agent.has("1.0.0").await;
    agent.report_store.member(&holds_the_lease());
    for number in 0..3 {
        agent
            .report_store
            .tenant(&tenant(number), Some(installed(1)));
    }
    home.knows("edge-0", |facts| facts.holder.is_some()).await;
    port.close().await;
    agent.is_up(false).await;
    let counts = |home: &Home| {
        [("hub", "desired"), ("agent", "report")].map(|(of, kind)| home.count(of, kind))
    };
    let before = counts(&home);
    // While they are disconnected, both sides change.
    for version in ["1.0.1", "1.0.2", "1.0.3"] {
        home.give(&members, version);
    }
    for generation in 2..10 {
        agent
            .report_store
            .tenant(&tenant(0), Some(installed(generation)));
    }
    agent.report_store.tenant(&tenant(1), None);
    let _port = home.listen(Some(address)).await;
    agent.has("1.0.3").await;
    home.give(&members, "1.0.4");
    agent.has("1.0.4").await;
    // Messages arrive in order, so this change of the member arrives after all earlier ones.
    agent.report_store.member(&MemberReport {
        holder: Some("agent/b".to_owned()),
        ..holds_the_lease()
    });
    home.knows("edge-0", |facts| facts.holder.as_deref() == Some("agent/b"))
        .await;
    let [desired, reports] = counts(&home);
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
fn flood(from: u32, generation: i64) -> Said {
    let keys = (from..from + REPORTS_PER_MESSAGE as u32).map(tenant);
    Said::Report(Report {
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
    let mut home = Home::new().with_members(&members);
    let port = home.listen(None).await;
    let mut other = Agent::start(home.dialer(port.address, "edge-1"), "a", "c");
    other.has("1.0.0").await;
    let dialer = home.dialer(port.address, "edge-0");
    let mut loud = Stream::open(&dialer, Said::Hello(hello(1, "0.1.0")))
        .await
        .unwrap();
    let Say::Welcome(_) = loud.hear().await.unwrap() else {
        panic!("no Welcome")
    };
    // A lone reporter counts, even if it only observes.
    loud.say(Said::Report(Report {
        deployments: Vec::new(),
        placed: Vec::new(),
        member: Some((&holds_the_lease()).into()),
        complete: Some(0),
        tenants: Vec::new(),
    }))
    .await;
    let Say::Desired(_) = loud.hear().await.unwrap() else {
        panic!("no desired state")
    };
    let say = loud.say.clone();
    let flooding = tokio::spawn(async move {
        for number in 0..MESSAGES {
            let kind = Some(match number < SMALL {
                true => Said::Report(Report::default()),
                false => flood(200 * (number % 40), i64::from(number)),
            });
            say.send(AgentMessage { kind }).await.unwrap();
        }
        let last = Said::Heartbeat(Heartbeat {
            tenants: 1,
            digest_high: 2,
            digest_low: 3,
        });
        say.send(AgentMessage { kind: Some(last) }).await.unwrap();
    });
    // The throttled agent still receives changes, and other agents' reports arrive.
    until(|| home.metrics.throttled.get() > 0).await;
    home.give(&members, "1.0.1");
    other.has("1.0.1").await;
    let Say::Desired(_) = loud.hear().await.unwrap() else {
        panic!("no desired state")
    };
    other.report_store.member(&holds_the_lease());
    home.knows("edge-1", |facts| facts.holder.is_some()).await;
    assert!(home.count("agent", "report") < u64::from(MESSAGES));
    // All messages arrive in the end. The heartbeat is the last and has a wrong digest, so the hub requests a
    // resync.
    let Say::Resync(_) = loud.hear().await.unwrap() else {
        panic!("no question")
    };
    flooding.await.unwrap();
    // The flooding agent's first report and the two of the other agent are not part of the flood.
    assert!(home.count("agent", "report") > u64::from(MESSAGES));
    assert_eq!(home.metrics.sessions.get(), 2);
    assert!(other.link.get().is_up());
    other.stop().await;
}

#[tokio::test]
async fn flooding_agent_disconnect_is_detected_despite_backlog() {
    let home = Home::new().with_members(&names(1));
    let port = home.listen(None).await;
    let dialer = home.dialer(port.address, "edge-0");
    let mut loud = Stream::open(&dialer, Said::Hello(hello(1, "0.1.0")))
        .await
        .unwrap();
    let Say::Welcome(_) = loud.hear().await.unwrap() else {
        panic!("no Welcome")
    };
    // One Tenant each: the hub would need minutes to read the messages in flight.
    let small = |generation| {
        Said::Report(Report {
            deployments: Vec::new(),
            placed: Vec::new(),
            tenants: vec![Tenant::new(&tenant(0), Some(&installed(generation)))],
            ..Report::default()
        })
    };
    let say = loud.say.clone();
    let flooding = tokio::spawn(async move {
        for generation in 0..1_000 {
            let kind = Some(small(generation));
            say.send(AgentMessage { kind }).await.unwrap();
        }
    });
    // The queue of unread messages is full.
    until(|| home.metrics.throttled.get() > 0 && loud.say.capacity() == 0).await;
    let heard = home.count("agent", "report");
    flooding.abort();
    drop(loud);
    let mut presence = home.members.presence("edge-0");
    let away = presence.wait_for(|presence| matches!(presence, Presence::Away(_)));
    tokio::time::timeout(PATIENCE, away).await.unwrap().unwrap();
    let after = home.count("agent", "report");
    assert!(after < 900, "{heard} and then {after} were heard");
}

#[tokio::test]
async fn renewals_and_chart_fetches_are_throttled_per_member() {
    let members = names(2);
    let home = Home::new().with_members(&members);
    let port = home.listen(None).await;
    let [greedy, other] = [0, 1].map(|number| home.dialer(port.address, &members[number]));
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
    let home = Home::new().with_members(&members);
    let port = home.listen(None).await;
    let [greedy, other] = [0, 1].map(|number| home.dialer(port.address, &members[number]));
    let greedy = greedy.connect().await.unwrap();
    let mut refused = Code::Ok;
    for _ in 0..40 {
        let (_say, said) = mpsc::channel(1);
        let begun = greedy.fleet().connect(ReceiverStream::new(said)).await;
        if let Err(status) = begun {
            refused = status.code();
        }
    }
    assert_eq!(refused, Code::ResourceExhausted);
    let other = other.connect().await.unwrap();
    let (_say, said) = mpsc::channel(1);
    let begun = other.fleet().connect(ReceiverStream::new(said)).await;
    begun.unwrap();
}

#[tokio::test]
async fn agent_started_before_hub_connects_once_available() {
    let home = Home::new().with_members(&names(1));
    let port = home.listen(None).await;
    let address = port.address;
    port.close().await;
    let mut agent = Agent::start(home.dialer(address, "edge-0"), "a", "c");
    let why = refusal(&mut agent).await;
    assert!(why.contains(&address.to_string()), "{why}");
    let _port = home.listen(Some(address)).await;
    agent.has("1.0.0").await;
    agent.stop().await;
}

#[tokio::test]
async fn two_hundred_simultaneous_agents_are_served() {
    let members = names(200);
    let home = Home::new().with_members(&members);
    let port = home.listen(None).await;
    let mut agents: Vec<Agent> = members
        .iter()
        .map(|name| Agent::start(home.dialer(port.address, name), "a", name))
        .collect();
    for agent in &mut agents {
        agent.has("1.0.0").await;
    }
    assert_eq!(home.metrics.sessions.get(), 200);
    // All of them lose their hub simultaneously and reconnect.
    let address = port.address;
    port.close().await;
    for agent in &mut agents {
        agent.is_up(false).await;
    }
    let _port = home.listen(Some(address)).await;
    for agent in &mut agents {
        agent.is_up(true).await;
    }
    assert_eq!(home.metrics.sessions.get(), 200);
    // They share one address, as behind a NAT. Concurrent handshakes stay within its share.
    let most = home.metrics.door.handshakes_max.get();
    assert!((1..=64).contains(&most), "{most}");
    println!("most handshakes at a time: {most}");
    for agent in agents {
        agent.stop().await;
    }
}

#[tokio::test]
async fn small_clock_skew_is_harmless_large_is_reported() {
    for hours in [-1, 1] {
        let home = Home::ahead(SignedDuration::from_hours(hours)).with_members(&names(1));
        let port = home.listen(None).await;
        let made = clock::wall() + home.ahead;
        let credential = home.credential("edge-0", &uid("edge-0"), made, DAY);
        let mut agent = Agent::start(home.dialer_with(port.address, Some(credential)), "a", "c");
        agent.has("1.0.0").await;
        agent.stop().await;
    }
    let home = Home::ahead(SignedDuration::from_hours(72)).with_members(&names(1));
    let port = home.listen(None).await;
    let problem = home
        .dialer_with(port.address, None)
        .connect()
        .await
        .unwrap_err();
    let said = chain(&problem);
    assert!(said.contains("clock"), "{said}");
}

/// The peer vanishes silently: from some moment on, the relay discards all bytes.
#[tokio::test]
async fn half_open_connection_is_detected_by_both_sides() {
    let home = Home::new().with_members(&names(1));
    let port = home.listen(None).await;
    let relay = Relay::start(port.address).await;
    let mut agent = Agent::start(home.dialer(relay.address, "edge-0"), "a", "c");
    agent.has("1.0.0").await;
    relay.swallow.cancel();
    agent.is_up(false).await;
    let mut presence = home.members.presence("edge-0");
    let away = presence.wait_for(|presence| matches!(presence, Presence::Away(_)));
    tokio::time::timeout(PATIENCE, away).await.unwrap().unwrap();
    assert_eq!(home.metrics.sessions.get(), 0);
    agent.stop().await;
}

/// Relays bytes in both directions until it discards them, and keeps its sockets open.
struct Relay {
    address: SocketAddr,
    swallow: CancellationToken,
    _stop: DropGuard,
}

impl Relay {
    async fn start(to: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (swallow, stop) = (CancellationToken::new(), CancellationToken::new());
        let (swallowing, stopping) = (swallow.clone(), stop.clone());
        tokio::spawn(async move {
            while let Some(Ok((mut from, _))) =
                stopping.run_until_cancelled(listener.accept()).await
            {
                let (swallowing, stopping) = (swallowing.clone(), stopping.clone());
                tokio::spawn(async move {
                    let mut to = tokio::net::TcpStream::connect(to).await.unwrap();
                    let carrying = tokio::io::copy_bidirectional(&mut from, &mut to);
                    if swallowing.run_until_cancelled(carrying).await.is_none() {
                        stopping.cancelled().await;
                    }
                });
            }
        });
        Self {
            address,
            swallow,
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
        let answer = b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n";
        tokio::io::AsyncWriteExt::write_all(&mut stream, answer)
            .await
            .unwrap();
        stream
    });
    let home = Home::new();
    let problem: DialError = home.dialer(address, "edge-0").connect().await.unwrap_err();
    let said = chain(&problem);
    assert!(
        said.contains(&address.to_string()) && said.contains("TLS"),
        "{said}"
    );
    serving.await.unwrap();
}
