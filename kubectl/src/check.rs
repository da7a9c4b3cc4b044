//! `kubectl krypton check`: checks the home cluster, the hub and each member, or whether Krypton or a chart can be
//! installed.

mod clock;
mod edge;
mod findings;
mod helm_rights;
mod manifest;
mod rights;

use std::path::PathBuf;

use clap::Args;
use futures::future::join_all;
use jiff::Timestamp;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use krypton_crds::edge_cluster::EdgeCluster;
use krypton_runtime::access::ServiceAccount;
use krypton_types::join_bundle::roots_in;
use krypton_types::validity::Validity;
use kube::{Api, CustomResourceExt as _, ResourceExt as _};
use serde_json::{Value, json};

use crate::error::KubectlError;
use crate::explain::sources::{Lookup, leader_lease, lookup};
use crate::home::{Connection, Target, search};
use crate::join_info;
use crate::local_clock::LocalClock;
use crate::output::{DocumentFormat, encode};
use crate::program::{Program, pods_of};
use crate::render::CommandOutput;
use crate::statement::{self, Line, Mark};

pub(crate) use edge::{connection_defect, read as read_bundle};

const EXAMPLES: &str = "\
Examples:
  # Check the home cluster, the hub and each member
  kubectl krypton check

  # Check whether Krypton can be installed on this cluster
  kubectl krypton check --pre

  # Check whether this cluster can join with a bundle
  kubectl krypton check --bundle NAME.yaml

  # Check whether Helm may install a rendered chart
  kubectl krypton check --manifest chart.yaml -n acme";

#[derive(Clone, Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct Check {
    /// Check before an installation: the version of Kubernetes, your rights, and CRDs that exist already
    #[arg(long)]
    pre: bool,
    /// Check before a cluster joins, with the join bundle in this file: the cluster, the bundle, and the connection from
    /// this machine to the hub
    #[arg(long, value_name = "FILE", conflicts_with = "pre")]
    bundle: Option<PathBuf>,
    /// Check the home cluster and the hub, but not the members
    #[arg(long, conflicts_with_all = ["pre", "bundle", "manifest"])]
    hub_only: bool,
    /// Check Helm's rights on this cluster for the rendered chart in this file, the output of helm template; - reads
    /// standard input
    #[arg(long, value_name = "FILE", conflicts_with = "pre")]
    manifest: Option<PathBuf>,
    /// Account that Helm acts as; by default that of the agent or hub on this cluster
    #[arg(long, value_name = "NAMESPACE:NAME", value_parser = parse_account, requires = "manifest")]
    account: Option<ServiceAccount>,
    /// Output for programs
    #[arg(short, long, value_name = "FORMAT")]
    output: Option<DocumentFormat>,
}

impl Check {
    /// Returns whether the only namespace of the command is the hub's. A rendered chart has a namespace, too.
    pub(super) fn needs_only_hub(&self) -> bool {
        self.manifest.is_none()
    }
}

fn parse_account(text: &str) -> Result<ServiceAccount, &'static str> {
    let account = text
        .split_once(':')
        .and_then(|(namespace, name)| ServiceAccount::parse(&format!("{namespace}/{name}"), ""));
    account.ok_or("write NAMESPACE:NAME, as krypton-system:krypton-agent-helm")
}

pub(super) async fn run(
    args: Check,
    target: &Target<'_>,
    now: Timestamp,
) -> Result<CommandOutput, KubectlError> {
    let clock = LocalClock::start(now);
    let bundle = args.bundle.as_deref().map(edge::read).transpose()?;
    let manifest = args.manifest.as_deref().map(manifest::read).transpose()?;
    let cluster = target.connect().await?;
    let now = clock.now();
    let helm_rights = async {
        let Some(manifest) = &manifest else {
            return Vec::new();
        };
        let namespace = target.args.namespace.as_deref();
        let account = args.account.as_ref();
        let before_join = bundle.is_some();
        let checking = helm_rights::check(manifest, account, namespace, before_join, &cluster);
        Box::pin(checking).await.unwrap_or_else(|line| vec![line])
    };
    let lines = match &bundle {
        Some(bundle) => {
            let mut lines = check_before_installation(&cluster, Program::Agent, Some(clock)).await;
            lines.extend(Box::pin(edge::check(bundle, target.env, now)).await);
            lines.extend(Box::pin(helm_rights).await);
            lines
        }
        None if manifest.is_some() => check_cluster(&cluster, Some(clock), helm_rights).await,
        None if args.pre => check_before_installation(&cluster, Program::Hub, Some(clock)).await,
        None => check_installation(&cluster, args.hub_only, clock, now).await,
    };
    let has_failed = has_failed(&lines);
    let output = CommandOutput::stdout(match args.output {
        Some(format) => {
            let value = json!({"passed": !has_failed, "lines": statement::to_json(&lines)});
            encode(format.into(), &value)?
        }
        None => statement::to_text(&lines),
    });
    match has_failed {
        true => Err(KubectlError::NotReady { output }),
        false => Ok(output),
    }
}

/// Returns whether a line reports a defect, or that something is unknown.
fn has_failed(lines: &[Line]) -> bool {
    let is_defect = |line: &Line| matches!(line.mark, Mark::Problem | Mark::Unknown);
    lines.iter().any(is_defect)
}

