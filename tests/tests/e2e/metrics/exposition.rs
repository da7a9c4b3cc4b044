//! Parses the metrics of a process as Prometheus does.

use std::collections::{BTreeMap, BTreeSet};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Counter,
    Gauge,
    Histogram,
    Info,
}

impl Kind {
    /// Suffix of the name in the documentation. A histogram has several, so it shows none.
    pub(super) fn suffix(self) -> &'static str {
        match self {
            Self::Counter => "_total",
            Self::Info => "_info",
            Self::Gauge | Self::Histogram => "",
        }
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Counter => "counter",
            Self::Gauge | Self::Info => "gauge",
            Self::Histogram => "histogram",
        }
    }

    /// Suffixes of the name in samples.
    fn suffixes(self) -> &'static [&'static str] {
        match self {
            Self::Counter => &["_total"],
            Self::Info => &["_info"],
            Self::Gauge => &[""],
            Self::Histogram => &["_bucket", "_sum", "_count"],
        }
    }
}

#[derive(Debug)]
pub(super) struct Family {
    pub(super) kind: Kind,
    pub(super) unit: Option<String>,
    pub(super) help: String,
    /// Labels with all their observed values.
    pub(super) labels: BTreeMap<String, BTreeSet<String>>,
}

#[derive(Debug)]
pub(super) struct Sample {
    pub(super) name: String,
    pub(super) labels: BTreeMap<String, String>,
    pub(super) value: f64,
}

#[derive(Debug, Default)]
pub(super) struct Exposition {
    pub(super) families: BTreeMap<String, Family>,
    pub(super) samples: Vec<Sample>,
}

fn sample(line: &str) -> Sample {
    let (series, value) = line.rsplit_once(' ').unwrap();
    let (name, labels) = series.split_once('{').unwrap_or((series, ""));
    let labels = labels.trim_end_matches('}').split("\",");
    let labels = labels.filter(|pair| !pair.is_empty()).map(|pair| {
        let (label, value) = pair.split_once("=\"").unwrap();
        (label.to_owned(), value.trim_end_matches('"').to_owned())
    });
    Sample {
        name: name.to_owned(),
        labels: labels.collect(),
        value: value.parse().unwrap(),
    }
}

impl Exposition {
    /// Parses these texts as one exposition.
    pub(super) fn parse(texts: &[String]) -> Self {
        let mut this = Self::default();
        for line in texts.iter().flat_map(|text| text.lines()) {
            let Some(about) = line.strip_prefix("# ") else {
                this.take(sample(line));
                continue;
            };
            let mut words = about.splitn(3, ' ');
            let (Some(what), Some(name), Some(text)) = (words.next(), words.next(), words.next())
            else {
                assert_eq!(about, "EOF");
                continue;
            };
            let family = this.families.entry(name.to_owned()).or_insert(Family {
                kind: Kind::Gauge,
                unit: None,
                help: String::new(),
                labels: BTreeMap::new(),
            });
            match (what, text) {
                ("HELP", help) => help.clone_into(&mut family.help),
                ("UNIT", unit) => family.unit = Some(unit.to_owned()),
                ("TYPE", "counter") => family.kind = Kind::Counter,
                ("TYPE", "gauge") => family.kind = Kind::Gauge,
                ("TYPE", "histogram") => family.kind = Kind::Histogram,
                ("TYPE", "info") => family.kind = Kind::Info,
                _ => panic!("{line}"),
            }
        }
        this
    }

    fn take(&mut self, sample: Sample) {
        let name = self.family_name(&sample.name);
        let family = name.and_then(|name| self.families.get_mut(&name));
        let family = family.unwrap_or_else(|| panic!("{} has no type", sample.name));
        for (label, value) in &sample.labels {
            let values = family.labels.entry(label.clone()).or_default();
            values.insert(value.clone());
        }
        self.samples.push(sample);
    }

    fn family_name(&self, sample: &str) -> Option<String> {
        let suffixes = ["", "_total", "_info", "_bucket", "_sum", "_count"];
        suffixes.into_iter().find_map(|suffix| {
            let name = sample.strip_suffix(suffix)?;
            let family = self.families.get(name)?;
            let fits = family.kind.suffixes().contains(&suffix);
            fits.then(|| name.to_owned())
        })
    }

    /// Returns the family of a sample with this name.
    pub(super) fn family_of(&self, sample: &str) -> Option<&Family> {
        self.families.get(&self.family_name(sample)?)
    }

    /// Returns the value of the series with exactly these labels.
    pub(super) fn value(&self, name: &str, labels: &[(&str, &str)]) -> Option<f64> {
        let matching = self.samples.iter().find(|sample| {
            let has_label = |(label, value): &(&str, &str)| {
                sample.labels.get(*label).map(String::as_str) == Some(*value)
            };
            sample.name == name
                && sample.labels.len() == labels.len()
                && labels.iter().all(has_label)
        });
        matching.map(|sample| sample.value)
    }
}
