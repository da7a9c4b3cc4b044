//! Starts and stops the agent's process.

use std::fmt;
use std::path::Path;
use std::sync::{Arc, OnceLock};

use anyhow::Context as _;
use jiff::Timestamp;
use krypton_helm::chart::ChartCache;
use krypton_helm::driver::{Helm, HelmConfig, Processes, Supervisor};
use krypton_reconciler::drift::DriftMetrics;
use krypton_reconciler::metrics::WorkMetrics;
use krypton_reconciler::plan::Policy;
use krypton_reconciler::record::{self, RecordError};
use krypton_reconciler::report_store::ReportStore;
use krypton_reconciler::run_loop::{self, DumpRequest, Member, StatusMode, Tools};
use krypton_runtime::access::{
    ServiceAccount, impersonating_config, kubeconfig_yaml, local, new_client,
    service_account_namespace, write_kubeconfig,
};
use krypton_runtime::admin::{AdminContent, AdminPorts, Readiness};
use krypton_runtime::cluster::{self, ClusterError, ClusterIdentity};
use krypton_runtime::dial::ProxiedTcp;
use krypton_runtime::lease::{LeaseGoal, OwnPod, agent_holder};
use krypton_runtime::net::Network;
use krypton_runtime::newest::NewestSeen as _;
use krypton_runtime::retry::{StartupGrace, retry_until_ready};
use krypton_runtime::tasks::Tasks;
use krypton_runtime::telemetry::Log;
use krypton_runtime::watchdog::Watchdog;
use krypton_runtime::{chance, clock, scratch, signals};
use krypton_types::allowed_namespaces::AllowedNamespaces;
use krypton_types::desired::DesiredState;
use krypton_types::names;
use kube::{Client, Config};
use tempfile::{TempDir, TempPath};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::args::Flags;
use crate::credentials::identity::Enrolled;
use crate::credentials::joining::{JoinInputs, addresses, load_or_enroll};
use crate::credentials::renewal;
use crate::credentials::store::{Store, StoredIdentity};
use crate::dump::{self, AgentView, Dumper};
use crate::metrics;
use crate::session::connect::Dialer;
use crate::session::hub_chart::HubChart;
use crate::session::{self, Contact, Link, Session};

/// User agent of API requests.
pub(crate) const USER_AGENT: &str = concat!("krypton-agent/", env!("CARGO_PKG_VERSION"));

const RECONCILER: &str = "the reconciler";

/// The UID of the agent's pod. Set it for one container of the pod only.
const POD_UID: &str = "POD_UID";

/// Reads an environment variable.
pub type Env = Arc<dyn Fn(&str) -> Option<String> + Send + Sync>;

/// The parts of a process that the operating system provides.
pub struct Outside {
    pub env: Env,
    /// Stops the agent.
    pub stop: CancellationToken,
    pub watchdog: Watchdog,
    pub log: Log,
    pub network: Arc<dyn Network>,
    pub helm: Arc<dyn Processes>,
}

impl fmt::Debug for Outside {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Outside").finish_non_exhaustive()
    }
}

impl Outside {
    /// Returns the parts of this process. Signals stop it.
    ///
    /// Must be called inside a tokio runtime.
    ///
    /// # Errors
    /// Returns an error if the process cannot listen for signals or start the watchdog's thread.
    pub fn real(log: Log) -> anyhow::Result<Self> {
        let env = |name: &str| std::env::var(name).ok();
        Ok(Self {
            env: Arc::new(env),
            stop: signals::stop_on_signal()?,
            watchdog: Watchdog::start().context("starting the watchdog's thread failed")?,
            log,
            network: Arc::new(ProxiedTcp::new(&env)),
            helm: Arc::new(Supervisor::of_this_program()),
        })
    }
}

/// Runs the agent until it is stopped.
pub async fn run_in(flags: Flags, outside: Outside) -> anyhow::Result<()> {
    let replica = flags.replica(&*outside.env);
    outside.log.process.set("replica", &replica);
    let namespace = flags.namespace(&*outside.env, service_account_namespace());
    let watchdog = outside.watchdog.clone();
    let process = Process {
        flags,
        namespace,
        replica,
        outside,
    };
    watchdog.watch("the main loop", process.run()).await
}

struct Process {
    flags: Flags,
    /// Namespace of the agent.
    namespace: String,
    replica: String,
    outside: Outside,
}

