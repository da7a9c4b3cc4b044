//! Installs and uninstalls the charts of hub and agent with the user's Helm. The program contains both charts.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use krypton_runtime::args::go_values::parse_duration;
use krypton_runtime::lease::SYSTEM_NAMESPACE;
use serde_json::Value;
use tempfile::TempDir;

use crate::error::KubectlError;
use crate::home::{Connection, DEFAULT_HUB_NAMESPACE, TargetArgs};
use crate::program::{Program, pods_of, unready_cause};
use crate::render::text_at;
use crate::tool::Tool;

include!(concat!(env!("OUT_DIR"), "/charts.rs"));

/// Oldest Helm with all flags of [`ChartRelease::install`]: major and minor version.
const MIN_HELM: (u32, u32) = (3, 14);
/// Pods that an error describes.
const PODS_MAX: usize = 3;
/// Time for Helm to end after its own timeout.
const GRACE: Duration = Duration::from_secs(60);

impl Program {
    /// Namespace if the user names none.
    pub(crate) fn default_namespace(self) -> &'static str {
        match self {
            Self::Hub => DEFAULT_HUB_NAMESPACE,
            Self::Agent => SYSTEM_NAMESPACE,
        }
    }

    /// Writes the chart into a folder.
    fn unpack(self, folder: &Path) -> io::Result<()> {
        let files = match self {
            Self::Hub => KRYPTON_HUB,
            Self::Agent => KRYPTON_AGENT,
        };
        for (path, content) in files {
            let path = folder.join(path);
            if let Some(parent) = path.parent() {
                fs::create_dir_all(parent)?;
            }
            fs::write(path, content)?;
        }
        Ok(())
    }
}

/// The Helm program and its deadline.
#[derive(Clone, Debug, Args)]
pub(crate) struct HelmArgs {
    /// The Helm program, version 3.14 or newer
    #[arg(long, value_name = "PATH", default_value = "helm")]
    helm: PathBuf,
    /// Time to wait until everything is ready or removed
    #[arg(long, value_name = "DURATION", default_value = "5m", value_parser = parse_timeout)]
    pub(crate) timeout: Duration,
}

/// Values for a chart, with Helm's own flags.
#[derive(Clone, Debug, Default, Args)]
pub(crate) struct ChartValues {
    /// File with values for Krypton's chart; repeatable
    #[arg(short = 'f', long = "values", value_name = "FILE")]
    files: Vec<String>,
    /// A value for Krypton's chart, as in Helm's --set; repeatable
    #[arg(long = "set", value_name = "KEY=VALUE")]
    values: Vec<String>,
    /// A value that is a text, as in Helm's --set-string; repeatable
    #[arg(long = "set-string", value_name = "KEY=VALUE")]
    texts: Vec<String>,
    /// A value from a file, as in Helm's --set-file; repeatable
    #[arg(long = "set-file", value_name = "KEY=FILE")]
    texts_of_files: Vec<String>,
}

impl ChartValues {
    /// Returns Helm's flags. For Helm, the kind of the flag decides which value wins, and not the order.
    pub(crate) fn flags(&self) -> Vec<[String; 2]> {
        let flags = [
            ("--values", &self.files),
            ("--set", &self.values),
            ("--set-string", &self.texts),
            ("--set-file", &self.texts_of_files),
        ];
        let flags = flags.into_iter();
        let flags = flags.flat_map(|(flag, args)| args.iter().map(move |arg| [flag, arg]));
        flags.map(|flag| flag.map(str::to_owned)).collect()
    }

