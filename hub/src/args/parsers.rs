//! Parsers of the hub's values.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::time::Duration;

use krypton_runtime::args::go_values::parse_duration;
use krypton_runtime::args::parsers::{
    Maybe, duration, hub_address, invalid, invalid_secret, namespace, text_if,
};
use krypton_runtime::telemetry::LogFormat;
use krypton_types::desired::namespaces::NamespaceConfiguration;
use krypton_types::loopback::is_loopback;
use krypton_types::names::{LABEL_MAX, is_data_key, is_dns_subdomain, is_qualified_name};
use krypton_types::redact::{NO_URL, has_userinfo, url_shown};
use reqwest::Url;

use super::{DAY, List, MINUTE, Namespaces};
use crate::chart::values::ValuesSource;
use crate::discovery::SourceKind;

pub(super) const PER_MEMBER: &str = "a number from 1 to that of --max-concurrent-helm";
pub(super) const PER_MEMBER_REMEDY: &str = "write how many may run at the same time for one member";
pub(super) const REPO: &str = "the URL of a chart repository";
pub(super) const REPO_REMEDY: &str = "write it with https:// or oci://, or leave it empty and give the path of a .tgz as --chart-name";

/// Parses the items between commas, without blanks and empty items.
pub(super) fn list<T, C: FromIterator<T>>(
    item: fn(&str) -> Result<T, String>,
) -> impl Fn(&str) -> Result<C, String> + Clone {
    move |text| {
        let items = text.split(',').map(str::trim);
        items.filter(|text| !text.is_empty()).map(item).collect()
    }
}

/// `*` means all. The list can be empty.
pub(super) fn listed_namespaces(text: &str) -> Result<Namespaces, String> {
    match text.trim() {
        "*" => Ok(None),
        _ => list::<_, BTreeSet<String>>(namespace)(text).map(Some),
    }
}

/// An empty list means all, too.
pub(super) fn namespaces(text: &str) -> Result<Namespaces, String> {
    listed_namespaces(text).map(|listed| listed.filter(|names| !names.is_empty()))
}

pub(super) fn provider(text: &str) -> Result<SourceKind, String> {
    match text {
        "kubeconfig" => Ok(SourceKind::Secret),
        "cluster-profile" => Ok(SourceKind::ClusterProfile),
        "cluster-api" => Ok(SourceKind::Cluster),
        "kamaji" => Ok(SourceKind::TenantControlPlane),
        "file" => Ok(SourceKind::File),
        _ => Err(invalid(
            text,
            "a provider of members",
            "write some of kubeconfig, cluster-profile, cluster-api, kamaji, file",
        )),
    }
}

pub(super) fn member_prefix(text: &str) -> Result<(SourceKind, String), String> {
    // A member name must be legal with the prefix.
    let is_prefix = |prefix: &str| is_dns_subdomain(&format!("{prefix}a"));
    match text.split_once('=') {
        Some((kind, prefix)) if is_prefix(prefix) => Ok((provider(kind)?, prefix.to_owned())),
        _ => Err(invalid(
            text,
            "a prefix of member names",
            "write PROVIDER=PREFIX, with lower-case letters, digits, '-' and '.' in the prefix",
        )),
    }
}

/// Kamaji writes the name into a label.
pub(super) fn kamaji_generator(text: &str) -> Result<String, String> {
    let is_name = text.len() <= LABEL_MAX && is_dns_subdomain(text);
    let remedy = "write the name of the object, at most 63 characters";
    text_if(is_name, text, "the name of a KubeconfigGenerator", remedy)
}

/// Parses addresses, each once.
pub(super) fn advertised(text: &str) -> Result<List<String>, String> {
    let mut addresses: List<String> = list(hub_address)(text)?;
    let mut known = BTreeSet::new();
    addresses.retain(|address| known.insert(address.clone()));
    Ok(addresses)
}

pub(super) fn values_source(text: &str) -> Result<ValuesSource, String> {
    ValuesSource::parse(text).ok_or_else(|| {
        invalid(
            text,
            "a ConfigMap or Secret with values",
            "write configmap/NAME or secret/NAME, with /KEY if it isn't values.yaml, and with ? at the end if it may be missing",
        )
    })
}

/// Parses the name of an object, without its namespace.
pub(super) fn object_name(
    class: &'static str,
    remedy: &'static str,
) -> impl Fn(&str) -> Result<String, String> + Clone {
    move |text| text_if(is_dns_subdomain(text), text, class, remedy)
}

pub(super) fn data_key(text: &str) -> Result<String, String> {
    text_if(
        is_data_key(text),
        text,
        "a key of a Secret",
        "write letters, digits, '-', '_' or '.'",
    )
}

pub(super) fn label_key(text: &str) -> Result<String, String> {
    let remedy = "write it as name or as example.org/name";
    text_if(is_qualified_name(text), text, "a label key", remedy)
}

fn without_userinfo(url: &str) -> Result<(), String> {
    match url.contains("://") && has_userinfo(url) {
        false => Ok(()),
        true => Err(invalid_secret(
            "a URL without user and password",
            "put them into a Secret and name it with --chart-credentials-secret",
        )),
    }
}

