//! Embeds the Helm charts of hub and agent.

use std::env;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

fn main() -> io::Result<()> {
    let charts = Path::new(&env::var("CARGO_MANIFEST_DIR").unwrap_or_default()).join("../charts");
    println!("cargo::rerun-if-changed={}", charts.display());
    let mut generated = String::new();
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
            if !path.starts_with("ci") && path != Path::new("README.md") {
                generated += &format!("    ({path:?}, include_str!({file:?})),\n");
            }
        }
        generated += "];\n";
    }
    let out_dir = env::var("OUT_DIR").map_err(io::Error::other)?;
    fs::write(Path::new(&out_dir).join("charts.rs"), generated)
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
