//! The command line of the hub: what may be given, not yet what it means.
//!
//! Every value is kept as text: `Settings::resolve` gives flags and variables one meaning and one
//! kind of error. Defaults and variables are in `table`.

use std::collections::BTreeSet;
use std::ffi::OsString;

use clap::error::ErrorKind;
use clap::{CommandFactory, FromArgMatches, Parser};

use super::table;

/// Keeps one Helm chart at one version installed for every Tenant on every cluster of a fleet.
///
/// Flags may be written with one dash or with two. A variable beats its flag, except for
/// --namespace and --kubeconfig. docs/reference/flags.md lists them all, with the variables that have no flag.
#[derive(Clone, Debug, Default, Parser)]
#[command(
    name = "krypton-hub",
    version,
    args_override_self = true,
    max_term_width = 100
)]
pub struct Flags {
    /// Namespace of the hub: kubeconfig Secrets are discovered here.
    #[arg(long, value_name = "NAMESPACE", help_heading = "Home cluster")]
    pub namespace: Option<String>,
    /// Namespaces whose Tenants on home are followed, separated by commas; empty or * means all.
    #[arg(long, value_name = "LIST", help_heading = "Home cluster")]
    pub watch_namespaces: Option<String>,
    /// Kubeconfig file of the hub's own cluster.
    #[arg(long, value_name = "FILE", help_heading = "Home cluster")]
    pub kubeconfig: Option<String>,
    /// Kubeconfig file of the home cluster, when the hub runs elsewhere.
    #[arg(long, value_name = "FILE", help_heading = "Home cluster")]
    pub watch_kubeconfig: Option<String>,
    /// Context of the home kubeconfig; its current-context when empty.
    #[arg(long, value_name = "CONTEXT", help_heading = "Home cluster")]
    pub watch_context: Option<String>,
    /// Secret on the hub's own cluster that holds the kubeconfig of the home cluster.
    #[arg(long, value_name = "NAME", help_heading = "Home cluster")]
    pub watch_kubeconfig_secret: Option<String>,
    /// Namespace of that Secret.
    #[arg(long, value_name = "NAMESPACE", help_heading = "Home cluster")]
    pub watch_kubeconfig_secret_namespace: Option<String>,
    /// Key of that Secret.
    #[arg(long, value_name = "KEY", help_heading = "Home cluster")]
    pub watch_kubeconfig_secret_key: Option<String>,
    /// Install or bring up to date the CustomResourceDefinitions on the home cluster.
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", help_heading = "Home cluster")]
    pub ensure_watch_crds: Option<String>,

