//! Embeds the Helm charts of hub and agent. With KRYPTON_REGISTRY, their images are in that registry by default.

use std::env;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// Set by hack/release.sh. Not named REGISTRY, which also names the images of local builds.
const REGISTRY: &str = "KRYPTON_REGISTRY";

fn main() -> io::Result<()> {
    let charts = Path::new(&env::var("CARGO_MANIFEST_DIR").unwrap_or_default()).join("../charts");
    println!("cargo::rerun-if-changed={}", charts.display());
    println!("cargo::rerun-if-env-changed={REGISTRY}");
    let out_dir = PathBuf::from(env::var("OUT_DIR").map_err(io::Error::other)?);
    let registry = env::var(REGISTRY).ok().filter(|value| !value.is_empty());
    let mut generated = format!("pub(super) const CHART_REGISTRY: Option<&str> = {registry:?};\n");
    for name in ["krypton-hub", "krypton-agent"] {
        let folder = charts.join(name);
        let mut files = Vec::new();
        collect_files(&folder, &mut files)?;
        files.sort();
        let constant = name.replace('-', "_").to_uppercase();
        generated += &format!("pub(super) const {constant}: &[(&str, &str)] = &[\n");
        for file in files {
            let path = file.strip_prefix(&folder).map_err(io::Error::other)?;
            // Helm needs neither the page nor the values of tests.
            if path.starts_with("ci") || path == Path::new("README.md") {
                continue;
            }
            let mut source = file.clone();
            if path == Path::new("values.yaml") {
                let values = fs::read_to_string(&file)?;
                source = out_dir.join(format!("{name}-values.yaml"));
                let registry = registry.as_deref().unwrap_or_default();
                fs::write(&source, with_registry(&values, registry)?)?;
            }
            generated += &format!("    ({path:?}, include_str!({source:?})),\n");
        }
        generated += "];\n";
    }
    fs::write(out_dir.join("charts.rs"), generated)
}

/// Sets `image.registry` in the values of a chart.
///
/// # Errors
///
/// Fails if the values have no empty `image.registry`, or if the registry has characters that a reference to an image
/// doesn't allow.
fn with_registry(values: &str, registry: &str) -> io::Result<String> {
    let is_allowed = |letter: char| letter.is_ascii_alphanumeric() || ".:/_-".contains(letter);
    if !registry.chars().all(is_allowed) {
        return Err(io::Error::other(format!("{REGISTRY} is {registry:?}")));
    }
    let parts = values.split_once("\nimage:\n").and_then(|(head, rest)| {
        let (image, tail) = rest.split_once("\n  registry: \"\"\n")?;
        // The line belongs to this key.
        let is_nested = image.lines().all(|line| line.starts_with(' '));
        is_nested.then_some((head, image, tail))
    });
    let Some((head, image, tail)) = parts else {
        return Err(io::Error::other("a chart has no empty image.registry"));
    };
    Ok(format!(
        "{head}\nimage:\n{image}\n  registry: \"{registry}\"\n{tail}"
    ))
}

fn collect_files(folder: &Path, files: &mut Vec<PathBuf>) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        match entry.file_type()?.is_dir() {
            true => collect_files(&entry.path(), files)?,
            false => files.push(entry.path()),
        }
    }
    Ok(())
}
