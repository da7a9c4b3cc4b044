use super::fuzzing::policy_of;
use super::*;

pub(super) mod credentials;
mod dates;
mod input;

use credentials::{ISSUED, OTHER, decoded, encoded};

const TOKEN: &str = "canary-token-5f3a";
/// The ends of the hub's flags, in the order of the bits of [`policy_of`].
const SWITCHES: &str = "exec auth-provider token-file files tls loopback link-local proxy";

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

#[track_caller]
fn assert_contains(text: &str, expected: &str) {
    assert!(text.contains(expected), "{expected}: {text}");
}

#[track_caller]
fn assert_starts(text: &str, expected: &str) {
    assert!(text.starts_with(expected), "{expected}: {text}");
}

#[track_caller]
fn assert_forbidden(error: &KubeconfigError, path: &str) {
    assert_eq!(error.reason(), "KubeconfigForbiddenField", "{error}");
    assert_starts(&error.to_string(), &format!("{path} is not allowed"));
}

/// Asserts that `value` at the JSON pointer changes nothing.
#[track_caller]
fn assert_without_effect(pointer: &str, value: Value) {
    let result = with_strict_policy(pointer, value);
    assert_eq!(result, parsed(&good()), "{pointer}");
}

/// Returns the JSON pointer as errors show it.
fn path_of(pointer: &str) -> String {
    let path = pointer.replace("/0/", "[0].").replace('/', ".");
    path.trim_start_matches('.').to_owned()
}

/// Returns the bit of the policy that this switch sets.
fn bit_of(switch: &str) -> u8 {
    1 << SWITCHES.split(' ').position(|name| name == switch).unwrap()
}

/// Returns the policy with only this switch.
fn policy_with(switch: &str) -> Policy {
    policy_of(bit_of(switch))
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
    assert_eq!(sanitized.digest, parsed(&good()).unwrap().digest);
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
    assert!(
        others.keys().eq(["a", "b", "bad", "c", "twice"]),
        "{others:?}"
    );
    let valid = others.iter().filter(|(_, context)| context.is_ok());
    assert!(valid.map(|(name, _)| name).eq(["a", "b"]), "{others:?}");
    let missing = others["bad"].as_ref().unwrap_err().to_string();
    assert_eq!(missing, "cluster \"missing\" not found in clusters");
    // Without the namespace of the current context.
    let first = others["a"].as_ref().unwrap();
    assert_eq!(first.namespace, None);
    assert_eq!(first.server, parsed(&document).unwrap().server);
    assert!(read(&document, 2).unwrap().keys().eq(["a", "b"]));

    // A fault of the whole kubeconfig rejects all contexts, and a bad current context only itself.
    document["current-context"] = json!("missing");
    assert_eq!(read(&document, 9).unwrap().len(), 6);
    for (key, value) in [("current-context", Value::Null), ("surprise", json!(1))] {
        let mut document = good();
        document[key] = value;
        let error = read(&document, 9).unwrap_err();
        assert_eq!(error, parsed(&document).unwrap_err());
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
    let server = json!("https://edge-2.example.org:6443");
    for (pointer, value) in [
        ("/users/0/user/token", json!("another")),
        ("/clusters/0/cluster/server", server),
        ("/clusters/0/cluster/tls-server-name", json!("kubernetes")),
        ("/contexts/0/context/namespace", Value::Null),
    ] {
        let changed = with_strict_policy(pointer, value).unwrap();
        assert_ne!(changed.digest, base, "{pointer}");
    }
}

#[test]
fn debug_output_has_no_secret() {
    let shown = format!("{:?}", parsed(&good()).unwrap());
    assert_contains(&shown, "edge-1.example.org");
    assert!(!shown.contains(TOKEN), "{shown}");
    assert!(!shown.contains(&ISSUED.ca), "{shown}");
}

#[test]
fn dangerous_field_is_admitted_only_by_own_switch() {
    let run = json!({ "apiVersion": "client.authentication.k8s.io/v1", "command": "/bin/canary" });
    let gcp = json!({ "name": "gcp", "config": { "cmd-path": "/bin/canary" } });
    let oidc = json!({ "name": "oidc", "config": { "idp-issuer-url": "https://issuer" } });
    let token = json!("/run/token");
    let (file, url) = (json!("/etc/shadow"), json!("http://proxy.example.org:3128"));
    let server = json!("https://[::ffff:127.0.0.1]:6443");
    let metadata = json!("https://metadata.google.internal.");
    let (user, cluster) = ("/users/0/user", "/clusters/0/cluster");
    for (entry, field, value, switch) in [
        (user, "exec", run, "exec"),
        (user, "exec", json!({}), "exec"),
        (user, "auth-provider", gcp, "auth-provider"),
        (user, "auth-provider", oidc, "auth-provider"),
        (user, "tokenFile", token, "token-file"),
        (cluster, "certificate-authority", file, "files"),
        (cluster, "proxy-url", url, "proxy"),
        (cluster, "server", server, "loopback"),
        (cluster, "server", metadata, "link-local"),
    ] {
        let pointer = &format!("{entry}/{field}");
        let path = path_of(pointer);
        for policy in [0, !bit_of(switch)].map(policy_of) {
            let error = with(pointer, value.clone(), policy).unwrap_err();
            assert!(
                matches!(&error, KubeconfigError::Forbidden { path: p, .. } if *p == path),
                "{pointer}: {error}"
            );
            assert_forbidden(&error, &path);
            let flag = format!("--insecure-kubeconfig-{switch}");
            assert!(error.to_string().ends_with(&flag), "{error}");
        }
        let admitted = with(pointer, value.clone(), policy_with(switch));
        let yaml = admitted.unwrap().yaml;
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
        let result = with_strict_policy(&format!("/users/0/user/{field}"), value);
        assert_forbidden(&result.unwrap_err(), &format!("users[0].user.{field}"));
        assert!(!folder.exists(), "{field}");
    }
}

#[test]
fn admitted_proxy_is_kept_and_validated_like_server() {
    let pointer = "/clusters/0/cluster/proxy-url";
    let admitted = policy_with("proxy");
    let sanitized = with(pointer, json!("SOCKS5://Proxy.example.org:1080"), admitted).unwrap();
    let rebuilt: Value = serde_json::from_str(&sanitized.yaml).unwrap();
    let kept = json!("socks5://Proxy.example.org:1080");
    assert_eq!(rebuilt.pointer(pointer), Some(&kept));
    let proxy = Authority {
        host: "proxy.example.org".to_owned(),
        port: 1080,
    };
    assert_eq!(sanitized.first_hop(), &proxy);
    assert_eq!(sanitized.authority.host, "edge-1.example.org");
    assert_eq!(parsed(&good()).unwrap().first_hop().port, 6443);
    let own_machine = "is not allowed: it points to the hub's own machine";
    let link_local = "is not allowed: it points to a link-local";
    for (url, message) in [
        ("http://localhost:3128", own_machine),
        ("http://169.254.169.254:80", link_local),
        ("http://127.1:3128", "has a number for a host"),
        ("http://user:pw@proxy:3128", "has a user name or password"),
        ("ftp://proxy:21", "must start with http://"),
    ] {
        let error = with(pointer, json!(url), admitted).unwrap_err().to_string();
        assert_contains(&error, &format!("proxy-url {message}"));
    }
}

#[test]
fn client_certificate_files_need_switch_and_absolute_paths() {
    for field in ["client-certificate", "client-key"] {
        let result = with_strict_policy(&format!("/users/0/user/{field}"), json!("/etc/shadow"));
        let error = result.unwrap_err();
        assert_forbidden(&error, &format!("users[0].user.{field}"));
        assert_contains(&error.to_string(), "-data");
    }
    let files = policy_with("files");
    let pair = |key: &str| json!({ "client-certificate": "/c.pem", "client-key": key });
    let sanitized = with("/users/0/user", pair("/k.pem"), files).unwrap();
    assert!(sanitized.yaml.contains("/k.pem"));
    let error = with("/users/0/user", pair("k.pem"), files).unwrap_err();
    let expected = "users[0].user.client-key must be an absolute path";
    assert_eq!(error.to_string(), expected);
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
        for policy in [0, u8::MAX].map(policy_of) {
            let error = with(&pointer, value.clone(), policy).unwrap_err();
            assert_forbidden(&error, &format!("users[0].user.{field}"));
        }
    }
}

