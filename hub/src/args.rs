//! The settings of a hub: its command line, and the variables that override flags or complete them.

mod environment;
mod parsers;

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use clap::{ArgAction, CommandFactory, Parser};
use krypton_runtime::access::ServiceAccount;
use krypton_runtime::admin::DEFAULT_DEBUG_ADDRESS;
use krypton_runtime::args::parsers::{
    Listen, Maybe, collector, duration, from_str, listen, listen_on_loopback, namespace, number,
    service_account,
};
use krypton_runtime::args::{Env, Variables, with_environment, with_variables};
use krypton_runtime::telemetry::config::TelemetryConfig;
use krypton_runtime::telemetry::traces::OtlpEndpoint;
use krypton_runtime::telemetry::{DEFAULT_FILTER, LogFormat};
use krypton_types::desired::crd_policy::CrdPolicy;
use krypton_types::desired::drift::{DriftMode, DriftPolicy};
use krypton_types::desired::handling::{HISTORY, Handling, Remediation, WaitPolicy};
use krypton_types::desired::lockdown::Lockdown;
use krypton_types::desired::namespaces::NamespaceConfiguration;
use krypton_types::kubeconfig::Policy;
use krypton_types::names;
use reqwest::Url;

use crate::chart::values::ValuesSource;
use crate::discovery::{MemberPrefixes, SourceKind};

pub use environment::{HelmCredentials, HomeChoice, HomeSource, OwnPod};
pub use krypton_runtime::access::{LocalSource, service_account_namespace};

const MINUTE: Duration = Duration::from_secs(60);
const DAY: Duration = Duration::from_secs(24 * 60 * 60);
/// Duration of the Lease without a renewal. After the leader is killed, another hub takes over after this time and
/// one more poll. The duration exceeds an API server outage of half a second many times over.
pub const LEASE_DURATION: Duration = Duration::from_secs(5);
/// The next leader takes over this long after a hub was killed. It limits the duration of the Lease.
const LEASE_DURATION_MAX: Duration = MINUTE;
const HELM_RUNS_MAX: usize = 64;

/// Variables that override a flag.
const VARIABLES: Variables = &[
    ("WATCH_NAMESPACE", "namespace"),
    ("POD_NAMESPACE", "namespace"),
    ("WATCH_NAMESPACES", "watch-namespaces"),
    ("WATCH_KUBECONFIG", "watch-kubeconfig"),
    ("WATCH_CLUSTER_KUBECONFIG", "watch-kubeconfig"),
    ("WATCH_CONTEXT", "watch-context"),
    ("WATCH_KUBECONFIG_SECRET", "watch-kubeconfig-secret"),
    (
        "WATCH_KUBECONFIG_SECRET_NAMESPACE",
        "watch-kubeconfig-secret-namespace",
    ),
    ("WATCH_KUBECONFIG_SECRET_KEY", "watch-kubeconfig-secret-key"),
    ("KRYPTON_PROVIDERS", "providers"),
    ("KRYPTON_KUBECONFIG_NAMESPACES", "kubeconfig-namespaces"),
    ("KRYPTON_CLUSTER_NAMESPACES", "cluster-namespaces"),
    ("KRYPTON_ACCEPT_NAMESPACES", "accept-namespaces"),
    (
        "KRYPTON_CLUSTERPROFILE_PROVIDER_FILE",
        "clusterprofile-provider-file",
    ),
    ("KRYPTON_KUBECONFIG_PATHS", "kubeconfig-paths"),
    ("KUBECONFIG_SECRET_LABEL", "kubeconfig-label"),
    ("KUBECONFIG_SECRET_KEY", "kubeconfig-key"),
    ("KRYPTON_LISTEN", "listen"),
    ("KRYPTON_ADVERTISE", "advertise"),
    ("KRYPTON_PROXY_GRACE", "proxy-grace"),
    ("KRYPTON_CHART_VALUES_FROM", "chart-values-from"),
    ("KRYPTON_TENANT_VALUES", "tenant-values"),
    ("KRYPTON_PLACE_TENANTS", "place-tenants"),
    ("KRYPTON_NO_CROSS_NAMESPACE_REFS", "no-cross-namespace-refs"),
    ("KRYPTON_DEFAULT_SERVICE_ACCOUNT", "default-service-account"),
    ("KRYPTON_CHART_CRDS", "chart-crds"),
    ("KRYPTON_WAIT", "wait"),
    ("KRYPTON_WORKSPACE_LABELS", "workspace-labels"),
    ("KRYPTON_WORKSPACE_ANNOTATIONS", "workspace-annotations"),
    ("KRYPTON_DRIFT", "drift"),
    ("KRYPTON_DRIFT_INTERVAL", "drift-interval"),
    (
        "KRYPTON_CHART_CREDENTIALS_SECRET",
        "chart-credentials-secret",
    ),
    ("KRYPTON_CHART_KEYRING", "chart-keyring"),
    ("KRYPTON_CHART_RESOLVE_INTERVAL", "chart-resolve-interval"),
    ("KRYPTON_HELM_SERVICE_ACCOUNT", "helm-service-account"),
    ("KRYPTON_RETRIES", "retries"),
    ("KRYPTON_REMEDIATION", "remediation"),
    ("KRYPTON_HISTORY_MAX", "history-max"),
    ("KRYPTON_DEBUG_BIND_ADDRESS", "debug-bind-address"),
    ("OTEL_EXPORTER_OTLP_ENDPOINT", "otlp-endpoint"),
    ("KRYPTON_NOTIFY_URL", "notify-url"),
    ("KRYPTON_NOTIFY_KEY_FILE", "notify-key-file"),
    ("KRYPTON_LEADER_LEASE_DURATION", "leader-lease-duration"),
];