    /// Returns whether a flag or a file sets this value. As in Helm, null removes a value, and flags override files. Helm
    /// reports a file that cannot be read.
    pub(crate) fn sets(&self, key: &str) -> bool {
        let texts = self.texts.iter().chain(&self.texts_of_files);
        let mut texts = texts.flat_map(|arg| assignments(arg));
        if texts.any(|(name, _)| name == key) {
            return true;
        }
        let values = self.values.iter().flat_map(|arg| assignments(arg));
        let concerns =
            |name: &str, value: &str| name == key || is_null(value) && is_parent(name, key);
        if let Some((_, value)) = values.filter(|(name, value)| concerns(name, value)).last() {
            return !is_null(value);
        }
        let is_in_file = |file: &String| {
            let text = fs::read_to_string(file).ok()?;
            let values: Value = serde_saphyr::from_str(&text).ok()?;
            // A number is a value, too, as in `tag: 1.20`.
            let mut parents = key.split('.');
            let found = parents.try_fold(&values, |value, name| match value {
                Value::Null => Some(value),
                value => value.get(name),
            });
            found.map(|value| !value.is_null())
        };
        self.files.iter().rev().find_map(is_in_file) == Some(true)
    }
}

fn is_null(value: &str) -> bool {
    value.eq_ignore_ascii_case("null")
}

fn is_parent(name: &str, key: &str) -> bool {
    let rest = key.strip_prefix(name);
    rest.is_some_and(|rest| rest.starts_with('.'))
}

/// Returns the keys and values in the argument of one of Helm's flags.
fn assignments(arg: &str) -> impl Iterator<Item = (&str, &str)> {
    arg.split(',').filter_map(|part| part.split_once('='))
}

impl HelmArgs {
    fn tool(&self) -> Tool<'_> {
        Tool {
            name: "Helm",
            path: &self.helm,
            remedy: "install Helm, or name it with --helm",
        }
    }

    /// The release of the program in a namespace of this cluster.
    pub(crate) fn release<'a>(
        &'a self,
        program: Program,
        namespace: &'a str,
        cluster: &'a TargetArgs,
    ) -> ChartRelease<'a> {
        ChartRelease {
            program,
            namespace,
            cluster,
            helm: self,
        }
    }

    /// Fails if Helm cannot run or is too old. Contacts no cluster.
    pub(crate) async fn check_version(&self) -> Result<(), KubectlError> {
        let task = ("to print its version", "nothing was changed");
        let version = self.tool().run(["version", "--short"], GRACE, task).await?;
        let version = version.trim();
        match parse_version(version) {
            Some(found) if found < MIN_HELM => {
                let (major, minor) = MIN_HELM;
                Err(KubectlError::Failed(format!(
                    "{} is Helm {version}, older than {major}.{minor}; install a newer Helm, or name it with --helm",
                    self.helm.display()
                )))
            }
            // A development version may have another form. Helm itself rejects a flag that it does not know.
            _ => Ok(()),
        }
    }
}

/// Returns the major and minor version in the output of `helm version --short`.
fn parse_version(text: &str) -> Option<(u32, u32)> {
    let mut parts = text.trim_start_matches('v').split('.');
    let major = parts.next()?.parse().ok()?;
    let minor = parts.next()?.parse().ok()?;
    Some((major, minor))
}

fn parse_timeout(text: &str) -> Result<Duration, &'static str> {
    let valid = parse_duration(text).filter(|timeout| !timeout.is_zero());
    valid.ok_or("write a duration, as 90s or 10m")
}

/// A release of one of the charts.
pub(crate) struct ChartRelease<'a> {
    program: Program,
    namespace: &'a str,
    cluster: &'a TargetArgs,
    helm: &'a HelmArgs,
}

