//! The agent's process: what is started, in which order, and how it ends.

use std::path::Path;
use std::sync::{Arc, OnceLock};

use anyhow::{Context, anyhow, bail};
use arc_swap::ArcSwap;
use jiff::Timestamp;
use krypton_common::allowed::Allowed;
use krypton_common::bundle::JoinBundle;
use krypton_common::desired::DesiredState;
use krypton_common::error_chain::chain;
use krypton_common::telemetry::Log;
use kube::{Client, Config};
use tempfile::TempPath;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::access::{
    ServiceAccount, acting_as, client_named, kubeconfig_yaml, local, service_account_namespace,
    write_kubeconfig,
};
use crate::admin::{self, Readiness};
use crate::chart::ChartCache;
use crate::cluster::{self, Cluster, ClusterError};
use crate::dial::Dialer;
use crate::drift::DriftMetrics;
use crate::dump::{self, AgentView, Dumper};
use crate::enrolment::{self, EnrolError};
use crate::fence::{LeaseWish, OwnPod, agent_holder};
use crate::flags::Flags;
use crate::helm::{Helm, HelmConfig};
use crate::hub_chart::HubChart;
use crate::identity::{self, Enrolled, Identity, IdentityError, Kept, Store};
use crate::join::{self, JoinError, Start};
use crate::ledger::{self, LedgerError};
use crate::newest::NewestSeen as _;
use crate::patience::{Settling, patiently};
use crate::plan::Policy;
use crate::reconciler::{self, Member, Question, StatusMode, Tools};
use crate::report::ReportBoard;
use crate::session::{self, Contact, Link, Session};
use crate::watchdog::Watchdog;
use crate::work_metrics::WorkMetrics;
use crate::{clock, metrics, scratch, signals};

/// Our name at the apiserver.
const USER_AGENT: &str = concat!("krypton-agent/", env!("CARGO_PKG_VERSION"));

/// The UID of the pod whose only agent this is. Of its containers, no other may be told.
const POD_UID: &str = "POD_UID";

/// Runs the agent until it is told to stop.
pub async fn run(flags: Flags, log: Log) -> anyhow::Result<()> {
    let env = |name: &str| std::env::var(name).ok();
    let replica = flags.replica(env);
    log.process.put("replica", &replica);
    let namespace = flags.namespace(env, service_account_namespace());
    let stop = signals::stop_on_signal()?;
    let watchdog = Watchdog::start().context("starting the watchdog's thread failed")?;
    let main = main_loop(flags, log, (namespace, replica), watchdog.clone(), stop);
    watchdog.watch("the main loop", main).await
}