/// Flags whose empty value stands for their default.
const BLANK_IS_DEFAULT: [&str; 8] = [
    "namespace",
    "watch-kubeconfig-secret-key",
    "helm-cache-dir",
    "listen",
    "metrics-bind-address",
    "health-probe-bind-address",
    "debug-bind-address",
    "log-format",
];

/// A list that is parsed from one text. For a `Vec`, Clap would take the parser of one item.
pub type List<T> = Vec<T>;

/// Namespaces. `None` means all.
pub type Namespaces = Maybe<BTreeSet<String>>;

/// Installs one Helm chart at one version for every Tenant on every cluster of a fleet
///
/// Flags may be written with one dash or with two. A variable overrides its flag. docs/reference/flags.md lists all flags, and the
/// variables without a flag.
#[derive(Clone, Debug, Parser)]
#[command(name = "krypton-hub", version, max_term_width = 100)]
#[command(next_help_heading = "Home cluster")]
pub struct Settings {
    /// Namespace of the hub. It contains the hub's CA and Leases, and usually the kubeconfig Secrets [default: the service account's namespace file, else default]
    #[arg(long, value_name = "NAMESPACE", default_value = "default", value_parser = namespace)]
    pub namespace: String,
    /// Namespaces of the home cluster whose Tenants the hub reconciles, separated by commas. Empty or * means all
    #[arg(long, value_name = "LIST", default_value = "*", value_parser = parsers::namespaces)]
    pub watch_namespaces: Namespaces,
    /// Kubeconfig file of the hub's own cluster [default: KUBECONFIG, else in-cluster, else $HOME/.kube/config]
    #[arg(long, value_name = "FILE")]
    kubeconfig: Option<PathBuf>,
    /// Kubeconfig file of the home cluster, if the hub runs elsewhere
    #[arg(long, value_name = "FILE")]
    watch_kubeconfig: Option<PathBuf>,
    /// Context of the home kubeconfig. If empty, its current context
    #[arg(long, value_name = "CONTEXT")]
    watch_context: Option<String>,
    /// Secret on the hub's own cluster that contains the kubeconfig of the home cluster
    #[arg(long, value_name = "NAME", value_parser = parsers::object_name("the name of a Secret", "write only the name, and the namespace as --watch-kubeconfig-secret-namespace"))]
    watch_kubeconfig_secret: Option<String>,
    /// Namespace of that Secret [default: the value of --namespace]
    #[arg(long, value_name = "NAMESPACE", value_parser = namespace)]
    watch_kubeconfig_secret_namespace: Option<String>,
    /// Key of that Secret
    #[arg(long, value_name = "KEY", default_value = "kubeconfig", value_parser = parsers::data_key)]
    watch_kubeconfig_secret_key: String,
    /// Create or update the CustomResourceDefinitions on the home cluster. The variable can only switch it on, with true, 1 or yes [env: ENSURE_WATCH_CRDS]
    #[arg(long)]
    pub ensure_watch_crds: bool,

