//! A hostile agent: it has the credentials of a member, and lies to the hub.
//!
//! The generator of its process draws its attacks. It runs until it is killed. It ends only if the hub gives it
//! something that is not its member's, which violates the invariant `no-process-ends`.
//!
//! A member may lie about itself. So the agent reports the removal of objects on other members only.

use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use futures::channel::mpsc;
use futures::future::LocalBoxFuture;
use futures::stream::BoxStream;
use futures::{SinkExt as _, StreamExt as _, TryStreamExt as _};
use krypton_agent::credentials::identity::AgentKey;
use krypton_agent::credentials::store::Store;
use krypton_agent::session::connect::{Connection, Dialer};
use krypton_helm::releases::labels::OWNER_UID_LABEL;
use krypton_proto::REPORTS_PER_MESSAGE;
use krypton_proto::v1::agent_message::Kind as FromAgent;
use krypton_proto::v1::hub_message::Kind as FromHub;
use krypton_proto::v1::{
    AgentMessage, Applied, Condition, Deployment, DeploymentState, Desired, FetchChartRequest,
    Heartbeat, Hello, HubMessage, MemberReport, Placed, PlacedState, RenewRequest, Report, Tenant,
    TenantState, TrustedRoots, Version,
};
use krypton_runtime::access::{from_kubeconfig, new_client, read_kubeconfig};
use krypton_runtime::{chance, clock, cluster};
use krypton_types::names::{GROUP, HOME_UID_ANNOTATION, PLACED_ON_ANNOTATION};
use krypton_types::spiffe::{Role, SpiffeId};
use rcgen::{CertificateParams, KeyPair, SanType};
use serde_json::Value;
use tokio::time::{sleep, timeout};

use crate::conductor::{Program, ProgramContext, Simulation};
use crate::object::{annotation, label, number, text};
use crate::plan::{HOME, SYSTEM_NAMESPACE, TENANT_NAMESPACE};

/// Starts the names of hosts with a hostile agent.
const PREFIX: &str = "hostile-";
const USER_AGENT: &str = "hostile-agent/1.0";
/// Time that one call or message may take.
const PATIENCE: Duration = Duration::from_secs(5);
/// Time between two attempts to steal the credentials and to reach the hub.
const RETRY_PAUSE: Duration = Duration::from_secs(1);
/// Longest time between two messages or attacks, in milliseconds.
const LONGEST_PAUSE: u64 = 800;
const ATTACKS_PER_CONNECTION: usize = 8;
const MESSAGES_PER_SESSION: usize = 20;
/// Sessions that it starts and cancels in one attack.
const CANCELLED_SESSIONS: usize = 12;
/// So many renewals leave some of the member's quota to its honest agent.
const MAX_RENEWALS: u32 = 3;
/// Each plan names its Tenants `t0`, `t1`, and so on.
const PLANNED_TENANTS: usize = 6;
const MAX_INVENTED_TENANTS: u8 = 100;
const OTHER_CLUSTER: &str = "6f1f2f3c-0000-4000-8000-0123456789ab";
/// A member that no plan has.
const OTHER_MEMBER: &str = "edge-9";
const INVENTED_DIGEST: &str = "invented";

/// An object of the home cluster that is on another member, with its true UID.
#[derive(Clone, Debug)]
struct OtherObject {
    is_tenant: bool,
    name: String,
    uid: String,
}

/// Kills the agent of an edge cluster, and starts a hostile one. Returns the name of its host.
pub(crate) fn start(simulation: &mut Simulation, edge: &str) -> String {
    let (agent, host) = (format!("agent-{edge}"), format!("{PREFIX}{edge}"));
    simulation.crash(&agent, None);
    simulation.crash(&host, None);
    let root = simulation.folder();
    let (from, to) = (root.join(&agent), root.join(&host));
    drop(std::fs::create_dir_all(&to));
    drop(std::fs::copy(
        from.join("kubeconfig"),
        to.join("kubeconfig"),
    ));
    let others = other_objects(simulation, edge);
    let [a, b, _, d] = simulation.ip(&agent).unwrap_or([10, 0, 2, 0]);
    simulation.add_host(&host, [a, b, 4, d], program(edge, others));
    host
}

