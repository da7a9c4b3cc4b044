use proptest::prelude::*;
use proptest::sample::select;
use serde_json::Map;

use super::fuzzing::{broken_promise, policy_of};
use super::*;
use crate::fuzzing::shared;

/// Part of every secret value. If a rebuilt kubeconfig or a message contains it, a secret has leaked.
const CANARY: &str = "canary";

fn any_value() -> impl Strategy<Value = Value> {
    prop_oneof![
        Just(Value::Null),
        Just(json!("")),
        Just(json!(true)),
        Just(json!(false)),
        Just(json!(42)),
        Just(json!("/etc/canary")),
        Just(json!("socks5://proxy.example.org:1080")),
        Just(json!("http://[::1]:3128")),
        Just(json!(["canary"])),
        Just(json!({ "command": "canary", "cmd-path": "/bin/canary" })),
        "canary[ -~]{0,8}".prop_map(Value::String),
        "https://[a-c]{1,4}(:[0-9]{1,5})?".prop_map(Value::String),
    ]
}

fn any_fields(keys: &'static [&'static str]) -> impl Strategy<Value = Map<String, Value>> {
    proptest::collection::btree_map(select(keys).prop_map(str::to_owned), any_value(), 0..4)
        .prop_map(|fields| fields.into_iter().collect())
}

/// Generates a kubeconfig in which each field can be good, bad, odd or absent.
fn any_kubeconfig() -> impl Strategy<Value = Value> {
    const CLUSTER: &[&str] = &[
        "certificate-authority",
        "certificate-authority-data",
        "insecure-skip-tls-verify",
        "proxy-url",
        "tls-server-name",
        "extensions",
        "disable-compression",
        "surprise",
    ];
    const USER: &[&str] = &[
        "exec",
        "auth-provider",
        "tokenFile",
        "client-certificate",
        "client-certificate-data",
        "client-key",
        "client-key-data",
        "as",
        "as-groups",
        "username",
        "password",
        "extensions",
        "surprise",
    ];
    const CONTEXT: &[&str] = &["namespace", "extensions", "surprise"];
    const SERVER: &[&str] = &[
        "https://edge:6443",
        "https://10.0.0.1",
        "https://localhost.:6443",
        "https://[fe80::1]",
    ];
    (
        any_fields(CLUSTER),
        any_fields(USER),
        any_fields(CONTEXT),
        0..3usize,
        select(SERVER),
    )
        .prop_map(|(mut cluster, mut user, mut context, others, server)| {
            cluster.insert("server".to_owned(), json!(server));
            user.insert("token".to_owned(), json!("fine"));
            context.insert("cluster".to_owned(), json!("k"));
            context.insert("user".to_owned(), json!("u"));
            let mut users = vec![json!({ "name": "u", "user": user })];
            for other in 0..others {
                let exec = json!({ "exec": { "command": "/bin/canary" } });
                users.insert(
                    0,
                    json!({ "name": format!("canary-{other}"), "user": exec }),
                );
            }
            json!({
                "clusters": [{ "name": "k", "cluster": cluster }],
                "contexts": [{ "name": "c", "context": context }],
                "users": users,
                "current-context": "c",
            })
        })
}

/// Returns whether the strict policy can accept the item: it has no effect.
fn is_harmless(key: &str, value: &Value) -> bool {
    value.is_null()
        || *value == json!("")
        || matches!(
            key,
            "extensions"
                | "disable-compression"
                | "tls-server-name"
                | "namespace"
                | "server"
                | "token"
                | "cluster"
                | "user"
        )
        || (key == "insecure-skip-tls-verify" && *value == json!(false))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn every_promise_is_kept_under_every_policy(document in any_kubeconfig(), bits: u8) {
        let bytes = document.to_string().into_bytes();
        prop_assert_eq!(broken_promise(&bytes, &policy_of(bits)), None);
        prop_assert_eq!(broken_promise(&bytes, &Policy::default()), None);
    }

    #[test]
    fn rejected_or_dropped_content_never_reappears(document in any_kubeconfig()) {
        match parse(document.to_string().as_bytes(), &Policy::default()) {
            Ok(sanitized) => {
                prop_assert!(!sanitized.yaml.contains("/etc/"));
                prop_assert!(!sanitized.yaml.contains("/bin/"));
            }
            Err(error) => prop_assert!(!error.to_string().contains(CANARY), "{}", error),
        }
    }

    #[test]
    fn disallowed_effective_field_is_never_silently_dropped(
        document in any_kubeconfig(),
    ) {
        let parts = [&document["clusters"][0]["cluster"], &document["contexts"][0]["context"]];
        let user = document["users"].as_array().unwrap().last().unwrap();
        let has_harmful_field = parts.into_iter().chain([&user["user"]]).any(|part| {
            part.as_object().unwrap().iter().any(|(key, value)| {
                key == "surprise" || !is_harmless(key, value)
            })
        });
        if has_harmful_field {
            prop_assert!(parse(document.to_string().as_bytes(), &Policy::default()).is_err());
        }
    }

    #[test]
    fn arbitrary_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..2000)) {
        prop_assert!(parse(&bytes, &Policy::default()).is_err());
        prop_assert_eq!(broken_promise(&bytes, &policy_of(u8::MAX)), None);
    }

    #[test]
    fn arbitrary_yaml_like_text_never_panics(text in "([-a-z&*:{}\\[\\]!|>'\"#\n ]|<<|https://|token: |user: ){0,200}") {
        prop_assert!(parse(text.as_bytes(), &Policy::default()).is_err());
        prop_assert_eq!(broken_promise(text.as_bytes(), &policy_of(u8::MAX)), None);
    }

    #[test]
    fn a_good_kubeconfig_with_damaged_bytes_never_panics(
        at in 0..600usize, byte: u8, cut in 0..600usize,
    ) {
        let mut bytes = json!({
            "clusters": [{ "name": "k", "cluster": { "server": "https://edge:6443" } }],
            "contexts": [{ "name": "c", "context": { "cluster": "k", "user": "u" } }],
            "users": [{ "name": "u", "user": { "token": "canary" } }],
            "current-context": "c",
        })
        .to_string()
        .into_bytes();
        let at = at % bytes.len();
        bytes[at] = byte;
        bytes.truncate(bytes.len() - cut % 3);
        prop_assert_eq!(broken_promise(&bytes, &Policy::default()), None);
    }
}

/// The corpus contains seeds and the fuzzer's findings. Each file's name gives its expected result.
#[test]
fn the_fuzzers_corpus_keeps_every_promise() {
    for (name, bytes) in shared::seeds("kubeconfig") {
        let (strict, lax) = match name.split_once('-').unwrap().0 {
            "good" => (true, true),
            "admitted" => (false, true),
            "refused" => (false, false),
            _ => panic!("{name} says neither good, admitted nor refused"),
        };
        for (policy, is_accepted) in [(Policy::default(), strict), (policy_of(u8::MAX), lax)] {
            let parsed = parse(&bytes, &policy);
            assert_eq!(parsed.is_ok(), is_accepted, "{name}: {parsed:?}");
        }
        // No switch, each switch alone, and all switches.
        let single_bits = (0..8).map(|position| 1 << position);
        for bits in single_bits.chain([0, u8::MAX]) {
            let broken = broken_promise(&bytes, &policy_of(bits));
            assert_eq!(broken, None, "{name}, {bits}");
        }
    }
}
