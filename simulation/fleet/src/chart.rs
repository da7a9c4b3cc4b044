//! The charts of simulated fleets.

use std::io;
use std::path::{Path, PathBuf};

use krypton_sim_helm::chart::TestChart;
use serde_json::{Value, json};

use crate::plan::Chart;

/// Start of all secret texts of the stage: in kubeconfigs, join tokens and chart values. It appears in Secrets only.
pub const PLANTED_SECRET: &str = "planted-secret";

/// File in the simulation's folder with the chart's version.
const VERSION_FILE: &str = "chart-version";

/// The chart's version `0.N.0` in the flags of a hub that starts now, as N, from the simulation's folder.
pub fn version_in(folder: &Path) -> u32 {
    let text = std::fs::read_to_string(folder.join(VERSION_FILE));
    let version = text.ok().and_then(|text| text.trim().parse().ok());
    version.unwrap_or(1)
}

/// Sets the chart's version for the next start of each hub.
pub(crate) fn set_version(folder: &Path, version: u32) -> io::Result<()> {
    std::fs::write(folder.join(VERSION_FILE), version.to_string())
}

/// Writes the archive of version `0.N.0` into `folder`, and returns its path and version.
///
/// # Errors
/// Returns an error if the file cannot be written.
pub fn write_archive(folder: &Path, chart: Chart, number: u32) -> io::Result<(PathBuf, String)> {
    let version = format!("0.{number}.0");
    let path = folder.join(format!("app-{version}.tgz"));
    if !path.exists() {
        std::fs::create_dir_all(folder)?;
        // Another host may read it at the same time.
        let partial = folder.join(format!("app-{version}.partial"));
        test_chart(chart, number, &version).to_tgz(&partial)?;
        std::fs::rename(&partial, &path)?;
    }
    Ok((path, version))
}

fn test_chart(chart: Chart, number: u32, version: &str) -> TestChart {
    let labels = json!({"app": "$RELEASE"});
    let app = TestChart::new("app", version)
        .value("message", json!("default"))
        .object(json!({
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": "$RELEASE-config"},
            "data": {"message": "$values.message", "version": "$CHART_VERSION"},
        }))
        .object(json!({
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": "$RELEASE-secret"},
            "type": "Opaque",
            "stringData": {"password": PLANTED_SECRET},
        }))
        .object(json!({
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": "$RELEASE-app"},
            "spec": {
                "replicas": 1,
                "selector": {"matchLabels": labels},
                "template": {
                    "metadata": {"labels": labels},
                    "spec": {"containers": [{"name": "app", "image": "app"}]},
                },
            },
        }));
    match chart {
        Chart::Plain => app,
        Chart::Hooks => app
            .object(hook("pre", "pre-install,pre-upgrade", "true"))
            .object(hook("post", "post-install,post-upgrade,pre-delete", "true")),
        Chart::FailingUpgrade => {
            let command = if number.is_multiple_of(2) {
                "false"
            } else {
                "true"
            };
            app.object(hook("pre", "pre-upgrade", command))
        }
        Chart::Slow => app.object(hook("pre", "pre-install,pre-upgrade", "sleep 20")),
    }
}

/// A Job that runs this command as a hook.
fn hook(name: &str, events: &str, command: &str) -> Value {
    let command: Vec<&str> = command.split(' ').collect();
    json!({
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {
            "name": format!("$RELEASE-{name}"),
            "annotations": {
                "helm.sh/hook": events,
                "helm.sh/hook-delete-policy": "before-hook-creation",
            },
        },
        "spec": {
            "backoffLimit": 0,
            "template": {"spec": {
                "restartPolicy": "Never",
                "containers": [{"name": "hook", "image": "app", "command": command}],
            }},
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chart_version_defaults_to_one() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(version_in(folder.path()), 1);
        std::fs::write(folder.path().join(VERSION_FILE), "7\n").unwrap();
        assert_eq!(version_in(folder.path()), 7);
    }
}
