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

use anyhow::{Context, Result, bail, ensure};
use futures::{FutureExt, future::LocalBoxFuture};
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

/// A goal with its name. The check describes the reached goal, or returns an error with the difference.
pub(crate) struct Goal<'a> {
    name: String,
    check: Box<dyn Fn() -> LocalBoxFuture<'a, Result<String>> + 'a>,
}

impl<'a> Goal<'a> {
    fn new<F>(name: String, check: impl Fn() -> F + 'a) -> Self
    where
        F: Future<Output = Result<String>> + 'a,
    {
        let check = Box::new(move || check().boxed_local());
        Self { name, check }
    }
}

/// Home shows the member as connected and reconciled, in this mode.
pub(crate) fn member<'a>(home: &'a Site, member: &'a str, mode: Mode) -> Goal<'a> {
    Goal::new(member.to_owned(), move || async move {
        let status = member_status(home, member).await?;
        let expected = [("Connected", "Connected"), ("Healthy", "Reconciling")];
        check_conditions(&status, &expected)?;
        check_mode(&status, mode)?;
        let who = match mode {
            Mode::SelfCluster | Mode::Proxy => "the hub",
            Mode::Agent => "its agent",
        };
        Ok(format!("{member}: connected, and {who} manages it"))
    })
}

/// The hub can reach the member, and its agent still holds the Lease.
pub(crate) fn spare<'a>(home: &'a Site, site: &'a Site, holder: &'a str) -> Goal<'a> {
    Goal::new(format!("home/{}", site.member), move || async move {
        let status = member_status(home, &site.member).await?;
        let expected = [
            ("TargetClusterResolved", "Resolved"),
            ("Connected", "Connected"),
        ];
        check_conditions(&status, &expected)?;
        check_mode(&status, Mode::Agent)?;
        let actual = site.fleet_client.holder().await?;
        ensure!(actual == holder, "{actual:?} holds its Lease");
        Ok(format!(
            "{}: the hub can reach it now, and leaves it to {holder}",
            site.member
        ))
    })
}

/// A new holder, whose identity starts with `by`, has the member's Lease. `wait` explains the wait since `since`.
pub(crate) fn taken_over<'a>(
    site: &'a Site,
    previous: &'a str,
    by: &'a str,
    wait: &'a str,
    since: Instant,
) -> Goal<'a> {
    Goal::new(
        format!("the Lease of {}", site.name()),
        move || async move {
            let seconds = since.elapsed().as_secs_f64();
            let taken_over = check_taken_over(site, previous, by).await;
            // Rounds down to ten seconds, to print fewer lines.
            taken_over.with_context(|| format!("after {} s: {wait}", seconds as u64 / 10 * 10))?;
            let (name, by) = (site.name(), by.trim_end_matches('/'));
            Ok(format!(
                "{name}: the {by} holds the Lease after {seconds:.1} s"
            ))
        },
    )
}

/// The Tenant is Ready, Helm's newest revision is deployed, and the Deployment has this version and is available.
pub(crate) fn installed<'a>(
    stage: &'a Stage,
    site: &'a Site,
    tenant: &'a str,
    version: &'a str,
    revision: u32,
) -> Goal<'a> {
    Goal::new(format!("{}/{tenant}", site.name()), move || async move {
        check_tenant(site, tenant, &stage.applied(version)).await?;
        check_release(site, tenant, revision).await?;
        check_deployment(site, tenant, version).await?;
        Ok(format!(
            "{}: {tenant} is Ready, release {} is at revision {revision}, its Deployment of {CHART}-{version} available",
            site.name(),
            release(site, tenant),
        ))
    })
}

