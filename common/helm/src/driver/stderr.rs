//! Parses Helm's standard error: a short, redacted message, and whether a retry can succeed.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use krypton_types::redact::{HIDDEN, is_secret_name, redact};
use krypton_types::values;
use serde_json::{Map, Value};

/// Maximum length of the displayed text in bytes.
pub(crate) const TEXT_MAX: usize = 1024;
/// Minimum length of a redacted text. Shorter ones are not secrets, and redacting them would make words
/// unreadable.
pub(crate) const SECRET_MIN: usize = 4;
/// Minimum length of a redacted part of a secret. Shorter parts reveal nothing.
const SECRET_PART_MIN: usize = 6;

/// Messages of errors that the same input causes again. Based on Fleet's list and refined with the messages
/// of Helm 4 and the API server.
const PERMANENT: [&str; 13] = [
    "values don't meet the specifications of the schema",
    "field is immutable",
    "may not change once set",
    "updates to statefulset spec for fields other than",
    " is invalid: ",
    " is forbidden: ",
    "unknown field",
    "yaml parse error",
    "error converting yaml to json",
    "execution error at (",
    "parse error at (",
    "error calling include",
    "chart requires kubeversion",
];
/// Messages that override the above. They depend on the cluster's state, which can change without Krypton.
const TRANSIENT: [&str; 3] = [
    "exceeded quota",
    "is being terminated",
    "because it is being deleted",
];
/// Message when the cluster no longer serves a kind of the last revision, whose objects Helm builds first.
const REMOVED_KIND: &str = "current release manifest";
/// Fixes for the above. Helm has changed nothing at this point.
pub(crate) const REMOVED_KIND_REMEDY: &str = "; install the CRD of that kind again, or delete the release's Secrets (label owner=helm and its name): Krypton then installs the chart again and adopts the existing objects";
/// Maximum length of the error before `REMOVED_KIND_REMEDY` in bytes.
const TEXT_MAX_BEFORE_REMEDY: usize = 512;
const NOT_FOUND: &str = "release: not found";
/// Messages of a Kamaji control plane that rejects all writes while it sleeps or migrates.
const SUSPENDED: [&str; 2] = [
    "has limited write permissions, current changes are blocked",
    "is in freezing mode due to a maintenance mode",
];

/// Returns whether an API server's response means that the cluster's owner suspended writes.
pub fn is_suspended(text: &str) -> bool {
    SUSPENDED.iter().any(|message| text.contains(message))
}

/// Returns whether Go's runtime aborted the program because it could not allocate memory.
pub(super) fn is_out_of_memory(stderr: &[u8]) -> bool {
    let text = String::from_utf8_lossy(stderr);
    let fatal_errors = text
        .lines()
        .filter_map(|line| line.strip_prefix("fatal error: "));
    let mut fatal_errors = fatal_errors.map(str::to_lowercase);
    fatal_errors.any(|message| {
        message.contains("out of memory") || message.contains("cannot allocate memory")
    })
}

/// Parsed standard error of Helm.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct HelmStderr {
    pub text: String,
    pub permanent: bool,
    pub not_found: bool,
    pub suspended: bool,
}

impl HelmStderr {
    /// Parses `stderr`. `secrets` are the texts to redact.
    pub(crate) fn parse(stderr: &[u8], secrets: &[String]) -> Self {
        let output = String::from_utf8_lossy(stderr);
        let error = last_error(&output);
        let lowercase = error.unwrap_or(&output).to_lowercase();
        let contains_any =
            |messages: &[&str]| messages.iter().any(|message| lowercase.contains(message));
        let text = redacted(error.unwrap_or(&output), secrets);
        // Terminals interpret control characters.
        let words = text.split(|c: char| c.is_whitespace() || c.is_control());
        let words: Vec<&str> = words.filter(|word| !word.is_empty()).collect();
        // A secret of several words may span several lines.
        let line = hide_secrets(&words.join(" "), secrets);
        let text = match error {
            Some(_) if contains_any(&[REMOVED_KIND]) => format!(
                "{}{REMOVED_KIND_REMEDY}",
                cut_end(&line, TEXT_MAX_BEFORE_REMEDY)
            ),
            Some(_) => cut_end(&line, TEXT_MAX),
            None => cut_start(&line),
        };
        Self {
            text,
            permanent: contains_any(&PERMANENT)
                && !contains_any(&TRANSIENT)
                && !contains_any(&SUSPENDED),
            not_found: contains_any(&[NOT_FOUND]),
            suspended: contains_any(&SUSPENDED),
        }
    }
}

