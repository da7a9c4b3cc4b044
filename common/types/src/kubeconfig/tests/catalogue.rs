//! Catalogue of bad kubeconfigs, one test for each row: the input of an attacker or a mistake of a user, and the
//! expected result.

use super::*;

/// Returns the error for the good kubeconfig with `value` at the JSON pointer.
fn said(pointer: &str, value: Value) -> String {
    strictly(pointer, value).unwrap_err().to_string()
}

fn forbidden(pointer: &str, value: Value) -> String {
    let error = strictly(pointer, value).unwrap_err();
    assert_eq!(error.reason(), "KubeconfigForbiddenField", "{error}");
    error.to_string()
}

/// Returns the good kubeconfig as a user writes it.
fn text() -> String {
    format!(
        "apiVersion: v1\nkind: Config\ncurrent-context: c\n\
         clusters:\n- name: k\n  cluster:\n    server: https://edge-1.example.org:6443\n    \
         certificate-authority-data: {}\n\
         contexts:\n- name: c\n  context: {{cluster: k, user: u}}\n\
         users:\n- name: u\n  user: {{token: {TOKEN}}}\n",
        ISSUED.ca
    )
}

/// Like [`text`], with one line replaced.
fn with_line(from: &str, to: &str) -> Result<Sanitized, KubeconfigError> {
    let text = text();
    assert!(text.contains(from), "{from}");
    parse(text.replacen(from, to, 1).as_bytes(), &Policy::default())
}

#[test]
fn exec_is_refused_and_nothing_is_run() {
    let folder = std::env::temp_dir().join(format!("krypton-exec-{}", std::process::id()));
    let exec = json!({ "apiVersion": "client.authentication.k8s.io/v1", "command": "/bin/mkdir", "args": [folder] });
    let said = forbidden("/users/0/user/exec", exec);
    assert!(
        said.starts_with("users[0].user.exec is not allowed"),
        "{said}"
    );
    assert!(!folder.exists());
}

#[test]
fn auth_provider_gcp_is_rejected_without_running_command() {
    let folder = std::env::temp_dir().join(format!("krypton-gcp-{}", std::process::id()));
    let gcp = json!({ "name": "gcp", "config": { "cmd-path": "/bin/mkdir", "cmd-args": folder } });
    let said = forbidden("/users/0/user/auth-provider", gcp);
    assert!(
        said.starts_with("users[0].user.auth-provider is not allowed"),
        "{said}"
    );
    assert!(!folder.exists());
}

#[test]
fn auth_provider_oidc_is_refused() {
    let oidc =
        json!({ "name": "oidc", "config": { "idp-issuer-url": "https://issuer.example.org" } });
    let said = forbidden("/users/0/user/auth-provider", oidc);
    assert!(
        said.starts_with("users[0].user.auth-provider is not allowed"),
        "{said}"
    );
}

#[test]
fn a_token_file_is_refused() {
    let path = json!("/var/run/secrets/kubernetes.io/serviceaccount/token");
    let said = forbidden("/users/0/user/tokenFile", path);
    assert!(
        said.starts_with("users[0].user.tokenFile is not allowed"),
        "{said}"
    );
}

#[test]
fn paths_of_certificates_and_keys_are_refused() {
    for (pointer, path) in [
        (
            "/users/0/user/client-certificate",
            "users[0].user.client-certificate",
        ),
        ("/users/0/user/client-key", "users[0].user.client-key"),
        (
            "/clusters/0/cluster/certificate-authority",
            "clusters[0].cluster.certificate-authority",
        ),
    ] {
        let said = forbidden(pointer, json!("/etc/shadow"));
        assert!(
            said.starts_with(&format!("{path} is not allowed")),
            "{said}"
        );
        assert!(said.contains("-data"), "{said}");
    }
}

#[test]
fn unverified_tls_is_refused() {
    let said = forbidden("/clusters/0/cluster/insecure-skip-tls-verify", json!(true));
    assert!(said.contains("--insecure-kubeconfig-tls"), "{said}");
}

#[test]
fn plain_http_server_is_rejected_by_every_policy() {
    let server = json!("http://edge-1.example.org:8080");
    let error = with("/clusters/0/cluster/server", server, EVERYTHING).unwrap_err();
    assert!(
        error.to_string().contains("must start with https://"),
        "{error}"
    );
}

#[test]
fn a_proxy_url_is_refused() {
    let said = forbidden("/clusters/0/cluster/proxy-url", json!("http://proxy:3128"));
    assert!(said.contains("--insecure-kubeconfig-proxy"), "{said}");
}

