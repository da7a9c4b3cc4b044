//! Properties of every input. The fuzzer checks them on generated inputs, and a test checks them on the
//! seeds.

use krypton_types::error_chain::chain;
use krypton_types::redact::HIDDEN;

use crate::chart::index::find;
use crate::chart::oci::challenge::{self, Challenge};
use crate::chart::range::Range;
use crate::chart::version::{self, Asked, Wanted};
use crate::chart::{CHART_LIMIT, ChartRef, archive_promises, oci, provenance};
use crate::driver::stderr::{self as complaint, Complaint, SHORTEST_SECRET, WAY_OUT};
use crate::releases::{self, Status};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use reqwest::Url;
use serde_json::{Map, Value};
use std::io::Read as _;
use std::sync::Arc;

#[path = "../../../fuzz/shared.rs"]
mod shared;
use shared::{Target, promise, unfit};
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
    archive_promises::broken_promise(bytes)
}

fn small(version: &str) -> Arc<ChartRef> {
    Arc::new(ChartRef {
        repo: "https://charts.example.com".to_owned(),
        name: "small".to_owned(),
        version: version.to_owned(),
    })
}

/// Checks the `index.yaml` of a repository.
pub fn index(bytes: &[u8]) -> Option<String> {
    ["", "^1", "1.1.0"].into_iter().find_map(|asked| {
        let (chart, wanted) = (small(asked), Asked::parse(asked)?.wanted);
        let entry = match find(&chart, &wanted, bytes) {
            Ok(entry) => entry,
            Err(error) => return unfit(&chain(&error)),
        };
        let version = version::parse(&entry.version);
        let meant = version.is_some_and(|version| match &wanted {
            Wanted::Newest => version.pre.is_empty(),
            Wanted::Range(range) => range.fits(&version),
            Wanted::Exact(exact) => version::same(exact, &entry.version),
        });
        promise!(meant, "{asked:?} is {entry:?}");
        let empty = entry.url.is_empty() || entry.digest.as_deref() == Some("");
        promise!(!empty, "{entry:?}");
        let exact = Wanted::Exact(entry.version.clone());
        let again = find(&chart, &exact, bytes);
        promise!(
            again.as_ref().is_ok_and(|again| *again == entry),
            "{entry:?} is found again as {again:?}"
        );
        None
    })
}

