//! The file of access providers: programs in the hub's image that issue credentials for ClusterProfiles. It
//! has the format of the Cluster Inventory API. The hub validates the complete file and follows its
//! changes.

use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use krypton_types::error_chain::chain;
use serde_json::{Map, Value};
use tokio::sync::watch;
use tokio::time::MissedTickBehavior;

use crate::chart::values_file::{DEADLINE, in_time, read_patiently};

/// Size limit of the file, equal to that of a ConfigMap.
const MAX_BYTES: u64 = 1024 * 1024;
/// Poll interval. A mounted ConfigMap changes by swapped symlinks, which watches of a path miss.
pub const POLL_INTERVAL: Duration = Duration::from_secs(2);

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
    #[error("reading the provider file {path} failed; correct --clusterprofile-provider-file or the file's permissions", path = path.display())]
    Read {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    #[error("the provider file {path} does not answer within {} s; check whether its mount hangs", DEADLINE.as_secs(), path = path.display())]
    Hangs { path: PathBuf },
    #[error("the provider file {path} is not a regular file; name a file with --clusterprofile-provider-file", path = path.display())]
    NotAFile { path: PathBuf },
    #[error("the provider file {path} is larger than 1 MiB; shorten it", path = path.display())]
    TooLarge { path: PathBuf },
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
    pub fn load(path: &Path) -> Result<Self, ProviderFileError> {
        parse(path, &read(path)?)
    }

    /// Like [`Self::load`], for a mount that may hang.
    ///
    /// # Errors
    ///
    /// As [`Self::load`], and if the mount doesn't respond in time.
    pub async fn load_in_time(path: &Path) -> Result<Self, ProviderFileError> {
        let at = path.to_owned();
        let loaded = in_time(DEADLINE, move || Self::load(&at)).await;
        loaded.unwrap_or_else(|| {
            Err(ProviderFileError::Hangs {
                path: path.to_owned(),
            })
        })
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

/// Sends the file's content after each change to a valid file. Logs an invalid file once and keeps the last
/// good one. Ends when all receivers are dropped.
pub async fn watch(path: PathBuf, every: Duration, tx: watch::Sender<Option<Arc<ProviderFile>>>) {
    let mut last = None;
    let mut ticks = tokio::time::interval(every);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            () = tx.closed() => return,
            _ = ticks.tick() => {}
        }
        let at = path.clone();
        let hangs = |hangs: bool| {
            let path = path.display();
            if hangs {
                tracing::error!(%path, "the file of access providers does not answer; check whether its mount hangs");
            } else {
                tracing::info!(%path, "the file of access providers answers again");
            }
        };
        let looking = read_patiently(DEADLINE, move || read(&at), hangs);
        let content = tokio::select! {
            () = tx.closed() => return,
            content = looking => content,
        };
        let Some(content) = content else {
            continue; // the runtime is shutting down
        };
        let seen = match &content {
            Ok(bytes) => Ok(bytes.clone()),
            Err(error) => Err(chain(error)),
        };
        if last.as_ref() == Some(&seen) {
            continue;
        }
        last = Some(seen);
        match content.and_then(|bytes| parse(&path, &bytes)) {
            Ok(file) => {
                let changed = tx.send_if_modified(|before| {
                    let differs = before.as_deref() != Some(&file);
                    if differs {
                        *before = Some(Arc::new(file));
                    }
                    differs
                });
                if changed {
                    tracing::info!(path = %path.display(), "the access providers of ClusterProfiles have changed");
                }
            }
            Err(error) => {
                tracing::error!(error = %chain(&error), "the access providers of ClusterProfiles stay as they were");
            }
        }
    }
}

fn read(path: &Path) -> Result<Vec<u8>, ProviderFileError> {
    let path_buf = || path.to_owned();
    let failed = |source| ProviderFileError::Read {
        path: path_buf(),
        source,
    };
    // Opening a pipe would wait for a writer.
    if !std::fs::metadata(path).map_err(failed)?.is_file() {
        return Err(ProviderFileError::NotAFile { path: path_buf() });
    }
    let mut bytes = Vec::new();
    let file = std::fs::File::open(path).map_err(failed)?;
    file.take(MAX_BYTES + 1)
        .read_to_end(&mut bytes)
        .map_err(failed)?;
    if bytes.len() as u64 > MAX_BYTES {
        return Err(ProviderFileError::TooLarge { path: path_buf() });
    }
    Ok(bytes)
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
    use krypton_runtime::newest::NewestSeen as _;

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

    #[tokio::test]
    async fn changed_file_is_reloaded_and_bad_file_ignored() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("config.json");
        let write = |text: &str| {
            std::fs::write(folder.path().join("next"), text).unwrap();
            std::fs::rename(folder.path().join("next"), &path).unwrap();
        };
        write(r#"{"providers": []}"#);
        let first = Arc::new(ProviderFile::load(&path).unwrap());
        let (tx, mut rx) = watch::channel(Some(first));
        let watching = tokio::spawn(watch(path.clone(), Duration::from_millis(5), tx));
        write("{");
        let one = r#"{"providers": [{"name": "a", "execConfig": {"apiVersion": "client.authentication.k8s.io/v1", "command": "a"}}]}"#;
        write(one);
        rx.changed().await.unwrap();
        assert_eq!(rx.see().as_ref().unwrap().names(), "a");
        write("{");
        write(&one.replace("\"a\"", "\"b\""));
        rx.changed().await.unwrap();
        assert_eq!(rx.see().as_ref().unwrap().names(), "b");
        drop(rx);
        watching.await.unwrap();
    }
}
