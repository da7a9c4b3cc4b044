//! Plays the owner of a stolen agent credential, at the agents' port of a real hub.

use krypton_agent::credentials::identity::Enrolled;
use krypton_agent::credentials::store::Store;
use krypton_agent::session::connect::Connection;
use krypton_crds::edge_cluster::EdgeClusterStatus;
use krypton_hub::ca::read_agent_certificate;
use krypton_proto::v1::{
    AgentMessage, Deployment, DeploymentState, Desired, FetchChartRequest, Heartbeat, Hello,
    HubMessage, Placed, PlacedState, RenewRequest, Report, Tenant,
    agent_message::Kind as AgentMessageKind, hub_message::Kind as HubMessageKind,
};
use krypton_runtime::clock::wall as now;
use krypton_tests::fleet::{FleetClient, SYSTEM_NAMESPACE};
use krypton_tests::{
    Cluster, Hub, HubOptions, Membership, Mode, Parts, ServedChart, TestResult, eventually,
    kubectl_krypton,
};
use krypton_types::conditions::{ClusterState, State, Truth};
use krypton_types::desired::DesiredState;
use krypton_types::member::MemberReport;
use krypton_types::spiffe::SpiffeId;
use krypton_types::tenant::{TenantKey, TenantReport};
use serde_json::json;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Status, Streaming};

use super::{ATTEMPT, CONNECTED, assert_refused, dialer, signing_request, wait_for_hub_renewals};

const HERE: &str = "6f1f2f3c-0000-4000-8000-0123456789ab";
const SECRET_VALUE: &str = "only-for-edge-2";

/// The attacker's session.
struct Session {
    sender: mpsc::Sender<AgentMessage>,
    incoming: Streaming<HubMessage>,
    /// The desired states that the hub sent.
    desired: Vec<Desired>,
}

impl Session {
    async fn connect(hub: &Connection, cluster_uid: &str) -> Result<Self, Status> {
        let (sender, messages) = mpsc::channel(4);
        let hello = Hello {
            protocol_min: 1,
            protocol_max: 1,
            agent_version: env!("CARGO_PKG_VERSION").to_owned(),
            replica: "edge-2".to_owned(),
            cluster_uid: cluster_uid.to_owned(),
            kubernetes_version: "v1.36.3".to_owned(),
            applied: None,
            now: now().as_second(),
            trusted_roots: None,
        };
        let kind = Some(AgentMessageKind::Hello(hello));
        sender.send(AgentMessage { kind }).await.unwrap();
        let incoming = hub.fleet().connect(ReceiverStream::new(messages)).await?;
        let mut session = Self {
            sender,
            incoming: incoming.into_inner(),
            desired: Vec::new(),
        };
        session
            .receive(|kind| matches!(kind, HubMessageKind::Welcome(_)))
            .await?;
        Ok(session)
    }

    async fn send(&self, kind: AgentMessageKind) {
        let message = AgentMessage { kind: Some(kind) };
        self.sender.send(message).await.unwrap();
    }

    /// Waits for a matching message.
    async fn receive(&mut self, is_match: impl Fn(&HubMessageKind) -> bool) -> Result<(), Status> {
        loop {
            let incoming = tokio::time::timeout(ATTEMPT, self.incoming.message()).await;
            let message = incoming.expect("the hub sends a message")?;
            let kind = message.and_then(|it| it.kind).expect("a message");
            if is_match(&kind) {
                return Ok(());
            }
            if let HubMessageKind::Desired(desired) = kind {
                self.desired.push(desired);
            }
        }
    }

