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

/// The tests that the tables of a page name, in their last column.
fn named(page: &str) -> BTreeSet<&str> {
    page.lines()
        .filter_map(|line| line.rsplit_once(" | "))
        .flat_map(|(_, tests)| tests.split('`').skip(1).step_by(2))
        .collect()
}

#[test]
fn each_test_that_the_pages_name_is_there() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut files = Vec::new();
    for folder in ["common", "proto", "crds", "agent", "hub", "tests"] {
        sources(&root.join(folder), &mut files).unwrap();
    }
    let text: String = files
        .iter()
        .map(|file| fs::read_to_string(file).unwrap())
        .collect();
    for (page, at_least) in [("faults.md", 60), ("original-bugs.md", 50)] {
        let page = fs::read_to_string(root.join("docs").join(page)).unwrap();
        let named = named(&page);
        assert!(named.len() > at_least, "{named:?}");
        let missing: Vec<&str> = named
            .into_iter()
            .filter(|name| !text.contains(&format!("fn {name}(")))
            .collect();
        assert!(missing.is_empty(), "no such tests: {missing:#?}");
    }
}

#[test]
fn each_bug_of_the_original_has_a_row_with_a_test() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/original-bugs.md");
    let page = fs::read_to_string(path).unwrap();
    for number in 1..=36 {
        let row = page
            .lines()
            .find(|line| line.starts_with(&format!("| B{number}: ")));
        let row = row.unwrap_or_else(|| panic!("no row for B{number}"));
        assert!(!named(row).is_empty(), "no test for B{number}");
    }
}