#[test]
fn loopback_metadata_and_invalid_servers_are_rejected() {
    for server in [
        "https://127.0.0.1:6443",
        "https://localhost:6443",
        "https://[::1]:6443",
        "https://0.0.0.0",
        "https://[::ffff:127.0.0.1]",
        "https://169.254.169.254",
        "https://[fe80::1]",
        "https://[fd00:ec2::254]",
        "https://metadata.google.internal.",
    ] {
        let said = forbidden("/clusters/0/cluster/server", json!(server));
        assert!(
            said.starts_with("clusters[0].cluster.server is not allowed"),
            "{said}"
        );
    }
    for (server, problem) in [
        ("unix:///var/run/apiserver.sock", "must start with https://"),
        (
            "https://admin:hunter2@edge-1.example.org",
            "has a user name or password",
        ),
        ("https://edge-1.example.org:0", "has no valid port"),
        ("https://2130706433:6443", "has a number for a host"),
        ("https://0x7f.1", "has a number for a host"),
    ] {
        let said = said("/clusters/0/cluster/server", json!(server));
        assert!(
            said.starts_with(&format!("clusters[0].cluster.server {problem}")),
            "{said}"
        );
        assert!(!said.contains("hunter2"), "{said}");
    }
}

#[test]
fn missing_user_or_credential_is_rejected() {
    assert_eq!(
        said("/contexts/0/context/user", json!("x")),
        "user \"x\" not found in users"
    );
    let unset = said("/contexts/0/context/user", Value::Null);
    assert!(unset.contains("anonymous access is refused"), "{unset}");
    let bare = said("/users/0/user", json!({}));
    assert!(bare.contains("anonymous access is refused"), "{bare}");
}

#[test]
fn without_a_current_context_no_other_is_guessed() {
    let no_context = "failed to determine current context: current-context is missing or empty";
    assert_eq!(said("/current-context", Value::Null), no_context);
    assert_eq!(said("/current-context", json!("")), no_context);
    assert_eq!(refused(b""), no_context);
    assert_eq!(refused(b"null"), no_context);
}

#[test]
fn two_documents_are_refused_at_the_second() {
    let said = refused(format!("{}---\n{}", text(), text()).as_bytes());
    let problem = "there is more than one YAML document";
    assert_eq!(
        said,
        format!("kubeconfig is not read at line 16, column 1: {problem}")
    );
}

#[test]
fn an_authority_that_is_not_base64_is_refused() {
    let pointer = "/clusters/0/cluster/certificate-authority-data";
    assert_eq!(
        said(pointer, json!("!")),
        "clusters[0].cluster.certificate-authority-data is not base64"
    );
}

#[test]
fn an_authority_that_is_no_certificate_is_refused() {
    let pointer = "/clusters/0/cluster/certificate-authority-data";
    assert_eq!(
        said(pointer, json!(encoded("no certificate"))),
        "clusters[0].cluster.certificate-authority-data holds no PEM certificate"
    );
}

#[test]
fn unusable_certificates_are_rejected_before_connecting() {
    let user =
        json!({ "client-certificate-data": ISSUED.certificate, "client-key-data": ISSUED.key });
    let expired = strictly("/users/0/user", user).unwrap();
    let said_later = expired.check_dates("2030-01-01T00:00:00Z".parse().unwrap());
    let said_later = said_later.unwrap_err().to_string();
    assert!(
        said_later.contains("client-certificate-data has expired on 2027-01-01"),
        "{said_later}"
    );

    let user =
        json!({ "client-certificate-data": ISSUED.certificate, "client-key-data": OTHER.key });
    let strange = said("/users/0/user", user);
    assert!(
        strange.contains("is not the key of client-certificate-data"),
        "{strange}"
    );

    let pointer = "/clusters/0/cluster/certificate-authority-data";
    let powerless = said(pointer, json!(ISSUED.certificate));
    assert!(powerless.contains("holds no CA certificate"), "{powerless}");
}

#[test]
fn impersonation_is_refused_and_extensions_are_left_out() {
    for key in [
        "as",
        "as-uid",
        "as-groups",
        "as-user-extra",
        "impersonate-user",
    ] {
        let said = forbidden(&format!("/users/0/user/{key}"), json!("system:admin"));
        assert!(
            said.starts_with(&format!("users[0].user.{key} is not allowed")),
            "{said}"
        );
    }
    let extensions = json!([{ "name": "x", "extension": { "exec": "/bin/sh" } }]);
    assert_eq!(
        strictly("/users/0/user/extensions", extensions),
        parsed(&good())
    );
}

