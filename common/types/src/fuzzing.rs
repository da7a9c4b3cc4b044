//! Invariants that hold for every input. The fuzzer checks them on the inputs that it finds, and a test checks them
//! on the seeds.

use rustls::pki_types::CertificateDer;
use serde_json::{Map, Value};

use crate::error_chain::chain;
use crate::join_bundle::{JoinBundle, is_token, split_address};
use crate::kubeconfig::Policy;
use crate::kubeconfig::fuzzing::{broken_promise, policy_of};
use crate::names::is_dns_subdomain;
use crate::redact::{has_userinfo, redact, url_shown};
use crate::spiffe::{Role, SpiffeId};
use crate::values::{merge, pointers_from, size, value_at};

#[path = "../../../fuzz/shared.rs"]
pub(crate) mod shared;
use shared::{Target, message_defect, promise};

/// Targets by the name of their seed folder.
pub const TARGETS: &[(&str, Target)] = &[
    ("bundle", bundle),
    ("kubeconfig", kubeconfig),
    ("redaction", redaction),
    ("spiffe", spiffe),
    ("values", values),
];

/// Checks a kubeconfig from a Secret under several policies.
pub fn kubeconfig(bytes: &[u8]) -> Option<String> {
    // The policy depends only on the input, so a failure is reproducible.
    let bits = bytes
        .iter()
        .fold(0_u8, |bits, byte| bits.rotate_left(3) ^ byte);
    let policies = [Policy::default(), policy_of(bits), policy_of(u8::MAX)];
    policies.iter().find_map(|policy| {
        broken_promise(bytes, policy).map(|broken| format!("{policy:?}: {broken}"))
    })
}

/// Checks a join bundle.
pub fn bundle(bytes: &[u8]) -> Option<String> {
    let text = String::from_utf8_lossy(bytes);
    let bundle = match JoinBundle::parse(&text) {
        Ok(bundle) => bundle,
        Err(error) => {
            let message = format!("{} {error:?}", chain(&error));
            let leaked = text
                .split_whitespace()
                .find(|word| is_token(word) && message.contains(word));
            promise!(leaked.is_none(), "the token is in {message}");
            return message_defect(&chain(&error));
        }
    };
    promise!(is_token(&bundle.token), "the token is {:?}", bundle.token);
    promise!(
        !format!("{bundle:?}").contains(&bundle.token),
        "it is shown"
    );
    promise!(!bundle.addresses.is_empty(), "no address");
    for address in &bundle.addresses {
        promise!(split_address(address).is_some(), "{address:?}");
    }
    let roots: fn(&JoinBundle) -> Option<Vec<CertificateDer<'static>>> =
        |bundle| bundle.roots().ok().filter(|roots| !roots.is_empty());
    promise!(roots(&bundle).is_some(), "no roots");
    let again = bundle.to_yaml().ok().map(|yaml| JoinBundle::parse(&yaml));
    promise!(
        again
            .as_ref()
            .is_some_and(|again| again.as_ref().is_ok_and(|again| *again == bundle)),
        "{bundle:?} is read back as {again:?}"
    );
    None
}

/// Checks a text with a secret in its middle, in each supported form.
pub fn redaction(bytes: &[u8]) -> Option<String> {
    const SECRET: &str = "hunter2hunter2";
    let text = String::from_utf8_lossy(bytes).replace(SECRET, "-");
    let (before, after) = text.split_at(text.floor_char_boundary(text.len() / 2));
    // After an open quote, the next quote ends a text instead of starting one.
    let before = before.replace(['"', '\''], "").replace(SECRET, "-");
    for hidden in [
        "-----BEGIN PRIVATE KEY-----\nhunter2hunter2\n-----END PRIVATE KEY-----",
        "https://me:hunter2hunter2@example.com/a",
        "Authorization: Bearer hunter2hunter2",
        "password: hunter2hunter2",
        "db.password = 'hunter2hunter2'",
        r#"{"token":"hunter2hunter2","a":1}"#,
        "--token hunter2hunter2",
        "eyJhbGciOiJ9.hunter2hunter2",
    ] {
        let shown = redact(&format!("{before}\n{hidden}\n{after}"));
        promise!(!shown.contains(SECRET), "{hidden:?} is shown as {shown:?}");
    }
    promise!(
        !has_userinfo(&url_shown(&text)),
        "a user in {:?}",
        url_shown(&text)
    );
    // A password escapes the characters that end an authority.
    let password = text.replace(|c: char| "/?#".contains(c), "");
    let url = format!("https://me:{password}{SECRET}@example.com/c?key={SECRET}#{SECRET}");
    let shown = url_shown(&url);
    promise!(
        shown == "https://example.com/c",
        "{url:?} is shown as {shown:?}"
    );
    None
}

