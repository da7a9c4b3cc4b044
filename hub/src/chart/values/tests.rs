use proptest::prelude::*;
use serde_json::json;

use super::*;

fn source(text: &str) -> Source {
    text.parse().unwrap()
}

fn map(value: Value) -> Map<String, Value> {
    value.as_object().unwrap().clone()
}

fn readings(given: &[(&str, Value)]) -> Readings {
    let by_place = given.iter().map(|(text, value)| {
        let reading = match value {
            Value::Object(values) => Reading::Values(Arc::new(values.clone())),
            Value::String(why) => Reading::Invalid(why.clone()),
            _ => Reading::Missing("it is not there".to_owned()),
        };
        (source(text).place, reading)
    });
    Readings {
        by_place: by_place.collect(),
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
        let place = &read.place;
        assert_eq!((place.kind, &*place.name, &*place.key), (kind, name, key));
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
        assert_eq!(bad.parse::<Source>(), Err(NotASource), "{bad}");
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
    let fleet = fleet(chart(file), &sources, &readings).unwrap();
    let expected = json!({
        "a": "one", "b": "two", "c": "two", "d": "two", "z": "file",
        "m": {"file": 0, "one": 1, "two": 2}, "installCRDs": true,
    });
    assert_eq!(Value::Object(fleet.helm_values()), expected);
    let own = spec(json!({
        "valuesFrom": [{"kind": "Secret", "name": "mine"}],
        "values": {"d": "inline", "installCRDs": false},
    }));
    let member = member(&fleet, &own, &readings).unwrap();
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
    let none = Readings::default();
    assert_eq!(fleet(file.clone(), &[], &none).unwrap(), file);
    assert!(!has_own(&spec(json!({}))) && !has_own(&spec(json!({"values": {}}))));
    assert_eq!(member(&file, &spec(json!({})), &none).unwrap(), file);
    // Values from a ConfigMap get no salted digest.
    let readings = readings(&[("configmap/a", json!({"a": {"c": 2}}))]);
    let laid = fleet(file, &[source("configmap/a")], &readings).unwrap();
    assert_eq!(laid.confidential, None);
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
    let of = |texts: &[&str]| {
        let sources: Vec<Source> = texts.iter().map(|text| source(text)).collect();
        fleet(chart(json!({})), &sources, &readings)
    };
    assert_eq!(
        of(&["configmap/gone?", "secret/there"]).unwrap().values["a"],
        1
    );
    let reasons = [
        ("configmap/gone", reason::VALUES_MISSING),
        ("configmap/bad", reason::VALUES_INVALID),
        ("configmap/bad?", reason::VALUES_INVALID),
        ("secret/unknown?", reason::VALUES_UNREAD),
    ];
    for (text, reason) in reasons {
        let problem = of(&["secret/there", text]).unwrap_err();
        assert_eq!(problem.reason(), reason, "{text}: {problem}");
        assert_eq!(problem.place(), Some(&source(text).place));
    }
}

#[test]
fn values_reference_with_invalid_name_is_rejected() {
    let fleet = chart(json!({}));
    for name in ["../../kube-system/secrets/a", "a/b", "A", "a?b", ""] {
        let own = spec(json!({"valuesFrom": [{"kind": "Secret", "name": name, "optional": true}]}));
        let problem = member(&fleet, &own, &Readings::default()).unwrap_err();
        assert_eq!(problem.reason(), reason::VALUES_INVALID, "{name}");
    }
}

#[test]
fn a_secret_waits_for_the_salt() {
    let unsalted = Readings {
        salt: None,
        ..readings(&[
            ("secret/a", json!({"a": 1})),
            ("configmap/b", json!({"b": 1})),
        ])
    };
    let problem = fleet(chart(json!({})), &[source("secret/a")], &unsalted).unwrap_err();
    assert_eq!(problem, Problem::NotYet(source("secret/a").place));
    assert!(fleet(chart(json!({})), &[source("configmap/b")], &unsalted).is_ok());
}

#[test]
fn values_too_large_for_member_are_rejected() {
    let half = "x".repeat(values::MOST_BYTES / 2);
    let readings = readings(&[
        ("configmap/one", json!({"a": half})),
        ("configmap/two", json!({"b": half})),
    ]);
    let of = |texts: &[&str]| {
        let sources: Vec<Source> = texts.iter().map(|text| source(text)).collect();
        fleet(chart(json!({})), &sources, &readings)
    };
    assert!(of(&["configmap/one"]).is_ok());
    let problem = of(&["configmap/one", "configmap/two"]).unwrap_err();
    assert_eq!(problem.reason(), reason::VALUES_TOO_LARGE);
}

proptest! {
    #[test]
    fn any_text_is_a_source_or_none(text in ".{0,40}") {
        if let Ok(source) = text.parse::<Source>() {
            prop_assert!(!source.place.name.is_empty() && !source.place.key.is_empty());
        }
    }
}
