//! Verifies that a member has one writer: two agents, agent and hub, and faulty connections to the API server.
//!
//! All tests wait for real Leases. They verify the order of events, not their duration. A script starts the real Helm
//! and detects overlapping runs.

use std::path::Path;

use anyhow::bail;
use k8s_openapi::api::core::v1::Secret;
use krypton_helm::releases::labels::RUN_LABEL;
use krypton_tests::{
    Agent, AgentOptions, ChartRepository, Cluster, FaultProxy, Gate, HelmWatch, Hub, HubOptions,
    Mode, Parts, STEP_DEADLINE, TestResult, Traffic, eventually,
    fleet::{FleetClient, chart_flags, helm_processes},
    gate, join_bundle,
    membership::{enrolled_agent, write_secret},
};
use kube::{Api, ResourceExt as _};
use serde_json::json;
use tempfile::TempDir;

/// A hub with a short grace period for lost agents, and a chart that blocks at a gate.
struct Home {
    _hub: Hub,
    cluster: Cluster,
    watch: HelmWatch,
    _repository: ChartRepository,
}

impl Home {
    async fn start(name: &str) -> TestResult<Self> {
        let gate = Gate::new()?;
        let repository = ChartRepository::start(&[gate.chart()]).await?;
        let cluster = Cluster::start(name, Parts::ControlPlane).await?;
        let watch = HelmWatch::new()?;
        let options = HubOptions::new(cluster.kubeconfig())
            .args(chart_flags(&repository, "gate", "1.0.0"))
            .args(["--self-cluster=false", "--proxy-grace=5s"])
            .args([watch.flag("hub")?]);
        let hub = Hub::start_ready(&options).await?;
        Ok(Self {
            _hub: hub,
            cluster,
            watch,
            _repository: repository,
        })
    }

    /// Also starts an edge cluster.
    async fn start_with_edge(name: &str) -> TestResult<(Self, Cluster)> {
        let names = ["home", "edge"].map(|role| format!("{name}-{role}"));
        let (home, edge) = tokio::join!(
            Box::pin(Self::start(&names[0])),
            Box::pin(Cluster::start(&names[1], Parts::WithControllers))
        );
        Ok((home?, edge?))
    }

    /// Starts the member's first agent, which acquires the Lease.
    async fn join(&self, name: &str, edge: &Cluster, by: &Path, helm: &str) -> Agent {
        let agent = self.start_agent(name, by, helm).await.unwrap();
        let holder = FleetClient::new(edge)
            .wait_for_new_holder("")
            .await
            .unwrap();
        assert!(holder.starts_with("agent/one/"), "{holder}");
        agent
    }

    async fn start_agent(&self, name: &str, by: &Path, helm: &str) -> TestResult<Agent> {
        let options = AgentOptions::new(by).args([helm]);
        Ok(enrolled_agent(&self.cluster, name, options).await?)
    }
}

/// Starts another agent of a member that has joined.
async fn second_agent(edge: &Cluster, watch: &HelmWatch) -> TestResult<Agent> {
    let flags = ["--replica=two".to_owned(), watch.flag("two")?];
    let options = AgentOptions::new(edge.kubeconfig()).args(flags);
    Ok(Agent::start_ready(&options).await?)
}

/// Waits until the Lease has another holder. Verifies that the earlier holder's Helm was dead before.
async fn wait_for_handover(at_edge: &FleetClient, before: &str, previous: &Agent) -> String {
    let folder = previous.folder().unwrap();
    let mut dead = false;
    eventually("the Lease to change hands", async || {
        // The order matters: a process that is found later was alive when the Lease changed.
        let holder = at_edge.holder().await?;
        let alive = helm_processes(folder);
        if holder == before {
            dead |= alive.is_empty();
            bail!("held by {holder:?}; helm: {alive:?}");
        }
        assert!(dead && alive.is_empty(), "{holder:?} has it; {alive:?}");
        Ok(Some(holder))
    })
    .await
    .unwrap()
}

async fn check_single_deployed_revision(at_edge: &FleetClient, name: &str, release: &str) {
    let revisions = at_edge.revisions(name, release).await.unwrap();
    let count = |status_prefix: &str| {
        let of = revisions
            .iter()
            .filter(|(_, status)| status.starts_with(status_prefix));
        of.count()
    };
    assert_eq!(
        (count("deployed"), count("pending")),
        (1, 0),
        "{revisions:?}"
    );
}

