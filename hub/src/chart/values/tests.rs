use proptest::prelude::*;
use serde_json::json;

use super::*;

fn source(text: &str) -> ValuesSource {
    ValuesSource::parse(text).unwrap()
}

fn map(value: Value) -> Map<String, Value> {
    value.as_object().unwrap().clone()
}

fn readings(contents: &[(&str, Value)]) -> ValuesReadings {
    let by_location = contents.iter().map(|(text, value)| {
        let reading = match value {
            Value::Object(values) => ValuesReading::Values(Arc::new(values.clone())),
            Value::String(error) => ValuesReading::Invalid(error.clone()),
            _ => ValuesReading::Missing("it is not there".to_owned()),
        };
        (source(text).location, reading)
    });
    ValuesReadings {
        by_location: by_location.collect(),
        salt: Some("salt".into()),
    }
}

fn chart(values: Value) -> ChartState {
    ChartState {
        repo: "https://example.org".to_owned(),
        name: "small".to_owned(),
        version: "1.0.0".to_owned(),
        install_crds: true,
        values: map(values),
        ..ChartState::default()
    }
}

fn fleet_with(texts: &[&str], readings: &ValuesReadings) -> Result<ChartState, ValuesProblem> {
    let sources: Vec<ValuesSource> = texts.iter().map(|text| source(text)).collect();
    for_fleet(chart(json!({})), &sources, readings)
}

fn spec(value: Value) -> EdgeClusterSpec {
    serde_json::from_value(value).unwrap()
}

#[test]
fn a_source_is_read_as_it_is_written() {
    for (text, kind, name, key, optional) in [
        (
            "configmap/a",
            ValuesKind::ConfigMap,
            "a",
            "values.yaml",
            false,
        ),
        ("secret/a.b/k_1?", ValuesKind::Secret, "a.b", "k_1", true),
        ("secret/a?", ValuesKind::Secret, "a", "values.yaml", true),
    ] {
        let read = source(text);
        let location = &read.location;
        assert_eq!(
            (location.kind, &*location.name, &*location.key),
            (kind, name, key)
        );
        assert_eq!(read.optional, optional, "{text}");
    }
    for bad in [
        "",
        "a",
        "configmap/",
        "ConfigMap/a",
        "secret/A",
        "secret/a/",
        "secret/a/b/c",
        "secret/a/b c",
        "file/a",
    ] {
        assert_eq!(ValuesSource::parse(bad), None, "{bad}");
    }
}

#[test]
fn layers_keep_the_documented_order() {
    let readings = readings(&[
        (
            "configmap/one",
            json!({"a": "one", "b": "one", "c": "one", "d": "one", "m": {"one": 1}}),
        ),
        (
            "secret/two",
            json!({"b": "two", "c": "two", "d": "two", "installCRDs": false, "m": {"two": 2}}),
        ),
        (
            "secret/mine",
            json!({"c": "mine", "d": "mine", "m": {"one": null}}),
        ),
    ]);
    let sources = [source("configmap/one"), source("secret/two")];
    let file = json!({"a": "file", "z": "file", "m": {"file": 0}});
    let fleet = for_fleet(chart(file), &sources, &readings).unwrap();
    let expected = json!({
        "a": "one", "b": "two", "c": "two", "d": "two", "z": "file",
        "m": {"file": 0, "one": 1, "two": 2}, "installCRDs": true,
    });
    assert_eq!(Value::Object(fleet.helm_values()), expected);
    let own = spec(json!({
        "valuesFrom": [{"kind": "Secret", "name": "mine"}],
        "values": {"d": "inline", "installCRDs": false},
    }));
    let member = for_member(&fleet, &own, &readings).unwrap();
    let expected = json!({
        "a": "one", "b": "two", "c": "mine", "d": "inline", "z": "file",
        "m": {"file": 0, "one": null, "two": 2}, "installCRDs": false,
    });
    assert_eq!(Value::Object(member.helm_values()), expected);
    // Only values from Secrets are confidential.
    let confidential = fleet.confidential.unwrap();
    assert_eq!(confidential.paths, ["/b", "/c", "/d", "/m/two"]);
    assert_eq!(confidential.salt, "salt");
    let paths = member.confidential.unwrap().paths;
    for path in ["/b", "/c", "/m/two"] {
        assert!(paths.iter().any(|found| found == path), "{path}: {paths:?}");
    }
}

