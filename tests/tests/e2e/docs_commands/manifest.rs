//! Parses `tests/docs/commands.yaml`, which assigns each documented command to the test that runs it.

use std::collections::BTreeMap;

use serde::Deserialize;

use super::pages::read;

/// The cluster or machine on which a command runs.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum At {
    #[default]
    Home,
    #[serde(rename = "edge-1")]
    Edge,
}

/// One command, exactly as in a page.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Entry {
    pub(crate) command: String,
    /// The part of the story that runs the command.
    pub(crate) run: Option<String>,
    #[serde(default)]
    pub(crate) at: At,
    /// Values of the placeholders in capitals.
    #[serde(default)]
    pub(crate) with: BTreeMap<String, String>,
    /// A part of the expected output.
    pub(crate) says: Option<String>,
    /// The expected exit code.
    #[serde(default)]
    pub(crate) ends: i32,
    /// Alternatively, the test that runs a similar command, as `module::name`.
    pub(crate) test: Option<String>,
    /// Alternatively, the script that runs it, with a text of the script.
    pub(crate) script: Option<Script>,
    /// The reason why the command doesn't run here.
    pub(crate) why: Option<String>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Script {
    pub(crate) file: String,
    pub(crate) holds: String,
}

pub(crate) fn entries() -> Vec<Entry> {
    serde_saphyr::from_str(&read("tests/docs/commands.yaml")).unwrap()
}