    /// Where members are looked for, separated by commas: kubeconfig (labelled Secrets), cluster-profile, cluster-api, kamaji, file.
    #[arg(long, value_name = "LIST", help_heading = "Members")]
    pub providers: Option<String>,
    /// Namespaces in which labelled kubeconfig Secrets are looked for, separated by commas; * means all.
    #[arg(long, value_name = "LIST", help_heading = "Members")]
    pub kubeconfig_namespaces: Option<String>,
    /// Namespaces in which ClusterProfiles, Cluster API clusters and Kamaji control planes are looked for, separated by commas; * means all.
    #[arg(long, value_name = "LIST", help_heading = "Members")]
    pub cluster_namespaces: Option<String>,
    /// Namespaces, besides the hub's own, whose sources make members immediately, separated by commas; * means all. Other members wait until an operator accepts them.
    #[arg(long, value_name = "LIST", help_heading = "Members")]
    pub accept_namespaces: Option<String>,
    /// File with the access providers of ClusterProfiles (Cluster Inventory API, JSON); without it no ClusterProfile can be reached.
    #[arg(long, value_name = "FILE", help_heading = "Members")]
    pub clusterprofile_provider_file: Option<String>,
    /// Key of the kubeconfig in the Secrets of Kamaji: admin.conf, or admin.svc where the hub runs beside the control planes.
    #[arg(long, value_name = "KEY", help_heading = "Members")]
    pub kamaji_kubeconfig_key: Option<String>,
    /// Kubeconfig files, and directories of them, of the provider file, separated by commas. A file is one cluster: its current context.
    #[arg(long, value_name = "LIST", help_heading = "Members")]
    pub kubeconfig_paths: Option<String>,
    /// Label key of kubeconfig Secrets; its value must be "true".
    #[arg(long, value_name = "LABEL", help_heading = "Members")]
    pub kubeconfig_label: Option<String>,
    /// Key of the kubeconfig in those Secrets.
    #[arg(long, value_name = "KEY", help_heading = "Members")]
    pub kubeconfig_key: Option<String>,
    /// Whether the home cluster is a member itself.
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", help_heading = "Members")]
    pub self_cluster: Option<String>,
    /// Accept kubeconfigs in Secrets that run a program (exec).
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", help_heading = "Members")]
    pub insecure_kubeconfig_exec: Option<String>,
    /// Accept kubeconfigs in Secrets that use an auth-provider.
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", help_heading = "Members")]
    pub insecure_kubeconfig_auth_provider: Option<String>,
    /// Accept kubeconfigs in Secrets that read their token from a file of the hub (tokenFile).
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", help_heading = "Members")]
    pub insecure_kubeconfig_token_file: Option<String>,
    /// Accept kubeconfigs in Secrets that name certificate or key files of the hub.
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", help_heading = "Members")]
    pub insecure_kubeconfig_files: Option<String>,
    /// Accept kubeconfigs in Secrets that switch off TLS verification (insecure-skip-tls-verify).
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", help_heading = "Members")]
    pub insecure_kubeconfig_tls: Option<String>,
    /// Accept kubeconfigs in Secrets whose server or proxy is on the hub's own machine (loopback).
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", help_heading = "Members")]
    pub insecure_kubeconfig_loopback: Option<String>,
    /// Accept kubeconfigs in Secrets whose server or proxy has a link-local, metadata, multicast or broadcast address.
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", help_heading = "Members")]
    pub insecure_kubeconfig_link_local: Option<String>,
    /// Accept kubeconfigs in Secrets that name a proxy (proxy-url).
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", help_heading = "Members")]
    pub insecure_kubeconfig_proxy: Option<String>,

    /// Address of the port that agents connect to; :PORT means all addresses, 0 switches it off.
    #[arg(long, value_name = "ADDRESS", help_heading = "Agents")]
    pub listen: Option<String>,
    /// HOST:PORT by which agents reach that port, separated by commas; may be repeated. Without one, kubectl krypton join needs --address.
    #[arg(long, value_name = "LIST", help_heading = "Agents")]
    pub advertise: Vec<String>,
    /// How long a member's agent must have been away before the hub acts there itself.
    #[arg(long, value_name = "DURATION", help_heading = "Agents")]
    pub proxy_grace: Option<String>,

