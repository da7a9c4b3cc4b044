//! The page of permissions, compared with the roles of the charts.

use std::collections::BTreeSet;
use std::fs;

use krypton_tests::OwnChart;
use serde_json::Value;

use crate::docs_commands::pages::{read, root};
use crate::packaging::documents;

/// Sections whose rows contain `resources: verbs` in one cell. All other rows have a cell for each.
const PEOPLE: &str = "## People";
const HELM_TEST: &str = "## `helm test`";
const OTHERS: &str = "";

/// Section, resource and verb.
type Right = (&'static str, String, String);

fn texts(list: &Value) -> Vec<&str> {
    let list = list.as_array().into_iter().flatten();
    list.filter_map(Value::as_str).collect()
}

fn rights_of(role: &Value) -> BTreeSet<Right> {
    let section = match role["metadata"]["name"].as_str() {
        Some("krypton-viewer" | "krypton-operator" | "krypton-ca-operator") => PEOPLE,
        Some(name) if name.ends_with("-test") => HELM_TEST,
        _ => OTHERS,
    };
    let mut rights = BTreeSet::new();
    for rule in role["rules"].as_array().unwrap() {
        for resource in texts(&rule["resources"]) {
            let verbs = texts(&rule["verbs"]).into_iter();
            rights.extend(verbs.map(|verb| (section, resource.to_owned(), verb.to_owned())));
        }
    }
    rights
}

/// Returns the rights that the charts grant in any of the golden files.
fn granted() -> BTreeSet<Right> {
    let mut rights = BTreeSet::new();
    for chart in OwnChart::ALL {
        let folder = root().join("tests/golden").join(chart.name());
        for file in fs::read_dir(folder).unwrap() {
            let text = fs::read_to_string(file.unwrap().path()).unwrap();
            let objects = documents(&text);
            let is_role = |object: &&Value| {
                let kind = object["kind"].as_str();
                kind.is_some_and(|kind| kind.ends_with("Role"))
            };
            rights.extend(objects.iter().filter(is_role).flat_map(rights_of));
        }
    }
    rights
}

/// Returns the parts of the text that the set contains.
fn known(text: &str, words: &BTreeSet<&str>) -> Vec<String> {
    let is_separator = |letter: char| !(letter.is_ascii_lowercase() || "./".contains(letter));
    let found = text.split(is_separator).filter(|word| words.contains(word));
    found.map(str::to_owned).collect()
}

/// Returns the rights in the tables of the page.
fn documented(page: &str, resources: &BTreeSet<&str>, verbs: &BTreeSet<&str>) -> BTreeSet<Right> {
    let mut rights = BTreeSet::new();
    let mut section = OTHERS;
    for line in page.lines() {
        if line.starts_with("## ") {
            let mut sections = [PEOPLE, HELM_TEST].into_iter();
            section = sections.find(|name| line == *name).unwrap_or(OTHERS);
        }
        let mut cells = line.split(" | ");
        let (Some(first), Some(second)) = (cells.next(), cells.next()) else {
            continue;
        };
        let rules: Vec<(&str, &str)> = match section {
            OTHERS => vec![(first, second)],
            _ => {
                let rules = second.split("; ");
                rules.filter_map(|rule| rule.rsplit_once(": ")).collect()
            }
        };
        for (of, may) in rules {
            for resource in known(of, resources) {
                let verbs = known(may, verbs).into_iter();
                rights.extend(verbs.map(|verb| (section, resource.clone(), verb)));
            }
        }
    }
    rights
}

#[test]
fn docs_permissions_match_charts() {
    let granted = granted();
    let resources = granted.iter().map(|(_, resource, _)| resource.as_str());
    let verbs = granted.iter().map(|(.., verb)| verb.as_str());
    let page = read("docs/reference/rbac.md");
    let documented = documented(&page, &resources.collect(), &verbs.collect());
    let only_granted: Vec<&Right> = granted.difference(&documented).collect();
    let only_documented: Vec<&Right> = documented.difference(&granted).collect();
    assert!(only_granted.is_empty(), "not on the page: {only_granted:?}");
    assert!(
        only_documented.is_empty(),
        "no chart grants: {only_documented:?}"
    );
    assert!(granted.len() > 80, "{}", granted.len());
}
