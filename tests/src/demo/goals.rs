//! Defines the goals of each step, checks them on the API servers, and waits for them.

use std::time::Duration;

use krypton_crds::{
    edge_cluster::{EdgeCluster, EdgeClusterStatus},
    tenant::Tenant,
};
use krypton_tests::{Mode, fleet::condition, wait::eventually_while_running};
use krypton_types::{
    conditions::{self, Kind, condition_type},
    names,
};

use anyhow::{Context, Result, bail};
use k8s_openapi::api::{apps::v1::Deployment, rbac::v1::ClusterRole};
use kube::{Api, ResourceExt, api::ListParams};
use tokio::time::Instant;

use crate::{
    screen::Screen,
    stage::{CHART, STEP_DEADLINE, Site, Stage},
};

/// Namespace of the demo's Tenants on each cluster.
pub(crate) const NAMESPACE: &str = "default";
/// Minimum interval between two lines about unreached goals.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(1);

/// Returns the namespace of a Tenant's chart.
pub(crate) fn workspace(tenant: &str) -> String {
    format!("{tenant}-ws")
}

pub(crate) enum Goal<'a> {
    /// Home shows the member as connected and reconciled, in this mode.
    Member {
        home: &'a Site,
        member: &'a str,
        mode: Mode,
    },
    /// The hub can reach the member, and its agent still holds the Lease.
    Spare {
        home: &'a Site,
        site: &'a Site,
        holder: &'a str,
    },
    /// A new holder has the member's Lease.
    TakenOver {
        site: &'a Site,
        previous: &'a str,
        /// Prefix of the new holder's identity.
        by: &'a str,
        /// Description of the goal, and the start of the wait.
        wait: &'a str,
        since: Instant,
    },
    /// The Tenant is Ready, Helm's newest revision is deployed, and the Deployment has this version and is available.
    Installed {
        site: &'a Site,
        tenant: &'a str,
        applied: String,
        version: &'a str,
        revision: u32,
    },
    /// Home's Tenant is Ready on exactly these members, each for this reason.
    Aggregated {
        home: &'a Site,
        tenant: &'a str,
        members: &'a [&'a str],
        reason: &'a str,
    },
    /// Home counts this number of Tenants on the member, all of them Ready.
    Counted {
        home: &'a Site,
        member: &'a str,
        tenants: u32,
    },
    /// The Tenant, its release, its objects and its namespace are gone.
    Gone { site: &'a Site, tenant: &'a str },
}

impl Goal<'_> {
    fn name(&self) -> String {
        match self {
            Self::Member { member, .. } => (*member).to_owned(),
            Self::Spare { site, .. } => format!("home/{}", site.member),
            Self::TakenOver { site, .. } => format!("the Lease of {}", site.name()),
            Self::Installed { site, tenant, .. } | Self::Gone { site, tenant } => {
                format!("{}/{tenant}", site.name())
            }
            Self::Aggregated { tenant, .. } => format!("home/{tenant} over all clusters"),
            Self::Counted { member, .. } => format!("{member} in the list of clusters"),
        }
    }

    /// Describes the reached goal.
    fn reached(&self) -> String {
        match self {
            Self::Member { member, mode, .. } => {
                let who = match mode {
                    Mode::SelfCluster | Mode::Proxy => "the hub",
                    Mode::Agent => "its agent",
                };
                format!("{member}: connected, and {who} manages it")
            }
            Self::Spare { site, holder, .. } => format!(
                "{}: the hub can reach it now, and leaves it to {holder}",
                site.member
            ),
            Self::TakenOver {
                site, by, since, ..
            } => format!(
                "{}: the {} holds the Lease after {:.1} s",
                site.name(),
                by.trim_end_matches('/'),
                since.elapsed().as_secs_f64()
            ),
            Self::Installed {
                site,
                tenant,
                version,
                revision,
                ..
            } => format!(
                "{}: {tenant} is Ready, release {} is at revision {revision}, its Deployment of {CHART}-{version} available",
                site.name(),
                release(site, tenant),
            ),
            Self::Aggregated {
                tenant, members, ..
            } => format!("home: {tenant} shows {}", summary(members)),
            Self::Counted {
                member, tenants, ..
            } => format!("home: {tenants} of {tenants} Tenants of {member} are Ready"),
            Self::Gone { site, tenant } => format!(
                "{}: {tenant}, its release and its objects are gone, and namespace {} too",
                site.name(),
                workspace(tenant),
            ),
        }
    }

    /// Returns an error with the difference if the goal is not reached.
    async fn check(&self) -> Result<()> {
        match self {
            Self::Member { home, member, mode } => check_member(home, member, *mode).await,
            Self::Spare { home, site, holder } => check_spare(home, site, holder).await,
            Self::TakenOver {
                site,
                previous,
                by,
                wait,
                since,
            } => check_taken_over(site, previous, by)
                .await
                .with_context(|| format!("after {} s: {wait}", elapsed_tens(*since))),
            Self::Installed {
                site,
                tenant,
                applied,
                version,
                revision,
            } => {
                check_tenant(site, tenant, applied).await?;
                check_release(site, tenant, *revision).await?;
                check_deployment(site, tenant, version).await
            }
            Self::Aggregated {
                home,
                tenant,
                members,
                reason,
            } => check_summary(home, tenant, members, reason).await,
            Self::Counted {
                home,
                member,
                tenants,
            } => check_counts(home, member, *tenants).await,
            Self::Gone { site, tenant } => check_gone(site, tenant).await,
        }
    }
}

