//! The hub's part: Tenants created at once on an edge, one more alone, and the time after them.

use std::{
    fs,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use futures::{StreamExt, TryStreamExt, stream};
use krypton_crds::tenant::{Tenant, TenantSpec};
use krypton_tests::{
    ChartRepository, Cluster, Hub, HubOptions, Parts,
    fleet::{Desk, condition},
    process::log_end,
};
use kube::{Api, Client, api::PostParams};
use tempfile::TempDir;

use crate::{
    AT_ONCE, CHART, CHART_VERSION,
    arrivals::{Arrivals, Span},
    load,
    machine::Neighbours,
    name, patience, say,
    traffic::{Traffic, single_out},
    together,
};

const EDGE: &str = "edge";
const NAMESPACE: &str = "default";
/// Creates that are under way at a time.
const CREATES_AT_ONCE: usize = 16;
/// After the last arrival: events, statuses and controllers come to rest.
pub(crate) const SETTLE: Duration = Duration::from_secs(5);

/// One piece of work and its cost, until `SETTLE` after its end.
#[derive(Debug, Clone)]
pub(crate) struct Work {
    pub(crate) arrivals: Span,
    /// Until the last helm had ended, where that is known.
    pub(crate) helm_ended: Option<Duration>,
    pub(crate) cpu_seconds: f64,
    pub(crate) edge: Traffic,
    /// Cores that others kept busy meanwhile.
    pub(crate) neighbours: f64,
}

#[derive(Debug, Clone)]
pub(crate) struct Krypton {
    pub(crate) many: Work,
    pub(crate) home: Traffic,
    pub(crate) rss_bytes: u64,
    pub(crate) peak_rss_bytes: u64,
    /// One more Tenant, alone, with all caches warm.
    pub(crate) single: Work,
    pub(crate) idle: Option<Idle>,
}

/// The same span of time twice, with and without the hub.
#[derive(Debug, Clone)]
pub(crate) struct Idle {
    pub(crate) cpu_seconds: f64,
    pub(crate) rss_bytes: u64,
    pub(crate) edge: Traffic,
    pub(crate) home: Traffic,
    pub(crate) edge_without_hub: Traffic,
    pub(crate) home_without_hub: Traffic,
}

struct Setup {
    home: Cluster,
    edge: Cluster,
    hub: Hub,
    _folder: TempDir,
}

pub(crate) async fn measure(
    size: u32,
    idle: Duration,
    repository: &ChartRepository,
) -> Result<Krypton> {
    say(&format!("{size} Tenants: starting home, edge and hub"));
    let mut setup = Setup::start(repository).await?;
    let outcome = setup.measure(size, idle).await;
    let log = setup.hub.log_path();
    outcome.with_context(|| format!("the hub's log ends:\n{}", log_end(log)))
}

impl Setup {
    async fn start(repository: &ChartRepository) -> Result<Self> {
        let (home, edge) = tokio::try_join!(
            Cluster::start("home", Parts::ControlPlane),
            Cluster::start(EDGE, Parts::WithPods),
        )?;
        let folder = TempDir::with_prefix("krypton-bench-").context("making a folder")?;
        let at_home = folder.path().join("home.kubeconfig");
        let kubeconfig = single_out(&home).await?;
        fs::write(&at_home, kubeconfig).context("writing the hub's kubeconfig")?;
        let desk = Desk::at(&home);
        desk.add_member(EDGE, &single_out(&edge).await?).await?;

        let flags = [
            format!("--namespace={NAMESPACE}"),
            format!("--chart-repo={}", repository.url()),
            format!("--chart-name={CHART}"),
            format!("--chart-version={CHART_VERSION}"),
            "--chart-install-crds=false".to_owned(),
            "--self-cluster=false".to_owned(),
            format!("--max-concurrent-helm={AT_ONCE}"),
        ];
        let hub = Hub::start(&HubOptions::new(&at_home).args(flags))?;
        let healthy = [("Connected", "True", "Connected"), ("Healthy", "True", "Reconciling")];
        let shown = desk.member_shows(EDGE, &healthy).await;
        shown.with_context(|| format!("the hub's log ends:\n{}", log_end(hub.log_path())))?;
        Ok(Self { home, edge, hub, _folder: folder })
    }

    async fn measure(&mut self, size: u32, idle: Duration) -> Result<Krypton> {
        tokio::time::sleep(SETTLE).await;
        let home = Traffic::read(&self.home).await?;
        let many = self.install(0..size).await?;
        let home = Traffic::read(&self.home).await?.since(&home);
        let rss_bytes = self.hub.rss_bytes()?;
        let peak_rss_bytes = load::peak_rss_bytes(self.hub.pid())?;
        say(&format!("all Ready after {:.1} s", many.arrivals.last.as_secs_f64()));

        let idle = if idle.is_zero() {
            None
        } else {
            say(&format!("idling for {} s with the hub", idle.as_secs()));
            Some(self.idle(idle).await?)
        };
        let single = match &idle {
            // The hub is gone by now; another one would begin with cold caches.
            Some((_, single)) => single.clone(),
            None => self.install(size..size + 1).await?,
        };
        let idle = idle.map(|(idle, _)| idle);
        Ok(Krypton { many, home, rss_bytes, peak_rss_bytes, single, idle })
    }
}
