//! `kubectl krypton get`: clusters, Tenants and KryptonDeployments as tables, or the objects themselves.

mod clusters;
mod deployments;
mod fleet;
mod output;
mod tenants;
mod watch;

use std::io::Write;
use std::net::SocketAddr;

use clap::Args;
use jiff::Timestamp;
use krypton_types::labels::parse_selector;
use kube::core::Selector;
use serde_json::Value;

use crate::debug_port::parse_loopback_address;
use crate::error::KubectlError;
use crate::fleet_tenants::{self, TenantFilter};
use crate::home::{Connection, Target};
use crate::kind::Kind;
use crate::objects::Scope;
use crate::render::{CommandOutput, OutputFormat, Table, View, as_list};
use output::{Output, OutputParser};

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
    /// Objects of all namespaces
    #[arg(short = 'A', long)]
    all_namespaces: bool,
    /// Only objects with these labels, as in -l team=a
    #[arg(short = 'l', long, value_name = "LABELS")]
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
    /// Address of the debug port, instead of the leader's pod
    #[arg(long, hide = true, value_name = "HOST:PORT", value_parser = parse_loopback_address, requires = "fleet")]
    debug_address: Option<SocketAddr>,
    /// Format: a table (default), a wide table with one line per cluster, names, objects, or the fields of a template
    #[arg(short, long, value_name = "FORMAT", value_parser = OutputParser)]
    output: Option<Output>,
    /// Print each change, until Ctrl-C
    #[arg(short, long)]
    watch: bool,
}

impl Get {
    /// Rejects flags that the definition of the command line cannot reject, because some of them precede the command.
    fn validate(&self, target: &Target<'_>) -> Result<(), KubectlError> {
        if self.all_namespaces && target.args.namespace.is_some() {
            let reason = "--all-namespaces and --namespace exclude each other";
            return Err(KubectlError::usage(reason));
        }
        if self.fleet {
            if self.kind != Kind::Tenant {
                let reason = "--fleet lists only Tenants: kubectl krypton get tenants --fleet";
                return Err(KubectlError::usage(reason));
            }
            self.fleet_selector()?;
        }
        Ok(())
    }

    /// Reads `--selector` for the leader. Without `--fleet`, the API server reads it.
    fn fleet_selector(&self) -> Result<Selector, KubectlError> {
        let selector = parse_selector(self.selector.as_deref().unwrap_or_default());
        selector.map_err(|error| KubectlError::usage(format!("--selector: {error}")))
    }

    fn has_format(&self, format: OutputFormat) -> bool {
        matches!(&self.output, Some(Output::Format(other)) if *other == format)
    }

    /// The output that consists of the objects themselves, or of their fields.
    fn document(&self) -> Option<&Output> {
        self.output.as_ref().filter(|output| output.is_document())
    }

    fn view(&self, now: Timestamp) -> View {
        let wide = self.has_format(OutputFormat::Wide);
        View { wide, now }
    }
}

pub(crate) async fn run(
    get: Get,
    target: &Target<'_>,
    now: Timestamp,
    out: &mut dyn Write,
) -> Result<CommandOutput, KubectlError> {
    get.validate(target)?;
    let home = target.connect().await?;
    if get.fleet {
        return fleet_output(&get, target, &home, now).await;
    }
    let scope = match get.all_namespaces {
        true => Scope::All,
        false => get.kind.scope(target.args.namespace.as_deref(), &home),
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
    if let Some(output) = get.document() {
        let document = match (name, items.as_slice()) {
            (Some(_), [object]) => object.clone(),
            _ => as_list(items),
        };
        return output.encode(&document).map(CommandOutput::stdout);
    }
    if get.has_format(OutputFormat::Name) {
        let names = items.iter().map(|object| objects.name_line(object));
        return Ok(CommandOutput::stdout(names.collect::<String>()));
    }
    match items.as_slice() {
        [] => Ok(CommandOutput {
            stderr: nothing_found(get.kind, &scope),
            ..CommandOutput::default()
        }),
        [tenant, ..] if get.kind == Kind::Tenant && name.is_some() => {
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

/// kubectl's remark, and for Tenants a hint, because most exist only on members.
fn nothing_found(kind: Kind, scope: &Scope) -> String {
    let remark = match scope {
        Scope::All => "No resources found\n".to_owned(),
        Scope::Namespace(name) => format!("No resources found in {name} namespace.\n"),
    };
    match kind {
        Kind::Tenant => format!("{remark}To list the Tenants of all members, add --fleet.\n"),
        _ => remark,
    }
}

async fn fleet_output(
    get: &Get,
    target: &Target<'_>,
    home: &Connection,
    now: Timestamp,
) -> Result<CommandOutput, KubectlError> {
    let filter = TenantFilter {
        member: get.on.as_deref(),
        namespace: target.args.namespace.as_deref(),
        name: get.name.as_deref(),
        not_ready: get.not_ready,
        selector: get.fleet_selector()?,
    };
    let hub_namespace = target.args.hub_namespace.as_deref();
    let reading = fleet_tenants::read(home, hub_namespace, get.debug_address, &filter);
    let read = Box::pin(reading).await?;
    if let (Some(name), []) = (&get.name, read.tenants.as_slice()) {
        return Err(KubectlError::NotFound(format!(
            "no member that you selected reports a Tenant {name:?}; 'kubectl krypton get tenants --fleet' lists all"
        )));
    }
    let mut output = fleet::fleet_output(&read.tenants, get.output.as_ref(), get.view(now))?;
    if read.is_cut_off {
        output.stderr += &format!(
            "the list ends after {} Tenants; select some with --on, --namespace, --selector or --not-ready\n",
            read.tenants.len()
        );
    }
    Ok(output)
}

fn to_table(get: &Get, objects: &[Value], now: Timestamp) -> Table {
    let view = get.view(now);
    match get.kind {
        Kind::Cluster => clusters_table(objects, view),
        Kind::Tenant => tenants_table(objects, view),
        Kind::Deployment => deployments_table(objects, view),
    }
}