/// Returns the objects of home that neither are nor were on this edge cluster.
fn other_objects(simulation: &Simulation, edge: &str) -> Vec<OtherObject> {
    let is_here = |uid: &str| {
        let mut secrets = simulation.objects(edge, "", "secrets").into_iter();
        let mut tenants = simulation.objects(edge, GROUP, "tenants").into_iter();
        secrets.any(|secret| label(&secret, OWNER_UID_LABEL) == Some(uid))
            || tenants.any(|tenant| annotation(&tenant, HOME_UID_ANNOTATION) == Some(uid))
    };
    let mut others = Vec::new();
    for resource in ["tenants", "kryptondeployments"] {
        let is_tenant = resource == "tenants";
        for object in simulation.objects(HOME, GROUP, resource) {
            let member = match is_tenant {
                true => annotation(&object, PLACED_ON_ANNOTATION).unwrap_or_default(),
                false => text(&object, "/spec/region/name"),
            };
            let uid = text(&object, "/metadata/uid");
            if !member.is_empty() && member != edge && !is_here(uid) {
                others.push(OtherObject {
                    is_tenant,
                    name: text(&object, "/metadata/name").to_owned(),
                    uid: uid.to_owned(),
                });
            }
        }
    }
    others
}

fn program(edge: &str, others: Vec<OtherObject>) -> Program {
    let edge = edge.to_owned();
    Rc::new(move |context| {
        let attacker = Attacker {
            member: edge.clone(),
            others: others.clone(),
            context,
            renewals: Cell::new(0),
        };
        Box::pin(async move {
            let breach = attacker.run().await;
            Err::<(), String>(breach.to_string())
        }) as LocalBoxFuture<'static, Result<(), String>>
    })
}

