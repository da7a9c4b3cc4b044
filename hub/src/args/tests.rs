//! The precedence and the messages of `Settings::resolve`, as tables.

use std::collections::BTreeMap;
use std::ffi::OsString;

use super::*;

pub(super) type Args = &'static [&'static str];
pub(super) type Env = &'static [(&'static str, &'static str)];

fn flags(args: &[&str]) -> Flags {
    let all = std::iter::once("krypton-hub").chain(args.iter().copied());
    Flags::read(all.map(OsString::from)).unwrap()
}

fn resolve_in(
    args: &[&str],
    env: &[(&str, &str)],
    service_account: Option<&str>,
) -> Result<Settings, SettingsError> {
    let env: BTreeMap<String, String> = env
        .iter()
        .map(|(k, v)| ((*k).to_owned(), (*v).to_owned()))
        .collect();
    let service_account = service_account.map(str::to_owned);
    Settings::resolve(flags(args), &|name| env.get(name).cloned(), service_account)
}

pub(super) fn resolve(args: &[&str], env: &[(&str, &str)]) -> Result<Settings, SettingsError> {
    resolve_in(args, env, None)
}

#[test]
fn the_namespace_has_its_own_order() {
    const WATCH: (&str, &str) = ("WATCH_NAMESPACE", "from-watch");
    const POD: (&str, &str) = ("POD_NAMESPACE", "from-pod");
    const FLAG: &str = "--namespace=from-flag";
    let cases: &[(Args, Env, Option<&str>, &str)] = &[
        (&[FLAG], &[WATCH, POD], Some("from-file"), "from-watch"),
        (&[FLAG], &[POD], Some("from-file"), "from-pod"),
        (&[FLAG], &[], Some("from-file"), "from-flag"),
        (&["--namespace="], &[], Some("from-file\n"), "from-file"),
        (&[], &[], Some("from-file"), "from-file"),
        (&[], &[("WATCH_NAMESPACE", "")], Some(" "), "default"),
        (&[], &[], None, "default"),
    ];
    for (args, env, file, expected) in cases {
        let settings = resolve_in(args, env, *file).unwrap();
        assert_eq!(settings.namespace, *expected, "{args:?} {env:?} {file:?}");
    }
}

#[test]
fn without_anything_the_defaults_of_the_original_hold() {
    let settings = resolve(&[], &[]).unwrap();
    assert_eq!(
        settings.chart,
        ChartSettings {
            repo: "https://charts.jetstack.io".to_owned(),
            name: "cert-manager".to_owned(),
            version: "1.19.1".to_owned(),
            install_crds: true,
            credentials_secret: None,
            keyring: None,
            plain_http: false,
            resolve_every: None,
        }
    );
    assert_eq!(
        settings.discovery.label,
        "sigs.k8s.io/multicluster-runtime-kubeconfig"
    );
    assert_eq!(settings.discovery.key, "kubeconfig");
    assert_eq!(settings.watch_namespaces, None);
    assert_eq!(settings.home.choice, HomeChoice::Local);
    assert_eq!(settings.check_interval, Duration::from_secs(60));
    assert!(
        !settings.handling.allow_chart_skip && !settings.ensure_watch_crds && settings.self_cluster
    );
    assert_eq!(
        settings.metrics_bind_address.as_ref().unwrap().to_string(),
        ":8080"
    );
    assert_eq!(
        settings
            .health_probe_bind_address
            .as_ref()
            .unwrap()
            .to_string(),
        ":8081"
    );
    assert_eq!(
        settings.listen.as_ref().unwrap().to_string(),
        "0.0.0.0:7443"
    );
    assert_eq!(settings.advertise, Vec::<String>::new());
    assert_eq!(settings.proxy_grace, Duration::from_secs(60));
    assert_eq!(settings.helm.timeout, Duration::from_secs(180));
    assert_eq!(settings.helm.max_concurrent, 4);
    assert_eq!(settings.helm.max_per_member, 3);
    assert_eq!(settings.helm.history_max, 3);
    assert_eq!(settings.helm.cache_dir, PathBuf::from("/tmp/krypton-hub"));
    assert_eq!(settings.retry_max, Duration::from_secs(900));
    assert_eq!(settings.log_format, LogFormat::Text);
    assert_eq!((settings.log_level, settings.log_filter()), (None, "info"));
    assert_eq!(settings.reporting_instance, None);
    let policy = settings.kubeconfig_policy;
    assert!(!policy.allow_exec && !policy.allow_auth_provider && !policy.allow_token_file);
    assert!(!policy.allow_files && !policy.allow_insecure_tls);
    assert!(!policy.allow_loopback && !policy.allow_link_local && !policy.allow_proxy);
    assert_eq!(settings.notes, Vec::<String>::new());
}

