//! Promises about every input. The fuzzer checks them on the inputs that it finds, and a test on the seeds.

use krypton_helm::releases::labels::ReleaseKey;
use krypton_helm::releases::record::{self, ReleaseRecord, Verdict};

use crate::drift::difference::differences;
use crate::drift::ignore::{self, keep};
use crate::drift::json_pointer::{Step, escaped, steps};
use crate::record::{self as desired_record, Advance};
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use serde_json::Value;

#[path = "../../../fuzz/shared.rs"]
mod shared;
use shared::{Target, promise, unfit};
/// By the names of the folders of seeds.
pub const TARGETS: &[(&str, Target)] = &[("pointer", pointer), ("record", record)];

/// Rules for drift in the first line, and after it what is applied and what is there.
pub fn pointer(bytes: &[u8]) -> Option<String> {
    let text = String::from_utf8_lossy(bytes);
    let (annotation, documents) = text.split_once('\n').unwrap_or((&text, ""));
    if let Some(read) = steps(annotation) {
        let written = read.iter().map(|step| match step {
            Step::Any => "/*".to_owned(),
            Step::Of(step) => format!("/{}", escaped(step)),
        });
        let again = steps(&written.collect::<String>());
        promise!(again.as_ref() == Some(&read), "{read:?} is {again:?}");
    }
    let (rules, wrong) = ignore::read(annotation);
    if let Some(broken) = wrong.as_deref().and_then(unfit) {
        return Some(broken);
    }
    promise!(rules.len() <= ignore::MOST, "{} rules", rules.len());
    let mut documents = serde_json::Deserializer::from_str(documents).into_iter::<Value>();
    let mut next = || documents.next()?.ok();
    let (mut applied, live) = (next()?, next()?);
    for pointer in differences(&live, &applied) {
        promise!(
            live.pointer(&pointer) != applied.pointer(&pointer),
            "no difference at {pointer:?}"
        );
    }
    for rule in &rules {
        let before = applied.clone();
        keep(&mut applied, &live, rule);
        for pointer in differences(&before, &applied) {
            promise!(rule.covers(&pointer), "{rule:?} has changed {pointer:?}");
        }
    }
    None
}

/// The records on a member: a desired state, or the digests of a release.
pub fn record(bytes: &[u8]) -> Option<String> {
    let secret = |key: &str, content: &[u8]| Secret {
        data: Some([(key.to_owned(), ByteString(content.to_vec()))].into()),
        ..Secret::default()
    };
    if let Some(desired) = desired_record::read(&secret(desired_record::KEY, bytes)) {
        let written = serde_json::to_vec(&desired).ok()?;
        let again = desired_record::read(&secret(desired_record::KEY, &written));
        promise!(again.as_ref() == Some(&desired), "{desired:?} is {again:?}");
        let advance = desired_record::advance(again.as_ref(), &desired);
        promise!(advance == Advance::Recorded, "{advance:?}");
        promise!(desired.size() == written.len(), "{} bytes", desired.size());
    }
    let release = |name: &str| ReleaseKey {
        namespace: "acme".to_owned(),
        name: name.to_owned(),
    };
    let of = |release, content: &[u8]| record::stored(&secret(record::KEY, content), &release);
    let mut record = ReleaseRecord::default();
    record.digests = of(release("small"), bytes)?;
    promise!(
        of(release("other"), bytes).is_none(),
        "two releases have the same record"
    );
    let written = record.to_secret(&release("small")).ok()?;
    let again = record::stored(&written, &release("small"));
    promise!(again.as_ref() == Some(&record.digests), "it is {again:?}");
    for (revision, digest) in &record.digests {
        let verdict = record.verdict(*revision, digest);
        promise!(verdict == Verdict::Recorded, "{revision} is {verdict:?}");
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
