//! Values as Go programs read them: durations and booleans.

use std::time::Duration;

const NANOS_PER_SECOND: f64 = 1e9;

/// The longest duration of Go: some 292 years.
const GO_DURATION_MAX: Duration = Duration::from_nanos(i64::MAX.unsigned_abs());

/// A duration as Go's `time.ParseDuration` reads it (`180s`, `1h30m`, `1.5m`, `250ms`), but never
/// negative. `0` needs no unit.
pub fn parse_duration(text: &str) -> Option<Duration> {
    let text = text.strip_prefix('+').unwrap_or(text);
    if text == "0" {
        return Some(Duration::ZERO);
    }
    let mut rest = text;
    let mut total = Duration::ZERO;
    while !rest.is_empty() {
        let number_end = rest.find(|c: char| !c.is_ascii_digit() && c != '.')?;
        let (number, after) = rest.split_at_checked(number_end)?;
        let unit_end = after
            .find(|c: char| c.is_ascii_digit() || c == '.')
            .unwrap_or(after.len());
        let (unit, next) = after.split_at_checked(unit_end)?;
        total = total.checked_add(parse_part(number, unit)?)?;
        rest = next;
    }
    (!text.is_empty() && total <= GO_DURATION_MAX).then_some(total)
}

fn parse_part(number: &str, unit: &str) -> Option<Duration> {
    let nanos_per_unit: u64 = match unit {
        "ns" => 1,
        "us" | "µs" | "μs" => 1_000,
        "ms" => 1_000_000,
        "s" => 1_000_000_000,
        "m" => 60_000_000_000,
        "h" => 3_600_000_000_000,
        _ => return None,
    };
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    if whole.is_empty() && fraction.is_empty() || fraction.contains('.') {
        return None;
    }
    let whole: u64 = if whole.is_empty() {
        0
    } else {
        whole.parse().ok()?
    };
    let whole = Duration::from_nanos(whole.checked_mul(nanos_per_unit)?);
    if fraction.is_empty() {
        return Some(whole);
    }
    let fraction: f64 = format!("0.{fraction}").parse().ok()?;
    let seconds = fraction * nanos_per_unit as f64 / NANOS_PER_SECOND;
    whole.checked_add(Duration::try_from_secs_f64(seconds).ok()?)
}

/// A boolean as Go's `strconv.ParseBool` reads it.
pub fn parse_bool(text: &str) -> Option<bool> {
    match text {
        "1" | "t" | "T" | "true" | "TRUE" | "True" => Some(true),
        "0" | "f" | "F" | "false" | "FALSE" | "False" => Some(false),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn durations_are_read_as_go_reads_them() {
        let cases = [
            ("180s", Some(180_000)),
            ("3m", Some(180_000)),
            ("1h30m", Some(5_400_000)),
            ("1.5h", Some(5_400_000)),
            (".5s", Some(500)),
            ("1.s", Some(1_000)),
            ("250ms", Some(250)),
            ("1h1m1s1ms", Some(3_661_001)),
            ("+1s", Some(1_000)),
            ("1000us", Some(1)),
            ("1000µs", Some(1)),
            ("0", Some(0)),
            ("0s", Some(0)),
            ("", None),
            ("+", None),
            ("5", None),
            ("s", None),
            (".s", None),
            ("1.2.3s", None),
            ("-1s", None),
            ("1 s", None),
            ("1d", None),
            ("1S", None),
            ("99999999999999h", None),
            ("9223372037s", None),
        ];
        for (text, millis) in cases {
            assert_eq!(
                parse_duration(text),
                millis.map(Duration::from_millis),
                "{text:?}"
            );
        }
    }

    #[test]
    fn booleans_are_read_as_go_reads_them() {
        for text in ["1", "t", "T", "true", "TRUE", "True"] {
            assert_eq!(parse_bool(text), Some(true), "{text:?}");
        }
        for text in ["0", "f", "F", "false", "FALSE", "False"] {
            assert_eq!(parse_bool(text), Some(false), "{text:?}");
        }
        for text in ["", "yes", "no", "tRUE", "2"] {
            assert_eq!(parse_bool(text), None, "{text:?}");
        }
    }

    proptest! {
        #[test]
        fn any_text_is_read_without_a_panic(text in ".*") {
            prop_assert!(parse_duration(&text).is_none_or(|d| d >= Duration::ZERO));
        }

        #[test]
        fn whole_seconds_are_read_exactly(seconds in 0u64..1_000_000) {
            prop_assert_eq!(parse_duration(&format!("{seconds}s")), Some(Duration::from_secs(seconds)));
        }
    }
}