#[test]
fn giving_every_documented_default_changes_nothing() {
    let args: Vec<String> = table::ROWS
        .iter()
        .filter(|row| !row.flag.is_empty() && !row.default.is_empty())
        .map(|row| format!("--{}={}", row.flag, row.default))
        .collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let given = resolve(&args, &[]).unwrap();
    assert_eq!(
        format!("{given:?}"),
        format!("{:?}", resolve(&[], &[]).unwrap())
    );
}

#[test]
fn a_variable_beats_its_flag_and_says_so() {
    type Read = fn(&Settings) -> String;
    let cases: &[(&str, &str, &str, Read)] = &[
        ("watch-namespaces", "WATCH_NAMESPACES", "b", |s| {
            format!("{:?}", s.watch_namespaces)
        }),
        ("watch-context", "WATCH_CONTEXT", "b", |s| {
            format!("{:?}", s.home.context)
        }),
        ("watch-kubeconfig", "WATCH_KUBECONFIG", "b", |s| {
            format!("{:?}", s.home.choice)
        }),
        ("watch-kubeconfig", "WATCH_CLUSTER_KUBECONFIG", "b", |s| {
            format!("{:?}", s.home.choice)
        }),
        (
            "watch-kubeconfig-secret",
            "WATCH_KUBECONFIG_SECRET",
            "b",
            |s| format!("{:?}", s.home.choice),
        ),
        ("kubeconfig-label", "KUBECONFIG_SECRET_LABEL", "b", |s| {
            s.discovery.label.clone()
        }),
        ("kubeconfig-key", "KUBECONFIG_SECRET_KEY", "b", |s| {
            s.discovery.key.clone()
        }),
    ];
    for (flag, variable, value, read) in cases {
        let arg = format!("--{flag}=a");
        let by_flag = read(&resolve(&[&arg], &[]).unwrap());
        assert!(
            by_flag.contains('a') && !by_flag.contains("\"b\""),
            "{flag}: {by_flag}"
        );
        let both = resolve(&[&arg], &[(variable, value)]).unwrap();
        assert!(read(&both).contains('b'), "{variable}: {}", read(&both));
        assert_eq!(
            both.notes,
            [format!("variable {variable} overrides flag --{flag}")]
        );
        let empty = resolve(&[&arg], &[(variable, "")]).unwrap();
        assert_eq!(read(&empty), by_flag, "an empty {variable} is not given");
    }
}

#[test]
fn of_two_variables_the_first_named_wins() {
    let env = [
        ("WATCH_CLUSTER_KUBECONFIG", "/b"),
        ("WATCH_KUBECONFIG", "/a"),
    ];
    let settings = resolve(&[], &env).unwrap();
    assert_eq!(settings.home.choice, HomeChoice::File(PathBuf::from("/a")));
}

#[test]
fn watched_namespaces_parse_as_list_or_all() {
    let cases: &[(&str, Option<&[&str]>)] = &[
        ("", None),
        ("*", None),
        (" * ", None),
        (" , ,", None),
        ("a", Some(&["a"])),
        (" b , a,,a ", Some(&["a", "b"])),
    ];
    for (text, expected) in cases {
        let settings = resolve(&["--watch-namespaces", text], &[]).unwrap();
        let found = settings
            .watch_namespaces
            .map(|names| names.into_iter().collect::<Vec<_>>());
        let expected = expected.map(|names| names.iter().map(|n| (*n).to_owned()).collect());
        assert_eq!(found, expected, "{text:?}");
    }
}

#[test]
fn advertised_addresses_keep_order_without_duplicates() {
    let cases: &[(Args, Env, &[&str])] = &[
        (&[], &[], &[]),
        (&["--advertise="], &[], &[]),
        (&["--advertise=b:1, a:2,,b:1"], &[], &["b:1", "a:2"]),
        (
            &["--advertise=[fd00::1]:7443", "--advertise=10.0.0.1:7443"],
            &[],
            &["[fd00::1]:7443", "10.0.0.1:7443"],
        ),
        (
            &["--advertise=a:1"],
            &[("KRYPTON_ADVERTISE", "b:1")],
            &["b:1"],
        ),
    ];
    for (args, env, expected) in cases {
        let settings = resolve(args, env).unwrap();
        assert_eq!(settings.advertise, *expected, "{args:?}");
    }
}

