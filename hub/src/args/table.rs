//! The one table of flags and variables: defaults, and where the original's generations differ.
//! `docs/reference/flags.md` is rendered from it.

use std::fmt::Write as _;

use clap::CommandFactory;
use krypton_runtime::admin::DEBUG_DEFAULT;

use super::flags::Flags;

/// One flag, or one variable that has no flag.
#[derive(Clone, Copy, Debug)]
pub struct Row {
    /// Long name without dashes; empty for a variable without a flag.
    pub flag: &'static str,
    /// Variables, the strongest first.
    pub env: &'static [&'static str],
    /// The value that takes effect when nothing is given; empty when it is computed or there is none.
    pub default: &'static str,
    /// What the default is when `default` cannot say it.
    pub default_note: &'static str,
    /// Meaning of a variable without a flag. A flag's meaning is its help text.
    pub meaning: &'static str,
    /// How the original's generations differ from this and from each other.
    pub generations: &'static str,
}

const NEW: &str = "new";

const fn flag(
    flag: &'static str,
    env: &'static [&'static str],
    default: &'static str,
    generations: &'static str,
) -> Row {
    Row {
        flag,
        env,
        default,
        default_note: "",
        meaning: "",
        generations,
    }
}

const fn computed(
    flag: &'static str,
    env: &'static [&'static str],
    default_note: &'static str,
    generations: &'static str,
) -> Row {
    Row {
        flag,
        env,
        default: "",
        default_note,
        meaning: "",
        generations,
    }
}

const fn variable(
    env: &'static [&'static str],
    default: &'static str,
    meaning: &'static str,
    generations: &'static str,
) -> Row {
    Row {
        flag: "",
        env,
        default,
        default_note: "",
        meaning,
        generations,
    }
}