    #[command(flatten)]
    pub discovery: Discovery,
    /// Make the home cluster a member
    #[arg(long, default_value = "true", help_heading = "Members")]
    pub self_cluster: bool,
    #[command(flatten)]
    insecure: InsecureKubeconfigs,

    /// Address of the port for agents. :PORT means all addresses, 0 switches it off
    #[arg(long, value_name = "ADDRESS", default_value = "0.0.0.0:7443", value_parser = listen, help_heading = "Agents")]
    pub listen: Listen,
    /// HOST:PORT through which agents reach that port, separated by commas. You can repeat the flag. Without an address, kubectl krypton join needs --address
    #[arg(long, value_name = "LIST", action = ArgAction::Append, default_value = "", value_parser = parsers::advertised, help_heading = "Agents")]
    pub advertise: List<String>,
    /// Time without a member's agent after which the hub acts on the member itself
    #[arg(long, value_name = "DURATION", default_value = "60s", value_parser = up_to_a_day(), help_heading = "Agents")]
    pub proxy_grace: Duration,

    #[command(flatten)]
    pub chart: ChartSettings,
    /// YAML file with values for the chart. The hub applies a change to every member without a restart
    #[arg(long, value_name = "FILE", help_heading = "Chart")]
    pub chart_values_file: Option<PathBuf>,
    /// ConfigMaps and Secrets with values for the chart in the hub's namespace, separated by commas, as configmap/NAME or secret/NAME/KEY. The default key is values.yaml. With ? at the end, it may be missing. You can repeat the flag. Later ones override earlier ones, and all override the file. The hub applies a change to every member
    #[arg(long, value_name = "LIST", action = ArgAction::Append, default_value = "", value_parser = parsers::list::<_, List<ValuesSource>>(parsers::values_source), help_heading = "Chart")]
    pub chart_values_from: List<ValuesSource>,
    /// Let the values of a Tenant (spec.values) override all others. Otherwise, Krypton doesn't change a Tenant that has values
    #[arg(long, help_heading = "Chart")]
    pub tenant_values: bool,
    /// CRDs in the chart's folder crds: skip, create (with the first installation, as Helm does) or create-replace (and update them before each upgrade). Krypton never deletes them
    #[arg(long, value_name = "POLICY", default_value = "create", value_parser = from_str::<CrdPolicy>("a policy", "write skip, create or create-replace"), help_heading = "Chart")]
    pub chart_crds: CrdPolicy,
    /// Condition for a deployed release to be Ready: none, hooks or ready. With hooks, Helm waits for them, and the status lists workloads that aren't ready. With ready, the workloads must be ready
    #[arg(long, value_name = "CONDITION", default_value = "ready", value_parser = from_str::<WaitPolicy>("a policy", "write none, ready or hooks"), help_heading = "Chart")]
    wait: WaitPolicy,
    /// Delete the six CRDs of cert-manager with the last release of a member, if that release created them and no objects of their kinds exist
    #[arg(long, help_heading = "Chart")]
    delete_cert_manager_crds: bool,
    /// Labels of the namespaces that Krypton creates for workspaces, as KEY=VALUE, separated by commas. You can repeat the flag. Krypton keeps them on these namespaces, and removes them when you remove them here. An EdgeCluster can override them (spec.namespaceConfiguration)
    #[arg(long, value_name = "LIST", action = ArgAction::Append, default_value = "", value_parser = parsers::labels, help_heading = "Chart")]
    workspace_labels: BTreeMap<String, String>,
    /// Annotations of those namespaces, in the same form. Put a backslash before a comma or backslash in a value
    #[arg(long, value_name = "LIST", action = ArgAction::Append, default_value = "", value_parser = parsers::annotations, help_heading = "Chart")]
    workspace_annotations: BTreeMap<String, String>,
    /// Reaction to a release that differs from its chart: off, warn (report it on the Tenant) or heal (correct it). A Tenant can override it through the annotation mesh.openkcm.io/drift
    #[arg(long, value_name = "MODE", default_value = "off", value_parser = from_str::<DriftMode>("a mode", "write off, warn or heal"), help_heading = "Chart")]
    drift: DriftMode,
    /// Time between two drift checks of a release, plus or minus a fifth
    #[arg(long, value_name = "DURATION", default_value = "10m", value_parser = up_to_a_day(), help_heading = "Chart")]
    drift_interval: Duration,

