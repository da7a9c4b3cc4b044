//! `kubectl krypton explain tenant NAME`: explains the state of a Tenant on the home cluster and each member, and the
//! next step.

mod remedy;
pub(crate) mod sources;
pub(crate) mod story;

use clap::Args;
use jiff::Timestamp;
use krypton_types::names::namespace_name;
use krypton_types::tenant::TenantKey;
use serde_json::{Value, json};

use crate::error::KubectlError;
use crate::home::{Env, HomeArgs, connect};
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
    /// Output for programs
    #[arg(short, long, value_name = "FORMAT")]
    output: Option<Format>,
    #[command(flatten)]
    home: HomeArgs,
}

/// Missing information becomes a line of the output instead of an error.
pub(super) async fn run(
    args: Explain,
    env: Env<'_>,
    now: Timestamp,
) -> Result<Printed, KubectlError> {
    let home = connect(&args.home, env).await?;
    let namespace = args.namespace.unwrap_or_else(|| home.namespace.clone());
    let key = TenantKey {
        namespace,
        name: args.name,
    };
    let on = args.on.as_deref();
    let gathering = sources::gather(&key, on, args.hub_namespace.as_deref(), &home);
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