/// In the order of the documentation.
pub const ROWS: &[Row] = &[
    computed(
        "namespace",
        &["WATCH_NAMESPACE", "POD_NAMESPACE"],
        "the service account's namespace file, else `default`",
        "G1–G5: default `default`, no variable. HEAD: default empty, and the service-account file beats the flag; here an explicit flag beats that file.",
    ),
    flag(
        "watch-namespaces",
        &["WATCH_NAMESPACES"],
        "*",
        "from HEAD (v0.7.0) on; empty or `*` = all, blanks are dropped",
    ),
    computed(
        "kubeconfig",
        &[],
        "`KUBECONFIG`, else in-cluster, else `$HOME/.kube/config`",
        "all generations; the flag beats `KUBECONFIG`, as in controller-runtime",
    ),
    flag(
        "watch-kubeconfig",
        &["WATCH_KUBECONFIG", "WATCH_CLUSTER_KUBECONFIG"],
        "",
        "G5: flag and variables. HEAD: variables only.",
    ),
    flag(
        "watch-context",
        &["WATCH_CONTEXT"],
        "",
        "from G5 on; HEAD ignores it when the home cluster is the local one, here it picks the context of `KUBECONFIG` too",
    ),
    flag(
        "watch-kubeconfig-secret",
        &["WATCH_KUBECONFIG_SECRET"],
        "",
        "from G5 on; it beats `WATCH_KUBECONFIG`",
    ),
    computed(
        "watch-kubeconfig-secret-namespace",
        &["WATCH_KUBECONFIG_SECRET_NAMESPACE"],
        "the value of `--namespace`",
        "from G5 on",
    ),
    flag(
        "watch-kubeconfig-secret-key",
        &["WATCH_KUBECONFIG_SECRET_KEY"],
        "kubeconfig",
        "from G5 on",
    ),
    flag(
        "ensure-watch-crds",
        &["ENSURE_WATCH_CRDS"],
        "false",
        "from G5 on; the variable can only switch on, with exactly `true`, `1` or `yes`",
    ),
    flag("providers", &["KRYPTON_PROVIDERS"], "kubeconfig", NEW),
    computed(
        "kubeconfig-namespaces",
        &["KRYPTON_KUBECONFIG_NAMESPACES"],
        "the value of `--namespace`",
        "new; always the operator's own namespace in the original",
    ),
    flag(
        "cluster-namespaces",
        &["KRYPTON_CLUSTER_NAMESPACES"],
        "*",
        NEW,
    ),
    flag("accept-namespaces", &["KRYPTON_ACCEPT_NAMESPACES"], "", NEW),
    flag(
        "clusterprofile-provider-file",
        &["KRYPTON_CLUSTERPROFILE_PROVIDER_FILE"],
        "",
        "new; as in the Knative operator",
    ),
    flag("kamaji-kubeconfig-key", &[], "admin.conf", NEW),
    flag("kubeconfig-paths", &["KRYPTON_KUBECONFIG_PATHS"], "", NEW),
    flag(
        "kubeconfig-label",
        &["KUBECONFIG_SECRET_LABEL"],
        "sigs.k8s.io/multicluster-runtime-kubeconfig",
        "G1–G5: flag, without a variable. HEAD: the variable is read and not used.",
    ),
    flag(
        "kubeconfig-key",
        &["KUBECONFIG_SECRET_KEY"],
        "kubeconfig",
        "as `--kubeconfig-label`",
    ),
    flag(
        "self-cluster",
        &[],
        "true",
        "new; in the original always on",
    ),
    flag(
        "insecure-kubeconfig-exec",
        &[],
        "false",
        "new; the original always accepted it",
    ),
    flag(
        "insecure-kubeconfig-auth-provider",
        &[],
        "false",
        "new; the original always accepted it",
    ),
    flag(
        "insecure-kubeconfig-token-file",
        &[],
        "false",
        "new; the original always accepted it",
    ),
    flag(
        "insecure-kubeconfig-files",
        &[],
        "false",
        "new; the original always accepted it",
    ),
    flag(
        "insecure-kubeconfig-tls",
        &[],
        "false",
        "new; the original always accepted it",
    ),
    flag(
        "insecure-kubeconfig-loopback",
        &[],
        "false",
        "new; the original always accepted it",
    ),
    flag(
        "insecure-kubeconfig-link-local",
        &[],
        "false",
        "new; the original always accepted it",
    ),
    flag(
        "insecure-kubeconfig-proxy",
        &[],
        "false",
        "new; the original always accepted it",
    ),
    flag("listen", &["KRYPTON_LISTEN"], "0.0.0.0:7443", NEW),
    flag("advertise", &["KRYPTON_ADVERTISE"], "", NEW),
    flag("proxy-grace", &["KRYPTON_PROXY_GRACE"], "60s", NEW),
    flag(
        "chart-repo",
        &[],
        "https://charts.jetstack.io",
        "G5: `https://ealenn.github.io/charts`",
    ),
    flag("chart-name", &[], "cert-manager", "G5: `echo-server`"),
    flag("chart-version", &[], "1.19.1", "G5: `0.5.0`"),
    flag(
        "chart-install-crds",
        &[],
        "true",
        "G1/G2: as here. HEAD: no such flag, and no CRDs.",
    ),
    flag("chart-values-file", &[], "", NEW),
    flag("chart-values-from", &["KRYPTON_CHART_VALUES_FROM"], "", NEW),
    flag(
        "tenant-values",
        &["KRYPTON_TENANT_VALUES"],
        "false",
        "new; G0 had values of single Tenants",
    ),
    flag(
        "place-tenants",
        &["KRYPTON_PLACE_TENANTS"],
        "false",
        "new; the original skipped such Tenants",
    ),
    flag(
        "no-cross-namespace-refs",
        &["KRYPTON_NO_CROSS_NAMESPACE_REFS"],
        "false",
        NEW,
    ),
    flag(
        "default-service-account",
        &["KRYPTON_DEFAULT_SERVICE_ACCOUNT"],
        "",
        NEW,
    ),
    flag(
        "chart-crds",
        &["KRYPTON_CHART_CRDS"],
        "create",
        "new; always `create` in the original",
    ),
    flag(
        "wait",
        &["KRYPTON_WAIT"],
        "ready",
        "new; helm's own `--wait` in the original",
    ),
    flag(
        "delete-cert-manager-crds",
        &[],
        "false",
        "new; the original always tried to, and named a kind that there is not",
    ),
    flag("workspace-labels", &["KRYPTON_WORKSPACE_LABELS"], "", NEW),
    flag(
        "workspace-annotations",
        &["KRYPTON_WORKSPACE_ANNOTATIONS"],
        "",
        NEW,
    ),
    flag("drift", &["KRYPTON_DRIFT"], "off", NEW),
    flag("drift-interval", &["KRYPTON_DRIFT_INTERVAL"], "10m", NEW),
    flag(
        "chart-credentials-secret",
        &["KRYPTON_CHART_CREDENTIALS_SECRET"],
        "",
        NEW,
    ),
    flag("chart-keyring", &["KRYPTON_CHART_KEYRING"], "", NEW),
    flag(
        "chart-resolve-interval",
        &["KRYPTON_CHART_RESOLVE_INTERVAL"],
        "0",
        NEW,
    ),
    flag("insecure-chart-http", &[], "false", NEW),
    flag("helm", &[], "helm", "new; the original had Helm built in"),
    flag(
        "helm-service-account",
        &["KRYPTON_HELM_SERVICE_ACCOUNT"],
        "",
        NEW,
    ),
    flag(
        "helm-timeout",
        &[],
        "180s",
        "new; 180 s and 300 s were fixed in the original",
    ),
    flag("max-concurrent-helm", &[], "4", "new; 1 in the original"),
    flag("max-concurrent-helm-per-member", &[], "", NEW),
    flag("retry-max", &[], "15m", NEW),
    flag("retries", &[], "", NEW),
    flag("remediation", &[], "keep", NEW),
    flag("history-max", &[], "3", NEW),
    computed(
        "helm-cache-dir",
        &[],
        "`krypton-hub` in `$TMPDIR`, else in `/tmp`",
        NEW,
    ),
    computed("private-dir", &[], "that of `--helm-cache-dir`", NEW),
    flag(
        "metrics-bind-address",
        &[],
        ":8080",
        "G1/G2: off. HEAD: `:8080`, fixed.",
    ),
    flag(
        "health-probe-bind-address",
        &[],
        ":8081",
        "G1/G2: off. HEAD: `:8081`, fixed.",
    ),
    flag(
        "debug-bind-address",
        &["KRYPTON_DEBUG_BIND_ADDRESS"],
        DEBUG_DEFAULT,
        NEW,
    ),
    flag("log-format", &[], "text", NEW),
    computed(
        "otlp-endpoint",
        &["OTEL_EXPORTER_OTLP_ENDPOINT"],
        "no traces",
        NEW,
    ),
    flag(
        "leader-lease-duration",
        &["KRYPTON_LEADER_LEASE_DURATION"],
        "5s",
        NEW,
    ),
    flag(
        "leader-elect",
        &[],
        "false",
        "never defined in the original, though its manifest passed it",
    ),
    computed(
        "zap-log-level",
        &[],
        "`info`; `RUST_LOG` beats this flag",
        "all generations, there default `debug`",
    ),
    computed(
        "zap-encoder",
        &[],
        "the value of `--log-format`",
        "all generations",
    ),
    flag(
        "remote-deployments-poll-interval",
        &[],
        "10s",
        "as in the Knative operator, below 1s too; members are watched, and listed anew every 8 s at most where no watch is possible",
    ),
    flag("zap-devel", &[], "", "all generations"),
    flag("zap-stacktrace-level", &[], "", "all generations"),
    flag("zap-time-encoding", &[], "", "all generations"),
    variable(
        &["ALLOW_CHART_SKIP"],
        "",
        "Exactly `true`: errors in fetching the chart alone do not make a Tenant's phase `Error`.",
        "G1/G2",
    ),
    variable(
        &["KRYPTON_CHECK_INTERVAL"],
        "60s",
        "How often what a KryptonDeployment has deployed is compared with its chart, and put right: a Go duration or whole seconds, more than 0.",
        "from G8 on; as there, a value that is wrong means 60s",
    ),
    variable(
        &["KUBECONFIG"],
        "",
        "Kubeconfig files of the hub's own cluster, separated by colons and merged.",
        "all generations",
    ),
    variable(
        &["HOME"],
        "",
        "`.kube/config` in it is the last place where a kubeconfig is looked for.",
        "all generations",
    ),
    variable(
        &["KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT"],
        "",
        "Set by Kubernetes in pods: the in-cluster configuration.",
        "all generations",
    ),
    variable(
        &["POD_NAME", "HOSTNAME"],
        "",
        "Name of this process in events (reportingInstance).",
        "G1/G2, there `host-<cluster>` when both are unset",
    ),
    variable(
        &["KRYPTON_POD_NAMESPACE", "POD_UID"],
        "",
        "With `POD_NAME`, the pod that this hub runs in: while it leads, that pod has the label `mesh.openkcm.io/leader`, by which the Service of agents chooses.",
        NEW,
    ),
    variable(
        &["RUST_LOG"],
        "info",
        "Log filter, as `info,kube=debug`.",
        NEW,
    ),
    variable(
        &["HELM_DRIVER"],
        "secret",
        "Only `secret` is accepted: the hub reads release Secrets itself.",
        "from G2 on; other drivers worked there",
    ),
    variable(
        &[
            "HELM_REPOSITORY_CONFIG",
            "HELM_REPOSITORY_CACHE",
            "HELM_REGISTRY_CONFIG",
        ],
        "",
        "No effect: helm gets private directories.",
        "all generations",
    ),
];