impl ChartRelease<'_> {
    /// Installs or upgrades it and waits until it is ready. Values of an earlier installation remain. `chart` replaces
    /// the chart in this program; `values` are Helm's own flags. Returns Helm's output. If Helm fails, the error also
    /// contains the causes of pods that are not ready.
    pub(crate) async fn install(
        &self,
        connection: &Connection,
        chart: Option<&str>,
        values: &[[String; 2]],
    ) -> Result<String, KubectlError> {
        let folder = TempDir::with_prefix("krypton-chart-").map_err(unpacking)?;
        let chart = match chart {
            Some(chart) => OsString::from(chart),
            None => {
                self.program.unpack(folder.path()).map_err(unpacking)?;
                folder.path().into()
            }
        };
        let command = ["upgrade", "--install", self.program.container()].map(OsString::from);
        let flags = ["--create-namespace", "--reset-then-reuse-values"].map(OsString::from);
        let args = command.into_iter().chain([chart]).chain(flags);
        let args = args.chain(values.iter().flatten().map(OsString::from));
        match self.run(args, &self.wait_flags()).await {
            Err(KubectlError::Failed(mut message)) => {
                let pods = pods_of(connection, self.namespace, self.program).await;
                message += &unready_pods(&pods.unwrap_or_default());
                Err(KubectlError::Failed(message))
            }
            result => result,
        }
    }

    /// Returns the tag of the image that the values of the installed release name.
    pub(crate) async fn pinned_tag(&self) -> Result<Option<String>, KubectlError> {
        let chart = self.program.container();
        let values = self.run(["get", "values", chart, "--output", "json"], &[]);
        let values = values.await?;
        let values: Value = serde_json::from_str(&values).unwrap_or_default();
        Ok(text_at(&values, "/image/tag").filter(|tag| !tag.is_empty()))
    }

    /// Returns whether Helm has the release, in any state except uninstalled.
    pub(crate) async fn is_installed(&self) -> Result<bool, KubectlError> {
        let filter = format!("^{}$", self.program.container());
        let args = ["list", "--short", "--filter", filter.as_str()];
        // By default, Helm 3 omits a release whose first installation was interrupted. Helm 4 has no flag --all.
        let states = [
            "--deployed",
            "--failed",
            "--pending",
            "--superseded",
            "--uninstalling",
        ];
        let names = self.run(args.into_iter().chain(states), &[]).await?;
        Ok(names.lines().any(|name| name == self.program.container()))
    }

    /// Uninstalls it and waits until its objects are deleted. Returns Helm's output.
    pub(crate) async fn uninstall(&self) -> Result<String, KubectlError> {
        let args = ["uninstall", self.program.container()];
        self.run(args, &self.wait_flags()).await
    }

    fn wait_flags(&self) -> [String; 3] {
        let seconds = format!("{}s", self.helm.timeout.as_secs().max(1));
        ["--wait".to_owned(), "--timeout".to_owned(), seconds]
    }

    async fn run(
        &self,
        args: impl IntoIterator<Item = impl Into<OsString>>,
        more_args: &[String],
    ) -> Result<String, KubectlError> {
        let mut args: Vec<OsString> = args.into_iter().map(Into::into).collect();
        args.extend(more_args.iter().map(OsString::from));
        args.extend(["--namespace", self.namespace].map(OsString::from));
        if let Some(kubeconfig) = &self.cluster.kubeconfig {
            args.extend([OsString::from("--kubeconfig"), kubeconfig.into()]);
        }
        if let Some(context) = &self.cluster.context {
            args.extend([OsString::from("--kube-context"), context.into()]);
        }
        if let Some(user) = &self.cluster.as_user {
            args.extend([OsString::from("--kube-as-user"), user.into()]);
        }
        for group in &self.cluster.as_groups {
            args.extend([OsString::from("--kube-as-group"), group.into()]);
        }
        let chart = self.program.container();
        let task = format!("for {chart} in the namespace {}", self.namespace);
        let next_step = format!("'helm history {chart}' shows the state of the release");
        let deadline = self.helm.timeout + GRACE;
        let helm = self.helm.tool();
        helm.run(args, deadline, (&task, &next_step)).await
    }
}

fn unready_pods(pods: &[Value]) -> String {
    let described = pods.iter().filter_map(|pod| {
        let name = text_at(pod, "/metadata/name").unwrap_or_default();
        let cause = unready_cause(pod)?;
        let remedy = match cause.contains("Image") {
            true => ", check image.registry and image.tag",
            false => "",
        };
        Some(format!("; pod {name}: {cause}{remedy}"))
    });
    described.take(PODS_MAX).collect()
}

