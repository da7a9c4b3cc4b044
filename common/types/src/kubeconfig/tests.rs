use super::*;

pub(super) mod credentials;
mod dates;
mod input;

use credentials::{ISSUED, OTHER, decoded, encoded};

const TOKEN: &str = "canary-token-5f3a";
pub(super) const EVERYTHING: Policy = Policy {
    allow_exec: true,
    allow_auth_provider: true,
    allow_token_file: true,
    allow_files: true,
    allow_insecure_tls: true,
    allow_loopback: true,
    allow_link_local: true,
    allow_proxy: true,
};

fn good() -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "Config",
        "preferences": {},
        "current-context": "admin@edge-1",
        "clusters": [{
            "name": "edge-1",
            "cluster": {
                "server": "https://edge-1.example.org:6443",
                "certificate-authority-data": ISSUED.ca,
            },
        }],
        "contexts": [{
            "name": "admin@edge-1",
            "context": { "cluster": "edge-1", "user": "admin", "namespace": "krypton" },
        }],
        "users": [{ "name": "admin", "user": { "token": TOKEN } }],
    })
}

fn parsed(document: &Value) -> Result<SanitizedKubeconfig, KubeconfigError> {
    parse(document.to_string().as_bytes(), &Policy::default())
}

/// Parses the good kubeconfig with `value` at the JSON pointer.
fn with(
    pointer: &str,
    value: Value,
    policy: Policy,
) -> Result<SanitizedKubeconfig, KubeconfigError> {
    let mut document = good();
    let (parent, key) = pointer.rsplit_once('/').unwrap();
    document.pointer_mut(parent).unwrap()[key] = value;
    parse(document.to_string().as_bytes(), &policy)
}

fn with_strict_policy(pointer: &str, value: Value) -> Result<SanitizedKubeconfig, KubeconfigError> {
    with(pointer, value, Policy::default())
}

/// Returns the error for the good kubeconfig with `value` at the JSON pointer.
fn error_for(pointer: &str, value: Value) -> String {
    with_strict_policy(pointer, value).unwrap_err().to_string()
}

fn parse_error(bytes: &[u8]) -> String {
    parse(bytes, &Policy::default()).unwrap_err().to_string()
}

/// Returns a policy that admits one field.
fn policy_with(allow: fn(&mut Policy)) -> Policy {
    let mut policy = Policy::default();
    allow(&mut policy);
    policy
}

#[test]
fn rebuilt_kubeconfig_keeps_only_used_entries() {
    let mut document = good();
    let cluster = json!({ "name": "other", "cluster": { "server": "http://plain" } });
    let context = json!({ "name": "other", "context": { "cluster": "other" } });
    let user = json!({ "name": "other", "user": { "exec": { "command": "/bin/sh" } } });
    for (list, entry) in [
        ("clusters", cluster),
        ("contexts", context),
        ("users", user),
        ("users", json!("not even a map")),
    ] {
        document[list].as_array_mut().unwrap().insert(0, entry);
    }
    document["extensions"] = json!([{ "name": "x", "extension": {} }]);
    let sanitized = parsed(&document).unwrap();
    assert_eq!(sanitized.server, "https://edge-1.example.org:6443");
    assert_eq!(sanitized.namespace.as_deref(), Some("krypton"));
    assert_eq!(
        serde_json::from_str::<Value>(&sanitized.yaml).unwrap(),
        json!({
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "member",
            "clusters": [{
                "name": "member",
                "cluster": {
                    "server": "https://edge-1.example.org:6443",
                    "certificate-authority-data": ISSUED.ca,
                },
            }],
            "contexts": [{
                "name": "member",
                "context": { "cluster": "member", "user": "member", "namespace": "krypton" },
            }],
            "users": [{ "name": "member", "user": { "token": TOKEN } }],
        })
    );
    assert_eq!(
        sanitized.digest,
        parsed(&good()).unwrap().digest,
        "what is not used changes nothing"
    );
}