/// Fails with the lines if the program's chart cannot be installed on a cluster.
pub(crate) async fn ensure_installable(
    cluster: &Connection,
    program: Program,
) -> Result<(), KubectlError> {
    let lines = check_before_installation(cluster, program, None).await;
    match has_failed(&lines) {
        true => Err(KubectlError::NotReady {
            output: CommandOutput {
                stdout: statement::to_text(&lines),
                stderr: format!(
                    "nothing was installed on the cluster {:?}; if your values leave out what a check requires, add --skip-checks\n",
                    cluster.context
                ),
            },
        }),
        false => Ok(()),
    }
}

/// Whether the program's chart can be installed on a cluster.
async fn check_before_installation(
    cluster: &Connection,
    program: Program,
    clock: Option<LocalClock>,
) -> Vec<Line> {
    check_cluster(cluster, clock, async {
        let rights = rights::of_user(cluster, program);
        let (crds, rights) = Box::pin(futures::future::join(read_crds(cluster), rights)).await;
        let mut lines = vec![findings::rights(&rights)];
        lines.extend(findings::crds_of_original(&crds));
        lines
    })
    .await
}

async fn check_installation(
    home: &Connection,
    hub_only: bool,
    clock: LocalClock,
    now: Timestamp,
) -> Vec<Line> {
    let namespaces = home.hub_namespaces();
    let info = search(&namespaces, async |namespace| {
        join_info::read(home, namespace).await
    });
    let members = home.members();
    check_cluster(home, Some(clock), async {
        let (crds, (lease, searched_namespaces), info, members) = Box::pin(async {
            tokio::join!(
                read_crds(home),
                leader_lease(home),
                info,
                members.list_values()
            )
        })
        .await;
        let mut lines = findings::crds(&crds);
        lines.extend(findings::leader(&lease, &searched_namespaces, now));
        lines.extend(Box::pin(check_hub(home, &searched_namespaces, now)).await);
        let info = info.ok().flatten().map(|(_, info)| info);
        if let Some(info) = &info {
            lines.extend(findings::authority(&validities(&info.ca_pem), now));
            lines.extend(findings::addresses(&info.addresses));
        }
        let hub_version = info.map(|info| info.version);
        lines.extend(hub_version.as_deref().map(findings::hub_version));
        // Without the CRD, the list of the members fails too.
        let crd = EdgeCluster::crd_name();
        let is_missing = |(name, lookup): &(String, Lookup<_>)| {
            *name == crd && matches!(lookup, Lookup::NotFound)
        };
        if !hub_only && (members.is_ok() || !crds.iter().any(is_missing)) {
            lines.extend(findings::members(&members, hub_version.as_deref(), now));
        }
        lines
    })
    .await
}

/// Checks the hub's pods and the rights of their account.
async fn check_hub(home: &Connection, namespaces: &[String], now: Timestamp) -> Vec<Line> {
    let pods = search(namespaces, async |namespace| {
        let pods = pods_of(home, namespace, Program::Hub).await?;
        Ok((!pods.is_empty()).then_some(pods))
    })
    .await;
    let mut lines = findings::pods(&pods, now);
    if let Ok(Some((namespace, pods))) = &pods
        && let Some(account) = pods.iter().find_map(account_of)
    {
        let rights = rights::of_hub(home, namespace, account).await;
        lines.push(findings::hub_rights((namespace, account), &rights));
    }
    lines
}

fn account_of(pod: &Value) -> Option<&str> {
    pod.pointer("/spec/serviceAccountName")?.as_str()
}

/// Returns the validity of each certificate in a PEM.
pub(crate) fn validities(pem: &str) -> Vec<Validity> {
    let roots = roots_in(pem).unwrap_or_default();
    let validities = roots
        .iter()
        .filter_map(|root| Validity::of_certificate(root));
    validities.collect()
}

/// Adds the version of Kubernetes to the other lines, and how its clock differs from `clock`. If the API server does
/// not respond, omits the others: they would all fail for the same reason.
async fn check_cluster(
    cluster: &Connection,
    clock: Option<LocalClock>,
    other_checks: impl Future<Output = Vec<Line>>,
) -> Vec<Line> {
    let version = lookup(cluster, "get /version", cluster.client.apiserver_version()).await;
    let mut lines = vec![findings::kubernetes(&version)];
    if !matches!(version, Lookup::Failed(_)) {
        if let Some(clock) = clock {
            let ahead = clock::ahead(cluster, clock).await;
            lines.extend(ahead.map(|ahead| findings::clock(ahead, "this machine")));
        }
        lines.extend(Box::pin(other_checks).await);
    }
    lines
}

async fn read_crds(cluster: &Connection) -> Vec<(String, Lookup<CustomResourceDefinition>)> {
    let api: Api<CustomResourceDefinition> = Api::all(cluster.client.clone());
    let lookups = krypton_crds::all().into_iter().map(async |crd| {
        let name = crd.name_any();
        let crd_lookup = lookup(cluster, "get customresourcedefinitions", api.get(&name)).await;
        (name, crd_lookup)
    });
    join_all(lookups).await
}
