//! The command line of the agent.

#[cfg(test)]
mod page;

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use clap::Parser;
use krypton_helm::chart::ChartSource;
use krypton_reconciler::plan::Remediation;
use krypton_runtime::access::{LocalSource, ServiceAccount};
use krypton_runtime::admin::{BindAddress, DEBUG_DEFAULT, is_loopback};
use krypton_runtime::args::go_values::parse_duration;
use krypton_runtime::lease::SYSTEM_NAMESPACE;
use krypton_runtime::telemetry::config::TelemetryConfig;
use krypton_runtime::telemetry::traces::NoEndpoint;
use krypton_runtime::telemetry::{DEFAULT_FILTER, LogFormat};
use krypton_types::join_bundle::split_address;
use krypton_types::names::namespace_name;

use crate::credentials::join::Places;

/// Keeps one Helm chart at one version installed for every Tenant of the cluster it runs beside, as its
/// hub says.
///
/// The first start joins the fleet: 'kubectl krypton join NAME' on the hub's side prints what
/// --join-file takes. Afterwards the agent knows the hub by itself. A flag beats its variable.
#[derive(Clone, Debug, Parser)]
#[command(name = "krypton-agent", version, max_term_width = 100)]
pub struct Flags {
    /// File with what 'kubectl krypton join NAME' has printed. Used once; a new one joins anew.
    #[arg(
        long,
        value_name = "FILE",
        env = "KRYPTON_JOIN_FILE",
        help_heading = "Hub"
    )]
    pub join_file: Option<PathBuf>,
    /// Secret in --namespace with the same under key bundle.yaml, when there is no --join-file.
    #[arg(
        long,
        value_name = "NAME",
        env = "KRYPTON_JOIN_SECRET",
        default_value = "krypton-join",
        help_heading = "Hub"
    )]
    pub join_secret: String,
    /// Where to reach the hub, in the place of what it has said itself; may be given several times.
    #[arg(long, value_name = "HOST:PORT", env = "KRYPTON_HUB", value_delimiter = ',', value_parser = hub_address, help_heading = "Hub")]
    pub hub: Vec<String>,

    /// Kubeconfig file of the cluster; else KUBECONFIG, else that of the pod.
    #[arg(
        long,
        value_name = "FILE",
        env = "KRYPTON_KUBECONFIG",
        help_heading = "Cluster"
    )]
    pub kubeconfig: Option<PathBuf>,
    /// Context of the kubeconfig; its current-context when not given.
    #[arg(
        long,
        value_name = "CONTEXT",
        env = "KRYPTON_CONTEXT",
        help_heading = "Cluster"
    )]
    pub context: Option<String>,
    /// Namespace for the agent's identity; made when missing [default: POD_NAMESPACE, else that of the
    /// pod's service account, else krypton-system].
    #[arg(long, value_name = "NAMESPACE", env = "KRYPTON_NAMESPACE", value_parser = namespace_name, help_heading = "Cluster")]
    pub namespace: Option<String>,

    /// The helm program, version 4.2.4 or newer: a path, or a name looked up in PATH.
    #[arg(
        long,
        value_name = "PROGRAM",
        env = "KRYPTON_HELM",
        default_value = "helm",
        help_heading = "Helm"
    )]
    pub helm: PathBuf,
    /// Service account that helm acts as; the agent must have the right to impersonate it.
    #[arg(
        long,
        value_name = "[NAMESPACE/]NAME",
        env = "KRYPTON_HELM_SERVICE_ACCOUNT",
        value_parser = service_account,
        help_heading = "Helm"
    )]
    pub helm_service_account: Option<String>,
    /// How long one install, upgrade or uninstall may wait for its hooks.
    #[arg(long, value_name = "DURATION", env = "KRYPTON_HELM_TIMEOUT", default_value = "180s", value_parser = duration, help_heading = "Helm")]
    pub helm_timeout: Duration,
    /// How many helm processes may run at once, 1 to 64.
    #[arg(long, value_name = "N", env = "KRYPTON_MAX_CONCURRENT_HELM", default_value_t = 4, value_parser = clap::value_parser!(u8).range(1..=64), help_heading = "Helm")]
    pub max_concurrent_helm: u8,
    /// Longest pause between two tries of a failed install or upgrade.
    #[arg(long, value_name = "DURATION", env = "KRYPTON_RETRY_MAX", default_value = "15m", value_parser = duration, help_heading = "Helm")]
    pub retry_max: Duration,
    /// How often a failed install or upgrade is tried again before it is given up; without end when not given.
    #[arg(long, value_name = "N", env = "KRYPTON_RETRIES", help_heading = "Helm")]
    pub retries: Option<u32>,
    /// What is done about an upgrade that is given up: keep, or rollback to the last good revision, which
    /// is also done at once where no other attempt can succeed.
    #[arg(
        long,
        value_name = "WHAT",
        env = "KRYPTON_REMEDIATION",
        default_value = "keep",
        help_heading = "Helm"
    )]
    pub remediation: Remediation,
    /// How many revisions of a release are kept, 2 to 100.
    #[arg(long, value_name = "N", env = "KRYPTON_HISTORY_MAX", default_value_t = 3, value_parser = clap::value_parser!(u8).range(2..=100), help_heading = "Helm")]
    pub history_max: u8,
    /// Where charts come from: direct, from their repository; hub, from the hub, which has the
    /// credentials; auto, from the repository, and from the hub when that cannot be reached or refuses.
    #[arg(
        long,
        value_name = "SOURCE",
        env = "KRYPTON_CHART_SOURCE",
        default_value_t,
        help_heading = "Helm"
    )]
    pub chart_source: ChartSource,
    /// Folder for fetched charts and helm's own files [default: krypton-agent in $TMPDIR, else in /tmp].
    #[arg(
        long,
        value_name = "FOLDER",
        env = "KRYPTON_CACHE_DIR",
        help_heading = "Helm"
    )]
    pub cache_dir: Option<PathBuf>,
    /// Folder for kubeconfigs and values while Helm runs, best in memory [default: that of --cache-dir].
    #[arg(
        long,
        value_name = "FOLDER",
        env = "KRYPTON_PRIVATE_DIR",
        help_heading = "Helm"
    )]
    pub private_dir: Option<PathBuf>,

    /// Address of the metrics endpoint; :PORT means all addresses, 0 switches it off.
    #[arg(
        long,
        value_name = "ADDRESS",
        env = "KRYPTON_METRICS_BIND_ADDRESS",
        default_value = "0.0.0.0:8080",
        help_heading = "Process"
    )]
    pub metrics_bind_address: Listen,
    /// Address of /healthz and /readyz; :PORT means all addresses, 0 switches it off.
    #[arg(
        long,
        value_name = "ADDRESS",
        env = "KRYPTON_HEALTH_PROBE_BIND_ADDRESS",
        default_value = "0.0.0.0:8081",
        help_heading = "Process"
    )]
    pub health_probe_bind_address: Listen,
    /// Address of /debug, which has no password: a loopback address, or 0 to switch it off.
    #[arg(
        long,
        value_name = "ADDRESS",
        env = "KRYPTON_DEBUG_BIND_ADDRESS",
        default_value = DEBUG_DEFAULT,
        value_parser = debug_address,
        help_heading = "Process"
    )]
    pub debug_bind_address: Listen,
    /// Format of the log: text or json.
    #[arg(
        long,
        value_name = "FORMAT",
        env = "KRYPTON_LOG_FORMAT",
        default_value = "text",
        help_heading = "Process"
    )]
    pub log_format: LogFormat,
    /// Collector that takes traces by OTLP over gRPC, as http://otel-collector:4317. Without one no traces are made.
    #[arg(
        long,
        value_name = "URL",
        env = "OTEL_EXPORTER_OTLP_ENDPOINT",
        hide_env_values = true,
        help_heading = "Process"
    )]
    pub otlp_endpoint: Option<String>,
    /// Name of this one of the cluster's agents, the same after a restart [default: POD_NAME, else
    /// HOSTNAME, else agent].
    #[arg(
        long,
        value_name = "NAME",
        env = "KRYPTON_REPLICA",
        help_heading = "Process"
    )]
    pub replica: Option<String>,
}