#[test]
fn other_contexts_are_read_each_on_its_own() {
    let mut document = good();
    let contexts = document["contexts"].as_array_mut().unwrap();
    for (name, cluster) in [
        ("b", "edge-1"),
        ("a", "edge-1"),
        ("bad", "missing"),
        ("c", ""),
    ] {
        contexts.push(json!({ "name": name, "context": { "cluster": cluster, "user": "admin" } }));
    }
    contexts.push(json!("not even a map"));
    contexts.push(json!({ "name": "twice", "context": {} }));
    contexts.push(json!({ "name": "twice", "context": {} }));
    let read = |document: &Value, max| {
        parse_other_contexts(document.to_string().as_bytes(), &Policy::default(), max)
    };
    let others = read(&document, 9).unwrap();
    let outcomes = others
        .iter()
        .map(|(name, context)| (name.as_str(), context.is_ok()));
    assert_eq!(
        outcomes.collect::<Vec<_>>(),
        [
            ("a", true),
            ("b", true),
            ("bad", false),
            ("c", false),
            ("twice", false)
        ]
    );
    let missing = others["bad"].as_ref().unwrap_err().to_string();
    assert_eq!(missing, "cluster \"missing\" not found in clusters");
    // Without the namespace of the current context.
    let first = others["a"].as_ref().unwrap();
    assert_eq!(
        (first.namespace.as_deref(), &first.server),
        (None, &parsed(&document).unwrap().server)
    );
    assert!(read(&document, 2).unwrap().keys().eq(["a", "b"]));

    // A fault of the whole kubeconfig rejects all contexts, and a bad current context only itself.
    document["current-context"] = json!("missing");
    assert_eq!(read(&document, 9).unwrap().len(), 6);
    for (key, value) in [("current-context", Value::Null), ("surprise", json!(1))] {
        let mut document = good();
        document[key] = value;
        assert_eq!(
            read(&document, 9).unwrap_err(),
            parsed(&document).unwrap_err()
        );
    }
}

#[test]
fn rebuilt_kubeconfig_parses_to_itself() {
    let first = parsed(&good());
    let again = parse(first.as_ref().unwrap().yaml.as_bytes(), &Policy::default());
    assert_eq!(again, first);
}

#[test]
fn the_digest_follows_the_content_that_is_used() {
    let base = parsed(&good()).unwrap().digest;
    assert_eq!(base.len(), 64);
    for (pointer, value) in [
        ("/users/0/user/token", json!("another")),
        (
            "/clusters/0/cluster/server",
            json!("https://edge-2.example.org:6443"),
        ),
        ("/clusters/0/cluster/tls-server-name", json!("kubernetes")),
        ("/contexts/0/context/namespace", Value::Null),
    ] {
        assert_ne!(
            with_strict_policy(pointer, value).unwrap().digest,
            base,
            "{pointer}"
        );
    }
}

#[test]
fn debug_output_has_no_secret() {
    let shown = format!("{:?}", parsed(&good()).unwrap());
    assert!(shown.contains("edge-1.example.org"), "{shown}");
    assert!(
        !shown.contains(TOKEN) && !shown.contains(&ISSUED.ca),
        "{shown}"
    );
}

