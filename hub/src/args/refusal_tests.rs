//! What is refused, and what the message says.

use proptest::prelude::*;

use super::table;
use super::tests::{Args, Env, resolve};

#[test]
fn every_error_names_setting_class_and_remedy() {
    let cases: &[(Args, Env, &str, &str)] = &[
        (
            &["--namespace=A"],
            &[],
            "flag --namespace",
            "a namespace name",
        ),
        (
            &[],
            &[("WATCH_NAMESPACE", "a.b")],
            "variable WATCH_NAMESPACE",
            "a namespace name",
        ),
        (
            &["--watch-namespaces=a,B"],
            &[],
            "flag --watch-namespaces",
            "a namespace name",
        ),
        (
            &["--watch-namespaces=a,*"],
            &[],
            "flag --watch-namespaces",
            "a namespace name",
        ),
        (
            &["--watch-kubeconfig-secret=ns/name"],
            &[],
            "flag --watch-kubeconfig-secret",
            "name of a Secret",
        ),
        (
            &["--default-service-account=ns/name"],
            &[],
            "flag --default-service-account",
            "the name of a service account",
        ),
        (
            &["--chart-credentials-secret=ns/name"],
            &[],
            "flag --chart-credentials-secret",
            "name of a Secret",
        ),
        (
            &["--chart-values-from=configmap/a,file/b"],
            &[],
            "flag --chart-values-from",
            "a ConfigMap or Secret with values",
        ),
        (
            &["--workspace-labels=team"],
            &[],
            "flag --workspace-labels",
            "a list of KEY=VALUE",
        ),
        (
            &["--workspace-labels=team=a,mesh.openkcm.io/created-for=me"],
            &[],
            "flag --workspace-labels",
            "one that namespaces can have",
        ),
        (
            &["--workspace-annotations=a b=c"],
            &[],
            "flag --workspace-annotations",
            "one that namespaces can have",
        ),
        (
            &[],
            &[("KRYPTON_WORKSPACE_LABELS", "team=a b")],
            "variable KRYPTON_WORKSPACE_LABELS",
            "one that namespaces can have",
        ),
        (
            &["--chart-resolve-interval=10s"],
            &[],
            "flag --chart-resolve-interval",
            "a duration from 1m to 24h, or 0",
        ),
        (
            &["--helm-service-account=a/b/c"],
            &[],
            "flag --helm-service-account",
            "a service account",
        ),
        (
            &[
                "--watch-kubeconfig-secret=a",
                "--watch-kubeconfig-secret-key=a/b",
            ],
            &[],
            "flag --watch-kubeconfig-secret-key",
            "a key of a Secret",
        ),
        (
            &["--kubeconfig-label=a b"],
            &[],
            "flag --kubeconfig-label",
            "a label key",
        ),
        (
            &["--kubeconfig-label=example.org/a/b"],
            &[],
            "flag --kubeconfig-label",
            "a label key",
        ),
        (
            &["--kubeconfig-label="],
            &[],
            "flag --kubeconfig-label",
            "a label key",
        ),
        (
            &[],
            &[("KUBECONFIG_SECRET_KEY", "a/b")],
            "variable KUBECONFIG_SECRET_KEY",
            "a key of a Secret",
        ),
        (
            &["--self-cluster=maybe"],
            &[],
            "flag --self-cluster",
            "a bool",
        ),
        (
            &["--ensure-watch-crds=maybe"],
            &[],
            "flag --ensure-watch-crds",
            "a bool",
        ),
        (
            &["--leader-elect=maybe"],
            &[],
            "flag --leader-elect",
            "a bool",
        ),
        (
            &["--chart-install-crds=ja"],
            &[],
            "flag --chart-install-crds",
            "a bool",
        ),
        (
            &["--chart-repo=charts.example.org"],
            &[],
            "flag --chart-repo",
            "the URL of a chart repository",
        ),
        (
            &["--chart-repo=https://"],
            &[],
            "flag --chart-repo",
            "the URL of a chart repository",
        ),
        (&["--chart-name="], &[], "flag --chart-name", "a chart name"),
        (&["--helm="], &[], "flag --helm", "a program"),
        (
            &["--helm-timeout=180"],
            &[],
            "flag --helm-timeout",
            "a duration from 1s to 24h",
        ),
        (
            &["--helm-timeout=0s"],
            &[],
            "flag --helm-timeout",
            "a duration from 1s to 24h",
        ),
        (
            &[
                "--max-concurrent-helm=2",
                "--max-concurrent-helm-per-member=3",
            ],
            &[],
            "flag --max-concurrent-helm-per-member",
            "a number from 1 to that of --max-concurrent-helm",
        ),
        (
            &["--history-max=1"],
            &[],
            "flag --history-max",
            "a number from 2 to 100",
        ),
        (
            &["--wait=watcher"],
            &[],
            "flag --wait",
            "none, ready or hooks",
        ),
        (
            &["--chart-crds=replace"],
            &[],
            "flag --chart-crds",
            "skip, create or create-replace",
        ),
        (&["--drift=on"], &[], "flag --drift", "off, warn or heal"),
        (
            &["--leader-lease-duration=2s"],
            &[],
            "flag --leader-lease-duration",
            "a duration from 5s to 60s",
        ),
        (
            &["--drift-interval=0s"],
            &[],
            "flag --drift-interval",
            "a duration from 1s to 24h",
        ),
        (
            &["--retry-max=25h"],
            &[],
            "flag --retry-max",
            "a duration from 1s to 24h",
        ),
        (
            &["--max-concurrent-helm=0"],
            &[],
            "flag --max-concurrent-helm",
            "a number from 1 to 64",
        ),
        (
            &["--max-concurrent-helm=65"],
            &[],
            "flag --max-concurrent-helm",
            "a number from 1 to 64",
        ),
        (
            &["--metrics-bind-address=8080"],
            &[],
            "flag --metrics-bind-address",
            "a listen address",
        ),
        (
            &["--health-probe-bind-address=:http"],
            &[],
            "flag --health-probe-bind-address",
            "a listen address",
        ),
        (&["--listen=7443"], &[], "flag --listen", "a listen address"),
        (
            &["--debug-bind-address=0.0.0.0:8082"],
            &[],
            "flag --debug-bind-address",
            "a loopback address",
        ),
        (
            &[],
            &[("KRYPTON_DEBUG_BIND_ADDRESS", ":8082")],
            "variable KRYPTON_DEBUG_BIND_ADDRESS",
            "a loopback address",
        ),
        (
            &[],
            &[("KRYPTON_ADVERTISE", "hub.example.org:7443,hub")],
            "variable KRYPTON_ADVERTISE",
            "HOST:PORT",
        ),
        (
            &["--advertise=https://hub:7443"],
            &[],
            "flag --advertise",
            "HOST:PORT",
        ),
        (
            &["--proxy-grace=60"],
            &[],
            "flag --proxy-grace",
            "a duration from 1s to 24h",
        ),
        (
            &["--log-format=xml"],
            &[],
            "flag --log-format",
            "a log format",
        ),
        (
            &["--otlp-endpoint=otel:4317"],
            &[],
            "flag --otlp-endpoint",
            "the address of a collector",
        ),
        (
            &[],
            &[("OTEL_EXPORTER_OTLP_ENDPOINT", "http://me:pass@otel")],
            "variable OTEL_EXPORTER_OTLP_ENDPOINT",
            "OTEL_EXPORTER_OTLP_HEADERS",
        ),
        (
            &["-zap-encoder=xml"],
            &[],
            "flag --zap-encoder",
            "an encoder",
        ),
        (
            &["-zap-log-level=loud"],
            &[],
            "flag --zap-log-level",
            "a log level",
        ),
        (
            &["-zap-log-level=0"],
            &[],
            "flag --zap-log-level",
            "a log level",
        ),
        (
            &[],
            &[("HELM_DRIVER", "configmap")],
            "variable HELM_DRIVER",
            "a driver",
        ),
    ];
    for (args, env, origin, class) in cases {
        let text = resolve(args, env).unwrap_err().to_string();
        assert!(text.starts_with(origin), "{text}");
        assert!(text.contains(class) && text.contains("; "), "{text}");
    }
}

