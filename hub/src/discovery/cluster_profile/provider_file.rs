//! The file of access providers: programs in the hub's image that issue credentials for ClusterProfiles. It
//! has the format of the Cluster Inventory API. The hub validates the complete file and follows its
//! changes.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use krypton_runtime::periodic::file::{FileError, POLL_INTERVAL, SettingsFile, follow_file};
use serde_json::{Map, Value};
use tokio::sync::watch;

/// All access providers in order of preference.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ProviderFile {
    pub providers: Vec<AccessProvider>,
}

/// One program, and the policies for input from a profile.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AccessProvider {
    pub name: String,
    pub exec: Exec,
    pub args: ArgsPolicy,
    pub envs: EnvsPolicy,
}

/// Command line of the program.
#[derive(Clone, PartialEq, Eq)]
pub struct Exec {
    pub api_version: ApiVersion,
    /// An absolute path, or a name to look up in PATH.
    pub command: String,
    pub args: Vec<String>,
    pub env: Vec<(String, String)>,
    pub provide_cluster_info: bool,
}

/// Omits arguments and variables, which may be secret.
impl std::fmt::Debug for Exec {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Exec")
            .field("command", &self.command)
            .finish_non_exhaustive()
    }
}

/// Version of the exec credential protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ApiVersion {
    V1,
    V1beta1,
}

impl ApiVersion {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::V1 => "client.authentication.k8s.io/v1",
            Self::V1beta1 => "client.authentication.k8s.io/v1beta1",
        }
    }
}

/// Policy for arguments from a profile.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ArgsPolicy {
    Append,
    #[default]
    Ignore,
}

/// Policy for variables from a profile.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EnvsPolicy {
    /// The variables of the file win.
    AppendIfNotExists,
    /// The variables of the profile win.
    Replace,
    #[default]
    Ignore,
}

/// Why a provider file is unusable. Never contains the file's content, which may be secret.
#[derive(Debug, thiserror::Error)]
pub enum ProviderFileError {
    #[error(transparent)]
    File(#[from] FileError),
    #[error("the provider file {path}, line {line}, column {column}, is not valid JSON; correct it", path = path.display())]
    Json {
        path: PathBuf,
        line: usize,
        column: usize,
    },
    #[error("the provider file {path}: {at} {problem}", path = path.display())]
    Content {
        path: PathBuf,
        at: String,
        problem: &'static str,
    },
}

impl ProviderFile {
    /// Loads the file at `path`.
    ///
    /// # Errors
    ///
    /// If the file can't be read in time, or its content is invalid.
    pub async fn load(path: &Path) -> Result<Self, ProviderFileError> {
        parse(path, &file(path).read_in_time().await?)
    }

    /// Names of the providers, for messages.
    pub fn names(&self) -> String {
        let names: Vec<&str> = self.providers.iter().map(|p| p.name.as_str()).collect();
        if names.is_empty() {
            "none".to_owned()
        } else {
            names.join(", ")
        }
    }
}

fn file(path: &Path) -> SettingsFile {
    SettingsFile {
        name: "provider file",
        flag: "--clusterprofile-provider-file",
        path: path.to_owned(),
    }
}

/// Sends the file's content after each change to a valid file. Logs an invalid file once and keeps the last
/// good one. Ends when all receivers are dropped.
pub(super) async fn follow(path: PathBuf, tx: watch::Sender<Option<Arc<ProviderFile>>>) {
    let parse = |path: &Path, bytes: &[u8]| parse(path, bytes).map(|file| Some(Arc::new(file)));
    follow_file(file(&path), POLL_INTERVAL, tx, parse, |_| {}).await;
}

pub(crate) fn parse(path: &Path, bytes: &[u8]) -> Result<ProviderFile, ProviderFileError> {
    let document: Value =
        serde_json::from_slice(bytes).map_err(|error| ProviderFileError::Json {
            path: path.to_owned(),
            line: error.line(),
            column: error.column(),
        })?;
    providers(&At::root(&document)).map_err(|wrong| ProviderFileError::Content {
        path: path.to_owned(),
        at: wrong.at,
        problem: wrong.problem,
    })
}

/// A path in the file, and the problem there.
#[derive(Debug)]
struct Wrong {
    at: String,
    problem: &'static str,
}

/// A value of the file with its path.
struct At<'a> {
    path: String,
    value: &'a Value,
}

impl<'a> At<'a> {
    fn root(value: &'a Value) -> Self {
        let path = "$".to_owned();
        Self { path, value }
    }

    fn wrong(&self, problem: &'static str) -> Wrong {
        let at = self.path.clone();
        Wrong { at, problem }
    }