/// Where to listen, if at all.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listen(pub Option<BindAddress>);

impl FromStr for Listen {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "0" => Ok(Self(None)),
            text => text
                .parse()
                .map(|address| Self(Some(address)))
                .map_err(|_| {
                    "write it as :8080 or 127.0.0.1:8080, or 0 to switch it off".to_owned()
                }),
        }
    }
}

impl fmt::Display for Listen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Some(address) => address.fmt(f),
            None => f.write_str("0"),
        }
    }
}

impl Flags {
    /// What the process is to tell of itself.
    ///
    /// # Errors
    /// When there is no collector by that name.
    pub fn telling(&self) -> Result<TelemetryConfig<'static>, NoEndpoint> {
        let otlp = self.otlp_endpoint.as_deref();
        let otlp = otlp.filter(|endpoint| !endpoint.trim().is_empty());
        Ok(TelemetryConfig {
            program: "krypton-agent",
            replica: None,
            format: self.log_format,
            filter: DEFAULT_FILTER,
            otlp: otlp.map(str::parse).transpose()?,
        })
    }

    /// Where the cluster's configuration is looked for; `env` reads a variable.
    pub fn local(&self, env: impl Fn(&str) -> Option<String>) -> LocalSource {
        let list = env("KUBECONFIG").unwrap_or_default();
        LocalSource {
            flag: self.kubeconfig.clone(),
            kubeconfig_variable: std::env::split_paths(&list)
                .filter(|path| !path.as_os_str().is_empty())
                .collect(),
            user_file: None,
        }
    }

    /// The flag, or where the pod is; `service_account` is what its service account's file says.
    pub fn namespace(
        &self,
        env: impl Fn(&str) -> Option<String>,
        service_account: Option<String>,
    ) -> String {
        self.namespace
            .clone()
            .into_iter()
            .chain(env("POD_NAMESPACE"))
            .chain(service_account.map(|text| text.trim().to_owned()))
            .find(|namespace| !namespace.is_empty())
            .unwrap_or_else(|| SYSTEM_NAMESPACE.to_owned())
    }

    /// What helm acts as, with the agent's own namespace where the flag names none.
    pub fn helm_account(&self, namespace: &str) -> Option<ServiceAccount> {
        let text = self.helm_service_account.as_deref()?;
        ServiceAccount::parse(text, namespace)
    }

    pub fn join_places(&self, namespace: &str) -> Places {
        Places {
            file: self.join_file.clone(),
            secret: self.join_secret.clone(),
            namespace: namespace.to_owned(),
        }
    }

    /// The flag, or what Kubernetes and the shell have for it.
    pub fn replica(&self, env: impl Fn(&str) -> Option<String>) -> String {
        let given = self.replica.clone();
        given
            .into_iter()
            .chain(["POD_NAME", "HOSTNAME"].into_iter().filter_map(env))
            .find(|name| !name.is_empty())
            .unwrap_or_else(|| "agent".to_owned())
    }

    pub fn cache_dir(&self) -> PathBuf {
        self.cache_dir
            .clone()
            .unwrap_or_else(|| std::env::temp_dir().join("krypton-agent"))
    }
}