    /// Reports the objects of edge-2 as its own, and waits until the hub has read the report.
    async fn report_as_other_member(&mut self, deployment_uid: &str) {
        let key = |name: &str| TenantKey::new("default", name);
        let state = ClusterState {
            ready: State::new(Truth::False, "InstallFailed", "stolen"),
            progress: None,
            error: Some(State::new(Truth::True, "InstallFailed", "stolen")),
        };
        let failed = TenantReport {
            applied_chart: "https://charts.example.org/mine:6.6.6".to_owned(),
            ..TenantReport::new(1, state)
        };
        let holder = MemberReport {
            synced: true,
            ready: true,
            writing: true,
            connected: true,
            holder: Some("agent/thief".to_owned()),
            ..MemberReport::default()
        };
        let tenants = ["acme", "edge-2"].map(|name| Tenant::new(&key(name), Some(&failed)));
        let state = tenants[0].state.clone();
        let removed = DeploymentState {
            uid: deployment_uid.to_owned(),
            gone: true,
            state: state.clone(),
            ..DeploymentState::default()
        };
        let lifted = PlacedState {
            uid: deployment_uid.to_owned(),
            observed_generation: 1,
            gone: true,
            placed: state.and_then(|state| state.ready),
        };
        self.send(AgentMessageKind::Report(Report {
            deployments: vec![Deployment {
                namespace: "default".to_owned(),
                name: "paris".to_owned(),
                state: Some(removed),
            }],
            placed: vec![Placed {
                namespace: "default".to_owned(),
                name: "acme".to_owned(),
                state: Some(lifted),
            }],
            tenants: tenants.to_vec(),
            member: Some(holder.into()),
            complete: Some(0),
        }))
        .await;
        // The hub requests a full report when the digest is wrong.
        self.send(AgentMessageKind::Heartbeat(Heartbeat {
            tenants: 1,
            digest_high: 2,
            digest_low: 3,
        }))
        .await;
        self.receive(|kind| matches!(kind, HubMessageKind::Resync(_)))
            .await
            .unwrap();
    }
}

/// Home, edge-1 with the stolen credential, and edge-2.
struct AttackFleet {
    hub: Hub,
    home: Cluster,
    fleet_client: FleetClient,
    edges: [Cluster; 2],
    members: [Membership; 2],
    _chart: ServedChart,
}

impl AttackFleet {
    async fn start() -> TestResult<Self> {
        let (chart, home, one, two) = tokio::try_join!(
            ServedChart::small("replicaCount: 0"),
            Cluster::start("attack-agent-home", Parts::ControlPlane),
            Cluster::start("attack-agent-one", Parts::ControlPlane),
            Cluster::start("attack-agent-two", Parts::WithControllers),
        )?;
        let flags = chart.flags(&["--self-cluster=false", "--ensure-watch-crds"]);
        let options = HubOptions::new(home.kubeconfig()).args(flags);
        let mut hub = Hub::start(&options)?;
        let first = Membership::join(Mode::Agent, &mut hub, &home, &one, "edge-1").await?;
        let second = Membership::join(Mode::Agent, &mut hub, &home, &two, "edge-2");
        let members = [first, second.await?];
        let fleet_client = FleetClient::new(&home);
        for member in ["edge-1", "edge-2"] {
            fleet_client.wait_for_member(member, &[CONNECTED]).await?;
        }
        Ok(Self {
            hub,
            fleet_client,
            home,
            edges: [one, two],
            members,
            _chart: chart,
        })
    }

    async fn status(&self, member: &str) -> EdgeClusterStatus {
        let member = self.fleet_client.members().get(member).await.unwrap();
        member.status.unwrap()
    }

    /// Returns the status of edge-2 on home, without times.
    async fn member_status(&self) -> String {
        let status = self.status("edge-2").await;
        let conditions = status.conditions.iter();
        let conditions: Vec<_> = conditions
            .map(|it| (&it.type_, &it.status, &it.reason))
            .collect();
        let keys = status.agent_keys.as_ref().map(|keys| &keys.current.serial);
        format!(
            "{:?} {:?} {keys:?} {:?} {conditions:?}",
            status.cluster_uid, status.lease_holder, status.tenants
        )
    }

    /// Returns the message of a KryptonDeployment's object, or an empty string if the object is gone.
    async fn deployment(&self, path: &str) -> String {
        let path = format!("-o=jsonpath={{{path}}}");
        let get = ["get", "kryptondeployment", "paris", "--ignore-not-found"];
        let output = self.home.kubectl(get.into_iter().chain([path.as_str()]));
        output.await.unwrap()
    }
}

