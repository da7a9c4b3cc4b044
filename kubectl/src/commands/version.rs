//! `kubectl krypton version`: versions of this program, and of hub and agents as the home cluster records them.

use std::collections::BTreeMap;
use std::io::Write;

use clap::Args;
use serde_json::{Value, json};

use crate::error::KubectlError;
use crate::home::{Connection, Target};
use crate::join_info;
use crate::output::{DocumentFormat, encode, print_now};
use crate::render::{CommandOutput, text_at};

const EXAMPLES: &str = "\
Examples:
  # Print the versions of this program, the hub and the agents
  kubectl krypton version

  # Print only the version of this program
  kubectl krypton version --client

  # Print the versions as JSON
  kubectl krypton version -o json";

#[derive(Clone, Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Versions {
    /// Only the version of this program; contacts no cluster
    #[arg(long)]
    client: bool,
    /// Output for programs
    #[arg(short, long, value_name = "FORMAT")]
    output: Option<DocumentFormat>,
}

/// Prints the version of this program also if the home cluster cannot be read.
pub(crate) async fn run(
    args: Versions,
    target: &Target<'_>,
    out: &mut dyn Write,
) -> Result<CommandOutput, KubectlError> {
    let own = FleetVersions::default().output(args.output)?;
    if args.client {
        return Ok(own);
    }
    match FleetVersions::read(target).await {
        Ok(versions) => versions.output(args.output),
        Err(error) => {
            // Before the error, whose exit code tells why.
            print_now(out, &own.stdout)?;
            Err(error)
        }
    }
}

/// The versions that the home cluster records.
#[derive(Clone, Debug, Default)]
struct FleetVersions {
    /// Version and namespace of the hub. `None` if the user may not read it, or without a hub.
    hub: Option<(String, String)>,
    /// Number of members by version of their agents. `None` if the home cluster was not read.
    agents: Option<BTreeMap<String, usize>>,
}

impl FleetVersions {
    async fn read(target: &Target<'_>) -> Result<Self, KubectlError> {
        let home = target.connect().await?;
        let members = home.members().list_values().await?;
        Ok(Self {
            hub: hub_version(&home).await,
            agents: Some(count_agents(&members)),
        })
    }

    fn output(&self, format: Option<DocumentFormat>) -> Result<CommandOutput, KubectlError> {
        let own = env!("CARGO_PKG_VERSION");
        let Self { hub, agents } = self;
        if let Some(format) = format {
            let hub = hub.as_ref();
            let hub =
                hub.map(|(version, namespace)| json!({"version": version, "namespace": namespace}));
            let versions = json!({"client": {"version": own}, "hub": hub, "agents": agents});
            return encode(format.into(), &versions).map(CommandOutput::stdout);
        }
        let mut text = format!("kubectl-krypton {own}\n");
        if let Some(agents) = agents {
            text += &match hub {
                Some((version, namespace)) => format!("hub {version} (namespace {namespace})\n"),
                None => UNKNOWN_HUB.to_owned(),
            };
            for (version, count) in agents {
                text += &format!("agents {version}: {count}\n");
            }
        }
        Ok(CommandOutput::stdout(text))
    }
}

const UNKNOWN_HUB: &str =
    "hub: unknown; name with --hub-namespace a namespace in which you may read its ConfigMap\n";

/// Returns version and namespace of the hub.
async fn hub_version(home: &Connection) -> Option<(String, String)> {
    for namespace in home.hub_namespaces() {
        if let Ok(Some(info)) = join_info::read(home, &namespace).await
            && !info.version.is_empty()
        {
            return Some((info.version, namespace));
        }
    }
    None
}

fn count_agents(members: &[Value]) -> BTreeMap<String, usize> {
    let mut counts = BTreeMap::new();
    for member in members {
        if let Some(version) = text_at(member, "/status/agentVersion") {
            *counts.entry(version).or_default() += 1;
        }
    }
    counts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn agents_are_counted_by_reported_version() {
        let member = |version: Value| json!({"status": {"agentVersion": version}});
        let members = [
            member("0.1.0".into()),
            member("0.2.0".into()),
            member("0.1.0".into()),
            json!({}),
        ];
        let versions = FleetVersions {
            hub: Some(("0.2.0".to_owned(), "krypton".to_owned())),
            agents: Some(count_agents(&members)),
        };
        let text = versions.output(None).unwrap().stdout;
        let (_, fleet) = text.split_once('\n').unwrap();
        let expected = "hub 0.2.0 (namespace krypton)\nagents 0.1.0: 2\nagents 0.2.0: 1\n";
        assert_eq!(fleet, expected);
        let json = versions.output(Some(DocumentFormat::Json)).unwrap().stdout;
        let json: Value = serde_json::from_str(&json).unwrap();
        assert_eq!(json["agents"], json!({"0.1.0": 2, "0.2.0": 1}));
        assert_eq!(json["hub"]["version"], "0.2.0");
    }
}