#[test]
fn dangerous_field_is_admitted_only_by_own_switch() {
    let inverted = |admitted: Policy| Policy {
        allow_exec: !admitted.allow_exec,
        allow_auth_provider: !admitted.allow_auth_provider,
        allow_token_file: !admitted.allow_token_file,
        allow_files: !admitted.allow_files,
        allow_insecure_tls: !admitted.allow_insecure_tls,
        allow_loopback: !admitted.allow_loopback,
        allow_link_local: !admitted.allow_link_local,
        allow_proxy: !admitted.allow_proxy,
    };
    let exec = policy_with(|policy| policy.allow_exec = true);
    let provider = policy_with(|policy| policy.allow_auth_provider = true);
    let run = json!({ "apiVersion": "client.authentication.k8s.io/v1", "command": "/bin/canary" });
    let gcp = json!({ "name": "gcp", "config": { "cmd-path": "/bin/canary" } });
    let oidc = json!({ "name": "oidc", "config": { "idp-issuer-url": "https://issuer" } });
    let token_file = policy_with(|policy| policy.allow_token_file = true);
    let files = policy_with(|policy| policy.allow_files = true);
    let proxy = policy_with(|policy| policy.allow_proxy = true);
    let (file, url) = (json!("/etc/shadow"), json!("http://proxy.example.org:3128"));
    let loopback = policy_with(|policy| policy.allow_loopback = true);
    let server = json!("https://[::ffff:127.0.0.1]:6443");
    let link_local = policy_with(|policy| policy.allow_link_local = true);
    let metadata = json!("https://metadata.google.internal.");
    for (pointer, value, admitted, switch) in [
        ("/users/0/user/exec", run, exec, "exec"),
        ("/users/0/user/exec", json!({}), exec, "exec"),
        (
            "/users/0/user/auth-provider",
            gcp,
            provider,
            "auth-provider",
        ),
        (
            "/users/0/user/auth-provider",
            oidc,
            provider,
            "auth-provider",
        ),
        (
            "/users/0/user/tokenFile",
            json!("/run/token"),
            token_file,
            "token-file",
        ),
        (
            "/clusters/0/cluster/certificate-authority",
            file,
            files,
            "files",
        ),
        ("/clusters/0/cluster/proxy-url", url, proxy, "proxy"),
        ("/clusters/0/cluster/server", server, loopback, "loopback"),
        (
            "/clusters/0/cluster/server",
            metadata,
            link_local,
            "link-local",
        ),
    ] {
        let path = pointer.replace("/0/", "[0].").replace('/', ".");
        let path = path.trim_start_matches('.');
        for policy in [Policy::default(), inverted(admitted)] {
            let error = with(pointer, value.clone(), policy).unwrap_err();
            assert!(
                matches!(&error, KubeconfigError::Forbidden { path: p, .. } if p == path),
                "{pointer}: {error}"
            );
            assert_eq!(error.reason(), "KubeconfigForbiddenField");
            let text = error.to_string();
            assert!(
                text.starts_with(&format!("{path} is not allowed")),
                "{text}"
            );
            assert!(
                text.ends_with(&format!("--insecure-kubeconfig-{switch}")),
                "{text}"
            );
        }
        let yaml = with(pointer, value.clone(), admitted).unwrap().yaml;
        let rebuilt: Value = serde_json::from_str(&yaml).unwrap();
        assert_eq!(rebuilt.pointer(pointer), Some(&value), "{pointer}");
    }
}

#[test]
fn exec_is_refused_and_nothing_is_run() {
    let folder = std::env::temp_dir().join(format!("krypton-exec-{}", std::process::id()));
    let exec = json!({ "apiVersion": "client.authentication.k8s.io/v1", "command": "/bin/mkdir", "args": [folder] });
    let gcp = json!({ "name": "gcp", "config": { "cmd-path": "/bin/mkdir", "cmd-args": folder } });
    for (field, value) in [("exec", exec), ("auth-provider", gcp)] {
        let error = error_for(&format!("/users/0/user/{field}"), value);
        assert!(
            error.starts_with(&format!("users[0].user.{field} is not allowed")),
            "{error}"
        );
        assert!(!folder.exists(), "{field}");
    }
}

