//! Verifies tests, reasons, links and generated parts of the documentation.

mod alerts;
mod api;
pub(crate) mod generated;
mod kubectl;
mod names;
mod rbac;
mod values;

use krypton_tests::TestResult;
use std::{
    collections::BTreeSet,
    fs, io,
    path::{Path, PathBuf},
};

use crate::docs_commands::pages::{pages, read, root};

/// Finds all Rust files of the workspace's crates.
fn find_sources(folder: &Path, found: &mut Vec<PathBuf>) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_dir() {
            find_sources(&path, found)?;
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
    Ok(())
}

/// Returns the Rust files in these folders of the workspace, with their text.
fn read_sources(folders: &[&str]) -> Vec<(PathBuf, String)> {
    let mut files = Vec::new();
    for folder in folders {
        find_sources(&root().join(folder), &mut files).unwrap();
    }
    let read = |file: PathBuf| {
        let text = fs::read_to_string(&file).unwrap();
        (file, text)
    };
    files.into_iter().map(read).collect()
}

/// Returns the source text of all crates.
fn all_sources() -> String {
    let folders = [
        "common",
        "proto",
        "crds",
        "agent",
        "hub",
        "kubectl",
        "simulation",
        "tests",
    ];
    let sources = read_sources(&folders).into_iter();
    sources.map(|(_, text)| text).collect()
}

/// Returns the source text of the product without its tests.
fn product_sources() -> String {
    let root = root();
    let is_product = |(file, _): &(PathBuf, String)| {
        let path = file.strip_prefix(&root).unwrap_or(file);
        path.iter()
            .all(|name| name != "tests" && name != "tests.rs")
    };
    let sources = read_sources(&["common", "agent", "hub", "kubectl"]).into_iter();
    let texts = sources.filter(is_product).map(|(_, text)| {
        let (product, _) = text
            .split_once("#[cfg(test)]\nmod tests {")
            .unwrap_or((&text, ""));
        product.to_owned()
    });
    texts.collect()
}

/// Returns the tests in the last column of the page's tables.
fn named_tests(page: &str) -> BTreeSet<&str> {
    page.lines()
        .filter_map(|line| line.rsplit_once(" | "))
        .flat_map(|(_, tests)| tests.split('`').skip(1).step_by(2))
        .collect()
}

/// Returns the name of the function on this line.
fn function_name(line: &str) -> Option<&str> {
    let line = line.strip_prefix("pub ").unwrap_or(line);
    let line = line.strip_prefix("async ").unwrap_or(line);
    let (name, _) = line.strip_prefix("fn ")?.split_once('(')?;
    Some(name)
}

/// Returns the tests of a source file that run.
pub(crate) fn tests_of(source: &str) -> BTreeSet<&str> {
    let mut references = BTreeSet::new();
    let mut is_test = false;
    for line in source.lines().map(str::trim) {
        if line.starts_with("#[test]") || line.starts_with("#[tokio::test") {
            is_test = true;
        } else if line.starts_with("#[ignore") {
            is_test = false;
        } else if let Some(name) = function_name(line) {
            references.extend(is_test.then_some(name));
            is_test = false;
        }
    }
    for each in ["in_both_modes!(", "by_agent!("] {
        let lists = source.split(each).skip(1);
        let bodies = lists.filter_map(|list| Some(list.split_once(");")?.0));
        let names = bodies.flat_map(|bodies| bodies.split(',').map(str::trim));
        references.extend(names.filter(|name| !name.is_empty()));
    }
    references
}

#[test]
fn only_enabled_tests_count() {
    let source = "
        #[tokio::test(start_paused = true)]
        async fn one() {}
        fn helper() {}
        #[test]
        #[ignore = \"slow\"]
        fn ignored() {}
        in_both_modes!(two, three);
        by_agent!(four,);
    ";
    assert_eq!(tests_of(source), ["one", "two", "three", "four"].into());
}