    /// Place a Tenant of the home cluster on the member that its clusterRef names, and delete the copy when you delete the Tenant. Without this flag, you create such a Tenant on the member, and the home cluster only shows it
    #[arg(long, help_heading = "Tenants")]
    pub place_tenants: bool,
    /// Restrict Tenants and KryptonDeployments to their own namespace and those created for them. They can use only Secrets with the label, and can't hand over objects through their own annotations
    #[arg(long, help_heading = "Tenants")]
    no_cross_namespace_refs: bool,
    /// Service account in the object's namespace that Helm acts as, if the object names none. Krypton needs the right to impersonate it on each cluster
    #[arg(long, value_name = "NAME", value_parser = parsers::object_name("the name of a service account", "write only the name; the account is in each Tenant's own namespace"), help_heading = "Tenants")]
    default_service_account: Option<String>,

    #[command(flatten)]
    pub helm: HelmSettings,
    /// Longest pause between two attempts of a failed install or upgrade
    #[arg(long, value_name = "DURATION", default_value = "15m", value_parser = up_to_a_day(), help_heading = "Helm")]
    pub retry_max: Duration,

    #[command(flatten)]
    pub notify: NotifySettings,

    /// Address of the metrics endpoint. :PORT means all addresses, 0 switches it off
    #[arg(long, value_name = "ADDRESS", default_value = ":8080", value_parser = listen, help_heading = "Process")]
    pub metrics_bind_address: Listen,
    /// Address of /healthz and /readyz. :PORT means all addresses, 0 switches it off
    #[arg(long, value_name = "ADDRESS", default_value = ":8081", value_parser = listen, help_heading = "Process")]
    pub health_probe_bind_address: Listen,
    /// Address of /debug, which has no authentication. A loopback address, or 0 to switch it off
    #[arg(long, value_name = "ADDRESS", default_value = DEFAULT_DEBUG_ADDRESS, value_parser = listen_on_loopback, help_heading = "Process")]
    pub debug_bind_address: Listen,
    /// Format of the log: text or json
    #[arg(long, value_name = "FORMAT", default_value = "text", value_parser = from_str::<LogFormat>("a log format", "write text or json"), help_heading = "Process")]
    pub log_format: LogFormat,
    /// Collector that receives traces by OTLP over gRPC, as http://otel-collector:4317 [default: no traces]
    #[arg(long, value_name = "URL", value_parser = collector, help_heading = "Process")]
    otlp_endpoint: Option<OtlpEndpoint>,
    /// Time for which the leader's Lease is valid without a renewal, 5s to 60s. A fifth of it is the deadline of each call. Use a longer time if the API server of the home cluster is slow
    #[arg(long = "leader-lease-duration", value_name = "DURATION", default_value = "5s", value_parser = duration(LEASE_DURATION..=LEASE_DURATION_MAX, "a duration from 5s to 60s"), help_heading = "Process")]
    pub lead: Duration,
    /// No effect: one of several hubs is always the leader. Accepted because the manifest of the Go operator passes it
    #[arg(long, help_heading = "Process")]
    leader_elect: bool,
    /// No effect: the hub watches members, or lists them every 8 s if it can't. Accepted as in the Knative operator
    #[arg(long, value_name = "DURATION", default_value = "10s", value_parser = parsers::poll_interval, help_heading = "Process")]
    remote_deployments_poll_interval: String,

    /// Log level: debug, info, warn, error or panic (as error). As a verbosity, 1 is debug, and 2 and more is trace [default: info; RUST_LOG overrides this flag]
    #[arg(long, value_name = "LEVEL", value_parser = parsers::log_filter, help_heading = ZAP)]
    zap_log_level: Option<&'static str>,
    /// json is --log-format json, console is --log-format text. --log-format overrides it [default: the value of --log-format]
    #[arg(long, value_name = "ENCODER", value_parser = parsers::encoder, help_heading = ZAP)]
    zap_encoder: Option<LogFormat>,
    /// No effect
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", help_heading = ZAP)]
    zap_devel: Option<String>,
    /// No effect
    #[arg(long, value_name = "LEVEL", help_heading = ZAP)]
    zap_stacktrace_level: Option<String>,
    /// No effect
    #[arg(long, value_name = "ENCODING", help_heading = ZAP)]
    zap_time_encoding: Option<String>,

