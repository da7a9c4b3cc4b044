//! Finds the binaries and charts that `make tools` has built.

use std::{
    path::{Path, PathBuf},
    sync::OnceLock,
};

use anyhow::{Context, Result, bail};

use crate::process::new_command;

const SCRIPT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../hack/tools/tools.sh");
/// The programs of a control plane and of its tests.
const BINARIES: [&str; 7] = [
    "etcd",
    "kube-apiserver",
    "kube-controller-manager",
    "kube-scheduler",
    "kubectl",
    "helm",
    "kwok",
];

/// The folder with `bin/`, `charts/`, `crds/` and `kwok/stages.yaml`.
#[derive(Debug, Clone)]
pub struct Tools {
    root: PathBuf,
}

impl Tools {
    /// Runs `hack/tools/tools.sh dir`. `KRYPTON_TOOLS` names another script, or the folder itself. Returns an error if
    /// a tool is missing. `make tools` builds it.
    pub fn find() -> Result<Self> {
        static CACHED: OnceLock<Tools> = OnceLock::new();
        if let Some(tools) = CACHED.get() {
            return Ok(tools.clone());
        }
        let tools = Self { root: root()? };
        let missing: Vec<_> = BINARIES
            .into_iter()
            .filter(|name| !tools.binary(name).is_file())
            .collect();
        if !missing.is_empty() {
            bail!(
                "missing in {}: {}; run 'make tools'",
                tools.root.display(),
                missing.join(", ")
            );
        }
        existing(tools.stages())?;
        Ok(CACHED.get_or_init(|| tools).clone())
    }

    /// The folder that `KRYPTON_TOOLS` can name.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The folder of the binaries.
    pub fn bin(&self) -> PathBuf {
        self.root.join("bin")
    }

    pub fn binary(&self, name: &str) -> PathBuf {
        self.bin().join(name)
    }

    /// Returns the path of a program that no cluster needs, such as `registry`.
    pub fn program(&self, name: &str) -> Result<PathBuf> {
        existing(self.binary(name))
    }

    /// Returns a chart's folder, such as `external-dns-1.19.0`.
    pub fn chart(&self, name: &str) -> Result<PathBuf> {
        let folder = self.root.join("charts").join(name);
        existing(folder.join("Chart.yaml"))?;
        Ok(folder)
    }

    /// Returns a file from a folder of CRDs, such as `cluster-api-1.14.2`.
    pub fn crd(&self, pin: &str, file: &str) -> Result<PathBuf> {
        existing(self.root.join("crds").join(pin).join(file))
    }

    /// kwok's stages for a fake node and its pods.
    pub(crate) fn stages(&self) -> PathBuf {
        self.root.join("kwok/stages.yaml")
    }
}

/// Returns the path of an existing file.
fn existing(path: PathBuf) -> Result<PathBuf> {
    if !path.is_file() {
        bail!("missing: {}; run 'make tools'", path.display());
    }
    Ok(path)
}

fn root() -> Result<PathBuf> {
    let override_path = std::env::var_os("KRYPTON_TOOLS").map(PathBuf::from);
    let script = match &override_path {
        Some(folder) if folder.is_dir() => return Ok(folder.clone()),
        Some(script) => script.as_path(),
        None => Path::new(SCRIPT),
    };
    let output = new_command("bash")
        .arg(script)
        .arg("dir")
        .output()
        .with_context(|| format!("running {} dir", script.display()))?;
    let root = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    if !output.status.success() || root.is_empty() {
        let stderr = String::from_utf8_lossy(&output.stderr);
        bail!(
            "{} dir: {}: {}; run 'make tools'",
            script.display(),
            output.status,
            stderr.trim()
        );
    }
    Ok(PathBuf::from(root))
}
