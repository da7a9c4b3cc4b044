//! Completes the command line: variables without a flag, defaults that depend on other values, and checks of
//! combinations.

use std::path::PathBuf;
use std::time::Duration;

use krypton_runtime::access::LocalSource;
use krypton_runtime::args::go_values::parse_duration;
use krypton_runtime::args::parsers::{Listen, invalid, invalid_secret};
use krypton_runtime::args::{Env, Origins, usage_error};

use super::{MINUTE, Settings, parsers};

const CHECK_INTERVAL_DEFAULT: Duration = MINUTE;

/// The pod of the hub, on its own cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OwnPod {
    pub namespace: String,
    pub name: String,
    pub uid: String,
}

/// The home cluster.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HomeSource {
    pub choice: HomeChoice,
    pub context: Option<String>,
    /// The hub's own cluster. With `HomeChoice::Secret`, it contains the Secret.
    pub local: LocalSource,
}

/// Helm's own file with the credentials of the chart repository.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HelmCredentials {
    /// Logins to OCI registries, in Docker's format.
    Registry(PathBuf),
    /// HTTP repositories, each with its login and the paths of its certificates.
    Repositories(PathBuf),
}

impl HelmCredentials {
    /// The variable that names the file of [`Self::Registry`].
    pub const REGISTRY: &str = "HELM_REGISTRY_CONFIG";
    /// The variable that names the file of [`Self::Repositories`].
    pub const REPOSITORIES: &str = "HELM_REPOSITORY_CONFIG";
}

/// The source of the home cluster's kubeconfig.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum HomeChoice {
    Secret {
        namespace: String,
        name: String,
        key: String,
    },
    File(PathBuf),
    #[default]
    Local,
}

impl Settings {
    /// Checks values that exclude each other, and variables of Helm.
    pub(super) fn check(&self, origins: &Origins, env: Env) -> Result<(), clap::Error> {
        let driver = env("HELM_DRIVER").filter(|driver| driver != "secret" && driver != "secrets");
        if let Some(driver) = driver {
            let class = "a supported storage driver";
            let remedy = "move its releases to Secrets, then unset the variable";
            let problem = invalid(&driver, class, remedy);
            return Err(usage_error(&format!("variable HELM_DRIVER: {problem}")));
        }
        let chart = &self.chart;
        if chart.repo.is_empty()
            && !chart.name.ends_with(".tgz")
            && !chart.name.starts_with("oci://")
        {
            let problem = invalid_secret(parsers::REPO, parsers::REPO_REMEDY);
            return Err(origins.error("chart-repo", &problem));
        }
        let per_member = self.helm.max_per_member();
        if !(1..=self.helm.max_concurrent).contains(&per_member) {
            let (class, remedy) = (parsers::PER_MEMBER, parsers::PER_MEMBER_REMEDY);
            let problem = invalid(&per_member.to_string(), class, remedy);
            return Err(origins.error("max-concurrent-helm-per-member", &problem));
        }
        if let Err(error) = self.workspace_namespaces().check() {
            let problem = format!(
                "with the labels, the value is not valid for namespaces; {}",
                error.remedy()
            );
            return Err(origins.error("workspace-annotations", &problem));
        }
        let (missing, set) = match (&self.notify.url, &self.notify.key_file) {
            (Some(_), None) => ("notify-key-file", "notify-url"),
            (None, Some(_)) => ("notify-url", "notify-key-file"),
            _ => return self.check_addresses(origins),
        };
        let problem = format!("it has no effect alone; set --{missing} as well");
        Err(origins.error(set, &problem))
    }

    fn check_addresses(&self, origins: &Origins) -> Result<(), clap::Error> {
        let servers: [(&str, &Listen); 4] = [
            ("listen", &self.listen),
            ("metrics-bind-address", &self.metrics_bind_address),
            ("health-probe-bind-address", &self.health_probe_bind_address),
            ("debug-bind-address", &self.debug_bind_address),
        ];
        let used = servers
            .iter()
            .filter_map(|(flag, address)| Some((flag, address.as_ref()?)));
        let mut used = used.filter(|(_, address)| address.port != 0);
        while let Some((first, address)) = used.next() {
            if let Some((second, _)) = used.clone().find(|(_, other)| *other == address) {
                return Err(usage_error(&format!(
                    "{} and {} both listen on {address}; give one of them another port, or 0 to switch it off",
                    origins.describe(first),
                    origins.describe(second)
                )));
            }
        }
        Ok(())
    }