#[test]
fn admitted_proxy_is_kept_and_validated_like_server() {
    let pointer = "/clusters/0/cluster/proxy-url";
    let admitted = policy_with(|policy| policy.allow_proxy = true);
    let sanitized = with(pointer, json!("SOCKS5://Proxy.example.org:1080"), admitted).unwrap();
    let rebuilt: Value = serde_json::from_str(&sanitized.yaml).unwrap();
    assert_eq!(
        rebuilt.pointer(pointer),
        Some(&json!("socks5://Proxy.example.org:1080"))
    );
    let proxy = Authority {
        host: "proxy.example.org".to_owned(),
        port: 1080,
    };
    assert_eq!(sanitized.first_hop(), &proxy);
    assert_eq!(sanitized.authority.host, "edge-1.example.org");
    assert_eq!(parsed(&good()).unwrap().first_hop().port, 6443);
    for (url, message) in [
        (
            "http://localhost:3128",
            "proxy-url is not allowed: it points to the hub's own machine",
        ),
        (
            "http://169.254.169.254:80",
            "proxy-url is not allowed: it points to a link-local",
        ),
        ("http://127.1:3128", "proxy-url has a number for a host"),
        (
            "http://user:pw@proxy:3128",
            "proxy-url has a user name or password",
        ),
        ("ftp://proxy:21", "proxy-url must start with http://"),
    ] {
        let error = with(pointer, json!(url), admitted).unwrap_err().to_string();
        assert!(error.contains(message), "{url}: {error}");
    }
}

#[test]
fn client_certificate_files_need_switch_and_absolute_paths() {
    for field in ["client-certificate", "client-key"] {
        let error = error_for(&format!("/users/0/user/{field}"), json!("/etc/shadow"));
        assert!(
            error.starts_with(&format!("users[0].user.{field} is not allowed")),
            "{error}"
        );
        assert!(error.contains("-data"), "{error}");
    }
    let files = policy_with(|policy| policy.allow_files = true);
    let pair = |key: &str| json!({ "client-certificate": "/c.pem", "client-key": key });
    let sanitized = with("/users/0/user", pair("/k.pem"), files).unwrap();
    assert!(sanitized.yaml.contains("/k.pem"));
    let error = with("/users/0/user", pair("k.pem"), files).unwrap_err();
    assert_eq!(
        error.to_string(),
        "users[0].user.client-key must be an absolute path"
    );
}

#[test]
fn no_switch_admits_impersonation_or_basic_authentication() {
    for (field, value) in [
        ("as", json!("system:admin")),
        ("as-uid", json!("0")),
        ("as-groups", json!(["system:masters"])),
        ("as-user-extra", json!({ "a": ["b"] })),
        ("impersonate-user", json!("system:admin")),
        ("impersonate-anything", json!("x")),
        ("username", json!("admin")),
        ("password", json!("hunter2")),
    ] {
        let pointer = format!("/users/0/user/{field}");
        for policy in [Policy::default(), EVERYTHING] {
            let error = with(&pointer, value.clone(), policy).unwrap_err();
            assert_eq!(
                error.reason(),
                "KubeconfigForbiddenField",
                "{field}: {error}"
            );
            let error = error.to_string();
            assert!(
                error.starts_with(&format!("users[0].user.{field} is not allowed")),
                "{error}"
            );
        }
    }
}

