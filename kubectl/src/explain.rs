//! `kubectl krypton explain tenant NAME`: explains the state of a Tenant on the home cluster and each member, and the
//! next step.

pub(crate) mod explanation;
mod remedy;
pub(crate) mod sources;

use std::net::SocketAddr;

use clap::Args;
use jiff::Timestamp;
use krypton_types::names::namespace_name;
use krypton_types::tenant::TenantKey;
use serde_json::{Value, json};

use crate::debug_port::parse_loopback_address;
use crate::error::KubectlError;
use crate::home::Target;
use crate::kind::Kind;
use crate::render::{CommandOutput, OutputFormat, encode};
use crate::statement::{self, StatementFormat};

use explanation::Explanation;

#[derive(Clone, Debug, Args)]
pub(super) struct Explain {
    #[arg(id = "kind", value_name = "KIND", value_parser = Kind::singular(&[Kind::Tenant]))]
    _kind: Kind,
    /// Name of the Tenant
    name: String,
    /// Namespace of the Tenant; by default that of the context
    #[arg(short, long, value_name = "NAMESPACE", value_parser = namespace_name)]
    namespace: Option<String>,
    /// Explain only this member of the fleet
    #[arg(long, value_name = "MEMBER")]
    on: Option<String>,
    /// Namespace of the hub; by default krypton-system, else krypton, else that of the context
    #[arg(long, value_name = "NAMESPACE", value_parser = namespace_name)]
    hub_namespace: Option<String>,
    /// Address of the leader's debug port, instead of its pod
    #[arg(long, hide = true, value_name = "HOST:PORT", value_parser = parse_loopback_address)]
    debug_address: Option<SocketAddr>,
    /// Output for programs
    #[arg(short, long, value_name = "FORMAT")]
    output: Option<StatementFormat>,
}

/// Missing information becomes a line of the output instead of an error.
pub(super) async fn run(
    args: Explain,
    target: &Target<'_>,
    now: Timestamp,
) -> Result<CommandOutput, KubectlError> {
    let home = target.connect().await?;
    let namespace = args.namespace.unwrap_or_else(|| home.namespace.clone());
    let key = TenantKey {
        namespace,
        name: args.name,
    };
    let member = args.on.as_deref();
    let hub = (args.hub_namespace.as_deref(), args.debug_address);
    let collecting = sources::collect(&key, member, hub, &home);
    let sources = Box::pin(collecting).await?;
    let explanation = explanation::explain(&key, member, &sources, now);
    let output = CommandOutput::stdout(match args.output {
        Some(StatementFormat::Json) => encode(OutputFormat::Json, &to_json(&key, &explanation))?,
        None => statement::to_text(&explanation.lines),
    });
    match explanation.ready {
        true => Ok(output),
        false => Err(KubectlError::NotReady { output }),
    }
}

fn to_json(key: &TenantKey, explanation: &Explanation) -> Value {
    json!({
        "namespace": key.namespace,
        "name": key.name,
        "ready": explanation.ready,
        "lines": statement::to_json(&explanation.lines),
    })
}

#[cfg(test)]
mod tests;
