//! The file of access providers: programs in the hub's image that issue credentials for ClusterProfiles. It
//! has the format of the Cluster Inventory API. The hub validates the complete file and follows its
//! changes.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use krypton_runtime::periodic::file::{FileError, POLL_INTERVAL, SettingsFile, follow_file};
use krypton_types::document::{FieldError, Fields};
use serde_json::Value;
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
    #[error("the provider file {path}: {field}", path = path.display())]
    Content { path: PathBuf, field: FieldError },
}

impl ProviderFile {
    /// Loads the file at `path`.
    ///
    /// # Errors
    ///
    /// If the file can't be read in time, or its content is invalid.
    pub async fn load(path: &Path) -> Result<Self, ProviderFileError> {
        parse(path, &settings_file(path).read_with_deadline().await?)
    }

    /// Names of the providers, for messages.
    pub fn names(&self) -> String {
        join_names(self.providers.iter().map(|provider| &provider.name))
    }
}

/// Joins names for messages.
pub(super) fn join_names<'a>(names: impl Iterator<Item = &'a String>) -> String {
    let names: Vec<&str> = names.map(String::as_str).collect();
    match names.is_empty() {
        true => "none".to_owned(),
        false => names.join(", "),
    }
}

fn settings_file(path: &Path) -> SettingsFile {
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
    follow_file(settings_file(&path), POLL_INTERVAL, tx, parse, |_| {}).await;
}

pub(crate) fn parse(path: &Path, bytes: &[u8]) -> Result<ProviderFile, ProviderFileError> {
    let document: Value =
        serde_json::from_slice(bytes).map_err(|error| ProviderFileError::Json {
            path: path.to_owned(),
            line: error.line(),
            column: error.column(),
        })?;
    providers(&document).map_err(|field| ProviderFileError::Content {
        path: path.to_owned(),
        field,
    })
}

const MISSING: &str = "is missing";

fn providers(document: &Value) -> Result<ProviderFile, FieldError> {
    let root = Fields::new(document, "$")?;
    root.allow_only(&["providers"])?;
    let items = root.items("providers")?;
    let mut providers: Vec<AccessProvider> = Vec::new();
    for item in items.ok_or_else(|| root.invalid("providers", MISSING))? {
        let provider = provider(&item)?;
        if providers.iter().any(|other| other.name == provider.name) {
            return Err(item.invalid("name", "occurs twice; remove one of them"));
        }
        providers.push(provider);
    }
    Ok(ProviderFile { providers })
}

fn provider(fields: &Fields<'_>) -> Result<AccessProvider, FieldError> {
    const ARGS: &str = "profileSourcedCLIArgsPolicy";
    const ENVS: &str = "profileSourcedEnvVarsPolicy";
    fields.allow_only(&["name", "execConfig", ARGS, ENVS])?;
    let args = match fields.text(ARGS)? {
        Some("Append") => ArgsPolicy::Append,
        None | Some("Ignore") => ArgsPolicy::Ignore,
        Some(_) => return Err(fields.invalid(ARGS, "must be Append or Ignore")),
    };
    let envs = match fields.text(ENVS)? {
        Some("AppendIfNotExists") => EnvsPolicy::AppendIfNotExists,
        Some("Replace") => EnvsPolicy::Replace,
        None | Some("Ignore") => EnvsPolicy::Ignore,
        Some(_) => {
            return Err(fields.invalid(ENVS, "must be AppendIfNotExists, Replace or Ignore"));
        }
    };
    let config = fields.nested("execConfig")?;
    Ok(AccessProvider {
        name: fields.required("name", MISSING)?.to_owned(),
        exec: exec(&config.ok_or_else(|| fields.invalid("execConfig", MISSING))?)?,
        args,
        envs,
    })
}

fn exec(fields: &Fields<'_>) -> Result<Exec, FieldError> {
    fields.allow_only(&[
        "apiVersion",
        "command",
        "args",
        "env",
        "provideClusterInfo",
        // Ignored: the hub has neither a user nor a terminal.
        "installHint",
        "interactiveMode",
    ])?;
    let version = fields.required("apiVersion", MISSING)?;
    let api_version = [ApiVersion::V1, ApiVersion::V1beta1]
        .into_iter()
        .find(|known| known.as_str() == version)
        .ok_or_else(|| {
            fields.invalid(
                "apiVersion",
                "must be client.authentication.k8s.io/v1 or client.authentication.k8s.io/v1beta1",
            )
        })?;
    let command = fields.required("command", MISSING)?;
    if command.contains('/') && !command.starts_with('/') {
        return Err(fields.invalid(
            "command",
            "must be an absolute path, or a name that is looked up in PATH: a relative path would depend on where the hub was started",
        ));
    }
    let mut env = Vec::new();
    for item in fields.items("env")?.unwrap_or_default() {
        item.allow_only(&["name", "value"])?;
        let name = item.required("name", MISSING)?;
        if name.contains('=') {
            return Err(item.invalid("name", "must not have a ="));
        }
        let value = item.text("value")?.unwrap_or_default();
        env.push((name.to_owned(), value.to_owned()));
    }
    let args = fields.texts("args")?.into_iter().map(str::to_owned);
    Ok(Exec {
        api_version,
        command: command.to_owned(),
        args: args.collect(),
        env,
        provide_cluster_info: fields.flag("provideClusterInfo")?,
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
        let twice = exec("").replace("]}", r#", {"name": "a", "execConfig": {"apiVersion": "client.authentication.k8s.io/v1", "command": "b"}}]}"#);
        for (text, expected) in [
            ("", "line 1"),
            (r#"{"providers": hunter2}"#, "line 1, column 15"),
            ("[]", "$ must be a map"),
            ("{}", "$.providers is missing"),
            (r#"{"providers": {}}"#, "$.providers must be a list"),
            (r#"{"provider": []}"#, "$.provider is not a known field"),
            (
                r#"{"providers": [{"name": "a"}]}"#,
                "$.providers[0].execConfig is missing",
            ),
            (&twice, "$.providers[1].name occurs twice"),
            (
                &exec(r#", "args": ["hunter2", 1]"#),
                "$.providers[0].execConfig.args[1] must be a string",
            ),
            (
                &exec(r#", "env": [{"name": "", "value": "hunter2"}]"#),
                "execConfig.env[0].name is missing",
            ),
            (
                &exec(r#", "env": [{"name": "A=B"}]"#),
                "execConfig.env[0].name must not have a =",
            ),
            (
                &exec(r#", "provideClusterInfo": "true""#),
                "provideClusterInfo must be true or false",
            ),
            (
                &exec("").replace("/v1", "/v1alpha1"),
                "execConfig.apiVersion must be",
            ),
            (
                &exec("").replace("\"/a\"", "\"./bin/a\""),
                "execConfig.command must be an absolute path",
            ),
            (
                &exec("").replace(
                    "\"name\": \"a\"",
                    "\"name\": \"a\", \"profileSourcedCLIArgsPolicy\": \"append\"",
                ),
                "$.providers[0].profileSourcedCLIArgsPolicy must be Append or Ignore",
            ),
        ] {
            let error = read_text(text).unwrap_err().to_string();
            assert!(error.contains(expected), "{text}: {error}");
            assert!(error.contains("/etc/providers.json"), "{error}");
            assert!(!error.contains("hunter2"), "{error}");
        }
    }
}