async fn main_loop(
    flags: Flags,
    log: Log,
    (namespace, replica): (String, String),
    watchdog: Watchdog,
    stop: CancellationToken,
) -> anyhow::Result<()> {
    let env = |name: &str| std::env::var(name).ok();
    let readiness = Readiness::new();
    let starting = readiness.guard("cluster and enrolment");
    // Whatever a person got wrong on the command line is said before anything is touched.
    let metrics_listener = match &flags.metrics_bind_address.0 {
        Some(address) => Some(admin::bind(admin::METRICS_FLAG, address).await?),
        None => None,
    };
    let health_listener = match &flags.health_probe_bind_address.0 {
        Some(address) => Some(admin::bind(admin::HEALTH_FLAG, address).await?),
        None => None,
    };
    let debug_listener = match &flags.debug_bind_address.0 {
        Some(address) => admin::bind_debug(address).await,
        None => None,
    };
    let scratch = scratch::folder(&flags.cache_dir(), "agent", "--cache-dir")?;
    let private = scratch::private(flags.private_dir.as_deref(), &scratch, "agent")?;
    let work = WorkMetrics::default();
    let helm = Helm::new(HelmConfig {
        binary: flags.helm.clone(),
        // Not the path: the program may be replaced on disk while it runs.
        supervisor: vec!["/proc/self/exe".into(), "helm-run".into()],
        scratch: scratch.path().join("helm"),
        private: private.path().join("helm"),
        max_concurrent: flags.max_concurrent_helm.into(),
        max_per_member: flags.max_concurrent_helm.into(),
    })
    .await?
    .with_metrics(&work.helm);
    let helm = Arc::new(helm);
    let found = local(
        &flags.local(env),
        flags.context.as_deref(),
        Config::incluster,
    )
    .await?;
    let account = flags.helm_account(&namespace);
    let kubeconfig = helm_kubeconfig(private.path(), &found.config, account.as_ref())?;
    let made = acting_as(&found.config, account.as_ref())
        .map_or(Ok(None), |config| {
            client_named(config, USER_AGENT).map(Some)
        })
        .and_then(|helm| Ok((client_named(found.config, USER_AGENT)?, helm)));
    let (client, helm_client) = made.context("making the cluster's client failed")?;
    let drift = DriftMetrics::default();

    let (link_tx, link) = watch::channel(Link::default());
    let (expiry_tx, expiry) = watch::channel(Timestamp::UNIX_EPOCH);
    let (desired_tx, desired) = watch::channel(None);
    let board = Arc::new(ReportBoard::default());
    let contact = watch::Sender::new(Contact::default());
    let (asking, questions) = mpsc::channel(1);
    let dumper = Arc::new(Dumper {
        view: AgentView {
            replica: replica.clone(),
            started: clock::wall(),
            contact: contact.subscribe(),
            expiry: expiry.clone(),
            desired: desired.clone(),
            board: Arc::clone(&board),
            work: work.clone(),
            joined: OnceLock::new(),
        },
        helm: Arc::clone(&helm),
        questions: asking,
    });
    let mut endpoints = JoinSet::new();
    if let Some(listener) = health_listener {
        let serving =
            admin::serve_health(listener, readiness.clone(), watchdog.clone(), stop.clone());
        endpoints.spawn(admin::logged("health", serving));
    }
    if let Some(listener) = debug_listener {
        let more = dump::router(Arc::clone(&dumper));
        let serving = admin::serve_debug(listener, log.level, more, stop.clone());
        endpoints.spawn(admin::logged("debug", serving));
    }
    if let Some(listener) = metrics_listener {
        let state = metrics::State {
            link: link.clone(),
            expiry,
            desired: desired.clone(),
            board: Arc::clone(&board),
        };
        let registry = metrics::registry(state, &drift, &work);
        let serving = admin::serve_metrics(listener, Arc::new(registry), stop.clone());
        endpoints.spawn(admin::logged("metrics", serving));
    }
    tracing::info!(context = %found.context_name, %namespace, %replica, "agent starts");

    let apiserver = Settling::new();
    let may_pass = |error: &ClusterError| error.may_pass(&apiserver);
    let asking = patiently("the cluster", &stop, may_pass, async || {
        cluster::ask(&client).await
    });
    let Some(cluster) = asking.await? else {
        return Ok(());
    };
    let store = Store::new(client.clone(), namespace.clone());
    let Some((kept, enrolled)) =
        joined(&flags, &namespace, &client, &store, &cluster, &stop).await?
    else {
        return Ok(());
    };
    let Some(record) = patiently("the record", &stop, LedgerError::may_pass, async || {
        ledger::read_record(&client).await
    })
    .await?
    else {
        return Ok(());
    };

    log.process.put("member", &enrolled.cluster);
    expiry_tx.send_replace(enrolled.not_after);
    let config = enrolled.client_config(&kept.identity.key)?;
    let dialer = Arc::new(Dialer::new(
        addresses(&flags, &enrolled.addresses),
        Arc::new(ArcSwap::from_pointee(config)),
    ));
    dialer.trust().keep(&enrolled.roots);
    let recorded = record
        .as_ref()
        .map(|record| (record.version, record.digest()));
    desired_tx.send_replace(record.map(Arc::new));
    let session_stop = CancellationToken::new();
    let talking = session::run(
        Session {
            dialer: Arc::clone(&dialer),
            replica: replica.clone(),
            cluster_uid: cluster.uid,
            kubernetes_version: cluster.kubernetes_version,
            board: Arc::clone(&board),
            desired: desired_tx,
            recorded,
            link: link_tx,
            contact,
        },
        session_stop.clone(),
    );
    let mut session = tokio::spawn(watchdog.watch("the session with the hub", talking));
    let renewal = enrolment::keep_renewed(
        store,
        kept,
        dialer,
        link.clone(),
        expiry_tx,
        session_stop.clone(),
    );
    // Without an identity there is nothing to renew.
    let until = session_stop.clone();
    let renewal = async move { tokio::join!(renewal, until.cancelled()) };
    let renewal = async {
        renewal.await;
    };
    let mut renewal = tokio::spawn(watchdog.watch("the renewal of the certificate", renewal));
    let charts = ChartCache::new(scratch.path().join("charts"))?
        .with_metrics(&work.charts)
        .with_fallback(
            Arc::new(HubChart::new(link, desired.clone())),
            flags.chart_source,
        );
    let charts = Arc::new(charts);
    let joined = (enrolled.cluster.clone(), Arc::clone(&charts));
    dumper.view.joined.get_or_init(|| joined);
    let pod = OwnPod::of(env(POD_UID), std::process::id());
    let member = Member {
        name: enrolled.cluster.clone(),
        source_namespace: None,
        helm_client: helm_client.unwrap_or_else(|| client.clone()),
        client,
        kubeconfig: kubeconfig.to_path_buf(),
        holder: agent_holder(&replica, pod.as_ref(), rand::random()),
        lease: watch::channel(LeaseWish::Hold).1,
        instance: replica,
        status: StatusMode::Write,
        namespaces: None,
        // Its Tenants are the member's own.
        allowed: watch::channel(Allowed::default()).1,
        retry_max: flags.retry_max,
        policy: Policy::new(
            flags.helm_timeout,
            [namespace]
                .into_iter()
                .chain(account.map(|account| account.namespace().to_owned())),
        )
        .remediated(flags.retries, flags.remediation)
        .with_history(flags.history_max),
        // The agent's own cluster is trusted.
        beyond: None,
    };
    let tools = Tools {
        helm,
        charts,
        drift,
        work,
        watchdog: watchdog.clone(),
    };
    drop(starting);
    tracing::info!(cluster = %enrolled.cluster, "joined; reconciling as soon as there is a desired state");
    let reconciling = reconcile(member, tools, desired, board, questions, stop.clone());
    let mut reconciling = tokio::spawn(watchdog.watch("the reconciler", reconciling));
    let by_itself = tokio::select! {
        // First: at the stop the others end too, and not by themselves.
        biased;
        () = stop.cancelled() => None,
        ended = &mut reconciling => return Err(by_itself("the reconciler", ended)),
        ended = &mut session => Some(by_itself("the session with the hub", ended)),
        ended = &mut renewal => Some(by_itself("the renewal of the certificate", ended)),
    };
    tracing::info!("stopping: running helm processes are waited for");
    stop.cancel();
    let ended = reconciling.await;
    if let Some(error) = by_itself {
        return Err(error);
    }
    // Until here it has told the hub of what was still going on.
    session_stop.cancel();
    session.await.context("the session ended badly")?;
    renewal.await.context("the renewal ended badly")?;
    ended.context("the reconciler ended badly")?;
    endpoints.abort_all();
    tracing::info!("stopped");
    Ok(())
}

