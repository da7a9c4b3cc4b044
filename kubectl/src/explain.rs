//! `kubectl krypton explain KIND NAME`: explains the state of a Tenant, KryptonDeployment or cluster, and the next step. A
//! Tenant is explained on the home cluster and each member.

pub(crate) mod explanation;
mod remedy;
pub(crate) mod sources;

use std::net::SocketAddr;

use clap::Args;
use jiff::Timestamp;
use krypton_types::tenant::TenantKey;
use serde_json::{Value, json};

use crate::debug_port::parse_loopback_address;
use crate::error::KubectlError;
use crate::home::Target;
use crate::kind::{Kind, KindArg};
use crate::local_clock::LocalClock;
use crate::output::{DocumentFormat, encode};
use crate::render::CommandOutput;
use crate::statement;

use explanation::Explanation;

const EXAMPLES: &str = "\
Examples:
  # Explain a Tenant on all of its clusters
  kubectl krypton explain tenant NAME

  # Explain a Tenant on one member, even if the Tenant exists only there
  kubectl krypton explain tenant NAME --on MEMBER

  # Explain a KryptonDeployment
  kubectl krypton explain deployment NAME

  # Explain a cluster of the fleet
  kubectl krypton explain cluster NAME";

#[derive(Clone, Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct Explain {
    #[arg(value_parser = Kind::singular(&Kind::ALL))]
    kind: KindArg,
    /// Name of the object. KIND/NAME is possible, too
    name: Option<String>,
    /// Explain the Tenant only on this member of the fleet
    #[arg(long, value_name = "MEMBER")]
    on: Option<String>,
    /// Address of the leader's debug port, instead of its pod
    #[arg(long, hide = true, value_name = "HOST:PORT", value_parser = parse_loopback_address)]
    debug_address: Option<SocketAddr>,
    /// Output for programs
    #[arg(short, long, value_name = "FORMAT")]
    output: Option<DocumentFormat>,
}

/// Missing information becomes a line of the output instead of an error.
pub(super) async fn run(
    args: Explain,
    target: &Target<'_>,
    now: Timestamp,
) -> Result<CommandOutput, KubectlError> {
    let (kind, names) = (args.kind.kind, args.kind.names(args.name.as_slice())?);
    let [name] = <[String; 1]>::try_from(names)
        .map_err(|_| KubectlError::usage("name one object, as in 'explain tenant acme'"))?;
    if args.on.is_some() && kind != Kind::Tenant {
        let reason = "--on is for a Tenant; a cluster or KryptonDeployment is explained as a whole";
        return Err(KubectlError::usage(reason));
    }
    let clock = LocalClock::start(now);
    let home = target.connect().await?;
    let now = clock.now();
    let key = TenantKey {
        namespace: home.objects_namespace(target.args.namespace.as_deref()),
        name,
    };
    let explanation = match kind {
        Kind::Tenant => {
            let member = args.on.as_deref();
            let collecting = sources::collect(&key, member, args.debug_address, &home);
            let sources = Box::pin(collecting).await?;
            explanation::explain(&key, member, &sources, now)
        }
        Kind::Deployment => {
            let (namespace, name) = (&key.namespace, &key.name);
            let collecting = sources::collect_deployment(namespace, name, &home);
            explanation::explain_deployment(&Box::pin(collecting).await?, now)
        }
        Kind::Cluster => {
            let collecting = sources::collect_cluster(&key.name, &home);
            explanation::explain_cluster(&Box::pin(collecting).await?, now)
        }
    };
    let namespace = Some(key.namespace.as_str()).filter(|_| kind != Kind::Cluster);
    let output = CommandOutput::stdout(match args.output {
        Some(format) => {
            let value = to_json(namespace, &key.name, &explanation);
            encode(format.into(), &value)?
        }
        None => statement::to_text(&explanation.lines),
    });
    match explanation.ready {
        true => Ok(output),
        false => Err(KubectlError::NotReady { output }),
    }
}

fn to_json(namespace: Option<&str>, name: &str, explanation: &Explanation) -> Value {
    json!({
        "namespace": namespace,
        "name": name,
        "ready": explanation.ready,
        "lines": statement::to_json(&explanation.lines),
    })
}

#[cfg(test)]
mod tests;
