//! Precedence of variables, flags and defaults, and the notation of each value.

use std::path::Path;

use krypton_runtime::args::page;

use super::*;

pub(super) fn read_args(
    args: &[&str],
    env: &[&str],
    service_account: Option<&str>,
) -> Result<Settings, clap::Error> {
    let argv = ["krypton-hub"].iter().chain(args).map(OsString::from);
    let env = |name: &str| {
        let mut variables = env.iter().filter_map(|word| word.split_once('='));
        variables.find_map(|(variable, text)| (variable == name).then(|| text.to_owned()))
    };
    Settings::read(argv, &env, service_account.map(str::to_owned))
}

/// Reads flags and variables that are separated by `; `.
pub(super) fn read(words: &str) -> Result<Settings, clap::Error> {
    read_in_pod(words, None)
}

fn read_in_pod(words: &str, service_account: Option<&str>) -> Result<Settings, clap::Error> {
    let (env, args): (Vec<&str>, Vec<&str>) = words
        .split("; ")
        .filter(|word| !word.is_empty())
        .partition(|word| is_variable(word));
    read_args(&args, &env, service_account)
}

/// Returns whether the text sets a variable: `NAME=text`.
pub(super) fn is_variable(word: &str) -> bool {
    let upper = |c: char| c.is_ascii_uppercase() || c == '_';
    let name = word.split_once('=').map_or("", |(name, _)| name);
    !name.is_empty() && name.chars().all(upper)
}

/// Each case is a line: flags and variables, then the fields of the settings as Rust shows them.
fn check(cases: &str) {
    for case in cases.trim_matches('\n').lines() {
        let (words, fields) = case.split_once("| ").unwrap();
        let text = format!("{:?}", read(words.trim_end()).unwrap());
        for field in fields.split(" & ") {
            assert!(text.contains(field), "{words}: no {field} in {text}");
        }
    }
}

#[test]
fn namespace_comes_from_variable_flag_or_file() {
    let cases = [
        (
            "--namespace=flag; WATCH_NAMESPACE=watch; POD_NAMESPACE=pod",
            Some("file"),
            "watch",
        ),
        ("--namespace=flag; POD_NAMESPACE=pod", Some("file"), "pod"),
        ("--namespace=flag", Some("file"), "flag"),
        ("--namespace=", Some("file\n"), "file"),
        ("", Some("file"), "file"),
        ("WATCH_NAMESPACE=", Some(" "), "default"),
        ("", None, "default"),
    ];
    for (words, file, expected) in cases {
        let settings = read_in_pod(words, file).unwrap();
        assert_eq!(settings.namespace, expected, "{words} {file:?}");
    }
}

