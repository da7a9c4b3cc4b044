//! Test charts: a builder, and the part of a chart that the simulated Helm reads.
//!
//! A test chart lists its objects and hooks in `sim.json`. Strings in it contain variables: `$RELEASE`,
//! `$NAMESPACE`, `$REVISION`, `$CHART_VERSION` and `$values.a.b`. A field whose value is absent is omitted. An
//! object with `"$when": "values.a"` exists if the value is true, and one with `"$fail": "text"` fails the
//! rendering. The template for Helm is generated from the same list.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use flate2::Compression;
use flate2::read::GzDecoder;
use flate2::write::GzEncoder;
use krypton_helm::releases::manifest;
use serde_json::{Map, Value, json};

use crate::fault::{Cause, Fault};
use crate::kinds;
use crate::release::Hook;
use crate::render::{self, Scope};

const OBJECTS: &str = "sim.json";
const TEMPLATE: &str = "templates/objects.yaml";
/// Events of hooks. Helm ignores a hook with any other.
const EVENTS: [&str; 9] = [
    "pre-install",
    "post-install",
    "pre-delete",
    "post-delete",
    "pre-upgrade",
    "post-upgrade",
    "pre-rollback",
    "post-rollback",
    "test",
];

/// A chart for Helm and the simulated Helm.
#[derive(Clone, Debug)]
pub struct TestChart {
    pub name: String,
    pub version: String,
    /// Default values.
    pub values: Map<String, Value>,
    /// Objects and hooks, with variables.
    pub objects: Vec<Value>,
    /// CustomResourceDefinitions of the folder `crds`, without variables.
    pub crds: Vec<Value>,
}

impl TestChart {
    pub fn new(name: &str, version: &str) -> Self {
        Self {
            name: name.to_owned(),
            version: version.to_owned(),
            values: Map::new(),
            objects: Vec::new(),
            crds: Vec::new(),
        }
    }

    /// Adds an object or hook.
    #[must_use]
    pub fn object(mut self, object: Value) -> Self {
        self.objects.push(object);
        self
    }

    /// Adds a CustomResourceDefinition.
    #[must_use]
    pub fn crd(mut self, crd: Value) -> Self {
        self.crds.push(crd);
        self
    }

    /// Sets a default value.
    #[must_use]
    pub fn value(mut self, name: &str, value: Value) -> Self {
        self.values.insert(name.to_owned(), value);
        self
    }

    /// Writes the packaged chart to a file.
    ///
    /// # Errors
    /// Returns an error if the file cannot be written.
    pub fn to_tgz(&self, path: &Path) -> io::Result<()> {
        std::fs::write(path, self.to_bytes()?)
    }

    /// Returns the packaged chart. Equal charts give equal bytes.
    ///
    /// # Errors
    /// Returns an error if the chart cannot be packaged.
    pub fn to_bytes(&self) -> io::Result<Vec<u8>> {
        let gzip = GzEncoder::new(Vec::new(), Compression::fast());
        let mut archive = tar::Builder::new(gzip);
        let (name, version) = (&self.name, &self.version);
        let about = format!("apiVersion: v2\nname: {name}\nversion: {version}\n");
        let mut files = vec![
            ("Chart.yaml".to_owned(), about),
            (
                "values.yaml".to_owned(),
                format!("{:#}\n", Value::from(self.values.clone())),
            ),
            (
                OBJECTS.to_owned(),
                format!("{:#}\n", Value::from(self.objects.clone())),
            ),
            (TEMPLATE.to_owned(), render::template(&self.objects)),
        ];
        for (at, crd) in self.crds.iter().enumerate() {
            files.push((format!("crds/{at:02}.json"), format!("{crd:#}\n")));
        }
        for (file, text) in files {
            let mut header = tar::Header::new_gnu();
            header.set_size(text.len() as u64);
            header.set_mode(0o644);
            archive.append_data(&mut header, format!("{name}/{file}"), text.as_bytes())?;
        }
        archive.into_inner()?.finish()
    }
}

/// A loaded chart with the values of a run.
#[derive(Clone, Debug)]
pub(crate) struct Chart {
    name: String,
    version: String,
    objects: Vec<Value>,
    values: Value,
    /// Files of the folder `crds`, by name.
    pub(crate) crds: Vec<(String, String)>,
    /// The values of the run alone.
    pub(crate) config: Value,
    /// The chart as Helm stores it in a release.
    pub(crate) stored: Value,
}

/// Release to render for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place<'a> {
    pub(crate) release: &'a str,
    pub(crate) namespace: &'a str,
    pub(crate) revision: u32,
}

/// The objects of a release.
#[derive(Clone, Debug)]
pub(crate) struct Rendered {
    pub(crate) manifest: String,
    pub(crate) hooks: Vec<Hook>,
}

