//! The page of annotations, labels and finalizers, compared with the sources.

use std::collections::BTreeSet;

use super::{all_sources, read_sources};
use crate::docs_commands::pages::read;

const PREFIX: &str = "mesh.openkcm.io/";

/// Returns the names with Krypton's prefix in the constants of the crates, without the prefix.
fn constants() -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    for (_, text) in read_sources(&["common", "crds", "agent", "hub", "kubectl"]) {
        let constants = text.lines().filter(|line| line.contains("const "));
        let values = constants.filter_map(|line| line.split('"').nth(1));
        names.extend(values.filter_map(|value| Some(value.strip_prefix(PREFIX)?.to_owned())));
    }
    names
}

/// Returns the names in the first cells of the page's tables, without values.
fn documented(page: &str) -> BTreeSet<String> {
    let rows = page.lines().filter(|line| line.starts_with("| "));
    let cells = rows.filter_map(|row| row.split(" | ").next());
    let quoted = cells.flat_map(|cell| cell.split('`').skip(1).step_by(2));
    let names = quoted.filter_map(|text| text.split([':', '=', '<']).next());
    names
        .map(|name| name.trim_end_matches('-').to_owned())
        .collect()
}

/// Whether the name before this text is complete. A prefix of names ends with `-`.
fn ends_name(rest: &str) -> bool {
    let rest = rest.strip_prefix('-').unwrap_or(rest);
    !rest.starts_with(|letter: char| letter.is_ascii_alphanumeric() || letter == '-')
}

#[test]
fn docs_names_match_sources() {
    let page = read("docs/reference/annotations.md");
    let (constants, documented) = (constants(), documented(&page));
    let missing: Vec<&String> = constants.difference(&documented).collect();
    assert!(missing.is_empty(), "not on the page: {missing:?}");
    let sources = all_sources() + &read("charts/krypton-hub/templates/rbac.yaml");
    let is_gone = |name: &&String| {
        let is_own = !name.contains('/');
        let prefix = if is_own { PREFIX } else { "" };
        let full_name = format!("{prefix}{name}");
        let mut after_uses = sources.split(&full_name).skip(1);
        !after_uses.any(ends_name)
    };
    let gone: Vec<&String> = documented.iter().filter(is_gone).collect();
    assert!(gone.is_empty(), "not in the sources: {gone:?}");
    assert!(constants.len() > 30, "{}", constants.len());
}
