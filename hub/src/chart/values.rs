//! Values of the chart out of ConfigMaps and Secrets in the hub's namespace: how one is named, what is known
//! of it, and how layers of them become one chart state. No I/O here.

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

/// The key where none is named, as in Flux.
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

/// A place that values are to come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Source {
    pub place: Place,
    /// Whether it may be missing.
    pub optional: bool,
}

/// A text that names no source.
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
    /// When it names no object: whatever is asked for becomes part of a URL.
    pub fn of(reference: &ValuesReference) -> Result<Self, Problem> {
        let key = reference.values_key.as_deref().unwrap_or(DEFAULT_KEY);
        let place = Place {
            kind: reference.kind,
            name: reference.name.clone(),
            key: key.to_owned(),
        };
        if !names::is_dns_subdomain(&place.name) {
            let what = format!("spec.valuesFrom: {:?} is no name of an object", place.name);
            return Err(Problem::Invalid { place, what });
        }
        Ok(Self {
            place,
            optional: reference.optional,
        })
    }
}

/// What one place was found to hold.
#[derive(Clone, Debug, PartialEq)]
pub enum Reading {
    Values(Arc<Map<String, Value>>),
    /// There is no such object, or it lacks the key.
    Missing(String),
    /// What is there is no values, or is not to be read as such.
    Invalid(String),
    /// It could not be read, and never was before.
    Unread(String),
}

/// What is known of all places that were asked for.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Readings {
    pub by_place: BTreeMap<Place, Reading>,
    /// The fleet's, once it is known.
    pub salt: Option<Arc<str>>,
}

/// Why the values cannot be had. Never holds any of them.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum Problem {
    /// Nothing is wrong yet.
    #[error("{0} has not been read yet")]
    NotYet(Place),
    #[error("{what}; make it, or mark the reference as optional")]
    Missing { place: Place, what: String },
    #[error("{what}; correct it")]
    Invalid { place: Place, what: String },
    #[error("{what}; it is tried again")]
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

    /// The object it is about.
    pub fn place(&self) -> Option<&Place> {
        match self {
            Self::NotYet(place)
            | Self::Missing { place, .. }
            | Self::Invalid { place, .. }
            | Self::Unread { place, .. } => Some(place),
            Self::TooLarge(_) => None,
        }
    }

    /// As a condition, with what becomes of the member meanwhile.
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

/// The fleet's chart state: the values of the file, and over them those of the sources. `installCRDs` is over
/// both, where it has always been over the file.
///
/// # Errors
/// When a source cannot be had.
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

/// Whether the member has values of its own.
pub fn has_own(spec: &EdgeClusterSpec) -> bool {
    !spec.values_from.is_empty() || spec.values.as_ref().is_some_and(|own| !own.is_empty())
}

/// The member's chart state: over the fleet's the values of its sources, over them those in the EdgeCluster
/// itself.
///
/// # Errors
/// When a source cannot be had, or all of it is too much.
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

/// Lays them over the chart's values one by one: where a map gives way to something else in between, the
/// result depends on it.
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
