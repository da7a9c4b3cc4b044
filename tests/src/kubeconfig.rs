//! Writes one kubeconfig with a context for each cluster. The contexts have the given names.

use std::{fs, path::Path};

use anyhow::{Context, Result};
use serde_json::{Value, json};

use crate::{Cluster, membership::write_secret};

/// Writes the kubeconfig, readable only by its owner. The first cluster's context is the current one.
pub fn write(path: &Path, clusters: &[(&str, &Cluster)]) -> Result<()> {
    let kubeconfigs: Vec<(&str, Value)> = clusters
        .iter()
        .map(|(name, cluster)| Ok((*name, read(cluster.kubeconfig())?)))
        .collect::<Result<_>>()?;
    write_secret(path, &merged(&kubeconfigs).to_string())
}

/// Returns a kubeconfig with a token for the API server at this URL.
pub fn for_server(url: &str) -> String {
    json!({
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        "clusters": [{"name": "c", "cluster": {"server": url}}],
        "users": [{"name": "u", "user": {"token": "t"}}],
    })
    .to_string()
}

fn read(path: &Path) -> Result<Value> {
    let text = fs::read_to_string(path).with_context(|| format!("reading {}", path.display()))?;
    serde_saphyr::from_str(&text).with_context(|| format!("reading {}", path.display()))
}

/// The harness names every user `admin`, so each gets a unique name here.
fn merged(kubeconfigs: &[(&str, Value)]) -> Value {
    let entries = |entry: &dyn Fn(&str, &Value) -> Value| -> Vec<Value> {
        kubeconfigs
            .iter()
            .map(|(name, kubeconfig)| entry(name, kubeconfig))
            .collect()
    };
    json!({
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": kubeconfigs.first().map(|(name, _)| *name),
        "contexts": entries(&|name, _| json!({"name": name, "context": {"cluster": name, "user": name}})),
        "clusters": entries(&|name, kubeconfig| json!({"name": name, "cluster": kubeconfig["clusters"][0]["cluster"]})),
        "users": entries(&|name, kubeconfig| json!({"name": name, "user": kubeconfig["users"][0]["user"]})),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn merged_kubeconfig_keeps_same_named_users_apart() {
        let kubeconfig = |token: &str, server: &str| {
            json!({
                "clusters": [{"name": "x", "cluster": {"server": server}}],
                "users": [{"name": "admin", "user": {"token": token}}],
            })
        };
        let merged_kubeconfig = merged(&[
            ("home", kubeconfig("a", "h")),
            ("edge-1", kubeconfig("b", "e")),
        ]);
        assert_eq!(merged_kubeconfig["current-context"], "home");
        assert_eq!(
            merged_kubeconfig["users"][1],
            json!({"name": "edge-1", "user": {"token": "b"}})
        );
        assert_eq!(merged_kubeconfig["clusters"][1]["cluster"]["server"], "e");
        assert_eq!(
            merged_kubeconfig["contexts"][1]["context"],
            json!({"cluster": "edge-1", "user": "edge-1"})
        );
    }
}
