//! Rotates the hub's CA under agents that are connected, away, too old or locked out. The agents' own code
//! stores their identities in Secrets. A small HTTP server replaces their API servers.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use axum::Router;
use axum::extract::State;
use axum::http::{Method, StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use krypton_agent::credentials::renewal::keep_renewed;
use krypton_agent::credentials::store::{Enrolled, Identity, Membership, Store, new_key};
use krypton_crds::edge_cluster::{EdgeCluster, EdgeClusterSpec, EdgeClusterStatus};
use krypton_hub::ca::{self, Data, stage};
use krypton_hub::edgecluster;
use krypton_hub::tenants::Counts;
use krypton_proto::Bytes;
use krypton_proto::v1::TrustedRoots;
use krypton_runtime::newest::NewestSeen as _;
use krypton_types::ca_rotation::{self, Awaited, Phase, Step, Why, Wishes};
use krypton_types::root_digest::RootDigest;
use kube::Client;

use super::*;

/// The home cluster with the CA's Secret and the EdgeClusters, which survive the hub.
struct Rig {
    home: Home,
    port: Option<Port>,
    address: SocketAddr,
    secret: Data,
    members: BTreeMap<String, EdgeClusterStatus>,
    edges: Edges,
    wishes: Wishes,
}

impl Rig {
    async fn start(count: usize) -> Self {
        let secret = ca::made(TRUST_DOMAIN, clock::wall()).unwrap();
        let home = home_of(&secret, &names(count));
        let port = home.listen(None).await;
        Self {
            home,
            address: port.address,
            port: Some(port),
            secret,
            members: names(count)
                .into_iter()
                .map(|name| (name, EdgeClusterStatus::default()))
                .collect(),
            edges: Edges::start().await,
            wishes: Wishes::default(),
        }
    }

    /// Starts another process of the hub with the state of the home cluster.
    async fn restart(&mut self) {
        self.edge_clusters();
        if let Some(port) = self.port.take() {
            port.close().await;
        }
        let names: Vec<String> = self.members.keys().cloned().collect();
        self.home = home_of(&self.secret, &names);
        self.port = Some(self.home.listen(Some(self.address)).await);
    }

    /// Returns the EdgeClusters as the fleet writes them.
    fn edge_clusters(&mut self) -> Vec<EdgeCluster> {
        let home = &self.home;
        let objects = self.members.iter_mut().map(|(name, status)| {
            if let Some(found) = home.members.observation(name) {
                let (counts, now) = (Counts::default(), clock::wall());
                *status =
                    edgecluster::status::status(name, Some(status), &found, counts, None, 1, now);
            }
            let mut object = EdgeCluster::new(name, EdgeClusterSpec::default());
            object.metadata.uid = Some(uid(name));
            object.status = Some(status.clone());
            object
        });
        objects.collect()
    }

    /// Runs one step of the leader's rotation.
    fn look(&mut self) -> Step {
        let members = self.edge_clusters();
        let stands = stage(&self.secret).unwrap();
        let step = ca_rotation::next(stands, &self.wishes, &members, true, clock::wall());
        self.secret = match &step {
            Step::Rest | Step::Wait(_) => return step,
            Step::Announce => ca::announced(&self.secret, clock::wall()).unwrap(),
            Step::Switch(_) => ca::switched(&self.secret).unwrap(),
            Step::Finish(_) => ca::finished(&self.secret).unwrap(),
        };
        self.wishes.requested = false;
        let read = Authority::from_data(&self.secret, clock::wall()).unwrap();
        assert!(self.home.authority.replace(read));
        step
    }

    /// Runs a step whenever a report arrives, until `wanted` accepts one.
    async fn until(&mut self, wanted: impl Fn(&Step) -> bool) -> Step {
        let report_store = Arc::clone(&self.home.members);
        let mut last = Step::Rest;
        let looking = async {
            loop {
                last = self.look();
                if wanted(&last) {
                    return;
                }
                report_store.changed.notified().await;
            }
        };
        let waited = tokio::time::timeout(PATIENCE, looking).await;
        assert!(waited.is_ok(), "the last step was {last:?}");
        last
    }

    async fn waits_for(&mut self, expected: &[(&str, Why)]) {
        let are = |waiting: &[Awaited]| {
            let waiting = waiting
                .iter()
                .map(|member| (member.name.as_str(), member.why));
            waiting.eq(expected.iter().copied())
        };
        self.until(|step| matches!(step, Step::Wait(waiting) if are(waiting)))
            .await;
    }

    fn request(&mut self) {
        self.wishes.requested = true;
        assert_eq!(self.look(), Step::Announce);
    }

    async fn switches(&mut self) -> Vec<String> {
        match self.until(|step| matches!(step, Step::Switch(_))).await {
            Step::Switch(out) => out.into_iter().map(|member| member.name).collect(),
            _ => unreachable!("it was waited for"),
        }
    }

    async fn finishes(&mut self) -> Vec<String> {
        match self.until(|step| matches!(step, Step::Finish(_))).await {
            Step::Finish(out) => out.into_iter().map(|member| member.name).collect(),
            _ => unreachable!("it was waited for"),
        }
    }

    /// Locks out a member like an administrator.
    fn lock_out(&mut self, name: &str, phase: Phase) {
        let names = [name.to_owned()].into();
        let root = stage(&self.secret).unwrap().root.to_string();
        let lock_out = &mut self.wishes.lock_out;
        lock_out.root = root;
        match phase {
            Phase::Switched => lock_out.switched = names,
            Phase::Steady | Phase::Announced => lock_out.announced = names,
        }
    }

    /// Starts an enrolled agent together with the task that manages its identity.
    async fn agent(&self, name: &str) -> Rotating {
        let store = self.edges.store(name);
        let kept = store.load().await.unwrap();
        let identity = match kept.identity.enrolled {
            Some(_) => kept.identity.clone(),
            None => self.enroll(name),
        };
        let kept = store.keep(kept, identity).await.unwrap();
        let enrolled = kept.identity.enrolled.clone().unwrap();
        let config = enrolled.client_config(&kept.identity.key).unwrap();
        let tls = Arc::new(ArcSwap::from_pointee(config));
        let dialer = Arc::new(Dialer::new(vec![self.address.to_string()], tls));
        dialer.trust().keep(&enrolled.roots);
        let agent = Agent::start(Arc::clone(&dialer), "a", name);
        let drops = Arc::new(AtomicUsize::new(0));
        let (counted, mut link) = (Arc::clone(&drops), agent.link.clone());
        tokio::spawn(async move {
            let mut up = false;
            while link.changed().await.is_ok() {
                let before = std::mem::replace(&mut up, link.see().is_up());
                counted.fetch_add(usize::from(before && !up), Ordering::Relaxed);
            }
        });
        let keeping = tokio::spawn(keep_renewed(
            store.clone(),
            kept,
            dialer,
            agent.link.clone(),
            watch::Sender::new(enrolled.not_after),
            agent.stop.clone(),
        ));
        Rotating {
            agent,
            store,
            drops,
            keeping,
        }
    }

    fn enroll(&self, name: &str) -> Identity {
        let key = new_key().unwrap();
        let request = rcgen::CertificateParams::default();
        let request = request.serialize_request(&**key).unwrap();
        let authority = self.home.authority.now();
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

fn home_of(secret: &Data, names: &[String]) -> Home {
    Home::of(Authority::from_data(secret, clock::wall()).unwrap()).with_members(names)
}

/// An agent with a session and its identity store.
struct Rotating {
    agent: Agent,
    store: Store,
    /// Number of disconnects after the first session.
    drops: Arc<AtomicUsize>,
    keeping: JoinHandle<()>,
}

impl Rotating {
    async fn kept(&self) -> Enrolled {
        let kept = self.store.read().await.unwrap().unwrap();
        kept.identity.enrolled.unwrap()
    }

    /// Waits until the stored identity trusts exactly these roots.
    async fn trusts(&self, roots: &[RootDigest]) {
        let all = async {
            // Each attempt is a request, so the loopback limits the rate.
            while RootDigest::of_all(&self.kept().await.roots) != roots {
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(PATIENCE, all).await.unwrap();
    }

    async fn stop(self) {
        self.agent.stop().await;
        self.keeping.await.unwrap();
    }
}

/// The Secrets of all edge clusters by path, each with its version.
#[derive(Clone, Default)]
struct Edges {
    secrets: Arc<Mutex<BTreeMap<String, (u64, serde_json::Value)>>>,
    url: String,
}

impl Edges {
    async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let edges = Self {
            url: format!("http://{}", listener.local_addr().unwrap()),
            ..Self::default()
        };
        let router = Router::new()
            .fallback(Self::answer)
            .with_state(edges.clone());
        tokio::spawn(axum::serve(listener, router).into_future());
        edges
    }

    fn store(&self, name: &str) -> Store {
        let config = kube::Config::new(self.url.parse().unwrap());
        Store::new(Client::try_from(config).unwrap(), name.to_owned())
    }

    async fn answer(
        State(edges): State<Self>,
        method: Method,
        uri: Uri,
        body: axum::body::Bytes,
    ) -> Response {
        let refused = |code: u16| {
            let status = serde_json::json!({
                "kind": "Status", "apiVersion": "v1", "status": "Failure", "message": "no",
                "reason": if code == 404 { "NotFound" } else { "Conflict" }, "code": code,
            });
            let code = StatusCode::from_u16(code).unwrap();
            (code, status.to_string()).into_response()
        };
        let namespace = uri.path().split('/').nth(4).unwrap().to_owned();
        let mut secrets = edges.secrets.lock().unwrap();
        let found = secrets.get(&namespace).cloned();
        if method == Method::GET {
            return match found {
                Some((_, secret)) => secret.to_string().into_response(),
                None => refused(404),
            };
        }
        let mut secret: serde_json::Value = serde_json::from_slice(&body).unwrap();
        let version = found.map_or(0, |(version, _)| version);
        let based_on = &secret["metadata"]["resourceVersion"];
        if based_on.as_str().unwrap_or("0") != version.to_string() {
            return refused(409);
        }
        secret["metadata"]["resourceVersion"] = (version + 1).to_string().into();
        secrets.insert(namespace, (version + 1, secret.clone()));
        secret.to_string().into_response()
    }
}

#[tokio::test]
async fn rotation_drops_no_stream_and_rejects_old_root() {
    let mut rig = Rig::start(20).await;
    let former = rig.home.authority.now();
    let mut agents = Vec::new();
    for name in names(20) {
        agents.push(rig.agent(&name).await);
    }
    for rotating in &mut agents {
        rotating.agent.has("1.0.0").await;
    }
    rig.request();
    assert!(rig.switches().await.is_empty());
    let both = RootDigest::of_all(&rig.home.authority.now().roots());
    for rotating in &agents {
        assert_eq!(RootDigest::of_all(&rotating.kept().await.roots), both);
    }
    assert!(rig.finishes().await.is_empty());
    let now = rig.home.authority.now();
    for rotating in &agents {
        rotating.trusts(&RootDigest::of_all(&now.roots())).await;
        let own = rotating.kept().await.certificates.remove(0);
        assert_eq!(now.issuer_of(&own), now.signing());
        assert_ne!(now.signing(), former.signing());
    }

    // The existing streams keep working and have never dropped.
    rig.home.give(&names(20), "1.0.1");
    for rotating in &mut agents {
        rotating.agent.has("1.0.1").await;
        assert_eq!(rotating.drops.load(Ordering::Relaxed), 0);
    }
    assert_eq!(rig.home.metrics.sessions.get(), 20);

    // Certificates of the old root are rejected. An agent that trusts only that root rejects the hub.
    let key = KeyPair::generate().unwrap();
    let request = rcgen::CertificateParams::default();
    let request = request.serialize_request(&key).unwrap();
    let certificates =
        former.sign_agent(request.der(), "edge-0", &uid("edge-0"), clock::wall(), DAY);
    let own = Credential {
        certificates: certificates.unwrap(),
        key: PrivateKeyDer::try_from(key.serialize_der()).unwrap(),
    };
    let mut late = Agent::start(
        rig.home.dialer_with(rig.address, Some(own.clone())),
        "b",
        "edge-0",
    );
    let why = refusal(&mut late).await;
    assert!(
        why.contains("rotated while this agent was disconnected"),
        "{why}"
    );
    late.stop().await;
    let tls = tls::client_config(&former.roots(), Some(own)).unwrap();
    let dialer = Dialer::new(
        vec![rig.address.to_string()],
        Arc::new(ArcSwap::from_pointee(tls)),
    );
    let said = chain(&dialer.connect().await.unwrap_err());
    assert!(
        said.contains("rotated") && said.contains("kubectl krypton join"),
        "{said}"
    );
    for rotating in agents {
        rotating.stop().await;
    }
}

/// Starts a rotation while edge-0 is connected and edge-1 is away.
async fn begun_with_one_away() -> (Rig, Rotating) {
    let mut rig = Rig::start(2).await;
    let mut stays = rig.agent("edge-0").await;
    let mut leaves = rig.agent("edge-1").await;
    for rotating in [&mut stays, &mut leaves] {
        rotating.agent.has("1.0.0").await;
    }
    leaves.stop().await;
    rig.request();
    rig.waits_for(&[("edge-1", Why::NotTrusted)]).await;
    (rig, stays)
}

#[tokio::test]
async fn rotation_waits_for_absent_agent_in_each_phase() {
    let (mut rig, stays) = begun_with_one_away().await;
    let mut leaves = rig.agent("edge-1").await;
    leaves.agent.has("1.0.0").await;
    assert!(rig.switches().await.is_empty());
    // The agent disconnects before it renews. Both roots are trusted, so it can reconnect.
    leaves.stop().await;
    rig.waits_for(&[("edge-1", Why::NotRenewed)]).await;
    let mut leaves = rig.agent("edge-1").await;
    leaves.agent.has("1.0.0").await;
    assert!(rig.finishes().await.is_empty());
    let roots = RootDigest::of_all(&rig.home.authority.now().roots());
    for rotating in [&stays, &leaves] {
        rotating.trusts(&roots).await;
        assert_eq!(rotating.drops.load(Ordering::Relaxed), 0);
    }
    stays.stop().await;
    leaves.stop().await;
}

#[tokio::test]
async fn restarted_hub_resumes_rotation_in_any_phase() {
    let mut rig = Rig::start(3).await;
    let mut agents = Vec::new();
    for name in names(3) {
        agents.push(rig.agent(&name).await);
    }
    for rotating in &mut agents {
        rotating.agent.has("1.0.0").await;
    }
    rig.request();
    rig.restart().await;
    rig.switches().await;
    // The hub restarts before any agent has renewed. The agents renew after they reconnect.
    rig.restart().await;
    rig.finishes().await;
    rig.restart().await;
    let now = rig.home.authority.now();
    for rotating in &mut agents {
        rotating.trusts(&RootDigest::of_all(&now.roots())).await;
        rotating.agent.is_up(true).await;
        let own = rotating.kept().await.certificates.remove(0);
        assert_eq!(now.issuer_of(&own), now.signing());
    }
    // A second rotation follows.
    rig.request();
    rig.switches().await;
    rig.finishes().await;
    for rotating in agents {
        rotating.stop().await;
    }
}

#[tokio::test]
async fn locked_out_agent_is_refused_and_can_rejoin() {
    let (mut rig, stays) = begun_with_one_away().await;
    rig.lock_out("edge-1", Phase::Announced);
    assert_eq!(rig.switches().await, ["edge-1"]);
    let mut late = rig.agent("edge-1").await;
    let why = refusal(&mut late.agent).await;
    assert!(
        why.contains("rotated while this agent was disconnected")
            && why.contains("kubectl krypton join"),
        "{why}"
    );
    assert_eq!(rig.finishes().await, ["edge-1"]);
    assert_eq!(stays.drops.load(Ordering::Relaxed), 0);
    late.stop().await;

    // It joins again like a new member.
    rig.edges.secrets.lock().unwrap().remove("edge-1");
    let mut back = rig.agent("edge-1").await;
    back.agent.has("1.0.0").await;
    back.stop().await;
    stays.stop().await;
}

#[tokio::test]
async fn rotation_waits_for_lagging_agents_until_locked_out() {
    let mut rig = Rig::start(2).await;
    let [old, lazy] = ["edge-0", "edge-1"].map(|name| rig.home.dialer(rig.address, name));
    let trusts = || {
        Some(TrustedRoots::new(&RootDigest::of_all(
            &rig.home.authority.now().roots(),
        )))
    };
    let hears = Hello {
        trusted_roots: trusts(),
        ..hello(1, "0.1.0")
    };
    let mut old = Stream::open(&old, Said::Hello(hello(1, "0.1.0")))
        .await
        .unwrap();
    let mut lazy = Stream::open(&lazy, Said::Hello(hears)).await.unwrap();
    // It trusts all roots and has a certificate of the signing one, so the hub sends it no roots.
    assert!(matches!(lazy.hear_any().await.unwrap(), Say::Welcome(_)));
    assert!(matches!(lazy.hear_any().await.unwrap(), Say::Desired(_)));
    rig.request();
    let Say::Roots(told) = lazy.hear_any().await.unwrap() else {
        panic!("the new root is told")
    };
    assert_eq!(
        (told.certificates.len(), told.renew_within_millis),
        (2, None)
    );
    rig.waits_for(&[("edge-0", Why::SaysNothing), ("edge-1", Why::NotTrusted)])
        .await;
    let both = TrustedRoots::new(&RootDigest::of_all(&rig.home.authority.now().roots()));
    lazy.say(Said::TrustedRoots(both)).await;
    rig.waits_for(&[("edge-0", Why::SaysNothing)]).await;
    rig.lock_out("edge-0", Phase::Announced);
    rig.switches().await;
    let Say::Roots(told) = lazy.hear_any().await.unwrap() else {
        panic!("it is to renew")
    };
    assert!(told.renew_within_millis.is_some());
    rig.waits_for(&[("edge-1", Why::NotRenewed)]).await;
    rig.lock_out("edge-1", Phase::Switched);
    assert_eq!(rig.finishes().await, ["edge-0", "edge-1"]);
    // The hub ends streams whose certificate is no longer trusted.
    for stream in [&mut old, &mut lazy] {
        let status = stream.end().await;
        assert_eq!(status.code(), Code::Unauthenticated);
        assert!(
            status.message().contains("kubectl krypton join edge-"),
            "{status:?}"
        );
        // The connection still exists, but its certificate gives it no access.
        let key = rcgen::KeyPair::generate().unwrap();
        let request = rcgen::CertificateParams::default();
        let request = request.serialize_request(&key).unwrap();
        let request = RenewRequest {
            certificate_request: request.der().to_vec().into(),
        };
        let status = stream.connection.fleet().renew(request).await.unwrap_err();
        assert_eq!(status.code(), Code::Unauthenticated, "{status:?}");
    }
}

#[tokio::test]
async fn malformed_root_digests_end_session() {
    let rig = Rig::start(1).await;
    let dialer = rig.home.dialer(rig.address, "edge-0");
    for sha256 in [
        vec![Bytes::from_static(b"x")],
        vec![Bytes::from_static(&[0; 32]); 9],
    ] {
        let said = Hello {
            trusted_roots: Some(TrustedRoots { sha256 }),
            ..hello(1, "0.1.0")
        };
        let mut stream = Stream::open(&dialer, Said::Hello(said)).await.unwrap();
        assert_eq!(stream.end().await.code(), Code::InvalidArgument);
    }
}
