//! Digests of a chart state, including the fingerprints of krypton-operator.

use std::fmt::Write as _;

use serde_json::{Map, Number, Value};
use sha2::{Digest, Sha256};

/// Returns the SHA-256 as 64 lower-case hex digits.
pub fn sha256_hex(bytes: &[u8]) -> String {
    hex(&Sha256::digest(bytes))
}

/// Returns the bytes as lower-case hex digits.
pub fn hex(bytes: &[u8]) -> String {
    let mut digits = String::with_capacity(2 * bytes.len());
    for byte in bytes {
        for nibble in [byte >> 4, byte & 0x0f] {
            digits.extend(char::from_digit(u32::from(nibble), 16));
        }
    }
    digits
}

/// Returns whether the text consists of this many lower-case hex digits.
pub fn is_hex(text: &str, digits: usize) -> bool {
    let is_digit = |byte: u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
    text.len() == digits && text.bytes().all(is_digit)
}

/// Returns the annotation of krypton-operator with one chart for all Tenants (generations G1 and G2). It does not
/// depend on values, and uses the inputs exactly as on the command line.
pub fn original(repo: &str, name: &str, version: &str) -> String {
    sha256_hex(format!("{repo}|{name}|{version}").as_bytes())
}

/// Returns the annotation of krypton-operator with values for each Tenant (generation G0). It extends the input of
/// [`original`] by `
/// <key>=<value>` for each top-level key in byte order. The value has Go's `%v` form.
pub fn original_with_values(
    repo: &str,
    name: &str,
    version: &str,
    values: &Map<String, Value>,
) -> String {
    let mut text = format!("{repo}|{name}|{version}");
    for (key, value) in sorted(values) {
        text.push('|');
        text.push_str(key);
        text.push('=');
        go_value(value, &mut text);
    }
    sha256_hex(text.as_bytes())
}

fn sorted(map: &Map<String, Value>) -> Vec<(&String, &Value)> {
    let mut entries: Vec<_> = map.iter().collect();
    entries.sort_unstable_by_key(|(key, _)| *key);
    entries
}

/// Appends `fmt.Sprintf("%v", value)` for a value that Go has decoded from JSON.
fn go_value(value: &Value, out: &mut String) {
    match value {
        Value::Null => out.push_str("<nil>"),
        Value::Bool(value) => out.push_str(if *value { "true" } else { "false" }),
        Value::Number(number) => go_number(number, out),
        Value::String(text) => out.push_str(text),
        Value::Array(items) => {
            out.push('[');
            for (index, item) in items.iter().enumerate() {
                if index > 0 {
                    out.push(' ');
                }
                go_value(item, out);
            }
            out.push(']');
        }
        Value::Object(map) => {
            out.push_str("map[");
            for (index, (key, item)) in sorted(map).into_iter().enumerate() {
                if index > 0 {
                    out.push(' ');
                }
                out.push_str(key);
                out.push(':');
                go_value(item, out);
            }
            out.push(']');
        }
    }
}

/// Appends a number as krypton-operator reads it. A whole number that fits into an `int64` is an integer in every
/// notation. The API server stores `1e6` and `1000000.0` as `1000000`, and Kubernetes' decoder keeps integers.
fn go_number(number: &Number, out: &mut String) {
    const INT64_END: f64 = 9_223_372_036_854_775_808.0;
    let float = number.as_f64().unwrap_or(f64::NAN);
    let written = if let Some(integer) = number.as_i64() {
        write!(out, "{integer}")
    } else if float.fract() == 0.0 && (-INT64_END..INT64_END).contains(&float) {
        #[expect(
            clippy::cast_possible_truncation,
            reason = "whole and within the range of i64"
        )]
        let integer = float as i64;
        write!(out, "{integer}")
    } else {
        go_float(float, out)
    };
    written.expect("writing to a String cannot fail");
}

