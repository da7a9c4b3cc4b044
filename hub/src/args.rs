//! The settings of a hub: flags and variables resolved to values, with one precedence.
//!
//! Resolving is a function of values: it reads no file, environment or clock.

mod flags;
mod settings;
pub mod table;

use std::collections::BTreeSet;
use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use krypton_reconciler::plan::Remediation;
use krypton_runtime::telemetry::config::TelemetryConfig;
use krypton_runtime::telemetry::traces::OtlpEndpoint;
use krypton_runtime::telemetry::{DEFAULT_FILTER, LogFormat};
use krypton_types::desired::crd_policy::CrdPolicy;
use krypton_types::desired::drift::DriftPolicy;
use krypton_types::desired::handling::Handling;
use krypton_types::desired::lockdown::Lockdown;
use krypton_types::desired::namespaces::NamespaceConfiguration;
use krypton_types::kubeconfig::Policy;

use crate::chart::values::Source;

pub use flags::{Flags, command, normalise_args};
pub use krypton_runtime::access::{LocalSource, ServiceAccount, service_account_namespace};
pub use krypton_runtime::admin::{BindAddress, NotABindAddress};
pub use krypton_runtime::args::go_values::{parse_bool, parse_duration};

/// The pod that the hub runs in, on its own cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OwnPod {
    pub namespace: String,
    pub name: String,
    pub uid: String,
}

/// Everything that a hub is told at its start.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Namespace of the hub: its CA, its Leases, and as a rule the kubeconfig Secrets are there.
    pub namespace: String,
    /// Namespaces of home whose Tenants are followed; `None` means all.
    pub watch_namespaces: Option<BTreeSet<String>>,
    pub home: HomeSource,
    pub ensure_watch_crds: bool,
    pub discovery: Discovery,
    pub self_cluster: bool,
    /// What kubeconfigs in Secrets may contain.
    pub kubeconfig_policy: Policy,
    /// Where agents connect to; `None`: off.
    pub listen: Option<BindAddress>,
    /// `host:port` by which agents get there, each once.
    pub advertise: Vec<String>,
    /// How long a member's agent must have been away before a proxy acts there.
    pub proxy_grace: Duration,
    /// Of the Lease of the hub that leads.
    pub lead: Duration,
    pub chart: ChartSettings,
    pub chart_values_file: Option<PathBuf>,
    /// In the hub's namespace, each over the one before and all over the file.
    pub chart_values_from: Vec<Source>,
    /// Whether values of single Tenants count.
    pub tenant_values: bool,
    /// Whether Tenants of home that name another member are placed there.
    pub place_tenants: bool,
    pub drift: DriftPolicy,
    pub chart_crds: CrdPolicy,
    pub handling: Handling,
    pub lockdown: Lockdown,
    /// Of workspaces.
    pub namespaces: NamespaceConfiguration,
    pub helm: HelmSettings,
    /// Cap of the pause between two tries of one Tenant.
    pub retry_max: Duration,
    /// Between two looks at what a KryptonDeployment has deployed.
    pub check_interval: Duration,
    /// `None`: off.
    pub metrics_bind_address: Option<BindAddress>,
    /// `None`: off.
    pub health_probe_bind_address: Option<BindAddress>,
    /// On loopback; `None`: off.
    pub debug_bind_address: Option<BindAddress>,
    pub log_format: LogFormat,
    /// `None`: info. `RUST_LOG` beats it either way.
    pub log_level: Option<tracing::Level>,
    /// Where traces go; `None`: nowhere.
    pub otlp_endpoint: Option<OtlpEndpoint>,
    /// Name of this process in events; `None` when neither `POD_NAME` nor `HOSTNAME` is set.
    pub reporting_instance: Option<String>,
    /// Where it runs, if it has been told all of it.
    pub pod: Option<OwnPod>,
    /// What a person should know at start: overridden and ignored settings. To be logged.
    pub notes: Vec<String>,
}

/// Which cluster is home.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HomeSource {
    pub choice: HomeChoice,
    pub context: Option<String>,
    /// The hub's own cluster; with `HomeChoice::Secret`, the one that holds the Secret.
    pub local: LocalSource,
}

/// The three ways to name the home cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HomeChoice {
    Secret {
        namespace: String,
        name: String,
        key: String,
    },
    File(PathBuf),
    Local,
}

/// Where members are looked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ProviderKind {
    Kubeconfig,
    ClusterProfile,
    ClusterApi,
    Kamaji,
    File,
}

