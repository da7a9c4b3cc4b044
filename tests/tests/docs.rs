//! What the documentation says of tests.

use std::{
    collections::BTreeSet,
    fs, io,
    path::{Path, PathBuf},
};

/// All Rust files of the workspace's crates.
fn sources(folder: &Path, found: &mut Vec<PathBuf>) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default();
        if path.is_dir() && name != "target" && name != "fuzz" {
            sources(&path, found)?;
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
    Ok(())
}

#[test]
fn each_test_that_the_fault_table_names_is_there() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let page = fs::read_to_string(root.join("docs/faults.md")).unwrap();
    let named: BTreeSet<&str> = page
        .lines()
        .filter_map(|line| line.rsplit_once(" | "))
        .flat_map(|(_, tests)| tests.split('`').skip(1).step_by(2))
        .collect();
    assert!(named.len() > 60, "{named:?}");
    let mut files = Vec::new();
    for folder in ["common", "proto", "crds", "agent", "hub", "tests"] {
        sources(&root.join(folder), &mut files).unwrap();
    }
    let text: String = files
        .iter()
        .map(|file| fs::read_to_string(file).unwrap())
        .collect();
    let missing: Vec<&str> = named
        .into_iter()
        .filter(|name| !text.contains(&format!("fn {name}(")))
        .collect();
    assert!(missing.is_empty(), "no such tests: {missing:#?}");
}