    /// Rejects unknown fields: a misspelled policy would have no effect.
    fn map(&self, known: &[&str]) -> Result<&'a Map<String, Value>, Wrong> {
        let map = self
            .value
            .as_object()
            .ok_or_else(|| self.wrong("must be an object"))?;
        if let Some(key) = map.keys().find(|key| !known.contains(&key.as_str())) {
            let shown: String = key.chars().filter(|c| !c.is_control()).take(40).collect();
            return Err(Wrong {
                at: format!("{}.{shown}", self.path),
                problem: "is not a known field; remove it or correct its name",
            });
        }
        Ok(map)
    }

    /// Null counts as missing.
    fn get(&self, key: &str) -> Option<At<'a>> {
        let value = self.value.get(key).filter(|value| !value.is_null())?;
        let path = format!("{}.{key}", self.path);
        Some(At { path, value })
    }

    fn required(&self, key: &str) -> Result<At<'a>, Wrong> {
        self.get(key).ok_or_else(|| Wrong {
            at: format!("{}.{key}", self.path),
            problem: "is missing",
        })
    }

    fn text(&self) -> Result<&'a str, Wrong> {
        match self.value.as_str() {
            None => Err(self.wrong("must be a string")),
            Some(text) if text.contains('\0') => Err(self.wrong("must not have a NUL")),
            Some(text) => Ok(text),
        }
    }

    fn name(&self) -> Result<&'a str, Wrong> {
        match self.text()? {
            "" => Err(self.wrong("must not be empty")),
            text => Ok(text),
        }
    }

    fn items(&self) -> Result<Vec<At<'a>>, Wrong> {
        let items = self
            .value
            .as_array()
            .ok_or_else(|| self.wrong("must be a list"))?;
        let at = |(index, value)| At {
            path: format!("{}[{index}]", self.path),
            value,
        };
        Ok(items.iter().enumerate().map(at).collect())
    }
}

fn providers(root: &At<'_>) -> Result<ProviderFile, Wrong> {
    root.map(&["providers"])?;
    let mut providers: Vec<AccessProvider> = Vec::new();
    for item in root.required("providers")?.items()? {
        let provider = provider(&item)?;
        if providers.iter().any(|before| before.name == provider.name) {
            return Err(Wrong {
                at: format!("{}.name", item.path),
                problem: "is there twice; leave one of the two",
            });
        }
        providers.push(provider);
    }
    Ok(ProviderFile { providers })
}

fn provider(at: &At<'_>) -> Result<AccessProvider, Wrong> {
    const ARGS: &str = "profileSourcedCLIArgsPolicy";
    const ENVS: &str = "profileSourcedEnvVarsPolicy";
    at.map(&["name", "execConfig", ARGS, ENVS])?;
    let args = match at.get(ARGS) {
        None => ArgsPolicy::default(),
        Some(policy) => match policy.text()? {
            "Append" => ArgsPolicy::Append,
            "" | "Ignore" => ArgsPolicy::Ignore,
            _ => return Err(policy.wrong("must be Append or Ignore")),
        },
    };
    let envs = match at.get(ENVS) {
        None => EnvsPolicy::default(),
        Some(policy) => match policy.text()? {
            "AppendIfNotExists" => EnvsPolicy::AppendIfNotExists,
            "Replace" => EnvsPolicy::Replace,
            "" | "Ignore" => EnvsPolicy::Ignore,
            _ => return Err(policy.wrong("must be AppendIfNotExists, Replace or Ignore")),
        },
    };
    Ok(AccessProvider {
        name: at.required("name")?.name()?.to_owned(),
        exec: exec(&at.required("execConfig")?)?,
        args,
        envs,
    })
}