    /// The home cluster.
    #[arg(skip)]
    pub home: HomeSource,
    /// Helm's own file with the credentials of the chart repository. `None` with `--chart-credentials-secret`.
    #[arg(skip)]
    pub helm_credentials: Option<HelmCredentials>,
    /// Whether a failure to fetch the chart leaves the phase of a Tenant unchanged.
    #[arg(skip)]
    pub allow_chart_skip: bool,
    /// Time between two checks of the release of a KryptonDeployment.
    #[arg(skip)]
    pub check_interval: Duration,
    /// Name of this process in events. `None` if neither `POD_NAME` nor `HOSTNAME` is set.
    #[arg(skip)]
    pub reporting_instance: Option<String>,
    /// The pod of this process, if all its variables are set.
    #[arg(skip)]
    pub pod: Option<OwnPod>,
    /// Overridden and ignored settings, to be logged at start.
    #[arg(skip)]
    pub notes: Vec<String>,
}

const ZAP: &str = "Zap (of the Go operator)";

/// Discovery of members.
#[derive(Clone, Debug, PartialEq, Eq, clap::Args)]
#[command(next_help_heading = "Members")]
pub struct Discovery {
    /// Sources of members, separated by commas: kubeconfig (labelled Secrets), cluster-profile, cluster-api, kamaji, file
    #[arg(long, value_name = "LIST", default_value = "kubeconfig", value_parser = parsers::list::<_, BTreeSet<SourceKind>>(parsers::provider))]
    pub providers: BTreeSet<SourceKind>,
    /// Namespaces of labelled kubeconfig Secrets, separated by commas. * means all [default: the value of --namespace]
    #[arg(long = "kubeconfig-namespaces", value_name = "LIST", default_value = "", value_parser = parsers::listed_namespaces)]
    pub namespaces: Namespaces,
    /// Namespaces of ClusterProfiles, Cluster API clusters and Kamaji control planes, separated by commas. * means all
    #[arg(long, value_name = "LIST", default_value = "*", value_parser = parsers::namespaces)]
    pub cluster_namespaces: Namespaces,
    /// Namespaces, in addition to the hub's own, whose sources create members immediately, separated by commas. * means all. Other members wait until an operator accepts them
    #[arg(long = "accept-namespaces", value_name = "LIST", default_value = "", value_parser = parsers::listed_namespaces)]
    pub accepted_namespaces: Namespaces,
    /// File with the access providers of ClusterProfiles (Cluster Inventory API, JSON). Without it, the hub can't reach any ClusterProfile
    #[arg(long = "clusterprofile-provider-file", value_name = "FILE")]
    pub provider_file: Option<PathBuf>,
    /// Prefixes of member names as PROVIDER=PREFIX, separated by commas. They keep apart objects of two providers with equal names. A member keeps its name when its prefix changes, and a name in the annotation mesh.openkcm.io/member-name gets no prefix. The prefix of kubeconfig applies to all kubeconfig Secrets
    #[arg(long = "member-prefix", value_name = "LIST", default_value = "", value_parser = parsers::list::<_, MemberPrefixes>(parsers::member_prefix))]
    pub member_prefixes: MemberPrefixes,
    /// Key of the kubeconfig in the Secrets of Kamaji: admin.conf, or admin.svc if the hub runs next to the control planes
    #[arg(long = "kamaji-kubeconfig-key", value_name = "KEY", default_value = "admin.conf", value_parser = parsers::data_key)]
    pub kamaji_key: String,
    /// KubeconfigGenerator whose Secrets the hub uses for Kamaji's control planes instead of their admin kubeconfigs
    #[arg(long, value_name = "NAME", value_parser = parsers::kamaji_generator)]
    pub kamaji_generator: Option<String>,
    /// Kubeconfig files, and folders of them, for the provider file, separated by commas. Each context of a file is a cluster
    #[arg(long = "kubeconfig-paths", value_name = "LIST", default_value = "", value_parser = parsers::list::<_, List<PathBuf>>(|path| Ok(path.into())))]
    pub paths: List<PathBuf>,
    /// Label key of kubeconfig Secrets. The label's value must be "true"
    #[arg(long = "kubeconfig-label", value_name = "LABEL", default_value = names::DISCOVERY_LABEL, value_parser = parsers::label_key)]
    pub label: String,
    /// Key of the kubeconfig in those Secrets
    #[arg(long = "kubeconfig-key", value_name = "KEY", default_value = names::KUBECONFIG_KEY, value_parser = parsers::data_key)]
    pub key: String,
}