    /// URL of the chart repository: https, http or oci; empty when --chart-name is the path of a .tgz or a whole oci URL.
    #[arg(long, value_name = "URL", help_heading = "Chart")]
    pub chart_repo: Option<String>,
    /// Name of the chart, the path of a .tgz, or a whole oci URL.
    #[arg(long, value_name = "NAME", help_heading = "Chart")]
    pub chart_name: Option<String>,
    /// Version of the chart: exact, as 1.2.3 or 1.2.3@sha256:DIGEST, or a range as ^1.2, which is looked up once for all members; empty means the newest stable one, looked up in the same way.
    #[arg(long, value_name = "VERSION", help_heading = "Chart")]
    pub chart_version: Option<String>,
    /// Add the value installCRDs: true.
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", help_heading = "Chart")]
    pub chart_install_crds: Option<String>,
    /// YAML file with values for the chart; an edit reaches every member without a restart.
    #[arg(long, value_name = "FILE", help_heading = "Chart")]
    pub chart_values_file: Option<String>,
    /// ConfigMaps and Secrets in the hub's namespace with values for the chart, separated by commas, as configmap/NAME or secret/NAME/KEY; key values.yaml where none is named, and with ? at the end it may be missing; may be repeated. Each is over the one before, and all are over the file; a change reaches every member.
    #[arg(long, value_name = "LIST", help_heading = "Chart")]
    pub chart_values_from: Vec<String>,
    /// Let a Tenant have values of its own (spec.values) over all others. Without it, a Tenant that has any is not changed.
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", help_heading = "Chart")]
    pub tenant_values: Option<String>,
    /// Place a Tenant of home whose clusterRef names another member on that member, and delete it there with the one at home. Without it, such a Tenant is made on the member by somebody else, and is only shown at home.
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", help_heading = "Chart")]
    pub place_tenants: Option<String>,
    /// Keep Tenants and KryptonDeployments to their own namespace and those made for them, open Secrets to them by label alone, and hand nothing over by their own annotations.
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", help_heading = "Tenants")]
    pub no_cross_namespace_refs: Option<String>,
    /// Service account that Helm acts as for an object that names none, in the object's namespace. Krypton must have the right to impersonate it on each cluster.
    #[arg(long, value_name = "NAME", help_heading = "Tenants")]
    pub default_service_account: Option<String>,
    /// What becomes of the CRDs in the chart's folder crds: skip, create (with the first installation, as helm does it) or create-replace (and brought up to date before each upgrade). None is ever deleted.
    #[arg(long, value_name = "POLICY", help_heading = "Chart")]
    pub chart_crds: Option<String>,
    /// What makes a release ready once helm has deployed it: none, hooks (helm waits for them; what its workloads lack is said) or ready (its workloads are).
    #[arg(long, value_name = "WHAT", help_heading = "Chart")]
    pub wait: Option<String>,
    /// Delete the six CRDs of cert-manager with the last release of a member, if that release has made them and nothing of their kinds is left.
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", help_heading = "Chart")]
    pub delete_cert_manager_crds: Option<String>,
    /// Labels of the namespaces that are made for workspaces, as KEY=VALUE, separated by commas; may be repeated. They are kept on those that Krypton has made, and taken off when they are no longer given; an EdgeCluster may have others over them (spec.namespaceConfiguration).
    #[arg(long, value_name = "LIST", help_heading = "Chart")]
    pub workspace_labels: Vec<String>,
    /// Annotations of those namespaces, in the same way; a comma or backslash in a value has a backslash before it.
    #[arg(long, value_name = "LIST", help_heading = "Chart")]
    pub workspace_annotations: Vec<String>,
    /// What is done where a release is no longer as its chart has it: off, warn (told on the Tenant) or heal (put right). A Tenant may have another by annotation mesh.openkcm.io/drift.
    #[arg(long, value_name = "MODE", help_heading = "Chart")]
    pub drift: Option<String>,
    /// How long after a look at a release for drift the next one comes, give or take a fifth.
    #[arg(long, value_name = "DURATION", help_heading = "Chart")]
    pub drift_interval: Option<String>,
    /// Secret in the hub's namespace with what the repository asks for: username and password, token, tls.crt and tls.key, ca.crt, .dockerconfigjson. Only the hub has it; agents get such charts from the hub.
    #[arg(long, value_name = "NAME", help_heading = "Chart")]
    pub chart_credentials_secret: Option<String>,
    /// File with the public keys of which one must have signed the chart, as 'gpg --export' writes it. With it the chart's provenance file is checked with helm verify, and members take that content only.
    #[arg(long, value_name = "PATH", help_heading = "Chart")]
    pub chart_keyring: Option<String>,
    /// How often a range in --chart-version is looked up again, from 1m to 24h; 0 means when repository, name or range are changed only.
    #[arg(long, value_name = "DURATION", help_heading = "Chart")]
    pub chart_resolve_interval: Option<String>,
    /// Speak plain HTTP to an OCI registry, and send credentials over it; without it that is done on the hub's own machine only.
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", help_heading = "Chart")]
    pub insecure_chart_http: Option<String>,

