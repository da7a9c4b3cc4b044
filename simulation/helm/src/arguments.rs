//! Parses the command lines that Krypton's driver writes. Anything else is an error: a model must not guess.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::path::PathBuf;
use std::time::Duration;

/// Command line and environment of Helm, without the program's name.
#[derive(Clone, Debug)]
pub struct Invocation {
    pub arguments: Vec<OsString>,
    pub environment: Vec<(OsString, OsString)>,
}

/// Returns the path after `--kubeconfig`.
pub fn kubeconfig_of(invocation: &Invocation) -> Option<PathBuf> {
    let mut arguments = invocation.arguments.iter();
    while let Some(argument) = arguments.next() {
        match argument.to_str() {
            Some("--") => return None,
            Some("--kubeconfig") => return arguments.next().map(PathBuf::from),
            Some(text) => {
                if let Some(path) = text.strip_prefix("--kubeconfig=") {
                    return Some(path.into());
                }
            }
            None => {}
        }
    }
    None
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verb {
    Upgrade,
    Install,
    Uninstall,
    Rollback,
    GetMetadata,
}

/// Flags of all verbs. A flag that a verb lacks has its zero value.
#[derive(Clone, Debug, Default)]
pub(crate) struct Flags {
    pub(crate) namespace: String,
    pub(crate) timeout: Duration,
    pub(crate) history_max: usize,
    pub(crate) values: Option<PathBuf>,
    pub(crate) server_side: Option<bool>,
    pub(crate) force_conflicts: bool,
    pub(crate) skip_crds: bool,
    pub(crate) labels: BTreeMap<String, String>,
    pub(crate) description: String,
    pub(crate) no_hooks: bool,
    pub(crate) revision: u32,
    install: bool,
    replace: bool,
    reset_values: bool,
    json: bool,
    waits_for_hooks: bool,
}

#[derive(Clone, Debug)]
pub(crate) struct CommandLine {
    pub(crate) verb: Verb,
    pub(crate) flags: Flags,
    pub(crate) release: String,
    pub(crate) chart: Option<PathBuf>,
}

const SWITCHES: [&str; 8] = [
    "--install",
    "--replace",
    "--reset-values",
    "--hide-notes",
    "--disable-openapi-validation",
    "--force-conflicts",
    "--skip-crds",
    "--no-hooks",
];
const COMMON_FLAGS: [&str; 5] = [
    "--namespace",
    "--kubeconfig",
    "--timeout",
    "--qps",
    "--burst-limit",
];
const INSTALL_FLAGS: [&str; 11] = [
    "--hide-notes",
    "--disable-openapi-validation",
    "--output",
    "--values",
    "--server-side",
    "--force-conflicts",
    "--skip-crds",
    "--labels",
    "--description",
    "--wait",
    "--no-hooks",
];

impl Verb {
    fn parse(arguments: &[&str]) -> Result<(Self, usize), String> {
        Ok(match arguments {
            ["upgrade", ..] => (Self::Upgrade, 1),
            ["install", ..] => (Self::Install, 1),
            ["uninstall", ..] => (Self::Uninstall, 1),
            ["rollback", ..] => (Self::Rollback, 1),
            ["get", "metadata", ..] => (Self::GetMetadata, 2),
            _ => return Err(format!("unknown command {arguments:?}")),
        })
    }

    fn accepts(self, flag: &str) -> bool {
        let specific: &[&str] = match self {
            Self::Upgrade => &["--install", "--reset-values", "--history-max"],
            Self::Install => &["--replace"],
            Self::Uninstall => &["--wait", "--no-hooks"],
            Self::Rollback => &[
                "--wait",
                "--history-max",
                "--server-side",
                "--force-conflicts",
                "--no-hooks",
            ],
            Self::GetMetadata => {
                return ["--revision", COMMON_FLAGS[0], COMMON_FLAGS[1]].contains(&flag);
            }
        };
        let installs =
            matches!(self, Self::Upgrade | Self::Install) && INSTALL_FLAGS.contains(&flag);
        installs || specific.contains(&flag) || COMMON_FLAGS.contains(&flag)
    }
}

impl CommandLine {
    /// Parses an invocation.
    ///
    /// # Errors
    /// Returns the reason if the model doesn't support the command line.
    pub(crate) fn parse(invocation: &Invocation) -> Result<Self, String> {
        check_environment(invocation)?;
        let arguments = invocation.arguments.iter();
        let arguments: Option<Vec<&str>> = arguments.map(|argument| argument.to_str()).collect();
        let arguments = arguments.ok_or("an argument is not UTF-8")?;
        let (verb, mut index) = Verb::parse(&arguments)?;
        let mut flags = Flags::default();
        loop {
            let argument = *arguments
                .get(index)
                .ok_or("missing \"--\" before the release")?;
            index += 1;
            if argument == "--" {
                break;
            }
            let (name, mut value) = match argument.split_once('=') {
                Some((name, value)) => (name, Some(value)),
                None => (argument, None),
            };
            if !verb.accepts(name) {
                return Err(format!("unknown flag {argument} of {verb:?}"));
            }
            if value.is_none() && !SWITCHES.contains(&name) {
                value = arguments.get(index).copied();
                index += 1;
            }
            flags.set(name, value)?;
        }
        flags.check(verb)?;
        let rest = arguments.get(index..).unwrap_or_default();
        Self::with_rest(verb, flags, rest)
    }

    fn with_rest(verb: Verb, mut flags: Flags, rest: &[&str]) -> Result<Self, String> {
        let mut chart = None;
        let release = match (verb, rest) {
            (Verb::Upgrade | Verb::Install, [release, path]) => {
                chart = Some(PathBuf::from(path));
                release
            }
            (Verb::Rollback, [release, revision]) => {
                flags.revision = number(revision)?;
                release
            }
            (Verb::Uninstall | Verb::GetMetadata, [release]) => release,
            _ => return Err(format!("unexpected arguments {rest:?} of {verb:?}")),
        };
        Ok(Self {
            verb,
            flags,
            release: (*release).to_owned(),
            chart,
        })
    }
}

impl Flags {
    fn set(&mut self, name: &str, value: Option<&str>) -> Result<(), String> {
        let required = || value.ok_or_else(|| format!("flag {name} needs a value"));
        let expect = |accepted: &str| match value {
            Some(value) if value == accepted => Ok(()),
            _ => Err(format!("flag {name} with {value:?} is not modelled")),
        };
        match name {
            "--install" => self.install = true,
            "--replace" => self.replace = true,
            "--reset-values" => self.reset_values = true,
            "--force-conflicts" => self.force_conflicts = true,
            "--skip-crds" => self.skip_crds = true,
            "--no-hooks" => self.no_hooks = true,
            "--namespace" => required()?.clone_into(&mut self.namespace),
            "--timeout" => self.timeout = seconds(required()?)?,
            "--history-max" => self.history_max = number(required()?)?,
            "--values" => self.values = Some(required()?.into()),
            "--server-side" => {
                let parsed = required()?.parse();
                let invalid = |_| format!("flag {name} with {value:?} is not modelled");
                self.server_side = Some(parsed.map_err(invalid)?);
            }
            "--labels" => self.labels = labels(required()?)?,
            "--description" => required()?.clone_into(&mut self.description),
            "--revision" => self.revision = number(required()?)?,
            "--wait" => {
                expect("hookOnly")?;
                self.waits_for_hooks = true;
            }
            "--output" => {
                expect("json")?;
                self.json = true;
            }
            // The caller has read the kubeconfig. The others have no effect on a simulated cluster.
            "--kubeconfig" | "--qps" | "--burst-limit" => drop(required()?),
            "--hide-notes" | "--disable-openapi-validation" => {}
            _ => return Err(format!("unknown flag {name}")),
        }
        Ok(())
    }

    /// Checks the flags without which Helm behaves in a way that is not modelled.
    fn check(&self, verb: Verb) -> Result<(), String> {
        let has_required_flags = match verb {
            Verb::Upgrade => self.install && self.reset_values && self.json,
            Verb::Install => self.replace && self.json,
            Verb::Uninstall | Verb::Rollback | Verb::GetMetadata => true,
        };
        let writes_objects = matches!(verb, Verb::Upgrade | Verb::Install | Verb::Rollback);
        let has_write_method = !writes_objects || self.server_side.is_some();
        if self.namespace.is_empty() || !has_required_flags || !has_write_method {
            return Err(format!("{verb:?} without a flag that the model requires"));
        }
        if verb != Verb::GetMetadata && (self.timeout.is_zero() || !self.waits_for_hooks) {
            return Err(format!("{verb:?} needs --timeout and --wait=hookOnly"));
        }
        if self.server_side == Some(false) && self.force_conflicts {
            return Err("--force-conflicts needs --server-side=true".to_owned());
        }
        Ok(())
    }
}

fn check_environment(invocation: &Invocation) -> Result<(), String> {
    for (name, value) in &invocation.environment {
        let name = name.to_string_lossy();
        if name == "HELM_DRIVER" && value != OsStr::new("secret") {
            return Err(format!("HELM_DRIVER={} is not modelled", value.display()));
        }
        if name.starts_with("HELM_KUBE") || name == "HELM_NAMESPACE" || name == "HELM_DEBUG" {
            return Err(format!("variable {name} is not modelled"));
        }
    }
    Ok(())
}

fn number<T: std::str::FromStr>(text: &str) -> Result<T, String> {
    text.parse()
        .map_err(|_| format!("{text:?} is not a number"))
}

fn seconds(text: &str) -> Result<Duration, String> {
    let digits = text.strip_suffix('s');
    let digits = digits.ok_or_else(|| format!("duration {text:?} is not modelled"))?;
    number(digits).map(Duration::from_secs)
}

fn labels(text: &str) -> Result<BTreeMap<String, String>, String> {
    let pairs = text.split(',').map(|pair| {
        let (key, value) = pair.split_once('=')?;
        Some((key.to_owned(), value.to_owned()))
    });
    let pairs: Option<_> = pairs.collect();
    pairs.ok_or_else(|| format!("labels {text:?} have no value"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse_line(line: &str) -> Result<CommandLine, String> {
        CommandLine::parse(&Invocation {
            arguments: line.split_whitespace().map(Into::into).collect(),
            environment: vec![("HELM_DRIVER".into(), "secret".into())],
        })
    }

    const UPGRADE: &str = "upgrade --install --reset-values --history-max 3 --wait=hookOnly --hide-notes \
         --disable-openapi-validation --output json --namespace acme --kubeconfig /k/config \
         --timeout 181s --qps 50 --burst-limit 300 --values /r/values.json --server-side=true \
         --force-conflicts --labels a=1,b=2 --description text -- r /c/abc.tgz";

    #[test]
    fn command_line_of_an_upgrade_is_parsed() {
        let line = parse_line(UPGRADE).unwrap();
        assert_eq!((line.verb, line.release.as_str()), (Verb::Upgrade, "r"));
        assert_eq!(line.flags.timeout, Duration::from_secs(181));
        assert_eq!(line.flags.labels["b"], "2");
        assert!(line.flags.force_conflicts && !line.flags.skip_crds);
        assert_eq!(line.chart.unwrap(), PathBuf::from("/c/abc.tgz"));
    }

    #[test]
    fn unknown_flags_and_verbs_are_refused() {
        for line in [
            "template -- r /c",
            &UPGRADE.replace("--reset-values", "--reuse-values"),
            &UPGRADE.replace("--wait=hookOnly", "--wait=watcher"),
            &UPGRADE.replace("--output json", "--output yaml"),
            "uninstall --wait=hookOnly --namespace a --timeout 1s --keep-history -- r",
        ] {
            assert!(parse_line(line).is_err(), "{line}");
        }
    }
}