#[test]
fn skipping_tls_verification_needs_lab_switch() {
    let pointer = "/clusters/0/cluster/insecure-skip-tls-verify";
    assert_eq!(with_strict_policy(pointer, json!(false)), parsed(&good()));
    let error = with_strict_policy(pointer, json!(true)).unwrap_err();
    assert_eq!(error.reason(), "KubeconfigForbiddenField", "{error}");
    let error = error.to_string();
    assert!(error.contains("--insecure-kubeconfig-tls"), "{error}");
    for invalid in [json!("true"), json!("false"), json!(1), json!("yes")] {
        let error = error_for(pointer, invalid);
        assert!(
            error.ends_with("must be true or false, without quotes"),
            "{error}"
        );
    }
    for yaml in ["yes", "True", "on", "y"] {
        let text = format!(
            "clusters: [{{name: k, cluster: {{insecure-skip-tls-verify: {yaml}, server: \"https://h\"}}}}]\ncontexts: [{{name: c, context: {{cluster: k, user: u}}}}]\nusers: [{{name: u, user: {{token: t}}}}]\ncurrent-context: c\n"
        );
        assert!(
            parse_error(text.as_bytes()).contains("insecure-skip-tls-verify"),
            "{yaml}"
        );
    }

    let lab = policy_with(|policy| policy.allow_insecure_tls = true);
    let error = with(pointer, json!(true), lab).unwrap_err().to_string();
    assert!(
        error.contains("contradicts the certificate authority"),
        "{error}"
    );
    let mut document = good();
    document["clusters"][0]["cluster"] =
        json!({ "server": "https://h", "insecure-skip-tls-verify": true });
    let sanitized = parse(document.to_string().as_bytes(), &lab).unwrap();
    assert!(sanitized.yaml.contains("\"insecure-skip-tls-verify\":true"));
}

#[test]
fn unknown_fields_are_rejected_and_extensions_dropped() {
    for (entry, path, field) in [
        ("", "", "clusterz"),
        ("", "", "currentContext"),
        ("/clusters/0", "clusters[0].", "Cluster"),
        ("/clusters/0/cluster", "clusters[0].cluster.", "Server"),
        (
            "/clusters/0/cluster",
            "clusters[0].cluster.",
            "certificateAuthorityData",
        ),
        (
            "/contexts/0/context",
            "contexts[0].context.",
            "cluster-name",
        ),
        ("/users/0/user", "users[0].user.", "Exec"),
        ("/users/0/user", "users[0].user.", "Token"),
        ("/users/0/user", "users[0].user.", "tokenfile"),
        ("/users/0/user", "users[0].user.", "token-file"),
    ] {
        let error = with_strict_policy(&format!("{entry}/{field}"), json!("x")).unwrap_err();
        let path = format!("{path}{field}");
        assert_eq!(error, KubeconfigError::Field(FieldError::Unknown { path }));
    }
    let extension = json!([{ "name": "client.authentication.k8s.io/exec", "extension": {} }]);
    for pointer in [
        "/extensions",
        "/clusters/0/extensions",
        "/clusters/0/cluster/extensions",
        "/contexts/0/context/extensions",
        "/users/0/user/extensions",
    ] {
        assert_eq!(
            with_strict_policy(pointer, extension.clone()),
            parsed(&good()),
            "{pointer}"
        );
    }
}

#[test]
fn fields_without_effect_are_as_good_as_absent() {
    for (pointer, value) in [
        ("/users/0/user/exec", Value::Null),
        ("/users/0/user/tokenFile", json!("")),
        ("/clusters/0/cluster/proxy-url", json!("")),
        ("/clusters/0/cluster/disable-compression", json!(true)),
        ("/preferences", json!({ "colors": true })),
    ] {
        assert_eq!(
            with_strict_policy(pointer, value),
            parsed(&good()),
            "{pointer}"
        );
    }
}