impl Process {
    async fn run(self) -> anyhow::Result<()> {
        let readiness = Readiness::new();
        let startup_guard = readiness.guard("cluster and enrollment");
        // Report mistakes on the command line before any change.
        let (flags, outside) = (&self.flags, &self.outside);
        let ports = AdminPorts::bind(
            flags.health_probe_bind_address.as_ref(),
            flags.metrics_bind_address.as_ref(),
            flags.debug_bind_address.as_ref(),
        )
        .await?;
        let engine = Engine::start(flags, Arc::clone(&outside.helm)).await?;
        let local_cluster =
            LocalCluster::open(flags, &*outside.env, &self.namespace, engine.private.path())
                .await?;
        let channels = Channels::default();
        let (dump_tx, dump_rx) = mpsc::channel(1);
        let dumper = Arc::new(Dumper {
            view: channels.view(self.replica.clone(), engine.work.clone()),
            helm: Arc::clone(&engine.helm),
            dump_requests: dump_tx,
        });
        let admin_content = AdminContent {
            readiness,
            watchdog: outside.watchdog.clone(),
            registry: metrics::registry(channels.metrics(), &engine.drift, &engine.work),
            level: outside.log.level.clone(),
            debug: dump::router(Arc::clone(&dumper)),
        };
        let mut endpoints = JoinSet::new();
        ports.serve(admin_content, &mut endpoints, &outside.stop);
        tracing::info!(context = %local_cluster.context_name, namespace = %self.namespace, replica = %self.replica, "agent starts");

        let Some(fleet) = self.join(&local_cluster.client).await? else {
            return Ok(());
        };
        let cluster = fleet.enrolled.membership.cluster.clone();
        outside.log.process.set("member", &cluster);
        let (link, desired) = (channels.link.subscribe(), channels.desired.subscribe());
        let report_store = Arc::clone(&channels.report_store);
        let mut tasks = Tasks::new(outside.watchdog.clone());
        let session_stop = CancellationToken::new();
        self.start_session(fleet, channels, &mut tasks, &session_stop)?;
        let hub = Arc::new(HubChart::new(link, desired.clone()));
        let charts = ChartCache::new(engine.scratch.path().join("charts"))?
            .with_metrics(&engine.work.charts)
            .with_fallback(hub, flags.chart_source);
        let charts = Arc::new(charts);
        let joined = (cluster.clone(), Arc::clone(&charts));
        dumper.view.joined.get_or_init(|| joined);
        let member = self.member(&local_cluster, cluster.clone());
        let tools = Tools {
            helm: Arc::clone(&engine.helm),
            charts,
            drift: engine.drift.clone(),
            work: engine.work.clone(),
            watchdog: outside.watchdog.clone(),
        };
        drop(startup_guard);
        tracing::info!(%cluster, "joined; waiting for a desired state");
        let reconciler_task = reconcile(
            member,
            tools,
            desired,
            report_store,
            dump_rx,
            outside.stop.clone(),
        );
        tasks.spawn(RECONCILER, reconciler_task);
        self.wait_for_stop(tasks, &session_stop).await?;
        endpoints.abort_all();
        tracing::info!("stopped");
        Ok(())
    }

    /// Joins the fleet and reads the stored desired state. Returns `None` if the agent stops first.
    async fn join(&self, client: &Client) -> anyhow::Result<Option<JoinedFleet>> {
        let (flags, stop) = (&self.flags, &self.outside.stop);
        let apiserver = StartupGrace::new();
        let is_retryable = |error: &ClusterError| error.is_retryable(&apiserver);
        let reading_cluster = retry_until_ready("the cluster", stop, is_retryable, async || {
            cluster::read_own(client).await
        });
        let Some(cluster) = reading_cluster.await? else {
            return Ok(None);
        };
        let store = Store::new(client.clone(), self.namespace.clone());
        let inputs = JoinInputs {
            hub: &flags.hub,
            bundle_sources: flags.bundle_sources(&self.namespace),
            client,
            store: &store,
            cluster: &cluster,
            network: &self.outside.network,
        };
        let Some((stored_identity, enrolled)) = load_or_enroll(&inputs, stop).await? else {
            return Ok(None);
        };
        let reading_record =
            retry_until_ready("the record", stop, RecordError::is_retryable, async || {
                record::read_record(client).await
            });
        Ok(reading_record.await?.map(|record| JoinedFleet {
            cluster,
            store,
            stored_identity,
            enrolled,
            record,
        }))
    }