#[test]
fn defaults_of_the_go_operator_hold() {
    let settings = read("").unwrap();
    let expected = ChartSettings {
        repo: "https://charts.jetstack.io".to_owned(),
        name: "cert-manager".to_owned(),
        version: "1.19.1".to_owned(),
        install_crds: true,
        credentials_secret: None,
        keyring: None,
        plain_http: false,
        resolve_every: None,
    };
    assert_eq!(settings.chart, expected);
    check(
        r#"
| label: "sigs.k8s.io/multicluster-runtime-kubeconfig", key: "kubeconfig"
| watch_namespaces: None & home: HomeSource { choice: Local & check_interval: 60s
| allow_chart_skip: false & ensure_watch_crds: false & self_cluster: true
| metrics_bind_address: Some(BindAddress { host: None, port: 8080 })
| health_probe_bind_address: Some(BindAddress { host: None, port: 8081 })
| listen: Some(BindAddress { host: Some("0.0.0.0"), port: 7443 }) & advertise: [] & proxy_grace: 60s
| timeout: 180s, max_concurrent: 4, & history_max: 3, cache_dir: "/tmp/krypton-hub" & retry_max: 900s
| log_format: Text & reporting_instance: None & notes: []
"#,
    );
    assert_eq!(settings.helm.max_per_member(), 3);
    assert_eq!(settings.log_filter(), "info");
    assert_eq!(settings.kubeconfig_policy(), Policy::default());
    assert!(
        krypton_crds::is_default(&settings.lockdown())
            && settings.workspace_namespaces().is_empty()
    );
    assert_eq!(settings.handling(), Handling::default());
}

#[test]
fn giving_every_documented_default_changes_nothing() {
    let command = command();
    let args = command.get_arguments().filter_map(|arg| {
        let default = arg.get_default_values().first()?.to_str()?;
        Some(format!("--{}={default}", arg.get_long()?))
    });
    let args: Vec<String> = args.collect();
    assert!(args.len() > 40, "{args:?}");
    let settings = read(&args.join("; ")).unwrap();
    assert_eq!(format!("{settings:?}"), format!("{:?}", read("").unwrap()));
}

#[test]
fn variable_beats_its_flag_with_a_note() {
    type Field = fn(&Settings) -> String;
    let watched: Field = |settings| format!("{:?}", settings.watch_namespaces);
    let home: Field = |settings| format!("{:?}", settings.home);
    let discovery: Field = |settings| format!("{:?}", settings.discovery);
    let cases = [
        ("watch-namespaces", "WATCH_NAMESPACES", watched),
        ("watch-context", "WATCH_CONTEXT", home),
        ("watch-kubeconfig", "WATCH_KUBECONFIG", home),
        ("watch-kubeconfig", "WATCH_CLUSTER_KUBECONFIG", home),
        ("watch-kubeconfig-secret", "WATCH_KUBECONFIG_SECRET", home),
        ("kubeconfig-label", "KUBECONFIG_SECRET_LABEL", discovery),
        ("kubeconfig-key", "KUBECONFIG_SECRET_KEY", discovery),
    ];
    for (flag, variable, field) in cases {
        let by_flag = field(&read(&format!("--{flag}=a")).unwrap());
        assert!(
            by_flag.contains("\"a\"") && !by_flag.contains("\"b\""),
            "{flag}: {by_flag}"
        );
        let both = read(&format!("--{flag}=a; {variable}=b")).unwrap();
        assert!(
            field(&both).contains("\"b\""),
            "{variable}: {}",
            field(&both)
        );
        assert_eq!(
            both.notes,
            [format!("variable {variable} overrides flag --{flag}")]
        );
        let empty = read(&format!("--{flag}=a; {variable}=")).unwrap();
        assert_eq!(field(&empty), by_flag, "an empty {variable} is not given");
    }
}

#[test]
fn lists_are_parsed_and_joined() {
    check(
        r#"
WATCH_CLUSTER_KUBECONFIG=/b; WATCH_KUBECONFIG=/a | choice: File("/a")
--watch-namespaces= | watch_namespaces: None
--watch-namespaces=* | watch_namespaces: None
--watch-namespaces; * | watch_namespaces: None
--watch-namespaces= , , | watch_namespaces: None
--watch-namespaces=a | watch_namespaces: Some({"a"})
--watch-namespaces; b , a,,a | watch_namespaces: Some({"a", "b"})
--advertise= | advertise: []
--advertise=b:1, a:2,,b:1 | advertise: ["b:1", "a:2"]
-advertise=a:1,b:2; --advertise; c:3 | advertise: ["a:1", "b:2", "c:3"]
--advertise=[fd00::1]:7443; --advertise=10.0.0.1:7443 | advertise: ["[fd00::1]:7443", "10.0.0.1:7443"]
--advertise=a:1; KRYPTON_ADVERTISE=b:1 | advertise: ["b:1"]
--providers= | providers: {}
--providers=file, kamaji | providers: {TenantControlPlane, File}
--kubeconfig-paths=/a,/b | paths: ["/a", "/b"]
--member-prefix= | member_prefixes: {}
--member-prefix=kamaji=k-, file=f. | member_prefixes: {TenantControlPlane: "k-", File: "f."}
--kamaji-generator=krypton | kamaji_generator: Some("krypton")
--workspace-labels=team=a, zone=1; --workspace-labels=zone=2,empty= | workspace_labels: {"empty": "", "team": "a", "zone": "2"}
--workspace-labels=team=a; KRYPTON_WORKSPACE_LABELS=team=b | workspace_labels: {"team": "b"}
--workspace-annotations; example.org/note=a\, b=c\\d | workspace_annotations: {"example.org/note": "a, b=c\\d"}
--workspace-annotations=a=b; KRYPTON_WORKSPACE_ANNOTATIONS=note=x | workspace_annotations: {"note": "x"}
"#,
    );
}

#[test]
fn unset_namespaces_never_widen_to_all() {
    check(
        r#"
--namespace=hub; --kubeconfig-namespaces=; --accept-namespaces= | , namespaces: Some({"hub"}) & accepted_namespaces: Some({"hub"})
--namespace=hub; --kubeconfig-namespaces=,; --accept-namespaces=, | , namespaces: Some({"hub"}) & accepted_namespaces: Some({"hub"})
--namespace=hub; --kubeconfig-namespaces=a; --accept-namespaces=a | , namespaces: Some({"a"}) & accepted_namespaces: Some({"a", "hub"})
--namespace=hub; --kubeconfig-namespaces=*; --accept-namespaces=* | , namespaces: None & accepted_namespaces: None
"#,
    );
}

#[test]
fn values_come_from_objects_in_the_order_given() {
    let cases: [(&str, &[&str]); 3] = [
        ("", &[]),
        (
            "--chart-values-from=secret/b/k?, configmap/a; --chart-values-from=configmap/c",
            &[
                "Secret b, key k",
                "ConfigMap a, key values.yaml",
                "ConfigMap c, key values.yaml",
            ],
        ),
        (
            "--chart-values-from=secret/b; KRYPTON_CHART_VALUES_FROM=configmap/a",
            &["ConfigMap a, key values.yaml"],
        ),
    ];
    for (words, expected) in cases {
        let settings = read(words).unwrap();
        let sources = settings.chart_values_from.iter();
        let locations: Vec<String> = sources.map(|source| source.location.to_string()).collect();
        assert_eq!(locations, expected, "{words}");
        assert!(!settings.tenant_values && !settings.place_tenants);
    }
    assert!(read("--place-tenants").unwrap().place_tenants);
    assert!(read("--tenant-values").unwrap().tenant_values);
}

#[test]
fn home_cluster_prefers_secret_over_file() {
    check(
        r#"
--watch-kubeconfig-secret=home; --watch-kubeconfig=/k; --namespace=krypton | choice: Secret { namespace: "krypton", name: "home", key: "kubeconfig" } & notes: ["flag --watch-kubeconfig-secret is used, the watch kubeconfig file is not"]
--watch-kubeconfig-secret=home; --watch-kubeconfig-secret-namespace=other; WATCH_KUBECONFIG_SECRET_KEY=value | choice: Secret { namespace: "other", name: "home", key: "value" } & notes: []
--watch-kubeconfig-secret=home; --watch-kubeconfig-secret-key= | key: "kubeconfig" }
--watch-kubeconfig=/k | choice: File("/k")
-kubeconfig; /c; KUBECONFIG=/a::/b; HOME=/home/x | flag: Some("/c"), kubeconfig_variable: ["/a", "/b"], user_file: Some("/home/x/.kube/config")
"#,
    );
}