fn unpacking(error: io::Error) -> KubectlError {
    KubectlError::Failed(format!("writing the chart to a temporary folder: {error}"))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::tool::temporary_file;

    #[test]
    fn values_are_found_in_flags_and_files() {
        let content = "image: {registry: mirror, tag: 1.20, digest: null}";
        let file = temporary_file("values", content).unwrap();
        let override_file = temporary_file("values", "{g: null, p: null}").unwrap();
        let overridden_file =
            temporary_file("values", "{g: 1, h: 1, i: 1, p: {q: 1}, r: {s: 1}}").unwrap();
        let files = [file.path(), overridden_file.path(), override_file.path()];
        let files = files.map(|file| file.display().to_string());
        let values = ChartValues {
            files: ["/nonexistent".to_owned()]
                .into_iter()
                .chain(files)
                .collect(),
            values: ["a=1,b.c=2,h=null,r=null", "k=1,l=null,m=Null,n=null,o="]
                .map(str::to_owned)
                .into(),
            texts: vec!["d=,n=null".to_owned()],
            texts_of_files: vec!["e=file".to_owned()],
        };
        for (key, is_set) in [
            ("a", true),
            ("b.c", true),
            ("d", true),
            ("e", true),
            ("g", false),
            ("h", false),
            ("i", true),
            ("k", true),
            ("l", false),
            ("m", false),
            // A text may be "null".
            ("n", true),
            ("o", true),
            ("p.q", false),
            ("r.s", false),
            ("image.registry", true),
            ("image.tag", true),
            ("image.digest", false),
            ("image.pullPolicy", false),
            ("b", false),
            ("file", false),
        ] {
            assert_eq!(values.sets(key), is_set, "{key}");
        }
    }

    #[test]
    fn failed_installation_names_pods_that_wait() {
        let pod = |name: &str, reason: &str, message: &str| {
            json!({
                "metadata": {"name": name},
                "status": {"containerStatuses": [
                    {"state": {"waiting": {"reason": reason, "message": message}}},
                ]},
            })
        };
        let ready = json!({"metadata": {"name": "hub-0"}, "status": {"conditions": [{"type": "Ready", "status": "True"}]}});
        let waiting = pod("hub-1", "ImagePullBackOff", "no such image");
        let crashing = pod("hub-2", "CrashLoopBackOff", "back-off");
        assert_eq!(
            unready_pods(&[ready, waiting, crashing]),
            "; pod hub-1: ImagePullBackOff: no such image, check image.registry and image.tag; pod hub-2: CrashLoopBackOff: back-off"
        );
    }

    #[test]
    fn version_of_helm_is_compared_with_oldest() {
        for (text, is_too_old) in [
            ("v3.13.9+gabcdef0", true),
            ("v2.17.0", true),
            ("v3.14.0+gabcdef0", false),
            ("v3.20.1", false),
            ("v4.0.0", false),
            ("v4.2+unreleased", false),
            ("", false),
        ] {
            let version = parse_version(text);
            assert_eq!(
                version.is_some_and(|it| it < MIN_HELM),
                is_too_old,
                "{text}"
            );
        }
    }

    #[test]
    fn embedded_charts_equal_the_charts_folder() {
        for program in Program::ALL {
            let folder = TempDir::new().unwrap();
            program.unpack(folder.path()).unwrap();
            let original = Path::new(env!("CARGO_MANIFEST_DIR")).join("../charts");
            let original = original.join(program.container());
            for file in [
                "Chart.yaml",
                "values.yaml",
                "templates/_shared.tpl",
                ".helmignore",
            ] {
                let read = |folder: &Path| fs::read_to_string(folder.join(file)).unwrap();
                assert_eq!(read(folder.path()), read(&original), "{file}");
            }
            assert!(!folder.path().join("ci").exists());
        }
    }
}