#[tokio::test]
async fn frozen_agent_runs_no_helm_after_takeover() -> TestResult {
    let (home, edge) = Home::start_with_edge("frozen").await?;
    let (at_edge, watch) = (FleetClient::new(&edge), &home.watch);
    let helm = watch.flag("one")?;
    let mut one = home.join("edge-1", &edge, edge.kubeconfig(), &helm).await;
    let _two = second_agent(&edge, watch).await?;
    at_edge.create("acme", json!({})).await?;
    let hook = gate::wait_for_any_hook(&at_edge, "acme", None).await?;
    let holder = at_edge.holder().await?;

    one.freeze()?;
    let next = wait_for_handover(&at_edge, &holder, &one).await;
    assert!(next.starts_with("agent/two/"), "{next}");
    let hook = gate::wait_for_any_hook(&at_edge, "acme", Some(&hook)).await?;
    gate::complete_hook(&at_edge, "acme", &hook).await?;
    at_edge.wait_ready("acme").await?;
    check_single_deployed_revision(&at_edge, "acme", "tenant-acme-edge-1").await;
    // The second agent's last write: the cleanup after the killed installation.
    let secrets: Api<Secret> = Api::namespaced(at_edge.client.clone(), "acme");
    eventually("the killed installation to be cleaned up", async || {
        let killed = secrets
            .get_metadata("sh.helm.release.v1.tenant-acme-edge-1.v1")
            .await?;
        Ok((!killed.labels().contains_key(RUN_LABEL)).then_some(()))
    })
    .await?;
    let everything = async || {
        let tenant = at_edge.tenants().get("acme").await.unwrap();
        let releases = at_edge.releases().await.unwrap();
        (releases, tenant.metadata.resource_version)
    };
    let before = everything().await;

    one.thaw()?;
    one.wait_for_log("permitted=false").await?;
    at_edge.wait_for_renewal().await?;
    assert_eq!(at_edge.holder().await?, next);
    assert_eq!(everything().await, before);
    // Both agents observe a change, but only one acts on it.
    at_edge.create("after", json!({})).await?;
    let hook = gate::wait_for_any_hook(&at_edge, "after", None).await?;
    assert!(helm_processes(one.folder()?).is_empty());
    gate::complete_hook(&at_edge, "after", &hook).await?;
    at_edge.wait_ready("after").await?;
    assert_eq!(watch.runs()?, ["one", "two", "two"]);
    Ok(())
}

#[tokio::test]
async fn replicas_share_bundle_and_stopping_one_drains_helm() -> TestResult {
    let (home, edge) = Home::start_with_edge("replicas").await?;
    let (at_home, at_edge) = (FleetClient::new(&home.cluster), FleetClient::new(&edge));
    let folder = TempDir::with_prefix("krypton-join-")?;
    let file = folder.path().join("bundle.yaml");
    write_secret(&file, &join_bundle(&home.cluster, "edge-1").await?)?;
    let start = |replica: &str| {
        let flags = [
            format!("--replica={replica}"),
            home.watch.flag(replica).unwrap(),
        ];
        let options = AgentOptions::new(edge.kubeconfig())
            .join_file(&file)
            .args(flags);
        Agent::start(&options).unwrap()
    };
    let (mut one, mut two) = (start("one"), start("two"));
    let ready = tokio::join!(one.wait_ready(STEP_DEADLINE), two.wait_ready(STEP_DEADLINE));
    ready.0?;
    ready.1?;
    at_home.wait_for_mode("edge-1", Mode::Agent).await?;

    let holder = at_edge.wait_for_new_holder("").await?;
    let one_leads = holder.starts_with("agent/one/");
    let (mut writes, standby, next) = match one_leads {
        true => (one, two, "two"),
        false => (two, one, "one"),
    };
    at_edge.create("acme", json!({})).await?;
    let hook = gate::wait_for_any_hook(&at_edge, "acme", None).await?;
    assert!(helm_processes(standby.folder()?).is_empty());
    let folder = writes.folder()?.to_owned();
    let taken = eventually("the other agent to take over", async || {
        // The order matters: a process that is found later was alive when the Lease was released.
        let now = at_edge.holder().await?;
        let alive = helm_processes(&folder);
        assert!(
            now == holder || alive.is_empty(),
            "{now:?} has it; {alive:?}"
        );
        Ok(now.starts_with(&format!("agent/{next}/")).then_some(()))
    });
    let (stopped, taken) = tokio::join!(writes.stop(), taken);
    assert!(stopped?.success());
    assert!(helm_processes(&folder).is_empty());
    taken?;
    // The other agent completes the work that the first one couldn't.
    let hook = gate::wait_for_any_hook(&at_edge, "acme", Some(&hook)).await?;
    gate::complete_hook(&at_edge, "acme", &hook).await?;
    at_edge.wait_ready("acme").await?;
    check_single_deployed_revision(&at_edge, "acme", "tenant-acme-edge-1").await;
    Ok(())
}

