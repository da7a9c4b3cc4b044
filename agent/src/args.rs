//! The command line of the agent.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use clap::{CommandFactory, Parser};
use krypton_helm::chart::ChartSource;
use krypton_runtime::access::{LocalSource, ServiceAccount};
use krypton_runtime::admin::DEFAULT_DEBUG_ADDRESS;
use krypton_runtime::args::parsers::{
    Listen, Maybe, collector, duration, from_str, hub_address, listen, listen_on_loopback,
    namespace, number, service_account,
};
use krypton_runtime::args::{Origins, parse};
use krypton_runtime::lease::SYSTEM_NAMESPACE;
use krypton_runtime::telemetry::config::TelemetryConfig;
use krypton_runtime::telemetry::traces::OtlpEndpoint;
use krypton_runtime::telemetry::{DEFAULT_FILTER, LogFormat};
use krypton_types::desired::handling::{HISTORY, Remediation};

/// Sources of the join bundle, in order of precedence.
#[derive(Clone, Debug)]
pub struct BundleSources {
    pub file: Option<PathBuf>,
    pub secret: String,
    pub namespace: String,
}

/// Installs one Helm chart at one version for every Tenant of its cluster, as the hub specifies
///
/// At the first start, the agent joins the fleet with the file that 'kubectl krypton join NAME' printed
/// on the home cluster. Later starts need no file. A flag overrides its variable.
#[derive(Clone, Debug, Parser)]
#[command(name = "krypton-agent", version, max_term_width = 100)]
pub struct Flags {
    /// File that 'kubectl krypton join NAME' printed. The agent uses it once. With a new file, it joins again
    #[arg(long, value_name = "FILE", env = "KRYPTON_JOIN_FILE", help_heading = HUB)]
    pub join_file: Option<PathBuf>,
    /// Secret in --namespace with the content of that file under the key bundle.yaml, used without --join-file
    #[arg(long, value_name = "NAME", env = "KRYPTON_JOIN_SECRET", default_value = "krypton-join", help_heading = HUB)]
    pub join_secret: String,
    /// Address of the hub, instead of the addresses that the hub advertises. You can repeat the flag
    #[arg(long, value_name = "HOST:PORT", env = "KRYPTON_HUB", value_delimiter = ',', value_parser = hub_address, help_heading = HUB)]
    pub hub: Vec<String>,

    /// Kubeconfig file of the cluster [default: KUBECONFIG, else the configuration of the pod]
    #[arg(long, value_name = "FILE", env = "KRYPTON_KUBECONFIG", help_heading = CLUSTER)]
    pub kubeconfig: Option<PathBuf>,
    /// Context of the kubeconfig [default: its current context]
    #[arg(long, value_name = "CONTEXT", env = "KRYPTON_CONTEXT", help_heading = CLUSTER)]
    pub context: Option<String>,
    /// Namespace for the agent's identity. The agent creates it if it doesn't exist [default: POD_NAMESPACE, else that of the pod's service account, else krypton-system]
    #[arg(long, value_name = "NAMESPACE", env = "KRYPTON_NAMESPACE", value_parser = namespace, help_heading = CLUSTER)]
    pub namespace: Option<String>,

    /// The Helm program, version 4.2.4 or newer: a path, or a name in PATH
    #[arg(long, value_name = "PROGRAM", env = "KRYPTON_HELM", default_value = "helm", help_heading = HELM)]
    pub helm: PathBuf,
    /// Service account that Helm acts as. The agent needs the right to impersonate it
    #[arg(long, value_name = "[NAMESPACE/]NAME", env = "KRYPTON_HELM_SERVICE_ACCOUNT", value_parser = service_account, help_heading = HELM)]
    pub helm_service_account: Option<String>,
    /// Time that the hooks of one install, upgrade or uninstall may take
    #[arg(long, value_name = "DURATION", env = "KRYPTON_HELM_TIMEOUT", default_value = "180s", value_parser = positive(), help_heading = HELM)]
    pub helm_timeout: Duration,
    /// Number of Helm processes that may run at the same time, 1 to 64
    #[arg(long, value_name = "N", env = "KRYPTON_MAX_CONCURRENT_HELM", default_value = "4", value_parser = number(1..=64_u8, "write how many may run at the same time"), help_heading = HELM)]
    pub max_concurrent_helm: u8,
    /// Longest pause between two attempts of a failed install or upgrade
    #[arg(long, value_name = "DURATION", env = "KRYPTON_RETRY_MAX", default_value = "15m", value_parser = positive(), help_heading = HELM)]
    pub retry_max: Duration,
    /// Number of retries after a failed install or upgrade [default: the hub's --retries]
    #[arg(long, value_name = "N", env = "KRYPTON_RETRIES", value_parser = from_str::<u32>("a number of retries", "write 0 or more"), help_heading = HELM)]
    pub retries: Option<u32>,
    /// Action after the last retry of an upgrade: keep, or rollback to the last good revision. Rollback also happens immediately if no other attempt can succeed [default: the hub's --remediation]
    #[arg(long, value_name = "ACTION", env = "KRYPTON_REMEDIATION", value_parser = from_str::<Remediation>("a remediation", "write keep or rollback"), help_heading = HELM)]
    pub remediation: Option<Remediation>,
    /// Number of revisions to keep of a release, 2 to 100 [default: the hub's --history-max]
    #[arg(long, value_name = "N", env = "KRYPTON_HISTORY_MAX", value_parser = number(HISTORY, "write how many revisions of a release are kept"), help_heading = HELM)]
    pub history_max: Option<u8>,
    /// Source of charts: direct, hub or auto. With direct, their repository. With hub, the hub, which has the credentials. With auto, the repository, or the hub if the repository is unreachable or refuses
    #[arg(long, value_name = "SOURCE", env = "KRYPTON_CHART_SOURCE", default_value = "auto", value_parser = from_str::<ChartSource>("a source of charts", "write auto, direct or hub"), help_heading = HELM)]
    pub chart_source: ChartSource,
    /// Folder for fetched charts and Helm's own files [default: krypton-agent in $TMPDIR, else in /tmp]
    #[arg(long, value_name = "FOLDER", env = "KRYPTON_CACHE_DIR", help_heading = HELM)]
    pub cache_dir: Option<PathBuf>,
    /// Folder for kubeconfigs and values while Helm runs, preferably in memory [default: that of --cache-dir]
    #[arg(long, value_name = "FOLDER", env = "KRYPTON_PRIVATE_DIR", help_heading = HELM)]
    pub private_dir: Option<PathBuf>,