fn duration(text: &str) -> Result<Duration, &'static str> {
    parse_duration(text)
        .filter(|duration| !duration.is_zero())
        .ok_or("write it as 90s, 3m or 1h30m")
}

fn service_account(text: &str) -> Result<String, &'static str> {
    match ServiceAccount::parse(text, SYSTEM_NAMESPACE) {
        Some(_) => Ok(text.to_owned()),
        None => Err("write it as NAMESPACE/NAME, or NAME"),
    }
}

fn debug_address(text: &str) -> Result<Listen, String> {
    let listen: Listen = text.parse()?;
    if listen.0.as_ref().is_none_or(is_loopback) {
        return Ok(listen);
    }
    Err(
        "it has no password: write a loopback address, as 127.0.0.1:8082, or 0 to switch it off"
            .to_owned(),
    )
}

fn hub_address(text: &str) -> Result<String, &'static str> {
    match split_address(text) {
        Some(_) => Ok(text.to_owned()),
        None => Err("write it as HOST:PORT, as in hub.example.org:7443"),
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    fn read(args: &[&str]) -> Result<Flags, clap::Error> {
        Flags::try_parse_from(std::iter::once(&"krypton-agent").chain(args))
    }

    #[test]
    fn command_is_valid_and_defaults_are_read() {
        Flags::command().debug_assert();
        let flags = read(&[]).unwrap();
        assert_eq!(flags.namespace(|_| None, None), "krypton-system");
        assert_eq!(flags.helm_timeout, Duration::from_secs(180));
        assert_eq!(flags.metrics_bind_address.to_string(), "0.0.0.0:8080");
        assert_eq!(flags.replica(|_| None), "agent");
        assert_eq!(flags.chart_source, ChartSource::Auto);
        let from_hub = read(&["--chart-source=hub"]).unwrap();
        assert_eq!(from_hub.chart_source, ChartSource::Hub);
    }

    #[test]
    fn several_hubs_may_be_given_in_either_way() {
        for args in [
            &["--hub=a:1,[fd00::1]:2"][..],
            &["--hub", "a:1", "--hub", "[fd00::1]:2"][..],
        ] {
            assert_eq!(read(args).unwrap().hub, ["a:1", "[fd00::1]:2"]);
        }
    }

    #[test]
    fn invalid_argument_error_names_flag_and_format() {
        for (arg, word) in [
            ("--hub=https://hub:7443", "HOST:PORT"),
            ("--hub=hub", "HOST:PORT"),
            ("--namespace=Ops", "lower-case"),
            ("--helm-service-account=a/b/c", "NAMESPACE/NAME"),
            ("--helm-timeout=5", "90s"),
            ("--helm-timeout=0s", "90s"),
            ("--max-concurrent-helm=65", "1..=64"),
            ("--history-max=1", "2..=100"),
            ("--metrics-bind-address=8080", ":8080"),
            ("--debug-bind-address=:8082", "loopback"),
            ("--debug-bind-address=10.0.0.1:8082", "loopback"),
            ("--log-format=xml", "text or json"),
            ("--chart-source=edge", "auto, direct or hub"),
        ] {
            let said = read(&[arg]).unwrap_err().to_string();
            let flag = arg.split('=').next().unwrap();
            assert!(said.contains(flag) && said.contains(word), "{arg}: {said}");
        }
    }

    #[test]
    fn the_namespace_is_the_flags_else_the_pods() {
        let pod = |name: &str| (name == "POD_NAMESPACE").then(|| "pods".to_owned());
        let file = || Some("accounts\n".to_owned());
        let flags = read(&["--namespace=ops"]).unwrap();
        assert_eq!(flags.namespace(pod, file()), "ops");
        let flags = read(&["--helm-service-account=helm"]).unwrap();
        assert_eq!(flags.namespace(pod, file()), "pods");
        assert_eq!(flags.namespace(|_| None, file()), "accounts");
        assert_eq!(
            flags.helm_account("ops").unwrap().to_string(),
            "system:serviceaccount:ops:helm"
        );
    }

    #[test]
    fn zero_disables_endpoint_and_replica_defaults_to_pod() {
        let flags = read(&["--metrics-bind-address=0"]).unwrap();
        assert_eq!(flags.metrics_bind_address, Listen(None));
        let env = |name: &str| match name {
            "POD_NAME" => Some("krypton-agent-0".to_owned()),
            _ => Some("host".to_owned()),
        };
        assert_eq!(flags.replica(env), "krypton-agent-0");
        let flags = read(&["--replica=mine"]).unwrap();
        assert_eq!(flags.replica(env), "mine");
    }
}
