//! Chart values from ConfigMaps and Secrets in the hub's namespace: references, readings, and the merge of
//! their layers into a chart state. Performs no I/O.

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use krypton_crds::edge_cluster::{EdgeClusterSpec, ValuesKind, ValuesReference};
use krypton_types::conditions::{State, Truth, reason};
use krypton_types::desired::{ChartState, Confidential};
use krypton_types::names;
use krypton_types::values::{self, merge};
use serde_json::{Map, Value};
use thiserror::Error;

/// The default key, as in Flux.
const DEFAULT_KEY: &str = "values.yaml";

/// One key of one object.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ValuesLocation {
    pub kind: ValuesKind,
    pub name: String,
    pub key: String,
}

impl fmt::Display for ValuesLocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} {}, key {}",
            kind_name(self.kind),
            self.name,
            self.key
        )
    }
}

pub(crate) fn kind_name(kind: ValuesKind) -> &'static str {
    match kind {
        ValuesKind::ConfigMap => "ConfigMap",
        ValuesKind::Secret => "Secret",
    }
}

/// A location to read values from, and whether it must exist.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ValuesSource {
    pub location: ValuesLocation,
    /// Whether the object or key may be missing.
    pub optional: bool,
}

impl ValuesSource {
    /// Parses `configmap/NAME` or `secret/NAME`, with `/KEY` after it, and with `?` if it may be missing.
    pub fn parse(text: &str) -> Option<Self> {
        let (text, optional) = match text.strip_suffix('?') {
            Some(text) => (text, true),
            None => (text, false),
        };
        let (kind, object) = text.split_once('/')?;
        let kind = match kind {
            "configmap" => ValuesKind::ConfigMap,
            "secret" => ValuesKind::Secret,
            _ => return None,
        };
        let (name, key) = object.split_once('/').unwrap_or((object, DEFAULT_KEY));
        (names::is_dns_subdomain(name) && names::is_data_key(key)).then(|| Self {
            location: ValuesLocation {
                kind,
                name: name.to_owned(),
                key: key.to_owned(),
            },
            optional,
        })
    }

    /// # Errors
    ///
    /// If the reference contains an invalid object name. The name becomes part of a URL.
    pub fn from_reference(reference: &ValuesReference) -> Result<Self, ValuesProblem> {
        let key = reference.values_key.as_deref().unwrap_or(DEFAULT_KEY);
        let location = ValuesLocation {
            kind: reference.kind,
            name: reference.name.clone(),
            key: key.to_owned(),
        };
        if !names::is_dns_subdomain(&location.name) {
            let message = format!(
                "spec.valuesFrom: {:?} is not a valid object name",
                location.name
            );
            return Err(ValuesProblem::Invalid { location, message });
        }
        Ok(Self {
            location,
            optional: reference.optional,
        })
    }
}

/// The last reading of one location.
#[derive(Clone, Debug, PartialEq)]
pub enum ValuesReading {
    Values(Arc<Map<String, Value>>),
    /// The object or the key doesn't exist.
    Missing(String),
    /// The content is not valid values, or must not be used as values.
    Invalid(String),
    /// The location has never been read successfully.
    Unread(String),
}

/// The readings of all requested locations.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ValuesReadings {
    pub by_location: BTreeMap<ValuesLocation, ValuesReading>,
    /// The fleet's salt, once it is known.
    pub salt: Option<Arc<str>>,
}

/// Why the values are unavailable. Never contains values.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum ValuesProblem {
    /// Not an error yet.
    #[error("{0} has not been read yet")]
    NotYet(ValuesLocation),
    #[error("{message}; create it, or mark the reference as optional")]
    Missing {
        location: ValuesLocation,
        message: String,
    },
    #[error("{message}; correct it")]
    Invalid {
        location: ValuesLocation,
        message: String,
    },
    #[error("{message}; retrying")]
    Unread {
        location: ValuesLocation,
        message: String,
    },
    #[error("all values together are {0} bytes as JSON, more than {most}; shorten them", most = values::MAX_BYTES)]
    TooLarge(usize),
}

impl ValuesProblem {
    pub fn reason(&self) -> &'static str {
        match self {
            Self::NotYet(_) | Self::Unread { .. } => reason::VALUES_UNREAD,
            Self::Missing { .. } => reason::VALUES_MISSING,
            Self::Invalid { .. } => reason::VALUES_INVALID,
            Self::TooLarge(_) => reason::VALUES_TOO_LARGE,
        }
    }

    /// The object that the problem concerns.
    pub fn location(&self) -> Option<&ValuesLocation> {
        match self {
            Self::NotYet(location)
            | Self::Missing { location, .. }
            | Self::Invalid { location, .. }
            | Self::Unread { location, .. } => Some(location),
            Self::TooLarge(_) => None,
        }
    }

    /// Converts the problem to a condition. `effect` describes the effect on the member.
    pub fn state(&self, effect: &str) -> State {
        State::new(Truth::False, self.reason(), format!("{self} ({effect})"))
    }
}

