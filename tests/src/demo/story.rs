//! The steps: join, install, upgrade, delete. Each ends when the apiservers show that it is done.

use std::collections::BTreeMap;

use anyhow::{Result, bail};
use krypton_common::{conditions::reason, names};
use serde_json::json;

use crate::{
    goals::{Goal, NAMESPACE, reach, workspace},
    screen::Screen,
    stage::{CHART, Site, Stage, VERSIONS, contains},
};

const MEMBERS: [&str; 3] = [names::SELF_CLUSTER, "edge-1", "edge-2"];
const ACME: &str = "acme";
const GLOBEX: &str = "globex";
const INITECH: &str = "initech";

pub(crate) async fn tell(screen: &Screen, stage: &mut Stage) -> Result<()> {
    let [first, second] = VERSIONS;
    screen.step("Two edges join the fleet: a labelled Secret each, with a kubeconfig");
    stage.join_edges(screen).await?;
    stage.start_hub(screen, first).await?;
    let home = &stage.home;
    let members = MEMBERS.map(|member| Goal::Member { home, member });
    reach(screen, stage, "the members", &members).await?;

    screen.step("Tenants: acme on all three clusters, globex on edge-1, initech on edge-2");
    for (site, tenant) in tenants(stage) {
        create(screen, site, tenant).await?;
    }
    let installed = everywhere(stage, first, 1, reason::INSTALLED);
    reach(screen, stage, "the first installation", &installed).await?;
    let counted: Vec<_> = counts(stage, [1, 2, 2]).collect();
    reach(screen, stage, "the counts", &counted).await?;
    show_fleet(screen, stage).await?;

    screen.step(&format!(
        "Upgrade: the hub is started again with chart version {second}"
    ));
    stage.stop_hub(screen).await?;
    stage.start_hub(screen, second).await?;
    let upgraded = everywhere(stage, second, 2, reason::UPGRADED);
    reach(screen, stage, "the upgrade", &upgraded).await?;
    for site in stage.sites() {
        show_releases(screen, stage, site).await?;
    }

    screen.step("Deletion: Tenant acme is deleted on edge-2, and only there");
    delete(screen, stage).await?;

    let seconds = screen.elapsed().as_secs();
    screen.step(&format!(
        "Every step was verified at the apiservers, in {seconds} s"
    ));
    Ok(())
}

/// The Tenants there are before one is deleted, and where.
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

/// All Tenants are at this version, and home knows it.
fn everywhere<'a>(
    stage: &'a Stage,
    version: &'a str,
    revision: u32,
    reason: &'a str,
) -> Vec<Goal<'a>> {
    let installed = |(site, tenant)| Goal::Installed {
        site,
        tenant,
        applied: stage.applied(version),
        version,
        revision,
    };
    let mut goals: Vec<_> = tenants(stage).map(installed).into();
    goals.push(over_all(stage, &MEMBERS, reason));
    goals
}

/// What home shows of acme.
fn over_all<'a>(stage: &'a Stage, members: &'a [&'a str], reason: &'a str) -> Goal<'a> {
    Goal::Aggregated {
        home: &stage.home,
        tenant: ACME,
        members,
        reason,
    }
}

/// What home shows of each member.
fn counts(stage: &Stage, tenants: [u32; 3]) -> impl Iterator<Item = Goal<'_>> {
    let counted = |(member, tenants)| Goal::Counted {
        home: &stage.home,
        member,
        tenants,
    };
    MEMBERS.into_iter().zip(tenants).map(counted)
}

async fn create(screen: &Screen, site: &Site, tenant: &str) -> Result<()> {
    let object = json!({
        "apiVersion": "mesh.openkcm.io/v1alpha1",
        "kind": "Tenant",
        "metadata": {"name": tenant, "namespace": NAMESPACE},
        "spec": {"workspace": workspace(tenant)},
    });
    let printed = site.cluster.apply(&object.to_string()).await?;
    screen.say(&format!("{}: {}", site.name(), printed.trim()));
    Ok(())
}

async fn show_fleet(screen: &Screen, stage: &Stage) -> Result<()> {
    screen.plain("");
    let clusters = stage
        .show(screen, &["kubectl", "krypton", "get", "clusters"])
        .await?;
    contains(&clusters, &MEMBERS)?;
    let shown = stage
        .show(screen, &["kubectl", "krypton", "get", "tenants", "-A"])
        .await?;
    contains(&shown, &[ACME, "3/3"])?;
    for edge in stage.edges() {
        let command = ["kubectl", "--context", edge.name(), "get", "tenants", "-A"];
        contains(&stage.show(screen, &command).await?, &[ACME, "Ready"])?;
    }
    Ok(())
}

/// What helm itself says of a cluster: all releases are of the second version, none of the first.
async fn show_releases(screen: &Screen, stage: &Stage, site: &Site) -> Result<()> {
    let [first, second] = VERSIONS.map(|version| format!("{CHART}-{version}"));
    let list = [
        "helm",
        "--kube-context",
        site.name(),
        "list",
        "--all-namespaces",
    ];
    let printed = stage.show(screen, &list).await?;
    contains(&printed, &[&second])?;
    if printed.contains(&first) {
        bail!("helm shows a release of {first} on {}", site.name());
    }
    Ok(())
}

async fn delete(screen: &Screen, stage: &Stage) -> Result<()> {
    let site = &stage.edge_2;
    let before = releases(stage).await?;
    let command = [
        "kubectl",
        "--context",
        site.name(),
        "delete",
        "tenant",
        ACME,
    ];
    stage.show(screen, &command).await?;
    let left = [names::SELF_CLUSTER, "edge-1"];
    let mut goals = vec![Goal::Gone { site, tenant: ACME }];
    goals.push(over_all(stage, &left, reason::UPGRADED));
    goals.extend(counts(stage, [1, 2, 1]));
    reach(screen, stage, "the deletion", &goals).await?;

    let workspace = workspace(ACME);
    let list = [
        "helm",
        "--kube-context",
        site.name(),
        "list",
        "-n",
        &workspace,
        "--short",
    ];
    let left = stage.show(screen, &list).await?;
    if !left.trim().is_empty() {
        bail!("helm shows releases in {workspace} on {}", site.name());
    }
    let mut expected = before;
    let release = names::tenant_release(ACME, &site.member);
    expected.retain(|(cluster, secret), _| {
        cluster != site.name() || !secret.contains(&format!(".{release}."))
    });
    let after = releases(stage).await?;
    if after != expected {
        bail!("releases of other Tenants have changed: {expected:?} have become {after:?}");
    }
    screen.say(&format!(
        "all other releases are as they were: {} Secrets unchanged",
        after.len()
    ));
    screen.plain("");
    stage
        .show(screen, &["kubectl", "krypton", "get", "tenants", "-A"])
        .await?;
    Ok(())
}

/// helm's Secrets of all clusters with their resourceVersions, by cluster and name.
async fn releases(stage: &Stage) -> Result<BTreeMap<(String, String), String>> {
    let mut all = BTreeMap::new();
    for site in stage.sites() {
        for (secret, version) in site.desk.releases().await? {
            all.insert((site.name().to_owned(), secret), version);
        }
    }
    Ok(all)
}
