//! The steps: join, install, upgrade, delete, hand over. Each ends when the API servers show the result.

use std::collections::BTreeMap;

use krypton_tests::Mode;
use krypton_types::{conditions::reason, names};

use anyhow::{Result, bail};
use serde_json::json;
use tokio::time::Instant;

use crate::{
    goals::{
        Goal, NAMESPACE, aggregated, counted, gone, installed, member, reach, spare, taken_over,
        workspace,
    },
    screen::Screen,
    stage::{CHART, PROXY_GRACE, Site, Stage, VERSIONS, check_contains},
};

const MEMBERS: [&str; 3] = [names::SELF_CLUSTER, "edge-1", "edge-2"];
const ACME: &str = "acme";
const GLOBEX: &str = "globex";
const INITECH: &str = "initech";
const HOOLI: &str = "hooli";
const GET_TENANTS: &str = "kubectl krypton get tenants -A";

pub(crate) async fn play(screen: &Screen, stage: &mut Stage) -> Result<()> {
    let [first, second] = VERSIONS;
    screen.step(
        "Two edges join the fleet: edge-1 by an agent, edge-2 by a Secret with its kubeconfig",
    );
    stage.create_namespace().await?;
    stage.start_hub(screen, first).await?;
    stage.add_kubeconfig(screen, &stage.edge_2).await?;
    stage.create_bundle(screen).await?;
    stage.start_agent(screen).await?;
    let home = &stage.home;
    let modes = [Mode::SelfCluster, Mode::Agent, Mode::Proxy];
    let members = MEMBERS.into_iter().zip(modes);
    let members = members.map(|(name, mode)| member(home, name, mode));
    reach(screen, stage, "the members", members.collect()).await?;

    screen.step("Tenants: acme on all three clusters, globex on edge-1, initech on edge-2");
    for (site, tenant) in tenants(stage) {
        create(screen, site, tenant).await?;
    }
    let installed = installed_everywhere(stage, first, 1, reason::INSTALLED);
    reach(screen, stage, "the first installation", installed).await?;
    let counts = tenant_counts(stage, [1, 2, 2]).collect();
    reach(screen, stage, "the counts", counts).await?;
    show_fleet(screen, stage).await?;

    screen.step(&format!(
        "Upgrade: the hub is started again with chart version {second}"
    ));
    stage.stop_hub(screen).await?;
    stage.start_hub(screen, second).await?;
    let upgraded = installed_everywhere(stage, second, 2, reason::UPGRADED);
    reach(screen, stage, "the upgrade", upgraded).await?;
    for site in stage.sites() {
        show_releases(screen, stage, site).await?;
    }

    screen.step("Deletion: Tenant acme is deleted on edge-2, and only there");
    demonstrate_deletion(screen, stage).await?;

    screen
        .step("Handover: the agent of edge-1 is killed, the hub takes over, the agent comes back");
    demonstrate_handover(screen, stage).await?;

    let seconds = screen.elapsed().as_secs();
    screen.step(&format!(
        "Every step was verified at the apiservers, in {seconds} s"
    ));
    Ok(())
}

/// All Tenants before the first deletion, with their clusters.
fn tenants(stage: &Stage) -> [(&Site, &'static str); 5] {
    let [home, edge_1, edge_2] = stage.sites();
    [
        (home, ACME),
        (edge_1, ACME),
        (edge_2, ACME),
        (edge_1, GLOBEX),
        (edge_2, INITECH),
    ]
}

/// All Tenants have this version, and home shows it.
fn installed_everywhere<'a>(
    stage: &'a Stage,
    version: &'a str,
    revision: u32,
    reason: &'a str,
) -> Vec<Goal<'a>> {
    let installed = |(site, tenant)| installed(stage, site, tenant, version, revision);
    let mut goals: Vec<_> = tenants(stage).map(installed).into();
    goals.push(aggregated(&stage.home, ACME, &MEMBERS, reason));
    goals
}

/// The state of each member on home.
fn tenant_counts(stage: &Stage, tenants: [u32; 3]) -> impl Iterator<Item = Goal<'_>> {
    let counted = |(member, tenants)| counted(&stage.home, member, tenants);
    MEMBERS.into_iter().zip(tenants).map(counted)
}

async fn create(screen: &Screen, site: &Site, tenant: &str) -> Result<()> {
    let object = json!({
        "apiVersion": "mesh.openkcm.io/v1alpha1",
        "kind": "Tenant",
        "metadata": {"name": tenant, "namespace": NAMESPACE},
        "spec": {"workspace": workspace(tenant)},
    });
    let output = site.cluster.apply(&object.to_string()).await?;
    screen.event(&format!("{}: {}", site.name(), output.trim()));
    Ok(())
}

async fn delete(screen: &Screen, stage: &Stage, site: &Site, tenant: &str) -> Result<()> {
    let command = format!("kubectl --context {} delete tenant {tenant}", site.name());
    stage.show(screen, &command).await.map(drop)
}

async fn show_fleet(screen: &Screen, stage: &Stage) -> Result<()> {
    show_clusters(screen, stage).await?;
    let output = stage.show(screen, GET_TENANTS).await?;
    check_contains(&output, &[ACME, "3/3"])?;
    for edge in stage.edges() {
        let command = format!("kubectl --context {} get tenants -A", edge.name());
        check_contains(&stage.show(screen, &command).await?, &[ACME, "Ready"])?;
    }
    Ok(())
}

