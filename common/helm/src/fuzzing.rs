//! Properties of every input. The fuzzer checks them on generated inputs, and a test checks them on the
//! seeds.

use krypton_types::error_chain::chain;
use krypton_types::redact::HIDDEN;

use crate::chart::index::find_entry;
use crate::chart::oci::challenge::{self, Challenge};
use crate::chart::range::Range;
use crate::chart::version::{self, RequestedVersion, VersionSelector};
use crate::chart::{CHART_LIMIT, archive_properties, oci, provenance};
use crate::driver::stderr::{self, HelmStderr, REMOVED_KIND_REMEDY, SECRET_MIN};
use crate::releases::{self, Status};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use reqwest::Url;
use serde_json::{Map, Value};
use std::io::Read as _;

#[path = "../../../fuzz/shared.rs"]
pub(crate) mod shared;
use shared::{Target, message_defect, promise};
/// All targets, by the names of their folders of seeds.
pub const TARGETS: &[(&str, Target)] = &[
    ("challenge", challenge),
    ("chart", chart),
    ("complaint", complaint),
    ("index", index),
    ("link", link),
    ("manifest", manifest),
    ("range", range),
    ("release", release),
    ("tags", tags),
    ("token", token),
];

/// Checks a packaged chart.
pub fn chart(bytes: &[u8]) -> Option<String> {
    archive_properties::broken_promise(bytes)
}

/// Checks the `index.yaml` of a repository.
pub fn index(bytes: &[u8]) -> Option<String> {
    ["", "^1", "1.1.0"].into_iter().find_map(|requested| {
        let selector = RequestedVersion::parse(requested)?.selector;
        let entry = match find_entry("small", &selector, bytes) {
            Ok(entry) => entry,
            Err(error) => return message_defect(&chain(&error)),
        };
        let version = version::parse(&entry.version);
        let is_match = version.is_some_and(|version| match &selector {
            VersionSelector::Newest => version.pre.is_empty(),
            VersionSelector::Range(range) => range.matches(&version),
            VersionSelector::Exact(exact) => version::same(exact, &entry.version),
        });
        promise!(is_match, "{requested:?} is {entry:?}");
        let empty = entry.url.is_empty() || entry.digest.as_deref() == Some("");
        promise!(!empty, "{entry:?}");
        let exact = VersionSelector::Exact(entry.version.clone());
        let again = find_entry("small", &exact, bytes);
        promise!(
            again.as_ref().is_ok_and(|again| *again == entry),
            "{entry:?} is found again as {again:?}"
        );
        None
    })
}

/// Checks the manifest of a chart in a registry.
pub fn manifest(bytes: &[u8]) -> Option<String> {
    let layers = match oci::layers(bytes) {
        Ok(layers) => layers,
        Err(error) => return message_defect(&chain(&error)),
    };
    let provenance_layer = layers.provenance.as_ref();
    let layers = [
        (Some(&layers.chart), &oci::CONTENT_TYPES[..], CHART_LIMIT),
        (provenance_layer, &[oci::PROVENANCE_TYPE], provenance::LIMIT),
    ];
    for (layer, media_types, limit) in layers {
        let Some(layer) = layer else { continue };
        let media_type = layer.media_type.as_str();
        promise!(
            media_types.contains(&media_type),
            "the media type is {media_type:?}"
        );
        let digest = layer.digest.strip_prefix("sha256:");
        promise!(digest.is_some_and(version::is_sha256), "{digest:?}");
        promise!(layer.size <= limit, "{} bytes", layer.size);
    }
    None
}