#[test]
fn repository_url_password_is_not_echoed() {
    for url in [
        "user:hunter2@charts.example.org",
        "https://user:hun/ter2@charts.example.org",
    ] {
        let error = resolve(&[&format!("--chart-repo={url}")], &[]).unwrap_err();
        let said = format!("{error} {error:?}");
        assert!(!said.contains("hun"), "{said}");
    }
}

#[test]
fn chart_urls_with_userinfo_are_refused() {
    let cases = [
        ("https://user:hunter2@charts.example.org", "chart-repo"),
        ("https://hunter2@charts.example.org/a", "chart-repo"),
        ("oci://user:hunter2@charts.example.org", "chart-repo"),
        ("oci://user:hunter2@charts.example.org/a", "chart-name"),
    ];
    for (url, flag) in cases {
        let args = [format!("--{flag}={url}"), "--chart-repo=".to_owned()];
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        let args = if flag == "chart-name" {
            &args[..]
        } else {
            &args[..1]
        };
        let said = resolve(args, &[]).unwrap_err().to_string();
        let origin = format!("flag --{flag}: ");
        assert!(said.starts_with(&origin), "{said}");
        assert!(said.contains("--chart-credentials-secret"), "{said}");
        assert!(!said.contains("hunter2"), "{said}");
    }
    // A query may hold a key, which members need to get the chart.
    assert!(resolve(&["--chart-repo=https://charts.example.org/a@b?key=1"], &[]).is_ok());
}

#[test]
fn long_invalid_value_is_truncated_in_error() {
    let error = resolve(&[&format!("--namespace={}", "é".repeat(5000))], &[]).unwrap_err();
    assert!(error.to_string().len() < 600);
}

proptest! {
    #[test]
    fn any_value_parses_or_error_names_flag(
        row in 0..table::ROWS.len(),
        value in "[^\\x00]{0,40}",
    ) {
        let flag = table::ROWS[row].flag;
        prop_assume!(!flag.is_empty());
        let arg = format!("--{flag}={value}");
        if let Err(error) = resolve(&[&arg], &[]) {
            prop_assert!(error.to_string().contains(flag), "{}", error);
        }
    }
}
