use std::path::Path;

use krypton_runtime::args::page;

use super::*;

fn read(args: &[&str]) -> Result<Flags, clap::Error> {
    let argv = ["krypton-agent"].into_iter().chain(args.iter().copied());
    Flags::read(argv.map(OsString::from))
}

#[test]
fn command_is_valid_and_defaults_are_read() {
    Flags::command().debug_assert();
    let flags = read(&[]).unwrap();
    assert_eq!(flags.namespace(|_| None, None), "krypton-system");
    assert_eq!(flags.helm_timeout, Duration::from_secs(180));
    let metrics = flags.metrics_bind_address.as_ref().unwrap();
    assert_eq!(metrics.to_string(), "0.0.0.0:8080");
    assert_eq!(flags.replica(|_| None), "agent");
    assert_eq!(flags.chart_source, ChartSource::Auto);
    let from_hub = read(&["--chart-source=hub"]).unwrap();
    assert_eq!(from_hub.chart_source, ChartSource::Hub);
    let overrides = |flags: Flags| (flags.retries, flags.remediation, flags.history_max);
    assert_eq!(overrides(flags), (None, None, None));
    let set = read(&["--retries=0", "--remediation=keep", "--history-max=3"]).unwrap();
    let expected = (Some(0), Some(Remediation::Keep), Some(3));
    assert_eq!(overrides(set), expected);
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
        ("--max-concurrent-helm=65", "from 1 to 64"),
        ("--history-max=1", "from 2 to 100"),
        ("--metrics-bind-address=8080", ":8080"),
        ("--debug-bind-address=:8082", "loopback"),
        ("--debug-bind-address=10.0.0.1:8082", "loopback"),
        ("--log-format=xml", "text or json"),
        ("--chart-source=edge", "auto, direct or hub"),
    ] {
        let message = read(&[arg]).unwrap_err().to_string();
        let flag = arg.split('=').next().unwrap();
        assert!(
            message.contains(flag) && message.contains(word),
            "{arg}: {message}"
        );
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
    assert_eq!(flags.metrics_bind_address, None);
    let env = |name: &str| match name {
        "POD_NAME" => Some("krypton-agent-0".to_owned()),
        _ => Some("host".to_owned()),
    };
    assert_eq!(flags.replica(env), "krypton-agent-0");
    let flags = read(&["--replica=mine"]).unwrap();
    assert_eq!(flags.replica(env), "mine");
}

#[test]
fn invalid_collector_is_refused_without_showing_it() {
    assert!(
        read(&["--otlp-endpoint= "])
            .unwrap()
            .otlp_endpoint
            .is_none()
    );
    let error = read(&["--otlp-endpoint=http://me:hunter2@otel"]).unwrap_err();
    assert_eq!(error.exit_code(), 2);
    let text = error.to_string();
    assert!(
        text.contains("flag --otlp-endpoint: ") && !text.contains("hunter2"),
        "{text}"
    );
    assert!(text.contains("OTEL_EXPORTER_OTLP_HEADERS"), "{text}");
}

#[test]
fn unknown_and_repeated_flags_are_refused() {
    for args in [
        &["--hubb=a:1"][..],
        &["--replica=a", "--replica=b"][..],
        &["-replica=a"][..],
    ] {
        assert_eq!(read(args).unwrap_err().exit_code(), 2, "{args:?}");
    }
}

#[test]
fn docs_agent_flags_page_is_current() {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/reference/agent-flags.md");
    page::check(&page, &Flags::command()).unwrap();
}