/// Checks a registry's list of tags.
pub fn tags(bytes: &[u8]) -> Option<String> {
    let versions = oci::versions_in(bytes)?;
    for version in &versions {
        promise!(version::parse(version).is_some(), "{version:?}");
        let tag = oci::tag(version);
        let is_legal = |c: char| c.is_ascii_alphanumeric() || "_.-".contains(c);
        promise!(tag.chars().all(is_legal), "the tag {tag:?}");
        let again = oci::versions_in(format!(r#"{{"tags":[{tag:?}]}}"#).as_bytes());
        promise!(
            again
                .as_ref()
                .is_some_and(|again| again == std::slice::from_ref(version)),
            "{tag:?} is {again:?}"
        );
    }
    None
}

/// Checks the response to a request for a token.
pub fn token(bytes: &[u8]) -> Option<String> {
    let header = oci::token_header(bytes)?;
    promise!(header.is_sensitive(), "it is shown");
    let token = header.as_bytes().strip_prefix(b"Bearer ");
    promise!(token.is_some_and(|token| !token.is_empty()), "{token:?}");
    None
}

/// Checks `WWW-Authenticate` headers, one per line.
pub fn challenge(bytes: &[u8]) -> Option<String> {
    let text = String::from_utf8_lossy(bytes);
    let challenge = challenge::parse(text.lines())?;
    let Challenge::Bearer {
        realm,
        service,
        scope,
    } = &challenge
    else {
        return None;
    };
    let quoted = |text: &str| text.replace('\\', r"\\").replace('"', r#"\""#);
    let parameters = [("service", service), ("scope", scope)].map(|(name, value)| {
        let value = value.as_ref();
        value.map_or(String::new(), |value| {
            format!(r#", {name}="{}""#, quoted(value))
        })
    });
    let written = format!(r#"Bearer realm="{}"{}"#, quoted(realm), parameters.concat());
    let again = challenge::parse(std::iter::once(written.as_str()));
    promise!(
        again.as_ref() == Some(&challenge),
        "{challenge:?} is {again:?}"
    );
    let url = oci::realm_url(realm)?;
    let host = url.host_str().unwrap_or_default();
    promise!(
        !host.is_empty() && ["http", "https"].contains(&url.scheme()),
        "it points to {url}"
    );
    None
}

/// Checks the `Link` header of a page of tags.
pub fn link(bytes: &[u8]) -> Option<String> {
    let text = String::from_utf8_lossy(bytes);
    let base = Url::parse("https://registry.example.com/v2/small/tags/list?n=1000").ok()?;
    if let Some(next) = oci::next_page_url(&base, &text) {
        promise!(next.origin() == base.origin(), "it points to {next}");
    }
    if !text.contains('>') {
        let link = format!(r#"</a>; rel="prev", <{text}>; title="a, b"; rel="next""#);
        let target = oci::next_page(&link);
        promise!(target == Some(&text), "{link:?} leads to {target:?}");
    }
    None
}

/// Checks the version of a chart in the desired state.
pub fn range(bytes: &[u8]) -> Option<String> {
    let text = String::from_utf8_lossy(bytes);
    let requested = RequestedVersion::parse(&text)?;
    match &requested.selector {
        VersionSelector::Newest => promise!(text.is_empty(), "{text:?} is {requested:?}"),
        VersionSelector::Exact(version) => {
            promise!(version::parse(version).is_some(), "{requested:?}");
            promise!(text.starts_with(version.as_str()), "{requested:?}");
        }
        VersionSelector::Range(range) => {
            promise!(requested.sha256.is_none(), "{requested:?}");
            let again = Range::parse(&range.to_text());
            promise!(again.as_ref() == Some(range), "{range:?} is {again:?}");
        }
    }
    None
}

/// Checks a release Secret: the payload as Helm stores it, or its JSON or gzip stream.
pub fn release(bytes: &[u8]) -> Option<String> {
    let data = match bytes {
        [b'{', ..] | [0x1f, 0x8b, ..] => STANDARD.encode(bytes).into_bytes(),
        _ => bytes.to_vec(),
    };
    let secret = Secret {
        metadata: ObjectMeta {
            name: Some(releases::secret_name("small", 1)),
            namespace: Some("acme".to_owned()),
            resource_version: Some("1".to_owned()),
            ..ObjectMeta::default()
        },
        data: Some([(releases::DATA_KEY.to_owned(), ByteString(data))].into()),
        ..Secret::default()
    };
    let mut unpacked = Vec::new();
    let result = releases::payload(&secret).ok()?.read_to_end(&mut unpacked);
    let is_too_large = unpacked.len() as u64 > releases::PAYLOAD_LIMIT;
    promise!(!is_too_large, "it unpacks to {} bytes", unpacked.len());
    let decoded = match releases::decode(&secret) {
        Ok(decoded) => decoded,
        Err(error) => return message_defect(&chain(&error)),
    };
    promise!(result.is_ok(), "it is damaged: {result:?}");
    promise!(
        decoded.name == "small" && decoded.revision == 1,
        "{decoded:?}"
    );
    let all_named = decoded
        .workloads
        .iter()
        .all(|workload| !workload.name.is_empty());
    promise!(all_named, "{:?}", decoded.workloads);
    if let Ok(Some(strict)) = releases::strict_objects(&secret) {
        let all = match releases::objects(&secret) {
            Ok(all) => all,
            Err(error) => return Some(chain(&error)),
        };
        let all_known = strict.iter().all(|object| all.objects.contains(object));
        promise!(all_known && all.unreadable == 0, "{strict:?} and {all:?}");
    }
    if let Err(error) = releases::check_keys(&secret) {
        return message_defect(&chain(&error));
    }
    let unlocked = match releases::unlocked(&secret, "stopped") {
        Ok(unlocked) => unlocked,
        Err(error) => return Some(format!("it is not unlocked: {}", chain(&error))),
    };
    let expected = releases::Release {
        status: Status::Failed,
        description: "stopped".to_owned(),
        ..decoded
    };
    let again = releases::decode(&unlocked);
    promise!(
        again.as_ref().is_ok_and(|again| *again == expected),
        "{expected:?} is unlocked as {again:?}"
    );
    let digests = [&secret, &unlocked].map(|secret| releases::digest(secret).ok());
    promise!(digests[0] == digests[1], "digests {digests:?}");
    None
}

/// Checks Helm's error output around a secret, which is the first line of the input.
pub fn complaint(bytes: &[u8]) -> Option<String> {
    let text = String::from_utf8_lossy(bytes);
    let (secret, output) = text.split_once('\n').unwrap_or(("", &text));
    let values = Map::from_iter([("password".to_owned(), Value::from(secret))]);
    let secrets = stderr::secrets(&values, &[]);
    let (before, after) = output.split_at(output.floor_char_boundary(output.len() / 2));
    let quoted = Value::from(secret).to_string();
    let quoted = quoted.strip_prefix('"')?.strip_suffix('"')?;
    for form in [secret, &STANDARD.encode(secret), quoted] {
        let output = format!("{before}{form}{after}");
        let parsed = HelmStderr::parse(output.as_bytes(), &secrets);
        if let Some(problem) = message_defect(&parsed.text) {
            return Some(problem);
        }
        promise!(parsed.text.len() <= stderr::TEXT_MAX, "{:?}", parsed.text);
        // Remove Krypton's own texts, because a secret may equal a part of them.
        let shown = parsed
            .text
            .strip_suffix(REMOVED_KIND_REMEDY)
            .unwrap_or(&parsed.text);
        let shown = shown.replace(HIDDEN, "\n").replace('…', "\n");
        let leaked = form.len() >= SECRET_MIN && shown.contains(form);
        promise!(!leaked, "{form:?} is shown in {:?}", parsed.text);
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    #[test]
    fn each_seed_keeps_its_promises() {
        shared::replay(TARGETS);
    }
}
