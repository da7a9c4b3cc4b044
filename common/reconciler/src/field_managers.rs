//! Finds the field managers that last changed the spec and the reconcile request of a Tenant or KryptonDeployment.

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{
    FieldsV1, ManagedFieldsEntry, ObjectMeta, Time,
};
use krypton_types::names::RECONCILE_REQUESTED_ANNOTATION;
use serde_json::{Value, json};

/// A part of an object whose change can cause a revision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ObjectPart {
    Spec,
    ReconcileRequest,
}

/// A field manager, and the time of its last change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FieldManager<'a> {
    pub(crate) name: &'a str,
    pub(crate) time: Timestamp,
}

impl ObjectPart {
    /// Returns true if the field set contains the part or a field in it.
    fn is_in(self, fields: &Value) -> bool {
        match self {
            Self::Spec => fields.get("f:spec").is_some(),
            Self::ReconcileRequest => {
                let annotations = fields.pointer("/f:metadata/f:annotations");
                let annotations = annotations.and_then(Value::as_object);
                let mut names = annotations.into_iter().flat_map(|all| all.keys());
                names.any(|name| name.strip_prefix("f:") == Some(RECONCILE_REQUESTED_ANNOTATION))
            }
        }
    }

    /// Returns the field set that contains only the part.
    fn field_set(self) -> Value {
        match self {
            Self::Spec => json!({ "f:spec": {} }),
            Self::ReconcileRequest => {
                let name = format!("f:{RECONCILE_REQUESTED_ANNOTATION}");
                json!({ "f:metadata": { "f:annotations": { name: {} } } })
            }
        }
    }
}

/// Returns the manager that changed the part last. Ignores entries of subresources such as `status`, and entries
/// without name, time or fields.
pub(crate) fn last_manager(metadata: &ObjectMeta, part: ObjectPart) -> Option<FieldManager<'_>> {
    let entries = metadata.managed_fields.iter().flatten();
    let managers = entries.filter_map(|entry| manager(entry, part));
    managers.max_by_key(|manager| manager.time)
}

fn manager(entry: &ManagedFieldsEntry, part: ObjectPart) -> Option<FieldManager<'_>> {
    let name = entry.manager.as_deref()?;
    let time = entry.time.as_ref()?.0;
    let fields = &entry.fields_v1.as_ref()?.0;
    let is_subresource = entry.subresource.as_ref().is_some_and(|it| !it.is_empty());
    let is_printable = !name.trim().is_empty() && !name.contains(char::is_control);
    (is_printable && !is_subresource && part.is_in(fields)).then_some(FieldManager { name, time })
}

/// Reduces the managed fields to the last manager of each part, as all of them are larger than the rest of the object.
pub fn keep_last_managers(metadata: &mut ObjectMeta) {
    let kept = [ObjectPart::Spec, ObjectPart::ReconcileRequest].map(|part| {
        let manager = last_manager(metadata, part)?;
        Some(ManagedFieldsEntry {
            manager: Some(manager.name.to_owned()),
            time: Some(Time(manager.time)),
            fields_v1: Some(FieldsV1(part.field_set())),
            ..ManagedFieldsEntry::default()
        })
    });
    let kept: Vec<ManagedFieldsEntry> = kept.into_iter().flatten().collect();
    metadata.managed_fields = (!kept.is_empty()).then_some(kept);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(manager: &str, second: i64, fields: Value) -> Value {
        let time = Timestamp::from_second(second).unwrap();
        json!({ "manager": manager, "time": time, "fieldsType": "FieldsV1", "fieldsV1": fields })
    }

    fn metadata(entries: Vec<Value>) -> ObjectMeta {
        serde_json::from_value(json!({ "managedFields": entries })).unwrap()
    }

    fn spec() -> Value {
        json!({ "f:spec": { ".": {}, "f:values": { ".": {}, "f:a": {}, "f:b": {} } } })
    }

    fn request() -> Value {
        let annotations = json!({
            ".": {}, "f:mesh.openkcm.io/reconcile-requested-at": {}
        });
        json!({ "f:metadata": { "f:annotations": annotations } })
    }

    /// A usable entry without the field.
    fn without(field: &str) -> Value {
        let mut entry = entry("a", 1, spec());
        entry.as_object_mut().unwrap().remove(field);
        entry
    }

    fn names(metadata: &ObjectMeta) -> [Option<&str>; 2] {
        [ObjectPart::Spec, ObjectPart::ReconcileRequest]
            .map(|part| last_manager(metadata, part).map(|manager| manager.name))
    }

    #[test]
    fn newest_owner_of_each_part_is_found() {
        let other = json!({ "f:metadata": { "f:annotations": { "f:other": {} } } });
        let mut by_status = entry("agent", 9, spec());
        by_status["subresource"] = json!("status");
        let mut both = spec();
        both["f:metadata"] = request()["f:metadata"].take();
        for (case, entries, expected) in [
            ("no entry", vec![], [None, None]),
            ("other fields", vec![entry("a", 1, other)], [None, None]),
            ("subresource", vec![by_status], [None, None]),
            (
                "two owners",
                vec![entry("b", 2, spec()), entry("a", 1, spec())],
                [Some("b"), None],
            ),
            (
                "both parts",
                vec![entry("a", 1, spec()), entry("b", 2, request())],
                [Some("a"), Some("b")],
            ),
            ("one entry", vec![entry("a", 1, both)], [Some("a"); 2]),
            (
                "empty spec",
                vec![entry("a", 1, json!({ "f:spec": {} }))],
                [Some("a"), None],
            ),
        ] {
            let mut metadata = metadata(entries);
            assert_eq!(names(&metadata), expected, "{case}");
            keep_last_managers(&mut metadata);
            assert_eq!(names(&metadata), expected, "{case}");
            let reduced = metadata.clone();
            keep_last_managers(&mut metadata);
            assert_eq!(metadata, reduced, "{case}");
        }
    }

    #[test]
    fn unusable_managed_fields_name_no_manager() {
        let mut unusable = metadata(vec![
            json!({}),
            without("manager"),
            without("time"),
            without("fieldsV1"),
            entry("", 1, spec()),
            entry(" ", 1, spec()),
            entry("a\nb", 1, spec()),
            entry("a", 1, json!("f:spec")),
            entry("a", 1, json!(["f:spec"])),
            entry("a", 1, json!({ "spec": {} })),
            entry("a", 1, json!({ "f:metadata": { "f:annotations": [] } })),
            entry("a", 1, json!({ "f:metadata": null })),
        ]);
        assert_eq!(names(&unusable), [None, None]);
        keep_last_managers(&mut unusable);
        assert_eq!(unusable.managed_fields, None);
    }

    #[test]
    fn only_last_managers_are_kept() {
        let many = (0..1000).map(|second| entry("a", second, spec()));
        let mut metadata = metadata(many.chain([entry("b", 1, request())]).collect());
        keep_last_managers(&mut metadata);
        let kept = metadata.managed_fields.clone().unwrap();
        let fields = kept.iter().map(|entry| entry.fields_v1.clone().unwrap().0);
        let annotations = json!({ "f:mesh.openkcm.io/reconcile-requested-at": {} });
        let request = json!({ "f:metadata": { "f:annotations": annotations } });
        assert!(fields.eq([json!({ "f:spec": {} }), request]), "{kept:?}");
        let time = last_manager(&metadata, ObjectPart::Spec).unwrap().time;
        assert_eq!(time.as_second(), 999);
    }
}