/// Returns whether this is a scenario of the simulation, such as `scenarios/a-hub-dies.plan`.
fn is_scenario(name: &str) -> bool {
    name.starts_with("scenarios/") && root().join("simulation/fleet").join(name).is_file()
}

#[test]
fn tests_in_pages_exist() {
    let text = all_sources();
    let tests = tests_of(&text);
    for (page, section, at_least) in [
        ("contributing/faults.md", "", 200),
        ("contributing/original-bugs.md", "", 50),
        ("explanation/security.md", "\n## Attackers\n", 8),
    ] {
        let page = read(&format!("docs/{page}"));
        let section_text = match section {
            "" => page.as_str(),
            title => {
                let (_, rest) = page.split_once(title).unwrap();
                rest.split("\n## ").next().unwrap()
            }
        };
        let named = named_tests(section_text);
        assert!(named.len() > at_least, "{named:?}");
        let missing: Vec<&str> = named
            .into_iter()
            .filter(|name| !tests.contains(name) && !is_scenario(name))
            .collect();
        assert!(missing.is_empty(), "no such tests: {missing:#?}");
    }
}

/// Returns the reasons in `mod reason`, or in the whole file.
fn reasons(text: &str) -> Vec<&str> {
    let module = text
        .split_once("pub mod reason {")
        .and_then(|(_, rest)| rest.split_once("\n}"));
    let (module, _) = module.unwrap_or((text, ""));
    let constants = module.lines().filter(|line| line.contains("pub const "));
    constants
        .filter_map(|line| line.split('"').nth(1))
        .collect()
}

#[test]
fn every_reason_is_documented_with_remedy() {
    let page = read("docs/reference/reasons.md");
    // The first cell of each row that contains a remedy.
    let rows = page.lines().filter_map(|line| {
        let cells: Vec<&str> = line.split(" | ").collect();
        let has_remedy = cells.last().is_some_and(|last| last.len() > 2);
        (line.starts_with("| ") && cells.len() == 3 && has_remedy).then(|| cells[0])
    });
    let documented: BTreeSet<&str> = rows
        .flat_map(|cell| cell.split('`').skip(1).step_by(2))
        .collect();
    let mut count = 0;
    for file in [
        "common/types/src/conditions/reason.rs",
        "hub/src/members/agent_keys.rs",
        "hub/src/edgecluster/credential_expiry.rs",
        "hub/src/agent_server/enrollment_audit.rs",
    ] {
        let text = read(file);
        let reasons = reasons(&text);
        assert!(!reasons.is_empty(), "{file}");
        for reason in reasons {
            assert!(documented.contains(reason), "no row for {reason} of {file}");
            count += 1;
        }
    }
    assert!(count > 80, "{count}");
    let sources = product_sources();
    let is_reason = |name: &&&str| name.chars().all(char::is_alphanumeric);
    for name in documented.iter().filter(is_reason) {
        assert!(sources.contains(&format!("\"{name}\"")), "{name} is gone");
    }
}

/// Returns the reasons of events that the code contains as text.
fn event_reasons(code: &str) -> Vec<&str> {
    let calls = [
        "ObjectEvent::normal(",
        "ObjectEvent::warning(",
        "add(false, ",
        "add(true, ",
    ];
    calls
        .into_iter()
        .flat_map(|call| code.split(call).skip(1))
        .filter_map(|rest| rest.trim_start().strip_prefix('"')?.split('"').next())
        .collect()
}

#[test]
fn every_event_is_documented() {
    let page = read("docs/reference/reasons.md");
    let documented: BTreeSet<&str> = page
        .lines()
        .filter(|line| line.starts_with("| "))
        .flat_map(|line| line.split('`').skip(1).step_by(2))
        .collect();
    let mut reasons = BTreeSet::new();
    for (_, text) in read_sources(&["common/reconciler/src", "hub/src"]) {
        let (code, _) = text
            .split_once("#[cfg(test)]")
            .unwrap_or((text.as_str(), ""));
        reasons.extend(event_reasons(code).into_iter().map(str::to_owned));
    }
    for reason in &reasons {
        assert!(
            documented.contains(reason.as_str()),
            "no row for event {reason}"
        );
    }
    assert!(reasons.len() > 35, "{}", reasons.len());
}