    /// The helm program, version 4.2.4 or newer: a path, or a name looked up in PATH.
    #[arg(long, value_name = "PROGRAM", help_heading = "Helm")]
    pub helm: Option<String>,
    /// Service account that helm acts as on the home cluster; the hub must have the right to impersonate it.
    #[arg(long, value_name = "[NAMESPACE/]NAME", help_heading = "Helm")]
    pub helm_service_account: Option<String>,
    /// How long one install, upgrade or uninstall may wait for its hooks.
    #[arg(long, value_name = "DURATION", help_heading = "Helm")]
    pub helm_timeout: Option<String>,
    /// How many helm processes may run at once, 1 to 64.
    #[arg(long, value_name = "N", help_heading = "Helm")]
    pub max_concurrent_helm: Option<String>,
    /// How many of them may be of one member that the hub looks after itself; empty means all but one, so that a member whose runs hang leaves room for others.
    #[arg(long, value_name = "N", help_heading = "Helm")]
    pub max_concurrent_helm_per_member: Option<String>,
    /// Longest pause between two tries of a failed install or upgrade.
    #[arg(long, value_name = "DURATION", help_heading = "Helm")]
    pub retry_max: Option<String>,
    /// How often a failed install or upgrade is tried again before it is given up; without end when not given.
    #[arg(long, value_name = "N", help_heading = "Helm")]
    pub retries: Option<String>,
    /// What is done about an upgrade that is given up: keep, or rollback to the last good revision, which
    /// is also done at once where no other attempt can succeed.
    #[arg(long, value_name = "WHAT", help_heading = "Helm")]
    pub remediation: Option<String>,
    /// How many revisions of a release are kept, 2 to 100.
    #[arg(long, value_name = "N", help_heading = "Helm")]
    pub history_max: Option<String>,
    /// Directory for fetched charts and helm's own cache.
    #[arg(long, value_name = "DIRECTORY", help_heading = "Helm")]
    pub helm_cache_dir: Option<String>,
    /// Directory for kubeconfigs and values while Helm runs, best in memory.
    #[arg(long, value_name = "DIRECTORY", help_heading = "Helm")]
    pub private_dir: Option<String>,

    /// Address of the metrics endpoint; :PORT means all addresses, 0 switches it off.
    #[arg(long, value_name = "ADDRESS", help_heading = "Process")]
    pub metrics_bind_address: Option<String>,
    /// Address of /healthz and /readyz; :PORT means all addresses, 0 switches it off.
    #[arg(long, value_name = "ADDRESS", help_heading = "Process")]
    pub health_probe_bind_address: Option<String>,
    /// Address of /debug, which has no password: a loopback address, or 0 to switch it off.
    #[arg(long, value_name = "ADDRESS", help_heading = "Process")]
    pub debug_bind_address: Option<String>,
    /// Format of the log: text or json.
    #[arg(long, value_name = "FORMAT", help_heading = "Process")]
    pub log_format: Option<String>,
    /// Collector that takes traces by OTLP over gRPC, as http://otel-collector:4317. Without one no traces are made.
    #[arg(long, value_name = "URL", help_heading = "Process")]
    pub otlp_endpoint: Option<String>,
    /// How long the Lease of the hub that leads is good without a renewal, 5s to 60s; all its other times are parts of it. Longer where home's apiserver is slow: a fifth of it is the deadline of each call.
    #[arg(long, value_name = "DURATION", help_heading = "Process")]
    pub leader_lease_duration: Option<String>,
    /// No effect: of several hubs one leads in any case. Accepted because the original's manifest passes it.
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", help_heading = "Process")]
    pub leader_elect: Option<String>,
    /// No effect: members are watched, or listed anew every 8 s at most. Accepted as the Knative operator's.
    #[arg(long, value_name = "DURATION", help_heading = "Process")]
    pub remote_deployments_poll_interval: Option<String>,

    /// Log level: debug, info, warn, error, panic (as error), or a verbosity: 1 is debug, 2 and more is trace.
    #[arg(long, value_name = "LEVEL", help_heading = "Zap (of the original)")]
    pub zap_log_level: Option<String>,
    /// json is --log-format json, console is --log-format text; --log-format wins.
    #[arg(long, value_name = "ENCODER", help_heading = "Zap (of the original)")]
    pub zap_encoder: Option<String>,
    /// No effect.
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", help_heading = "Zap (of the original)")]
    pub zap_devel: Option<String>,
    /// No effect.
    #[arg(long, value_name = "LEVEL", help_heading = "Zap (of the original)")]
    pub zap_stacktrace_level: Option<String>,
    /// No effect.
    #[arg(long, value_name = "ENCODING", help_heading = "Zap (of the original)")]
    pub zap_time_encoding: Option<String>,
}

