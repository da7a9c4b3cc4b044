//! `tests/docs/commands.yaml`: who runs each command of the pages that no block says it of.

use std::{collections::BTreeMap, fs};

use serde::Deserialize;

use super::pages::root;

/// Where a command is typed.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum At {
    #[default]
    Home,
    #[serde(rename = "edge-1")]
    Edge,
}

/// One command, as it stands in a page.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Entry {
    pub(crate) command: String,
    /// Part of the story here in which it is run.
    pub(crate) run: Option<String>,
    #[serde(default)]
    pub(crate) at: At,
    /// What stands for the words in capitals.
    #[serde(default)]
    pub(crate) with: BTreeMap<String, String>,
    /// Something that it prints.
    pub(crate) says: Option<String>,
    /// Its exit code.
    #[serde(default)]
    pub(crate) ends: i32,
    /// Or the test that runs the same another way, as `module::name`.
    pub(crate) test: Option<String>,
    /// Or the script that does, with words of it.
    pub(crate) script: Option<Script>,
    /// Why it is not run here.
    pub(crate) why: Option<String>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Script {
    pub(crate) file: String,
    pub(crate) holds: String,
}

pub(crate) fn entries() -> Vec<Entry> {
    let path = root().join("tests/docs/commands.yaml");
    let text = fs::read_to_string(path).unwrap();
    serde_saphyr::from_str(&text).unwrap()
}