/// The hub gave the agent something that is not its member's.
#[derive(Debug, thiserror::Error)]
#[error("the hub {0}")]
struct Breach(&'static str);

/// The credentials of a member.
struct Stolen {
    dialer: Dialer,
    key: Arc<AgentKey>,
    trust_domain: String,
    cluster_uid: String,
}

struct Session {
    sender: mpsc::Sender<AgentMessage>,
    incoming: BoxStream<'static, anyhow::Result<HubMessage>>,
}

struct Attacker {
    member: String,
    others: Vec<OtherObject>,
    context: ProgramContext,
    /// Number of renewals so far.
    renewals: Cell<u32>,
}

impl Attacker {
    async fn run(self) -> Breach {
        loop {
            let Err(error) = Box::pin(self.attack_until_failure()).await;
            match error.downcast() {
                Ok(breach) => return breach,
                Err(error) => tracing::debug!(error = %format!("{error:#}"), "attack failed"),
            }
            sleep(RETRY_PAUSE).await;
        }
    }

    async fn attack_until_failure(&self) -> anyhow::Result<std::convert::Infallible> {
        let stolen = Box::pin(self.steal()).await?;
        loop {
            let connection = Box::pin(stolen.dialer.connect()).await?;
            for _ in 0..ATTACKS_PER_CONNECTION {
                let result = Box::pin(self.attack(&stolen, &connection)).await;
                match result {
                    Err(error) if error.is::<Breach>() => return Err(error),
                    // The hub rejects most attacks.
                    Err(error) => tracing::debug!(error = %format!("{error:#}"), "attack rejected"),
                    Ok(()) => {}
                }
                sleep(pause()).await;
            }
        }
    }

    /// Reads the credentials of the member from its cluster.
    async fn steal(&self) -> anyhow::Result<Stolen> {
        let kubeconfig = read_kubeconfig(&self.context.folder.join("kubeconfig"))?;
        let config = from_kubeconfig(kubeconfig, None).await?.config;
        let client = new_client(config, USER_AGENT)?;
        let cluster = cluster::read_own(&client).await?;
        let store = Store::new(client, SYSTEM_NAMESPACE.to_owned());
        let identity = store.read().await?.context("no identity")?.identity;
        let enrolled = identity.enrolled.context("no certificate")?;
        let certificate = enrolled.certificates.first().context("no certificate")?;
        let id = SpiffeId::from_certificate(certificate)?;
        let tls = enrolled.client_config(&identity.key)?;
        let dialer = Dialer::new(enrolled.membership.addresses, tls);
        Ok(Stolen {
            dialer: dialer.with_network(&self.context.network()),
            key: identity.key,
            trust_domain: id.trust_domain,
            cluster_uid: cluster.uid,
        })
    }

    async fn attack(&self, stolen: &Stolen, connection: &Connection) -> anyhow::Result<()> {
        match chance::random::<u8>() % 8 {
            0 => {
                for _ in 0..CANCELLED_SESSIONS {
                    drop(Self::open(connection, &stolen.cluster_uid).await?);
                }
                Ok(())
            }
            1 => self.renew_for_other(stolen, connection).await,
            2 => {
                let request = FetchChartRequest {
                    digest: INVENTED_DIGEST.to_owned(),
                    ..FetchChartRequest::default()
                };
                let mut fleet = connection.fleet();
                let fetched = timeout(PATIENCE, fleet.fetch_chart(request)).await?;
                match fetched {
                    Ok(_) => Err(Breach("sends a chart for an invented digest").into()),
                    Err(status) => Err(status.into()),
                }
            }
            3 => {
                let mut session = Self::open(connection, OTHER_CLUSTER).await?;
                let first = timeout(PATIENCE, session.incoming.next()).await?;
                match first.transpose()?.and_then(|message| message.kind) {
                    Some(FromHub::Welcome(_)) => Err(Breach("accepts another cluster").into()),
                    _ => Ok(()),
                }
            }
            _ => self.lie(stolen, connection).await,
        }
    }

    async fn open(connection: &Connection, cluster_uid: &str) -> anyhow::Result<Session> {
        let (mut sender, messages) = mpsc::channel(4);
        let hello = message(FromAgent::Hello(hello(cluster_uid)));
        sender.send(hello).await?;
        let mut fleet = connection.fleet();
        let response = timeout(PATIENCE, fleet.connect(messages)).await??;
        let incoming = response.into_inner().map_err(anyhow::Error::from);
        Ok(Session {
            sender,
            incoming: incoming.boxed(),
        })
    }

    /// Requests a certificate that names a different member.
    async fn renew_for_other(
        &self,
        stolen: &Stolen,
        connection: &Connection,
    ) -> anyhow::Result<()> {
        if self.renewals.get() >= MAX_RENEWALS {
            return Ok(());
        }
        self.renewals.set(self.renewals.get() + 1);
        let name = SpiffeId::cluster(&stolen.trust_domain, OTHER_MEMBER).to_string();
        let mut params = CertificateParams::default();
        params.subject_alt_names = vec![SanType::URI(name.try_into()?)];
        let key: &KeyPair = &stolen.key;
        let request = RenewRequest {
            certificate_request: params.serialize_request(key)?.der().to_vec().into(),
        };
        let mut fleet = connection.fleet();
        let renewed = timeout(PATIENCE, fleet.renew(request)).await??;
        let renewed = renewed.into_inner().certificates;
        let renewed = renewed.first().context("no certificate")?;
        let id = SpiffeId::from_certificate(renewed)?;
        match id.role == Role::Cluster(self.member.clone()) {
            true => Ok(()),
            false => Err(Breach("signs a certificate for another member").into()),
        }
    }

    /// Sends lies in one session until the hub ends it.
    async fn lie(&self, stolen: &Stolen, connection: &Connection) -> anyhow::Result<()> {
        let mut session = Self::open(connection, &stolen.cluster_uid).await?;
        let mut epoch = 1;
        for _ in 0..MESSAGES_PER_SESSION {
            match timeout(pause(), session.incoming.next()).await {
                Ok(Some(received)) => {
                    if let Some(FromHub::Desired(desired)) = received?.kind {
                        epoch = epoch_of(&desired).unwrap_or(epoch);
                    }
                }
                Ok(None) => return Ok(()),
                Err(_) => {}
            }
            let lie = message(self.lie_about_all(epoch, &stolen.cluster_uid));
            timeout(PATIENCE, session.sender.send(lie)).await??;
        }
        Ok(())
    }

    /// Draws a message. `epoch` is that of the desired state.
    fn lie_about_all(&self, epoch: u64, cluster_uid: &str) -> FromAgent {
        match chance::random::<u8>() % 32 {
            // The hub ends the session after each of these three.
            0 => FromAgent::Hello(hello(cluster_uid)),
            1 => FromAgent::TrustedRoots(TrustedRoots {
                sha256: vec![vec![7_u8; 31].into()],
            }),
            2 => FromAgent::Report(Report {
                tenants: vec![lie_about(String::new()); REPORTS_PER_MESSAGE + 1],
                ..Report::default()
            }),
            3..8 => FromAgent::Heartbeat(Heartbeat {
                tenants: chance::random(),
                digest_high: chance::random(),
                digest_low: chance::random(),
            }),
            8..12 => FromAgent::Applied(applied(epoch)),
            _ => FromAgent::Report(self.report(epoch)),
        }
    }

    /// A report of Tenants that the member does not have, of removals on other members, and of a later epoch.
    fn report(&self, epoch: u64) -> Report {
        let planned = (0..PLANNED_TENANTS).map(|number| format!("t{number}"));
        let count = chance::random::<u8>() % MAX_INVENTED_TENANTS;
        let invented = (0..count).map(|_| format!("invented-{}", chance::random::<u16>()));
        let ahead = pick([
            None,
            Some(epoch.saturating_add(1)),
            Some(epoch.saturating_add(9_000)),
            Some(u64::MAX),
        ]);
        let (tenants, deployments): (Vec<&OtherObject>, Vec<_>) =
            self.others.iter().partition(|object| object.is_tenant);
        Report {
            tenants: planned.chain(invented).map(lie_about).collect(),
            member: Some(MemberReport {
                synced: true,
                ready: true,
                writing: true,
                connected: true,
                holder: Some("agent/thief".to_owned()),
                problem: pick([None, Some(5_000)]).map(|length| "x".repeat(length)),
                applied: Some(applied(epoch)),
                ahead: ahead.map(|epoch| Version {
                    epoch,
                    generation: 1,
                }),
                ..MemberReport::default()
            }),
            complete: pick([None, Some(0), Some(1), Some(2)]),
            deployments: deployments.into_iter().map(removed_deployment).collect(),
            placed: tenants.into_iter().map(removed_tenant).collect(),
        }
    }
}

fn message(kind: FromAgent) -> AgentMessage {
    AgentMessage { kind: Some(kind) }
}

fn hello(cluster_uid: &str) -> Hello {
    Hello {
        protocol_min: 1,
        protocol_max: 1,
        agent_version: env!("CARGO_PKG_VERSION").to_owned(),
        replica: format!("thief-{}", chance::random::<u8>() % 4),
        cluster_uid: cluster_uid.to_owned(),
        kubernetes_version: "v1.36.3".to_owned(),
        now: clock::wall().as_second(),
        ..Hello::default()
    }
}

fn applied(epoch: u64) -> Applied {
    Applied {
        version: Some(Version {
            epoch,
            generation: chance::random::<u16>().into(),
        }),
        digest: INVENTED_DIGEST.to_owned(),
    }
}

/// A report of any state of a Tenant.
fn lie_about(name: String) -> Tenant {
    Tenant {
        namespace: TENANT_NAMESPACE.to_owned(),
        name,
        state: Some(state()),
    }
}

fn removed_deployment(object: &OtherObject) -> Deployment {
    Deployment {
        namespace: TENANT_NAMESPACE.to_owned(),
        name: object.name.clone(),
        state: Some(DeploymentState {
            uid: object.uid.clone(),
            gone: true,
            state: Some(state()),
            ..DeploymentState::default()
        }),
    }
}

fn removed_tenant(object: &OtherObject) -> Placed {
    Placed {
        namespace: TENANT_NAMESPACE.to_owned(),
        name: object.name.clone(),
        state: Some(PlacedState {
            uid: object.uid.clone(),
            observed_generation: 1,
            gone: true,
            placed: Some(condition()),
        }),
    }
}

fn state() -> TenantState {
    TenantState {
        observed_generation: 1,
        applied_chart: "https://charts.example.org/mine:6.6.6".to_owned(),
        ready: Some(condition()),
        error: pick([true, false]).then(condition),
        ..TenantState::default()
    }
}

/// A condition with any status, also an unknown one, and any reason, also an invalid one.
fn condition() -> Condition {
    Condition {
        truth: pick([0, 1, 2, 3, 9]),
        reason: pick(["InstallFailed", "Ready", "", "no reason at all!"]).to_owned(),
        message: "x".repeat(pick([0, 0, 20, 20, 20, 2_000])),
    }
}

fn epoch_of(desired: &Desired) -> Option<u64> {
    let state: Value = serde_json::from_slice(&desired.state).ok()?;
    number(&state, "/version/epoch")
}

fn pause() -> Duration {
    Duration::from_millis(50 + u64::from(chance::random::<u16>()) % LONGEST_PAUSE)
}

fn pick<T: Copy, const N: usize>(all: [T; N]) -> T {
    all[usize::from(chance::random::<u16>()) % N]
}