impl Flags {
    /// Reads a whole command line, the program's name first. The error prints itself, and its
    /// `exit()` ends the process with 2 (0 for `--help` and `--version`).
    pub fn read(args: impl IntoIterator<Item = OsString>) -> Result<Self, clap::Error> {
        let args: Vec<OsString> = args.into_iter().collect();
        Self::read_exactly(normalise_args(args.clone())).map_err(|error| {
            if error.kind() != ErrorKind::UnknownArgument {
                return error;
            }
            // `-chart-nam=x` is to be answered with --chart-name, not with "unexpected '-c'".
            let guessed = args.into_iter().map(|arg| {
                if is_go_style(&arg) {
                    with_dash(&arg)
                } else {
                    arg
                }
            });
            Self::read_exactly(guessed.collect()).err().unwrap_or(error)
        })
    }

    fn read_exactly(args: Vec<OsString>) -> Result<Self, clap::Error> {
        let mut matches = command().try_get_matches_from(args)?;
        Self::from_arg_matches_mut(&mut matches)
    }
}

/// The command with defaults and variables added to the help of each flag.
pub fn command() -> clap::Command {
    Flags::command().mut_args(|arg| {
        let Some(row) = arg.get_long().and_then(table::row_of) else {
            return arg;
        };
        let help = arg.get_help().map(ToString::to_string).unwrap_or_default();
        let mut notes = Vec::new();
        if !row.default.is_empty() || !row.default_note.is_empty() {
            let note = if row.default.is_empty() {
                row.default_note
            } else {
                row.default
            };
            notes.push(format!("[default: {}]", note.replace('`', "")));
        }
        if !row.env.is_empty() {
            notes.push(format!("[env: {}]", row.env.join(", ")));
        }
        if notes.is_empty() {
            arg
        } else {
            arg.help(format!("{help} {}", notes.join(" ")))
        }
    })
}

/// Gives Go's `-namespace x` and `-zap-devel` a second dash. Only known long names are touched;
/// values, short flags and all that follows `--` stay as they are.
pub fn normalise_args(args: Vec<OsString>) -> Vec<OsString> {
    let command = Flags::command();
    let mut known = BTreeSet::from(["help".to_owned(), "version".to_owned()]);
    let mut takes_value = BTreeSet::new();
    for arg in command.get_arguments() {
        let Some(long) = arg.get_long() else { continue };
        known.insert(long.to_owned());
        if !arg.is_require_equals_set() {
            takes_value.insert(long.to_owned());
        }
    }

    let mut is_value = true; // the program's name
    let mut only_values = false;
    let mut normalised = Vec::with_capacity(args.len());
    for arg in args {
        if is_value || only_values {
            is_value = false;
            normalised.push(arg);
            continue;
        }
        let (name, has_value) = long_name(&arg);
        is_value = !has_value && name.is_some_and(|name| takes_value.contains(name));
        only_values = arg == "--";
        let add_dash = is_go_style(&arg) && name.is_some_and(|name| known.contains(name));
        normalised.push(if add_dash { with_dash(&arg) } else { arg });
    }
    normalised
}

/// The name in `-name`, `--name`, `-name=value`, and whether a value is there.
fn long_name(arg: &OsString) -> (Option<&str>, bool) {
    let Some(text) = arg.to_str() else {
        return (None, false);
    };
    let Some(rest) = text.strip_prefix("--").or_else(|| text.strip_prefix('-')) else {
        return (None, false);
    };
    match rest.split_once('=') {
        Some((name, _)) => (Some(name), true),
        None => (Some(rest), false),
    }
}

/// One dash and a name of more than one letter.
fn is_go_style(arg: &OsString) -> bool {
    arg.to_str()
        .and_then(|text| text.strip_prefix('-'))
        .is_some_and(|name| !name.starts_with('-') && name.chars().nth(1).is_some_and(|c| c != '='))
}