/// The row of a flag, by its long name.
pub fn row_of(flag: &str) -> Option<&'static Row> {
    ROWS.iter().find(|row| row.flag == flag)
}

const PREFACE: &str = "\
# Flags and variables of krypton-hub

<!-- Rendered from hub/src/args/table.rs. Write it anew with: WRITE_DOCS=1 cargo test -p krypton-hub docs_flags -->

One dash or two are the same: `-namespace x` and `--namespace=x`. A bool flag is `--flag` or `--flag=false`.

What counts, the strongest first:

1. the variable, when it is set and not empty (of several, the first named below);
2. the flag;
3. the default.

Two flags differ. `--namespace`: `WATCH_NAMESPACE`, `POD_NAMESPACE`, the flag, the service account's namespace file,
`default`. `--kubeconfig` beats `KUBECONFIG`. A variable that overrides a flag is told in the log at start.

The home cluster is, the first that is given: the Secret of `--watch-kubeconfig-secret`, the file of
`--watch-kubeconfig`, the hub's own cluster.

Durations are Go durations (`180s`, `3m`, `1h30m`). The last column tells where the generations of the original operator
differ: G1/G2 is the Tenant operator (from v0.0.6 on), G5 is v0.4.0, G8 is v0.6.0, HEAD is v0.7.0.

