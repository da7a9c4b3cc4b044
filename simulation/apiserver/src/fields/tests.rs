//! Replays the steps of `recorded.json` against the functions, and checks laws with random objects.
//!
//! The file holds requests to a real API server and its objects after each of them, without the fields that only
//! servers set. A time is the number of the step in seconds.

use std::sync::LazyLock;

use proptest::prelude::*;
use serde::Deserialize;

use super::*;

#[derive(Deserialize)]
struct Recorded {
    /// Schema of the kind `Thing`.
    schema: Value,
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    title: String,
    steps: Vec<Step>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Step {
    verb: String,
    manager: String,
    #[serde(default)]
    subresource: String,
    #[serde(default)]
    force: bool,
    api_version: String,
    kind: String,
    at: i64,
    /// For a creation the object with its defaults.
    body: Value,
    /// The live object, if it differs from the result of the previous step.
    before: Option<Value>,
    result: Option<Value>,
    /// Whether the store kept its object.
    #[serde(default)]
    unchanged: bool,
    error: Option<Value>,
}

/// Fields that a server sets in an applied object.
const DEFAULTS: &[&str] = &[
    "clusterIP",
    "clusterIPs",
    "concurrencyPolicy",
    "conversion",
    "defaultMode",
    "dnsPolicy",
    "failedJobsHistoryLimit",
    "failureThreshold",
    "imagePullPolicy",
    "internalTrafficPolicy",
    "ipFamilies",
    "ipFamilyPolicy",
    "listKind",
    "matchPolicy",
    "maxSurge",
    "periodSeconds",
    "persistentVolumeClaimRetentionPolicy",
    "podManagementPolicy",
    "policyTypes",
    "progressDeadlineSeconds",
    "protocol",
    "restartPolicy",
    "revisionHistoryLimit",
    "rollingUpdate",
    "schedulerName",
    "scheme",
    "securityContext",
    "sessionAffinity",
    "singular",
    "successThreshold",
    "successfulJobsHistoryLimit",
    "suspend",
    "targetPort",
    "terminationGracePeriodSeconds",
    "terminationMessagePath",
    "terminationMessagePolicy",
    "timeoutSeconds",
    "type",
    "volumeMode",
    "replicas",
    "apiVersion",
    "kind",
    "kubernetes.io/metadata.name",
    "partition",
    "phase",
    "maxUnavailable",
    "objectSelector",
    "port",
    "serviceAccount",
    "serviceAccountName",
];

fn recorded() -> Recorded {
    serde_json::from_str(include_str!("recorded.json")).unwrap()
}

fn schema(recorded: &Recorded, step: &Step) -> Schema {
    match step.kind.as_str() {
        "Thing" => Schema::custom(&recorded.schema, true),
        kind => Schema::built_in(&step.api_version, kind).unwrap(),
    }
}

fn at(second: i64) -> Timestamp {
    let start: Timestamp = "2026-01-01T00:00:00Z".parse().unwrap();
    start + jiff::SignedDuration::from_secs(second)
}

/// Applies a JSON merge patch.
fn patch(target: &mut Value, patch: &Value) {
    let Value::Object(patch_fields) = patch else {
        *target = patch.clone();
        return;
    };
    if !target.is_object() {
        *target = json!({});
    }
    for (name, value) in patch_fields {
        let fields = target.as_object_mut().unwrap();
        match value {
            Value::Null => {
                fields.remove(name);
            }
            value => patch_field(fields, name, value),
        }
    }
}

fn patch_field(fields: &mut serde_json::Map<String, Value>, name: &str, value: &Value) {
    patch(fields.entry(name).or_insert(Value::Null), value);
}

fn run(schema: &Schema, live: Option<&Value>, step: &Step) -> Result<Value, ApplyError> {
    let manager = manager_of(Some(&step.manager), "curl/8.0");
    let (api_version, subresource) = (step.api_version.as_str(), step.subresource.as_str());
    let writer = Writer {
        manager: &manager,
        api_version,
        subresource,
        at: at(step.at),
    };
    let mut new = match step.verb.as_str() {
        "apply" => return apply(schema, live, &step.body, &writer, step.force),
        "merge" => {
            let mut new = live.unwrap().clone();
            patch(&mut new, &step.body);
            new
        }
        _ => step.body.clone(),
    };
    track_update(schema, live, &mut new, &writer);
    Ok(new)
}

/// Lists where an applied object differs from the recorded one by more than defaults.
fn differences(path: &str, own: &Value, real: &Value, found: &mut Vec<String>) {
    match (own, real) {
        (Value::Object(own), Value::Object(real)) => {
            for (name, value) in real {
                match own.get(name) {
                    Some(own) => differences(&format!("{path}.{name}"), own, value, found),
                    None if name == "managedFields" || DEFAULTS.contains(&name.as_str()) => (),
                    None => found.push(format!("{path}.{name} is missing")),
                }
            }
            for name in own.keys().filter(|name| !real.contains_key(*name)) {
                found.push(format!("{path}.{name} is too much: {}", own[name]));
            }
        }
        (Value::Array(own), Value::Array(real)) if own.len() == real.len() => {
            for (index, (own, real)) in own.iter().zip(real).enumerate() {
                differences(&format!("{path}[{index}]"), own, real, found);
            }
        }
        (own, real) if own != real => found.push(format!("{path}: {own} for {real}")),
        _ => (),
    }
}

/// Sorts the causes, which a real server does not.
fn sorted(mut status: Value) -> Value {
    if let Some(Value::Array(causes)) = status.pointer_mut("/details/causes") {
        causes.sort_by_key(Value::to_string);
    }
    status
}

fn check_step(schema: &Schema, live: Option<&Value>, step: &Step, found: &mut Vec<String>) {
    let (own, real) = match (run(schema, live, step), &step.result, &step.error) {
        (Ok(own), Some(real), _) => (own, real),
        (Err(error), _, Some(real)) => {
            let (own, real) = (sorted(error.status()), sorted(real.clone()));
            if own != real {
                found.push(format!("error\n  own  {own}\n  real {real}"));
            }
            return;
        }
        (own, ..) => {
            found.push(format!("{own:?} for error {:?}", step.error));
            return;
        }
    };
    let managers = |object: &Value| object.pointer("/metadata/managedFields").cloned();
    if managers(&own) != managers(real) {
        let (own, real) = (
            managers(&own).unwrap_or_default(),
            managers(real).unwrap_or_default(),
        );
        found.push(format!("managers\n  own  {own}\n  real {real}"));
    }
    if step.unchanged && step.verb == "apply" && Some(&own) != live {
        found.push("the object changed".to_owned());
    }
    if step.verb == "apply" {
        let (mut own, mut real) = (own, real.clone());
        for object in [&mut own, &mut real] {
            let other = if step.subresource.is_empty() {
                "status"
            } else {
                "spec"
            };
            object.as_object_mut().unwrap().remove(other);
            object["metadata"]
                .as_object_mut()
                .unwrap()
                .remove("managedFields");
        }
        differences("", &own, &real, found);
    }
}

#[test]
fn recorded_requests_have_recorded_results() {
    let recorded = recorded();
    let mut found = Vec::new();
    for case in &recorded.cases {
        let mut live = None;
        for step in &case.steps {
            live = step.before.clone().or(live);
            let mut problems = Vec::new();
            check_step(&schema(&recorded, step), live.as_ref(), step, &mut problems);
            let (title, at, verb) = (&case.title, step.at, &step.verb);
            found.extend(
                problems
                    .iter()
                    .map(|text| format!("{title}, step {at}, {verb}: {text}")),
            );
            live = step.result.clone().or(live);
        }
    }
    assert!(recorded.cases.len() >= 25);
    assert!(
        found.is_empty(),
        "{} problems\n{}",
        found.len(),
        found.join("\n")
    );
}

#[test]
fn manager_is_parameter_or_user_agent() {
    for (parameter, agent, expected) in [
        (Some("helm"), "kubectl/v1.33", "helm"),
        (Some(""), "kubectl/v1.33 (linux)", "kubectl"),
        (None, "krypton-hub", "krypton-hub"),
        (None, "a\tb/1", "ab"),
        (None, "", ""),
    ] {
        assert_eq!(manager_of(parameter, agent), expected);
    }
    assert_eq!(manager_of(None, &"x".repeat(200)).len(), MAX_MANAGER_LENGTH);
}

#[test]
fn field_sets_print_as_they_parse() {
    for fields in [
        json!({}),
        json!({"f:data": {".": {}, "f:a": {}}}),
        json!({"f:spec": {"f:ports": {"k:{\"port\":80,\"protocol\":\"TCP\"}": {".": {}, "f:port": {}}}}}),
        json!({"f:metadata": {"f:finalizers": {".": {}, "v:\"a/b\"": {}}}, "f:x": {"i:0": {}, "v:1": {}}}),
    ] {
        assert_eq!(FieldSet::parse(&fields).unwrap().fields_v1(), fields);
    }
    for invalid in [
        json!([]),
        json!({"x": {}}),
        json!({"k:1": {}}),
        json!({"f:a": 1}),
    ] {
        assert_eq!(FieldSet::parse(&invalid), None, "{invalid}");
    }
}

#[test]
fn leaf_contains_no_field_below_it() {
    let set = FieldSet::parse(&json!({"f:a": {}, "f:b": {"f:c": {}}})).unwrap();
    let path = |names: &[&str]| -> Vec<Element> {
        names
            .iter()
            .map(|name| Element::Field((*name).to_owned()))
            .collect()
    };
    for (names, expected) in [
        (vec!["a"], true),
        (vec!["a", "x"], false),
        (vec!["b"], false),
        (vec!["b", "c"], true),
        (vec![], false),
    ] {
        assert_eq!(set.contains(&path(&names)), expected, "{names:?}");
    }
}

const THING: &str = "example.com/v1";

static THING_SCHEMA: LazyLock<Schema> = LazyLock::new(|| Schema::custom(&recorded().schema, true));

fn writer(manager: &str, second: i64) -> Writer<'_> {
    Writer {
        manager,
        api_version: THING,
        subresource: "",
        at: at(second),
    }
}

