//! Parsers of values. Their errors complete the origin of the value: `"x" is not a bool; write true or false`.

use std::fmt::Display;
use std::ops::RangeInclusive;
use std::str::FromStr;
use std::time::Duration;

use krypton_types::join_bundle::split_address;
use krypton_types::names;

use super::go_values::{parse_bool, parse_duration};
use crate::access::ServiceAccount;
use crate::admin::{BindAddress, is_loopback};
use crate::telemetry::traces::{InvalidEndpoint, OtlpEndpoint};

/// Limit of the shown value.
const SHOWN_CHARS: usize = 120;

/// An `Option` that one parser returns. For an `Option` itself, Clap would take the parser of its content.
pub type Maybe<T> = Option<T>;

/// A listen address. `None` stands for `0`: off.
pub type Listen = Maybe<BindAddress>;

/// Returns the error for an invalid value.
pub fn invalid(value: &str, class: &str, remedy: &str) -> String {
    let shown: String = value.chars().take(SHOWN_CHARS).collect();
    format!("{shown:?} is not {class}; {remedy}")
}

/// Returns the error for an invalid value that can contain a password.
pub fn invalid_secret(class: &str, remedy: &str) -> String {
    format!("the value is not {class}; {remedy}")
}

/// Accepts a valid text as it is.
pub fn text_if(valid: bool, text: &str, class: &str, remedy: &str) -> Result<String, String> {
    match valid {
        true => Ok(text.to_owned()),
        false => Err(invalid(text, class, remedy)),
    }
}

/// Parses with `FromStr`.
pub fn from_str<T: FromStr>(
    class: &'static str,
    remedy: &'static str,
) -> impl Fn(&str) -> Result<T, String> + Clone {
    move |text| text.parse().map_err(|_| invalid(text, class, remedy))
}

/// Parses a number within a range.
pub fn number<T: FromStr + PartialOrd + Display + Clone>(
    range: RangeInclusive<T>,
    remedy: &'static str,
) -> impl Fn(&str) -> Result<T, String> + Clone {
    move |text| {
        let number = text.parse().ok().filter(|number| range.contains(number));
        let class = || format!("a number from {} to {}", range.start(), range.end());
        number.ok_or_else(|| invalid(text, &class(), remedy))
    }
}

/// Parses a Go duration within a range, which `class` describes.
pub fn duration(
    range: RangeInclusive<Duration>,
    class: &'static str,
) -> impl Fn(&str) -> Result<Duration, String> + Clone {
    move |text| {
        let duration = parse_duration(text).filter(|duration| range.contains(duration));
        let remedy = "write numbers with units, as 90s, 3m or 1h30m";
        duration.ok_or_else(|| invalid(text, class, remedy))
    }
}

/// Parses a boolean in Go's notation.
pub fn boolean(text: &str) -> Result<bool, String> {
    parse_bool(text).ok_or_else(|| invalid(text, "a bool", "write true or false"))
}

pub fn namespace(text: &str) -> Result<String, String> {
    names::namespace_name(text).map_err(|remedy| invalid(text, "a namespace name", remedy))
}

/// Accepts `NAMESPACE/NAME`, or `NAME` in the program's own namespace.
pub fn service_account(text: &str) -> Result<String, String> {
    let is_account = ServiceAccount::parse(text, "default").is_some();
    let remedy = "write NAMESPACE/NAME, or NAME for one in the program's own namespace";
    text_if(is_account, text, "a service account", remedy)
}

/// Accepts the address of a hub.
pub fn hub_address(text: &str) -> Result<String, String> {
    let remedy =
        "write the name or address and the port that agents connect to, as hub.example.org:7443";
    text_if(split_address(text).is_some(), text, "HOST:PORT", remedy)
}

/// Parses the address of a server. `0` switches it off.
pub fn listen(text: &str) -> Result<Listen, String> {
    let remedy = "write :PORT, as :8080, or HOST:PORT, or 0 to switch it off";
    match text {
        "0" => Ok(None),
        _ => from_str("a listen address", remedy)(text).map(Some),
    }
}

/// Parses the address of a server without authentication.
pub fn listen_on_loopback(text: &str) -> Result<Listen, String> {
    let address = listen(text)?;
    let on_loopback = address.as_ref().is_none_or(is_loopback);
    let remedy = "the server has no authentication: write 127.0.0.1:8082, or 0 to switch it off";
    text_if(on_loopback, text, "a loopback address", remedy)?;
    Ok(address)
}

/// Parses the URL of a collector for traces.
pub fn collector(text: &str) -> Result<OtlpEndpoint, String> {
    text.parse().map_err(|error| {
        let remedy = match error {
            InvalidEndpoint::Form => "write http://HOST:4317, or https:// for TLS",
            InvalidEndpoint::Credentials => {
                "set OTEL_EXPORTER_OTLP_HEADERS instead of user and password"
            }
        };
        invalid_secret("the address of a collector", remedy)
    })
}