#[tokio::test]
async fn restart_in_same_pod_reacquires_lease_immediately() -> TestResult {
    let (home, edge) = Home::start_with_edge("same-pod").await?;
    let at_edge = FleetClient::new(&edge);
    let helm = home.watch.flag("one")?;
    let folder = TempDir::with_prefix("krypton-join-")?;
    let file = folder.path().join("bundle.yaml");
    write_secret(&file, &join_bundle(&home.cluster, "edge-1").await?)?;
    let options = AgentOptions::new(edge.kubeconfig())
        .join_file(&file)
        .args([helm])
        .in_pod("uid-of-one");
    let mut one = Agent::start_ready(&options).await?;
    let holder = at_edge.wait_for_new_holder("").await?;
    assert!(
        holder.starts_with("agent/one/") && holder.ends_with("@uid-of-one"),
        "{holder}"
    );
    let waiting = second_agent(&edge, &home.watch).await?;
    at_edge.create("acme", json!({})).await?;
    let hook = gate::wait_for_any_hook(&at_edge, "acme", None).await?;

    // In the middle of an installation, whose Helm ends with the container.
    let transitions = async || {
        let leases: Api<k8s_openapi::api::coordination::v1::Lease> =
            Api::namespaced(edge.client(), "krypton-system");
        let lease = leases.get("krypton-agent").await.unwrap();
        lease.spec.unwrap().lease_transitions
    };
    let before = transitions().await;
    one.kill9().await?;
    eventually("its Helm process to end", async || {
        Ok((!home.watch.is_running()?).then_some(()))
    })
    .await?;
    let _restarted = Agent::start_ready(&options).await?;
    let next = at_edge.wait_for_new_holder(&holder).await?;
    assert!(
        next.starts_with("agent/one/") && next.ends_with("@uid-of-one"),
        "{next}"
    );
    // The Lease had no other holder. The other agent, in no pod or another one, still waits for a minute.
    assert_eq!(transitions().await, before.map(|before| before + 1));
    assert!(helm_processes(waiting.folder()?).is_empty());
    let hook = gate::wait_for_any_hook(&at_edge, "acme", Some(&hook)).await?;
    gate::complete_hook(&at_edge, "acme", &hook).await?;
    at_edge.wait_ready("acme").await?;
    check_single_deployed_revision(&at_edge, "acme", "tenant-acme-edge-1").await;
    assert_eq!(home.watch.runs()?, ["one", "one"]);
    Ok(())
}

/// The failure of the member's first agent during an installation.
enum AgentFailure {
    Killed,
    /// On its connection to the API server, which its Helm also uses.
    Network(Traffic),
}

async fn check_takeover(
    home: &Home,
    name: &str,
    edge: &Cluster,
    failure: AgentFailure,
) -> TestResult {
    let watch = HelmWatch::new()?;
    let at_edge = FleetClient::new(edge);
    let fault_proxy = FaultProxy::start(edge).await?;
    let helm = watch.flag("one")?;
    let mut one = home
        .join(name, edge, &fault_proxy.kubeconfig(), &helm)
        .await;
    let mut two = second_agent(edge, &watch).await?;
    at_edge.create("acme", json!({})).await?;
    let hook = gate::wait_for_any_hook(&at_edge, "acme", None).await?;
    let holder = at_edge.holder().await?;
    assert!(holder.starts_with("agent/one/"), "{name}: {holder}");
    assert!(helm_processes(two.folder()?).is_empty(), "{name}");

    match failure {
        AgentFailure::Killed => one.kill9().await?,
        AgentFailure::Network(traffic) => fault_proxy.set(traffic),
    }
    let next = wait_for_handover(&at_edge, &holder, &one).await;
    assert!(next.starts_with("agent/two/"), "{name}: {next}");
    let hook = gate::wait_for_any_hook(&at_edge, "acme", Some(&hook)).await?;
    gate::complete_hook(&at_edge, "acme", &hook).await?;
    at_edge.wait_ready("acme").await?;
    let release = format!("tenant-acme-{name}");
    check_single_deployed_revision(&at_edge, "acme", &release).await;

    match failure {
        AgentFailure::Killed => {
            let options = AgentOptions::new(edge.kubeconfig()).args([helm]);
            one = Agent::start(&options)?;
            one.wait_ready(STEP_DEADLINE).await?;
        }
        AgentFailure::Network(_) => fault_proxy.set(Traffic::Pass),
    }
    assert!(two.stop().await?.success());
    let last_holder = at_edge.wait_for_new_holder(&next).await?;
    assert!(
        last_holder.starts_with("agent/one/"),
        "{name}: {last_holder}"
    );
    at_edge.wait_for_renewal().await?;
    check_single_deployed_revision(&at_edge, "acme", &release).await;
    assert_eq!(watch.runs()?, ["one", "two"], "{name}");
    Ok(())
}

/// Both members run concurrently, because each waits for a Lease.
#[tokio::test]
async fn lost_agent_has_no_helm_running_at_takeover() -> TestResult {
    let start = async |name: &str| Cluster::start(name, Parts::WithControllers).await.unwrap();
    let (home, dead, deaf) = tokio::join!(
        Home::start("over-home"),
        start("over-dead"),
        start("over-deaf"),
    );
    let home = home?;
    let half_open = Traffic::Swallow {
        there: false,
        back: true,
    };
    tokio::try_join!(
        check_takeover(&home, "dead", &dead, AgentFailure::Killed),
        check_takeover(&home, "deaf", &deaf, AgentFailure::Network(half_open)),
    )?;
    Ok(())
}
