//! `kubectl krypton get`: clusters, Tenants and KryptonDeployments as tables, or the objects themselves.

mod clusters;
mod deployments;
mod tenants;
mod watch;

use std::io::Write;

use clap::{Args, ValueEnum};
use jiff::Timestamp;
use krypton_crds::edge_cluster::EdgeCluster;
use krypton_crds::krypton_deployment::KryptonDeployment;
use krypton_crds::tenant::Tenant;
use kube::core::ApiResource;
use serde_json::Value;

use crate::error::KubectlError;
use crate::home::{Connection, HomeArgs, Place, connect, list};
use crate::render::{Output, Printed, Table, encode};

pub(crate) use clusters::clusters_table;
pub(crate) use deployments::deployments_table;
pub(crate) use tenants::tenants_table;

#[derive(Clone, Debug, Args)]
pub(crate) struct Get {
    pub(crate) kind: Kind,
    /// The one of this name; a Tenant with a line for each cluster that it is on.
    #[arg(conflicts_with = "all_namespaces")]
    pub(crate) name: Option<String>,
    /// Namespace of Tenants and KryptonDeployments; by default that of the context.
    #[arg(
        short,
        long,
        value_name = "NAMESPACE",
        conflicts_with = "all_namespaces"
    )]
    pub(crate) namespace: Option<String>,
    /// Those of all namespaces.
    #[arg(short = 'A', long)]
    pub(crate) all_namespaces: bool,
    /// Format: a table with more columns and a line per cluster, or the objects themselves.
    #[arg(short, long, value_name = "FORMAT")]
    pub(crate) output: Option<Output>,
    /// Go on with each change, until Ctrl-C.
    #[arg(short, long)]
    pub(crate) watch: bool,
    #[command(flatten)]
    pub(crate) home: HomeArgs,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Kind {
    #[value(aliases = ["cluster", "edgecluster", "edgeclusters", "ec"])]
    Clusters,
    #[value(aliases = ["tenant", "tn"])]
    Tenants,
    #[value(aliases = ["deployment", "kryptondeployment", "kryptondeployments", "kd"])]
    Deployments,
}

pub(crate) async fn run(
    get: Get,
    env: &dyn Fn(&str) -> Option<String>,
    now: Timestamp,
    out: &mut dyn Write,
) -> Result<Printed, KubectlError> {
    let home = connect(&get.home, env).await?;
    let place = place(&get, &home);
    let clusters = ApiResource::erase::<EdgeCluster>(&());
    let kind = match get.kind {
        Kind::Clusters => &clusters,
        Kind::Tenants => &ApiResource::erase::<Tenant>(&()),
        Kind::Deployments => &ApiResource::erase::<KryptonDeployment>(&()),
    };
    if get.watch {
        watch::run(&get, kind, &place, &home, out).await?;
        return Ok(Printed::default());
    }
    let name = get.name.as_deref();
    let (client, context) = (home.client.clone(), home.context.as_str());
    let objects = list(client.clone(), kind, &place, name, context).await?;
    if let (Some(name), true) = (name, objects.is_empty()) {
        return Err(home.not_found(&kind.kind, name, &place));
    }
    let one = name
        .and_then(|_| objects.first())
        .filter(|_| get.kind == Kind::Tenants);
    if let (Some(tenant), None | Some(Output::Wide)) = (one, get.output) {
        let members = if tenants::is_summary(tenant) {
            list(client, &clusters, &Place::Cluster, None, context).await?
        } else {
            Vec::new()
        };
        return Ok(tenants::one_tenant(tenant, &members, now));
    }
    printed(&get, &place, objects, now)
}

fn place(get: &Get, home: &Connection) -> Place {
    match (&get.namespace, get.kind) {
        (_, Kind::Clusters) => Place::Cluster,
        _ if get.all_namespaces => Place::Cluster,
        (Some(namespace), _) => Place::Namespace(namespace.clone()),
        (None, _) => Place::Namespace(home.namespace.clone()),
    }
}

fn printed(
    get: &Get,
    place: &Place,
    objects: Vec<Value>,
    now: Timestamp,
) -> Result<Printed, KubectlError> {
    let stdout = match get.output {
        Some(format @ (Output::Json | Output::Yaml)) => encode(format, objects)?,
        _ if objects.is_empty() => {
            let stderr = match place {
                Place::Cluster => "No resources found\n".to_owned(),
                Place::Namespace(namespace) => {
                    format!("No resources found in {namespace} namespace.\n")
                }
            };
            return Ok(Printed {
                stdout: String::new(),
                stderr,
            });
        }
        _ => table_of(get, &objects, now).render(),
    };
    Ok(Printed {
        stdout,
        stderr: String::new(),
    })
}

fn table_of(get: &Get, objects: &[Value], now: Timestamp) -> Table {
    let wide = get.output == Some(Output::Wide);
    match get.kind {
        Kind::Clusters => clusters_table(objects, wide, now),
        Kind::Tenants => tenants_table(objects, wide, now),
        Kind::Deployments => deployments_table(objects, wide, now),
    }
}