/// Contents of kubeconfigs in Secrets that the hub refuses by default.
#[derive(Clone, Debug, clap::Args)]
#[command(next_help_heading = "Members")]
struct InsecureKubeconfigs {
    /// Accept kubeconfigs in Secrets that run a program (exec)
    #[arg(long = "insecure-kubeconfig-exec")]
    exec: bool,
    /// Accept kubeconfigs in Secrets that use an auth-provider
    #[arg(long = "insecure-kubeconfig-auth-provider")]
    auth_provider: bool,
    /// Accept kubeconfigs in Secrets that read their token from a file of the hub (tokenFile)
    #[arg(long = "insecure-kubeconfig-token-file")]
    token_file: bool,
    /// Accept kubeconfigs in Secrets that name certificate or key files of the hub
    #[arg(long = "insecure-kubeconfig-files")]
    files: bool,
    /// Accept kubeconfigs in Secrets that disable TLS verification (insecure-skip-tls-verify)
    #[arg(long = "insecure-kubeconfig-tls")]
    tls: bool,
    /// Accept kubeconfigs in Secrets whose server or proxy is on the hub's own machine (loopback)
    #[arg(long = "insecure-kubeconfig-loopback")]
    loopback: bool,
    /// Accept kubeconfigs in Secrets whose server or proxy has a link-local, metadata, multicast or broadcast address
    #[arg(long = "insecure-kubeconfig-link-local")]
    link_local: bool,
    /// Accept kubeconfigs in Secrets that name a proxy (proxy-url)
    #[arg(long = "insecure-kubeconfig-proxy")]
    proxy: bool,
}

/// The chart of the fleet, without values.
#[derive(Clone, Debug, PartialEq, Eq, clap::Args)]
#[command(next_help_heading = "Chart")]
pub struct ChartSettings {
    /// URL of the chart repository: https, http or oci. Empty if --chart-name is the path of a .tgz or a full oci URL
    #[arg(long = "chart-repo", value_name = "URL", default_value = "https://charts.jetstack.io", value_parser = parsers::chart_repo)]
    pub repo: String,
    /// Name of the chart, the path of a .tgz, or a full oci URL
    #[arg(long = "chart-name", value_name = "NAME", default_value = "cert-manager", value_parser = parsers::chart_name)]
    pub name: String,
    /// Version of the chart: exact, as 1.2.3 or 1.2.3@sha256:DIGEST, or a range as ^1.2, which the hub resolves once for all members. Empty means the newest stable version, resolved in the same way
    #[arg(
        id = "chart-version",
        long,
        value_name = "VERSION",
        default_value = "1.19.1"
    )]
    pub version: String,
    /// Add the value installCRDs: true
    #[arg(long = "chart-install-crds", default_value = "true")]
    pub install_crds: bool,
    /// Secret in the hub's namespace with the credentials of the repository: username and password, token, tls.crt and tls.key, ca.crt, .dockerconfigjson. Only the hub has them, so agents get such charts from the hub
    #[arg(long = "chart-credentials-secret", value_name = "NAME", value_parser = parsers::object_name("the name of a Secret", "write only the name; the Secret is in the hub's namespace"))]
    pub credentials_secret: Option<String>,
    /// File with public keys as 'gpg --export' writes it. One of them must have signed the chart. Helm verifies the chart's provenance file, and members accept only that content
    #[arg(long = "chart-keyring", value_name = "PATH")]
    pub keyring: Option<PathBuf>,
    /// Use plain HTTP for an OCI registry, and send credentials over it. Without the flag, the hub does that only on its own machine
    #[arg(long = "insecure-chart-http")]
    pub plain_http: bool,
    /// Time after which the hub resolves a range in --chart-version again, from 1m to 24h. 0 means only if repository, name or range change
    #[arg(long = "chart-resolve-interval", value_name = "DURATION", default_value = "0", value_parser = parsers::resolve_interval)]
    pub resolve_every: Maybe<Duration>,
}

