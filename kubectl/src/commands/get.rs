//! `kubectl krypton get`: clusters, Tenants and KryptonDeployments as tables, or the objects themselves.

mod clusters;
mod deployments;
mod tenants;
mod watch;

use std::io::Write;

use clap::Args;
use jiff::Timestamp;
use serde_json::Value;

use crate::error::KubectlError;
use crate::home::{Env, HomeArgs, connect};
use crate::kind::Kind;
use crate::objects::Scope;
use crate::render::{Output, Printed, Table, View, encode_list};

pub(crate) use clusters::clusters_table;
pub(crate) use deployments::deployments_table;
pub(crate) use tenants::tenants_table;

#[derive(Clone, Debug, Args)]
pub(crate) struct Get {
    #[arg(value_parser = Kind::plural(&Kind::ALL))]
    kind: Kind,
    /// Only the object of this name; for a Tenant, with one line for each of its clusters
    #[arg(conflicts_with = "all_namespaces")]
    name: Option<String>,
    /// Namespace of Tenants and KryptonDeployments; by default that of the context
    #[arg(
        short,
        long,
        value_name = "NAMESPACE",
        conflicts_with = "all_namespaces"
    )]
    namespace: Option<String>,
    /// Objects of all namespaces
    #[arg(short = 'A', long)]
    all_namespaces: bool,
    /// Format: a table with more details and one line per cluster, or the objects themselves
    #[arg(short, long, value_name = "FORMAT")]
    output: Option<Output>,
    /// Print each change, until Ctrl-C
    #[arg(short, long)]
    watch: bool,
    #[command(flatten)]
    home: HomeArgs,
}

pub(crate) async fn run(
    get: Get,
    env: Env<'_>,
    now: Timestamp,
    out: &mut dyn Write,
) -> Result<Printed, KubectlError> {
    let home = connect(&get.home, env).await?;
    let scope = match get.all_namespaces {
        true => Scope::All,
        false => get.kind.scope(get.namespace.as_deref(), &home),
    };
    let objects = home.untyped(get.kind.resource(), &scope);
    if get.watch {
        watch::run(&get, objects, out).await?;
        return Ok(Printed::default());
    }
    let name = get.name.as_deref();
    let found = objects.values(name).await?;
    if let (Some(name), []) = (name, found.as_slice()) {
        return Err(objects.not_found(&objects.kind.kind, name));
    }
    match (get.output, found.as_slice()) {
        (Some(format @ (Output::Json | Output::Yaml)), _) => {
            encode_list(format, found).map(Printed::stdout)
        }
        (_, []) => Ok(Printed {
            stderr: match scope {
                Scope::All => "No resources found\n".to_owned(),
                Scope::Namespace(name) => format!("No resources found in {name} namespace.\n"),
            },
            ..Printed::default()
        }),
        (_, [tenant, ..]) if get.kind == Kind::Tenant && name.is_some() => {
            let members = match tenants::is_summary(tenant) {
                true => {
                    let members = home.untyped(Kind::Cluster.resource(), &Scope::All);
                    members.values(None).await?
                }
                false => Vec::new(),
            };
            Ok(tenants::one_tenant(tenant, &members, now))
        }
        _ => Ok(Printed::stdout(table(&get, &found, now).render())),
    }
}

fn table(get: &Get, objects: &[Value], now: Timestamp) -> Table {
    let wide = get.output == Some(Output::Wide);
    let view = View { wide, now };
    match get.kind {
        Kind::Cluster => clusters_table(objects, view),
        Kind::Tenant => tenants_table(objects, view),
        Kind::Deployment => deployments_table(objects, view),
    }
}
