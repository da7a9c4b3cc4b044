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

use crate::fault::{ErrorCause, HelmError};
use crate::kinds;
use crate::release::Hook;
use crate::render::{self, Scope};

const OBJECTS_FILE: &str = "sim.json";
const TEMPLATE_FILE: &str = "templates/objects.yaml";
/// Events of hooks. Helm ignores a hook with any other.
const HOOK_EVENTS: [&str; 9] = [
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
        let chart_yaml = format!("apiVersion: v2\nname: {name}\nversion: {version}\n");
        let mut files = vec![
            ("Chart.yaml".to_owned(), chart_yaml),
            (
                "values.yaml".to_owned(),
                format!("{:#}\n", Value::from(self.values.clone())),
            ),
            (
                OBJECTS_FILE.to_owned(),
                format!("{:#}\n", Value::from(self.objects.clone())),
            ),
            (TEMPLATE_FILE.to_owned(), render::template(&self.objects)),
        ];
        for (index, crd) in self.crds.iter().enumerate() {
            files.push((format!("crds/{index:02}.json"), format!("{crd:#}\n")));
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
pub(crate) struct RenderContext<'a> {
    pub(crate) release: &'a str,
    pub(crate) namespace: &'a str,
    pub(crate) revision: u32,
}

/// The objects of a release.
#[derive(Clone, Debug)]
pub(crate) struct RenderedChart {
    pub(crate) manifest: String,
    pub(crate) hooks: Vec<Hook>,
}

impl Chart {
    /// Loads a packaged chart.
    pub(crate) fn load(path: &Path, config: Value) -> Result<Self, HelmError> {
        let files = unpack(path).map_err(HelmError::from_error)?;
        let find = |name: &str| {
            let file = files.iter().find(|(file, _)| file == name)?;
            String::from_utf8(file.1.clone()).ok()
        };
        let metadata = parse_yaml(
            &find("Chart.yaml").ok_or_else(|| HelmError::new("Chart.yaml file is missing"))?,
        )?;
        let defaults = find("values.yaml").map_or(Ok(json!({})), |text| parse_yaml(&text))?;
        let objects_json = find(OBJECTS_FILE).ok_or_else(|| HelmError {
            message: format!(
                "the chart has no {OBJECTS_FILE}, and the simulated Helm renders no templates"
            ),
            cause: ErrorCause::NotModelled,
        })?;
        let objects: Vec<Value> =
            serde_json::from_str(&objects_json).map_err(HelmError::from_error)?;
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
            stored: stored_chart(&metadata, &defaults, &files),
            objects,
            values,
            config,
        })
    }

    /// Returns the objects for a release.
    pub(crate) fn render(&self, context: RenderContext<'_>) -> Result<RenderedChart, HelmError> {
        let scope = Scope {
            release: context.release,
            namespace: context.namespace,
            revision: context.revision,
            chart_version: &self.version,
            values: &self.values,
        };
        let path = format!("{}/{TEMPLATE_FILE}", self.name);
        let mut objects: Vec<(String, String)> = Vec::new();
        let mut hooks = Vec::new();
        for object in &self.objects {
            let text = render::document(object, scope).map_err(|reason| {
                HelmError::new(format!("execution error at ({path}:1:1): {reason}"))
            })?;
            let Some(text) = text else { continue };
            let parsed = manifest::read(&text).0.pop().unwrap_or_default();
            let kind = parsed["kind"].as_str().unwrap_or_default().to_owned();
            match parsed["metadata"]["annotations"]["helm.sh/hook"].as_str() {
                Some(events) => hooks.extend(parse_hook(&parsed, events, &path, text)),
                None => objects.push((kind, text)),
            }
        }
        hooks.sort_by(|one, other| kinds::install_order(&one.kind, &other.kind));
        objects.sort_by(|one, other| kinds::install_order(&one.0, &other.0));
        let objects = objects
            .iter()
            .map(|(_, text)| format!("---\n# Source: {path}\n{text}\n"));
        Ok(RenderedChart {
            manifest: objects.collect(),
            hooks,
        })
    }
}

fn parse_hook(object: &Value, events: &str, path: &str, manifest: String) -> Option<Hook> {
    let split = |text: &str| -> Vec<String> {
        let words = text.split(',');
        words.map(|word| word.trim().to_lowercase()).collect()
    };
    let annotation = |name: &str| object["metadata"]["annotations"][name].as_str();
    let events = split(events);
    let are_known = events
        .iter()
        .all(|event| HOOK_EVENTS.contains(&event.as_str()));
    let weight = annotation("helm.sh/hook-weight").and_then(|weight| weight.parse().ok());
    let policies = annotation("helm.sh/hook-delete-policy").map(split);
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    are_known.then(|| Hook {
        name: text(&object["metadata"]["name"]),
        kind: text(&object["kind"]),
        path: path.to_owned(),
        manifest,
        events,
        weight: weight.unwrap_or_default(),
        delete_policies: policies.unwrap_or_default(),
        ..Hook::default()
    })
}

fn unpack(path: &Path) -> io::Result<Vec<(String, Vec<u8>)>> {
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

fn parse_yaml(text: &str) -> Result<Value, HelmError> {
    let (mut documents, unread) = manifest::read(text);
    if unread > 0 {
        return Err(HelmError::new(
            "cannot load the chart: error converting YAML to JSON",
        ));
    }
    Ok(documents.pop().unwrap_or_else(|| json!({})))
}

/// Merges values into defaults. A null removes a default.
fn coalesce(defaults: &mut Value, overrides: &Value) {
    let (Value::Object(defaults), Value::Object(overrides)) = (defaults, overrides) else {
        return;
    };
    for (key, value) in overrides {
        match defaults.get_mut(key) {
            _ if value.is_null() => drop(defaults.remove(key)),
            Some(default) if default.is_object() && value.is_object() => coalesce(default, value),
            _ => drop(defaults.insert(key.clone(), value.clone())),
        }
    }
}

fn stored_chart(metadata: &Value, values: &Value, files: &[(String, Vec<u8>)]) -> Value {
    let encode_files = |is_wanted: &dyn Fn(&str) -> bool| -> Vec<Value> {
        files
            .iter()
            .filter(|(file, _)| is_wanted(file))
            .map(|(file, bytes)| json!({ "name": file, "data": STANDARD.encode(bytes) }))
            .collect()
    };
    let is_template = |file: &str| file.starts_with("templates/");
    let is_metadata = |file: &str| ["Chart.yaml", "values.yaml"].contains(&file);
    json!({
        "metadata": metadata,
        "lock": null,
        "templates": encode_files(&is_template),
        "values": values,
        "schema": null,
        "files": encode_files(&|file| !is_template(file) && !is_metadata(file)),
    })
}
