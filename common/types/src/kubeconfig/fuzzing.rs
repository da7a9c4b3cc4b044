//! Invariants of the sanitizer for every input, good or bad. The property tests check them on almost valid inputs,
//! and the fuzzer checks them on arbitrary ones.

use serde_json::Value;

use super::{
    KubeconfigError, Policy, SanitizedKubeconfig, address, parse, parse_other_contexts,
    refused_address,
};
use crate::fingerprint;

/// Limit of a condition's message.
const MESSAGE_MAX: usize = 1024;
/// Keys of a rebuilt kubeconfig under the strict policy.
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
/// Contexts that are checked. The fuzzer can write more, which would take long.
const CONTEXTS_MAX: usize = 8;
/// A shorter token can occur in any text by chance.
const SECRET_MIN: usize = 12;

/// Returns a policy with each switch set from one bit.
pub fn policy_of(bits: u8) -> Policy {
    let bit = |position: u8| bits >> position & 1 == 1;
    Policy {
        allow_exec: bit(0),
        allow_auth_provider: bit(1),
        allow_token_file: bit(2),
        allow_files: bit(3),
        allow_insecure_tls: bit(4),
        allow_loopback: bit(5),
        allow_link_local: bit(6),
        allow_proxy: bit(7),
    }
}

/// Returns the first invariant that this input and policy violate.
pub fn broken_promise(bytes: &[u8], policy: &Policy) -> Option<String> {
    let current = parse(bytes, policy);
    let others = parse_other_contexts(bytes, policy, CONTEXTS_MAX).unwrap_or_default();
    let mut contexts = std::iter::once(&current).chain(others.values());
    let broken = contexts.find_map(|context| match context {
        Ok(sanitized) => broken_by_result(sanitized, policy),
        Err(error) => broken_by_error(error),
    });
    broken.or_else(|| broken_by_policy(bytes, policy))
}

fn broken_by_error(error: &KubeconfigError) -> Option<String> {
    let text = error.to_string();
    if text.len() > MESSAGE_MAX {
        return Some(format!("a message of {} bytes", text.len()));
    }
    let has_control = text.chars().any(char::is_control);
    has_control.then(|| format!("a control character in the message {text:?}"))
}

fn broken_by_result(sanitized: &SanitizedKubeconfig, policy: &Policy) -> Option<String> {
    let Ok(rebuilt) = serde_json::from_str::<Value>(&sanitized.yaml) else {
        return Some("the rebuilt kubeconfig is not JSON".to_owned());
    };
    let [cluster, user] = ["/clusters/0/cluster", "/users/0/user"]
        .map(|part| rebuilt.pointer(part).cloned().unwrap_or_default());
    let secrets = ["token", "client-key-data"].map(|key| user.get(key).and_then(Value::as_str));
    let debug = format!("{sanitized:?}");
    let is_shown = |secret: &str| secret.len() >= SECRET_MIN && debug.contains(secret);
    None.or_else(|| broken_keys(&rebuilt, policy))
        .or_else(|| broken_addresses(sanitized, policy))
        .or_else(|| {
            let is_same = cluster.get("server").and_then(Value::as_str) == Some(&sanitized.server);
            (!is_same).then(|| "the server differs from the reported one".to_owned())
        })
        .or_else(|| {
            let any_shown = secrets.into_iter().flatten().any(is_shown);
            any_shown.then(|| "a secret in the debug output".to_owned())
        })
        .or_else(|| {
            let digest = fingerprint::sha256_hex(sanitized.yaml.as_bytes());
            (digest != sanitized.digest).then(|| "the digest does not match".to_owned())
        })
        .or_else(|| match parse(sanitized.yaml.as_bytes(), policy) {
            Ok(again) if again == *sanitized || again.digest == sanitized.digest => None,
            // The arguments of a program grow if the writer uses more escapes.
            Err(KubeconfigError::TooLarge { .. })
                if policy.allow_exec || policy.allow_auth_provider =>
            {
                None
            }
            again => Some(format!("parsing it again gives {again:?}")),
        })
}

/// Checks that every key is allowed and that none comes from the input's author.
fn broken_keys(rebuilt: &Value, policy: &Policy) -> Option<String> {
    let mut unchecked = vec![rebuilt];
    while let Some(value) = unchecked.pop() {
        match value {
            Value::Object(map) => {
                for (key, value) in map {
                    let is_allowed = match key.as_str() {
                        "exec" => policy.allow_exec,
                        "auth-provider" => policy.allow_auth_provider,
                        "tokenFile" => policy.allow_token_file,
                        "certificate-authority" | "client-certificate" | "client-key" => {
                            policy.allow_files
                        }
                        "insecure-skip-tls-verify" => policy.allow_insecure_tls,
                        "proxy-url" => policy.allow_proxy,
                        key => ALLOWED.contains(&key),
                    };
                    if !is_allowed {
                        return Some(format!("the rebuilt kubeconfig contains {key:?}"));
                    }
                    // These values are copied unchanged.
                    if !matches!(key.as_str(), "exec" | "auth-provider") {
                        unchecked.push(value);
                    }
                }
            }
            Value::Array(items) => unchecked.extend(items),
            _ => {}
        }
    }
    None
}

fn broken_addresses(sanitized: &SanitizedKubeconfig, policy: &Policy) -> Option<String> {
    if !sanitized.server.starts_with("https://") {
        return Some("the server has no https URL".to_owned());
    }
    let hops = [Some(&sanitized.authority), sanitized.proxy.as_ref()];
    hops.into_iter().flatten().find_map(|authority| {
        let ip = authority.host.parse().ok();
        let is_refused = ip.is_some_and(|ip| refused_address(ip, policy).is_some())
            || address::refused_host(&authority.host, policy).is_some();
        // The colons of an IPv6 address do not form a last label.
        let is_ambiguous = ip.is_none() && address::is_ambiguous_number(&authority.host);
        let is_invalid =
            is_refused || is_ambiguous || authority.port == 0 || authority.host.is_empty();
        is_invalid.then(|| format!("it points to {authority:?}"))
    })
}

/// Checks that every policy gives the same result for input that the strict policy accepts.
fn broken_by_policy(bytes: &[u8], policy: &Policy) -> Option<String> {
    let strict = parse(bytes, &Policy::default()).ok()?;
    match parse(bytes, policy) {
        Ok(sanitized) if sanitized == strict => None,
        other => Some(format!("{strict:?} when nothing is allowed, and {other:?}")),
    }
}