#[test]
fn missing_or_dangling_reference_is_named() {
    let no_context = "failed to determine current context: current-context is missing or empty";
    let no_contexts = "context \"admin@edge-1\" not found in contexts";
    let no_user =
        "contexts[0].context.user is not set: name an entry of users; anonymous access is refused";
    let no_cluster = "contexts[0].context.cluster is not set";
    let no_credential = "users[0].user has no credential: set token, or client-certificate-data and \
        client-key-data; anonymous access is refused";
    let no_server = "clusters[0].cluster.server is not set";
    let bad_namespace = "contexts[0].context.namespace is not";
    let (cluster, user) = ("/contexts/0/context/cluster", "/contexts/0/context/user");
    for (pointer, value, message) in [
        ("/current-context", Value::Null, no_context),
        ("/current-context", json!(""), no_context),
        (
            "/current-context",
            json!("x"),
            "context \"x\" not found in contexts",
        ),
        ("/contexts", Value::Null, no_contexts),
        (cluster, json!("x"), "cluster \"x\" not found in clusters"),
        (cluster, Value::Null, no_cluster),
        (user, json!("x"), "user \"x\" not found in users"),
        (user, json!("x\ny"), "user \"x\\ny\" not found in users"),
        (user, Value::Null, no_user),
        ("/contexts/0/context", Value::Null, no_cluster),
        ("/users/0/user", Value::Null, no_credential),
        ("/users/0/user", json!({}), no_credential),
        ("/users/0/user", json!({ "token": "" }), no_credential),
        ("/clusters/0/cluster", Value::Null, no_server),
        ("/clusters", json!({}), "clusters must be a list"),
        ("/users/0/user", json!([]), "users[0].user must be a map"),
        (
            "/users/0/name",
            json!(7),
            "user \"admin\" not found in users",
        ),
        ("/kind", json!("Secret"), "kind must be Config"),
        ("/apiVersion", json!("v2"), "apiVersion must be v1"),
        ("/contexts/0/context/namespace", json!("A/b"), bad_namespace),
    ] {
        let error = with_strict_policy(pointer, value.clone()).unwrap_err();
        assert_eq!(error.reason(), "KubeconfigInvalid");
        let error = error.to_string();
        assert!(error.starts_with(message), "{pointer} {value}: {error}");
    }
}

#[test]
fn duplicate_name_is_rejected() {
    let mut document = good();
    let user = document["users"][0].clone();
    document["users"].as_array_mut().unwrap().push(user);
    let error = parsed(&document).unwrap_err();
    assert_eq!(
        error.to_string(),
        "users has the name \"admin\" more than once: keep one of them"
    );
}

#[test]
fn server_must_be_https_with_host_without_credentials() {
    let pointer = "/clusters/0/cluster/server";
    let (scheme, number) = ("must start with https://", "has a number for a host");
    for (server, message) in [
        (json!("http://10.0.0.1"), scheme),
        (json!("http://edge-1.example.org:8080"), scheme),
        (json!("unix:///var/run/apiserver.sock"), scheme),
        (
            json!("https://admin:hunter2@h"),
            "has a user name or password",
        ),
        (json!("https://h:0"), "has no valid port"),
        (json!("https://"), "has no host"),
        (json!("https://2130706433:6443"), number),
        (json!("https://0x7f.1"), number),
        (json!(6443), "must be a string"),
    ] {
        for policy in [Policy::default(), EVERYTHING] {
            let error = with(pointer, server.clone(), policy)
                .unwrap_err()
                .to_string();
            let path = "clusters[0].cluster.server";
            assert!(error.starts_with(&format!("{path} {message}")), "{error}");
            assert!(!error.contains("hunter2"), "{error}");
        }
    }
    for name in ["a b", "https://h", "-"] {
        let error = error_for("/clusters/0/cluster/tls-server-name", json!(name));
        assert!(error.contains("is not a host name"), "{name}: {error}");
    }
}