/// Returns the text from the last line that starts with `Error:`. Omits the warnings before it.
fn last_error(output: &str) -> Option<&str> {
    let start = match output.rfind("\nError: ") {
        Some(at) => at + "\nError: ".len(),
        None if output.starts_with("Error: ") => "Error: ".len(),
        None => return None,
    };
    output.get(start..)
}

fn cut_end(line: &str, max: usize) -> String {
    if line.len() <= max {
        return line.to_owned();
    }
    let end = line.floor_char_boundary(max - "…".len());
    format!("{}…", line.get(..end).unwrap_or_default())
}

fn cut_start(line: &str) -> String {
    if line.len() <= TEXT_MAX {
        return line.to_owned();
    }
    let start = line.ceil_char_boundary(line.len() - (TEXT_MAX - "…".len()));
    format!("…{}", line.get(start..).unwrap_or_default())
}

/// Returns the secret texts in the values, found by their key names and by these JSON pointers. Longest
/// first.
pub(crate) fn secrets(values: &Map<String, Value>, pointers: &[String]) -> Vec<String> {
    let mut secrets = Vec::new();
    for (name, value) in values {
        collect_secrets(value, is_secret_name(name), &mut secrets);
    }
    for value in pointers
        .iter()
        .filter_map(|pointer| values::value_at(values, pointer))
    {
        collect_secrets(value, true, &mut secrets);
    }
    secrets.sort_by(|a, b| b.len().cmp(&a.len()).then_with(|| a.cmp(b)));
    secrets.dedup();
    secrets
}

fn collect_secrets(value: &Value, secret: bool, secrets: &mut Vec<String>) {
    match value {
        Value::String(text) if secret => {
            // A Secret's manifest contains the text in base64, and a message may quote a single line of it.
            let mut forms = vec![text.clone(), STANDARD.encode(text)];
            forms.extend(text.lines().map(|line| line.trim().to_owned()));
            forms.extend(json_escaped(text));
            forms.extend(base64_infixes(text.as_bytes()));
            forms.retain(|form| form.len() >= SECRET_MIN);
            secrets.append(&mut forms);
        }
        Value::Number(number) if secret => {
            secrets.extend(Some(number.to_string()).filter(|text| text.len() >= SECRET_MIN));
        }
        Value::Array(items) => items
            .iter()
            .for_each(|item| collect_secrets(item, secret, secrets)),
        Value::Object(fields) => {
            for (name, value) in fields {
                collect_secrets(value, secret || is_secret_name(name), secrets);
            }
        }
        _ => {}
    }
}

/// Returns the text with JSON escapes if it differs from the original.
fn json_escaped(text: &str) -> Option<String> {
    let quoted = Value::from(text).to_string();
    let inner = quoted.strip_prefix('"')?.strip_suffix('"')?;
    (inner != text).then(|| inner.to_owned())
}

/// Returns the possible forms of a text inside a longer base64 text, such as the `user:password` of a
/// registry.
fn base64_infixes(text: &[u8]) -> impl Iterator<Item = String> + '_ {
    // The neighbouring bytes change the first and the last characters.
    (0..3).filter_map(move |skip| {
        let shifted = text.get(skip..)?;
        let aligned = shifted.get(..shifted.len() / 3 * 3)?;
        (aligned.len() >= SECRET_PART_MIN).then(|| STANDARD.encode(aligned))
    })
}

fn redacted(text: &str, secrets: &[String]) -> String {
    redact(&hide_secrets(text, secrets))
}