#[test]
fn list_root_and_duplicate_key_are_rejected() {
    assert_eq!(
        refused(b"- a"),
        "kubeconfig is not read: its root is no map"
    );
    let twice = with_line("kind: Config\n", "kind: Config\nkind: Config\n").unwrap_err();
    assert_eq!(
        twice.to_string(),
        "kubeconfig is not read at line 3, column 1: a key is there twice"
    );
    // Some parsers would use the second server, others the first.
    let server = "    server: https://edge-1.example.org:6443\n";
    let twice = with_line(
        server,
        &format!("{server}    server: https://evil.example.org\n"),
    );
    assert!(
        twice
            .unwrap_err()
            .to_string()
            .contains("a key is there twice")
    );
}

/// The limits are a size and counts, so the test does not depend on the machine: nothing is expanded.
#[test]
fn bombs_are_refused_before_they_take_room() {
    let too_large = vec![b'x'; SIZE_MAX + 1];
    assert_eq!(
        parse(&too_large, &Policy::default()),
        Err(KubeconfigError::TooLarge { size: SIZE_MAX + 1 })
    );
    let mut laughs = "a: &a [x,x,x,x,x,x,x,x,x]\n".to_owned();
    for (before, letter) in ('a'..='h').zip('b'..='i') {
        let nine = vec![format!("*{before}"); 9].join(",");
        laughs.push_str(&format!("{letter}: &{letter} [{nine}]\n"));
    }
    for bomb in [
        laughs,
        "[".repeat(200_000),
        "{a: ".repeat(60_000),
        format!("[{}]", "x,".repeat(120_000)),
    ] {
        assert!(bomb.len() <= SIZE_MAX);
        let said = refused(bomb.as_bytes());
        assert!(
            said.starts_with("kubeconfig is not read at line "),
            "{said}"
        );
    }
    let scalar = format!("{}x: {}\n", text(), "y".repeat(SIZE_MAX - 4096));
    assert!(refused(scalar.as_bytes()).starts_with("x is not a known field"));
}

#[test]
fn only_utf8_is_read_bom_and_crlf_allowed() {
    let utf16 = |big: bool| -> Vec<u8> {
        let units = std::iter::once(0xfeff).chain(text().encode_utf16().collect::<Vec<_>>());
        let bytes = |unit: u16| {
            if big {
                unit.to_be_bytes()
            } else {
                unit.to_le_bytes()
            }
        };
        units.flat_map(bytes).collect()
    };
    for bytes in [utf16(true), utf16(false)] {
        assert_eq!(refused(&bytes), "kubeconfig is not UTF-8 text, at byte 0");
    }
    let latin = text().into_bytes().into_iter().chain(*b"# caf\xe9\n");
    let latin: Vec<u8> = latin.collect();
    let at = latin.len() - 2;
    assert_eq!(
        refused(&latin),
        format!("kubeconfig is not UTF-8 text, at byte {at}")
    );
    let nul = with_line("kind: Config", "kind: Con\0fig").unwrap_err();
    assert_eq!(nul, KubeconfigError::Nul { position: 24 });

    let plain = parse(text().as_bytes(), &Policy::default()).unwrap();
    for same in [
        format!("\u{feff}{}", text()),
        text().replace('\n', "\r\n"),
        format!("\u{feff}{}", text().replace('\n', "\r\n")),
    ] {
        assert_eq!(
            parse(same.as_bytes(), &Policy::default()),
            Ok(plain.clone())
        );
    }
}

#[test]
fn misspelled_or_miscased_key_is_rejected() {
    for (from, to, path) in [
        ("    server:", "    Server:", "clusters[0].cluster.Server"),
        (
            "certificate-authority-data",
            "certificateAuthorityData",
            "clusters[0].cluster.certificateAuthorityData",
        ),
        ("{token:", "{Token:", "users[0].user.Token"),
        ("{token:", "{tokenfile:", "users[0].user.tokenfile"),
        (
            "{token:",
            "{token: t, client_key_data:",
            "users[0].user.(key not shown)",
        ),
        ("current-context:", "currentContext:", "currentContext"),
    ] {
        let error = with_line(from, to).unwrap_err();
        let path = path.to_owned();
        assert_eq!(error, KubeconfigError::Field(FieldError::Unknown { path }));
    }
    let quoted = said(
        "/clusters/0/cluster/insecure-skip-tls-verify",
        json!("true"),
    );
    assert!(
        quoted.ends_with("must be true or false, without quotes"),
        "{quoted}"
    );
}