#[test]
fn values_come_from_objects_in_the_order_given() {
    let cases: &[(Args, Env, &[&str])] = &[
        (&[], &[], &[]),
        (
            &[
                "--chart-values-from=secret/b/k?, configmap/a",
                "--chart-values-from=configmap/c",
            ],
            &[],
            &[
                "Secret b, key k",
                "ConfigMap a, key values.yaml",
                "ConfigMap c, key values.yaml",
            ],
        ),
        (
            &["--chart-values-from=secret/b"],
            &[("KRYPTON_CHART_VALUES_FROM", "configmap/a")],
            &["ConfigMap a, key values.yaml"],
        ),
    ];
    for (args, env, expected) in cases {
        let settings = resolve(args, env).unwrap();
        let found = settings.chart_values_from.iter();
        let found: Vec<String> = found.map(|source| source.place.to_string()).collect();
        assert_eq!(found, *expected, "{args:?}");
        assert!(!settings.tenant_values && !settings.place_tenants);
    }
    assert!(resolve(&["--place-tenants"], &[]).unwrap().place_tenants);
    assert!(resolve(&["--tenant-values"], &[]).unwrap().tenant_values);
}

#[test]
fn workspace_labels_and_annotations_parse_as_pairs() {
    let map = |pairs: &[(&str, &str)]| -> std::collections::BTreeMap<String, String> {
        let pairs = pairs.iter();
        pairs
            .map(|(key, value)| ((*key).to_owned(), (*value).to_owned()))
            .collect()
    };
    assert!(resolve(&[], &[]).unwrap().namespaces.is_empty());
    let args: Args = &[
        "--workspace-labels=team=a, zone=1",
        "--workspace-labels=zone=2,empty=",
        "--workspace-annotations",
        r"example.org/note=a\, b=c\\d",
    ];
    let found = resolve(args, &[]).unwrap().namespaces;
    let labels = map(&[("team", "a"), ("zone", "2"), ("empty", "")]);
    assert_eq!(found.labels, labels);
    let annotations = map(&[("example.org/note", r"a, b=c\d")]);
    assert_eq!(found.annotations, annotations);
    let env: Env = &[
        ("KRYPTON_WORKSPACE_LABELS", "team=b"),
        ("KRYPTON_WORKSPACE_ANNOTATIONS", "note=x"),
    ];
    let found = resolve(args, env).unwrap().namespaces;
    assert_eq!(found.labels, map(&[("team", "b")]));
    assert_eq!(found.annotations, map(&[("note", "x")]));
}

#[test]
fn agent_port_can_be_disabled_but_not_shared() {
    assert_eq!(resolve(&["--listen=0"], &[]).unwrap().listen, None);
    let error = resolve(&["--listen=:8081"], &[]).unwrap_err().to_string();
    assert!(
        error.contains("--listen") && error.contains("--health-probe-bind-address"),
        "{error}"
    );
}

#[test]
fn home_cluster_prefers_secret_over_file() {
    let secret = "--watch-kubeconfig-secret=home";
    let file = "--watch-kubeconfig=/k";
    let settings = resolve(&[secret, file, "--namespace=krypton"], &[]).unwrap();
    assert_eq!(
        settings.home.choice,
        HomeChoice::Secret {
            namespace: "krypton".to_owned(),
            name: "home".to_owned(),
            key: "kubeconfig".to_owned(),
        }
    );
    assert_eq!(settings.notes.len(), 1, "{:?}", settings.notes);

    let elsewhere = resolve(
        &[secret, "--watch-kubeconfig-secret-namespace=other"],
        &[("WATCH_KUBECONFIG_SECRET_KEY", "value")],
    );
    let expected = HomeChoice::Secret {
        namespace: "other".to_owned(),
        name: "home".to_owned(),
        key: "value".to_owned(),
    };
    assert_eq!(elsewhere.unwrap().home.choice, expected);

    let settings = resolve(&[file], &[]).unwrap();
    assert_eq!(settings.home.choice, HomeChoice::File(PathBuf::from("/k")));
}

#[test]
fn the_local_configuration_keeps_all_its_places() {
    let env = [("KUBECONFIG", "/a::/b"), ("HOME", "/home/x")];
    let settings = resolve(&["-kubeconfig", "/c"], &env).unwrap();
    assert_eq!(
        settings.home.local,
        LocalSource {
            flag: Some(PathBuf::from("/c")),
            kubeconfig_variable: vec![PathBuf::from("/a"), PathBuf::from("/b")],
            user_file: Some(PathBuf::from("/home/x/.kube/config")),
        }
    );
}