    /// Starts the session with the hub, and the renewal of the certificate. `stop` ends both.
    fn start_session(
        &self,
        fleet: JoinedFleet,
        channels: Channels,
        tasks: &mut Tasks,
        stop: &CancellationToken,
    ) -> anyhow::Result<()> {
        let enrolled = &fleet.enrolled;
        channels.expiry.send_replace(enrolled.not_after);
        let config = enrolled.client_config(&fleet.stored_identity.identity.key)?;
        let addresses = addresses(&self.flags.hub, &enrolled.membership.addresses);
        let dialer = Dialer::new(addresses, config).with_network(&self.outside.network);
        let dialer = Arc::new(dialer);
        dialer.root_updates().publish_stored(&enrolled.roots);
        let record = fleet.record.as_ref();
        let recorded = record.map(|record| (record.version, record.digest()));
        channels.desired.send_replace(fleet.record.map(Arc::new));
        let link = channels.link.subscribe();
        let session = Session {
            dialer: Arc::clone(&dialer),
            replica: self.replica.clone(),
            cluster_uid: fleet.cluster.uid,
            kubernetes_version: fleet.cluster.kubernetes_version,
            report_store: channels.report_store,
            desired: channels.desired,
            recorded,
            link: channels.link,
            contact: channels.contact,
        };
        let session_task = session::run(session, stop.clone());
        let (expiry, until) = (channels.expiry, stop.clone());
        let renewal_task = renewal::run_renewal(
            fleet.store,
            fleet.stored_identity,
            dialer,
            link,
            expiry,
            stop.clone(),
        );
        // Without an identity there is nothing to renew.
        let renewal_task = async move {
            tokio::join!(renewal_task, until.cancelled());
        };
        tasks.spawn("the session with the hub", session_task);
        tasks.spawn("the renewal of the certificate", renewal_task);
        Ok(())
    }

    /// Waits for the stop signal, then ends all tasks.
    ///
    /// # Errors
    /// Fails if a task ended earlier: the process must restart.
    async fn wait_for_stop(
        &self,
        mut tasks: Tasks,
        session_stop: &CancellationToken,
    ) -> anyhow::Result<()> {
        let early_end = tokio::select! {
            // A stop also ends the tasks without an error, so check it first.
            biased;
            () = self.outside.stop.cancelled() => None,
            error = tasks.wait_any() => Some(error),
        };
        tracing::info!("shutting down; waiting for Helm processes");
        self.outside.stop.cancel();
        let reconciler = tasks.wait_for(RECONCILER).await;
        if let Some(error) = early_end {
            return Err(error.into());
        }
        // The session must report the work in progress up to this point.
        session_stop.cancel();
        tasks.wait_all().await?;
        Ok(reconciler?)
    }

    fn member(&self, local_cluster: &LocalCluster, name: String) -> Member {
        let flags = &self.flags;
        let pod = OwnPod::new((self.outside.env)(POD_UID), std::process::id());
        let account = local_cluster.account.as_ref();
        let own_namespaces = [self.namespace.clone()]
            .into_iter()
            .chain(account.map(|account| account.namespace().to_owned()));
        Member {
            name,
            source_namespace: None,
            helm_client: local_cluster.helm_client.clone(),
            client: local_cluster.client.clone(),
            kubeconfig: local_cluster.kubeconfig.to_path_buf(),
            holder: agent_holder(&self.replica, pod.as_ref(), chance::random()),
            lease_goal: watch::channel(LeaseGoal::Hold).1,
            instance: self.replica.clone(),
            program: names::AGENT_MANAGER,
            status_mode: StatusMode::Write,
            namespaces: None,
            // The cluster owns its Tenants, so all namespaces are allowed.
            allowed_namespaces: watch::channel(AllowedNamespaces::default()).1,
            retry_max: flags.retry_max,
            policy: Policy {
                retries: flags.retries,
                remediation: flags.remediation,
                history_max: flags.history_max,
                ..Policy::new(flags.helm_timeout, own_namespaces)
            },
            // The agent's own cluster is trusted.
            on_excess: None,
        }
    }
}

/// Helm, metrics, and temporary folders, which are deleted on drop.
struct Engine {
    helm: Arc<Helm>,
    work: WorkMetrics,
    drift: DriftMetrics,
    scratch: TempDir,
    /// For files with secrets.
    private: TempDir,
}

