//! The hub's part: Tenants created at once on an edge, one more alone, and the time after them.

use std::{
    fs,
    ops::Range,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, anyhow};
use futures::{StreamExt, TryStreamExt, stream};
use krypton_crds::tenant::{Tenant, TenantSpec};
use krypton_tests::{
    ChartRepository, Cluster, Hub, HubOptions, Parts,
    fleet::{Desk, condition},
    process::log_end,
};
use kube::{Api, api::PostParams};
use tempfile::TempDir;

use crate::{
    AT_ONCE, CHART, CHART_VERSION,
    arrivals::{Arrivals, Span},
    load,
    machine::Neighbours,
    name, patience, say, together,
    traffic::{Traffic, single_out},
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
    /// With the children's, helm's among them.
    pub(crate) cpu_seconds: f64,
    /// Of that the hub itself; nothing where there is none.
    pub(crate) hub_cpu_seconds: f64,
    pub(crate) edge: Traffic,
    /// Cores that others kept busy meanwhile.
    pub(crate) neighbours: f64,
}

#[derive(Debug, Clone)]
pub(crate) struct Krypton {
    pub(crate) many: Work,
    /// What the many cost the home cluster.
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
    pub(crate) with_hub: Rest,
    pub(crate) without_hub: Rest,
}

/// What reached the apiservers while nothing was to be done.
#[derive(Debug, Clone)]
pub(crate) struct Rest {
    pub(crate) edge: Traffic,
    pub(crate) home: Traffic,
    pub(crate) neighbours: f64,
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
    outcome.map_err(|error| with_log(error, &setup.hub))
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
        let healthy = [
            ("Connected", "True", "Connected"),
            ("Healthy", "True", "Reconciling"),
        ];
        let shown = desk.member_shows(EDGE, &healthy).await;
        shown.map_err(|error| with_log(error, &hub))?;
        Ok(Self {
            home,
            edge,
            hub,
            _folder: folder,
        })
    }

    async fn measure(&mut self, size: u32, idle: Duration) -> Result<Krypton> {
        tokio::time::sleep(SETTLE).await;
        let home = Traffic::read(&self.home).await?;
        let many = self.install(0..size).await?;
        let home = Traffic::read(&self.home).await?.since(&home);
        let rss_bytes = self.hub.rss_bytes()?;
        let peak_rss_bytes = load::peak_rss_bytes(self.hub.pid())?;
        say(&format!(
            "all Ready after {:.1} s",
            many.arrivals.last.as_secs_f64()
        ));

        let mut with_hub = None;
        if !idle.is_zero() {
            say(&format!("idling for {} s with the hub", idle.as_secs()));
            let before = self.hub.cpu_seconds()?;
            let rest = self.rest(idle, &[self.hub.pid()]).await?;
            with_hub = Some((
                rest,
                self.hub.cpu_seconds()? - before,
                self.hub.rss_bytes()?,
            ));
        }
        let single = self.install(size..size + 1).await?;
        let idle = match with_hub {
            None => None,
            Some((with_hub, cpu_seconds, rss_bytes)) => {
                self.hub.stop().await?;
                tokio::time::sleep(SETTLE).await;
                say(&format!("idling for {} s without it", idle.as_secs()));
                let without_hub = self.rest(idle, &[]).await?;
                Some(Idle {
                    cpu_seconds,
                    rss_bytes,
                    with_hub,
                    without_hub,
                })
            }
        };
        Ok(Krypton {
            many,
            home,
            rss_bytes,
            peak_rss_bytes,
            single,
            idle,
        })
    }

    /// Creates Tenants at once and waits until each is Ready and helm has ended.
    async fn install(&self, numbers: Range<u32>) -> Result<Work> {
        let count = numbers.end - numbers.start;
        let client = self.edge.client();
        let tenants: Api<Tenant> = Api::namespaced(client.clone(), NAMESPACE);
        let mut arrivals = Arrivals::watch(tenants.clone()).await?;
        let hub = [self.hub.pid()];
        let (edge, cpu) = (Traffic::read(&self.edge).await?, self.hub.cpu_seconds()?);
        let own = load::own_seconds(self.hub.pid())?;
        let neighbours = Neighbours::watch(self.known(&hub)?)?;

        let clock = Instant::now();
        let creating = create(&tenants, numbers.clone());
        let arriving = arrivals.all(count, clock, patience(count), |tenant| {
            ready(tenant, &numbers)
        });
        let (_, arrivals) = together(creating, arriving).await?;
        let neighbours = neighbours.cores(self.known(&hub)?)?;
        tokio::time::sleep(SETTLE).await;
        let edge = Traffic::read(&self.edge).await?.since(&edge);
        let cpu_seconds = self.hub.cpu_seconds()? - cpu;
        let hub_cpu_seconds = load::own_seconds(self.hub.pid())? - own;
        Ok(Work {
            arrivals,
            helm_ended: None,
            cpu_seconds,
            hub_cpu_seconds,
            edge,
            neighbours,
        })
    }

    async fn rest(&self, idle: Duration, hub: &[u32]) -> Result<Rest> {
        let (edge, home) = self.traffic().await?;
        let neighbours = Neighbours::watch(self.known(hub)?)?;
        tokio::time::sleep(idle).await;
        let neighbours = neighbours.cores(self.known(hub)?)?;
        let (edge_now, home_now) = self.traffic().await?;
        Ok(Rest {
            edge: edge_now.since(&edge),
            home: home_now.since(&home),
            neighbours,
        })
    }

    async fn traffic(&self) -> Result<(Traffic, Traffic)> {
        Ok((
            Traffic::read(&self.edge).await?,
            Traffic::read(&self.home).await?,
        ))
    }

    /// CPU time of all that runs for us.
    fn known(&self, hub: &[u32]) -> Result<f64> {
        load::known_seconds(&[&self.home.pids(), &self.edge.pids(), hub].concat())
    }
}

/// A hub's folder goes with it, and so its log.
fn with_log(error: anyhow::Error, hub: &Hub) -> anyhow::Error {
    anyhow!(
        "{error:#}\nthe hub's log ends:\n{}",
        log_end(hub.log_path())
    )
}

async fn create(tenants: &Api<Tenant>, numbers: Range<u32>) -> Result<()> {
    let each = numbers.map(|number| async move {
        let tenant = Tenant::new(&name(number), TenantSpec::default());
        tenants.create(&PostParams::default(), &tenant).await
    });
    let creates = stream::iter(each).buffer_unordered(CREATES_AT_ONCE);
    creates
        .try_for_each(|_| async { Ok(()) })
        .await
        .context("creating Tenants")
}

/// What the Tenant lacks to be Ready. Those of other numbers were so before and do not count.
fn ready(tenant: &Tenant, numbers: &Range<u32>) -> Result<(), String> {
    if !numbers
        .clone()
        .any(|number| tenant.metadata.name == Some(name(number)))
    {
        return Err("not one of these".to_owned());
    }
    let status = tenant.status.clone().unwrap_or_default();
    if status.observed_generation != tenant.metadata.generation {
        return Err("no status yet".to_owned());
    }
    match condition(&status.conditions, "Ready") {
        Some(ready) if ready.status == "True" => Ok(()),
        _ => Err(status
            .last_message
            .unwrap_or_else(|| "no message".to_owned())),
    }
}