    /// Fills in the values that come from variables or depend on other values.
    pub(super) fn complete(&mut self, origins: Origins, env: Env) {
        self.notes = origins.notes.clone();
        self.home = self.home_source(&origins, env);
        if let Some(namespaces) = self
            .discovery
            .namespaces
            .as_mut()
            .filter(|namespaces| namespaces.is_empty())
        {
            namespaces.insert(self.namespace.clone());
        }
        if let Some(namespaces) = &mut self.discovery.accepted_namespaces {
            namespaces.insert(self.namespace.clone());
        }
        if let Some(encoder) = self.zap_encoder
            && !origins.is_set("log-format")
        {
            self.log_format = encoder;
        }
        match env("ENSURE_WATCH_CRDS").as_deref() {
            Some("true" | "1" | "yes") => self.ensure_watch_crds = true,
            None | Some("false" | "0" | "no") => {}
            Some(_) => self
                .note("variable ENSURE_WATCH_CRDS has no effect: only true, 1 or yes switch it on"),
        }
        match env("ALLOW_CHART_SKIP").as_deref() {
            Some("true") => self.allow_chart_skip = true,
            None | Some("false") => {}
            Some(_) => {
                self.note("variable ALLOW_CHART_SKIP has no effect: only true switches it on")
            }
        }
        self.check_interval = self.check_interval(env);
        self.helm_credentials = self.helm_credentials(env);
        self.reporting_instance = env("POD_NAME").or_else(|| env("HOSTNAME"));
        self.pod = own_pod(env);
        self.note_flags_without_effect();
    }

    fn note(&mut self, note: impl Into<String>) {
        self.notes.push(note.into());
    }

    fn home_source(&mut self, origins: &Origins, env: Env) -> HomeSource {
        let choice = match (&self.watch_kubeconfig_secret, &self.watch_kubeconfig) {
            (Some(name), _) => HomeChoice::Secret {
                namespace: self
                    .watch_kubeconfig_secret_namespace
                    .as_ref()
                    .unwrap_or(&self.namespace)
                    .clone(),
                name: name.clone(),
                key: self.watch_kubeconfig_secret_key.clone(),
            },
            (None, Some(file)) => HomeChoice::File(file.clone()),
            (None, None) => HomeChoice::Local,
        };
        if self.watch_kubeconfig_secret.is_some() && self.watch_kubeconfig.is_some() {
            let used = origins.describe("watch-kubeconfig-secret");
            self.note(format!("{used} is used, the watch kubeconfig file is not"));
        }
        let list = env("KUBECONFIG").unwrap_or_default();
        let files = std::env::split_paths(&list).filter(|path| !path.as_os_str().is_empty());
        HomeSource {
            choice,
            context: self.watch_context.clone(),
            local: LocalSource {
                flag: self.kubeconfig.clone(),
                kubeconfig_variable: files.collect(),
                user_file: env("HOME").map(|home| PathBuf::from(home).join(".kube/config")),
            },
        }
    }

    /// Parses whole seconds or a Go duration. An invalid value means the default.
    fn check_interval(&mut self, env: Env) -> Duration {
        let Some(text) = env("KRYPTON_CHECK_INTERVAL") else {
            return CHECK_INTERVAL_DEFAULT;
        };
        let text = text.trim();
        let seconds = || text.parse().ok().map(Duration::from_secs);
        let interval = parse_duration(text).or_else(seconds);
        interval.filter(|interval| !interval.is_zero()).unwrap_or_else(|| {
            self.note("variable KRYPTON_CHECK_INTERVAL is neither a Go duration nor whole seconds above 0; using 60s");
            CHECK_INTERVAL_DEFAULT
        })
    }

    /// Returns the file that Helm itself would use for the chart repository, unless a Secret replaces it.
    fn helm_credentials(&mut self, env: Env) -> Option<HelmCredentials> {
        if env("HELM_REPOSITORY_CACHE").is_some() {
            self.note("variable HELM_REPOSITORY_CACHE has no effect: --helm-cache-dir is used");
        }
        let chart = &self.chart;
        let is_oci = chart.repo.starts_with("oci://") || chart.name.starts_with("oci://");
        let (variable, credentials): (_, fn(PathBuf) -> HelmCredentials) = match is_oci {
            true => (HelmCredentials::REGISTRY, HelmCredentials::Registry),
            false => (HelmCredentials::REPOSITORIES, HelmCredentials::Repositories),
        };
        let path = PathBuf::from(env(variable)?);
        if chart.credentials_secret.is_some() {
            self.note(format!(
                "variable {variable} has no effect: --chart-credentials-secret is used"
            ));
            return None;
        }
        Some(credentials(path))
    }

    fn note_flags_without_effect(&mut self) {
        let interval = &self.remote_deployments_poll_interval;
        if parse_duration(interval).is_some_and(|interval| interval < Duration::from_secs(1)) {
            self.notes.push(format!(
                "flag --remote-deployments-poll-interval={interval} is below 1s; using 10s"
            ));
        }
        let ignored_flags = [
            ("leader-elect", self.leader_elect),
            ("remote-deployments-poll-interval", interval != "10s"),
            ("zap-devel", self.zap_devel.is_some()),
            ("zap-stacktrace-level", self.zap_stacktrace_level.is_some()),
            ("zap-time-encoding", self.zap_time_encoding.is_some()),
        ];
        let set_flags = ignored_flags.iter().filter(|(_, is_set)| *is_set);
        let notes = set_flags.map(|(flag, _)| format!("flag --{flag} has no effect"));
        self.notes.extend(notes);
    }
}

fn own_pod(env: Env) -> Option<OwnPod> {
    Some(OwnPod {
        namespace: env("KRYPTON_POD_NAMESPACE")?,
        name: env("POD_NAME")?,
        uid: env("POD_UID")?,
    })
}
