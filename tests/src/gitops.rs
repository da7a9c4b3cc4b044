//! Decides whether objects are ready as Flux, Helm and Argo CD do.

use std::{fs, path::Path};

use anyhow::{Context, Result};
use serde_json::Value;

use crate::{cluster::Cluster, process::Invocation, tools::Tools, wait::STEP_DEADLINE};

/// Returns the status that Flux and `helm --wait` derive from the object, with the reason, such as
/// `Current: Resource is Ready`.
pub async fn kstatus(cluster: &Cluster, kind: &str, name: &str) -> Result<String> {
    evaluate(cluster, (kind, name), ("kstatus", &[])).await
}

/// Returns the health that Argo CD derives from the object with the check of the documentation, with
/// the message, such as `Healthy: 1 of 1 clusters ready`.
pub async fn argo_health(cluster: &Cluster, kind: &str, name: &str) -> Result<String> {
    let check = documented_check()?;
    evaluate(cluster, (kind, name), ("lua", &[check.as_str()])).await
}

async fn evaluate(
    cluster: &Cluster,
    (kind, name): (&str, &str),
    (program, args): (&str, &[&str]),
) -> Result<String> {
    let object = cluster.kubectl(["get", kind, name, "-o", "json"]).await?;
    let pipe = r#"object=$1; shift; printf %s "$object" | "$@""#;
    let shell = Invocation::new("/bin/sh")
        .args(["-c", pipe, "sh", &object])
        .arg(Tools::find()?.program(program)?)
        .args(args.iter().copied());
    let output = shell.output(STEP_DEADLINE).await?;
    Ok(output.trim().replace('\t', ": "))
}

/// Returns Argo CD's health check for all kinds of Krypton, from the page for users of Argo CD.
fn documented_check() -> Result<String> {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/how-to/gitops.md");
    let page = fs::read_to_string(page).context("reading gitops.md")?;
    let mut blocks = page.split("```").filter_map(|it| it.strip_prefix("yaml\n"));
    let block = blocks.find(|block| block.contains("resource.customizations"));
    let block = block.context("gitops.md has no health check")?;
    let config: Value = serde_saphyr::from_str(block).context("reading the health check")?;
    let customizations = config.pointer("/data/resource.customizations");
    let customizations = customizations.and_then(Value::as_str);
    let customizations = customizations.context("argocd-cm has no customizations")?;
    let customizations: Value = serde_saphyr::from_str(customizations)?;
    let check = customizations.pointer("/mesh.openkcm.io~1*/health.lua");
    let check = check.and_then(Value::as_str);
    Ok(check.context("no health check is for Krypton")?.to_owned())
}