impl Engine {
    async fn start(flags: &Flags, processes: Arc<dyn Processes>) -> anyhow::Result<Self> {
        let scratch = scratch::folder(&flags.cache_dir(), "agent", "--cache-dir")?;
        let private = scratch::private(flags.private_dir.as_deref(), &scratch, "agent")?;
        let work = WorkMetrics::default();
        let helm = Helm::new(HelmConfig {
            binary: flags.helm.clone(),
            processes,
            scratch: scratch.path().join("helm"),
            private: private.path().join("helm"),
            max_concurrent: flags.max_concurrent_helm.into(),
            max_per_member: flags.max_concurrent_helm.into(),
        });
        Ok(Self {
            helm: Arc::new(helm.await?.with_metrics(&work.helm)),
            work,
            drift: DriftMetrics::default(),
            scratch,
            private,
        })
    }
}

/// The agent's own cluster.
struct LocalCluster {
    context_name: String,
    client: Client,
    /// The client of the account that Helm uses.
    helm_client: Client,
    account: Option<ServiceAccount>,
    /// Read by Helm.
    kubeconfig: TempPath,
}

impl LocalCluster {
    async fn open(
        flags: &Flags,
        env: &dyn Fn(&str) -> Option<String>,
        namespace: &str,
        private: &Path,
    ) -> anyhow::Result<Self> {
        let context = flags.context.as_deref();
        let cluster_config = local(&flags.local(env), context, Config::incluster).await?;
        let account = flags.helm_account(namespace);
        let yaml = kubeconfig_yaml(&cluster_config.config, account.as_ref())?;
        let kubeconfig = write_kubeconfig(private, &yaml).with_context(|| {
            format!("failed to write Helm's kubeconfig to {}", private.display())
        })?;
        let message = "failed to create a client of the cluster";
        let helm_client = impersonating_config(&cluster_config.config, account.as_ref());
        let helm_client = helm_client.map(|config| new_client(config, USER_AGENT));
        let helm_client = helm_client.transpose().context(message)?;
        let client = new_client(cluster_config.config, USER_AGENT).context(message)?;
        Ok(Self {
            context_name: cluster_config.context_name,
            helm_client: helm_client.unwrap_or_else(|| client.clone()),
            client,
            account,
            kubeconfig,
        })
    }
}

/// Channels between session, reconciler and ports.
#[derive(Default)]
struct Channels {
    link: watch::Sender<Link>,
    /// Expiry of the client certificate; 1970 before enrollment.
    expiry: watch::Sender<Timestamp>,
    desired: watch::Sender<Option<Arc<DesiredState>>>,
    report_store: Arc<ReportStore>,
    contact: watch::Sender<Contact>,
}

impl Channels {
    fn view(&self, replica: String, work: WorkMetrics) -> AgentView {
        AgentView {
            replica,
            started: clock::wall(),
            contact: self.contact.subscribe(),
            expiry: self.expiry.subscribe(),
            desired: self.desired.subscribe(),
            report_store: Arc::clone(&self.report_store),
            work,
            joined: OnceLock::new(),
        }
    }

    fn metrics(&self) -> metrics::AgentMetrics {
        metrics::AgentMetrics {
            link: self.link.subscribe(),
            expiry: self.expiry.subscribe(),
            desired: self.desired.subscribe(),
            report_store: Arc::clone(&self.report_store),
        }
    }
}

/// A cluster that has joined.
struct JoinedFleet {
    cluster: ClusterIdentity,
    store: Store,
    stored_identity: StoredIdentity,
    enrolled: Enrolled,
    /// Desired state that was stored on the cluster.
    record: Option<DesiredState>,
}

/// Runs the reconciler from the first desired state on.
async fn reconcile(
    member: Member,
    tools: Tools,
    mut desired_updates: watch::Receiver<Option<Arc<DesiredState>>>,
    report_store: Arc<ReportStore>,
    dump_requests: mpsc::Receiver<DumpRequest>,
    stop: CancellationToken,
) {
    let first = tokio::select! {
        () = stop.cancelled() => return,
        first = desired_updates.wait_for(Option::is_some) => first.ok().and_then(|first| first.clone()),
    };
    let Some(first) = first else { return };
    let (desired_tx, desired) = watch::channel(first);
    let forwarding = async move {
        while desired_updates.changed().await.is_ok() {
            if let Some(next) = desired_updates.get_and_update() {
                desired_tx.send_replace(next);
            }
        }
        // The session stops after the reconciler, so the last desired state stays valid until then.
        std::future::pending::<()>().await;
    };
    let forwarding = tools.watchdog.watch("the newest desired state", forwarding);
    let forwarding = tokio::spawn(forwarding);
    run_loop::run_with_dumps(member, tools, desired, report_store, dump_requests, stop).await;
    forwarding.abort();
}