/// Checks a SPIFFE ID, or a certificate that contains one.
pub fn spiffe(bytes: &[u8]) -> Option<String> {
    let uri = std::str::from_utf8(bytes).ok();
    let in_certificate = SpiffeId::from_certificate(bytes);
    let error = in_certificate.as_ref().err();
    if let Some(broken) = error.and_then(|error| message_defect(&chain(error))) {
        return Some(broken);
    }
    if let Some((uri, id)) = uri.and_then(|uri| Some((uri, SpiffeId::parse(uri)?))) {
        promise!(id.to_string() == uri, "{uri:?} is printed as {id}");
    }
    let ids = uri
        .and_then(SpiffeId::parse)
        .into_iter()
        .chain(in_certificate.ok());
    for id in ids {
        promise!(
            SpiffeId::parse(&id.to_string()).as_ref() == Some(&id),
            "{id} is read as another"
        );
        if let Role::Cluster(name) = &id.role {
            promise!(is_dns_subdomain(name) && name.len() <= 63, "{name:?}");
        }
    }
    None
}

/// Checks three layers of values, which are consecutive JSON objects.
pub fn values(bytes: &[u8]) -> Option<String> {
    let layers = serde_json::Deserializer::from_slice(bytes).into_iter::<Map<String, Value>>();
    let layers: Vec<_> = layers.map_while(Result::ok).take(3).collect();
    let mut merged = Map::new();
    for layer in &layers {
        let under = merged.clone();
        merge(&mut merged, layer);
        let mut twice = merged.clone();
        merge(&mut twice, layer);
        promise!(
            twice == merged,
            "{layer:?} over {under:?} is not idempotent"
        );
        let mut alone = Map::new();
        merge(&mut alone, layer);
        promise!(alone == *layer, "{layer:?} over nothing is {alone:?}");
        if let Some(broken) = misplaced_value(&under, layer, &merged) {
            return Some(format!("{layer:?} over {under:?}: {broken}"));
        }
        for pointer in pointers_from(layer, &merged) {
            let value = value_at(&merged, &pointer);
            promise!(
                value.is_some() && value == value_at(layer, &pointer),
                "{pointer:?}"
            );
        }
        let written = serde_json::to_vec(&merged).ok()?;
        let (counted, actual) = (size(&merged), written.len());
        promise!(counted == actual, "{counted} bytes instead of {actual}");
        let again = serde_json::from_slice::<Map<String, Value>>(&written).ok();
        promise!(again.as_ref() == Some(&merged), "{merged:?} is {again:?}");
    }
    None
}

/// Returns a key whose value comes neither from the upper layer nor, without it there, from the lower layer.
fn misplaced_value(
    under: &Map<String, Value>,
    over: &Map<String, Value>,
    merged: &Map<String, Value>,
) -> Option<String> {
    let is_known = |key: &String| under.contains_key(key) || over.contains_key(key);
    promise!(merged.keys().all(is_known), "a key of neither");
    under.keys().chain(over.keys()).find_map(|key| {
        match (under.get(key), over.get(key), merged.get(key)) {
            (
                Some(Value::Object(under)),
                Some(Value::Object(over)),
                Some(Value::Object(merged)),
            ) => misplaced_value(under, over, merged),
            (_, Some(over), Some(value)) if value == over => None,
            (Some(under), None, Some(value)) if value == under => None,
            (_, _, value) => Some(format!("{key:?} is {value:?}")),
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `WRITE_CORPUS=1` writes the seeds that are not text.
    #[test]
    fn each_seed_keeps_its_promises() {
        let certificate = |uris: &[&str]| {
            let mut params = rcgen::CertificateParams::default();
            let names = uris.iter().map(|uri| (*uri).try_into().unwrap());
            params.subject_alt_names = names.map(rcgen::SanType::URI).collect();
            let key = rcgen::KeyPair::generate().unwrap();
            params.self_signed(&key).unwrap().der().to_vec()
        };
        let cluster = "spiffe://example.krypton/cluster/edge-1";
        shared::write(
            "spiffe",
            &[
                ("good-certificate", certificate(&[cluster])),
                ("refused-certificate-without", certificate(&[])),
                (
                    "refused-certificate-twice",
                    certificate(&[cluster, cluster]),
                ),
                (
                    "refused-certificate-https",
                    certificate(&["https://example.com/"]),
                ),
                (
                    "refused-certificate-long",
                    certificate(&[&"\\".repeat(250)]),
                ),
            ],
        );
        shared::replay(TARGETS);
    }
}