#[test]
fn ensure_watch_crds_variable_only_switches_on() {
    let cases: &[(&[&str], &str, bool, usize)] = &[
        (&[], "true", true, 0),
        (&[], "1", true, 0),
        (&[], "yes", true, 0),
        (&[], "TRUE", false, 1),
        (&[], "false", false, 0),
        (&["--ensure-watch-crds"], "false", true, 0),
        (&["--ensure-watch-crds=false"], "true", true, 0),
        (&["--ensure-watch-crds=false"], "", false, 0),
    ];
    for (args, variable, expected, notes) in cases {
        let settings = resolve(args, &[("ENSURE_WATCH_CRDS", variable)]).unwrap();
        assert_eq!(
            settings.ensure_watch_crds, *expected,
            "{args:?} {variable:?}"
        );
        assert_eq!(
            settings.notes.len(),
            *notes,
            "{args:?} {variable:?} {:?}",
            settings.notes
        );
    }
}

#[test]
fn allow_chart_skip_takes_exactly_true() {
    for (text, expected, notes) in [
        ("true", true, 0),
        ("false", false, 0),
        ("", false, 0),
        ("True", false, 1),
        ("1", false, 1),
    ] {
        let settings = resolve(&[], &[("ALLOW_CHART_SKIP", text)]).unwrap();
        assert_eq!(settings.handling.allow_chart_skip, expected, "{text:?}");
        assert_eq!(settings.notes.len(), notes, "{text:?}");
    }
}

#[test]
fn the_check_interval_falls_back_to_a_minute() {
    let cases = [
        ("5s", 5),
        (" 5s ", 5),
        ("90", 90),
        ("1m30s", 90),
        ("0", 60),
        ("0s", 60),
        ("-5", 60),
        ("soon", 60),
        ("", 60),
    ];
    for (text, seconds) in cases {
        let settings = resolve(&[], &[("KRYPTON_CHECK_INTERVAL", text)]).unwrap();
        assert_eq!(
            settings.check_interval,
            Duration::from_secs(seconds),
            "{text:?}"
        );
    }
}

#[test]
fn log_settings_follow_zap_flags_unless_overridden() {
    let cases: &[(&[&str], LogFormat)] = &[
        (&["-zap-encoder=json"], LogFormat::Json),
        (&["-zap-encoder=console"], LogFormat::Text),
        (
            &["-zap-encoder=console", "--log-format=json"],
            LogFormat::Json,
        ),
        (&["-zap-encoder=json", "--log-format=text"], LogFormat::Text),
    ];
    for (args, expected) in cases {
        assert_eq!(
            resolve(args, &[]).unwrap().log_format,
            *expected,
            "{args:?}"
        );
    }
    let levels = [
        ("debug", tracing::Level::DEBUG),
        ("info", tracing::Level::INFO),
        ("error", tracing::Level::ERROR),
        ("panic", tracing::Level::ERROR),
        ("1", tracing::Level::DEBUG),
        ("4", tracing::Level::TRACE),
    ];
    for (text, expected) in levels {
        let settings = resolve(&["-zap-log-level", text], &[]).unwrap();
        assert_eq!(settings.log_level, Some(expected), "{text}");
        assert_eq!(
            settings.log_filter(),
            expected.as_str().to_ascii_lowercase()
        );
    }
}

#[test]
fn each_insecure_flag_opens_one_thing() {
    let name_of = |policy: &Policy| {
        [
            policy.allow_exec,
            policy.allow_auth_provider,
            policy.allow_token_file,
            policy.allow_files,
            policy.allow_insecure_tls,
            policy.allow_loopback,
            policy.allow_link_local,
            policy.allow_proxy,
        ]
    };
    let names = [
        "exec",
        "auth-provider",
        "token-file",
        "files",
        "tls",
        "loopback",
        "link-local",
        "proxy",
    ];
    for (position, name) in names.iter().enumerate() {
        let settings = resolve(&[&format!("--insecure-kubeconfig-{name}")], &[]).unwrap();
        let mut expected = [false; 8];
        expected[position] = true;
        assert_eq!(name_of(&settings.kubeconfig_policy), expected, "{name}");
    }
}

#[test]
fn servers_can_be_disabled_but_not_share_port() {
    let off = resolve(
        &[
            "--metrics-bind-address=0",
            "--health-probe-bind-address",
            "0",
        ],
        &[],
    )
    .unwrap();
    assert_eq!(
        (off.metrics_bind_address, off.health_probe_bind_address),
        (None, None)
    );
    let free = [
        "--metrics-bind-address=127.0.0.1:0",
        "--health-probe-bind-address=127.0.0.1:0",
    ];
    assert!(resolve(&free, &[]).is_ok());
    let error = resolve(&["--metrics-bind-address=:8081"], &[])
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("--metrics-bind-address") && error.contains(":8081"),
        "{error}"
    );
}