fn exec(at: &At<'_>) -> Result<Exec, Wrong> {
    at.map(&[
        "apiVersion",
        "command",
        "args",
        "env",
        "provideClusterInfo",
        // Ignored: the hub has neither a user nor a terminal.
        "installHint",
        "interactiveMode",
    ])?;
    let version = at.required("apiVersion")?;
    let api_version = [ApiVersion::V1, ApiVersion::V1beta1]
        .into_iter()
        .find(|known| version.value.as_str() == Some(known.as_str()))
        .ok_or_else(|| {
            version.wrong(
                "must be client.authentication.k8s.io/v1 or client.authentication.k8s.io/v1beta1",
            )
        })?;
    let command = at.required("command")?;
    let program = command.name()?;
    if program.contains('/') && !program.starts_with('/') {
        return Err(
            command.wrong("must be an absolute path, or a name that is looked up in PATH: a relative path would depend on where the hub was started")
        );
    }
    let mut args = Vec::new();
    for item in at.get("args").map_or(Ok(Vec::new()), |args| args.items())? {
        args.push(item.text()?.to_owned());
    }
    let mut env = Vec::new();
    for item in at.get("env").map_or(Ok(Vec::new()), |env| env.items())? {
        item.map(&["name", "value"])?;
        let name = item.required("name")?;
        if name.name()?.contains('=') {
            return Err(name.wrong("must not have a ="));
        }
        let value = item.get("value").map_or(Ok(""), |value| value.text())?;
        env.push((name.name()?.to_owned(), value.to_owned()));
    }
    let provide_cluster_info = match at.get("provideClusterInfo") {
        None => false,
        Some(flag) => flag
            .value
            .as_bool()
            .ok_or_else(|| flag.wrong("must be true or false, without quotes"))?,
    };
    Ok(Exec {
        api_version,
        command: program.to_owned(),
        args,
        env,
        provide_cluster_info,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read_text(text: &str) -> Result<ProviderFile, ProviderFileError> {
        parse(Path::new("/etc/providers.json"), text.as_bytes())
    }

    #[test]
    fn inventory_api_file_with_nulls_is_parsed() {
        let file = read_text(
            r#"{"providers": [
                {"name": "secretreader",
                 "execConfig": {"apiVersion": "client.authentication.k8s.io/v1", "args": null, "env": null,
                    "command": "/plugins/secretreader", "provideClusterInfo": true, "installHint": "x",
                    "interactiveMode": "Never"}},
                {"name": "cloud",
                 "execConfig": {"apiVersion": "client.authentication.k8s.io/v1beta1", "command": "cloud",
                    "args": ["token"], "env": [{"name": "A", "value": "1"}]},
                 "profileSourcedCLIArgsPolicy": "Append",
                 "profileSourcedEnvVarsPolicy": "Replace"}]}"#,
        )
        .unwrap();
        assert_eq!(file.names(), "secretreader, cloud");
        let [reader, cloud] = file.providers.try_into().unwrap();
        assert_eq!(reader.exec.api_version, ApiVersion::V1);
        assert!(reader.exec.provide_cluster_info && reader.exec.args.is_empty());
        assert_eq!((reader.args, reader.envs), Default::default());
        assert_eq!(cloud.exec.env, [("A".to_owned(), "1".to_owned())]);
        assert_eq!(
            (cloud.args, cloud.envs),
            (ArgsPolicy::Append, EnvsPolicy::Replace)
        );
        assert_eq!(read_text(r#"{"providers": []}"#).unwrap().names(), "none");
    }

    #[test]
    fn error_names_file_and_path_without_quoting_content() {
        let exec = |more: &str| {
            format!(
                r#"{{"providers": [{{"name": "a", "execConfig": {{"apiVersion": "client.authentication.k8s.io/v1", "command": "/a"{more}}}}}]}}"#
            )
        };
        let cases = [
            ("".to_owned(), "line 1"),
            ("{\"providers\": hunter2}".to_owned(), "line 1, column 15"),
            ("[]".to_owned(), "$ must be an object"),
            ("{}".to_owned(), "$.providers is missing"),
            (
                r#"{"providers": {}}"#.to_owned(),
                "$.providers must be a list",
            ),
            (
                r#"{"provider": []}"#.to_owned(),
                "$.provider is not a known field",
            ),
            (
                r#"{"providers": [{"name": "a"}]}"#.to_owned(),
                "$.providers[0].execConfig is missing",
            ),
            (
                exec(r#", "args": ["hunter2", 1]"#),
                "$.providers[0].execConfig.args[1] must be a string",
            ),
            (
                exec(r#", "env": [{"name": "", "value": "hunter2"}]"#),
                "execConfig.env[0].name must not be empty",
            ),
            (
                exec(r#", "env": [{"name": "A=B"}]"#),
                "execConfig.env[0].name must not have a =",
            ),
            (
                exec(r#", "provideClusterInfo": "true""#),
                "provideClusterInfo must be true or false",
            ),
            (
                exec("").replace("/v1", "/v1alpha1"),
                "execConfig.apiVersion must be",
            ),
            (
                exec("").replace("\"/a\"", "\"./bin/a\""),
                "execConfig.command must be an absolute path",
            ),
            (
                exec("").replace(
                    "\"name\": \"a\"",
                    "\"name\": \"a\", \"profileSourcedCLIArgsPolicy\": \"append\"",
                ),
                "$.providers[0].profileSourcedCLIArgsPolicy must be Append or Ignore",
            ),
        ];
        for (text, expected) in cases {
            let said = read_text(&text).unwrap_err().to_string();
            assert!(said.contains(expected), "{text}: {said}");
            assert!(said.contains("/etc/providers.json"), "{said}");
            assert!(!said.contains("hunter2"), "{said}");
        }
        let twice = exec("").replace("]}", r#", {"name": "a", "execConfig": {"apiVersion": "client.authentication.k8s.io/v1", "command": "b"}}]}"#);
        let said = read_text(&twice).unwrap_err().to_string();
        assert!(
            said.contains("$.providers[1].name is there twice"),
            "{said}"
        );
    }
}
