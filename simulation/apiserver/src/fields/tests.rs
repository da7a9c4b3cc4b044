//! Replays the steps of `recorded.json` against the functions, and checks laws with random objects.
//!
//! The file holds requests to a real API server and its objects after each of them, without the fields that only
//! servers set. A time is the number of the step in seconds.

use std::sync::LazyLock;

use json_patch::merge;
use proptest::prelude::*;
use serde::Deserialize;

use super::managers::without_managed_fields;
use super::*;

#[derive(Deserialize)]
struct RecordedFile {
    /// Schema of the kind `Thing`.
    schema: Value,
    cases: Vec<RecordedCase>,
}

#[derive(Deserialize)]
struct RecordedCase {
    title: String,
    steps: Vec<RecordedStep>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct RecordedStep {
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

fn read_recorded() -> RecordedFile {
    serde_json::from_str(include_str!("recorded.json")).unwrap()
}

fn schema(recorded: &RecordedFile, step: &RecordedStep) -> Schema {
    match step.kind.as_str() {
        "Thing" => Schema::custom(&recorded.schema, true),
        kind => Schema::built_in(&step.api_version, kind).unwrap(),
    }
}

fn time_at(second: i64) -> Timestamp {
    let start: Timestamp = "2026-01-01T00:00:00Z".parse().unwrap();
    start + jiff::SignedDuration::from_secs(second)
}

fn execute(schema: &Schema, live: Option<&Value>, step: &RecordedStep) -> Outcome<Value> {
    let writer = Writer {
        manager: match step.manager.as_str() {
            // From the user agent.
            "" => "curl",
            manager => manager,
        },
        api_version: &step.api_version,
        subresource: &step.subresource,
        at: time_at(step.at),
    };
    let mut new = match step.verb.as_str() {
        "apply" => return apply(schema, live, &step.body, &writer, step.force),
        "merge" => {
            let mut new = live.unwrap().clone();
            merge(&mut new, &step.body);
            new
        }
        _ => step.body.clone(),
    };
    track_update(schema, live, &mut new, Map::new(), &writer);
    Ok(new)
}

/// Lists where an applied object differs from the recorded one by more than defaults.
fn differences(path: &str, simulated: &Value, real: &Value, problems: &mut Vec<String>) {
    match (simulated, real) {
        (Value::Object(simulated), Value::Object(real)) => {
            for (name, value) in real {
                match simulated.get(name) {
                    Some(simulated) => {
                        differences(&format!("{path}.{name}"), simulated, value, problems)
                    }
                    None if name == "managedFields" || DEFAULTS.contains(&name.as_str()) => (),
                    None => problems.push(format!("{path}.{name} is missing")),
                }
            }
            for name in simulated.keys().filter(|name| !real.contains_key(*name)) {
                problems.push(format!("{path}.{name} is too much: {}", simulated[name]));
            }
        }
        (Value::Array(simulated), Value::Array(real)) if simulated.len() == real.len() => {
            for (index, (simulated, real)) in simulated.iter().zip(real).enumerate() {
                differences(&format!("{path}[{index}]"), simulated, real, problems);
            }
        }
        (simulated, real) if simulated != real => {
            problems.push(format!("{path}: {simulated} for {real}"))
        }
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

fn check_step(
    schema: &Schema,
    live: Option<&Value>,
    step: &RecordedStep,
    problems: &mut Vec<String>,
) {
    let (simulated, real) = match (execute(schema, live, step), &step.result, &step.error) {
        (Ok(simulated), Some(real), _) => (simulated, real),
        (Err(error), _, Some(real)) => {
            let (simulated, real) = (sorted(error.body), sorted(real.clone()));
            if simulated != real {
                problems.push(format!("error\n  own  {simulated}\n  real {real}"));
            }
            return;
        }
        (simulated, ..) => {
            problems.push(format!("{simulated:?} for error {:?}", step.error));
            return;
        }
    };
    let managers = |object: &Value| object.pointer("/metadata/managedFields").cloned();
    if managers(&simulated) != managers(real) {
        let (simulated, real) = (
            managers(&simulated).unwrap_or_default(),
            managers(real).unwrap_or_default(),
        );
        problems.push(format!("managers\n  own  {simulated}\n  real {real}"));
    }
    if step.unchanged && step.verb == "apply" && Some(&simulated) != live {
        problems.push("the object changed".to_owned());
    }
    if step.verb == "apply" {
        let (mut simulated, mut real) = (simulated, real.clone());
        for object in [&mut simulated, &mut real] {
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
        differences("", &simulated, &real, problems);
    }
}

#[test]
fn recorded_requests_have_recorded_results() {
    let recorded = read_recorded();
    let mut all_problems = Vec::new();
    for case in &recorded.cases {
        let mut live = None;
        for step in &case.steps {
            live = step.before.clone().or(live);
            let mut problems = Vec::new();
            check_step(&schema(&recorded, step), live.as_ref(), step, &mut problems);
            let (title, at, verb) = (&case.title, step.at, &step.verb);
            all_problems.extend(
                problems
                    .iter()
                    .map(|text| format!("{title}, step {at}, {verb}: {text}")),
            );
            live = step.result.clone().or(live);
        }
    }
    assert!(recorded.cases.len() >= 25);
    assert!(
        all_problems.is_empty(),
        "{} problems\n{}",
        all_problems.len(),
        all_problems.join("\n")
    );
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

const THING: &str = "example.com/v1";

static THING_SCHEMA: LazyLock<Schema> =
    LazyLock::new(|| Schema::custom(&read_recorded().schema, true));

fn writer(manager: &str, second: i64) -> Writer<'_> {
    Writer {
        manager,
        api_version: THING,
        subresource: "",
        at: time_at(second),
    }
}

fn new_thing(fields: &Value) -> Value {
    let mut thing = json!({"apiVersion": THING, "kind": "Thing", "metadata": {"name": "x"}});
    merge(&mut thing, fields);
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
            new_thing(&json!({"metadata": {"labels": labels}, "spec": spec}))
        },
    )
}

fn fields_owned_by(object: &Value, manager: &str) -> FieldSet {
    let managers = Managers::read_from(object);
    let owned = managers.0.iter().find(|(id, _)| id.manager == manager);
    owned
        .map(|(_, entry)| entry.fields.set().into_owned())
        .unwrap_or_default()
}

proptest! {
    #[test]
    fn second_apply_changes_nothing(live in any_thing(), configuration in any_thing()) {
        let schema = &*THING_SCHEMA;
        let mut live = live;
        track_update(schema, None, &mut live, Map::new(), &writer("creator", 0));
        let once = apply(schema, Some(&live), &configuration, &writer("helm", 1), true).unwrap();
        let twice = apply(schema, Some(&once), &configuration, &writer("helm", 2), false).unwrap();
        prop_assert_eq!(once, twice);
    }

    #[test]
    fn empty_apply_removes_own_fields_only(live in any_thing(), configuration in any_thing()) {
        let schema = &*THING_SCHEMA;
        let mut live = live;
        track_update(schema, None, &mut live, Map::new(), &writer("creator", 0));
        let applied = apply(schema, Some(&live), &configuration, &writer("helm", 1), true).unwrap();
        let theirs = fields_owned_by(&applied, "creator");
        let remaining = apply(schema, Some(&applied), &new_thing(&json!({})), &writer("helm", 2), false);
        let remaining = remaining.unwrap();
        prop_assert!(fields_owned_by(&remaining, "helm").is_empty());
        prop_assert_eq!(&fields_owned_by(&remaining, "creator"), &theirs);
        let fields = schema.valid_fields(&remaining).difference(&UNOWNED_FIELDS);
        let all = schema.with_structures(&fields);
        let theirs = schema.with_structures(&theirs);
        prop_assert!(fields.difference(&theirs).is_empty(), "{remaining}");
        prop_assert!(theirs.difference(&all).paths().iter().all(|path| path.len() < 3), "{remaining}");
    }

    #[test]
    fn apply_without_force_keeps_foreign_values(live in any_thing(), configuration in any_thing()) {
        let schema = &*THING_SCHEMA;
        let mut live = live;
        track_update(schema, None, &mut live, Map::new(), &writer("creator", 0));
        let theirs = fields_owned_by(&live, "creator");
        if let Ok(applied) = apply(schema, Some(&live), &configuration, &writer("helm", 1), false) {
            prop_assert_eq!(fields_owned_by(&applied, "creator"), theirs);
            let comparison = schema.compare(&without_managed_fields(&live, &Map::new()), &without_managed_fields(&applied, &Map::new()));
            prop_assert!(comparison.removed.is_empty() && comparison.modified.is_empty());
        }
    }

    #[test]
    fn set_operations_follow_their_laws(one in any_thing(), two in any_thing()) {
        let schema = &*THING_SCHEMA;
        let (one, two) = (schema.valid_fields(&one), schema.valid_fields(&two));
        let both = one.intersection(&two);
        prop_assert_eq!(&one.difference(&two).union(&both), &one);
        prop_assert!(one.difference(&two).intersection(&two).is_empty());
        prop_assert_eq!(one.union(&two), two.union(&one));
        prop_assert_eq!(FieldSet::parse(&one.fields_v1()), Some(one));
    }
}
