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
use kube::api::DynamicObject;
use kube::core::Selector;
use serde_json::Value;

use crate::debug_port::parse_loopback_address;
use crate::error::KubectlError;
use crate::fleet_tenants::{self, TenantFilter};
use crate::home::{Connection, Target};
use crate::kind::{Kind, KindArg};
use crate::objects::{Objects, Scope};
use crate::output::{OutputFormat, as_list};
use crate::render::{CommandOutput, Table, View};
use output::{Output, OutputParser};

pub(crate) use clusters::clusters_table;
pub(crate) use deployments::deployments_table;
pub(crate) use tenants::tenants_table;

const EXAMPLES: &str = "\
Examples:
  # List the clusters of the fleet
  kubectl krypton get clusters

  # List the Tenants of all namespaces
  kubectl krypton get tenants -A

  # Show the state of a Tenant on each of its clusters
  kubectl krypton get tenant NAME

  # List the KryptonDeployments of all namespaces
  kubectl krypton get deployments -A

  # List the Tenants that are not Ready, on all members
  kubectl krypton get tenants --fleet --not-ready

  # Print the names of the clusters
  kubectl krypton get clusters -o jsonpath='{.items[*].metadata.name}'";

#[derive(Clone, Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Get {
    #[arg(value_parser = Kind::plural(&Kind::ALL))]
    kind: KindArg,
    /// Only the object of this name; repeatable. KIND/NAME is possible, too. One Tenant has a line for each of its
    /// clusters
    #[arg(value_name = "NAME")]
    names: Vec<String>,
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
    /// Print tables without a header
    #[arg(long)]
    no_headers: bool,
    /// Print each change, until Ctrl-C
    #[arg(short, long)]
    watch: bool,
}

impl Get {
    /// Rejects flags that the definition of the command line cannot reject, because some of them precede the command.
    /// Returns the names of the objects.
    fn validate(&self, target: &Target<'_>) -> Result<Vec<String>, KubectlError> {
        if self.all_namespaces && target.args.namespace.is_some() {
            let reason = "--all-namespaces and --namespace exclude each other";
            return Err(KubectlError::usage(reason));
        }
        let names = self.kind.names(&self.names)?;
        if self.all_namespaces && !names.is_empty() {
            let reason = "--all-namespaces takes no names; select a namespace with --namespace";
            return Err(KubectlError::usage(reason));
        }
        if names.len() > 1 && (self.fleet || self.watch) {
            let reason = "--fleet and --watch take at most one name";
            return Err(KubectlError::usage(reason));
        }
        if self.fleet {
            if self.kind.kind != Kind::Tenant {
                let reason = "--fleet lists only Tenants: kubectl krypton get tenants --fleet";
                return Err(KubectlError::usage(reason));
            }
            self.fleet_selector()?;
        }
        Ok(names)
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
    let names = get.validate(target)?;
    let home = target.connect().await?;
    if get.fleet {
        return fleet_output(&get, names.first().map(String::as_str), target, &home, now).await;
    }
    let kind = get.kind.kind;
    let scope = match get.all_namespaces {
        true => Scope::All,
        false => kind.scope(target.args.namespace.as_deref(), &home),
    };
    let objects = home.untyped(kind.resource(), &scope);
    if get.watch {
        watch::run(&get, names.first().map(String::as_str), objects, out).await?;
        return Ok(CommandOutput::default());
    }
    let selector = get.selector.as_deref();
    match names.as_slice() {
        [] => {
            let items = objects.list_selected(None, selector).await?;
            match items.is_empty() && get.document().is_none() {
                true => Ok(CommandOutput {
                    stderr: nothing_found(kind, &scope),
                    ..CommandOutput::default()
                }),
                false => list_output(&get, &objects, items, now),
            }
        }
        [name] => {
            let mut items = objects.list_selected(Some(name), selector).await?;
            let object = items.pop();
            let object = object.ok_or_else(|| objects.not_found(&objects.kind.kind, name))?;
            if let Some(output) = get.document() {
                return output.encode(&object).map(CommandOutput::stdout);
            }
            if kind != Kind::Tenant || get.has_format(OutputFormat::Name) {
                return list_output(&get, &objects, vec![object], now);
            }
            let members = match tenants::is_summary(&object) {
                true => home.members().list_values().await?,
                false => Vec::new(),
            };
            Ok(tenants::single_tenant(
                &object,
                &members,
                !get.no_headers,
                now,
            ))
        }
        names => {
            let (mut items, mut missing) = (Vec::new(), None);
            for name in names {
                let found = objects.list_selected(Some(name), selector).await?;
                if found.is_empty() {
                    missing.get_or_insert(name);
                }
                items.extend(found);
            }
            let output = match items.is_empty() {
                true => CommandOutput::default(),
                false => list_output(&get, &objects, items, now)?,
            };
            match missing {
                Some(name) => Err(objects
                    .not_found(&objects.kind.kind, name)
                    .with_output(output)),
                None => Ok(output),
            }
        }
    }
}

/// The objects as a table, names or one list.
fn list_output(
    get: &Get,
    objects: &Objects<DynamicObject>,
    items: Vec<Value>,
    now: Timestamp,
) -> Result<CommandOutput, KubectlError> {
    if let Some(output) = get.document() {
        return output.encode(&as_list(items)).map(CommandOutput::stdout);
    }
    Ok(CommandOutput::stdout(
        match get.has_format(OutputFormat::Name) {
            true => items.iter().map(|it| objects.name_line(it)).collect(),
            false => to_table(get, &items, now).render(),
        },
    ))
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
    name: Option<&str>,
    target: &Target<'_>,
    home: &Connection,
    now: Timestamp,
) -> Result<CommandOutput, KubectlError> {
    let filter = TenantFilter {
        member: get.on.as_deref(),
        namespace: target.args.namespace.as_deref(),
        name,
        not_ready: get.not_ready,
        selector: get.fleet_selector()?,
    };
    let reading = fleet_tenants::read(home, get.debug_address, &filter);
    let read = Box::pin(reading).await?;
    if let (Some(member), []) = (&get.on, read.tenants.as_slice()) {
        home.members().get(member).await?;
    }
    // A Tenant that exists may be Ready, or have other labels.
    if let (Some(name), []) = (name, read.tenants.as_slice())
        && !get.not_ready
        && get.selector.is_none()
    {
        return Err(KubectlError::NotFound(format!(
            "no member that you selected reports a Tenant {name:?}; 'kubectl krypton get tenants --fleet' lists all"
        )));
    }
    let mut output = fleet::fleet_output(
        &read.tenants,
        get.output.as_ref(),
        !get.no_headers,
        get.view(now),
    )?;
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
    let table = match get.kind.kind {
        Kind::Cluster => clusters_table(objects, view),
        Kind::Tenant => tenants_table(objects, view),
        Kind::Deployment => deployments_table(objects, view),
    };
    table.with_header(!get.no_headers)
}