/// Checks the manifest of a chart in a registry.
pub fn manifest(bytes: &[u8]) -> Option<String> {
    let layers = match oci::layers(&small("1.0.0"), bytes) {
        Ok(layers) => layers,
        Err(error) => return unfit(&chain(&error)),
    };
    let proof = layers.provenance.as_ref();
    let layers = [
        (Some(&layers.chart), &oci::CONTENT[..], CHART_LIMIT),
        (proof, &[oci::PROVENANCE], provenance::LIMIT),
    ];
    for (layer, kinds, limit) in layers {
        let Some(layer) = layer else { continue };
        let kind = layer.media_type.as_str();
        promise!(kinds.contains(&kind), "the media type is {kind:?}");
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
        let legal = |c: char| c.is_ascii_alphanumeric() || "_.-".contains(c);
        promise!(tag.chars().all(legal), "the tag {tag:?}");
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
    let header = oci::authorization_in(bytes)?;
    promise!(header.is_sensitive(), "it is shown");
    let token = header.as_bytes().strip_prefix(b"Bearer ");
    promise!(token.is_some_and(|token| !token.is_empty()), "{token:?}");
    None
}

/// Checks `WWW-Authenticate` headers, one per line.
pub fn challenge(bytes: &[u8]) -> Option<String> {
    let text = String::from_utf8_lossy(bytes);
    let read = challenge::parse(text.lines())?;
    let Challenge::Bearer {
        realm,
        service,
        scope,
    } = &read
    else {
        return None;
    };
    let quoted = |text: &str| text.replace('\\', r"\\").replace('"', r#"\""#);
    let more = [("service", service), ("scope", scope)].map(|(name, value)| {
        let value = value.as_ref();
        value.map_or(String::new(), |value| {
            format!(r#", {name}="{}""#, quoted(value))
        })
    });
    let written = format!(r#"Bearer realm="{}"{}"#, quoted(realm), more.concat());
    let again = challenge::parse(std::iter::once(written.as_str()));
    promise!(again.as_ref() == Some(&read), "{read:?} is {again:?}");
    let url = oci::address_of(realm)?;
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
    if let Some(next) = oci::next_address(&base, &text) {
        promise!(next.origin() == base.origin(), "it points to {next}");
    }
    if !text.contains('>') {
        let link = format!(r#"</a>; rel="prev", <{text}>; title="a, b"; rel="next""#);
        let found = oci::next_page(&link);
        promise!(found == Some(&text), "{link:?} leads to {found:?}");
    }
    None
}

/// Checks the version of a chart in the desired state.
pub fn range(bytes: &[u8]) -> Option<String> {
    let text = String::from_utf8_lossy(bytes);
    let asked = Asked::parse(&text)?;
    match &asked.wanted {
        Wanted::Newest => promise!(text.is_empty(), "{text:?} is {asked:?}"),
        Wanted::Exact(version) => {
            promise!(version::parse(version).is_some(), "{asked:?}");
            promise!(text.starts_with(version.as_str()), "{asked:?}");
        }
        Wanted::Range(range) => {
            promise!(asked.sha256.is_none(), "{asked:?}");
            let written = range.written();
            let again = Range::parse(&written);
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
    let whole = releases::payload(&secret).ok()?.read_to_end(&mut unpacked);
    let large = unpacked.len() as u64 > releases::LARGEST;
    promise!(!large, "it unpacks to {} bytes", unpacked.len());
    let decoded = match releases::decode(&secret) {
        Ok(decoded) => decoded,
        Err(error) => return unfit(&chain(&error)),
    };
    promise!(whole.is_ok(), "it is damaged: {whole:?}");
    promise!(
        decoded.name == "small" && decoded.revision == 1,
        "{decoded:?}"
    );
    let named = decoded
        .workloads
        .iter()
        .all(|workload| !workload.name.is_empty());
    promise!(named, "{:?}", decoded.workloads);
    if let Ok(Some(strict)) = releases::strict_objects(&secret) {
        let all = match releases::objects(&secret) {
            Ok(all) => all,
            Err(error) => return Some(chain(&error)),
        };
        let known = strict.iter().all(|object| all.objects.contains(object));
        promise!(known && all.unread == 0, "{strict:?} and {all:?}");
    }
    if let Err(error) = releases::check_keys(&secret) {
        return unfit(&chain(&error));
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
    let (secret, said) = text.split_once('\n').unwrap_or(("", &text));
    let values = Map::from_iter([("password".to_owned(), Value::from(secret))]);
    let secrets = complaint::secrets(&values, &[]);
    let (before, after) = said.split_at(said.floor_char_boundary(said.len() / 2));
    let quoted = Value::from(secret).to_string();
    let quoted = quoted.strip_prefix('"')?.strip_suffix('"')?;
    for form in [secret, &STANDARD.encode(secret), quoted] {
        let stderr = format!("{before}{form}{after}");
        let read = Complaint::of(stderr.as_bytes(), &secrets);
        if let Some(broken) = unfit(&read.text) {
            return Some(broken);
        }
        promise!(read.text.len() <= complaint::LONGEST, "{:?}", read.text);
        // Remove Krypton's own texts, because a secret may equal a part of them.
        let shown = read.text.strip_suffix(WAY_OUT).unwrap_or(&read.text);
        let shown = shown.replace(HIDDEN, "\n").replace('…', "\n");
        let leaked = form.len() >= SHORTEST_SECRET && shown.contains(form);
        promise!(!leaked, "{form:?} is shown in {:?}", read.text);
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
