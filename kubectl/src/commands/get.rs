//! `kubectl krypton get`: clusters, Tenants and KryptonDeployments as tables, or the objects themselves.

mod clusters;
mod deployments;
mod fleet;
mod tenants;
mod watch;

use std::io::Write;
use std::net::SocketAddr;

use clap::Args;
use jiff::Timestamp;
use krypton_types::names::namespace_name;
use serde_json::Value;

use crate::debug_port::parse_loopback_address;
use crate::error::KubectlError;
use crate::fleet_tenants::{self, TenantFilter};
use crate::home::{Connection, Target};
use crate::kind::Kind;
use crate::objects::Scope;
use crate::render::{CommandOutput, OutputFormat, Table, View, encode_list};

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
    /// Only objects with these labels, as in -l team=a
    #[arg(short = 'l', long, value_name = "LABELS", conflicts_with = "fleet")]
    selector: Option<String>,
    /// List the Tenants that the members report, including Tenants that do not exist on the home cluster; by default in
    /// all namespaces. You need the right to forward ports of the hub's pods
    #[arg(long, conflicts_with = "watch")]
    fleet: bool,
    /// Only the Tenants on this member
    #[arg(long, value_name = "MEMBER", requires = "fleet")]
    on: Option<String>,
    /// Only Tenants that are not Ready
    #[arg(long, requires = "fleet")]
    not_ready: bool,
    /// Namespace of the hub; by default krypton-system, else krypton, else that of the context
    #[arg(long, value_name = "NAMESPACE", value_parser = namespace_name, requires = "fleet")]
    hub_namespace: Option<String>,
    /// Address of the debug port, instead of the leader's pod
    #[arg(long, hide = true, value_name = "HOST:PORT", value_parser = parse_loopback_address, requires = "fleet")]
    debug_address: Option<SocketAddr>,
    /// Format: a table with more details and one line per cluster, only the names, or the objects themselves
    #[arg(short, long, value_name = "FORMAT")]
    output: Option<OutputFormat>,
    /// Print each change, until Ctrl-C
    #[arg(short, long)]
    watch: bool,
}

pub(crate) async fn run(
    get: Get,
    target: &Target<'_>,
    now: Timestamp,
    out: &mut dyn Write,
) -> Result<CommandOutput, KubectlError> {
    let home = target.connect().await?;
    if get.fleet {
        return fleet_output(&get, &home, now).await;
    }
    let scope = match get.all_namespaces {
        true => Scope::All,
        false => get.kind.scope(get.namespace.as_deref(), &home),
    };
    let objects = home.untyped(get.kind.resource(), &scope);
    if get.watch {
        watch::run(&get, objects, out).await?;
        return Ok(CommandOutput::default());
    }
    let name = get.name.as_deref();
    let items = objects.list_selected(name, get.selector.as_deref()).await?;
    if let (Some(name), []) = (name, items.as_slice()) {
        return Err(objects.not_found(&objects.kind.kind, name));
    }
    match (get.output, items.as_slice()) {
        (Some(format @ (OutputFormat::Json | OutputFormat::Yaml)), _) => {
            encode_list(format, items).map(CommandOutput::stdout)
        }
        (Some(OutputFormat::Name), items) => {
            let names = items.iter().map(|object| objects.name_line(object));
            Ok(CommandOutput::stdout(names.collect::<String>()))
        }
        (_, []) => Ok(CommandOutput {
            stderr: match scope {
                Scope::All => "No resources found\n".to_owned(),
                Scope::Namespace(name) => format!("No resources found in {name} namespace.\n"),
            },
            ..CommandOutput::default()
        }),
        (_, [tenant, ..]) if get.kind == Kind::Tenant && name.is_some() => {
            let members = match tenants::is_summary(tenant) {
                true => {
                    let members = home.untyped(Kind::Cluster.resource(), &Scope::All);
                    members.list_values().await?
                }
                false => Vec::new(),
            };
            Ok(tenants::single_tenant(tenant, &members, now))
        }
        _ => Ok(CommandOutput::stdout(to_table(&get, &items, now).render())),
    }
}

async fn fleet_output(
    get: &Get,
    home: &Connection,
    now: Timestamp,
) -> Result<CommandOutput, KubectlError> {
    if get.kind != Kind::Tenant {
        let reason = "--fleet lists only Tenants: kubectl krypton get tenants --fleet";
        return Err(KubectlError::Refused(reason.to_owned()));
    }
    let filter = TenantFilter {
        member: get.on.as_deref(),
        namespace: get.namespace.as_deref(),
        name: get.name.as_deref(),
        not_ready: get.not_ready,
    };
    let hub_namespace = get.hub_namespace.as_deref();
    let reading = fleet_tenants::read(home, hub_namespace, get.debug_address, &filter);
    let tenants = Box::pin(reading).await?;
    let wide = get.output == Some(OutputFormat::Wide);
    fleet::fleet_output(&tenants, get.output, View { wide, now })
}

fn to_table(get: &Get, objects: &[Value], now: Timestamp) -> Table {
    let wide = get.output == Some(OutputFormat::Wide);
    let view = View { wide, now };
    match get.kind {
        Kind::Cluster => clusters_table(objects, view),
        Kind::Tenant => tenants_table(objects, view),
        Kind::Deployment => deployments_table(objects, view),
    }
}