#[test]
fn switching_variables_only_switch_on() {
    const UNUSED: &str = "has no effect: only true, 1 or yes switch it on\"]";
    check(&format!(
        r#"
ENSURE_WATCH_CRDS=true | ensure_watch_crds: true & notes: []
ENSURE_WATCH_CRDS=1 | ensure_watch_crds: true & notes: []
ENSURE_WATCH_CRDS=yes | ensure_watch_crds: true & notes: []
ENSURE_WATCH_CRDS=TRUE | ensure_watch_crds: false & notes: ["variable ENSURE_WATCH_CRDS {UNUSED}
ENSURE_WATCH_CRDS=false | ensure_watch_crds: false & notes: []
--ensure-watch-crds; ENSURE_WATCH_CRDS=false | ensure_watch_crds: true & notes: []
--ensure-watch-crds=false; ENSURE_WATCH_CRDS=true | ensure_watch_crds: true & notes: []
--ensure-watch-crds=false; ENSURE_WATCH_CRDS= | ensure_watch_crds: false & notes: []
ALLOW_CHART_SKIP=true | allow_chart_skip: true & notes: []
ALLOW_CHART_SKIP=false | allow_chart_skip: false & notes: []
ALLOW_CHART_SKIP= | allow_chart_skip: false & notes: []
ALLOW_CHART_SKIP=True | allow_chart_skip: false & notes: ["variable ALLOW_CHART_SKIP has no effect: only true switches it on"]
ALLOW_CHART_SKIP=1 | allow_chart_skip: false & notes: ["variable ALLOW_CHART_SKIP has no effect: only true switches it on"]
"#
    ));
}

#[test]
fn invalid_check_interval_is_noted_and_replaced() {
    const UNUSED: &str =
        "check_interval: 60s & notes: [\"variable KRYPTON_CHECK_INTERVAL is neither";
    check(&format!(
        r#"
KRYPTON_CHECK_INTERVAL=5s | check_interval: 5s & notes: []
KRYPTON_CHECK_INTERVAL= 5s  | check_interval: 5s & notes: []
KRYPTON_CHECK_INTERVAL=90 | check_interval: 90s & notes: []
KRYPTON_CHECK_INTERVAL=1m30s | check_interval: 90s & notes: []
KRYPTON_CHECK_INTERVAL=0 | {UNUSED}
KRYPTON_CHECK_INTERVAL=0s | {UNUSED}
KRYPTON_CHECK_INTERVAL=-5 | {UNUSED}
KRYPTON_CHECK_INTERVAL=soon | {UNUSED}
KRYPTON_CHECK_INTERVAL= | check_interval: 60s & notes: []
"#
    ));
}

#[test]
fn log_settings_follow_zap_flags_unless_overridden() {
    check(
        "
-zap-encoder=json | log_format: Json
-zap-encoder=console | log_format: Text
-zap-encoder=console; --log-format=json | log_format: Json
-zap-encoder=json; --log-format=text | log_format: Text
-zap-encoder=json; --log-format= | log_format: Json
",
    );
    let levels = [
        ("debug", "debug"),
        ("info", "info"),
        ("warn", "warn"),
        ("error", "error"),
        ("panic", "error"),
        ("1", "debug"),
        ("4", "trace"),
    ];
    for (text, expected) in levels {
        let settings = read(&format!("-zap-log-level; {text}")).unwrap();
        assert_eq!(settings.log_filter(), expected, "{text}");
    }
}

#[test]
fn each_insecure_flag_opens_one_thing() {
    let policy = |open: fn(&mut Policy)| {
        let mut policy = Policy::default();
        open(&mut policy);
        policy
    };
    let cases = [
        ("exec", policy(|it| it.allow_exec = true)),
        ("auth-provider", policy(|it| it.allow_auth_provider = true)),
        ("token-file", policy(|it| it.allow_token_file = true)),
        ("files", policy(|it| it.allow_files = true)),
        ("tls", policy(|it| it.allow_insecure_tls = true)),
        ("loopback", policy(|it| it.allow_loopback = true)),
        ("link-local", policy(|it| it.allow_link_local = true)),
        ("proxy", policy(|it| it.allow_proxy = true)),
    ];
    for (name, expected) in cases {
        let settings = read(&format!("--insecure-kubeconfig-{name}")).unwrap();
        assert_eq!(settings.kubeconfig_policy(), expected, "{name}");
    }
}

#[test]
fn servers_can_be_disabled_but_share_no_port() {
    check("
--listen=0; --metrics-bind-address=0 | listen: None & metrics_bind_address: None
--health-probe-bind-address; 0; --debug-bind-address=0 | health_probe_bind_address: None & debug_bind_address: None
--metrics-bind-address=127.0.0.1:0; --health-probe-bind-address=127.0.0.1:0 | port: 0
--listen=; --metrics-bind-address= | port: 7443 & port: 8080
");
    for flag in ["--listen", "--metrics-bind-address"] {
        let error = read(&format!("{flag}=:8081")).unwrap_err().to_string();
        let named = [flag, "default of --health-probe-bind-address", ":8081"];
        assert!(named.iter().all(|word| error.contains(word)), "{error}");
    }
}

#[test]
fn tenant_isolation_is_off_unless_requested() {
    let settings = read("--no-cross-namespace-refs; --default-service-account=installer");
    let lockdown = settings.unwrap().lockdown();
    assert!(lockdown.no_cross_namespace_refs);
    assert_eq!(lockdown.default_service_account, "installer");
    check(r#"--private-dir=/run/krypton | private_dir: Some("/run/krypton")"#);
}

#[test]
fn policies_for_releases_are_configurable() {
    let settings = read(
        "--drift=heal; --drift-interval=1m; --wait=hooks; --delete-cert-manager-crds; ALLOW_CHART_SKIP=true; \
         --retries=3; --remediation=rollback; --history-max=10",
    );
    let settings = settings.unwrap();
    let drift = settings.drift();
    assert_eq!((drift.mode, drift.interval_seconds), (DriftMode::Heal, 60));
    let expected = Handling {
        wait: WaitPolicy::Hooks,
        delete_cert_manager_crds: true,
        allow_chart_skip: true,
        retries: Some(3),
        remediation: Remediation::Rollback,
        history_max: 10,
    };
    assert_eq!(settings.handling(), expected);
    let variables = "KRYPTON_RETRIES=0; KRYPTON_REMEDIATION=keep; KRYPTON_HISTORY_MAX=3";
    let words = format!("--retries=3; --remediation=rollback; --history-max=10; {variables}");
    let expected = Handling {
        retries: Some(0),
        ..Handling::default()
    };
    assert_eq!(read(&words).unwrap().handling(), expected);
}

#[test]
fn local_chart_needs_no_repository() {
    check(
        r#"
--chart-repo=; --chart-name=/charts/a-1.0.0.tgz | repo: "", name: "/charts/a-1.0.0.tgz"
--chart-repo=; --chart-name=oci://registry.example.org/a | repo: "", name: "oci://registry.example.org/a"
"#,
    );
    assert!(read("--chart-repo=; --chart-name=a").is_err());
}

#[test]
fn chart_credentials_and_resolve_interval_are_configurable() {
    check(
        r#"
--chart-credentials-secret=charts; --chart-resolve-interval=15m; --insecure-chart-http | credentials_secret: Some("charts") & resolve_every: Some(900s) & plain_http: true
KRYPTON_CHART_CREDENTIALS_SECRET=other; KRYPTON_CHART_RESOLVE_INTERVAL=0s | credentials_secret: Some("other") & resolve_every: None
--chart-credentials-secret= | credentials_secret: None
"#,
    );
}

#[test]
fn helm_account_and_runs_have_derived_defaults() {
    let settings = read("--namespace=hub; --helm-service-account=helm; --max-concurrent-helm=1");
    let settings = settings.unwrap();
    let account = settings.helm_account().map(|account| account.to_string());
    assert_eq!(account.as_deref(), Some("system:serviceaccount:hub:helm"));
    assert_eq!(settings.helm.max_per_member(), 1);
    check(
        r#"
TMPDIR=/run | cache_dir: "/run/krypton-hub"
TMPDIR=/run; --helm-cache-dir= | cache_dir: "/run/krypton-hub"
TMPDIR=/run; --helm-cache-dir=/c | cache_dir: "/c"
"#,
    );
}

#[test]
fn own_pod_is_known_only_with_all_variables() {
    check(
        r#"
POD_NAME=pod; HOSTNAME=host | reporting_instance: Some("pod") & pod: None
HOSTNAME=host | reporting_instance: Some("host") & pod: None
POD_NAME=hub-0; KRYPTON_POD_NAMESPACE=krypton; POD_UID=u | pod: Some(OwnPod { namespace: "krypton", name: "hub-0", uid: "u" })
POD_NAME=hub-0; KRYPTON_POD_NAMESPACE=krypton | pod: None
POD_NAME=hub-0; POD_UID=u | pod: None
KRYPTON_POD_NAMESPACE=krypton; POD_UID=u | pod: None
--namespace=fleet; POD_NAME=hub-0; KRYPTON_POD_NAMESPACE=krypton; POD_UID=u | Settings { namespace: "fleet"
"#,
    );
}

#[test]
fn flags_without_effect_are_noted() {
    check(
        r#"
--leader-elect; -zap-devel; -zap-stacktrace-level=error | notes: ["flag --leader-elect has no effect", "flag --zap-devel has no effect", "flag --zap-stacktrace-level has no effect"]
--leader-elect=false; --remote-deployments-poll-interval=10s | notes: []
--remote-deployments-poll-interval=30s | notes: ["flag --remote-deployments-poll-interval has no effect"]
--remote-deployments-poll-interval=0s | notes: ["flag --remote-deployments-poll-interval=0s is below 1s; using 10s", "flag --remote-deployments-poll-interval has no effect"]
"#,
    );
}

#[test]
fn credentials_come_from_helms_own_files() {
    check(
        r#"
HELM_REPOSITORY_CONFIG=/r; HELM_REGISTRY_CONFIG=/g | helm_credentials: Some(Repositories("/r")) & notes: []
--chart-repo=oci://example.org/a; HELM_REPOSITORY_CONFIG=/r; HELM_REGISTRY_CONFIG=/g | helm_credentials: Some(Registry("/g")) & notes: []
--chart-repo=; --chart-name=oci://example.org/a/b; HELM_REGISTRY_CONFIG=/g | helm_credentials: Some(Registry("/g"))
HELM_REGISTRY_CONFIG=/g | helm_credentials: None & notes: []
--chart-credentials-secret=charts; HELM_REPOSITORY_CONFIG=/r | helm_credentials: None & notes: ["variable HELM_REPOSITORY_CONFIG has no effect: --chart-credentials-secret is used"]
HELM_REPOSITORY_CACHE=/c | helm_credentials: None & notes: ["variable HELM_REPOSITORY_CACHE has no effect: --helm-cache-dir is used"]
"#,
    );
}

#[test]
fn command_is_well_formed() {
    let command = command();
    let mut seen = BTreeSet::new();
    for (variable, flag) in VARIABLES {
        assert!(seen.insert(variable), "{variable}");
        let mut flags = command.get_arguments().filter_map(clap::Arg::get_long);
        assert!(flags.any(|known| known == *flag), "{flag}");
    }
    command.debug_assert();
}

#[test]
fn both_dash_styles_give_the_same_settings() {
    let one = read("-namespace; krypton; -chart-version=1.2.3; -chart-install-crds=false");
    let two = read("--namespace=krypton; --chart-version; 1.2.3; --chart-install-crds=false");
    let (one, two) = (one.unwrap(), two.unwrap());
    assert_eq!(format!("{one:?}"), format!("{two:?}"));
    assert_eq!(one.namespace, "krypton");
    assert!(!one.chart.install_crds);
}

#[test]
fn bare_bool_flag_consumes_no_following_argument() {
    let settings = read("--tenant-values; --namespace; x").unwrap();
    assert!(settings.tenant_values);
    assert_eq!(settings.namespace, "x");
    assert!(read("--self-cluster; false").is_err());
}

#[test]
fn last_repeated_flag_wins() {
    let settings = read("-namespace; a; --namespace; b").unwrap();
    assert_eq!(settings.namespace, "b");
}

#[test]
fn unknown_flag_is_rejected_with_nearest_name() {
    for argument in ["--chart-nam=x", "-chart-nam=x"] {
        let error = read(argument).unwrap_err();
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
    let error = read("-help").unwrap_err();
    assert_eq!(error.exit_code(), 0);
    let text = error.to_string();
    assert!(text.contains("[default: 180s]"), "{text}");
    assert!(text.contains("WATCH_NAMESPACES"), "{text}");
}

#[test]
fn docs_flags_page_is_current() {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/reference/flags.md");
    page::check(&page, &command()).unwrap();
}