/// Appends Go's `%v` of a `float64`: the shortest digits. The form has an exponent of at least two digits if the
/// exponent is below -4 or above 5.
fn go_float(float: f64, out: &mut String) -> std::fmt::Result {
    let scientific = format!("{float:e}");
    let Some((mantissa, exponent)) = scientific.split_once('e') else {
        return write!(out, "{float}");
    };
    match exponent.parse::<i32>() {
        Ok(exponent) if !(-4..=5).contains(&exponent) => {
            let sign = if exponent < 0 { '-' } else { '+' };
            write!(out, "{mantissa}e{sign}{:02}", exponent.unsigned_abs())
        }
        _ => write!(out, "{float}"),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    const JETSTACK: (&str, &str, &str) = ("https://charts.jetstack.io", "cert-manager", "1.19.1");

    fn rendered(value: &Value) -> String {
        let mut text = String::new();
        go_value(value, &mut text);
        text
    }

    #[test]
    fn sha256_is_lower_case_hex() {
        assert_eq!(
            sha256_hex(b""),
            "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
        );
    }

    #[test]
    fn the_vectors_of_the_original_hold() {
        let (repo, name, version) = JETSTACK;
        assert_eq!(
            original(repo, name, version),
            "dd782c04db309dcc54c116da69b3f09bdae53e49d4d4e087fb6bce3a92e80a8d"
        );
        assert_eq!(
            original("https://ealenn.github.io/charts", "echo-server", "0.5.0"),
            "57890fb183912c42ea7b9eea6441ed86881be29116a94cfff5cf1cfa89c6110d"
        );
    }

    #[test]
    fn fingerprint_with_values_matches_vector() {
        let (repo, name, version) = JETSTACK;
        let Value::Object(values) = json!({ "replicaCount": 1, "installCRDs": true }) else {
            unreachable!("a literal map")
        };
        assert_eq!(
            original_with_values(repo, name, version, &values),
            "5bae5844d6be0862a748a6306452149c67b1dbaf80e1cc8d2c05718d7c195d10"
        );
        assert_eq!(
            original_with_values(repo, name, version, &Map::new()),
            original(repo, name, version)
        );
    }

    #[test]
    fn values_read_as_go_prints_them() {
        // Expected texts come from Go's fmt.Printf("%v").
        let value = json!({
            "b": [1.5, "x", null, true, { "z": 1.5, "a": {} }],
            "a": { "k": null, "A": "y z" },
            "n": null, "e": [], "s": "", "f": -0.25,
        });
        assert_eq!(
            rendered(&value),
            "map[a:map[A:y z k:<nil>] b:[1.5 x <nil> true map[a:map[] z:1.5]] e:[] f:-0.25 \
             n:<nil> s:]"
        );
    }

    #[test]
    fn floats_read_as_go_prints_them() {
        // Expected texts come from Go's fmt.Printf("%v").
        for (float, text) in [
            (1.5, "1.5"),
            (0.1, "0.1"),
            (-2.5, "-2.5"),
            (1.12345, "1.12345"),
            (1e-4, "0.0001"),
            (0.000123, "0.000123"),
            (1e-5, "1e-05"),
            (1.25e-5, "1.25e-05"),
            (123_456.5, "123456.5"),
            (1_234_567.5, "1.2345675e+06"),
            (1e20, "1e+20"),
            (1.5e21, "1.5e+21"),
            (12_345_678_901_234_567_890.0, "1.2345678901234567e+19"),
            (1e300, "1e+300"),
            (5e-324, "5e-324"),
            (f64::MAX, "1.7976931348623157e+308"),
        ] {
            assert_eq!(rendered(&json!(float)), text, "{float}");
        }
    }

    #[test]
    fn whole_numbers_render_alike_in_every_notation() {
        for (number, text) in [
            ("1", "1"),
            ("1.0", "1"),
            ("-0.0", "0"),
            ("1e6", "1000000"),
            ("1000000.0", "1000000"),
            ("9223372036854775807", "9223372036854775807"),
            ("-9223372036854775808", "-9223372036854775808"),
            ("18446744073709551615", "1.8446744073709552e+19"),
        ] {
            let value: Value = serde_json::from_str(number).unwrap();
            assert_eq!(rendered(&value), text, "{number}");
        }
    }

    proptest! {
        #[test]
        fn rendered_fraction_parses_back_to_same_number(
            float in proptest::num::f64::NORMAL.prop_filter("whole", |f| f.fract() != 0.0),
        ) {
            prop_assert_eq!(rendered(&json!(float)).parse::<f64>().unwrap(), float);
        }

        #[test]
        fn the_order_of_keys_does_not_matter(keys in proptest::collection::btree_set("[a-c]{1,3}", 0..6)) {
            let forwards: Map<_, _> = keys.iter().map(|k| (k.clone(), json!(k))).collect();
            let backwards: Map<_, _> = keys.iter().rev().map(|k| (k.clone(), json!(k))).collect();
            prop_assert_eq!(
                original_with_values("r", "n", "v", &forwards),
                original_with_values("r", "n", "v", &backwards)
            );
        }
    }
}