fn thing(fields: &Value) -> Value {
    let mut thing = json!({"apiVersion": THING, "kind": "Thing", "metadata": {"name": "x"}});
    patch(&mut thing, fields);
    thing
}

fn any_thing() -> impl Strategy<Value = Value> {
    let names = || prop::collection::btree_map("[a-d]", "[0-2]", 0..4);
    let ports = prop::collection::btree_map(1..4_u8, (any::<bool>(), "[0-2]"), 0..4);
    let tags = prop::collection::btree_set("[a-e]", 0..4);
    (names(), names(), ports, tags, prop::option::of(0..3)).prop_map(
        |(labels, values, ports, tags, size)| {
            let ports = ports.into_iter().map(|(port, (udp, note))| match udp {
                true => json!({"port": port, "protocol": "UDP", "note": note}),
                false => json!({"port": port, "note": note}),
            });
            let ports = ports.collect::<Vec<_>>();
            let mut spec = json!({"ports": ports, "tags": tags, "size": size});
            spec["values"] = json!(values);
            for name in ["ports", "tags", "values", "size"] {
                let empty = match &spec[name] {
                    Value::Array(values) => values.is_empty(),
                    Value::Object(values) => values.is_empty(),
                    value => value.is_null(),
                };
                if empty {
                    spec.as_object_mut().unwrap().remove(name);
                }
            }
            thing(&json!({"metadata": {"labels": labels}, "spec": spec}))
        },
    )
}