fn with_dash(arg: &OsString) -> OsString {
    let mut dashed = OsString::from("-");
    dashed.push(arg);
    dashed
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(args: &[&str]) -> Result<Flags, clap::Error> {
        Flags::read(
            std::iter::once("krypton-hub")
                .chain(args.iter().copied())
                .map(OsString::from),
        )
    }

    fn normalised(args: &[&str]) -> Vec<String> {
        let all = std::iter::once("krypton-hub").chain(args.iter().copied());
        normalise_args(all.map(OsString::from).collect())
            .into_iter()
            .skip(1)
            .map(|arg| arg.into_string().unwrap())
            .collect()
    }

    #[test]
    fn the_command_is_well_formed() {
        command().debug_assert();
    }

    #[test]
    fn one_dash_becomes_two_for_known_names_only() {
        let cases: &[(&[&str], &[&str])] = &[
            (&["-namespace", "x"], &["--namespace", "x"]),
            (&["-chart-repo=x"], &["--chart-repo=x"]),
            (&["-zap-devel"], &["--zap-devel"]),
            (
                &["-zap-devel=false", "-namespace=a"],
                &["--zap-devel=false", "--namespace=a"],
            ),
            (&["--namespace", "x"], &["--namespace", "x"]),
            (&["-h"], &["-h"]),
            (&["-V"], &["-V"]),
            (&["-help"], &["--help"]),
            (&["-unknown"], &["-unknown"]),
            (
                &["-watch-context", "-namespace"],
                &["--watch-context", "-namespace"],
            ),
            (
                &["-zap-devel", "-namespace", "x"],
                &["--zap-devel", "--namespace", "x"],
            ),
            (&["--", "-namespace"], &["--", "-namespace"]),
            (&["-"], &["-"]),
            (&[], &[]),
        ];
        for (given, expected) in cases {
            assert_eq!(normalised(given), *expected, "{given:?}");
        }
    }

    #[test]
    fn both_dash_styles_give_the_same_flags() {
        let one = read(&[
            "-namespace",
            "krypton",
            "-chart-version=1.2.3",
            "-chart-install-crds=false",
        ]);
        let two = read(&[
            "--namespace=krypton",
            "--chart-version",
            "1.2.3",
            "--chart-install-crds=false",
        ]);
        let (one, two) = (one.unwrap(), two.unwrap());
        assert_eq!(format!("{one:?}"), format!("{two:?}"));
        assert_eq!(one.namespace.as_deref(), Some("krypton"));
        assert_eq!(one.chart_install_crds.as_deref(), Some("false"));
    }

    #[test]
    fn bare_bool_flag_consumes_no_following_argument() {
        let flags = read(&["--self-cluster", "--namespace", "x"]).unwrap();
        assert_eq!(flags.self_cluster.as_deref(), Some("true"));
        assert_eq!(flags.namespace.as_deref(), Some("x"));
        assert!(read(&["--self-cluster", "false"]).is_err());
    }

    #[test]
    fn last_repeated_flag_wins() {
        let flags = read(&["-namespace", "a", "--namespace", "b"]).unwrap();
        assert_eq!(flags.namespace.as_deref(), Some("b"));
    }

    #[test]
    fn a_list_of_addresses_may_be_repeated() {
        let flags = read(&["-advertise=a:1,b:2", "--advertise", "c:3"]).unwrap();
        assert_eq!(flags.advertise, ["a:1,b:2", "c:3"]);
    }

    #[test]
    fn unknown_flag_is_rejected_with_nearest_name() {
        for given in ["--chart-nam=x", "-chart-nam=x"] {
            let error = read(&[given]).unwrap_err();
            assert_eq!(error.exit_code(), 2);
            let text = error.to_string();
            assert!(
                text.contains("'--chart-nam'") && text.contains("'--chart-name'"),
                "{text}"
            );
        }
    }

    #[test]
    fn help_ends_well_and_shows_defaults_and_variables() {
        let error = read(&["-help"]).unwrap_err();
        assert_eq!(error.exit_code(), 0);
        let text = error.to_string();
        assert!(text.contains("[default: 180s]"), "{text}");
        assert!(text.contains("WATCH_NAMESPACES"), "{text}");
    }
}
