//! `kubectl krypton version`: versions of this program, and of hub and agents as the home cluster records them.

use std::collections::BTreeMap;

use clap::Args;
use serde_json::Value;

use crate::error::KubectlError;
use crate::home::{Connection, Target};
use crate::join_info;
use crate::kind::Kind;
use crate::objects::Scope;
use crate::render::{CommandOutput, text_at};

#[derive(Clone, Debug, Args)]
pub(crate) struct Versions {
    /// Only the version of this program; contacts no cluster
    #[arg(long)]
    client: bool,
}

/// If the home cluster cannot be read, prints a remark and succeeds.
pub(crate) async fn run(
    args: Versions,
    target: &Target<'_>,
) -> Result<CommandOutput, KubectlError> {
    let mut output =
        CommandOutput::stdout(format!("kubectl-krypton {}\n", env!("CARGO_PKG_VERSION")));
    if args.client {
        return Ok(output);
    }
    match fleet_versions(target).await {
        Ok(versions) => output.stdout += &versions,
        Err(error) => {
            output.stderr = format!("the versions of hub and agents are unknown: {error}\n");
        }
    }
    Ok(output)
}

async fn fleet_versions(target: &Target<'_>) -> Result<String, KubectlError> {
    let home = target.connect().await?;
    let members = home.untyped(Kind::Cluster.resource(), &Scope::All);
    let members = members.list_values().await?;
    let hub_namespace = target.args.hub_namespace.as_deref();
    Ok(hub_version(hub_namespace, &home).await + &agent_versions(&members))
}

async fn hub_version(hub_namespace: Option<&str>, home: &Connection) -> String {
    for namespace in home.hub_namespaces(hub_namespace) {
        if let Ok(Some(info)) = join_info::read(home, &namespace).await
            && !info.version.is_empty()
        {
            return format!("hub {} (namespace {namespace})\n", info.version);
        }
    }
    "hub: unknown; name with --hub-namespace a namespace in which you may read its ConfigMap\n"
        .to_owned()
}

/// Formats one line for each version, with its number of members.
fn agent_versions(members: &[Value]) -> String {
    let mut counts: BTreeMap<String, usize> = BTreeMap::new();
    for member in members {
        if let Some(version) = text_at(member, "/status/agentVersion") {
            *counts.entry(version).or_default() += 1;
        }
    }
    let lines = counts
        .into_iter()
        .map(|(version, count)| format!("agents {version}: {count}\n"));
    lines.collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

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
        assert_eq!(
            agent_versions(&members),
            "agents 0.1.0: 2\nagents 0.2.0: 1\n"
        );
        assert_eq!(agent_versions(&[]), "");
    }
}