/// Work that goes on until the stop and has ended before it: the process is better started anew.
fn by_itself(what: &str, ended: Result<(), tokio::task::JoinError>) -> anyhow::Error {
    match ended {
        Ok(()) => anyhow!("{what} has ended by itself"),
        Err(error) => anyhow!(error).context(format!("{what} ended badly")),
    }
}

/// Reconciles from the first desired state on.
async fn reconcile(
    member: Member,
    tools: Tools,
    mut slot: watch::Receiver<Option<Arc<DesiredState>>>,
    board: Arc<ReportBoard>,
    questions: mpsc::Receiver<Question>,
    stop: CancellationToken,
) {
    let first = tokio::select! {
        () = stop.cancelled() => return,
        first = slot.wait_for(Option::is_some) => first.ok().and_then(|first| first.clone()),
    };
    let Some(first) = first else { return };
    let (desired_tx, desired) = watch::channel(first);
    let following = async move {
        while slot.changed().await.is_ok() {
            if let Some(next) = slot.see() {
                desired_tx.send_replace(next);
            }
        }
        // The session ends after the reconciler; until then the last one stands.
        std::future::pending::<()>().await;
    };
    let following = tools.watchdog.watch("the newest desired state", following);
    let following = tokio::spawn(following);
    reconciler::run_and_tell(member, tools, desired, board, questions, stop).await;
    following.abort();
}

/// How often an identity is read again that others write at the same time.
const JOIN_TRIES: usize = 5;

/// What one attempt to join led to.
enum Joined {
    As(Box<(Kept, Enrolled)>),
    /// Another replica has written the identity meanwhile: what it has got is to be read.
    Overtaken,
    Stopped,
}

/// The identity with a certificate, got with the join bundle where there is none yet. Replicas that join
/// together with one bundle share the key that the fastest of them has kept, and so its certificate.
async fn joined(
    flags: &Flags,
    namespace: &str,
    client: &Client,
    store: &Store,
    cluster: &Cluster,
    stop: &CancellationToken,
) -> anyhow::Result<Option<(Kept, Enrolled)>> {
    for _ in 0..JOIN_TRIES {
        match join_once(flags, namespace, client, store, cluster, stop).await? {
            Joined::As(joined) => return Ok(Some(*joined)),
            Joined::Stopped => return Ok(None),
            Joined::Overtaken => {
                tracing::info!(
                    "another replica has written the identity meanwhile; it is read again"
                );
            }
        }
    }
    bail!(
        "the identity in Secret {namespace}/{} changes each time that it is read; does something else write it?",
        identity::SECRET
    )
}