/// How the hub runs Helm.
#[derive(Clone, Debug, PartialEq, Eq, clap::Args)]
#[command(next_help_heading = "Helm")]
pub struct HelmSettings {
    /// The Helm program, version 4.2.4 or newer: a path, or a name in PATH
    #[arg(long = "helm", value_name = "PROGRAM", default_value = "helm", value_parser = parsers::program)]
    pub program: PathBuf,
    /// Service account that Helm acts as on the home cluster. The hub needs the right to impersonate it
    #[arg(long = "helm-service-account", value_name = "[NAMESPACE/]NAME", value_parser = service_account)]
    service_account: Option<String>,
    /// Time that the hooks of one install, upgrade or uninstall may take
    #[arg(long = "helm-timeout", value_name = "DURATION", default_value = "180s", value_parser = up_to_a_day())]
    pub timeout: Duration,
    /// Number of Helm processes that may run at the same time, 1 to 64
    #[arg(long = "max-concurrent-helm", value_name = "N", default_value = "4", value_parser = number(1..=HELM_RUNS_MAX, "write how many may run at the same time"))]
    pub max_concurrent: usize,
    /// Number of them for one member that the hub reconciles itself. If empty, all except one, so a member whose runs hang leaves room for others
    #[arg(long = "max-concurrent-helm-per-member", value_name = "N", value_parser = from_str::<usize>(parsers::PER_MEMBER, parsers::PER_MEMBER_REMEDY))]
    max_per_member: Option<usize>,
    /// Number of retries after a failed install or upgrade. Unlimited if empty. Like the next two flags, it applies to all members, but an agent's own flag overrides it
    #[arg(long, value_name = "N", value_parser = from_str::<u32>("a number of retries", "write 0 or more, or leave it out for unlimited retries"))]
    retries: Option<u32>,
    /// Action after the last retry of an upgrade: keep, or rollback to the last good revision. Rollback also happens immediately if no other attempt can succeed
    #[arg(long, value_name = "ACTION", default_value = "keep", value_parser = from_str::<Remediation>("a remediation", "write keep, or rollback to restore the last good revision"))]
    remediation: Remediation,
    /// Number of revisions to keep of a release, 2 to 100
    #[arg(long, value_name = "N", default_value = "3", value_parser = number(HISTORY, "write how many revisions of a release are kept"))]
    history_max: u8,
    /// Folder for fetched charts and Helm's own cache [default: krypton-hub in $TMPDIR, else in /tmp]
    #[arg(
        long = "helm-cache-dir",
        value_name = "FOLDER",
        default_value = "/tmp/krypton-hub"
    )]
    pub cache_dir: PathBuf,
    /// Folder for kubeconfigs and values while Helm runs, preferably in memory [default: that of --helm-cache-dir]
    #[arg(long, value_name = "FOLDER")]
    pub private_dir: Option<PathBuf>,
}

/// The receiver of notifications. Both are set, or none.
#[derive(Clone, Debug, PartialEq, Eq, clap::Args)]
#[command(next_help_heading = "Notifications")]
pub struct NotifySettings {
    /// Webhook that receives CloudEvents about changed states of members, Tenants, KryptonDeployments, the chart's version and credentials: https, or http on the hub's own machine (loopback). Needs --notify-key-file [default: no notifications]
    #[arg(long = "notify-url", value_name = "URL", value_parser = parsers::webhook)]
    pub url: Option<Url>,
    /// File with the key of the signature (HMAC-SHA256) in the header X-Signature, at least 16 bytes. White space at its end doesn't count. A change applies without a restart
    #[arg(long = "notify-key-file", value_name = "FILE")]
    pub key_file: Option<PathBuf>,
}

fn up_to_a_day() -> impl Fn(&str) -> Result<Duration, String> + Clone {
    duration(Duration::from_secs(1)..=DAY, "a duration from 1s to 24h")
}

/// Returns the command, with the variables in the help of each flag.
pub fn command() -> clap::Command {
    with_variables(Settings::command(), VARIABLES)
}