    /// Address of the metrics endpoint. :PORT means all addresses, 0 switches it off
    #[arg(long, value_name = "ADDRESS", env = "KRYPTON_METRICS_BIND_ADDRESS", default_value = "0.0.0.0:8080", value_parser = listen, help_heading = PROCESS)]
    pub metrics_bind_address: Listen,
    /// Address of /healthz and /readyz. :PORT means all addresses, 0 switches it off
    #[arg(long, value_name = "ADDRESS", env = "KRYPTON_HEALTH_PROBE_BIND_ADDRESS", default_value = "0.0.0.0:8081", value_parser = listen, help_heading = PROCESS)]
    pub health_probe_bind_address: Listen,
    /// Address of /debug, which has no authentication. A loopback address, or 0 to switch it off
    #[arg(long, value_name = "ADDRESS", env = "KRYPTON_DEBUG_BIND_ADDRESS", default_value = DEFAULT_DEBUG_ADDRESS, value_parser = listen_on_loopback, help_heading = PROCESS)]
    pub debug_bind_address: Listen,
    /// Format of the log: text or json
    #[arg(long, value_name = "FORMAT", env = "KRYPTON_LOG_FORMAT", default_value = "text", value_parser = from_str::<LogFormat>("a log format", "write text or json"), help_heading = PROCESS)]
    pub log_format: LogFormat,
    /// Collector that receives traces by OTLP over gRPC, as http://otel-collector:4317 [default: no traces]
    #[arg(long, value_name = "URL", env = "OTEL_EXPORTER_OTLP_ENDPOINT", hide_env_values = true, default_value = "", hide_default_value = true, value_parser = collector_if_any, help_heading = PROCESS)]
    pub otlp_endpoint: Maybe<OtlpEndpoint>,
    /// Name of this replica of the agent, the same after a restart [default: POD_NAME, else HOSTNAME, else agent]
    #[arg(long, value_name = "NAME", env = "KRYPTON_REPLICA", help_heading = PROCESS)]
    pub replica: Option<String>,
}

const HUB: &str = "Hub";
const CLUSTER: &str = "Cluster";
const HELM: &str = "Helm";
const PROCESS: &str = "Process";

fn positive() -> impl Fn(&str) -> Result<Duration, String> + Clone {
    duration(
        Duration::from_nanos(1)..=Duration::MAX,
        "a duration above 0",
    )
}

fn collector_if_any(text: &str) -> Result<Maybe<OtlpEndpoint>, String> {
    match text.trim().is_empty() {
        true => Ok(None),
        false => collector(text).map(Some),
    }
}

impl Flags {
    /// Reads a command line, including the program's name.
    ///
    /// # Errors
    /// A usage error, or the help. Its `exit()` prints it and ends the process.
    pub fn read(argv: impl IntoIterator<Item = OsString>) -> Result<Self, clap::Error> {
        let (command, argv) = (Self::command(), argv.into_iter().collect::<Vec<_>>());
        let origins = Origins::from_clap(&command, &argv);
        parse(command, argv, &origins)
    }

    pub fn telemetry(&self) -> TelemetryConfig<'static> {
        TelemetryConfig {
            program: "krypton-agent",
            replica: None,
            format: self.log_format,
            filter: DEFAULT_FILTER,
            otlp: self.otlp_endpoint.clone(),
        }
    }

    /// Sources of the cluster's configuration. `env` reads a variable.
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

    /// The flag, or the pod's namespace. `service_account` is the content of its service account's namespace file.
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

    /// The account that Helm acts as, by default in the agent's own `namespace`.
    pub fn helm_account(&self, namespace: &str) -> Option<ServiceAccount> {
        let text = self.helm_service_account.as_deref()?;
        ServiceAccount::parse(text, namespace)
    }

    pub fn bundle_sources(&self, namespace: &str) -> BundleSources {
        BundleSources {
            file: self.join_file.clone(),
            secret: self.join_secret.clone(),
            namespace: namespace.to_owned(),
        }
    }

    /// The flag, or the name that Kubernetes or the shell sets.
    pub fn replica(&self, env: impl Fn(&str) -> Option<String>) -> String {
        let flag = self.replica.clone();
        flag.into_iter()
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

#[cfg(test)]
mod tests;