async fn join_once(
    flags: &Flags,
    namespace: &str,
    client: &Client,
    store: &Store,
    cluster: &Cluster,
    stop: &CancellationToken,
) -> anyhow::Result<Joined> {
    let read = async || {
        patiently("the identity", stop, IdentityError::may_pass, async || {
            store.read().await
        })
        .await
    };
    let Some(kept) = read().await? else {
        return Ok(Joined::Stopped);
    };
    let places = flags.join_places(namespace);
    let before = kept
        .as_ref()
        .and_then(|kept| kept.identity.enrolled.clone());
    let bundle = if before.is_some() {
        // It would only be looked at to join anew.
        places.find(client).await
    } else {
        let found = patiently("the join bundle", stop, JoinError::may_pass, async || {
            places.find(client).await
        });
        match found.await {
            Ok(Some(bundle)) => Ok(bundle),
            Ok(None) => return Ok(Joined::Stopped),
            Err(error) => Err(error),
        }
    };
    let bundle = match bundle {
        Ok(bundle) => Some(bundle),
        Err(JoinError::Nowhere { .. }) if before.is_some() => None,
        Err(error) if before.is_some() => {
            tracing::warn!(error = %chain(&error), "the join bundle is not looked at: this cluster has joined already");
            None
        }
        Err(error) => return Err(error.into()),
    };
    let start = join::decide(before.as_ref(), bundle.as_ref(), namespace)?;
    let bundle = match (start, bundle) {
        (Start::Enrol, Some(bundle)) => bundle,
        _ => {
            return Ok(match kept.zip(before) {
                Some(joined) => Joined::As(Box::new(joined)),
                None => Joined::Overtaken,
            });
        }
    };
    // A key is made only for a bundle that can be used, and kept before anybody hears of it.
    let kept = match kept {
        Some(kept) => kept,
        None => {
            let made = patiently("the identity", stop, IdentityError::may_pass, async || {
                store.load().await
            });
            match made.await? {
                Some(kept) if kept.identity.enrolled.is_some() => return Ok(Joined::Overtaken),
                Some(kept) => kept,
                None => return Ok(Joined::Stopped),
            }
        }
    };
    let asked = ask(flags, &bundle, &kept.identity, cluster, stop).await;
    let enrolled = match (asked, before) {
        (Ok(Some(enrolled)), _) => enrolled,
        (Ok(None), _) => return Ok(Joined::Stopped),
        (Err(error), Some(before)) => {
            tracing::error!(error = %chain(&error),
                "joining anew failed; the agent goes on as it had joined before");
            return Ok(Joined::As(Box::new((kept, before))));
        }
        // The token may have been used by a key that is kept by now in the place of ours.
        (Err(error), None) => {
            return match read().await? {
                Some(Some(now)) if now.identity.enrolled.is_some() => Ok(Joined::Overtaken),
                Some(_) => Err(error.into()),
                None => Ok(Joined::Stopped),
            };
        }
    };
    tracing::info!(cluster = %enrolled.cluster, not_after = %enrolled.not_after, "enrolled");
    let identity = Identity {
        enrolled: Some(enrolled),
        ..kept.identity.clone()
    };
    let writing = patiently("the identity", stop, IdentityError::may_pass, async || {
        store.keep(kept.clone(), identity.clone()).await
    });
    Ok(match writing.await? {
        None => Joined::Stopped,
        Some(kept) => match kept.identity.enrolled.clone() {
            Some(enrolled) => Joined::As(Box::new((kept, enrolled))),
            None => Joined::Overtaken,
        },
    })
}

/// Who has joined before is not kept from working by a hub that is away: it asks once.
async fn ask(
    flags: &Flags,
    bundle: &JoinBundle,
    identity: &Identity,
    cluster: &Cluster,
    stop: &CancellationToken,
) -> Result<Option<Enrolled>, EnrolError> {
    let new = identity.enrolled.is_none();
    let may_pass = |error: &EnrolError| new && error.may_pass();
    patiently("enrolment", stop, may_pass, async || {
        let addresses = addresses(flags, &bundle.addresses);
        enrolment::enrol(bundle, addresses, &identity.key, &cluster.uid).await
    })
    .await
}

/// What a person says goes before what the hub has said.
fn addresses(flags: &Flags, known: &[String]) -> Vec<String> {
    if flags.hub.is_empty() {
        known.to_vec()
    } else {
        flags.hub.clone()
    }
}

/// What helm reads.
fn helm_kubeconfig(
    scratch: &Path,
    config: &Config,
    account: Option<&ServiceAccount>,
) -> anyhow::Result<TempPath> {
    let yaml = kubeconfig_yaml(config, account)?;
    write_kubeconfig(scratch, &yaml).with_context(|| {
        format!(
            "writing the kubeconfig of helm into {} failed",
            scratch.display()
        )
    })
}