impl ProviderKind {
    /// All, each as it is written.
    pub const ALL: [(&'static str, Self); 5] = [
        ("kubeconfig", Self::Kubeconfig),
        ("cluster-profile", Self::ClusterProfile),
        ("cluster-api", Self::ClusterApi),
        ("kamaji", Self::Kamaji),
        ("file", Self::File),
    ];
}

/// How members are found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Discovery {
    pub providers: BTreeSet<ProviderKind>,
    /// Where labelled Secrets are; `None` means all namespaces.
    pub namespaces: Option<BTreeSet<String>>,
    /// Where ClusterProfiles, Cluster API clusters and Kamaji control planes are; `None` means all.
    pub cluster_namespaces: Option<BTreeSet<String>>,
    /// Where sources make members immediately; `None` means all.
    pub accepted_namespaces: Option<BTreeSet<String>>,
    /// The access providers of ClusterProfiles.
    pub provider_file: Option<PathBuf>,
    /// Data key in Kamaji's Secrets.
    pub kamaji_key: String,
    /// Files and directories of kubeconfigs.
    pub paths: Vec<PathBuf>,
    /// Label key; its value must be `true`.
    pub label: String,
    /// Data key in labelled Secrets.
    pub key: String,
}

impl Discovery {
    /// Where a Secret is that is named without a namespace: where members are looked for, if that is one
    /// namespace, else the hub's, as in the original.
    pub fn namespace_of_secrets(&self, hub: &str) -> String {
        match self.namespaces.as_ref().map(|all| (all.len(), all.first())) {
            Some((1, Some(only))) => only.clone(),
            _ => hub.to_owned(),
        }
    }

    /// Where every KryptonDeployment may name a Secret.
    pub fn open_namespaces(&self, hub: &str) -> BTreeSet<String> {
        [hub.to_owned(), self.namespace_of_secrets(hub)].into()
    }
}

/// The chart of the fleet, without values.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChartSettings {
    pub repo: String,
    pub name: String,
    pub version: String,
    pub install_crds: bool,
    /// Name of the Secret in the hub's namespace with what the repository asks for.
    pub credentials_secret: Option<String>,
    /// The keys by which charts must be signed; `None`: they need not be.
    pub keyring: Option<PathBuf>,
    /// Whether credentials go, and registries are spoken to, over plain HTTP.
    pub plain_http: bool,
    /// How often a range of versions is looked up again; `None`: when the flags change.
    pub resolve_every: Option<Duration>,
}

/// How helm is run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HelmSettings {
    /// A path, or a name to look up in PATH.
    pub program: PathBuf,
    /// What it acts as on home; `None`: as the hub itself.
    pub service_account: Option<ServiceAccount>,
    pub timeout: Duration,
    /// 1 to 64.
    pub max_concurrent: usize,
    /// 1 to `max_concurrent`.
    pub max_per_member: usize,
    /// How often what failed is tried again; without end if `None`.
    pub retries: Option<u32>,
    pub remediation: Remediation,
    /// Revisions kept of a release.
    pub history_max: u8,
    pub cache_dir: PathBuf,
    /// For credentials and values; that of `cache_dir` if `None`.
    pub private_dir: Option<PathBuf>,
}

/// Where a value came from, for messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    Variable(&'static str),
    Flag(&'static str),
    Default(&'static str),
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Variable(name) => write!(f, "variable {name}"),
            Self::Flag(name) => write!(f, "flag --{name}"),
            Self::Default(name) => write!(f, "default of --{name}"),
        }
    }
}

/// A setting that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SettingsError {
    #[error("{origin}: {value:?} is not {class}; {remedy}")]
    Invalid {
        origin: Origin,
        value: String,
        class: &'static str,
        remedy: &'static str,
    },
    /// The value may hold a password.
    #[error("{origin}: the value is not {class}; {remedy}")]
    InvalidSecret {
        origin: Origin,
        class: &'static str,
        remedy: &'static str,
    },
    #[error(
        "{first} and {second} both listen on {address}; give one of them another port, or 0 to switch it off"
    )]
    SameAddress {
        first: Origin,
        second: Origin,
        address: BindAddress,
    },
}

impl Settings {
    /// Variables beat flags, flags beat defaults. `env` reads a variable, and
    /// `service_account_namespace` is what [`service_account_namespace`] has read.
    pub fn resolve(
        flags: Flags,
        env: &dyn Fn(&str) -> Option<String>,
        service_account_namespace: Option<String>,
    ) -> Result<Self, SettingsError> {
        settings::resolve(&flags, env, service_account_namespace)
    }

    /// What the process is to tell of itself.
    pub fn telling(&self) -> TelemetryConfig<'_> {
        TelemetryConfig {
            program: "krypton-hub",
            replica: self.reporting_instance.as_deref(),
            format: self.log_format,
            filter: self.log_filter(),
            otlp: self.otlp_endpoint.clone(),
        }
    }

    /// What is logged unless `RUST_LOG` says otherwise.
    pub fn log_filter(&self) -> &'static str {
        match self.log_level {
            None => DEFAULT_FILTER,
            Some(tracing::Level::ERROR) => "error",
            Some(tracing::Level::WARN) => "warn",
            Some(tracing::Level::INFO) => "info",
            Some(tracing::Level::DEBUG) => "debug",
            Some(tracing::Level::TRACE) => "trace",
        }
    }
}

#[cfg(test)]
mod refusal_tests;
#[cfg(test)]
mod tests;