/// Waits until all goals are reached, and shows reached goals and differences. Fails immediately if the acting process
/// has ended.
pub(crate) async fn reach(
    screen: &Screen,
    stage: &Stage,
    what: &str,
    goals: &[Goal<'_>],
) -> Result<()> {
    let mut reached = vec![false; goals.len()];
    let mut reported = String::new();
    let mut next_progress = Instant::now() + PROGRESS_INTERVAL;
    let check_running = || stage.check_running();
    let waiting = eventually_while_running(what, STEP_DEADLINE, check_running, async || {
        let mut missing = Vec::new();
        for (goal, reached) in goals.iter().zip(&mut reached) {
            match goal.check().await {
                Err(difference) => missing.push(format!("{} ({difference:#})", goal.name())),
                Ok(()) if *reached => {}
                Ok(()) => {
                    *reached = true;
                    screen.event(&goal.reached());
                }
            }
        }
        if missing.is_empty() {
            return Ok(Some(()));
        }
        let missing = missing.join(", ");
        if missing != reported && Instant::now() >= next_progress {
            screen.event(&format!("still missing: {missing}"));
            next_progress = Instant::now() + PROGRESS_INTERVAL;
            reported.clone_from(&missing);
        }
        bail!("missing: {missing}")
    });
    waiting.await
}

fn release(site: &Site, tenant: &str) -> String {
    names::tenant_release(tenant, &site.member)
}

fn summary(members: &[&str]) -> String {
    let count = members.len();
    format!("{count} of {count} clusters ready")
}

async fn member_status(home: &Site, member: &str) -> Result<EdgeClusterStatus> {
    let members: Api<EdgeCluster> = Api::all(home.fleet_client.client.clone());
    match members.get_opt(member).await? {
        Some(member) => Ok(member.status.unwrap_or_default()),
        None => bail!("no EdgeCluster yet"),
    }
}

fn check_conditions(status: &EdgeClusterStatus, expected: &[(&str, &str)]) -> Result<()> {
    for (type_, reason) in expected {
        match condition(&status.conditions, type_) {
            Some(condition) if condition.status == "True" && condition.reason == *reason => {}
            Some(condition) => bail!("{type_} is {} ({})", condition.status, condition.reason),
            None => bail!("{type_} is missing"),
        }
    }
    Ok(())
}

fn check_mode(status: &EdgeClusterStatus, mode: Mode) -> Result<()> {
    match status.mode {
        Some(actual) if actual == mode.in_status() => Ok(()),
        Some(actual) => bail!("its mode is {actual:?}"),
        None => bail!("its mode is unknown"),
    }
}

async fn check_member(home: &Site, member: &str, mode: Mode) -> Result<()> {
    let status = member_status(home, member).await?;
    check_conditions(
        &status,
        &[("Connected", "Connected"), ("Healthy", "Reconciling")],
    )?;
    check_mode(&status, mode)
}

async fn check_spare(home: &Site, site: &Site, holder: &str) -> Result<()> {
    let status = member_status(home, &site.member).await?;
    check_conditions(
        &status,
        &[
            ("TargetClusterResolved", "Resolved"),
            ("Connected", "Connected"),
        ],
    )?;
    check_mode(&status, Mode::Agent)?;
    match site.fleet_client.holder().await? {
        actual if actual == holder => Ok(()),
        actual => bail!("{actual:?} holds its Lease"),
    }
}

async fn check_taken_over(site: &Site, previous: &str, by: &str) -> Result<()> {
    match site.fleet_client.holder().await? {
        holder if holder != previous && holder.starts_with(by) => Ok(()),
        holder if holder.is_empty() => bail!("it has no holder"),
        holder => bail!("{holder} holds it"),
    }
}

/// Rounds down to ten seconds, to print fewer lines.
fn elapsed_tens(since: Instant) -> u64 {
    since.elapsed().as_secs() / 10 * 10
}

async fn check_counts(home: &Site, member: &str, tenants: u32) -> Result<()> {
    let counts = member_status(home, member)
        .await?
        .tenants
        .unwrap_or_default();
    if (counts.ready, counts.total) != (tenants, tenants) {
        bail!(
            "only {} of {} Tenants are Ready",
            counts.ready,
            counts.total
        );
    }
    Ok(())
}

async fn observed_tenant(site: &Site, tenant: &str) -> Result<Tenant> {
    let Some(tenant_object) = site
        .fleet_client
        .in_namespace(NAMESPACE)
        .tenants()
        .get_opt(tenant)
        .await?
    else {
        bail!("the Tenant doesn't exist");
    };
    let observed = tenant_object
        .status
        .as_ref()
        .and_then(|status| status.observed_generation);
    if observed != tenant_object.metadata.generation {
        bail!("no status yet");
    }
    Ok(tenant_object)
}

async fn check_tenant(site: &Site, tenant: &str, applied: &str) -> Result<()> {
    let status = observed_tenant(site, tenant)
        .await?
        .status
        .unwrap_or_default();
    let type_ = condition_type(Kind::Ready, &site.member);
    match condition(&status.conditions, &type_) {
        Some(ready) if ready.status == "True" => {}
        Some(ready) => bail!("{}: {}", ready.reason, ready.message),
        None => bail!("no condition {type_}"),
    }
    match status.last_applied_chart {
        Some(chart) if chart == applied => Ok(()),
        chart => bail!("its chart is {}", chart.unwrap_or_default()),
    }
}

async fn check_summary(home: &Site, tenant: &str, members: &[&str], reason: &str) -> Result<()> {
    let status = observed_tenant(home, tenant)
        .await?
        .status
        .unwrap_or_default();
    let clusters = conditions::clusters(&status.conditions);
    for member in members {
        match clusters.get(*member) {
            Some(state) if state.ready.reason == reason => {}
            Some(state) => bail!("{member}: {}", state.ready.reason),
            None => bail!("{member} has not reported"),
        }
    }
    match condition(&status.conditions, conditions::READY) {
        Some(ready) if ready.status == "True" && ready.message == summary(members) => Ok(()),
        Some(ready) => bail!("{}", ready.message),
        None => bail!("no condition Ready"),
    }
}

async fn check_release(site: &Site, tenant: &str, revision: u32) -> Result<()> {
    let revisions = site
        .fleet_client
        .revisions(&workspace(tenant), &release(site, tenant))
        .await?;
    match revisions.last() {
        Some((newest, status)) if *newest == revision && status == "deployed" => Ok(()),
        newest => bail!("its newest revision is {newest:?}"),
    }
}

/// Selects the objects of the chart, with or without a namespace.
fn release_objects(site: &Site, tenant: &str) -> ListParams {
    let instance = release(site, tenant);
    ListParams::default().labels(&format!("app.kubernetes.io/instance={instance}"))
}

async fn check_deployment(site: &Site, tenant: &str, version: &str) -> Result<()> {
    let api: Api<Deployment> =
        Api::namespaced(site.fleet_client.client.clone(), &workspace(tenant));
    let deployments = api.list(&release_objects(site, tenant)).await?.items;
    let [deployment] = deployments.as_slice() else {
        bail!("{} Deployments of its release", deployments.len());
    };
    let chart = deployment
        .labels()
        .get("helm.sh/chart")
        .cloned()
        .unwrap_or_default();
    if chart != format!("{CHART}-{version}") {
        bail!("its Deployment has the chart {chart}");
    }
    let status = deployment.status.clone().unwrap_or_default();
    let replicas = deployment
        .spec
        .as_ref()
        .and_then(|spec| spec.replicas)
        .unwrap_or(1);
    let current = status.observed_generation == deployment.metadata.generation;
    let counts = [
        status.replicas,
        status.updated_replicas,
        status.available_replicas,
    ];
    if !current || replicas == 0 || counts.iter().any(|count| *count != Some(replicas)) {
        bail!("its Deployment is not available yet");
    }
    Ok(())
}

async fn check_gone(site: &Site, tenant: &str) -> Result<()> {
    let client = &site.fleet_client.client;
    if site
        .fleet_client
        .in_namespace(NAMESPACE)
        .tenants()
        .get_opt(tenant)
        .await?
        .is_some()
    {
        bail!("the Tenant exists");
    }
    let (workspace, release) = (workspace(tenant), release(site, tenant));
    let revisions = site.fleet_client.revisions(&workspace, &release).await?;
    if !revisions.is_empty() {
        bail!("revisions of its release exist: {revisions:?}");
    }
    let params = release_objects(site, tenant);
    let deployments: Api<Deployment> = Api::all(client.clone());
    let roles: Api<ClusterRole> = Api::all(client.clone());
    let objects = deployments.list_metadata(&params).await?.items.len()
        + roles.list_metadata(&params).await?.items.len();
    if objects != 0 {
        bail!("{objects} objects of its release exist");
    }
    match site.fleet_client.namespace(&workspace).await? {
        None => Ok(()),
        Some(_) => bail!("namespace {workspace} exists"),
    }
}