#[test]
fn skipping_tls_verification_needs_lab_switch() {
    let pointer = "/clusters/0/cluster/insecure-skip-tls-verify";
    assert_without_effect(pointer, json!(false));
    let error = with_strict_policy(pointer, json!(true)).unwrap_err();
    assert_eq!(error.reason(), "KubeconfigForbiddenField", "{error}");
    assert_contains(&error.to_string(), "--insecure-kubeconfig-tls");
    for invalid in [json!("true"), json!("false"), json!(1), json!("yes")] {
        let error = error_for(pointer, invalid);
        let expected = "must be true or false, without quotes";
        assert!(error.ends_with(expected), "{error}");
    }
    for yaml in ["yes", "True", "on", "y"] {
        let text = format!(
            "clusters: [{{name: k, cluster: {{insecure-skip-tls-verify: {yaml}, server: \"https://h\"}}}}]\ncontexts: [{{name: c, context: {{cluster: k, user: u}}}}]\nusers: [{{name: u, user: {{token: t}}}}]\ncurrent-context: c\n"
        );
        let error = parse_error(text.as_bytes());
        assert!(
            error.contains("insecure-skip-tls-verify"),
            "{yaml}: {error}"
        );
    }

    let lab = policy_with("tls");
    let error = with(pointer, json!(true), lab).unwrap_err().to_string();
    assert_contains(&error, "contradicts the certificate authority");
    let mut document = good();
    document["clusters"][0]["cluster"] =
        json!({ "server": "https://h", "insecure-skip-tls-verify": true });
    let sanitized = parse(document.to_string().as_bytes(), &lab).unwrap();
    assert!(sanitized.yaml.contains("\"insecure-skip-tls-verify\":true"));
}

