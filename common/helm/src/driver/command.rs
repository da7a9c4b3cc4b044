//! Command lines and environment of Helm.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::scratch::{RunFolder, Scratch};
use super::{HelmError, ReleaseTarget, Rollback, Uninstall, Upgrade};

/// client-go's default of 5 requests per second would dominate the duration of a run.
const QPS: &str = "50";
const BURST: &str = "300";
/// Soft memory limit of Go's garbage collector for one Helm process.
const SOFT_MEMORY_LIMIT: &str = "128MiB";
/// Helm runs for about 0.1 s. With Go's default of 100, garbage collection takes a tenth of its CPU time.
const GC_PERCENT: &str = "400";
/// Variables of this process that Helm inherits. It gets no proxy variables: they apply to chart
/// repositories, which Helm never contacts, and would redirect its connection to the cluster.
const INHERITED: [&str; 3] = ["PATH", "SSL_CERT_FILE", "SSL_CERT_DIR"];

/// Variables inherited from this process's environment.
#[derive(Clone, Debug)]
pub(super) struct InheritedEnv(Vec<(OsString, OsString)>);

impl InheritedEnv {
    pub(super) fn read() -> Self {
        let pairs = INHERITED
            .iter()
            .filter_map(|name| Some((name.into(), std::env::var_os(name)?)));
        Self(pairs.collect())
    }

    /// Returns the path of a program: the path itself, or the first match for a bare name in `PATH`.
    pub(super) fn resolve(&self, program: &Path) -> PathBuf {
        let is_bare_name = program.components().count() == 1 && !program.is_absolute();
        let path = self.0.iter().find(|(name, _)| name == "PATH");
        let folders = path.filter(|_| is_bare_name).into_iter();
        folders
            .flat_map(|(_, path)| std::env::split_paths(path))
            .map(|folder| folder.join(program))
            .find(|file| file.is_file())
            .unwrap_or_else(|| program.to_owned())
    }
}

/// Returns Helm's complete environment. Without a run, it is the environment of `helm version`.
pub(super) fn environment(
    inherited: &InheritedEnv,
    scratch: &Scratch,
    run: Option<&RunFolder>,
) -> Vec<(OsString, OsString)> {
    let mut environment = inherited.0.clone();
    let mut set = |name: &str, value: &OsStr| environment.push((name.into(), value.into()));
    set("HOME", scratch.home().as_os_str());
    set("HELM_CACHE_HOME", scratch.helm_folder("cache").as_os_str());
    set(
        "HELM_CONFIG_HOME",
        scratch.helm_folder("config").as_os_str(),
    );
    set("HELM_DATA_HOME", scratch.helm_folder("data").as_os_str());
    // The folder is empty. HELM_NO_PLUGINS alone would still load getter plugins.
    set("HELM_PLUGINS", scratch.helm_folder("plugins").as_os_str());
    set("HELM_NO_PLUGINS", OsStr::new("1"));
    set("HELM_DRIVER", OsStr::new("secret"));
    set("NO_COLOR", OsStr::new("1"));
    set("GOMEMLIMIT", OsStr::new(SOFT_MEMORY_LIMIT));
    set("GOGC", OsStr::new(GC_PERCENT));
    set("GOMAXPROCS", OsStr::new("2"));
    if let Some(run) = run {
        set("KUBECACHEDIR", run.cache.as_os_str());
        set("TMPDIR", run.path().as_os_str());
    }
    environment
}