| Flag | Variables | Default | Meaning | Original |
| --- | --- | --- | --- | --- |
";

/// The text of `docs/reference/flags.md`.
pub fn markdown() -> String {
    let command = Flags::command();
    let mut page = PREFACE.to_owned();
    for row in ROWS {
        let help = command
            .get_arguments()
            .find(|arg| arg.get_long() == Some(row.flag))
            .and_then(|arg| arg.get_help())
            .map(ToString::to_string);
        let meaning = help.as_deref().unwrap_or(row.meaning).trim_end_matches('.');
        let default = match (row.default, row.default_note) {
            ("", note) => note.to_owned(),
            (default, _) => format!("`{default}`"),
        };
        let flag = if row.flag.is_empty() {
            String::new()
        } else {
            format!("`--{}`", row.flag)
        };
        let env: Vec<String> = row.env.iter().map(|name| format!("`{name}`")).collect();
        let cells = [
            flag,
            env.join(", "),
            default,
            format!("{meaning}."),
            row.generations.to_owned(),
        ];
        let cells = cells.map(|cell| cell.replace('|', "\\|"));
        writeln!(page, "| {} |", cells.join(" | ")).expect("a String takes every write");
    }
    page
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::path::Path;

    use super::*;

    #[test]
    fn every_flag_has_row_and_every_row_meaning() {
        let command = Flags::command();
        let flags: BTreeSet<&str> = command
            .get_arguments()
            .filter_map(clap::Arg::get_long)
            .filter(|long| !matches!(*long, "help" | "version"))
            .collect();
        let rows: BTreeSet<&str> = ROWS
            .iter()
            .map(|row| row.flag)
            .filter(|f| !f.is_empty())
            .collect();
        assert_eq!(flags, rows);
        for row in ROWS {
            assert!(!row.generations.is_empty(), "{row:?}");
            if row.flag.is_empty() {
                assert!(!row.meaning.is_empty() && !row.env.is_empty(), "{row:?}");
            } else {
                assert!(
                    row.meaning.is_empty(),
                    "the help text is the meaning: {row:?}"
                );
            }
        }
    }

    #[test]
    fn no_variable_is_in_two_rows() {
        let mut seen = BTreeSet::new();
        for name in ROWS.iter().flat_map(|row| row.env) {
            assert!(seen.insert(name), "{name}");
        }
    }

    #[test]
    fn docs_flags_page_is_current() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/reference/flags.md");
        let expected = markdown();
        if std::env::var_os("WRITE_DOCS").is_some() {
            std::fs::write(&path, &expected).unwrap();
        }
        let found = std::fs::read_to_string(&path).unwrap_or_default();
        assert!(
            found == expected,
            "docs/reference/flags.md is stale; write it with: WRITE_DOCS=1 cargo test -p krypton-hub docs_flags"
        );
    }
}