impl Chart {
    /// Loads a packaged chart.
    pub(crate) fn load(path: &Path, config: Value) -> Result<Self, Fault> {
        let failed = |error: &dyn std::fmt::Display| Fault::new(error.to_string());
        let files = unpacked(path).map_err(|error| failed(&error))?;
        let find = |name: &str| {
            let file = files.iter().find(|(file, _)| file == name)?;
            String::from_utf8(file.1.clone()).ok()
        };
        let metadata =
            yaml(&find("Chart.yaml").ok_or_else(|| failed(&"Chart.yaml file is missing"))?)?;
        let defaults = find("values.yaml").map_or(Ok(json!({})), |text| yaml(&text))?;
        let list = find(OBJECTS).ok_or_else(|| Fault {
            text: format!(
                "the chart has no {OBJECTS}, and the simulated Helm renders no templates"
            ),
            cause: Cause::NotModelled,
        })?;
        let objects: Vec<Value> = serde_json::from_str(&list).map_err(|error| failed(&error))?;
        let text = |field: &str| metadata[field].as_str().unwrap_or_default().to_owned();
        let mut values = defaults.clone();
        coalesce(&mut values, &config);
        let crds = files
            .iter()
            .filter(|(file, _)| file.starts_with("crds/"))
            .map(|(file, bytes)| (file.clone(), String::from_utf8_lossy(bytes).into_owned()));
        Ok(Self {
            name: text("name"),
            version: text("version"),
            crds: crds.collect(),
            stored: stored(&metadata, &defaults, &files),
            objects,
            values,
            config,
        })
    }

    /// Returns the objects for a release.
    pub(crate) fn render(&self, place: Place<'_>) -> Result<Rendered, Fault> {
        let scope = Scope {
            release: place.release,
            namespace: place.namespace,
            revision: place.revision,
            chart_version: &self.version,
            values: &self.values,
        };
        let path = format!("{}/{TEMPLATE}", self.name);
        let mut plain: Vec<(String, String)> = Vec::new();
        let mut hooks = Vec::new();
        for object in &self.objects {
            let text = render::document(object, scope)
                .map_err(|why| Fault::new(format!("execution error at ({path}:1:1): {why}")))?;
            let Some(text) = text else { continue };
            let head = manifest::read(&text).0.pop().unwrap_or_default();
            let kind = head["kind"].as_str().unwrap_or_default().to_owned();
            match head["metadata"]["annotations"]["helm.sh/hook"].as_str() {
                Some(events) => hooks.extend(hook(&head, events, &path, text)),
                None => plain.push((kind, text)),
            }
        }
        hooks.sort_by(|one, other| kinds::install_order(&one.kind, &other.kind));
        plain.sort_by(|one, other| kinds::install_order(&one.0, &other.0));
        let plain = plain
            .iter()
            .map(|(_, text)| format!("---\n# Source: {path}\n{text}\n"));
        Ok(Rendered {
            manifest: plain.collect(),
            hooks,
        })
    }
}

fn hook(head: &Value, events: &str, path: &str, manifest: String) -> Option<Hook> {
    let split = |text: &str| -> Vec<String> {
        let words = text.split(',');
        words.map(|word| word.trim().to_lowercase()).collect()
    };
    let annotation = |name: &str| head["metadata"]["annotations"][name].as_str();
    let events = split(events);
    let known = events.iter().all(|event| EVENTS.contains(&event.as_str()));
    let weight = annotation("helm.sh/hook-weight").and_then(|weight| weight.parse().ok());
    let policies = annotation("helm.sh/hook-delete-policy").map(split);
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    known.then(|| Hook {
        name: text(&head["metadata"]["name"]),
        kind: text(&head["kind"]),
        path: path.to_owned(),
        manifest,
        events,
        weight: weight.unwrap_or_default(),
        delete_policies: policies.unwrap_or_default(),
        ..Hook::default()
    })
}

fn unpacked(path: &Path) -> io::Result<Vec<(String, Vec<u8>)>> {
    let mut archive = tar::Archive::new(GzDecoder::new(File::open(path)?));
    let mut files = Vec::new();
    for entry in archive.entries()? {
        let mut entry = entry?;
        let name = entry.path()?.to_string_lossy().into_owned();
        let mut bytes = Vec::new();
        entry.read_to_end(&mut bytes)?;
        if let Some((_, file)) = name.split_once('/') {
            files.push((file.to_owned(), bytes));
        }
    }
    Ok(files)
}

fn yaml(text: &str) -> Result<Value, Fault> {
    let (mut documents, unread) = manifest::read(text);
    if unread > 0 {
        return Err(Fault::new(
            "cannot load the chart: error converting YAML to JSON",
        ));
    }
    Ok(documents.pop().unwrap_or_else(|| json!({})))
}

/// Lays values over defaults. A null removes a default.
fn coalesce(defaults: &mut Value, over: &Value) {
    let (Value::Object(defaults), Value::Object(over)) = (defaults, over) else {
        return;
    };
    for (key, value) in over {
        match defaults.get_mut(key) {
            _ if value.is_null() => drop(defaults.remove(key)),
            Some(inner) if inner.is_object() && value.is_object() => coalesce(inner, value),
            _ => drop(defaults.insert(key.clone(), value.clone())),
        }
    }
}

fn stored(metadata: &Value, values: &Value, files: &[(String, Vec<u8>)]) -> Value {
    let chosen = |wanted: &dyn Fn(&str) -> bool| -> Vec<Value> {
        let chosen = files.iter().filter(|(file, _)| wanted(file));
        chosen
            .map(|(file, bytes)| json!({ "name": file, "data": STANDARD.encode(bytes) }))
            .collect()
    };
    let is_template = |file: &str| file.starts_with("templates/");
    let is_own = |file: &str| ["Chart.yaml", "values.yaml"].contains(&file);
    json!({
        "metadata": metadata,
        "lock": null,
        "templates": chosen(&is_template),
        "values": values,
        "schema": null,
        "files": chosen(&|file| !is_template(file) && !is_own(file)),
    })
}