#[test]
fn without_sources_all_is_as_it_was() {
    let file = chart(json!({"a": {"b": 1}}));
    let none = ValuesReadings::default();
    assert_eq!(for_fleet(file.clone(), &[], &none).unwrap(), file);
    assert!(!has_own_values(&spec(json!({}))) && !has_own_values(&spec(json!({"values": {}}))));
    assert_eq!(for_member(&file, &spec(json!({})), &none).unwrap(), file);
    // Values from a ConfigMap get no salted digest.
    let readings = readings(&[("configmap/a", json!({"a": {"c": 2}}))]);
    let merged = for_fleet(file, &[source("configmap/a")], &readings).unwrap();
    assert_eq!(merged.confidential, None);
}

#[test]
fn only_optional_missing_values_are_skipped() {
    let readings = readings(&[
        ("configmap/gone", Value::Null),
        (
            "configmap/bad",
            json!("ConfigMap bad, key values.yaml, line 1 holds a list"),
        ),
        ("secret/there", json!({"a": 1})),
    ]);
    let fleet_with = |texts: &[&str]| fleet_with(texts, &readings);
    let fleet = fleet_with(&["configmap/gone?", "secret/there"]).unwrap();
    assert_eq!(fleet.values["a"], 1);
    let reasons = [
        ("configmap/gone", reason::VALUES_MISSING),
        ("configmap/bad", reason::VALUES_INVALID),
        ("configmap/bad?", reason::VALUES_INVALID),
        ("secret/unknown?", reason::VALUES_UNREAD),
    ];
    for (text, reason) in reasons {
        let problem = fleet_with(&["secret/there", text]).unwrap_err();
        assert_eq!(problem.reason(), reason, "{text}: {problem}");
        assert_eq!(problem.location(), Some(&source(text).location));
    }
}

#[test]
fn values_reference_with_invalid_name_is_rejected() {
    let fleet = chart(json!({}));
    for name in ["../../kube-system/secrets/a", "a/b", "A", "a?b", ""] {
        let own = spec(json!({"valuesFrom": [{"kind": "Secret", "name": name, "optional": true}]}));
        let problem = for_member(&fleet, &own, &ValuesReadings::default()).unwrap_err();
        assert_eq!(problem.reason(), reason::VALUES_INVALID, "{name}");
    }
}

#[test]
fn a_secret_waits_for_the_salt() {
    let unsalted = ValuesReadings {
        salt: None,
        ..readings(&[
            ("secret/a", json!({"a": 1})),
            ("configmap/b", json!({"b": 1})),
        ])
    };
    let problem = fleet_with(&["secret/a"], &unsalted).unwrap_err();
    assert_eq!(problem, ValuesProblem::NotYet(source("secret/a").location));
    assert!(fleet_with(&["configmap/b"], &unsalted).is_ok());
}

#[test]
fn values_too_large_for_member_are_rejected() {
    let half = "x".repeat(values::MAX_BYTES / 2);
    let readings = readings(&[
        ("configmap/one", json!({"a": half})),
        ("configmap/two", json!({"b": half})),
    ]);
    let fleet_with = |texts: &[&str]| fleet_with(texts, &readings);
    assert!(fleet_with(&["configmap/one"]).is_ok());
    let problem = fleet_with(&["configmap/one", "configmap/two"]).unwrap_err();
    assert_eq!(problem.reason(), reason::VALUES_TOO_LARGE);
}

proptest! {
    #[test]
    fn any_text_is_a_source_or_none(text in ".{0,40}") {
        if let Some(source) = ValuesSource::parse(&text) {
            prop_assert!(!source.location.name.is_empty() && !source.location.key.is_empty());
        }
    }
}