#[test]
fn unusable_certificate_key_or_token_is_rejected() {
    let encode = |text: &str| Value::String(encoded(text));
    let ca = "/clusters/0/cluster/certificate-authority-data";
    let cert = "/users/0/user/client-certificate-data";
    let key = "/users/0/user/client-key-data";
    let token = "/users/0/user/token";
    let open = "-----BEGIN CERTIFICATE-----\nMAMCAQE=\n";
    let sequence = "-----BEGIN CERTIFICATE-----\nMAMCAQE=\n-----END CERTIFICATE-----\n";
    let garbage = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n";
    let encrypted =
        "-----BEGIN ENCRYPTED PRIVATE KEY-----\nMAMCAQE=\n-----END ENCRYPTED PRIVATE KEY-----\n";
    let no_ca = "certificate-authority-data holds no PEM certificate";
    let damaged = "certificate-authority-data holds a PEM certificate that is damaged";
    let no_certificate = "client-certificate-data holds no PEM certificate";
    let no_key = "client-key-data holds no PEM private key";
    let locked = "client-key-data holds no PEM private key, or one that is enc";
    let illegal_character = "token has an invalid character";
    for (pointer, value, message) in [
        (ca, json!("%%%"), "certificate-authority-data is not base64"),
        (ca, encode("hello"), no_ca),
        (ca, json!(ISSUED.key), no_ca),
        (ca, encode(open), damaged),
        (ca, encode(garbage), damaged),
        (ca, encode(sequence), damaged),
        (
            ca,
            json!([1]),
            "certificate-authority-data must be a string",
        ),
        (
            cert,
            json!(ISSUED.certificate),
            "client-key-data is missing",
        ),
        (key, json!(ISSUED.key), "client-certificate-data is missing"),
        (cert, json!(ISSUED.key), no_certificate),
        (key, json!(ISSUED.certificate), no_key),
        (key, encode(encrypted), locked),
        (token, json!("line\nend"), illegal_character),
        (token, json!("tök"), illegal_character),
        (token, json!(123), "token must be a string"),
    ] {
        let error = error_for(pointer, value);
        assert!(error.contains(message), "{pointer}: {error}");
    }
}

fn with_client(certificate: &str, key: &str) -> Result<SanitizedKubeconfig, KubeconfigError> {
    with_strict_policy(
        "/users/0/user",
        json!({ "client-certificate-data": certificate, "client-key-data": key }),
    )
}

#[test]
fn client_certificate_and_key_must_match() {
    assert!(with_client(&ISSUED.certificate, &ISSUED.key).is_ok());
    let small_key = "-----BEGIN PRIVATE KEY-----\nMAMCAQE=\n-----END PRIVATE KEY-----\n";
    for (key, message) in [
        (
            OTHER.key.as_str(),
            "is not the key of client-certificate-data",
        ),
        (
            &encoded(small_key),
            "holds a private key that cannot be used",
        ),
    ] {
        let error = with_client(&ISSUED.certificate, key).unwrap_err();
        let shown = error.to_string();
        assert!(
            shown.starts_with(&format!("users[0].user.client-key-data {message}")),
            "{shown}"
        );
        assert_eq!(error.reason(), "KubeconfigInvalid");
    }
}

#[test]
fn authority_is_ca_or_self_signed() {
    let pointer = "/clusters/0/cluster/certificate-authority-data";
    assert!(with_strict_policy(pointer, json!(ISSUED.self_signed)).is_ok());
    let error = with_strict_policy(pointer, json!(ISSUED.certificate)).unwrap_err();
    assert!(
        error
            .to_string()
            .starts_with("clusters[0].cluster.certificate-authority-data holds no CA certificate"),
        "{error}"
    );
    // Some bundles contain the server's own certificate next to its CA, mixed with other content.
    let [own, ca] = [&ISSUED.certificate, &ISSUED.ca].map(|text| decoded(text));
    let key = decoded(&ISSUED.key);
    let sanitized = with_strict_policy(
        pointer,
        json!(encoded(&format!("a note\n{own}\n{key}{ca}"))),
    )
    .unwrap();
    let rebuilt: Value = serde_json::from_str(&sanitized.yaml).unwrap();
    assert_eq!(
        rebuilt.pointer(pointer),
        Some(&json!(encoded(&format!("{own}{ca}"))))
    );
}

#[test]
fn misplaced_secret_or_long_name_is_not_shown() {
    for field in [TOKEN, "client_key_data"] {
        let error = error_for(&format!("/users/0/user/{field}"), Value::Null);
        let hidden = "users[0].user.(key not shown) is not a known";
        assert!(error.starts_with(hidden), "{error}");
    }
    let error = error_for("/contexts/0/context/user", json!("n".repeat(1000)));
    assert!(error.len() < 120, "{error}");
}
