//! Chart values from ConfigMaps and Secrets in the hub's namespace: references, readings, and the merge of
//! their layers into a chart state. Performs no I/O.

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use krypton_crds::edge_cluster::{EdgeClusterSpec, ValuesKind, ValuesReference};
use krypton_types::conditions::{State, Truth, reason};
use krypton_types::desired::{ChartState, Confidential};
use krypton_types::names;
use krypton_types::values::{self, lay_over};
use serde_json::{Map, Value};
use thiserror::Error;

/// The default key, as in Flux.
const DEFAULT_KEY: &str = "values.yaml";

/// One key of one object.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Place {
    pub kind: ValuesKind,
    pub name: String,
    pub key: String,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}, key {}", word(self.kind), self.name, self.key)
    }
}

pub(crate) fn word(kind: ValuesKind) -> &'static str {
    match kind {
        ValuesKind::ConfigMap => "ConfigMap",
        ValuesKind::Secret => "Secret",
    }
}

/// A place to read values from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Source {
    pub place: Place,
    /// Whether the object or key may be missing.
    pub optional: bool,
}

/// A text that doesn't name a source.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error(
    "write configmap/NAME, configmap/NAME/KEY or the same with secret; with ? at the end, it may be missing"
)]
pub struct NotASource;

impl FromStr for Source {
    type Err = NotASource;

    fn from_str(text: &str) -> Result<Self, NotASource> {
        let (text, optional) = match text.strip_suffix('?') {
            Some(text) => (text, true),
            None => (text, false),
        };
        let (kind, object) = text.split_once('/').ok_or(NotASource)?;
        let kind = match kind {
            "configmap" => ValuesKind::ConfigMap,
            "secret" => ValuesKind::Secret,
            _ => return Err(NotASource),
        };
        let (name, key) = object.split_once('/').unwrap_or((object, DEFAULT_KEY));
        let legal = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
        let is_key = !key.is_empty() && key.len() <= 253 && key.chars().all(legal);
        if !names::is_dns_subdomain(name) || !is_key {
            return Err(NotASource);
        }
        Ok(Self {
            place: Place {
                kind,
                name: name.to_owned(),
                key: key.to_owned(),
            },
            optional,
        })
    }
}

impl Source {
    /// # Errors
    ///
    /// If the reference contains an invalid object name. The name becomes part of a URL.
    pub fn of(reference: &ValuesReference) -> Result<Self, Problem> {
        let key = reference.values_key.as_deref().unwrap_or(DEFAULT_KEY);
        let place = Place {
            kind: reference.kind,
            name: reference.name.clone(),
            key: key.to_owned(),
        };
        if !names::is_dns_subdomain(&place.name) {
            let what = format!(
                "spec.valuesFrom: {:?} is not a valid object name",
                place.name
            );
            return Err(Problem::Invalid { place, what });
        }
        Ok(Self {
            place,
            optional: reference.optional,
        })
    }
}

/// The reading of one place.
#[derive(Clone, Debug, PartialEq)]
pub enum Reading {
    Values(Arc<Map<String, Value>>),
    /// The object or the key doesn't exist.
    Missing(String),
    /// The content is not valid values, or must not be used as values.
    Invalid(String),
    /// The place has never been read successfully.
    Unread(String),
}

/// The readings of all requested places.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Readings {
    pub by_place: BTreeMap<Place, Reading>,
    /// The fleet's salt, once it is known.
    pub salt: Option<Arc<str>>,
}

/// Why the values are unavailable. Never contains values.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum Problem {
    /// Not an error yet.
    #[error("{0} has not been read yet")]
    NotYet(Place),
    #[error("{what}; make it, or mark the reference as optional")]
    Missing { place: Place, what: String },
    #[error("{what}; correct it")]
    Invalid { place: Place, what: String },
    #[error("{what}; retrying")]
    Unread { place: Place, what: String },
    #[error("all values together are {0} bytes as JSON, more than {most}; shorten them", most = values::MOST_BYTES)]
    TooLarge(usize),
}

impl Problem {
    pub fn reason(&self) -> &'static str {
        match self {
            Self::NotYet(_) | Self::Unread { .. } => reason::VALUES_UNREAD,
            Self::Missing { .. } => reason::VALUES_MISSING,
            Self::Invalid { .. } => reason::VALUES_INVALID,
            Self::TooLarge(_) => reason::VALUES_TOO_LARGE,
        }
    }

    /// The object that the problem concerns.
    pub fn place(&self) -> Option<&Place> {
        match self {
            Self::NotYet(place)
            | Self::Missing { place, .. }
            | Self::Invalid { place, .. }
            | Self::Unread { place, .. } => Some(place),
            Self::TooLarge(_) => None,
        }
    }

    /// Converts the problem to a condition. `meanwhile` describes the effect on the member.
    pub fn state(&self, meanwhile: &str) -> State {
        State::new(Truth::False, self.reason(), format!("{self} ({meanwhile})"))
    }
}

