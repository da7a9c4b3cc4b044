//! Rotates the hub's CA under agents that are connected, away, too old or locked out. The agents' own code
//! stores their identities in Secrets. A small HTTP server replaces their API servers.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};

use axum::Router;
use axum::extract::State;
use axum::http::{Method, StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use krypton_agent::credentials::identity::{Enrolled, Identity, Membership};
use krypton_agent::credentials::renewal::run_renewal;
use krypton_agent::credentials::store::{Store, new_key};
use krypton_crds::edge_cluster::{EdgeCluster, EdgeClusterSpec, EdgeClusterStatus, TenantCounts};
use krypton_hub::ca::{self, SecretData, stage};
use krypton_hub::edgecluster;
use krypton_proto::Bytes;
use krypton_proto::v1::TrustedRoots;
use krypton_runtime::newest::NewestSeen as _;
use krypton_types::ca_rotation::{
    self, BlockReason, BlockingMember, RotationPhase, RotationRequest, RotationStep,
};
use krypton_types::root_digest::RootDigest;
use kube::Client;
use parking_lot::Mutex;

use super::*;

const ROTATED: &str = "rotated while this agent was disconnected";

/// The home cluster with the CA's Secret and the EdgeClusters, which survive the hub.
struct HomeCluster {
    hub: TestHub,
    port: Option<HubListener>,
    address: SocketAddr,
    secret: SecretData,
    members: BTreeMap<String, EdgeClusterStatus>,
    agent_secrets: AgentSecrets,
    request: RotationRequest,
}

impl HomeCluster {
    async fn start(count: usize) -> Self {
        let secret = ca::generate_data(TRUST_DOMAIN, clock::wall()).unwrap();
        let hub = hub_with(&secret, &names(count));
        let port = hub.listen(None).await;
        Self {
            hub,
            address: port.address,
            port: Some(port),
            secret,
            members: names(count)
                .into_iter()
                .map(|name| (name, EdgeClusterStatus::default()))
                .collect(),
            agent_secrets: AgentSecrets::start().await,
            request: RotationRequest::default(),
        }
    }

    /// Starts another process of the hub with the state of the home cluster.
    async fn restart(&mut self) {
        self.edge_clusters();
        if let Some(port) = self.port.take() {
            port.close().await;
        }
        let names: Vec<String> = self.members.keys().cloned().collect();
        self.hub = hub_with(&self.secret, &names);
        self.port = Some(self.hub.listen(Some(self.address)).await);
    }

    /// Returns the EdgeClusters as the fleet writes them.
    fn edge_clusters(&mut self) -> Vec<EdgeCluster> {
        let hub = &self.hub;
        let objects = self.members.iter_mut().map(|(name, status)| {
            if let Some(observation) = hub.members.observation(name) {
                let (counts, now) = (TenantCounts::default(), clock::wall());
                *status = edgecluster::status::status(
                    name,
                    Some(status),
                    &observation,
                    counts,
                    None,
                    1,
                    now,
                );
            }
            let mut object = EdgeCluster::new(name, EdgeClusterSpec::default());
            object.metadata.uid = Some(uid(name));
            object.status = Some(status.clone());
            object
        });
        objects.collect()
    }

    fn roots(&self) -> Vec<RootDigest> {
        RootDigest::from_ders(&self.hub.authority.get().roots())
    }

    /// Runs one step of the leader's rotation.
    fn reconcile(&mut self) -> RotationStep {
        let members = self.edge_clusters();
        let current = stage(&self.secret).unwrap();
        let step = ca_rotation::next(current, &self.request, &members, true, clock::wall());
        self.secret = match &step {
            RotationStep::Rest | RotationStep::Wait(_) => return step,
            RotationStep::Announce => ca::announce(&self.secret, clock::wall()).unwrap(),
            RotationStep::Switch(_) => ca::switch(&self.secret).unwrap(),
            RotationStep::Finish(_) => ca::finish(&self.secret).unwrap(),
        };
        self.request.requested = false;
        let authority = Authority::from_data(&self.secret, clock::wall()).unwrap();
        assert!(self.hub.authority.replace(authority));
        step
    }

    /// Runs a step whenever a report arrives, until `condition` accepts one.
    async fn reconcile_until(&mut self, condition: impl Fn(&RotationStep) -> bool) -> RotationStep {
        let members = Arc::clone(&self.hub.members);
        let mut last = RotationStep::Rest;
        let reconciling = async {
            loop {
                last = self.reconcile();
                if condition(&last) {
                    return;
                }
                members.changed.notified().await;
            }
        };
        let result = tokio::time::timeout(TIMEOUT, reconciling).await;
        assert!(result.is_ok(), "the last step was {last:?}");
        last
    }

    async fn wait_until_awaited(&mut self, expected: &[(&str, BlockReason)]) {
        let is_expected = |awaited: &[BlockingMember]| {
            let awaited = awaited
                .iter()
                .map(|member| (member.name.as_str(), member.reason));
            awaited.eq(expected.iter().copied())
        };
        self.reconcile_until(
            |step| matches!(step, RotationStep::Wait(awaited) if is_expected(awaited)),
        )
        .await;
    }

    fn request_rotation(&mut self) {
        self.request.requested = true;
        assert_eq!(self.reconcile(), RotationStep::Announce);
    }

    /// Returns the members that the switch locks out.
    async fn reconcile_until_switch(&mut self) -> Vec<String> {
        let is_switch = |step: &RotationStep| matches!(step, RotationStep::Switch(_));
        locked_out(self.reconcile_until(is_switch).await)
    }

    /// Returns the members that the end locks out.
    async fn reconcile_until_finish(&mut self) -> Vec<String> {
        let is_finish = |step: &RotationStep| matches!(step, RotationStep::Finish(_));
        locked_out(self.reconcile_until(is_finish).await)
    }

    /// Locks out a member like an administrator.
    fn lock_out(&mut self, name: &str, phase: RotationPhase) {
        let names = [name.to_owned()].into();
        let root = stage(&self.secret).unwrap().root.to_string();
        let lock_out = &mut self.request.lock_out;
        lock_out.root = root;
        match phase {
            RotationPhase::Switched => lock_out.switched = names,
            RotationPhase::Steady | RotationPhase::Announced => lock_out.announced = names,
        }
    }

    /// Starts agents that receive their desired state.
    async fn agents(&self, count: usize) -> Vec<RotatingAgent> {
        let mut agents = Vec::new();
        for name in names(count) {
            agents.push(self.agent(&name).await);
        }
        for rotating in &mut agents {
            rotating.agent.wait_for_chart("1.0.0").await;
        }
        agents
    }

    /// Starts an enrolled agent together with the task that manages its identity.
    async fn agent(&self, name: &str) -> RotatingAgent {
        let store = self.agent_secrets.store(name);
        let stored = store.load().await.unwrap();
        let identity = match stored.identity.enrolled {
            Some(_) => stored.identity.clone(),
            None => self.enroll(name),
        };
        let stored = store.replace(stored, identity).await.unwrap();
        let enrolled = stored.identity.enrolled.clone().unwrap();
        let config = enrolled.client_config(&stored.identity.key).unwrap();
        let dialer = Arc::new(Dialer::new(vec![self.address.to_string()], config));
        dialer.root_updates().publish_stored(&enrolled.roots);
        let agent = Agent::start(Arc::clone(&dialer), "a", name);
        let disconnects = Arc::new(AtomicUsize::new(0));
        let (counter, mut link) = (Arc::clone(&disconnects), agent.link.clone());
        tokio::spawn(async move {
            let mut is_up = false;
            while link.changed().await.is_ok() {
                let was_up = std::mem::replace(&mut is_up, link.get_and_update().is_up());
                counter.fetch_add(usize::from(was_up && !is_up), Ordering::Relaxed);
            }
        });
        let renewing = tokio::spawn(run_renewal(
            store.clone(),
            stored,
            dialer,
            agent.link.clone(),
            watch::Sender::new(enrolled.not_after),
            agent.stop.clone(),
        ));
        RotatingAgent {
            agent,
            store,
            disconnects,
            renewing,
        }
    }

    fn enroll(&self, name: &str) -> Identity {
        let key = new_key().unwrap();
        let request = rcgen::CertificateParams::default();
        let request = request.serialize_request(&**key).unwrap();
        let authority = self.hub.authority.get();
        let certificates = authority
            .sign_agent(request.der(), name, &uid(name), clock::wall(), DAY)
            .unwrap();
        let membership = Membership {
            cluster: name.to_owned(),
            addresses: vec![self.address.to_string()],
            token_name: String::new(),
        };
        let enrolled = Enrolled::check(&key, membership, certificates, authority.roots());
        Identity {
            enrolled: Some(enrolled.unwrap()),
            key,
        }
    }
}

fn locked_out(step: RotationStep) -> Vec<String> {
    let (RotationStep::Switch(members) | RotationStep::Finish(members)) = step else {
        panic!("{step:?} locks out nobody")
    };
    members.into_iter().map(|member| member.name).collect()
}

fn hub_with(secret: &SecretData, names: &[String]) -> TestHub {
    TestHub::with_authority(Authority::from_data(secret, clock::wall()).unwrap())
        .with_members(names)
}

/// An agent with a session and its identity store.
struct RotatingAgent {
    agent: Agent,
    store: Store,
    /// Number of disconnects after the first session.
    disconnects: Arc<AtomicUsize>,
    renewing: JoinHandle<()>,
}

impl RotatingAgent {
    async fn stored(&self) -> Enrolled {
        let stored = self.store.read().await.unwrap().unwrap();
        stored.identity.enrolled.unwrap()
    }

    /// Waits until the stored identity trusts exactly these roots.
    async fn wait_for_roots(&self, roots: &[RootDigest]) {
        let waiting = async {
            // Each attempt is a request, so the loopback limits the rate.
            while RootDigest::from_ders(&self.stored().await.roots) != roots {
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(TIMEOUT, waiting).await.unwrap();
    }

    /// Asserts that the signing root of this authority has issued the certificate.
    async fn check_issuer(&self, authority: &Authority) {
        let certificate = self.stored().await.certificates.remove(0);
        let issuer = authority.issuer_of(&certificate);
        assert_eq!(issuer, authority.signing_root());
    }

    async fn stop(self) {
        self.agent.stop().await;
        self.renewing.await.unwrap();
    }
}

/// The Secrets of all edge clusters by path, each with its version.
#[derive(Clone, Default)]
struct AgentSecrets {
    secrets: Arc<Mutex<BTreeMap<String, (u64, serde_json::Value)>>>,
    url: String,
}

impl AgentSecrets {
    async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let agent_secrets = Self {
            url: format!("http://{}", listener.local_addr().unwrap()),
            ..Self::default()
        };
        let router = Router::new()
            .fallback(Self::handle)
            .with_state(agent_secrets.clone());
        tokio::spawn(axum::serve(listener, router).into_future());
        agent_secrets
    }

    fn store(&self, name: &str) -> Store {
        let config = kube::Config::new(self.url.parse().unwrap());
        Store::new(Client::try_from(config).unwrap(), name.to_owned())
    }

    async fn handle(
        State(agent_secrets): State<Self>,
        method: Method,
        uri: Uri,
        body: axum::body::Bytes,
    ) -> Response {
        let error_response = |code: u16| {
            let status = serde_json::json!({
                "kind": "Status", "apiVersion": "v1", "status": "Failure", "message": "no",
                "reason": if code == 404 { "NotFound" } else { "Conflict" }, "code": code,
            });
            let code = StatusCode::from_u16(code).unwrap();
            (code, status.to_string()).into_response()
        };
        let namespace = uri.path().split('/').nth(4).unwrap().to_owned();
        let mut secrets = agent_secrets.secrets.lock();
        let stored = secrets.get(&namespace).cloned();
        if method == Method::GET {
            return match stored {
                Some((_, secret)) => secret.to_string().into_response(),
                None => error_response(404),
            };
        }
        let mut secret: serde_json::Value = serde_json::from_slice(&body).unwrap();
        let version = stored.map_or(0, |(version, _)| version);
        let based_on = &secret["metadata"]["resourceVersion"];
        if based_on.as_str().unwrap_or("0") != version.to_string() {
            return error_response(409);
        }
        secret["metadata"]["resourceVersion"] = (version + 1).to_string().into();
        secrets.insert(namespace, (version + 1, secret.clone()));
        secret.to_string().into_response()
    }
}

#[tokio::test]
async fn rotation_drops_no_stream_and_rejects_old_root() {
    let mut home = HomeCluster::start(20).await;
    let previous = home.hub.authority.get();
    let mut agents = home.agents(20).await;
    home.request_rotation();
    assert!(home.reconcile_until_switch().await.is_empty());
    let both = home.roots();
    for rotating in &agents {
        assert_eq!(RootDigest::from_ders(&rotating.stored().await.roots), both);
    }
    assert!(home.reconcile_until_finish().await.is_empty());
    let current = home.hub.authority.get();
    for rotating in &agents {
        rotating.wait_for_roots(&home.roots()).await;
        rotating.check_issuer(&current).await;
        assert_ne!(current.signing_root(), previous.signing_root());
    }

    // The existing streams keep working and have never dropped.
    home.hub.publish(&names(20), "1.0.1");
    for rotating in &mut agents {
        rotating.agent.wait_for_chart("1.0.1").await;
        assert_eq!(rotating.disconnects.load(Ordering::Relaxed), 0);
    }
    assert_eq!(home.hub.metrics.sessions.get(), 20);

    // Certificates of the old root are rejected. An agent that trusts only that root rejects the hub.
    let uid = uid("edge-0");
    let old_credential = credential_from(&previous, ("edge-0", &uid), clock::wall(), DAY);
    let mut late = Agent::start(
        home.hub
            .dialer_with(home.address, Some(old_credential.clone())),
        "b",
        "edge-0",
    );
    check_link_error(&mut late, ROTATED).await;
    late.stop().await;
    let tls = tls::client_config(&previous.roots(), Some(old_credential)).unwrap();
    let dialer = Dialer::new(vec![home.address.to_string()], tls);
    let message = dial_error(&dialer).await;
    assert!(
        message.contains("rotated") && message.contains("kubectl krypton join"),
        "{message}"
    );
    for rotating in agents {
        rotating.stop().await;
    }
}

/// Starts a rotation while edge-0 is connected and edge-1 is away.
async fn start_with_absent_agent() -> (HomeCluster, RotatingAgent) {
    let mut home = HomeCluster::start(2).await;
    let mut agents = home.agents(2).await;
    agents.remove(1).stop().await;
    let present = agents.remove(0);
    home.request_rotation();
    home.wait_until_awaited(&[("edge-1", BlockReason::NotTrusted)])
        .await;
    (home, present)
}

#[tokio::test]
async fn rotation_waits_for_absent_agent_in_each_phase() {
    let (mut home, present) = start_with_absent_agent().await;
    let mut absent = home.agent("edge-1").await;
    absent.agent.wait_for_chart("1.0.0").await;
    assert!(home.reconcile_until_switch().await.is_empty());
    // The agent disconnects before it renews. Both roots are trusted, so it can reconnect.
    absent.stop().await;
    home.wait_until_awaited(&[("edge-1", BlockReason::NotRenewed)])
        .await;
    let mut absent = home.agent("edge-1").await;
    absent.agent.wait_for_chart("1.0.0").await;
    assert!(home.reconcile_until_finish().await.is_empty());
    let roots = home.roots();
    for rotating in [&present, &absent] {
        rotating.wait_for_roots(&roots).await;
        assert_eq!(rotating.disconnects.load(Ordering::Relaxed), 0);
    }
    present.stop().await;
    absent.stop().await;
}

#[tokio::test]
async fn restarted_hub_resumes_rotation_in_any_phase() {
    let mut home = HomeCluster::start(3).await;
    let mut agents = home.agents(3).await;
    home.request_rotation();
    home.restart().await;
    home.reconcile_until_switch().await;
    // The hub restarts before any agent has renewed. The agents renew after they reconnect.
    home.restart().await;
    home.reconcile_until_finish().await;
    home.restart().await;
    let current = home.hub.authority.get();
    for rotating in &mut agents {
        rotating.wait_for_roots(&home.roots()).await;
        rotating.agent.wait_for_link(true).await;
        rotating.check_issuer(&current).await;
    }
    // A second rotation follows.
    home.request_rotation();
    home.reconcile_until_switch().await;
    home.reconcile_until_finish().await;
    for rotating in agents {
        rotating.stop().await;
    }
}

#[tokio::test]
async fn locked_out_agent_is_refused_and_can_rejoin() {
    let (mut home, present) = start_with_absent_agent().await;
    home.lock_out("edge-1", RotationPhase::Announced);
    assert_eq!(home.reconcile_until_switch().await, ["edge-1"]);
    let mut late = home.agent("edge-1").await;
    let reason = check_link_error(&mut late.agent, ROTATED).await;
    assert!(reason.contains("kubectl krypton join"), "{reason}");
    assert_eq!(home.reconcile_until_finish().await, ["edge-1"]);
    assert_eq!(present.disconnects.load(Ordering::Relaxed), 0);
    late.stop().await;

    // It joins again like a new member.
    home.agent_secrets.secrets.lock().remove("edge-1");
    let mut rejoined = home.agent("edge-1").await;
    rejoined.agent.wait_for_chart("1.0.0").await;
    rejoined.stop().await;
    present.stop().await;
}

#[tokio::test]
async fn rotation_waits_for_lagging_agents_until_locked_out() {
    let mut home = HomeCluster::start(2).await;
    let [old, lazy] = ["edge-0", "edge-1"].map(|name| home.hub.dialer(home.address, name));
    let hello_with_roots = Hello {
        trusted_roots: Some(TrustedRoots::new(&home.roots())),
        ..hello(1, "0.1.0")
    };
    let mut old = RawSession::greet(&old).await.unwrap();
    let mut lazy = RawSession::opened(&lazy, FromAgent::Hello(hello_with_roots)).await;
    // It trusts all roots and has a certificate of the signing one, so the hub sends it no roots.
    assert!(matches!(
        lazy.receive_any().await.unwrap(),
        FromHub::Welcome(_)
    ));
    assert!(matches!(
        lazy.receive_any().await.unwrap(),
        FromHub::Desired(_)
    ));
    home.request_rotation();
    let FromHub::Roots(roots) = lazy.receive_any().await.unwrap() else {
        panic!("the new root is not announced")
    };
    assert_eq!(roots.certificates.len(), 2);
    assert_eq!(roots.renew_within_millis, None);
    home.wait_until_awaited(&[
        ("edge-0", BlockReason::RootsUnreported),
        ("edge-1", BlockReason::NotTrusted),
    ])
    .await;
    let both_roots = TrustedRoots::new(&home.roots());
    lazy.send(FromAgent::TrustedRoots(both_roots)).await;
    home.wait_until_awaited(&[("edge-0", BlockReason::RootsUnreported)])
        .await;
    home.lock_out("edge-0", RotationPhase::Announced);
    home.reconcile_until_switch().await;
    let FromHub::Roots(roots) = lazy.receive_any().await.unwrap() else {
        panic!("it is to renew")
    };
    assert!(roots.renew_within_millis.is_some());
    home.wait_until_awaited(&[("edge-1", BlockReason::NotRenewed)])
        .await;
    home.lock_out("edge-1", RotationPhase::Switched);
    assert_eq!(home.reconcile_until_finish().await, ["edge-0", "edge-1"]);
    // The hub ends streams whose certificate is no longer trusted.
    for stream in [&mut old, &mut lazy] {
        let status = stream.closing_status().await;
        check_status(&status, Code::Unauthenticated, "kubectl krypton join edge-");
        // The connection still exists, but its certificate gives it no access.
        let renewal = stream.connection.fleet().renew(renew_request()).await;
        let status = renewal.unwrap_err();
        assert_eq!(status.code(), Code::Unauthenticated, "{status:?}");
    }
}

#[tokio::test]
async fn stale_announcement_is_corrected_before_agent_answers() {
    let mut home = HomeCluster::start(1).await;
    let former = Authority::from_data(&home.secret, clock::wall()).unwrap();
    home.request_rotation();
    let both_roots = TrustedRoots::new(&home.roots());
    // This hub does not know of the new root yet, unlike the agent.
    let latest = Authority::from_data(&home.secret, clock::wall()).unwrap();
    assert!(home.hub.authority.replace(former));
    let hello_with_roots = Hello {
        trusted_roots: Some(both_roots),
        ..hello(1, "0.1.0")
    };
    let dialer = home.hub.dialer(home.address, "edge-0");
    let mut agent = RawSession::opened(&dialer, FromAgent::Hello(hello_with_roots)).await;
    let mut announced = Vec::new();
    let mut latest = Some(latest);
    while announced.len() < 2 {
        if let FromHub::Roots(roots) = agent.receive_any().await.unwrap() {
            announced.push(roots.certificates.len());
            latest
                .take()
                .map(|latest| home.hub.authority.replace(latest));
        }
    }
    assert_eq!(announced, [1, 2]);
}

#[tokio::test]
async fn malformed_root_digests_end_session() {
    let home = HomeCluster::start(1).await;
    let dialer = home.hub.dialer(home.address, "edge-0");
    for sha256 in [
        vec![Bytes::from_static(b"x")],
        vec![Bytes::from_static(&[0; 32]); 9],
    ] {
        let malformed = Hello {
            trusted_roots: Some(TrustedRoots { sha256 }),
            ..hello(1, "0.1.0")
        };
        let mut stream = RawSession::opened(&dialer, FromAgent::Hello(malformed)).await;
        assert_eq!(stream.closing_status().await.code(), Code::InvalidArgument);
    }
}