pub(super) fn upgrade(upgrade: &Upgrade, values: &Path) -> Result<Vec<OsString>, HelmError> {
    let mut line = CommandLine::default();
    if upgrade.again {
        // `--replace` reuses the name of a failed release and adopts the objects that carry its metadata.
        line.add(["install", "--replace"]);
    } else {
        line.add(["upgrade", "--install", "--reset-values"]);
        line.add(["--history-max", &upgrade.history_max.to_string()]);
    }
    line.add(["--wait=hookOnly", "--hide-notes"]);
    line.add(["--disable-openapi-validation"]);
    line.add(["--output", "json"]);
    line.common_flags(&upgrade.target, upgrade.timeout);
    line.flag("--values", values.as_os_str());
    line.apply_method(upgrade.server_side);
    if upgrade.skip_crds {
        line.add(["--skip-crds"]);
    }
    if !upgrade.labels.is_empty() {
        line.flag("--labels", OsStr::new(&labels(upgrade)?));
    }
    line.flag("--description", OsStr::new(&upgrade.description));
    line.add(["--", &upgrade.target.release]);
    line.0.push(upgrade.chart.clone().into_os_string());
    Ok(line.0)
}

pub(super) fn uninstall(uninstall: &Uninstall) -> Vec<OsString> {
    // Never use --ignore-not-found: it treats every failed lookup as "not found".
    let mut line = CommandLine::default();
    line.add(["uninstall", "--wait=hookOnly"]);
    if !uninstall.hooks {
        line.add(["--no-hooks"]);
    }
    line.common_flags(&uninstall.target, uninstall.timeout);
    line.add(["--", &uninstall.target.release]);
    line.0
}

pub(super) fn rollback(rollback: &Rollback) -> Vec<OsString> {
    let mut line = CommandLine::default();
    line.add(["rollback", "--wait=hookOnly"]);
    line.add(["--history-max", &rollback.history_max.to_string()]);
    line.common_flags(&rollback.target, rollback.timeout);
    line.apply_method(rollback.server_side);
    line.add(["--", &rollback.target.release, &rollback.to.to_string()]);
    line.0
}

pub(super) fn get_metadata(target: &ReleaseTarget, revision: u32) -> Vec<OsString> {
    let mut line = CommandLine::default();
    line.add(["get", "metadata"]);
    line.add(["--revision", &revision.to_string()]);
    line.cluster_flags(target);
    line.add(["--", &target.release]);
    line.0
}

pub(super) fn verify(archive: &Path, keyring: &Path) -> Vec<OsString> {
    let mut line = CommandLine::default();
    line.add(["verify"]);
    line.flag("--keyring", keyring.as_os_str());
    line.add(["--"]);
    line.0.push(archive.into());
    line.0
}

fn labels(upgrade: &Upgrade) -> Result<String, HelmError> {
    let mut joined = Vec::new();
    for (key, value) in &upgrade.labels {
        if [key, value]
            .into_iter()
            .any(|text| text.contains([',', '=', '"', '\n', '\r']))
        {
            return Err(HelmError::Label {
                key: key.clone(),
                value: value.clone(),
            });
        }
        joined.push(format!("{key}={value}"));
    }
    Ok(joined.join(","))
}

#[derive(Default)]
struct CommandLine(Vec<OsString>);

impl CommandLine {
    fn add<const N: usize>(&mut self, words: [&str; N]) {
        self.0.extend(words.map(OsString::from));
    }

    fn flag(&mut self, name: &str, value: &OsStr) {
        self.0.extend([name.into(), value.into()]);
    }

    fn apply_method(&mut self, server_side: bool) {
        if server_side {
            self.add(["--server-side=true", "--force-conflicts"]);
        } else {
            self.add(["--server-side=false"]);
        }
    }

    fn cluster_flags(&mut self, target: &ReleaseTarget) {
        self.add(["--namespace", &target.namespace]);
        self.flag("--kubeconfig", target.kubeconfig.as_os_str());
    }