/// One layer of values.
#[derive(Clone, Copy, Debug)]
enum Layer<'a> {
    From(&'a Source),
    Inline(&'a Map<String, Value>),
}

/// Builds the fleet's chart state: the values file, overridden by the sources in order. `installCRDs`
/// overrides both.
///
/// # Errors
///
/// If a source is unavailable.
pub fn fleet(
    mut chart: ChartState,
    sources: &[Source],
    readings: &Readings,
) -> Result<ChartState, Problem> {
    let layers: Vec<_> = sources.iter().map(Layer::From).collect();
    let lay = |chart: &mut ChartState, over: &Map<String, Value>| lay_over(&mut chart.values, over);
    laid(&mut chart, &layers, readings, lay)?;
    Ok(chart)
}

/// Whether the member has its own values.
pub fn has_own(spec: &EdgeClusterSpec) -> bool {
    !spec.values_from.is_empty() || spec.values.as_ref().is_some_and(|own| !own.is_empty())
}

/// Builds the member's chart state. Its sources override the fleet's values, and the inline values of the
/// EdgeCluster override both.
///
/// # Errors
///
/// If a source is unavailable, or the values are too large.
pub fn member(
    fleet: &ChartState,
    spec: &EdgeClusterSpec,
    readings: &Readings,
) -> Result<ChartState, Problem> {
    let sources = spec.values_from.iter().map(Source::of);
    let sources: Vec<Source> = sources.collect::<Result<_, _>>()?;
    let layers: Vec<_> = sources
        .iter()
        .map(Layer::From)
        .chain(spec.values.as_ref().map(Layer::Inline))
        .collect();
    let mut chart = fleet.clone();
    let lay = |chart: &mut ChartState, over: &Map<String, Value>| *chart = chart.overlaid(over);
    laid(&mut chart, &layers, readings, lay)?;
    Ok(chart)
}

/// Merges the layers into the chart's values in order. The order matters where a layer replaces a map with
/// another type.
fn laid(
    chart: &mut ChartState,
    layers: &[Layer<'_>],
    readings: &Readings,
    lay: impl Fn(&mut ChartState, &Map<String, Value>),
) -> Result<(), Problem> {
    let mut secret: Vec<Arc<Map<String, Value>>> = Vec::new();
    for layer in layers {
        match layer {
            Layer::Inline(own) => lay(chart, own),
            Layer::From(source) => {
                let Some(found) = found(source, readings)? else {
                    continue;
                };
                lay(chart, &found);
                if source.place.kind == ValuesKind::Secret && !found.is_empty() {
                    secret.push(found);
                }
                if source.place.kind == ValuesKind::Secret && readings.salt.is_none() {
                    return Err(Problem::NotYet(source.place.clone()));
                }
            }
        }
    }
    let before = chart.confidential.take();
    let mut paths: Vec<String> = before
        .iter()
        .flat_map(|before| &before.paths)
        .filter(|path| values::at(&chart.values, path).is_some())
        .cloned()
        .collect();
    for layer in &secret {
        paths.append(&mut values::places(layer, &chart.values));
    }
    paths.sort_unstable();
    paths.dedup();
    let size = values::size(&chart.values) + paths.iter().map(|path| path.len() + 3).sum::<usize>();
    let own = readings.salt.as_deref().filter(|_| !secret.is_empty());
    let salt = before.map(|before| before.salt);
    let salt = salt.or_else(|| own.map(str::to_owned));
    chart.confidential = salt.map(|salt| Confidential { salt, paths });
    if size > values::MOST_BYTES {
        return Err(Problem::TooLarge(size));
    }
    Ok(())
}

fn found(source: &Source, readings: &Readings) -> Result<Option<Arc<Map<String, Value>>>, Problem> {
    let place = source.place.clone();
    match readings.by_place.get(&place).cloned() {
        None => Err(Problem::NotYet(place)),
        Some(Reading::Values(values)) => Ok(Some(values)),
        Some(Reading::Missing(_)) if source.optional => Ok(None),
        Some(Reading::Missing(what)) => Err(Problem::Missing { place, what }),
        Some(Reading::Invalid(what)) => Err(Problem::Invalid { place, what }),
        Some(Reading::Unread(what)) => Err(Problem::Unread { place, what }),
    }
}