#[tokio::test]
async fn stolen_agent_credential_reaches_no_other_member() -> TestResult {
    let mut fleet = Box::pin(AttackFleet::start()).await?;
    let fleet_client = fleet.fleet_client.clone();
    let values = json!({"values": {"message": SECRET_VALUE}});
    fleet_client.patch_member("edge-2", values).await?;
    let spec = json!({"clusterRef": {"secretName": "edge-2"}});
    fleet_client.create("acme", spec).await?;
    let at_edge = FleetClient::new(&fleet.edges[1]);
    at_edge.create("acme", json!({})).await?;
    let at_home = fleet_client.wait_ready("acme").await?;
    let chart = at_home.status.unwrap().last_applied_chart;
    let paris = json!({
        "apiVersion": "mesh.openkcm.io/v1alpha1",
        "kind": "KryptonDeployment",
        "metadata": {"name": "paris", "namespace": "default"},
        "spec": {"account": {"name": "acme"}, "region": {"name": "edge-2"}},
    });
    fleet.home.apply(&paris.to_string()).await?;
    eventually("paris to be deployed", async || {
        Ok((fleet.deployment(".status.phase").await == "Ready").then_some(()))
    })
    .await?;
    let uid = fleet.deployment(".metadata.uid").await;

    // The attacker replaces edge-1's agent.
    let agent = fleet.members[0].agent().unwrap();
    agent.stop().await?;
    let stolen = Store::new(fleet.edges[0].client(), SYSTEM_NAMESPACE.to_owned());
    let stolen = stolen.load().await?.identity;
    let enrolled: Enrolled = stolen.enrolled.clone().unwrap();
    let tls = enrolled.client_config(&stolen.key)?;
    let dialer = dialer(&enrolled.membership.addresses, tls);
    let hub = dialer.connect().await?;
    let recorded = async |name: &str| fleet.status(name).await.cluster_uid.unwrap();
    let (first, second) = (recorded("edge-1").await, recorded("edge-2").await);
    let before = fleet.member_status().await;

    for elsewhere in [HERE, &second] {
        let refused = Session::connect(&hub, elsewhere).await.err().unwrap();
        assert_eq!(refused.code(), Code::FailedPrecondition, "{refused:?}");
        assert!(!refused.message().contains(&first), "{refused:?}");
    }
    fleet_client
        .event_message("edge-1", "CredentialUsedTwice")
        .await?;

    // The session receives the state of edge-1, and its reports affect only edge-1.
    let mut session = Session::connect(&hub, &first).await?;
    session.report_as_other_member(&uid).await;
    let desired = session.desired.last().unwrap();
    let state = DesiredState::try_from(desired.clone())?;
    let values = json!(state.chart.values).to_string();
    assert!(!values.contains(SECRET_VALUE), "{values}");
    assert_eq!(state.deployments, []);
    assert_eq!(state.placed, []);
    let digest = fleet.status("edge-2").await.applied.unwrap().digest;
    assert_ne!(digest, desired.digest);
    let chart_of_another = FetchChartRequest {
        digest,
        ..FetchChartRequest::default()
    };
    let fetched = hub.fleet().fetch_chart(chart_of_another).await;
    assert_refused(fetched.map(drop), Code::NotFound, "");
    let id = SpiffeId::from_certificate(&enrolled.certificates[0])?;
    let forged_id = SpiffeId::cluster(&id.trust_domain, "edge-2").to_string();
    let request = RenewRequest {
        certificate_request: signing_request(&[forged_id]).into(),
    };
    let renewed = hub.fleet().renew(request.clone()).await?;
    let renewed = renewed.into_inner().certificates;
    let renewed = read_agent_certificate(&id.trust_domain, &renewed[0])?;
    assert_eq!(renewed.cluster, "edge-1");
    wait_for_hub_renewals(&fleet.home).await;
    assert_eq!(fleet.member_status().await, before);
    let at_home = fleet_client.wait_ready("acme").await?;
    assert_eq!(at_home.status.unwrap().last_applied_chart, chart);

    // A report of the attacker ends no deletion that waits for edge-2.
    let agent = fleet.members[1].agent().unwrap();
    agent.stop().await?;
    let delete = ["delete", "kryptondeployment", "paris", "--wait=false"];
    fleet.home.kubectl(delete).await?;
    let mut session = Session::connect(&hub, &first).await?;
    session.report_as_other_member(&uid).await;
    wait_for_hub_renewals(&fleet.home).await;
    assert_eq!(fleet.deployment(".metadata.uid").await, uid);
    fleet.members[1].start_again(&fleet.edges[1])?;
    eventually("paris to be gone", async || {
        let uid = fleet.deployment(".metadata.uid").await;
        Ok(uid.is_empty().then_some(()))
    })
    .await?;

    // A ban ends the session.
    kubectl_krypton(&fleet.home, &["ban", "edge-1"]).await?;
    let ended = session.receive(|_| false).await.err().unwrap();
    assert!(ended.message().contains("banned"), "{ended:?}");
    let renewed = hub.fleet().renew(request).await;
    assert_refused(renewed.map(drop), Code::PermissionDenied, "banned");
    let reconnected = Session::connect(&hub, &first).await;
    assert_refused(reconnected.map(drop), Code::PermissionDenied, "banned");
    assert!(!fleet.hub.log()?.contains("panicked"));
    Ok(())
}