/// Shows Helm's own list of a cluster: all releases have the second version.
async fn show_releases(screen: &Screen, stage: &Stage, site: &Site) -> Result<()> {
    let [first, second] = VERSIONS.map(|version| format!("{CHART}-{version}"));
    let list = format!("helm --kube-context {} list --all-namespaces", site.name());
    let output = stage.show(screen, &list).await?;
    check_contains(&output, &[&second])?;
    if output.contains(&first) {
        bail!("helm shows a release of {first} on {}", site.name());
    }
    Ok(())
}

async fn demonstrate_deletion(screen: &Screen, stage: &Stage) -> Result<()> {
    let site = &stage.edge_2;
    let releases_before = releases(stage).await?;
    delete(screen, stage, site, ACME).await?;
    let remaining_members = [names::SELF_CLUSTER, "edge-1"];
    let remaining = aggregated(&stage.home, ACME, &remaining_members, reason::UPGRADED);
    let mut goals = vec![gone(site, ACME), remaining];
    goals.extend(tenant_counts(stage, [1, 2, 1]));
    reach(screen, stage, "the deletion", goals).await?;

    let workspace = workspace(ACME);
    let context = site.name();
    let list = format!("helm --kube-context {context} list -n {workspace} --short");
    let output = stage.show(screen, &list).await?;
    if !output.trim().is_empty() {
        bail!("helm shows releases in {workspace} on {}", site.name());
    }
    let mut expected = releases_before;
    let release = names::tenant_release(ACME, &site.member);
    expected.retain(|(cluster, secret), _| {
        cluster != site.name() || !secret.contains(&format!(".{release}."))
    });
    let releases_after = releases(stage).await?;
    if releases_after != expected {
        bail!(
            "releases of other Tenants have changed: {expected:?} have become {releases_after:?}"
        );
    }
    screen.event(&format!(
        "all other releases are unchanged: {} Secrets",
        releases_after.len()
    ));
    screen.print("");
    stage.show(screen, GET_TENANTS).await?;
    Ok(())
}

/// The hub takes over from the agent of edge-1, and the agent from the hub. A Tenant created during this time shows
/// that each reconciles.
async fn demonstrate_handover(screen: &Screen, stage: &mut Stage) -> Result<()> {
    let [_, second] = VERSIONS;
    let releases_before = releases(stage).await?;
    let agent_holder = stage.edge_1.fleet_client.holder().await?;
    stage.add_kubeconfig(screen, &stage.edge_1).await?;
    let goals = vec![spare(&stage.home, &stage.edge_1, &agent_holder)];
    reach(screen, stage, "the hub's own way to edge-1", goals).await?;

    stage.kill_agent(screen).await?;
    let killed_at = Instant::now();
    create(screen, &stage.edge_1, HOOLI).await?;
    screen.event(&format!(
        "{HOOLI} waits: the hub acts when the agent has been away for {PROXY_GRACE} and its Lease is dead, \
         unchanged for 60 s"
    ));
    let edge = &stage.edge_1;
    let wait = "a killed agent's Lease lives for up to 60 s";
    let goals = vec![
        taken_over(edge, &agent_holder, "hub/", wait, killed_at),
        member(&stage.home, &edge.member, Mode::Proxy),
        installed(stage, edge, HOOLI, second, 1),
    ];
    reach(screen, stage, "the hub to take over", goals).await?;
    let hub_holder = edge.fleet_client.holder().await?;
    show_clusters(screen, stage).await?;

    let started_at = Instant::now();
    stage.start_agent(screen).await?;
    let edge = &stage.edge_1;
    let wait = "the hub gives the Lease up when the agent is ready to reconcile";
    let goals = vec![
        taken_over(edge, &hub_holder, "agent/", wait, started_at),
        member(&stage.home, &edge.member, Mode::Agent),
    ];
    reach(screen, stage, "the agent to reconnect", goals).await?;
    delete(screen, stage, edge, HOOLI).await?;
    let mut goals = vec![gone(edge, HOOLI)];
    goals.extend(tenant_counts(stage, [1, 2, 1]));
    reach(screen, stage, "the agent's deletion", goals).await?;
    let releases_after = releases(stage).await?;
    if releases_after != releases_before {
        bail!(
            "the handovers have changed releases: {releases_before:?} have become {releases_after:?}"
        );
    }
    screen.event(&format!(
        "the handovers changed no release: {} Secrets",
        releases_after.len()
    ));
    show_clusters(screen, stage).await
}

async fn show_clusters(screen: &Screen, stage: &Stage) -> Result<()> {
    screen.print("");
    let output = stage.show(screen, "kubectl krypton get clusters").await?;
    check_contains(&output, &MEMBERS)
}

/// Returns Helm's Secrets of all clusters with their resourceVersions, by cluster and name.
async fn releases(stage: &Stage) -> Result<BTreeMap<(String, String), String>> {
    let mut all = BTreeMap::new();
    for site in stage.sites() {
        for (secret, version) in site.fleet_client.releases().await? {
            all.insert((site.name().to_owned(), secret), version);
        }
    }
    Ok(all)
}
