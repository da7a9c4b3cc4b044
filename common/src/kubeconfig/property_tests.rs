use proptest::prelude::*;
use proptest::sample::select;

use super::*;

/// In every value that must not get out; a rebuilt kubeconfig or a message that has it leaks.
const CANARY: &str = "canary";

fn any_value() -> impl Strategy<Value = Value> {
    prop_oneof![
        Just(Value::Null),
        Just(json!("")),
        Just(json!(true)),
        Just(json!(false)),
        Just(json!(42)),
        Just(json!("/etc/canary")),
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

/// A kubeconfig of which each field may be good, bad, odd or absent.
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
    (
        any_fields(CLUSTER),
        any_fields(USER),
        any_fields(CONTEXT),
        0..3usize,
    )
        .prop_map(|(mut cluster, mut user, mut context, others)| {
            cluster.insert("server".to_owned(), json!("https://edge:6443"));
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

fn keys_of(value: &Value, keys: &mut Vec<String>) {
    match value {
        Value::Object(map) => {
            for (key, value) in map {
                keys.push(key.clone());
                keys_of(value, keys);
            }
        }
        Value::Array(items) => items.iter().for_each(|item| keys_of(item, keys)),
        _ => {}
    }
}

/// What an item may hold so that the strict policy can accept it: nothing that has an effect.
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

const ALLOWED: &[&str] = &[
    "apiVersion",
    "kind",
    "current-context",
    "clusters",
    "cluster",
    "users",
    "user",
    "contexts",
    "context",
    "name",
    "namespace",
    "server",
    "certificate-authority-data",
    "tls-server-name",
    "token",
    "client-certificate-data",
    "client-key-data",
];

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn no_output_holds_a_program_a_path_or_an_unknown_field(document in any_kubeconfig()) {
        match parse(document.to_string().as_bytes(), &Policy::default()) {
            Ok(sanitized) => {
                let rebuilt: Value = serde_json::from_str(&sanitized.yaml).unwrap();
                let mut keys = Vec::new();
                keys_of(&rebuilt, &mut keys);
                for key in keys {
                    prop_assert!(ALLOWED.contains(&key.as_str()), "{}", key);
                }
                prop_assert!(!sanitized.yaml.contains("exec"));
                prop_assert!(!sanitized.yaml.contains("/etc/"));
                prop_assert!(!sanitized.yaml.contains("/bin/"));
            }
            Err(error) => prop_assert!(!error.to_string().contains(CANARY), "{}", error),
        }
    }

    #[test]
    fn a_field_with_an_effect_that_is_not_allowed_is_never_just_dropped(
        document in any_kubeconfig(),
    ) {
        let parts = [&document["clusters"][0]["cluster"], &document["contexts"][0]["context"]];
        let user = document["users"].as_array().unwrap().last().unwrap();
        let harmful = parts.into_iter().chain([&user["user"]]).any(|part| {
            part.as_object().unwrap().iter().any(|(key, value)| {
                key == "surprise" || !is_harmless(key, value)
            })
        });
        if harmful {
            prop_assert!(parse(document.to_string().as_bytes(), &Policy::default()).is_err());
        }
    }

    #[test]
    fn a_switch_admits_its_own_field_only(
        document in any_kubeconfig(), exec: bool, provider: bool, token: bool, files: bool, tls: bool,
        loopback: bool, link_local: bool, proxy: bool,
    ) {
        let policy = Policy {
            allow_exec: exec,
            allow_auth_provider: provider,
            allow_token_file: token,
            allow_files: files,
            allow_insecure_tls: tls,
            allow_loopback: loopback,
            allow_link_local: link_local,
            allow_proxy: proxy,
        };
        if let Ok(sanitized) = parse(document.to_string().as_bytes(), &policy) {
            let rebuilt: Value = serde_json::from_str(&sanitized.yaml).unwrap();
            let user = &rebuilt["users"][0]["user"];
            let cluster = &rebuilt["clusters"][0]["cluster"];
            prop_assert!(exec || user.get("exec").is_none());
            prop_assert!(provider || user.get("auth-provider").is_none());
            prop_assert!(token || user.get("tokenFile").is_none());
            prop_assert!(files || user.get("client-key").is_none());
            prop_assert!(files || cluster.get("certificate-authority").is_none());
            prop_assert!(tls || cluster.get("insecure-skip-tls-verify").is_none());
            prop_assert!(proxy || cluster.get("proxy-url").is_none());
            prop_assert!(user.get("as").is_none());
        }
    }

    #[test]
    fn arbitrary_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..2000)) {
        prop_assert!(parse(&bytes, &Policy::default()).is_err());
    }

    #[test]
    fn arbitrary_yaml_like_text_never_panics(text in "([-a-z&*:{}\\[\\]!|>'\"#\n ]|<<|https://|token: |user: ){0,200}") {
        prop_assert!(parse(text.as_bytes(), &Policy::default()).is_err());
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
        if let Ok(sanitized) = parse(&bytes, &Policy::default()) {
            let debug = format!("{sanitized:?}");
            prop_assert!(sanitized.server.starts_with("https://"));
            prop_assert!(!debug.contains(CANARY));
        }
    }
}
