//! `kubectl krypton version`: of this program, and of hub and agents as far as home tells.

use std::collections::BTreeMap;

use clap::Args;
use krypton_crds::edge_cluster::EdgeCluster;
use krypton_types::names::namespace_name;
use kube::core::ApiResource;
use serde_json::Value;

use super::join;
use crate::error::KubectlError;
use crate::home::{Connection, HomeArgs, Place, connect, list};
use crate::join_info;
use crate::render::{Printed, text_at};

#[derive(Clone, Debug, Args)]
pub(crate) struct Versions {
    /// Of this program alone; no cluster is asked.
    #[arg(long)]
    client: bool,
    /// Namespace of the hub; by default krypton-system, else krypton, else that of the context.
    #[arg(short, long, value_name = "NAMESPACE", value_parser = namespace_name)]
    namespace: Option<String>,
    #[command(flatten)]
    home: HomeArgs,
}

/// What home cannot tell is a remark, and no failure.
pub(crate) async fn run(args: Versions, env: &dyn Fn(&str) -> Option<String>) -> Printed {
    let mut printed = Printed {
        stdout: format!("kubectl-krypton {}\n", env!("CARGO_PKG_VERSION")),
        stderr: String::new(),
    };
    if args.client {
        return printed;
    }
    match Box::pin(of_home(&args, env)).await {
        Ok((hub, agents)) => {
            printed.stdout += &hub;
            printed.stdout += &agents;
        }
        Err(error) => printed.stderr = format!("of hub and agents nothing is known: {error}\n"),
    }
    printed
}

async fn of_home(
    args: &Versions,
    env: &dyn Fn(&str) -> Option<String>,
) -> Result<(String, String), KubectlError> {
    let home = connect(&args.home, env).await?;
    let kind = ApiResource::erase::<EdgeCluster>(&());
    let client = home.client.clone();
    let members = list(client, &kind, &Place::Cluster, None, &home.context).await?;
    Ok((hub(args, &home).await, agents(&members)))
}

async fn hub(args: &Versions, home: &Connection) -> String {
    for namespace in join::places(args.namespace.as_deref(), &home.namespace) {
        let found = join_info::read(home.client.clone(), &namespace).await;
        if let Ok(Some(info)) = found
            && !info.version.is_empty()
        {
            return format!("hub {} (namespace {namespace})\n", info.version);
        }
    }
    "hub: not known; name its namespace with -n, where you may read its ConfigMap\n".to_owned()
}

/// A line for each version, with how many members have it.
fn agents(members: &[Value]) -> String {
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
        let of = |version: Value| json!({"status": {"agentVersion": version}});
        let members = [
            of("0.1.0".into()),
            of("0.2.0".into()),
            of("0.1.0".into()),
            json!({}),
        ];
        assert_eq!(agents(&members), "agents 0.1.0: 2\nagents 0.2.0: 1\n");
        assert_eq!(agents(&[]), "");
    }
}