#[test]
fn every_original_bug_has_row_with_test() {
    let page = read("docs/contributing/original-bugs.md");
    for number in 1..=36 {
        let row = page
            .lines()
            .find(|line| line.starts_with(&format!("| B{number}: ")));
        let row = row.unwrap_or_else(|| panic!("no row for B{number}"));
        assert!(!named_tests(row).is_empty(), "no test for B{number}");
    }
}

/// The links of these rows are verified with all others.
#[test]
fn migration_guide_lists_every_original_example() {
    let page = read("docs/how-to/migrate.md");
    let rows: String = page.lines().filter(|line| line.starts_with("| ")).collect();
    for name in [
        "account-dev",
        "cryptoedgedeployment-echo",
        "e2e-mini",
        "remote-kubeconfig-secret",
        "tenant-acme",
        "tenant-cert-manager-clusterref",
        "tenant-remote-simple",
    ] {
        let file = format!("`examples/{name}.yaml`");
        assert!(rows.contains(&file), "no row for {file}");
    }
}

/// Returns the folder of a crate's sources, or `None` if the name is not a crate of the product.
fn sources_of(crate_name: &str) -> Option<PathBuf> {
    let root = root();
    let folder = match crate_name {
        "types" | "runtime" | "helm" | "reconciler" => root.join("common").join(crate_name),
        "crds" | "proto" | "agent" | "hub" | "kubectl" => root.join(crate_name),
        _ => return None,
    };
    Some(folder.join("src"))
}

/// Returns whether the program lacks the module, which only tests compile.
fn is_test_module(sources: &Path, module: &str) -> TestResult<bool> {
    let (parent, name) = module.rsplit_once("::").unwrap_or(("lib", module));
    let declarations = fs::read_to_string(sources.join(parent.replace("::", "/") + ".rs"))?;
    Ok(declarations.contains(&format!("#[cfg(test)]\nmod {name};")))
}

#[test]
fn architecture_names_existing_modules_and_tests() -> TestResult {
    let page = read("ARCHITECTURE.md");
    let quoted = |text: &str| -> Vec<String> {
        let parts = text.split('`').skip(1).step_by(2);
        parts.map(str::to_owned).collect()
    };
    let is_name = |name: &str| name.chars().all(|c| c.is_ascii_lowercase() || c == '_');
    let mut modules = 0;
    // Fences have three or four quotes.
    let lines = page.lines().filter(|line| !line.contains("```"));
    for path in lines.flat_map(quoted) {
        let Some((crate_name, module)) = path.split_once("::") else {
            continue;
        };
        let Some(sources) = sources_of(crate_name) else {
            continue;
        };
        let file = sources.join(module.replace("::", "/") + ".rs");
        assert!(file.is_file(), "{path}: no {}", file.display());
        modules += 1;
    }
    assert!(modules > 150, "{modules}");
    let (_, guarantees) = page.split_once("## Guarantees").unwrap();
    let mut tests = 0;
    for row in guarantees.lines().filter(|line| line.starts_with("| ")) {
        let (code, last) = row.rsplit_once(" | ").unwrap();
        for path in quoted(code) {
            let Some((crate_name, module)) = path.split_once("::") else {
                continue;
            };
            if let Some(sources) = sources_of(crate_name) {
                assert!(
                    !is_test_module(&sources, module)?,
                    "{row}: {path} is a test"
                );
            }
        }
        for name in quoted(last).iter().filter(|name| is_name(name)) {
            let file = root().join(format!("tests/tests/e2e/{name}.rs"));
            assert!(file.is_file(), "{row}: no {}", file.display());
            tests += 1;
        }
    }
    assert!(tests > 60, "{tests}");
    Ok(())
}

