//! Invalid values and combinations, and the messages about them.

use proptest::prelude::*;

use super::command;
use super::tests::{is_variable, read, read_args};

/// The message of a usage error.
fn refusal(words: &str) -> String {
    let error = read(words).unwrap_err();
    assert_eq!(error.exit_code(), 2);
    let text = error.to_string();
    text.strip_prefix("error: ").unwrap_or(&text).to_owned()
}

/// One case a line: flags and variables, of which the last one is refused, and a part of the message.
const REFUSED: &str = "\
--namespace=A | a namespace name
WATCH_NAMESPACE=a.b | a namespace name
--watch-namespaces=a,B | a namespace name
--watch-namespaces=a,* | a namespace name
--watch-kubeconfig-secret=ns/name | name of a Secret
--default-service-account=ns/name | the name of a service account
--chart-credentials-secret=ns/name | name of a Secret
--member-prefix=kamaji | a prefix of member names
--member-prefix=kamaji=K- | a prefix of member names
--member-prefix=kind=k- | a provider of members
--kamaji-generator=a/b | the name of a KubeconfigGenerator
--chart-values-from=configmap/a,file/b | a ConfigMap or Secret with values
--workspace-labels=team | a list of KEY=VALUE
--workspace-labels=team=a,mesh.openkcm.io/created-for=me | one that namespaces can have
--workspace-annotations=a b=c | one that namespaces can have
KRYPTON_WORKSPACE_LABELS=team=a b | one that namespaces can have
--chart-resolve-interval=10s | a duration from 1m to 24h, or 0
--helm-service-account=a/b/c | a service account
--watch-kubeconfig-secret=a; --watch-kubeconfig-secret-key=a/b | a key of a Secret
--kubeconfig-label=a b | a label key
--kubeconfig-label=example.org/a/b | a label key
--kubeconfig-label= | a label key
KUBECONFIG_SECRET_KEY=a/b | a key of a Secret
--self-cluster=maybe | a bool
--ensure-watch-crds=maybe | a bool
--leader-elect=maybe | a bool
--chart-install-crds=ja | a bool
--chart-repo=charts.example.org | the URL of a chart repository
--chart-repo=https:// | the URL of a chart repository
--chart-name= | a chart name
--helm= | a program
--helm-timeout=180 | a duration from 1s to 24h
--helm-timeout=0s | a duration from 1s to 24h
--max-concurrent-helm=2; --max-concurrent-helm-per-member=3 | a number from 1 to that of --max-concurrent-helm
--history-max=1 | a number from 2 to 100
--wait=watcher | none, ready or hooks
--chart-crds=replace | skip, create or create-replace
--drift=on | off, warn or heal
--leader-lease-duration=2s | a duration from 5s to 60s
--drift-interval=0s | a duration from 1s to 24h
--retry-max=25h | a duration from 1s to 24h
--max-concurrent-helm=0 | a number from 1 to 64
--max-concurrent-helm=65 | a number from 1 to 64
--metrics-bind-address=8080 | a listen address
--health-probe-bind-address=:http | a listen address
--listen=7443 | a listen address
--debug-bind-address=0.0.0.0:8082 | a loopback address
KRYPTON_DEBUG_BIND_ADDRESS=:8082 | a loopback address
KRYPTON_ADVERTISE=hub.example.org:7443,hub | HOST:PORT
--advertise=https://hub:7443 | HOST:PORT
--proxy-grace=60 | a duration from 1s to 24h
--log-format=xml | a log format
--otlp-endpoint=otel:4317 | the address of a collector
OTEL_EXPORTER_OTLP_ENDPOINT=http://me:pass@otel | OTEL_EXPORTER_OTLP_HEADERS
--notify-url=http://receiver.example.org | the URL of a webhook
--notify-url=https://me:pass@receiver.example.org | without user and password
KRYPTON_NOTIFY_URL=receiver.example.org | the URL of a webhook
--notify-url=https://receiver.example.org/a?token=b | set --notify-key-file
--notify-key-file=/key | set --notify-url
-zap-encoder=xml | an encoder
-zap-log-level=loud | a log level
-zap-log-level=0 | a log level
HELM_DRIVER=configmap | a supported storage driver";

#[test]
fn every_error_names_setting_class_and_remedy() {
    for case in REFUSED.lines() {
        let (words, class) = case.split_once(" | ").unwrap();
        let (name, _) = words.rsplit("; ").next().unwrap().split_once('=').unwrap();
        let origin = match is_variable(&format!("{name}=")) {
            true => format!("variable {name}: "),
            false => format!("flag --{}: ", name.trim_start_matches('-')),
        };
        let text = refusal(words);
        assert!(text.starts_with(&origin), "{text}");
        assert!(text.contains(class) && text.contains("; "), "{text}");
    }
}

#[test]
fn repository_url_password_is_not_echoed() {
    for url in [
        "user:hunter2@charts.example.org",
        "https://user:hun/ter2@charts.example.org",
    ] {
        let error = read(&format!("--chart-repo={url}")).unwrap_err();
        let error_text = format!("{error} {error:?}");
        assert!(!error_text.contains("hun"), "{error_text}");
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
        let error_text = match flag {
            "chart-name" => refusal(&format!("--chart-name={url}; --chart-repo=")),
            _ => refusal(&format!("--{flag}={url}")),
        };
        let origin = format!("flag --{flag}: ");
        assert!(error_text.starts_with(&origin), "{error_text}");
        assert!(
            error_text.contains("--chart-credentials-secret"),
            "{error_text}"
        );
        assert!(!error_text.contains("hunter2"), "{error_text}");
    }
    // A query may hold a key, which members need to get the chart.
    assert!(read("--chart-repo=https://charts.example.org/a@b?key=1").is_ok());
}

#[test]
fn long_invalid_value_is_truncated_in_error() {
    let error = read(&format!("--namespace={}", "é".repeat(5000))).unwrap_err();
    assert!(error.to_string().len() < 600);
}

proptest! {
    #[test]
    fn any_value_parses_or_error_names_flag(
        index in 0..command().get_arguments().count(),
        value in "[^\\x00]{0,40}",
    ) {
        let command = command();
        let flag = command.get_arguments().nth(index).and_then(clap::Arg::get_long).unwrap();
        let arg = format!("--{flag}={value}");
        if let Err(error) = read_args(&[&arg], &[], None) {
            prop_assert!(error.to_string().contains(flag), "{}", error);
        }
    }
}