impl Settings {
    /// Reads a command line, including the program's name. Variables override flags, and flags override defaults.
    ///
    /// `service_account_namespace` is the content of the namespace file of the pod's service account.
    ///
    /// # Errors
    /// A usage error, or the help. Its `exit()` prints it and ends the process.
    pub fn read(
        argv: impl IntoIterator<Item = OsString>,
        env: Env,
        service_account_namespace: Option<String>,
    ) -> Result<Self, clap::Error> {
        let env: Env = &|name| env(name).filter(|text| !text.is_empty());
        let mut command = command();
        let namespace = service_account_namespace.map(|text| text.trim().to_owned());
        if let Some(namespace) = namespace.filter(|namespace| !namespace.is_empty()) {
            command = command.mut_arg("namespace", |arg| arg.default_value(namespace));
        }
        if let Some(folder) = env("TMPDIR") {
            let folder = PathBuf::from(folder).join("krypton-hub");
            command = command.mut_arg("cache_dir", |arg| {
                arg.default_value(folder.into_os_string())
            });
        }
        let (argv, origins) = with_environment(&command, argv, VARIABLES, &BLANK_IS_DEFAULT, env);
        let mut settings: Self = krypton_runtime::args::parse(command, argv, &origins)?;
        settings.check(&origins, env)?;
        settings.complete(origins, env);
        Ok(settings)
    }

    /// Permitted contents of kubeconfigs in Secrets.
    pub fn kubeconfig_policy(&self) -> Policy {
        Policy {
            allow_exec: self.insecure.exec,
            allow_auth_provider: self.insecure.auth_provider,
            allow_token_file: self.insecure.token_file,
            allow_files: self.insecure.files,
            allow_insecure_tls: self.insecure.tls,
            allow_loopback: self.insecure.loopback,
            allow_link_local: self.insecure.link_local,
            allow_proxy: self.insecure.proxy,
        }
    }

    pub fn drift(&self) -> DriftPolicy {
        DriftPolicy {
            mode: self.drift,
            // At most a day.
            interval_seconds: u32::try_from(self.drift_interval.as_secs()).unwrap_or(u32::MAX),
        }
    }

    pub fn handling(&self) -> Handling {
        Handling {
            wait: self.wait,
            delete_cert_manager_crds: self.delete_cert_manager_crds,
            allow_chart_skip: self.allow_chart_skip,
            retries: self.helm.retries,
            remediation: self.helm.remediation,
            history_max: self.helm.history_max,
        }
    }

    pub fn lockdown(&self) -> Lockdown {
        Lockdown {
            no_cross_namespace_refs: self.no_cross_namespace_refs,
            default_service_account: self.default_service_account.clone().unwrap_or_default(),
        }
    }

    /// Labels and annotations of the namespaces that Krypton creates for workspaces.
    pub fn workspace_namespaces(&self) -> NamespaceConfiguration {
        NamespaceConfiguration {
            labels: self.workspace_labels.clone(),
            annotations: self.workspace_annotations.clone(),
        }
    }

    /// The account that Helm acts as on the home cluster. `None`: the hub's own account.
    pub fn helm_account(&self) -> Option<ServiceAccount> {
        let account = self.helm.service_account.as_deref()?;
        ServiceAccount::parse(account, &self.namespace)
    }

    pub fn telemetry(&self) -> TelemetryConfig<'_> {
        TelemetryConfig {
            program: "krypton-hub",
            replica: self.reporting_instance.as_deref(),
            format: self.log_format,
            filter: self.log_filter(),
            otlp: self.otlp_endpoint.clone(),
        }
    }

    /// The log filter, unless `RUST_LOG` sets another.
    pub fn log_filter(&self) -> &'static str {
        self.zap_log_level.unwrap_or(DEFAULT_FILTER)
    }
}

impl HelmSettings {
    /// 1 to `max_concurrent`.
    pub fn max_per_member(&self) -> usize {
        let all_except_one = (self.max_concurrent - 1).max(1);
        self.max_per_member.unwrap_or(all_except_one)
    }
}

impl Discovery {
    /// Returns the namespace of Secrets that are named without one: the discovery namespace if it is the only one,
    /// otherwise the hub's namespace.
    pub fn namespace_of_secrets(&self, hub: &str) -> String {
        match self.namespaces.as_ref().map(|all| (all.len(), all.first())) {
            Some((1, Some(only))) => only.clone(),
            _ => hub.to_owned(),
        }
    }

    /// Returns the namespaces in which every KryptonDeployment may name a Secret.
    pub fn open_namespaces(&self, hub: &str) -> BTreeSet<String> {
        [hub.to_owned(), self.namespace_of_secrets(hub)].into()
    }
}

#[cfg(test)]
mod refusal_tests;
#[cfg(test)]
mod tests;