/// Users read the pages of the charts elsewhere, too, so these link to files by this address.
const REPOSITORY: &str = "https://github.com/openkcm/krypton/blob/main/";

/// Returns the targets of the page's links, except those to other sites.
fn links(page: &str) -> Vec<&str> {
    let prose = page.split("```").step_by(2);
    let after = prose.flat_map(|text| text.split("](").skip(1));
    let targets = after.filter_map(|rest| Some(rest.split_once(')')?.0));
    let is_own = |target: &&str| target.starts_with(REPOSITORY) || !target.contains(':');
    targets.filter(is_own).collect()
}

/// Returns the anchors of the page's headings.
fn anchors(page: &str) -> BTreeSet<String> {
    let headings = page.lines().filter(|line| line.starts_with('#'));
    let is_anchor_char = |letter: &char| letter.is_alphanumeric() || " -_".contains(*letter);
    let anchor = |line: &str| line.trim_start_matches('#').trim().to_lowercase();
    let anchors = headings.map(|line| {
        anchor(line)
            .chars()
            .filter(is_anchor_char)
            .collect::<String>()
    });
    anchors.map(|anchor| anchor.replace(' ', "-")).collect()
}

#[test]
fn links_in_pages_lead_to_existing_headings() {
    let root = root();
    let mut count = 0;
    for page in pages().into_iter().chain(["ARCHITECTURE.md".to_owned()]) {
        let source = root.join(&page);
        let text = fs::read_to_string(&source).unwrap();
        for link in links(&text) {
            let (path, anchor) = link.split_once('#').unwrap_or((link, ""));
            let target = match (path.strip_prefix(REPOSITORY), path) {
                (Some(path), _) => root.join(path),
                (None, "") => source.clone(),
                (None, path) => source.parent().unwrap().join(path),
            };
            assert!(target.exists(), "{page}: no {link}");
            if !anchor.is_empty() {
                let text = fs::read_to_string(&target).unwrap();
                assert!(anchors(&text).contains(anchor), "{page}: no {link}");
            }
            count += 1;
        }
    }
    assert!(count > 200, "{count}");
}

#[test]
fn links_in_kubectl_lead_to_existing_headings() {
    let mut count = 0;
    for (file, source) in read_sources(&["kubectl/src"]) {
        let is_link = |text: &&str| {
            let is_relative = text.starts_with(char::is_lowercase);
            is_relative && text.contains(".md#") && !text.contains([' ', '\n', ':'])
        };
        for link in source.split('"').filter(is_link) {
            let (path, anchor) = link.split_once('#').unwrap();
            let anchors = anchors(&read(&format!("docs/{path}")));
            assert!(anchors.contains(anchor), "{}: no {link}", file.display());
            count += 1;
        }
    }
    assert!(count > 20, "{count}");
}

#[test]
fn index_lists_every_page() {
    let (index, commands) = (read("docs/README.md"), read("docs/reference/kubectl.md"));
    let linked: BTreeSet<&str> = links(&index).into_iter().collect();
    let commands: BTreeSet<&str> = links(&commands).into_iter().collect();
    for page in pages() {
        let Some(path) = page
            .strip_prefix("docs/")
            .filter(|path| *path != "README.md")
        else {
            continue;
        };
        let is_command = path
            .strip_prefix("reference/")
            .is_some_and(|path| path.starts_with("kubectl/") && commands.contains(path));
        assert!(
            is_command || linked.contains(path),
            "docs/README.md: no {page}"
        );
    }
}

#[test]
fn readme_stays_short() {
    let words = read("README.md").split_whitespace().count();
    assert!(words < 700, "{words}");
}

#[test]
fn test_names_have_at_most_eight_words() {
    let text = all_sources();
    let tests = tests_of(&text);
    assert!(tests.len() > 1_200, "{}", tests.len());
    let is_long = |name: &&str| name.split('_').count() > 8;
    let long: Vec<&str> = tests.into_iter().filter(is_long).collect();
    assert!(long.is_empty(), "{long:#?}");
}