#[test]
fn tenant_isolation_is_off_unless_requested() {
    assert!(resolve(&[], &[]).unwrap().lockdown.is_default());
    let args = [
        "--no-cross-namespace-refs",
        "--default-service-account=installer",
    ];
    let lockdown = resolve(&args, &[]).unwrap().lockdown;
    assert!(lockdown.no_cross_namespace_refs);
    assert_eq!(lockdown.default_service_account, "installer");
    let private = resolve(&["--private-dir=/run/krypton"], &[]).unwrap();
    let expected = Some(PathBuf::from("/run/krypton"));
    assert_eq!(private.helm.private_dir, expected);
}

#[test]
fn a_local_chart_needs_no_repository() {
    let settings = resolve(&["--chart-repo=", "--chart-name=/charts/a-1.0.0.tgz"], &[]).unwrap();
    assert_eq!(settings.chart.name, "/charts/a-1.0.0.tgz");
    assert!(resolve(&["--chart-repo=", "--chart-name=a"], &[]).is_err());
    let whole = "--chart-name=oci://registry.example.org/a";
    assert!(resolve(&["--chart-repo=", whole], &[]).is_ok());
}

#[test]
fn chart_credentials_and_resolve_interval_are_configurable() {
    let settings = resolve(
        &[
            "--chart-credentials-secret=charts",
            "--chart-resolve-interval=15m",
            "--insecure-chart-http",
        ],
        &[],
    )
    .unwrap();
    assert_eq!(settings.chart.credentials_secret.as_deref(), Some("charts"));
    assert_eq!(settings.chart.resolve_every, Some(Duration::from_secs(900)));
    assert!(settings.chart.plain_http);
    let by_variables = [
        ("KRYPTON_CHART_CREDENTIALS_SECRET", "other"),
        ("KRYPTON_CHART_RESOLVE_INTERVAL", "0s"),
    ];
    let settings = resolve(&[], &by_variables).unwrap();
    assert_eq!(settings.chart.credentials_secret.as_deref(), Some("other"));
    assert_eq!(settings.chart.resolve_every, None);
}

#[test]
fn reporting_instance_is_pod_name_or_hostname() {
    let both = [("POD_NAME", "pod"), ("HOSTNAME", "host")];
    assert_eq!(
        resolve(&[], &both).unwrap().reporting_instance.as_deref(),
        Some("pod")
    );
    assert_eq!(
        resolve(&[], &both[1..])
            .unwrap()
            .reporting_instance
            .as_deref(),
        Some("host")
    );
}

#[test]
fn own_pod_is_known_only_with_all_variables() {
    let all = [
        ("POD_NAME", "hub-0"),
        ("KRYPTON_POD_NAMESPACE", "krypton"),
        ("POD_UID", "u"),
    ];
    let pod = resolve(&[], &all).unwrap().pod;
    let expected = OwnPod {
        namespace: "krypton".to_owned(),
        name: "hub-0".to_owned(),
        uid: "u".to_owned(),
    };
    assert_eq!(pod, Some(expected));
    for missing in 0..all.len() {
        let mut less = all.to_vec();
        less.remove(missing);
        assert_eq!(resolve(&[], &less).unwrap().pod, None, "{less:?}");
    }
    // Where the hub's objects are is said by other variables.
    let namespace = resolve(&["--namespace=fleet"], &all).unwrap().namespace;
    assert_eq!(namespace, "fleet");
}

#[test]
fn flags_without_effect_are_noted() {
    let settings = resolve(
        &[
            "--leader-elect",
            "-zap-devel",
            "-zap-stacktrace-level=error",
        ],
        &[],
    )
    .unwrap();
    assert_eq!(settings.notes.len(), 3, "{:?}", settings.notes);
    for (given, notes) in [("30s", 1), ("0s", 2)] {
        let flag = format!("--remote-deployments-poll-interval={given}");
        let settings = resolve(&[&flag], &[]).unwrap();
        assert_eq!(settings.notes.len(), notes, "{:?}", settings.notes);
    }
    let soon = resolve(&["--remote-deployments-poll-interval=soon"], &[]);
    assert!(soon.unwrap_err().to_string().contains("is not a duration"));
    assert!(
        resolve(&["--leader-elect=false"], &[])
            .unwrap()
            .notes
            .is_empty()
    );
}