/// Home's Tenant is Ready on exactly these members, each for this reason.
pub(crate) fn aggregated<'a>(
    home: &'a Site,
    tenant: &'a str,
    members: &'a [&'a str],
    reason: &'a str,
) -> Goal<'a> {
    let name = format!("home/{tenant} over all clusters");
    Goal::new(name, move || async move {
        let count = members.len();
        let summary = format!("{count} of {count} clusters ready");
        let observed = observed_tenant(home, tenant).await?;
        let status = observed.status.unwrap_or_default();
        let clusters = conditions::clusters(&status.conditions);
        for member in members {
            match clusters.get(*member) {
                Some(state) if state.ready.reason == reason => {}
                Some(state) => bail!("{member}: {}", state.ready.reason),
                None => bail!("{member} has not reported"),
            }
        }
        match condition(&status.conditions, conditions::READY) {
            Some(ready) if ready.status == "True" && ready.message == summary => {}
            Some(ready) => bail!("{}", ready.message),
            None => bail!("no condition Ready"),
        }
        Ok(format!("home: {tenant} shows {summary}"))
    })
}

/// Home counts this number of Tenants on the member, all of them Ready.
pub(crate) fn counted<'a>(home: &'a Site, member: &'a str, tenants: u32) -> Goal<'a> {
    let name = format!("{member} in the list of clusters");
    Goal::new(name, move || async move {
        let status = member_status(home, member).await?;
        let counts = status.tenants.unwrap_or_default();
        ensure!(
            (counts.ready, counts.total) == (tenants, tenants),
            "only {} of {} Tenants are Ready",
            counts.ready,
            counts.total
        );
        Ok(format!(
            "home: {tenants} of {tenants} Tenants of {member} are Ready"
        ))
    })
}

/// The Tenant, its release, its objects and its namespace are gone.
pub(crate) fn gone<'a>(site: &'a Site, tenant: &'a str) -> Goal<'a> {
    Goal::new(format!("{}/{tenant}", site.name()), move || async move {
        check_gone(site, tenant).await?;
        Ok(format!(
            "{}: {tenant}, its release and its objects are gone, and namespace {} too",
            site.name(),
            workspace(tenant),
        ))
    })
}

/// Waits until all goals are reached, and shows reached goals and differences. Fails immediately if the acting process
/// has ended.
pub(crate) async fn reach(
    screen: &Screen,
    stage: &Stage,
    what: &str,
    goals: Vec<Goal<'_>>,
) -> Result<()> {
    let mut reached = vec![false; goals.len()];
    let mut reported = String::new();
    let mut next_progress = Instant::now() + PROGRESS_INTERVAL;
    let check_running = || stage.check_running();
    let waiting = eventually_while_running(what, STEP_DEADLINE, check_running, async || {
        let mut missing = Vec::new();
        for (goal, reached) in goals.iter().zip(&mut reached) {
            match (goal.check)().await {
                Err(difference) => missing.push(format!("{} ({difference:#})", goal.name)),
                Ok(_) if *reached => {}
                Ok(description) => {
                    *reached = true;
                    screen.event(&description);
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

async fn check_taken_over(site: &Site, previous: &str, by: &str) -> Result<()> {
    match site.fleet_client.holder().await? {
        holder if holder != previous && holder.starts_with(by) => Ok(()),
        holder if holder.is_empty() => bail!("it has no holder"),
        holder => bail!("{holder} holds it"),
    }
}

async fn find_tenant(site: &Site, tenant: &str) -> kube::Result<Option<Tenant>> {
    let in_namespace = site.fleet_client.in_namespace(NAMESPACE);
    in_namespace.tenants().get_opt(tenant).await
}

async fn observed_tenant(site: &Site, tenant: &str) -> Result<Tenant> {
    let found = find_tenant(site, tenant).await?;
    let found = found.context("the Tenant doesn't exist")?;
    let status = found.status.as_ref();
    let observed = status.and_then(|status| status.observed_generation);
    ensure!(observed == found.metadata.generation, "no status yet");
    Ok(found)
}

async fn check_tenant(site: &Site, tenant: &str, applied: &str) -> Result<()> {
    let observed = observed_tenant(site, tenant).await?;
    let status = observed.status.unwrap_or_default();
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
    let found = find_tenant(site, tenant).await?;
    ensure!(found.is_none(), "the Tenant exists");
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