fn hide_secrets(text: &str, secrets: &[String]) -> String {
    let hide_one = |text: String, secret: &String| text.replace(secret, HIDDEN);
    secrets.iter().fold(text.to_owned(), hide_one)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    fn parse(stderr: &str) -> HelmStderr {
        HelmStderr::parse(stderr.as_bytes(), &[])
    }

    #[test]
    fn out_of_memory_is_recognized_by_runtime_message() {
        for (output, expected) in [
            ("fatal error: runtime: out of memory\n", true),
            (
                "a warning\nfatal error: out of memory allocating heap arena map\n",
                true,
            ),
            (
                "runtime: mmap: x\nfatal error: runtime: cannot allocate memory\n",
                true,
            ),
            (
                "fatal error: all goroutines are asleep - deadlock!\n",
                false,
            ),
            ("Error: pod a was killed: out of memory\n", false),
        ] {
            assert_eq!(is_out_of_memory(output.as_bytes()), expected, "{output}");
        }
    }

    #[test]
    fn error_is_extracted_without_preceding_warnings() {
        let output = "level=WARN msg=\"something old\"\nError: UPGRADE FAILED: values don't meet \
                    the specifications of the schema(s) in the following chart(s):\nsmall:\n\
                    - at '/replicaCount': got string, want integer\n";
        let parsed = parse(output);
        assert_eq!(
            parsed.text,
            "UPGRADE FAILED: values don't meet the specifications of the schema(s) in the \
             following chart(s): small: - at '/replicaCount': got string, want integer"
        );
        assert!(parsed.permanent);
    }

    #[test]
    fn removed_kind_error_includes_remedy() {
        for output in [
            "unable to build kubernetes objects from current release manifest: resource mapping not found for name: \"acme\" namespace: \"acme\" from \"\": no matches for kind \"Widget\" in version \"krypton.test/v1\"",
            "current release manifest contains removed kubernetes api(s) for this kubernetes version and it is therefore unable to build the kubernetes objects for performing the diff",
        ] {
            let parsed = parse(&format!(
                "Error: UPGRADE FAILED: {output}{}",
                " long".repeat(200)
            ));
            assert!(parsed.text.contains("current release manifest"));
            assert!(
                parsed.text.ends_with("adopts the existing objects"),
                "{}",
                parsed.text
            );
            assert!(
                parsed.text.len() <= TEXT_MAX - 128,
                "a condition has words before it"
            );
            assert!(!parsed.permanent, "the CRD may come back");
        }
    }

    #[test]
    fn output_without_error_line_yields_its_tail() {
        let output = format!("{} panic: the end", "goroutine ".repeat(1000));
        let text = parse(&output).text;
        assert!(
            text.len() <= TEXT_MAX && text.starts_with('…') && text.ends_with("panic: the end")
        );
        let long = format!("Error: the start {}", "ä".repeat(4000));
        let text = parse(&long).text;
        assert!(text.len() <= TEXT_MAX && text.starts_with("the start") && text.ends_with('…'));
        assert_eq!(parse("").text, "");
    }

    #[test]
    fn permanent_failures_are_distinguished_from_transient_ones() {
        let permanent = [
            "Error: UPGRADE FAILED: cannot patch \"web\" with kind Service: Service \"web\" is invalid: spec.clusterIP: Invalid value: \"\": field is immutable",
            "Error: INSTALLATION FAILED: Deployment.apps \"web\" is invalid: spec.replicas: Invalid value: -1: must be greater than or equal to 0",
            "Error: query: failed to query with labels: secrets is forbidden: User \"x\" cannot list resource \"secrets\"",
            "Error: execution error at (small/templates/a.yaml:1:4): message is required",
            "Error: chart requires kubeVersion: >=1.99.0 which is incompatible with Kubernetes v1.36.0",
        ];
        for output in permanent {
            assert!(parse(output).permanent, "{output}");
        }
        let transient = [
            "Error: Kubernetes cluster unreachable: Get \"https://127.0.0.1:1/version\": dial tcp 127.0.0.1:1: connect: connection refused",
            "Error: UPGRADE FAILED: another operation (install/upgrade/rollback) is in progress",
            "Error: INSTALLATION FAILED: pods \"a\" is forbidden: exceeded quota: compute",
            "Error: secrets \"a\" is forbidden: unable to create new content in namespace acme because it is being terminated",
            "Error: UPGRADE FAILED: pre-upgrade hooks failed: timed out waiting for the condition",
            "",
        ];
        for output in transient {
            assert!(!parse(output).permanent, "{output}");
        }
    }

    #[test]
    fn suspended_control_plane_refusal_is_not_permanent() {
        for output in [
            "Error: UPGRADE FAILED: create: failed to create: admission webhook \"catchall.write-permissions.kamaji.clastix.io\" denied the request: secrets \"a\" is forbidden: the current Control Plane has limited write permissions, current changes are blocked",
            "Error: admission webhook \"catchall.migrate.kamaji.clastix.io\" denied the request: the current Control Plane is in freezing mode due to a maintenance mode, all the changes are blocked",
        ] {
            let parsed = parse(output);
            assert!(parsed.suspended && !parsed.permanent, "{output}");
            assert!(is_suspended(output));
        }
        assert!(!parse("Error: the disk is full").suspended);
    }

    #[test]
    fn not_found_means_the_release_and_nothing_else() {
        assert!(
            parse("Error: uninstall: Release not loaded: acme: release: not found\n").not_found
        );
        assert!(!parse("Error: namespaces \"acme\" not found").not_found);
    }

    #[test]
    fn secrets_are_redacted_and_useful_details_are_kept() {
        let jwt = "eyJhbGciOiJSUzI1NiJ9.eyJzdWIiOiJhIn0.c2ln";
        let opaque = "AKIAIOSFODNN7EXAMPLEwJalrXUtnFEMIK7MDENG";
        let cases = [
            (
                "Authorization: Bearer abcdefgh12345678",
                "Authorization: [redacted] [redacted]",
            ),
            (&format!("header {jwt} sent"), "header [redacted] sent"),
            (&format!("got {opaque}, sorry"), "got [redacted], sorry"),
            (
                "url https://me:hunter2@example.org/charts",
                "url https://[redacted]@example.org/charts",
            ),
            ("password=hunter2 user=me", "password=[redacted] user=me"),
            (
                r#"{"clientSecret": "hunter2", "a": "b"}"#,
                r#"{"clientSecret": "[redacted]", "a": "b"}"#,
            ),
            (
                "-----BEGIN PRIVATE KEY-----\nMIIB\n-----END PRIVATE KEY----- after",
                "[redacted] after",
            ),
            ("-----BEGIN PRIVATE KEY-----\nMIIB", "[redacted]"),
        ];
        for (output, expected) in cases {
            assert_eq!(parse(&format!("Error: {output}")).text, expected);
        }
        for kept in [
            r#"secrets "sh.helm.release.v1.tenant-acme-edge-1.v1" is forbidden: User "system:serviceaccount:a:b" cannot get"#,
            "spec.tokenExpirationSeconds: Invalid value: 1",
            "spec.password: Required value",
            "digest 0123456789abcdef0123456789abcdef0123456789abcdef",
            "at small/templates/deployment.yaml:10:20 in a-rather-long-name-of-a-release-of-a-tenant-7",
        ] {
            assert_eq!(parse(&format!("Error: {kept}")).text, kept);
        }
    }

    #[test]
    fn values_are_hidden_by_the_name_they_have() {
        let values = json!({
            "db": { "password": "hunter2 of all", "existingSecret": "db-login", "port": 5432 },
            "apiToken": ["first-token", 123456],
            "tls": { "privateKey": "line one\nline two is here\n" },
            "imagePullSecrets": [{ "name": "registry" }],
            "pin": "abc",
        });
        let secrets = secrets(values.as_object().unwrap(), &[]);
        let output = format!(
            "Error: hunter2 of all, {}, first-token, 123456, \"line two is here\", db-login, 5432, registry",
            STANDARD.encode("hunter2 of all")
        );
        let parsed = HelmStderr::parse(output.as_bytes(), &secrets);
        assert_eq!(
            parsed.text,
            "[redacted], [redacted], [redacted], [redacted], \"[redacted]\", db-login, 5432, registry"
        );
    }

    #[test]
    fn secret_values_are_redacted_regardless_of_name() {
        let values = json!({
            "message": "correct horse battery", "db": { "user": "admin-of-all", "port": 54321 },
            "quoted": "say \"pass\" now", "list": ["first-of-list"], "short": "abc", "open": "seen",
        });
        let paths = [
            "/message", "/db/user", "/db/port", "/quoted", "/list", "/short", "/gone",
        ];
        let paths = paths.map(str::to_owned);
        let secrets = secrets(values.as_object().unwrap(), &paths);
        let login = STANDARD.encode("x:admin-of-all@");
        let output = format!(
            "Error: execution error: correct horse battery, admin-of-all, 54321, \"say \\\"pass\\\" now\", first-of-list, {login}, seen",
        );
        let text = HelmStderr::parse(output.as_bytes(), &secrets).text;
        assert!(
            text.starts_with(
                "execution error: [redacted], [redacted], [redacted], \"[redacted]\", [redacted], "
            ),
            "{text}"
        );
        assert!(text.ends_with(", seen"), "{text}");
        assert!(
            !text.contains(&login) && text.matches("[redacted]").count() == 6,
            "{text}"
        );
    }

    proptest! {
        #[test]
        fn error_text_is_bounded_and_free_of_secrets(
            bytes in prop::collection::vec(any::<u8>(), 0..4000),
            before in ".{0,40}",
            after in ".{0,40}",
        ) {
            let secrets = ["s3cr3t-v4lue".to_owned()];
            let mut output = bytes;
            output.extend_from_slice(format!("\nError: {before}s3cr3t-v4lue{after}").as_bytes());
            let parsed = HelmStderr::parse(&output, &secrets);
            prop_assert!(parsed.text.len() <= TEXT_MAX);
            prop_assert!(!parsed.text.contains("s3cr3t-v4lue"));
        }
    }
}
