//! `kubectl krypton explain tenant NAME`: explains the state of a Tenant on the home cluster and each member, and the
//! next step.

mod remedy;
pub(crate) mod sources;
pub(crate) mod story;

use std::net::SocketAddr;

use clap::Args;
use jiff::Timestamp;
use krypton_types::names::namespace_name;
use krypton_types::tenant::TenantKey;
use serde_json::{Value, json};

use crate::debug_port::loopback;
use crate::error::KubectlError;
use crate::home::Target;
use crate::kind::Kind;
use crate::render::{Output, Printed, encode};
use crate::statement::{self, Format};

use story::Story;

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
    #[arg(long, hide = true, value_name = "HOST:PORT", value_parser = loopback)]
    debug_address: Option<SocketAddr>,
    /// Output for programs
    #[arg(short, long, value_name = "FORMAT")]
    output: Option<Format>,
}

/// Missing information becomes a line of the output instead of an error.
pub(super) async fn run(
    args: Explain,
    target: &Target<'_>,
    now: Timestamp,
) -> Result<Printed, KubectlError> {
    let home = target.connect().await?;
    let namespace = args.namespace.unwrap_or_else(|| home.namespace.clone());
    let key = TenantKey {
        namespace,
        name: args.name,
    };
    let on = args.on.as_deref();
    let hub = (args.hub_namespace.as_deref(), args.debug_address);
    let gathering = sources::gather(&key, on, hub, &home);
    let sources = Box::pin(gathering).await?;
    let story = story::story(&key, on, &sources, now);
    let printed = Printed::stdout(match args.output {
        Some(Format::Json) => encode(Output::Json, &as_json(&key, &story))?,
        None => statement::text(&story.lines),
    });
    match story.ready {
        true => Ok(printed),
        false => Err(KubectlError::NotReady { printed }),
    }
}

fn as_json(key: &TenantKey, story: &Story) -> Value {
    json!({
        "namespace": key.namespace,
        "name": key.name,
        "ready": story.ready,
        "lines": statement::as_json(&story.lines),
    })
}

#[cfg(test)]
mod tests;