/// Builds the fleet's chart state: the values file, overridden by the sources in order. `installCRDs`
/// overrides both.
///
/// # Errors
///
/// If a source is unavailable.
pub fn for_fleet(
    mut chart: ChartState,
    sources: &[ValuesSource],
    readings: &ValuesReadings,
) -> Result<ChartState, ValuesProblem> {
    let merge =
        |chart: &mut ChartState, layer: &Map<String, Value>| merge(&mut chart.values, layer);
    merge_layers(&mut chart, sources, None, readings, merge)?;
    Ok(chart)
}

/// Whether the member has its own values.
pub fn has_own_values(spec: &EdgeClusterSpec) -> bool {
    !spec.values_from.is_empty() || spec.values.as_ref().is_some_and(|own| !own.is_empty())
}

/// Builds the member's chart state. Its sources override the fleet's values, and the inline values of the
/// EdgeCluster override both.
///
/// # Errors
///
/// If a source is unavailable, or the values are too large.
pub fn for_member(
    fleet: &ChartState,
    spec: &EdgeClusterSpec,
    readings: &ValuesReadings,
) -> Result<ChartState, ValuesProblem> {
    let sources = spec.values_from.iter().map(ValuesSource::from_reference);
    let sources: Vec<ValuesSource> = sources.collect::<Result<_, _>>()?;
    let mut chart = fleet.clone();
    let merge = |chart: &mut ChartState, layer: &Map<String, Value>| *chart = chart.overlaid(layer);
    merge_layers(&mut chart, &sources, spec.values.as_ref(), readings, merge)?;
    Ok(chart)
}

/// Merges the sources into the chart's values in order, and then the inline values. The order matters where a
/// layer replaces a map with another type.
fn merge_layers(
    chart: &mut ChartState,
    sources: &[ValuesSource],
    inline: Option<&Map<String, Value>>,
    readings: &ValuesReadings,
    merge: impl Fn(&mut ChartState, &Map<String, Value>),
) -> Result<(), ValuesProblem> {
    let mut secret_layers: Vec<Arc<Map<String, Value>>> = Vec::new();
    for source in sources {
        let Some(values) = read_source(source, readings)? else {
            continue;
        };
        merge(chart, &values);
        if source.location.kind == ValuesKind::Secret {
            if readings.salt.is_none() {
                return Err(ValuesProblem::NotYet(source.location.clone()));
            }
            if !values.is_empty() {
                secret_layers.push(values);
            }
        }
    }
    if let Some(inline) = inline {
        merge(chart, inline);
    }
    let fleet_confidential = chart.confidential.take();
    let mut paths: Vec<String> = fleet_confidential
        .iter()
        .flat_map(|confidential| &confidential.paths)
        .filter(|path| values::value_at(&chart.values, path).is_some())
        .cloned()
        .collect();
    for layer in &secret_layers {
        paths.append(&mut values::pointers_from(layer, &chart.values));
    }
    paths.sort_unstable();
    paths.dedup();
    let size = values::size(&chart.values) + paths.iter().map(|path| path.len() + 3).sum::<usize>();
    let own_salt = readings
        .salt
        .as_deref()
        .filter(|_| !secret_layers.is_empty());
    let salt = fleet_confidential.map(|confidential| confidential.salt);
    let salt = salt.or_else(|| own_salt.map(str::to_owned));
    chart.confidential = salt.map(|salt| Confidential { salt, paths });
    if size > values::MAX_BYTES {
        return Err(ValuesProblem::TooLarge(size));
    }
    Ok(())
}

fn read_source(
    source: &ValuesSource,
    readings: &ValuesReadings,
) -> Result<Option<Arc<Map<String, Value>>>, ValuesProblem> {
    let location = source.location.clone();
    match readings.by_location.get(&location).cloned() {
        None => Err(ValuesProblem::NotYet(location)),
        Some(ValuesReading::Values(values)) => Ok(Some(values)),
        Some(ValuesReading::Missing(_)) if source.optional => Ok(None),
        Some(ValuesReading::Missing(message)) => Err(ValuesProblem::Missing { location, message }),
        Some(ValuesReading::Invalid(message)) => Err(ValuesProblem::Invalid { location, message }),
        Some(ValuesReading::Unread(message)) => Err(ValuesProblem::Unread { location, message }),
    }
}