fn without_managed_fields(object: &Value) -> Value {
    let mut object = object.clone();
    object["metadata"]
        .as_object_mut()
        .unwrap()
        .remove("managedFields");
    object
}

fn owned_by(object: &Value, manager: &str) -> FieldSet {
    let managers = Managers::of(object);
    let owned = managers.0.iter().find(|(id, _)| id.manager == manager);
    owned
        .map(|(_, entry)| entry.set.clone())
        .unwrap_or_default()
}

proptest! {
    #[test]
    fn second_apply_changes_nothing(live in any_thing(), wanted in any_thing()) {
        let schema = &*THING_SCHEMA;
        let mut live = live;
        track_update(schema, None, &mut live, &writer("creator", 0));
        let once = apply(schema, Some(&live), &wanted, &writer("helm", 1), true).unwrap();
        let twice = apply(schema, Some(&once), &wanted, &writer("helm", 2), false).unwrap();
        prop_assert_eq!(once, twice);
    }

    #[test]
    fn empty_apply_removes_own_fields_only(live in any_thing(), wanted in any_thing()) {
        let schema = &*THING_SCHEMA;
        let mut live = live;
        track_update(schema, None, &mut live, &writer("creator", 0));
        let applied = apply(schema, Some(&live), &wanted, &writer("helm", 1), true).unwrap();
        let theirs = owned_by(&applied, "creator");
        let left = apply(schema, Some(&applied), &thing(&json!({})), &writer("helm", 2), false);
        let left = left.unwrap();
        prop_assert!(owned_by(&left, "helm").is_empty());
        prop_assert_eq!(&owned_by(&left, "creator"), &theirs);
        let fields = schema.valid_fields_of(&left).difference(&never_owned());
        let all = schema.with_structures(&fields);
        let theirs = schema.with_structures(&theirs);
        prop_assert!(fields.difference(&theirs).is_empty(), "{left}");
        prop_assert!(theirs.difference(&all).paths().iter().all(|path| path.len() < 3), "{left}");
    }

    #[test]
    fn apply_without_force_keeps_foreign_values(live in any_thing(), wanted in any_thing()) {
        let schema = &*THING_SCHEMA;
        let mut live = live;
        track_update(schema, None, &mut live, &writer("creator", 0));
        let theirs = owned_by(&live, "creator");
        if let Ok(applied) = apply(schema, Some(&live), &wanted, &writer("helm", 1), false) {
            prop_assert_eq!(owned_by(&applied, "creator"), theirs);
            let found = schema.compare(&without_managed_fields(&live), &without_managed_fields(&applied));
            prop_assert!(found.removed.is_empty() && found.modified.is_empty());
        }
    }

    #[test]
    fn set_operations_follow_their_laws(one in any_thing(), two in any_thing()) {
        let schema = &*THING_SCHEMA;
        let (one, two) = (schema.valid_fields_of(&one), schema.valid_fields_of(&two));
        let both = one.intersection(&two);
        prop_assert_eq!(&one.difference(&two).union(&both), &one);
        prop_assert!(one.difference(&two).intersection(&two).is_empty());
        prop_assert_eq!(one.union(&two), two.union(&one));
        prop_assert_eq!(FieldSet::parse(&one.fields_v1()), Some(one));
    }
}