#[test]
fn unknown_fields_are_rejected_and_extensions_dropped() {
    for pointer in [
        "/clusterz",
        "/currentContext",
        "/clusters/0/Cluster",
        "/clusters/0/cluster/Server",
        "/clusters/0/cluster/certificateAuthorityData",
        "/contexts/0/context/cluster-name",
        "/users/0/user/Exec",
        "/users/0/user/Token",
        "/users/0/user/tokenfile",
        "/users/0/user/token-file",
    ] {
        let error = with_strict_policy(pointer, json!("x")).unwrap_err();
        let path = path_of(pointer);
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
        assert_without_effect(pointer, extension.clone());
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
        assert_without_effect(pointer, value);
    }
}

#[test]
fn missing_or_dangling_reference_is_named() {
    let no_context = "failed to determine current context: current-context is missing or empty";
    let no_such_context = "context \"x\" not found in contexts";
    let no_admin = "user \"admin\" not found in users";
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
        ("/current-context", json!("x"), no_such_context),
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
        ("/users/0/name", json!(7), no_admin),
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
    let expected = "users has the name \"admin\" more than once: keep one of them";
    assert_eq!(error.to_string(), expected);
}

#[test]
fn server_must_be_https_with_host_without_credentials() {
    let pointer = "/clusters/0/cluster/server";
    let (scheme, number) = ("must start with https://", "has a number for a host");
    let credentials = "has a user name or password";
    for (server, message) in [
        (json!("http://10.0.0.1"), scheme),
        (json!("http://edge-1.example.org:8080"), scheme),
        (json!("unix:///var/run/apiserver.sock"), scheme),
        (json!("https://admin:hunter2@h"), credentials),
        (json!("https://h:0"), "has no valid port"),
        (json!("https://"), "has no host"),
        (json!("https://2130706433:6443"), number),
        (json!("https://0x7f.1"), number),
        (json!(6443), "must be a string"),
    ] {
        for policy in [0, u8::MAX].map(policy_of) {
            let result = with(pointer, server.clone(), policy);
            let error = result.unwrap_err().to_string();
            assert_starts(&error, &format!("clusters[0].cluster.server {message}"));
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
    let missing_key = "client-key-data is missing";
    let no_string = "certificate-authority-data must be a string";
    let illegal_character = "token has an invalid character";
    for (pointer, value, message) in [
        (ca, json!("%%%"), "certificate-authority-data is not base64"),
        (ca, encode("hello"), no_ca),
        (ca, json!(ISSUED.key), no_ca),
        (ca, encode(open), damaged),
        (ca, encode(garbage), damaged),
        (ca, encode(sequence), damaged),
        (ca, json!([1]), no_string),
        (cert, json!(ISSUED.certificate), missing_key),
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

#[test]
fn client_certificate_and_key_must_match() {
    let with_key = |key: &str| {
        let pair = json!({ "client-certificate-data": ISSUED.certificate, "client-key-data": key });
        with_strict_policy("/users/0/user", pair)
    };
    assert!(with_key(&ISSUED.key).is_ok());
    let small_key = "-----BEGIN PRIVATE KEY-----\nMAMCAQE=\n-----END PRIVATE KEY-----\n";
    let small_key = encoded(small_key);
    for (key, message) in [
        (&OTHER.key, "is not the key of client-certificate-data"),
        (&small_key, "holds a private key that cannot be used"),
    ] {
        let error = with_key(key).unwrap_err();
        let expected = format!("users[0].user.client-key-data {message}");
        assert_starts(&error.to_string(), &expected);
        assert_eq!(error.reason(), "KubeconfigInvalid");
    }
}

#[test]
fn authority_is_ca_or_self_signed() {
    let pointer = "/clusters/0/cluster/certificate-authority-data";
    assert!(with_strict_policy(pointer, json!(ISSUED.self_signed)).is_ok());
    let error = with_strict_policy(pointer, json!(ISSUED.certificate)).unwrap_err();
    let expected = "clusters[0].cluster.certificate-authority-data holds no CA certificate";
    assert_starts(&error.to_string(), expected);
    // Some bundles contain the server's own certificate next to its CA, mixed with other content.
    let [own, ca] = [&ISSUED.certificate, &ISSUED.ca].map(|text| decoded(text));
    let key = decoded(&ISSUED.key);
    let mixed = encoded(&format!("a note\n{own}\n{key}{ca}"));
    let sanitized = with_strict_policy(pointer, json!(mixed)).unwrap();
    let rebuilt: Value = serde_json::from_str(&sanitized.yaml).unwrap();
    let bundle = json!(encoded(&format!("{own}{ca}")));
    assert_eq!(rebuilt.pointer(pointer), Some(&bundle));
}

#[test]
fn misplaced_secret_or_long_name_is_not_shown() {
    for field in [TOKEN, "client_key_data"] {
        let error = error_for(&format!("/users/0/user/{field}"), Value::Null);
        assert_starts(&error, "users[0].user.(key not shown) is not a known");
    }
    let error = error_for("/contexts/0/context/user", json!("n".repeat(1000)));
    assert!(error.len() < 120, "{error}");
}