    fn common_flags(&mut self, target: &ReleaseTarget, timeout: Duration) {
        self.cluster_flags(target);
        // Helm treats 0 as an immediate timeout.
        let seconds = timeout.as_secs() + u64::from(timeout.subsec_nanos() > 0);
        self.flag("--timeout", OsStr::new(&format!("{}s", seconds.max(1))));
        self.add(["--qps", QPS, "--burst-limit", BURST]);
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Map;

    use super::*;

    fn target(release: &str) -> ReleaseTarget {
        ReleaseTarget {
            kubeconfig: "/k/config".into(),
            release: release.to_owned(),
            namespace: "acme".to_owned(),
            cache_key: "edge-1".to_owned(),
        }
    }

    fn sample_upgrade(server_side: bool) -> Upgrade {
        Upgrade {
            target: target("tenant-acme-edge-1"),
            chart: "/c/abc.tgz".into(),
            values: Map::new(),
            secret_paths: Vec::new(),
            labels: [
                ("a".to_owned(), "1".to_owned()),
                ("b".to_owned(), "2".to_owned()),
            ]
            .into(),
            timeout: Duration::from_millis(180_001),
            server_side,
            skip_crds: false,
            history_max: 3,
            description: "--dry-run, as text".to_owned(),
            again: false,
        }
    }

    fn joined(line: Vec<OsString>) -> String {
        let words: Vec<String> = line
            .into_iter()
            .map(|word| word.into_string().unwrap())
            .collect();
        words.join(" ")
    }

    #[test]
    fn upgrade_command_matches_reference() {
        let line = joined(upgrade(&sample_upgrade(true), Path::new("/r/values.json")).unwrap());
        assert_eq!(
            line,
            "upgrade --install --reset-values --history-max 3 --wait=hookOnly --hide-notes \
             --disable-openapi-validation --output json --namespace acme --kubeconfig /k/config \
             --timeout 181s --qps 50 --burst-limit 300 --values /r/values.json --server-side=true \
             --force-conflicts --labels a=1,b=2 --description --dry-run, as text -- \
             tenant-acme-edge-1 /c/abc.tgz"
        );
    }

    #[test]
    fn repeated_install_uses_replace_with_same_arguments() {
        let mut repeated = sample_upgrade(true);
        repeated.again = true;
        let line = joined(upgrade(&repeated, Path::new("/r/values.json")).unwrap());
        let upgraded = joined(upgrade(&sample_upgrade(true), Path::new("/r/values.json")).unwrap());
        let begin = "upgrade --install --reset-values --history-max 3 ";
        let rest = upgraded.strip_prefix(begin).unwrap();
        assert_eq!(line, format!("install --replace {rest}"));
    }

    #[test]
    fn conflicts_are_forced_only_with_server_side_apply() {
        let line = joined(upgrade(&sample_upgrade(false), Path::new("/r/values.json")).unwrap());
        assert!(
            line.contains("--server-side=false") && !line.contains("--force"),
            "{line}"
        );
    }

    #[test]
    fn uninstall_command_never_ignores_missing_release() {
        for (hooks, flag) in [(true, ""), (false, "--no-hooks ")] {
            let line = joined(uninstall(&Uninstall {
                target: target("r"),
                timeout: Duration::ZERO,
                hooks,
            }));
            let expected = format!(
                "uninstall --wait=hookOnly {flag}--namespace acme --kubeconfig /k/config --timeout 1s \
                 --qps 50 --burst-limit 300 -- r"
            );
            assert_eq!(line, expected);
        }
    }

    #[test]
    fn the_rollback_line_names_the_revision_last() {
        let line = joined(rollback(&Rollback {
            target: target("r"),
            to: 7,
            timeout: Duration::from_secs(20),
            server_side: true,
            history_max: 3,
            values: serde_json::Map::new(),
            secret_paths: Vec::new(),
        }));
        assert_eq!(
            line,
            "rollback --wait=hookOnly --history-max 3 --namespace acme --kubeconfig /k/config \
             --timeout 20s --qps 50 --burst-limit 300 --server-side=true --force-conflicts -- r 7"
        );
    }

    #[test]
    fn a_label_that_would_become_two_is_refused() {
        let mut invalid = sample_upgrade(true);
        invalid
            .labels
            .insert("c".to_owned(), "1,owner=mine".to_owned());
        let error = upgrade(&invalid, Path::new("/r/values.json")).unwrap_err();
        assert!(
            matches!(&error, HelmError::Label { key, .. } if key == "c"),
            "{error}"
        );
        assert!(error.is_permanent());
    }
}