/// Accepts an empty text, which requires a chart name that contains the location.
pub(super) fn chart_repo(text: &str) -> Result<String, String> {
    without_userinfo(text)?;
    let schemes = ["https://", "http://", "oci://"].iter();
    let mut remainders = schemes.filter_map(|scheme| text.strip_prefix(scheme));
    let is_url = remainders.any(|rest| !rest.is_empty()) && url_shown(text) != NO_URL;
    match text.is_empty() || is_url {
        true => Ok(text.to_owned()),
        false => Err(invalid_secret(REPO, REPO_REMEDY)),
    }
}

pub(super) fn chart_name(text: &str) -> Result<String, String> {
    without_userinfo(text)?;
    let remedy = "write the chart's name, or the path of a .tgz";
    text_if(!text.is_empty(), text, "a chart name", remedy)
}

/// Parses the URL of a webhook, whose path and query may contain a token.
pub(super) fn webhook(text: &str) -> Result<Url, String> {
    let url = Url::parse(text).ok().filter(|_| !has_userinfo(text));
    let url = url.filter(|url| match url.scheme() {
        "https" => url.has_host(),
        "http" => url.host_str().is_some_and(is_loopback),
        _ => false,
    });
    url.ok_or_else(|| {
        invalid_secret(
            "the URL of a webhook",
            "write https://HOST/PATH without user and password, or http:// for one on the hub's own machine",
        )
    })
}

pub(super) fn resolve_interval(text: &str) -> Result<Maybe<Duration>, String> {
    match (text, parse_duration(text)) {
        ("", _) | (_, Some(Duration::ZERO)) => Ok(None),
        _ => duration(MINUTE..=DAY, "a duration from 1m to 24h, or 0")(text).map(Some),
    }
}

pub(super) fn program(text: &str) -> Result<PathBuf, String> {
    let remedy = "write the path of helm, or leave the flag out";
    text_if(!text.is_empty(), text, "a program", remedy).map(PathBuf::from)
}

/// Parses `KEY=VALUE` between commas. `\,` stands for a comma, and `\\` for a backslash.
fn key_value_pairs(text: &str) -> Result<BTreeMap<String, String>, String> {
    let (mut items, mut item) = (Vec::new(), String::new());
    let mut rest = text.chars();
    while let Some(next) = rest.next() {
        match next {
            '\\' => item.extend(rest.next()),
            ',' => items.push(std::mem::take(&mut item)),
            other => item.push(other),
        }
    }
    items.push(item);
    let items = items.iter().map(|item| item.trim());
    let pair = |item: &str| match item.split_once('=') {
        Some((key, value)) => Ok((key.to_owned(), value.to_owned())),
        None => Err(invalid(
            text,
            "a list of KEY=VALUE",
            "write KEY=VALUE, separated by commas",
        )),
    };
    items.filter(|item| !item.is_empty()).map(pair).collect()
}

fn check_metadata(text: &str, configuration: &NamespaceConfiguration) -> Result<(), String> {
    let result = configuration.check();
    result.map_err(|error| invalid(text, "one that namespaces can have", error.remedy()))
}

pub(super) fn labels(text: &str) -> Result<BTreeMap<String, String>, String> {
    let configuration = NamespaceConfiguration {
        labels: key_value_pairs(text)?,
        ..NamespaceConfiguration::default()
    };
    check_metadata(text, &configuration)?;
    Ok(configuration.labels)
}

pub(super) fn annotations(text: &str) -> Result<BTreeMap<String, String>, String> {
    let configuration = NamespaceConfiguration {
        annotations: key_value_pairs(text)?,
        ..NamespaceConfiguration::default()
    };
    check_metadata(text, &configuration)?;
    Ok(configuration.annotations)
}

/// Keeps the text, which has no effect but in a note.
pub(super) fn poll_interval(text: &str) -> Result<String, String> {
    let is_duration = parse_duration(text).is_some();
    text_if(
        is_duration,
        text,
        "a duration",
        "write numbers with units, as 10s",
    )
}

/// Parses a level of Zap.
pub(super) fn log_filter(text: &str) -> Result<&'static str, String> {
    match (text, text.parse::<u8>()) {
        ("debug", _) | (_, Ok(1)) => Ok("debug"),
        ("info", _) => Ok("info"),
        ("warn", _) => Ok("warn"),
        ("error" | "panic", _) => Ok("error"),
        (_, Ok(2..)) => Ok("trace"),
        _ => Err(invalid(
            text,
            "a log level",
            "write debug, info, warn, error, panic or a number from 1 to 255",
        )),
    }
}

/// Parses an encoder of Zap.
pub(super) fn encoder(text: &str) -> Result<LogFormat, String> {
    match text {
        "json" => Ok(LogFormat::Json),
        "console" => Ok(LogFormat::Text),
        _ => Err(invalid(text, "an encoder", "write json or console")),
    }
}
