//! Promises about every input. The fuzzer checks them on the inputs that it finds, and a test on the seeds.

use krypton_helm::releases::labels::ReleaseKey;
use krypton_helm::releases::record::{self, RecordComparison, ReleaseRecord};

use crate::drift::difference::differences;
use crate::drift::ignore::{self, copy_live_value};
use crate::drift::json_pointer::{self, PointerStep};
use crate::record::{self as desired_record, RecordAction};
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use serde_json::Value;

#[path = "../../../fuzz/shared.rs"]
mod shared;
use shared::{Target, message_defect, promise};
/// By the names of the folders of seeds.
pub const TARGETS: &[(&str, Target)] = &[("pointer", pointer), ("record", record)];

/// Rules for drift in the first line, and after it what is applied and what is there.
pub fn pointer(bytes: &[u8]) -> Option<String> {
    let text = String::from_utf8_lossy(bytes);
    let (annotation, documents) = text.split_once('\n').unwrap_or((&text, ""));
    if let Some(steps) = json_pointer::parse(annotation) {
        let formatted = steps.iter().map(|step| match step {
            PointerStep::Wildcard => "/*".to_owned(),
            PointerStep::Key(key) => format!("/{}", json_pointer::escape(key)),
        });
        let parsed = json_pointer::parse(&formatted.collect::<String>());
        promise!(parsed.as_ref() == Some(&steps), "{steps:?} is {parsed:?}");
    }
    let (rules, error) = ignore::parse_rules(annotation);
    if let Some(broken) = error.as_deref().and_then(message_defect) {
        return Some(broken);
    }
    promise!(rules.len() <= ignore::MAX_RULES, "{} rules", rules.len());
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
        let previous = applied.clone();
        copy_live_value(&mut applied, &live, rule);
        for pointer in differences(&previous, &applied) {
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
    if let Some(desired) = desired_record::parse(&secret(desired_record::RECORD_KEY, bytes)) {
        let written = serde_json::to_vec(&desired).ok()?;
        let reread = desired_record::parse(&secret(desired_record::RECORD_KEY, &written));
        promise!(
            reread.as_ref() == Some(&desired),
            "{desired:?} is {reread:?}"
        );
        let action = desired_record::decide(reread.as_ref(), &desired);
        promise!(action == RecordAction::AlreadyRecorded, "{action:?}");
        promise!(desired.size() == written.len(), "{} bytes", desired.size());
    }
    let release = |name: &str| ReleaseKey::new("acme", name);
    let digests_of =
        |release, content: &[u8]| record::digests_in(&secret(record::KEY, content), &release);
    let mut record = ReleaseRecord::default();
    record.digests = digests_of(release("small"), bytes)?;
    promise!(
        digests_of(release("other"), bytes).is_none(),
        "two releases have the same record"
    );
    let written = record.to_secret(&release("small")).ok()?;
    let reread = record::digests_in(&written, &release("small"));
    promise!(reread.as_ref() == Some(&record.digests), "it is {reread:?}");
    for (revision, digest) in &record.digests {
        let comparison = record.compare(*revision, digest);
        promise!(
            comparison == RecordComparison::Recorded,
            "{revision} is {comparison:?}"
        );
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
